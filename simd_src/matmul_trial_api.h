/* Timing of the 4-bit products on the thread pool (matmul_trial.c), for tests/bench/matmul.py. Prototypes only, read by
 * the compiler and by the Python binding.
 *
 * A trial takes `matrices` equal matrices [rows][cols], packed back to back, in scattered order (as experts are read),
 * each as one job cut into items of up to 64 rows, times the same `tokens` quantised activations. y: [tokens][rows].
 * Starting the pool is not timed. Seconds of each of `passes` passes over all matrices -> seconds[passes].
 * Returns 0, or -1 if the pool cannot be made or this CPU lacks the tier (or "avx2-maddubs", as in matmul_api.h). */
int fm_matmul_trial(const char *tier, int threads, const int *cpus, const void *blocks, int matrices, int rows,
                    int cols, int8_t *q, float *scale, int32_t *correction, int tokens, float *y, int passes,
                    double *seconds);
/* Multiply-adds a second of one thread that does nothing but this tier's byte products from registers: what its
 * kernels could reach at most. 0 if this CPU lacks the tier. */
double fm_matmul_peak(const char *tier);
