/* gelu_tanh, gelu_erf: y = GELU(x), in place or not      vision MLP (tanh form), merger (erf form)
 * x, y  float[count]; count < 2^31
 * map   grid (min(ceil(count/256), 65535)), block 256, strided
 * cost  reads and writes count 4 B: bandwidth-bound
 * erf is the five-term rational approximation of Abramowitz and Stegun 7.1.26: absolute error 1.5e-7
 */
#include "fermi.h"

extern "C" __global__ void __launch_bounds__(256)
gelu_tanh(const float *x, float *y, int count) {
    for (long long i = blockIdx.x * 256 + threadIdx.x; i < count; i += (long long)gridDim.x * 256) {
        const float v = x[i], inner = 0.797884561f * fmaf(0.044715f * v * v, v, v);
        y[i] = v * sigmoid(2.0f * inner); /* (1 + tanh u) / 2 = sigmoid(2 u) */
    }
}

extern "C" __global__ void __launch_bounds__(256)
gelu_erf(const float *x, float *y, int count) {
    for (long long i = blockIdx.x * 256 + threadIdx.x; i < count; i += (long long)gridDim.x * 256) {
        const float v = x[i], z = fabsf(v) * 0.707106781f, t = 1.0f / fmaf(0.3275911f, z, 1.0f);
        float p = fmaf(t, 1.061405429f, -1.453152027f);
        p = fmaf(t, p, 1.421413741f);
        p = fmaf(t, p, -0.284496736f);
        p = fmaf(t, p, 0.254829592f);
        const float tail = t * p * exp_f32(-z * z); /* erfc(|v| / sqrt 2) */
        y[i] = 0.5f * v * (v < 0.0f ? tail : 2.0f - tail);
    }
}
