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
 * A token: K int8, then dx of each block, then Q8_1's s of each 32 or the sums of x_q of each 16 columns.
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
 * 64 tokens by AVX-512: 120 G multiply-adds/s, of 389 of vpdpbusd alone; a seventh of the time goes to rounding tokens.
 * Tried, 64 tokens by AVX-512, other programs beside: eight tokens at a time, 0.97 to 1.01; two sums for each token, so
 *   that a product need not wait for the last, 0.98 to 1.04; these in a function for each form, where GCC 12 keeps all
 *   sums in registers, 0.98 and 1.02.
 * Tried: without scales in a block, products of all 256 columns in one sum, which the offset is taken from once: TQ2_0 0.77
 *   to 0.88 of the speed, at 1, 8 and 64 tokens, as each product then waits for the last (Sapphire Rapids).
 * Not tried yet: two or four such sums; rounding tokens by vectors, 5-bit codes packed, dpbusd with AVX-VNNI (that set multiplies as AVX2 does). */
#ifndef BITNET_REF_RULED_STEPS_H
#define BITNET_REF_RULED_STEPS_H

enum { RULED_ROWS = 16, RULED_TOKENS = 4 };

typedef struct {
    int bits, largest, offset; /* of a code */
    int block, scaled; /* block: of inputs; scaled: columns of a scale within it, or 0 */
    int term; /* what is added to the sums of products: 0 nothing, 1 e * s, 2 minima */
    int is_signed; /* the scales s */
} ruled_form;

enum { N_RULED_FORMS = 9 };
static const ruled_form RULED_FORMS[N_RULED_FORMS] = {
    {8, 255, 128, 32, 0, 0, 0},/* Q8_0 */
    {4, 15, 8, 32, 0, 0, 0},   /* Q4_0 */
    {4, 15, 0, 32, 0, 1, 0},   /* Q4_1 */
    {8, 31, 16, 32, 0, 0, 0},  /* Q5_0 */
    {2, 3, 1, 32, 0, 0, 0},    /* Q2_0, Q1_0 */
    {4, 15, 0, 256, 32, 2, 0}, /* Q4_K */
    {8, 31, 0, 256, 32, 2, 0}, /* Q5_K */
    {8, 63, 32, 256, 16, 0, 1},/* Q6_K */
    {2, 3, 1, 256, 0, 0, 0},   /* TQ1_0, TQ2_0 */
};

static inline size_t ruled_unit_bytes(const ruled_form *f) {
    const size_t codes = (size_t)(f->block * f->bits * RULED_ROWS / 8);
    return codes + (f->term ? 64 : 32) + (f->scaled ? f->block / f->scaled * 16 : 0) + (f->term == 2 ? 128 : 0);
}

/* bytes of a token, a multiple of 64 */
static inline size_t ruled_token_bytes(int block, size_t K) {
    return (K + K / (size_t)block * 4 + K / 16 * 4 + 63) / 64 * 64;
}

/* Rounds a token of K inputs by blocks. -> 0, or 1 if it holds NaN, Inf, or what float16 cannot scale */
static int ruled_token(const float *x, size_t K, int block, uint8_t *out) {
    int8_t *q = (int8_t *)out;
    float *dx = (float *)(out + K);
    void *sums = dx + K / (size_t)block;
    const float magic = 12582912.0f; /* 1.5 * 2^23: adding and subtracting it rounds half to even */
    for (size_t k = 0; k < K; k += (size_t)block, x += block, q += block, dx++) {
        uint32_t most = 0; /* |x| as its bits, which are ordered as |x| */
        int at = 0;
        for (int j = 0; j < block; j++) {
            uint32_t bits;
            memcpy(&bits, x + j, sizeof bits);
            bits &= 0x7FFFFFFFu;
            if (bits > most) most = bits, at = j;
        }
        float a, scale = 0, d = 0;
        memcpy(&a, &most, sizeof a);
        if (most >= 0x7F800000u) return 1;
        if (a >= 0x1p-120f) {
            if (block == 32) {
                uint16_t half;
                scale = 127 / a;
                d = a / 127;
                if (d >= 65520.0f) return 1;
                kv_halves(&d, 1, &half);
                half_to_float_plain(&half, 1, dx);
            } else {
                scale = -127 / x[at];
                *dx = 1 / scale;
            }
        } else *dx = 0;
        for (int j = 0; j < block; j++) {
            const int v = (int)(x[j] * scale + magic - magic);
            q[j] = (int8_t)(v > 127 ? 127 : v);
        }
        for (int j = 0; j < block; j += 16) {
            int32_t sum = 0;
            for (int i = 0; i < 16; i++) sum += q[j + i];
            ((int32_t *)sums)[(k + (size_t)j) / 16] = sum;
        }
        if (block == 32) { /* Q8_1's s, beside the sums: of 16 columns each, the second is kept with the first */
            int32_t *pair = (int32_t *)sums + k / 16;
            const int32_t whole = pair[0] + pair[1];
            float s = d * (float)whole;
            uint16_t half;
            pair[0] = whole;
            if (s >= 65520.0f || s <= -65520.0f) pair[1] = 0x7F800000; /* an error for Q4_1 only */
            else kv_halves(&s, 1, &half), half_to_float_plain(&half, 1, (float *)pair + 1);
        }
    }
    return 0;
}

/* whether some s of a token is beyond float16 */
static int ruled_token_overflows(const uint8_t *token, size_t K) {
    const int32_t *pairs = (const int32_t *)(token + K + K / 32 * 4);
    int is_bad = 0;
    for (size_t b = 0; b < K / 32; b++) is_bad |= pairs[2 * b + 1] == 0x7F800000;
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
typedef int8_t STEP(i8v) __attribute__((vector_size(STEP_BYTES)));
#if STEP_BYTES == 32
#define RULED_SIGNED(f) (f.offset >= 32)
#define RULED_RUN(f) (f.bits < 8 ? 8 : f.largest < 64 ? 4 : 1)
#else
#define RULED_SIGNED(f) 0
#define RULED_RUN(f) (f.scaled == 16 ? 4 : 8)
#endif

/* acc + the products of 4 columns: bytes of w, unsigned or signed, and of x, signed, the same for all rows */
RULED_INLINE STEP(i32v) STEP(ruled_dot)(STEP(i32v) acc, STEP(i32v) w, int32_t x, const int is_signed) {
#if STEP_BYTES == 64
    return (STEP(i32v))_mm512_dpbusd_epi32((__m512i)acc, (__m512i)w, _mm512_set1_epi32(x));
#elif STEP_BYTES == 32
    const __m256i all = _mm256_set1_epi32(x), from = (__m256i)w;
    const __m256i pairs = is_signed ? _mm256_maddubs_epi16(_mm256_abs_epi8(from), _mm256_sign_epi8(all, from))
                                    : _mm256_maddubs_epi16(from, all);
    return (STEP(i32v))_mm256_add_epi16((__m256i)acc, pairs);
#else
    for (int j = 0; j < 4; j++) acc += (w >> 8 * j & 255) * (int32_t)(int8_t)((uint32_t)x >> 8 * j);
    return acc;
#endif
}

/* 16 bytes of a unit, those of the rows of this register */
RULED_INLINE STEP(i32v) STEP(ruled_bytes)(const uint8_t *p, const int is_signed) {
    return is_signed ? STEP(signed_bytes)(p) : STEP(bytes)(p);
}

/* what the sums of a run are multiplied by: the scales at p, or 1 */
RULED_INLINE STEP(i32v) STEP(ruled_scales)(const uint8_t *p, const int scaled, const int is_signed) {
#if STEP_BYTES == 32 /* twice each, 16 bits */
    if (!scaled) return (STEP(i32v))_mm256_set1_epi16(1);
    __m128i twice = _mm_loadl_epi64((const __m128i *)p);
    twice = _mm_unpacklo_epi8(twice, twice);
    return (STEP(i32v))(is_signed ? _mm256_cvtepi8_epi16(twice) : _mm256_cvtepu8_epi16(twice));
#else
    return scaled ? STEP(ruled_bytes)(p, is_signed) : (STEP(i32v)){0} + 1;
#endif
}

/* total + the sums of a run, scaled */
RULED_INLINE STEP(i32v) STEP(ruled_add)(STEP(i32v) total, STEP(i32v) acc, STEP(i32v) scales) {
#if STEP_BYTES == 32
    return total + (STEP(i32v))_mm256_madd_epi16((__m256i)acc, (__m256i)scales);
#else
    return total + acc * scales;
#endif
}

/* Rows `lane` on, as many as a register has lanes, of a panel times T tokens.   y: T rows of 16 */
RULED_INLINE void STEP(ruled_rows)(const ruled_form f, const uint8_t *unit, const size_t K, const uint8_t *tokens,
                                   const size_t token_bytes, const int T, float *y, const int lane) {
    const size_t codes = (size_t)(f.block * f.bits * RULED_ROWS / 8), bytes = ruled_unit_bytes(&f);
    STEP(f32v) t[RULED_TOKENS], u[RULED_TOKENS];
    STEP_UNROLL
    for (int i = 0; i < T; i++) t[i] = u[i] = (STEP(f32v)){0};
    for (size_t k = 0; k < K; k += (size_t)f.block, unit += bytes) {
        STEP(i32v) total[RULED_TOKENS], minima[RULED_TOKENS];
        const uint8_t *scales = unit + codes + (f.term ? 64 : 32) + lane;
        const uint8_t *mins = scales + (f.scaled ? f.block / f.scaled * 16 : 0);
        STEP_UNROLL
        for (int i = 0; i < T; i++) total[i] = minima[i] = (STEP(i32v)){0};
        for (int part = 0; part < f.block / 32; part++) { /* 32 columns */
            const uint8_t *from = unit + part * (f.bits * 64) + 4 * lane;
            STEP(i32v) acc[RULED_TOKENS], s = {0}, m = {0};
            STEP_UNROLL
            for (int g = 0; g < 8; g++) { /* 4 columns */
                const int group = f.scaled == 16 ? 2 * part + g / 4 : part; /* of columns with one scale */
                if (g % (f.scaled == 16 ? 4 : 8) == 0) {
                    s = STEP(ruled_scales)(scales + group * 16, f.scaled, f.is_signed);
                    if (f.term == 2) m = STEP(bytes)(mins + part * 16);
                    STEP_UNROLL
                    for (int i = 0; i < T; i++) {
                        const int32_t *sums = (const int32_t *)(tokens + (size_t)i * token_bytes + K + K / (size_t)f.block * 4);
                        int32_t sum = sums[k / 16 + (size_t)(f.scaled == 16 ? group : 2 * part)];
                        if (f.block == 256 && f.scaled != 16) sum += sums[k / 16 + (size_t)(2 * part + 1)];
                        const STEP(i32v) of_all = (STEP(i32v)){0} + sum;
                        acc[i] = (STEP(i32v)){0};
                        if (f.offset && !RULED_SIGNED(f) && f.scaled) acc[i] -= f.offset * of_all;
                        if (f.offset && !RULED_SIGNED(f) && !f.scaled) total[i] -= f.offset * of_all;
                        if (f.term == 2) minima[i] = STEP(ruled_add)(minima[i], m, of_all);
                    }
                }
                STEP(i32v) w;
                memcpy(&w, from + (f.bits == 8 ? g : f.bits == 4 ? g % 4 : g % 2) * 64, sizeof w);
                if (f.bits == 4) w = (g / 4 ? w >> 4 : w) & 0x0F0F0F0F;
                if (f.bits == 2) w = (w >> 2 * (g / 2)) & 0x03030303;
                if (RULED_SIGNED(f)) w = (STEP(i32v))((STEP(i8v))w - (int8_t)f.offset); /* it wraps */
                STEP_UNROLL
                for (int i = 0; i < T; i++) {
                    int32_t x;
                    memcpy(&x, tokens + (size_t)i * token_bytes + k + part * 32 + g * 4, sizeof x);
                    acc[i] = STEP(ruled_dot)(acc[i], w, x, RULED_SIGNED(f));
                }
                if ((g + 1) % RULED_RUN(f) == 0) {
                    STEP_UNROLL
                    for (int i = 0; i < T; i++) {
                        total[i] = STEP(ruled_add)(total[i], acc[i], s);
                        acc[i] = (STEP(i32v)){0};
                    }
                }
            }
        }
        const STEP(f32v) d = STEP(weights)(unit + codes, (size_t)lane, 2);
        const STEP(f32v) e = STEP(weights)(unit + codes, (size_t)lane + (f.term ? 16 : 0), 2);
        STEP_UNROLL
        for (int i = 0; i < T; i++) {
            const float *dx = (const float *)(tokens + (size_t)i * token_bytes + K);
            const float scale = dx[k / (size_t)f.block];
            t[i] += d * scale * STEP(to_floats)(total[i]);
            if (f.term == 1) u[i] += e * dx[K / 32 + k / 16 + 1];
            if (f.term == 2) u[i] += e * scale * STEP(to_floats)(minima[i]);
        }
    }
    STEP_UNROLL
    for (int i = 0; i < T; i++) {
        if (f.term) t[i] += u[i];
        memcpy(y + i * RULED_ROWS + lane, &t[i], sizeof t[i]);
    }
}

/* The 16 rows of a panel times M tokens.   y: `rows` of the 16, those of a token y_stride apart */
RULED_TARGET static void STEP(ruled_panel)(int form, const uint8_t *panel, size_t K, const uint8_t *tokens,
                                           size_t token_bytes, size_t M, size_t rows, float *y, size_t y_stride) {
    float out[RULED_TOKENS * RULED_ROWS];
    for (size_t m = 0; m < M;) {
        const int T = M - m >= RULED_TOKENS ? RULED_TOKENS : 1;
        const uint8_t *some = tokens + m * token_bytes;
        for (int lane = 0; lane < RULED_ROWS; lane += STEP_BYTES / 4) {
#define FORM(n)                                                                                                        \
    case n:                                                                                                            \
        if (T == 1) STEP(ruled_rows)(RULED_FORMS[n], panel, K, some, token_bytes, 1, out, lane);                       \
        else STEP(ruled_rows)(RULED_FORMS[n], panel, K, some, token_bytes, RULED_TOKENS, out, lane);                   \
        break;
            switch (form) { FORM(0) FORM(1) FORM(2) FORM(3) FORM(4) FORM(5) FORM(6) FORM(7) FORM(8) }
#undef FORM
        }
        for (int i = 0; i < T; i++, m++) memcpy(y + m * y_stride, out + i * RULED_ROWS, rows * sizeof(float));
    }
}
#undef RULED_SIGNED
#undef RULED_RUN
#undef RULED_INLINE
#undef RULED_TARGET
