"""Rounding flips of a thin trace: activations near a half are rounded the other way in the reference.

A trace without int8 tensors does not show its flips. But the reference knows how far each of its activations is from a
half. At the first wrong token of the first wrong tensor, those that float32 noise can carry over a half are flipped,
the nearest first, and the reference goes on with the flips that make this token agree. If in the end the whole trace
agrees, the engine is right up to rounding. A mistake changes more than a few integers of a token.

`flip_trials.py` computes what the reference gives with each set of flips that is tried. Where there may be more flips
than can be searched for, `unseen_flips.py` decides.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence

import numpy as np

from ...backends.loaded import LoadedModel
from ...reference.layers import Array
from ..calls import token_count
from ..compare import Comparison, OpResult, View, compare
from ..flips import Flip
from ..metrics import recorded_dtype
from ..names import INT8, LOGITS, first_rows
from ..tolerances import FEW_FLIPS, FLIP_CEILING, NARROW_FLOATS, RECORDED_ROUNDING, VALUES_PER_FLIP
from ..types import Tensors, Tokens, Wide
from .flip_trials import FlipTrials
from .flipped_runs import FlippedRun, FlippedRuns, beginning, row_of
from .ties import choices, one_way, tied_rows
from .unseen_flips import TOGETHER, why_undecided
from .variants import IMPOSSIBLE, Setting

_TRIED = ((96, 0), (32, 128))  # how many activations at a time, of the wrong token and of those that it sees
_BEST, _NEAREST = 2, 2  # with how many of these others are tried: after which the least is wrong, and the nearest
_TRIALS = 1000  # of each kind for one wrong token: so many are made for an engine with a mistake
# A trial for logits computes all layers, and logits may hold more flips than can be searched for: so the trials of each
# kind may compute so many rows times layers. This is a count and not a time, so that verdicts are the same on every
# machine. The calls of a trial cost as much as so many rows.
_WORK, _WORK_OF_TIES, _ROWS_OF_CALLS = 40_000, 160_000, 20
_RIGHT = 0.1  # a token of which flips leave more of its error does not agree: the quick answer


def follow_flips(model: LoadedModel, tokens: Tokens, candidate: Tensors, comparison: Comparison) -> Comparison:
    """The comparison with the reference that rounds some activations as the candidate must have.

    The given free-running `comparison` itself where it agrees, and where flips do not explain the difference. If flips
    that cannot be searched for may explain it, `undecided` is set: of logits alone, and where flips explain a part.
    """
    narrow = getattr(candidate, "engine_dtype", None) in NARROW_FLOATS
    if comparison.agrees or comparison.problem is not None or comparison.mode != "free-running" or narrow:
        return comparison
    try:
        followed = _FlipSearch(Setting.of(model, tokens), View(candidate)).follow(comparison)
    except IMPOSSIBLE:  # the candidate's tensors do not fit the model's
        return comparison
    return comparison if followed is None else followed


class _FlipSearch(FlippedRuns):
    """Finds the flips that make the reference agree with a candidate."""

    def __init__(self, setting: Setting, candidate: View) -> None:
        super().__init__(setting, candidate)
        self.work = 0  # of all trials, in rows times layers

    def follow(self, comparison: Comparison) -> Comparison | None:
        """The comparison with the flipped reference; None where the candidate does not agree with any."""
        run, followed = self.run(), comparison
        sizes = {name: x.size for name, x in run.tensors.items() if name.endswith(INT8)}
        while (first := followed.first_divergence) is not None:
            added = self.explain(run, first)
            if not added:
                comparison.undecided = why_undecided(self, run, first, sizes)
                return None
            run = self.run(run, added)
            if not self.is_possible(run, sizes):
                return None
            followed = self.compare(run.tensors, self.candidate)
        followed.missing = comparison.missing
        followed.flips[:0] = run.flips
        followed.n_flips += len(run.flips)
        followed.implied_flips = len(run.flips)
        return followed

    def explain(self, run: FlippedRun, first: OpResult) -> list[Flip]:
        """A few more flips with which the token at which `first` is wrong agrees; empty if there are none.

        Flips of that token are tried first, of blocks that agree as well: there their effect may still be within the
        tolerance. Then those of the tokens that it sees: what such a token is itself may agree, and its keys not.
        """
        if first.token is None or not first.relative_l2 <= FLIP_CEILING:
            return []
        last_only = first.name == LOGITS and first.shape[0] == 1
        token = len(self.setting.tokens) - 1 if last_only else first.token
        theirs = self.first_rows(run, token + 1)
        for tried in _TRIED:
            if flips := self.search(run, theirs, first.name, token, tried):
                return flips
        return self.search_ties(run, theirs, first.name, token)

    def search(self, run: FlippedRun, theirs: View, name: str, token: int, tried: tuple[int, int]) -> list[Flip]:
        """Tries each step by itself (a flip, or all flips that are alike), then two steps together, and so on."""
        mine, right = (row_of(name, tensors[name], token) for tensors in (run.tensors, theirs))
        wrong, size = float(np.linalg.norm(mine - right)), float(np.linalg.norm(mine))
        enough = max(_RIGHT * wrong, RECORDED_ROUNDING.get(recorded_dtype(theirs[name]), 0.0) * size)
        trials, queue = 0, deque[tuple[list[Flip], ...]]([()])
        stop = self.work + _WORK if name == LOGITS else math.inf
        while queue:
            steps = queue.popleft()
            made = [flip for alike in steps for flip in alike]
            before = run
            if made:
                self.count(run, made, token)
                before = self.trial(run, made, name, token)
            left: list[tuple[float, list[Flip]]] = []  # what is wrong after each further step
            further = []
            for alike in self.near_halves(before, name, token, tried)[: _TRIALS - trials]:
                further.append(alike)
                self.count(run, [*made, *alike], token)
                if self.work > stop:
                    break
            rows = FlipTrials(self.setting, self.order, before, name, token).rows(further)
            for alike, row in zip(further, rows, strict=True):
                error = float(np.linalg.norm(row - right))
                if error <= enough and self.agrees(self.trial(run, [*made, *alike], name, token), theirs, token):
                    return [*made, *alike]
                left.append((error, alike))
            trials += len(further)
            if trials == _TRIALS or self.work > stop:
                return []
            best = sorted(left, key=lambda each: each[0])[:_BEST]
            if len(steps) + 1 < TOGETHER:
                likely = best + [each for each in left[:_NEAREST] if each not in best]
                queue += [(*steps, alike) for _, alike in likely]
        return []

    def search_ties(self, run: FlippedRun, theirs: View, name: str, token: int) -> list[Flip]:
        """Which of the token's ties are rounded the other way; empty if no choice is found that makes it agree."""
        rows = tied_rows(run.near.get(token, ())).items()
        ties = [alike for each, row in rows if self.order[each] < self.order[name] for alike in row.values()]
        if not ties:
            return []
        mine, right = (row_of(name, tensors[name], token) for tensors in (run.tensors, theirs))
        trials = FlipTrials(self.setting, self.order, run, name, token)
        enough, stop = _RIGHT * float(np.linalg.norm(mine - right)), self.work + _WORK_OF_TIES

        def rows_of(sets: Sequence[Sequence[Flip]]) -> Iterator[Wide]:
            for made in sets:
                self.count(run, made, token)
            return trials.rows(sets)

        for error, flips in choices(ties, rows_of, right):
            if error <= enough and self.agrees(self.trial(run, flips, name, token), theirs, token):
                return flips
            if name == LOGITS and self.work > stop:
                break
        return []

    def is_possible(self, run: FlippedRun, sizes: dict[str, int]) -> bool:
        """Whether a right engine may make so many flips: those that are alike in a row are one, as is a row of ties."""
        tied = {token: tied_rows(run.near.get(token, ())) for token in {flip.token for flip in run.flips}}
        made = {(f.name, f.token) if f.name in tied[f.token] else _alike(f) for f in run.flips}
        if len(made) > max(FEW_FLIPS, sum(sizes.values()) // VALUES_PER_FLIP):
            return False
        return not one_way([row for rows in tied.values() for row in rows.values()], run.flips)

    def near_halves(self, run: FlippedRun, wrong: str, token: int, tried: tuple[int, int]) -> list[list[Flip]]:
        """The activations that may have flipped where a tensor is wrong at a token, the nearest to a half first.

        Those that are alike in a row are tried together before each alone: without a sub-norm the first token's z is
        v, in every head that shares a kv head, and v is integers times a scale, some of them half as large as another.
        """
        done, stop = {flip.place for flip in run.flips}, self.order[wrong]

        def nearest(tokens: range, count: int) -> list[list[Flip]]:
            there = (flip for each in tokens for flip in run.near.get(each, ()))
            possible = [flip for flip in there if self.order[flip.name] < stop and flip.place not in done]
            groups: dict[tuple[str, int, float], list[Flip]] = {}
            for flip in sorted(possible, key=lambda flip: flip.distance / flip.noise)[:count]:
                groups.setdefault(_alike(flip), []).append(flip)
            return [each for alike in groups.values() for each in (alike, *([f] for f in alike if len(alike) > 1))]

        return nearest(range(token, token + 1), tried[0]) + nearest(range(token), tried[1])

    def first_rows(self, run: FlippedRun, count: int) -> View:
        """The candidate's tensors of the first tokens."""
        cut: dict[str, Array] = {}
        for name, mine in run.tensors.items():
            if name in self.candidate:
                theirs = self.candidate[name]
                if theirs.size == mine.size:
                    cut[name] = first_rows(name, theirs.reshape(mine.shape), count)
                elif count == len(self.setting.tokens):  # of the last token only
                    cut[name] = theirs.reshape(1, -1)
        view = View(cut)
        view.own_engine = getattr(self.candidate, "own_engine", True)
        return view

    def agrees(self, run: FlippedRun, theirs: View, token: int) -> bool:
        """Whether all of a trial's tensors agree up to that token."""
        tensors = {name: first_rows(name, x, token + 1) for name, x in run.tensors.items()}
        return self.compare(tensors, View(theirs, set(tensors))).agrees

    def count(self, run: FlippedRun, made: Sequence[Flip], token: int) -> None:
        """Add to `work` what a trial of these flips costs, in rows times layers."""
        start, layer = beginning(run, made)
        self.work += (_ROWS_OF_CALLS + token + 1 - start) * (self.setting.config.num_hidden_layers - layer)

    def compare(self, tensors: Tensors, candidate: View) -> Comparison:
        return compare(tensors, candidate, self.setting.config, self.setting.tokens[: token_count(tensors)])


def _alike(flip: Flip) -> tuple[str, int, float]:
    """What flips have in common that an engine rounds in the same way: they are of one row and of equal size."""
    return flip.name, flip.token, abs(flip.before_rounding)
