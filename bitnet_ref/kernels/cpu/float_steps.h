/* The float steps per token: norm, quantise, dequantise, gate, RoPE. Includes the others at its end: attention_steps.h,
 * dense_rows.h, draw_steps.h, head_screen.h, lora_steps.h. A template: kernels.h includes it once per instruction set.
 * STEP(name) names the copies, STEP_BYTES is the width of a register, STEP_TARGET the target of the compiler. The text is portable
 * C with the vector types of GCC and clang. STEP_MULADD(a, b, c) is a * b + c in double, fused where the target can; only
 * sums use it, whose last bit is lost.
 *
 * Plain version: reference/layers.py and reference/quantization.py, followed operation by operation: products and
 * quotients in float32, each rounded once, never fused; sums and exponentials in double, rounded to float32 at the end.
 * So every copy gives NumPy's float32 bit for bit, except where a double sum lies within 1e-16 of a rounding boundary.
 * Dense rows (dense_rows.h) are summed in float32 by fused multiply-adds, in one fixed order on every machine that has
 * them; where AMX's tiles compute them bfloat16 and blocks have others (dense_amx.h, blocks_amx.h).
 *
 * For a prompt, norm, gate and sums wait for L3 (20 to 25 GB/s per thread, Cascade Lake). Tried: rms_norm with
 * Markstein's five operations for the quotient, not a division of 16 cycles, equal to the bit: 68 for 88 us of 64 x
 * 2560, 209 for 225 of 64 x 6912, a prompt 0.3% faster; left out. */

/* a tile of four query heads has as many sums as fit the registers */
enum { STEP(SCORE_KEYS) = STEP_BYTES == 64 ? 4 : 2, STEP(VALUE_VECTORS) = STEP(SCORE_KEYS) };
enum { STEP(DOUBLES) = STEP_BYTES / 8, STEP(FLOATS) = STEP_BYTES / 4 };
typedef double STEP(f64v) __attribute__((vector_size(STEP_BYTES)));
typedef double STEP(f64u) __attribute__((vector_size(STEP_BYTES), aligned(8), may_alias));
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

/* Conversions, and the sum of a vector by halves. Intrinsics, because GCC 12 turns __builtin_convertvector into several
 * conversions of half a vector, and a loop over lanes into a chain of additions. */
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

/* a * b + c, rounded once; product and sum apart on a processor without it */
#if STEP_BYTES == 64
STEP_INLINE STEP(f32v) STEP(fused)(STEP(f32v) a, STEP(f32v) b, STEP(f32v) c) {
    return (STEP(f32v))_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
}
#elif STEP_BYTES == 32
STEP_INLINE STEP(f32v) STEP(fused)(STEP(f32v) a, STEP(f32v) b, STEP(f32v) c) {
    return (STEP(f32v))_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
}
#elif defined(__aarch64__)
STEP_INLINE STEP(f32v) STEP(fused)(STEP(f32v) a, STEP(f32v) b, STEP(f32v) c) {
    return (STEP(f32v))vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
}
#else
STEP_INLINE STEP(f32v) STEP(fused)(STEP(f32v) a, STEP(f32v) b, STEP(f32v) c) { return a * b + c; }
#endif

STEP_INLINE float STEP(fused_one)(float a, float b, float c) {
    return STEP(fused)((STEP(f32v)){a}, (STEP(f32v)){b}, (STEP(f32v)){c})[0];
}

/* `sum_lanes` of v[0] to v[7] by the same additions. A blend and one shuffle bring two vectors' summands together. */
STEP_INLINE void STEP(sum_lanes_of_8)(const STEP(f64v) *v, double *totals) {
#if STEP_BYTES == 64
    const __m512i swap = _mm512_setr_epi64(2, 3, 8, 9, 6, 7, 12, 13);
#define HALVES(a, b)                                                                                                   \
    _mm512_add_pd(_mm512_mask_blend_pd(0xF0, (__m512d)v[a], (__m512d)v[b]),                                            \
                  _mm512_shuffle_f64x2((__m512d)v[a], (__m512d)v[b], 0x4E))
#define QUARTERS(a, b) _mm512_add_pd(_mm512_mask_blend_pd(0xCC, a, b), _mm512_permutex2var_pd(a, swap, b))
    const __m512d a02 = HALVES(0, 4), a13 = HALVES(2, 6), b02 = HALVES(1, 5), b13 = HALVES(3, 7);
    const __m512d a = QUARTERS(a02, a13), b = QUARTERS(b02, b13);
    _mm512_storeu_pd(totals, _mm512_add_pd(_mm512_mask_blend_pd(0xAA, a, b), _mm512_shuffle_pd(a, b, 0x55)));
#undef HALVES
#undef QUARTERS
#elif STEP_BYTES == 32
#define HALVES(a, b)                                                                                                   \
    _mm256_add_pd(_mm256_blend_pd((__m256d)v[a], (__m256d)v[b], 0xC),                                                  \
                  _mm256_permute2f128_pd((__m256d)v[a], (__m256d)v[b], 0x21))
#define FOUR(n, a, b)                                                                                                  \
    _mm256_storeu_pd(totals + n, _mm256_add_pd(_mm256_blend_pd(a, b, 0xA), _mm256_shuffle_pd(a, b, 0x5)))
    const __m256d a0 = HALVES(0, 2), b0 = HALVES(1, 3), a4 = HALVES(4, 6), b4 = HALVES(5, 7);
    FOUR(0, a0, b0);
    FOUR(4, a4, b4);
#undef HALVES
#undef FOUR
#else
    STEP_UNROLL
    for (int i = 0; i < 8; i++) totals[i] = STEP(sum_lanes)(v[i]);
#endif
}

/* mask ? a : b, lane by lane */
STEP_INLINE STEP(f64v) STEP(choose)(STEP(i64v) mask, STEP(f64v) a, STEP(f64v) b) {
    return (STEP(f64v))(((STEP(i64v))a & mask) | ((STEP(i64v))b & ~mask));
}

/* max, lane by lane; b where one is NaN */
STEP_INLINE STEP(f64v) STEP(larger)(STEP(f64v) a, STEP(f64v) b) {
#if STEP_BYTES == 64
    return (STEP(f64v))_mm512_max_pd((__m512d)a, (__m512d)b);
#elif STEP_BYTES == 32
    return (STEP(f64v))_mm256_max_pd((__m256d)a, (__m256d)b);
#else
    return STEP(choose)((STEP(i64v))(a > b), a, b);
#endif
}

/* e^x of n vectors, x <= 0, to within an ulp of double; below -700 it stays e^-700, which is 0 in float32. The NaN of a
 * float, widened, stays NaN. With the table a softmax of 64 to 2,048 scores takes 0.75 to 0.88 of the time (Zen 5). */
STEP_INLINE void STEP(exp_vectors)(STEP(f64v) *x, size_t n) {
    const STEP(f64v) zero = {0}, lowest = zero - 700.0;
    const double magic = 6755399441055744.0; /* 1.5 * 2^52: adding it leaves the nearest integer in the low bits */
    STEP(f64v) shifted[4], r[4], p[4];
#define EACH STEP_UNROLL for (size_t i = 0; i < n; i++)
#define TERMS(even, uneven)                                                                                             \
    EACH p[i] = STEP_MULADD(p[i], square[i], zero + 1.0 / (even));                                                     \
    EACH odd[i] = STEP_MULADD(odd[i], square[i], zero + 1.0 / (uneven));
#define TERM(factorial) EACH p[i] = STEP_MULADD(p[i], r[i], zero + 1.0 / (factorial));
    EACH x[i] = STEP(larger)(lowest, x[i]);
#if STEP_BYTES == 64 /* e^x = 2^(n / 16) e^r, |r| <= ln(2)/32: from a table of 2^0 to 2^(15 / 16), and a series to r^7 / 7! */
    const __m512d low = _mm512_setr_pd(0x1p+0, 0x1.0b5586cf9890fp+0, 0x1.172b83c7d517bp+0, 0x1.2387a6e756238p+0,
                                       0x1.306fe0a31b715p+0, 0x1.3dea64c123422p+0, 0x1.4bfdad5362a27p+0, 0x1.5ab07dd485429p+0);
    const __m512d high = _mm512_setr_pd(0x1.6a09e667f3bcdp+0, 0x1.7a11473eb0187p+0, 0x1.8ace5422aa0dbp+0, 0x1.9c49182a3f090p+0,
                                        0x1.ae89f995ad3adp+0, 0x1.c199bdd85529cp+0, 0x1.d5818dcfba487p+0, 0x1.ea4afa2a490dap+0);
    EACH shifted[i] = STEP_MULADD(x[i], zero + 16 * 1.4426950408889634, zero + magic);
    EACH p[i] = shifted[i] - magic;
    EACH r[i] = STEP_MULADD(p[i], zero - 0.693147180369123816490 / 16, x[i]);
    EACH r[i] = STEP_MULADD(p[i], zero - 1.90821492927058770002e-10 / 16, r[i]);
    EACH p[i] = STEP_MULADD(r[i], zero + (1.0 / 5040.0), zero + (1.0 / 720.0));
    TERM(120.0) TERM(24.0) TERM(6.0) TERM(2.0) TERM(1.0)
    EACH {
        const STEP(f64v) root = (STEP(f64v))_mm512_permutex2var_pd(low, (__m512i)shifted[i], high); /* by the low 4 bits */
        const STEP(f64v) power = STEP_MULADD(root * r[i], p[i], root);
        x[i] = (STEP(f64v))((STEP(i64v))power + (((STEP(i64v))shifted[i] >> 4) << 52));
    }
#else /* 2^n e^r, |r| <= ln(2)/2, to r^13 / 13!, the even and the odd powers apart: chains half as long */
    STEP(f64v) square[4], odd[4];
    EACH shifted[i] = STEP_MULADD(x[i], zero + 1.4426950408889634, zero + magic);
    EACH p[i] = shifted[i] - magic;
    EACH r[i] = STEP_MULADD(p[i], zero - 0.693147180369123816490, x[i]);
    EACH r[i] = STEP_MULADD(p[i], zero - 1.90821492927058770002e-10, r[i]);
    EACH square[i] = r[i] * r[i];
    EACH p[i] = STEP_MULADD(square[i], zero + 1.0 / 479001600.0, zero + 1.0 / 3628800.0);
    EACH odd[i] = STEP_MULADD(square[i], zero + 1.0 / 6227020800.0, zero + 1.0 / 39916800.0);
    TERMS(40320.0, 362880.0) TERMS(720.0, 5040.0) TERMS(24.0, 120.0) TERMS(2.0, 6.0) TERMS(1.0, 1.0)
    EACH p[i] = STEP_MULADD(odd[i], r[i], p[i]);
    EACH x[i] = p[i] * (STEP(f64v))(((STEP(i64v))shifted[i] + 1023) << 52); /* p 2^n */
#endif
#undef TERM
#undef TERMS
#undef EACH
}

STEP_INLINE STEP(f64v) STEP(exp_lanes)(STEP(f64v) x) {
    STEP(exp_vectors)(&x, 1);
    return x;
}

STEP_INLINE STEP(f64v) STEP(wide)(const float *x) {
    STEP(f32h) v;
    memcpy(&v, x, sizeof v);
    return STEP(widen)(v);
}

STEP_TARGET static double STEP(sum_of_squares)(const float *x, size_t n) {
    STEP(f64v) sums[4] = {{0}, {0}, {0}, {0}}; /* one would wait for each addition */
    size_t i = 0;
    for (; i + 4 * STEP(DOUBLES) <= n; i += 4 * STEP(DOUBLES)) {
        STEP_UNROLL
        for (size_t k = 0; k < 4; k++) {
            const STEP(f64v) v = STEP(wide)(x + i + k * STEP(DOUBLES));
            sums[k] = STEP_MULADD(v, v, sums[k]);
        }
    }
    double total = STEP(sum_lanes)((sums[0] + sums[1]) + (sums[2] + sums[3]));
    for (; i < n; i++) total += (double)x[i] * x[i];
    return total;
}

/* x (D) -> y = x / sqrt(mean(x^2) + eps) * weight. Returns 0 when the mean square is not finite. */
STEP_TARGET static int STEP(rms_norm)(const float *x, const float *weight, size_t D, double eps, float *y) {
    const double mean = STEP(sum_of_squares)(x, D) / (double)D;
    if (!(mean <= 1.7e308)) return 0;
    const float scale = (float)sqrt(mean + eps);
    for (size_t i = 0; i < D; i++) y[i] = x[i] / scale * weight[i];
    return 1;
}

/* x (K) -> x_q (K) int8, *x_quant_scale, *x_sum. Returns 0 when x is not finite.
 *
 * |x[i] * scale| < 127.5: 127 / largest and the product each have a relative error of 2^-24 at most. So nothing is
 * clipped. Adding 1.5 * 2^23 rounds to the nearest integer, half to even, and leaves it in the last bits of the float:
 * x_q takes them modulo 2^8, the sum modulo 2^32.
 * Measured, 64 rows of 2560 in L2, AVX-512: 35 us; with the formula's clipping and conversions, 63. */
STEP_TARGET static int STEP(quantize)(const float *x, size_t K, int8_t *x_q, float *x_quant_scale, int32_t *x_sum) {
    uint32_t largest_bits = 0; /* max of |x| as integers: the same order, NaN above all */
    for (size_t i = 0; i < K; i++) {
        const uint32_t bits = float_bits(x[i]) & 0x7FFFFFFFu;
        largest_bits = bits > largest_bits ? bits : largest_bits;
    }
    if (largest_bits >= 0x7F800000u) return 0;
    const float largest = bits_float(largest_bits);
    const float scale = 127.0f / (largest > 1e-5f ? largest : 1e-5f);
    const float magic = 12582912.0f; /* 1.5 * 2^23, whose bits are 0x4B400000 */
    uint32_t sum = 0;
    for (size_t i = 0; i < K; i++) {
        const float v = x[i] * scale + magic;
        const uint32_t bits = float_bits(v);
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

/* g / (1 + e^-g) * up of n vectors of gates, in double, rounded to float32 before the product. Four vectors at a time: the
 * steps of one exponential are a chain: 0.51 of the time of one vector at a time (EPYC, Zen 3). */
STEP_INLINE void STEP(silu_times)(const float *gate, const float *up, size_t n, float *y) {
    const STEP(f64v) zero = {0}, one = zero + 1.0;
    STEP(f64v) g[4], e[4];
#define EACH STEP_UNROLL for (size_t k = 0; k < n; k++)
    EACH g[k] = STEP(wide)(gate + k * STEP(DOUBLES));
    EACH e[k] = (STEP(f64v))((STEP(i64v))g[k] | INT64_MIN); /* -|g| */
    STEP(exp_vectors)(e, n);
    EACH {
        STEP(f32h) u;
        memcpy(&u, up + k * STEP(DOUBLES), sizeof u);
        const STEP(f64v) numerator = STEP(choose)((STEP(i64v))(g[k] < zero), e[k], one);
        u = STEP(narrow)(g[k] * numerator / (one + e[k])) * u;
        memcpy(y + k * STEP(DOUBLES), &u, sizeof u);
    }
#undef EACH
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
    size_t i = 0;
    for (; i + 4 * STEP(DOUBLES) <= n; i += 4 * STEP(DOUBLES)) STEP(silu_times)(gate + i, up + i, 4, y + i);
    for (; i < n; i += STEP(DOUBLES)) {
        const size_t count = n - i < STEP(DOUBLES) ? n - i : STEP(DOUBLES);
        float g[STEP(DOUBLES)] = {0}, u[STEP(DOUBLES)] = {0};
        memcpy(g, gate + i, count * sizeof *g);
        memcpy(u, up + i, count * sizeof *u);
        STEP(silu_times)(g, u, 1, u);
        memcpy(y + i, u, count * sizeof *u);
    }
}

/* `rows` of each token: a constant where it is called */
STEP_INLINE void STEP(finish_rows)(const panel_results *r, const size_t rows) {
    for (size_t m = 0; m < r->tokens; m++) {
        float y[2][PANEL_ROWS];
        const size_t ahead = m + 6 < r->tokens ? (m + 6) * r->stride : m * r->stride;
        for (size_t i = 0; i < rows; i += 16) {
            __builtin_prefetch(r->y + ahead + i, 1);
            if (r->residual) __builtin_prefetch(r->residual + ahead + i);
        }
        for (int n = 0; n < 1 + (r->gate != NO_GATE); n++) {
            STEP(dequantize)(r->acc[n] + m * PANEL_ROWS, rows, r->w_scale[n], r->x_scale[m], r->bias[n], y[n]);
            for (size_t i = 0; r->term[n] && i < rows; i++) y[n][i] += r->term[n][m * r->stride + i];
        }
        if (r->gate != NO_GATE) STEP(gated)(y[0], y[1], rows, r->gate == SILU, y[0]);
        for (size_t i = 0; r->residual && i < rows; i++) y[0][i] += r->residual[m * r->stride + i];
        memcpy(r->y + m * r->stride, y[0], rows * sizeof(float));
    }
}

/* The results of a panel: after one call per token and step, a tenth of a prompt's time with AMX. */
STEP_TARGET static void STEP(finish)(const panel_results *r) {
    if (r->rows == PANEL_ROWS) STEP(finish_rows)(r, PANEL_ROWS);
    else STEP(finish_rows)(r, r->rows);
}

/* Rotates the pairs (x[j], x[j + half]) of each head by the token's angles; x (heads, 2 * half), cos and sin (half) */
STEP_TARGET static void STEP(rope)(const float *x, size_t heads, size_t half, const float *cos, const float *sin,
                                   float *y) {
    for (size_t h = 0; h < heads; h++, x += 2 * half, y += 2 * half)
        for (size_t j = 0; j < half; j++) {
            const float first = x[j], second = x[half + j];
            y[j] = first * cos[j] - second * sin[j];
            y[half + j] = second * cos[j] + first * sin[j];
        }
}

#include "attention_steps.h"
#include "dense_blocks.h"
#include "dense_rows.h"
#include "draw_steps.h"
#include "head_screen.h"
#include "group_steps.h"
#include "ruled_steps.h"
#include "lora_steps.h"
#include "training_steps.h"

#undef STEP_INLINE
#undef STEP_UNROLL
#undef STEP
#undef STEP_BYTES
#undef STEP_MULADD
#undef STEP_TARGET
