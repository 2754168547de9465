# Part of _cpu.pyx: dense matrices (dense_rows.h, dense_amx.h, blocks_amx.h), and the screened head (head_screen.h).


cdef const void *_matrix(w, int blocks, Py_ssize_t *N, Py_ssize_t *K, int *kind) except NULL:
    """The rows of a float32 matrix, a bfloat16 one given as uint16, a float16 one given as int16, or one of blocks given
    as uint8, whose kind is `blocks`. kind: see dense_blocks.h."""
    cdef const uint8_t[:, ::1] packed
    if w.dtype.itemsize == 1:
        packed = w
        if not Q8_0 <= blocks < N_DENSE_KINDS or packed.shape[1] % DENSE_KINDS[blocks].bytes:
            raise ValueError(f"rows of {packed.shape[1]} bytes are no blocks of kind {blocks}")
        N[0], K[0], kind[0] = packed.shape[0], packed.shape[1] // DENSE_KINDS[blocks].bytes * DENSE_KINDS[blocks].values, blocks
        return &packed[0, 0]
    cdef const float[:, ::1] wide
    cdef const uint16_t[:, ::1] half
    cdef const int16_t[:, ::1] ieee
    if w.dtype.itemsize == 4:
        wide = w
        N[0], K[0], kind[0] = wide.shape[0], wide.shape[1], 0
        check_aligned(<size_t> &wide[0, 0])
        return &wide[0, 0]
    if w.dtype.kind == "i":
        ieee = w
        N[0], K[0], kind[0] = ieee.shape[0], ieee.shape[1], 2
        check_aligned(<size_t> &ieee[0, 0], sizeof(int16_t))
        return &ieee[0, 0]
    half = w
    N[0], K[0], kind[0] = half.shape[0], half.shape[1], 1
    check_aligned(<size_t> &half[0, 0], sizeof(uint16_t))
    return &half[0, 0]


cdef enum:
    DENSE_UNIT = 32  # rows: what a thread takes at a time

cdef struct dense_call:
    const float *x
    const kernel_set *chosen
    int threads
    Py_ssize_t M, K, count
    const char *ws[MAX_LINEARS]
    float *ys[MAX_LINEARS]
    int kinds[MAX_LINEARS]
    Py_ssize_t n_out[MAX_LINEARS]


cdef void gather_16(const char *w, const int64_t *rows, Py_ssize_t n, Py_ssize_t size, char *out) noexcept nogil:
    """n rows of `size` bytes, the first n if `rows` is NULL, and zeros up to 16"""
    cdef Py_ssize_t i
    for i in range(n):
        memcpy(out + i * size, w + (i if rows == NULL else rows[i]) * size, size)
    memset(out + n * size, 0, (16 - n) * size)


cdef inline Py_ssize_t units_of(Py_ssize_t n_out) noexcept nogil:
    return (n_out + DENSE_UNIT - 1) // DENSE_UNIT


cdef void multiply_units(const dense_call *c, Py_ssize_t at, Py_ssize_t end, const float *tokens, float *wide,
                         char **parts, const char *last_rows) noexcept nogil:
    """The rows of the units at .. end of all matrices times all tokens"""
    cdef Py_ssize_t i, first, whole, stop, M = c.M, K = c.K, N, row_bytes
    cdef const tile_method *tiles
    cdef const char *of_method
    for i in range(c.count):
        N, row_bytes, tiles = c.n_out[i], dense_row_bytes(c.kinds[i], K), by_tiles(c.chosen, c.kinds[i], K)
        first, stop = max(at, <Py_ssize_t> 0) * DENSE_UNIT, min(end * DENSE_UNIT, N)
        if first < stop and tiles != NULL:
            whole, of_method = stop // 16 * 16, parts[tiles - c.chosen.tiles]
            tiles.multiply(c.kinds[i], c.ws[i] + first * row_bytes, whole - first, K, of_method, M, c.ys[i] + first, N)
            if whole < stop:
                tiles.multiply(c.kinds[i], last_rows + i * 16 * K * 2, stop - whole, K, of_method, M, c.ys[i] + whole, N)
        elif first < stop:
            c.chosen.dense_rows(c.kinds[i], c.ws[i] + first * row_bytes, stop - first, K, tokens, M, c.ys[i] + first, N, wide)
        at, end = at - units_of(N), end - units_of(N)


cdef Py_ssize_t run_dense(const void *call) noexcept nogil:
    cdef const dense_call *c = <const dense_call *> call
    cdef Py_ssize_t i, m, part, N, M = c.M, K = c.K, units = 0, work = 0
    cdef size_t bytes[N_TILE_METHODS]  # of tokens as a method takes them, which some matrix does
    cdef char *parts[N_TILE_METHODS]
    cdef const tile_method *tiles
    cdef bint rows = False
    memset(bytes, 0, sizeof(bytes))
    for i in range(c.count):
        units, work = units + units_of(c.n_out[i]), work + c.n_out[i] * K * (4 if c.kinds[i] == 0 else 2) * M
        tiles = by_tiles(c.chosen, c.kinds[i], K)
        rows = rows or tiles == NULL
        if tiles != NULL:
            bytes[tiles - c.chosen.tiles] = (tiles.bytes(M, K) + 63) // 64 * 64
    cdef int team = threads_for(work, DENSE_BYTES_PER_THREAD, c.threads)
    cdef size_t parts_bytes = bytes[0] + bytes[1]
    cdef Py_ssize_t wide = 2 * DENSE_UNIT * packed_columns(K) if rows and M > 1 else 0  # of each thread
    parts[0] = <char *> allocate(parts_bytes + (c.count * 16 * K * 2 if parts_bytes else 0), 1)
    parts[1] = parts[0] + bytes[0]
    cdef char *last_rows = parts[0] + parts_bytes  # of each matrix 16, with at most 2 bytes per weight
    cdef Py_ssize_t of_tokens = M * packed_columns(K) if rows else 0
    cdef float *tokens = <float *> allocate(of_tokens + team * wide, sizeof(float))
    if parts[0] == NULL or tokens == NULL:
        free(parts[0])
        free(tokens)
        return NO_MEMORY
    if rows:
        c.chosen.dense_pack(c.x, M, K, tokens)
    for i in range(c.count):
        N = c.n_out[i]
        if N % 16 and by_tiles(c.chosen, c.kinds[i], K) != NULL:
            part = dense_row_bytes(c.kinds[i], K)
            gather_16(c.ws[i] + (N - N % 16) * part, NULL, N % 16, part, last_rows + i * 16 * K * 2)
    for i in range(N_TILE_METHODS):
        if bytes[i] and M <= 16:
            c.chosen.tiles[i].split(c.x, M, K, 0, parts[i])
        elif bytes[i]:
            for m in prange(0, M, 16, num_threads=threads_for(M * K, FLOATS_PER_THREAD, c.threads), schedule="static"):
                c.chosen.tiles[i].split(c.x, M, K, m, parts[i])
    for part in prange(team, num_threads=team, schedule="static"):
        multiply_units(c, part * units // team, (part + 1) * units // team, tokens,
                       tokens + (of_tokens + part * wide) if wide else NULL, parts, last_rows)
    free(parts[0])
    free(tokens)
    return OK


def dense_linears(const float[:, ::1] x, list ws, ys, int threads, Py_ssize_t kernels, Tape tape=None, *, blocks):
    """Several dense matrices of one x (M, K): ys[i] (M, N_i) = x ws[i]^T. Threads take equal numbers of rows of all.

    ws: (N_i, K) each, see `_matrix`; blocks: the kind of each that is given as uint8, else 0
    """
    cdef dense_call c
    cdef Py_ssize_t i, K
    cdef float[:, ::1] y
    c.M, c.K, c.count, c.threads, c.chosen = x.shape[0], x.shape[1], len(ws), threads, check_set(kernels, threads)
    if c.count > MAX_LINEARS or len(ys) != c.count or len(blocks) != c.count:
        raise ValueError(f"dense_linears: {c.count} weights, {len(ys)} results, {len(blocks)} kinds of blocks")
    for i in range(c.count):
        y = ys[i]
        c.ws[i] = <const char *> _matrix(ws[i], blocks[i], &c.n_out[i], &K, &c.kinds[i])
        if y is None or K != c.K or y.shape[0] != c.M or y.shape[1] != c.n_out[i]:
            raise ValueError(f"dense_linears: x {c.M, c.K}, weight {c.n_out[i], K}, result {y.shape[0], y.shape[1]}")
        c.ys[i] = &y[0, 0] if c.M else NULL
        check_aligned(<size_t> c.ys[i])
    if c.M == 0 or c.count == 0:
        return
    c.x = &x[0, 0]
    check_aligned(<size_t> c.x)
    if tape is None:
        make_call(run_dense, &c, "{} tokens of {} activations", c.M, c.K)
    else:
        tape.record(run_dense, &c, sizeof(c), (<size_t> c.x,), tuple(ws), c.ys, c.count)


# -- the screened head: head_screen.h ----------------------------------------------------------------------------------


def screen_pack(w, int8_t[:, ::1] q, float[:, ::1] facts, int threads, Py_ssize_t kernels):
    """w (N, K) float32, bfloat16 as uint16, or float16 as int16 -> q (N, wide) int8 and facts (N, 3)"""
    cdef Py_ssize_t N, K, n, wide = q.shape[1]
    cdef int kind
    cdef const char *rows = <const char *> _matrix(w, 0, &N, &K, &kind)
    cdef const kernel_set *chosen = check_set(kernels, threads)
    if q.shape[0] != N or facts.shape[0] != N or facts.shape[1] != 3 or wide < K or wide % 64 or K >= 1 << 22:
        raise ValueError(f"screen_pack: w {N, K}, q {q.shape[0], wide}, facts {facts.shape[0], facts.shape[1]}")
    check_aligned(<size_t> &facts[0, 0])
    cdef Py_ssize_t size = K * (4 if kind == 0 else 2)
    cdef int team = threads_for(N * size, DENSE_BYTES_PER_THREAD, threads)
    for n in prange(N, nogil=True, num_threads=team, schedule="static"):
        chosen.screen_pack(kind, rows + n * size, K, wide, &q[n, 0], &facts[n, 0])


def screen_rows(const float[:, ::1] x, const int8_t[:, ::1] q, const float[:, ::1] facts, float[:, ::1] lower,
                float[:, ::1] upper, int threads, Py_ssize_t kernels):
    """x (M, K), results of screen_pack -> lower and upper (M, N), bounds of the logits that dense_matmul computes.

    Returns -1, or the first row of x that holds NaN or Inf.
    """
    cdef Py_ssize_t M = x.shape[0], K = x.shape[1], N = q.shape[0], wide = q.shape[1], m, block, bad = -1
    cdef Py_ssize_t n_blocks = (N + 63) // 64
    if (facts.shape[0] != N or facts.shape[1] != 3 or wide < K or wide % 64 or lower.shape[0] != M
            or lower.shape[1] != N or upper.shape[0] != M or upper.shape[1] != N):
        raise ValueError(f"screen_rows: x {M, K}, q {N, wide}, lower {lower.shape[0], lower.shape[1]}")
    cdef const kernel_set *chosen = check_set(kernels, threads)
    check_aligned(<size_t> &x[0, 0] | <size_t> &facts[0, 0] | <size_t> &lower[0, 0] | <size_t> &upper[0, 0])
    if M == 0 or N == 0:
        return -1
    cdef bint arranges = chosen.screen_arrange != NULL and M > SCREEN_TILE_TOKENS
    cdef int16_t *tokens = <int16_t *> allocate(M, wide * sizeof(int16_t))
    cdef int16_t *arranged = <int16_t *> allocate(M + 15, wide * sizeof(int16_t)) if arranges else NULL
    cdef double *token_facts = <double *> allocate(M, 3 * sizeof(double))
    if tokens == NULL or token_facts == NULL or arranges and arranged == NULL:
        free(tokens)
        free(arranged)
        free(token_facts)
        raise MemoryError(f"no memory for {M} tokens of {K} activations")
    cdef int team = threads_for(N * wide * M, DENSE_BYTES_PER_THREAD, threads)
    with nogil:
        for m in range(M):
            if bad < 0 and not chosen.screen_token(&x[m, 0], K, wide, tokens + m * wide, token_facts + 3 * m):
                bad = m
        if bad < 0 and arranges:
            chosen.screen_arrange(tokens, M, wide, arranged)
        if bad < 0:
            for block in prange(n_blocks, num_threads=team, schedule="static"):
                chosen.screen_rows(&q[block * 64, 0], min(<Py_ssize_t> 64, N - block * 64), K, wide, &facts[block * 64, 0],
                                   arranged if arranges else tokens, M, token_facts, &lower[0, block * 64],
                                   &upper[0, block * 64], N)
        free(tokens)
        free(arranged)
        free(token_facts)
    return bad


def dense_rows(const float[::1] x, w, const int64_t[::1] rows, float[::1] y, int threads, Py_ssize_t kernels):
    """y[i] = w[rows[i]] . x, the bits that dense_matmul gives; w (N, K) float32, bfloat16 as uint16, or float16 as int16"""
    cdef Py_ssize_t N, K, i, n = rows.shape[0]
    cdef int kind
    cdef const char *first = <const char *> _matrix(w, 0, &N, &K, &kind)
    cdef const kernel_set *chosen = check_set(kernels, threads)
    check_aligned(<size_t> &x[0] | <size_t> &y[0])
    check_aligned(<size_t> &rows[0], sizeof(int64_t))
    if x.shape[0] != K or y.shape[0] != n:
        raise ValueError(f"dense_rows: x {x.shape[0]}, w {N, K}, {n} rows, y {y.shape[0]}")
    for i in range(n):
        if rows[i] < 0 or rows[i] >= N:
            raise ValueError(f"dense_rows: row {rows[i]} of {N}")
    if n == 0:
        return
    cdef Py_ssize_t size = K * (4 if kind == 0 else 2), blocks = (n + 15) // 16, some
    cdef int team = threads_for(n * size, DENSE_BYTES_PER_THREAD, threads)
    cdef char *parts
    cdef char *copies
    cdef size_t parts_bytes
    cdef const tile_method *tiles = by_tiles(chosen, kind, K)
    if tiles != NULL:
        parts_bytes = (tiles.bytes(1, K) + 63) // 64 * 64
        parts = <char *> allocate(parts_bytes + team * 16 * size, 1)
        if parts == NULL:
            raise MemoryError(f"no memory for {K} activations and {team} times 16 rows")
        with nogil:
            tiles.split(&x[0], 1, K, 0, parts)
            for i in prange(blocks, num_threads=team, schedule="static"):
                copies, some = parts + parts_bytes + threadid() * 16 * size, min(<Py_ssize_t> 16, n - i * 16)
                gather_16(first, &rows[i * 16], some, size, copies)
                tiles.multiply(kind, copies, some, K, parts, 1, &y[i * 16], n)
            free(parts)
        return
    for i in prange(n, nogil=True, num_threads=team, schedule="static"):
        chosen.dense_rows(kind, first + rows[i] * size, 1, K, &x[0], 1, &y[i], 1, NULL)
