// Everything done to a token's row between two matrix products, in one kernel; row.cuh says what that is.
//
// As one kernel per operation a decoding step of 30 layers would have some 300 launches, a few microseconds each for
// 10 KB. Fused, a row is read once and kept in registers, and only the int8 input of the next product is written. The
// ops by themselves are this kernel with steps left out, so fused and separate results cannot differ.
#include "early.cuh"
#include "row.cuh"

// LONG false: registers hold the row, width <= 2048 VECTORS. LONG true: the row waits in `stash`, (n, width) in global
// memory, where a thread reads only what it wrote; it is taken in pieces that registers hold, in the same order.
template <int VECTORS, bool LONG>
__device__ __forceinline__ void row(int gate, const float* a, const float* b, const RowNorm& by, RowScratch& scratch,
                                    float* y, signed char* x_q, float* x_quant_scale, int stride, float* stash,
                                    int* trouble) {
    constexpr int PIECE = VECTORS * ROW_STEP;
    const int token = blockIdx.x, width = by.width;
    const size_t at = (size_t)token * width;
    float x[VECTORS][4], other[VECTORS][4], largest = 0;  // other: b, then the norm's weight
    Squares squares;
    int first = 0;
    do {
        const int left = width - first;
        load(x, a + at + first, left);
        if (gate != PLAIN) {
            load(other, b + at + first, left);
            each_four<VECTORS>(left, [&](int v, int) {
#pragma unroll
                for (int e = 0; e < 4; e++) x[v][e] = gated(gate, x[v][e], other[v][e]);
            });
        }
        if (LONG) store(stash + at + first, x, left);
        if (by.weight) {
            squares.add(x, left);
        } else {
            if (y) store(y + at + first, x, left);
            largest = larger(largest, largest_of(x, left));
        }
    } while (LONG && (first += PIECE) < width);
    if (by.weight) {
        if (!LONG) load(other, by.weight, width);  // on its way while the block adds its squares
        const Rms rms = rms_of(squares, by, scratch, y != nullptr, true, token, trouble);
        first = 0;
        do {
            const int left = width - first;
            if (LONG) load(x, stash + at + first, left), load(other, by.weight + first, left);
            auto four = [&](int v, int) { return make_float4(other[v][0], other[v][1], other[v][2], other[v][3]); };
            norm(x, four, rms, left);
            if (y) store(y + at + first, x, left);
            if (LONG) store(stash + at + first, x, left);
            largest = larger(largest, largest_of(x, left));
        } while (LONG && (first += PIECE) < width);
    }
    if (!x_q) return;
    const float scale = scale_of(largest, scratch, true, token, trouble);
    if (threadIdx.x == 0) x_quant_scale[token] = scale;
    x_q += (size_t)token * stride;
    const bool whole = stride % 4 == 0;
    first = 0;
    do {
        if (LONG) load(x, stash + at + first, width - first);
        each_four<VECTORS>(stride - first, [&](int v, int i) {
            const unsigned four = first + i < width ? as_int8(x[v], scale) : 0;
            if (whole) {
                *reinterpret_cast<unsigned*>(x_q + first + i) = four;
                return;
            }
#pragma unroll
            for (int e = 0; e < 4; e++)
                if (first + i + e < stride) x_q[first + i + e] = (signed char)(four >> 8 * e);
        });
    } while (LONG && (first += PIECE) < stride);
}

// One block per row of `width`; part = 1 / width. weight null: no norm. y (n, width): the row after the gate and the
// norm, or null. x_q: rows of `stride` bytes, zeros past `width`, or null.
#define ROWS(NAME, VECTORS, LONG, BLOCKS)                                                                              \
    extern "C" __global__ void __launch_bounds__(ROW_THREADS, BLOCKS)                                                  \
        NAME(int gate, const float* a, const float* b, int width, double part, const float* weight, double eps,        \
             float* y, signed char* x_q, float* x_quant_scale, int stride, float* stash, int* trouble) {               \
        __shared__ RowScratch scratch;                                                                                 \
        wait_for_earlier();                                                                                            \
        const RowNorm by = {weight, width, eps, part};                                                                 \
        row<VECTORS, LONG>(gate, a, b, by, scratch, y, x_q, x_quant_scale, stride, stash, trouble);                    \
    }
ROWS(rows_2, 2, false, 2)
ROWS(rows_4, 4, false, 2)
ROWS(rows_8, 8, false, 1)
ROWS(rows_long, 4, true, 1)

// z = x + y, `count` elements; y has as many, or `y_count` that repeat: a bias. One thread per element.
extern "C" __global__ void add(const float* x, const float* y, size_t count, size_t y_count, float* z) {
    wait_for_earlier();
    const size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) z[i] = x[i] + y[i % y_count];
}

// x (n, width) rounded to 16 bits; a value that they cannot hold is an error. One thread per element.
template <class T>
__device__ inline void rounded(const float* x, size_t n, int width, T* y, int* trouble) {
    wait_for_earlier();
    const size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n * width) return;
    assign(y[i], x[i]);
    if (!is_finite(as_float(y[i]))) complain(trouble, ROUNDED, (int)(i / width));
}
extern "C" __global__ void round_float16(const float* x, size_t n, int width, f16* y, int* trouble) {
    rounded(x, n, width, y, trouble);
}
extern "C" __global__ void round_bfloat16(const float* x, size_t n, int width, bf16* y, int* trouble) {
    rounded(x, n, width, y, trouble);
}

// y = acc * (w_dequant_scale / x_quant_scale), (n, width): a quotient and a product, each rounded once.
extern "C" __global__ void dequantize(const int* acc, float w_dequant_scale, const float* x_quant_scale, size_t n,
                                      int width, float* y) {
    wait_for_earlier();
    const size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n * width) y[i] = (float)acc[i] * (w_dequant_scale / x_quant_scale[i / width]);
}

// y[i] = table[ids[i]], widened to float: the embedding, the RoPE tables, the tokens whose logits are needed. One block
// per row. An id that is no row of the table is an error, and gives row 0.
template <class T>
__device__ inline void take(const T* table, long long rows, const long long* ids, int width, float* y, int* trouble) {
    wait_for_earlier();
    const long long id = ids[blockIdx.x];
    const bool exists = 0 <= id && id < rows;
    if (!exists && threadIdx.x == 0) complain(trouble, TAKE_ROWS, blockIdx.x);
    const T* from = table + (exists ? id : 0) * width;
    for (int i = threadIdx.x; i < width; i += blockDim.x) y[(size_t)blockIdx.x * width + i] = as_float(from[i]);
}
// The same rows of two tables, cos and sin, in one launch. Grid (n, 2).
extern "C" __global__ void take_rows_of_two(const float* first, const float* second, long long rows,
                                            const long long* ids, int width, float* y_first, float* y_second,
                                            int* trouble) {
    take(blockIdx.y == 0 ? first : second, rows, ids, width, blockIdx.y == 0 ? y_first : y_second, trouble);
}
#define TAKE_ROWS_OF(T, NAME)                                                                                          \
    extern "C" __global__ void take_rows_##NAME(const T* table, long long rows, const long long* ids, int width,       \
                                                float* y, int* trouble) {                                              \
        take(table, rows, ids, width, y, trouble);                                                                     \
    }
TAKE_ROWS_OF(float, float32)
TAKE_ROWS_OF(f16, float16)
TAKE_ROWS_OF(bf16, bfloat16)
