/* The ternary product with AVX2: vpmaddubsw multiplies 32 unsigned codes by 32 signed activations and adds them by
 * twos into 16 lanes of int16.
 *
 * Plain version: ternary_scalar.h.
 * int16 would wrap: a product pair is at most 2 * 2 * 128 = 512 in size, so at most 63 of them fit. Sums are widened
 * into int32 (vpmaddwd by ones adds the two halves of a row's lane) after AVX2_WIDEN = 8 blocks: 32 pairs a lane.
 * One token, `avx2_one`: the 8 registers of a block are read in order, so that memory sees one forward stream.
 * More, `avx2_many`: 256 columns are unpacked to bytes once (16 KB, in L1) and used for all tokens, four at a time
 *   against 16 rows.
 *
 * Measured as in ternary_avx512.h: 1 token 56, 64 tokens 75 G multiply-adds/s. A product pair costs two instructions
 * for 32 multiply-adds on three ports, so about 140 is the limit; the rest is not understood yet.
 */
#ifndef BITNET_REF_TERNARY_AVX2_H
#define BITNET_REF_TERNARY_AVX2_H

#include "panel.h"

#if defined(__x86_64__)
#include <immintrin.h>

#define AVX2_TARGET __attribute__((target("avx2")))
#define AVX2_INLINE AVX2_TARGET static inline __attribute__((always_inline))
enum { AVX2_TOKENS = 4, AVX2_WIDEN = 8, AVX2_PREFETCH = 2048 };

/* 4 activations in every lane: a load, no work for the ports that multiply */
AVX2_INLINE __m256i avx2_word(const int8_t *x) { return _mm256_broadcastd_epi32(_mm_loadu_si32(x)); }

/* sum + products added by twos, in place. One instruction pair in assembly, because GCC 12 would first compute all products
 * of a tile and then has too few registers: one sum went through memory, and the whole loop waited for it (2x slower). */
AVX2_INLINE __m256i avx2_dot(__m256i sum, __m256i codes, __m256i xs) {
    __m256i product;
    __asm__("vpmaddubsw %3, %2, %1\n\tvpaddw %1, %0, %0" : "+x"(sum), "=&x"(product) : "x"(codes), "x"(xs));
    return sum;
}

AVX2_INLINE __m256i avx2_field(__m256i codes, int s) {
    return _mm256_and_si256(_mm256_srli_epi16(codes, 2 * s), _mm256_set1_epi8(3));
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
                if (h % 2 == 0) _mm_prefetch((const char *)block + AVX2_PREFETCH + h * 32, _MM_HINT_T0);
                const __m256i codes = _mm256_loadu_si256((const __m256i *)(block + h * 32));
                for (int s = 0; s < 4; s++)
                    narrow[h] = avx2_dot(narrow[h], avx2_field(codes, s), xs[s]);
            }
        }
        for (int h = 0; h < 8; h++)
            sum[h] = _mm256_add_epi32(sum[h], _mm256_madd_epi16(narrow[h], _mm256_set1_epi16(1)));
    }
    int32_t out[PANEL_ROWS];
    for (int h = 0; h < 8; h++) _mm256_storeu_si256((__m256i *)(out + 8 * h), sum[h]);
    memcpy(acc, out, rows * sizeof(int32_t));
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

/* T tokens against 16 rows of unpacked columns (two registers); out[t * PANEL_ROWS + row] gains the sums. The narrow sums
 * are variables of their own, made by macros: GCC 12 keeps an array of them in memory. */
#define AVX2_TOKENS_1(EACH) EACH(0)
#define AVX2_TOKENS_2(EACH) AVX2_TOKENS_1(EACH) EACH(1)
#define AVX2_TOKENS_3(EACH) AVX2_TOKENS_2(EACH) EACH(2)
#define AVX2_TOKENS_4(EACH) AVX2_TOKENS_3(EACH) EACH(3)
#define TILE_ZERO(t) __m256i narrow_##t##0 = _mm256_setzero_si256(), narrow_##t##1 = narrow_##t##0;
#define TILE_ADD(t)                                                                                                    \
    {                                                                                                                  \
        const __m256i xs = avx2_word(x + t * x_stride + 4 * g);                                                        \
        narrow_##t##0 = avx2_dot(narrow_##t##0, w0, xs);                                                               \
        narrow_##t##1 = avx2_dot(narrow_##t##1, w1, xs);                                                               \
    }
#define TILE_WIDEN(t)                                                                                                  \
    avx2_widen(out + t * PANEL_ROWS, narrow_##t##0);                                                                   \
    avx2_widen(out + t * PANEL_ROWS + 8, narrow_##t##1);
#define AVX2_TILE(T)                                                                                                   \
    AVX2_TARGET static void avx2_tile_##T(const uint8_t *bytes, size_t n_groups, const int8_t *x, size_t x_stride,     \
                                          int32_t *out) {                                                              \
        for (size_t start = 0; start < n_groups; start += 4 * AVX2_WIDEN) {                                            \
            const size_t end = n_groups - start < 4 * AVX2_WIDEN ? n_groups : start + 4 * AVX2_WIDEN;                  \
            AVX2_TOKENS_##T(TILE_ZERO)                                                                                 \
            for (size_t g = start; g < end; g++) {                                                                     \
                const __m256i w0 = _mm256_load_si256((const __m256i *)(bytes + g * BLOCK_BYTES)),                      \
                              w1 = _mm256_load_si256((const __m256i *)(bytes + g * BLOCK_BYTES + 32));                 \
                AVX2_TOKENS_##T(TILE_ADD)                                                                              \
            }                                                                                                          \
            AVX2_TOKENS_##T(TILE_WIDEN)                                                                                \
        }                                                                                                              \
    }
AVX2_INLINE void avx2_widen(int32_t *out, __m256i narrow) {
    const __m256i wide = _mm256_madd_epi16(narrow, _mm256_set1_epi16(1));
    _mm256_storeu_si256((__m256i *)out, _mm256_add_epi32(_mm256_loadu_si256((const __m256i *)out), wide));
}
AVX2_TILE(1)
AVX2_TILE(2)
AVX2_TILE(3)
AVX2_TILE(4)
#undef TILE_ZERO
#undef TILE_ADD
#undef TILE_WIDEN
#undef AVX2_TILE

AVX2_TARGET static void avx2_many(const uint8_t *panel, size_t n_blocks, const int8_t *x, size_t x_stride, size_t M,
                                  const int32_t *x_sum, int32_t *acc, size_t acc_stride, size_t rows,
                                  uint8_t *scratch) {
    for (size_t start = 0; start < n_blocks; start += SCRATCH_K / BLOCK_K) {
        const size_t blocks = n_blocks - start < SCRATCH_K / BLOCK_K ? n_blocks - start : SCRATCH_K / BLOCK_K;
        avx2_unpack(panel + start * BLOCK_BYTES, blocks, scratch);
        for (size_t m = 0; m < M; m += AVX2_TOKENS) {
            const size_t T = M - m < AVX2_TOKENS ? M - m : AVX2_TOKENS;
            int32_t out[AVX2_TOKENS * PANEL_ROWS];
            for (size_t t = 0; t < T; t++)
                for (size_t r = 0; r < rows; r++)
                    out[t * PANEL_ROWS + r] = start ? acc[(m + t) * acc_stride + r] : -x_sum[m + t];
            for (size_t row = 0; row < rows; row += 16) {
                const uint8_t *bytes = scratch + row * 4;
                const int8_t *xm = x + m * x_stride + start * BLOCK_K;
                switch (T) {
                case 1: avx2_tile_1(bytes, 4 * blocks, xm, x_stride, out + row); break;
                case 2: avx2_tile_2(bytes, 4 * blocks, xm, x_stride, out + row); break;
                case 3: avx2_tile_3(bytes, 4 * blocks, xm, x_stride, out + row); break;
                default: avx2_tile_4(bytes, 4 * blocks, xm, x_stride, out + row); break;
                }
            }
            for (size_t t = 0; t < T; t++)
                memcpy(acc + (m + t) * acc_stride, out + t * PANEL_ROWS, rows * sizeof(int32_t));
        }
    }
}

AVX2_TARGET static void ternary_panel_avx2(const uint8_t *panel, size_t n_blocks, const int8_t *x, size_t x_stride,
                                           size_t M, const int32_t *x_sum, int32_t *acc, size_t acc_stride, size_t rows,
                                           void *scratch) {
    if (M == 1) avx2_one(panel, n_blocks, x, x_sum[0], acc, rows);
    else avx2_many(panel, n_blocks, x, x_stride, M, x_sum, acc, acc_stride, rows, (uint8_t *)scratch);
}

#endif
#endif
