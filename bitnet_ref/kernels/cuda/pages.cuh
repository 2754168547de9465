// Where a key or a value lies: the pool of pages of one layer, (pages, page_size, G, d), and the table of each slot.
#pragma once

struct Pages {
    const int* table;  // (slots, pages_per_slot): the page of positions [i * page_size, (i + 1) * page_size)
    int pages_per_slot, page_size, kv_heads, head_dim;
};

// Where the table has the page of a position of a slot.
__device__ __forceinline__ const int* entry_of(const Pages& pages, int slot, int position) {
    return pages.table + (size_t)slot * pages.pages_per_slot + position / pages.page_size;
}

// Index of element 0 of kv head g at a position, which lies in that page.
__device__ __forceinline__ size_t place_in(const Pages& pages, size_t page, int position, int g) {
    return ((page * pages.page_size + position % pages.page_size) * pages.kv_heads + g) * pages.head_dim;
}
__device__ __forceinline__ size_t place_of(const Pages& pages, int slot, int position, int g) {
    return place_in(pages, *entry_of(pages, slot, position), position, g);
}
