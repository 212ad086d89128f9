/* The float operations for C: the table's declarations (ops_api.h) with the sizes they share. */
#ifndef FERMION_OPS_H
#define FERMION_OPS_H

#include <stddef.h>
#include <stdint.h>

#include "ops_api.h"

#define FM_PAGE_TOKENS 64 /* keys of a KV page, and rows of an attention tile */
#define FM_SPAN_PAGES 2      /* whose softmax is one (as in fm_attend_args); where one token's keys are split, finely
                              * enough that a short context still occupies several threads */
#define FM_SPAN_TOKENS (FM_SPAN_PAGES * FM_PAGE_TOKENS)
#define FM_ATTEND_DEPTH 128  /* dimensions of a page's keys widened at once, */
#define FM_ATTEND_COLUMNS 64 /* columns of a span's values: 32 KB each */
#define FM_ATTEND_PADDED(n) (((size_t)(n) + 15) / 16 * 16) /* rows or keys in whole vectors of every tier */
#define FM_DELTA_CHUNK 64 /* tokens the delta rule takes at once in prefill */
#define FM_CONV_TAPS 4

extern const fm_ops fm_ops_scalar;
extern const fm_ops fm_ops_ssse3;
extern const fm_ops fm_ops_avx2;
extern const fm_ops fm_ops_avx512;

#endif
