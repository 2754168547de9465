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
 *   at a time; the rest of one to five goes the way above. While a tile runs, the next columns are fetched, a line with
 *   each group: 256 columns are a page of 4 KB, at whose end the processor stops fetching by itself.
 * 7 to 11: two parts of few.
 *
 * Measured, one thread of a Cascade Lake Xeon at about 3 GHz, 64 rows of 2560 columns in L2, G multiply-adds/s:
 *   1 token 148 (37 GB/s of codes: twice what a thread gets from memory) - 4 tokens 194 - 64 tokens 254 - 512 tokens 259
 * 16 matrices of 6912 x 2560 from memory, ms of processor time of one thread, before tiles fetched ahead and 7 to 11 were
 *   halved, and after: 1 token 6.8 (its memory read), 8 tokens 20.8 and 14.9, 12: 23.4 and 17.8, 16: 31.2 and 24.2,
 *   24: 38.7 and 31.8
 * Tried:
 *   - accumulators as an array in the tile loop, intrinsics: 65 (all of it stored in every step)
 *   - as variables, intrinsics: 125 (copied before and spilled after each dot product)
 *   - as variables, each dot product in inline assembly: 125 (no copies, but ten accumulators live in memory)
 *   - the whole loop of the tile in assembly: 254
 */
#ifndef BITNET_REF_TERNARY_AVX512_H
#define BITNET_REF_TERNARY_AVX512_H

#include "panel.h"

#if defined(__x86_64__)
#include <immintrin.h>

#define AVX512_TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512vnni")))
#define AVX512_INLINE AVX512_TARGET static inline __attribute__((always_inline))
enum { AVX512_TOKENS = 6, AVX512_PREFETCH = 2048, AVX512_MAX_K = 1 << 19 };

/* which of rows 16 q .. 16 q + 15 the panel has */
AVX512_INLINE __mmask16 avx512_mask(size_t q, size_t rows) {
    const size_t left = rows > 16 * q ? rows - 16 * q : 0;
    return left >= 16 ? (__mmask16)0xFFFF : (__mmask16)((1u << left) - 1);
}

/* sum - x_sum -> those rows of one token's results */
AVX512_INLINE void avx512_store(int32_t *acc, size_t q, size_t rows, __m512i sum, int32_t x_sum) {
    _mm512_mask_storeu_epi32(acc + 16 * q, avx512_mask(q, rows), _mm512_sub_epi32(sum, _mm512_set1_epi32(x_sum)));
}

/* 4 activations in every lane: a load, no work for the ports that multiply */
AVX512_INLINE __m512i avx512_word(const int8_t *x) { return _mm512_broadcastd_epi32(_mm_loadu_si32(x)); }

/* sum + the products of 4 codes and 4 activations in every lane. In assembly so that it is done in place: with the
 * intrinsic GCC 12 copies the accumulator first. */
AVX512_INLINE __m512i avx512_dot(__m512i sum, __m512i codes, __m512i xs) {
    __asm__("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(codes), "v"(xs));
    return sum;
}

/* A tile's accumulators are variables of their own, sum_tq for token t and vector q, made by macros: an array of them
 * stays in memory with GCC 12 (it unrolls the loops after it has decided), and every step then stores all of it. */
#define AVX512_TOKENS_1(EACH) EACH(0)
#define AVX512_TOKENS_2(EACH) AVX512_TOKENS_1(EACH) EACH(1)
#define AVX512_TOKENS_3(EACH) AVX512_TOKENS_2(EACH) EACH(2)
#define AVX512_TOKENS_4(EACH) AVX512_TOKENS_3(EACH) EACH(3)
#define AVX512_TOKENS_5(EACH) AVX512_TOKENS_4(EACH) EACH(4)
#define AVX512_TOKENS_6(EACH) AVX512_TOKENS_5(EACH) EACH(5)

AVX512_TARGET static void avx512_one(const uint8_t *panel, size_t n_blocks, const int8_t *x, int32_t x_sum,
                                     int32_t *acc, size_t rows) {
    const __m512i field0 = _mm512_set1_epi8(0x03), field1 = _mm512_set1_epi8(0x0C), field2 = _mm512_set1_epi8(0x30),
                  field3 = _mm512_set1_epi8((char)0xC0);
#define ZERO(q) \
    __m512i sum_##q##0 = _mm512_setzero_si512(), sum_##q##1 = sum_##q##0, sum_##q##2 = sum_##q##0, sum_##q##3 = sum_##q##0;
    AVX512_TOKENS_4(ZERO)
    for (size_t b = 0; b < n_blocks; b++) {
        const uint8_t *block = panel + b * BLOCK_BYTES;
        const int8_t *xb = x + b * BLOCK_K;
        const __m512i x0 = avx512_word(xb), x1 = avx512_word(xb + 4), x2 = avx512_word(xb + 8), x3 = avx512_word(xb + 12);
#define ADD(q)                                                                                                         \
    {                                                                                                                  \
        _mm_prefetch((const char *)block + AVX512_PREFETCH + q * VECTOR_BYTES, _MM_HINT_T0);                           \
        const __m512i codes = _mm512_loadu_si512(block + q * VECTOR_BYTES);                                            \
        sum_##q##0 = avx512_dot(sum_##q##0, _mm512_and_si512(codes, field0), x0);                             \
        sum_##q##1 = avx512_dot(sum_##q##1, _mm512_and_si512(codes, field1), x1);                             \
        sum_##q##2 = avx512_dot(sum_##q##2, _mm512_and_si512(codes, field2), x2);                             \
        sum_##q##3 = avx512_dot(sum_##q##3, _mm512_and_si512(codes, field3), x3);                             \
    }
        AVX512_TOKENS_4(ADD)
    }
#define STORE(q)                                                                                                       \
    avx512_store(acc, q, rows,                                                                                         \
                 _mm512_add_epi32(_mm512_add_epi32(sum_##q##0, _mm512_srai_epi32(sum_##q##1, 2)),                      \
                                  _mm512_add_epi32(_mm512_srai_epi32(sum_##q##2, 4), _mm512_srai_epi32(sum_##q##3, 6))), \
                 x_sum);
    AVX512_TOKENS_4(STORE)
#undef ZERO
#undef ADD
#undef STORE
}

#define FEW_ZERO(t)                                                                                                    \
    __m512i sum_##t##0 = _mm512_setzero_si512(), sum_##t##1 = sum_##t##0, sum_##t##2 = sum_##t##0, sum_##t##3 = sum_##t##0;
#define FEW_ADD(t, q)                                                                                                  \
    sum_##t##q = avx512_dot(sum_##t##q, part, avx512_word(xb + t * x_stride + 4 * s));
#define FEW_ADD_0(t) FEW_ADD(t, 0)
#define FEW_ADD_1(t) FEW_ADD(t, 1)
#define FEW_ADD_2(t) FEW_ADD(t, 2)
#define FEW_ADD_3(t) FEW_ADD(t, 3)
#define FEW_FIELD(TOKENS, q, s_)                                                                                       \
    {                                                                                                                  \
        enum { s = s_ };                                                                                               \
        const __m512i part = _mm512_and_si512(_mm512_srli_epi16(codes, 2 * s), field);                                 \
        TOKENS(FEW_ADD_##q)                                                                                            \
    }
#define FEW_VECTOR(TOKENS, q)                                                                                          \
    {                                                                                                                  \
        _mm_prefetch((const char *)block + AVX512_PREFETCH + q * VECTOR_BYTES, _MM_HINT_T0);                           \
        const __m512i codes = _mm512_loadu_si512(block + q * VECTOR_BYTES);                                            \
        FEW_FIELD(TOKENS, q, 0)                                                                                        \
        FEW_FIELD(TOKENS, q, 1)                                                                                        \
        FEW_FIELD(TOKENS, q, 2)                                                                                        \
        FEW_FIELD(TOKENS, q, 3)                                                                                        \
    }
#define FEW_STORE(t)                                                                                                   \
    avx512_store(acc + t * acc_stride, 0, rows, sum_##t##0, x_sum[t]);                                                 \
    avx512_store(acc + t * acc_stride, 1, rows, sum_##t##1, x_sum[t]);                                                 \
    avx512_store(acc + t * acc_stride, 2, rows, sum_##t##2, x_sum[t]);                                                 \
    avx512_store(acc + t * acc_stride, 3, rows, sum_##t##3, x_sum[t]);

#define AVX512_FEW(T)                                                                                                  \
    AVX512_TARGET static void avx512_few_##T(const uint8_t *panel, size_t n_blocks, const int8_t *x, size_t x_stride,  \
                                             const int32_t *x_sum, int32_t *acc, size_t acc_stride, size_t rows) {     \
        const __m512i field = _mm512_set1_epi8(0x03);                                                                  \
        AVX512_TOKENS_##T(FEW_ZERO)                                                                                    \
        for (size_t b = 0; b < n_blocks; b++) {                                                                        \
            const uint8_t *block = panel + b * BLOCK_BYTES;                                                            \
            const int8_t *xb = x + b * BLOCK_K;                                                                        \
            FEW_VECTOR(AVX512_TOKENS_##T, 0)                                                                           \
            FEW_VECTOR(AVX512_TOKENS_##T, 1)                                                                           \
            FEW_VECTOR(AVX512_TOKENS_##T, 2)                                                                           \
            FEW_VECTOR(AVX512_TOKENS_##T, 3)                                                                           \
        }                                                                                                              \
        AVX512_TOKENS_##T(FEW_STORE)                                                                                   \
    }
AVX512_FEW(2)
AVX512_FEW(3)
AVX512_FEW(4)
AVX512_FEW(5)
AVX512_FEW(6)
#undef AVX512_FEW

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

/* Six tokens against n_groups groups of unpacked columns: out (6, 64) int32 = sum of code * x.
 *
 * In assembly, because the point of the tile is that 24 accumulators, 4 weight vectors and a broadcast fill 29 of the 32
 * registers, and neither GCC 12's intrinsics nor single inline instructions keep them there: it copied and spilled half
 * of them in every step. Per group of 4 columns: 4 + 6 loads, 24 dot products. `next`: the packed columns that come next,
 * a line of which is fetched with each group. */
AVX512_TARGET static void avx512_tile(const uint8_t *bytes, size_t n_groups, const int8_t *x, size_t x_stride,
                                      const uint8_t *next, int32_t *out) {
    const int8_t *x3 = x + 3 * x_stride;
#define DOT4(word, a, b, c, d)                                                                                         \
    "vpbroadcastd " word ", %%zmm28\n\t"                                                                               \
    "vpdpbusd %%zmm28, %%zmm24, %%zmm" a "\n\tvpdpbusd %%zmm28, %%zmm25, %%zmm" b "\n\t"                              \
    "vpdpbusd %%zmm28, %%zmm26, %%zmm" c "\n\tvpdpbusd %%zmm28, %%zmm27, %%zmm" d "\n\t"
#define ZERO4(a, b, c, d)                                                                                              \
    "vpxord %%zmm" a ", %%zmm" a ", %%zmm" a "\n\tvpxord %%zmm" b ", %%zmm" b ", %%zmm" b "\n\t"                      \
    "vpxord %%zmm" c ", %%zmm" c ", %%zmm" c "\n\tvpxord %%zmm" d ", %%zmm" d ", %%zmm" d "\n\t"
#define STORE4(at, a, b, c, d)                                                                                         \
    "vmovdqu32 %%zmm" a ", " at "+0(%[out])\n\tvmovdqu32 %%zmm" b ", " at "+64(%[out])\n\t"                          \
    "vmovdqu32 %%zmm" c ", " at "+128(%[out])\n\tvmovdqu32 %%zmm" d ", " at "+192(%[out])\n\t"
    __asm__ volatile(
        ZERO4("0", "1", "2", "3") ZERO4("4", "5", "6", "7") ZERO4("8", "9", "10", "11")
        ZERO4("12", "13", "14", "15") ZERO4("16", "17", "18", "19") ZERO4("20", "21", "22", "23")
        ".p2align 5\n"
        "1:\n\t"
        "prefetcht0 (%[next])\n\t"
        "vmovdqa32 (%[w]), %%zmm24\n\t"
        "vmovdqa32 64(%[w]), %%zmm25\n\t"
        "vmovdqa32 128(%[w]), %%zmm26\n\t"
        "vmovdqa32 192(%[w]), %%zmm27\n\t"
        DOT4("(%[x])", "0", "1", "2", "3")
        DOT4("(%[x],%[stride])", "4", "5", "6", "7")
        DOT4("(%[x],%[stride],2)", "8", "9", "10", "11")
        DOT4("(%[x3])", "12", "13", "14", "15")
        DOT4("(%[x3],%[stride])", "16", "17", "18", "19")
        DOT4("(%[x3],%[stride],2)", "20", "21", "22", "23")
        "add $256, %[w]\n\t"
        "add $64, %[next]\n\t"
        "add $4, %[x]\n\t"
        "add $4, %[x3]\n\t"
        "dec %[count]\n\t"
        "jnz 1b\n\t"
        STORE4("0", "0", "1", "2", "3") STORE4("256", "4", "5", "6", "7") STORE4("512", "8", "9", "10", "11")
        STORE4("768", "12", "13", "14", "15") STORE4("1024", "16", "17", "18", "19") STORE4("1280", "20", "21", "22", "23")
        : [w] "+r"(bytes), [x] "+r"(x), [x3] "+r"(x3), [next] "+r"(next), [count] "+r"(n_groups)
        : [stride] "r"(x_stride), [out] "r"(out)
        : "memory", "cc", "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10",
          "xmm11", "xmm12", "xmm13", "xmm14", "xmm15", "xmm16", "xmm17", "xmm18", "xmm19", "xmm20", "xmm21", "xmm22",
          "xmm23", "xmm24", "xmm25", "xmm26", "xmm27", "xmm28");
#undef DOT4
#undef ZERO4
#undef STORE4
}

/* M tokens, M a multiple of six */
AVX512_TARGET static void avx512_many(const uint8_t *panel, size_t n_blocks, const int8_t *x, size_t x_stride, size_t M,
                                      const int32_t *x_sum, int32_t *acc, size_t acc_stride, size_t rows,
                                      uint8_t *scratch) {
    int32_t out[AVX512_TOKENS * PANEL_ROWS];
    for (size_t start = 0; start < n_blocks; start += SCRATCH_K / BLOCK_K) {
        const size_t blocks = n_blocks - start < SCRATCH_K / BLOCK_K ? n_blocks - start : SCRATCH_K / BLOCK_K;
        avx512_unpack(panel + start * BLOCK_BYTES, blocks, scratch);
        for (size_t m = 0; m < M; m += AVX512_TOKENS) {
            avx512_tile(scratch, 4 * blocks, x + m * x_stride + start * BLOCK_K, x_stride,
                        panel + (start + blocks) * BLOCK_BYTES, out);
            for (size_t t = 0; t < AVX512_TOKENS; t++) {
                int32_t *to = acc + (m + t) * acc_stride;
                const int32_t *from = out + t * PANEL_ROWS;
                if (start == 0)
                    for (size_t r = 0; r < rows; r++) to[r] = from[r] - x_sum[m + t];
                else
                    for (size_t r = 0; r < rows; r++) to[r] += from[r];
            }
        }
    }
}

AVX512_TARGET static void ternary_panel_avx512(const uint8_t *panel, size_t n_blocks, const int8_t *x, size_t x_stride,
                                               size_t M, const int32_t *x_sum, int32_t *acc, size_t acc_stride,
                                               size_t rows, void *scratch) {
    if (M > AVX512_TOKENS && M < 2 * AVX512_TOKENS) { /* twice a few is less than many and a rest */
        const size_t half = M / 2;
        ternary_panel_avx512(panel, n_blocks, x, x_stride, half, x_sum, acc, acc_stride, rows, scratch);
        ternary_panel_avx512(panel, n_blocks, x + half * x_stride, x_stride, M - half, x_sum + half,
                             acc + half * acc_stride, acc_stride, rows, scratch);
        return;
    }
    if (M > AVX512_TOKENS) {
        const size_t sixes = M - M % AVX512_TOKENS;
        avx512_many(panel, n_blocks, x, x_stride, sixes, x_sum, acc, acc_stride, rows, (uint8_t *)scratch);
        x += sixes * x_stride, x_sum += sixes, acc += sixes * acc_stride, M -= sixes;
    }
    switch (M) {
#define FEW(T) avx512_few_##T(panel, n_blocks, x, x_stride, x_sum, acc, acc_stride, rows)
    case 1: avx512_one(panel, n_blocks, x, x_sum[0], acc, rows); break;
    case 2: FEW(2); break;
    case 3: FEW(3); break;
    case 4: FEW(4); break;
    case 5: FEW(5); break;
    case 6: FEW(6); break;
#undef FEW
    }
}

#endif
#endif
