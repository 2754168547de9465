/* The ternary product by table look-up, as bitnet.cpp's TL1. The sums of two activations times every pair of weights
 * are tabulated once per token; each pair of weights, a nibble, looks up its sum. Exact, with AVX2 or without SIMD.
 *
 *     code pair (c0, c1), 2 bits each = nibble c0 + 4 c1:   (c0 - 1) x0 + (c1 - 1) x1 + 256  =  low + 32 high
 *
 * A sum is -256 to 256. vpshufb looks up 32 nibbles in a table of 16 bytes, so a sum is stored as two bytes of 5 bits
 * (low 0 to 31, high 0 to 16). (TL1 splits it 8 and 8, and must widen after every look-up.) So the 8 sums of a block of
 * 16 columns add up in bytes (low 248, high 128 at most); low + 32 high (at most 4,344) is added in uint16 (15 blocks
 * fit, 65,160), then in int32.
 * The panel differs from panel.h: all lanes look up in the same table, so a vector holds the same columns of 64 rows:
 *     block b, row r, columns 16 b + 4 v .. + 3:   byte 256 b + 64 v + r, which is the row's packed byte unchanged
 * Tables: 8 pairs per block, 16 bytes of low and 16 of high each: 16 bytes per activation.
 *
 * 32 rows x 16 columns take 16 look-ups, 16 additions, 12 instructions for the nibbles, 6 to widen: 50 for 512
 * multiply-adds. ternary_avx2.h takes 60, but vpshufb runs on one port only.
 * Measured as in ternary_avx512.h: 49 to 53 G multiply-adds/s on one thread for 1 token (ternary_avx2.h: 50 to 54) and
 *   for more tokens (80 to 98). From memory, two threads, 2B-4T's linears: 10 to 15% slower than multiply-add, which
 *   reads as many bytes and no tables (41 KB for 2560 columns). Kept for comparison: look-up pays where a processor has
 *   no int8 product, and AVX2 has one. */
#ifndef BITNET_REF_TABLE_AVX2_H
#define BITNET_REF_TABLE_AVX2_H

#include "panel.h"

enum { TABLE_BYTES = 256 /* per token and block */, TABLE_PAIRS = 8, TABLE_BIAS = 256, TABLE_WIDEN = 15 };

static void pack_table_panel(const uint8_t *packed, size_t rows, size_t row_bytes, uint8_t *panel) {
    const size_t n_blocks = (row_bytes + 3) / 4;
    memset(panel, 0, n_blocks * BLOCK_BYTES);
    for (size_t r = 0; r < rows; r++)
        for (size_t i = 0; i < row_bytes; i++) panel[i * PANEL_ROWS + r] = packed[r * row_bytes + i];
}

static void unpack_table_panel(const uint8_t *panel, size_t rows, size_t row_bytes, uint8_t *packed) {
    for (size_t r = 0; r < rows; r++)
        for (size_t i = 0; i < row_bytes; i++) packed[r * row_bytes + i] = panel[i * PANEL_ROWS + r];
}

/* x (16 * n_blocks) of one token -> its tables, TABLE_BYTES per block: for each pair 16 bytes of low, 16 of high */
static void table_expand(const int8_t *x, size_t n_blocks, uint8_t *tables) {
    for (size_t pair = 0; pair < n_blocks * TABLE_PAIRS; pair++) {
        const int x0 = x[2 * pair], x1 = x[2 * pair + 1];
        for (int nibble = 0; nibble < 16; nibble++) {
            const int sum = ((nibble & 3) - 1) * x0 + ((nibble >> 2) - 1) * x1 + TABLE_BIAS; /* code 3 does not occur */
            tables[32 * pair + nibble] = (uint8_t)(sum & 31);
            tables[32 * pair + 16 + nibble] = (uint8_t)(sum >> 5);
        }
    }
}

/* x: the tables of M tokens, x_stride bytes apart; x_sum is not needed */
static void table_panel_scalar(TERNARY_ARGS, size_t rows, void *scratch) {
    (void)x_sum, (void)scratch;
    for (size_t m = 0; m < M; m++) {
        const uint8_t *tables = (const uint8_t *)x + m * x_stride;
        for (size_t r = 0; r < rows; r++) {
            int32_t sum = 0;
            for (size_t i = 0; i < 4 * n_blocks; i++) {
                const uint8_t byte = panel[i * PANEL_ROWS + r], *table = tables + 64 * i;
                sum += table[byte & 15] + 32 * table[16 + (byte & 15)] + table[32 + (byte >> 4)] +
                       32 * table[48 + (byte >> 4)] - 2 * TABLE_BIAS;
            }
            acc[m * acc_stride + r] = sum;
        }
    }
}

#if defined(__x86_64__)
#include "ternary_ymm.h"

AVX2_INLINE void table_add(int32_t *sum, __m256i narrow) { /* 8 rows, and the 8 rows that start 16 later */
    const __m256i low = _mm256_cvtepu16_epi32(_mm256_castsi256_si128(narrow)),
                  high = _mm256_cvtepu16_epi32(_mm256_extracti128_si256(narrow, 1));
    _mm256_storeu_si256((__m256i *)sum, _mm256_add_epi32(_mm256_loadu_si256((__m256i *)sum), low));
    _mm256_storeu_si256((__m256i *)(sum + 16), _mm256_add_epi32(_mm256_loadu_si256((__m256i *)(sum + 16)), high));
}

AVX2_TARGET static void table_panel_avx2(TERNARY_ARGS, size_t rows, void *scratch) {
    (void)x_sum, (void)scratch;
    const __m256i nibble = _mm256_set1_epi8(15), weigh = _mm256_set1_epi16(32 << 8 | 1); /* low * 1 + high * 32 */
    for (size_t m = 0; m < M; m++) {
        int32_t sum[PANEL_ROWS];
        for (size_t r = 0; r < PANEL_ROWS; r++) sum[r] = -(int32_t)(TABLE_BIAS * TABLE_PAIRS * n_blocks);
        for (size_t start = 0; start < n_blocks; start += TABLE_WIDEN) {
            const size_t end = n_blocks - start < TABLE_WIDEN ? n_blocks : start + TABLE_WIDEN;
            __m256i n0 = _mm256_setzero_si256(), n1 = n0, n2 = n0, n3 = n0;
            for (size_t b = start; b < end; b++) {
                const uint8_t *block = panel + b * BLOCK_BYTES, *table = (const uint8_t *)x + m * x_stride + b * TABLE_BYTES;
                __m256i low0 = _mm256_setzero_si256(), low1 = low0, high0 = low0, high1 = low0;
                for (int v = 0; v < 4; v++) {
                    _mm_prefetch((const char *)block + YMM_PREFETCH + v * VECTOR_BYTES, _MM_HINT_T0);
                    const __m256i b0 = _mm256_loadu_si256((const __m256i *)(block + v * 64)),
                                  b1 = _mm256_loadu_si256((const __m256i *)(block + v * 64 + 32));
#define TABLE(at) _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)(table + 64 * v + at)))
#define LOOK_UP(at, c0, c1)                                                                                            \
    {                                                                                                                  \
        const __m256i low = TABLE(at), high = TABLE(at + 16), i0 = c0, i1 = c1;                                        \
        low0 = _mm256_add_epi8(low0, _mm256_shuffle_epi8(low, i0));                                                    \
        low1 = _mm256_add_epi8(low1, _mm256_shuffle_epi8(low, i1));                                                    \
        high0 = _mm256_add_epi8(high0, _mm256_shuffle_epi8(high, i0));                                                 \
        high1 = _mm256_add_epi8(high1, _mm256_shuffle_epi8(high, i1));                                                 \
    }
                    LOOK_UP(0, _mm256_and_si256(b0, nibble), _mm256_and_si256(b1, nibble))
                    LOOK_UP(32, _mm256_and_si256(_mm256_srli_epi16(b0, 4), nibble),
                            _mm256_and_si256(_mm256_srli_epi16(b1, 4), nibble))
#undef TABLE
#undef LOOK_UP
                }
                n0 = _mm256_add_epi16(n0, _mm256_maddubs_epi16(_mm256_unpacklo_epi8(low0, high0), weigh));
                n1 = _mm256_add_epi16(n1, _mm256_maddubs_epi16(_mm256_unpackhi_epi8(low0, high0), weigh));
                n2 = _mm256_add_epi16(n2, _mm256_maddubs_epi16(_mm256_unpacklo_epi8(low1, high1), weigh));
                n3 = _mm256_add_epi16(n3, _mm256_maddubs_epi16(_mm256_unpackhi_epi8(low1, high1), weigh));
            }
            table_add(sum, n0), table_add(sum + 8, n1), table_add(sum + 32, n2), table_add(sum + 40, n3);
        }
        memcpy(acc + m * acc_stride, sum, rows * sizeof(int32_t));
    }
}

#endif
#endif
