/* CPUID says what the processor has, XGETBV what the operating system saves on a context switch; a register file
 * that is not saved must not be used (Intel SDM volume 1, sections 13.5 and 15.2). */
#include "cpu.h"

#include <cpuid.h>
#include <stdint.h>

#define XCR0_AVX 0x06u    /* SSE and AVX state */
#define XCR0_AVX512 0xe6u /* and opmask, upper zmm halves, zmm16..31 */

static uint64_t xgetbv(void) {
    uint32_t low, high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return (uint64_t)high << 32 | low;
}

fm_cpu fm_cpu_detect(void) {
    fm_cpu cpu = {0};
    uint32_t a, b, c, d;
    if (!__get_cpuid(1, &a, &b, &c, &d)) return cpu;
    cpu.ssse3 = c >> 9 & 1;
    const bool fma = c >> 12 & 1, osxsave = c >> 27 & 1, f16c = c >> 29 & 1;
    const uint64_t saved = osxsave ? xgetbv() : 0;
    if ((saved & XCR0_AVX) != XCR0_AVX || !__get_cpuid_count(7, 0, &a, &b, &c, &d)) return cpu;
    cpu.avx2 = (b >> 5 & 1) && fma && f16c;
    const bool f = b >> 16 & 1, dq = b >> 17 & 1, bw = b >> 30 & 1, vl = b >> 31 & 1, vnni = c >> 11 & 1;
    cpu.avx512 = cpu.avx2 && (saved & XCR0_AVX512) == XCR0_AVX512 && f && dq && bw && vl && vnni;
    if (cpu.avx2 && __get_cpuid_count(7, 1, &a, &b, &c, &d)) cpu.avx_vnni = a >> 4 & 1;
    return cpu;
}
