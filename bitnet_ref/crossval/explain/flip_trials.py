"""Trials of rounding flips, many in one pass: the row of one tensor that the reference gives with each set of flips.

A flip changes its own token's row, and from the next keys on the rows of the tokens that see it. So the pass computes
these rows alone. Each trial is a sequence of its own in the cache, which begins as that of the run without its flips.
All ops compute a row as they would alone, so a trial's numbers do not depend on the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...backends.backend import Backend
from ...backends.observe import Call, ObservedStep, observe
from ...backends.paged_cache import EngineKVCache
from ...backends.record import Recorder
from ...reference import layers
from ...reference.cache import TokenBatch
from ...reference.layers import Array
from ...reference.model import BlockPlace, head_input, rope_tables_of
from ...reference.weights import LinearWeight, Norm, TernaryLinear
from ..flips import Flip
from ..metrics import MASKED
from ..names import NORM_SCALE, OUT, first_rows, is_by_head, layer_of
from .variants import Finished, Setting, quick_ternary_matmul

_FIRST, _AT_ONCE = 4, 32  # trials of the first pass and of the others: one of the first is often right
_QUERIES = 64  # tokens whose attention is computed at once
_CACHE_BYTES = 1 << 26  # of all trials of a pass


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
    """A pass that ends with the tensor `until`, and rounds as a subclass says in `flip`."""

    def __init__(self, setting: Setting, wants: Callable[[str], bool], until: str | None) -> None:
        super().__init__(Backend("float32", threads=1), setting.config, wants)
        self.until = until
        self.x: Array | None = None  # what was quantised last
        self.name = ""  # of the first int8 tensor that was made of it

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
        raise NotImplementedError


class BySequence(Backend):
    """The reference, with attention for all tokens of a sequence at once: it widens its keys and values once."""

    def __init__(self) -> None:
        super().__init__("float32", threads=1)

    def attention(self, q: Array, cache: Any, batch: TokenBatch, layer: int, window: int | None) -> Array:
        z = np.empty_like(q)
        for slot in np.unique(batch.slots):
            rows = np.flatnonzero(batch.slots == slot)
            keys, values = cache.visible(layer, slot, int(batch.positions[rows].max()), None)  # (S, G, d) each
            keys, values = keys.transpose(1, 2, 0).astype(np.float64), values.transpose(1, 0, 2).astype(np.float64)
            for part in np.split(rows, range(_QUERIES, len(rows), _QUERIES)):
                z[part] = _attended(q[part], keys, values, batch.positions[part], window)
        return z


def _attended(q: Array, keys: Array, values: Array, positions: Array, window: int | None) -> Array:
    """Attention of some tokens of a sequence.   q (n, H, d), keys (G, d, S), values (G, S, d) -> (n, H, d)"""
    n, heads, head_dim = q.shape
    kv_heads, stop = len(keys), int(positions.max()) + 1
    ago = positions[:, None] - np.arange(stop)  # (n, S), how many tokens before the row a key is
    mask = np.where((ago < 0) | (ago >= (window or stop)), -np.inf, 0).astype(q.dtype)
    grouped = q.astype(np.float64).reshape(n, kv_heads, -1, head_dim).transpose(1, 2, 0, 3)  # (G, H/G, n, d)
    scores = grouped.reshape(kv_heads, -1, head_dim) @ keys[:, :, :stop] * head_dim**-0.5  # (G, H/G * n, S)
    pattern = layers.softmax(scores.astype(q.dtype).reshape(heads, n, stop) + mask).astype(np.float64)
    z: Array = pattern.reshape(kv_heads, -1, stop) @ values[:, :stop]  # (G, H/G * n, d)
    return z.reshape(heads, n, head_dim).transpose(1, 0, 2)


class FlipTrials:
    """Trials of flips beyond those of a run, judged by the row of a tensor at one token."""

    def __init__(self, setting: Setting, order: dict[str, int], run: FlippedRun, until: str, token: int) -> None:
        """order: the places of all tensors in the computation.   until: the tensor."""
        self.setting, self.order, self.run, self.until, self.token = setting, order, run, until, token
        layer, self.layers = layer_of(until), setting.config.num_hidden_layers
        self.last = self.layers if layer is None else layer
        assert run.cache is not None
        self.whole = run.cache.has_states  # which cannot go back: all tokens are computed
        self.most = max(1, _CACHE_BYTES // max(1, run.cache.bytes_per_token * (token + 1)))

    def rows(self, trials: Sequence[Sequence[Flip]]) -> Iterator[NDArray[np.float64]]:
        """The row of each trial, in their order; computed some at a time, as they are asked for."""
        start, size = 0, _FIRST
        while start < len(trials):
            yield from self._pass(trials[start : start + min(size, self.most)])
            start += min(size, self.most)
            size = _AT_ONCE

    def _pass(self, trials: Sequence[Sequence[Flip]]) -> list[NDArray[np.float64]]:
        base = row_of(self.until, self.run.tensors[self.until], self.token)
        rows = [base] * len(trials)
        moving = [i for i, flips in enumerate(trials) if self.token in self.changed(flips, self.last)]
        for i, row in zip(moving, self._moved([trials[i] for i in moving]) if moving else (), strict=True):
            rows[i] = row
        return rows

    def changed(self, flips: Sequence[Flip], layer: int) -> list[int]:
        """The tokens whose rows the flips change in a layer."""
        if self.whole:
            return list(range(self.token + 1))
        since = min((flip.token for flip in flips if self._first_keys(flip) <= layer), default=self.token + 1)
        own = {flip.token for flip in flips if self._layer(flip) == layer}
        return [token for token in range(self.token + 1) if token >= since or token in own]

    def _layer(self, flip: Flip) -> int:
        layer = layer_of(flip.name)
        return self.layers if layer is None else layer

    def _first_keys(self, flip: Flip) -> int:
        """The first layer in which later tokens may see the flip."""
        layer = self._layer(flip)
        attention = self.order.get(f"blocks.{layer}.attn.hook_z")
        return layer + (attention is not None and self.order[flip.name] > attention)

    def _moved(self, trials: Sequence[Sequence[Flip]]) -> list[NDArray[np.float64]]:
        """The rows of trials whose flips reach the token."""
        config, w, run = self.setting.config, self.setting.weights, self.run
        cache = EngineKVCache(config, slots=len(trials), capacity=self.token + 1)
        assert run.cache is not None
        cache.keys[:] = run.cache.keys[:, :1, : self.token + 1]
        cache.values[:] = run.cache.values[:, :1, : self.token + 1]
        done = _TrialPass(self.setting, [[*run.flips, *made] for made in trials], self.until)
        be = observe(BySequence(), done)
        x = np.empty((0, config.hidden_size), dtype=np.float32)
        with np.errstate(all="ignore"), suppress(Finished):
            for layer in range(self.last + 1):
                places = [(slot, token) for slot, flips in enumerate(trials) for token in self.changed(flips, layer)]
                if layer == self.layers:
                    places = [(slot, token) for slot, token in places if token == self.token]
                if not places:
                    continue
                x = self._entering(layer, places, done.row, x)
                done.start(places)
                if layer == self.layers:
                    break
                x = be.attention_block(x, w.layers[layer], config, self._block(be, places, cache, layer))
                if layer == min(self.last, self.layers - 1):  # no later keys are needed
                    is_last = [token == self.token for _, token in places]
                    x = x[is_last]
                    done.start([place for place in places if place[1] == self.token])
                    if not len(x):
                        continue
                x = be.feed_forward(x, w.layers[layer], config)
            be.lm_head(head_input(be, w, config, x), w.lm_head)
        rows = rows_of(self.until, done.seen[self.until])
        return [finite(rows[done.row[slot, self.token]]) for slot in range(len(trials))]

    def _entering(
        self, layer: int, places: Sequence[tuple[int, int]], before: dict[tuple[int, int], int], x: Array
    ) -> Array:
        """A layer's input at the places: x, which the layer before computed of some, and the run's of the others."""
        stream = self.run.streams[layer][[token for _, token in places]]
        row = {place: i for i, place in enumerate(places)}
        known = [(row[place], i) for place, i in before.items() if place in row]
        if known:
            to, source = map(list, zip(*known, strict=True))
            stream[to] = x[source]
        return stream

    def _block(self, be: Backend, places: Sequence[tuple[int, int]], cache: EngineKVCache, layer: int) -> BlockPlace:
        slots, positions = np.array(places, dtype=np.int64).T
        batch = TokenBatch(self.setting.tokens[positions], positions, slots)
        ropes = rope_tables_of(be, self.setting.config, positions)
        return BlockPlace(ropes[self.setting.config.rope_of(layer)], batch, cache, layer)


class _TrialPass(FlippedPass):
    """The rows of several trials, each with its own flips. row: the row of each (trial, token)."""

    def __init__(self, setting: Setting, trials: Sequence[Sequence[Flip]], until: str) -> None:
        super().__init__(setting, until.__eq__, until)
        self.flips: dict[str, list[tuple[int, Flip]]] = {}
        for slot, flips in enumerate(trials):
            for flip in flips:
                self.flips.setdefault(flip.name, []).append((slot, flip))
        self.row: dict[tuple[int, int], int] = {}

    def start(self, places: list[tuple[int, int]]) -> None:
        """From here on the rows are these."""
        self.row = {place: i for i, place in enumerate(places)}

    def flip(self, x_q: Array) -> Array:
        for slot, flip in self.flips.get(self.name, ()):
            row = self.row.get((slot, flip.token), len(x_q))
            if row < len(x_q):
                x_q[row, flip.element] = flip.candidate
        return x_q


def rows_of(name: str, x: Array) -> NDArray[np.float64]:
    """A tensor as a row for each token; masked scores are 0."""
    rows = np.moveaxis(x, 1, 0) if is_by_head(name) else x
    rows = rows.astype(np.float64).reshape(len(rows), -1)
    return np.where(rows > MASKED, rows, 0) if is_by_head(name) else rows


def row_of(name: str, x: Array, token: int) -> NDArray[np.float64]:
    """The row of a token, or the only row; of scores and patterns over the tokens up to this one."""
    return finite(rows_of(name, first_rows(name, x, token + 1))[-1])


def finite(row: NDArray[np.float64]) -> NDArray[np.float64]:
    """What is not finite is 0."""
    return np.where(np.isfinite(row), row, 0)
