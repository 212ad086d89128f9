/* attention_full_{72,12}: y = softmax(q k^T D^-1/2) v      vision tower: every patch of one frame sees every other
 * qkv   float[T][3][H][D]: q, k, v side by side; y float[T][H D]
 * map   grid (ceil(T/32), H), block 256: 32 query rows of one head
 * cost  4 T^2 H D flop; reads k and v T/32 times, mostly from the second-level cache
 * needs 3 T H D < 2^32; 17 KB shared
 */
#include "attention_tile.cuh"

template <int D>
struct PackedSource {
    const float *qkv;
    int heads, tokens, first;

    __device__ __forceinline__ unsigned at(int token, int part) const {
        return ((unsigned)token * 3 + part) * heads * D + blockIdx.y * D;
    }
    __device__ __forceinline__ unsigned query(int row) const {
        const int token = blockIdx.x * QUERY_ROWS + row;
        return at(token < tokens ? token : tokens - 1, 0);
    }
    __device__ __forceinline__ int visible(int) const { return tokens; }
    __device__ __forceinline__ void open(int tile) { first = tile * KEY_ROWS; }
    __device__ __forceinline__ float2 load(int n, int part, int c) const {
        float2 pair;
        pair.x = pair.y = 0.0f;
        if (first + n < tokens) pair = *(const float2 *)(qkv + at(first + n, part) + c);
        return pair;
    }
    __device__ __forceinline__ float2 key(int n, int c) const { return load(n, 1, c); }
    __device__ __forceinline__ float2 value(int n, int c) const { return load(n, 2, c); }
};

template <int D>
static __device__ __forceinline__ void attention_full(SoftmaxState &state, float (&stage)[AttentionShape<D>::STAGE],
                                                      PackedSource<D> &source, float scale, float *y) {
    typedef AttentionShape<D> Shape;
    float out[4][Shape::CHANNELS];
    attention_tiles<D>(state, stage, source, source.qkv, scale, source.tokens, out);
    const int thread = thread_again(), lane = thread % 32, warp = thread / 32;
#pragma unroll
    for (int r = 0; r < 4; ++r) {
        const int row = 4 * warp + r, token = blockIdx.x * QUERY_ROWS + row;
        if (token >= source.tokens) continue;
        const float inverse = 1.0f / state.total[row];
#pragma unroll
        for (int i = 0; i < Shape::CHANNELS; ++i) {
            const int c = Shape::channel(lane, i);
            if (c < D) y[((long long)token * source.heads + blockIdx.y) * D + c] = out[r][i] * inverse;
        }
    }
}

#define ATTENTION_FULL(D)                                                                             \
    extern "C" __global__ void __launch_bounds__(ATTENTION_THREADS)                                   \
    attention_full_##D(const float *qkv, int tokens, float scale, float *y) {                         \
        __shared__ SoftmaxState state;                                                                \
        __shared__ float stage[AttentionShape<D>::STAGE];                                             \
        PackedSource<D> source = {qkv, (int)gridDim.y, tokens, 0};                                    \
        attention_full<D>(state, stage, source, scale, y);                                            \
    }

ATTENTION_FULL(72)
ATTENTION_FULL(12)
