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


cdef struct ruled_call:
    const float *x
    const kernel_set *chosen
    int threads, block
    bint has_sums  # whether some matrix reads Q8_1's s
    bint apart  # matrix i is multiplied by token i alone, not by all
    Py_ssize_t M, K, count
    int forms[MAX_LINEARS]
    const uint8_t *panels[MAX_LINEARS]
    Py_ssize_t bytes[MAX_LINEARS]  # of a panel
    float *ys[MAX_LINEARS]
    Py_ssize_t n_out[MAX_LINEARS]
    Py_ssize_t first[MAX_LINEARS + 1]  # first panel of each matrix


cdef inline void multiply_ruled(const ruled_call *c, Py_ssize_t at, const uint8_t *tokens, size_t token_bytes) noexcept nogil:
    """Panel `at` of all matrices times all tokens, or its own"""
    cdef Py_ssize_t i = 0, row
    while at >= c.first[i + 1]:
        i = i + 1
    row = (at - c.first[i]) * RULED_ROWS
    c.chosen.ruled_panel(c.forms[i], c.panels[i] + (at - c.first[i]) * c.bytes[i], c.K, tokens + (<size_t> i * token_bytes if c.apart else 0),
                         token_bytes, 1 if c.apart else c.M,
                         min(<Py_ssize_t> RULED_ROWS, c.n_out[i] - row), c.ys[i] + row, c.n_out[i])


cdef Py_ssize_t run_ruled(const void *call) noexcept nogil:
    cdef const ruled_call *c = <const ruled_call *> call
    cdef size_t token_bytes = ruled_token_bytes(c.block, c.K)
    cdef Py_ssize_t m, item, work = 0, bad = OK
    for item in range(c.count):
        work = work + (c.first[item + 1] - c.first[item]) * c.bytes[item] * (1 if c.apart else c.M)
    cdef int team = threads_for(work, PANEL_BYTES_PER_THREAD, c.threads)
    cdef uint8_t *tokens = <uint8_t *> allocate(c.M, token_bytes)
    cdef uint8_t *is_bad = <uint8_t *> allocate(c.M, 1)
    if tokens == NULL or is_bad == NULL:
        bad = NO_MEMORY
    else:
        with parallel(num_threads=team):  # a bad token is multiplied too, as zeros, and then reported
            for m in prange(c.M, schedule="static"):
                is_bad[m] = c.chosen.ruled_token(c.x + m * c.K, c.K, c.block, tokens + m * token_bytes)
                if c.has_sums and not is_bad[m]:
                    is_bad[m] = ruled_token_overflows(tokens + m * token_bytes, c.K)
                if is_bad[m]:
                    memset(tokens + m * token_bytes, 0, token_bytes)
            for item in prange(c.first[c.count], schedule="static"):
                multiply_ruled(c, item, tokens, token_bytes)
        for m in range(c.M):
            if is_bad[m] and bad == OK:
                bad = m
    free(tokens)
    free(is_bad)
    return bad


def ruled_linears(const float[:, ::1] x, list ws, ys, int threads, Py_ssize_t kernels, Tape tape=None):
    """Several matrices of one x (M, K) whose blocks of inputs are equally wide: ys[i] (M, N_i) = x ws[i]^T.

    Returns -1, or the first row that holds NaN, Inf, or a number that is too large.
    """
    cdef Py_ssize_t M = x.shape[0], K = x.shape[1], count = len(ws), i, bad
    cdef ruled_call c
    cdef RuledPanels w
    cdef float[:, ::1] y
    c.M, c.K, c.threads, c.count, c.first[0], c.has_sums, c.apart = M, K, threads, count, 0, False, False
    c.chosen = check_set(kernels, threads)
    for weight in ws:
        if not isinstance(weight, RuledPanels):
            raise TypeError(f"ruled_linears: expected RuledPanels, got {type(weight).__name__}")
    if count > MAX_LINEARS or len(ys) != count:
        raise ValueError(f"ruled_linears: {count} weights, {len(ys)} results")
    if M == 0 or count == 0:
        return OK
    cdef RuledPanels one = ws[0]
    c.block = RULED_FORMS[one.form].block
    for i in range(count):
        w, y = ws[i], ys[i]
        if (y is None or w.n_in != K or RULED_FORMS[w.form].block != c.block or y.shape[0] != M
                or y.shape[1] != w.n_out):
            raise ValueError(f"ruled_linears: x {M, K}, weight {w.n_out, w.n_in} in form {w.form}")
        c.forms[i], c.panels[i], c.bytes[i], c.n_out[i] = w.form, &w.panels[0, 0], w.panels.shape[1], w.n_out
        c.first[i + 1] = c.first[i] + w.panels.shape[0]
        c.has_sums = c.has_sums or RULED_FORMS[w.form].term == 1
        c.ys[i] = &y[0, 0]
        check_aligned(<size_t> c.ys[i])
    c.x = &x[0, 0]
    check_aligned(<size_t> c.x)
    bad = make_call(run_ruled, &c, "{} tokens of {} activations", M, K)
    if tape is not None:
        tape.record(run_ruled, &c, sizeof(c), (<size_t> c.x,), tuple(ws), c.ys, count)
    return bad
