/* Checks every kernel set that this processor can run against a naive version, without Python: so that it can be built
 * with any compiler, for another architecture under an emulator, and under AddressSanitizer.
 *
 *     cc -O2 -std=gnu11 -ffp-contract=off -I bitnet_ref/kernels/cpu tests/kernels/check_kernels.c -lm && ./a.out 200
 *
 * -DBITNET_REF_AMX_EMULATED runs the AMX kernels over the tiles of amx_emulated.h, -DBITNET_REF_AVXVNNI_AS_EVEX those of
 * AVX-VNNI by AVX-512VL's encoding.
 *
 * Every buffer is allocated to its exact size, so that reading or writing past an end is seen. Exit code 1 on the first
 * difference. */
#include <stdio.h>
#include <stdlib.h>

#include "kernels.h"

static uint64_t state = 20240227;

static uint32_t random_u32(void) { /* xorshift64* */
    state ^= state >> 12, state ^= state << 25, state ^= state >> 27;
    return (uint32_t)((state * 2685821657736338717ULL) >> 32);
}

static size_t between(size_t low, size_t high) { return low + random_u32() % (high - low + 1); }
static float random_float(void) { return ((float)random_u32() / 4294967296.0f - 0.5f) * 4; }

static void *allocate(size_t size) {
    void *memory = NULL;
    if (posix_memalign(&memory, 64, size ? size : 1)) exit(2);
    return memory;
}

static float *random_floats(size_t n) {
    float *x = allocate(n * sizeof(float));
    for (size_t i = 0; i < n; i++) x[i] = random_float();
    return x;
}

static void fail(const kernel_set *set, const char *what, size_t a, size_t b, size_t c) {
    printf("%s: %s differs at shape (%zu, %zu, %zu)\n", set->name, what, a, b, c);
    exit(1);
}

static void must_equal(const kernel_set *set, const char *what, const void *got, const void *expected, size_t size,
                       size_t a, size_t b, size_t c) {
    if (size && memcmp(got, expected, size)) fail(set, what, a, b, c);
}

/* What the kernels are held to is optimised in a build for sanitizers too: it is most of the work, and not on trial. */
#if defined(__GNUC__) && !defined(__clang__)
__attribute__((optimize("O3"), no_sanitize("address", "undefined")))
#endif
static int64_t naive_dot(const uint8_t *packed, const int8_t *x, size_t K) {
    int64_t sum = 0;
    for (size_t k = 0; k < K; k++) sum += ((packed[k / 4] >> 2 * (k % 4) & 3) - 1) * (int64_t)x[k];
    return sum;
}

/* M tokens, one panel of `rows` rows, K columns; extreme: all codes 2 (+1), all activations +127 */
static void check_ternary(const kernel_set *set, const ternary_method *method, size_t M, size_t rows, size_t K,
                          int extreme) {
    const ternary_kernel *kernel = &set->ternary[method - METHODS];
    if (!kernel->run) return;
    const size_t row_bytes = (K + 3) / 4, n_blocks = (K + method->block_k - 1) / method->block_k;
    const size_t wide = method->block_k * n_blocks;
    uint8_t *packed = allocate(rows * row_bytes), *again = allocate(rows * row_bytes);
    uint8_t *panel = allocate(n_blocks * BLOCK_BYTES);
    int8_t *x = allocate(M * wide), *expanded = NULL;
    int32_t *x_sum = allocate(M * sizeof *x_sum), *acc = allocate(M * rows * sizeof *acc);
    for (size_t i = 0; i < rows * row_bytes; i++) {
        packed[i] = 0;
        for (int f = 0; f < 4; f++) packed[i] |= (uint8_t)((extreme ? 2 : random_u32() % 3) << 2 * f);
    }
    memset(x, 0, M * wide);
    for (size_t m = 0; m < M; m++) {
        x_sum[m] = 0;
        for (size_t k = 0; k < K; k++) {
            x[m * wide + k] = (int8_t)(extreme > 0 ? 127 : extreme < 0 ? -128 : (int)random_u32());
            x_sum[m] += x[m * wide + k];
        }
    }
    method->pack(packed, rows, row_bytes, panel);
    method->unpack(panel, rows, row_bytes, again);
    must_equal(set, method->name, again, packed, rows * row_bytes, M, rows, K);
    if (method->expand) {
        expanded = allocate(M * n_blocks * method->x_bytes);
        for (size_t m = 0; m < M; m++)
            method->expand(x + m * wide, n_blocks, (uint8_t *)expanded + m * n_blocks * method->x_bytes);
    }
    void *scratch = allocate(SCRATCH_BYTES);
    kernel->run(panel, n_blocks, expanded ? expanded : x, n_blocks * method->x_bytes, M, x_sum, acc, rows, rows, scratch);
    for (size_t m = 0; m < M; m++)
        for (size_t r = 0; r < rows; r++) {
            const int64_t sum = naive_dot(packed + r * row_bytes, x + m * wide, K);
            if (acc[m * rows + r] != sum) fail(set, method->name, M, rows, K);
        }
    if (kernel->run_tiled) {
        const size_t bytes = tiled_bytes(n_blocks);
        uint8_t *tiles = allocate((M + TILED_TOKENS - 1) / TILED_TOKENS * TILED_TOKENS * bytes);
        int32_t *tiled = allocate(M * rows * sizeof *tiled);
        for (size_t m = 0; m < M; m++) tile_token(x + m * wide, n_blocks, m, tiles);
        kernel->run_tiled(panel, n_blocks, (int8_t *)tiles, bytes, M, x_sum, tiled, rows, rows, scratch);
        must_equal(set, "the product with tokens in tiles", tiled, acc, M * rows * sizeof *acc, M, rows, K);
        free(tiles), free(tiled);
    }
    free(packed), free(again), free(panel), free(x), free(expanded), free(x_sum), free(acc), free(scratch);
}

/* The lists of what is not zero, or above zero, of n numbers. */
static void check_lists(const kernel_set *set, size_t n, size_t active) {
    if (!set->strip_rows) return;
    int8_t *x = allocate(n), *values = allocate(n + LIST_SLACK);
    int32_t *ids = allocate((n + LIST_SLACK) * sizeof *ids), first = (int32_t)between(0, 100000);
    float *gates = allocate(n * sizeof *gates), *present = allocate((n + LIST_SLACK) * sizeof *present);
    for (size_t i = 0; i < n; i++) {
        const float others[] = {0.0f, -0.0f, -1e-45f, -INFINITY};
        const int is_active = random_u32() % 100 < active;
        x[i] = (int8_t)(is_active ? random_u32() : 0);
        gates[i] = !is_active ? others[random_u32() % 4] : random_u32() % 4 ? 1e-45f + (float)random_u32() : NAN;
    }
    size_t count = set->list_columns(x, n, ids, values), j = 0;
    for (size_t i = 0; i < n; i++)
        if (x[i] && (j >= count || ids[j] != (int32_t)i || values[j++] != x[i])) fail(set, "list_columns", n, i, active);
    if (j != count) fail(set, "list_columns", n, count, active);
    count = set->list_gates(gates, n, first, ids, present);
    j = 0;
    for (size_t i = 0; i < n; i++)
        if (!(gates[i] <= 0) && (j >= count || ids[j] != first + (int32_t)i || memcmp(present + j++, gates + i, sizeof *gates)))
            fail(set, "list_gates", n, i, active);
    if (j != count) fail(set, "list_gates", n, count, active);
    free(x), free(values), free(ids), free(gates), free(present);
}

/* `count` rows of a matrix (N, K) by strips; and one token's product from the columns that it needs. Some strips are
 * named as the next ones, which must change nothing. */
static void check_strips(const kernel_set *set, size_t N, size_t K, size_t active, int extreme) {
    if (!set->strip_rows) return;
    const size_t row_bytes = (K + 3) / 4, n_vectors = (K + STRIP_K - 1) / STRIP_K, columns_vectors = (N + STRIP_K - 1) / STRIP_K;
    uint8_t *packed = allocate(N * row_bytes), *rows = allocate(N * n_vectors * STRIP_BYTES);
    uint8_t *columns = allocate(K * columns_vectors * STRIP_BYTES);
    int8_t *x = allocate(n_vectors * STRIP_K), *values = allocate(K);
    int32_t *ids = allocate((N > K ? N : K) * sizeof *ids), *acc = allocate((N + columns_vectors * STRIP_K) * sizeof *acc);
    int32_t *near = allocate(columns_vectors * STRIP_K * sizeof *near), *ahead = allocate(N * sizeof *ahead), x_sum = 0;
    for (size_t i = 0; i < N * row_bytes; i++) {
        packed[i] = 0;
        for (int f = 0; f < 4; f++) packed[i] |= (uint8_t)((extreme ? 2 : random_u32() % 3) << 2 * f);
    }
    pack_row_strips(packed, N, row_bytes, n_vectors, rows);
    pack_column_strips(packed, N, row_bytes, 0, K, columns_vectors, columns);
    memset(x, 0, n_vectors * STRIP_K);
    size_t count = 0;
    for (size_t k = 0; k < K; k++) {
        if (random_u32() % 100 >= active) continue;
        x[k] = (int8_t)(extreme > 0 ? 127 : extreme < 0 ? -128 : (int)random_u32());
        x_sum += x[k], ids[count] = (int32_t)k, values[count++] = x[k];
    }
    const size_t part = between(0, columns_vectors - 1); /* the vectors from there on */
    const size_t n_ahead = between(0, K < N ? K : N);
    for (size_t i = 0; i < n_ahead; i++) ahead[i] = (int32_t)between(0, (K < N ? K : N) - 1);
    set->strip_columns(columns + part * STRIP_BYTES, columns_vectors, columns_vectors - part, ids, values, count, acc, ahead,
                       n_ahead);
    for (size_t n = part * STRIP_K; n < N; n++)
        if (acc[n - part * STRIP_K] - x_sum != naive_dot(packed + n * row_bytes, x, K)) fail(set, "strip_columns", N, K, count);
    if (set->strip_columns_near) { /* some columns, then the others */
        const size_t some = between(0, count), vectors = columns_vectors - part;
        memset(near, 0, vectors * STRIP_K * sizeof *near);
        const uint8_t *strips = columns + part * STRIP_BYTES;
        set->strip_columns_near(strips, columns_vectors, vectors, ids, values, some, near, ahead, n_ahead);
        set->strip_columns_near(strips, columns_vectors, vectors, ids + some, values + some, count - some, near, NULL, 0);
        set->strip_order(near, vectors);
        if (memcmp(near, acc, vectors * STRIP_K * sizeof *near)) fail(set, "strip_columns_near", N, K, count);
    }
    count = 0;
    for (size_t n = 0; n < N; n++)
        if (random_u32() % 100 < active) ids[count++] = (int32_t)n;
    for (int near_rows = 0; near_rows < (set->strip_rows_near ? 2 : 1); near_rows++) {
        memset(acc, 0, N * sizeof *acc);
        (near_rows ? set->strip_rows_near : set->strip_rows)(rows, n_vectors, x, x_sum, ids, count, acc, ahead, n_ahead);
        for (size_t j = 0; j < count; j++)
            if (acc[j] != naive_dot(packed + ids[j] * row_bytes, x, K)) fail(set, near_rows ? "strip_rows_near" : "strip_rows", N, K, count);
    }
    free(packed), free(rows), free(columns), free(x), free(values), free(ids), free(acc), free(near), free(ahead);
}

/* Each float step of `set` must give the bits of the portable one */
static void check_steps(const kernel_set *set, size_t n) {
    const kernel_set *plain = KERNEL_SETS[0];
    float *x = random_floats(n), *w = random_floats(n), *a = allocate(n * sizeof *a), *b = allocate(n * sizeof *b);
    int8_t *q = allocate(n), *p = allocate(n);
    float q_scale = 0, p_scale = 0;
    int32_t q_sum = 0, p_sum = 0, *acc = allocate(n * sizeof *acc);
    for (size_t i = 0; i < n; i++) acc[i] = (int32_t)(random_u32() % 2000001) - 1000000;

    if (set->rms_norm(x, w, n, 1e-5, a) != plain->rms_norm(x, w, n, 1e-5, b)) fail(set, "rms_norm", n, 0, 0);
    must_equal(set, "rms_norm", a, b, n * sizeof *a, n, 0, 0);
    if (set->quantize(x, n, q, &q_scale, &q_sum) != plain->quantize(x, n, p, &p_scale, &p_sum)) fail(set, "quantize", n, 0, 0);
    must_equal(set, "quantize", q, p, n, n, 0, 0);
    if (q_scale != p_scale || q_sum != p_sum) fail(set, "quantize's scale", n, 0, 0);
    set->dequantize(acc, n, 0.03f, q_scale, w, a), plain->dequantize(acc, n, 0.03f, q_scale, w, b);
    must_equal(set, "dequantize", a, b, n * sizeof *a, n, 0, 0);
    for (int silu = 0; silu < 2; silu++) {
        set->gated(x, w, n, silu, a), plain->gated(x, w, n, silu, b);
        must_equal(set, silu ? "silu" : "relu2", a, b, n * sizeof *a, n, silu, 0);
    }
    if (n % 2 == 0) {
        set->rope(x, 1, n / 2, w, w, a), plain->rope(x, 1, n / 2, w, w, b);
        must_equal(set, "rope", a, b, n * sizeof *a, n, 0, 0);
    }
    x[n / 2] = NAN;
    if (set->rms_norm(x, w, n, 1e-5, a) || set->quantize(x, n, q, &q_scale, &q_sum)) fail(set, "NaN is lost", n, 0, 0);
    free(x), free(w), free(a), free(b), free(q), free(p), free(acc);
}

/* The token at which the sum of probabilities exceeds `uniform`, one after another; -1 within 1e-9 of where one ends */
static void check_draw(const kernel_set *set, size_t n) {
    float *x = random_floats(n);
    double *sums = allocate((n + 63) / 64 * sizeof *sums);
    float *tops = allocate((n + 63) / 64 * sizeof *tops);
    for (int round = 0; round < 40; round++) {
        const double temperature = round % 2 ? 1.0 : 0.3, uniform = round < 2 ? 0 : round / 40.0;
        if (round == 20) x[n - 1] = -INFINITY;
        double total = 0, sum = 0, nearest = INFINITY;
        ptrdiff_t expected = -1;
        for (size_t i = 0; i < n; i++) total += exp((double)x[i] / temperature);
        for (size_t i = 0; i < n; i++) {
            if (i > 0) nearest = fmin(nearest, fabs(sum / total - uniform));
            sum += exp((double)x[i] / temperature);
            if (expected < 0 && sum > uniform * total) expected = (ptrdiff_t)i;
        }
        const draw_rule rule = {temperature, 1, 0, 0};
        const ptrdiff_t got = set->draw(x, n, &rule, uniform, sums, tops);
        if (got != expected && (got != -1 || nearest > 1e-8)) fail(set, "draw", n, round, got);
    }
    free(x), free(sums), free(tops);
}

/* Each step of training: the bits of the portable one, but for double sums in another order, rounded to float32 */
static void check_training(const kernel_set *set, size_t n) {
    const kernel_set *plain = KERNEL_SETS[0];
    float *dy = random_floats(n), *x = random_floats(n), *w = random_floats(n);
    float *a = allocate(n * sizeof *a), *b = allocate(n * sizeof *b), *a2 = allocate(n * sizeof *a2), *b2 = allocate(n * sizeof *b2);
    double *s = allocate(n * sizeof *s), *t = allocate(n * sizeof *t);
    uint8_t *c = allocate(n), *e = allocate(n);
    for (size_t i = 0; i < n; i++) s[i] = t[i] = x[i];
    set->norm_backward(dy, x, w, n, 1e-5, a, s), plain->norm_backward(dy, x, w, n, 1e-5, b, t);
    for (size_t i = 0; i < n; i++)
        if (fabs(s[i] - t[i]) > 1e-12 * fabs(t[i]) || fabsf(a[i] - b[i]) > 1e-5f) fail(set, "norm_backward", n, i, 0);
    for (size_t i = 0; i < n; i++) s[i] = t[i] = 30 * x[i];
    set->softmax_row(s, n, 0.3, a), plain->softmax_row(t, n, 0.3, b);
    for (size_t i = 0; i < n; i++)
        if (fabsf(a[i] - b[i]) > 1.2e-7f * b[i] || s[i] != (double)a[i]) fail(set, "softmax_row", n, i, 0);
    memcpy(a2, dy, n * sizeof *a2), memcpy(b2, dy, n * sizeof *b2);
    set->softmax_backward(a2, b, n, 0.3f), plain->softmax_backward(b2, b, n, 0.3f);
    for (size_t i = 0; i < n; i++)
        if (fabsf(a2[i] - b2[i]) > 1e-5f) fail(set, "softmax_backward", n, i, 0);
    set->relu2_backward(dy, x, w, n, a, a2), plain->relu2_backward(dy, x, w, n, b, b2);
    must_equal(set, "relu2_backward", a, b, n * sizeof *a, n, 0, 0);
    must_equal(set, "relu2_backward", a2, b2, n * sizeof *a2, n, 1, 0);
    set->ternarize(x, n, 1.7f, c, a), plain->ternarize(x, n, 1.7f, e, b);
    must_equal(set, "ternarize", a, b, n * sizeof *a, n, 0, 0);
    must_equal(set, "ternarize", c, e, n, n, 1, 0);
    set->rescale((int8_t *)c, n, 1.7f, a), plain->rescale((int8_t *)c, n, 1.7f, b);
    must_equal(set, "rescale", a, b, n * sizeof *a, n, 0, 0);
    const double squares = plain->sum_of_squares(x, n);
    if (fabs(set->sum_of_squares(x, n) - squares) > 1e-12 * squares) fail(set, "sum_of_squares", n, 0, 0);
    const adamw_rates rates = {0.9f, 0.1f, 0.95f, 0.05f, 0.3f, 1e-8f, 0.999f, 0.01f};
    float *of[] = {a, a2, w, b, b2, x}; /* w, m and v of both */
    for (size_t i = 0; i < n; i++) a[i] = b[i] = w[i], a2[i] = b2[i] = x[i], w[i] = x[i] = fabsf(w[i]);
    set->adamw(a, dy, a2, w, n, &rates), plain->adamw(b, dy, b2, x, n, &rates);
    for (int i = 0; i < 3; i++) must_equal(set, "adamw", of[i], of[i + 3], n * sizeof *a, n, i, 0);
    free(dy), free(x), free(w), free(a), free(b), free(a2), free(b2), free(s), free(t), free(c), free(e);
}

/* A half, written out: its definition */
/* Products of bfloat16: of matrices and transposed ones, within the rounding of float32 sums */
static void check_bfloat16_product(size_t M, size_t K, size_t N, int a_by_k, int b_by_k) {
    float *a = random_floats(M * K), *b = random_floats(K * N), *c = allocate(M * N * sizeof *c), *d = allocate(M * N * sizeof *d);
    void *scratch = allocate(bf16_scratch(N));
    const bf16_operand rows = {a, a_by_k ? M : 1, a_by_k ? 1 : K}, columns = {b, b_by_k ? N : 1, b_by_k ? 1 : K};
    for (size_t i = 0; i < M * N; i++) c[i] = NAN;
    bf16_product_avx512(rows, columns, M, K, N, c, scratch);
    bf16_product_plain(rows, columns, M, K, N, d, scratch);
    for (size_t i = 0; i < M * N; i++)
        if (!(fabsf(c[i] - d[i]) <= 2e-6f * 4 * (float)K)) fail(KERNEL_SETS[0], "bfloat16_product", M, K, N);
    free(a), free(b), free(c), free(d), free(scratch);
}

static float half_value(uint16_t half) {
    const int exponent = half >> 10 & 31, fraction = half & 1023;
    const float size = exponent == 31 ? (fraction ? NAN : INFINITY)
                       : exponent     ? ldexpf(1024.0f + fraction, exponent - 25)
                                      : ldexpf((float)fraction, -24);
    return half & 0x8000 ? -size : size;
}

/* attend, alone: one step after another, or (slots > 1) each block of keys by itself, the last first */
static void attend(const kernel_set *set, const float *q, size_t T, size_t R, size_t d, size_t q_stride, size_t z_stride,
                   kv_view kv, size_t window, int by_blocks, float *z) {
    const size_t blocks = attend_blocks(&kv), slots = by_blocks ? blocks : 1;
    attend_call c = {q, z, T, R, d, q_stride, z_stride, window, 0.3, kv, slots};
    double *workspace = allocate(attend_workspace(T * R, d, kv.n_keys, slots) * sizeof *workspace);
    if (kv.n_keys % 2) c.next = kv; /* prefetched, which changes no bit */
    attend_place(&c, workspace);
    if (!by_blocks) attend_all(set->attend, &c);
    else {
        set->attend(&c, ATTEND_BEGIN, 0, 0);
        for (size_t b = blocks; b-- > 0;) set->attend(&c, ATTEND_SCORES, b, b + 1);
        for (size_t i = T * R; i-- > 0;) set->attend(&c, ATTEND_SOFTMAX, i, i + 1);
        for (size_t b = blocks; b-- > 0;) set->attend(&c, ATTEND_VALUES, b, b + 1);
        set->attend(&c, ATTEND_END, 0, 0);
    }
    free(workspace);
}

static void check_attend(const kernel_set *set, size_t R, size_t d, size_t n_keys) {
    const kernel_set *plain = KERNEL_SETS[0];
    const size_t stride = d + between(0, 3) * d, page_size = between(1, 40), first = between(0, 3), pages = 3 + n_keys / page_size + 1;
    float *q = random_floats(R * d), *keys = random_floats(pages * page_size * stride), *values = random_floats(pages * page_size * stride);
    int32_t *table = allocate(pages * sizeof *table);
    for (size_t i = 0; i < pages; i++) table[i] = (int32_t)(pages - 1 - i);
    kv_view kv = {{keys, NULL}, {values, NULL}, table, page_size, stride, 0, first, n_keys, KV_FLOAT32};
    float *a = allocate(R * d * sizeof *a), *b = allocate(R * d * sizeof *b);
    float *one = allocate(2 * n_keys * stride * sizeof *one);
    attend(set, q, 1, R, d, 0, 0, kv, 0, 0, a);
    attend(plain, q, 1, R, d, 0, 0, kv, 0, 0, b);
    for (size_t i = 0; i < R * d; i++) /* sums in double, in another order: at most a last bit of float32 apart */
        if (!(fabsf(a[i] - b[i]) <= 1.2e-7f * fmaxf(1, fabsf(b[i])))) fail(set, "attend", R, d, n_keys);
    /* the same rows in one page: the same bits */
    for (size_t s = 0; s < n_keys; s++) {
        const size_t from = (size_t)table[(first + s) / page_size] * page_size + (first + s) % page_size;
        memcpy(one + s * stride, keys + from * stride, d * sizeof *one);
        memcpy(one + (n_keys + s) * stride, values + from * stride, d * sizeof *one);
    }
    const int32_t zero = 0;
    kv_view whole = {{one, NULL}, {one + n_keys * stride, NULL}, &zero, n_keys, stride, 0, 0, n_keys, KV_FLOAT32};
    attend(set, q, 1, R, d, 0, 0, whole, 0, 1, b);
    must_equal(set, "attend over pages", a, b, R * d * sizeof *a, R, d, n_keys);
    free(q), free(keys), free(values), free(a), free(b), free(table), free(one);
}

/* Tokens together give the bits that each gives alone. */
static void check_attend_many(const kernel_set *set, size_t T, size_t R, size_t d, size_t n_keys, size_t window) {
    const size_t stride = d + between(0, 2) * d, page_size = between(1, 40);
    const size_t q_stride = R * d + between(0, 5), z_stride = R * d + between(0, 5);
    const size_t last = n_keys + T - 2, first = window && window < n_keys ? n_keys - window : 0, pages = last / page_size + 1;
    float *q = random_floats(T * q_stride), *rows = random_floats(2 * pages * page_size * stride);
    float *a = allocate(T * z_stride * sizeof *a), *b = allocate(R * d * sizeof *b);
    int32_t *table = allocate(pages * sizeof *table);
    for (size_t i = 0; i < pages; i++) table[i] = (int32_t)(pages - 1 - i);
    kv_view kv = {{rows, NULL}, {rows + pages * page_size * stride, NULL}, table, page_size, stride, 0, first, last + 1 - first, KV_FLOAT32};
    attend(set, q, T, R, d, q_stride, z_stride, kv, window, n_keys % 2, a);
    for (size_t t = 0; t < T; t++) {
        const size_t end = n_keys + t; /* token 0 sees n_keys, each later one a key more, of which a window keeps the last */
        kv.first = window && window < end ? end - window : 0, kv.n_keys = end - kv.first;
        attend(set, q + t * q_stride, 1, R, d, 0, 0, kv, 0, 0, b);
        must_equal(set, "attend_many", a + t * z_stride, b, R * d * sizeof *a, R, d, n_keys);
    }
    free(q), free(rows), free(a), free(b), free(table);
}

/* A narrow cache gives the bits that the float cache gives for the floats it stands for. */
static void check_narrow_attend(const kernel_set *set, int kind, size_t R, size_t d, size_t n_keys) {
    const size_t stride = d + between(0, 2) * d, rows = n_keys + 5;
    float *q = random_floats(R * d), *wide = allocate(2 * rows * stride * sizeof *wide), *scales = random_floats(2 * rows);
    uint16_t *half = allocate(2 * rows * stride * sizeof *half);
    int8_t *narrow = allocate(2 * rows * stride);
    float *a = allocate(R * d * sizeof *a), *b = allocate(R * d * sizeof *b);
    for (size_t i = 0; i < 2 * rows * stride; i++) {
        half[i] = (uint16_t)((random_u32() & 0x83FFu) | (random_u32() % 18) << 10); /* of size below 8 */
        narrow[i] = (int8_t)between(0, 254) - 127;
        wide[i] = kind == KV_FLOAT16 ? half_value(half[i]) : (float)narrow[i] * scales[i / stride];
    }
    const int32_t zero = 0;
    const kv_view floats = {{wide, NULL}, {wide + rows * stride, NULL}, &zero, rows, stride, 0, 3, n_keys, KV_FLOAT32};
    kv_view kept = floats;
    kept.kind = kind, kept.scale_stride = 1;
    kept.keys = kind == KV_FLOAT16 ? (kv_pool){half, NULL} : (kv_pool){narrow, scales};
    kept.values = kind == KV_FLOAT16 ? (kv_pool){half + rows * stride, NULL} : (kv_pool){narrow + rows * stride, scales + rows};
    attend(set, q, 1, R, d, 0, 0, floats, 0, 0, a);
    attend(set, q, 1, R, d, 0, 0, kept, 0, 1, b);
    must_equal(set, "attend over a narrow cache", a, b, R * d * sizeof *a, R, d, n_keys);
    free(q), free(wide), free(scales), free(half), free(narrow), free(a), free(b);
}

#if defined(BITNET_REF_HAS_AMX)
enum { NORMAL, PEAKED, HALVES, POWERS, HUGE_ONES, DENORMAL, NOT_FINITE, N_NUMBERS };

/* sums of halves and of powers of two are exact, and often lie between two floats */
static float some_number(int numbers) {
    const float x = random_float() + random_float(), sign = random_u32() % 2 ? 1 : -1;
    const int rare = random_u32() % 300 == 0;
    if (random_u32() % 50 == 0) return 0;
    if (numbers == HALVES) return rintf(x) / 2;
    if (numbers == POWERS) return ldexpf(sign, -(int)between(0, 26));
    if (numbers == HUGE_ONES) return rare ? 1e30f * x : x;
    if (numbers == DENORMAL) return rare ? x : 1e-40f * x;
    if (numbers == NOT_FINITE) return random_u32() % 100000 ? x : sign * (rare ? NAN : INFINITY);
    return numbers == PEAKED ? 9 * x : x;
}

/* attend_sliced gives the bits of attend: T tokens, the first of which is token `before` of the prompt that is sliced. */
static void check_sliced(const kernel_set *set, size_t T, size_t R, size_t d, size_t before, size_t n_keys, size_t window, int kind, int numbers) {
    const size_t start = window && window < n_keys ? n_keys - window : 0, stride = d + between(0, 2) * d, page_size = between(1, 40);
    const size_t end = n_keys + before + T - 1, pages = end / page_size + 1, rows = pages * page_size, q_stride = R * d + between(0, 5);
    float *q = allocate(T * q_stride * sizeof *q), *stored = allocate(2 * rows * stride * sizeof *stored), *scales = random_floats(2 * rows);
    float *a = allocate(T * R * d * sizeof *a), *b = allocate(T * R * d * sizeof *b);
    uint16_t *half = (uint16_t *)stored;
    int8_t *narrow = (int8_t *)stored;
    int32_t *table = allocate(pages * sizeof *table);
    for (size_t i = 0; i < pages; i++) table[i] = (int32_t)(pages - 1 - i);
    for (size_t i = 0; i < T * q_stride; i++) q[i] = some_number(numbers);
    for (size_t i = 0; i < 2 * rows * stride; i++)
        if (kind == KV_FLOAT16) half[i] = (uint16_t)((random_u32() & 0x83FFu) | (random_u32() % 18) << 10);
        else if (kind == KV_INT8) narrow[i] = (int8_t)between(0, 254) - 127;
        else stored[i] = some_number(numbers);
    const size_t bytes = kv_bytes(kind, rows * stride);
    kv_slices slices = {{{stored, scales}, {(char *)stored + bytes, scales + rows}, table, page_size, stride, 1, start, end - start, kind}, d};
    void *memory = allocate(kv_slices_place(&slices, NULL));
    kv_slices_place(&slices, memory);
    for (size_t chunk = slice_chunks(end - start); chunk-- > 0;) set->slice_chunk(&slices, chunk);
    attend_call c = {q, a, T, R, d, q_stride, R * d, window, numbers == HALVES || numbers == POWERS ? 0.25 : 0.3, slices.kv, 1};
    c.kv.first = window && window < n_keys + before ? n_keys + before - window : 0, c.kv.n_keys = end - c.kv.first;
    double *workspace = allocate(attend_workspace(T * R, d, c.kv.n_keys, 1) * sizeof *workspace);
    void *sliced = allocate(attend_sliced_workspace(T * R, d));
    attend_place(&c, workspace);
    attend_all(set->attend, &c);
    c.z = b;
    set->attend_sliced(&c, &slices, sliced);
    must_equal(set, "attend_sliced", b, a, T * R * d * sizeof *a, T * R, d, n_keys);
    free(q), free(stored), free(scales), free(a), free(b), free(table), free(memory), free(workspace), free(sliced);
}

SLICE_TARGET static void sliced_totals(const uint8_t *a, const uint8_t *b, size_t steps, int of_values, double *totals) {
    _Alignas(64) int32_t sums[DIGIT_SUMS * 256];
    amx_set_tiles(AMX_PAIR);
    if (of_values) slice_products(a, b, steps, 1, sums);
    else slice_products(a, b, steps, 0, sums);
    amx_release();
    for (size_t i = 0; i < 256; i += 8)
        _mm512_storeu_pd(totals + i, of_values ? slice_total(sums + i, 1) : slice_total(sums + i, 0));
}

/* The bounds of slice_row, slice_keys and slice_values hold for n numbers. For those with the largest digits, with or without (exact) a rest, they
 * are almost reached. */
static void check_slice_bound(const kernel_set *set, size_t n, int of_values, int is_extreme, int is_exact) {
    const size_t steps = slice_steps(n), rows = between(1, 16), b_steps = of_values ? SLICE_STEPS : steps;
    double x[16][SLICE_MAX_D], y[16][SLICE_MAX_D], values[SLICE_KEYS][16], totals[256];
    kv_rows of_rows;
    const char *keys[16];
    float scales[16];
    uint8_t *a = allocate(steps * A_STEP_BYTES), *b = allocate(b_steps * B_STEP_BYTES);
    slice_rows facts;
    memset(a, 0, steps * A_STEP_BYTES);
    for (size_t r = 0; r < 16; r++) {
        keys[r] = (const char *)y[r], scales[r] = 1;
        for (size_t j = 0; j < n; j++) {
            x[r][j] = y[r][j] = 0;
            for (int i = 0; i < A_DIGITS + !is_exact; i++) {
                const double digit = i ? -128 : -126, tail = ldexp(is_extreme ? -127 : (double)between(0, 254) - 127, -8 * i);
                const double number = ldexp(is_extreme ? digit : (double)between(0, 252) - 126, -8 * i);
                x[r][j] += i < A_DIGITS ? number : tail;
                if (i < B_DIGITS + !is_exact) y[r][j] += i < B_DIGITS ? number : tail;
            }
            if (of_values) values[j][r] = y[r][j], of_rows.at[j] = (const char *)values[j], of_rows.scale[j] = 1;
        }
        if (r < rows) slice_row(x[r], 8, 0, (ptrdiff_t)n, steps, 3, a, &facts, r); /* the roundings of slice_total */
    }
    const slice_facts of_columns = of_values ? slice_values(KV_WIDE, &of_rows, n, 0, b) : slice_keys(KV_WIDE, keys, scales, rows, n, b);
    sliced_totals(a, b, steps, of_values, totals);
    double worst = 0;
    for (size_t r = 0; r < rows; r++)
        for (size_t k = 0; k < rows; k++) {
            long double exact = 0;
            for (size_t j = 0; j < n; j++) exact += (long double)x[r][j] * y[k][j];
            const double bound = facts.bound[r] * of_columns.unit + facts.unit[r] * of_columns.bound + facts.norm[r] * of_columns.norm;
            const double error = fabs((double)(totals[16 * r + k] * (long double)(facts.unit[r] * of_columns.unit) - exact)) / bound;
            worst = error > worst ? error : worst;
        }
    if (!(worst <= 1) || (is_extreme && worst < 0.9)) fail(set, of_values ? "values' slice_bound" : "slice_bound", n, rows, (size_t)(worst * 1e6));
    free(a), free(b);
}

static void check_slices(const kernel_set *set, int round) {
    static const size_t COLUMNS[] = {64, 128, 16, 96, 256, 80};
    const size_t R = between(1, 5), d = COLUMNS[random_u32() % 6];
    check_sliced(set, between(1, ATTEND_ROWS / R), R, d, between(0, 1) * between(0, 150), between(1, 300), between(0, 1) * between(1, 200),
                 round % 3, round % N_NUMBERS);
    check_sliced(set, between(1, 8), between(1, 4), 64, 0, 128 * between(1, 3) + between(0, 2) - 1, 0, KV_FLOAT32, (round + 1) % N_NUMBERS);
    for (int kind = 0; kind < 4; kind++) {
        check_slice_bound(set, 16 * between(1, 16), 0, kind % 2, kind / 2);
        check_slice_bound(set, between(SLICE_COLUMNS, SLICE_KEYS), 1, kind % 2, kind / 2);
    }
}
#endif

#if defined(__x86_64__)
#define WIDEN_HALVES(set, instructions)                                                                                \
    __attribute__((target(instructions))) static void widen_halves_##set(const uint16_t *half, float *y) {             \
        for (size_t i = 0; i < 65536; i += DOUBLES_##set) {                                                            \
            const f32h_##set v = narrow_##set(stored_##set(KV_FLOAT16, (const char *)half, i, 1));                     \
            memcpy(y + i, &v, sizeof v);                                                                               \
        }                                                                                                              \
    }
WIDEN_HALVES(avx2, "avx2,fma,f16c")
WIDEN_HALVES(avx512, "avx512f,avx512bw,avx512vl,avx512dq,fma,f16c")
#endif

static void check_halves(void) {
    const kernel_set *plain = KERNEL_SETS[0];
    uint16_t *half = allocate(65536 * sizeof *half);
    float *y = allocate(65536 * sizeof *y), *other = allocate(65536 * sizeof *other);
    for (size_t i = 0; i < 65536; i++) half[i] = (uint16_t)i;
    half_to_float_plain(half, 65536, y);
    for (size_t i = 0; i < 65536; i++) {
        const float expected = half_value(half[i]);
        if (!(y[i] == expected && signbit(y[i]) == signbit(expected)) && !(isnan(y[i]) && isnan(expected))) fail(plain, "half", i, 0, 0);
    }
#if defined(__x86_64__)
    for (int wide = 0; wide < 2; wide++) {
        if (!(wide ? __builtin_cpu_supports("avx512f") : __builtin_cpu_supports("avx2") && has_f16c())) continue;
        (wide ? widen_halves_avx512 : widen_halves_avx2)(half, other);
        for (size_t i = 0; i < 65536; i++)
            if (memcmp(y + i, other + i, 4) && !(isnan(y[i]) && isnan(other[i]))) fail(plain, "half, by instruction", i, wide, 0);
    }
#endif
    free(half), free(y), free(other);
}

/* One weight of a kind: float32, its upper half as bfloat16 (on a little-endian machine), or any finite float16 */
static void random_weight(int kind, char *w) {
    const float v = random_float();
    uint16_t half;
    do half = (uint16_t)(float_bits(random_float()) >> 7 ^ float_bits(v));
    while ((half & 0x7C00) == 0x7C00);
    if (kind == 2) memcpy(w, &half, 2);
    else memcpy(w, (const char *)&v + (kind == 0 ? 0 : 2), kind == 0 ? 4 : 2);
}

/* The first largest of numbers with ties and zeros of both signs; and an embedding's row times a scale */
static void check_greedy(const kernel_set *set, size_t n) {
    const float some[] = {-1, -0.0f, 0, 1, 3e38f, -3e38f, 1e-40f, 0.5f};
    float *x = allocate(n * sizeof *x);
    size_t first = 0;
    for (size_t i = 0; i < n; i++) x[i] = some[random_u32() % (n % 3 ? 8 : 3)];
    for (size_t i = 1; i < n; i++) first = x[i] > x[first] ? i : first;
    if (set->first_largest(x, n) != (ptrdiff_t)first) fail(set, "first_largest", n, first, 0);
    const float bad[] = {NAN, INFINITY, -INFINITY};
    x[random_u32() % n] = bad[random_u32() % 3];
    if (set->first_largest(x, n) != -1) fail(set, "first_largest of NaN or Inf", n, 0, 0);
    for (int kind = 0; kind < 3; kind++) {
        char *row = allocate(n * 4);
        for (size_t i = 0; i < n; i++) random_weight(kind, row + i * (kind == 0 ? 4 : 2));
        for (int scaled = 0; scaled < 2; scaled++) {
            embed_row(kind, row, n, scaled ? 7.5f : 1.0f, x);
            for (size_t i = 0; i < n; i++) {
                uint16_t half;
                uint32_t bits;
                memcpy(&half, row + i * 2, 2), memcpy(&bits, row + (kind == 0 ? i * 4 : 0), 4);
                const float v = kind == 0 ? bits_float(bits) : kind == 1 ? bits_float((uint32_t)half << 16) : half_value(half);
                if (x[i] != (scaled ? v * 7.5f : v)) fail(set, "embed_row", n, kind, i);
            }
        }
        free(row);
    }
    free(x);
}

#if defined(__aarch64__)
enum { SCALAR_FUSES = 1 };
#else
enum { SCALAR_FUSES = 0 };
#endif

/* What dense_rows.h computes, step by step */
static float dense_sum(const float *w, const float *x, size_t K, int fuses) {
    float lanes[32] = {0};
#define ADD(sum, k) sum = fuses ? fmaf(w[k], x[k], sum) : sum + w[k] * x[k]
    for (size_t k = 0; k < K - K % 32; k++) ADD(lanes[k % 32], k);
    for (int half = 16; half > 0; half /= 2)
        for (int i = 0; i < half; i++) lanes[i] += lanes[half + i];
    for (size_t k = K - K % 32; k < K; k++) ADD(lanes[0], k);
#undef ADD
    return lanes[0];
}

/* The weights of a row of blocks, 32 at a time, or what they are with these factors */
static void widen_blocks(int kind, const uint8_t *row, size_t K, const float *factors_instead, float *out) {
    float factors[24];
    int8_t quants[256];
    const size_t count = kind < Q4_K ? 32 : 256, step = kind == Q4_K ? 64 : 32;
    for (size_t k = 0; k < K; k += count) {
        const uint8_t *b = row + dense_row_bytes(kind, k);
        switch (kind) {
#define WIDEN(kind)                                                                                                    \
    case kind:                                                                                                         \
        block_factors_plain(b, kind < Q4_K ? 1 : 8, kind, factors, quants);                                            \
        if (factors_instead) memcpy(factors, factors_instead, sizeof factors);                                         \
        for (size_t at = 0; at < count; at += step)                                                                    \
            for (size_t i = 0; i < step; i += 4) {                                                                     \
                const f32v_plain v = block_weights_plain(b + at / step * BLOCK_STEP_BYTES(kind), (int)i, kind,         \
                                                         factors + at / step * BLOCK_STEP_FACTORS(kind), quants + at); \
                memcpy(out + k + at + i, &v, sizeof v);                                                                \
            }                                                                                                          \
        break;
            WIDEN(Q8_0) WIDEN(Q4_0) WIDEN(Q5_0) WIDEN(Q4_1) WIDEN(Q4_K) WIDEN(Q5_K) WIDEN(Q6_K)
#undef WIDEN
        }
    }
}

/* rows of a kind with random contents */
static char *random_matrix(int kind, size_t rows, size_t K) {
    const size_t size = DENSE_KINDS[kind].bytes, n = K / DENSE_KINDS[kind].values;
    char *w = allocate(rows * n * size);
    for (size_t i = 0; i < rows * n * size; i++) w[i] = (char)random_u32();
    for (size_t i = 0; i < rows * n; i++) {
        char *block = w + i * size;
        if (kind < Q8_0) random_weight(kind, block);
        else block[kind == Q6_K ? 209 : 1] &= (char)0xBB, block[kind == Q4_1 || kind == Q4_K || kind == Q5_K ? 3 : 1] &= (char)0xBB; /* finite */
    }
    return w;
}

static void check_dense(const kernel_set *set, int kind, size_t rows, size_t K, size_t M) {
    const size_t row_bytes = dense_row_bytes(kind, K);
    if (K % DENSE_KINDS[kind].values) return;
    char *w = random_matrix(kind, rows, K);
    float *x = random_floats(M * K), *y = allocate(M * rows * sizeof *y), *row = allocate(K * sizeof *row);
    float *wide = M > 1 ? allocate(64 * packed_columns(K) * sizeof *wide) : NULL;
    float *packed = allocate(M * packed_columns(K) * sizeof *packed);
    set->dense_pack(x, M, K, packed);
    set->dense_rows(kind, w, rows, K, packed, M, y, rows, wide);
    const int fuses = SCALAR_FUSES || set != KERNEL_SETS[0];
    for (size_t r = 0; r < rows; r++) {
        const uint8_t *of_row = (const uint8_t *)w + r * row_bytes;
        for (size_t k = 0; kind < Q8_0 && k < K; k++) row[k] = weight_plain(of_row, k, kind);
        if (kind >= Q8_0) widen_blocks(kind, of_row, K, NULL, row);
        for (size_t m = 0; m < M; m++) {
            const float expected = dense_sum(row, x + m * K, K, fuses);
            must_equal(set, "dense_rows", &expected, y + m * rows + r, sizeof expected, rows, K, M);
        }
    }
    free(w), free(x), free(y), free(row), free(wide), free(packed);
}

/* y (M, rows) = the products of tiles, in two calls, the second with what is left beyond the first `first` rows */
static void multiply_by_tiles(const kernel_set *set, int kind, const void *w, size_t rows, size_t first, size_t K, const float *x,
                              size_t M, float *y) {
    const tile_method *tiles = by_tiles(set, kind, K);
    const size_t row = dense_row_bytes(kind, K), all = (rows - first + 15) / 16 * 16;
    void *parts = allocate(tiles->bytes(M, K));
    char *rest = allocate(all * row);
    memset(rest, 0, all * row);
    memcpy(rest, (const char *)w + first * row, (rows - first) * row);
    for (size_t m = 0; m < M; m += 16) tiles->split(x, M, K, m, parts);
    tiles->multiply(kind, w, first, K, parts, M, y, rows);
    tiles->multiply(kind, rest, rows - first, K, parts, M, y + first, rows);
    free(parts), free(rest);
}

/* What dense_amx.h computes, step by step */
static float tile_flush(float v) { return fabsf(v) < 0x1p-126f ? copysignf(0, v) : v; }

static float tile_sum(const uint16_t *w, const float *x, size_t K) {
    float sums[3] = {0, 0, 0};
    for (size_t k = 0; k < K; k += 32) {
        float of_part[3][2] = {{0}};
        for (size_t i = k; i < k + 32; i++) {
            float left = x[i];
            for (int part = 0; part < 3; part++) {
                const float top = bits_float(float_bits(left) & 0xFFFF0000u), weight = bits_float((uint32_t)w[i] << 16);
                float *sum = &of_part[part][i % 2];
                *sum = tile_flush(fmaf(tile_flush(weight), tile_flush(top), *sum));
                left -= top;
            }
        }
        for (int part = 0; part < 3; part++)
            sums[part] = tile_flush(sums[part] + tile_flush(of_part[part][0] + of_part[part][1]));
    }
    return sums[0] + (sums[1] + sums[2]);
}

/* What blocks_amx.h computes, step by step */
static float block_tile_sum(int kind, const uint8_t *row, const float *x, size_t K) {
    const int has_offset = kind == Q4_1 || kind == Q4_K || kind == Q5_K;
    float *q = allocate(K * sizeof *q), ones[24] = {1, 0, 0, 0, 0, 0, 0, 0, 0}, factors[24], y = 0;
    for (int i = 0; i < 8 && kind >= Q4_K; i++) ones[i] = 1;
    widen_blocks(kind, row, K, ones, q);
    for (size_t k = 0; k < K; k += 32) {
        int8_t quants[256];
        int exponent = 0;
        float lanes[16], f, g, largest = 0, p = 0;
        int64_t sums[4] = {0};
        const size_t in_block = k % DENSE_KINDS[kind].values / 32;
        block_factors_plain(row + dense_row_bytes(kind, k - 32 * in_block), kind < Q4_K ? 1 : 8, kind, factors, quants);
        f = factors[in_block], g = factors[kind == Q4_1 ? 1 : 8 + in_block];
        for (size_t i = k; i < k + 32; i++) largest = fmaxf(largest, fabsf(x[i])), f = x[i] - x[i] == 0 ? f : NAN;
        if (largest > 0 && largest < INFINITY) frexpf(largest, &exponent);
        if (largest == 0 || exponent < -86) exponent = -86;
        for (size_t i = k; i < k + 32 && f == f; i++) {
            const int32_t whole = (int32_t)nearbyint(ldexp(x[i], 30 - exponent)) + 0x808080;
            for (int digit = 0; digit < 4; digit++)
                sums[digit] += (int64_t)q[i] * (digit < 3 ? (whole >> 8 * digit & 255) - 128 : whole >> 24);
        }
        for (int digit = 0; digit < 4; digit++) p = fmaf((float)sums[digit], (float)(1 << 8 * digit), p);
        y = fmaf(f * ldexpf(1, exponent - 30), p, y);
        for (size_t i = 0; i < 16; i++) lanes[i] = x[k + i] + x[k + 16 + i];
        for (int half = 8; half > 0; half /= 2)
            for (int i = 0; i < half; i++) lanes[i] += lanes[half + i];
        if (has_offset) y = fmaf(g, lanes[0], y);
    }
    free(q);
    return y;
}

/* Products by tiles: the bits of `tile_sum` or `block_tile_sum`, for all tokens, for some, and for any division of the rows.
 * numbers 1: near underflow among others; 2: one Inf and one NaN */
static void check_tiles(const kernel_set *set, int kind, size_t rows, size_t K, size_t M, int numbers) {
    if (!by_tiles(set, kind, K)) return;
    const size_t some = between(1, M), from = between(0, M - some), row = dense_row_bytes(kind, K);
    char *w = random_matrix(kind, rows, K);
    float *x = random_floats(M * K), *y = allocate(M * rows * sizeof *y), *z = allocate(M * rows * sizeof *z);
    for (size_t i = 0; numbers == 1 && i < M * K; i++) x[i] = ldexpf(x[i], -(int)between(0, kind == 1 ? 70 : 130));
    for (size_t i = 0; numbers == 1 && kind == 1 && i < rows * K; i++) {
        uint16_t *each = (uint16_t *)w + i;
        *each = (uint16_t)(*each & 0x807F) | (uint16_t)(between(0, 3) ? between(60, 127) : 0) << 7;
    }
    if (numbers == 2) x[between(0, M * K - 1)] = INFINITY, x[between(0, M * K - 1)] = NAN;
    multiply_by_tiles(set, kind, w, rows, rows / 16 * 16, K, x, M, y);
    for (size_t m = 0; m < M; m++)
        for (size_t n = 0; n < rows; n++) {
            const float got = y[m * rows + n];
            const float expected = kind == 1 ? tile_sum((const uint16_t *)(w + n * row), x + m * K, K)
                                             : block_tile_sum(kind, (const uint8_t *)w + n * row, x + m * K, K);
            if (memcmp(&expected, &got, 4) && !(expected != expected && got != got)) fail(set, "products by tiles", rows, K, M);
        }
    multiply_by_tiles(set, kind, w, rows, between(0, rows / 16) * 16, K, x + from * K, some, z);
    for (size_t i = 0; i < some * rows; i++)
        if (memcmp(z + i, y + from * rows + i, 4) && z[i] == z[i]) fail(set, "products by tiles, of some tokens", rows, K, some);
    free(w), free(x), free(y), free(z);
}

/* Packing a head's rows and bounding its logits: every set gives the bits of the portable one, and the bounds hold */
static void check_screen(const kernel_set *set, int kind, size_t rows, size_t K, size_t M) {
    const kernel_set *plain = KERNEL_SETS[0];
    const size_t size = kind == 0 ? 4 : 2, wide = (K + 63) / 64 * 64;
    char *w = allocate(rows * K * size);
    for (size_t i = 0; i < rows * K; i++) random_weight(kind, w + i * size);
    float *x = random_floats(M * K), *facts = allocate(rows * 3 * sizeof *facts), *other = allocate(rows * 3 * sizeof *other);
    int8_t *q = allocate(rows * wide), *p = allocate(rows * wide);
    int16_t *X = allocate(M * wide * sizeof *X), *Y = allocate(M * wide * sizeof *Y);
    if (K > 1 << 16) { /* more columns than one sum of int32 takes: all products as large as they can be */
        const uint16_t one = 0x3F80;
        for (size_t i = 0; i < rows * K; i++) memcpy(w + i * size, &one, size);
        for (size_t i = 0; i < M * K; i++) x[i] = 1;
    }
    double *x_facts = allocate(M * 3 * sizeof *x_facts), *y_facts = allocate(M * 3 * sizeof *y_facts);
    float *ends[4], *y = allocate(M * rows * sizeof *y);
    for (int i = 0; i < 4; i++) ends[i] = allocate(M * rows * sizeof(float));
    for (size_t n = 0; n < rows; n++) {
        set->screen_pack(kind, w + n * K * size, K, wide, q + n * wide, facts + 3 * n);
        plain->screen_pack(kind, w + n * K * size, K, wide, p + n * wide, other + 3 * n);
    }
    must_equal(set, "screen_pack", q, p, rows * wide, rows, K, M);
    must_equal(set, "screen_pack's facts", facts, other, rows * 3 * sizeof *facts, rows, K, M);
    for (size_t m = 0; m < M; m++) {
        if (!set->screen_token(x + m * K, K, wide, X + m * wide, x_facts + 3 * m)) fail(set, "screen_token", rows, K, M);
        plain->screen_token(x + m * K, K, wide, Y + m * wide, y_facts + 3 * m);
    }
    must_equal(set, "screen_token", X, Y, M * wide * sizeof *X, rows, K, M);
    int16_t *arranged = allocate((M + 15) / 16 * 16 * wide * sizeof *X);
    if (set->screen_arrange) set->screen_arrange(X, M, wide, arranged);
    set->screen_rows(q, rows, K, wide, facts, set->screen_arrange && M > SCREEN_TILE_TOKENS ? arranged : X, M, x_facts, ends[0], ends[1], rows);
    plain->screen_rows(p, rows, K, wide, other, Y, M, x_facts, ends[2], ends[3], rows);
    must_equal(set, "screen_rows, lower", ends[0], ends[2], M * rows * sizeof(float), rows, K, M);
    must_equal(set, "screen_rows, upper", ends[1], ends[3], M * rows * sizeof(float), rows, K, M);
    for (size_t m = 0; m < M; m++) set->dense_rows(kind, w, rows, K, x + m * K, 1, y + m * rows, rows, NULL);
    for (size_t i = 0; i < M * rows; i++)
        if (!(ends[0][i] <= y[i] && y[i] <= ends[1][i])) fail(set, "the bound", rows, K, M);
    if (kind == 1 && by_tiles(set, kind, K)) multiply_by_tiles(set, kind, w, rows, rows / 16 * 16, K, x, M, y);
    for (size_t i = 0; i < M * rows; i++)
        if (!(ends[0][i] <= y[i] && y[i] <= ends[1][i])) fail(set, "the bound of tiles", rows, K, M);
    x[K / 2] = INFINITY;
    if (set->screen_token(x, K, wide, X, x_facts)) fail(set, "Inf is lost", rows, K, M);
    free(w), free(x), free(facts), free(other), free(q), free(p), free(X), free(Y), free(arranged), free(x_facts), free(y_facts), free(y);
    for (int i = 0; i < 4; i++) free(ends[i]);
}

/* Sums of a panel by groups: each set gives the bits of the portable one, nearly those of sums in long double, and for a
 * token among others what it gives alone, and so do the last rows of a panel. outlier: one value is 10,000 times as large. */
static void check_groups(const kernel_set *set, size_t rows, size_t K, size_t group, size_t T, int kind, int outlier) {
    const size_t row_bytes = (K + 3) / 4, size = kind ? 2 : 4;
    const kernel_set *sets[] = {KERNEL_SETS[0], set, set};
    uint8_t *packed = allocate(rows * row_bytes), *again = allocate(row_bytes);
    for (size_t i = 0; i < rows * row_bytes; i++) {
        packed[i] = 0;
        for (size_t f = 0; f < 4; f++) packed[i] |= (uint8_t)((i % row_bytes * 4 + f < K ? random_u32() % 3 : 1) << 2 * f);
    }
    float *x = random_floats(T * K);
    x[random_u32() % (T * K)] *= outlier ? 10000 : 1;
    if (random_u32() % 4 == 0) memset(x, 0, K / 2 * sizeof *x);
    const size_t all = (rows + PANEL_ROWS - 1) / PANEL_ROWS * PANEL_ROWS, last = all / 2 / PANEL_ROWS * PANEL_ROWS;
    double *acc[3];
    for (int s = 0; s < 3; s++) { /* portable, all tokens, the last token and rows alone */
        const size_t first = s == 2 ? T - 1 : 0, tokens = T - first;
        group_shape shape = make_group_shape(rows, K, group, sets[s]->group_layout);
        uint8_t *panel = allocate(shape.n_chunks * shape.code_bytes), *payload = allocate(shape.n_chunks * tokens * shape.token_bytes);
        char *scales = allocate(shape.n_chunks * shape.rows * size);
        int32_t *x_sum = allocate(shape.n_chunks * tokens * GROUP_PLANES * sizeof *x_sum);
        double *steps = allocate(shape.n_chunks * tokens * sizeof *steps);
        group_chunk *chunks = allocate(shape.n_chunks * sizeof *chunks);
        void *scratch = allocate(SCRATCH_BYTES);
        acc[s] = allocate(tokens * all * sizeof **acc);
        group_pack(&shape, packed, rows, row_bytes, panel);
        for (size_t r = 0; r < rows; r++) {
            group_unpack_row(&shape, panel, r, again);
            must_equal(set, "group_unpack_row", again, packed + r * row_bytes, row_bytes, rows, K, group);
        }
        for (size_t i = 0; i < shape.n_chunks * shape.rows; i++) { /* 1 / 4, 1 / 2 or 1 by row and group */
            const int power = (int)((i % shape.rows + i / shape.rows / shape.per_group) % 3) - 2;
            const float scale = ldexpf(1, power);
            const uint16_t half = kind == 2 ? (uint16_t)((15 + power) << 10) : (uint16_t)((127 + power) << 7);
            memcpy(scales + i * size, kind ? (const void *)&half : &scale, size);
        }
        for (size_t c = 0; c < shape.n_chunks; c++) {
            const size_t at = c * tokens;
            chunks[c] = (group_chunk){payload + at * shape.token_bytes, x_sum + at * GROUP_PLANES, steps + at};
            for (size_t t = 0; t < tokens; t++) {
                steps[at + t] = sets[s]->group_token(&shape, x + (first + t) * K, NULL, c, payload + (at + t) * shape.token_bytes,
                                                     x_sum + (at + t) * GROUP_PLANES);
                if (steps[at + t] != steps[at + t]) fail(set, "a group's step", rows, K, group);
            }
        }
        const size_t from = s == 2 ? last : 0;
        if (shape.rows != all) fail(set, "rows of a panel", rows, K, group);
        sets[s]->group_panel(&shape, panel + from / PANEL_ROWS * shape.subpanel_bytes, scales + from * size, kind, all - from,
                             chunks, tokens, acc[s], sets[s]->ternary[0].run, scratch, panel);
        free(panel), free(payload), free(scales), free(x_sum), free(steps), free(chunks), free(scratch);
    }
    for (size_t r = 0; r < rows; r++)
        for (size_t t = 0; t < T; t++) {
            long double sum = 0, size_of_sum = 0;
            for (size_t k = 0; k < K; k++) {
                const long double scale = ldexpl(1, (int)((r + k / group) % 3) - 2);
                const long double part = scale * ((packed[r * row_bytes + k / 4] >> 2 * (k % 4) & 3) - 1) * x[t * K + k];
                sum += part, size_of_sum += scale * fabsl((long double)x[t * K + k]);
            }
            if (acc[1][t * all + r] != acc[0][t * all + r]) fail(set, "groups, and portable", rows, K, group);
            if (!(fabsl(acc[0][t * all + r] - sum) <= size_of_sum * 0x1p-23L)) fail(set, "groups", rows, K, group);
        }
    for (size_t r = last; r < rows; r++)
        if (acc[2][r - last] != acc[1][(T - 1) * all + r]) fail(set, "groups of a token alone", rows, K, group);
    for (int s = 0; s < 3; s++) free(acc[s]);
    group_shape shape = make_group_shape(rows, K, group, set->group_layout);
    uint8_t *token = allocate(shape.token_bytes);
    int32_t sums[GROUP_PLANES];
    x[0] = random_u32() % 2 ? NAN : INFINITY;
    const double step = set->group_token(&shape, x, NULL, 0, token, sums);
    if (step == step) fail(set, "NaN is lost in a group", K, group, 0);
    free(token), free(packed), free(again), free(x);
}

/* Number j of a row of a unit, an integer, and the scale of its 16 or 32 columns */
static int ruled_code(const ruled_form *f, const uint8_t *unit, size_t r, int j) {
    const int fours = j % 32 / 4; /* of the 8 in 32 columns; those that share bytes are f->bits of them apart */
    const int byte = unit[j / 32 * f->bits * 64 + fours % f->bits * 64 + 4 * (int)r + j % 4];
    return (byte >> fours / f->bits * f->bits & ((1 << f->bits) - 1)) - f->offset;
}

/* A token as ggml rounds it (families/block_rule.py), one number after another */
static void check_ruled_token(const kernel_set *set, const float *x, size_t K, int block, const uint8_t *token) {
    const int8_t *q = (const int8_t *)token;
    const float *dx = (const float *)(token + K);
    const int16_t *sums = (const int16_t *)(dx + K / block);
    const float *s = (const float *)(sums + K / 16);
    for (size_t b = 0; b < K / block; b++, x += block, q += block) {
        float largest = 0, scale = 0, d = 0, expected = 0;
        for (int j = 0; j < block; j++) largest = fabsf(x[j]) > fabsf(largest) ? x[j] : largest;
        if (fabsf(largest) >= 0x1p-120f) scale = block == 32 ? 127 / fabsf(largest) : -127 / largest;
        uint16_t half;
        if (scale != 0 && block == 32) d = fabsf(largest) / 127, kv_halves(&d, 1, &half), expected = half_value(half);
        else if (scale != 0) expected = 1 / scale;
        if (dx[b] != expected) fail(set, "a token's scale", K, block, b);
        int32_t whole = 0, of_16 = 0;
        for (int j = 0; j < block; j++) {
            const float v = fminf(nearbyintf(x[j] * scale), 127);
            if (q[j] != v) fail(set, "a token's integers", K, block, b);
            whole += q[j], of_16 += q[j];
            if (j % 16 == 15) {
                if (sums[(b * block + j) / 16] != of_16) fail(set, "a token's sums", K, block, b);
                of_16 = 0;
            }
        }
        if (block == 256) continue;
        const float of_q = d * (float)whole;
        kv_halves(&of_q, 1, &half);
        if (s[b] != half_value(half)) fail(set, "a token's s", K, block, b);
    }
}

/* A panel of matrices in blocks by ggml's rule. extreme: all bits of the codes and scales are set, all inputs alike */
static void check_ruled(const kernel_set *set, int form, size_t units, size_t rows, size_t M, int extreme) {
    const ruled_form *f = &RULED_FORMS[form];
    const size_t bytes = ruled_unit_bytes(f), K = units * f->block, token_bytes = ruled_token_bytes(f->block, K);
    const size_t codes = f->block * f->bits * RULED_ROWS / 8, stride = rows + between(0, 20);
    const size_t at_scales = codes + (f->term ? 64 : 32), at_minima = at_scales + (f->scaled ? f->block / f->scaled * RULED_ROWS : 0);
    uint8_t *panel = allocate(units * bytes), *tokens = allocate(M * token_bytes);
    float *x = random_floats(M * K), *y = allocate(((M - 1) * stride + rows) * sizeof *y);
    for (size_t i = 0; i < units * bytes; i++) panel[i] = (uint8_t)(extreme ? 255 : random_u32());
    for (size_t i = 0; i < units; i++) {
        for (size_t at = 0; at < codes && f->bits == 8; at++) panel[i * bytes + at] &= f->largest;
        for (size_t at = codes; at < at_scales; at += 2) random_weight(2, (char *)panel + i * bytes + at);
    }
    for (size_t i = 0; extreme && i < M * K; i++) x[i] = (float)extreme;
    if (!extreme && random_u32() % 4 == 0) memset(x, 0, f->block * sizeof *x);
    for (size_t i = 0; !extreme && random_u32() % 4 == 0 && i < (size_t)f->block; i++) x[i] = ldexpf(x[i], -(int)between(20, 125));
    for (size_t m = 0; m < M; m++) {
        if (set->ruled_token(x + m * K, K, f->block, tokens + m * token_bytes)) fail(set, "ruled_token", form, K, m);
        check_ruled_token(set, x + m * K, K, f->block, tokens + m * token_bytes);
    }
    set->ruled_panel(form, panel, K, tokens, token_bytes, M, rows, y, stride);
    for (size_t m = 0; m < M; m++)
        for (size_t r = 0; r < rows; r++) {
            const int8_t *q = (const int8_t *)(tokens + m * token_bytes);
            const float *dx = (const float *)(q + K);
            float t = 0, u = 0;
            for (size_t k = 0, b = 0; b < units; b++, k += f->block) {
                const uint8_t *unit = panel + b * bytes;
                int64_t total = 0, minima = 0;
                for (int j = 0; j < f->block; j++) {
                    const uint8_t s = f->scaled ? unit[at_scales + j / f->scaled * RULED_ROWS + r] : 1;
                    total += ruled_code(f, unit, r, j) * (f->is_signed ? (int8_t)s : s) * q[k + j];
                    if (f->term == 2) minima += unit[at_minima + j / 32 * RULED_ROWS + r] * q[k + j];
                }
                uint16_t d, e;
                memcpy(&d, unit + codes + 2 * r, 2), memcpy(&e, unit + at_scales - 32 + 2 * r, 2);
                t += half_value(d) * dx[b] * (float)total;
                if (f->term == 1) u += half_value(e) * dx[2 * units + b]; /* Q8_1's s */
                if (f->term == 2) u += half_value(e) * dx[b] * (float)minima;
            }
            const float expected = f->term ? t + u : t;
            must_equal(set, "ruled_panel", y + m * stride + r, &expected, sizeof expected, form, K, M);
        }
    const float bad[] = {NAN, INFINITY, -INFINITY};
    x[random_u32() % K] = bad[random_u32() % 3];
    if (!set->ruled_token(x, K, f->block, tokens)) fail(set, "NaN is lost in a token", form, K, 0);
    for (size_t i = 0; i < K; i++) x[i] = 4e3f;
    if (set->ruled_token(x, K, f->block, tokens) || (f->block == 32 && !ruled_token_overflows(tokens, K))) fail(set, "a token's large sum", form, K, 0);
    x[K - 1] = 8.4e6f;
    if (set->ruled_token(x, K, f->block, tokens) != (f->block == 32)) fail(set, "a token's large scale", form, K, 0);
    free(panel), free(tokens), free(x), free(y);
}

int main(int argc, char **argv) {
    const int rounds = argc > 1 ? atoi(argv[1]) : 100;
    check_halves();
    for (int round = 0; round < rounds && has_avx512_bf16(); round++)
        check_bfloat16_product(between(1, 200), between(1, round % 4 ? 100 : 600), between(1, 200), round & 1, round / 2 & 1);
    for (size_t i = 0; i < N_KERNEL_SETS; i++) {
        const kernel_set *set = KERNEL_SETS[i];
        if (kernel_set_lacks(i)) {
            printf("%s: not run, %s\n", set->name, kernel_set_lacks(i));
            continue;
        }
        for (int round = 0; round < rounds; round++) {
            for (const ternary_method *method = METHODS; method < METHODS + N_METHODS; method++) {
                check_ternary(set, method, between(1, 20), between(1, PANEL_ROWS), between(1, 700), 0);
                if (round % 8 == 0)
                    check_ternary(set, method, between(20, 100), between(0, 1) ? PANEL_ROWS : 37, between(700, 2500), 0);
            }
            check_strips(set, between(1, 700), between(1, 700), between(0, 100), 0);
            check_lists(set, between(1, 200), between(0, 100));
            check_steps(set, between(1, 600));
            if (round == 0) for (size_t n = 1; n < 100; n++) check_greedy(set, n);
            check_training(set, between(1, 600)), check_draw(set, between(1, 600)), check_greedy(set, between(1, 600));
            check_attend(set, between(1, 9), between(1, 70) * 2, between(1, 400));
            const size_t R = between(1, 9);
            check_attend_many(set, between(2, ATTEND_ROWS / R), R, between(1, 70) * 2, between(1, 300), between(0, 1) * between(1, 200));
            if (round % 4 == 0) /* all_rows_wide */
                check_attend_many(set, between(2, 8), 4, between(1, 18) * 32, between(1, 300), between(0, 1) * between(1, 200));
#if defined(BITNET_REF_HAS_AMX)
            if (set->slice_chunk) check_slices(set, round);
#endif
            check_narrow_attend(set, round % 2 ? KV_FLOAT16 : KV_INT8, between(1, 9), between(1, 70), between(1, 200));
            check_dense(set, round % 3, between(1, 20), between(1, 300), between(1, 20));
            if (round % 4 == 0) /* sums of several parts of the columns */
                check_dense(set, round / 4 % 3, between(1, 40), between(DENSE_COLUMNS, 3 * DENSE_COLUMNS), between(2, 20));
            if (round % 3 == 0) /* lanes of rows, with what is left of 32 columns, and without */
                check_dense(set, round / 3 % 3, between(1, 110), between(1, 700), between(7, 60));
            check_dense(set, Q8_0 + round % (N_DENSE_KINDS - Q8_0), between(1, 110), 256 * between(1, 3), between(7, 40));
            check_dense(set, Q8_0 + round % (N_DENSE_KINDS - Q8_0), between(1, 20), 32 * between(1, 20), between(1, 8));
            check_dense(set, Q4_K + round % 3, between(1, 20), 256 * between(1, 3), between(1, 8));
            for (int form = 0; form < N_RULED_FORMS; form++)
                check_ruled(set, form, between(1, RULED_FORMS[form].block == 32 ? 9 : 3), between(1, RULED_ROWS), between(1, 17), 0);
            check_tiles(set, 1, between(1, 70), 32 * between(1, 12), between(1, round % 4 ? 20 : 70), round % 3);
            for (int kind = Q8_0; kind < Q6_K; kind++)
                check_tiles(set, kind, between(1, 70), kind < Q4_K ? 32 * between(1, 12) : 256 * between(1, 3),
                            between(1, round % 4 ? 20 : 70), (round + kind) % 3);
            check_screen(set, round % 3, between(1, 70), between(1, 300), between(1, 20));
            check_screen(set, 1, between(1, 70), 32 * between(1, 9), between(1, 20));
            const size_t K = between(1, 600), sizes[] = {64, 128, 256, K, between(1, K)};
            const size_t most = set->group_layout == GROUP_BY_TABLES ? GROUP_TABLE_TOKENS : GROUP_PLANE_TOKENS;
            check_groups(set, between(1, round % 4 ? 20 : GROUP_PLANE_ROWS), K, sizes[round % 5], between(1, most), round % 3, round % 2);
        }
        for (const ternary_method *method = METHODS; method < METHODS + N_METHODS; method++)
            for (int extreme = -1; extreme <= 1; extreme += 2) {
                check_ternary(set, method, 1, 64, 27648, extreme);
                check_ternary(set, method, 7, 63, 6912, extreme);
                check_ternary(set, method, 33, 64, 1100, extreme);
                check_ternary(set, method, 97, 5, 203, extreme); /* one token more than go through a narrow panel together */
            }
        for (int extreme = -1; extreme <= 1; extreme += 2) check_ternary(set, METHODS + MULTIPLY_ADD, 2, 17, 1 << 17, extreme);
        for (int extreme = -1; extreme <= 1; extreme += 2) check_strips(set, 2, 131071, 100, extreme);
        for (int form = 0; form < N_RULED_FORMS; form++)
            for (int extreme = -1; extreme <= 1; extreme += 2) check_ruled(set, form, 3, RULED_ROWS, 5, extreme);
        check_tiles(set, 1, 17, 32 * 170, 35, 0); /* more than TILE_CHUNK_BYTES of tokens */
        check_tiles(set, Q4_0, 17, 32 * 170, 55, 0);
        check_tiles(set, Q5_0, 3, 32, 16 * 70, 0); /* more groups of tokens than at once */
        check_screen(set, 1, 5, (1 << 16) + 70, SCREEN_TILE_TOKENS + 1); /* more columns than a sum of int32 takes at once */
        if (set->peak && set->peak(2) % 32) fail(set, "peak", 0, 0, 0);
        printf("%s: %d rounds, all equal\n", set->name, rounds);
    }
    return 0;
}
