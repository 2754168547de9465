// A token's row between two matrix products, as one block computes it: rows.cu writes what comes out of it,
// ternary_row.cu multiplies it.
//
// Plain version, for a row of floats (NumPy: layers.py, quantization.py):
//
//     made   = a | a + b | relu(a)^2 * b | silu(a) * b            residual sum, or the gate
//     normed = made / sqrt(mean(made^2) + eps) * weight           RMSNorm, if there is a weight
//     scale  = 127 / max(max|normed|, 1e-5)                       absmax quantisation
//     x_q    = clip(round(normed * scale), -128, 127)
//
// Bits: sums and exponentials are float64, rounded once to float32; the rest is the float32 expressions of NumPy, one
// rounding each (compiled without fused multiply-add). So x_q equals NumPy's.
//
// The float64 sum has one order too, so that a row is the same whoever computes it: element i is added by thread
// i % ROW_THREADS. A block has so many threads, or fewer if they are at least as many as elements.
#pragma once
#include "floats.cuh"

constexpr int ROW_THREADS = 512;

enum Source { PLAIN = 0, SUM = 1, RELU2 = 2, SILU = 3 };

__device__ inline float make(int source, float a, float b) {
    if (source == SUM) return a + b;
    if (source == RELU2) {
        const float positive = a > 0 || a != a ? a : 0.0f;  // NaN passes
        return positive * positive * b;
    }
    if (source == SILU) {  // a / (1 + e^-a), written so that e^-|a| never overflows
        const double wide = a, e = exp(-fabs(wide));
        return (float)(wide * (wide >= 0 ? 1.0 : e) / (1.0 + e)) * b;
    }
    return a;
}

// Calls each(place, i) for the thread's elements of a row, some at a time: load(place, i) of all of these before.
constexpr int LOADED = 5;  // at a time: 2560 columns, and what 64 registers leave room for beside weights on their way
template <class Load, class Each> __device__ __forceinline__ void of_thread(int width, Load load, Each each) {
    const int step = blockDim.x;
    for (int base = threadIdx.x; base < width; base += LOADED * step) {
#pragma unroll
        for (int ahead = 0; ahead < LOADED; ahead++)
            if (base + ahead * step < width) load(ahead, base + ahead * step);
#pragma unroll
        for (int ahead = 0; ahead < LOADED; ahead++)
            if (base + ahead * step < width) each(ahead, base + ahead * step);
    }
}

struct Recipe {  // what a row is made of; weight null: no norm
    int source;
    const float *a, *b;  // of this row
    int width;
    const float* weight;
    double eps;
};

struct RowScratch {  // of a block, in shared memory
    int largest[32];
    double squares[32];
};

// The row, normed if it is to be, into `row`: shared or global memory, of which a thread touches the same places in each
// step, so that no barrier is needed. made, normed: null, or where to write these. tells: whether this block is the one
// to say what is not finite, of row number `token`.   -> the largest |element|, to every thread, where it `quantizes`
__device__ inline float compute_row(Recipe of, float* row, RowScratch& scratch, float* made, float* normed,
                                    bool quantizes, bool tells, int token, int* trouble) {
    double squares = 0;
    float largest = 0, a[LOADED], b[LOADED] = {};
    of_thread(
        of.width,
        [&](int place, int i) {
            a[place] = of.a[i];
            if (of.source != PLAIN) b[place] = of.b[i];
        },
        [&](int place, int i) {
            const float x = make(of.source, a[place], b[place]);
            row[i] = x;
            if (made) made[i] = x;
            squares += (double)x * x;
            largest = Max::combine(largest, fabsf(x));  // NaN wins
        });
    if (of.weight) {
        const double mean_square = block_sum(squares, scratch.squares) / of.width;
        if (threadIdx.x == 0 && tells && !is_finite(mean_square)) complain(trouble, RMS_NORM, token);
        const float rms = (float)sqrt(mean_square + of.eps);
        largest = 0;
        of_thread(
            of.width, [&](int place, int i) { b[place] = of.weight[i]; },
            [&](int place, int i) {
                const float x = row[i] / rms * b[place];
                row[i] = x;
                if (normed) normed[i] = x;
                largest = Max::combine(largest, fabsf(x));
            });
    }
    if (!quantizes) return 0;
    largest = block_largest(largest, scratch.largest);
    if (threadIdx.x == 0 && tells && !is_finite(largest)) complain(trouble, QUANTIZE, token);
    return largest;
}

__device__ __forceinline__ float scale_of(float largest) { return 127.0f / fmaxf(largest, 1e-5f); }

// The row as int8, and zeros behind it up to `stride`.
__device__ __forceinline__ void quantize_row(const float* row, int width, float scale, signed char* x_q, int stride) {
    for (int i = threadIdx.x; i < stride; i += blockDim.x)
        x_q[i] = i < width ? (signed char)fminf(fmaxf(rintf(row[i] * scale), -128.0f), 127.0f) : 0;
}
