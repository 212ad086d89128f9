/* embed_q4: y[t] = E[ids[t]]      embedding rows out of the packed table
 * E     fm_block_q4[V/16][K/64]; ids int[T]; y float[T][K]
 * map   grid (ceil(K/512), T), block 64: a thread unpacks one 32-bit word, eight columns
 * cost  reads T K 0.5625 B (in 4 B pieces), writes T K 4 B
 * needs K % 64 == 0, T <= 65535; no shared memory
 */
#include "../simd_src/blocks.h"
#include "fermi.h"

extern "C" __global__ void __launch_bounds__(64)
embed_q4(const unsigned char *table, const int *ids, float *y, int k) {
    const int column = (blockIdx.x * 64 + threadIdx.x) * 8; /* 64 columns of a block: groups g of 32, pieces c of 8 */
    if (column >= k) return;
    const int id = ids[blockIdx.y], row = id % FM_BLOCK_ROWS;
    const int group = column / FM_GROUP & 1, piece = column / 8 & 3;
    const unsigned char *block =
        table + ((long long)(id / FM_BLOCK_ROWS) * (k / FM_BLOCK_COLS) + column / FM_BLOCK_COLS) * FM_BLOCK_BYTES;
    const float scale = half_to_float(*(const unsigned short *)(block + group * 32 + row * 2));
    const unsigned word = *(const unsigned *)(block + 64 + group * 256 + piece * 64 + row * 4);
    float *out = y + (long long)blockIdx.y * k + column;
#pragma unroll
    for (int b = 0; b < 4; ++b) {
        out[b] = (float)((int)((word >> (8 * b)) & 15u) - FM_Q4_ZERO) * scale;
        out[4 + b] = (float)((int)((word >> (8 * b + 4)) & 15u) - FM_Q4_ZERO) * scale;
    }
}
