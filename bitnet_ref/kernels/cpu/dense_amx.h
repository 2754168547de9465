/* A bfloat16 matrix times some tokens in float32, with AMX's products of bfloat16 (tdpbf16ps).
 *
 * A float32 number is the sum of three bfloat16 numbers: its top 16 bits, the top 16 bits of the rest, and the rest.
 * Their products with a weight have 16 bits: exact. So a token is three columns of a bfloat16 product, whose sums are
 * added at the end: high + (middle + low). Nothing is rounded but sums, and these are fewer than in dense_rows.h.
 *
 * The order of the sums is the processor's (Intel's manual, TDPBF16PS), the same for every number of tokens and rows.
 * For each 32 columns, from zero: 16 fused multiply-adds of the even columns, 16 of the odd ones, their sum; it is added
 * to the sum of the columns before. Each is rounded to nearest even, and a denormal number is taken as, and becomes, 0.
 * Plain version: check_kernels.c, `tile_sum`. A Sapphire Rapids gave its bits for 40 million sums, of like and of very
 * different exponents, of halfway cases, near underflow and overflow, with Inf and NaN. AVX-512's vdpbf16ps adds in
 * another order: 18 to 70% of the sums differ.
 *
 * Operands of the instruction (C += A B):
 *   A  16 rows of the matrix, 32 columns each: in place.
 *   B  16 lines; line j holds columns 2j and 2j + 1 of up to 16 parts of tokens (`dense_split_amx`).
 *   C  16 rows x 16 parts, in tiles over all columns: tiles 0-2, of the next 16 rows 3-5; A is tile 6, B tile 7.
 * 16 tokens are three tiles of parts, their high, middle and low ones. Five tokens or fewer are one tile, one token a
 * narrow one, so that its parts stay in L1 while the weights stream by.
 *
 * Measured on a Xeon (Sapphire Rapids, AMX), two threads, weights from memory, in turn with dense_rows.h; medians of 7 to
 * 15, G multiply-adds/s of whole calls, before and now:
 *   tokens               1        4        8       16       64      128      512
 *   1536 x 576      10, 11   34, 43   27, 61  32, 105  59, 238  64, 280  67, 276
 *   5632 x 2048     12, 12   46, 53   28, 98  38, 186  56, 307  59, 302  57, 309
 *   2048 x 5632     13, 13   43, 53  29, 103  41, 190  55, 243  56, 269  59, 297
 * (one token: 23 to 25 GB/s; float32 multiply-adds alone reach 113 a thread, tdpbf16ps 1639, a third of it for three
 * parts). One thread, weights in L2, 64 tokens: 230 to 260 without the parts (3% of the time) and the finish (8%).
 * The root mean square of the error is 0.3 to 1.0 of that of dense_rows.h.
 * Tried, one thread, 64 tokens: 2 x 2 tiles of sums, not 2 x 3: 261 for 241 with 576 columns, 233 for 266 with 1536; 1 x 3:
 *   0.75 to 0.97; rows copied to tiles of 1 KB with 2 x 2: 0.8 of it. One token: four groups of 16 rows at a time, not
 *   one: 0.8; two: 0.92 to 0.97; prefetching the rows to come, not the columns: 0.6 to 0.9.
 * More tokens than L2 holds the parts of: half as fast with 192 tokens of 5632 columns, so they come in chunks. */
#ifndef BITNET_REF_DENSE_AMX_H
#define BITNET_REF_DENSE_AMX_H

#include "bfloat16_avx512.h"
#include "ternary_amx.h"

/* A way to multiply some kinds of dense matrices (dense_blocks.h) by tiles. parts: what `split` makes of x (M, K), the 16 tokens
 * from m on at a time */
typedef struct {
    size_t (*bytes)(size_t M, size_t K); /* of the parts */
    void (*split)(const float *x, size_t M, size_t K, size_t m, void *parts);
    /* y[m * y_stride + n] = w[n] . x[m] for `rows` rows of w (rows rounded up to 16, K) */
    void (*multiply)(int kind, const void *w, size_t rows, size_t K, const void *parts, size_t M, float *y, size_t y_stride);
} tile_method;

enum { TILES_OF_BFLOAT16, TILES_OF_BLOCKS, N_TILE_METHODS };

#if defined(BITNET_REF_HAS_AMX)

enum { TILE_COLUMNS = 32, TILE_TOKENS = 16, TILE_PARTS = 3, TILE_WIDTH = TILE_PARTS * TILE_TOKENS };
enum { TILE_AHEAD = 8 /* steps, prefetched */, TILE_CHUNK_BYTES = 1 << 20 /* of tokens, which stay in L2 */ };
#define TILE_TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,fma")))
#define TILE_INLINE TILE_TARGET static inline __attribute__((always_inline))

/* Parts of tokens per line, of the group of 16 tokens that starts at m: a multiple of 16, or of 4 for M <= 5 */
static inline size_t tile_width(size_t M, size_t m) {
    const size_t parts = TILE_PARTS * (M - m < TILE_TOKENS ? M - m : TILE_TOKENS);
    return TILE_PARTS * M <= 16 ? (parts + 3) / 4 * 4 : (parts + 15) / 16 * 16;
}

/* of all tokens' parts */
static size_t dense_bytes_amx(size_t M, size_t K) { return (M + TILE_TOKENS - 1) / TILE_TOKENS * K / 2 * TILE_WIDTH * 4; }

/* The parts of the 16 tokens from m on (M, K), K a multiple of 32 -> their place among `parts` */
TILE_TARGET static void dense_split_amx(const float *x, size_t M, size_t K, size_t m, void *parts) {
    const size_t width = tile_width(M, m), tokens = M - m < TILE_TOKENS ? M - m : TILE_TOKENS;
    const __mmask16 line = (__mmask16)(width < 16 ? (1 << width) - 1 : 0xFFFF);
    const __m512i top = _mm512_set1_epi32((int)0xFFFF0000u);
    uint16_t odd[32];
    for (int i = 0; i < 32; i++) odd[i] = (uint16_t)(2 * i + 1);
    const __m512i halves = _mm512_loadu_si512(odd); /* the upper one of each float */
    uint32_t *out = (uint32_t *)parts + m / TILE_TOKENS * (K / 2 * TILE_WIDTH);
    __m512i part[TILE_WIDTH];
    memset(part, 0, sizeof part);
    for (size_t k = 0; k < K; k += TILE_COLUMNS) {
        for (size_t t = 0; t < tokens; t++) {
            const float *from = x + (m + t) * K + k;
            __m512 a = _mm512_loadu_ps(from), b = _mm512_loadu_ps(from + 16);
            for (size_t p = 0; p < TILE_PARTS; p++) {
                part[p * tokens + t] = _mm512_permutex2var_epi16((__m512i)a, halves, (__m512i)b);
                a = _mm512_sub_ps(a, (__m512)_mm512_and_si512((__m512i)a, top));
                b = _mm512_sub_ps(b, (__m512)_mm512_and_si512((__m512i)b, top));
            }
        }
        for (size_t first = 0; first < width; first += 16) {
            __m512i lines[16];
            for (int i = 0; i < 16; i++) lines[i] = part[first + i];
            transpose_words(lines);
            for (int i = 0; i < 16; i++) _mm512_mask_storeu_epi32(out + i * width + first, line, lines[i]);
        }
        out += 16 * width;
    }
}

static inline void tile_configure(size_t width) {
    amx_config config;
    memset(&config, 0, sizeof config);
    config.palette = 1;
    for (int tile = 0; tile < 8; tile++) {
        config.rows[tile] = 16;
        config.colsb[tile] = (uint16_t)(tile == 6 || width > 16 ? 64 : 4 * width);
    }
    amx_configure(&config);
}

/* What to prefetch meanwhile: `lines` cache lines `stride` apart, 64 bytes further with each step; from step `turn` on
 * they are those of `next`. */
typedef struct {
    const char *first, *next;
    size_t turn, lines, stride;
} tile_fetch;

/* sums (16 or 32 rows, TILE_WIDTH) = rows of w times the parts of a group. `tiles`: of parts, 1 to 3 */
TILE_INLINE void tile_products(const char *w, size_t K, const char *parts, size_t width, const int tiles,
                               const int has_more, tile_fetch fetch, float *sums) {
    const size_t row = K * sizeof(uint16_t), line = width * sizeof(uint32_t), step = 16 * line;
    const char *more = w + AMX_ROWS * row;
    AMX_ZERO(0);
    if (tiles > 1) AMX_ZERO(1);
    if (tiles > 2) AMX_ZERO(2);
    if (has_more) {
        AMX_ZERO(3);
        if (tiles > 1) AMX_ZERO(4);
        if (tiles > 2) AMX_ZERO(5);
    }
    for (size_t k = 0; k < K / TILE_COLUMNS; k++, parts += step) {
        const char *ahead = (k < fetch.turn ? fetch.first : fetch.next) + k * 64;
        for (size_t i = 0; i < fetch.lines; i++) {
            if (has_more) _mm_prefetch(ahead + i * fetch.stride, _MM_HINT_T1);
            else _mm_prefetch(ahead + i * fetch.stride, _MM_HINT_T0);
        }
        AMX_LOAD(6, w + k * 64, row);
        AMX_LOAD(7, parts, line);
        AMX_DOT_BF16(0, 6, 7);
        if (tiles > 1) {
            AMX_LOAD(7, parts + 64, line);
            AMX_DOT_BF16(1, 6, 7);
        }
        if (tiles > 2) {
            AMX_LOAD(7, parts + 128, line);
            AMX_DOT_BF16(2, 6, 7);
        }
        if (!has_more) continue;
        AMX_LOAD(6, more + k * 64, row);
        if (tiles > 2) {
            AMX_DOT_BF16(5, 6, 7);
            AMX_LOAD(7, parts + 64, line);
        }
        if (tiles > 1) {
            AMX_DOT_BF16(4, 6, 7);
            AMX_LOAD(7, parts, line);
        }
        AMX_DOT_BF16(3, 6, 7);
    }
    const size_t bytes = TILE_WIDTH * sizeof(float);
    AMX_STORE(0, sums, bytes);
    if (tiles > 1) AMX_STORE(1, sums + 16, bytes);
    if (tiles > 2) AMX_STORE(2, sums + 32, bytes);
    if (!has_more) return;
    sums += AMX_ROWS * TILE_WIDTH;
    AMX_STORE(3, sums, bytes);
    if (tiles > 1) AMX_STORE(4, sums + 16, bytes);
    if (tiles > 2) AMX_STORE(5, sums + 32, bytes);
}

/* y[t * y_stride + r] of 16 rows, `rows` of which are wanted */
TILE_INLINE void tile_finish(const float *sums, size_t tokens, size_t rows, float *y, size_t y_stride) {
    const __mmask16 wanted = (__mmask16)(rows < AMX_ROWS ? (1 << rows) - 1 : 0xFFFF);
    __m512i v[16];
    for (int r = 0; r < 16; r++) {
        const float *high = sums + r * TILE_WIDTH;
        v[r] = (__m512i)_mm512_add_ps(_mm512_loadu_ps(high), _mm512_add_ps(_mm512_loadu_ps(high + tokens),
                                                                          _mm512_loadu_ps(high + 2 * tokens)));
    }
    transpose_words(v);
    for (size_t t = 0; t < tokens; t++) _mm512_mask_storeu_epi32(y + t * y_stride, wanted, v[t]);
}

TILE_TARGET static void dense_tiles_amx(int kind, const void *w, size_t rows, size_t K, const void *parts, size_t M, float *y,
                                        size_t y_stride) {
    (void)kind;
    _Alignas(64) float sums[(2 * AMX_ROWS + 1) * TILE_WIDTH] = {0};
    const size_t row = K * sizeof(uint16_t), group_bytes = K / 2 * TILE_WIDTH * sizeof(uint32_t), steps = K / TILE_COLUMNS;
    const size_t turn = steps > TILE_AHEAD ? steps - TILE_AHEAD : 0;
    const size_t at_once = TILE_TOKENS * (group_bytes < TILE_CHUNK_BYTES ? TILE_CHUNK_BYTES / group_bytes : 1);
    tile_configure(tile_width(M, 0));
    for (size_t start = 0; start < M; start += at_once) {
        const size_t end = M - start < at_once ? M : start + at_once, groups = (end - start + TILE_TOKENS - 1) / TILE_TOKENS;
        for (size_t n = 0; n < rows;) {
            const int has_more = groups > 1 && rows - n > AMX_ROWS;
            const size_t count = has_more ? 2 * AMX_ROWS : AMX_ROWS, lines = (count + groups - 1) / groups;
            const char *block = (const char *)w + n * row, *next = block + count * row;
            for (size_t m = start; m < end; m += TILE_TOKENS) {
                const size_t width = tile_width(M, m), tokens = M - m < TILE_TOKENS ? M - m : TILE_TOKENS;
                const char *of_group = (const char *)parts + m / TILE_TOKENS * group_bytes;
                tile_fetch fetch = {block + TILE_AHEAD * 64, next + TILE_AHEAD * 64 - row, turn, AMX_ROWS, row};
                if (groups > 1) /* each group its share of the next rows */
                    fetch = (tile_fetch){NULL, next + (m - start) / TILE_TOKENS * lines * row, 0, lines, row};
#define PRODUCTS(tiles)                                                                                                \
    if (has_more) tile_products(block, K, of_group, width, tiles, 1, fetch, sums);                                     \
    else tile_products(block, K, of_group, width, tiles, 0, fetch, sums);
                if (width <= 16) PRODUCTS(1)
                else if (width == 32) PRODUCTS(2)
                else PRODUCTS(3)
#undef PRODUCTS
                for (size_t r = 0; r < count; r += AMX_ROWS)
                    tile_finish(sums + r * TILE_WIDTH, tokens, rows - n - r, y + m * y_stride + n + r, y_stride);
            }
            n += count;
        }
    }
    amx_release();
}

#endif
#endif
