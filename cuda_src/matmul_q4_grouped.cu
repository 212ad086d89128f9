/* matmul_q4_grouped: y[r] = W[expert(r)] x[rows[r]]      all routed experts in one launch
 * x     float rows of K, ldx apart; rows int[R] source row of each permuted row, or null (row r itself)
 * W     fm_block_q4[slot][N/16][K/64]: the experts on the card, slot_bytes apart
 * y     float[R] rows of N, ldy apart, in permuted (expert-major) order
 * tiles int4[tile_count[0]] {slot, first row, rows, tile rows} from expert_plan
 * map   grid (ceil(N/128), bound on the tile count), block 128: a tile of 32 x 128, 4 x 8 values per thread, or of
 *       16 x 128, 2 x 8 values, for an expert's last few tokens; blocks beyond the tile count return at once
 * cost  2 R N K flop plus the padding of each expert's last tile; reads weights N K 0.5625 B per tile; on sm_20 the loop
 *       is 703 instructions for 512 useful FFMA (73 %), 450 for 256 in a 16-row tile
 * needs N % 16 == 0, K % 64 == 0, ldx % 4 == 0, tile bound <= 65535, W and x < 4 GiB each; 11.5 KB shared, <= 63 registers
 */
#include "matmul_tile.cuh"

template <int ROWS>
static __device__ __forceinline__ void grouped_tile(float (&shared_x)[TILE_K][x_pitch(ROWS, ROWS / 8)], float (&shared_w)[TILE_K][128],
                                                    const float *x, int ldx, const int *rows, const unsigned char *w,
                                                    unsigned slot_bytes, float *y, int ldy, const int4 *tiles, int n,
                                                    int k) {
    const int TM = ROWS / 8;
    float acc[TM][8];
    const int4 tile = tiles[blockIdx.y];
    matmul_accumulate<ROWS, 128, 128, TM, 8, 128, Q4Loader<128, 128>, true>(
        acc, shared_x, shared_w, x, ldx, rows, w, tile.x * slot_bytes, tile.y, tile.y + tile.z, blockIdx.x * 128, n, k);
    const int4 again = tiles[block_y_again()];
    matmul_store<ROWS, 128>(acc, y, ldy, 0, again.y, again.y + again.z, block_x_again() * 128, n, 0);
}

extern "C" __global__ void __launch_bounds__(128)
matmul_q4_grouped(const float *x, int ldx, const int *rows, const unsigned char *w, unsigned slot_bytes, float *y,
                  int ldy, const int4 *tiles, const int *tile_count, int n, int k) {
    __shared__ float wide_x[TILE_K][x_pitch(32, 4)];
    __shared__ float narrow_x[TILE_K][x_pitch(16, 2)];
    __shared__ float shared_w[TILE_K][128];
    if ((int)blockIdx.y >= tile_count[0]) return;
    if (tiles[blockIdx.y].w == 16)
        grouped_tile<16>(narrow_x, shared_w, x, ldx, rows, w, slot_bytes, y, ldy, tiles, n, k);
    else
        grouped_tile<32>(wide_x, shared_w, x, ldx, rows, w, slot_bytes, y, ldy, tiles, n, k);
}
