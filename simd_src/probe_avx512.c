#define PROBE_NAME fm_probe_block_avx512
#define PROBE_LANE 64
#include "probe_impl.h"
