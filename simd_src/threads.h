/* The thread pool: one per process user (engine), physical cores, pinned, short spin then sleep. */
#ifndef FERMION_THREADS_H
#define FERMION_THREADS_H

#include <stddef.h>

typedef struct fm_pool fm_pool;

/* One of `count` independent items; `worker` in 0..threads-1 indexes per-thread scratch. */
typedef void (*fm_task)(void *arg, int item, int worker);

/* threads >= 1, the caller included (it works too). cpus: logical CPU ids to pin to, one per thread, or NULL: no
 * pinning. The first is the creating thread's own, which should be the one that calls fm_parallel_for: unpinned it
 * may share a core with a worker (measured: half the speed). It gets its old mask back from fm_pool_destroy, if it
 * calls that too. NULL on failure. */
fm_pool *fm_pool_create(int threads, const int *cpus);
void fm_pool_destroy(fm_pool *pool);
int fm_pool_threads(const fm_pool *pool);

/* Memory that `worker` will read when it begins the job after the next one (fm_pool_first_item says where): it requests
 * that once it has nothing left to do in the next job, rather than to wait idly. Any address will do. FM_AHEAD_STRETCHES
 * a worker and FM_AHEAD_BYTES in all, in the order of the calls; what goes beyond is left out. */
enum { FM_AHEAD_STRETCHES = 8, FM_AHEAD_BYTES = 64 << 10 };
void fm_pool_ahead(fm_pool *pool, int worker, const void *at, size_t bytes);

/* The item at which `worker` begins in a job of `count`; of the thread count itself, that is `count`. */
int fm_pool_first_item(const fm_pool *pool, int count, int worker);

/* Runs all items and returns when all are done. Each thread begins with an equal run of consecutive items, which should
 * therefore lie in memory one after another, and then helps the others; items are claimed one at a time.
 * Results must not depend on which worker runs an item. Not reentrant. */
void fm_parallel_for(fm_pool *pool, int count, fm_task task, void *arg);

#endif
