// Rotary position embedding of q and k, and the cache that k and v go into.
//
// Plain version, for token i and head h (NumPy: layers.apply_rope, KVCache.append):
//
//     for j < d/2:  q'[j]       = q[j] * cos[i, j] - q[j + d/2] * sin[i, j]
//                   q'[j + d/2] = q[j + d/2] * cos[i, j] + q[j] * sin[i, j]        k likewise
//     keys[slot i, position i] = k',  values[slot i, position i] = v
//
// cos and sin are NumPy's own, computed in float64 and uploaded: a GPU's sine has other last bits. A thread rotates one
// pair. The fused kernel rotates k on its way into the cache: one launch instead of two, and k' is never read again.
// For decoded tokens attention.cu does both.
#include "rope.cuh"

// q_rotated (N, H, d) and k_rotated (N, G, d); grid (ceil((H + G) * d/2 / blockDim), N).
extern "C" __global__ void rope(const float* q, const float* k, const float* cos, const float* sin, int heads,
                                int kv_heads, int head_dim, float* q_rotated, float* k_rotated) {
    const int half = head_dim / 2, token = blockIdx.y, pair = blockIdx.x * blockDim.x + threadIdx.x;
    if (pair >= (heads + kv_heads) * half) return;
    const int j = pair % half, h = pair / half;
    const bool is_query = h < heads;
    const size_t at = is_query ? ((size_t)token * heads + h) * head_dim
                               : ((size_t)token * kv_heads + h - heads) * head_dim;
    const float angle_cos = cos[(size_t)token * half + j], angle_sin = sin[(size_t)token * half + j];
    const Pair y = rotated((is_query ? q : k) + at, j, half, angle_cos, angle_sin);
    float* out = (is_query ? q_rotated : k_rotated) + at;
    out[j] = y.first;
    out[j + half] = y.second;
}

// Writes k and v (N, G, d) into the cache; grid (ceil(G * d / blockDim), N).
template <class T>
__device__ inline void append(const float* k, const float* v, const long long* slots, const long long* positions,
                              Pages pages, T* keys, T* values, int* trouble) {
    const int token = blockIdx.y, i = blockIdx.x * blockDim.x + threadIdx.x, width = pages.kv_heads * pages.head_dim;
    if (i >= width) return;
    const size_t to = place_of(pages, slots[token], positions[token], 0) + i;
    keep(keys[to], k[(size_t)token * width + i], token, trouble);
    keep(values[to], v[(size_t)token * width + i], token, trouble);
}

// Rotates q to q_rotated and k into the cache, and writes v into the cache; grid as for `rope`.
template <class T>
__device__ inline void rope_append(const float* q, const float* k, const float* v, const float* cos, const float* sin,
                                   const long long* slots, const long long* positions, int heads, Pages pages,
                                   float* q_rotated, T* keys, T* values, int* trouble) {
    const int half = pages.head_dim / 2, token = blockIdx.y, pair = blockIdx.x * blockDim.x + threadIdx.x;
    if (pair >= (heads + pages.kv_heads) * half) return;
    const int j = pair % half, h = pair / half;
    const float angle_cos = cos[(size_t)token * half + j], angle_sin = sin[(size_t)token * half + j];
    if (h < heads) {
        const size_t at = ((size_t)token * heads + h) * pages.head_dim;
        const Pair y = rotated(q + at, j, half, angle_cos, angle_sin);
        q_rotated[at + j] = y.first;
        q_rotated[at + j + half] = y.second;
        return;
    }
    const int g = h - heads;
    const size_t from = ((size_t)token * pages.kv_heads + g) * pages.head_dim;
    const size_t to = place_of(pages, slots[token], positions[token], g);
    const Pair y = rotated(k + from, j, half, angle_cos, angle_sin);
    keep(keys[to + j], y.first, token, trouble);
    keep(keys[to + j + half], y.second, token, trouble);
    keep(values[to + j], v[from + j], token, trouble);
    keep(values[to + j + half], v[from + j + half], token, trouble);
}

// k or v (N, G, d) in int8, each row of d with a scale of its own: x_q = round(x / scale), scale = max|x| / 127.
// One block a row; grid (G, N, 2), 0 for k and 1 for v.
extern "C" __global__ void append_int8(const float* k, const float* v, const long long* slots,
                                       const long long* positions, const int* table, int pages_per_slot, int page_size,
                                       int kv_heads, int head_dim, signed char* keys, signed char* values,
                                       float* key_scales, float* value_scales, int* trouble) {
    __shared__ int scratch[32];
    const Pages pages{table, pages_per_slot, page_size, kv_heads, head_dim};
    const int g = blockIdx.x, token = blockIdx.y;
    const bool is_key = blockIdx.z == 0;
    const float* x = (is_key ? k : v) + ((size_t)token * kv_heads + g) * head_dim;
    const size_t to = place_of(pages, (int)slots[token], (int)positions[token], g);
    float largest = 0;
    for (int i = threadIdx.x; i < head_dim; i += blockDim.x) largest = Max::combine(largest, fabsf(x[i]));
    largest = block_largest(largest, scratch);
    const float scale = fmaxf(largest, 1e-30f) / 127.0f;
    if (threadIdx.x == 0) {
        if (!is_finite(largest)) complain(trouble, CACHE, token);
        float* scales = is_key ? key_scales : value_scales;  // by itself: g++ 12's sanitizer stumbles over both in one
        scales[to / head_dim] = scale;
    }
    for (int i = threadIdx.x; i < head_dim; i += blockDim.x)
        (is_key ? keys : values)[to + i] = (signed char)fminf(fmaxf(rintf(x[i] / scale), -127.0f), 127.0f);
}

#define FOR_A_CACHE_OF(T, NAME)                                                                                        \
    extern "C" __global__ void append_##NAME(const float* k, const float* v, const long long* slots,                   \
                                             const long long* positions, const int* table, int pages_per_slot,         \
                                             int page_size, int kv_heads, int head_dim, T* keys, T* values,            \
                                             int* trouble) {                                                           \
        const Pages pages{table, pages_per_slot, page_size, kv_heads, head_dim};                                       \
        append(k, v, slots, positions, pages, keys, values, trouble);                                                  \
    }                                                                                                                  \
    extern "C" __global__ void rope_append_##NAME(                                                                     \
        const float* q, const float* k, const float* v, const float* cos, const float* sin, const long long* slots,    \
        const long long* positions, int heads, const int* table, int pages_per_slot, int page_size, int kv_heads,      \
        int head_dim, float* q_rotated, T* keys, T* values, int* trouble) {                                            \
        const Pages pages{table, pages_per_slot, page_size, kv_heads, head_dim};                                       \
        rope_append(q, k, v, cos, sin, slots, positions, heads, pages, q_rotated, keys, values, trouble);              \
    }
FOR_A_CACHE_OF(float, float32)
FOR_A_CACHE_OF(f16, float16)
FOR_A_CACHE_OF(bf16, bfloat16)
