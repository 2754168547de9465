"""A decoding step as one CUDA graph, recorded from the model's own text.

A step of 30 layers is 186 launches for one token and 306 for several; launching one from Python takes longer than most
of them run. So the first step of a shape runs eagerly, in arrays that are kept (`Arena`), then once more while the
device only records, and later steps replay the record. What changes between steps (tokens, positions, slots, pages)
is read by the kernels from arrays that the host fills before; lengths follow from positions. Launches are sized for the
cache's capacity, and blocks without work return at once.

The head and the choice among its logits are a second record over the result of the first: what tokens need of the head
differs from call to call (`HeadNeed`). It is launched right after the first, so the host waits once, for a few logits.

For greedy steps in a row the second record also writes the largest logit's token and the next position where the first
one reads them. Both are launched again and again, and the host waits for the results of all steps at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ...reference.cache import TokenBatch
from ...reference.weights import LinearWeight
from ..backend import GreedyRun, GreedySteps, HeadNeed, HeadRows
from .cache import DeviceBatch
from .device import DeviceArray, Event
from .select import GreedyChoice, Selection, selects, sizes_of
from .workspace import Arena, Workspace

MAX_GREEDY = 16  # steps in a row
IN_FLIGHT = 2  # of them, launched and not done: the card does not wait for the host, and the bell is heard soon

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
        self._greedy_heads: dict[int, GreedyHead] = {}

    def __call__(self, batch: TokenBatch, compute: Callable[[DeviceBatch], DeviceArray]) -> DeviceArray:
        """`compute` of the batch, replayed from the second call on.   -> (N, D) on the device, until the next call"""
        self._fill(batch)
        if self._graph is not None:
            self._graph.launch()
        else:
            self._result = self._run(compute)
            with self._ws.device.capture() as graph:
                self._run(compute)
            self._graph = graph
        return self._result[: len(batch)]

    def _fill(self, batch: TokenBatch) -> None:
        """Bring the batch's tokens, positions and slots to the device, the last token as often as there is room."""
        sheet, n = np.empty((3, self._size), dtype=np.int64), len(batch)
        for row, values in zip(sheet, (batch.tokens, batch.positions, batch.slots), strict=True):
            row[:n] = values
            row[n:] = values[-1]
        self._ws.device.copy(self._sheet, sheet)

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

    def greedy(self, batch: TokenBatch, lm_head: LmHead, w: LinearWeight, run: GreedyRun) -> GreedySteps | None:
        """`Backend.greedy_steps`, up to MAX_GREEDY of them. None before the first single step."""
        if self._graph is None:
            return None
        n, left = len(batch), np.empty(self._size, dtype=np.int64)
        left[:n], left[n:] = run.left, run.left[-1]
        if id(w) not in self._greedy_heads:
            arena = self._head_arenas.setdefault(id(w), Arena(self._ws.make))
            self._greedy_heads[id(w)] = GreedyHead(self._ws, lm_head, w, self._result, self._sheet, arena)
        head = self._greedy_heads[id(w)]
        head.choice.begin(left)
        self._fill(batch)
        taken, events = 0, list[Event]()
        while taken < min(run.steps, MAX_GREEDY) and not (taken and run.bell[0]):
            if taken >= IN_FLIGHT:
                events[taken - IN_FLIGHT].synchronize()
            self._graph.launch()
            head.graph.launch()
            events.append(self._ws.device.event())
            taken += 1
        tokens, values, states = head.choice.read(taken, n)
        ended = np.isin(tokens, run.ends) | (np.arange(1, len(tokens) + 1)[:, None] >= run.left)
        enough = 8 * np.logical_or.accumulate(ended).sum(axis=1) >= n
        count = int(enough.argmax()) + 1 if enough.any() else len(tokens)
        return GreedySteps(tokens[:count], values[:count], states[:count])


class GreedyHead:
    """The head over the result of a recorded step, x (size, D), and the choice of the largest logits, as a graph."""

    def __init__(
        self, ws: Workspace, lm_head: LmHead, w: LinearWeight, x: DeviceArray, sheet: DeviceArray, arena: Arena
    ) -> None:
        self.choice = GreedyChoice(ws, len(x), w.shape[0], x.shape[1], MAX_GREEDY)

        def run() -> None:
            with ws.arrays_of(arena):
                self.choice.launch(lm_head(x, w), x, sheet)

        run()  # of the step before, to allocate its arrays and compile its kernels
        ws.device.fill(ws.trouble, 0)
        with ws.device.capture() as self.graph:
            run()


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
