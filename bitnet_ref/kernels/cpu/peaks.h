/* The peak rate of arithmetic: each set's product instruction on registers alone, without loads or stores.
 *
 * peak_*(rounds) runs that many rounds and returns the multiply-adds of one; the results are not used. Enough sums are
 * in flight to hide the instruction's latency. */
#ifndef BITNET_REF_PEAKS_H
#define BITNET_REF_PEAKS_H

#include "ternary_amx.h"
#include "ternary_avxvnni.h"

typedef size_t (*peak_fn)(size_t rounds);

#if defined(__x86_64__)

#define PEAK_TIMES_12(DO) \
    DO("0") DO("1") DO("2") DO("3") DO("4") DO("5") DO("6") DO("7") DO("8") DO("9") DO("10") DO("11")
/* defines NAME: 12 times the instructions of DO(register number), each with `products` products */
#define PEAK(NAME, TARGET, DO, products)                                                                               \
    TARGET static size_t NAME(size_t rounds) {                                                                         \
        __asm__ volatile(".p2align 5\n1:\n\t" PEAK_TIMES_12(DO) "dec %0\n\tjnz 1b\n\t"                                  \
                         : "+r"(rounds)                                                                                \
                         :                                                                                             \
                         : "cc", XMM_0_TO_15);                                                                         \
        return 12 * products;                                                                                          \
    }
#define PEAK_AVX2(acc) "vpmaddubsw %%ymm12, %%ymm13, %%ymm14\n\tvpaddw %%ymm14, %%ymm" acc ", %%ymm" acc "\n\t"
#define PEAK_AVXVNNI(acc) AVXVNNI_PRODUCT " %%ymm12, %%ymm13, %%ymm" acc "\n\t"
#define PEAK_AVX512(acc) "vpdpbusd %%zmm12, %%zmm13, %%zmm" acc "\n\t"
PEAK(peak_avx2, AVX2_TARGET, PEAK_AVX2, 32)
#if defined(BITNET_REF_HAS_AVXVNNI)
PEAK(peak_avxvnni, AVX2_TARGET, PEAK_AVXVNNI, 32)
#endif
PEAK(peak_avx512, AVX512_TARGET, PEAK_AVX512, 64)

#if defined(BITNET_REF_HAS_AMX)
static size_t peak_amx(size_t rounds) {
    amx_set_tiles(AMX_PAIR);
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
