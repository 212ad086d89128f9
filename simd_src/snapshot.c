/* Copies of states (snapshot_api.h). A prefill waits for them, so all of its threads make them; and finding memory that
 * was never written to takes longer than the copy itself, so that can be done ahead. */
#define _GNU_SOURCE
#include <emmintrin.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "model_api.h"
#include "snapshot_api.h"
#include "threads.h"

#define SLICES_PER_THREAD 4 /* a thread that is held up leaves its later ones to others */
#define LINE 64
#define TOUCHED_AT_ONCE (1 << 20) /* longer, and whoever maps memory meanwhile waits for it */

typedef struct {
    void *const *to;
    const void *const *from;
    const size_t *bytes;
    int count, slices;
} copy_job;

static size_t slice_begin(size_t bytes, int slice, int slices) {
    return slice == slices ? bytes : bytes / (size_t)slices * (size_t)slice / LINE * LINE;
}

/* Past the caches, which the pass that goes on needs more than the copy does: a quarter faster, too. */
static void copy_past(char *to, const char *from, size_t bytes) {
    size_t done = 0;
    if ((uintptr_t)to % sizeof(__m128i) == 0)
        for (; done + LINE <= bytes; done += LINE)
            for (size_t at = done; at < done + LINE; at += sizeof(__m128i))
                _mm_stream_si128((__m128i *)(to + at), _mm_loadu_si128((const __m128i *)(from + at)));
    memcpy(to + done, from + done, bytes - done);
}

static void copy_slice(void *arg, int item, int worker) {
    (void)worker;
    const copy_job *job = arg;
    for (int i = 0; i < job->count; i++) {
        const size_t begin = slice_begin(job->bytes[i], item, job->slices);
        const size_t end = slice_begin(job->bytes[i], item + 1, job->slices);
        copy_past((char *)job->to[i] + begin, (const char *)job->from[i] + begin, end - begin);
    }
    _mm_sfence();
}

void fm_snapshot_copy(fm_pool *pool, int count, void *const *to, const void *const *from, const size_t *bytes) {
    copy_job job = {to, from, bytes, count, SLICES_PER_THREAD * fm_pool_threads(pool)};
    fm_parallel_for(pool, job.slices, copy_slice, &job);
}

void fm_snapshot_touch(void *address, size_t bytes, int advice) {
    const uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE);
    uintptr_t at = (uintptr_t)address / page * page;
    const uintptr_t end = (uintptr_t)address + bytes;
    while (at < end) {
        const uintptr_t next = end - at > TOUCHED_AT_ONCE ? at + TOUCHED_AT_ONCE : end;
        if (madvise((void *)at, next - at, advice) == 0) {
            at = next;
            continue;
        }
        /* An older kernel. Or'ing 0 in one step is a write that changes nothing, whoever else writes there. */
        for (; at < next; at += page) __asm__ volatile("lock orb $0, %0" : "+m"(*(char *)at));
    }
}
