# Part of _cpu.pyx: the steps that go through each token's row once: norm, gate, sum, RoPE.


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
    for m in prange(c.M, num_threads=threads_for(c.M * D, FLOATS_PER_THREAD, c.threads), schedule="static"):
        if not c.chosen.rms_norm(c.x + m * D, c.weight, D, c.eps, c.y + m * D):
            c.y[m * D] = NAN  # the mark of a bad row: no good one has it
    for m in range(c.M if D else 0):
        if c.y[m * D] != c.y[m * D]:
            return m
    return WELL


def rms_norm(const float[:, ::1] x, const float[::1] weight, double eps, float[:, ::1] y, int threads,
             Py_ssize_t kernels, Tape tape=None):
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
        tape.keep(run_norm, &c, sizeof(c), (<size_t> c.x, <size_t> c.y), weight)
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
    for m in prange(c.M if F else 0, num_threads=threads_for(c.M * F, FLOATS_PER_THREAD, c.threads), schedule="static"):
        c.chosen.gated(c.gate + m * F, c.up + m * F, F, c.is_silu, c.y + m * F)
    return WELL


def gated(const float[:, ::1] gate, const float[:, ::1] up, bint is_silu, float[:, ::1] y, int threads,
          Py_ssize_t kernels, Tape tape=None):
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


cdef inline void add_row(const float *x, const float *y, Py_ssize_t D, float *z) noexcept nogil:
    cdef Py_ssize_t i
    for i in range(D):
        z[i] = x[i] + y[i]


cdef Py_ssize_t run_add(const void *call) noexcept nogil:
    cdef const add_call *c = <const add_call *> call
    cdef Py_ssize_t m, D = c.D
    for m in prange(c.M, num_threads=threads_for(c.M * D, FLOATS_PER_THREAD, c.threads), schedule="static"):
        add_row(c.x + m * D, c.y + m * c.y_stride, D, c.z + m * D)
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
        places = (<size_t> c.x, <size_t> c.z) + (() if is_bias else (<size_t> c.y,))
        tape.keep(run_add, &c, sizeof(c), places, y if is_bias else None)


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
    for m in prange(c.M if row else 0, num_threads=threads_for(c.M * row // 2, FLOATS_PER_THREAD, c.threads),
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
