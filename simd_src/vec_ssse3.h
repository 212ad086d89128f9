/* The vector vocabulary of ops_impl.h on SSE registers (SSSE3 and older instructions only). */
#ifndef FERMION_VEC_SSSE3_H
#define FERMION_VEC_SSSE3_H

#include <stdint.h>
#include <tmmintrin.h>

#define VW 4
#define NN_ROWS 2
#define NN_VECS 4
#define NT_ROWS 2
#define NT_COLS 4

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

/* The sums of four registers, each in the same order: two additions of transposed halves. */
static inline void vsum4(vf a, vf b, vf c, vf d, float *y) {
    const __m128 ab = _mm_add_ps(_mm_unpacklo_ps(a, b), _mm_unpackhi_ps(a, b));
    const __m128 cd = _mm_add_ps(_mm_unpacklo_ps(c, d), _mm_unpackhi_ps(c, d));
    _mm_storeu_ps(y, _mm_add_ps(_mm_movelh_ps(ab, cd), _mm_movehl_ps(cd, ab)));
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

/* Eight halves to floats. In 16-bit lanes: sign and magnitude's upper bits, exponent raised by 112, make the upper half
 * of the float; the magnitude's lower bits the lower half. Subnormals (and 0) are rare and go another way: given 113,
 * they are 2^-14 too large. No float subnormal ever occurs, which would cost a hundred cycles. */
#define HALF_LANES 8
static inline void vstore_widened(__m128i half, float *y) {
    const __m128i magnitude = _mm_and_si128(half, _mm_set1_epi16(0x7fff));
    const __m128i sign = _mm_xor_si128(half, magnitude), lower = _mm_slli_epi16(magnitude, 13);
    const __m128i small = _mm_cmpgt_epi16(_mm_set1_epi16(0x400), magnitude);
    const __m128i upper = _mm_add_epi16(_mm_srli_epi16(magnitude, 3), _mm_set1_epi16(112 << 7));
    __m128 first = _mm_castsi128_ps(_mm_unpacklo_epi16(lower, _mm_or_si128(upper, sign)));
    __m128 second = _mm_castsi128_ps(_mm_unpackhi_epi16(lower, _mm_or_si128(upper, sign)));
    if (_mm_movemask_epi8(small)) {
        const __m128i none = _mm_setzero_si128(), raised = _mm_add_epi16(upper, _mm_set1_epi16(1 << 7));
        const __m128 lift = _mm_set1_ps(0x1p-14f);
        __m128 low = _mm_sub_ps(_mm_castsi128_ps(_mm_unpacklo_epi16(lower, raised)), lift);
        __m128 high = _mm_sub_ps(_mm_castsi128_ps(_mm_unpackhi_epi16(lower, raised)), lift);
        low = _mm_or_ps(low, _mm_castsi128_ps(_mm_unpacklo_epi16(none, sign)));
        high = _mm_or_ps(high, _mm_castsi128_ps(_mm_unpackhi_epi16(none, sign)));
        const __m128 small_low = _mm_castsi128_ps(_mm_unpacklo_epi16(small, small));
        const __m128 small_high = _mm_castsi128_ps(_mm_unpackhi_epi16(small, small));
        first = _mm_or_ps(_mm_and_ps(small_low, low), _mm_andnot_ps(small_low, first));
        second = _mm_or_ps(_mm_and_ps(small_high, high), _mm_andnot_ps(small_high, second));
    }
    _mm_storeu_ps(y, first);
    _mm_storeu_ps(y + 4, second);
}
static inline void vwiden_half(const uint16_t *p, float *y) {
    vstore_widened(_mm_loadu_si128((const __m128i *)p), y);
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
#include "vec_turn.h"

#endif
