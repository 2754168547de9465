"""Bytes of KV cache that one sequence holds, by cache dtype and overflow policy."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ..backends.cache_dtypes import CACHE_DTYPES
from ..backends.paged_cache import CacheSpec, PagedKVCache
from ..generation.overflow import keep_after_overflow
from ..generation.params import SamplingParams
from ..reference.cache import KVCache
from ..reference.config import ModelConfig

DEFAULT_SINKS = SamplingParams().sink_tokens


def tokens_held(length: int, window: int, policy: str, sinks: int) -> NDArray[np.int64]:
    """How many tokens the cache holds when a text has 0, 1, ... `length` tokens.   -> (length + 1,)

    >>> tokens_held(9, 6, "sinks", 2).tolist()
    [0, 1, 2, 3, 4, 5, 6, 4, 5, 6]
    """
    held = np.zeros(length + 1, dtype=np.int64)
    for count in range(1, length + 1):
        held[count] = held[count - 1] + 1
        if held[count] > window:
            held[count] = sum(stop - start for start, stop in keep_after_overflow(count, window, policy, sinks))
    return held


def cache_memory(
    config: ModelConfig,
    tokens: Sequence[int],
    *,
    page_size: int = 16,
    window: int | None = None,
    sinks: int = DEFAULT_SINKS,
) -> dict[str, NDArray[np.int64]]:
    """Bytes after each of these numbers of tokens:

    "reserved": float32 for the whole context from the start, as a batch without pages needs.
    "float32", "float16", "int8": pages taken when they are needed, in that dtype, scales included.
    "sliding", "sinks": with `window`, float32 pages of the tokens that this `overflow` keeps.
    """
    counts, spec = np.asarray(tokens, dtype=np.int64), CacheSpec(1, page_size, page_size=page_size, pages=1)
    page = {name: PagedKVCache(config, spec, np.dtype(name)).nbytes for name in CACHE_DTYPES}
    pages = -(-counts // page_size)
    reserved = np.full_like(counts, KVCache(config, 1, config.context_length).nbytes)
    policies = {"reserved": reserved, **{name: pages * nbytes for name, nbytes in page.items()}}
    if window is not None:
        for policy in ("sliding", "sinks"):
            held = tokens_held(int(counts.max(initial=0)), window, policy, sinks)[counts]
            policies[policy] = -(-held // page_size) * page["float32"]
    return policies
