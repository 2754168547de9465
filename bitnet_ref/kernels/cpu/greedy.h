/* Greedy decoding without Python between the steps: the largest logit of a row, and the next token's embedding.
 *
 * Plain version: NumPy's isfinite and argmax for each row, and a gather. For storyteller's vocabulary of 4,096 they take
 * 2 us a row together, and the gather 20 us for a step, next to some 250 us of kernels. With all else that Python does
 * between two steps: docs/operating.md.
 * Here each row is read once, in LANES independent maxima that the compiler turns into vectors. As in NumPy the first of
 * equal logits counts, so it is looked for afterwards; -0 equals 0. */
#pragma once
#include <stdint.h>
#include <string.h>
#include "kv_cache.h"

#define GREEDY_LANES 16

/* The index of the first largest number, or -1 if one of them is NaN or Inf. n > 0. */
static inline ptrdiff_t first_largest(const float *x, size_t n) {
    float largest[GREEDY_LANES], best = x[0];
    uint32_t exponent[GREEDY_LANES] = {0}, widest = 0; /* the largest |x| as bits: 0x7F800000 and above are Inf and NaN */
    size_t i = 0;
    for (int lane = 0; lane < GREEDY_LANES; lane++) largest[lane] = x[0];
    for (; i + GREEDY_LANES <= n; i += GREEDY_LANES)
        for (int lane = 0; lane < GREEDY_LANES; lane++) {
            const float v = x[i + lane];
            const uint32_t bits = float_bits(v) & 0x7FFFFFFFu;
            largest[lane] = v > largest[lane] ? v : largest[lane];
            exponent[lane] = bits > exponent[lane] ? bits : exponent[lane];
        }
    for (int lane = 0; lane < GREEDY_LANES; lane++) {
        best = largest[lane] > best ? largest[lane] : best;
        widest = exponent[lane] > widest ? exponent[lane] : widest;
    }
    for (; i < n; i++) {
        const uint32_t bits = float_bits(x[i]) & 0x7FFFFFFFu;
        best = x[i] > best ? x[i] : best;
        widest = bits > widest ? bits : widest;
    }
    if (widest >= 0x7F800000u) return -1;
    for (i = 0; x[i] != best; i++) {}
    return (ptrdiff_t)i;
}

/* One row of an embedding times `scale`. kind: 0 float32, 1 bfloat16, 2 float16, as of dense_rows.h. */
static inline void embed_row(int kind, const void *row, size_t n, float scale, float *x) {
    if (kind == 0) memcpy(x, row, n * sizeof(float));
    if (kind == 1)
        for (size_t i = 0; i < n; i++) x[i] = bits_float((uint32_t)((const uint16_t *)row)[i] << 16);
    if (kind == 2) half_to_float_plain((const uint16_t *)row, n, x);
    for (size_t i = 0; i < n && scale != 1; i++) x[i] = x[i] * scale;
}
