// What the float kernels share: float32, float16 and bfloat16 in one text, and the place where a kernel notes NaN or Inf.
#pragma once
#include "common.cuh"

// 16-bit floats travel as structs around their bits, so that a template tells them apart.
struct f16 {
    unsigned short bits;
};
struct bf16 {
    unsigned short bits;
};

__device__ __forceinline__ float as_float(float x) { return x; }
__device__ __forceinline__ float as_float(signed char x) { return (float)x; }
__device__ __forceinline__ float as_float(f16 x) { return half_to_float(x.bits); }
__device__ __forceinline__ float as_float(bf16 x) { return bfloat16_to_float(x.bits); }

// Rounding to 16 bits is half to even, as NumPy rounds.
__device__ __forceinline__ void assign(float& to, float x) { to = x; }
__device__ __forceinline__ void assign(f16& to, float x) { to.bits = float_to_half(x); }
__device__ __forceinline__ void assign(bf16& to, float x) { to.bits = float_to_bfloat16(x); }

__device__ __forceinline__ bool is_finite(double x) { return x - x == 0; }  // Inf - Inf and NaN - NaN are NaN

// COUNT sums that LANES neighbours hold in parts: the neighbours' parts of sums[0 .. COUNT) are added, and sums[0] becomes
// the sum number `lane / (LANES / COUNT)` (COUNT and LANES powers of two, COUNT <= LANES).
//
// Adding each by itself would take log2(LANES) shuffles a sum. Instead each lane gives away half of its sums and is given
// the other lane's parts of the rest, then half of those, ...: COUNT - 1 shuffles, and then one for each step that is
// left. The order of every sum is that of the plain way: lanes 16 apart first, then 8, 4, 2, 1.
//
// The steps are a recursion of templates, not a loop that halves: of such a loop nvcc unrolls too little, and sums that
// are indexed at run time lie in memory.
template <int HALF, int APART, int COUNT, typename T>
__device__ __forceinline__ void add_lanes_apart(T (&sums)[COUNT], int lane) {
    if constexpr (HALF > 0) {
        const bool upper = (lane & APART) != 0;
#pragma unroll
        for (int i = 0; i < HALF; i++) {
            const T kept = upper ? sums[i + HALF] : sums[i], given = upper ? sums[i] : sums[i + HALF];
            sums[i] = kept + __shfl_xor_sync(ALL_LANES, given, APART);
        }
        add_lanes_apart<HALF / 2, APART / 2>(sums, lane);
    } else if constexpr (APART > 0) {
        sums[0] += __shfl_xor_sync(ALL_LANES, sums[0], APART);
        add_lanes_apart<0, APART / 2>(sums, lane);
    }
}
template <int COUNT, int LANES, typename T> __device__ __forceinline__ void add_lanes(T (&sums)[COUNT], int lane) {
    add_lanes_apart<COUNT / 2, LANES / 2>(sums, lane);
}

// Which operation met a value that is not finite, and in which row: the first one to say so stays. The host reads it
// when it reads results, so a NaN costs no wait in between.
enum Trouble { RMS_NORM = 1, QUANTIZE = 2, LM_HEAD = 3, CACHE = 4, ROUNDED = 5 };

__device__ __forceinline__ void complain(int* trouble, Trouble op, int row) { atomicCAS(trouble, 0, row << 3 | op); }
