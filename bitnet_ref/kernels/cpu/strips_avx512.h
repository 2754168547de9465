/* The kernels of strips.h with AVX-512 VNNI. What was measured stands there. */
#ifndef BITNET_REF_STRIPS_AVX512_H
#define BITNET_REF_STRIPS_AVX512_H

#include "strips.h"

#if defined(__x86_64__)
#include "ternary_avx512.h"

/* Compressed in registers and stored whole: storing while compressing is slow on Zen 4. */
AVX512_TARGET static size_t list_columns_avx512(const int8_t *x, size_t K, int32_t *ids, int8_t *values) {
    __m512i id = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    size_t count = 0;
    for (size_t k = 0; k < K; k += 16, id = _mm512_add_epi32(id, _mm512_set1_epi32(16))) {
        const __mmask16 there = (__mmask16)(K - k < 16 ? (1u << (K - k)) - 1 : 0xFFFF);
        const __m512i x16 = _mm512_cvtepi8_epi32(_mm_maskz_loadu_epi8(there, x + k));
        const __mmask16 needed = _mm512_test_epi32_mask(x16, x16);
        _mm512_storeu_si512(ids + count, _mm512_maskz_compress_epi32(needed, id));
        _mm_storeu_si128((__m128i *)(values + count), _mm512_cvtepi32_epi8(_mm512_maskz_compress_epi32(needed, x16)));
        count += (size_t)__builtin_popcount(needed);
    }
    return count;
}

AVX512_TARGET static size_t list_gates_avx512(const float *gate, size_t n, int32_t first, int32_t *ids, float *present) {
    __m512i id = _mm512_add_epi32(_mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15),
                                  _mm512_set1_epi32(first));
    size_t count = 0;
    for (size_t i = 0; i < n; i += 16, id = _mm512_add_epi32(id, _mm512_set1_epi32(16))) {
        const __mmask16 there = (__mmask16)(n - i < 16 ? (1u << (n - i)) - 1 : 0xFFFF);
        const __m512 g = _mm512_maskz_loadu_ps(there, gate + i);
        const __mmask16 needed = _mm512_cmp_ps_mask(g, _mm512_setzero_ps(), _CMP_NLE_UQ);
        _mm512_storeu_si512(ids + count, _mm512_maskz_compress_epi32(needed, id));
        _mm512_storeu_ps(present + count, _mm512_maskz_compress_ps(needed, g));
        count += (size_t)__builtin_popcount(needed);
    }
    return count;
}

AVX512_TARGET static void strip_rows_avx512(const uint8_t *strips, size_t n_vectors, const int8_t *x, int32_t x_sum,
                                            const int32_t *rows, size_t count, int32_t *acc, const int32_t *ahead,
                                            size_t n_ahead) {
    const __m512i field = _mm512_set1_epi8(3);
    const strip_list list = {strips, n_vectors * STRIP_BYTES, rows, ahead, count, n_ahead};
    const uint8_t *at[STRIPS_TOGETHER], *next[STRIPS_TOGETHER];
    __m512i sums[STRIPS_TOGETHER];
    strip_addresses(&list, 0, next);
    for (size_t j = 0; j < count; j += STRIPS_TOGETHER) {
        const size_t some = next_strips(&list, j, at, next);
        for (size_t i = 0; i < some; i++) sums[i] = _mm512_setzero_si512();
        for (size_t v = 0; v < n_vectors; v++) {
            const int8_t *xv = x + v * STRIP_K;
            const __m512i x0 = _mm512_loadu_si512(xv), x1 = _mm512_loadu_si512(xv + 64),
                          x2 = _mm512_loadu_si512(xv + 128), x3 = _mm512_loadu_si512(xv + 192);
            for (size_t i = 0; i < some; i++) {
                const __m512i codes = _mm512_loadu_si512(at[i] + v * STRIP_BYTES);
                _mm_prefetch((const char *)next[i] + v * STRIP_BYTES, _MM_HINT_T1);
                __m512i sum = avx512_dot(sums[i], _mm512_and_si512(codes, field), x0);
                sum = avx512_dot(sum, _mm512_and_si512(_mm512_srli_epi16(codes, 2), field), x1);
                sum = avx512_dot(sum, _mm512_and_si512(_mm512_srli_epi16(codes, 4), field), x2);
                sums[i] = avx512_dot(sum, _mm512_and_si512(_mm512_srli_epi16(codes, 6), field), x3);
            }
        }
        for (size_t i = 0; i < some; i++) acc[j + i] = _mm512_reduce_add_epi32(sums[i]) - x_sum;
    }
}

/* The sums of 256 outputs stay in registers for STRIPS_TOGETHER columns. The bytes of 4 columns are interleaved, so that
 * a lane of 32 bits holds their codes of one output. Interleaving works within 16 bytes: part u of the result, lane
 * 4 l + t, is byte 16 l + 4 u + t. The sums keep that order, and the scales of their fields, up to the end: sum_su of
 * outputs 64 s + byte. */
#define STRIP_FIELDS                                                                                                   \
    const __m512i field0 = _mm512_set1_epi8(0x03), field1 = _mm512_set1_epi8(0x0C), field2 = _mm512_set1_epi8(0x30),   \
                  field3 = _mm512_set1_epi8((char)0xC0);
#define STRIP_SUMS(DO) STRIP_SUMS_OF(DO, 0) STRIP_SUMS_OF(DO, 1) STRIP_SUMS_OF(DO, 2) STRIP_SUMS_OF(DO, 3)
#define STRIP_SUMS_OF(DO, s) DO(s, 0) DO(s, 1) DO(s, 2) DO(s, 3)
#define STRIP_LOAD(s, u) __m512i sum_##s##u = _mm512_load_si512(to + 64 * s + 16 * u);
#define STRIP_STORE(s, u) _mm512_store_si512(to + 64 * s + 16 * u, sum_##s##u);
#define STRIP_DOT(s, u) sum_##s##u = avx512_dot(sum_##s##u, _mm512_and_si512(part##u, field##s), word);
/* the sums += the products of the columns at a, b, c, d, whose four int8 are in each lane of `word` */
#define STRIP_FOUR(a, b, c, d)                                                                                         \
    {                                                                                                                  \
        const __m512i ab_low = _mm512_unpacklo_epi8(a, b), ab_high = _mm512_unpackhi_epi8(a, b),                       \
                      cd_low = _mm512_unpacklo_epi8(c, d), cd_high = _mm512_unpackhi_epi8(c, d);                       \
        const __m512i part0 = _mm512_unpacklo_epi16(ab_low, cd_low), part1 = _mm512_unpackhi_epi16(ab_low, cd_low),    \
                      part2 = _mm512_unpacklo_epi16(ab_high, cd_high), part3 = _mm512_unpackhi_epi16(ab_high, cd_high); \
        STRIP_SUMS(STRIP_DOT)                                                                                          \
    }

/* 64 sums of a field, in the order and scale of the registers -> in order: 4 x 4 groups of 4 lanes, transposed. */
AVX512_INLINE void strip_order(int32_t *sums, const unsigned shift) {
    const __m512i a = _mm512_load_si512(sums), b = _mm512_load_si512(sums + 16), c = _mm512_load_si512(sums + 32),
                  d = _mm512_load_si512(sums + 48);
    const __m512i ab = _mm512_shuffle_i32x4(a, b, 0x44), ab_high = _mm512_shuffle_i32x4(a, b, 0xEE),
                  cd = _mm512_shuffle_i32x4(c, d, 0x44), cd_high = _mm512_shuffle_i32x4(c, d, 0xEE);
    const __m128i by = _mm_cvtsi32_si128((int)shift);
    _mm512_store_si512(sums, _mm512_sra_epi32(_mm512_shuffle_i32x4(ab, cd, 0x88), by));
    _mm512_store_si512(sums + 16, _mm512_sra_epi32(_mm512_shuffle_i32x4(ab, cd, 0xDD), by));
    _mm512_store_si512(sums + 32, _mm512_sra_epi32(_mm512_shuffle_i32x4(ab_high, cd_high, 0x88), by));
    _mm512_store_si512(sums + 48, _mm512_sra_epi32(_mm512_shuffle_i32x4(ab_high, cd_high, 0xDD), by));
}

/* the sums of `strip_columns_near` in order */
AVX512_TARGET static void strip_order_avx512(int32_t *acc, size_t n_vectors) {
    for (size_t i = 0; i < 4 * n_vectors; i++) strip_order(acc + 64 * i, 2 * (i % 4));
}

AVX512_TARGET static void strip_columns_avx512(const uint8_t *strips, size_t strip_vectors, size_t n_vectors,
                                               const int32_t *columns, const int8_t *x, size_t count, int32_t *acc,
                                               const int32_t *ahead, size_t n_ahead) {
    STRIP_FIELDS
    const strip_list list = {strips, strip_vectors * STRIP_BYTES, columns, ahead, count, n_ahead};
    const uint8_t *at[STRIPS_TOGETHER], *next[STRIPS_TOGETHER];
    strip_addresses(&list, 0, next);
    memset(acc, 0, n_vectors * STRIP_K * sizeof *acc); /* the sums of the columns before, in the order of the registers */
    for (size_t j = 0; j < count; j += STRIPS_TOGETHER) {
        const size_t some = next_strips(&list, j, at, next);
        int8_t values[STRIPS_TOGETHER] = {0};
        int32_t words[STRIPS_TOGETHER / 4];
        memcpy(values, x + j, some);
        memcpy(words, values, sizeof words);
        for (size_t v = 0; v < n_vectors; v++) {
            const size_t offset = v * STRIP_BYTES;
            int32_t *to = acc + v * STRIP_K;
            STRIP_SUMS(STRIP_LOAD)
            for (size_t f = 0; f < some; f += 4) {
                const __m512i word = _mm512_set1_epi32(words[f / 4]);
                for (size_t i = f; i < f + 4; i++) _mm_prefetch((const char *)next[i] + offset, _MM_HINT_T1);
                STRIP_FOUR(_mm512_loadu_si512(at[f] + offset), _mm512_loadu_si512(at[f + 1] + offset),
                           _mm512_loadu_si512(at[f + 2] + offset), _mm512_loadu_si512(at[f + 3] + offset))
            }
            STRIP_SUMS(STRIP_STORE)
        }
    }
    strip_order_avx512(acc, n_vectors);
}

/* `strip_rows` of strips that are in a cache: four rows at a time, whose sums stay in registers. */
#define NEAR_ROWS(DO) DO(0) DO(1) DO(2) DO(3)
#define NEAR_ZERO(r)                                                                                                   \
    __m512i sum_##r##0 = _mm512_setzero_si512(), sum_##r##1 = sum_##r##0, sum_##r##2 = sum_##r##0,                     \
            sum_##r##3 = sum_##r##0;                                                                                   \
    const uint8_t *at_##r = strips + (size_t)rows[j + r < count ? j + r : j] * bytes;
#define NEAR_DOT(r)                                                                                                    \
    {                                                                                                                  \
        const __m512i codes = _mm512_loadu_si512(at_##r + v * STRIP_BYTES);                                            \
        sum_##r##0 = avx512_dot(sum_##r##0, _mm512_and_si512(codes, field0), x0);                                      \
        sum_##r##1 = avx512_dot(sum_##r##1, _mm512_and_si512(codes, field1), x1);                                      \
        sum_##r##2 = avx512_dot(sum_##r##2, _mm512_and_si512(codes, field2), x2);                                      \
        sum_##r##3 = avx512_dot(sum_##r##3, _mm512_and_si512(codes, field3), x3);                                      \
    }
#define NEAR_SUM(r)                                                                                                    \
    const __m512i total_##r =                                                                                          \
        _mm512_add_epi32(_mm512_add_epi32(sum_##r##0, _mm512_srai_epi32(sum_##r##1, 2)),                               \
                         _mm512_add_epi32(_mm512_srai_epi32(sum_##r##2, 4), _mm512_srai_epi32(sum_##r##3, 6)));
AVX512_TARGET static void strip_rows_near_avx512(const uint8_t *strips, size_t n_vectors, const int8_t *x, int32_t x_sum,
                                                 const int32_t *rows, size_t count, int32_t *acc,
                                                 const int32_t *ahead, size_t n_ahead) {
    STRIP_FIELDS
    const size_t bytes = n_vectors * STRIP_BYTES;
    for (size_t j = 0, from = 0, to; j < count; j += 4, from = to) {
        to = j + 4 < count ? n_ahead * (j + 4) / count : n_ahead;
        NEAR_ROWS(NEAR_ZERO)
        for (size_t v = 0; v < n_vectors; v++) {
            const int8_t *xv = x + v * STRIP_K;
            const __m512i x0 = _mm512_loadu_si512(xv), x1 = _mm512_loadu_si512(xv + 64),
                          x2 = _mm512_loadu_si512(xv + 128), x3 = _mm512_loadu_si512(xv + 192);
            for (size_t i = from; i < to; i++)
                _mm_prefetch((const char *)strips + (size_t)ahead[i] * bytes + v * STRIP_BYTES, _MM_HINT_T1);
            NEAR_ROWS(NEAR_DOT)
        }
        NEAR_ROWS(NEAR_SUM)
#define PAIR(unpack, a, b) _mm512_add_epi32(_mm512_unpacklo_##unpack(a, b), _mm512_unpackhi_##unpack(a, b))
        const __m512i sixteen = PAIR(epi64, PAIR(epi32, total_0, total_1), PAIR(epi32, total_2, total_3)); /* four each */
#undef PAIR
        const __m256i eight = _mm256_add_epi32(_mm512_castsi512_si256(sixteen), _mm512_extracti64x4_epi64(sixteen, 1));
        const __m128i four = _mm_add_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
        const __mmask8 there = (__mmask8)(count - j < 4 ? (1 << (count - j)) - 1 : 15);
        _mm_mask_storeu_epi32(acc + j, there, _mm_sub_epi32(four, _mm_set1_epi32(x_sum)));
    }
}

/* `strip_columns` of strips that are in a cache, which adds to acc, in the order of the registers. */
AVX512_TARGET static void strip_columns_near_avx512(const uint8_t *strips, size_t strip_vectors, size_t n_vectors,
                                                    const int32_t *columns, const int8_t *x, size_t count, int32_t *acc,
                                                    const int32_t *ahead, size_t n_ahead) {
    STRIP_FIELDS
    const size_t share = count ? (n_ahead * 4 + count - 1) / count : 0; /* fetched beside four columns */
    const size_t bytes = strip_vectors * STRIP_BYTES, fours = count / 4 * 4;
    int32_t last[4] = {0};
    int8_t last_x[4] = {0};
    for (size_t j = fours; j < count; j++) last[j - fours] = columns[j], last_x[j - fours] = x[j];
    for (size_t v = 0; v < n_vectors; v++) {
        const uint8_t *vectors = strips + v * STRIP_BYTES;
        int32_t *to = acc + v * STRIP_K;
        STRIP_SUMS(STRIP_LOAD)
        size_t from = 0;
        for (size_t j = 0; j < count; j += 4) {
            const int32_t *four = j < fours ? columns + j : last;
            for (size_t end = from + share < n_ahead ? from + share : n_ahead; from < end; from++)
                _mm_prefetch((const char *)vectors + (size_t)ahead[from] * bytes, _MM_HINT_T1);
            const __m512i word = avx512_word(j < fours ? x + j : last_x);
            STRIP_FOUR(_mm512_loadu_si512(vectors + (size_t)four[0] * bytes),
                       _mm512_loadu_si512(vectors + (size_t)four[1] * bytes),
                       _mm512_loadu_si512(vectors + (size_t)four[2] * bytes),
                       _mm512_loadu_si512(vectors + (size_t)four[3] * bytes))
        }
        STRIP_SUMS(STRIP_STORE)
    }
}

#endif
#endif
