/* Sparse mixture of experts with one shared expert: routing in float32, then gate+up of all chosen experts and the
 * shared one as one job, then down, weighted and added to the residual stream, as another.
 *
 * Tokens are grouped by expert, also when there is just one. Per token, experts are added in ascending order and the
 * shared expert last: no bit depends on which other tokens share the pass.
 */
#include <math.h>
#include <string.h>

#include "model.h"

typedef struct {
    fm_engine *engine;
    const fm_layer *layer;
    int cols;        /* of the intermediate that an item makes */
    int inner_items; /* per expert */
    int shared_items;
    int rows;        /* of down that an item multiplies by */
} moe_job;

/* The k largest router logits of a token (the lowest index among equals) and the softmax over them, which equals the
 * renormalised softmax over all. Leaves the experts in ascending order. */
static void choose(void *arg, int token, int worker) {
    (void)worker;
    fm_engine *e = ((const moe_job *)arg)->engine;
    const int experts = e->spec.experts, k = e->spec.experts_per_token;
    const float *logit = e->router + (size_t)token * (experts + 1);
    int32_t *chosen = e->chosen + (size_t)token * k;
    float *weight = e->chosen_weight + (size_t)token * k;
    int count = 0;
    for (int expert = 0; expert < experts; expert++) { /* insertion into the best so far, descending */
        if (count == k && !(logit[expert] > logit[chosen[k - 1]])) continue;
        int at = count < k ? count++ : k - 1;
        for (; at > 0 && logit[expert] > logit[chosen[at - 1]]; at--) chosen[at] = chosen[at - 1];
        chosen[at] = expert;
    }
    const float top = logit[chosen[0]];
    for (int i = 1; i < k; i++) { /* ascending experts */
        const int32_t expert = chosen[i];
        int at = i;
        for (; at > 0 && chosen[at - 1] > expert; at--) chosen[at] = chosen[at - 1];
        chosen[at] = expert;
    }
    float sum = 0.0f;
    for (int i = 0; i < k; i++) sum += weight[i] = expf(logit[chosen[i]] - top);
    for (int i = 0; i < k; i++) weight[i] /= sum;
}

/* Fills group, slot_token and slot_weight: a counting sort of the choices by expert. */
static void group_tokens(fm_engine *e) {
    const int k = e->spec.experts_per_token, choices = e->tokens * k;
    memset(e->expert_count, 0, (size_t)e->spec.experts * sizeof(int));
    for (int i = 0; i < choices; i++) e->expert_count[e->chosen[i]]++;
    int begin = 0;
    e->groups = 0;
    for (int expert = 0; expert < e->spec.experts; expert++) {
        const int count = e->expert_count[expert];
        e->expert_count[expert] = begin; /* from here on: where its next token goes */
        if (count == 0) continue;
        e->group[e->groups++] = (fm_expert_group){expert, begin, begin + count};
        begin += count;
    }
    for (int i = 0; i < choices; i++) {
        const int slot = e->expert_count[e->chosen[i]]++;
        e->slot_token[slot] = i / k;
        e->slot_weight[slot] = e->chosen_weight[i];
    }
}

/* inner <- quantised silu(gate x) (up x), columns col0..col1-1, for the `count` tokens listed in rows; results from
 * row `slot` of inner on. up_row: where the up rows begin in their matrix; next: see fm_multiply. */
static void inner_tile(fm_engine *e, const fm_matrix *gate, const fm_matrix *up, int index, int up_row,
                       const int32_t *rows, int count, fm_input *inner, int slot, int col0, int col1, int worker,
                       const void *next) {
    const int width = col1 - col0;
    float *g = fm_worker_scratch(e, worker), *u = g + FM_EXPERT_TOKENS * FM_TILE_ROWS;
    for (int begin = 0; begin < count; begin += FM_EXPERT_TOKENS) {
        const int tokens = fm_least(FM_EXPERT_TOKENS, count - begin);
        fm_multiply(e, worker, gate, index, col0, col1, &e->normed, rows + begin, tokens, g, (size_t)width,
                    fm_rows_at(up, index, up_row + col0));
        fm_multiply(e, worker, up, index, up_row + col0, up_row + col1, &e->normed, rows + begin, tokens, u,
                    (size_t)width, next);
        for (int t = 0; t < tokens; t++) {
            const int row = slot + begin + t;
            float *out = inner->x + (size_t)row * inner->ld + col0;
            e->ops->swiglu(g + (size_t)t * width, u + (size_t)t * width, width, out);
            fm_quantize(e, inner, row, col0, width);
        }
    }
}

/* What an item of inner_item begins with. */
typedef struct {
    const fm_expert_group *group; /* NULL: the shared expert */
    int col0;
} inner_place;

static inner_place place_of(const moe_job *job, int item) {
    if (item < job->shared_items) return (inner_place){NULL, item * job->cols};
    item -= job->shared_items;
    return (inner_place){job->engine->group + item / job->inner_items, item % job->inner_items * job->cols};
}

static void inner_item(void *arg, int item, int worker) {
    const moe_job *job = arg;
    fm_engine *e = job->engine;
    const fm_layer *layer = job->layer;
    const inner_place here = place_of(job, item), then = place_of(job, item + 1);
    const fm_expert_group *group = here.group;
    const void *next = NULL;
    if (item + 1 < job->shared_items + e->groups * job->inner_items)
        next = then.group ? fm_rows_at(&layer->experts_gate_up, then.group->expert, then.col0)
                          : fm_rows_at(&layer->shared_gate, 0, then.col0);
    if (!group)
        inner_tile(e, &layer->shared_gate, &layer->shared_up, 0, 0, e->every_token, e->tokens, &e->shared_inner, 0,
                   here.col0, fm_least(here.col0 + job->cols, e->spec.shared_hidden), worker, next);
    else
        inner_tile(e, &layer->experts_gate_up, &layer->experts_gate_up, group->expert, e->spec.expert_hidden,
                   e->slot_token + group->begin, group->end - group->begin, &e->expert_inner, group->begin, here.col0,
                   fm_least(here.col0 + job->cols, e->spec.expert_hidden), worker, next);
}

/* sum[token] += weight * (down inner[slot]) on rows row0.. of down, for `count` slots that belong to `tokens`. */
static void add_down(fm_engine *e, int worker, const fm_matrix *down, int index, const fm_input *inner, int slot,
                     int count, const int32_t *tokens, const float *weight, int row0, int row1, float *sum,
                     float *part, const void *next) {
    const int width = row1 - row0;
    for (int begin = 0; begin < count; begin += FM_EXPERT_TOKENS) {
        const int n = fm_least(FM_EXPERT_TOKENS, count - begin);
        fm_multiply(e, worker, down, index, row0, row1, inner, e->every_token + slot + begin, n, part, (size_t)width,
                    next);
        for (int i = 0; i < n; i++)
            e->ops->axpy(weight[begin + i], part + (size_t)i * width, width, sum + (size_t)tokens[begin + i] * width);
    }
}

static void down_item(void *arg, int item, int worker) {
    const moe_job *job = arg;
    fm_engine *e = job->engine;
    const fm_model_spec *s = &e->spec;
    const int row0 = item * job->rows, row1 = fm_least(row0 + job->rows, s->hidden), width = row1 - row0;
    float *part = fm_worker_scratch(e, worker), *sum = part + FM_EXPERT_TOKENS * FM_TILE_ROWS;
    float *gate = sum + (size_t)e->tokens * width;
    memset(sum, 0, (size_t)e->tokens * width * sizeof(float));
    for (int i = 0; i < e->groups; i++) {
        const fm_expert_group *g = e->group + i;
        const void *next = i + 1 < e->groups ? fm_rows_at(&job->layer->experts_down, g[1].expert, row0)
                                             : fm_rows_at(&job->layer->shared_down, 0, row0);
        add_down(e, worker, &job->layer->experts_down, g->expert, &e->expert_inner, g->begin, g->end - g->begin,
                 e->slot_token + g->begin, e->slot_weight + g->begin, row0, row1, sum, part, next);
    }
    for (int t = 0; t < e->tokens; t++) {
        const float logit = e->router[(size_t)t * (s->experts + 1) + s->experts];
        gate[t] = 1.0f / (1.0f + expf(-logit));
    }
    const void *next = row1 < s->hidden ? fm_rows_at(&job->layer->experts_down, e->group->expert, row1) : NULL;
    add_down(e, worker, &job->layer->shared_down, 0, &e->shared_inner, 0, e->tokens, e->every_token, gate, row0, row1,
             sum, part, next);
    for (int t = 0; t < e->tokens; t++)
        e->ops->axpy(1.0f, sum + (size_t)t * width, width, e->hidden + (size_t)t * s->hidden + row0);
}

/* Columns of the intermediate in one item: few enough that threads finish together, many enough that tokens need not
 * be laid side by side often. A multiple of 32, since they are quantised at once. */
static int inner_cols(const fm_engine *e) {
    int cols = FM_TILE_ROWS;
    while (cols > FM_GROUP && (e->groups + 1) * fm_blocks(e->spec.expert_hidden, cols) < 24 * e->threads) cols /= 2;
    return cols;
}

static int down_rows(const fm_engine *e) {
    const int items = (e->tokens == 1 ? 16 : 4) * e->threads;
    int rows = FM_TILE_ROWS;
    while (rows > 2 * FM_BLOCK_ROWS && fm_blocks(e->spec.hidden, rows) < items) rows /= 2;
    return rows;
}

enum { GATES = 2 };

static void gate_products(const fm_engine *e, const fm_layer *layer, fm_product gates[GATES]) {
    const size_t ld = (size_t)e->spec.experts + 1;
    gates[0] = (fm_product){.matrix = &layer->router, .out = e->router, .ld = ld};
    gates[1] = (fm_product){.matrix = &layer->shared_expert_gate, .out = e->router + e->spec.experts, .ld = ld};
}

void fm_expect_router(fm_engine *e, const fm_layer *layer) {
    fm_product gates[GATES];
    gate_products(e, layer, gates);
    fm_expect_products(e, layer->post_norm, gates, GATES);
}

/* The first item of each thread in down_item reads the same rows of every expert. */
static void expect_down(fm_engine *e, const moe_job *job) {
    const int items = fm_blocks(e->spec.hidden, job->rows);
    const fm_matrix *w = &job->layer->experts_down;
    const size_t row_bytes = fm_matrix_bytes(w) / w->rows;
    for (int worker = 0; worker < e->threads; worker++) {
        const int row = fm_pool_first_item(e->pool, items, worker) * job->rows;
        for (int i = 0; i < e->groups; i++)
            fm_pool_ahead(e->pool, worker, fm_rows_at(w, e->group[i].expert, row), row_bytes * job->rows);
    }
}

static void expect_next(fm_engine *e, const fm_layer *after) {
    const fm_product head = {.matrix = &e->spec.head};
    if (!after)
        fm_expect_products(e, e->spec.final_norm, &head, 1);
    else if (after->kind == FM_ATTENTION)
        fm_expect_attention(e, after);
    else
        fm_expect_delta_net(e, after);
}

void fm_moe(fm_engine *e, const fm_layer *layer, const fm_layer *after) {
    const fm_model_spec *s = &e->spec;
    moe_job job = {.engine = e, .layer = layer, .rows = down_rows(e)};
    fm_product gates[GATES];
    gate_products(e, layer, gates);
    fm_multiply_all(e, &e->normed, gates, GATES);
    fm_parallel_for(e->pool, e->tokens, choose, &job);
    group_tokens(e);
    fm_charge(e, FM_OP_ROUTER, fm_products_bytes(gates, GATES));
    job.cols = inner_cols(e);
    job.inner_items = fm_blocks(s->expert_hidden, job.cols);
    job.shared_items = fm_blocks(s->shared_hidden, job.cols);
    if (fm_tells_ahead(e)) expect_down(e, &job);
    fm_parallel_for(e->pool, job.shared_items + e->groups * job.inner_items, inner_item, &job);
    fm_charge(e, FM_OP_EXPERTS_IN,
              e->groups * fm_matrix_bytes(&layer->experts_gate_up) + 2 * fm_matrix_bytes(&layer->shared_gate));
    expect_next(e, after);
    fm_parallel_for(e->pool, fm_blocks(s->hidden, job.rows), down_item, &job);
    fm_charge(e, FM_OP_EXPERTS_OUT,
              e->groups * fm_matrix_bytes(&layer->experts_down) + fm_matrix_bytes(&layer->shared_down));
}
