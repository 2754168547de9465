/* Rows of a dense matrix times some tokens, in float32: the head where all logits are wanted, and dense models.
 *
 * Plain version: layers.py, `dense_matmul`. The product of a row and a token is summed in 32 lanes (lane j takes
 * columns j, 32 + j, ...), then by halves (16 + 16, 8 + 8, ...), then come the columns beyond the last 32; each product
 * and each sum is rounded. This order is the same on every machine, for any number of rows and tokens.
 *
 * A tile of rows and tokens is computed at once: a weight is widened once for all tokens of the tile, and enough sums
 * are in flight to hide the latency of an addition. A pass takes one or two vectors of each sum, one token with AVX2
 * all four. Several tokens are multiplied with some columns of 16 rows at a time, which stay in L1; between them the 32
 * sums of each row and token are in memory.
 *
 * A template, included by float_steps.h. GCC 12 keeps the tile's array of sums in registers because one flat, unrolled
 * loop iterates over it; with nested loops it stayed in memory.
 *
 * Measured, one thread of a Cascade Lake Xeon, AVX-512, bfloat16 rows, G multiply-adds/s of processor time: 64128 x
 *   2560 (from memory), 16 tokens 21.1, 6 tokens 20.8, 1 token 5.9 (12 GB/s, the memory's rate); 512 x 2560 (in L2), 12
 *   tokens 21.4; 4096 x 256, 64 tokens 16.6. One row and token at a time: 6.2 for any number of tokens. The max with
 *   products and sums rounded apart is 36. Half of the gain came from aligning sums and activations to cache lines, the
 *   rest from vpmovzxwd for the weights. Of that, 2 rows x 6 tokens of two vectors, and all columns at once.
 * Emerald Rapids, 2048 columns, float32, one core, pairs in turn, share of 45 G products and sums per second: 64 tokens
 *   0.69 to 0.76 before, 0.82 to 0.84 now; 512 tokens 0.61 to 0.67, 0.66 to 0.79. In spells when this virtual core is
 *   slower in everything but arithmetic on registers: 0.52, 0.59 and 0.50, 0.55. 2 and 3 tokens: 1.03 to 1.23 times as
 *   fast; 5632 columns, 64 tokens: 1.22; AVX2, 64 tokens: 1.06 to 1.11.
 *   Parts of 256 columns 0.96 to 1.08 of the speed before, 512 1.11 to 1.26, 1024 1.04 to 1.16, all columns 0.92 to 1.12.
 * Tried: 4 rows x 3 tokens: 15 (twice the weights to widen per product). AVX2, 1 token, 60000 x 2560: two rows in one
 *   pass 12.4 GB/s (two threads 23.4); four rows in two passes, which with the next four exceed L1, 9.4 (18.3). */

enum { STEP(DENSE_TOKENS) = STEP_BYTES == 64 ? 6 : 3 }; /* per tile: what fits 32 registers, or 16 */
#ifndef BITNET_REF_DENSE_ROWS_H
#define BITNET_REF_DENSE_ROWS_H
enum { DENSE_ROWS = 16, DENSE_COLUMNS = 640 }; /* whose sums and tokens are in L1 */
#endif

STEP_INLINE STEP(f32v) STEP(floats)(const float *x) {
    STEP(f32v) v;
    memcpy(&v, x, sizeof v);
    return v;
}

/* a vector of a row's weights as float32, exactly. kind: as in dense_blocks.h */
STEP_INLINE STEP(f32v) STEP(weights)(const void *row, size_t k, const int kind) {
    if (kind == 0) {
        STEP(f32v) v;
        memcpy(&v, (const float *)row + k, sizeof v);
        return v;
    }
#if STEP_BYTES == 64 /* GCC 12 turns __builtin_convertvector into six instructions */
    const __m256i bits = _mm256_loadu_si256((const __m256i *)((const uint16_t *)row + k));
    if (kind == 2) return (STEP(f32v))_mm512_cvtph_ps(bits);
    return (STEP(f32v))_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16);
#elif STEP_BYTES == 32
    const __m128i bits = _mm_loadu_si128((const __m128i *)((const uint16_t *)row + k));
    if (kind == 2) return (STEP(f32v))_mm256_cvtph_ps(bits);
    return (STEP(f32v))_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16);
#else
    if (kind == 2) {
        float v[STEP(FLOATS)];
        half_to_float_plain((const uint16_t *)row + k, STEP(FLOATS), v);
        return STEP(floats)(v);
    }
    STEP(u16h) half;
    memcpy(&half, (const uint16_t *)row + k, sizeof half);
    return (STEP(f32v))(__builtin_convertvector(half, STEP(u32v)) << 16);
#endif
}

STEP_INLINE float STEP(weight)(const void *row, size_t k, const int kind) {
    if (kind == 0) return ((const float *)row)[k];
    if (kind == 2) {
        float v;
        half_to_float_plain((const uint16_t *)row + k, 1, &v);
        return v;
    }
    return bits_float((uint32_t)((const uint16_t *)row)[k] << 16);
}

typedef float STEP(four) __attribute__((vector_size(16)));

/* 16 lanes -> 4, by halves */
STEP_INLINE STEP(four) STEP(fold)(const float *lanes) {
    STEP(four) v[4];
    memcpy(v, lanes, sizeof v);
    return (v[0] + v[2]) + (v[1] + v[3]);
}

/* 32 lanes -> 1, by halves */
STEP_INLINE float STEP(total)(const float *lanes) {
    float half[16] __attribute__((aligned(64)));
    STEP_UNROLL
    for (int i = 0; i < 16; i += STEP(FLOATS)) {
        const STEP(f32v) v = STEP(floats)(lanes + i) + STEP(floats)(lanes + 16 + i);
        memcpy(half + i, &v, sizeof v);
    }
    const STEP(four) four = STEP(fold)(half);
    return (four[0] + four[2]) + (four[1] + four[3]);
}

/* Adds the products of n columns (a multiple of 32) of R rows and T tokens to their 32 sums each in `lanes`, which need
 * not be set before the first columns; V vectors of each sum per pass. Prefetches R rows at `ahead`. */
STEP_INLINE void STEP(dense_tile)(const int kind, const int R, const int T, const int V, const char *w, size_t K,
                                  const char *ahead, const float *x, size_t n, int is_first, float *lanes) {
    const size_t row_bytes = dense_row_bytes(kind, K), size = DENSE_KINDS[kind].bytes;
    for (size_t pass = 0; pass < 32; pass += V * STEP(FLOATS)) {
        STEP(f32v) sum[4 * STEP(DENSE_TOKENS)], weights[8];
#define LANES(i) (lanes + i / V * 32 + pass + i % V * STEP(FLOATS)) /* row i / VT, token i / V % T, vector i % V */
        if (is_first) {
            STEP_UNROLL
            for (int i = 0; i < V * R * T; i++) sum[i] = (STEP(f32v)){0};
        } else {
            STEP_UNROLL
            for (int i = 0; i < V * R * T; i++) sum[i] = STEP(floats)(LANES(i));
        }
        for (size_t k = pass; k < n; k += 32) {
            STEP_UNROLL
            for (int i = 0; i < V * R; i++) {
                if (i % V == 0 && pass == 0) __builtin_prefetch(ahead + i / V * row_bytes + k * size);
                weights[i] = STEP(weights)(w + i / V * row_bytes, k + i % V * STEP(FLOATS), kind);
            }
            STEP_UNROLL
            for (int i = 0; i < V * R * T; i++)
                sum[i] += weights[i / (V * T) * V + i % V] * STEP(floats)(x + i / V % T * K + k + i % V * STEP(FLOATS));
        }
        STEP_UNROLL
        for (int i = 0; i < V * R * T; i++) memcpy(LANES(i), &sum[i], sizeof sum[i]);
#undef LANES
    }
}

/* four[i] = the total of the i-th 32 lanes, which lie `stride` floats apart */
STEP_INLINE void STEP(fold_4)(const float *lanes, size_t stride, float *four) {
#if STEP_BYTES == 64
#define HALF(i) _mm512_add_ps(_mm512_load_ps(lanes + i * stride), _mm512_load_ps(lanes + i * stride + 16))
#define SUM(a, b, low, high) _mm512_add_ps(_mm512_shuffle_f32x4(a, b, low), _mm512_shuffle_f32x4(a, b, high))
    const __m512 first = HALF(0), second = HALF(1), third = HALF(2), fourth = HALF(3);
    __m512 v = SUM(SUM(first, second, 0x44, 0xEE), SUM(third, fourth, 0x44, 0xEE), 0x88, 0xDD); /* four of each */
    v = _mm512_add_ps(v, _mm512_permute_ps(v, 0x4E));
    v = _mm512_add_ps(v, _mm512_permute_ps(v, 0xB1));
    _mm_storeu_ps(four, _mm512_castps512_ps128(_mm512_maskz_compress_ps(0x1111, v)));
#undef HALF
#undef SUM
#else
    STEP_UNROLL
    for (int i = 0; i < 4; i++) four[i] = STEP(total)(lanes + i * stride);
#endif
}

/* y[t * y_stride + r] = the 32 sums of row r and token t, and the products of the columns beyond them */
STEP_INLINE void STEP(finish_sums)(const int kind, const int R, const int T, const char *w, size_t K, const float *x,
                                   const float *lanes, float *y, size_t y_stride) {
    int r = 0;
    for (; r + 4 <= R; r += 4)
        for (int t = 0; t < T; t++) STEP(fold_4)(lanes + (r * T + t) * 32, T * 32, y + t * y_stride + r);
    for (; r < R; r++)
        for (int t = 0; t < T; t++) y[t * y_stride + r] = STEP(total)(lanes + (r * T + t) * 32);
    for (int i = 0; K % 32 && i < R * T; i++)
        for (size_t k = K - K % 32; k < K; k++)
            y[i % T * y_stride + i / T] += STEP(weight)(w + i / T * dense_row_bytes(kind, K), k, kind) * x[i % T * K + k];
}

/* R rows and a token, all columns at once */
STEP_INLINE void STEP(dense_token)(const int kind, const int R, const int V, const char *w, size_t K, const float *x,
                                   float *y, size_t y_stride) {
    float lanes[4 * 32] __attribute__((aligned(64)));
    STEP(dense_tile)(kind, R, 1, V, w, K, w + R * dense_row_bytes(kind, K), x, K - K % 32, 1, lanes);
    STEP(finish_sums)(kind, R, 1, w, K, x, lanes, y, y_stride);
}

/* `rows` rows, a multiple of R and at most DENSE_ROWS, and T tokens, DENSE_COLUMNS at a time, which stay in L1 */
STEP_INLINE void STEP(dense_part)(const int kind, const int T, const char *w, size_t rows, size_t K, const float *x,
                                  float *y, size_t y_stride) {
    enum { R = STEP_BYTES == 64 ? 4 : 2 };
    const int V = STEP_BYTES == 64 && T > 3 ? 1 : 2;
    float lanes[DENSE_ROWS * STEP(DENSE_TOKENS) * 32] __attribute__((aligned(64)));
    const size_t row_bytes = dense_row_bytes(kind, K), K32 = K - K % 32, size = DENSE_KINDS[kind].bytes;
    const size_t count = K32 > 0 ? (K32 + DENSE_COLUMNS - 1) / DENSE_COLUMNS : 1, step = (K32 / 32 + count - 1) / count * 32;
    for (size_t part = 0; part < count; part++) {
        const size_t k = part * step < K32 ? part * step : K32, n = K32 - k < step ? K32 - k : step;
        for (size_t r = 0; r < rows; r += R) {
            const char *at = w + r * row_bytes + k * size;
            const char *ahead = r + R < rows ? at + R * row_bytes : w + (k + step) * size;
            STEP(dense_tile)(kind, R, T, V, at, K, ahead, x + k, n, k == 0, lanes + r * T * 32);
        }
    }
    STEP(finish_sums)(kind, (int)rows, T, w, K, x, lanes, y, y_stride);
}

/* The same of blocks, K a multiple of 32, all 32 lanes in one pass. */
STEP_INLINE void STEP(block_tile)(const int kind, const int R, const int T, const char *w, size_t K, const float *x, float *y,
                                  size_t y_stride) {
    enum { V = 32 / STEP(FLOATS) };
    const size_t row_bytes = dense_row_bytes(kind, K);
    STEP(f32v) sum[2 * STEP(DENSE_TOKENS) * V] = {{0}};
    float factors[4][16];
    int8_t quants[4][256];
    const int step = BLOCK_STEP(kind), parts = R * step / 32;
#define MULTIPLY(n)                                                                                                    \
    {                                                                                                                  \
        const uint8_t *b = (const uint8_t *)w + dense_row_bytes(kind, k), *ahead = b + R * row_bytes;                  \
        const float *f = factors[0], *of_token = x + k;                                                                \
        const int8_t *q = quants[0];                                                                                   \
        STEP_UNROLL                                                                                                    \
        for (int r = 0; r < R; r++) STEP(block_factors)(b + r * row_bytes, n, kind, factors[r], quants[r]);            \
        for (int left = 32 * n / step; left > 0; left--) {                                                             \
            STEP_UNROLL                                                                                                \
            for (int i = 0; i < parts; i++) { /* of each row 32 columns, then the next 32 */                           \
                const int r = i % R, c = i / R * 32;                                                                   \
                if (c == 0) __builtin_prefetch(ahead + r * row_bytes);                                                 \
                STEP_UNROLL                                                                                            \
                for (int v = 0; v < V; v++) {                                                                          \
                    const int column = c + v * STEP(FLOATS);                                                           \
                    const STEP(f32v) weights =                                                                         \
                        STEP(block_weights)(b + r * row_bytes, column, kind, f + r * 16, q + r * 256);                 \
                    STEP_UNROLL                                                                                        \
                    for (int t = 0; t < T; t++)                                                                        \
                        sum[(r * T + t) * V + v] += weights * STEP(floats)(of_token + t * K + column);                 \
                }                                                                                                      \
            }                                                                                                          \
            b += BLOCK_STEP_BYTES(kind), f += BLOCK_STEP_FACTORS(kind), q += step, of_token += step;                   \
            ahead += step * DENSE_KINDS[kind].bytes / DENSE_KINDS[kind].values;                                        \
        }                                                                                                              \
    }
    EACH_BLOCKS(MULTIPLY)
#undef MULTIPLY
    STEP_UNROLL
    for (int i = 0; i < R * T; i++) {
        float lanes[16] __attribute__((aligned(64)));
        STEP_UNROLL
        for (int v = 0; v < V / 2; v++) {
            const STEP(f32v) half = sum[i * V + v] + sum[i * V + v + V / 2];
            memcpy(lanes + v * STEP(FLOATS), &half, sizeof half);
        }
        const STEP(four) four = STEP(fold)(lanes);
        y[i % T * y_stride + i / T] = (four[0] + four[2]) + (four[1] + four[3]);
    }
}

STEP_INLINE void STEP(dense_rows_of)(const int kind, const char *w, size_t rows, size_t K, const float *x, size_t M,
                                     float *y, size_t y_stride) {
    const size_t row_bytes = dense_row_bytes(kind, K);
    size_t first = 0; /* of the rows that are left */
    if (M == 1 && STEP_BYTES == 32)
        for (; first + 2 <= rows; first += 2)
            STEP(dense_token)(kind, 2, 4, w + first * row_bytes, K, x, y + first, y_stride);
    if (M == 1) /* four rows, so that enough sums are in flight */
        for (; first + 4 <= rows; first += 4)
            STEP(dense_token)(kind, 4, 2, w + first * row_bytes, K, x, y + first, y_stride);
    const size_t parts = (M + STEP(DENSE_TOKENS) - 1) / STEP(DENSE_TOKENS);
    for (size_t part = 0; M > 1 && part < parts; part++) { /* of equal size or nearly; its tokens stay in L2 for all rows */
        const size_t m = part * M / parts;
        for (size_t n = 0, some; (some = rows - n < DENSE_ROWS ? (rows - n) / 4 * 4 : DENSE_ROWS) > 0; n += some) {
#define PART(T)                                                                                                        \
    case T:                                                                                                            \
        STEP(dense_part)(kind, T, w + n * row_bytes, some, K, x + m * K, y + m * y_stride + n, y_stride);              \
        break;
            switch ((part + 1) * M / parts - m) {
                PART(1) PART(2) PART(3)
#if STEP_BYTES == 64
                PART(4) PART(5) PART(6)
#endif
            }
#undef PART
        }
    }
    if (M > 1) first = rows / 4 * 4;
    for (size_t n = first; n < rows; n++)
        for (size_t m = 0; m < M; m++)
            STEP(dense_token)(kind, 1, 2, w + n * row_bytes, K, x + m * K, y + m * y_stride + n, y_stride);
}

/* blocks, for one token, or with AVX-512 for as many as a tile takes */
STEP_INLINE void STEP(block_rows_of)(const int kind, const char *w, size_t rows, size_t K, const float *x, size_t M, float *y,
                                     size_t y_stride) {
    enum { R = STEP_BYTES / 16 };
    const size_t row_bytes = dense_row_bytes(kind, K);
    size_t n = 0;
    if (M == 1)
        for (; n + R <= rows; n += R) STEP(block_tile)(kind, R, 1, w + n * row_bytes, K, x, y + n, y_stride);
#if STEP_BYTES == 64
    for (; M > 1 && n + 2 <= rows; n += 2) {
#define TILE(T) case T: STEP(block_tile)(kind, 2, T, w + n * row_bytes, K, x, y + n, y_stride); break;
        switch (M) { TILE(2) TILE(3) TILE(4) TILE(5) TILE(6) }
#undef TILE
    }
#endif
    for (; n < rows; n++)
        for (size_t m = 0; m < M; m++)
            STEP(block_tile)(kind, 1, 1, w + n * row_bytes, K, x + m * K, y + m * y_stride + n, y_stride);
}

/* K weights of a row, a multiple of 32, as float32 */
STEP_INLINE void STEP(widen_floats)(const int kind, const char *row, size_t K, float *out) {
    for (size_t k = 0; k < K; k += STEP(FLOATS)) {
        const STEP(f32v) v = STEP(weights)(row, k, kind);
        memcpy(out + k, &v, sizeof v);
    }
}

/* y[m * y_stride + n] = w[n] . x[m], for `rows` rows of w (rows, K) and x (M, K). wide: room for the rows in float32, to
 * which they are widened first if there are more tokens than a tile takes; NULL for one token, or float32. */
STEP_TARGET static void STEP(dense_rows)(int kind, const void *w, size_t rows, size_t K, const float *x, size_t M,
                                         float *y, size_t y_stride, float *wide) {
    if (kind == 0 || M <= (kind < Q8_0 || STEP_BYTES == 64 ? STEP(DENSE_TOKENS) : 1)) wide = NULL;
    for (size_t n = 0; wide && n < rows; n++) {
        const void *row = (const char *)w + n * dense_row_bytes(kind, K);
        switch (kind) {
#define FLOATS(kind) case kind: STEP(widen_floats)(kind, row, K, wide + n * K); break;
#define BLOCKS(kind) case kind: STEP(widen_blocks)(kind, row, K, wide + n * K); break;
            FLOATS(1) FLOATS(2) BLOCKS(Q8_0) BLOCKS(Q4_0) BLOCKS(Q4_1) BLOCKS(Q4_K) BLOCKS(Q6_K)
        }
    }
    if (wide) kind = 0, w = wide;
    switch (kind) {
#undef FLOATS
#undef BLOCKS
#define FLOATS(kind) case kind: STEP(dense_rows_of)(kind, w, rows, K, x, M, y, y_stride); break;
#define BLOCKS(kind) case kind: STEP(block_rows_of)(kind, w, rows, K, x, M, y, y_stride); break;
        FLOATS(0) FLOATS(1) FLOATS(2) BLOCKS(Q8_0) BLOCKS(Q4_0) BLOCKS(Q4_1) BLOCKS(Q4_K) BLOCKS(Q6_K)
#undef FLOATS
#undef BLOCKS
    }
}
#undef EACH_BLOCKS
