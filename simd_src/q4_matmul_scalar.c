/* q4_matmul: y[t][n] = W[n] . x[t], 4-bit weights x 8-bit activations. The reference; contract in kernels.h.
 * W  [cols/64] blocks a tile of 16 rows (blocks.h); x fm_q8; y float
 * cost reads 18 B per 32 weights, 2 integer operations a weight and token
 */
#include "half.h"
#include "tiers.h"

void fm_q4_matmul_scalar(const fm_block_q4 *w, int cols, int tile0, int tile1, const fm_q8 *x, const int32_t *rows,
                         int tokens, float *y, size_t ldy, const fm_block_q4 *next) {
    (void)next;
    const int blocks = cols / FM_BLOCK_COLS, groups = cols / FM_GROUP;
    for (int tile = tile0; tile < tile1; tile++) {
        const fm_block_q4 *tile_blocks = w + (size_t)tile * blocks;
        for (int t = 0; t < tokens; t++) {
            const int row = fm_token_row(rows, t);
            const int8_t *q = x->q + (size_t)row * cols;
            const float *scale = x->scale + (size_t)row * groups;
            const int32_t *correction = x->correction + (size_t)row * groups;
            float *out = y + t * ldy + (size_t)(tile - tile0) * FM_BLOCK_ROWS;
            float acc[FM_BLOCK_ROWS] = {0};
            for (int group = 0; group < groups; group++) {
                const fm_block_q4 *block = tile_blocks + group / 2;
                for (int r = 0; r < FM_BLOCK_ROWS; r++) {
                    int32_t dot = correction[group];
                    for (int c = 0; c < 4; c++) {
                        for (int j = 0; j < 4; j++) {
                            const int byte = block->quant[group % 2][c][r][j];
                            dot += (byte & 15) * q[group * FM_GROUP + 8 * c + j];
                            dot += (byte >> 4) * q[group * FM_GROUP + 8 * c + 4 + j];
                        }
                    }
                    acc[r] += (float)dot * (fm_half_to_float(block->scale[group % 2][r]) * scale[group]);
                }
            }
            for (int r = 0; r < FM_BLOCK_ROWS; r++) out[r] = acc[r];
        }
    }
}

void fm_q4_row(const fm_block_q4 *w, int cols, int row, float *out) {
    const fm_block_q4 *block = w + (size_t)(row / FM_BLOCK_ROWS) * (cols / FM_BLOCK_COLS);
    const int r = row % FM_BLOCK_ROWS;
    for (int col = 0; col < cols; col += FM_BLOCK_COLS, block++) {
        for (int k = 0; k < FM_BLOCK_COLS; k++) {
            const int g = k / FM_GROUP, within = k % FM_GROUP;
            const int byte = block->quant[g][within / 8][r][within % 4];
            const int nibble = within % 8 < 4 ? byte & 15 : byte >> 4;
            out[col + k] = fm_half_to_float(block->scale[g][r]) * (float)(nibble - FM_Q4_ZERO);
        }
    }
}
