/* matmul_f16 for tensor cores: arguments, launch and meaning as in ../matmul_f16.cu
 *
 * Both factors are taken as the sum of two bfloat16 numbers, the first a rounding, the second what it misses: exact for a
 * float16 weight, 16 bits of an activation, whose range float16 does not have. A group of 32 columns is summed up on its
 * own and added to what came before, in ascending order, so that the tensor cores' own rounding does not pile up and a
 * row's result does not depend on the others.
 *
 * Weights go from memory straight to the lane that multiplies them, eight columns of a row at once: what is summed over
 * may come in any order that both factors share, so lane t of four takes columns 8 t .. 8 t + 7 of a group.
 *
 * map   grid (ceil(N/128), ceil(M/64)), block 256: a warp has 32 x 32 of the 64 x 128 tile
 * cost  8 M N K flop of bfloat16
 * needs as there; 16 KB shared
 */
#include "mma_tile.cuh"

#define GROUP 32

struct __attribute__((aligned(16))) halves8 {
    unsigned word[4];
};

/* A word of two float16 numbers as two pairs of bfloat16. */
static __device__ __forceinline__ unsigned split_halves_exactly(unsigned word, unsigned &rest) {
    return split_pair(half_to_float((unsigned short)(word & 0xffffu)), half_to_float((unsigned short)(word >> 16)), rest);
}

/* What a lane brings into one group of columns: eight of a row of x, and of four rows of W. */
struct Fetched {
    float4 x[2];
    halves8 w[2][2];

    /* The last group may be half: what lies beyond `k` counts as zeros. */
    __device__ __forceinline__ void fetch(const float *source, const unsigned short *const (&weight)[2][2], int column,
                                          int k) {
        x[0] = x[1] = float4();
        if (column + threadIdx.x % 4 * 8 < k) {
            x[0] = *(const float4 *)(source + column);
            x[1] = *(const float4 *)(source + column + 4);
        }
#pragma unroll
        for (int i = 0; i < 2; ++i)
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                w[i][r] = halves8();
                if (column + threadIdx.x % 4 * 8 < k) w[i][r] = *(const halves8 *)(weight[i][r] + column);
            }
    }
    __device__ __forceinline__ void split_x(halves8 &high, halves8 &low) const {
        high.word[0] = split_pair(x[0].x, x[0].y, low.word[0]);
        high.word[1] = split_pair(x[0].z, x[0].w, low.word[1]);
        high.word[2] = split_pair(x[1].x, x[1].y, low.word[2]);
        high.word[3] = split_pair(x[1].z, x[1].w, low.word[3]);
    }
};

extern "C" __global__ void __launch_bounds__(256)
matmul_f16(const float *x, int ldx, const unsigned short *w, const float *bias, float *y, int ldy, int m, int n, int k,
           int accumulate) {
    __shared__ halves8 shared_high[2][64 * 4], shared_low[2][64 * 4]; /* [buffer][row of x][eight columns of a group] */
    const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32, g = lane / 4, t = lane % 4;
    const int m0 = blockIdx.y * 64, n0 = blockIdx.x * 128 + warp % 4 * 32, row0 = warp / 4 * 32;
    const int source_row = m0 + thread / 4 < m ? m0 + thread / 4 : m - 1;
    const float *source = x + (long long)source_row * ldx + t * 8;
    const unsigned short *weight[2][2];
    float acc[2][4][4];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int row = n0 + i * 16 + r * 8 + g;
            weight[i][r] = w + (long long)(row < n ? row : n - 1) * k + t * 8;
        }
#pragma unroll
        for (int f = 0; f < 4; ++f)
#pragma unroll
            for (int c = 0; c < 4; ++c) acc[i][f][c] = 0.0f;
    }

    Fetched next;
    next.fetch(source, weight, 0, k);
    int buffer = 0;
#pragma unroll 1
    for (int column = 0; column < k; column += GROUP) {
        const Fetched own = next;
        own.split_x(shared_high[buffer][thread], shared_low[buffer][thread]);
        if (column + GROUP < k) next.fetch(source, weight, column + GROUP, k);
        /* One barrier a step: who writes this buffer again has passed the next one, which all reach after reading. */
        __syncthreads();
        halves8 x_high[4], x_low[4];
#pragma unroll
        for (int f = 0; f < 4; ++f) {
            x_high[f] = shared_high[buffer][(row0 + f * 8 + g) * 4 + t];
            x_low[f] = shared_low[buffer][(row0 + f * 8 + g) * 4 + t];
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            float sum[4][4];
#pragma unroll
            for (int f = 0; f < 4; ++f) sum[f][0] = sum[f][1] = sum[f][2] = sum[f][3] = 0.0f;
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                unsigned high[4], low[4];
#pragma unroll
                for (int part = 0; part < 4; ++part)
                    high[part] = split_halves_exactly(own.w[i][part % 2].word[2 * j + part / 2], low[part]);
#pragma unroll
                for (int f = 0; f < 4; ++f) mma_bf16(sum[f], low, x_low[f].word[2 * j], x_low[f].word[2 * j + 1]);
#pragma unroll
                for (int f = 0; f < 4; ++f) mma_bf16(sum[f], high, x_low[f].word[2 * j], x_low[f].word[2 * j + 1]);
#pragma unroll
                for (int f = 0; f < 4; ++f) mma_bf16(sum[f], low, x_high[f].word[2 * j], x_high[f].word[2 * j + 1]);
#pragma unroll
                for (int f = 0; f < 4; ++f) mma_bf16(sum[f], high, x_high[f].word[2 * j], x_high[f].word[2 * j + 1]);
            }
#pragma unroll
            for (int f = 0; f < 4; ++f)
#pragma unroll
                for (int c = 0; c < 4; ++c) acc[i][f][c] += sum[f][c];
        }
        buffer ^= 1;
    }

#pragma unroll
    for (int f = 0; f < 4; ++f)
#pragma unroll
        for (int c = 0; c < 2; ++c) {
            const int at = m0 + row0 + f * 8 + 2 * t + c;
            if (at >= m) continue;
            float *row = y + (long long)at * ldy;
#pragma unroll
            for (int i = 0; i < 2; ++i)
#pragma unroll
                for (int r = 0; r < 2; ++r) {
                    const int to = n0 + i * 16 + r * 8 + g;
                    if (to >= n) continue;
                    float value = acc[i][f][2 * r + c];
                    if (bias) value += bias[to];
                    row[to] = accumulate ? value + row[to] : value;
                }
        }
}
