#define FM_F32_MATMUL fm_f32_matmul_scalar
#define ROWS 1
#define TOKENS 1
#include "vec_scalar.h"

#define FM_SCALAR_FMA(a, b, c) ((a) * (b) + (c))
#include "f32_matmul_impl.h"
