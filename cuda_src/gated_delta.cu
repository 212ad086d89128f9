/* gated_delta_chunk_{128,32,16}, gated_delta_scan_{128,32,16}: the gated delta rule in chunks of at most 32 tokens
 *
 * Per value head, S float[D][D] (key x value), alpha = exp(g), g = minus_a softplus(a + dt_bias), beta = sigmoid(b):
 *     S <- alpha S;  S <- S + k beta (v - S^T k)^T;  o = S^T q          q, k l2-normalised, q also times D^-1/2
 * Inside a chunk, with G the running sum of g and M_ij = exp(G_i - G_j):
 *     chunk (all chunks at once)   A = strictLower(beta_i k_i.k_j M_ij);  U = (I + A)^-1 beta V;
 *                                  W = (I + A)^-1 beta e^G K;  P = lower(q_i.k_j M_ij)
 *     scan (chunk after chunk)     N = U - W S;  O = e^G Q S + P N;  S <- e^Glast S + (e^(Glast - G) K)^T N
 * Only differences of G are exponentiated, all <= 0.
 *
 * qkv    float[T][C] after the convolution: q [Hk][D] | k [Hk][D] | v [Hv][D]; value head h uses key head h Hk / Hv
 * a, b   float[T] rows of Hv, ab_stride apart; minus_a = -exp(A_log), dt_bias float[Hv]
 * chunks int4[] {first row, rows <= 32, snapshot or -1, 0}; rows of a chunk are consecutive tokens. Where chunks begin
 *        is the caller's: at positions fixed by the prompt, so that a resumed pass cuts the same chunks
 * work   float[chunks][Hv][4 * 32 D + 32 * 32 + 32] = U, W, e^G Q, e^(Glast-G) K, P, e^Glast: one launch to the next
 * state  float[Hv][D][D] in and out; snapshots float[][Hv][D][D]: the state after the chunks that ask for one
 * o      float[T][Hv][D]
 * map    chunk: grid (chunks, Hv), block 256.  scan: grid (ceil(D/32), Hv), block 256: 32 value columns of one head
 * cost   per token and head: chunk 4.5 * 32 D, scan 2 * (3 D^2 + 32 D) flop; work is written once and read D/32 times
 * needs  chunks <= 65535; 38 KB and 22 KB shared
 */
#include "fermi.h"

#define CHUNK 32
#define THREADS 256
#ifndef LOADS_AHEAD
#define LOADS_AHEAD 1 /* rounds of a loop over memory that are unrolled: as many as registers allow */
#endif

template <int D>
struct DeltaWork {
    static const int MATRIX = CHUNK * D;
    static const int U = 0, W = MATRIX, Q = 2 * MATRIX, K = 3 * MATRIX, P = 4 * MATRIX, DECAY = P + CHUNK * CHUNK;
    static const int SIZE = DECAY + 32; /* keeps every part 128-byte aligned */
};

template <int D>
struct ChunkShared {
    float k[CHUNK][D + 2], q[CHUNK][D + 2]; /* 64-bit reads of two rows per half warp fall in different banks */
    float a[CHUNK][CHUNK + 2];
    float g[CHUNK], beta[CHUNK], running[CHUNK];
    float part[2][CHUNK][8];
};

/* Dot products of row i with row j: {k_i.k_j, q_i.k_j}. */
template <int D>
static __device__ __forceinline__ float2 chunk_dots(const ChunkShared<D> &shared, int i, int j) {
    float2 dot;
    dot.x = dot.y = 0.0f;
#pragma unroll 8
    for (int c = 0; c < D; c += 2) {
        const float2 k = *(const float2 *)&shared.k[j][c], own = *(const float2 *)&shared.k[i][c],
                     q = *(const float2 *)&shared.q[i][c];
        dot.x = fmaf(own.y, k.y, fmaf(own.x, k.x, dot.x));
        dot.y = fmaf(q.y, k.y, fmaf(q.x, k.x, dot.y));
    }
    return dot;
}

template <int D>
static __device__ __forceinline__ void delta_chunk(ChunkShared<D> &shared, const float *qkv, int channels, const float *a,
                                                   const float *b, int ab_stride, const float *minus_a,
                                                   const float *dt_bias, const int4 *chunks, int key_heads, float eps,
                                                   float *work) {
    const int thread = threadIdx.x, head = blockIdx.y, heads = gridDim.y;
    const int key_head = head * key_heads / heads;
    const int4 chunk = chunks[blockIdx.x];
    const float *q = qkv + (long long)chunk.x * channels + key_head * D, *k = q + key_heads * D;
    const float *v = qkv + (long long)chunk.x * channels + 2 * key_heads * D + head * D;
    work += ((long long)blockIdx.x * heads + head) * DeltaWork<D>::SIZE;

    for (int i = thread; i < CHUNK * D; i += THREADS) {
        const int row = i / D, c = i % D;
        const bool real = row < chunk.y;
        shared.q[row][c] = real ? q[(long long)row * channels + c] : 0.0f;
        shared.k[row][c] = real ? k[(long long)row * channels + c] : 0.0f;
    }
    if (thread < CHUNK) {
        float g = 0.0f, beta = 0.0f;
        if (thread < chunk.y) {
            const long long at = (long long)(chunk.x + thread) * ab_stride + head;
            g = minus_a[head] * softplus(a[at] + dt_bias[head]);
            beta = sigmoid(b[at]);
        }
        shared.g[thread] = g;
        shared.beta[thread] = beta;
    }
    __syncthreads();

    { /* l2 norms: eight threads per row */
        const int row = thread / 8, part = thread % 8;
        float qq = 0.0f, kk = 0.0f;
        for (int c = part; c < D; c += 8) {
            qq = fmaf(shared.q[row][c], shared.q[row][c], qq);
            kk = fmaf(shared.k[row][c], shared.k[row][c], kk);
        }
        shared.part[0][row][part] = qq;
        shared.part[1][row][part] = kk;
    }
    if (thread < CHUNK) {
        float running = 0.0f;
        for (int i = 0; i <= thread; ++i) running += shared.g[i];
        shared.running[thread] = running;
    }
    __syncthreads();
    {
        const int row = thread / 8;
        float qq = 0.0f, kk = 0.0f;
        for (int i = 0; i < 8; ++i) {
            qq += shared.part[0][row][i];
            kk += shared.part[1][row][i];
        }
        const float q_scale = 1.0f / (sqrtf(qq + eps) * sqrtf((float)D)), k_scale = 1.0f / sqrtf(kk + eps);
        for (int c = thread % 8; c < D; c += 8) {
            shared.q[row][c] *= q_scale;
            shared.k[row][c] *= k_scale;
        }
    }
    __syncthreads();

    for (int pair = thread; pair < CHUNK * CHUNK; pair += THREADS) {
        const int i = pair / CHUNK, j = pair % CHUNK;
        float2 dot;
        dot.x = dot.y = 0.0f;
        if (j <= i) {
            const float decay = exp_f32(shared.running[i] - shared.running[j]);
            dot = chunk_dots(shared, i, j);
            dot.x *= decay * shared.beta[i];
            dot.y *= decay;
        }
        shared.a[i][j] = dot.x;
        work[DeltaWork<D>::P + pair] = dot.y;
    }
    __syncthreads();

    /* Forward substitution: a thread solves one column, of beta V (U) or of beta e^G K (W), in registers. */
    if (thread < 2 * D) {
        const int c = thread % D, is_w = thread / D;
        float x[CHUNK];
#pragma unroll
        for (int i = 0; i < CHUNK; ++i) {
            float value = 0.0f;
            if (i < chunk.y)
                value = is_w ? shared.k[i][c] * exp_f32(shared.running[i]) : v[(long long)i * channels + c];
            value *= shared.beta[i];
#pragma unroll
            for (int j = 0; j < i; ++j) value = fmaf(-shared.a[i][j], x[j], value);
            x[i] = value;
            work[(is_w ? DeltaWork<D>::W : DeltaWork<D>::U) + i * D + c] = value;
        }
    }
    const float last = shared.running[CHUNK - 1]; /* padding rows have g = 0: the sum of the real ones */
    for (int i = thread; i < CHUNK * D; i += THREADS) {
        const int row = i / D, c = i % D;
        work[DeltaWork<D>::Q + i] = shared.q[row][c] * exp_f32(shared.running[row]);
        work[DeltaWork<D>::K + i] = shared.k[row][c] * exp_f32(last - shared.running[row]);
    }
    if (thread == 0) work[DeltaWork<D>::DECAY] = exp_f32(last);
}

template <int D>
struct ScanShape {
    static const int COLUMNS = D < 32 ? D : 32; /* value columns of S per block */
    static const int COLUMN_GROUPS = COLUMNS / 4;
};

template <int D>
struct ScanShared {
    float s[D][ScanShape<D>::COLUMNS + 2];
    float n[CHUNK][ScanShape<D>::COLUMNS + 2];
};

/* acc[r][c] += sum_k left[r][k] s[k][c] for two rows and four columns. */
template <int K, int PITCH>
static __device__ __forceinline__ void scan_product(const float *left0, const float *left1, const float (*s)[PITCH],
                                                    int column, float (&acc)[2][4]) {
#pragma unroll LOADS_AHEAD
    for (int k = 0; k < K; k += 4) {
        const float4 l0 = *(const float4 *)(left0 + k), l1 = *(const float4 *)(left1 + k);
        const float l[2][4] = {{l0.x, l0.y, l0.z, l0.w}, {l1.x, l1.y, l1.z, l1.w}};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float2 low = *(const float2 *)&s[k + i][column], high = *(const float2 *)&s[k + i][column + 2];
            const float right[4] = {low.x, low.y, high.x, high.y};
#pragma unroll
            for (int r = 0; r < 2; ++r)
#pragma unroll
                for (int c = 0; c < 4; ++c) acc[r][c] = fmaf(l[r][i], right[c], acc[r][c]);
        }
    }
}

template <int D>
static __device__ __forceinline__ void delta_scan(ScanShared<D> &shared, const float *work, const int4 *chunks,
                                                  int chunk_count, float *state, float *snapshots, float *o) {
    const int COLUMNS = ScanShape<D>::COLUMNS, GROUPS = ScanShape<D>::COLUMN_GROUPS, PITCH = COLUMNS + 2;
    const int thread = threadIdx.x, head = blockIdx.y, heads = gridDim.y, first_column = blockIdx.x * COLUMNS;
    const long long head_state = (long long)head * D * D + first_column;
    for (int i = thread; i < D * COLUMNS; i += THREADS)
        shared.s[i / COLUMNS][i % COLUMNS] = state[head_state + i / COLUMNS * D + i % COLUMNS];
    __syncthreads();

    /* Threads 0..16 GROUPS - 1 compute W S, the next 16 GROUPS (e^G Q) S: two rows, four columns each. */
    const int column = thread % GROUPS * 4, pair = thread / GROUPS, row = pair % 16 * 2;
    const bool has_w = pair < 16, has_q = pair >= 16 && pair < 32;
    for (int index = 0; index < chunk_count; ++index) {
        const int4 chunk = chunks[index];
        const float *part = work + ((long long)index * heads + head) * DeltaWork<D>::SIZE;
        float acc[2][4] = {{0.0f, 0.0f, 0.0f, 0.0f}, {0.0f, 0.0f, 0.0f, 0.0f}};
        if (has_w || has_q) {
            const float *left = part + (has_w ? DeltaWork<D>::W : DeltaWork<D>::Q) + row * D;
            scan_product<D, PITCH>(left, left + D, shared.s, column, acc);
        }
        if (has_w) {
#pragma unroll
            for (int r = 0; r < 2; ++r)
#pragma unroll
                for (int c = 0; c < 4; ++c)
                    shared.n[row + r][column + c] =
                        part[DeltaWork<D>::U + (row + r) * D + first_column + column + c] - acc[r][c];
        }
        __syncthreads();
        if (has_q) {
            const float *left = part + DeltaWork<D>::P + row * CHUNK;
            scan_product<CHUNK, PITCH>(left, left + CHUNK, shared.n, column, acc);
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                if (row + r >= chunk.y) continue;
                float *out = o + ((long long)(chunk.x + row + r) * heads + head) * D + first_column + column;
#pragma unroll
                for (int c = 0; c < 4; ++c) out[c] = acc[r][c];
            }
        }
        const float decay = part[DeltaWork<D>::DECAY];
        for (int k = pair * 4; k < D; k += THREADS / GROUPS * 4) {
            float next[4][4];
#pragma unroll
            for (int i = 0; i < 4; ++i)
#pragma unroll
                for (int c = 0; c < 4; ++c) next[i][c] = decay * shared.s[k + i][column + c];
#pragma unroll 2 * LOADS_AHEAD
            for (int t = 0; t < CHUNK; ++t) {
                const float4 left = *(const float4 *)(part + DeltaWork<D>::K + t * D + k);
                const float2 low = *(const float2 *)&shared.n[t][column], high = *(const float2 *)&shared.n[t][column + 2];
                const float l[4] = {left.x, left.y, left.z, left.w}, right[4] = {low.x, low.y, high.x, high.y};
#pragma unroll
                for (int i = 0; i < 4; ++i)
#pragma unroll
                    for (int c = 0; c < 4; ++c) next[i][c] = fmaf(l[i], right[c], next[i][c]);
            }
#pragma unroll
            for (int i = 0; i < 4; ++i)
#pragma unroll
                for (int c = 0; c < 4; ++c) shared.s[k + i][column + c] = next[i][c];
        }
        __syncthreads();
        if (chunk.z >= 0) {
            float *saved = snapshots + (long long)chunk.z * heads * D * D + head_state;
            for (int i = thread; i < D * COLUMNS; i += THREADS)
                saved[i / COLUMNS * D + i % COLUMNS] = shared.s[i / COLUMNS][i % COLUMNS];
        }
    }
    for (int i = thread; i < D * COLUMNS; i += THREADS)
        state[head_state + i / COLUMNS * D + i % COLUMNS] = shared.s[i / COLUMNS][i % COLUMNS];
}

#define GATED_DELTA(D)                                                                                               \
    extern "C" __global__ void __launch_bounds__(THREADS) gated_delta_chunk_##D(                                     \
        const float *qkv, int channels, const float *a, const float *b, int ab_stride, const float *minus_a,           \
        const float *dt_bias, const int4 *chunks, int key_heads, float eps, float *work) {                           \
        __shared__ ChunkShared<D> shared;                                                                            \
        delta_chunk<D>(shared, qkv, channels, a, b, ab_stride, minus_a, dt_bias, chunks, key_heads, eps, work);        \
    }                                                                                                                \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                            \
    gated_delta_scan_##D(const float *work, const int4 *chunks, int chunk_count, float *state, float *snapshots,     \
                         float *o) {                                                                                 \
        __shared__ ScanShared<D> shared;                                                                             \
        delta_scan<D>(shared, work, chunks, chunk_count, state, snapshots, o);                                       \
    }

GATED_DELTA(128)
GATED_DELTA(32)
GATED_DELTA(16)
