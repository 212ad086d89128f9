/* The vector vocabulary of ops_impl.h on 256-bit registers with FMA and F16C. */
#ifndef FERMION_VEC_AVX2_H
#define FERMION_VEC_AVX2_H

#include <immintrin.h>
#include <stdint.h>

#define VW 8
#define NN_ROWS 4
#define NN_VECS 2
#define NT_ROWS 2
#define NT_COLS 4

typedef __m256 vf;

static inline vf vload(const float *p) { return _mm256_loadu_ps(p); }
static inline void vstore(float *p, vf a) { _mm256_storeu_ps(p, a); }
static inline vf vset1(float a) { return _mm256_set1_ps(a); }
static inline vf vadd(vf a, vf b) { return _mm256_add_ps(a, b); }
static inline vf vsub(vf a, vf b) { return _mm256_sub_ps(a, b); }
static inline vf vmul(vf a, vf b) { return _mm256_mul_ps(a, b); }
static inline vf vdiv(vf a, vf b) { return _mm256_div_ps(a, b); }
static inline vf vmax(vf a, vf b) { return _mm256_max_ps(a, b); }
static inline vf vmin(vf a, vf b) { return _mm256_min_ps(a, b); }
static inline vf vfma(vf a, vf b, vf c) { return _mm256_fmadd_ps(a, b, c); }

static inline float vsum(vf a) {
    __m128 b = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    b = _mm_add_ps(b, _mm_movehl_ps(b, b));
    return _mm_cvtss_f32(_mm_add_ss(b, _mm_movehdup_ps(b)));
}

/* The sums of four registers, each in the same order: the four are transposed while they are added. */
static inline void vsum4(vf a, vf b, vf c, vf d, float *y) {
    const __m256 ab = _mm256_add_ps(_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b));
    const __m256 cd = _mm256_add_ps(_mm256_unpacklo_ps(c, d), _mm256_unpackhi_ps(c, d));
    const __m256 all = _mm256_add_ps(_mm256_shuffle_ps(ab, cd, 0x44), _mm256_shuffle_ps(ab, cd, 0xee));
    _mm_storeu_ps(y, _mm_add_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps(all, 1)));
}

static inline float vhmax(vf a) {
    __m128 b = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    b = _mm_max_ps(b, _mm_movehl_ps(b, b));
    return _mm_cvtss_f32(_mm_max_ss(b, _mm_movehdup_ps(b)));
}

static inline vf vexp_scale(vf a, vf exponent) { /* a * 2^exponent, exponent a whole number in -126..127 */
    __m256i bits = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(exponent), _mm256_set1_epi32(127)), 23);
    return _mm256_mul_ps(a, _mm256_castsi256_ps(bits));
}
static inline vf vround(vf a) { return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
static inline vf vzero_below(vf a, vf x, vf limit) { return _mm256_and_ps(a, _mm256_cmp_ps(x, limit, _CMP_GE_OQ)); }

#define HALF_LANES 8
static inline void vstore_widened(__m128i half, float *y) { vstore(y, _mm256_cvtph_ps(half)); }
static inline void vwiden_half(const uint16_t *p, float *y) {
    vstore_widened(_mm_loadu_si128((const __m128i *)p), y);
}

static inline void vstore_half(uint16_t *p, vf a) {
    a = _mm256_max_ps(_mm256_min_ps(a, _mm256_set1_ps(65504.0f)), _mm256_set1_ps(-65504.0f));
    _mm_storeu_si128((__m128i *)p, _mm256_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT));
}

#include "vec_exp.h"
#include "vec_turn.h"

#endif
