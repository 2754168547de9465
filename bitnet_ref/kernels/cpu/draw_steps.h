/* A token drawn from softmax(logits / temperature), limited by top_k, top_p and min_p. A template, included by
 * float_steps.h.
 *
 * Plain version: generation/sampling.py, `distribution`, and the first token at which the sum of probabilities exceeds
 * `uniform`. Sums are of blocks of DRAW_BLOCK tokens, then of single ones. Their rounding, and that of the exponentials,
 * is far below DRAW_ROUNDING of the total. A draw so close to where a token begins or ends, and a limit so close to where
 * it would keep another number of tokens, is left to the plain version. Sums in float32 come first: their exponents, up
 * to some ln n on average, are off by 2^-23, so the sums by 2e-6. One draw of 10,000 needs those in double.
 *
 * With limits the tokens are listed, most likely first, until the rest cannot matter. Sorting all of them would take
 * longer than everything else: so tokens are gathered in bands of e^-3, the likeliest band first, from the blocks whose
 * largest logit is in it, and put into buckets, of which each is sorted when it is reached.
 *
 * Measured without the call, 4,096 logits of storyteller, AVX-512, one thread of an Emerald Rapids Xeon beside other work,
 * us: no limit 1.9, top_k 40 1.9, min_p 0.05 2.6, top_p 0.95 5.3. A heap in place of the buckets, from which a hundred tokens
 * come one by one and each mispredicts: 2.1, 2.6 and 9.3; 128 buckets 2.3, 2.9 and 5.7; all of a band sorted 2.2, 3.0 and 7.8;
 * gathered without branches, 2 more. With sums in double alone 4.5 more. With a heap, bands of e^-1 took 6 to 14 more than those
 * of e^-3, of which fewer are read; a branch per logit in place of the bit masks 2 to 3 more; the largest of a block as 16
 * scalars 2.7 more. NumPy takes 9, 25, 80 and 85. */
#ifndef BITNET_REF_DRAW_STEPS_H
#define BITNET_REF_DRAW_STEPS_H
#include <math.h>
#include "kv_cache.h"
enum { DRAW_BLOCK = 64, DRAW_LISTED = 2048, DRAW_BAND = 3, DRAW_DEEPEST = 45, DRAW_BUCKETS = 32 }; /* e^-45 of 2^20 tokens: 3e-14 of the first */
static const double DRAW_ROUNDING = 1e-9, DRAW_ROUGH = 2e-5; /* of sums in double, and in float32 */

typedef struct {
    double temperature, top_p, min_p; /* 1 and 0: no limit */
    size_t top_k;                     /* 0: no limit */
} draw_rule;

/* Larger logits have larger keys, and of equal ones the smaller index. -0 equals 0. */
static inline uint64_t draw_key(float logit, size_t index) {
    const uint32_t bits = float_bits(logit + 0.0f), ordered = bits >> 31 ? ~bits : bits | 0x80000000u;
    return (uint64_t)ordered << 32 | (uint32_t)~(uint32_t)index;
}

/* The keys of tokens with from <= logit < below, which are at most `top`, in buckets from the likeliest on: bucket b ends
 * before keys[ends[b]].   -> their number; DRAW_LISTED + 1: there are more than DRAW_LISTED */
static inline size_t draw_band(const float *logits, size_t n, const float *tops, float from, float below, float top,
                               uint64_t *keys, uint16_t *ends) {
    uint32_t gathered[DRAW_LISTED];
    uint8_t bucket[DRAW_LISTED];
    size_t size = 0;
    for (size_t start = 0; start < n; start += DRAW_BLOCK) {
        if (tops[start / DRAW_BLOCK] < from) continue;
        if (size + DRAW_BLOCK > DRAW_LISTED) return DRAW_LISTED + 1;
        const size_t count = start + DRAW_BLOCK < n ? DRAW_BLOCK : n - start;
        uint8_t in[DRAW_BLOCK] = {0};
        for (size_t i = 0; i < count; i++) in[i] = (logits[start + i] >= from) & (logits[start + i] < below);
        for (size_t word = 0; word < DRAW_BLOCK; word += 8) {
            uint64_t bits;
            memcpy(&bits, in + word, 8);
            for (; bits; bits &= bits - 1) gathered[size++] = (uint32_t)(start + word + (size_t)__builtin_ctzll(bits) / 8);
        }
    }
    memset(ends, 0, (DRAW_BUCKETS + 1) * sizeof *ends);
    const float width = top - from;
    const int is_one = !(width > 1e-30f && width < 1e30f);
    for (size_t i = 0; i < size; i++) {
        bucket[i] = is_one ? 0 : (uint8_t)((top - logits[gathered[i]]) * ((DRAW_BUCKETS - 1) / width));
        ends[bucket[i] + 1]++;
    }
    for (size_t b = 0; b < DRAW_BUCKETS; b++) ends[b + 1] += ends[b];
    for (size_t i = 0; i < size; i++) keys[ends[bucket[i]]++] = draw_key(logits[gathered[i]], gathered[i]);
    return size;
}

/* `draw` with limits. total: of e^((logits - largest) / temperature), without top_k; tops: the largest of each block;
 * rounding: relative, of sums and exponentials */
static inline ptrdiff_t draw_limited(const float *logits, size_t n, const draw_rule *rule, double uniform, double total,
                                     const float *tops, float largest, double rounding) {
    uint64_t keys[DRAW_LISTED];
    uint16_t ends[DRAW_BUCKETS + 1];
    double e[DRAW_LISTED], listed = 0, kept = 0, below = 0;
    uint32_t index[DRAW_LISTED];
    size_t count = 0, keep = 0;
    const size_t top_k = rule->top_k < n ? rule->top_k : n;
    float from, above = INFINITY;
    int is_done = 0;
    for (int depth = DRAW_BAND; !is_done && count < n && depth <= DRAW_DEEPEST; depth += DRAW_BAND, above = from) {
        from = (float)((double)largest - depth * rule->temperature);
        const size_t size = draw_band(logits, n, tops, from, above, above < INFINITY ? above : largest, keys, ends);
        if (size > DRAW_LISTED) return -1;
        for (size_t next = 0, b = 0; next < size && !is_done; b++) {
            const size_t first = next;
            for (size_t i = first + 1; i < ends[b]; i++) { /* few: sorted by insertion */
                const uint64_t key = keys[i];
                size_t at = i;
                for (; at > first && keys[at - 1] < key; at--) keys[at] = keys[at - 1];
                keys[at] = key;
            }
            for (; next < ends[b] && !is_done; next++) {
                if (count == DRAW_LISTED) return -1;
                const size_t i = (uint32_t)~(uint32_t)keys[next];
                index[count] = (uint32_t)i;
                e[count] = exp(((double)logits[i] - (double)largest) / rule->temperature);
                listed += e[count];
                is_done = top_k ? count + 1 == top_k
                                : listed >= (rule->top_p + rounding) * total || e[count] < (1 - 2 * rounding) * rule->min_p;
                count++;
            }
        }
    }
    if (top_k) total = listed;
    for (; keep < count; kept += e[keep++]) {
        if (keep > 0 && rule->top_p < 1) {
            const double beyond = kept - rule->top_p * total; /* of everything more likely */
            if (fabs(beyond) < rounding * total) return -1;
            if (beyond > 0) break;
        }
        if (fabs(e[keep] - rule->min_p) < rounding * rule->min_p) return -1;
        if (e[keep] < rule->min_p) break;
    }
    const double target = uniform * kept;
    for (size_t i = 0; i < keep; i++) {
        const double end = below + e[i];
        if (end > target)
            return end - target < rounding * kept || (i > 0 && target - below < rounding * kept) ? -1 : (ptrdiff_t)index[i];
        below = end;
    }
    return -1;
}
#endif

/* e[i] = e^((logits[i] - largest) / temperature) of one block of n.   -> their sum */
STEP_INLINE double STEP(draw_block)(const float *logits, size_t n, float largest, double temperature, double *e) {
    enum { V = DRAW_BLOCK / STEP(DOUBLES) };
    const double per_temperature = 1 / temperature; /* a division of a vector takes as long as a third of its exponential */
    const STEP(f64v) zero = {0}, top = zero + (double)largest;
    STEP(f64v) sum = zero;
    float padded[DRAW_BLOCK];
    if (n < DRAW_BLOCK) {
        for (size_t i = 0; i < DRAW_BLOCK; i++) padded[i] = i < n ? logits[i] : -INFINITY;
        logits = padded;
    }
    for (size_t i = 0; i < V; i += 4) {
        STEP(f64v) x[4];
        STEP_UNROLL
        for (size_t k = 0; k < 4; k++) x[k] = (STEP(wide)(logits + (i + k) * STEP(DOUBLES)) - top) * per_temperature;
        STEP(exp_vectors)(x, 4);
        memcpy(e + i * STEP(DOUBLES), x, sizeof x);
        STEP_UNROLL
        for (size_t k = 0; k < 4; k++) sum += x[k];
    }
    return STEP(sum_lanes)(sum);
}

/* the larger of two floats, lane by lane; b where one is NaN */
STEP_INLINE STEP(f32v) STEP(larger_floats)(STEP(f32v) a, STEP(f32v) b) {
    const STEP(u32v) mask = (STEP(u32v))(a > b);
    return (STEP(f32v))(((STEP(u32v))a & mask) | ((STEP(u32v))b & ~mask));
}

/* tops[b]: the largest logit of block b.   -> the largest of all */
STEP_INLINE float STEP(draw_tops)(const float *logits, size_t n, float *tops) {
    enum { V = DRAW_BLOCK / STEP(FLOATS) };
    float largest = -INFINITY;
    for (size_t start = 0; start < n; start += DRAW_BLOCK) {
        STEP(f32v) x[V];
        float top = -INFINITY;
        if (start + DRAW_BLOCK <= n) {
            memcpy(x, logits + start, sizeof x);
            STEP_UNROLL
            for (size_t i = 1; i < V; i++) x[0] = STEP(larger_floats)(x[i], x[0]);
            STEP_UNROLL
            for (size_t half = STEP(FLOATS) / 2; half > 0; half /= 2)
                for (size_t lane = 0; lane < half; lane++) x[0][lane] = x[0][lane + half] > x[0][lane] ? x[0][lane + half] : x[0][lane];
            top = x[0][0];
        } else
            for (size_t i = start; i < n; i++) top = logits[i] > top ? logits[i] : top;
        tops[start / DRAW_BLOCK] = top;
        largest = top > largest ? top : largest;
    }
    return largest;
}

/* Like `draw_block`'s sum, in float32: to within DRAW_ROUGH of the total of all blocks. n is DRAW_BLOCK. */
STEP_INLINE double STEP(draw_rough)(const float *logits, float largest, float per_temperature) {
    enum { V = DRAW_BLOCK / STEP(FLOATS) };
    const STEP(f32v) zero = {0}, top = zero + largest, lowest = zero - 87.0f;
    const float magic = 12582912.0f; /* 1.5 * 2^23: adding it leaves the nearest integer in the low bits */
    STEP(f32v) sum = zero, x[V], shifted[V], p[V];
#define EACH STEP_UNROLL for (size_t i = 0; i < V; i++)
    EACH memcpy(&x[i], logits + i * STEP(FLOATS), sizeof x[i]);
    EACH x[i] = (x[i] - top) * per_temperature;
    EACH x[i] = STEP(larger_floats)(x[i], lowest);
    EACH shifted[i] = x[i] * 1.44269504f + magic;
    EACH p[i] = shifted[i] - magic;
    EACH x[i] = STEP(fused)(p[i], zero + 2.12194440e-4f, STEP(fused)(p[i], zero - 0.693359375f, x[i]));
    EACH p[i] = STEP(fused)(x[i], zero + (1.0f / 720), zero + (1.0f / 120));
#define TERM(factorial) EACH p[i] = STEP(fused)(p[i], x[i], zero + 1.0f / (factorial));
    TERM(24) TERM(6) TERM(2) TERM(1) TERM(1)
#undef TERM
    EACH sum += (STEP(f32v))((STEP(u32v))p[i] + ((STEP(u32v))shifted[i] << 23));
#undef EACH
    STEP(f32h) halves[2];
    memcpy(halves, &sum, sizeof sum);
    return STEP(sum_lanes)(STEP(widen)(halves[0]) + STEP(widen)(halves[1]));
}

/* `draw` by sums of blocks to within `rounding` of the total, in float32 or in double. */
STEP_INLINE ptrdiff_t STEP(draw_by)(const float *logits, size_t n, const draw_rule *rule, double uniform, double *sums,
                                    const float *tops, float largest, double rounding, const int is_rough) {
    const size_t blocks = (n + DRAW_BLOCK - 1) / DRAW_BLOCK;
    const double temperature = rule->temperature;
    double e[DRAW_BLOCK], total = 0, below = 0;
    for (size_t b = 0; b < blocks && rule->top_k == 0; b++) {
        const size_t left = n - b * DRAW_BLOCK;
        const float *block = logits + b * DRAW_BLOCK;
        sums[b] = 0;
        if ((double)tops[b] - (double)largest >= -DRAW_DEEPEST * temperature) {
            if (is_rough && left >= DRAW_BLOCK) sums[b] = STEP(draw_rough)(block, largest, (float)(1 / temperature));
            else sums[b] = STEP(draw_block)(block, left < DRAW_BLOCK ? left : DRAW_BLOCK, largest, temperature, e);
        }
        total += sums[b];
    }
    if (rule->top_k > 0 || rule->top_p < 1 || rule->min_p > 0)
        return draw_limited(logits, n, rule, uniform, total, tops, largest, rounding);
    if (!(total > 0) || !isfinite(total)) return -1;
    const double target = uniform * total;
    rounding *= total;
    size_t block = 0;
    for (; block + 1 < blocks && below + sums[block] <= target; block++) below += sums[block];
    const size_t left = n - block * DRAW_BLOCK, count = left < DRAW_BLOCK ? left : DRAW_BLOCK;
    STEP(draw_block)(logits + block * DRAW_BLOCK, count, largest, temperature, e);
    for (size_t i = 0; i < count; i++) {
        const double end = below + e[i];
        if (end > target) {
            const int is_first = block == 0 && i == 0; /* nothing ends where it begins */
            return end - target < rounding || (!is_first && target - below < rounding) ? -1 : (ptrdiff_t)(block * DRAW_BLOCK + i);
        }
        below = end;
    }
    return -1;
}

/* The index for `uniform` in [0, 1), or -1 where rounding could decide. logits (n), -Inf for a token that cannot come;
 * sums, tops: room for a number per block */
STEP_TARGET static ptrdiff_t STEP(draw)(const float *logits, size_t n, const draw_rule *rule, double uniform, double *sums,
                                        float *tops) {
    const double temperature = rule->temperature;
    const float largest = STEP(draw_tops)(logits, n, tops);
    /* The plain version divides before it subtracts, so that large logits at a low temperature lose digits. */
    const double relative = DRAW_ROUNDING + 1e-15 * fabs((double)largest) / temperature;
    if (!(relative < 1e-3) || temperature < 1e-300) return -1;
    if (rule->top_k == 0 && temperature > 1e-30 && relative < DRAW_ROUGH) {
        const ptrdiff_t token = STEP(draw_by)(logits, n, rule, uniform, sums, tops, largest, DRAW_ROUGH, 1);
        if (token >= 0) return token;
    }
    return STEP(draw_by)(logits, n, rule, uniform, sums, tops, largest, relative, 0);
}

/* The index of the first largest number, or -1 if one of them is NaN or Inf. n > 0. -0 equals 0.
 *
 * Plain version: NumPy's isfinite and argmax of a row. Of two passes the first finds the largest, and the second, until it
 * meets it, the first of equal ones. Without vectors of the kernel set's own it took 4% of a step of 64 requests. */
STEP_TARGET static ptrdiff_t STEP(first_largest)(const float *x, size_t n) {
    enum { V = 4, STRIDE = V * STEP(FLOATS) };
    const STEP(f32v) zero = {0};
    STEP(f32v) v[V], most[V], odd[V]; /* sums of v - v, which is NaN for NaN and Inf */
    float ends[STRIDE], best = x[0], trouble = 0;
    size_t i = 0;
    STEP_UNROLL
    for (size_t k = 0; k < V; k++) most[k] = zero + x[0], odd[k] = zero;
    for (; i + STRIDE <= n; i += STRIDE) {
        memcpy(v, x + i, sizeof v);
        STEP_UNROLL
        for (size_t k = 0; k < V; k++) most[k] = STEP(larger_floats)(v[k], most[k]), odd[k] += v[k] - v[k];
    }
    memcpy(ends, most, sizeof ends);
    for (size_t k = 0; k < STRIDE; k++) best = ends[k] > best ? ends[k] : best;
    memcpy(ends, odd, sizeof ends);
    for (size_t k = 0; k < STRIDE; k++) trouble += ends[k];
    for (; i < n; i++) {
        best = x[i] > best ? x[i] : best;
        trouble += x[i] - x[i];
    }
    if (trouble != 0) return -1;
    for (i = 0; i + STRIDE <= n; i += STRIDE) {
        int is_here = 0;
        for (size_t k = 0; k < STRIDE; k++) is_here |= x[i + k] == best;
        if (is_here) break;
    }
    while (x[i] != best) i++;
    return (ptrdiff_t)i;
}
