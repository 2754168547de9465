/* The screened head: for each row an interval, computed in int8, that certainly holds the logit of `dense_rows`.
 *
 * The head of 2B-4T is 0.66 GB per token in bfloat16, more than all ternary layers together, and greedy or top-k
 * sampling needs a handful of its 128,256 logits. So each row is also stored in int8 (half the bytes), with what a
 * rigorous bound needs. A row whose upper bound is below the k-th largest lower bound cannot be among the k largest;
 * the other rows, some tens, are computed from bfloat16 (backends/cpu/backend.py). Nothing is guessed.
 *
 * A row:    w = s q + r,     q int8, s float;  |r| is computed from the residual itself, in double
 * A token:  x = t X + e,     X int16, t double; |e| likewise
 *     w x = s t (q X) + r x + s q e,     so |w x - s t (q X)| <= |r| |x| + (|w| + |r|) |e|     (Cauchy-Schwarz)
 * The sum q X is exact: int32 over at most 2048 columns, then int64. What `dense_rows` computes in float32 differs from
 * w x by at most g |w| |x| for *any* order of its sum, g = n u / (1 - n u), n = K + 8 roundings, u = 2^-24, plus K + 8
 * underflows of 2^-126, as long as nothing overflows (any part of the sum is at most |w| |x|: above 2^126 the interval
 * is all numbers). Norms are rounded up, bounds outwards.
 * dense_amx.h computes w x in other steps. A product goes through 16 + 1 + K / 32 + 2 roundings, fewer than n. There are
 * less than 4 (K + 8) underflows; denormal weights count as 0, which takes at most 2^-126 sqrt(K) |x| from the sum; so do
 * denormal parts of x, at most 2^-125 sqrt(K) |w|. Both are in the norms, with K for sqrt(K).
 *
 * A template, included by float_steps.h: the sum q X is written for AVX2 and AVX-512 (vpmaddwd), and in plain C.
 *
 * Measured, 2 threads of a Cascade Lake Xeon, 128256 x 2560 bfloat16, best of ten:
 *   one token: all logits 32.0 ms; screen 15.4; with the rows it leaves 16.1 (greedy), 16.7 (top 50), 20.5 (top 1024).
 *   One thread, 64128 x 2560, processor time, with the tiles of screen_avx512.h: 1 token 14.8 ms, 6 tokens 21, 16
 *   tokens 46 (without tiles about 120); the rows that this leaves take 0.35 per token.
 *   The half width is 0.43 standard deviations of Gaussian logits: some 60 rows are left for greedy, 850 for top 50.
 *   Smaller heads: 32000 x 512 1.47 ms and 0.60, 4096 x 256 (in the cache) 0.13 and 0.09, half of which is Python.
 *   A Sapphire Rapids, 2 threads, one token: 10.4 ms; reading the rows takes 9.0.
 *   Packing, one thread of an EPYC (Zen 4), per weight: 0.5 ns; 2.0 with the kind of the weights chosen in the loop.
 * Tried: row by row, prefetching 2 KB ahead, not four rows at a time: the loop alone 9.6 for 10.0 ms, here no faster.
 *   Fewer bits. The residual of 4 bits is 9 to 17 times as large, and the proven bound with it. Rows left, greedy / top 50:
 *     scale of                       a row        32 weights                               a row
 *     bits                           8            6           5           4                4
 *     SmolLM2-135M, 49152 x 576      0.0 / 0.5%   0.2 / 5%    13 / 67%    99 / 100%        100 / 100%
 *     storyteller, 4096 x 256        0.1 / 1.8%   0.1 / 4%    0.5 / 10%   5 / 49%          10 / 68%
 *     Gaussian, 20000 x 2560         0.2 / 2.6%   6 / 29%     80 / 96%    100 / 100%       100 / 100%
 *   So 4 bits in front of 8 would read all rows twice. 6 bits by groups would save a sixth of the screen's bytes, 6% of
 *   a decoded token's, in front of a second screen: not worth its text. */

enum { STEP(SCREEN_COLUMNS) = STEP_BYTES == 16 ? 512 : 2048 }; /* 512 * 127 * 32639 < 2^31; 2048 with lanes */

/* w (K) of a kind -> q (wide) int8, zeros beyond K, and facts {s, |r| + g |w|, |w| + |r|}, infinite if w holds NaN or
 * Inf. */
STEP_INLINE void STEP(screen_pack_kind)(const int kind, const void *w, size_t K, size_t wide, int8_t *q, float *facts) {
    uint32_t largest_bits = 0; /* max of |w| as integers: the same order, NaN above all */
    for (size_t k = 0; k < K; k++) {
        const uint32_t bits = float_bits(STEP(weight)(w, k, kind)) & 0x7FFFFFFFu;
        largest_bits = bits > largest_bits ? bits : largest_bits;
    }
    if (largest_bits >= 0x7F800000u) {
        memset(q, 0, wide);
        facts[0] = 0, facts[1] = facts[2] = INFINITY;
        return;
    }
    const float s = bits_float(largest_bits) / 127.0f, inverse = s > 1e-37f ? 1.0f / s : 0; /* smaller rows are all residual */
    double r_squares[8] = {0}, w_squares[8] = {0};
    for (size_t k = 0; k < wide; k += 64) {
        float v[64] = {0}, n[64];
        const size_t count = k < K ? (K - k < 64 ? K - k : 64) : 0;
        if (count == 64)
            for (int i = 0; i < 64; i++) v[i] = STEP(weight)(w, k + i, kind);
        else
            for (size_t i = 0; i < count; i++) v[i] = STEP(weight)(w, k + i, kind);
        for (int i = 0; i < 64; i++) {
            const float magic = 12582912.0f; /* as in `quantize` */
            n[i] = v[i] * inverse + magic - magic;
            n[i] = n[i] < -127.0f ? -127.0f : n[i];
            n[i] = n[i] > 127.0f ? 127.0f : n[i];
        }
        for (int i = 0; i < 64; i++) q[k + i] = (int8_t)(int32_t)n[i];
        for (int i = 0; i < 64; i += 8)
            for (int j = 0; j < 8; j++) {
                const double r = (double)v[i + j] - (double)s * (double)n[i + j];
                r_squares[j] += r * r;
                w_squares[j] += (double)v[i + j] * v[i + j];
            }
    }
    double r2 = 0, w2 = 0;
    for (int i = 0; i < 8; i++) r2 += r_squares[i], w2 += w_squares[i];
    const double up = 1 + 1e-6, r_norm = sqrt(r2) * up, w_norm = sqrt(w2) * up, n = (double)K + 8;
    const double g = n * 0x1p-24 / (1 - n * 0x1p-24);
    facts[0] = s;
    facts[1] = (float)((r_norm + g * w_norm) * up + n * 0x1p-126);
    facts[2] = (float)((w_norm + r_norm) * up + 0x1p-126);
}

STEP_TARGET static void STEP(screen_pack)(int kind, const void *w, size_t K, size_t wide, int8_t *q, float *facts) {
    if (kind == 0) STEP(screen_pack_kind)(0, w, K, wide, q, facts);
    else if (kind == 1) STEP(screen_pack_kind)(1, w, K, wide, q, facts);
    else STEP(screen_pack_kind)(2, w, K, wide, q, facts);
}

/* x (K) -> X (wide) int16, zeros beyond K, and facts {t, |x|, |e|}. Returns 0 when x is not finite. */
STEP_TARGET static int STEP(screen_token)(const float *x, size_t K, size_t wide, int16_t *X, double *facts) {
    double largest = 0, e2 = 0, x2 = 0;
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
        e2 += e * e;
        x2 += (double)x[k] * x[k];
    }
    const double up = 1 + 1e-6;
    facts[0] = t;
    facts[1] = sqrt(x2) * up;
    facts[2] = (sqrt(e2) + facts[1] * 0x1p-50) * up + (double)K * 0x1p-125; /* the product t X is rounded too */
    return 1;
}

/* sums[i] = q[i] . X for `rows` rows (1 or 4), `wide` bytes apart. `fetch`: prefetches the next rows. */
#if STEP_BYTES == 64
typedef __m512i STEP(screen_sum);
#define SCREEN_LANES 32
#define SCREEN_X(at) _mm512_loadu_si512(at)
#define SCREEN_ADD(sum, at, x) \
    _mm512_add_epi32(sum, _mm512_madd_epi16(_mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i *)(at))), x))
#elif STEP_BYTES == 32
typedef __m256i STEP(screen_sum);
#define SCREEN_LANES 16
#define SCREEN_X(at) _mm256_loadu_si256((const __m256i *)(at))
#define SCREEN_ADD(sum, at, x) \
    _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)(at))), x))
#endif

#ifdef SCREEN_LANES
STEP_INLINE int64_t STEP(screen_total)(STEP(screen_sum) sum) {
#if STEP_BYTES == 64
    return _mm512_reduce_add_epi64(_mm512_add_epi64(_mm512_cvtepi32_epi64(_mm512_castsi512_si256(sum)),
                                                    _mm512_cvtepi32_epi64(_mm512_extracti64x4_epi64(sum, 1))));
#else
    int32_t lanes[8];
    int64_t total = 0;
    memcpy(lanes, &sum, sizeof lanes);
    for (int i = 0; i < 8; i++) total += lanes[i];
    return total;
#endif
}

STEP_INLINE void STEP(screen_sums)(const int8_t *q, size_t wide, const int16_t *X, const int rows, int fetch,
                                   int64_t *sums) {
    const size_t far = bytes_ahead(4, wide);
    for (int r = 0; r < rows; r++) sums[r] = 0;
    for (size_t start = 0; start < wide; start += STEP(SCREEN_COLUMNS)) {
        const size_t end = wide - start < STEP(SCREEN_COLUMNS) ? wide : start + STEP(SCREEN_COLUMNS);
        STEP(screen_sum) sum[4] = {{0}};
        for (size_t k = start; k < end; k += 64) { /* a cache line of each row */
            if (fetch)
                for (int r = 0; r < rows; r++) prefetch_row(q + r * wide + k, q + r * wide + k + far);
            for (size_t i = k; i < k + 64; i += SCREEN_LANES) {
                const STEP(screen_sum) x = SCREEN_X(X + i);
                STEP_UNROLL
                for (int r = 0; r < rows; r++) sum[r] = SCREEN_ADD(sum[r], q + r * wide + i, x);
            }
        }
        STEP_UNROLL
        for (int r = 0; r < rows; r++) sums[r] += STEP(screen_total)(sum[r]);
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

/* The bounds of `rows` logits (q (rows, wide), facts (rows, 3)) for M tokens (X (M, wide), x_facts (M, 3)):
 * lower and upper [m * stride + row]. The rows are read from memory once for all tokens. */
STEP_TARGET static void STEP(screen_rows)(const int8_t *q, size_t rows, size_t K, size_t wide, const float *facts,
                                          const int16_t *X, size_t M, const double *x_facts, float *lower, float *upper,
                                          size_t stride) {
    const double underflow = ((double)K + 8) * 0x1p-123;
    size_t n = 0;
#if STEP_BYTES == 64
    if (M > 1) { /* in parts of two to six tokens, which stay in L1 for all rows */
        const screen_constants constants = make_screen_constants(K);
        const size_t parts = (M + SCREEN_TILE_TOKENS - 1) / SCREEN_TILE_TOKENS;
        for (size_t part = 0; part < parts; part++) {
            const size_t m = part * M / parts, tokens = (part + 1) * M / parts - m;
            for (n = 0; n + 4 <= rows; n += 4)
                screen_few_avx512(q + n * wide, wide, facts + 3 * n, X + m * wide, tokens, x_facts + 3 * m, &constants,
                                  lower + m * stride + n, upper + m * stride + n, stride);
        }
    }
#endif
    for (; n < rows; n += 4) {
        const size_t count = rows - n < 4 ? rows - n : 4;
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
