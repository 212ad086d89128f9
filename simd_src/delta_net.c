/* Gated delta net (arXiv 2412.06464): projections with the causal convolution fused behind them, the delta rule and
 * the gated norm per value head, and the output projection into the residual stream. Three jobs. */
#include <math.h>
#include <xmmintrin.h>

#include "model.h"

typedef struct {
    fm_engine *engine;
    const fm_layer *layer;
    float *conv; /* [3][channels] of this layer */
    float *ssm;  /* [value_heads][key_dim][value_dim] of this layer */
    int recurrent;
} delta_job;

/* Channels are independent, so the convolution runs on each tile of in_proj_qkv rows as soon as it is there. */
static void convolve_tile(void *arg, int row0, int row1, float *u) {
    const delta_job *job = arg;
    const fm_engine *e = job->engine;
    e->ops->conv_silu(u, e->projected_ld, e->tokens, job->layer->conv + row0, job->conv + row0,
                      (size_t)fm_channels(&e->spec), row1 - row0);
}

static float softplus(float x) { return x > 20.0f ? x : log1pf(expf(x)); }

/* States that fade hold denormals, and each costs the processor a hundred cycles (half of this job's time); what they
 * stand for, below 1e-38, is nothing. Sets FTZ and DAZ, returns the mode to go back to: products with subnormal
 * halves, elsewhere, need theirs. */
static unsigned flush_denormals(void) {
    enum { DENORMALS_ARE_ZERO = 0x40 }; /* of every processor with SSE3 */
    const unsigned before = _mm_getcsr();
    _mm_setcsr(before | _MM_FLUSH_ZERO_ON | DENORMALS_ARE_ZERO);
    return before;
}

/* One value head over the whole pass, in chunks of 64 tokens that start with the pass. */
static void delta_head(void *arg, int head, int worker) {
    const delta_job *job = arg;
    fm_engine *e = job->engine;
    const fm_model_spec *s = &e->spec;
    const int channels = fm_channels(s), value_width = s->value_heads * s->value_dim;
    const int key_head = head / (s->value_heads / s->key_heads);
    const float *qkv = e->projected, *z = qkv + channels, *b = z + value_width, *a = b + s->value_heads;
    const size_t ld = e->projected_ld;
    float *scratch = fm_worker_scratch(e, worker);
    float *out = scratch, *beta = out + FM_DELTA_CHUNK * s->value_dim, *g = beta + FM_DELTA_CHUNK;
    fm_delta_args args = {
        .key_dim = s->key_dim,
        .value_dim = s->value_dim,
        .stride = ld,
        .beta = beta,
        .g = g,
        .state = job->ssm + (size_t)head * s->key_dim * s->value_dim,
        .out = out,
        .scratch = g + FM_DELTA_CHUNK,
    };
    const unsigned float_mode = flush_denormals();
    for (int begin = 0; begin < e->tokens; begin += FM_DELTA_CHUNK) {
        const float *row = qkv + (size_t)begin * ld;
        args.tokens = fm_least(FM_DELTA_CHUNK, e->tokens - begin);
        args.q = row + (size_t)key_head * s->key_dim;
        args.k = args.q + (size_t)s->key_heads * s->key_dim;
        args.v = row + 2 * (size_t)s->key_heads * s->key_dim + (size_t)head * s->value_dim;
        for (int t = 0; t < args.tokens; t++) {
            const size_t at = (size_t)(begin + t) * ld + head;
            beta[t] = 1.0f / (1.0f + expf(-b[at]));
            g[t] = job->layer->minus_a[head] * softplus(a[at] + job->layer->dt_bias[head]);
        }
        (job->recurrent ? e->ops->delta_recurrent : e->ops->delta_chunk)(&args);
        for (int t = 0; t < args.tokens; t++) {
            const int token = begin + t, col = head * s->value_dim;
            e->ops->gated_norm(out + (size_t)t * s->value_dim, z + (size_t)token * ld + col, job->layer->gated_norm,
                               s->value_dim, s->eps, e->mixed.x + (size_t)token * e->mixed.ld + col);
            fm_quantize(e, &e->mixed, token, col, s->value_dim);
        }
    }
    _mm_setcsr(float_mode);
}

enum { INPUTS = 4 };

/* job: what the convolution behind the first one needs; NULL if they are not to be run. */
static void input_products(const fm_engine *e, const fm_layer *layer, delta_job *job, fm_product inputs[INPUTS]) {
    const fm_model_spec *s = &e->spec;
    float *qkv = e->projected, *z = qkv + fm_channels(s), *b = z + s->value_heads * s->value_dim,
          *a = b + s->value_heads;
    inputs[0] = (fm_product){
        .matrix = &layer->in_proj_qkv, .out = qkv, .ld = e->projected_ld, .finish = convolve_tile, .arg = job};
    inputs[1] = (fm_product){.matrix = &layer->in_proj_z, .out = z, .ld = e->projected_ld};
    inputs[2] = (fm_product){.matrix = &layer->in_proj_b, .out = b, .ld = e->projected_ld};
    inputs[3] = (fm_product){.matrix = &layer->in_proj_a, .out = a, .ld = e->projected_ld};
}

void fm_expect_delta_net(fm_engine *e, const fm_layer *layer) {
    fm_product inputs[INPUTS];
    input_products(e, layer, NULL, inputs);
    fm_expect_products(e, layer->input_norm, inputs, INPUTS);
}

static void expect_states(const delta_job *job) {
    fm_pool *pool = job->engine->pool;
    const fm_model_spec *s = &job->engine->spec;
    const size_t floats = (size_t)s->key_dim * s->value_dim;
    for (int worker = 0; worker < job->engine->threads; worker++) {
        const int first = fm_pool_first_item(pool, s->value_heads, worker);
        const int end = fm_pool_first_item(pool, s->value_heads, worker + 1);
        fm_pool_ahead(pool, worker, job->ssm + first * floats, (end - first) * floats * sizeof(float));
    }
}

void fm_delta_net(fm_engine *e, const fm_layer *layer, fm_sequence *sequence, int recurrent) {
    const fm_model_spec *s = &e->spec;
    const int channels = fm_channels(s), value_width = s->value_heads * s->value_dim;
    delta_job job = {
        .engine = e,
        .layer = layer,
        .conv = sequence->conv + (size_t)layer->kind_index * (FM_CONV_TAPS - 1) * channels,
        .ssm = sequence->ssm + (size_t)layer->kind_index * s->value_heads * s->key_dim * s->value_dim,
        .recurrent = recurrent,
    };
    e->mixed.ld = e->mixed.q.cols = value_width;
    fm_product inputs[INPUTS];
    input_products(e, layer, &job, inputs);
    const fm_product output = {.matrix = &layer->out_proj, .out = e->hidden, .ld = (size_t)s->hidden, .add = 1};
    if (fm_tells_ahead(e)) expect_states(&job);
    fm_multiply_all(e, &e->normed, inputs, INPUTS);
    fm_charge(e, FM_OP_DELTA_IN, fm_products_bytes(inputs, INPUTS));
    fm_expect_products(e, NULL, &output, 1);
    fm_parallel_for(e->pool, s->value_heads, delta_head, &job);
    fm_charge(e, FM_OP_DELTA_RULE, 2 * (size_t)value_width * s->key_dim * sizeof(float));
    fm_expect_router(e, layer);
    fm_multiply_all(e, &e->mixed, &output, 1);
    fm_charge(e, FM_OP_DELTA_OUT, fm_products_bytes(&output, 1));
}
