/* The one matrix product of all weight formats: y[M,N] = x[M,K] W[N,K]^T, float32 accumulation.
 *
 * A block computes ROWS x COLS of y in steps of 16 columns of x and W; a thread owns (8 or 4) x 4 values. Both operands
 * lie transposed in shared memory. A thread's rows of x come in 128-bit loads, its columns of W in 64-bit loads: on Fermi
 * 128-bit loads collide two ways unless few addresses are meant, and of x a warp reads two. Rows of x are padded, so that
 * the transposing stores collide little.
 *
 * Every y[m][n] is one accumulator over ascending k, whatever the tile shape: results depend neither on M nor on
 * which kernel or tile computed them.
 */
#ifndef FERMION_MATMUL_TILE_CUH
#define FERMION_MATMUL_TILE_CUH

#include "../simd_src/blocks.h"
#include "fermi.h"

#define TILE_K 16

/* Loaders address global memory as a kernel argument plus a 32-bit byte offset: the argument stays in the constant
 * bank, so an address costs one register instead of two. Every operand is therefore smaller than 4 GiB. */

/* Fills shared memory with x transposed: ROWS rows of 16 floats, four consecutive ones per thread and round. */
template <int ROWS, int THREADS>
struct XLoader {
    static const int ROUNDS = (ROWS * 4 + THREADS - 1) / THREADS;
    unsigned offset[ROUNDS];
    float4 next[ROUNDS];

    /* rows: source row of each tile row, or null; rows beyond m_end repeat the last one (never stored). */
    __device__ __forceinline__ void open(int ldx, const int *rows, int m0, int m_end, int thread) {
#pragma unroll
        for (int i = 0; i < ROUNDS; ++i) {
            int m = m0 + (thread + i * THREADS) / 4;
            m = m < m_end ? m : m_end - 1;
            if (rows) m = rows[m];
            offset[i] = ((unsigned)m * ldx + (thread & 3) * 4) * 4;
        }
    }
    __device__ __forceinline__ void fetch(const float *x) {
#pragma unroll
        for (int i = 0; i < ROUNDS; ++i) {
            next[i] = *(const float4 *)((const char *)x + offset[i]);
            offset[i] += TILE_K * 4;
        }
    }
    __device__ __forceinline__ void skip(int columns) {
#pragma unroll
        for (int i = 0; i < ROUNDS; ++i) offset[i] += columns * 4;
    }
    template <int PITCH>
    __device__ __forceinline__ void store(float (&shared)[TILE_K][PITCH], int thread) const {
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
    static const int WORDS = COLS * 2 / THREADS; /* per thread: both words of a row, or one where two threads share it */
    unsigned quants, scales;                     /* byte offsets */
    unsigned next[WORDS];
    unsigned short next_scale;

    __device__ __forceinline__ void open(unsigned first_byte, int ldw, int n0, int n_end, int thread) {
        int tile = (n0 + thread % COLS) / FM_BLOCK_ROWS;
        const int last = n_end / FM_BLOCK_ROWS - 1, row = thread % FM_BLOCK_ROWS;
        tile = tile < last ? tile : last;
        scales = first_byte + (unsigned)tile * (ldw / FM_BLOCK_COLS * FM_BLOCK_BYTES) + row * 2;
        quants = scales + row * 2 + 64 + thread / COLS * 64;
    }
    /* k: the column after those fetched, a multiple of 16 */
    __device__ __forceinline__ void fetch(const void *w, int k) {
        next_scale = *(const unsigned short *)((const char *)w + scales);
#pragma unroll
        for (int j = 0; j < WORDS; ++j) next[j] = *(const unsigned *)((const char *)w + quants + j * 64);
        quants += k % FM_BLOCK_COLS == 0 ? 192 : 128;
        scales += k % FM_GROUP != 0 ? 0 : k % FM_BLOCK_COLS == 0 ? FM_BLOCK_BYTES - 32 : 32;
    }
    __device__ __forceinline__ void store(float (&shared)[TILE_K][COLS], int thread) const {
        const int n = thread % COLS, k0 = thread / COLS * 8;
        const float scale = half_to_float(next_scale), zero = scale * -(float)FM_Q4_ZERO;
#pragma unroll
        for (int j = 0; j < WORDS; ++j) {
            /* nibble i of a word is column i / 2 + 4 (i & 1); nibbles i and i + 4 are taken out together */
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float2 pair = halves_to_float(next[j] >> (4 * i) & 0x000f000fu);
                const int column = k0 + j * 8 + i / 2 + 4 * (i & 1);
                shared[column][n] = fmaf(pair.x, scale, zero);
                shared[column + 2][n] = fmaf(pair.y, scale, zero);
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
    unsigned offset[ROUNDS];
    float4 next[ROUNDS];

    __device__ __forceinline__ void open(unsigned first_byte, int ldw, int n0, int n_end, int thread) {
#pragma unroll
        for (int i = 0; i < ROUNDS; ++i) {
            int n = n0 + (thread + i * THREADS) / 4;
            n = n < n_end ? n : n_end - 1;
            offset[i] = first_byte + ((unsigned)n * ldw + (thread & 3) * 4) * sizeof(Element);
        }
    }
    __device__ __forceinline__ void fetch(const void *w, int) {
#pragma unroll
        for (int i = 0; i < ROUNDS; ++i) {
            next[i] = load_four((const Element *)((const char *)w + offset[i]));
            offset[i] += TILE_K * sizeof(Element);
        }
    }
    __device__ __forceinline__ void skip(int columns) {
#pragma unroll
        for (int i = 0; i < ROUNDS; ++i) offset[i] += columns * sizeof(Element);
    }
    template <int PITCH>
    __device__ __forceinline__ void store(float (&shared)[TILE_K][PITCH], int thread) const {
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

/* Length of a row of the shared copy of x: padded, and rows begin where 128-bit loads may. */
static constexpr int x_pitch(int rows) { return rows + 4; }

#define THREAD_COLUMNS 4

/* Place of a thread in a tile's grid of TX columns of threads. Neighbours are in one column: since Volta, a 64-bit shared
 * load takes one turn instead of two if lanes of equal address are two or one apart, and so they are for both operands. */
template <int TX>
static __device__ __forceinline__ int tile_column(int thread) {
    return thread / 2 % TX;
}
template <int TX>
static __device__ __forceinline__ int tile_row(int thread) {
    return thread / (2 * TX) * 2 + thread % 2;
}

/* The order in which a thread takes the columns of row i: neighbours in time share an operand, and the others alternate
 * between even and odd registers, which newer cards can read one each of per clock. Assemblers keep to it. */
static constexpr int column_at(int i, int step) {
    const int forward = i % 2 ? THREAD_COLUMNS - 1 - step : step;
    return forward % 2 * 2 + forward / 2; /* 0 2 1 3 */
}

/* acc = the thread's part of x W^T over all columns. PITCH is the row length of the shared copy of W; a thread owns rows
 * TM tile_row + i and columns 4 tile_column + j of the tile. W starts first_byte bytes into w. 32 accumulators leave few
 * registers: x is fetched only when the previous step is done (the other blocks of the multiprocessor compute
 * meanwhile), W one step ahead. ANEW: the address to store x at comes from indices read anew. */
template <int ROWS, int COLS, int THREADS, int TM, int PITCH, typename WLoader, bool ANEW>
static __device__ __forceinline__ void matmul_accumulate(float (&acc)[TM][THREAD_COLUMNS],
                                                         float (&shared_x)[TILE_K][x_pitch(ROWS)],
                                                         float (&shared_w)[TILE_K][PITCH], const float *x, int ldx,
                                                         const int *rows, const void *w, unsigned first_byte, int m0,
                                                         int m_end, int n0, int n_end, int k_end) {
    const int TN = THREAD_COLUMNS;
    const int TX = COLS / TN, TY = ROWS / TM;
    static_assert(TX * TY == THREADS && TM % 4 == 0, "one thread per register tile");
    const int thread = threadIdx.x;
    XLoader<ROWS, THREADS> loader_x;
    WLoader loader_w;
    loader_x.open(ldx, rows, m0, m_end, thread);
    loader_w.open(first_byte, k_end, n0, n_end, thread);
#pragma unroll
    for (int i = 0; i < TM; ++i)
#pragma unroll
        for (int j = 0; j < TN; ++j) acc[i][j] = 0.0f;

    int k = TILE_K; /* columns of W fetched so far */
    loader_w.fetch(w, k);
#pragma unroll 1
    for (;;) {
        const int again = ANEW ? thread_again() : thread;
        loader_x.fetch(x);
        loader_w.store(shared_w, thread);
        loader_x.store(shared_x, again);
        __syncthreads();
        const bool more = k < k_end;
        k += TILE_K;
        if (more) loader_w.fetch(w, k);
        const float *row_x = &shared_x[0][TM * tile_row<TX>(thread)],
                    *row_w = &shared_w[0][TN * tile_column<TX>(thread)];
#pragma unroll
        for (int kk = 0; kk < TILE_K; ++kk) {
            float a[TM], b[TN];
#pragma unroll
            for (int i = 0; i < TM; i += 4) {
                const float4 four = *(const float4 *)(row_x + kk * x_pitch(ROWS) + i);
                a[i] = four.x;
                a[i + 1] = four.y;
                a[i + 2] = four.z;
                a[i + 3] = four.w;
            }
#pragma unroll
            for (int j = 0; j < TN; j += 2) {
                const float2 pair = *(const float2 *)(row_w + kk * PITCH + j);
                b[j] = pair.x;
                b[j + 1] = pair.y;
            }
#pragma unroll
            for (int i = 0; i < TM; ++i)
#pragma unroll
                for (int step = 0; step < TN; ++step) {
                    const int j = column_at(i, step);
                    acc[i][j] = fmaf(a[i], b[j], acc[i][j]);
                }
        }
        if (!more) break;
        __syncthreads();
    }
}

/* y = acc (+ bias) (+ y) for the rows and columns of the tile that exist. */
template <int ROWS, int COLS, int TM>
static __device__ __forceinline__ void matmul_store(const float (&acc)[TM][THREAD_COLUMNS], float *y, int ldy,
                                                    const float *bias, int m0, int m_end, int n0, int n_end,
                                                    int accumulate) {
    const int TX = COLS / THREAD_COLUMNS;
    const int thread = thread_again(), first_m = m0 + TM * tile_row<TX>(thread);
    const int first_n = n0 + THREAD_COLUMNS * tile_column<TX>(thread);
#pragma unroll
    for (int i = 0; i < TM; ++i) {
        const int m = first_m + i;
        if (m >= m_end) continue;
        float *row = y + (long long)m * ldy;
#pragma unroll
        for (int j = 0; j < THREAD_COLUMNS; ++j) {
            const int n = first_n + j;
            if (n >= n_end) continue;
            float value = acc[i][j];
            if (bias) value += bias[n];
            if (accumulate) value += row[n];
            row[n] = value;
        }
    }
}

#endif
