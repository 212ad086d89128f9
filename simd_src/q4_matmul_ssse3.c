/* q4_matmul on SSE registers of 4 rows: pmaddubsw.
 * The 16-bit sum of a lane is at most 16 products of 15 * 127 = 30480: it cannot saturate. */
#include <tmmintrin.h>

#include <stdint.h>
#include <string.h>

#define LANES 4

typedef __m128i vi;
typedef __m128 vf;

static inline vi vi_load(const void *p) { return _mm_load_si128(p); }
static inline void vi_store(void *p, vi a) { _mm_store_si128(p, a); }
static inline vi low_nibbles(vi a) { return _mm_and_si128(a, _mm_set1_epi8(15)); }
static inline vi high_nibbles(vi a) { return _mm_and_si128(_mm_srli_epi16(a, 4), _mm_set1_epi8(15)); }
static inline vi broadcast4(const int8_t *p) {
    int32_t four;
    memcpy(&four, p, sizeof four);
    return _mm_set1_epi32(four);
}
static inline vi dot_first(vi w, vi x) { return _mm_maddubs_epi16(w, x); }
static inline vi dot_next(vi acc, vi w, vi x) { return _mm_add_epi16(acc, _mm_maddubs_epi16(w, x)); }
static inline vi dot_finish(vi acc, int32_t correction) {
    return _mm_add_epi32(_mm_madd_epi16(acc, _mm_set1_epi16(1)), _mm_set1_epi32(correction));
}
static inline vf vf_zero(void) { return _mm_setzero_ps(); }
static inline vf vf_set1(float a) { return _mm_set1_ps(a); }
static inline vf vf_load(const float *p) { return _mm_load_ps(p); }
static inline void vf_store(float *p, vf a) { _mm_store_ps(p, a); }
static inline void vf_store_unaligned(float *p, vf a) { _mm_storeu_ps(p, a); }
static inline vf vf_mul(vf a, vf b) { return _mm_mul_ps(a, b); }
static inline vf vf_accumulate(vf acc, vi dot, vf scale) {
    return _mm_add_ps(acc, _mm_mul_ps(_mm_cvtepi32_ps(dot), scale));
}
/* A half in the high 16 bits, shifted right by 3 with its sign, is the float times 2^-112 but for three copies of the
 * sign in the exponent; weights are finite, so no exponent is lost. */
static inline vf half_scales(const uint16_t *p) {
    const vi high = _mm_unpacklo_epi16(_mm_setzero_si128(), _mm_loadl_epi64((const __m128i *)p));
    const vi bits = _mm_and_si128(_mm_srai_epi32(high, 3), _mm_set1_epi32((int32_t)0x8fffe000));
    return _mm_mul_ps(_mm_castsi128_ps(bits), _mm_set1_ps(0x1p112f));
}

#include "q4_matmul_impl.h"

void fm_q4_matmul_ssse3(const fm_block_q4 *w, int cols, int tile0, int tile1, const fm_q8 *x, const int32_t *rows,
                        int tokens, float *y, size_t ldy, const fm_block_q4 *next) {
    q4_matmul(w, cols, tile0, tile1, x, rows, tokens, y, ldy, next);
}
