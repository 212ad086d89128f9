/* The one matrix product of all weight formats: y[M,N] = x[M,K] W[N,K]^T, float32 accumulation.
 *
 * A block computes ROWS x COLS of y in steps of 16 columns of x and W; a thread owns (4 or 2) x 8 or 4 x 4 values.
 * Both operands lie transposed in shared memory. Every shared load is 64 bits wide: on Fermi 128-bit loads collide
 * two ways by construction, 64-bit loads of a half warp do not, and a warp then needs 24 of the 32 clocks that its
 * FFMAs take. Rows of x are padded by two floats, which makes the transposing stores conflict-free as well.
 *
 * Every y[m][n] is one accumulator over ascending k, whatever the tile shape: results depend neither on M nor on
 * which kernel or tile computed them.
 */
#ifndef FERMION_MATMUL_TILE_CUH
#define FERMION_MATMUL_TILE_CUH

#include "../simd_src/blocks.h"
#include "fermi.h"

#define TILE_K 16

/* Fills shared memory with x transposed: ROWS rows of 16 floats, four consecutive ones per thread and round. */
template <int ROWS, int THREADS>
struct XLoader {
    static const int ROUNDS = (ROWS * 4 + THREADS - 1) / THREADS;
    const float *source[ROUNDS];
    float4 next[ROUNDS];

    /* rows: source row of each tile row, or null; rows beyond m_end repeat the last one (never stored). */
    __device__ __forceinline__ void open(const float *x, int ldx, const int *rows, int m0, int m_end, int thread) {
#pragma unroll
        for (int i = 0; i < ROUNDS; ++i) {
            int m = m0 + (thread + i * THREADS) / 4;
            m = m < m_end ? m : m_end - 1;
            if (rows) m = rows[m];
            source[i] = x + (long long)m * ldx + (thread & 3) * 4;
        }
    }
    __device__ __forceinline__ void fetch() {
#pragma unroll
        for (int i = 0; i < ROUNDS; ++i) {
            next[i] = *(const float4 *)source[i];
            source[i] += TILE_K;
        }
    }
    __device__ __forceinline__ void store(float (&shared)[TILE_K][ROWS + 2], int thread) const {
        const int k = (thread & 3) * 4;
#pragma unroll
        for (int i = 0; i < ROUNDS; ++i) {
            const int row = (thread + i * THREADS) / 4;
            if (ROWS * 4 % THREADS == 0 || row < ROWS) {
                shared[k + 0][row] = next[i].x;
                shared[k + 1][row] = next[i].y;
                shared[k + 2][row] = next[i].z;
                shared[k + 3][row] = next[i].w;
            }
        }
    }
};

/* Packed 4-bit weights: per step a thread unpacks WORDS 32-bit words, eight columns of one row each. A row's words of
 * one step lie 64 bytes apart; the next step's are 128 bytes on, and 64 more at the end of a 64-column block (scales).
 * Columns of the tile beyond n_end repeat the last 16-row tile of the matrix (never stored). */
template <int COLS, int THREADS>
struct Q4Loader {
    static const int LANES = COLS > THREADS ? COLS / THREADS : 1;          /* rows of W per thread */
    static const int WORDS = COLS * 2 / THREADS / LANES;                   /* words per row: 2, or 1 if two threads share it */
    const unsigned char *quants[LANES], *scales[LANES];
    unsigned next[LANES][WORDS];
    unsigned short next_scale[LANES];
    unsigned step;

    __device__ __forceinline__ void open(const void *w, int ldw, int n0, int n_end, int thread) {
        step = 0;
#pragma unroll
        for (int i = 0; i < LANES; ++i) {
            int tile = (n0 + thread % COLS + i * THREADS) / FM_BLOCK_ROWS;
            const int last = n_end / FM_BLOCK_ROWS - 1;
            tile = tile < last ? tile : last;
            const int row = thread % FM_BLOCK_ROWS;
            scales[i] = (const unsigned char *)w + (long long)tile * (ldw / FM_BLOCK_COLS) * FM_BLOCK_BYTES + row * 2;
            quants[i] = scales[i] + row * 2 + 64 + thread / COLS * 64;
        }
    }
    __device__ __forceinline__ void fetch() {
        ++step;
        const unsigned quant_stride = (step & 3) == 0 ? 192 : 128;
        const unsigned scale_stride = (step & 1) != 0 ? 0 : (step & 3) == 0 ? FM_BLOCK_BYTES - 32 : 32;
#pragma unroll
        for (int i = 0; i < LANES; ++i) {
            next_scale[i] = *(const unsigned short *)scales[i];
#pragma unroll
            for (int j = 0; j < WORDS; ++j) next[i][j] = *(const unsigned *)(quants[i] + j * 64);
            quants[i] += quant_stride;
            scales[i] += scale_stride;
        }
    }
    __device__ __forceinline__ void store(float (&shared)[TILE_K][COLS], int thread) const {
#pragma unroll
        for (int i = 0; i < LANES; ++i) {
            const int n = thread % COLS + i * THREADS, k0 = thread / COLS * 8;
            const float scale = half_to_float(next_scale[i]), zero = scale * -(float)FM_Q4_ZERO;
#pragma unroll
            for (int j = 0; j < WORDS; ++j) {
                const unsigned low = next[i][j] & 0x0f0f0f0fu, high = (next[i][j] >> 4) & 0x0f0f0f0fu;
#pragma unroll
                for (int b = 0; b < 4; ++b) {
                    shared[k0 + j * 8 + b][n] = fmaf((float)((low >> (8 * b)) & 255u), scale, zero);
                    shared[k0 + j * 8 + 4 + b][n] = fmaf((float)((high >> (8 * b)) & 255u), scale, zero);
                }
            }
        }
    }
};

/* Four consecutive plain weights as floats. */
static __device__ __forceinline__ float4 load_four(const float *w) { return *(const float4 *)w; }
static __device__ __forceinline__ float4 load_four(const unsigned short *w) {
    const uint2 bits = *(const uint2 *)w;
    float4 f;
    f.x = half_to_float((unsigned short)(bits.x & 0xffffu));
    f.y = half_to_float((unsigned short)(bits.x >> 16));
    f.z = half_to_float((unsigned short)(bits.y & 0xffffu));
    f.w = half_to_float((unsigned short)(bits.y >> 16));
    return f;
}

/* Row-major weights, float32 or float16 (as its bits): four consecutive columns of a row per thread and round. */
template <typename Element, int COLS, int THREADS>
struct RowMajorLoader {
    static const int ROUNDS = COLS * 4 / THREADS;
    const Element *source[ROUNDS];
    float4 next[ROUNDS];

    __device__ __forceinline__ void open(const void *w, int ldw, int n0, int n_end, int thread) {
#pragma unroll
        for (int i = 0; i < ROUNDS; ++i) {
            int n = n0 + (thread + i * THREADS) / 4;
            n = n < n_end ? n : n_end - 1;
            source[i] = (const Element *)w + (long long)n * ldw + (thread & 3) * 4;
        }
    }
    __device__ __forceinline__ void fetch() {
#pragma unroll
        for (int i = 0; i < ROUNDS; ++i) {
            next[i] = load_four(source[i]);
            source[i] += TILE_K;
        }
    }
    __device__ __forceinline__ void store(float (&shared)[TILE_K][COLS + 2], int thread) const {
        const int k = (thread & 3) * 4;
#pragma unroll
        for (int i = 0; i < ROUNDS; ++i) {
            const int n = (thread + i * THREADS) / 4;
            shared[k + 0][n] = next[i].x;
            shared[k + 1][n] = next[i].y;
            shared[k + 2][n] = next[i].z;
            shared[k + 3][n] = next[i].w;
        }
    }
};

/* One tile. PITCH is the row length of the shared copy of W; a thread owns rows 2 ty + {0,1} + 2 TY i and columns
 * 2 tx + {0,1} + 2 TX j of the tile. */
template <int ROWS, int COLS, int THREADS, int TM, int TN, int PITCH, typename WLoader>
static __device__ __forceinline__ void matmul_tile(float (&shared_x)[TILE_K][ROWS + 2], float (&shared_w)[TILE_K][PITCH],
                                                   const float *x, int ldx, const int *rows, const void *w, float *y,
                                                   int ldy, const float *bias, int m0, int m_end, int n0, int n_end,
                                                   int k_end, int ldw, int accumulate) {
    const int TX = COLS / TN, TY = ROWS / TM;
    static_assert(TX * TY == THREADS, "one thread per register tile");
    const int thread = threadIdx.x, tx = thread % TX, ty = thread / TX;
    XLoader<ROWS, THREADS> loader_x;
    WLoader loader_w;
    loader_x.open(x, ldx, rows, m0, m_end, thread);
    loader_w.open(w, ldw, n0, n_end, thread);
    float acc[TM][TN];
#pragma unroll
    for (int i = 0; i < TM; ++i)
#pragma unroll
        for (int j = 0; j < TN; ++j) acc[i][j] = 0.0f;

    loader_x.fetch();
    loader_w.fetch();
#pragma unroll 1
    for (int k = TILE_K; ; k += TILE_K) {
        loader_x.store(shared_x, thread);
        loader_w.store(shared_w, thread);
        __syncthreads();
        const bool more = k < k_end;
        if (more) { /* in flight while this step's products are computed */
            loader_x.fetch();
            loader_w.fetch();
        }
#pragma unroll
        for (int kk = 0; kk < TILE_K; ++kk) {
            float a[TM], b[TN];
#pragma unroll
            for (int i = 0; i < TM; i += 2) {
                const float2 pair = *(const float2 *)&shared_x[kk][2 * ty + TY * i];
                a[i] = pair.x;
                a[i + 1] = pair.y;
            }
#pragma unroll
            for (int j = 0; j < TN; j += 2) {
                const float2 pair = *(const float2 *)&shared_w[kk][2 * tx + TX * j];
                b[j] = pair.x;
                b[j + 1] = pair.y;
            }
#pragma unroll
            for (int i = 0; i < TM; ++i)
#pragma unroll
                for (int j = 0; j < TN; ++j) acc[i][j] = fmaf(a[i], b[j], acc[i][j]);
        }
        if (!more) break;
        __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < TM; ++i) {
        const int m = m0 + 2 * ty + TY * (i & ~1) + (i & 1);
        if (m >= m_end) continue;
        float *row = y + (long long)m * ldy;
#pragma unroll
        for (int j = 0; j < TN; ++j) {
            const int n = n0 + 2 * tx + TX * (j & ~1) + (j & 1);
            if (n >= n_end) continue;
            float value = acc[i][j];
            if (bias) value += bias[n];
            if (accumulate) value += row[n];
            row[n] = value;
        }
    }
}

#endif
