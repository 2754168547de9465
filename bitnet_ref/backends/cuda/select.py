"""Host side of `kernels/cuda/select.cu`: the logits that a choice among the k largest needs, and no others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..candidates import HeadCandidates
from .workspace import THREADS, Workspace

FILE = "select.cu"
MOST_SELECTED = 512  # k beyond this: all logits cross the bus
BLOCKS = 32  # that share the logits of a token


def largest(ws: Workspace, logits: Any, k: int, also: Sequence[int]) -> list[HeadCandidates]:
    """logits (N, V) on the device -> of each token all that reach its k-th largest, and those of the ids `also`."""
    n, vocab = logits.shape
    room = 2 * k + 64
    thresholds, counts = ws.zeros((n,), np.uint32), ws.zeros((n,), np.int32)
    if k == 1:
        ws.launch(FILE, "largest", (BLOCKS, n), THREADS, logits, vocab, thresholds, ws.trouble)
    else:
        ws.launch(FILE, "kth_largest", (n,), 1024, logits, vocab, k, thresholds, ws.trouble)
    ids, values = ws.empty((n, room), np.int32), ws.empty((n, room), np.float32)
    arguments = logits, vocab, thresholds, room, counts, ids, values
    ws.launch(FILE, "collect", (BLOCKS, n), THREADS, *arguments)
    more = np.unique(np.asarray(also, dtype=np.int64))
    picked = ws.empty((n, len(more)), np.float32)
    grid = (-(-len(more) // THREADS), n)
    ws.launch(FILE, "pick", grid, THREADS, logits, vocab, ws.upload(more), len(more), picked)
    found = ws.download(counts, ids, values, picked)
    return [
        _candidates(vocab, *(each[i] for each in found), more)
        if found[0][i] <= room
        else HeadCandidates(np.arange(vocab), ws.device.to_host(logits[i]), vocab)  # hundreds of equal logits
        for i in range(n)
    ]


def _candidates(
    vocab: int, count: int, ids: NDArray, values: NDArray, picked: NDArray, more: NDArray
) -> HeadCandidates:
    all_ids = np.concatenate([ids[:count].astype(np.int64), more])
    unique, first = np.unique(all_ids, return_index=True)
    return HeadCandidates(unique, np.concatenate([values[:count], picked])[first], vocab)
