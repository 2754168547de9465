# Part of _cpu.pyx: the next token, drawn (draw_steps.h), and several recorded steps in a row without Python between
# them, of which each takes the largest logits of the one before (greedy.h), or drawn tokens.


def greedy_steps(Tape step, Tape head, table, float scale, float[:, ::1] x, int64_t[::1] positions,
                 float[:, :, :, ::1] rope, const float[:, :, ::1] full, const float[:, :, ::1] local,
                 const float[:, ::1] hidden, const float[:, ::1] logits, const int64_t[::1] left,
                 const int64_t[::1] ends, const uint8_t[::1] bell, int64_t[:, ::1] tokens, float[:, ::1] values,
                 float[:, :, ::1] states, const double[:, ::1] rules, const double[:, ::1] uniforms, int threads,
                 Py_ssize_t kernels):
    """Play both tapes `len(tokens)` times. Between two steps each row's largest logit becomes its next token, or a drawn
    one.

    step: from x (n, D), positions (n,) and rope (R, 2, n, d/2) to hidden (n, D). head: from hidden to logits (n, V).
    x, positions and rope hold the first step's inputs. table (V, D), scale: the embedding. full, local (2, T, d/2): cos
    and sin of all positions, for rope[0] and rope[1].
    left (n,): how many tokens a row still gets; ends: ids that end a row. An ended row repeats its last step, which
    changes nothing; when an eighth of the rows have ended, the step is the last one. So it is when bell[0] is not 0.
    rules (n, 4), temperature, top_k, top_p and min_p: where the temperature is not 0, `draw` chooses, for uniforms
    (steps, n). No rules: none does.

    Fills tokens and values (steps, n), with their logits; and states (steps, n, D), hidden. Returns how many steps were
    computed: none of these met NaN or Inf, a position without a page, or a draw that rounding could decide.
    """
    cdef Py_ssize_t n = x.shape[0], D = x.shape[1], V = logits.shape[1], half = rope.shape[3], count = tokens.shape[0]
    cdef Py_ssize_t s, i, j, rows, columns, ended = 0, bad = 0, tables = rope.shape[0]
    cdef Py_ssize_t draws = rules.shape[0], blocks = (V + DRAW_BLOCK - 1) // DRAW_BLOCK
    cdef const kernel_set *chosen = check_set(kernels, threads)
    cdef draw_rule *drawn = NULL
    cdef double *sums = NULL
    cdef int kind
    cdef const char *embedding = <const char *> _matrix(table, 0, &rows, &columns, &kind)
    if (columns != D or rows < V or positions.shape[0] != n or rope.shape[2] != n or rope.shape[1] != 2 or not 1 <= tables <= 2
            or full.shape[0] != 2 or full.shape[2] != half or local.shape[0] != 2 or local.shape[2] != half
            or hidden.shape[0] != n or hidden.shape[1] != D or logits.shape[0] != n or left.shape[0] != n
            or tokens.shape[1] != n or values.shape[0] != count or values.shape[1] != n or states.shape[0] != count
            or states.shape[1] != n or states.shape[2] != D or bell.shape[0] != 1 or n == 0 or V == 0
            or rules.shape[1] != 4 or draws not in (0, n) or (draws and (uniforms.shape[0] < count or uniforms.shape[1] != n))):
        raise ValueError(f"greedy_steps: x {n, D}, table {rows, columns}, logits {logits.shape[0], V}, tokens {count, tokens.shape[1]}")
    check_aligned(<size_t> &x[0, 0] | <size_t> &rope[0, 0, 0, 0] | <size_t> &full[0, 0, 0] | <size_t> &local[0, 0, 0]
                  | <size_t> &hidden[0, 0] | <size_t> &logits[0, 0] | <size_t> &values[0, 0] | <size_t> &states[0, 0, 0])
    check_aligned(<size_t> &positions[0] | <size_t> &left[0] | <size_t> &ends[0] | <size_t> &tokens[0, 0], sizeof(int64_t))
    for i in range(n):
        if positions[i] < 0 or positions[i] > min(full.shape[1], local.shape[1]) - count:
            raise ValueError(f"greedy_steps: position {positions[i]} and {count} steps, angles of {full.shape[1]}")
    if draws:
        check_aligned(<size_t> &rules[0, 0] | <size_t> &uniforms[0, 0], sizeof(double))
    for i in range(draws):
        if rules[i, 0] != 0:
            check_rule(rules[i, 0], rules[i, 1], rules[i, 2], rules[i, 3])
            for s in range(count):
                if not 0 <= uniforms[s, i] < 1:
                    raise ValueError(f"greedy_steps: uniform {uniforms[s, i]}")
    cdef int team = threads_for(n * V, FLOATS_PER_THREAD, threads)
    cdef Py_ssize_t row_bytes = D * (4 if kind == 0 else 2)
    cdef uint8_t *has_ended = <uint8_t *> allocate(n, 1)
    if draws:
        drawn = <draw_rule *> allocate(n, sizeof(draw_rule))
        sums = <double *> allocate(n * blocks, sizeof(double) + sizeof(float))
    if has_ended == NULL or (draws and (drawn == NULL or sums == NULL)):
        free(has_ended)
        free(drawn)
        free(sums)
        raise MemoryError(f"no memory for {n} tokens")
    for i in range(draws):
        drawn[i] = draw_rule(rules[i, 0], rules[i, 2], rules[i, 3], <size_t> rules[i, 1])
    with nogil:
        memset(has_ended, 0, n)
        s = 0
        while s < count:
            if not (step.run() and head.run()):
                break
            bad = 0
            for i in prange(n, num_threads=team, schedule="static"):
                memcpy(&states[s, i, 0], &hidden[i, 0], D * sizeof(float))
                tokens[s, i] = chosen.first_largest(&logits[i, 0], V)
                if draws and drawn[i].temperature > 0 and tokens[s, i] >= 0 and not has_ended[i]:
                    tokens[s, i] = chosen.draw(&logits[i, 0], V, &drawn[i], uniforms[s, i], sums + i * blocks,
                                               <float *> (sums + n * blocks) + i * blocks)
                bad += tokens[s, i] < 0 or chosen.first_largest(&hidden[i, 0], D) < 0
            if bad:
                break
            s += 1
            for i in range(n):
                values[s - 1, i] = logits[i, tokens[s - 1, i]]
                if not has_ended[i]:
                    has_ended[i] = s >= left[i]
                    for j in range(ends.shape[0]):
                        has_ended[i] |= tokens[s - 1, i] == ends[j]
                    ended += has_ended[i]
            if 8 * ended >= n or bell[0]:
                break
            for i in range(n):
                if not has_ended[i]:
                    embed_row(kind, embedding + tokens[s - 1, i] * row_bytes, D, scale, &x[i, 0])
                    positions[i] += 1
                    for j in range(2):
                        memcpy(&rope[0, j, i, 0], &full[j, positions[i], 0], half * sizeof(float))
                        if tables == 2:
                            memcpy(&rope[1, j, i, 0], &local[j, positions[i], 0], half * sizeof(float))
        free(has_ended)
        free(drawn)
        free(sums)
    return s


cdef int check_rule(double temperature, double top_k, double top_p, double min_p) except -1:
    """Raises ValueError for what `draw` does not take. NaN fails each comparison."""
    if not (temperature > 0 and 0 <= top_k < 2**53 and 0 < top_p <= 1 and 0 <= min_p <= 1):
        raise ValueError(f"draw: temperature {temperature}, top_k {top_k}, top_p {top_p}, min_p {min_p}")
    return 0


def draw(const float[::1] logits, double temperature, double uniform, Py_ssize_t top_k, double top_p, double min_p,
         Py_ssize_t kernels):
    """The token for `uniform` in [0, 1) from softmax(logits / temperature), limited by top_k (0: not), top_p and min_p;
    -1 where rounding could decide, or where the limits keep too many tokens."""
    cdef Py_ssize_t n = logits.shape[0], blocks = (n + DRAW_BLOCK - 1) // DRAW_BLOCK, token
    cdef draw_rule rule = draw_rule(temperature, top_p, min_p, top_k)
    cdef const kernel_set *chosen = check_set(kernels, 1)
    check_rule(temperature, top_k, top_p, min_p)
    if n == 0 or not 0 <= uniform < 1:
        raise ValueError(f"draw: {n} logits, uniform {uniform}")
    check_aligned(<size_t> &logits[0])
    cdef double *sums = <double *> allocate(blocks, sizeof(double) + sizeof(float))
    if sums == NULL:
        raise MemoryError(f"no memory for {n} logits")
    with nogil:
        token = chosen.draw(&logits[0], n, &rule, uniform, sums, <float *> (sums + blocks))
    free(sums)
    return token
