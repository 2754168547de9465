/* What one token sees of one kv head in a paged cache (keys and values at positions first to first + n_keys - 1), and
 * how a row of a key or value, d floats of one kv head, is stored.
 *
 * Plain version: KVCache.visible and backends/cache_dtypes.py (widen, narrow), which these follow bit by bit: a row is
 * float32, the nearest float16 (half to even), or int8 with a scale of its own. */
#ifndef BITNET_REF_KV_CACHE_H
#define BITNET_REF_KV_CACHE_H

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#endif

static inline uint32_t float_bits(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return bits;
}

static inline float bits_float(uint32_t bits) {
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

enum { KV_FLOAT32, KV_FLOAT16, KV_INT8 };
enum { ATTEND_ROWS = 32 }; /* max query rows of one kv head that go through the keys together */

typedef struct {
    const void *rows;    /* of this layer and head, from row 0 of page 0: floats, halves or int8 */
    const float *scales; /* of each row of int8: the row is scale * int8 */
} kv_pool;

typedef struct {
    kv_pool keys, values;
    const int32_t *pages; /* of the sequence: pages[i] holds positions i * page_size .. */
    size_t page_size, stride, scale_stride; /* rows per page; elements, and scales, from row to row */
    size_t first, n_keys;
    int kind;
} kv_view;

static inline size_t kv_bytes(int kind, size_t numbers) {
    return numbers * (kind == KV_FLOAT32 ? 4 : kind == KV_FLOAT16 ? 2 : 1);
}

/* The number of contiguous keys from s on, in one page and at most max_count; *row is the row of the first. */
static inline size_t kv_rows(const kv_view *kv, size_t s, size_t max_count, size_t *row) {
    if (s >= kv->n_keys) return 0;
    const size_t position = kv->first + s, page = position / kv->page_size, offset = position - page * kv->page_size;
    *row = (size_t)kv->pages[page] * kv->page_size + offset;
    size_t count = kv->page_size - offset;
    if (count > kv->n_keys - s) count = kv->n_keys - s;
    return count < max_count ? count : max_count;
}

/* n halves -> the same numbers as floats. The exponent moves by a product with 2^112, exact for subnormal halves too;
 * NaN and Inf get a float's exponent for them. */
static inline void half_to_float_plain(const uint16_t *half, size_t n, float *y) {
    for (size_t i = 0; i < n; i++) {
        const uint32_t h = half[i], magnitude = (h & 0x7FFFu) << 13;
        uint32_t bits = float_bits(bits_float(magnitude) * 0x1p112f);
        bits |= (h & 0x8000u) << 16 | ((h & 0x7C00u) == 0x7C00u ? 0x7F800000u : 0u);
        y[i] = bits_float(bits);
    }
}

#if defined(__x86_64__)
__attribute__((target("avx2,f16c"))) static inline void half_to_float_avx2(const uint16_t *half, size_t n, float *y) {
    size_t i = 0;
    for (; i + 8 <= n; i += 8) _mm256_storeu_ps(y + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(half + i))));
    half_to_float_plain(half + i, n - i, y + i);
}

__attribute__((target("avx512f"))) static inline void half_to_float_avx512(const uint16_t *half, size_t n, float *y) {
    size_t i = 0;
    for (; i + 16 <= n; i += 16)
        _mm512_storeu_ps(y + i, _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(half + i))));
    half_to_float_plain(half + i, n - i, y + i);
}

static inline int has_f16c(void) {
    unsigned a, b, c, d;
    return __get_cpuid(1, &a, &b, &c, &d) && (c >> 29 & 1);
}
#endif

/* Whether n floats can be stored: int8 has no NaN or Inf, and float16 would round 65520 and more to Inf */
static inline int kv_can_store(int kind, const float *x, size_t n) {
    uint32_t largest = 0;
    for (size_t i = 0; i < n && kind != KV_FLOAT32; i++) {
        const uint32_t size = float_bits(x[i]) & 0x7FFFFFFFu;
        largest = size > largest ? size : largest;
    }
    return largest < (kind == KV_FLOAT16 ? 0x477FF000u : 0x7F800000u);
}

static inline void kv_halves(const float *x, size_t d, uint16_t *half) {
    for (size_t i = 0; i < d; i++) {
        const uint32_t bits = float_bits(x[i]), size = bits & 0x7FFFFFFFu;
        float tiny = bits_float(size);
        tiny += 0.5f; /* below 2^-14 halves are steps of 2^-24; this makes that the last bit of the float */
        const uint32_t subnormal = float_bits(tiny) - 0x3F000000u;
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
    const float magic = 12582912.0f; /* 1.5 * 2^23: adding and subtracting it rounds half to even */
    for (size_t i = 0; i < d; i++) {
        float v = x[i] / *scale + magic - magic;
        v = v < -127.0f ? -127.0f : v;
        x_q[i] = (int8_t)(int32_t)(v > 127.0f ? 127.0f : v);
    }
}

/* Stores x (d) as row number `row` of a pool; int8 stores its scale in *scale. */
static inline void kv_store(int kind, const float *x, size_t d, void *rows, size_t row, float *scale) {
    if (kind == KV_FLOAT32) memcpy((float *)rows + row * d, x, d * sizeof(float));
    else if (kind == KV_FLOAT16) kv_halves(x, d, (uint16_t *)rows + row * d);
    else kv_int8(x, d, (int8_t *)rows + row * d, scale);
}

#endif
