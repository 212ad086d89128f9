/* The packed weight layout: the one statement of it that C, CUDA and Python share.
 *
 * Scheme   symmetric 4-bit, groups of 32 along the input dimension, one fp16 scale per group
 *          (the Q4_0 family, 4.5 bits per weight):
 *              weight[n][k] = scale[n][k / 32] * (nibble[n][k] - 8),   nibble in 0..15
 *
 * Block    16 rows (outputs) x 64 columns (inputs) = 576 bytes = 9 cache lines, always 64-byte
 *          aligned, so a matrix is one sequential stream for every instruction set:
 *              scale[g][r]        g in 0..1 (group of 32 columns), r in 0..15 (row)
 *              quant[g][c][r][j]  c in 0..3, j in 0..3: one byte holds two nibbles of row r:
 *                  low  nibble = column 32 g + 8 c + j
 *                  high nibble = column 32 g + 8 c + 4 + j
 *          Why: quant[g][c] is 64 bytes = one 512-bit register whose 32-bit lane r holds four
 *          consecutive columns of row r, ready for u8 x s8 dot products against a broadcast of four
 *          activations; halves and quarters of it are the AVX2 and SSE registers; 16 lanes of one
 *          accumulator are 16 rows, so no horizontal sum is ever needed; and 32 GPU lanes load 16
 *          bytes each without a gap.
 *
 * Matrix   [rows / 16][cols / 64] blocks, row-tile major. rows % 16 == 0 and cols % 64 == 0.
 *          In a checkpoint: safetensors U8 of shape [rows/16, cols/64, 576]
 *          (experts: [experts, rows/16, cols/64, 576]).
 *
 * engine/formats.py mirrors these numbers; tests/kernels/test_formats.py checks that they agree.
 */
#ifndef FERMION_BLOCKS_H
#define FERMION_BLOCKS_H

#include <stdint.h>

#define FM_GROUP 32       /* columns that share one scale */
#define FM_BLOCK_ROWS 16  /* rows interleaved in a block */
#define FM_BLOCK_COLS 64  /* columns of a block: two groups */
#define FM_BLOCK_BYTES 576
#define FM_Q4_ZERO 8      /* the nibble that means 0.0 */

typedef struct {
    uint16_t scale[FM_BLOCK_COLS / FM_GROUP][FM_BLOCK_ROWS]; /* IEEE half bits */
    uint8_t quant[FM_BLOCK_COLS / FM_GROUP][4][FM_BLOCK_ROWS][4];
} fm_block_q4;

#ifdef __cplusplus
static_assert(sizeof(fm_block_q4) == FM_BLOCK_BYTES, "fm_block_q4 must be 576 bytes");
#else
_Static_assert(sizeof(fm_block_q4) == FM_BLOCK_BYTES, "fm_block_q4 must be 576 bytes");
#endif

#endif
