"""Runs of the reference that round given activations the other way: what each gives, and what is near a half in it.

A `FlippedRun` keeps the cache and the input of each layer, so that a run with one flip more begins where it changes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ...backends.backend import Backend
from ...backends.observe import Call, ObservedStep, observe
from ...backends.paged_cache import EngineKVCache
from ...backends.record import Recorder
from ...reference import layers
from ...reference.cache import TokenBatch
from ...reference.layers import Array
from ...reference.model import BlockPlace, embeddings, head_input, rope_tables_of
from ...reference.weights import LayerWeights, LinearWeight, Norm, TernaryLinear
from ..compare import View
from ..flips import Flip, distance_to_half
from ..metrics import MASKED
from ..names import INT8, NORM_SCALE, OUT, first_rows, is_by_head, layer_of, linear_input, op_order
from ..tolerances import VALUES_PER_FLIP, near_half
from ..types import Wide
from .attention import scores_of, values_of
from .variants import Finished, Setting, quick_ternary_matmul

_QUERIES = 64  # tokens whose attention is computed at once
_NOISE = 2 / VALUES_PER_FLIP  # uniform, in int8 steps: half of it is the chance that a value flips


@dataclass
class FlippedRun:
    """A run of the reference over the first tokens.

    flips: those that it makes.   near: its activations near a half, by token.   streams: the input of each layer, and
    under the number of layers that of the head; only as far as the run goes.
    """

    tensors: dict[str, Array] = field(default_factory=dict)
    flips: list[Flip] = field(default_factory=list)
    near: dict[int, list[Flip]] = field(default_factory=dict)
    streams: dict[int, Array] = field(default_factory=dict)
    cache: EngineKVCache | None = None


class FlippedPass(Recorder):
    """A pass that makes the flips of each of several trials, and ends with the tensor `until`.

    Trial i is the sequence in slot i.   row: the row of each (slot, token) in what is computed.
    """

    def __init__(
        self, setting: Setting, trials: Sequence[Sequence[Flip]], wants: Callable[[str], bool], until: str | None
    ) -> None:
        super().__init__(Backend("float32", threads=1), setting.config, wants)
        self.until = until
        self.flips: dict[str, list[tuple[int, Flip]]] = {}
        for slot, flips in enumerate(trials):
            for flip in flips:
                self.flips.setdefault(flip.name, []).append((slot, flip))
        self.row: dict[tuple[int, int], int] = {}
        self.x: Array | None = None  # what was quantised last
        self.name = ""  # of the first int8 tensor that was made of it

    def start(self, places: Sequence[tuple[int, int]]) -> None:
        """From here on the rows are those of these (slot, token)."""
        self.row = {place: i for i, place in enumerate(places)}

    def keep(self, name: str, array: Array) -> None:
        super().keep(name, array)
        if name == self.until:
            raise Finished

    def on_rms_norm(self, step: ObservedStep, call: Call, x: Array, norm: Norm) -> Any:
        if not self.wants(f"{norm.name}.{NORM_SCALE}") and not self.wants(step.name):
            return call(x, norm)
        return super().on_rms_norm(step, call, x, norm)

    def on_linears(self, step: ObservedStep, call: Call, x: Array, ws: Sequence[LinearWeight]) -> Any:
        """All at once, so that x is quantised once."""
        outputs = list(call(x, ws))
        for w, y in zip(ws, outputs, strict=True):
            self.keep_output(step.name if len(ws) == 1 else f"{w.name}.{OUT}", y)
        self.keep_heads(ws, outputs)
        return tuple(outputs)

    def on_quantize_activations(self, step: ObservedStep, call: Call, x: Array) -> Any:
        x_q, scale = call(x)
        if x is not self.x:  # q, k and v share theirs, and its flips
            self.x, self.name = x, step.name
            self.note(step.name, x * scale)
        return self.flip(x_q), scale

    def on_ternary_matmul(self, step: ObservedStep, call: Call, x_q: Array, w: TernaryLinear) -> Any:
        return super().on_ternary_matmul(step, quick_ternary_matmul(w, call), x_q, w)

    def note(self, name: str, value: Array) -> None:
        """Called with the values before rounding of each int8 tensor."""

    def flip(self, x_q: Array) -> Array:
        """The int8 values with the flips of the tensor `name`."""
        for slot, flip in self.flips.get(self.name, ()):
            row = self.row.get((slot, flip.token), len(x_q))
            if row < len(x_q):
                x_q[row, flip.element] = flip.candidate
        return x_q


class _Pass(FlippedPass):
    """A pass over one sequence from a token on that makes flips, and notes what is near a half.

    noise: is added before rounding, and flips one of VALUES_PER_FLIP.
    """

    def __init__(
        self,
        setting: Setting,
        flips: Sequence[Flip],
        wants: Callable[[str], bool],
        until: str | None,
        batch: TokenBatch,
        noise: np.random.Generator | None,
    ) -> None:
        super().__init__(setting, [flips], wants, until)
        self.start([(0, token) for token in batch.positions.tolist()])
        self.first, self.noise = int(batch.positions[0]), noise
        self.streams: dict[int, Array] = {}
        self.x_q: Array | None = None  # with noise
        self.near: dict[int, list[Flip]] = {}

    def on_attention_block(self, step: ObservedStep, call: Call, x: Array, w: LayerWeights, *rest: Any) -> Any:
        self.streams[rest[-1].layer] = x
        return super().on_attention_block(step, call, x, w, *rest)

    def flip(self, x_q: Array) -> Array:
        return super().flip(x_q if self.x_q is None else self.x_q.copy())

    def note(self, name: str, value: Array) -> None:
        """The activations that noise can carry over a half, each as the flip that it would be; or values with noise."""
        if self.noise is not None:
            moved = value + self.noise.uniform(-_NOISE, _NOISE, value.shape)
            self.x_q = np.clip(np.rint(moved), -128, 127).astype(np.int8)
            return
        noise = near_half(layer_of(name) or 0, self.first + len(value))[self.first :]
        for i, j in np.argwhere(distance_to_half(value) <= noise[:, None]).tolist():
            before, token = float(value[i, j]), self.first + i
            mine, below = round(before), int(np.floor(before))
            flip = Flip(name, token, j, before, float(noise[i]), mine, below + (mine == below))
            self.near.setdefault(token, []).append(flip)


class BySequence(Backend):
    """The reference, with attention for all tokens of a sequence at once: not one token after another."""

    def __init__(self) -> None:
        super().__init__("float32", threads=1)

    def attention(self, q: Array, cache: Any, batch: TokenBatch, layer: int, window: int | None) -> Array:
        z = np.empty_like(q)
        for slot in np.unique(batch.slots):
            rows = np.flatnonzero(batch.slots == slot)
            for part in np.split(rows, range(_QUERIES, len(rows), _QUERIES)):
                positions = batch.positions[part]
                keys, values = cache.visible(layer, slot, int(positions.max()), None)  # (S, G, d) each
                ago = positions[:, None] - np.arange(len(keys))  # (part, S), how many tokens before the row a key is
                sees = (ago >= 0) & (ago < (window or len(keys)))
                scores = np.where(sees, scores_of(q[part], keys), -np.inf)
                z[part] = values_of(layers.softmax(scores), values)
        return z


class FlippedRuns:
    """Runs of a setting with flips.   order: the places of all tensors in the computation."""

    def __init__(self, setting: Setting, candidate: View) -> None:
        self.setting, self.candidate = setting, candidate
        self.order = {name: i for i, name in enumerate(op_order(setting.config))}
        linears = [name.rpartition(".")[0] for name in self.order if name.endswith(INT8)]
        sources = {linear_input(linear, setting.config) for linear in linears}  # `compare` judges flips by them
        self.compared = {name for name in self.order if name in candidate or name.endswith(INT8) or name in sources}

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
        start, layer = beginning(base, made)
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

    def noisy_rows(self, flips: Sequence[Flip], until: str, seed: int) -> Wide:
        """The rows of a tensor of the reference with these flips, and with noise that makes others.   -> (N, V)"""
        tokens = len(self.setting.tokens)
        cache = EngineKVCache(self.setting.config, slots=1, capacity=tokens)
        done = self._pass(flips, cache, 0, tokens, until, noise=np.random.default_rng(seed))
        return rows_of(until, done.seen[until])

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
        batch = TokenBatch.of([(0, start, self.setting.tokens[start:stop])])
        last = len(self.order) if until is None else self.order[until]
        wanted = {name for name in self.compared if self.order[name] <= last}
        done = _Pass(self.setting, flips, wanted.__contains__, until, batch, noise)
        be = observe(BySequence(), done)
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


def beginning(run: FlippedRun, made: Sequence[Flip]) -> tuple[int, int]:
    """The first token and the first layer that flips beyond a run's change."""
    if run.cache is not None and run.cache.has_states:  # which cannot go back
        return 0, 0
    return min(flip.token for flip in made), min(layer_of(flip.name) or 0 for flip in made)


def _rows_from(start: int, name: str, x: Array) -> Array:
    """A tensor's part of the tokens from `start` on."""
    return x[:, start:] if is_by_head(name) else x[start:]


def rows_of(name: str, x: Array) -> Wide:
    """A tensor as a row for each token; masked scores are 0."""
    rows = np.moveaxis(x, 1, 0) if is_by_head(name) else x
    rows = rows.astype(np.float64).reshape(len(rows), -1)
    return np.where(rows > MASKED, rows, 0) if is_by_head(name) else rows


def row_of(name: str, x: Array, token: int) -> Wide:
    """The row of a token, or the only row; of scores and patterns over the tokens up to this one."""
    return finite(rows_of(name, first_rows(name, x, token + 1))[-1])


def finite(row: Wide) -> Wide:
    """What is not finite is 0."""
    return np.where(np.isfinite(row), row, 0)
