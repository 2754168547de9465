# cython: boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False, binding=True
"""The compiled CPU kernels: argument checks, threads, and calls into the C headers beside this file."""

from cython.parallel cimport parallel, prange
from libc.stdint cimport int8_t, int32_t, uint8_t
from libc.stdlib cimport abort, free, malloc

cdef extern from "ternary_scalar.h" nogil:
    void unpack_ternary_row(const uint8_t *packed, size_t n_bytes, int8_t *w_t)
    void ternary_dot_rows(const int8_t *w_t, const int8_t *x, size_t M, size_t K, int32_t *acc, size_t acc_stride)

cdef extern from *:
    """
    #ifdef _OPENMP
    #define BITNET_REF_OPENMP 1
    #else
    #define BITNET_REF_OPENMP 0
    #endif
    """
    const int BITNET_REF_OPENMP

has_openmp = bool(BITNET_REF_OPENMP)


def ternary_matmul(const int8_t[:, ::1] x_q, const uint8_t[:, ::1] packed, int32_t[:, ::1] acc, int threads):
    """x_q (M, K) int8, packed (N, ceil(K/4)) uint8 -> acc (M, N) int32, written in place. Output rows over threads."""
    cdef Py_ssize_t M = x_q.shape[0], K = x_q.shape[1], N = packed.shape[0], n_bytes = packed.shape[1]
    if n_bytes != (K + 3) // 4 or acc.shape[0] != M or acc.shape[1] != N or threads < 1:
        raise ValueError(f"ternary_matmul: x_q {M, K}, packed {N, n_bytes}, acc {acc.shape[0], acc.shape[1]}, {threads}")
    if M == 0 or N == 0 or K == 0:
        acc[:, :] = 0
        return
    cdef Py_ssize_t n
    cdef int8_t *w_t
    with nogil, parallel(num_threads=threads):
        w_t = <int8_t *> malloc(4 * n_bytes)
        if w_t == NULL:
            abort()  # a few kilobytes: there is no going on without them
        for n in prange(N, schedule="static"):
            unpack_ternary_row(&packed[n, 0], n_bytes, w_t)
            ternary_dot_rows(w_t, &x_q[0, 0], M, K, &acc[0, n], N)
        free(w_t)
