/* The text model as C sees it: shapes, pointers to weights and state, and the calls that run it. Prototypes only,
 * read by the compiler and by the Python binding. Python owns every array; the engine owns its scratch memory.
 *
 * One engine runs one call at a time. Arrays are C-contiguous; float is float32. T: tokens of the current pass.
 */
#ifndef FERMION_MODEL_API_H
#define FERMION_MODEL_API_H


enum { FM_F32 = 0, FM_Q4 = 1 };             /* fm_matrix.dtype: row-major float32, or packed blocks (blocks.h) */
enum { FM_DELTA_NET = 0, FM_ATTENTION = 1 }; /* fm_layer.kind */

/* y = W x with W [rows][cols]; `data` of several equal matrices lies back to back (experts). */
typedef struct {
    int dtype, rows, cols;
    const void *data;
} fm_matrix;

/* Weights of one decoder layer. Norm weights are final multipliers (1 + w where the checkpoint stores w). */
typedef struct {
    int kind;
    int kind_index; /* number of earlier layers of this kind: which part of the state is its own */
    const float *input_norm, *post_norm;                     /* [hidden] */
    fm_matrix q_proj, k_proj, v_proj, o_proj;                /* attention; q rows per head: query, then gate */
    const float *q_norm, *k_norm;                            /* [head_dim] */
    fm_matrix in_proj_qkv, in_proj_z, in_proj_b, in_proj_a, out_proj; /* gated delta net */
    const float *conv;                                       /* [4][channels], newest tap last */
    const float *minus_a, *dt_bias;                          /* [value_heads]; minus_a = -exp(A_log) */
    const float *gated_norm;                                 /* [value_dim] */
    fm_matrix router;                                        /* [experts][hidden] */
    fm_matrix shared_expert_gate;                            /* [1][hidden] */
    fm_matrix experts_gate_up;                               /* per expert [2 expert_hidden][hidden]: gate, then up */
    fm_matrix experts_down;                                  /* per expert [hidden][expert_hidden] */
    fm_matrix shared_gate, shared_up, shared_down;
} fm_layer;

typedef struct {
    int hidden, layers, vocab;
    int heads, kv_heads, head_dim, rotary_pairs;
    int key_heads, value_heads, key_dim, value_dim;
    int experts, experts_per_token, expert_hidden, shared_hidden;
    float eps;
    int kv_f32;     /* KV pages hold float32 instead of IEEE half */
    int max_tokens; /* most tokens of one pass */
    int max_context;
    const float *inverse_frequency; /* [rotary_pairs] */
    const int *rotary_axis;         /* [rotary_pairs]: 0 time, 1 height, 2 width */
    fm_matrix embed, head;
    const float *final_norm;
    const fm_layer *layer; /* [layers] */
} fm_model_spec;

/* State of one sequence after `position` tokens. A page holds 64 tokens as
 * [attention layer][K, V][kv head][64][head_dim]; pages[i] must exist for every token of a pass before it runs. */
typedef struct {
    int position;
    float *conv; /* [delta layers][3][channels], oldest first: inputs of the convolution */
    float *ssm;  /* [delta layers][value_heads][key_dim][value_dim] */
    void **pages;
} fm_sequence;

typedef struct fm_engine fm_engine;

/* spec, what it points to, and cpus (logical ids, one per thread, or NULL: no pinning) must outlive the engine.
 * NULL if memory is short, a thread cannot start, or this build or CPU lacks the tier. */
fm_engine *fm_engine_create(const fm_model_spec *spec, const char *tier, int threads, const int *cpus);
void fm_engine_destroy(fm_engine *engine);
size_t fm_engine_scratch_bytes(const fm_engine *engine);
/* The engine's threads, for work beside its own (pictures), between its calls. */
typedef struct fm_pool fm_pool;
fm_pool *fm_engine_pool(const fm_engine *engine);

/* Starts a pass of T <= max_tokens tokens: their embeddings and rotary tables. positions: [T][3] (t, h, w). */
void fm_pass_begin(fm_engine *engine, const int *ids, const int *positions, int tokens);
/* Residual stream of the pass, [T][hidden]: rows may be replaced between begin and the first layer. */
float *fm_pass_hidden(fm_engine *engine);
/* Runs layers first..last-1. recurrent: delta rule token by token (decode) instead of in chunks of 64 counted from the
 * start of the pass (prefill). every_row 0: of the last layer's results only that of the last token is made, besides what
 * the sequence keeps. The caller moves the position of the sequence once all layers have run. */
void fm_pass_layers(fm_engine *engine, fm_sequence *sequence, int first, int last, int recurrent, int every_row);
/* Logits [vocab] of token `row` of the pass, whose layers have all run. */
void fm_pass_logits(fm_engine *engine, int row, float *logits);
/* One decode step: a whole pass of one token. */
void fm_decode(fm_engine *engine, fm_sequence *sequence, int id, const int *position, float *logits);

/* What the time of a pass is told apart by. */
enum {
    FM_OP_EMBED,         /* embeddings and rotary tables */
    FM_OP_NORM,          /* norms before mixers and experts, with quantisation */
    FM_OP_DELTA_IN,      /* projections of the delta net, with the convolution */
    FM_OP_DELTA_RULE,    /* with its norm and gate */
    FM_OP_DELTA_OUT,
    FM_OP_ATTENTION_IN,
    FM_OP_ATTENTION,     /* keys and values stored and read, softmax, gate */
    FM_OP_ATTENTION_OUT,
    FM_OP_ROUTER,        /* gates, choice of experts, grouping of tokens */
    FM_OP_EXPERTS_IN,    /* gate and up of chosen and shared experts, with the activation */
    FM_OP_EXPERTS_OUT,
    FM_OP_HEAD,          /* final norm and logits of a decode step */
    FM_OPS
};

/* Since profiling began. bytes: weights read, and state read and written, each once. */
typedef struct {
    double seconds, bytes;
    long calls;
} fm_op_cost;

/* From now on every pass adds its costs to costs[FM_OPS]; NULL: no more. A pass's logits outside of fm_decode are not
 * counted. */
void fm_engine_profile(fm_engine *engine, fm_op_cost *costs);

/* Whether this build and this CPU can run the tier. */
int fm_tier_supported(const char *tier);

#endif
