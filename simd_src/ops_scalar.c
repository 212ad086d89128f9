#define FM_OPS fm_ops_scalar
#define FM_TIER "scalar"
#include "vec_scalar.h"

#include "ops_impl.h"
