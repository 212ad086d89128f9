/* router_topk: the k experts of each token and their weights
 * logits  float[T] rows, ld apart, E router logits each
 * experts int[T][k] by falling logit, the lower index first among equals
 * weights float[T][k]: softmax over all E renormalised over the chosen k, which is the softmax of the k logits
 * map     grid (T), block 128: thread e finds the rank of expert e, e + 128, ... by counting who is ahead of it
 * cost    E^2 compares per token from shared memory
 * needs   E <= 512, k <= 16, T <= 65535; 2.2 KB shared
 */
#include "fermi.h"

#define MAX_EXPERTS 512
#define MAX_CHOSEN 16
#define LEAST -3.4e38f

extern "C" __global__ void __launch_bounds__(128)
router_topk(const float *logits, int ld, int count, int k, int *experts, float *weights) {
    __shared__ float logit[MAX_EXPERTS];
    __shared__ float chosen[MAX_CHOSEN];
    logits += (long long)blockIdx.x * ld;
    for (int e = threadIdx.x; e < count; e += 128) {
        const float value = logits[e]; /* not a number comes last: every rank must be taken exactly once */
        logit[e] = value == value ? value : LEAST;
    }
    __syncthreads();
    for (int e = threadIdx.x; e < count; e += 128) {
        const float own = logit[e];
        int rank = 0;
        for (int other = 0; other < count; ++other) rank += logit[other] > own || (logit[other] == own && other < e);
        if (rank < k) {
            chosen[rank] = own;
            experts[blockIdx.x * k + rank] = e;
        }
    }
    __syncthreads();
    if ((int)threadIdx.x < k) {
        float sum = 0.0f;
        for (int i = 0; i < k; ++i) sum += exp_f32(chosen[i] - chosen[0]);
        weights[blockIdx.x * k + threadIdx.x] = exp_f32(chosen[threadIdx.x] - chosen[0]) / sum;
    }
}
