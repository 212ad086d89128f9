/* The vision tower as C sees it: a picture in, one row for each of its tokens out. Prototypes only, read by the compiler
 * and by the Python binding. Python owns the weights; the tower owns its scratch memory.
 *
 * A patch is patch x patch pixels; merge x merge patches side by side make one token, and patches are numbered token by
 * token. One tower takes one picture at a time. Matrices are FM_F32 or FM_F16, in place; arithmetic is float32.
 */
#ifndef FERMION_VISION_API_H
#define FERMION_VISION_API_H


enum { FM_F16 = 2 }; /* fm_matrix.dtype, of the tower only: row-major IEEE half, finite */

/* y = W x + bias. */
typedef struct {
    fm_matrix weight;
    const float *bias; /* [rows] */
} fm_linear;

/* y = (x - mean x) (var x + 1e-6)^-1/2 weight + bias. */
typedef struct {
    const float *weight, *bias;
} fm_layernorm;

typedef struct {
    fm_layernorm norm1, norm2;
    fm_linear qkv, proj, fc1, fc2; /* qkv rows: queries of all heads, then keys, then values */
} fm_vision_block;

typedef struct {
    int depth, hidden, inner, heads, out;
    int channels, frames, patch, merge; /* frames: the picture is repeated so often */
    int table_side;
    const float *byte_value;  /* [channels][256]: what a byte of a channel becomes */
    const float *frequency;   /* [hidden / heads / 4] */
    fm_linear patch_embed;    /* columns [channels][frames][patch][patch] */
    fm_matrix table;          /* [table_side^2][hidden]: position embeddings of a square grid */
    const fm_vision_block *block; /* [depth] */
    fm_layernorm merger_norm;
    fm_linear merger_fc1, merger_fc2; /* columns of fc1: the patches of a token one after another */
} fm_vision_spec;

typedef struct fm_vision fm_vision;

/* spec, what it points to, and the pool must outlive the tower. NULL if memory is short or this build or CPU lacks the
 * tier. */
fm_vision *fm_vision_create(const fm_vision_spec *spec, const char *tier, fm_pool *pool);
void fm_vision_destroy(fm_vision *vision);

/* Takes a picture: uint8 [height][width][channels], both sides multiples of patch * merge; it must stay until the last
 * step. Returns the number of steps, or -1 if memory is short. */
int fm_vision_begin(fm_vision *vision, const uint8_t *pixels, int height, int width);
/* Step 0, 1, ... of the picture; the last ones write rows [tokens][out]. A step takes at most about as long as 1,536
 * patches against all others of the picture in one layer. */
void fm_vision_step(fm_vision *vision, int step, float *rows);
/* Drops the picture, finished or not, and the memory it took. */
void fm_vision_end(fm_vision *vision);
/* Bytes that a picture of this size takes while it is in work, weights and rows not counted. */
size_t fm_vision_bytes(const fm_vision_spec *spec, const char *tier, int height, int width);

#endif
