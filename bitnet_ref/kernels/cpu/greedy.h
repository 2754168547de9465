/* The next token's embedding, between two steps without Python. */
#pragma once
#include <stdint.h>
#include <string.h>
#include "kv_cache.h"

/* One row of an embedding times `scale`. kind: 0 float32, 1 bfloat16, 2 float16, as of dense_rows.h. */
static inline void embed_row(int kind, const void *row, size_t n, float scale, float *x) {
    if (kind == 0) memcpy(x, row, n * sizeof(float));
    if (kind == 1)
        for (size_t i = 0; i < n; i++) x[i] = bits_float((uint32_t)((const uint16_t *)row)[i] << 16);
    if (kind == 2) half_to_float_plain((const uint16_t *)row, n, x);
    for (size_t i = 0; i < n && scale != 1; i++) x[i] = x[i] * scale;
}
