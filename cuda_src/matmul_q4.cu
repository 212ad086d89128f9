/* matmul_q4: y[M,N] = x[M,K] W[N,K]^T (+ y)      dense projections, W packed 4-bit
 * x     float[M] rows of K, ldx floats apart; y float[M] rows of N, ldy apart; accumulate != 0 adds to y (residual)
 * W     fm_block_q4[N/16][K/64]
 * map   grid (ceil(N/128), ceil(M/64)), block 256: a 64 x 128 tile, 4 x 8 values per thread
 * cost  2 M N K flop; reads M K 4 B ceil(N/128) + N K 0.5625 B ceil(M/64), writes M N 4 B: compute-bound from M = 64
 * needs N % 16 == 0, K % 64 == 0, ldx % 4 == 0; 12.4 KB shared, <= 63 registers
 */
#include "matmul_tile.cuh"

extern "C" __global__ void __launch_bounds__(256)
matmul_q4(const float *x, int ldx, const void *w, float *y, int ldy, int m, int n, int k, int accumulate) {
    __shared__ float shared_x[TILE_K][64 + 2];
    __shared__ float shared_w[TILE_K][128];
    matmul_tile<64, 128, 256, 4, 8, 128, Q4Loader<128, 256> >(shared_x, shared_w, x, ldx, 0, w, y, ldy, 0,
                                                              blockIdx.y * 64, m, blockIdx.x * 128, n, k, k, accumulate);
}
