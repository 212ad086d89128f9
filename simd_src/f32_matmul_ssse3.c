#define FM_F32_MATMUL fm_f32_matmul_ssse3
#define ROWS 1
#define TOKENS 2
#include "vec_ssse3.h"

#define FM_SCALAR_FMA(a, b, c) ((a) * (b) + (c))
#include "f32_matmul_impl.h"
