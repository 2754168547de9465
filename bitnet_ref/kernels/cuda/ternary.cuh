// Shared by the ternary kernels: the layout of weights in memory, and the epilogue of a sum.
#pragma once
#include "common.cuh"

// -- the layout -------------------------------------------------------------------------------------------------------
//
// Weights are stored as 2-bit two's complement (-1 = 11, 0 = 00, +1 = 01), in tiles of 16 rows by 128 columns, 512
// bytes: one 16-byte load for each lane of a warp. Tiles lie along K first, then along N; rows and columns that fill up
// the last tiles are zeros.
//
// Lane 4g + t of a tile holds four words. Crumb i (bits 2i, 2i+1) of byte b of word r is the weight of
//
//     row 16 R + g + 8 (r & 1),    column 128 C + 64 (r >> 1) + 16 t + 4 i + b
//
// so a lane's weights belong to two rows and to two runs of 16 columns, which are two 16-byte loads of x. The crumbs i
// of its four words are its part of an mma's A (see mma.cuh), for columns in an order of our own.
static constexpr int TILE_ROWS = 16, TILE_COLUMNS = 128, TILE_WORDS = 128;
static constexpr int TILES_AHEAD = 4;  // that a warp of the kernels for few tokens loads at once

/* The row (within the tile's 16) and the first of 4 columns (within its 128) of crumb i of word r of a lane. */
__device__ __forceinline__ int row_of(int lane, int word) { return lane / 4 + 8 * (word & 1); }
__device__ __forceinline__ int column_of(int lane, int word, int crumb) {
    return 64 * (word >> 1) + 16 * (lane % 4) + 4 * crumb;
}

/* Crumb i of each of a word's four bytes, as four int8 of 64 times the weight: 11 -> -64, 00 -> 0, 01 -> 64.
 * Shifted to the top of its byte a crumb *is* that number: no subtraction and no table. A sum of such products is 64
 * times the true sum, and fits: |sum| <= 128 * 64 * K < 2^31 for K < 262,144. */
__device__ __forceinline__ unsigned times_64(unsigned word, int crumb) { return word << (6 - 2 * crumb) & 0xc0c0c0c0u; }

/* Adds a lane's part of one tile and one token: 64 times the sums of rows g and g + 8. low, high: its loads of x. */
__device__ __forceinline__ void add_tile(int (&sums)[2], uint4 words, uint4 low, uint4 high) {
    const unsigned w[4] = {words.x, words.y, words.z, words.w};
    const unsigned x[2][4] = {{low.x, low.y, low.z, low.w}, {high.x, high.y, high.z, high.w}};
    #pragma unroll
    for (int word = 0; word < 4; word++)
        #pragma unroll
        for (int crumb = 0; crumb < 4; crumb++)
            sums[word & 1] = __dp4a(int(times_64(w[word], crumb)), int(x[word >> 1][crumb]), sums[word & 1]);
}

// -- the epilogue -----------------------------------------------------------------------------------------------------

/* y = sum * (w_scale / x_scale) + bias, each operation rounded once, as `quantization.dequantize` writes it. Every row
 * has its own w_scale, so matrices of different scales can be stacked. */
__device__ __forceinline__ float scaled(int sum, float w_scale, float x_scale, bool biased, float bias) {
    const float value = __fmul_rn(__int2float_rn(sum), __fdiv_rn(w_scale, x_scale));
    return biased ? __fadd_rn(value, bias) : value;
}

/* Writes a result, added to the residual stream where one is given: the bits of `add(residual, linear(x))`. */
__device__ __forceinline__ void write_y(float *y, const float *residual, long long place, float value) {
    y[place] = residual != nullptr ? __fadd_rn(residual[place], value) : value;
}
