/* What the two instruction sets with 256-bit registers share, AVX2 and AVX-VNNI: unpacking, and the loop of a tile of
 * tokens against 16 rows.
 *
 * A tile's loop is assembly, made by macros for 1 to 6 tokens: 12 sums (two registers for each token), two registers of
 * weights, one of activations and, for AVX2, one of products: all 16. GCC 12's intrinsics do not keep them there.
 */
#ifndef BITNET_REF_TERNARY_YMM_H
#define BITNET_REF_TERNARY_YMM_H

#include "panel.h"

#if defined(__x86_64__)
#include <immintrin.h>

#define AVX2_TARGET __attribute__((target("avx2")))
#define AVX2_INLINE AVX2_TARGET static inline __attribute__((always_inline))
enum { YMM_TOKENS = 6, YMM_PREFETCH = 2048 };

/* 4 activations in every lane: a load, no work for the ports that multiply */
AVX2_INLINE __m256i avx2_word(const int8_t *x) { return _mm256_broadcastd_epi32(_mm_loadu_si32(x)); }

AVX2_INLINE __m256i avx2_field(__m256i codes, int s) {
    return _mm256_and_si256(_mm256_srli_epi16(codes, 2 * s), _mm256_set1_epi8(3));
}

/* 16 * n_blocks columns of a panel -> bytes, [group of 4 columns][64 rows][4] */
AVX2_TARGET static void avx2_unpack(const uint8_t *panel, size_t n_blocks, uint8_t *bytes) {
    for (size_t b = 0; b < n_blocks; b++)
        for (int h = 0; h < 8; h++) {
            const __m256i codes = _mm256_loadu_si256((const __m256i *)(panel + b * BLOCK_BYTES + h * 32));
            for (int s = 0; s < 4; s++)
                _mm256_store_si256((__m256i *)(bytes + (4 * b + s) * BLOCK_BYTES + h * 32), avx2_field(codes, s));
        }
}

/* T tokens against 16 rows of n_groups (even) groups of unpacked columns: acc[t * acc_stride + row] gains the sums.
 * DOT(acc, w): the instructions for ymm acc += products of ymm w (weights) and ymm14 (activations).
 * WIDEN(acc): those that turn ymm acc into 8 lanes of int32; ymm12 holds `ones`. */
#define YMM_TILE(NAME, T, DOT, WIDEN)                                                                                  \
    AVX2_TARGET static void NAME##_##T(const uint8_t *bytes, size_t n_groups, const int8_t *x, size_t x_stride,        \
                                       int32_t *acc, size_t acc_stride) {                                              \
        const size_t acc_bytes = acc_stride * sizeof *acc;                                                             \
        const int8_t *x3 = x + (T > 3 ? 3 * x_stride : 0);                                                             \
        int32_t *acc3 = acc + (T > 3 ? 3 * acc_stride : 0);                                                            \
        const __m256i ones = _mm256_set1_epi16(1);                                                                     \
        n_groups /= 2;                                                                                                 \
        __asm__ volatile(YMM_EACH_##T(YMM_ZERO, DOT, WIDEN)                                                            \
                         ".p2align 5\n"                                                                                \
                         "1:\n\t"                                                                                      \
                         "vmovdqa (%[w]), %%ymm12\n\t"                                                                 \
                         "vmovdqa 32(%[w]), %%ymm13\n\t"                                                               \
                         YMM_EACH_##T(YMM_STEP, DOT, WIDEN)                                                            \
                         "vmovdqa 256(%[w]), %%ymm12\n\t"                                                              \
                         "vmovdqa 288(%[w]), %%ymm13\n\t"                                                              \
                         YMM_EACH_##T(YMM_STEP_AT_4, DOT, WIDEN)                                                       \
                         "add $512, %[w]\n\t"                                                                          \
                         "add $8, %[x]\n\t"                                                                            \
                         "add $8, %[x3]\n\t"                                                                           \
                         "dec %[count]\n\t"                                                                            \
                         "jnz 1b\n\t"                                                                                  \
                         "vmovdqa %[ones], %%ymm12\n\t"                                                                \
                         YMM_EACH_##T(YMM_ADD, DOT, WIDEN)                                                             \
                         : [w] "+r"(bytes), [x] "+r"(x), [x3] "+r"(x3), [count] "+r"(n_groups)                         \
                         : [stride] "r"(x_stride), [acc] "r"(acc), [acc3] "r"(acc3), [step] "r"(acc_bytes),            \
                           [ones] "m"(ones)                                                                            \
                         : "memory", "cc", "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8",     \
                           "xmm9", "xmm10", "xmm11", "xmm12", "xmm13", "xmm14", "xmm15");                              \
    }
/* NAME_1 to NAME_6: YMM_TOKENS of them */
#define YMM_TILES(NAME, DOT, WIDEN)                                                                                    \
    YMM_TILE(NAME, 1, DOT, WIDEN)                                                                                      \
    YMM_TILE(NAME, 2, DOT, WIDEN)                                                                                      \
    YMM_TILE(NAME, 3, DOT, WIDEN)                                                                                      \
    YMM_TILE(NAME, 4, DOT, WIDEN)                                                                                      \
    YMM_TILE(NAME, 5, DOT, WIDEN)                                                                                      \
    YMM_TILE(NAME, 6, DOT, WIDEN)

#define YMM_EACH_1(DO, DOT, WIDEN) DO(DOT, WIDEN, "(%[x])", "(%[acc])", "0", "1")
#define YMM_EACH_2(DO, DOT, WIDEN)                                                                                     \
    YMM_EACH_1(DO, DOT, WIDEN) DO(DOT, WIDEN, "(%[x],%[stride])", "(%[acc],%[step])", "2", "3")
#define YMM_EACH_3(DO, DOT, WIDEN)                                                                                     \
    YMM_EACH_2(DO, DOT, WIDEN) DO(DOT, WIDEN, "(%[x],%[stride],2)", "(%[acc],%[step],2)", "4", "5")
#define YMM_EACH_4(DO, DOT, WIDEN) YMM_EACH_3(DO, DOT, WIDEN) DO(DOT, WIDEN, "(%[x3])", "(%[acc3])", "6", "7")
#define YMM_EACH_5(DO, DOT, WIDEN)                                                                                     \
    YMM_EACH_4(DO, DOT, WIDEN) DO(DOT, WIDEN, "(%[x3],%[stride])", "(%[acc3],%[step])", "8", "9")
#define YMM_EACH_6(DO, DOT, WIDEN)                                                                                     \
    YMM_EACH_5(DO, DOT, WIDEN) DO(DOT, WIDEN, "(%[x3],%[stride],2)", "(%[acc3],%[step],2)", "10", "11")
#define YMM_ZERO(DOT, WIDEN, word, to, a, b)                                                                           \
    "vpxor %%ymm" a ", %%ymm" a ", %%ymm" a "\n\tvpxor %%ymm" b ", %%ymm" b ", %%ymm" b "\n\t"
#define YMM_STEP(DOT, WIDEN, word, to, a, b) "vpbroadcastd " word ", %%ymm14\n\t" DOT(a, "12") DOT(b, "13")
#define YMM_STEP_AT_4(DOT, WIDEN, word, to, a, b) "vpbroadcastd 4" word ", %%ymm14\n\t" DOT(a, "12") DOT(b, "13")
#define YMM_ADD(DOT, WIDEN, word, to, a, b)                                                                            \
    WIDEN(a) WIDEN(b) "vpaddd " to ", %%ymm" a ", %%ymm" a "\n\tvpaddd 32" to ", %%ymm" b ", %%ymm" b "\n\t"           \
    "vmovdqu %%ymm" a ", " to "\n\tvmovdqu %%ymm" b ", 32" to "\n\t"

/* M tokens, any number, by tiles: NAME(panel, n_blocks, x, x_stride, M, x_sum, acc, acc_stride, scratch); all 64 rows.
 * 256 columns are unpacked to bytes once (16 KB, in L1) and used for all tokens. */
#define YMM_MANY(NAME, TILE)                                                                                           \
    AVX2_TARGET static void NAME(const uint8_t *panel, size_t n_blocks, const int8_t *x, size_t x_stride, size_t M,    \
                                 const int32_t *x_sum, int32_t *acc, size_t acc_stride, uint8_t *scratch) {            \
        for (size_t m = 0; m < M; m++)                                                                                 \
            for (size_t r = 0; r < PANEL_ROWS; r++) acc[m * acc_stride + r] = -x_sum[m];                               \
        const size_t fetches = (M + YMM_TOKENS - 1) / YMM_TOKENS * (PANEL_ROWS / 16);                                  \
        for (size_t start = 0; start < n_blocks; start += SCRATCH_K / BLOCK_K) {                                       \
            const size_t blocks = n_blocks - start < SCRATCH_K / BLOCK_K ? n_blocks - start : SCRATCH_K / BLOCK_K;     \
            const uint8_t *next = panel + (start + blocks) * BLOCK_BYTES;                                              \
            const size_t ahead = (blocks * BLOCK_BYTES + fetches - 1) / fetches;                                       \
            avx2_unpack(panel + start * BLOCK_BYTES, blocks, scratch);                                                 \
            for (size_t m = 0; m < M; m += YMM_TOKENS) {                                                               \
                const int8_t *xm = x + m * x_stride + start * BLOCK_K;                                                 \
                for (size_t row = 0; row < PANEL_ROWS; row += 16, next += ahead) {                                     \
                    for (size_t i = 0; i < ahead; i += 64) _mm_prefetch((const char *)next + i, _MM_HINT_T0);          \
                    const uint8_t *bytes = scratch + row * 4;                                                          \
                    int32_t *to = acc + m * acc_stride + row;                                                          \
                    switch (M - m) {                                                                                   \
                    case 1: TILE##_1(bytes, 4 * blocks, xm, x_stride, to, acc_stride); break;                          \
                    case 2: TILE##_2(bytes, 4 * blocks, xm, x_stride, to, acc_stride); break;                          \
                    case 3: TILE##_3(bytes, 4 * blocks, xm, x_stride, to, acc_stride); break;                          \
                    case 4: TILE##_4(bytes, 4 * blocks, xm, x_stride, to, acc_stride); break;                          \
                    case 5: TILE##_5(bytes, 4 * blocks, xm, x_stride, to, acc_stride); break;                          \
                    default: TILE##_6(bytes, 4 * blocks, xm, x_stride, to, acc_stride); break;                         \
                    }                                                                                                  \
                }                                                                                                      \
            }                                                                                                          \
        }                                                                                                              \
    }

#endif
#endif
