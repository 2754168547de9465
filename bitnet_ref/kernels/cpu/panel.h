/* The layout of ternary weights for every kernel here: panels of 64 rows.
 *
 * A panel holds 64 rows (output features) and all K columns, in blocks of 16 columns. A block is 256 bytes: 4 vectors
 * of 64 bytes; a vector holds 16 rows, 4 bytes each. Byte i of a row's four holds columns i, 4+i, 8+i, 12+i of the
 * block:
 *
 *     block b, row r, column k = 16 b + 4 s + i:   byte 256 b + 64 (r / 16) + 4 (r % 16) + i,   bits 2s..2s+1
 *
 * So `(vector >> 2s) & 3` is 16 rows times 4 adjacent columns, one 32-bit lane per row. That is the operand of the
 * 4-way dot products of every instruction set (vpdpbusd, vpmaddubsw, sdot, AMX tiles); the other operand is 4 bytes of
 * activations, broadcast. No sum over lanes is needed at the end, the weights are read front to back, and one copy
 * serves one token and many.
 *
 * Codes are w_t + 1 in {0, 1, 2}, unsigned as vpdpbusd wants. The kernels sum code * x and subtract sum(x) at the end:
 * sum w_t x = sum (code - 1) x = sum code x - sum x. Rows and columns that pad a panel have code 0; padded columns meet
 * activations of 0, padded rows are not stored. */
#ifndef BITNET_REF_PANEL_H
#define BITNET_REF_PANEL_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define XMM_0_TO_15 /* for the clobbers of an asm statement */                                                         \
    "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10", "xmm11", "xmm12",         \
        "xmm13", "xmm14", "xmm15"

enum { PANEL_ROWS = 64, BLOCK_K = 16, BLOCK_BYTES = 256, VECTOR_BYTES = 64 };

/* Matrices whose rows are read some at a time: what is read next is prefetched into L1, and rows further on into L2,
 * where more misses can wait for memory. Measured with one thread of an EPYC (Zen 4; a plain read 25 GB/s), GB/s from
 * memory, into L1 alone and now: bfloat16, rows of 4 KB 14, 21; of 1 KB 11, 18, and from L3 13, 40; the head's screen
 * 12, 22; Q8_0 12, 16; Q6_K 11, 13; Q4_0 and Q4_K, which widening binds, 1.09 and 1.03 times as fast. L2 alone: the same
 * from memory, 5 to 10% slower from L3. */
enum { NEAR_BYTES = 256, FAR_BYTES = 16384 };

static inline __attribute__((always_inline)) void prefetch_row(const void *at, const void *ahead) {
    __builtin_prefetch(ahead, 0, 2);
    __builtin_prefetch((const char *)at + NEAR_BYTES);
}

/* bytes to the rows further on, of which `rows` are read together */
static inline size_t bytes_ahead(size_t rows, size_t row_bytes) {
    return (FAR_BYTES / (rows * row_bytes + 1) + 1) * rows * row_bytes;
}

/* The arguments of every kernel. acc[m * acc_stride + r] = sum over k of w_t[r][k] * x[m][k], for r < rows of one panel.
 *   panel   n_blocks * 256 bytes
 *   x       (M, 16 * n_blocks) int8, rows x_stride bytes apart;   x_sum (M) the sum of each row
 *   scratch SCRATCH_BYTES of the calling thread, 64-byte aligned */
#define TERNARY_ARGS                                                                                                   \
    const uint8_t *panel, size_t n_blocks, const int8_t *x, size_t x_stride, size_t M, const int32_t *x_sum,           \
        int32_t *acc, size_t acc_stride
#define TERNARY_PASS panel, n_blocks, x, x_stride, M, x_sum, acc, acc_stride
typedef void (*ternary_panel_fn)(TERNARY_ARGS, size_t rows, void *scratch);
typedef void (*ternary_many_fn)(TERNARY_ARGS, uint8_t *scratch); /* stores all 64 rows */

enum { SCRATCH_K = 256 /* columns unpacked at a time */, SCRATCH_BYTES = PANEL_ROWS * 1024 /* the max, for AMX */ };

/* memcpy of `count` bytes that are mostly `most`, a constant: without a call then. */
static inline void copy_mostly(void *to, const void *from, size_t count, size_t most) {
    if (count == most) memcpy(to, from, most);
    else memcpy(to, from, count);
}

/* Tokens in tiles, an order of x that AMX reads faster (ternary_amx.h): of each 32 tokens, 64 columns of all, then the next
 * 64. A token has `tiled_bytes` in all, of which those beyond 16 * n_blocks columns are not read. */
enum { TILED_TOKENS = 32 };

static inline size_t tiled_bytes(size_t n_blocks) { return (n_blocks * BLOCK_K + VECTOR_BYTES - 1) / VECTOR_BYTES * VECTOR_BYTES; }

/* token m, x (16 * n_blocks), to its place among all: (tokens, rounded up to 32) * tiled_bytes */
static void tile_token(const int8_t *x, size_t n_blocks, size_t m, uint8_t *tiles) {
    uint8_t *to = tiles + m / TILED_TOKENS * TILED_TOKENS * tiled_bytes(n_blocks) + m % TILED_TOKENS * VECTOR_BYTES;
    for (size_t k = 0; k < n_blocks * BLOCK_K; k += VECTOR_BYTES)
        copy_mostly(to + k * TILED_TOKENS, x + k, n_blocks * BLOCK_K - k < VECTOR_BYTES ? n_blocks * BLOCK_K - k : VECTOR_BYTES, VECTOR_BYTES);
}

/* The 4 x 4 matrix of 2-bit fields in a word, transposed: field (i, j) is at bit 8i + 2j. */
static inline uint32_t transpose_codes(uint32_t word) {
    uint32_t swap = (word ^ (word >> 6)) & 0x00CC00CCu;
    word ^= swap ^ (swap << 6);
    swap = (word ^ (word >> 12)) & 0x0000F0F0u;
    return word ^ swap ^ (swap << 12);
}

enum { TILE = 16 /* rows, and blocks: 64 bytes of a row, and a vector of a block */ };

/* Packed rows, four adjacent columns per byte (rows, row_bytes) -> one panel. In tiles, whose vectors are written whole:
 * 2560 x 6912 takes one thread of an EPYC (Zen 5) 0.9 ms, word by word 2.4; unpacking it 0.9, and 3.1. */
static void pack_panel(const uint8_t *packed, size_t rows, size_t row_bytes, uint8_t *panel) {
    const size_t n_blocks = (row_bytes + 3) / 4;
    for (size_t first = 0; first < PANEL_ROWS; first += TILE)
        for (size_t b = 0; b < n_blocks; b += TILE) {
            const size_t bytes = row_bytes - 4 * b < 4 * TILE ? row_bytes - 4 * b : 4 * TILE;
            uint32_t words[TILE][TILE] = {{0}}, vector[TILE]; /* of row r: words[r] */
            for (size_t r = 0; r < TILE && first + r < rows; r++)
                copy_mostly(words[r], packed + (first + r) * row_bytes + 4 * b, bytes, 4 * TILE);
            for (size_t i = 0; i < TILE && b + i < n_blocks; i++) {
                for (size_t r = 0; r < TILE; r++) vector[r] = transpose_codes(words[r][i]);
                memcpy(panel + (b + i) * BLOCK_BYTES + first / 16 * VECTOR_BYTES, vector, VECTOR_BYTES);
            }
        }
}

static void unpack_panel(const uint8_t *panel, size_t rows, size_t row_bytes, uint8_t *packed) {
    const size_t n_blocks = (row_bytes + 3) / 4;
    for (size_t first = 0; first < rows; first += TILE)
        for (size_t b = 0; b < n_blocks; b += TILE) {
            const size_t bytes = row_bytes - 4 * b < 4 * TILE ? row_bytes - 4 * b : 4 * TILE;
            uint32_t words[TILE][TILE], vector[TILE];
            for (size_t i = 0; i < TILE && b + i < n_blocks; i++) {
                memcpy(vector, panel + (b + i) * BLOCK_BYTES + first / 16 * VECTOR_BYTES, VECTOR_BYTES);
                for (size_t r = 0; r < TILE; r++) words[r][i] = transpose_codes(vector[r]);
            }
            for (size_t r = 0; r < TILE && first + r < rows; r++)
                copy_mostly(packed + (first + r) * row_bytes + 4 * b, words[r], bytes, 4 * TILE);
        }
}

/* A row of a Hugging Face plane (K), whose byte holds a code of each quarter of the matrix's rows -> packed rows,
 * quarter_bytes apart, padded with weights of 0. Returns 0 if there is no code 3. In loops that become vector
 * instructions: 640 x 6912 takes one thread 1.1 ms (Emerald Rapids), 1.6 word by word. */
static uint32_t pack_plane_row(const uint8_t *restrict plane, size_t K, uint8_t *restrict packed, size_t quarter_bytes) {
    uint32_t bad = 0;
    for (size_t k = 0; k < K; k += 4 * TILE) {
        const size_t count = K - k < 4 * TILE ? K - k : 4 * TILE;
        uint32_t words[TILE]; /* four columns each: fields (column, quarter) */
        uint8_t bytes[4][TILE];
        memset(words, 0x55, sizeof words);
        copy_mostly(words, plane + k, count, 4 * TILE);
        for (int i = 0; i < TILE; i++) bad |= words[i] & words[i] >> 1 & 0x55555555u;
        for (int i = 0; i < TILE; i++) words[i] = transpose_codes(words[i]);
        for (int q = 0; q < 4; q++)
            for (int i = 0; i < TILE; i++) bytes[q][i] = (uint8_t)(words[i] >> 8 * q);
        for (int q = 0; q < 4; q++) copy_mostly(packed + q * quarter_bytes + k / 4, bytes[q], (count + 3) / 4, TILE);
    }
    return bad;
}

/* Runs `many`. A last panel of fewer rows is stored into a temporary array, of which `rows` are copied. */
static void ternary_64_rows(ternary_many_fn many, TERNARY_ARGS, size_t rows, void *scratch) {
    enum { PADDED_TOKENS = 96 };
    int32_t padded[PADDED_TOKENS * PANEL_ROWS];
    if (rows == PANEL_ROWS) {
        many(TERNARY_PASS, (uint8_t *)scratch);
        return;
    }
    for (size_t m = 0; m < M; m += PADDED_TOKENS) {
        const size_t tokens = M - m < PADDED_TOKENS ? M - m : PADDED_TOKENS;
        many(panel, n_blocks, x + m * x_stride, x_stride, tokens, x_sum + m, padded, PANEL_ROWS, (uint8_t *)scratch);
        for (size_t t = 0; t < tokens; t++)
            memcpy(acc + (m + t) * acc_stride, padded + t * PANEL_ROWS, rows * sizeof(int32_t));
    }
}

#endif
