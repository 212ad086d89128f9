#define FM_OPS fm_ops_avx2
#define FM_TIER "avx2"
#include "vec_avx2.h"

#include "ops_impl.h"
