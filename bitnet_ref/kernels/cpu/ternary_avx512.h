/* The ternary product with AVX-512 VNNI: vpdpbusd multiplies 64 unsigned codes by 64 signed activations and adds groups
 * of 4 products into 16 lanes of int32.
 *
 * Plain version: ternary_scalar.h.
 * One token, `avx512_one`: memory is the limit, so the aim is few instructions per byte. The codes are not shifted
 *   down: `v & 0x0C` is 4 * code, `v & 0x30` 16 * code, `v & 0xC0` 64 * code; each has its own accumulator, shifted
 *   once at the end (exact: the sum is a multiple). 4 ANDs + 4 dot products for 64 bytes, no shift in the loop. An
 *   accumulator reaches K/4 * 128 * 128, so K < 2^19 (`AVX512_MAX_K`; for larger K the scalar kernel runs).
 * More, `avx512_many`: tiles of up to six tokens keep 24 sums in registers over all columns of the panel. The weights
 *   are not unpacked: each chunk of 1024 columns (16 KB, in L1) is read four times, once per 2-bit field, and the sums
 *   are scaled between (`AVX512_FIELDS`). A sum reaches 64 * 2 * 128 * K, so K <= 2^17. Each step prefetches its share
 *   of the next panel, into L2.
 *
 * Measured, one thread of an EPYC (Zen 5, two 512-bit dot products per cycle), 64 rows of 2560 columns, as a fraction of
 *   the rate of vpdpbusd alone (500 G multiply-adds/s); in brackets `avx512_tiles` over unpacked weights, as before:
 *   in L2        2 tokens 0.83 (0.82) - 4: 0.97 (0.98) - 6: 0.97 (0.70) - 8: 0.98 (0.76) - 16: 0.97 (0.84) - 64: 0.98 (0.91)
 *   from memory  2: 0.39 (0.44) - 4: 0.80 (0.84) - 6: 0.94 (0.66) - 8: 0.90 (0.59) - 16: 0.93 (0.80) - 64: 0.93 (0.88)
 *   6912 columns from memory  2: 0.60 (0.52) - 4: 0.94 (0.83) - 8: 0.89 (0.60) - 16: 0.94 (0.82) - 64: 0.94 (0.87)
 *   Unpacking took the store port (4 stores per vector), and sums loaded and stored every 256 columns 3%. Up to four
 *   tokens had been computed from codes shifted in registers; a second text that was no faster.
 * Limit elsewhere: 4 ANDs beside 24 dot products share the two ports of an Intel processor (0.86 of its peak), where
 *   unpacked weights gave 0.63 of it for 4 tokens, 0.72 for 8, 0.83 for 16 and 0.87 for 64 (Cascade Lake).
 *   On Emerald Rapids the tiles reach that bound: 0.83 to 0.91 of its peak for 32 tokens and more, one thread.
 * Tried with the new tiles: chunks of 256, 512, 2048 or all columns: 0 to 2%, 0 to 1%, 0%, 0 to 4% slower.
 *   Tiles of 32 rows and up to 14 tokens, 28 dot products beside 2 ANDs (Emerald Rapids, in turn): 16 to 512 tokens 1.00
 *   to 1.06 times as fast, 8 and 12 from memory 0.8 to 0.9. Not worth a second text.
 * Tried with unpacked weights, which the 1.6-bit layout still takes (Cascade Lake, G multiply-adds/s of 307):
 *   - accumulators as an array in the tile loop, intrinsics: 65 (all of it stored in every step)
 *   - as variables, intrinsics: 125 (copied before and spilled after each dot product)
 *   - as variables, each dot product in inline assembly: 125 (no copies, but ten accumulators live in memory)
 *   - the whole loop of the tile in assembly: 254; with sums loaded from and stored to `acc`, not a buffer: 267
 *   - columns prefetched by all tiles, not by the first alone, whose loads then waited: 60 tokens from memory 0.81 to
 *     0.84, of 6912 columns 0.80 to 0.85
 *   - two or four groups per iteration, activations reordered as they are used: 0 to 1%
 *   - prefetching the next tokens' activations, or sums, before each tile: 3 to 5% slower (they are in L2)
 *   - prefetching the result's cache lines for writing, in the last columns: 1 to 2% faster, not worth its argument */
#ifndef BITNET_REF_TERNARY_AVX512_H
#define BITNET_REF_TERNARY_AVX512_H

#include "panel.h"

#if defined(__x86_64__)
#include <immintrin.h>

#define AVX512_TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512vnni")))
#define AVX512_INLINE AVX512_TARGET static inline __attribute__((always_inline))
enum { AVX512_TOKENS = 6, AVX512_PREFETCH = 2048, AVX512_CHUNK = 64, AVX512_MAX_K = 1 << 17 };

/* the rows 16 q .. 16 q + 15 that the panel has */
AVX512_INLINE __mmask16 avx512_mask(size_t q, size_t rows) {
    const size_t left = rows > 16 * q ? rows - 16 * q : 0;
    return left >= 16 ? (__mmask16)0xFFFF : (__mmask16)((1u << left) - 1);
}

/* stores sum - x_sum to those rows of one token's results */
AVX512_INLINE void avx512_store(int32_t *acc, size_t q, size_t rows, __m512i sum, int32_t x_sum) {
    _mm512_mask_storeu_epi32(acc + 16 * q, avx512_mask(q, rows), _mm512_sub_epi32(sum, _mm512_set1_epi32(x_sum)));
}

/* 4 activations in every lane: a load, which does not use the ports that multiply */
AVX512_INLINE __m512i avx512_word(const int8_t *x) { return _mm512_broadcastd_epi32(_mm_loadu_si32(x)); }

/* sum + the products of 4 codes and 4 activations in every lane, in place: with the intrinsic GCC 12 copies the sum
 * first. */
AVX512_INLINE __m512i avx512_dot(__m512i sum, __m512i codes, __m512i xs) {
    __asm__("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(codes), "v"(xs));
    return sum;
}

/* Accumulators are separate variables, defined by macros: GCC 12 keeps an array of them in memory (it unrolls the loops
 * too late), and every step then stores all of it. */
#define EACH_VECTOR(DO) DO(0) DO(1) DO(2) DO(3)

AVX512_TARGET static void avx512_one(const uint8_t *panel, size_t n_blocks, const int8_t *x, int32_t x_sum,
                                     int32_t *acc, size_t rows) {
    const __m512i field0 = _mm512_set1_epi8(0x03), field1 = _mm512_set1_epi8(0x0C), field2 = _mm512_set1_epi8(0x30),
                  field3 = _mm512_set1_epi8((char)0xC0);
#define ZERO(q) \
    __m512i sum_##q##0 = _mm512_setzero_si512(), sum_##q##1 = sum_##q##0, sum_##q##2 = sum_##q##0, sum_##q##3 = sum_##q##0;
    EACH_VECTOR(ZERO)
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
        EACH_VECTOR(ADD)
    }
#define STORE(q)                                                                                                       \
    avx512_store(acc, q, rows,                                                                                         \
                 _mm512_add_epi32(_mm512_add_epi32(sum_##q##0, _mm512_srai_epi32(sum_##q##1, 2)),                      \
                                  _mm512_add_epi32(_mm512_srai_epi32(sum_##q##2, 4), _mm512_srai_epi32(sum_##q##3, 6))), \
                 x_sum);
    EACH_VECTOR(STORE)
#undef ZERO
#undef ADD
#undef STORE
}

/* a vector of a panel, 16 columns of 16 rows -> 4 vectors of bytes, 4 columns each, `stride` bytes apart */
AVX512_INLINE void avx512_unpack_vector(const uint8_t *vector, uint8_t *out, const size_t stride) {
    const __m512i field = _mm512_set1_epi8(0x03), codes = _mm512_loadu_si512(vector);
    _mm512_store_si512(out, _mm512_and_si512(codes, field));
    _mm512_store_si512(out + stride, _mm512_and_si512(_mm512_srli_epi16(codes, 2), field));
    _mm512_store_si512(out + 2 * stride, _mm512_and_si512(_mm512_srli_epi16(codes, 4), field));
    _mm512_store_si512(out + 3 * stride, _mm512_and_si512(_mm512_srli_epi16(codes, 6), field));
}

/* 16 * n_blocks columns of a panel -> bytes, [group of 4 columns][vector of 16 rows][64] */
AVX512_TARGET static void avx512_unpack(const uint8_t *panel, size_t n_blocks, uint8_t *bytes) {
    for (size_t b = 0; b < n_blocks; b++)
        for (int q = 0; q < 4; q++)
            avx512_unpack_vector(panel + b * BLOCK_BYTES + q * VECTOR_BYTES, bytes + b * 4 * BLOCK_BYTES + q * VECTOR_BYTES,
                                 BLOCK_BYTES);
}

/* acc (T, 64) += codes * x, of T tokens and n_groups groups of unpacked columns. Strides in bytes.
 *
 * In assembly, because 24 accumulators, 4 weight vectors and a broadcast fill 29 of the 32 registers. With intrinsics
 * or single inline instructions GCC 12 copied and spilled half of them in every step. Per group of 4 columns: 4 + 6
 * loads, 24 dot products. Each group prefetches `fetched` bytes of `next`, packed columns. TILE_TOKENS_T calls EACH(activations, sums, its 4 registers) for each token. */
#define TILE_TOKENS_1(EACH) EACH("(%[x])", "(%[acc])", "0", "1", "2", "3")
#define TILE_TOKENS_2(EACH) TILE_TOKENS_1(EACH) EACH("(%[x],%[x_stride])", "(%[acc],%[acc_stride])", "4", "5", "6", "7")
#define TILE_TOKENS_3(EACH) TILE_TOKENS_2(EACH) EACH("(%[x],%[x_stride],2)", "(%[acc],%[acc_stride],2)", "8", "9", "10", "11")
#define TILE_TOKENS_4(EACH) TILE_TOKENS_3(EACH) EACH("(%[x3])", "(%[acc3])", "12", "13", "14", "15")
#define TILE_TOKENS_5(EACH) TILE_TOKENS_4(EACH) EACH("(%[x3],%[x_stride])", "(%[acc3],%[acc_stride])", "16", "17", "18", "19")
#define TILE_TOKENS_6(EACH) \
    TILE_TOKENS_5(EACH) EACH("(%[x3],%[x_stride],2)", "(%[acc3],%[acc_stride],2)", "20", "21", "22", "23")
#define TILE_LOAD(x, acc, a, b, c, d)                                                                                  \
    "vmovdqu32 0" acc ", %%zmm" a "\n\tvmovdqu32 64" acc ", %%zmm" b "\n\t"                                            \
    "vmovdqu32 128" acc ", %%zmm" c "\n\tvmovdqu32 192" acc ", %%zmm" d "\n\t"
#define TILE_DOT4(INSTRUCTION, a, b, c, d)                                                                             \
    INSTRUCTION " %%zmm28, %%zmm24, %%zmm" a "\n\t" INSTRUCTION " %%zmm28, %%zmm25, %%zmm" b "\n\t"                    \
    INSTRUCTION " %%zmm28, %%zmm26, %%zmm" c "\n\t" INSTRUCTION " %%zmm28, %%zmm27, %%zmm" d "\n\t"
#define TILE_DOT(x, acc, a, b, c, d) "vpbroadcastd " x ", %%zmm28\n\t" TILE_DOT4("vpdpbusd", a, b, c, d)
#define TILE_STORE(x, acc, a, b, c, d)                                                                                 \
    "vmovdqu32 %%zmm" a ", 0" acc "\n\tvmovdqu32 %%zmm" b ", 64" acc "\n\t"                                            \
    "vmovdqu32 %%zmm" c ", 128" acc "\n\tvmovdqu32 %%zmm" d ", 192" acc "\n\t"
#define XMM_0_TO_28                                                                                                    \
    XMM_0_TO_15, "xmm16", "xmm17", "xmm18", "xmm19", "xmm20", "xmm21", "xmm22", "xmm23", "xmm24", "xmm25", "xmm26",    \
        "xmm27", "xmm28"
#define AVX512_TILE(T)                                                                                                 \
    AVX512_TARGET static void avx512_tile_##T(const uint8_t *bytes, size_t n_groups, const int8_t *x, size_t x_stride, \
                                              const uint8_t *next, size_t fetched, int32_t *acc, size_t acc_stride) {  \
        const int8_t *x3 = x + 3 * x_stride;                                                                           \
        char *acc3 = (char *)acc + 3 * acc_stride;                                                                     \
        __asm__ volatile(                                                                                              \
            TILE_TOKENS_##T(TILE_LOAD)                                                                                 \
            ".p2align 5\n"                                                                                             \
            "1:\n\t"                                                                                                   \
            "prefetcht0 (%[next])\n\t"                                                                                 \
            "vmovdqa32 (%[w]), %%zmm24\n\tvmovdqa32 64(%[w]), %%zmm25\n\t"                                             \
            "vmovdqa32 128(%[w]), %%zmm26\n\tvmovdqa32 192(%[w]), %%zmm27\n\t"                                         \
            TILE_TOKENS_##T(TILE_DOT)                                                                                  \
            "add $256, %[w]\n\tadd %[fetched], %[next]\n\tadd $4, %[x]\n\tadd $4, %[x3]\n\t"                           \
            "dec %[count]\n\t"                                                                                         \
            "jnz 1b\n\t"                                                                                               \
            TILE_TOKENS_##T(TILE_STORE)                                                                                \
            : [w] "+r"(bytes), [x] "+r"(x), [x3] "+r"(x3), [next] "+r"(next), [count] "+r"(n_groups)                   \
            : [x_stride] "r"(x_stride), [acc] "r"(acc), [acc3] "r"(acc3), [acc_stride] "r"(acc_stride),                \
              [fetched] "r"(fetched)                                                                                   \
            : "memory", "cc", XMM_0_TO_28);                                                                            \
    }
AVX512_TILE(1)
AVX512_TILE(2)
AVX512_TILE(3)
AVX512_TILE(4)
AVX512_TILE(5)
AVX512_TILE(6)

/* acc (M, 64) = -x_sum, to which the tiles add */
AVX512_TARGET static void avx512_begin(const int32_t *x_sum, size_t M, int32_t *acc, size_t acc_stride) {
    for (size_t m = 0; m < M; m++)
        for (size_t q = 0; q < 4; q++)
            _mm512_storeu_si512(acc + m * acc_stride + 16 * q, _mm512_set1_epi32(-x_sum[m]));
}

/* acc (M, 64) += codes * x of n_groups groups of unpacked columns */
AVX512_TARGET static void avx512_tiles(const uint8_t *bytes, size_t n_groups, const int8_t *x, size_t x_stride, size_t M,
                                       const uint8_t *next, int32_t *acc, size_t acc_stride) {
    const size_t acc_bytes = acc_stride * sizeof *acc, tiles = (M + AVX512_TOKENS - 1) / AVX512_TOKENS;
    const size_t fetched = (VECTOR_BYTES + tiles - 1) / tiles;
#define TILE(T) avx512_tile_##T(bytes, n_groups, x, x_stride, next, fetched, acc, acc_bytes)
    for (size_t m = 0, tokens; m < M; m += tokens, x += tokens * x_stride, acc += tokens * acc_stride) {
        /* 7 tokens as 4 and 3: a tile of one would wait for the latency of its sums */
        tokens = M - m == AVX512_TOKENS + 1 ? 4 : M - m < AVX512_TOKENS ? M - m : AVX512_TOKENS;
        switch (tokens) {
        case 1: TILE(1); break;
        case 2: TILE(2); break;
        case 3: TILE(3); break;
        case 4: TILE(4); break;
        case 5: TILE(5); break;
        case 6: TILE(6); break;
        }
        next += n_groups * fetched;
    }
#undef TILE
}

/* acc (T, 64) = codes * x of a whole panel, from packed columns. Horner's rule over the four fields of a byte: in each
 * chunk of AVX512_CHUNK blocks the sums are multiplied by 64; all columns of field 3 are added, as `v & 0xC0` = 64 *
 * code; the sums are divided by 4, those of field 2 are added, as 16 * code; and so on. So 24 sums take any field, and a
 * part of the weights costs one AND from memory, which has no shift and no copy. Registers as in `AVX512_TILE`; zmm29
 * is the field's mask. */
#define FIELDS_ZERO(x, acc, a, b, c, d)                                                                                \
    "vpxord %%zmm" a ", %%zmm" a ", %%zmm" a "\n\tvpxord %%zmm" b ", %%zmm" b ", %%zmm" b "\n\t"                       \
    "vpxord %%zmm" c ", %%zmm" c ", %%zmm" c "\n\tvpxord %%zmm" d ", %%zmm" d ", %%zmm" d "\n\t"
#define FIELDS_SHIFT(SHIFT, a, b, c, d)                                                                                \
    SHIFT ", %%zmm" a ", %%zmm" a "\n\t" SHIFT ", %%zmm" b ", %%zmm" b "\n\t"                                          \
    SHIFT ", %%zmm" c ", %%zmm" c "\n\t" SHIFT ", %%zmm" d ", %%zmm" d "\n\t"
#define FIELDS_TIMES_64(x, acc, a, b, c, d) FIELDS_SHIFT("vpslld $6", a, b, c, d)
#define FIELDS_BY_4(x, acc, a, b, c, d) FIELDS_SHIFT("vpsrad $2", a, b, c, d)
#define FIELDS_DOT_0(x, acc, a, b, c, d) TILE_DOT("0" x, acc, a, b, c, d)
#define FIELDS_DOT_1(x, acc, a, b, c, d) TILE_DOT("4" x, acc, a, b, c, d)
#define FIELDS_DOT_2(x, acc, a, b, c, d) TILE_DOT("8" x, acc, a, b, c, d)
#define FIELDS_DOT_3(x, acc, a, b, c, d) TILE_DOT("12" x, acc, a, b, c, d)
#define FIELDS_PASS(TOKENS, field)                                                                                     \
    "mov %[n], %[count]\n\t"                                                                                           \
    ".p2align 5\n"                                                                                                     \
    "1:\n\t"                                                                                                           \
    "prefetcht1 (%[next])\n\t"                                                                                         \
    "vpandd (%[w]), %%zmm29, %%zmm24\n\tvpandd 64(%[w]), %%zmm29, %%zmm25\n\t"                                         \
    "vpandd 128(%[w]), %%zmm29, %%zmm26\n\tvpandd 192(%[w]), %%zmm29, %%zmm27\n\t"                                     \
    TOKENS(FIELDS_DOT_##field)                                                                                         \
    "add $256, %[w]\n\tadd %[fetched], %[next]\n\tadd $16, %[x]\n\tadd $16, %[x3]\n\t"                                 \
    "dec %[count]\n\t"                                                                                                 \
    "jnz 1b\n\t"
/* back to the chunk's first block; the next field's mask and scale */
#define FIELDS_BACK(TOKENS)                                                                                            \
    "shl $4, %[n]\n\tsub %[n], %[x]\n\tsub %[n], %[x3]\n\tshl $4, %[n]\n\tsub %[n], %[w]\n\tshr $8, %[n]\n\t"          \
    "vpsrld $2, %%zmm29, %%zmm29\n\t" TOKENS(FIELDS_BY_4)
#define AVX512_FIELDS(T)                                                                                               \
    AVX512_TARGET static void avx512_fields_##T(const uint8_t *panel, size_t n_blocks, const int8_t *x,                \
                                                size_t x_stride, const uint8_t *next, size_t fetched, int32_t *acc,    \
                                                size_t acc_stride) {                                                   \
        static const uint32_t field3 = 0xC0C0C0C0u;                                                                    \
        const int8_t *x3 = x + 3 * x_stride;                                                                           \
        char *acc3 = (char *)acc + 3 * acc_stride;                                                                     \
        size_t n, count;                                                                                               \
        __asm__ volatile(                                                                                              \
            TILE_TOKENS_##T(FIELDS_ZERO)                                                                               \
            "2:\n\t"                                                                                                   \
            "mov %[chunk], %[n]\n\tcmp %[n], %[left]\n\tcmovb %[left], %[n]\n\t"                                       \
            "vpbroadcastd %[field3], %%zmm29\n\t"                                                                      \
            TILE_TOKENS_##T(FIELDS_TIMES_64)                                                                           \
            FIELDS_PASS(TILE_TOKENS_##T, 3) FIELDS_BACK(TILE_TOKENS_##T)                                               \
            FIELDS_PASS(TILE_TOKENS_##T, 2) FIELDS_BACK(TILE_TOKENS_##T)                                               \
            FIELDS_PASS(TILE_TOKENS_##T, 1) FIELDS_BACK(TILE_TOKENS_##T)                                               \
            FIELDS_PASS(TILE_TOKENS_##T, 0)                                                                            \
            "sub %[n], %[left]\n\t"                                                                                    \
            "jnz 2b\n\t"                                                                                               \
            TILE_TOKENS_##T(TILE_STORE)                                                                                \
            : [w] "+r"(panel), [x] "+r"(x), [x3] "+r"(x3), [next] "+r"(next), [left] "+r"(n_blocks), [n] "=&r"(n),     \
              [count] "=&r"(count)                                                                                     \
            : [x_stride] "r"(x_stride), [acc] "r"(acc), [acc3] "r"(acc3), [acc_stride] "r"(acc_stride),                \
              [fetched] "r"(fetched), [field3] "m"(field3), [chunk] "i"(AVX512_CHUNK)                                  \
            : "memory", "cc", XMM_0_TO_28, "xmm29");                                                                   \
    }
AVX512_FIELDS(1)
AVX512_FIELDS(2)
AVX512_FIELDS(3)
AVX512_FIELDS(4)
AVX512_FIELDS(5)
AVX512_FIELDS(6)

/* Any M. `acc` has all 64 rows. */
AVX512_TARGET static void avx512_many(TERNARY_ARGS, uint8_t *scratch) {
    (void)scratch;
    const size_t acc_bytes = acc_stride * sizeof *acc, n_bytes = n_blocks * BLOCK_BYTES;
    size_t tiles = (M + AVX512_TOKENS - 1) / AVX512_TOKENS;
    /* One tile fetches the next chunk of its panel, several fetch the next panel. */
    const uint8_t *next = panel + (tiles > 1 ? n_bytes : AVX512_CHUNK * BLOCK_BYTES);
    const size_t fetched = (VECTOR_BYTES + tiles - 1) / tiles;
#define FIELDS(T) case T: avx512_fields_##T(panel, n_blocks, x, x_stride, next, fetched, acc, acc_bytes); break;
    for (size_t tokens; tiles; tiles--) {
        tokens = (M + tiles - 1) / tiles; /* 8 as 4 and 4: tiles of one or two would wait for the latency of their sums */
        switch (tokens) { FIELDS(1) FIELDS(2) FIELDS(3) FIELDS(4) FIELDS(5) FIELDS(6) }
        for (size_t t = 0; t < tokens; t++)
            for (size_t q = 0; q < 4; q++) {
                int32_t *to = acc + t * acc_stride + 16 * q;
                _mm512_storeu_si512(to, _mm512_sub_epi32(_mm512_loadu_si512(to), _mm512_set1_epi32(x_sum[t])));
            }
        next += 4 * n_blocks * fetched;
        M -= tokens, x += tokens * x_stride, acc += tokens * acc_stride, x_sum += tokens;
    }
#undef FIELDS
}

AVX512_TARGET static void ternary_panel_avx512(TERNARY_ARGS, size_t rows, void *scratch) {
    if (M == 1)
        avx512_one(panel, n_blocks, x, x_sum[0], acc, rows);
    else
        ternary_64_rows(avx512_many, TERNARY_PASS, rows, scratch);
}

#endif
#endif
