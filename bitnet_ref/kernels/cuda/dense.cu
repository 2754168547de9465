// y = x W^T for a matrix that is not quantised: the head of every model, and every linear of a dense one.
//
// Plain version (NumPy: layers.dense_matmul):
//
//     y[t][r] = sum over k of x[t][k] * w[r][k]          x, y and the sum float32; w of 32 or 16 bits, widened
//
// cuBLAS may sum in another order for another number of tokens, and a token's logits would then depend on the rest of
// the batch. Here the order of a sum is fixed for any number of tokens:
//
//     w of 16 bits   chunks of 64 columns, each summed by tensor cores; their sums are added one after the other
//     w of 32 bits   lane l of a warp adds up the elements 8 l, ..., 8 l + 7 of every 256, then the lanes are added
//
// Only the assignment of work to warps, and how often a weight is read, differ with the number of tokens.
#include "early.cuh"
#include "floats.cuh"
#include "mma.cuh"
#include "stacked.cuh"

constexpr int WIDE = 8;  // elements that a lane takes at a time: 16 bytes of 16 bits

// A row of a matrix of `rows`. Past the last row it is the last one, and the result is not written.
template <class T> __device__ __forceinline__ const T* row_of(const T* matrix, int row, int width, int rows) {
    return matrix + (size_t)min(row, rows - 1) * width;
}

// Elements k, ..., k + 7 of a row; zeros beyond its end. Rows of a multiple of 8 elements are aligned to 16 bytes.
__device__ __forceinline__ void load(const float* row, int k, int width, float (&out)[WIDE]) {
    if (width % WIDE == 0) {
        float4 low = make_float4(0, 0, 0, 0), high = low;
        if (k < width) {
            low = *reinterpret_cast<const float4*>(row + k);
            high = *reinterpret_cast<const float4*>(row + k + 4);
        }
        out[0] = low.x, out[1] = low.y, out[2] = low.z, out[3] = low.w;
        out[4] = high.x, out[5] = high.y, out[6] = high.z, out[7] = high.w;
        return;
    }
#pragma unroll
    for (int e = 0; e < WIDE; e++) out[e] = k + e < width ? row[k + e] : 0.0f;
}

// The same for 16 bits, two per word. They are read once and bypass the first-level cache, where x is.
template <class T> __device__ __forceinline__ uint4 load(const T* row, int k, int width) {
    if (width % WIDE == 0)
        return k < width ? __ldcg(reinterpret_cast<const uint4*>(row + k)) : make_uint4(0, 0, 0, 0);
    unsigned words[WIDE / 2] = {};
#pragma unroll
    for (int e = 0; e < WIDE; e++)
        if (k + e < width) words[e / 2] |= unsigned(row[k + e].bits) << 16 * (e % 2);
    return make_uint4(words[0], words[1], words[2], words[3]);
}

// The same into shared memory, by `copies_wait`.
template <class T> __device__ __forceinline__ void copy_words(uint4* to, const T* row, int k, int width) {
    if (width % WIDE == 0)
        copy_async_16(to, row + (k < width ? k : 0), k < width);
    else
        *to = load(row, k, width);
}

// -- 16 bits: what is added, and in which order -----------------------------------------------------------------------
//
// A warp multiplies 16 rows of W by 8 tokens at a time (mma.cuh), bfloat16 with float32 sums.
//
// Exact products. x, float32, is the sum of three bfloat16: its upper 16 bits, those of the remainder, and those of the
// second remainder (8 bits of 24 each; cut, not rounded, so that no finite x becomes infinite; an Inf leaves Inf - Inf,
// which is noticed). So each product is three. A float16 weight is the sum of two bfloat16 (8 bits of 11, and 3), and
// its product is six. (tf32 holds float16 whole, but also needs three parts of x, at half the columns per mma: as
// many.) Only bits below float32's normal numbers may be lost, in parts of an x below 2^-110.
//
// Sums. A tensor core cuts off the bits below the last bit of the largest term, unlike a float32 addition, so a long
// chain would lean towards zero. Here a chain is one chunk, 64 columns from zero, the smallest parts first: only its
// last four steps (of bfloat16) add to a sum of full size; in the other order errors are ten times as large, as
// emulated. The chunks' sums are added as usual, each rounded once. We assume that a sum does not depend on the place
// of its row and token in the tile: no document says so.
//
// Columns. An mma's 16 columns may be any, in any order, as long as A and B agree, and all kernels do. Lane 4g + t
// reads 8 weights of row g side by side, of columns 32 j + 8t, ...; two of their four words are what an mma wants of
// columns 2t, 2t + 1, 2t + 8, 2t + 9, the others what the next one does: two steps from one load of 16 bytes, and of x
// likewise, whose parts lie in the order of x.
constexpr int TILE_ROWS = 16, TILE_TOKENS = 8, CHUNK = 64, LOADS = CHUNK / 32, STEPS = CHUNK / 16, X_PARTS = 3;
template <class T> constexpr int W_PARTS = 1;
template <> constexpr int W_PARTS<f16> = 2;

// Two floats as the sums of PARTS bfloat16 each: pairs, the smallest first.
template <int PARTS> __device__ __forceinline__ void split(float low, float high, unsigned (&pairs)[PARTS]) {
#pragma unroll
    for (int part = PARTS - 1; part >= 0; part--) {
        const unsigned l = __float_as_uint(low), h = __float_as_uint(high);
        pairs[part] = __byte_perm(l, h, 0x7632);  // the upper halves
        low -= __uint_as_float(l & 0xffff0000u);
        high -= __uint_as_float(h & 0xffff0000u);
    }
}

// Eight floats of x as parts of eight bfloat16 each.
__device__ __forceinline__ void split(const float (&x)[WIDE], uint4 (&parts)[X_PARTS]) {
    unsigned words[WIDE / 2][X_PARTS];
#pragma unroll
    for (int i = 0; i < WIDE / 2; i++) split(x[2 * i], x[2 * i + 1], words[i]);
#pragma unroll
    for (int part = 0; part < X_PARTS; part++)
        parts[part] = make_uint4(words[0][part], words[1][part], words[2][part], words[3][part]);
}

// A lane's weights of a chunk and 16 rows, as they lie in memory: rows g and g + 8.
struct Words {
    uint4 of[2][LOADS];
};
template <class T>
__device__ __forceinline__ Words load_words(const T* w, int row, int chunk, int width, int out) {
    const int g = lane_of_warp() / 4, t = lane_of_warp() % 4;
    Words words;
#pragma unroll
    for (int half = 0; half < 2; half++)
#pragma unroll
        for (int j = 0; j < LOADS; j++)
            words.of[half][j] =
                load(row_of(w, row + g + 8 * half, width, out), chunk * CHUNK + 32 * j + WIDE * t, width);
    return words;
}

// A bfloat16 is its own part. The word is xored with a zero that ptxas cannot see (blocks are one-dimensional): without
// it ptxas moves four words together before every mma, which doubles the instructions of the loop.
__device__ __forceinline__ void parts_of(unsigned word, const bf16*, unsigned (&parts)[1]) {
    parts[0] = word ^ (blockDim.y - 1);
}
__device__ __forceinline__ void parts_of(unsigned word, const f16*, unsigned (&parts)[2]) {
    split(half_to_float((unsigned short)word), half_to_float((unsigned short)(word >> 16)), parts);
}

// The same of R times 16 rows as A of each step, in parts.
template <int PARTS, int R> struct Fragments {
    unsigned of[PARTS][R][STEPS][4];

    template <class T> __device__ __forceinline__ void set(int r, const Words& words, const T* type) {
#pragma unroll
        for (int half = 0; half < 2; half++)
#pragma unroll
            for (int j = 0; j < LOADS; j++) {
                const uint4 four = words.of[half][j];
                const unsigned word[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
                for (int i = 0; i < 4; i++) {  // words 0 and 1 are of one step, 2 and 3 of the next
                    unsigned parts[PARTS];
                    parts_of(word[i], type, parts);
#pragma unroll
                    for (int part = 0; part < PARTS; part++)
                        of[part][r][2 * j + i / 2][half + 2 * (i % 2)] = parts[part];
                }
            }
    }
};

// Adds the products with one part of x of C times 8 tokens.
template <int PARTS, int R, int C>
__device__ __forceinline__ void multiply(float (&sums)[R][C][4], const Fragments<PARTS, R>& a,
                                         const uint4 (&x)[C][LOADS]) {
    unsigned b[C][STEPS][2];
#pragma unroll
    for (int c = 0; c < C; c++)
#pragma unroll
        for (int j = 0; j < LOADS; j++) {
            b[c][2 * j][0] = x[c][j].x, b[c][2 * j][1] = x[c][j].y;
            b[c][2 * j + 1][0] = x[c][j].z, b[c][2 * j + 1][1] = x[c][j].w;
        }
#pragma unroll
    for (int part = 0; part < PARTS; part++) mma_bf16(sums, a.of[part], b);
}

__device__ __forceinline__ int chunks_of(int width) { return (width + CHUNK - 1) / CHUNK; }

#define PARAMETERS(T) const float *x, int n, int width, const T *w, int out, int second, int third, float *y
#define ARGUMENTS x, n, width, w, out, second, third, y
// x (n, width), w (out, width) -> y (n, out), of a stack as stacked.cuh says. A block takes some rows and some tokens;
// blocks of the same rows are neighbours in the grid, run together, and find their weights in the second-level cache.

// -- 16 bits, few tokens: the limit is memory -------------------------------------------------------------------------
//
// 2B-4T's head is 656 MB, and bounds decoding as much as all its ternary matrices. A block takes 16 rows, and its warps
// take chunks in turn. Each warp loads the next chunk's weights while it multiplies: 2 KB per warp, with some 24 warps
// per multiprocessor, where 23 KB keep the memory busy (ternary.cu). Each warp splits the x of its chunk in registers,
// since no other warp of the block needs it. The chunks' sums go to shared memory, where they are added in order; those
// of a long row in several rounds.
//
// The x of a chunk costs more instructions than its weights. Of a matrix with rows enough for every multiprocessor a
// block so takes R = 2 times 16 rows (`dense_tall_8`).
constexpr int SUMS_KEPT = 8192;  // of chunks, for 16 rows, in shared memory: 32 KB

template <class T, int TILES, int R> __device__ inline void few(PARAMETERS(T)) {
    constexpr int TOKENS = TILES * TILE_TOKENS, ROWS = R * TILE_ROWS, SUMS = ROWS * TOKENS, ROUND = R * SUMS_KEPT / SUMS;
    constexpr int MIN_THREADS = 128, OWN = SUMS / MIN_THREADS;
    float* kept = dynamic_shared<float>();  // [chunk of the round][row][token]
    const int groups = (n + TOKENS - 1) / TOKENS, row = blockIdx.x / groups * ROWS;
    const int first_token = blockIdx.x % groups * TOKENS, warps = blockDim.x / 32, chunks = chunks_of(width);
    const int g = lane_of_warp() / 4, t = lane_of_warp() % 4;
    int chunk = warp_of_block();
    Words words[R];
    auto load_next = [&](int number) {
#pragma unroll
        for (int r = 0; r < R; r++) words[r] = load_words(w, row + r * TILE_ROWS, number, width, out);
    };
    load_next(chunk);
    wait_for_earlier();
    float sum[OWN] = {};  // of thread i: the sums i, i + its block's threads, ...
    for (int first = 0; first < chunks; first += ROUND) {
        const int end = min(first + ROUND, chunks);
        for (; chunk < end; chunk += warps) {
            Fragments<W_PARTS<T>, R> a;
#pragma unroll
            for (int r = 0; r < R; r++) a.set(r, words[r], w);
            load_next(chunk + warps);
#pragma unroll
            for (int tile = 0; tile < TILES; tile++) {
                const float* from = row_of(x, first_token + tile * TILE_TOKENS + g, width, n);
                uint4 parts[LOADS][X_PARTS];
#pragma unroll
                for (int j = 0; j < LOADS; j++) {
                    float some[WIDE];
                    load(from, chunk * CHUNK + 32 * j + WIDE * t, width, some);
                    split(some, parts[j]);
                }
                float sums[R][1][4] = {};
#pragma unroll
                for (int part = 0; part < X_PARTS; part++) {
                    const uint4 b[1][LOADS] = {{parts[0][part], parts[1][part]}};
                    multiply(sums, a, b);
                }
#pragma unroll
                for (int r = 0; r < R; r++) {
                    float* place = kept + (chunk - first) * SUMS + (r * TILE_ROWS + g) * TOKENS + tile * TILE_TOKENS + 2 * t;
                    place[0] = sums[r][0][0], place[1] = sums[r][0][1];
                    place[8 * TOKENS] = sums[r][0][2], place[8 * TOKENS + 1] = sums[r][0][3];
                }
            }
        }
        __syncthreads();
#pragma unroll
        for (int i = 0; i < OWN; i++) {
            const int place = threadIdx.x + i * blockDim.x;
            if (place < SUMS)
                for (int c = 0; c < end - first; c++) sum[i] += kept[c * SUMS + place];
        }
        if (end < chunks) __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < OWN; i++) {
        const int place = threadIdx.x + i * blockDim.x, r = row + place / TOKENS, token = first_token + place % TOKENS;
        if (place < SUMS && r < out && token < n) y[place_in_stack(token, r, n, out, second, third)] = sum[i];
    }
}

// -- 16 bits, many tokens: the limit is the tensor cores --------------------------------------------------------------
//
// A warp has 32 rows (16 of float16, whose parts take twice the registers) by 32 or 64 tokens of sums; a block has four
// warps. A chunk of the block's x lies in shared memory in parts, split once for all rows: while one chunk is
// multiplied, the next is read and split. Each lane's next weights are copied to a place in shared memory that only
// this lane reads: in registers they would leave no room for three blocks per multiprocessor.
//
// In shared memory a token's 64 columns of a part are eight pieces of 16 bytes; odd tokens have the halves exchanged.
// So the eight lanes that read at a time (g = 0 and 1, t = 0 to 3, piece t or t + 4) use all 32 banks once.
constexpr int ROW_WARPS = 4, THREADS = 32 * ROW_WARPS, PIECES = CHUNK / WIDE;

__device__ __forceinline__ int piece_place(int token, int piece) { return token * PIECES + (piece ^ (token & 1) << 2); }

template <class T, int TILES> __device__ inline void many(PARAMETERS(T)) {
    wait_for_earlier();
    constexpr int R = 2 / W_PARTS<T>, C = 2, TOKENS = TILES * TILE_TOKENS, PART = TOKENS * PIECES;
    uint4* stages = dynamic_shared<uint4>();  // [even and odd chunks][part of x][token][piece]
    uint4* words = stages + 2 * X_PARTS * PART + threadIdx.x;  // [row][load][thread]
    const int groups = (n + TOKENS - 1) / TOKENS, first_token = blockIdx.x % groups * TOKENS, chunks = chunks_of(width);
    const int row = (blockIdx.x / groups * ROW_WARPS + warp_of_block()) * R * TILE_ROWS;
    const int g = lane_of_warp() / 4, t = lane_of_warp() % 4;

    auto ask_for_words = [&](int chunk) {
#pragma unroll
        for (int i = 0; i < 2 * R; i++)
#pragma unroll
            for (int j = 0; j < LOADS; j++)
                copy_words(words + (i * LOADS + j) * THREADS, row_of(w, row + g + 8 * i, width, out),
                           chunk * CHUNK + 32 * j + WIDE * t, width);
        copies_commit();
    };
    // A thread splits TILES / 2 pieces of a chunk, of tokens 16 apart.
    const int token_of_thread = threadIdx.x / PIECES, piece = threadIdx.x % PIECES;
    auto load_piece = [&](int number, int chunk, float(&some)[WIDE]) {
        const float* from = row_of(x, first_token + token_of_thread + 16 * number, width, n);
        load(from, chunk * CHUNK + WIDE * piece, width, some);
    };
    auto store_piece = [&](int number, int chunk, const float(&some)[WIDE]) {
        uint4 parts[X_PARTS];
        split(some, parts);
#pragma unroll
        for (int part = 0; part < X_PARTS; part++)
            stages[(chunk % 2 * X_PARTS + part) * PART + piece_place(token_of_thread + 16 * number, piece)] =
                parts[part];
    };

    ask_for_words(0);
#pragma unroll
    for (int number = 0; number < TILES / C; number++) {
        float some[WIDE];
        load_piece(number, 0, some);
        store_piece(number, 0, some);
    }
    float sum[R][TILES][4] = {};
    for (int chunk = 0; chunk < chunks; chunk++) {
        copies_wait<0>();
        Fragments<W_PARTS<T>, R> a;
#pragma unroll
        for (int r = 0; r < R; r++) {
            Words of_tile;
#pragma unroll
            for (int i = 0; i < 2 * LOADS; i++)
                of_tile.of[i / LOADS][i % LOADS] = words[(r * 2 * LOADS + i) * THREADS];
            a.set(r, of_tile, w);
        }
        __syncthreads();  // this chunk's x is complete, and the other stage is free
        if (chunk + 1 < chunks) ask_for_words(chunk + 1);
#pragma unroll
        for (int pair = 0; pair < TILES / C; pair++) {
            float some[WIDE];
            load_piece(pair, chunk + 1, some);
            float sums[R][C][4] = {};
#pragma unroll
            for (int part = 0; part < X_PARTS; part++) {
                const uint4* of_part = stages + (chunk % 2 * X_PARTS + part) * PART;
                uint4 b[C][LOADS];
#pragma unroll
                for (int c = 0; c < C; c++)
#pragma unroll
                    for (int j = 0; j < LOADS; j++)
                        b[c][j] = of_part[piece_place((pair * C + c) * TILE_TOKENS + g, t + 4 * j)];
                multiply(sums, a, b);
            }
#pragma unroll
            for (int r = 0; r < R; r++)
#pragma unroll
                for (int c = 0; c < C; c++)
#pragma unroll
                    for (int i = 0; i < 4; i++) sum[r][pair * C + c][i] += sums[r][c][i];
            store_piece(pair, chunk + 1, some);
        }
    }
#pragma unroll
    for (int r = 0; r < R; r++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int of_row = row + r * TILE_ROWS + g + 8 * (i / 2);
            if (of_row >= out) continue;
#pragma unroll
            for (int tile = 0; tile < TILES; tile++) {
                const int token = first_token + tile * TILE_TOKENS + 2 * t + i % 2;
                if (token < n) y[place_in_stack(token, of_row, n, out, second, third)] = sum[r][tile][i];
            }
        }
}

#define FEW(T, NAME) extern "C" __global__ void __launch_bounds__(256) dense_##NAME(PARAMETERS(T))
#define MANY(T, NAME) extern "C" __global__ void __launch_bounds__(THREADS, 3) dense_many_##NAME(PARAMETERS(T))
#define OF_16_BITS(T, NAME)                                                                                            \
    FEW(T, few_8_##NAME) { few<T, 1, 1>(ARGUMENTS); }                                                                  \
    FEW(T, tall_8_##NAME) { few<T, 1, 2>(ARGUMENTS); }                                                                 \
    FEW(T, few_32_##NAME) { few<T, 4, 1>(ARGUMENTS); }                                                                 \
    MANY(T, 32_##NAME) { many<T, 4>(ARGUMENTS); }                                                                      \
    MANY(T, 64_##NAME) { many<T, 8>(ARGUMENTS); }
OF_16_BITS(bf16, bfloat16)
OF_16_BITS(f16, float16)

// -- 32 bits: no tensor core multiplies them whole --------------------------------------------------------------------
//
// A warp takes LANE_ROWS rows of W, which share each load of x, and up to TOKENS tokens, which share each load of W.
// That decides only how many sums a lane holds, and how often a row is read again.
constexpr int LANE_ROWS = 4;

template <int TOKENS> __device__ inline void by_lanes(PARAMETERS(float)) {
    wait_for_earlier();
    const int lane = lane_of_warp(), row = (blockIdx.x * (blockDim.x / 32) + warp_of_block()) * LANE_ROWS;
    if (row >= out) return;  // the whole warp does
    for (int token = blockIdx.y * TOKENS; token < n; token += gridDim.y * TOKENS) {
        float sum[LANE_ROWS * TOKENS] = {};
        for (int base = 0; base < width; base += 32 * WIDE) {
            const int k = base + lane * WIDE;
            float a[LANE_ROWS][WIDE];
#pragma unroll
            for (int r = 0; r < LANE_ROWS; r++) load(row_of(w, row + r, width, out), k, width, a[r]);
#pragma unroll
            for (int t = 0; t < TOKENS; t++) {
                float b[WIDE];
                load(row_of(x, token + t, width, n), k, width, b);
#pragma unroll
                for (int r = 0; r < LANE_ROWS; r++)
#pragma unroll
                    for (int e = 0; e < WIDE; e++) sum[r * TOKENS + t] += a[r][e] * b[e];
            }
        }
#pragma unroll
        for (int i = 0; i < LANE_ROWS * TOKENS; i++) {
            const float total = warp_sum(sum[i]);
            const int r = row + i / TOKENS, t = token + i % TOKENS;
            if (lane == i && t < n && r < out) y[place_in_stack(t, r, n, out, second, third)] = total;
        }
    }
}

extern "C" __global__ void dense_1_float32(PARAMETERS(float)) { by_lanes<1>(ARGUMENTS); }
extern "C" __global__ void dense_8_float32(PARAMETERS(float)) { by_lanes<8>(ARGUMENTS); }
