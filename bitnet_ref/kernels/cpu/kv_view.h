/* What one token sees of one kv head in a paged cache: keys and values at positions first to first + n_keys - 1.
 *
 * Plain version: KVCache.visible and backends/cache_dtypes.widen, which these follow bit by bit. */
#ifndef BITNET_REF_KV_VIEW_H
#define BITNET_REF_KV_VIEW_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#endif

enum { KV_FLOAT32, KV_FLOAT16, KV_INT8 };
enum { ATTEND_ROWS = 32 }; /* query rows of one kv head, at most, that go through the keys together */

typedef struct {
    const void *rows;    /* of this layer and head, from row 0 of page 0 on: floats, halves or int8 */
    const float *scales; /* of each row of int8: the row is scale * int8 */
} kv_pool;

typedef struct {
    kv_pool keys, values;
    const int32_t *pages; /* of the sequence: pages[i] holds positions i * page_size .. */
    size_t page_size, stride, scale_stride; /* rows of a page; elements, and scales, from row to row */
    size_t first, n_keys;
    int kind;
} kv_view;

static inline const char *kv_row(const kv_view *kv, const kv_pool *pool, size_t row) {
    return (const char *)pool->rows + row * kv->stride * (kv->kind == KV_FLOAT32 ? 4 : kv->kind == KV_FLOAT16 ? 2 : 1);
}

static inline size_t kv_row_bytes(const kv_view *kv, size_t d) {
    return d * (kv->kind == KV_FLOAT32 ? 4 : kv->kind == KV_FLOAT16 ? 2 : 1);
}

/* The keys from s on that lie one behind the other in a page: how many there are, at most `most`; *row is the first's. */
static inline size_t kv_rows(const kv_view *kv, size_t s, size_t most, size_t *row) {
    if (s >= kv->n_keys) return 0;
    const size_t position = kv->first + s, page = position / kv->page_size, offset = position - page * kv->page_size;
    *row = (size_t)kv->pages[page] * kv->page_size + offset;
    size_t count = kv->page_size - offset;
    if (count > kv->n_keys - s) count = kv->n_keys - s;
    return count < most ? count : most;
}

/* n halves -> floats, which hold each of them exactly. In integers: the exponent moves by a product with 2^112, which
 * is exact, subnormal halves included; NaN and Inf get the exponent that a float has for them. */
static inline void half_to_float_plain(const uint16_t *half, size_t n, float *y) {
    for (size_t i = 0; i < n; i++) {
        const uint32_t h = half[i], magnitude = (h & 0x7FFFu) << 13;
        float v;
        memcpy(&v, &magnitude, 4);
        v *= 0x1p112f;
        uint32_t bits;
        memcpy(&bits, &v, 4);
        bits |= (h & 0x8000u) << 16 | ((h & 0x7C00u) == 0x7C00u ? 0x7F800000u : 0u);
        memcpy(y + i, &bits, 4);
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

#endif
