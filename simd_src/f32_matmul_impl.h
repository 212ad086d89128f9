/* f32_matmul: y[t][n] = W[n] . x[t] in float32. Included by f32_matmul_<tier>.c, which includes vec_<tier>.h first and
 * defines FM_F32_MATMUL and the tile ROWS x TOKENS of dot products kept in registers. Contract in kernels.h.
 *
 * Order every tier keeps: column k goes to lane k % 16, each lane adds in ascending k (fused where the tier has FMA),
 * then lanes are added in halves, 8 + 8, 4 + 4, 2 + 2, 1 + 1. Tiles change no bit.
 * cost reads 4 B a weight once for every TOKENS tokens
 */
#include <string.h>

#include "tiers.h"

#define INLINE static inline __attribute__((always_inline))
#define LANES 16
#define PARTS (LANES / VW) /* registers that make up the lanes of one dot product */

/* Lanes are folded in memory: once a dot product, so its cost does not show. */
INLINE float fold(const vf part[PARTS], const float *w, const float *x, int tail) {
    float lane[LANES];
#pragma GCC unroll 16
    for (int p = 0; p < PARTS; p++) vstore(lane + p * VW, part[p]);
    for (int k = 0; k < tail; k++) lane[k] = FM_SCALAR_FMA(w[k], x[k], lane[k]);
    for (int half = LANES / 2; half > 0; half /= 2)
        for (int i = 0; i < half; i++) lane[i] += lane[i + half];
    return lane[0];
}

INLINE void dot_tile(const int row_count, const int token_count, const float *w, int cols, const float *const *x,
                     float *const *y) {
    vf acc[ROWS][TOKENS][PARTS];
#pragma GCC unroll 16
    for (int r = 0; r < row_count; r++)
#pragma GCC unroll 16
        for (int t = 0; t < token_count; t++)
#pragma GCC unroll 16
            for (int p = 0; p < PARTS; p++) acc[r][t][p] = vset1(0.0f);
    int k = 0;
    for (; k + LANES <= cols; k += LANES) {
#pragma GCC unroll 16
        for (int p = 0; p < PARTS; p++) {
            vf in[TOKENS];
#pragma GCC unroll 16
            for (int t = 0; t < token_count; t++) in[t] = vload(x[t] + k + p * VW);
#pragma GCC unroll 16
            for (int r = 0; r < row_count; r++) {
                const vf weight = vload(w + (size_t)r * cols + k + p * VW);
#pragma GCC unroll 16
                for (int t = 0; t < token_count; t++) acc[r][t][p] = vfma(weight, in[t], acc[r][t][p]);
            }
        }
    }
    for (int r = 0; r < row_count; r++)
        for (int t = 0; t < token_count; t++)
            y[t][r] = fold(acc[r][t], w + (size_t)r * cols + k, x[t] + k, cols - k);
}

void FM_F32_MATMUL(const float *w, int cols, int row0, int row1, const float *x, size_t ldx, const int32_t *rows,
                   int tokens, float *y, size_t ldy) {
    for (int t = 0; t < tokens; t += TOKENS) {
        const int count = tokens - t < TOKENS ? tokens - t : TOKENS;
        const float *in[TOKENS];
        float *out[TOKENS];
        for (int i = 0; i < TOKENS; i++) { /* places past the last token repeat it and stay unused */
            const int token = t + (i < count ? i : count - 1);
            in[i] = x + (size_t)fm_token_row(rows, token) * ldx;
            out[i] = y + (size_t)token * ldy;
        }
        int row = row0;
        for (; count == TOKENS && row + ROWS <= row1; row += ROWS) {
            dot_tile(ROWS, TOKENS, w + (size_t)row * cols, cols, in, out);
            for (int i = 0; i < TOKENS; i++) out[i] += ROWS;
        }
        for (; row < row1; row++) {
            for (int i = 0; i < count; i++) {
                dot_tile(1, 1, w + (size_t)row * cols, cols, in + i, out + i);
                out[i]++;
            }
        }
    }
}
