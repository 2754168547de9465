/* The term of a LoRA adapter: y += B (A x), where A is (r, K) and B is stored by its columns, (r, N). A template, included
 * by float_steps.h.
 *
 * Plain version: families/lora.py, `lora_term`. Both products are summed in double and rounded once, also in a dense
 * model. A product of two floats is exact in double, so only the order of the sums differs between instruction sets:
 * of A x by the width of a vector; of B t it is that of the rank, everywhere.
 *
 * Measured, processor time of one thread of a Xeon beside other work, AVX-512, 2B-4T's shape, bfloat16 factors of all
 * linears: rank 8 adds 3.0 ms to a token's 64.7, rank 16 4.7 to 64.0. Eight more ranks are 22 MB, read at 12.7 GB/s, the
 * memory's rate; the rest are norms, gates and sums as calls of their own. 32 tokens with rank 8: 74 ms beside 414, as
 * each token widens the factors anew. Alone it reads 9.1 GB/s where a plain read gives 15.8 (Sapphire Rapids): widening 16 bits
 * to doubles is four operations for eight weights. Tried there: prefetch of the next rows of A and of B, the same; four
 * vectors of columns of B at a time, 2% slower. Rank 16 of all linears is 43 MB beside some 850: 5% of the bytes, so no kernel
 * brings it much below that. Rows of A in one stream, even and odd weights by a mask and a shift, and a prefetch of 4 KB
 * read 13.2 GB/s in a program of their own where this form reads 10.8: 5.4%, before the calls. Not taken for that.
 * An EPYC (Zen 5), one thread, rank 16 of all linears of 8 layers, within the model: adds 1.2 to 1.36 ms to a step of 16.9 (pairs
 * in turn); 1.09 to 1.14 where the next four rows of A are prefetched, 0.70 to 0.75 where 1 KB ahead in each row of B is
 * too. In a program of its own, in huge pages, the first gives 24 to 26 GB/s in place of 17, the second none (22).
 *
 * Terms inside the fused calls of attention and feed-forward (`bit_linears`, the same EPYC, pairs in turn): rows of up whose gate
 * is zero are skipped beside an adapter too. 80% zeros: 1.15 to 1.31 ms (7.5 to 8.1% of a step) fall to 0.41 to 0.49 (2.7 to
 * 3.1%). 50%, where nothing is skipped: 0.64 to 0.76 before, 0.75 to 0.78 (4.5 to 4.8%) now. A term is made whole before the
 * products. Tried: B t for 64 rows after each panel, without an array of its own: 1.25 to 1.31 ms at 50%, as the memory waits
 * meanwhile. 32 requests, 8 adapters: the same as before. */

/* a vector of weights as doubles, exactly. kind: 0 float32, 1 bfloat16 */
STEP_INLINE STEP(f64v) STEP(wide_weights)(const void *row, size_t k, const int kind) {
    if (kind == 0) return STEP(wide)((const float *)row + k);
#if STEP_BYTES == 64
    const __m256i bits = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)((const uint16_t *)row + k)));
    return STEP(widen)((STEP(f32h))_mm256_slli_epi32(bits, 16));
#elif STEP_BYTES == 32
    const __m128i bits = _mm_cvtepu16_epi32(_mm_loadl_epi64((const __m128i *)((const uint16_t *)row + k)));
    return STEP(widen)((STEP(f32h))_mm_slli_epi32(bits, 16));
#else
    STEP(f64v) v;
    for (size_t i = 0; i < STEP(DOUBLES); i++) v[i] = bits_float((uint32_t)((const uint16_t *)row)[k + i] << 16);
    return v;
#endif
}

STEP_INLINE double STEP(wide_weight)(const void *row, size_t k, const int kind) {
    return kind == 0 ? ((const float *)row)[k] : bits_float((uint32_t)((const uint16_t *)row)[k] << 16);
}

/* t[j] = a[j] . x of n rows of A, 1 or 4: a row's sum is the same among others */
STEP_INLINE void STEP(lora_rows)(const int kind, const char *a, size_t row_bytes, const size_t n, size_t K, const float *x,
                                 float *t) {
    STEP(f64v) sums[4] = {{0}, {0}, {0}, {0}};
    size_t k = 0;
    for (; k + STEP(DOUBLES) <= K; k += STEP(DOUBLES)) {
        const STEP(f64v) v = STEP(wide)(x + k);
        if (k * (kind == 0 ? 4 : 2) % 64 == 0) {
            STEP_UNROLL
            for (size_t j = 0; j < n; j++) __builtin_prefetch(a + (n + j) * row_bytes + k * (kind == 0 ? 4 : 2), 0, 2);
        }
        STEP_UNROLL
        for (size_t j = 0; j < n; j++) sums[j] = STEP_MULADD(STEP(wide_weights)(a + j * row_bytes, k, kind), v, sums[j]);
    }
    for (size_t j = 0; j < n; j++) {
        double total = STEP(sum_lanes)(sums[j]);
        for (size_t i = k; i < K; i++) total += STEP(wide_weight)(a + j * row_bytes, i, kind) * x[i];
        t[j] = (float)total;
    }
}

STEP_TARGET static void STEP(lora_down)(int kind, const void *a, size_t n, size_t K, const float *x, float *t) {
    const size_t row_bytes = K * (kind == 0 ? 4 : 2);
    const char *row = a;
    for (; n >= 4; n -= 4, row += 4 * row_bytes, t += 4) {
        if (kind == 0) STEP(lora_rows)(0, row, row_bytes, 4, K, x, t);
        else STEP(lora_rows)(1, row, row_bytes, 4, K, x, t);
    }
    for (; n; n--, row += row_bytes, t++) {
        if (kind == 0) STEP(lora_rows)(0, row, row_bytes, 1, K, x, t);
        else STEP(lora_rows)(1, row, row_bytes, 1, K, x, t);
    }
}

STEP_INLINE void STEP(lora_columns)(const int kind, const char *b, size_t r, size_t N, size_t first, size_t stop,
                                    const float *t, float *y) {
    const size_t row_bytes = N * (kind == 0 ? 4 : 2);
    size_t n = first;
    for (; n + 2 * STEP(DOUBLES) <= stop; n += 2 * STEP(DOUBLES)) {
        STEP(f64v) one = {0}, two = {0};
        for (size_t j = 0; j < r; j++) {
            const STEP(f64v) zero = {0}, v = zero + (double)t[j];
            __builtin_prefetch(b + j * row_bytes + n * (kind == 0 ? 4 : 2) + 1024, 0, 2);
            one = STEP_MULADD(STEP(wide_weights)(b + j * row_bytes, n, kind), v, one);
            two = STEP_MULADD(STEP(wide_weights)(b + j * row_bytes, n + STEP(DOUBLES), kind), v, two);
        }
        STEP(f32h) sums[2];
        memcpy(sums, y + n, sizeof sums);
        sums[0] += STEP(narrow)(one);
        sums[1] += STEP(narrow)(two);
        memcpy(y + n, sums, sizeof sums);
    }
    for (; n < stop; n++) {
        double sum = 0;
        for (size_t j = 0; j < r; j++) sum += STEP(wide_weight)(b + j * row_bytes, n, kind) * t[j];
        y[n] += (float)sum;
    }
}

/* y[n] += sum over j of t[j] b[j][n], for n from `first` to `stop` - 1 */
STEP_TARGET static void STEP(lora_up)(int kind, const void *b, size_t r, size_t N, size_t first, size_t stop,
                                      const float *t, float *y) {
    if (kind == 0) STEP(lora_columns)(0, b, r, N, first, stop, t, y);
    else STEP(lora_columns)(1, b, r, N, first, stop, t, y);
}
