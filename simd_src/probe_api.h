/* The bandwidth probe (probe.c): prototypes only, read by the compiler and by the Python binding.
 *
 * Reads a buffer as decode reads expert weights: blocks of block_bytes in scattered order, claimed dynamically by the
 * threads of a pool, each block sequentially with loads as wide as the tier's kernels use. */

/* Seconds for one pass over data (64-byte aligned, bytes % block_bytes == 0, block_bytes % 1024 == 0). cpus: logical
 * ids, one per thread, or NULL. -1 if the pool cannot be made or this build or CPU lacks the tier. */
double fm_probe_read(const char *tier, int threads, const int *cpus, const void *data, size_t bytes,
                     size_t block_bytes);
