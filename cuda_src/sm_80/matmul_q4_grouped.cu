/* matmul_q4_grouped for tensor cores: arguments, launch and meaning as in ../matmul_q4_grouped.cu
 * map   grid (2 ceil(N/128), bound on the tile count), block 128: a warp has 32 x 32 of a 32 x 128 tile, full or not; of
 *       two blocks for 128 columns the second has the lower half of a 64-row tile, or nothing
 * cost  4 R N K flop of bfloat16 plus the padding of each expert's last tile
 * needs as there; 8 KB shared
 */
#include "mma_tile.cuh"

extern "C" __global__ void __launch_bounds__(128)
matmul_q4_grouped(const float *x, int ldx, const int *rows, const unsigned char *w, unsigned slot_bytes, float *y,
                  int ldy, const int4 *tiles, const int *tile_count, int n, int k) {
    __shared__ MmaShared<32> shared;
    if ((int)blockIdx.y >= tile_count[0]) return;
    const int4 tile = tiles[blockIdx.y];
    const int first = tile.y + blockIdx.x % 2 * 32, end = tile.y + tile.z, column = blockIdx.x / 2 * 128;
    if (first >= (tile.w == 64 ? end : tile.y + 1)) return;
    float acc[2][4][4];
    mma_product<32>(acc, shared, x, ldx, rows, w + (long long)tile.x * slot_bytes, first, end, column,
                    n, k);
    mma_store(acc, y, ldy, first, end, column, n, 0);
}
