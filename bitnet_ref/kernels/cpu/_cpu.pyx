# cython: boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False, binding=True
# cython: allow_none_for_extension_args=False
"""The compiled CPU kernels: argument checks, threads, and calls into the C headers beside this file.

Every function takes the index of a kernel set (`kernel_sets`). Results do not depend on the number of rows or on which
thread computes a row. The GIL is released; any number of Python threads may call. This file has the threads and the
tape; the functions are in the `.pxi` files.
"""

import os

from cpython.exc cimport PyErr_CheckSignals
from cython.parallel cimport parallel, prange, threadid
from libc.float cimport FLT_MIN
from libc.math cimport INFINITY, NAN
from libc.stdint cimport int8_t, int16_t, int32_t, int64_t, uint32_t, uint8_t, uint16_t, uint64_t
from libc.stdlib cimport free, malloc, realloc
from libc.string cimport memcpy, memset

cdef extern from "stdlib.h" nogil:
    int posix_memalign(void **memory, size_t alignment, size_t size)

include "_types.pxi"  # the structs and function types of the headers, written by setup.py

cdef extern from "kernels.h" nogil:
    uint64_t read_words(const uint64_t *, size_t) noexcept nogil
    const int KV_FLOAT32, KV_FLOAT16, KV_INT8, ATTEND_ROWS, SUM_KEYS, DRAW_BLOCK
    const int ATTEND_BEGIN, ATTEND_SCORES, ATTEND_SOFTMAX, ATTEND_VALUES, ATTEND_END
    size_t attend_workspace(size_t rows, size_t d, size_t n_keys, size_t slots)
    void attend_place(attend_call *, double *workspace)
    size_t attend_blocks(const kv_view *)
    void attend_all(attend_fn, const attend_call *)
    const int SLICE_MAX_D
    size_t slice_chunks(size_t n_keys)
    size_t kv_slices_place(kv_slices *, void *memory)
    size_t attend_sliced_workspace(size_t rows, size_t d)
    bint kv_can_store(int kind, const float *x, size_t n)
    void narrow_floats(int to_half, const float *x, size_t n, float *y)
    void kv_store(int kind, const float *x, size_t d, void *rows, size_t row, float *scale)
    void embed_row(int kind, const void *row, size_t n, float scale, float *x)
    long l2_bytes()
    const ternary_method METHODS[]
    const int N_METHODS
    const dense_kind DENSE_KINDS[]
    const int Q8_0, N_DENSE_KINDS
    size_t dense_row_bytes(int kind, size_t K)
    size_t packed_columns(size_t K)
    const int GROUP_PLANES, GROUP_BY_TABLES, GROUP_TABLE_TOKENS, GROUP_PLANE_TOKENS, N_GROUP_LAYOUTS
    group_shape make_group_shape(size_t, size_t, size_t, int)
    void group_pack(const group_shape *, const uint8_t *, size_t, size_t, uint8_t *)
    void group_unpack_row(const group_shape *, const uint8_t *, size_t, uint8_t *)
    void group_fetch(const uint8_t *codes, size_t bytes)
    void group_turn(const float *, size_t, const float *, const int64_t *, size_t, double *)
    const ruled_form RULED_FORMS[]
    const int N_RULED_FORMS, RULED_ROWS
    size_t ruled_unit_bytes(const ruled_form *)
    size_t ruled_token_bytes(int block, size_t K)
    int ruled_token_overflows(const uint8_t *, size_t)
    enum: N_TILE_METHODS
    const tile_method *by_tiles(const kernel_set *, int kind, size_t K)
    const kernel_set *KERNEL_SETS[]
    const int N_KERNEL_SETS
    const char *kernel_set_lacks(size_t index)
    const int NO_GATE, RELU2, SILU, TILED_TOKENS
    size_t tiled_bytes(size_t n_blocks)
    void tile_token(const int8_t *x, size_t n_blocks, size_t m, uint8_t *tiles)
    const int PANEL_ROWS, BLOCK_BYTES, SCRATCH_BYTES, SCREEN_TILE_TOKENS, STRIP_K, STRIP_BYTES, LIST_SLACK
    uint32_t pack_plane_row(const uint8_t *plane, size_t K, uint8_t *packed, size_t quarter_bytes)
    size_t bf16_scratch(size_t N)
    void bf16_product_plain(bf16_operand, bf16_operand, size_t M, size_t K, size_t N, float *c, void *scratch)
    void bf16_product_avx512(bf16_operand, bf16_operand, size_t M, size_t K, size_t N, float *c, void *scratch)
    int has_avx512_bf16()
    void pack_row_strips(const uint8_t *packed, size_t rows, size_t row_bytes, size_t n_vectors, uint8_t *strips)
    void pack_column_strips(const uint8_t *packed, size_t rows, size_t row_bytes, size_t b, size_t count, size_t n_vectors,
                            uint8_t *strips)

cdef extern from *:
    """
    #ifdef _OPENMP
    #include <omp.h>
    #define BITNET_REF_OPENMP 1
    #else
    #define BITNET_REF_OPENMP 0
    #endif
    #if defined(_OPENMP) && _OPENMP >= 201511 /* 4.5 */
    static int bound_places(void) { return omp_get_proc_bind() == omp_proc_bind_false ? 0 : omp_get_num_places(); }
    #else
    static int bound_places(void) { return 0; }
    static int omp_get_place_num_procs(int place) { return 0 * place; }
    static void omp_get_place_proc_ids(int place, int *cpus) { (void)place, (void)cpus; }
    #endif
    """
    const int BITNET_REF_OPENMP
    int bound_places()
    int omp_get_place_num_procs(int place)
    void omp_get_place_proc_ids(int place, int *cpus)

has_openmp = bool(BITNET_REF_OPENMP)


def bound_cpus():
    """Numbers of the processors that OpenMP binds its threads to (OMP_PLACES, OMP_PROC_BIND, GOMP_CPU_AFFINITY);
    empty if it binds none."""
    cdef int place
    cdef int[::1] cpus
    bound = set()
    for place in range(bound_places()):
        cpus = memoryview(bytearray(sizeof(int) * max(1, omp_get_place_num_procs(place)))).cast("i")
        omp_get_place_proc_ids(place, &cpus[0])
        bound.update(cpus[: omp_get_place_num_procs(place)])
    return bound


cdef Py_ssize_t L2_BYTES = l2_bytes()
panel_rows, block_bytes = PANEL_ROWS, BLOCK_BYTES

# The minimum work per thread. A second thread costs a microsecond while it spins, much more asleep or on a busy
# machine. FLOATS_PER_THREAD 16384 instead of 65536: 64 tokens of storyteller 23,000 to 27,000 tok/s instead of 17,800,
# beside two programs that never sleep 8,200 instead of 11,000; 8 sequences of 12 layers of 2B-4T 27.4 to 28.9 ms instead
# of 29.1. Half or a quarter of the bytes of panels and dense rows: storyteller decodes 5 to 10% slower.
# Dense rows in blocks count as two bytes a weight, for widening takes their time: SmolLM2-135M in Q4_0 decodes at 133 tok/s,
# 83 by their bytes, when a thread slept through most matrices.
cdef enum:
    PANEL_BYTES_PER_THREAD = 65536
    DENSE_BYTES_PER_THREAD = 262144
    ATTENTION_FLOATS_PER_THREAD = 65536
    MAX_RUN_SCORES = 1 << 20  # of the tokens that go through the keys together: 12 MB per thread
    MIN_SLICED_ROWS = 256  # query rows of a kv head for which its keys and values are sliced (attention_amx.h)
    MIN_SLICED_KEYS = 160
    MAX_SLICED_BYTES = 1 << 26  # of one kv head: 51,000 keys of 128 numbers
    FLOATS_PER_THREAD = 16384  # for the steps that read each token once

floats_per_thread = FLOATS_PER_THREAD

cdef enum:
    MAX_COLUMNS = 1 << 24  # of a ternary matrix: sums of 128 * K fit int32
    MAX_ROWS = 1 << 30  # of a matrix by groups: the number of its panels cannot overflow
    MAX_THREADS = 4096  # as in system/threads.py: OpenMP ends the process when the system cannot start all of them

cdef bint runs_here[16]  # whether this processor can run a kernel set
for _index in range(N_KERNEL_SETS):
    runs_here[_index] = kernel_set_lacks(_index) == NULL


cdef const kernel_set *check_set(Py_ssize_t kernels, int threads=1) except NULL:
    """The kernel set of that number, for that many threads. ValueError for none, or one that cannot run here."""
    if not 0 <= kernels < N_KERNEL_SETS or not runs_here[kernels]:
        raise ValueError(f"kernel set {kernels} of {N_KERNEL_SETS}: there is none, or this processor cannot run it")
    if not 1 <= threads <= MAX_THREADS:
        raise ValueError(f"{threads} threads, expected 1 to {MAX_THREADS}")
    return KERNEL_SETS[kernels]


cdef const ternary_method *check_method(Py_ssize_t method) except NULL:
    if not 0 <= method < N_METHODS:
        raise ValueError(f"method {method} of {N_METHODS}")
    return &METHODS[method]


cdef int check_aligned(size_t addresses, size_t size=4) except -1:
    """`addresses`: of arrays, combined by or. ValueError unless all are multiples of the element's size."""
    if addresses % size:
        raise ValueError(f"an array does not start at a multiple of {size} bytes, the size of its elements")
    return 0


def kernel_sets():
    """[(name, None or what this processor lacks for it)], the best last"""
    sets = []
    for index in range(N_KERNEL_SETS):
        lacks = kernel_set_lacks(index)
        sets.append((KERNEL_SETS[index].name.decode(), None if lacks == NULL else lacks.decode()))
    return sets


def ternary_methods():
    """[(name, columns per block, kernel sets that have a kernel for it)], by number"""
    methods = []
    for method in range(N_METHODS):
        sets = [KERNEL_SETS[i].name.decode() for i in range(N_KERNEL_SETS) if KERNEL_SETS[i].ternary[method].run != NULL]
        methods.append((METHODS[method].name.decode(), METHODS[method].block_k, sets))
    return methods


cdef const ternary_kernel *kernel_for(Py_ssize_t kernels, Py_ssize_t method, Py_ssize_t K) except NULL:
    """A set's kernel for that method and K columns, or the scalar one for more columns than it can sum."""
    check_method(method)
    cdef const ternary_kernel *kernel = &check_set(kernels).ternary[method]
    if kernel.run == NULL:
        raise ValueError(f"the kernel set {KERNEL_SETS[kernels].name.decode()} has no {METHODS[method].name.decode()} kernel")
    if kernel.max_k and <size_t> K > kernel.max_k:
        return &KERNEL_SETS[0].ternary[method]
    return kernel


# OpenMP's threads do not survive a fork: a forked child that asks for two waits forever for the other (libgomp).
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


cdef inline void *allocate(size_t count, size_t size) noexcept nogil:
    """Memory for `count` items, aligned to a cache line, or NULL. All scratch memory of the kernels comes from here,
    before a parallel region: no thread can fail in its middle."""
    cdef void *memory = NULL
    if count > (<size_t> -1) // max(size, <size_t> 1):
        return NULL
    return memory if posix_memalign(&memory, 64, max(count * size, <size_t> 64)) == 0 else NULL


cdef inline size_t thread_bytes(size_t size) noexcept nogil:
    """The bytes of one thread's part of a scratch buffer: no two threads write the same pair of cache lines."""
    return (size + 127) // 128 * 128


# -- kernel calls and the tape that replays them -----------------------------------------------------------------------
#
# A kernel of a pass is a C function of one struct, its call. The Python function of its name fills the struct and makes
# the call; given a tape, it copies the call there instead. Playing a tape makes all of its calls without Python between
# them: see `backends/cpu/replay.py`.

ctypedef Py_ssize_t (*call_fn)(const void *) noexcept nogil  # OK, NO_MEMORY, or the first bad row

cdef enum:
    OK = -1
    NO_MEMORY = -2
    NOT_COMPUTED = -3

cdef struct recorded_call:
    call_fn run
    void *call


cdef class Tape:
    """Calls in their order. It keeps alive what they read except activations: weights, which may be laid out for one
    call only, and layers of a cache.

    What records calls has no `[x for ...]` and no `(*all, last)`: when the list cannot grow, the C code of Cython 3.3
    releases the element twice.
    """
    cdef recorded_call *calls
    cdef Py_ssize_t count, capacity
    cdef set addresses  # of the activations that the calls read and write
    cdef list held

    def __cinit__(self):
        self.calls, self.count, self.capacity, self.addresses, self.held = NULL, 0, 0, set(), []

    def __dealloc__(self):
        cdef Py_ssize_t i
        for i in range(self.count):
            free(self.calls[i].call)
        free(self.calls)

    cdef record(self, call_fn run, const void *call, size_t size, addresses, held=None, float *const *ys=NULL,
                Py_ssize_t count=0):
        """addresses: of activations that the call reads and writes; and ys, so many results"""
        cdef void *calls
        cdef Py_ssize_t i
        self.addresses.update(addresses)
        for i in range(count):
            self.addresses.add(<size_t> ys[i])
        self.held.append(held)
        if self.count == self.capacity:
            calls = realloc(self.calls, (2 * self.capacity + 64) * sizeof(recorded_call))
            if calls == NULL:
                raise MemoryError("no memory to record a step")
            self.calls, self.capacity = <recorded_call *> calls, 2 * self.capacity + 64
        cdef void *copy = malloc(size)
        if copy == NULL:
            raise MemoryError("no memory to record a step")
        memcpy(copy, call, size)
        self.calls[self.count].run, self.calls[self.count].call = run, copy
        self.count += 1

    def lies_in(self, ranges):
        """Whether the calls read and write activations in these ranges (start, end) of addresses only."""
        return all(any(start <= address < end for start, end in ranges) for address in self.addresses)

    cdef bint run(self) noexcept nogil:
        cdef Py_ssize_t i
        for i in range(self.count):
            if self.calls[i].run(self.calls[i].call) != OK:
                return False
        return True

    def play(self, bint answers_signals=False):
        """Make the calls. Returns whether all succeeded; stops at the first that did not.

        answers_signals: Python's handlers may run between two calls, and raise.
        """
        cdef bint succeeded = True
        cdef Py_ssize_t i
        if not answers_signals:
            with nogil:
                succeeded = self.run()
            return succeeded
        for i in range(self.count):
            with nogil:
                succeeded = self.calls[i].run(self.calls[i].call) == OK
            PyErr_CheckSignals()
            if not succeeded:
                return False
        return True


cdef Py_ssize_t make_call(call_fn run, const void *call, str what, Py_ssize_t tokens, Py_ssize_t width=0) except -2:
    """Make the call.   -> OK, or the first bad row.  what, with tokens and width: for the MemoryError"""
    cdef Py_ssize_t bad
    with nogil:
        bad = run(call)
    if bad == NO_MEMORY:
        raise MemoryError("no memory for " + what.format(tokens, width))
    return bad


def sum_words(const uint64_t[::1] words, int threads):
    """The sum of the words, modulo 2^64: reads every byte once, at the memory's rate. For benchmarks."""
    cdef Py_ssize_t n = words.shape[0], chunk, chunk_words = 65536
    cdef uint64_t total = 0, part
    check_set(0, threads)
    check_aligned(<size_t> &words[0], sizeof(uint64_t))
    cdef int team = threads_for(threads, 1, threads)
    for chunk in prange((n + chunk_words - 1) // chunk_words, nogil=True, num_threads=team, schedule="static"):
        part = read_words(&words[chunk * chunk_words], min(chunk_words, n - chunk * chunk_words))
        total += part
    return total


def peak_multiply_adds(Py_ssize_t kernels, Py_ssize_t rounds, int threads):
    """Runs `rounds` rounds of the kernel set's product instruction on registers alone on every thread. Returns the
    multiply-adds of all threads, or 0 where the set has no such loop. For benchmarks."""
    cdef Py_ssize_t part
    cdef size_t done = 0
    cdef const kernel_set *chosen = check_set(kernels, threads)
    if chosen.peak == NULL or rounds < 1:
        return 0
    cdef int team = threads_for(threads, 1, threads)
    for part in prange(threads, nogil=True, num_threads=team, schedule="static"):
        done += chosen.peak(rounds)
    return done * rounds


include "_cpu_lora.pxi"
include "_cpu_strips.pxi"
include "_cpu_ternary.pxi"
include "_cpu_rows.pxi"
include "_cpu_cache.pxi"
include "_cpu_dense.pxi"
include "_cpu_greedy.pxi"
include "_cpu_group.pxi"
include "_cpu_ruled.pxi"
include "_cpu_experts.pxi"
include "_cpu_training.pxi"
