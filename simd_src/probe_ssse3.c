#define PROBE_NAME fm_probe_block_ssse3
#define PROBE_LANE 16
#include "probe_impl.h"
