"""The cache of an engine; and the bytes of it that one sequence holds, by cache dtype and overflow policy."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ..backends.loaded import LoadedModel
from ..backends.paged_cache import CACHE_DTYPES, CacheSpec, EngineKVCache, PagedKVCache
from ..errors import ConfigError
from ..generation.overflow import keep_after_overflow
from ..generation.params import SamplingParams
from ..reference.config import ModelConfig
from .engine_config import EngineConfig
from .pages import PagePool

CACHE_SHARE = 4  # the default cache takes at most 1/4 of the free memory
LONG_CONTEXT = 1 << 17  # tokens of a request in the default cache, for models whose config claims more
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
    reserved = np.full_like(counts, EngineKVCache(config, 1, 1).nbytes * config.context_length)
    policies = {"reserved": reserved, **{name: pages * nbytes for name, nbytes in page.items()}}
    if window is not None:
        for policy in ("sliding", "sinks"):
            held = tokens_held(int(counts.max(initial=0)), window, policy, sinks)[counts]
            policies[policy] = -(-held // page_size) * page["float32"]
    return policies


def new_cache(model: LoadedModel, config: EngineConfig) -> PagedKVCache:
    """The pool of pages that the config asks for, or that fits into memory. Raises ConfigError, OutOfMemory."""
    size, context, dtype = config.page_size, model.config.context_length, config.cache_dtype
    page_bytes = model.new_cache(1, size, dtype=dtype, page_size=size).nbytes
    held, free = model.backend.memory()
    limit = None if config.memory_limit is None else max(0, config.memory_limit - (held or 0))
    if limit is not None and held is None and free is not None:  # several memories: `free` respects the limit already
        limit = free
    if config.cache_tokens is not None:
        pages = -(-config.cache_tokens // size)
    elif config.cache_bytes is not None:
        pages = config.cache_bytes // page_bytes
    else:
        share = None if free is None else free // CACHE_SHARE // page_bytes
        context = min(context, LONG_CONTEXT)
        wanted = config.max_batch * -(-context // size)
        pages = max(1, min(each for each in (wanted, share, limit and limit // page_bytes) if each is not None))
    if pages < 1 or (limit is not None and pages * page_bytes > limit):
        room = "" if limit is None else f", and memory_limit leaves {limit:,} for the cache"
        raise ConfigError(
            f"the cache would have {pages} pages of {size} tokens, {page_bytes:,} bytes each{room}; "
            "give it fewer tokens, or more memory",
            field="cache_bytes" if config.cache_bytes is not None else "memory_limit",
        )
    # They size the page table, and a card's tables of positions. A sequence holds at least one page and at most all.
    slots, capacity = min(config.max_batch, pages), min(context, pages * size)
    cache = model.new_cache(slots, capacity, dtype=dtype, page_size=size, pages=pages)
    assert isinstance(cache, PagedKVCache)
    return cache


def new_pool(cache: PagedKVCache, config: EngineConfig) -> PagePool:
    """The pages of an empty cache."""
    return PagePool(cache.pages, cache.page_size, config.prefix_sharing, complete=not cache.has_states)
