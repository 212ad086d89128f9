/* rope_2d: vision rotary embedding of q and k in place: pairs (j, j + D/2), j < D/2
 * x     float[T][heads][D], token rows token_stride apart, heads D apart (q and k lie side by side: 2 x heads)
 * cells int[T][2] = (row, column) of each patch; the first D/4 angles follow the row, the others the column
 * table float2[side][D/4] = (cos, sin) of coordinate * 10000^(-2j/(D/2)), made on the host
 * map   grid (heads, T), block 64: thread j takes pair j
 * cost  reads and writes T heads D 4 B
 * needs D % 4 == 0, D <= 128, T <= 65535
 */
#include "fermi.h"

extern "C" __global__ void __launch_bounds__(64)
rope_2d(float *x, int token_stride, int d, const int *cells, const float2 *table) {
    const int j = threadIdx.x, half = d / 2, quarter = d / 4;
    if (j >= half) return;
    x += (long long)blockIdx.y * token_stride + blockIdx.x * d;
    const float2 turn = table[cells[blockIdx.y * 2 + j / quarter] * quarter + j % quarter];
    const float a = x[j], b = x[j + half];
    x[j] = fmaf(a, turn.x, -(b * turn.y));
    x[j + half] = fmaf(b, turn.x, a * turn.y);
}
