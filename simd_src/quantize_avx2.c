/* quantize_q8 on AVX2 registers; reference: quantize_scalar.c. */
#include <immintrin.h>

#include "tiers.h"

void fm_quantize_q8_avx2(const float *x, int cols, int8_t *q, float *scale, int32_t *correction) {
    const __m256 magnitude_bits = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff));
    const __m256i in_order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7); /* packs work within 128-bit halves */
    for (int group = 0; group < cols / FM_GROUP; group++, x += FM_GROUP, q += FM_GROUP) {
        __m256 v[4];
        for (int i = 0; i < 4; i++) v[i] = _mm256_loadu_ps(x + 8 * i);
        __m256 most = _mm256_setzero_ps();
        for (int i = 0; i < 4; i++) most = _mm256_max_ps(most, _mm256_and_ps(v[i], magnitude_bits));
        __m128 half = _mm_max_ps(_mm256_castps256_ps128(most), _mm256_extractf128_ps(most, 1));
        half = _mm_max_ps(half, _mm_movehl_ps(half, half));
        half = _mm_max_ss(half, _mm_movehdup_ps(half));
        const float largest = _mm_cvtss_f32(half);
        const int tiny = largest < FM_Q8_TINY;
        const __m256 inverse = _mm256_set1_ps(tiny ? 0.0f : 127.0f / largest);
        __m256i n[4];
        for (int i = 0; i < 4; i++) n[i] = _mm256_cvtps_epi32(_mm256_mul_ps(v[i], inverse));
        const __m256i packed = _mm256_packs_epi16(_mm256_packs_epi32(n[0], n[1]), _mm256_packs_epi32(n[2], n[3]));
        _mm256_storeu_si256((__m256i *)q, _mm256_permutevar8x32_epi32(packed, in_order));
        const __m256i pairs = _mm256_add_epi32(_mm256_add_epi32(n[0], n[1]), _mm256_add_epi32(n[2], n[3]));
        __m128i sum = _mm_add_epi32(_mm256_castsi256_si128(pairs), _mm256_extracti128_si256(pairs, 1));
        sum = _mm_add_epi32(sum, _mm_shuffle_epi32(sum, _MM_SHUFFLE(1, 0, 3, 2)));
        sum = _mm_add_epi32(sum, _mm_shuffle_epi32(sum, _MM_SHUFFLE(2, 3, 0, 1)));
        scale[group] = tiny ? 0.0f : largest / 127.0f;
        correction[group] = -FM_Q4_ZERO * _mm_cvtsi128_si32(sum);
    }
}
