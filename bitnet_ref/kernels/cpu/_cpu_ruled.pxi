# Part of _cpu.pyx: matrices in blocks by ggml's rule (ruled_steps.h).

ruled_rows = RULED_ROWS


def ruled_forms():
    """[(bits, offset, inputs of a block, columns of a scale, term, bytes of a unit)], by number"""
    forms = []
    for i in range(N_RULED_FORMS):
        f = RULED_FORMS[i]
        forms.append((f.bits, f.offset, f.block, f.scaled, f.term, ruled_unit_bytes(&RULED_FORMS[i])))
    return forms


cdef class RuledPanels:
    """One matrix as the kernels take it."""
    cdef const uint8_t[:, ::1] panels
    cdef int form
    cdef Py_ssize_t n_out, n_in

    def __cinit__(self, const uint8_t[:, ::1] panels, int form, Py_ssize_t n_out, Py_ssize_t n_in):
        if not 0 <= form < N_RULED_FORMS or not 0 < n_out < MAX_ROWS or not 0 < n_in < MAX_COLUMNS:
            raise ValueError(f"RuledPanels: form {form} of a matrix {n_out, n_in}")
        cdef Py_ssize_t block = RULED_FORMS[form].block, count = (n_out + RULED_ROWS - 1) // RULED_ROWS
        cdef Py_ssize_t size = n_in // block * ruled_unit_bytes(&RULED_FORMS[form])
        if n_in % block or panels.shape[0] != count or panels.shape[1] != size:
            raise ValueError(f"RuledPanels: {panels.shape[0], panels.shape[1]} for form {form} of {n_out, n_in}")
        self.panels, self.form, self.n_out, self.n_in = panels, form, n_out, n_in


cdef enum:
    GATED_TOKENS = 64  # whose products with a panel of gate and one of up stay in L1


cdef struct ruled_call:
    const float *x
    const float *norm_weight  # NULL: x is not normed
    const float *residual  # added to the result of the only matrix, or NULL
    double eps
    const kernel_set *chosen
    int threads, block
    int gate  # RELU2 or SILU: ys[0] = act(x ws[0]^T) * (x ws[1]^T); else NO_GATE
    bint has_sums  # whether some matrix reads Q8_1's s
    bint apart  # matrix i is multiplied by token i alone, not by all
    Py_ssize_t M, K, count
    int forms[MAX_LINEARS]
    const uint8_t *panels[MAX_LINEARS]
    Py_ssize_t bytes[MAX_LINEARS]  # of a panel
    float *ys[MAX_LINEARS]
    Py_ssize_t n_out[MAX_LINEARS]
    Py_ssize_t first[MAX_LINEARS + 1]  # first panel of each matrix


cdef inline int round_ruled(const ruled_call *c, Py_ssize_t m, float *normed, uint8_t *token) noexcept nogil:
    """Norms and rounds token m.   -> 0, or 1 if it is bad"""
    cdef const float *x = c.x + m * c.K
    if c.norm_weight != NULL:
        if not c.chosen.rms_norm(x, c.norm_weight, c.K, c.eps, normed):
            return 1
        x = normed
    return c.chosen.ruled_token(x, c.K, c.block, token) or (c.has_sums and ruled_token_overflows(token, c.K))


cdef inline void multiply_ruled(const ruled_call *c, Py_ssize_t at, const uint8_t *tokens, size_t token_bytes) noexcept nogil:
    """Panel `at` of all matrices, or of both gate and up, times all tokens, or its own"""
    cdef Py_ssize_t i = 0, row, rows, M = 1 if c.apart else c.M, m, n, some
    cdef float both[2][64 * 16]  # GATED_TOKENS * RULED_ROWS
    cdef float *y
    while at >= c.first[i + 1]:
        i = i + 1
    at = at - c.first[i]
    row = at * RULED_ROWS
    rows = min(<Py_ssize_t> RULED_ROWS, c.n_out[i] - row)
    y = c.ys[i] + row
    if c.gate == NO_GATE:
        c.chosen.ruled_panel(c.forms[i], c.panels[i] + at * c.bytes[i], c.K, tokens + (<size_t> i * token_bytes if c.apart else 0),
                             token_bytes, M, rows, y, c.n_out[i])
        for m in range(M if c.residual != NULL else 0):
            add_arrays(c.residual + m * c.n_out[i] + row, y + m * c.n_out[i], rows, y + m * c.n_out[i])
        return
    memset(both, 0, sizeof(both) if rows < RULED_ROWS else 0)
    m = 0
    while m < M:
        some = min(<Py_ssize_t> GATED_TOKENS, M - m)
        for n in range(2):
            c.chosen.ruled_panel(c.forms[n], c.panels[n] + at * c.bytes[n], c.K, tokens + m * token_bytes, token_bytes,
                                 some, rows, both[n], RULED_ROWS)
        c.chosen.gated(both[0], both[1], some * RULED_ROWS, c.gate == SILU, both[0])
        for n in range(some):
            memcpy(y + (m + n) * c.n_out[0], both[0] + n * RULED_ROWS, rows * sizeof(float))
        m += some


cdef Py_ssize_t run_ruled(const void *call) noexcept nogil:
    cdef const ruled_call *c = <const ruled_call *> call
    cdef size_t token_bytes = ruled_token_bytes(c.block, c.K)
    cdef size_t row_bytes = thread_bytes(c.K * sizeof(float) if c.norm_weight != NULL else 0)
    cdef Py_ssize_t m, item, work = 0, bad = OK
    for item in range(c.count):
        work = work + (c.first[item + 1] - c.first[item]) * c.bytes[item] * (1 if c.apart else c.M)
    cdef int team = threads_for(work, PANEL_BYTES_PER_THREAD, c.threads)
    cdef uint8_t *tokens = <uint8_t *> allocate(c.M, token_bytes)
    cdef uint8_t *is_bad = <uint8_t *> allocate(c.M, 1)
    cdef char *normed = <char *> allocate(team, row_bytes)
    if tokens == NULL or is_bad == NULL or normed == NULL:
        bad = NO_MEMORY
    else:
        with parallel(num_threads=team):  # a bad token is multiplied too, as zeros, and then reported
            for m in prange(c.M, schedule="static"):
                is_bad[m] = round_ruled(c, m, <float *> (normed + threadid() * row_bytes), tokens + m * token_bytes)
                if is_bad[m]:
                    memset(tokens + m * token_bytes, 0, token_bytes)
            for item in prange(c.first[c.count if c.gate == NO_GATE else 1], schedule="static"):
                multiply_ruled(c, item, tokens, token_bytes)
        for m in range(c.M):
            if is_bad[m] and bad == OK:
                bad = m
    free(tokens)
    free(is_bad)
    free(normed)
    return bad


def ruled_linears(const float[:, ::1] x, list ws, ys, int threads, Py_ssize_t kernels, Tape tape=None, *,
                  const float[::1] norm_weight=None, double eps=0, int gate=NO_GATE, const float[:, ::1] residual=None):
    """Several matrices of one x (M, K) whose blocks of inputs are equally wide: ys[i] (M, N_i) = x ws[i]^T.

    norm_weight, eps, gate, residual: as of `bit_linears`.

    Returns -1, or the first row that holds NaN, Inf, or a number that is too large.
    """
    cdef Py_ssize_t M = x.shape[0], K = x.shape[1], count = len(ws), i
    cdef ruled_call c
    cdef RuledPanels w
    cdef float[:, ::1] y
    c.M, c.K, c.threads, c.count, c.first[0], c.has_sums, c.apart = M, K, threads, count, 0, False, False
    c.x, c.norm_weight, c.residual, c.eps, c.gate = NULL, NULL, NULL, eps, gate
    c.chosen = check_set(kernels, threads)
    for weight in ws:
        if not isinstance(weight, RuledPanels):
            raise TypeError(f"ruled_linears: expected RuledPanels, got {type(weight).__name__}")
    gates = check_fused("ruled_linears", M, K, [(<RuledPanels> w).n_out for w in ws], ys, gate, norm_weight, residual)
    if M == 0 or count == 0:
        return OK
    cdef RuledPanels one = ws[0]
    c.block = RULED_FORMS[one.form].block
    for i in range(count):
        w, y = ws[i], ys[0 if gates else i]
        if (y is None or w.n_in != K or RULED_FORMS[w.form].block != c.block or y.shape[0] != M
                or y.shape[1] != w.n_out):
            raise ValueError(f"ruled_linears: x {M, K}, weight {w.n_out, w.n_in} in form {w.form}")
        c.forms[i], c.panels[i], c.bytes[i], c.n_out[i] = w.form, &w.panels[0, 0], w.panels.shape[1], w.n_out
        c.first[i + 1] = c.first[i] + w.panels.shape[0]
        c.has_sums = c.has_sums or RULED_FORMS[w.form].term == 1
        c.ys[i] = &y[0, 0]
        check_aligned(<size_t> c.ys[i])
    c.x = &x[0, 0]
    if norm_weight is not None:
        c.norm_weight = &norm_weight[0]
    if residual is not None:
        c.residual = &residual[0, 0]
    check_aligned(<size_t> c.x | <size_t> c.norm_weight | <size_t> c.residual)
    if tape is None:
        return make_call(run_ruled, &c, "{} tokens of {} activations", M, K)
    tape.record(run_ruled, &c, sizeof(c), (<size_t> c.x, <size_t> (c.residual or c.x)), (tuple(ws), norm_weight), c.ys, count)
    return OK
