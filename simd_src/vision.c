/* The vision tower: patches of a picture through its blocks, and merged into the rows that replace placeholders
 * (design: Qwen3-VL's tower without deepstack).
 *
 *   x = patches W + b + position table, bilinearly sampled with corners aligned
 *   x += proj(attention(layernorm x)), bidirectional, two-dimensional rotary positions; x += fc2(gelu_tanh(fc1(
 *   layernorm x))), for each block; rows = fc2(gelu_erf(fc1(four patches of layernorm x side by side)))
 *
 * A layer is taken in steps of FM_VISION_CHUNK patches, so that what lies between two products stays small and the
 * caller hears of long pictures. Per patch only the residual stream and qkv are kept.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "model.h"
#include "vision.h"

enum { PAGE = 4096, HUGE_PAGE = 2 << 20 };

struct fm_vision {
    fm_vision_spec spec;
    const fm_vision_ops *ops;
    fm_pool *pool;
    float *worker_scratch; /* [threads][worker_floats] */
    size_t worker_floats;

    const uint8_t *pixels;
    int rows, cols, patches; /* of the picture, in patches */
    float *arena;
    float *hidden;  /* [panels][hidden][P] */
    float *qkv;     /* [panels][3 hidden][P]; attention leaves its result in the queries' place */
    float *cosine, *sine; /* [panels][head_dim / 2][P] */
    float *normed;  /* [chunk panels][hidden][P] */
    float *inner;   /* [chunk panels][what is widest between two products][P] */
    float *angles;  /* [2][longest side][head_dim / 4]: cosine, sine of coordinate * frequency */
};

/* One step's share of the picture. */
typedef struct {
    fm_vision *v;
    const fm_vision_block *block;
    int first, panels;   /* in panels */
    int begin, end;      /* in patches */
    float *out;          /* rows of the whole picture, in the last steps */
} chunk;

static size_t rounded(size_t floats) { return (floats + 15) / 16 * 16; }

static int patch_values(const fm_vision_spec *s) { return s->channels * s->frames * s->patch * s->patch; }

static int merged(const fm_vision_spec *s) { return s->merge * s->merge; }

static int head_dim(const fm_vision_spec *s) { return s->hidden / s->heads; }

/* Floats per patch of a chunk that `inner` must have room for. */
static size_t inner_floats(const fm_vision_spec *s) {
    const size_t merger = 2 * (size_t)s->hidden + (size_t)fm_blocks(s->out, merged(s));
    size_t most = (size_t)s->inner;
    if (most < (size_t)patch_values(s)) most = (size_t)patch_values(s);
    return most < merger ? merger : most;
}

static int chunk_patches(const fm_vision *v, int patches) {
    const int whole = fm_blocks(patches, v->ops->panel) * v->ops->panel;
    return fm_least(whole, FM_VISION_CHUNK);
}

/* Where everything lies for a picture; only measures if base is NULL. */
static size_t lay_out(fm_vision *v, int patches, int side, float *base) {
    const fm_vision_spec *s = &v->spec;
    const size_t lanes = (size_t)fm_blocks(patches, v->ops->panel) * v->ops->panel;
    /* A chunk's merged tokens fill panels of their own, the last one perhaps not: hence a whole panel more. */
    const size_t share = (size_t)chunk_patches(v, patches) + (size_t)merged(s) * v->ops->panel;
    const size_t half = (size_t)head_dim(s) / 2;
    const struct {
        float **place;
        size_t floats;
    } parts[] = {
        {&v->hidden, lanes * s->hidden}, {&v->qkv, lanes * 3 * s->hidden},  {&v->cosine, lanes * half},
        {&v->sine, lanes * half},        {&v->normed, share * s->hidden},   {&v->inner, share * inner_floats(s)},
        {&v->angles, (size_t)side * half},
    };
    size_t used = 0;
    for (size_t i = 0; i < sizeof(parts) / sizeof(*parts); i++) {
        if (base) *parts[i].place = base + used;
        used += rounded(parts[i].floats);
    }
    return used;
}

const fm_vision_ops *fm_vision_ops_for(const char *tier) {
    static const fm_vision_ops *const tables[] = {&fm_vision_ops_scalar, &fm_vision_ops_ssse3, &fm_vision_ops_avx2,
                                                  &fm_vision_ops_avx512};
    if (!fm_tier_supported(tier)) return NULL;
    for (size_t i = 0; i < sizeof(tables) / sizeof(*tables); i++)
        if (strcmp(tables[i]->tier, tier) == 0) return tables[i];
    return NULL;
}

/* Bytes of so many floats, in whole pages of the kind they are given. */
static size_t whole_pages(size_t count) {
    const size_t bytes = count * sizeof(float), page = bytes < HUGE_PAGE ? PAGE : HUGE_PAGE;
    return (bytes + page - 1) / page * page;
}

static float *aligned_floats(size_t count) {
    const size_t bytes = whole_pages(count), page = bytes < HUGE_PAGE ? PAGE : HUGE_PAGE;
    float *floats = aligned_alloc(page, bytes);
    /* A head's panels of keys lie hundreds of KB apart, each on small pages of its own. Only advice. */
    if (floats && page == HUGE_PAGE) madvise(floats, bytes, MADV_HUGEPAGE);
    return floats;
}

fm_vision *fm_vision_create(const fm_vision_spec *spec, const char *tier, fm_pool *pool) {
    fm_vision *v = calloc(1, sizeof(*v));
    if (!v) return NULL;
    v->spec = *spec;
    v->ops = fm_vision_ops_for(tier);
    v->pool = pool;
    if (!v->ops) goto fail;
    const size_t attend = fm_vision_attend_floats(v->ops->panel, head_dim(spec)), product = fm_vision_product_floats();
    v->worker_floats = rounded(attend > product ? attend : product) + rounded((size_t)spec->hidden);
    v->worker_scratch = aligned_floats(v->worker_floats * (size_t)fm_pool_threads(pool));
    if (!v->worker_scratch) goto fail;
    return v;
fail:
    fm_vision_destroy(v);
    return NULL;
}

void fm_vision_destroy(fm_vision *v) {
    if (!v) return;
    fm_vision_end(v);
    free(v->worker_scratch);
    free(v);
}

void fm_vision_end(fm_vision *v) {
    free(v->arena);
    v->arena = NULL;
    v->pixels = NULL;
}

static float *scratch(const fm_vision *v, int worker) { return v->worker_scratch + (size_t)worker * v->worker_floats; }

size_t fm_vision_bytes(const fm_vision_spec *spec, const char *tier, int height, int width) {
    fm_vision v = {.spec = *spec, .ops = fm_vision_ops_for(tier)};
    const int rows = height / spec->patch, cols = width / spec->patch;
    return v.ops ? whole_pages(lay_out(&v, rows * cols, rows > cols ? rows : cols, NULL)) : 0;
}

/* Steps of a picture: embedding, two in each block, merger; each for every chunk. */
static int chunks(const fm_vision *v) { return fm_blocks(v->patches, FM_VISION_CHUNK); }

int fm_vision_begin(fm_vision *v, const uint8_t *pixels, int height, int width) {
    const fm_vision_spec *s = &v->spec;
    fm_vision_end(v);
    v->rows = height / s->patch;
    v->cols = width / s->patch;
    v->patches = v->rows * v->cols;
    const int side = v->rows > v->cols ? v->rows : v->cols, quarter = head_dim(s) / 4;
    v->arena = aligned_floats(lay_out(v, v->patches, side, NULL));
    if (!v->arena) return -1;
    lay_out(v, v->patches, side, v->arena);
    v->pixels = pixels;
    for (int i = 0; i < side; i++) {
        for (int j = 0; j < quarter; j++) {
            const float angle = (float)i * s->frequency[j];
            v->angles[(size_t)i * quarter + j] = (float)cos(angle);
            v->angles[(size_t)(side + i) * quarter + j] = (float)sin(angle);
        }
    }
    return chunks(v) * (2 + 2 * s->depth);
}

/* Row and column of a patch: patches are numbered token by token. */
static void locate(const fm_vision *v, int patch, int *row, int *col) {
    const int merge = v->spec.merge, token = patch / merged(&v->spec), inside = patch % merged(&v->spec);
    const int tokens_across = v->cols / merge;
    *row = token / tokens_across * merge + inside / merge;
    *col = token % tokens_across * merge + inside % merge;
}

/* ---- products, one item per block of rows and group of panels --------------------------------------------------- */

typedef struct {
    const fm_vision *v;
    fm_vision_product product; /* of all rows and panels */
    int panels, group_panels, row_blocks;
} product_job;

static void product_item(void *arg, int item, int worker) {
    const product_job *job = arg;
    fm_vision_product p = job->product;
    const int first = item / job->row_blocks * job->group_panels, block = item % job->row_blocks;
    p.row0 = block * FM_VISION_ROWS;
    p.row1 = fm_least(p.row0 + FM_VISION_ROWS, p.linear->weight.rows);
    p.panels = fm_least(job->group_panels, job->panels - first);
    p.x += (size_t)first * p.x_stride;
    p.y += (size_t)first * p.y_stride;
    p.scratch = scratch(job->v, worker);
    job->v->ops->product(&p);
}

/* y = finish(W x + b) for `panels` panels. */
static void multiply(const fm_vision *v, const fm_linear *linear, int panels, const float *x, size_t x_stride, float *y,
                     size_t y_stride, fm_finish_kind finish) {
    product_job job = {.v = v, .panels = panels};
    job.product = (fm_vision_product){.linear = linear, .x = x, .x_stride = x_stride, .y = y, .y_stride = y_stride,
                                      .finish = finish};
    job.row_blocks = fm_blocks(linear->weight.rows, FM_VISION_ROWS);
    /* Few rows are made up for by smaller groups, so that every thread has something to do. */
    const int wanted = fm_blocks(4 * fm_pool_threads(v->pool), job.row_blocks);
    job.group_panels = fm_least(fm_blocks(panels, wanted), FM_VISION_GROUP / v->ops->panel);
    fm_parallel_for(v->pool, fm_blocks(panels, job.group_panels) * job.row_blocks, product_item, &job);
}

/* ---- embedding ------------------------------------------------------------------------------------------------ */

/* Lane `lane` of a panel of pixels: [channel][frame][patch row][patch column]. */
static void patch_lane(const fm_vision *v, int patch, float *panel, int lane) {
    const fm_vision_spec *s = &v->spec;
    const int lanes = v->ops->panel;
    int row, col;
    locate(v, patch, &row, &col);
    const size_t line = (size_t)v->cols * s->patch * s->channels;
    const uint8_t *corner = v->pixels + (size_t)row * s->patch * line + (size_t)col * s->patch * s->channels;
    float *out = panel + lane;
    for (int channel = 0; channel < s->channels; channel++) {
        const float *value = s->byte_value + 256 * channel;
        for (int frame = 0; frame < s->frames; frame++)
            for (int y = 0; y < s->patch; y++)
                for (int x = 0; x < s->patch; x++, out += lanes)
                    *out = value[corner[(size_t)y * line + (size_t)x * s->channels + channel]];
    }
}

/* The two neighbours of a coordinate in the table's grid and the weight of the second. */
static float neighbours(int index, int count, int side, int tap[2]) {
    const float source = (float)index * (float)(side - 1) / (float)(count > 1 ? count - 1 : 1);
    tap[0] = fm_least((int)source, side - 1);
    tap[1] = fm_least(tap[0] + 1, side - 1);
    return source - (float)(int)source;
}

static void table_row(const fm_vision *v, int row, float *out) {
    const fm_matrix *table = &v->spec.table;
    const size_t at = (size_t)row * table->cols;
    if (table->dtype == FM_F16)
        v->ops->widen((const uint16_t *)table->data + at, table->cols, out);
    else
        memcpy(out, (const float *)table->data + at, (size_t)table->cols * sizeof(float));
}

/* Adds the position embedding of one patch to its lane; `row` has room for a row of the table. */
static void position_lane(const fm_vision *v, int patch, float *panel, int lane, float *row) {
    const fm_vision_spec *s = &v->spec;
    int r, c, tap_r[2], tap_c[2];
    locate(v, patch, &r, &c);
    const float down = neighbours(r, v->rows, s->table_side, tap_r);
    const float right = neighbours(c, v->cols, s->table_side, tap_c);
    for (int corner = 0; corner < 4; corner++) {
        const int lower = corner / 2, further = corner % 2;
        const float weight = (lower ? down : 1.0f - down) * (further ? right : 1.0f - right);
        if (weight == 0.0f) continue;
        table_row(v, tap_r[lower] * s->table_side + tap_c[further], row);
        for (int i = 0; i < s->hidden; i++) panel[(size_t)i * v->ops->panel + lane] += weight * row[i];
    }
}

/* Rotation angles of one patch: rows turn the first half of the pairs, columns the others. */
static void angle_lane(const fm_vision *v, int patch, int panel, int lane) {
    const int quarter = head_dim(&v->spec) / 4, lanes = v->ops->panel;
    const int side = v->rows > v->cols ? v->rows : v->cols;
    int at[2];
    locate(v, patch, &at[0], &at[1]);
    float *cosine = v->cosine + (size_t)panel * 2 * quarter * lanes + lane;
    float *sine = v->sine + (size_t)panel * 2 * quarter * lanes + lane;
    for (int j = 0; j < 2 * quarter; j++) {
        const int coordinate = at[j / quarter];
        cosine[(size_t)j * lanes] = v->angles[(size_t)coordinate * quarter + j % quarter];
        sine[(size_t)j * lanes] = v->angles[(size_t)(side + coordinate) * quarter + j % quarter];
    }
}

static void fill_panel(void *arg, int item, int worker) {
    (void)worker;
    const chunk *c = arg;
    const fm_vision *v = c->v;
    const int lanes = v->ops->panel, panel = c->first + item;
    float *pixels = v->inner + (size_t)item * patch_values(&v->spec) * lanes;
    for (int lane = 0; lane < lanes; lane++) {
        /* Lanes behind the last patch repeat it: their values must be finite. */
        const int patch = fm_least(panel * lanes + lane, v->patches - 1);
        patch_lane(v, patch, pixels, lane);
        angle_lane(v, patch, panel, lane);
    }
}

static void position_panel(void *arg, int item, int worker) {
    const chunk *c = arg;
    const fm_vision *v = c->v;
    const int lanes = v->ops->panel, panel = c->first + item;
    for (int lane = 0; lane < lanes && panel * lanes + lane < v->patches; lane++)
        position_lane(v, panel * lanes + lane, v->hidden + (size_t)panel * v->spec.hidden * lanes, lane,
                      scratch(v, worker));
}

static void embed(chunk *c) {
    fm_vision *v = c->v;
    const size_t lanes = (size_t)v->ops->panel, hidden = (size_t)v->spec.hidden * lanes;
    fm_parallel_for(v->pool, c->panels, fill_panel, c);
    multiply(v, &v->spec.patch_embed, c->panels, v->inner, (size_t)patch_values(&v->spec) * lanes,
             v->hidden + (size_t)c->first * hidden, hidden, FM_STORE);
    fm_parallel_for(v->pool, c->panels, position_panel, c);
}

/* ---- blocks --------------------------------------------------------------------------------------------------- */

typedef struct {
    const chunk *c;
    const fm_layernorm *norm;
} norm_job;

static void norm_panel(void *arg, int item, int worker) {
    (void)worker;
    const norm_job *job = arg;
    const fm_vision *v = job->c->v;
    const size_t width = (size_t)v->spec.hidden * v->ops->panel;
    v->ops->layernorm(v->hidden + (size_t)(job->c->first + item) * width, job->norm, v->spec.hidden,
                      v->normed + (size_t)item * width);
}

/* normed <- layernorm(hidden) of the chunk. */
static void normalise(const chunk *c, const fm_layernorm *norm) {
    norm_job job = {c, norm};
    fm_parallel_for(c->v->pool, c->panels, norm_panel, &job);
}

static void rotate_panel(void *arg, int item, int worker) {
    (void)worker;
    const chunk *c = arg;
    const fm_vision *v = c->v;
    const int dim = head_dim(&v->spec), pairs = dim / 2, heads = v->spec.heads;
    const size_t lanes = (size_t)v->ops->panel, panel = (size_t)(c->first + item);
    const float *cosine = v->cosine + panel * pairs * lanes, *sine = v->sine + panel * pairs * lanes;
    float *x = v->qkv + panel * 3 * v->spec.hidden * lanes;
    const float scale = 1.0f / sqrtf((float)dim);
    for (int head = 0; head < 2 * heads; head++, x += (size_t)dim * lanes)
        v->ops->rotate(x, cosine, sine, pairs, head < heads ? scale : 1.0f);
}

static void project(chunk *c) {
    fm_vision *v = c->v;
    const size_t lanes = (size_t)v->ops->panel, hidden = (size_t)v->spec.hidden * lanes;
    normalise(c, &c->block->norm1);
    multiply(v, &c->block->qkv, c->panels, v->normed, hidden, v->qkv + (size_t)c->first * 3 * hidden, 3 * hidden,
             FM_STORE);
    fm_parallel_for(v->pool, c->panels, rotate_panel, c);
}

static void attend_item(void *arg, int item, int worker) {
    const chunk *c = arg;
    const fm_vision *v = c->v;
    const int groups = fm_blocks(c->panels, FM_VISION_QUERIES), head = item / groups;
    const int first = item % groups * FM_VISION_QUERIES;
    const size_t width = (size_t)v->spec.hidden * v->ops->panel;
    const size_t offset = (size_t)head * head_dim(&v->spec) * v->ops->panel;
    const fm_vision_attend a = {
        .head_dim = head_dim(&v->spec),
        .query_panels = fm_least(FM_VISION_QUERIES, c->panels - first),
        .keys = v->patches,
        .query = v->qkv + (size_t)(c->first + first) * 3 * width + offset,
        .key = v->qkv + width + offset,
        .value = v->qkv + 2 * width + offset,
        .stride = 3 * width,
        .scratch = scratch(v, worker),
    };
    v->ops->attend(&a);
}

static void mix(chunk *c) {
    fm_vision *v = c->v;
    const fm_vision_spec *s = &v->spec;
    const size_t lanes = (size_t)v->ops->panel, hidden = (size_t)s->hidden * lanes, inner = (size_t)s->inner * lanes;
    float *stream = v->hidden + (size_t)c->first * hidden;
    fm_parallel_for(v->pool, fm_blocks(c->panels, FM_VISION_QUERIES) * s->heads, attend_item, c);
    multiply(v, &c->block->proj, c->panels, v->qkv + (size_t)c->first * 3 * hidden, 3 * hidden, stream, hidden, FM_ADD);
    normalise(c, &c->block->norm2);
    multiply(v, &c->block->fc1, c->panels, v->normed, hidden, v->inner, inner, FM_GELU_TANH);
    multiply(v, &c->block->fc2, c->panels, v->inner, inner, stream, hidden, FM_ADD);
}

/* ---- merger --------------------------------------------------------------------------------------------------- */

/* A panel of tokens from panels of patches: the features of a token's patches one after another. */
static void gather_tokens(void *arg, int item, int worker) {
    (void)worker;
    const chunk *c = arg;
    const fm_vision *v = c->v;
    const int lanes = v->ops->panel, hidden = v->spec.hidden, group = merged(&v->spec);
    const int tokens = (c->end - c->begin) / group;
    float *out = v->inner + (size_t)item * group * hidden * lanes;
    for (int lane = 0; lane < lanes; lane++) {
        const int token = fm_least(item * lanes + lane, tokens - 1);
        for (int part = 0; part < group; part++) {
            const int patch = token * group + part;
            const float *from = v->normed + (size_t)(patch / lanes) * hidden * lanes + patch % lanes;
            float *to = out + (size_t)part * hidden * lanes + lane;
            for (int i = 0; i < hidden; i++) to[(size_t)i * lanes] = from[(size_t)i * lanes];
        }
    }
}

static void merge(chunk *c) {
    fm_vision *v = c->v;
    const fm_vision_spec *s = &v->spec;
    const int lanes = v->ops->panel, group = merged(s), tokens = (c->end - c->begin) / group;
    const int panels = fm_blocks(tokens, lanes);
    const size_t wide = (size_t)group * s->hidden * lanes, narrow = (size_t)s->out * lanes;
    float *gathered = v->inner, *inner = gathered + (size_t)panels * wide, *rows = inner + (size_t)panels * wide;
    normalise(c, &s->merger_norm);
    fm_parallel_for(v->pool, panels, gather_tokens, c);
    multiply(v, &s->merger_fc1, panels, gathered, wide, inner, wide, FM_GELU_ERF);
    multiply(v, &s->merger_fc2, panels, inner, wide, rows, narrow, FM_STORE);
    float *out = c->out + (size_t)(c->begin / group) * s->out;
    for (int token = 0; token < tokens; token++) {
        const float *lane = rows + (size_t)(token / lanes) * narrow + token % lanes;
        for (int i = 0; i < s->out; i++) out[(size_t)token * s->out + i] = lane[(size_t)i * lanes];
    }
}

void fm_vision_step(fm_vision *v, int step, float *rows) {
    const int count = chunks(v), stage = step / count, lanes = v->ops->panel;
    chunk c = {.v = v, .begin = step % count * FM_VISION_CHUNK, .out = rows};
    c.end = fm_least(c.begin + FM_VISION_CHUNK, v->patches);
    c.first = c.begin / lanes;
    c.panels = fm_blocks(c.end - c.begin, lanes);
    if (stage == 0) {
        embed(&c);
    } else if (stage > 2 * v->spec.depth) {
        merge(&c);
    } else {
        c.block = v->spec.block + (stage - 1) / 2;
        if (stage % 2) project(&c);
        else mix(&c);
    }
}
