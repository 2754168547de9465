# cython: boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False, binding=True
"""The compiled CPU kernels: argument checks, threads, and calls into the C headers beside this file.

Every function takes the index of a kernel set (`kernel_sets`) and works on whole rows: which thread computes a row, and
how many rows there are, does not change what is computed. The GIL is released; any number of Python threads may call.
"""

import os

from cython.parallel cimport parallel, prange
from libc.math cimport NAN
from libc.stdint cimport int8_t, int16_t, int32_t, int64_t, uint8_t, uint16_t, uint64_t
from libc.stdlib cimport abort, free, malloc, realloc
from libc.string cimport memcpy, memset

cdef extern from "stdlib.h" nogil:
    int posix_memalign(void **memory, size_t alignment, size_t size)

cdef extern from "kv_append.h" nogil:
    bint kv_can_keep(int kind, const float *x, size_t n)
    void kv_keep(int kind, const float *x, size_t d, void *rows, size_t row, float *scale)

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


# -- calls, and how they are made again --------------------------------------------------------------------------------
#
# A kernel that a decoding step runs is a C function of one struct, its call. The Python function of its name fills the
# struct and makes the call; given a tape, it also leaves a copy there. To play a tape is to make all of its calls again
# without a line of Python between them: see `backends/recorded_step.py`.

ctypedef Py_ssize_t (*call_fn)(const void *) noexcept nogil  # WELL, NO_MEMORY, or the row that was not well

cdef enum:
    WELL = -1
    NO_MEMORY = -2

cdef struct kept_call:
    call_fn run
    void *call


cdef class Tape:
    """Calls in their order. It holds none of the arrays that they read and write: who made it does."""
    cdef kept_call *calls
    cdef Py_ssize_t count, room
    cdef set places  # of the activations that the calls read and write

    def __cinit__(self):
        self.calls, self.count, self.room, self.places = NULL, 0, 0, set()

    def __dealloc__(self):
        self._free_calls()
        free(self.calls)

    cdef void _free_calls(self) noexcept:
        cdef Py_ssize_t i
        for i in range(self.count):
            free(self.calls[i].call)
        self.count = 0

    def clear(self):
        """No calls are left."""
        self._free_calls()
        self.places = set()

    def __len__(self):
        return self.count

    cdef keep(self, call_fn run, const void *call, size_t size, places):
        cdef void *copy = malloc(size)
        cdef void *longer
        if copy != NULL and self.count == self.room:
            longer = realloc(self.calls, (2 * self.room + 64) * sizeof(kept_call))
            if longer == NULL:
                free(copy)
                copy = NULL
            else:
                self.calls, self.room = <kept_call *> longer, 2 * self.room + 64
        if copy == NULL:
            raise MemoryError("no memory to record a step")
        memcpy(copy, call, size)
        self.calls[self.count].run, self.calls[self.count].call = run, copy
        self.count += 1
        self.places.update(places)

    def lies_in(self, arrays):
        """Whether every call reads and writes its activations in these arrays: nothing else has had a part in them."""
        ranges = [(array.ctypes.data, array.ctypes.data + array.nbytes) for array in arrays]
        return all(any(start <= place < end for start, end in ranges) for place in self.places)

    def play(self):
        """Make the calls again. Returns whether all went well; after one that did not, none is made."""
        cdef Py_ssize_t i
        with nogil:
            for i in range(self.count):
                if self.calls[i].run(self.calls[i].call) != WELL:
                    break
            else:
                i = self.count
        return i == self.count


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


cdef Py_ssize_t tokens_in_l2(Py_ssize_t token_bytes) noexcept nogil:
    """How many tokens go through all panels before the next ones do: their activations stay in L2, most of it theirs."""
    return max(<Py_ssize_t> 1, L2_BYTES * 3 // 4 // (max(<Py_ssize_t> 1, token_bytes) * TOKENS_A_STEP)) * TOKENS_A_STEP


cdef struct linears_call:
    const float *x
    Py_ssize_t M, K, count, method, n_panels, n_bytes  # of all matrices together
    const ternary_kernel *ternary
    const kernel_set *chosen
    int threads
    const uint8_t *panels[MAX_LINEARS]
    const float *biases[MAX_LINEARS]
    float *ys[MAX_LINEARS]
    Py_ssize_t first[MAX_LINEARS + 1]  # panel of each matrix
    Py_ssize_t n_out[MAX_LINEARS]
    float scales[MAX_LINEARS]


cdef Py_ssize_t run_linears(const void *call) noexcept nogil:
    cdef const linears_call *c = <const linears_call *> call
    cdef const ternary_method *how = &METHODS[c.method]
    cdef Py_ssize_t M = c.M, K = c.K, m, i, p, item, rows, block, tokens, bad = WELL
    cdef Py_ssize_t n_blocks = (K + how.block_k - 1) // <Py_ssize_t> how.block_k, wide = n_blocks * how.block_k
    cdef Py_ssize_t x_stride = n_blocks * how.x_bytes, tokens_a_block = tokens_in_l2(x_stride)
    cdef int8_t *x_q = <int8_t *> malloc(M * wide)
    cdef int32_t *x_sum = <int32_t *> malloc(M * sizeof(int32_t))
    cdef float *x_quant_scale = <float *> malloc(M * sizeof(float))
    cdef int8_t *expanded = <int8_t *> malloc(M * x_stride) if how.expand != NULL else NULL
    cdef void *scratch = NULL
    cdef int32_t *acc = NULL
    cdef float *out = NULL
    cdef int team = threads_for(M * K, FLOATS_A_THREAD, c.threads)
    if x_q == NULL or x_sum == NULL or x_quant_scale == NULL or (how.expand != NULL and expanded == NULL):
        bad = NO_MEMORY
    else:
        for m in prange(M, num_threads=team, schedule="static"):
            if wide > K:
                memset(x_q + m * wide + K, 0, wide - K)
            if not c.chosen.quantize(c.x + m * K, K, x_q + m * wide, x_quant_scale + m, x_sum + m):
                x_quant_scale[m] = 0  # no scale is 0: the mark of a bad row
            elif how.expand != NULL:
                how.expand(x_q + m * wide, n_blocks, <uint8_t *> expanded + m * x_stride)
        for m in range(M):
            if x_quant_scale[m] == 0:
                bad = m
                break
    if bad == WELL:
        team = threads_for(c.n_bytes * M, PANEL_BYTES_A_THREAD, c.threads)
        with parallel(num_threads=team):
            scratch = aligned_scratch(SCRATCH_BYTES)
            acc = <int32_t *> aligned_scratch(min(M, tokens_a_block) * PANEL_ROWS * sizeof(int32_t))
            # Dynamic, two panels at a time: no faster, in turns on two quiet cores (2B-4T's shape, 12 and 30 layers).
            for item in prange((M + tokens_a_block - 1) // tokens_a_block * c.n_panels, schedule="static"):
                block = item // c.n_panels * tokens_a_block
                tokens = min(tokens_a_block, M - block)
                p = item % c.n_panels
                i = 0
                while p >= c.first[i + 1]:
                    i = i + 1
                p = p - c.first[i]
                rows = min(<Py_ssize_t> PANEL_ROWS, c.n_out[i] - p * PANEL_ROWS)
                out = c.ys[i] + block * c.n_out[i] + p * PANEL_ROWS
                c.ternary.run(c.panels[i] + p * n_blocks * BLOCK_BYTES, n_blocks,
                              (x_q if expanded == NULL else expanded) + block * x_stride, x_stride, tokens,
                              x_sum + block, acc, PANEL_ROWS, rows, scratch)
                for m in range(tokens):
                    c.chosen.dequantize(acc + m * PANEL_ROWS, rows, c.scales[i], x_quant_scale[block + m],
                                        c.biases[i] + p * PANEL_ROWS if c.biases[i] != NULL else NULL,
                                        out + m * c.n_out[i])
            free(acc)
            free(scratch)
    free(x_q)
    free(expanded)
    free(x_sum)
    free(x_quant_scale)
    return bad


def bit_linears(const float[:, ::1] x, list ws, ys, int threads, Py_ssize_t kernels, Tape tape=None):
    """Several BitLinears of the same x (M, K), quantised once: ys[i] (M, N_i) = x ws[i]^T. The panels of all over threads.

    Returns -1, or the first row of x that holds NaN or Inf. One parallel region instead of one for each step and matrix:
    for one token of a 2560-wide block the steps between the products took a tenth of the time.
    """
    cdef Py_ssize_t M = x.shape[0], K = x.shape[1], count = len(ws), i, bad
    cdef linears_call c
    cdef Panels w
    cdef float[:, ::1] y
    c.M, c.K, c.count, c.threads, c.n_panels, c.n_bytes = M, K, count, threads, 0, 0
    c.method = (<Panels> ws[0]).method if count else 0
    if count > MAX_LINEARS or len(ys) != count or threads < 1:
        raise ValueError(f"bit_linears: {count} weights, {len(ys)} results, {threads} threads")
    for i in range(count):
        w, y = ws[i], ys[i]
        if w.n_in != K or w.method != c.method or y.shape[0] != M or y.shape[1] != w.n_out:
            raise ValueError(f"bit_linears: x {M, K}, weight {w.n_out, w.n_in}, result {y.shape[0], y.shape[1]}")
        c.first[i] = c.n_panels
        c.n_panels += w.panels.shape[0]
        c.n_bytes += w.panels.shape[0] * w.panels.shape[1]
        c.panels[i], c.biases[i], c.scales[i], c.n_out[i] = &w.panels[0, 0], w.bias_values, w.w_dequant_scale, w.n_out
        c.ys[i] = &y[0, 0] if M else NULL
    c.first[count] = c.n_panels
    if M == 0 or count == 0:
        return WELL
    c.x, c.chosen = &x[0, 0], &KERNEL_SETS[kernels]
    c.ternary = kernel_for(kernels, c.method, K)
    with nogil:
        bad = run_linears(&c)
    if bad == NO_MEMORY:
        raise MemoryError(f"no memory for {M} tokens of {K} activations")
    if tape is not None:
        tape.keep(run_linears, &c, sizeof(c), [<size_t> c.x] + [<size_t> c.ys[i] for i in range(count)])
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


cdef struct norm_call:
    const float *x
    const float *weight
    float *y
    Py_ssize_t M, D
    double eps
    const kernel_set *chosen
    int threads


cdef Py_ssize_t run_norm(const void *call) noexcept nogil:
    cdef const norm_call *c = <const norm_call *> call
    cdef Py_ssize_t m, D = c.D
    for m in prange(c.M, num_threads=threads_for(c.M * D, FLOATS_A_THREAD, c.threads), schedule="static"):
        if not c.chosen.rms_norm(c.x + m * D, c.weight, D, c.eps, c.y + m * D):
            c.y[m * D] = NAN  # the mark of a bad row: no good one has it
    for m in range(c.M if D else 0):
        if c.y[m * D] != c.y[m * D]:
            return m
    return WELL


def rms_norm(const float[:, ::1] x, const float[::1] weight, double eps, float[:, ::1] y, int threads, Py_ssize_t kernels,
             Tape tape=None):
    """y = x / sqrt(mean(x^2) + eps) * weight. Returns -1, or the first row that holds NaN or Inf."""
    cdef norm_call c
    cdef Py_ssize_t bad
    c.M, c.D, c.eps, c.chosen, c.threads = x.shape[0], x.shape[1], eps, &KERNEL_SETS[kernels], threads
    if weight.shape[0] != c.D or y.shape[0] != c.M or y.shape[1] != c.D:
        raise ValueError(f"rms_norm: x {c.M, c.D}, weight {weight.shape[0]}, y {y.shape[0], y.shape[1]}")
    c.x, c.weight, c.y = &x[0, 0], &weight[0], &y[0, 0]
    with nogil:
        bad = run_norm(&c)
    if tape is not None:
        tape.keep(run_norm, &c, sizeof(c), (<size_t> c.x, <size_t> c.y))
    return bad


cdef struct gated_call:
    const float *gate
    const float *up
    float *y
    Py_ssize_t M, F
    bint is_silu
    const kernel_set *chosen
    int threads


cdef Py_ssize_t run_gated(const void *call) noexcept nogil:
    cdef const gated_call *c = <const gated_call *> call
    cdef Py_ssize_t m, F = c.F
    for m in prange(c.M if F else 0, num_threads=threads_for(c.M * F, FLOATS_A_THREAD, c.threads), schedule="static"):
        c.chosen.gated(c.gate + m * F, c.up + m * F, F, c.is_silu, c.y + m * F)
    return WELL


def gated(const float[:, ::1] gate, const float[:, ::1] up, bint is_silu, float[:, ::1] y, int threads, Py_ssize_t kernels,
          Tape tape=None):
    """y = act(gate) * up"""
    cdef gated_call c
    c.M, c.F, c.is_silu, c.chosen, c.threads = gate.shape[0], gate.shape[1], is_silu, &KERNEL_SETS[kernels], threads
    if up.shape[0] != c.M or up.shape[1] != c.F or y.shape[0] != c.M or y.shape[1] != c.F:
        raise ValueError(f"gated: gate {c.M, c.F}, up {up.shape[0], up.shape[1]}")
    c.gate, c.up, c.y = &gate[0, 0], &up[0, 0], &y[0, 0]
    with nogil:
        run_gated(&c)
    if tape is not None:
        tape.keep(run_gated, &c, sizeof(c), (<size_t> c.gate, <size_t> c.up, <size_t> c.y))


cdef struct add_call:
    const float *x
    const float *y
    float *z
    Py_ssize_t M, D, y_stride
    int threads


cdef Py_ssize_t run_add(const void *call) noexcept nogil:
    cdef const add_call *c = <const add_call *> call
    cdef Py_ssize_t m, i, D = c.D
    for m in prange(c.M, num_threads=threads_for(c.M * D, FLOATS_A_THREAD, c.threads), schedule="static"):
        for i in range(D):
            c.z[m * D + i] = c.x[m * D + i] + c.y[m * c.y_stride + i]
    return WELL


def add(const float[:, ::1] x, const float[:, ::1] y, float[:, ::1] z, int threads, bint is_bias, Tape tape=None):
    """z = x + y.  is_bias: y (1, D), for every row; a weight, and no activation"""
    cdef add_call c
    c.M, c.D, c.threads, c.y_stride = x.shape[0], x.shape[1], threads, 0 if is_bias else x.shape[1]
    if y.shape[0] != (1 if is_bias else c.M) or y.shape[1] != c.D or z.shape[0] != c.M or z.shape[1] != c.D:
        raise ValueError(f"add: x {c.M, c.D}, y {y.shape[0], y.shape[1]}, z {z.shape[0], z.shape[1]}")
    c.x, c.y, c.z = &x[0, 0], &y[0, 0], &z[0, 0]
    with nogil:
        run_add(&c)
    if tape is not None:
        tape.keep(run_add, &c, sizeof(c), (<size_t> c.x, <size_t> c.z) + (() if is_bias else (<size_t> c.y,)))


cdef struct rope_call:
    const float *x
    const float *cos
    const float *sin
    float *y
    Py_ssize_t M, heads, half
    const kernel_set *chosen
    int threads


cdef Py_ssize_t run_rope(const void *call) noexcept nogil:
    cdef const rope_call *c = <const rope_call *> call
    cdef Py_ssize_t m, half = c.half, row = c.heads * 2 * half
    for m in prange(c.M if row else 0, num_threads=threads_for(c.M * row // 2, FLOATS_A_THREAD, c.threads),
                    schedule="static"):
        c.chosen.rope(c.x + m * row, c.heads, half, c.cos + m * half, c.sin + m * half, c.y + m * row)
    return WELL


def rope(const float[:, :, ::1] x, const float[:, ::1] cos, const float[:, ::1] sin, float[:, :, ::1] y, int threads,
         Py_ssize_t kernels, Tape tape=None):
    """x (M, heads, d), cos and sin (M, d/2) -> y, turned"""
    cdef rope_call c
    c.M, c.heads, c.half, c.chosen, c.threads = x.shape[0], x.shape[1], x.shape[2] // 2, &KERNEL_SETS[kernels], threads
    if (cos.shape[0] != c.M or sin.shape[0] != c.M or cos.shape[1] != c.half or sin.shape[1] != c.half
            or x.shape[2] != 2 * c.half or y.shape[0] != c.M or y.shape[1] != c.heads or y.shape[2] != 2 * c.half):
        raise ValueError(f"rope: x {c.M, c.heads, x.shape[2]}, cos {cos.shape[0], cos.shape[1]}")
    c.x, c.cos, c.sin, c.y = &x[0, 0, 0], &cos[0, 0], &sin[0, 0], &y[0, 0, 0]
    with nogil:
        run_rope(&c)
    if tape is not None:
        tape.keep(run_rope, &c, sizeof(c), (<size_t> c.x, <size_t> c.cos, <size_t> c.sin, <size_t> c.y))


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


cdef struct tokens_of_layer:
    kv_view view
    Py_ssize_t pages, G, d  # of the pool
    const int32_t *page_table
    Py_ssize_t table_slots, table_columns
    const int64_t *slots
    const int64_t *positions
    Py_ssize_t M


cdef void describe(tokens_of_layer *t, KVLayer layer, const int32_t[:, ::1] page_table, const int64_t[::1] slots,
                   const int64_t[::1] positions) noexcept:
    t.view, t.pages, t.G, t.d = layer.view, layer.pages, layer.G, layer.d
    t.page_table, t.table_slots, t.table_columns = &page_table[0, 0], page_table.shape[0], page_table.shape[1]
    t.slots, t.positions, t.M = &slots[0], &positions[0], slots.shape[0]


cdef inline bint has_pages(const tokens_of_layer *t, Py_ssize_t m, Py_ssize_t first) noexcept nogil:
    """Whether there is a page for each position of token m from `first` to its own."""
    cdef Py_ssize_t page_size = t.view.page_size, column
    if t.positions[m] < 0 or t.slots[m] < 0 or t.slots[m] >= t.table_slots or t.positions[m] // page_size >= t.table_columns:
        return False
    cdef const int32_t *pages = t.page_table + t.slots[m] * t.table_columns
    for column in range(first // page_size, t.positions[m] // page_size + 1):
        if pages[column] < 0 or pages[column] >= t.pages:
            return False
    return True


cdef struct append_call:
    tokens_of_layer to
    const float *k
    const float *v


cdef Py_ssize_t run_append(const void *call) noexcept nogil:
    cdef const append_call *c = <const append_call *> call
    cdef Py_ssize_t m, g, at, page_size = c.to.view.page_size, row = c.to.G * c.to.d, place
    cdef int kind = c.to.view.kind
    for m in range(c.to.M):
        if not has_pages(&c.to, m, c.to.positions[m]):
            return m
        if not (kv_can_keep(kind, c.k + m * row, row) and kv_can_keep(kind, c.v + m * row, row)):
            return m
    for m in range(c.to.M):
        place = c.to.page_table[c.to.slots[m] * c.to.table_columns + c.to.positions[m] // page_size] * page_size
        place = (place + c.to.positions[m] % page_size) * c.to.G
        for g in range(c.to.G):
            at = m * row + g * c.to.d
            kv_keep(kind, c.k + at, c.to.d, <void *> c.to.view.keys.rows, place + g, <float *> c.to.view.keys.scales + place + g)
            kv_keep(kind, c.v + at, c.to.d, <void *> c.to.view.values.rows, place + g, <float *> c.to.view.values.scales + place + g)
    return WELL


def append(KVLayer layer not None, const int32_t[:, ::1] page_table, const int64_t[::1] slots, const int64_t[::1] positions,
           const float[:, :, ::1] k, const float[:, :, ::1] v, Tape tape=None):
    """k and v (M, G, d) to a layer, at their slots and positions, as kv_dtypes.narrow keeps them.

    Returns -1, or the first token for whose position the table has no page, or that cannot be kept so; nothing is written
    then.
    """
    cdef append_call c
    cdef Py_ssize_t M = k.shape[0], bad
    if (slots.shape[0] != M or positions.shape[0] != M or v.shape[0] != M
            or k.shape[1] != layer.G or v.shape[1] != layer.G or k.shape[2] != layer.d or v.shape[2] != layer.d):
        raise ValueError(f"append: k {M, k.shape[1], k.shape[2]}, v {v.shape[0], v.shape[1], v.shape[2]}")
    describe(&c.to, layer, page_table, slots, positions)
    c.k, c.v = &k[0, 0, 0], &v[0, 0, 0]
    with nogil:
        bad = run_append(&c)
    if tape is not None:
        tape.keep(run_append, &c, sizeof(c), (<size_t> c.k, <size_t> c.v, <size_t> c.to.slots, <size_t> c.to.positions))
    return bad


cdef struct attention_call:
    tokens_of_layer of
    const float *q
    float *z
    Py_ssize_t H, window
    const kernel_set *chosen
    int threads


cdef Py_ssize_t run_attention(const void *call) noexcept nogil:
    cdef const attention_call *c = <const attention_call *> call
    cdef const kernel_set *chosen = c.chosen
    cdef const int64_t *slots = c.of.slots
    cdef const int64_t *positions = c.of.positions
    cdef kv_view view = c.of.view
    cdef Py_ssize_t M = c.of.M, H = c.H, d = c.of.d, G = c.of.G, R = H // G, window = c.window
    cdef Py_ssize_t m, item, g, n_keys, longest = 1, work = 0, whole, parts = 1, piece, head, heads
    cdef Py_ssize_t together, runs = 0, run
    for m in range(M):
        n_keys = keys_seen(positions[m], window)
        if not has_pages(&c.of, m, positions[m] + 1 - n_keys):
            return m
        longest = max(longest, n_keys)
        work += n_keys * H * d
    if M == 0:
        return WELL
    cdef double scale = (<double> d) ** -0.5
    cdef int team = threads_for(work, ATTENTION_FLOATS_A_THREAD, c.threads)
    cdef double *workspace = NULL
    together = max(<Py_ssize_t> 1, min(<Py_ssize_t> ATTEND_ROWS, ATTEND_SCORES // longest) // max(<Py_ssize_t> 1, R))
    cdef Py_ssize_t *first = <Py_ssize_t *> malloc((M + 1) * sizeof(Py_ssize_t))  # token of each run
    if first == NULL:
        return NO_MEMORY
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
    with parallel(num_threads=team):
        workspace = <double *> aligned_scratch(
            chosen.attend_workspace(R * min(M, together), d, longest + together) * sizeof(double))
        for item in prange(whole + (runs * G - whole) * parts, schedule="dynamic"):  # a prompt's later tokens have more keys
            g = item if item < whole else whole + (item - whole) // parts
            head = 0 if item < whole else (item - whole) % parts * piece
            heads = R if item < whole else min(piece, R - head)
            run = g // G
            g = g % G
            m = first[run]
            attend_run(chosen, c.q + (m * H + g * R + head) * d, first[run + 1] - m, heads, d, H * d, g, view,
                       c.of.page_table + slots[m] * c.of.table_columns, positions[m], window, scale, workspace,
                       c.z + (m * H + g * R + head) * d)
        free(workspace)
    free(first)
    return WELL


def attention(const float[:, :, ::1] q, KVLayer layer not None, const int32_t[:, ::1] page_table,
              const int64_t[::1] slots, const int64_t[::1] positions, Py_ssize_t window, float[:, :, ::1] z,
              int threads, Py_ssize_t kernels, Tape tape=None):
    """q (M, H, d), a layer's keys and values, page_table (slots, pages a slot) -> z (M, H, d). window 0: no limit.

    Returns -1, or the first token that sees a position for which the table has no page.

    (token, kv head) pairs over threads, tokens that follow each other in a sequence together, to ATTEND_ROWS heads (of
    very long ones fewer): a key is widened once for all. Each head goes through all of its keys in one order, alone or
    not. Few pairs that leave some threads idle at the end (5 kv heads on 2 threads: 3 to 2) have their last ones split by
    query heads. Splitting by keys would be even, but would change the order of sums that NumPy's bits are held to.
    """
    cdef attention_call c
    cdef Py_ssize_t M = q.shape[0], H = q.shape[1], d = q.shape[2], m, bad
    if (M != slots.shape[0] or M != positions.shape[0] or layer.d != d or H % layer.G or z.shape[0] != M
            or z.shape[1] != H or z.shape[2] != d):
        raise ValueError(f"attention: q {M, H, d}, keys {layer.pages, layer.page_size, layer.G, layer.d}")
    for m in range(M):
        if positions[m] < 0 or slots[m] < 0 or slots[m] >= page_table.shape[0]:
            raise ValueError(f"attention: slot {slots[m]} of {page_table.shape[0]}, position {positions[m]}")
    describe(&c.of, layer, page_table, slots, positions)
    c.q, c.z, c.H, c.window, c.chosen, c.threads = &q[0, 0, 0], &z[0, 0, 0], H, window, &KERNEL_SETS[kernels], threads
    with nogil:
        bad = run_attention(&c)
    if bad == NO_MEMORY:
        raise MemoryError(f"no memory for the places of {M} tokens")
    if tape is not None:
        tape.keep(run_attention, &c, sizeof(c), (<size_t> c.q, <size_t> c.z, <size_t> c.of.slots, <size_t> c.of.positions))
    return bad


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


def dense_matmul_float32(const float[:, ::1] x, const float[:, ::1] w, float[:, ::1] y, int threads, Py_ssize_t kernels,
                         Tape tape=None):
    """y (M, N) = x (M, K) w^T, w (N, K) float32"""
    _dense(x, 0, &w[0, 0], w.shape[0], w.shape[1], y, threads, kernels, tape)


def dense_matmul_bfloat16(const float[:, ::1] x, const uint16_t[:, ::1] w, float[:, ::1] y, int threads, Py_ssize_t kernels,
                          Tape tape=None):
    """y (M, N) = x (M, K) w^T, w (N, K) bfloat16, given as uint16"""
    _dense(x, 1, &w[0, 0], w.shape[0], w.shape[1], y, threads, kernels, tape)


cdef struct dense_call:
    const float *x
    const char *w
    float *y
    int kind
    Py_ssize_t M, N, K
    const kernel_set *chosen
    int threads


cdef Py_ssize_t run_dense(const void *call) noexcept nogil:
    cdef const dense_call *c = <const dense_call *> call
    cdef Py_ssize_t block, K = c.K, N = c.N, size = 4 if c.kind == 0 else 2
    cdef int team = threads_for(N * K * size * c.M, DENSE_BYTES_A_THREAD, c.threads)
    cdef float *tokens = aligned_copy(c.x, c.M * K)
    if tokens == NULL:
        return NO_MEMORY
    for block in prange((N + 15) // 16, num_threads=team, schedule="static"):
        c.chosen.dense_rows(c.kind, c.w + block * 16 * K * size, min(<Py_ssize_t> 16, N - block * 16), K, tokens, c.M,
                            c.y + block * 16, N)
    free(tokens)
    return WELL


cdef _dense(const float[:, ::1] x, int kind, const void *w, Py_ssize_t N, Py_ssize_t K, float[:, ::1] y, int threads,
            Py_ssize_t kernels, Tape tape):
    cdef dense_call c
    cdef Py_ssize_t bad
    c.M, c.N, c.K, c.kind, c.chosen, c.threads = x.shape[0], N, K, kind, &KERNEL_SETS[kernels], threads
    if x.shape[1] != K or y.shape[0] != c.M or y.shape[1] != N:
        raise ValueError(f"dense_matmul: x {c.M, x.shape[1]}, w {N, K}, y {y.shape[0], y.shape[1]}")
    if c.M == 0:
        return
    c.x, c.w, c.y = &x[0, 0], <const char *> w, &y[0, 0]
    with nogil:
        bad = run_dense(&c)
    if bad == NO_MEMORY:
        raise MemoryError(f"no memory for {c.M} tokens of {K} activations")
    if tape is not None:
        tape.keep(run_dense, &c, sizeof(c), (<size_t> c.x, <size_t> c.y))


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
