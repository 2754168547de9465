// Attention of N tokens, each over what it sees of its own sequence, through the page tables of the cache.
//
// Plain version, for token i and head h, whose keys are those of kv head g = h / (H/G) (NumPy: layers.py):
//
//     score[j]   = (float)(sum over d of q[d] * key[j][d]) * d^-1/2)     for each of the S keys j that token i sees
//     pattern[j] = (float)(e[j] / sum of e),   e[j] = exp((float)(score[j] - max score))
//     z[d]       = (float)(sum over j of pattern[j] * value[j][d])
//
// Sums and exponentials are float64 and rounded to float32 where NumPy rounds them: z is on the way to the next int8.
//
// One block for a token would leave most of the card idle while one sequence is decoded, so the keys are cut into
// chunks, and a block takes (one chunk, one kv head, some tokens). All heads of a group read the same keys, at once.
//
//     scores:  the chunk's scores, to memory.
//     values:  max and sum over all S scores (every block for itself: S numbers are little beside S keys), then the
//              chunk's part of z. The last block to finish adds the parts, in the order of the chunks.
//
// Chunks begin at the first key that the token sees and have CHUNK keys. So every sum has one order, which depends on
// the token's own S only: not on what else is in the batch, how many tokens a block takes, or which block was last.
// In a prompt a block takes several tokens in turn: the chunk's keys then come out of the first-level cache.
#include "floats.cuh"
#include "pages.cuh"

constexpr int CHUNK = 128;    // keys a block
constexpr int LANES = 8;      // threads that share a key
constexpr int HEADS = 4;      // heads that take a key out of a register

struct Seen {  // the keys of one token
    int slot, start, count;
};

__device__ inline Seen seen_by(const long long* slots, const long long* positions, int token, int window) {
    const int position = (int)positions[token];
    const int start = window > 0 && position >= window ? position - window + 1 : 0;
    return {(int)slots[token], start, position + 1 - start};
}

// What a cache keeps, as the float that it stands for. scales: of int8, one for each d numbers; null of other types.
template <class T> __device__ __forceinline__ double widened(T kept, const float* scales, size_t row) {
    return sizeof(T) == 1 ? (double)(as_float(kept) * scales[row]) : (double)as_float(kept);
}

// q (N, H, d) -> scores (N, H, stride); grid (chunks, G, ceil(N / tokens_each)); shared: H/G * d doubles.
template <class T>
__device__ inline void scores_of_chunk(const float* q, const T* keys, const float* scales, const long long* slots,
                                       const long long* positions, int n, int tokens_each, int window, int heads, double factor, Pages pages,
                                       float* scores, int stride) {
    double* query = dynamic_shared<double>();  // (H/G, d)
    const int g = blockIdx.y, d = pages.head_dim, group = heads / pages.kv_heads;
    const int lane = threadIdx.x % LANES, keys_at_once = blockDim.x / LANES;
    for (int token = blockIdx.z * tokens_each; token < n && token < (blockIdx.z + 1) * tokens_each; token++) {
        const Seen seen = seen_by(slots, positions, token, window);
        const int first = blockIdx.x * CHUNK, end = min(first + CHUNK, seen.count);
        if (first >= end) continue;  // the whole block does
        const size_t mine = ((size_t)token * heads + g * group);
        __syncthreads();  // the last token's query has been read
        for (int i = threadIdx.x; i < group * d; i += blockDim.x) query[i] = q[mine * d + i];
        __syncthreads();
        for (int base = first; base < end; base += keys_at_once) {  // the same number of turns for every thread
            const int j = base + threadIdx.x / LANES;
            const size_t place = j < end ? place_of(pages, seen.slot, seen.start + j, g) : 0;
            for (int h = 0; h < group; h += HEADS) {
                double sum[HEADS] = {};
                for (int i = lane; j < end && i < d; i += LANES) {
                    const double x = widened(keys[place + i], scales, place / d);
                    for (int t = 0; t < HEADS; t++)
                        if (h + t < group) sum[t] += query[(h + t) * d + i] * x;
                }
                add_lanes<HEADS, LANES>(sum, lane);
                constexpr int EACH = LANES / HEADS;  // lanes that have the same sum
                const int t = h + lane / EACH;
                if (j < end && lane % EACH == 0 && t < group) scores[(mine + t) * stride + j] = (float)(sum[0] * factor);
            }
        }
    }
}

// max and sum of e over a row of scores, to every thread of the block.
struct Normaliser {
    float largest;
    double sum;
};

__device__ inline Normaliser normaliser(const float* row, int count, float* max_scratch, double* sum_scratch) {
    float mine = -__uint_as_float(0x7f800000u);  // -Inf
    for (int j = threadIdx.x; j < count; j += blockDim.x) mine = Max::combine(mine, row[j]);
    const float largest = block_max(mine, max_scratch);
    double e = 0;  // NaN when a score is, and for Inf - Inf
    for (int j = threadIdx.x; j < count; j += blockDim.x) e += exp((double)(row[j] - largest));
    return {largest, block_sum(e, sum_scratch)};
}

// (H, S) -> (H, S): the softmax by itself; one block a row.
extern "C" __global__ void softmax(const float* scores, int count, float* pattern) {
    const size_t at = (size_t)blockIdx.x * count;
    __shared__ float max_scratch[33];
    __shared__ double sum_scratch[33];
    const Normaliser norm = normaliser(scores + at, count, max_scratch, sum_scratch);
    for (int j = threadIdx.x; j < count; j += blockDim.x)
        pattern[at + j] = (float)(exp((double)(scores[at + j] - norm.largest)) / norm.sum);
}

// scores (N, H, stride) -> z (N, H, d); grid as above; shared: H/G * CHUNK floats.
// is_pattern: `scores` holds the pattern itself. parts (N, G, chunks, H/G * d) and done (N, G) zeros: room to work in.
template <class T>
__device__ inline void values_of_chunk(const float* scores, int stride, int is_pattern, const T* values,
                                       const float* scales, const long long* slots, const long long* positions, int n, int tokens_each,
                                       int window, int heads, Pages pages, double* parts, int* done, float* z) {
    float* pattern = dynamic_shared<float>();  // (H/G, CHUNK)
    __shared__ float max_scratch[33];
    __shared__ double sum_scratch[33];
    __shared__ size_t where[CHUNK];  // each key's place in the pool
    __shared__ bool last;
    const int g = blockIdx.y, d = pages.head_dim, group = heads / pages.kv_heads;
    for (int token = blockIdx.z * tokens_each; token < n && token < (blockIdx.z + 1) * tokens_each; token++) {
        const Seen seen = seen_by(slots, positions, token, window);
        const int first = blockIdx.x * CHUNK, count = min(CHUNK, seen.count - first);
        if (count <= 0) continue;
        const int chunks = (seen.count + CHUNK - 1) / CHUNK;
        const size_t mine = (size_t)token * heads + g * group;
        for (int h = 0; h < group; h++) {
            const float* row = scores + (mine + h) * stride;
            Normaliser norm = {0, 1};
            if (is_pattern)
                __syncthreads();  // the last token's pattern has been read; `normaliser` waits too
            else
                norm = normaliser(row, seen.count, max_scratch, sum_scratch);
            for (int j = threadIdx.x; j < count; j += blockDim.x)
                pattern[h * CHUNK + j] =
                    is_pattern ? row[first + j] : (float)(exp((double)(row[first + j] - norm.largest)) / norm.sum);
        }
        for (int j = threadIdx.x; j < count; j += blockDim.x) where[j] = place_of(pages, seen.slot, seen.start + first + j, g);
        __syncthreads();
        double* part = parts + (((size_t)token * pages.kv_heads + g) * gridDim.x + blockIdx.x) * group * d;
        for (int i = threadIdx.x; i < d; i += blockDim.x) {  // a thread has one place of d, for HEADS heads
            for (int h = 0; h < group; h += HEADS) {
                double sum[HEADS] = {};
                for (int j = 0; j < count; j++) {
                    const double x = widened(values[where[j] + i], scales, where[j] / d);
                    for (int t = 0; t < HEADS; t++)
                        if (h + t < group) sum[t] += pattern[(h + t) * CHUNK + j] * x;
                }
                for (int t = 0; t < HEADS && h + t < group; t++) {
                    if (chunks == 1)
                        z[(mine + h + t) * d + i] = (float)sum[t];
                    else
                        part[(h + t) * d + i] = sum[t];
                }
            }
        }
        if (chunks == 1) continue;
        __threadfence();  // my part can be seen before I am counted
        __syncthreads();
        if (threadIdx.x == 0) last = atomicAdd(done + (size_t)token * pages.kv_heads + g, 1) == chunks - 1;
        __syncthreads();
        if (!last) continue;
        __threadfence();
        const double* all = parts + ((size_t)token * pages.kv_heads + g) * gridDim.x * group * d;
        for (int i = threadIdx.x; i < group * d; i += blockDim.x) {
            double sum = 0;
            for (int chunk = 0; chunk < chunks; chunk++) sum += all[(size_t)chunk * group * d + i];
            z[mine * d + i] = (float)sum;
        }
        if (threadIdx.x == 0) done[(size_t)token * pages.kv_heads + g] = 0;  // as it was found
    }
}

#define FOR_A_CACHE_OF(T, NAME)                                                                                        \
    extern "C" __global__ void attention_scores_##NAME(                                                                \
        const float* q, const T* keys, const float* scales, const long long* slots, const long long* positions, int n, \
        int tokens_each, int window, int heads, double factor, const int* table, int pages_per_slot, int page_size,    \
        int kv_heads, int head_dim, float* scores, int stride) {                                                       \
        const Pages pages{table, pages_per_slot, page_size, kv_heads, head_dim};                                       \
        scores_of_chunk(q, keys, scales, slots, positions, n, tokens_each, window, heads, factor, pages, scores,       \
                        stride);                                                                                       \
    }                                                                                                                  \
    extern "C" __global__ void attention_values_##NAME(                                                                \
        const float* scores, int stride, int is_pattern, const T* values, const float* scales, const long long* slots, \
        const long long* positions, int n, int tokens_each, int window, int heads, const int* table,                   \
        int pages_per_slot, int page_size, int kv_heads, int head_dim, double* parts, int* done, float* z) {           \
        const Pages pages{table, pages_per_slot, page_size, kv_heads, head_dim};                                       \
        values_of_chunk(scores, stride, is_pattern, values, scales, slots, positions, n, tokens_each, window, heads,   \
                        pages, parts, done, z);                                                                        \
    }
FOR_A_CACHE_OF(float, float32)
FOR_A_CACHE_OF(f16, float16)
FOR_A_CACHE_OF(bf16, bfloat16)
FOR_A_CACHE_OF(signed char, int8)
