/* matmul_q4: y[M,N] = x[M,K] W[N,K]^T (+ y)      dense projections, W packed 4-bit
 * x     float[M] rows of K, ldx floats apart; y float[M] rows of N, ldy apart; accumulate != 0 adds to y (residual)
 * W     fm_block_q4[N/16][K/64]
 * map   grid (ceil(N/128), ceil(M/64)), block 256: a 64 x 128 tile, 8 x 4 values per thread
 * cost  2 M N K flop; reads M K 4 B ceil(N/128) + N K 0.5625 B ceil(M/64), writes M N 4 B: compute-bound from M = 64;
 *       on sm_20 the loop is 640 instructions for 512 useful FFMA (80 %)
 * needs N % 16 == 0, K % 64 == 0, ldx % 4 == 0, x and W < 4 GiB each; 12.4 KB shared, <= 63 registers
 */
#include "matmul_tile.cuh"

extern "C" __global__ void __launch_bounds__(256)
matmul_q4(const float *x, int ldx, const void *w, float *y, int ldy, int m, int n, int k, int accumulate) {
    __shared__ float shared_x[TILE_K][x_pitch(64)];
    __shared__ float shared_w[TILE_K][128];
    float acc[8][THREAD_COLUMNS];
    matmul_accumulate<64, 128, 256, 8, 128, Q4Loader<128, 256>, false>(
        acc, shared_x, shared_w, x, ldx, 0, w, 0, blockIdx.y * 64, m, blockIdx.x * 128, n, k);
    matmul_store<64, 128>(acc, y, ldy, 0, block_y_again() * 64, m, block_x_again() * 128, n, accumulate);
}
