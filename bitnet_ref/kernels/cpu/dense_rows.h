/* Rows of a dense matrix times some tokens, in float32: the head where all logits are wanted, and dense models.
 *
 * Plain version: layers.py, `dense_matmul`. The product of a row and a token is summed in 32 lanes (lane j takes
 * columns j, 32 + j, ...), then by halves (16 + 16, 8 + 8, ...), then come the columns beyond the last 32; each product
 * and each sum is rounded. This order is the same on every machine, for any number of rows and tokens.
 *
 * A tile of rows and tokens is computed at once: a weight is widened once for all tokens of the tile, and enough sums
 * are in flight to hide the latency of an addition. A pass takes two vectors of each sum: all 32 lanes with registers
 * of 64 bytes, else it takes two or four passes. One token with AVX2 takes two rows and all lanes at once.
 *
 * A template, included by float_steps.h. GCC 12 keeps the tile's array of sums in registers because one flat, unrolled
 * loop iterates over it; with nested loops it stayed in memory.
 *
 * Measured, one thread of a Cascade Lake Xeon, AVX-512, bfloat16 rows, G multiply-adds/s of processor time: 64128 x
 *   2560 (from memory), 16 tokens 21.1, 6 tokens 20.8, 1 token 5.9 (12 GB/s, the memory's rate); 512 x 2560 (in L2), 12
 *   tokens 21.4; 4096 x 256, 64 tokens 16.6. One row and token at a time: 6.2 for any number of tokens. The max with
 *   products and sums rounded apart is 36. Half of the gain came from aligning sums and activations to cache lines, the
 *   rest from vpmovzxwd for the weights.
 * Tried: 4 rows x 3 tokens: 15 (twice the weights to widen per product). AVX2, 1 token, 60000 x 2560: two rows in one
 *   pass 12.4 GB/s (two threads 23.4); four rows in two passes, which with the next four exceed L1, 9.4 (18.3). */

enum { STEP(DENSE_TOKENS) = STEP_BYTES == 64 ? 6 : 3 }; /* per tile of two rows: what fits 32 registers, or 16 */

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

/* y[t * y_stride + r] = w[r] . x[t] for R rows and T tokens, V vectors of each sum per pass. Prefetches the next R
 * rows. */
STEP_INLINE void STEP(dense_tile)(const int kind, const int R, const int T, const int V, const char *w, size_t K,
                                  const float *x, float *y, size_t y_stride) {
    const size_t row_bytes = dense_row_bytes(kind, K), K32 = K - K % 32;
    float lanes[2 * STEP(DENSE_TOKENS)][16] __attribute__((aligned(64))); /* of each row and token, folded once */
    if (STEP(FLOATS) < 16) memset(lanes, 0, sizeof lanes); /* they are set before they are read, but GCC warns */
    for (size_t pass = 0; pass < 32; pass += V * STEP(FLOATS)) {
        STEP(f32v) sum[4 * STEP(DENSE_TOKENS)] = {{0}}, weights[8];
        for (size_t k = pass; k < K32; k += 32) {
            STEP_UNROLL
            for (int i = 0; i < V * R; i++) {
                const char *row = w + i / V * row_bytes;
                if (i % V == 0 && pass == 0) __builtin_prefetch(row + R * row_bytes + k * DENSE_KINDS[kind].bytes / DENSE_KINDS[kind].values);
                weights[i] = STEP(weights)(row, k + i % V * STEP(FLOATS), kind);
            }
            STEP_UNROLL
            for (int i = 0; i < V * R * T; i++) /* row i / VT, token i / V % T, vector i % V */
                sum[i] += weights[i / (V * T) * V + i % V] * STEP(floats)(x + i / V % T * K + k + i % V * STEP(FLOATS));
        }
        STEP_UNROLL
        for (int i = 0; i < R * T; i++) {
            const int has_all = V * STEP(FLOATS) == 32, n_vectors = has_all ? V / 2 : V;
            STEP_UNROLL
            for (int v = 0; v < n_vectors; v++) {
                STEP(f32v) *half = &sum[V * i + v];
                if (has_all) *half += half[n_vectors];
                if (pass >= 16) *half = STEP(floats)(lanes[i] + pass - 16 + v * STEP(FLOATS)) + *half;
                memcpy(lanes[i] + pass % 16 + v * STEP(FLOATS), half, sizeof *half);
            }
        }
    }
    STEP(four) four[2 * STEP(DENSE_TOKENS)];
    STEP_UNROLL
    for (int i = 0; i < R * T; i++) four[i] = STEP(fold)(lanes[i]);
    STEP_UNROLL
    for (int i = 0; i < R * T; i++) {
        float total = (four[i][0] + four[i][2]) + (four[i][1] + four[i][3]);
        for (size_t k = K32; k < K; k++) total += STEP(weight)(w + i / T * row_bytes, k, kind) * x[i % T * K + k];
        y[i % T * y_stride + i / T] = total;
    }
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
            STEP(dense_tile)(kind, 2, 1, 4, w + first * row_bytes, K, x, y + first, y_stride);
    if (M == 1) /* four rows, so that enough sums are in flight */
        for (; first + 4 <= rows; first += 4)
            STEP(dense_tile)(kind, 4, 1, 2, w + first * row_bytes, K, x, y + first, y_stride);
    const size_t parts = (M + STEP(DENSE_TOKENS) - 1) / STEP(DENSE_TOKENS);
    for (size_t part = 0; part < parts; part++) { /* of equal size or nearly; its tokens stay in L1 for all rows */
        const size_t m = part * M / parts;
        for (size_t n = first; n + 2 <= rows; n += 2) {
#define TILE(T) STEP(dense_tile)(kind, 2, T, 2, w + n * row_bytes, K, x + m * K, y + m * y_stride + n, y_stride)
            switch ((part + 1) * M / parts - m) {
            case 1: TILE(1); break;
            case 2: TILE(2); break;
            case 3: TILE(3); break;
#if STEP_BYTES == 64
            case 4: TILE(4); break;
            case 5: TILE(5); break;
            case 6: TILE(6); break;
#endif
            }
#undef TILE
        }
    }
    first += (rows - first) / 2 * 2;
    for (size_t n = first; n < rows; n++)
        for (size_t m = 0; m < M; m++)
            STEP(dense_tile)(kind, 1, 1, 2, w + n * row_bytes, K, x + m * K, y + m * y_stride + n, y_stride);
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
