/* moe_combine: x[t] += sum_j weights[t][j] y[places[t][j]] + sigmoid(gate[t]) shared[t]
 * x, shared float[T][N]; y float[P][N] permuted expert outputs; weights float[T][k], places int[T][k]
 * gate      float[T] shared-expert gate before the sigmoid, gate_stride apart
 * map       grid (ceil(N/128), T), block 128; choices are added in the router's order
 * cost      reads T N (4 k + 8) B, writes T N 4 B: bandwidth-bound
 * needs     T <= 65535
 */
#include "fermi.h"

extern "C" __global__ void __launch_bounds__(128)
moe_combine(float *x, const float *y, const float *weights, const int *places, int k, const float *shared,
            const float *gate, int gate_stride, int n) {
    const int column = blockIdx.x * 128 + threadIdx.x, token = blockIdx.y;
    if (column >= n) return;
    float sum = 0.0f;
    for (int j = 0; j < k; ++j)
        sum = fmaf(weights[token * k + j], y[(long long)places[token * k + j] * n + column], sum);
    const long long at = (long long)token * n + column;
    sum = fmaf(sigmoid(gate[(long long)token * gate_stride]), shared[at], sum);
    x[at] += sum;
}
