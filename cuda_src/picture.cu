/* picture_patches: x[t] = the pixels of patch t as (byte - 127.5) / 127.5, in columns [channel][frame][row][column]
 * picture_positions: y[t] += bilinear sample of the position table at patch t, corners aligned
 *                    the two ends of the vision tower's embedding: its matrix product lies between them
 * pixels byte[lines of `width` pixels][channels]; cells int[T][2] = (row, column) of each patch in a picture of
 *       rows x columns patches; every frame of a patch shows the same pixels
 * table half[side][side][K]; x float[T][channels frames patch^2]; y float[T][K]
 * map   grid (T), block 128: one patch per block
 * cost  writes, or reads and writes, T K 4 B; the table comes from the second-level cache: bandwidth-bound
 * needs T <= 65535, width channels lines < 2^31
 */
#include "fermi.h"

extern "C" __global__ void __launch_bounds__(128)
picture_patches(const unsigned char *pixels, const int *cells, float *x, int width, int channels, int frames, int patch) {
    const int area = patch * patch, values = channels * frames * area;
    pixels += (cells[blockIdx.x * 2] * patch * width + cells[blockIdx.x * 2 + 1] * patch) * channels;
    x += (long long)blockIdx.x * values;
    for (int i = threadIdx.x; i < values; i += 128) {
        const int inside = i % area, channel = i / area / frames;
        const unsigned char byte = pixels[(inside / patch * width + inside % patch) * channels + channel];
        x[i] = ((float)byte - 127.5f) / 127.5f;
    }
}

/* The table's row at or before coordinate `index` of `count`, the next one, and how far between them it lies. */
static __device__ __forceinline__ float neighbours(int index, int count, int side, int &first, int &second) {
    const float source = (float)index * (float)(side - 1) / (float)(count > 1 ? count - 1 : 1);
    first = (int)source < side - 1 ? (int)source : side - 1;
    second = first + 1 < side ? first + 1 : side - 1;
    return source - (float)first;
}

extern "C" __global__ void __launch_bounds__(128)
picture_positions(const unsigned short *table, const int *cells, float *y, int k, int side, int rows, int columns) {
    int up, low, left, right;
    const float down = neighbours(cells[blockIdx.x * 2], rows, side, up, low);
    const float over = neighbours(cells[blockIdx.x * 2 + 1], columns, side, left, right);
    const unsigned short *corner[4] = {table + (up * side + left) * k, table + (up * side + right) * k,
                                       table + (low * side + left) * k, table + (low * side + right) * k};
    const float weight[4] = {(1.0f - down) * (1.0f - over), (1.0f - down) * over, down * (1.0f - over), down * over};
    y += (long long)blockIdx.x * k;
    for (int i = threadIdx.x; i < k; i += 128) {
        float sum = y[i];
#pragma unroll
        for (int j = 0; j < 4; ++j) sum = fmaf(weight[j], half_to_float(corner[j][i]), sum);
        y[i] = sum;
    }
}
