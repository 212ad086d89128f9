/* expert_count, expert_plan, expert_scatter: groups the (token, choice) pairs of a pass by expert
 *
 * Deterministic: an expert's rows are in ascending order of pair index p = token * k + choice.
 * pairs   int[P] the chosen expert of each pair, P = T k
 * counts  int[E]; starts int[E] first permuted row of each expert
 * tiles   int4[] {slot of the expert's weights, first row, rows, tile rows}: of 64 rows, then for the rest one of
 *         64, 32 or 16 rows, or of 32 and of 16, in expert order; tile_count int[1]; at most P/32 + E entries, nor more
 *         than P/64 + 2 E
 * slots   int[E] place of the expert's weights on the card, or null: expert e in slot e
 * rows    int[P] token of each permuted row (P rows); places int[P] permuted row of each pair
 * map     count: grid (E), block 256;  plan: one block of 512;  scatter: grid (E), block 256
 * cost    E P 4 B read twice, mostly from the second-level cache
 * needs   E <= 512; 2-6 KB shared
 */
#include "fermi.h"

#define MAX_EXPERTS 512
#define THREADS 256

/* Inclusive prefix sum over the block's THREADS values; every thread gets its own prefix. */
template <int N>
static __device__ __forceinline__ int prefix_sum(int value, int (&scratch)[N], int thread) {
    scratch[thread] = value;
    __syncthreads();
#pragma unroll
    for (int step = 1; step < N; step <<= 1) {
        const int before = thread >= step ? scratch[thread - step] : 0;
        __syncthreads();
        scratch[thread] += before;
        __syncthreads();
    }
    return scratch[thread];
}

extern "C" __global__ void __launch_bounds__(THREADS)
expert_count(const int *pairs, int pair_count, int *counts) {
    __shared__ int scratch[THREADS];
    const int expert = blockIdx.x, thread = threadIdx.x;
    int found = 0;
    for (int p = thread; p < pair_count; p += THREADS) found += pairs[p] == expert;
    const int total = prefix_sum(found, scratch, thread);
    if (thread == THREADS - 1) counts[expert] = total;
}

extern "C" __global__ void __launch_bounds__(MAX_EXPERTS)
expert_plan(const int *counts, int experts, const int *slots, int *starts, int4 *tiles, int *tile_count) {
    __shared__ int scratch[MAX_EXPERTS];
    const int expert = threadIdx.x;
    const int count = expert < experts ? counts[expert] : 0, rest = count % 64;
    const int own_tiles = count / 64 + (rest > 0) + (rest > 32 && rest <= 48);
    const int start = prefix_sum(count, scratch, expert) - count;
    __syncthreads();
    const int last_tile = prefix_sum(own_tiles, scratch, expert);
    if (expert >= experts) return;
    starts[expert] = start;
    if (expert == experts - 1) tile_count[0] = last_tile;
    const int slot = slots ? slots[expert] : expert;
    for (int i = 0, first = 0; i < own_tiles; ++i) {
        const int left = count - first, height = left > 48 ? 64 : left > 16 ? 32 : 16;
        int4 tile;
        tile.x = slot;
        tile.y = start + first;
        tile.z = left < height ? left : height;
        tile.w = height;
        tiles[last_tile - own_tiles + i] = tile;
        first += height;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
expert_scatter(const int *pairs, int pair_count, int k, const int *starts, int *rows, int *places) {
    __shared__ int scratch[THREADS];
    const int expert = blockIdx.x, thread = threadIdx.x;
    int next = starts[expert];
    for (int base = 0; base < pair_count; base += THREADS) {
        const int p = base + thread, mine = p < pair_count && pairs[p] == expert;
        const int place = next + prefix_sum(mine, scratch, thread) - mine;
        if (mine) {
            rows[place] = p / k;
            places[p] = place;
        }
        next += scratch[THREADS - 1];
        __syncthreads(); /* scratch is overwritten by the next round */
    }
}
