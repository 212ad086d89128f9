/* q4_matmul on AVX2 registers of 8 rows: vpmaddubsw (no saturation: see q4_matmul_ssse3.c). */
#include "q4_avx2.h"

static inline vi dot_first(vi w, vi x) { return _mm256_maddubs_epi16(w, x); }
static inline vi dot_next(vi acc, vi w, vi x) { return _mm256_add_epi16(acc, _mm256_maddubs_epi16(w, x)); }
static inline vi dot_finish(vi acc, int32_t correction) {
    return _mm256_add_epi32(_mm256_madd_epi16(acc, _mm256_set1_epi16(1)), _mm256_set1_epi32(correction));
}

#include "q4_matmul_impl.h"

void fm_q4_matmul_avx2(const fm_block_q4 *w, int cols, int tile0, int tile1, const fm_q8 *x, const int32_t *rows,
                       int tokens, float *y, size_t ldy, const fm_block_q4 *next) {
    q4_matmul(w, cols, tile0, tile1, x, rows, tokens, y, ldy, next);
}
