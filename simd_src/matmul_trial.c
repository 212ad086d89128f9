/* Timing of the 4-bit products on the thread pool. See matmul_trial_api.h. */
#define _POSIX_C_SOURCE 199309L
#include <string.h>
#include <time.h>

#include "threads.h"
#include "tiers.h"

#include "matmul_trial_api.h"

/* Rows of an item in tiles, as the model cuts its products. */
enum { VECTOR_TILES = 4, MATRIX_TILES = 16 };

typedef struct {
    fm_q4_matmul_fn *multiply;
    const fm_block_q4 *matrix;
    const fm_q8 *x;
    int tiles, item_tiles;
    float *y;
} product;

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void run_item(void *arg, int item, int worker) {
    (void)worker;
    const product *p = arg;
    const int first = item * p->item_tiles, last = first + p->item_tiles < p->tiles ? first + p->item_tiles : p->tiles;
    p->multiply(p->matrix, p->x->cols, first, last, p->x, NULL, p->x->tokens, p->y + (size_t)first * FM_BLOCK_ROWS,
                (size_t)p->tiles * FM_BLOCK_ROWS, NULL);
}

static int greatest_divisor(int a, int b) { return b == 0 ? a : greatest_divisor(b, a % b); }

int fm_matmul_trial(const char *tier, int threads, const int *cpus, const void *blocks, int matrices, int rows,
                    int cols, int8_t *q, float *scale, int32_t *correction, int tokens, float *y, int passes,
                    double *seconds) {
    fm_matmul_kernels k;
    const int maddubs = strcmp(tier, "avx2-maddubs") == 0;
    if (fm_matmul_kernels_for(maddubs ? "avx2" : tier, &k) != 0) return -1;
    fm_pool *pool = fm_pool_create(threads, cpus);
    if (!pool) return -1;
    const fm_q8 x = {tokens, cols, q, scale, correction};
    const int tiles = rows / FM_BLOCK_ROWS, item_tiles = tokens == 1 ? VECTOR_TILES : MATRIX_TILES;
    const size_t matrix_blocks = (size_t)tiles * (cols / FM_BLOCK_COLS);
    int stride = matrices * 5 / 8 + 1; /* coprime to the count, so that every matrix has its turn, far from the last */
    while (greatest_divisor(stride, matrices) != 1) stride++;
    for (int pass = 0; pass < passes; pass++) {
        const double start = now();
        for (int i = 0; i < matrices; i++) {
            const size_t index = (size_t)i * stride % matrices;
            product p = {maddubs ? fm_q4_matmul_avx2 : k.q4_matmul,
                         (const fm_block_q4 *)blocks + index * matrix_blocks, &x, tiles, item_tiles, y};
            fm_parallel_for(pool, (tiles + item_tiles - 1) / item_tiles, run_item, &p);
        }
        seconds[pass] = now() - start;
    }
    fm_pool_destroy(pool);
    return 0;
}

/* Fourteen independent accumulators: more than latency times throughput of any of these instructions. */
#define FOURTEEN(op) op(0) op(1) op(2) op(3) op(4) op(5) op(6) op(7) op(8) op(9) op(10) op(11) op(12) op(13)
#define SSE_PRODUCT(i) "pmaddubsw %%xmm15, %%xmm" #i "\n"
#define AVX_PRODUCT(i) "vpmaddubsw %%ymm15, %%ymm14, %%ymm" #i "\n"
#define VNNI_PRODUCT(i) "vpdpbusd %%zmm15, %%zmm14, %%zmm" #i "\n"
#define REPEAT(body, end)                                                                                         \
    __asm__ volatile("1:\n" body "dec %0\njnz 1b\n" end                                                          \
                     : "+r"(rounds)                                                                               \
                     :                                                                                            \
                     : "cc", "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9",      \
                       "xmm10", "xmm11", "xmm12", "xmm13", "xmm14", "xmm15")

/* Written in assembly, so this file needs no tier's flags; the caller has asked the processor. */
static int products_per_instruction(const char *tier, long rounds) {
    if (strcmp(tier, "avx512") == 0) {
        REPEAT(FOURTEEN(VNNI_PRODUCT), "vzeroupper\n");
        return 64;
    }
    if (strcmp(tier, "avx2") == 0) {
        REPEAT(FOURTEEN(AVX_PRODUCT), "vzeroupper\n");
        return 32;
    }
    REPEAT(FOURTEEN(SSE_PRODUCT), "");
    return 16;
}

double fm_matmul_peak(const char *tier) {
    enum { ROUNDS = 10000, TRIES = 200 };
    fm_matmul_kernels k;
    if (fm_matmul_kernels_for(tier, &k) != 0 || strcmp(tier, "scalar") == 0) return 0.0;
    double best = 0.0;
    for (int i = 0; i < TRIES; i++) {
        const double start = now();
        const int products = products_per_instruction(tier, ROUNDS);
        const double rate = 14.0 * ROUNDS * products / (now() - start);
        if (rate > best) best = rate;
    }
    return best;
}
