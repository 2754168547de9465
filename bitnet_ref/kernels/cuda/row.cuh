// One token's row between two matrix products, as one block computes it. rows.cu writes the result to memory,
// ternary_row.cu multiplies it.
//
// Plain version, for a row of floats (NumPy: layers.py, quantization.py):
//
//     x      = a | relu(a)^2 * b | silu(a) * b                the input, or a gated pair
//     normed = x / sqrt(mean(x^2) + eps) * weight             RMSNorm, if there is a weight
//     scale  = 127 / max(max|normed|, 1e-5)                   absmax quantisation
//     x_q    = clip(round(normed * scale), -128, 127)
//
// Bits: sums and exponentials are float64, rounded once to float32. The rest are NumPy's float32 expressions, one
// rounding each (compiled without fused multiply-add), so x_q equals NumPy's.
//
// A thread holds four neighbours of every 2048 elements in registers: VECTORS times four. The float64 sum has one
// order, so a row gives the same bits in every kernel: elements 4t to 4t + 3 of every 2048 belong to thread t, which
// adds the even ones to one sum and the odd ones to another, then both; `block_sum` adds the threads. A block has 512
// threads, or fewer if those hold the whole row: the missing threads would only add zeros.
#pragma once
#include "floats.cuh"

constexpr int ROW_THREADS = 512, ROW_STEP = 4 * ROW_THREADS;  // ROW_STEP: elements from a thread's four to its next

enum Gate { PLAIN = 0, RELU2 = 1, SILU = 2 };  // rows.py: GATES

// a / (1 + e^-a), written so that e^-|a| never overflows. Not inlined: a row would have 32 copies of the exponential.
__device__ __noinline__ float silu(float a) {
    const double wide = a, e = exp(-fabs(wide));
    return (float)(wide * (wide >= 0 ? 1.0 : e) / (1.0 + e));
}

__device__ __forceinline__ float gated(int gate, float a, float b) {
    if (gate == RELU2) {
        const float positive = a > 0 || a != a ? a : 0.0f;  // NaN passes
        return positive * positive * b;
    }
    if (gate == SILU) return silu(a) * b;
    return a;
}

// -- a thread's elements: x[v][e] is the row's element 2048 v + 4 threadIdx.x + e -------------------------------------

// Calls each(v, i) for the fours that begin within the row; i is the first of the four.
template <int VECTORS, class Each> __device__ __forceinline__ void each_four(int width, Each each) {
#pragma unroll
    for (int v = 0; v < VECTORS; v++) {
        const int i = v * ROW_STEP + 4 * (int)threadIdx.x;
        if (i < width) each(v, i);
    }
}

// Whether fours of a row can be read and written as 16 bytes: all are aligned, and none is cut.
__device__ __forceinline__ bool in_fours(const void* row, int width) {
    return width % 4 == 0 && (unsigned long long)row % 16 == 0;
}

// Elements past the end of the row are zeros, in a four that begins within it.
template <int VECTORS> __device__ __forceinline__ void load(float (&x)[VECTORS][4], const float* row, int width) {
    if (in_fours(row, width)) {
        each_four<VECTORS>(width, [&](int v, int i) {
            const float4 four = *reinterpret_cast<const float4*>(row + i);
            x[v][0] = four.x, x[v][1] = four.y, x[v][2] = four.z, x[v][3] = four.w;
        });
    } else {
        each_four<VECTORS>(width, [&](int v, int i) {
#pragma unroll
            for (int e = 0; e < 4; e++) x[v][e] = i + e < width ? row[i + e] : 0.0f;
        });
    }
}
template <int VECTORS> __device__ __forceinline__ void store(float* row, const float (&x)[VECTORS][4], int width) {
    if (in_fours(row, width)) {
        each_four<VECTORS>(width, [&](int v, int i) {
            *reinterpret_cast<float4*>(row + i) = make_float4(x[v][0], x[v][1], x[v][2], x[v][3]);
        });
    } else {
        each_four<VECTORS>(width, [&](int v, int i) {
#pragma unroll
            for (int e = 0; e < 4; e++)
                if (i + e < width) row[i + e] = x[v][e];
        });
    }
}

// -- sums and maxima --------------------------------------------------------------------------------------------------

struct RowScratch {  // of a block, in shared memory
    int largest[32];
    double squares[32];
};

// The product of two floats is exact in float64, so adding it is one rounding and one instruction.
struct Squares {
    double even = 0, odd = 0;
    template <int VECTORS> __device__ __forceinline__ void add(const float (&x)[VECTORS][4], int width) {
        each_four<VECTORS>(width, [&](int v, int) {
#pragma unroll
            for (int e = 0; e < 4; e += 2) {
                even = __fma_rn((double)x[v][e], (double)x[v][e], even);
                odd = __fma_rn((double)x[v][e + 1], (double)x[v][e + 1], odd);
            }
        });
    }
};

__device__ __forceinline__ float larger(float a, float b) {  // NaN wins, as in Max, in one instruction
#ifdef BITNET_REF_EMULATED
    return Max::combine(a, b);
#else
    float c;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b));
    return c;
#endif
}
template <int VECTORS> __device__ __forceinline__ float largest_of(const float (&x)[VECTORS][4], int width) {
    float largest = 0;
    each_four<VECTORS>(width, [&](int v, int) {
#pragma unroll
        for (int e = 0; e < 4; e++) largest = larger(largest, fabsf(x[v][e]));
    });
    return largest;
}

// -- the norm ---------------------------------------------------------------------------------------------------------

struct RowNorm {  // weight null: no norm
    const float* weight;
    int width;
    double eps, part;  // part: 1 / width
};

// n / d rounded once, in three instructions, given `inverse`, 1 / d rounded once. The remainder of a nearly right
// quotient is exact and tells which neighbour is nearest (P. Markstein, IBM Journal of Research and Development 34,
// 1990). Where the remainder is too small for a float (|n| < 2^-101) the last bit may be wrong.
__device__ __forceinline__ float quotient(float n, float d, float inverse) {
    const float q = __fmul_rn(n, inverse);
    return __fmaf_rn(__fmaf_rn(-q, d, n), inverse, q);
}
__device__ __forceinline__ double quotient(double n, double d, double inverse) {
    const double q = __dmul_rn(n, inverse);
    return __fma_rn(__fma_rn(-q, d, n), inverse, q);
}

// The divisor of a row. `divides`: by a division per element, where `quotient` may be wrong: with an rms near the
// limits of float32, and in rows that are written out, which must be right to the last bit of the smallest number. For
// int8, elements below 2^-101 do not matter: with an rms above 1e-7 they are at most 2^-77 after it, and 2^-53 after
// the scale (at most 127 / 1e-5), so a weight would have to be 2^50 to make anything but zero of them.
struct Rms {
    float value, inverse;
    bool divides;
};

// squares: of each thread. reports: whether this block reports a value that is not finite, in row number `token`.
__device__ __forceinline__ Rms rms_of(const Squares& squares, const RowNorm& by, RowScratch& scratch, bool written,
                                      bool reports, int token, int* trouble) {
    const double sum = block_sum(squares.even + squares.odd, scratch.squares);
    const double mean_square = quotient(sum, (double)by.width, by.part);
    if (threadIdx.x == 0 && reports && !is_finite(mean_square)) complain(trouble, RMS_NORM, token);
    const float rms = (float)sqrt(mean_square + by.eps);
    return {rms, __frcp_rn(rms), written || !(rms > 1e-7f && rms < 1e15f)};
}

// weight(v, i): of the four x[v].
template <int VECTORS, class Weight>
__device__ __forceinline__ void norm(float (&x)[VECTORS][4], Weight weight, const Rms& rms, int width) {
    auto each = [&](auto divided) {
        each_four<VECTORS>(width, [&](int v, int i) {
            const float4 four = weight(v, i);
            const float w[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
            for (int e = 0; e < 4; e++) x[v][e] = divided(x[v][e]) * w[e];
        });
    };
    if (rms.divides)
        each([&](float n) { return n / rms.value; });
    else
        each([&](float n) { return quotient(n, rms.value, rms.inverse); });
}

// -- int8 -------------------------------------------------------------------------------------------------------------

// largest: the largest |element| of each thread.
__device__ __forceinline__ float scale_of(float largest, RowScratch& scratch, bool reports, int token, int* trouble) {
    largest = block_largest(largest, scratch.largest);
    if (threadIdx.x == 0 && reports && !is_finite(largest)) complain(trouble, QUANTIZE, token);
    return 127.0f / fmaxf(largest, 1e-5f);
}

// Four elements as int8, the first in the lowest byte. Floats about 1.5 * 2^23 are whole numbers, so adding that rounds
// half to even and leaves the number in the lowest bits as two's complement. Nothing needs clipping: no |element| is
// above `largest`, so no product exceeds 127 by more than its roundings.
__device__ __forceinline__ unsigned as_int8(const float (&x)[4], float scale) {
    unsigned bits[4];
#pragma unroll
    for (int e = 0; e < 4; e++) bits[e] = __float_as_uint(__fadd_rn(__fmul_rn(x[e], scale), 12582912.0f));
    return __byte_perm(__byte_perm(bits[0], bits[1], 0x0040), __byte_perm(bits[2], bits[3], 0x0040), 0x5410);
}
