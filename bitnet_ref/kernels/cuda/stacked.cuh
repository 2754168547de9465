// Stacked matrices of one input: q, k and v, or gate and up. One launch computes all of them.
//
// The results are one array (tokens, its rows) for each matrix, one after the other. For a single matrix that is
// (tokens, rows).
#pragma once

/* Index of y of a token and a row of the stack. second, third: the first row of the second and third matrix, or `rows`,
 * the number of all rows, where there is none. */
__device__ __forceinline__ long long place_in_stack(long long token, int row, int tokens, int rows, int second,
                                                    int third) {
    const int begin = row >= third ? third : row >= second ? second : 0;
    const int end = row >= third ? rows : row >= second ? third : second;
    return (long long)begin * tokens + token * (end - begin) + (row - begin);
}
