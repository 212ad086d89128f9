#define PROBE_NAME fm_probe_block_scalar
#define PROBE_LANE 8
#include "probe_impl.h"
