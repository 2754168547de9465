/* The ternary product with AVX-512 VNNI: vpdpbusd multiplies 64 unsigned codes by 64 signed activations and adds groups
 * of 4 products into 16 lanes of int32.
 *
 * Plain version: ternary_scalar.h.
 * One token, `avx512_one`: memory is the limit, so the aim is few instructions per byte. The codes are not shifted
 *   down: `v & 0x0C` is 4 * code, `v & 0x30` 16 * code, `v & 0xC0` 64 * code; each has its own accumulator, shifted
 *   once at the end (exact: the sum is a multiple). 4 ANDs + 4 dot products for 64 bytes, no shift in the loop. An
 *   accumulator reaches K/4 * 128 * 128, so K < 2^19 (`AVX512_MAX_K`; for larger K the scalar kernel runs).
 * 2 to 4 tokens, `avx512_few`: codes are shifted down in registers and used for each token: 16 accumulators.
 * More, `avx512_many`: 256 columns of the panel are unpacked to bytes once (16 KB, in L1) and used for all tokens, up to
 *   six at a time. The sums in `acc` start at -x_sum; a tile loads and stores them. Each tile prefetches its share of
 *   the next columns: 256 columns are a page of 4 KB, at whose end the hardware prefetcher stops.
 *
 * Measured, one thread of a Cascade Lake Xeon, 64 rows of 2560 columns in L2, as a fraction of the rate of vpdpbusd
 *   alone (307 G multiply-adds/s):
 *   1 token 0.19 to 0.48 (memory or L2 is the limit) - 4: 0.63 - 8: 0.72 - 16: 0.83 - 32: 0.84 - 64: 0.87 - 128: 0.88.
 *   Of the time for 64 tokens the loop of the tiles takes 0.90, loading sums 0.03, unpacking 0.03.
 *   Dequantised and stored to a result of 6912 columns: 0.76, because its cache lines come from a far cache first.
 * Tried (G multiply-adds/s):
 *   - accumulators as an array in the tile loop, intrinsics: 65 (all of it stored in every step)
 *   - as variables, intrinsics: 125 (copied before and spilled after each dot product)
 *   - as variables, each dot product in inline assembly: 125 (no copies, but ten accumulators live in memory)
 *   - the whole loop of the tile in assembly: 254; with sums loaded from and stored to `acc`, not a buffer: 267
 *   - tiles, not `avx512_few`, after the last six tokens: 8 tokens 0.64 to 0.72 of the peak, 11: 0.64 to 0.80, 16: 0.73
 *     to 0.83, 64: 0.85 to 0.87
 *   - columns prefetched by all tiles, not by the first alone, whose loads then waited: 60 tokens from memory 0.81 to
 *     0.84, of 6912 columns 0.80 to 0.85
 *   - two or four groups per iteration, activations reordered as they are used: 0 to 1%
 *   - chunks of 128, 512 or all columns, not 256: 2 to 8% slower
 *   - prefetching the next tokens' activations, or sums, before each tile: 3 to 5% slower (they are in L2)
 *   - prefetching the result's cache lines for writing, in the last columns: 1 to 2% faster, not worth its argument */
#ifndef BITNET_REF_TERNARY_AVX512_H
#define BITNET_REF_TERNARY_AVX512_H

#include "panel.h"

#if defined(__x86_64__)
#include <immintrin.h>

#define AVX512_TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512vnni")))
#define AVX512_INLINE AVX512_TARGET static inline __attribute__((always_inline))
enum { AVX512_TOKENS = 6, AVX512_FEW_TOKENS = 4, AVX512_PREFETCH = 2048, AVX512_MAX_K = 1 << 19 };

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

/* sum_tq: of token t and vector q */
#define FEW_TOKENS_2(DO, q) DO(0, q) DO(1, q)
#define FEW_TOKENS_3(DO, q) FEW_TOKENS_2(DO, q) DO(2, q)
#define FEW_TOKENS_4(DO, q) FEW_TOKENS_3(DO, q) DO(3, q)
#define FEW_ZERO(t, q) __m512i sum_##t##q = _mm512_setzero_si512();
#define FEW_ADD(t, q) sum_##t##q = avx512_dot(sum_##t##q, part, avx512_word(xb + t * x_stride + 4 * s));
#define FEW_STORE(t, q) avx512_store(acc + t * acc_stride, q, rows, sum_##t##q, x_sum[t]);
#define FEW_FIELD(TOKENS, q, field_number)                                                                             \
    {                                                                                                                  \
        enum { s = field_number };                                                                                     \
        const __m512i part = _mm512_and_si512(_mm512_srli_epi16(codes, 2 * s), field);                                 \
        TOKENS(FEW_ADD, q)                                                                                             \
    }
#define FEW_VECTOR(TOKENS, q)                                                                                          \
    {                                                                                                                  \
        _mm_prefetch((const char *)block + AVX512_PREFETCH + q * VECTOR_BYTES, _MM_HINT_T0);                           \
        const __m512i codes = _mm512_loadu_si512(block + q * VECTOR_BYTES);                                            \
        FEW_FIELD(TOKENS, q, 0) FEW_FIELD(TOKENS, q, 1) FEW_FIELD(TOKENS, q, 2) FEW_FIELD(TOKENS, q, 3)                \
    }
#define AVX512_FEW(NAME, TOKENS)                                                                                       \
    AVX512_TARGET static void NAME(const uint8_t *panel, size_t n_blocks, const int8_t *x, size_t x_stride,            \
                                   const int32_t *x_sum, int32_t *acc, size_t acc_stride, size_t rows) {               \
        const __m512i field = _mm512_set1_epi8(0x03);                                                                  \
        TOKENS(FEW_ZERO, 0) TOKENS(FEW_ZERO, 1) TOKENS(FEW_ZERO, 2) TOKENS(FEW_ZERO, 3)                                \
        for (size_t b = 0; b < n_blocks; b++) {                                                                        \
            const uint8_t *block = panel + b * BLOCK_BYTES;                                                            \
            const int8_t *xb = x + b * BLOCK_K;                                                                        \
            FEW_VECTOR(TOKENS, 0) FEW_VECTOR(TOKENS, 1) FEW_VECTOR(TOKENS, 2) FEW_VECTOR(TOKENS, 3)                    \
        }                                                                                                              \
        TOKENS(FEW_STORE, 0) TOKENS(FEW_STORE, 1) TOKENS(FEW_STORE, 2) TOKENS(FEW_STORE, 3)                            \
    }
AVX512_FEW(avx512_few_2, FEW_TOKENS_2)
AVX512_FEW(avx512_few_3, FEW_TOKENS_3)
AVX512_FEW(avx512_few_4, FEW_TOKENS_4)

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

/* Any M. `acc` has all 64 rows. */
AVX512_TARGET static void avx512_many(TERNARY_ARGS, uint8_t *scratch) {
    avx512_begin(x_sum, M, acc, acc_stride);
    for (size_t start = 0; start < n_blocks; start += SCRATCH_K / BLOCK_K) {
        const size_t blocks = n_blocks - start < SCRATCH_K / BLOCK_K ? n_blocks - start : SCRATCH_K / BLOCK_K;
        avx512_unpack(panel + start * BLOCK_BYTES, blocks, scratch);
        avx512_tiles(scratch, 4 * blocks, x + start * BLOCK_K, x_stride, M, panel + (start + blocks) * BLOCK_BYTES, acc,
                     acc_stride);
    }
}

AVX512_TARGET static void ternary_panel_avx512(TERNARY_ARGS, size_t rows, void *scratch) {
    switch (M) {
    case 0: break;
#define FEW(T) avx512_few_##T(panel, n_blocks, x, x_stride, x_sum, acc, acc_stride, rows)
    case 1: avx512_one(panel, n_blocks, x, x_sum[0], acc, rows); break;
    case 2: FEW(2); break;
    case 3: FEW(3); break;
    case 4: FEW(4); break;
    default: ternary_64_rows(avx512_many, TERNARY_PASS, rows, scratch);
#undef FEW
    }
}

#endif
#endif
