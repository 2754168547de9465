/* Ternary by groups with float activations: y[r] = sum over groups of scale[r][g] * (sum of w_t[r][k] * x[k] in g).
 *
 * Plain version: reference/quantization.py, `group_matmul`, which sums in double and rounds once.
 *
 * The sum of a group is exact here. A group is cut into chunks of at most 128 columns, and a chunk of a token becomes
 * integers with one power of two, X = round(x / step), so that the sum of |X| is below 2^31 (group_steps.h): then every sum
 * of w_t X fits int32, whatever its order, and all kernels give the same bits. The sums are multiplied by step and scale
 * in double and added chunk by chunk. What is lost is the rounding of X: a chunk with |x| of about 1 has steps of 2^-24
 * or 2^-25, so the error of y is about that of its one rounding to float32. Measured against float64, the error is 1.0 to
 * 1.4 times the reference's (max over the rows), with and without outliers. Three planes of int8 with the scale of the
 * largest |x|, 24 bits, would be 3 to 4 times the reference's.
 *
 * Experts of a mixture (_cpu_experts.pxi): one call for all that follows the router. A kernel prefetches the beginning of the
 * matrix that follows it, where it would read 32 KB of what happens to lie behind: experts lie apart.
 * Measured, Maple's shape (256 experts of 512, 8 for a token), one thread of a virtual Sapphire Rapids shared with other
 * programs, processor time. From memory, GB/s: plain read 15.8; this kernel on long matrices 11.4; from L2 15.7, so one thread is
 * bound by its own operations as much as by memory. A feed-forward, us, where a plain read of its bytes takes 450: 994 with
 * NumPy between the calls (gate 218, up 223, down 246, router 94, choosing 86, mixing 59, the gate 42), 727 in one call, 643
 * with that prefetch. 8 tokens: 9.7 ms with a call for each expert, 4.7 in one; 64 tokens 47 and 27 ms. A decoding step of 4
 * layers and a small head: 8.8 ms, now 5.3, 0.57 of what the plain read allows. Such steps were not replayed, as NumPy joined
 * the turned and the other half of each head; since RoPE does that, 8 layers take 7.1 ms in place of 8.6: 0.75 of it for 0.62.
 * Prompts against llama.cpp's TQ2_0 (llama-cpp-python 0.3.36), 2 layers, same file, ms: 64 tokens 50 and 85, 512 tokens 392 and
 * 675; of ours 70% are table look-ups, 13% attention, 7% making the tables.
 *
 * Two layouts, both in panels of as many rows as `max_rows` allows, chunk after chunk, so that a panel is read front to
 * back. 64 rows of a chunk are a subpanel; threads divide the subpanels of a panel among them.
 *   planes   2-bit codes as in panel.h. X is four int8 digits, which the int8 kernels of every set multiply (ternary_*.h).
 *   tables   five bits for three weights, for AVX-512 (group_avx512.h). */
#ifndef BITNET_REF_GROUP_H
#define BITNET_REF_GROUP_H

#include <math.h>

#include "panel.h"

enum { GROUP_CHUNK = 128, GROUP_PLANE_ROWS = 256, GROUP_TABLE_ROWS = 1280 }; /* of a panel at most, by layout */
enum { GROUP_PLANES = 4, GROUP_PLANE_TOKENS = 12, GROUP_TABLE_TOKENS = 4, GROUP_MAX_WIDE = GROUP_CHUNK + 16 };
enum { TRIPLE_ENTRIES = 32, TRIPLES_PER_WORD = 6 };
enum { GROUP_NEAR = 4096, GROUP_FAR = 32768 }; /* bytes ahead of the codes in use that are prefetched into L1 and into L2 */
enum { GROUP_BY_PLANES, GROUP_BY_TABLES, N_GROUP_LAYOUTS };
enum { GROUP_LAYOUT_plain = GROUP_BY_PLANES, GROUP_LAYOUT_avx2 = GROUP_BY_PLANES, GROUP_LAYOUT_avx512 = GROUP_BY_TABLES };

typedef struct {
    size_t K, group;              /* columns; those that share a scale */
    size_t chunk, per_group, n_chunks; /* columns of a chunk, but for the last of a group; chunks of a group; of all */
    size_t wide;                  /* columns of a chunk as stored */
    size_t rows;                  /* of a panel, a multiple of PANEL_ROWS */
    size_t subpanel_bytes;        /* of a chunk of 64 rows */
    size_t code_bytes;            /* of a chunk of a panel */
    size_t token_bytes;           /* of what a kernel reads of a chunk of a token */
    size_t words, tails;          /* tables: 32-bit words and bytes of a row of a chunk */
    int layout;
} group_shape;

static inline size_t divide_up(size_t a, size_t b) { return a / b + (a % b != 0); }

static group_shape make_group_shape(size_t N, size_t K, size_t group, int layout) {
    const size_t max_rows = layout == GROUP_BY_PLANES ? GROUP_PLANE_ROWS : GROUP_TABLE_ROWS;
    group_shape s = {.K = K, .group = group, .layout = layout};
    s.per_group = divide_up(group, GROUP_CHUNK);
    s.chunk = divide_up(group, s.per_group);
    s.n_chunks = divide_up(K, group) * s.per_group;
    s.rows = divide_up(divide_up(N, divide_up(N, max_rows)), PANEL_ROWS) * PANEL_ROWS;
    if (layout == GROUP_BY_PLANES) {
        s.wide = divide_up(s.chunk, BLOCK_K) * BLOCK_K;
        s.subpanel_bytes = s.wide / BLOCK_K * BLOCK_BYTES;
        s.token_bytes = GROUP_PLANES * s.wide;
    } else {
        const size_t triples = divide_up(s.chunk, 3);
        s.words = triples / TRIPLES_PER_WORD, s.tails = triples % TRIPLES_PER_WORD;
        if (s.tails > 3) s.words++, s.tails = 0;
        const size_t stored = TRIPLES_PER_WORD * s.words + s.tails;
        s.wide = 3 * stored;
        s.subpanel_bytes = (4 * s.words + s.tails) * PANEL_ROWS;
        s.token_bytes = stored * TRIPLE_ENTRIES * sizeof(int32_t);
    }
    s.code_bytes = s.rows / PANEL_ROWS * s.subpanel_bytes;
    return s;
}

/* the first column of chunk c; *count: its columns, which may be none */
static inline size_t group_columns(const group_shape *s, size_t c, size_t *count) {
    const size_t first = c / s->per_group * s->group, start = first + c % s->per_group * s->chunk;
    size_t end = first + s->group < s->K ? first + s->group : s->K;
    if (start + s->chunk < end) end = start + s->chunk;
    *count = start < end ? end - start : 0;
    return start;
}

static inline uint8_t *subpanel_of(const uint8_t *codes, const group_shape *s, size_t row) {
    return (uint8_t *)codes + row / PANEL_ROWS * s->subpanel_bytes;
}

/* planes: the byte with the code of a column of a row, at bit 2 * (k % BLOCK_K / 4) */
static inline uint8_t *plane_byte(const uint8_t *codes, const group_shape *s, size_t row, size_t k) {
    return subpanel_of(codes, s, row) + k / BLOCK_K * BLOCK_BYTES + row % PANEL_ROWS * 4 + k % 4;
}

/* tables: the byte in which the index of a triple begins, at bit *shift. Word j of a row has the triples 6j .. 6j+5,
 * three in each half; a last few have a byte each. */
static inline uint8_t *triple_byte(const uint8_t *codes, const group_shape *s, size_t row, size_t triple, int *shift) {
    uint8_t *subpanel = subpanel_of(codes, s, row);
    const size_t word = triple / TRIPLES_PER_WORD, field = triple % TRIPLES_PER_WORD;
    *shift = 0;
    if (word >= s->words) return subpanel + (4 * s->words + triple - TRIPLES_PER_WORD * s->words) * PANEL_ROWS + row % PANEL_ROWS;
    const int bit = (int)(field / 3 * 16 + field % 3 * 5);
    *shift = bit % 8;
    return subpanel + (word * PANEL_ROWS + row % PANEL_ROWS) * 4 + bit / 8;
}

/* `count` codes of a packed row from column `start` on -> a byte each */
static inline void unpack_codes(const uint8_t *packed, size_t start, size_t count, uint8_t *codes) {
    size_t k = 0;
    if (start % 4 == 0)
        for (; k + 4 <= count; k += 4) {
            const uint32_t four = packed[(start + k) / 4], each = (four | four << 6 | four << 12 | four << 18) & 0x03030303;
            memcpy(codes + k, &each, sizeof each);
        }
    for (; k < count; k++) codes[k] = packed[(start + k) / 4] >> 2 * ((start + k) % 4) & 3;
}

/* Packed rows, four adjacent columns per byte (rows, row_bytes) -> one panel of all chunks. What pads it is never read.
 * Whole words are stored, 2.8 (tables) and 5 (planes) times as fast as code by code. */
static void group_pack(const group_shape *s, const uint8_t *packed, size_t rows, size_t row_bytes, uint8_t *panel) {
    enum { WORD_COLUMNS = 3 * TRIPLES_PER_WORD };
    memset(panel, 0, s->n_chunks * s->code_bytes);
    for (size_t r = 0; r < rows; r++)
        for (size_t c = 0; c < s->n_chunks; c++) {
            uint8_t *codes = subpanel_of(panel + c * s->code_bytes, s, r);
            size_t count, start = group_columns(s, c, &count);
            uint8_t row[GROUP_CHUNK + WORD_COLUMNS] = {0}; /* and zeros to the end of its last word or block */
            unpack_codes(packed + r * row_bytes, start, count, row);
            if (s->layout == GROUP_BY_PLANES) {
                for (size_t k = 0; k < count; k += BLOCK_K) {
                    uint32_t four[4];
                    memcpy(four, row + k, sizeof four);
                    const uint32_t word = four[0] | four[1] << 2 | four[2] << 4 | four[3] << 6;
                    memcpy(codes + k / BLOCK_K * BLOCK_BYTES + r % PANEL_ROWS * 4, &word, sizeof word);
                }
                continue;
            }
            uint8_t index[(GROUP_CHUNK + WORD_COLUMNS) / 3];
            for (size_t i = 0; i < sizeof index; i++)
                index[i] = (uint8_t)(row[3 * i] + 3 * row[3 * i + 1] + 9 * row[3 * i + 2]);
            for (size_t j = 0; j < s->words; j++) {
                const uint8_t *t = index + TRIPLES_PER_WORD * j;
                const uint32_t low = t[0] | t[1] << 5 | t[2] << 10, word = low | (uint32_t)(t[3] | t[4] << 5 | t[5] << 10) << 16;
                memcpy(codes + (j * PANEL_ROWS + r % PANEL_ROWS) * 4, &word, sizeof word);
            }
            for (size_t i = 0; i < s->tails; i++)
                codes[(4 * s->words + i) * PANEL_ROWS + r % PANEL_ROWS] = index[TRIPLES_PER_WORD * s->words + i];
        }
}

/* One row of a panel -> packed, the inverse of group_pack */
static void group_unpack_row(const group_shape *s, const uint8_t *panel, size_t r, uint8_t *packed) {
    memset(packed, 0x55, divide_up(s->K, 4)); /* a row ends in code 1, a zero weight */
    for (size_t c = 0; c < s->n_chunks; c++) {
        const uint8_t *codes = panel + c * s->code_bytes;
        size_t count, start = group_columns(s, c, &count);
        for (size_t k = 0; k < count; k++) {
            unsigned code;
            if (s->layout == GROUP_BY_PLANES) {
                code = *plane_byte(codes, s, r, k) >> 2 * (k % BLOCK_K / 4) & 3u;
            } else {
                static const unsigned power[3] = {1, 3, 9};
                int shift;
                const uint8_t *byte = triple_byte(codes, s, r, k / 3, &shift);
                const unsigned both = byte[0] | (shift > 3 ? (unsigned)byte[1] << 8 : 0);
                code = (both >> shift & 31) / power[k % 3] % 3;
            }
            uint8_t *to = packed + (start + k) / 4;
            const int at = (int)(2 * ((start + k) % 4));
            *to = (uint8_t)((*to & ~(3 << at)) | code << at);
        }
    }
}

/* One chunk of some tokens, as a kernel takes it. */
typedef struct {
    const uint8_t *tokens;  /* (T, token_bytes) */
    const int32_t *x_sum;   /* planes: (T, GROUP_PLANES), the sum of each plane */
    const double *steps;    /* (T) */
} group_chunk;

/* Asks for the first bytes that a thread will multiply by, so that they arrive while tokens become tables. */
static inline void group_fetch(const uint8_t *codes, size_t bytes) {
    for (size_t i = 0; i < bytes && i < GROUP_FAR; i += 64) __builtin_prefetch(codes + i, 0, 2);
}

/* Turns a row into the basis of the weights, H (signs x[order]) block by block: reference/quantization.py, `hadamard`, operation
 * by operation. */
static void group_turn(const float *x, size_t K, const float *signs, const int64_t *order, size_t block,
                       double *turned) {
    const double root = sqrt((double)block);
    for (size_t k = 0; k < K; k++) turned[k] = (double)x[order ? order[k] : (int64_t)k] * (double)signs[k];
    for (size_t half = 1; half < block; half *= 2)
        for (size_t i = 0; i < K; i += 2 * half)
            for (size_t j = i; j < i + half; j++) {
                const double a = turned[j], b = turned[j + half];
                turned[j] = a + b, turned[j + half] = a - b;
            }
    for (size_t k = 0; k < K; k++) turned[k] /= root;
}

#endif
