/* Which kernels this processor gets: one table a tier, chosen by name and never above what the processor can run. */
#include <string.h>

#include "cpu.h"
#include "tiers.h"

#include "matmul_api.h"

static const fm_matmul_kernels TABLE[] = {
    {"scalar", fm_quantize_q8_scalar, fm_q4_matmul_scalar, fm_f32_matmul_scalar, fm_q4_row},
    {"ssse3", fm_quantize_q8_ssse3, fm_q4_matmul_ssse3, fm_f32_matmul_ssse3, fm_q4_row},
    {"avx2", fm_quantize_q8_avx2, fm_q4_matmul_avx2, fm_f32_matmul_avx2, fm_q4_row},
    {"avx512", fm_quantize_q8_avx2, fm_q4_matmul_avx512, fm_f32_matmul_avx512, fm_q4_row},
};

/* How many entries of TABLE, from the first, this processor runs. */
static size_t usable(const fm_cpu *cpu) { return cpu->avx512 ? 4 : cpu->avx2 ? 3 : cpu->ssse3 ? 2 : 1; }

int fm_matmul_kernels_for(const char *tier, fm_matmul_kernels *k) {
    const fm_cpu cpu = fm_cpu_detect();
    for (size_t i = 0; i < usable(&cpu); i++) {
        if (strcmp(tier, TABLE[i].tier) != 0) continue;
        *k = TABLE[i];
        if (k->q4_matmul == fm_q4_matmul_avx2 && cpu.avx_vnni && fm_q4_matmul_avxvnni)
            k->q4_matmul = fm_q4_matmul_avxvnni;
        return 0;
    }
    return -1;
}

const char *fm_best_tier(void) {
    const fm_cpu cpu = fm_cpu_detect();
    return TABLE[usable(&cpu) - 1].tier;
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
    const int maddubs = strcmp(tier, "avx2-maddubs") == 0;
    if (fm_matmul_kernels_for(maddubs ? "avx2" : tier, &k) != 0) return -1;
    const fm_q8 x = {x_tokens, cols, q, scale, correction};
    (maddubs ? fm_q4_matmul_avx2 : k.q4_matmul)(w, cols, tile0, tile1, &x, rows, tokens, y, ldy, w);
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
