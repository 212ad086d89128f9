/* What a pass leaves in the engine's scratch memory after its latest layer: read by calibration (observe.c).
 *
 * Call after fm_pass_layers(engine, sequence, i, i + 1, ...); valid until the engine runs again. T tokens; slots =
 * T * experts_per_token, sorted by expert, each one token's visit to one expert.
 */
typedef struct {
    int tokens, slots;
    const float *mixed;            /* [T][mixed_cols]: input of o_proj or out_proj */
    int mixed_cols;
    const float *normed;           /* [T][hidden]: input of router, experts and shared expert */
    const float *expert_inner;     /* [slots][expert_hidden]: input of the experts' down projection */
    const float *shared_inner;     /* [T][shared_hidden] */
    const int *slot_token;         /* [slots] */
    const float *slot_weight;      /* [slots]: renormalised gate weight */
} fm_observation;

void fm_observe(const fm_engine *engine, fm_observation *out);

/* expert[slots]: whose visit each slot is; norm[slots]: length of that expert's output, before its gate weight.
 * layer: the one that ran last. */
void fm_observe_experts(fm_engine *engine, int layer, int *expert, float *norm);
