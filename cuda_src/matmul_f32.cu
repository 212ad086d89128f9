/* matmul_f32: y[M,N] = x[M,K] W[N,K]^T      the small float32 matrices: router, shared-expert gate, GDN a and b
 * x     float[M] rows of K, ldx apart; W float[N][K]; y float[M] rows of N, ldy apart
 * map   grid (ceil(N/64), ceil(M/64)), block 256: a 64 x 64 tile, 4 x 4 values per thread
 * cost  2 M N K flop; reads M K 4 B ceil(N/64) + N K 4 B ceil(M/64)
 * needs K % 16 == 0, ldx % 4 == 0; 8.4 KB shared
 */
#include "matmul_tile.cuh"

extern "C" __global__ void __launch_bounds__(256)
matmul_f32(const float *x, int ldx, const float *w, float *y, int ldy, int m, int n, int k) {
    __shared__ float shared_x[TILE_K][64 + 2];
    __shared__ float shared_w[TILE_K][64 + 2];
    float acc[4][4];
    matmul_accumulate<64, 64, 256, 4, 4, 66, RowMajorLoader<float, 64, 256>, false>(
        acc, shared_x, shared_w, x, ldx, 0, w, 0, blockIdx.y * 64, m, blockIdx.x * 64, n, k);
    matmul_store<64, 64>(acc, y, ldy, 0, block_y_again() * 64, m, block_x_again() * 64, n, 0);
}
