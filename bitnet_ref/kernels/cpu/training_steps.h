/* The steps of a training pass between its products (bitnet_ref/training/ops.py), each of one row or matrix. A template,
 * included by float_steps.h. Sums are taken in double, and quotients by 1/r: a gradient equals NumPy's to a few ulps.
 *
 * Measured, Xeon (Sapphire Rapids, AMX), 8 sequences of 256 tokens of storyteller's shape, two threads, medians of three
 * runs in turn: a whole step 504 ms with NumPy's AdamW, norm and rescaling, 470 with these. Of it AdamW was 25 ms with
 * one thread and with two, which wait for each other between small operations, and is 6; norm and clipping 11, and 6. */

/* With r = sqrt(mean(x^2) + eps) and n = x / r:   dx = (dy g - n mean(dy g n)) / r,   d_weight += dy n */
STEP_TARGET static void STEP(norm_backward)(const float *dy, const float *x, const float *weight, size_t D, double eps,
                                            float *dx, double *d_weight) {
    const double inverse = 1.0 / (float)sqrt(STEP(sum_of_squares)(x, D) / (double)D + eps);
    STEP(f64v) sum = {0};
    double total = 0;
    size_t i = 0;
    for (; i + STEP(DOUBLES) <= D; i += STEP(DOUBLES)) {
        const STEP(f64v) d_n = STEP(wide)(dy + i) * (STEP(wide)(x + i) * inverse);
        STEP(f64v) of_weight;
        memcpy(&of_weight, d_weight + i, sizeof of_weight);
        of_weight += d_n;
        memcpy(d_weight + i, &of_weight, sizeof of_weight);
        sum += d_n * STEP(wide)(weight + i);
    }
    for (; i < D; i++) {
        const double d_n = (double)dy[i] * (x[i] * inverse);
        d_weight[i] += d_n;
        total += d_n * weight[i];
    }
    const float mean = (float)((total + STEP(sum_lanes)(sum)) / (double)D), by_r = (float)inverse;
    for (i = 0; i < D; i++) dx[i] = (dy[i] * weight[i] - x[i] * by_r * mean) * by_r;
}

/* scores (n) -> pattern (n) = softmax(scores * scale), scores and pattern rounded to float32; `scores` becomes it too */
STEP_TARGET static void STEP(softmax_row)(double *scores, size_t n, double scale, float *pattern) {
    for (size_t i = 0; i < n; i++) pattern[i] = (float)(scores[i] * scale);
    STEP(softmax)(pattern, n, scores, NULL, 0, 0);
    for (size_t i = 0; i < n; i++) pattern[i] = (float)scores[i];
}

/* dS = P (dP - sum(dP P)) scale, in place */
STEP_TARGET static void STEP(softmax_backward)(float *d_scores, const float *pattern, size_t n, float scale) {
    STEP(f64v) sum = {0};
    size_t i = 0;
    for (; i + STEP(DOUBLES) <= n; i += STEP(DOUBLES)) sum += STEP(wide)(d_scores + i) * STEP(wide)(pattern + i);
    double total = STEP(sum_lanes)(sum);
    for (; i < n; i++) total += (double)d_scores[i] * pattern[i];
    const float mean = (float)total;
    for (i = 0; i < n; i++) d_scores[i] = (d_scores[i] - mean) * pattern[i] * scale;
}

/* Of y = relu(gate)^2 up:   d gate = 2 dy up relu(gate),   d up = dy relu(gate)^2 */
STEP_TARGET static void STEP(relu2_backward)(const float *dy, const float *gate, const float *up, size_t n, float *d_gate,
                                             float *d_up) {
    for (size_t i = 0; i < n; i++) {
        const float g = gate[i] < 0 ? 0 : gate[i], d = dy[i] * g;
        d_gate[i] = d * up[i] * 2;
        d_up[i] = d * g;
    }
}

/* w (n) -> codes (n), w_t + 1 with w_t = clip(round(w inverse), -1, 1), and values (n) = w_t */
STEP_TARGET static void STEP(ternarize)(const float *w, size_t n, float inverse, uint8_t *codes, float *values) {
    const float magic = 12582912.0f; /* 1.5 * 2^23: adding it rounds to the nearest integer, half to even */
    for (size_t i = 0; i < n; i++) {
        float x = w[i] * inverse;
        x = x < -1 ? -1 : x;
        x = x > 1 ? 1 : x;
        const float rounded = x + magic;
        codes[i] = (uint8_t)(float_bits(rounded) + 1);
        values[i] = rounded - magic;
    }
}

/* x (K) = x_q / x_quant_scale: what the activations were rounded to */
STEP_TARGET static void STEP(rescale)(const int8_t *x_q, size_t K, float x_quant_scale, float *x) {
    for (size_t i = 0; i < K; i++) x[i] = (float)x_q[i] / x_quant_scale;
}

/* One array's step of training/ops.py's `adamw`: NumPy's operations in its order, so its bits */
STEP_TARGET static void STEP(adamw)(float *restrict w, const float *restrict g, float *restrict m, float *restrict v,
                                    size_t n, const adamw_rates *rates) {
    const adamw_rates r = *rates;
    for (size_t i = 0; i < n; i++) {
        m[i] = m[i] * r.b1 + g[i] * r.rest1;
        v[i] = v[i] * r.b2 + g[i] * g[i] * r.rest2;
        const float denominator = sqrtf(v[i]) / r.v_scale + r.eps;
        w[i] = w[i] * r.keep - m[i] * r.step_size / denominator;
    }
}
