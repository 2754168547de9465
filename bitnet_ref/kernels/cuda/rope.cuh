// One pair of RoPE, and one number of the cache: shared by rope.cu and attention.cu.
#pragma once
#include "floats.cuh"
#include "pages.cuh"

struct Pair {
    float first, second;
};

__device__ __forceinline__ Pair rotated(const float* x, int j, int half, float cos, float sin) {
    const float first = x[j], second = x[j + half];
    return {first * cos - second * sin, second * cos + first * sin};
}

// Stores one number of the cache. A number that 16 bits cannot hold is an error, as NaN is.
template <class T> __device__ __forceinline__ void keep(T& to, float x, int token, int* trouble) {
    assign(to, x);
    if (sizeof(T) == 2 && !is_finite(as_float(to))) complain(trouble, CACHE, token);
}
