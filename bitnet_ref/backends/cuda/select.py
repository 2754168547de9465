"""Host side of `kernels/cuda/select.cu`: only the logits that each token's choice needs are copied to the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...reference.layers import Floats
from ..backend import HeadNeed, HeadRows
from .device import DeviceArray
from .workspace import THREADS, Workspace

FILE = "select.cu"
MAX_SELECTED = 512  # k beyond this: all of the token's logits
MIN_BLOCKS, BLOCKS_EACH = 32, 2  # that share the logits of a token; per multiprocessor where tokens are few
SPARE = 64  # places for logits that equal the k-th, beside twice k: with more of them, all logits are fetched


def selects(need: HeadNeed, vocab: int) -> bool:
    """Whether a token needs a few logits only."""
    return need.k is not None and need.k <= MAX_SELECTED and need.k < vocab


def blocks_of(n: int, vocab: int, multiprocessors: int) -> int:
    """Blocks that share the logits of each of n tokens: few tokens keep the GPU busy too, and no thread is idle."""
    return min(-(-vocab // THREADS), max(MIN_BLOCKS, BLOCKS_EACH * multiprocessors // n))


class Selection:
    """What is asked of the logits (n, vocab), and the results: arrays on the device that stay where they are.

    max_k: the largest k that can be asked for.   also: max ids per token.
    `results` is one array, so that one copy brings all of it to the host: 32-bit words,

        counts (n,), ids (n, room), values (n, room), picked (n, also), and a copy of the workspace's `trouble`
    """

    def __init__(self, ws: Workspace, n: int, vocab: int, max_k: int, also: int) -> None:
        self._ws, self._n, self._vocab, self._max_k, self._also = ws, n, vocab, max_k, also
        self.room = 2 * max_k + SPARE
        sizes = n, n * self.room, n * self.room, n * also, 1
        self._ends = np.cumsum(sizes)[:-1].tolist()
        self.results = ws.make((sum(sizes),), np.int32)
        self._blocks = blocks_of(n, vocab, ws.device.multiprocessors)
        self._thresholds = ws.make((n, self._blocks if max_k == 1 else 1), np.uint32)
        self._ks, self._ids = ws.make((n,), np.int32), ws.make((n, also), np.int64)
        self._asked: tuple[NDArray[np.int32], NDArray[np.int64]] | None = None

    def ask(self, needs: Sequence[HeadNeed]) -> None:
        """Set the needs of the first tokens; the rest need one logit. Copies to the device what has changed."""
        ks, ids = np.ones(self._n, dtype=np.int32), np.full((self._n, self._also), -1, dtype=np.int64)
        for i, need in enumerate(needs):
            if selects(need, self._vocab):
                assert need.k is not None
                ks[i] = need.k
                ids[i, : len(need.also)] = need.also
        before, self._asked = self._asked, (ks, ids)
        if self._max_k > 1 and (before is None or not np.array_equal(before[0], ks)):
            self._ws.device.copy(self._ks, ks)
        if self._also > 0 and (before is None or not np.array_equal(before[1], ids)):
            self._ws.device.copy(self._ids, ids)

    def launch(self, logits: DeviceArray) -> None:
        """Select. May be captured."""
        ws, n, vocab = self._ws, self._n, self._vocab
        counts, ids, values, picked, trouble = self._split(self.results)
        grid, shares = (self._blocks, n), self._thresholds.shape[1]
        if self._max_k == 1:
            ws.launch(FILE, "largest", grid, THREADS, logits, vocab, self._thresholds, counts, ws.trouble)
        else:
            arguments = logits, vocab, self._ks, self._thresholds, counts, ws.trouble
            ws.launch(FILE, "kth_largest", (n,), 1024, *arguments)
        to = counts, ids, values, ws.trouble, trouble
        ws.launch(FILE, "collect", grid, THREADS, logits, vocab, self._thresholds, shares, self.room, *to)
        grid = (-(-self._also // THREADS), n)
        ws.launch(FILE, "pick", grid, THREADS, logits, vocab, self._ids, self._also, picked)

    def read(self, needs: Sequence[HeadNeed], logits_of: Callable[[int], Floats]) -> list[HeadRows]:
        """Wait for the results. Raises NumericsError as `Workspace.download` does.

        logits_of: all logits (V,) of a token, where they are needed.
        """
        counts, ids, values, picked, trouble = self._split(self._ws.device.to_host(self.results))
        self._ws.raise_trouble(int(trouble[0]))
        ids, values = ids.reshape(self._n, -1).astype(np.int64), values.view(np.float32).reshape(self._n, -1)
        picked = picked.view(np.float32).reshape(self._n, -1)
        rows = []
        for i, (need, count) in enumerate(zip(needs, counts[: len(needs)].tolist(), strict=True)):
            if not selects(need, self._vocab) or count > self.room:
                rows.append(HeadRows(np.arange(self._vocab), logits_of(i)))
            elif count == 1 and len(need.also) == 0:  # what most tokens need
                rows.append(HeadRows(ids[i, :1], values[i, :1]))
            else:
                wanted = np.asarray(need.also, dtype=np.int64)
                unique, first = np.unique(np.concatenate([ids[i, :count], wanted]), return_index=True)
                both = np.concatenate([values[i, :count], picked[i, : len(wanted)]])
                rows.append(HeadRows(unique, both[first]))
        return rows

    def _split(self, results: Any) -> tuple[Any, ...]:
        ends = [*self._ends, len(results)]
        return tuple(results[start:end] for start, end in zip([0, *self._ends], ends, strict=True))


class GreedyChoice:
    """The largest logit of each of n rows as the next step's input, and the results of up to `steps` such steps.

    `results` is one array, so that one copy brings all of it to the host: 32-bit words,

        troubles (steps,): the workspace's `trouble` after each step, ids (steps, n), values (steps, n)
    """

    def __init__(self, ws: Workspace, n: int, vocab: int, width: int, steps: int) -> None:
        self._ws, self._n, self._vocab, self.steps = ws, n, vocab, steps
        self._results = ws.make((steps * (1 + 2 * n),), np.int32)
        self._states = ws.make((steps, n, width), np.float32)
        self._blocks = blocks_of(n, vocab, ws.device.multiprocessors)
        self._best = ws.make((n, self._blocks, 2), np.uint32)
        self._counts = ws.zeros((2, n), np.int32)  # tokens left, steps taken

    def begin(self, left: NDArray[np.int64]) -> None:
        """Start with step 0.   left (n,): how many tokens each row still gets; it repeats the last one's step."""
        counts = np.stack([np.minimum(left, np.iinfo(np.int32).max), np.zeros_like(left)])
        self._ws.device.copy(self._counts, counts.astype(np.int32))

    def launch(self, logits: DeviceArray, x: DeviceArray, sheet: DeviceArray) -> None:
        """Choose and advance. May be captured.   logits (n, V), x (n, D), sheet (3, n): tokens, positions, slots"""
        ws, n = self._ws, self._n
        ws.launch(FILE, "first_largest", (self._blocks, n), THREADS, logits, self._vocab, self._best, ws.trouble)
        troubles, ids, values = self._split(self._results)
        to = sheet[0], sheet[1], ids, values, self._states, ws.trouble, troubles
        arguments = logits, self._vocab, self._best, self._blocks, x, x.shape[1], self._counts[0], self._counts[1]
        ws.launch(FILE, "next_tokens", (n,), THREADS, *arguments, *to)

    def read(self, steps: int, n: int) -> tuple[NDArray[np.int64], NDArray[np.float32], NDArray[np.float32]]:
        """Wait for `steps` steps.   -> ids, values (s, n) and states (s, n, D), up to the first one with NaN or Inf"""
        troubles, ids, values = self._split(self._ws.device.to_host(self._results))
        bad = np.flatnonzero(troubles[:steps])
        if len(bad):
            self._ws.device.fill(self._ws.trouble, 0)
            steps = int(bad[0])
        ids, values = (array.reshape(self.steps, self._n)[:steps, :n] for array in (ids, values.view(np.float32)))
        return ids.astype(np.int64), values, self._ws.device.to_host(self._states[:steps])[:, :n]

    def _split(self, results: Any) -> tuple[Any, Any, Any]:
        """troubles, ids, values"""
        end = self.steps * (1 + self._n)
        return results[: self.steps], results[self.steps : end], results[end:]


def sizes_of(needs: Sequence[HeadNeed], vocab: int) -> tuple[int, int]:
    """`max_k` and `also` of a selection for these needs."""
    few = [need for need in needs if selects(need, vocab)]
    return max((need.k or 1 for need in few), default=1), max((len(need.also) for need in few), default=0)


def select(ws: Workspace, logits: DeviceArray, needs: Sequence[HeadNeed]) -> list[HeadRows]:
    """logits (N, V) on the device -> for each token all that reach its k-th largest, and those of its `also`."""
    n, vocab = logits.shape
    if not any(selects(need, vocab) for need in needs):
        return [HeadRows(np.arange(vocab), row) for row in ws.download(logits)]
    selection = Selection(ws, n, vocab, *sizes_of(needs, vocab))
    selection.ask(needs)
    selection.launch(logits)
    return selection.read(needs, lambda i: ws.device.to_host(logits[i]))
