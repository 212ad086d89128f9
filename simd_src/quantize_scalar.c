/* quantize_q8: THE reference of activation quantisation (kernels.h), in plain C. */
#include <math.h>
#include <string.h>

#include "quantize.h"
#include "tiers.h"

void fm_quantize_q8_scalar(const float *x, int cols, int8_t *q, float *scale, int32_t *correction) {
    for (int group = 0; group < cols / FM_GROUP; group++, x += FM_GROUP, q += FM_GROUP) {
        uint32_t most = 0; /* magnitudes compare as integers, and NaN is the largest */
        for (int k = 0; k < FM_GROUP; k++) {
            uint32_t bits;
            memcpy(&bits, x + k, 4);
            bits &= 0x7fffffff;
            if (bits > most) most = bits;
        }
        float inverse;
        scale[group] = fm_q8_scale(most, &inverse);
        int32_t sum = 0;
        for (int k = 0; k < FM_GROUP; k++) {
            q[k] = inverse == 0.0f ? 0 : (int8_t)lrintf(x[k] * inverse);
            sum += q[k];
        }
        correction[group] = -FM_Q4_ZERO * sum;
    }
}
