/* Five weights per byte, 1.6 bits each instead of 2, and the ternary product on them with AVX-512 VNNI.
 *
 * Layout: as in panel.h, with 20 columns in a block of 256 bytes. A byte holds five codes, base 3, as a fraction: byte
 * r0 stands for r0 / 256, and multiplying by 3 yields its digits from the top, as in TQ1_0:
 *     3 r_n = 256 t_n + r_{n+1}     t_n = code of column 20 b + 4 n + i  (n = 0..4; i is the byte's place in its row's four)
 *
 * The digits need not be extracted: sum t_n x_n = (3 sum r_n x_n - sum r_{n+1} x_n) / 256, and r_{n+1} = r_n + r_n +
 * r_n in bytes that wrap. So 64 digits take two additions and two dot products into two sums A and B; at the end (3 A -
 * B) / 256. Exact in int32 that wraps: 256 times the result must fit, |sum w x| <= 128 K < 2^23, so K < 65,536
 * (`DENSE_MAX_K`; for larger K the scalar kernel runs). Instructions for 64 weights: 4 (2 bits: 2); bytes: 12.8 (16).
 * Three tokens or more: digits are extracted to bytes, 240 columns at a time, for the tiles of ternary_avx512.h.
 *
 * Measured as in ternary_avx512.h, one thread, G multiply-adds/s: 1 token 75, which is 15 GB/s (2 bits: 148 and 37); 4
 *   tokens 95, 8: 139, 16: 189, 64: 249 (2 bits: 220 and 267). So it wins for one token at a time where a thread reads
 *   less than 15 GB/s: 2B-4T's linears from memory, two threads on a busy machine that reads 3 to 4 GB/s: 40.1 against
 *   46.2 ms (best of 15), 47.5 against 52.6 (median). backends/cpu/extension.py has the rule.
 *   Digits by comparing bytes (6 instructions for 64), not by halves of int16 lanes (9): layers of 2B-4T on two threads
 *   1.12 times as fast for 8 tokens, 1.08 for 16, 1.03 for 64. */
#ifndef BITNET_REF_DENSE_AVX512_H
#define BITNET_REF_DENSE_AVX512_H

#include "panel.h"

enum { DENSE_BLOCK_K = 20, DENSE_DIGITS = 5, DENSE_MAX_K = 65535 };
enum { DENSE_CHUNK = 12 /* blocks unpacked at a time */, DENSE_FEW_TOKENS = 2 /* more go by tiles */ };

static inline uint8_t dense_byte(const uint8_t *codes) { /* 5 codes -> the smallest byte with these digits */
    unsigned value = 0;
    for (int n = 0; n < DENSE_DIGITS; n++) value = 3 * value + codes[n];
    return (uint8_t)((256 * value + 242) / 243);
}

static inline void dense_digits(uint8_t byte, uint8_t *codes) {
    unsigned r = byte;
    for (int n = 0; n < DENSE_DIGITS; n++) codes[n] = (uint8_t)(3 * r >> 8), r = 3 * r & 255;
}

/* Byte j of a packed row holds the columns 4j .. 4j+3: digit j % 5 of the four bytes of a row in block j / 5. */
static void pack_dense_panel(const uint8_t *packed, size_t rows, size_t row_bytes, uint8_t *panel) {
    const size_t n_blocks = (row_bytes + DENSE_DIGITS - 1) / DENSE_DIGITS;
    memset(panel, 0, n_blocks * BLOCK_BYTES);
    for (size_t r = 0; r < rows; r++)
        for (size_t b = 0; b < n_blocks; b++)
            for (int i = 0; i < 4; i++) {
                uint8_t codes[DENSE_DIGITS] = {0};
                for (size_t n = 0; n < DENSE_DIGITS && DENSE_DIGITS * b + n < row_bytes; n++)
                    codes[n] = packed[r * row_bytes + DENSE_DIGITS * b + n] >> 2 * i & 3;
                panel[b * BLOCK_BYTES + 4 * r + i] = dense_byte(codes);
            }
}

static void unpack_dense_panel(const uint8_t *panel, size_t rows, size_t row_bytes, uint8_t *packed) {
    memset(packed, 0, rows * row_bytes);
    for (size_t r = 0; r < rows; r++)
        for (size_t b = 0; b * DENSE_DIGITS < row_bytes; b++)
            for (int i = 0; i < 4; i++) {
                uint8_t codes[DENSE_DIGITS];
                dense_digits(panel[b * BLOCK_BYTES + 4 * r + i], codes);
                for (size_t n = 0; n < DENSE_DIGITS && DENSE_DIGITS * b + n < row_bytes; n++)
                    packed[r * row_bytes + DENSE_DIGITS * b + n] |= (uint8_t)(codes[n] << 2 * i);
            }
}

static void dense_panel_scalar(TERNARY_ARGS, size_t rows, void *scratch) {
    (void)scratch;
    for (size_t m = 0; m < M; m++)
        for (size_t r = 0; r < rows; r++) {
            int32_t sum = -x_sum[m];
            for (size_t b = 0; b < n_blocks; b++)
                for (int i = 0; i < 4; i++) {
                    uint8_t codes[DENSE_DIGITS];
                    dense_digits(panel[b * BLOCK_BYTES + 4 * r + i], codes);
                    for (int n = 0; n < DENSE_DIGITS; n++)
                        sum += codes[n] * x[m * x_stride + b * DENSE_BLOCK_K + 4 * n + i];
                }
            acc[m * acc_stride + r] = sum;
        }
}

#if defined(__x86_64__)
#include "ternary_avx512.h"

AVX512_TARGET static void dense_one(const uint8_t *panel, size_t n_blocks, const int8_t *x, int32_t x_sum, int32_t *acc,
                                    size_t rows) {
#define ZERO(q) __m512i a_##q = _mm512_setzero_si512(), b_##q = a_##q;
    EACH_VECTOR(ZERO)
    for (size_t b = 0; b < n_blocks; b++) {
        const uint8_t *block = panel + b * BLOCK_BYTES;
        const int8_t *xb = x + b * DENSE_BLOCK_K;
#define LOAD(q)                                                                                                        \
    _mm_prefetch((const char *)block + AVX512_PREFETCH + q * VECTOR_BYTES, _MM_HINT_T0);                               \
    __m512i r_##q = _mm512_loadu_si512(block + q * VECTOR_BYTES);
#define STEP_Q(q)                                                                                                      \
    a_##q = avx512_dot(a_##q, r_##q, word);                                                                            \
    r_##q = _mm512_add_epi8(_mm512_add_epi8(r_##q, r_##q), r_##q);                                                     \
    b_##q = avx512_dot(b_##q, r_##q, word);
#define DIGIT(n)                                                                                                       \
    {                                                                                                                  \
        const __m512i word = avx512_word(xb + 4 * n);                                                                  \
        EACH_VECTOR(STEP_Q)                                                                                        \
    }
        EACH_VECTOR(LOAD)
        DIGIT(0) DIGIT(1) DIGIT(2) DIGIT(3) DIGIT(4)
    }
#define FINISH(q)                                                                                                      \
    {                                                                                                                  \
        const __m512i sum = _mm512_sub_epi32(_mm512_add_epi32(_mm512_slli_epi32(a_##q, 1), a_##q), b_##q);             \
        const __m512i less = _mm512_sub_epi32(sum, _mm512_set1_epi32((int32_t)(256u * (uint32_t)x_sum)));              \
        _mm512_mask_storeu_epi32(acc + 16 * q, avx512_mask(q, rows), _mm512_srai_epi32(less, 8));                      \
    }
    EACH_VECTOR(FINISH)
#undef ZERO
#undef LOAD
#undef STEP_Q
#undef DIGIT
#undef FINISH
}

/* 20 * n_blocks columns -> bytes, [group of 4 columns][64 rows][4]. 3 r reaches 256 from r = 86 on, and 512 from 171.
 */
AVX512_TARGET static void dense_unpack(const uint8_t *panel, size_t n_blocks, uint8_t *bytes) {
    const __m512i one = _mm512_set1_epi8(1), two = _mm512_set1_epi8(2);
    const __m512i min_one = _mm512_set1_epi8(86), min_two = _mm512_set1_epi8((char)171);
    for (size_t b = 0; b < n_blocks; b++)
        for (int q = 0; q < 4; q++) {
            __m512i r = _mm512_loadu_si512(panel + b * BLOCK_BYTES + q * VECTOR_BYTES);
            for (int n = 0; n < DENSE_DIGITS; n++) {
                const __m512i digit = _mm512_maskz_mov_epi8(_mm512_cmpge_epu8_mask(r, min_one), one);
                _mm512_store_si512(bytes + (DENSE_DIGITS * b + n) * BLOCK_BYTES + q * VECTOR_BYTES,
                                   _mm512_mask_mov_epi8(digit, _mm512_cmpge_epu8_mask(r, min_two), two));
                r = _mm512_add_epi8(_mm512_add_epi8(r, r), r);
            }
        }
}

/* Any M. `acc` has all 64 rows. */
AVX512_TARGET static void dense_many(TERNARY_ARGS, uint8_t *scratch) {
    avx512_begin(x_sum, M, acc, acc_stride);
    for (size_t start = 0; start < n_blocks; start += DENSE_CHUNK) {
        const size_t blocks = n_blocks - start < DENSE_CHUNK ? n_blocks - start : DENSE_CHUNK;
        dense_unpack(panel + start * BLOCK_BYTES, blocks, scratch);
        avx512_tiles(scratch, DENSE_DIGITS * blocks, x + start * DENSE_BLOCK_K, x_stride, M,
                     panel + (start + blocks) * BLOCK_BYTES, acc, acc_stride);
    }
}

AVX512_TARGET static void dense_panel_avx512(TERNARY_ARGS, size_t rows, void *scratch) {
    if (M > DENSE_FEW_TOKENS) {
        ternary_64_rows(dense_many, TERNARY_PASS, rows, scratch);
        return;
    }
    for (size_t m = 0; m < M; m++) dense_one(panel, n_blocks, x + m * x_stride, x_sum[m], acc + m * acc_stride, rows);
}

#endif
#endif
