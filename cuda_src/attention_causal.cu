/* attention_causal_{256,128,64,32}: y = softmax(q K^T D^-1/2) V * sigmoid(gate)      gated full attention, grouped heads
 * q, gate float[T][Hq][D], token rows and heads q_token, q_head, gate_token, gate_head floats apart; y float[T][Hq D]
 * pages   address[page] of this layer's part of each 64-token page: [K, V][Hkv][64][D], half or float32
 *         token t has sequence index position + t and sees keys 0..position + t; the pass's own keys are in the pages
 * map     grid (ceil(T group / 32), Hkv), block 256, group = Hq / Hkv: a block's 32 rows are (token, head of the group)
 *         pairs, so the heads of a group share every key and value they load
 * cost    4 T Hq D (position + T/2) flop; reads each page T group / 32 times, mostly from the second-level cache
 * needs   T group / 32 <= 65535; 20 KB shared, <= 63 registers
 */
#include "attention_tile.cuh"

template <int D>
struct PagedSource {
    const float *q;
    const unsigned long long *pages;
    unsigned long long page;
    int q_token, q_head, tokens, group, position, key_offset, value_offset, left, pages_f32;

    __device__ __forceinline__ const float *query(int row) const {
        const int flat = blockIdx.x * QUERY_ROWS + row, token = flat / group;
        return token < tokens ? q + (long long)token * q_token + (blockIdx.y * group + flat % group) * q_head : 0;
    }
    __device__ __forceinline__ int visible(int row) const {
        return position + (int)(blockIdx.x * QUERY_ROWS + row) / group + 1;
    }
    __device__ __forceinline__ void open(int tile) {
        page = pages[tile];
        left = position + tokens - tile * KEY_ROWS;
    }
    __device__ __forceinline__ float2 load(int offset, int n, int c) const {
        float2 pair;
        pair.x = pair.y = 0.0f;
        if (n < left) {
            const int at = offset + n * D + c;
            if (pages_f32) {
                pair = *(const float2 *)((const float *)page + at);
            } else {
                const unsigned bits = *(const unsigned *)((const unsigned short *)page + at);
                pair.x = half_to_float((unsigned short)(bits & 0xffffu));
                pair.y = half_to_float((unsigned short)(bits >> 16));
            }
        }
        return pair;
    }
    __device__ __forceinline__ float2 key(int n, int c) const { return load(key_offset, n, c); }
    __device__ __forceinline__ float2 value(int n, int c) const { return load(value_offset, n, c); }
};

template <int D>
static __device__ __forceinline__ void attention_causal(SoftmaxState &state, float (&stage)[AttentionShape<D>::STAGE],
                                                        PagedSource<D> &source, const float *gate, int gate_token,
                                                        int gate_head, float scale, float *y) {
    typedef AttentionShape<D> Shape;
    const int kv_heads = gridDim.y, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    source.key_offset = blockIdx.y * 64 * D;
    source.value_offset = (kv_heads + blockIdx.y) * 64 * D;
    const int last_row = (blockIdx.x + 1) * QUERY_ROWS < (unsigned)(source.tokens * source.group)
                             ? QUERY_ROWS - 1
                             : source.tokens * source.group - blockIdx.x * QUERY_ROWS - 1;
    float out[4][Shape::CHANNELS];
    attention_tiles<D>(state, stage, source, scale, source.visible(last_row), out);
#pragma unroll
    for (int r = 0; r < 4; ++r) {
        const int row = 4 * warp + r, flat = blockIdx.x * QUERY_ROWS + row, token = flat / source.group;
        if (token >= source.tokens) continue;
        const int head = blockIdx.y * source.group + flat % source.group;
        const float inverse = 1.0f / state.total[row];
#pragma unroll
        for (int i = 0; i < Shape::CHANNELS; ++i) {
            const int c = Shape::channel(lane, i);
            const float opened = sigmoid(gate[(long long)token * gate_token + head * gate_head + c]);
            y[((long long)token * kv_heads * source.group + head) * D + c] = out[r][i] * inverse * opened;
        }
    }
}

#define ATTENTION_CAUSAL(D)                                                                                           \
    extern "C" __global__ void __launch_bounds__(ATTENTION_THREADS) attention_causal_##D(                             \
        const float *q, int q_token, int q_head, const float *gate, int gate_token, int gate_head,                    \
        const unsigned long long *pages, int pages_f32, int position, int tokens, int group, float scale, float *y) { \
        __shared__ SoftmaxState state;                                                                                \
        __shared__ float stage[AttentionShape<D>::STAGE];                                                             \
        PagedSource<D> source = {q, pages, 0, q_token, q_head, tokens, group, position, 0, 0, 0, pages_f32};          \
        attention_causal<D>(state, stage, source, gate, gate_token, gate_head, scale, y);                             \
    }

ATTENTION_CAUSAL(256)
ATTENTION_CAUSAL(128)
ATTENTION_CAUSAL(64)
ATTENTION_CAUSAL(32)
