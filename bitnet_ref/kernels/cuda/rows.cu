// Everything that is done to a token's row between two matrix products, in one kernel: row.cuh says what that is.
//
// Each step by itself is a kernel that reads a row and writes a row; a decoding step of 30 layers would have some 300 of
// them, each a few microseconds for 10 KB. Fused, a row is read once, kept in shared memory, and what is written is the
// int8 that the next matrix product reads. The primitives are this kernel with steps left out: they cannot disagree.
#include "row.cuh"

// One block a row of `width`. Pointers that are null: that step, or that result, is not wanted.
// stash: where a row waits between the steps when shared memory cannot hold it; null: shared memory, width floats.
// x_q has rows of `stride` bytes, whose end is filled with zeros.
extern "C" __global__ void __launch_bounds__(ROW_THREADS)
    rows(int source, const float* a, const float* b, int width, const float* weight, double eps, float* made,
         float* normed, signed char* x_q, float* x_quant_scale, int stride, float* stash, int* trouble) {
    __shared__ RowScratch scratch;
    begin_in_turn();
    const size_t at = (size_t)blockIdx.x * width;
    float* row = stash ? stash + at : dynamic_shared<float>();
    const Recipe of = {source, a + at, b ? b + at : b, width, weight, eps};
    const float largest = compute_row(of, row, scratch, made ? made + at : made, normed ? normed + at : normed,
                                      x_q != nullptr, true, blockIdx.x, trouble);
    if (!x_q) return;
    const float scale = scale_of(largest);
    quantize_row(row, width, scale, x_q + (size_t)blockIdx.x * stride, stride);
    if (threadIdx.x == 0) x_quant_scale[blockIdx.x] = scale;
}

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
