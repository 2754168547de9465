/* The float steps of a token: norm, quantise, dequantise, gate, RoPE, attention, dense rows. A template: kernels.h
 * includes it once for each instruction set: STEP(name) names the copies, STEP_BYTES is the width of a register and
 * STEP_TARGET says what the compiler may use. The text is portable C with the vector types of GCC and clang.
 *
 * STEP_MULADD(a, b, c) is a * b + c in double, fused where the target can: it serves sums only, whose last bit is lost.
 *
 * Plain version: bitnet_ref/layers.py and quantization.py, which these follow operation by operation: products and
 * quotients in float32, each rounded once, never fused; sums and exponentials in double, rounded to float32 at the end.
 * So every copy gives NumPy's float32, bit for bit, but where a double sum lies within 1e-16 of a rounding boundary.
 * Dense rows (dense_rows.h) are summed in float32, in one fixed order on every machine.
 *
 * Norm, gate and sums of a prompt wait for L3 (20 to 25 GB/s a thread, Cascade Lake): rms_norm with the quotient by
 * Markstein's five operations in place of a division of 16 cycles, equal to the bit, took 68 for 88 us of 64 x 2560, but
 * 209 for 225 of 64 x 6912, and a prompt gained 0.3%. It was left out.
 */

/* Keys of 512 bytes each in most models: a block and the next one are half of L1 */
enum { STEP(BLOCK_KEYS) = 16, STEP(SCORE_KEYS) = STEP_BYTES == 64 ? 4 : 2 };
enum { STEP(DOUBLES) = STEP_BYTES / 8, STEP(FLOATS) = STEP_BYTES / 4 };
typedef double STEP(f64v) __attribute__((vector_size(STEP_BYTES)));
typedef int64_t STEP(i64v) __attribute__((vector_size(STEP_BYTES)));
typedef float STEP(f32h) __attribute__((vector_size(STEP_BYTES / 2))); /* as many floats as f64v has doubles */
typedef float STEP(f32v) __attribute__((vector_size(STEP_BYTES)));
typedef uint32_t STEP(u32v) __attribute__((vector_size(STEP_BYTES)));
typedef uint16_t STEP(u16h) __attribute__((vector_size(STEP_BYTES / 2)));
#define STEP_INLINE STEP_TARGET static inline __attribute__((always_inline))
#if defined(__clang__)
#define STEP_UNROLL _Pragma("clang loop unroll(full)")
#else
#define STEP_UNROLL _Pragma("GCC unroll 32")
#endif

/* Conversions, and the sum of a vector by halves. With intrinsics where GCC 12 makes of __builtin_convertvector several
 * conversions of half a vector, and of a loop over lanes a chain of additions. */
#if STEP_BYTES == 64
STEP_INLINE STEP(f64v) STEP(widen)(STEP(f32h) v) { return (STEP(f64v))_mm512_cvtps_pd((__m256)v); }
STEP_INLINE STEP(f32h) STEP(narrow)(STEP(f64v) v) { return (STEP(f32h))_mm512_cvtpd_ps((__m512d)v); }
STEP_INLINE double STEP(sum_lanes)(STEP(f64v) v) { return _mm512_reduce_add_pd((__m512d)v); }
#elif STEP_BYTES == 32
STEP_INLINE STEP(f64v) STEP(widen)(STEP(f32h) v) { return (STEP(f64v))_mm256_cvtps_pd((__m128)v); }
STEP_INLINE STEP(f32h) STEP(narrow)(STEP(f64v) v) { return (STEP(f32h))_mm256_cvtpd_ps((__m256d)v); }
STEP_INLINE double STEP(sum_lanes)(STEP(f64v) v) { return (v[0] + v[2]) + (v[1] + v[3]); }
#else
STEP_INLINE STEP(f64v) STEP(widen)(STEP(f32h) v) { return __builtin_convertvector(v, STEP(f64v)); }
STEP_INLINE STEP(f32h) STEP(narrow)(STEP(f64v) v) { return __builtin_convertvector(v, STEP(f32h)); }
STEP_INLINE double STEP(sum_lanes)(STEP(f64v) v) { return v[0] + v[1]; }
#endif

/* `sum_lanes` of eight vectors, the same additions: totals of a0, b0, a1, b1, a2, b2, a3, b3 */
STEP_INLINE void STEP(sum_lanes_of_8)(STEP(f64v) a0, STEP(f64v) a1, STEP(f64v) a2, STEP(f64v) a3, STEP(f64v) b0,
                                      STEP(f64v) b1, STEP(f64v) b2, STEP(f64v) b3, double *totals) {
#if STEP_BYTES == 64
#define TWO(a, b, upper, lower) _mm512_add_pd(_mm512_shuffle_f64x2(a, b, upper), _mm512_shuffle_f64x2(a, b, lower))
#define HALVES(a, b) TWO((__m512d)a, (__m512d)b, 0xEE, 0x44)
#define QUARTERS(a, b) TWO(a, b, 0xDD, 0x88)
    const __m512d a = QUARTERS(HALVES(a0, a1), HALVES(a2, a3)), b = QUARTERS(HALVES(b0, b1), HALVES(b2, b3));
    _mm512_storeu_pd(totals, _mm512_add_pd(_mm512_unpacklo_pd(a, b), _mm512_unpackhi_pd(a, b)));
#undef TWO
#undef HALVES
#undef QUARTERS
#else
    const STEP(f64v) all[8] = {a0, b0, a1, b1, a2, b2, a3, b3};
    STEP_UNROLL
    for (int i = 0; i < 8; i++) totals[i] = STEP(sum_lanes)(all[i]);
#endif
}

/* mask ? a : b, lane by lane */
STEP_INLINE STEP(f64v) STEP(choose)(STEP(i64v) mask, STEP(f64v) a, STEP(f64v) b) {
    return (STEP(f64v))(((STEP(i64v))a & mask) | ((STEP(i64v))b & ~mask));
}

/* the larger, lane by lane; b where one is NaN */
STEP_INLINE STEP(f64v) STEP(larger)(STEP(f64v) a, STEP(f64v) b) {
#if STEP_BYTES == 64
    return (STEP(f64v))_mm512_max_pd((__m512d)a, (__m512d)b);
#elif STEP_BYTES == 32
    return (STEP(f64v))_mm256_max_pd((__m256d)a, (__m256d)b);
#else
    return STEP(choose)((STEP(i64v))(a > b), a, b);
#endif
}

/* e^x for x <= 0, to within an ulp or so of double; below -700 it stays e^-700, which is 0 in float32. NaN stays NaN. */
STEP_INLINE STEP(f64v) STEP(exp_lanes)(STEP(f64v) x) {
    const STEP(f64v) zero = {0}, lowest = zero - 700.0;
    x = STEP(larger)(lowest, x);
    const double magic = 6755399441055744.0; /* 1.5 * 2^52: adding it leaves the nearest integer in the low bits */
    const STEP(f64v) shifted = x * 1.4426950408889634 + magic;
    const STEP(f64v) n = shifted - magic;
    const STEP(f64v) r = (x - n * 0.693147180369123816490) - n * 1.90821492927058770002e-10;
    STEP(f64v) p = STEP_MULADD(r, zero + (1.0 / 6227020800.0), zero + (1.0 / 479001600.0)); /* the series of e^r, |r| <= ln(2)/2, to r^13 / 13! */
    p = STEP_MULADD(p, r, zero + (1.0 / 39916800.0));
    p = STEP_MULADD(p, r, zero + (1.0 / 3628800.0));
    p = STEP_MULADD(p, r, zero + (1.0 / 362880.0));
    p = STEP_MULADD(p, r, zero + (1.0 / 40320.0));
    p = STEP_MULADD(p, r, zero + (1.0 / 5040.0));
    p = STEP_MULADD(p, r, zero + (1.0 / 720.0));
    p = STEP_MULADD(p, r, zero + (1.0 / 120.0));
    p = STEP_MULADD(p, r, zero + (1.0 / 24.0));
    p = STEP_MULADD(p, r, zero + (1.0 / 6.0));
    p = STEP_MULADD(p, r, zero + 0.5);
    p = STEP_MULADD(p, r, zero + 1.0);
    p = STEP_MULADD(p, r, zero + 1.0);
    const STEP(i64v) power = ((STEP(i64v))shifted + 1023) << 52; /* 2^n */
    return p * (STEP(f64v))power;
}

/* `count` floats, at most a vector of them; whole vectors without a loop */
STEP_INLINE void STEP(load)(const float *x, size_t count, STEP(f32h) *v) {
    if (count == STEP(DOUBLES)) memcpy(v, x, sizeof *v);
    else memcpy(v, x, count * sizeof(float));
}

STEP_INLINE STEP(f64v) STEP(wide)(const float *x) {
    STEP(f32h) v;
    memcpy(&v, x, sizeof v);
    return STEP(widen)(v);
}

/* x (D) -> y = x / sqrt(mean(x^2) + eps) * weight. Returns 0 when the mean square is not finite. */
STEP_TARGET static int STEP(rms_norm)(const float *x, const float *weight, size_t D, double eps, float *y) {
    STEP(f64v) sum = {0};
    size_t i = 0;
    for (; i + STEP(DOUBLES) <= D; i += STEP(DOUBLES)) {
        const STEP(f64v) v = STEP(wide)(x + i);
        sum += v * v;
    }
    double total = STEP(sum_lanes)(sum);
    for (; i < D; i++) total += (double)x[i] * x[i];
    const double mean = total / (double)D;
    if (!(mean <= 1.7e308)) return 0;
    const float scale = (float)sqrt(mean + eps);
    for (i = 0; i < D; i++) y[i] = x[i] / scale * weight[i];
    return 1;
}

/* x (K) -> x_q (K) int8, *x_quant_scale, *x_sum. Returns 0 when x is not finite.
 *
 * No x[i] * scale is as far from zero as 127.5: 127 / largest and the product are each off by 2^-24 of themselves at
 * most. So nothing is clipped, and adding 1.5 * 2^23, which rounds to the nearest integer, half to even, leaves that
 * integer in the last bits of the float: as it is, modulo 2^8 and, in the sum, modulo 2^32.
 * Measured, 64 rows of 2560 in L2, AVX-512: 35 us; with the clipping and conversions that the formula names, 63. */
STEP_TARGET static int STEP(quantize)(const float *x, size_t K, int8_t *x_q, float *x_quant_scale, int32_t *x_sum) {
    uint32_t largest_bits = 0; /* of |x|, as an integer: the same order, and NaN above all */
    for (size_t i = 0; i < K; i++) {
        uint32_t bits;
        memcpy(&bits, x + i, 4);
        bits &= 0x7FFFFFFFu;
        largest_bits = bits > largest_bits ? bits : largest_bits;
    }
    if (largest_bits >= 0x7F800000u) return 0;
    float largest;
    memcpy(&largest, &largest_bits, 4);
    const float scale = 127.0f / (largest > 1e-5f ? largest : 1e-5f);
    const float magic = 12582912.0f; /* 1.5 * 2^23, whose bits are 0x4B400000 */
    uint32_t sum = 0;
    for (size_t i = 0; i < K; i++) {
        const float v = x[i] * scale + magic;
        uint32_t bits;
        memcpy(&bits, &v, 4);
        x_q[i] = (int8_t)bits;
        sum += bits;
    }
    *x_quant_scale = scale;
    *x_sum = (int32_t)(sum - (uint32_t)K * 0x4B400000u);
    return 1;
}

/* y = acc * (w_scale / x_scale) (+ bias) */
STEP_TARGET static void STEP(dequantize)(const int32_t *acc, size_t n, float w_scale, float x_scale, const float *bias,
                                         float *y) {
    const float scale = w_scale / x_scale;
    if (bias)
        for (size_t i = 0; i < n; i++) y[i] = (float)acc[i] * scale + bias[i];
    else
        for (size_t i = 0; i < n; i++) y[i] = (float)acc[i] * scale;
}

/* g / (1 + e^-g), in double, rounded to float32 */
STEP_INLINE STEP(f32h) STEP(silu)(STEP(f32h) gate) {
    const STEP(f64v) g = STEP(widen)(gate), zero = {0}, one = zero + 1.0;
    const STEP(i64v) negative = (STEP(i64v))(g < zero);
    const STEP(f64v) e = STEP(exp_lanes)(STEP(choose)(negative, g, -g));
    return STEP(narrow)(g * STEP(choose)(negative, e, one) / (one + e));
}

/* act(gate) * up */
STEP_TARGET static void STEP(gated)(const float *gate, const float *up, size_t n, int is_silu, float *y) {
    if (!is_silu) {
        for (size_t i = 0; i < n; i++) {
            const float g = gate[i] < 0 ? 0 : gate[i]; /* so that NaN stays NaN */
            y[i] = g * g * up[i];
        }
        return;
    }
    for (size_t i = 0; i < n; i += STEP(DOUBLES)) {
        const size_t count = n - i < STEP(DOUBLES) ? n - i : STEP(DOUBLES);
        STEP(f32h) g = {0}, u = {0};
        STEP(load)(gate + i, count, &g);
        STEP(load)(up + i, count, &u);
        const STEP(f32h) product = STEP(silu)(g) * u;
        memcpy(y + i, &product, count * sizeof(float));
    }
}

/* Turn the pairs (x[j], x[j + half]) of each head by the token's angles; x (heads, 2 * half), cos and sin (half) */
STEP_TARGET static void STEP(rope)(const float *x, size_t heads, size_t half, const float *cos, const float *sin,
                                   float *y) {
    for (size_t h = 0; h < heads; h++, x += 2 * half, y += 2 * half)
        for (size_t j = 0; j < half; j++) {
            const float first = x[j], second = x[half + j];
            y[j] = first * cos[j] - second * sin[j];
            y[half + j] = second * cos[j] + first * sin[j];
        }
}

/* -- attention of one token and one kv head: R query heads against the keys and values of a kv_view (kv_view.h) -------- */

STEP_INLINE STEP(f64v) STEP(load64)(const double *x) {
    STEP(f64v) v;
    memcpy(&v, x, sizeof v);
    return v;
}

/* scores[r * n_keys] = q[r] . key * scale for HEADS heads of q (in double, d apart). A key is widened once for all. */
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

/* scores[r * n_keys + k] of four heads and SCORE_KEYS keys in double, one behind the other: as many sums as there are
 * registers for */
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
    double totals[4 * KEYS]; /* of each head, its keys in order */
#if STEP_BYTES == 64
    STEP(sum_lanes_of_8)(sum00, sum02, sum10, sum12, sum01, sum03, sum11, sum13, totals);
    STEP(sum_lanes_of_8)(sum20, sum22, sum30, sum32, sum21, sum23, sum31, sum33, totals + 8);
#else
    STEP(sum_lanes_of_8)(sum00, sum10, sum20, sum30, sum01, sum11, sum21, sum31, totals);
#endif
    for (size_t r = 0; r < 4 && j < d; r++)
        for (size_t k = 0; k < KEYS; k++)
            for (size_t i = j; i < d; i++) totals[r * KEYS + k] += q[r * d + i] * keys[k * d + i];
    float all[4 * KEYS];
    STEP_UNROLL
    for (size_t i = 0; i < 4 * KEYS; i += STEP(DOUBLES)) {
        const STEP(f32h) some = STEP(narrow)(STEP(load64)(totals + i) * scale);
        memcpy(all + i, &some, sizeof some);
    }
    STEP_UNROLL
    for (size_t r = 0; r < 4; r++) memcpy(scores + r * n_keys, all + r * KEYS, KEYS * sizeof(float));
}
#undef EACH_KEY
#undef KEY_ZERO
#undef KEY_ADD

/* sums[r * d + j ..] += sum over s of pattern[r * n_keys + s] * values[s * stride + j ..], two vectors of HEADS heads at a
 * time, for the `count` keys of a block; `next` is where the values of the next block begin. */
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
    STEP(f64v) most = zero + (double)scores[0];
    size_t i = 0;
    for (; i + STEP(DOUBLES) <= n; i += STEP(DOUBLES)) most = STEP(larger)(STEP(wide)(scores + i), most);
    float largest = scores[0];
    for (size_t lane = 0; lane < STEP(DOUBLES); lane++) largest = most[lane] > largest ? (float)most[lane] : largest;
    for (; i < n; i++) largest = scores[i] > largest ? scores[i] : largest;
    STEP(f64v) sum = zero, power;
    for (i = 0; i + STEP(DOUBLES) <= n; i += STEP(DOUBLES)) {
        memcpy(&v, scores + i, sizeof v);
        power = STEP(exp_lanes)(STEP(widen)(v - largest));
        memcpy(p + i, &power, sizeof power);
        sum += power;
    }
    double total = STEP(sum_lanes)(sum);
    if (i < n) { /* the last few together; those that there are not are e^0 */
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

/* doubles of workspace that `attend` needs, and `attend_many` for R rows of all tokens */
STEP_TARGET static size_t STEP(attend_workspace)(size_t R, size_t d, size_t n_keys) {
    return (STEP(BLOCK_KEYS) + 2 * R) * d + R * n_keys + (R * n_keys + STEP(BLOCK_KEYS) * d + 1) / 2;
}

/* `count` rows of a pool as floats, *stride apart: where they lie, or of a narrow kind, widened into `buffer` */
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
    const char *bytes = kv_row(kv, pool, row);
    for (size_t i = 0; i < kv_row_bytes(kv, d); i += 64) __builtin_prefetch(bytes + i);
}

/* scores[r * n_keys] of R heads and one key */
STEP_INLINE void STEP(scores)(const double *q, size_t R, size_t d, const float *key, size_t n_keys, double scale,
                              float *scores) {
    size_t r = 0;
    for (; r + 4 <= R; r += 4) STEP(scores_4)(q + r * d, d, key, n_keys, scale, scores + r * n_keys);
    for (; r + 2 <= R; r += 2) STEP(scores_2)(q + r * d, d, key, n_keys, scale, scores + r * n_keys);
    if (r < R) STEP(scores_1)(q + r * d, d, key, n_keys, scale, scores + r * n_keys);
}

/* sums (R, d) += those of `count` keys */
STEP_INLINE void STEP(values)(const double *pattern, size_t n_keys, size_t R, const float *values, size_t count,
                              const float *next, size_t d, size_t stride, double *sums) {
    size_t r = 0;
    for (; r + 4 <= R; r += 4) STEP(values_4)(pattern + r * n_keys, n_keys, values, count, next, d, stride, sums + r * d);
    for (; r + 2 <= R; r += 2) STEP(values_2)(pattern + r * n_keys, n_keys, values, count, next, d, stride, sums + r * d);
    if (r < R) STEP(values_1)(pattern + r * n_keys, n_keys, values, count, next, d, stride, sums + r * d);
}

/* q (R, d) -> z (R, d); see layers.py: attention_scores, softmax, attention_values. A head's result does not depend on
 * which others are computed with it, nor on how the keys lie in pages: every sum runs through the keys in one order.
 *
 * The keys are taken in blocks, of keys that lie one behind the other. The values of a block stay in L1 for all j, the
 * sums waiting in `sums` (R, d); going through all keys for each j instead touched a line of each row, far apart, again
 * and again.
 *
 * Measured, 20 heads of 128 on 5 kv heads, 1 thread of a Cascade Lake Xeon (keys and values from memory): 500 keys 0.51 ms,
 * 3000 keys 3.3. Without blocks of keys in `values`, 0.89 and 6.1; with them, the next block fetched all at once, 0.66 and
 * 4.5; the next block fetched line by line beside the sums, as here, 0.51 and 3.4. Later, 2000 keys: blocks of 32 keys 2.3
 * ms, of 16, which is also a usual page, 2.05; pages of 16 tokens in a random order 2.2.
 * Four keys of one head, or two, at a time, so that no sum waits for itself: 0.95 to 1.1 times as fast with AVX-512, 1.0 to
 * 1.3 with AVX2 (the most with one query head a kv head): most of the waiting is for L3; left out.
 * Later still, AVX-512, keys and values in the caches: 40 keys 38 us, 1000 keys 630; with `widen`, `sum_lanes` and the
 * pattern's broadcast each one instruction or three, 17 and 440. Softmax with the pattern by heads, not by keys, so that all
 * three passes are vectors: 512 keys 0.9 us a head, not 1.95; of all attention over 512 keys, a tenth.
 * A Sapphire Rapids, one thread, 20 heads on 5: 1000 keys 300 us in the caches, 547 from memory (10 GB/s of 18: a core waits
 * for 16 lines at a time, and rows lie too far apart for it to fetch ahead). The kv heads of a block of keys one after the
 * other, not each through all keys: 505, but 100 keys 57, not 51; left out. */
STEP_TARGET static void STEP(attend)(const float *q, size_t R, size_t d, const kv_view *kv, double scale,
                                     double *workspace, float *z) {
    const size_t n_keys = kv->n_keys;
    double *wide_q = workspace, *sums = wide_q + R * d, *pattern = sums + R * d;
    float *scores = (float *)(pattern + R * n_keys), *buffer = scores + R * n_keys;
    size_t stride, row = 0, next = 0, first_value = 0, ahead, count = kv_rows(kv, 0, STEP(BLOCK_KEYS), &row);
    const size_t first_values = kv_rows(kv, 0, STEP(BLOCK_KEYS), &first_value);
    for (size_t i = 0; i < R * d; i++) wide_q[i] = q[i];
    for (size_t start = 0; start < n_keys; start += count, row = next, count = ahead) {
        const float *key = STEP(as_floats)(kv, &kv->keys, row, count, d, buffer, &stride);
        ahead = kv_rows(kv, start + count, STEP(BLOCK_KEYS), &next);
        for (size_t s = start; s < start + count; s++, key += stride) {
            if (s - start < ahead) /* the keys of one head lie too far apart for the hardware to see what comes next */
                STEP(fetch)(kv, &kv->keys, next + s - start, d);
            if (n_keys - 1 - s < first_values) /* the first values, at the end */
                STEP(fetch)(kv, &kv->values, first_value + first_values + s - n_keys, d);
            STEP(scores)(wide_q, R, d, key, n_keys, scale, scores + s);
        }
    }
    for (size_t r = 0; r < R; r++) STEP(softmax)(scores + r * n_keys, n_keys, pattern + r * n_keys);
    memset(sums, 0, R * d * sizeof(double));
    row = first_value, count = first_values;
    for (size_t start = 0; start < n_keys; start += count, row = next, count = ahead) {
        const float *values = STEP(as_floats)(kv, &kv->values, row, count, d, buffer, &stride), *later = values;
        ahead = kv_rows(kv, start + count, STEP(BLOCK_KEYS), &next);
        if (ahead && kv->kind == KV_FLOAT32) later = (const float *)kv->values.rows + next * stride;
        else
            for (size_t n = 0; n < ahead; n++) STEP(fetch)(kv, &kv->values, next + n, d);
        STEP(values)(pattern + start, n_keys, R, values, count, later, d, stride, sums);
    }
    for (size_t i = 0; i < R * d; i++) z[i] = (float)sums[i];
}

/* -- attention of T tokens, one behind the other in a sequence, and one kv head ----------------------------------------
 *
 * The same as `attend` for each, to the bit, with a block of keys widened once for all: q and z (T, R, d), tokens
 * `q_stride` and `z_stride` floats apart. `kv` is what all see together: token t sees it to the end but for the T - 1 - t last, and
 * of that at most the last `window` (0: all). Rows (t, r) go four at a time; the few keys that not all of a four see,
 * row by row.
 *
 * Measured on one thread, AVX-512, 8 tokens of 4 heads of 128, keys in the caches, us: 64 keys 33, 512 keys 234; `attend` for
 * one after the other 39 and 289. Of the 234, scores take 82 (26 G multiply-adds/s of some 38), values 72 (29), softmax 28,
 * widening 9. Scores of two keys at a time, not four: 104. The next block's rows fetched meanwhile: no faster.
 * A prompt of 512 tokens, 5 kv heads: 49.4 ms; with four scores of a row stored at once, and one kv head's tokens behind each
 * other (its keys then lie in L2), 44.5. The loops of products are half of that, at 33 G multiply-adds/s; softmax 5.6 ms,
 * widening 4. 64 rows at a time, not 32: no faster. */
typedef struct {
    size_t from, to; /* keys */
} STEP(range);

STEP_INLINE STEP(range) STEP(within)(STEP(range) keys, size_t from, size_t to) {
    return (STEP(range)){keys.from > from ? keys.from : from, keys.to < to ? keys.to : to};
}

/* the keys from .. to that all of R rows see; from .. from when there are none */
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
#define SCORE(KEYS, R, r)                                                                                              \
    for (size_t s = (KEYS).from; s < (KEYS).to; s++)                                                                   \
        STEP(scores)(wide_q + (i + (r)) * d, R, d, keys + (s - start) * stride, n_keys, scale,                         \
                     scores + (i + (r)) * n_keys + s);
            SCORE(rest, four, 0)
            for (size_t r = 0; r < four; r++) {
                const STEP(range) before = STEP(within)(seen[i + r], start, all.from),
                                  after = STEP(within)(seen[i + r], all.to, start + count);
                SCORE(before, 1, r)
                SCORE(after, 1, r)
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
    if ((KEYS).from < (KEYS).to)                                                                                       \
        STEP(values)(p + (r) * n_keys + (KEYS).from, n_keys, R, values + ((KEYS).from - start) * stride,               \
                     (KEYS).to - (KEYS).from, NULL, d, stride, to + (r) * d);
            for (size_t r = 0; r < four; r++) {
                const STEP(range) before = STEP(within)(seen[i + r], start, all.from);
                ADD(before, 1, r)
            }
            if (four == 4)
                STEP(wide_values_4)(p + all.from, n_keys, block + (all.from - start) * d, all.to - all.from, NULL, d, d,
                                    to);
            else
                ADD(all, four, 0)
            for (size_t r = 0; r < four; r++) {
                const STEP(range) after = STEP(within)(seen[i + r], all.to, start + count);
                ADD(after, 1, r)
            }
#undef ADD
        }
    }
    for (size_t i = 0; i < rows; i++)
        for (size_t j = 0; j < d; j++) z[i / R * z_stride + i % R * d + j] = (float)sums[i * d + j];
}

#include "dense_rows.h"
#include "head_screen.h"

#undef STEP_INLINE
#undef STEP_UNROLL
#undef STEP
#undef STEP_BYTES
#undef STEP_MULADD
#undef STEP_TARGET
