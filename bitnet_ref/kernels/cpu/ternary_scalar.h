/* The ternary product in portable C. Every other kernel computes this, faster.
 *
 *     acc[m][r] = sum over k of code[r][k] * x[m][k]  -  sum over k of x[m][k]
 *
 * int32 never overflows: |sum| <= 2 * 128 * K. */
#ifndef BITNET_REF_TERNARY_SCALAR_H
#define BITNET_REF_TERNARY_SCALAR_H

#include "panel.h"

static void ternary_panel_scalar(const uint8_t *panel, size_t n_blocks, const int8_t *x, size_t x_stride, size_t M,
                                 const int32_t *x_sum, int32_t *acc, size_t acc_stride, size_t rows, void *scratch) {
    (void)scratch;
    for (size_t m = 0; m < M; m++) {
        int32_t sum[PANEL_ROWS] = {0};
        for (size_t b = 0; b < n_blocks; b++) {
            const int8_t *xb = x + m * x_stride + b * BLOCK_K;
            const uint8_t *block = panel + b * BLOCK_BYTES;
            for (size_t r = 0; r < rows; r++) {
                const uint8_t *codes = block + (r / 16) * VECTOR_BYTES + (r % 16) * 4;
                for (int i = 0; i < 4; i++)
                    sum[r] += (codes[i] & 3) * xb[i] + (codes[i] >> 2 & 3) * xb[4 + i] +
                              (codes[i] >> 4 & 3) * xb[8 + i] + (codes[i] >> 6) * xb[12 + i];
            }
        }
        for (size_t r = 0; r < rows; r++) acc[m * acc_stride + r] = sum[r] - x_sum[m];
    }
}

#endif
