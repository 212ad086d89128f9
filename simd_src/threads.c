/* One futex-based pool. A job is a count of items; a worker claims one by a compare-and-swap on `claim`, whose upper
 * half is the job's number and lower half the items nobody has claimed yet. The job's task, argument and count are
 * read only after a successful claim: the job cannot end, and so cannot be replaced, while a claimed item is open.
 *
 * On a busy machine any thread may lose its processor at any time. Nobody waits in a long spin for another: a waiter
 * spins a few microseconds (the usual gap between two stages of a layer) and then sleeps in the kernel, which leaves
 * its processor to whoever it waits for. A worker that sleeps through a whole job costs that job nothing.
 */
#define _GNU_SOURCE
#include "threads.h"

#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>
#include <x86intrin.h>

#include "matmul_api.h"

#define SPIN_CYCLES 50000 /* about 20 microseconds; longer gaps are the sampler's and HTTP's, not ours */

typedef struct {
    fm_pool *pool;
    int worker;
} worker_arg;

struct fm_pool {
    int threads;
    pthread_t *ids; /* workers 1..threads-1 */
    worker_arg *args;
    fm_task task;
    void *arg;
    int count;
    _Alignas(64) _Atomic uint64_t claim; /* job number << 32 | items not yet claimed */
    _Alignas(64) _Atomic uint32_t done;  /* items finished; futex word of the caller */
    _Atomic int caller_sleeps;
    _Alignas(64) _Atomic uint32_t epoch; /* jobs started; futex word of the workers */
    _Atomic int sleepers;
    _Atomic int stop;
    _Atomic int busy; /* a job is running: nested or concurrent calls are a caller's bug */
};

static void futex_wait(_Atomic uint32_t *word, uint32_t seen) {
    syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, seen, NULL, NULL, 0);
}

static void futex_wake(_Atomic uint32_t *word, int waiters) {
    syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, waiters, NULL, NULL, 0);
}

/* Claims and runs items until none is left. */
static void work(fm_pool *pool, int worker) {
    uint64_t claim = atomic_load(&pool->claim);
    while ((uint32_t)claim != 0) {
        if (!atomic_compare_exchange_weak(&pool->claim, &claim, claim - 1)) continue;
        const uint32_t count = (uint32_t)pool->count;
        pool->task(pool->arg, (int)(count - (uint32_t)claim), worker);
        if (atomic_fetch_add(&pool->done, 1) + 1 == count && atomic_load(&pool->caller_sleeps))
            futex_wake(&pool->done, 1);
        claim = atomic_load(&pool->claim);
    }
}

static void *worker_main(void *raw) {
    const worker_arg *self = raw;
    fm_pool *pool = self->pool;
    uint32_t seen = 0;
    while (!atomic_load(&pool->stop)) {
        work(pool, self->worker);
        uint32_t epoch = atomic_load(&pool->epoch);
        if (epoch != seen) { /* a job began since: look again before resting */
            seen = epoch;
            continue;
        }
        const uint64_t start = __rdtsc();
        while (atomic_load_explicit(&pool->epoch, memory_order_acquire) == seen && __rdtsc() - start < SPIN_CYCLES)
            _mm_pause();
        atomic_fetch_add(&pool->sleepers, 1);
        while (atomic_load(&pool->epoch) == seen) futex_wait(&pool->epoch, seen);
        atomic_fetch_sub(&pool->sleepers, 1);
    }
    return NULL;
}

static void pin(pthread_t thread, int cpu) {
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(cpu, &set);
    /* Refused when the process may not use that processor any more; unpinned is slower, never wrong. */
    (void)pthread_setaffinity_np(thread, sizeof set, &set);
}

fm_pool *fm_pool_create(int threads, const int *cpus) {
    if (threads < 1) return NULL;
    fm_pool *pool = aligned_alloc(64, (sizeof *pool + 63) / 64 * 64);
    if (!pool) return NULL;
    *pool = (fm_pool){.threads = 1};
    pool->ids = calloc((size_t)threads, sizeof *pool->ids);
    pool->args = calloc((size_t)threads, sizeof *pool->args);
    if (!pool->ids || !pool->args) {
        fm_pool_destroy(pool);
        return NULL;
    }
    for (int i = 1; i < threads; i++) {
        pool->args[i] = (worker_arg){pool, i};
        if (pthread_create(&pool->ids[i], NULL, worker_main, &pool->args[i]) != 0) {
            fm_pool_destroy(pool);
            return NULL;
        }
        pool->threads = i + 1;
        if (cpus) pin(pool->ids[i], cpus[i]);
    }
    if (cpus) pin(pthread_self(), cpus[0]);
    return pool;
}

void fm_pool_destroy(fm_pool *pool) {
    if (!pool) return;
    atomic_store(&pool->stop, 1);
    atomic_fetch_add(&pool->epoch, 1);
    futex_wake(&pool->epoch, INT_MAX);
    for (int i = 1; i < pool->threads; i++) pthread_join(pool->ids[i], NULL);
    free(pool->ids);
    free(pool->args);
    free(pool);
}

int fm_pool_threads(const fm_pool *pool) { return pool->threads; }

void fm_parallel_for(fm_pool *pool, int count, fm_task task, void *arg) {
    if (count <= 0) return;
    if (pool->threads == 1 || count == 1) {
        for (int i = 0; i < count; i++) task(arg, i, 0);
        return;
    }
    if (atomic_exchange(&pool->busy, 1)) abort(); /* a nested call would wait for itself */
    pool->task = task;
    pool->arg = arg;
    pool->count = count;
    atomic_store(&pool->done, 0);
    const uint64_t job = (atomic_load(&pool->claim) >> 32) + 1;
    atomic_store(&pool->claim, job << 32 | (uint32_t)count);
    atomic_fetch_add(&pool->epoch, 1);
    const int sleepers = atomic_load(&pool->sleepers);
    if (sleepers > 0) futex_wake(&pool->epoch, count - 1 < sleepers ? count - 1 : sleepers);

    work(pool, 0);

    const uint64_t start = __rdtsc();
    uint32_t done;
    while ((done = atomic_load_explicit(&pool->done, memory_order_acquire)) != (uint32_t)count) {
        if (__rdtsc() - start < SPIN_CYCLES) {
            _mm_pause();
            continue;
        }
        atomic_store(&pool->caller_sleeps, 1);
        if ((done = atomic_load(&pool->done)) != (uint32_t)count) futex_wait(&pool->done, done);
        atomic_store(&pool->caller_sleeps, 0);
    }
    atomic_store(&pool->busy, 0);
}

static void count_item(void *arg, int item, int worker) {
    (void)worker;
    atomic_fetch_add((_Atomic int *)arg + item, 1);
}

long fm_pool_check(int threads, int items, int rounds) {
    fm_pool *pool = fm_pool_create(threads, NULL);
    _Atomic int *seen = calloc((size_t)items + 1, sizeof *seen);
    long wrong = -1;
    if (pool && seen) {
        wrong = 0;
        for (int round = 1; round <= rounds; round++) {
            fm_parallel_for(pool, items, count_item, seen);
            for (int i = 0; i < items; i++) wrong += atomic_load(seen + i) != round;
        }
    }
    free(seen);
    fm_pool_destroy(pool);
    return wrong;
}
