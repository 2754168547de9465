/* Attention: scores, softmax, and values weighted by it, over the keys and values of a cache (kv_cache.h). A template,
 * included by float_steps.h. */

STEP_INLINE STEP(f64v) STEP(load64)(const double *x) {
    STEP(f64v) v;
    memcpy(&v, x, sizeof v);
    return v;
}

/* scores[r * n_keys] = q[r] . key * scale for HEADS heads of q (in double, d apart). A key is widened once for all
 * heads. */
#define SCORES(HEADS, EACH)                                                                                            \
    STEP_INLINE void STEP(scores_##HEADS)(const double *q, size_t d, const float *key, size_t n_keys, double scale,    \
                                          float *scores) {                                                             \
        const STEP(f64v) zero = {0};                                                                                   \
        size_t j = 0;                                                                                                  \
        EACH(SCORES_ZERO)                                                                                              \
        for (; j + STEP(DOUBLES) <= d; j += STEP(DOUBLES)) {                                                           \
            const STEP(f64v) k = STEP(wide)(key + j);                                                                  \
            EACH(SCORES_ADD)                                                                                           \
        }                                                                                                              \
        EACH(SCORES_STORE)                                                                                             \
    }
#define SCORES_ZERO(r) STEP(f64v) sum##r = zero;
#define SCORES_ADD(r) sum##r = STEP_MULADD(STEP(load64)(q + r * d + j), k, sum##r);
#define SCORES_STORE(r)                                                                                                \
    {                                                                                                                  \
        double total = STEP(sum_lanes)(sum##r);                                                                        \
        for (size_t i = j; i < d; i++) total += q[r * d + i] * key[i];                                                 \
        scores[r * n_keys] = (float)(total * scale);                                                                   \
    }
#define ONE_HEAD(DO) DO(0)
#define TWO_HEADS(DO) DO(0) DO(1)
#define FOUR_HEADS(DO) TWO_HEADS(DO) DO(2) DO(3)
SCORES(1, ONE_HEAD)
SCORES(2, TWO_HEADS)
SCORES(4, FOUR_HEADS)

/* scores[r * n_keys + k] of four heads and SCORE_KEYS contiguous keys in double: as many sums as fit the registers */
#if STEP_BYTES == 64
#define EACH_KEY(DO) DO(0) DO(1) DO(2) DO(3)
#else
#define EACH_KEY(DO) DO(0) DO(1)
#endif
#define KEY_ZERO(k) STEP(f64v) sum0##k = zero, sum1##k = zero, sum2##k = zero, sum3##k = zero;
#define KEY_ADD(k)                                                                                                     \
    {                                                                                                                  \
        const STEP(f64v) key = STEP(load64)(keys + k * d + j);                                                         \
        sum0##k = STEP_MULADD(q0, key, sum0##k), sum1##k = STEP_MULADD(q1, key, sum1##k);                              \
        sum2##k = STEP_MULADD(q2, key, sum2##k), sum3##k = STEP_MULADD(q3, key, sum3##k);                              \
    }
STEP_INLINE void STEP(scores_4_by_keys)(const double *q, size_t d, const double *keys, size_t n_keys, double scale,
                                        float *scores) {
    const STEP(f64v) zero = {0};
    size_t j = 0;
    EACH_KEY(KEY_ZERO)
    for (; j + STEP(DOUBLES) <= d; j += STEP(DOUBLES)) {
        const STEP(f64v) q0 = STEP(load64)(q + j), q1 = STEP(load64)(q + d + j), q2 = STEP(load64)(q + 2 * d + j),
                         q3 = STEP(load64)(q + 3 * d + j);
        EACH_KEY(KEY_ADD)
    }
    enum { KEYS = STEP(SCORE_KEYS) };
    double totals[4 * KEYS]; /* by heads, then keys */
#if STEP_BYTES == 64
    STEP(sum_lanes_of_8)(sum00, sum02, sum10, sum12, sum01, sum03, sum11, sum13, totals);
    STEP(sum_lanes_of_8)(sum20, sum22, sum30, sum32, sum21, sum23, sum31, sum33, totals + 8);
#else
    STEP(sum_lanes_of_8)(sum00, sum10, sum20, sum30, sum01, sum11, sum21, sum31, totals);
#endif
    for (size_t r = 0; r < 4 && j < d; r++)
        for (size_t k = 0; k < KEYS; k++)
            for (size_t i = j; i < d; i++) totals[r * KEYS + k] += q[r * d + i] * keys[k * d + i];
    float rounded[4 * KEYS];
    STEP_UNROLL
    for (size_t i = 0; i < 4 * KEYS; i += STEP(DOUBLES)) {
        const STEP(f32h) part = STEP(narrow)(STEP(load64)(totals + i) * scale);
        memcpy(rounded + i, &part, sizeof part);
    }
    STEP_UNROLL
    for (size_t r = 0; r < 4; r++) memcpy(scores + r * n_keys, rounded + r * KEYS, KEYS * sizeof(float));
}
#undef EACH_KEY
#undef KEY_ZERO
#undef KEY_ADD

/* sums[r * d + j ..] += sum over s of pattern[r * n_keys + s] * values[s * stride + j ..] for the `count` keys of a
 * block, two vectors of HEADS heads at a time. Prefetches `next`, the values of the next block. */
#define VALUES(NAME, HEADS, EACH, NUMBER, WIDE)                                                                        \
    STEP_INLINE void STEP(NAME)(const double *pattern, size_t n_keys, const NUMBER *values, size_t count,              \
                                const float *next, size_t d, size_t stride, double *sums) {                            \
        const STEP(f64v) zero = {0};                                                                                   \
        size_t j = 0;                                                                                                  \
        for (; j + 2 * STEP(DOUBLES) <= d; j += 2 * STEP(DOUBLES)) {                                                   \
            EACH(VALUES_LOAD)                                                                                          \
            for (size_t s = 0; s < count; s++) {                                                                       \
                if (next) __builtin_prefetch(next + s * stride + j);                                                   \
                const STEP(f64v) v0 = STEP(WIDE)(values + s * stride + j),                                             \
                                 v1 = STEP(WIDE)(values + s * stride + j + STEP(DOUBLES));                             \
                EACH(VALUES_ADD)                                                                                       \
            }                                                                                                          \
            EACH(VALUES_STORE)                                                                                         \
        }                                                                                                              \
        for (; j < d; j++)                                                                                             \
            for (size_t r = 0; r < HEADS; r++)                                                                         \
                for (size_t s = 0; s < count; s++) sums[r * d + j] += pattern[r * n_keys + s] * values[s * stride + j];\
    }
#define VALUES_LOAD(r)                                                                                                 \
    STEP(f64v) sum##r##0 = STEP(load64)(sums + r * d + j), sum##r##1 = STEP(load64)(sums + r * d + j + STEP(DOUBLES));
#define VALUES_ADD(r)                                                                                                  \
    {                                                                                                                  \
        const STEP(f64v) p = pattern[r * n_keys + s] - zero;                                                           \
        sum##r##0 = STEP_MULADD(p, v0, sum##r##0), sum##r##1 = STEP_MULADD(p, v1, sum##r##1);                          \
    }
#define VALUES_STORE(r)                                                                                                \
    memcpy(sums + r * d + j, &sum##r##0, sizeof sum##r##0);                                                            \
    memcpy(sums + r * d + j + STEP(DOUBLES), &sum##r##1, sizeof sum##r##1);
VALUES(values_1, 1, ONE_HEAD, float, wide)
VALUES(values_2, 2, TWO_HEADS, float, wide)
VALUES(values_4, 4, FOUR_HEADS, float, wide)
VALUES(wide_values_4, 4, FOUR_HEADS, double, load64)
#undef SCORES
#undef SCORES_ZERO
#undef SCORES_ADD
#undef SCORES_STORE
#undef VALUES
#undef VALUES_LOAD
#undef VALUES_ADD
#undef VALUES_STORE
#undef ONE_HEAD
#undef TWO_HEADS
#undef FOUR_HEADS

/* scores (n) float32 -> p (n) = softmax, rounded to float32, as doubles */
STEP_TARGET static void STEP(softmax)(const float *scores, size_t n, double *p) {
    const STEP(f64v) zero = {0};
    STEP(f32h) v;
    STEP(f64v) max_lanes = zero + (double)scores[0];
    size_t i = 0;
    for (; i + STEP(DOUBLES) <= n; i += STEP(DOUBLES)) max_lanes = STEP(larger)(STEP(wide)(scores + i), max_lanes);
    float largest = scores[0];
    for (size_t lane = 0; lane < STEP(DOUBLES); lane++)
        largest = max_lanes[lane] > largest ? (float)max_lanes[lane] : largest;
    for (; i < n; i++) largest = scores[i] > largest ? scores[i] : largest;
    STEP(f64v) sum = zero, power;
    for (i = 0; i + STEP(DOUBLES) <= n; i += STEP(DOUBLES)) {
        memcpy(&v, scores + i, sizeof v);
        power = STEP(exp_lanes)(STEP(widen)(v - largest));
        memcpy(p + i, &power, sizeof power);
        sum += power;
    }
    double total = STEP(sum_lanes)(sum);
    if (i < n) { /* the last few together, padded with e^0 */
        v = (STEP(f32h)){0} + largest;
        memcpy(&v, scores + i, (n - i) * sizeof(float));
        power = STEP(exp_lanes)(STEP(widen)(v - largest));
        for (size_t lane = 0; i < n; i++, lane++) total += p[i] = power[lane];
    }
    const double inverse = 1.0 / total;
    for (i = 0; i + STEP(DOUBLES) <= n; i += STEP(DOUBLES)) {
        memcpy(&power, p + i, sizeof power);
        power = STEP(widen)(STEP(narrow)(power * inverse));
        memcpy(p + i, &power, sizeof power);
    }
    for (; i < n; i++) p[i] = (float)(p[i] * inverse);
}

/* the doubles of workspace that `attend` needs, and `attend_many` with R rows of all tokens */
STEP_TARGET static size_t STEP(attend_workspace)(size_t R, size_t d, size_t n_keys) {
    return (STEP(BLOCK_KEYS) + 2 * R) * d + R * n_keys + (R * n_keys + STEP(BLOCK_KEYS) * d + 1) / 2;
}

/* `count` rows of a pool as floats, *stride apart: in place, or widened into `buffer` */
STEP_INLINE const float *STEP(as_floats)(const kv_view *kv, const kv_pool *pool, size_t row, size_t count, size_t d,
                                         float *buffer, size_t *stride) {
    *stride = kv->kind == KV_FLOAT32 ? kv->stride : d;
    if (kv->kind == KV_FLOAT32) return (const float *)pool->rows + row * kv->stride;
    for (size_t n = 0; n < count; n++) {
        float *y = buffer + n * d;
        if (kv->kind == KV_FLOAT16) {
            STEP(half_to_float)((const uint16_t *)pool->rows + (row + n) * kv->stride, d, y);
            continue;
        }
        const int8_t *q = (const int8_t *)pool->rows + (row + n) * kv->stride;
        const float scale = pool->scales[(row + n) * kv->scale_stride];
        for (size_t i = 0; i < d; i++) y[i] = (float)q[i] * scale;
    }
    return buffer;
}

STEP_INLINE void STEP(fetch)(const kv_view *kv, const kv_pool *pool, size_t row, size_t d) {
    const char *bytes = (const char *)pool->rows + kv_bytes(kv->kind, row * kv->stride);
    for (size_t i = 0; i < kv_bytes(kv->kind, d); i += 64) __builtin_prefetch(bytes + i);
}

/* scores[r * n_keys] of R heads and one key */
STEP_INLINE void STEP(scores)(const double *q, size_t R, size_t d, const float *key, size_t n_keys, double scale,
                              float *scores) {
    size_t r = 0;
    for (; r + 4 <= R; r += 4) STEP(scores_4)(q + r * d, d, key, n_keys, scale, scores + r * n_keys);
    for (; r + 2 <= R; r += 2) STEP(scores_2)(q + r * d, d, key, n_keys, scale, scores + r * n_keys);
    if (r < R) STEP(scores_1)(q + r * d, d, key, n_keys, scale, scores + r * n_keys);
}

/* sums (R, d) += the weighted values of `count` keys */
STEP_INLINE void STEP(values)(const double *pattern, size_t n_keys, size_t R, const float *values, size_t count,
                              const float *next, size_t d, size_t stride, double *sums) {
    size_t r = 0;
    for (; r + 4 <= R; r += 4) STEP(values_4)(pattern + r * n_keys, n_keys, values, count, next, d, stride, sums + r * d);
    for (; r + 2 <= R; r += 2) STEP(values_2)(pattern + r * n_keys, n_keys, values, count, next, d, stride, sums + r * d);
    if (r < R) STEP(values_1)(pattern + r * n_keys, n_keys, values, count, next, d, stride, sums + r * d);
}

/* q (R, d) -> z (R, d): attention_scores, softmax and attention_values of layers.py for one token and one kv head. The
 * result of a head does not depend on the other heads, nor on the pages: every sum runs over the keys in one order.
 *
 * The keys are taken in blocks of contiguous keys. The values of a block stay in L1 for all j, the sums in `sums` (R,
 * d); iterating over all keys for each j would touch a cache line of each row again and again.
 *
 * Measured, 20 heads of 128 on 5 kv heads, one thread of a Cascade Lake Xeon, keys and values from memory unless noted:
 *   500 keys 0.51 ms, 3000 keys 3.3 (without blocks 0.89 and 6.1; the next block prefetched at once 0.66 and 4.5, not
 *   line by line beside the sums). 2000 keys: blocks of 32 keys 2.3 ms, of 16, a usual page, 2.05; pages of 16 tokens
 *   in random order 2.2. In the caches, AVX-512: 40 keys 17 us, 1000 keys 440; when `widen`, `sum_lanes` and the
 *   pattern's broadcast were more than one to three instructions, 38 and 630. Softmax with the pattern by heads, not by
 *   keys, so that all three passes are vectors: 512 keys 0.9 us per head, not 1.95; a tenth of all attention over 512
 *   keys.
 *   An EPYC (Zen 4, beside other programs), one kv head with 4 query heads, 512 keys of 128 from memory, AVX-512 (AVX2):
 *   43 us (43) where a head's rows are adjacent, as in the cython backend's caches; 70 (79) where the rows of five heads
 *   alternate. In the caches 27 (31), 195 (220) cycles per key: 128 of them for the multiply-adds in double, 42 for
 *   widening. A plain loop reads adjacent rows at 35 GB/s, alternating ones at 8 to 9, however far ahead it prefetches,
 *   and pieces of 8 KB, a head's rows of one page, at 12.
 *   A Sapphire Rapids: 1000 keys 300 us in the caches, 547 from memory (10 GB/s of 18: a core waits for 16 cache lines
 *   at a time, and rows are too far apart for the hardware prefetcher).
 * Tried: two keys of four heads at a time, lanes summed together: 193 cycles for 193. Adjacent rows without prefetching
 *   keys: 39 us for 43 (AVX-512), 41 to 46 for 43 (AVX2); without prefetching values: 43 and 60. Two or four keys of a
 *   head at a time, so that no sum waits for itself: 0.95 to 1.1 times as fast with AVX-512, 1.0 to 1.3 with AVX2 (best
 *   with one query head per kv head); it mostly waits for L3. All kv heads of a block before the next block, rows not
 *   adjacent: 1000 keys 505 us, but 100 keys 57, not 51. */
STEP_TARGET static void STEP(attend)(const float *q, size_t R, size_t d, const kv_view *kv, double scale,
                                     double *workspace, float *z) {
    const size_t n_keys = kv->n_keys;
    double *wide_q = workspace, *sums = wide_q + R * d, *pattern = sums + R * d;
    float *scores = (float *)(pattern + R * n_keys), *buffer = scores + R * n_keys;
    size_t stride, row = 0, next = 0, first_value = 0, next_count, count = kv_rows(kv, 0, STEP(BLOCK_KEYS), &row);
    const size_t first_values = kv_rows(kv, 0, STEP(BLOCK_KEYS), &first_value);
    for (size_t i = 0; i < R * d; i++) wide_q[i] = q[i];
    for (size_t start = 0; start < n_keys; start += count, row = next, count = next_count) {
        const float *key = STEP(as_floats)(kv, &kv->keys, row, count, d, buffer, &stride);
        next_count = kv_rows(kv, start + count, STEP(BLOCK_KEYS), &next);
        for (size_t s = start; s < start + count; s++, key += stride) {
            if (s - start < next_count) /* the keys of one head are too far apart for the hardware prefetcher */
                STEP(fetch)(kv, &kv->keys, next + s - start, d);
            if (n_keys - 1 - s < first_values) /* at the end, the first values */
                STEP(fetch)(kv, &kv->values, first_value + first_values + s - n_keys, d);
            STEP(scores)(wide_q, R, d, key, n_keys, scale, scores + s);
        }
    }
    for (size_t r = 0; r < R; r++) STEP(softmax)(scores + r * n_keys, n_keys, pattern + r * n_keys);
    memset(sums, 0, R * d * sizeof(double));
    row = first_value, count = first_values;
    for (size_t start = 0; start < n_keys; start += count, row = next, count = next_count) {
        const float *values = STEP(as_floats)(kv, &kv->values, row, count, d, buffer, &stride), *next_values = values;
        next_count = kv_rows(kv, start + count, STEP(BLOCK_KEYS), &next);
        if (next_count && kv->kind == KV_FLOAT32) next_values = (const float *)kv->values.rows + next * stride;
        else
            for (size_t n = 0; n < next_count; n++) STEP(fetch)(kv, &kv->values, next + n, d);
        STEP(values)(pattern + start, n_keys, R, values, count, next_values, d, stride, sums);
    }
    for (size_t i = 0; i < R * d; i++) z[i] = (float)sums[i];
}

/* `attend_many`: `attend` for T consecutive tokens of a sequence and one kv head, equal to the bit, with a block of
 * keys widened once for all. q and z (T, R, d), tokens `q_stride` and `z_stride` floats apart. `kv` has the keys of all
 * tokens: token t sees all but the last T - 1 - t, and of these at most the last `window` (0: all). Rows (t, r) go four
 * at a time; keys that not all of the four see go row by row.
 *
 * Measured, one thread, AVX-512, 8 tokens of 4 heads of 128, keys in the caches: 64 keys 33 us, 512 keys 234 (`attend`
 *   per token: 39 and 289). Of the 234, scores take 82 (26 G multiply-adds/s of some 38), values 72 (29), softmax 28,
 *   widening 9. A prompt of 512 tokens, 5 kv heads: 44.5 ms; 49.4 without storing four scores of a row at once and
 *   without taking the tokens of one kv head in turn (its keys are then in L2). The loops of products are half of that,
 *   at 33 G multiply-adds/s; softmax 5.6 ms, widening 4.
 * Tried: scores of two keys at a time, not four: 104 for 82 us. Prefetching the next block's rows: no faster. 64 rows
 *   at a time, not 32: no faster. */
typedef struct {
    size_t from, to; /* keys */
} STEP(range);

STEP_INLINE STEP(range) STEP(within)(STEP(range) keys, size_t from, size_t to) {
    return (STEP(range)){keys.from > from ? keys.from : from, keys.to < to ? keys.to : to};
}

/* the keys from .. to that all R rows see; from .. from when there are none */
STEP_INLINE STEP(range) STEP(seen_by_all)(const STEP(range) *seen, size_t R, size_t from, size_t to) {
    STEP(range) all = {from, to};
    for (size_t r = 0; r < R; r++) all = STEP(within)(seen[r], all.from, all.to);
    return all.from < all.to ? all : (STEP(range)){from, from};
}

/* rows of floats -> block (count, d) */
STEP_INLINE void STEP(widen_rows)(const float *x, size_t count, size_t d, size_t stride, double *block) {
    for (size_t s = 0; s < count; s++, x += stride, block += d) {
        size_t j = 0;
        for (; j + STEP(DOUBLES) <= d; j += STEP(DOUBLES)) {
            const STEP(f64v) v = STEP(wide)(x + j);
            memcpy(block + j, &v, sizeof v);
        }
        for (; j < d; j++) block[j] = x[j];
    }
}

STEP_TARGET static void STEP(attend_many)(const float *q, size_t T, size_t R, size_t d, size_t q_stride,
                                          size_t z_stride, const kv_view *kv, size_t window, double scale,
                                          double *workspace, float *z) {
    const size_t n_keys = kv->n_keys, rows = T * R;
    double *block = workspace, *wide_q = block + STEP(BLOCK_KEYS) * d, *sums = wide_q + rows * d, *pattern = sums + rows * d;
    float *scores = (float *)(pattern + rows * n_keys), *buffer = scores + rows * n_keys;
    STEP(range) seen[ATTEND_ROWS];
    size_t stride, row = 0, count;
    for (size_t i = 0; i < rows; i++) {
        const size_t to = n_keys - (T - 1 - i / R);
        seen[i] = (STEP(range)){window && kv->first + to > window ? to - window : 0, to};
        for (size_t j = 0; j < d; j++) wide_q[i * d + j] = q[i / R * q_stride + i % R * d + j];
    }
    for (size_t start = 0; start < n_keys; start += count) {
        count = kv_rows(kv, start, STEP(BLOCK_KEYS), &row);
        const float *keys = STEP(as_floats)(kv, &kv->keys, row, count, d, buffer, &stride);
        STEP(widen_rows)(keys, count, d, stride, block);
        for (size_t i = 0; i < rows; i += 4) {
            const size_t four = rows - i < 4 ? rows - i : 4;
            const STEP(range) all = STEP(seen_by_all)(seen + i, four, start, start + count);
            STEP(range) rest = all;
            for (; four == 4 && rest.from + STEP(SCORE_KEYS) <= rest.to; rest.from += STEP(SCORE_KEYS))
                STEP(scores_4_by_keys)(wide_q + i * d, d, block + (rest.from - start) * d, n_keys, scale,
                                       scores + i * n_keys + rest.from);
#define BEFORE(r) STEP(within)(seen[i + (r)], start, all.from) /* keys of the block that not all four rows see */
#define AFTER(r) STEP(within)(seen[i + (r)], all.to, start + count)
#define SCORE(KEYS, R, r)                                                                                              \
    {                                                                                                                  \
        const STEP(range) part = KEYS;                                                                                 \
        for (size_t s = part.from; s < part.to; s++)                                                                   \
            STEP(scores)(wide_q + (i + (r)) * d, R, d, keys + (s - start) * stride, n_keys, scale,                     \
                         scores + (i + (r)) * n_keys + s);                                                             \
    }
            SCORE(rest, four, 0)
            for (size_t r = 0; r < four; r++) {
                SCORE(BEFORE(r), 1, r)
                SCORE(AFTER(r), 1, r)
            }
#undef SCORE
        }
    }
    for (size_t r = 0; r < rows; r++)
        STEP(softmax)(scores + r * n_keys + seen[r].from, seen[r].to - seen[r].from, pattern + r * n_keys + seen[r].from);
    memset(sums, 0, rows * d * sizeof(double));
    for (size_t start = 0; start < n_keys; start += count) {
        count = kv_rows(kv, start, STEP(BLOCK_KEYS), &row);
        const float *values = STEP(as_floats)(kv, &kv->values, row, count, d, buffer, &stride);
        STEP(widen_rows)(values, count, d, stride, block);
        for (size_t i = 0; i < rows; i += 4) {
            const size_t four = rows - i < 4 ? rows - i : 4;
            const STEP(range) all = STEP(seen_by_all)(seen + i, four, start, start + count);
            const double *p = pattern + i * n_keys;
            double *to = sums + i * d;
#define ADD(KEYS, R, r)                                                                                                \
    {                                                                                                                  \
        const STEP(range) part = KEYS;                                                                                 \
        if (part.from < part.to)                                                                                       \
            STEP(values)(p + (r) * n_keys + part.from, n_keys, R, values + (part.from - start) * stride,               \
                         part.to - part.from, NULL, d, stride, to + (r) * d);                                          \
    }
            for (size_t r = 0; r < four; r++) ADD(BEFORE(r), 1, r)
            if (four == 4)
                STEP(wide_values_4)(p + all.from, n_keys, block + (all.from - start) * d, all.to - all.from, NULL, d, d,
                                    to);
            else
                ADD(all, four, 0)
            for (size_t r = 0; r < four; r++) ADD(AFTER(r), 1, r)
#undef BEFORE
#undef AFTER
#undef ADD
        }
    }
    for (size_t i = 0; i < rows; i++)
        for (size_t j = 0; j < d; j++) z[i / R * z_stride + i % R * d + j] = (float)sums[i * d + j];
}
