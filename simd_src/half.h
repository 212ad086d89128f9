/* IEEE half to float for scales: finite values only (the quantiser writes no others). */
#ifndef FERMION_HALF_H
#define FERMION_HALF_H

#include <stdint.h>
#include <string.h>

/* The magnitude bits moved into a float's place are the value times 2^-112, subnormals included. */
static inline float fm_half_to_float(uint16_t half) {
    const uint32_t bits = (uint32_t)(half & 0x7fff) << 13;
    float magnitude;
    memcpy(&magnitude, &bits, sizeof magnitude);
    magnitude *= 0x1p112f;
    return half & 0x8000 ? -magnitude : magnitude;
}

#endif
