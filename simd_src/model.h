/* What the parts of the forward pass share: the engine with its scratch memory, and the jobs they run on the pool. */
#ifndef FERMION_MODEL_H
#define FERMION_MODEL_H

#include <stddef.h>
#include <stdint.h>

#include "kernels.h"
#include "ops.h"
#include "threads.h"

#include "model_api.h"

#define FM_ATTEND_TOKENS 8   /* most tokens that share one conversion of a KV page in prefill */
#define FM_EXPERT_TOKENS 64  /* tokens of an expert taken at once: what keeps its intermediate in cache */
#define FM_TILE_ROWS 256     /* most rows of a product taken at once */
#define FM_SPARE_FLOATS (FM_EXPERT_TOKENS * FM_TILE_ROWS)

/* Input rows of a product in both forms; `q` is filled only for packed matrices. */
typedef struct {
    float *x;
    size_t ld;
    fm_q8 q;
} fm_input;

/* Tokens of this pass that chose one expert: entries begin..end-1 of slot_token and slot_weight. */
typedef struct {
    int expert, begin, end;
} fm_expert_group;

/* A token that may be drawn. */
typedef struct {
    float value;
    int32_t id;
} fm_candidate;

struct fm_engine {
    fm_model_spec spec;
    const fm_ops *ops;
    fm_matmul_kernels kernels;
    fm_pool *pool;
    int threads;
    int quantized; /* some matrix is packed, so that inputs are needed in int8 */
    int refined;   /* inputs of the layer (or head) at work are two int8 terms: row r is rows 2 r and 2 r + 1 of q */
    void *arena;
    size_t arena_bytes;

    int tokens;       /* of the current pass */
    float *hidden;    /* [T][hidden] residual stream */
    fm_input normed;  /* [T][hidden] */
    float *projected; /* [T][projected_ld]: qkv | z | b | a, or q | k | v */
    size_t projected_ld;
    fm_input mixed;   /* [T][heads * head_dim or value_heads * value_dim] */
    float *cosine, *sine; /* [T][rotary_pairs] */

    float *router;        /* [T][experts + 1]: router logits, then the shared expert's gate */
    int32_t *chosen;      /* [T][experts_per_token] ascending */
    float *chosen_weight; /* [T][experts_per_token] */
    int *expert_count;    /* [experts] */
    fm_expert_group *group;
    int groups;
    int32_t *slot_token; /* [T * experts_per_token] */
    float *slot_weight;
    int32_t *every_token;  /* 0, 1, 2, ... */
    fm_input expert_inner; /* [T * experts_per_token][expert_hidden] */
    fm_input shared_inner; /* [T][shared_hidden] */

    float *span_acc;            /* [spans][heads][head_dim]: parts of one token's attention */
    float *span_max, *span_sum; /* [spans][heads] */

    float *weight;            /* [vocab], of the sampler */
    fm_candidate *candidates; /* [vocab] */

    float *worker_scratch; /* [threads][worker_floats] */
    size_t worker_floats;

    fm_op_cost *costs;  /* [FM_OPS], NULL: not profiled */
    double charged_to;  /* the moment up to which time is accounted for, in seconds */
};

static inline float *fm_worker_scratch(const fm_engine *e, int worker) {
    return e->worker_scratch + (size_t)worker * e->worker_floats;
}

/* FM_SPARE_FLOATS that no job but fm_multiply uses. */
static inline float *fm_worker_spare(const fm_engine *e, int worker) {
    return fm_worker_scratch(e, worker) + e->worker_floats - FM_SPARE_FLOATS;
}

static inline int fm_blocks(int count, int size) { return (count + size - 1) / size; }
static inline int fm_least(int a, int b) { return a < b ? a : b; }
static inline int fm_most(int a, int b) { return a > b ? a : b; }

static inline int fm_channels(const fm_model_spec *s) {
    return 2 * s->key_heads * s->key_dim + s->value_heads * s->value_dim;
}

/* Accounts for the time since the last charge, which operation `op` took and moved `bytes` in. */
void fm_charge(fm_engine *e, int op, size_t bytes);

/* Width in bytes of one matrix of a stack. */
size_t fm_matrix_bytes(const fm_matrix *w);

/* y[t * ldy + n - row0] for rows row0..row1-1 (multiples of 16 if packed) of matrix `index` of the stack w;
 * rows: which inputs to take, or NULL for the first `tokens`; next: what this thread multiplies by afterwards
 * (fm_rows_at) if it lies elsewhere and is as wide, else NULL. */
void fm_multiply(const fm_engine *e, int worker, const fm_matrix *w, int index, int row0, int row1, const fm_input *in,
                 const int32_t *rows, int tokens, float *y, size_t ldy, const void *next);

/* Where rows from `row` on (a multiple of 16 if packed) of matrix `index` of the stack w lie. */
const void *fm_rows_at(const fm_matrix *w, int index, int row);

/* Quantises columns col..col+n-1 (multiples of 32) of row `row`, if packed matrices will read it: to one term, or, while
 * e->refined, to two. */
void fm_quantize(const fm_engine *e, fm_input *in, int row, int col, int n);

/* normed <- rmsnorm(hidden, weight) for all tokens. */
void fm_norm(fm_engine *e, const float *weight);

/* Called with a finished tile of a product: rows row0..row1-1 of all tokens at y. */
typedef void (*fm_finish)(void *arg, int row0, int row1, float *y);

/* One matrix of a job of products that share their input. The result goes to out, or is added to it. */
typedef struct {
    const fm_matrix *matrix;
    float *out; /* [T][ld] */
    size_t ld;
    int add;
    fm_finish finish; /* or NULL */
    void *arg;
} fm_product;

void fm_multiply_all(fm_engine *e, const fm_input *in, const fm_product *products, int count);

/* Whether idle threads are told what comes next (fm_pool_ahead): in decode, where jobs are short and read much. */
static inline int fm_tells_ahead(const fm_engine *e) { return e->tokens == 1 && e->threads > 1; }

/* If so: products that are the job after the next one, and the norm before them or NULL. */
void fm_expect_products(fm_engine *e, const float *norm, const fm_product *products, int count);
void fm_expect_router(fm_engine *e, const fm_layer *layer);
void fm_expect_attention(fm_engine *e, const fm_layer *layer);
void fm_expect_delta_net(fm_engine *e, const fm_layer *layer);

/* Weights that the products read. */
size_t fm_products_bytes(const fm_product *products, int count);

/* Keys and values of all tokens from normed, and nothing else of the attention. */
void fm_store_keys(fm_engine *e, const fm_layer *layer, fm_sequence *sequence);
void fm_attention(fm_engine *e, const fm_layer *layer, fm_sequence *sequence);
void fm_delta_net(fm_engine *e, const fm_layer *layer, fm_sequence *sequence, int recurrent);
/* after: what follows, or NULL for the head. */
void fm_moe(fm_engine *e, const fm_layer *layer, const fm_layer *after);

#endif
