// Matrices of one input that lie on top of each other: q, k and v, or gate and up. One launch computes all of them.
//
// What comes after takes each of them as an array of its own, so the results do not lie side by side in a row but one
// (tokens, its rows) array after the other. Of a single matrix that is (tokens, rows).
#pragma once

/* Index of a token's y of a row. second, third: the first row of the matrix below, and of the one below that; `rows`,
 * which is all of them, where there is none. */
__device__ __forceinline__ long long place_in_stack(long long token, int row, int tokens, int rows, int second,
                                                    int third) {
    const int begin = row >= third ? third : row >= second ? second : 0;
    const int end = row >= third ? rows : row >= second ? third : second;
    return (long long)begin * tokens + token * (end - begin) + (row - begin);
}
