"""Small edits of the steps of a mixture of experts, beside those that apply to every step (`edits`).

Shares are chosen, computed and normed in some way each; an edit is another choice of these. The file of the family has
those that engines shipped with, under names of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np

from ...families.family import Edit, before, instead, layer_weights
from ...families.moe import chosen_ids, expert_products
from ...reference import layers
from ...reference.layers import Array, Floats
from ...reference.ops import Ops
from .edits.changes import orders
from .edits.kinds import Change, Description, wide
from .number_formats import ROUNDED
from .variants import Step

# fmt: off
FUNCTIONS: dict[str, Change] = {
    "a softmax": lambda s: layers.softmax(wide(s)), "sigmoids": lambda s: 1 / (1 + np.exp(-wide(s))), "the scores themselves": wide,
    "exp of the scores": lambda s: np.exp(wide(s)), "relu of the scores": lambda s: np.maximum(wide(s), 0), "equal parts": lambda s: np.ones_like(wide(s)),
    "a softmax over the tokens": lambda s: layers.softmax(wide(s).T).T,
}
NORMS: dict[str, Callable[[Floats, Floats], Floats]] = {  # of the shares p of all experts, those of the chosen ones
    "divided by their sum": lambda p, own: own / own.sum(1, keepdims=True), "as they are": lambda p, own: own, "divided by the sum of all": lambda p, own: own / p.sum(1, keepdims=True),
    "divided by the largest": lambda p, own: own / own.max(1, keepdims=True), "divided by their number": lambda p, own: own / np.count_nonzero(own, axis=1)[:, None],
    "divided by the root of their sum of squares": lambda p, own: own / np.sqrt(np.square(own).sum(1, keepdims=True)),
}
CHOICES: dict[str, Change] = {"the largest": np.negative, "the smallest": np.asarray, "the largest magnitudes": lambda s: -np.abs(s), "the first": lambda s: np.arange(s.shape[1]) + 0 * s}
POWERS: dict[str, Callable[[Floats], Floats]] = {
    "squared": np.square, "rooted": np.sqrt, "divided by the largest": lambda p: p / p.max(1, keepdims=True), "all equal": lambda p: (p > 0) / np.count_nonzero(p, axis=1)[:, None],
    "1 for the largest, 0 for others": lambda p: (p == p.max(1, keepdims=True)) * 1.0, "in reverse among the chosen": lambda p: _exchanged(p),
}
# fmt: on


def _exchanged(shares: Floats) -> Floats:
    """Each token's shares in reverse, among the experts that it chose."""
    result, k = np.zeros_like(shares), int(np.count_nonzero(shares, axis=1).max())
    ids, tokens = chosen_ids(shares, k), np.arange(len(shares))[:, None]
    result[tokens, ids] = shares[tokens, ids][:, ::-1]
    return result


def descriptions(step: Step) -> Iterator[Description]:
    """Other formulas of a step of a mixture of experts."""
    if step.layer is None or not hasattr(layer_weights(step), "router"):
        return
    kind = step.kind
    if kind == "hook_expert_weights":
        yield from _shares(step)
    elif kind in _MATRICES:
        yield from _products(len(layer_weights(step).gate_proj.experts))
    elif kind == "hook_mixed":
        yield from _mixtures(len(step.inputs[0]))


def _shares(step: Step) -> Iterator[Description]:
    config: Any = step.setting.config
    k = config.num_experts_per_tok
    for (which, order), (what, function), (how, norm) in product(CHOICES.items(), FUNCTIONS.items(), NORMS.items()):

        def formula(s: Array, *rest: Any, order: Any = order, function: Any = function, norm: Any = norm) -> Floats:
            ids, p = np.argsort(order(s), axis=1, kind="stable")[:, :k], function(s)
            own = np.zeros_like(p)
            np.put_along_axis(own, ids, np.maximum(np.take_along_axis(p, ids, 1), 1e-38), axis=1)
            return np.asarray(norm(p, own))

        words = f"the experts' shares are {what}, {how}" + f"; {which} are chosen" * (which != "the largest")
        yield Description(1.1 + 0.1 * (which != "the largest"), words, instead(formula))
    for words, rule in ROUNDED:
        yield Description(1.2, f"the router's scores are {words}", before(0, rule), rounds=True)


_MATRICES = {"hook_pre": "gate_proj", "hook_pre_linear": "up_proj", "hook_expert_out": "down_proj"}


def _products(experts: int) -> Iterator[Description]:
    def of(change: Callable[[Floats, Floats, Any], tuple[Floats, Any]]) -> Edit:
        def edit(step: Step, compute: Edit, x: Floats, shares: Floats) -> Floats:
            w = getattr(layer_weights(step), _MATRICES[step.kind])
            x, w = change(x, np.take_along_axis(shares, chosen_ids(shares, w.chosen), 1), w)
            return expert_products(Ops(), np.ascontiguousarray(x, dtype=np.float32), shares, w)

        return edit

    def by_share(x: Floats, share: Floats, w: Any) -> tuple[Floats, Any]:
        return (x[:, None] if x.ndim == 2 else x) * share[..., None], w

    yield Description(1.1, "the experts' inputs are multiplied by their shares", of(by_share))
    for words, order in orders(experts) if experts > 2 else ():

        def moved(x: Floats, share: Floats, w: Any, order: Any = order) -> tuple[Floats, Any]:
            return x, replace(w, experts=tuple(w.experts[i] for i in order(len(w.experts))))

        yield Description(1.2, f"the matrices of experts are those of others: {words}", of(moved))


def _mixtures(tokens: int) -> Iterator[Description]:
    for words, power in POWERS.items():
        yield Description(1.1, f"the experts' shares are {words} when results are added", before(1, power))
    for size in range(1, tokens):

        def capped(step: Step, compute: Edit, out: Floats, p: Floats, size: int = size) -> Floats:
            has_place = np.take_along_axis(np.cumsum(p > 0, axis=0) <= size, chosen_ids(p, out.shape[1]), 1)
            return np.asarray(compute(out * has_place[..., None].astype(out.dtype), p))

        yield Description(1.3, f"an expert computes {size} tokens only, of later ones it gives zeros", capped)
