/* Weights of dense matrices in blocks (families/blocks.py), widened to float32 in registers, exactly as NumPy does.
 *
 * A weight is scale * q + offset. The product has at most 24 bits, so that it makes no difference whether that is fused
 * (but for the sign of a 0, which no sum shows).
 * 16 (8, 4) weights at a time: bytes are widened to int32, of which nibbles are cut out.
 *
 * A template, included by float_steps.h.
 *
 * With AVX-512 the factors of 256 columns are cut out of their blocks by a permutation and stored; nibbles are looked up
 * in a table of the 16 values of their block, by one permutation for 16 weights.
 *
 * Measured, EPYC (Zen 5), AVX-512, 2048 columns, one token, pairs in turn: before (scalar code took the factors out), now.
 *   One core from L2, G weights/s: Q8_0 31, 34; Q4_0 33, 36; Q4_1 32, 34; Q4_K 20, 32; Q6_K 15, 27; bfloat16 41. With
 *   AVX2: 18, 18; 14, 15; 16, 17; 13, 15; 11, 12. Two cores from memory that reads 57 to 68 GB/s, GB/s: Q8_0 50, 55;
 *   Q4_0 35, 38; Q4_1 38, 40; Q4_K 22, 34; Q6_K 24, 40; bfloat16 50, 50.
 *   The instructions of 32 weights of Q4_0 (a load that widens, a shift, two permutations, three products, two sums) take
 *   2.3 cycles in any order, which is 53 G weights/s; the loop takes 3.3. 128 tokens: the 50 to 60 G multiply-adds/s of
 *   float32, for a row is widened once.
 * Emerald Rapids, AVX-512 (two units of 16 lanes for everything, shuffles and loads that widen on one of them), one core
 *   from L2, G weights/s, of 45 products and sums: Q8_0 11 to 13; Q4_0 14 to 16; Q4_1 and Q4_K 13 to 16; Q6_K 10 to 12;
 *   bfloat16 16 to 19. 32 weights of Q4_0 were 9 instructions on the two units, 4.5 cycles; alone in a loop, in the best
 *   of 60 orders, they took 4.65 and in this order 4.83. Fused they are 7: one token 1.15 to 1.25 times as fast.
 * EPYC (Zen 3), AVX2, one core beside busy neighbours, pairs in turn of processor time, Q5_0 and Q5_K against the same
 *   matrix in float32 (how they were kept before), times as fast. 16384 x 2048, from memory: one token 2.5 to 2.9, 4
 *   1.7 to 1.95, 16 1.3, 64 0.97 to 1.1. 1536 x 512, whose 3 MB of float32 stay in L3: 0.86 to 0.89, 1.1 to 1.16, 1.0 and 1.02
 *   to 1.07. One token, G weights/s: Q5_0 7.0 to 8.9, Q5_K 6.7 to 8.9, Q4_0 8.6 to 10.4, Q4_K 7.8 to 10.9, Q6_K 5.8 to 7.6.
 *   Their AVX-512 text was compared with the plain one by emulated instructions, and not measured.
 * Tried: Q8_0 by vpmovsxbw, vpdpwssd onto 1.5 * 2^23 and a multiply-add, 9 instructions instead of 10 for 32 weights:
 *   1.2 alone in a loop, 1.01 to 1.02 here. Q4_0 without prefetching 1.01, by prefetching whole lines 1.0, 8 rows at a
 *   time 1.0, two blocks unrolled 1.05, clang 14 0.92.
 * Tried: scales widened with each vector, not 8 blocks at a time: half as fast. All 256 columns unrolled: 0.6 to 0.9, for
 *   GCC 12 then loads everything first and spills. Q6_K's integers put together from int32, not from bytes: 0.7. */
#ifndef BITNET_REF_DENSE_BLOCKS_H
#define BITNET_REF_DENSE_BLOCKS_H

enum { Q8_0 = 3, Q4_0, Q5_0, Q4_1, Q4_K, Q5_K, Q6_K, N_DENSE_KINDS }; /* before them: 0 float32, 1 bfloat16, 2 float16 */

typedef struct {
    size_t values, bytes; /* of a block */
} dense_kind;

static const dense_kind DENSE_KINDS[N_DENSE_KINDS] = {{1, 4},   {1, 2},   {1, 2},     {32, 34},   {32, 18},
                                                      {32, 22}, {32, 20}, {256, 144}, {256, 176}, {256, 210}};

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

/* The 32 integers q - 16 of a block of Q5_0, whose fifth bits have 4 bytes before the nibbles: where that bit is 0, the
 * upper half of the byte is set, which is nibble - 16 */
STEP_INLINE void STEP(fifth_bits)(const uint8_t *b, int8_t *quants) {
#if STEP_BYTES > 16
    const __m128i nibbles = _mm_loadu_si128((const __m128i *)(b + 6));
    const __m256i down = _mm256_setr_epi32(0, 0, 0, 0, 4, 4, 4, 4);
    const __m256i low = _mm256_and_si256(_mm256_srlv_epi32(_mm256_broadcastsi128_si256(nibbles), down), _mm256_set1_epi8(15));
#endif
#if STEP_BYTES == 64
    const __mmask32 bits = (__mmask32)(read_pair(b + 2));
    const __m256i q = _mm256_mask_sub_epi8(low, ~bits, low, _mm256_set1_epi8(16));
    _mm256_storeu_si256((__m256i *)quants, q);
    __asm__("" : "+m"(*(int8_t (*)[32])quants));
#elif STEP_BYTES == 32
    const __m256i byte = _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303);
    const __m256i bit = _mm256_set1_epi64x((long long)0x8040201008040201u);
    const __m256i bits = _mm256_and_si256(_mm256_shuffle_epi8(_mm256_set1_epi32((int)read_pair(b + 2)), byte), bit);
    const __m256i upper = _mm256_andnot_si256(_mm256_cmpeq_epi8(bits, bit), _mm256_set1_epi8((char)0xF0));
    _mm256_storeu_si256((__m256i *)quants, _mm256_or_si256(low, upper));
#else
    typedef uint8_t some __attribute__((vector_size(16)));
    const uint64_t bit = 0x8040201008040201, all = 0x0101010101010101, bits = read_pair(b + 2);
    some nibbles;
    memcpy(&nibbles, b + 6, sizeof nibbles);
    STEP_UNROLL
    for (int half = 0; half < 2; half++) {
        const uint64_t of[2] = {(bits >> 16 * half & 255) * all & bit, (bits >> (16 * half + 8) & 255) * all & bit};
        some is_set;
        memcpy(&is_set, of, sizeof is_set);
        const some q = (half ? nibbles >> 4 : nibbles & 15) | ((some)(is_set == 0) & 0xF0);
        memcpy(quants + 16 * half, &q, sizeof q);
    }
#endif
}

/* What the weights of 256 columns, n of 32, are multiplied by: factors[j] for the j-th 32 (16 in Q6_K). What is added to
 * them follows: in Q4_1 each after its factor, in Q4_K and Q5_K after all.
 * quants: room for 256 integers, to which those of Q5_0, Q5_K and Q6_K are put together. */
#if STEP_BYTES == 64
STEP_INLINE void STEP(block_factors)(const uint8_t *b, const int n, const int kind, float *factors, int8_t *quants) {
    if (kind == Q5_0)
        for (int j = 0; j < n; j++) STEP(fifth_bits)(b + 22 * j, quants + 32 * j);
    if (kind < Q4_K && n == 1) {
        const __m128 two = _mm_cvtph_ps(_mm_cvtsi32_si128((int)read_pair(b)));
        _mm_storel_epi64((__m128i *)factors, (__m128i)two);
    } else if (kind == Q4_1) { /* pairs of four blocks of 20 bytes, and of the next four */
        const __m512i places = _mm512_castsi256_si512(_mm256_setr_epi32(0, 5, 10, 15, 16, 21, 26, 31));
        const __m512i pairs = _mm512_permutex2var_epi32(_mm512_loadu_si512(b), places, _mm512_loadu_si512(b + 80));
        _mm512_storeu_ps(factors, _mm512_cvtph_ps(_mm512_castsi512_si256(pairs)));
    } else if (kind == Q4_0) {
        const __m512i places = _mm512_castsi128_si512(_mm_setr_epi16(0, 9, 18, 27, 36, 45, 54, 63));
        const __m512i halves = _mm512_permutex2var_epi16(_mm512_loadu_si512(b), places, _mm512_loadu_si512(b + 64));
        _mm256_storeu_ps(factors, _mm256_cvtph_ps(_mm512_castsi512_si128(halves)));
    } else if (kind == Q8_0 || kind == Q5_0) { /* of four blocks in 136 or 88 bytes, the last 64 of which are the second */
        const __m128i of_q8_0 = _mm_setr_epi16(0, 17, 34, 51, 0, 0, 0, 0), of_q5_0 = _mm_setr_epi16(0, 11, 22, 53, 0, 0, 0, 0);
        const __m512i places = _mm512_castsi128_si512(kind == Q8_0 ? of_q8_0 : of_q5_0);
        const int second = kind == Q8_0 ? 64 : 24;
        for (int j = 0; j < 2; j++, b += kind == Q8_0 ? 136 : 88) {
            const __m512i four = _mm512_permutex2var_epi16(_mm512_loadu_si512(b), places, _mm512_loadu_si512(b + second));
            _mm_storeu_ps(factors + 4 * j, _mm_cvtph_ps(_mm512_castsi512_si128(four)));
        }
    } else if (kind == Q6_K) {
        const __m128 d = _mm_cvtph_ps(_mm_cvtsi32_si128((int)(read_pair(b + 206) >> 16)));
        const __m512 scales = (__m512)STEP(to_floats)(STEP(signed_bytes)(b + 192));
        _mm512_storeu_ps(factors, _mm512_mul_ps(_mm512_broadcastss_ps(d), scales));
        const __m512i low = _mm512_set1_epi8(15), all = _mm512_set1_epi8(63), middle = _mm512_set1_epi8(32);
        const __m512i up = _mm512_inserti64x4(_mm512_set1_epi16(2), _mm256_set1_epi16(4), 0);
        const __m512i down = _mm512_inserti64x4(_mm512_set1_epi16(2), _mm256_setzero_si256(), 0);
        for (int half = 0; half < 2; half++) { /* 64 bytes: two nibbles each, of columns 64 apart */
            const __m512i nibbles = _mm512_loadu_si512(b + 64 * half);
            /* 32 bytes: four pairs of bits each, of columns 32 apart */
            const __m512i pairs = _mm512_broadcast_i64x4(_mm256_loadu_si256((const __m256i *)(b + 128 + 32 * half)));
#define JOIN(low_bits, high_bits) /* (low_bits & 15 | high_bits & 48) - 32 */                                          \
    _mm512_sub_epi8(_mm512_and_si512(_mm512_ternarylogic_epi64(low, low_bits, high_bits, 0xCA), all), middle)
            _mm512_storeu_si512(quants + 128 * half, JOIN(nibbles, _mm512_sllv_epi16(pairs, up)));
            _mm512_storeu_si512(quants + 128 * half + 64,
                                JOIN(_mm512_srli_epi16(nibbles, 4), _mm512_srlv_epi16(pairs, down)));
#undef JOIN
        }
        __asm__("" : "+m"(*(int8_t (*)[256])quants));
    } else { /* Q4_K and Q5_K. 6 bits each: four scales, four minima, the last ones' low nibbles, whose high bits are on top */
        const __m512i all = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)b));
#define FOURS(a, b, c, d) (__m512i)(STEP(i32v)){a, a, a, a, b, b, b, b, c, c, c, c, d, d, d, d}
        const STEP(i32v) in_four = {0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3};
        const STEP(i32v) byte = in_four - 256; /* the upper bytes: none */
        const __m512i minus_second = _mm512_set1_epi32((int)0x80000000u);
        __m512i low = _mm512_shuffle_epi8(all, (__m512i)(byte + (STEP(i32v))FOURS(4, 12, 8, 12)));
        __m512i high = _mm512_shuffle_epi8(all, (__m512i)(byte + (STEP(i32v))FOURS(4, 4, 8, 8)));
        low = _mm512_and_si512(_mm512_srlv_epi32(low, FOURS(0, 0, 0, 4)), FOURS(63, 15, 63, 15));
        high = _mm512_srli_epi32(high, 2);
        const __m512i q = _mm512_ternarylogic_epi64(low, high, FOURS(0, 48, 0, 48), 0xF8);
        const __m128i d_and_minus_e = _mm512_castsi512_si128(_mm512_xor_si512(all, minus_second));
        const __m512 two = _mm512_castps128_ps512(_mm_cvtph_ps(d_and_minus_e));
        _mm512_storeu_ps(factors, _mm512_mul_ps(_mm512_permutexvar_ps(FOURS(0, 0, 1, 1), two), _mm512_cvtepi32_ps(q)));
#undef FOURS
        if (kind == Q5_K) {
            const __m512i down = _mm512_inserti64x4(_mm512_set1_epi16(4), _mm256_setzero_si256(), 0);
            const __m512i fifth = _mm512_broadcast_i64x4(_mm256_loadu_si256((const __m256i *)(b + 16)));
            STEP_UNROLL
            for (int i = 0; i < 4; i++) { /* of each 64 values: 32 low nibbles, 32 high ones */
                const __m512i two = _mm512_broadcast_i64x4(_mm256_loadu_si256((const __m256i *)(b + 48 + 32 * i)));
                const __m512i nibbles = _mm512_and_si512(_mm512_srlv_epi16(two, down), _mm512_set1_epi8(15));
                const __m256i bit = _mm256_set1_epi8((char)(1 << 2 * i));
                const __m512i bits = _mm512_inserti64x4(_mm512_set1_epi8((char)(2 << 2 * i)), bit, 0);
                const __mmask64 is_set = _mm512_test_epi8_mask(fifth, bits);
                const __m512i integers = _mm512_mask_add_epi8(nibbles, is_set, nibbles, _mm512_set1_epi8(16));
                _mm512_storeu_si512(quants + 64 * i, integers);
            }
            __asm__("" : "+m"(*(int8_t (*)[256])quants));
        }
    }
    __asm__("" : "+m"(*(float (*)[16])factors)); /* to be broadcast from memory: GCC 12 would shuffle registers */
}
#else
STEP_INLINE void STEP(block_factors)(const uint8_t *b, const int n, const int kind, float *factors, int8_t *quants) {
    const size_t bytes = DENSE_KINDS[kind].bytes;
    if (kind == Q5_0)
        for (int j = 0; j < n; j++) STEP(fifth_bits)(b + j * bytes, quants + 32 * j);
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
        typedef uint8_t some __attribute__((vector_size(STEP_BYTES)));
        STEP_UNROLL
        for (int at = 0; at < 128; at += STEP_BYTES) { /* bytes: two nibbles each, of columns 64 apart */
            some low, pairs; /* four pairs of bits in a byte, of columns 32 apart */
            memcpy(&low, b + at, sizeof low);
            memcpy(&pairs, b + 128 + at / 64 * 32 + at % 32, sizeof pairs);
            const some first = ((low & 15) | ((at & 32 ? pairs << 2 : pairs << 4) & 48)) - 32;
            const some second = (low >> 4 | ((at & 32 ? pairs >> 2 : pairs) & 48)) - 32;
            memcpy(quants + at / 64 * 128 + at % 64, &first, sizeof first);
            memcpy(quants + at / 64 * 128 + at % 64 + 64, &second, sizeof second);
        }
        return;
    }
    /* 6 bits each: four scales, four minima, the last ones' low nibbles; their high bits are on top of the first ones */
    const uint32_t first = read_pair(b + 4), second = read_pair(b + 8), third = read_pair(b + 12);
    const uint64_t scales = (third & 0x0F0F0F0F) | (first >> 6 & 0x03030303) << 4;
    const uint64_t minima = (third >> 4 & 0x0F0F0F0F) | (second >> 6 & 0x03030303) << 4;
    const uint64_t bytes_of[2] = {(first & 0x3F3F3F3F) | scales << 32, (second & 0x3F3F3F3F) | minima << 32};
    for (int i = 0; i < 16; i += STEP(FLOATS)) {
        const STEP(f32v) v = STEP(to_floats)(STEP(bytes)((const uint8_t *)bytes_of + i)) * (i < 8 ? d[0] : -d[1]);
        memcpy(factors + i, &v, sizeof v);
    }
    if (kind == Q5_K) {
        typedef uint8_t some __attribute__((vector_size(STEP_BYTES)));
        STEP_UNROLL
        for (int at = 0; at < 128; at += STEP_BYTES) { /* of each 64 values: 32 low nibbles, 32 high ones */
            const int i = at / 32, bit = 2 * i;        /* in each byte of fifth bits, that of the high ones after it */
            some nibbles, fifth;
            memcpy(&nibbles, b + 48 + at, sizeof nibbles);
            memcpy(&fifth, b + 16 + at % 32, sizeof fifth);
            const some first = (nibbles & 15) | ((fifth >> bit & 1) << 4);
            const some second = nibbles >> 4 | ((fifth >> (bit + 1) & 1) << 4);
            memcpy(quants + 64 * i + at % 32, &first, sizeof first);
            memcpy(quants + 64 * i + at % 32 + 32, &second, sizeof second);
        }
    }
}
#endif

/* scale q + offset of nibbles q: low ones, or of high ones */
STEP_INLINE STEP(f32v) STEP(nibbles)(const uint8_t *p, const int is_high, const int kind, float one_scale,
                                     float one_offset) {
    const STEP(f32v) scale = one_scale - (STEP(f32v)){0};
    STEP(f32v) offset = one_offset - (STEP(f32v)){0};
    STEP(i32v) q = STEP(bytes)(p);
    if (is_high) q >>= 4;
#if STEP_BYTES == 64 /* all 16 values, looked up by the low 4 bits of q */
    __m512 table = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    if (kind == Q4_0) table = _mm512_mul_ps(_mm512_sub_ps(table, _mm512_set1_ps(8)), (__m512)scale);
    else table = _mm512_fmadd_ps(table, (__m512)scale, (__m512)offset);
    return (STEP(f32v))_mm512_permutexvar_ps((__m512i)q, table);
#else
    if (!is_high) q &= 15;
#if STEP_BYTES == 32
    if (kind == Q4_0) offset = scale * -8;
    return (STEP(f32v))_mm256_fmadd_ps((__m256)STEP(to_floats)(q), (__m256)scale, (__m256)offset);
#else
    if (kind == Q4_0) return STEP(to_floats)(q - 8) * scale;
    return STEP(to_floats)(q) * scale + offset;
#endif
#endif
}

/* How many columns a loop over the 256 takes at a time, in how many bytes (those of `quants` are read elsewhere), with how
 * many factors. In each such part the weights lie alike. */
#define BLOCK_STEP(kind) (kind == Q4_K ? 64 : 32)
#define BLOCK_STEP_BYTES(kind) (kind < Q4_K ? DENSE_KINDS[kind].bytes : kind == Q4_K ? 32 : 0)
#define BLOCK_STEP_FACTORS(kind) (kind < Q4_1 || kind == Q5_K ? 1 : 2)

/* the vector of weights at column i of the part at b, f and quants */
STEP_INLINE STEP(f32v) STEP(block_weights)(const uint8_t *b, const int i, const int kind, const float *f,
                                           const int8_t *quants) {
    if (kind == Q8_0) return STEP(to_floats)(STEP(signed_bytes)(b + 2 + i)) * f[0];
    if (kind == Q4_0) return STEP(nibbles)(b + 2 + i % 16, i / 16, kind, f[0], 0);
    if (kind == Q4_1) return STEP(nibbles)(b + 4 + i % 16, i / 16, kind, f[0], f[1]);
    if (kind == Q4_K) /* of each 64 values: 32 low nibbles, 32 high ones */
        return STEP(nibbles)(b + 16 + i % 32, i / 32, kind, f[i / 32], f[8 + i / 32]);
    const STEP(f32v) q = STEP(to_floats)(STEP(signed_bytes)((const uint8_t *)quants + i));
    if (kind == Q5_0) return q * f[0];
    if (kind == Q5_K) return STEP(fused)(q, f[0] - (STEP(f32v)){0}, f[8] - (STEP(f32v)){0});
    return q * f[i / 16];
}

/* A function's text for each 256 columns of K, a multiple of 32, and each 32 of the rest. */
#define EACH_BLOCKS(DO)                                                                                                \
    size_t k = 0;                                                                                                      \
    for (; k + 256 <= K; k += 256) DO(8)                                                                               \
    for (; k < K; k += 32) DO(1)
