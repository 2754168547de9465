# Part of _cpu.pyx: a mixture of experts, from the router's scores to the sum. The experts are ternary by groups (group.h), or
# matrices in blocks by ggml's rule (ruled_steps.h).
# Plain version: `feed_forward` in families/moe.py, operation by operation.

cdef struct expert_stack:
    bint is_ruled
    int kind  # groups: of the scales; ruled: the form
    Py_ssize_t n_out, n_in, bytes  # ruled: bytes of a panel
    group_shape shape
    const uint8_t **panels
    const char **scales


cdef class ExpertPanels:
    """One linear of every expert of a layer: GroupPanels or RuledPanels of one shape, without biases and rotations."""
    cdef readonly Py_ssize_t count
    cdef expert_stack stack
    cdef tuple held

    def __cinit__(self, ws):
        cdef Py_ssize_t i
        self.held, self.count = tuple(ws), len(ws)
        kind = type(self.held[0]) if self.held else None
        if kind not in (GroupPanels, RuledPanels) or not all(type(each) is kind for each in self.held):
            raise TypeError("ExpertPanels: expected GroupPanels, or RuledPanels")
        self.stack.panels = <const uint8_t **> malloc(2 * self.count * sizeof(void *))
        if self.stack.panels == NULL:
            raise MemoryError(f"no memory for {self.count} experts")
        self.stack.scales = <const char **> (self.stack.panels + self.count)
        for i in range(self.count):
            fits = self._add_ruled(i, self.held[i]) if kind is RuledPanels else self._add_groups(i, self.held[i])
            if not fits:
                raise ValueError(f"ExpertPanels: expert {i} is stored in another way than expert 0")

    cdef bint _add_groups(self, Py_ssize_t i, GroupPanels w):
        cdef expert_stack *own = &self.stack
        if i == 0:
            own.is_ruled, own.kind, own.n_out, own.n_in, own.shape = False, w.kind, w.n_out, <Py_ssize_t> w.shape.K, w.shape
        own.panels[i], own.scales[i] = &w.panels[0, 0], <const char *> w.scale_values
        return (w.n_out == own.n_out and w.kind == own.kind and w.shape.K == own.shape.K and w.shape.group == own.shape.group
                and w.shape.layout == own.shape.layout and w.bias is None and w.signs is None)

    cdef bint _add_ruled(self, Py_ssize_t i, RuledPanels w):
        cdef expert_stack *own = &self.stack
        if i == 0:
            own.is_ruled, own.kind, own.n_out, own.n_in, own.bytes = True, w.form, w.n_out, w.n_in, w.panels.shape[1]
        own.panels[i] = &w.panels[0, 0]
        return w.n_out == own.n_out and w.n_in == own.n_in and w.form == own.kind

    def __dealloc__(self):
        free(self.stack.panels)

    @property
    def input_form(self):
        """Equal for experts whose kernels take the same form of an input."""
        cdef Py_ssize_t size = <Py_ssize_t> self.stack.shape.group
        if self.stack.is_ruled:
            size = RULED_FORMS[self.stack.kind].block
        return bool(self.stack.is_ruled), size


cdef struct mixture_call:
    const float *h
    const float *scores
    float *y
    Py_ssize_t M, D, F, E, k
    expert_stack gate, up, down
    bint is_silu, divides
    float limit  # of gate and up; infinity: none
    const kernel_set *chosen
    int threads


cdef struct expert_call:  # several experts of one input, or each of its own
    bint is_ruled
    group_call groups
    ruled_call ruled


cdef void add_expert(expert_call *call, const expert_stack *stack, Py_ssize_t expert, float *y) noexcept nogil:
    """Another matrix of the call, whose result is y."""
    cdef group_call *c = &call.groups
    cdef ruled_call *r = &call.ruled
    cdef Py_ssize_t i
    if call.is_ruled:
        i = r.count
        r.forms[i], r.n_out[i], r.panels[i], r.bytes[i], r.ys[i] = stack.kind, stack.n_out, stack.panels[expert], stack.bytes, y
        r.has_sums = r.has_sums or RULED_FORMS[stack.kind].term == 1
        r.first[i + 1], r.count = r.first[i] + (stack.n_out + RULED_ROWS - 1) // RULED_ROWS, i + 1
        return
    i = c.count
    c.shapes[i], c.kinds[i], c.n_out[i], c.biases[i], c.ys[i] = stack.shape, stack.kind, stack.n_out, NULL, y
    c.panels[i], c.scales[i] = stack.panels[expert], stack.scales[expert]
    c.first[i + 1], c.count = c.first[i] + (stack.n_out + PANEL_ROWS - 1) // PANEL_ROWS, i + 1


cdef void start_call(expert_call *call, const mixture_call *c, const expert_stack *stack, const float *x, Py_ssize_t M,
                     bint apart, const uint8_t *after) noexcept nogil:
    """after: the codes that the next call reads first"""
    cdef group_call *g = &call.groups
    cdef ruled_call *r = &call.ruled
    call.is_ruled = stack.is_ruled
    if stack.is_ruled:
        r.x, r.M, r.K, r.block, r.apart = x, M, stack.n_in, RULED_FORMS[stack.kind].block, apart
        r.has_sums, r.count, r.first[0], r.chosen, r.threads = False, 0, 0, c.chosen, c.threads
        r.norm_weight, r.residual, r.gate = NULL, NULL, NO_GATE
        return
    g.x, g.M, g.K, g.shape, g.apart, g.after = x, M, stack.n_in, stack.shape, apart, after
    g.signs, g.order, g.block, g.count, g.first[0] = NULL, NULL, 0, 0, 0
    g.chosen, g.threads = c.chosen, c.threads


cdef Py_ssize_t run_experts(const expert_call *call) noexcept nogil:
    return run_ruled(&call.ruled) if call.is_ruled else run_group(&call.groups)


cdef bint choose_experts(const mixture_call *c, const float *scores, double *wide, float *p, int32_t *ids,
                         float *shares) noexcept nogil:
    """The k experts of a token, ascending, and their shares. False if the scores hold NaN or Inf.

    Insertion keeps the k largest in their order: of equal ones the lower number is first.
    """
    cdef Py_ssize_t e, i, count = 0
    cdef double total = 0
    cdef float share
    cdef int32_t held
    for e in range(c.E):
        wide[e] = scores[e]
    c.chosen.softmax_row(wide, c.E, 1, p)
    for e in range(c.E):
        if p[e] != p[e]:
            return False
        if count == c.k and p[e] <= p[ids[count - 1]]:
            continue
        i = count if count < c.k else count - 1
        while i > 0 and p[e] > p[ids[i - 1]]:
            ids[i] = ids[i - 1]
            i = i - 1
        ids[i], count = <int32_t> e, min(count + 1, c.k)
    for e in range(1, c.k):
        held = ids[e]
        i = e
        while i > 0 and ids[i - 1] > held:
            ids[i] = ids[i - 1]
            i = i - 1
        ids[i] = held
    for i in range(c.k):
        shares[i] = max(p[ids[i]], FLT_MIN)  # so that none is 0
        total += shares[i]
    share = <float> total
    for i in range(c.k if c.divides else 0):
        shares[i] = shares[i] / share
    return True


cdef void gate_rows(const mixture_call *c, float *gate, float *up, Py_ssize_t n) noexcept nogil:
    """gate = act(gate) * up, of n numbers, clamped first"""
    cdef Py_ssize_t i
    cdef float limit = c.limit
    if limit < INFINITY:
        for i in range(n):  # NaN stays NaN
            gate[i] = limit if gate[i] > limit else gate[i]
            up[i] = -limit if up[i] < -limit else up[i]
            up[i] = limit if up[i] > limit else up[i]
    c.chosen.gated(gate, up, n, c.is_silu, gate)


cdef void add_share(const float *x, Py_ssize_t n, double share, double *total) noexcept nogil:
    cdef Py_ssize_t i
    for i in range(n):
        total[i] += share * <double> x[i]


cdef Py_ssize_t mix_token(const mixture_call *c, const int32_t *ids, const float *shares, float *gate, float *up,
                          float *out, double *total) noexcept nogil:
    """One token: its experts side by side, MAX_LINEARS at a time."""
    cdef expert_call call
    cdef Py_ssize_t part, start, i, count, bad
    for part in range((c.k + MAX_LINEARS - 1) // MAX_LINEARS):
        start = part * MAX_LINEARS
        count = min(<Py_ssize_t> MAX_LINEARS, c.k - start)
        start_call(&call, c, &c.gate, c.h, 1, False, c.up.panels[ids[start]])
        for i in range(start, start + count):
            add_expert(&call, &c.gate, ids[i], gate + i * c.F)
        bad = run_experts(&call)
        if bad != OK:
            return bad
        start_call(&call, c, &c.up, c.h, 1, False, c.down.panels[ids[start]])
        for i in range(start, start + count):
            add_expert(&call, &c.up, ids[i], up + i * c.F)
        bad = run_experts(&call)
        if bad != OK:
            return bad
        gate_rows(c, gate + start * c.F, up + start * c.F, count * c.F)
        start_call(&call, c, &c.down, gate + start * c.F, count, True, NULL)
        for i in range(start, start + count):
            add_expert(&call, &c.down, ids[i], out + (i - start) * c.D)
        bad = run_experts(&call)
        if bad != OK:
            return 0 if bad >= 0 else bad
        for i in range(count):
            add_share(out + i * c.D, c.D, shares[start + i], total)
    return OK


cdef Py_ssize_t mix_tokens(const mixture_call *c, const int32_t *ids, const float *shares, float *gate, float *up,
                           float *out, double *totals, float *rows, int32_t *places, int32_t *first) noexcept nogil:
    """Several tokens: each expert with all that chose it, in the order of the experts.   rows (M, D)

    places: tokens' choices m k + i, sorted by expert; first (E + 1): where those of each expert begin.
    """
    cdef expert_call call
    cdef Py_ssize_t e, i, m, n, bad
    memset(first, 0, (c.E + 1) * sizeof(int32_t))
    for i in range(c.M * c.k):
        first[ids[i]] += 1
    for e in range(1, c.E + 1):
        first[e] += first[e - 1]
    for i in range(c.M * c.k - 1, -1, -1):
        first[ids[i]] -= 1
        places[first[ids[i]]] = <int32_t> i
    for e in range(c.E):
        n = first[e + 1] - first[e]
        if n == 0:
            continue
        for i in range(n):
            memcpy(rows + i * c.D, c.h + places[first[e] + i] // c.k * c.D, c.D * sizeof(float))
        start_call(&call, c, &c.gate, rows, n, False, c.down.panels[e])
        add_expert(&call, &c.gate, e, gate)
        add_expert(&call, &c.up, e, up)
        bad = run_experts(&call)
        if bad == OK:
            gate_rows(c, gate, up, n * c.F)
            start_call(&call, c, &c.down, gate, n, False, NULL)
            add_expert(&call, &c.down, e, out)
            bad = run_experts(&call)
        if bad != OK:
            return bad if bad < 0 else places[first[e] + bad] // c.k
        for i in range(n):
            m = places[first[e] + i]
            add_share(out + i * c.D, c.D, shares[m], totals + m // c.k * c.D)
    return OK


cdef Py_ssize_t run_mixture(const void *given) noexcept nogil:
    cdef const mixture_call *c = <const mixture_call *> given
    cdef Py_ssize_t M = c.M, k = c.k, i, bad = OK, at_once = k if M == 1 else M
    cdef double *totals = <double *> allocate(M * c.D + c.E, sizeof(double))
    cdef float *floats = <float *> allocate(at_once * (2 * c.F + c.D) + M * (c.D + k) + c.E, sizeof(float))
    cdef int32_t *ids = <int32_t *> allocate(2 * M * k + c.E + 1, sizeof(int32_t))
    cdef float *gate = floats  # aligned
    cdef float *up = gate + at_once * c.F
    cdef float *out = up + at_once * c.F
    cdef float *rows = out + at_once * c.D
    cdef float *shares = rows + M * c.D
    if totals == NULL or floats == NULL or ids == NULL:
        bad = NO_MEMORY
    for i in range(M if bad == OK else 0):
        if not choose_experts(c, c.scores + i * c.E, totals + M * c.D, shares + M * k, ids + i * k, shares + i * k):
            bad = i
            break
    if bad == OK:
        memset(totals, 0, M * c.D * sizeof(double))
        if M == 1:
            bad = mix_token(c, ids, shares, gate, up, out, totals)
        else:
            bad = mix_tokens(c, ids, shares, gate, up, out, totals, rows, ids + M * k, ids + 2 * M * k)
    for i in range(M * c.D if bad == OK else 0):
        c.y[i] = <float> totals[i]
    free(totals)
    free(floats)
    free(ids)
    return bad


def mixture(const float[:, ::1] h, const float[:, ::1] scores, ExpertPanels gate, ExpertPanels up, ExpertPanels down,
            Py_ssize_t k, bint divides, float limit, bint is_silu, float[:, ::1] y, int threads, Py_ssize_t kernels,
            Tape tape=None):
    """h (M, D), scores (M, E) of the router -> y (M, D): the sum of the k best experts of each token by their shares.

    divides: the shares, by their sum.   limit: of gate and up, or infinity.
    Returns -1, or the row that has a number that is not finite on its way.
    """
    cdef mixture_call c
    cdef Py_ssize_t bad
    cdef expert_stack *stack
    c.gate, c.up, c.down = gate.stack, up.stack, down.stack
    c.M, c.D, c.E, c.k, c.F = h.shape[0], h.shape[1], scores.shape[1], k, c.gate.n_out
    c.divides, c.limit, c.is_silu, c.chosen, c.threads = divides, limit, is_silu, check_set(kernels, threads), threads
    if not 1 <= k <= c.E or scores.shape[0] != c.M or y.shape[0] != c.M or y.shape[1] != c.D:
        raise ValueError(f"mixture: h {c.M, c.D}, scores {scores.shape[0], c.E}, {k} experts, y {y.shape[0], y.shape[1]}")
    for each in (gate, up, down):
        stack = &(<ExpertPanels> each).stack
        inner, outer = (c.F, c.D) if each is down else (c.D, c.F)
        if ((<ExpertPanels> each).count != c.E or stack.n_in != inner or stack.n_out != outer
                or (not stack.is_ruled and stack.shape.layout != c.chosen.group_layout)):
            raise ValueError(f"mixture: {each.count} experts {stack.n_out, stack.n_in} for {c.E} scores and h {c.M, c.D}, or in "
                             f"another layout")
    if gate.input_form != up.input_form:
        raise ValueError(f"mixture: gate and up take inputs of the forms {gate.input_form} and {up.input_form}")
    if c.M == 0:
        return OK
    c.h, c.scores, c.y = &h[0, 0], &scores[0, 0], &y[0, 0]
    check_aligned(<size_t> c.h | <size_t> c.scores | <size_t> c.y)
    if tape is None:
        return make_call(run_mixture, &c, "{} tokens of {} experts", c.M, c.E)
    tape.record(run_mixture, &c, sizeof(c), (<size_t> c.h, <size_t> c.scores, <size_t> c.y), (gate, up, down))
    return OK
