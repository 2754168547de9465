/* The ceiling of arithmetic: each set's product instruction on registers alone, nothing loaded and nothing stored.
 *
 * peak_*(rounds) does that many rounds and returns the multiply-adds of one; what it computes is not looked at. Enough
 * sums are in flight that the instruction's latency does not show.
 */
#ifndef BITNET_REF_PEAKS_H
#define BITNET_REF_PEAKS_H

#include "ternary_amx.h"
#include "ternary_avxvnni.h"

typedef size_t (*peak_fn)(size_t rounds);

#if defined(__x86_64__)

#define PEAK_TIMES_12(DO) \
    DO("0") DO("1") DO("2") DO("3") DO("4") DO("5") DO("6") DO("7") DO("8") DO("9") DO("10") DO("11")
#define PEAK_LOOP(BODY, rounds)                                                                                        \
    __asm__ volatile(".p2align 5\n1:\n\t" BODY "dec %0\n\tjnz 1b\n\t"                                                  \
                     : "+r"(rounds)                                                                                    \
                     :                                                                                                 \
                     : "cc", "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10",  \
                       "xmm11", "xmm12", "xmm13", "xmm14", "xmm15")

AVX2_TARGET static size_t peak_avx2(size_t rounds) {
#define PAIR(acc) "vpmaddubsw %%ymm12, %%ymm13, %%ymm14\n\tvpaddw %%ymm14, %%ymm" acc ", %%ymm" acc "\n\t"
    PEAK_LOOP(PEAK_TIMES_12(PAIR), rounds);
#undef PAIR
    return 12 * 32;
}

#if defined(BITNET_REF_HAS_AVXVNNI)
AVX2_TARGET static size_t peak_avxvnni(size_t rounds) {
#define DOT(acc) AVXVNNI_PRODUCT " %%ymm12, %%ymm13, %%ymm" acc "\n\t"
    PEAK_LOOP(PEAK_TIMES_12(DOT), rounds);
#undef DOT
    return 12 * 32;
}
#endif

AVX512_TARGET static size_t peak_avx512(size_t rounds) {
#define DOT(acc) "vpdpbusd %%zmm12, %%zmm13, %%zmm" acc "\n\t"
    PEAK_LOOP(PEAK_TIMES_12(DOT), rounds);
#undef DOT
    return 12 * 64;
}

#if defined(BITNET_REF_HAS_AMX)
static size_t peak_amx(size_t rounds) {
    amx_shape(AMX_PAIR);
    for (; rounds; rounds--) {
        AMX_DOT(0, 4, 6);
        AMX_DOT(1, 4, 7);
        AMX_DOT(2, 5, 6);
        AMX_DOT(3, 5, 7);
    }
    amx_release();
    return 4 * 16 * 16 * 64;
}
#endif

#endif
#endif
