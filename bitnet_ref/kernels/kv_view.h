/* What one token sees of one kv head in a paged cache: keys and values at positions first to first + n_keys - 1. */
#ifndef BITNET_REF_KV_VIEW_H
#define BITNET_REF_KV_VIEW_H

#include <stddef.h>
#include <stdint.h>

typedef struct {
    const float *keys, *values;           /* of this layer and head: where row 0 of page 0 begins */
    const int32_t *pages;                 /* of the sequence: pages[i] holds positions i * page_size .. */
    size_t page_size, page_stride, stride; /* rows of a page; floats from page to page, and from row to row */
    size_t first, n_keys;
} kv_view;

/* The rows from key s on that lie one behind the other in a page: how many there are, at most `most` of them; *row is
 * where they begin. Beyond the last key there are none: *row is NULL. */
static inline size_t kv_rows(const kv_view *kv, const float *pool, size_t s, size_t most, const float **row) {
    *row = NULL;
    if (s >= kv->n_keys) return 0;
    const size_t position = kv->first + s, page = position / kv->page_size, offset = position - page * kv->page_size;
    *row = pool + (size_t)kv->pages[page] * kv->page_stride + offset * kv->stride;
    size_t count = kv->page_size - offset;
    if (count > kv->n_keys - s) count = kv->n_keys - s;
    return count < most ? count : most;
}

#endif
