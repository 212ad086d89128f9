/* matmul_q4_grouped: y[r] = W[expert(r)] x[rows[r]]      all routed experts in one launch
 * x     float rows of K, ldx apart; rows int[R] source row of each permuted row, or null (row r itself)
 * W     fm_block_q4[slot][N/16][K/64]: the experts on the card, slot_bytes apart
 * y     float[R] rows of N, ldy apart, in permuted (expert-major) order
 * tiles int4[tile_count[0]] {slot, first row, rows, tile rows} from expert_plan
 * map   grid (ceil(N/128), bound on the tile count), block 128: a tile of 32 x 128, 4 x 8 values per thread, or of
 *       16 x 128, 2 x 8 values, for an expert's last few tokens; blocks beyond the tile count return at once
 * cost  2 R N K flop plus the padding of each expert's last tile; reads weights N K 0.5625 B per tile
 * needs N % 16 == 0, K % 64 == 0, ldx % 4 == 0, tile bound <= 65535; 11.5 KB shared, <= 63 registers
 */
#include "matmul_tile.cuh"

extern "C" __global__ void __launch_bounds__(128)
matmul_q4_grouped(const float *x, int ldx, const int *rows, const unsigned char *w, unsigned long long slot_bytes,
                  float *y, int ldy, const int4 *tiles, const int *tile_count, int n, int k) {
    __shared__ float shared_x[TILE_K][32 + 2];
    __shared__ float narrow_x[TILE_K][16 + 2];
    __shared__ float shared_w[TILE_K][128];
    if ((int)blockIdx.y >= tile_count[0]) return;
    const int4 tile = tiles[blockIdx.y];
    w += tile.x * slot_bytes;
    const int end = tile.y + tile.z, n0 = blockIdx.x * 128;
    if (tile.w == 16)
        matmul_tile<16, 128, 128, 2, 8, 128, Q4Loader<128, 128> >(narrow_x, shared_w, x, ldx, rows, w, y, ldy, 0, tile.y,
                                                                  end, n0, n, k, k, 0);
    else
        matmul_tile<32, 128, 128, 4, 8, 128, Q4Loader<128, 128> >(shared_x, shared_w, x, ldx, rows, w, y, ldy, 0, tile.y,
                                                                  end, n0, n, k, k, 0);
}
