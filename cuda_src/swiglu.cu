/* swiglu: y = SiLU(gate) * up
 * x     float[R][2 I]: gate, then up; y float[R][I]
 * map   grid (ceil(I/128), min(R, 65535)), block 128; rows strided by the grid
 * cost  reads R I 8 B, writes R I 4 B: bandwidth-bound
 */
#include "fermi.h"

extern "C" __global__ void __launch_bounds__(128)
swiglu(const float *x, float *y, int rows, int inner) {
    const int column = blockIdx.x * 128 + threadIdx.x;
    if (column >= inner) return;
    for (int row = blockIdx.y; row < rows; row += gridDim.y) {
        const float *pair = x + (long long)row * 2 * inner + column;
        y[(long long)row * inner + column] = silu(pair[0]) * pair[inner];
    }
}
