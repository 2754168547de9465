/* Products by ggml's rule (families/block_rule.py): inputs in int8 by blocks, sums of integers within a block, float32
 * sums over blocks from the first to the last.
 *
 * Plain version: `block_matmul` there, followed operation by operation, so every copy gives its bits. The lanes of a
 * register are rows: a matrix lies in panels of 16 rows, and no sum crosses lanes.
 *
 * A panel is its units one after another, of 32 columns or of 256 (K types). What a unit has, in this order:
 *     codes    q + offset in 8, 4 or 2 bits, of 4 columns of 16 rows in 64 bytes: byte 4 r + j is column j of row r. Of 4
 *              bits the low ones are columns 0-15 of each 32, the high ones 16-31; of 2 bits each pair the next 8.
 *     d        16 float16, which hold those of the file exactly
 *     e        16 float16, where there is an offset
 *     s        16 int8 (uint8) scales of each 16 or 32 columns
 *     m        16 uint8 minima of each 32 columns
 *
 * A token: K int8, then dx of each block, the int16 sums of x_q of each 16 columns and, of blocks of 32, Q8_1's s.
 *
 * A template, included by float_steps.h.
 *
 * Measured, Xeon (AVX-512 VNNI), one thread, tokens per second of processor time beside seven other programs: these, float
 *   activations (dense_rows.h), llama.cpp (ggml 0.25.3, built for the machine). SmolLM2-135M.
 *     Q4_1     64 tokens 654, 385, 151; 512 tokens 573, 366, 145; decoding 93, 82, 57
 *     Q8_0     660, 376, 288; 574, 356, 269; 82, 65, 46
 *     Q4_K_M   628, 338, 277; 556, 344, 253; 82, 35, 53
 * Bits per weight, before (panels with float32 scales, the file's blocks beside them) and now (panels alone): Q8_0 17.5,
 *   8.5; Q4_0 9.5, 4.5; Q4_1 11, 5; Q4_K 9.25, 4.63; Q6_K 15.2, 8.56; TQ2_0 4.19, 2.06.
 * Processor time before over that of now, the same Xeon, one thread, 1536 x 1536, pairs in turn, median: one token,
 *   matrices from memory, Q8_0 1.00, Q4_0 and Q4_1 1.01, Q2_0 0.92 and 0.99, Q4_K 1.02, Q6_K 1.00; 64 tokens 0.98 to 1.01; AVX2 0.97 to 1.01.
 *   A row of an embedding takes 4 to 12 us more from panels than from blocks.
 * 64 tokens of 1536 columns by AVX-512, one thread of a Sapphire Rapids, matrices in L2, G multiply-adds/s, of 370 of vpdpbusd
 *   alone and 305 with an input broadcast for each, before and now: Q8_0 160, 189; Q4_0 150, 185; Q4_1 158, 169; Q5_0 165, 190;
 *   Q2_0 162, 184; Q4_K 142, 175; Q5_K 155, 187; Q6_K 149, 166; TQ2_0 183, 220. Now sums of tokens are multiplied by vpdpwssd, two
 *   at a time, products without scales are added to the total itself, and codes are opened once for 8 or 12 tokens, not 4.
 *   Tried: 12 tokens of types with scales or minima 0.93 to 0.97, because GCC 12 spills sums; 16 tokens 0.9 to 0.96 of 12;
 *   two sums for each token, so that a product need not wait for the last, 0.98 to 1.04 (of four tokens). With four tokens or
 *   fewer a product straight to the total would wait for the last: TQ2_0 0.55 of one token, 0.84 of four.
 * Rounding a token, ns for 32 columns, GCC 12's vectors and now: blocks of 32 by AVX-512 24 to 31, 9; by AVX2 18, 9; of 256 14 and
 *   12, 6, of which half went to look for the first of the largest.
 * A panel's units are prefetched while its first tokens are multiplied. In a loop over 30 to 80 MB one token takes, with the rest as
 *   before, Q4_0 0.77 of the time, Q4_K 0.75, Q2_0 0.4, TQ2_0 0.5; SmolLM2-135M decodes 1.00 to 1.09 times as fast.
 * Tried, SmolLM2-135M by AVX-512: residuals and gates of 64 tokens at a time, whose lines are prefetched: 512 tokens 0.95; 128 tokens
 *   through all panels at a time 0.96 to 1.00 (AVX2 1.00 to 1.02); units prefetched by quarters, by each group of tokens: 64 tokens 1.01
 *   to 1.05, but one token and 512 0.97.
 * AVX2, EPYC (Zen 3, 50 G multiply-adds/s of float32 at most) beside eight other programs, one thread's processor time, 576 x
 *   1536 in L2, pairs in turn, equal bits: products widened to 16 bits and summed in 32, then these, G multiply-adds/s, and the
 *   median of the pairs
 *     1 token    Q8_0 16, 27, 1.6   Q4_0 20, 41, 2.1   Q4_1 20, 47, 2.4   Q5_0 22, 44, 1.9   Q4_K 23, 46, 2.0   Q6_K 20, 31, 1.4
 *     64 tokens  Q8_0 24, 37, 1.7   Q4_0 32, 86, 2.8   Q4_1 31, 79, 2.5   Q5_0 26, 59, 2.4   Q4_K 24, 61, 2.7   Q6_K 23, 50, 2.3
 *   Of that two vectors of rows, for which an input is broadcast once, are 1.1 to 1.2; sums in their order 1.24 to 1.41 of 4
 *   bits and 1.0 to 1.16 of 8, because GCC 12 made a tree of them and spilled it. Without that order two vectors of rows were
 *   0.87 to 1.09 for four tokens. Rounding tokens by vectors takes 0.41 to 0.45 of the time (blocks of 256: 0.6).
 *   Sums of a block in their order too, best calls in turn, 64 tokens of 576 x 1536: Q8_0 55, now 62, Q4_0 98, 105, Q5_0 89, 101,
 *   Q2_0 95, 106, Q4_1 as before; with scales in a block 0.95. Tried of Q8_0, no faster: columns widened to 16 bits, of tokens
 *   that are kept so, 60; codes as two times 4 bits, unsigned, 53.
 *   Those products are near what the ports allow: 12 pairs of vpmaddubsw and vpaddw take 0.198 ns each where one alone takes
 *   0.16, so 161 G for 4 bits and 81 for 8 before scales. Tried: sums of x_q moved to all lanes before they are multiplied by the
 *   offset, 0.98 to 1.02 (sums that start from the offset's share have as many additions).
 * Tried of Q8_0 on AVX2, no faster once panels come from L2: codes opened for all tokens, 256 columns at a time, |q| beside q and
 *   d in float32, with and without prefetch; Winograd's product, (w0 + x1) (w1 + x0) less w0 w1 and x0 x1, in 16 bits: its
 *   instructions alone take 0.33 ns where Q8_0's take 0.42, but inputs and codes are twice as wide; vpmaddwd of codes and
 *   inputs in 16 bits, 0.42. Sums over blocks in memory and the four instructions of a product in assembler: 1.055 of the speed
 *   of a prompt of 64 tokens (SmolLM2-135M, 36 pairs), 0.98 with two bits: not worth assembler. There the products are 71% of
 *   the time, Python 10%, attention 6%, gates 4%; of 512 tokens 63, 2, 24 and 4.
 * A product and its sum over a run in one loop over tokens and rows, not in two: GCC 12 spilled the eight products. 64 tokens of
 *   1536 columns, best calls in turn, AVX2, Zen 3: Q8_0 56, now 59 G (1.06; median of pairs 1.09), Q6_K 69 and 74, the others
 *   0.98 to 1.05. |codes| kept beside codes, and sums over blocks kept in memory: no faster beside that.
 * Norm, gate and residual in the calls of products, half as many calls for each layer: Python alone takes 3.6 ms of a prompt of 64
 *   tokens of SmolLM2-135M (0.21 s), before 6.1, and the caches it finds are cold. With these two and four exponentials of gates at
 *   a time prompts of Q8_0 are 1.21 (64 tokens) and 1.19 (512) times as fast, of Q6_K 1.16 and 1.15: medians of 28 and 7 pairs.
 *   Tried: 32 to 256 tokens of a prompt of 512 through all panels at a time: no faster.
 * Tried, AMX (Sapphire Rapids, one thread): tiles sum the products of 16 tokens, 16 rows and 32 columns, and what follows is as
 *   here, equal bits. 1536 and 2048 columns, of the speed of AVX-512, 64 tokens: Q8_0 1.17 to 1.20, Q4_0 1.17, Q4_1 1.25 to 1.29, Q4_K
 *   1.30, TQ2_0 1.38 to 1.46, Q6_K, whose runs are 16 columns, 0.75; 512 tokens 0.05 to 0.1 less; 8 tokens 0.8 to 0.9. Two tiles
 *   loaded and one stored and read again for each block are as many operations as the products that they replace. Not worth
 *   a header of 150 lines.
 * Not tried yet: two or four such sums; 5-bit codes packed, dpbusd with AVX-VNNI (that set multiplies as AVX2 does). */
#ifndef BITNET_REF_RULED_STEPS_H
#define BITNET_REF_RULED_STEPS_H

enum { RULED_ROWS = 16, RULED_MOST = 12 /* tokens at once */ };

typedef struct {
    int bits, largest, offset; /* of a code */
    int block, scaled; /* block: of inputs; scaled: columns of a scale within it, or 0 */
    int term; /* what is added to the sums of products: 0 nothing, 1 e * s, 2 minima */
    int is_signed; /* the scales s */
} ruled_form;

enum { N_RULED_FORMS = 9 };
static const ruled_form RULED_FORMS[N_RULED_FORMS] = {
    {8, 255, 128, 32, 0, 0, 0}, /* Q8_0 */
    {4, 15, 8, 32, 0, 0, 0},    /* Q4_0 */
    {4, 15, 0, 32, 0, 1, 0},    /* Q4_1 */
    {8, 31, 16, 32, 0, 0, 0},   /* Q5_0 */
    {2, 3, 1, 32, 0, 0, 0},     /* Q2_0, Q1_0 */
    {4, 15, 0, 256, 32, 2, 0},  /* Q4_K */
    {8, 31, 0, 256, 32, 2, 0},  /* Q5_K */
    {8, 63, 32, 256, 16, 0, 1}, /* Q6_K */
    {2, 3, 1, 256, 0, 0, 0},    /* TQ1_0, TQ2_0 */
};

static inline size_t ruled_unit_bytes(const ruled_form *f) {
    const size_t codes = (size_t)(f->block * f->bits * RULED_ROWS / 8);
    return codes + (f->term ? 64 : 32) + (f->scaled ? f->block / f->scaled * 16 : 0) + (f->term == 2 ? 128 : 0);
}

/* bytes of a token, a multiple of 64 */
static inline size_t ruled_token_bytes(int block, size_t K) {
    return (K + K / (size_t)block * 4 + K / 8 + (block == 32 ? K / 8 : 0) + 63) / 64 * 64;
}

/* whether some s of a token is beyond float16 */
static int ruled_token_overflows(const uint8_t *token, size_t K) {
    const int32_t *s = (const int32_t *)(token + K + K / 32 * 4 + K / 8);
    int is_bad = 0;
    for (size_t b = 0; b < K / 32; b++) is_bad |= s[b] == 0x7F800000;
    return is_bad;
}
#endif

#if STEP_BYTES == 64
#define RULED_TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,fma,f16c")))
#else
#define RULED_TARGET STEP_TARGET
#endif
#define RULED_INLINE RULED_TARGET static inline __attribute__((always_inline))

/* With AVX2 products are of bytes and sums of 16 bits, two of a row, which hold those of RULED_RUN(f) times 4 columns:
 * |q| <= 127 of two columns each time. Codes with a large offset are multiplied as signed numbers. */
typedef uint8_t STEP(u8v) __attribute__((vector_size(STEP_BYTES)));
#if STEP_BYTES == 32
#define RULED_SIGNED(f) (f.offset >= 32)
enum { STEP(RULED_VECTORS) = 2 }; /* of rows, for which each input is broadcast once */
#define RULED_RUN(f) (f.bits < 8 ? 8 : f.largest < 64 ? 4 : 1)
#else
#define RULED_SIGNED(f) 0
enum { STEP(RULED_VECTORS) = 1 };
#define RULED_RUN(f) (f.scaled == 16 ? 4 : 8)
#endif
#define RULED_DIRECT(f) (T > 4 && !f.scaled) /* products are added to the totals, not to sums of a run */
#define RULED_TOKENS(f) (STEP_BYTES != 64 ? 4 : f.block == 32 && !f.term ? 12 : 8) /* at once, of many */

/* acc + the products of 4 columns: bytes of w, unsigned or signed, and of x, signed, the same for all rows */
RULED_INLINE STEP(i32v) STEP(ruled_dot)(STEP(i32v) acc, STEP(i32v) w, int32_t x, const int is_signed) {
#if STEP_BYTES == 64
    return (STEP(i32v))_mm512_dpbusd_epi32((__m512i)acc, (__m512i)w, _mm512_set1_epi32(x));
#elif STEP_BYTES == 32
    const __m256i all = _mm256_set1_epi32(x), from = (__m256i)w;
    const __m256i pairs = is_signed ? _mm256_maddubs_epi16(_mm256_abs_epi8(from), _mm256_sign_epi8(all, from))
                                    : _mm256_maddubs_epi16(from, all);
    __m256i sum = _mm256_add_epi16((__m256i)acc, pairs);
    __asm__("" : "+x"(sum)); /* or GCC 12 adds in the order of a tree, for which the registers do not suffice */
    return (STEP(i32v))sum;
#else
    for (int j = 0; j < 4; j++) acc += (w >> 8 * j & 255) * (int32_t)(int8_t)((uint32_t)x >> 8 * j);
    return acc;
#endif
}

/* acc + the products of two int16 in each lane of w with those of x, the same for all rows */
RULED_INLINE STEP(i32v) STEP(ruled_pair)(STEP(i32v) acc, STEP(i32v) w, const int16_t *x) {
    int32_t pair;
    memcpy(&pair, x, sizeof pair);
#if STEP_BYTES == 64
    return (STEP(i32v))_mm512_dpwssd_epi32((__m512i)acc, (__m512i)w, _mm512_set1_epi32(pair));
#elif STEP_BYTES == 32
    return acc + (STEP(i32v))_mm256_madd_epi16((__m256i)w, _mm256_set1_epi32(pair));
#else
    return acc + (int16_t)x[0] * ((w << 16) >> 16) + (int16_t)x[1] * (w >> 16);
#endif
}

/* what the sums of a run are multiplied by: the scales at p, or 1 */
RULED_INLINE STEP(i32v) STEP(ruled_scales)(const uint8_t *p, const int scaled, const int is_signed) {
#if STEP_BYTES == 32 /* twice each, 16 bits */
    if (!scaled) return (STEP(i32v))_mm256_set1_epi16(1);
    __m128i twice = _mm_loadl_epi64((const __m128i *)p);
    twice = _mm_unpacklo_epi8(twice, twice);
    return (STEP(i32v))(is_signed ? _mm256_cvtepi8_epi16(twice) : _mm256_cvtepu8_epi16(twice));
#else
    if (!scaled) return (STEP(i32v)){0} + 1;
    return is_signed ? STEP(signed_bytes)(p) : STEP(bytes)(p);
#endif
}

/* total + the sums of a run, scaled; in_order: GCC 12 makes no tree of the sums, as in ruled_dot */
RULED_INLINE STEP(i32v) STEP(ruled_add)(STEP(i32v) total, STEP(i32v) acc, STEP(i32v) scales, const int in_order) {
#if STEP_BYTES == 32
    __m256i sum = _mm256_add_epi32((__m256i)total, _mm256_madd_epi16((__m256i)acc, (__m256i)scales));
    if (in_order) __asm__("" : "+x"(sum));
    return (STEP(i32v))sum;
#else
    return total + acc * scales;
#endif
}

/* rounded to float16 */
STEP_INLINE float STEP(as_half)(float v) {
#if STEP_BYTES == 16
    uint16_t half;
    kv_halves(&v, 1, &half);
    half_to_float_plain(&half, 1, &v);
    return v;
#else
    return _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtps_ph(_mm_set_ss(v), _MM_FROUND_TO_NEAREST_INT)));
#endif
}

/* the largest |x| of n numbers as its bits, which are ordered as |x| is */
STEP_INLINE uint32_t STEP(ruled_largest)(const float *x, const int n) {
    uint32_t largest = 0;
#if STEP_BYTES == 16
    for (int j = 0; j < n; j++) {
        const uint32_t bits = float_bits(x[j]) & 0x7FFFFFFFu;
        largest = bits > largest ? bits : largest;
    }
#else
    const __m256i without_sign = _mm256_set1_epi32(0x7FFFFFFF);
    __m256i most = _mm256_setzero_si256();
    for (int j = 0; j < n; j += 8)
        most = _mm256_max_epu32(most, _mm256_and_si256(_mm256_loadu_si256((const __m256i *)(x + j)), without_sign));
    __m128i four = _mm_max_epu32(_mm256_castsi256_si128(most), _mm256_extracti128_si256(most, 1));
    four = _mm_max_epu32(four, _mm_shuffle_epi32(four, 0x4E));
    largest = (uint32_t)_mm_cvtsi128_si32(_mm_max_epu32(four, _mm_shuffle_epi32(four, 0xB1)));
#endif
    return largest;
}

/* q = x * scale of 32 columns, rounded half to even, and the sums of each 16. |x * scale| < 127.5, so nothing is clipped. */
STEP_INLINE void STEP(ruled_round)(const float *x, float scale, int8_t *q, int16_t *sums) {
#if STEP_BYTES == 16
    const float magic = 12582912.0f; /* 1.5 * 2^23: adding and subtracting it rounds */
    int32_t v[32];
    for (int j = 0; j < 32; j++) v[j] = (int32_t)(x[j] * scale + magic - magic);
    for (int j = 0; j < 32; j++) q[j] = (int8_t)v[j];
    for (int j = 0; j < 32; j += 16) {
        int32_t sum = 0;
        for (int i = j; i < j + 16; i++) sum += v[i];
        sums[j / 16] = (int16_t)sum;
    }
#else
    __m256i v[4];
    for (int i = 0; i < 4; i++) v[i] = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x + 8 * i), _mm256_set1_ps(scale)));
    __m256i all = _mm256_packs_epi16(_mm256_packs_epi32(v[0], v[1]), _mm256_packs_epi32(v[2], v[3]));
    all = _mm256_permutevar8x32_epi32(all, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
    _mm256_storeu_si256((__m256i *)q, all);
    all = _mm256_sad_epu8(_mm256_xor_si256(all, _mm256_set1_epi8(-128)), _mm256_setzero_si256()); /* of q + 128, 8 at a time */
    all = _mm256_add_epi64(all, _mm256_unpackhi_epi64(all, all));
    sums[0] = (int16_t)(_mm256_extract_epi16(all, 0) - 16 * 128);
    sums[1] = (int16_t)(_mm256_extract_epi16(all, 8) - 16 * 128);
#endif
}

/* Rounds a token of K inputs by blocks. -> 0, or 1 if it holds NaN, Inf, or what float16 cannot scale. */
STEP_INLINE int STEP(ruled_token_of)(const float *x, size_t K, const int block, uint8_t *out) {
    int8_t *q = (int8_t *)out;
    float *dx = (float *)(out + K);
    int16_t *sums = (int16_t *)(dx + K / (size_t)block);
    float *s = (float *)(sums + K / 16);
    for (size_t k = 0; k < K; k += (size_t)block, x += block, q += block, dx++) {
        const uint32_t most = STEP(ruled_largest)(x, block);
        const float a = bits_float(most);
        float scale = 0, d = 0;
        if (most >= 0x7F800000u) return 1;
        *dx = 0;
        if (a >= 0x1p-120f && block == 32) {
            scale = 127 / a;
            d = a / 127;
            if (d >= 65520.0f) return 1;
            *dx = STEP(as_half)(d);
        } else if (a >= 0x1p-120f) {
            int at = 0; /* the first of the largest */
            while (STEP(ruled_largest)(x + at, 32) != most) at += 32;
            while (fabsf(x[at]) != a) at++;
            scale = -127 / x[at];
            *dx = 1 / scale;
        }
        for (int j = 0; j < block; j += 32) STEP(ruled_round)(x + j, scale, q + j, sums + (k + (size_t)j) / 16);
        if (block == 32) { /* Q8_1's s; infinite: an error for Q4_1 only */
            const float of_q = d * (float)(sums[k / 16] + sums[k / 16 + 1]);
            s[k / 32] = fabsf(of_q) >= 65520.0f ? INFINITY : STEP(as_half)(of_q);
        }
    }
    return 0;
}

STEP_TARGET static int STEP(ruled_token)(const float *x, size_t K, int block, uint8_t *out) {
    return block == 32 ? STEP(ruled_token_of)(x, K, 32, out) : STEP(ruled_token_of)(x, K, 256, out);
}

/* RULED_VECTORS of rows, from `lane` on, of a panel times T tokens, the panel's first or others.   y: T rows of 16 */
RULED_INLINE void STEP(ruled_rows)(const ruled_form f, const uint8_t *unit, const size_t K, const uint8_t *tokens,
                                   const size_t token_bytes, const int T, const int is_first, float *y, const int lane) {
    enum { V = STEP(RULED_VECTORS), COUNT = V * RULED_MOST };
    const size_t codes = (size_t)(f.block * f.bits * RULED_ROWS / 8), bytes = ruled_unit_bytes(&f);
    const size_t fetched = is_first && lane == 0 ? bytes : 0; /* of each unit */
    STEP(f32v) t[COUNT], u[COUNT]; /* token by token */
#define EACH STEP_UNROLL for (int i = 0; i < T * V; i++)
    EACH t[i] = u[i] = (STEP(f32v)){0};
    for (size_t k = 0; k < K; k += (size_t)f.block, unit += bytes) {
        STEP(i32v) total[COUNT], minima[COUNT];
        const uint8_t *scales = unit + codes + (f.term ? 64 : 32) + lane;
        const uint8_t *mins = scales + (f.scaled ? f.block / f.scaled * 16 : 0);
        for (size_t at = 0; at < fetched; at += 64) __builtin_prefetch(unit + FAR_BYTES + at, 0, 2);
        EACH total[i] = minima[i] = (STEP(i32v)){0};
        for (int part = 0; part < f.block / 32; part++) { /* 32 columns */
            const uint8_t *from = unit + part * (f.bits * 64) + 4 * lane;
            STEP(i32v) acc[COUNT], s[V] = {{0}}, pairs[V]; /* pairs: what the sums of 16 columns each are multiplied by */
            STEP_UNROLL
            for (int v = 0; v < V; v++) {
                const uint8_t *two = scales + 2 * part * 16 + v * STEP(FLOATS);
                STEP(i32v) first = (STEP(i32v)){0} - f.offset, second = first;
                if (f.scaled == 16) first *= STEP(signed_bytes)(two), second *= STEP(signed_bytes)(two + 16);
                if (f.term == 2) first = second = STEP(bytes)(mins + part * 16 + v * STEP(FLOATS)); /* not negative */
                pairs[v] = (f.term == 2 ? first : first & 0xFFFF) | second << 16;
            }
            EACH {
                const int16_t *sums = (const int16_t *)(tokens + (size_t)(i / V) * token_bytes + K + K / (size_t)f.block * 4);
                sums += k / 16 + (size_t)(2 * part);
                if (f.term == 2) minima[i] = STEP(ruled_pair)(minima[i], pairs[i % V], sums);
                else if (f.offset && !RULED_SIGNED(f)) total[i] = STEP(ruled_pair)(total[i], pairs[i % V], sums);
                acc[i] = (STEP(i32v)){0};
            }
            STEP_UNROLL
            for (int g = 0; g < 8; g++) { /* 4 columns */
                STEP(i32v) w[V];
                STEP_UNROLL
                for (int v = 0; v < V; v++) {
                    const int group = f.scaled == 16 ? 2 * part + g / 4 : part; /* of columns with one scale */
                    if (g % 4 == 0) s[v] = STEP(ruled_scales)(scales + group * 16 + v * STEP(FLOATS), f.scaled, f.is_signed);
                    memcpy(&w[v], from + (f.bits == 8 ? g : f.bits == 4 ? g % 4 : g % 2) * 64 + v * STEP_BYTES, sizeof w[v]);
                    if (f.bits == 4) w[v] = (g / 4 ? w[v] >> 4 : w[v]) & 0x0F0F0F0F;
                    if (f.bits == 2) w[v] = (w[v] >> 2 * (g / 2)) & 0x03030303;
                    if (RULED_SIGNED(f)) w[v] = (STEP(i32v))((STEP(u8v))w[v] - (uint8_t)f.offset); /* it wraps */
                }
                EACH {
                    int32_t x;
                    memcpy(&x, tokens + (size_t)(i / V) * token_bytes + k + part * 32 + g * 4, sizeof x);
                    if (RULED_DIRECT(f)) total[i] = STEP(ruled_dot)(total[i], w[i % V], x, 0);
                    else acc[i] = STEP(ruled_dot)(acc[i], w[i % V], x, RULED_SIGNED(f));
                    if (!RULED_DIRECT(f) && (g + 1) % RULED_RUN(f) == 0) {
                        total[i] = STEP(ruled_add)(total[i], acc[i], s[i % V], !f.scaled);
                        acc[i] = (STEP(i32v)){0};
                    }
                }
            }
        }
        STEP(f32v) d[V], e[V];
        STEP_UNROLL
        for (int v = 0; v < V; v++) {
            d[v] = STEP(weights)(unit + codes, (size_t)(lane + v * STEP(FLOATS)), 2);
            e[v] = STEP(weights)(unit + codes, (size_t)(lane + v * STEP(FLOATS)) + (f.term ? 16 : 0), 2);
        }
        EACH {
            const float *dx = (const float *)(tokens + (size_t)(i / V) * token_bytes + K);
            const float scale = dx[k / (size_t)f.block];
            t[i] += d[i % V] * scale * STEP(to_floats)(total[i]);
            if (f.term == 1) u[i] += e[i % V] * dx[K / 16 + k / 32];
            if (f.term == 2) u[i] += e[i % V] * scale * STEP(to_floats)(minima[i]);
        }
    }
    EACH {
        if (f.term) t[i] += u[i];
        memcpy(y + i / V * RULED_ROWS + lane + i % V * STEP(FLOATS), &t[i], sizeof t[i]);
    }
#undef EACH
}

/* The 16 rows of a panel times M tokens.   y: `rows` of the 16, those of a token y_stride apart */
RULED_TARGET static void STEP(ruled_panel)(int form, const uint8_t *panel, size_t K, const uint8_t *tokens,
                                           size_t token_bytes, size_t M, size_t rows, float *y, size_t y_stride) {
    float out[RULED_MOST * RULED_ROWS];
    for (size_t m = 0; m < M;) {
        const int many = RULED_TOKENS(RULED_FORMS[form]), T = M - m >= (size_t)many ? many : M - m >= 4 ? 4 : 1;
        const uint8_t *some = tokens + m * token_bytes;
        for (int lane = 0; lane < RULED_ROWS; lane += STEP(RULED_VECTORS) * STEP(FLOATS)) {
#define FORM(n)                                                                                                        \
    case n:                                                                                                            \
        if (T == 1) STEP(ruled_rows)(RULED_FORMS[n], panel, K, some, token_bytes, 1, m == 0, out, lane);               \
        else if (T == 4) STEP(ruled_rows)(RULED_FORMS[n], panel, K, some, token_bytes, 4, m == 0, out, lane);          \
        else STEP(ruled_rows)(RULED_FORMS[n], panel, K, some, token_bytes, RULED_TOKENS(RULED_FORMS[n]), m == 0, out, lane); \
        break;
            switch (form) { FORM(0) FORM(1) FORM(2) FORM(3) FORM(4) FORM(5) FORM(6) FORM(7) FORM(8) }
#undef FORM
        }
        for (int i = 0; i < T; i++, m++) copy_mostly(y + m * y_stride, out + i * RULED_ROWS, rows * 4, RULED_ROWS * 4);
    }
}
#undef RULED_SIGNED
#undef RULED_DIRECT
#undef RULED_TOKENS
#undef RULED_RUN
#undef RULED_INLINE
#undef RULED_TARGET
