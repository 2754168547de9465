/* C = A B with both operands rounded to bfloat16 and sums in float32, by AVX-512's vdpbf16ps: for gradients
 * (training/compiled.py). Plain versions: `bf16_product_plain`; training/ops.py, `product_bfloat16`.
 *
 * The instruction multiplies pairs, so a word holds two numbers of one column that follow each other. Operands are packed
 * in panels: line p of a panel has the pairs (2p, 2p + 1) of 64 columns of B, or of 16 rows of A. Four rows of A times 64
 * columns of B are 16 registers of sums. B's panels of BF16_K numbers stay in L1 while the rows of A pass.
 * It sums in an order of its own, and takes denormal numbers as 0.
 *
 * Measured on a Zen 5 EPYC, one thread, packing included, G float operations/s: 512 x 256 by 256 x 768 490, 256 x 768 by
 * 768 x 512 461, 4096 x 512 by 512 x 256 476, 512 x 4096 by 4096 x 256 460; BLAS in float32 214 to 238. Packed operands in cache
 * 530. In a training step, whose operands are not in the cache, 290 to 440. Blocks of 128 or 512 numbers: no faster. */
#ifndef BITNET_REF_BFLOAT16_AVX512_H
#define BITNET_REF_BFLOAT16_AVX512_H

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

/* a matrix of floats of which either stride may be 1 */
typedef struct {
    const float *data;
    size_t k_stride, n_stride; /* between numbers that are summed, and between others */
} bf16_operand;

enum { BF16_K = 256, BF16_ROWS = 128 /* of A, packed at a time */, BF16_A = 16, BF16_B = 64 };

static inline size_t bf16_panel_bytes(size_t n, size_t width) { return (n + width - 1) / width * width * (BF16_K / 2) * 4; }
static inline size_t bf16_scratch(size_t N) { return bf16_panel_bytes(N, BF16_B) + bf16_panel_bytes(BF16_ROWS, BF16_A); }

/* the nearest number of 8 significant bits, half to even */
static inline float bf16_round(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    bits = (bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000u;
    if (!isnan(x)) memcpy(&x, &bits, sizeof x);
    return x;
}

/* C (M, N) = A B, each sum from the first product to the last */
static void bf16_product_plain(bf16_operand a, bf16_operand b, size_t M, size_t K, size_t N, float *c, void *scratch) {
    (void)scratch;
    for (size_t m = 0; m < M; m++) {
        for (size_t n = 0; n < N; n++) c[m * N + n] = 0;
        for (size_t k = 0; k < K; k++) {
            const float by = bf16_round(a.data[m * a.n_stride + k * a.k_stride]);
            for (size_t n = 0; n < N; n++) c[m * N + n] += by * bf16_round(b.data[k * b.k_stride + n * b.n_stride]);
        }
    }
}

/* compilers that know the instruction */
#if defined(__x86_64__) && (defined(__clang__) ? __clang_major__ >= 9 : __GNUC__ >= 10)
#include <immintrin.h>
#define BF16_TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")))
#define BF16_INLINE BF16_TARGET static inline __attribute__((always_inline))

/* the first `n` of 16 lanes */
static inline uint16_t bf16_lanes(size_t n) { return n >= 16 ? 0xffff : (uint16_t)((1u << n) - 1); }

/* v[i][j] = v[j][i] of 16 x 16 words, in place */
__attribute__((target("avx512f"), always_inline)) static inline void transpose_words(__m512i *v) {
    __m512i t[16];
#define EACH(n) _Pragma("GCC unroll 16") for (int i = 0; i < n; i++)
    EACH(8) t[2 * i] = _mm512_unpacklo_epi32(v[2 * i], v[2 * i + 1]), t[2 * i + 1] = _mm512_unpackhi_epi32(v[2 * i], v[2 * i + 1]);
    EACH(4) {
        v[4 * i] = _mm512_unpacklo_epi64(t[4 * i], t[4 * i + 2]), v[4 * i + 1] = _mm512_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
        v[4 * i + 2] = _mm512_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
        v[4 * i + 3] = _mm512_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
    }
    EACH(4) {
        t[i] = _mm512_shuffle_i32x4(v[i], v[4 + i], 0x88), t[4 + i] = _mm512_shuffle_i32x4(v[i], v[4 + i], 0xDD);
        t[8 + i] = _mm512_shuffle_i32x4(v[8 + i], v[12 + i], 0x88), t[12 + i] = _mm512_shuffle_i32x4(v[8 + i], v[12 + i], 0xDD);
    }
    EACH(4) {
        v[i] = _mm512_shuffle_i32x4(t[i], t[8 + i], 0x88), v[8 + i] = _mm512_shuffle_i32x4(t[i], t[8 + i], 0xDD);
        v[4 + i] = _mm512_shuffle_i32x4(t[4 + i], t[12 + i], 0x88), v[12 + i] = _mm512_shuffle_i32x4(t[4 + i], t[12 + i], 0xDD);
    }
#undef EACH
}

/* K numbers of n columns -> panels of `width` columns, a line of words for each pair, 0 for columns that there are not */
BF16_TARGET static void bf16_pack(bf16_operand x, size_t K, size_t n, size_t width, uint32_t *out) {
    const size_t pairs = (K + 1) / 2;
    for (size_t first = 0; first < n; first += width, out += pairs * width) {
        for (size_t i = 0; i < width; i += 16) {
            const size_t columns = first + i < n ? n - first - i : 0;
            const float *data = x.data + (first + i) * x.n_stride;
            const __mmask16 here = bf16_lanes(columns);
            if (x.n_stride == 1 || !columns) {
                for (size_t p = 0; p < pairs; p++) {
                    const float *low = data + 2 * p * x.k_stride;
                    const __m512 a = _mm512_maskz_loadu_ps(here, low);
                    const __m512 b = _mm512_maskz_loadu_ps(2 * p + 1 < K ? here : 0, low + x.k_stride);
                    const __m512i word = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(a));
                    const __m512i above = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(b));
                    _mm512_storeu_si512(out + p * width + i, _mm512_or_si512(word, _mm512_slli_epi32(above, 16)));
                }
                continue;
            }
            for (size_t p = 0; p < pairs; p += 16) {
                const size_t left = K - 2 * p, lines = pairs - p < 16 ? pairs - p : 16;
                const __mmask16 low = bf16_lanes(left), high = bf16_lanes(left > 16 ? left - 16 : 0);
                __m512i v[16];
                for (size_t j = 0; j < 16; j++) {
                    const float *row = data + j * x.n_stride + 2 * p;
                    const __mmask16 some = j < columns ? 0xffff : 0;
                    const __m512 a = _mm512_maskz_loadu_ps(low & some, row);
                    v[j] = (__m512i)_mm512_cvtne2ps_pbh(_mm512_maskz_loadu_ps(high & some, row + 16), a);
                }
                transpose_words(v);
                for (size_t j = 0; j < lines; j++) _mm512_storeu_si512(out + (p + j) * width + i, v[j]);
            }
        }
    }
}

/* `rows` x n sums, n <= 64, which are added to c or replace it */
BF16_INLINE void bf16_block(const uint32_t *a, const uint32_t *b, size_t pairs, size_t n, int add, float *c, size_t stride,
                            const int rows) {
    __m512 sum[4][4];
    __mmask16 mask[4];
#define BF16_EACH(i, count) _Pragma("GCC unroll 4") for (int i = 0; i < count; i++)
    BF16_EACH(j, 4) mask[j] = bf16_lanes(n > 16u * (unsigned)j ? n - 16u * (unsigned)j : 0);
    BF16_EACH(i, rows) BF16_EACH(j, 4) sum[i][j] = _mm512_maskz_loadu_ps(add ? mask[j] : 0, c + i * stride + 16 * j);
    for (size_t p = 0; p < pairs; p++) {
        __m512bh columns[4];
        BF16_EACH(j, 4) columns[j] = (__m512bh)_mm512_loadu_si512(b + p * BF16_B + 16 * j);
        BF16_EACH(i, rows) {
            const __m512bh row = (__m512bh)_mm512_set1_epi32((int)a[p * BF16_A + i]);
            BF16_EACH(j, 4) sum[i][j] = _mm512_dpbf16_ps(sum[i][j], columns[j], row);
        }
    }
    BF16_EACH(i, rows) BF16_EACH(j, 4) _mm512_mask_storeu_ps(c + i * stride + 16 * j, mask[j], sum[i][j]);
#undef BF16_EACH
}

/* C (M, N) = A B; scratch: bf16_scratch(N) bytes */
BF16_TARGET static void bf16_product_avx512(bf16_operand a, bf16_operand b, size_t M, size_t K, size_t N, float *c,
                                            void *scratch) {
    uint32_t *columns = scratch, *rows = columns + bf16_panel_bytes(N, BF16_B) / 4;
    for (size_t k = 0; k < K; k += BF16_K) {
        const size_t here = K - k < BF16_K ? K - k : BF16_K, pairs = (here + 1) / 2;
        const bf16_operand b_here = {b.data + k * b.k_stride, b.k_stride, b.n_stride};
        bf16_pack(b_here, here, N, BF16_B, columns);
        for (size_t first = 0; first < M; first += BF16_ROWS) {
            const size_t count = M - first < BF16_ROWS ? M - first : BF16_ROWS;
            const bf16_operand a_here = {a.data + k * a.k_stride + first * a.n_stride, a.k_stride, a.n_stride};
            bf16_pack(a_here, here, count, BF16_A, rows);
            for (size_t n = 0; n < N; n += BF16_B)
                for (size_t m = 0; m < count; m += 4) {
                    const uint32_t *row = rows + m / BF16_A * pairs * BF16_A + m % BF16_A, *column = columns + n * pairs;
                    float *to = c + (first + m) * N + n;
                    const int add = k > 0;
                    switch (count - m) {
                        case 1: bf16_block(row, column, pairs, N - n, add, to, N, 1); break;
                        case 2: bf16_block(row, column, pairs, N - n, add, to, N, 2); break;
                        case 3: bf16_block(row, column, pairs, N - n, add, to, N, 3); break;
                        default: bf16_block(row, column, pairs, N - n, add, to, N, 4);
                    }
                }
        }
    }
}

static int has_avx512_bf16(void) {
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq");
}
#else
#define bf16_product_avx512 bf16_product_plain
static int has_avx512_bf16(void) { return 0; }
#endif

#endif
