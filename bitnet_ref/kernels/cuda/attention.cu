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

// Writes the key and value of a token and kv head into the cache. The block sees them after its next barrier.
template <class T>
__device__ __forceinline__ void append(const NewKeys<T>& added, const Pages& pages, const Run& run, int kv_head) {
    const int d = pages.head_dim;
    const size_t from = ((size_t)run.token * pages.kv_heads + kv_head) * d;
    const size_t to = place_of(pages, run.slot, run.position, kv_head);
    for (int j = threadIdx.x, half = d / 2; j < half; j += blockDim.x) {
        const size_t at = (size_t)run.token * half + j;
        const Pair key = rotated(added.k + from, j, half, added.cos[at], added.sin[at]);
        const float values[2] = {added.v[from + j], added.v[from + j + half]};
        keep(added.keys[to + j], key.first, run.token, added.trouble);
        keep(added.keys[to + j + half], key.second, run.token, added.trouble);
        keep(added.values[to + j], values[0], run.token, added.trouble);
        keep(added.values[to + j + half], values[1], run.token, added.trouble);
    }
}

// Rotates `live` neighbouring heads of a token into rows of `query`, padded with zeros to `width`. A thread computes
// whole pairs, and its loads of AT_ONCE pairs are issued together: one wait for a group of 4 heads of 128.
template <class T>
__device__ __forceinline__ void stage_rotated(const NewKeys<T>& by, const float* heads, int token, int live, int d,
                                              int width, double* query) {
    constexpr int AT_ONCE = 2;
    const int half = d / 2, pairs = live * half, pitch = width + 2;
    const float *cos = by.cos + (size_t)token * half, *sin = by.sin + (size_t)token * half;
    for (int base = threadIdx.x; base < pairs; base += AT_ONCE * blockDim.x) {
        Pair y[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            const int pair = min(base + i * (int)blockDim.x, pairs - 1), j = pair % half;
            y[i] = rotated(heads + pair / half * d, j, half, cos[j], sin[j]);
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            const int pair = base + i * (int)blockDim.x;
            if (pair >= pairs) break;
            double* const to = query + pair / half * pitch + pair % half;
            to[0] = y[i].first;
            to[half] = y[i].second;
        }
    }
    for (int i = threadIdx.x; i < live * (width - d); i += blockDim.x)
        query[i / (width - d) * pitch + d + i % (width - d)] = 0;
}

// q (N, H, d) -> scores (N, H, stride). Grid: chunks, G, tokens / tokens_each.
// Shared: rows_at_once * (d in whole STEPs + 2) doubles. added: null, or what is rotated and appended here; then
// tokens_each is 1, and q is rotated here too.
template <class T, int TILES>
__device__ inline void scores_of_chunk(const float* q, const NewKeys<T>* added, const T* keys, const float* scales,
                                       const long long* slots, const long long* positions, int n, int tokens_each,
                                       int rows_at_once, int window, int heads, double factor, Pages pages,
                                       float* scores, int stride) {
    constexpr int LINE = 128 / sizeof(T);
    constexpr int IN_FLIGHT = TILES > 1 ? 1 : sizeof(T) == 4 ? 4 : 8;  // steps: 64 registers of loads
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
            // On their way while the queries are rotated; 4 lanes share a key.
            if (TILES == 1 && place[tile] >= 0)
                for (int e = t * LINE; e < d; e += 4 * LINE) prefetch_line(keys + place[tile] + e);
        }
        if constexpr (sizeof(T) > 1) {
            if (added && last / CHUNK == chunk) append(*added, pages, run, kv_head);
        }
        for (int row_0 = 0; row_0 < run.tokens * group; row_0 += rows_at_once) {
            const int live = min(run.tokens * group - row_0, rows_at_once), tiles = (live + TILE - 1) / TILE;
            __syncthreads();  // the previous rows have been read
            if (added)
                stage_rotated(*added, q + row_of(run, row_0, kv_head, group, heads, window).at * d, run.token, live, d,
                              width, query);
            else
                for (int i = threadIdx.x; i < tiles * TILE * width; i += blockDim.x) {
                    const int r = i / width, e = i % width;
                    const Row mine = row_of(run, row_0 + r, kv_head, group, heads, window);
                    query[r * pitch + e] = r < live && e < d ? q[mine.at * d + e] : 0;
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
                        for (int m = 0; m < 4; m++)
                            a[m] = u * TILE + row < live ? query[(u * TILE + row) * pitch + e + 4 * t + m] : 0;
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

constexpr float MINUS_INF = -__builtin_huge_valf();  // the score of a key that is not seen: its e is 0

// Scores are loaded AT_ONCE per lane, to wait for memory once. Each lane adds its own in their order.
__device__ inline Normaliser normaliser(const float* row, int count) {
    constexpr int AT_ONCE = 8;
    float largest = MINUS_INF;
    for (int base = 0; base < count; base += 32 * AT_ONCE) {
        float score[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            const int j = base + 32 * i + lane_of_warp();
            score[i] = j < count ? row[j] : MINUS_INF;
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) largest = Max::combine(largest, score[i]);
    }
    largest = warp_max(largest);
    double sum = 0;  // NaN when a score is, and for Inf - Inf
    for (int base = 0; base < count; base += 32 * AT_ONCE) {
        float score[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            const int j = base + 32 * i + lane_of_warp();
            score[i] = j < count ? row[j] : MINUS_INF;
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++)
            if (base + 32 * i < count) sum += exp((double)(score[i] - largest));
    }
    return {largest, warp_sum(sum)};
}

// (float)(e / sum), by products: a double division takes some 200 cycles, and the divisor is the same in a whole row.
// e <= 1 <= sum. `inverse`, 1 / sum, is rounded once; the first correction brings the quotient within one unit of its
// last place, from where the second one rounds as a division does (Markstein 1990). For e below 2^-900 it need not, but
// then the float is 0 either way.
__device__ __forceinline__ float divided(double e, double sum, double inverse) {
    double quotient = e * inverse;
    quotient = __fma_rn(__fma_rn(-quotient, sum, e), inverse, quotient);
    return (float)__fma_rn(__fma_rn(-quotient, sum, e), inverse, quotient);
}

// The pattern of one row over the chunk that begins at position `first`, by a warp; zeros for keys that it does not see.
// scores: from the row's first key on. A row of a single chunk computes its e once, for the sum and for the pattern.
// Its lane's keys then begin with the row's first key and wrap around, so that the order is that of `normaliser`.
__device__ inline void soften_row(const float* scores, Row row, int first, bool single, double* pattern) {
    constexpr int EACH = CHUNK / 32;  // of a lane
    const int count = row.last + 1 - row.first, begin = (single ? row.first - first : 0) + lane_of_warp();
    float score[EACH];
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        const int j = first + (begin + 32 * i) % CHUNK;
        score[i] = row.first <= j && j <= row.last ? scores[j - row.first] : MINUS_INF;
    }
    Normaliser norm = {MINUS_INF, 0};
    if (single) {
#pragma unroll
        for (int i = 0; i < EACH; i++) norm.largest = Max::combine(norm.largest, score[i]);
        norm.largest = warp_max(norm.largest);
    } else {
        norm = normaliser(scores, count);
    }
    double e[EACH];
#pragma unroll
    for (int i = 0; i < EACH; i++) e[i] = !single || 32 * i < count ? exp((double)(score[i] - norm.largest)) : 0;
    if (single) {
#pragma unroll
        for (int i = 0; i < EACH; i++) norm.sum += e[i];
        norm.sum = warp_sum(norm.sum);
    }
    const double inverse = 1 / norm.sum;
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        const int at = (begin + 32 * i) % CHUNK, j = first + at;
        pattern[at] = row.first <= j && j <= row.last ? divided(e[i], norm.sum, inverse) : 0;
    }
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
    constexpr int ROWS = TILES * TILE, IN_FLIGHT = TILES == 1 ? 4 : 1, LINE = 128 / sizeof(T);
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
            for (int r = warp_of_block(); norms != nullptr && r < live; r += WARPS) {
                const Row mine = row_of(run, row_0 + r, kv_head, group, heads, window);
                if (lane_of_warp() == 0) norm[r] = norms[mine.at];
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
                        if (TILES == 1 && where[i] >= 0)  // on its way while the pattern is computed
                            for (int e = 0; e < d; e += LINE) prefetch_line(values + where[i] + e);
                    }
                    if (norms == nullptr)
                        for (int r = warp_of_block(); r < live; r += WARPS) {
                            const Row mine = row_of(run, row_0 + r, kv_head, group, heads, window);
                            soften_row(scores + score_of(mine, mine.first, stride), mine, first, chunks == 1,
                                       pattern + r * PITCH);
                        }
                    else
                        for (int i = threadIdx.x; i < live * CHUNK; i += blockDim.x) {
                            const int r = i / CHUNK, j = first + i % CHUNK;
                            const Row mine = row_of(run, row_0 + r, kv_head, group, heads, window);
                            float p = 0;
                            if (mine.first <= j && j <= mine.last)
                                p = (float)(exp((double)(scores[score_of(mine, j, stride)] - norm[r].largest)) / norm[r].sum);
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
                                for (int m = 0; m < 4; m++)
                                    a[m] = u * TILE + row < live ? pattern[(u * TILE + row) * PITCH + step + 4 * t + m] : 0;
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
