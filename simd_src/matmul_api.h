/* The matmul kernels one call at a time, by tier: what tests and benchmarks use (the model calls through the table).
 * Contracts: kernels.h. Every function that takes a tier returns -1 if this CPU or build lacks it, else 0.
 */

/* Highest tier this CPU and operating system support: "scalar", "ssse3", "avx2" or "avx512". */
const char *fm_best_tier(void);

/* x [tokens][cols] -> q [tokens][cols], scale and correction [tokens][cols/32]. */
int fm_quantize_rows(const char *tier, const float *x, int tokens, int cols, int8_t *q, float *scale,
                     int32_t *correction);
/* tier may also be "avx2-maddubs": the avx2 tier as on a CPU without AVX-VNNI. */
int fm_q4_matmul(const char *tier, const void *w, int cols, int tile0, int tile1, int8_t *q, float *scale,
                 int32_t *correction, int x_tokens, const int32_t *rows, int tokens, float *y, size_t ldy);
int fm_f32_matmul(const char *tier, const float *w, int cols, int row0, int row1, const float *x, size_t ldx,
                  const int32_t *rows, int tokens, float *y, size_t ldy);
void fm_q4_row_floats(const void *w, int cols, int row, float *out);

/* Numbers of blocks.h: group, block rows, block columns, block bytes, zero nibble, offset of the nibbles. Returns how
 * many it wrote (6). */
int fm_layout_numbers(int *out);
