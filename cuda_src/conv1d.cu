/* conv1d_silu: c[t] = SiLU( sum_j w[j] u[t - 3 + j] ), j = 0..3, per channel      causal, depthwise
 * conv1d_window: the last three inputs before row `end`, the state that the next pass or the CPU starts from
 * u      float[T] rows of C, stride apart; c float[T][C]; w float[4][C] (tap 3 is the newest); window float[3][C]: the inputs before row 0, oldest first
 * map    silu: grid (ceil(C/128), ceil(T/16)), block 128: a thread slides over 16 rows of its channel
 *        window: grid (ceil(C/128)), block 128; `before` and `after` may not overlap
 * cost   reads T C 4 B (19/16), writes T C 4 B: bandwidth-bound
 * needs  ceil(T/16) <= 65535
 */
#include "fermi.h"

static __device__ __forceinline__ float input_at(const float *u, int stride, const float *window, int channels, int channel,
                                                int row) {
    return row >= 0 ? u[(long long)row * stride + channel] : window[(row + 3) * channels + channel];
}

extern "C" __global__ void __launch_bounds__(128)
conv1d_silu(const float *u, int stride, const float *w, const float *window, float *c, int rows, int channels) {
    const int channel = blockIdx.x * 128 + threadIdx.x, first = blockIdx.y * 16;
    if (channel >= channels) return;
    const float w0 = w[channel], w1 = w[channels + channel], w2 = w[2 * channels + channel], w3 = w[3 * channels + channel];
    float u0 = input_at(u, stride, window, channels, channel, first - 3),
          u1 = input_at(u, stride, window, channels, channel, first - 2),
          u2 = input_at(u, stride, window, channels, channel, first - 1);
    const int last = first + 16 < rows ? first + 16 : rows;
    for (int row = first; row < last; ++row) {
        const float u3 = u[(long long)row * stride + channel];
        c[(long long)row * channels + channel] =
            silu(fmaf(w3, u3, fmaf(w2, u2, fmaf(w1, u1, w0 * u0))));
        u0 = u1;
        u1 = u2;
        u2 = u3;
    }
}

extern "C" __global__ void __launch_bounds__(128)
conv1d_window(const float *u, int stride, const float *before, float *after, int end, int channels) {
    const int channel = blockIdx.x * 128 + threadIdx.x;
    if (channel >= channels) return;
    for (int i = 0; i < 3; ++i)
        after[i * channels + channel] = input_at(u, stride, before, channels, channel, end - 3 + i);
}
