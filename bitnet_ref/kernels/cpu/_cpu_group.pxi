# Part of _cpu.pyx: ternary by groups with float activations (group.h).


def group_layout(Py_ssize_t kernels):
    """The number of the layout that a kernel set reads: 0 planes, 1 tables."""
    return check_set(kernels).group_layout


cdef int check_group(Py_ssize_t K, Py_ssize_t group, int layout) except -1:
    if not 0 < K < MAX_COLUMNS or not 0 < group < MAX_COLUMNS or not 0 <= layout < N_GROUP_LAYOUTS:
        raise ValueError(f"groups of {group} of {K} columns in layout {layout}")
    return 0


def group_sizes(Py_ssize_t N, Py_ssize_t K, Py_ssize_t group, int layout):
    """(panels, bytes of a panel, chunks, chunks per group, rows of a panel) of a matrix (N, K)"""
    check_group(K, group, layout)
    if not 0 < N < MAX_ROWS:
        raise ValueError(f"a matrix of {N} rows by groups")
    cdef group_shape shape = make_group_shape(N, K, group, layout)
    panels = (N + shape.rows - 1) // shape.rows
    return panels, shape.n_chunks * shape.code_bytes, shape.n_chunks, shape.per_group, shape.rows


def group_pack_panels(const uint8_t[:, ::1] packed, Py_ssize_t K, Py_ssize_t group, int layout,
                      uint8_t[:, ::1] panels, int threads):
    """packed (N, ceil(K/4)) -> panels (see group_sizes)"""
    cdef Py_ssize_t N = packed.shape[0], row_bytes = packed.shape[1], p
    count, size = group_sizes(N, K, group, layout)[:2]
    check_set(0, threads)
    if row_bytes != (K + 3) // 4 or panels.shape[0] != count or panels.shape[1] != size:
        raise ValueError(f"group_pack_panels: packed {N, row_bytes}, panels {panels.shape[0], panels.shape[1]}")
    cdef group_shape shape = make_group_shape(N, K, group, layout)
    cdef Py_ssize_t rows = shape.rows
    cdef int team = threads_for(N * row_bytes, PANEL_BYTES_PER_THREAD, threads)
    for p in prange(panels.shape[0], nogil=True, num_threads=team, schedule="static"):
        group_pack(&shape, &packed[p * rows, 0], min(rows, N - p * rows), row_bytes, &panels[p, 0])


cdef class GroupPanels:
    """One matrix as the kernels take it: its panels, scales, bias and rotation."""
    cdef const uint8_t[:, ::1] panels
    cdef object scales
    cdef const void *scale_values
    cdef const float[::1] bias, signs
    cdef const int64_t[::1] order
    cdef int kind
    cdef Py_ssize_t n_out, block
    cdef group_shape shape

    def __cinit__(self, const uint8_t[:, ::1] panels, scales, Py_ssize_t n_out, Py_ssize_t n_in, Py_ssize_t group,
                  int layout, bias, signs, order, Py_ssize_t block):
        """scales: (panels * chunks, rows of a panel), of the dtypes of dense_matmul.  signs, order
        (n_in): of a rotation by blocks."""
        cdef Py_ssize_t rows, columns
        count, size, chunks, _, panel_rows = group_sizes(n_out, n_in, group, layout)
        self.panels, self.scales, self.n_out, self.block = panels, scales, n_out, block
        self.shape = make_group_shape(n_out, n_in, group, layout)
        self.scale_values = _matrix(scales, 0, &rows, &columns, &self.kind)
        if panels.shape[0] != count or panels.shape[1] != size or rows != count * chunks or columns != panel_rows:
            raise ValueError(f"GroupPanels: {panels.shape[0], panels.shape[1]}, scales {rows, columns} for {n_out, n_in}")
        self.bias, self.signs, self.order = bias, signs, order
        if bias is not None and self.bias.shape[0] != n_out:
            raise ValueError(f"GroupPanels: bias {self.bias.shape[0]}, expected {n_out}")
        if bias is not None:
            check_aligned(<size_t> &self.bias[0])
        if signs is not None and (self.signs.shape[0] != n_in or block < 1 or block & (block - 1) or n_in % block):
            raise ValueError(f"GroupPanels: {self.signs.shape[0]} signs in blocks of {block}, for {n_in} columns")
        if signs is not None:
            check_aligned(<size_t> &self.signs[0])
        if order is not None and (signs is None or self.order.shape[0] != n_in or not 0 <= min(order) <= max(order) < n_in):
            raise ValueError(f"GroupPanels: the order of the inputs has {self.order.shape[0]} numbers, for {n_in} columns")
        if order is not None:
            check_aligned(<size_t> &self.order[0], sizeof(int64_t))

    def rows(self, const int64_t[::1] ids, uint8_t[:, ::1] packed):
        """packed[i] = row ids[i], four codes per byte"""
        cdef Py_ssize_t i, n = ids.shape[0], rows = self.shape.rows
        if packed.shape[0] != n or packed.shape[1] != <Py_ssize_t> (self.shape.K + 3) // 4:
            raise ValueError(f"rows: {n} rows of {self.shape.K}, packed {packed.shape[0], packed.shape[1]}")
        for i in range(n):
            if not 0 <= ids[i] < self.n_out:
                raise ValueError(f"rows: row {ids[i]} of {self.n_out}")
        with nogil:
            for i in range(n):
                group_unpack_row(&self.shape, &self.panels[ids[i] // rows, 0], ids[i] % rows, &packed[i, 0])


cdef struct group_call:
    const float *x
    const float *signs  # of a rotation, or NULL
    const int64_t *order  # of its inputs, or NULL
    Py_ssize_t M, K, block
    const uint8_t *after  # what the next call reads first, or NULL
    bint apart  # matrix i is multiplied by token i alone, not by all
    group_shape shape  # of a token
    const kernel_set *chosen
    int threads
    group_shape shapes[MAX_LINEARS]
    const uint8_t *panels[MAX_LINEARS]
    const char *scales[MAX_LINEARS]
    int kinds[MAX_LINEARS]
    const float *biases[MAX_LINEARS]
    float *ys[MAX_LINEARS]
    Py_ssize_t count
    Py_ssize_t first[MAX_LINEARS + 1]  # first subpanel, of 64 rows, of each matrix
    Py_ssize_t n_out[MAX_LINEARS]


cdef inline const uint8_t *codes_at(const group_call *c, Py_ssize_t at) noexcept nogil:
    """The codes of subpanel `at` of all matrices, of the first chunk."""
    cdef Py_ssize_t i = 0, row
    while at >= c.first[i + 1]:
        i = i + 1
    cdef const group_shape *shape = &c.shapes[i]
    row = (at - c.first[i]) * PANEL_ROWS
    return (c.panels[i] + row // <Py_ssize_t> shape.rows * shape.n_chunks * shape.code_bytes
            + row % <Py_ssize_t> shape.rows // PANEL_ROWS * shape.subpanel_bytes)


cdef inline void multiply_subpanels(const group_call *c, Py_ssize_t at, Py_ssize_t end, Py_ssize_t start,
                                    Py_ssize_t tokens, const group_chunk *chunks, double *acc,
                                    void *scratch) noexcept nogil:
    """The subpanels at .. end of all matrices times `tokens` tokens from `start` on, or each times its own token.

    chunks: of these tokens; apart: of one token after another.
    """
    cdef Py_ssize_t i = 0, m, r, panel, row, rows, stored
    cdef const group_chunk *own
    cdef const group_shape *shape
    cdef const uint8_t *following
    cdef float *out
    while at < end:
        while at >= c.first[i + 1]:
            i = i + 1
        shape = &c.shapes[i]
        row = (at - c.first[i]) * PANEL_ROWS
        panel = row // <Py_ssize_t> shape.rows
        # to the end of the panel, of the matrix, or of this thread's part
        stored = min((panel + 1) * <Py_ssize_t> shape.rows - row, (min(end, c.first[i + 1]) - at) * PANEL_ROWS)
        r = panel * shape.n_chunks * shape.rows + row % <Py_ssize_t> shape.rows  # of the scales
        own = chunks + i * <Py_ssize_t> shape.n_chunks if c.apart else chunks
        following = codes_at(c, at + stored // PANEL_ROWS) if at + stored // PANEL_ROWS < end else c.after
        c.chosen.group_panel(shape, codes_at(c, at), c.scales[i] + r * (4 if c.kinds[i] == 0 else 2), c.kinds[i], stored, own, tokens, acc,
                             c.chosen.ternary[0].run, scratch, following)
        rows = min(stored, c.n_out[i] - row)
        for m in range(tokens):
            out = c.ys[i] + (start + m) * c.n_out[i] + row
            for r in range(rows):
                out[r] = <float> acc[m * stored + r]
            if c.biases[i] != NULL:
                add_arrays(out, c.biases[i] + row, rows, out)
        at = at + stored // PANEL_ROWS


cdef Py_ssize_t run_group(const void *call) noexcept nogil:
    cdef const group_call *c = <const group_call *> call
    cdef Py_ssize_t K = c.K, n_chunks = c.shape.n_chunks, start, tokens, item, m, bad = OK
    cdef Py_ssize_t max_tokens = GROUP_TABLE_TOKENS if c.shape.layout == GROUP_BY_TABLES else GROUP_PLANE_TOKENS
    max_tokens = c.M if c.apart else min(max_tokens, c.M)
    cdef Py_ssize_t panel_rows = 0, n_subpanels = c.first[c.count], code_bytes = n_chunks * c.shape.subpanel_bytes
    for item in range(c.count):
        panel_rows = max(panel_rows, <Py_ssize_t> c.shapes[item].rows)
    cdef Py_ssize_t parts = (c.M + max_tokens - 1) // max_tokens, part
    # Each thread's scratch: that of the int8 kernels, then sums in double.
    cdef size_t kernel_bytes = thread_bytes(0 if c.shape.layout == GROUP_BY_TABLES else SCRATCH_BYTES)
    cdef size_t own_bytes = kernel_bytes + thread_bytes(max_tokens * panel_rows * sizeof(double))
    cdef int team = threads_for(n_subpanels * code_bytes * (1 if c.apart else max_tokens), PANEL_BYTES_PER_THREAD, c.threads)
    cdef char *threads_scratch = <char *> allocate(team, own_bytes)
    cdef uint8_t *payload = <uint8_t *> allocate(max_tokens * n_chunks, c.shape.token_bytes)
    cdef double *steps = <double *> allocate(max_tokens * n_chunks, sizeof(double))
    cdef int32_t *x_sum = <int32_t *> allocate(max_tokens * n_chunks * GROUP_PLANES, sizeof(int32_t))
    cdef group_chunk *chunks = <group_chunk *> allocate(n_chunks * (c.M if c.apart else 1), sizeof(group_chunk))
    cdef double *turned = <double *> allocate(max_tokens * K, sizeof(double)) if c.signs != NULL else NULL
    cdef char *scratch = NULL
    if (threads_scratch == NULL or payload == NULL or steps == NULL or x_sum == NULL or chunks == NULL
            or (c.signs != NULL and turned == NULL)):
        bad = NO_MEMORY
    for part in range(parts if bad == OK else 0):
        start = part * c.M // parts
        tokens = (part + 1) * c.M // parts - start
        for item in range(n_chunks * (tokens if c.apart else 1)):
            m = item % n_chunks * tokens + item // n_chunks  # the token's place among the prepared ones
            chunks[item].tokens = payload + m * c.shape.token_bytes
            chunks[item].steps = steps + m
            chunks[item].x_sum = x_sum + m * GROUP_PLANES
        # One region for all: each `prange` of it ends in a barrier. A bad token is multiplied too, and then reported.
        with parallel(num_threads=team):
            scratch = threads_scratch + threadid() * own_bytes
            group_fetch(codes_at(c, threadid() * n_subpanels // team), n_subpanels // team * code_bytes)
            for m in prange(tokens if turned != NULL else 0, schedule="static"):
                group_turn(c.x + (start + m) * K, K, c.signs, c.order, c.block, turned + m * K)
            for item in prange(tokens * n_chunks, schedule="static"):
                steps[item] = c.chosen.group_token(&c.shape, c.x + (start + item % tokens) * K,
                                                   turned + item % tokens * K if turned != NULL else NULL,
                                                   item // tokens, payload + item * c.shape.token_bytes,
                                                   x_sum + item * GROUP_PLANES)
            for item in prange(team, schedule="static"):
                multiply_subpanels(c, item * n_subpanels // team, (item + 1) * n_subpanels // team, start,
                                   1 if c.apart else tokens, chunks, <double *> (scratch + kernel_bytes), scratch)
        for item in range(tokens * n_chunks):
            if steps[item] != steps[item] and (bad == OK or start + item % tokens < bad):
                bad = start + item % tokens
        if bad != OK:
            break
    free(threads_scratch)
    free(payload)
    free(steps)
    free(x_sum)
    free(chunks)
    free(turned)
    return bad


def group_linears(const float[:, ::1] x, list ws, ys, int threads, Py_ssize_t kernels, Tape tape=None):
    """Several matrices of one x (M, K) with the same groups and rotation: ys[i] (M, N_i) = x ws[i]^T + bias.

    Returns -1, or the first row that holds NaN or Inf. Threads take equal numbers of rows of all.
    """
    cdef Py_ssize_t M = x.shape[0], K = x.shape[1], count = len(ws), i
    cdef group_call c
    cdef GroupPanels w
    cdef float[:, ::1] y
    c.M, c.K, c.threads, c.count, c.first[0], c.apart, c.after = M, K, threads, count, 0, False, NULL
    c.chosen = check_set(kernels, threads)
    for weight in ws:
        if not isinstance(weight, GroupPanels):
            raise TypeError(f"group_linears: expected GroupPanels, got {type(weight).__name__}")
    if count > MAX_LINEARS or len(ys) != count:
        raise ValueError(f"group_linears: {count} weights, {len(ys)} results")
    if M == 0 or count == 0:
        return OK
    cdef GroupPanels one = ws[0]
    c.shape, c.block, c.signs, c.order = one.shape, one.block, NULL, NULL
    if one.signs is not None:
        c.signs = &one.signs[0]
    if one.order is not None:
        c.order = &one.order[0]
    for i in range(count):
        w, y = ws[i], ys[i]
        if (y is None or <Py_ssize_t> w.shape.K != K or w.shape.group != c.shape.group
                or w.shape.layout != c.chosen.group_layout or w.block != c.block
                or (w.signs is None) != (c.signs == NULL) or (c.signs != NULL and &w.signs[0] != c.signs)
                or (w.order is None) != (c.order == NULL) or (c.order != NULL and &w.order[0] != c.order)
                or y.shape[0] != M or y.shape[1] != w.n_out):
            raise ValueError(f"group_linears: x {M, K}, weight {w.n_out, w.shape.K}, groups of {w.shape.group}")
        c.shapes[i], c.first[i + 1] = w.shape, c.first[i] + (w.n_out + PANEL_ROWS - 1) // PANEL_ROWS
        c.panels[i], c.scales[i], c.kinds[i], c.n_out[i] = &w.panels[0, 0], <const char *> w.scale_values, w.kind, w.n_out
        c.biases[i] = NULL
        if w.bias is not None:
            c.biases[i] = &w.bias[0]
        c.ys[i] = &y[0, 0]
        check_aligned(<size_t> c.ys[i] | <size_t> c.biases[i])
    c.x = &x[0, 0]
    check_aligned(<size_t> c.x | <size_t> c.signs)
    if tape is None:
        return make_call(run_group, &c, "{} tokens of {} activations", M, K)
    tape.record(run_group, &c, sizeof(c), (<size_t> c.x,), tuple(ws), c.ys, count)
    return OK
