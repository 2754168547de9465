// What attention.cu and attention_decode.cu share: how keys are cut into chunks, and where scores lie.
#pragma once
#include "floats.cuh"
#include "mma.cuh"
#include "pages.cuh"

constexpr int CHUNK = 128;           // keys
constexpr int WARPS = 4;             // of a block
constexpr int TILE = 8;              // rows, and columns, of a product
constexpr int STEP = 16;             // what a product sums over: lane t of 4 has the elements 4t, ..., 4t + 3
constexpr int KEYS = CHUNK / WARPS;  // of a warp, in `scores`
constexpr int COLUMNS = 32;          // of a warp, in `values`: 4 of a lane
static_assert(KEYS == 4 * TILE && COLUMNS == 4 * TILE, "four tiles of columns a warp");

// The first position that a token sees; `position` itself is the last.
__device__ __forceinline__ int first_seen(int position, int window) {
    return window > 0 && position >= window ? position - window + 1 : 0;
}

struct Row {          // a head of a token
    size_t at;        // token * H + head
    int first, last;  // positions that it sees
};

// Where row `row` of scores (N, H, stride) has the one of position j: it begins with the chunk of the first key seen.
__device__ __forceinline__ size_t score_of(Row row, int j, int stride) {
    return row.at * stride + j - row.first / CHUNK * CHUNK;
}

// Four neighbours of a key or value as the cache keeps them.
template <class T> struct alignas(4 * sizeof(T)) Four {
    T element[4];
};

// Without the 2, blocks of a multiprocessor that registers are to be kept for, ptxas spills to stay at 128 of them.
#define A_BLOCK __launch_bounds__(32 * WARPS, 2)
