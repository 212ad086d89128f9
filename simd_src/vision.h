/* The float operations of the vision tower: one table per instruction set (vision_<tier>.c = vec_<tier>.h +
 * vision_impl.h).
 *
 * Activations lie in panels of P patches: [panel][feature][P], so that a vector register holds one feature of several
 * patches. Widths of features are thereby free (heads of 72, 4,304 columns), no operation reduces across lanes, and
 * the result of a patch depends neither on its lane nor on the number of threads. Lanes behind the last patch hold
 * finite values that nobody reads.
 */
#ifndef FERMION_VISION_H
#define FERMION_VISION_H

#include <stddef.h>
#include <stdint.h>

#include "threads.h"

#include "model_api.h"
#include "vision_api.h"

#define FM_VISION_CHUNK 1536     /* patches of one step: a multiple of every tier's panel and of its square merges */
#define FM_VISION_GROUP 768      /* patches of one product item */
#define FM_VISION_ROWS 128       /* weight rows of one product item */
#define FM_VISION_DEPTH 192      /* columns at once: a panel's part stays in the first-level cache */
#define FM_VISION_STRIDE (FM_VISION_DEPTH + 16) /* of widened rows; no power of two, so that they spread over sets */
#define FM_VISION_QUERIES 2      /* panels of queries that share one walk over keys and values */

typedef enum { FM_STORE, FM_ADD, FM_GELU_TANH, FM_GELU_ERF } fm_finish_kind;

/* y = finish(W x + bias), rows row0..row1-1 (at most FM_VISION_ROWS) of W, for `panels` panels (at most
 * FM_VISION_GROUP patches). FM_ADD: y += W x + bias. */
typedef struct {
    const fm_linear *linear;
    int row0, row1, panels;
    const float *x; /* [panels][cols][P], x_stride floats from panel to panel */
    size_t x_stride;
    float *y; /* [panels][rows][P], y_stride apart */
    size_t y_stride;
    fm_finish_kind finish;
    float *scratch; /* fm_vision_product_floats */
} fm_vision_product;

/* One head of up to FM_VISION_QUERIES panels of queries against all keys: query <- softmax(key query) value. Rows of
 * one panel are [head_dim][P], panels lie `stride` floats apart. */
typedef struct {
    int head_dim, query_panels, keys;
    float *query; /* scaled and rotated */
    const float *key, *value;
    size_t stride;
    float *scratch; /* fm_vision_attend_floats */
} fm_vision_attend;

typedef struct {
    const char *tier;
    int panel;
    void (*product)(const fm_vision_product *p);
    /* One panel [width][P]. */
    void (*layernorm)(const float *x, const fm_layernorm *norm, int width, float *y);
    /* One head of one panel: rotates rows (j, j + pairs) by the angles whose cosine and sine [pairs][P] are given, and
     * multiplies by scale. */
    void (*rotate)(float *x, const float *cosine, const float *sine, int pairs, float scale);
    void (*attend)(const fm_vision_attend *a);
    /* n halves to floats, any n. */
    void (*widen)(const uint16_t *x, int n, float *y);
    /* Does nothing but multiply-adds in registers, `rounds` times a few; returns how many that were, lanes counted. */
    double (*peak)(long rounds);
} fm_vision_ops;

extern const fm_vision_ops fm_vision_ops_scalar, fm_vision_ops_ssse3, fm_vision_ops_avx2, fm_vision_ops_avx512;

/* The table of `tier`, or NULL if this build or CPU lacks it. */
const fm_vision_ops *fm_vision_ops_for(const char *tier);

/* Floats of scratch, at any tier. */
static inline size_t fm_vision_product_floats(void) {
    return FM_VISION_ROWS * (FM_VISION_STRIDE + FM_VISION_GROUP);
}
static inline size_t fm_vision_attend_floats(int panel, int head_dim) {
    return (size_t)panel * panel + FM_VISION_QUERIES * (size_t)panel * (head_dim + 2);
}

#endif
