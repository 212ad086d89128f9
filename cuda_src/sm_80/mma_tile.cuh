/* Products of packed 4-bit weights on tensor cores (compute capability 8.0 on), float32 results.
 *
 * y[m][n] = sum over groups of 32 columns of scale[n] * sum_k (q[n][k] - 8) x[m][k]. The integers are exact in bfloat16.
 * An activation is the sum of two bfloat16 numbers, the first its rounding, the second the rounding of the rest: 16 of
 * its 24 bits, so a product is wrong by 2^-17 at most. Both parts are multiplied into one float32 sum per group, which a
 * float32 multiply-add then scales: groups in ascending order, whatever the tile. So a token's result does not depend on
 * the tokens that share its pass, as in matmul_tile.cuh, but its bits are others.
 *
 * A warp computes 32 rows of W x 32 tokens in fragments of 16 x 8. Weights go from memory straight to the registers of
 * the lane that multiplies them: a word of a row holds eight columns, which are what one lane needs of that row for two
 * instructions, if the columns of a group are taken in the order 0 2 4 6 (of each eight), then 1 3 5 7. Activations are
 * split and laid out in that order in shared memory, so that a lane loads its eight columns at once.
 */
#ifndef FERMION_MMA_TILE_CUH
#define FERMION_MMA_TILE_CUH

#include "../../simd_src/blocks.h"
#include "../fermi.h"

#if defined(FERMION_EMU)

#define mma_bf16(d, a, b0, b1) emu_mma(d, a, b0, b1, false, __LINE__)

static inline float bf16_to_float(unsigned half) { return __int_as_float((int)(half << 16)); }
static inline unsigned float_to_bf16(float f) { /* to nearest, ties to even; finite numbers */
    const unsigned bits = (unsigned)__float_as_int(f);
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
static inline unsigned bf16_pair(float low, float high) { return float_to_bf16(low) | float_to_bf16(high) << 16; }
static inline unsigned less_136(unsigned pair) {
    return bf16_pair(bf16_to_float(pair & 0xffff) - 136.0f, bf16_to_float(pair >> 16) - 136.0f);
}

#else

/* d[16 x 8] += a[16 x 16] b[16 x 8] by the 32 lanes of a warp. */
static __device__ __forceinline__ void mma_bf16(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
static __device__ __forceinline__ unsigned bf16_pair(float low, float high) {
    unsigned pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}
static __device__ __forceinline__ unsigned less_136(unsigned pair) {
    unsigned result;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(pair), "r"(0x3f803f80u), "r"(0xc308c308u));
    return result;
}

#endif

/* Two floats as a pair of roundings; `rest` gets what they miss. */
static __device__ __forceinline__ unsigned split_pair(float a, float b, unsigned &rest) {
    const unsigned pair = bf16_pair(a, b);
    rest = bf16_pair(a - __int_as_float((int)(pair << 16)), b - __int_as_float((int)(pair & 0xffff0000u)));
    return pair;
}

/* Integers j and j + 4 of a packed word, less 8. */
static __device__ __forceinline__ unsigned weight_pair(unsigned word, int j) {
    return less_136((word >> (4 * j) & 0x000f000fu) | 0x43004300u);
}

template <int TOKENS>
struct MmaShared {
    uint4 high[2][TOKENS * 4], low[2][TOKENS * 4]; /* [buffer][token][eight columns of the group] */
};

/* acc[i][f] = fragment of weight rows 16 i.. and tokens 8 f.. of the warp's 32 x 32 part. A block has TOKENS * 4 threads:
 * four warps side by side for 128 rows of W, one row of warps for every 32 tokens. rows: source row of each token or
 * null; tokens beyond m_end repeat the last one, rows of W beyond n_end the last 16 (neither is stored). */
template <int TOKENS>
static __device__ __forceinline__ void mma_product(float (&acc)[2][4][4], MmaShared<TOKENS> &shared, const float *x, int ldx,
                                                   const int *rows, const unsigned char *w, int m0, int m_end, int n0,
                                                   int n_end, int k_end) {
    const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
    const int g = lane / 4, t = lane % 4, token0 = warp / 4 * 32;
    int m = m0 + thread / 4;
    m = m < m_end ? m : m_end - 1;
    if (rows) m = rows[m];
    const float *source = x + (long long)m * ldx + thread % 4 * 8;
    const unsigned char *tile[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        int index = n0 / FM_BLOCK_ROWS + warp % 4 * 2 + i;
        const int last = n_end / FM_BLOCK_ROWS - 1;
        index = index < last ? index : last;
        tile[i] = w + (long long)index * (k_end / FM_BLOCK_COLS) * FM_BLOCK_BYTES;
    }
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
        for (int f = 0; f < 4; ++f)
#pragma unroll
            for (int c = 0; c < 4; ++c) acc[i][f][c] = 0.0f;

    float4 next_x[2];
    unsigned next_w[2][2];
    unsigned short next_scale[2][2];
    next_x[0] = *(const float4 *)source;
    next_x[1] = *(const float4 *)(source + 4);
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            next_w[i][r] = *(const unsigned *)(tile[i] + 64 + (t * 16 + g + 8 * r) * 4);
            next_scale[i][r] = *(const unsigned short *)(tile[i] + (g + 8 * r) * 2);
        }
    int buffer = 0;
#pragma unroll 1
    for (int k = 0; k < k_end; k += FM_GROUP) {
        uint4 high, low;
        high.x = split_pair(next_x[0].x, next_x[0].z, low.x);
        high.y = split_pair(next_x[1].x, next_x[1].z, low.y);
        high.z = split_pair(next_x[0].y, next_x[0].w, low.z);
        high.w = split_pair(next_x[1].y, next_x[1].w, low.w);
        shared.high[buffer][thread] = high;
        shared.low[buffer][thread] = low;
        unsigned word[2][2];
        float scale[2][2];
#pragma unroll
        for (int i = 0; i < 2; ++i)
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                word[i][r] = next_w[i][r];
                scale[i][r] = half_to_float(next_scale[i][r]);
            }
        const int ahead = k + FM_GROUP;
        if (ahead < k_end) {
            next_x[0] = *(const float4 *)(source + ahead);
            next_x[1] = *(const float4 *)(source + ahead + 4);
            const int block = ahead / FM_BLOCK_COLS * FM_BLOCK_BYTES, half = ahead % FM_BLOCK_COLS / FM_GROUP;
#pragma unroll
            for (int i = 0; i < 2; ++i)
#pragma unroll
                for (int r = 0; r < 2; ++r) {
                    const unsigned char *at = tile[i] + block;
                    next_w[i][r] = *(const unsigned *)(at + 64 + half * 256 + (t * 16 + g + 8 * r) * 4);
                    next_scale[i][r] = *(const unsigned short *)(at + half * 32 + (g + 8 * r) * 2);
                }
        }
        /* One barrier a step: who writes this buffer again has passed the next one, which all reach after reading. */
        __syncthreads();
        uint4 b_high[4], b_low[4];
#pragma unroll
        for (int f = 0; f < 4; ++f) {
            b_high[f] = shared.high[buffer][(token0 + f * 8 + g) * 4 + t];
            b_low[f] = shared.low[buffer][(token0 + f * 8 + g) * 4 + t];
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            unsigned a[2][4];
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                a[j][0] = weight_pair(word[i][0], 2 * j);
                a[j][1] = weight_pair(word[i][1], 2 * j);
                a[j][2] = weight_pair(word[i][0], 2 * j + 1);
                a[j][3] = weight_pair(word[i][1], 2 * j + 1);
            }
            float sum[4][4];
#pragma unroll
            for (int f = 0; f < 4; ++f) {
                sum[f][0] = sum[f][1] = sum[f][2] = sum[f][3] = 0.0f;
                mma_bf16(sum[f], a[0], b_low[f].x, b_low[f].y);
            }
#pragma unroll
            for (int f = 0; f < 4; ++f) mma_bf16(sum[f], a[1], b_low[f].z, b_low[f].w);
#pragma unroll
            for (int f = 0; f < 4; ++f) mma_bf16(sum[f], a[0], b_high[f].x, b_high[f].y);
#pragma unroll
            for (int f = 0; f < 4; ++f) mma_bf16(sum[f], a[1], b_high[f].z, b_high[f].w);
#pragma unroll
            for (int f = 0; f < 4; ++f)
#pragma unroll
                for (int c = 0; c < 4; ++c) acc[i][f][c] = fmaf(scale[i][c / 2], sum[f][c], acc[i][f][c]);
        }
        buffer ^= 1;
    }
}

/* y = acc (+ y) for the tokens and rows of W that exist. */
static __device__ __forceinline__ void mma_store(const float (&acc)[2][4][4], float *y, int ldy, int m0, int m_end, int n0,
                                                 int n_end, int accumulate) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int f = 0; f < 4; ++f)
#pragma unroll
        for (int c = 0; c < 2; ++c) {
            const int m = m0 + warp / 4 * 32 + f * 8 + 2 * t + c;
            if (m >= m_end) continue;
            float *row = y + (long long)m * ldy;
#pragma unroll
            for (int i = 0; i < 2; ++i)
#pragma unroll
                for (int r = 0; r < 2; ++r) {
                    const int n = n0 + warp % 4 * 32 + i * 16 + r * 8 + g;
                    if (n >= n_end) continue;
                    const float value = acc[i][f][2 * r + c];
                    row[n] = accumulate ? value + row[n] : value;
                }
        }
}

#endif
