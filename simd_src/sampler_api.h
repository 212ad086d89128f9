/* Drawing one token from logits (sampler.c). Prototypes only, read by the compiler and by the Python binding. */

/* The id drawn from logits [n] (n <= the model's vocabulary; -inf: impossible; at least one is finite).
 * temperature > 0; top_k 0, top_p 1 and min_p 0 switch a filter off; filters act in this order, each on what the one
 * before left: the k largest; the fewest of the largest whose probabilities reach top_p; those of at least min_p times
 * the largest. Among equals the lower id comes first. uniform in [0, 1) picks from what is left. */
int fm_sample(fm_engine *engine, const float *logits, int n, float temperature, int top_k, float top_p, float min_p,
              double uniform);
