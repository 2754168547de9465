// Attention of decoded tokens, each of another sequence, from q, k and v as their products leave them: RoPE and the
// cache's append are done here too.
//
// The arithmetic and its order are those of attention.cu for one token per block (its plain version, `scores` and
// `values`), so the bits are the same. What differs is when a block asks for memory: while one token is decoded, a kernel
// of attention is a chain of waits for memory and little else. Here a chunk of earlier keys or values comes by
// asynchronous copies while q, k, v, cos and sin are read in one round, a row's scores are read four at a time, and each
// exponential is computed once for both the sum and the pattern.
//
// head_dim: a multiple of STEP up to MAX_DIM. A cache of 32 or 16 bits. Up to TILE query heads per kv head.
// Grid: chunks, G, N. Shared: the chunk as `kept_at` lays it out. group: H / G.
//
// No block reads a key that another block writes: a block writes the key and value of its own token only, each token
// belongs to another sequence (`decodes` of cache.py; a padded batch repeats its last token, at one position), and pages
// that sequences share are written by none of them.
#include "attention.cuh"
#include "rope.cuh"

constexpr int MAX_DIM = WARPS * COLUMNS;
constexpr int QUERY_PITCH = MAX_DIM + 2, PATTERN_PITCH = CHUNK + 2;  // rows 16 bytes apart in the banks
static_assert(CHUNK == 32 * WARPS, "a thread finds one key's place");
static_assert(TILE * MAX_DIM / 8 <= 32 * WARPS, "a thread turns eight numbers, of any row");

struct alignas(16) Two {  // what one load from shared memory brings
    double element[2];
};

// The new keys and values, k and v (N, G, d) before RoPE; cos, sin (N, d/2); and the layer's cache, to write them into.
template <class T> struct NewKeys {
    const float *k, *v, *cos, *sin;
    T *keys, *values;
    int* trouble;
};

// What a block computes with: the keys of one chunk that a token sees.
struct Part {
    int token, kv_head, slot;
    int start, position;  // the first position that it sees, and its own
    int chunks, first;    // the number of chunks that it sees, and the first position of this one

    __device__ __forceinline__ bool is_empty() const { return first > position; }
    // The token's own place in this chunk; past the end in all chunks but the last.
    __device__ __forceinline__ int own() const { return position - first; }
    __device__ __forceinline__ bool has_own() const { return own() < CHUNK; }
    // The number of the first of its query heads, token * H + head.
    __device__ __forceinline__ size_t first_head(const Pages& pages, int group) const {
        return ((size_t)token * pages.kv_heads + kv_head) * group;
    }
};

__device__ __forceinline__ Part part_of(const long long* slots, const long long* positions, int window) {
    const int token = blockIdx.z, slot = (int)__ldcg(slots + token), position = (int)__ldcg(positions + token);
    const int start = first_seen(position, window), chunk = start / CHUNK + blockIdx.x;
    return {token, (int)blockIdx.y, slot, start, position, position / CHUNK - start / CHUNK + 1, chunk * CHUNK};
}

// So many lanes, a power of two of at least `count`, are 1 << this.
__device__ __forceinline__ int shift_for(int count) { return 32 - __clz(count - 1); }

// Where element 0 of a key or value of the chunk lies in shared memory. Rows are padded, and every four of them again, so
// that no two lanes of a quarter-warp share a bank, whether they read 8 neighbouring keys or every fourth of 16.
template <class T> __device__ __forceinline__ int kept_at(int key, int d) {
    return key * (d + STEP) + key / 4 * (32 / (int)sizeof(T));
}
template <class T> __device__ __forceinline__ Four<T>& kept_4(T* kept, int key, int d, int e) {
    return *reinterpret_cast<Four<T>*>(kept + kept_at<T>(key, d) + e);
}

// Writes the place of each key (or value) of the chunk to `where`, -1 for one that is not seen, and starts copying them
// into `kept`, but for the token's own. Keys not seen are zeros. copies_wait returns when they have arrived.
template <class T>
__device__ __forceinline__ void ask_for_chunk(T* kept, long long* where, const T* pool, const Pages& pages,
                                              const Part& part) {
    const int j = part.first + threadIdx.x;
    long long place = -1;
    if (part.start <= j && j <= part.position)
        place = (long long)place_in(pages, __ldcg(entry_of(pages, part.slot, j)), j, part.kv_head);
    where[threadIdx.x] = place;
    __syncthreads();
    constexpr int IN_PIECE = 16 / sizeof(T);
    const int pieces = pages.head_dim / IN_PIECE;  // of a key: 2, ..., 32
    const int shift = shift_for(pieces);           // 1 << shift lanes take one; the last idle where they are too many
    const int keys = 32 >> shift;                  // at a time, of a warp
    const int piece = lane_of_warp() & ((1 << shift) - 1);
    const int own = part.own(), end = piece < pieces ? min(CHUNK, (own / STEP + 1) * STEP) : 0;
    int key = warp_of_block() * keys + (lane_of_warp() >> shift);
    pool += piece * IN_PIECE, kept += kept_at<T>(key, pages.head_dim) + piece * IN_PIECE;
#pragma unroll 8
    for (; key < end; key += WARPS * keys, kept += kept_at<T>(WARPS * keys, pages.head_dim)) {
        const long long at = where[key];
        if (key != own) copy_async_16(kept, pool + max(at, 0ll), at >= 0);
    }
    copies_commit();
}

__device__ __forceinline__ Four<float> load_4(const float* from) { return *reinterpret_cast<const Four<float>*>(from); }

// Four doubles of shared memory, the first at an even place.
__device__ __forceinline__ void load_4(const Two* from, double (&out)[4]) {
#pragma unroll
    for (int i = 0; i < 4; i++) out[i] = from[i / 2].element[i % 2];
}

// Four neighbours of a head's first half, and the four that they are turned with.
struct Eight {
    Four<float> first, second;
};

__device__ __forceinline__ Eight load_8(const float* first, int half) {
    return {load_4(first), load_4(first + half)};
}

__device__ __forceinline__ Eight turned_8(const Eight& x, const Four<float>& cos, const Four<float>& sin) {
    Eight out;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const Pair y = turned(x.first.element[i], x.second.element[i], cos.element[i], sin.element[i]);
        out.first.element[i] = y.first, out.second.element[i] = y.second;
    }
    return out;
}

template <class T> __device__ __forceinline__ Four<T> keep_4(const Four<float>& x, int token, int* trouble) {
    Four<T> out;
#pragma unroll
    for (int i = 0; i < 4; i++) keep(out.element[i], x.element[i], token, trouble);
    return out;
}

template <class T> __device__ __forceinline__ void store_4(T* to, const Four<T>& four) {
    *reinterpret_cast<Four<T>*>(to) = four;
}

// q (N, H, d), k and v -> scores (N, H, stride), and the key and value of each token in the cache.
template <class T>
__device__ inline void scores_of_part(const float* q, const NewKeys<T>& by, const long long* slots,
                                      const long long* positions, int window, int group, double factor,
                                      const Pages& pages, float* scores, int stride) {
    __shared__ Two query[TILE * QUERY_PITCH / 2];
    __shared__ long long where[CHUNK];
    T* kept = dynamic_shared<T>();
    const Part part = part_of(slots, positions, window);
    if (part.is_empty()) return;  // the others wait
    ask_for_chunk<T>(kept, where, by.keys, pages, part);
    // A thread rotates eight numbers of a query. Those of the first query also rotate the key, and bring the value.
    const int d = pages.head_dim, half = d / 2, shift = shift_for(half / 4);
    const int head = threadIdx.x >> shift, j = 4 * (threadIdx.x & ((1 << shift) - 1));
    const size_t at_k = ((size_t)part.token * pages.kv_heads + part.kv_head) * d + j;
    const float *from_k = by.k + at_k, *from_v = by.v + at_k;
    const float* from_q = q + (part.first_head(pages, group) + head) * d + j;
    const float *from_cos = by.cos + (size_t)part.token * half + j, *from_sin = by.sin + (size_t)part.token * half + j;
    const bool has_query = j < half && head < group, brings_own = j < half && head == 0 && part.has_own();
    Eight x = {}, k, v;
    Four<float> cos = {}, sin = {};
    if (has_query) x = load_8(from_q, half), cos = load_4(from_cos), sin = load_4(from_sin);
    if (brings_own) k = load_8(from_k, half), v = load_8(from_v, half);
    if (j < half && head < TILE) {
        const Eight y = turned_8(x, cos, sin);
        Two* to = query + (head * QUERY_PITCH + j) / 2;
#pragma unroll
        for (int i = 0; i < 4; i += 2) {
            to[i / 2] = {y.first.element[i], y.first.element[i + 1]};
            to[half / 2 + i / 2] = {y.second.element[i], y.second.element[i + 1]};
        }
    }
    if (brings_own) {
        const long long at = where[part.own()] + j;
        const Eight y = turned_8(k, cos, sin);
        const Four<T> first = keep_4<T>(y.first, part.token, by.trouble);
        const Four<T> second = keep_4<T>(y.second, part.token, by.trouble);
        kept_4(kept, part.own(), d, j) = first, kept_4(kept, part.own(), d, j + half) = second;
        store_4(by.keys + at, first), store_4(by.keys + at + half, second);
        store_4(by.values + at, keep_4<T>(v.first, part.token, by.trouble));
        store_4(by.values + at + half, keep_4<T>(v.second, part.token, by.trouble));
    }
    copies_wait<0>();
    __syncthreads();

    const int row = lane_of_warp() / 4, t = lane_of_warp() % 4, of_warp = warp_of_block() * KEYS;
    if (part.first + of_warp > part.position || part.first + of_warp + KEYS <= part.start) return;
    double sum[4][2] = {};
#pragma unroll 2
    for (int e = 0; e < d; e += STEP) {
        double key[4][4], a[4];
#pragma unroll
        for (int tile = 0; tile < 4; tile++) {
            const Four<T> four = kept_4(kept, of_warp + tile * TILE + row, d, e + 4 * t);
#pragma unroll
            for (int m = 0; m < 4; m++) key[tile][m] = (double)as_float(four.element[m]);
        }
        load_4(query + (row * QUERY_PITCH + e + 4 * t) / 2, a);
        mma_f64(sum, a, key);
    }
    if (row >= group) return;
    const Row mine = {part.first_head(pages, group) + row, part.start, part.position};
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const int at = part.first + of_warp + i / 2 * TILE + 2 * t + i % 2;
        if (part.start <= at && at <= part.position)
            scores[score_of(mine, at, stride)] = (float)(sum[i / 2][i % 2] * factor);
    }
}

// The softmax of a row of `count` scores, by a warp; CHUNK of them, from number `from` on, go to `pattern`, which holds
// zeros. from: negative where the chunk begins before them.
__device__ __forceinline__ void pattern_of_row(const float* row, int count, int from, double* pattern) {
    constexpr int AT_ONCE = 4;
    const float least = -__uint_as_float(0x7f800000u);
    const int lane = lane_of_warp();
    float largest = least;
    for (int base = lane; base < count; base += 32 * AT_ONCE) {
        float x[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) x[i] = base + 32 * i < count ? row[base + 32 * i] : least;
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) largest = Max::combine(largest, x[i]);
    }
    largest = warp_max(largest);
    double sum = 0;  // NaN when a score is, and for Inf - Inf
    for (int base = lane; base < count; base += 32 * AT_ONCE) {
        double e[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++)
            e[i] = exp((double)((base + 32 * i < count ? row[base + 32 * i] : largest) - largest));
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            if (base + 32 * i >= count) continue;
            sum += e[i];
            const int place = base + 32 * i - from;
            if (0 <= place && place < CHUNK) pattern[place] = e[i];
        }
    }
    sum = warp_sum(sum);
    __syncwarp();
#pragma unroll
    for (int i = 0; i < CHUNK / 32; i++) {
        const int place = lane + 32 * i;
        if (0 <= place + from && place + from < count) pattern[place] = (float)(pattern[place] / sum);
    }
}

// scores (N, H, stride) -> z (N, H, d).  parts (N, H, chunks, d) and done (N, G) zeros: room to work in.
template <class T>
__device__ inline void values_of_part(const float* scores, int stride, const T* values, const long long* slots,
                                      const long long* positions, int window, int group, const Pages& pages,
                                      double* parts, int* done, float* z) {
    __shared__ Two pattern[TILE * PATTERN_PITCH / 2];
    __shared__ long long where[CHUNK];
    __shared__ bool is_last;
    T* kept = dynamic_shared<T>();
    const Part part = part_of(slots, positions, window);
    if (part.is_empty()) return;  // the others wait
    ask_for_chunk<T>(kept, where, values, pages, part);
    for (int i = threadIdx.x; i < TILE * PATTERN_PITCH / 2; i += 32 * WARPS) pattern[i] = {};
    __syncthreads();
    const int d = pages.head_dim, lane = lane_of_warp();
    const size_t head = part.first_head(pages, group);
    const bool brings_own = part.has_own() && 4 * (int)threadIdx.x < d;
    Four<T> own;  // `scores` has written it
    if (brings_own) own = *reinterpret_cast<const Four<T>*>(values + where[part.own()] + 4 * threadIdx.x);
    for (int r = warp_of_block(); r < group; r += WARPS) {
        const Row mine = {head + r, part.start, part.position};
        const float* row = scores + score_of(mine, part.start, stride);
        double* to = reinterpret_cast<double*>(pattern) + r * PATTERN_PITCH;
        pattern_of_row(row, part.position + 1 - part.start, part.first - part.start, to);
    }
    if (brings_own) kept_4(kept, part.own(), d, 4 * threadIdx.x) = own;
    copies_wait<0>();
    __syncthreads();

    const int row = lane / 4, t = lane % 4, column_0 = warp_of_block() * COLUMNS;  // of my warp; a lane reads four
    if (column_0 < d) {
        double sum[4][2] = {};
        const int from = max(0, part.start - part.first) / STEP * STEP, to = min(CHUNK, part.own() + 1);
#pragma unroll 2
        for (int step = from; step < to; step += STEP) {
            double value[4][4], a[4];
#pragma unroll
            for (int m = 0; m < 4; m++) {
                const Four<T> four = kept_4(kept, step + 4 * t + m, d, column_0 + 4 * row);
#pragma unroll
                for (int i = 0; i < 4; i++) value[i][m] = (double)as_float(four.element[i]);
            }
            load_4(pattern + (row * PATTERN_PITCH + step + 4 * t) / 2, a);
            mma_f64(sum, a, value);
        }
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const int column = column_0 + 4 * (2 * t + i % 2) + i / 2;
            if (row >= group || column >= d) continue;
            const double total = 0.0 + sum[i / 2][i % 2];  // as sums of chunks begin
            if (part.chunks == 1)
                z[(head + row) * d + column] = (float)total;
            else
                parts[((head + row) * gridDim.x + blockIdx.x) * d + column] = total;
        }
    }
    if (part.chunks == 1) return;
    __threadfence();  // my parts can be seen before I am counted
    __syncthreads();
    int* count = done + (size_t)part.token * pages.kv_heads + part.kv_head;
    if (threadIdx.x == 0) is_last = atomicAdd(count, 1) == part.chunks - 1;
    __syncthreads();
    if (!is_last) return;
    __threadfence();
    for (int r = 0; r < group && (int)threadIdx.x < d; r++) {
        const double* of_chunk = parts + (head + r) * gridDim.x * d + threadIdx.x;
        double sum = 0;
#pragma unroll 4
        for (int chunk = 0; chunk < part.chunks; chunk++) sum += of_chunk[(size_t)chunk * d];
        z[(head + r) * d + threadIdx.x] = (float)sum;
    }
    if (threadIdx.x == 0) *count = 0;  // as it was found
}

#define FOR_A_CACHE_OF(T, NAME)                                                                                        \
    extern "C" __global__ void A_BLOCK attention_scores_decode_##NAME(                                                 \
        const float* q, const float* k, const float* v, const float* cos, const float* sin, T* keys, T* values,        \
        const long long* slots, const long long* positions, int window, int group, double factor, const int* table,    \
        int pages_per_slot, int page_size, int kv_heads, int head_dim, float* scores, int stride, int* trouble) {      \
        const Pages pages{table, pages_per_slot, page_size, kv_heads, head_dim};                                       \
        const NewKeys<T> by{k, v, cos, sin, keys, values, trouble};                                                   \
        scores_of_part(q, by, slots, positions, window, group, factor, pages, scores, stride);                         \
    }                                                                                                                  \
    extern "C" __global__ void A_BLOCK attention_values_decode_##NAME(                                                 \
        const float* scores, int stride, const T* values, const long long* slots, const long long* positions,          \
        int window, int group, const int* table, int pages_per_slot, int page_size, int kv_heads, int head_dim,        \
        double* parts, int* done, float* z) {                                                                          \
        const Pages pages{table, pages_per_slot, page_size, kv_heads, head_dim};                                       \
        values_of_part(scores, stride, values, slots, positions, window, group, pages, parts, done, z);                \
    }
FOR_A_CACHE_OF(float, float32)
FOR_A_CACHE_OF(f16, float16)
FOR_A_CACHE_OF(bf16, bfloat16)
