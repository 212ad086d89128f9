/* quantize_q8: one row of activations to int8 in groups of 32. The reference; contract in kernels.h. */
#include <math.h>

#include "tiers.h"

void fm_quantize_q8_scalar(const float *x, int cols, int8_t *q, float *scale, int32_t *correction) {
    for (int group = 0; group < cols / FM_GROUP; group++, x += FM_GROUP, q += FM_GROUP) {
        float largest = 0.0f;
        for (int k = 0; k < FM_GROUP; k++) largest = fmaxf(largest, fabsf(x[k]));
        const float inverse = largest < FM_Q8_TINY ? 0.0f : 127.0f / largest;
        int32_t sum = 0;
        for (int k = 0; k < FM_GROUP; k++) {
            q[k] = (int8_t)nearbyintf(x[k] * inverse); /* half to even: the default rounding of every x86-64 ABI */
            sum += q[k];
        }
        scale[group] = largest < FM_Q8_TINY ? 0.0f : largest / 127.0f;
        correction[group] = -FM_Q4_ZERO * sum;
    }
}
