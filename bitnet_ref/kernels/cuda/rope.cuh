// One pair of RoPE, and one number into the cache: what rope.cu and attention share.
#pragma once
#include "floats.cuh"
#include "pages.cuh"

struct Pair {
    float first, second;
};

__device__ __forceinline__ Pair turned(float first, float second, float cos, float sin) {
    return {first * cos - second * sin, second * cos + first * sin};
}
__device__ inline Pair turned(const float* x, int j, int half, float cos, float sin) {
    return turned(x[j], x[j + half], cos, sin);
}

// One number into the cache. What 16 bits cannot hold is an error, as NaN is.
template <class T> __device__ __forceinline__ void keep(T& to, float x, int token, int* trouble) {
    assign(to, x);
    if (sizeof(T) == 2 && !is_finite(as_float(to))) complain(trouble, CACHE, token);
}
