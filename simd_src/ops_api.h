/* The float operations of a layer, one table per instruction set (ops_<tier>.c = vec_<tier>.h + ops_impl.h). Read by
 * the compiler and by the Python binding, through which tests call the table.
 *
 * All arrays are float32, all widths multiples of 16 unless said otherwise. Within a tier every result is a function
 * of its own row alone: how rows are grouped into calls, and which thread runs them, changes no bit. The scalar tier
 * is the reference; others differ by rounding order, fused multiply-add and exp (vec_exp.h, under 2 ulp).
 */

/* Query rows against one span of two KV pages; `limit[r]` of its keys (0..128, its first ones) are visible to row r.
 * The softmax of the span is merged into row r's running one (maximum[r], sum[r], acc[r]), as attend_merge does:
 * output so far = acc / sum. */
typedef struct {
    int rows, head_dim;
    int half;                      /* keys and values are IEEE halves instead of floats */
    const float *query;            /* [rows][head_dim], scaled */
    const void *key[2], *value[2]; /* pages [64][head_dim]; what lies behind the last visible key may be anything */
    const void *next_key[2], *next_value[2]; /* what the next call will read, fetched by the way: */
    int next_lines[2];             /* so many cache lines of each, or 0 */
    const int *limit;              /* [rows] */
    float *maximum, *sum;          /* [rows] */
    float *acc;                    /* [rows][head_dim] */
    float *scratch;                /* fm_attend_scratch floats */
} fm_attend_args;

/* Floats of fm_attend_args.scratch. */
size_t fm_attend_scratch(int rows);

/* One value head over `tokens` (1..64) tokens; q, k, v and out have row strides, S is [key_dim][value_dim]. */
typedef struct {
    int tokens, key_dim, value_dim;
    const float *q, *k, *v; /* after convolution and SiLU, not normalised */
    size_t stride;          /* of q, k and v rows */
    const float *beta, *g;  /* [tokens]; g <= 0 is the log of the decay */
    float *state;
    float *out;     /* [tokens][value_dim] */
    float *scratch; /* fm_delta_scratch floats */
} fm_delta_args;

typedef struct {
    const char *tier;

    /* y = x (mean x^2 + eps)^-1/2 weight; x may be y. */
    void (*rmsnorm)(const float *x, const float *weight, int n, float eps, float *y);
    /* Rotates pairs (j, j + pairs) of x, j < pairs (any number), by the angles given as cosine and sine. */
    void (*rope)(float *x, const float *cosine, const float *sine, int pairs);
    /* Depthwise causal convolution over time and SiLU, in place: u[t] <- silu(sum_j weight[j] u[t - 3 + j]).
     * weight [4][pitch] and state [3][pitch] (oldest first; advanced) hold `channels` of a wider row. */
    void (*conv_silu)(float *u, size_t ld, int tokens, const float *weight, float *state, size_t pitch, int channels);
    /* Gated delta rule (arXiv 2412.06464): token by token, and 64 at once. Same result up to rounding. */
    void (*delta_recurrent)(const fm_delta_args *a);
    void (*delta_chunk)(const fm_delta_args *a);
    /* y = rmsnorm(x, weight) silu(gate). */
    void (*gated_norm)(const float *x, const float *gate, const float *weight, int n, float eps, float *y);
    void (*attend)(const fm_attend_args *a);
    /* Merges the running softmax b into a: one row, acc of n floats. */
    void (*attend_merge)(float *a_max, float *a_sum, float *a_acc, float b_max, float b_sum, const float *b_acc, int n);
    /* y = acc / sum * sigmoid(gate). */
    void (*attend_finish)(const float *acc, float sum, const float *gate, int n, float *y);
    /* y = silu(gate) up. */
    void (*swiglu)(const float *gate, const float *up, int n, float *y);
    /* y += a x. */
    void (*axpy)(float a, const float *x, int n, float *y);
    void (*to_half)(const float *x, int n, uint16_t *y); /* saturates at 65504 */
    void (*from_half)(const uint16_t *x, int n, float *y);
    void (*exp)(const float *x, int n, float *y);
} fm_ops;

/* Floats of fm_delta_args.scratch. */
size_t fm_delta_scratch(int key_dim, int value_dim);

/* The table of `tier` ("scalar", "ssse3", "avx2", "avx512"), or NULL if this build lacks it. */
const fm_ops *fm_ops_for(const char *tier);
