/* q4_matmul on 512-bit registers with VNNI; reference: q4_matmul_scalar.c.
 * map  lane r of a register = row r of the tile; vpdpbusd takes four columns of 16 rows against a broadcast of four
 *      activations. The eight registers of an unpacked group serve up to 16 tokens, whose float accumulators stay in
 *      registers over 512 columns. Few tokens are read where they lie, more are packed side by side first, so that
 *      every operand has a constant offset.
 * cost one token: bandwidth-bound (288 B a tile and group); many: 8 vpdpbusd of 11 arithmetic instructions a token
 *      and group of 512 weights
 * Every output has one accumulator and groups in ascending order: tokens that share a pass change no bit.
 */
#include <immintrin.h>

#include "q4_pack.h"
#include "tiers.h"

#define INLINE static inline __attribute__((always_inline))
#define TOKENS_MAX 16
#define UNPACKED_MAX 4    /* up to so many tokens, packing costs more than it saves */

typedef int32_t unaligned_word __attribute__((may_alias, aligned(1)));

/* sum + weight . four activations in every lane. Written out because compilers load the broadcast separately, which
 * costs 15 % of the speed of many tokens. */
INLINE __m512i dot4(__m512i sum, __m512i weight, const int8_t *q) {
    __asm__("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(weight), "m"(*(const unaligned_word *)q));
    return sum;
}

/* Tokens 0..count-1 against `blocks` blocks of one tile. Apart: token t's activations are at q[t], its scales at
 * scale[t]. Packed: those of all tokens are at q[0] and scale[0], group by group (fm_pack_tokens). y holds the sums over
 * earlier blocks, unless this is the first. */
INLINE void tile_of(const int count, const int packed, const fm_block_q4 *block, int blocks, const int8_t *const *q,
                    const float *const *scale, const int32_t *const *correction, int first, float *y, size_t ldy) {
    const __m512i low = _mm512_set1_epi8(15);
    /* Packed tokens are followed by pointers that move: an operand with an index register costs one more operation. */
    const int8_t *q0 = q[0];
    const float *scale0 = scale[0];
    const int32_t *correction0 = correction[0];
    __m512 acc[TOKENS_MAX];
#pragma GCC unroll 16
    for (int t = 0; t < count; t++) acc[t] = first ? _mm512_setzero_ps() : _mm512_loadu_ps(y + t * ldy);
    for (ptrdiff_t group = 0; group < 2 * (ptrdiff_t)blocks; block++) {
#pragma GCC unroll 9
        for (int line = 0; line < FM_BLOCK_BYTES; line += 64)
            _mm_prefetch((const char *)(block + FM_FETCH_BLOCKS) + line, _MM_HINT_T0);
        for (int g = 0; g < 2; g++, group++) {
            __m512i weight[8];
#pragma GCC unroll 4
            for (int c = 0; c < 4; c++) {
                const __m512i bytes = _mm512_load_si512((const void *)block->quant[g][c]);
                weight[2 * c] = _mm512_and_si512(bytes, low);
                weight[2 * c + 1] = _mm512_and_si512(_mm512_srli_epi16(bytes, 4), low);
            }
            const __m512 weight_scale = _mm512_cvtph_ps(_mm256_load_si256((const __m256i *)block->scale[g]));
#pragma GCC unroll 16
            for (int t = 0; t < count; t++) {
                const int8_t *in = packed ? q0 + t * FM_GROUP : q[t] + group * FM_GROUP;
                __m512i dot = _mm512_set1_epi32(packed ? correction0[t] : correction[t][group]);
#pragma GCC unroll 8
                for (int s = 0; s < 8; s++) dot = dot4(dot, weight[s], in + 4 * s);
                const __m512 input_scale = _mm512_set1_ps(packed ? scale0[t] : scale[t][group]);
                acc[t] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot), _mm512_mul_ps(weight_scale, input_scale), acc[t]);
            }
            q0 += count * FM_GROUP;
            scale0 += count;
            correction0 += count;
        }
    }
#pragma GCC unroll 16
    for (int t = 0; t < count; t++) _mm512_storeu_ps(y + t * ldy, acc[t]);
}

/* One instance for each number of tokens, so that the accumulators are registers and the offsets constants. */
typedef void tile_fn(const fm_block_q4 *block, int blocks, const int8_t *const *q, const float *const *scale,
                     const int32_t *const *correction, int first, float *y, size_t ldy);
#define INSTANCE(count)                                                                                            \
    static void tile_of_##count(const fm_block_q4 *block, int blocks, const int8_t *const *q,                      \
                                const float *const *scale, const int32_t *const *correction, int first, float *y,  \
                                size_t ldy) {                                                                      \
        tile_of(count, count > UNPACKED_MAX, block, blocks, q, scale, correction, first, y, ldy);                  \
    }
INSTANCE(1) INSTANCE(2) INSTANCE(3) INSTANCE(4) INSTANCE(5) INSTANCE(6) INSTANCE(7) INSTANCE(8)
INSTANCE(9) INSTANCE(10) INSTANCE(11) INSTANCE(12) INSTANCE(13) INSTANCE(14) INSTANCE(15) INSTANCE(16)
static tile_fn *const TILE_OF[TOKENS_MAX + 1] = {
    NULL,      tile_of_1,  tile_of_2,  tile_of_3,  tile_of_4,  tile_of_5,  tile_of_6,  tile_of_7,  tile_of_8,
    tile_of_9, tile_of_10, tile_of_11, tile_of_12, tile_of_13, tile_of_14, tile_of_15, tile_of_16,
};

/* One or two tokens against a tile and the next one, side by side: two streams keep more of memory's requests under way
 * than one, 5 to 7 % of a decode step. `after`: where they go on, so many blocks apart again; unless that is fetched in
 * time, the second stream starts cold every 18 KB. The same sums in the same order as tile_of. */
INLINE void pair_of(const int count, const fm_block_q4 *block, int blocks, const fm_block_q4 *after,
                    const int8_t *const *q, const float *const *scale, const int32_t *const *correction, float *y,
                    size_t ldy) {
    const __m512i low = _mm512_set1_epi8(15);
    __m512 acc[2][UNPACKED_MAX];
#pragma GCC unroll 4
    for (int t = 0; t < count; t++) acc[0][t] = acc[1][t] = _mm512_setzero_ps();
    const fm_block_q4 *ahead = block + FM_FETCH_BLOCKS;
    const ptrdiff_t turn = 2 * ((ptrdiff_t)blocks - FM_FETCH_BLOCKS);
    for (ptrdiff_t group = 0; group < 2 * (ptrdiff_t)blocks; block++, ahead++) {
        if (group == turn) ahead = after;
#pragma GCC unroll 2
        for (int tile = 0; tile < 2; tile++) {
            const fm_block_q4 *b = block + (tile ? blocks : 0);
#pragma GCC unroll 9
            for (int line = 0; line < FM_BLOCK_BYTES; line += 64)
                _mm_prefetch((const char *)(ahead + (tile ? blocks : 0)) + line, _MM_HINT_T0);
#pragma GCC unroll 2
            for (int g = 0; g < 2; g++) {
                __m512i weight[8];
#pragma GCC unroll 4
                for (int c = 0; c < 4; c++) {
                    const __m512i bytes = _mm512_load_si512((const void *)b->quant[g][c]);
                    weight[2 * c] = _mm512_and_si512(bytes, low);
                    weight[2 * c + 1] = _mm512_and_si512(_mm512_srli_epi16(bytes, 4), low);
                }
                const __m512 weight_scale = _mm512_cvtph_ps(_mm256_load_si256((const __m256i *)b->scale[g]));
#pragma GCC unroll 4
                for (int t = 0; t < count; t++) {
                    __m512i dot = _mm512_set1_epi32(correction[t][group + g]);
#pragma GCC unroll 8
                    for (int s = 0; s < 8; s++) dot = dot4(dot, weight[s], q[t] + (group + g) * FM_GROUP + 4 * s);
                    acc[tile][t] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot),
                                                   _mm512_mul_ps(weight_scale, _mm512_set1_ps(scale[t][group + g])),
                                                   acc[tile][t]);
                }
            }
        }
        group += 2;
    }
#pragma GCC unroll 4
    for (int t = 0; t < count; t++) {
        _mm512_storeu_ps(y + t * ldy, acc[0][t]);
        _mm512_storeu_ps(y + t * ldy + FM_BLOCK_ROWS, acc[1][t]);
    }
}

static void few_tokens(const fm_block_q4 *w, int tiles, const fm_q8 *x, const int32_t *rows, int first, int count,
                       float *y, size_t ldy, const fm_block_q4 *next) {
    const int blocks = x->cols / FM_BLOCK_COLS, groups = x->cols / FM_GROUP;
    const int8_t *q[UNPACKED_MAX];
    const float *scale[UNPACKED_MAX];
    const int32_t *correction[UNPACKED_MAX];
    for (int t = 0; t < count; t++) {
        const size_t row = (size_t)fm_token_row(rows, first + t);
        q[t] = x->q + row * x->cols;
        scale[t] = x->scale + row * groups;
        correction[t] = x->correction + row * groups;
    }
    int tile = 0;
    if (count <= 2)
        for (; tile + 2 <= tiles; tile += 2) {
            const fm_block_q4 *block = w + (size_t)tile * blocks, *end = block + 2 * (size_t)blocks;
            const fm_block_q4 *after = tile + 2 == tiles && next ? next : end;
            float *out = y + (size_t)tile * FM_BLOCK_ROWS;
            if (count == 1)
                pair_of(1, block, blocks, after, q, scale, correction, out, ldy);
            else
                pair_of(2, block, blocks, after, q, scale, correction, out, ldy);
        }
    for (; tile < tiles; tile++)
        TILE_OF[count](w + (size_t)tile * blocks, blocks, q, scale, correction, 1, y + (size_t)tile * FM_BLOCK_ROWS,
                       ldy);
}

static void many_tokens(const fm_block_q4 *w, int tiles, const fm_q8 *x, const int32_t *rows, int first, int count,
                        float *y, size_t ldy) {
    const int blocks = x->cols / FM_BLOCK_COLS, groups = x->cols / FM_GROUP;
    _Alignas(64) int8_t q[FM_PACK_GROUPS * TOKENS_MAX * FM_GROUP];
    _Alignas(64) float scale[FM_PACK_GROUPS * TOKENS_MAX];
    _Alignas(64) int32_t correction[FM_PACK_GROUPS * TOKENS_MAX];
    const int8_t *const q_base = q;
    const float *const scale_base = scale;
    const int32_t *const correction_base = correction;
    for (int group = 0; group < groups; group += FM_PACK_GROUPS) {
        const int taken = groups - group < FM_PACK_GROUPS ? groups - group : FM_PACK_GROUPS;
        fm_pack_tokens(x, rows, first, count, group, taken, q, scale, correction);
        for (int tile = 0; tile < tiles; tile++)
            TILE_OF[count](w + (size_t)tile * blocks + group / 2, taken / 2, &q_base, &scale_base, &correction_base,
                           group == 0, y + (size_t)tile * FM_BLOCK_ROWS, ldy);
    }
}

void fm_q4_matmul_avx512(const fm_block_q4 *w, int cols, int tile0, int tile1, const fm_q8 *x, const int32_t *rows,
                         int tokens, float *y, size_t ldy, const fm_block_q4 *next) {
    w += (size_t)tile0 * (cols / FM_BLOCK_COLS);
    int passes = (tokens + TOKENS_MAX - 1) / TOKENS_MAX;
    for (int first = 0; first < tokens; passes--) {
        const int count = (tokens - first + passes - 1) / passes; /* passes of nearly equal width */
        float *out = y + (size_t)first * ldy;
        if (count > UNPACKED_MAX)
            many_tokens(w, tile1 - tile0, x, rows, first, count, out, ldy);
        else
            few_tokens(w, tile1 - tile0, x, rows, first, count, out, ldy, next);
        first += count;
    }
}
