/* quantize_q8 on SSE registers: one group of 32 is eight of them. */
#include <tmmintrin.h>

#include "quantize.h"
#include "tiers.h"

/* SSE2 has no integer maximum of 32-bit lanes; these are never negative, so a signed comparison does. */
static inline __m128i max_bits(__m128i a, __m128i b) {
    const __m128i greater = _mm_cmpgt_epi32(a, b);
    return _mm_or_si128(_mm_and_si128(greater, a), _mm_andnot_si128(greater, b));
}

static inline __m128i scaled(const float *x, __m128 inverse) {
    return _mm_cvtps_epi32(_mm_mul_ps(_mm_loadu_ps(x), inverse));
}

void fm_quantize_q8_ssse3(const float *x, int cols, int8_t *q, float *scale, int32_t *correction) {
    const __m128i magnitude = _mm_set1_epi32(0x7fffffff), ones8 = _mm_set1_epi8(1), zeros = _mm_setzero_si128();
    for (int group = 0; group < cols / FM_GROUP; group++, x += FM_GROUP, q += FM_GROUP) {
        __m128i most = zeros;
        for (int k = 0; k < FM_GROUP; k += 4)
            most = max_bits(_mm_and_si128(_mm_castps_si128(_mm_loadu_ps(x + k)), magnitude), most);
        most = max_bits(most, _mm_shuffle_epi32(most, 0x4e));
        most = max_bits(most, _mm_shuffle_epi32(most, 0xb1));
        float inverse;
        scale[group] = fm_q8_scale((uint32_t)_mm_cvtsi128_si32(most), &inverse);
        __m128i low = zeros, high = zeros;
        if (inverse != 0.0f) {
            const __m128 factor = _mm_set1_ps(inverse);
            low = _mm_packs_epi16(_mm_packs_epi32(scaled(x, factor), scaled(x + 4, factor)),
                                  _mm_packs_epi32(scaled(x + 8, factor), scaled(x + 12, factor)));
            high = _mm_packs_epi16(_mm_packs_epi32(scaled(x + 16, factor), scaled(x + 20, factor)),
                                   _mm_packs_epi32(scaled(x + 24, factor), scaled(x + 28, factor)));
        }
        _mm_storeu_si128((__m128i *)q, low);
        _mm_storeu_si128((__m128i *)(q + 16), high);
        __m128i sum = _mm_add_epi16(_mm_maddubs_epi16(ones8, low), _mm_maddubs_epi16(ones8, high));
        sum = _mm_madd_epi16(sum, _mm_set1_epi16(1));
        sum = _mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0x4e));
        sum = _mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0xb1));
        correction[group] = -FM_Q4_ZERO * _mm_cvtsi128_si32(sum);
    }
}
