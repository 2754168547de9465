"""A decoding step as one CUDA graph, recorded from the model's own text.

A step of 30 layers is some 330 launches; from Python each costs more than most of them run. So the first step of a
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

from ...config import ModelConfig
from ...kv_cache import TokenBatch
from ...weights import ModelWeights
from .cache import DeviceBatch, DeviceKVCache
from .rows import value
from .workspace import Arena

if TYPE_CHECKING:
    from ..cupy_backend import CupyBackend


class RecordedStep:
    """The pass of `size` tokens, all of which are wanted, over one cache. Called with up to `size` tokens: the last is
    then computed several times over, and writes the same numbers to the same places."""

    def __init__(
        self, be: CupyBackend, compute: Callable[..., NDArray], w: ModelWeights, cfg: ModelConfig, size: int
    ) -> None:
        self._be, self._compute, self._w, self._cfg, self._size = be, compute, w, cfg, size
        self._sheet = be.ws.zeros((3, size), np.int64)
        self._batch = DeviceBatch(self._sheet[0], self._sheet[1], self._sheet[2])
        self._arena = Arena(be.ws.make)
        self._graph: Any = None
        self._result: Any = None

    def __call__(self, batch: TokenBatch, cache: DeviceKVCache) -> NDArray:
        """What `compute` gives for the batch.   -> (N, D) on the device, until the next call"""
        n = len(batch)
        sheet = np.stack([batch.tokens, batch.positions, batch.slots]).astype(np.int64)
        self._be.ws.device.copy(self._sheet, sheet[:, np.minimum(np.arange(self._size), n - 1)])
        cache.copy_table()
        if self._graph is not None:
            self._graph.launch()
        else:
            self._result = self._run(cache)
            with self._be.ws.device.capture() as graph:
                self._run(cache)
            self._graph = graph
        return self._result[:n]

    def _run(self, cache: DeviceKVCache) -> Any:
        be = self._be
        be.rope_positions.reach = max(be.rope_positions.reach, cache.reach - 1)
        self._arena.begin()
        be.ws.arena = self._arena
        try:
            return value(be.ws, self._compute(be, self._w, self._cfg, self._batch, cache))
        finally:
            be.ws.arena = None
