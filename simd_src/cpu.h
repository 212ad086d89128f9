/* What this processor and operating system can run. */
#ifndef FERMION_CPU_H
#define FERMION_CPU_H

#include <stdbool.h>

typedef struct {
    bool ssse3;
    bool avx2;       /* with FMA and F16C, and the operating system saves the upper halves */
    bool avx_vnni;   /* 256-bit VEX vpdpbusd */
    bool avx512;     /* F, BW, DQ, VL and VNNI, and the operating system saves the state */
} fm_cpu;

fm_cpu fm_cpu_detect(void);

#endif
