/* What one token sees of one kv head in a paged cache (keys and values at positions first to first + n_keys - 1), and
 * how a row of a key or value, d floats of one kv head, is stored.
 *
 * Plain version: KVCache.visible and backends/paged_cache.py (widen, narrow), which these follow bit by bit: a row is
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

enum { KV_FLOAT32, KV_FLOAT16, KV_INT8, KV_WIDE }; /* KV_WIDE: doubles, of no cache: rows widened for many queries */
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
    return numbers * (kind == KV_WIDE ? 8 : kind == KV_FLOAT32 ? 4 : kind == KV_FLOAT16 ? 2 : 1);
}

typedef struct {
    size_t from, to; /* keys */
} kv_range;

static inline kv_range kv_within(kv_range a, kv_range b) {
    return (kv_range){a.from > b.from ? a.from : b.from, a.to < b.to ? a.to : b.to};
}

enum { SUM_KEYS = 128 };         /* see below */
enum { WIDE_NUMBERS = 4096, MAX_WIDE = 512 }; /* doubles that stay in L1, and the longest rows that are widened there */
enum { PREFETCH_BYTES = 16384 }; /* from the key in use to the one that is prefetched */

/* Where some keys, or values, are, and their scales: `count` of a block, and those to prefetch. */
typedef struct {
    size_t count, total;
    const char *at[2 * SUM_KEYS];
    float scale[2 * SUM_KEYS];
} kv_rows;

static inline void kv_add_rows(const kv_view *kv, const kv_pool *pool, kv_range keys, kv_rows *rows) {
    const size_t bytes = kv_bytes(kv->kind, kv->stride);
    size_t page = (kv->first + keys.from) / kv->page_size, offset = kv->first + keys.from - page * kv->page_size;
    for (size_t s = keys.from; s < keys.to; s++, offset++) {
        if (offset == kv->page_size) offset = 0, page++;
        const size_t row = (size_t)kv->pages[page] * kv->page_size + offset;
        rows->at[rows->total] = (const char *)pool->rows + row * bytes;
        rows->scale[rows->total++] = kv->kind == KV_INT8 ? pool->scales[row * kv->scale_stride] : 1.0f;
    }
}

/* row k, or the last one */
static inline const char *kv_row(const kv_rows *rows, size_t k) {
    return rows->at[k < rows->total ? k : rows->total - 1];
}

static inline __attribute__((always_inline)) void kv_prefetch(const char *at, size_t bytes) {
    for (size_t i = 0; i < bytes; i += 64) __builtin_prefetch(at + i, 0, 2); /* into L2 */
}

/* Attention of T consecutive tokens of a sequence and R query heads of one kv head: q and z (T, R, d), tokens q_stride
 * and z_stride floats apart. `kv` has the keys of all tokens: token t sees all but the last T - 1 - t, and of these at
 * most the last `window` (0: all). `attend_all` runs the steps one after another; several threads may divide a step.
 *
 * Weighted values are summed in blocks of SUM_KEYS positions, counted from the start of the sequence, each from zero;
 * then the sums of the blocks in their order. So no bit depends on who computes a block, nor on other rows. */
enum { ATTEND_BEGIN, ATTEND_SCORES, ATTEND_SOFTMAX, ATTEND_VALUES, ATTEND_END };

typedef struct {
    const float *q;
    float *z;
    size_t T, R, d, q_stride, z_stride, window;
    double scale;
    kv_view kv;
    size_t slots;    /* 1, or the number of blocks, whose sums then stay apart until the end */
    double *wide_q;  /* (d / lanes, T * R, lanes): whole vectors of all rows, then (T * R, d % lanes) */
    double *sums;    /* (slots, T * R, d) */
    double *parts;   /* (slots, 4, d) */
    double *pattern; /* (T * R, n_keys), as `scores` */
    float *scores;
    kv_range *seen;  /* (T * R) */
    kv_view next;    /* what this thread attends to next: its first keys are prefetched with the last values; n_keys 0: nothing */
    ptrdiff_t next_item; /* its number, for the caller */
    int is_fetched;  /* whether the first keys have been prefetched so */
} attend_call;

typedef void (*attend_fn)(const attend_call *, int step, size_t first, size_t end);

/* in doubles */
static inline size_t attend_workspace(size_t rows, size_t d, size_t n_keys, size_t slots) {
    return (rows + slots * (rows + 4)) * d + rows * (n_keys + 2) + (rows * n_keys + 1) / 2;
}

static inline void attend_place(attend_call *c, double *workspace) {
    const size_t rows = c->T * c->R;
    c->wide_q = workspace, c->sums = c->wide_q + rows * c->d, c->parts = c->sums + c->slots * rows * c->d;
    c->pattern = c->parts + c->slots * 4 * c->d;
    c->seen = (kv_range *)(c->pattern + rows * c->kv.n_keys);
    c->scores = (float *)(c->seen + rows);
}

static inline size_t attend_blocks(const kv_view *kv) {
    return (kv->first + kv->n_keys - 1) / SUM_KEYS - kv->first / SUM_KEYS + 1;
}

/* the keys of block b */
static inline kv_range attend_block(const kv_view *kv, size_t b) {
    const size_t start = (kv->first / SUM_KEYS + b) * SUM_KEYS, end = start + SUM_KEYS - kv->first;
    return (kv_range){start > kv->first ? start - kv->first : 0, end < kv->n_keys ? end : kv->n_keys};
}

static inline void attend_all(attend_fn attend, const attend_call *c) {
    const size_t n_blocks = attend_blocks(&c->kv);
    attend(c, ATTEND_BEGIN, 0, 0);
    attend(c, ATTEND_SCORES, 0, n_blocks);
    attend(c, ATTEND_SOFTMAX, 0, c->T * c->R);
    attend(c, ATTEND_VALUES, 0, n_blocks);
    attend(c, ATTEND_END, 0, 0);
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

/* y = x rounded to float16 or bfloat16, half to even, as floats: families/block_rule.py, `narrow_inputs` */
static inline void narrow_floats(int to_half, const float *x, size_t n, float *y) {
    for (size_t i = 0; i < n; i++) {
        const uint32_t bits = float_bits(x[i]), sign = bits & 0x80000000u, size = bits & 0x7FFFFFFFu;
        const uint32_t tiny = float_bits(bits_float(size) + 0.5f - 0.5f); /* steps of 2^-24, as in kv_halves */
        const uint32_t normal = (size + 0xFFFu + (size >> 13 & 1)) & ~0x1FFFu, brief = (size + 0x7FFFu + (size >> 16 & 1)) & ~0xFFFFu;
        const uint32_t half = size < 0x38800000u ? tiny : normal < 0x47800000u ? normal : 0x7F800000u;
        y[i] = size < 0x7F800000u ? bits_float(sign | (to_half ? half : brief)) : x[i];
    }
}

static inline void kv_int8(const float *x, size_t d, int8_t *x_q, float *scale) {
    float largest = 1e-30f; /* backends/paged_cache.MIN_ABSMAX */
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
