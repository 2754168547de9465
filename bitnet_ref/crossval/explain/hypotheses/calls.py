"""Mistakes of decoding, chunks and caches: steps of later calls that go wrong where one call would be right.

A trace that says in which calls it was computed (`calls`) is tested for these. Two kinds: what only a cache can get wrong
(positions, rows that were read or lost, the mask's offset, padding), and each known mistake of a step in some calls
only, as of a kernel that only decoding uses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from ....families.family import Edit, Hypothesis, layer_weights, own_rope
from ....reference import layers
from ....reference.config import ModelConfig
from ....reference.layers import Array
from ....reference.weights import ModelWeights
from ...calls import Calls, call_of_tokens, start_of_tokens
from ...names import LOGITS, is_by_head, op_inputs
from ...types import Ints, Mask, Tensors, Tokens
from ..attention import all_scores, scores_of, values_of
from ..edits.attention import turned_by_own
from ..number_formats import FLOATS, INT4_ROWS, INT8_ROWS, rounded, to_integers
from ..variants import Setting, Step

_CACHE = "The cache holds, for each token of its own sequence, the rotated key and the value at its own position."
_POSITION = "A token's position is the number of tokens of its sequence before it, those of earlier calls included."
_MASK = "Token i sees the tokens j <= i, where i counts the tokens of earlier calls too."
_PADDING = "Mask the padding out for every token, and count positions from the first real one."
_WRONG_ROW = 1e-3  # relative L2 of a token's row that is certainly wrong
# Of known mistakes: those that have a name of their own here, and a look at tokens that no call has yet.
_IMPOSSIBLE_IN_CALLS = (
    "cache_misses_the_newest", "cache_misses_the_oldest", "positions_from_one", "no_causal_mask", "sees_one_ahead",
)  # fmt: skip
_OF_CALLS = ("state_", "conv_state_")  # how the names of a family's own mistakes of calls begin
_RINGS = 64  # sizes of a ring that are tried
_NEAR = (0, -1, 1)  # of a limit, about the first wrong token


def _several(step: Step) -> bool:
    return len(step.setting.calls) > 1


def _starts(step: Step) -> Ints:
    """The first token of each token's call; zeros for one call."""
    calls = step.setting.calls
    return start_of_tokens(calls) if calls else np.zeros(len(step.setting.tokens), dtype=np.int64)


# -- positions ---------------------------------------------------------------------------------------------------------


Positions = Callable[[Ints, Ints, Ints], Ints]


def turned_at(positions_of: Positions) -> Edit:
    """RoPE at positions_of(the right positions, the first one of each token's call, the number of that call)."""

    def edit(step: Step, compute: Edit, x: Array, *tables: Array) -> Array:
        calls = step.setting.calls or (len(x),)
        positions = np.asarray(positions_of(np.arange(len(x)), _starts(step), call_of_tokens(calls)))
        return compute(x, *own_rope(step).tables(positions, step.setting.config.rotary_size, np.float32))

    return edit


def _start_before(start: Ints) -> Ints:
    """The first token of the call before each token's call."""
    every = np.unique(start)
    before: Ints = every[np.maximum(np.searchsorted(every, start) - 1, 0)]
    return before


_position_mistake = partial(Hypothesis, "*.attn.hook_rot_[qk]", fits=_several)
_POSITIONS: tuple[tuple[str, str, Positions], ...] = (
    ("restart", "positions begin again at 0 in each call", lambda p, start, call: p - start),
    ("too_high", "positions are one too high from the second call on", lambda p, start, call: p + (start > 0)),
    ("too_low", "positions are one too low from the second call on", lambda p, start, call: p - (start > 0)),
    ("of_the_call", "a call's tokens have its number as their position", lambda p, start, call: np.where(start > 0, call, p)),
    ("of_the_first", "all tokens of a later call have the position of its first", lambda p, start, call: np.where(start > 0, start, p)),
    ("stuck", "positions do not advance after the first call", lambda p, start, call: np.where(start > 0, start[call > 0].min(initial=len(p)), p)),
    ("from_the_last_call", "positions count the tokens of the last call only, not of all before", lambda p, start, call: p - _start_before(start)),
    ("twice", "the tokens of earlier calls are counted twice in positions", lambda p, start, call: p + start),
)  # fmt: skip


# -- which tokens are seen ---------------------------------------------------------------------------------------------


# (i, j, start of i's call, start of j's call, the end of i's call, first token of the second call) -> whether i sees j
Sees = Callable[..., Mask]


def sees_in_calls(rule: Sees) -> Edit:
    """Scores of the pairs of tokens that the rule lets see each other, beyond the causal mask too."""

    def edit(step: Step, compute: Edit, q: Array, keys: Array, window: int | None) -> Array:
        n = len(step.setting.tokens)
        distance = np.arange(n)[:, None] - np.arange(n)
        sees = _matrix(rule, step.setting.calls) & (distance < (n if window is None else window))
        return all_scores(n, q, keys, window, sees)

    return edit


def _matrix(rule: Sees, calls: Calls) -> Mask:
    """(N, N), which token sees which by the rule."""
    starts = start_of_tokens(calls)
    i, j, ends = np.arange(len(starts))[:, None], np.arange(len(starts))[None], starts + np.repeat(calls, calls)
    return rule(i, j, starts[:, None], starts[None], ends[:, None], calls[0])


_sees_mistake = partial(Hypothesis, "*.attn.hook_attn_scores", fits=_several)
_SEES: tuple[tuple[str, str, Sees], ...] = (
    ("no_cache", "tokens of a later call see that call only: nothing is read from the cache", lambda i, j, s, t, e, f: (j <= i) & (j >= s)),
    ("itself_only", "tokens of a later call see only themselves", lambda i, j, s, t, e, f: (j <= i) & ((s == 0) | (j == i))),
    ("mask_without_offset", "the mask of a later call lacks its offset: its first token sees only the first of all", lambda i, j, s, t, e, f: j <= i - s),
    ("call_sees_its_future", "the tokens of a call see those after them in the same call", lambda i, j, s, t, e, f: j < e),
    ("later_call_sees_its_future", "the tokens of a call after the first see those after them in the same call", lambda i, j, s, t, e, f: np.where(s > 0, j < e, j <= i)),
    ("cache_without_itself", "tokens of a later call do not see themselves: the cache is read before it is written", lambda i, j, s, t, e, f: (j <= i) & ((s == 0) | (j < i))),
    ("call_not_seen", "a later call reads the cache as it was before it: its own tokens see none of that call", lambda i, j, s, t, e, f: (j <= i) & ((s == 0) | (j < s))),
    ("cache_one_short", "a later call does not see the token just before it: the cache is read one entry short", lambda i, j, s, t, e, f: (j <= i) & ((s == 0) | (j != s - 1))),
    ("last_of_prompt_lost", "the last token of the first call is lost: the second call writes over its slot", lambda i, j, s, t, e, f: (j <= i) & ((s == 0) | (j != f - 1))),
    ("first_token_lost", "later calls do not see the first token", lambda i, j, s, t, e, f: (j <= i) & ((s == 0) | (j > 0))),
    ("first_call_lost", "later calls do not see the tokens of the first call", lambda i, j, s, t, e, f: (j <= i) & ((s == 0) | (j >= f))),
    ("one_slot_for_decoding", "all calls after the first write to the same slots: of those a call sees only itself", lambda i, j, s, t, e, f: (j <= i) & ((s == 0) | (j < f) | (j >= s))),
    ("last_call_only", "the cache holds the call before only", lambda i, j, s, t, e, f: (j <= i) & ((s == 0) | (j >= t) & _of_last_call(s, t))),
    ("prompt_only", "later calls see the first call and not themselves", lambda i, j, s, t, e, f: (j <= i) & ((s == 0) | (j < f))),
)  # fmt: skip


def _of_last_call(starts: Array, of_seen: Array) -> Mask:
    """Whether the seen token's call is the looking token's or the one before."""
    order = np.unique(of_seen)
    return np.searchsorted(order, starts) - np.searchsorted(order, of_seen) <= 1


def _ring(size: int) -> Sees:
    """A ring of `size` slots: a call writes its tokens before it reads, and so over the oldest."""
    return lambda i, j, s, t, e, f: (j <= i) & ((s == 0) | (j >= e - size))


def _narrow(size: int) -> Sees:
    return lambda i, j, s, t, e, f: (j <= i) & ((s == 0) | (i - j < size))


# -- rows that are read from the cache ---------------------------------------------------------------------------------


Rows = Callable[..., Array]  # (keys or values (N, G, d), step) -> as read


def reads(rows_of: Rows, keys: bool, values: bool) -> Edit:
    """Attention that reads rows_of(...) of the tokens of earlier calls, and those of its own call as they are."""

    def edit(step: Step, compute: Edit, first: Array, rows: Array, *rest: Any) -> Array:
        of_keys = step.name.endswith("hook_attn_scores")
        right = compute(first, rows, *rest)
        if not (keys if of_keys else values):
            return right
        read = rows_of(rows, step).reshape(rows.shape).astype(rows.dtype)
        cached = np.arange(len(rows))[None] < _starts(step)[:, None]  # (N, N): j is read from the cache
        if of_keys:
            return np.where(cached, compute(first, read, *rest), right)
        none = first.dtype.type(0)
        own, old = np.where(cached, none, first), np.where(cached, first, none)
        mixed: Array = compute(own, rows, *rest) + compute(old, read, *rest)
        return mixed

    return edit


def _before_rope(keys: Array, step: Step) -> Array:
    attn = step.owner
    return step.seen.get(f"{attn}.k_norm.hook_normalized", step.seen[f"{attn}.hook_k"])


def _has_key_norm(step: Step) -> bool:
    return getattr(layer_weights(step), "k_norm", None) is not None


def _normed_again(keys: Array, step: Step) -> Array:
    norm = layer_weights(step).k_norm
    return layers.rms_norm(keys.reshape(-1, len(norm.weight)), norm.weight, norm.eps)


def _moved(by: int) -> Rows:
    def rows_of(rows: Array, step: Step) -> Array:
        moved = np.roll(rows, by, axis=0)
        if by > 0:
            moved[:by] = rows[:1]  # the slots before the first are read as the first
        return moved  # by -1 the last row of the cache is that of the next call's first token

    return rows_of


def _of_other(index: int) -> Rows:
    """The rows that the other sequence of that number has at the same positions; its last for longer ones."""

    def rows_of(rows: Array, step: Step) -> Array:
        setting = step.setting
        steps = _steps_of(setting.config, setting.weights, setting.path, *setting.others[index])
        other: Array = steps[step.name].inputs[1]
        return other[np.minimum(np.arange(len(rows)), len(other) - 1)]

    return rows_of


@lru_cache(maxsize=4)
def _steps_of(config: ModelConfig, weights: ModelWeights, path: Path | None, *tokens: int) -> Mapping[str, Step]:
    """The steps of a right run of other tokens, in one call."""
    return Setting(config, weights, np.array(tokens, dtype=np.int64), path=path).steps


_read_mistake = partial(Hypothesis, "*.attn.hook_attn_scores *.attn.hook_z", fits=_several)
_PARTS = (("rows", True, True), ("keys", True, False), ("values", False, True))  # of the cache: keys, values
_READS: tuple[tuple[str, str, Rows, bool, bool], ...] = (  # name, words, rows, of keys, of values
    ("turned_twice", "keys that are read from the cache are turned by RoPE a second time", turned_by_own, True, False),
    ("not_turned", "keys in the cache are not turned by RoPE", _before_rope, True, False),
    ("normed_twice", "keys that are read from the cache are normed a second time", _normed_again, True, False),
    *(
        (f"row_{name}{'' if k and v else f'_of_{part}'}", f"later calls read the {part} of the cache {words}", _moved(by), k, v)
        for name, words, by in (("before", "at position - 1", 1), ("after", "at position + 1", -1))
        for part, k, v in _PARTS
    ),
    ("zeros", "the rows of the cache are zeros in later calls: they were never written", lambda rows, step: 0 * rows, True, True),
    ("zero_keys", "the keys of the cache are zeros in later calls", lambda rows, step: 0 * rows, True, False),
    ("zero_values", "the values of the cache are zeros in later calls", lambda rows, step: 0 * rows, False, True),
    ("heads_next", "kv heads of the cache are read one too far", lambda rows, step: np.roll(rows, 1, axis=1), True, True),
    ("transposed", "the cache is written as (tokens, heads, head_dim) and read as (heads, tokens, head_dim)", lambda rows, step: np.ascontiguousarray(rows).reshape(rows.shape[1], rows.shape[0], -1).swapaxes(0, 1), True, True),
    *(
        (f"{name}{'' if k and v else f'_{part}'}", f"the {'cache is' if k and v else f'{part} of the cache are'} in {words}", lambda rows, step, rule=rule: rule(rows), k, v)
        for part, k, v in _PARTS
        for name, words, rule in (
            *((words.split()[0], words, partial(rounded, dtype=FLOATS[words])) for words in ("bfloat16", "float16", "fp8 (e4m3)")),
            ("int8", "int8, with a scale for each head of each token", INT8_ROWS),
            ("int8_by_token", "int8, with a scale for each token", partial(to_integers, top=127, axis=(1, 2))),
            ("int4", "int4, with a scale for each head of each token", INT4_ROWS),
        )
    ),
)  # fmt: skip


# -- tokens in front: padding, and the sequence before -----------------------------------------------------------------


# Where the tokens in front are: before the sequence, which is moved; each from 0; all of them at 0, as padding may be.
MOVED, FROM_0, ALL_AT_0 = "", "_from_0", "_at_0"
_PLACES = {MOVED: "", FROM_0: ", both from position 0", ALL_AT_0: ", at position 0"}


def sees_in_front(front: Tokens, place: str, from_call: int) -> Edit:
    """Attention that also sees these tokens, laid in front of the sequence.   from_call: only from that call on."""

    def edit(step: Step, compute: Edit, *inputs: Any) -> Array:
        attn, setting = step.owner, step.setting
        if not step.name.endswith("hook_z"):  # RoPE
            moves = turned_at(lambda p, *_: p + len(front))
            return compute(*inputs) if place != MOVED else moves(step, compute, *inputs)
        values, n = inputs[1], len(setting.tokens)
        seen = front[:1] if place == ALL_AT_0 else front
        steps = _steps_of(setting.config, setting.weights, setting.path, *seen)
        scores = f"{attn}.hook_attn_scores"
        keys_in_front, v_in_front = (steps[name].inputs[1] for name in (scores, step.name))
        if place == ALL_AT_0:  # which are all the same
            keys_in_front, v_in_front = (np.repeat(x, len(front), axis=0) for x in (keys_in_front, v_in_front))
        q = step.seen[op_inputs(scores, setting.config)[0]].reshape(n, len(inputs[0]), -1)
        in_front = scores_of(q.astype(np.float64), keys_in_front)
        if (window := setting.config.window_of(step.layer or 0)) is not None:
            distance = np.arange(n)[:, None] - (np.arange(len(front)) - len(front))
            in_front = np.where(distance < window, in_front, -np.inf)
        own = step.seen[scores].astype(np.float64)
        both = layers.softmax(np.concatenate([in_front, own], axis=2))
        z = values_of(both, np.concatenate([v_in_front, values]))
        right = compute(*inputs)
        in_scope = call_of_tokens(setting.calls or (n,)) >= from_call
        return np.where(in_scope[:, None, None], z.astype(right.dtype), right)

    return edit


_front_mistake = partial(Hypothesis, "*.attn.hook_rot_[qk] *.attn.hook_z")


def _fronts(setting: Setting) -> Iterator[tuple[str, str, Tokens]]:
    """(name, words, tokens) of what may lie before a sequence of a batch."""
    for index, other in enumerate(setting.others):
        yield f"other_{index}", _other_in_words(setting, index), other
    pads = max(map(len, setting.others), default=0) - len(setting.tokens)
    bos = setting.config.bos_token_id
    for token in sorted({0} | ({bos} if bos is not None else set())) if pads > 0 else ():
        yield f"padding_{token}", f"the padding on its left ({pads} times id {token})", (token,) * pads


def _other_in_words(setting: Setting, index: int) -> str:
    if len(setting.others) == 1:
        return "the other sequence"
    return f"another sequence (the one of {len(setting.others[index])} tokens, number {index + 1} of the others)"


# -- which of them apply -----------------------------------------------------------------------------------------------


def call_hypotheses(setting: Setting, candidate: Tensors, known: Sequence[Hypothesis]) -> tuple[Hypothesis, ...]:
    """The mistakes of calls, caches and other sequences for a run that has them; () for a run of one call.

    known: mistakes of single steps, each of which may be made in some calls only.
    """
    if len(setting.calls) < 2 and not setting.others:
        return ()
    out = list(_distinct(setting.calls)) if len(setting.calls) > 1 else []
    for index in range(len(setting.others)):
        words = _other_in_words(setting, index)
        for part, *which in _PARTS:
            name, cause = "cache" if part == "rows" else part, f"later calls read the {part} of {words} in the cache"
            out.append(_read_mistake(f"{name}_of_other_{index}", cause, _CACHE, reads(_of_other(index), *which)))
    for name, words, tokens in _fronts(setting):
        for place, at in _PLACES.items():
            for scope, from_call in [("", 0)] + [(", from the second call on", 1)] * (len(setting.calls) > 1):
                edit, short = sees_in_front(tokens, place, from_call), f"sees_{name}{place}{'_later' * bool(from_call)}"
                out.append(_front_mistake(short, f"the sequence also sees {words}{at}{scope}", _PADDING, edit))
    first = first_wrong_token(setting, candidate)
    if first is not None and first > 0:
        out += list(_limits(setting, first))
    if len(setting.calls) > 1:
        out += _in_some_calls(setting.calls, known, first)
    return tuple(out)


def _distinct(calls: Calls) -> Iterator[Hypothesis]:
    """Those of the tables above that are mistakes with these calls, of several that are the same then the first."""
    starts, call = start_of_tokens(calls), call_of_tokens(calls)
    n = len(starts)
    seen = {np.arange(n).tobytes(), np.tril(np.ones((n, n), dtype=np.bool_)).tobytes()}
    made: list[tuple[Array, Hypothesis]] = []
    for name, cause, positions in _POSITIONS:
        mistake = _position_mistake(f"positions_{name}", cause, _POSITION, turned_at(positions))
        made.append((positions(np.arange(n), starts, call), mistake))
    for name, cause, sees in _SEES:
        remedy = _MASK if "mask" in name or "future" in name else _CACHE
        made.append((_matrix(sees, calls), _sees_mistake(f"calls_{name}", cause, remedy, sees_in_calls(sees))))
    for array, mistake in made:
        if (key := array.tobytes()) not in seen:
            seen.add(key)
            yield mistake
    for name, cause, rows, *which in _READS:
        fits = _has_key_norm if rows is _normed_again else _several
        yield _read_mistake(f"cache_{name}", cause, _CACHE, reads(rows, *which), fits=fits)


def _limits(setting: Setting, first: int) -> Iterator[Hypothesis]:
    """Tables and rings that end just before the first wrong token, and windows that do."""
    calls, n = setting.calls or (len(setting.tokens),), len(setting.tokens)
    starts, stuck = start_of_tokens(calls), calls[0] + 1 if len(calls) > 1 else 0
    limits = [first + near for near in _NEAR if 1 <= first + near < n]
    for limit in limits:
        tables: list[tuple[str, str, Positions]] = [
            ("ends", f"ends: positions from {limit} on are taken as {limit - 1}", lambda p, *_, limit=limit: np.minimum(p, limit - 1)),
            ("wraps", f"wraps round: positions from {limit} on begin again at 0", lambda p, *_, limit=limit: p % limit),
        ]  # fmt: skip
        for name, words, positions in tables[limit == stuck :]:  # the first is then "stuck" of `_POSITIONS`
            yield Hypothesis(
                "*.attn.hook_rot_[qk]", f"rope_table_{name}_at_{limit}", f"RoPE's table {words}",
                "Make the table as long as the context.", turned_at(positions),
            )  # fmt: skip
    if len(setting.calls) < 2:
        return
    start = int(starts[first])
    rings = range(start, start + calls[int(call_of_tokens(calls)[first])])  # the first that the call's writing overruns
    views: list[tuple[str, str, Sees]] = []
    for size in rings[:_RINGS]:
        if 1 <= size < n:
            views.append((f"ring_of_{size}", f"the cache is a ring of {size} tokens that wraps too early", _ring(size)))
    for size in limits:
        cause = f"later calls see {size} tokens only, itself included"
        views.append((f"window_of_{size}_in_decoding", cause, _narrow(size)))
    for name, cause, sees in views:
        yield _sees_mistake(name, cause, _CACHE, sees_in_calls(sees))


def first_wrong_token(setting: Setting, candidate: Tensors) -> int | None:
    """The first token with a wrong row in the residual stream or the logits; None if none is, or neither is recorded."""
    first = None
    for name, step in setting.steps.items():
        if not name.endswith(("hook_resid_post", "hook_z")) and name != LOGITS:
            continue
        theirs = candidate.get(name)
        if theirs is None or theirs.size != step.result.size:
            continue
        mine = step.result.reshape(len(step.result), -1).astype(np.float64)
        with np.errstate(all="ignore"):
            error = np.linalg.norm(theirs.reshape(mine.shape) - mine, axis=1)
            wrong = np.flatnonzero(~(error <= _WRONG_ROW * np.linalg.norm(mine, axis=1)))
        if len(wrong):
            first = int(wrong[0]) if first is None else min(first, int(wrong[0]))
    return first


def _scopes(calls: Calls, first: int | None) -> Iterator[tuple[str, str, Mask]]:
    """(name, words, tokens (N,)) of the calls that a kernel of its own may compute, none twice.

    first: the first wrong token, which must be in one.
    """
    call, sizes = call_of_tokens(calls), np.repeat(calls, calls)
    scopes = [("later_calls", "from the second call on", call > 0), ("first_call", "in the first call only", call == 0)]
    for size in sorted(set(calls))[:-1][:4]:
        count = f"{size} token{'s' * (size > 1)} only"
        scopes.append((f"calls_over_{size}", f"in calls of more than {count}", sizes > size))
        scopes.append((f"calls_up_to_{size}", f"in calls of up to {count}", sizes <= size))
    seen: list[bytes] = []
    for name, words, rows in scopes:
        if rows.tobytes() not in seen and (first is None or rows[first]):
            seen.append(rows.tobytes())
            yield name, words, rows


def _in_some_calls(calls: Calls, known: Sequence[Hypothesis], first: int | None) -> list[Hypothesis]:
    possible = [h for h in known if h.name not in _IMPOSSIBLE_IN_CALLS and not h.name.startswith(_OF_CALLS)]
    return [
        replace(h, name=f"{h.name}_in_{name}", cause=f"{h.cause}, {words}", edit=_at_tokens(h.edit, rows.tobytes()))
        for name, words, rows in _scopes(calls, first)
        for h in possible
    ]


@lru_cache(maxsize=4096)
def _at_tokens(edit: Edit, tokens: bytes) -> Edit:
    """The edit in the rows of some tokens, a byte each; the others are right."""
    chosen = np.frombuffer(tokens, dtype=bool)

    def part(step: Step, compute: Edit, *inputs: Any) -> Array:
        right = compute(*inputs)
        wrong = edit(step, compute, *inputs)
        axis = int(is_by_head(step.name))
        each = right.shape[axis] // len(chosen)  # a norm over heads has several rows for each token
        rows = np.flatnonzero(np.repeat(chosen, each))
        dtype = right.dtype if wrong.dtype == right.dtype else np.result_type(wrong, right)
        mixed = right.astype(dtype)
        np.moveaxis(mixed, axis, 0)[rows] = np.moveaxis(wrong.reshape(right.shape), axis, 0)[rows]
        return mixed

    return part
