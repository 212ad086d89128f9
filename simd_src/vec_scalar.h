/* The vector vocabulary of ops_impl.h with one lane: plain C99, the reference. */
#ifndef FERMION_VEC_SCALAR_H
#define FERMION_VEC_SCALAR_H

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define VW 1
#define NN_ROWS 4
#define NN_VECS 4
#define NT_ROWS 2
#define NT_COLS 4

typedef float vf;

static inline vf vload(const float *p) { return *p; }
static inline void vstore(float *p, vf a) { *p = a; }
static inline vf vset1(float a) { return a; }
static inline vf vadd(vf a, vf b) { return a + b; }
static inline vf vsub(vf a, vf b) { return a - b; }
static inline vf vmul(vf a, vf b) { return a * b; }
static inline vf vdiv(vf a, vf b) { return a / b; }
static inline vf vmax(vf a, vf b) { return a > b ? a : b; }
static inline vf vfma(vf a, vf b, vf c) { return a * b + c; }
static inline float vsum(vf a) { return a; }
static inline void vsum4(vf a, vf b, vf c, vf d, float *y) { y[0] = a, y[1] = b, y[2] = c, y[3] = d; }
static inline float vhmax(vf a) { return a; }
static inline vf vexp(vf a) { return expf(a); }

#define HALF_LANES 1
static inline void vwiden_half(const uint16_t *p, float *y) {
    /* The magnitude bits, moved into place, are the value times 2^-112; subnormals included. */
    uint32_t bits = (uint32_t)(*p & 0x7fff) << 13, sign = (uint32_t)(*p & 0x8000) << 16;
    float value;
    memcpy(&value, &bits, 4);
    value *= 0x1p112f;
    memcpy(&bits, &value, 4);
    bits |= sign;
    memcpy(y, &bits, 4);
}

#define TURN 1
static inline void vturn_half(const uint16_t *p, size_t ld, float *y, size_t ldy) {
    (void)ld, (void)ldy; /* one element is its own transpose */
    vwiden_half(p, y);
}

static inline void vstore_half(uint16_t *p, vf a) {
    float magnitude = fabsf(a);
    uint32_t bits, source;
    memcpy(&source, &a, 4);
    magnitude = (magnitude < 65504.0f ? magnitude : 65504.0f) * 0x1p-112f;
    memcpy(&bits, &magnitude, 4);
    bits += 0xfff + ((bits >> 13) & 1); /* nearest, ties to even */
    *p = (uint16_t)((bits >> 13) | ((source >> 16) & 0x8000));
}

#endif
