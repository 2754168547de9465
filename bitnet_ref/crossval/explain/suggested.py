"""Descriptions of a wrong tensor that its values suggest: an order, a constant, the columns that a sum runs over."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import combinations
from operator import itemgetter
from typing import Any

import numpy as np

from ...families.family import Edit, after, before, instead
from ...reference.layers import Array
from ...reference.weights import LinearWeight
from ..types import Ints
from .edits.constants import Constant, names_of, numbers_of
from .edits.kinds import Description, moved, scale_inputs, take_row
from .edits.products import matrix
from .evidence import Target
from .variants import Step
from .wording import axis_words


def solved(step: Step, target: Target) -> Iterator[Description]:
    """Descriptions that the engine's tensor itself suggests."""
    theirs, right, kind = target.theirs, target.right, step.kind
    if theirs.shape != step.result.shape or not np.isfinite(np.where(np.isneginf(theirs), 0, theirs)).all():
        return
    if kind == "hook_x_int8":
        low, high = theirs.min(), theirs.max()
        clipped = instead(lambda x, s: np.clip(np.rint(x * s), low, high))
        yield Description(1, f"activations are clipped to {low:g} and {high:g}", clipped)
        yield from _rounding(step, theirs)
        if offset := float(np.median(theirs - right)):
            moved_by = after(lambda x: np.clip(x.astype(int) + round(offset), -128, 127))
            yield Description(1.2, f"{offset:g} is added to the int8 values", moved_by)
    if kind == "hook_embed":
        table, ids = step.inputs
        rows = table.rows(slice(None), np.float32)
        taken = np.array([int(np.abs(rows - row).max(axis=1).argmin()) for row in theirs])
        shifts = set(((taken - ids) % len(rows)).tolist())
        if len(shifts) == 1 and (shift := shifts.pop()):
            yield Description(1, f"the row of id + {shift} is taken", take_row(shift))
        elif shifts != {0}:
            yield Description(1.5, f"the rows of other ids are taken: {taken.tolist()}", before(1, lambda ids: taken))
    if kind in ("hook_scale", "hook_x_scale"):
        yield from _cut_rows(step, target)
    if len(step.inputs) == 2 and isinstance(step.inputs[1], LinearWeight):
        yield from _cut_sums(step, target)
    yield from _other_orders(step, target)
    if step.result.dtype.kind == "f" and not target.by_head and theirs.ndim > 1:
        rows = np.flatnonzero((~target.right_close).reshape(len(theirs), -1).any(axis=1))
        yield from _sums_of_two(step, target, rows)


def _other_orders(step: Step, target: Target) -> Iterator[Description]:
    """The right tensor with its tokens, heads, columns or keys in an order that the engine's tensor shows."""
    allowed = np.broadcast_to(target.allowed, target.theirs.shape) * (not target.exact)
    for axis, word in enumerate(axis_words(target.right.shape, target.by_head, len(step.setting.tokens))):
        arrays = np.maximum(target.theirs, -1e30), np.maximum(target.right, -1e30), allowed, target.right_close
        theirs, right, room, close = (np.moveaxis(x, axis, 0).reshape(x.shape[axis], -1) for x in arrays)
        order, wrong = np.arange(len(theirs)), np.flatnonzero(~close.all(axis=1)).tolist()
        if len(wrong) > 1024:
            continue
        for i in wrong:
            equal = np.flatnonzero((np.abs(right - theirs[i]) <= room[i]).all(axis=1))
            if not len(equal):
                break
            order[i] = equal[0]
        else:
            apart = set((order - np.arange(len(order)))[wrong].tolist())
            if wrong and wrong == list(range(wrong[0], len(order))) and len(apart) == 1:
                by = apart.pop()
                last = f"last {word} is that" if len(wrong) == 1 else f"last {len(wrong)} {word}s are those"
                text = f"its {last} {abs(by)} {'before' if by < 0 else 'after'}"
                yield Description(1.7, text, after(partial(_last_moved, count=len(wrong), by=by, axis=axis)))
                continue
            pairs = ", ".join(f"{i} has that of {order[i]}" for i in wrong[:4])
            text = f"its {word}s are in another order: {word} {pairs}{', ...' * (len(wrong) > 4)}"
            change = partial(_in_order, order=order, axis=axis, joined=target.right.ndim == 2)
            yield Description(1.8, text, after(change))


def _last_moved(x: Array, count: int, by: int, axis: int) -> Array:
    places = np.arange(x.shape[axis])
    places[-count:] += by
    return x.take(places, axis)


def _in_order(x: Array, order: Ints, axis: int, joined: bool) -> Array:
    """joined: the order is one of the rows of a norm over heads, which `after` passes by token and head."""
    return (x.reshape(-1, x.shape[-1]) if joined else x).take(order, axis)


def _rounding(step: Step, theirs: Array) -> Iterator[Description]:
    """round(x * scale + c) or round(x * scale * c): the constants that give every integer."""
    v = step.inputs[0].astype(np.float64) * step.inputs[1]
    inside = np.abs(theirs) < min(127, np.abs(theirs).max())
    if not inside.any():
        return
    v, t = v[inside], theirs[inside]
    low, high = (t - 0.5 - v).max(), (t + 0.5 - v).min()
    if low < high and (c := _plainest(low, high)):
        added = instead(lambda x, s: np.clip(np.rint(x * s + np.float32(c)), -128, 127))
        yield Description(1.2, f"{c:g} is added to x * scale before the rounding", added)
    big = np.abs(v) > 1
    if big.any():
        ends = np.sort(np.stack([(t - 0.5)[big] / v[big], (t + 0.5)[big] / v[big]]), axis=0)
        f = _plainest(ends[0].max(), ends[1].min())
        if ends[0].max() < ends[1].min() and f not in (0.0, 1.0):
            multiplied = instead(lambda x, s: np.clip(np.rint(x * s * np.float32(f)), -128, 127))
            yield Description(1.2, f"x * scale is multiplied by {f:g} before the rounding", multiplied)


def _plainest(low: float, high: float) -> float:
    """The number between two with the fewest digits."""
    middle = (low + high) / 2
    return next((c for n in range(1, 9) if low < (c := float(f"{middle:.{n}g}")) < high), middle)


def _cut_rows(step: Step, target: Target) -> Iterator[Description]:
    """How many columns a norm's length, or an activation scale, is taken of."""
    x = step.inputs[0].astype(np.float64)
    n = x.shape[1]
    if step.name.endswith("hook_x_scale"):
        for end, columns in (("first", x), ("last", x[:, ::-1])):
            scales = 127 / np.maximum(np.maximum.accumulate(np.abs(columns), axis=1), 1e-5)
            for k in np.flatnonzero((np.abs(scales - target.theirs) <= target.allowed).all(axis=0))[:3].tolist():
                part = slice(0, k + 1) if end == "first" else slice(n - k - 1, n)
                text = f"the activation scale takes the largest of the {end} {k + 1} of {n} columns only"
                yield Description(1.2, text, before(0, itemgetter((slice(None), part))))
        return
    sums, count, eps = np.cumsum(np.square(x), axis=1), np.arange(1, n + 1), float(step.inputs[1])
    for words, mean in (("", sums / count), (", divided by all", sums / n)):
        fitting = (np.abs(np.sqrt(mean + eps) - target.theirs) <= target.allowed).all(axis=0)
        for k in np.flatnonzero(fitting)[:3].tolist():
            text = f"the mean of squares runs over the first {k + 1} of {n} columns only{words}"
            yield Description(1.2, text, instead(partial(_length_of, columns=k + 1, divisor=n if words else k + 1)))


def _length_of(x: Array, eps: float, columns: int, divisor: int) -> Array:
    return np.asarray(np.sqrt(np.square(x[:, :columns].astype(np.float64)).sum(-1, keepdims=True) / divisor + eps))


def _cut_sums(step: Step, target: Target) -> Iterator[Description]:
    """Where a product's sums stop or start, from one of them."""
    x, m = step.inputs[0].astype(np.float64), matrix(step.inputs[1]).astype(np.float64)
    i, j = np.unravel_index(int(np.abs(target.theirs - target.right).argmax()), target.theirs.shape)
    sums = np.cumsum(x[i] * m[j])
    n, slack = len(sums), 0.0 if target.exact else float(np.broadcast_to(target.allowed, target.theirs.shape)[i, j])
    for k in np.flatnonzero(np.abs(sums - target.theirs[i, j]) <= slack)[:20].tolist():
        yield Description(1.1, f"the sums stop after {k + 1} of {n} inputs", scale_inputs(0, k + 1, 1, others=0))
    for k in np.flatnonzero(np.abs(sums[-1] - sums - target.theirs[i, j]) <= slack)[:20].tolist():
        yield Description(1.1, f"the sums start at input {k + 1} of {n}", scale_inputs(k + 1, None, 1, others=0))
    missing = sums[-1] - target.theirs[i, j]
    before_sum = np.concatenate([[0.0], sums])
    for width in (1, 2, 4, 8, 16, 32, 64, 128, 256):
        if width >= n:
            break
        for a in np.flatnonzero(np.abs(before_sum[width:] - before_sum[:-width] - missing) <= slack)[:10].tolist():
            yield Description(1.3, f"inputs {a} to {a + width - 1} are left out", scale_inputs(a, a + width, 0))


def _sums_of_two(step: Step, target: Target, rows: Ints) -> Iterator[Description]:
    """a A + b B, of tensors that the run has, the right result among them."""
    block = step.name.split(".")[:2]
    near = [name for name in step.seen if name.split(".")[:2] == block or "resid" in name or "embed" in name]
    alike = [n for n in near if step.seen[n].size == step.result.size and step.seen[n].dtype == step.result.dtype]
    given = {name: x for name in alike if np.isfinite(x := step.seen[name]).all()}
    arrays = {"": target.right.astype(step.result.dtype), **dict(list(given.items())[-16:])}
    columns = {n: x.reshape(target.theirs.shape)[rows].reshape(-1).astype(np.float64) for n, x in arrays.items()}
    y = target.theirs[rows].reshape(-1)
    limit = np.broadcast_to(target.allowed, target.theirs.shape)[rows].reshape(-1)
    for a, b in combinations(arrays, 2):
        pair = np.stack([columns[a], columns[b]], axis=1)
        gram = pair.T @ pair
        if np.linalg.det(gram) <= 1e-9 * gram[0, 0] * gram[1, 1]:
            continue
        factors = np.linalg.solve(gram, pair.T @ y)
        if (np.abs(pair @ factors - y) > 4 * limit).mean() > 0.01:
            continue
        named = [_name_of(float(factor), step) for factor in factors]
        nouns = ["its right value" if n == "" else f"{{{n}}}" for n in (a, b)]
        terms = [n if w == "1" else f"{w} times {n}" for (w, _), n in zip(named, nouns, strict=True) if w != "0"]
        yield Description(1.5, f"it is {' + '.join(terms)}", _sum_edit((a, b), [c for _, c in named], step.name))


def _name_of(factor: float, step: Step) -> tuple[str, Constant]:
    """The simplest name of a factor, and its value by `numbers_of`."""
    if abs(factor) <= 1e-6:
        return "0", lambda _: 0.0
    return next(names_of(factor, step, 1e-5), (f"{factor:.6g}", lambda _: factor))


def _sum_edit(names: tuple[str, str], factors: list[Constant], origin: str) -> Edit:
    def edit(step: Step, compute: Edit, *inputs: Any) -> Array:
        right, numbers = compute(*inputs), numbers_of(step)
        parts = [right if n == "" else step.seen[moved(n, origin, step)].reshape(right.shape) for n in names]
        first, second = (np.float32(f(numbers)) * part for f, part in zip(factors, parts, strict=True))
        return (first + second).astype(right.dtype)

    return edit
