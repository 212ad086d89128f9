/* A tile of tokens laid side by side for the many-token kernels: they read it with constant offsets, whatever rows
 * of the activations (an expert's tokens, say) the caller chose. */
#ifndef FERMION_Q4_PACK_H
#define FERMION_Q4_PACK_H

#include <string.h>

#include "tiers.h"

#define FM_PACK_GROUPS 16 /* columns are taken 512 at a time, so that a tile of tokens stays in the first cache */

/* Groups group0.. of `count` tokens: q [groups][count][32], scale and correction [groups][count]. */
static inline void fm_pack_tokens(const fm_q8 *x, const int32_t *rows, int first, int count, int group0, int groups,
                                  int8_t *q, float *scale, int32_t *correction) {
    const int row_groups = x->cols / FM_GROUP;
    for (int t = 0; t < count; t++) {
        const size_t row = (size_t)fm_token_row(rows, first + t);
        const int8_t *from = x->q + row * x->cols + (size_t)group0 * FM_GROUP;
        for (int g = 0; g < groups; g++) {
            memcpy(q + ((size_t)g * count + t) * FM_GROUP, from + (size_t)g * FM_GROUP, FM_GROUP);
            scale[g * count + t] = x->scale[row * row_groups + group0 + g];
            correction[g * count + t] = x->correction[row * row_groups + group0 + g];
        }
    }
}

#endif
