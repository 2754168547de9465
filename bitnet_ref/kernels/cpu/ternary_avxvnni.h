/* The ternary product with AVX-VNNI, the 256-bit form of AVX-512's vpdpbusd, for client processors without AVX-512:
 * 32 unsigned codes times 32 signed activations, added by fours into 8 lanes of int32.
 *
 * Plain version: ternary_scalar.h. As ternary_avx2.h, with one instruction for a product and nothing to widen.
 * No processor with AVX-VNNI was at hand: proven by the same text with AVX-512VL's encoding of the same instruction
 * (BITNET_REF_AVXVNNI_AS_EVEX, in tests/kernels), which differs in the prefix alone.
 *
 * Measured so, as in ternary_avx512.h, at about 2.5 GHz, where 160 is the limit: 1 token 68 to 76 - 6 tokens 118 -
 *   64 tokens 150 - 512 tokens 156 G multiply-adds/s.
 */
#ifndef BITNET_REF_TERNARY_AVXVNNI_H
#define BITNET_REF_TERNARY_AVXVNNI_H

#include "ternary_ymm.h"

/* assemblers that know the instruction come with compilers that do */
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
#define AVXVNNI_WIDE(acc) "" /* they are */
YMM_TILES(avxvnni_tile, AVXVNNI_DOT, AVXVNNI_WIDE)
#undef AVXVNNI_DOT
#undef AVXVNNI_WIDE

YMM_MANY(avxvnni_many, avxvnni_tile)

AVX2_TARGET static void ternary_panel_avxvnni(const uint8_t *panel, size_t n_blocks, const int8_t *x, size_t x_stride,
                                              size_t M, const int32_t *x_sum, int32_t *acc, size_t acc_stride,
                                              size_t rows, void *scratch) {
    if (M <= 2) /* two tokens do not pay for unpacking: 49 that way */
        for (size_t m = 0; m < M; m++)
            avxvnni_one(panel, n_blocks, x + m * x_stride, x_sum[m], acc + m * acc_stride, rows);
    else
        ternary_by_way_of_64_rows(avxvnni_many, panel, n_blocks, x, x_stride, M, x_sum, acc, acc_stride, rows, scratch);
}

/* NULL when this processor has it: cpuid leaf 7.1, which the compiler's own list of names does not have everywhere */
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
