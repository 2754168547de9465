/* Attention: scores, softmax, and values weighted by it, over the keys and values of a cache (kv_cache.h). A template,
 * included by float_steps.h. */

/* not by memcpy: GCC 12 would copy the operands of a product to the stack */
STEP_INLINE STEP(f64v) STEP(load64)(const double *x) { return *(const STEP(f64u) *)x; }

/* numbers j .. of a stored row */
STEP_INLINE STEP(f64v) STEP(stored)(int kind, const char *row, size_t j, float scale) {
    if (kind == KV_WIDE) return STEP(load64)((const double *)row + j);
    if (kind == KV_FLOAT32) return STEP(wide)((const float *)row + j);
#if STEP_BYTES == 64
    if (kind == KV_FLOAT16)
        return STEP(widen)((STEP(f32h))_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(row + 2 * j))));
    const __m256i q = _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)(row + j)));
    return STEP(widen)((STEP(f32h))_mm256_cvtepi32_ps(q) * scale);
#elif STEP_BYTES == 32
    if (kind == KV_FLOAT16)
        return STEP(widen)((STEP(f32h))_mm_cvtph_ps(_mm_loadl_epi64((const __m128i *)(row + 2 * j))));
    int32_t four;
    memcpy(&four, row + j, sizeof four);
    const __m128i q = _mm_cvtepi8_epi32(_mm_cvtsi32_si128(four));
    return STEP(widen)((STEP(f32h))_mm_cvtepi32_ps(q) * scale);
#else
    float x[STEP(DOUBLES)];
    if (kind == KV_FLOAT16) half_to_float_plain((const uint16_t *)row + j, STEP(DOUBLES), x);
    else
        for (size_t i = 0; i < STEP(DOUBLES); i++) x[i] = (float)((const int8_t *)row)[j + i] * scale;
    return STEP(wide)(x);
#endif
}

STEP_INLINE double STEP(stored_number)(int kind, const char *row, size_t j, float scale) {
    float x;
    if (kind == KV_WIDE) return ((const double *)row)[j];
    if (kind == KV_FLOAT16) half_to_float_plain((const uint16_t *)row + j, 1, &x);
    else x = kind == KV_FLOAT32 ? ((const float *)row)[j] : (float)((const int8_t *)row)[j] * scale;
    return x;
}

/* scores of query rows i .. i + R - 1 and the K keys from s on: a key is loaded and widened once for R heads.
 * Prefetches as much at `ahead`, line by line: many lines at once stop the loop. */
STEP_INLINE void STEP(score_tile)(const attend_call *c, int kind, size_t i, size_t R, size_t K, size_t s,
                                  const char *const *keys, const float *scales, const char *ahead) {
    const STEP(f64v) zero = {0};
    const size_t d = c->d, n_keys = c->kv.n_keys, rows = c->T * c->R;
    const double *q = c->wide_q + i * STEP(DOUBLES), *q_end = c->wide_q + d / STEP(DOUBLES) * STEP(DOUBLES) * rows;
    float *scores = c->scores + i * n_keys + s;
    STEP(f64v) sums[16];
    double totals[16];
    size_t j = 0;
    STEP_UNROLL
    for (size_t n = 0; n < 16; n++) sums[n] = zero;
    for (; j + STEP(DOUBLES) <= d; j += STEP(DOUBLES), q += rows * STEP(DOUBLES)) {
        STEP(f64v) key[4];
        if (kind != KV_WIDE && K * kv_bytes(kind, j) % 64 == 0)
            kv_prefetch(ahead + K * kv_bytes(kind, j), K * kv_bytes(kind, STEP(DOUBLES)));
        STEP_UNROLL
        for (size_t k = 0; k < K; k++) key[k] = STEP(stored)(kind, keys[k], j, scales[k]);
        STEP_UNROLL
        for (size_t r = 0; r < R; r++) {
            STEP(f64v) x = STEP(load64)(q + r * STEP(DOUBLES));
#if STEP_BYTES == 32
            __asm__("" : "+x"(x)); /* or GCC 12 loads it with each product */
#endif
            STEP_UNROLL
            for (size_t k = 0; k < K; k++) sums[r * K + k] = STEP_MULADD(x, key[k], sums[r * K + k]);
        }
    }
    STEP_UNROLL
    for (size_t n = 0; n < R * K; n += K > 1 ? 8 : 1)
        if (K > 1) STEP(sum_lanes_of_8)(sums + n, totals + n);
        else totals[n] = STEP(sum_lanes)(sums[n]);
    for (; j < d; j++)
        for (size_t n = 0; n < R * K; n++)
            totals[n] += q_end[(i + n / K) * (d % STEP(DOUBLES)) + j % STEP(DOUBLES)] *
                         STEP(stored_number)(kind, keys[n % K], j, scales[n % K]);
    STEP_UNROLL
    for (size_t n = 0; n < R * K; n += K > 1 ? STEP(DOUBLES) : 1) {
        if (K == 1) {
            scores[n * n_keys] = (float)(totals[n] * c->scale);
            continue;
        }
        const STEP(f32h) rounded = STEP(narrow)(STEP(load64)(totals + n) * c->scale); /* of one row, or two */
        for (size_t at = 0; at < STEP(DOUBLES) && n + at < R * K; at += K)
            memcpy(scores + (n + at) / K * n_keys, (const char *)&rounded + at * sizeof(float), K * sizeof(float));
    }
}

/* scores (n) float32 -> p (n) = softmax, rounded to float32, as doubles. Prefetches `count` rows meanwhile. */
STEP_TARGET static void STEP(softmax)(const float *scores, size_t n, double *p, const char *const *ahead, size_t count,
                                      size_t bytes) {
    enum { GROUP = 4 * STEP(DOUBLES) };
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
    size_t done = 0;
    for (i = 0; i < n; i += GROUP) { /* the steps of one exponential are a chain */
        STEP(f64v) powers[4];
        float last[GROUP];
        const size_t some = n - i < GROUP ? n - i : GROUP;
        const float *from = some < GROUP ? last : scores + i;
        for (; done < count && done * n <= i * count; done++) kv_prefetch(ahead[done], bytes);
        for (size_t k = some; k < GROUP; k++) last[k] = -INFINITY; /* e^-700 is nothing beside e^0 */
        if (some < GROUP) memcpy(last, scores + i, some * sizeof *last);
        STEP_UNROLL
        for (size_t k = 0; k < 4; k++) {
            memcpy(&v, from + k * STEP(DOUBLES), sizeof v);
            powers[k] = STEP(widen)(v - largest);
        }
        STEP(exp_vectors)(powers, 4);
        STEP_UNROLL
        for (size_t k = 0; k < 4; k++) sum += powers[k];
        if (some < GROUP) memcpy(p + i, powers, some * sizeof *p);
        else memcpy(p + i, powers, sizeof powers);
    }
    const double total = STEP(sum_lanes)(sum);
    const double inverse = 1.0 / total;
    for (i = 0; i + STEP(DOUBLES) <= n; i += STEP(DOUBLES)) {
        memcpy(&power, p + i, sizeof power);
        power = STEP(widen)(STEP(narrow)(power * inverse));
        memcpy(p + i, &power, sizeof power);
    }
    for (; i < n; i++) p[i] = (float)(p[i] * inverse);
}

/* sums (R, d), C vectors from column j on, += pattern of query rows i .. * values of some keys, a sum that starts from
 * zero; or, with `part` (R, d), that starts from `part` and ends there. */
STEP_INLINE void STEP(value_tile)(const attend_call *c, int kind, size_t i, size_t R, size_t C, kv_range keys,
                                  const kv_rows *rows, size_t first, size_t j, double *sums, double *part,
                                  int fetch) {
    const STEP(f64v) zero = {0};
    const size_t d = c->d, n_keys = c->kv.n_keys, count = keys.to - keys.from;
    const double *pattern = c->pattern + i * n_keys + keys.from;
    STEP(f64v) sum[16];
    STEP_UNROLL
    for (size_t n = 0; n < R * C; n++) sum[n] = zero;
    if (part) {
        STEP_UNROLL
        for (size_t n = 0; n < R * C; n++) sum[n] = STEP(load64)(part + n / C * d + j + n % C * STEP(DOUBLES));
    }
    for (size_t k = 0, stop; k < count; k = stop) {
        stop = k + 16 < count ? k + 16 : count;
        const size_t progress = rows->count + (count * j + k * C * STEP(DOUBLES)) / d;
        const char *ahead = fetch ? kv_row(rows, progress) : rows->at[first + k];
        for (; k < stop; k++, ahead += kv_bytes(kind, C * STEP(DOUBLES))) {
            if (kind != KV_WIDE && kv_bytes(kind, k * C * STEP(DOUBLES)) % 64 == 0)
                kv_prefetch(ahead, kv_bytes(kind, C * STEP(DOUBLES)));
            const char *from = rows->at[first + k] + (kind == KV_WIDE ? 0 : kv_bytes(kind, j));
            STEP(f64v) value[4];
            STEP_UNROLL
            for (size_t n = 0; n < C; n++)
                value[n] = STEP(stored)(kind, from, n * STEP(DOUBLES), rows->scale[first + k]);
            STEP_UNROLL
            for (size_t r = 0; r < R; r++) {
                const STEP(f64v) p = pattern[r * n_keys + k] - zero;
                STEP_UNROLL
                for (size_t n = 0; n < C; n++) sum[r * C + n] = STEP_MULADD(p, value[n], sum[r * C + n]);
            }
        }
    }
    STEP_UNROLL
    for (size_t n = 0; n < R * C; n++) {
        double *to = (part ? part : sums) + n / C * d + j + n % C * STEP(DOUBLES);
        if (!part) sum[n] += STEP(load64)(to);
        memcpy(to, &sum[n], sizeof sum[n]);
    }
}

STEP_INLINE void STEP(score_rows)(const attend_call *c, int kind, size_t i, size_t R, kv_range keys,
                                  const kv_rows *rows, size_t k, int fetch) {
    enum { K = STEP(SCORE_KEYS) };
    const size_t distance = fetch ? PREFETCH_BYTES / kv_bytes(kind, c->d) : 0;
    size_t s = keys.from;
    for (; s + K <= keys.to; s += K, k += K)
        STEP(score_tile)(c, kind, i, R, K, s, rows->at + k, rows->scale + k, kv_row(rows, k + distance));
    for (; s < keys.to; s++, k++)
        STEP(score_tile)(c, kind, i, R, 1, s, rows->at + k, rows->scale + k, kv_row(rows, k + distance));
}

STEP_INLINE void STEP(value_rows)(const attend_call *c, int kind, size_t i, size_t R, kv_range keys,
                                  const kv_rows *rows, size_t first, double *sums, double *part, int fetch) {
    enum { C = STEP(VALUE_VECTORS) };
    const size_t d = c->d;
    size_t j = 0;
    for (; j + C * STEP(DOUBLES) <= d; j += C * STEP(DOUBLES))
        STEP(value_tile)(c, kind, i, R, C, keys, rows, first, j, sums, part, fetch);
    for (; j + STEP(DOUBLES) <= d; j += STEP(DOUBLES))
        STEP(value_tile)(c, kind, i, R, 1, keys, rows, first, j, sums, part, fetch);
    for (; j < d; j++)
        for (size_t r = 0; r < R; r++) {
            double sum = part ? part[r * d + j] : 0;
            for (size_t s = keys.from, k = first; s < keys.to; s++, k++)
                sum += c->pattern[(i + r) * c->kv.n_keys + s] *
                       STEP(stored_number)(kind, rows->at[k], j, rows->scale[k]);
            if (part) part[r * d + j] = sum;
            else sums[r * d + j] += sum;
        }
}

/* Copies of the two loops for each dtype and number of rows. Functions of their own, so that registers suffice. */
#define COPY(kind, R)                                                                                                  \
    STEP_TARGET static __attribute__((noinline)) void STEP(score_##kind##_##R)(                                        \
        const attend_call *c, size_t i, kv_range keys, const kv_rows *rows, size_t k, int fetch) {                     \
        STEP(score_rows)(c, kind, i, R, keys, rows, k, fetch);                                                         \
    }                                                                                                                  \
    STEP_TARGET static __attribute__((noinline)) void STEP(value_##kind##_##R)(                                        \
        const attend_call *c, size_t i, kv_range keys, const kv_rows *rows, size_t k, double *sums, double *part,      \
        int fetch) {                                                                                                   \
        STEP(value_rows)(c, kind, i, R, keys, rows, k, sums, part, fetch);                                             \
    }
#define COPIES(kind) COPY(kind, 1) COPY(kind, 2) COPY(kind, 3) COPY(kind, 4)
COPIES(KV_FLOAT32) COPIES(KV_FLOAT16) COPIES(KV_INT8)
#undef COPIES
#undef COPY
STEP_TARGET static __attribute__((noinline)) void STEP(score_wide)(const attend_call *c, size_t i, kv_range keys,
                                                                   const kv_rows *rows, size_t k) {
    STEP(score_rows)(c, KV_WIDE, i, 4, keys, rows, k, 0);
}
STEP_TARGET static __attribute__((noinline)) void STEP(value_wide)(const attend_call *c, size_t i, kv_range keys,
                                                                   const kv_rows *rows, size_t k, size_t j, double *sums) {
    STEP(value_tile)(c, KV_WIDE, i, 4, STEP(VALUE_VECTORS), keys, rows, k, j, sums, NULL, 0);
}

/* Scores (`sums` NULL) or weighted values of 1 to 4 query rows from i on and some keys, the first of which is
 * rows->at[k]. */
STEP_TARGET static void STEP(some_rows)(const attend_call *c, size_t i, size_t R, kv_range keys, const kv_rows *rows,
                                        size_t k, double *sums, double *part, int fetch) {
#define CASE(kind, R)                                                                                                  \
    case 8 * kind + R:                                                                                                 \
        if (sums) STEP(value_##kind##_##R)(c, i, keys, rows, k, sums, part, fetch);                                    \
        else STEP(score_##kind##_##R)(c, i, keys, rows, k, fetch);                                                     \
        break;
#define CASES(kind) CASE(kind, 1) CASE(kind, 2) CASE(kind, 3) CASE(kind, 4)
    if (keys.from >= keys.to) return;
    switch (8 * c->kv.kind + R) { CASES(KV_FLOAT32) CASES(KV_FLOAT16) CASES(KV_INT8) }
#undef CASES
#undef CASE
}

/* The same of all query rows and a block, of which each row sees its own keys: the rows four at a time (three, where these
 * are all), and keys that not all of them see row by row. */
STEP_TARGET static void STEP(all_rows)(const attend_call *c, kv_range block, const kv_rows *rows, double *sums,
                                       double *part) {
    const size_t end = c->T * c->R, d = c->d, tile = c->T == 1 && c->R == 3 ? 3 : 4;
    for (size_t i = 0, R; i < end; i += R) {
        R = end - i < tile ? end - i : tile;
        kv_range all = block, any = {block.to, block.from};
        for (size_t r = i; r < i + R; r++) {
            const kv_range seen = kv_within(c->seen[r], block);
            all = kv_within(seen, all);
            any = (kv_range){seen.from < any.from ? seen.from : any.from, seen.to > any.to ? seen.to : any.to};
        }
        double *of_rows = sums ? sums + i * d : NULL;
        if (!sums || (all.from == any.from && all.to == any.to)) {
            STEP(some_rows)(c, i, R, any, rows, any.from - block.from, of_rows, NULL, i == 0);
            continue;
        }
        if (all.from >= all.to) all = (kv_range){block.to, block.to};
        memset(part, 0, R * d * sizeof(double));
        for (int side = 0; side < 2; side++) {
            for (size_t r = 0; r < R; r++) {
                const kv_range beside = side ? (kv_range){all.to, block.to} : (kv_range){block.from, all.from};
                const kv_range keys = kv_within(c->seen[i + r], beside);
                STEP(some_rows)(c, i + r, 1, keys, rows, keys.from - block.from, of_rows, part + r * d, 0);
            }
            if (!side) STEP(some_rows)(c, i, R, all, rows, all.from - block.from, of_rows, part, 0);
        }
        for (size_t n = 0; n < R * d; n++) of_rows[n] += part[n];
    }
}

/* Columns j .. j + n - 1 (n a multiple of VALUE_VECTORS vectors) of `count` rows from `first` on, as doubles. Prefetches the
 * same of the next block. */
STEP_INLINE void STEP(widen_kind)(const int kind, const kv_rows *rows, size_t first, size_t count, size_t j, size_t n,
                                  double *wide, kv_rows *widened) {
    for (size_t k = 0; k < count; k++, wide += n) {
        const char *row = rows->at[first + k] + kv_bytes(kind, j);
        kv_prefetch(kv_row(rows, rows->count + first + k) + kv_bytes(kind, j), kv_bytes(kind, n));
        widened->at[k] = (const char *)wide, widened->scale[k] = 1;
        for (size_t i = 0; i < n; i += STEP(VALUE_VECTORS) * STEP(DOUBLES)) {
            STEP_UNROLL
            for (size_t v = 0; v < STEP(VALUE_VECTORS); v++)
                *(STEP(f64u) *)(wide + i + v * STEP(DOUBLES)) =
                    STEP(stored)(kind, row, i + v * STEP(DOUBLES), rows->scale[first + k]);
        }
    }
}

STEP_TARGET static __attribute__((noinline)) void STEP(widen_rows)(int kind, const kv_rows *rows, size_t first,
                                                                   size_t count, size_t j, size_t n, double *wide,
                                                                   kv_rows *widened) {
    widened->count = widened->total = count;
#define WIDEN(kind) case kind: STEP(widen_kind)(kind, rows, first, count, j, n, wide, widened); break;
    switch (kind) { WIDEN(KV_FLOAT32) WIDEN(KV_FLOAT16) WIDEN(KV_INT8) }
#undef WIDEN
}

/* As all_rows, where each four rows are of one token: some keys, or some columns of all keys, are widened once for all
 * rows and stay in L1. */
STEP_TARGET static void STEP(all_rows_wide)(const attend_call *c, kv_range block, const kv_rows *rows, double *sums) {
    enum { COLUMNS = STEP(VALUE_VECTORS) * STEP(DOUBLES) };
    __attribute__((aligned(64))) double wide[WIDE_NUMBERS];
    const size_t end = c->T * c->R, d = c->d, most = WIDE_NUMBERS / 2 / d / STEP(SCORE_KEYS) * STEP(SCORE_KEYS);
    kv_rows near;
    for (size_t s = block.from, n; !sums && s < block.to; s += n) {
        n = block.to - s < most ? block.to - s : most;
        STEP(widen_rows)(c->kv.kind, rows, s - block.from, n, 0, d, wide, &near);
        for (size_t i = 0; i < end; i += 4) {
            const kv_range keys = kv_within(c->seen[i], (kv_range){s, s + n});
            if (keys.from < keys.to) STEP(score_wide)(c, i, keys, &near, keys.from - s);
        }
    }
    for (size_t j = 0; sums && j < d; j += COLUMNS) {
        STEP(widen_rows)(c->kv.kind, rows, 0, block.to - block.from, j, COLUMNS, wide, &near);
        for (size_t i = 0; i < end; i += 4) {
            const kv_range keys = kv_within(c->seen[i], block);
            if (keys.from < keys.to) STEP(value_wide)(c, i, keys, &near, keys.from - block.from, j, sums + i * d);
        }
    }
}

/* attention_scores, softmax and attention_values of layers.py for one kv head, in the steps of kv_cache.h. from, to:
 * the blocks of keys, or of ATTEND_SOFTMAX the query rows.
 *
 * Scores, exponentials and sums are in double, because the next int8 must not depend on their order (layers.py). The
 * bound on Zen 4 is therefore 8 multiply-adds per cycle, of AVX-512 and of AVX2: for 4 query heads per kv head 29.5
 * GB/s of float32 keys and values per core at 3.7 GHz. Loads that widen cost nothing beside them. Sums of parts that are
 * as exact need more instructions: 10 products of int8 slices, or 6 of float32 ones.
 *
 * Measured, an EPYC (Zen 4, beside other programs), one thread, one kv head of 128 with 4 query heads, us per 2,048
 * keys:
 *   from memory, AVX-512: float32 112 to 129, float16 106 to 122, int8 128 to 137; before 193, 161 to 165, 149 to 168
 *   from memory, AVX2: float32 137, float16 151, int8 178; before 224, 189 and 166
 *   8 tokens, in the caches: AVX-512 741 (22.6 G multiply-adds/s), AVX2 841; before 765 and 907
 *   Before: blocks of 16 keys of one page, prefetched into L1 line by line beside the columns of the same number: 42 ns
 *   per key more from memory than in the caches (63). A loop over adjacent rows, 24.5 GB/s in the caches: prefetched
 *   into L1 14 to 20 GB/s from memory, into L2 16 to 64 KB ahead 21 to 24, the rows of four keys at once, not line by
 *   line, 16. Two threads 30 to 42, at once 27. Values 16 columns at a time 21 GB/s in the caches, 32 columns 24.
 *   Of the peak, 504 keys, 8 tokens: scores 0.80 to 0.84 (the rest are the sums over lanes of a tile), values 0.92;
 *   softmax takes 1.0 ns per score, a tenth of all.
 * An EPYC (Zen 5, 63 G multiply-adds/s, AVX2 31), 8 tokens, 2,048 keys in the caches, G multiply-adds/s: scores 44 to
 *   48 with a blend in place of half the shuffles and functions of their own, values 54; AVX2 scores 15 to 23, because
 *   operands loaded by memcpy went by the stack. Softmax 0.6 ns per score, AVX2 1.1. Without prefetching, from memory,
 *   half the speed; into L1 up to 1.1 of L2 in one run, the same in others; 4 KB ahead as 16, 32 less.
 *   Tried there: eight rows and two keys at a time: scores 0.8 to 0.95. int8 converted two vectors at a time: scores
 *   1.03, values 0.98.
 * A Xeon (Sapphire Rapids; 53.5 G double multiply-adds/s per core, AVX-512; memory read 18 GB/s by one thread, 35 by two):
 *   prompts of 512 and 2,048 tokens reached 0.38 and 0.41 of the peak. There widening eight floats takes as long as two
 *   products, so a prompt's keys and values are widened once for all rows (`all_rows_wide`): whole prompts of 512 tokens
 *   1.07 to 1.08 times as fast, of 2,048 1.13 to 1.14 (four layers of 2B-4T's shape, pairs in turn beside other programs);
 *   with AVX2 1.015.
 *   One token over 2,048 and 4,096 keys from memory, one thread and two: float32 10.8 and 18 GB/s, 0.59 and 0.51 of a
 *   plain loop; float16 9.9 and 16; int8 4.5 and 8: 10.8, 20 and 18 G multiply-adds/s by one thread, so the products
 *   do not bound float32.
 * A Xeon (Emerald Rapids, 45 G double multiply-adds/s per core), one token, one thread: widening eight floats takes two
 *   operations on the ports of the products, with a memory operand or without, so float32 keys allow 30 GB/s; 22 in L1
 *   and L2 alike. From memory 9.2 to 10.5 GB/s, 0.75 to 0.83 of a plain loop. Tried: prefetching into L1, 1 to 48 KB ahead,
 *   0.63 to 0.76 of the loop; 4, 32 or 48 KB ahead into L2, the same; into no cache, 0.32; none, 0.38; loads instead, 0.56;
 *   huge pages, two blocks of values during the softmax: the same. Time this on memory never read before: L3 is large.
 *   Tried, prompts: keys turned, so that lanes are keys, and 16 tokens at a time: attention 1.03 to 1.12 times as fast
 *   (AVX2 1.10 to 1.22), of 64 tokens 0.95, for 240 lines more.
 * A Xeon (Sapphire Rapids, AMX), a prompt of 512, 2B-4T's shape, 4 layers, two threads: attention takes 0.36 of the samples,
 *   products by tiles 0.29; scores 0.13, values 0.10, softmax 0.05, the rest, mostly widening, 0.07. 128 query rows at a time
 *   instead of 32: prompts of 512 0.99 to 1.09 times as fast, median 1.035 (seven pairs in turn), of 64 and 24 0.94 to
 *   1.03, median 0.99. Not taken: short prompts would give threads fewer parts.
 * An Emerald Rapids, one token of each of 32 sequences with 65 keys, SmolLM2-135M: 3.0% of the samples of a step waited for
 *   the first keys. Prefetched with the last values of the head before (`next`), 1.4%, and scores 3.1% in place of 4.4: a step
 *   of 16 or 32 sequences 0.98, pairs in turn; the kernels of storyteller's of 64 0.97.
 * An EPYC (Zen 5), pairs in turn, equal bits: three heads of a token as a tile, scores rounded and stored by vectors, and the
 *   exponential by a table: SmolLM2 (9 heads, 3 of keys), 32 sequences of 64 and 256 keys 0.82 and 0.77 of the time, a prompt of
 *   2,048 0.95; 2B-4T's prompts 0.93 to 0.96; TinyLlama's of 512 0.93. Of the time of a prompt of 2,048, 2B-4T: scores 39% (0.88 of the
 *   peak), values 36% (0.94), widening 15%, softmax 11%; SmolLM2 40% (0.73), 31% (0.93), none, 18%. Tried: three heads as a
 *   tile for a prompt, not four rows across tokens: 1.01 to 1.03.
 * Tried, SmolLM2 (3 heads of 64 for a kv head), a Sapphire Rapids without tiles, 512 tokens: keys and values widened for any number
 *   of heads: scores and values 0.85 of the time, but widening for 30 rows takes what that gives (AVX2 as well).
 * An EPYC (Zen 3, AVX2, 25 G double multiply-adds/s, beside eight other programs), 256 keys in the caches, best calls in turn,
 *   equal bits: a query loaded once for two keys (10 loads for 8 products bound them), and all scores of a tile together, seen
 *   or not: scores 15.1 G, now 17.2 (10 tokens of 3 heads of 64), 14.2, 16.5 (8 tokens of 4); even and odd powers of exp apart,
 *   the last scores with the others: softmax 2.2 ns per score, now 1.8. Attention 0.91 of the time; whole prompts,
 *   SmolLM2-135M in Q4_0 by blocks, 1.02 (median of 23 pairs) to 1.04 (faster quarters) at 512 tokens, 1.14 at 2,048 (two pairs).
 *   Tried: six rows as a tile, keys and values widened for any number of heads: scores 18, but values 17 for 18 to 19, perhaps
 *   because the weights of 36 rows exceed L1; the whole as before. Exponentials of 1, 2, 3, 6 or 8 vectors at a time: 1.0 to
 *   1.17 of the time of 4.
 * Reckoned, int8 slices with a shared exponent, an EPYC (Zen 5): vpdpbusd makes 543 G multiply-adds/s, double 68, so up to 7 products
 *   of slices would pay. Drawn scores and values of 64 and 128 columns, rms error over that of one rounding to float32: 4 slices,
 *   10 products 1.0; 3 slices, 9 products 5 to 21, 6 products 19 to 45 (float32 sums 6 to 11; the contract allows 2). So 1.26 of
 *   the time of double, before slicing. vpdpwssd, 271 G, holds sums of 12-bit digits: 6 products, 1.5. AMX tiles: attention_amx.h.
 * Not worth a rule: leaving out a block of keys whose weights are too small to show. SmolLM2-135M, 1,024 tokens of English:
 *   all weights of a block of 128 keys are below 2^-25 in 0.12% of 935,280 blocks and heads, below 2^-40 in none;
 *   storyteller, 256 tokens: none. And that proves nothing for a sum near 0.
 * Tried: a whole block of keys, 128 KB, widened once for all rows, Zen 4: no faster. Prefetching row by row, or computing addresses of rows,
 *   inside the loop over keys: values 0.74, because the compiler keeps addresses in vector registers. Four exponentials
 *   at a time: 1.0 ns for 1.05, AVX2 1.4 for 1.55. 64 query rows of a prompt at a time, not 32: no faster. */
STEP_TARGET static void STEP(attend)(const attend_call *c, int step, size_t from, size_t to) {
    const size_t rows = c->T * c->R, d = c->d, n_keys = c->kv.n_keys, first = c->kv.first;
    const kv_view *kv = &c->kv;
    if (step == ATTEND_BEGIN) {
        memset(c->sums, 0, c->slots * rows * d * sizeof(double));
        for (size_t i = 0; i < rows; i++) {
            const size_t t = i / c->R, end = n_keys - (c->T - 1 - t);
            const float *q = c->q + t * c->q_stride + i % c->R * d;
            c->seen[i] = (kv_range){c->window && first + end > c->window ? end - c->window : 0, end};
            const size_t wide = d - d % STEP(DOUBLES); /* vectors of all rows, then what is left of each */
            for (size_t j = 0; j < wide; j += STEP(DOUBLES)) {
                const STEP(f64v) v = STEP(wide)(q + j);
                memcpy(c->wide_q + j * rows + i * STEP(DOUBLES), &v, sizeof v);
            }
            for (size_t j = wide; j < d; j++) c->wide_q[wide * rows + i * (d - wide) + j - wide] = q[j];
        }
    }
    if (step == ATTEND_SOFTMAX) {
        kv_rows next = {0, 0}; /* the values that are read first */
        if (c->slots == 1) kv_add_rows(kv, &kv->values, attend_block(kv, 0), &next);
        for (size_t i = from; i < to; i++) {
            const size_t start = i * n_keys + c->seen[i].from, k = next.total * i / rows;
            STEP(softmax)(c->scores + start, c->seen[i].to - c->seen[i].from, c->pattern + start, next.at + k,
                          next.total * (i + 1) / rows - k, kv_bytes(kv->kind, d));
        }
    }
    if ((step == ATTEND_SCORES || step == ATTEND_VALUES) && from < to) {
        const int is_values = step == ATTEND_VALUES;
        const kv_pool *pool = is_values ? &kv->values : &kv->keys;
        kv_range block = attend_block(kv, from), next = {0, 0};
        kv_rows near = {0, 0};
        kv_add_rows(kv, pool, block, &near);
        /* the first values: all of a divided step, none of another, for which the softmax has prefetched them */
        const size_t first_keys = c->is_fetched ? 0 : PREFETCH_BYTES / kv_bytes(kv->kind, d);
        const size_t first_rows = !is_values ? first_keys : c->slots > 1 ? SUM_KEYS : 0;
        for (size_t k = 0; k < near.total && k < first_rows; k++) kv_prefetch(near.at[k], kv_bytes(kv->kind, d));
        for (size_t b = from; b < to; b++, block = next) {
            near.count = near.total;
            if (b + 1 < to) next = attend_block(kv, b + 1), kv_add_rows(kv, pool, next, &near);
            else if (is_values && c->next.n_keys > 0) kv_add_rows(&c->next, &c->next.keys, attend_block(&c->next, 0), &near);
            const size_t slot = c->slots > 1 ? b : 0;
            double *sums = is_values ? c->sums + slot * rows * d : NULL;
            if (c->T > 1 && c->R % 4 == 0 && d % (STEP(VALUE_VECTORS) * STEP(DOUBLES)) == 0 && d <= MAX_WIDE)
                STEP(all_rows_wide)(c, block, &near, sums);
            else
                STEP(all_rows)(c, block, &near, sums, c->parts + slot * 4 * d);
            near.total -= near.count;
            memmove(near.at, near.at + near.count, near.total * sizeof *near.at);
            memmove(near.scale, near.scale + near.count, near.total * sizeof *near.scale);
        }
    }
    if (step == ATTEND_END)
        for (size_t i = 0; i < rows; i++) {
            float *z = c->z + i / c->R * c->z_stride + i % c->R * d;
            for (size_t slot = 1; slot < c->slots; slot++)
                for (size_t j = 0; j < d; j++) c->sums[i * d + j] += c->sums[(slot * rows + i) * d + j];
            for (size_t j = 0; j < d; j++) z[j] = (float)c->sums[i * d + j];
        }
}
