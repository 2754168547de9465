# Part of _cpu.pyx: the terms of LoRA adapters, lora_steps.h.

cdef enum:
    LORA_ROWS = 4  # rows of A that a thread takes at a time
    LORA_COLUMNS = 512  # columns of B

cdef struct lora_factors:
    const void *a  # (r, K)
    const void *b  # (r, N): B by its columns
    Py_ssize_t r
    int a_kind, b_kind  # 0 float32, 1 bfloat16

cdef struct lora_call:
    const float *x
    float *y
    float *t  # (M, max_r)
    bint alone  # y gets the term alone
    const int32_t *choice  # (M,) which factors are each token's, or -1; NULL: the first are everyone's
    const lora_factors *factors
    Py_ssize_t M, K, N, max_r
    const kernel_set *chosen
    int threads


cdef class LoraFactors:
    """The factors of one linear, of one adapter or of several: [(A (r, K), B by its columns (r, N)), or None, ...] in
    float32, or bfloat16 as uint16."""
    cdef lora_factors *factors
    cdef readonly Py_ssize_t count, K, N, max_r
    cdef list held

    def __cinit__(self, pairs):
        self.factors, self.count, self.K, self.N, self.max_r, self.held = NULL, 0, 0, 0, 0, []
        self.factors = <lora_factors *> malloc(max(len(pairs), 1) * sizeof(lora_factors))
        if self.factors == NULL:
            raise MemoryError("no memory for the factors of an adapter")
        for pair in pairs:
            self._add(pair)

    cdef _add(self, pair):
        cdef lora_factors *f = self.factors + self.count
        cdef Py_ssize_t K, N, r
        f.a, f.b, f.r = NULL, NULL, 0
        if pair is not None:
            f.a = _matrix(pair[0], 0, &f.r, &K, &f.a_kind)
            f.b = _matrix(pair[1], 0, &r, &N, &f.b_kind)
            if f.r != r or f.a_kind > 1 or f.b_kind > 1 or (self.K and (self.K, self.N) != (K, N)):
                raise ValueError(f"LoraFactors: A {f.r, K} and B {r, N}")
            self.K, self.N, self.max_r = K, N, max(r, self.max_r)
            self.held.append(pair)
        self.count += 1

    def __dealloc__(self):
        free(self.factors)


cdef Py_ssize_t run_lora(const void *call) noexcept nogil:
    """t = A x for every token, then y += B t."""
    cdef const lora_call *c = <const lora_call *> call
    cdef Py_ssize_t down = (c.max_r + LORA_ROWS - 1) // LORA_ROWS, up = (c.N + LORA_COLUMNS - 1) // LORA_COLUMNS, i
    cdef int team = threads_for(c.M * c.max_r * min(c.K, c.N), FLOATS_PER_THREAD, c.threads)
    if team == 1:
        for i in range(c.M * down):
            lora_down_piece(c, i // down, i % down * LORA_ROWS)
        for i in range(c.M * up):
            lora_up_piece(c, i // up, i % up * LORA_COLUMNS)
        return OK
    for i in prange(c.M * down, num_threads=team, schedule="static"):
        lora_down_piece(c, i // down, i % down * LORA_ROWS)
    for i in prange(c.M * up, num_threads=team, schedule="static"):
        lora_up_piece(c, i // up, i % up * LORA_COLUMNS)
    return OK


cdef inline const lora_factors *factors_of(const lora_call *c, Py_ssize_t m) noexcept nogil:
    cdef Py_ssize_t which = 0 if c.choice == NULL else c.choice[m]
    if which < 0 or c.factors[which].r == 0:
        return NULL
    return &c.factors[which]


cdef void lora_down_piece(const lora_call *c, Py_ssize_t m, Py_ssize_t first) noexcept nogil:
    cdef const lora_factors *f = factors_of(c, m)
    if f == NULL or first >= f.r:
        return
    cdef const char *a = <const char *> f.a + first * c.K * (4 if f.a_kind == 0 else 2)
    c.chosen.lora_down(f.a_kind, a, min(f.r - first, <Py_ssize_t> LORA_ROWS), c.K, c.x + m * c.K,
                       c.t + m * c.max_r + first)


cdef void lora_up_piece(const lora_call *c, Py_ssize_t m, Py_ssize_t first) noexcept nogil:
    cdef const lora_factors *f = factors_of(c, m)
    cdef Py_ssize_t n, stop = min(first + LORA_COLUMNS, c.N)
    if c.alone:
        for n in range(first, stop):
            c.y[m * c.N + n] = -0.0  # whose sum with a number is that number
    if f != NULL:
        c.chosen.lora_up(f.b_kind, f.b, f.r, c.N, first, stop, c.t + m * c.max_r, c.y + m * c.N)


cdef int place_term(lora_call *c, const float[:, ::1] x, float[:, ::1] y, float[:, ::1] t, LoraFactors factors,
                     const int32_t[::1] choice, int threads, Py_ssize_t kernels, bint alone) except -1:
    """A call from the arguments of `lora`; its factors are NULL if there is nothing to compute."""
    cdef Py_ssize_t i
    c.M, c.K, c.N, c.max_r, c.alone, c.factors = x.shape[0], factors.K, factors.N, factors.max_r, alone, NULL
    if (x.shape[1] != c.K or y.shape[0] != c.M or y.shape[1] != c.N or t.shape[0] != c.M or t.shape[1] != c.max_r
            or factors.count == 0 or (choice is not None and choice.shape[0] != c.M)):
        raise ValueError(f"lora: x {c.M, x.shape[1]}, y {y.shape[0], y.shape[1]}, factors {c.N, c.K}")
    if choice is not None and c.M:
        check_aligned(<size_t> &choice[0])
    for i in range(c.M if choice is not None else 0):
        if choice[i] >= factors.count:
            raise ValueError(f"lora: token {i} takes factors {choice[i]} of {factors.count}")
    if c.M == 0 or c.max_r == 0:
        return 0
    c.x, c.y, c.t, c.choice = &x[0, 0], &y[0, 0], &t[0, 0], NULL
    if choice is not None:
        c.choice = &choice[0]
    c.factors, c.chosen, c.threads = factors.factors, check_set(kernels, threads), threads
    check_aligned(<size_t> c.x | <size_t> c.y | <size_t> c.t)
    return 0


def lora(const float[:, ::1] x, float[:, ::1] y, float[:, ::1] t, LoraFactors factors, int threads,
         Py_ssize_t kernels, Tape tape=None, *, const int32_t[::1] choice=None):
    """y (M, N) += B (A x) of each token's factors, x (M, K). choice (M,): which, or -1; None: the first are everyone's.
    t (M, max_r) is overwritten."""
    cdef lora_call c
    place_term(&c, x, y, t, factors, choice, threads, kernels, False)
    if c.factors == NULL:
        return
    if tape is not None:
        tape.record(run_lora, &c, sizeof(c), (<size_t> c.x, <size_t> c.y, <size_t> c.t), (factors, choice))
        return
    with nogil:
        run_lora(&c)
