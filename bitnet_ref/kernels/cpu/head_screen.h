/* The head, looked at through int8: for each row an interval that surely holds the logit that `dense_rows` computes.
 *
 * The head of a 2B-4T is 0.66 GB a token in bfloat16, more than all ternary layers together, and greedy or top-k
 * sampling wants a handful of its 128,256 logits. Here every row is kept once more in int8 (half the bytes), with what a
 * rigorous bound needs. A row whose upper end lies below the k-th largest lower end cannot be among the k largest; the
 * others, some tens, are then computed from bfloat16 as ever (backends/cpu/backend.py). Nothing is guessed.
 *
 * A row:    w = s q + r,     q int8, s float;  |r| is taken from the residual itself, in double
 * A token:  x = t X + e,     X int16, t double; |e| likewise
 *     w x = s t (q X) + r x + s q e,     so |w x - s t (q X)| <= |r| |x| + (|w| + |r|) |e|     (Cauchy-Schwarz)
 * The sum q X is exact: int32 over at most 2048 columns, then int64. What `dense_rows` computes in float32 differs from
 * w x by at most g |w| |x| for *any* order of its sum, g = n u / (1 - n u), n = K + 8 roundings, u = 2^-24, as long as
 * nothing overflows (any part of the sum is at most |w| |x|: above 2^126 the interval is all numbers) and but for K + 8
 * underflows of 2^-126. Norms are rounded up, ends outwards.
 *
 * A template like float_steps.h, which includes it: the sum q X is written for AVX2 and AVX-512 (widen int8 to int16,
 * vpmaddwd), and for the compiler elsewhere.
 *
 * Measured on 2 threads of a Cascade Lake Xeon, 128256 x 2560 bfloat16, best of ten, interleaved with nothing else:
 *   one token   all logits 32.0 ms; screen 15.4; with the rows it leaves 16.1 (greedy), 16.7 (top 50), 20.5 (top 1024)
 * Several tokens, one thread, 64128 x 2560, processor time (the tiles of screen_avx512.h, and before them): 1 token 14.8 ms,
 *   6 tokens 21, 16 tokens 46 (about 120); the rows that this leaves take 0.35 a token.
 * The half width is 0.43 standard deviations of Gaussian logits: some 60 rows are left for greedy, 850 for top 50.
 * Smaller heads: 32000 x 512 1.47 ms and 0.60, 4096 x 256 (in the cache) 0.13 and 0.09, of which half is Python.
 * A Sapphire Rapids, 2 threads, one token: 10.4 ms, to read the rows 9.0. Row by row, what lies 2 KB behind fetched, not four
 * rows at a time: the loop alone 9.6 for 10.0, in here no faster.
 * A screen of 4 bits would read half as much, but its residual is 17 times as large, and would leave all rows.
 */

enum { STEP(SCREEN_COLUMNS) = STEP_BYTES == 16 ? 512 : 2048 }; /* 512 * 127 * 32639 < 2^31, and so for 2048 in lanes */

/* w (K) of a kind -> q (wide) int8, zeros beyond K, and facts {s, |r| + g |w|, |w| + |r|}. A row that holds NaN or Inf
 * gets infinite facts. */
STEP_TARGET static void STEP(screen_pack)(int kind, const void *w, size_t K, size_t wide, int8_t *q, float *facts) {
    uint32_t largest_bits = 0; /* of |w|, as an integer: the same order, and NaN above all */
    for (size_t k = 0; k < K; k++) {
        const float v = STEP(weight)(w, k, kind);
        uint32_t bits;
        memcpy(&bits, &v, 4);
        bits &= 0x7FFFFFFFu;
        largest_bits = bits > largest_bits ? bits : largest_bits;
    }
    memset(q, 0, wide);
    if (largest_bits >= 0x7F800000u) {
        facts[0] = 0, facts[1] = facts[2] = INFINITY;
        return;
    }
    float largest;
    memcpy(&largest, &largest_bits, 4);
    const float s = largest / 127.0f, inverse = s > 1e-37f ? 1.0f / s : 0; /* smaller rows are all residual */
    double rest[8] = {0}, whole[8] = {0};
    for (size_t k = 0; k < K; k++) {
        const float v = STEP(weight)(w, k, kind), magic = 12582912.0f; /* as in `quantize` */
        float n = v * inverse + magic - magic;
        n = n < -127.0f ? -127.0f : n;
        n = n > 127.0f ? 127.0f : n;
        q[k] = (int8_t)(int32_t)n;
        const double r = (double)v - (double)s * (double)n;
        rest[k % 8] += r * r;
        whole[k % 8] += (double)v * v;
    }
    double r2 = 0, w2 = 0;
    for (int i = 0; i < 8; i++) r2 += rest[i], w2 += whole[i];
    const double up = 1 + 1e-6, r_norm = sqrt(r2) * up, w_norm = sqrt(w2) * up, n = (double)K + 8;
    const double g = n * 0x1p-24 / (1 - n * 0x1p-24);
    facts[0] = s;
    facts[1] = (float)((r_norm + g * w_norm) * up + 0x1p-126);
    facts[2] = (float)((w_norm + r_norm) * up + 0x1p-126);
}

/* x (K) -> X (wide) int16, zeros beyond K, and facts {t, |x|, |e|}. Returns 0 when x is not finite. */
STEP_TARGET static int STEP(screen_token)(const float *x, size_t K, size_t wide, int16_t *X, double *facts) {
    double largest = 0, rest = 0, whole = 0;
    for (size_t k = 0; k < K; k++) {
        if (!(fabsf(x[k]) <= 3.402823466e38f)) return 0;
        largest = fabs((double)x[k]) > largest ? fabs((double)x[k]) : largest;
    }
    const double t = largest / 32639;
    memset(X, 0, wide * sizeof *X);
    for (size_t k = 0; k < K; k++) {
        const int32_t n = largest > 0 ? (int32_t)rint(x[k] / t) : 0; /* at most 32639 and a half */
        X[k] = (int16_t)(n > 32639 ? 32639 : n < -32639 ? -32639 : n);
        const double e = (double)x[k] - t * X[k];
        rest += e * e;
        whole += (double)x[k] * x[k];
    }
    const double up = 1 + 1e-6;
    facts[0] = t;
    facts[1] = sqrt(whole) * up;
    facts[2] = (sqrt(rest) + facts[1] * 0x1p-50) * up; /* t X is rounded too */
    return 1;
}

/* sums[i] = q[i] . X for ROWS rows, `wide` bytes apart. `ahead`: the rows that come next are fetched meanwhile. */
#if STEP_BYTES == 64
typedef __m512i STEP(screen_sum);
#define SCREEN_LANES 32
#define SCREEN_X(at) _mm512_loadu_si512(at)
#define SCREEN_ADD(sum, at, x) \
    _mm512_add_epi32(sum, _mm512_madd_epi16(_mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i *)(at))), x))
STEP_INLINE int64_t STEP(screen_total)(__m512i sum) {
    return _mm512_reduce_add_epi64(_mm512_add_epi64(_mm512_cvtepi32_epi64(_mm512_castsi512_si256(sum)),
                                                    _mm512_cvtepi32_epi64(_mm512_extracti64x4_epi64(sum, 1))));
}
#elif STEP_BYTES == 32
typedef __m256i STEP(screen_sum);
#define SCREEN_LANES 16
#define SCREEN_X(at) _mm256_loadu_si256((const __m256i *)(at))
#define SCREEN_ADD(sum, at, x) \
    _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)(at))), x))
STEP_INLINE int64_t STEP(screen_total)(__m256i sum) {
    int32_t lanes[8];
    int64_t total = 0;
    memcpy(lanes, &sum, sizeof lanes);
    for (int i = 0; i < 8; i++) total += lanes[i];
    return total;
}
#endif

#ifdef SCREEN_LANES
STEP_INLINE void STEP(screen_sums)(const int8_t *q, size_t wide, const int16_t *X, const int rows, int fetch,
                                   int64_t *sums) {
    for (int r = 0; r < rows; r++) sums[r] = 0;
    for (size_t start = 0; start < wide; start += STEP(SCREEN_COLUMNS)) {
        const size_t end = wide - start < STEP(SCREEN_COLUMNS) ? wide : start + STEP(SCREEN_COLUMNS);
        STEP(screen_sum) sum0 = {0}, sum1 = {0}, sum2 = {0}, sum3 = {0};
        for (size_t k = start; k < end; k += 64) { /* a line of memory of each row */
            if (fetch)
                for (int r = 0; r < rows; r++) __builtin_prefetch(q + (size_t)(rows + r) * wide + k);
            for (size_t i = k; i < k + 64; i += SCREEN_LANES) {
                const STEP(screen_sum) x = SCREEN_X(X + i);
                sum0 = SCREEN_ADD(sum0, q + i, x);
                if (rows == 4) {
                    sum1 = SCREEN_ADD(sum1, q + wide + i, x);
                    sum2 = SCREEN_ADD(sum2, q + 2 * wide + i, x);
                    sum3 = SCREEN_ADD(sum3, q + 3 * wide + i, x);
                }
            }
        }
        sums[0] += STEP(screen_total)(sum0);
        if (rows == 4) {
            sums[1] += STEP(screen_total)(sum1), sums[2] += STEP(screen_total)(sum2);
            sums[3] += STEP(screen_total)(sum3);
        }
    }
}
#undef SCREEN_LANES
#undef SCREEN_X
#undef SCREEN_ADD
#else
STEP_INLINE void STEP(screen_sums)(const int8_t *q, size_t wide, const int16_t *X, const int rows, int fetch,
                                   int64_t *sums) {
    for (int r = 0; r < rows; r++) {
        sums[r] = 0;
        for (size_t start = 0; start < wide; start += STEP(SCREEN_COLUMNS)) {
            const size_t end = wide - start < STEP(SCREEN_COLUMNS) ? wide : start + STEP(SCREEN_COLUMNS);
            int32_t sum = 0;
            for (size_t k = start; k < end; k++) sum += (int32_t)q[r * wide + k] * X[k];
            sums[r] += sum;
        }
    }
    (void)fetch;
}
#endif

/* The interval of each of `rows` logits (q (rows, wide), facts (rows, 3)) for M tokens (X (M, wide), x_facts (M, 3)):
 * lower and upper [m * stride + row]. The rows are read from memory once for all tokens. */
STEP_TARGET static void STEP(screen_rows)(const int8_t *q, size_t rows, size_t K, size_t wide, const float *facts,
                                          const int16_t *X, size_t M, const double *x_facts, float *lower, float *upper,
                                          size_t stride) {
    const double underflow = ((double)K + 8) * 0x1p-125;
#if STEP_BYTES == 64
    const screen_constants constants = screen_constants_of(K);
#endif
    for (size_t n = 0; n < rows; n += 4) {
        const size_t count = rows - n < 4 ? rows - n : 4;
#if STEP_BYTES == 64
        if (count == 4 && M > 1) { /* in even parts of two to six tokens */
            const size_t parts = (M + SCREEN_TILE_TOKENS - 1) / SCREEN_TILE_TOKENS;
            for (size_t part = 0; part < parts; part++) {
                const size_t m = part * M / parts, tokens = (part + 1) * M / parts - m;
                screen_few_avx512(q + n * wide, wide, facts + 3 * n, X + m * wide, tokens, x_facts + 3 * m, &constants,
                                  lower + m * stride + n, upper + m * stride + n, stride);
            }
            continue;
        }
#endif
        for (size_t m = 0; m < M; m++) {
            int64_t sums[4];
            if (count == 4) STEP(screen_sums)(q + n * wide, wide, X + m * wide, 4, m == 0, sums);
            else
                for (size_t r = 0; r < count; r++)
                    STEP(screen_sums)(q + (n + r) * wide, wide, X + m * wide, 1, 0, sums + r);
            for (size_t r = 0; r < count; r++) {
                const float *f = facts + 3 * (n + r);
                const double *x = x_facts + 3 * m, estimate = (double)f[0] * x[0] * (double)sums[r];
                double slack = (f[1] * x[1] + f[2] * x[2]) * (1 + 1e-6) + fabs(estimate) * 0x1p-22 + underflow;
                if (!(f[2] * x[1] < 0x1p126)) slack = INFINITY;
                lower[m * stride + n + r] = (float)(estimate - slack);
                upper[m * stride + n + r] = (float)(estimate + slack);
            }
        }
    }
}
