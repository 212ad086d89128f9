/* swiglu: y = SiLU(gate) * up
 * x     float[R][2 I]: gate, then up; y float[R][I]
 * map   grid (ceil(I/128), at most 65535), block 128; rows strided by the grid, four under way together
 * cost  reads R I 8 B, writes R I 4 B: bandwidth-bound
 */
#include "fermi.h"

#define ROWS 4

extern "C" __global__ void __launch_bounds__(128)
swiglu(const float *x, float *y, int rows, int inner) {
    const int column = blockIdx.x * 128 + threadIdx.x;
    if (column >= inner) return;
    for (int first = blockIdx.y; first < rows; first += ROWS * gridDim.y) {
        float gate[ROWS], up[ROWS];
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
            const int row = first + i * gridDim.y;
            const float *pair = x + (long long)(row < rows ? row : first) * 2 * inner + column;
            gate[i] = pair[0];
            up[i] = pair[inner];
        }
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
            const int row = first + i * gridDim.y;
            if (row < rows) y[(long long)row * inner + column] = silu(gate[i]) * up[i];
        }
    }
}
