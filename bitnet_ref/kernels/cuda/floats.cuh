// Shared by the float kernels: float32, float16 and bfloat16 as types, and the report of NaN and Inf.
#pragma once
#include "common.cuh"

// 16-bit floats are structs around their bits, so that templates can tell them apart.
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

// Which operation met a value that is not finite (or an id out of range), and in which row. The first report stays. The
// host reads it together with results, so checking costs no extra wait. workspace.py has the messages.
enum Trouble { RMS_NORM = 1, QUANTIZE = 2, LM_HEAD = 3, CACHE = 4, ROUNDED = 5, TAKE_ROWS = 6 };

__device__ __forceinline__ void complain(int* trouble, Trouble op, int row) { atomicCAS(trouble, 0, row << 3 | op); }
