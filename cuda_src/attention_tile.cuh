/* Tiled attention with an online softmax: 32 query rows against tiles of 64 keys, D channels.
 *
 * A block of 256 threads keeps the 32 x D outputs in registers: warp w owns rows 4 w..4 w + 3, a lane every 32nd channel
 * (pairs of channels where D allows, for 64-bit loads). Key tiles start at multiples of 64 of the sequence and come in
 * ascending order; keys that a row may not see add exact zeros. So a row's result does not depend on the rows that
 * share its block or its pass.
 *
 * The caller's Source says where things are:
 *   unsigned query(int row)                first float of the row's query, counted from the queries; any valid one for a
 *                                          row that does not exist (its result is never stored)
 *   int visible(int row)                   number of keys the row sees
 *   void open(int tile)                    before the loads of keys 64 tile .. 64 tile + 63
 *   float2 key(int n, int c), value(...)   channels c, c + 1 (c even) of key n = 0..63 of the open tile; beyond the
 *                                          last key anything, but zeros for its value
 */
#ifndef FERMION_ATTENTION_TILE_CUH
#define FERMION_ATTENTION_TILE_CUH

#include "fermi.h"

#define QUERY_ROWS 32
#define KEY_ROWS 64
#define VALUE_ROWS 8 /* per stage */
#define ATTENTION_THREADS 256
#define UNSEEN -3.0e38f

template <int D>
struct AttentionShape {
    static const int DEPTH = D % 16 == 0 ? 16 : D % 12 == 0 ? 12 : 8; /* channels of q and k per stage */
    static const int KEY_PITCH = KEY_ROWS + 2, QUERY_PITCH = QUERY_ROWS + 2;
    static const int SCORE_STAGE = DEPTH * (KEY_PITCH + QUERY_PITCH), VALUE_STAGE = VALUE_ROWS * D; /* floats */
    static const int STAGE = SCORE_STAGE > VALUE_STAGE ? SCORE_STAGE : VALUE_STAGE;
    static const int CHANNELS = (D + 31) / 32; /* per lane */
    static const bool PAIRED = D % 64 == 0;
    static __device__ __forceinline__ int channel(int lane, int i) {
        return PAIRED ? 2 * lane + 64 * (i / 2) + i % 2 : lane + 32 * i;
    }
};

struct SoftmaxState {
    float p[KEY_ROWS][QUERY_ROWS + 2]; /* scores, then probabilities, transposed */
    float part_top[8][QUERY_ROWS], part_sum[8][QUERY_ROWS];
    float top[QUERY_ROWS], total[QUERY_ROWS], rescale[QUERY_ROWS];
    int seen[QUERY_ROWS]; /* keys each row sees */
};

/* What a thread brings into one stage of keys and query rows, or of values. The loads of keys run under the stage before;
 * for those of values the sums leave no registers, but they are under way together. */
template <int D>
struct KeyStage {
    typedef AttentionShape<D> Shape;
    static const int PAIRS = Shape::DEPTH / 2, ROUNDS = (KEY_ROWS * PAIRS + ATTENTION_THREADS - 1) / ATTENTION_THREADS;
    static_assert(QUERY_ROWS * PAIRS <= ATTENTION_THREADS, "one channel pair of one query row per thread");
    float2 key[ROUNDS], query;

    /* `own`: the thread's pair of query channels in a stage at channel 0 */
    template <typename Source>
    __device__ __forceinline__ void fetch(const Source &source, const float *own, int c0, int thread) {
#pragma unroll
        for (int i = 0; i < ROUNDS; ++i) {
            const int at = i * ATTENTION_THREADS + thread;
            if (KEY_ROWS * PAIRS % ATTENTION_THREADS == 0 || at < KEY_ROWS * PAIRS)
                key[i] = source.key(at / PAIRS, c0 + at % PAIRS * 2);
        }
        if (QUERY_ROWS * PAIRS == ATTENTION_THREADS || thread < QUERY_ROWS * PAIRS) query = *(const float2 *)(own + c0);
    }
    __device__ __forceinline__ void store(float *keys, float *rows, int thread) const {
#pragma unroll
        for (int i = 0; i < ROUNDS; ++i) {
            const int at = i * ATTENTION_THREADS + thread, n = at / PAIRS, c = at % PAIRS * 2;
            if (KEY_ROWS * PAIRS % ATTENTION_THREADS == 0 || at < KEY_ROWS * PAIRS) {
                keys[c * Shape::KEY_PITCH + n] = key[i].x;
                keys[(c + 1) * Shape::KEY_PITCH + n] = key[i].y;
            }
        }
        if (QUERY_ROWS * PAIRS == ATTENTION_THREADS || thread < QUERY_ROWS * PAIRS) {
            rows[thread % PAIRS * 2 * Shape::QUERY_PITCH + thread / PAIRS] = query.x;
            rows[(thread % PAIRS * 2 + 1) * Shape::QUERY_PITCH + thread / PAIRS] = query.y;
        }
    }
};

template <int D>
struct ValueStage {
    static const int COUNT = VALUE_ROWS * D / 2, ROUNDS = (COUNT + ATTENTION_THREADS - 1) / ATTENTION_THREADS;
    float2 value[ROUNDS];

    template <typename Source>
    __device__ __forceinline__ void fetch(const Source &source, int n0, int thread) {
#pragma unroll
        for (int i = 0; i < ROUNDS; ++i) {
            const int at = i * ATTENTION_THREADS + thread;
            if (COUNT % ATTENTION_THREADS == 0 || at < COUNT) value[i] = source.value(n0 + at / (D / 2), at % (D / 2) * 2);
        }
    }
    __device__ __forceinline__ void store(float *stage, int thread) const {
#pragma unroll
        for (int i = 0; i < ROUNDS; ++i) {
            const int at = i * ATTENTION_THREADS + thread;
            if (COUNT % ATTENTION_THREADS == 0 || at < COUNT) *(float2 *)&stage[at * 2] = value[i];
        }
    }
};

/* Where a thread's scores lie: rows score_row, + 1; keys score_key + {0, 1, 32, 33}. Neighbours see the same keys: since
 * Volta, a 64-bit shared load takes one turn instead of two if lanes of equal address are next to each other. */
static __device__ __forceinline__ int score_row(int thread) { return thread / 32 * 4 + thread % 2 * 2; }
static __device__ __forceinline__ int score_key(int thread) { return thread / 2 % 16 * 2; }

/* This thread's scores of the open tile. `query` is the float in `queries` where its share of the query rows begins. */
template <int D, typename Source>
static __device__ __forceinline__ void attention_scores(float (&stage)[AttentionShape<D>::STAGE], const Source &source,
                                                        const float *queries, unsigned query, float (&score)[2][4]) {
    typedef AttentionShape<D> Shape;
    const int thread = thread_again();
    float *keys = stage, *rows = stage + Shape::DEPTH * Shape::KEY_PITCH;
    KeyStage<D> next;
    next.fetch(source, queries + query, 0, thread);
#pragma unroll 1
    for (int c0 = 0; c0 < D; c0 += Shape::DEPTH) {
        __syncthreads();
        next.store(keys, rows, thread_again());
        __syncthreads();
        if (c0 + Shape::DEPTH < D) next.fetch(source, queries + query, c0 + Shape::DEPTH, thread_again());
#pragma unroll
        for (int c = 0; c < Shape::DEPTH; ++c) {
            const float2 low = *(const float2 *)&keys[c * Shape::KEY_PITCH + score_key(thread)];
            const float2 high = *(const float2 *)&keys[c * Shape::KEY_PITCH + score_key(thread) + 32];
            const float2 q = *(const float2 *)&rows[c * Shape::QUERY_PITCH + score_row(thread)];
            const float k[4] = {low.x, low.y, high.x, high.y};
#pragma unroll
            for (int j = 0; j < 4; ++j) score[0][j] = fmaf(q.x, k[j], score[0][j]);
#pragma unroll
            for (int j = 3; j >= 0; --j) score[1][j] = fmaf(q.y, k[j], score[1][j]);
        }
    }
}

/* Turns the tile's scores in state.p into probabilities and brings each row's maximum, sum and rescale factor up to
 * date. Thread = (row, eight keys). */
static __device__ __forceinline__ void attention_softmax(SoftmaxState &state) {
    const int thread = thread_again(), row = thread % QUERY_ROWS, part = thread / QUERY_ROWS;
    __syncthreads();
    float top = UNSEEN;
#pragma unroll
    for (int n = 0; n < 8; ++n) top = fmaxf(top, state.p[part * 8 + n][row]);
    state.part_top[part][row] = top;
    __syncthreads();
    top = state.top[row];
#pragma unroll
    for (int i = 0; i < 8; ++i) top = fmaxf(top, state.part_top[i][row]);
    float sum = 0.0f;
#pragma unroll
    for (int n = 0; n < 8; ++n) {
        const float score = state.p[part * 8 + n][row];
        const float p = exp_f32(score - top); /* exactly 0 for keys not seen: every row sees one */
        state.p[part * 8 + n][row] = p;
        sum += p;
    }
    state.part_sum[part][row] = sum;
    __syncthreads();
    if (part == 0) {
        const float rescale = exp_f32(state.top[row] - top);
        float total = state.total[row] * rescale;
#pragma unroll
        for (int i = 0; i < 8; ++i) total += state.part_sum[i][row];
        state.total[row] = total;
        state.rescale[row] = rescale;
        state.top[row] = top;
    }
    __syncthreads();
}

/* out[r][i] += sum over the open tile's keys of p value, rows 4 warp + r, channels channel(lane, i). */
template <int D, typename Source>
static __device__ __forceinline__ void attention_values(const SoftmaxState &state,
                                                        float (&stage)[AttentionShape<D>::STAGE], const Source &source,
                                                        float (&out)[4][AttentionShape<D>::CHANNELS]) {
    typedef AttentionShape<D> Shape;
    const int thread = thread_again(), lane = thread % 32, warp = thread / 32;
#pragma unroll 1
    for (int n0 = 0; n0 < KEY_ROWS; n0 += VALUE_ROWS) {
        ValueStage<D> next;
        next.fetch(source, n0, thread_again());
        __syncthreads();
        next.store(stage, thread_again());
        __syncthreads();
#pragma unroll
        for (int n = 0; n < VALUE_ROWS; ++n) {
            const float2 low = *(const float2 *)&state.p[n0 + n][4 * warp];
            const float2 high = *(const float2 *)&state.p[n0 + n][4 * warp + 2];
            const float p[4] = {low.x, low.y, high.x, high.y};
            float v[Shape::CHANNELS];
#pragma unroll
            for (int i = 0; i < Shape::CHANNELS; ++i) {
                const int c = Shape::channel(lane, i);
                if (Shape::PAIRED && i % 2 == 0) {
                    const float2 pair = *(const float2 *)&stage[n * D + c];
                    v[i] = pair.x;
                    v[i + 1] = pair.y;
                } else if (!Shape::PAIRED) {
                    v[i] = D % 32 == 0 || c < D ? stage[n * D + c] : 0.0f;
                }
            }
#pragma unroll
            for (int r = 0; r < 4; ++r)
#pragma unroll
                for (int i = 0; i < Shape::CHANNELS; ++i) out[r][i] = fmaf(p[r], v[i], out[r][i]);
        }
    }
}

/* out[r][i]: row 4 warp + r, channel(lane, i) of softmax(scale q k^T) v, before the division by state.total. */
template <int D, typename Source>
static __device__ __forceinline__ void attention_tiles(SoftmaxState &state, float (&stage)[AttentionShape<D>::STAGE],
                                                       Source &source, const float *queries, float scale, int key_count,
                                                       float (&out)[4][AttentionShape<D>::CHANNELS]) {
    typedef AttentionShape<D> Shape;
    const int PAIRS = Shape::DEPTH / 2;
#pragma unroll
    for (int r = 0; r < 4; ++r)
#pragma unroll
        for (int i = 0; i < Shape::CHANNELS; ++i) out[r][i] = 0.0f;
    if (threadIdx.x < QUERY_ROWS) {
        state.top[threadIdx.x] = UNSEEN;
        state.total[threadIdx.x] = 0.0f;
        state.seen[threadIdx.x] = source.visible(threadIdx.x);
    }
    const int row = threadIdx.x / PAIRS;
    const unsigned query = source.query(row < QUERY_ROWS ? row : 0) + threadIdx.x % PAIRS * 2;
#pragma unroll 1
    for (int tile = 0; tile * KEY_ROWS < key_count; ++tile) {
        source.open(tile);
        float score[2][4] = {{0.0f, 0.0f, 0.0f, 0.0f}, {0.0f, 0.0f, 0.0f, 0.0f}};
        attention_scores<D>(stage, source, queries, query, score);
        const int thread = thread_again(), warp = thread / 32;
        const int seen[2] = {state.seen[score_row(thread)], state.seen[score_row(thread) + 1]};
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const int n = score_key(thread) + j % 2 + j / 2 * 32, key = tile * KEY_ROWS + n;
            float2 pair;
            pair.x = key < seen[0] ? score[0][j] * scale : UNSEEN;
            pair.y = key < seen[1] ? score[1][j] * scale : UNSEEN;
            *(float2 *)&state.p[n][score_row(thread)] = pair;
        }
        attention_softmax(state);
#pragma unroll
        for (int r = 0; r < 4; ++r) {
            const float rescale = state.rescale[4 * warp + r];
#pragma unroll
            for (int i = 0; i < Shape::CHANNELS; ++i) out[r][i] *= rescale;
        }
        attention_values<D>(state, stage, source, out);
    }
}

#endif
