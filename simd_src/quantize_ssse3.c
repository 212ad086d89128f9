/* quantize_q8 on SSE registers; reference: quantize_scalar.c. */
#include <tmmintrin.h>

#include "tiers.h"

void fm_quantize_q8_ssse3(const float *x, int cols, int8_t *q, float *scale, int32_t *correction) {
    const __m128 magnitude_bits = _mm_castsi128_ps(_mm_set1_epi32(0x7fffffff));
    for (int group = 0; group < cols / FM_GROUP; group++, x += FM_GROUP, q += FM_GROUP) {
        __m128 v[8];
        for (int i = 0; i < 8; i++) v[i] = _mm_loadu_ps(x + 4 * i);
        __m128 most = _mm_setzero_ps();
        for (int i = 0; i < 8; i++) most = _mm_max_ps(most, _mm_and_ps(v[i], magnitude_bits));
        most = _mm_max_ps(most, _mm_movehl_ps(most, most));
        most = _mm_max_ss(most, _mm_shuffle_ps(most, most, 1));
        const float largest = _mm_cvtss_f32(most);
        const int tiny = largest < FM_Q8_TINY;
        const __m128 inverse = _mm_set1_ps(tiny ? 0.0f : 127.0f / largest);
        __m128i n[8];
        __m128i sum = _mm_setzero_si128();
        for (int i = 0; i < 8; i++) {
            n[i] = _mm_cvtps_epi32(_mm_mul_ps(v[i], inverse));
            sum = _mm_add_epi32(sum, n[i]);
        }
        for (int i = 0; i < 2; i++) {
            const __m128i low = _mm_packs_epi32(n[4 * i], n[4 * i + 1]);
            const __m128i high = _mm_packs_epi32(n[4 * i + 2], n[4 * i + 3]);
            _mm_storeu_si128((__m128i *)(q + 16 * i), _mm_packs_epi16(low, high));
        }
        sum = _mm_add_epi32(sum, _mm_shuffle_epi32(sum, _MM_SHUFFLE(1, 0, 3, 2)));
        sum = _mm_add_epi32(sum, _mm_shuffle_epi32(sum, _MM_SHUFFLE(2, 3, 0, 1)));
        scale[group] = tiny ? 0.0f : largest / 127.0f;
        correction[group] = -FM_Q4_ZERO * _mm_cvtsi128_si32(sum);
    }
}
