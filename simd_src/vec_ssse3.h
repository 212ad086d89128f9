/* The vector vocabulary of ops_impl.h on SSE registers (SSSE3 and older instructions only). */
#ifndef FERMION_VEC_SSSE3_H
#define FERMION_VEC_SSSE3_H

#include <stdint.h>
#include <tmmintrin.h>

#define VW 4
#define NN_ROWS 4
#define NN_VECS 2
#define NT_ROWS 4
#define NT_COLS 2

typedef __m128 vf;

static inline vf vload(const float *p) { return _mm_loadu_ps(p); }
static inline void vstore(float *p, vf a) { _mm_storeu_ps(p, a); }
static inline vf vset1(float a) { return _mm_set1_ps(a); }
static inline vf vadd(vf a, vf b) { return _mm_add_ps(a, b); }
static inline vf vsub(vf a, vf b) { return _mm_sub_ps(a, b); }
static inline vf vmul(vf a, vf b) { return _mm_mul_ps(a, b); }
static inline vf vdiv(vf a, vf b) { return _mm_div_ps(a, b); }
static inline vf vmax(vf a, vf b) { return _mm_max_ps(a, b); }
static inline vf vfma(vf a, vf b, vf c) { return _mm_add_ps(_mm_mul_ps(a, b), c); }

static inline float vsum(vf a) {
    a = _mm_add_ps(a, _mm_movehl_ps(a, a));
    return _mm_cvtss_f32(_mm_add_ss(a, _mm_shuffle_ps(a, a, 1)));
}

static inline float vhmax(vf a) {
    a = _mm_max_ps(a, _mm_movehl_ps(a, a));
    return _mm_cvtss_f32(_mm_max_ss(a, _mm_shuffle_ps(a, a, 1)));
}

static inline vf vexp_scale(vf a, vf exponent) { /* a * 2^exponent, exponent a whole number in -126..127 */
    __m128i bits = _mm_slli_epi32(_mm_add_epi32(_mm_cvtps_epi32(exponent), _mm_set1_epi32(127)), 23);
    return _mm_mul_ps(a, _mm_castsi128_ps(bits));
}
static inline vf vround(vf a) { return _mm_cvtepi32_ps(_mm_cvtps_epi32(a)); }
static inline vf vmin(vf a, vf b) { return _mm_min_ps(a, b); }
static inline vf vzero_below(vf a, vf x, vf limit) { return _mm_and_ps(a, _mm_cmpge_ps(x, limit)); }

static inline vf vload_half(const uint16_t *p) {
    /* The magnitude bits moved into place lack 112 in the exponent. A half subnormal, given 113, is 2^-14 too large:
     * that way no float subnormal ever occurs, which would cost a hundred cycles each. */
    __m128i half = _mm_unpacklo_epi16(_mm_loadl_epi64((const __m128i *)p), _mm_setzero_si128());
    __m128i bits = _mm_slli_epi32(_mm_and_si128(half, _mm_set1_epi32(0x7fff)), 13);
    __m128 sign = _mm_castsi128_ps(_mm_slli_epi32(_mm_and_si128(half, _mm_set1_epi32(0x8000)), 16));
    __m128 normal = _mm_castsi128_ps(_mm_add_epi32(bits, _mm_set1_epi32(112 << 23)));
    __m128 raised = _mm_castsi128_ps(_mm_add_epi32(bits, _mm_set1_epi32(113 << 23)));
    __m128 small = _mm_castsi128_ps(_mm_cmpgt_epi32(_mm_set1_epi32(1 << 23), bits));
    __m128 value = _mm_or_ps(_mm_and_ps(small, _mm_sub_ps(raised, _mm_set1_ps(0x1p-14f))), _mm_andnot_ps(small, normal));
    return _mm_or_ps(value, sign);
}

static inline void vstore_half(uint16_t *p, vf a) {
    const __m128 sign_bit = _mm_set1_ps(-0.0f);
    __m128 magnitude = _mm_min_ps(_mm_andnot_ps(sign_bit, a), _mm_set1_ps(65504.0f));
    __m128i bits = _mm_castps_si128(_mm_mul_ps(magnitude, _mm_set1_ps(0x1p-112f)));
    __m128i odd = _mm_and_si128(_mm_srli_epi32(bits, 13), _mm_set1_epi32(1));
    bits = _mm_add_epi32(bits, _mm_add_epi32(odd, _mm_set1_epi32(0xfff))); /* nearest, ties to even */
    bits = _mm_or_si128(_mm_srli_epi32(bits, 13), _mm_srli_epi32(_mm_castps_si128(_mm_and_ps(a, sign_bit)), 16));
    bits = _mm_srai_epi32(_mm_slli_epi32(bits, 16), 16); /* so that the signed pack keeps all 16 bits */
    _mm_storel_epi64((__m128i *)p, _mm_packs_epi32(bits, bits));
}

#include "vec_exp.h"

#endif
