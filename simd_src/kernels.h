/* The kernel table: every function that has one implementation per instruction set.
 *
 * Files are <op>_<tier>.c, tier = scalar, ssse3, avx2, avx512 (VNNI); flags are set per file.
 * dispatch.c fills the table with scalar, overwrites upward as CPUID and XGETBV allow, and publishes it
 * once. The scalar files are THE reference (C99, -ffp-contract=off).
 *
 * Numerics every tier keeps: integer parts are identical bit for bit; within a tier a token's result depends
 * neither on the number of threads nor on how many tokens share the call.
 */
#ifndef FERMION_KERNELS_H
#define FERMION_KERNELS_H

#include <stddef.h>
#include <stdint.h>

#include "blocks.h"

/* Activations of `tokens` rows, quantised per group of 32 columns: x[k] ~ scale[k/32] * q[k], q in -127..127,
 * scale = max|x| / 127, round half to even. correction[g] = -8 * sum(q in group g): the zero point of the
 * weights, folded in. Rows are cols (q) and cols/32 (scale, correction) apart. */
typedef struct {
    int tokens, cols;
    int8_t *q;           /* [tokens][cols], 64-byte aligned */
    float *scale;        /* [tokens][cols/32] */
    int32_t *correction; /* [tokens][cols/32] */
} fm_q8;

typedef struct {
    const char *tier;

    /* One row of activations: x[cols] -> q[cols], scale[cols/32], correction[cols/32]. */
    void (*quantize_q8)(const float *x, int cols, int8_t *q, float *scale, int32_t *correction);

    /* y[t * ldy + n - 16*tile0] = sum_k W[n][k] x[t][k] for n in rows of tiles tile0..tile1-1, all tokens of x.
     * One float accumulator per (n, t), groups added in ascending k:
     *     acc += (float)(dot_u4s8(group) + correction) * (w_scale * x_scale)      (fused where the tier has FMA)
     * `rows`: indices of the token rows of x to use, or NULL for 0..tokens-1 (experts gather their tokens).
     * `next`: tiles of as many columns that the caller takes next, if known (else NULL), whose start is fetched while
     * the last ones of this call are multiplied by few tokens. */
    void (*q4_matmul)(const fm_block_q4 *w, int cols, int tile0, int tile1, const fm_q8 *x, const int32_t *rows,
                      int tokens, float *y, size_t ldy, const fm_block_q4 *next);

    /* y[t * ldy + n - row0] = dot(W[n], x[t]) for n in row0..row1-1, W row-major float32 [rows][cols]. */
    void (*f32_matmul)(const float *w, int cols, int row0, int row1, const float *x, size_t ldx, const int32_t *rows,
                       int tokens, float *y, size_t ldy);

    /* One row r of a packed matrix as floats: out[cols] (embedding lookup). */
    void (*q4_row)(const fm_block_q4 *w, int cols, int row, float *out);
} fm_matmul_kernels;

/* Fills k for `tier` ("scalar", "ssse3", "avx2", "avx512"); 0, or -1 if this CPU or build lacks it. */
int fm_matmul_kernels_for(const char *tier, fm_matmul_kernels *k);
/* Highest tier this CPU and operating system support (CPUID and XGETBV). */
const char *fm_best_tier(void);

#endif
