/* rmsnorm: y = x (mean x^2 + eps)^-1/2 gain      layer norms, and q/k norms per head
 * x     float rows of K; row (token t, head h) lies t token_stride + h head_stride floats in, y likewise
 * gain  float[K]: 1 + the checkpoint's weight
 * map   grid (heads, T), block 128: one row per block, thread j takes columns j, j + 128, ...
 * cost  reads and writes T heads K 4 B: bandwidth-bound
 * needs T <= 65535; 0.5 KB shared
 */
#include "reduce.cuh"

#define AHEAD 8 /* loads of a thread that are under way together */

extern "C" __global__ void __launch_bounds__(128)
rmsnorm(const float *x, int x_token_stride, int x_head_stride, const float *gain, float *y, int y_token_stride,
        int y_head_stride, int k, float eps) {
    __shared__ float scratch[128];
    x += (long long)blockIdx.y * x_token_stride + blockIdx.x * x_head_stride;
    y += (long long)blockIdx.y * y_token_stride + blockIdx.x * y_head_stride;
    const int thread = threadIdx.x;
    float squares = 0.0f;
    for (int i = thread; i < k; i += 128 * AHEAD) {
        float value[AHEAD];
#pragma unroll
        for (int j = 0; j < AHEAD; ++j) value[j] = i + 128 * j < k ? x[i + 128 * j] : 0.0f;
#pragma unroll
        for (int j = 0; j < AHEAD; ++j) squares = fmaf(value[j], value[j], squares);
    }
    squares = block_sum(squares, scratch, thread);
    const float inverse = 1.0f / sqrtf(squares / (float)k + eps);
    for (int i = thread; i < k; i += 128 * AHEAD) {
        float value[AHEAD];
#pragma unroll
        for (int j = 0; j < AHEAD; ++j) value[j] = i + 128 * j < k ? x[i + 128 * j] * inverse * gain[i + 128 * j] : 0.0f;
#pragma unroll
        for (int j = 0; j < AHEAD; ++j)
            if (i + 128 * j < k) y[i + 128 * j] = value[j];
    }
}
