/* attention_causal_{256,128,64,32} for tensor cores: arguments, launch and meaning as in ../attention_causal.cu
 *
 * Queries and probabilities are sums of two half precision numbers each, the second what the first leaves over: 22 bits.
 * Keys and values of half precision are used as they are; float32 ones are split likewise, less the product of both rests.
 *
 * A warp multiplies 16 of the block's 32 rows with 16 of a tile's 64 keys, then with a quarter of the channels of all 64
 * values. Both operands come from memory as a lane needs them: the order of what is summed over is free if the two
 * factors share it, so lane t of four takes eight consecutive channels of a key, or four consecutive keys; and so is the
 * order of the channels of a result. Scores, probabilities and their sums lie in shared memory, as on other cards.
 *
 * cost  8 T Hq D (position + T/2) flop of half precision; reads each page T group / 32 times
 * needs as there, and |q|, |k|, |v| < 65,504; 48 KB shared
 */
#include "../attention_tile.cuh"
#include "mma_half.cuh"

/* The queries of a block, split; rows of words of two channels, padded so that eight lanes' loads do not collide. */
template <int D>
struct SplitQueries {
    static const int PITCH = D / 2 + 16;
    unsigned high[QUERY_ROWS][PITCH], low[QUERY_ROWS][PITCH];
};

struct Pass {
    const unsigned long long *pages;
    int q_token, q_head, tokens, group, position;

    /* As in ../attention_causal.cu: row r of block b is pair 32 b + r of (token, head of the group), rows beyond the last
     * pair repeat it, and the blocks of later tokens, which see more keys, begin first. */
    __device__ __forceinline__ int block() const { return gridDim.x - 1 - blockIdx.x; }
    __device__ __forceinline__ int pair(int row) const {
        const int flat = block() * QUERY_ROWS + row, last = tokens * group - 1;
        return flat < last ? flat : last;
    }
    __device__ __forceinline__ int token(int row) const { return pair(row) / group; }
    __device__ __forceinline__ int head(int row) const { return blockIdx.y * group + pair(row) % group; }
    __device__ __forceinline__ int visible(int row) const { return position + token(row) + 1; }
};

/* COUNT consecutive numbers (a multiple of two, or one) as words of two halves; `low`: what they miss. */
template <int COUNT>
struct HalfWords {
    static const int WORDS = (COUNT + 1) / 2;
    unsigned high[WORDS], low[WORDS];

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int i = 0; i < WORDS; ++i) high[i] = low[i] = 0;
    }
    __device__ __forceinline__ void load(const unsigned short *from) {
        if (COUNT == 1) high[0] = *from;
        if (COUNT == 2) high[0] = *(const unsigned *)from;
        if (COUNT == 4) {
            const uint2 two = *(const uint2 *)from;
            high[0] = two.x;
            high[WORDS - 1] = two.y;
        }
        if (COUNT == 8) {
            const uint4 four = *(const uint4 *)from;
            high[0] = four.x;
            high[1 % WORDS] = four.y;
            high[2 % WORDS] = four.z;
            high[WORDS - 1] = four.w;
        }
    }
    __device__ __forceinline__ void load(const float *from) {
#pragma unroll
        for (int i = 0; i < WORDS; ++i) high[i] = split_halves(from[2 * i], COUNT == 1 ? 0.0f : from[2 * i + 1], low[i]);
    }
};

/* score[f]: rows 16 (warp / 4).., keys 16 (warp % 4) + 8 f.. of a tile. `keys`: the tile's first; those from `left` on
 * count as zeros. */
template <int D, typename Element>
static __device__ __forceinline__ void split_scores(const SplitQueries<D> &queries, const Element *keys, int left,
                                                    float (&score)[2][4]) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    const int row = warp / 4 * 16 + g, key = warp % 4 * 16 + g;
#pragma unroll
    for (int f = 0; f < 2; ++f)
#pragma unroll
        for (int c = 0; c < 4; ++c) score[f][c] = 0.0f;
#pragma unroll 4
    for (int c = 0; c < D; c += 32) {
        HalfWords<8> k[2];
#pragma unroll
        for (int f = 0; f < 2; ++f) {
            if (key + 8 * f < left)
                k[f].load(keys + (key + 8 * f) * D + c + 8 * t);
            else
                k[f].clear();
        }
        const uint4 high0 = *(const uint4 *)&queries.high[row][c / 2 + 4 * t],
                     high1 = *(const uint4 *)&queries.high[row + 8][c / 2 + 4 * t],
                     low0 = *(const uint4 *)&queries.low[row][c / 2 + 4 * t],
                     low1 = *(const uint4 *)&queries.low[row + 8][c / 2 + 4 * t];
        const unsigned high[2][4] = {{high0.x, high1.x, high0.y, high1.y}, {high0.z, high1.z, high0.w, high1.w}};
        const unsigned low[2][4] = {{low0.x, low1.x, low0.y, low1.y}, {low0.z, low1.z, low0.w, low1.w}};
#pragma unroll
        for (int step = 0; step < 2; ++step)
#pragma unroll
            for (int f = 0; f < 2; ++f) {
                if (sizeof(Element) == 4) mma_half(score[f], high[step], k[f].low[2 * step], k[f].low[2 * step + 1]);
                mma_half(score[f], low[step], k[f].high[2 * step], k[f].high[2 * step + 1]);
                mma_half(score[f], high[step], k[f].high[2 * step], k[f].high[2 * step + 1]);
            }
    }
}

/* One half each of a and b: the lower or the upper. */
static __device__ __forceinline__ unsigned pick_halves(unsigned a, unsigned b, bool upper) {
    return upper ? a >> 16 | (b & 0xffff0000u) : (a & 0xffffu) | b << 16;
}

/* out[f] += rows 16 (warp / 4).. of p times values: column n of fragment f is channel n D/32 + f of the warp's quarter. */
template <int D, typename Element>
static __device__ __forceinline__ void split_values(const SoftmaxState &state, const Element *values, int left,
                                                    float (&out)[D / 32][4]) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    const int row = warp / 4 * 16 + g, channel = warp % 4 * (D / 4) + g * (D / 32);
#pragma unroll 2 /* more would leave room for one block instead of two */
    for (int n0 = 0; n0 < KEY_ROWS; n0 += 16) {
        const int key = n0 + 4 * t;
        HalfWords<D / 32> v[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if (key + i < left)
                v[i].load(values + (key + i) * D + channel);
            else
                v[i].clear();
        }
        unsigned high[4], low[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int first = key + i / 2 * 2, at = row + i % 2 * 8;
            high[i] = split_halves(state.p[first][at], state.p[first + 1][at], low[i]);
        }
#pragma unroll
        for (int f = 0; f < D / 32; ++f) {
            const unsigned b0 = pick_halves(v[0].high[f / 2], v[1].high[f / 2], f % 2),
                           b1 = pick_halves(v[2].high[f / 2], v[3].high[f / 2], f % 2);
            if (sizeof(Element) == 4)
                mma_half(out[f], high, pick_halves(v[0].low[f / 2], v[1].low[f / 2], f % 2),
                         pick_halves(v[2].low[f / 2], v[3].low[f / 2], f % 2));
            mma_half(out[f], low, b0, b1);
            mma_half(out[f], high, b0, b1);
        }
    }
}

template <int D, typename Element>
static __device__ __forceinline__ void split_attention(SoftmaxState &state, SplitQueries<D> &queries, const Pass &pass,
                                                       const float *q, const float *gate, int gate_token, int gate_head,
                                                       float scale, float *y) {
    const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32, g = lane / 4, t = lane % 4;
    const int row0 = warp / 4 * 16 + g, key0 = warp % 4 * 16 + 2 * t;
    {
        const int row = thread / 8;
        const float *own = q + (unsigned)pass.token(row) * pass.q_token + pass.head(row) * pass.q_head;
        for (int c = thread % 8 * 2; c < D; c += 16)
            queries.high[row][c / 2] = split_halves(own[c], own[c + 1], queries.low[row][c / 2]);
    }
    if (thread < QUERY_ROWS) {
        state.top[thread] = UNSEEN;
        state.total[thread] = 0.0f;
        state.seen[thread] = pass.visible(thread);
    }
    float out[D / 32][4];
#pragma unroll
    for (int f = 0; f < D / 32; ++f)
#pragma unroll
        for (int c = 0; c < 4; ++c) out[f][c] = 0.0f;
    const int key_count = pass.visible(QUERY_ROWS - 1);
    __syncthreads();
#pragma unroll 1
    for (int tile = 0; tile * KEY_ROWS < key_count; ++tile) {
        const Element *page = (const Element *)pass.pages[tile];
        const int left = pass.position + pass.tokens - tile * KEY_ROWS;
        float score[2][4];
        split_scores<D>(queries, page + blockIdx.y * (KEY_ROWS * D), left, score);
        __syncthreads(); /* the last tile's probabilities have been used */
#pragma unroll
        for (int c = 0; c < 4; ++c) {
            const int row = row0 + c / 2 * 8, seen = state.seen[row] - tile * KEY_ROWS;
#pragma unroll
            for (int f = 0; f < 2; ++f) {
                const int key = key0 + 8 * f + c % 2;
                state.p[key][row] = key < seen ? score[f][c] * scale : UNSEEN;
            }
        }
        attention_softmax(state);
        const float rescale[2] = {state.rescale[row0], state.rescale[row0 + 8]};
#pragma unroll
        for (int f = 0; f < D / 32; ++f)
#pragma unroll
            for (int c = 0; c < 4; ++c) out[f][c] *= rescale[c / 2];
        split_values<D>(state, page + (gridDim.y + blockIdx.y) * (KEY_ROWS * D), left, out);
    }
    const int rows = pass.tokens * pass.group - pass.block() * QUERY_ROWS;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int row = row0 + 8 * r;
        if (row >= rows) continue;
        const int token = pass.token(row), head = pass.head(row);
        const float inverse = 1.0f / state.total[row];
        const float *gates = gate + (long long)token * gate_token + head * gate_head;
        float *target = y + ((long long)token * gridDim.y * pass.group + head) * D;
#pragma unroll
        for (int c = 0; c < 2; ++c)
#pragma unroll
            for (int f = 0; f < D / 32; ++f) {
                const int channel = warp % 4 * (D / 4) + (2 * t + c) * (D / 32) + f;
                target[channel] = out[f][2 * r + c] * inverse * sigmoid(gates[channel]);
            }
    }
}

#define ATTENTION_CAUSAL(D)                                                                                           \
    extern "C" __global__ void __launch_bounds__(ATTENTION_THREADS) attention_causal_##D(                             \
        const float *q, int q_token, int q_head, const float *gate, int gate_token, int gate_head,                    \
        const unsigned long long *pages, int pages_f32, int position, int tokens, int group, float scale, float *y) { \
        __shared__ SoftmaxState state;                                                                                \
        __shared__ SplitQueries<D> queries;                                                                           \
        const Pass pass = {pages, q_token, q_head, tokens, group, position};                                          \
        if (pages_f32)                                                                                                \
            split_attention<D, float>(state, queries, pass, q, gate, gate_token, gate_head, scale, y);                \
        else                                                                                                          \
            split_attention<D, unsigned short>(state, queries, pass, q, gate, gate_token, gate_head, scale, y);       \
    }

ATTENTION_CAUSAL(256)
ATTENTION_CAUSAL(128)
ATTENTION_CAUSAL(64)
ATTENTION_CAUSAL(32)
