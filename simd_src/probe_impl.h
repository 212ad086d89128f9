/* One block of the bandwidth probe; each tier's file defines PROBE_NAME and PROBE_LANE (bytes of one load). */
#include "probe.h"

typedef uint64_t probe_lane __attribute__((vector_size(PROBE_LANE)));

/* XOR of all 8-byte words, folded: eight independent chains, so that loads and not latencies bound it. */
uint64_t PROBE_NAME(const void *data, size_t bytes)
{
    const probe_lane *p = __builtin_assume_aligned(data, 64);
    const probe_lane *end = p + bytes / PROBE_LANE;
    probe_lane a[8] = {{0}};
    for (; p != end; p += 8)
        for (int i = 0; i < 8; i++)
            a[i] ^= p[i];
    for (int i = 1; i < 8; i++)
        a[0] ^= a[i];
    uint64_t sum = 0;
    for (unsigned i = 0; i < PROBE_LANE / 8; i++)
        sum ^= a[0][i];
    return sum;
}
