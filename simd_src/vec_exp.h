/* exp for the vector tiers, included by vec_<tier>.h after its primitives.
 *
 * x = n ln 2 + r with n whole and |r| <= ln2/2; ln 2 in two parts so that n ln 2 is exact where it matters; e^r by
 * its Taylor series to r^7 (remainder below 2^-27). Error under 2 ulp; 0 below -87.3 (also for -inf), saturating
 * at e^88 so that nothing overflows.
 */
#ifndef FERMION_VEC_EXP_H
#define FERMION_VEC_EXP_H

static inline vf vexp(vf x) {
    const vf lowest = vset1(-87.3f);
    vf clamped = vmin(vmax(x, lowest), vset1(88.0f));
    vf n = vround(vmul(clamped, vset1(1.44269504f)));
    vf r = vfma(n, vset1(-0.693359375f), clamped);
    r = vfma(n, vset1(2.12194440e-4f), r);
    vf p = vset1(1.98412698e-4f);
    p = vfma(p, r, vset1(1.38888889e-3f));
    p = vfma(p, r, vset1(8.33333333e-3f));
    p = vfma(p, r, vset1(4.16666667e-2f));
    p = vfma(p, r, vset1(1.66666667e-1f));
    p = vfma(p, r, vset1(0.5f));
    p = vfma(vmul(r, r), p, vadd(r, vset1(1.0f)));
    return vzero_below(vexp_scale(p, n), x, lowest);
}

#endif
