/* The operations of ops.h, written once over the vectors of vec_<tier>.h. Included by ops_<tier>.c, which defines
 * FM_OPS, the name of its table. Everything else here is static. */
#include <math.h>
#include <string.h>

#include "ops.h"

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")

/* ---- small matrix products ------------------------------------------------------------------------------------
 * Each element is one chain of multiply-adds in ascending k (gemm_nn), or one such chain a lane and the lanes added in
 * one order (gemm_nt), whatever tile it falls into. */

#define LINE 64
#define SPARSE 4

/* Memory that is wanted soon and lies far away; `next` below may be NULL. Its lines are fetched one at a time, most of
 * them with the steps of a tile: many at once would take all line buffers, and our own loads would wait for memory. */
typedef struct {
    const char *at;
    int lines;
    int sparse; /* steps are many: a line with every SPARSE-th of them */
} ahead;

INLINE void fetch(ahead *next, int most) {
    const int lines = next->lines < most ? next->lines : most;
    for (int i = 0; i < lines; i++) __builtin_prefetch(next->at + (size_t)i * LINE, 0, 2);
    next->at += (size_t)lines * LINE, next->lines -= lines;
}

INLINE void nn_step(const int rows, const int vecs, const float *a, size_t a_row, const float *b,
                    vf acc[NN_ROWS][NN_VECS]) {
    vf column[NN_VECS];
    UNROLL for (int n = 0; n < vecs; n++) column[n] = vload(b + n * VW);
    UNROLL for (int m = 0; m < rows; m++) {
        const vf scalar = vset1(a[m * a_row]);
        UNROLL for (int n = 0; n < vecs; n++) acc[m][n] = vfma(scalar, column[n], acc[m][n]);
    }
}

/* The steps, from the first one on, with which lines are fetched; returns how many that were. */
INLINE int nn_fetching_steps(const int each, const int rows, const int vecs, int depth, const float *a, size_t a_row,
                             size_t a_col, const float *b, size_t ldb, vf acc[NN_ROWS][NN_VECS], ahead *next) {
    const int lines = next->lines < depth / each ? next->lines : depth / each;
    for (int line = 0; line < lines; line++, a += each * a_col, b += each * ldb) {
        __builtin_prefetch(next->at + (size_t)line * LINE, 0, 2);
        UNROLL for (int i = 0; i < each; i++) nn_step(rows, vecs, a + i * a_col, a_row, b + i * ldb, acc);
    }
    next->at += (size_t)lines * LINE, next->lines -= lines;
    return lines * each;
}

/* How sums are merged into c: c[m] keep[m] + sum take[m]. NULL: they are added to it, c being where they start. */
typedef struct {
    const float *keep, *take; /* [rows] */
} nn_merge;

/* c[m][n] <- sum_k a[m * a_row + k * a_col] b[k][n], added or merged, a tile of `rows` x `vecs` registers. */
INLINE void nn_tile(const int rows, const int vecs, int depth, const float *a, size_t a_row, size_t a_col,
                    const float *b, size_t ldb, float *c, size_t ldc, const nn_merge *merge, int m0, ahead *next) {
    vf acc[NN_ROWS][NN_VECS];
    UNROLL for (int m = 0; m < rows; m++) {
        UNROLL for (int n = 0; n < vecs; n++) acc[m][n] = merge ? vset1(0.0f) : vload(c + m * ldc + n * VW);
    }
    int k = 0;
    if (next && next->sparse)
        k = nn_fetching_steps(SPARSE, rows, vecs, depth, a, a_row, a_col, b, ldb, acc, next);
    else if (next)
        k = nn_fetching_steps(1, rows, vecs, depth, a, a_row, a_col, b, ldb, acc, next);
    for (a += k * a_col, b += k * ldb; k < depth; k++, a += a_col, b += ldb) nn_step(rows, vecs, a, a_row, b, acc);
    UNROLL for (int m = 0; m < rows; m++) {
        UNROLL for (int n = 0; n < vecs; n++) {
            float *to = c + m * ldc + n * VW;
            if (merge)
                acc[m][n] = vfma(vset1(merge->keep[m0 + m]), vload(to), vmul(vset1(merge->take[m0 + m]), acc[m][n]));
            vstore(to, acc[m][n]);
        }
    }
}

INLINE void nn_columns(const int vecs, int rows, int depth, const float *a, size_t a_row, size_t a_col, const float *b,
                       size_t ldb, float *c, size_t ldc, const nn_merge *merge, ahead *next) {
    int m = 0;
    for (; m + NN_ROWS <= rows; m += NN_ROWS)
        nn_tile(NN_ROWS, vecs, depth, a + m * a_row, a_row, a_col, b, ldb, c + m * ldc, ldc, merge, m, next);
    for (; m < rows; m++)
        nn_tile(1, vecs, depth, a + m * a_row, a_row, a_col, b, ldb, c + m * ldc, ldc, merge, m, next);
}

INLINE void nn_product(int rows, int cols, int depth, const float *a, size_t a_row, size_t a_col, const float *b,
                       size_t ldb, float *c, size_t ldc, const nn_merge *merge, ahead *next) {
    int n = 0;
    for (; n + NN_VECS * VW <= cols; n += NN_VECS * VW)
        nn_columns(NN_VECS, rows, depth, a, a_row, a_col, b + n, ldb, c + n, ldc, merge, next);
    for (; n < cols; n += VW) nn_columns(1, rows, depth, a, a_row, a_col, b + n, ldb, c + n, ldc, merge, next);
}

static void gemm_nn(int rows, int cols, int depth, const float *a, size_t a_row, size_t a_col, const float *b,
                    size_t ldb, float *c, size_t ldc) {
    nn_product(rows, cols, depth, a, a_row, a_col, b, ldb, c, ldc, NULL, NULL);
}

INLINE void nt_step(const int rows, const int cols, const float *a, size_t lda, const float *b, size_t ldb,
                    vf acc[NT_ROWS][NT_COLS]) {
    vf right[NT_COLS];
    UNROLL for (int n = 0; n < cols; n++) right[n] = vload(b + n * ldb);
    UNROLL for (int m = 0; m < rows; m++) {
        const vf left = vload(a + m * lda);
        UNROLL for (int n = 0; n < cols; n++) acc[m][n] = vfma(left, right[n], acc[m][n]);
    }
}

/* c[m][n] = dot(a[m], b[n]), a tile of `rows` x `cols` dot products. */
INLINE void nt_tile(const int rows, const int cols, int depth, const float *a, size_t lda, const float *b, size_t ldb,
                    float *c, size_t ldc) {
    vf acc[NT_ROWS][NT_COLS];
    UNROLL for (int m = 0; m < rows; m++) {
        UNROLL for (int n = 0; n < NT_COLS; n++) acc[m][n] = vset1(0.0f);
    }
    for (int k = 0; k < depth; k += VW) nt_step(rows, cols, a + k, lda, b + k, ldb, acc);
    UNROLL for (int m = 0; m < rows; m++) {
        float sums[NT_COLS];
        vsum4(acc[m][0], acc[m][1], acc[m][2], acc[m][3], cols == NT_COLS ? c + m * ldc : sums);
        if (cols < NT_COLS) c[m * ldc] = sums[0];
    }
}

INLINE void nt_row(const int rows, int cols, int depth, const float *a, size_t lda, const float *b, size_t ldb,
                   float *c, size_t ldc) {
    int n = 0;
    for (; n + NT_COLS <= cols; n += NT_COLS)
        nt_tile(rows, NT_COLS, depth, a, lda, b + n * ldb, ldb, c + n, ldc);
    for (; n < cols; n++) nt_tile(rows, 1, depth, a, lda, b + n * ldb, ldb, c + n, ldc);
}

static void gemm_nt(int rows, int cols, int depth, const float *a, size_t lda, const float *b, size_t ldb, float *c,
                    size_t ldc) {
    int m = 0;
    for (; m + NT_ROWS <= rows; m += NT_ROWS)
        nt_row(NT_ROWS, cols, depth, a + m * lda, lda, b, ldb, c + m * ldc, ldc);
    for (; m < rows; m++) nt_row(1, cols, depth, a + m * lda, lda, b, ldb, c + m * ldc, ldc);
}

/* ---- element-wise --------------------------------------------------------------------------------------------- */

INLINE vf vsigmoid(vf x) { return vdiv(vset1(1.0f), vadd(vset1(1.0f), vexp(vsub(vset1(0.0f), x)))); }
INLINE vf vsilu(vf x) { return vmul(x, vsigmoid(x)); }

static float sum_of_squares(const float *x, int n) {
    vf sum = vset1(0.0f);
    for (int i = 0; i < n; i += VW) {
        const vf value = vload(x + i);
        sum = vfma(value, value, sum);
    }
    return vsum(sum);
}

static void scale_to(float factor, const float *x, int n, float *y) {
    const vf scale = vset1(factor);
    for (int i = 0; i < n; i += VW) vstore(y + i, vmul(scale, vload(x + i)));
}

static void rmsnorm(const float *x, const float *weight, int n, float eps, float *y) {
    const vf inverse = vset1(1.0f / sqrtf(sum_of_squares(x, n) / (float)n + eps));
    for (int i = 0; i < n; i += VW) vstore(y + i, vmul(vmul(vload(x + i), inverse), vload(weight + i)));
}

static void gated_norm(const float *x, const float *gate, const float *weight, int n, float eps, float *y) {
    const vf inverse = vset1(1.0f / sqrtf(sum_of_squares(x, n) / (float)n + eps));
    for (int i = 0; i < n; i += VW) {
        const vf normed = vmul(vmul(vload(x + i), inverse), vload(weight + i));
        vstore(y + i, vmul(normed, vsilu(vload(gate + i))));
    }
}

static void rope(float *x, const float *cosine, const float *sine, int pairs) {
    for (int j = 0; j < pairs; j++) {
        const float first = x[j], second = x[j + pairs];
        x[j] = first * cosine[j] - second * sine[j];
        x[j + pairs] = second * cosine[j] + first * sine[j];
    }
}

static void conv_silu(float *u, size_t ld, int tokens, const float *weight, float *state, size_t pitch, int channels) {
    for (int c = 0; c < channels; c += VW) {
        const vf w0 = vload(weight + c), w1 = vload(weight + pitch + c), w2 = vload(weight + 2 * pitch + c),
                 w3 = vload(weight + 3 * pitch + c);
        vf u0 = vload(state + c), u1 = vload(state + pitch + c), u2 = vload(state + 2 * pitch + c);
        for (int t = 0; t < tokens; t++) {
            const vf u3 = vload(u + t * ld + c);
            vf sum = vfma(w1, u1, vmul(w0, u0));
            sum = vfma(w3, u3, vfma(w2, u2, sum));
            vstore(u + t * ld + c, vsilu(sum));
            u0 = u1, u1 = u2, u2 = u3;
        }
        vstore(state + c, u0);
        vstore(state + pitch + c, u1);
        vstore(state + 2 * pitch + c, u2);
    }
}

static void swiglu(const float *gate, const float *up, int n, float *y) {
    for (int i = 0; i < n; i += VW) vstore(y + i, vmul(vsilu(vload(gate + i)), vload(up + i)));
}

static void axpy(float a, const float *x, int n, float *y) {
    const vf scale = vset1(a);
    for (int i = 0; i < n; i += VW) vstore(y + i, vfma(scale, vload(x + i), vload(y + i)));
}

static void to_half(const float *x, int n, uint16_t *y) {
    for (int i = 0; i < n; i += VW) vstore_half(y + i, vload(x + i));
}

static void from_half(const uint16_t *x, int n, float *y) {
    for (int i = 0; i < n; i += HALF_LANES) vwiden_half(x + i, y + i);
}

static void exp_all(const float *x, int n, float *y) {
    for (int i = 0; i < n; i += VW) vstore(y + i, vexp(vload(x + i)));
}

INLINE float exp_one(float x) {
    float lanes[VW];
    vstore(lanes, vexp(vset1(x)));
    return lanes[0];
}

/* ---- attention ------------------------------------------------------------------------------------------------ */

/* Scores of one row become probabilities relative to their maximum, which is returned with their sum; hidden ones
 * become 0. `padded` scores are looked at: any more would add zeros to the sum, which change nothing. */
static float soften_row(float *score, int limit, int padded, float *sum) {
    for (int j = limit; j < padded; j++) score[j] = -INFINITY;
    vf top = vload(score);
    for (int j = VW; j < padded; j += VW) top = vmax(top, vload(score + j));
    const float maximum = vhmax(top);
    const vf shift = vset1(maximum);
    vf total = vset1(0.0f);
    for (int j = 0; j < padded; j += VW) {
        const vf p = vexp(vsub(vload(score + j), shift));
        vstore(score + j, p);
        total = vadd(total, p);
    }
    *sum = vsum(total);
    return maximum;
}

/* Merges the span's sums as attend_merge does, all rows at once; keep and take are what acc is still to be merged by. A
 * row that sees nothing keeps what it has. */
static void merge_sums(const fm_attend_args *a, const float *maximum, const float *sum, float *keep, float *take) {
    for (int r = 0; r < a->rows; r++) {
        const int sees = a->limit[r] > 0;
        const float before = a->maximum[r], after = sees && maximum[r] > before ? maximum[r] : before;
        keep[r] = sees ? before - after : 0.0f;
        take[r] = sees ? maximum[r] - after : -INFINITY;
        a->maximum[r] = after;
    }
    exp_all(keep, (int)FM_ATTEND_PADDED(a->rows), keep);
    exp_all(take, (int)FM_ATTEND_PADDED(a->rows), take);
    for (int r = 0; r < a->rows; r++)
        if (a->limit[r] > 0) a->sum[r] = a->sum[r] * keep[r] + sum[r] * take[r];
}

/* Dimensions first.. of `depth` of the keys of one page, as floats, transposed: [depth][64]. */
INLINE void load_keys(const fm_attend_args *a, const void *page, int keys, int first, int depth, float *to,
                      ahead *next) {
    if (!a->half) {
        const float *from = (const float *)page + first;
        for (int j = 0; j < keys; j++, from += a->head_dim)
            for (int i = 0; i < depth; i++) to[i * FM_PAGE_TOKENS + j] = from[i];
        return;
    }
    const uint16_t *from = (const uint16_t *)page + first;
    for (int j = 0; j < keys; j += TURN, from += (size_t)TURN * a->head_dim, to += TURN)
        for (int i = 0; i < depth; i += TURN) {
            vturn_half(from + i, a->head_dim, to + i * FM_PAGE_TOKENS, FM_PAGE_TOKENS);
            if (i % 16 == 0) fetch(next, TURN / 8);
        }
}

/* Columns first.. of `cols` of the values of one page, as floats: [keys][cols]. */
INLINE void load_values(const fm_attend_args *a, const void *page, int keys, int first, int cols, float *to,
                        ahead *next) {
    if (!a->half) {
        const float *from = (const float *)page + first;
        for (int j = 0; j < keys; j++, from += a->head_dim, to += cols) memcpy(to, from, (size_t)cols * sizeof(float));
        return;
    }
    const uint16_t *from = (const uint16_t *)page + first;
    for (int j = 0; j < keys; j++, from += a->head_dim, to += cols) {
        for (int i = 0; i < cols; i += HALF_LANES) vwiden_half(from + i, to + i);
        fetch(next, j % 2);
    }
}

INLINE int keys_of_page(int keys, int page) {
    keys -= page * FM_PAGE_TOKENS;
    return keys < 0 ? 0 : keys < FM_PAGE_TOKENS ? keys : FM_PAGE_TOKENS;
}

/* Both products find the keys' side in first-level cache for all rows, widened once: keys some dimensions at a time and
 * transposed, so that no sum crosses lanes; values some columns at a time. The next span comes from far away meanwhile:
 * most of it with the steps of the tiles, the rest while halves are widened. */
static void attend(const fm_attend_args *a) {
    const int width = a->head_dim;
    int keys = 0;
    for (int r = 0; r < a->rows; r++) keys = a->limit[r] > keys ? a->limit[r] : keys;
    if (keys == 0) return;
    const int padded_keys = (int)FM_ATTEND_PADDED(keys);
    /* A column of tiles takes `width` steps a row of tiles, twice as many lines come. */
    const int sparse = a->rows / NN_ROWS * (FM_PAGE_TOKENS / (NN_VECS * VW)) >= 2 * SPARSE;
    const size_t padded_rows = FM_ATTEND_PADDED(a->rows);
    float *score = a->scratch, *maximum = score + (size_t)a->rows * FM_SPAN_TOKENS, *sum = maximum + padded_rows;
    float *keep = sum + padded_rows, *take = keep + padded_rows, *wide = take + padded_rows;

    for (int r = 0; r < a->rows; r++) memset(score + (size_t)r * FM_SPAN_TOKENS, 0, padded_keys * sizeof(float));
    for (int page = 0; page < FM_SPAN_PAGES; page++) {
        const int count = (int)FM_ATTEND_PADDED(keys_of_page(keys, page));
        ahead next = {a->next_key[page], a->next_lines[page], sparse};
        for (int first = 0; count && first < width; first += FM_ATTEND_DEPTH) {
            const int depth = width - first < FM_ATTEND_DEPTH ? width - first : FM_ATTEND_DEPTH;
            load_keys(a, a->key[page], count, first, depth, wide, &next);
            nn_product(a->rows, count, depth, a->query + first, width, 1, wide, FM_PAGE_TOKENS,
                       score + page * FM_PAGE_TOKENS, FM_SPAN_TOKENS, NULL, &next);
        }
    }
    for (int r = 0; r < a->rows; r++) {
        float *row = score + (size_t)r * FM_SPAN_TOKENS;
        if (a->limit[r] > 0)
            maximum[r] = soften_row(row, a->limit[r], padded_keys, sum + r);
        else
            memset(row, 0, padded_keys * sizeof(float));
    }
    merge_sums(a, maximum, sum, keep, take);
    const nn_merge merge = {keep, take};
    ahead next[FM_SPAN_PAGES];
    for (int page = 0; page < FM_SPAN_PAGES; page++)
        next[page] = (ahead){a->next_value[page], a->next_lines[page], sparse};
    for (int col = 0; col < width; col += FM_ATTEND_COLUMNS) {
        const int cols = width - col < FM_ATTEND_COLUMNS ? width - col : FM_ATTEND_COLUMNS;
        ahead *now = next[0].lines > 0 ? next : next + 1;
        for (int page = 0; page < FM_SPAN_PAGES; page++)
            load_values(a, a->value[page], keys_of_page(keys, page), col, cols, wide + page * FM_PAGE_TOKENS * cols,
                        now);
        nn_product(a->rows, cols, keys, score, FM_SPAN_TOKENS, 1, wide, cols, a->acc + col, width, &merge, now);
    }
}

static void attend_merge(float *a_max, float *a_sum, float *a_acc, float b_max, float b_sum, const float *b_acc,
                         int n) {
    const float new_max = b_max > *a_max ? b_max : *a_max;
    const float a_fade = exp_one(*a_max - new_max), b_fade = exp_one(b_max - new_max);
    *a_max = new_max;
    *a_sum = *a_sum * a_fade + b_sum * b_fade;
    const vf left = vset1(a_fade), right = vset1(b_fade);
    for (int i = 0; i < n; i += VW)
        vstore(a_acc + i, vfma(left, vload(a_acc + i), vmul(right, vload(b_acc + i))));
}

static void attend_finish(const float *acc, float sum, const float *gate, int n, float *y) {
    const vf inverse = vset1(1.0f / sum);
    for (int i = 0; i < n; i += VW)
        vstore(y + i, vmul(vmul(vload(acc + i), inverse), vsigmoid(vload(gate + i))));
}

/* ---- gated delta rule ----------------------------------------------------------------------------------------- */

static void l2norm(const float *x, int n, float factor, float *y) {
    scale_to(factor / sqrtf(sum_of_squares(x, n) + 1e-6f), x, n, y);
}

/* One token on `vecs` registers of columns of S: S <- decay S; r = beta (v - S'k); S <- S + k r'; out = S'q. The
 * columns do not touch each other. The first pass reads S without storing it, the second finds it in cache. */
INLINE void delta_columns(const int vecs, int key_dim, size_t pitch, float *state, const float *q, const float *k,
                          const float *v, float decay, float beta, float *out) {
    vf seen[8], result[8];
    UNROLL for (int n = 0; n < vecs; n++) seen[n] = vset1(0.0f), result[n] = vset1(0.0f);
    for (int i = 0; i < key_dim; i++) {
        const vf key = vset1(k[i]);
        UNROLL for (int n = 0; n < vecs; n++) seen[n] = vfma(key, vload(state + i * pitch + n * VW), seen[n]);
    }
    const vf fade = vset1(decay), rate = vset1(beta);
    UNROLL for (int n = 0; n < vecs; n++)
        seen[n] = vmul(rate, vsub(vload(v + n * VW), vmul(fade, seen[n])));
    for (int i = 0; i < key_dim; i++) {
        const vf key = vset1(k[i]), query = vset1(q[i]);
        UNROLL for (int n = 0; n < vecs; n++) {
            const vf s = vfma(key, seen[n], vmul(fade, vload(state + i * pitch + n * VW)));
            vstore(state + i * pitch + n * VW, s);
            result[n] = vfma(query, s, result[n]);
        }
    }
    UNROLL for (int n = 0; n < vecs; n++) vstore(out + n * VW, result[n]);
}

#define DELTA_VECS (VW == 16 ? 8 : 4) /* accumulators and results must fit the registers */

static void delta_recurrent(const fm_delta_args *a) {
    float *q = a->scratch, *k = q + a->key_dim;
    for (int t = 0; t < a->tokens; t++) {
        l2norm(a->q + t * a->stride, a->key_dim, 1.0f / sqrtf((float)a->key_dim), q);
        l2norm(a->k + t * a->stride, a->key_dim, 1.0f, k);
        const float decay = exp_one(a->g[t]);
        const float *v = a->v + t * a->stride;
        float *out = a->out + (size_t)t * a->value_dim;
        int n = 0;
        for (; n + DELTA_VECS * VW <= a->value_dim; n += DELTA_VECS * VW)
            delta_columns(DELTA_VECS, a->key_dim, a->value_dim, a->state + n, q, k, v + n, decay, a->beta[t], out + n);
        for (; n < a->value_dim; n += VW)
            delta_columns(1, a->key_dim, a->value_dim, a->state + n, q, k, v + n, decay, a->beta[t], out + n);
    }
}

/* scores[i][j] <- scale_i exp(G_i - G_j) scores[i][j] for j < i + inclusive, else 0. `scale` NULL: 1. Only the
 * exponential of a difference is taken, since e^-G alone overflows; and the difference in double, since after one
 * strong decay the small ones that follow would drown in G. */
static void decay_mask(float *scores, int tokens, const double *cumulative, const float *scale, int inclusive) {
    float difference[FM_DELTA_CHUNK];
    for (int i = 0; i < tokens; i++) {
        const int visible = i + inclusive;
        float *row = scores + (size_t)i * FM_DELTA_CHUNK;
        for (int j = 0; j < visible; j++) difference[j] = (float)(cumulative[i] - cumulative[j]);
        for (int j = visible; j < FM_DELTA_CHUNK; j++) difference[j] = 0.0f, row[j] = 0.0f;
        const vf factor = vset1(scale ? scale[i] : 1.0f);
        for (int j = 0; j < visible; j += VW)
            vstore(row + j, vmul(vmul(factor, vexp(vload(difference + j))), vload(row + j)));
    }
}

/* x <- A^-1 x for A = I - minus_lower (strictly lower triangular), by blocks of rows: all earlier blocks at once, then
 * the rows of the block one after another. */
static void substitute(int rows, int cols, const float *minus_lower, float *x) {
    enum { BLOCK = 16 };
    for (int begin = 0; begin < rows; begin += BLOCK) {
        const int end = begin + BLOCK < rows ? begin + BLOCK : rows;
        gemm_nn(end - begin, cols, begin, minus_lower + (size_t)begin * FM_DELTA_CHUNK, FM_DELTA_CHUNK, 1, x, cols,
                x + (size_t)begin * cols, cols);
        for (int i = begin + 1; i < end; i++)
            gemm_nn(1, cols, i - begin, minus_lower + (size_t)i * FM_DELTA_CHUNK + begin, FM_DELTA_CHUNK, 1,
                    x + (size_t)begin * cols, cols, x + (size_t)i * cols, cols);
    }
}

/* The chunk form (design: G cumulative log decay, B = diag(beta), all logs differences):
 *   A = I + strictLower((B K K') exp(G_i - G_j));  [U | W] = A^-1 [B V | B e^G K];  N = U - W S
 *   out = (e^G Q) S + lower((Q K') exp(G_i - G_j)) N;  S <- e^(G_last) S + (e^(G_last - G) K)' N
 * W is kept negated. */
static void delta_chunk(const fm_delta_args *a) {
    const int tokens = a->tokens, dk = a->key_dim, dv = a->value_dim, width = dv + dk;
    float *q = a->scratch, *k = q + FM_DELTA_CHUNK * dk, *scaled = k + FM_DELTA_CHUNK * dk;
    float *x = scaled + FM_DELTA_CHUNK * dk;        /* [tokens][dv + dk] = [U | -W] */
    float *lower = x + (size_t)FM_DELTA_CHUNK * width, *scores = lower + FM_DELTA_CHUNK * FM_DELTA_CHUNK;
    float *grown = scores + FM_DELTA_CHUNK * FM_DELTA_CHUNK, *minus_beta = grown + FM_DELTA_CHUNK;
    double cumulative[FM_DELTA_CHUNK] = {0}, sum = 0.0;
    for (int t = 0; t < tokens; t++) {
        l2norm(a->q + t * a->stride, dk, 1.0f / sqrtf((float)dk), q + (size_t)t * dk);
        l2norm(a->k + t * a->stride, dk, 1.0f, k + (size_t)t * dk);
        sum += a->g[t];
        cumulative[t] = sum;
        grown[t] = exp_one((float)sum);
        minus_beta[t] = -a->beta[t];
        scale_to(a->beta[t], a->v + t * a->stride, dv, x + (size_t)t * width);
        scale_to(minus_beta[t] * grown[t], k + (size_t)t * dk, dk, x + (size_t)t * width + dv);
    }
    gemm_nt(tokens, tokens, dk, k, dk, k, dk, lower, FM_DELTA_CHUNK);
    decay_mask(lower, tokens, cumulative, minus_beta, 0);
    gemm_nt(tokens, tokens, dk, q, dk, k, dk, scores, FM_DELTA_CHUNK);
    decay_mask(scores, tokens, cumulative, NULL, 1);

    substitute(tokens, width, lower, x);
    gemm_nn(tokens, dv, dk, x + dv, width, 1, a->state, dv, x, width); /* N = U - W S */

    for (int t = 0; t < tokens; t++) scale_to(grown[t], q + (size_t)t * dk, dk, scaled + (size_t)t * dk);
    memset(a->out, 0, (size_t)tokens * dv * sizeof(float));
    gemm_nn(tokens, dv, dk, scaled, dk, 1, a->state, dv, a->out, dv);
    gemm_nn(tokens, dv, tokens, scores, FM_DELTA_CHUNK, 1, x, width, a->out, dv);

    for (int t = 0; t < tokens; t++)
        scale_to(exp_one((float)(sum - cumulative[t])), k + (size_t)t * dk, dk, scaled + (size_t)t * dk);
    scale_to(grown[tokens - 1], a->state, dk * dv, a->state);
    gemm_nn(dk, dv, tokens, scaled, 1, dk, x, width, a->state, dv);
}

const fm_ops FM_OPS = {
    .tier = FM_TIER,
    .rmsnorm = rmsnorm,
    .rope = rope,
    .conv_silu = conv_silu,
    .delta_recurrent = delta_recurrent,
    .delta_chunk = delta_chunk,
    .gated_norm = gated_norm,
    .attend = attend,
    .attend_merge = attend_merge,
    .attend_finish = attend_finish,
    .swiglu = swiglu,
    .axpy = axpy,
    .to_half = to_half,
    .from_half = from_half,
    .exp = exp_all,
};
