// y = x W^T for a matrix that is not quantised: the head of every model, and every linear of a dense one.
//
// Plain version (NumPy: layers.dense_matmul):
//
//     y[t][r] = sum over k of x[t][k] * w[r][k]          x, y and the sum float32; w of 32 or 16 bits, widened
//
// A matrix product of cuBLAS would take another order of summation for another number of tokens, and a token's logits
// would depend on its company. Here a warp takes ROWS rows of W and up to TOKENS tokens; lane l takes the elements
// 8 l, ..., 8 l + 7 of every 256, and the lanes' sums are added at the end (`add_lanes`). That is the order for
// every token, whatever their number: it decides only how many sums a lane keeps, and how often a row is read again.
//
// One token reads each weight once, 16 bytes a lane and ROWS loads in flight: such a product is bounded by memory, and
// 2B-4T's head of 656 MB bounds decoding as much as all its ternary matrices. ROWS rows share what is read of x.
#include "floats.cuh"
#include "stacked.cuh"

constexpr int ROWS = 4;
constexpr int WIDE = 8;  // elements a lane takes at a time

// The floats in a 32-bit word, lower half first; a float32 is one.
__device__ __forceinline__ void unfold(unsigned word, const float*, float* out) { out[0] = __uint_as_float(word); }
__device__ __forceinline__ void unfold(unsigned word, const bf16*, float* out) {
    out[0] = __uint_as_float(word << 16);
    out[1] = __uint_as_float(word & 0xffff0000u);
}
__device__ __forceinline__ void unfold(unsigned word, const f16*, float* out) {
    out[0] = half_to_float((unsigned short)word);
    out[1] = half_to_float((unsigned short)(word >> 16));
}

// Elements k, ..., k + 7 of a row as floats; zeros beyond its end. Rows of a multiple of 8 elements are aligned.
template <class T>
__device__ __forceinline__ void load(const T* row, int k, int width, float (&out)[WIDE]) {
    if (width % WIDE == 0) {
        if (k >= width) return;  // out holds zeros
        constexpr int EACH = 4 / sizeof(T);  // floats in a word
#pragma unroll
        for (int i = 0; i < WIDE; i += 4 * EACH) {
            const uint4 words = *reinterpret_cast<const uint4*>(row + k + i);
            unfold(words.x, row, out + i);
            unfold(words.y, row, out + i + EACH);
            unfold(words.z, row, out + i + 2 * EACH);
            unfold(words.w, row, out + i + 3 * EACH);
        }
        return;
    }
#pragma unroll
    for (int e = 0; e < WIDE; e++) out[e] = k + e < width ? as_float(row[k + e]) : 0.0f;
}

// x (n, width), w (out, width) -> y (n, out), of a stack as stacked.cuh says; a warp takes rows of W for all n tokens,
// TOKENS at a time.
template <class T, int TOKENS>
__device__ inline void product(const float* x, int n, int width, const T* w, int out, int second, int third, float* y) {
    const int lane = lane_of_warp(), row = (blockIdx.x * (blockDim.x / 32) + warp_of_block()) * ROWS;
    if (row >= out) return;  // the whole warp does
    for (int token = blockIdx.y * TOKENS; token < n; token += gridDim.y * TOKENS) {
        float sum[ROWS * TOKENS] = {};
        for (int base = 0; base < width; base += 32 * WIDE) {
            const int k = base + lane * WIDE;
            float a[ROWS][WIDE] = {};
#pragma unroll
            for (int r = 0; r < ROWS; r++) load(w + (size_t)min(row + r, out - 1) * width, k, width, a[r]);
#pragma unroll
            for (int t = 0; t < TOKENS; t++) {
                float b[WIDE] = {};
                load(x + (size_t)min(token + t, n - 1) * width, k, width, b);
#pragma unroll
                for (int r = 0; r < ROWS; r++)
#pragma unroll
                    for (int e = 0; e < WIDE; e++) sum[r * TOKENS + t] += a[r][e] * b[e];
            }
        }
        add_lanes<ROWS * TOKENS, 32>(sum, lane);
        constexpr int EACH = 32 / (ROWS * TOKENS);  // lanes that have the same sum
        const int r = row + lane / EACH / TOKENS, t = token + lane / EACH % TOKENS;
        if (lane % EACH == 0 && t < n && r < out) y[place_in_stack(t, r, n, out, second, third)] = sum[0];
    }
}

#define FOR_WEIGHTS_OF(T, NAME)                                                                                        \
    extern "C" __global__ void dense_1_##NAME(const float* x, int n, int width, const T* w, int out, int second,       \
                                              int third, float* y) {                                                   \
        product<T, 1>(x, n, width, w, out, second, third, y);                                                          \
    }                                                                                                                  \
    extern "C" __global__ void dense_8_##NAME(const float* x, int n, int width, const T* w, int out, int second,       \
                                              int third, float* y) {                                                   \
        product<T, 8>(x, n, width, w, out, second, third, y);                                                          \
    }
FOR_WEIGHTS_OF(float, float32)
FOR_WEIGHTS_OF(f16, float16)
FOR_WEIGHTS_OF(bf16, bfloat16)
