/* The matmul kernels of every tier, as dispatch.c knows them: <op>_<tier>. Contracts: kernels.h. */
#ifndef FERMION_TIERS_H
#define FERMION_TIERS_H

#include "kernels.h"

typedef void fm_q4_matmul_fn(const fm_block_q4 *w, int cols, int tile0, int tile1, const fm_q8 *x,
                             const int32_t *rows, int tokens, float *y, size_t ldy,
                             const fm_block_q4 *next);
typedef void fm_f32_matmul_fn(const float *w, int cols, int row0, int row1, const float *x, size_t ldx,
                              const int32_t *rows, int tokens, float *y, size_t ldy);
typedef void fm_quantize_q8_fn(const float *x, int cols, int8_t *q, float *scale, int32_t *correction);

fm_q4_matmul_fn fm_q4_matmul_scalar, fm_q4_matmul_ssse3, fm_q4_matmul_avx2, fm_q4_matmul_avx512;
fm_f32_matmul_fn fm_f32_matmul_scalar, fm_f32_matmul_ssse3, fm_f32_matmul_avx2, fm_f32_matmul_avx512;
/* 512-bit registers gain nothing in quantisation, which is one pass over a few KB. */
fm_quantize_q8_fn fm_quantize_q8_scalar, fm_quantize_q8_ssse3, fm_quantize_q8_avx2;
/* One row at a time (embedding lookup): plain C in every tier. */
void fm_q4_row(const fm_block_q4 *w, int cols, int row, float *out);

/* The avx2 tier's q4_matmul on processors with 256-bit vpdpbusd (AVX-VNNI): the same bits, fewer instructions. NULL if
 * the compiler was too old for it. */
extern fm_q4_matmul_fn *const fm_q4_matmul_avxvnni;

/* How far ahead of the block in use weights are fetched for few tokens: 2.3 KB; 8 blocks, beyond the next page, lost
 * 15 %. */
#define FM_FETCH_BLOCKS 4

static inline int fm_token_row(const int32_t *rows, int t) { return rows ? rows[t] : t; }

#endif
