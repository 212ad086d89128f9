/* Transposing 8 rows of 16-bit elements, included by vec_<tier>.h after vstore_widened: the rounds for registers of any
 * width, and the whole for tiers that widen halves 8 at a time, which define no TURN of their own. */
#ifndef FERMION_VEC_TURN_H
#define FERMION_VEC_TURN_H

#include <stddef.h>

#define INTERLEAVE(low, high, from, to)      \
    for (int i = 0; i < 4; i++) {            \
        to[2 * i] = low(from[i], from[i + 4]); \
        to[2 * i + 1] = high(from[i], from[i + 4]); \
    }
/* z <- the transposes, lane of 128 bits by lane, of 8 registers x (which are overwritten), by interleaving thrice. */
#define TURN_LANES(low, high, x, z) \
    INTERLEAVE(low, high, x, z)     \
    INTERLEAVE(low, high, z, x)     \
    INTERLEAVE(low, high, x, z)

#ifndef TURN
#define TURN 8
/* 8 x 8 halves, rows ld apart, to floats, transposed, rows ldy apart. */
static inline void vturn_half(const uint16_t *p, size_t ld, float *y, size_t ldy) {
    __m128i x[8], z[8];
    for (int i = 0; i < 8; i++) x[i] = _mm_loadu_si128((const __m128i *)(p + i * ld));
    TURN_LANES(_mm_unpacklo_epi16, _mm_unpackhi_epi16, x, z)
    for (int c = 0; c < 8; c++) vstore_widened(z[c], y + c * ldy);
}
#endif

#endif
