/* Matrix products on the pool: every projection that reads one input is one job, cut into tiles of rows. */
#include <string.h>

#include "model.h"

enum { MAX_PRODUCTS = 8, STREAM_ROWS = 64, VECTOR_ROWS = 512, LEAST_FLOAT_ROWS = 4, REST = 256 };

size_t fm_matrix_bytes(const fm_matrix *w) {
    const size_t weights = (size_t)w->rows * w->cols;
    return w->dtype == FM_Q4 ? weights / (FM_BLOCK_ROWS * FM_BLOCK_COLS) * FM_BLOCK_BYTES : weights * sizeof(float);
}

const void *fm_rows_at(const fm_matrix *w, int index, int row) {
    return (const char *)w->data + (size_t)index * fm_matrix_bytes(w) + fm_matrix_bytes(w) / w->rows * row;
}

/* The product with inputs of two terms: both go through the weights in one pass, and their results are added. */
static void multiply_refined(const fm_engine *e, int worker, const fm_block_q4 *w, int cols, int row0, int row1,
                             const fm_q8 *q, const int32_t *rows, int tokens, float *y, size_t ldy,
                             const void *next) {
    const int width = row1 - row0;
    const int most = fm_least(FM_SPARE_FLOATS / (2 * width), FM_EXPERT_TOKENS / 2);
    float *part = fm_worker_spare(e, worker);
    for (int begin = 0; begin < tokens; begin += most) {
        const int count = fm_least(most, tokens - begin);
        int32_t terms[FM_EXPERT_TOKENS];
        for (int t = 0; t < count; t++) {
            const int32_t row = rows ? rows[begin + t] : begin + t;
            terms[2 * t] = 2 * row;
            terms[2 * t + 1] = 2 * row + 1;
        }
        e->kernels.q4_matmul(w, cols, row0 / FM_BLOCK_ROWS, row1 / FM_BLOCK_ROWS, q, terms, 2 * count, part,
                             (size_t)width, next);
        for (int t = 0; t < count; t++) {
            const float *coarse = part + (size_t)2 * t * width, *fine = coarse + width;
            float *out = y + (size_t)(begin + t) * ldy;
            for (int i = 0; i < width; i++) out[i] = coarse[i] + fine[i];
        }
    }
}

void fm_multiply(const fm_engine *e, int worker, const fm_matrix *w, int index, int row0, int row1, const fm_input *in,
                 const int32_t *rows, int tokens, float *y, size_t ldy, const void *next) {
    const void *data = fm_rows_at(w, index, 0);
    if (w->dtype == FM_Q4 && e->refined)
        multiply_refined(e, worker, data, w->cols, row0, row1, &in->q, rows, tokens, y, ldy, next);
    else if (w->dtype == FM_Q4)
        e->kernels.q4_matmul(data, w->cols, row0 / FM_BLOCK_ROWS, row1 / FM_BLOCK_ROWS, &in->q, rows, tokens, y, ldy,
                             next);
    else
        e->kernels.f32_matmul(data, w->cols, row0, row1, in->x, in->ld, rows, tokens, y, ldy);
}

static void quantize_to(const fm_engine *e, fm_input *in, int row, int col, const float *x, int n) {
    const size_t at = (size_t)row * in->q.cols + col;
    e->kernels.quantize_q8(x, n, in->q.q + at, in->q.scale + at / FM_GROUP, in->q.correction + at / FM_GROUP);
}

void fm_quantize(const fm_engine *e, fm_input *in, int row, int col, int n) {
    if (!e->quantized) return;
    const float *x = in->x + (size_t)row * in->ld + col;
    if (!e->refined) {
        quantize_to(e, in, row, col, x, n);
        return;
    }
    quantize_to(e, in, 2 * row, col, x, n);
    for (int begin = 0; begin < n; begin += REST) {
        const int width = fm_least(REST, n - begin), at = col + begin;
        const int8_t *q = in->q.q + (size_t)2 * row * in->q.cols + at;
        const float *scale = in->q.scale + ((size_t)2 * row * in->q.cols + at) / FM_GROUP;
        float rest[REST];
        for (int i = 0; i < width; i++) rest[i] = x[begin + i] - scale[i / FM_GROUP] * (float)q[i];
        quantize_to(e, in, 2 * row + 1, at, rest, width);
    }
}

typedef struct {
    fm_engine *engine;
    const float *weight;
} norm_job;

static void norm_token(void *arg, int token, int worker) {
    (void)worker;
    const norm_job *job = arg;
    fm_engine *e = job->engine;
    const int width = e->spec.hidden;
    e->ops->rmsnorm(e->hidden + (size_t)token * width, job->weight, width, e->spec.eps,
                    e->normed.x + (size_t)token * width);
    fm_quantize(e, &e->normed, token, 0, width);
}

void fm_norm(fm_engine *e, const float *weight) {
    norm_job job = {e, weight};
    fm_parallel_for(e->pool, e->tokens, norm_token, &job);
    fm_charge(e, FM_OP_NORM, (size_t)e->spec.hidden * sizeof(float));
}

typedef struct {
    fm_engine *engine;
    const fm_input *in;
    const fm_product *products;
    int count;
    int first_item[MAX_PRODUCTS + 1], step[MAX_PRODUCTS];
} products_job;

static void product_tile(void *arg, int item, int worker) {
    const products_job *job = arg;
    const fm_engine *e = job->engine;
    int i = 0;
    while (item >= job->first_item[i + 1]) i++;
    const fm_product *p = job->products + i;
    const int row0 = (item - job->first_item[i]) * job->step[i], row1 = fm_least(row0 + job->step[i], p->matrix->rows);
    if (p->add) {
        float *tile = fm_worker_scratch(e, worker);
        for (int begin = 0; begin < e->tokens; begin += FM_EXPERT_TOKENS) {
            const int tokens = fm_least(FM_EXPERT_TOKENS, e->tokens - begin), width = row1 - row0;
            fm_multiply(e, worker, p->matrix, 0, row0, row1, job->in, e->every_token + begin, tokens, tile,
                        (size_t)width, NULL);
            for (int t = 0; t < tokens; t++)
                e->ops->axpy(1.0f, tile + (size_t)t * width, width, p->out + (size_t)(begin + t) * p->ld + row0);
        }
    } else {
        fm_multiply(e, worker, p->matrix, 0, row0, row1, job->in, NULL, e->tokens, p->out + row0, p->ld, NULL);
    }
    if (p->finish) p->finish(p->arg, row0, row1, p->out + row0);
}

/* Rows of an item: enough items that no thread waits long for the last, and long streams: a short one costs the memory its
 * start (in decode two pairs of tiles at least, if there are so many), and many tokens are laid side by side once an item.
 * A float row weighs as much as seven packed ones. */
static int item_rows(const fm_engine *e, const fm_matrix *w, int rows_of_job) {
    if (w->dtype == FM_F32 && e->quantized) {
        const int rows = w->rows / e->threads; /* a router has few: all threads should have some */
        return rows < LEAST_FLOAT_ROWS ? LEAST_FLOAT_ROWS : fm_least(rows, FM_BLOCK_ROWS);
    }
    const int share = rows_of_job / e->threads / FM_BLOCK_ROWS * FM_BLOCK_ROWS; /* of a thread */
    const int rows = share / 8 / FM_BLOCK_ROWS * FM_BLOCK_ROWS;
    const int decode = e->tokens == 1, most = decode ? VECTOR_ROWS : FM_TILE_ROWS;
    const int least = decode ? fm_least(share, STREAM_ROWS) : 0;
    return fm_most(FM_BLOCK_ROWS, fm_least(fm_most(rows, least), most));
}

size_t fm_products_bytes(const fm_product *products, int count) {
    size_t bytes = 0;
    for (int i = 0; i < count; i++) bytes += fm_matrix_bytes(products[i].matrix);
    return bytes;
}

static products_job plan(fm_engine *e, const fm_product *products, int count) {
    products_job job = {.engine = e, .products = products, .count = count};
    int rows = 0;
    for (int i = 0; i < count; i++) rows += products[i].matrix->rows;
    for (int i = 0; i < count; i++) {
        job.step[i] = item_rows(e, products[i].matrix, rows);
        job.first_item[i + 1] = job.first_item[i] + fm_blocks(products[i].matrix->rows, job.step[i]);
    }
    return job;
}

void fm_expect_products(fm_engine *e, const float *norm, const fm_product *products, int count) {
    if (!fm_tells_ahead(e)) return;
    if (norm) fm_pool_ahead(e->pool, 0, norm, (size_t)e->spec.hidden * sizeof(float));
    const products_job job = plan(e, products, count);
    for (int worker = 0, i = 0; worker < e->threads; worker++) {
        const int item = fm_pool_first_item(e->pool, job.first_item[count], worker);
        while (item >= job.first_item[i + 1]) i++;
        const fm_matrix *w = products[i].matrix;
        const int row = (item - job.first_item[i]) * job.step[i];
        fm_pool_ahead(e->pool, worker, fm_rows_at(w, 0, row), fm_matrix_bytes(w) / w->rows * (w->rows - row));
    }
}

void fm_multiply_all(fm_engine *e, const fm_input *in, const fm_product *products, int count) {
    products_job job = plan(e, products, count);
    job.in = in;
    fm_parallel_for(e->pool, job.first_item[count], product_tile, &job);
}
