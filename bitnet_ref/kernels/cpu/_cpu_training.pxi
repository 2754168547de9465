# Part of _cpu.pyx: the steps of a training pass between its products. Each runs in the thread that calls it: training
# gives every thread a sequence of its own.


def norm_backward(const float[:, ::1] dy, const float[:, ::1] x, const float[::1] weight, double eps, float[:, ::1] dx,
                  float[::1] d_weight, Py_ssize_t kernels):
    """The gradients of y = x / sqrt(mean(x^2) + eps) * weight.   dy, x (M, D) -> dx (M, D), d_weight (D,)"""
    cdef Py_ssize_t M = x.shape[0], D = x.shape[1], m
    cdef const kernel_set *chosen = check_set(kernels)
    if (dy.shape[0] != M or dy.shape[1] != D or weight.shape[0] != D or dx.shape[0] != M or dx.shape[1] != D
            or d_weight.shape[0] != D or M == 0 or D == 0):
        raise ValueError(f"norm_backward: dy {dy.shape[0], dy.shape[1]}, x {M, D}, weight {weight.shape[0]}")
    check_aligned(<size_t> &dy[0, 0] | <size_t> &x[0, 0] | <size_t> &weight[0] | <size_t> &dx[0, 0] | <size_t> &d_weight[0])
    cdef double *sums = <double *> allocate(D, sizeof(double))
    if sums == NULL:
        raise MemoryError(f"no memory for {D} sums")
    with nogil:
        memset(sums, 0, D * sizeof(double))
        for m in range(M):
            chosen.norm_backward(&dy[m, 0], &x[m, 0], &weight[0], D, eps, &dx[m, 0], sums)
        for m in range(D):
            d_weight[m] = <float> sums[m]
    free(sums)


def causal_softmax(double[:, :, ::1] scores, float[:, :, ::1] pattern, Py_ssize_t start, Py_ssize_t window, double scale,
                   Py_ssize_t kernels):
    """scores (H, Q, K) -> pattern (H, Q, K) = softmax(scores * scale), 0 for hidden keys; `scores` becomes it too.

    The queries stand at `start` and after it, the keys from the first to the last that any of them sees. window: a
    query sees itself and so many keys before it less one; 0: all.
    """
    cdef Py_ssize_t H = scores.shape[0], Q = scores.shape[1], K = scores.shape[2], h, q, low, high, i
    cdef const kernel_set *chosen = check_set(kernels)
    if not 0 <= start <= MAX_COLUMNS or not 0 <= window <= MAX_COLUMNS:
        raise ValueError(f"causal_softmax: start {start}, window {window}")
    cdef Py_ssize_t first = max(<Py_ssize_t> 0, start - window + 1) if window else 0
    if (pattern.shape[0] != H or pattern.shape[1] != Q or pattern.shape[2] != K or H == 0 or Q == 0
            or K != start + Q - first):
        raise ValueError(f"causal_softmax: {H, Q, K} scores from query {start} on, keys from {first} on")
    check_aligned(<size_t> &scores[0, 0, 0], sizeof(double))
    check_aligned(<size_t> &pattern[0, 0, 0])
    with nogil:
        for h in range(H):
            for q in range(Q):
                high = start + q - first + 1
                low = max(<Py_ssize_t> 0, high - window) if window else 0
                chosen.softmax_row(&scores[h, q, low], high - low, scale, &pattern[h, q, low])
                for i in range(low):
                    scores[h, q, i] = pattern[h, q, i] = 0
                for i in range(high, K):
                    scores[h, q, i] = pattern[h, q, i] = 0


def softmax_backward(float[:, :, ::1] d_scores, const float[:, :, ::1] pattern, float scale, Py_ssize_t kernels):
    """d_scores = pattern (d_scores - sum over keys of d_scores pattern) scale, in place.   (H, Q, K)"""
    cdef Py_ssize_t H = d_scores.shape[0], Q = d_scores.shape[1], K = d_scores.shape[2], h, q
    cdef const kernel_set *chosen = check_set(kernels)
    if pattern.shape[0] != H or pattern.shape[1] != Q or pattern.shape[2] != K or H == 0 or Q == 0 or K == 0:
        raise ValueError(f"softmax_backward: d_scores {H, Q, K}, pattern {pattern.shape[0], pattern.shape[1], pattern.shape[2]}")
    check_aligned(<size_t> &d_scores[0, 0, 0] | <size_t> &pattern[0, 0, 0])
    with nogil:
        for h in range(H):
            for q in range(Q):
                chosen.softmax_backward(&d_scores[h, q, 0], &pattern[h, q, 0], K, scale)


def relu2_backward(const float[:, ::1] dy, const float[:, ::1] gate, const float[:, ::1] up, float[:, ::1] d_gate,
                   float[:, ::1] d_up, Py_ssize_t kernels):
    """The gradients of y = relu(gate)^2 up, all (M, F)"""
    cdef Py_ssize_t M = dy.shape[0], F = dy.shape[1]
    cdef const kernel_set *chosen = check_set(kernels)
    if (gate.shape[0] != M or gate.shape[1] != F or up.shape[0] != M or up.shape[1] != F or d_gate.shape[0] != M
            or d_gate.shape[1] != F or d_up.shape[0] != M or d_up.shape[1] != F or M == 0 or F == 0):
        raise ValueError(f"relu2_backward: dy {M, F}, gate {gate.shape[0], gate.shape[1]}")
    check_aligned(<size_t> &dy[0, 0] | <size_t> &gate[0, 0] | <size_t> &up[0, 0] | <size_t> &d_gate[0, 0] | <size_t> &d_up[0, 0])
    with nogil:
        chosen.relu2_backward(&dy[0, 0], &gate[0, 0], &up[0, 0], M * F, &d_gate[0, 0], &d_up[0, 0])


def ternarize(const float[:, ::1] w, float w_dequant_scale, uint8_t[:, ::1] packed, float[:, ::1] values,
              Py_ssize_t kernels):
    """w (N, K) -> packed (N, ceil(K/4)) by quantization.pack_ternary, and values (N, K) = w_t."""
    cdef Py_ssize_t N = w.shape[0], K = w.shape[1], row_bytes = packed.shape[1], n, j
    cdef const kernel_set *chosen = check_set(kernels)
    if packed.shape[0] != N or row_bytes != (K + 3) // 4 or values.shape[0] != N or values.shape[1] != K or N == 0 or K == 0:
        raise ValueError(f"ternarize: w {N, K}, packed {packed.shape[0], row_bytes}, values {values.shape[0], values.shape[1]}")
    check_aligned(<size_t> &w[0, 0] | <size_t> &values[0, 0])
    cdef uint8_t *codes = <uint8_t *> allocate(row_bytes, 4)
    if codes == NULL:
        raise MemoryError(f"no memory for {K} codes")
    with nogil:
        memset(codes, 1, 4 * row_bytes)  # the padding of a row is zero weights
        for n in range(N):
            chosen.ternarize(&w[n, 0], K, 1 / w_dequant_scale, codes, &values[n, 0])
            for j in range(row_bytes):
                packed[n, j] = codes[4 * j] | codes[4 * j + 1] << 2 | codes[4 * j + 2] << 4 | codes[4 * j + 3] << 6
    free(codes)


def rescale(const int8_t[:, ::1] x_q, const float[:, ::1] x_quant_scale, float[:, ::1] x, Py_ssize_t kernels):
    """x_q (M, K), x_quant_scale (M, 1) -> x (M, K) = x_q / x_quant_scale"""
    cdef Py_ssize_t M = x_q.shape[0], K = x_q.shape[1], m
    cdef const kernel_set *chosen = check_set(kernels)
    if (x_quant_scale.shape[0] != M or x_quant_scale.shape[1] != 1 or x.shape[0] != M or x.shape[1] != K or M == 0
            or K == 0):
        raise ValueError(f"rescale: x_q {M, K}, scales {x_quant_scale.shape[0], x_quant_scale.shape[1]}, x {x.shape[0], x.shape[1]}")
    check_aligned(<size_t> &x_quant_scale[0, 0] | <size_t> &x[0, 0])
    with nogil:
        for m in range(M):
            chosen.rescale(&x_q[m, 0], K, x_quant_scale[m, 0], &x[m, 0])


def sum_of_squares(const float[::1] x, Py_ssize_t kernels):
    """x (N) -> the sum of x^2 in double"""
    cdef Py_ssize_t N = x.shape[0]
    cdef const kernel_set *chosen = check_set(kernels)
    cdef double total
    if N == 0:
        return 0.0
    check_aligned(<size_t> &x[0])
    with nogil:
        total = chosen.sum_of_squares(&x[0], N)
    return total


def adamw(float[::1] w, const float[::1] g, float[::1] m, float[::1] v, double b1, double b2, double v_scale, double eps,
          double keep, double step_size, Py_ssize_t kernels):
    """One AdamW step of an array w (N) by its gradient g (N), in place; its means m and v too."""
    cdef Py_ssize_t N = w.shape[0]
    cdef const kernel_set *chosen = check_set(kernels)
    if g.shape[0] != N or m.shape[0] != N or v.shape[0] != N or N == 0:
        raise ValueError(f"adamw: w {N}, g {g.shape[0]}, m {m.shape[0]}, v {v.shape[0]}")
    check_aligned(<size_t> &w[0] | <size_t> &g[0] | <size_t> &m[0] | <size_t> &v[0])
    cdef adamw_rates rates
    rates.b1, rates.rest1, rates.b2, rates.rest2 = b1, 1 - b1, b2, 1 - b2
    rates.v_scale, rates.eps, rates.keep, rates.step_size = v_scale, eps, keep, step_size
    with nogil:
        chosen.adamw(&w[0], &g[0], &m[0], &v[0], N, &rates)


cdef bf16_operand bf16_operand_of(const float[:, :] x, bint by_rows):
    """by_rows: its rows are summed over. ValueError where its strides are not those of a matrix or its transpose."""
    cdef bf16_operand operand
    cdef Py_ssize_t rows = x.strides[0], columns = x.strides[1], size = sizeof(float)
    if rows <= 0 or columns <= 0 or rows % size or columns % size or (rows != size and columns != size):
        raise ValueError(f"bfloat16_product: strides {rows, columns} of a matrix {x.shape[0], x.shape[1]}")
    operand.data = &x[0, 0]
    operand.k_stride, operand.n_stride = (rows // size, columns // size) if by_rows else (columns // size, rows // size)
    return operand


cpdef bint has_bfloat16_product(Py_ssize_t kernels) except -1:
    """Whether `bfloat16_product` takes the processor's own, faster than BLAS in float32. AVX-512 alone does not imply it."""
    return check_set(kernels).name in (b"avx512", b"amx") and has_avx512_bf16()


def bfloat16_product(const float[:, :] a, const float[:, :] b, float[:, ::1] c, Py_ssize_t kernels):
    """c (M, N) = a (M, K) b (K, N), with a and b rounded to bfloat16. Either may be a transposed matrix."""
    cdef Py_ssize_t M = a.shape[0], K = a.shape[1], N = b.shape[1]
    cdef bint fast = has_bfloat16_product(kernels)
    if b.shape[0] != K or c.shape[0] != M or c.shape[1] != N or M == 0 or K == 0 or N == 0:
        raise ValueError(f"bfloat16_product: a {M, K}, b {b.shape[0], N}, c {c.shape[0], c.shape[1]}")
    check_aligned(<size_t> &a[0, 0] | <size_t> &b[0, 0] | <size_t> &c[0, 0])
    cdef bf16_operand rows = bf16_operand_of(a, False), columns = bf16_operand_of(b, True)
    cdef void *scratch = allocate(bf16_scratch(N), 1)
    if scratch == NULL:
        raise MemoryError(f"no memory for a panel of {N} columns")
    with nogil:
        if fast:
            bf16_product_avx512(rows, columns, M, K, N, &c[0, 0], scratch)
        else:
            bf16_product_plain(rows, columns, M, K, N, &c[0, 0], scratch)
    free(scratch)
