"""Tensors that a trace holds under another tensor's name: the numbers are right, the name is not.

An engine whose logits agree has computed what it should. If one of its tensors differs and has the numbers of another
one of the same layer, as q after its norm under the name of q before, its author recorded it at another place.
"""

from __future__ import annotations

import numpy as np

from ..reference.layers import Array
from .compare import DIFFERS, Comparison, View, count_tensors, listed
from .names import LOGITS, layer_of, role
from .tolerances import SAME_TENSOR
from .types import Tensors

Meant = tuple[str, bool]  # the last parts of the name of what a tensor holds, and whether it holds the inverse


def misnamed(reference: Tensors, candidate: Tensors, comparison: Comparison) -> dict[str, Meant]:
    """{name: what it holds} of the tensors that differ; empty unless the logits agree and each holds another tensor."""
    wrong = [op.name for op in comparison.ops if op.status == DIFFERS]
    if not wrong or LOGITS in wrong or all(op.name != LOGITS for op in comparison.ops):
        return {}
    meant_by_role: dict[str, Meant] = {}  # by the last parts of the name: the same in every layer
    for name in wrong:
        layer, own = layer_of(name), role(name)
        others = [other for other in reference if layer_of(other) == layer]
        if own in meant_by_role:
            others = [other for other in others if role(other) == meant_by_role[own][0]]
        others.sort(key=lambda other: other.rpartition(".")[0] != name.rpartition(".")[0])  # the nearest first
        meant = _held(name, np.asarray(candidate[name]), reference, others)
        if meant is None or meant_by_role.setdefault(own, meant) != meant:
            return {}
    return {name: meant_by_role[role(name)] for name in wrong}


def in_words(names: dict[str, Meant]) -> list[str]:
    """One sentence for each kind of tensor that is held: how many were not compared under their names, and why."""
    groups: dict[Meant, list[str]] = {}
    for name, (other, inverse) in names.items():
        meant = "" if inverse and other == role(name) else other  # the inverse of itself is said once for all
        groups.setdefault((meant, inverse), []).append(name)
    return [_in_words(given, *meant) for meant, given in groups.items()]


def _in_words(names: list[str], other: str, inverse: bool) -> str:
    roles = listed(list(dict.fromkeys(map(role, names))))
    if inverse:
        held = f"the inverse of {other or 'what is meant'}; record {other or 'the numbers themselves'}"
    else:
        held = f"{other}; record it there, or {roles} at its own place"
    hold = "hold" if ", " in roles else "holds"
    under = "its name" if len(names) == 1 else "their names"
    return f"{count_tensors(names)} not compared under {under}: {roles} {hold} {held}"


def under_right_names(candidate: View, names: dict[str, Meant]) -> View:
    """The candidate's tensors under the names of what they hold; without the inverses."""
    renamed = View(candidate, set(candidate) - set(names))
    for name, (other, inverse) in names.items():
        if not inverse:
            renamed.names.setdefault(name.removesuffix(role(name)) + other, name)
    return renamed


def _held(name: str, theirs: Array, reference: Tensors, others: list[str]) -> Meant | None:
    """The other tensor whose numbers these are, or the one whose inverse."""
    wide = theirs.astype(np.float64).reshape(-1)
    if not wide.size or not np.isfinite(wide).all():
        return None
    for other in others:
        right = np.asarray(reference[other], dtype=np.float64).reshape(-1)
        if right.size != wide.size or not np.isfinite(right).all():
            continue
        limit = SAME_TENSOR * np.linalg.norm(right)
        if other != name and np.linalg.norm(wide - right) <= limit:
            return role(other), False
        if (wide != 0).all() and np.linalg.norm(1 / wide - right) <= limit:
            return role(other), True
    return None
