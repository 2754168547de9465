# Part of _cpu.pyx: layers of the KV cache, appending to them, and attention over them.


cdef class KVLayer:
    """One layer's keys and values (pages, page_size, G, d) as the kernels take them: float32, float16 given as uint16,
    or int8 with scales (pages, page_size, G). Keeps the arrays alive.

    In memory they are in this order, or by heads: (G, pages, page_size, d). Then the rows of a head are adjacent, and
    the hardware prefetcher follows them (attention_steps.h).
    """
    cdef object arrays
    cdef kv_view view
    cdef Py_ssize_t pages, page_size, G, d, head_rows  # rows of d numbers from head to head

    def __cinit__(self, keys, values, key_scales=None, value_scales=None):
        self.arrays = keys, values, key_scales, value_scales
        self.pages, self.page_size, self.G, self.d = keys.shape
        if keys.shape != values.shape or keys.dtype != values.dtype or keys.strides != values.strides or 0 in keys.shape:
            raise ValueError(f"KVLayer: keys {keys.dtype} {keys.shape}, values {values.dtype} {values.shape}")
        by_heads = not keys.flags.c_contiguous
        self.view.keys = self._pool(keys, key_scales, by_heads)
        self.view.values = self._pool(values, value_scales, by_heads)
        self.view.page_size, self.view.scale_stride = self.page_size, 1 if by_heads else self.G
        self.view.stride, self.head_rows = self.view.scale_stride * self.d, self.pages * self.page_size if by_heads else 1

    cdef kv_pool _pool(self, array, scales, by_heads) except *:
        cdef float[:, :, :, ::1] wide  # not const: `append` writes them
        cdef uint16_t[:, :, :, ::1] half
        cdef int8_t[:, :, :, ::1] narrow
        cdef float[:, :, ::1] scale
        cdef kv_pool pool
        pool.rows, pool.scales = NULL, NULL
        if scales is not None and scales.shape != array.shape[:3]:
            raise ValueError(f"KVLayer: keys {array.shape}, scales {scales.shape}")
        if by_heads:
            array, scales = array.transpose(2, 0, 1, 3), None if scales is None else scales.transpose(2, 0, 1)
        if array.dtype.itemsize == 2:
            half = array
            self.view.kind, pool.rows = KV_FLOAT16, &half[0, 0, 0, 0]
        elif array.dtype.itemsize == 1:
            narrow, scale = array, scales
            if scale is None:
                raise ValueError(f"KVLayer: int8 keys {array.shape} without scales")
            self.view.kind, pool.rows, pool.scales = KV_INT8, &narrow[0, 0, 0, 0], &scale[0, 0, 0]
        else:
            wide = array
            self.view.kind, pool.rows = KV_FLOAT32, &wide[0, 0, 0, 0]
        check_aligned(<size_t> pool.rows, array.dtype.itemsize)
        check_aligned(<size_t> pool.scales)
        return pool


cdef inline Py_ssize_t visible_keys(Py_ssize_t position, Py_ssize_t window) noexcept nogil:
    return window if window and window <= position else position + 1


cdef struct layer_tokens:
    kv_view view
    Py_ssize_t pages, G, d, head_rows  # of the layer
    const int32_t *page_table
    Py_ssize_t table_slots, table_columns
    const int64_t *slots
    const int64_t *positions
    Py_ssize_t M


cdef int set_tokens(layer_tokens *t, KVLayer layer, const int32_t[:, ::1] page_table, const int64_t[::1] slots,
                    const int64_t[::1] positions) except -1:
    t.view, t.pages, t.G, t.d, t.head_rows = layer.view, layer.pages, layer.G, layer.d, layer.head_rows
    t.page_table, t.table_slots, t.table_columns = &page_table[0, 0], page_table.shape[0], page_table.shape[1]
    t.slots, t.positions, t.M = &slots[0], &positions[0], slots.shape[0]
    check_aligned(<size_t> t.page_table)
    return check_aligned(<size_t> t.slots | <size_t> t.positions, sizeof(int64_t))


cdef inline bint has_pages(const layer_tokens *t, Py_ssize_t m, Py_ssize_t first) noexcept nogil:
    """Whether there is a page for each position of token m from `first` to its own."""
    cdef Py_ssize_t page_size = t.view.page_size, column
    if t.positions[m] < 0 or t.slots[m] < 0 or t.slots[m] >= t.table_slots:
        return False
    if t.positions[m] // page_size >= t.table_columns:
        return False
    cdef const int32_t *pages = t.page_table + t.slots[m] * t.table_columns
    for column in range(first // page_size, t.positions[m] // page_size + 1):
        if pages[column] < 0 or pages[column] >= t.pages:
            return False
    return True


cdef struct rotation:  # RoPE: the cos and sin of each token, or NULL for none
    const float *cos
    const float *sin
    const kernel_set *chosen


cdef void set_rotation(rotation *t, const float[:, ::1] cos, const float[:, ::1] sin, Py_ssize_t M, Py_ssize_t d,
                       Py_ssize_t kernels) except *:
    t.cos, t.sin, t.chosen = NULL, NULL, check_set(kernels)
    if cos is None or sin is None:
        return
    if cos.shape[0] != M or sin.shape[0] != M or 2 * cos.shape[1] != d or 2 * sin.shape[1] != d:
        raise ValueError(f"rope: {M} heads of {d}, cos {cos.shape[0], cos.shape[1]}, sin {sin.shape[0], sin.shape[1]}")
    if M:
        t.cos, t.sin = &cos[0, 0], &sin[0, 0]
        check_aligned(<size_t> t.cos | <size_t> t.sin)


cdef inline const float *rotate(const rotation *t, const float *x, Py_ssize_t m, Py_ssize_t heads, Py_ssize_t d,
                                float *scratch) noexcept nogil:
    """x, some heads of token m: unchanged, or rotated into the scratch"""
    if t.cos == NULL:
        return x
    t.chosen.rope(x, heads, d // 2, t.cos + m * (d // 2), t.sin + m * (d // 2), scratch)
    return scratch


cdef struct append_call:
    layer_tokens to
    rotation of_k
    const float *k
    const float *v
    int threads


cdef inline void store_row(int kind, const float *x, size_t d, const kv_pool *pool, size_t row) noexcept nogil:
    kv_store(kind, x, d, <void *> pool.rows, row, <float *> pool.scales + row if pool.scales != NULL else NULL)


cdef Py_ssize_t run_append(const void *call) noexcept nogil:
    cdef const append_call *c = <const append_call *> call
    cdef Py_ssize_t m, M = c.to.M, row = c.to.G * c.to.d, bad = OK
    cdef int kind = c.to.view.kind, team = threads_for(2 * M * row, FLOATS_PER_THREAD, c.threads)
    cdef size_t part = thread_bytes(row * sizeof(float))
    cdef char *threads_scratch = <char *> allocate(team, part)
    cdef float *scratch = <float *> threads_scratch
    if scratch == NULL:
        return NO_MEMORY
    for m in range(M):
        if not (has_pages(&c.to, m, c.to.positions[m]) and (kind == KV_FLOAT32 or (
                kv_can_store(kind, rotate(&c.of_k, c.k + m * row, m, c.to.G, c.to.d, scratch), row)
                and kv_can_store(kind, c.v + m * row, row)))):
            bad = m
            break
    if bad == OK:
        with parallel(num_threads=team):
            scratch = <float *> (threads_scratch + threadid() * part)
            for m in prange(M, schedule="static"):
                append_token(c, m, rotate(&c.of_k, c.k + m * row, m, c.to.G, c.to.d, scratch))
    free(threads_scratch)
    return bad


cdef inline void append_token(const append_call *c, Py_ssize_t m, const float *k) noexcept nogil:
    cdef Py_ssize_t g, G = c.to.G, d = c.to.d, page_size = c.to.view.page_size
    cdef const float *v = c.v + m * G * d
    cdef Py_ssize_t row = c.to.page_table[c.to.slots[m] * c.to.table_columns + c.to.positions[m] // page_size] * page_size
    row = (row + c.to.positions[m] % page_size) * <Py_ssize_t> c.to.view.scale_stride
    for g in range(G):
        store_row(c.to.view.kind, k + g * d, d, &c.to.view.keys, row + g * c.to.head_rows)
        store_row(c.to.view.kind, v + g * d, d, &c.to.view.values, row + g * c.to.head_rows)


def append(KVLayer layer not None, const int32_t[:, ::1] page_table, const int64_t[::1] slots,
           const int64_t[::1] positions, const float[:, :, ::1] k, const float[:, :, ::1] v, int threads,
           Py_ssize_t kernels, Tape tape=None, *, const float[:, ::1] cos=None, const float[:, ::1] sin=None):
    """Store k and v (M, G, d) in a layer at their slots and positions, like backends/paged_cache.narrow.

    cos, sin: k is first rotated by these angles (M, d/2).

    Returns -1, or the first token whose position has no page or that does not fit the cache's dtype; then nothing is
    written.
    """
    cdef append_call c
    cdef Py_ssize_t M = k.shape[0]
    if (slots.shape[0] != M or positions.shape[0] != M or v.shape[0] != M
            or k.shape[1] != layer.G or v.shape[1] != layer.G or k.shape[2] != layer.d or v.shape[2] != layer.d):
        raise ValueError(f"append: k {M, k.shape[1], k.shape[2]}, v {v.shape[0], v.shape[1], v.shape[2]}")
    set_tokens(&c.to, layer, page_table, slots, positions)
    set_rotation(&c.of_k, cos, sin, M, layer.d, kernels)
    c.k, c.v, c.threads = &k[0, 0, 0], &v[0, 0, 0], threads
    check_set(kernels, threads)
    check_aligned(<size_t> c.k | <size_t> c.v)
    if tape is None:
        return make_call(run_append, &c, "the keys of {} tokens", M)
    addresses = [<size_t> c.k, <size_t> c.v, *addresses_of(&c.to, &c.of_k)]
    tape.record(run_append, &c, sizeof(c), addresses, (layer, page_table))
    return OK


cdef list addresses_of(const layer_tokens *t, const rotation *by):
    """The addresses of the activations that these hold."""
    return [<size_t> t.slots, <size_t> t.positions] + ([<size_t> by.cos, <size_t> by.sin] if by.cos != NULL else [])


cdef struct attention_call:
    layer_tokens of
    rotation of_q
    const float *q
    float *z
    Py_ssize_t H, window
    const kernel_set *chosen
    int threads


cdef Py_ssize_t run_attention(const void *call) noexcept nogil:
    cdef const attention_call *c = <const attention_call *> call
    cdef attention_call part
    cdef Py_ssize_t M = c.of.M, d = c.of.d, m, last, end, done = 0, bad = OK
    for m in range(M):
        if not has_pages(&c.of, m, c.of.positions[m]):  # first: the number of keys would overflow
            return m
        if not has_pages(&c.of, m, c.of.positions[m] + 1 - visible_keys(c.of.positions[m], c.window)):
            return m
    if c.chosen.attend_sliced == NULL or d % 16 or d > SLICE_MAX_D:
        return attend_runs(c)
    for m in range(M):
        if m and follows(c, m):
            continue
        last = m
        while last + 1 < M and follows(c, last + 1):
            last += 1
        end = last + 1
        if can_slice(c, m, end - m):
            set_part(c, done, m, &part)
            bad = attend_runs(&part) if bad == OK else bad
            set_part(c, m, end, &part)
            bad = attend_prompt(&part) if bad == OK else bad
            done = end
    set_part(c, done, M, &part)
    return attend_runs(&part) if bad == OK else bad


cdef inline bint follows(const attention_call *c, Py_ssize_t m) noexcept nogil:
    """Whether token m follows token m - 1 in its sequence."""
    return c.of.slots[m] == c.of.slots[m - 1] and c.of.positions[m] == c.of.positions[m - 1] + 1


cdef inline void set_part(const attention_call *c, Py_ssize_t first, Py_ssize_t end, attention_call *part) noexcept nogil:
    """The attention of tokens first .. end - 1."""
    part[0] = c[0]
    part.of.M, part.of.slots, part.of.positions = end - first, c.of.slots + first, c.of.positions + first
    part.q, part.z = c.q + first * c.H * c.of.d, c.z + first * c.H * c.of.d
    if c.of_q.cos != NULL:
        part.of_q.cos, part.of_q.sin = c.of_q.cos + first * (c.of.d // 2), c.of_q.sin + first * (c.of.d // 2)


cdef inline Py_ssize_t tokens_of_run(const attention_call *c, Py_ssize_t max_keys) noexcept nogil:
    """The number of tokens that go through at most `max_keys` keys together."""
    cdef Py_ssize_t rows = min(<Py_ssize_t> ATTEND_ROWS, MAX_RUN_SCORES // max_keys)
    return max(<Py_ssize_t> 1, rows // max(<Py_ssize_t> 1, c.H // c.of.G))


cdef inline Py_ssize_t keys_of_prompt(const attention_call *c, Py_ssize_t first, Py_ssize_t tokens) noexcept nogil:
    """The number of keys that any of these consecutive tokens sees."""
    return visible_keys(c.of.positions[first], c.window) + tokens - 1


cdef inline bint can_slice(const attention_call *c, Py_ssize_t first, Py_ssize_t tokens) noexcept nogil:
    cdef kv_slices slices
    slices.kv.n_keys, slices.d = keys_of_prompt(c, first, tokens), c.of.d
    return (tokens * (c.H // c.of.G) >= MIN_SLICED_ROWS and slices.kv.n_keys >= MIN_SLICED_KEYS
            and tokens_of_run(c, slices.kv.n_keys) > 1 and kv_slices_place(&slices, NULL) <= MAX_SLICED_BYTES)


cdef Py_ssize_t attend_prompt(const attention_call *c) noexcept nogil:
    """Attention of consecutive tokens of a sequence. Head by head, threads slice the keys and values, then take runs."""
    cdef Py_ssize_t M = c.of.M, d = c.of.d, G = c.of.G, R = c.H // G, n_keys = keys_of_prompt(c, 0, M)
    cdef Py_ssize_t max_run = tokens_of_run(c, n_keys), runs = (M + max_run - 1) // max_run, chunks = slice_chunks(n_keys)
    cdef Py_ssize_t g = 0, item, m = 0, rows = R * max_run
    cdef int team = threads_for(n_keys * M * c.H * d, ATTENTION_FLOATS_PER_THREAD, c.threads)
    cdef size_t attend_bytes = thread_bytes(attend_workspace(rows, d, n_keys, 1) * sizeof(double)), part = (
        attend_bytes + thread_bytes(rows * d * sizeof(float)) + thread_bytes(attend_sliced_workspace(rows, d)))
    cdef char *scratch = <char *> allocate(team, part)
    cdef attend_call *calls = <attend_call *> allocate(team, sizeof(attend_call))
    cdef Py_ssize_t *first = <Py_ssize_t *> allocate(runs + 3, sizeof(Py_ssize_t))  # of each run, then of the whole
    cdef kv_slices *slices = <kv_slices *> allocate(G, sizeof(kv_slices))
    cdef kv_slices shape
    shape.kv.n_keys, shape.d = n_keys, d
    cdef void *memory = allocate(1, kv_slices_place(&shape, NULL))  # of one head after the other
    cdef bint is_ready = scratch != NULL and calls != NULL and first != NULL and slices != NULL and memory != NULL
    if is_ready:
        for item in range(runs):
            first[item] = item * max_run
        first[runs], first[runs + 1], first[runs + 2] = M, 0, M
        for g in range(G):
            set_view(c, g, 1, first + runs + 1, &m, &item, &slices[g].kv)
            slices[g].d = d
            kv_slices_place(slices + g, memory)
        with parallel(num_threads=team):
            for g in range(G):
                for item in prange(chunks, schedule="dynamic"):
                    c.chosen.slice_chunk(slices + g, item)
                for item in prange(runs, schedule="dynamic"):  # the last tokens first: they have the most keys
                    attend_run(c, g, runs - 1 - item, runs, first, slices + g, scratch + threadid() * part, attend_bytes,
                               calls + threadid())
    free(scratch)
    free(calls)
    free(first)
    free(slices)
    free(memory)
    return OK if is_ready else NO_MEMORY


cdef inline void attend_run(const attention_call *c, Py_ssize_t g, Py_ssize_t run, Py_ssize_t runs, const Py_ssize_t *first,
                            const kv_slices *slices, char *scratch, size_t attend_bytes, attend_call *call) noexcept nogil:
    set_run(c, g * runs + run, runs, first, False, scratch, attend_bytes, call)
    call.is_fetched, call.next.n_keys = 0, 0
    c.chosen.attend_sliced(call, slices, scratch + attend_bytes + thread_bytes(call.T * call.R * call.d * sizeof(float)))


cdef Py_ssize_t attend_runs(const attention_call *c) noexcept nogil:
    """Attention of any tokens, whose keys have pages."""
    cdef attend_fn attend = c.chosen.attend
    cdef const int64_t *slots = c.of.slots
    cdef const int64_t *positions = c.of.positions
    cdef Py_ssize_t M = c.of.M, H = c.H, d = c.of.d, G = c.of.G, R = H // G, window = c.window
    cdef Py_ssize_t m, item, n_keys, max_keys = 1, work = 0, divided = 0, pieces, rows, max_run, runs = 0
    for m in range(M):
        n_keys = visible_keys(positions[m], window)
        max_keys = max(max_keys, n_keys)
        work += n_keys * H * d
    if M == 0:
        return OK
    cdef int team = threads_for(work, ATTENTION_FLOATS_PER_THREAD, c.threads)
    # runs of at most max_run consecutive tokens of a sequence
    max_run = tokens_of_run(c, max_keys)
    cdef Py_ssize_t *first = <Py_ssize_t *> allocate(M + 1, sizeof(Py_ssize_t))  # first token of each run
    if first == NULL:
        return NO_MEMORY
    for m in range(M):
        if m == 0 or m - first[runs - 1] == max_run or not follows(c, m):
            first[runs] = m
            runs += 1
    first[runs] = M
    max_keys += max_run
    if runs * G < 8 * team and max_keys > 2 * SUM_KEYS:
        divided = runs * G % team
    # Each thread's scratch: the workspace of `attend`, followed by the rotated rows of q.
    rows = R * min(M, max_run)
    cdef size_t workspace_bytes = thread_bytes(
        attend_workspace(rows, d, max_keys, max_keys // SUM_KEYS + 2 if divided else 1) * sizeof(double))
    cdef size_t part = workspace_bytes + thread_bytes(rows * d * sizeof(float) if c.of_q.cos != NULL else 0)
    cdef char *scratch = <char *> allocate(team, part)
    cdef attend_call *calls = <attend_call *> allocate(team, sizeof(attend_call))  # each thread's, then the divided ones
    if scratch == NULL or calls == NULL:
        free(scratch)
        free(calls)
        free(first)
        return NO_MEMORY
    for m in range(team):
        calls[m].next_item = -1
    pieces = team
    with parallel(num_threads=team):
        # Dynamic, because a prompt's later tokens have more keys.
        for item in prange(runs * G - divided, schedule="dynamic"):
            set_run(c, item, runs, first, False, scratch + threadid() * part, workspace_bytes, calls + threadid())
            set_next(c, item, item + team, runs, runs * G - divided, first, calls + threadid())
            attend_all(attend, calls + threadid())
        for item in prange(divided, schedule="static"):
            set_run(c, runs * G - divided + item, runs, first, True, scratch + item * part, workspace_bytes,
                    calls + item)
            calls[item].is_fetched, calls[item].next.n_keys = 0, 0
            attend(calls + item, ATTEND_BEGIN, 0, 0)
        for item in prange(divided * pieces, schedule="dynamic"):
            attend_piece(attend, calls + item // pieces, ATTEND_SCORES, item % pieces, pieces)
        for item in prange(divided * rows, schedule="dynamic"):
            attend_piece(attend, calls + item // rows, ATTEND_SOFTMAX, item % rows, rows)
        for item in prange(divided * pieces, schedule="dynamic"):
            attend_piece(attend, calls + item // pieces, ATTEND_VALUES, item % pieces, pieces)
        for item in prange(divided, schedule="static"):
            attend(calls + item, ATTEND_END, 0, 0)
    free(scratch)
    free(calls)
    free(first)
    return OK


cdef inline void attend_piece(attend_fn attend, const attend_call *call, int step, Py_ssize_t piece,
                              Py_ssize_t pieces) noexcept nogil:
    cdef size_t of = call.T * call.R if step == ATTEND_SOFTMAX else attend_blocks(&call.kv)
    attend(call, step, of * piece // pieces, of * (piece + 1) // pieces)


def attention(const float[:, :, ::1] q, KVLayer layer not None, const int32_t[:, ::1] page_table,
              const int64_t[::1] slots, const int64_t[::1] positions, Py_ssize_t window, float[:, :, ::1] z,
              int threads, Py_ssize_t kernels, Tape tape=None, *, const float[:, ::1] cos=None,
              const float[:, ::1] sin=None):
    """q (M, H, d), a layer's keys and values, page_table (slots, pages per slot) -> z (M, H, d). window 0: no limit.
    cos, sin: q is first rotated by these angles (M, d/2).

    Returns -1, or the first token that sees a position without a page.

    Threads take (run, kv head) pairs. A run is consecutive tokens of a sequence, at most ATTEND_ROWS query heads (fewer
    with very many keys). When pairs are few, so that threads would be idle at the end (5 kv heads on 2 threads: 3 to
    2), the threads divide the keys of the last ones. Sums are in blocks of keys (kv_cache.h), so no bit depends on it.
    Long prompts go to `attend_prompt` where the kernel set has slices: the same bits (attention_amx.h).
    """
    cdef attention_call c
    cdef Py_ssize_t M = q.shape[0], H = q.shape[1], d = q.shape[2], m
    if (M != slots.shape[0] or M != positions.shape[0] or layer.d != d or H == 0 or H % layer.G or window < 0
            or z.shape[0] != M or z.shape[1] != H or z.shape[2] != d):
        raise ValueError(f"attention: q {M, H, d}, keys {layer.pages, layer.page_size, layer.G, layer.d}")
    set_tokens(&c.of, layer, page_table, slots, positions)
    for m in range(M):
        if positions[m] < 0 or slots[m] < 0 or slots[m] >= page_table.shape[0]:
            raise ValueError(f"attention: slot {slots[m]} of {page_table.shape[0]}, position {positions[m]}")
    set_rotation(&c.of_q, cos, sin, M, d, kernels)
    c.q, c.z, c.H, c.window, c.chosen, c.threads = &q[0, 0, 0], &z[0, 0, 0], H, window, check_set(kernels, threads), threads
    check_aligned(<size_t> c.q | <size_t> c.z)
    if tape is None:
        return make_call(run_attention, &c, "the attention of {} tokens", M)
    addresses = [<size_t> c.q, <size_t> c.z, *addresses_of(&c.of, &c.of_q)]
    tape.record(run_attention, &c, sizeof(c), addresses, (layer, page_table))
    return OK


cdef inline void set_run(const attention_call *c, Py_ssize_t item, Py_ssize_t runs, const Py_ssize_t *first,
                         bint by_blocks, char *scratch, size_t workspace_bytes, attend_call *call) noexcept nogil:
    """The attention of one run and kv head."""
    cdef Py_ssize_t H = c.H, d = c.of.d, t, g = 0, m = 0
    cdef float *rotated = <float *> (scratch + workspace_bytes)
    call.T, call.R, call.d = set_view(c, item, runs, first, &m, &g, &call.kv), H // c.of.G, d
    call.q, call.q_stride = c.q + (m * H + g * call.R) * d, H * d
    call.z, call.z_stride = c.z + (m * H + g * call.R) * d, H * d
    call.window, call.scale = c.window, (<double> d) ** -0.5
    if c.of_q.cos != NULL:
        for t in range(<Py_ssize_t> call.T):
            rotate(&c.of_q, call.q + t * H * d, m + t, call.R, d, rotated + t * call.R * d)
        call.q, call.q_stride = rotated, call.R * d
    call.slots = attend_blocks(&call.kv) if by_blocks else 1
    attend_place(call, <double *> scratch)


cdef inline Py_ssize_t set_view(const attention_call *c, Py_ssize_t item, Py_ssize_t runs, const Py_ssize_t *first,
                                Py_ssize_t *m, Py_ssize_t *g, kv_view *kv) noexcept nogil:
    """The keys and values of one run, which begins at token m, and of kv head g. Returns its number of tokens."""
    cdef Py_ssize_t G = c.of.G, run
    if runs < c.of.M:  # head by head: a head's keys stay in L2 for all tokens of a prompt
        run, g[0] = item % runs, item // runs
    else:
        run, g[0] = item // G, item % G
    m[0] = first[run]
    cdef Py_ssize_t position = c.of.positions[m[0]], tokens = first[run + 1] - m[0], rows = g[0] * c.of.head_rows
    kv[0] = c.of.view
    cdef Py_ssize_t size = 4 if kv.kind == KV_FLOAT32 else 2 if kv.kind == KV_FLOAT16 else 1
    kv.keys.rows = <const char *> kv.keys.rows + rows * c.of.d * size
    kv.values.rows = <const char *> kv.values.rows + rows * c.of.d * size
    if kv.kind == KV_INT8:
        kv.keys.scales += rows
        kv.values.scales += rows
    kv.pages = c.of.page_table + c.of.slots[m[0]] * c.of.table_columns
    kv.first = position + 1 - visible_keys(position, c.window)
    kv.n_keys = position + tokens - kv.first
    return tokens


cdef inline void set_next(const attention_call *c, Py_ssize_t item, Py_ssize_t after, Py_ssize_t runs, Py_ssize_t end,
                          const Py_ssize_t *first, attend_call *call) noexcept nogil:
    """What the call may prefetch for the item `after` it: of single tokens, whose keys are not in the caches yet."""
    cdef Py_ssize_t m, g
    call.is_fetched, call.next.n_keys = call.next_item == item, 0
    call.next_item = -1
    if runs == c.of.M and after < end:
        call.next_item = after
        set_view(c, after, runs, first, &m, &g, &call.next)
