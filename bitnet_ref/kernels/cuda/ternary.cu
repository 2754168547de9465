// The ternary product y[M,N] = x[M,K] w[N,K]^T on a GPU: int8 activations, 2-bit weights, exact int32 sums.
//
// This file reads top to bottom as an explanation: the layout, the plain version, and then the fast ones.
#include "common.cuh"
#include "mma.cuh"

// -- the layout -------------------------------------------------------------------------------------------------------
//
// Weights are stored as 2-bit two's complement (-1 = 11, 0 = 00, +1 = 01), in tiles of 16 rows by 128 columns, 512
// bytes: what one warp reads with one 16-byte load a lane. Tiles lie along K first, then along N; rows and columns that
// fill up the last tiles are zeros, which add nothing whatever they meet.
//
// Lane 4g + t of a tile holds four words. Crumb i (bits 2i, 2i+1) of byte b of word r is the weight of
//
//     row 16 R + g + 8 (r & 1),    column 128 C + 64 (r >> 1) + 16 t + 4 i + b
//
// so a lane's weights belong to two rows and to two runs of 16 columns, which are two 16-byte loads of x; and with all
// crumbs i of the four words a lane has its part of an mma's A (see mma.cuh), for columns in an order of our own.
static constexpr int TILE_ROWS = 16, TILE_COLUMNS = 128, TILE_WORDS = 128;

/* The row (within the tile's 16) and the first of 4 columns (within its 128) of crumb i of word r of a lane. */
__device__ __forceinline__ int row_of(int lane, int word) { return lane / 4 + 8 * (word & 1); }
__device__ __forceinline__ int column_of(int lane, int word, int crumb) {
    return 64 * (word >> 1) + 16 * (lane % 4) + 4 * crumb;
}

/* Crumb i of each of a word's four bytes, as four int8 of 64 times the weight: 11 -> -64, 00 -> 0, 01 -> 64.
 * Shifted to the top of its byte a crumb *is* that number, so there is nothing to subtract and nothing to look up; a
 * sum of such products is 64 times the sum wanted, and fits: |sum| <= 128 * 64 * K < 2^31 for K < 262,144. */
__device__ __forceinline__ unsigned times_64(unsigned word, int crumb) { return word << (6 - 2 * crumb) & 0xc0c0c0c0u; }

/* One thread a word: from rows of 4 codes a byte (w + 1, the first in the lowest bits) to tiles. */
extern "C" __global__ void ternary_pack(const unsigned char *packed, int rows, int columns, unsigned *tiles) {
    const long long index = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    const int tiles_k = (columns + TILE_COLUMNS - 1) / TILE_COLUMNS, row_bytes = (columns + 3) / 4;
    const long long tile = index / TILE_WORDS;
    const int lane = int(index % TILE_WORDS) / 4, word = int(index % 4);
    const long long row = tile / tiles_k * TILE_ROWS + row_of(lane, word);
    if (tile >= (long long)((rows + TILE_ROWS - 1) / TILE_ROWS) * tiles_k) return;
    unsigned result = 0;
    for (int crumb = 0; crumb < 4; crumb++) {
        const int column = int(tile % tiles_k) * TILE_COLUMNS + column_of(lane, word, crumb);
        if (row >= rows || column >= columns) continue;
        const unsigned codes = packed[row * row_bytes + column / 4];
        for (int b = 0; b < 4; b++) {
            const unsigned weight = ((codes >> 2 * b & 3) + 3) & 3;  // w + 1 -> w, modulo 4
            if (column + b < columns) result |= weight << (8 * b + 2 * crumb);
        }
    }
    tiles[index] = result;
}

/* 0: the plain version. One thread an output, a weight at a time. */
extern "C" __global__ void ternary_plain(const signed char *x_q, int x_stride, const unsigned *tiles, int tokens,
                                         int rows, int columns, int *acc) {
    const long long index = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (index >= (long long)tokens * rows) return;
    const int token = int(index / rows), row = int(index % rows);
    const int tiles_k = (columns + TILE_COLUMNS - 1) / TILE_COLUMNS;
    int sum = 0;
    for (int column = 0; column < columns; column++) {
        const int within = column % TILE_COLUMNS, half = within / 64, t = within / 16 % 4;
        const int lane = row % 8 * 4 + t, word = row % 16 / 8 + 2 * half, crumb = within / 4 % 4, byte = within % 4;
        const long long tile = (long long)(row / TILE_ROWS) * tiles_k + column / TILE_COLUMNS;
        const unsigned bits = tiles[tile * TILE_WORDS + lane * 4 + word] >> (8 * byte + 2 * crumb) & 3;
        const int weight = bits == 3 ? -1 : int(bits);
        sum += weight * x_q[(long long)token * x_stride + column];
    }
    acc[index] = sum;
}
