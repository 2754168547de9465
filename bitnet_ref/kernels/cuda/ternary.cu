// The ternary product y[M,N] = x[M,K] w[N,K]^T on a GPU: int8 activations, 2-bit weights, exact int32 sums.
//
// Read ternary.cuh first, which has the layout of the weights; then this file from top to bottom: the plain version,
// and the fast ones. ternary_row.cu multiplies one token whose row it norms and quantises itself.
#include "early.cuh"
#include "mma.cuh"
#include "stacked.cuh"
#include "ternary.cuh"

// -- into the layout --------------------------------------------------------------------------------------------------

/* One thread per word: from rows of 4 codes per byte (w + 1, the first in the lowest bits) to tiles. */
extern "C" __global__ void ternary_pack(const unsigned char *packed, int rows, int columns, unsigned *tiles) {
    wait_for_earlier();
    const long long index = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    const int tiles_k = (columns + TILE_COLUMNS - 1) / TILE_COLUMNS, row_bytes = (columns + 3) / 4;
    const long long tile = index / TILE_WORDS;
    const int lane = int(index % TILE_WORDS) / 4, word = int(index % 4);
    const long long row = tile / tiles_k * TILE_ROWS + row_of(lane, word);
    if (tile >= (long long)((rows + TILE_ROWS - 1) / TILE_ROWS) * tiles_k) return;
    unsigned result = 0;
    #pragma unroll
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

/* Pads rows of `columns` int8 to whole tiles, as the kernels below read them. */
extern "C" __global__ void ternary_pad(const signed char *x_q, int tokens, int columns, signed char *padded) {
    wait_for_earlier();
    const int stride = (columns + TILE_COLUMNS - 1) / TILE_COLUMNS * TILE_COLUMNS;
    const long long index = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (index >= (long long)tokens * stride) return;
    const long long token = index / stride;
    const int column = int(index % stride);
    padded[index] = column < columns ? x_q[token * columns + column] : (signed char)0;
}

// Parameters of the kernels 0 to 3:
//
//   x_q       (tokens, x_stride) int8, x_stride a multiple of 128, at least `columns`; past `columns` any values, since
//             the weights there are zeros
//   tiles     (ceil(rows / 16), tiles_k = ceil(columns / 128), 128) words, see ternary.cuh
//   w_scales  (rows,) float32   x_scales (tokens,) float32   bias (rows,) float32 or null
//   second, third  where the second and the third matrix of a stack begin, see stacked.cuh
//   residual  (tokens, rows) float32, added to y; or null, as for every stack
//   y         (tokens, rows) float32 (of a stack: see stacked.cuh), or null if the sums are the result
//   acc       (tokens, rows) int32 for the sums, or null
//   share     of kernel 3: tiles along K of one block; the grid has ceil(tiles_k / share) blocks along K, which *add*
//             to acc. It holds zeros before the launch, and also after it if there is a y
//   done      of kernel 3 where several blocks compute a y: a zero for each block of rows and tokens, before and after
#define PARAMETERS                                                                                                    \
    const signed char *x_q, int x_stride, const unsigned *tiles, int tokens, int rows, int columns, int second,       \
        int third, int share, const float *w_scales, const float *x_scales, const float *bias,                        \
        const float *residual, int *acc, int *done, float *y
#define ARGUMENTS                                                                                                     \
    x_q, x_stride, tiles, tokens, rows, columns, second, third, share, w_scales, x_scales, bias, residual, acc, done, y

// -- 0: the plain version. One thread per output, one weight at a time ------------------------------------------------

extern "C" __global__ void ternary_plain(PARAMETERS) {
    wait_for_earlier();
    const long long index = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (index >= (long long)tokens * rows) return;
    const long long token = index / rows;
    const int row = int(index % rows), tiles_k = (columns + TILE_COLUMNS - 1) / TILE_COLUMNS;
    int sum = 0;
    for (int column = 0; column < columns; column++) {
        const int within = column % TILE_COLUMNS, half = within / 64, t = within / 16 % 4;
        const int lane = row % 8 * 4 + t, word = row % 16 / 8 + 2 * half, crumb = within / 4 % 4, byte = within % 4;
        const long long tile = (long long)(row / TILE_ROWS) * tiles_k + column / TILE_COLUMNS;
        const unsigned bits = tiles[tile * TILE_WORDS + lane * 4 + word] >> (8 * byte + 2 * crumb) & 3;
        sum += (bits == 3 ? -1 : int(bits)) * x_q[token * x_stride + column];
    }
    if (acc != nullptr)
        acc[index] = sum;
    else
        write_y(y, residual, place_in_stack(token, row, tokens, rows, second, third),
                scaled(sum, w_scales[row], x_scales[token], bias != nullptr, bias ? bias[row] : 0.0f));
}

// -- 1: one token, dp4a -----------------------------------------------------------------------------------------------
//
// A decoding step reads every weight once and does four operations with it: memory is its limit. What counts is how
// many bytes are in flight; at 4.3 TB/s (a copy, measured on an H200) and a latency of some 0.7 us (assumed) 3 MB, 23
// KB per multiprocessor, which is the whole of a small matrix. So a block takes 16 rows and all of K, its warps take
// the tiles of a row of tiles in turn, and each loads its first four tiles (16 bytes per lane and tile) before it does
// anything else. Weights do not go through shared memory.
//
// Operations for a lane's 64 weights of a tile: 12 shifts, 16 ands, 16 dp4a. The x of a warp's four tiles is 512 bytes:
// one load of 16 bytes per lane, shared through shared memory within the warp.
/* A lane's four words of the tiles first, first + step, ... below `end`; zeros past it. Read once, so not cached. */
__device__ __forceinline__ void load_tiles(uint4 (&words)[TILES_AHEAD], const uint4 *row_of_tiles, int first, int step,
                                           int end) {
    #pragma unroll
    for (int ahead = 0; ahead < TILES_AHEAD; ahead++) {
        const int tile = first + ahead * step;
        words[ahead] = tile < end ? __ldcs(row_of_tiles + tile * 32ll + lane_of_warp()) : make_uint4(0, 0, 0, 0);
    }
}

/* What a thread of kernels 1 and 2 needs to write sums of its row. It is loaded at the start, with the weights: loaded
 * at the end, the block would wait for it alone. */
struct Row {
    int row;
    bool exists;
    float w_scale, bias;

    __device__ __forceinline__ Row(int row, int rows, const float *w_scales, const float *biases, const int *acc)
        : row(row), exists(row < rows), w_scale(0.0f), bias(0.0f) {
        if (exists && acc == nullptr) {
            w_scale = w_scales[row];
            if (biases != nullptr) bias = biases[row];
        }
    }
};

extern "C" __global__ void __launch_bounds__(512) ternary_gemv_dp4a(PARAMETERS) {
    __shared__ int partial[16][TILE_ROWS];  // of each warp
    __shared__ uint4 x_of_tiles[16][8 * TILES_AHEAD];
    uint4 *x = x_of_tiles[warp_of_block()];
    const int tiles_k = (columns + TILE_COLUMNS - 1) / TILE_COLUMNS, warps = blockDim.x / 32;
    const int t = lane_of_warp() % 4;
    const uint4 *row_of_tiles = reinterpret_cast<const uint4 *>(tiles) + (long long)blockIdx.x * tiles_k * 32;
    int tile = warp_of_block();
    uint4 words[TILES_AHEAD];
    load_tiles(words, row_of_tiles, tile, warps, tiles_k);
    const Row mine(threadIdx.x < TILE_ROWS ? blockIdx.x * TILE_ROWS + threadIdx.x : rows, rows, w_scales, bias, acc);
    wait_for_earlier();
    const float x_scale = mine.exists && acc == nullptr ? x_scales[0] : 1.0f;
    int sums[2] = {0, 0};  // 64 times those of rows g and g + 8
    while (tile < tiles_k) {
        const int tile_of_lane = min(tile + lane_of_warp() / 8 * warps, tiles_k - 1);
        const uint4 chunk = reinterpret_cast<const uint4 *>(x_q)[tile_of_lane * 8 + lane_of_warp() % 8];
        __syncwarp();  // all lanes have read the previous x
        x[lane_of_warp()] = chunk;
        __syncwarp();
        #pragma unroll
        for (int ahead = 0; ahead < TILES_AHEAD; ahead++) {
            if (tile + ahead * warps >= tiles_k) break;  // the same in all lanes
            add_tile(sums, words[ahead], x[8 * ahead + t], x[8 * ahead + t + 4]);
        }
        tile += TILES_AHEAD * warps;
        load_tiles(words, row_of_tiles, tile, warps, tiles_k);
    }
    #pragma unroll
    for (int half = 0; half < 2; half++) {
        sums[half] += __shfl_xor_sync(ALL_LANES, sums[half], 1);
        sums[half] += __shfl_xor_sync(ALL_LANES, sums[half], 2);
        if (t == 0) partial[warp_of_block()][lane_of_warp() / 4 + 8 * half] = sums[half];
    }
    __syncthreads();
    if (!mine.exists) return;
    int sum = 0;
    for (int warp = 0; warp < warps; warp++) sum += partial[warp][threadIdx.x];
    sum >>= 6;
    if (acc == nullptr)  // for one token the results of a stack are in the order of its rows
        write_y(y, residual, mine.row, scaled(sum, mine.w_scale, x_scale, bias != nullptr, mine.bias));
    else
        acc[mine.row] = sum;
}

// -- 2: few tokens, tensor cores, weights read once -------------------------------------------------------------------
//
// The same plan for up to 8 GROUPS tokens: a lane's words, unpacked, *are* its part of A (16 rows of weights), and its
// 16-byte loads of x are its part of B (8 tokens): no lanes exchange data, and a tile costs 4 mma in place of 16 dp4a
// for each token. With one token all columns of B are the same, and it is still fewer operations than kernel 1.
//
// x is read once for each 16 rows: 1 KB for 8 tokens beside 512 bytes of weights. All blocks of a multiprocessor read
// the same x, so it comes from the first-level cache, which the weights bypass; past 32 tokens kernel 3 is better. Four
// independent chains of sums hide the latency of mma, for any GROUPS. Eight loads of x, those of BATCH tiles, are in
// flight at once.
template <int GROUPS>
__device__ __forceinline__ void gemv_mma(PARAMETERS) {
    constexpr int CHAINS = 4 / GROUPS, BATCH = 4 / GROUPS, TOKENS = 8 * GROUPS;
    int *partial = dynamic_shared<int>();  // [warp][token][row]
    const int tiles_k = (columns + TILE_COLUMNS - 1) / TILE_COLUMNS, warps = blockDim.x / 32;
    const int g = lane_of_warp() / 4, t = lane_of_warp() % 4;
    const uint4 *row_of_tiles = reinterpret_cast<const uint4 *>(tiles) + (long long)blockIdx.x * tiles_k * 32;
    int tile = warp_of_block();
    uint4 words[TILES_AHEAD];
    load_tiles(words, row_of_tiles, tile, warps, tiles_k);
    const Row mine(blockIdx.x * TILE_ROWS + threadIdx.x % TILE_ROWS, rows, w_scales, bias, acc);
    wait_for_earlier();
    const signed char *x_of_token[GROUPS];  // columns of B past the last token repeat it, and are not written
    #pragma unroll
    for (int group = 0; group < GROUPS; group++)
        x_of_token[group] = x_q + (long long)min(8 * group + g, tokens - 1) * x_stride + 16 * t;
    int sums[GROUPS][CHAINS][4] = {};
    while (tile < tiles_k) {
        #pragma unroll
        for (int first = 0; first < TILES_AHEAD; first += BATCH) {
            uint4 x[BATCH][GROUPS][2];
            #pragma unroll
            for (int i = 0; i < BATCH; i++) {
                const int column = min(tile + (first + i) * warps, tiles_k - 1) * TILE_COLUMNS;
                #pragma unroll
                for (int group = 0; group < GROUPS; group++) {
                    x[i][group][0] = *reinterpret_cast<const uint4 *>(x_of_token[group] + column);
                    x[i][group][1] = *reinterpret_cast<const uint4 *>(x_of_token[group] + column + 64);
                }
            }
            if (GROUPS < 4) __syncwarp();  // else ptxas puts each load after the previous mma, and latencies add up
            #pragma unroll
            for (int i = 0; i < BATCH; i++) {
                const uint4 w = words[first + i];  // zeros past the end, where x is that of the last tile
                #pragma unroll
                for (int group = 0; group < GROUPS; group++) {
                    const uint4 low = x[i][group][0], high = x[i][group][1];
                    const unsigned b[4][2] = {{low.x, high.x}, {low.y, high.y}, {low.z, high.z}, {low.w, high.w}};
                    #pragma unroll
                    for (int crumb = 0; crumb < 4; crumb++) {
                        const unsigned a[4] = {times_64(w.x, crumb), times_64(w.y, crumb), times_64(w.z, crumb),
                                               times_64(w.w, crumb)};
                        mma_s8(sums[group][crumb % CHAINS], a, b[crumb]);
                    }
                }
            }
        }
        tile += TILES_AHEAD * warps;
        load_tiles(words, row_of_tiles, tile, warps, tiles_k);
    }
    #pragma unroll
    for (int group = 0; group < GROUPS; group++)
        #pragma unroll
        for (int i = 0; i < 4; i++) {
            int sum = 0;
            #pragma unroll
            for (int chain = 0; chain < CHAINS; chain++) sum += sums[group][chain][i];
            const int token = 8 * group + 2 * t + (i & 1), row = g + 8 * (i >> 1);
            partial[(warp_of_block() * TOKENS + token) * TILE_ROWS + row] = sum;
        }
    __syncthreads();
    if (!mine.exists) return;
    for (int index = threadIdx.x; index < tokens * TILE_ROWS; index += blockDim.x) {  // a thread stays in one row
        const int token = index / TILE_ROWS;
        const long long place = (long long)token * rows + mine.row;
        int sum = 0;
        for (int warp = 0; warp < warps; warp++) sum += partial[warp * TOKENS * TILE_ROWS + index];
        sum >>= 6;
        if (acc == nullptr)
            write_y(y, residual, place_in_stack(token, mine.row, tokens, rows, second, third),
                    scaled(sum, mine.w_scale, x_scales[token], bias != nullptr, mine.bias));
        else
            acc[place] = sum;
    }
}

extern "C" __global__ void __launch_bounds__(512) ternary_gemv_mma_8(PARAMETERS) {
    gemv_mma<1>(ARGUMENTS);
}
extern "C" __global__ void __launch_bounds__(512) ternary_gemv_mma_16(PARAMETERS) {
    gemv_mma<2>(ARGUMENTS);
}
extern "C" __global__ void __launch_bounds__(512) ternary_gemv_mma_32(PARAMETERS) {
    gemv_mma<4>(ARGUMENTS);
}

// -- 3: many tokens ---------------------------------------------------------------------------------------------------
//
// Prompts and large batches: the tensor cores are the limit. A warp has 32 rows by 64 tokens of sums, a block four warps
// along the rows. (Eight, of which four had 64 more tokens, were slower in 9 of 11 shapes of 2B-4T on an H200: 64 us in
// place of 53 for 2,048 tokens and o_proj.) Shared memory has four stages of 128 columns, of the weights
// of the block's rows as they are packed and of the x of its tokens: while one is multiplied, three are on their way.
// Weights are unpacked once for 64 tokens: 56 operations beside 64 mma.
//
// Where rows and tokens give too few blocks for the GPU, several divide K and add their sums to acc, and the last of
// them to finish computes y. Sums are integers, so their order changes nothing.
//
// In shared memory a token's 128 bytes are eight chunks of 16; odd tokens have their halves exchanged. So the eight
// lanes that read at a time (g = 0 and 1, t = 0 to 3, chunk t or t + 4) use all 32 banks once.
//
// The results go through shared memory, where a thread takes the sums of one row: neighbouring lanes then write
// neighbouring rows, and the code of a result stands here once. Unrolled for the 64 sums of a lane it was 250 KB of
// instructions, beyond every cache of them, with a load to wait for in each: 25 to 40 us of every launch (H200).
static constexpr int STAGES = 4, WARP_ROW_TILES = 2, ROW_WARPS = 4, WARP_GROUPS = 8;
static constexpr int BLOCK_ROW_TILES = ROW_WARPS * WARP_ROW_TILES, BLOCK_ROWS = BLOCK_ROW_TILES * TILE_ROWS;
static constexpr int WEIGHT_BYTES = BLOCK_ROW_TILES * TILE_WORDS * 4;  // of a stage
static constexpr int SUMS_PITCH = BLOCK_ROWS + 4;  // of a token's sums: those that a warp writes at a time meet all banks
static constexpr int AT_ONCE = 8;  // results of a thread, whose loads are in flight together

__device__ __forceinline__ int chunk_place(int token, int chunk) {
    return token * TILE_COLUMNS + 16 * (chunk ^ (token & 1) << 2);
}

extern "C" __global__ void __launch_bounds__(32 * ROW_WARPS, 3) ternary_gemm(PARAMETERS) {
    constexpr int TOKENS = 8 * WARP_GROUPS, STAGE_BYTES = WEIGHT_BYTES + TOKENS * TILE_COLUMNS, THREADS = 32 * ROW_WARPS;
    wait_for_end_of_earlier();
    signed char *stages = dynamic_shared<signed char>();
    const int tiles_k = (columns + TILE_COLUMNS - 1) / TILE_COLUMNS, tiles_n = (rows + TILE_ROWS - 1) / TILE_ROWS;
    const int begin = blockIdx.z * share, end = min(begin + share, tiles_k);
    const int g = lane_of_warp() / 4, t = lane_of_warp() % 4, first_token = blockIdx.y * TOKENS;
    const int warp_row_tile = warp_of_block() * WARP_ROW_TILES;

    // The next 128 columns into a stage. Tiles past the last row are those of the last, whose rows are not written;
    // tokens past the last are zeros. A thread copies 16 bytes of every fourth tile, and of every 16th token.
    constexpr int TOKENS_EACH = THREADS / 8;
    const int my_row_tile = blockIdx.x * BLOCK_ROW_TILES + warp_of_block(), my_token = threadIdx.x / 8;
    const char *my_tile = reinterpret_cast<const char *>(tiles) +
                          ((size_t)min(my_row_tile, tiles_n - 1) * tiles_k + begin) * 512 + 16 * lane_of_warp();
    const int next_tile = (min(my_row_tile + ROW_WARPS, tiles_n - 1) - min(my_row_tile, tiles_n - 1)) * tiles_k * 512;
    const int tokens_left = tokens - first_token - my_token;
    const signed char *my_x = x_q + (size_t)(first_token + my_token) * x_stride + begin * 128 + 16 * (threadIdx.x % 8);
    const int x_place = chunk_place(my_token, threadIdx.x % 8);  // TOKENS_EACH is even
    auto fetch = [&](signed char *stage) {
        copy_async_16(stage + 16 * threadIdx.x, my_tile, true);
        copy_async_16(stage + 16 * (threadIdx.x + THREADS), my_tile + next_tile, true);
        my_tile += 512;
        #pragma unroll
        for (int i = 0; i < TOKENS / TOKENS_EACH; i++) {
            const bool valid = i * TOKENS_EACH < tokens_left;
            copy_async_16(stage + WEIGHT_BYTES + x_place + i * TOKENS_EACH * TILE_COLUMNS,
                          valid ? my_x + (size_t)i * TOKENS_EACH * x_stride : x_q, valid);
        }
        my_x += TILE_COLUMNS;
    };
    #pragma unroll 1
    for (int ahead = 0; ahead < STAGES - 1; ahead++) {
        if (begin + ahead < end) fetch(stages + ahead * STAGE_BYTES);
        copies_commit();
    }
    int sums[WARP_ROW_TILES][WARP_GROUPS][4] = {};
    uint4 words[WARP_ROW_TILES] = {};  // a step ahead: read when they are needed, ptxas would spill 400 bytes
    auto read_words = [&](const signed char *stage) {
        #pragma unroll
        for (int i = 0; i < WARP_ROW_TILES; i++)
            words[i] = reinterpret_cast<const uint4 *>(stage)[(warp_row_tile + i) * 32 + lane_of_warp()];
    };
    copies_wait<STAGES - 2>();
    __syncthreads();
    read_words(stages);
    #pragma unroll 1
    for (int k = begin; k < end; k++) {
        copies_wait<STAGES - 3>();
        __syncthreads();  // all copies for k and k + 1 have arrived, and the stage of k - 1 is free
        if (k + STAGES - 1 < end) fetch(stages + (k + STAGES - 1 - begin) % STAGES * STAGE_BYTES);
        copies_commit();

        const signed char *stage = stages + (k - begin) % STAGES * STAGE_BYTES;
        unsigned a[WARP_ROW_TILES][4][4];  // [][crumb][register]
        #pragma unroll
        for (int i = 0; i < WARP_ROW_TILES; i++)
            #pragma unroll
            for (int crumb = 0; crumb < 4; crumb++) {
                a[i][crumb][0] = times_64(words[i].x, crumb), a[i][crumb][1] = times_64(words[i].y, crumb);
                a[i][crumb][2] = times_64(words[i].z, crumb), a[i][crumb][3] = times_64(words[i].w, crumb);
            }
        if (k + 1 < end) read_words(stages + (k + 1 - begin) % STAGES * STAGE_BYTES);
        const signed char *x = stage + WEIGHT_BYTES;
        #pragma unroll
        for (int group = 0; group < WARP_GROUPS; group++) {
            const int token = 8 * group + g;
            const uint4 low = *reinterpret_cast<const uint4 *>(x + chunk_place(token, t));
            const uint4 high = *reinterpret_cast<const uint4 *>(x + chunk_place(token, t + 4));
            const unsigned b[4][2] = {{low.x, high.x}, {low.y, high.y}, {low.z, high.z}, {low.w, high.w}};
            #pragma unroll
            for (int crumb = 0; crumb < 4; crumb++)
                #pragma unroll
                for (int i = 0; i < WARP_ROW_TILES; i++) mma_s8(sums[i][group], a[i][crumb], b[crumb]);
        }
    }
    __syncthreads();  // the stages have been read
    int *staged = dynamic_shared<int>();  // [token][row]
    #pragma unroll
    for (int i = 0; i < WARP_ROW_TILES; i++)
        #pragma unroll
        for (int group = 0; group < WARP_GROUPS; group++)
            #pragma unroll
            for (int j = 0; j < 4; j++) {
                const int token = 8 * group + 2 * t + j % 2;
                const int row_of_block = (warp_row_tile + i) * TILE_ROWS + g + j / 2 * 8;
                staged[token * SUMS_PITCH + row_of_block] = sums[i][group][j] >> 6;
            }
    __syncthreads();

    // From here on a thread has one row.
    static_assert(THREADS == BLOCK_ROWS, "a thread for each row");
    const int row = blockIdx.x * BLOCK_ROWS + threadIdx.x;
    const int count = row < rows ? min(TOKENS, tokens - first_token) : 0;
    int *to_acc = acc + (long long)first_token * rows + row;
    auto write_all = [&](auto sum_of) {
        if (count == 0) return;
        const float w_scale = w_scales[row], b = bias != nullptr ? bias[row] : 0.0f;
        const long long at = place_in_stack(first_token, row, tokens, rows, second, third);
        const long long pitch = place_in_stack(first_token + 1, row, tokens, rows, second, third) - at;
        #pragma unroll 1
        for (int token_0 = 0; token_0 < count; token_0 += AT_ONCE) {
            int sum[AT_ONCE];
            float x_scale[AT_ONCE], before[AT_ONCE];
            #pragma unroll
            for (int i = 0; i < AT_ONCE; i++) {
                const int token = min(token_0 + i, count - 1);
                sum[i] = sum_of(token);
                x_scale[i] = x_scales[first_token + token];
                before[i] = residual != nullptr ? residual[at + token * pitch] : 0.0f;
            }
            #pragma unroll
            for (int i = 0; i < AT_ONCE; i++) {
                const int token = token_0 + i;
                const float value = scaled(sum[i], w_scale, x_scale[i], bias != nullptr, b);
                if (token < count) y[at + token * pitch] = residual != nullptr ? __fadd_rn(before[i], value) : value;
            }
        }
    };
    auto staged_sum = [&](int token) { return staged[token * SUMS_PITCH + threadIdx.x]; };
    if (gridDim.z == 1 && acc == nullptr) return write_all(staged_sum);
    for (int token = 0; token < count; token++)
        if (gridDim.z == 1)
            to_acc[(long long)token * rows] = staged_sum(token);
        else
            atomicAdd(to_acc + (long long)token * rows, staged_sum(token));
    if (gridDim.z == 1 || y == nullptr) return;
    __threadfence();  // the sums of this block are visible before it is counted
    __syncthreads();
    int *blocks_done = done + blockIdx.y * gridDim.x + blockIdx.x;
    const bool last = __syncthreads_or(threadIdx.x == 0 && atomicAdd(blocks_done, 1) == (int)gridDim.z - 1);
    if (!last) return;
    __threadfence();
    write_all([&](int token) { return __ldcg(to_acc + (long long)token * rows); });
    for (int token = 0; token < count; token++) to_acc[(long long)token * rows] = 0;
    if (threadIdx.x == 0) *blocks_done = 0;
}
