#define PROBE_NAME fm_probe_block_avx2
#define PROBE_LANE 32
#include "probe_impl.h"
