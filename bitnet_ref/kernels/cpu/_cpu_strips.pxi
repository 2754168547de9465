# Part of _cpu.pyx: BitLinears that leave out what meets a zero (strips.h): one token does not read it, and several
# tokens do not multiply by it.


cdef enum:
    MAX_STRIP = 1 << 17  # columns, and rows: the sums of strips.h fit int32
    # Beyond these shares of active rows and columns, in percent, the panels are read whole: in order memory is faster.
    MAX_ACTIVE_ROWS = 45
    MAX_ACTIVE_COLUMNS = 60
    # The same for several tokens (of rows: `max_near_rows` of the kernel set). All strips are brought into L2 for them,
    # for which few tokens wait.
    MIN_NEAR_TOKENS = 8
    MAX_NEAR_COLUMNS = 40
    FEW_NEAR_TOKENS = 15  # or fewer
    MAX_FEW_NEAR_ROWS = 45
    MAX_FEW_NEAR_COLUMNS = 12
    NEAR_TOKENS = 64  # whose sums are in L2
    NEAR_COLUMNS = 256  # whose strips are too


cdef struct strip_counts:
    int64_t tokens, needed, read, total  # rows or columns: those that met no zero, those that were read, all


cdef class StripCounts:
    """What the tokens of one matrix with strips have needed of it: of calls with one token, and with several. For
    `profile`."""
    cdef strip_counts one, several

    def __cinit__(self):
        memset(&self.one, 0, sizeof(self.one))
        memset(&self.several, 0, sizeof(self.several))

    def read(self, bint several=False):
        """(tokens, rows or columns that met no zero, those that were read or multiplied, all), summed over tokens"""
        cdef strip_counts *values = &self.several if several else &self.one
        return values.tokens, values.needed, values.read, values.total


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
    Py_ssize_t number  # in the call


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


cdef inline void finish_columns(const linears_call *c, const one_token *t, Py_ssize_t first, Py_ssize_t last,
                                int32_t *acc) noexcept nogil:
    """Outputs of strips' vectors `first` to `last` of the only matrix, from their sums."""
    cdef Py_ssize_t N = c.n_out[0], start = first * STRIP_K, rows = min(last * STRIP_K, N) - start, i
    cdef Py_ssize_t at = t.number * N + start
    cdef float *out = c.ys[0] + at
    for i in range(rows):
        acc[i] -= t.x_sum
    c.chosen.dequantize(acc, rows, c.scales[0], t.x_quant_scale, c.biases[0] + start if c.biases[0] != NULL else NULL, out)
    if c.residual != NULL:
        add_arrays(c.residual + at, out, rows, out)


cdef inline Py_ssize_t list_columns(const int8_t *x_q, Py_ssize_t K, int32_t *ids, int8_t *values) noexcept nogil:
    """The columns that meet no zero, and their int8.   -> how many"""
    cdef Py_ssize_t count = 0, k
    for k in range(K):
        ids[count], values[count] = <int32_t> k, x_q[k]
        count += x_q[k] != 0
    return count


cdef void one_token_columns(const linears_call *c, const one_token *t, const int32_t *ids, const int8_t *values,
                            Py_ssize_t count, Py_ssize_t first, Py_ssize_t last, int32_t *acc) noexcept nogil:
    """Outputs of strips' vectors `first` to `last`, from the columns `ids` alone."""
    c.chosen.strip_columns(c.strips + first * STRIP_BYTES, strip_vectors(c.n_out[0]), last - first, ids, values, count, acc)
    finish_columns(c, t, first, last, acc)


cdef inline int32_t count_columns(const int8_t *x_q, Py_ssize_t K) noexcept nogil:
    """How many columns meet no zero."""
    cdef int32_t count = 0
    cdef Py_ssize_t k
    for k in range(K):
        count += x_q[k] != 0
    return count


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
    t.x, t.n_blocks, t.number = x_q, n_blocks, 0
    c.one.tokens += 1
    if by_columns:
        count = list_columns(x_q, K, ids, values)
        c.one.total += K
        c.one.needed += count
        c.one.read += count
        if count * 100 > MAX_ACTIVE_COLUMNS * K:
            c.one.read += K - count
            n_panels = c.first[1]
            with parallel(num_threads=team):
                for part in prange(n_panels, schedule="static"):
                    whole_panel(c, &t, part, scratch + threadid() * part_bytes)
        else:
            with parallel(num_threads=team):
                for part in prange(parts, schedule="static"):
                    one_token_columns(c, &t, ids, values, count, n_panels * part // parts, n_panels * (part + 1) // parts,
                                      <int32_t *> (scratch + part * part_bytes))
    else:
        for part in prange(parts, num_threads=team, schedule="static"):
            mine = scratch + part * part_bytes
            of_part = gated_rows(c, &t, n_panels * part // parts, n_panels * (part + 1) // parts,
                                <float *> (mine + SCRATCH_BYTES) + 3 * (part_rows + PANEL_ROWS), mine)
            needed += of_part if of_part > 0 else -of_part
            read += of_part if of_part >= 0 else (n_panels * (part + 1) // parts - n_panels * part // parts) * PANEL_ROWS
        c.one.total += c.n_out[0]
        c.one.needed += needed
        c.one.read += min(read, c.n_out[0])
    free(memory)
    return OK


cdef inline void whole_panel(const linears_call *c, const one_token *t, Py_ssize_t p, char *scratch) noexcept nogil:
    """One panel of the only matrix."""
    cdef Py_ssize_t rows = min(<Py_ssize_t> PANEL_ROWS, c.n_out[0] - p * PANEL_ROWS)
    cdef float *out = c.ys[0] + p * PANEL_ROWS
    multiply_one(c, t, 0, p, rows, <int32_t *> (scratch + SCRATCH_BYTES), out, scratch)
    if c.residual != NULL:
        add_arrays(c.residual + p * PANEL_ROWS, out, rows, out)


cdef Py_ssize_t up_by_strips(const linears_call *c, Py_ssize_t p, Py_ssize_t block, Py_ssize_t tokens,
                             const int32_t *x_sum, const float *x_quant_scale, const int8_t *x, Py_ssize_t x_stride,
                             const int32_t *gate_acc) noexcept nogil:
    """relu2(gate) * up of a panel for `tokens` tokens from `block` on, whose sums of gate are there: of up only the rows
    of each token whose gate is above zero.

    Returns how many these are for all tokens together, or NOT_COMPUTED if they are too many.
    """
    cdef Py_ssize_t rows = min(<Py_ssize_t> PANEL_ROWS, c.n_out[0] - p * PANEL_ROWS), first = p * PANEL_ROWS
    cdef Py_ssize_t n_vectors = strip_vectors(c.K), active = 0, count, m, i
    cdef Py_ssize_t lines = max(<Py_ssize_t> 0, min(<Py_ssize_t> PANEL_ROWS, c.n_out[0] - first - PANEL_ROWS)) * n_vectors
    cdef const uint8_t *next_strips = c.strips + (first + PANEL_ROWS) * n_vectors * STRIP_BYTES
    cdef int32_t ids[64]  # PANEL_ROWS
    cdef int32_t acc[64]
    cdef float gate[64]
    cdef float up[64]
    cdef float *out
    cdef const int32_t *sums
    for m in range(tokens):
        count = 0
        for i in range(rows):
            count += gate_acc[m * PANEL_ROWS + i] > 0
        active += count
        # A product that overflows would be NaN beside a gate of zero.
        if not c.scales[1] / x_quant_scale[block + m] * 256.0 * c.K < 1e38:
            return NOT_COMPUTED
    if active * 100 > (c.chosen.max_near_rows if tokens > FEW_NEAR_TOKENS else MAX_FEW_NEAR_ROWS) * rows * tokens:
        return NOT_COMPUTED
    for m in range(tokens):
        out, count, sums = c.ys[0] + (block + m) * c.n_out[0] + first, 0, gate_acc + m * PANEL_ROWS
        for i in range(rows):
            ids[count] = <int32_t> i
            count += sums[i] > 0
        for i in range(count):
            acc[i], ids[i] = sums[ids[i]], ids[i] + <int32_t> first
        c.chosen.dequantize(acc, count, c.scales[0], x_quant_scale[block + m], NULL, gate)
        c.chosen.strip_rows_near(c.strips, n_vectors, x + (block + m) * x_stride, x_sum[block + m], ids, count, acc)
        c.chosen.dequantize(acc, count, c.scales[1], x_quant_scale[block + m], NULL, up)
        c.chosen.gated(gate, up, count, 0, up)
        memset(out, 0, rows * sizeof(float))
        for i in range(count):
            out[ids[i] - first] = up[i]
        # A share of the next panel's strips. There may be fewer than in this one, or none.
        fetch_strips(next_strips + lines * m // tokens * STRIP_BYTES, 1, lines * (m + 1) // tokens - lines * m // tokens,
                     STRIP_BYTES)
    return active


cdef struct near_call:
    const linears_call *c
    const int32_t *x_sum
    const float *x_quant_scale
    Py_ssize_t block, tokens  # the first of the present tokens, and how many
    int32_t *ids  # (tokens, K) the columns that meet no zero, ascending
    int8_t *values  # (tokens, K) their int8
    Py_ssize_t *counts  # (tokens,)


cdef Py_ssize_t columns_of_tokens(const linears_call *c, const int8_t *x_q, Py_ssize_t wide, const int32_t *x_sum,
                                  const float *x_quant_scale, int team) noexcept nogil:
    """The product of several tokens with the only matrix, each token by the columns that it needs.

    Returns OK, NO_MEMORY, or NOT_COMPUTED if the tokens need too many columns.
    """
    cdef Py_ssize_t M = c.M, K = c.K, n_vectors = strip_vectors(c.n_out[0]), needed = 0, m, part, bad = OK
    # Of the outputs, and where threads are more than vectors of outputs also of the tokens
    cdef Py_ssize_t parts = min(<Py_ssize_t> team, n_vectors), shares = 1 if team <= n_vectors else 4 * team // n_vectors
    for m in prange(M, num_threads=team, schedule="static"):
        needed += count_columns(x_q + m * wide, K)
    c.several.needed += needed
    c.several.tokens += M
    c.several.total += M * K
    if needed * 100 > (MAX_NEAR_COLUMNS if M > FEW_NEAR_TOKENS else MAX_FEW_NEAR_COLUMNS) * M * K:
        c.several.read += M * K
        return NOT_COMPUTED
    c.several.read += needed
    cdef near_call n
    cdef Py_ssize_t most = min(M, <Py_ssize_t> NEAR_TOKENS)
    cdef size_t acc_bytes = most * ((n_vectors + parts - 1) // parts) * STRIP_K * sizeof(int32_t)
    cdef size_t part_bytes = acc_bytes + thread_bytes(most * sizeof(Py_ssize_t))
    n.c, n.x_sum, n.x_quant_scale = c, x_sum, x_quant_scale
    n.ids = <int32_t *> allocate(most * K, sizeof(int32_t))
    n.values = <int8_t *> allocate(most * K, 1)
    n.counts = <Py_ssize_t *> allocate(most, sizeof(Py_ssize_t))
    cdef char *scratch = <char *> allocate(parts * shares, part_bytes)
    if n.ids == NULL or n.values == NULL or n.counts == NULL or scratch == NULL:
        bad = NO_MEMORY
    n.block = 0
    while bad == OK and n.block < M:
        n.tokens = min(most, M - n.block)
        with parallel(num_threads=team):
            for m in prange(n.tokens, schedule="static"):
                n.counts[m] = list_columns(x_q + (n.block + m) * wide, K, n.ids + m * K, n.values + m * K)
            for part in prange(parts * shares, schedule="static"):
                near_columns(&n, n_vectors * (part // shares) // parts, n_vectors * (part // shares + 1) // parts,
                             n.tokens * (part % shares) // shares, n.tokens * (part % shares + 1) // shares,
                             <int32_t *> (scratch + part * part_bytes),
                             <Py_ssize_t *> (scratch + part * part_bytes + acc_bytes))
        n.block += n.tokens
    free(n.ids)
    free(n.values)
    free(n.counts)
    free(scratch)
    return bad


cdef void near_columns(const near_call *n, Py_ssize_t first, Py_ssize_t last, Py_ssize_t from_token, Py_ssize_t to_token,
                       int32_t *acc, Py_ssize_t *done) noexcept nogil:
    """Outputs of strips' vectors `first` to `last` for some of the present tokens. Some columns at a time, whose strips
    stay in L2 for all tokens.

    acc, done: room for the tokens' sums, and for how many of their columns have been added.
    """
    cdef const linears_call *c = n.c
    cdef Py_ssize_t K = c.K, n_vectors = strip_vectors(c.n_out[0]), width = (last - first) * STRIP_K
    cdef Py_ssize_t tokens = to_token - from_token, start = 0, end, m, i, j, count
    cdef const uint8_t *strips = c.strips + first * STRIP_BYTES
    cdef const int32_t *ids
    cdef one_token t
    memset(acc, 0, tokens * width * sizeof(int32_t))
    memset(done, 0, tokens * sizeof(Py_ssize_t))
    while start < K:
        end = min(K, start + <Py_ssize_t> NEAR_COLUMNS)
        for m in range(tokens):
            i, count, ids = done[m], n.counts[from_token + m], n.ids + (from_token + m) * K
            j = i
            while j < count and ids[j] < end:
                j += 1
            done[m] = j
            c.chosen.strip_columns_near(strips, n_vectors, last - first, ids + i, n.values + (from_token + m) * K + i, j - i,
                                        acc + m * width)
            i = min(K, end + (end - start) * m // tokens)  # a share of the next columns
            j = min(K, end + (end - start) * (m + 1) // tokens)
            fetch_strips(strips + i * n_vectors * STRIP_BYTES, last - first, j - i, n_vectors * STRIP_BYTES)
        start = end
    for m in range(tokens):
        t.number = n.block + from_token + m
        t.x_sum, t.x_quant_scale = n.x_sum[t.number], n.x_quant_scale[t.number]
        c.chosen.strip_order(acc + m * width, last - first)
        finish_columns(c, &t, first, last, acc + m * width)
