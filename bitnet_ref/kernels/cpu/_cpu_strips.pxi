# Part of _cpu.pyx: BitLinears of one token that do not read what meets a zero (strips.h).


cdef enum:
    MAX_STRIP = 1 << 17  # columns, and rows: the sums of strips.h fit int32
    # Beyond these shares of active rows and columns the panels are read whole: in order memory is faster.
    MAX_ACTIVE_ROWS = 45  # percent
    MAX_ACTIVE_COLUMNS = 60


cdef struct strip_counts:
    int64_t calls, needed, read, total  # rows or columns: those that met no zero, those that were read, all


cdef class StripCounts:
    """What the calls of one matrix with strips have needed of it. For `profile`."""
    cdef strip_counts values

    def __cinit__(self):
        memset(&self.values, 0, sizeof(self.values))

    def read(self):
        """(calls, rows or columns that met no zero, those that were read, all)"""
        return self.values.calls, self.values.needed, self.values.read, self.values.total


cdef inline Py_ssize_t strip_vectors(Py_ssize_t length) noexcept nogil:
    return (length + STRIP_K - 1) // <Py_ssize_t> STRIP_K


def has_strips(Py_ssize_t kernels):
    """Whether the kernel set can multiply by strips."""
    return check_set(kernels).strip_rows != NULL


def pack_strips(const uint8_t[:, ::1] packed, uint8_t[:, ::1] strips, bint by_columns, int threads):
    """packed (N, ceil(K/4)) -> strips of its rows (N, 64 ceil(K/256)), or of its columns (K, 64 ceil(N/256))"""
    cdef Py_ssize_t N = packed.shape[0], row_bytes = packed.shape[1], K = strips.shape[0] if by_columns else 4 * row_bytes
    cdef Py_ssize_t n_vectors = strips.shape[1] // <Py_ssize_t> STRIP_BYTES, count = strips.shape[0], part, parts = 64
    cdef Py_ssize_t first, last
    check_set(0, threads)
    if (N == 0 or row_bytes == 0 or (K + 3) // 4 != row_bytes or strips.shape[1] != n_vectors * STRIP_BYTES
            or n_vectors != strip_vectors(N if by_columns else K) or (count != N and not by_columns)):
        raise ValueError(f"pack_strips: packed {N, row_bytes}, strips {strips.shape[0], strips.shape[1]}")
    cdef int team = threads_for(N * row_bytes, PANEL_BYTES_PER_THREAD, threads)
    for part in prange(parts, nogil=True, num_threads=team, schedule="static"):
        if by_columns:
            first, last = row_bytes * part // parts, row_bytes * (part + 1) // parts
            if last > first:
                pack_column_strips(&packed[0, 0], N, row_bytes, first, min(4 * last, K) - 4 * first, n_vectors,
                                   &strips[4 * first, 0])
        else:
            first, last = N * part // parts, N * (part + 1) // parts
            if last > first:
                pack_row_strips(&packed[first, 0], last - first, row_bytes, n_vectors, &strips[first, 0])


cdef struct one_token:
    const int8_t *x  # (wide) zeros beyond K
    int32_t x_sum
    float x_quant_scale
    Py_ssize_t n_blocks  # of the panels


cdef Py_ssize_t gated_rows(const linears_call *c, const one_token *t, Py_ssize_t first, Py_ssize_t last,
                           float *gate, char *scratch) noexcept nogil:
    """relu2(gate) * up for panels `first` to `last`: all rows of gate, then the rows of up whose gate is not zero.

    gate: room for a float of each row.  scratch: SCRATCH_BYTES, then room for three numbers of each row.
    Returns the number of rows with a gate, negative if all of up was read.
    """
    cdef Py_ssize_t start = first * PANEL_ROWS, rows = min(last * PANEL_ROWS, c.n_out[0]) - start, count = 0, i, p, n
    cdef int32_t *ids = <int32_t *> (scratch + SCRATCH_BYTES)
    cdef int32_t *acc = ids + rows
    cdef float *up = <float *> (acc + max(rows, <Py_ssize_t> PANEL_ROWS))
    cdef float *out = c.ys[0] + start
    for p in range(first, last):
        n = p * PANEL_ROWS - start
        multiply_one(c, t, 0, p, min(<Py_ssize_t> PANEL_ROWS, rows - n), acc, gate + n, scratch)
    for i in range(rows):
        ids[count] = <int32_t> (start + i)
        count += not gate[i] <= 0
    # A product that overflows would be NaN beside a gate of zero.
    if (count * 100 > MAX_ACTIVE_ROWS * rows or c.biases[1] != NULL
            or not c.scales[1] / t.x_quant_scale * 256.0 * c.K < 1e38):
        for p in range(first, last):
            n = p * PANEL_ROWS - start
            i = min(<Py_ssize_t> PANEL_ROWS, rows - n)
            multiply_one(c, t, 1, p, i, acc, up, scratch)
            c.chosen.gated(gate + n, up, i, 0, out + n)
        return -count
    c.chosen.strip_rows(c.strips, strip_vectors(c.K), t.x, t.x_sum, ids, count, acc)
    c.chosen.dequantize(acc, count, c.scales[1], t.x_quant_scale, NULL, up)
    memset(out, 0, rows * sizeof(float))
    for i in range(count):
        gate[i] = gate[ids[i] - start]  # ids ascend: i is not above its row
    c.chosen.gated(gate, up, count, 0, up)
    for i in range(count):
        out[ids[i] - start] = up[i]
    return count


cdef inline void multiply_one(const linears_call *c, const one_token *t, int which, Py_ssize_t p, Py_ssize_t rows,
                              int32_t *acc, float *y, void *scratch) noexcept nogil:
    """y = a panel of matrix `which` times the token, dequantised"""
    c.ternary.run(c.panels[which] + p * t.n_blocks * BLOCK_BYTES, t.n_blocks, t.x, 0, 1, &t.x_sum, acc, PANEL_ROWS, rows,
                  scratch)
    c.chosen.dequantize(acc, rows, c.scales[which], t.x_quant_scale,
                        c.biases[which] + p * PANEL_ROWS if c.biases[which] != NULL else NULL, y)


cdef void summed_columns(const linears_call *c, const one_token *t, const int32_t *ids, const int8_t *values,
                         Py_ssize_t count, Py_ssize_t first, Py_ssize_t last, int32_t *acc) noexcept nogil:
    """Outputs of strips' vectors `first` to `last` of the only matrix, from the columns `ids` alone."""
    cdef Py_ssize_t start = first * STRIP_K, rows = min(last * STRIP_K, c.n_out[0]) - start, i
    cdef float *out = c.ys[0] + start
    c.chosen.strip_columns(c.strips + first * STRIP_BYTES, strip_vectors(c.n_out[0]), last - first, ids, values, count, acc)
    for i in range(rows):
        acc[i] -= t.x_sum
    c.chosen.dequantize(acc, rows, c.scales[0], t.x_quant_scale, c.biases[0] + start if c.biases[0] != NULL else NULL, out)
    if c.residual != NULL:
        add_arrays(c.residual + start, out, rows, out)


cdef Py_ssize_t run_strips(const linears_call *c) noexcept nogil:
    """`run_linears` of one token."""
    cdef const ternary_method *form = &METHODS[c.method]
    cdef Py_ssize_t K = c.K, n_blocks = (K + form.block_k - 1) // <Py_ssize_t> form.block_k
    cdef Py_ssize_t wide = max(n_blocks * <Py_ssize_t> form.block_k, strip_vectors(K) * STRIP_K), parts, part, rows, count = 0
    cdef Py_ssize_t n_panels = c.first[1], needed = 0, read = 0, of_part, i
    cdef int team = threads_for(c.n_bytes, PANEL_BYTES_PER_THREAD, c.threads)
    cdef one_token t
    cdef bint by_columns = c.gate == NO_GATE
    if by_columns:
        n_panels = strip_vectors(c.n_out[0])
        rows = n_panels * STRIP_K
    else:
        rows = n_panels * PANEL_ROWS
    parts = min(<Py_ssize_t> team, n_panels)
    # A normed row; the quantised one; its numbers that are not zero; then a part of each thread.
    cdef size_t float_bytes = thread_bytes(K * sizeof(float)), part_rows = (n_panels + parts - 1) // parts * (rows // n_panels)
    cdef size_t part_bytes = thread_bytes(SCRATCH_BYTES + 4 * (part_rows + PANEL_ROWS) * sizeof(float))
    cdef char *memory = <char *> allocate(1, float_bytes + 2 * thread_bytes(wide) + float_bytes + team * part_bytes)
    if memory == NULL:
        return NO_MEMORY
    cdef const float *row = c.x
    cdef int8_t *x_q = <int8_t *> (memory + float_bytes)
    cdef int8_t *values = x_q + thread_bytes(wide)
    cdef int32_t *ids = <int32_t *> (values + thread_bytes(wide))
    cdef char *scratch = <char *> ids + float_bytes
    cdef char *mine = NULL
    if c.norm_weight != NULL:
        row = <float *> memory if c.chosen.rms_norm(row, c.norm_weight, K, c.eps, <float *> memory) else NULL
    if row == NULL or not c.chosen.quantize(row, K, x_q, &t.x_quant_scale, &t.x_sum):
        free(memory)
        return 0
    memset(x_q + K, 0, wide - K)
    t.x, t.n_blocks = x_q, n_blocks
    c.counts.calls += 1
    if by_columns:
        for i in range(K):
            ids[count], values[count] = <int32_t> i, x_q[i]
            count += x_q[i] != 0
        c.counts.total += K
        c.counts.needed += count
        c.counts.read += count
        if count * 100 > MAX_ACTIVE_COLUMNS * K:
            c.counts.read += K - count
            n_panels = c.first[1]
            with parallel(num_threads=team):
                for part in prange(n_panels, schedule="static"):
                    whole_panel(c, &t, part, scratch + threadid() * part_bytes)
        else:
            with parallel(num_threads=team):
                for part in prange(parts, schedule="static"):
                    summed_columns(c, &t, ids, values, count, n_panels * part // parts, n_panels * (part + 1) // parts,
                                   <int32_t *> (scratch + part * part_bytes))
    else:
        for part in prange(parts, num_threads=team, schedule="static"):
            mine = scratch + part * part_bytes
            of_part = gated_rows(c, &t, n_panels * part // parts, n_panels * (part + 1) // parts,
                                <float *> (mine + SCRATCH_BYTES) + 3 * (part_rows + PANEL_ROWS), mine)
            needed += of_part if of_part > 0 else -of_part
            read += of_part if of_part >= 0 else (n_panels * (part + 1) // parts - n_panels * part // parts) * PANEL_ROWS
        c.counts.total += c.n_out[0]
        c.counts.needed += needed
        c.counts.read += min(read, c.n_out[0])
    free(memory)
    return OK


cdef inline void whole_panel(const linears_call *c, const one_token *t, Py_ssize_t p, char *scratch) noexcept nogil:
    """One panel of the only matrix."""
    cdef Py_ssize_t rows = min(<Py_ssize_t> PANEL_ROWS, c.n_out[0] - p * PANEL_ROWS)
    cdef float *out = c.ys[0] + p * PANEL_ROWS
    multiply_one(c, t, 0, p, rows, <int32_t *> (scratch + SCRATCH_BYTES), out, scratch)
    if c.residual != NULL:
        add_arrays(c.residual + p * PANEL_ROWS, out, rows, out)
