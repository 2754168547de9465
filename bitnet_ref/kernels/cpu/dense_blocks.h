/* Weights of dense matrices in blocks (reference/blocks.py), widened to float32 in registers, exactly as NumPy does.
 *
 * A weight is scale * q + offset. The product has at most 24 bits, so that it makes no difference whether it is fused.
 * 16 (8, 4) weights at a time: bytes are widened to int32, of which nibbles are cut out.
 *
 * A template, included by float_steps.h.
 *
 * Measured, two threads of an EPYC (Zen 4), AVX-512, 2048 columns, one token from memory that reads 28 to 31 GB/s; G
 *   weights/s in brackets: Q8_0 22 to 26 GB/s (25), Q4_0 17 to 20 (35), Q4_1 17 to 19 (30), Q6_K 15 to 17 (21), Q4_K 11
 *   (20); bfloat16 24 to 26 (13). 128 tokens: the 50 to 60 G multiply-adds/s of float32, for a row is widened once.
 * Tried: scales widened with each vector, not 8 blocks at a time: Q4_1 9.7, Q6_K 9.4, Q4_K 6.0 GB/s. All 256 columns
 *   unrolled: half as fast. Q6_K's integers put together from int32, not from bytes: 11. */
#ifndef BITNET_REF_DENSE_BLOCKS_H
#define BITNET_REF_DENSE_BLOCKS_H

enum { Q8_0 = 3, Q4_0, Q4_1, Q4_K, Q6_K, N_DENSE_KINDS }; /* before them: 0 float32, 1 bfloat16, 2 float16 */

typedef struct {
    size_t values, bytes; /* of a block */
} dense_kind;

static const dense_kind DENSE_KINDS[N_DENSE_KINDS] = {{1, 4},   {1, 2},   {1, 2},     {32, 34},
                                                      {32, 18}, {32, 20}, {256, 144}, {256, 210}};

static inline size_t dense_row_bytes(int kind, size_t K) { return K / DENSE_KINDS[kind].values * DENSE_KINDS[kind].bytes; }

static inline uint32_t read_pair(const uint8_t *b) { /* of float16 numbers */
    uint32_t pair;
    memcpy(&pair, b, sizeof pair);
    return pair;
}
#endif

typedef int32_t STEP(i32v) __attribute__((vector_size(STEP_BYTES)));
typedef uint32_t STEP(u32q) __attribute__((vector_size(16)));
typedef uint16_t STEP(u16q) __attribute__((vector_size(16)));

STEP_INLINE void STEP(halves_of_8)(STEP(u16q) h, float *out) {
#if STEP_BYTES == 16
    half_to_float_plain((const uint16_t *)&h, 8, out);
#else
    _mm256_storeu_ps(out, _mm256_cvtph_ps((__m128i)h));
#endif
}

#if STEP_BYTES == 64
STEP_INLINE STEP(i32v) STEP(bytes)(const uint8_t *p) {
    return (STEP(i32v))_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p));
}
STEP_INLINE STEP(i32v) STEP(signed_bytes)(const uint8_t *p) {
    return (STEP(i32v))_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p));
}
STEP_INLINE STEP(f32v) STEP(to_floats)(STEP(i32v) q) { return (STEP(f32v))_mm512_cvtepi32_ps((__m512i)q); }
#elif STEP_BYTES == 32
STEP_INLINE STEP(i32v) STEP(bytes)(const uint8_t *p) {
    return (STEP(i32v))_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)p));
}
STEP_INLINE STEP(i32v) STEP(signed_bytes)(const uint8_t *p) {
    return (STEP(i32v))_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p));
}
STEP_INLINE STEP(f32v) STEP(to_floats)(STEP(i32v) q) { return (STEP(f32v))_mm256_cvtepi32_ps((__m256i)q); }
#else
typedef uint8_t STEP(u8q) __attribute__((vector_size(STEP_BYTES / 4)));
typedef int8_t STEP(i8q) __attribute__((vector_size(STEP_BYTES / 4)));
STEP_INLINE STEP(i32v) STEP(bytes)(const uint8_t *p) {
    STEP(u8q) v;
    memcpy(&v, p, sizeof v);
    return __builtin_convertvector(v, STEP(i32v));
}
STEP_INLINE STEP(i32v) STEP(signed_bytes)(const uint8_t *p) {
    STEP(i8q) v;
    memcpy(&v, p, sizeof v);
    return __builtin_convertvector(v, STEP(i32v));
}
STEP_INLINE STEP(f32v) STEP(to_floats)(STEP(i32v) q) { return __builtin_convertvector(q, STEP(f32v)); }
#endif

/* 8 bytes times a number */
STEP_INLINE void STEP(eight_floats)(uint64_t bytes, float factor, float *out) {
    typedef float floats __attribute__((vector_size(32)));
    typedef int32_t ints __attribute__((vector_size(32)));
    typedef uint8_t small __attribute__((vector_size(8)));
    const floats v = __builtin_convertvector(__builtin_convertvector((small)bytes, ints), floats) * factor;
    memcpy(out, &v, sizeof v);
}

/* What the weights of 256 columns, n of 32, are multiplied by: factors[j] for the j-th 32 (16 in Q6_K). What is added to
 * them follows: in Q4_1 each after its factor, in Q4_K after all.
 * quants: room for 256 integers, to which those of Q6_K are put together. */
STEP_INLINE void STEP(block_factors)(const uint8_t *b, const int n, const int kind, float *factors, int8_t *quants) {
    const size_t bytes = DENSE_KINDS[kind].bytes;
    if (kind == Q4_1) { /* pairs of float16 */
        for (int j = 0; j < n; j += 4, b += 4 * bytes) {
            STEP(u32q) pairs = {read_pair(b)};
            if (n == 8) pairs = (STEP(u32q)){pairs[0], read_pair(b + bytes), read_pair(b + 2 * bytes), read_pair(b + 3 * bytes)};
            STEP(halves_of_8)((STEP(u16q))pairs, factors + 2 * j);
        }
        return;
    }
    if (kind < Q4_K) {
#define HALF(j) (uint16_t)read_pair(b + j * bytes)
        STEP(u16q) h = {HALF(0)};
        if (n == 8) h = (STEP(u16q)){h[0], HALF(1), HALF(2), HALF(3), HALF(4), HALF(5), HALF(6), HALF(7)};
#undef HALF
        STEP(halves_of_8)(h, factors);
        return;
    }
    float d[8];
    const STEP(u32q) two = {read_pair(b + (kind == Q6_K ? 206 : 0))};
    STEP(halves_of_8)((STEP(u16q))two, d);
    if (kind == Q6_K) {
        for (int j = 0; j < 16; j++) factors[j] = d[1] * (float)(int8_t)b[192 + j];
        STEP_UNROLL
        for (int part = 0; part < 4; part++) /* 32 bytes: low nibbles, and 64 columns on high ones */
            for (int j = 0; j < 32; j++) {   /* the pairs of bits above them: four in a byte, 32 columns apart */
                const uint8_t low = b[part * 32 + j], pairs = b[128 + part / 2 * 32 + j] >> part % 2 * 2;
                int8_t *q = quants + part / 2 * 128 + part % 2 * 32 + j;
                q[0] = (int8_t)(((low & 15) | (pairs & 3) << 4) - 32);
                q[64] = (int8_t)((low >> 4 | (pairs >> 4 & 3) << 4) - 32);
            }
        return;
    }
    /* 6 bits each: four scales, four minima, the last ones' low nibbles; their high bits are on top of the first ones */
    const uint32_t first = read_pair(b + 4), second = read_pair(b + 8), third = read_pair(b + 12);
    const uint64_t scales = (third & 0x0F0F0F0F) | (first >> 6 & 0x03030303) << 4;
    const uint64_t minima = (third >> 4 & 0x0F0F0F0F) | (second >> 6 & 0x03030303) << 4;
    STEP(eight_floats)((first & 0x3F3F3F3F) | scales << 32, d[0], factors);
    STEP(eight_floats)((second & 0x3F3F3F3F) | minima << 32, -d[1], factors + 8);
}

/* scale q + offset of nibbles q: low ones, or of high ones */
STEP_INLINE STEP(f32v) STEP(nibbles)(const uint8_t *p, const int is_high, const int kind, float one_scale, float one_offset) {
    const STEP(f32v) scale = one_scale - (STEP(f32v)){0}, offset = one_offset - (STEP(f32v)){0};
    STEP(i32v) q = STEP(bytes)(p);
    if (is_high) q >>= 4;
#if STEP_BYTES == 64 /* all 16 values, looked up by the low 4 bits of q */
    __m512 table = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    if (kind == Q4_0) table = _mm512_mul_ps(_mm512_sub_ps(table, _mm512_set1_ps(8)), (__m512)scale);
    else table = _mm512_fmadd_ps(table, (__m512)scale, (__m512)offset);
    return (STEP(f32v))_mm512_permutexvar_ps((__m512i)q, table);
#else
    if (!is_high) q &= 15;
    if (kind == Q4_0) return STEP(to_floats)(q - 8) * scale;
#if STEP_BYTES == 32
    return (STEP(f32v))_mm256_fmadd_ps((__m256)STEP(to_floats)(q), (__m256)scale, (__m256)offset);
#else
    return STEP(to_floats)(q) * scale + offset;
#endif
#endif
}

/* How many columns a loop over the 256 takes at a time: in each such part the weights lie alike. */
#define BLOCK_STEP(kind) (kind == Q4_K ? 64 : 32)

/* the vector of weights at column `at` + i of the 256 at b; at: a multiple of BLOCK_STEP, i: below it */
STEP_INLINE STEP(f32v) STEP(block_weights)(const uint8_t *b, size_t at, const int i, const int kind, const float *factors,
                                           const int8_t *quants) {
    const float *f = factors + at / 32;
    if (kind < Q4_K) b += at / 32 * DENSE_KINDS[kind].bytes;
    if (kind == Q8_0) return STEP(to_floats)(STEP(signed_bytes)(b + 2 + i)) * f[0];
    if (kind == Q4_0) return STEP(nibbles)(b + 2 + i % 16, i / 16, kind, f[0], 0);
    if (kind == Q4_1) return STEP(nibbles)(b + 4 + i % 16, i / 16, kind, factors[at / 16], factors[at / 16 + 1]);
    if (kind == Q4_K) /* of each 64 values: 32 low nibbles, 32 high ones */
        return STEP(nibbles)(b + 16 + at / 2 + i % 32, i / 32, kind, f[i / 32], f[8 + i / 32]);
    return STEP(to_floats)(STEP(signed_bytes)((const uint8_t *)quants + at + i)) * factors[at / 16 + i / 16];
}

/* A function's text for each 256 columns of K, a multiple of 32, and each 32 of the rest. */
#define EACH_BLOCKS(DO)                                                                                                \
    size_t k = 0;                                                                                                      \
    for (; k + 256 <= K; k += 256) DO(8)                                                                               \
    for (; k < K; k += 32) DO(1)

/* K weights of a row as float32 */
STEP_INLINE void STEP(widen_blocks)(const int kind, const uint8_t *row, size_t K, float *out) {
    float factors[16];
    int8_t quants[256];
    const int step = BLOCK_STEP(kind);
#define WIDEN(n)                                                                                                       \
    {                                                                                                                  \
        const uint8_t *b = row + dense_row_bytes(kind, k);                                                             \
        STEP(block_factors)(b, n, kind, factors, quants);                                                              \
        for (size_t at = 0; at < 32 * n; at += step) {                                                                 \
            STEP_UNROLL                                                                                                \
            for (int i = 0; i < step; i += STEP(FLOATS)) {                                                             \
                const STEP(f32v) v = STEP(block_weights)(b, at, i, kind, factors, quants);                             \
                memcpy(out + k + at + i, &v, sizeof v);                                                                \
            }                                                                                                          \
        }                                                                                                              \
    }
    EACH_BLOCKS(WIDEN)
#undef WIDEN
}
