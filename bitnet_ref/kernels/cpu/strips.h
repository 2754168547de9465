/* Products with a vector that is mostly zeros: what would be multiplied by zero is not read.
 *
 * The gate of ReLU^2 is zero for most of a feed-forward's F values. So of up_proj only the rows with a gate above zero
 * are needed, and of down_proj only the columns that meet an int8 other than zero. Panels hold 64 rows interleaved, of
 * which none can be left out; so these two matrices have a second copy in strips: a row of up_proj, or a column of
 * down_proj, in one piece.
 *
 *     strip of one row (or column), element k = 256 v + 64 s + i:   byte 64 v + i,   bits 2s..2s+1
 *
 * Codes are w_t + 1, as in panels (panel.h); elements beyond the row's length have code 0. The sums are of integers,
 * exact in any order, so they equal those of the panels.
 *
 * strip_rows: acc[j] = sum over k of code[rows[j]][k] * x[k] - x_sum.   x: 256 * n_vectors int8, zeros beyond K
 * strip_columns: acc[n] = sum over j of code[columns[j]][n] * x[j], for 256 * n_vectors outputs; count < 2^17
 *
 * Measured, one thread of an EPYC with AVX-512 VNNI, 6912 x 2560 from memory, against panels at 29 GB/s: 10, 20, 30% of
 *   the rows take 0.26, 0.49, 0.72 of the time, of the columns 0.19, 0.36, 0.54.
 * Tried:
 *   - prefetching to L1, not L2: rows 0.38, 0.78, 1.13; columns 0.31, 0.63, 0.94 (few misses can wait for memory there)
 *   - 3 rows ahead, not 16: rows 0.61 at 20%; 8: 0.52; 24 and 32: no faster */
#ifndef BITNET_REF_STRIPS_H
#define BITNET_REF_STRIPS_H

#include "panel.h"

enum { STRIP_K = 256, STRIP_BYTES = 64 /* of so many elements */, STRIPS_AHEAD = 16 /* rows that are prefetched */ };

typedef void (*strip_rows_fn)(const uint8_t *strips, size_t n_vectors, const int8_t *x, int32_t x_sum,
                              const int32_t *rows, size_t count, int32_t *acc);
typedef void (*strip_columns_fn)(const uint8_t *strips, size_t strip_vectors, size_t n_vectors, const int32_t *columns,
                                 const int8_t *x, size_t count, int32_t *acc);

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
                             const int32_t *rows, size_t count, int32_t *acc) {
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

static void strip_columns_plain(const uint8_t *strips, size_t strip_vectors, size_t n_vectors, const int32_t *columns,
                                const int8_t *x, size_t count, int32_t *acc) {
    memset(acc, 0, n_vectors * STRIP_K * sizeof *acc);
    for (size_t j = 0; j < count; j++) {
        const uint8_t *strip = strips + (size_t)columns[j] * strip_vectors * STRIP_BYTES;
        for (size_t v = 0; v < n_vectors; v++)
            for (size_t s = 0; s < 4; s++)
                for (size_t i = 0; i < 64; i++)
                    acc[v * STRIP_K + 64 * s + i] += (strip[v * STRIP_BYTES + i] >> 2 * s & 3) * x[j];
    }
}

#if defined(__x86_64__)
#include "ternary_avx512.h"
#include "ternary_ymm.h"

enum { YMM_PAIRS = 32 /* sums of two products, each at most 2 * 2 * 128, that fit int16 */ };

/* a field of 32 codes times 32 activations -> 16 sums of two, in int16 */
AVX2_INLINE __m256i avx2_pairs(__m256i codes, int s, __m256i x) { return _mm256_maddubs_epi16(avx2_field(codes, s), x); }

AVX2_TARGET static void strip_rows_avx2(const uint8_t *strips, size_t n_vectors, const int8_t *x, int32_t x_sum,
                                        const int32_t *rows, size_t count, int32_t *acc) {
    const __m256i ones = _mm256_set1_epi16(1);
    const size_t bytes = n_vectors * STRIP_BYTES;
    for (size_t j = 0; j < count; j++) {
        const uint8_t *strip = strips + (size_t)rows[j] * bytes;
        const uint8_t *next = strips + (size_t)rows[j + STRIPS_AHEAD < count ? j + STRIPS_AHEAD : j] * bytes;
        __m256i sum = _mm256_setzero_si256();
        for (size_t v = 0; v < n_vectors; v++) {
            _mm_prefetch((const char *)next + v * STRIP_BYTES, _MM_HINT_T1);
            __m256i pairs = _mm256_setzero_si256(); /* of 8 products of 2: far from the limit */
            for (int half = 0; half < 2; half++) {
                const __m256i codes = _mm256_loadu_si256((const __m256i *)(strip + v * STRIP_BYTES + 32 * half));
                const __m256i *xs = (const __m256i *)(x + v * STRIP_K + 32 * half);
                for (int s = 0; s < 4; s++)
                    pairs = _mm256_add_epi16(pairs, avx2_pairs(codes, s, _mm256_loadu_si256(xs + 2 * s)));
            }
            sum = _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, ones));
        }
        const __m128i four = _mm_add_epi32(_mm256_castsi256_si128(sum), _mm256_extracti128_si256(sum, 1));
        const __m128i two = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4E));
        acc[j] = _mm_cvtsi128_si32(two) + _mm_extract_epi32(two, 1) - x_sum;
    }
}

/* 64 outputs' sums of two columns' products in int16, of up to YMM_PAIRS pairs of columns; then widened. Low and high
 * hold bytes 0-7, 16-23 and 8-15, 24-31 of a half: `unpack` works within 16 bytes. */
AVX2_TARGET static void strip_columns_avx2(const uint8_t *strips, size_t strip_vectors, size_t n_vectors,
                                           const int32_t *columns, const int8_t *x, size_t count, int32_t *acc) {
    const size_t bytes = strip_vectors * STRIP_BYTES;
    memset(acc, 0, n_vectors * STRIP_K * sizeof *acc);
    for (size_t first = 0; first < count; first += 2 * YMM_PAIRS) {
        const size_t last = first + 2 * YMM_PAIRS < count ? first + 2 * YMM_PAIRS : count;
        for (size_t half = 0; half < 2 * n_vectors; half++) {
            const size_t offset = 32 * half;
            __m256i low[4], high[4];
            for (int s = 0; s < 4; s++) low[s] = high[s] = _mm256_setzero_si256();
            for (size_t j = first; j < last; j += 2) {
                const int is_pair = j + 1 < last;
                const uint8_t *one = strips + (size_t)columns[j] * bytes + offset;
                const uint8_t *two = strips + (size_t)columns[j + is_pair] * bytes + offset;
                const __m256i a = _mm256_loadu_si256((const __m256i *)one), b = _mm256_loadu_si256((const __m256i *)two);
                const uint16_t word = (uint16_t)((uint8_t)x[j] | (is_pair ? (uint8_t)x[j + 1] << 8 : 0));
                const __m256i xs = _mm256_set1_epi16((short)word);
                const __m256i ab_low = _mm256_unpacklo_epi8(a, b), ab_high = _mm256_unpackhi_epi8(a, b);
                if (half % 2 == 0 && last + j - first + 1 < count) {
                    _mm_prefetch((const char *)strips + (size_t)columns[last + j - first] * bytes + offset, _MM_HINT_T1);
                    _mm_prefetch((const char *)strips + (size_t)columns[last + j - first + 1] * bytes + offset, _MM_HINT_T1);
                }
#define STRIP_PAIRS(s)                                                                                                 \
    low[s] = _mm256_add_epi16(low[s], avx2_pairs(ab_low, s, xs));                                                      \
    high[s] = _mm256_add_epi16(high[s], avx2_pairs(ab_high, s, xs));
                STRIP_PAIRS(0) STRIP_PAIRS(1) STRIP_PAIRS(2) STRIP_PAIRS(3)
            }
            for (size_t s = 0; s < 4; s++) {
                int16_t sums[2][16];
                int32_t *to = acc + half / 2 * STRIP_K + 64 * s + 32 * (half % 2);
                _mm256_storeu_si256((__m256i *)sums[0], low[s]);
                _mm256_storeu_si256((__m256i *)sums[1], high[s]);
                for (size_t i = 0; i < 32; i++) to[i] += sums[i / 8 % 2][i % 8 + i / 16 * 8];
            }
        }
    }
}

AVX512_INLINE void avx512_fetch(const uint8_t *strip, size_t n_vectors) {
    for (size_t v = 0; v < n_vectors; v++) _mm_prefetch((const char *)strip + v * STRIP_BYTES, _MM_HINT_T1);
}

/* Codes are not shifted down, as in `avx512_one`: each field has its own sum, shifted at the end. */
AVX512_TARGET static void strip_rows_avx512(const uint8_t *strips, size_t n_vectors, const int8_t *x, int32_t x_sum,
                                            const int32_t *rows, size_t count, int32_t *acc) {
    const __m512i field0 = _mm512_set1_epi8(0x03), field1 = _mm512_set1_epi8(0x0C), field2 = _mm512_set1_epi8(0x30),
                  field3 = _mm512_set1_epi8((char)0xC0);
    const size_t bytes = n_vectors * STRIP_BYTES;
    for (size_t j = 0; j < STRIPS_AHEAD && j < count; j++) avx512_fetch(strips + (size_t)rows[j] * bytes, n_vectors);
    for (size_t j = 0; j < count; j++) {
        const uint8_t *strip = strips + (size_t)rows[j] * bytes;
        const uint8_t *next = strips + (size_t)rows[j + STRIPS_AHEAD < count ? j + STRIPS_AHEAD : j] * bytes;
        __m512i sum0 = _mm512_setzero_si512(), sum1 = sum0, sum2 = sum0, sum3 = sum0;
        for (size_t v = 0; v < n_vectors; v++) {
            const __m512i codes = _mm512_loadu_si512(strip + v * STRIP_BYTES);
            const int8_t *xv = x + v * STRIP_K;
            _mm_prefetch((const char *)next + v * STRIP_BYTES, _MM_HINT_T1);
            sum0 = avx512_dot(sum0, _mm512_and_si512(codes, field0), _mm512_loadu_si512(xv));
            sum1 = avx512_dot(sum1, _mm512_and_si512(codes, field1), _mm512_loadu_si512(xv + 64));
            sum2 = avx512_dot(sum2, _mm512_and_si512(codes, field2), _mm512_loadu_si512(xv + 128));
            sum3 = avx512_dot(sum3, _mm512_and_si512(codes, field3), _mm512_loadu_si512(xv + 192));
        }
        sum0 = _mm512_add_epi32(_mm512_add_epi32(sum0, _mm512_srai_epi32(sum1, 2)),
                                _mm512_add_epi32(_mm512_srai_epi32(sum2, 4), _mm512_srai_epi32(sum3, 6)));
        acc[j] = _mm512_reduce_add_epi32(sum0) - x_sum;
    }
}

/* 16 columns at a time for each 256 outputs, whose sums stay in registers meanwhile. The bytes of 4 columns are
 * interleaved, so that a lane of 32 bits holds their codes of one output. Interleaving works within 16 bytes: part u of
 * the result, lane 4 l + t, is byte 16 l + 4 u + t. The sums keep that order, and the scales of their fields, up to the
 * end: sum_su of outputs 64 s + byte. */
#define STRIP_SUMS(DO) STRIP_SUMS_OF(DO, 0) STRIP_SUMS_OF(DO, 1) STRIP_SUMS_OF(DO, 2) STRIP_SUMS_OF(DO, 3)
#define STRIP_SUMS_OF(DO, s) DO(s, 0) DO(s, 1) DO(s, 2) DO(s, 3)
#define STRIP_LOAD(s, u) __m512i sum_##s##u = _mm512_load_si512(to + 64 * s + 16 * u);
#define STRIP_STORE(s, u) _mm512_store_si512(to + 64 * s + 16 * u, sum_##s##u);
#define STRIP_DOT(s, u) sum_##s##u = avx512_dot(sum_##s##u, _mm512_and_si512(part##u, field##s), word);
AVX512_TARGET static void strip_columns_avx512(const uint8_t *strips, size_t strip_vectors, size_t n_vectors,
                                               const int32_t *columns, const int8_t *x, size_t count, int32_t *acc) {
    enum { COLUMNS = 16 };
    const __m512i field0 = _mm512_set1_epi8(0x03), field1 = _mm512_set1_epi8(0x0C), field2 = _mm512_set1_epi8(0x30),
                  field3 = _mm512_set1_epi8((char)0xC0);
    const uint8_t *at[2 * COLUMNS]; /* these columns, and the next ones */
    int32_t words[COLUMNS / 4];
    for (size_t i = 0; i < COLUMNS; i++) at[COLUMNS + i] = strips + (size_t)columns[i < count ? i : 0] * strip_vectors * STRIP_BYTES;
    for (size_t v = 0; v < n_vectors; v++) /* sums before these columns, in the order of the registers */
        for (size_t i = 0; i < STRIP_K; i++) acc[v * STRIP_K + i] = 0;
    for (size_t j = 0; j < count; j += COLUMNS) {
        int8_t values[COLUMNS] = {0};
        memcpy(values, x + j, count - j < COLUMNS ? count - j : COLUMNS);
        memcpy(words, values, sizeof words);
        for (size_t i = 0; i < COLUMNS; i++) {
            const size_t next = j + COLUMNS + i;
            at[i] = at[COLUMNS + i];
            at[COLUMNS + i] = strips + (size_t)columns[next < count ? next : j] * strip_vectors * STRIP_BYTES;
        }
        for (size_t v = 0; v < n_vectors; v++) {
            const size_t offset = v * STRIP_BYTES;
            int32_t *to = acc + v * STRIP_K;
            STRIP_SUMS(STRIP_LOAD)
            for (size_t f = 0; f < COLUMNS; f += 4) {
                const __m512i word = _mm512_set1_epi32(words[f / 4]);
                const __m512i a = _mm512_loadu_si512(at[f] + offset), b = _mm512_loadu_si512(at[f + 1] + offset),
                              c = _mm512_loadu_si512(at[f + 2] + offset), d = _mm512_loadu_si512(at[f + 3] + offset);
                for (size_t i = 0; i < 4; i++)
                    _mm_prefetch((const char *)at[COLUMNS + f + i] + offset, _MM_HINT_T1);
                const __m512i ab_low = _mm512_unpacklo_epi8(a, b), ab_high = _mm512_unpackhi_epi8(a, b),
                              cd_low = _mm512_unpacklo_epi8(c, d), cd_high = _mm512_unpackhi_epi8(c, d);
                const __m512i part0 = _mm512_unpacklo_epi16(ab_low, cd_low),
                              part1 = _mm512_unpackhi_epi16(ab_low, cd_low),
                              part2 = _mm512_unpacklo_epi16(ab_high, cd_high),
                              part3 = _mm512_unpackhi_epi16(ab_high, cd_high);
                STRIP_SUMS(STRIP_DOT)
            }
            STRIP_SUMS(STRIP_STORE)
        }
    }
    for (size_t v = 0; v < n_vectors; v++)
        for (size_t s = 0; s < 4; s++) { /* 4 x 4 groups of 4 lanes, transposed and shifted down */
            int32_t *to = acc + v * STRIP_K + 64 * s, sums[64];
            memcpy(sums, to, sizeof sums);
            for (size_t u = 0; u < 4; u++)
                for (size_t l = 0; l < 4; l++)
                    for (size_t t = 0; t < 4; t++) to[16 * l + 4 * u + t] = sums[16 * u + 4 * l + t] >> 2 * s;
        }
}
#elif defined(__aarch64__)
#include <arm_neon.h>

/* Sums of products of int8 in int16: at most 2 * 128 each. */
static void strip_rows_neon(const uint8_t *strips, size_t n_vectors, const int8_t *x, int32_t x_sum, const int32_t *rows,
                            size_t count, int32_t *acc) {
    const uint8x16_t field = vdupq_n_u8(3);
    const size_t bytes = n_vectors * STRIP_BYTES;
    for (size_t j = 0; j < count; j++) {
        const uint8_t *strip = strips + (size_t)rows[j] * bytes;
        const uint8_t *next = strips + (size_t)rows[j + STRIPS_AHEAD < count ? j + STRIPS_AHEAD : j] * bytes;
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
                               const int8_t *x, size_t count, int32_t *acc) {
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
