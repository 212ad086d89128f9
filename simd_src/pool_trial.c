/* Trials of the thread pool: what Python cannot do itself, since tasks are C functions. See pool_trial_api.h. */
#define _GNU_SOURCE
#include <immintrin.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "pool_trial_api.h"
#include "threads.h"

typedef struct {
    int *visits, *worker_items;
    int spin_cycles;
} trial;

static void count_item(void *arg, int item, int worker) {
    const trial *t = arg;
    const unsigned long long start = __rdtsc();
    while (__rdtsc() - start < (unsigned long long)t->spin_cycles) continue;
    t->visits[item]++;
    t->worker_items[worker]++; /* a worker runs one item at a time: no other thread writes here */
}

double fm_pool_trial(int threads, const int *cpus, int jobs, int items, int spin_cycles, int *visits,
                     int *worker_items) {
    fm_pool *pool = fm_pool_create(threads, cpus);
    if (!pool) return -1.0;
    trial t = {visits, worker_items, spin_cycles};
    struct timespec start, stop;
    int complete = 1;
    clock_gettime(CLOCK_MONOTONIC, &start);
    for (int job = 0; job < jobs && complete; job++) {
        for (int worker = 0; worker < threads; worker++) { /* more than fits, and no address at all */
            fm_pool_ahead(pool, worker, visits + fm_pool_first_item(pool, items, worker), sizeof(int));
            fm_pool_ahead(pool, worker, NULL, job % 2 ? FM_AHEAD_BYTES : 0);
        }
        fm_parallel_for(pool, items, count_item, &t);
        for (int item = 0; item < items; item++) complete &= visits[item] > job;
    }
    clock_gettime(CLOCK_MONOTONIC, &stop);
    fm_pool_destroy(pool);
    if (!complete) return -2.0;
    return (double)(stop.tv_sec - start.tv_sec) + 1e-9 * (double)(stop.tv_nsec - start.tv_nsec);
}

static void nest(void *arg, int item, int worker) {
    (void)item;
    (void)worker;
    fm_parallel_for(arg, 2, nest, arg);
}

void fm_pool_trial_nested(int threads) {
    fm_pool *pool = fm_pool_create(threads, NULL);
    fm_parallel_for(pool, 2, nest, pool);
}

int fm_pool_trial_fork(int threads) {
    enum { ITEMS = 5 };
    int visits[ITEMS] = {0}, workers[64] = {0};
    trial t = {visits, workers, 0};
    fm_pool *pool = threads > 64 ? NULL : fm_pool_create(threads, NULL);
    if (!pool) return -1;
    fm_parallel_for(pool, ITEMS, count_item, &t);
    const pid_t child = fork();
    if (child == 0) {
        alarm(10); /* a child that waits for threads it does not have ends here */
        fm_parallel_for(pool, ITEMS, count_item, &t);
        fm_pool_destroy(pool);
        int good = 1;
        for (int item = 0; item < ITEMS; item++) good &= visits[item] == 2;
        _exit(good ? 0 : 1);
    }
    int status = -1;
    if (child > 0) waitpid(child, &status, 0);
    fm_pool_destroy(pool);
    return status;
}
