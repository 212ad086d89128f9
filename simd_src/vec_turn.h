/* A transposition for the tiers that widen halves 8 at a time, included by vec_<tier>.h after vstore_widened. */
#ifndef FERMION_VEC_TURN_H
#define FERMION_VEC_TURN_H

#include <stddef.h>

#define TURN 8
/* 8 x 8 halves, rows ld apart, to floats, transposed, rows ldy apart: three rounds of interleaving. */
static inline void vturn_half(const uint16_t *p, size_t ld, float *y, size_t ldy) {
    __m128i x[8], z[8];
    for (int i = 0; i < 8; i++) x[i] = _mm_loadu_si128((const __m128i *)(p + i * ld));
#define INTERLEAVE(from, to)                                  \
    for (int i = 0; i < 4; i++) {                             \
        to[2 * i] = _mm_unpacklo_epi16(from[i], from[i + 4]); \
        to[2 * i + 1] = _mm_unpackhi_epi16(from[i], from[i + 4]); \
    }
    INTERLEAVE(x, z)
    INTERLEAVE(z, x)
    INTERLEAVE(x, z)
#undef INTERLEAVE
    for (int c = 0; c < 8; c++) vstore_widened(z[c], y + c * ldy);
}

#endif
