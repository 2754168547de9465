"""Trials of rounding flips, many in one pass: the row of one tensor that the reference gives with each set of flips.

A flip changes its own token's row, and from the next keys on the rows of the tokens that see it. So the pass computes
these rows alone. Each trial is a sequence of its own in the cache, which begins as that of the run without its flips.
All ops compute a row as they would alone, so a trial's numbers do not depend on the others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress

import numpy as np

from ...backends.backend import Backend
from ...backends.observe import observe
from ...backends.paged_cache import EngineKVCache
from ...reference.cache import TokenBatch
from ...reference.layers import Array
from ...reference.model import BlockPlace, head_input, rope_tables_of
from ..flips import Flip
from ..names import layer_of
from ..types import Wide
from .flipped_runs import BySequence, FlippedPass, FlippedRun, finite, row_of, rows_of
from .variants import Finished, Setting

_FIRST, _AT_ONCE = 4, 32  # trials of the first pass and of the others: one of the first is often right
_CACHE_BYTES = 1 << 26  # of all trials of a pass


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

    def rows(self, trials: Sequence[Sequence[Flip]]) -> Iterator[Wide]:
        """The row of each trial, in their order; computed some at a time, as they are asked for."""
        start, size = 0, _FIRST
        while start < len(trials):
            yield from self._pass(trials[start : start + min(size, self.most)])
            start += min(size, self.most)
            size = _AT_ONCE

    def _pass(self, trials: Sequence[Sequence[Flip]]) -> list[Wide]:
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

    def _moved(self, trials: Sequence[Sequence[Flip]]) -> list[Wide]:
        """The rows of trials whose flips reach the token."""
        config, w, run = self.setting.config, self.setting.weights, self.run
        cache = EngineKVCache(config, slots=len(trials), capacity=self.token + 1)
        assert run.cache is not None
        cache.keys[:] = run.cache.keys[:, :1, : self.token + 1]
        cache.values[:] = run.cache.values[:, :1, : self.token + 1]
        done = FlippedPass(self.setting, [[*run.flips, *made] for made in trials], self.until.__eq__, self.until)
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
