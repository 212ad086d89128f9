/* q4_matmul on 512-bit registers with VNNI; reference: q4_matmul_scalar.c.
 * map  lane r of a register = row r of the tile; vpdpbusd takes four columns of 16 rows against a broadcast of four
 *      activations. One token: weights stream past once. Many: the eight registers of an unpacked group are used for
 *      up to 16 tokens before the next group is touched.
 * cost one token: bandwidth-bound (288 B a tile and group); many: 8 vpdpbusd of 11 arithmetic instructions a token
 *      and group of 512 weights
 */
#include <immintrin.h>

#include "q4_pack.h"
#include "tiers.h"

#define INLINE static inline __attribute__((always_inline))
#define TOKENS_MAX 16
#define PREFETCH_BLOCKS 6 /* ahead of the block in use: 3.4 KB, measured */

INLINE void unpack(const fm_block_q4 *block, int g, __m512i weight[8]) {
    const __m512i low = _mm512_set1_epi8(15);
    for (int c = 0; c < 4; c++) {
        const __m512i bytes = _mm512_load_si512((const void *)block->quant[g][c]);
        weight[2 * c] = _mm512_and_si512(bytes, low);
        weight[2 * c + 1] = _mm512_and_si512(_mm512_srli_epi16(bytes, 4), low);
    }
}

INLINE __m512 tile_scale(const fm_block_q4 *block, int g) {
    return _mm512_cvtph_ps(_mm256_load_si256((const __m256i *)block->scale[g]));
}

/* acc + (dot + correction) * (w_scale * x_scale) for one token and group. */
INLINE __m512 add_group(__m512 acc, const __m512i weight[8], __m512 w_scale, const int8_t *q, float scale,
                        int32_t correction) {
    __m512i even = _mm512_set1_epi32(correction), odd = _mm512_setzero_si512();
#pragma GCC unroll 4
    for (int c = 0; c < 4; c++) {
        int32_t four;
        memcpy(&four, q + 8 * c, 4);
        even = _mm512_dpbusd_epi32(even, weight[2 * c], _mm512_set1_epi32(four));
        memcpy(&four, q + 8 * c + 4, 4);
        odd = _mm512_dpbusd_epi32(odd, weight[2 * c + 1], _mm512_set1_epi32(four));
    }
    const __m512 dot = _mm512_cvtepi32_ps(_mm512_add_epi32(even, odd));
    return _mm512_fmadd_ps(dot, _mm512_mul_ps(w_scale, _mm512_set1_ps(scale)), acc);
}

static void one_token(const fm_block_q4 *block, int tiles, int blocks, const int8_t *q, const float *scale,
                      const int32_t *correction, float *y) {
    for (int tile = 0; tile < tiles; tile++) {
        __m512 acc = _mm512_setzero_ps();
        for (int b = 0; b < blocks; b++, block++) {
            for (int line = 0; line < FM_BLOCK_BYTES; line += 64)
                _mm_prefetch((const char *)(block + PREFETCH_BLOCKS) + line, _MM_HINT_T0);
#pragma GCC unroll 2
            for (int g = 0; g < 2; g++) {
                __m512i weight[8];
                unpack(block, g, weight);
                acc = add_group(acc, weight, tile_scale(block, g), q + (2 * b + g) * FM_GROUP, scale[2 * b + g],
                                correction[2 * b + g]);
            }
        }
        _mm512_storeu_ps(y + tile * FM_BLOCK_ROWS, acc);
    }
}

/* `count` tokens, packed, against `groups` groups of one tile; y holds the sums over earlier groups. */
INLINE void many_tokens(const int count, const fm_block_q4 *block, int groups, const int8_t *q, const float *scale,
                        const int32_t *correction, int first, float *y, size_t ldy) {
    __m512 acc[TOKENS_MAX];
#pragma GCC unroll 16
    for (int t = 0; t < count; t++) acc[t] = first ? _mm512_setzero_ps() : _mm512_loadu_ps(y + t * ldy);
    for (int group = 0; group < groups; group++) {
        __m512i weight[8];
        unpack(block + group / 2, group % 2, weight);
        const __m512 w_scale = tile_scale(block + group / 2, group % 2);
#pragma GCC unroll 16
        for (int t = 0; t < count; t++)
            acc[t] = add_group(acc[t], weight, w_scale, q + (group * count + t) * FM_GROUP, scale[group * count + t],
                               correction[group * count + t]);
    }
#pragma GCC unroll 16
    for (int t = 0; t < count; t++) _mm512_storeu_ps(y + t * ldy, acc[t]);
}

void fm_q4_matmul_avx512(const fm_block_q4 *w, int cols, int tile0, int tile1, const fm_q8 *x, const int32_t *rows,
                         int tokens, float *y, size_t ldy) {
    const int blocks = cols / FM_BLOCK_COLS, groups = cols / FM_GROUP;
    _Alignas(64) int8_t q[FM_PACK_GROUPS * TOKENS_MAX * FM_GROUP];
    _Alignas(64) float scale[FM_PACK_GROUPS * TOKENS_MAX];
    _Alignas(64) int32_t correction[FM_PACK_GROUPS * TOKENS_MAX];
    w += (size_t)tile0 * blocks;
    for (int t = 0; t < tokens;) {
        const int left = tokens - t;
        const int count = left >= 16 ? 16 : left >= 8 ? 8 : left >= 4 ? 4 : left >= 2 ? 2 : 1;
        if (count == 1) {
            const size_t row = (size_t)fm_token_row(rows, t);
            one_token(w, tile1 - tile0, blocks, x->q + row * cols, x->scale + row * groups,
                      x->correction + row * groups, y + t * ldy);
        }
        for (int group = 0; count > 1 && group < groups; group += FM_PACK_GROUPS) {
            const int taken = groups - group < FM_PACK_GROUPS ? groups - group : FM_PACK_GROUPS;
            fm_pack_tokens(x, rows, t, count, group, taken, q, scale, correction);
            for (int tile = 0; tile < tile1 - tile0; tile++) {
                const fm_block_q4 *block = w + (size_t)tile * blocks + group / 2;
                float *out = y + t * ldy + (size_t)tile * FM_BLOCK_ROWS;
                switch (count) {
                case 16: many_tokens(16, block, taken, q, scale, correction, group == 0, out, ldy); break;
                case 8: many_tokens(8, block, taken, q, scale, correction, group == 0, out, ldy); break;
                case 4: many_tokens(4, block, taken, q, scale, correction, group == 0, out, ldy); break;
                default: many_tokens(2, block, taken, q, scale, correction, group == 0, out, ldy); break;
                }
            }
        }
        t += count;
    }
}
