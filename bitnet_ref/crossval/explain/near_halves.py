"""Rounding flips of a thin trace: activations near a half are rounded the other way in the reference.

A trace without int8 tensors does not show its flips. But the reference knows how far each of its activations is from a
half. At the first wrong token of the first wrong tensor, those that float32 noise can carry over a half are flipped,
the nearest first, and the reference goes on with the flip that makes this token agree. If in the end the whole trace
agrees, the engine is right up to rounding. A mistake changes more than a few integers of a token.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ...backends.loaded import LoadedModel
from ..compare import Comparison, OpResult, Tensors, View, compare
from ..flips import Flip, distance_to_half
from ..names import INT8, LOGITS, layer_of, linear_input, op_order
from ..tolerances import FEW_FLIPS, FLIP_CEILING, NARROW_FLOATS, VALUES_PER_FLIP, near_half
from .variants import IMPOSSIBLE, Edit, Setting, Step

_TRIED = 32  # activations of one token that are flipped alone
_TRIED_FIRST = 4  # of these, how many are flipped together with others
_TOGETHER = 3  # flips of one token; one of them may only be near a half after another
_TRIALS = 500  # of a whole search: it costs as much for an engine with a mistake


def follow_flips(model: LoadedModel, tokens: Sequence[int], candidate: Tensors, comparison: Comparison) -> Comparison:
    """The comparison with the reference that rounds some activations as the candidate must have.

    The given free-running `comparison` itself where it agrees, and where flips do not explain the difference.
    """
    narrow = getattr(candidate, "engine_dtype", None) in NARROW_FLOATS
    if comparison.agrees or comparison.problem is not None or comparison.mode != "free-running" or narrow:
        return comparison
    try:
        followed = _FlipSearch(Setting.of(model, tokens), View(candidate)).follow(comparison)
    except IMPOSSIBLE:  # the candidate's tensors do not fit the model's
        return comparison
    return comparison if followed is None else followed


@dataclass
class _Run:
    """A run of the reference. near: its activations near a half, by the name of the int8 tensor."""

    tensors: dict[str, NDArray] = field(default_factory=dict)
    steps: dict[str, Step] = field(default_factory=dict)
    near: dict[str, list[Flip]] = field(default_factory=dict)


class _FlipSearch:
    """Finds the flips that make the reference agree with a candidate."""

    def __init__(self, setting: Setting, candidate: View) -> None:
        self.setting, self.candidate, self.trials = setting, candidate, 0
        self.twins: dict[str, set[str]] = {}  # by int8 tensor: those made of the same input, itself included
        self.order = {name: i for i, name in enumerate(op_order(setting.config))}
        linears = [name.rpartition(".")[0] for name in self.order if name.endswith(INT8)]
        self.sources = {linear_input(linear, setting.config) for linear in linears}  # `compare` judges flips by them

    def follow(self, comparison: Comparison) -> Comparison | None:
        """The comparison with the flipped reference; None where the candidate does not agree with any."""
        flips: list[Flip] = []
        run, followed = self.run(flips), comparison
        values = sum(run.steps[name].result.size for name in run.steps if name.endswith(INT8))
        while (first := followed.first_divergence) is not None:
            flips += (added := self.explain(flips, run, first))
            if not added or len(flips) > max(FEW_FLIPS, values // VALUES_PER_FLIP):
                return None
            run = self.run(flips)
            followed = self.compare(run.tensors)
        followed.missing = comparison.missing
        followed.flips[:0] = flips
        followed.n_flips += len(flips)
        followed.implied_flips = len(flips)
        return followed

    def explain(self, flips: list[Flip], run: _Run, first: OpResult, together: int = _TOGETHER) -> list[Flip]:
        """A few more flips with which the token at which `first` is wrong agrees; empty if there are none."""
        if first.token is None or not first.relative_l2 <= FLIP_CEILING:
            return []
        near = [flip for flip in self.near_halves(run, first) if flip.place not in {each.place for each in flips}]
        for flip in near[:_TRIED]:
            if self.agrees_with([*flips, flip], run, first):
                return [flip]
        for flip in near[:_TRIED_FIRST] if together > 1 else ():
            changed = self.run([*flips, flip], first.name, run)
            if further := self.explain([*flips, flip], changed, first, together - 1):
                return [flip, *further]
        return []

    def near_halves(self, run: _Run, first: OpResult) -> list[Flip]:
        """The activations of the first wrong token that may flip, the nearest to a half first.

        Those of blocks that agree as well: there the effect of a flip may still be within the tolerance.
        """
        stop = self.order[first.name]
        of_any_token = first.name == LOGITS and first.shape[0] == 1  # only the last token's are recorded
        near = [
            flip
            for name, there in run.near.items()
            for flip in there
            if self.order[name] < stop and (of_any_token or flip.token == first.token)
        ]
        return sorted(near, key=lambda flip: flip.distance / flip.noise)

    def agrees_with(self, flips: list[Flip], run: _Run, first: OpResult) -> bool:
        """Whether, with these flips, the wrong token agrees and so does all that is computed before it."""
        self.trials += 1
        if self.trials > _TRIALS:
            return False
        result = self.compare(self.run(flips, first.name, run).tensors, only_these=True).first_divergence
        return result is None or (result.name == first.name and (result.token or 0) > (first.token or 0))

    def compare(self, tensors: Mapping[str, NDArray], only_these: bool = False) -> Comparison:
        candidate = View(self.candidate, set(tensors)) if only_these else self.candidate
        return compare(tensors, candidate, self.setting.config, self.setting.tokens)

    def run(self, flips: Sequence[Flip], until: str | None = None, earlier: _Run | None = None) -> _Run:
        """The reference with these flips, up to a tensor. What they do not change is taken from an earlier run."""
        done = _Run() if earlier is None else _Run({}, dict(earlier.steps), dict(earlier.near))
        inputs: list[Step] = []  # of each group of linears that read the same tensor, the first

        def settle(step: Step) -> NDArray:
            done.steps[step.name] = step
            if step.name.endswith(INT8):
                first = next((each for each in inputs if np.may_share_memory(each.inputs[0], step.inputs[0])), None)
                if first is None:
                    inputs.append(step)
                    done.near[step.name] = list(_near_halves(step))
                self.twins.setdefault((first or step).name, set()).add(step.name)
            return step.result

        def is_compared(name: str) -> bool:
            return name in self.candidate or name.endswith(INT8) or name in self.sources

        edits = {twin: edit for name, edit in _edits(flips).items() for twin in self.twins[name]}
        tape = None if earlier is None else earlier.steps
        done.tensors = self.setting.with_edits(edits).run(is_compared, until, tape, settle)
        return done


def _near_halves(step: Step) -> Iterator[Flip]:
    """The activations of an int8 step that noise can carry over a half, each as the flip that it would be."""
    x, scale = step.inputs
    value, noise = x * scale, near_half(layer_of(step.name) or 0)
    for i, j in np.argwhere(distance_to_half(value) <= noise).tolist():
        mine, below = round(float(value[i, j])), int(np.floor(value[i, j]))
        yield Flip(step.name, i, j, float(value[i, j]), noise, mine, below + (mine == below))


def _edits(flips: Sequence[Flip]) -> dict[str, Edit]:
    return {name: _round_as([flip for flip in flips if flip.name == name]) for name in {flip.name for flip in flips}}


def _round_as(flips: Sequence[Flip]) -> Edit:
    """The edit of an int8 step that makes these flips."""

    def edit(step: Step, compute: Edit, *inputs: NDArray) -> NDArray:
        x_q = compute(*inputs).copy()
        for flip in flips:
            x_q[flip.token, flip.element] = flip.candidate
        return x_q

    return edit
