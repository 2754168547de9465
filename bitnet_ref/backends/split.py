"""Layers divided over several backends: several cards, or a card and the CPU for the layers it cannot hold.

Each part computes a run of layers with its own weights, keys and values, and is an ordinary backend that knows nothing
of the others. The embedding table stays in the host's memory, where a look-up reads N rows; the last part has the head.
Between two parts the residual stream (N, D) crosses through the host's memory: 10 KB per token of 2B-4T.

The decoding steps of a divided model are not replayed: a record cannot cross the host.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Self

import ml_dtypes
import numpy as np

from ..errors import ShapeError
from ..families import family_of
from ..reference.cache import KVCache, TokenBatch
from ..reference.config import ModelConfig
from ..reference.layers import Array, Floats
from ..reference.model import decoder_layers, head_input, rope_tables_of
from ..reference.weights import DenseWeight, LinearWeight, ModelWeights
from .backend import Backend, DrawRule, HeadNeed, HeadRows
from .paged_cache import CacheSpec, EngineKVCache, PagedKVCache

ROUND_CAPACITY_TO = 256  # tokens, as a card's cache does, so that all parts have pages of one size


@dataclass(frozen=True)
class LayerRun:
    """A backend and the layers that it computes: `first` to `stop` - 1."""

    backend: Backend
    first: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.first

    def __str__(self) -> str:
        layers = f"layer {self.first}" if len(self) == 1 else f"layers {self.first} to {self.stop - 1}"
        return f"{layers} by {self.backend.summary}"


class SplitKVCache(PagedKVCache):
    """The caches of the parts, each with its own layers, one page table and the same pages."""

    def __init__(self, caches: Sequence[PagedKVCache]) -> None:
        first = caches[0]
        self.parts = tuple(caches)
        self._place_of_layer = [(part, layer) for part in caches for layer in range(part.layers)]
        self.slots, self.capacity, self.page_size = first.slots, first.capacity, first.page_size
        self.pages, self.is_fixed, self.page_table = first.pages, first.is_fixed, first.page_table
        for part in self.parts:
            part.page_table = self.page_table

    @property
    def dtype(self) -> np.dtype:
        """The first part's."""
        return self.parts[0].dtype

    @property
    def layers(self) -> int:
        return len(self._place_of_layer)

    @property
    def rows_per_token(self) -> int:
        return sum(part.rows_per_token for part in self.parts)

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    @property
    def state_bytes(self) -> int:
        return sum(part.state_bytes for part in self.parts)

    @property
    def has_states(self) -> bool:
        return any(part.has_states for part in self.parts)

    def append(self, layer: int, batch: TokenBatch, k: Floats, v: Floats) -> None:
        part, local = self._place_of_layer[layer]
        part.append(local, batch, k, v)

    def stored(self, layer: int, batch: TokenBatch) -> tuple[Floats, Floats]:
        part, local = self._place_of_layer[layer]
        return part.stored(local, batch)

    def visible(self, layer: int, slot: int, position: int, window: int | None) -> tuple[Floats, Floats]:
        part, local = self._place_of_layer[layer]
        return part.visible(local, slot, position, window)

    def copy(self, sources: Sequence[int], targets: Sequence[int], length: int) -> None:
        for part in self.parts:
            part.copy(sources, targets, length)

    def copy_pages(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        for part in self.parts:
            part.copy_pages(sources, targets)

    def take_over(self, other: EngineKVCache, length: int) -> None:
        assert isinstance(other, SplitKVCache)
        for mine, theirs in zip(self.parts, other.parts, strict=True):
            mine.take_over(theirs, length)

    def resumable(self, slot: int, length: int) -> int:
        return min(part.resumable(slot, length) for part in self.parts)

    def fill_with_zeros(self) -> None:
        for part in self.parts:
            part.fill_with_zeros()


class SplitBackend(Backend):
    """Runs each part's layers on its backend, one part after another. Passes of several threads take turns."""

    paths = ("ops", "blocks")

    def __init__(self, parts: Sequence[LayerRun]) -> None:
        """parts: two or more runs of layers that follow on each other from layer 0. Raises ShapeError."""
        stops = [0, *(part.stop for part in parts)]
        if len(parts) < 2 or [part.first for part in parts] != stops[:-1] or min(map(len, parts)) < 1:
            got = ", ".join(f"{part.first} to {part.stop}" for part in parts)
            raise ShapeError("SplitBackend", expected="two or more runs of layers, one after the other", got=got)
        self.parts = tuple(parts)
        self._lock = threading.RLock()
        self._computing = [len(parts) - 1]  # the number of the part whose arrays `to_host` gets; shared by copies
        backends = [part.backend for part in parts]
        self.name = "+".join(dict.fromkeys(be.name for be in backends))
        self.dtype = backends[0].dtype
        self.dtypes = (self.dtype.name,)
        self.cache_dtypes = tuple(d for d in backends[0].cache_dtypes if all(d in be.cache_dtypes for be in backends))
        self.threads, self.head = max(be.threads for be in backends), backends[-1].head
        self.fuses = True

    @property
    def summary(self) -> str:
        return ", ".join(map(str, self.parts)) + " and the head"

    @property
    def _last(self) -> Backend:
        return self.parts[-1].backend

    def with_backends(self, backends: Sequence[Backend]) -> Self:
        """The same division over these backends."""
        made = copy.copy(self)
        made.parts = tuple(replace(part, backend=be) for part, be in zip(self.parts, backends, strict=True))
        return made

    def op_by_op(self) -> Self:
        return self.with_backends([part.backend.op_by_op() for part in self.parts])

    def check_config(self, config: ModelConfig) -> None:
        for part in self.parts:
            part.backend.check_config(config)

    def check_mixed_adapters(self) -> None:
        for part in self.parts:
            part.backend.check_mixed_adapters()

    # -- weights -------------------------------------------------------------------------------------------------------

    def prepare_for(self, layer: int | None) -> Callable[[LinearWeight], LinearWeight]:
        if layer is None:
            return self._last.prepare
        return next(part.backend.prepare for part in self.parts if layer < part.stop)

    def prepare_model(self, w: ModelWeights, cfg: ModelConfig) -> ModelWeights:
        """Each part prepares a model of its layers, the last one with the head; the others get one row of zeros."""
        none = DenseWeight(np.zeros((1, w.embedding.shape[1]), dtype=ml_dtypes.bfloat16))
        prepared = []
        for part in self.parts:
            head = w.lm_head if part is self.parts[-1] else none
            table = head if w.tied and part is self.parts[-1] and head.kind == "dense" else none
            model = ModelWeights(table, w.layers[part.first : part.stop], w.final_norm, head)
            prepared.append(part.backend.prepare_model(model, cfg))
        head = prepared[-1].lm_head
        embedding = head if w.tied and head.kind == "dense" else w.embedding
        layers = tuple(layer for each in prepared for layer in each.layers)
        return replace(w, embedding=embedding, layers=layers, lm_head=head)

    # -- a pass --------------------------------------------------------------------------------------------------------

    def hidden(
        self, w: ModelWeights, cfg: ModelConfig, batch: TokenBatch, cache: KVCache, path: str | None = None
    ) -> Floats:
        if path == "ops" and self.fuses:
            return self.op_by_op().hidden(w, cfg, batch, cache)
        assert isinstance(cache, SplitKVCache)
        x = self.parts[0].backend.embed_on_host(w.embedding, batch.tokens)  # (N, D)
        for number, (part, own_cache) in enumerate(zip(self.parts, cache.parts, strict=True)):
            self._computing[0] = number
            be, placed = part.backend, part.backend.place(batch)
            ropes = rope_tables_of(be, cfg, placed.positions)
            own = family_of(cfg).of_layers(cfg, range(part.first, part.stop))
            x = be.from_host(x)
            if number == 0 and cfg.embedding_scale != 1:
                x = be.scale(x, cfg.embedding_scale, "hook_embed_scaled")
            wanted = placed.wanted if part is self.parts[-1] else None
            x = decoder_layers(be, x, w.layers[part.first : part.stop], own, ropes, placed, own_cache, wanted)
            if part is not self.parts[-1]:
                x = be.to_host(x)
        return head_input(self._last, w, cfg, x)

    def lm_head(self, x: Floats, w: LinearWeight) -> Floats:
        return self._last.lm_head(x, w)

    def draw(self, logits: Floats, rule: DrawRule, uniform: float) -> int | None:
        return self._last.draw(logits, rule, uniform)

    def head_rows(self, x: Floats, w: LinearWeight, needs: Sequence[HeadNeed]) -> list[HeadRows]:
        return self._last.head_rows(x, w, needs)

    def from_host(self, array: Array) -> Array:
        return self._last.from_host(array)

    def to_host(self, array: Array) -> Array:
        """An array of the part that computes now; after a pass, of the last part."""
        return self.parts[self._computing[0]].backend.to_host(array)

    @contextmanager
    def running(self) -> Iterator[None]:
        with self._lock, ExitStack() as stack:
            for part in self.parts:
                stack.enter_context(part.backend.running())
            try:
                yield
            finally:
                self._computing[0] = len(self.parts) - 1  # also after a pass that failed in an earlier part

    # -- memory --------------------------------------------------------------------------------------------------------

    def new_cache(self, config: ModelConfig, spec: CacheSpec) -> EngineKVCache:
        if spec.page_size is None:
            size = max(1, -(-spec.capacity // ROUND_CAPACITY_TO)) * ROUND_CAPACITY_TO  # one page per slot
            spec = replace(spec, page_size=size)
        of_layers = family_of(config).of_layers
        configs = [of_layers(config, range(part.first, part.stop)) for part in self.parts]
        caches = [part.backend.new_cache(own, spec) for part, own in zip(self.parts, configs, strict=True)]
        return SplitKVCache([cache for cache in caches if isinstance(cache, PagedKVCache)])

    def memory(self) -> tuple[int | None, int | None]:
        """Bytes in use: None, since there are several memories. Bytes free for something that grows on all layers
        alike, as a cache does, until the first part is full."""
        free = [(part.backend.memory()[1], len(part)) for part in self.parts]
        return None, min((each * self.parts[-1].stop // n for each, n in free if each is not None), default=None)

    def utilization(self) -> float | None:
        """Of the busiest part."""
        return max((share for part in self.parts if (share := part.backend.utilization()) is not None), default=None)

    def synchronize(self) -> None:
        for part in self.parts:
            part.backend.synchronize()

    def close(self) -> None:
        for part in self.parts:
            part.backend.close()
