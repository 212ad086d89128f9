#define FM_OPS fm_ops_avx512
#define FM_TIER "avx512"
#include "vec_avx512.h"

#include "ops_impl.h"
