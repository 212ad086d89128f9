/* Gated grouped-query attention over paged keys and values.
 *
 * Keys are taken 64 at a time (a page), pages are merged into spans of 8, spans into the result: the same arithmetic,
 * in the same order, whether a pass holds one token (spans run in parallel) or many (blocks of tokens do).
 */
#include <math.h>
#include <string.h>

#include "model.h"

enum { LINE_BYTES = 64 };

typedef struct {
    fm_engine *engine;
    const fm_layer *layer;
    fm_sequence *sequence;
    int block; /* tokens of an item in prefill */
} attention_job;

/* Scratch of one worker, carved from its share. rows = FM_ATTEND_TOKENS * (heads per kv head). */
typedef struct {
    float *query, *acc, *inner, *key, *maximum, *sum;
    int *limit;
    int *loaded; /* the kv head whose queries are there, in decode */
} attend_scratch;

static int group_size(const fm_model_spec *s) { return s->heads / s->kv_heads; }

static attend_scratch carve(const fm_engine *e, int worker) {
    const int rows = FM_ATTEND_TOKENS * group_size(&e->spec), width = e->spec.head_dim;
    attend_scratch a;
    a.query = fm_worker_scratch(e, worker);
    a.acc = a.query + (size_t)rows * width;
    a.inner = a.acc + (size_t)rows * width; /* in whole cache lines, as what is before it */
    a.key = a.inner + fm_attend_scratch(rows);
    a.maximum = a.key + width;
    a.sum = a.maximum + rows;
    a.limit = (int *)(a.sum + rows);
    a.loaded = a.limit + rows;
    return a;
}

static size_t element_bytes(const fm_model_spec *s) { return s->kv_f32 ? sizeof(float) : sizeof(uint16_t); }

/* Elements before (layer, K or V, kv head) in a page. */
static size_t page_offset(const fm_model_spec *s, const fm_layer *layer, int is_value, int kv_head) {
    return (((size_t)layer->kind_index * 2 + is_value) * s->kv_heads + kv_head) * FM_PAGE_TOKENS * s->head_dim;
}

/* Norm and rotation of one head's vector: x <- rope(rmsnorm(from)). */
static void prepare(const fm_engine *e, const float *from, const float *weight, int token, float *x) {
    const fm_model_spec *s = &e->spec;
    e->ops->rmsnorm(from, weight, s->head_dim, s->eps, x);
    const size_t at = (size_t)token * s->rotary_pairs;
    e->ops->rope(x, e->cosine + at, e->sine + at, s->rotary_pairs);
}

static void store_row(const fm_engine *e, const float *row, void *page, size_t at) {
    if (e->spec.kv_f32)
        memcpy((float *)page + at, row, (size_t)e->spec.head_dim * sizeof(float));
    else
        e->ops->to_half(row, e->spec.head_dim, (uint16_t *)page + at);
}

/* Key and value of one head of one token go to their page. */
static void store_head(const attention_job *job, int token, int kv_head, float *key) {
    const fm_engine *e = job->engine;
    const fm_model_spec *s = &e->spec;
    const int position = job->sequence->position + token;
    void *page = job->sequence->pages[position / FM_PAGE_TOKENS];
    const size_t row = (size_t)(position % FM_PAGE_TOKENS) * s->head_dim;
    const float *k = e->projected + (size_t)token * e->projected_ld + (2 * s->heads + kv_head) * s->head_dim;
    prepare(e, k, job->layer->k_norm, token, key);
    store_row(e, key, page, page_offset(s, job->layer, 0, kv_head) + row);
    store_row(e, k + (size_t)s->kv_heads * s->head_dim, page, page_offset(s, job->layer, 1, kv_head) + row);
}

static void store_token(void *arg, int token, int worker) {
    const attention_job *job = arg;
    for (int head = 0; head < job->engine->spec.kv_heads; head++)
        store_head(job, token, head, fm_worker_scratch(job->engine, worker));
}

/* Where an element of a page lies. */
static const void *element(const fm_model_spec *s, const void *page, size_t at) {
    return (const char *)page + at * element_bytes(s);
}

static void load_queries(const attention_job *job, int kv_head, int begin, int end, float *query) {
    const fm_engine *e = job->engine;
    const fm_model_spec *s = &e->spec;
    const int group = group_size(s), width = s->head_dim;
    const float scale = 1.0f / sqrtf((float)width);
    for (int token = begin; token < end; token++) {
        const float *row = e->projected + (size_t)token * e->projected_ld + (size_t)kv_head * group * 2 * width;
        for (int h = 0; h < group; h++, query += width) {
            prepare(e, row + (size_t)h * 2 * width, job->layer->q_norm, token, query);
            for (int i = 0; i < width; i++) query[i] *= scale;
        }
    }
}

/* Merges one span of keys into the running softmax of tokens begin..end-1. */
static void attend_span(const attention_job *job, int kv_head, int begin, int end, int span, const attend_scratch *a) {
    const fm_engine *e = job->engine;
    const fm_model_spec *s = &e->spec;
    const int group = group_size(s), start = job->sequence->position, first_key = span * FM_SPAN_TOKENS;
    const int unseeing = fm_most(0, first_key - (start + begin)) * group, rows = (end - begin) * group - unseeing;
    const size_t key_at = page_offset(s, job->layer, 0, kv_head), value_at = page_offset(s, job->layer, 1, kv_head);
    const int row_bytes = s->head_dim * (int)element_bytes(s);
    fm_attend_args args = {
        .rows = rows,
        .head_dim = s->head_dim,
        .half = !s->kv_f32,
        .query = a->query + (size_t)unseeing * s->head_dim,
        .limit = a->limit,
        .maximum = a->maximum + unseeing,
        .sum = a->sum + unseeing,
        .acc = a->acc + (size_t)unseeing * s->head_dim,
        .scratch = a->inner,
    };
    for (int r = 0; r < rows; r++) {
        const int visible = start + begin + (unseeing + r) / group + 1 - first_key;
        a->limit[r] = fm_least(visible, FM_SPAN_TOKENS);
    }
    for (int i = 0; i < FM_SPAN_PAGES; i++) {
        /* Fetched ahead also beyond what this item reads: the next span is most likely this thread's next item. */
        const int page = span * FM_SPAN_PAGES + i, next = page + FM_SPAN_PAGES;
        const int keys = start + end - page * FM_PAGE_TOKENS, next_keys = start + end - next * FM_PAGE_TOKENS;
        void *const *pages = job->sequence->pages;
        if (keys > 0) args.key[i] = element(s, pages[page], key_at), args.value[i] = element(s, pages[page], value_at);
        if (next_keys <= 0) continue;
        args.next_key[i] = element(s, pages[next], key_at);
        args.next_value[i] = element(s, pages[next], value_at);
        args.next_lines[i] = fm_least(next_keys, FM_PAGE_TOKENS) * row_bytes / LINE_BYTES;
    }
    e->ops->attend(&args);
}

static void forget(const attend_scratch *a, int rows, int width) {
    for (int r = 0; r < rows; r++) a->maximum[r] = -INFINITY, a->sum[r] = 0.0f;
    memset(a->acc, 0, (size_t)rows * width * sizeof(float));
}

/* Divides, gates and quantises one head's result of one token. */
static void finish_head(fm_engine *e, int token, int head, const float *acc, float sum) {
    const int width = e->spec.head_dim;
    const float *gate = e->projected + (size_t)token * e->projected_ld + (size_t)(2 * head + 1) * width;
    e->ops->attend_finish(acc, sum, gate, width, e->mixed.x + (size_t)token * e->mixed.ld + (size_t)head * width);
    fm_quantize(e, &e->mixed, token, head * width, width);
}

/* Prefill: a block of tokens of one kv head over all its keys. Late blocks, which cost most, come first. */
static void attend_block(void *arg, int item, int worker) {
    const attention_job *job = arg;
    fm_engine *e = job->engine;
    const fm_model_spec *s = &e->spec;
    const int group = group_size(s), width = s->head_dim, kv_head = item % s->kv_heads;
    const int begin = (fm_blocks(e->tokens, job->block) - 1 - item / s->kv_heads) * job->block;
    const int end = fm_least(begin + job->block, e->tokens), rows = (end - begin) * group;
    const attend_scratch a = carve(e, worker);
    load_queries(job, kv_head, begin, end, a.query);
    forget(&a, rows, width);
    for (int span = 0; span * FM_SPAN_TOKENS < job->sequence->position + end; span++)
        attend_span(job, kv_head, begin, end, span, &a);
    for (int r = 0; r < rows; r++)
        finish_head(e, begin + r / group, kv_head * group + r % group, a.acc + (size_t)r * width, a.sum[r]);
}

/* Decode: one span of one kv head. The newest key and value are stored by the only item that reads them. */
static void attend_one_span(void *arg, int item, int worker) {
    const attention_job *job = arg;
    fm_engine *e = job->engine;
    const fm_model_spec *s = &e->spec;
    const int spans = fm_blocks(job->sequence->position + 1, FM_SPAN_TOKENS);
    const int group = group_size(s), kv_head = item / spans, span = item % spans;
    const size_t at = (size_t)span * s->heads + (size_t)kv_head * group;
    attend_scratch a = carve(e, worker);
    if (span == spans - 1) store_head(job, 0, kv_head, a.key);
    if (*a.loaded != kv_head) load_queries(job, kv_head, 0, 1, a.query);
    *a.loaded = kv_head;
    a.acc = e->span_acc + at * s->head_dim;
    a.maximum = e->span_max + at;
    a.sum = e->span_sum + at;
    forget(&a, group, s->head_dim);
    attend_span(job, kv_head, 0, 1, span, &a);
}

static void merge_head(void *arg, int head, int worker) {
    const attention_job *job = arg;
    fm_engine *e = job->engine;
    const fm_model_spec *s = &e->spec;
    const int spans = fm_blocks(job->sequence->position + 1, FM_SPAN_TOKENS);
    float *acc = fm_worker_scratch(e, worker), maximum = -INFINITY, sum = 0.0f;
    memset(acc, 0, (size_t)s->head_dim * sizeof(float));
    for (int span = 0; span < spans; span++) {
        const size_t at = (size_t)span * s->heads + head;
        e->ops->attend_merge(&maximum, &sum, acc, e->span_max[at], e->span_sum[at], e->span_acc + at * s->head_dim,
                             s->head_dim);
    }
    finish_head(e, 0, head, acc, sum);
}

enum { QUERIES, KEYS, INPUTS = 3 };

/* Queries with gates, keys, values. */
static void input_products(const fm_engine *e, const fm_layer *layer, fm_product inputs[INPUTS]) {
    const fm_model_spec *s = &e->spec;
    float *q = e->projected, *k = q + 2 * s->heads * s->head_dim, *v = k + s->kv_heads * s->head_dim;
    inputs[0] = (fm_product){.matrix = &layer->q_proj, .out = q, .ld = e->projected_ld};
    inputs[1] = (fm_product){.matrix = &layer->k_proj, .out = k, .ld = e->projected_ld};
    inputs[2] = (fm_product){.matrix = &layer->v_proj, .out = v, .ld = e->projected_ld};
}

void fm_expect_attention(fm_engine *e, const fm_layer *layer) {
    fm_product inputs[INPUTS];
    input_products(e, layer, inputs);
    fm_expect_products(e, layer->input_norm, inputs, INPUTS);
}

/* The input projections from `first` (QUERIES or KEYS) on. */
static void project(fm_engine *e, const fm_layer *layer, int first) {
    fm_product inputs[INPUTS];
    input_products(e, layer, inputs);
    fm_multiply_all(e, &e->normed, inputs + first, INPUTS - first);
    fm_charge(e, FM_OP_ATTENTION_IN, fm_products_bytes(inputs + first, INPUTS - first));
}

void fm_store_keys(fm_engine *e, const fm_layer *layer, fm_sequence *sequence) {
    attention_job job = {e, layer, sequence, 1};
    project(e, layer, KEYS);
    fm_parallel_for(e->pool, e->tokens, store_token, &job);
    fm_charge(e, FM_OP_ATTENTION, 0);
}

/* Of the keys and values that attend_one_span begins with. */
static void expect_pages(const attention_job *job) {
    const fm_engine *e = job->engine;
    const fm_model_spec *s = &e->spec;
    const int tokens = job->sequence->position, spans = fm_blocks(tokens + 1, FM_SPAN_TOKENS);
    const size_t row_bytes = s->head_dim * element_bytes(s);
    for (int worker = 0; worker < e->threads; worker++) {
        const int item = fm_pool_first_item(e->pool, spans * s->kv_heads, worker);
        if (item == fm_pool_first_item(e->pool, spans * s->kv_heads, worker + 1)) continue;
        const int kv_head = item / spans, page = item % spans * FM_SPAN_PAGES;
        for (int i = page; i < page + FM_SPAN_PAGES && i * FM_PAGE_TOKENS < tokens; i++) {
            const size_t bytes = fm_least(tokens - i * FM_PAGE_TOKENS, FM_PAGE_TOKENS) * row_bytes;
            for (int value = 0; value < 2; value++)
                fm_pool_ahead(e->pool, worker,
                              element(s, job->sequence->pages[i], page_offset(s, job->layer, value, kv_head)), bytes);
        }
    }
}

void fm_attention(fm_engine *e, const fm_layer *layer, fm_sequence *sequence) {
    const fm_model_spec *s = &e->spec;
    /* Few tokens are dealt out one by one rather than to few threads. */
    const int share = e->tokens * s->kv_heads / (2 * e->threads);
    attention_job job = {e, layer, sequence, share < 1 ? 1 : fm_least(share, FM_ATTEND_TOKENS)};
    e->mixed.ld = e->mixed.q.cols = s->heads * s->head_dim;
    const fm_product output = {.matrix = &layer->o_proj, .out = e->hidden, .ld = (size_t)s->hidden, .add = 1};
    if (fm_tells_ahead(e)) expect_pages(&job);
    project(e, layer, QUERIES);
    if (e->tokens == 1) {
        const int spans = fm_blocks(sequence->position + 1, FM_SPAN_TOKENS);
        for (int worker = 0; worker < e->threads; worker++) *carve(e, worker).loaded = -1;
        fm_parallel_for(e->pool, spans * s->kv_heads, attend_one_span, &job);
        fm_expect_products(e, NULL, &output, 1);
        fm_parallel_for(e->pool, s->heads, merge_head, &job);
    } else {
        fm_parallel_for(e->pool, e->tokens, store_token, &job);
        fm_parallel_for(e->pool, fm_blocks(e->tokens, job.block) * s->kv_heads, attend_block, &job);
    }
    const size_t keys = (size_t)(sequence->position + e->tokens) * s->kv_heads * s->head_dim;
    fm_charge(e, FM_OP_ATTENTION, 2 * keys * element_bytes(s));
    fm_expect_router(e, layer);
    fm_multiply_all(e, &e->mixed, &output, 1);
    fm_charge(e, FM_OP_ATTENTION_OUT, fm_products_bytes(&output, 1));
}
