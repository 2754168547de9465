/* The ternary product on 64-bit Arm: sdot (Armv8.2 dot product) adds groups of 4 of its 16 int8 products into 4 lanes;
 * without it, vmull and vpadal do the same in two steps.
 *
 * Plain version: ternary_scalar.h. Codes 0..2 are the same bytes signed or unsigned, so sdot's signed operands fit. A
 * vector of 64 bytes is four registers of 4 rows. The 16 activations of a block are one register, and a lane of it
 * holds the 4 columns of one field, so nothing is broadcast. */
#ifndef BITNET_REF_TERNARY_NEON_H
#define BITNET_REF_TERNARY_NEON_H

#include "panel.h"

#if defined(__aarch64__)
#include <arm_neon.h>

#define DOTPROD_TARGET __attribute__((target("arch=armv8.2-a+dotprod")))

/* Per step: 4 rows of a block, one token. */
#define NEON_ROWS(NAME, TARGET, DOT)                                                                                   \
    TARGET static void NAME(TERNARY_ARGS, size_t rows, void *scratch) {                                                \
        (void)scratch;                                                                                                 \
        const uint8x16_t field = vdupq_n_u8(3);                                                                        \
        for (size_t first = 0; first < rows; first += 4)                                                               \
            for (size_t m = 0; m < M; m++) {                                                                           \
                int32x4_t sum = vdupq_n_s32(-x_sum[m]);                                                                \
                for (size_t b = 0; b < n_blocks; b++) {                                                                \
                    const uint8x16_t codes = vld1q_u8(panel + b * BLOCK_BYTES + 4 * first);                            \
                    const int8x16_t xs = vld1q_s8(x + m * x_stride + b * BLOCK_K);                                     \
                    sum = DOT(sum, vreinterpretq_s8_u8(vandq_u8(codes, field)), xs, 0);                                \
                    sum = DOT(sum, vreinterpretq_s8_u8(vandq_u8(vshrq_n_u8(codes, 2), field)), xs, 1);                 \
                    sum = DOT(sum, vreinterpretq_s8_u8(vandq_u8(vshrq_n_u8(codes, 4), field)), xs, 2);                 \
                    sum = DOT(sum, vreinterpretq_s8_u8(vshrq_n_u8(codes, 6)), xs, 3);                                  \
                }                                                                                                      \
                int32_t out[4];                                                                                        \
                vst1q_s32(out, sum);                                                                                   \
                for (size_t r = 0; r < 4 && first + r < rows; r++) acc[m * acc_stride + first + r] = out[r];           \
            }                                                                                                          \
    }

/* sum + 4 rows of 4 products with lane `lane` of x: vdotq_laneq_s32 in several instructions */
#define NEON_DOT(sum, codes, xs, lane) neon_dot(sum, codes, vdupq_laneq_s32(vreinterpretq_s32_s8(xs), lane))
static inline int32x4_t neon_dot(int32x4_t sum, int8x16_t codes, int32x4_t word) {
    const int8x16_t x = vreinterpretq_s8_s32(word);
    const int16x8_t low = vmull_s8(vget_low_s8(codes), vget_low_s8(x)), high = vmull_high_s8(codes, x);
    return vaddq_s32(sum, vpaddq_s32(vpaddlq_s16(low), vpaddlq_s16(high)));
}

#define DOTPROD_DOT(sum, codes, xs, lane) vdotq_laneq_s32(sum, codes, xs, lane)

NEON_ROWS(ternary_panel_neon, , NEON_DOT)
NEON_ROWS(ternary_panel_dotprod, DOTPROD_TARGET, DOTPROD_DOT)

#endif
#endif
