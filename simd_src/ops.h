/* The float operations for C: the table's declarations (ops_api.h) with the sizes they share. */
#ifndef FERMION_OPS_H
#define FERMION_OPS_H

#include <stddef.h>
#include <stdint.h>

#include "ops_api.h"

#define FM_PAGE_TOKENS 64 /* keys of a KV page, and rows of an attention tile */
#define FM_ATTEND_KEYS 16    /* of a page, widened at once; */
#define FM_ATTEND_COLUMNS 64 /* of its values: 16 KB each for heads of 256 */
#define FM_DELTA_CHUNK 64 /* tokens the delta rule takes at once in prefill */
#define FM_CONV_TAPS 4

extern const fm_ops fm_ops_scalar;
extern const fm_ops fm_ops_ssse3;
extern const fm_ops fm_ops_avx2;
extern const fm_ops fm_ops_avx512;

#endif
