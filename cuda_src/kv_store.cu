/* kv_store: writes keys and values of a pass into the KV pages of one layer
 * k, v  float[T][Hkv][D], token rows stride apart
 * pages address[page] of this layer's part of each 64-token page: [K, V][Hkv][64][D], half or float32
 * map   grid (Hkv, T), block 64; the sequence index of token t is position + t
 * cost  reads T Hkv D 8 B, writes T Hkv D 4 B (half)
 * needs T <= 65535. Attention reads only pages, so a prompt and its resumption see the same rounded values.
 */
#include "fermi.h"

extern "C" __global__ void __launch_bounds__(64)
kv_store(const float *k, const float *v, int stride, const unsigned long long *pages, int position, int d, int pages_f32) {
    const int index = position + blockIdx.y, head = blockIdx.x, heads = gridDim.x;
    const unsigned long long page = pages[index / 64];
    const long long source = (long long)blockIdx.y * stride + head * d;
    const long long to_k = ((long long)head * 64 + index % 64) * d, to_v = to_k + (long long)heads * 64 * d;
    for (int i = threadIdx.x; i < d; i += 64) {
        if (pages_f32) {
            ((float *)page)[to_k + i] = k[source + i];
            ((float *)page)[to_v + i] = v[source + i];
        } else {
            ((unsigned short *)page)[to_k + i] = float_to_half(k[source + i]);
            ((unsigned short *)page)[to_v + i] = float_to_half(v[source + i]);
        }
    }
}
