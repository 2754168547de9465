"""Traces that are wrong though their engine may be right: arrays that nothing filled, numbers that nothing used."""

from __future__ import annotations

import numpy as np

from ...backends.loaded import LoadedModel
from ...families.family import Edit, like
from ...reference.layers import Array
from ..compare import DIFFERS, Comparison, compare, count_tensors
from ..names import LOGITS, hook_of, is_by_head, role
from ..tolerances import UNUSED_EXCESS
from ..types import Tensors, Tokens
from .edits.changes import changes
from .variants import IMPOSSIBLE, Setting, Step, is_same
from .wording import noun


def wrong_recording(model: LoadedModel, tokens: Tokens, candidate: Tensors, comparison: Comparison) -> str:
    """One sentence if the trace itself is wrong, "" if nothing says so. comparison: free-running, with a difference."""
    wrong = [op.name for op in comparison.ops if op.status == DIFFERS]
    if len(candidate) > 1 and not any(np.any(array) for array in candidate.values()):
        return f"all {count_tensors(candidate)} are all zeros: were the arrays filled before they were recorded?"
    try:
        held = _held_unused(Setting.of(model, tokens, candidate), candidate, comparison, wrong)
    except IMPOSSIBLE:
        return ""
    if held is None:
        return ""
    name = wrong[0] if len(wrong) == 1 else role(wrong[0]) if len(set(map(role, wrong))) == 1 else hook_of(wrong[0])
    text = (
        f"the logits and the other tensors are those of a right {name}, so the engine did not use these numbers "
        "(in a table above, what is computed from them differs too): look at where it is recorded"
    )
    return f"{text}; {held}" if held else text


def _held_unused(setting: Setting, candidate: Tensors, comparison: Comparison, wrong: list[str]) -> str | None:
    """What the first wrong tensor holds, "" if it is nothing simple.

    None unless only this tensor is wrong, be it in several layers, and the later ones are not what follows from it.
    """
    has_logits = any(op.name == LOGITS for op in comparison.ops)
    if not has_logits or LOGITS in wrong or len(set(map(hook_of, wrong))) != 1:
        return None
    name = wrong[0]

    def as_recorded(step: Step, compute: Edit, *inputs: Array) -> Array:
        right = compute(*inputs)
        return like(np.asarray(candidate[name]).reshape(right.shape), right)

    right, used = setting.run(candidate.__contains__), setting.with_edits({name: as_recorded}).run()
    excess = _differing(right, candidate, setting)
    if list(excess) != wrong or excess[name] < UNUSED_EXCESS:
        return None
    # Not by tensors of the same kind: where the mistake is in all of them, the next one differs for its own sake.
    differing = _differing(used, candidate, setting)
    follows = [size for each, size in differing.items() if hook_of(each) != hook_of(name)]
    if max(follows, default=0.0) < UNUSED_EXCESS:
        return None
    theirs = np.asarray(candidate[name]).reshape(right[name].shape)
    rows = sorted(changes(right[name], is_by_head(name)), key=lambda row: row[0])
    return next((words.format(x=noun(name)) for _, words, change in rows if is_same(change(right[name]), theirs)), "")


def _differing(tensors: Tensors, candidate: Tensors, setting: Setting) -> dict[str, float]:
    """{name: by which factor it is beyond its tolerance} of the tensors that differ."""
    ops = compare(tensors, candidate, setting.config, setting.tokens).ops
    return {op.name: op.excess for op in ops if op.status == DIFFERS}
