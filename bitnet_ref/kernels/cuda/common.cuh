// What the device files share: sums and maxima over a warp or a block, 16-bit floats, and copies into shared memory.
// No include of CUDA's own headers: NVRTC compiles this without any.
//
// Everything is computed in a written order, so that the same block on the same numbers gives the same bits.
#pragma once

static constexpr unsigned ALL_LANES = 0xffffffffu;

/* Dynamic shared memory, 16-byte aligned: `float *values = dynamic_shared<float>();` One array per kernel. */
#ifdef BITNET_REF_EMULATED
template <typename T> __device__ __forceinline__ T *dynamic_shared() {
    return static_cast<T *>(emulated_dynamic_shared());
}
#else
extern __shared__ uint4 dynamic_shared_memory[];
template <typename T> __device__ __forceinline__ T *dynamic_shared() {
    return reinterpret_cast<T *>(dynamic_shared_memory);
}
#endif

__device__ __forceinline__ int lane_of_warp() { return threadIdx.x % 32; }  // blocks are one-dimensional
__device__ __forceinline__ int warp_of_block() { return threadIdx.x / 32; }

// -- over a warp: every lane gets the result, computed in the same tree ----------------------------------------------

struct Sum {
    template <typename T> __device__ __forceinline__ static T combine(T a, T b) { return a + b; }
};
struct Max {  // NaN wins, so that it is noticed
    __device__ __forceinline__ static float combine(float a, float b) { return (a != a || a > b) ? a : b; }
    __device__ __forceinline__ static int combine(int a, int b) { return a > b ? a : b; }
};

template <typename Op, typename T> __device__ __forceinline__ T warp_all(T value) {
    for (int step = 16; step > 0; step /= 2) value = Op::combine(value, __shfl_xor_sync(ALL_LANES, value, step));
    return value;
}
template <typename T> __device__ __forceinline__ T warp_sum(T value) { return warp_all<Sum>(value); }
template <typename T> __device__ __forceinline__ T warp_max(T value) { return warp_all<Max>(value); }

// -- over a block of whole warps: `scratch` is shared memory for 32 values, in use until the next barrier
// --------------

template <typename T> __device__ __forceinline__ T block_sum(T value, T *scratch) {
    const int warps = blockDim.x / 32;
    value = warp_sum(value);
    if (lane_of_warp() == 0) scratch[warp_of_block()] = value;
    __syncthreads();
    return warp_sum(lane_of_warp() < warps ? scratch[lane_of_warp()] : T(0));  // by every warp: no second barrier
}

/* The largest of values that are not negative. They compare as integers do, NaN above all of them. */
__device__ __forceinline__ float block_largest(float value, int *scratch) {
    const int warps = blockDim.x / 32, mine = __reduce_max_sync(ALL_LANES, __float_as_int(value));
    if (lane_of_warp() == 0) scratch[warp_of_block()] = mine;
    __syncthreads();
    return __int_as_float(__reduce_max_sync(ALL_LANES, lane_of_warp() < warps ? scratch[lane_of_warp()] : 0));
}

// -- 16-bit floats, by their bits -------------------------------------------------------------------------------------

__device__ __forceinline__ float bfloat16_to_float(unsigned short bits) {
    return __uint_as_float(unsigned(bits) << 16);
}

/* Rounded to nearest, ties to even; NaN stays one. */
__device__ __forceinline__ unsigned short float_to_bfloat16(float value) {
    const unsigned bits = __float_as_uint(value);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return (unsigned short)(bits >> 16 | 0x40);
    return (unsigned short)((bits + 0x7fffu + (bits >> 16 & 1)) >> 16);
}

#ifdef BITNET_REF_EMULATED
__device__ __forceinline__ float half_to_float(unsigned short bits) {
    const unsigned sign = (bits & 0x8000u) << 16, exponent = bits >> 10 & 31, fraction = bits & 0x3ffu;
    if (exponent == 31) return __uint_as_float(sign | 0x7f800000u | fraction << 13);
    if (exponent != 0) return __uint_as_float(sign | (exponent + 112) << 23 | fraction << 13);
    const float tiny = float(fraction) * 5.9604644775390625e-8f;  // 2^-24, exact
    return sign ? -tiny : tiny;
}

/* Rounded to nearest, ties to even; past 65504 by half a step: infinity. */
__device__ __forceinline__ unsigned short float_to_half(float value) {
    const unsigned bits = __float_as_uint(value), sign = bits >> 16 & 0x8000u, size = bits & 0x7fffffffu;
    if (size > 0x7f800000u) return (unsigned short)(sign | 0x7e00u | (size >> 13 & 0x3ffu));
    if (size >= 0x477ff000u) return (unsigned short)(sign | 0x7c00u);
    if (size < 0x38800000u)  // below 2^-14: in steps of 2^-24, which adding 0.5 makes the last bit of a float
        return (unsigned short)(sign | (__float_as_uint(__uint_as_float(size) + 0.5f) - 0x3f000000u));
    return (unsigned short)(sign | ((size - 0x38000000u + 0xfffu + (size >> 13 & 1)) >> 13));
}
#else
__device__ __forceinline__ float half_to_float(unsigned short bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
}

__device__ __forceinline__ unsigned short float_to_half(float value) {
    unsigned short bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}
#endif

// -- global to shared memory without registers between (cp.async, sm_80) ----------------------------------------------

/* Copies 16 bytes, both addresses aligned to 16; if `valid` is false it writes zeros and reads nothing. */
__device__ __forceinline__ void copy_async_16(void *shared, const void *global, bool valid) {
#ifdef BITNET_REF_EMULATED
    *static_cast<uint4 *>(shared) = valid ? *static_cast<const uint4 *>(global) : make_uint4(0, 0, 0, 0);
#else
    const unsigned target = (unsigned)__cvta_generic_to_shared(shared);
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(target), "l"(global), "r"(valid ? 16 : 0)
                 : "memory");
#endif
}

/* Closes a group of copies; `copies_wait<n>` returns when at most the n latest groups of this thread are unfinished. */
__device__ __forceinline__ void copies_commit() {
#ifndef BITNET_REF_EMULATED
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}
template <int latest> __device__ __forceinline__ void copies_wait() {
#ifndef BITNET_REF_EMULATED
    asm volatile("cp.async.wait_group %0;" ::"n"(latest) : "memory");
#endif
}

/* The same for a number known at run time, at most 9. */
__device__ __forceinline__ void copies_wait(int latest) {
    switch (latest) {
    case 0: return copies_wait<0>();
    case 1: return copies_wait<1>();
    case 2: return copies_wait<2>();
    case 3: return copies_wait<3>();
    case 4: return copies_wait<4>();
    case 5: return copies_wait<5>();
    case 6: return copies_wait<6>();
    case 7: return copies_wait<7>();
    case 8: return copies_wait<8>();
    default: return copies_wait<9>();
    }
}
