"""Says what a wrong tensor is: the simplest edits of the reference's own steps that give the engine's tensor.

What explains one site is tried at the others: an edit is spread to all steps in which it holds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ...families.family import Edit, Hypothesis
from ..compare import View
from ..names import hook_of, layer_of, role
from .edits.kinds import Description
from .evidence import Evidence, tensors_left
from .site import Explanation, Report, Site, say
from .variants import IMPOSSIBLE, Setting, Step, is_same
from .wording import remedy, scope_in_words

RELATED = (  # one mistake in all
    {"hook_rot_q", "hook_rot_k"}, {"hook_rot_k", "hook_v"}, {"hook_resid_mid", "hook_resid_post"},
    {"hook_attn_out", "hook_mlp_out"}, {"hook_embed", "hook_out"}, {"hook_attn_scores", "hook_z"},
    {"hook_q", "hook_k", "hook_v"}, {"hook_state", "hook_delta_out"}, {"hook_x_scale", "hook_x_int8"},
    {"hook_pre", "hook_pre_linear", "hook_expert_out"},
)  # fmt: skip


@dataclass
class Finding:
    """One explanation of the first wrong tensor.

    name: of a known mistake, else "described".   edits: by step, for the whole run.   left: the tensors that are still
    wrong with these edits, in order.   whole: a known mistake, in all its steps.
    shows_flips: the engine's int8 activations are all known, so flips of them that move its logits do not speak
    against the cause.   made: the edit, for other steps.   tensor: the one that it explains, which is not `left`.
    moved: the first one left is a later one.
    """

    name: str
    cause: str
    remedy: str
    example: str
    edits: dict[str, Edit]
    left: list[str]
    whole: bool = False
    rounds: bool = False
    shows_flips: bool = False
    made: Description | None = None
    tensor: str = ""
    moved: bool = False


@np.errstate(all="ignore")  # most descriptions are wrong, and some overflow
def find(
    setting: Setting,
    view: View,
    report: Report,
    known: Sequence[Hypothesis] = (),
    made: Sequence[Description] | None = None,
) -> list[Finding]:
    """Explanations of the engine's first wrong tensor. Those that leave the fewest tensors wrong come first.

    known: the edits that have a name, which are tried before others.
    made: None for explanations by one edit; by two, these among them (`Site.pairs`).
    """
    evidence = Evidence(setting, view)
    if not evidence.wrong:
        return []
    name, findings = evidence.wrong[0], []
    shown = evidence.example(name)
    site, order = Site(evidence, name, report, known), list(evidence.steps)
    for explanation in (site.explanations() if made is None else site.pairs(made))[:6]:
        finding = _whole(evidence, explanation, shown) or _spread_out(evidence, explanation, shown)
        if finding is None or name in finding.left:
            continue
        cause = explanation.known.cause if explanation.known else explanation.text
        finding.made = replace(explanation, text=cause)
        finding.tensor = name
        finding.moved = bool(finding.left) and order.index(finding.left[0]) > order.index(name)
        findings.append(finding)
        if not finding.left and len(findings) >= 3:
            break
    if any(finding.whole for finding in findings):  # other known mistakes do it in a part of their steps
        findings = [finding for finding in findings if finding.whole or finding.name == "described"]
    int8 = [n for n in evidence.steps if n.endswith("hook_x_int8")]
    for finding in findings:
        finding.shows_flips = bool(int8) and evidence.recorded.issuperset(int8) and not finding.left
    return sorted(findings, key=lambda finding: len(finding.left))


def _whole(evidence: Evidence, explanation: Explanation, shown: str) -> Finding | None:
    """A known mistake in all its steps, if that leaves nothing wrong."""
    known = explanation.known
    if known is None or explanation.place:
        return None
    edits = {name: known.edit for name, step in evidence.steps.items() if known.is_in(step)}
    left = tensors_left(evidence.setting.with_edits(edits), evidence.view, evidence if known.rounds else None)
    if left != []:
        return None
    return Finding(known.name, known.cause, known.remedy, shown, edits, [], whole=True, rounds=known.rounds)


def _spread_out(evidence: Evidence, explanation: Explanation, shown: str) -> Finding | None:
    """An edit in all steps in which it holds."""
    setting, view = evidence.setting, evidence.view
    edits, without = spread(evidence, explanation), evidence if explanation.rounds else None
    left = tensors_left(setting.with_edits(edits), view, without)
    if left is None:
        return None
    for wider in wider_scopes(evidence, explanation, edits) if len(edits) > 1 or not left else ():
        if tensors_left(setting.with_edits(wider), view, without) == left:
            edits = wider
            break
    first, known = evidence.steps[explanation.names[0]], explanation.known
    scope = scope_in_words(edits, evidence.steps)
    place = f" ({explanation.place})" if explanation.place else ""
    cause = f"{scope}: {say(explanation.text, first, len(set(map(role, edits))) > 1)}{place}"
    name, advice = ("described", "") if known is None else (known.name, f"{known.remedy} ")
    return Finding(name, cause, advice + remedy(first), shown, edits, left, rounds=explanation.rounds)


def wider_scopes(evidence: Evidence, explanation: Explanation, edits: dict[str, Edit]) -> Iterator[dict[str, Edit]]:
    """The same edit in more steps, the widest set first: a mistake may not show in every step that has it."""
    kinds, roles = {hook_of(n) for n in edits}, {role(n) for n in edits}
    layers = {layer_of(n) for n in edits}
    shapes = _shape_of(evidence.steps[explanation.names[0]])
    for kinds_only, every_layer in ((True, True), (False, True), (True, False)):
        names = [n for n in evidence.steps if (hook_of(n) in kinds if kinds_only else role(n) in roles)]
        names = [n for n in names if (every_layer or layer_of(n) in layers) and shapes == _shape_of(evidence.steps[n])]
        if kinds_only:  # not in a step that it cannot change: it would undo another mistake there
            own = {n for n in names if n in edits or (role(n) in roles and n not in evidence.setting.edits)}
            names = [n for n in names if n in own or _changes(evidence.steps[n], explanation.edit)]
        if len(names) > len(edits) and (len(edits) > 1 or not kinds_only):
            yield {**dict.fromkeys(names, explanation.edit), **edits}


def _changes(step: Step, edit: Edit) -> bool:
    """Whether an edit changes a step, if only by a bit."""
    try:
        right = step.compute(*step.inputs)
        return not np.array_equal(edit(step, step.compute, *step.inputs), right, equal_nan=right.dtype.kind == "f")
    except IMPOSSIBLE:
        return False


def _shape_of(step: Step) -> list[type]:
    return [type(x) for x in step.inputs]


@np.errstate(all="ignore")
def work_through(setting: Setting, view: View, first: str | None = None) -> str:
    """The line of the reference to compare with, and one value. "" where nothing is wrong, or all is zero.

    first: the wrong tensor that is shown; None, and if all its values may be rounding: the first wrong one.
    """
    evidence = Evidence(setting, view)
    if first not in evidence.targets or evidence.targets[first].right_close.all():
        first = next(iter(evidence.wrong), None)
    if first is None or not evidence.targets[first].theirs.any():
        return ""
    return f"{remedy(evidence.steps[first])}\n{evidence.example(first)}".strip()


def spread(evidence: Evidence, explanation: Explanation) -> dict[str, Edit]:
    """The explanation's edit in all steps where it explains the engine's tensors."""
    edits = dict.fromkeys(explanation.names, explanation.edit)
    own_kinds = {hook_of(name) for name in explanation.names}
    kinds = own_kinds.union(*(group for group in RELATED if own_kinds & group))
    for name in evidence.wrong[1:]:
        if name in edits:
            continue
        layer, stretch = layer_of(name), evidence.stretch(name)
        block = "" if layer is None else f"blocks.{layer}."
        moved_there = (n if not block or layer_of(n) is None else block + role(n) for n in explanation.names)
        tries = [[n for n in moved_there if n in stretch]]
        tries.append([n for n in stretch if hook_of(n) in own_kinds])
        tries += [[n] for n in stretch[:8] if hook_of(n) in kinds]
        for unit in tries:
            if unit and all(n in evidence.steps for n in unit):
                wider = {n: e for n, e in edits.items() if n in stretch} | dict.fromkeys(unit, explanation.edit)
                mine = evidence.compute(name, wider)
                if mine is not None and evidence.targets[name].match(mine, explanation.rounds) == ():
                    edits.update(dict.fromkeys(unit, explanation.edit))
                    break
    return edits


def differing_tensors(one: Setting, other: Setting) -> list[str]:
    """The tensors in which two explanations differ by more than rounding, in order. Empty if they are one."""
    first, second = one.run(), other.run()
    return [name for name, x in first.items() if name in second and not is_same(second[name], x)]
