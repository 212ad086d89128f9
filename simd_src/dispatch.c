/* Which kernels this processor gets: the table is filled with scalar and overwritten upward, tier by tier. */
#include <string.h>

#include "cpu.h"
#include "tiers.h"

#include "matmul_api.h"

#define TABLE(tier) {#tier, fm_quantize_q8_##tier, fm_q4_matmul_##tier, fm_f32_matmul_##tier, fm_q4_row}

static const fm_matmul_kernels scalar = TABLE(scalar);
static const fm_matmul_kernels ssse3 = TABLE(ssse3);
static const fm_matmul_kernels avx2 = TABLE(avx2);
/* 512-bit registers gain nothing in quantisation, which is one pass over a few KB. */
static const fm_matmul_kernels avx512 = {"avx512", fm_quantize_q8_avx2, fm_q4_matmul_avx512, fm_f32_matmul_avx512,
                                         fm_q4_row};

int fm_matmul_kernels_for(const char *tier, fm_matmul_kernels *k) {
    const fm_cpu cpu = fm_cpu_detect();
    if (strcmp(tier, "scalar") == 0) *k = scalar;
    else if (strcmp(tier, "ssse3") == 0 && cpu.ssse3) *k = ssse3;
    else if (strcmp(tier, "avx2") == 0 && cpu.avx2) *k = avx2;
    else if (strcmp(tier, "avx512") == 0 && cpu.avx512) *k = avx512;
    else return -1;
    if (k->q4_matmul == fm_q4_matmul_avx2 && cpu.avx_vnni) k->q4_matmul = fm_q4_matmul_avxvnni;
    return 0;
}

const char *fm_best_tier(void) {
    const fm_cpu cpu = fm_cpu_detect();
    return cpu.avx512 ? "avx512" : cpu.avx2 ? "avx2" : cpu.ssse3 ? "ssse3" : "scalar";
}

int fm_quantize_rows(const char *tier, const float *x, int tokens, int cols, int8_t *q, float *scale,
                     int32_t *correction) {
    fm_matmul_kernels k;
    if (fm_matmul_kernels_for(tier, &k) != 0) return -1;
    for (int t = 0; t < tokens; t++)
        k.quantize_q8(x + (size_t)t * cols, cols, q + (size_t)t * cols, scale + (size_t)t * (cols / FM_GROUP),
                      correction + (size_t)t * (cols / FM_GROUP));
    return 0;
}

int fm_q4_matmul(const char *tier, const void *w, int cols, int tile0, int tile1, int8_t *q, float *scale,
                 int32_t *correction, int x_tokens, const int32_t *rows, int tokens, float *y, size_t ldy) {
    fm_matmul_kernels k;
    if (fm_matmul_kernels_for(tier, &k) != 0) return -1;
    const fm_q8 x = {x_tokens, cols, q, scale, correction};
    k.q4_matmul(w, cols, tile0, tile1, &x, rows, tokens, y, ldy);
    return 0;
}

int fm_f32_matmul(const char *tier, const float *w, int cols, int row0, int row1, const float *x, size_t ldx,
                  const int32_t *rows, int tokens, float *y, size_t ldy) {
    fm_matmul_kernels k;
    if (fm_matmul_kernels_for(tier, &k) != 0) return -1;
    k.f32_matmul(w, cols, row0, row1, x, ldx, rows, tokens, y, ldy);
    return 0;
}

void fm_q4_row_floats(const void *w, int cols, int row, float *out) { fm_q4_row(w, cols, row, out); }

int fm_layout_numbers(int *out) {
    const int numbers[] = {FM_GROUP, FM_BLOCK_ROWS, FM_BLOCK_COLS, FM_BLOCK_BYTES, FM_Q4_ZERO,
                           (int)offsetof(fm_block_q4, quant)};
    memcpy(out, numbers, sizeof numbers);
    return (int)(sizeof numbers / sizeof *numbers);
}
