# Part of _cpu.pyx: the steps that read each token's row once: norm, gate, sum, RoPE, rounding to 16 bits, and a copy.

cdef enum:
    GATE_PIECE = 1024  # numbers, a multiple of every set's vector
    GATE_WORK = 4  # of a gate, with its exponential, in numbers of the other steps

cdef struct rows_call
ctypedef void (*row_fn)(const rows_call *, Py_ssize_t) noexcept nogil

cdef struct rows_call:
    row_fn run_row  # out[m] of one row m
    const float *x
    const float *y  # the norm's weight, the gate's up, the other summand, or RoPE's cos
    const float *sin
    const int64_t *rows  # of x, to copy
    float *out
    Py_ssize_t M, D, y_stride, heads
    double eps
    bint is_silu
    const kernel_set *chosen
    int threads


cdef Py_ssize_t run_rows(const void *call) noexcept nogil:
    cdef const rows_call *c = <const rows_call *> call
    cdef Py_ssize_t m, D = c.D
    cdef Py_ssize_t work = c.M * D * (GATE_WORK if c.run_row == gated_row else 1)
    for m in prange(c.M if D else 0, num_threads=threads_for(work, FLOATS_PER_THREAD, c.threads), schedule="static"):
        c.run_row(c, m)
    for m in range(c.M if D and c.run_row == norm_row else 0):
        if c.out[m * D] != c.out[m * D]:
            return m
    return OK


cdef compute_rows(rows_call *c, Tape tape, addresses, held=None):
    """Make the call, and return what it returns; or record it."""
    cdef Py_ssize_t bad
    check_aligned(<size_t> c.x | <size_t> c.y | <size_t> c.sin | <size_t> c.out)
    if tape is not None:
        tape.record(run_rows, c, sizeof(rows_call), (<size_t> c.x, <size_t> c.out, *addresses), held)
        return OK
    with nogil:
        bad = run_rows(c)
    return bad


cdef void norm_row(const rows_call *c, Py_ssize_t m) noexcept nogil:
    if not c.chosen.rms_norm(c.x + m * c.D, c.y, c.D, c.eps, c.out + m * c.D):
        c.out[m * c.D] = NAN  # marks a bad row: no good one starts with it


def rms_norm(const float[:, ::1] x, const float[::1] weight, double eps, float[:, ::1] y, int threads,
             Py_ssize_t kernels, Tape tape=None):
    """y = x / sqrt(mean(x^2) + eps) * weight. Returns -1, or the first row that holds NaN or Inf."""
    cdef rows_call c
    c.run_row, c.M, c.D, c.eps, c.sin = norm_row, x.shape[0], x.shape[1], eps, NULL
    c.chosen, c.threads = check_set(kernels, threads), threads
    if weight.shape[0] != c.D or y.shape[0] != c.M or y.shape[1] != c.D:
        raise ValueError(f"rms_norm: x {c.M, c.D}, weight {weight.shape[0]}, y {y.shape[0], y.shape[1]}")
    c.x, c.y, c.out = &x[0, 0], &weight[0], &y[0, 0]
    return compute_rows(&c, tape, (), weight)


cdef void gated_row(const rows_call *c, Py_ssize_t m) noexcept nogil:
    cdef Py_ssize_t first = m % c.heads * c.D, start = m // c.heads * c.y_stride + first
    c.chosen.gated(c.x + start, c.y + start, min(c.D, c.y_stride - first), c.is_silu, c.out + start)


def gated(const float[:, ::1] gate, const float[:, ::1] up, bint is_silu, float[:, ::1] y, int threads,
          Py_ssize_t kernels, Tape tape=None):
    """y = act(gate) * up"""
    cdef rows_call c
    cdef Py_ssize_t M = gate.shape[0], F = gate.shape[1]
    c.run_row, c.is_silu, c.sin, c.chosen, c.threads = gated_row, is_silu, NULL, check_set(kernels, threads), threads
    if up.shape[0] != M or up.shape[1] != F or y.shape[0] != M or y.shape[1] != F:
        raise ValueError(f"gated: gate {M, F}, up {up.shape[0], up.shape[1]}")
    # "rows" of at most GATE_PIECE numbers, so that threads share even one token: `heads` of them for each token
    c.y_stride, c.heads, c.D = F, (F + GATE_PIECE - 1) // GATE_PIECE, min(F, <Py_ssize_t> GATE_PIECE)
    c.M = M * c.heads
    c.x, c.y, c.out = &gate[0, 0], &up[0, 0], &y[0, 0]
    compute_rows(&c, tape, (<size_t> c.y,))


cdef inline void add_arrays(const float *x, const float *y, Py_ssize_t D, float *z) noexcept nogil:
    cdef Py_ssize_t i
    for i in range(D):
        z[i] = x[i] + y[i]


cdef void add_row(const rows_call *c, Py_ssize_t m) noexcept nogil:
    add_arrays(c.x + m * c.D, c.y + m * c.y_stride, c.D, c.out + m * c.D)


def add(const float[:, ::1] x, const float[:, ::1] y, float[:, ::1] z, int threads, bint is_bias, Tape tape=None):
    """z = x + y. is_bias: y (1, D) is added to every row; it is a weight, not an activation."""
    cdef rows_call c
    c.run_row, c.M, c.D, c.threads, c.y_stride = add_row, x.shape[0], x.shape[1], threads, 0 if is_bias else x.shape[1]
    c.chosen, c.sin = check_set(0, threads), NULL
    if y.shape[0] != (1 if is_bias else c.M) or y.shape[1] != c.D or z.shape[0] != c.M or z.shape[1] != c.D:
        raise ValueError(f"add: x {c.M, c.D}, y {y.shape[0], y.shape[1]}, z {z.shape[0], z.shape[1]}")
    c.x, c.y, c.out = &x[0, 0], &y[0, 0], &z[0, 0]
    compute_rows(&c, tape, () if is_bias else (<size_t> c.y,), y if is_bias else None)


cdef void narrow_row(const rows_call *c, Py_ssize_t m) noexcept nogil:
    narrow_floats(c.heads, c.x + m * c.D, c.D, c.out + m * c.D)


def narrow(const float[:, ::1] x, bint to_half, float[:, ::1] y, int threads, Tape tape=None):
    """y = x rounded to float16, else to bfloat16"""
    cdef rows_call c
    c.run_row, c.M, c.D, c.heads, c.threads = narrow_row, x.shape[0], x.shape[1], to_half, threads
    c.chosen, c.y, c.sin = check_set(0, threads), NULL, NULL
    if y.shape[0] != c.M or y.shape[1] != c.D:
        raise ValueError(f"narrow: x {c.M, c.D}, y {y.shape[0], y.shape[1]}")
    c.x, c.out = &x[0, 0], &y[0, 0]
    compute_rows(&c, tape, ())


cdef void rope_row(const rows_call *c, Py_ssize_t m) noexcept nogil:
    cdef Py_ssize_t half = c.y_stride, size = c.D // c.heads, start = m * c.D, h
    cdef const float *cos = c.y + m * half
    cdef const float *sin = c.sin + m * half
    if 2 * half == size:
        c.chosen.rope(c.x + start, c.heads, half, cos, sin, c.out + start)
        return
    for h in range(c.heads):
        c.chosen.rope(c.x + start + h * size, 1, half, cos, sin, c.out + start + h * size)
        memcpy(c.out + start + h * size + 2 * half, c.x + start + h * size + 2 * half, (size - 2 * half) * sizeof(float))


def rope(const float[:, :, ::1] x, const float[:, ::1] cos, const float[:, ::1] sin, float[:, :, ::1] y, int threads,
         Py_ssize_t kernels, Tape tape=None):
    """x (M, heads, d), cos and sin (M, r/2) -> y, the first r numbers of each head rotated"""
    cdef rows_call c
    cdef Py_ssize_t half = cos.shape[1]
    c.run_row, c.M, c.heads, c.chosen, c.threads = rope_row, x.shape[0], x.shape[1], check_set(kernels, threads), threads
    c.D, c.y_stride = c.heads * x.shape[2], half
    if (cos.shape[0] != c.M or sin.shape[0] != c.M or sin.shape[1] != half or 2 * half > x.shape[2] or y.shape[0] != c.M
            or y.shape[1] != c.heads or y.shape[2] != x.shape[2]):
        raise ValueError(f"rope: x {c.M, c.heads, x.shape[2]}, cos {cos.shape[0], cos.shape[1]}")
    c.x, c.y, c.sin, c.out = &x[0, 0, 0], &cos[0, 0], &sin[0, 0], &y[0, 0, 0]
    compute_rows(&c, tape, (<size_t> c.y, <size_t> c.sin))


cdef void copy_row(const rows_call *c, Py_ssize_t m) noexcept nogil:
    memcpy(c.out + m * c.D, c.x + c.rows[m] * c.D, c.D * sizeof(float))


def take_rows(const float[:, ::1] x, const int64_t[::1] rows, float[:, ::1] y, int threads, Tape tape=None):
    """y (n, D) = x[rows], rows (n,)"""
    cdef rows_call c
    cdef Py_ssize_t m
    c.run_row, c.M, c.D, c.threads, c.chosen = copy_row, rows.shape[0], x.shape[1], threads, check_set(0, threads)
    if y.shape[0] != c.M or y.shape[1] != c.D:
        raise ValueError(f"take_rows: {c.M} rows of x {x.shape[0], c.D}, y {y.shape[0], y.shape[1]}")
    check_aligned(<size_t> &rows[0])
    for m in range(c.M):
        if not 0 <= rows[m] < x.shape[0]:
            raise ValueError(f"take_rows: row {rows[m]} of {x.shape[0]}")
    c.x, c.y, c.sin, c.rows, c.out = &x[0, 0], NULL, NULL, &rows[0], &y[0, 0]
    compute_rows(&c, tape, (), rows)
