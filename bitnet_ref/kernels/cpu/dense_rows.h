/* Rows of a dense matrix times some tokens, in float32: the head where all logits are wanted, and dense models.
 *
 * Plain version: layers.py, `dense_matmul`; in this order of its sums check_kernels.c, `dense_sum`. The product of a row
 * and a token is summed in 32 lanes (lane j takes columns j, 32 + j, ...) by fused multiply-adds, then by halves (16 +
 * 16, 8 + 8, ...), then come the columns beyond the last 32. This order is the same on every machine, for any number of
 * rows and tokens; an x86 processor without AVX2 rounds each product too, having no fused multiply-add.
 *
 * For up to DENSE_TOKENS tokens, a tile of rows and tokens is computed at once: a weight is widened once for all tokens
 * of the tile, and enough sums are in flight to hide the latency of an addition. A pass takes one or two vectors of each
 * sum, one token with AVX2 all four. Several tokens are multiplied with some columns of 16 rows at a time, which stay in
 * L1; between them the 32 sums of each row and token are in memory. For more tokens, rows and tokens are packed so that
 * a lane is a row (below).
 *
 * A template, included by float_steps.h. GCC 12 keeps the tile's array of sums in registers because one flat, unrolled
 * loop iterates over it; with nested loops it stayed in memory.
 *
 * Measured, one thread of a Cascade Lake Xeon, AVX-512, bfloat16 rows, G multiply-adds/s of processor time: 64128 x
 *   2560 (from memory), 16 tokens 21.1, 6 tokens 20.8, 1 token 5.9 (12 GB/s, the memory's rate); 512 x 2560 (in L2), 12
 *   tokens 21.4; 4096 x 256, 64 tokens 16.6. One row and token at a time: 6.2 for any number of tokens. The max with
 *   products and sums rounded apart is 36. Half of the gain came from aligning sums and activations to cache lines, the
 *   rest from vpmovzxwd for the weights. Of that, 2 rows x 6 tokens of two vectors, and all columns at once.
 * Emerald Rapids, one core beside busy neighbours, AVX-512, G multiply-adds/s (90 at most), one and 4 tokens: bfloat16
 *   1536 x 576 16, 31; 5632 x 2048 13, 30; Q4_0 1536 x 576 17, 31. Fused sums were 1.10 to 1.35 times as fast as products and
 *   sums rounded apart.
 * Tried: 4 rows x 3 tokens: 15 (twice the weights to widen per product). AVX2, 1 token, 60000 x 2560: two rows in one
 *   pass 12.4 GB/s (two threads 23.4); four rows in two passes, which with the next four exceed L1, 9.4 (18.3).
 * A lane for each row, Emerald Rapids beside busy neighbours, one thread's processor time, minimum of up to 60 runs, equal
 *   bits, G multiply-adds/s (AVX-512 89 at most, AVX2 50): lanes of columns with 4 rows packed (16 tokens) or weights widened
 *   to memory, then transposed (more); transposed in registers.
 *     tokens                         7            16            32            64
 *     bfloat16 1536 x 576       28, 32        44, 47        56, 59        64, 66
 *     bfloat16 576 x 1536       27, 33        42, 48        52, 61        63, 68
 *     bfloat16 2048 x 2048      25, 29        38, 46        44, 58        56, 63
 *     Q4_1 1536 x 576           27, 33        46, 49        58, 60        67, 68
 *     Q4_1 576 x 1536           27, 33        43, 50        55, 62        66, 70
 *     Q4_1 2048 x 2048          27, 33        47, 50        50, 62        57, 67
 *     bfloat16 1536 x 576, AVX2              29, 32        33, 37        36, 39
 *     Q4_1 2048 x 2048, AVX2                 22, 29        27, 32        33, 36
 *   A packed panel alone reaches 80 (576 columns) to 86 (2048). Packing took 0.11 to 0.13 ns per weight, as long as 10
 *   tokens: 0.04 (Q4_1) to 0.06 (bfloat16) are its instructions, the rest its stores, for 64 bytes in a row take 0.36 ns to
 *   L1 and 1.34 to L2. So a panel is packed between the sums of the one before it, and the one after is prefetched.
 * That, and before, pairs in turn of processor time (Emerald Rapids, peak 89 to 95, equal bits):
 *     tokens                                  7           16           32           64
 *     bfloat16 49152 x 576 from memory   22, 23       37, 43       50, 58       59, 65
 *     Q4_1 49152 x 576 from memory       28, 33       44, 50       56, 61       64, 66
 *     bfloat16 1536 x 576                32, 35       48, 53       60, 67       67, 74
 *     Q4_1 1536 x 576                    33, 37       50, 54       62, 65       69, 72
 *     Q4_0 49152 x 576, 9, 16, 37 tokens 31, 39       42, 50       55, 61
 *     Q4_1 49152 x 576, AVX2 (8 first)   20, 24       27, 30       32, 34       36, 38
 *   Panels of more than 64 KB are not prefetched: float32 of 2048 columns would fall from 29 to 21 (9 tokens).
 *   Tried: sums of 4 parts of tokens one after another for each sum of a panel, so that it is read from L2 once: 0.97 to
 *   1.0. 16 rows and 16 tokens at a time: 0.87. A lane for each token, so that rows are widened to L1 untransposed: 43
 *   (16 tokens), 57 (32), for their 32 sums do not fit L1 beside the rows.
 *   Tried: all columns of a sum one after another, not 8 of each 256: 0.20 to 0.30 ns, for at 2048 columns the 32
 *   places are in one set of L1. 512 columns at a time, or lines prefetched while rows are widened, 0.21 to 0.24. Panels
 *   prefetched 512 to 2048 bytes ahead: the same.
 *   An EPYC (Zen 5), 134 G multiply-adds/s, one thread, pairs in turn, equal bits: float16 is transposed, then widened, not
 *   before: 1536 x 576 of 7, 16, 32 and 64 tokens 0.84, 0.86, 0.90 and 0.95 of the time. A signed byte as the first bits of 384 + q
 *   in place of two shifts and a conversion, and addresses that GCC keeps out of vector registers: Q8_0 0.98. There packing takes 2.2
 *   (Q4_1) to 3.6 (Q8_0) cycles per vector, in L1 as in L2, so instructions bound it; multiplying a panel reaches 0.95.
 *   Tried there: 32 columns packed at a time between more sums, not 256: 1.03 to 1.09 of the time. What the next part reads
 *   brought into L1 a sum before (16 tokens, Q4_1, Q8_0, float16): 1.00 to 1.03; and what it writes: 1.04 to 1.10. Of 16 tokens'
 *   time packing takes a quarter (Q4_1) to 0.30: 3.6 cycles per vector between sums, where alone it takes 2.2 to 2.5.
 *   An EPYC (Zen 3, AVX2, 50 G multiply-adds/s, beside eight other programs), Q4_1 1536 x 576, best calls in turn, equal bits:
 *   loops over 8 columns unrolled, 16, 32 and 64 tokens 31, now 32.5; 33.5, 36; 32.5, 36.5; 576 x 1536 the same. A packed
 *   panel alone reaches 38 to 45. Of a step of 32 sequences (197 ms) panels are 78%, packing 8%. Tried there: the columns of
 *   the next sum prefetched into L1: 0.98 to 1.01.
 *   An exact fused multiply-add in SSE2 (double products and sums, rounded to odd): 0.04 to 0.09 of two instructions. */

/* per tile: what fits 32 registers, or 16 */
enum { STEP(DENSE_TOKENS) = STEP_BYTES == 64 ? 6 : 3, STEP(TILE_ROWS) = STEP_BYTES == 64 ? 4 : 2 };
#ifndef BITNET_REF_DENSE_ROWS_H
#define BITNET_REF_DENSE_ROWS_H
enum { DENSE_ROWS = 16, DENSE_COLUMNS = 640 /* whose sums and tokens are in L1 */, COLUMNS = 256 /* packed at once */ };

/* floats for each packed row (or token) of K columns */
static inline size_t packed_columns(size_t K) { return (K + COLUMNS - 1) / COLUMNS * COLUMNS + 32; }

/* A panel that is being packed: `done` of its parts, each COLUMNS columns of one vector of rows. */
typedef struct {
    int kind;
    const char *w;
    size_t rows, K;
    float *wide;
    size_t done, parts;
    const char *ahead, *end; /* of the panel after it: what is left to prefetch */
} panel_packing;

enum { AHEAD_BYTES = 65536 }; /* larger panels are not prefetched */
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

/* `rows` rows, a multiple of TILE_ROWS and at most DENSE_ROWS, and T tokens, DENSE_COLUMNS at a time, which stay in L1 */
STEP_INLINE void STEP(dense_part)(const int kind, const int T, const char *w, size_t rows, size_t K, const float *x,
                                  float *y, size_t y_stride) {
    enum { R = STEP(TILE_ROWS) };
    const int V = STEP_BYTES == 64 && T > 3 ? 1 : 2;
    float lanes[DENSE_ROWS * STEP(DENSE_TOKENS) * 32] __attribute__((aligned(64)));
    const size_t K32 = K - K % 32, row = dense_row_bytes(kind, K), step = dense_row_bytes(kind, 32);
    const size_t count = K32 > 0 ? (K32 + DENSE_COLUMNS - 1) / DENSE_COLUMNS : 1, n = (K32 / 32 + count - 1) / count * 32;
    for (size_t part = 0; part < count; part++) {
        const size_t k = part * n < K32 ? part * n : K32, some = K32 - k < n ? K32 - k : n;
        for (size_t r = 0; r < rows; r += R) {
            const size_t far = r + R < rows ? R * row : n / 32 * step - r * row;
            STEP(dense_tile)(kind, R, T, V, w + r * row + k / 32 * step, row, step, far, x + k, K, some, k == 0, lanes + r * T * 32);
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

/* at most DENSE_TOKENS tokens */
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
    for (size_t some, all = M > 1 ? rows / 4 * 4 : 0; first < all; first += some) {
        some = all - first < DENSE_ROWS ? all - first : DENSE_ROWS;
#define PART(T) case T: STEP(dense_part)(kind, T, w + first * row_bytes, some, K, x, y + first, y_stride); break;
        switch (M) {
            PART(2) PART(3)
#if STEP_BYTES == 64
            PART(4) PART(5) PART(6)
#endif
        }
#undef PART
    }
    for (size_t n = first; n < rows; n++)
        for (size_t m = 0; m < M; m++)
            STEP(dense_token)(kind, 1, 2, w + n * row_bytes, far, K, x + m * K, y + m * y_stride + n, y_stride);
}

/* the same of blocks */
STEP_INLINE void STEP(block_rows_of)(const int kind, const char *w, size_t rows, size_t K, const float *x, size_t M, float *y,
                                     size_t y_stride) {
    enum { R = STEP_BYTES / 16, SOME = STEP_BYTES == 64 ? 2 : 1 };
    const size_t row_bytes = dense_row_bytes(kind, K), far = bytes_ahead(R, row_bytes);
    size_t n = 0;
    if (M == 1)
        for (; n + R <= rows; n += R) STEP(block_tile)(kind, R, 1, w + n * row_bytes, far, K, x, y + n, y_stride);
    for (; M > 1 && n + SOME <= rows; n += SOME) {
#define TILE(T) case T: STEP(block_tile)(kind, SOME, T, w + n * row_bytes, SOME * row_bytes, K, x, y + n, y_stride); break;
        switch (M) {
            TILE(2) TILE(3)
#if STEP_BYTES == 64
            TILE(4) TILE(5) TILE(6)
#endif
        }
#undef TILE
    }
    for (; n < rows; n++)
        for (size_t m = 0; m < M; m++)
            STEP(block_tile)(kind, 1, 1, w + n * row_bytes, far, K, x + m * K, y + m * y_stride + n, y_stride);
}

/* -- many tokens: rows and tokens packed, a lane for each row --
 *
 * The same 32 sums of a row and a token, one after another: sum j of PANEL rows and T tokens at a time is in registers,
 * and is added to those before it, by the same halves, as soon as both are there: in the order 0, 16, 8, 24, 4, ... (the
 * bits of j reversed) after the n-th sum as many additions follow as n ends in ones. Of each 256 columns all 8 of the
 * first sum are packed, those of the second, ...; after them come the columns beyond the last 32. So the 32 places to
 * which a packing stores are in few pages and different sets of L1.
 *
 * FLOATS rows are packed together: 16 bytes of each are transposed in registers, by 32 bits, and weights are cut out of
 * these and widened, a lane for each row. */
enum { STEP(PANEL) = 2 * STEP(FLOATS), STEP(PANEL_TOKENS) = STEP_BYTES == 64 ? 12 : STEP_BYTES == 32 ? 6 : 4 };
#if STEP_BYTES == 64 /* the sizes of parts of more than DENSE_TOKENS tokens */
#define EACH_PART(DO) DO(6) DO(7) DO(8) DO(9) DO(10) DO(11) DO(12)
#elif STEP_BYTES == 32
#define EACH_PART(DO) DO(3) DO(4) DO(5) DO(6)
#else
#define EACH_PART(DO) DO(2) DO(3) DO(4)
#endif

/* 16 bytes of each of FLOATS rows, `stride` bytes apart -> v[i], the i-th 32 bits of all */
STEP_INLINE void STEP(transpose)(const char *from, size_t stride, STEP(u32v) *v) {
#if STEP_BYTES == 64
    __m512i rows[4];
    __asm__("" : "+r"(stride)); /* or GCC 12 keeps 16 products of it in vector registers */
#define ROW(i) _mm_loadu_si128((const __m128i *)(from + (r + 4 * i) * stride))
    STEP_UNROLL
    for (size_t r = 0; r < 4; r++) { /* rows r, 4 + r, 8 + r and 12 + r */
        rows[r] = _mm512_castsi128_si512(ROW(0));
        rows[r] = _mm512_mask_broadcast_i32x4(rows[r], 0x00F0, ROW(1));
        rows[r] = _mm512_mask_broadcast_i32x4(rows[r], 0x0F00, ROW(2));
        rows[r] = _mm512_mask_broadcast_i32x4(rows[r], 0xF000, ROW(3));
    }
#define UNPACK(how, a, b) _mm512_unpack##how(a, b)
#define VECTOR __m512i
#elif STEP_BYTES == 32
    __m256i rows[4];
#define ROW(i) _mm_loadu_si128((const __m128i *)(from + (r + 4 * i) * stride))
    STEP_UNROLL
    for (size_t r = 0; r < 4; r++) /* rows r and 4 + r */
        rows[r] = _mm256_inserti128_si256(_mm256_castsi128_si256(ROW(0)), ROW(1), 1);
#define UNPACK(how, a, b) _mm256_unpack##how(a, b)
#define VECTOR __m256i
#endif
#if STEP_BYTES > 16
    const VECTOR low01 = UNPACK(lo_epi32, rows[0], rows[1]), low23 = UNPACK(lo_epi32, rows[2], rows[3]);
    const VECTOR high01 = UNPACK(hi_epi32, rows[0], rows[1]), high23 = UNPACK(hi_epi32, rows[2], rows[3]);
    v[0] = (STEP(u32v))UNPACK(lo_epi64, low01, low23), v[1] = (STEP(u32v))UNPACK(hi_epi64, low01, low23);
    v[2] = (STEP(u32v))UNPACK(lo_epi64, high01, high23), v[3] = (STEP(u32v))UNPACK(hi_epi64, high01, high23);
#undef ROW
#undef UNPACK
#undef VECTOR
#else
    uint32_t rows[4][4];
    for (size_t r = 0; r < 4; r++) memcpy(rows[r], from + r * stride, 16);
    for (size_t i = 0; i < 4; i++) v[i] = (STEP(u32v)){rows[0][i], rows[1][i], rows[2][i], rows[3][i]};
#endif
}

/* scale q + offset of the low nibbles q of all lanes */
STEP_INLINE STEP(f32v) STEP(low_nibbles)(STEP(u32v) q, const int kind, STEP(f32v) scale, STEP(f32v) offset) {
#if STEP_BYTES == 64 /* looked up by the low 4 bits */
    const __m512 table = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const int less = kind == Q4_0 ? 8 : 0;
    const STEP(f32v) v = (STEP(f32v))_mm512_permutexvar_ps((__m512i)q, _mm512_sub_ps(table, _mm512_set1_ps((float)less)));
#else
    const STEP(f32v) v = STEP(to_floats)((STEP(i32v))(q & 15) - (kind == Q4_0 ? 8 : 0));
#endif
    return kind == Q4_0 ? v * scale : STEP(fused)(v, scale, offset);
}

/* the low or the high float16 of all lanes, widened */
STEP_INLINE STEP(f32v) STEP(half_of)(STEP(u32v) pairs, const size_t is_high) {
#if STEP_BYTES == 64
    const __m512i order = _mm512_set_epi16(31, 29, 27, 25, 23, 21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1, 30, 28, 26, 24, 22, 20,
                                           18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
    const __m512i halves = _mm512_permutexvar_epi16(order, (__m512i)pairs); /* the low ones, then the high ones */
    return (STEP(f32v))_mm512_cvtph_ps(is_high ? _mm512_extracti64x4_epi64(halves, 1) : _mm512_castsi512_si256(halves));
#elif STEP_BYTES == 32
    const __m128i order = _mm_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15);
    const __m256i of_lanes = _mm256_shuffle_epi8((__m256i)pairs, _mm256_broadcastsi128_si256(order));
    const __m256i halves = _mm256_permute4x64_epi64(of_lanes, 0xD8);
    return (STEP(f32v))_mm256_cvtph_ps(is_high ? _mm256_extracti128_si256(halves, 1) : _mm256_castsi256_si128(halves));
#else
    float v[STEP(FLOATS)];
    for (size_t i = 0; i < STEP(FLOATS); i++) {
        const uint16_t half = (uint16_t)(pairs[i] >> 16 * is_high);
        half_to_float_plain(&half, 1, v + i);
    }
    return STEP(floats)(v);
#endif
}

/* a signed byte of all lanes times a factor, rounded once */
STEP_INLINE STEP(f32v) STEP(signed_byte_of)(STEP(u32v) q, const size_t byte, STEP(f32v) factor) {
#if STEP_BYTES == 64 /* q + 128 as the first bits of 384 + q, so that nothing is converted; 384 times a factor is exact */
    const __m512i unsigned_q = _mm512_xor_si512((__m512i)q, _mm512_set1_epi32((int)0x80808080));
    const __m512i at = byte < 2 ? _mm512_slli_epi32(unsigned_q, 15 - 8 * (byte & 1)) : _mm512_srli_epi32(unsigned_q, 8 * byte - 15);
    const __m512i v = _mm512_ternarylogic_epi32(at, _mm512_set1_epi32(0x007F8000), _mm512_set1_epi32(0x43800000), 0xEA);
    return STEP(fused)((STEP(f32v))v, factor, factor * -384.0f);
#else
    return STEP(to_floats)((STEP(i32v))(q << (24 - 8 * byte)) >> 24) * factor;
#endif
}

/* The at-th 16 bytes of 32 columns of FLOATS rows -> their columns: 4 of float32, 8 of 16 bits, 16 of int8, 32 of Q4_0 and
 * Q4_1, 16 of Q4_K, the low or the high nibbles; int8 are also what `block_factors` put together. The `width` first rows of column c are stored to the first of the 8
 * places of its sum. factors: of these 32 columns; offset: of Q4_1, Q4_K and Q5_K */
STEP_INLINE void STEP(pack_16_bytes)(const int kind, const size_t at, const int is_high, const char *from, size_t stride,
                                     const STEP(f32v) *factors, STEP(f32v) offset, float *to, size_t width) {
    const size_t values = kind == 0 ? 1 : kind < Q8_0 ? 2 : kind == Q4_0 || kind == Q4_1 ? 8 : 4; /* in 32 bits */
    STEP(u32v) four[4];
    STEP(transpose)(from, stride, four);
    STEP_UNROLL
    for (size_t n = 0; n < 4 * values; n++) {
        const size_t i = n / values, part = n % values, byte = part % 4;
        size_t c = at * 4 * values + n;
        STEP(f32v) v;
        if (kind == 0) v = (STEP(f32v))four[i];
        else if (kind == 1) v = (STEP(f32v))(part ? four[i] & 0xFFFF0000u : four[i] << 16);
        else if (kind == 2) v = STEP(half_of)(four[i], part);
        else if (kind == Q8_0 || kind == Q5_0) v = STEP(signed_byte_of)(four[i], byte, factors[0]);
        else if (kind == Q5_K) v = STEP(signed_byte_of)(four[i], byte, factors[0]) + offset;
        else if (kind == Q6_K) v = STEP(signed_byte_of)(four[i], byte, factors[at]);
        else {
            v = STEP(low_nibbles)(four[i] >> (8 * byte + 4 * (part / 4 | is_high)), kind, factors[0], offset);
            if (values == 8) c = part / 4 * 16 + i * 4 + byte;
        }
        const size_t sum = (c & 1) << 4 | (c & 2) << 2 | (c & 4) | (c & 8) >> 2 | c >> 4; /* its bits reversed */
        if (width == STEP(FLOATS)) memcpy(to + sum * 8 * width, &v, sizeof v);
#if STEP_BYTES == 64
        else _mm512_mask_storeu_ps(to + sum * 8 * width, (__mmask16)((1u << width) - 1), (__m512)v);
#else
        else memcpy(to + sum * 8 * width, &v, width * sizeof(float));
#endif
    }
}

/* Columns k to k + 255, fewer at the end, of `rows` rows (or tokens) of K numbers -> their place in `packed`, which has
 * `packed_columns` times `width` of them, at most FLOATS; missing rows are 0 */
STEP_INLINE void STEP(pack_columns)(const int kind, const char *w, size_t rows, size_t K, size_t k, float *packed,
                                    size_t width) {
    enum { F = STEP(FLOATS) };
    float copies[F][COLUMNS + 16] __attribute__((aligned(64))); /* with missing rows */
    float of_rows[F][32] __attribute__((aligned(64)));          /* what `block_factors` gives */
    int8_t quants[F][COLUMNS + 64] __attribute__((aligned(64)));
    STEP(f32v) factors[16];
    if (rows < F) memset(copies[rows], 0, (F - rows) * sizeof copies[0]);
    const size_t n = K - k < COLUMNS ? K - k : COLUMNS, whole = n - n % 32;
    const char *from = w + dense_row_bytes(kind, k);
    size_t stride = dense_row_bytes(kind, K);
    if (rows < F) {
        for (size_t r = 0; r < rows; r++) memcpy(copies[r], from + r * stride, dense_row_bytes(kind, n));
        from = (const char *)copies, stride = sizeof copies[0];
    }
    if (kind >= Q8_0) {
        for (size_t r = 0; r < F; r++) {
            const uint8_t *b = (const uint8_t *)from + r * stride;
            if (n == COLUMNS) STEP(block_factors)(b, 8, kind, of_rows[r], quants[r]);
            for (size_t i = 0; n < COLUMNS && i < n / 32; i++)
                STEP(block_factors)(b + i * dense_row_bytes(kind, 32), 1, kind, of_rows[r] + (kind == Q4_1 ? 2 * i : i),
                                    quants[r] + 32 * i);
        }
        for (size_t i = 0; i < 4; i++) {
            STEP(u32v) bits[4]; /* an array of its own: a compiler may take writes of integers to leave floats alone */
            STEP(transpose)((const char *)(of_rows[0] + 4 * i), sizeof of_rows[0], bits);
            for (size_t j = 0; j < 4; j++) factors[4 * i + j] = (STEP(f32v))bits[j];
        }
    }
    float *to = packed + k * width;
    for (size_t i = 0; i < whole / 32; i++, to += width) {
#define PACK(at, is_high, start, f, offset) \
    STEP(pack_16_bytes)(kind, at, is_high, (const char *)(start) + 16 * at, stride, f, offset, to, width);
        const char *b = from + dense_row_bytes(kind, 32) * i;
        const STEP(f32v) none = {0};
        if (kind == 0) {
            PACK(0, 0, b, NULL, none) PACK(1, 0, b, NULL, none) PACK(2, 0, b, NULL, none) PACK(3, 0, b, NULL, none)
            PACK(4, 0, b, NULL, none) PACK(5, 0, b, NULL, none) PACK(6, 0, b, NULL, none) PACK(7, 0, b, NULL, none)
        } else if (kind < Q8_0) {
            PACK(0, 0, b, NULL, none) PACK(1, 0, b, NULL, none) PACK(2, 0, b, NULL, none) PACK(3, 0, b, NULL, none)
        } else if (kind == Q8_0) {
            PACK(0, 0, b + 2, factors + i, none) PACK(1, 0, b + 2, factors + i, none)
        } else if (kind == Q6_K) {
            stride = sizeof quants[0];
            PACK(0, 0, quants[0] + 32 * i, factors + 2 * i, none) PACK(1, 0, quants[0] + 32 * i, factors + 2 * i, none)
        } else if (kind == Q5_0) {
            stride = sizeof quants[0];
            PACK(0, 0, quants[0] + 32 * i, factors + i, none) PACK(1, 0, quants[0] + 32 * i, factors + i, none)
        } else if (kind == Q5_K) {
            stride = sizeof quants[0];
            PACK(0, 0, quants[0] + 32 * i, factors + i, factors[8 + i])
            PACK(1, 0, quants[0] + 32 * i, factors + i, factors[8 + i])
        } else if (kind == Q4_0) {
            PACK(0, 0, b + 2, factors + i, none)
        } else if (kind == Q4_1) {
            PACK(0, 0, b + 4, factors + 2 * i, factors[2 * i + 1])
        } else if (i % 2) { /* Q4_K */
            PACK(0, 1, from + 16 + i / 2 * 32, factors + i, factors[8 + i])
            PACK(1, 1, from + 16 + i / 2 * 32, factors + i, factors[8 + i])
        } else {
            PACK(0, 0, from + 16 + i / 2 * 32, factors + i, factors[8 + i])
            PACK(1, 0, from + 16 + i / 2 * 32, factors + i, factors[8 + i])
        }
#undef PACK
    }
    to = packed + (k + whole + COLUMNS - 1) / COLUMNS * COLUMNS * width;
    for (size_t i = whole; i < n; i++)
        for (size_t r = 0; r < width; r++) *to++ = STEP(weight)(from + r * stride, i, kind);
}

/* the next part of a panel, which has two times FLOATS rows */
STEP_INLINE void STEP(pack_part)(const int kind, const panel_packing *p) {
    enum { F = STEP(FLOATS) };
    const size_t half = p->done / (p->parts / 2), k = p->done % (p->parts / 2) * COLUMNS, first = half * F;
    float *to = p->wide + first * packed_columns(p->K);
    if (first < p->rows) {
        const size_t rows = p->rows - first < F ? p->rows - first : F;
        STEP(pack_columns)(kind, p->w + first * dense_row_bytes(kind, p->K), rows, p->K, k, to, F);
    } else memset(to + k * F, 0, F * (COLUMNS + 32) * sizeof *to);
}

/* parts of a panel until `done` are */
STEP_TARGET static __attribute__((noinline)) void STEP(pack_panel)(panel_packing *p, size_t done) {
    for (; p->done < done; p->done++)
        switch (p->kind) {
#define PACK(kind) case kind: STEP(pack_part)(kind, p); break;
            PACK(0) PACK(1) PACK(2) PACK(Q8_0) PACK(Q4_0) PACK(Q5_0) PACK(Q4_1) PACK(Q4_K) PACK(Q5_K) PACK(Q6_K)
#undef PACK
        }
}

/* x (M, K) -> what `dense_rows` reads: a copy, or for many tokens parts of at most PANEL_TOKENS, of equal size or nearly,
 * packed. 64-byte aligned, so that loads cross no cache lines. */
STEP_TARGET static void STEP(dense_pack)(const float *x, size_t M, size_t K, float *packed) {
    if (M <= STEP(DENSE_TOKENS)) {
        memcpy(packed, x, M * K * sizeof *x);
        return;
    }
    const size_t parts = (M + STEP(PANEL_TOKENS) - 1) / STEP(PANEL_TOKENS);
    for (size_t part = 0; part < parts; part++) {
        const size_t m = part * M / parts, T = (part + 1) * M / parts - m;
        for (size_t k = 0; k < K; k += COLUMNS)
            STEP(pack_columns)(0, (const char *)(x + m * K), T, K, k, packed + m * packed_columns(K), T);
    }
}

/* out (T, PANEL) = a packed panel times T packed tokens. Between the sums `parts` parts of the next panel are packed, whose
 * stores wait for L2 while sums go on, and `lines` lines of the one after it are prefetched with each sum. */
STEP_INLINE void STEP(packed_panel)(const int T, const float *w, const float *x, size_t K, float *out,
                                    panel_packing *next, size_t parts, size_t lines) {
    enum { F = STEP(FLOATS) };
    STEP(f32v) pending[6][2 * STEP(PANEL_TOKENS)];
#define EACH_SUM STEP_UNROLL for (int i = 0; i < 2 * T; i++)
#define MULTIPLY(at, columns)                                                                                          \
    for (size_t c = at, end = c + (columns); c < end; c++) {                                                           \
        const STEP(f32v) weights[2] = {STEP(floats)(w + c * F), STEP(floats)(second + c * F)};                         \
        EACH_SUM sum[i] = STEP(fused)(weights[i % 2], x[c * T + i / 2] - (STEP(f32v)){0}, sum[i]);                     \
    }
    const float *second = w + F * packed_columns(K);
    const size_t done = next->done;
    for (size_t n = 0; n < 32; n++) {
        const size_t goal = done + (n + 1) * parts / 32;
        if (next->done < goal) STEP(pack_panel)(next, goal);
        for (size_t i = 0; i < lines && next->ahead < next->end; i++, next->ahead += 64)
            __builtin_prefetch(next->ahead, 0, 2);
        STEP(f32v) sum[2 * STEP(PANEL_TOKENS)]; /* local, so that GCC 12 keeps it in registers */
        EACH_SUM sum[i] = (STEP(f32v)){0};
        for (size_t k = 0, some; k < K / 32; k += some) {
            some = K / 32 - k < 8 ? K / 32 - k : 8;
            if (STEP_BYTES == 32 && some == 8) STEP_UNROLL MULTIPLY(k * 32 + n * 8, 8)
            else MULTIPLY(k * 32 + n * 8, some)
        }
        int level = 0;
        for (; n >> level & 1; level++) EACH_SUM sum[i] += pending[level][i];
        EACH_SUM pending[level][i] = sum[i];
    }
    STEP(f32v) *sum = pending[5];
    MULTIPLY((K / 32 + 7) / 8 * COLUMNS, K % 32)
    EACH_SUM memcpy(out + i * F, &sum[i], sizeof sum[i]); /* GCC 12 would copy all of them byte by byte */
#undef MULTIPLY
#undef EACH_SUM
}

/* Functions of their own, so that registers suffice */
#define PANEL(T)                                                                                                       \
    STEP_TARGET static __attribute__((noinline)) void STEP(packed_panel_##T)(const float *w, const float *x, size_t K, \
                                                                            float *out, panel_packing *next,           \
                                                                            size_t parts, size_t lines) {              \
        STEP(packed_panel)(T, w, x, K, out, next, parts, lines);                                                       \
    }
EACH_PART(PANEL)
#undef PANEL

/* y = the products of the `rows` rows of a packed panel and M tokens, which `packed` holds packed. Packs the next panel. */
STEP_TARGET static void STEP(multiply_panel)(const float *wide, size_t rows, size_t K, const float *packed, size_t M, float *y,
                                           size_t y_stride, panel_packing *next) {
    const size_t parts = (M + STEP(PANEL_TOKENS) - 1) / STEP(PANEL_TOKENS);
    const size_t lines = (size_t)(next->end - next->ahead) / (parts * 32 * 64) + 1; /* to prefetch with each sum */
    float out[STEP(PANEL_TOKENS) * STEP(PANEL)] __attribute__((aligned(64)));
    for (size_t part = 0; part < parts; part++) {
        const size_t m = part * M / parts, T = (part + 1) * M / parts - m, goal = (part + 1) * next->parts / parts;
        const size_t pack = goal > next->done ? goal - next->done : 0;
#define PANEL(T) case T: STEP(packed_panel_##T)(wide, packed + m * packed_columns(K), K, out, next, pack, lines); break;
        switch (T) {
            EACH_PART(PANEL)
        }
#undef PANEL
        for (size_t t = 0; t < T; t++) copy_mostly(y + (m + t) * y_stride, out + t * STEP(PANEL), rows * 4, STEP(PANEL) * 4);
    }
}

/* y[m * y_stride + n] = w[n] . x[m], for `rows` rows of w (rows, K) and x (M, K). For more than
 * DENSE_TOKENS tokens, x is what `dense_pack` packed, and rows are packed alike. wide: room for 64 rows (two panels) of
 * `packed_columns`, or NULL for one token. */
STEP_TARGET static void STEP(dense_rows)(int kind, const void *w, size_t rows, size_t K, const float *x, size_t M,
                                         float *y, size_t y_stride, float *wide) {
    const size_t panel_bytes = STEP(PANEL) * dense_row_bytes(kind, K);
    panel_packing next = {kind, w, rows, K, wide, 0, (K + COLUMNS - 1) / COLUMNS * 2, w, w};
    if (M > STEP(DENSE_TOKENS)) STEP(pack_panel)(&next, next.parts);
    for (size_t n = 0; M > STEP(DENSE_TOKENS) && n < rows; n += STEP(PANEL)) {
        const float *packed = next.wide;
        next.wide = packed == wide ? wide + STEP(PANEL) * packed_columns(K) : wide;
        next.w += panel_bytes;
        next.rows = rows - n > STEP(PANEL) ? rows - n - STEP(PANEL) : 0;
        next.done = next.rows > 0 ? 0 : next.parts;
        next.ahead = next.end = next.w + panel_bytes;
        if (next.rows > 0 && panel_bytes <= AHEAD_BYTES) next.end += panel_bytes;
        STEP(multiply_panel)(packed, rows - n < STEP(PANEL) ? rows - n : STEP(PANEL), K, x, M, y + n, y_stride, &next);
    }
    if (M > STEP(DENSE_TOKENS)) return;
    switch (kind) {
#define FLOATS(kind) case kind: STEP(dense_rows_of)(kind, w, rows, K, x, M, y, y_stride); break;
#define BLOCKS(kind) case kind: STEP(block_rows_of)(kind, w, rows, K, x, M, y, y_stride); break;
        FLOATS(0) FLOATS(1) FLOATS(2) BLOCKS(Q8_0) BLOCKS(Q4_0) BLOCKS(Q5_0) BLOCKS(Q4_1) BLOCKS(Q4_K) BLOCKS(Q5_K) BLOCKS(Q6_K)
#undef FLOATS
#undef BLOCKS
    }
}
#undef EACH_BLOCKS
#undef EACH_PART
