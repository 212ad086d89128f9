/* q4_matmul on 256-bit registers, once for AVX2 and once for AVX-VNNI; reference: q4_matmul_scalar.c.
 * Included by q4_matmul_avx2.c and q4_matmul_avxvnni.c, which define FM_Q4_MATMUL and the type and primitives of a
 * running dot product: DOT_BEGIN, DOT_ADD(sum, weights, activations), DOT_END(sum, correction).
 * map  a register holds 8 of the 16 rows; the two halves of a tile are done one after the other.
 */
#include <immintrin.h>

#include "q4_pack.h"
#include "tiers.h"

#define INLINE static inline __attribute__((always_inline))
#define TOKENS_MAX 4
#define PREFETCH_BLOCKS 6 /* ahead of the block in use */

INLINE void unpack(const fm_block_q4 *block, int g, int half, __m256i weight[8]) {
    const __m256i low = _mm256_set1_epi8(15);
#pragma GCC unroll 4
    for (int c = 0; c < 4; c++) {
        const __m256i bytes = _mm256_load_si256((const __m256i *)block->quant[g][c][8 * half]);
        weight[2 * c] = _mm256_and_si256(bytes, low);
        weight[2 * c + 1] = _mm256_and_si256(_mm256_srli_epi16(bytes, 4), low);
    }
}

INLINE __m256 half_scale(const fm_block_q4 *block, int g, int half) {
    return _mm256_cvtph_ps(_mm_load_si128((const __m128i *)(block->scale[g] + 8 * half)));
}

INLINE __m256 add_group(__m256 acc, const __m256i weight[8], __m256 w_scale, const int8_t *q, float scale,
                        int32_t correction) {
    DOT_TYPE sum = DOT_BEGIN;
#pragma GCC unroll 8
    for (int c = 0; c < 8; c++) {
        int32_t four;
        memcpy(&four, q + 4 * c, 4);
        sum = DOT_ADD(sum, weight[c], _mm256_set1_epi32(four));
    }
    const __m256 dot = _mm256_cvtepi32_ps(DOT_END(sum, correction));
    return _mm256_fmadd_ps(dot, _mm256_mul_ps(w_scale, _mm256_set1_ps(scale)), acc);
}

static void one_token(const fm_block_q4 *block, int tiles, int blocks, const int8_t *q, const float *scale,
                      const int32_t *correction, float *y) {
    for (int tile = 0; tile < tiles; tile++) {
        __m256 acc[2] = {_mm256_setzero_ps(), _mm256_setzero_ps()};
        for (int b = 0; b < blocks; b++, block++) {
            for (int line = 0; line < FM_BLOCK_BYTES; line += 64)
                _mm_prefetch((const char *)(block + PREFETCH_BLOCKS) + line, _MM_HINT_T0);
            for (int g = 0; g < 2; g++) {
#pragma GCC unroll 2
                for (int half = 0; half < 2; half++) {
                    __m256i weight[8];
                    unpack(block, g, half, weight);
                    acc[half] = add_group(acc[half], weight, half_scale(block, g, half),
                                          q + (2 * b + g) * FM_GROUP, scale[2 * b + g], correction[2 * b + g]);
                }
            }
        }
        _mm256_storeu_ps(y + tile * FM_BLOCK_ROWS, acc[0]);
        _mm256_storeu_ps(y + tile * FM_BLOCK_ROWS + 8, acc[1]);
    }
}

/* `count` tokens, packed, against `groups` groups of half a tile; y holds the sums over earlier groups. */
INLINE void many_tokens(const int count, const fm_block_q4 *block, int half, int groups, const int8_t *q,
                        const float *scale, const int32_t *correction, int first, float *y, size_t ldy) {
    __m256 acc[TOKENS_MAX];
#pragma GCC unroll 4
    for (int t = 0; t < count; t++) acc[t] = first ? _mm256_setzero_ps() : _mm256_loadu_ps(y + t * ldy);
    for (int group = 0; group < groups; group++) {
        __m256i weight[8];
        unpack(block + group / 2, group % 2, half, weight);
        const __m256 w_scale = half_scale(block + group / 2, group % 2, half);
#pragma GCC unroll 4
        for (int t = 0; t < count; t++)
            acc[t] = add_group(acc[t], weight, w_scale, q + (group * count + t) * FM_GROUP, scale[group * count + t],
                               correction[group * count + t]);
    }
#pragma GCC unroll 4
    for (int t = 0; t < count; t++) _mm256_storeu_ps(y + t * ldy, acc[t]);
}

void FM_Q4_MATMUL(const fm_block_q4 *w, int cols, int tile0, int tile1, const fm_q8 *x, const int32_t *rows,
                  int tokens, float *y, size_t ldy) {
    const int blocks = cols / FM_BLOCK_COLS, groups = cols / FM_GROUP;
    _Alignas(64) int8_t q[FM_PACK_GROUPS * TOKENS_MAX * FM_GROUP];
    float scale[FM_PACK_GROUPS * TOKENS_MAX];
    int32_t correction[FM_PACK_GROUPS * TOKENS_MAX];
    w += (size_t)tile0 * blocks;
    for (int t = 0; t < tokens;) {
        const int left = tokens - t;
        const int count = left >= 4 ? 4 : left >= 2 ? 2 : 1;
        if (count == 1) {
            const size_t row = (size_t)fm_token_row(rows, t);
            one_token(w, tile1 - tile0, blocks, x->q + row * cols, x->scale + row * groups,
                      x->correction + row * groups, y + t * ldy);
        }
        for (int group = 0; count > 1 && group < groups; group += FM_PACK_GROUPS) {
            const int taken = groups - group < FM_PACK_GROUPS ? groups - group : FM_PACK_GROUPS;
            fm_pack_tokens(x, rows, t, count, group, taken, q, scale, correction);
            for (int half = 0; half < 2 * (tile1 - tile0); half++) {
                const fm_block_q4 *block = w + (size_t)(half / 2) * blocks + group / 2;
                float *out = y + t * ldy + (size_t)half * (FM_BLOCK_ROWS / 2);
                if (count == 4)
                    many_tokens(4, block, half % 2, taken, q, scale, correction, group == 0, out, ldy);
                else
                    many_tokens(2, block, half % 2, taken, q, scale, correction, group == 0, out, ldy);
            }
        }
        t += count;
    }
}
