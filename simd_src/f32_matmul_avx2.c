#define FM_F32_MATMUL fm_f32_matmul_avx2
#define ROWS 2
#define TOKENS 2
#include "vec_avx2.h"

#define FM_SCALAR_FMA(a, b, c) __builtin_fmaf(a, b, c)
#include "f32_matmul_impl.h"
