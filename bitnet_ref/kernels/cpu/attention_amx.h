/* Attention of a prompt on AMX tiles, with the bits of `attend` (attention_steps.h). Scores and weighted values are computed
 * from int8 digits, with a bound on the error. Where the whole interval rounds to one float32, that is also what `attend`
 * rounds its double to. The few other numbers are computed again in the order of `attend`. So no bit depends on the digits,
 * nor on which rows and keys are computed together.
 *
 * Plain version: `attend`, in double: 53 G multiply-adds/s per core of a Sapphire Rapids at best. tdpbssd makes 2,500 to
 * 3,300 of int8, so 20 products for one of double pay.
 *
 * Operands of a sum z = x y over n numbers (d of a score; SLICE_KEYS keys, a chunk, of a weighted value):
 *   A  16 query rows, or rows of softmax weights: x = u (x_0 + x_1/256 + ... + x_5/256^5) + rest
 *   B  16 keys, or columns of values:             y = v (y_0 + y_1/256 + ... + y_4/256^4) + rest
 *   u is a power of two for each row, v for the 16 columns; digits are -128 .. 127; |x| < 127.01 u, |y| < 127.01 v.
 *   The products of digits with i + j <= 5: 20 for 64 numbers. Those of equal i + j add to one tile, exactly: 6 * 2^14 * n
 *   fits int32. For values also (3, 3) and (4, 2), without which their bound is some four times as large. A needs x_5 for
 *   the weights: many are 2^-16 of the largest.
 *   All threads together make B once per kv head, then take runs of ATTEND_ROWS rows, for each of which A is made.
 *
 * Bound of |z - what `attend` rounds to float32|, in units of u v 2^-40:
 *   - rests: |y| < 2^7 v and |x| < 2^7 u, so 2^7 sum |rest of x| + 2^15 sum |rest of y|, each in units of its last digit
 *   - i + j = 6: these products weigh 2^-8, and |x_i| and |y_j| <= 128, so 0.5 sum |x_5| for (5, 1) and 0.5 sum |y_j| for
 *     (2, 4) and, where left out, (3, 3) and (4, 2)
 *   - i + j >= 7: less than 3 * 2^14 * 2^-16 + 2^-8 per number; 1 is counted
 *   - roundings, here and in `attend`: each is at most 2^-53 of sum |x y| <= |x| |y|, the norms. A score has d/8 + 3 in its
 *     chains and lanes, one for the scale, and 4 here (2 in slice_total, the scaled unit, the bound added). A weighted value
 *     has at most SUM_KEYS in its chain, one per block, and here one per chunk and 4. A few more are counted, for those of
 *     the bound itself.
 *   Products with units are exact. A row of zeros has the unit of the smallest float. NaN or Inf: the run goes to `attend`.
 *
 * Measured, a Xeon (Sapphire Rapids, AMX; beside other programs), one thread, normal numbers:
 *   32 rows and 512 keys of 128 numbers in the caches, us: scores 68 before, now 29 (19 in products), values 61, now 37 without
 *     (3, 3) and (4, 2) (8 to 10 to slice the weights), softmax 14; slicing the keys and values 75 per kv head
 *   a prompt, one kv head: 4 heads of 128, 512 tokens 5.2 ms, now 3.9; 2,048: 81, now 60; 3 heads of 64: 2.6, now 2.0
 *   prompts, two layers of 2B-4T's shape, processor time of seven pairs in turn: 512 tokens 0.99 to 1.14 times as fast, median
 *     1.09; 2,048 1.20 to 1.31, median 1.30
 *   computed again: 0.01 to 0.03% of the scores; of z 0.05 to 0.4% of the vectors of 8 for 512 keys, 0.2 to 0.5 for 2,048,
 *     the more the less even the weights are. One costs 0.5 us for 264 keys, 10 for 2,048, whose values are in L3.
 *   A product takes 7.3 ns; from registers 5.2 with zeros in a tile, 6.4 to 7.1 otherwise, as the clock goes down.
 *   Prompts of 64 tokens (4 heads of 128) 0.8 of the speed of `attend`, of 128 1.04: hence MIN_SLICED_ROWS and _KEYS.
 * Tried:
 *   - rests bounded by their number, not measured: 1% of scores and 2.6 to 5% of z again; five digits of weights: 4% of z
 *     where one is large. Reckoned: 15 products (i + j <= 4), as many again as there.
 *   - each row of a tile finished after a product of the next tile, for other ports: 0.95 to 1.0 of the speed; by vectors of
 *     256 bits: the same
 *   - chunks of 256 keys: values 1.08 for 512 keys, 0.98 for 2,048; of 64: 0.75. 16, 64 or 128 rows at a time: the same
 *   - the next tiles of B prefetched: 0.97; values to be computed again prefetched: slower
 */
#ifndef BITNET_REF_ATTENTION_AMX_H
#define BITNET_REF_ATTENTION_AMX_H

#include "kv_cache.h"
#include "ternary_amx.h"

enum { A_DIGITS = 6, B_DIGITS = 5, DIGIT_SUMS = 7, SLICE_COLUMNS = 64 };
enum { A_STEP_BYTES = A_DIGITS * 1024, B_STEP_BYTES = B_DIGITS * 1024 }; /* a tile per digit of SLICE_COLUMNS numbers */
enum { SLICE_KEYS = 128, SLICE_STEPS = SLICE_KEYS / SLICE_COLUMNS };
enum { SLICE_MAX_D = 256 }; /* a longer row would be too long without a tile store: ternary_amx.h */

/* Of 16 columns of B */
typedef struct {
    double unit;  /* of a sum, with that of a row of A: v 2^-20 */
    double bound; /* of rests and digits left out, in units of u 2^-20 */
    double norm;  /* the largest */
} slice_facts;

/* The keys and values of `kv` in digits, SLICE_KEYS of them per chunk */
typedef struct {
    kv_view kv;
    size_t d;
    uint8_t *keys;           /* (keys / 16, steps of d, digits, 1024) */
    uint8_t *values;         /* (chunks, d / 16, SLICE_STEPS, digits, 1024) */
    slice_facts *key_facts;  /* (keys / 16) */
    slice_facts *value_facts; /* (chunks, d / 16) */
    uint8_t *is_finite;      /* (chunks) */
} kv_slices;

typedef void (*slice_chunk_fn)(const kv_slices *, size_t chunk);
typedef void (*attend_sliced_fn)(const attend_call *, const kv_slices *, void *workspace);

static inline size_t slice_steps(size_t columns) { return (columns + SLICE_COLUMNS - 1) / SLICE_COLUMNS; }
static inline size_t slice_chunks(size_t n_keys) { return (n_keys + SLICE_KEYS - 1) / SLICE_KEYS; }

/* Places the arrays, if there is memory; returns their bytes. */
static inline size_t kv_slices_place(kv_slices *s, void *memory) {
    const size_t chunks = slice_chunks(s->kv.n_keys), key_tiles = chunks * (SLICE_KEYS / 16), value_tiles = chunks * (s->d / 16);
    const size_t key_bytes = key_tiles * slice_steps(s->d) * B_STEP_BYTES, value_bytes = value_tiles * SLICE_STEPS * B_STEP_BYTES;
    if (memory) {
        s->keys = memory, s->values = s->keys + key_bytes;
        s->key_facts = (slice_facts *)(s->values + value_bytes), s->value_facts = s->key_facts + key_tiles;
        s->is_finite = (uint8_t *)(s->value_facts + value_tiles);
    }
    return key_bytes + value_bytes + (key_tiles + value_tiles) * sizeof(slice_facts) + chunks;
}

/* Of 16 rows of A, as slice_facts; the norm times a rounding's share */
typedef struct {
    double unit[16], bound[16], norm[16];
} slice_rows;

/* bytes that attend_sliced needs for `rows` query rows */
static inline size_t attend_sliced_workspace(size_t rows, size_t d) {
    return (rows + 15) / 16 * ((slice_steps(d) + SLICE_STEPS) * A_STEP_BYTES + 2 * sizeof(slice_rows) + d * sizeof(double));
}

#if defined(BITNET_REF_HAS_AMX)

#define SLICE_TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,fma,f16c")))
#define SLICE_INLINE SLICE_TARGET static inline __attribute__((always_inline))

/* lanes from .. to - 1 of 8 */
SLICE_INLINE __mmask8 slice_lanes(ptrdiff_t from, ptrdiff_t to) {
    const ptrdiff_t low = from < 0 ? 0 : from > 8 ? 8 : from, high = to < 0 ? 0 : to > 8 ? 8 : to;
    return (__mmask8)(0xFF >> (8 - high) & 0xFF << low);
}

/* The unit of the first digit for numbers up to max: the power of two for which they are below 127.01. */
static inline double slice_unit(double max) {
    const double above = (max > 0x1p-149 ? max : 0x1p-149) * (1 + 0x1p-7);
    int64_t bits;
    memcpy(&bits, &above, sizeof bits);
    bits &= 0x7FF0000000000000;
    double power;
    memcpy(&power, &bits, sizeof power);
    return power * 0x1p-6;
}

/* x * times: 64 numbers in units of the last of n digits -> for each digit, the first one first, 64 bytes in the order of
 * the numbers. rest (8 vectors) += the sizes of what is lost as they become whole numbers. */
SLICE_INLINE void slice_64(const __m512d *x, __m512d times, const int n_digits, __m512i *digits, __m512d *rest) {
    /* leaves the whole number in the low bits of the double, with 128 added to each digit but the first */
    const __m512d magic = _mm512_set1_pd(0x1.8p52 + (n_digits == A_DIGITS ? 0x8080808080 : 0x80808080));
    const __m512i pairs = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15));
    const __m512i turn = _mm512_set_epi16(31, 23, 15, 7, 30, 22, 14, 6, 29, 21, 13, 5, 28, 20, 12, 4, 27, 19, 11, 3, 26, 18,
                                          10, 2, 25, 17, 9, 1, 24, 16, 8, 0);
    __m512i v[8], even[4], odd[4];
    for (int n = 0; n < 8; n++) {
        const __m512d whole = _mm512_fmadd_pd(x[n], times, magic);
        rest[n] += _mm512_abs_pd(_mm512_fmsub_pd(x[n], times, whole - magic));
        v[n] = _mm512_permutexvar_epi16(turn, _mm512_shuffle_epi8(_mm512_castpd_si512(whole), pairs)); /* lane i: byte i of all */
    }
    for (int n = 0; n < 4; n++) {
        even[n] = _mm512_unpacklo_epi64(v[2 * n], v[2 * n + 1]);
        odd[n] = _mm512_unpackhi_epi64(v[2 * n], v[2 * n + 1]);
    }
#define LANE(of, half, pick)                                                                                           \
    _mm512_shuffle_i64x2(_mm512_shuffle_i64x2(of[0], of[1], half), _mm512_shuffle_i64x2(of[2], of[3], half), pick)
    const __m512i lanes[A_DIGITS] = {LANE(even, 0x44, 0x88), LANE(odd, 0x44, 0x88), LANE(even, 0x44, 0xDD),
                                     LANE(odd, 0x44, 0xDD),  LANE(even, 0xEE, 0x88), LANE(odd, 0xEE, 0x88)};
#undef LANE
    for (int i = 0; i < n_digits; i++) digits[i] = _mm512_xor_si512(lanes[n_digits - 1 - i], _mm512_set1_epi8(i ? -128 : 0));
}

/* sums += |digits|, four at a time */
SLICE_INLINE __m512i slice_digit_sums(__m512i sums, __m512i digits) {
    return _mm512_dpbusd_epi32(sums, _mm512_abs_epi8(digits), _mm512_set1_epi8(1));
}

/* Row r of A: numbers from .. to - 1 of x, in vectors of 8 that are `stride` apart, and 0 for the others. */
SLICE_TARGET static void slice_row(const double *x, size_t stride, ptrdiff_t from, ptrdiff_t to, size_t steps, double roundings,
                                   uint8_t *tiles, slice_rows *facts, size_t r) {
    _Alignas(64) double padded[SLICE_MAX_D];
    __m512i last_digits = _mm512_setzero_si512(), digits[A_DIGITS];
    __m512d max = _mm512_setzero_pd(), squares = max, rest[8], v[8];
    if (from > 0 || to < (ptrdiff_t)(SLICE_COLUMNS * steps)) {
        for (ptrdiff_t n = 0; n < (ptrdiff_t)(8 * steps); n++)
            _mm512_store_pd(padded + 8 * n,
                            _mm512_maskz_loadu_pd(slice_lanes(from - 8 * n, to - 8 * n), x + n * (ptrdiff_t)stride));
        x = padded, stride = 8;
    }
    for (size_t n = 0; n < 8 * steps; n++) {
        const __m512d number = _mm512_loadu_pd(x + n * stride);
        max = _mm512_max_pd(max, _mm512_abs_pd(number)), squares = _mm512_fmadd_pd(number, number, squares);
    }
    for (int n = 0; n < 8; n++) rest[n] = _mm512_setzero_pd();
    const double unit = slice_unit(_mm512_reduce_max_pd(max));
    const __m512d times = _mm512_set1_pd(0x1p40 / unit);
    tiles += r * VECTOR_BYTES;
    for (size_t step = 0; step < steps; step++, tiles += A_STEP_BYTES) {
        for (size_t n = 0; n < 8; n++) v[n] = _mm512_loadu_pd(x + (8 * step + n) * stride);
        slice_64(v, times, A_DIGITS, digits, rest);
        for (int i = 0; i < A_DIGITS; i++) _mm512_store_si512(tiles + i * AMX_TILE_BYTES, digits[i]);
        last_digits = slice_digit_sums(last_digits, digits[A_DIGITS - 1]);
    }
    for (int n = 1; n < 8; n++) rest[0] += rest[n];
    facts->unit[r] = unit * 0x1p-20;
    facts->bound[r] = unit * 0x1p-20 * (0x1p7 * _mm512_reduce_add_pd(rest[0]) + 0.5 * _mm512_reduce_add_epi32(last_digits) +
                                        (double)(SLICE_COLUMNS * steps));
    facts->norm[r] = sqrt(_mm512_reduce_add_pd(squares)) * (0x1p-53 * roundings); /* not finite if a number is not */
}

/* What makes slice_facts: vectors of the 64 numbers of a line, and digit sums of 16 columns */
typedef struct {
    __m512d rest[8], squares[8];
    __m512i digits;
} slice_sums;

/* A line of B: 4 numbers of 16 columns. v has them column by column; of_values: first the 16 of the first row. */
SLICE_INLINE void slice_line(const __m512d *v, __m512d times, const int of_values, uint8_t *line, slice_sums *sums) {
    __m512i digits[B_DIGITS];
    slice_64(v, times, B_DIGITS, digits, sums->rest);
    for (int n = 0; n < 8; n++) sums->squares[n] = _mm512_fmadd_pd(v[n], v[n], sums->squares[n]);
    for (int i = 0; i < B_DIGITS; i++) {
        if (of_values) { /* 4 rows of 16 -> 16 columns of 4 */
            const __m512i fours = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
            const __m512i bytes = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15));
            digits[i] = _mm512_shuffle_epi8(_mm512_permutexvar_epi32(fours, digits[i]), bytes);
        }
        _mm512_store_si512(line + i * AMX_TILE_BYTES, digits[i]);
        if (i >= (of_values ? 4 : 2)) sums->digits = slice_digit_sums(sums->digits, digits[i]);
    }
}

/* rest, squares: lanes whose maximum is that of the columns. all: lanes whose sum is that of all squares, for a maximum may
 * leave out NaN. */
SLICE_INLINE slice_facts slice_make_facts(double unit, __m512d rest, __m512d squares, __m512d all, __m512i digits) {
    const double bound = 0x1p15 * _mm512_reduce_max_pd(rest) + 0.5 * _mm512_reduce_max_epi32(digits);
    const double sum = _mm512_reduce_add_pd(all);
    return (slice_facts){unit * 0x1p-20, unit * 0x1p-20 * bound, sqrt(sum < INFINITY ? _mm512_reduce_max_pd(squares) : sum)};
}

/* in each lane, the sum of its four */
SLICE_INLINE __m512d slice_sum_fours(__m512d v) {
    v = _mm512_add_pd(v, _mm512_permutex_pd(v, 0x4E));
    return _mm512_add_pd(v, _mm512_permute_pd(v, 0x55));
}

/* 1 to 16 keys -> tiles of B. In place of those beyond `count`, the first one. */
SLICE_TARGET static slice_facts slice_keys(int kind, const char *const *at, const float *scale, size_t count, size_t d,
                                           uint8_t *tiles) {
#define NUMBERS(k, j) ((__m512d)stored_avx512(kind, at[(k) < count ? (k) : 0], j, scale[(k) < count ? (k) : 0]))
    __m512d max = _mm512_setzero_pd();
    slice_sums sums;
    memset(&sums, 0, sizeof sums);
    for (size_t k = 0; k < count; k++)
        for (size_t j = 0; j < d; j += 8) max = _mm512_max_pd(max, _mm512_abs_pd(NUMBERS(k, j)));
    const double unit = slice_unit(_mm512_reduce_max_pd(max));
    const __m512d times = _mm512_set1_pd(0x1p32 / unit);
    memset(tiles + (slice_steps(d) - 1) * B_STEP_BYTES, 0, B_STEP_BYTES); /* d may end within it */
    for (size_t j = 0; j < d; j += 8) {
        __m512d low[8], high[8]; /* columns j .. j + 3, and j + 4 .. j + 7, of two keys */
        for (size_t n = 0; n < 8; n++) {
            const __m512d a = NUMBERS(2 * n, j), b = NUMBERS(2 * n + 1, j);
            low[n] = _mm512_shuffle_f64x2(a, b, 0x44), high[n] = _mm512_shuffle_f64x2(a, b, 0xEE);
        }
        uint8_t *line = tiles + j / SLICE_COLUMNS * B_STEP_BYTES + j % SLICE_COLUMNS / 4 * VECTOR_BYTES;
        slice_line(low, times, 0, line, &sums);
        slice_line(high, times, 0, line + VECTOR_BYTES, &sums);
    }
#undef NUMBERS
    __m512d rest = _mm512_setzero_pd(), squares = rest, all = rest;
    for (int n = 0; n < 8; n++) { /* two keys each */
        rest = _mm512_max_pd(rest, slice_sum_fours(sums.rest[n]));
        squares = _mm512_max_pd(squares, slice_sum_fours(sums.squares[n]));
        all += sums.squares[n];
    }
    return slice_make_facts(unit, rest, squares, all, sums.digits);
}

/* Columns j .. j + 15 of 1 to SLICE_KEYS values -> tiles of B, with 0 beyond `count` */
SLICE_TARGET static slice_facts slice_values(int kind, const kv_rows *rows, size_t count, size_t j, uint8_t *tiles) {
#define NUMBERS(k, n) ((__m512d)stored_avx512(kind, rows->at[k], j + 8 * (n), rows->scale[k]))
    __m512d max = _mm512_setzero_pd();
    slice_sums sums;
    memset(&sums, 0, sizeof sums);
    for (size_t k = 0; k < 2 * count; k++) max = _mm512_max_pd(max, _mm512_abs_pd(NUMBERS(k / 2, k % 2)));
    const double unit = slice_unit(_mm512_reduce_max_pd(max));
    const __m512d times = _mm512_set1_pd(0x1p32 / unit);
    for (size_t k = 0; k < SLICE_KEYS; k += 4) {
        __m512d v[8];
        for (size_t n = 0; n < 8; n++) v[n] = k + n / 2 < count ? NUMBERS(k + n / 2, n % 2) : _mm512_setzero_pd();
        uint8_t *line = tiles + k / SLICE_COLUMNS * B_STEP_BYTES + k % SLICE_COLUMNS / 4 * VECTOR_BYTES;
        slice_line(v, times, 1, line, &sums);
    }
#undef NUMBERS
#define COLUMNS(of, h) (of[h] + of[h + 2] + (of[h + 4] + of[h + 6])) /* sums of 8 columns */
    const __m512d low = COLUMNS(sums.squares, 0), high = COLUMNS(sums.squares, 1);
    const __m512d rest = _mm512_max_pd(COLUMNS(sums.rest, 0), COLUMNS(sums.rest, 1));
    return slice_make_facts(unit, rest, _mm512_max_pd(low, high), low + high, sums.digits);
#undef COLUMNS
}

/* Slices a chunk of keys and values. */
SLICE_TARGET static void slice_chunk_amx(const kv_slices *s, size_t chunk) {
    const kv_view *kv = &s->kv;
    const size_t start = chunk * SLICE_KEYS, end = start + SLICE_KEYS < kv->n_keys ? start + SLICE_KEYS : kv->n_keys, d = s->d;
    double sum = 0; /* finite where all norms are */
    kv_rows rows;
    rows.total = 0;
    kv_add_rows(kv, &kv->keys, (kv_range){start, end}, &rows);
    for (size_t k = 0; k < end - start; k += 16) {
        const size_t tile = (start + k) / 16, count = end - start - k < 16 ? end - start - k : 16;
        uint8_t *to = s->keys + tile * slice_steps(d) * B_STEP_BYTES;
        s->key_facts[tile] = slice_keys(kv->kind, rows.at + k, rows.scale + k, count, d, to);
        sum += s->key_facts[tile].norm;
    }
    rows.total = 0;
    kv_add_rows(kv, &kv->values, (kv_range){start, end}, &rows);
    for (size_t j = 0; j < d; j += 16) {
        const size_t tile = chunk * (d / 16) + j / 16;
        uint8_t *to = s->values + tile * SLICE_STEPS * B_STEP_BYTES;
        s->value_facts[tile] = slice_values(kv->kind, &rows, end - start, j, to);
        sum += s->value_facts[tile].norm;
    }
    s->is_finite[chunk] = sum < INFINITY;
}

/* The score of row i and key s as `attend` computes it */
SLICE_TARGET static __attribute__((noinline)) void score_again(const attend_call *c, size_t i, size_t s) {
    kv_rows key;
    key.total = 0;
    kv_add_rows(&c->kv, &c->kv.keys, (kv_range){s, s + 1}, &key);
    some_rows_avx512(c, i, 1, (kv_range){s, s + 1}, &key, 0, NULL, NULL, 0);
}

/* sums[n] = the chain of a block, 8 columns, for `count` blocks side by side */
SLICE_INLINE void slice_chains(const int kind, const kv_rows *rows, const double *const *p, const size_t count, size_t j,
                               __m512d *sums) {
    for (size_t k = 0; k < rows[0].total; k++)
        for (size_t n = 0; n < count; n++) {
            const __m512d value = (__m512d)stored_avx512(kind, rows[n].at[k], j, rows[n].scale[k]);
            sums[n] = _mm512_fmadd_pd(_mm512_set1_pd(p[n][k]), value, sums[n]);
        }
}

/* Columns j .. j + 7 of z of row i as `attend` computes them; two blocks at a time, because each is a chain. */
SLICE_TARGET static __attribute__((noinline)) __m256 values_again(const attend_call *c, size_t i, size_t j) {
    const size_t blocks = attend_blocks(&c->kv);
    __m512d total = _mm512_setzero_pd();
    for (size_t b = 0; b < blocks; b += 2) {
        kv_rows rows[2];
        const double *p[2];
        __m512d sums[2];
        for (size_t n = 0; n < 2; n++) {
            kv_range keys = {0, 0};
            if (b + n < blocks) keys = kv_within(c->seen[i], attend_block(&c->kv, b + n));
            rows[n].total = 0, sums[n] = _mm512_setzero_pd(), p[n] = c->pattern + i * c->kv.n_keys + keys.from;
            kv_add_rows(&c->kv, &c->kv.values, keys, rows + n); /* none where keys.from > keys.to */
        }
#define CHAINS(kind)                                                                                                   \
    case kind:                                                                                                         \
        if (rows[0].total == rows[1].total) slice_chains(kind, rows, p, 2, j, sums);                                   \
        else slice_chains(kind, rows, p, 1, j, sums), slice_chains(kind, rows + 1, p + 1, 1, j, sums + 1);             \
        break;
        switch (c->kv.kind) { CHAINS(KV_FLOAT32) CHAINS(KV_FLOAT16) CHAINS(KV_INT8) }
#undef CHAINS
        total = _mm512_add_pd(_mm512_add_pd(total, sums[0]), sums[1]);
    }
    return _mm512_cvtpd_ps(total);
}

/* sums (DIGIT_SUMS, 16, 16) of the products of digits i and j, by i + j. of_values: with two of i + j = 6, whose tile is the
 * one of (0, 0), which is computed before. */
SLICE_INLINE void slice_products(const uint8_t *a, const uint8_t *b, size_t steps, const int of_values, int32_t *sums) {
#define A(i) AMX_LOAD(6, a + (i) * AMX_TILE_BYTES, VECTOR_BYTES);
#define B(sum, j)                                                                                                      \
    AMX_LOAD(7, b + (j) * AMX_TILE_BYTES, VECTOR_BYTES);                                                               \
    AMX_DOT_SIGNED(sum, 6, 7);
#define STORE(tile, sum) AMX_STORE(tile, sums + (sum) * 256, VECTOR_BYTES);
    AMX_ZERO(0);
    if (of_values) {
        for (size_t step = 0; step < steps; step++, a += A_STEP_BYTES, b += B_STEP_BYTES) { A(0) B(0, 0) }
        a -= steps * A_STEP_BYTES, b -= steps * B_STEP_BYTES;
        STORE(0, 0)
        AMX_ZERO(0);
    }
    AMX_ZERO(1);
    AMX_ZERO(2);
    AMX_ZERO(3);
    AMX_ZERO(4);
    AMX_ZERO(5);
    for (size_t step = 0; step < steps; step++, a += A_STEP_BYTES, b += B_STEP_BYTES) {
        A(0)
        if (!of_values) { B(0, 0) }
        B(1, 1) B(2, 2) B(3, 3) B(4, 4)
        A(1) B(1, 0) B(2, 1) B(3, 2) B(4, 3) B(5, 4)
        A(2) B(2, 0) B(3, 1) B(4, 2) B(5, 3)
        A(3) B(3, 0) B(4, 1) B(5, 2)
        if (of_values) { B(0, 3) }
        A(4) B(4, 0) B(5, 1)
        if (of_values) { B(0, 2) }
        A(5) B(5, 0)
    }
    if (of_values) { STORE(0, 6) } else { STORE(0, 0) }
    STORE(1, 1) STORE(2, 2) STORE(3, 3) STORE(4, 4) STORE(5, 5)
#undef A
#undef B
#undef STORE
}

/* eight sums of products, weighed and added */
SLICE_INLINE __m512d slice_total(const int32_t *sums, const int of_values) {
#define SUM(n) _mm512_cvtepi32_pd(_mm256_load_si256((const __m256i *)(sums + 256 * (n))))
    __m512d total = SUM(0);
    for (int n = 1; n < 6; n++) total = _mm512_fmadd_pd(total, _mm512_set1_pd(256), SUM(n));
    return of_values ? _mm512_fmadd_pd(SUM(6), _mm512_set1_pd(1.0 / 256), total) : total;
#undef SUM
}

/* number * unit, rounded to float32; *unsure: lanes where numbers within `bound` of it round to another float32 */
SLICE_INLINE __m256 slice_round(__m512d number, double unit, double bound, __mmask8 *unsure) {
    const __m256 low = _mm512_cvtpd_ps(_mm512_fmsub_pd(number, _mm512_set1_pd(unit), _mm512_set1_pd(bound)));
    const __m256 high = _mm512_cvtpd_ps(_mm512_fmadd_pd(number, _mm512_set1_pd(unit), _mm512_set1_pd(bound)));
    *unsure = _mm256_cmpneq_epi32_mask(_mm256_castps_si256(low), _mm256_castps_si256(high));
    return low;
}

/* Of the 16 rows of A with 16 columns of B: the units of sums, and the bounds, times `scale` */
SLICE_INLINE void slice_units(const slice_rows *a, slice_facts b, double scale, double *units, double *bounds) {
    for (size_t r = 0; r < 16; r++) {
        units[r] = a->unit[r] * (b.unit * scale);
        bounds[r] = a->bound[r] * (b.unit * scale) + a->unit[r] * (b.bound * scale) + a->norm[r] * (b.norm * scale);
    }
}

/* Scores of rows i .. i + 15 and keys s .. s + 15 (`s` may be below 0), where a row sees them */
SLICE_INLINE void slice_scores(const attend_call *c, size_t i, ptrdiff_t s, const slice_rows *a, slice_facts b,
                               const int32_t *sums) {
    const size_t rows = c->T * c->R - i < 16 ? c->T * c->R - i : 16;
    double units[16], bounds[16];
    slice_units(a, b, c->scale, units, bounds);
    for (size_t r = 0; r < rows; r++) {
        const ptrdiff_t from = (ptrdiff_t)c->seen[i + r].from - s, to = (ptrdiff_t)c->seen[i + r].to - s;
        float *scores = c->scores + (ptrdiff_t)((i + r) * c->kv.n_keys) + s;
        __mmask8 lanes[2] = {0xFF, 0xFF}, unsure[2];
        const __m256 low = slice_round(slice_total(sums + 16 * r, 0), units[r], bounds[r], unsure);
        const __m256 high = slice_round(slice_total(sums + 16 * r + 8, 0), units[r], bounds[r], unsure + 1);
        if (from > 0 || to < 16) lanes[0] = slice_lanes(from, to), lanes[1] = slice_lanes(from - 8, to - 8);
        _mm256_mask_storeu_ps(scores, lanes[0], low);
        _mm256_mask_storeu_ps(scores + 8, lanes[1], high);
        for (unsigned left = (unsigned)(lanes[1] & unsure[1]) << 8 | (lanes[0] & unsure[0]); left; left &= left - 1) {
            score_again(c, i + r, (size_t)(s + __builtin_ctz(left)));
        }
    }
}

/* Adds to columns j .. j + 15 of the sums of rows i .. i + 15, and to their bounds. */
SLICE_INLINE void slice_add(const attend_call *c, size_t i, size_t j, const slice_rows *a, slice_facts b, const int32_t *sums,
                            double *bounds) {
    const size_t rows = c->T * c->R - i < 16 ? c->T * c->R - i : 16;
    double units[16], more[16];
    slice_units(a, b, 1, units, more);
    for (size_t r = 0; r < 16; r++) bounds[r] += more[r];
    for (size_t r = 0; r < rows; r++) {
        double *to = c->sums + (i + r) * c->d + j;
        const __m512d unit = _mm512_set1_pd(units[r]);
        _mm512_storeu_pd(to, _mm512_fmadd_pd(slice_total(sums + 16 * r, 1), unit, _mm512_loadu_pd(to)));
        _mm512_storeu_pd(to + 8, _mm512_fmadd_pd(slice_total(sums + 16 * r + 8, 1), unit, _mm512_loadu_pd(to + 8)));
    }
}

/* Of keys s .. s + n - 1: how many there are up to the last that one of rows i .. i + 15 sees */
static inline size_t slice_seen(const attend_call *c, size_t i, ptrdiff_t s, ptrdiff_t n) {
    const size_t last = i + 16 < c->T * c->R ? i + 15 : c->T * c->R - 1;
    const ptrdiff_t from = (ptrdiff_t)c->seen[i].from - s, to = (ptrdiff_t)c->seen[last].to - s;
    return to <= 0 || from >= n ? 0 : (size_t)(to < n ? to : n);
}

/* What a run of rows needs: its call, the slices, and places in the workspace */
typedef struct {
    const attend_call *c;
    const kv_slices *slices;
    size_t groups, offset, end; /* of 16 rows; of its keys in the slices */
    uint8_t *q_tiles, *p_tiles; /* (groups, steps, digits, 1024) */
    slice_rows *q_facts, *p_facts; /* (groups) */
    double *bounds;             /* (groups, d / 16, 16): of z */
} slice_run;

/* Slices the query rows. Returns whether they are finite, and all their keys and values. */
SLICE_TARGET static int slice_queries(const slice_run *run) {
    const attend_call *c = run->c;
    const size_t rows = c->T * c->R, d = c->d, steps = slice_steps(d);
    double sum = 0;
    for (size_t i = 0; i < rows; i++) {
        slice_row(c->wide_q + 8 * i, 8 * rows, 0, (ptrdiff_t)d, steps, (double)d / 8 + 10,
                  run->q_tiles + i / 16 * steps * A_STEP_BYTES, run->q_facts + i / 16, i % 16);
        sum += run->q_facts[i / 16].norm[i % 16];
    }
    for (size_t key = run->offset; key < run->end; key += SLICE_KEYS - key % SLICE_KEYS)
        if (!run->slices->is_finite[key / SLICE_KEYS]) return 0;
    return sum < INFINITY;
}

SLICE_TARGET static void slice_all_scores(const slice_run *run) {
    const size_t steps = slice_steps(run->c->d);
    _Alignas(64) int32_t sums[DIGIT_SUMS * 256];
    for (size_t key = run->offset / 16 * 16; key < run->end; key += 16)
        for (size_t g = 0; g < run->groups; g++) {
            const ptrdiff_t s = (ptrdiff_t)key - (ptrdiff_t)run->offset;
            if (!slice_seen(run->c, 16 * g, s, 16)) continue;
            slice_products(run->q_tiles + g * steps * A_STEP_BYTES, run->slices->keys + key / 16 * steps * B_STEP_BYTES, steps,
                           0, sums);
            slice_scores(run->c, 16 * g, s, run->q_facts + g, run->slices->key_facts[key / 16], sums);
        }
}

/* Adds the weighted values of a chunk. Returns whether the weights are finite. */
SLICE_TARGET static int slice_add_chunk(const slice_run *run, size_t chunk) {
    const attend_call *c = run->c;
    const ptrdiff_t s = (ptrdiff_t)(chunk * SLICE_KEYS) - (ptrdiff_t)run->offset;
    const size_t n_keys = c->kv.n_keys, d = c->d;
    double sum = 0;
    _Alignas(64) int32_t sums[DIGIT_SUMS * 256];
    for (size_t i = 0; i < c->T * c->R; i++) {
        slice_row(c->pattern + (ptrdiff_t)(i * n_keys) + s, 8, (ptrdiff_t)c->seen[i].from - s, (ptrdiff_t)c->seen[i].to - s,
                  slice_steps(slice_seen(c, i / 16 * 16, s, SLICE_KEYS)), SUM_KEYS + (double)n_keys / 64 + 16,
                  run->p_tiles + i / 16 * SLICE_STEPS * A_STEP_BYTES, run->p_facts + i / 16, i % 16);
        sum += run->p_facts[i / 16].norm[i % 16];
    }
    for (size_t j = 0; j < d; j += 16)
        for (size_t g = 0; g < run->groups; g++) {
            const size_t tile = chunk * (d / 16) + j / 16, steps = slice_steps(slice_seen(c, 16 * g, s, SLICE_KEYS));
            if (!steps) continue;
            slice_products(run->p_tiles + g * SLICE_STEPS * A_STEP_BYTES, run->slices->values + tile * SLICE_STEPS * B_STEP_BYTES,
                           steps, 1, sums);
            slice_add(c, 16 * g, j, run->p_facts + g, run->slices->value_facts[tile], sums, run->bounds + g * d + j);
        }
    return sum < INFINITY;
}

/* `attend_all`, where all keys and values are sliced */
SLICE_TARGET static void attend_sliced_amx(const attend_call *c, const kv_slices *slices, void *workspace) {
    const size_t rows = c->T * c->R, d = c->d, groups = (rows + 15) / 16, offset = c->kv.first - slices->kv.first;
    slice_run run = {c, slices, groups, offset, offset + c->kv.n_keys, workspace};
    run.p_tiles = run.q_tiles + groups * slice_steps(d) * A_STEP_BYTES;
    run.q_facts = (slice_rows *)(run.p_tiles + groups * SLICE_STEPS * A_STEP_BYTES), run.p_facts = run.q_facts + groups;
    run.bounds = (double *)(run.p_facts + groups);
    memset(run.q_facts, 0, groups * (2 * sizeof *run.q_facts + d * sizeof *run.bounds)); /* rows beyond the last, too */
    attend_avx512(c, ATTEND_BEGIN, 0, 0);
    if (!slice_queries(&run)) {
        attend_all(attend_avx512, c);
        return;
    }
    amx_set_tiles(AMX_PAIR);
    slice_all_scores(&run);
    attend_avx512(c, ATTEND_SOFTMAX, 0, rows);
    int is_finite = 1;
    for (size_t chunk = offset / SLICE_KEYS; chunk * SLICE_KEYS < run.end; chunk++) is_finite &= slice_add_chunk(&run, chunk);
    amx_release();
    if (!is_finite) {
        memset(c->sums, 0, rows * d * sizeof *c->sums);
        attend_avx512(c, ATTEND_VALUES, 0, attend_blocks(&c->kv));
        attend_avx512(c, ATTEND_END, 0, 0);
        return;
    }
    for (size_t j = 0; j < d; j += 16) /* by columns: values that are computed again are near each other */
        for (size_t n = 0; n < 2 * rows; n++) {
            const size_t i = n / 2, column = j + n % 2 * 8;
            __mmask8 unsure;
            __m256 z = slice_round(_mm512_loadu_pd(c->sums + i * d + column), 1, run.bounds[i / 16 * d + j + i % 16], &unsure);
            if (unsure) z = values_again(c, i, column);
            _mm256_storeu_ps(c->z + i / c->R * c->z_stride + i % c->R * d + column, z);
        }
}

#endif
#endif
