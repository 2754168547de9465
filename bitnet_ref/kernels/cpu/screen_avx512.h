/* The screen of head_screen.h for several tokens at once: four rows of the head against up to six tokens.
 *
 * One token waits for memory; with six the sums themselves are the limit, and most of the work for one token is
 * widening a row to int16. Here a row is widened once for all tokens, and vpdpwssd (VNNI) multiplies 32 pairs of int16
 * and adds them to 16 lanes: per 32 columns 4 rows to widen, 6 tokens to load, 24 products. In assembly for the same
 * reason as avx512_tile. The bounds are those of `screen_rows`, to the bit: the sum is exact, and the few steps after
 * it are the same. */
#ifndef BITNET_REF_SCREEN_AVX512_H
#define BITNET_REF_SCREEN_AVX512_H

/* A lane sums two products of each 32 columns: 8192 / 16 * 127 * 32639 < 2^31. */
enum { SCREEN_TILE_ROWS = 4, SCREEN_TILE_TOKENS = 6, SCREEN_TILE_COLUMNS = 8192 };

#if defined(__x86_64__)
#include <math.h>

#include "ternary_avx512.h"

#define SCREEN_TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")))

#define SCREEN_ZERO(x, out, a, b, c, d)                                                                                \
    "vpxord %%zmm" a ", %%zmm" a ", %%zmm" a "\n\tvpxord %%zmm" b ", %%zmm" b ", %%zmm" b "\n\t"                       \
    "vpxord %%zmm" c ", %%zmm" c ", %%zmm" c "\n\tvpxord %%zmm" d ", %%zmm" d ", %%zmm" d "\n\t"
#define SCREEN_DOT(x, out, a, b, c, d) "vmovdqu32 " x ", %%zmm28\n\t" TILE_DOT4("vpdpwssd", a, b, c, d)
#define SCREEN_DOT_AT_64(x, out, a, b, c, d) SCREEN_DOT("64" x, out, a, b, c, d)
#define SCREEN_HALF(T, q_at, DOT)                                                                                      \
    "vpmovsxbw " q_at "(%[q]), %%zmm24\n\tvpmovsxbw " q_at "(%[q],%[wide]), %%zmm25\n\t"                               \
    "vpmovsxbw " q_at "(%[q],%[wide],2), %%zmm26\n\tvpmovsxbw " q_at "(%[q3]), %%zmm27\n\t" TILE_TOKENS_##T(DOT)

/* out (T, 4, 16) int32: 16 partial sums of each row and token; 64 * lines columns. Prefetches the next four rows. */
#define SCREEN_TILE(T)                                                                                                 \
    SCREEN_TARGET static void screen_tile_##T(const int8_t *q, size_t wide, const int16_t *x, size_t x_stride,         \
                                              size_t lines, int32_t *out) {                                            \
        const int8_t *q3 = q + 3 * wide, *next = q + 4 * wide, *next3 = next + 3 * wide;                               \
        const int16_t *x3 = x + 3 * x_stride;                                                                          \
        const size_t token_bytes = SCREEN_TILE_ROWS * VECTOR_BYTES;                                                    \
        __asm__ volatile(                                                                                              \
            TILE_TOKENS_##T(SCREEN_ZERO)                                                                               \
            ".p2align 5\n"                                                                                             \
            "1:\n\t"                                                                                                   \
            "prefetcht0 (%[next])\n\tprefetcht0 (%[next],%[wide])\n\t"                                                \
            "prefetcht0 (%[next],%[wide],2)\n\tprefetcht0 (%[next3])\n\t"                                             \
            SCREEN_HALF(T, "", SCREEN_DOT) SCREEN_HALF(T, "32", SCREEN_DOT_AT_64)                                      \
            "add $64, %[q]\n\tadd $64, %[q3]\n\tadd $64, %[next]\n\tadd $64, %[next3]\n\t"                           \
            "add $128, %[x]\n\tadd $128, %[x3]\n\t"                                                                   \
            "dec %[lines]\n\t"                                                                                         \
            "jnz 1b\n\t"                                                                                               \
            TILE_TOKENS_##T(TILE_STORE)                                                                                \
            : [q] "+r"(q), [q3] "+r"(q3), [next] "+r"(next), [next3] "+r"(next3), [x] "+r"(x), [x3] "+r"(x3),          \
              [lines] "+r"(lines)                                                                                      \
            : [wide] "r"(wide), [x_stride] "r"(x_stride * sizeof *x), [acc] "r"(out),                                  \
              [acc3] "r"((char *)out + 3 * token_bytes), [acc_stride] "r"(token_bytes)                                 \
            : "memory", "cc", XMM_0_TO_28);                                                                            \
    }
SCREEN_TILE(2)
SCREEN_TILE(3)
SCREEN_TILE(4)
SCREEN_TILE(5)
SCREEN_TILE(6)

/* 16 partial sums of each of 4 rows -> the sums of the rows */
SCREEN_TARGET static inline __m256i screen_fold(const int32_t *partial) {
    __m512i row[4];
    for (int r = 0; r < 4; r++) {
        const __m512i sum = _mm512_loadu_si512(partial + 16 * r);
        row[r] = _mm512_add_epi64(_mm512_cvtepi32_epi64(_mm512_castsi512_si256(sum)),
                                  _mm512_cvtepi32_epi64(_mm512_extracti64x4_epi64(sum, 1)));
    }
    const __m512i ab = _mm512_add_epi64(_mm512_unpacklo_epi64(row[0], row[1]), _mm512_unpackhi_epi64(row[0], row[1])),
                  cd = _mm512_add_epi64(_mm512_unpacklo_epi64(row[2], row[3]), _mm512_unpackhi_epi64(row[2], row[3]));
    const __m256i ab4 = _mm256_add_epi64(_mm512_castsi512_si256(ab), _mm512_extracti64x4_epi64(ab, 1)),
                  cd4 = _mm256_add_epi64(_mm512_castsi512_si256(cd), _mm512_extracti64x4_epi64(cd, 1));
    return _mm256_add_epi64(_mm256_permute2x128_si256(ab4, cd4, 0x20), _mm256_permute2x128_si256(ab4, cd4, 0x31));
}

/* independent of row and token */
typedef struct {
    __m512d underflow, round_up, ulps, infinity, huge;
} screen_constants;

SCREEN_TARGET static inline screen_constants make_screen_constants(size_t K) {
    return (screen_constants){_mm512_set1_pd(((double)K + 8) * 0x1p-123), _mm512_set1_pd(1 + 1e-6),
                              _mm512_set1_pd(0x1p-22), _mm512_set1_pd(INFINITY), _mm512_set1_pd(0x1p126)};
}

/* The bounds of eight logits, step by step as in `screen_rows`. f and x: the facts of their rows and tokens. */
SCREEN_TARGET static inline __attribute__((always_inline)) void screen_bounds(
    __m512d sum, const __m512d *f, const __m512d *x, const screen_constants *c, __m256 *lower, __m256 *upper) {
    const __m512d estimate = _mm512_mul_pd(_mm512_mul_pd(f[0], x[0]), sum);
    __m512d slack = _mm512_add_pd(_mm512_mul_pd(f[1], x[1]), _mm512_mul_pd(f[2], x[2]));
    slack = _mm512_add_pd(_mm512_mul_pd(slack, c->round_up), _mm512_mul_pd(_mm512_abs_pd(estimate), c->ulps));
    slack = _mm512_add_pd(slack, c->underflow);
    const __mmask8 bounded = _mm512_cmp_pd_mask(_mm512_mul_pd(f[2], x[1]), c->huge, _CMP_LT_OQ);
    slack = _mm512_mask_mov_pd(c->infinity, bounded, slack);
    *lower = _mm512_cvtpd_ps(_mm512_sub_pd(estimate, slack));
    *upper = _mm512_cvtpd_ps(_mm512_add_pd(estimate, slack));
}

/* The bounds of four rows (q (4, wide), facts (4, 3)) for T tokens, 2 to 6: lower and upper [t * stride + row] */
SCREEN_TARGET static void screen_few_avx512(const int8_t *q, size_t wide, const float *facts, const int16_t *X, size_t T,
                                            const double *x_facts, const screen_constants *c, float *lower,
                                            float *upper, size_t stride) {
    int32_t partial[SCREEN_TILE_TOKENS * SCREEN_TILE_ROWS * 16];
    __m256i sums[SCREEN_TILE_TOKENS];
    for (size_t start = 0; start < wide; start += SCREEN_TILE_COLUMNS) {
        const size_t lines = (wide - start < SCREEN_TILE_COLUMNS ? wide - start : SCREEN_TILE_COLUMNS) / 64;
        switch (T) {
#define TILE(T) screen_tile_##T(q + start, wide, X + start, wide, lines, partial)
        case 2: TILE(2); break;
        case 3: TILE(3); break;
        case 4: TILE(4); break;
        case 5: TILE(5); break;
        default: TILE(6);
#undef TILE
        }
        for (size_t t = 0; t < T; t++) {
            const __m256i sum = screen_fold(partial + t * SCREEN_TILE_ROWS * 16);
            sums[t] = start ? _mm256_add_epi64(sums[t], sum) : sum;
        }
    }
    __m512d f[3], x[3];
    for (int i = 0; i < 3; i++)
        f[i] = _mm512_broadcast_f64x4(_mm256_set_pd(facts[9 + i], facts[6 + i], facts[3 + i], facts[i]));
    for (size_t t = 0; t < T; t += 2) { /* two tokens at a time; an odd last one twice */
        const size_t u = t + 1 < T ? t + 1 : t;
        const __m512i both = _mm512_inserti64x4(_mm512_castsi256_si512(sums[t]), sums[u], 1);
        for (int i = 0; i < 3; i++)
            x[i] = _mm512_mask_mov_pd(_mm512_set1_pd(x_facts[3 * t + i]), 0xF0, _mm512_set1_pd(x_facts[3 * u + i]));
        __m256 low, high;
        screen_bounds(_mm512_cvtepi64_pd(both), f, x, c, &low, &high);
        _mm_storeu_ps(lower + t * stride, _mm256_castps256_ps128(low));
        _mm_storeu_ps(upper + t * stride, _mm256_castps256_ps128(high));
        if (u == t) continue;
        _mm_storeu_ps(lower + u * stride, _mm256_extractf128_ps(low, 1));
        _mm_storeu_ps(upper + u * stride, _mm256_extractf128_ps(high, 1));
    }
}

#endif
#endif
