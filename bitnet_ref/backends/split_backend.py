"""Layers divided over several backends: several cards, or a card and the processor for the layers it cannot hold.

Each part computes a run of layers with weights and keys and values of its own, and is an ordinary backend that knows
nothing of the others. The first embeds: the table stays in the host's memory, a look-up reads N of its rows. The last
has the head. Between two parts the N rows of the residual stream cross through the host's memory: 10 KB a token of
2B-4T, whether or not the cards can reach each other, and what went wrong on one is told before the next begins.

A split model's decoding steps are not recorded (`Backend.run`): a record cannot go through the host. Each launch then
costs the time that Python takes for it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import wraps
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from ..errors import ShapeError
from ..reference.cache import KVCache, TokenBatch
from ..reference.config import ModelConfig, RopeConfig
from ..reference.weights import DenseWeight, LinearWeight, ModelWeights
from .backend import Backend
from .candidates import HeadCandidates, HeadNeed

ROUND_CAPACITY_TO = 256  # tokens: as a card's cache does, so that all parts have pages of one size


@dataclass(frozen=True)
class Part:
    """A backend, and the layers that it computes: `first` to `stop` - 1."""

    backend: Backend
    first: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.first

    def __str__(self) -> str:
        layers = f"layer {self.first}" if len(self) == 1 else f"layers {self.first} to {self.stop - 1}"
        return f"{layers} by {self.backend.summary}"


class Copies(tuple):
    """The same array on each part."""


@dataclass(frozen=True, eq=False)
class SplitBatch(TokenBatch):
    """A batch that each part has placed. `tokens` and `slots` are the host's, `positions` are `Copies`, and `wanted` is
    the last part's, which alone asks for it."""

    host: TokenBatch | None = None
    parts: tuple[TokenBatch, ...] = field(default=())

    @property
    def extent(self) -> tuple[int, int]:
        assert self.host is not None
        return self.host.extent


class SplitKVCache(KVCache):
    """The caches of the parts, each of its own layers. They have one page table, and the same pages."""

    def __init__(self, caches: Sequence[KVCache]) -> None:
        self.parts = tuple(caches)
        self._places_of_layers = [(i, layer) for i, part in enumerate(caches) for layer in range(part.layers)]
        first = self.parts[0]
        self.slots, self.capacity, self.page_size, self.pages = (
            first.slots,
            first.capacity,
            first.page_size,
            first.pages,
        )
        self._fixed, self._slots_are_pages = first._fixed, first._slots_are_pages
        self.page_table = first.page_table
        for part in self.parts:
            part.page_table = self.page_table
        self.kernel_layers = None

    def part_of(self, layer: int) -> tuple[int, int]:
        """(number of the part, number of the layer there)"""
        return self._places_of_layers[layer]

    @property
    def dtype(self) -> np.dtype:
        """Of the first part."""
        return self.parts[0].dtype

    @property
    def layers(self) -> int:
        return len(self._places_of_layers)

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    def append(self, layer: int, batch: TokenBatch, k: NDArray, v: NDArray) -> None:
        i, local = self.part_of(layer)
        self.parts[i].append(local, _of_part(batch, i), k, v)

    def stored(self, layer: int, batch: TokenBatch) -> tuple[NDArray, NDArray]:
        i, local = self.part_of(layer)
        return self.parts[i].stored(local, batch)

    def visible(self, layer: int, slot: int, position: int, window: int | None) -> tuple[NDArray, NDArray]:
        i, local = self.part_of(layer)
        return self.parts[i].visible(local, slot, position, window)

    def copy(self, sources: Sequence[int], targets: Sequence[int], length: int) -> None:
        for part in self.parts:
            part.copy(sources, targets, length)

    def copy_pages(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        for part in self.parts:
            part.copy_pages(sources, targets)

    def take_over(self, other: KVCache, length: int) -> None:
        assert isinstance(other, SplitKVCache)
        for mine, theirs in zip(self.parts, other.parts, strict=True):
            mine.take_over(theirs, length)

    def fill_with_zeros(self) -> None:
        for part in self.parts:
            part.fill_with_zeros()


def _of_part(batch: TokenBatch, i: int) -> TokenBatch:
    return batch.parts[i] if isinstance(batch, SplitBatch) else batch


def _computed_here(op: Callable[..., Any]) -> Any:
    """An operation of `Backend`, passed on to the part that computes now."""

    @wraps(op)
    def passed_on(self: SplitBackend, *args: Any, **kwargs: Any) -> Any:
        mine = (a[self._now] if isinstance(a, Copies) else a for a in args)
        return getattr(self.parts[self._now].backend, op.__name__)(*mine, **kwargs)

    return passed_on


class SplitBackend(Backend):
    """Each operation is computed by the part whose layer it belongs to. Passes of several threads take turns."""

    def __init__(self, parts: Sequence[Part]) -> None:
        """parts: at least two, of one layer or more each, that follow on each other from layer 0."""
        stops = [0, *(part.stop for part in parts)]
        if len(parts) < 2 or [part.first for part in parts] != stops[:-1] or min(map(len, parts)) < 1:
            got = ", ".join(f"{part.first} to {part.stop}" for part in parts)
            raise ShapeError("SplitBackend", expected="two or more runs of layers, one after the other", got=got)
        self.parts = tuple(parts)
        self._part_of_layer = [i for i, part in enumerate(parts) for _ in range(len(part))]
        self._now, self._lock = 0, threading.RLock()
        backends = [part.backend for part in parts]
        self.name = "+".join(dict.fromkeys(be.name for be in backends))
        self.dtype = backends[0].dtype
        self.dtypes = (self.dtype.name,)
        self.cache_dtypes = tuple(d for d in backends[0].cache_dtypes if all(d in be.cache_dtypes for be in backends))
        self.threads, self.head = max(be.threads for be in backends), backends[-1].head

    @property
    def summary(self) -> str:
        return ", ".join(map(str, self.parts)) + " and the head"

    # -- weights -------------------------------------------------------------------------------------------------------

    def prepare_for(self, layer: int | None) -> Callable[[LinearWeight], LinearWeight]:
        return self.parts[-1 if layer is None else self._part_of_layer[layer]].backend.prepare

    def prepare(self, w: LinearWeight) -> LinearWeight:
        """As it is: which part it is for, only `prepare_for` knows."""
        return w

    def prepare_model(self, w: ModelWeights) -> ModelWeights:
        """Each part prepares a model of its layers, the last with the head; for the others that is one row of zeros."""
        none = DenseWeight(np.zeros((1, w.embedding.shape[1]), dtype=ml_dtypes.bfloat16))
        done = []
        for part in self.parts:
            head = w.lm_head if part is self.parts[-1] else none
            table = head if isinstance(head, DenseWeight) and w.tied else none
            done.append(
                part.backend.prepare_model(ModelWeights(table, w.layers[part.first : part.stop], w.final_norm, head))
            )
        head = done[-1].lm_head
        embedding = head if w.tied and isinstance(head, DenseWeight) else w.embedding
        layers = tuple(layer for each in done for layer in each.layers)
        return replace(w, embedding=embedding, layers=layers, lm_head=head)

    # -- around a pass -------------------------------------------------------------------------------------------------

    @contextmanager
    def running(self) -> Iterator[None]:
        with self._lock, ExitStack() as stack:
            for part in self.parts:
                stack.enter_context(part.backend.running())
            yield

    def memory(self) -> tuple[int | None, int | None]:
        """Bytes held: None, as there are several memories. Bytes that are free for something that grows on all layers
        alike, as a cache does, until the first part is full."""
        found = [(part.backend.memory()[1], len(part)) for part in self.parts]
        return None, min((free * self.parts[-1].stop // n for free, n in found if free is not None), default=None)

    def new_cache(
        self,
        config: ModelConfig,
        slots: int,
        capacity: int,
        dtype: str | None = None,
        page_size: int | None = None,
        pages: int | None = None,
    ) -> KVCache:
        if page_size is None and pages is None:
            page_size = max(1, -(-capacity // ROUND_CAPACITY_TO)) * ROUND_CAPACITY_TO  # one page a slot
        more = slots, capacity, dtype, page_size, pages
        return SplitKVCache(
            [part.backend.new_cache(replace(config, num_hidden_layers=len(part)), *more) for part in self.parts]
        )

    def place(self, batch: TokenBatch) -> TokenBatch:
        if isinstance(batch, SplitBatch):
            return batch
        placed = tuple(part.backend.place(batch) for part in self.parts)
        positions: Any = Copies(each.positions for each in placed)
        return SplitBatch(batch.tokens, positions, batch.slots, placed[-1].wanted, batch, placed)

    def at_layer(self, index: int, x: NDArray) -> NDArray:
        return self._moved(x, self._part_of_layer[index])

    def _moved(self, x: NDArray, to: int) -> NDArray:
        """x on that part, which computes from now on."""
        if to == self._now:
            return x
        x = self.to_host(x)
        self._now = to
        return self.from_host(x)

    def synchronize(self) -> None:
        for part in self.parts:
            part.backend.synchronize()

    def close(self) -> None:
        for part in self.parts:
            part.backend.close()

    # -- operations ----------------------------------------------------------------------------------------------------

    def embed(self, w: DenseWeight, tokens: NDArray[np.int64]) -> NDArray:
        self._now = 0
        return self.from_host(super().embed(w, tokens))

    def rope_tables(self, positions: NDArray[np.int64], rope: RopeConfig, head_dim: int) -> tuple[NDArray, NDArray]:
        each = positions if isinstance(positions, Copies) else [positions] * len(self.parts)
        tables = [part.backend.rope_tables(p, rope, head_dim) for part, p in zip(self.parts, each, strict=True)]
        cos, sin = (Copies(found) for found in zip(*tables, strict=True))
        return cos, sin  # type: ignore[return-value]

    def attention(self, q: NDArray, cache: KVCache, batch: TokenBatch, layer: int, window: int | None) -> NDArray:
        i, here = self._part_of_layer[layer], cache
        if isinstance(cache, SplitKVCache):
            here, layer = cache.parts[i], cache.part_of(layer)[1]
        return self.parts[i].backend.attention(q, here, _of_part(batch, i), layer, window)

    def lm_head(self, x: NDArray, w: LinearWeight) -> NDArray:
        return self.parts[-1].backend.lm_head(self._moved(x, len(self.parts) - 1), w)

    def head_candidates(self, x: NDArray, w: LinearWeight, needs: Sequence[HeadNeed]) -> list[HeadCandidates]:
        return self.parts[-1].backend.head_candidates(self._moved(x, len(self.parts) - 1), w, needs)

    from_host = _computed_here(Backend.from_host)
    to_host = _computed_here(Backend.to_host)
    rms_norm = _computed_here(Backend.rms_norm)
    rope = _computed_here(Backend.rope)
    quantize_activations = _computed_here(Backend.quantize_activations)
    ternary_matmul = _computed_here(Backend.ternary_matmul)
    dequantize = _computed_here(Backend.dequantize)
    dense_matmul = _computed_here(Backend.dense_matmul)
    attention_scores = _computed_here(Backend.attention_scores)
    softmax = _computed_here(Backend.softmax)
    attention_values = _computed_here(Backend.attention_values)
    gated = _computed_here(Backend.gated)
    add = _computed_here(Backend.add)
    take_rows = _computed_here(Backend.take_rows)
    linears = _computed_here(Backend.linears)
