/* q4_matmul with AVX-VNNI: vpdpbusd adds four byte products to 32 bits in one instruction. */
#define FM_Q4_MATMUL fm_q4_matmul_avxvnni
#define DOT_TYPE __m256i
#define DOT_BEGIN _mm256_setzero_si256()
#define DOT_ADD(sum, weight, four) _mm256_dpbusd_avx_epi32(sum, weight, four)
#define DOT_END(sum, correction) _mm256_add_epi32(sum, _mm256_set1_epi32(correction))

#include "q4_matmul_ymm.h"
