/* What a paged cache keeps of one row of a key or a value, d floats of one kv head.
 *
 * Plain version: backends/cache_dtypes.narrow, which these follow bit by bit: floats as they are, the nearest halves (half to even),
 * or int8 with a scale of the row's own. Few numbers a token: the compiler's own vectors are enough. */
#ifndef BITNET_REF_KV_APPEND_H
#define BITNET_REF_KV_APPEND_H

#include <math.h>

#include "kv_view.h"

static inline uint32_t kv_bits(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return bits;
}

/* Whether n floats can be kept: int8 knows no NaN or Inf, and float16 none from 65520 on either, which it rounds to Inf */
static inline int kv_can_keep(int kind, const float *x, size_t n) {
    uint32_t largest = 0;
    for (size_t i = 0; i < n && kind != KV_FLOAT32; i++) {
        const uint32_t size = kv_bits(x[i]) & 0x7FFFFFFFu;
        largest = size > largest ? size : largest;
    }
    return largest < (kind == KV_FLOAT16 ? 0x477FF000u : 0x7F800000u);
}

static inline void kv_halves(const float *x, size_t d, uint16_t *half) {
    for (size_t i = 0; i < d; i++) {
        const uint32_t bits = kv_bits(x[i]), size = bits & 0x7FFFFFFFu;
        float tiny; /* below 2^-14: in steps of 2^-24, which adding 0.5 makes the last bit of a float */
        memcpy(&tiny, &size, 4);
        tiny += 0.5f;
        const uint32_t subnormal = kv_bits(tiny) - 0x3F000000u;
        const uint32_t normal = (size - 0x38000000u + 0xFFFu + (size >> 13 & 1)) >> 13;
        half[i] = (uint16_t)((bits >> 16 & 0x8000u) | (size < 0x38800000u ? subnormal : normal));
    }
}

static inline void kv_int8(const float *x, size_t d, int8_t *x_q, float *scale) {
    float largest = 1e-30f; /* backends/cache_dtypes.MIN_ABSMAX */
    for (size_t i = 0; i < d; i++) {
        const float size = fabsf(x[i]);
        largest = size > largest ? size : largest;
    }
    *scale = largest / 127.0f;
    const float magic = 12582912.0f; /* 1.5 * 2^23: adding and subtracting it rounds to the nearest, half to even */
    for (size_t i = 0; i < d; i++) {
        float v = x[i] / *scale + magic - magic;
        v = v < -127.0f ? -127.0f : v;
        x_q[i] = (int8_t)(int32_t)(v > 127.0f ? 127.0f : v);
    }
}

/* To row number `row` of a pool; `scale`: of int8, its place. */
static inline void kv_keep(int kind, const float *x, size_t d, void *rows, size_t row, float *scale) {
    if (kind == KV_FLOAT32) memcpy((float *)rows + row * d, x, d * sizeof(float));
    else if (kind == KV_FLOAT16) kv_halves(x, d, (uint16_t *)rows + row * d);
    else kv_int8(x, d, (int8_t *)rows + row * d, scale);
}

#endif
