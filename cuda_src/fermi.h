/* The CUDA C++ dialect of this project: what every .cu file may use.
 *
 * One .cu file is compiled in two ways:
 *   PTX for compute capability 2.0   plain clang, no CUDA toolkit (see tests/cuda/check_ptx.py)
 *   x86 code, -DFERMION_EMU          g++; tests/cuda/emu runs every CUDA thread as a fiber
 *
 * The feature set is Fermi's: no shuffle, no read-only loads, no half arithmetic, no integer dot products,
 * at most 63 registers, 48 KB of shared memory and 65,535 blocks per grid axis. There is no device library for
 * this target, so the few functions of float32 that the model needs are written here. Nothing is contracted by
 * the compiler (-ffp-contract=off): a fused multiply-add is spelled fmaf, so that a token's result never depends
 * on how a loop was unrolled.
 *
 * __shared__ arrays are declared in the kernel itself and handed to device functions by reference.
 */
#ifndef FERMION_FERMI_H
#define FERMION_FERMI_H

#if defined(FERMION_EMU)

#include "cuda_emu.h"

#define FERMION_GLOBAL

static inline float exp2_approx(float x) { return exp2f(x); }
static inline float2 halves_to_float(unsigned word) { return {(float)(word & 0xffffu), (float)(word >> 16)}; }
static inline unsigned thread_again() { return threadIdx.x; }
static inline unsigned block_x_again() { return blockIdx.x; }
static inline unsigned block_y_again() { return blockIdx.y; }
static inline float half_to_float(unsigned short h) { return (float)emu_bits<_Float16>(h); }
static inline unsigned short float_to_half(float f) { return emu_bits<unsigned short>((_Float16)f); }

#else

#define __global__ __attribute__((global))
#define __device__ __attribute__((device))
#define FERMION_GLOBAL __attribute__((address_space(1))) /* where an address comes as a number */
#define __shared__ __attribute__((shared, aligned(16))) /* 64-bit loads need 8 */
#define __launch_bounds__(...) __attribute__((launch_bounds(__VA_ARGS__)))
#define __forceinline__ __inline__ __attribute__((always_inline))

#define FERMION_SPECIAL_REGISTER(TYPE, NAME)                                                                 \
    struct TYPE {                                                                                            \
        __declspec(property(get = get_x)) unsigned x;                                                        \
        __declspec(property(get = get_y)) unsigned y;                                                        \
        __declspec(property(get = get_z)) unsigned z;                                                        \
        static __device__ __forceinline__ unsigned get_x() { return __nvvm_read_ptx_sreg_##NAME##_x(); }     \
        static __device__ __forceinline__ unsigned get_y() { return __nvvm_read_ptx_sreg_##NAME##_y(); }     \
        static __device__ __forceinline__ unsigned get_z() { return __nvvm_read_ptx_sreg_##NAME##_z(); }     \
    };
FERMION_SPECIAL_REGISTER(fermion_tid, tid)
FERMION_SPECIAL_REGISTER(fermion_ctaid, ctaid)
FERMION_SPECIAL_REGISTER(fermion_nctaid, nctaid)
extern const __device__ __attribute__((weak)) fermion_tid threadIdx;
extern const __device__ __attribute__((weak)) fermion_ctaid blockIdx;
extern const __device__ __attribute__((weak)) fermion_nctaid gridDim;

struct __attribute__((aligned(16))) float4 {
    float x, y, z, w;
};
struct __attribute__((aligned(8))) float2 {
    float x, y;
};
struct __attribute__((aligned(8))) uint2 {
    unsigned x, y;
};
struct __attribute__((aligned(16))) int4 {
    int x, y, z, w;
};
struct __attribute__((aligned(16))) uint4 {
    unsigned x, y, z, w;
};
struct int3 {
    int x, y, z;
};

/* The indices, read anew: a value that is needed before and after a loop then holds no register inside it. */
static __device__ __forceinline__ unsigned thread_again() {
    unsigned index;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(index));
    return index;
}
static __device__ __forceinline__ unsigned block_x_again() {
    unsigned index;
    asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(index));
    return index;
}
static __device__ __forceinline__ unsigned block_y_again() {
    unsigned index;
    asm volatile("mov.u32 %0, %%ctaid.y;" : "=r"(index));
    return index;
}

static __device__ __forceinline__ float fmaf(float a, float b, float c) { return __nvvm_fma_rn_f(a, b, c); }
static __device__ __forceinline__ float fmaxf(float a, float b) { return __nvvm_fmax_f(a, b); }
static __device__ __forceinline__ float fminf(float a, float b) { return __nvvm_fmin_f(a, b); }
static __device__ __forceinline__ float fabsf(float a) { return __builtin_fabsf(a); }
static __device__ __forceinline__ float sqrtf(float a) { return __nvvm_sqrt_rn_f(a); }
static __device__ __forceinline__ float exp2_approx(float a) { return __nvvm_ex2_approx_ftz_f(a); }
static __device__ __forceinline__ float __int_as_float(int i) { return __builtin_bit_cast(float, i); }
static __device__ __forceinline__ int __float_as_int(float f) { return __builtin_bit_cast(int, f); }
static __device__ __forceinline__ float half_to_float(unsigned short h) {
    float f;
    asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(h));
    return f;
}
static __device__ __forceinline__ unsigned short float_to_half(float f) {
    unsigned short h;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(f));
    return h;
}
/* The two 16-bit integers of a word as floats: the assembler folds the choice of the half into the conversion. */
static __device__ __forceinline__ float2 halves_to_float(unsigned word) {
    float2 f;
    asm("{\n .reg .b16 low, high;\n mov.b32 {low, high}, %2;\n cvt.rn.f32.u16 %0, low;\n cvt.rn.f32.u16 %1, high;\n}"
        : "=f"(f.x), "=f"(f.y)
        : "r"(word));
    return f;
}

#endif

/* e^x for every float: the exponent is x log2(e) in two parts, so the error stays at 2^-22 for large |x| too. */
static __device__ __forceinline__ float exp_f32(float x) {
    x = fmaxf(fminf(x, 88.72f), -104.0f);
    const float head = x * 1.44269504f;
    const float tail = fmaf(x, 1.92596299e-8f, fmaf(x, 1.44269504f, -head));
    const float y = exp2_approx(head);
    return fmaf(y, tail * 0.693147182f, y);
}

/* log(x) for normal positive x: exponent, then atanh series on the mantissa in [sqrt(1/2), sqrt(2)). */
static __device__ __forceinline__ float log_f32(float x) {
    const int bits = __float_as_int(x) - 0x3f3504f3;
    const int exponent = bits >> 23;
    const float m = __int_as_float((bits & 0x007fffff) + 0x3f3504f3);
    const float s = (m - 1.0f) / (m + 1.0f);
    const float s2 = s * s;
    float p = fmaf(s2, 0.142857143f, 0.2f);
    p = fmaf(s2, p, 0.333333333f);
    p = fmaf(s2 * s2, s2 * s2 * 0.111111111f, s2 * p);
    const float log_m = fmaf(2.0f * s, p, 2.0f * s);
    return fmaf((float)exponent, 0.693147182f, log_m);
}

/* log(1 + e^x): the identity x above 20, as the model's definition has it. The quotient mends the rounding of 1 + y. */
static __device__ __forceinline__ float softplus(float x) {
    if (x > 20.0f) return x;
    const float y = exp_f32(x), u = 1.0f + y;
    return u == 1.0f ? y : log_f32(u) * (y / (u - 1.0f));
}

static __device__ __forceinline__ float sigmoid(float x) { return 1.0f / (1.0f + exp_f32(-x)); }
static __device__ __forceinline__ float silu(float x) { return x / (1.0f + exp_f32(-x)); }

#endif
