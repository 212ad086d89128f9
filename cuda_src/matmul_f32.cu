/* matmul_f32: y[M,N] = x[M,K] W[N,K]^T      the small float32 matrices: router, shared-expert gate, GDN a and b
 * x     float[M] rows of K, ldx apart; W float[N][K]; y float[M] rows of N, ldy apart
 * map   grid (ceil(N/32), ceil(M/32)), block 256: a 32 x 32 tile. So few columns make few blocks, so four groups of 64
 *       threads share K: group g takes columns 16 g.. of every 64, 4 x 4 values per thread; their sums are added in order
 * cost  2 M N K flop; reads M K 4 B ceil(N/32) + N K 4 B ceil(M/32)
 * needs K % 64 == 0, ldx % 4 == 0; 17 KB shared
 */
#include "matmul_tile.cuh"

#define GROUPS 4
#define GROUP_THREADS 64
#define TILE 32
#define PITCH (TILE + 2)

extern "C" __global__ void __launch_bounds__(256)
matmul_f32(const float *x, int ldx, const float *w, float *y, int ldy, int m, int n, int k) {
    __shared__ float stage[GROUPS][2][TILE_K][PITCH];
    const int thread = threadIdx.x, group = thread / GROUP_THREADS, own = thread % GROUP_THREADS;
    const int m0 = blockIdx.y * TILE, n0 = blockIdx.x * TILE;
    float(&shared_x)[TILE_K][PITCH] = stage[group][0], (&shared_w)[TILE_K][PITCH] = stage[group][1];
    XLoader<TILE, GROUP_THREADS> loader_x;
    RowMajorLoader<float, TILE, GROUP_THREADS> loader_w;
    loader_x.open(ldx, 0, m0, m, own);
    loader_w.open(0, k, n0, n, own);
    loader_x.skip(group * TILE_K);
    loader_w.skip(group * TILE_K);
    const int column = own % (TILE / 4), row = own / (TILE / 4);
    float acc[4][4];
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j) acc[i][j] = 0.0f;
    loader_x.fetch(x);
    loader_w.fetch(w, 0);
#pragma unroll 1
    for (int first = GROUPS * TILE_K;; first += GROUPS * TILE_K) {
        loader_x.store(shared_x, own);
        loader_w.store(shared_w, own);
        __syncthreads();
        const bool more = first < k;
        if (more) {
            loader_x.skip((GROUPS - 1) * TILE_K);
            loader_w.skip((GROUPS - 1) * TILE_K);
            loader_x.fetch(x);
            loader_w.fetch(w, 0);
        }
#pragma unroll
        for (int kk = 0; kk < TILE_K; ++kk) {
            float a[4], b[4];
#pragma unroll
            for (int i = 0; i < 4; i += 2) {
                const float2 left = *(const float2 *)&shared_x[kk][2 * row + TILE / 2 * (i / 2)];
                const float2 right = *(const float2 *)&shared_w[kk][2 * column + TILE / 2 * (i / 2)];
                a[i] = left.x;
                a[i + 1] = left.y;
                b[i] = right.x;
                b[i + 1] = right.y;
            }
#pragma unroll
            for (int i = 0; i < 4; ++i)
#pragma unroll
                for (int j = 0; j < 4; ++j) acc[i][j] = fmaf(a[i], b[j], acc[i][j]);
        }
        __syncthreads();
        if (!more) break;
    }
    float *sums = &stage[0][0][0][0]; /* [group][row][column] */
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j)
            sums[(group * TILE + 2 * row + TILE / 2 * (i / 2) + i % 2) * TILE + 2 * column + TILE / 2 * (j / 2) + j % 2] =
                acc[i][j];
    __syncthreads();
#pragma unroll
    for (int i = thread; i < TILE * TILE; i += 256) {
        const int at_row = m0 + i / TILE, at_column = n0 + i % TILE;
        float total = sums[i];
#pragma unroll
        for (int g = 1; g < GROUPS; ++g) total += sums[g * TILE * TILE + i];
        if (at_row < m && at_column < n) y[(long long)at_row * ldy + at_column] = total;
    }
}
