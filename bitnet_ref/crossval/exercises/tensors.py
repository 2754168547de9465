"""Judges a tensor that a student computed, as crossval judges an engine's: the search for its cause names the mistake.

The student is an engine that has recorded one tensor. The tensors before it are taken from the reference, up to the
input of the piece that he writes; the steps between are his.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ...backends.loaded import LoadedModel
from ...reference.layers import Array
from ..compare import compare
from ..explain.diagnose import diagnose
from ..names import nearest_name
from .answers import CLOSE, as_array, expect_shape, first_wrong, is_close, likely_mistake, one_factor
from .declare import Wrong

SEARCH_S = 1.2  # a student waits for the answer
# Steps within a piece. What is no piece's result is not taken from the reference when a later result is judged.
WITHIN = re.compile(r"hook_scale$|_proj\.hook_|hook_attn_scores$|hook_pattern$")
SIBLINGS = (("hook_q", "hook_k", "hook_v"), ("hook_rot_q", "hook_rot_k"), ("hook_pre", "hook_pre_linear"))


def inputs_of(name: str, recorded: Sequence[str], since: str | None = None) -> list[str]:
    """The names before `name` in the order of the computation that are taken from the reference, up to `since`."""
    before = list(recorded)[: list(recorded).index(name)]
    if since is not None:
        return before[: before.index(since) + 1]
    last = name.rpartition(".")[2]
    beside = next((group for group in SIBLINGS if last in group), ())
    return [each for each in before if not WITHIN.search(each) and each.rpartition(".")[2] not in beside]


def expect_tensor(
    model: LoadedModel,
    tokens: Sequence[int],
    recorded: Mapping[str, Array],
    name: str,
    value: Any,
    since: str | None = None,
    slips: Mapping[str, Callable[[], Array]] | None = None,
) -> str:
    """Raises Wrong, with the likely mistake, unless the array is the reference's tensor of that name.

    recorded: what `run_with_cache(tokens)` gave.   since: the last tensor that the student was given; by default the
    input of the piece that computes `name`.   slips: sentence -> what a student's own mistake gives; tried before
    crossval's search, which knows those of engines. Returns "equal" or "close ...".
    """
    if name not in recorded:
        near = nearest_name(name, list(recorded))
        raise Wrong(f"No tensor is called {name!r}{f': did you mean {near}?' if near else '.'}")
    right, mine = recorded[name], as_array(value)
    expect_shape(mine, right.shape)
    if np.array_equal(mine, right):
        note = "" if mine.dtype == right.dtype else f" (in {mine.dtype}; the model has {right.dtype})"
        return f"Equal, bit for bit{note}."
    if right.dtype.kind in "iu" and mine.dtype.kind == "f" and not np.isfinite(mine).all():
        raise Wrong(f"{right.dtype} is wanted; some of yours are infinite or no numbers.")
    candidate = {each: recorded[each] for each in inputs_of(name, list(recorded), since)}
    candidate[name] = mine.astype(right.dtype) if right.dtype.kind == "f" else mine
    comparison = compare(recorded, candidate, model.config, tokens)
    wide, target = mine.astype(np.float64), right.astype(np.float64)
    if comparison.agrees:
        apart = np.abs(wide - target)[np.isfinite(target)]  # a mask may be a large number in place of −∞
        return f"Close: {(apart > 0).sum():,} of {wide.size:,} values differ by rounding, at most by {apart.max():.1e}."
    size = float(np.abs(target[np.isfinite(target)]).max(initial=0))
    rounding = 0.0 if is_close(wide, target, CLOSE * size) else CLOSE * size  # of values that print alike none is named
    where = first_wrong(wide, target, rounding)
    if simple := likely_mistake(wide, target, {}, CLOSE * size, factors=False):
        raise Wrong(f"{where} {simple}")
    for sentence, make in (slips or {}).items():
        if is_close(wide, make().astype(np.float64), 10 * CLOSE * size):
            raise Wrong(f"{where} Likely mistake: {sentence}.")
    diagnoses = diagnose(model, tokens, candidate, comparison, thorough=False, depth=1, budget_s=SEARCH_S)
    confirmed = next((each for each in diagnoses if each.confirmed), None)
    if confirmed is None:
        raise Wrong(f"{where} {one_factor(wide, target) or by_row(wide, target)}".strip())
    # the remedy of a description names a line of the package, which is the solution
    remedy = (confirmed.remedy,) * (confirmed.name != "described")
    cause = confirmed.cause.replace(", in every layer", "")  # he writes one piece
    raise Wrong(f"{where} Likely mistake: {cause}.", *remedy)


def by_row(mine: Array, right: Array) -> str:
    """That only some tokens are wrong, where it is so."""
    rows = ~np.isclose(mine, right, rtol=1e-4, atol=1e-6).reshape(len(right), -1).all(axis=1)
    wrong = np.flatnonzero(rows)
    if len(right) < 2 or len(wrong) == len(right) or not len(wrong):
        return ""
    return f"Tokens {wrong[0]} to {wrong[-1]} are wrong ({len(wrong)} of {len(right)}); the others are right."
