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
// A thread has four neighbours of every 2048 elements, and keeps them in registers: VECTORS times four. The float64 sum
// has one order, so that a row is the same whoever computes it: elements 4t to 4t + 3 of every 2048 are thread t's,
// which adds the even ones to one sum and the odd ones to another, then both; then the block adds, as `block_sum` does.
// A block has 512 threads, or fewer if they are enough for all fours of a row: those that are missing would add zeros.
#pragma once
#include "floats.cuh"

constexpr int ROW_THREADS = 512, ROW_STEP = 4 * ROW_THREADS;  // ROW_STEP: elements from a thread's four to its next

enum Source { PLAIN = 0, SUM = 1, RELU2 = 2, SILU = 3 };

// a / (1 + e^-a), written so that e^-|a| never overflows. By itself: thirty-two copies of an exponential are no help.
__device__ __noinline__ float silu(float a) {
    const double wide = a, e = exp(-fabs(wide));
    return (float)(wide * (wide >= 0 ? 1.0 : e) / (1.0 + e));
}

__device__ __forceinline__ float make(int source, float a, float b) {
    if (source == SUM) return a + b;
    if (source == RELU2) {
        const float positive = a > 0 || a != a ? a : 0.0f;  // NaN passes
        return positive * positive * b;
    }
    if (source == SILU) return silu(a) * b;
    return a;
}

// -- a thread's elements: x[v][e] is the row's element 2048 v + 4 threadIdx.x + e -------------------------------------

// Calls each(v, i), i the first of the four, for the fours that begin within the row.
template <int VECTORS, class Each> __device__ __forceinline__ void each_four(int width, Each each) {
#pragma unroll
    for (int v = 0; v < VECTORS; v++) {
        const int i = v * ROW_STEP + 4 * (int)threadIdx.x;
        if (i < width) each(v, i);
    }
}

// Whether fours of a row may be read and written at once: they begin at multiples of 16 bytes, and none is cut.
__device__ __forceinline__ bool in_fours(const void* row, int width) {
    return width % 4 == 0 && (unsigned long long)row % 16 == 0;
}

// What lies past the end of a row are zeros, in a four that begins within it.
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

// A thread's elements of a weight into shared memory, for itself: one group of copies, on their way when this returns.
template <int VECTORS> __device__ __forceinline__ void stage(float* here, const float* weight, int width) {
    if (in_fours(weight, width)) {
        each_four<VECTORS>(width, [&](int, int i) { copy_async_16(here + i, weight + i, true); });
    } else {
        each_four<VECTORS>(width, [&](int, int i) {
            for (int e = 0; e < 4; e++) here[i + e] = i + e < width ? weight[i + e] : 0.0f;
        });
    }
    copies_commit();
}

struct Recipe {  // what a row is made of; weight null: no norm
    int source;
    const float *a, *b;  // of this row
    int width;
    const float* weight;
    double eps, part;  // part: 1 / width
};

// The row before its norm. SOURCE as a constant, so that only its own instructions are there.
template <int SOURCE, int VECTORS> __device__ __forceinline__ void make_from(float (&x)[VECTORS][4], const Recipe& of) {
    float b[VECTORS][4];
    load(x, of.a, of.width);
    if (SOURCE == PLAIN) return;
    load(b, of.b, of.width);
    each_four<VECTORS>(of.width, [&](int v, int) {
#pragma unroll
        for (int e = 0; e < 4; e++) x[v][e] = make(SOURCE, x[v][e], b[v][e]);
    });
}
template <int VECTORS> __device__ __forceinline__ void make_of(float (&x)[VECTORS][4], const Recipe& of) {
    if (of.source == PLAIN) make_from<PLAIN>(x, of);
    if (of.source == SUM) make_from<SUM>(x, of);
    if (of.source == RELU2) make_from<RELU2>(x, of);
    if (of.source == SILU) make_from<SILU>(x, of);
}

// -- sums and maxima --------------------------------------------------------------------------------------------------

struct RowScratch {  // of a block, in shared memory
    int largest[32];
    double squares[32];
};

// The product of two floats is exact in float64: adding it is one rounding, and one instruction.
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

__device__ __forceinline__ float larger(float a, float b) {  // NaN wins, as of Max, in one instruction
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

// n / d rounded once, in three instructions, if `inverse` is 1 / d rounded once: with a quotient that is nearly right
// what it leaves of n is exact, and tells which neighbour is the nearest (P. Markstein, IBM Journal of Research and
// Development 34, 1990). Where what is left is too small for a float (|n| < 2^-101) the last bit may be wrong.
__device__ __forceinline__ float quotient(float n, float d, float inverse) {
    const float q = __fmul_rn(n, inverse);
    return __fmaf_rn(__fmaf_rn(-q, d, n), inverse, q);
}
__device__ __forceinline__ double quotient(double n, double d, double inverse) {
    const double q = __dmul_rn(n, inverse);
    return __fma_rn(__fma_rn(-q, d, n), inverse, q);
}

// What a row is divided by. `plainly`: by a division each, where the three instructions may not do. So it is with an
// rms near the ends of what floats hold, and in rows that are handed out, right to the last bit of the smallest number.
// To int8, elements below 2^-101 do not matter: with an rms above 1e-7 they are at most 2^-77 after it, and 2^-53 after
// the scale (at most 127 / 1e-5), so that a weight would have to be 2^50 to make anything but zero of them.
struct Rms {
    float value, inverse;
    bool plainly;
};

// squares: of each thread. tells: whether this block is the one to say what is not finite, of row number `token`.
__device__ __forceinline__ Rms rms_of(const Squares& squares, const Recipe& of, RowScratch& scratch, bool handed_out,
                                      bool tells, int token, int* trouble) {
    const double sum = block_sum(squares.even + squares.odd, scratch.squares);
    const double mean_square = quotient(sum, (double)of.width, of.part);
    if (threadIdx.x == 0 && tells && !is_finite(mean_square)) complain(trouble, RMS_NORM, token);
    const float rms = (float)sqrt(mean_square + of.eps);
    return {rms, __frcp_rn(rms), handed_out || !(rms > 1e-7f && rms < 1e15f)};
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
    if (rms.plainly)
        each([&](float n) { return n / rms.value; });
    else
        each([&](float n) { return quotient(n, rms.value, rms.inverse); });
}

// -- int8 -------------------------------------------------------------------------------------------------------------

// Of all threads' largest |element|.
__device__ __forceinline__ float scale_of(float largest, RowScratch& scratch, bool tells, int token, int* trouble) {
    largest = block_largest(largest, scratch.largest);
    if (threadIdx.x == 0 && tells && !is_finite(largest)) complain(trouble, QUANTIZE, token);
    return 127.0f / fmaxf(largest, 1e-5f);
}

// Four elements as int8, the first in the lowest byte. Floats about 1.5 * 2^23 are whole numbers, so adding that
// rounds, half to even, and leaves the number in the lowest bits as two's complement. There is nothing to clip: no
// |element| is above `largest`, and so no product above 127 by more than its roundings.
__device__ __forceinline__ unsigned as_int8(const float (&x)[4], float scale) {
    unsigned bits[4];
#pragma unroll
    for (int e = 0; e < 4; e++) bits[e] = __float_as_uint(__fadd_rn(__fmul_rn(x[e], scale), 12582912.0f));
    return __byte_perm(__byte_perm(bits[0], bits[1], 0x0040), __byte_perm(bits[2], bits[3], 0x0040), 0x5410);
}
