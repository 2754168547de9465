"""Rounding flips of a thin trace: activations near a half are rounded the other way in the reference.

A trace without int8 tensors does not show its flips. But the reference knows how far each of its activations is from a
half. At the first wrong token of the first wrong tensor, those that float32 noise can carry over a half are flipped,
the nearest first, and the reference goes on with the flips that make this token agree. If in the end the whole trace
agrees, the engine is right up to rounding. A mistake changes more than a few integers of a token.

Logits alone, of many tokens, may hold more flips than can be searched for. Then the reference runs with as much noise
as an engine may have, and logits that are no further off than with that noise cannot be told from a correct engine's.

`flip_trials.py` computes what the reference gives with each set of flips that is tried.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...backends.loaded import LoadedModel
from ...backends.observe import Call, ObservedStep, observe
from ...backends.paged_cache import EngineKVCache
from ...errors import count_of
from ...reference.cache import TokenBatch
from ...reference.layers import Array
from ...reference.model import BlockPlace, embeddings, head_input, rope_tables_of
from ...reference.weights import LayerWeights
from ..compare import Comparison, OpResult, Tensors, View, compare
from ..flips import Flip, distance_to_half
from ..metrics import recorded_dtype
from ..names import INT8, LOGITS, first_rows, is_by_head, layer_of, linear_input, op_order
from ..tolerances import FEW_FLIPS, FLIP_CEILING, NARROW_FLOATS, RECORDED_ROUNDING, VALUES_PER_FLIP, near_half
from .flip_trials import BySequence, FlippedPass, FlippedRun, FlipTrials, row_of, rows_of
from .ties import MANY, choices, one_way, tied_rows
from .variants import IMPOSSIBLE, Finished, Setting

_TRIED = ((96, 0), (32, 128))  # how many activations at a time, of the wrong token and of those that it sees
_BEST, _NEAREST = 2, 2  # with how many of these others are tried: after which the least is wrong, and the nearest
_TOGETHER = 4  # flips of one token; one of them may only be near a half after another
_TRIALS = 1000  # of each kind for one wrong token: so many are made for an engine with a mistake
# A trial for logits computes all layers, and logits may hold more flips than can be searched for: so the trials of each
# kind may compute so many rows times layers. This is a count and not a time, so that verdicts are the same on every
# machine. The calls of a trial cost as much as so many rows.
_WORK, _WORK_OF_TIES, _ROWS_OF_CALLS = 40_000, 160_000, 20
_NOISY_RUNS = 8  # of the reference with noise
_BEYOND_NOISE = 1.5  # an error so many times the largest of theirs is no rounding
_USUAL = 0.99  # of one row alone: nor is one that is larger than this share of theirs
_NOISE = 2 / VALUES_PER_FLIP  # uniform, in int8 steps: half of it is the chance that a value flips
_RIGHT = 0.1  # a token of which flips leave more of its error does not agree: the quick answer


def follow_flips(model: LoadedModel, tokens: Sequence[int], candidate: Tensors, comparison: Comparison) -> Comparison:
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


class _FlipSearch:
    """Finds the flips that make the reference agree with a candidate."""

    def __init__(self, setting: Setting, candidate: View) -> None:
        self.setting, self.candidate = setting, candidate
        self.order = {name: i for i, name in enumerate(op_order(setting.config))}
        linears = [name.rpartition(".")[0] for name in self.order if name.endswith(INT8)]
        sources = {linear_input(linear, setting.config) for linear in linears}  # `compare` judges flips by them
        self.work = 0  # of all trials, in rows times layers
        self.compared = {name for name in self.order if name in candidate or name.endswith(INT8) or name in sources}

    def follow(self, comparison: Comparison) -> Comparison | None:
        """The comparison with the flipped reference; None where the candidate does not agree with any."""
        run, followed = self.run(), comparison
        sizes = {name: x.size for name, x in run.tensors.items() if name.endswith(INT8)}
        while (first := followed.first_divergence) is not None:
            added = self.explain(run, first)
            if not added:
                comparison.undecided = self.not_told(run, first, sizes)
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
        searches = (self.search(run, theirs, first.name, token, tried) for tried in _TRIED)
        found = next((flips for flips in searches if flips), [])
        return found or self.search_ties(run, theirs, first.name, token)

    def not_told(self, run: FlippedRun, first: OpResult, sizes: dict[str, int]) -> str:
        """Why what no flips explain may be right; "" if it shows a mistake.   sizes: of the int8 tensors.

        The first wrong token must see a row of ties, or so many int8 values that more may have flipped than are tried
        together: a mistake in every token is seen in the first. Without ties it must be logits, and the values those of
        the layers after the last that the trace shows, or some flips have brought agreement before. From there on the
        tensor must be no further off than that of the reference with noise that flips as many values as an engine may.
        """
        tokens, right = len(self.setting.tokens), run.tensors[first.name]
        flips, before = len(run.flips), [self.order[name] for name in self.candidate if name in self.order]
        before = [place for place in before if place < self.order[first.name]]  # what is shown there agrees
        since = -1 if flips >= FEW_FLIPS else max(before, default=-1)
        given = self.candidate[first.name]
        rounding = RECORDED_ROUNDING.get(recorded_dtype(given), 0.0)
        given = given.reshape(right.shape if given.size == right.size else (1, -1))
        mine, theirs = (rows_of(first.name, x) for x in (right, given))
        token = tokens - 1 if len(theirs) < tokens else first.token or 0
        has_ties = any(self.hides_ties(run, each, first.name, since, mine.shape[1]) for each in range(token + 1))
        if not (flips >= FEW_FLIPS or first.name == LOGITS or has_ties) or not np.isfinite(first.max_abs):
            return ""
        values = sum(size for name, size in sizes.items() if self.order[name] > since)
        if not has_ties and values * (token + 1) <= _TOGETHER * VALUES_PER_FLIP * tokens:
            return ""
        errors = _row_errors(theirs, mine[-len(theirs) :])
        noisy = []
        for seed in range(_NOISY_RUNS):
            cache = EngineKVCache(self.setting.config, slots=1, capacity=tokens)
            done = self._pass(run.flips, cache, 0, tokens, first.name, noise=np.random.default_rng(seed))
            noisy.append(_row_errors(rows_of(first.name, done.seen[first.name]), mine))
        if len(theirs) == 1:
            limits = np.quantile(noisy, [_USUAL]) * (_BEYOND_NOISE if has_ties else 1)
            which = "the values of the last token" if before else "those of the last token"
        else:
            limits = _BEYOND_NOISE * np.maximum.accumulate(np.max(noisy, axis=0))
            agree = (
                "token 0 agrees, those after it" if token == 1 else f"tokens 0 to {token - 1} agree, those after them"
            )
            which = agree if token else "the values"
            together = max(float(np.linalg.norm(each)) for each in noisy)
            if float(np.linalg.norm(errors)) > _BEYOND_NOISE * together:
                return ""
        if (errors > np.maximum(limits, first.tolerance) + rounding).any():
            return ""
        made = f"with {count_of(flips, 'flip')}, " if flips else ""
        are_alone = first.name == LOGITS and not before
        found, does = ("", "logits do") if are_alone else (f"{made}in {first.name} ", "the trace does")
        return (
            f"{found}{which} are off by up to {errors.max():.2g} of their size, and rounding "
            f"flips of int8 activations, which {does} not show, move them by up to {limits.max():.2g}"
        )

    def hides_ties(self, run: FlippedRun, token: int, name: str, since: int, width: int) -> bool:
        """Whether a tensor may hide which of many ties flip: few values, or logits after a further layer.

        since: the place of the last tensor that agrees.   width: of the tensor's rows.
        """
        tied = [
            each for each in tied_rows(run.near.get(token, ()), MANY) if since < self.order[each] < self.order[name]
        ]
        last = self.setting.config.num_hidden_layers - 1
        return any(width < MANY or (name == LOGITS and (layer_of(each) or 0) < last) for each in tied)

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
            if len(steps) + 1 < _TOGETHER:
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

        def rows_of(sets: Sequence[Sequence[Flip]]) -> Iterator[NDArray[np.float64]]:
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
        beginning = {name: first_rows(name, x, token + 1) for name, x in run.tensors.items()}
        return self.compare(beginning, View(theirs, set(beginning))).agrees

    def count(self, run: FlippedRun, made: Sequence[Flip], token: int) -> None:
        """Add to `work` what a trial of these flips costs, in rows times layers."""
        start, layer = _beginning(run, made)
        self.work += (_ROWS_OF_CALLS + token + 1 - start) * (self.setting.config.num_hidden_layers - layer)

    def compare(self, tensors: Tensors, candidate: View) -> Comparison:
        count = next((len(x) for name, x in tensors.items() if not is_by_head(name)), 0)
        return compare(tensors, candidate, self.setting.config, self.setting.tokens[:count])

    # -- runs ----------------------------------------------------------------------------------------------------------

    def run(self, before: FlippedRun | None = None, added: Sequence[Flip] = ()) -> FlippedRun:
        """The reference with these flips and those of the run before, which is used up."""
        tokens, config = self.setting.tokens, self.setting.config
        run = before or FlippedRun()
        run.flips += added
        start = min((flip.token for flip in added), default=0)
        if run.cache is None or run.cache.has_states:
            start, run.cache = 0, EngineKVCache(config, slots=1, capacity=len(tokens))
        done = self._pass(run.flips, run.cache, start, len(tokens))
        for name, rows in done.seen.items():
            _rows_from(start, name, run.tensors.setdefault(name, rows))[...] = rows
        for layer, rows in done.streams.items():
            run.streams[layer] = np.concatenate([run.streams[layer][:start], rows]) if start else rows
        run.near = {token: there for token, there in run.near.items() if token < start} | done.near
        return run

    def trial(self, base: FlippedRun, made: Sequence[Flip], until: str, token: int) -> FlippedRun:
        """The base with more flips, up to a tensor of a token."""
        start, layer = _beginning(base, made)
        cache = EngineKVCache(self.setting.config, slots=1, capacity=token + 1)
        assert base.cache is not None
        cache.keys[:], cache.values[:] = (pool[:, :, : token + 1] for pool in (base.cache.keys, base.cache.values))
        flips = [*base.flips, *made]
        stream = base.streams[layer][start : token + 1] if layer else None
        done = self._pass(flips, cache, start, token + 1, until, layer, stream)
        tensors = {}
        for name, rows in done.seen.items():
            tensors[name] = first_rows(name, base.tensors[name], token + 1).copy()
            _rows_from(start, name, tensors[name])[...] = rows
        near = {each: there for each, there in base.near.items() if each < start} | done.near
        streams = {index: x[: token + 1] for index, x in base.streams.items() if index <= layer}
        streams |= {index: np.concatenate([base.streams[index][:start], x]) for index, x in done.streams.items()}
        return FlippedRun(tensors, flips, near, streams, cache)

    def _pass(
        self,
        flips: Sequence[Flip],
        cache: EngineKVCache,
        start: int,
        stop: int,
        until: str | None = None,
        layer: int = 0,
        stream: Array | None = None,
        noise: np.random.Generator | None = None,
    ) -> _Pass:
        """The reference over some tokens, behind those in the cache. stream: what they are before a layer."""
        config, w = self.setting.config, self.setting.weights
        done = _Pass(self, flips, start, until, noise)
        be = observe(BySequence(), done)
        batch = TokenBatch.of([(0, start, self.setting.tokens[start:stop])])
        ropes = rope_tables_of(be, config, batch.positions)
        with np.errstate(all="ignore"), suppress(Finished):
            x = embeddings(be, w, config, batch.tokens) if stream is None else stream
            for index in range(layer, config.num_hidden_layers):
                at = BlockPlace(ropes[config.rope_of(index)], batch, cache, index)
                x = be.attention_block(x, w.layers[index], config, at)
                x = be.feed_forward(x, w.layers[index], config)
            done.streams[config.num_hidden_layers] = x
            be.lm_head(head_input(be, w, config, x), w.lm_head)
        return done


def _beginning(run: FlippedRun, made: Sequence[Flip]) -> tuple[int, int]:
    """The first token and the first layer that flips beyond a run's change."""
    if run.cache is not None and run.cache.has_states:  # which cannot go back
        return 0, 0
    return min(flip.token for flip in made), min(layer_of(flip.name) or 0 for flip in made)


def _rows_from(start: int, name: str, x: Array) -> Array:
    """A tensor's part of the tokens from `start` on."""
    return x[:, start:] if is_by_head(name) else x[start:]


def _alike(flip: Flip) -> tuple[str, int, float]:
    """What flips have in common that an engine rounds in the same way: they are of one row and of equal size."""
    return flip.name, flip.token, abs(flip.before_rounding)


def _row_errors(mine: Array, theirs: Array) -> NDArray[np.float64]:
    """Relative L2 of each row.   2 x (n, V) -> (n,)"""
    sizes = np.linalg.norm(theirs.astype(np.float64), axis=1)
    difference = np.linalg.norm(mine.astype(np.float64) - theirs, axis=1)
    return np.asarray(difference / np.maximum(sizes, np.finfo(np.float32).tiny))


class _Pass(FlippedPass):
    """A pass over tokens from `start` on that makes flips, and notes what is near a half.

    noise: is added before rounding, and flips one of VALUES_PER_FLIP.
    """

    def __init__(
        self,
        search: _FlipSearch,
        flips: Sequence[Flip],
        start: int,
        until: str | None,
        noise: np.random.Generator | None,
    ) -> None:
        stop = search.order[until] if until is not None else len(search.order)
        wanted = {name for name in search.compared if search.order[name] <= stop}
        super().__init__(search.setting, wanted.__contains__, until)
        self.streams: dict[int, Array] = {}
        self.start, self.noise = start, noise
        self.x_q: Array | None = None  # with noise
        self.near: dict[int, list[Flip]] = {}
        self.flips: dict[str, list[Flip]] = {}
        for flip in flips:
            self.flips.setdefault(flip.name, []).append(flip)

    def on_attention_block(self, step: ObservedStep, call: Call, x: Array, w: LayerWeights, *rest: Any) -> Any:
        self.streams[rest[-1].layer] = x
        return super().on_attention_block(step, call, x, w, *rest)

    def flip(self, x_q: Array) -> Array:
        if self.x_q is not None:
            x_q = self.x_q.copy()
        for flip in self.flips.get(self.name, ()):
            if self.start <= flip.token < self.start + len(x_q):
                x_q[flip.token - self.start, flip.element] = flip.candidate
        return x_q

    def note(self, name: str, value: Array) -> None:
        """The activations that noise can carry over a half, each as the flip that it would be; or values with noise."""
        if self.noise is not None:
            moved = value + self.noise.uniform(-_NOISE, _NOISE, value.shape)
            self.x_q = np.clip(np.rint(moved), -128, 127).astype(np.int8)
            return
        noise = near_half(layer_of(name) or 0, self.start + len(value))[self.start :]
        for i, j in np.argwhere(distance_to_half(value) <= noise[:, None]).tolist():
            before, token = float(value[i, j]), self.start + i
            mine, below = round(before), int(np.floor(before))
            flip = Flip(name, token, j, before, float(noise[i]), mine, below + (mine == below))
            self.near.setdefault(token, []).append(flip)
