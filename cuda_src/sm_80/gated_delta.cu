/* gated_delta_* for cards with more registers: the same arithmetic in the same order, more loads under way at once */
#define LOADS_AHEAD 8
#include "../gated_delta.cu"
