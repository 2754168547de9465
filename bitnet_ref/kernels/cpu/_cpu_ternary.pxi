# Part of _cpu.pyx: ternary matrices, from packing to BitLinears.


def pack_panels(const uint8_t[:, ::1] packed, uint8_t[:, ::1] panels, int threads, Py_ssize_t method):
    """packed (N, ceil(K/4)) -> panels (ceil(N/64), 256 blocks) in the layout of the method (see the headers)"""
    cdef Py_ssize_t N = packed.shape[0], row_bytes = packed.shape[1], p, count
    cdef const ternary_method *form = check_method(method)
    cdef Py_ssize_t n_panels = (N + PANEL_ROWS - 1) // PANEL_ROWS, byte_blocks = form.block_k // 4
    check_set(0, threads)
    if (panels.shape[0] != n_panels or panels.shape[1] != (row_bytes + byte_blocks - 1) // byte_blocks * BLOCK_BYTES
            or N == 0 or row_bytes == 0):
        raise ValueError(f"pack_panels: packed {N, row_bytes}, panels {panels.shape[0], panels.shape[1]}")
    cdef int team = threads_for(n_panels * panels.shape[1], PANEL_BYTES_PER_THREAD, threads)
    for p in prange(n_panels, nogil=True, num_threads=team, schedule="static"):
        count = min(<Py_ssize_t> PANEL_ROWS, N - p * PANEL_ROWS)
        form.pack(&packed[p * PANEL_ROWS, 0], count, row_bytes, &panels[p, 0])


def pack_plane(const uint8_t[:, ::1] plane, uint8_t[:, ::1] packed, int threads):
    """Hugging Face's plane (N/4, K) -> packed (N, ceil(K/4)). Returns whether it is free of the invalid code 3."""
    cdef Py_ssize_t quarter = plane.shape[0], K = plane.shape[1], row_bytes = packed.shape[1], r
    cdef uint32_t bad = 0
    check_set(0, threads)
    if packed.shape[0] % 4 or packed.shape[0] // 4 != quarter or row_bytes != K // 4 + (K % 4 != 0) or packed.size == 0:
        raise ValueError(f"pack_plane: plane {quarter, K}, packed {packed.shape[0], row_bytes}")
    cdef int team = threads_for(quarter * K, PANEL_BYTES_PER_THREAD, threads)
    for r in prange(quarter, nogil=True, num_threads=team, schedule="static"):
        bad |= pack_plane_row(&plane[r, 0], K, &packed[r, 0], quarter * row_bytes)
    return bad == 0


def unpack_panels(const uint8_t[:, ::1] panels, uint8_t[:, ::1] packed, int threads, Py_ssize_t method):
    """The inverse of pack_panels."""
    cdef Py_ssize_t N = packed.shape[0], row_bytes = packed.shape[1], p
    cdef const ternary_method *form = check_method(method)
    cdef Py_ssize_t n_panels = (N + PANEL_ROWS - 1) // PANEL_ROWS, byte_blocks = form.block_k // 4
    if panels.shape[0] != n_panels or panels.shape[1] != (row_bytes + byte_blocks - 1) // byte_blocks * BLOCK_BYTES:
        raise ValueError(f"unpack_panels: packed {N, row_bytes}, panels {panels.shape[0], panels.shape[1]}")
    check_set(0, threads)
    cdef int team = threads_for(N * row_bytes, PANEL_BYTES_PER_THREAD, threads)
    for p in prange(n_panels, nogil=True, num_threads=team, schedule="static"):
        form.unpack(&panels[p, 0], min(<Py_ssize_t> PANEL_ROWS, N - p * PANEL_ROWS), row_bytes,
                    &packed[p * PANEL_ROWS, 0])


def quantize(const float[:, ::1] x, int8_t[:, ::1] x_q, float[:, ::1] x_quant_scale, Py_ssize_t kernels):
    """x (M, K) -> x_q (M, K), x_quant_scale (M, 1). Returns -1, or the first row that holds NaN or Inf."""
    cdef Py_ssize_t M = x.shape[0], K = x.shape[1], m
    cdef int32_t x_sum
    cdef const kernel_set *chosen = check_set(kernels)
    if x_q.shape[0] != M or x_quant_scale.shape[0] != M or x_quant_scale.shape[1] != 1 or x_q.shape[1] != K:
        raise ValueError(f"quantize: x {M, K}, x_q {x_q.shape[0], x_q.shape[1]}")
    check_aligned(<size_t> &x[0, 0] | <size_t> &x_quant_scale[0, 0])
    with nogil:
        for m in range(M):
            if not chosen.quantize(&x[m, 0], K, &x_q[m, 0], &x_quant_scale[m, 0], &x_sum):
                with gil:
                    return m
    return -1


def ternary_matmul(const int8_t[:, ::1] x_q, const int32_t[::1] x_sum, const uint8_t[:, ::1] panels,
                   int32_t[:, ::1] acc, int threads, Py_ssize_t kernels, Py_ssize_t method):
    """x_q (M, block_k * blocks) int8, zeros beyond K, its row sums, panels -> acc (M, N). Threads take panels."""
    cdef Py_ssize_t M = x_q.shape[0], wide = x_q.shape[1], N = acc.shape[1], n_panels = panels.shape[0], p, m
    cdef const ternary_kernel *chosen = kernel_for(kernels, method, wide)
    cdef const ternary_method *form = &METHODS[method]
    cdef Py_ssize_t n_blocks = wide // <Py_ssize_t> form.block_k, x_stride = n_blocks * form.x_bytes
    check_set(kernels, threads)
    if (acc.shape[0] != M or x_sum.shape[0] != M or wide % form.block_k or panels.shape[1] != n_blocks * BLOCK_BYTES
            or n_panels != (N + PANEL_ROWS - 1) // PANEL_ROWS or not 0 < wide < MAX_COLUMNS):
        raise ValueError(f"ternary_matmul: x_q {M, wide}, panels {n_panels, panels.shape[1]}, acc {acc.shape[0], N}")
    check_aligned(<size_t> &x_sum[0] | <size_t> &acc[0, 0])
    if M == 0:
        return
    for m in range(M):
        if not -128 * wide <= x_sum[m] <= 127 * wide:
            raise ValueError(f"ternary_matmul: {x_sum[m]} is not the sum of {wide} int8")
    cdef int team = threads_for(n_panels * panels.shape[1] * M, PANEL_BYTES_PER_THREAD, threads)
    cdef char *scratch = <char *> allocate(team, thread_bytes(SCRATCH_BYTES))
    cdef int8_t *expanded = <int8_t *> allocate(M, x_stride) if form.expand != NULL else NULL
    cdef const int8_t *x = &x_q[0, 0]
    if scratch == NULL or (form.expand != NULL and expanded == NULL):
        free(scratch)
        free(expanded)
        raise MemoryError(f"no memory for {M} tokens of {wide} activations")
    if form.expand != NULL:
        for m in range(M):
            form.expand(&x_q[m, 0], n_blocks, <uint8_t *> expanded + m * x_stride)
        x = expanded
    with nogil, parallel(num_threads=team):
        for p in prange(n_panels, schedule="static"):
            chosen.run(&panels[p, 0], n_blocks, x, x_stride, M, &x_sum[0], &acc[0, p * PANEL_ROWS], N,
                       min(<Py_ssize_t> PANEL_ROWS, N - p * PANEL_ROWS),
                       scratch + threadid() * thread_bytes(SCRATCH_BYTES))
    free(scratch)
    free(expanded)


cdef class Panels:
    """One ternary matrix as the kernels take it: its panels, scale and bias, and perhaps strips of its rows or columns
    (strips.h)."""
    cdef const uint8_t[:, ::1] panels
    cdef const uint8_t[:, ::1] strips
    cdef const uint8_t *row_strips
    cdef const uint8_t *column_strips
    cdef readonly object counts  # of strips: see `StripCounts`
    cdef const float[::1] bias
    cdef const float *bias_values
    cdef Py_ssize_t n_out, n_in, n_blocks, method
    cdef float w_dequant_scale

    def __cinit__(self, const uint8_t[:, ::1] panels, Py_ssize_t n_out, Py_ssize_t n_in, float w_dequant_scale, bias,
                  Py_ssize_t method, strips=None, bint by_columns=False):
        cdef Py_ssize_t block_k = check_method(method).block_k
        self.panels, self.n_out, self.n_in, self.w_dequant_scale = panels, n_out, n_in, w_dequant_scale
        self.method = method
        self.n_blocks = n_in // block_k + (n_in % block_k != 0)
        if (n_out < 1 or not 0 < n_in < MAX_COLUMNS or panels.shape[0] != n_out // PANEL_ROWS + (n_out % PANEL_ROWS != 0)
                or panels.shape[1] != self.n_blocks * BLOCK_BYTES):
            raise ValueError(f"Panels: {panels.shape[0], panels.shape[1]} for {n_out, n_in}")
        self.bias_values = NULL
        if bias is not None:
            self.bias = bias
            if self.bias.shape[0] != n_out:
                raise ValueError(f"Panels: bias {self.bias.shape[0]}, expected {n_out}")
            self.bias_values = &self.bias[0]
            check_aligned(<size_t> self.bias_values)
        self.row_strips, self.column_strips = NULL, NULL
        if strips is not None:
            self.add_strips(strips, by_columns)

    cdef add_strips(self, const uint8_t[:, ::1] strips, bint by_columns):
        cdef Py_ssize_t count = self.n_in if by_columns else self.n_out
        cdef Py_ssize_t length = self.n_out if by_columns else self.n_in
        if (strips.shape[0] != count or strips.shape[1] != strip_vectors(length) * STRIP_BYTES
                or max(count, length) >= MAX_STRIP):
            raise ValueError(f"Panels: strips {strips.shape[0], strips.shape[1]} for {self.n_out, self.n_in}")
        self.strips, self.counts = strips, StripCounts()
        if by_columns:
            self.column_strips = &strips[0, 0]
        else:
            self.row_strips = &strips[0, 0]


cdef enum:
    MAX_LINEARS = 8  # per call
    TOKENS_PER_STEP = 96  # full tiles of every set: 6 and 32 tokens
    SHARED_TOKENS = 128  # per thread, from which on AMX's threads divide tokens, not panels: each reads all weights


cdef Py_ssize_t tokens_in_l2(Py_ssize_t token_bytes) noexcept nogil:
    """The number of tokens that go through all panels before the next ones: their activations stay in 3/4 of L2."""
    return max(<Py_ssize_t> 1, L2_BYTES * 3 // 4 // (max(<Py_ssize_t> 1, token_bytes) * TOKENS_PER_STEP)) * TOKENS_PER_STEP


cdef struct linears_call:
    const float *x
    const float *norm_weight  # NULL: x is not normed
    const float *residual  # added to the result of the only matrix, or NULL
    double eps
    Py_ssize_t M, K, method, n_panels, n_bytes  # panels and bytes of all matrices
    const kernel_set *chosen
    ternary_panel_fn run  # of the method, for x as the call has it
    bint tiled  # x goes to `run` in tiles (panel.h)
    int threads, gate  # RELU2 or SILU: ys[0] = act(x ws[0]^T) * (x ws[1]^T); else NO_GATE
    const uint8_t *panels[MAX_LINEARS]
    const float *biases[MAX_LINEARS]
    float *ys[MAX_LINEARS]
    Py_ssize_t first[MAX_LINEARS + 1]  # first panel of each matrix
    Py_ssize_t n_out[MAX_LINEARS]
    float scales[MAX_LINEARS]
    lora_call terms[MAX_LINEARS]  # of adapters; factors NULL: there is none
    float *normed  # (M, K), what terms read, or NULL
    const uint8_t *strips  # rows of up after a ReLU^2 gate, or columns of the only matrix; NULL: there are none
    strip_counts *one  # of calls with one token
    strip_counts *several


cdef void choose_run(linears_call *c, const ternary_kernel *kernel) noexcept nogil:
    """Tiles are for more tokens than those that leave out what meets a zero (strips.h)."""
    c.tiled = kernel.run_tiled != NULL and c.M > c.chosen.limits.few_tokens
    c.run = kernel.run_tiled if c.tiled else kernel.run


cdef Py_ssize_t tokens_per_block(const linears_call *c, Py_ssize_t token_bytes, int team) noexcept nogil:
    """The tokens that go through all panels before the next ones do: as many as L2 holds.

    With AMX each thread takes an equal share of a long prompt, and all panels: its tokens are in its L2 already, and
    stay there from one call to the next.
    """
    cdef Py_ssize_t tokens = tokens_in_l2(token_bytes), blocks
    if not c.tiled or c.M < SHARED_TOKENS * team:
        return tokens
    blocks = team * ((c.M + team * tokens - 1) // (team * tokens))
    return ((c.M + blocks - 1) // blocks + TILED_TOKENS - 1) // TILED_TOKENS * TILED_TOKENS


cdef inline void add_term(const linears_call *c, Py_ssize_t i, Py_ssize_t m, Py_ssize_t first, Py_ssize_t rows,
                          float *y) noexcept nogil:
    """Adds matrix i's term of token m, if there is one, to y, its result from row `first` on."""
    if c.terms[i].factors != NULL:
        add_arrays(y, c.terms[i].y + m * c.n_out[i] + first, rows, y)


cdef inline void multiply_panel(const linears_call *c, Py_ssize_t p, Py_ssize_t block, Py_ssize_t max_tokens,
                                const int32_t *x_sum, const float *x_quant_scale, const int8_t *x, Py_ssize_t n_blocks,
                                Py_ssize_t x_stride, int32_t *acc, void *scratch) noexcept nogil:
    """Panel p of all matrices, or of both gate and up, times at most max_tokens tokens from `block` on."""
    cdef Py_ssize_t tokens = min(max_tokens, c.M - block), i = 0, n, row
    cdef panel_results r
    while p >= c.first[i + 1]:
        i = i + 1
    p = p - c.first[i]
    row = p * PANEL_ROWS
    r.tokens, r.rows, r.stride, r.gate = tokens, min(<Py_ssize_t> PANEL_ROWS, c.n_out[i] - row), c.n_out[i], c.gate
    for n in range(1 if c.gate == NO_GATE else 2):
        r.acc[n] = acc + n * tokens * PANEL_ROWS
        c.run(c.panels[i + n] + p * n_blocks * BLOCK_BYTES, n_blocks, x + block * x_stride, x_stride, tokens,
              x_sum + block, acc + n * tokens * PANEL_ROWS, PANEL_ROWS, r.rows, scratch)
        r.w_scale[n] = c.scales[i + n]
        r.bias[n] = c.biases[i + n] + row if c.biases[i + n] != NULL else NULL
        r.term[n] = c.terms[i + n].y + block * r.stride + row if c.terms[i + n].factors != NULL else NULL
    r.x_scale = x_quant_scale + block
    r.residual = c.residual + block * r.stride + row if c.residual != NULL else NULL
    r.y = c.ys[i] + block * r.stride + row
    c.chosen.finish(&r)


cdef inline Py_ssize_t first_item(const linears_call *c, Py_ssize_t part, Py_ssize_t parts, Py_ssize_t block_tokens,
                                  Py_ssize_t n_items) noexcept nogil:
    """Where a part of the products begins, in items of a panel and a block of tokens. Parts are equal in tokens, since
    the last block may be short: 512 tokens as 288 and 224, item by item, kept one of two threads idle for a tenth."""
    cdef Py_ssize_t work = (c.M * n_items * part + parts - 1) // parts, block = work // (block_tokens * n_items)
    cdef Py_ssize_t tokens = min(block_tokens, c.M - block * block_tokens)
    return block * n_items + ((work - block * block_tokens * n_items + tokens - 1) // tokens if tokens else 0)


cdef Py_ssize_t run_linears(const void *call) noexcept nogil:
    cdef const linears_call *c = <const linears_call *> call
    cdef const ternary_method *form = &METHODS[c.method]
    cdef Py_ssize_t M = c.M, K = c.K, m, part, item, n_items, both, bad = OK, done = NOT_COMPUTED
    cdef Py_ssize_t n_blocks = (K + form.block_k - 1) // <Py_ssize_t> form.block_k, wide = n_blocks * form.block_k
    cdef Py_ssize_t x_stride = <Py_ssize_t> tiled_bytes(n_blocks) if c.tiled else n_blocks * form.x_bytes
    cdef int steps = 1 + (c.norm_weight != NULL)
    cdef int team = threads_for(M * K * steps, FLOATS_PER_THREAD, c.threads)
    cdef int product_team = threads_for(c.n_bytes * M, PANEL_BYTES_PER_THREAD, c.threads)
    cdef Py_ssize_t block_tokens = tokens_per_block(c, x_stride, product_team)
    cdef bint expands = c.tiled or form.expand != NULL
    both = 1 if c.gate == NO_GATE else 2
    n_items = c.n_panels // both
    # Each thread's scratch: a normed row; then that of a kernel, followed by the sums of a panel.
    cdef size_t row_bytes = thread_bytes(K * sizeof(float) if c.norm_weight != NULL else 0)
    cdef size_t kernel_bytes = thread_bytes(SCRATCH_BYTES)
    cdef size_t panel_bytes = kernel_bytes + thread_bytes(both * min(M, block_tokens) * PANEL_ROWS * sizeof(int32_t))
    cdef char *threads_scratch = <char *> allocate(1, max(team * row_bytes, product_team * panel_bytes))
    cdef int8_t *x_q = <int8_t *> allocate(M + 1, max(wide, <Py_ssize_t> STRIP_K))  # strips' last vector reads beyond a row
    cdef int32_t *x_sum = <int32_t *> allocate(M, sizeof(int32_t))
    cdef float *x_quant_scale = <float *> allocate(M, sizeof(float))
    cdef int8_t *expanded = <int8_t *> allocate(M + TILED_TOKENS if c.tiled else M, x_stride) if expands else NULL
    cdef char *scratch = NULL
    cdef const float *row = NULL
    cdef float *place = NULL
    if (threads_scratch == NULL or x_q == NULL or x_sum == NULL or x_quant_scale == NULL
            or (expands and expanded == NULL)):
        bad = NO_MEMORY
    else:
        with parallel(num_threads=team):
            scratch = threads_scratch + threadid() * row_bytes
            for m in prange(M, schedule="static"):
                if wide > K:
                    memset(x_q + m * wide + K, 0, wide - K)
                row = c.x + m * K
                if c.norm_weight != NULL:
                    place = <float *> scratch if c.normed == NULL else c.normed + m * K
                    row = place if c.chosen.rms_norm(row, c.norm_weight, K, c.eps, place) else NULL
                if row == NULL or not c.chosen.quantize(row, K, x_q + m * wide, x_quant_scale + m, x_sum + m):
                    x_quant_scale[m] = 0  # marks a bad row: no scale is 0
                elif c.tiled:
                    tile_token(x_q + m * wide, n_blocks, m, <uint8_t *> expanded)
                elif form.expand != NULL:
                    form.expand(x_q + m * wide, n_blocks, <uint8_t *> expanded + m * x_stride)
        for m in range(M):
            if x_quant_scale[m] == 0:
                bad = m
                break
    for item in range(MAX_LINEARS if bad == OK else 0):
        if c.terms[item].factors != NULL:
            run_lora(&c.terms[item])
    if bad == OK and c.strips != NULL:
        if c.gate == NO_GATE:
            done = columns_of_tokens(c, x_q, wide, x_sum, x_quant_scale, product_team)
        else:
            done = rows_of_tokens(c, x_q, wide, n_blocks, x_sum, x_quant_scale, product_team)
        bad = OK if done == NOT_COMPUTED else done
    if bad == OK and done == NOT_COMPUTED:
        with parallel(num_threads=product_team):
            scratch = threads_scratch + threadid() * panel_bytes
            # Tried: dynamic, two panels at a time: no faster on two quiet cores (2B-4T's shape, 12 and 30 layers).
            # Tried: the lines of results and residuals prefetched eight tokens ahead: no clear gain (Sapphire Rapids, AMX, 512
            # tokens, 64 query rows per pass of attention in the same build: 1.00 to 1.09 times as fast, of 64 tokens 0.98 to 1.02).
            for part in prange(product_team, schedule="static"):
                for item in range(first_item(c, part, product_team, block_tokens, n_items),
                                  first_item(c, part + 1, product_team, block_tokens, n_items)):
                    multiply_panel(
                        c, item % n_items, item // n_items * block_tokens, block_tokens, x_sum, x_quant_scale,
                        x_q if expanded == NULL else expanded, n_blocks, x_stride, <int32_t *> (scratch + kernel_bytes), scratch)
    free(threads_scratch)
    free(x_q)
    free(expanded)
    free(x_sum)
    free(x_quant_scale)
    return bad


cdef bint check_fused(str call, Py_ssize_t M, Py_ssize_t K, list n_out, ys, int gate, const float[::1] norm_weight,
                      const float[:, ::1] residual) except -1:
    """Whether the weights of n_out rows are a gate and up, which give one result. Raises ValueError for what cannot be."""
    cdef Py_ssize_t count = len(n_out)
    gates = gate in (RELU2, SILU) and count == 2 and n_out[0] == n_out[1]
    if count > MAX_LINEARS or len(ys) != (1 if gates else count) or gates != (gate != NO_GATE):
        raise ValueError(f"{call}: {count} weights, {len(ys)} results, gate {gate}")
    if norm_weight is not None and norm_weight.shape[0] != K:
        raise ValueError(f"{call}: x {M, K}, norm {norm_weight.shape[0]}")
    if residual is not None and (len(ys) != 1 or residual.shape[0] != M or residual.shape[1] != n_out[0]):
        raise ValueError(f"{call}: {len(ys)} results of {n_out}, residual {residual.shape[0], residual.shape[1]}")
    return gates


def bit_linears(const float[:, ::1] x, list ws, ys, int threads, Py_ssize_t kernels, Tape tape=None, *,
                const float[::1] norm_weight=None, double eps=0, int gate=NO_GATE, const float[:, ::1] residual=None,
                list terms=None, float[:, ::1] normed=None):
    """Several BitLinears of one x (M, K), quantised once: ys[i] (M, N_i) = x ws[i]^T. Threads take panels of all.

    norm_weight, eps: RMSNorm is applied to x first.  gate RELU2 or SILU: two weights (N, K) give one result,
    act(x ws[0]^T) * (x ws[1]^T), whose factors never leave L1.  residual (M, N): added to the only weight's result.
    terms: for each weight None, or (factors, choice, t (M, max_r), term (M, N)), see `lora`; t and term are overwritten.
    normed (M, K): is overwritten with the normed x, which terms read.

    Returns -1, or the first row that holds NaN or Inf. There is one parallel region, not one per step and matrix: for
    one token of a 2560-wide block the steps between the products took a tenth of the time. A row is normed and
    quantised while it is in L1.
    """
    cdef Py_ssize_t M = x.shape[0], K = x.shape[1], count = len(ws), i
    cdef linears_call c
    cdef Panels w
    cdef float[:, ::1] y
    cdef const float[:, ::1] read  # by terms
    c.M, c.K, c.threads, c.n_panels, c.n_bytes, c.gate = M, K, threads, 0, 0, gate
    c.chosen = check_set(kernels, threads)
    for weight in ws:
        if not isinstance(weight, Panels):
            raise TypeError(f"bit_linears: expected Panels, got {type(weight).__name__}")
    c.method = (<Panels> ws[0]).method if count else 0
    gates = check_fused("bit_linears", M, K, [(<Panels> w).n_out for w in ws], ys, gate, norm_weight, residual)
    for i in range(count):
        w, y = ws[i], ys[0 if gates else i]
        if y is None or w.n_in != K or w.method != c.method or y.shape[0] != M or y.shape[1] != w.n_out:
            raise ValueError(f"bit_linears: x {M, K}, weight {w.n_out, w.n_in}, result {y.shape[0], y.shape[1]}")
        c.first[i] = c.n_panels
        c.n_panels += w.panels.shape[0]
        c.n_bytes += w.panels.shape[0] * w.panels.shape[1]
        c.panels[i], c.biases[i], c.scales[i], c.n_out[i] = &w.panels[0, 0], w.bias_values, w.w_dequant_scale, w.n_out
        c.ys[i] = &y[0, 0] if M else NULL
        check_aligned(<size_t> c.ys[i])
    c.first[count] = c.n_panels
    c.normed = NULL
    memset(c.terms, 0, sizeof(c.terms))
    if terms is not None:
        read = x if norm_weight is None else normed
        if len(terms) != count or read is None or read.shape[0] != M or read.shape[1] != K:
            raise ValueError(f"bit_linears: x {M, K}, {count} weights, {len(terms)} terms, or no normed {M, K}")
        if norm_weight is not None and M:
            c.normed = &normed[0, 0]
            check_aligned(<size_t> c.normed)
        for i in range(count):
            if terms[i] is None:
                continue
            factors, choice, t, term = terms[i]
            place_term(&c.terms[i], read, term, t, factors, choice, threads, kernels, True)
            if (c.terms[i].M, c.terms[i].K, c.terms[i].N) != (M, K, c.n_out[i]):
                raise ValueError(f"bit_linears: x {M, K}, weight {c.n_out[i], K}, a term of {c.terms[i].N, c.terms[i].K}")
    if M == 0 or count == 0:
        return OK
    c.x, c.norm_weight, c.residual, c.eps = &x[0, 0], NULL, NULL, eps
    if norm_weight is not None:
        c.norm_weight = &norm_weight[0]
    if residual is not None:
        c.residual = &residual[0, 0]
    choose_run(&c, kernel_for(kernels, c.method, K))
    c.strips, c.one, c.several, w = NULL, NULL, NULL, ws[count - 1]
    if (METHODS[c.method].expand == NULL and not c.tiled and (gate == RELU2 or count == 1)
            and (c.chosen.strip_rows if M == 1 else c.chosen.strip_rows_near) != NULL):
        c.strips = w.row_strips if gate == RELU2 else w.column_strips if gate == NO_GATE else NULL
        if c.strips != NULL:
            c.one, c.several = &(<StripCounts> w.counts).one, &(<StripCounts> w.counts).several
    check_aligned(<size_t> c.x | <size_t> c.norm_weight | <size_t> c.residual)
    if tape is None:
        return make_call(run_linears, &c, "{} tokens of {} activations", M, K)
    for i in range(count):
        if c.terms[i].factors != NULL:
            tape.addresses.add(<size_t> c.terms[i].y)
            tape.addresses.add(<size_t> c.terms[i].t)
    tape.record(run_linears, &c, sizeof(c), (<size_t> c.x, <size_t> (c.residual or c.x), <size_t> c.normed or <size_t> c.x),
                (tuple(ws), norm_weight, terms), c.ys, count)
    return OK


def dequantize(const int32_t[:, ::1] acc, float w_dequant_scale, const float[:, ::1] x_quant_scale, float[:, ::1] y,
               Py_ssize_t kernels):
    """y (M, N) = acc * (w_dequant_scale / x_quant_scale)"""
    cdef Py_ssize_t M = acc.shape[0], N = acc.shape[1], m
    cdef const kernel_set *chosen = check_set(kernels)
    if y.shape[0] != M or y.shape[1] != N or x_quant_scale.shape[0] != M or x_quant_scale.shape[1] != 1:
        raise ValueError(f"dequantize: acc {M, N}, y {y.shape[0], y.shape[1]}")
    check_aligned(<size_t> &acc[0, 0] | <size_t> &y[0, 0] | <size_t> &x_quant_scale[0, 0])
    with nogil:
        for m in range(M):
            chosen.dequantize(&acc[m, 0], N, w_dequant_scale, x_quant_scale[m, 0], NULL, &y[m, 0])
