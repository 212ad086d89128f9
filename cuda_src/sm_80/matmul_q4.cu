/* matmul_q4 for tensor cores: arguments, launch and meaning as in ../matmul_q4.cu
 * map   grid (ceil(N/128), ceil(M/64)), block 256: a warp has 32 x 32 of the 64 x 128 tile
 * cost  4 M N K flop of bfloat16; activations are split again by every block of columns
 * needs as there; 16 KB shared
 */
#include "mma_tile.cuh"

extern "C" __global__ void __launch_bounds__(256)
matmul_q4(const float *x, int ldx, const void *w, float *y, int ldy, int m, int n, int k, int accumulate) {
    __shared__ MmaShared<64> shared;
    float acc[2][4][4];
    mma_product<64>(acc, shared, x, ldx, 0, (const unsigned char *)w, blockIdx.y * 64, m, blockIdx.x * 128, n, k);
    mma_store(acc, y, ldy, blockIdx.y * 64, m, blockIdx.x * 128, n, accumulate);
}
