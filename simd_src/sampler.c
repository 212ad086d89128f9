/* Sampling that stays cheap at a vocabulary of 250,000: a few passes to select or to weigh, and next to no sorting. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "model.h"

#include "sampler_api.h"

/* Whether a goes before b: larger first, lower id among equals. */
static int before(const fm_candidate *a, const fm_candidate *b) {
    return a->value > b->value || (a->value == b->value && a->id < b->id);
}

static int compare(const void *a, const void *b) { return before(a, b) ? -1 : 1; }

/* heap[0] is the one that goes last; restores that after heap[0] changed. */
static void sift_down(fm_candidate *heap, int count) {
    const fm_candidate moved = heap[0];
    int at = 0;
    for (;;) {
        int child = 2 * at + 1;
        if (child >= count) break;
        if (child + 1 < count && before(heap + child, heap + child + 1)) child++;
        if (!before(&moved, heap + child)) break;
        heap[at] = heap[child];
        at = child;
    }
    heap[at] = moved;
}

/* The k first of all logits, sorted. */
static int select_top(const float *logits, int n, int k, fm_candidate *out) {
    int count = 0;
    for (; count < k; count++) out[count] = (fm_candidate){logits[count], count};
    qsort(out, (size_t)k, sizeof(*out), compare);
    for (int i = 0; i < k / 2; i++) { /* reversed: a heap whose root goes last */
        const fm_candidate swap = out[i];
        out[i] = out[k - 1 - i];
        out[k - 1 - i] = swap;
    }
    for (int id = k; id < n; id++) {
        if (!(logits[id] > out[0].value)) continue;
        out[0] = (fm_candidate){logits[id], id};
        sift_down(out, k);
    }
    qsort(out, (size_t)k, sizeof(*out), compare);
    return k;
}

/* weight[id] = exp((logits[id] - top) / temperature); returns their sum. */
static double weigh(const fm_engine *e, const float *logits, int n, float top, float temperature, float *weight) {
    enum { BLOCK = 1024 };
    const float inverse = 1.0f / temperature;
    double sum = 0.0;
    for (int begin = 0; begin < n; begin += BLOCK) {
        const int count = fm_least(BLOCK, n - begin);
        float exponent[BLOCK], part = 0.0f;
        for (int i = 0; i < count; i++) exponent[i] = (logits[begin + i] - top) * inverse;
        for (int i = count; i % 16; i++) exponent[i] = -INFINITY;
        e->ops->exp(exponent, (count + 15) / 16 * 16, exponent);
        for (int i = 0; i < count; i++) part += weight[begin + i] = exponent[i];
        sum += part;
    }
    return sum;
}

/* The last token that belongs to the nucleus: weights sum to `target` with it and not without. Weights are at most 1,
 * so the upper half of their bits sorts them into some 16,000 bins; only the bin where the sum is reached is sorted. */
static fm_candidate nucleus_end(const fm_engine *e, int n, double target) {
    enum { BINS = 0x3f81 }; /* the upper bits of 1.0f, and below */
    double sum[BINS] = {0};
    const float *weight = e->weight;
    for (int id = 0; id < n; id++) {
        uint32_t bits;
        memcpy(&bits, weight + id, sizeof bits);
        sum[bits >> 16] += weight[id];
    }
    int bin = BINS - 1;
    double above = 0.0;
    for (; bin > 0 && above + sum[bin] < target; bin--) above += sum[bin];
    int count = 0;
    for (int id = 0; id < n; id++) {
        uint32_t bits;
        memcpy(&bits, weight + id, sizeof bits);
        if ((int)(bits >> 16) == bin) e->candidates[count++] = (fm_candidate){weight[id], id};
    }
    qsort(e->candidates, (size_t)count, sizeof(*e->candidates), compare);
    int last = 0;
    for (double reached = above + e->candidates[0].value; reached < target && last + 1 < count;)
        reached += e->candidates[++last].value;
    return e->candidates[last];
}

/* From all tokens, whose weights are in e->weight and sum to `total`. */
static int pick_from_all(const fm_engine *e, int n, double total, float top_p, float min_p, double uniform) {
    fm_candidate end = {0.0f, n};
    if (top_p < 1.0f) end = nucleus_end(e, n, (double)top_p * total);
    const float *weight = e->weight;
    const float least = end.value > min_p ? end.value : min_p;
#define IS_KEPT(id) (weight[id] >= least && (weight[id] > end.value || (id) <= end.id))
    if (least > 0.0f) {
        total = 0.0;
        for (int id = 0; id < n; id++) total += IS_KEPT(id) ? weight[id] : 0.0f;
    }
    int last = 0;
    double seen = 0.0;
    for (int id = 0; id < n; id++) {
        if (!(weight[id] > 0.0f) || !IS_KEPT(id)) continue;
        seen += weight[id];
        last = id;
        if (seen > uniform * total) break;
    }
#undef IS_KEPT
    return last;
}

/* From `count` sorted candidates, whose values are logits. */
static int pick_from_few(fm_candidate *list, int count, float temperature, float top_p, float min_p, double uniform) {
    const float top = list[0].value;
    double total = 0.0, nucleus = 0.0, kept = 0.0, seen = 0.0;
    for (int i = 0; i < count; i++) total += list[i].value = expf((list[i].value - top) / temperature);
    int end = 0;
    for (; end < count && (end == 0 || (nucleus < (double)top_p * total && list[end].value >= min_p)); end++)
        kept = nucleus += list[end].value;
    for (int i = 0; i < end; i++) {
        seen += list[i].value;
        if (seen > uniform * kept) return list[i].id;
    }
    return list[end - 1].id;
}

int fm_sample(fm_engine *e, const float *logits, int n, float temperature, int top_k, float top_p, float min_p,
              double uniform) {
    if (top_k > 0 && top_k < n) {
        const int count = select_top(logits, n, top_k, e->candidates);
        return pick_from_few(e->candidates, count, temperature, top_p, min_p, uniform);
    }
    float top = logits[0];
    for (int id = 1; id < n; id++) top = logits[id] > top ? logits[id] : top;
    const double total = weigh(e, logits, n, top, temperature, e->weight);
    return pick_from_all(e, n, total, top_p, min_p, uniform);
}
