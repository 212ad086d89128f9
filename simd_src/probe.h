/* The probe's inner loop, one per tier: data 64-byte aligned, bytes % 1024 == 0. */
#ifndef FERMION_PROBE_H
#define FERMION_PROBE_H

#include <stddef.h>
#include <stdint.h>

uint64_t fm_probe_block_scalar(const void *data, size_t bytes);
uint64_t fm_probe_block_ssse3(const void *data, size_t bytes);
uint64_t fm_probe_block_avx2(const void *data, size_t bytes);
uint64_t fm_probe_block_avx512(const void *data, size_t bytes);

#endif
