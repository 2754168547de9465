/* The ternary product with AVX2: vpmaddubsw multiplies 32 unsigned codes by 32 signed activations and adds pairs of
 * products into 16 lanes of int16.
 *
 * Plain version: ternary_scalar.h.
 * int16 would wrap: a sum of two products is from -2 * 2 * 128 = -512 to 508, so at most 64 of them fit (-32,768 to
 *   32,512). They are then widened to int32 (vpmaddwd by ones adds the two halves of a row's lane).
 * One token, `avx2_one`: the 8 registers of a block are read in order, so that memory sees one forward stream. Widened
 *   after AVX2_WIDEN = 16 blocks, which is 64 sums per lane.
 * More: 256 columns, 64 sums per lane, are unpacked to bytes once and used for all tokens, six at a time against 16
 *   rows (ternary_ymm.h). Prefetching the next columns: weights from memory, 8 tokens 1.11 times as fast, 12 1.08.
 *
 * Measured as in ternary_avx512.h, at 2.5 to 2.7 GHz, G multiply-adds/s: 1 token 54 (13.5 GB/s of codes: a thread's
 *   share of the memory) - 6 tokens 76 - 64 tokens 90 to 98 - 512 tokens 92 to 98.
 * Limit: vpmaddubsw has two ports, vpaddw these and a third, so 24 instructions for 384 multiply-adds take 8 cycles:
 *   120 measured on registers alone, 110 for the loop of a tile alone.
 * Tried:
 *   - tiles of 4 tokens by intrinsics, each instruction pair in assembly: 75 (GCC spills, 18 loads for 8 pairs)
 *   - tiles of 6 tokens, the whole loop in assembly, widened by intrinsics afterwards: 87
 *   - two groups per iteration, widened and added to acc in the same assembly (as it is): 90 to 98
 *   - both products before their sums (a shorter chain): no difference in the loop alone (111) */
#ifndef BITNET_REF_TERNARY_AVX2_H
#define BITNET_REF_TERNARY_AVX2_H

#include "ternary_ymm.h"

#if defined(__x86_64__)

enum { AVX2_WIDEN = 16 };

/* sum + pairs of products, in place. Assembly, because GCC 12 computes all products of a tile first and then runs out
 * of registers: one sum went through memory, and the loop waited for it (2x slower). */
AVX2_INLINE __m256i avx2_dot(__m256i sum, __m256i codes, __m256i xs) {
    __m256i product;
    __asm__("vpmaddubsw %3, %2, %1\n\tvpaddw %1, %0, %0" : "+x"(sum), "=&x"(product) : "x"(codes), "x"(xs));
    return sum;
}

AVX2_TARGET static void avx2_one(const uint8_t *panel, size_t n_blocks, const int8_t *x, int32_t x_sum, int32_t *acc,
                                 size_t rows) {
    __m256i sum[8];
    for (int h = 0; h < 8; h++) sum[h] = _mm256_set1_epi32(-x_sum);
    for (size_t start = 0; start < n_blocks; start += AVX2_WIDEN) {
        const size_t end = n_blocks - start < AVX2_WIDEN ? n_blocks : start + AVX2_WIDEN;
        __m256i narrow[8];
        for (int h = 0; h < 8; h++) narrow[h] = _mm256_setzero_si256();
        for (size_t b = start; b < end; b++) {
            const uint8_t *block = panel + b * BLOCK_BYTES;
            __m256i xs[4];
            for (int s = 0; s < 4; s++) xs[s] = avx2_word(x + b * BLOCK_K + 4 * s);
            for (int h = 0; h < 8; h++) {
                if (h % 2 == 0) _mm_prefetch((const char *)block + YMM_PREFETCH + h * 32, _MM_HINT_T0);
                const __m256i codes = _mm256_loadu_si256((const __m256i *)(block + h * 32));
                for (int s = 0; s < 4; s++) narrow[h] = avx2_dot(narrow[h], avx2_field(codes, s), xs[s]);
            }
        }
        for (int h = 0; h < 8; h++)
            sum[h] = _mm256_add_epi32(sum[h], _mm256_madd_epi16(narrow[h], _mm256_set1_epi16(1)));
    }
    int32_t out[PANEL_ROWS];
    for (int h = 0; h < 8; h++) _mm256_storeu_si256((__m256i *)(out + 8 * h), sum[h]);
    memcpy(acc, out, rows * sizeof(int32_t));
}

#define AVX2_DOT(acc, w)                                                                                               \
    "vpmaddubsw %%ymm14, %%ymm" w ", %%ymm15\n\tvpaddw %%ymm15, %%ymm" acc ", %%ymm" acc "\n\t"
#define AVX2_WIDE(acc) "vpmaddwd %%ymm12, %%ymm" acc ", %%ymm" acc "\n\t"
YMM_TILES(avx2_tile, AVX2_DOT, AVX2_WIDE)

_Static_assert(SCRATCH_K / 4 <= 64 && AVX2_WIDEN * 4 <= 64, "more sums than int16 holds");
YMM_MANY(avx2_many, avx2_tile)

AVX2_TARGET static void ternary_panel_avx2(TERNARY_ARGS, size_t rows, void *scratch) {
    if (M <= 2) /* unpacking does not pay for two tokens: 49 */
        for (size_t m = 0; m < M; m++) avx2_one(panel, n_blocks, x + m * x_stride, x_sum[m], acc + m * acc_stride, rows);
    else
        ternary_64_rows(avx2_many, TERNARY_PASS, rows, scratch);
}

#endif
#endif
