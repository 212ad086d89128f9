/* The quantiser of the converter (quantizer.c): prototypes only, read by the compiler and by the Python binding.
 *
 * Rows are float32 [rows][cols], rows % 16 == 0, cols % 64 == 0, all values finite and |w| <= 65504.
 * blocks receives rows/16 * cols/64 * 576 bytes, layout of blocks.h. Both are pure functions of their arguments:
 * callers may run them on as many threads as they like.
 */

/* Scale search: each group of 32 gets the fp16 scale and nibbles with the least sum importance[k] (w - s q)^2.
 * importance: [cols], >= 0, or NULL for all equal. */
void fm_quantize_search(const float *weights, int rows, int cols, const float *importance, unsigned char *blocks);

/* The same with second-order error feedback (GPTQ, arXiv 2210.17323): what rounding column k loses is made up for
 * by the columns after it. weights is overwritten. factor: upper Cholesky factor U of the inverse of the damped
 * input correlation, U^T U = H^-1, row-major float32 [cols][cols], diagonal > 0. */
void fm_quantize_feedback(float *weights, int rows, int cols, const float *factor, unsigned char *blocks);

/* Improves packed blocks: nibble by nibble, with scales fixed, every change that lowers the error of outputs
 * e^T H e, e = row of blocks - row of weights; at most `sweeps` times over all columns. hessian: the damped input
 * correlation H, symmetric, row-major float32 [cols][cols], diagonal > 0. scratch: 16 * cols floats. */
void fm_quantize_refine(const float *weights, int rows, int cols, const float *hessian, int sweeps, float *scratch,
                        unsigned char *blocks);
