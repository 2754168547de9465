// One token through a ternary linear, from what its row is made of to the result: a decoding step's four products a
// layer, each in one launch with all that lies before it.
//
// Plain version (NumPy: quantization.py; row.cuh says what comes before, ternary.cu has the product by itself):
//
//     x_q, scale = quantised row
//     y[n]       = (sum over k of x_q[k] * w[n][k]) * (w_scale[n] / scale) + bias[n]
//     gated:  y[n] = make(gate, y[n], y[n + N/2])                 the matrix is gate and up, on top of each other
//
// A layer of 2B-4T by one kernel a step is 11 launches, each of which waits for the one before: with some 2 us for
// every one (assumed; none of this has run on a GPU yet), 30 layers are 0.7 ms, and the bytes of a token only 0.28 ms
// at 4.3 TB/s. So every block makes the whole row for itself, from the second-level cache. That is the same work in
// every block, but at the same time; past one token it would be dearer than a launch.
//
// It is done once a multiprocessor: a grid has one block for each of these, and leaves half of it to the block of the
// next kernel. Two blocks of 512 threads with 64 registers fill the 65,536 there are, and shared memory has room for
// both (rows.py: `row_launch`). So, launched to overlap, a block asks for what lies in memory while the kernel before
// still computes: the norm's weight, and as many tiles as there are slots, by asynchronous copies into shared memory,
// since there are no registers to wait in. Ten slots a warp are 80 KB a multiprocessor: all that the widest product of
// 2B-4T, gate and up, has for one of 132.
//
// Then the row is made in registers, and its int8 are laid into shared memory as an mma takes them. The product is the
// tensor cores': x is the first column of B, the others are zeros. That is 4 mma a tile in place of 16 dp4a.
#include "mma.cuh"
#include "row.cuh"
#include "ternary.cuh"

constexpr int MOST_SUMS = 512;  // of a block: of 32 tiles of rows
constexpr int MOST_SLOTS = 10;  // of a warp: tiles that are on their way

struct Scratch {  // of a block, in shared memory
    RowScratch row;
    int sums[MOST_SUMS];  // 64 times each
};
static_assert(sizeof(Scratch) <= 2560, "rows.py: OWN_SHARED");

// Where a thread's first four of x_q lies, as a word: by tile, lane t, crumb and half, so that what a lane gives to an
// mma lies side by side. Its next one is 2048 elements away, as anywhere.
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

struct Weights {  // of one launch
    const unsigned* tiles;
    int rows, slots;
    const float *scales, *bias;
    int gate;
};

// make_row: x from what the row is made of. A unit is 16 rows, or of a gated pair 16 rows of each; block b has the
// units b, b + gridDim.x, ...
template <int VECTORS, class Make>
__device__ __forceinline__ void row_times(const Recipe& of, Make make_row, float* made, const Weights& w, float* y,
                                          int* trouble, Scratch& scratch) {
    const int tiles_k = (of.width + TILE_COLUMNS - 1) / TILE_COLUMNS, stride = tiles_k * TILE_COLUMNS;
    const int shift = w.gate == PLAIN ? 0 : 1;  // tiles of rows of a unit, as a power of two
    const int units = ((w.rows + TILE_ROWS - 1) / TILE_ROWS) >> shift, blocks = gridDim.x, block = blockIdx.x;
    const int mine = (units - block + blocks - 1) / blocks;  // units of this block
    const int lane = lane_of_warp(), warp = warp_of_block(), warps = blockDim.x / 32, g = lane / 4, t = lane % 4;
    uint4* slots = dynamic_shared<uint4>() + warp * w.slots * 32 + lane;
    uint4* x_q = dynamic_shared<uint4>() + warps * w.slots * 32;
    float* weight_here = reinterpret_cast<float*>(x_q + stride / 16);
    let_next_kernel_start();

    if (of.weight) stage<VECTORS>(weight_here, of.weight, of.width);

    // The warps share the block's tiles: each has a run of them. One group of copies a slot, an empty one past the run
    // or past the slots there are, so that always MOST_SLOTS come after the norm's weight.
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
    for (int slot = 0; slot < MOST_SLOTS; slot++) {
        if (slot < w.slots) ask_for(slot);
        else copies_commit();
    }

    // Thread i writes result i of the block, and has its scale and bias in registers: they lie in memory too.
    const int my_unit = block + (int)threadIdx.x / TILE_ROWS * blocks;
    const int my_row = my_unit * TILE_ROWS + threadIdx.x % TILE_ROWS;
    const bool writes = my_unit < units && my_row < w.rows;
    float w_scale[2] = {}, bias[2] = {};
#pragma unroll
    for (int half = 0; half < 2; half++)
        if (writes && half <= shift) {
            w_scale[half] = w.scales[my_row + half * units * TILE_ROWS];
            if (w.bias) bias[half] = w.bias[my_row + half * units * TILE_ROWS];
        }
    for (int i = threadIdx.x; i < MOST_SUMS; i += blockDim.x) scratch.sums[i] = 0;
    wait_for_kernels_before();

    const bool tells = block == 0;
    float x_scale;
    {
        float x[VECTORS][4];
        make_row(x);
        if (made && tells) store(made, x, of.width);
        if (of.weight) {
            Squares squares;
            squares.add(x, of.width);
            const Rms rms = rms_of(squares, of, scratch.row, false, tells, 0, trouble);
            copies_wait<MOST_SLOTS>();
            auto weight = [&](int, int i) { return *reinterpret_cast<const float4*>(weight_here + i); };
            norm(x, weight, rms, of.width);
        }
        x_scale = scale_of(largest_of(x, of.width), scratch.row, tells, 0, trouble);
        unsigned* words = reinterpret_cast<unsigned*>(x_q) + place_of_first_four();
        each_four<VECTORS>(stride, [&](int v, int i) {
            words[v * ROW_STEP / 4] = i < of.width ? as_int8(x[v], x_scale) : 0;
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
        value = make(w.gate, value, scaled(sum[TILE_ROWS] >> 6, w_scale[1], x_scale, w.bias != nullptr, bias[1]));
    y[my_row] = value;
}

// Grid: at most as many blocks as units, and enough that a block has no more than MOST_SUMS sums, and results, which
// are half of them if gated, than threads. Block: as of `rows`. Shared: slots * 512 bytes a warp, the whole tiles of
// x_q, and if there is a norm as many floats. slots: 1 to MOST_SLOTS. made, if not null: the row before its norm.
// part = 1 / width. If gated, rows % 32 == 0.
//
// For rows of up to 2048 VECTORS. Those made by a gate have only the widest kernel: gate and up that were multiplied as
// one, by this kernel, come as PLAIN.
#define TERNARY_ROW(NAME, VECTORS, BLOCKS, MAKE)                                                                       \
    extern "C" __global__ void __launch_bounds__(ROW_THREADS, BLOCKS)                                                  \
        NAME(int source, const float* a, const float* b, int width, double part, const float* weight, double eps,      \
             float* made, const unsigned* tiles, int rows, int slots, const float* w_scales, const float* bias,        \
             int gate, float* y, int* trouble) {                                                                       \
        __shared__ Scratch scratch;                                                                                    \
        const Recipe of = {source, a, b, width, weight, eps, part};                                                    \
        const Weights w = {tiles, rows, slots, w_scales, bias, gate};                                                  \
        auto make_row = [&](float(&x)[VECTORS][4]) { MAKE(x, of); };                                                   \
        row_times<VECTORS>(of, make_row, made, w, y, trouble, scratch);                                                \
    }
TERNARY_ROW(ternary_row_plain_2, 2, 2, make_from<PLAIN>)
TERNARY_ROW(ternary_row_plain_4, 4, 2, make_from<PLAIN>)
TERNARY_ROW(ternary_row_plain_6, 6, 2, make_from<PLAIN>)
TERNARY_ROW(ternary_row_plain_8, 8, 1, make_from<PLAIN>)
TERNARY_ROW(ternary_row_sum_2, 2, 2, make_from<SUM>)
TERNARY_ROW(ternary_row_sum_4, 4, 2, make_from<SUM>)
TERNARY_ROW(ternary_row_sum_8, 8, 1, make_from<SUM>)
TERNARY_ROW(ternary_row_gate_8, 8, 1, make_of)
