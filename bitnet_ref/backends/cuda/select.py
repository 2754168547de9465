"""Host side of `kernels/cuda/select.cu`: the logits that each token's choice needs cross the bus, and no others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..candidates import HeadCandidates, HeadNeed
from .workspace import THREADS, Workspace

FILE = "select.cu"
MOST_SELECTED = 512  # k beyond this: all of the token's logits
LEAST_BLOCKS, BLOCKS_EACH = 32, 2  # that share the logits of a token, and of a multiprocessor where tokens are few
SPARE = 64  # places for logits that equal the k-th, beside twice k: more of them, and all logits are fetched


def selects(need: HeadNeed, vocab: int) -> bool:
    """Whether a token needs a few logits only."""
    return need.k is not None and need.k <= MOST_SELECTED and need.k < vocab


def blocks_of(n: int, vocab: int, multiprocessors: int) -> int:
    """That share the logits of each of n tokens: few tokens keep the card busy too, and no thread has nothing to do."""
    return min(-(-vocab // THREADS), max(LEAST_BLOCKS, BLOCKS_EACH * multiprocessors // n))


class Selection:
    """What is asked of the logits (n, vocab), and what was found: arrays on the device that stay where they are.

    most: the largest k that can be asked for.   also: ids a token, at most.
    `found` is one array, so that one copy brings all of it: 32-bit words,

        counts (n,), from_end (n,), ids (n, room), values (n, room), picked (n, also), and what the workspace's
        `trouble` was; from_end is `vocab` less the smallest id that reaches the threshold
    """

    def __init__(self, ws: Workspace, n: int, vocab: int, most: int, also: int) -> None:
        self._ws, self._n, self._vocab, self._most, self._also = ws, n, vocab, most, also
        self.room = 2 * most + SPARE
        sizes = n, n, n * self.room, n * self.room, n * also, 1
        self._ends = np.cumsum(sizes)[:-1].tolist()
        self.found = ws.make((sum(sizes),), np.int32)
        self._blocks = blocks_of(n, vocab, ws.device.multiprocessors)
        self._thresholds = ws.make((n, self._blocks if most == 1 else 1), np.uint32)
        self._ks, self._ids = ws.make((n,), np.int32), ws.make((n, also), np.int64)
        self._asked: tuple[NDArray[np.int32], NDArray[np.int64]] | None = None

    def ask(self, needs: Sequence[HeadNeed]) -> None:
        """Of the first tokens these, of the rest as little as there is. Copies to the device what has changed."""
        ks, ids = np.ones(self._n, dtype=np.int32), np.full((self._n, self._also), -1, dtype=np.int64)
        for i, need in enumerate(() if self.is_greedy else needs):
            if selects(need, self._vocab):
                assert need.k is not None
                ks[i] = need.k
                ids[i, : len(need.also)] = need.also
        before, self._asked = self._asked, (ks, ids)
        if self._most > 1 and (before is None or not np.array_equal(before[0], ks)):
            self._ws.device.copy(self._ks, ks)
        if self._also > 0 and (before is None or not np.array_equal(before[1], ids)):
            self._ws.device.copy(self._ids, ids)

    def launch(self, logits: Any) -> None:
        """Find it. May be captured."""
        ws, n, vocab = self._ws, self._n, self._vocab
        counts, from_end, ids, values, picked, trouble = self._parts(self.found)
        grid, shares = (self._blocks, n), self._thresholds.shape[1]
        begun = self._thresholds, counts, from_end
        if self._most == 1:
            ws.launch(FILE, "largest", grid, THREADS, logits, vocab, *begun, ws.trouble)
        else:
            ws.launch(FILE, "kth_largest", (n,), 1024, logits, vocab, self._ks, *begun, ws.trouble)
        found = self._thresholds, shares, self.room, counts, from_end, ids, values, ws.trouble, trouble
        ws.launch(FILE, "collect", grid, THREADS, logits, vocab, *found)
        grid = (-(-self._also // THREADS), n)
        ws.launch(FILE, "pick", grid, THREADS, logits, vocab, self._ids, self._also, picked)

    def read(
        self, found: NDArray[np.int32], needs: Sequence[HeadNeed], logits_of: Callable[[int], NDArray]
    ) -> list[HeadCandidates]:
        """What `launch` has left, a copy of it on the host, as candidates. NumericsError as `Workspace.download`.

        logits_of: all of a token's (V,), where they are needed.
        """
        counts, _, ids, values, picked, trouble = self._parts(found)
        self._ws.raise_trouble(int(trouble[0]))
        ids, values = ids.reshape(self._n, -1), values.view(np.float32).reshape(self._n, -1)
        picked = picked.view(np.float32).reshape(self._n, -1)
        alone = ids[:, :1].astype(np.int64), values[:, :1].copy()  # what most tokens ask for
        out = []
        for i, (need, count) in enumerate(zip(needs, counts[: len(needs)].tolist(), strict=True)):
            if count == 1 == need.k and len(need.also) == 0:
                out.append(HeadCandidates(alone[0][i], alone[1][i], self._vocab))
                continue
            if not selects(need, self._vocab) or count > self.room:
                out.append(HeadCandidates(np.arange(self._vocab), logits_of(i), self._vocab))
                continue
            wanted = np.asarray(need.also, dtype=np.int64)
            each = np.concatenate([ids[i, :count].astype(np.int64), wanted])
            unique, first = np.unique(each, return_index=True)
            both = np.concatenate([values[i, :count], picked[i, : len(wanted)]])
            out.append(HeadCandidates(unique, both[first], self._vocab))
        return out

    @property
    def is_greedy(self) -> bool:
        """Whether nothing but the largest logit of each token was asked for."""
        return self._most == 1 and self._also == 0

    def from_end(self, found: Any) -> Any:
        """Of `found`, or a copy of it: `vocab` less each token's smallest id that reaches its threshold.   -> (n,)"""
        return self._parts(found)[1]

    def _parts(self, found: Any) -> tuple[Any, ...]:
        return tuple(found[start:end] for start, end in zip([0, *self._ends], [*self._ends, len(found)], strict=True))


def sizes_of(needs: Sequence[HeadNeed], vocab: int) -> tuple[int, int]:
    """`most` and `also` of a selection for these: the largest k, and the most ids beside it."""
    if all(need.k == 1 and len(need.also) == 0 for need in needs):
        return 1, 0
    few = [need for need in needs if selects(need, vocab)]
    return max((need.k or 1 for need in few), default=1), max((len(need.also) for need in few), default=0)


def select(ws: Workspace, logits: Any, needs: Sequence[HeadNeed]) -> list[HeadCandidates]:
    """logits (N, V) on the device -> for each token all that reach its k-th largest, and those of its `also`."""
    n, vocab = logits.shape
    if not any(selects(need, vocab) for need in needs):
        return [HeadCandidates(np.arange(vocab), row, vocab) for row in ws.download(logits)[0]]
    selection = Selection(ws, n, vocab, *sizes_of(needs, vocab))
    selection.ask(needs)
    selection.launch(logits)
    return selection.read(ws.device.to_host(selection.found), needs, lambda i: ws.device.to_host(logits[i]))
