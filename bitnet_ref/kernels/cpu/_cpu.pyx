# cython: boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False, binding=True
"""The compiled CPU kernels: argument checks, threads, and calls into the C headers beside this file.

Every function takes the index of a kernel set (`kernel_sets`) and works on whole rows: which thread computes a row, and
how many rows there are, does not change what is computed. The GIL is released; any number of Python threads may call.
This file has the threads, and calls that can be made again; the functions themselves lie in the `.pxi` files.
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
        void (*attend_many)(const float *, size_t, size_t, size_t, size_t, size_t, const kv_view *, size_t, double,
                            double *, float *) noexcept nogil
        void (*dense_rows)(int, const void *, size_t, size_t, const float *, size_t, float *, size_t) noexcept nogil
        void (*screen_pack)(int, const void *, size_t, size_t, int8_t *, float *) noexcept nogil
        int (*screen_token)(const float *, size_t, size_t, int16_t *, double *) noexcept nogil
        void (*screen_rows)(const int8_t *, size_t, size_t, size_t, const float *, const int16_t *, size_t,
                            const double *, float *, float *, size_t) noexcept nogil
        void (*screen_arrange)(const int16_t *, size_t, size_t, int16_t *) noexcept nogil
    const kernel_set KERNEL_SETS[]
    const int N_KERNEL_SETS
    const char *kernel_set_lacks(size_t index)
    const int PANEL_ROWS, BLOCK_BYTES, SCRATCH_BYTES, SCREEN_TILE_TOKENS

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

# A second thread costs a microsecond while it spins, and much more asleep or on a busy machine: it is called for this much
# work or more. Of steps that go through a token once 16384, not 65536: 64 tokens of storyteller 17,800 and 23,000 to 27,000
# tok/s, 8 sequences of 12 layers of 2B-4T 29.1 and 27.4 to 28.9 ms; beside two programs that never sleep 11,000 and 8,200.
# Of panels and dense rows a half or a quarter of this: storyteller's decoding 5 to 10% slower.
cdef enum:
    PANEL_BYTES_PER_THREAD = 65536
    DENSE_BYTES_PER_THREAD = 262144
    ATTENTION_FLOATS_PER_THREAD = 65536
    ATTEND_SCORES = 1 << 20  # of tokens that go through the keys together: 12 MB of each thread
    FLOATS_PER_THREAD = 16384  # of the steps that go through a token once

floats_per_thread = FLOATS_PER_THREAD


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


cdef inline int threads_for(Py_ssize_t work, Py_ssize_t work_per_thread, int threads) noexcept nogil:
    if forked:
        return 1
    cdef Py_ssize_t useful = work // work_per_thread
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
# without a line of Python between them: see `backends/cpu/replay.py`.

ctypedef Py_ssize_t (*call_fn)(const void *) noexcept nogil  # WELL, NO_MEMORY, or the row that was not well

cdef enum:
    WELL = -1
    NO_MEMORY = -2

cdef struct kept_call:
    call_fn run
    void *call


cdef class Tape:
    """Calls in their order. It holds what they read that is no activation: weights, which may have been laid out for one
    call, and a cache's layers. The activations are with who made it."""
    cdef kept_call *calls
    cdef Py_ssize_t count, room
    cdef set places  # of the activations that the calls read and write
    cdef list held

    def __cinit__(self):
        self.calls, self.count, self.room, self.places, self.held = NULL, 0, 0, set(), []

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
        self.places, self.held = set(), []

    cdef keep(self, call_fn run, const void *call, size_t size, places, held=None):
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
        self.held.append(held)

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


include "_cpu_ternary.pxi"
include "_cpu_rows.pxi"
include "_cpu_cache.pxi"
include "_cpu_dense.pxi"
