#define FM_VISION fm_vision_ops_avx2
#define FM_TIER "avx2"
#define MR 4
#define VECS 3
#include "vec_avx2.h"

#include "vision_impl.h"
