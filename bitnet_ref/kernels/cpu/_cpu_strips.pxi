# Part of _cpu.pyx: BitLinears that leave out what meets a zero (strips.h): what no token of a call needs is not read, and
# no token is multiplied by its own zeros.


cdef enum:
    MAX_STRIP = 1 << 17  # columns, and rows: the sums of strips.h fit int32
    # Where tokens need more than these shares of rows and columns, in percent, the panels are multiplied whole: in order
    # memory is faster. For several tokens see also the kernel set's `strip_limits`.
    MAX_ROWS_OF_ONE = 45
    MAX_COLUMNS_OF_ONE = 60
    MAX_COLUMNS_OF_FEW = 28
    NEAR_TOKENS = 64  # whose sums are in L2
    NEAR_COLUMNS = 256  # whose strips are too
    FEW_NEAR_COLUMNS = 64  # for few tokens


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


cdef struct some_tokens:
    const int8_t *x  # (tokens, x_stride)
    const int32_t *x_sum
    const float *x_quant_scale
    Py_ssize_t x_stride, n_blocks  # n_blocks: of the panels
    Py_ssize_t first, tokens  # the number of the first of them in the call, and how many


cdef struct some_rows:
    Py_ssize_t first, last, start, rows, width  # panels; their first row; how many rows, and with those that only pad
    void *scratch  # of the kernels
    int32_t *acc  # (tokens, PANEL_ROWS) or (1, width)
    float *up  # the same
    float *present  # (width + LIST_SLACK,) gates of a token that are above zero, and
    int32_t *own  # (width + LIST_SLACK,) their rows
    int32_t *needs  # (width,) how many tokens need a row
    int32_t *ids  # (width + PANEL_ROWS,) the rows that a token needs, ascending, then those ahead
    float *gates  # (tokens, width)


cdef inline void place_rows(some_rows *r, Py_ssize_t first, Py_ssize_t last, Py_ssize_t tokens, char *memory) noexcept nogil:
    cdef Py_ssize_t width = (last - first) * PANEL_ROWS, sums = max(width, tokens * PANEL_ROWS)
    r.first, r.last, r.start, r.width = first, last, first * PANEL_ROWS, width
    r.scratch = memory
    r.acc = <int32_t *> (memory + SCRATCH_BYTES)
    r.up = <float *> (r.acc + sums)
    r.present = r.up + sums
    r.own = <int32_t *> (r.present + width + LIST_SLACK)
    r.needs = r.own + width + LIST_SLACK
    r.ids = r.needs + width
    r.gates = <float *> (r.ids + width + PANEL_ROWS)


cdef inline size_t bytes_of_rows(Py_ssize_t panels, Py_ssize_t tokens) noexcept nogil:
    """The memory for `place_rows`."""
    cdef some_rows r
    place_rows(&r, 0, panels, tokens, NULL)
    return <size_t> (r.gates + tokens * r.width)


cdef inline void panel_of_tokens(const linears_call *c, const some_tokens *t, int which, Py_ssize_t p, int32_t *acc,
                                 float *y, Py_ssize_t y_stride, void *scratch) noexcept nogil:
    """y (tokens, y_stride) = panel p of gate (`which` 0) or up (1) times the tokens, dequantised."""
    cdef Py_ssize_t rows = min(<Py_ssize_t> PANEL_ROWS, c.n_out[0] - p * PANEL_ROWS), m
    c.run(c.panels[which] + p * t.n_blocks * BLOCK_BYTES, t.n_blocks, t.x, t.x_stride, t.tokens, t.x_sum, acc,
                  PANEL_ROWS, rows, scratch)
    for m in range(t.tokens):
        c.chosen.dequantize(acc + m * PANEL_ROWS, rows, c.scales[which], t.x_quant_scale[m],
                            c.biases[which] + p * PANEL_ROWS if c.biases[which] != NULL else NULL, y + m * y_stride)
        add_term(c, which, t.first + m, p * PANEL_ROWS, rows, y + m * y_stride)


cdef bint rows_pay(const linears_call *c, const some_tokens *t, Py_ssize_t rows, Py_ssize_t needed) noexcept nogil:
    """Whether strips are right, and faster than panels.   needed: rows with a gate above zero, summed over the tokens"""
    cdef Py_ssize_t m
    cdef int most = MAX_ROWS_OF_ONE
    if t.tokens > 1:
        most = c.chosen.limits.few_rows if t.tokens <= c.chosen.limits.few_tokens else c.chosen.limits.rows
    for m in range(t.tokens):  # a product that overflows would be NaN beside a gate of zero
        if not c.scales[1] / t.x_quant_scale[m] * 256.0 * c.K < 1e38:
            return False
    return c.biases[1] == NULL and needed * 100 <= most * rows * t.tokens


cdef bint terms_are_small(const linears_call *c, const some_tokens *t, const some_rows *r) noexcept nogil:
    """Whether no term of up can make a product that overflows, as `rows_pay` asks of up itself."""
    cdef Py_ssize_t m, i
    cdef bint small = True
    cdef const float *term
    for m in range(t.tokens if c.terms[1].factors != NULL else 0):
        term = c.terms[1].y + (t.first + m) * c.n_out[1] + r.start
        for i in range(r.rows):
            small &= (term[i] < 1e38) & (term[i] > -1e38)
    return small


cdef void gated_rows(const linears_call *c, const some_tokens *t, some_rows *r, Py_ssize_t ahead,
                     strip_counts *counts) noexcept nogil:
    """relu2(gate) * up of some rows and tokens: all of gate, and of up those rows of each token whose gate is above zero.

    ahead: so many rows after these are brought into L2.
    """
    cdef Py_ssize_t needed = 0, listed = 0, p, m, i
    r.rows = min(r.last * PANEL_ROWS, c.n_out[0]) - r.start
    for p in range(r.first, r.last):
        panel_of_tokens(c, t, 0, p, r.acc, r.gates + (p - r.first) * PANEL_ROWS, r.width, r.scratch)
    memset(r.needs, 0, r.rows * sizeof(int32_t))
    for m in range(t.tokens):
        for i in range(r.rows):
            r.needs[i] += not r.gates[m * r.width + i] <= 0
    for i in range(r.rows):
        r.ids[listed] = <int32_t> (r.start + i)
        listed += r.needs[i] > 0
        needed += r.needs[i]
    counts.needed += needed
    if rows_pay(c, t, r.rows, needed) and terms_are_small(c, t, r):
        counts.read += needed
        for i in range(ahead):
            r.ids[listed + i] = <int32_t> (r.start + r.rows + i)
        up_by_strips(c, t, r, listed, ahead)
    else:
        counts.read += r.rows * t.tokens
        up_by_panels(c, t, r)


cdef void up_by_panels(const linears_call *c, const some_tokens *t, const some_rows *r) noexcept nogil:
    """`gated_rows` from their gates, all of up."""
    cdef Py_ssize_t p, m, n
    for p in range(r.first, r.last):
        n = (p - r.first) * PANEL_ROWS
        panel_of_tokens(c, t, 1, p, r.acc, r.up, PANEL_ROWS, r.scratch)
        for m in range(t.tokens):
            c.chosen.gated(r.gates + m * r.width + n, r.up + m * PANEL_ROWS, min(<Py_ssize_t> PANEL_ROWS, r.rows - n), 0,
                           c.ys[0] + (t.first + m) * c.n_out[0] + r.start + n)


cdef void up_by_strips(const linears_call *c, const some_tokens *t, const some_rows *r, Py_ssize_t listed,
                       Py_ssize_t ahead) noexcept nogil:
    """`gated_rows` from their gates, of up each token's rows alone. Several tokens go through some of the listed rows
    together, and bring the next ones into L2 meanwhile, each a share."""
    cdef Py_ssize_t n_vectors = strip_vectors(c.K), g = 0, together, some, next_rows, low, high, count, m, i
    cdef strip_rows_fn multiply = c.chosen.strip_rows if t.tokens == 1 else c.chosen.strip_rows_near
    cdef float *out
    for m in range(t.tokens):
        memset(c.ys[0] + (t.first + m) * c.n_out[0] + r.start, 0, r.rows * sizeof(float))
    together = listed if t.tokens == 1 else PANEL_ROWS
    while g < listed:
        some = min(together, listed - g)
        next_rows = min(together, listed + ahead - g - some)
        low, high = r.ids[g] - r.start, r.ids[g + some - 1] - r.start + 1
        for m in range(t.tokens):
            out = c.ys[0] + (t.first + m) * c.n_out[0]
            count = c.chosen.list_gates(r.gates + m * r.width + low, high - low, r.ids[g], r.own, r.present)
            i = g + some + next_rows * m // t.tokens
            multiply(c.strips, n_vectors, t.x + m * t.x_stride, t.x_sum[m], r.own, count, r.acc, r.ids + i,
                     g + some + next_rows * (m + 1) // t.tokens - i)
            c.chosen.dequantize(r.acc, count, c.scales[1], t.x_quant_scale[m], NULL, r.up)
            for i in range(count if c.terms[1].factors != NULL else 0):
                r.up[i] += c.terms[1].y[(t.first + m) * c.n_out[1] + r.own[i]]
            c.chosen.gated(r.present, r.up, count, 0, r.up)
            for i in range(count):
                out[r.own[i]] = r.up[i]
        g += some


cdef Py_ssize_t rows_of_tokens(const linears_call *c, const int8_t *x_q, Py_ssize_t x_stride, Py_ssize_t n_blocks,
                               const int32_t *x_sum, const float *x_quant_scale, int team) noexcept nogil:
    """relu2(gate) * up of all tokens.   -> OK or NO_MEMORY"""
    cdef Py_ssize_t n_panels = c.first[1], block_tokens = min(c.M, tokens_in_l2(x_stride)), part, needed = 0, read = 0
    cdef Py_ssize_t panels = (n_panels + team - 1) // team if c.M <= c.chosen.limits.few_tokens else 1
    cdef size_t part_bytes = thread_bytes(bytes_of_rows(panels, block_tokens)), counts_bytes = thread_bytes(sizeof(strip_counts))
    cdef char *memory = <char *> allocate(team, part_bytes + counts_bytes)
    cdef strip_counts *counts
    cdef some_tokens t
    if memory == NULL:
        return NO_MEMORY
    t.x, t.x_stride, t.n_blocks, t.x_sum, t.x_quant_scale, t.first, t.tokens = (
        x_q, x_stride, n_blocks, x_sum, x_quant_scale, 0, c.M)
    for part in prange(team, num_threads=team, schedule="static"):
        part_of_rows(c, &t, first_item(c, part, team, block_tokens, n_panels),
                     first_item(c, part + 1, team, block_tokens, n_panels), block_tokens, memory + part * part_bytes,
                     <strip_counts *> (memory + team * part_bytes + part * counts_bytes))
    for part in range(team):
        counts = <strip_counts *> (memory + team * part_bytes + part * counts_bytes)
        needed += counts.needed
        read += counts.read
    count_use(c, c.n_out[0], needed, read)
    free(memory)
    return OK


cdef void part_of_rows(const linears_call *c, const some_tokens *every, Py_ssize_t item, Py_ssize_t end,
                       Py_ssize_t block_tokens, char *memory, strip_counts *counts) noexcept nogil:
    """Items (`first_item`) from `item` to `end`.

    For few tokens all rows of gate come first, which tell what rows of up no token needs. Of many tokens' rows there are
    hardly any, so these go panel by panel.
    """
    cdef Py_ssize_t n_panels = c.first[1], p, panels, ahead
    cdef some_tokens t
    cdef some_rows r
    memset(counts, 0, sizeof(strip_counts))
    t.x_stride, t.n_blocks = every.x_stride, every.n_blocks
    while item < end:
        p = item % n_panels
        t.first = item // n_panels * block_tokens
        t.tokens = min(block_tokens, every.tokens - t.first)
        t.x, t.x_sum = every.x + t.first * t.x_stride, every.x_sum + t.first
        t.x_quant_scale = every.x_quant_scale + t.first
        if every.tokens <= c.chosen.limits.few_tokens:
            panels, ahead = end - item, 0
        else:
            panels, ahead = 1, min(<Py_ssize_t> PANEL_ROWS, max(<Py_ssize_t> 0, c.n_out[0] - (p + 1) * PANEL_ROWS))
        place_rows(&r, p, p + panels, t.tokens, memory)
        gated_rows(c, &t, &r, ahead, counts)
        item += panels


cdef inline void count_use(const linears_call *c, Py_ssize_t total, Py_ssize_t needed, Py_ssize_t read) noexcept nogil:
    """total: of the matrix.  needed, read: of all tokens"""
    cdef strip_counts *counts = c.one if c.M == 1 else c.several
    counts.tokens += c.M
    counts.total += c.M * total
    counts.needed += needed
    counts.read += read


cdef inline void finish_columns(const linears_call *c, Py_ssize_t m, int32_t x_sum, float x_quant_scale,
                                Py_ssize_t first, Py_ssize_t last, int32_t *acc) noexcept nogil:
    """Token m's outputs of strips' vectors `first` to `last` of the only matrix, from their sums."""
    cdef Py_ssize_t N = c.n_out[0], start = first * STRIP_K, rows = min(last * STRIP_K, N) - start, i
    cdef float *out = c.ys[0] + m * N + start
    for i in range(rows):
        acc[i] -= x_sum
    c.chosen.dequantize(acc, rows, c.scales[0], x_quant_scale, c.biases[0] + start if c.biases[0] != NULL else NULL, out)
    add_term(c, 0, m, start, rows, out)
    if c.residual != NULL:
        add_arrays(c.residual + m * N + start, out, rows, out)


cdef inline int32_t count_columns(const int8_t *x_q, Py_ssize_t K) noexcept nogil:
    """How many columns meet no zero."""
    cdef int32_t count = 0
    cdef Py_ssize_t k
    for k in range(K):
        count += x_q[k] != 0
    return count


cdef inline void join_columns(const int8_t *x_q, Py_ssize_t x_stride, Py_ssize_t tokens, Py_ssize_t K,
                              int8_t *joined) noexcept nogil:
    """joined (K,): not zero for the columns that a token needs."""
    cdef Py_ssize_t m, k
    memset(joined, 0, K)
    for m in range(tokens):
        for k in range(K):
            joined[k] |= x_q[m * x_stride + k]


cdef struct near_call:
    const linears_call *c
    const int32_t *x_sum
    const float *x_quant_scale
    Py_ssize_t block, tokens  # the first of the present tokens, and how many
    Py_ssize_t room  # of a list
    int32_t *ids  # (tokens, room) the columns that meet no zero, ascending
    int8_t *values  # (tokens, room) their int8
    Py_ssize_t *counts  # (tokens,)
    int32_t *joined  # the columns that a token needs, ascending
    Py_ssize_t n_joined


cdef inline bint columns_pay(const linears_call *c, Py_ssize_t needed) noexcept nogil:
    """Whether strips are faster than panels.   needed: columns that meet no zero, summed over the tokens"""
    cdef int most = MAX_COLUMNS_OF_ONE
    if c.M > 1:
        most = MAX_COLUMNS_OF_FEW if c.M <= c.chosen.limits.few_tokens else c.chosen.limits.columns
    return needed * 100 <= most * c.M * c.K


cdef Py_ssize_t columns_of_tokens(const linears_call *c, const int8_t *x_q, Py_ssize_t wide, const int32_t *x_sum,
                                  const float *x_quant_scale, int team) noexcept nogil:
    """The product of the tokens with the only matrix, each token by the columns that it needs.

    Returns OK, NO_MEMORY, or NOT_COMPUTED if the tokens need too many columns.
    """
    cdef Py_ssize_t M = c.M, K = c.K, n_vectors = strip_vectors(c.n_out[0]), needed = 0, m, part, bad = OK
    # Of the outputs; and where threads are more than vectors of outputs, of the tokens too
    cdef Py_ssize_t parts = min(<Py_ssize_t> team, n_vectors), shares = 1
    cdef int listing = min(<Py_ssize_t> team, M)
    if team > n_vectors and M > 1:
        shares = 4 * team // n_vectors
    for m in prange(M, num_threads=listing, schedule="static"):
        needed += count_columns(x_q + m * wide, K)
    cdef bint pays = columns_pay(c, needed)
    count_use(c, K, needed, needed if pays else M * K)
    if not pays:
        return NOT_COMPUTED
    cdef near_call n
    cdef Py_ssize_t most = min(M, <Py_ssize_t> NEAR_TOKENS), room = K + LIST_SLACK
    cdef size_t acc_bytes = most * ((n_vectors + parts - 1) // parts) * STRIP_K * sizeof(int32_t)
    cdef size_t part_bytes = acc_bytes + thread_bytes(most * sizeof(Py_ssize_t))
    n.c, n.x_sum, n.x_quant_scale, n.block, n.room = c, x_sum, x_quant_scale, 0, room
    n.ids = <int32_t *> allocate((most + 1) * room, sizeof(int32_t))  # the last list: of all tokens
    n.values = <int8_t *> allocate((most + 2) * room, 1)
    n.counts = <Py_ssize_t *> allocate(most, sizeof(Py_ssize_t))
    cdef int8_t *joined = NULL
    cdef char *scratch = <char *> allocate(parts * shares, part_bytes)
    if n.ids == NULL or n.values == NULL or n.counts == NULL or scratch == NULL:
        bad = NO_MEMORY
    else:
        n.joined, joined = n.ids + most * room, n.values + (most + 1) * room
    while bad == OK and n.block < M:
        n.tokens = min(most, M - n.block)
        for m in prange(n.tokens, num_threads=listing, schedule="static"):
            n.counts[m] = c.chosen.list_columns(x_q + (n.block + m) * wide, K, n.ids + m * room, n.values + m * room)
        if M > 1:
            join_columns(x_q + n.block * wide, wide, n.tokens, K, joined)
            n.n_joined = c.chosen.list_columns(joined, K, n.joined, n.values + most * room)
        for part in prange(parts * shares, num_threads=team, schedule="static"):
            near_columns(&n, n_vectors * (part // shares) // parts, n_vectors * (part // shares + 1) // parts,
                         n.tokens * (part % shares) // shares, n.tokens * (part % shares + 1) // shares,
                         <int32_t *> (scratch + part * part_bytes), <Py_ssize_t *> (scratch + part * part_bytes + acc_bytes))
        n.block += n.tokens
    free(n.ids)
    free(n.values)
    free(n.counts)
    free(scratch)
    return bad


cdef void near_columns(const near_call *n, Py_ssize_t first, Py_ssize_t last, Py_ssize_t from_token, Py_ssize_t to_token,
                       int32_t *acc, Py_ssize_t *done) noexcept nogil:
    """Outputs of strips' vectors `first` to `last` for some of the present tokens. Several tokens go through some of the
    joined columns together, and bring the next ones into L2 meanwhile, each a share.

    acc, done: room for the tokens' sums, and for how many of their columns have been added.
    """
    cdef const linears_call *c = n.c
    cdef Py_ssize_t n_vectors = strip_vectors(c.n_out[0]), width = (last - first) * STRIP_K
    cdef Py_ssize_t tokens = to_token - from_token, start = 0, some, ahead, m, i, j, k, count
    cdef Py_ssize_t together = FEW_NEAR_COLUMNS if c.M <= c.chosen.limits.few_tokens else NEAR_COLUMNS
    cdef const uint8_t *strips = c.strips + first * STRIP_BYTES
    cdef const int32_t *ids
    if c.M == 1:
        c.chosen.strip_columns(strips, n_vectors, last - first, n.ids, n.values, n.counts[0], acc, NULL, 0)
        finish_columns(c, 0, n.x_sum[0], n.x_quant_scale[0], first, last, acc)
        return
    memset(acc, 0, tokens * width * sizeof(int32_t))
    memset(done, 0, tokens * sizeof(Py_ssize_t))
    while start < n.n_joined:
        some = min(together, n.n_joined - start)
        ahead = min(together, n.n_joined - start - some)
        for m in range(tokens):
            i, count, ids = done[m], n.counts[from_token + m], n.ids + (from_token + m) * n.room
            j = i
            while j < count and ids[j] <= n.joined[start + some - 1]:
                j += 1
            done[m] = j
            k = start + some + ahead * m // tokens  # a share of the next columns
            c.chosen.strip_columns_near(strips, n_vectors, last - first, ids + i, n.values + (from_token + m) * n.room + i,
                                        j - i, acc + m * width, n.joined + k, start + some + ahead * (m + 1) // tokens - k)
        start += some
    for m in range(tokens):
        c.chosen.strip_order(acc + m * width, last - first)
        i = n.block + from_token + m
        finish_columns(c, i, n.x_sum[i], n.x_quant_scale[i], first, last, acc + m * width)
