// One token through a ternary linear, from what its row is made of to the result: a decoding step's four products a
// layer, each in one launch with all that lies before it.
//
// Plain version (NumPy: quantization.py; row.cuh says what comes before, ternary.cu has the product by itself):
//
//     x_q, scale = quantised row
//     y[n]       = (sum over k of x_q[k] * w[n][k]) * (w_scale[n] / scale) + bias[n]
//     gated:  y[n] = make(gate, y[n], y[n + N/2])                 the matrix is gate and up, on top of each other
//
// A layer of 2B-4T by one kernel a step is 11 launches, each of which waits for the one before: with some 2 us for every
// one (assumed; none of this has run on a GPU yet), 30 layers are 0.7 ms, and the bytes of a token only 0.28 ms at
// 4.3 TB/s. So every block makes the whole row for itself, from the second-level cache, in shared memory. That is work
// done two or three hundred times over, but at the same time, and what is read for it stays small: 20 to 55 KB a block,
// two blocks a multiprocessor, 5 to 15 MB; past one token it would be dearer than a launch.
//
// A block asks for its first weights, which are memory's part of the time, before anything else: they are on their way
// while the row is made, and, launched to overlap, while the kernel before it ends. Then its warps take the tiles of 16
// rows (of gate and up: of two times 16 rows) in turn, those of the next rows on their way meanwhile.
#include "row.cuh"
#include "ternary.cuh"

constexpr int MOST_WARPS = ROW_THREADS / 32;

// Grid: at most as many blocks as there are units: 16 rows, or of a gated pair 16 rows of each. Block: as of `rows`.
// Shared: width floats, and the whole tiles of x_q. made, if not null: the row before its norm. rows % 32 == 0 if gated.
extern "C" __global__ void __launch_bounds__(ROW_THREADS, 2)
    ternary_row(int source, const float* a, const float* b, int width, const float* weight, double eps, float* made,
                const unsigned* tiles, int rows, const float* w_scales, const float* bias, int gate, float* y,
                int* trouble) {
    __shared__ RowScratch scratch;
    __shared__ int partial[2][MOST_WARPS][2 * TILE_ROWS];  // of even and odd units: of each warp
    const int tiles_k = (width + TILE_COLUMNS - 1) / TILE_COLUMNS, stride = tiles_k * TILE_COLUMNS;
    const int halves = gate == PLAIN ? 1 : 2, units = (rows + TILE_ROWS - 1) / TILE_ROWS / halves;
    const int count = halves * tiles_k, warps = blockDim.x / 32, warp = warp_of_block(), t = lane_of_warp() % 4;
    uint4* x_q = dynamic_shared<uint4>();
    float* row = reinterpret_cast<float*>(x_q + stride / 16);

    uint4 words[TILES_AHEAD];
    auto ask_for = [&](int unit, int first) {  // tiles first, first + warps, ... of a unit; zeros past its end
#pragma unroll
        for (int ahead = 0; ahead < TILES_AHEAD; ahead++) {
            const int tile = first + ahead * warps, half = tile >= tiles_k;
            const size_t at = (size_t)(unit + half * units) * tiles_k + (tile - half * tiles_k);
            words[ahead] = make_uint4(0, 0, 0, 0);
            if (unit < units && tile < count)
                words[ahead] = __ldcs(reinterpret_cast<const uint4*>(tiles) + at * 32 + lane_of_warp());
        }
    };
    let_next_kernel_start();
    ask_for(blockIdx.x, warp);
    if (weight)
        for (int i = threadIdx.x * 32; i < width; i += blockDim.x * 32) prefetch(weight + i);
    wait_for_kernels_before();

    const bool first_block = blockIdx.x == 0;
    const Recipe of = {source, a, b, width, weight, eps};
    const float largest =
        compute_row(of, row, scratch, first_block ? made : nullptr, nullptr, true, first_block, 0, trouble);
    const float x_scale = scale_of(largest);
    quantize_row(row, width, x_scale, reinterpret_cast<signed char*>(x_q), stride);
    __syncthreads();

    for (int unit = blockIdx.x, odd = 0; unit < units; unit += gridDim.x, odd ^= 1) {
        const int mine = unit * TILE_ROWS + threadIdx.x % TILE_ROWS + threadIdx.x / TILE_ROWS * units * TILE_ROWS;
        const bool writes = (int)threadIdx.x < halves * TILE_ROWS && mine < rows;  // the first warp's threads
        const float w_scale = writes ? w_scales[mine] : 0.0f, of_bias = writes && bias ? bias[mine] : 0.0f;
        int sums[2][2] = {};  // 64 times those of rows g and g + 8, of the first and the second half
        for (int first = warp; first < count; first += TILES_AHEAD * warps) {
#pragma unroll
            for (int ahead = 0; ahead < TILES_AHEAD; ahead++) {
                const int tile = first + ahead * warps;
                if (tile >= count) break;  // all lanes alike
                const uint4* x = x_q + (tile < tiles_k ? tile : tile - tiles_k) * (TILE_COLUMNS / 16);
                int of_tile[2] = {};
                add_tile(of_tile, words[ahead], x[t], x[t + 4]);
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    sums[0][i] += tile < tiles_k ? of_tile[i] : 0;
                    sums[1][i] += tile < tiles_k ? 0 : of_tile[i];
                }
            }
            const bool more = first + TILES_AHEAD * warps < count;
            ask_for(more ? unit : unit + gridDim.x, more ? first + TILES_AHEAD * warps : warp);
        }
#pragma unroll
        for (int half = 0; half < 2 && warp < count; half++)
#pragma unroll
            for (int i = 0; i < 2; i++) {
                sums[half][i] += __shfl_xor_sync(ALL_LANES, sums[half][i], 1);
                sums[half][i] += __shfl_xor_sync(ALL_LANES, sums[half][i], 2);
                if (t == 0) partial[odd][warp][half * TILE_ROWS + lane_of_warp() / 4 + 8 * i] = sums[half][i];
            }
        __syncthreads();  // what the unit before left has been read by all who come here
        if (warp > 0) continue;
        int sum = 0;
#pragma unroll
        for (int of_warp = 0; of_warp < MOST_WARPS; of_warp++)
            if (of_warp < min(warps, count)) sum += partial[odd][of_warp][lane_of_warp()];
        float value = scaled(sum >> 6, w_scale, x_scale, bias != nullptr, of_bias);
        if (gate != PLAIN) value = make(gate, value, __shfl_down_sync(ALL_LANES, value, TILE_ROWS));
        if (writes && threadIdx.x < TILE_ROWS) y[mine] = value;
    }
}
