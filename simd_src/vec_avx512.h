/* The vector vocabulary of ops_impl.h on 512-bit registers. */
#ifndef FERMION_VEC_AVX512_H
#define FERMION_VEC_AVX512_H

#include <immintrin.h>
#include <stddef.h>
#include <stdint.h>

#define VW 16
#define NN_ROWS 4
#define NN_VECS 4
#define NT_ROWS 4
#define NT_COLS 4

typedef __m512 vf;

static inline vf vload(const float *p) { return _mm512_loadu_ps(p); }
static inline void vstore(float *p, vf a) { _mm512_storeu_ps(p, a); }
static inline vf vset1(float a) { return _mm512_set1_ps(a); }
static inline vf vadd(vf a, vf b) { return _mm512_add_ps(a, b); }
static inline vf vsub(vf a, vf b) { return _mm512_sub_ps(a, b); }
static inline vf vmul(vf a, vf b) { return _mm512_mul_ps(a, b); }
static inline vf vdiv(vf a, vf b) { return _mm512_div_ps(a, b); }
static inline vf vmax(vf a, vf b) { return _mm512_max_ps(a, b); }
static inline vf vmin(vf a, vf b) { return _mm512_min_ps(a, b); }
static inline vf vfma(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }
static inline float vsum(vf a) { return _mm512_reduce_add_ps(a); }
/* The sums of four registers, each in the same order: the four are transposed while they are added. */
static inline void vsum4(vf a, vf b, vf c, vf d, float *y) {
    const __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
    const __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
    const __m512 all = _mm512_add_ps(_mm512_shuffle_ps(ab, cd, 0x44), _mm512_shuffle_ps(ab, cd, 0xee));
    const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(all), _mm512_extractf32x8_ps(all, 1));
    _mm_storeu_ps(y, _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1)));
}

static inline float vhmax(vf a) { return _mm512_reduce_max_ps(a); }
static inline vf vexp_scale(vf a, vf exponent) { return _mm512_scalef_ps(a, exponent); }
static inline vf vround(vf a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
static inline vf vzero_below(vf a, vf x, vf limit) {
    return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, limit, _CMP_GE_OQ), a);
}

#define HALF_LANES 16
static inline void vwiden_half(const uint16_t *p, float *y) {
    vstore(y, _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p)));
}

/* 16 x 16 halves, rows ld apart, to floats, transposed, rows ldy apart. Rows i and i + 8 share a register, which
 * leaves columns c and c + 8 in register c. */
#define TURN 16
#include "vec_turn.h"
static inline void vturn_half(const uint16_t *p, size_t ld, float *y, size_t ldy) {
    __m512i x[8], z[8];
    for (int i = 0; i < 8; i++) {
        const __m512i low = _mm512_castsi256_si512(_mm256_loadu_si256((const __m256i *)(p + i * ld)));
        x[i] = _mm512_inserti64x4(low, _mm256_loadu_si256((const __m256i *)(p + (i + 8) * ld)), 1);
    }
    TURN_LANES(_mm512_unpacklo_epi16, _mm512_unpackhi_epi16, x, z)
    for (int c = 0; c < 8; c++) {
        const __m512i columns = _mm512_shuffle_i64x2(z[c], z[c], _MM_SHUFFLE(3, 1, 2, 0));
        vstore(y + c * ldy, _mm512_cvtph_ps(_mm512_castsi512_si256(columns)));
        vstore(y + (c + 8) * ldy, _mm512_cvtph_ps(_mm512_extracti64x4_epi64(columns, 1)));
    }
}

static inline void vstore_half(uint16_t *p, vf a) {
    a = _mm512_max_ps(_mm512_min_ps(a, _mm512_set1_ps(65504.0f)), _mm512_set1_ps(-65504.0f));
    _mm256_storeu_si256((__m256i *)p, _mm512_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT));
}

#include "vec_exp.h"

#endif
