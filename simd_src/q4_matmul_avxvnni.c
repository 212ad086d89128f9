/* q4_matmul of the avx2 tier on CPUs with AVX-VNNI: vpdpbusd does in one instruction what AVX2 needs two for. */
#include "tiers.h"

#ifdef __AVXVNNI__

#include "q4_avx2.h"

static inline vi dot_first(vi w, vi x) { return _mm256_dpbusd_avx_epi32(_mm256_setzero_si256(), w, x); }
static inline vi dot_next(vi acc, vi w, vi x) { return _mm256_dpbusd_avx_epi32(acc, w, x); }
static inline vi dot_finish(vi acc, int32_t correction) {
    return _mm256_add_epi32(acc, _mm256_set1_epi32(correction));
}

#include "q4_matmul_impl.h"

fm_q4_matmul_fn *const fm_q4_matmul_avxvnni = q4_matmul;

#else

fm_q4_matmul_fn *const fm_q4_matmul_avxvnni = NULL;

#endif
