"""A decoding step as one CUDA graph, recorded from the model's own text.

A step of 30 layers is 186 launches, of several tokens 306; from Python each costs more than most of them run. So the
first step of a shape runs as it is, in arrays that are kept (`Arena`), then once more while the device only records,
and from then on the record is replayed. What changes between steps (tokens, positions, slots, the page table) is read
by the kernels from arrays that the host fills before; lengths follow from positions. Launches are sized for the cache's
capacity, and blocks with nothing to do return at once.

The head and the choice among its logits are a second record, over what the first leaves: what tokens ask of it differs
from call to call (`HeadNeed`). It is launched at once after the first, so the device goes from one to the other without
waiting, and the host waits once: for a few ids, their logits and the final hidden states, in pinned memory.

And the device need not wait for the host. Where tokens have been the likeliest ones for some steps, it goes ahead: the
next step begins, with the tokens just found, before the host has seen them, and its head and choice behind it
(`Ahead`). While the host turns tokens into text and decides what is to come, which for a hundred sequences takes as
long as a step, that step runs; if it was the one that is asked for then, what it found is there, or nearly. If it was
not, nothing of it is seen: it has written only where the tokens that come must write anyway.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ...reference.cache import TokenBatch
from ...reference.config import ModelConfig
from ...reference.weights import LinearWeight, ModelWeights
from ..candidates import HeadCandidates, HeadNeed
from .cache import DeviceBatch, DeviceKVCache
from .device import Event
from .rows import value
from .select import Selection, selects, sizes_of
from .workspace import THREADS, Arena

if TYPE_CHECKING:
    from .backend import CupyBackend


RIGHT_BEFORE_AHEAD = 2  # guesses in a row: a step for nothing is rare where sequences come and go


@dataclass(frozen=True, eq=False)
class Arrival:
    """What a head has found and what it saw: in pinned memory, once the event is reached."""

    head: RecordedHead
    found: NDArray[np.int32]  # as of `Selection`
    hidden: NDArray[np.float32]  # (size, D)
    event: Event


@dataclass(frozen=True, eq=False)
class Ahead:
    """A step that is guessed, and that the device may have begun without being asked."""

    step: RecordedStep
    cache: weakref.ref[DeviceKVCache]
    changes: int  # `DeviceKVCache.changes` before it
    sheet: NDArray[np.int64]  # (3, n): tokens, positions, slots
    arrival: Arrival | None  # of its head; None: it has not begun

    def is_for(self, step: RecordedStep, sheet: NDArray[np.int64], cache: DeviceKVCache) -> bool:
        """Whether it is this one, over a cache that nobody has touched since."""
        same = step is self.step and cache is self.cache() and cache.changes == self.changes
        return same and np.array_equal(sheet, self.sheet)


class RecordedStep:
    """The pass of `size` tokens, all of which are wanted, over one cache. Called with up to `size` tokens: the last is
    then computed several times over, and writes the same numbers to the same places.

    decoding: whether its batches are always such as `decodes` says, or never: what is recorded depends on it
    (`DeviceKVCache.putting_off`).
    """

    def __init__(
        self,
        be: CupyBackend,
        compute: Callable[..., NDArray],
        w: ModelWeights,
        cfg: ModelConfig,
        size: int,
        decoding: bool,
    ) -> None:
        self._be, self._compute, self._w, self._cfg, self._size, self._decoding = be, compute, w, cfg, size, decoding
        be.ws.device.trim()  # so that what stays takes no piece of what a longer pass will need whole
        self._sheet = be.ws.zeros((3, size), np.int64)
        self._batch = DeviceBatch(self._sheet[0], self._sheet[1], self._sheet[2])
        self._arena = Arena(be.ws.make)
        self._graph: Any = None
        self._result: Any = None
        self._heads: dict[tuple[int, int, int], RecordedHead] = {}
        self._head_arenas: dict[int, Arena] = {}
        self._arrival: Arrival | None = None  # of the head that was begun with the result of the last call
        self._asked: tuple[NDArray[np.int64], weakref.ref[DeviceKVCache]] | None = None  # at the last call
        self._guess: Ahead | None = None  # what will be asked for if all tokens are the likeliest
        self._right = 0  # guesses in a row

    def __call__(self, batch: TokenBatch, cache: DeviceKVCache, ahead: Ahead | None = None) -> NDArray:
        """What `compute` gives for the batch.   -> (N, D) on the device, until the next call or `candidates`

        ahead: what the device has begun last.
        """
        n, device = len(batch), self._be.ws.device
        sheet = np.stack([batch.tokens, batch.positions, batch.slots]).astype(np.int64)
        cache.copy_table()
        guessed = self._guess is not None and self._guess.is_for(self, sheet, cache)
        self._right = self._right + 1 if guessed else 0
        begun = guessed and ahead is self._guess
        self._arrival = ahead.arrival if begun and ahead is not None else None
        self._asked, self._guess = (sheet, weakref.ref(cache)) if self._decoding else None, None
        if begun:
            return self._result[:n]
        if ahead is not None:
            device.fill(self._be.ws.trouble, 0)  # what it met is nobody's
        cache.changes += 1
        device.copy(self._sheet, sheet[:, np.minimum(np.arange(self._size), n - 1)])
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
    ) -> tuple[list[HeadCandidates], NDArray[np.float32], Ahead | None] | None:
        """`Backend.head_candidates` of the result of the last call, that result (N, D) on the host, and the step that
        the device has begun meanwhile.

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
        head, arrival, self._arrival = self._heads[key], self._arrival, None
        if arrival is None or arrival.head is not head:
            arrival = head.launch(needs)
        begun = self._go_ahead(head, vocab) if self._right >= RIGHT_BEFORE_AHEAD else None
        arrival.event.synchronize()
        found, hidden = head.read(arrival, needs, gone_on=begun is not None), arrival.hidden[: len(needs)].copy()
        if self._asked is not None and head.is_greedy and (cache := self._asked[1]()) is not None:
            _, positions, slots = self._asked[0]
            sheet = np.stack([head.likeliest(arrival)[: len(needs)], positions + 1, slots])
            self._guess = Ahead(self, self._asked[1], cache.changes, sheet, begun)
        return found, hidden, self._guess if begun is not None else None

    def _go_ahead(self, head: RecordedHead, vocab: int) -> Arrival | None:
        """Begin the step after this one, with the tokens that the head has found, and its head; if there is one."""
        if self._asked is None or not head.is_greedy or self._graph is None:
            return None
        (_, positions, slots), cache = self._asked[0], self._asked[1]()
        if cache is None or not cache.has_room(slots, positions + 1):
            return None
        next_ones = head.likeliest_on_device, self._size, vocab, self._sheet[0], self._sheet[1]
        self._be.ws.launch("select.cu", "advance", (-(-self._size // THREADS),), THREADS, *next_ones)
        self._graph.launch()
        return head.launch(())


class RecordedHead:
    """The head over the result of a recorded step, x (size, D), and a selection among its logits (size, V).

    All heads of a step and a weight share the arena: the logits of one call are those of the next. What it finds comes
    to two places in turn: while the host reads one, the device may write to the other.
    """

    def __init__(self, be: CupyBackend, w: LinearWeight, x: Any, arena: Arena, most: int, also: int) -> None:
        self._be, self._w, self._x, self._arena = be, w, x, arena
        self._selection = Selection(be.ws, len(x), w.shape[0], most, also)
        pinned, shape = be.ws.device.pinned, self._selection.found.shape
        self._places = [(pinned(shape, np.int32), pinned(x.shape, np.float32)) for _ in range(2)]
        self._graph: Any = None
        self._logits: Any = None

    def launch(self, needs: Sequence[HeadNeed]) -> Arrival:
        """Begin; `read` gives what was found when the event has been waited for."""
        device = self._be.ws.device
        self._selection.ask(needs)
        if self._graph is not None:
            self._graph.launch()
        else:
            self._run()
            with device.capture() as graph:
                self._run()
            self._graph = graph
        self._places.reverse()
        found, hidden = self._places[0]
        device.to_pinned(found, self._selection.found)
        device.to_pinned(hidden, self._x)
        return Arrival(self, found, hidden, device.event())

    @property
    def is_greedy(self) -> bool:
        """Whether nothing but the largest logit of each row is asked for."""
        return self._selection.is_greedy

    @property
    def likeliest_on_device(self) -> Any:
        """The greedy token of each row, counted from the vocabulary's end.   -> (size,) int32"""
        return self._selection.from_end(self._selection.found)

    def likeliest(self, arrival: Arrival) -> NDArray[np.int64]:
        """The greedy token of each row.   -> (size,)"""
        return self._w.shape[0] - self._selection.from_end(arrival.found).astype(np.int64)

    def read(self, arrival: Arrival, needs: Sequence[HeadNeed], gone_on: bool) -> list[HeadCandidates]:
        """gone_on: whether the logits may be those of the next step by now."""
        be = self._be

        def logits_of(i: int) -> NDArray:
            if not gone_on:
                return be.ws.device.to_host(self._logits[i])
            again = value(be.ws, be.lm_head(be.ws.upload(arrival.hidden[i : i + 1]), self._w))
            return be.ws.device.to_host(again)[0]

        return self._selection.read(arrival.found, needs, logits_of)

    def _run(self) -> None:
        with self._be.ws.arrays_of(self._arena):
            self._logits = value(self._be.ws, self._be.lm_head(self._x, self._w))
            self._selection.launch(self._logits)
