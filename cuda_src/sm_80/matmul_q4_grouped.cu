/* matmul_q4_grouped for tensor cores: arguments, launch and meaning as in ../matmul_q4_grouped.cu
 * map   grid (ceil(N/128), bound on the tile count), block 128: a warp has 32 x 32 of the 32 x 128 tile, full or not
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
    float acc[2][4][4];
    mma_product<32>(acc, shared, x, ldx, rows, w + (long long)tile.x * slot_bytes, tile.y, tile.y + tile.z,
                    blockIdx.x * 128, n, k);
    mma_store(acc, y, ldy, tile.y, tile.y + tile.z, blockIdx.x * 128, n, 0);
}
