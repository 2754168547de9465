/* The ternary product with AVX-512 VNNI: vpdpbusd multiplies 64 unsigned codes by 64 signed activations and adds them
 * by fours into 16 lanes of int32.
 *
 * Plain version: ternary_scalar.h.
 * One token, `avx512_one`: the limit is memory, so the aim is few instructions a byte. The codes are not shifted down:
 *   `v & 0x0C` is 4 * code, `v & 0x30` 16 * code, `v & 0xC0` 64 * code, each summed in an accumulator of its own and
 *   shifted once at the end (exact: the sum is a multiple). 4 ANDs + 4 dot products for 64 bytes, no shift in the loop.
 *   An accumulator reaches K/4 * 128 * 128, so K < 2^19 (`AVX512_MAX_K`; beyond it the scalar variant runs).
 * 2 to 6 tokens, `avx512_few`: codes are shifted down in registers and used for each token: 24 accumulators.
 * More, `avx512_many`: 256 columns of the panel are unpacked to bytes once (16 KB, in L1) and used for all tokens, six
 *   at a time: 4 + 6 loads for 24 dot products, so the two dot-product ports are the limit.
 */
#ifndef BITNET_REF_TERNARY_AVX512_H
#define BITNET_REF_TERNARY_AVX512_H

#include "panel.h"

#if defined(__x86_64__)
#include <immintrin.h>

#define AVX512_TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512vnni")))
#define AVX512_INLINE AVX512_TARGET static inline __attribute__((always_inline))
enum { AVX512_TOKENS = 6, AVX512_PREFETCH = 2048, AVX512_MAX_K = 1 << 19 };

/* sum (16 rows) - x_sum -> rows 16 q .. 16 q + 15 of one token's results, as far as the panel has rows */
AVX512_INLINE void avx512_store(int32_t *acc, size_t q, size_t rows, __m512i sum, int32_t x_sum) {
    const size_t left = rows > 16 * q ? rows - 16 * q : 0;
    const __mmask16 mask = left >= 16 ? (__mmask16)0xFFFF : (__mmask16)((1u << left) - 1);
    _mm512_mask_storeu_epi32(acc + 16 * q, mask, _mm512_sub_epi32(sum, _mm512_set1_epi32(x_sum)));
}

AVX512_INLINE int32_t word_at(const int8_t *x) {
    int32_t word;
    memcpy(&word, x, 4);
    return word;
}

AVX512_TARGET static void avx512_one(const uint8_t *panel, size_t n_blocks, const int8_t *x, int32_t x_sum,
                                     int32_t *acc, size_t rows) {
    const __m512i field[4] = {_mm512_set1_epi8(0x03), _mm512_set1_epi8(0x0C), _mm512_set1_epi8(0x30),
                              _mm512_set1_epi8((char)0xC0)};
    __m512i sum[4][4]; /* [vector of 16 rows][field] */
    for (int q = 0; q < 4; q++)
        for (int s = 0; s < 4; s++) sum[q][s] = _mm512_setzero_si512();
    for (size_t b = 0; b < n_blocks; b++) {
        const uint8_t *block = panel + b * BLOCK_BYTES;
        __m512i xs[4];
        for (int s = 0; s < 4; s++) xs[s] = _mm512_set1_epi32(word_at(x + b * BLOCK_K + 4 * s));
        for (int q = 0; q < 4; q++) {
            _mm_prefetch((const char *)block + AVX512_PREFETCH + q * VECTOR_BYTES, _MM_HINT_T0);
            const __m512i codes = _mm512_loadu_si512(block + q * VECTOR_BYTES);
            for (int s = 0; s < 4; s++)
                sum[q][s] = _mm512_dpbusd_epi32(sum[q][s], _mm512_and_si512(codes, field[s]), xs[s]);
        }
    }
    for (int q = 0; q < 4; q++) {
        const __m512i low = _mm512_add_epi32(sum[q][0], _mm512_srai_epi32(sum[q][1], 2));
        const __m512i high = _mm512_add_epi32(_mm512_srai_epi32(sum[q][2], 4), _mm512_srai_epi32(sum[q][3], 6));
        avx512_store(acc, q, rows, _mm512_add_epi32(low, high), x_sum);
    }
}

AVX512_INLINE void avx512_few(const int T, const uint8_t *panel, size_t n_blocks, const int8_t *x, size_t x_stride,
                              const int32_t *x_sum, int32_t *acc, size_t acc_stride, size_t rows) {
    const __m512i field = _mm512_set1_epi8(0x03);
    __m512i sum[AVX512_TOKENS][4];
    for (int t = 0; t < T; t++)
        for (int q = 0; q < 4; q++) sum[t][q] = _mm512_setzero_si512();
    for (size_t b = 0; b < n_blocks; b++) {
        const uint8_t *block = panel + b * BLOCK_BYTES;
        for (int q = 0; q < 4; q++) {
            _mm_prefetch((const char *)block + AVX512_PREFETCH + q * VECTOR_BYTES, _MM_HINT_T0);
            const __m512i codes = _mm512_loadu_si512(block + q * VECTOR_BYTES);
            const __m512i part[4] = {_mm512_and_si512(codes, field), _mm512_and_si512(_mm512_srli_epi16(codes, 2), field),
                                     _mm512_and_si512(_mm512_srli_epi16(codes, 4), field),
                                     _mm512_and_si512(_mm512_srli_epi16(codes, 6), field)};
            for (int s = 0; s < 4; s++)
                for (int t = 0; t < T; t++)
                    sum[t][q] = _mm512_dpbusd_epi32(
                        sum[t][q], part[s], _mm512_set1_epi32(word_at(x + t * x_stride + b * BLOCK_K + 4 * s)));
        }
    }
    for (int t = 0; t < T; t++)
        for (int q = 0; q < 4; q++) avx512_store(acc + t * acc_stride, q, rows, sum[t][q], x_sum[t]);
}

/* 16 * n_blocks columns of a panel -> bytes, [group of 4 columns][vector of 16 rows][64] */
AVX512_TARGET static void avx512_unpack(const uint8_t *panel, size_t n_blocks, uint8_t *bytes) {
    const __m512i field = _mm512_set1_epi8(0x03);
    for (size_t b = 0; b < n_blocks; b++)
        for (int q = 0; q < 4; q++) {
            const __m512i codes = _mm512_loadu_si512(panel + b * BLOCK_BYTES + q * VECTOR_BYTES);
            uint8_t *out = bytes + b * 4 * BLOCK_BYTES + q * VECTOR_BYTES;
            _mm512_store_si512(out, _mm512_and_si512(codes, field));
            _mm512_store_si512(out + BLOCK_BYTES, _mm512_and_si512(_mm512_srli_epi16(codes, 2), field));
            _mm512_store_si512(out + 2 * BLOCK_BYTES, _mm512_and_si512(_mm512_srli_epi16(codes, 4), field));
            _mm512_store_si512(out + 3 * BLOCK_BYTES, _mm512_and_si512(_mm512_srli_epi16(codes, 6), field));
        }
}

/* T tokens against unpacked columns; sums start at -x_sum on the first columns and go on from acc on the others */
AVX512_INLINE void avx512_tile(const int T, const uint8_t *bytes, size_t n_groups, const int8_t *x, size_t x_stride,
                               const int32_t *x_sum, int32_t *acc, size_t acc_stride, size_t rows, int first) {
    __m512i sum[AVX512_TOKENS][4];
    __mmask16 mask[4];
    for (int q = 0; q < 4; q++) {
        const size_t left = rows > (size_t)(16 * q) ? rows - 16 * q : 0;
        mask[q] = left >= 16 ? (__mmask16)0xFFFF : (__mmask16)((1u << left) - 1);
    }
    for (int t = 0; t < T; t++)
        for (int q = 0; q < 4; q++)
            sum[t][q] = first ? _mm512_set1_epi32(-x_sum[t])
                              : _mm512_maskz_loadu_epi32(mask[q], acc + t * acc_stride + 16 * q);
    for (size_t g = 0; g < n_groups; g++) {
        const uint8_t *group = bytes + g * BLOCK_BYTES;
        const __m512i w0 = _mm512_load_si512(group), w1 = _mm512_load_si512(group + 64),
                      w2 = _mm512_load_si512(group + 128), w3 = _mm512_load_si512(group + 192);
        for (int t = 0; t < T; t++) {
            const __m512i xs = _mm512_set1_epi32(word_at(x + t * x_stride + 4 * g));
            sum[t][0] = _mm512_dpbusd_epi32(sum[t][0], w0, xs);
            sum[t][1] = _mm512_dpbusd_epi32(sum[t][1], w1, xs);
            sum[t][2] = _mm512_dpbusd_epi32(sum[t][2], w2, xs);
            sum[t][3] = _mm512_dpbusd_epi32(sum[t][3], w3, xs);
        }
    }
    for (int t = 0; t < T; t++)
        for (int q = 0; q < 4; q++) _mm512_mask_storeu_epi32(acc + t * acc_stride + 16 * q, mask[q], sum[t][q]);
}

AVX512_TARGET static void avx512_many(const uint8_t *panel, size_t n_blocks, const int8_t *x, size_t x_stride, size_t M,
                                      const int32_t *x_sum, int32_t *acc, size_t acc_stride, size_t rows,
                                      uint8_t *scratch) {
    for (size_t start = 0; start < n_blocks; start += SCRATCH_K / BLOCK_K) {
        const size_t blocks = n_blocks - start < SCRATCH_K / BLOCK_K ? n_blocks - start : SCRATCH_K / BLOCK_K;
        avx512_unpack(panel + start * BLOCK_BYTES, blocks, scratch);
        for (size_t m = 0; m < M; m += AVX512_TOKENS) {
            const int8_t *xm = x + m * x_stride + start * BLOCK_K;
            int32_t *am = acc + m * acc_stride;
            switch (M - m) {
#define AVX512_TILE(T) avx512_tile(T, scratch, 4 * blocks, xm, x_stride, x_sum + m, am, acc_stride, rows, start == 0)
            case 1: AVX512_TILE(1); break;
            case 2: AVX512_TILE(2); break;
            case 3: AVX512_TILE(3); break;
            case 4: AVX512_TILE(4); break;
            case 5: AVX512_TILE(5); break;
            default: AVX512_TILE(6); break;
#undef AVX512_TILE
            }
        }
    }
}

AVX512_TARGET static void ternary_panel_avx512(const uint8_t *panel, size_t n_blocks, const int8_t *x, size_t x_stride,
                                               size_t M, const int32_t *x_sum, int32_t *acc, size_t acc_stride,
                                               size_t rows, void *scratch) {
    switch (M) {
#define AVX512_FEW(T) avx512_few(T, panel, n_blocks, x, x_stride, x_sum, acc, acc_stride, rows)
    case 1: avx512_one(panel, n_blocks, x, x_sum[0], acc, rows); break;
    case 2: AVX512_FEW(2); break;
    case 3: AVX512_FEW(3); break;
    case 4: AVX512_FEW(4); break;
    case 5: AVX512_FEW(5); break;
    case 6: AVX512_FEW(6); break;
#undef AVX512_FEW
    default: avx512_many(panel, n_blocks, x, x_stride, M, x_sum, acc, acc_stride, rows, (uint8_t *)scratch);
    }
}

#endif
#endif
