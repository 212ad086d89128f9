#define FM_OPS fm_ops_ssse3
#define FM_TIER "ssse3"
#include "vec_ssse3.h"

#include "ops_impl.h"
