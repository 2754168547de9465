# cython: boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False, binding=True
"""The compiled CPU kernels: argument checks, threads, and calls into the C headers beside this file.

Every function takes the index of a kernel set (`kernel_sets`) and works on whole rows: which thread computes a row, and
how many rows there are, does not change what is computed. The GIL is released; any number of Python threads may call.
"""

import os

from cython.parallel cimport parallel, prange
from libc.math cimport NAN
from libc.stdint cimport int8_t, int16_t, int32_t, int64_t, uint8_t, uint16_t, uint64_t
from libc.stdlib cimport abort, free, malloc
from libc.string cimport memcpy, memset

cdef extern from "stdlib.h" nogil:
    int posix_memalign(void **memory, size_t alignment, size_t size)

cdef extern from "kernels.h" nogil:
    ctypedef struct ternary_method:
        const char *name
        size_t block_k, x_bytes
        void (*pack)(const uint8_t *, size_t, size_t, uint8_t *) noexcept nogil
        void (*unpack)(const uint8_t *, size_t, size_t, uint8_t *) noexcept nogil
        void (*expand)(const int8_t *, size_t, uint8_t *) noexcept nogil
    ctypedef struct ternary_kernel:
        void (*run)(const uint8_t *, size_t, const int8_t *, size_t, size_t, const int32_t *, int32_t *, size_t, size_t,
                    void *) noexcept nogil
        size_t max_k
    ctypedef struct kv_pool:
        const void *rows
        const float *scales
    ctypedef struct kv_view:
        kv_pool keys, values
        const int32_t *pages
        size_t page_size, stride, scale_stride, first, n_keys
        int kind
    const int KV_FLOAT32, KV_FLOAT16, KV_INT8, ATTEND_ROWS
    long l2_bytes()
    const ternary_method METHODS[]
    const int N_METHODS
    ctypedef struct kernel_set:
        const char *name
        ternary_kernel ternary[3]  # N_METHODS
        size_t (*peak)(size_t) noexcept nogil
        int (*rms_norm)(const float *, const float *, size_t, double, float *) noexcept nogil
        int (*quantize)(const float *, size_t, int8_t *, float *, int32_t *) noexcept nogil
        void (*dequantize)(const int32_t *, size_t, float, float, const float *, float *) noexcept nogil
        void (*gated)(const float *, const float *, size_t, int, float *) noexcept nogil
        void (*rope)(const float *, size_t, size_t, const float *, const float *, float *) noexcept nogil
        size_t (*attend_workspace)(size_t, size_t, size_t) noexcept nogil
        void (*attend)(const float *, size_t, size_t, const kv_view *, double, double *, float *) noexcept nogil
        void (*attend_many)(const float *, size_t, size_t, size_t, size_t, const kv_view *, size_t, double, double *,
                            float *) noexcept nogil
        void (*dense_rows)(int, const void *, size_t, size_t, const float *, size_t, float *, size_t) noexcept nogil
        void (*screen_pack)(int, const void *, size_t, size_t, int8_t *, float *) noexcept nogil
        int (*screen_token)(const float *, size_t, size_t, int16_t *, double *) noexcept nogil
        void (*screen_rows)(const int8_t *, size_t, size_t, size_t, const float *, const int16_t *, size_t,
                            const double *, float *, float *, size_t) noexcept nogil
    const kernel_set KERNEL_SETS[]
    const int N_KERNEL_SETS
    const char *kernel_set_lacks(size_t index)
    const int PANEL_ROWS, BLOCK_BYTES, SCRATCH_BYTES

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
cdef Py_ssize_t L2_BYTES = l2_bytes()
panel_rows, block_bytes = PANEL_ROWS, BLOCK_BYTES

# A second thread costs some microseconds, and much more on a busy machine: it is woken for this much work or more.
cdef enum:
    PANEL_BYTES_A_THREAD = 65536
    DENSE_BYTES_A_THREAD = 262144
    ATTENTION_FLOATS_A_THREAD = 131072
    ATTEND_SCORES = 1 << 20  # of tokens that go through the keys together: 12 MB of each thread
    FLOATS_A_THREAD = 65536  # of the steps that go through a token once

floats_a_thread = FLOATS_A_THREAD


def kernel_sets():
    """[(name, None or what this processor lacks for it)], the best last"""
    found = []
    for index in range(N_KERNEL_SETS):
        lacks = kernel_set_lacks(index)
        found.append((KERNEL_SETS[index].name.decode(), None if lacks == NULL else lacks.decode()))
    return found


def ternary_methods():
    """[(name, columns in a block, kernel sets that have a kernel for it)], by number"""
    found = []
    for method in range(N_METHODS):
        sets = [KERNEL_SETS[i].name.decode() for i in range(N_KERNEL_SETS) if KERNEL_SETS[i].ternary[method].run != NULL]
        found.append((METHODS[method].name.decode(), METHODS[method].block_k, sets))
    return found


cdef const ternary_kernel *kernel_for(Py_ssize_t kernels, Py_ssize_t method, Py_ssize_t K) except NULL:
    """A set's kernel for that method and K columns: the scalar one beyond the columns that the set's own can sum."""
    if not (0 <= kernels < N_KERNEL_SETS and 0 <= method < N_METHODS):
        raise ValueError(f"kernel set {kernels}, method {method}")
    cdef const ternary_kernel *kernel = &KERNEL_SETS[kernels].ternary[method]
    if kernel.run == NULL:
        raise ValueError(f"the kernel set {KERNEL_SETS[kernels].name.decode()} has no {METHODS[method].name.decode()} kernel")
    if kernel.max_k and <size_t> K > kernel.max_k:
        return &KERNEL_SETS[0].ternary[method]
    return kernel


# OpenMP's threads do not survive a fork: a forked child that asks for two waits for the other for ever (libgomp).
cdef bint forked = False


def _after_fork_in_child():
    global forked
    forked = True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)


cdef inline int threads_for(Py_ssize_t work, Py_ssize_t work_a_thread, int threads) noexcept nogil:
    if forked:
        return 1
    cdef Py_ssize_t useful = work // work_a_thread
    return threads if useful >= threads else (1 if useful < 1 else <int> useful)


cdef uint64_t sum_of(const uint64_t *words, Py_ssize_t n) noexcept nogil:
    cdef uint64_t total = 0
    cdef Py_ssize_t i
    for i in range(n):
        total += words[i]
    return total


cdef inline void *aligned_scratch(size_t size) noexcept nogil:
    cdef void *memory = NULL
    if posix_memalign(&memory, 64, size) != 0:
        abort()  # a few kilobytes: there is no going on without them
    return memory


cdef inline float *aligned_copy(const float *x, Py_ssize_t n) noexcept nogil:
    """The same floats on a line of the cache, or NULL: NumPy's arrays lie anywhere, and a load of 64 bytes that takes
    two lines costs twice."""
    cdef void *memory = NULL
    if posix_memalign(&memory, 64, max(n, 1) * sizeof(float)) != 0:
        return NULL
    memcpy(memory, x, n * sizeof(float))
    return <float *> memory


def sum_words(const uint64_t[::1] words, int threads):
    """The sum of the words, modulo 2^64: reads every byte once, as fast as the memory gives it. For benchmarks."""
    cdef Py_ssize_t n = words.shape[0], chunk, chunk_words = 65536
    cdef uint64_t total = 0, part
    cdef int team = threads_for(threads, 1, threads)
    for chunk in prange((n + chunk_words - 1) // chunk_words, nogil=True, num_threads=team, schedule="static"):
        part = sum_of(&words[chunk * chunk_words], min(chunk_words, n - chunk * chunk_words))
        total += part
    return total


def peak_multiply_adds(Py_ssize_t kernels, Py_ssize_t rounds, int threads):
    """The kernel set's product instruction, `rounds` rounds of it on registers alone on every thread: how many
    multiply-adds that was, all threads together, or 0 where the set has no such loop. For benchmarks."""
    cdef Py_ssize_t part
    cdef size_t done = 0
    if KERNEL_SETS[kernels].peak == NULL or kernel_set_lacks(kernels) != NULL or rounds < 1 or threads < 1:
        return 0
    cdef int team = threads_for(threads, 1, threads)
    for part in prange(threads, nogil=True, num_threads=team, schedule="static"):
        done += KERNEL_SETS[kernels].peak(rounds)
    return done * rounds


def pack_panels(const uint8_t[:, ::1] packed, uint8_t[:, ::1] panels, int threads, Py_ssize_t method):
    """packed (N, ceil(K/4)) -> panels (ceil(N/64), 256 blocks): the method's layout, as the headers describe them"""
    cdef Py_ssize_t N = packed.shape[0], row_bytes = packed.shape[1], p, count
    cdef Py_ssize_t n_panels = (N + PANEL_ROWS - 1) // PANEL_ROWS, byte_blocks = METHODS[method].block_k // 4
    if (panels.shape[0] != n_panels or panels.shape[1] != (row_bytes + byte_blocks - 1) // byte_blocks * BLOCK_BYTES
            or N == 0 or row_bytes == 0):
        raise ValueError(f"pack_panels: packed {N, row_bytes}, panels {panels.shape[0], panels.shape[1]}")
    cdef int team = threads_for(n_panels * panels.shape[1], PANEL_BYTES_A_THREAD, threads)
    for p in prange(n_panels, nogil=True, num_threads=team, schedule="static"):
        count = min(<Py_ssize_t> PANEL_ROWS, N - p * PANEL_ROWS)
        METHODS[method].pack(&packed[p * PANEL_ROWS, 0], count, row_bytes, &panels[p, 0])


def unpack_panels(const uint8_t[:, ::1] panels, uint8_t[:, ::1] packed, Py_ssize_t method):
    """The inverse of pack_panels."""
    cdef Py_ssize_t N = packed.shape[0], row_bytes = packed.shape[1], p
    cdef Py_ssize_t n_panels = (N + PANEL_ROWS - 1) // PANEL_ROWS, byte_blocks = METHODS[method].block_k // 4
    if panels.shape[0] != n_panels or panels.shape[1] != (row_bytes + byte_blocks - 1) // byte_blocks * BLOCK_BYTES:
        raise ValueError(f"unpack_panels: packed {N, row_bytes}, panels {panels.shape[0], panels.shape[1]}")
    for p in range(n_panels):
        METHODS[method].unpack(&panels[p, 0], min(<Py_ssize_t> PANEL_ROWS, N - p * PANEL_ROWS), row_bytes,
                               &packed[p * PANEL_ROWS, 0])


def quantize(const float[:, ::1] x, int8_t[:, ::1] x_q, float[:, ::1] x_quant_scale, Py_ssize_t kernels):
    """x (M, K) -> x_q (M, K), x_quant_scale (M, 1). Returns -1, or the first row that holds NaN or Inf."""
    cdef Py_ssize_t M = x.shape[0], K = x.shape[1], m
    cdef int32_t x_sum
    if x_q.shape[0] != M or x_quant_scale.shape[0] != M or x_q.shape[1] != K:
        raise ValueError(f"quantize: x {M, K}, x_q {x_q.shape[0], x_q.shape[1]}")
    with nogil:
        for m in range(M):
            if not KERNEL_SETS[kernels].quantize(&x[m, 0], K, &x_q[m, 0], &x_quant_scale[m, 0], &x_sum):
                with gil:
                    return m
    return -1


def ternary_matmul(const int8_t[:, ::1] x_q, const int32_t[::1] x_sum, const uint8_t[:, ::1] panels,
                   int32_t[:, ::1] acc, int threads, Py_ssize_t kernels, Py_ssize_t method):
    """x_q (M, block_k * blocks) int8, zeros beyond K, and its row sums; panels; -> acc (M, N). Panels over threads."""
    cdef Py_ssize_t M = x_q.shape[0], wide = x_q.shape[1], N = acc.shape[1], n_panels = panels.shape[0], p, m
    cdef const ternary_kernel *chosen = kernel_for(kernels, method, wide)
    cdef const ternary_method *how = &METHODS[method]
    cdef Py_ssize_t n_blocks = wide // <Py_ssize_t> how.block_k, x_stride = n_blocks * how.x_bytes
    if (acc.shape[0] != M or x_sum.shape[0] != M or wide % how.block_k or panels.shape[1] != n_blocks * BLOCK_BYTES
            or n_panels != (N + PANEL_ROWS - 1) // PANEL_ROWS or threads < 1):
        raise ValueError(f"ternary_matmul: x_q {M, wide}, panels {n_panels, panels.shape[1]}, acc {acc.shape[0], N}")
    if M == 0:
        return
    cdef int team = threads_for(n_panels * panels.shape[1] * M, PANEL_BYTES_A_THREAD, threads)
    cdef void *scratch = NULL
    cdef int8_t *expanded = NULL
    cdef const int8_t *x = &x_q[0, 0]
    if how.expand != NULL:
        expanded = <int8_t *> malloc(M * x_stride)
        if expanded == NULL:
            raise MemoryError(f"no memory for the tables of {M} tokens")
        for m in range(M):
            how.expand(&x_q[m, 0], n_blocks, <uint8_t *> expanded + m * x_stride)
        x = expanded
    with nogil, parallel(num_threads=team):
        scratch = aligned_scratch(SCRATCH_BYTES)
        for p in prange(n_panels, schedule="static"):
            chosen.run(&panels[p, 0], n_blocks, x, x_stride, M, &x_sum[0], &acc[0, p * PANEL_ROWS], N,
                       min(<Py_ssize_t> PANEL_ROWS, N - p * PANEL_ROWS), scratch)
        free(scratch)
    free(expanded)


cdef class Panels:
    """One ternary matrix, ready to be multiplied: its panels, its scale, its bias."""
    cdef const uint8_t[:, ::1] panels
    cdef const float[::1] bias
    cdef const float *bias_values
    cdef Py_ssize_t n_out, n_in, n_blocks, method
    cdef float w_dequant_scale

    def __init__(self, const uint8_t[:, ::1] panels, Py_ssize_t n_out, Py_ssize_t n_in, float w_dequant_scale, bias,
                 Py_ssize_t method):
        self.panels, self.n_out, self.n_in, self.w_dequant_scale = panels, n_out, n_in, w_dequant_scale
        self.method = method
        self.n_blocks = (n_in + METHODS[method].block_k - 1) // <Py_ssize_t> METHODS[method].block_k
        if panels.shape[0] != (n_out + PANEL_ROWS - 1) // PANEL_ROWS or panels.shape[1] != self.n_blocks * BLOCK_BYTES:
            raise ValueError(f"Panels: {panels.shape[0], panels.shape[1]} for {n_out, n_in}")
        self.bias_values = NULL
        if bias is not None:
            self.bias = bias
            if self.bias.shape[0] != n_out:
                raise ValueError(f"Panels: bias {self.bias.shape[0]}, expected {n_out}")
            self.bias_values = &self.bias[0]


cdef enum:
    MAX_LINEARS = 8  # of one call
    TOKENS_A_STEP = 96  # whole tiles of every set: 6 and 32 tokens


cdef Py_ssize_t tokens_in_l2(Py_ssize_t token_bytes) noexcept:
    """How many tokens go through all panels before the next ones do: their activations stay in L2, most of it theirs."""
    return max(<Py_ssize_t> 1, L2_BYTES * 3 // 4 // (max(<Py_ssize_t> 1, token_bytes) * TOKENS_A_STEP)) * TOKENS_A_STEP


def bit_linears(const float[:, ::1] x, list ws, ys, int threads, Py_ssize_t kernels):
    """Several BitLinears of the same x (M, K), quantised once: ys[i] (M, N_i) = x ws[i]^T. The panels of all over threads.

    Returns -1, or the first row of x that holds NaN or Inf. One parallel region instead of one for each step and matrix:
    for one token of a 2560-wide block the steps between the products took a tenth of the time.
    """
    cdef Py_ssize_t M = x.shape[0], K = x.shape[1], count = len(ws), i, m, item, p, rows, bad = -1, total = 0, bytes_ = 0
    cdef Py_ssize_t method = (<Panels> ws[0]).method if count else 0
    cdef const ternary_method *how = &METHODS[method]
    cdef Py_ssize_t n_blocks = (K + how.block_k - 1) // <Py_ssize_t> how.block_k, wide = n_blocks * how.block_k
    cdef Py_ssize_t x_stride = n_blocks * how.x_bytes
    cdef Panels w
    cdef float[:, ::1] y
    cdef const uint8_t *panels[MAX_LINEARS]
    cdef const float *biases[MAX_LINEARS]
    cdef float *outs[MAX_LINEARS]
    cdef Py_ssize_t first[MAX_LINEARS + 1]
    cdef Py_ssize_t n_out[MAX_LINEARS]
    cdef float scales[MAX_LINEARS]
    if count > MAX_LINEARS or len(ys) != count or threads < 1:
        raise ValueError(f"bit_linears: {count} weights, {len(ys)} results, {threads} threads")
    for i in range(count):
        w, y = ws[i], ys[i]
        if w.n_in != K or w.method != method or y.shape[0] != M or y.shape[1] != w.n_out:
            raise ValueError(f"bit_linears: x {M, K}, weight {w.n_out, w.n_in}, result {y.shape[0], y.shape[1]}")
        first[i] = total
        total += w.panels.shape[0]
        bytes_ += w.panels.shape[0] * w.panels.shape[1]
        panels[i], biases[i], scales[i], n_out[i] = &w.panels[0, 0], w.bias_values, w.w_dequant_scale, w.n_out
        outs[i] = &y[0, 0] if M else NULL
    first[count] = total
    if M == 0 or count == 0:
        return -1
    cdef const kernel_set *chosen = &KERNEL_SETS[kernels]
    cdef const ternary_kernel *ternary = kernel_for(kernels, method, wide)
    cdef int8_t *x_q
    cdef int8_t *expanded = NULL
    cdef int32_t *x_sum
    cdef float *x_quant_scale
    cdef void *scratch = NULL
    cdef int32_t *acc = NULL
    cdef float *out = NULL
    cdef int team = threads_for(M * K, FLOATS_A_THREAD, threads)
    cdef Py_ssize_t block, tokens, tokens_a_block = tokens_in_l2(x_stride)
    x_q = <int8_t *> malloc(M * wide)
    x_sum = <int32_t *> malloc(M * sizeof(int32_t))
    x_quant_scale = <float *> malloc(M * sizeof(float))
    if how.expand != NULL:
        expanded = <int8_t *> malloc(M * x_stride)
    if x_q == NULL or x_sum == NULL or x_quant_scale == NULL or (how.expand != NULL and expanded == NULL):
        free(x_q)
        free(expanded)
        free(x_sum)
        free(x_quant_scale)
        raise MemoryError(f"no memory for {M} tokens of {K} activations")
    with nogil:
        for m in prange(M, num_threads=team, schedule="static"):
            if wide > K:
                memset(x_q + m * wide + K, 0, wide - K)
            if not chosen.quantize(&x[m, 0], K, x_q + m * wide, x_quant_scale + m, x_sum + m):
                x_quant_scale[m] = 0  # no scale is 0: the mark of a bad row
            elif how.expand != NULL:
                how.expand(x_q + m * wide, n_blocks, <uint8_t *> expanded + m * x_stride)
        for m in range(M):
            if x_quant_scale[m] == 0:
                bad = m
                break
        if bad < 0:
            team = threads_for(bytes_ * M, PANEL_BYTES_A_THREAD, threads)
            with parallel(num_threads=team):
                scratch = aligned_scratch(SCRATCH_BYTES)
                acc = <int32_t *> aligned_scratch(min(M, tokens_a_block) * PANEL_ROWS * sizeof(int32_t))
                # Dynamic, two panels at a time: no faster, in turns on two quiet cores (2B-4T's shape, 12 and 30 layers).
                for item in prange((M + tokens_a_block - 1) // tokens_a_block * total, schedule="static"):
                    block = item // total * tokens_a_block
                    tokens = min(tokens_a_block, M - block)
                    p = item % total
                    i = 0
                    while p >= first[i + 1]:
                        i = i + 1
                    p = p - first[i]
                    rows = min(<Py_ssize_t> PANEL_ROWS, n_out[i] - p * PANEL_ROWS)
                    out = outs[i] + block * n_out[i] + p * PANEL_ROWS
                    ternary.run(panels[i] + p * n_blocks * BLOCK_BYTES, n_blocks,
                                (x_q if expanded == NULL else expanded) + block * x_stride, x_stride, tokens,
                                x_sum + block, acc, PANEL_ROWS, rows, scratch)
                    for m in range(tokens):
                        chosen.dequantize(acc + m * PANEL_ROWS, rows, scales[i], x_quant_scale[block + m],
                                          biases[i] + p * PANEL_ROWS if biases[i] != NULL else NULL, out + m * n_out[i])
                free(acc)
                free(scratch)
        free(x_q)
        free(expanded)
        free(x_sum)
        free(x_quant_scale)
    return bad


def dequantize(const int32_t[:, ::1] acc, float w_dequant_scale, const float[:, ::1] x_quant_scale, float[:, ::1] y,
               Py_ssize_t kernels):
    """y (M, N) = acc * (w_dequant_scale / x_quant_scale)"""
    cdef Py_ssize_t M = acc.shape[0], N = acc.shape[1], m
    if y.shape[0] != M or y.shape[1] != N or x_quant_scale.shape[0] != M:
        raise ValueError(f"dequantize: acc {M, N}, y {y.shape[0], y.shape[1]}")
    with nogil:
        for m in range(M):
            KERNEL_SETS[kernels].dequantize(&acc[m, 0], N, w_dequant_scale, x_quant_scale[m, 0], NULL, &y[m, 0])


def rms_norm(const float[:, ::1] x, const float[::1] weight, double eps, float[:, ::1] y, int threads, Py_ssize_t kernels):
    """y = x / sqrt(mean(x^2) + eps) * weight. Returns -1, or the first row that holds NaN or Inf."""
    cdef Py_ssize_t M = x.shape[0], D = x.shape[1], m
    if weight.shape[0] != D or y.shape[0] != M or y.shape[1] != D:
        raise ValueError(f"rms_norm: x {M, D}, weight {weight.shape[0]}, y {y.shape[0], y.shape[1]}")
    cdef int team = threads_for(M * D, FLOATS_A_THREAD, threads)
    for m in prange(M, nogil=True, num_threads=team, schedule="static"):
        if not KERNEL_SETS[kernels].rms_norm(&x[m, 0], &weight[0], D, eps, &y[m, 0]):
            y[m, 0] = NAN  # the mark of a bad row: no good one has it
    for m in range(M if D else 0):
        if y[m, 0] != y[m, 0]:
            return m
    return -1


def gated(const float[:, ::1] gate, const float[:, ::1] up, bint is_silu, float[:, ::1] y, int threads, Py_ssize_t kernels):
    """y = act(gate) * up"""
    cdef Py_ssize_t M = gate.shape[0], F = gate.shape[1], m
    if up.shape[0] != M or up.shape[1] != F or y.shape[0] != M or y.shape[1] != F:
        raise ValueError(f"gated: gate {M, F}, up {up.shape[0], up.shape[1]}")
    if F == 0:
        return
    cdef int team = threads_for(M * F, FLOATS_A_THREAD, threads)
    for m in prange(M, nogil=True, num_threads=team, schedule="static"):
        KERNEL_SETS[kernels].gated(&gate[m, 0], &up[m, 0], F, is_silu, &y[m, 0])


def add(const float[:, ::1] x, const float[:, ::1] y, float[:, ::1] z, int threads):
    """z = x + y"""
    cdef Py_ssize_t M = x.shape[0], D = x.shape[1], m, i
    if y.shape[0] != M or y.shape[1] != D or z.shape[0] != M or z.shape[1] != D:
        raise ValueError(f"add: x {M, D}, y {y.shape[0], y.shape[1]}, z {z.shape[0], z.shape[1]}")
    cdef int team = threads_for(M * D, FLOATS_A_THREAD, threads)
    for m in prange(M, nogil=True, num_threads=team, schedule="static"):
        for i in range(D):
            z[m, i] = x[m, i] + y[m, i]


def rope(const float[:, :, ::1] x, const float[:, ::1] cos, const float[:, ::1] sin, float[:, :, ::1] y, int threads,
         Py_ssize_t kernels):
    """x (M, heads, d), cos and sin (M, d/2) -> y, turned"""
    cdef Py_ssize_t M = x.shape[0], heads = x.shape[1], half = x.shape[2] // 2, m
    if (cos.shape[0] != M or sin.shape[0] != M or cos.shape[1] != half or sin.shape[1] != half or x.shape[2] != 2 * half
            or y.shape[0] != M or y.shape[1] != heads or y.shape[2] != 2 * half):
        raise ValueError(f"rope: x {M, heads, x.shape[2]}, cos {cos.shape[0], cos.shape[1]}")
    cdef int team = threads_for(M * heads * half, FLOATS_A_THREAD, threads)
    if heads and half:
        for m in prange(M, nogil=True, num_threads=team, schedule="static"):
            KERNEL_SETS[kernels].rope(&x[m, 0, 0], heads, half, &cos[m, 0], &sin[m, 0], &y[m, 0, 0])


cdef class KVLayer:
    """One layer's keys and values (pages, page_size, G, d), ready to be read: float32, float16 given as uint16, or int8
    with scales (pages, page_size, G). It holds on to the arrays."""
    cdef object arrays
    cdef kv_view view
    cdef Py_ssize_t pages, page_size, G, d

    def __init__(self, keys, values, key_scales=None, value_scales=None):
        self.arrays = keys, values, key_scales, value_scales
        self.pages, self.page_size, self.G, self.d = keys.shape
        if keys.shape != values.shape or keys.dtype != values.dtype or 0 in keys.shape:
            raise ValueError(f"KVLayer: keys {keys.dtype} {keys.shape}, values {values.dtype} {values.shape}")
        self.view.keys = self._pool(keys, key_scales)
        self.view.values = self._pool(values, value_scales)
        self.view.page_size, self.view.stride, self.view.scale_stride = self.page_size, self.G * self.d, self.G

    cdef kv_pool _pool(self, array, scales) except *:
        cdef const float[:, :, :, ::1] wide
        cdef const uint16_t[:, :, :, ::1] half
        cdef const int8_t[:, :, :, ::1] narrow
        cdef const float[:, :, ::1] scale
        cdef kv_pool pool
        pool.rows, pool.scales = NULL, NULL
        if array.dtype.itemsize == 2:
            half = array
            self.view.kind, pool.rows = KV_FLOAT16, &half[0, 0, 0, 0]
        elif array.dtype.itemsize == 1:
            narrow, scale = array, scales
            if scale.shape[0] != self.pages or scale.shape[1] != self.page_size or scale.shape[2] != self.G:
                raise ValueError(f"KVLayer: keys {array.shape}, scales {scales.shape}")
            self.view.kind, pool.rows, pool.scales = KV_INT8, &narrow[0, 0, 0, 0], &scale[0, 0, 0]
        else:
            wide = array
            self.view.kind, pool.rows = KV_FLOAT32, &wide[0, 0, 0, 0]
        return pool


cdef inline Py_ssize_t keys_seen(Py_ssize_t position, Py_ssize_t window) noexcept nogil:
    return window if window and window <= position else position + 1


def attention(const float[:, :, ::1] q, KVLayer layer not None, const int32_t[:, ::1] page_table,
              const int64_t[::1] slots, const int64_t[::1] positions, Py_ssize_t window, float[:, :, ::1] z,
              int threads, Py_ssize_t kernels):
    """q (M, H, d), a layer's keys and values, page_table (slots, pages a slot) -> z (M, H, d). window 0: no limit.

    Returns -1, or the first token that sees a position for which the table has no page.

    (token, kv head) pairs over threads, tokens that follow each other in a sequence together, to ATTEND_ROWS heads (of
    very long ones fewer): a key is widened once for all. Each head goes through all of its keys in one order, alone or
    not. Few pairs that leave some threads idle at the end (5 kv heads on 2 threads: 3 to 2) have their last ones split by
    query heads. Splitting by keys would be even, but would change the order of sums that NumPy's bits are held to.
    """
    cdef kv_view view = layer.view
    cdef Py_ssize_t M = q.shape[0], H = q.shape[1], d = q.shape[2], G = layer.G, page_size = layer.page_size
    cdef Py_ssize_t R = H // G, m, item, g, n_keys, longest = 1, work = 0, whole, parts = 1, piece, head, heads, page
    cdef Py_ssize_t together, runs = 0, run
    if (M != slots.shape[0] or M != positions.shape[0] or layer.d != d or R * G != H or z.shape[0] != M
            or z.shape[1] != H or z.shape[2] != d):
        raise ValueError(f"attention: q {M, H, d}, keys {layer.pages, page_size, G, layer.d}")
    for m in range(M):
        if positions[m] < 0 or slots[m] < 0 or slots[m] >= page_table.shape[0]:
            raise ValueError(f"attention: slot {slots[m]} of {page_table.shape[0]}, position {positions[m]}")
        n_keys = keys_seen(positions[m], window)
        if positions[m] // page_size >= page_table.shape[1]:
            return m
        for page in range((positions[m] + 1 - n_keys) // page_size, positions[m] // page_size + 1):
            if page_table[slots[m], page] < 0 or page_table[slots[m], page] >= layer.pages:
                return m
        longest = max(longest, n_keys)
        work += n_keys * H * d
    if M == 0:
        return -1
    cdef const kernel_set *chosen = &KERNEL_SETS[kernels]
    cdef double scale = (<double> d) ** -0.5
    cdef int team = threads_for(work, ATTENTION_FLOATS_A_THREAD, threads)
    cdef double *workspace = NULL
    together = max(<Py_ssize_t> 1, min(<Py_ssize_t> ATTEND_ROWS, ATTEND_SCORES // longest) // max(<Py_ssize_t> 1, R))
    cdef Py_ssize_t *first = <Py_ssize_t *> malloc((M + 1) * sizeof(Py_ssize_t))  # token of each run
    if first == NULL:
        raise MemoryError(f"no memory for the places of {M} tokens")
    for m in range(M):
        if (m == 0 or m - first[runs - 1] == together or slots[m] != slots[m - 1] or positions[m] != positions[m - 1] + 1):
            first[runs] = m
            runs += 1
    first[runs] = M
    whole = runs * G
    if whole < 8 * team:
        whole -= whole % team
        parts = min(<Py_ssize_t> team, R)
    piece = (R + parts - 1) // parts  # query heads of a part
    parts = (R + piece - 1) // piece
    with nogil, parallel(num_threads=team):
        workspace = <double *> aligned_scratch(
            chosen.attend_workspace(R * min(M, together), d, longest + together) * sizeof(double))
        for item in prange(whole + (runs * G - whole) * parts, schedule="dynamic"):  # a prompt's later tokens have more keys
            g = item if item < whole else whole + (item - whole) // parts
            head = 0 if item < whole else (item - whole) % parts * piece
            heads = R if item < whole else min(piece, R - head)
            run = g // G
            g = g % G
            m = first[run]
            attend_run(chosen, &q[m, g * R + head, 0], first[run + 1] - m, heads, d, H * d, g, view,
                       &page_table[slots[m], 0], positions[m], window, scale, workspace, &z[m, g * R + head, 0])
        free(workspace)
    free(first)
    return -1


cdef inline void attend_run(const kernel_set *chosen, const float *q, Py_ssize_t tokens, Py_ssize_t heads, Py_ssize_t d,
                            Py_ssize_t token_stride, Py_ssize_t g, kv_view view, const int32_t *pages, Py_ssize_t position,
                            Py_ssize_t window, double scale, double *workspace, float *z) noexcept nogil:
    """Heads of kv head g, of tokens from `position` on. `view` (a copy) knows the pools of all heads, and learns here
    what is seen."""
    cdef Py_ssize_t size = 4 if view.kind == KV_FLOAT32 else 2 if view.kind == KV_FLOAT16 else 1
    view.keys.rows = <const char *> view.keys.rows + g * d * size
    view.values.rows = <const char *> view.values.rows + g * d * size
    if view.kind == KV_INT8:
        view.keys.scales += g
        view.values.scales += g
    view.pages = pages
    view.first = position + 1 - keys_seen(position, window)
    view.n_keys = position + tokens - view.first
    if tokens == 1:
        chosen.attend(q, heads, d, &view, scale, workspace, z)
    else:
        chosen.attend_many(q, tokens, heads, d, token_stride, &view, window, scale, workspace, z)


def dense_matmul_float32(const float[:, ::1] x, const float[:, ::1] w, float[:, ::1] y, int threads, Py_ssize_t kernels):
    """y (M, N) = x (M, K) w^T, w (N, K) float32"""
    _dense(x, 0, &w[0, 0], w.shape[0], w.shape[1], y, threads, kernels)


def dense_matmul_bfloat16(const float[:, ::1] x, const uint16_t[:, ::1] w, float[:, ::1] y, int threads, Py_ssize_t kernels):
    """y (M, N) = x (M, K) w^T, w (N, K) bfloat16, given as uint16"""
    _dense(x, 1, &w[0, 0], w.shape[0], w.shape[1], y, threads, kernels)


cdef _dense(const float[:, ::1] x, int kind, const void *w, Py_ssize_t N, Py_ssize_t K, float[:, ::1] y, int threads,
            Py_ssize_t kernels):
    cdef Py_ssize_t M = x.shape[0], block, n_blocks = (N + 15) // 16, size = 4 if kind == 0 else 2
    if x.shape[1] != K or y.shape[0] != M or y.shape[1] != N:
        raise ValueError(f"dense_matmul: x {M, x.shape[1]}, w {N, K}, y {y.shape[0], y.shape[1]}")
    if M == 0:
        return
    cdef const kernel_set *chosen = &KERNEL_SETS[kernels]
    cdef int team = threads_for(N * K * size * M, DENSE_BYTES_A_THREAD, threads)
    cdef float *tokens = aligned_copy(&x[0, 0], M * K)
    if tokens == NULL:
        raise MemoryError(f"no memory for {M} tokens of {K} activations")
    with nogil:
        for block in prange(n_blocks, num_threads=team, schedule="static"):
            chosen.dense_rows(kind, <const char *> w + block * 16 * K * size, min(<Py_ssize_t> 16, N - block * 16), K,
                              tokens, M, &y[0, block * 16], N)
        free(tokens)


# -- the screened head: head_screen.h ----------------------------------------------------------------------------------


cdef const void *_matrix(w, Py_ssize_t *N, Py_ssize_t *K, int *kind) except NULL:
    """The rows of a float32 matrix, or of a bfloat16 one given as uint16"""
    cdef const float[:, ::1] wide
    cdef const uint16_t[:, ::1] half
    if w.dtype.itemsize == 4:
        wide = w
        N[0], K[0], kind[0] = wide.shape[0], wide.shape[1], 0
        return &wide[0, 0]
    half = w
    N[0], K[0], kind[0] = half.shape[0], half.shape[1], 1
    return &half[0, 0]


def screen_pack(w, int8_t[:, ::1] q, float[:, ::1] facts, int threads, Py_ssize_t kernels):
    """w (N, K) float32, or bfloat16 given as uint16 -> q (N, wide) int8 and facts (N, 3)"""
    cdef Py_ssize_t N, K, n, wide = q.shape[1]
    cdef int kind
    cdef const char *rows = <const char *> _matrix(w, &N, &K, &kind)
    if q.shape[0] != N or facts.shape[0] != N or facts.shape[1] != 3 or wide < K or wide % 64 or K >= 1 << 22:
        raise ValueError(f"screen_pack: w {N, K}, q {q.shape[0], wide}, facts {facts.shape[0], facts.shape[1]}")
    cdef Py_ssize_t size = K * (4 if kind == 0 else 2)
    cdef int team = threads_for(N * size, DENSE_BYTES_A_THREAD, threads)
    for n in prange(N, nogil=True, num_threads=team, schedule="static"):
        KERNEL_SETS[kernels].screen_pack(kind, rows + n * size, K, wide, &q[n, 0], &facts[n, 0])


def screen_rows(const float[:, ::1] x, const int8_t[:, ::1] q, const float[:, ::1] facts, float[:, ::1] lower,
                float[:, ::1] upper, int threads, Py_ssize_t kernels):
    """x (M, K), what screen_pack made -> lower and upper (M, N): between them lies the logit that dense_matmul computes.

    Returns -1, or the first row of x that holds NaN or Inf.
    """
    cdef Py_ssize_t M = x.shape[0], K = x.shape[1], N = q.shape[0], wide = q.shape[1], m, block, bad = -1
    cdef Py_ssize_t n_blocks = (N + 63) // 64
    if (facts.shape[0] != N or facts.shape[1] != 3 or wide < K or wide % 64 or lower.shape[0] != M
            or lower.shape[1] != N or upper.shape[0] != M or upper.shape[1] != N):
        raise ValueError(f"screen_rows: x {M, K}, q {N, wide}, lower {lower.shape[0], lower.shape[1]}")
    if M == 0 or N == 0:
        return -1
    cdef const kernel_set *chosen = &KERNEL_SETS[kernels]
    cdef int16_t *tokens = NULL
    if posix_memalign(<void **> &tokens, 64, M * wide * sizeof(int16_t)) != 0:
        tokens = NULL
    cdef double *token_facts = <double *> malloc(M * 3 * sizeof(double))
    if tokens == NULL or token_facts == NULL:
        free(tokens)
        free(token_facts)
        raise MemoryError(f"no memory for {M} tokens of {K} activations")
    cdef int team = threads_for(N * wide * M, DENSE_BYTES_A_THREAD, threads)
    with nogil:
        for m in range(M):
            if bad < 0 and not chosen.screen_token(&x[m, 0], K, wide, tokens + m * wide, token_facts + 3 * m):
                bad = m
        if bad < 0:
            for block in prange(n_blocks, num_threads=team, schedule="static"):
                chosen.screen_rows(&q[block * 64, 0], min(<Py_ssize_t> 64, N - block * 64), K, wide, &facts[block * 64, 0],
                                   tokens, M, token_facts, &lower[0, block * 64], &upper[0, block * 64], N)
        free(tokens)
        free(token_facts)
    return bad


def dense_rows(const float[::1] x, w, const int64_t[::1] rows, float[::1] y, int threads, Py_ssize_t kernels):
    """y[i] = w[rows[i]] . x, the bits that dense_matmul gives; w (N, K) float32, or bfloat16 given as uint16"""
    cdef Py_ssize_t N, K, i, n = rows.shape[0]
    cdef int kind
    cdef const char *first = <const char *> _matrix(w, &N, &K, &kind)
    if x.shape[0] != K or y.shape[0] != n:
        raise ValueError(f"dense_rows: x {x.shape[0]}, w {N, K}, {n} rows, y {y.shape[0]}")
    for i in range(n):
        if rows[i] < 0 or rows[i] >= N:
            raise ValueError(f"dense_rows: row {rows[i]} of {N}")
    if n == 0:
        return
    cdef Py_ssize_t size = K * (4 if kind == 0 else 2)
    cdef int team = threads_for(n * size, DENSE_BYTES_A_THREAD, threads)
    for i in prange(n, nogil=True, num_threads=team, schedule="static"):
        KERNEL_SETS[kernels].dense_rows(kind, first + rows[i] * size, 1, K, &x[0], 1, &y[i], 1)
