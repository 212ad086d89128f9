/* What a processor could do at most, beside what the vision tower does. See vision_trial_api.h. */
#define _POSIX_C_SOURCE 199309L
#include <stdlib.h>
#include <time.h>

#include "vision.h"

#include "vision_trial_api.h"

typedef struct {
    const fm_vision_ops *ops;
    double *products; /* [items] */
} peak_job;

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void peak_item(void *arg, int item, int worker) {
    (void)worker;
    const peak_job *job = arg;
    job->products[item] = job->ops->peak(1000000);
}

double fm_vision_peak(const char *tier, fm_pool *pool) {
    enum { TRIES = 20, ITEMS = 4 }; /* items a thread: one that comes late must not hold up the others */
    const fm_vision_ops *ops = fm_vision_ops_for(tier);
    const int items = ITEMS * fm_pool_threads(pool);
    double *products = calloc((size_t)items, sizeof(*products)), best = 0.0;
    if (!ops || !products) {
        free(products);
        return 0.0;
    }
    for (int i = 0; i < TRIES; i++) {
        peak_job job = {ops, products};
        const double start = now();
        fm_parallel_for(pool, items, peak_item, &job);
        const double seconds = now() - start;
        double sum = 0.0;
        for (int item = 0; item < items; item++) sum += products[item];
        if (sum / seconds > best) best = sum / seconds;
    }
    free(products);
    return best;
}
