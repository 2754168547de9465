"""A decoding step as one CUDA graph, recorded from the model's own text.

A step of 30 layers is some 350 launches; from Python each costs more than most of them run. So the first step of a
shape runs as it is, in arrays that are kept (`Arena`), then once more while the device only records, and from then on
the record is replayed. What changes between steps (tokens, positions, slots, the page table) is read by the kernels
from arrays that the host fills before; lengths follow from positions. Launches are sized for the cache's capacity, and
blocks with nothing to do return at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..config import ModelConfig
from ..errors import BackendError
from ..kv_cache import TokenBatch
from ..weights import ModelWeights
from .cupy_cache import DeviceBatch, DeviceKVCache

if TYPE_CHECKING:
    from .cupy_backend import CupyBackend


class Arena:
    """Arrays for one pass, made in the first one and handed out again, in the same order, in every later one."""

    def __init__(self, make: Callable[[tuple[int, ...], np.dtype], Any]) -> None:
        self._make = make
        self._arrays: list[Any] = []
        self._scratch: dict[Any, Any] = {}
        self._next = 0

    def begin(self) -> None:
        """From the first array again."""
        self._next = 0

    def empty(self, shape: tuple[int, ...], dtype: np.dtype) -> Any:
        """An array of the pass."""
        if self._next == len(self._arrays):
            self._arrays.append(self._make(shape, dtype))
        array = self._arrays[self._next]
        if array.shape != tuple(shape) or array.dtype != dtype:
            raise BackendError(f"a step that asked for {array.dtype} {array.shape} now asks for {dtype} {shape}")
        self._next += 1
        return array

    def scratch(self, shape: tuple[int, ...], dtype: np.dtype) -> Any:
        """An array whose contents nobody needs after the next kernels: one for all layers."""
        key = tuple(shape), dtype
        if key not in self._scratch:
            self._scratch[key] = self._make(shape, dtype)
        return self._scratch[key]


class RecordedStep:
    """The pass of `size` tokens, all of which are wanted, over one cache. Called with up to `size` tokens: the last is
    then computed several times over, and writes the same numbers to the same places."""

    def __init__(
        self, be: CupyBackend, compute: Callable[..., NDArray], w: ModelWeights, cfg: ModelConfig, size: int
    ) -> None:
        self._be, self._compute, self._w, self._cfg, self._size = be, compute, w, cfg, size
        self._sheet = be.zeros((3, size), np.int64)
        self._batch = DeviceBatch(self._sheet[0], self._sheet[1], self._sheet[2])
        self._arena = Arena(be.make)
        self._graph: Any = None
        self._result: Any = None

    def __call__(self, batch: TokenBatch, cache: DeviceKVCache) -> NDArray:
        """What `compute` gives for the batch.   -> (N, D) on the device, until the next call"""
        n = len(batch)
        sheet = np.stack([batch.tokens, batch.positions, batch.slots]).astype(np.int64)
        self._be.device.copy(self._sheet, sheet[:, np.minimum(np.arange(self._size), n - 1)])
        cache.copy_table()
        if self._graph is not None:
            self._graph.launch()
        else:
            self._result = self._run(cache)
            with self._be.device.capture() as graph:
                self._run(cache)
            self._graph = graph
        return self._result[:n]

    def _run(self, cache: DeviceKVCache) -> Any:
        be = self._be
        self._arena.begin()
        be.arena, be.reach = self._arena, max(be.reach, cache.capacity - 1)
        try:
            return be.value(self._compute(be, self._w, self._cfg, self._batch, cache))
        finally:
            be.arena = None
