/* observe: calibration's view of the last layer of a pass. Adds nothing to the forward pass itself. */
#include <math.h>
#include <string.h>

#include "model.h"

#include "observe_api.h"

void fm_observe(const fm_engine *e, fm_observation *out) {
    *out = (fm_observation){
        .tokens = e->tokens,
        .slots = e->tokens * e->spec.experts_per_token,
        .mixed = e->mixed.x,
        .mixed_cols = (int)e->mixed.ld,
        .normed = e->normed.x,
        .expert_inner = e->expert_inner.x,
        .shared_inner = e->shared_inner.x,
        .slot_token = e->slot_token,
        .slot_weight = e->slot_weight,
    };
}

typedef struct {
    fm_engine *engine;
    const fm_matrix *down;
    int *expert;
    float *norm;
} norms_job;

/* One expert: its visits, FM_EXPERT_TOKENS at a time, all rows of down in tiles; squares are summed in double. */
static void expert_norms(void *arg, int item, int worker) {
    const norms_job *job = arg;
    fm_engine *e = job->engine;
    const fm_expert_group *g = e->group + item;
    float *part = fm_worker_scratch(e, worker);
    for (int begin = g->begin; begin < g->end; begin += FM_EXPERT_TOKENS) {
        const int count = fm_least(FM_EXPERT_TOKENS, g->end - begin);
        double sum[FM_EXPERT_TOKENS] = {0};
        for (int row0 = 0; row0 < e->spec.hidden; row0 += FM_TILE_ROWS) {
            const int width = fm_least(FM_TILE_ROWS, e->spec.hidden - row0);
            fm_multiply(e, worker, job->down, g->expert, row0, row0 + width, &e->expert_inner, e->every_token + begin,
                        count, part, (size_t)width, NULL);
            for (int i = 0; i < count; i++)
                for (int j = 0; j < width; j++) sum[i] += (double)part[i * width + j] * part[i * width + j];
        }
        for (int i = 0; i < count; i++) {
            job->expert[begin + i] = g->expert;
            job->norm[begin + i] = (float)sqrt(sum[i]);
        }
    }
}

void fm_observe_experts(fm_engine *e, int layer, int *expert, float *norm) {
    norms_job job = {e, &e->spec.layer[layer].experts_down, expert, norm};
    fm_parallel_for(e->pool, e->groups, expert_norms, &job);
}
