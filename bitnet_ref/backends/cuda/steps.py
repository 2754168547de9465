"""A decoding step as one CUDA graph, recorded from the model's own text.

A step of 30 layers is 186 launches for one token and 306 for several; launching one from Python takes longer than most
of them run. So the first step of a shape runs eagerly, in arrays that are kept (`Arena`), then once more while the
device only records, and later steps replay the record. What changes between steps (tokens, positions, slots, pages)
is read by the kernels from arrays that the host fills before; lengths follow from positions. Launches are sized for the
cache's capacity, and blocks without work return at once.

The head and the choice among its logits are a second record over the result of the first: what tokens need of the head
differs from call to call (`HeadNeed`). It is launched right after the first, so the host waits once, for a few logits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ...reference.cache import TokenBatch
from ...reference.weights import LinearWeight
from ..backend import HeadNeed, HeadRows
from .cache import DeviceBatch
from .device import DeviceArray
from .select import Selection, selects, sizes_of
from .workspace import Arena, Workspace

LmHead = Callable[[Any, LinearWeight], Any]  # x (N, D) and the head's weight -> logits (N, V)


class RecordedStep:
    """The pass of `size` tokens, all of which are wanted, over the arrays of one cache.

    Called with fewer tokens it computes the last one several times: the same numbers are written to the same places.
    decodes: as of its batches (`DeviceBatch`); the recorded kernels depend on it.
    """

    def __init__(self, ws: Workspace, size: int, decodes: bool) -> None:
        self._ws, self._size = ws, size
        ws.device.trim()  # so that the arrays kept here do not split memory that a longer pass will need
        self._sheet = ws.zeros((3, size), np.int64)
        self._batch = DeviceBatch(self._sheet[0], self._sheet[1], self._sheet[2], decodes=decodes)
        self._arena = Arena(ws.make)
        self._graph: Any = None
        self._result: DeviceArray
        self._heads: dict[tuple[int, int, int], RecordedHead] = {}
        self._head_arenas: dict[int, Arena] = {}

    def __call__(self, batch: TokenBatch, compute: Callable[[DeviceBatch], DeviceArray]) -> DeviceArray:
        """`compute` of the batch, replayed from the second call on.   -> (N, D) on the device, until the next call"""
        n = len(batch)
        sheet = np.stack([batch.tokens, batch.positions, batch.slots]).astype(np.int64)
        self._ws.device.copy(self._sheet, sheet[:, np.minimum(np.arange(self._size), n - 1)])
        if self._graph is not None:
            self._graph.launch()
        else:
            self._result = self._run(compute)
            with self._ws.device.capture() as graph:
                self._run(compute)
            self._graph = graph
        return self._result[:n]

    def _run(self, compute: Callable[[DeviceBatch], DeviceArray]) -> DeviceArray:
        with self._ws.arrays_of(self._arena):
            return compute(self._batch)

    def head_rows(self, lm_head: LmHead, w: LinearWeight, needs: Sequence[HeadNeed]) -> list[HeadRows] | None:
        """`Backend.head_rows` of the result of the last call. None where a token needs all of its logits."""
        vocab = w.shape[0]
        if not all(selects(need, vocab) for need in needs):
            return None
        max_k, also = (0 if size == 0 else 1 << (size - 1).bit_length() for size in sizes_of(needs, vocab))
        key = id(w), max_k, also
        if key not in self._heads:
            arena = self._head_arenas.setdefault(id(w), Arena(self._ws.make))
            self._heads[key] = RecordedHead(self._ws, w, self._result, arena, max_k, also)
        return self._heads[key](lm_head, needs)


class RecordedHead:
    """The head over the result of a recorded step, x (size, D), and a selection among its logits (size, V).

    All heads of a step and a weight share the arena: the logits of one call are overwritten by the next.
    """

    def __init__(self, ws: Workspace, w: LinearWeight, x: Any, arena: Arena, max_k: int, also: int) -> None:
        self._ws, self._w, self._x, self._arena = ws, w, x, arena
        self._selection = Selection(ws, len(x), w.shape[0], max_k, also)
        self._graph: Any = None
        self._logits: Any = None

    def __call__(self, lm_head: LmHead, needs: Sequence[HeadNeed]) -> list[HeadRows]:
        self._selection.ask(needs)
        if self._graph is not None:
            self._graph.launch()
        else:
            self._run(lm_head)
            with self._ws.device.capture() as graph:
                self._run(lm_head)
            self._graph = graph
        return self._selection.read(needs, lambda i: self._ws.device.to_host(self._logits[i]))

    def _run(self, lm_head: LmHead) -> None:
        with self._ws.arrays_of(self._arena):
            self._logits = lm_head(self._x, self._w)
            self._selection.launch(self._logits)
