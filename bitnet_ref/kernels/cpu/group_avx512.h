/* Ternary by groups with AVX-512: sums of three activations, looked up by five bits. See group.h.
 *
 * Three weights have 27 values. Their sums with three X are a table of 27 int32, two registers, and vpermi2d looks up
 * the sums of 16 rows at once, by the low five bits of each lane: one look-up and one addition for 48 weights. A word
 * of a row has six indices, three in each half: vpmulhuw moves the second and the third down, on other ports than the
 * look-up; one shift moves the upper half. 43 triples for 128 columns are seven words and a byte: 1.81 bits per weight, and
 * a 16-bit scale makes it 1.94 (Q2_0 of 128: 2.125).
 *
 * A panel has as many as 1280 rows, so that the tables of a chunk, 5.5 KB for each token, come from L2 once for all of
 * them. With panels of 256 rows they were read again for every 7.4 KB of codes, behind loads that wait for memory.
 *
 * Measured, one thread of an EPYC (Zen 4, 3.67 GHz) beside other programs, best of many bursts, K = 2560, G weights/s.
 *   1 token: codes in L2 95 (23 GB/s; 110 without scales and steps), from memory 86 (20.8 GB/s; in panels of 256 rows,
 *   with the near prefetch alone, 69), two threads 158 (38 GB/s).
 *   2 tokens 97, 4 tokens 104 to 118. A token of 4096 columns becomes tables in 5 us.
 * What bounds one token. 48 weights cost 2.8 operations, of which a core starts two per cycle at best: 34 weights per
 *   cycle, 30 GB/s. Measured on registers alone (cycles): vpermi2d 1.0, vpmulhuw 1.0, vpaddd 0.5, the three together
 *   1.67, so 24.5 GB/s, which is what L2 gives without scales and steps; these take 13%. So two cores cannot pass 42 to
 *   46 GB/s. Where memory gives 35 to 40 GB/s, long streams reach 0.94 to 0.96 of it; where it gives 50 or more, less.
 *   Decoding Bonsai-4B's shape at 35 GB/s: 0.75 to 0.84, the rest is attention (30 us of 900 per layer, 80 tokens),
 *   norms, RoPE and sums (22 us, one thread), and the beginning of each of four calls per layer.
 * Prefetch: 4 KB ahead into L1, and 32 KB ahead into L2, which bridges the times when memory answers late. The second
 *   gives, two threads from memory at 40 GB/s: 38.1 GB/s instead of 36.1; one thread 20.8 instead of 19.3; a whole step
 *   of 36 layers 4%. 16, 64 and 128 KB: the same. Into L2 alone: half. The scales too: the same.
 * What else was considered, weights per cycle of Zen 4 for one token (the look-up by triples: 25, at most 34):
 *   - int8 digits and vpdpbusd, as the layout of planes: 14, and four digits are needed (see group.h)
 *   - masked additions of float32, one for +1 and one for -1: 8; a product with codes widened to floats: fewer
 *   - pairs, 16 entries, vpermd: 17 to 22, on codes of 2 bits
 *   - bytes of sums of four weights, vpermi2b: 32, of which half is widening; three times slower on Intel
 * Tried (1 token, 4 tokens):
 *   - intrinsics, not assembly, for look-up and addition: 95, 63: GCC 12 adds the sums of a word first, and spills
 *   - six shifts, not vpmulhuw: 89, 117
 *   - no prefetch: the same from L3, 43 and 82 from memory instead of 80 and 107. Into L1 2 to 32 KB ahead: the same as
 *     4 KB; every second line, or into L2 alone: 50 to 63 instead of 71
 *   - vpmultishiftqb, not vpmulhuw: 93 for 95 in L2
 *   - the upper half of a word loaded 2 bytes further on, not shifted; and one fused multiply-add for step, scale and sum
 *     (equal bits for 16-bit scales): 1 to 2% in L2, nothing from memory
 *   - two or four chunks of 64 rows before the next rows, so that their sums are loaded once: 2% slower
 *   - a chunk of several panels of 256 rows in turn, the layout unchanged: two 74, four 62 instead of 69: the jumps
 *     between panels stop the hardware prefetcher
 *   - eight registers of rows at a time for one token: 2% faster; from memory 50 instead of 71 */
#ifndef BITNET_REF_GROUP_AVX512_H
#define BITNET_REF_GROUP_AVX512_H

#include "group.h"

#if defined(__x86_64__)
#include <immintrin.h>

#define GROUP_TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq")))
#define GROUP_INLINE GROUP_TARGET static inline __attribute__((always_inline))
#if defined(__clang__)
#define GROUP_UNROLL _Pragma("clang loop unroll(full)")
#else
#define GROUP_UNROLL _Pragma("GCC unroll 16")
#endif

/* X -> tables. Entry i = c0 + 3 c1 + 9 c2 is (c0 - 1) X0 + (c1 - 1) X1 + (c2 - 1) X2; the last five are not used. A
 * register holds X0 to X2 in the lanes 0 to 2, their negatives in 4 to 6 and zeros, of which each entry takes three.
 * Tried: masked additions, two for each weight: 24 cycles per table instead of 11 (there are too few mask registers). */
GROUP_TARGET static void group_tables(const int32_t *X, size_t triples, int32_t *tables) {
    __m512i take[3][2];
    for (int d = 0, power = 1; d < 3; d++, power *= 3)
        for (int half = 0; half < 2; half++) {
            int32_t lanes[16];
            for (int i = 0; i < 16; i++) {
                const int c = (16 * half + i) / power % 3;
                lanes[i] = c == 0 ? 4 + d : c == 2 ? d : 8;
            }
            take[d][half] = _mm512_loadu_si512(lanes);
        }
    for (size_t t = 0; t < triples; t++, X += 3) {
        __m512i x = _mm512_maskz_broadcast_i32x4(0x0077, _mm_loadu_si128((const __m128i *)X));
        x = _mm512_mask_sub_epi32(x, 0x0070, _mm512_setzero_si512(), x);
        for (int half = 0; half < 2; half++) {
            const __m512i a = _mm512_permutexvar_epi32(take[0][half], x), b = _mm512_permutexvar_epi32(take[1][half], x),
                          c = _mm512_permutexvar_epi32(take[2][half], x);
            _mm512_store_si512(tables + TRIPLE_ENTRIES * t + 16 * half, _mm512_add_epi32(_mm512_add_epi32(a, b), c));
        }
    }
}

/* 16 scales as floats */
GROUP_INLINE __m512 group_scales(const void *scales, size_t r, int kind) {
    if (kind == 0) return _mm512_loadu_ps((const float *)scales + r);
    const __m256i bits = _mm256_loadu_si256((const __m256i *)((const uint16_t *)scales + r));
    if (kind == 2) return _mm512_cvtph_ps(bits);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}

/* acc[0 .. 8) += sum * step * scale, each rounded */
GROUP_INLINE void group_add_8(double *acc, __m256i sum, __m512d step, __m256 scale) {
    const __m512d product = _mm512_mul_pd(_mm512_mul_pd(_mm512_cvtepi32_pd(sum), step), _mm512_cvtps_pd(scale));
    _mm512_store_pd(acc, _mm512_add_pd(_mm512_load_pd(acc), product));
}

/* the index of field f of every word, in its low five bits */
GROUP_INLINE __m512i group_index(__m512i word, const int f) {
    if (f >= 3) word = _mm512_srli_epi32(word, 16);
    if (f % 3 == 0) return word;
    return _mm512_mulhi_epu16(word, _mm512_set1_epi16((short)(1 << (16 - 5 * (f % 3)))));
}

/* sum + table[index]. In assembly: GCC 12 adds the sums of a word to each other first and keeps them in memory. */
GROUP_INLINE __m512i group_look_up(__m512i sum, __m512i low, __m512i high, __m512i index) {
    __asm__("vpermi2d %2, %3, %1\n\tvpaddd %1, %0, %0" : "+v"(sum), "+v"(index) : "v"(high), "v"(low));
    return sum;
}

/* sum += what each token's table holds for the indices */
#define LOOK_UP_IN(first_table)                                                                                        \
    GROUP_UNROLL                                                                                                       \
    for (int t = 0; t < T; t++) {                                                                                      \
        const int32_t *table = (first_table) + t * stride;                                                             \
        const __m512i low = _mm512_load_si512(table), high = _mm512_load_si512(table + 16);                            \
        GROUP_UNROLL                                                                                                   \
        for (int q = 0; q < 4; q++)                                                                                    \
            sum[4 * t + q] = group_look_up(sum[4 * t + q], low, high, index[q]);                                       \
    }

/* 64 rows of one chunk for T tokens: acc[t * rows + r] += their sums. near, far: what is prefetched meanwhile */
GROUP_INLINE void group_chunk_of(const int T, const group_shape *s, const uint8_t *codes, const group_chunk *x,
                                 const void *scales, int kind, size_t rows, double *acc, const uint8_t *near,
                                 const uint8_t *far) {
    __m512i sum[4 * GROUP_TABLE_TOKENS];
    const int32_t *tables = (const int32_t *)x->tokens;
    const size_t stride = s->token_bytes / sizeof *tables;
    GROUP_UNROLL
    for (int i = 0; i < 4 * T; i++) sum[i] = _mm512_setzero_si512();
    for (size_t j = 0; j < s->words; j++, codes += 4 * PANEL_ROWS, near += 4 * PANEL_ROWS, far += 4 * PANEL_ROWS, tables += TRIPLES_PER_WORD * TRIPLE_ENTRIES) {
        __m512i word[4];
        GROUP_UNROLL
        for (int q = 0; q < 4; q++) {
            word[q] = _mm512_loadu_si512(codes + q * VECTOR_BYTES);
            _mm_prefetch((const char *)near + q * VECTOR_BYTES, _MM_HINT_T0);
            _mm_prefetch((const char *)far + q * VECTOR_BYTES, _MM_HINT_T1);
        }
        GROUP_UNROLL
        for (int f = 0; f < TRIPLES_PER_WORD; f++) {
            __m512i index[4];
            GROUP_UNROLL
            for (int q = 0; q < 4; q++) index[q] = group_index(word[q], f);
            LOOK_UP_IN(tables + f * TRIPLE_ENTRIES)
        }
    }
    for (size_t i = 0; i < s->tails; i++, codes += PANEL_ROWS, tables += TRIPLE_ENTRIES) {
        __m512i index[4];
        GROUP_UNROLL
        for (int q = 0; q < 4; q++) index[q] = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)codes + q));
        LOOK_UP_IN(tables)
    }
    GROUP_UNROLL
    for (int q = 0; q < 4; q++) {
        const __m512 scale = group_scales(scales, 16 * q, kind);
        const __m256 low = _mm512_castps512_ps256(scale), high = _mm512_extractf32x8_ps(scale, 1);
        GROUP_UNROLL
        for (int t = 0; t < T; t++) {
            const __m512d step = _mm512_set1_pd(x->steps[t]);
            group_add_8(acc + t * rows + 16 * q, _mm512_castsi512_si256(sum[4 * t + q]), step, low);
            group_add_8(acc + t * rows + 16 * q + 8, _mm512_extracti64x4_epi64(sum[4 * t + q], 1), step, high);
        }
    }
}
#undef LOOK_UP_IN

/* the codes so many bytes further on, which are those of `next` beyond the end */
static inline const uint8_t *group_ahead(const uint8_t *codes, ptrdiff_t bytes, const uint8_t *end, const uint8_t *next) {
    return next && bytes >= end - codes ? next + (bytes - (end - codes)) : codes + bytes;
}

/* `rows` rows of a panel for T tokens, 1 to GROUP_TABLE_TOKENS: `group_panel` of group_steps.h. acc is aligned. */
#define GROUP_PANEL_OF(T)                                                                                              \
    GROUP_TARGET static void group_panel_avx512_##T(const group_shape *s, const uint8_t *panel, const void *scales,    \
                                                    int kind, size_t rows, const group_chunk *x, double *acc,          \
                                                    const uint8_t *next) {                                             \
        const size_t size = kind == 0 ? 4 : 2;                                                                         \
        const uint8_t *end = panel + s->n_chunks * s->code_bytes;                                                      \
        for (size_t c = 0; c < s->n_chunks; c++, x++, panel += s->code_bytes)                                          \
            for (size_t r = 0; r < rows; r += PANEL_ROWS) {                                                            \
                const uint8_t *codes = panel + r / PANEL_ROWS * s->subpanel_bytes;                                     \
                group_chunk_of(T, s, codes, x, (const char *)scales + (c * s->rows + r) * size, kind, rows, acc + r,   \
                               group_ahead(codes, GROUP_NEAR, end, next), group_ahead(codes, GROUP_FAR, end, next));   \
            }                                                                                                          \
    }
GROUP_PANEL_OF(1)
GROUP_PANEL_OF(2)
GROUP_PANEL_OF(3)
GROUP_PANEL_OF(4)

static void group_panel_avx512(const group_shape *s, const uint8_t *panel, const void *scales, int kind, size_t rows,
                               const group_chunk *x, size_t T, double *acc, ternary_panel_fn product, void *scratch,
                               const uint8_t *next) {
    (void)product, (void)scratch;
    memset(acc, 0, T * rows * sizeof *acc);
    switch (T) {
    case 1: group_panel_avx512_1(s, panel, scales, kind, rows, x, acc, next); break;
    case 2: group_panel_avx512_2(s, panel, scales, kind, rows, x, acc, next); break;
    case 3: group_panel_avx512_3(s, panel, scales, kind, rows, x, acc, next); break;
    default: group_panel_avx512_4(s, panel, scales, kind, rows, x, acc, next);
    }
}

#endif
#endif
