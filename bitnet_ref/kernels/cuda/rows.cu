// Everything that is done to a token's row between two matrix products, in one kernel: row.cuh says what that is.
//
// Each step by itself is a kernel that reads a row and writes a row; a decoding step of 30 layers would have some 300
// of them, each a few microseconds for 10 KB. Fused, a row is read once, kept in shared memory, and what is written is
// the int8 that the next matrix product reads. The primitives are this kernel with steps left out: they cannot
// disagree.
#include "row.cuh"

// A row that registers hold: LONG false, width <= 2048 VECTORS; the norm's weight waits in shared memory. A longer row
// waits in `stash`, (n, width) in global memory, of which a thread reads what it has written itself; it is taken in
// pieces that registers hold, in the same order.
template <int VECTORS, bool LONG>
__device__ __forceinline__ void row(Recipe of, RowScratch& scratch, float* made, float* normed, signed char* x_q,
                                    float* x_quant_scale, int stride, float* stash, int* trouble) {
    constexpr int PIECE = VECTORS * ROW_STEP;
    float* const weight_here = dynamic_shared<float>();
    let_next_kernel_start();
    if (!LONG && of.weight) stage<VECTORS>(weight_here, of.weight, of.width);  // which no kernel before writes
    wait_for_kernels_before();
    const int token = blockIdx.x, width = of.width;
    const size_t at = (size_t)token * width;
    of.a += at;
    if (of.b) of.b += at;
    float x[VECTORS][4], largest = 0;
    Squares squares;
    int first = 0;
    do {
        Recipe piece = of;
        piece.a += first, piece.b += of.b ? first : 0, piece.width -= first;
        make_of(x, piece);
        if (made) store(made + at + first, x, width - first);
        if (LONG) store(stash + at + first, x, width - first);
        if (of.weight) squares.add(x, width - first);
        else largest = larger(largest, largest_of(x, width - first));
    } while (LONG && (first += PIECE) < width);
    if (of.weight) {
        const Rms rms = rms_of(squares, of, scratch, normed != nullptr, true, token, trouble);
        copies_wait<0>();
        first = 0;
        do {
            if constexpr (LONG) {
                float w[VECTORS][4];
                load(x, stash + at + first, width - first);
                load(w, of.weight + first, width - first);
                auto four = [&](int v, int) { return make_float4(w[v][0], w[v][1], w[v][2], w[v][3]); };
                norm(x, four, rms, width - first);
            } else {
                norm(x, [&](int, int i) { return *reinterpret_cast<const float4*>(weight_here + i); }, rms, width);
            }
            if (normed) store(normed + at + first, x, width - first);
            if (LONG) store(stash + at + first, x, width - first);
            largest = larger(largest, largest_of(x, width - first));
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

// One block a row of `width`; part = 1 / width. Pointers that are null: that step, or that result, is not wanted.
// x_q has rows of `stride` bytes, whose end is filled with zeros. Shared: whole tiles of floats, if there is a norm.
#define ROWS(NAME, VECTORS, LONG, BLOCKS)                                                                              \
    extern "C" __global__ void __launch_bounds__(ROW_THREADS, BLOCKS)                                                  \
        NAME(int source, const float* a, const float* b, int width, double part, const float* weight, double eps,      \
             float* made, float* normed, signed char* x_q, float* x_quant_scale, int stride, float* stash,             \
             int* trouble) {                                                                                           \
        __shared__ RowScratch scratch;                                                                                 \
        const Recipe of = {source, a, b, width, weight, eps, part};                                                    \
        row<VECTORS, LONG>(of, scratch, made, normed, x_q, x_quant_scale, stride, stash, trouble);                     \
    }
ROWS(rows_2, 2, false, 2)
ROWS(rows_4, 4, false, 2)
ROWS(rows_8, 8, false, 1)
ROWS(rows_long, 4, true, 1)

// A vector to every row: what a bias is. y = x + bias, (n, width); one thread an element.
extern "C" __global__ void add_vector(const float* x, const float* bias, size_t n, int width, float* y) {
    begin_in_turn();
    const size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n * width) y[i] = x[i] + bias[i % width];
}

// x (n, width) in 16 bits, for a product that takes no other; what they cannot hold is an error. One thread an element.
template <class T>
__device__ inline void rounded(const float* x, size_t n, int width, T* y, int* trouble) {
    begin_in_turn();
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
    begin_in_turn();
    const size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n * width) y[i] = (float)acc[i] * (w_dequant_scale / x_quant_scale[i / width]);
}

// y[i] = table[ids[i]], widened to float: the embedding, the RoPE tables, the tokens whose logits are wanted.
// One block a row.
template <class T>
__device__ inline void take(const T* table, const long long* ids, int width, float* y) {
    begin_in_turn();
    const T* from = table + (size_t)ids[blockIdx.x] * width;
    for (int i = threadIdx.x; i < width; i += blockDim.x) y[(size_t)blockIdx.x * width + i] = as_float(from[i]);
}
// The same rows of two tables: cos and sin, in one launch. Grid (rows, 2).
extern "C" __global__ void take_rows_of_two(const float* first, const float* second, const long long* ids, int width,
                                            float* y_first, float* y_second) {
    take(blockIdx.y == 0 ? first : second, ids, width, blockIdx.y == 0 ? y_first : y_second);
}
extern "C" __global__ void take_rows_float32(const float* table, const long long* ids, int width, float* y) {
    take(table, ids, width, y);
}
extern "C" __global__ void take_rows_float16(const f16* table, const long long* ids, int width, float* y) {
    take(table, ids, width, y);
}
extern "C" __global__ void take_rows_bfloat16(const bf16* table, const long long* ids, int width, float* y) {
    take(table, ids, width, y);
}
