/* Runs the project's CUDA kernels on the CPU: every thread of a block is a fiber, one block at a time.
 *
 * What it finds: a barrier that some thread of the block misses or that threads reach at different source lines
 * (aborts with a message); reads of shared memory that nothing wrote (filled with NaN before every block); missing
 * barriers, as results that change with the order in which fibers run (emu_set_order: 0 forward, 1 backward, n > 1
 * shuffled from seed n at every barrier); with -fsanitize=address,undefined, accesses beyond arrays.
 * What it cannot: registers, shared memory over 48 KB, speed. Those are checked on the assembled code.
 */
#ifndef FERMION_CUDA_EMU_H
#define FERMION_CUDA_EMU_H

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>

struct emu_dim {
    unsigned x, y, z;
};
extern emu_dim threadIdx, blockIdx, gridDim;

#define __global__
#define __device__
#define __shared__ static __attribute__((section("cuda_shared"), aligned(16)))
#define __launch_bounds__(...)
#define __forceinline__ inline __attribute__((always_inline))
#define __syncthreads() emu_barrier(__LINE__)

struct alignas(16) float4 {
    float x, y, z, w;
};
struct alignas(8) float2 {
    float x, y;
};
struct alignas(8) uint2 {
    unsigned x, y;
};
struct alignas(16) int4 {
    int x, y, z, w;
};
struct alignas(16) uint4 {
    unsigned x, y, z, w;
};

template <class To, class From>
static inline To emu_bits(From from) {
    static_assert(sizeof(To) == sizeof(From), "a cast of bits keeps their number");
    To to;
    std::memcpy(&to, &from, sizeof to);
    return to;
}
static inline float __int_as_float(int i) { return emu_bits<float>(i); }
static inline int __float_as_int(float f) { return emu_bits<int>(f); }

void emu_barrier(int line);
void emu_mma(float *d, const unsigned *a, unsigned b0, unsigned b1, bool half, int line);
void emu_run_block(unsigned threads, void (*kernel)(void *), void *argument);

template <class... Arguments, size_t... Index>
static void emu_call(void (*kernel)(Arguments...), void **arguments, std::index_sequence<Index...>) {
    kernel(*(Arguments *)arguments[Index]...);
}

/* The argument convention of cuLaunchKernel: an array of pointers to the arguments. */
template <class... Arguments>
static void emu_launch(void (*kernel)(Arguments...), const unsigned *grid, unsigned threads, void **arguments) {
    struct Call {
        void (*kernel)(Arguments...);
        void **arguments;
    } call = {kernel, arguments};
    gridDim = {grid[0], grid[1], 1};
    for (unsigned y = 0; y < grid[1]; ++y)
        for (unsigned x = 0; x < grid[0]; ++x) {
            blockIdx = {x, y, 0};
            emu_run_block(
                threads,
                [](void *p) {
                    Call *c = (Call *)p;
                    emu_call(c->kernel, c->arguments, std::index_sequence_for<Arguments...>{});
                },
                &call);
        }
}

/* Exports a kernel of this translation unit as emu_<name>. */
#define EMU_KERNEL(name)                                                                             \
    extern "C" void emu_##name(const unsigned *grid, unsigned threads, void **arguments) {           \
        emu_launch(name, grid, threads, arguments);                                                  \
    }

#endif
