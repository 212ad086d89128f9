/* quantizer: float32 rows -> packed 4-bit blocks, choosing the scale instead of taking absmax.
 *
 * For the nibbles q that a candidate scale gives, the best scale is s = sum(w x q) / sum(w q^2), and what remains is
 *     sum(w x^2) - sum(w x q)^2 / sum(w q^2)
 * so candidates compete by their gain sum(w x q)^2 / sum(w q^2) alone: one pass each, no residuals.
 * The winner is refitted and requantised with the scale as fp16 holds it.
 *
 * cost    2 x CANDIDATES passes of 10 vector operations over 32 weights: compute-bound
 * vector  GCC/Clang vector types of four floats: SSE2 on any x86-64, and the same bytes on every machine
 */
#include <math.h>
#include <stdint.h>
#include <string.h>

#include "blocks.h"
#include "quantizer_api.h"

typedef float f4 __attribute__((vector_size(16)));
typedef int32_t i4 __attribute__((vector_size(16)));

#define VECTORS (FM_GROUP / 4)
#define CANDIDATES 12
/* Candidate scales are +-absmax / divisor, divisor 6 .. 9 2/3 in thirds: from coarse and unclipped to fine with the
 * largest weights clipped; 8 (plain absmax) is one of them. 60 candidates gain 0.1 % more at a quarter of the speed. */
#define FIRST_DIVISOR 6.0f
#define REFITS 2

/* x rounded half to even, for |x| < 2^22: the bits below 1 fall off the end of the mantissa. */
static inline f4 round_even(f4 x) {
    const f4 magic = {12582912.0f, 12582912.0f, 12582912.0f, 12582912.0f};
    return (x + magic) - magic;
}

static inline f4 splat(float x) { return (f4){x, x, x, x}; }

static inline f4 choose(i4 mask, f4 a, f4 b) { return (f4)(((i4)a & mask) | ((i4)b & ~mask)); }

static inline f4 clamp_nibble(f4 q) {
    q = choose(q < splat(-8.0f), splat(-8.0f), q);
    return choose(q > splat(7.0f), splat(7.0f), q);
}

static inline float sum4(f4 v) { return (v[0] + v[1]) + (v[2] + v[3]); }

static uint16_t half_from_float(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    const uint16_t sign = (uint16_t)(bits >> 16 & 0x8000);
    const float magnitude = fabsf(value);
    if (magnitude >= 65520.0f) return sign | 0x7c00;
    if (magnitude < 6.103515625e-05f) /* subnormal half: a multiple of 2^-24, rounded half to even */
        return sign | (uint16_t)nearbyintf(magnitude * 16777216.0f);
    bits &= 0x7fffffff;
    const uint32_t rounded = bits + 0xfff + (bits >> 13 & 1);
    return sign | (uint16_t)((rounded - (112u << 23)) >> 13);
}

static float float_from_half(uint16_t half) {
    const int exponent = half >> 10 & 31, mantissa = half & 1023;
    const float magnitude = exponent ? ldexpf((float)(1024 + mantissa), exponent - 25) : ldexpf((float)mantissa, -24);
    return half & 0x8000 ? -magnitude : magnitude;
}

/* Sums over the group for the nibbles that `inverse` = 1 / scale gives: sum(w x q) and sum(w q q). */
static inline void fit_sums(const f4 *x, const f4 *w, const f4 *wx, float inverse, float *wxq, float *wqq) {
    f4 cross = splat(0.0f), square = splat(0.0f);
    for (int v = 0; v < VECTORS; v++) {
        const f4 q = clamp_nibble(round_even(x[v] * splat(inverse)));
        cross += wx[v] * q;
        square += w[v] * q * q;
    }
    *wxq = sum4(cross);
    *wqq = sum4(square);
}

/* The fp16 bits of the best scale for one group. */
static uint16_t best_scale(const f4 *x, const f4 *w) {
    f4 wx[VECTORS], largest = splat(0.0f);
    for (int v = 0; v < VECTORS; v++) {
        wx[v] = w[v] * x[v];
        const f4 magnitude = choose(x[v] < splat(0.0f), -x[v], x[v]);
        largest = choose(magnitude > largest, magnitude, largest);
    }
    float absmax = largest[0];
    for (int lane = 1; lane < 4; lane++) absmax = fmaxf(absmax, largest[lane]);
    if (absmax < 1e-7f) return 0; /* below the smallest fp16 scale */

    float best_gain = -1.0f, scale = absmax / -8.0f;
    for (int c = 0; c < CANDIDATES; c++) {
        const float divisor = FIRST_DIVISOR + (float)c / 3.0f;
        for (int sign = -1; sign <= 1; sign += 2) {
            float wxq, wqq;
            fit_sums(x, w, wx, (float)sign * divisor / absmax, &wxq, &wqq);
            if (wqq > 0.0f && wxq * wxq > best_gain * wqq) {
                best_gain = wxq * wxq / wqq;
                scale = wxq / wqq;
            }
        }
    }
    for (int i = 0; i < REFITS; i++) { /* nibbles and scale improve each other: Lloyd's iteration */
        float wxq, wqq;
        fit_sums(x, w, wx, 1.0f / scale, &wxq, &wqq);
        if (!(wqq > 0.0f) || wxq == 0.0f) break;
        scale = wxq / wqq;
    }
    return half_from_float(scale);
}

static inline float inverse_of(float scale) { return scale == 0.0f ? 0.0f : 1.0f / scale; }

static void store_nibble(fm_block_q4 *block, int group, int row, int column, int nibble) {
    uint8_t *byte = &block->quant[group][column >> 3][row][column & 3];
    *byte = (uint8_t)(column & 4 ? (*byte & 0x0f) | nibble << 4 : (*byte & 0xf0) | nibble);
}

static void store_group(fm_block_q4 *block, int group, int row, const f4 *x, uint16_t scale_bits) {
    const float inverse = inverse_of(float_from_half(scale_bits));
    block->scale[group][row] = scale_bits;
    for (int c = 0; c < 4; c++) {
        const f4 low = clamp_nibble(round_even(x[2 * c] * splat(inverse)));
        const f4 high = clamp_nibble(round_even(x[2 * c + 1] * splat(inverse)));
        for (int j = 0; j < 4; j++)
            block->quant[group][c][row][j] = (uint8_t)(((int)low[j] + FM_Q4_ZERO) | ((int)high[j] + FM_Q4_ZERO) << 4);
    }
}

void fm_quantize_search(const float *weights, int rows, int cols, const float *importance, unsigned char *blocks) {
    fm_block_q4 *out = (fm_block_q4 *)blocks;
    const int groups = cols / FM_GROUP;
    for (int row = 0; row < rows; row++) {
        fm_block_q4 *tile = out + (size_t)(row / FM_BLOCK_ROWS) * (size_t)(cols / FM_BLOCK_COLS);
        for (int group = 0; group < groups; group++) {
            f4 x[VECTORS], w[VECTORS];
            memcpy(x, weights + (size_t)row * (size_t)cols + group * FM_GROUP, sizeof x);
            if (importance)
                memcpy(w, importance + group * FM_GROUP, sizeof w);
            else
                for (int v = 0; v < VECTORS; v++) w[v] = splat(1.0f);
            store_group(tile + group / 2, group & 1, row % FM_BLOCK_ROWS, x, best_scale(x, w));
        }
    }
}

/* Rounds one group of one row column by column, pushing each column's error to those behind it inside the group.
 * errors[k] = (w_k - s q_k) / U_kk, for the columns of later groups. */
static void feedback_group(float *x, const float *factor, int cols, int column0, const f4 *w, fm_block_q4 *block,
                           int group, int row, float *errors) {
    f4 start[VECTORS];
    memcpy(start, x, sizeof start);
    const uint16_t bits = best_scale(start, w);
    const float scale = float_from_half(bits), inverse = inverse_of(scale);
    block->scale[group][row] = bits;
    for (int k = 0; k < FM_GROUP; k++) {
        const float *u = factor + (size_t)(column0 + k) * (size_t)cols + column0;
        const float q = fminf(fmaxf(nearbyintf(x[k] * inverse), -8.0f), 7.0f);
        const float error = (x[k] - q * scale) / u[k];
        store_nibble(block, group, row, k, (int)q + FM_Q4_ZERO);
        errors[k] = error;
        for (int j = k + 1; j < FM_GROUP; j++) x[j] -= error * u[j];
    }
}

void fm_quantize_feedback(float *weights, int rows, int cols, const float *factor, unsigned char *blocks) {
    fm_block_q4 *out = (fm_block_q4 *)blocks;
    float errors[FM_BLOCK_ROWS][FM_GROUP];
    for (int row0 = 0; row0 < rows; row0 += FM_BLOCK_ROWS) {
        fm_block_q4 *tile = out + (size_t)(row0 / FM_BLOCK_ROWS) * (size_t)(cols / FM_BLOCK_COLS);
        float *x0 = weights + (size_t)row0 * (size_t)cols;
        for (int column0 = 0; column0 < cols; column0 += FM_GROUP) {
            const int group = column0 / FM_GROUP;
            f4 w[VECTORS]; /* what an error in column k finally costs, the later columns having made up: 1 / U_kk^2 */
            for (int k = 0; k < FM_GROUP; k++) {
                const float u = factor[(size_t)(column0 + k) * (size_t)cols + (size_t)(column0 + k)];
                w[k / 4][k % 4] = 1.0f / (u * u);
            }
            for (int row = 0; row < FM_BLOCK_ROWS; row++)
                feedback_group(x0 + (size_t)row * (size_t)cols + column0, factor, cols, column0, w, tile + group / 2,
                               group & 1, row, errors[row]);
            /* The factor's 32 rows stay in cache while all 16 weight rows use them. */
            for (int row = 0; row < FM_BLOCK_ROWS; row++) {
                float *x = x0 + (size_t)row * (size_t)cols;
                for (int column = column0 + FM_GROUP; column < cols; column += 8) {
                    f4 a, b;
                    memcpy(&a, x + column, sizeof a);
                    memcpy(&b, x + column + 4, sizeof b);
                    for (int k = 0; k < FM_GROUP; k++) {
                        const float *u = factor + (size_t)(column0 + k) * (size_t)cols + column;
                        f4 ua, ub;
                        memcpy(&ua, u, sizeof ua);
                        memcpy(&ub, u + 4, sizeof ub);
                        a -= splat(errors[row][k]) * ua;
                        b -= splat(errors[row][k]) * ub;
                    }
                    memcpy(x + column, &a, sizeof a);
                    memcpy(x + column + 4, &b, sizeof b);
                }
            }
        }
    }
}

/* y[0..n-1] += a x, n % 4 == 0. */
static inline void add_scaled(float *y, float a, const float *x, int n) {
    for (int i = 0; i < n; i += 4) {
        f4 u, v;
        memcpy(&u, y + i, sizeof u);
        memcpy(&v, x + i, sizeof v);
        u += splat(a) * v;
        memcpy(y + i, &u, sizeof u);
    }
}

static int load_nibble(const fm_block_q4 *block, int group, int row, int column) {
    const uint8_t byte = block->quant[group][column >> 3][row][column & 3];
    return column & 4 ? byte >> 4 : byte & 15;
}

/* One row: gradient = H e on entry and kept so. Returns how many nibbles changed in one sweep. */
static int refine_row(float *gradient, const float *hessian, int cols, fm_block_q4 *tile, int row) {
    int changed = 0;
    for (int column = 0; column < cols; column++) {
        fm_block_q4 *block = tile + column / FM_BLOCK_COLS;
        const int group = column / FM_GROUP & 1, within = column % FM_GROUP;
        const float scale = float_from_half(block->scale[group][row]);
        if (scale == 0.0f) continue;
        const float *h = hessian + (size_t)column * (size_t)cols;
        const int nibble = load_nibble(block, group, row, within);
        const float wanted = (float)nibble - gradient[column] / (h[column] * scale);
        const int better = (int)fminf(fmaxf(nearbyintf(wanted), 0.0f), 15.0f);
        if (better == nibble) continue;
        store_nibble(block, group, row, within, better);
        add_scaled(gradient, (float)(better - nibble) * scale, h, cols);
        changed++;
    }
    return changed;
}

void fm_quantize_refine(const float *weights, int rows, int cols, const float *hessian, int sweeps, float *scratch,
                        unsigned char *blocks) {
    fm_block_q4 *out = (fm_block_q4 *)blocks;
    float *gradient = scratch; /* [16][cols]: H e of each row of a tile */
    for (int row0 = 0; row0 < rows; row0 += FM_BLOCK_ROWS) {
        fm_block_q4 *tile = out + (size_t)(row0 / FM_BLOCK_ROWS) * (size_t)(cols / FM_BLOCK_COLS);
        memset(gradient, 0, (size_t)FM_BLOCK_ROWS * (size_t)cols * sizeof(float));
        for (int column = 0; column < cols; column++) { /* 16 rows share each row of H while it is in cache */
            const fm_block_q4 *block = tile + column / FM_BLOCK_COLS;
            const int group = column / FM_GROUP & 1;
            for (int row = 0; row < FM_BLOCK_ROWS; row++) {
                const int nibble = load_nibble(block, group, row, column % FM_GROUP);
                const float value = float_from_half(block->scale[group][row]) * (float)(nibble - FM_Q4_ZERO);
                const float error = value - weights[(size_t)(row0 + row) * (size_t)cols + column];
                add_scaled(gradient + (size_t)row * (size_t)cols, error, hessian + (size_t)column * (size_t)cols, cols);
            }
        }
        for (int row = 0; row < FM_BLOCK_ROWS; row++)
            for (int sweep = 0; sweep < sweeps; sweep++)
                if (refine_row(gradient + (size_t)row * (size_t)cols, hessian, cols, tile, row) == 0) break;
    }
}
