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
 * needs  chunks <= 65535; 40 KB and 39 KB shared
 */
#include "fermi.h"

#define CHUNK 32
#define THREADS 256

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
    static const int GROUPS = COLUMNS / 4;      /* a thread owns four of them */
    static const int DEPTH = D < 32 ? D : 32;   /* columns of W and e^G Q per stage */
    static const int PITCH = COLUMNS + 2; /* of S, N and U in shared memory */
    static const int STAGE = CHUNK * (2 * DEPTH + 4 > CHUNK + 2 + PITCH ? 2 * DEPTH + 4 : CHUNK + 2 + PITCH);
    static const int KEYS = CHUNK * D < 2048 ? CHUNK : 2048 / D; /* rows of K per stage */
};

/* The scan's left operands come through shared memory in stages; the next stage is under way while one is worked on, for
 * there are as many blocks as a large card has multiprocessors and nothing else would hide the loads. Two stages take
 * turns, so that one barrier each is enough: who writes a stage again has passed the barrier of the other one, which all
 * reach after reading. */
template <int D>
struct ScanShared {
    float s[D][ScanShape<D>::PITCH];
    float n[CHUNK][ScanShape<D>::PITCH];
    float stage[2][ScanShape<D>::STAGE];
};

/* A thread's share, float4 number `round`, of COUNT floats: rows of WIDTH floats, PITCH apart in memory, on their way to
 * shared rows of WIDTH + PAD. */
template <int COUNT, int WIDTH, int PITCH>
static __device__ __forceinline__ void stage_fetch(float4 &next, const float *from, int thread, int round) {
    const int at = (thread + round * THREADS) * 4;
    if (COUNT % (4 * THREADS) == 0 || at < COUNT) next = *(const float4 *)(from + at / WIDTH * PITCH + at % WIDTH);
}
template <int COUNT, int WIDTH, int PAD>
static __device__ __forceinline__ void stage_store(const float4 &next, float *to, int thread, int round) {
    const int at = (thread + round * THREADS) * 4;
    if (COUNT % (4 * THREADS) == 0 || at < COUNT) {
        float2 low, high;
        low.x = next.x;
        low.y = next.y;
        high.x = next.z;
        high.y = next.w;
        to += at / WIDTH * (WIDTH + PAD) + at % WIDTH;
        *(float2 *)to = low;
        *(float2 *)(to + 2) = high;
    }
}

/* The three kinds of stage: DEPTH columns of W and, below it, of e^G Q; P and the block's columns of U; rows of K. */
template <int D>
struct ScanStage {
    typedef ScanShape<D> Shape;
    static const int WQ = 2 * CHUNK * Shape::DEPTH, U = CHUNK * Shape::COLUMNS, K = Shape::KEYS * D;
    static const int U_AT = CHUNK * (CHUNK + 2);
    float4 next[2];

    __device__ __forceinline__ void fetch_wq(const float *part, int column, int thread) {
#pragma unroll
        for (int i = 0; i * 4 * THREADS < WQ; ++i)
            stage_fetch<WQ, Shape::DEPTH, D>(next[i], part + DeltaWork<D>::W + column, thread, i);
    }
    __device__ __forceinline__ void store_wq(float *stage, int thread) const {
#pragma unroll
        for (int i = 0; i * 4 * THREADS < WQ; ++i) stage_store<WQ, Shape::DEPTH, 2>(next[i], stage, thread, i);
    }
    __device__ __forceinline__ void fetch_pu(const float *part, int first_column, int thread) {
        stage_fetch<CHUNK * CHUNK, CHUNK, CHUNK>(next[0], part + DeltaWork<D>::P, thread, 0);
        stage_fetch<U, Shape::COLUMNS, D>(next[1], part + DeltaWork<D>::U + first_column, thread, 0);
    }
    __device__ __forceinline__ void store_pu(float *stage, int thread) const {
        stage_store<CHUNK * CHUNK, CHUNK, 2>(next[0], stage, thread, 0);
        stage_store<U, Shape::COLUMNS, 2>(next[1], stage + U_AT, thread, 0);
    }
    __device__ __forceinline__ void fetch_k(const float *part, int row, int thread) {
#pragma unroll
        for (int i = 0; i * 4 * THREADS < K; ++i) stage_fetch<K, D, D>(next[i], part + DeltaWork<D>::K + row * D, thread, i);
    }
    __device__ __forceinline__ void store_k(float *stage, int thread) const {
#pragma unroll
        for (int i = 0; i * 4 * THREADS < K; ++i) stage_store<K, D, 0>(next[i], stage, thread, i);
    }
};

/* acc[r][c] += sum_k left[r][k] right[k][c] for two rows, PITCH apart, and four columns. */
template <int K, int PITCH, int RIGHT>
static __device__ __forceinline__ void scan_product(const float *left, const float (*right)[RIGHT], int column,
                                                    float (&acc)[2][4]) {
#pragma unroll 4
    for (int k = 0; k < K; k += 2) {
        const float2 l0 = *(const float2 *)(left + k), l1 = *(const float2 *)(left + PITCH + k);
        const float l[2][2] = {{l0.x, l0.y}, {l1.x, l1.y}};
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const float2 low = *(const float2 *)&right[k + i][column], high = *(const float2 *)&right[k + i][column + 2];
            const float b[4] = {low.x, low.y, high.x, high.y};
#pragma unroll
            for (int r = 0; r < 2; ++r)
#pragma unroll
                for (int c = 0; c < 4; ++c) acc[r][c] = fmaf(l[r][i], b[c], acc[r][c]);
        }
    }
}

template <int D>
static __device__ __forceinline__ void delta_scan(ScanShared<D> &shared, const float *work, const int4 *chunks,
                                                  int chunk_count, float *state, float *snapshots, float *o) {
    typedef ScanShape<D> Shape;
    const int DEPTH = Shape::DEPTH, KEYS = Shape::KEYS, PITCH = Shape::PITCH;
    const int thread = threadIdx.x, head = blockIdx.y, heads = gridDim.y, first_column = blockIdx.x * Shape::COLUMNS;
    const long long head_state = (long long)head * D * D + first_column;
    /* Threads of lower `pair` compute W S, the
     * next e^G Q S, two rows each; all share the update of S, four of its rows each. */
    const int column = thread / 2 % Shape::GROUPS * 4, pair = thread % 2 + thread / (2 * Shape::GROUPS) * 2;
    const int row = pair % 16 * 2, own = pair * 4;
    const bool has_w = pair < 16, has_q = pair >= 16 && pair < 32;
    for (int i = thread; i < D * Shape::COLUMNS; i += THREADS)
        shared.s[i / Shape::COLUMNS][i % Shape::COLUMNS] = state[head_state + i / Shape::COLUMNS * D + i % Shape::COLUMNS];

    const float *part = work + (long long)head * DeltaWork<D>::SIZE;
    ScanStage<D> stage;
    stage.fetch_wq(part, 0, thread);
    int buffer = 0;
#pragma unroll 1
    for (int index = 0; index < chunk_count; ++index) {
        float acc[2][4] = {{0.0f, 0.0f, 0.0f, 0.0f}, {0.0f, 0.0f, 0.0f, 0.0f}};
#pragma unroll 1
        for (int k = 0; k < D; k += DEPTH) {
            stage.store_wq(shared.stage[buffer], thread_again());
            __syncthreads();
            if (k + DEPTH < D)
                stage.fetch_wq(part, k + DEPTH, thread_again());
            else
                stage.fetch_pu(part, block_x_again() * Shape::COLUMNS, thread_again());
            if (has_w || has_q)
                scan_product<DEPTH, DEPTH + 2>(shared.stage[buffer] + ((has_w ? 0 : CHUNK) + row) * (DEPTH + 2),
                                               shared.s + k, column, acc);
            buffer ^= 1;
        }
        stage.store_pu(shared.stage[buffer], thread_again());
        __syncthreads();
        stage.fetch_k(part, 0, thread_again());
        if (has_w) {
            const float *u = shared.stage[buffer] + ScanStage<D>::U_AT + row * PITCH + column;
#pragma unroll
            for (int r = 0; r < 2; ++r)
#pragma unroll
                for (int c = 0; c < 4; ++c) shared.n[row + r][column + c] = u[r * PITCH + c] - acc[r][c];
        }
        __syncthreads();
        const int4 chunk = chunks[index];
        const float decay = part[DeltaWork<D>::DECAY];
        if (has_q) {
            scan_product<CHUNK, CHUNK + 2>(shared.stage[buffer] + row * (CHUNK + 2), shared.n, column, acc);
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                if (row + r >= chunk.y) continue;
                float *out = o + ((long long)(chunk.x + row + r) * heads + head) * D + first_column + column;
#pragma unroll
                for (int c = 0; c < 4; ++c) out[c] = acc[r][c];
            }
        }
        buffer ^= 1;

        float next_s[4][4];
#pragma unroll 1
        for (int t0 = 0; t0 < CHUNK; t0 += KEYS) {
            stage.store_k(shared.stage[buffer], thread_again());
            __syncthreads();
            if (t0 + KEYS < CHUNK) {
                stage.fetch_k(part, t0 + KEYS, thread_again());
            } else if (index + 1 < chunk_count) {
                part += (long long)heads * DeltaWork<D>::SIZE;
                stage.fetch_wq(part, 0, thread_again());
            }
            if (own < D) {
                const float *keys = shared.stage[buffer] + own;
                if (t0 == 0) {
#pragma unroll
                    for (int i = 0; i < 4; ++i)
#pragma unroll
                        for (int c = 0; c < 4; ++c) next_s[i][c] = decay * shared.s[own + i][column + c];
                }
#pragma unroll 2
                for (int t = 0; t < KEYS; ++t) {
                    const float2 l0 = *(const float2 *)(keys + t * D), l1 = *(const float2 *)(keys + t * D + 2);
                    const float2 low = *(const float2 *)&shared.n[t0 + t][column],
                                 high = *(const float2 *)&shared.n[t0 + t][column + 2];
                    const float l[4] = {l0.x, l0.y, l1.x, l1.y}, right[4] = {low.x, low.y, high.x, high.y};
#pragma unroll
                    for (int i = 0; i < 4; ++i)
#pragma unroll
                        for (int c = 0; c < 4; ++c) next_s[i][c] = fmaf(l[i], right[c], next_s[i][c]);
                }
            }
            buffer ^= 1;
        }
        if (own < D) {
            float *saved = chunk.z >= 0 ? snapshots + (long long)chunk.z * heads * D * D + head_state : 0;
#pragma unroll
            for (int i = 0; i < 4; ++i)
#pragma unroll
                for (int c = 0; c < 4; ++c) {
                    shared.s[own + i][column + c] = next_s[i][c];
                    if (saved) saved[(own + i) * D + column + c] = next_s[i][c];
                }
        }
    }
    if (own < D) {
#pragma unroll
        for (int i = 0; i < 4; ++i)
#pragma unroll
            for (int c = 0; c < 4; ++c) state[head_state + (own + i) * D + column + c] = shared.s[own + i][column + c];
    }
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
