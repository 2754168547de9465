"""How many bytes one sequence holds of a KV cache, by how the cache is kept."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ..backends.cache_dtypes import CACHE_DTYPES
from ..generation.overflow import keep_after_overflow
from ..generation.params import SamplingParams
from ..reference.cache import KVCache
from ..reference.config import ModelConfig

DEFAULT_SINKS = SamplingParams().sink_tokens


def tokens_held(length: int, window: int, policy: str, sinks: int) -> NDArray[np.int64]:
    """How many tokens the model sees, and so the cache holds, when a text has 0, 1, ... `length` tokens, by `overflow`.
    -> (length + 1,)

    >>> tokens_held(9, 6, "sinks", 2).tolist()
    [0, 1, 2, 3, 4, 5, 6, 4, 5, 6]
    """
    held = np.zeros(length + 1, dtype=np.int64)
    for count in range(1, length + 1):
        kept = held[count - 1] + 1
        if kept > window:
            kept = sum(stop - start for start, stop in keep_after_overflow(count, window, policy, sinks))
        held[count] = kept
    return held


def cache_memory(
    config: ModelConfig,
    tokens: Sequence[int],
    *,
    page_size: int = 16,
    window: int | None = None,
    sinks: int = DEFAULT_SINKS,
) -> dict[str, NDArray[np.int64]]:
    """Bytes after so many tokens, for each policy:

    "reserved": float32 for the whole context from the beginning, as a batch without pages must.
    "float32", "float16", "int8": pages as they are needed, in that dtype.
    "sliding", "sinks": with `window`, pages of the tokens that `overflow` keeps in it, in float32.

    The bytes of a page are those of a real `KVCache`, scales included.
    """
    counts = np.asarray(tokens, dtype=np.int64)
    page = {
        name: KVCache(config, 1, page_size, np.dtype(name).type, page_size=page_size, pages=1).nbytes
        for name in CACHE_DTYPES
    }
    whole = KVCache(config, 1, config.context_length, np.float32).nbytes
    pages = -(-counts // page_size)
    policies = {"reserved": np.full_like(counts, whole), **{name: pages * nbytes for name, nbytes in page.items()}}
    if window is not None:
        for policy in ("sliding", "sinks"):
            held = tokens_held(int(counts.max(initial=0)), window, policy, sinks)[counts]
            policies[policy] = -(-held // page_size) * page["float32"]
    return policies
