// Ternary by groups with float activations: y[n] = sum over groups of scale[n][g] * (sum of w_t[n][k] * x[k] in g).
//
// Plain version (NumPy: quantization.py, group_matmul): sums in float64, rounded once. Here the 16 columns of a word are
// summed in float32 and everything else in float64, so nearly all of the error is the last rounding.
//
// A warp has a row. A lane takes every 32nd word, for up to TOKENS tokens; the lanes are added in a tree. That order does
// not depend on the number of tokens. A word lies within a group: groups are multiples of 16 columns, or the whole row.
// Codes are w_t + 1, as in quantization.py; the columns that pad the last word have code 1.
#include "floats.cuh"

constexpr int WORD_COLUMNS = 16;

template <class T, int TOKENS>
__device__ __forceinline__ void by_groups(const float* x, int n, int width, const unsigned* words, const T* scales,
                                          int group, int out, float* y) {
    const int row = blockIdx.x * (blockDim.x / 32) + warp_of_block(), first = blockIdx.y * TOKENS;
    if (row >= out) return;  // the whole warp does
    const int row_words = (width + WORD_COLUMNS - 1) / WORD_COLUMNS, groups = (width + group - 1) / group;
    double sum[TOKENS] = {};
    for (int i = lane_of_warp(); i < row_words; i += 32) {
        const unsigned word = words[(size_t)row * row_words + i];
        const double scale = as_float(scales[(size_t)row * groups + i * WORD_COLUMNS / group]);
#pragma unroll
        for (int t = 0; t < TOKENS; t++) {
            if (first + t >= n) break;
            const float* values = x + (size_t)(first + t) * width;
            float part = 0;
#pragma unroll
            for (int j = 0; j < WORD_COLUMNS; j++) {
                const int k = i * WORD_COLUMNS + j;
                if (k < width) part += (float)((int)(word >> 2 * j & 3) - 1) * values[k];
            }
            sum[t] += (double)part * scale;
        }
    }
#pragma unroll
    for (int t = 0; t < TOKENS; t++) {
        const double total = warp_sum(sum[t]);
        if (lane_of_warp() == 0 && first + t < n) y[(size_t)(first + t) * out + row] = (float)total;
    }
}

// Rows of the matrix as floats. Grid: one block per id.
template <class T>
__device__ __forceinline__ void group_rows(const unsigned* words, const T* scales, long long rows, const long long* ids,
                                           int width, int group, float* y, int* trouble) {
    const long long id = ids[blockIdx.x];
    if (id < 0 || id >= rows) {
        if (threadIdx.x == 0) complain(trouble, TAKE_ROWS, blockIdx.x);
        return;
    }
    const int row_words = (width + WORD_COLUMNS - 1) / WORD_COLUMNS, groups = (width + group - 1) / group;
    for (int k = threadIdx.x; k < width; k += blockDim.x) {
        const unsigned word = words[id * row_words + k / WORD_COLUMNS];
        const int w_t = (int)(word >> 2 * (k % WORD_COLUMNS) & 3) - 1;
        y[(size_t)blockIdx.x * width + k] = (float)w_t * as_float(scales[id * groups + k / group]);
    }
}

#define GROUP_KERNELS(T, NAME)                                                                                         \
    extern "C" __global__ void group_1_##NAME(const float* x, int n, int width, const unsigned* words, const T* scales, \
                                              int group, int out, float* y) {                                          \
        by_groups<T, 1>(x, n, width, words, scales, group, out, y);                                                    \
    }                                                                                                                  \
    extern "C" __global__ void group_8_##NAME(const float* x, int n, int width, const unsigned* words, const T* scales, \
                                              int group, int out, float* y) {                                          \
        by_groups<T, 8>(x, n, width, words, scales, group, out, y);                                                    \
    }                                                                                                                  \
    extern "C" __global__ void group_rows_##NAME(const unsigned* words, const T* scales, long long rows,               \
                                                 const long long* ids, int width, int group, float* y, int* trouble) { \
        group_rows(words, scales, rows, ids, width, group, y, trouble);                                                \
    }
GROUP_KERNELS(float, float32)
GROUP_KERNELS(f16, float16)
GROUP_KERNELS(bf16, bfloat16)
