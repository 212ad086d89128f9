/* Products of half precision numbers on tensor cores (compute capability 8.0 on), float32 sums. */
#ifndef FERMION_MMA_HALF_CUH
#define FERMION_MMA_HALF_CUH

#include "../fermi.h"

#if defined(FERMION_EMU)

#define mma_half(d, a, b0, b1) emu_mma(d, a, b0, b1, true, __LINE__)

static inline unsigned half_pair(float low, float high) { return float_to_half(low) | (unsigned)float_to_half(high) << 16; }

#else

/* d[16 x 8] += a[16 x 16] b[16 x 8] by the 32 lanes of a warp. */
static __device__ __forceinline__ void mma_half(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
static __device__ __forceinline__ unsigned half_pair(float low, float high) {
    unsigned pair;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

#endif

/* Two floats as a pair of roundings; `rest` gets what they miss. */
static __device__ __forceinline__ unsigned split_halves(float a, float b, unsigned &rest) {
    const unsigned pair = half_pair(a, b);
    rest = half_pair(a - half_to_float((unsigned short)(pair & 0xffffu)), b - half_to_float((unsigned short)(pair >> 16)));
    return pair;
}

#endif
