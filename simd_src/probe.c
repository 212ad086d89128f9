/* Measures how fast this machine's memory can be read with the access pattern of decode. See probe_api.h. */
#define _POSIX_C_SOURCE 199309L
#include "probe.h"

#include <string.h>
#include <time.h>

#include "kernels.h"
#include "probe_api.h"
#include "threads.h"

typedef uint64_t (*probe_block)(const void *data, size_t bytes);

typedef struct {
    probe_block block;
    const char *data;
    size_t block_bytes;
    size_t count, stride; /* coprime: item * stride mod count visits every block once, far apart */
    uint64_t sum;         /* of all blocks: keeps the reads alive */
} probe_job;

static void read_block(void *arg, int item, int worker)
{
    probe_job *job = arg;
    (void)worker;
    size_t index = (size_t)item * job->stride % job->count;
    uint64_t sum = job->block(job->data + index * job->block_bytes, job->block_bytes);
    __atomic_fetch_xor(&job->sum, sum, __ATOMIC_RELAXED);
}

static size_t gcd(size_t a, size_t b)
{
    while (b != 0) {
        size_t rest = a % b;
        a = b;
        b = rest;
    }
    return a;
}

static probe_block block_for(const char *tier)
{
    fm_matmul_kernels supported; /* the dispatcher is the one judge of what this CPU can run */
    if (fm_matmul_kernels_for(tier, &supported) != 0)
        return NULL;
    if (strcmp(tier, "avx512") == 0)
        return fm_probe_block_avx512;
    if (strcmp(tier, "avx2") == 0)
        return fm_probe_block_avx2;
    if (strcmp(tier, "ssse3") == 0)
        return fm_probe_block_ssse3;
    return fm_probe_block_scalar;
}

double fm_probe_read(const char *tier, int threads, const int *cpus, const void *data, size_t bytes,
                     size_t block_bytes)
{
    probe_job job = {block_for(tier), data, block_bytes, bytes / block_bytes, 0, 0};
    fm_pool *pool = job.block == NULL ? NULL : fm_pool_create(threads, cpus);
    if (pool == NULL)
        return -1.0;
    job.stride = job.count * 5 / 8 + 1;
    while (gcd(job.stride, job.count) != 1)
        job.stride++;
    struct timespec start, stop;
    clock_gettime(CLOCK_MONOTONIC, &start);
    fm_parallel_for(pool, (int)job.count, read_block, &job);
    clock_gettime(CLOCK_MONOTONIC, &stop);
    fm_pool_destroy(pool);
    return (double)(stop.tv_sec - start.tv_sec) + 1e-9 * (double)(stop.tv_nsec - start.tv_nsec);
}
