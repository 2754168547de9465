/* The screen of head_screen.h for several tokens at once, with AMX: 32 rows of the head against 16 tokens.
 *
 * The bounds are those of `screen_rows`, to the bit: the sum q X is exact, and the few steps after it are the same. 16
 * bits of a token are two products of 8 bits: X = 256 high + low, high signed and low unsigned, so
 *     q X = 256 (q high) + q low     (tdpbssd and tdpbsud)
 * A is 16 rows of the head in place, B the same 64 columns of 16 tokens, which `screen_arrange_amx` has put into the
 * instruction's order once for all rows. A step is 4 loads and 4 products, as in ternary_amx.h, for 2 KB of the head:
 * 64 tokens wait for memory half of the time. The next 32 rows are prefetched meanwhile: rows are too far apart for the
 * hardware prefetcher.
 *
 * Measured, 2 threads of a Sapphire Rapids, 128256 x 2560, ms (reading the rows takes 9.1, one token 10.7):
 *   tokens              2      6     16     32     64
 *   AVX-512          11.8   14.0   29.6   48.2   92
 *   AMX              13.2   14.3   15.5   20.4   33     (so AVX-512 computes up to 6 tokens)
 * Prefetching in the order of the steps, 64 bytes of each row, not one row after the other: the same to 15% slower. */
#ifndef BITNET_REF_SCREEN_AMX_H
#define BITNET_REF_SCREEN_AMX_H

#include "screen_avx512.h"
#include "ternary_amx.h"

#if defined(BITNET_REF_HAS_AMX)

enum { SCREEN_AMX_ROWS = 2 * AMX_ROWS, SCREEN_AMX_TOKENS = 16, SCREEN_AMX_COLUMNS = 1 << 16 }; /* 65536 * 127 * 255 < 2^31 */

/* X (M, wide) -> for each 16 tokens and 64 columns a tile of high bytes and one of low bytes: line j holds columns 4j
 * .. 4j+3 of 16 tokens, 4 bytes per token. Tokens beyond M are 0. */
static void screen_arrange_amx(const int16_t *X, size_t M, size_t wide, int16_t *arranged) {
    uint8_t *tile = (uint8_t *)arranged;
    for (size_t m = 0; m < M; m += SCREEN_AMX_TOKENS)
        for (size_t k = 0; k < wide; k += VECTOR_BYTES, tile += 2 * AMX_TILE_BYTES)
            for (size_t t = 0; t < SCREEN_AMX_TOKENS; t++)
                for (size_t i = 0; i < VECTOR_BYTES; i++) {
                    const uint16_t v = m + t < M ? (uint16_t)X[(m + t) * wide + k + i] : 0;
                    uint8_t *at = tile + i / 4 * VECTOR_BYTES + 4 * t + i % 4;
                    at[0] = (uint8_t)(v >> 8), at[AMX_TILE_BYTES] = (uint8_t)v;
                }
}

/* parts (2, 2, 16, 16): rows 0-15 or 16-31, times high or low bytes. The tiles are set for `rows`, 1 to 32.
 * `next`: rows to prefetch, or NULL. */
static inline void screen_amx_parts(const int8_t *q, size_t wide, size_t rows, const uint8_t *tiles, size_t n_steps,
                                    const int8_t *next, int32_t *parts) {
    AMX_ZERO(0);
    AMX_ZERO(1);
    AMX_ZERO(2);
    AMX_ZERO(3);
    for (size_t step = 0; step < n_steps; step++, q += VECTOR_BYTES, tiles += 2 * AMX_TILE_BYTES) {
        for (size_t line = 0; next && line < SCREEN_AMX_ROWS; line++)
            _mm_prefetch((const char *)next + (step * SCREEN_AMX_ROWS + line) * VECTOR_BYTES, _MM_HINT_T1);
        AMX_LOAD(4, q, wide);
        AMX_LOAD(6, tiles, VECTOR_BYTES);
        AMX_DOT_SIGNED(0, 4, 6);
        AMX_LOAD(7, tiles + AMX_TILE_BYTES, VECTOR_BYTES);
        AMX_DOT(1, 4, 7);
        if (step % AMX_STORE_STEPS == AMX_STORE_STEPS - 1) AMX_STORE(7, parts, VECTOR_BYTES); /* as amx_keep_awake */
        if (rows <= AMX_ROWS) continue;
        AMX_LOAD(5, q + AMX_ROWS * wide, wide);
        AMX_DOT_SIGNED(2, 5, 6);
        AMX_DOT(3, 5, 7);
    }
    AMX_STORE(0, parts, VECTOR_BYTES);
    AMX_STORE(1, parts + 256, VECTOR_BYTES);
    if (rows <= AMX_ROWS) return;
    AMX_STORE(2, parts + 512, VECTOR_BYTES);
    AMX_STORE(3, parts + 768, VECTOR_BYTES);
}

/* Like `screen_rows`. For more tokens than an AVX-512 tile takes, X is the result of `screen_arrange_amx`. */
SCREEN_TARGET static void screen_rows_amx(const int8_t *q, size_t rows, size_t K, size_t wide, const float *facts,
                                          const int16_t *X, size_t M, const double *x_facts, float *lower, float *upper,
                                          size_t stride) {
    if (M <= SCREEN_TILE_TOKENS) {
        screen_rows_avx512(q, rows, K, wide, facts, X, M, x_facts, lower, upper, stride);
        return;
    }
    const screen_constants constants = make_screen_constants(K);
    const __m512i column = _mm512_mullo_epi32(_mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0),
                                              _mm512_set1_epi32(SCREEN_AMX_TOKENS));
    _Alignas(64) int32_t parts[4 * 256];
    _Alignas(64) double sums[SCREEN_AMX_ROWS * SCREEN_AMX_TOKENS];
    _Alignas(64) float bounds[2][SCREEN_AMX_ROWS * SCREEN_AMX_TOKENS];
    size_t configured = 0;
    for (size_t n = 0; n < rows; n += SCREEN_AMX_ROWS) {
        const size_t count = rows - n < SCREEN_AMX_ROWS ? rows - n : SCREEN_AMX_ROWS;
        if (count != configured) amx_set_tiles(configured = count);
        for (size_t m = 0; m < M; m += SCREEN_AMX_TOKENS) {
            const uint8_t *tiles = (const uint8_t *)(X + m * wide);
            for (size_t k = 0; k < wide; k += SCREEN_AMX_COLUMNS) {
                const size_t columns = wide - k < SCREEN_AMX_COLUMNS ? wide - k : SCREEN_AMX_COLUMNS;
                const int8_t *next = m == 0 ? q + (n + SCREEN_AMX_ROWS) * wide + k * SCREEN_AMX_ROWS : NULL;
                screen_amx_parts(q + n * wide + k, wide, count, tiles + k / VECTOR_BYTES * 2 * AMX_TILE_BYTES,
                                 columns / VECTOR_BYTES, next, parts);
                for (size_t r = 0; r < count; r++)
                    for (size_t t = 0; t < SCREEN_AMX_TOKENS; t += 8) {
                        const int32_t *part = parts + r / AMX_ROWS * 512 + r % AMX_ROWS * 16 + t;
                        double *sum = sums + r * SCREEN_AMX_TOKENS + t;
                        const __m512d high = _mm512_cvtepi32_pd(_mm256_load_si256((const __m256i *)part)),
                                      low = _mm512_cvtepi32_pd(_mm256_load_si256((const __m256i *)(part + 256))),
                                      both = _mm512_add_pd(_mm512_mul_pd(high, _mm512_set1_pd(256)), low);
                        _mm512_store_pd(sum, k ? _mm512_add_pd(_mm512_load_pd(sum), both) : both); /* exact: below 2^53 */
                    }
            }
            double x[3][SCREEN_AMX_TOKENS] = {{0}};
            const size_t tokens = M - m < SCREEN_AMX_TOKENS ? M - m : SCREEN_AMX_TOKENS;
            for (size_t t = 0; t < tokens; t++)
                for (size_t i = 0; i < 3; i++) x[i][t] = x_facts[3 * (m + t) + i];
            for (size_t t = 0; t < SCREEN_AMX_TOKENS; t += 8) {
                const __m512d token[3] = {_mm512_loadu_pd(x[0] + t), _mm512_loadu_pd(x[1] + t), _mm512_loadu_pd(x[2] + t)};
                for (size_t r = 0; r < count; r++) {
                    const float *f = facts + 3 * (n + r);
                    const __m512d row[3] = {_mm512_set1_pd(f[0]), _mm512_set1_pd(f[1]), _mm512_set1_pd(f[2])};
                    const size_t at = r * SCREEN_AMX_TOKENS + t;
                    __m256 low, high;
                    screen_bounds(_mm512_load_pd(sums + at), row, token, &constants, &low, &high);
                    _mm256_store_ps(bounds[0] + at, low);
                    _mm256_store_ps(bounds[1] + at, high);
                }
            }
            for (size_t r = 0; r < count; r += 16) { /* the rows of a token are contiguous in the result */
                const __mmask16 has = avx512_mask(r / 16, count);
                for (size_t t = 0; t < tokens; t++)
                    for (size_t side = 0; side < 2; side++) {
                        const float *at = bounds[side] + r * SCREEN_AMX_TOKENS + t;
                        const __m512 row = _mm512_mask_i32gather_ps(_mm512_setzero_ps(), has, column, at, 4);
                        _mm512_mask_storeu_ps((side ? upper : lower) + (m + t) * stride + n + r, has, row);
                    }
            }
        }
    }
    amx_release();
}

#endif
#endif
