/* The ternary product with AVX-VNNI, the 256-bit form of AVX-512's vpdpbusd, for client processors without AVX-512: 32
 * unsigned codes times 32 signed activations, groups of 4 products added into 8 lanes of int32.
 *
 * Plain version: ternary_scalar.h. Like ternary_avx2.h, with one instruction per product and nothing to widen.
 * No processor with AVX-VNNI was available: tests/kernels runs the same text with AVX-512VL's encoding of the
 * instruction (BITNET_REF_AVXVNNI_AS_EVEX), which differs in the prefix only. Measured so, as in ternary_avx512.h, at
 * about 2.5 GHz, where the limit is 160 G multiply-adds/s: 1 token 68 to 76 - 6 tokens 118 - 64 tokens 150 - 512 tokens
 * 156. */
#ifndef BITNET_REF_TERNARY_AVXVNNI_H
#define BITNET_REF_TERNARY_AVXVNNI_H

#include "ternary_ymm.h"

/* compilers whose assemblers know the instruction */
#if defined(__x86_64__) && ((defined(__clang__) && __clang_major__ >= 12) || (!defined(__clang__) && __GNUC__ >= 11))
#define BITNET_REF_HAS_AVXVNNI 1

#if defined(BITNET_REF_AVXVNNI_AS_EVEX)
#define AVXVNNI_PRODUCT "%{evex%} vpdpbusd"
#else
#define AVXVNNI_PRODUCT "%{vex%} vpdpbusd"
#endif

/* In place, in assembly: with the intrinsic GCC 12 copies the accumulator first. */
AVX2_INLINE __m256i avxvnni_dot(__m256i sum, __m256i codes, __m256i xs) {
    __asm__(AVXVNNI_PRODUCT " %2, %1, %0" : "+x"(sum) : "x"(codes), "x"(xs));
    return sum;
}

AVX2_TARGET static void avxvnni_one(const uint8_t *panel, size_t n_blocks, const int8_t *x, int32_t x_sum, int32_t *acc,
                                    size_t rows) {
    __m256i sum[8];
    for (int h = 0; h < 8; h++) sum[h] = _mm256_set1_epi32(-x_sum);
    for (size_t b = 0; b < n_blocks; b++) {
        const uint8_t *block = panel + b * BLOCK_BYTES;
        __m256i xs[4];
        for (int s = 0; s < 4; s++) xs[s] = avx2_word(x + b * BLOCK_K + 4 * s);
        for (int h = 0; h < 8; h++) {
            if (h % 2 == 0) _mm_prefetch((const char *)block + YMM_PREFETCH + h * 32, _MM_HINT_T0);
            const __m256i codes = _mm256_loadu_si256((const __m256i *)(block + h * 32));
            for (int s = 0; s < 4; s++) sum[h] = avxvnni_dot(sum[h], avx2_field(codes, s), xs[s]);
        }
    }
    int32_t out[PANEL_ROWS];
    for (int h = 0; h < 8; h++) _mm256_storeu_si256((__m256i *)(out + 8 * h), sum[h]);
    memcpy(acc, out, rows * sizeof(int32_t));
}

#define AVXVNNI_DOT(acc, w) AVXVNNI_PRODUCT " %%ymm14, %%ymm" w ", %%ymm" acc "\n\t"
#define AVXVNNI_WIDE(acc) "" /* they are int32 already */
YMM_TILES(avxvnni_tile, AVXVNNI_DOT, AVXVNNI_WIDE)

YMM_MANY(avxvnni_many, avxvnni_tile)

AVX2_TARGET static void ternary_panel_avxvnni(TERNARY_ARGS, size_t rows, void *scratch) {
    if (M <= 2) /* as in ternary_avx2.h */
        for (size_t m = 0; m < M; m++)
            avxvnni_one(panel, n_blocks, x + m * x_stride, x_sum[m], acc + m * acc_stride, rows);
    else
        ternary_64_rows(avxvnni_many, TERNARY_PASS, rows, scratch);
}

/* NULL when this processor has it: cpuid leaf 7.1, for which not every compiler has a name */
#include <cpuid.h>
static const char *avxvnni_lacks(void) {
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return "the processor has no AVX2 with FMA";
#if defined(BITNET_REF_AVXVNNI_AS_EVEX)
    return __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni") ? NULL : "no AVX-512 to check it with";
#else
    unsigned a, b, c, d;
    return __get_cpuid_count(7, 1, &a, &b, &c, &d) && a >> 4 & 1 ? NULL : "the processor has no AVX-VNNI";
#endif
}

#endif
#endif
