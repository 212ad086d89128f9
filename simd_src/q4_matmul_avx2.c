/* q4_matmul on AVX2: byte products are added in pairs to 16 bits, and a whole group of 32 columns fits there
 * (8 * 2 * 15 * 127 = 30480 < 32767), so the widening to 32 bits is paid once a group. */
#define FM_Q4_MATMUL fm_q4_matmul_avx2
#define DOT_TYPE __m256i
#define DOT_BEGIN _mm256_setzero_si256()
#define DOT_ADD(sum, weight, four) _mm256_add_epi16(sum, _mm256_maddubs_epi16(weight, four))
#define DOT_END(sum, correction) \
    _mm256_add_epi32(_mm256_madd_epi16(sum, _mm256_set1_epi16(1)), _mm256_set1_epi32(correction))

#include "q4_matmul_ymm.h"
