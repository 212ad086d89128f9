/* matmul_q4_grouped: y[r] = W[expert(r)] x[rows[r]]      all routed experts in one launch
 * x     float rows of K, ldx apart; rows int[R] source row of each permuted row, or null (row r itself)
 * W     fm_block_q4[slot][N/16][K/64]: the experts on the card, slot_bytes apart
 * y     float[R] rows of N, ldy apart, in permuted (expert-major) order
 * tiles int4[tile_count[0]] {slot, first row, rows, tile rows} from expert_plan
 * map   grid (2 ceil(N/128), bound on the tile count), block 128: a tile of 64 x 64, 8 x 4 values per thread; or, for an
 *       expert's last tokens, of 32 x 128 or of 16 x 128, 4 x 4 values: then every second block returns at once, and so
 *       do blocks beyond the tile count
 * cost  2 R N K flop plus the padding of each expert's last tile; reads weights N K 0.5625 B per tile; on sm_20 the loop
 *       is 661 instructions for 512 useful FFMA (77 %), 672 in a 32-row tile (76 %), 400 for 256 in one of 16
 * needs N % 16 == 0, K % 64 == 0, ldx % 4 == 0, tile bound <= 65535, W and x < 4 GiB each; 10.5 KB shared, <= 63 registers
 */
#include "matmul_tile.cuh"

template <int ROWS, int COLS>
struct GroupedShared {
    float x[TILE_K][x_pitch(ROWS)], w[TILE_K][COLS];
};

template <int ROWS, int COLS>
static __device__ __forceinline__ void grouped_tile(GroupedShared<ROWS, COLS> &shared, const float *x, int ldx,
                                                    const int *rows, const unsigned char *w, unsigned slot_bytes,
                                                    float *y, int ldy, const int4 *tiles, int n, int k) {
    const int TM = ROWS * COLS / 512, BLOCKS = COLS / 64; /* of the grid, for the tile's columns */
    if (blockIdx.x % BLOCKS) return;
    float acc[TM][THREAD_COLUMNS];
    const int4 tile = tiles[blockIdx.y];
    matmul_accumulate<ROWS, COLS, 128, TM, COLS, Q4Loader<COLS, 128>, (ROWS > 16)>(
        acc, shared.x, shared.w, x, ldx, rows, w, tile.x * slot_bytes, tile.y, tile.y + tile.z, blockIdx.x * 64, n, k);
    const int4 again = tiles[block_y_again()];
    matmul_store<ROWS, COLS>(acc, y, ldy, 0, again.y, again.y + again.z, block_x_again() * 64, n, 0);
}

extern "C" __global__ void __launch_bounds__(128)
matmul_q4_grouped(const float *x, int ldx, const int *rows, const unsigned char *w, unsigned slot_bytes, float *y,
                  int ldy, const int4 *tiles, const int *tile_count, int n, int k) {
    __shared__ union {
        GroupedShared<64, 64> tall;
        GroupedShared<32, 128> wide;
        GroupedShared<16, 128> narrow;
    } shared;
    if ((int)blockIdx.y >= tile_count[0] || (int)blockIdx.x * 64 >= n) return;
    const int height = tiles[blockIdx.y].w;
    if (height == 64)
        grouped_tile<64, 64>(shared.tall, x, ldx, rows, w, slot_bytes, y, ldy, tiles, n, k);
    else if (height == 32)
        grouped_tile<32, 128>(shared.wide, x, ldx, rows, w, slot_bytes, y, ldy, tiles, n, k);
    else
        grouped_tile<16, 128>(shared.narrow, x, ldx, rows, w, slot_bytes, y, ldy, tiles, n, k);
}
