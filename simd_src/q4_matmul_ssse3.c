/* q4_matmul on SSE registers (pmaddubsw); reference: q4_matmul_scalar.c, whose float results it repeats bit for bit.
 * map  a register holds 4 of the 16 rows (a quarter of a tile). Byte products are added in pairs to 16 bits, and a
 *      whole group of 32 columns fits there (8 * 2 * 15 * 127 = 30480 < 32767): the widening is paid once a group.
 *      Many tokens: activations are spread beforehand, four bytes to a register, so that pmaddubsw takes them as its
 *      memory operand; the eight registers of an unpacked quarter serve up to 16 tokens.
 * cost a group of 16 rows and one token: 32 pmaddubsw of about 150 instructions, 288 B
 */
#include <tmmintrin.h>

#include "tiers.h"

#define INLINE static inline __attribute__((always_inline))
#define QUARTERS 4
#define TOKENS_MAX 16
#define SPREAD_GROUPS 8   /* columns are taken 256 at a time: 16 KB of spread activations stay in the first cache */
#define PREFETCH_BLOCKS 6 /* ahead of the block in use */

INLINE __m128i nibble_low(__m128i bytes) { return _mm_and_si128(bytes, _mm_set1_epi8(15)); }
INLINE __m128i nibble_high(__m128i bytes) { return _mm_and_si128(_mm_srli_epi16(bytes, 4), _mm_set1_epi8(15)); }

INLINE __m128i quarter_bytes(const fm_block_q4 *block, int g, int c, int quarter) {
    return _mm_load_si128((const __m128i *)block->quant[g][c][4 * quarter]);
}

/* Four scales. A half moved to the top of a float and shifted right by three has its exponent and mantissa in place
 * (times 2^-112) once the copies of the sign are cleared. */
INLINE __m128 quarter_scale(const fm_block_q4 *block, int g, int quarter) {
    const __m128i half = _mm_loadl_epi64((const __m128i *)(block->scale[g] + 4 * quarter));
    const __m128i top = _mm_unpacklo_epi16(_mm_setzero_si128(), half);
    const __m128i bits = _mm_and_si128(_mm_srai_epi32(top, 3), _mm_set1_epi32((int)0x8fffffff));
    return _mm_mul_ps(_mm_castsi128_ps(bits), _mm_set1_ps(0x1p112f));
}

/* acc + (pairs + correction) * (w_scale * x_scale) */
INLINE __m128 add_group(__m128 acc, __m128i pairs, __m128 w_scale, float scale, int32_t correction) {
    const __m128i dot = _mm_add_epi32(_mm_madd_epi16(pairs, _mm_set1_epi16(1)), _mm_set1_epi32(correction));
    return _mm_add_ps(acc, _mm_mul_ps(_mm_cvtepi32_ps(dot), _mm_mul_ps(w_scale, _mm_set1_ps(scale))));
}

INLINE void spread_four(const int8_t *q, __m128i out[4]) {
    const __m128i sixteen = _mm_loadu_si128((const __m128i *)q);
    out[0] = _mm_shuffle_epi32(sixteen, 0x00);
    out[1] = _mm_shuffle_epi32(sixteen, 0x55);
    out[2] = _mm_shuffle_epi32(sixteen, 0xaa);
    out[3] = _mm_shuffle_epi32(sixteen, 0xff);
}

static void one_token(const fm_block_q4 *block, int tiles, int blocks, const int8_t *q, const float *scale,
                      const int32_t *correction, float *y) {
    for (int tile = 0; tile < tiles; tile++) {
        __m128 acc[QUARTERS];
        for (int i = 0; i < QUARTERS; i++) acc[i] = _mm_setzero_ps();
        for (int b = 0; b < blocks; b++, block++) {
            for (int line = 0; line < FM_BLOCK_BYTES; line += 64)
                _mm_prefetch((const char *)(block + PREFETCH_BLOCKS) + line, _MM_HINT_T0);
            for (int g = 0; g < 2; g++) {
                const int group = 2 * b + g;
                __m128i four[8];
                spread_four(q + group * FM_GROUP, four);
                spread_four(q + group * FM_GROUP + 16, four + 4);
#pragma GCC unroll 4
                for (int quarter = 0; quarter < QUARTERS; quarter++) {
                    __m128i low = _mm_setzero_si128(), high = low;
#pragma GCC unroll 4
                    for (int c = 0; c < 4; c++) {
                        const __m128i bytes = quarter_bytes(block, g, c, quarter);
                        low = _mm_add_epi16(low, _mm_maddubs_epi16(nibble_low(bytes), four[2 * c]));
                        high = _mm_add_epi16(high, _mm_maddubs_epi16(nibble_high(bytes), four[2 * c + 1]));
                    }
                    acc[quarter] = add_group(acc[quarter], _mm_add_epi16(low, high), quarter_scale(block, g, quarter),
                                             scale[group], correction[group]);
                }
            }
        }
        for (int i = 0; i < QUARTERS; i++) _mm_storeu_ps(y + tile * FM_BLOCK_ROWS + 4 * i, acc[i]);
    }
}

/* Groups group0.. of `count` tokens: spread [groups][count][8 registers], scale and correction [groups][count]. */
static void spread_tokens(const fm_q8 *x, const int32_t *rows, int first, int count, int group0, int groups,
                          __m128i *spread, float *scale, int32_t *correction) {
    const int row_groups = x->cols / FM_GROUP;
    for (int t = 0; t < count; t++) {
        const size_t row = (size_t)fm_token_row(rows, first + t);
        const int8_t *from = x->q + row * x->cols + (size_t)group0 * FM_GROUP;
        for (int g = 0; g < groups; g++) {
            spread_four(from + g * FM_GROUP, spread + (g * count + t) * 8);
            spread_four(from + g * FM_GROUP + 16, spread + (g * count + t) * 8 + 4);
            scale[g * count + t] = x->scale[row * row_groups + group0 + g];
            correction[g * count + t] = x->correction[row * row_groups + group0 + g];
        }
    }
}

static void many_tokens(const fm_block_q4 *block, int quarter, int count, int groups, const __m128i *spread,
                        const float *scale, const int32_t *correction, int first, float *y, size_t ldy) {
    __m128 acc[TOKENS_MAX];
    for (int t = 0; t < count; t++) acc[t] = first ? _mm_setzero_ps() : _mm_loadu_ps(y + t * ldy);
    for (int group = 0; group < groups; group++) {
        __m128i weight[8];
#pragma GCC unroll 4
        for (int c = 0; c < 4; c++) {
            const __m128i bytes = quarter_bytes(block + group / 2, group % 2, c, quarter);
            weight[2 * c] = nibble_low(bytes);
            weight[2 * c + 1] = nibble_high(bytes);
        }
        const __m128 w_scale = quarter_scale(block + group / 2, group % 2, quarter);
        for (int t = 0; t < count; t++, spread += 8, scale++, correction++) {
            __m128i even = _mm_maddubs_epi16(weight[0], spread[0]), odd = _mm_maddubs_epi16(weight[1], spread[1]);
#pragma GCC unroll 3
            for (int c = 1; c < 4; c++) {
                even = _mm_add_epi16(even, _mm_maddubs_epi16(weight[2 * c], spread[2 * c]));
                odd = _mm_add_epi16(odd, _mm_maddubs_epi16(weight[2 * c + 1], spread[2 * c + 1]));
            }
            acc[t] = add_group(acc[t], _mm_add_epi16(even, odd), w_scale, *scale, *correction);
        }
    }
    for (int t = 0; t < count; t++) _mm_storeu_ps(y + t * ldy, acc[t]);
}

void fm_q4_matmul_ssse3(const fm_block_q4 *w, int cols, int tile0, int tile1, const fm_q8 *x, const int32_t *rows,
                        int tokens, float *y, size_t ldy) {
    const int blocks = cols / FM_BLOCK_COLS, groups = cols / FM_GROUP;
    __m128i spread[SPREAD_GROUPS * TOKENS_MAX * 8];
    float scale[SPREAD_GROUPS * TOKENS_MAX];
    int32_t correction[SPREAD_GROUPS * TOKENS_MAX];
    w += (size_t)tile0 * blocks;
    for (int t = 0; t < tokens;) {
        const int count = tokens - t < TOKENS_MAX ? tokens - t : TOKENS_MAX;
        if (count == 1) {
            const size_t row = (size_t)fm_token_row(rows, t);
            one_token(w, tile1 - tile0, blocks, x->q + row * cols, x->scale + row * groups,
                      x->correction + row * groups, y + t * ldy);
        }
        for (int group = 0; count > 1 && group < groups; group += SPREAD_GROUPS) {
            const int taken = groups - group < SPREAD_GROUPS ? groups - group : SPREAD_GROUPS;
            spread_tokens(x, rows, t, count, group, taken, spread, scale, correction);
            for (int quarter = 0; quarter < QUARTERS * (tile1 - tile0); quarter++)
                many_tokens(w + (size_t)(quarter / QUARTERS) * blocks + group / 2, quarter % QUARTERS, count, taken,
                            spread, scale, correction, group == 0, y + t * ldy + (size_t)quarter * 4, ldy);
        }
        t += count;
    }
}
