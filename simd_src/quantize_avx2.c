/* quantize_q8 on AVX2 registers: one group of 32 is four of them. */
#include <immintrin.h>

#include "quantize.h"
#include "tiers.h"

static inline __m256i scaled(const float *x, __m256 inverse) {
    return _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x), inverse));
}

void fm_quantize_q8_avx2(const float *x, int cols, int8_t *q, float *scale, int32_t *correction) {
    const __m256i magnitude = _mm256_set1_epi32(0x7fffffff), ones8 = _mm256_set1_epi8(1);
    /* The packs work within 128-bit halves: this order of 32-bit lanes undoes it. */
    const __m256i unshuffle = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    for (int group = 0; group < cols / FM_GROUP; group++, x += FM_GROUP, q += FM_GROUP) {
        __m256i most = _mm256_setzero_si256();
        for (int k = 0; k < FM_GROUP; k += 8)
            most = _mm256_max_epu32(most, _mm256_and_si256(_mm256_castps_si256(_mm256_loadu_ps(x + k)), magnitude));
        __m128i half = _mm_max_epu32(_mm256_castsi256_si128(most), _mm256_extracti128_si256(most, 1));
        half = _mm_max_epu32(half, _mm_shuffle_epi32(half, 0x4e));
        half = _mm_max_epu32(half, _mm_shuffle_epi32(half, 0xb1));
        float inverse;
        scale[group] = fm_q8_scale((uint32_t)_mm_cvtsi128_si32(half), &inverse);
        __m256i bytes = _mm256_setzero_si256();
        if (inverse != 0.0f) {
            const __m256 factor = _mm256_set1_ps(inverse);
            bytes = _mm256_packs_epi16(_mm256_packs_epi32(scaled(x, factor), scaled(x + 8, factor)),
                                       _mm256_packs_epi32(scaled(x + 16, factor), scaled(x + 24, factor)));
            bytes = _mm256_permutevar8x32_epi32(bytes, unshuffle);
        }
        _mm256_storeu_si256((__m256i *)q, bytes);
        const __m256i pairs = _mm256_madd_epi16(_mm256_maddubs_epi16(ones8, bytes), _mm256_set1_epi16(1));
        __m128i sum = _mm_add_epi32(_mm256_castsi256_si128(pairs), _mm256_extracti128_si256(pairs, 1));
        sum = _mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0x4e));
        sum = _mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0xb1));
        correction[group] = -FM_Q4_ZERO * _mm_cvtsi128_si32(sum);
    }
}
