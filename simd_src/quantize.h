/* The scale of a group of activations: the part of quantize_q8 that all tiers share. */
#ifndef FERMION_QUANTIZE_H
#define FERMION_QUANTIZE_H

#include <stdint.h>
#include <string.h>

/* most: the bits of the group's largest magnitude. Returns the scale, most / 127, and what to multiply by, 127 / most.
 * Below 1e-30 (where 127 / most would overflow soon) the group is zero. With an infinity or NaN in the group the
 * scale is that and all q are 0, so that every output the group reaches is NaN: an error further up stays visible. */
static inline float fm_q8_scale(uint32_t most, float *inverse) {
    float magnitude;
    memcpy(&magnitude, &most, 4);
    *inverse = 0.0f;
    if (most >= 0x7f800000) return magnitude;
    if (magnitude < 1e-30f) return 0.0f;
    *inverse = 127.0f / magnitude;
    return magnitude / 127.0f;
}

#endif
