/* Matrices in blocks (dense_blocks.h; not Q6_K, whose factors are of 16 columns) times tokens in float32, where there is AMX.
 * Sums within a block are of integers, which no order changes. So tiles multiply many tokens, and AVX-512 few, with equal bits.
 *
 * Of 32 columns, those of a block, a token has
 *     x = u (2^24 d_0 + 2^16 d_1 + 2^8 d_2 + d_3) + rest     d_i -128 .. 127; u a power of two for which |x| < 2^30 u
 * The rest is 0 for numbers above 2^-6 of the largest, else at most u / 2. A block whose weights are f q + g adds to y, in float32
 * by fused multiply-adds, with S_i the sum of d_i q and s that of x by halves:
 *     p = S_3, p = 2^8 S_2 + p, p = 2^16 S_1 + p, p = 2^24 S_0 + p;   y = (f u) p + y, y = g s + y
 * f q + g itself is not rounded, as it is where weights become float32. Plain version: check_kernels.c, `block_tile_sum`.
 *
 * Few tokens: vpdpbusd multiplies codes, q + an offset, of 4 columns of 16 rows by the d_i of a token.
 * Many tokens: the instruction (C += A B, tdpbf16ps) makes p.
 *   A  16 tokens: 2^(24 - 8 i) d_i of the block's columns as bfloat16, which is exact; i from 3 to 0. Loaded once for 32 rows
 *   B  16 rows of the matrix: a line is two columns, q as bfloat16. Two blocks of 32 rows are unpacked to L1 while the two before
 *      are multiplied
 *   C  p of 16 tokens and 16 rows, in four tiles: stored, and added to y while the next four are made
 *
 * Measured, one thread of a Sapphire Rapids beside little else, 1536 x 1536 in L2, G multiply-adds/s, dense_rows.h (85 at most)
 * and this; the root mean square of the error against float64 is the same or up to 1.5 times as large (Q4_1, Q5_K):
 *   tokens       1         4         8         16         64         256
 *   Q8_0     18, 20    34, 40    35, 53    49,  96    71, 129    70, 117
 *   Q4_0     23, 26    38, 42    39, 80    51, 120    72, 146    71, 134
 *   Q5_0     14, 21    30, 39    35, 73    48, 115    70, 141    70, 130
 *   Q4_1     22, 25    38, 41    38, 75    51, 113    72, 134    71, 123
 *   Q4_K     22, 27    36, 46    39, 83    51, 115    72, 134    71, 126
 *   Q5_K     15, 21    31, 39    35, 70    49, 101    71, 130    71, 119
 *   16384 x 1536, from memory, one token: 0.91 to 1.02, Q5_0 1.3, Q5_K 1.1 times as fast.
 * Of 64 tokens' time products are a third, unpacking, adding and loads of A a seventh each: left out one by one, Q4_0, 131 G
 *   became 200, 173, 160 and 160. They hardly overlap.
 * Tried:
 *   - three parts of 8 bits, bfloat16 as it is (dense_amx.h), whose sums depend on the order, so that tiles multiply few tokens
 *     too: 150 G for 64 tokens, and 0.5 to 0.6 of dense_rows.h for one, 0.7 with its parts in one tile. Its products alone
 *     reached 43 G, and unpacking alone 23, and together they took the sum of both times
 *   - 16 rows at a time: 0.9 of the speed for 64 tokens. 256 columns unpacked at a time: 0.88 (16 tokens) to 0.93; 128: 0.95
 *   - all lines of a chunk of one token's rows prefetched before it is multiplied, not with each block: 0.75 to 0.9
 */
#ifndef BITNET_REF_BLOCKS_AMX_H
#define BITNET_REF_BLOCKS_AMX_H

#include "dense_amx.h"

#if defined(BITNET_REF_HAS_AMX)

enum { DIGITS = 4, BLOCK_FEW = 4 /* tokens */, BLOCK_GROUPS = 32 /* of tokens at a time */ };
enum { BLOCK_SUPER = 8 /* times 32 columns: a block of Q4_K or Q5_K */ };

/* Of a block's columns of up to 16 tokens */
typedef struct {
    float unit[TILE_TOKENS], sum[TILE_TOKENS];
} block_facts;

/* Of a block's columns of one of few tokens: dword 4 i + j has digit DIGITS - 1 - j of columns 4 i .. 4 i + 3 */
typedef struct {
    int8_t digits[TILE_COLUMNS * DIGITS];
    int32_t less[3][DIGITS]; /* -8, -16 and -128 times the sums of digits */
    float unit, sum;
} block_token;

/* of all tokens' parts */
static size_t block_bytes_amx(size_t M, size_t K) {
    if (M <= BLOCK_FEW) return M * (K / 32) * sizeof(block_token);
    return (M + TILE_TOKENS - 1) / TILE_TOKENS * (K / 32) * (DIGITS * AMX_TILE_BYTES + sizeof(block_facts));
}

#define BLOCK_TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,fma,f16c")))
#define BLOCK_INLINE BLOCK_TARGET static inline __attribute__((always_inline))

/* 32 columns of a token -> whole[0], whole[1], numbers in units of *unit with 128 added to the digits but the first, and
 * *sum by halves. What is not finite makes the unit NaN. */
BLOCK_INLINE void block_whole(const float *x, __m512i *whole, float *unit, float *sum) {
    const __m512 a = _mm512_loadu_ps(x), b = _mm512_loadu_ps(x + 16), v = _mm512_add_ps(a, b);
    const __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    *sum = _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
    const __m512 size = _mm512_abs_ps(a), other = _mm512_abs_ps(b);
    const uint32_t largest = _mm512_reduce_max_epu32(_mm512_max_epu32((__m512i)size, (__m512i)other)); /* NaN above all */
    const uint32_t exponent = largest >> 23 < 40 ? 40 : largest >> 23; /* of the largest: < 2^(exponent - 126) */
    const int is_finite = exponent < 255;
    const __m512 times = _mm512_set1_ps(is_finite ? bits_float((283 - exponent) << 23) : 0); /* 2^(156 - exponent) */
    *unit = is_finite ? bits_float((exponent - 29) << 23) : NAN;
    const __m512i bias = _mm512_set1_epi32(0x808080);
    whole[0] = _mm512_add_epi32(_mm512_cvtps_epi32(_mm512_mul_ps(a, times)), bias);
    whole[1] = _mm512_add_epi32(_mm512_cvtps_epi32(_mm512_mul_ps(b, times)), bias);
}

/* The parts of the 16 tokens from m on (M, K), K a multiple of 32 -> their place among `parts` (block_bytes_amx(M, K)): of few
 * tokens block_token (M, K / 32); else tiles (M / 16, K / 32, DIGITS, tokens, 32), the columns of each 4 in the order 0, 2,
 * 1, 3, then block_facts (M / 16, K / 32) */
BLOCK_TARGET static void block_split_amx(const float *x, size_t M, size_t K, size_t m, void *parts) {
    const size_t tokens = M - m < TILE_TOKENS ? M - m : TILE_TOKENS, blocks = K / 32;
    const __m512i by_digit = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15));
    const __m512i bias = _mm512_set1_epi32(0x808080);
    __m512i whole[2];
    if (M <= BLOCK_FEW) {
        block_token *out = (block_token *)parts + m * blocks;
        for (size_t n = 0; n < tokens * blocks; n++, out++) {
            block_whole(x + m * K + 32 * n, whole, &out->unit, &out->sum);
            __m512i sums = _mm512_setzero_si512(); /* of four dwords, in the order of digits */
            for (int i = 0; i < 2; i++) {
                const __m512i digits = _mm512_shuffle_epi8(_mm512_xor_si512(whole[i], bias), by_digit);
                _mm512_storeu_si512(out->digits + 64 * i, digits);
                sums = _mm512_dpbusd_epi32(sums, _mm512_set1_epi8(1), digits);
            }
            const __m256i half = _mm256_add_epi32(_mm512_castsi512_si256(sums), _mm512_extracti64x4_epi64(sums, 1));
            const __m128i all = _mm_add_epi32(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
            const __m128i less = _mm_sub_epi32(_mm_setzero_si128(), all);
            _mm_storeu_si128((__m128i *)out->less[0], _mm_slli_epi32(less, 3));
            _mm_storeu_si128((__m128i *)out->less[1], _mm_slli_epi32(less, 4));
            _mm_storeu_si128((__m128i *)out->less[2], _mm_slli_epi32(less, 7));
        }
        return;
    }
    const size_t groups = (M + TILE_TOKENS - 1) / TILE_TOKENS, group = m / TILE_TOKENS;
    block_facts *facts = (block_facts *)((char *)parts + groups * blocks * DIGITS * AMX_TILE_BYTES) + group * blocks;
    char *out = (char *)parts + group * blocks * DIGITS * AMX_TILE_BYTES;
    uint16_t order[32]; /* the upper half of each float */
    for (int i = 0; i < 32; i++) order[i] = (uint16_t)(2 * (i / 4 * 4 + "\0\2\1\3"[i % 4]) + 1);
    const __m512i halves = _mm512_loadu_si512(order);
    for (size_t k = 0; k < blocks; k++, facts++, out += DIGITS * tokens * VECTOR_BYTES)
        for (size_t t = 0; t < tokens; t++) {
            block_whole(x + (m + t) * K + 32 * k, whole, facts->unit + t, facts->sum + t);
            for (int p = 0; p < DIGITS; p++) { /* the last digit first */
                __m512i v[2];
                for (int i = 0; i < 2; i++) {
                    const __m512i low = _mm512_and_si512(_mm512_srli_epi32(whole[i], (unsigned)(8 * p)), _mm512_set1_epi32(255));
                    const __m512i digit = p < 3 ? _mm512_sub_epi32(low, _mm512_set1_epi32(128)) : _mm512_srai_epi32(whole[i], 24);
                    v[i] = (__m512i)_mm512_mul_ps(_mm512_cvtepi32_ps(digit), _mm512_set1_ps((float)(1 << 8 * p)));
                }
                _mm512_storeu_si512(out + ((size_t)p * tokens + t) * VECTOR_BYTES, _mm512_permutex2var_epi16(v[0], halves, v[1]));
            }
        }
}

/* What 16 rows have for more than one block of 32 columns, a lane for each */
typedef struct {
    __m512 factors[BLOCK_SUPER][2]; /* f and g */
    u32v_avx512 fifth[8];           /* of Q5_K: bit j of a byte belongs to block j */
} block_header;

#define BLOCK_HAS_SUPER(kind) (kind == Q4_K || kind == Q5_K)
#define BLOCK_HAS_OFFSET(kind) (kind == Q4_1 || BLOCK_HAS_SUPER(kind))

/* Reads that of n blocks from b on. places: of the rows, from the first one */
BLOCK_INLINE void block_read_header(const int kind, const uint8_t *b, size_t row, size_t n, __m512i places,
                                    block_header *header) {
    if (!BLOCK_HAS_SUPER(kind)) {
        for (size_t j = 0; j < n; j++) {
            const u32v_avx512 pairs = (u32v_avx512)_mm512_i32gather_epi32(places, b + j * DENSE_KINDS[kind].bytes, 1);
            header->factors[j][0] = (__m512)half_of_avx512(pairs, 0);
            if (kind == Q4_1) header->factors[j][1] = (__m512)half_of_avx512(pairs, 1);
        }
        return;
    }
    u32v_avx512 v[4];
    transpose_avx512((const char *)b, row, v); /* 6 bits each: see block_factors */
    const __m512 d = (__m512)half_of_avx512(v[0], 0), e = (__m512)half_of_avx512(v[0] ^ 0x80000000u, 1);
    for (int i = 0; i < 4; i++) {
        const u32v_avx512 scale = v[1] >> 8 * i, minimum = v[2] >> 8 * i, low = v[3] >> 8 * i;
#define PRODUCT(d, q) _mm512_mul_ps(d, _mm512_cvtepi32_ps((__m512i)(q)))
        header->factors[i][0] = PRODUCT(d, scale & 63), header->factors[i][1] = PRODUCT(e, minimum & 63);
        header->factors[4 + i][0] = PRODUCT(d, (low & 15) | (scale >> 2 & 48));
        header->factors[4 + i][1] = PRODUCT(e, (low >> 4 & 15) | (minimum >> 2 & 48));
#undef PRODUCT
    }
    if (kind != Q5_K) return;
    transpose_avx512((const char *)b + 16, row, header->fifth);
    transpose_avx512((const char *)b + 32, row, header->fifth + 4);
}

/* How many blocks `block_codes` reads */
#define BLOCK_READ(kind) (BLOCK_HAS_SUPER(kind) ? 2 : 1)

/* Block j from b on, or j and j + 1: codes (8) of each, four columns of 16 rows in each vector */
BLOCK_INLINE void block_codes(const int kind, const uint8_t *b, size_t row, size_t j, __m512i places, const block_header *header,
                              u32v_avx512 (*codes)[8]) {
    const uint8_t *at = b + (kind == Q4_K ? 16 + j * 16 : kind == Q5_K ? 48 + j * 16 : j * DENSE_KINDS[kind].bytes);
    const u32v_avx512 low = (u32v_avx512){0} + 0x0F0F0F0F;
    u32v_avx512 *first = codes[0], *second = codes[BLOCK_HAS_SUPER(kind)];
    if (kind == Q8_0 || BLOCK_HAS_SUPER(kind)) {
        transpose_avx512((const char *)at + (kind == Q8_0 ? 2 : 0), row, first);
        transpose_avx512((const char *)at + (kind == Q8_0 ? 18 : 16), row, first + 4);
    } else {
        transpose_avx512((const char *)at + (kind == Q4_0 ? 2 : kind == Q4_1 ? 4 : 6), row, first);
    }
    if (kind == Q8_0) {
        for (int i = 0; i < 8; i++) first[i] ^= 0x80808080;
        return;
    }
    for (int i = 0; i < (BLOCK_HAS_SUPER(kind) ? 8 : 4); i++) {
        second[BLOCK_HAS_SUPER(kind) ? i : 4 + i] = first[i] >> 4 & low;
        first[i] &= low;
    }
    if (kind == Q5_0) { /* bits of 4 columns -> 16 in their bytes */
        uint32_t spread[16];
        for (uint32_t i = 0; i < 16; i++) spread[i] = ((i & 1) | (i & 2) << 7 | (i & 4) << 14 | (i & 8) << 21) << 4;
        const __m512i table = _mm512_loadu_si512(spread), bits = _mm512_i32gather_epi32(places, at + 2, 1);
        _Pragma("GCC unroll 8") for (unsigned i = 0; i < 8; i++)
            first[i] |= (u32v_avx512)_mm512_permutexvar_epi32(_mm512_srli_epi32(bits, 4 * i), table);
    }
    for (size_t i = 0; i < 8 && kind == Q5_K; i++) {
        first[i] |= (header->fifth[i] >> (unsigned)j & 0x01010101) << 4;
        second[i] |= (header->fifth[i] >> (unsigned)(j + 1) & 0x01010101) << 4;
    }
}

/* Prefetches the part-th of `parts` of `bytes` at b of each row, and what is as far in the rows to come. */
BLOCK_INLINE void block_prefetch(const uint8_t *b, size_t row, size_t bytes, size_t far, size_t part, size_t parts) {
    for (size_t r = part * AMX_ROWS / parts; r < (part + 1) * AMX_ROWS / parts; r++)
        for (size_t i = 0; i < bytes; i += 64) prefetch_row(b + r * row + i, b + r * row + i + far);
}

/* -- few tokens -- */

/* y of T tokens += a block of 32 columns */
BLOCK_INLINE void block_multiply(const int kind, const size_t T, const u32v_avx512 *codes, const __m512 *factors,
                                 const block_token *x, size_t stride, __m512 *y) {
    _Pragma("GCC unroll 4") for (size_t t = 0; t < T; t++) {
        const block_token *of = x + t * stride;
        __m512i sums[DIGITS];
        const int32_t *less = of->less[kind == Q4_0 ? 0 : kind == Q5_0 ? 1 : 2]; /* for the codes' offset */
        _Pragma("GCC unroll 4") for (int j = 0; j < DIGITS; j++)
            sums[j] = BLOCK_HAS_OFFSET(kind) ? _mm512_setzero_si512() : _mm512_set1_epi32(less[j]);
        _Pragma("GCC unroll 8") for (int i = 0; i < 8; i++) _Pragma("GCC unroll 4") for (int j = 0; j < DIGITS; j++) {
            int32_t digits;
            memcpy(&digits, of->digits + 16 * i + 4 * j, sizeof digits);
            sums[j] = _mm512_dpbusd_epi32(sums[j], (__m512i)codes[i], _mm512_set1_epi32(digits));
        }
        __m512 p = _mm512_cvtepi32_ps(sums[0]);
        for (int j = 1; j < DIGITS; j++) p = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sums[j]), _mm512_set1_ps((float)(1 << 8 * j)), p);
        y[t] = _mm512_fmadd_ps(_mm512_mul_ps(factors[0], _mm512_set1_ps(of->unit)), p, y[t]);
        if (BLOCK_HAS_OFFSET(kind)) y[t] = _mm512_fmadd_ps(factors[1], _mm512_set1_ps(of->sum), y[t]);
    }
}

BLOCK_INLINE void block_few(const int kind, const size_t T, const uint8_t *w, size_t rows, size_t K, const block_token *x,
                            float *y, size_t y_stride, __m512i places) {
    const size_t row = dense_row_bytes(kind, K), blocks = K / 32, far = bytes_ahead(AMX_ROWS, row);
    for (size_t n = 0; n < rows; n += AMX_ROWS) {
        __m512 sums[BLOCK_FEW];
        for (size_t t = 0; t < T; t++) sums[t] = _mm512_setzero_ps();
        for (size_t k = 0; k < blocks; k += BLOCK_SUPER) {
            const size_t some = blocks - k < BLOCK_SUPER ? blocks - k : BLOCK_SUPER;
            const uint8_t *b = w + n * row + dense_row_bytes(kind, 32 * k);
            block_header header;
            block_read_header(kind, b, row, some, places, &header);
            for (size_t j = 0; j < some; j += BLOCK_READ(kind)) {
                u32v_avx512 codes[2][8];
                block_prefetch(b, row, dense_row_bytes(kind, 32 * some), far, j / BLOCK_READ(kind), some / BLOCK_READ(kind));
                block_codes(kind, b, row, j, places, &header, codes);
                block_multiply(kind, T, codes[0], header.factors[j], x + k + j, blocks, sums);
                if (BLOCK_HAS_SUPER(kind)) block_multiply(kind, T, codes[1], header.factors[j + 1], x + k + j + 1, blocks, sums);
            }
        }
        const __mmask16 wanted = (__mmask16)(rows - n < AMX_ROWS ? (1u << (rows - n)) - 1 : 0xFFFF);
        for (size_t t = 0; t < T; t++) _mm512_mask_storeu_ps(y + t * y_stride + n, wanted, sums[t]);
    }
}

/* -- many tokens -- */

enum { BLOCK_PANELS = 2 /* of 16 rows, for which tokens are loaded once */, BLOCK_ROWS = BLOCK_PANELS * AMX_ROWS };
enum { BLOCK_UNIT = 2 /* blocks at a time */ };

/* Two blocks of 32 rows */
typedef struct {
    _Alignas(64) uint32_t weights[BLOCK_PANELS][BLOCK_UNIT][TILE_COLUMNS / 2][AMX_ROWS]; /* pairs of q, as bfloat16 */
    __m512 factors[BLOCK_PANELS][BLOCK_UNIT][2];                                         /* f and g */
} block_weights;

/* One or two panels that are being unpacked */
typedef struct {
    const uint8_t *w; /* the first row */
    size_t row, far, panels, done;
    size_t at, count; /* the first block, and how many */
    block_weights *to;
    block_header headers[BLOCK_PANELS];
} block_unpacking;

/* codes of a block -> q as bfloat16. table: q of each code, looked up by the low 5 bits of words */
BLOCK_INLINE void block_lines(const int kind, const u32v_avx512 *codes, __m512i table, uint32_t (*lines)[AMX_ROWS]) {
    for (int i = 0; i < 8; i++) {
        __m512i even, odd; /* columns 0 and 2, 1 and 3 */
        if (kind == Q8_0) {
#define NUMBER(left) _mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32((__m512i)(codes[i] ^ 0x80808080), left), 24))
#define PAIR(a, b) _mm512_mask_blend_epi16(0xAAAAAAAA, _mm512_srli_epi32((__m512i)a, 16), (__m512i)b)
            even = PAIR(NUMBER(24), NUMBER(8)), odd = PAIR(NUMBER(16), NUMBER(0));
#undef PAIR
#undef NUMBER
        } else {
            even = _mm512_permutexvar_epi16((__m512i)codes[i], table);
            odd = _mm512_permutexvar_epi16((__m512i)(codes[i] >> 8), table);
        }
        _mm512_store_si512(lines[2 * i], even);
        _mm512_store_si512(lines[2 * i + 1], odd);
    }
}

/* Unpacks panels until `goal` of them are done. */
BLOCK_INLINE void block_unpack_to(const int kind, block_unpacking *u, size_t goal, __m512i table, __m512i places) {
    const size_t super = DENSE_KINDS[kind].values / 32;
    for (; u->done < goal; u->done++) {
        const size_t panel = u->done, first = u->at % super; /* in a block of Q4_K or Q5_K */
        const uint8_t *b = u->w + panel * AMX_ROWS * u->row + dense_row_bytes(kind, 32 * (u->at - first));
        block_header *header = u->headers + panel;
        if (first == 0) {
            const size_t n = super > 1 ? super : u->count;
            block_prefetch(b, u->row, dense_row_bytes(kind, 32 * n), u->far, 0, 1);
            block_read_header(kind, b, u->row, n, places, header);
        }
        memcpy(u->to->factors[panel], header->factors[first], sizeof u->to->factors[panel]);
        for (size_t j = 0; j < u->count; j += BLOCK_READ(kind)) {
            u32v_avx512 codes[2][8];
            block_codes(kind, b, u->row, first + j, places, header, codes);
            for (size_t i = 0; i < BLOCK_READ(kind); i++) block_lines(kind, codes[i], table, u->to->weights[panel][j + i]);
        }
    }
}

/* p of two blocks, or `count`, and where they belong */
typedef struct {
    _Alignas(64) float sums[BLOCK_UNIT][BLOCK_PANELS][TILE_TOKENS][AMX_ROWS];
    const block_weights *weights;
    const block_facts *facts;          /* of the first block */
    float (*y)[TILE_TOKENS][AMX_ROWS]; /* of the panels */
    size_t count;
} block_unit;

/* Adds a unit to y of T tokens. */
BLOCK_INLINE void block_add(const int kind, const size_t T, size_t panels, const block_unit *u) {
    for (size_t panel = 0; panel < panels; panel++) {
        __m512 y[TILE_TOKENS];
        _Pragma("GCC unroll 16") for (size_t t = 0; t < T; t++) y[t] = _mm512_load_ps(u->y[panel][t]);
        for (size_t i = 0; i < u->count; i++) {
            const __m512 f = u->weights->factors[panel][i][0], g = u->weights->factors[panel][i][1];
            const block_facts *of = u->facts + i;
            _Pragma("GCC unroll 16") for (size_t t = 0; t < T; t++) {
                const __m512 p = _mm512_load_ps(u->sums[i][panel][t]);
                y[t] = _mm512_fmadd_ps(_mm512_mul_ps(f, _mm512_set1_ps(of->unit[t])), p, y[t]);
                if (BLOCK_HAS_OFFSET(kind)) y[t] = _mm512_fmadd_ps(g, _mm512_set1_ps(of->sum[t]), y[t]);
            }
        }
        _Pragma("GCC unroll 16") for (size_t t = 0; t < T; t++) _mm512_store_ps(u->y[panel][t], y[t]);
    }
}

/* The p of a unit. parts: of its first block's columns of `tokens` tokens */
BLOCK_INLINE void block_products(const char *parts, size_t tokens, block_unit *u) {
    const size_t part = tokens * VECTOR_BYTES;
#define DIGIT(at, tile, low, high)                                                                                     \
    AMX_LOAD(tile, parts + (at) * part, VECTOR_BYTES);                                                                 \
    AMX_DOT_BF16(low, tile, 6);                                                                                        \
    AMX_DOT_BF16(high, tile, 7);
#define BLOCK(i, low, high)                                                                                            \
    if (i < u->count) {                                                                                                \
        AMX_ZERO(low);                                                                                                 \
        AMX_ZERO(high);                                                                                                \
        AMX_LOAD(6, u->weights->weights[0][i], VECTOR_BYTES);                                                          \
        AMX_LOAD(7, u->weights->weights[1][i], VECTOR_BYTES);                                                          \
        DIGIT(0, 4, low, high) DIGIT(1, 5, low, high) DIGIT(2, 4, low, high) DIGIT(3, 5, low, high)                    \
        AMX_STORE(low, u->sums[i][0], VECTOR_BYTES);                                                                   \
        AMX_STORE(high, u->sums[i][1], VECTOR_BYTES);                                                                  \
        parts += DIGITS * part;                                                                                        \
    }
    BLOCK(0, 0, 1) BLOCK(1, 2, 3)
#undef BLOCK
#undef DIGIT
}

static inline void block_configure(size_t tokens) {
    amx_config config;
    memset(&config, 0, sizeof config);
    config.palette = 1;
    for (int tile = 0; tile < 8; tile++) {
        config.rows[tile] = (uint8_t)(tile > 5 ? AMX_ROWS : tokens);
        config.colsb[tile] = VECTOR_BYTES;
    }
    amx_configure(&config);
}

BLOCK_INLINE void block_many(const int kind, const size_t T, const uint8_t *w, size_t rows, size_t K, const char *parts, size_t M,
                             float *y, size_t y_stride, __m512i places) {
    const size_t row = dense_row_bytes(kind, K), blocks = K / 32, group_bytes = blocks * DIGITS * AMX_TILE_BYTES;
    const block_facts *facts = (const block_facts *)(parts + (M + TILE_TOKENS - 1) / TILE_TOKENS * group_bytes);
    const size_t fit = group_bytes < TILE_CHUNK_BYTES ? TILE_CHUNK_BYTES / group_bytes : 1;
    const size_t at_once = TILE_TOKENS * (fit < BLOCK_GROUPS ? fit : BLOCK_GROUPS);
    uint16_t numbers[32];
    const int offset = kind == Q4_0 ? 8 : kind == Q5_0 ? 16 : 0;
    for (int code = 0; code < 32; code++) numbers[code] = (uint16_t)(float_bits((float)(code - offset)) >> 16);
    const __m512i table = _mm512_loadu_si512(numbers);
    block_weights weights[2];
    block_unit units[2];
    _Alignas(64) float sums[BLOCK_GROUPS][BLOCK_PANELS][TILE_TOKENS][AMX_ROWS];
    memset(weights, 0, rows < BLOCK_ROWS ? sizeof weights : 0); /* rows that are none */
    memset(units, 0, M < TILE_TOKENS ? sizeof units : 0);       /* tokens that are none */
    block_configure(M < TILE_TOKENS ? M : TILE_TOKENS);
    for (size_t start = 0; start < M; start += at_once) {
        const size_t end = M - start < at_once ? M : start + at_once, groups = (end - start + TILE_TOKENS - 1) / TILE_TOKENS;
        block_unpacking next;
        next.w = w, next.row = row, next.panels = rows > AMX_ROWS ? 2 : rows > 0, next.far = bytes_ahead(BLOCK_ROWS, row);
        next.at = next.done = 0, next.count = blocks < BLOCK_UNIT ? blocks : BLOCK_UNIT, next.to = weights;
        block_unpack_to(kind, &next, next.panels, table, places);
        for (size_t n = 0; n < rows; n += BLOCK_ROWS) {
            const size_t panels = rows - n > AMX_ROWS ? 2 : 1;
            size_t turn = 0;
            memset(sums, 0, groups * sizeof *sums);
            for (size_t k = 0; k < blocks; k += BLOCK_UNIT) {
                const block_weights *now = next.to;
                const size_t count = next.count;
                next.to = now == weights ? weights + 1 : weights;
                next.at = k + BLOCK_UNIT < blocks ? k + BLOCK_UNIT : 0;
                next.count = blocks - next.at < BLOCK_UNIT ? blocks - next.at : BLOCK_UNIT, next.done = 0;
                if (next.at == 0) { /* the rows after these */
                    next.w += BLOCK_ROWS * row;
                    next.panels = n + BLOCK_ROWS >= rows ? 0 : rows - n - BLOCK_ROWS > AMX_ROWS ? 2 : 1;
                }
                for (size_t g = 0; g < groups; g++, turn ^= 1) {
                    const size_t m = start + g * TILE_TOKENS, tokens = M - m < TILE_TOKENS ? M - m : TILE_TOKENS;
                    block_unit *u = units + turn;
                    u->weights = now, u->count = count, u->y = sums[g], u->facts = facts + m / TILE_TOKENS * blocks + k;
                    block_products(parts + m / TILE_TOKENS * group_bytes + k * DIGITS * tokens * VECTOR_BYTES, tokens, u);
                    if (g || k) block_add(kind, T, panels, units + (turn ^ 1)); /* before its weights are overwritten */
                    block_unpack_to(kind, &next, next.panels * (g + 1) / groups, table, places);
                }
            }
            block_add(kind, T, panels, units + (turn ^ 1));
            for (size_t panel = 0; panel < panels; panel++) {
                const size_t at = n + panel * AMX_ROWS;
                const __mmask16 wanted = (__mmask16)(rows - at < AMX_ROWS ? (1u << (rows - at)) - 1 : 0xFFFF);
                for (size_t m = start; m < end; m++)
                    _mm512_mask_storeu_ps(y + m * y_stride + at, wanted,
                                          _mm512_load_ps(sums[(m - start) / TILE_TOKENS][panel][(m - start) % TILE_TOKENS]));
            }
        }
    }
    amx_release();
}

BLOCK_TARGET static void block_tiles_amx(int kind, const void *w, size_t rows, size_t K, const void *parts, size_t M, float *y,
                                         size_t y_stride) {
    int32_t at[AMX_ROWS];
    for (int r = 0; r < AMX_ROWS; r++) at[r] = r * (int32_t)dense_row_bytes(kind, K);
    const __m512i places = _mm512_loadu_si512(at);
    switch (kind) {
#define FEW(kind, T) case T: block_few(kind, T, w, rows, K, parts, y, y_stride, places); break;
#define KIND(kind)                                                                                                     \
    case kind:                                                                                                         \
        switch (M) {                                                                                                   \
            FEW(kind, 1) FEW(kind, 2) FEW(kind, 3) FEW(kind, 4)                                                        \
            default:                                                                                                   \
                if (M <= 8) block_many(kind, 8, w, rows, K, parts, M, y, y_stride, places);                            \
                else block_many(kind, TILE_TOKENS, w, rows, K, parts, M, y, y_stride, places);                         \
        }                                                                                                              \
        break;
        KIND(Q8_0) KIND(Q4_0) KIND(Q5_0) KIND(Q4_1) KIND(Q4_K) KIND(Q5_K)
#undef KIND
#undef FEW
    }
}

#endif
#endif
