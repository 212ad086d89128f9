/* Block-wide sums in a fixed tree through shared memory (there is no shuffle on Fermi).
 *
 * THREADS is the block size, a power of two. The order of additions depends on nothing but THREADS.
 */
#ifndef FERMION_REDUCE_CUH
#define FERMION_REDUCE_CUH

#include "fermi.h"

template <int THREADS>
static __device__ __forceinline__ float block_sum(float value, float (&scratch)[THREADS], int thread) {
    scratch[thread] = value;
    __syncthreads();
#pragma unroll
    for (int step = THREADS / 2; step > 0; step >>= 1) {
        if (thread < step) scratch[thread] += scratch[thread + step];
        __syncthreads();
    }
    const float total = scratch[0];
    __syncthreads(); /* scratch may be used again at once */
    return total;
}

#endif
