// Attention of N tokens, each over the tokens that it sees of its own sequence, through the cache's page tables.
//
// Plain version, for token i and head h, whose keys are those of kv head g = h / (H/G) (NumPy: layers.py):
//
//     score[j]   = (float)(sum over d of q[d] * key[j][d]) * d^-1/2)     for each of the S keys j that token i sees
//     pattern[j] = (float)(e[j] / sum of e),   e[j] = exp((float)(score[j] - max score))
//     z[d]       = (float)(sum over j of pattern[j] * value[j][d])
//
// Sums and exponentials are float64 and rounded to float32 where NumPy rounds them, since z becomes the next int8. Both
// sums are matrix products, and the tensor cores of a data centre's GPU multiply float64 twice as fast as its other
// units: a prompt of 2,048 tokens of 2B-4T needs 644 GFLOP here, 10 ms at the 67 TFLOP/s of an H200, as long as its
// ternary linears take in int8.
//
// Keys come in chunks of CHUNK positions, counted from position 0 of the sequence. A block takes one kv head and a run:
// consecutive tokens of one sequence, with at most 32 rows. A row is one query head of the group of one token; all rows
// of a run read the same keys, 8 rows in each product.
//
//     scores:       the run's rows against one chunk, to memory. For decoded tokens, each of another sequence, it also
//                   does RoPE and the append: each block rotates the queries that it reads, and the block of the
//                   token's own chunk writes its key and value into the cache. No block reads a key that another one
//                   writes: each token has its own sequence, and none of them writes to a shared page.
//     normalisers:  max and sum of e of every row, once, where many blocks need them (a prompt). Else each block of
//                   `values` computes them itself: S numbers are few beside S keys, and it saves a launch.
//     values:       the pattern of a chunk, times the chunk's values. In a prompt a block goes through all chunks of
//                   its run. While one token is decoded that would leave most of the GPU idle, so there a block takes
//                   one chunk, and the last block to finish adds the chunks' parts.
//
// Either way the same instructions compute a row's sums in the same order, 16 columns at a time, and chunk by chunk; a
// key that a token does not see counts as zero, which changes no sum. So the order depends only on the token's position
// and window: not on the rest of the batch, the length of the run, or which block was last.
//
// To be compared in speed on a GPU: sm_90 has a product of 16 x 8 x 16 (m16n8k16). It may add in another order, so
// decoding would have to use it as well, with 8 of its 16 rows idle.
#include "early.cuh"
#include "mma.cuh"
#include "rope.cuh"

constexpr int CHUNK = 128;           // keys
constexpr int WARPS = 4;             // of a block
constexpr int TILE = 8;              // rows, and columns, of a product
constexpr int STEP = 16;             // what a product sums over: lane t of 4 has the elements 4t, ..., 4t + 3
constexpr int KEYS = CHUNK / WARPS;  // of a warp, in `scores`
constexpr int COLUMNS = 32;          // of a warp, in `values`: 4 per lane
static_assert(KEYS == 4 * TILE && COLUMNS == 4 * TILE, "four tiles of columns a warp");

// The first position that a token sees; `position` itself is the last.
__device__ __forceinline__ int first_seen(int position, int window) {
    return window > 0 && position >= window ? position - window + 1 : 0;
}

struct Row {          // a head of a token
    size_t at;        // token * H + head
    int first, last;  // positions that it sees
};

// Where row `row` of scores (N, H, stride) has the one of position j: it begins with the chunk of the first key seen.
__device__ __forceinline__ size_t score_of(Row row, int j, int stride) {
    return row.at * stride + j - row.first / CHUNK * CHUNK;
}

// Four neighbours of a key or value as the cache stores them.
template <class T> struct alignas(4 * sizeof(T)) Four {
    T element[4];
};

// Without the 2, a minimum of blocks per multiprocessor, ptxas spills to stay at 128 registers.
#define A_BLOCK __launch_bounds__(32 * WARPS, 2)
constexpr int PITCH = CHUNK + 4;  // of the pattern in shared memory: rows 32 bytes apart in its banks

struct Run {             // tokens of one sequence that follow each other
    int token, tokens;   // in the batch: the first, and how many
    int slot, position;  // of the first
};

__device__ inline Run run_from(int token, int end, const long long* slots, const long long* positions) {
    Run run = {token, 1, (int)slots[token], (int)positions[token]};
    while (token + run.tokens < end && slots[token + run.tokens] == run.slot &&
           positions[token + run.tokens] == run.position + run.tokens)
        run.tokens++;
    return run;
}

__device__ __forceinline__ Row row_of(const Run& run, int number, int kv_head, int group, int heads, int window) {
    const int position = run.position + number / group;
    const size_t at = (size_t)(run.token + number / group) * heads + kv_head * group + number % group;
    return {at, first_seen(position, window), position};
}

// Elements e, ..., e + 3 of the key or value whose element 0 is at `place`; zeros if `place` is negative.
template <class T> __device__ __forceinline__ Four<T> load_4(const T* kept, long long place, int d, int e) {
    Four<T> four = {};
    const bool here = (place >= 0) & (e < d);
    if (d % 4 == 0) {
        if (here) four = *reinterpret_cast<const Four<T>*>(kept + place + e);
    } else {
        for (int i = 0; i < 4; i++)
            if (here && e + i < d) four.element[i] = kept[place + e + i];
    }
    return four;
}

// Their values as floats. scales: of int8, one for each d numbers.
template <class T>
__device__ __forceinline__ void widen_4(Four<T> four, const float* scales, long long place, int d, double (&out)[4]) {
    const float scale = sizeof(T) == 1 && place >= 0 ? scales[place / d] : 1;
#pragma unroll
    for (int i = 0; i < 4; i++)
        out[i] = sizeof(T) == 1 ? (double)(as_float(four.element[i]) * scale) : (double)as_float(four.element[i]);
}

// What comes with q (N, H, d) before RoPE: k and v (N, G, d), which go into the cache; cos, sin (N, d/2).
template <class T> struct NewKeys {
    const float *k, *v, *cos, *sin;
    T *keys, *values;
    int* trouble;
};

// Element e of a token's head of d numbers, rotated.
template <class T>
__device__ __forceinline__ float rotated_element(const NewKeys<T>& by, int token, const float* head, int e, int d) {
    const int half = d / 2, j = e < half ? e : e - half;
    const size_t at = (size_t)token * half + j;
    const Pair y = rotated(head, j, half, by.cos[at], by.sin[at]);
    return e < half ? y.first : y.second;
}

// Writes the key and value of a token and kv head into the cache. The block sees them after its next barrier.
template <class T>
__device__ __forceinline__ void append(const NewKeys<T>& added, const Pages& pages, const Run& run, int kv_head) {
    const int d = pages.head_dim;
    const size_t from = ((size_t)run.token * pages.kv_heads + kv_head) * d;
    const size_t to = place_of(pages, run.slot, run.position, kv_head);
    for (int e = threadIdx.x; e < d; e += blockDim.x) {
        const float key = rotated_element(added, run.token, added.k + from, e, d);
        keep(added.keys[to + e], key, run.token, added.trouble);
        keep(added.values[to + e], added.v[from + e], run.token, added.trouble);
    }
}

// q (N, H, d) -> scores (N, H, stride). Grid: chunks, G, tokens / tokens_each.
// Shared: rows_at_once * (d in whole STEPs + 2) doubles. added: null, or what is rotated and appended here; then
// tokens_each is 1, and q is rotated here too.
template <class T, int TILES>
__device__ inline void scores_of_chunk(const float* q, const NewKeys<T>* added, const T* keys, const float* scales,
                                       const long long* slots, const long long* positions, int n, int tokens_each,
                                       int rows_at_once, int window, int heads, double factor, Pages pages,
                                       float* scores, int stride) {
    constexpr int IN_FLIGHT = TILES == 1 ? 4 : 1;  // steps: decoding waits for memory's latency
    double* query = dynamic_shared<double>();
    const int d = pages.head_dim, group = heads / pages.kv_heads, kv_head = blockIdx.y;
    const int width = (d + STEP - 1) / STEP * STEP, pitch = width + 2;  // rows 16 bytes apart in the banks
    const int row = lane_of_warp() / 4, t = lane_of_warp() % 4;
    const int begin = (gridDim.z - 1 - blockIdx.z) * tokens_each, end = min(begin + tokens_each, n);  // long ones first
    for (int token = begin; token < end;) {
        const Run run = run_from(token, end, slots, positions);
        token += run.tokens;
        const int start = first_seen(run.position, window), last = run.position + run.tokens - 1;
        const int chunk = start / CHUNK + blockIdx.x, first = chunk * CHUNK + warp_of_block() * KEYS;  // of my warp
        if (chunk * CHUNK > last) continue;
        long long place[4];  // of the keys that this lane reads; -1 for one that no token of the run sees
#pragma unroll
        for (int tile = 0; tile < 4; tile++) {
            const int j = first + tile * TILE + row;
            place[tile] = start <= j && j <= last ? (long long)place_of(pages, run.slot, j, kv_head) : -1;
        }
        if constexpr (sizeof(T) > 1) {
            if (added && last / CHUNK == chunk) append(*added, pages, run, kv_head);
        }
        for (int row_0 = 0; row_0 < run.tokens * group; row_0 += rows_at_once) {
            const int live = min(run.tokens * group - row_0, rows_at_once), tiles = (live + TILE - 1) / TILE;
            __syncthreads();  // the previous rows have been read
            for (int i = threadIdx.x; i < tiles * TILE * width; i += blockDim.x) {
                const int r = i / width, e = i % width;
                const Row mine = row_of(run, row_0 + r, kv_head, group, heads, window);
                const float* from = q + mine.at * d;
                float x = 0;
                if (r < live && e < d) x = added ? rotated_element(*added, run.token, from, e, d) : from[e];
                query[r * pitch + e] = x;
            }
            __syncthreads();
            if (first > last || first + KEYS <= start) continue;  // nothing for this warp
            double sum[TILES][4][2] = {};
            for (int base = 0; base < width; base += STEP * IN_FLIGHT) {
                Four<T> four[IN_FLIGHT][4];
#pragma unroll
                for (int i = 0; i < IN_FLIGHT * 4; i++)
                    four[i / 4][i % 4] = load_4(keys, place[i % 4], d, base + i / 4 * STEP + 4 * t);
#pragma unroll
                for (int i = 0; i < IN_FLIGHT; i++) {
                    const int e = base + i * STEP;
                    if (IN_FLIGHT > 1 && e >= width) break;
                    double key[4][4];
#pragma unroll
                    for (int tile = 0; tile < 4; tile++) widen_4(four[i][tile], scales, place[tile], d, key[tile]);
#pragma unroll
                    for (int u = 0; u < TILES; u++) {
                        if (TILES > 1 && u >= tiles) continue;
                        double a[4];
#pragma unroll
                        for (int m = 0; m < 4; m++) a[m] = query[(u * TILE + row) * pitch + e + 4 * t + m];
                        mma_f64(sum[u], a, key);
                    }
                }
            }
#pragma unroll
            for (int u = 0; u < TILES; u++) {
                if (u * TILE + row >= live) continue;
                const Row mine = row_of(run, row_0 + u * TILE + row, kv_head, group, heads, window);
#pragma unroll
                for (int i = 0; i < 8; i++) {
                    const int j = first + i / 2 * TILE + 2 * t + i % 2;
                    if (mine.first <= j && j <= mine.last)
                        scores[score_of(mine, j, stride)] = (float)(sum[u][i / 2][i % 2] * factor);
                }
            }
        }
    }
}

// max and sum of e over a row of scores, to every lane of a warp.
struct Normaliser {
    float largest;
    double sum;
};

__device__ inline Normaliser normaliser(const float* row, int count) {
    float largest = -__uint_as_float(0x7f800000u);  // -Inf
    for (int j = lane_of_warp(); j < count; j += 32) largest = Max::combine(largest, row[j]);
    largest = warp_max(largest);
    double sum = 0;  // NaN when a score is, and for Inf - Inf
    for (int j = lane_of_warp(); j < count; j += 32) sum += exp((double)(row[j] - largest));
    return {largest, warp_sum(sum)};
}

__device__ __forceinline__ float softened(float score, Normaliser norm) {
    return (float)(exp((double)(score - norm.largest)) / norm.sum);
}

// scores (N, H, stride) -> norms (N, H), for `values`; a warp a row.
extern "C" __global__ void attention_normalisers(const float* scores, int stride, const long long* positions, int n,
                                                 int window, int heads, Normaliser* norms) {
    wait_for_earlier();
    const int number = blockIdx.x * WARPS + warp_of_block();
    if (number >= n * heads) return;
    const int position = (int)positions[number / heads];
    const Row row = {(size_t)number, first_seen(position, window), position};
    const Normaliser norm = normaliser(scores + score_of(row, row.first, stride), row.last + 1 - row.first);
    if (lane_of_warp() == 0) norms[number] = norm;
}

// Replaces each Inf and NaN among a step's values by 0.   -> a bit for each key that had one, to every lane
__device__ inline unsigned take_out_bad(double (&value)[4][4]) {
    unsigned bad = 0;
#pragma unroll
    for (int m = 0; m < 4; m++) {
        bool here = false;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            if (is_finite(value[i][m])) continue;
            here = true;
            value[i][m] = 0;
        }
        const unsigned lanes = __ballot_sync(ALL_LANES, here);
        for (int t = 0; t < 4; t++)
            if (lanes & 0x11111111u << t) bad |= 1u << (4 * t + m);
    }
    return bad;
}

// Sets the sums of a row to NaN if it sees one of the bad keys. j: the position of the first bit of `bad`.
__device__ inline void give_back_bad(unsigned bad, int j, Row row, double (&sum)[4][2]) {
    for (; bad != 0; j++, bad >>= 1)
        if (bad & 1 && row.first <= j && j <= row.last)
            for (int i = 0; i < 8; i++) sum[i / 2][i % 2] = __uint_as_float(0x7fc00000u);
}

// scores (N, H, stride) -> z (N, H, d). Grid: chunks, or 1 where a block takes all of them; G; tokens / tokens_each.
// Shared: TILES * TILE * PITCH doubles. norms (N, H), or null.
// parts (N, H, chunks, d) and done (N, G) zeros: room to work in.
template <class T, int TILES>
__device__ inline void values_of_chunk(const float* scores, int stride, const Normaliser* norms, const T* values,
                                       const float* scales, const long long* slots,
                                       const long long* positions, int n, int tokens_each, int window, int heads,
                                       Pages pages, double* parts, int* done, float* z) {
    constexpr int ROWS = TILES * TILE, IN_FLIGHT = TILES == 1 ? 2 : 1;
    double* pattern = dynamic_shared<double>();
    __shared__ Normaliser norm[ROWS];
    __shared__ long long where[CHUNK];  // each value's place in the pool; -1 for one that no token of the run sees
    __shared__ bool is_last;
    const int d = pages.head_dim, group = heads / pages.kv_heads, kv_head = blockIdx.y;
    const int row = lane_of_warp() / 4, t = lane_of_warp() % 4;
    const int begin = (gridDim.z - 1 - blockIdx.z) * tokens_each, end = min(begin + tokens_each, n);
    for (int token = begin; token < end;) {
        const Run run = run_from(token, end, slots, positions);
        token += run.tokens;
        const int start = first_seen(run.position, window), last = run.position + run.tokens - 1;
        const int chunks = last / CHUNK - start / CHUNK + 1;
        const bool takes_all = gridDim.x == 1 || chunks == 1;
        if (blockIdx.x >= chunks) continue;
        for (int row_0 = 0; row_0 < run.tokens * group; row_0 += ROWS) {
            const int live = min(run.tokens * group - row_0, ROWS), tiles = (live + TILE - 1) / TILE;
            __syncthreads();  // the previous rows' norms have been read
            for (int r = warp_of_block(); r < live; r += WARPS) {
                const Row mine = row_of(run, row_0 + r, kv_head, group, heads, window);
                const float* from = scores + score_of(mine, mine.first, stride);
                const int count = mine.last + 1 - mine.first;
                const Normaliser found = norms != nullptr ? norms[mine.at] : normaliser(from, count);
                if (lane_of_warp() == 0) norm[r] = found;
            }
            for (int strip = 0; strip < d; strip += WARPS * COLUMNS) {
                const int column_0 = strip + warp_of_block() * COLUMNS;  // of this warp; a lane reads four of them
                double total[TILES][4][2] = {};
                for (int chunk = blockIdx.x; chunk < chunks; chunk += gridDim.x == 1 ? 1 : chunks) {
                    const int first = (start / CHUNK + chunk) * CHUNK;
                    __syncthreads();  // the previous chunk's pattern has been read, the rows' norms are there
                    for (int i = threadIdx.x; i < CHUNK; i += blockDim.x) {
                        const int j = first + i;
                        where[i] = start <= j && j <= last ? (long long)place_of(pages, run.slot, j, kv_head) : -1;
                    }
                    for (int i = threadIdx.x; i < tiles * TILE * CHUNK; i += blockDim.x) {
                        const int r = i / CHUNK, j = first + i % CHUNK;
                        const Row mine = row_of(run, row_0 + r, kv_head, group, heads, window);
                        float p = 0;
                        if (r < live && mine.first <= j && j <= mine.last)
                            p = softened(scores[score_of(mine, j, stride)], norm[r]);
                        pattern[r * PITCH + i % CHUNK] = p;
                    }
                    __syncthreads();
                    if (column_0 >= d) continue;  // nothing for this warp
                    double sum[TILES][4][2] = {};
                    const int from = max(0, start - first) / STEP * STEP, to = min(CHUNK, last + 1 - first);
                    for (int base = from; base < to; base += STEP * IN_FLIGHT) {
                        Four<T> four[IN_FLIGHT][4];
#pragma unroll
                        for (int i = 0; i < IN_FLIGHT * 4; i++) {
                            const int key = base + i / 4 * STEP + 4 * t + i % 4;
                            four[i / 4][i % 4] = load_4(values, key < CHUNK ? where[key] : -1, d, column_0 + 4 * row);
                        }
#pragma unroll
                        for (int i = 0; i < IN_FLIGHT; i++) {
                            const int step = base + i * STEP;
                            if (IN_FLIGHT > 1 && step >= to) break;
                            double value[4][4];
#pragma unroll
                            for (int m = 0; m < 4; m++) {
                                double of_key[4];
                                widen_4(four[i][m], scales, where[step + 4 * t + m], d, of_key);
#pragma unroll
                                for (int column = 0; column < 4; column++) value[column][m] = of_key[column];
                            }
                            // A value that a row does not see is multiplied by 0, so Inf and NaN must be taken out.
                            const bool all_see = run.tokens == 1 || (first_seen(last, window) <= first + step &&
                                                                     first + step + STEP - 1 <= run.position);
                            const unsigned bad = all_see ? 0 : take_out_bad(value);
#pragma unroll
                            for (int u = 0; u < TILES; u++) {
                                if (TILES > 1 && u >= tiles) continue;
                                double a[4];
#pragma unroll
                                for (int m = 0; m < 4; m++) a[m] = pattern[(u * TILE + row) * PITCH + step + 4 * t + m];
                                mma_f64(sum[u], a, value);
                                const Row mine = row_of(run, row_0 + u * TILE + row, kv_head, group, heads, window);
                                if (bad) give_back_bad(bad, first + step, mine, sum[u]);
                            }
                        }
                    }
#pragma unroll
                    for (int u = 0; u < TILES; u++)
#pragma unroll
                        for (int i = 0; i < 8; i++) total[u][i / 2][i % 2] += sum[u][i / 2][i % 2];
                }
#pragma unroll
                for (int u = 0; u < TILES; u++) {
                    if (u * TILE + row >= live) continue;
                    const size_t at = row_of(run, row_0 + u * TILE + row, kv_head, group, heads, window).at;
#pragma unroll
                    for (int i = 0; i < 8; i++) {
                        const int column = column_0 + 4 * (2 * t + i % 2) + i / 2;
                        if (column >= d) continue;
                        if (takes_all)
                            z[at * d + column] = (float)total[u][i / 2][i % 2];
                        else
                            parts[(at * gridDim.x + blockIdx.x) * d + column] = total[u][i / 2][i % 2];
                    }
                }
            }
        }
        if (takes_all) continue;
        __threadfence();  // the parts of this block are visible before it is counted
        __syncthreads();
        int* count = done + (size_t)run.token * pages.kv_heads + kv_head;
        if (threadIdx.x == 0) is_last = atomicAdd(count, 1) == chunks - 1;
        __syncthreads();
        if (!is_last) continue;
        __threadfence();
        for (int i = threadIdx.x; i < run.tokens * group * d; i += blockDim.x) {
            const size_t at = row_of(run, i / d, kv_head, group, heads, window).at;
            double sum = 0;
            for (int chunk = 0; chunk < chunks; chunk++) sum += parts[(at * gridDim.x + chunk) * d + i % d];
            z[at * d + i % d] = (float)sum;
        }
        if (threadIdx.x == 0) *count = 0;  // for the next launch
    }
}

#define FOR_A_CACHE_OF(T, NAME, TILES)                                                                                 \
    extern "C" __global__ void A_BLOCK attention_scores_##TILES##_##NAME(                                              \
        const float* q, const T* keys, const float* scales, const long long* slots, const long long* positions, int n, \
        int tokens_each, int rows_at_once, int window, int heads, double factor, const int* table, int pages_per_slot, \
        int page_size, int kv_heads, int head_dim, float* scores, int stride) {                                        \
        wait_for_earlier();                                                                                            \
        const Pages pages{table, pages_per_slot, page_size, kv_heads, head_dim};                                       \
        scores_of_chunk<T, TILES>(q, nullptr, keys, scales, slots, positions, n, tokens_each, rows_at_once, window,    \
                                  heads, factor, pages, scores, stride);                                               \
    }                                                                                                                  \
    extern "C" __global__ void A_BLOCK attention_values_##TILES##_##NAME(                                              \
        const float* scores, int stride, const Normaliser* norms, const T* values,                                     \
        const float* scales, const long long* slots, const long long* positions, int n, int tokens_each, int window,   \
        int heads, const int* table, int pages_per_slot, int page_size, int kv_heads, int head_dim, double* parts,     \
        int* done, float* z) {                                                                                         \
        wait_for_earlier();                                                                                            \
        const Pages pages{table, pages_per_slot, page_size, kv_heads, head_dim};                                       \
        values_of_chunk<T, TILES>(scores, stride, norms, values, scales, slots, positions, n, tokens_each, window,     \
                                  heads, pages, parts, done, z);                                                       \
    }
FOR_A_CACHE_OF(float, float32, 1)
FOR_A_CACHE_OF(f16, float16, 1)
FOR_A_CACHE_OF(bf16, bfloat16, 1)
FOR_A_CACHE_OF(signed char, int8, 1)
FOR_A_CACHE_OF(float, float32, 4)
FOR_A_CACHE_OF(f16, float16, 4)
FOR_A_CACHE_OF(bf16, bfloat16, 4)
FOR_A_CACHE_OF(signed char, int8, 4)

// Decoded tokens, q, k and v as their products leave them. Grid: chunks, G, N.
#define SCORES_OF_NEW_TOKENS(T, NAME)                                                                                  \
    extern "C" __global__ void A_BLOCK attention_append_scores_##NAME(                                                 \
        const float* q, const float* k, const float* v, const float* cos, const float* sin, T* keys, T* values,        \
        const long long* slots, const long long* positions, int n, int rows_at_once, int window, int heads,            \
        double factor, const int* table, int pages_per_slot, int page_size, int kv_heads, int head_dim, float* scores, \
        int stride, int* trouble) {                                                                                    \
        wait_for_earlier();                                                                                            \
        const Pages pages{table, pages_per_slot, page_size, kv_heads, head_dim};                                       \
        const NewKeys<T> added{k, v, cos, sin, keys, values, trouble};                                                 \
        scores_of_chunk<T, 1>(q, &added, keys, nullptr, slots, positions, n, 1, rows_at_once, window, heads, factor,   \
                              pages, scores, stride);                                                                  \
    }
SCORES_OF_NEW_TOKENS(float, float32)
SCORES_OF_NEW_TOKENS(f16, float16)
SCORES_OF_NEW_TOKENS(bf16, bfloat16)
