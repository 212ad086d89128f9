#define FM_VISION fm_vision_ops_scalar
#define FM_TIER "scalar"
#define MR 4
#define VECS 4
#include "vec_scalar.h"

#include "vision_impl.h"
