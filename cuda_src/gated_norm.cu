/* gated_norm: y = o (mean o^2 + eps)^-1/2 w SiLU(z)      per GDN head; w is used as it is (no + 1)
 * o, z, y float[T][Hv][D], token rows o_stride, z_stride, y_stride floats apart; w float[D]
 * map     grid (Hv, T), block 64: one head of one token per block
 * cost    reads T Hv D 8 B, writes T Hv D 4 B: bandwidth-bound
 * needs   T <= 65535; 0.25 KB shared
 */
#include "reduce.cuh"

extern "C" __global__ void __launch_bounds__(64)
gated_norm(const float *o, int o_stride, const float *z, int z_stride, const float *w, float *y, int y_stride, int d,
           float eps) {
    __shared__ float scratch[64];
    const int thread = threadIdx.x;
    o += (long long)blockIdx.y * o_stride + blockIdx.x * d;
    z += (long long)blockIdx.y * z_stride + blockIdx.x * d;
    y += (long long)blockIdx.y * y_stride + blockIdx.x * d;
    float squares = 0.0f;
    for (int i = thread; i < d; i += 64) squares = fmaf(o[i], o[i], squares);
    squares = block_sum(squares, scratch, thread);
    const float inverse = 1.0f / sqrtf(squares / (float)d + eps);
    for (int i = thread; i < d; i += 64) y[i] = o[i] * inverse * w[i] * silu(z[i]);
}
