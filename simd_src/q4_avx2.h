/* The vocabulary of q4_matmul_impl.h that AVX2 and AVX-VNNI share: all but the dot product. */
#ifndef FERMION_Q4_AVX2_H
#define FERMION_Q4_AVX2_H

#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#define LANES 8

typedef __m256i vi;
typedef __m256 vf;

static inline vi vi_load(const void *p) { return _mm256_load_si256(p); }
static inline void vi_store(void *p, vi a) { _mm256_store_si256(p, a); }
static inline vi low_nibbles(vi a) { return _mm256_and_si256(a, _mm256_set1_epi8(15)); }
static inline vi high_nibbles(vi a) { return _mm256_and_si256(_mm256_srli_epi16(a, 4), _mm256_set1_epi8(15)); }
static inline vi broadcast4(const int8_t *p) {
    int32_t four;
    memcpy(&four, p, sizeof four);
    return _mm256_set1_epi32(four);
}
static inline vf vf_zero(void) { return _mm256_setzero_ps(); }
static inline vf vf_set1(float a) { return _mm256_set1_ps(a); }
static inline vf vf_load(const float *p) { return _mm256_load_ps(p); }
static inline void vf_store(float *p, vf a) { _mm256_store_ps(p, a); }
static inline void vf_store_unaligned(float *p, vf a) { _mm256_storeu_ps(p, a); }
static inline vf vf_mul(vf a, vf b) { return _mm256_mul_ps(a, b); }
static inline vf vf_accumulate(vf acc, vi dot, vf scale) { return _mm256_fmadd_ps(_mm256_cvtepi32_ps(dot), scale, acc); }
static inline vf half_scales(const uint16_t *p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p)); }

#endif
