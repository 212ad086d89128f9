/* The matmul kernels of every tier, as dispatch.c knows them: <op>_<tier>. Contracts: kernels.h. */
#ifndef FERMION_TIERS_H
#define FERMION_TIERS_H

#include "kernels.h"

#define FM_DECLARE_TIER(tier)                                                                                       \
    void fm_quantize_q8_##tier(const float *x, int cols, int8_t *q, float *scale, int32_t *correction);            \
    void fm_q4_matmul_##tier(const fm_block_q4 *w, int cols, int tile0, int tile1, const fm_q8 *x,                 \
                             const int32_t *rows, int tokens, float *y, size_t ldy);                               \
    void fm_f32_matmul_##tier(const float *w, int cols, int row0, int row1, const float *x, size_t ldx,            \
                              const int32_t *rows, int tokens, float *y, size_t ldy);

FM_DECLARE_TIER(scalar)
FM_DECLARE_TIER(ssse3)
FM_DECLARE_TIER(avx2)
FM_DECLARE_TIER(avx512)

/* The avx2 tier on processors with 256-bit vpdpbusd (AVX-VNNI): the same bits, fewer instructions. */
void fm_q4_matmul_avxvnni(const fm_block_q4 *w, int cols, int tile0, int tile1, const fm_q8 *x, const int32_t *rows,
                          int tokens, float *y, size_t ldy);

void fm_q4_row(const fm_block_q4 *w, int cols, int row, float *out);

/* An activation group whose largest magnitude is below this is stored as zeros: 127 / amax must not overflow. */
#define FM_Q8_TINY 0x1p-100f

static inline int fm_token_row(const int32_t *rows, int t) { return rows ? rows[t] : t; }

#endif
