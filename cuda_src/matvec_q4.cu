/* matvec_q4: y[p][n] = W[n] x[p]      the head on the last position of each sequence (at most 4)
 * x     float[P] rows of K, ldx apart; W fm_block_q4[N/16][K/64]; y float[P][N]
 * map   grid (min(N/16, 65535)), block 128: 16 rows of W; thread = (piece of 8 columns, row), K/64 blocks in turn;
 *       the eight pieces of a row are added in order
 * cost  reads N K 0.5625 B once, 2 P N K flop: bandwidth-bound
 * needs N % 16 == 0, K % 64 == 0, ldx % 4 == 0, P <= 4; 2 KB shared (x comes from the first-level cache)
 */
#include "../simd_src/blocks.h"
#include "fermi.h"

#define MAX_POSITIONS 4

extern "C" __global__ void __launch_bounds__(128)
matvec_q4(const float *x, int ldx, int positions, const unsigned char *w, float *y, int n, int k) {
    __shared__ float partial[MAX_POSITIONS][8][FM_BLOCK_ROWS];
    const int row = threadIdx.x % FM_BLOCK_ROWS, piece = threadIdx.x / FM_BLOCK_ROWS;
    for (int tile = blockIdx.x; tile < n / FM_BLOCK_ROWS; tile += gridDim.x) {
        const unsigned char *block = w + (long long)tile * (k / FM_BLOCK_COLS) * FM_BLOCK_BYTES;
        float acc[MAX_POSITIONS] = {0.0f, 0.0f, 0.0f, 0.0f};
        for (int k0 = piece * 8; k0 < k; k0 += FM_BLOCK_COLS, block += FM_BLOCK_BYTES) {
            const float scale = half_to_float(*(const unsigned short *)(block + piece / 4 * 32 + row * 2));
            const unsigned word = *(const unsigned *)(block + 64 + piece * 64 + row * 4);
            float weight[8];
#pragma unroll
            for (int b = 0; b < 4; ++b) {
                weight[b] = (float)((int)((word >> (8 * b)) & 15u) - FM_Q4_ZERO) * scale;
                weight[4 + b] = (float)((int)((word >> (8 * b + 4)) & 15u) - FM_Q4_ZERO) * scale;
            }
#pragma unroll
            for (int p = 0; p < MAX_POSITIONS; ++p) {
                if (p < positions) {
                    const float4 low = *(const float4 *)(x + p * ldx + k0), high = *(const float4 *)(x + p * ldx + k0 + 4);
                    const float v[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
                    for (int b = 0; b < 8; ++b) acc[p] = fmaf(weight[b], v[b], acc[p]);
                }
            }
        }
#pragma unroll
        for (int p = 0; p < MAX_POSITIONS; ++p) partial[p][piece][row] = acc[p];
        __syncthreads();
        if (piece < positions) {
            float sum = partial[piece][0][row];
#pragma unroll
            for (int i = 1; i < 8; ++i) sum += partial[piece][i][row];
            y[(long long)piece * n + tile * FM_BLOCK_ROWS + row] = sum;
        }
        __syncthreads();
    }
}
