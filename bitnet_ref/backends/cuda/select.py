"""Host side of `kernels/cuda/select.cu`: the logits that each token's choice needs cross the bus, and no others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..candidates import HeadCandidates, HeadNeed
from .workspace import THREADS, Workspace

FILE = "select.cu"
MOST_SELECTED = 512  # k beyond this: all of the token's logits
BLOCKS = 32  # that share the logits of a token


def select(ws: Workspace, logits: Any, needs: Sequence[HeadNeed]) -> list[HeadCandidates]:
    """logits (N, V) on the device -> for each token all that reach its k-th largest, and those of its `also`."""
    n, vocab = logits.shape
    some = [need.k is not None and need.k <= MOST_SELECTED and need.k < vocab for need in needs]
    ks = np.array([need.k if chosen else 1 for need, chosen in zip(needs, some, strict=True)], dtype=np.int32)
    if not any(some):
        return [HeadCandidates(np.arange(vocab), row, vocab) for row in ws.download(logits)[0]]
    thresholds, counts = ws.zeros((n,), np.uint32), ws.zeros((n,), np.int32)
    if (ks == 1).all():
        ws.launch(FILE, "largest", (BLOCKS, n), THREADS, logits, vocab, thresholds, ws.trouble)
    else:
        ws.launch(FILE, "kth_largest", (n,), 1024, logits, vocab, ws.upload(ks), thresholds, ws.trouble)
    room = 2 * int(ks.max()) + 64  # more than this many equal the k-th: all of the token's logits
    ids, values = ws.empty((n, room), np.int32), ws.empty((n, room), np.float32)
    ws.launch(FILE, "collect", (BLOCKS, n), THREADS, logits, vocab, thresholds, room, counts, ids, values)
    also: list[Any] = [
        np.unique(np.asarray(need.also, dtype=np.int64)) if few else [] for need, few in zip(needs, some, strict=True)
    ]
    more = np.full((n, max(map(len, also))), -1, dtype=np.int64)
    for row, wanted in zip(more, also, strict=True):
        row[: len(wanted)] = wanted
    picked = ws.empty(more.shape, np.float32)
    grid = (-(-more.shape[1] // THREADS), n)
    ws.launch(FILE, "pick", grid, THREADS, logits, vocab, ws.upload(more), more.shape[1], picked)
    host_counts, host_ids, host_values, host_picked = ws.download(counts, ids, values, picked)
    found = []
    for i, (count, wanted) in enumerate(zip(host_counts, also, strict=True)):
        if not some[i] or count > room:
            found.append(HeadCandidates(np.arange(vocab), ws.device.to_host(logits[i]), vocab))
            continue
        all_ids = np.concatenate([host_ids[i, :count].astype(np.int64), wanted])
        unique, first = np.unique(all_ids, return_index=True)
        both = np.concatenate([host_values[i, :count], host_picked[i, : len(wanted)]])
        found.append(HeadCandidates(unique.astype(np.int64), both[first], vocab))
    return found
