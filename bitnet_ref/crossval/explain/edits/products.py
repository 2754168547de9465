"""Other formulas of linears: their matrices, codes, sums and scales, and what a kernel does at the edges of its tiles."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from itertools import permutations
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ....families.family import Edit, after, before, instead, layer_weights
from ....reference.layers import Array, Floats
from ....reference.weights import LinearWeight
from ...types import Ints
from ..variants import Step
from .changes import orders
from .kinds import Change, Description, Formula, Row, norms_of, scale_inputs, wide, with_other, with_part


# fmt: off
@lru_cache(maxsize=8)
def matrix(w: LinearWeight) -> NDArray[np.float32]:
    """The matrix itself, (out, K); a ternary one in integers."""
    if w.bit_linear is not None:
        return w.bit_linear.ternary().astype(np.float32)
    return w.rows(slice(None), np.float32)


def product(x: Array, w: Array) -> Array:
    return wide(x) @ wide(w).T


CODES = {
    "0 and +1 exchanged": (-1, 1, 0), "-1 and 0 exchanged": (0, -1, 1), "taken as 0, 1, 2": (0, 1, 2),
    "shifted: 0, +1, -1": (0, 1, -1), "shifted: +1, -1, 0": (1, -1, 0), "without zeros: -1, +1, +1": (-1, 1, 1), "without zeros: -1, -1, +1": (-1, -1, 1),
    "taken without their sign": (1, 0, 1), "without -1": (0, 0, 1), "without +1": (-1, 0, 0),
}


TERNARY_MATRICES: list[Row] = [(1, f"the codes of {{w}} are {words}", lambda m, codes=codes: np.array(codes, dtype=np.float32)[m.astype(int) + 1]) for words, codes in CODES.items()]


TERNARY_MATRICES += [
    (1.2, f"the codes of {{w}} in the highest bits of a byte, of {words}, are shifted with their sign, so that +1 becomes -3", lambda m, are_highest=are_highest: np.where(are_highest(m) & (m > 0), np.float32(-3), m))
    for words, are_highest in (
        ("the last quarter of rows", lambda m: np.arange(len(m))[:, None] >= len(m) // 4 * 3), ("each fourth weight", lambda m: np.arange(m.shape[1]) % 4 == 3),
        ("the first 32 of 128 weights", lambda m: (np.arange(m.size).reshape(-1, 128) % 128 < 32).reshape(m.shape)),
    )
]


def _in_parts(size: int, limit: Change, running: bool = False) -> Formula:
    """Sums of `size` products each, of which limit() is taken, then added; running: limit() of each sum so far."""

    def formula(x: Array, w: LinearWeight) -> Array:
        m = matrix(w)
        total = np.zeros((len(x), len(m)))
        for start in range(0, x.shape[1], size):
            part = product(x[:, start : start + size], m[:, start : start + size])
            total = limit(total + part) if running else total + limit(part)
        return total

    return formula


def _saturated(bits: int) -> Change:
    return lambda y: np.clip(y, -(2 ** (bits - 1)), 2 ** (bits - 1) - 1)


def _wrapped(bits: int) -> Change:
    return lambda y: (y + 2 ** (bits - 1)) % 2**bits - 2 ** (bits - 1)


LIMITS = (("wrap round", _wrapped), ("saturate", _saturated))
PARTIAL_SUMS: list[Row] = [
    *((1.2, f"sums of {size} products {words} at {bits} bits, before they are added", _in_parts(size, limit(bits))) for bits, sizes in ((8, (2, 4, 8, 16, 32, 64)), (16, (512, 1024, 2048)))
        for size in sizes for words, limit in LIMITS),
    *((1.2, f"accumulators saturate at {bits} bits after each {size} products", _in_parts(size, _saturated(bits), running=True)) for bits, sizes in ((8, (4, 8, 16, 32)), (16, (16, 32, 64, 128))) for size in sizes),
]
ACCUMULATORS: list[Row] = [(1, f"accumulators {words} at {bits} bits", limit(bits)) for bits in range(16, 7, -1) for words, limit in LIMITS]


def products(step: Step) -> Iterator[Description]:
    """Another matrix, other columns, another table of codes."""
    x, w = step.inputs[:2]
    ternary, n = step.name.endswith("hook_acc_int32"), x.shape[1]
    matrices = list(TERNARY_MATRICES) if ternary else []
    matrices.append((1, "{w} is transposed", np.transpose) if w.shape[0] == w.shape[1] else (1.2, "{w} is stored the other way round: (in, out)", lambda m: m.reshape(m.shape[::-1]).T))
    for cost, text, change in matrices:
        yield Description(cost, text, instead(lambda x, w, change=change: product(x, change(matrix(w)))))
    if ternary:
        yield from (Description(cost, text, after(change)) for cost, text, change in ACCUMULATORS)
        yield from (Description(cost, text, instead(formula)) for cost, text, formula in PARTIAL_SUMS)
    else:
        yield from _from_norm(step)
    yield from _fused(step)
    yield from _scale_maps(w)
    yield from whole_tiles()
    if not step.name.startswith("lm_head"):
        yield from (Description(1.3, f"rows of {{w}} are {by} too far: a tile's place is wrong", after(partial(np.roll, shift=by, axis=1))) for k in (2, 4, 8, 16, 32, 64) for by in (k, -k) if k < w.shape[0] // 2)
    for k in sorted({n - n % 256, n - n % 128, n // 2, n // 4, 3 * n // 4, *(n - b for b in (1, 2, 3, 4, 8, 16, 32, 64, 128, 256))}):
        if 0 < k < n:
            yield Description(1.1, f"the sums stop after {k} of {n} inputs", scale_inputs(0, k, 1, others=0))
            yield Description(1.2, f"the sums start at input {n - k}", scale_inputs(n - k, None, 1, others=0))
    yield Description(1.3, "every second input is left out", before(0, lambda x: x * (np.arange(x.shape[1]) % 2 == 0).astype(x.dtype)))
    for k in (8, 16, 32, 64, 128):
        for first in range(0, n, k) if n % k == 0 and n > k else ():
            yield Description(1.4, f"inputs {first} to {first + k - 1} are left out", scale_inputs(first, first + k, 0))
            yield Description(1.5, f"inputs {first} to {first + k - 1} count twice", scale_inputs(first, first + k, 2))
    yield from with_part(1.1, "the matrix of {} is taken", step, lambda other: isinstance(other, type(w)) and other.shape == w.shape, lambda compute, other, x, w, *rest: compute(x, other, *rest))
    embedding = step.setting.weights.embedding
    if embedding is not w and embedding.shape == w.shape and not ternary:
        yield Description(1, "the embedding is taken for {w}, as if they were tied", instead(lambda x, w: product(x, matrix(embedding))))


# Linears that many files hold as one matrix, in the order of its parts.
FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


def _fused_with(step: Step) -> tuple[str, ...]:
    """The linears of a step's fused matrix; () if its own is none."""
    return next((names for names in FUSED if step.name.split(".")[-2] in names), ())


def _fused_rows(order: Callable[[list[Ints], int, int], Any]) -> Edit:
    """A product whose rows are cut from a fused matrix in another order.

    order(the rows of each part, heads of q for a kv head, head_dim): all rows, in the order in which they are taken.
    """

    def edit(step: Step, compute: Edit, x: Array, w: LinearWeight) -> Array:
        own, layer, cfg = step.name.split(".")[-2], layer_weights(step), step.setting.config
        names = _fused_with(step)
        matrices = [matrix(getattr(layer, name)) for name in names]
        stops = np.cumsum([len(m) for m in matrices])
        parts = np.split(np.arange(stops[-1]), stops[:-1])
        rows = order(parts, cfg.num_attention_heads // cfg.num_key_value_heads, cfg.head_dim)
        return product(x, np.concatenate(matrices)[rows[parts[names.index(own)]]]).astype(step.result.dtype)

    return edit


def _by_kv_head(parts: list[Ints], group: int, d: int) -> Ints:
    """q's heads of a kv head, its k, its v, then those of the next one."""
    q, k, v = parts
    return np.concatenate([x.reshape(len(k) // d, -1) for x in (q, k, v)], axis=1).reshape(-1)


def _by_pair(parts: list[Ints], group: int, d: int) -> Ints:
    return np.stack(parts, axis=1).reshape(-1)


def _fused(step: Step) -> Iterator[Description]:
    names = _fused_with(step)
    orders_of: list[tuple[str, Callable[..., Any]]] = []
    for order in permutations(range(len(names))) if names else ():
        if list(order) != sorted(order):
            words = ", ".join(names[i] for i in order)
            orders_of.append((f"taken as if they were in the order {words}", lambda p, group, d, order=order: np.argsort(np.concatenate([p[i] for i in order]))))
    if len(names) == 3:
        orders_of += [("stored by kv head (its queries, its k, its v) and read part by part", _by_kv_head), ("stored part by part and read by kv head", lambda *a: np.argsort(_by_kv_head(*a)))]
    elif names:
        orders_of += [("stored in turn, gate and up, and read as halves", _by_pair), ("stored as halves and read in turn, gate and up", lambda *a: np.argsort(_by_pair(*a)))]
    for words, rows in orders_of:
        yield Description(1.2, f"rows of {' and '.join(names)}, in one matrix, are {words}", _fused_rows(rows))


def _absmean_again(axis: int | None, size: int = 1) -> Change:
    """A matrix of few values ternary once more, with the mean of |w| along `axis` of blocks of `size` columns."""

    def change(m: Array) -> Array:
        blocks = m.reshape(len(m), -1, size) if size > 1 else m
        scale: Floats = np.maximum(np.abs(wide(blocks)).mean(axis, keepdims=True), 1e-30)
        codes: Floats = np.clip(np.rint(blocks / scale), -1, 1)
        return (codes * scale).reshape(m.shape)

    return change


def _whole_tiles_only(y: Array, size: int) -> Array:
    return np.where(np.arange(y.shape[1]) < y.shape[1] // size * size, y, 0)


def whole_tiles() -> Iterator[Description]:
    """A kernel that has no code for what is left behind the last whole tile of rows."""
    for size in (4, 8, 16, 32, 64, 128, 256):
        yield Description(1.2, f"rows of {{w}} behind the last whole tile of {size} give zeros", after(partial(_whole_tiles_only, size=size)))


def _from_norm(step: Step) -> Iterator[Description]:
    """The input of a product without the weight of the norm that it comes from."""
    x = step.inputs[0]
    names = [name for name, other in step.seen.items() if name.endswith("hook_normalized") and np.may_share_memory(x, other)]
    weight = norms_of(step)[names[-1].rpartition(".")[0]].weight if names else None
    if weight is not None and weight.size == x.shape[1]:
        yield Description(1.2, "its input is not multiplied by the norm's weight", before(0, lambda x: x / weight))
        yield Description(1.2, "its input is multiplied by the norm's weight twice", before(0, lambda x: x * weight))


def _scale_maps(w: LinearWeight) -> Iterator[Description]:
    """Scales of groups of weights, (rows, groups), read at other places."""
    scales = getattr(w, "scales", None)
    if not isinstance(scales, np.ndarray) or scales.ndim != 2:
        return
    group = w.shape[1] // scales.shape[1]
    for words, again in (("matrix", _absmean_again(None)), ("row", _absmean_again(1)), (f"group of {group}", _absmean_again(2, group))):
        text = f"absmean was taken again, of each {words} of {{w}}, which was ternary already"
        yield Description(1.1, text, instead(lambda x, w, again=again: product(x, again(matrix(w)))))
    for words, codes in (("0, 1 and 2", 1), ("-2, -1 and 0", -1)):
        yield Description(1.1, f"the codes of {{w}} are taken as {words}", instead(lambda x, w, by=codes: product(x, matrix(w) + by * np.repeat(w.scales.astype(np.float32), group, 1))))
    maps: list[Row] = [(1.2, f"are those of {abs(by)} rows {'before' if by > 0 else 'after'}", partial(np.roll, shift=by, axis=0)) for size in (1, 2, 4, 8, 16, 32, 64, 128) for by in (size, -size) if size < len(scales)]
    maps += [(1.2, f"are those of the {words} row", lambda s, i=i: s[[i] * len(s)]) for words, i in (("first", 0), ("last", -1))]
    if scales.shape[1] > 1:
        maps += [(1.2, f"of a row are those of its {words} group", lambda s, i=i: s[:, [i] * s.shape[1]]) for words, i in (("first", 0), ("last", -1))]
        maps.append((1.2, "of a row are all their mean", lambda s: np.broadcast_to(wide(s).mean(1, keepdims=True), s.shape)))
        for words, order in orders(scales.shape[1]):
            maps.append((1.2, f"of a row are {words}", partial(np.take, indices=order(scales.shape[1]), axis=1)))
        maps += [(1.1, "are stored group by group and read row by row", lambda s: s.reshape(s.shape[::-1]).T), (1.1, "are stored row by row and read group by group", lambda s: s.T.reshape(s.shape))]
    for cost, words, change in maps:
        yield Description(cost, f"the scales of {{w}} {words}", with_other("scales", change))


DEQUANTIZED: list[Row] = [  # acc * (w_scale / x_scale): other scales, other places for them
    (1, "the scale of {w} is applied once more", lambda a, w, s: a * (w.w_dequant_scale**2 / s)),
    (1, "the activation scale is left out", lambda a, w, s: a * w.w_dequant_scale),
    (1, "the result is multiplied by the activation scale, not divided", lambda a, w, s: a * w.w_dequant_scale * s),
    (1.1, "the activation scale is applied once more", lambda a, w, s: a * (w.w_dequant_scale / s / s)),
    (1.1, "both scales are left out", lambda a, w, s: a),
    (1.2, "the largest activation scale is taken for all tokens", lambda a, w, s: a * (w.w_dequant_scale / s.max())),
    (1.1, "absmean was taken again, of each row of {w}, which was ternary already: its scale times the row's share of non-zeros", lambda a, w, s: a * (w.w_dequant_scale * np.abs(matrix(w)).mean(1) / s)),
]


def merged(step: Step) -> Iterator[Description]:
    """One scale for the linears that are computed as one matrix."""
    names = _fused_with(step)
    for words, density in (("the mean of their scales", False), ("mean |w| of their ternary matrices together", True)):
        def scale(step: Step, density: bool = density) -> float:
            ws = [w.bit_linear for name in names if (w := getattr(layer_weights(step), name, None)) is not None]
            sizes = [w.shape[0] for w in ws]
            return float(np.average([w.w_dequant_scale * (np.abs(matrix(w)).mean() if density else 1) for w in ws], weights=sizes))

        if names:
            yield Description(1.2, f"{' and '.join(names)} share one scale, {words}", lambda step, compute, acc, w, s, scale=scale: (acc * (np.float32(scale(step)) / s)).astype(np.float32))
