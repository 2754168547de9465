"""Traces that are wrong though their engine may be right: arrays that nothing filled, numbers that nothing used."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from ...backends.loaded import LoadedModel
from ...families.family import Edit, like
from ...reference.layers import Array
from ..compare import DIFFERS, Comparison, compare, count_tensors
from ..names import LOGITS
from .variants import IMPOSSIBLE, Setting, Step
from .wording import role


def wrong_recording(
    model: LoadedModel, tokens: Sequence[int], candidate: Mapping[str, Array], comparison: Comparison
) -> str:
    """One sentence if the trace itself is wrong, "" if nothing says so. comparison: free-running, with a difference."""
    wrong = [op.name for op in comparison.ops if op.status == DIFFERS]
    if len(candidate) > 1 and not any(np.any(array) for array in candidate.values()):
        return f"all {count_tensors(candidate)} are all zeros: were the arrays filled before they were recorded?"
    if not _is_unused(model, tokens, candidate, comparison, wrong):
        return ""
    right = f"everything after {wrong[0]}" if len(wrong) == 1 else f"every tensor but {role(wrong[0])}"
    return f"the logits and {right} agree, so the engine did not use these numbers: look at where it is recorded"


def _is_unused(
    model: LoadedModel, tokens: Sequence[int], candidate: Mapping[str, Array], comparison: Comparison, wrong: list[str]
) -> bool:
    """Whether only this tensor is wrong, and the engine's later ones are not what follows from it."""
    has_logits = any(op.name == LOGITS for op in comparison.ops)
    if not has_logits or LOGITS in wrong or len(set(map(role, wrong))) != 1:
        return False
    theirs, setting = np.asarray(candidate[wrong[0]]), Setting.of(model, tokens, candidate)

    def differing(edits: Mapping[str, Edit]) -> list[str]:
        tensors = setting.with_edits(edits).run(candidate.__contains__)
        ops = compare(tensors, candidate, setting.config, setting.tokens).ops
        return [op.name for op in ops if op.status == DIFFERS]

    def as_recorded(step: Step, compute: Edit, *inputs: Array) -> Array:
        right = compute(*inputs)
        return like(theirs.reshape(right.shape), right)

    try:
        return differing({}) == wrong and not set(differing({wrong[0]: as_recorded})) <= set(wrong)
    except IMPOSSIBLE:
        return False
