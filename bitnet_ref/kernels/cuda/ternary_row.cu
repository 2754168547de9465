// One token through a ternary linear, from its float row to the result: each of a decoding step's four products per
// layer in one launch, with the norm and the quantisation before it.
//
// Plain version (NumPy: layers.py, quantization.py; row.cuh says what comes before the product, ternary.cu has the
// product by itself):
//
//     x_q, scale = quantised RMSNorm of x
//     y[n]       = (sum over k of x_q[k] * w[n][k]) * (w_scale[n] / scale) + bias[n] + residual[n]
//     gated:  y[n] = gated(gate, y[n], y[n + N/2])                the matrix is gate and up, stacked
//
// A layer of 2B-4T takes 11 launches as one kernel per operation, each waiting for the one before. At some 2 us per
// launch (assumed) 30 layers are 0.7 ms, and reading the weights only 0.28 ms at 4.3
// TB/s. So every block computes the whole row for itself, from the second-level cache: all blocks do the same work at
// the same time. With more than one token that would cost more than a launch.
//
// On an H200 such a launch takes 4.7 us (o_proj) to 7.5 us (gate and up), where its weights' bytes are 0.4 to 2.1 us:
// the float64 sum of the norm, three barriers and the first loads follow each other. Started before the launch ahead of
// it has ended (early.cuh), the step of one token takes 1.07 ms in place of 1.20.
//
// The grid has one block per multiprocessor. A block first asks for as many weight tiles as it has slots, by
// asynchronous copies into shared memory; registers have no room for them. Ten slots per warp are 80 KB per
// multiprocessor: all that the widest product of 2B-4T, gate and up, has for one of 132. While they are on their way
// the row is normed and quantised in registers, and its int8 are laid into shared memory in the order of an mma.
//
// The product takes the tensor cores: x is the first column of B, the others are zeros. That is 4 mma per tile in place
// of 16 dp4a.
//
// Zeros are not skipped here, as kernels/cpu/strips.h does. At 80% zeros that would save some 7.5 of a layer's 13.3 MB of
// gate, up and down: 1.7 us at 4.3 TB/s. But the kernel would read up's rows after gate's result, in another launch, and
// could not prefetch them before. Nobody has tried it on a card. A card with a tenth of that bandwidth might gain.
#include "early.cuh"
#include "mma.cuh"
#include "row.cuh"
#include "ternary.cuh"

constexpr int MAX_SUMS = 512;  // of a block: of 32 tiles of rows
constexpr int MAX_SLOTS = 10;  // of a warp: tiles on their way

struct Scratch {  // of a block, in shared memory
    RowScratch row;
    int sums[MAX_SUMS];  // 64 times each
};
static_assert(sizeof(Scratch) <= 2560, "rows.py: OWN_SHARED");

// Where a thread's first four of x_q lies, as a word: by tile, lane t, crumb and half, so that the words which a lane
// gives to an mma are neighbours. The thread's next four is 2048 elements away.
__device__ __forceinline__ int place_of_first_four() {
    const int four = threadIdx.x;
    return four / 32 * 32 + four / 4 % 4 * 8 + four % 4 * 2 + four / 16 % 2;
}

// The tiles of a block in a row: those of its first 16 rows (of gate, then of up) along K, then those of the next.
struct Place {
    int row_tile, k;
    __device__ __forceinline__ bool advance(int tiles_k) {  // -> whether the next tile is of other rows
        const bool ends = ++k == tiles_k;
        if (ends) k = 0, row_tile++;
        return ends;
    }
};

struct Product {  // of one launch
    const unsigned* tiles;
    int rows, slots;
    const float *scales, *bias, *residual;
    int gate;
};

// A thread's elements of the norm's weight into shared memory, for itself: one group of copies, not waited for.
template <int VECTORS> __device__ __forceinline__ void stage(float* here, const float* weight, int width) {
    if (in_fours(weight, width)) {
        each_four<VECTORS>(width, [&](int, int i) { copy_async_16(here + i, weight + i, true); });
    } else {
        each_four<VECTORS>(width, [&](int, int i) {
            for (int e = 0; e < 4; e++) here[i + e] = i + e < width ? weight[i + e] : 0.0f;
        });
    }
    copies_commit();
}

// A unit is 16 rows, or of a gated pair 16 rows of each; block b has the units b, b + gridDim.x, ...
template <int VECTORS>
__device__ __forceinline__ void row_times(const float* row, const RowNorm& by, const Product& w, float* y, int* trouble,
                                          Scratch& scratch) {
    const int tiles_k = (by.width + TILE_COLUMNS - 1) / TILE_COLUMNS, stride = tiles_k * TILE_COLUMNS;
    const int shift = w.gate == PLAIN ? 0 : 1;  // tiles of rows of a unit, as a power of two
    const int units = ((w.rows + TILE_ROWS - 1) / TILE_ROWS) >> shift, blocks = gridDim.x, block = blockIdx.x;
    const int mine = (units - block + blocks - 1) / blocks;  // units of this block
    const int lane = lane_of_warp(), warp = warp_of_block(), warps = blockDim.x / 32, g = lane / 4, t = lane % 4;
    uint4* slots = dynamic_shared<uint4>() + warp * w.slots * 32 + lane;
    uint4* x_q = dynamic_shared<uint4>() + warps * w.slots * 32;
    float* weight_here = reinterpret_cast<float*>(x_q + stride / 16);

    if (by.weight) stage<VECTORS>(weight_here, by.weight, by.width);

    // The warps share the block's tiles: each has a run of them. One group of copies per slot, an empty one past the
    // run or past the slots there are, so that MAX_SLOTS groups always come after the norm's weight.
    const int all = (mine << shift) * tiles_k, from = all * warp / warps, run = all * (warp + 1) / warps - from;
    const Place begin = {from / tiles_k, from % tiles_k};
    Place ask = begin;
    const uint4* next = nullptr;
    auto seek = [&]() {
        const int unit = block + (ask.row_tile >> shift) * blocks, row_tile = unit + (ask.row_tile & shift) * units;
        next = reinterpret_cast<const uint4*>(w.tiles) + ((size_t)row_tile * tiles_k + ask.k) * 32 + lane;
    };
    seek();
    int asked = 0;
    auto ask_for = [&](int slot) {
        if (asked++ < run) {
            copy_async_16(slots + slot * 32, next, true);
            next += 32;
            if (ask.advance(tiles_k)) seek();
        }
        copies_commit();
    };
#pragma unroll 1
    for (int slot = 0; slot < MAX_SLOTS; slot++) {
        if (slot < w.slots) ask_for(slot);
        else copies_commit();
    }

    // Thread i writes result i of the block, and loads its scale, bias and residual early: they lie in memory too.
    const int my_unit = block + (int)threadIdx.x / TILE_ROWS * blocks;
    const int my_row = my_unit * TILE_ROWS + threadIdx.x % TILE_ROWS;
    const bool writes = my_unit < units && my_row < w.rows;
    float w_scale[2] = {}, bias[2] = {}, residual = 0;
#pragma unroll
    for (int half = 0; half < 2; half++)
        if (writes && half <= shift) {
            w_scale[half] = w.scales[my_row + half * units * TILE_ROWS];
            if (w.bias) bias[half] = w.bias[my_row + half * units * TILE_ROWS];
        }
    for (int i = threadIdx.x; i < MAX_SUMS; i += blockDim.x) scratch.sums[i] = 0;
    wait_for_earlier();
    if (writes && w.residual) residual = w.residual[my_row];

    const bool reports = block == 0;
    float x_scale;
    {
        float x[VECTORS][4];
        load(x, row, by.width);
        if (by.weight) {
            Squares squares;
            squares.add(x, by.width);
            const Rms rms = rms_of(squares, by, scratch.row, false, reports, 0, trouble);
            copies_wait<MAX_SLOTS>();
            auto weight = [&](int, int i) { return *reinterpret_cast<const float4*>(weight_here + i); };
            norm(x, weight, rms, by.width);
        }
        x_scale = scale_of(largest_of(x, by.width), scratch.row, reports, 0, trouble);
        unsigned* words = reinterpret_cast<unsigned*>(x_q) + place_of_first_four();
        each_four<VECTORS>(stride, [&](int v, int i) {
            words[v * ROW_STEP / 4] = i < by.width ? as_int8(x[v], x_scale) : 0;
        });
    }
    __syncthreads();

    uint4 low = make_uint4(0, 0, 0, 0), high = low;  // of lanes that hold columns of zeros they stay so
    int sums[2][4] = {};
    Place at = begin;
    auto multiply = [&](uint4 words) {
        if (g == 0) low = x_q[at.k * 8 + 2 * t], high = x_q[at.k * 8 + 2 * t + 1];
        const unsigned b[4][2] = {{low.x, low.y}, {low.z, low.w}, {high.x, high.y}, {high.z, high.w}};
#pragma unroll
        for (int crumb = 0; crumb < 4; crumb++) {
            const unsigned a[4] = {times_64(words.x, crumb), times_64(words.y, crumb), times_64(words.z, crumb),
                                   times_64(words.w, crumb)};
            mma_s8(sums[crumb % 2], a, b[crumb]);
        }
    };
    auto add_sums = [&](int row_tile) {  // of the rows g and g + 8, which lane 4 g has in column 0
        if (t == 0)
#pragma unroll
            for (int i = 0; i < 4; i += 2)
                atomicAdd(scratch.sums + row_tile * TILE_ROWS + g + 4 * i, sums[0][i] + sums[1][i]);
#pragma unroll
        for (int i = 0; i < 8; i++) sums[i / 4][i % 4] = 0;
    };
    if (run <= w.slots) {  // all of them are here, or on their way
        copies_wait<0>();
        for (int slot = 0; slot < run; slot++) {
            multiply(slots[slot * 32]);
            if (at.advance(tiles_k)) add_sums(at.row_tile - 1);
        }
    } else {
        for (int done = 0, slot = 0; done < run; done++) {
            copies_wait(w.slots - 1);
            multiply(slots[slot * 32]);  // which a lane has copied itself
            ask_for(slot);
            if (at.advance(tiles_k)) add_sums(at.row_tile - 1);
            slot = slot + 1 == w.slots ? 0 : slot + 1;
        }
    }
    if (run > 0 && at.k > 0) add_sums(at.row_tile);
    __syncthreads();
    if (!writes) return;
    const int* sum = scratch.sums + ((threadIdx.x / TILE_ROWS) << shift) * TILE_ROWS + threadIdx.x % TILE_ROWS;
    float value = scaled(sum[0] >> 6, w_scale[0], x_scale, w.bias != nullptr, bias[0]);
    if (w.gate != PLAIN)
        value = gated(w.gate, value, scaled(sum[TILE_ROWS] >> 6, w_scale[1], x_scale, w.bias != nullptr, bias[1]));
    y[my_row] = w.residual ? __fadd_rn(residual, value) : value;
}

// Grid: at most as many blocks as units, and enough that a block has no more than MAX_SUMS sums, and results, which
// are half of them if gated, than threads. Block: as of `rows`. Shared: slots * 512 bytes per warp, the whole tiles of
// x_q, and if there is a norm as many floats. slots: 1 to MAX_SLOTS. part = 1 / width. If gated, rows % 32 == 0 and
// residual is null. For rows of up to 2048 VECTORS.
#define TERNARY_ROW(VECTORS)                                                                                           \
    extern "C" __global__ void __launch_bounds__(ROW_THREADS, 1)                                                       \
        ternary_row_##VECTORS(const float* x, int width, double part, const float* weight, double eps,                 \
                              const unsigned* tiles, int rows, int slots, const float* w_scales, const float* bias,    \
                              const float* residual, int gate, float* y, int* trouble) {                               \
        __shared__ Scratch scratch;                                                                                    \
        const RowNorm by = {weight, width, eps, part};                                                                 \
        const Product w = {tiles, rows, slots, w_scales, bias, residual, gate};                                        \
        row_times<VECTORS>(x, by, w, y, trouble, scratch);                                                             \
    }
TERNARY_ROW(2)
TERNARY_ROW(4)
TERNARY_ROW(6)
TERNARY_ROW(8)
