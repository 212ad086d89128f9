/* rope: rotates dims (j, j + R/2), j < R/2, of every head in place; interleaved MRoPE
 * x         float[T][heads][D], token rows token_stride apart, heads head_stride apart
 * positions int[T][3] = (t, h, w), equal for text
 * table     float2[positions][R/2] = (cos, sin) of position * theta^(-2j/R), first row = position `table_start`;
 *           made on the host in float64: a float32 angle is wrong by 1e-2 at position 262,143
 * axis      h if j % 3 == 1 and j < 3 h_section, w if j % 3 == 2 and j < 3 w_section, else t
 * map       grid (heads, T), block 32: thread j takes frequencies j, j + 32, ...
 * cost      reads and writes T heads R 4 B
 * needs     T <= 65535; every position inside the table
 */
#include "fermi.h"

extern "C" __global__ void __launch_bounds__(32)
rope(float *x, int token_stride, int head_stride, const int *positions, const float2 *table, int table_start, int half,
     int h_section, int w_section) {
    x += (long long)blockIdx.y * token_stride + blockIdx.x * head_stride;
    positions += blockIdx.y * 3;
    for (int j = threadIdx.x; j < half; j += 32) {
        const int axis = j % 3 == 1 && j < 3 * h_section ? 1 : j % 3 == 2 && j < 3 * w_section ? 2 : 0;
        const float2 turn = table[(long long)(positions[axis] - table_start) * half + j];
        const float a = x[j], b = x[j + half];
        x[j] = fmaf(a, turn.x, -(b * turn.y));
        x[j + half] = fmaf(b, turn.x, a * turn.y);
    }
}
