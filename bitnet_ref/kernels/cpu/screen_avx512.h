/* The screen of head_screen.h for several tokens at once: four rows of the head against up to six tokens.
 *
 * One token waits for memory; with six the sums themselves are the limit, and most of the work for one token is
 * widening a row to int16. Here a row is widened once for all tokens, and vpdpwssd (VNNI) multiplies 32 pairs of int16
 * and adds them to 16 lanes: per 32 columns 4 rows to widen, 6 tokens to load, 24 products. In assembly for the same
 * reason as avx512_tile. The bounds are those of `screen_rows`, to the bit: the sum is exact, and the few steps after
 * it are the same.
 *
 * Measured, one thread of an Emerald Rapids, 4096 rows of 2560 columns, as a fraction of the rate of vpdpwssd; in
 *   brackets four rows against all tokens at a time, which read the tokens from L2 again and again:
 *   2 tokens 0.28 (0.27), 4: 0.55 (0.54), 6: 0.66 (0.56), 12: 0.69 (0.58), 16: 0.61 (0.56), 64: 0.66 (0.60).
 *   Two threads of an EPYC (Zen 4), 128256 rows, time as a multiple of one token's: 2, 3 and 4 tokens 1.03, 6 tokens 1.05;
 *   1.34, 1.45 and 1.51 for 2, 3 and 4 when these fetched into L1.
 *   Some 250 cycles of a tile (1,000 in products) are not products. The rows' facts by a permutation: no gain. */
#ifndef BITNET_REF_SCREEN_AVX512_H
#define BITNET_REF_SCREEN_AVX512_H

/* A lane sums two products of each 32 columns, and two lanes are added: 2 * 4096 / 16 * 127 * 32639 < 2^31. */
enum { SCREEN_TILE_ROWS = 4, SCREEN_TILE_TOKENS = 6, SCREEN_TILE_COLUMNS = 4096 };

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

/* out (T, 4, 16) int32: 16 partial sums of each row and token; 64 * lines columns. Fetches the next four rows into L2. */
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
            "prefetcht1 (%[next])\n\tprefetcht1 (%[next],%[wide])\n\t"                                               \
            "prefetcht1 (%[next],%[wide],2)\n\tprefetcht1 (%[next3])\n\t"                                            \
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
SCREEN_TILE(2) SCREEN_TILE(3) SCREEN_TILE(4) SCREEN_TILE(5) SCREEN_TILE(6)

/* 16 partial sums of each of two rows a b -> int64 sums: a b, four times */
SCREEN_TARGET static inline __m512i screen_fold_pair(const int32_t *partial) {
    const __m512i a = _mm512_loadu_si512(partial), b = _mm512_loadu_si512(partial + 16);
    const __m512i ab = _mm512_add_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b)); /* a b a b ... */
    const __m512i a64 = _mm512_srai_epi64(_mm512_slli_epi64(ab, 32), 32), b64 = _mm512_srai_epi64(ab, 32);
    return _mm512_add_epi64(_mm512_unpacklo_epi64(a64, b64), _mm512_unpackhi_epi64(a64, b64));
}

/* partial sums of 4 rows and a token -> ab ab cd cd */
SCREEN_TARGET static inline __m512i screen_fold_token(const int32_t *partial) {
    const __m512i ab = screen_fold_pair(partial), cd = screen_fold_pair(partial + 32);
    return _mm512_add_epi64(_mm512_shuffle_i64x2(ab, cd, 0x88), _mm512_shuffle_i64x2(ab, cd, 0xDD));
}

/* partial sums (4, 16) of two tokens -> the sums of the 4 rows of each */
SCREEN_TARGET static inline __m512i screen_fold(const int32_t *first, const int32_t *second) {
    const __m512i x = screen_fold_token(first), y = screen_fold_token(second);
    return _mm512_add_epi64(_mm512_shuffle_i64x2(x, y, 0x88), _mm512_shuffle_i64x2(x, y, 0xDD));
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
    enum { TOKEN = SCREEN_TILE_ROWS * 16 };
    int32_t partial[SCREEN_TILE_TOKENS * TOKEN];
    __m512i sums[SCREEN_TILE_TOKENS / 2]; /* of two tokens each; an odd last one twice */
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
        for (size_t t = 0; t < T; t += 2) {
            const __m512i both = screen_fold(partial + t * TOKEN, partial + (t + 1 < T ? t + 1 : t) * TOKEN);
            sums[t / 2] = start ? _mm512_add_epi64(sums[t / 2], both) : both;
        }
    }
    __m512d f[3], x[3];
    for (int i = 0; i < 3; i++)
        f[i] = _mm512_broadcast_f64x4(_mm256_set_pd(facts[9 + i], facts[6 + i], facts[3 + i], facts[i]));
    for (size_t t = 0; t < T; t += 2) {
        const size_t u = t + 1 < T ? t + 1 : t;
        for (int i = 0; i < 3; i++)
            x[i] = _mm512_mask_mov_pd(_mm512_set1_pd(x_facts[3 * t + i]), 0xF0, _mm512_set1_pd(x_facts[3 * u + i]));
        __m256 low, high;
        screen_bounds(_mm512_cvtepi64_pd(sums[t / 2]), f, x, c, &low, &high);
        _mm_storeu_ps(lower + t * stride, _mm256_castps256_ps128(low));
        _mm_storeu_ps(upper + t * stride, _mm256_castps256_ps128(high));
        if (u == t) continue;
        _mm_storeu_ps(lower + u * stride, _mm256_extractf128_ps(low, 1));
        _mm_storeu_ps(upper + u * stride, _mm256_extractf128_ps(high, 1));
    }
}

#endif
#endif
