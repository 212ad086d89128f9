/* attention_causal_{256,128,64,32}: y = softmax(q K^T D^-1/2) V * sigmoid(gate)      gated full attention, grouped heads
 * q, gate float[T][Hq][D], token rows and heads q_token, q_head, gate_token, gate_head floats apart; y float[T][Hq D]
 * pages   address[page] of this layer's part of each 64-token page: [K, V][Hkv][64][D], half or float32
 *         token t has sequence index position + t and sees keys 0..position + t; the pass's own keys are in the pages
 * map     grid (ceil(T group / 32), Hkv), block 256, group = Hq / Hkv: a block's 32 rows are (token, head of the group)
 *         pairs, so the heads of a group share every key and value they load
 * cost    4 T Hq D (position + T/2) flop; reads each page T group / 32 times, mostly from the second-level cache
 * needs   T group / 32 <= 65535, q < 2^32 floats; 20 KB shared, <= 63 registers
 */
#include "attention_tile.cuh"

/* Two elements of a page. */
static __device__ __forceinline__ float2 load_two(const FERMION_GLOBAL float *at, bool real) {
    float2 pair;
    pair.x = real ? at[0] : 0.0f;
    pair.y = real ? at[1] : 0.0f;
    return pair;
}
static __device__ __forceinline__ float2 load_two(const FERMION_GLOBAL unsigned short *at, bool real) {
    unsigned bits = *(const FERMION_GLOBAL unsigned *)at;
    bits = real ? bits : 0;
    float2 pair;
    pair.x = half_to_float((unsigned short)(bits & 0xffffu));
    pair.y = half_to_float((unsigned short)(bits >> 16));
    return pair;
}

/* Element: of the pages, float or half (as its bits). */
template <int D, typename Element>
struct PagedSource {
    const unsigned long long *pages;
    const FERMION_GLOBAL Element *page;
    int q_token, q_head, tokens, group, position, left;

    /* Row r of block b is pair 32 b + r of (token, head of the group); rows beyond the last pair repeat it. Later tokens
     * see more keys, so their blocks begin first: else one of them would run alone at the end. */
    __device__ __forceinline__ int block() const { return gridDim.x - 1 - block_x_again(); }
    __device__ __forceinline__ int token(int row) const {
        const int flat = block() * QUERY_ROWS + row, last = tokens * group - 1;
        return (flat < last ? flat : last) / group;
    }
    __device__ __forceinline__ int head(int row) const {
        const int flat = block() * QUERY_ROWS + row, last = tokens * group - 1;
        return block_y_again() * group + (flat < last ? flat : last) % group;
    }
    __device__ __forceinline__ unsigned query(int row) const { return (unsigned)token(row) * q_token + head(row) * q_head; }
    __device__ __forceinline__ int visible(int row) const { return position + token(row) + 1; }
    __device__ __forceinline__ void open(int tile) {
        page = (const FERMION_GLOBAL Element *)pages[tile];
        left = position + tokens - tile * KEY_ROWS;
    }
    __device__ __forceinline__ float2 key(int n, int c) const {
        return load_two(page + (blockIdx.y * KEY_ROWS + n) * D + c, true);
    }
    __device__ __forceinline__ float2 value(int n, int c) const {
        return load_two(page + ((gridDim.y + blockIdx.y) * KEY_ROWS + n) * D + c, n < left);
    }
};

template <int D, typename Element>
static __device__ __forceinline__ void attention_causal(SoftmaxState &state, float (&stage)[AttentionShape<D>::STAGE],
                                                        const unsigned long long *pages, int q_token, int q_head,
                                                        int tokens, int group, int position, const float *q,
                                                        const float *gate, int gate_token, int gate_head, float scale,
                                                        float *y) {
    typedef AttentionShape<D> Shape;
    PagedSource<D, Element> source = {pages, 0, q_token, q_head, tokens, group, position, 0};
    float out[4][Shape::CHANNELS];
    attention_tiles<D>(state, stage, source, q, scale, source.visible(QUERY_ROWS - 1), out);
    const int thread = thread_again(), lane = thread % 32, warp = thread / 32;
    const int rows = source.tokens * source.group - source.block() * QUERY_ROWS;
#pragma unroll
    for (int r = 0; r < 4; ++r) {
        const int row = 4 * warp + r;
        if (row >= rows) continue;
        const int token = source.token(row), head = source.head(row);
        const float inverse = 1.0f / state.total[row];
        const float *gates = gate + (long long)token * gate_token + head * gate_head;
        float *target = y + ((long long)token * gridDim.y * source.group + head) * D;
#pragma unroll
        for (int i = 0; i < Shape::CHANNELS; ++i) {
            const int c = Shape::channel(lane, i);
            target[c] = out[r][i] * inverse * sigmoid(gates[c]);
        }
    }
}

#define ATTENTION_CAUSAL(D)                                                                                           \
    extern "C" __global__ void __launch_bounds__(ATTENTION_THREADS) attention_causal_##D(                             \
        const float *q, int q_token, int q_head, const float *gate, int gate_token, int gate_head,                    \
        const unsigned long long *pages, int pages_f32, int position, int tokens, int group, float scale, float *y) { \
        __shared__ SoftmaxState state;                                                                                \
        __shared__ float stage[AttentionShape<D>::STAGE];                                                             \
        if (pages_f32)                                                                                                \
            attention_causal<D, float>(state, stage, pages, q_token, q_head, tokens, group, position, q, gate,        \
                                       gate_token, gate_head, scale, y);                                              \
        else                                                                                                          \
            attention_causal<D, unsigned short>(state, stage, pages, q_token, q_head, tokens, group, position, q,     \
                                                gate, gate_token, gate_head, scale, y);                               \
    }

ATTENTION_CAUSAL(256)
ATTENTION_CAUSAL(128)
ATTENTION_CAUSAL(64)
ATTENTION_CAUSAL(32)
