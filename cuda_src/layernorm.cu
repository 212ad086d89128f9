/* layernorm: y = (x - mean) (var + eps)^-1/2 w + b      vision tower
 * x, y  float[T][K]; w, b float[K]; variance from a second pass over the row (no cancellation)
 * map   grid (T), block 128: one row per block
 * cost  reads T K 4 B (three times, from the cache), writes T K 4 B: bandwidth-bound
 * needs T <= 65535; 0.5 KB shared
 */
#include "reduce.cuh"

extern "C" __global__ void __launch_bounds__(128)
layernorm(const float *x, const float *w, const float *b, float *y, int k, float eps) {
    __shared__ float scratch[128];
    const int thread = threadIdx.x;
    x += (long long)blockIdx.x * k;
    y += (long long)blockIdx.x * k;
    float sum = 0.0f;
    for (int i = thread; i < k; i += 128) sum += x[i];
    const float mean = block_sum(sum, scratch, thread) / (float)k;
    float squares = 0.0f;
    for (int i = thread; i < k; i += 128) squares = fmaf(x[i] - mean, x[i] - mean, squares);
    const float inverse = 1.0f / sqrtf(block_sum(squares, scratch, thread) / (float)k + eps);
    for (int i = thread; i < k; i += 128) y[i] = fmaf((x[i] - mean) * inverse, w[i], b[i]);
}
