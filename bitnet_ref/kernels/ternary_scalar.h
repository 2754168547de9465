/* The ternary product in portable C: one row of packed weights against a few tokens.
 *
 * Plain version:  acc[m] = sum over k of w_t[k] * x_q[m][k],   w_t[k] = ((packed[k / 4] >> 2 * (k % 4)) & 3) - 1
 *
 * Here the row is unpacked once into int8 and then used for every token, and the inner sum is a loop that compilers
 * vectorise. int32 never overflows: |acc| <= 128 * K.
 */
#ifndef BITNET_REF_TERNARY_SCALAR_H
#define BITNET_REF_TERNARY_SCALAR_H

#include <stddef.h>
#include <stdint.h>

/* packed (ceil(K/4)) bytes -> w_t, 4 * ceil(K/4) values in -1, 0, +1 */
static void unpack_ternary_row(const uint8_t *packed, size_t n_bytes, int8_t *w_t) {
    for (size_t j = 0; j < n_bytes; j++) {
        const uint8_t byte = packed[j];
        w_t[4 * j + 0] = (int8_t)((byte & 3) - 1);
        w_t[4 * j + 1] = (int8_t)((byte >> 2 & 3) - 1);
        w_t[4 * j + 2] = (int8_t)((byte >> 4 & 3) - 1);
        w_t[4 * j + 3] = (int8_t)((byte >> 6) - 1);
    }
}

/* w_t (K), x (M, K) -> acc[m * acc_stride] */
static void ternary_dot_rows(const int8_t *w_t, const int8_t *x, size_t M, size_t K, int32_t *acc, size_t acc_stride) {
    for (size_t m = 0; m < M; m++) {
        int32_t sum = 0;
        for (size_t k = 0; k < K; k++) sum += (int32_t)w_t[k] * (int32_t)x[m * K + k];
        acc[m * acc_stride] = sum;
    }
}

#endif
