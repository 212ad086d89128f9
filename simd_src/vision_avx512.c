#define FM_VISION fm_vision_ops_avx512
#define FM_TIER "avx512"
#define MR 8
#define VECS 3
#include "vec_avx512.h"

#include "vision_impl.h"
