/* matmul_f16: y[M,N] = x[M,K] W[N,K]^T + bias (+ y)      the vision tower: patch embedding, attention, MLP, merger
 * x     float[M] rows of K, ldx apart; W half[N][K]; bias float[N] or null; y float[M] rows of N, ldy apart
 * map   grid (ceil(N/128), ceil(M/64)), block 256: a 64 x 128 tile, 8 x 4 values per thread
 * cost  2 M N K flop; reads M K 4 B ceil(N/128) + N K 2 B ceil(M/64)
 * needs K % 16 == 0, ldx % 4 == 0; 12.7 KB shared
 */
#include "matmul_tile.cuh"

extern "C" __global__ void __launch_bounds__(256)
matmul_f16(const float *x, int ldx, const unsigned short *w, const float *bias, float *y, int ldy, int m, int n, int k,
           int accumulate) {
    __shared__ float shared_x[TILE_K][x_pitch(64)];
    __shared__ float shared_w[TILE_K][128 + 4];
    float acc[8][THREAD_COLUMNS];
    matmul_accumulate<64, 128, 256, 8, 132, RowMajorLoader<unsigned short, 128, 256>, true>(
        acc, shared_x, shared_w, x, ldx, 0, w, 0, blockIdx.y * 64, m, blockIdx.x * 128, n, k);
    matmul_store<64, 128>(acc, y, ldy, bias, block_y_again() * 64, m, block_x_again() * 128, n, accumulate);
}
