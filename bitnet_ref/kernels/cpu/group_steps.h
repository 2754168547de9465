/* Group-scaled ternary, what each kernel set compiles for itself: tokens to integers, sums to results. See group.h.
 *
 * A template, included by float_steps.h. */

/* The columns x (GROUP_CHUNK, zeros beyond the last) of a chunk -> X (GROUP_MAX_WIDE) int32. Returns the step, X =
 * round(x / step), or NaN for a chunk that is not finite. The sum of |X| is below 2^31. */
STEP_TARGET static double STEP(group_quantize)(const double *x, size_t n, int32_t *X) {
    typedef int32_t STEP(i32h) __attribute__((vector_size(STEP_BYTES / 2)));
    enum { PARTS = 8 / STEP(DOUBLES) };
    const STEP(f64v) zero = {0};
    STEP(f64v) lanes[PARTS] = {zero}; /* eight lanes in every set: the same sum */
    for (size_t k = 0; k < n; k += 8)
        for (int i = 0; i < PARTS; i++) {
            STEP(f64v) v;
            memcpy(&v, x + k + i * STEP(DOUBLES), sizeof v);
            lanes[i] += STEP(choose)((STEP(i64v))(v < zero), -v, v);
        }
    double sums[8];
    memcpy(sums, lanes, sizeof sums);
    const double total = ((sums[0] + sums[4]) + (sums[2] + sums[6])) + ((sums[1] + sums[5]) + (sums[3] + sums[7]));
    if (!(total <= 1e300)) return NAN;
    memset(X, 0, GROUP_MAX_WIDE * sizeof *X);
    if (total == 0) return 0;
    int exponent;
    if (frexp(total, &exponent) > 1 - 0x1p-20) exponent++; /* room for 128 roundings */
    const double per_step = ldexp(1, 31 - exponent), magic = 6755399441055744.0; /* 1.5 * 2^52, as in exp_lanes */
    for (size_t k = 0; k < n; k += STEP(DOUBLES)) {
        STEP(f64v) v;
        memcpy(&v, x + k, sizeof v);
        v = v * per_step + magic;
        const STEP(i32h) rounded = __builtin_convertvector((STEP(i64v))v & 0xFFFFFFFF, STEP(i32h));
        memcpy(X + k, &rounded, sizeof rounded);
    }
    return ldexp(1, exponent - 31);
}

/* X -> four int8 planes of `wide` bytes, X = 2^24 p0 + 2^16 p1 + 2^8 p2 + p3 modulo 2^32, and the sum of each */
STEP_TARGET static void STEP(group_planes)(const int32_t *X, size_t wide, int8_t *planes, int32_t *x_sum) {
    for (int plane = GROUP_PLANES - 1, shift = 0; plane >= 0; plane--, shift += 8) {
        /* digits -128 .. 127: 0x80 added to each lower one carries into the next */
        const uint32_t carry = 0x808080u & ((1u << shift) - 1);
        int32_t sum = 0;
        for (size_t k = 0; k < wide; k++) {
            const int8_t digit = (int8_t)(((uint32_t)X[k] + carry) >> shift);
            planes[plane * wide + k] = digit;
            sum += digit;
        }
        x_sum[plane] = sum;
    }
}

/* Chunk c of a token: x (K), or `turned` (K) where it is not NULL -> what kernels read of it. Returns its step, or NaN. */
STEP_TARGET static double STEP(group_token)(const group_shape *s, const float *x, const double *turned, size_t c,
                                            uint8_t *token, int32_t *x_sum) {
    double wide[GROUP_CHUNK] = {0};
    int32_t X[GROUP_MAX_WIDE];
    size_t count, start = group_columns(s, c, &count);
    if (turned) memcpy(wide, turned + start, count * sizeof *wide);
    else
        for (size_t k = 0; k < count; k++) wide[k] = x[start + k];
    const double step = STEP(group_quantize)(wide, count, X);
    if (step != step) return step;
#if STEP_BYTES == 64
    (void)x_sum;
    group_tables(X, s->wide / 3, (int32_t *)token);
#else
    STEP(group_planes)(X, s->wide, (int8_t *)token, x_sum);
#endif
    return step;
}

#if STEP_BYTES != 64
/* acc[r] += the sums of the four planes times step times scale, for the 64 rows of a subpanel */
STEP_TARGET static void STEP(group_add)(const int32_t *sums, double step, const void *scales, int kind, double *acc) {
    for (size_t r = 0; r < PANEL_ROWS; r++) {
        const uint32_t sum = ((uint32_t)sums[r] << 24) + ((uint32_t)sums[PANEL_ROWS + r] << 16) +
                             ((uint32_t)sums[2 * PANEL_ROWS + r] << 8) + (uint32_t)sums[3 * PANEL_ROWS + r];
        acc[r] += (double)(int32_t)sum * step * (double)STEP(weight)(scales, r, kind);
    }
}

/* `rows` rows of a panel, whole subpanels, for T tokens, 1 to GROUP_PLANE_TOKENS: acc (T, rows). panel, scales: of the
 * first row in the first chunk. product: the set's int8 kernel, and its scratch memory. next: the codes that are
 * multiplied by after these, or NULL. */
STEP_TARGET static void STEP(group_panel)(const group_shape *s, const uint8_t *panel, const void *scales, int kind,
                                          size_t rows, const group_chunk *x, size_t T, double *acc,
                                          ternary_panel_fn product, void *scratch, const uint8_t *next) {
    (void)next;
    int32_t sums[GROUP_PLANE_TOKENS * GROUP_PLANES * PANEL_ROWS];
    const size_t size = kind == 0 ? 4 : 2;
    memset(acc, 0, T * rows * sizeof *acc);
    for (size_t c = 0; c < s->n_chunks; c++, x++, panel += s->code_bytes)
        for (size_t r = 0; r < rows; r += PANEL_ROWS) {
            product(panel + r / PANEL_ROWS * s->subpanel_bytes, s->wide / BLOCK_K, (const int8_t *)x->tokens, s->wide,
                    GROUP_PLANES * T, x->x_sum, sums, PANEL_ROWS, PANEL_ROWS, scratch);
            for (size_t t = 0; t < T; t++)
                STEP(group_add)(sums + t * GROUP_PLANES * PANEL_ROWS, x->steps[t],
                                (const char *)scales + (c * s->rows + r) * size, kind, acc + t * rows + r);
        }
}
#endif
