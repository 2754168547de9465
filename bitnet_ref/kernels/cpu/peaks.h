/* What the machine can do at most. For benchmarks.
 *
 * peak_*(rounds): each set's product instruction on registers alone, without loads or stores. Runs that many rounds and
 * returns the multiply-adds of one; the results are not used. Enough sums are in flight to hide the instruction's latency.
 *
 * read_words: a plain read of memory, as fast as a thread can. One word after another, without prefetch, gave 0.6 of it
 * (Emerald Rapids, 512 MB: 8 to 10 GB/s against 12 to 14 with one thread, 15 to 16 against 26 to 29 with two). */
#ifndef BITNET_REF_PEAKS_H
#define BITNET_REF_PEAKS_H

#include "ternary_amx.h"
#include "ternary_avxvnni.h"

typedef size_t (*peak_fn)(size_t rounds);

/* the sum of n words, modulo 2^64 */
static inline uint64_t read_words(const uint64_t *words, size_t n) {
    enum { STREAMS = 4, LINE = 8, AHEAD = 128 }; /* in words */
    const size_t part = n / (STREAMS * LINE) * LINE;
    uint64_t sums[LINE] = {0}, total = 0;
    for (size_t i = 0; i < part; i += LINE)
        for (size_t stream = 0; stream < STREAMS; stream++) {
            const uint64_t *line = words + stream * part + i;
            __builtin_prefetch(line + AHEAD);
            for (size_t k = 0; k < LINE; k++) sums[k] += line[k];
        }
    for (size_t k = 0; k < LINE; k++) total += sums[k];
    for (size_t i = STREAMS * part; i < n; i++) total += words[i];
    return total;
}

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
