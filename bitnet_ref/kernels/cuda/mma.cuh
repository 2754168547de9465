// The products of the tensor cores, one function each, called by a whole warp.
#pragma once

// int8: D += A B with A 16x32, B 32x8, D 16x8.
//
// Each lane holds four registers of A, two of B and four of D; `emulated_functions.h` quotes the PTX ISA on their
// elements. In short, with g = lane / 4 and t = lane % 4:
//
//     a[0]  row g,   columns 4t .. 4t+3       a[1]  row g+8, the same columns
//     a[2]  row g,   columns 4t+16 .. +19     a[3]  row g+8, the same columns
//     b[0]  rows 4t .. 4t+3 of column g       b[1]  rows 4t+16 .. 4t+19 of column g
//     d[0], d[1]  row g, columns 2t, 2t+1     d[2], d[3]  row g+8, columns 2t, 2t+1
//
// The 32 columns of A and rows of B may be in any order, the same in both.
__device__ __forceinline__ void mma_s8(int (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
#ifdef BITNET_REF_EMULATED
    emulated::mma_m16n8k32_s8(d, a, b);
#else
    asm volatile(
        "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#endif
}

// float64, four products of one A at once: D[i] += A B[i] with A 8x16, B 16x8, D 8x8, each as four of m8n8k4.
//
//     a[m]     row g, column 4t + m     b[i][m]  row 4t + m, column g     d[i][0], d[i][1]  row g, columns 2t, 2t+1
//
// The instruction takes one column of A per lane t; we give it four neighbours of the 16 columns, which are one load,
// in four products. Product m is added after product m - 1.
__device__ __forceinline__ void mma_f64(double (&d)[4][2], const double (&a)[4], const double (&b)[4][4]) {
#ifdef BITNET_REF_EMULATED
    emulated::mma_m8n8k4_f64(d, a, b);
#else
#pragma unroll
    for (int m = 0; m < 4; m++)
#pragma unroll
        for (int i = 0; i < 4; i++)
            asm("mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%0, %1}, {%2}, {%3}, {%0, %1};"
                : "+d"(d[i][0]), "+d"(d[i][1])
                : "d"(a[m]), "d"(b[i][m]));
#endif
}

// bfloat16 with float32 sums: D += A B with A 16x16, B 16x8, D 16x8. A register is a pair, the first in its lower half.
//
//     a[0]  row g,   columns 2t, 2t+1         a[1]  row g+8, the same columns
//     a[2]  row g,   columns 2t+8, 2t+9       a[3]  row g+8, the same columns
//     b[0]  rows 2t, 2t+1 of column g         b[1]  rows 2t+8, 2t+9 of column g
//     d     as of int8
//
// Products are exact. Sums are not rounded to nearest: bits below the last bit of the largest term are cut off.
//
// One call takes R A's below each other and C B's beside each other, STEPS times, so that independent sums take turns.
// (In emulation it is one collective of the warp, which is the expensive part there.)
template <int R, int C, int STEPS>
__device__ __forceinline__ void mma_bf16(float (&d)[R][C][4], const unsigned (&a)[R][STEPS][4],
                                         const unsigned (&b)[C][STEPS][2]) {
#ifdef BITNET_REF_EMULATED
    emulated::mma_m16n8k16_bf16(d, a, b);
#else
#pragma unroll
    for (int i = 0; i < STEPS; i++)
#pragma unroll
        for (int c = 0; c < C; c++)
#pragma unroll
            for (int r = 0; r < R; r++)
                asm volatile(
                    "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
                    "{%8, %9}, {%0, %1, %2, %3};"
                    : "+f"(d[r][c][0]), "+f"(d[r][c][1]), "+f"(d[r][c][2]), "+f"(d[r][c][3])
                    : "r"(a[r][i][0]), "r"(a[r][i][1]), "r"(a[r][i][2]), "r"(a[r][i][3]), "r"(b[c][i][0]),
                      "r"(b[c][i][1]));
#endif
}
