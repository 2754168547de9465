/* The float steps of a token: norm, quantise, dequantise, gate, RoPE, attention, dense rows. A template: kernels.h
 * includes it once for each instruction set: STEP(name) names the copies, STEP_BYTES is the width of a register and
 * STEP_TARGET says what the compiler may use. The text is portable C with the vector types of GCC and clang.
 *
 * Plain version: bitnet_ref/layers.py and quantization.py, which these follow operation by operation: products and
 * quotients in float32, each rounded once, never fused; sums and exponentials in double, rounded to float32 at the end.
 * So every copy gives NumPy's float32, bit for bit, but where a double sum lies within 1e-16 of a rounding boundary.
 * Dense rows are summed in float32, in 32 lanes and then by halves: one fixed order on every machine.
 */

enum { STEP(DOUBLES) = STEP_BYTES / 8, STEP(FLOATS) = STEP_BYTES / 4, STEP(DENSE_VECTORS) = 32 / (STEP_BYTES / 4) };
typedef double STEP(f64v) __attribute__((vector_size(STEP_BYTES)));
typedef int64_t STEP(i64v) __attribute__((vector_size(STEP_BYTES)));
typedef float STEP(f32h) __attribute__((vector_size(STEP_BYTES / 2))); /* as many floats as f64v has doubles */
typedef float STEP(f32v) __attribute__((vector_size(STEP_BYTES)));
typedef uint32_t STEP(u32v) __attribute__((vector_size(STEP_BYTES)));
typedef uint16_t STEP(u16h) __attribute__((vector_size(STEP_BYTES / 2)));
#define STEP_INLINE STEP_TARGET static inline __attribute__((always_inline))

STEP_INLINE double STEP(sum_lanes)(STEP(f64v) v) {
    double sum = 0;
    for (int i = 0; i < STEP(DOUBLES); i++) sum += v[i];
    return sum;
}

/* mask ? a : b, lane by lane */
STEP_INLINE STEP(f64v) STEP(choose)(STEP(i64v) mask, STEP(f64v) a, STEP(f64v) b) {
    return (STEP(f64v))(((STEP(i64v))a & mask) | ((STEP(i64v))b & ~mask));
}

/* e^x for x <= 0, to within an ulp or so of double; below -700 it stays e^-700, which is 0 in float32. NaN stays NaN. */
STEP_INLINE STEP(f64v) STEP(exp_lanes)(STEP(f64v) x) {
    const STEP(f64v) zero = {0}, lowest = zero - 700.0;
    x = STEP(choose)((STEP(i64v))(x < lowest), lowest, x);
    const double magic = 6755399441055744.0; /* 1.5 * 2^52: adding it leaves the nearest integer in the low bits */
    const STEP(f64v) shifted = x * 1.4426950408889634 + magic;
    const STEP(f64v) n = shifted - magic;
    const STEP(f64v) r = (x - n * 0.693147180369123816490) - n * 1.90821492927058770002e-10;
    STEP(f64v) p = r * (1.0 / 6227020800.0) + (1.0 / 479001600.0); /* the series of e^r, |r| <= ln(2)/2, to r^13 / 13! */
    p = p * r + (1.0 / 39916800.0);
    p = p * r + (1.0 / 3628800.0);
    p = p * r + (1.0 / 362880.0);
    p = p * r + (1.0 / 40320.0);
    p = p * r + (1.0 / 5040.0);
    p = p * r + (1.0 / 720.0);
    p = p * r + (1.0 / 120.0);
    p = p * r + (1.0 / 24.0);
    p = p * r + (1.0 / 6.0);
    p = p * r + 0.5;
    p = p * r + 1.0;
    p = p * r + 1.0;
    const STEP(i64v) power = ((STEP(i64v))shifted + 1023) << 52; /* 2^n */
    return p * (STEP(f64v))power;
}

STEP_INLINE STEP(f64v) STEP(wide)(const float *x) {
    STEP(f32h) v;
    memcpy(&v, x, sizeof v);
    return __builtin_convertvector(v, STEP(f64v));
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

/* x (K) -> x_q (K) int8, *x_quant_scale, *x_sum. Returns 0 when x is not finite. */
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
    const float magic = 12582912.0f; /* 1.5 * 2^23: adding and subtracting it rounds to the nearest, half to even */
    int32_t sum = 0;
    for (size_t i = 0; i < K; i++) {
        float v = x[i] * scale + magic - magic;
        v = v < -128.0f ? -128.0f : v;
        v = v > 127.0f ? 127.0f : v;
        const int32_t q = (int32_t)v;
        x_q[i] = (int8_t)q;
        sum += q;
    }
    *x_quant_scale = scale;
    *x_sum = sum;
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

/* act(gate) * up */
STEP_TARGET static void STEP(gated)(const float *gate, const float *up, size_t n, int is_silu, float *y) {
    if (!is_silu) {
        for (size_t i = 0; i < n; i++) {
            const float g = gate[i] < 0 ? 0 : gate[i]; /* so that NaN stays NaN */
            y[i] = g * g * up[i];
        }
        return;
    }
    const STEP(f64v) zero = {0}, one = zero + 1.0;
    for (size_t i = 0; i < n; i += STEP(DOUBLES)) {
        float padded[STEP(DOUBLES)] = {0};
        const size_t count = n - i < STEP(DOUBLES) ? n - i : STEP(DOUBLES);
        memcpy(padded, gate + i, count * sizeof(float));
        const STEP(f64v) g = STEP(wide)(padded);
        const STEP(i64v) negative = (STEP(i64v))(g < zero);
        const STEP(f64v) e = STEP(exp_lanes)(STEP(choose)(negative, g, -g));
        const STEP(f64v) silu = g * STEP(choose)(negative, e, one) / (one + e);
        for (size_t j = 0; j < count; j++) y[i + j] = (float)silu[j] * up[i + j];
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

/* scores[r * n_keys + s] = q[r] . key[s] * scale;  q (R, d), keys d floats every `stride` */
STEP_TARGET static void STEP(scores)(const float *q, size_t R, size_t d, const float *keys, size_t n_keys,
                                     size_t stride, double scale, float *scores, size_t scores_stride) {
    for (size_t s = 0; s < n_keys; s++)
        for (size_t r = 0; r < R; r++) {
            const float *a = q + r * d, *b = keys + s * stride;
            STEP(f64v) sum0 = {0}, sum1 = {0};
            size_t j = 0;
            for (; j + 2 * STEP(DOUBLES) <= d; j += 2 * STEP(DOUBLES)) {
                sum0 += STEP(wide)(a + j) * STEP(wide)(b + j);
                sum1 += STEP(wide)(a + j + STEP(DOUBLES)) * STEP(wide)(b + j + STEP(DOUBLES));
            }
            double total = STEP(sum_lanes)(sum0 + sum1);
            for (; j < d; j++) total += (double)a[j] * b[j];
            scores[r * scores_stride + s] = (float)(total * scale);
        }
}

/* scores (n) -> softmax, in place */
STEP_TARGET static void STEP(softmax)(float *scores, size_t n) {
    float largest = scores[0];
    for (size_t i = 1; i < n; i++) largest = scores[i] > largest ? scores[i] : largest;
    double total = 0;
    for (int pass = 0; pass < 2; pass++) { /* the exponentials are computed twice: cheaper than keeping them in double */
        STEP(f64v) sum = {0};
        const double inverse = pass ? 1.0 / total : 0;
        for (size_t i = 0; i < n; i += STEP(DOUBLES)) {
            float below[STEP(DOUBLES)];
            const size_t count = n - i < STEP(DOUBLES) ? n - i : STEP(DOUBLES);
            for (size_t j = 0; j < STEP(DOUBLES); j++) below[j] = j < count ? scores[i + j] - largest : -1000.0f;
            const STEP(f64v) e = STEP(exp_lanes)(STEP(wide)(below));
            if (pass) {
                const STEP(f32h) p = __builtin_convertvector(e * inverse, STEP(f32h));
                memcpy(scores + i, &p, count * sizeof(float));
            } else
                sum += e;
        }
        if (!pass) total = STEP(sum_lanes)(sum);
    }
}

/* z[j] += sum over s of pattern[s] * value[s][j], in double; values d floats every `stride` */
STEP_TARGET static void STEP(values)(const float *pattern, const float *values, size_t n_keys, size_t d, size_t stride,
                                     double *z) {
    size_t j = 0;
    for (; j + 4 * STEP(DOUBLES) <= d; j += 4 * STEP(DOUBLES)) {
        STEP(f64v) sum[4];
        memcpy(sum, z + j, sizeof sum);
        for (size_t s = 0; s < n_keys; s++) {
            const double p = pattern[s];
            const float *v = values + s * stride + j;
            for (int i = 0; i < 4; i++) sum[i] += p * STEP(wide)(v + STEP(DOUBLES) * i);
        }
        memcpy(z + j, sum, sizeof sum);
    }
    for (; j < d; j++)
        for (size_t s = 0; s < n_keys; s++) z[j] += (double)pattern[s] * values[s * stride + j];
}

/* a vector of weights of a row, as float32: kind 0 float32, 1 bfloat16 */
STEP_INLINE STEP(f32v) STEP(weights)(const void *row, size_t k, const int kind) {
    if (kind == 0) {
        STEP(f32v) v;
        memcpy(&v, (const float *)row + k, sizeof v);
        return v;
    }
    STEP(u16h) half;
    memcpy(&half, (const uint16_t *)row + k, sizeof half);
    return (STEP(f32v))(__builtin_convertvector(half, STEP(u32v)) << 16);
}

STEP_INLINE float STEP(weight)(const void *row, size_t k, const int kind) {
    if (kind == 0) return ((const float *)row)[k];
    const uint32_t bits = (uint32_t)((const uint16_t *)row)[k] << 16;
    float v;
    memcpy(&v, &bits, 4);
    return v;
}

STEP_INLINE void STEP(dense_rows_of)(const int kind, const void *w, size_t rows, size_t K, const float *x, size_t M,
                                     float *y, size_t y_stride) {
    const size_t size = kind == 0 ? 4 : 2;
    for (size_t n = 0; n < rows; n++) {
        const char *row = (const char *)w + n * K * size;
        for (size_t m = 0; m < M; m++) {
            const float *xm = x + m * K;
            STEP(f32v) sum[STEP(DENSE_VECTORS)] = {{0}};
            size_t k = 0;
            for (; k + 32 <= K; k += 32) {
                if (m == 0) __builtin_prefetch(row + k * size + 4096);
                for (int i = 0; i < STEP(DENSE_VECTORS); i++) {
                    STEP(f32v) xs;
                    memcpy(&xs, xm + k + i * STEP(FLOATS), sizeof xs);
                    sum[i] += STEP(weights)(row, k + i * STEP(FLOATS), kind) * xs;
                }
            }
            float lane[32];
            memcpy(lane, sum, sizeof lane);
            for (int width = 16; width; width /= 2)
                for (int j = 0; j < width; j++) lane[j] += lane[j + width];
            for (; k < K; k++) lane[0] += STEP(weight)(row, k, kind) * xm[k];
            y[m * y_stride + n] = lane[0];
        }
    }
}

/* y[m * y_stride + n] = w[n] . x[m], for `rows` rows of w (rows, K) and x (M, K) */
STEP_TARGET static void STEP(dense_rows)(int kind, const void *w, size_t rows, size_t K, const float *x, size_t M,
                                         float *y, size_t y_stride) {
    if (kind == 0) STEP(dense_rows_of)(0, w, rows, K, x, M, y, y_stride);
    else STEP(dense_rows_of)(1, w, rows, K, x, M, y, y_stride);
}

#undef STEP_INLINE
#undef STEP
#undef STEP_BYTES
#undef STEP_TARGET
