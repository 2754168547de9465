"""A decoding step as one CUDA graph, recorded from the model's own text.

A step of 30 layers is 186 launches, of several tokens 306; from Python each costs more than most of them run. So the
first step of a shape runs as it is, in arrays that are kept (`Arena`), then once more while the device only records,
and from then on the record is replayed. What changes between steps (tokens, positions, slots, the page table) is read
by the kernels from arrays that the host fills before; lengths follow from positions. Launches are sized for the cache's
capacity, and blocks with nothing to do return at once.

The head and the choice among its logits are a second record, over what the first leaves: what tokens ask of it differs
from call to call (`HeadNeed`). It is launched at once after the first, so the device goes from one to the other without
waiting, and the host waits once: for a few ids, their logits and the final hidden states, in pinned memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ...config import ModelConfig
from ...kv_cache import TokenBatch
from ...weights import LinearWeight, ModelWeights
from ..candidates import HeadCandidates, HeadNeed
from .cache import DeviceBatch, DeviceKVCache
from .rows import value
from .select import Selection, selects, sizes_of
from .workspace import Arena

if TYPE_CHECKING:
    from ..cupy_backend import CupyBackend


class RecordedStep:
    """The pass of `size` tokens, all of which are wanted, over one cache. Called with up to `size` tokens: the last is
    then computed several times over, and writes the same numbers to the same places. It is called always, or never,
    with tokens each of another sequence: what is recorded depends on it (`DeviceKVCache.putting_off`)."""

    def __init__(
        self, be: CupyBackend, compute: Callable[..., NDArray], w: ModelWeights, cfg: ModelConfig, size: int
    ) -> None:
        self._be, self._compute, self._w, self._cfg, self._size = be, compute, w, cfg, size
        self._sheet = be.ws.zeros((3, size), np.int64)
        self._batch = DeviceBatch(self._sheet[0], self._sheet[1], self._sheet[2])
        self._arena = Arena(be.ws.make)
        self._graph: Any = None
        self._result: Any = None
        self._heads: dict[tuple[int, int, int], RecordedHead] = {}
        self._head_arenas: dict[int, Arena] = {}
        self._hidden: NDArray[np.float32] | None = None  # pinned: the result on the host

    def __call__(self, batch: TokenBatch, cache: DeviceKVCache) -> NDArray:
        """What `compute` gives for the batch.   -> (N, D) on the device, until the next call"""
        n = len(batch)
        sheet = np.stack([batch.tokens, batch.positions, batch.slots]).astype(np.int64)
        self._be.ws.device.copy(self._sheet, sheet[:, np.minimum(np.arange(self._size), n - 1)])
        cache.copy_table()
        if self._graph is not None:
            self._graph.launch()
        else:
            self._result = self._run(batch, cache)
            with self._be.ws.device.capture() as graph:
                self._run(batch, cache)
            self._graph = graph
        return self._result[:n]

    def _run(self, batch: TokenBatch, cache: DeviceKVCache) -> Any:
        be = self._be
        be.rope_positions.reach = max(be.rope_positions.reach, cache.reach - 1)
        with be.ws.arrays_of(self._arena), cache.putting_off(batch):
            return value(be.ws, self._compute(be, self._w, self._cfg, self._batch, cache))

    def candidates(
        self, w: LinearWeight, needs: Sequence[HeadNeed]
    ) -> tuple[list[HeadCandidates], NDArray[np.float32]] | None:
        """`Backend.head_candidates` of the result of the last call, and that result (N, D) on the host.

        None where a token needs all of its logits: that is nothing to record.
        """
        vocab = w.shape[0]
        if not all(selects(need, vocab) for need in needs):
            return None
        most, also = (0 if size == 0 else 1 << (size - 1).bit_length() for size in sizes_of(needs, vocab))
        key = id(w), most, also
        if key not in self._heads:
            arena = self._head_arenas.setdefault(id(w), Arena(self._be.ws.make))
            self._heads[key] = RecordedHead(self._be, w, self._result, arena, most, also)
        head, device = self._heads[key], self._be.ws.device
        head.launch(needs)
        if self._hidden is None:
            self._hidden = device.pinned(self._result.shape, np.float32)
        device.to_pinned(self._hidden, self._result)
        device.synchronize()
        return head.read(needs), self._hidden[: len(needs)].copy()


class RecordedHead:
    """The head over the result of a recorded step, x (size, D), and a selection among its logits (size, V).

    All heads of a step and a weight share the arena: the logits of one call are those of the next.
    """

    def __init__(self, be: CupyBackend, w: LinearWeight, x: Any, arena: Arena, most: int, also: int) -> None:
        self._be, self._w, self._x, self._arena = be, w, x, arena
        self._selection = Selection(be.ws, len(x), w.shape[0], most, also)
        self._host = be.ws.device.pinned(self._selection.found.shape, np.int32)
        self._graph: Any = None
        self._logits: Any = None

    def launch(self, needs: Sequence[HeadNeed]) -> None:
        """Begin; `read` gives what was found when the device has been waited for."""
        device = self._be.ws.device
        self._selection.ask(needs)
        if self._graph is not None:
            self._graph.launch()
        else:
            self._run()
            with device.capture() as graph:
                self._run()
            self._graph = graph
        device.to_pinned(self._host, self._selection.found)

    def read(self, needs: Sequence[HeadNeed]) -> list[HeadCandidates]:
        return self._selection.read(self._host, needs, self._logits)

    def _run(self) -> None:
        with self._be.ws.arrays_of(self._arena):
            self._logits = value(self._be.ws, self._be.lm_head(self._x, self._w))
            self._selection.launch(self._logits)
