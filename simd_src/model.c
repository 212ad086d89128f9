/* The engine: scratch memory for one pass, and the pass itself (embedding, layers, head). */
#define _DEFAULT_SOURCE
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

#include "model.h"

enum { ALIGNMENT = 64, HUGE_PAGE = 2 << 20 };

/* Hands out 64-byte aligned pieces; with base NULL it only measures. */
typedef struct {
    char *base;
    size_t used;
} arena;

static void *take(arena *a, size_t count, size_t size) {
    void *piece = a->base ? a->base + a->used : NULL;
    a->used += (count * size + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    return piece;
}

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static size_t most(size_t a, size_t b) { return a > b ? a : b; }

static void take_input(arena *a, fm_input *in, size_t rows, int cols, int quantized) {
    in->x = take(a, rows * cols, sizeof(float));
    in->ld = (size_t)cols;
    in->q.tokens = (int)(2 * rows); /* up to two terms each */
    in->q.cols = cols;
    if (!quantized) return;
    in->q.q = take(a, 2 * rows * cols, 1);
    in->q.scale = take(a, 2 * rows * (cols / FM_GROUP), sizeof(float));
    in->q.correction = take(a, 2 * rows * (cols / FM_GROUP), sizeof(int32_t));
}

/* Floats of scratch that the hungriest job of a layer needs per worker. */
static size_t worker_floats(const fm_model_spec *s) {
    const size_t rows = (size_t)FM_ATTEND_TOKENS * (s->heads / s->kv_heads), width = (size_t)s->head_dim;
    const size_t attention = rows * (2 * width + 3) + width + 1 + fm_attend_scratch((int)rows);
    const size_t delta = (size_t)FM_DELTA_CHUNK * (s->value_dim + 2) + fm_delta_scratch(s->key_dim, s->value_dim);
    const size_t tile = (size_t)FM_EXPERT_TOKENS * FM_TILE_ROWS;
    const size_t experts = 2 * tile + (size_t)s->max_tokens * (FM_TILE_ROWS + 1);
    return (most(most(attention, delta), experts) + FM_SPARE_FLOATS + ALIGNMENT) / ALIGNMENT * ALIGNMENT;
}

static size_t lay_out(fm_engine *e, char *base) {
    const fm_model_spec *s = &e->spec;
    const size_t tokens = (size_t)s->max_tokens, slots = tokens * s->experts_per_token;
    const size_t spans = (size_t)fm_blocks(s->max_context, FM_SPAN_TOKENS);
    const int value_width = s->value_heads * s->value_dim, query_width = s->heads * s->head_dim;
    const size_t delta = (size_t)fm_channels(s) + value_width + 2 * (size_t)s->value_heads;
    const size_t attention = 2 * (size_t)query_width + 2 * (size_t)s->kv_heads * s->head_dim;
    arena a = {base, 0};
    e->hidden = take(&a, tokens * s->hidden, sizeof(float));
    take_input(&a, &e->normed, tokens, s->hidden, e->quantized);
    e->projected_ld = (most(delta, attention) + 15) / 16 * 16;
    e->projected = take(&a, tokens * e->projected_ld, sizeof(float));
    take_input(&a, &e->mixed, tokens, value_width > query_width ? value_width : query_width, e->quantized);
    e->cosine = take(&a, tokens * s->rotary_pairs, sizeof(float));
    e->sine = take(&a, tokens * s->rotary_pairs, sizeof(float));
    e->router = take(&a, tokens * (s->experts + 1), sizeof(float));
    e->chosen = take(&a, slots, sizeof(int32_t));
    e->chosen_weight = take(&a, slots, sizeof(float));
    e->expert_count = take(&a, (size_t)s->experts, sizeof(int));
    e->group = take(&a, (size_t)s->experts, sizeof(fm_expert_group));
    e->slot_token = take(&a, slots, sizeof(int32_t));
    e->slot_weight = take(&a, slots, sizeof(float));
    e->every_token = take(&a, slots, sizeof(int32_t));
    take_input(&a, &e->expert_inner, slots, s->expert_hidden, e->quantized);
    take_input(&a, &e->shared_inner, tokens, s->shared_hidden, e->quantized);
    e->span_acc = take(&a, spans * query_width, sizeof(float));
    e->span_max = take(&a, spans * s->heads, sizeof(float));
    e->span_sum = take(&a, spans * s->heads, sizeof(float));
    e->weight = take(&a, (size_t)s->vocab, sizeof(float));
    e->candidates = take(&a, (size_t)s->vocab, sizeof(fm_candidate));
    e->worker_floats = worker_floats(s);
    e->worker_scratch = take(&a, (size_t)e->threads * e->worker_floats, sizeof(float));
    return a.used;
}

static int has_packed(const fm_model_spec *s) {
    if (s->embed.dtype == FM_Q4 || s->head.dtype == FM_Q4) return 1;
    for (int i = 0; i < s->layers; i++) {
        const fm_layer *l = s->layer + i;
        const fm_matrix *all[] = {
            &l->q_proj, &l->k_proj, &l->v_proj, &l->o_proj, &l->in_proj_qkv, &l->in_proj_z, &l->in_proj_b,
            &l->in_proj_a, &l->out_proj, &l->experts_gate_up, &l->experts_down, &l->shared_gate, &l->shared_up,
            &l->shared_down,
        };
        for (size_t j = 0; j < sizeof(all) / sizeof(*all); j++)
            if (all[j]->dtype == FM_Q4) return 1;
    }
    return 0;
}

size_t fm_delta_scratch(int key_dim, int value_dim) {
    return (size_t)FM_DELTA_CHUNK * (4 * (size_t)key_dim + (size_t)value_dim + 2 * FM_DELTA_CHUNK + 2);
}

size_t fm_attend_scratch(int rows) {
    const size_t keys = (size_t)FM_PAGE_TOKENS * FM_ATTEND_DEPTH, values = (size_t)FM_SPAN_TOKENS * FM_ATTEND_COLUMNS;
    return (size_t)rows * FM_SPAN_TOKENS + 4 * FM_ATTEND_PADDED(rows) + most(keys, values);
}

const fm_ops *fm_ops_for(const char *tier) {
    static const fm_ops *const tables[] = {&fm_ops_scalar, &fm_ops_ssse3, &fm_ops_avx2, &fm_ops_avx512};
    for (size_t i = 0; i < sizeof(tables) / sizeof(*tables); i++)
        if (strcmp(tables[i]->tier, tier) == 0) return tables[i];
    return NULL;
}

fm_engine *fm_engine_create(const fm_model_spec *spec, const char *tier, int threads, const int *cpus) {
    fm_engine *e = calloc(1, sizeof(*e));
    if (!e) return NULL;
    e->spec = *spec;
    e->ops = fm_ops_for(tier);
    e->threads = threads;
    e->quantized = has_packed(spec);
    e->arena_bytes = lay_out(e, NULL);
    if (!e->ops || fm_matmul_kernels_for(tier, &e->kernels) != 0) goto fail;
    e->arena = aligned_alloc(HUGE_PAGE, (e->arena_bytes + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE);
    if (!e->arena) goto fail;
    /* Rows are tens of KB apart, so that every head's part of a row is on another small page. Only advice. */
    madvise(e->arena, e->arena_bytes, MADV_HUGEPAGE);
    lay_out(e, e->arena);
    for (int i = 0; i < spec->max_tokens * spec->experts_per_token; i++) e->every_token[i] = i;
    e->pool = fm_pool_create(threads, cpus);
    if (!e->pool) goto fail;
    return e;
fail:
    fm_engine_destroy(e);
    return NULL;
}

void fm_engine_destroy(fm_engine *e) {
    if (!e) return;
    if (e->pool) fm_pool_destroy(e->pool);
    free(e->arena);
    free(e);
}

void fm_engine_profile(fm_engine *e, fm_op_cost *costs) { e->costs = costs; }

void fm_charge(fm_engine *e, int op, size_t bytes) {
    if (!e->costs) return;
    const double moment = now();
    e->costs[op].seconds += moment - e->charged_to;
    e->costs[op].bytes += (double)bytes;
    e->costs[op].calls++;
    e->charged_to = moment;
}

size_t fm_engine_scratch_bytes(const fm_engine *e) { return e->arena_bytes; }

fm_pool *fm_engine_pool(const fm_engine *e) { return e->pool; }

int fm_tier_supported(const char *tier) {
    fm_matmul_kernels kernels;
    return fm_ops_for(tier) != NULL && fm_matmul_kernels_for(tier, &kernels) == 0;
}

static void embed(const fm_engine *e, int id, float *out) {
    const fm_matrix *table = &e->spec.embed;
    if (table->dtype == FM_Q4)
        e->kernels.q4_row(table->data, table->cols, id, out);
    else
        memcpy(out, (const float *)table->data + (size_t)id * table->cols, (size_t)table->cols * sizeof(float));
}

typedef struct {
    const fm_engine *engine;
    const int *ids, *positions;
} begin_job;

static void begin_token(void *arg, int t, int worker) {
    (void)worker;
    const begin_job *job = arg;
    const fm_engine *e = job->engine;
    const fm_model_spec *s = &e->spec;
    embed(e, job->ids[t], e->hidden + (size_t)t * s->hidden);
    for (int j = 0; j < s->rotary_pairs; j++) {
        /* The angle is rounded to float32 first, as the model saw it in training. */
        const float angle = (float)job->positions[3 * t + s->rotary_axis[j]] * s->inverse_frequency[j];
        e->cosine[(size_t)t * s->rotary_pairs + j] = (float)cos(angle);
        e->sine[(size_t)t * s->rotary_pairs + j] = (float)sin(angle);
    }
}

/* A row of the packed table lies in several hundred cache lines, none of them in a cache: many tokens keep a single
 * thread waiting for memory for milliseconds, during which a card has nothing to do. */
void fm_pass_begin(fm_engine *e, const int *ids, const int *positions, int tokens) {
    const fm_model_spec *s = &e->spec;
    e->tokens = tokens;
    e->charged_to = now();
    begin_job job = {e, ids, positions};
    if (tokens == 1)
        begin_token(&job, 0, 0);
    else
        fm_parallel_for(e->pool, tokens, begin_token, &job);
    fm_charge(e, FM_OP_EMBED, tokens * (fm_matrix_bytes(&s->embed) / s->embed.rows));
}

float *fm_pass_hidden(fm_engine *e) { return e->hidden; }

/* Goes on with the pass's tokens from `skip` on; -skip takes it back. */
static void skip_tokens(fm_engine *e, int skip) {
    const ptrdiff_t hidden = (ptrdiff_t)skip * e->spec.hidden, rotary = (ptrdiff_t)skip * e->spec.rotary_pairs;
    e->tokens -= skip;
    e->hidden += hidden;
    e->cosine += rotary;
    e->sine += rotary;
}

/* Int8 inputs put noise of a few hundredths on every logit, and near ties turn on it. What the last layer and the head
 * add to it nothing after them evens out, so their inputs are two terms: the int8 form, and what that leaves over, again
 * in int8 (tests/bench/NOTES.md, "Accuracy of 8-bit activations"). */
void fm_pass_layers(fm_engine *e, fm_sequence *sequence, int first, int last, int recurrent, int every_row) {
    e->charged_to = now(); /* what the caller did since the last layer is no operation's */
    for (int i = first; i < last; i++) {
        const fm_layer *layer = e->spec.layer + i;
        const int is_last = i == e->spec.layers - 1, skip = is_last && !every_row ? e->tokens - 1 : 0;
        e->refined = is_last;
        if (skip > 0 && layer->kind == FM_ATTENTION) {
            e->tokens = skip;
            fm_norm(e, layer->input_norm);
            fm_store_keys(e, layer, sequence);
            e->tokens = skip + 1;
            skip_tokens(e, skip);
            sequence->position += skip;
            fm_norm(e, layer->input_norm);
            fm_attention(e, layer, sequence);
            sequence->position -= skip;
        } else {
            fm_norm(e, layer->input_norm);
            if (layer->kind == FM_ATTENTION)
                fm_attention(e, layer, sequence);
            else
                fm_delta_net(e, layer, sequence, recurrent);
            skip_tokens(e, skip);
        }
        fm_norm(e, layer->post_norm);
        fm_moe(e, layer, i + 1 < e->spec.layers ? layer + 1 : NULL);
        skip_tokens(e, -skip);
    }
}

void fm_pass_logits(fm_engine *e, int row, float *logits) {
    const fm_model_spec *s = &e->spec;
    const int tokens = e->tokens;
    e->ops->rmsnorm(e->hidden + (size_t)row * s->hidden, s->final_norm, s->hidden, s->eps, e->normed.x);
    e->tokens = 1;
    e->refined = 1;
    fm_quantize(e, &e->normed, 0, 0, s->hidden);
    const fm_product head = {.matrix = &s->head, .out = logits, .ld = (size_t)s->vocab};
    fm_multiply_all(e, &e->normed, &head, 1);
    e->tokens = tokens;
}

void fm_decode(fm_engine *e, fm_sequence *sequence, int id, const int *position, float *logits) {
    fm_pass_begin(e, &id, position, 1);
    fm_pass_layers(e, sequence, 0, e->spec.layers, 1, 1);
    fm_pass_logits(e, 0, logits);
    fm_charge(e, FM_OP_HEAD, fm_matrix_bytes(&e->spec.head));
}
