#define FM_VISION fm_vision_ops_ssse3
#define FM_TIER "ssse3"
#define MR 4
#define VECS 2
#include "vec_ssse3.h"

#include "vision_impl.h"
