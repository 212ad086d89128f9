/* The thread pool (threads.h).
 *
 * Each thread has a lane, an equal run of consecutive items, so that what it reads is one stream; when its own lane is
 * empty it goes through those of the others. A job is published by opening the lanes: one 64-bit word each, of (epoch,
 * next item). An item is taken by a compare-and-swap on it, so it is claimed only while its own job is open: a worker
 * that slept through a job, or was descheduled between reading the job and claiming, fails the swap and looks again.
 * The caller therefore waits for claimed items alone, never for a worker to arrive: on a busy machine a stopped thread
 * delays its own item and nothing else. Waiting is a spin of SPIN_CYCLES, then a futex, so that waiters give the core to
 * whoever they wait for.
 */
#define _GNU_SOURCE
#include "threads.h"

#include <errno.h>
#include <immintrin.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

/* Time-stamp cycles, 10 to 30 us: longer than the gaps between the jobs of a decode step, shorter than a time slice.
 * By the clock and not by count, since `pause` takes 10 cycles on one CPU and 140 on another. */
#define SPIN_CYCLES 60000
#define LINE 64
#define CLOSED 0x7fffffff /* next item while the job's fields are being written */

/* What an idle thread may request. It may read a mix of one job's and the next one's: an address that is not read after
 * all is requested in vain, and an invalid one is no fault. */
typedef struct {
    _Atomic(const char *) at[FM_AHEAD_STRETCHES];
    atomic_int lines[FM_AHEAD_STRETCHES];
} stretches;

typedef struct {
    _Alignas(64) _Atomic uint64_t claim;
    _Alignas(64) stretches ahead; /* of the job that is open */
    struct {
        const char *at[FM_AHEAD_STRETCHES];
        int lines[FM_AHEAD_STRETCHES], count;
    } pending; /* of the one to come; the caller's own */
} lane;

typedef struct {
    _Alignas(64) fm_pool *pool;
    pthread_t thread;
    int index;
} worker;

struct fm_pool {
    int threads;
    unsigned fork_count; /* of the process when the workers started: a forked child has none */
    atomic_int busy;
    worker *workers; /* [threads - 1] */
    lane *lanes;     /* [threads] */
    pthread_t creator;
    cpu_set_t creator_cpus; /* before it was pinned */
    int creator_pinned;

    _Alignas(64) _Atomic(fm_task) task;
    _Atomic(void *) arg;
    atomic_int count;
    atomic_int stop;
    _Alignas(64) _Atomic uint32_t epoch; /* futex: of the newest job */
    atomic_int sleepers;
    _Alignas(64) _Atomic uint32_t unfinished; /* futex: items not yet done */
    atomic_int caller_sleeps;
};

static _Thread_local int inside_task;
static unsigned fork_count;
static pthread_once_t fork_once = PTHREAD_ONCE_INIT;

static void after_fork(void) { fork_count++; }
static void watch_forks(void) { pthread_atfork(NULL, NULL, after_fork); }

static void futex_wait(_Atomic uint32_t *word, uint32_t seen) {
    syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, seen, NULL, NULL, 0);
}

static void futex_wake(_Atomic uint32_t *word, int count) {
    syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, count, NULL, NULL, 0);
}

/* The first item of a lane. */
static uint32_t lane_begin(const fm_pool *pool, uint32_t count, int index) {
    return (uint32_t)((uint64_t)count * (uint32_t)index / (uint32_t)pool->threads);
}

/* Runs items of job `epoch` until none is left, from the worker's own lane on; returns how many. */
static uint32_t run_items(fm_pool *pool, uint32_t epoch, int index) {
    const fm_task task = atomic_load_explicit(&pool->task, memory_order_acquire);
    void *arg = atomic_load_explicit(&pool->arg, memory_order_acquire);
    const uint32_t count = (uint32_t)atomic_load_explicit(&pool->count, memory_order_acquire);
    uint32_t done = 0;
    for (int turn = 0; turn < pool->threads; turn++) {
        const int at = index + turn < pool->threads ? index + turn : index + turn - pool->threads;
        const uint32_t end = lane_begin(pool, count, at + 1);
        _Atomic uint64_t *word = &pool->lanes[at].claim;
        uint64_t claim = atomic_load_explicit(word, memory_order_acquire);
        while (claim >> 32 == epoch && (uint32_t)claim < end) {
            if (!atomic_compare_exchange_weak_explicit(word, &claim, claim + 1, memory_order_acq_rel,
                                                       memory_order_acquire))
                continue;
            inside_task = 1;
            task(arg, (int)(uint32_t)claim, index);
            inside_task = 0;
            done++;
            claim = atomic_load_explicit(word, memory_order_acquire);
        }
    }
    return done;
}

/* Where a thread is in the stretches of its lane. */
typedef struct {
    int stretch, line;
} progress;

/* Requests one more line into second-level cache; 0 if there is none. */
static int request_line(const lane *own, progress *p) {
    for (; p->stretch < FM_AHEAD_STRETCHES; p->stretch++, p->line = 0) {
        if (p->line >= atomic_load_explicit(&own->ahead.lines[p->stretch], memory_order_relaxed)) continue;
        const char *at = atomic_load_explicit(&own->ahead.at[p->stretch], memory_order_relaxed);
        __builtin_prefetch(at + (size_t)p->line++ * LINE, 0, 2);
        return 1;
    }
    return 0;
}

/* Waits until the newest job is not `seen`, and returns it. */
static uint32_t next_epoch(fm_pool *pool, uint32_t seen, int index) {
    const uint64_t start = __rdtsc();
    progress done = {0, 0};
    uint32_t epoch;
    while ((epoch = atomic_load_explicit(&pool->epoch, memory_order_acquire)) == seen) {
        if (request_line(pool->lanes + index, &done)) continue;
        if (__rdtsc() - start < SPIN_CYCLES) {
            _mm_pause();
            continue;
        }
        /* Announced before the word is read again: either this sees the new job or its caller sees a sleeper. */
        atomic_fetch_add(&pool->sleepers, 1);
        if (atomic_load(&pool->epoch) == seen) futex_wait(&pool->epoch, seen);
        atomic_fetch_sub(&pool->sleepers, 1);
    }
    return epoch;
}

static void *work(void *arg) {
    const worker *self = arg;
    fm_pool *pool = self->pool;
    uint32_t epoch = 0;
    for (;;) {
        epoch = next_epoch(pool, epoch, self->index);
        if (atomic_load_explicit(&pool->stop, memory_order_relaxed)) return NULL;
        const uint32_t done = run_items(pool, epoch, self->index);
        if (done && atomic_fetch_sub(&pool->unfinished, done) == done && atomic_load(&pool->caller_sleeps))
            futex_wake(&pool->unfinished, 1);
    }
}

/* The set of one CPU, or -1 for an id that no set can hold. */
static int only(int cpu, cpu_set_t *set) {
    CPU_ZERO(set);
    if (cpu < 0 || cpu >= CPU_SETSIZE) return -1;
    CPU_SET(cpu, set);
    return 0;
}

/* A CPU that this process may not use (container, hot-unplug) leaves its thread unpinned: slower, never wrong. */
static int start_worker(worker *self, const int *cpu) {
    pthread_attr_t attributes;
    cpu_set_t set;
    int error = EINVAL;
    if (cpu && only(*cpu, &set) == 0 && pthread_attr_init(&attributes) == 0) {
        pthread_attr_setaffinity_np(&attributes, sizeof set, &set);
        error = pthread_create(&self->thread, &attributes, work, self);
        pthread_attr_destroy(&attributes);
    }
    if (error == EINVAL) error = pthread_create(&self->thread, NULL, work, self);
    return error ? -1 : 0;
}

static void stop_workers(fm_pool *pool, int started) {
    atomic_store(&pool->stop, 1);
    atomic_fetch_add(&pool->epoch, 1);
    futex_wake(&pool->epoch, started);
    for (int i = 0; i < started; i++) pthread_join(pool->workers[i].thread, NULL);
}

fm_pool *fm_pool_create(int threads, const int *cpus) {
    if (threads < 1) return NULL;
    pthread_once(&fork_once, watch_forks);
    fm_pool *pool = aligned_alloc(64, sizeof *pool);
    worker *workers = aligned_alloc(64, (size_t)threads * sizeof *workers);
    lane *lanes = aligned_alloc(64, (size_t)threads * sizeof *lanes);
    if (!pool || !workers || !lanes) {
        free(pool);
        free(workers);
        free(lanes);
        return NULL;
    }
    *pool = (fm_pool){.threads = threads, .fork_count = fork_count, .workers = workers, .lanes = lanes};
    memset(lanes, 0, (size_t)threads * sizeof *lanes);
    for (int i = 0; i < threads; i++) atomic_init(&lanes[i].claim, CLOSED);
    for (int i = 0; i < threads - 1; i++) {
        workers[i] = (worker){.pool = pool, .index = i + 1};
        if (start_worker(workers + i, cpus ? cpus + i + 1 : NULL) != 0) {
            stop_workers(pool, i);
            free(lanes);
            free(workers);
            free(pool);
            return NULL;
        }
    }
    /* Last, since new threads inherit the mask of the one that makes them. */
    cpu_set_t set;
    pool->creator = pthread_self();
    if (cpus && only(cpus[0], &set) == 0 && sched_getaffinity(0, sizeof pool->creator_cpus, &pool->creator_cpus) == 0)
        pool->creator_pinned = sched_setaffinity(0, sizeof set, &set) == 0;
    return pool;
}

void fm_pool_destroy(fm_pool *pool) {
    if (!pool) return;
    if (pool->creator_pinned && pthread_equal(pool->creator, pthread_self()))
        sched_setaffinity(0, sizeof pool->creator_cpus, &pool->creator_cpus);
    if (pool->fork_count == fork_count) stop_workers(pool, pool->threads - 1);
    free(pool->lanes);
    free(pool->workers);
    free(pool);
}

int fm_pool_threads(const fm_pool *pool) { return pool->threads; }

/* A broken rule of threads.h: going on would run items twice or wait for ever. */
static void misuse(const char *what) {
    fprintf(stderr, "fermion: fm_parallel_for: %s\n", what);
    abort();
}

int fm_pool_first_item(const fm_pool *pool, int count, int worker) {
    return (int)lane_begin(pool, (uint32_t)count, worker);
}

void fm_pool_ahead(fm_pool *pool, int worker, const void *at, size_t bytes) {
    lane *own = pool->lanes + worker;
    size_t lines = (bytes + LINE - 1) / LINE, room = FM_AHEAD_BYTES / LINE;
    for (int i = 0; i < own->pending.count; i++) room -= (size_t)own->pending.lines[i];
    if (lines > room) lines = room;
    if (own->pending.count == FM_AHEAD_STRETCHES || lines == 0) return;
    own->pending.at[own->pending.count] = at;
    own->pending.lines[own->pending.count++] = (int)lines;
}

static void open_stretches(lane *own) {
    for (int i = 0; i < FM_AHEAD_STRETCHES; i++) {
        const int lines = i < own->pending.count ? own->pending.lines[i] : 0;
        atomic_store_explicit(&own->ahead.lines[i], lines, memory_order_relaxed);
        if (lines) atomic_store_explicit(&own->ahead.at[i], own->pending.at[i], memory_order_relaxed);
    }
    own->pending.count = 0;
}

/* Opens a job for the workers; returns its epoch. */
static uint32_t publish(fm_pool *pool, int count, fm_task task, void *arg) {
    const uint32_t last = atomic_load_explicit(&pool->epoch, memory_order_relaxed), epoch = last + 1;
    /* Closed first: a late worker that reads a mix of the old fields and the new ones must not get an item. Whoever
     * acquires one of the new fields has seen these stores, so its swap fails. */
    for (int i = 0; i < pool->threads; i++)
        atomic_store_explicit(&pool->lanes[i].claim, (uint64_t)last << 32 | CLOSED, memory_order_relaxed);
    atomic_store_explicit(&pool->task, task, memory_order_release);
    atomic_store_explicit(&pool->arg, arg, memory_order_release);
    atomic_store_explicit(&pool->count, count, memory_order_release);
    atomic_store_explicit(&pool->unfinished, (uint32_t)count, memory_order_relaxed);
    for (int i = 0; i < pool->threads; i++) open_stretches(pool->lanes + i);
    for (int i = 0; i < pool->threads; i++)
        atomic_store_explicit(&pool->lanes[i].claim, (uint64_t)epoch << 32 | lane_begin(pool, (uint32_t)count, i),
                              memory_order_release);
    atomic_store(&pool->epoch, epoch);
    const int sleepers = atomic_load(&pool->sleepers);
    if (sleepers) futex_wake(&pool->epoch, sleepers < count ? sleepers : count - 1);
    return epoch;
}

static void wait_for_rest(fm_pool *pool) {
    const uint64_t start = __rdtsc();
    progress done = {0, 0};
    uint32_t left;
    while ((left = atomic_load_explicit(&pool->unfinished, memory_order_acquire)) != 0) {
        if (request_line(pool->lanes, &done)) continue;
        if (__rdtsc() - start < SPIN_CYCLES) {
            _mm_pause();
            continue;
        }
        atomic_store(&pool->caller_sleeps, 1);
        if ((left = atomic_load(&pool->unfinished)) != 0) futex_wait(&pool->unfinished, left);
        atomic_store(&pool->caller_sleeps, 0);
    }
}

void fm_parallel_for(fm_pool *pool, int count, fm_task task, void *arg) {
    if (inside_task) misuse("called from within a task");
    if (count <= 0) return;
    if (atomic_exchange(&pool->busy, 1)) misuse("called by two threads at once");
    if (pool->threads == 1 || count == 1 || pool->fork_count != fork_count) {
        inside_task = 1;
        for (int item = 0; item < count; item++) task(arg, item, 0);
        inside_task = 0;
        for (int i = 0; i < pool->threads; i++) pool->lanes[i].pending.count = 0; /* nobody waits in this job */
    } else {
        const uint32_t epoch = publish(pool, count, task, arg);
        const uint32_t done = run_items(pool, epoch, 0);
        atomic_fetch_sub(&pool->unfinished, done);
        wait_for_rest(pool);
    }
    atomic_store(&pool->busy, 0);
}
