/* The fiber scheduler behind cuda_emu.h. x86-64 only: a fiber switch saves the six callee-saved registers. */
#include "cuda_emu.h"

#include <cstdio>
#include <cstdlib>
#include <vector>

emu_dim threadIdx, blockIdx, gridDim;
extern char __start_cuda_shared[] __attribute__((weak)), __stop_cuda_shared[] __attribute__((weak));

namespace {

enum State { READY, AT_BARRIER, DONE };
struct Fiber {
    void *stack_pointer;
    char *stack;
    State state;
    int line;
};
const size_t STACK_BYTES = 64 << 10;
std::vector<Fiber> fibers;
unsigned current, order;
void *scheduler_stack_pointer;
void (*block_kernel)(void *);
void *block_argument;

extern "C" void emu_switch(void **save, void *load);
asm(".text\n.globl emu_switch\nemu_switch:\n"
    " push %rbp\n push %rbx\n push %r12\n push %r13\n push %r14\n push %r15\n"
    " mov %rsp,(%rdi)\n mov %rsi,%rsp\n"
    " pop %r15\n pop %r14\n pop %r13\n pop %r12\n pop %rbx\n pop %rbp\n ret\n");

void fiber_entry() {
    block_kernel(block_argument);
    fibers[current].state = DONE;
    emu_switch(&fibers[current].stack_pointer, scheduler_stack_pointer);
    abort(); /* a finished fiber is never resumed */
}

void start_fiber(Fiber &fiber) {
    void **top = (void **)(fiber.stack + STACK_BYTES - 64);
    *--top = nullptr;
    *--top = (void *)fiber_entry;
    for (int saved = 0; saved < 6; ++saved) *--top = nullptr;
    fiber.stack_pointer = top;
    fiber.state = READY;
}

/* All bits set is NaN. An instruction, not memset: the section also holds the address sanitizer's guard zones. */
void poison_shared_memory() {
    char *to = __start_cuda_shared;
    size_t bytes = to ? __stop_cuda_shared - to : 0;
    asm volatile("rep stosb" : "+D"(to), "+c"(bytes) : "a"(0xFF) : "memory");
}

[[noreturn]] void fail(const char *message, int a, int b) {
    fprintf(stderr, message, a, b);
    abort();
}

}  // namespace

extern "C" void emu_set_order(unsigned value) { order = value; }

/* Argument memory: 64-byte aligned, ending exactly where it should, so that the address sanitizer guards its end. */
extern "C" void *emu_allocate(size_t bytes) {
    void *memory = nullptr;
    return posix_memalign(&memory, 64, bytes ? bytes : 1) ? nullptr : memory;
}

extern "C" void emu_free(void *memory) { free(memory); }

void emu_barrier(int line) {
    fibers[current].state = AT_BARRIER;
    fibers[current].line = line;
    emu_switch(&fibers[current].stack_pointer, scheduler_stack_pointer);
}

/* mma.m16n8k16 of pairs of bfloat16 or half precision numbers, row by column. Every thread of the block takes part, each warp for itself; two sets of
 * fragments take turns, so that one barrier separates those who write from those who read. */
void emu_mma(float *d, const unsigned *a, unsigned b0, unsigned b1, bool half, int line) {
    static unsigned fragment_a[2][1024][4], fragment_b[2][1024][2];
    static unsigned char turn[1024];
    const unsigned thread = current, lane = thread % 32, first = thread - lane, set = turn[thread] ^= 1;
    memcpy(fragment_a[set][thread], a, sizeof fragment_a[0][0]);
    fragment_b[set][thread][0] = b0;
    fragment_b[set][thread][1] = b1;
    emu_barrier(line);
    const auto value = [half](unsigned pair, unsigned upper) {
        if (half) return (float)emu_bits<_Float16>((uint16_t)(upper ? pair >> 16 : pair));
        return emu_bits<float>(upper ? pair & 0xffff0000u : pair << 16);
    };
    for (unsigned c = 0; c < 4; ++c) {
        const unsigned row = lane / 4 + 8 * (c / 2), column = lane % 4 * 2 + c % 2;
        double sum = 0;
        for (unsigned k = 0; k < 16; ++k) {
            const unsigned with_a = first + row % 8 * 4 + k % 8 / 2, with_b = first + column * 4 + k % 8 / 2;
            sum += (double)value(fragment_a[set][with_a][row / 8 + 2 * (k / 8)], k & 1) *
                   value(fragment_b[set][with_b][k / 8], k & 1);
        }
        d[c] += (float)sum;
    }
}

void emu_run_block(unsigned threads, void (*kernel)(void *), void *argument) {
    block_kernel = kernel;
    block_argument = argument;
    poison_shared_memory();
    while (fibers.size() < threads) fibers.push_back({nullptr, (char *)aligned_alloc(64, STACK_BYTES), DONE, 0});
    std::vector<unsigned> sequence(threads);
    for (unsigned i = 0; i < threads; ++i) {
        start_fiber(fibers[i]);
        sequence[i] = order == 1 ? threads - 1 - i : i;
    }
    uint64_t random = order * 0x9E3779B97F4A7C15ull + 1;
    for (;;) {
        if (order > 1)
            for (unsigned i = threads - 1; i; --i) {
                random = random * 6364136223846793005ull + 1442695040888963407ull;
                std::swap(sequence[i], sequence[(random >> 33) % (i + 1)]);
            }
        int done = 0, waiting = 0, line = 0;
        for (unsigned i : sequence) {
            if (fibers[i].state != DONE) {
                current = i;
                threadIdx = {i, 0, 0};
                emu_switch(&scheduler_stack_pointer, fibers[i].stack_pointer);
            }
            if (fibers[i].state == DONE) {
                ++done;
            } else if (waiting++ == 0) {
                line = fibers[i].line;
            } else if (line != fibers[i].line) {
                fail("cuda_emu: threads wait at different barriers (lines %d and %d)\n", line, fibers[i].line);
            }
        }
        if (!waiting) return;
        if (done) fail("cuda_emu: a barrier at line %d was missed by %d threads that have returned\n", line, done);
    }
}
