/* The operations of vision.h, written once over the vectors of vec_<tier>.h. Included by vision_<tier>.c, which defines
 * FM_VISION (the name of its table), FM_TIER, and the register tile MR x VECS: MR scalars times VECS vectors. */
#include <math.h>
#include <string.h>

#include "half.h"
#include "vision.h"

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")
#define P (VECS * VW)
#define LINE 16 /* floats */
#define FETCH 4

/* Memory that is wanted soon and lies far away. */
typedef struct {
    const float *at;
    int lines;
} ahead;

/* acc[m] += a[m * a_row] b. */
INLINE void column(const int rows, const float *a, const size_t a_row, const float *b, vf acc[MR][VECS]) {
    vf right[VECS];
    UNROLL for (int n = 0; n < VECS; n++) right[n] = vload(b + n * VW);
    UNROLL for (int m = 0; m < rows; m++) {
        const vf left = vset1(a[m * a_row]);
        UNROLL for (int n = 0; n < VECS; n++) acc[m][n] = vfma(left, right[n], acc[m][n]);
    }
}

/* c[m] (+)= sum_k a[m * a_row + k * a_col] b[k] for `rows` rows of one panel. b and c have rows of P. Each element is
 * one chain of multiply-adds in ascending k, whatever tile it falls into. A line of `next` is fetched every FETCH
 * columns: many at once would take all line buffers, and this tile's own loads would wait for memory. */
INLINE void tile(const int rows, int depth, const float *a, const size_t a_row, const size_t a_col, const float *b,
                 float *c, const int add, ahead *next) {
    vf acc[MR][VECS];
    UNROLL for (int m = 0; m < rows; m++) {
        UNROLL for (int n = 0; n < VECS; n++) acc[m][n] = add ? vload(c + m * P + n * VW) : vset1(0.0f);
    }
    const int lines = depth / FETCH < next->lines ? depth / FETCH : next->lines;
    const float *line = next->at;
    next->at += (size_t)lines * LINE;
    next->lines -= lines;
    int k = 0;
    for (; k < lines * FETCH; k++) {
        __builtin_prefetch(line, 0, 2);
        column(rows, a, a_row, b, acc);
        a += a_col;
        b += P;
        line += LINE / FETCH; /* asking again costs less than counting */
    }
    for (; k < depth; k++) {
        column(rows, a, a_row, b, acc);
        a += a_col;
        b += P;
    }
    UNROLL for (int m = 0; m < rows; m++) {
        UNROLL for (int n = 0; n < VECS; n++) vstore(c + m * P + n * VW, acc[m][n]);
    }
}

/* All rows of a matrix, tile by tile. */
INLINE void tiles(int rows, int depth, const float *a, const size_t a_row, const size_t a_col, const float *b, float *c,
                  const int add, ahead *next) {
    int m = 0;
    for (; m + MR <= rows; m += MR) tile(MR, depth, a + m * a_row, a_row, a_col, b, c + (size_t)m * P, add, next);
    for (; m < rows; m++) tile(1, depth, a + m * a_row, a_row, a_col, b, c + (size_t)m * P, add, next);
}

/* ---- element-wise --------------------------------------------------------------------------------------------- */

/* x (1 + tanh u) / 2 = x sigmoid(2 u), u = sqrt(2/pi) (x + 0.044715 x^3). */
INLINE vf gelu_tanh(vf x) {
    const vf cube = vmul(vmul(x, x), vmul(x, vset1(0.044715f)));
    const vf minus_2u = vmul(vset1(-1.59576912f), vadd(x, cube));
    return vdiv(x, vadd(vset1(1.0f), vexp(minus_2u)));
}

/* x (1 + erf(x / sqrt 2)) / 2; erf by Abramowitz and Stegun 7.1.26, absolute error 1.5e-7. */
INLINE vf gelu_erf(vf x) {
    const vf zero = vset1(0.0f), one = vset1(1.0f), z = vmul(vmax(x, vsub(zero, x)), vset1(0.707106781f));
    const vf t = vdiv(one, vfma(vset1(0.3275911f), z, one));
    vf p = vfma(t, vset1(1.061405429f), vset1(-1.453152027f));
    p = vfma(t, p, vset1(1.421413741f));
    p = vfma(t, p, vset1(-0.284496736f));
    p = vfma(t, p, vset1(0.254829592f));
    const vf tail = vmul(vmul(vset1(0.5f), vmul(t, p)), vexp(vsub(zero, vmul(z, z)))); /* (1 - erf |x| / sqrt 2) / 2 */
    return vsub(vmax(x, zero), vmul(vmax(x, vsub(zero, x)), tail));
}

static void widen(const uint16_t *x, int n, float *y) {
    int i = 0;
    for (; i + HALF_LANES <= n; i += HALF_LANES) vwiden_half(x + i, y + i);
    for (; i < n; i++) y[i] = fm_half_to_float(x[i]);
}

static void layernorm(const float *x, const fm_layernorm *norm, int width, float *y) {
    vf mean[VECS], inverse[VECS];
    UNROLL for (int n = 0; n < VECS; n++) mean[n] = inverse[n] = vset1(0.0f);
    for (int i = 0; i < width; i++) {
        UNROLL for (int n = 0; n < VECS; n++) mean[n] = vadd(mean[n], vload(x + (size_t)i * P + n * VW));
    }
    const vf count = vset1((float)width);
    UNROLL for (int n = 0; n < VECS; n++) mean[n] = vdiv(mean[n], count);
    for (int i = 0; i < width; i++) {
        UNROLL for (int n = 0; n < VECS; n++) {
            const vf off = vsub(vload(x + (size_t)i * P + n * VW), mean[n]);
            inverse[n] = vfma(off, off, inverse[n]);
        }
    }
    float variance[P];
    UNROLL for (int n = 0; n < VECS; n++) vstore(variance + n * VW, vdiv(inverse[n], count));
    for (int i = 0; i < P; i++) variance[i] = 1.0f / sqrtf(variance[i] + 1e-6f);
    UNROLL for (int n = 0; n < VECS; n++) inverse[n] = vload(variance + n * VW);
    for (int i = 0; i < width; i++) {
        const vf weight = vset1(norm->weight[i]), bias = vset1(norm->bias[i]);
        UNROLL for (int n = 0; n < VECS; n++) {
            const vf off = vmul(vsub(vload(x + (size_t)i * P + n * VW), mean[n]), inverse[n]);
            vstore(y + (size_t)i * P + n * VW, vfma(off, weight, bias));
        }
    }
}

static void rotate(float *x, const float *cosine, const float *sine, int pairs, float scale) {
    const vf factor = vset1(scale);
    for (int i = 0; i < pairs * P; i += VW) {
        const vf first = vmul(factor, vload(x + i)), second = vmul(factor, vload(x + pairs * P + i));
        const vf c = vload(cosine + i), s = vload(sine + i);
        vstore(x + i, vsub(vmul(first, c), vmul(second, s)));
        vstore(x + pairs * P + i, vfma(second, c, vmul(first, s)));
    }
}

/* ---- products ------------------------------------------------------------------------------------------------- */

static void widen_rows(const fm_matrix *w, int row0, int row1, int col, int depth, float *out) {
    for (int row = row0; row < row1; row++, out += FM_VISION_STRIDE) {
        const size_t at = (size_t)row * w->cols + col;
        if (w->dtype == FM_F16)
            widen((const uint16_t *)w->data + at, depth, out);
        else
            memcpy(out, (const float *)w->data + at, (size_t)depth * sizeof(float));
    }
}

INLINE void finish_rows(const float *sum, const float *bias, int rows, float *y, const fm_finish_kind kind) {
    for (int r = 0; r < rows; r++) {
        const vf shift = vset1(bias[r]);
        UNROLL for (int n = 0; n < VECS; n++) {
            const size_t at = (size_t)r * P + n * VW;
            vf value = vadd(vload(sum + at), shift);
            if (kind == FM_GELU_TANH) value = gelu_tanh(value);
            if (kind == FM_GELU_ERF) value = gelu_erf(value);
            if (kind == FM_ADD) value = vadd(vload(y + at), value);
            vstore(y + at, value);
        }
    }
}

static void product(const fm_vision_product *p) {
    const fm_matrix *w = &p->linear->weight;
    const int rows = p->row1 - p->row0;
    float *wide = p->scratch, *sums = wide + FM_VISION_ROWS * FM_VISION_STRIDE;
    for (int col = 0; col < w->cols; col += FM_VISION_DEPTH) {
        const int depth = w->cols - col < FM_VISION_DEPTH ? w->cols - col : FM_VISION_DEPTH;
        widen_rows(w, p->row0, p->row1, col, depth, wide);
        for (int i = 0; i < p->panels; i++) {
            const float *x = p->x + i * p->x_stride + (size_t)col * P;
            float *sum = sums + (size_t)i * rows * P;
            /* The next panel comes from far away while this one is multiplied. */
            ahead next = {i + 1 < p->panels ? x + p->x_stride : p->x + (size_t)(col + depth) * P, 0};
            if (i + 1 < p->panels || col + depth < w->cols) next.lines = depth * P / LINE;
            if (col == 0)
                tiles(rows, depth, wide, FM_VISION_STRIDE, 1, x, sum, 0, &next);
            else
                tiles(rows, depth, wide, FM_VISION_STRIDE, 1, x, sum, 1, &next);
        }
    }
    const float *bias = p->linear->bias + p->row0;
    for (int i = 0; i < p->panels; i++) {
        const float *sum = sums + (size_t)i * rows * P;
        float *y = p->y + i * p->y_stride + (size_t)p->row0 * P;
        switch (p->finish) {
        case FM_STORE: finish_rows(sum, bias, rows, y, FM_STORE); break;
        case FM_ADD: finish_rows(sum, bias, rows, y, FM_ADD); break;
        case FM_GELU_TANH: finish_rows(sum, bias, rows, y, FM_GELU_TANH); break;
        case FM_GELU_ERF: finish_rows(sum, bias, rows, y, FM_GELU_ERF); break;
        }
    }
}

/* ---- attention ------------------------------------------------------------------------------------------------ */

/* Scores [keys][P] of one panel of keys become probabilities relative to each query's new maximum; acc [head_dim][P]
 * fades with the old one. Where no maximum rose the factor would be exactly 1. */
INLINE void soften(float *score, int keys, float *maximum, float *sum, float *acc, int head_dim) {
    float rise = 0.0f;
    vf top[VECS], fade[VECS], total[VECS];
    UNROLL for (int n = 0; n < VECS; n++) top[n] = vload(maximum + n * VW);
    for (int k = 0; k < keys; k++) {
        UNROLL for (int n = 0; n < VECS; n++) top[n] = vmax(top[n], vload(score + k * P + n * VW));
    }
    UNROLL for (int n = 0; n < VECS; n++) {
        const vf difference = vsub(vload(maximum + n * VW), top[n]);
        const float most = vhmax(vsub(vset1(0.0f), difference));
        rise = most > rise ? most : rise;
        fade[n] = vexp(difference);
        total[n] = vset1(0.0f);
        vstore(maximum + n * VW, top[n]);
    }
    for (int k = 0; k < keys; k++) {
        UNROLL for (int n = 0; n < VECS; n++) {
            const vf probability = vexp(vsub(vload(score + k * P + n * VW), top[n]));
            vstore(score + k * P + n * VW, probability);
            total[n] = vadd(total[n], probability);
        }
    }
    UNROLL for (int n = 0; n < VECS; n++)
        vstore(sum + n * VW, vfma(fade[n], vload(sum + n * VW), total[n]));
    if (rise == 0.0f) return;
    for (int d = 0; d < head_dim; d++) {
        UNROLL for (int n = 0; n < VECS; n++)
            vstore(acc + d * P + n * VW, vmul(fade[n], vload(acc + d * P + n * VW)));
    }
}

static void attend(const fm_vision_attend *a) {
    const int width = a->head_dim;
    const size_t query_floats = (size_t)(width + 2) * P;
    float *score = a->scratch, *running = score + P * P;
    for (int q = 0; q < a->query_panels; q++) {
        float *acc = running + q * query_floats, *maximum = acc + (size_t)width * P;
        memset(acc, 0, query_floats * sizeof(float));
        for (int i = 0; i < P; i++) maximum[i] = -INFINITY;
    }
    for (int first = 0, panel = 0; first < a->keys; first += P, panel++) {
        const int keys = a->keys - first < P ? a->keys - first : P;
        const float *key = a->key + panel * a->stride, *value = a->value + panel * a->stride;
        const int lines = first + P < a->keys ? width * P / LINE : 0;
        ahead next_key = {key + a->stride, lines}, next_value = {value + a->stride, lines};
        for (int q = 0; q < a->query_panels; q++) {
            float *acc = running + q * query_floats, *maximum = acc + (size_t)width * P;
            tiles(keys, width, key, 1, P, a->query + q * a->stride, score, 0, &next_key);
            soften(score, keys, maximum, maximum + P, acc, width);
            tiles(width, keys, value, P, 1, score, acc, 1, &next_value);
        }
    }
    for (int q = 0; q < a->query_panels; q++) {
        const float *acc = running + q * query_floats, *sum = acc + (size_t)(width + 1) * P;
        vf inverse[VECS];
        UNROLL for (int n = 0; n < VECS; n++) inverse[n] = vdiv(vset1(1.0f), vload(sum + n * VW));
        for (int d = 0; d < width; d++) {
            UNROLL for (int n = 0; n < VECS; n++)
                vstore(a->query + q * a->stride + d * P + n * VW, vmul(inverse[n], vload(acc + d * P + n * VW)));
        }
    }
}

/* ---- the yardstick -------------------------------------------------------------------------------------------- */

#define PEAK_CHAINS 12 /* more than latency times throughput of a multiply-add, fewer than there are registers */

static double peak(long rounds) {
    vf acc[PEAK_CHAINS];
    vf x = vset1(0.5f), y = vset1(0.5f);
    __asm__ volatile("" : "+x"(x), "+x"(y)); /* or the loop would be computed at compile time */
    UNROLL for (int i = 0; i < PEAK_CHAINS; i++) acc[i] = vset1((float)i);
    for (long round = 0; round < rounds; round++) {
        UNROLL for (int i = 0; i < PEAK_CHAINS; i++) acc[i] = vfma(acc[i], x, y);
    }
    float sink[PEAK_CHAINS * VW];
    UNROLL for (int i = 0; i < PEAK_CHAINS; i++) vstore(sink + i * VW, acc[i]);
    __asm__ volatile("" : : "r"(sink) : "memory");
    return (double)rounds * PEAK_CHAINS * VW;
}

const fm_vision_ops FM_VISION = {
    .tier = FM_TIER,
    .panel = P,
    .product = product,
    .layernorm = layernorm,
    .rotate = rotate,
    .attend = attend,
    .widen = widen,
    .peak = peak,
};
