/* q4_matmul (kernels.h) for registers of 4 or 8 rows: SSSE3, AVX2 and AVX-VNNI.
 *
 * The including file defines Q4_MATMUL, LANES (rows of one register) and this vocabulary:
 *   vi, vf                     registers of integers and of floats
 *   vi_load, vi_store          64-byte aligned memory
 *   low_nibbles, high_nibbles  bytes & 15, bytes >> 4
 *   broadcast4                 four activations to every lane
 *   dot_first, dot_next, dot_finish
 *                              32 products of each lane in eight steps of four, plus the correction
 *   vf_load, vf_store, vf_store_unaligned, vf_zero, vf_set1, vf_mul, half_scales (of LANES rows)
 *   vf_accumulate(acc, dot, scale)   acc + (float)dot * scale, fused where the tier has FMA
 *
 * Both forms below compute each output with one accumulator and groups in ascending order, so they agree bit for bit.
 */
#include <stdalign.h>

#include "tiers.h"

#define PARTS (FM_BLOCK_ROWS / LANES) /* registers of one column of a block */
#define STEPS 8                       /* fours of columns of a group */

#define INLINE static inline __attribute__((always_inline))

/* One token against a tile or two tiles side by side, weights straight from the packed stream, which is what bounds it:
 * two streams keep more of memory's requests under way than one. `after`: where they go on, so many blocks apart again.
 * cost per block: 9 cache lines for 1024 weights. */
INLINE void vector_tiles(const int tiles, const fm_block_q4 *w, int blocks, const fm_block_q4 *after, const int8_t *q,
                         const float *scale, const int32_t *correction, float *y) {
    vf acc[2][PARTS];
    for (int t = 0; t < tiles; t++)
        for (int p = 0; p < PARTS; p++) acc[t][p] = vf_zero();
    const fm_block_q4 *ahead = w + FM_FETCH_BLOCKS;
    for (int b = 0; b < blocks; b++, w++, ahead++, q += 2 * FM_GROUP, scale += 2, correction += 2) {
        if (b + FM_FETCH_BLOCKS == blocks) ahead = after;
#pragma GCC unroll 2
        for (int t = 0; t < tiles; t++) {
            const fm_block_q4 *block = w + (size_t)t * blocks;
            for (int line = 0; line < FM_BLOCK_BYTES / 64; line++)
                __builtin_prefetch((const char *)(ahead + (size_t)t * blocks) + 64 * line);
            for (int g = 0; g < 2; g++) {
                vi dot[PARTS];
                for (int c = 0; c < 4; c++) {
                    const int8_t *in = q + FM_GROUP * g + 8 * c;
                    const vi first = broadcast4(in), second = broadcast4(in + 4);
                    for (int p = 0; p < PARTS; p++) {
                        const vi bytes = vi_load(block->quant[g][c][p * LANES]);
                        const vi low = low_nibbles(bytes);
                        dot[p] = c == 0 ? dot_first(low, first) : dot_next(dot[p], low, first);
                        dot[p] = dot_next(dot[p], high_nibbles(bytes), second);
                    }
                }
                const vf input_scale = vf_set1(scale[g]);
                for (int p = 0; p < PARTS; p++)
                    acc[t][p] = vf_accumulate(acc[t][p], dot_finish(dot[p], correction[g]),
                                              vf_mul(half_scales(block->scale[g] + p * LANES), input_scale));
            }
        }
    }
    for (int t = 0; t < tiles; t++)
        for (int p = 0; p < PARTS; p++) vf_store_unaligned(y + t * FM_BLOCK_ROWS + p * LANES, acc[t][p]);
}

static void vector(const fm_block_q4 *w, int blocks, int tiles, const fm_q8 *x, size_t row, float *y,
                   const fm_block_q4 *next) {
    const int8_t *q = x->q + row * x->cols;
    const float *scale = x->scale + row * (2 * (size_t)blocks);
    const int32_t *correction = x->correction + row * (2 * (size_t)blocks);
    for (; tiles >= 2; tiles -= 2, y += 2 * FM_BLOCK_ROWS) {
        const fm_block_q4 *end = w + 2 * (size_t)blocks;
        vector_tiles(2, w, blocks, tiles == 2 && next ? next : end, q, scale, correction, y);
        w = end;
    }
    if (tiles) vector_tiles(1, w, blocks, next ? next : w + blocks, q, scale, correction, y);
}

/* Several tokens: a block of MOST_TILES x 16 rows is unpacked once into first-level cache and used by every token. */
enum { MOST_TILES = 4, MOST_TOKENS = 64 };

typedef struct {
    alignas(64) uint8_t nibble[MOST_TILES][2][STEPS][4 * FM_BLOCK_ROWS];
    alignas(64) float scale[MOST_TILES][2][FM_BLOCK_ROWS];
    alignas(64) float acc[MOST_TOKENS][MOST_TILES * FM_BLOCK_ROWS];
} panel;

INLINE void unpack_block(const fm_block_q4 *w, uint8_t nibble[2][STEPS][4 * FM_BLOCK_ROWS],
                         float scale[2][FM_BLOCK_ROWS]) {
    for (int line = 0; line < FM_BLOCK_BYTES / 64; line++) __builtin_prefetch((const char *)(w + 1) + 64 * line);
    for (int g = 0; g < 2; g++) {
        for (int c = 0; c < 4; c++)
            for (int p = 0; p < PARTS; p++) {
                const vi bytes = vi_load(w->quant[g][c][p * LANES]);
                vi_store(nibble[g][2 * c] + 4 * LANES * p, low_nibbles(bytes));
                vi_store(nibble[g][2 * c + 1] + 4 * LANES * p, high_nibbles(bytes));
            }
        for (int p = 0; p < PARTS; p++) vf_store(scale[g] + p * LANES, half_scales(w->scale[g] + p * LANES));
    }
}

/* One group of one token against all tiles of the panel. */
INLINE void token_group(panel *m, int g, int tiles, const int8_t *q, float input_scale, int32_t correction,
                        float *acc) {
    vi input[STEPS];
    for (int s = 0; s < STEPS; s++) input[s] = broadcast4(q + 4 * s);
    const vf scale = vf_set1(input_scale);
    for (int tile = 0; tile < tiles; tile++)
        for (int p = 0; p < PARTS; p++, acc += LANES) {
            const uint8_t *weights = m->nibble[tile][g][0] + 4 * LANES * p;
            vi dot = dot_first(vi_load(weights), input[0]);
            for (int s = 1; s < STEPS; s++) dot = dot_next(dot, vi_load(weights + 4 * FM_BLOCK_ROWS * s), input[s]);
            vf_store(acc, vf_accumulate(vf_load(acc), dot_finish(dot, correction),
                                        vf_mul(vf_load(m->scale[tile][g] + p * LANES), scale)));
        }
}

static void matrix_panel(const fm_block_q4 *w, int blocks, int tiles, const fm_q8 *x, const int32_t *rows, int first,
                         int tokens, float *y, size_t ldy) {
    panel m;
    const int groups = 2 * blocks;
    for (int t = 0; t < tokens; t++)
        for (int i = 0; i < tiles * FM_BLOCK_ROWS; i += LANES) vf_store(m.acc[t] + i, vf_zero());
    for (int b = 0; b < blocks; b++) {
        for (int tile = 0; tile < tiles; tile++)
            unpack_block(w + (size_t)tile * blocks + b, m.nibble[tile], m.scale[tile]);
        for (int t = 0; t < tokens; t++) {
            const size_t row = rows ? (size_t)rows[first + t] : (size_t)(first + t);
            const int8_t *q = x->q + row * x->cols + FM_BLOCK_COLS * b;
            const float *scale = x->scale + row * groups + 2 * b;
            const int32_t *correction = x->correction + row * groups + 2 * b;
            for (int g = 0; g < 2; g++) token_group(&m, g, tiles, q + FM_GROUP * g, scale[g], correction[g], m.acc[t]);
        }
    }
    for (int t = 0; t < tokens; t++)
        for (int i = 0; i < tiles * FM_BLOCK_ROWS; i += LANES)
            vf_store_unaligned(y + (size_t)t * ldy + i, vf_load(m.acc[t] + i));
}

static void q4_matmul(const fm_block_q4 *w, int cols, int tile0, int tile1, const fm_q8 *x, const int32_t *rows,
                      int tokens, float *y, size_t ldy, const fm_block_q4 *next) {
    const int blocks = cols / FM_BLOCK_COLS;
    w += (size_t)tile0 * blocks;
    if (tokens == 1) {
        vector(w, blocks, tile1 - tile0, x, (size_t)fm_token_row(rows, 0), y, next);
        return;
    }
    for (int first = 0; first < tokens; first += MOST_TOKENS) {
        const int count = tokens - first < MOST_TOKENS ? tokens - first : MOST_TOKENS;
        for (int tile = 0; tile < tile1 - tile0; tile += MOST_TILES) {
            const int tiles = tile1 - tile0 - tile < MOST_TILES ? tile1 - tile0 - tile : MOST_TILES;
            matrix_panel(w + (size_t)tile * blocks, blocks, tiles, x, rows, first, count,
                         y + (size_t)first * ldy + tile * FM_BLOCK_ROWS, ldy);
        }
    }
}
