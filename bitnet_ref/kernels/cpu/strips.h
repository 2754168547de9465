/* Products with vectors that are mostly zeros. Weights that meet zeros in all tokens of a call are not read, and each
 * token also skips its own zeros.
 *
 * The gate of ReLU^2 is zero for most of a feed-forward's F values. So of up_proj only the rows with a gate above zero
 * are needed, and of down_proj only the columns that meet an int8 other than zero. Panels hold 64 rows interleaved, of
 * which none can be left out; so these two matrices have a second copy in strips: a row of up_proj, or a column of
 * down_proj, in one piece.
 *
 *     strip of one row (or column), element k = 256 v + 64 s + i:   byte 64 v + i,   bits 2s..2s+1
 *
 * Several tokens go through the strips that one of them needs, some at a time. Each token is multiplied with those that it
 * needs itself, by `strip_rows_near` or `strip_columns_near`, and brings a share of the next ones (`ahead`) into L2.
 * `strip_columns_near` adds to acc in an order of its own, that `strip_order` puts right at the end. acc: 64-byte aligned.
 * `list_gates` and `list_columns` list what a token needs.
 *
 * Codes are w_t + 1, as in panels (panel.h); elements beyond the row's length have code 0. The sums are of integers,
 * exact in any order, so they equal those of the panels.
 *
 * strip_rows: acc[j] = sum over k of code[rows[j]][k] * x[k] - x_sum.   x: 256 * n_vectors int8, any beyond K
 * strip_columns: acc[n] = sum over j of code[columns[j]][n] * x[j], for 256 * n_vectors outputs; count < 2^17
 *
 * STRIPS_TOGETHER rows (or columns) are read side by side: the first 64 bytes of each, then the next 64 bytes of each.
 * Two reasons. A strip that is read in one go looks like the beginning of a long stream, so the processor prefetches past
 * its end, from strips that are not wanted; it follows no stream among 48. And the sums of 256 outputs, 16 registers, are
 * loaded and stored once for 48 columns.
 *
 * Measured, two threads of an EPYC (Zen 4), 6912 x 2560 from memory that reads 33 to 35 GB/s. Time as a share of reading
 *   the whole matrix in AVX-512 panels; in brackets row after row, and 16 (AVX2: 2) columns at a time:
 *     needed     AVX-512 rows   columns        AVX2 rows      columns
 *     10%        0.16 (0.22)    0.13 (0.17)    0.21 (0.30)    0.14 (0.29)
 *     20%        0.26 (0.40)    0.22 (0.32)    0.30 (0.53)    0.24 (0.45)
 *     30%        0.46 (0.57)    0.36 (0.46)    0.48 (0.73)    0.34 (0.61)
 *     50%        0.83 (0.84)    0.60 (0.78)    1.07 (1.01)    0.62 (1.02)
 *   One thread (26 to 28 GB/s), 20%: 0.30 (0.56), 0.35 (0.45), 0.39 (0.67), 0.44 (0.72).
 * Tried, with 20% of the rows, two threads, other runs:
 *   - 16, 24, 32, 64 together: 0.40, 0.32, 0.36, 0.35; 48 is best for rows of 6, 8, 10 and 16 vectors
 *   - row after row, its vectors in another order (0, 2, 4, ..., 1, 3, ...), unrolled: as fast, but only for the length it
 *     is unrolled for; in a loop 0.36, for the processor learns the stride of one instruction
 *   - whole rows prefetched before they are needed, 8 to 64 rows ahead: 0.44 to 0.45; into L1: 0.56
 *   - the first rows prefetched before the loop: no faster
 *
 * Several tokens, each with zeros of its own, the same machine and matrix, time as a share of the panels' (AVX-512 and AVX2
 *   each against its own), medians of 21:
 *     needed by a token   2 tokens   3      4      6      8      16     64     AVX2: 2   4      8      16     64
 *     16% of rows         0.43       0.56   0.56   0.48   0.40   0.31   0.27         0.35   0.31   0.38   0.41   0.37
 *     10% of columns      0.36       0.48   0.48   0.46   0.44   0.34   0.28         0.33   0.32   0.40   0.37   0.36
 *     50% of rows         0.95       0.97   0.85   0.80   0.80   0.80   0.78         0.97   0.77   0.88   0.97   0.89
 *     33% of columns      0.78       0.97   1.00   0.90   0.83   0.73   0.64         0.70   0.74   0.86   0.87   0.92
 *   Against the panels of AVX-VNNI (in AVX-512VL's encoding; their strips are AVX2's), a whole layer, 80% zeros: 0.56 to
 *   0.60 for 1 to 8 tokens, 0.65 for 16, 0.77 for 64; 50%: 0.9 to 1.1. Hence its own limits in kernels.h.
 *   Against AMX's tiles (Granite Rapids), processor time of a whole pass but its head, 80% zeros: 2 and 3 tokens 0.8, 4: 0.87,
 *   5 and 6: 0.92, 7 and 8: 1; 50%: 1 to 1.1. Hence six tokens, and 30% of the rows.
 *   In some processes, by where their memory lies, columns take twice as long as in others, of one token too; hence the
 *   low limits in _cpu_strips.pxi.
 * Tried for several tokens:
 *   - all strips read, needed or not, as before: 8 tokens 0.55 and 0.67 with 16% of rows and 10% of columns; fewer lost
 *   - the next strips fetched all at once before each token's product, or before each 8, 16 or 32 of its rows, not beside
 *     every four: rows of 4 tokens 0.70, columns 0.53
 *   - the kernels of one token, AVX-512: 1.5 to 2 times the time, for these pass through sums in memory
 *   - columns for 256 outputs at a time over all columns: 0.65 for 64 tokens, for 64 bytes of each 640 come slowly from
 *     memory. 128 columns at a time, not 256: 16 tokens 1.05, 64 tokens 1.1 times the time; 512: 1.4 and 1.0. For few
 *     tokens 32, not 64: 1.05; 128: 1.1 to 1.3 */
#ifndef BITNET_REF_STRIPS_H
#define BITNET_REF_STRIPS_H

#include "panel.h"

enum { STRIP_K = 256, STRIP_BYTES = 64 /* of so many elements */, STRIPS_TOGETHER = 48 };

typedef void (*strip_rows_fn)(const uint8_t *strips, size_t n_vectors, const int8_t *x, int32_t x_sum,
                              const int32_t *rows, size_t count, int32_t *acc, const int32_t *ahead, size_t n_ahead);
typedef void (*strip_columns_fn)(const uint8_t *strips, size_t strip_vectors, size_t n_vectors, const int32_t *columns,
                                 const int8_t *x, size_t count, int32_t *acc, const int32_t *ahead, size_t n_ahead);
typedef void (*strip_order_fn)(int32_t *acc, size_t n_vectors);
/* What is needed, in ascending order; may write LIST_SLACK beyond it.   -> how many
 * list_columns: k and x[k] where x[k] is not 0.   list_gates: first + i and gate[i] where gate[i] is above 0, or NaN */
typedef size_t (*list_columns_fn)(const int8_t *x, size_t K, int32_t *ids, int8_t *values);
typedef size_t (*list_gates_fn)(const float *gate, size_t n, int32_t first, int32_t *ids, float *present);
enum { LIST_SLACK = 16 };
/* How much several tokens may need, each, for strips to be faster than a set's panels: percent of the rows for few tokens,
 * of rows for many, of columns for many. Few are `few_tokens` or fewer: many rows and columns may be needed by none. */
typedef struct {
    int few_tokens, few_rows, rows, columns;
} strip_limits;

/* Bytes 0, 1, 2, 3 of each word: codes of four columns -> of one column each, in the order of the four arrays. */
static inline void join_codes(const uint8_t codes[4][TILE], uint32_t words[TILE]) {
    for (int i = 0; i < TILE; i++)
        words[i] = codes[0][i] | (uint32_t)codes[1][i] << 8 | (uint32_t)codes[2][i] << 16 | (uint32_t)codes[3][i] << 24;
    for (int i = 0; i < TILE; i++) words[i] = transpose_codes(words[i]);
}

/* Packed rows, four adjacent columns per byte (rows, row_bytes) -> strips of the rows (rows, 64 * n_vectors) */
static void pack_row_strips(const uint8_t *packed, size_t rows, size_t row_bytes, size_t n_vectors, uint8_t *strips) {
    for (size_t r = 0; r < rows; r++)
        for (size_t v = 0; v < n_vectors; v++) {
            const size_t b = STRIP_BYTES * v;
            uint8_t codes[4][TILE] = {{0}};
            uint32_t words[TILE];
            const size_t count = row_bytes - b < STRIP_BYTES ? row_bytes - b : STRIP_BYTES;
            copy_mostly(codes, packed + r * row_bytes + b, count, STRIP_BYTES);
            join_codes(codes, words);
            memcpy(strips + (r * n_vectors + v) * STRIP_BYTES, words, STRIP_BYTES);
        }
}

/* One vector of each of the strips of `count` <= 64 columns, from byte b of the packed rows on. */
static void pack_column_tile(const uint8_t *packed, size_t rows, size_t row_bytes, size_t b, size_t count, size_t v,
                             size_t strip_bytes, uint8_t *strips) {
    const size_t bytes = (count + 3) / 4;
    uint32_t words[STRIP_BYTES][TILE], column[STRIP_BYTES]; /* words: of each position, four columns each */
    uint8_t vectors[4][STRIP_BYTES];
    for (size_t j = 0; j < STRIP_BYTES; j++) {
        uint8_t codes[4][TILE] = {{0}};
        for (size_t s = 0, row = v * STRIP_K + j; s < 4 && row < rows; s++, row += 64)
            copy_mostly(codes[s], packed + row * row_bytes + b, bytes, TILE);
        join_codes(codes, words[j]);
    }
    for (size_t i = 0; i < bytes; i++) {
        for (int j = 0; j < STRIP_BYTES; j++) column[j] = words[j][i];
        for (int c = 0; c < 4; c++)
            for (int j = 0; j < STRIP_BYTES; j++) vectors[c][j] = (uint8_t)(column[j] >> 8 * c);
        for (size_t c = 0; c < 4 && 4 * i + c < count; c++)
            memcpy(strips + (4 * i + c) * strip_bytes + v * STRIP_BYTES, vectors[c], STRIP_BYTES);
    }
}

/* Packed rows -> strips of `count` columns from byte b on: (count, 64 * n_vectors), n_vectors = ceil(rows / 256). In
 * tiles of 256 rows and 64 columns: 2560 x 6912 takes one thread 2.9 ms (Emerald Rapids), 5.7 with bytes one by one. */
static void pack_column_strips(const uint8_t *packed, size_t rows, size_t row_bytes, size_t b, size_t count,
                               size_t n_vectors, uint8_t *strips) {
    const size_t bytes = n_vectors * STRIP_BYTES;
    for (size_t k = 0; k < count; k += 64)
        for (size_t v = 0; v < n_vectors; v++)
            pack_column_tile(packed, rows, row_bytes, b + k / 4, count - k < 64 ? count - k : 64, v, bytes,
                             strips + k * bytes);
}

static void strip_rows_plain(const uint8_t *strips, size_t n_vectors, const int8_t *x, int32_t x_sum,
                             const int32_t *rows, size_t count, int32_t *acc, const int32_t *ahead, size_t n_ahead) {
    (void)ahead, (void)n_ahead;
    for (size_t j = 0; j < count; j++) {
        const uint8_t *strip = strips + (size_t)rows[j] * n_vectors * STRIP_BYTES;
        int32_t sum = -x_sum;
        for (size_t v = 0; v < n_vectors; v++)
            for (size_t s = 0; s < 4; s++)
                for (size_t i = 0; i < 64; i++)
                    sum += (strip[v * STRIP_BYTES + i] >> 2 * s & 3) * x[v * STRIP_K + 64 * s + i];
        acc[j] = sum;
    }
}

static void strip_columns_near_plain(const uint8_t *strips, size_t strip_vectors, size_t n_vectors,
                                     const int32_t *columns, const int8_t *x, size_t count, int32_t *acc,
                                     const int32_t *ahead, size_t n_ahead) {
    (void)ahead, (void)n_ahead;
    for (size_t j = 0; j < count; j++) {
        const uint8_t *strip = strips + (size_t)columns[j] * strip_vectors * STRIP_BYTES;
        for (size_t v = 0; v < n_vectors; v++)
            for (size_t s = 0; s < 4; s++)
                for (size_t i = 0; i < 64; i++)
                    acc[v * STRIP_K + 64 * s + i] += (strip[v * STRIP_BYTES + i] >> 2 * s & 3) * x[j];
    }
}

static size_t list_columns_plain(const int8_t *x, size_t K, int32_t *ids, int8_t *values) {
    size_t count = 0;
    for (size_t k = 0; k < K; k++) ids[count] = (int32_t)k, values[count] = x[k], count += x[k] != 0;
    return count;
}

static size_t list_gates_plain(const float *gate, size_t n, int32_t first, int32_t *ids, float *present) {
    size_t count = 0;
    for (size_t i = 0; i < n; i++)
        ids[count] = first + (int32_t)i, present[count] = gate[i], count += !(gate[i] <= 0);
    return count;
}

static void strip_order_plain(int32_t *acc, size_t n_vectors) { (void)acc, (void)n_vectors; }

static void strip_columns_plain(const uint8_t *strips, size_t strip_vectors, size_t n_vectors, const int32_t *columns,
                                const int8_t *x, size_t count, int32_t *acc, const int32_t *ahead, size_t n_ahead) {
    memset(acc, 0, n_vectors * STRIP_K * sizeof *acc);
    strip_columns_near_plain(strips, strip_vectors, n_vectors, columns, x, count, acc, ahead, n_ahead);
}

/* What a kernel is given: the strips that it multiplies, and those that come after them. */
typedef struct {
    const uint8_t *strips;
    size_t bytes; /* of a strip */
    const int32_t *ids, *ahead;
    size_t count, n_ahead;
} strip_list;

/* The strips of ids[first], ..., ids[first + STRIPS_TOGETHER - 1], or ahead[0], ... where these begin beyond the last id;
 * strip 0 where there is none. */
static inline void strip_addresses(const strip_list *list, size_t first, const uint8_t **at) {
    const int beyond = first >= list->count;
    const int32_t *ids = beyond ? list->ahead : list->ids + first;
    const size_t count = beyond ? list->n_ahead : list->count - first;
    for (size_t i = 0; i < STRIPS_TOGETHER; i++) at[i] = list->strips + (i < count ? (size_t)ids[i] : 0) * list->bytes;
}

/* Moves on to the strips from ids[first] on: at = next, and next = those after them.   -> how many of `at` there are */
static inline size_t next_strips(const strip_list *list, size_t first, const uint8_t **at, const uint8_t **next) {
    memcpy(at, next, STRIPS_TOGETHER * sizeof *at);
    strip_addresses(list, first + STRIPS_TOGETHER, next);
    return list->count - first < STRIPS_TOGETHER ? list->count - first : STRIPS_TOGETHER;
}

#if defined(__x86_64__)
#include "ternary_ymm.h"

_Static_assert(STRIPS_TOGETHER * 2 * 128 < 1 << 15, "more products than int16 holds");

/* a field of 32 codes times 32 activations -> 16 sums of two, in int16 */
AVX2_INLINE __m256i avx2_pairs(__m256i codes, int s, __m256i x) { return _mm256_maddubs_epi16(avx2_field(codes, s), x); }

AVX2_TARGET static void strip_rows_avx2(const uint8_t *strips, size_t n_vectors, const int8_t *x, int32_t x_sum,
                                        const int32_t *rows, size_t count, int32_t *acc, const int32_t *ahead,
                                        size_t n_ahead) {
    const __m256i ones = _mm256_set1_epi16(1);
    const strip_list list = {strips, n_vectors * STRIP_BYTES, rows, ahead, count, n_ahead};
    const uint8_t *at[STRIPS_TOGETHER], *next[STRIPS_TOGETHER];
    __m256i sums[STRIPS_TOGETHER];
    strip_addresses(&list, 0, next);
    for (size_t j = 0; j < count; j += STRIPS_TOGETHER) {
        const size_t some = next_strips(&list, j, at, next);
        for (size_t i = 0; i < some; i++) sums[i] = _mm256_setzero_si256();
        for (size_t v = 0; v < n_vectors; v++)
            for (size_t i = 0; i < some; i++) {
                __m256i pairs = _mm256_setzero_si256(); /* of 8 products of 2: far from the limit */
                _mm_prefetch((const char *)next[i] + v * STRIP_BYTES, _MM_HINT_T1);
                for (int half = 0; half < 2; half++) {
                    const __m256i codes = _mm256_loadu_si256((const __m256i *)(at[i] + v * STRIP_BYTES + 32 * half));
                    const __m256i *xs = (const __m256i *)(x + v * STRIP_K + 32 * half);
                    for (int s = 0; s < 4; s++)
                        pairs = _mm256_add_epi16(pairs, avx2_pairs(codes, s, _mm256_loadu_si256(xs + 2 * s)));
                }
                sums[i] = _mm256_add_epi32(sums[i], _mm256_madd_epi16(pairs, ones));
            }
        for (size_t i = 0; i < some; i++) {
            const __m128i four = _mm_add_epi32(_mm256_castsi256_si128(sums[i]), _mm256_extracti128_si256(sums[i], 1));
            const __m128i two = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4E));
            acc[j + i] = _mm_cvtsi128_si32(two) + _mm_extract_epi32(two, 1) - x_sum;
        }
    }
}

/* adds 8 sums in int16 to int32 */
AVX2_INLINE void avx2_add_8(int32_t *to, __m128i sums) {
    __m256i *at = (__m256i *)to;
    _mm256_storeu_si256(at, _mm256_add_epi32(_mm256_loadu_si256(at), _mm256_cvtepi16_epi32(sums)));
}

/* adds 8 of `low`, 8 of `high`, 8 of `low`, 8 of `high` */
AVX2_INLINE void avx2_add_sums(int32_t *to, __m256i low, __m256i high) {
    avx2_add_8(to, _mm256_castsi256_si128(low));
    avx2_add_8(to + 8, _mm256_castsi256_si128(high));
    avx2_add_8(to + 16, _mm256_extracti128_si256(low, 1));
    avx2_add_8(to + 24, _mm256_extracti128_si256(high, 1));
}

/* 128 outputs at a time, whose sums of all columns of a group fit int16. `unpack` works within 16 bytes: low has the
 * sums of bytes 0-7 and 16-23 of a half, high those of bytes 8-15 and 24-31. */
AVX2_TARGET static void strip_columns_near_avx2(const uint8_t *strips, size_t strip_vectors, size_t n_vectors,
                                                const int32_t *columns, const int8_t *x, size_t count, int32_t *acc,
                                                const int32_t *ahead, size_t n_ahead) {
    const strip_list list = {strips, strip_vectors * STRIP_BYTES, columns, ahead, count, n_ahead};
    const uint8_t *at[STRIPS_TOGETHER], *next[STRIPS_TOGETHER];
    strip_addresses(&list, 0, next);
    for (size_t j = 0; j < count; j += STRIPS_TOGETHER) {
        const size_t some = next_strips(&list, j, at, next);
        int8_t values[STRIPS_TOGETHER] = {0};
        int16_t words[STRIPS_TOGETHER / 2];
        memcpy(values, x + j, some);
        memcpy(words, values, sizeof words);
        for (size_t half = 0; half < 2 * n_vectors; half++) {
            const size_t offset = 32 * half;
            int32_t *to = acc + half / 2 * STRIP_K + 32 * (half % 2);
            __m256i low[4], high[4];
            for (int s = 0; s < 4; s++) low[s] = high[s] = _mm256_setzero_si256();
            for (size_t f = 0; f < some; f += 2) {
                const __m256i a = _mm256_loadu_si256((const __m256i *)(at[f] + offset)),
                              b = _mm256_loadu_si256((const __m256i *)(at[f + 1] + offset)),
                              xs = _mm256_set1_epi16(words[f / 2]);
                const __m256i ab_low = _mm256_unpacklo_epi8(a, b), ab_high = _mm256_unpackhi_epi8(a, b);
                _mm_prefetch((const char *)next[f + half % 2] + offset, _MM_HINT_T1); /* each line once: half by half */
#define STRIP_PAIRS(s)                                                                                                 \
    low[s] = _mm256_add_epi16(low[s], avx2_pairs(ab_low, s, xs));                                                      \
    high[s] = _mm256_add_epi16(high[s], avx2_pairs(ab_high, s, xs));
                STRIP_PAIRS(0) STRIP_PAIRS(1) STRIP_PAIRS(2) STRIP_PAIRS(3)
#undef STRIP_PAIRS
            }
            for (size_t s = 0; s < 4; s++) avx2_add_sums(to + 64 * s, low[s], high[s]);
        }
    }
}

AVX2_TARGET static void strip_columns_avx2(const uint8_t *strips, size_t strip_vectors, size_t n_vectors,
                                           const int32_t *columns, const int8_t *x, size_t count, int32_t *acc,
                                           const int32_t *ahead, size_t n_ahead) {
    memset(acc, 0, n_vectors * STRIP_K * sizeof *acc);
    strip_columns_near_avx2(strips, strip_vectors, n_vectors, columns, x, count, acc, ahead, n_ahead);
}

#elif defined(__aarch64__)
#include <arm_neon.h>

/* Sums of products of int8 in int16: at most 2 * 128 each. */
static void strip_rows_neon(const uint8_t *strips, size_t n_vectors, const int8_t *x, int32_t x_sum, const int32_t *rows,
                            size_t count, int32_t *acc, const int32_t *ahead, size_t n_ahead) {
    (void)ahead, (void)n_ahead;
    enum { AHEAD = 16 };
    const uint8x16_t field = vdupq_n_u8(3);
    const size_t bytes = n_vectors * STRIP_BYTES;
    for (size_t j = 0; j < count; j++) {
        const uint8_t *strip = strips + (size_t)rows[j] * bytes;
        const uint8_t *next = strips + (size_t)rows[j + AHEAD < count ? j + AHEAD : j] * bytes;
        int32x4_t sum = vdupq_n_s32(0);
        for (size_t v = 0; v < n_vectors; v++) {
            int16x8_t pairs = vdupq_n_s16(0); /* of 32 products: at most 8192 */
            __builtin_prefetch(next + v * STRIP_BYTES);
            for (int quarter = 0; quarter < 4; quarter++) {
                uint8x16_t codes = vld1q_u8(strip + v * STRIP_BYTES + 16 * quarter);
                const int8_t *xs = x + v * STRIP_K + 16 * quarter;
                for (int s = 0; s < 4; s++, codes = vshrq_n_u8(codes, 2)) {
                    const int8x16_t part = vreinterpretq_s8_u8(vandq_u8(codes, field)), values = vld1q_s8(xs + 64 * s);
                    pairs = vmlal_s8(pairs, vget_low_s8(part), vget_low_s8(values));
                    pairs = vmlal_s8(pairs, vget_high_s8(part), vget_high_s8(values));
                }
            }
            sum = vpadalq_s16(sum, pairs);
        }
        acc[j] = vaddvq_s32(sum) - x_sum;
    }
}

static void strip_columns_neon(const uint8_t *strips, size_t strip_vectors, size_t n_vectors, const int32_t *columns,
                               const int8_t *x, size_t count, int32_t *acc, const int32_t *ahead, size_t n_ahead) {
    (void)ahead, (void)n_ahead;
    enum { COLUMNS = 96 /* whose products fit int16 together */ };
    const uint8x16_t field = vdupq_n_u8(3);
    const size_t bytes = strip_vectors * STRIP_BYTES;
    memset(acc, 0, n_vectors * STRIP_K * sizeof *acc);
    for (size_t first = 0; first < count; first += COLUMNS) {
        const size_t last = first + COLUMNS < count ? first + COLUMNS : count;
        for (size_t quarter = 0; quarter < 4 * n_vectors; quarter++) {
            int16x8_t low[4], high[4];
            for (int s = 0; s < 4; s++) low[s] = high[s] = vdupq_n_s16(0);
            for (size_t j = first; j < last; j++) {
                uint8x16_t codes = vld1q_u8(strips + (size_t)columns[j] * bytes + 16 * quarter);
                const int8x8_t value = vdup_n_s8(x[j]);
                if (quarter % 4 == 0 && last + j - first < count)
                    __builtin_prefetch(strips + (size_t)columns[last + j - first] * bytes + 16 * quarter);
                for (int s = 0; s < 4; s++, codes = vshrq_n_u8(codes, 2)) {
                    const int8x16_t part = vreinterpretq_s8_u8(vandq_u8(codes, field));
                    low[s] = vmlal_s8(low[s], vget_low_s8(part), value);
                    high[s] = vmlal_s8(high[s], vget_high_s8(part), value);
                }
            }
            for (size_t s = 0; s < 4; s++) {
                int16_t sums[16];
                int32_t *to = acc + quarter / 4 * STRIP_K + 64 * s + 16 * (quarter % 4);
                vst1q_s16(sums, low[s]);
                vst1q_s16(sums + 8, high[s]);
                for (size_t i = 0; i < 16; i++) to[i] += sums[i];
            }
        }
    }
}
#endif

#endif
