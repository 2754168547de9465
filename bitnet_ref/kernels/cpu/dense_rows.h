/* Rows of a dense matrix times some tokens, in float32: the head where all logits are wanted, and dense models.
 *
 * Plain version: layers.py, `dense_matmul`; in this order of its sums check_kernels.c, `dense_sum`. The product of a row
 * and a token is summed in 32 lanes (lane j takes columns j, 32 + j, ...) by fused multiply-adds, then by halves (16 +
 * 16, 8 + 8, ...), then come the columns beyond the last 32. This order is the same on every machine, for any number of
 * rows and tokens; an x86 processor without AVX2 rounds each product too, having no fused multiply-add.
 *
 * A tile of rows and tokens is computed at once: a weight is widened once for all tokens of the tile, and enough sums
 * are in flight to hide the latency of an addition. A pass takes one or two vectors of each sum, one token with AVX2
 * all four. Several tokens are multiplied with some columns of 16 rows at a time, which stay in L1; between them the 32
 * sums of each row and token are in memory. For many tokens the rows are first widened and packed tile by tile, in the
 * order of their reading; for more than FEW_TOKENS rows and tokens are packed so that a lane is a row (below).
 *
 * A template, included by float_steps.h. GCC 12 keeps the tile's array of sums in registers because one flat, unrolled
 * loop iterates over it; with nested loops it stayed in memory.
 *
 * Measured, one thread of a Cascade Lake Xeon, AVX-512, bfloat16 rows, G multiply-adds/s of processor time: 64128 x
 *   2560 (from memory), 16 tokens 21.1, 6 tokens 20.8, 1 token 5.9 (12 GB/s, the memory's rate); 512 x 2560 (in L2), 12
 *   tokens 21.4; 4096 x 256, 64 tokens 16.6. One row and token at a time: 6.2 for any number of tokens. The max with
 *   products and sums rounded apart is 36. Half of the gain came from aligning sums and activations to cache lines, the
 *   rest from vpmovzxwd for the weights. Of that, 2 rows x 6 tokens of two vectors, and all columns at once.
 * Parts of the columns, Emerald Rapids, 256 of 2048: 0.96 to 1.08 of the speed of no parts; 512 1.11 to 1.26, 1024
 *   1.04 to 1.16; now (packed) 1024 and 640 are equal.
 * Emerald Rapids, one core beside busy neighbours, AVX-512, G multiply-adds/s (90 at most): products and sums apart;
 *   fused; fused and packed.
 *     tokens                        1            4            16            64            512
 *     bfloat16 1536 x 576    14, 16, 16   22, 31, 30    23, 28, 34    32, 47, 55    32, 44, 49
 *     bfloat16 5632 x 2048   13, 13, 13   25, 30, 30    21, 27, 31    28, 35, 41    31, 37, 44
 *     Q4_0 1536 x 576        14, 17, 17   22, 31, 30    27, 36, 36    32, 46, 51    27, 36, 46
 *   AVX2: 1.10 to 1.35 times as fast with one token, 1.15 to 1.25 with more.
 *   Half of the last gain is that a token's vector is loaded once, not once per row. Packing loses for few tokens of
 *   float32.
 * Tried: 4 rows x 3 tokens: 15 (twice the weights to widen per product). AVX2, 1 token, 60000 x 2560: two rows in one
 *   pass 12.4 GB/s (two threads 23.4); four rows in two passes, which with the next four exceed L1, 9.4 (18.3).
 *   Packed: prefetching 8 steps ahead 0.82 to 0.93, the next tile 0.9, the next rows in memory 0.94 to 1.0; 8 rows in
 *   L1 0.94 to 1.02. Alone in a loop, 2 rows x 12 tokens or 3 x 8: 0.75 of 4 x 6; tokens packed too: 1.05.
 * A lane for each row, Emerald Rapids beside busy neighbours, one thread's processor time, minimum of up to 60 runs, equal
 *   bits, G multiply-adds/s (AVX-512 89 at most, AVX2 45): before (a tile's rows packed), now.
 *     tokens                        16            32            64           256
 *     bfloat16 1536 x 576       44, 45        53, 57        59, 67        54, 66
 *     bfloat16 576 x 1536       46, 41        49, 53        54, 62        46, 66
 *     bfloat16 2048 x 2048      34, 32        41, 44        52, 55        53, 69
 *     Q4_1 1536 x 576           47, 46        57, 61        60, 67        63, 68
 *     Q4_1 576 x 1536           47, 42        49, 57        54, 68        58, 74
 *     Q4_1 2048 x 2048          47, 36        48, 48        58, 57        53, 69
 *     bfloat16 1536 x 576, AVX2 22, 28        24, 34        25, 37        25, 39
 *   Hence FEW_TOKENS. A packed panel alone, from L2, reaches 80 (576 columns) to 86 (2048); packing takes 0.14 to 0.21 ns
 *   per weight, as long as 12 to 18 tokens, because it stores to 32 places, which miss L1. Tried there: a transposition of
 *   16 x 16 in registers, stored column by column, 0.25 to 0.29 ns; that of 4 columns, so stored, 0.20 to 0.30; 512
 *   columns at a time, or lines prefetched while rows are widened, 0.21 to 0.24. Panels prefetched 512 to 2048 bytes ahead:
 *   the same.
 *   An exact fused multiply-add in SSE2 (double products and sums, rounded to odd): 0.04 to 0.09 of two instructions. */

/* per tile: what fits 32 registers, or 16 */
enum { STEP(DENSE_TOKENS) = STEP_BYTES == 64 ? 6 : 3, STEP(TILE_ROWS) = STEP_BYTES == 64 ? 4 : 2 };
enum { STEP(FEW_TOKENS) = STEP_BYTES == 64 ? 24 : 6 }; /* with more, a lane is a row */
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
 * not be set before the first columns; V vectors of each sum per pass. Rows lie `row` bytes apart, 32 columns of one
 * `step` bytes; R rows `far` bytes ahead, which lie alike, are prefetched unless it is 0. */
STEP_INLINE void STEP(dense_tile)(const int kind, const int R, const int T, const int V, const char *w, size_t row,
                                  size_t step, size_t far, const float *x, size_t K, size_t n, int is_first,
                                  float *lanes) {
    const size_t size = DENSE_KINDS[kind].bytes;
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
        const char *at = w + pass * size;
        for (size_t k = pass; k < n; k += 32, at += step) {
            STEP_UNROLL
            for (int i = 0; i < V * R; i++) {
                if (far && i % V == 0 && pass == 0) prefetch_row(at + i / V * row, at + i / V * row + far);
                weights[i] = STEP(weights)(at + i / V * row, i % V * STEP(FLOATS), kind);
            }
            STEP_UNROLL
            for (int i = 0; i < V * R * T; i++) { /* token by token: each is loaded once */
                const int t = i / (V * R), at_weight = i % (V * R), v = i % V, to = (at_weight / V * T + t) * V + v;
                sum[to] = STEP(fused)(weights[at_weight], STEP(floats)(x + t * K + k + v * STEP(FLOATS)), sum[to]);
            }
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
        for (size_t k = K - K % 32; k < K; k++) {
            float *to = y + i % T * y_stride + i / T;
            *to = STEP(fused_one)(STEP(weight)(w + i / T * dense_row_bytes(kind, K), k, kind), x[i % T * K + k], *to);
        }
}

/* R rows and a token, all columns at once */
STEP_INLINE void STEP(dense_token)(const int kind, const int R, const int V, const char *w, size_t far, size_t K,
                                   const float *x, float *y, size_t y_stride) {
    float lanes[4 * 32] __attribute__((aligned(64)));
    const size_t row = dense_row_bytes(kind, K);
    STEP(dense_tile)(kind, R, 1, V, w, row, dense_row_bytes(kind, 32), far, x, K, K - K % 32, 1, lanes);
    STEP(finish_sums)(kind, R, 1, w, K, x, lanes, y, y_stride);
}

/* `rows` rows, a multiple of TILE_ROWS and at most DENSE_ROWS, and T tokens, DENSE_COLUMNS at a time, which stay in L1.
 * packed: the rows as `dense_rows` packed them */
STEP_INLINE void STEP(dense_part)(const int kind, const int T, const int is_packed, const char *w, const float *packed,
                                  size_t rows, size_t K, const float *x, float *y, size_t y_stride) {
    enum { R = STEP(TILE_ROWS) };
    const int V = STEP_BYTES == 64 && (T > 3 || is_packed) ? 1 : 2;
    float lanes[DENSE_ROWS * STEP(DENSE_TOKENS) * 32] __attribute__((aligned(64)));
    const size_t K32 = K - K % 32, row = is_packed ? 128 : dense_row_bytes(kind, K);
    const size_t step = is_packed ? R * 128 : dense_row_bytes(kind, 32), of_tile = is_packed ? K32 / 32 * step : R * row;
    const size_t count = K32 > 0 ? (K32 + DENSE_COLUMNS - 1) / DENSE_COLUMNS : 1, n = (K32 / 32 + count - 1) / count * 32;
    for (size_t part = 0; part < count; part++) {
        const size_t k = part * n < K32 ? part * n : K32, some = K32 - k < n ? K32 - k : n;
        for (size_t r = 0; r < rows; r += R) {
            const char *at = (is_packed ? (const char *)packed : w) + r / R * of_tile + k / 32 * step;
            const size_t far = is_packed ? 0 : r + R < rows ? of_tile : n / 32 * step - r / R * of_tile;
            STEP(dense_tile)(is_packed ? 0 : kind, R, T, V, at, row, step, far, x + k, K, some, k == 0, lanes + r * T * 32);
        }
    }
    STEP(finish_sums)(kind, (int)rows, T, w, K, x, lanes, y, y_stride);
}

/* The same of blocks, K a multiple of 32, all 32 lanes in one pass. */
STEP_INLINE void STEP(block_tile)(const int kind, const int R, const int T, const char *w, size_t far, size_t K,
                                  const float *x, float *y, size_t y_stride) {
    enum { V = 32 / STEP(FLOATS) };
    const size_t row_bytes = dense_row_bytes(kind, K);
    STEP(f32v) sum[2 * STEP(DENSE_TOKENS) * V] = {{0}};
    float factors[4][16];
    int8_t quants[4][256];
    const int step = BLOCK_STEP(kind), parts = R * step / 32;
#define MULTIPLY(n)                                                                                                    \
    {                                                                                                                  \
        const uint8_t *b = (const uint8_t *)w + dense_row_bytes(kind, k), *ahead = b + far;                            \
        const float *f = factors[0], *of_token = x + k;                                                                \
        const int8_t *q = quants[0];                                                                                   \
        STEP_UNROLL                                                                                                    \
        for (int r = 0; r < R; r++) STEP(block_factors)(b + r * row_bytes, n, kind, factors[r], quants[r]);            \
        for (int left = 32 * n / step; left > 0; left--) {                                                             \
            STEP_UNROLL                                                                                                \
            for (int i = 0; i < parts; i++) { /* of each row 32 columns, then the next 32 */                           \
                const int r = i % R, c = i / R * 32;                                                                   \
                if (c == 0 && T == 1) prefetch_row(b + r * row_bytes, ahead + r * row_bytes);                          \
                if (c == 0 && T > 1) __builtin_prefetch(ahead + r * row_bytes);                                        \
                STEP_UNROLL                                                                                            \
                for (int v = 0; v < V; v++) {                                                                          \
                    const int column = c + v * STEP(FLOATS);                                                           \
                    const STEP(f32v) weights =                                                                         \
                        STEP(block_weights)(b + r * row_bytes, column, kind, f + r * 16, q + r * 256);                 \
                    STEP_UNROLL                                                                                        \
                    for (int t = 0; t < T; t++) {                                                                      \
                        STEP(f32v) *to = &sum[(r * T + t) * V + v];                                                    \
                        *to = STEP(fused)(weights, STEP(floats)(of_token + t * K + column), *to);                      \
                    }                                                                                                  \
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

/* any tokens; `rows` a multiple of TILE_ROWS */
STEP_INLINE void STEP(dense_parts)(const int kind, const int is_packed, const char *w, const float *packed, size_t rows,
                                   size_t K, const float *x, size_t M, float *y, size_t y_stride) {
    const size_t row_bytes = dense_row_bytes(kind, K), parts = (M + STEP(DENSE_TOKENS) - 1) / STEP(DENSE_TOKENS);
    for (size_t part = 0; part < parts; part++) { /* of equal size or nearly; its tokens stay in L2 for all rows */
        const size_t m = part * M / parts;
        const float *tokens = x + m * K;
        for (size_t n = 0, some; (some = rows - n < DENSE_ROWS ? rows - n : DENSE_ROWS) > 0; n += some) {
            const char *from = w + n * row_bytes;
            const float *from_packed = is_packed ? packed + n * (K - K % 32) : NULL;
            float *to = y + m * y_stride + n;
#define PART(T) case T: STEP(dense_part)(kind, T, is_packed, from, from_packed, some, K, tokens, to, y_stride); break;
            switch ((part + 1) * M / parts - m) { /* M > 1: no part is one token */
                PART(2) PART(3)
#if STEP_BYTES == 64
                PART(4) PART(5) PART(6)
#endif
            }
#undef PART
        }
    }
}

/* one text for all kinds, which are float32 by now; w is for the columns beyond the last 32 */
STEP_TARGET static void STEP(dense_packed)(int kind, const char *w, const float *packed, size_t rows, size_t K,
                                           const float *x, size_t M, float *y, size_t y_stride) {
    STEP(dense_parts)(kind, 1, w, packed, rows, K, x, M, y, y_stride);
}

STEP_INLINE void STEP(dense_rows_of)(const int kind, const char *w, size_t rows, size_t K, const float *x, size_t M,
                                     float *y, size_t y_stride) {
    const size_t row_bytes = dense_row_bytes(kind, K), far = bytes_ahead(4, row_bytes);
    size_t first = 0; /* of the rows that are left */
    if (M == 1 && STEP_BYTES == 32)
        for (; first + 2 <= rows; first += 2)
            STEP(dense_token)(kind, 2, 4, w + first * row_bytes, far, K, x, y + first, y_stride);
    if (M == 1) /* four rows, so that enough sums are in flight */
        for (; first + 4 <= rows; first += 4)
            STEP(dense_token)(kind, 4, 2, w + first * row_bytes, far, K, x, y + first, y_stride);
    if (M > 1) {
        first = rows / 4 * 4;
        STEP(dense_parts)(kind, 0, w, NULL, first, K, x, M, y, y_stride);
    }
    for (size_t n = first; n < rows; n++)
        for (size_t m = 0; m < M; m++)
            STEP(dense_token)(kind, 1, 2, w + n * row_bytes, far, K, x + m * K, y + m * y_stride + n, y_stride);
}

/* blocks, for one token, or with AVX-512 for as many as a tile takes */
STEP_INLINE void STEP(block_rows_of)(const int kind, const char *w, size_t rows, size_t K, const float *x, size_t M, float *y,
                                     size_t y_stride) {
    enum { R = STEP_BYTES / 16 };
    const size_t row_bytes = dense_row_bytes(kind, K), far = bytes_ahead(R, row_bytes);
    size_t n = 0;
    if (M == 1)
        for (; n + R <= rows; n += R) STEP(block_tile)(kind, R, 1, w + n * row_bytes, far, K, x, y + n, y_stride);
#if STEP_BYTES == 64
    for (; M > 1 && M <= STEP(DENSE_TOKENS) && n + 2 <= rows; n += 2) {
#define TILE(T) case T: STEP(block_tile)(kind, 2, T, w + n * row_bytes, 2 * row_bytes, K, x, y + n, y_stride); break;
        switch (M) { TILE(2) TILE(3) TILE(4) TILE(5) TILE(6) }
#undef TILE
    }
#endif
    for (; n < rows; n++)
        for (size_t m = 0; m < M; m++)
            STEP(block_tile)(kind, 1, 1, w + n * row_bytes, far, K, x + m * K, y + m * y_stride + n, y_stride);
}

/* K weights of a row, a multiple of 32, as float32, each 32 of them `stride` floats apart */
STEP_INLINE void STEP(widen_floats)(const int kind, const char *row, size_t K, float *out, size_t stride) {
    for (size_t k = 0; k < K; k += 32, out += stride)
        STEP_UNROLL
        for (int i = 0; i < 32; i += STEP(FLOATS)) {
            const STEP(f32v) v = STEP(weights)(row, k + i, kind);
            memcpy(out + i, &v, sizeof v);
        }
}

/* -- many tokens: rows and tokens packed, a lane for each row --
 *
 * The same 32 sums of a row and a token, one after another: sum j of PANEL rows and T tokens at a time is in registers,
 * and is added to those before it, by the same halves, as soon as both are there: in the order 0, 16, 8, 24, 4, ... (the
 * bits of j reversed) after the n-th sum as many additions follow as n ends in ones. Columns and tokens are packed in the
 * order of their reading: all columns of the first sum, of the second, ..., then those beyond the last 32. */
enum { STEP(PANEL) = 2 * STEP(FLOATS), STEP(PANEL_TOKENS) = STEP_BYTES == 64 ? 12 : STEP_BYTES == 32 ? 6 : 4 };
#if STEP_BYTES == 64 /* the sizes of parts of more than FEW_TOKENS tokens */
#define EACH_PART(DO) DO(8) DO(9) DO(10) DO(11) DO(12)
#elif STEP_BYTES == 32
#define EACH_PART(DO) DO(3) DO(4) DO(5) DO(6)
#else
#define EACH_PART(DO) DO(3) DO(4)
#endif

/* FLOATS rows of 4 columns, `stride` floats apart -> to[c], column c of the rows, of which `count` are stored */
STEP_INLINE void STEP(transpose_4)(const float *from, size_t stride, size_t count, float *const *to) {
#if STEP_BYTES == 64
    __m512 v[4], w[4];
    STEP_UNROLL
    for (size_t r = 0; r < 4; r++) { /* rows r, 4 + r, 8 + r and 12 + r */
        const float *row = from + r * stride;
        v[r] = _mm512_castps128_ps512(_mm_load_ps(row));
        v[r] = _mm512_mask_broadcast_f32x4(v[r], 0x00F0, _mm_load_ps(row + 4 * stride));
        v[r] = _mm512_mask_broadcast_f32x4(v[r], 0x0F00, _mm_load_ps(row + 8 * stride));
        v[r] = _mm512_mask_broadcast_f32x4(v[r], 0xF000, _mm_load_ps(row + 12 * stride));
    }
    for (int r = 0; r < 4; r += 2) w[r] = _mm512_unpacklo_ps(v[r], v[r + 1]), w[r + 1] = _mm512_unpackhi_ps(v[r], v[r + 1]);
    const __mmask16 some = (__mmask16)((1u << count) - 1);
#define STORE(c, unpack, w) _mm512_mask_storeu_ps(to[c], some, (__m512)unpack((__m512d)(w)[0], (__m512d)(w)[2]));
    STORE(0, _mm512_unpacklo_pd, w) STORE(1, _mm512_unpackhi_pd, w) STORE(2, _mm512_unpacklo_pd, w + 1)
    STORE(3, _mm512_unpackhi_pd, w + 1)
#elif STEP_BYTES == 32
    __m256 v[4], w[4];
    STEP_UNROLL
    for (size_t r = 0; r < 4; r++) { /* rows r and 4 + r */
        const float *row = from + r * stride;
        v[r] = _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_load_ps(row)), _mm_load_ps(row + 4 * stride), 1);
    }
    for (int r = 0; r < 4; r += 2) w[r] = _mm256_unpacklo_ps(v[r], v[r + 1]), w[r + 1] = _mm256_unpackhi_ps(v[r], v[r + 1]);
    for (int c = 0; c < 4; c++) {
        const __m256d a = (__m256d)w[c / 2], b = (__m256d)w[2 + c / 2];
        const __m256 column = (__m256)(c % 2 ? _mm256_unpackhi_pd(a, b) : _mm256_unpacklo_pd(a, b));
        memcpy(to[c], &column, count * sizeof(float));
    }
#else
    for (size_t c = 0; c < 4; c++)
        for (size_t r = 0; r < count; r++) to[c][r] = from[r * stride + c];
#endif
}

/* `rows` rows (or tokens) of K numbers -> `packed`, K times `width` of them, at most FLOATS; missing rows are 0 */
STEP_INLINE void STEP(pack_rows)(const int kind, const char *w, size_t rows, size_t K, float *packed, size_t width) {
    enum { F = STEP(FLOATS), COLUMNS = 256, STRIDE = COLUMNS + 16 /* rows lie in other sets of L1 */ };
    float some[F * STRIDE] __attribute__((aligned(64)));
    if (rows < F) memset(some, 0, sizeof some);
    for (size_t k = 0, n; k < K; k += n) {
        n = K - k < COLUMNS ? K - k : COLUMNS;
        const size_t whole = n - n % 32;
        for (size_t r = 0; r < rows; r++) {
            const char *row = w + r * dense_row_bytes(kind, K) + dense_row_bytes(kind, k);
            if (kind >= Q8_0) STEP(widen_blocks)(kind, (const uint8_t *)row, n, some + r * STRIDE, 32);
            else STEP(widen_floats)(kind, row, whole, some + r * STRIDE, 32);
            for (size_t i = whole; kind < Q8_0 && i < n; i++) some[r * STRIDE + i] = STEP(weight)(row, i, kind);
        }
        for (size_t group = 0; group < 8; group++) { /* four sums, of which adjacent columns are stored one after another */
            const size_t order[8] = {0, 4, 2, 6, 1, 5, 3, 7}; /* the bits of a group reversed */
            float *to[4], *next = packed + (order[(group + 1) % 8] * (K / 32) + (k + (group == 7) * COLUMNS) / 32) * width;
            for (size_t c = 0; c < 4; c++)
                to[c] = packed + ((order[group] + (c % 2 * 16 + c / 2 * 8)) * (K / 32) + k / 32) * width;
            for (size_t i = 0; i < whole; i += 32, next += width) {
                STEP_UNROLL
                for (size_t c = 0; c < 4; c++) __builtin_prefetch(next + (c % 2 * 16 + c / 2 * 8) * (K / 32) * width, 1);
                if (width == F) STEP(transpose_4)(some + i + 4 * group, STRIDE, F, to);
                else STEP(transpose_4)(some + i + 4 * group, STRIDE, width, to);
                STEP_UNROLL
                for (size_t c = 0; c < 4; c++) to[c] += width;
            }
        }
        for (size_t i = whole; i < n; i++)
            for (size_t r = 0; r < width; r++) packed[(k + i) * width + r] = some[r * STRIDE + i];
    }
}

/* at most PANEL rows -> two times FLOATS of them, packed */
STEP_INLINE void STEP(pack_panel)(const int kind, const char *w, size_t rows, size_t K, float *wide) {
    enum { F = STEP(FLOATS) };
    STEP(pack_rows)(kind, w, rows < F ? rows : F, K, wide, F);
    STEP(pack_rows)(kind, w + F * dense_row_bytes(kind, K), rows < F ? 0 : rows - F, K, wide + F * K, F);
}

/* x (M, K) -> what `dense_rows` reads: a copy, or for many tokens parts of at most PANEL_TOKENS, of equal size or nearly,
 * packed. 64-byte aligned, so that loads cross no cache lines. */
STEP_TARGET static void STEP(dense_pack)(const float *x, size_t M, size_t K, float *packed) {
    if (M <= STEP(FEW_TOKENS)) {
        memcpy(packed, x, M * K * sizeof *x);
        return;
    }
    const size_t parts = (M + STEP(PANEL_TOKENS) - 1) / STEP(PANEL_TOKENS);
    for (size_t part = 0; part < parts; part++) {
        const size_t m = part * M / parts, T = (part + 1) * M / parts - m;
        STEP(pack_rows)(0, (const char *)(x + m * K), T, K, packed + m * K, T);
    }
}

/* out (T, PANEL) = a packed panel times T packed tokens */
STEP_INLINE void STEP(packed_panel)(const int T, const float *w, const float *x, size_t K, float *out) {
    enum { F = STEP(FLOATS) };
    STEP(f32v) sum[2 * STEP(PANEL_TOKENS)], pending[5][2 * STEP(PANEL_TOKENS)];
#define MULTIPLY(columns)                                                                                              \
    for (size_t k = 0; k < columns; k++, w += F, x += T) {                                                             \
        const STEP(f32v) weights[2] = {STEP(floats)(w), STEP(floats)(w + K * F)};                                      \
        STEP_UNROLL                                                                                                    \
        for (int i = 0; i < 2 * T; i++)                                                                                \
            sum[i] = STEP(fused)(weights[i % 2], x[i / 2] - (STEP(f32v)){0}, sum[i]);                                  \
    }
    for (int n = 0; n < 32; n++) {
        STEP_UNROLL
        for (int i = 0; i < 2 * T; i++) sum[i] = (STEP(f32v)){0};
        MULTIPLY(K / 32)
        int level = 0;
        for (; n >> level & 1; level++)
            STEP_UNROLL
            for (int i = 0; i < 2 * T; i++) sum[i] += pending[level][i];
        if (n < 31)
            STEP_UNROLL
            for (int i = 0; i < 2 * T; i++) pending[level][i] = sum[i];
    }
    MULTIPLY(K % 32)
#undef MULTIPLY
    memcpy(out, sum, 2 * T * sizeof *sum);
}

/* Functions of their own, so that registers suffice */
#define PANEL(T)                                                                                                       \
    STEP_TARGET static __attribute__((noinline)) void STEP(packed_panel_##T)(const float *w, const float *x, size_t K, \
                                                                            float *out) {                              \
        STEP(packed_panel)(T, w, x, K, out);                                                                           \
    }
EACH_PART(PANEL)
#undef PANEL

/* y = the products of at most PANEL rows, which `wide` holds packed, and M tokens, which `packed` holds packed */
STEP_TARGET static void STEP(multiply_panel)(const float *wide, size_t rows, size_t K, const float *packed, size_t M, float *y,
                                           size_t y_stride) {
    const size_t parts = (M + STEP(PANEL_TOKENS) - 1) / STEP(PANEL_TOKENS);
    float out[STEP(PANEL_TOKENS) * STEP(PANEL)] __attribute__((aligned(64)));
    for (size_t part = 0; part < parts; part++) {
        const size_t m = part * M / parts, T = (part + 1) * M / parts - m;
#define PANEL(T) case T: STEP(packed_panel_##T)(wide, packed + m * K, K, out); break;
        switch (T) {
            EACH_PART(PANEL)
        }
#undef PANEL
        for (size_t t = 0; t < T; t++) copy_mostly(y + (m + t) * y_stride, out + t * STEP(PANEL), rows * 4, STEP(PANEL) * 4);
    }
}

/* y[m * y_stride + n] = w[n] . x[m], for `rows` rows of w (rows, K) and x (M, K). wide: room for 32 rows in
 * float32, or NULL. With it, for more than FEW_TOKENS tokens, x is what `dense_pack` packed, and rows are packed alike; for
 * fewer, if they are more than a tile takes (of float32: than 16; of blocks: than one, but with AVX-512 a tile's), rows are
 * packed as 32 columns of TILE_ROWS rows, then the next 32. */
STEP_TARGET static void STEP(dense_rows)(int kind, const void *w, size_t rows, size_t K, const float *x, size_t M,
                                         float *y, size_t y_stride, float *wide) {
    enum { R = STEP(TILE_ROWS) };
    for (size_t n = 0, count; M > STEP(FEW_TOKENS) && wide && n < rows; n += count) {
        count = rows - n < STEP(PANEL) ? rows - n : STEP(PANEL);
        const char *from = (const char *)w + n * dense_row_bytes(kind, K);
        switch (kind) {
#define PACK(kind) case kind: STEP(pack_panel)(kind, from, count, K, wide); break;
            PACK(0) PACK(1) PACK(2) PACK(Q8_0) PACK(Q4_0) PACK(Q4_1) PACK(Q4_K) PACK(Q6_K)
#undef PACK
        }
        STEP(multiply_panel)(wide, count, K, x, M, y + n, y_stride);
    }
    if (M > STEP(FEW_TOKENS) && wide) return;
    const size_t few = kind == 0 ? 16 : kind < Q8_0 || STEP_BYTES == 64 ? STEP(DENSE_TOKENS) : 1;
    const size_t K32 = K - K % 32;
    if (wide && M > few) {
        const size_t packed = rows / 4 * 4;
        for (size_t n = 0; n < packed; n++) {
            const void *row = (const char *)w + n * dense_row_bytes(kind, K);
            float *to = wide + n / R * R * K32 + n % R * 32;
            switch (kind) {
#define FLOATS(kind) case kind: STEP(widen_floats)(kind, row, K32, to, R * 32); break;
#define BLOCKS(kind) case kind: STEP(widen_blocks)(kind, row, K, to, R * 32); break;
                FLOATS(0) FLOATS(1) FLOATS(2) BLOCKS(Q8_0) BLOCKS(Q4_0) BLOCKS(Q4_1) BLOCKS(Q4_K) BLOCKS(Q6_K)
            }
        }
        STEP(dense_packed)(kind, w, wide, packed, K, x, M, y, y_stride);
        w = (const char *)w + packed * dense_row_bytes(kind, K), y += packed, rows -= packed;
    }
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
#undef EACH_PART
