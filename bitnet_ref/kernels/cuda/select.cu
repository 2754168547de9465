// Selects the logits among the k largest, so that the host copies a few numbers instead of a vocabulary's 128,256.
//
// Plain version, for a token's logits:
//
//     threshold = the k-th largest logit (equal ones counted one by one)
//     found     = every id whose logit >= threshold: the k largest, and all that equal the k-th
//
// Floats are compared as integers of the same order: the sign bit flipped, and of negative ones all bits; -0 is 0.
// `kth_largest` finds the threshold 8 bits at a time: a histogram of the next 8 bits of all keys that begin like the
// threshold, and the bin in which the k-th lies. For k = 1 `largest` computes one maximum per block, which `collect`
// combines: so no memory has to be zeroed between the launches. `collect` then writes what reaches the threshold, in
// any order: the host sorts a few ids.
//
// Of greedy steps in a row the host chooses nothing: `first_largest` and `next_tokens` write the next step's input.
#include "floats.cuh"

__device__ inline unsigned key_of(float x) {
    const unsigned bits = __float_as_uint(x == 0 ? 0.0f : x);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// The largest of what the threads of a block have, to each of them. block: shared memory.
__device__ inline unsigned largest_of_block(unsigned mine, unsigned* block) {
    if (threadIdx.x == 0) *block = 0;
    __syncthreads();
    if (mine > 0) atomicMax(block, mine);
    __syncthreads();
    return *block;
}

// thresholds (n, blocks): the largest key in each block's share of the logits; counts (n,) zeros; grid (blocks, n).
extern "C" __global__ void largest(const float* logits, int vocab, unsigned* thresholds, int* counts, int* trouble) {
    __shared__ unsigned block;
    const float* row = logits + (size_t)blockIdx.y * vocab;
    unsigned mine = 0;
    for (int id = blockIdx.x * blockDim.x + threadIdx.x; id < vocab; id += gridDim.x * blockDim.x) {
        const float logit = row[id];
        if (!is_finite(logit)) complain(trouble, LM_HEAD, blockIdx.y);
        mine = max(mine, key_of(logit));
    }
    mine = largest_of_block(mine, &block);
    if (threadIdx.x != 0) return;
    thresholds[(size_t)blockIdx.y * gridDim.x + blockIdx.x] = mine;
    if (blockIdx.x == 0) counts[blockIdx.y] = 0;
}

// thresholds (n,): the key of each token's ks[token]-th largest logit; counts (n,) zeros; one block per token.
extern "C" __global__ void kth_largest(const float* logits, int vocab, const int* ks, unsigned* thresholds, int* counts,
                                       int* trouble) {
    __shared__ int bins[256];
    __shared__ unsigned chosen;
    __shared__ int left;
    const float* row = logits + (size_t)blockIdx.x * vocab;
    unsigned begins = 0;
    int rank = ks[blockIdx.x];
    for (int shift = 24; shift >= 0; shift -= 8) {
        for (int bin = threadIdx.x; bin < 256; bin += blockDim.x) bins[bin] = 0;
        __syncthreads();
        for (int id = threadIdx.x; id < vocab; id += blockDim.x) {
            const unsigned key = key_of(row[id]);
            if (shift == 24 && !is_finite(row[id])) complain(trouble, LM_HEAD, blockIdx.x);
            if (shift == 24 || key >> (shift + 8) == begins) atomicAdd(bins + (key >> shift & 255), 1);
        }
        __syncthreads();
        if (threadIdx.x == 0) {
            int bin = 255;
            while (bin > 0 && bins[bin] < rank) rank -= bins[bin--];
            chosen = begins << 8 | bin;
            left = rank;
        }
        __syncthreads();
        begins = chosen;
        rank = left;
    }
    if (threadIdx.x != 0) return;
    thresholds[blockIdx.x] = begins;
    counts[blockIdx.x] = 0;
}

// A token's threshold is the largest of thresholds (n, shares). counts (n,) zeros -> how many logits reach it; ids and
// values (n, room): the first `room` of them found; trouble_copy: the value of `trouble` now; grid (blocks, n).
extern "C" __global__ void collect(const float* logits, int vocab, const unsigned* thresholds, int shares, int room,
                                   int* counts, int* ids, float* values, const int* trouble, int* trouble_copy) {
    __shared__ unsigned block;
    if (blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0) *trouble_copy = *trouble;
    const float* row = logits + (size_t)blockIdx.y * vocab;
    unsigned threshold = 0;
    for (int i = threadIdx.x; i < shares; i += blockDim.x)
        threshold = max(threshold, thresholds[(size_t)blockIdx.y * shares + i]);
    threshold = largest_of_block(threshold, &block);
    for (int id = blockIdx.x * blockDim.x + threadIdx.x; id < vocab; id += gridDim.x * blockDim.x) {
        if (key_of(row[id]) < threshold) continue;
        const int place = atomicAdd(counts + blockIdx.y, 1);
        if (place >= room) continue;
        ids[(size_t)blockIdx.y * room + place] = id;
        values[(size_t)blockIdx.y * room + place] = row[id];
    }
}

// values (n, m): each token's logits of its ids (n, m), where those are not negative; grid (ceil(m / blockDim), n).
extern "C" __global__ void pick(const float* logits, int vocab, const long long* ids, int m, float* values) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= m) return;
    const long long id = ids[(size_t)blockIdx.y * m + i];
    if (id >= 0) values[(size_t)blockIdx.y * m + i] = logits[(size_t)blockIdx.y * vocab + id];
}

struct Best {
    unsigned key, id;
};

// The largest key of a block, with the lowest id that has it: NumPy's argmax. block: shared memory.
__device__ inline Best best_of_block(Best mine, unsigned* block) {
    const unsigned key = largest_of_block(mine.key, block);
    __syncthreads();  // all have read `block`
    const unsigned inverse = largest_of_block(mine.key == key ? ~mine.id : 0, block);
    return {key, ~inverse};
}

// best (n, blocks, 2): the largest key in each block's share of the logits, and its first id; grid (blocks, n).
extern "C" __global__ void first_largest(const float* logits, int vocab, unsigned* best, int* trouble) {
    __shared__ unsigned block;
    const float* row = logits + (size_t)blockIdx.y * vocab;
    Best mine = {0, 0};
    for (int id = blockIdx.x * blockDim.x + threadIdx.x; id < vocab; id += gridDim.x * blockDim.x) {
        const float logit = row[id];
        if (!is_finite(logit)) complain(trouble, LM_HEAD, blockIdx.y);
        const unsigned key = key_of(logit);
        if (key > mine.key) mine = {key, (unsigned)id};
    }
    mine = best_of_block(mine, &block);
    if (threadIdx.x != 0) return;
    unsigned* to = best + 2 * ((size_t)blockIdx.y * gridDim.x + blockIdx.x);
    to[0] = mine.key;
    to[1] = mine.id;
}

// Writes step taken[row] of each row to ids and values (steps, n), states (steps, n, width) and troubles (steps,), and
// the next step's input to tokens and positions (n,). A row whose last token this is, by left (n,), repeats the step.
// best (n, shares, 2) of `first_largest`; x (n, width): the head's input; grid (n,).
extern "C" __global__ void next_tokens(const float* logits, int vocab, const unsigned* best, int shares, const float* x,
                                       int width, const int* left, int* taken, long long* tokens, long long* positions,
                                       int* ids, float* values, float* states, const int* trouble, int* troubles) {
    __shared__ unsigned block;
    const int row = blockIdx.x, step = taken[row];
    Best mine = {0, 0};
    for (int i = threadIdx.x; i < shares; i += blockDim.x) {
        const unsigned* share = best + 2 * ((size_t)row * shares + i);
        if (share[0] > mine.key || (share[0] == mine.key && share[1] < mine.id)) mine = {share[0], share[1]};
    }
    mine = best_of_block(mine, &block);
    const size_t place = (size_t)step * gridDim.x + row;
    for (int i = threadIdx.x; i < width; i += blockDim.x) states[place * width + i] = x[(size_t)row * width + i];
    if (threadIdx.x != 0) return;
    ids[place] = mine.id;
    values[place] = logits[(size_t)row * vocab + mine.id];
    if (row == 0) troubles[step] = *trouble;
    taken[row] = step + 1;  // the other threads read it before the barriers above
    if (step + 1 >= left[row]) return;
    tokens[row] = mine.id;
    positions[row] += 1;
}
