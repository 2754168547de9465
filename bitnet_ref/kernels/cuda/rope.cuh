// What rope.cu and attention.cu share: a place in the cache, one pair of RoPE, and one number of the cache.
#pragma once
#include "floats.cuh"

// The pool of pages of one layer is (pages, page_size, G, d); each slot has a page table.
struct Pages {
    const int* table;  // (slots, pages_per_slot): the page of positions [i * page_size, (i + 1) * page_size)
    int pages_per_slot, page_size, kv_heads, head_dim;
};

// Index of element 0 of kv head g at a position of a slot.
__device__ __forceinline__ size_t place_of(const Pages& pages, int slot, int position, int g) {
    const size_t page = pages.table[(size_t)slot * pages.pages_per_slot + position / pages.page_size];
    return ((page * pages.page_size + position % pages.page_size) * pages.kv_heads + g) * pages.head_dim;
}

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
