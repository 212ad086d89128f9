#define FM_F32_MATMUL fm_f32_matmul_avx512
#define ROWS 4
#define TOKENS 4
#include "vec_avx512.h"

#define FM_SCALAR_FMA(a, b, c) __builtin_fmaf(a, b, c)
#include "f32_matmul_impl.h"
