/* Sampling that stays cheap at a vocabulary of 250,000: one pass to select or to weigh, and sorting only of what may
 * be drawn. */
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

/* Sorted candidates that certainly hold the nucleus: all weights above a bound, lowered until they reach `target`. */
static int gather_nucleus(const float *weight, int n, double target, fm_candidate *out) {
    for (float bound = 0.0625f;; bound *= 0.0625f) {
        if (bound < 1e-30f) bound = 0.0f;
        int count = 0;
        double sum = 0.0;
        for (int id = 0; id < n; id++) {
            if (!(weight[id] > bound)) continue;
            out[count++] = (fm_candidate){weight[id], id};
            sum += weight[id];
        }
        if (sum >= target || bound == 0.0f) {
            qsort(out, (size_t)count, sizeof(*out), compare);
            return count;
        }
    }
}

static int pick(const fm_candidate *list, int count, double uniform) {
    double sum = 0.0, seen = 0.0;
    for (int i = 0; i < count; i++) sum += list[i].value;
    for (int i = 0; i < count; i++) {
        seen += list[i].value;
        if (seen > uniform * sum) return list[i].id;
    }
    return list[count - 1].id;
}

int fm_sample(fm_engine *e, const float *logits, int n, float temperature, int top_k, float top_p, float min_p,
              double uniform) {
    fm_candidate *list = e->candidates;
    float top = logits[0];
    int count = 0;
    double total = 0.0;
    if (top_k > 0 && top_k < n) {
        count = select_top(logits, n, top_k, list);
        top = list[0].value;
        for (int i = 0; i < count; i++) total += list[i].value = expf((list[i].value - top) / temperature);
    } else {
        for (int id = 1; id < n; id++) top = logits[id] > top ? logits[id] : top;
        total = weigh(e, logits, n, top, temperature, e->weight);
        if (top_p < 1.0f) {
            count = gather_nucleus(e->weight, n, (double)top_p * total, list);
        } else {
            for (int id = 0; id < n; id++)
                if (e->weight[id] > 0.0f) list[count++] = (fm_candidate){e->weight[id], id};
        }
    }
    if (top_p < 1.0f) {
        double sum = 0.0;
        int kept = 0;
        while (kept < count && (kept == 0 || sum < (double)top_p * total)) sum += list[kept++].value;
        count = kept;
    }
    int kept = 0;
    for (int i = 0; i < count; i++)
        if (list[i].value >= min_p) list[kept++] = list[i]; /* the largest weight is 1 */
    return pick(list, kept, uniform);
}
