"""The cache of an engine; and the bytes of it that one sequence holds, by cache dtype and overflow policy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from ..backends.loaded import LoadedModel
from ..backends.paged_cache import CACHE_DTYPES, CacheSpec, PagedKVCache
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
    page = {name: PagedKVCache(config, spec, np.dtype(name)).bytes_per_token * page_size for name in CACHE_DTYPES}
    pages = -(-counts // page_size)
    reserved = np.full_like(counts, page["float32"] // page_size * config.context_length)
    policies = {"reserved": reserved, **{name: pages * nbytes for name, nbytes in page.items()}}
    if window is not None:
        for policy in ("sliding", "sinks"):
            held = tokens_held(int(counts.max(initial=0)), window, policy, sinks)[counts]
            policies[policy] = -(-held // page_size) * page["float32"]
    return policies


def new_cache(model: LoadedModel, config: EngineConfig) -> PagedKVCache:
    """The pool of pages that the config asks for, or that fits into memory. Raises ConfigError, OutOfMemory."""
    size, context = config.page_size, model.config.context_length
    page_bytes, state_bytes = sizes = _sizes(model, config)
    limit, slots = _memory_left(model, config), config.max_batch
    if config.cache_tokens is None and config.cache_bytes is None:
        context = min(context, LONG_CONTEXT)
    room = config.cache_bytes or _default_bytes(model, config, sizes)
    if config.cache_tokens is not None:
        pages = -(-config.cache_tokens // size)
        if state_bytes:
            room = room if limit is None else min(room, limit - pages * page_bytes)
            slots = max(1, min(slots, room // state_bytes))
    else:
        if state_bytes:  # fewer sequences, where otherwise states would take more than half of the room
            whole = -(-context // size) * page_bytes + state_bytes
            slots = max(1, min(slots, max(room // whole, room // 2 // state_bytes)))
        pages = max(0, room - slots * state_bytes) // page_bytes
    if pages < 1 or (limit is not None and pages * page_bytes + slots * state_bytes > limit):
        held = f"{page_bytes:,} bytes each"
        held += f", and states of {state_bytes:,} bytes a sequence" if state_bytes else ""
        left = "" if limit is None else f", and memory_limit leaves {limit:,} for the cache"
        raise ConfigError(
            f"the cache would have {pages} pages of {size} tokens, {held}{left}; give it fewer tokens, or more memory",
            field="cache_bytes" if config.cache_bytes is not None else "memory_limit",
        )
    # They size the page table, and a card's tables of positions. A sequence holds at least one page and at most all.
    slots, capacity = min(slots, pages), min(context, pages * size)
    cache = model.new_cache(slots, capacity, dtype=config.cache_dtype, page_size=size, pages=pages)
    assert isinstance(cache, PagedKVCache)
    return cache


def _default_bytes(
    model: LoadedModel, config: EngineConfig, sizes: tuple[int, int], room: int | None = None, count: int = 1
) -> int:
    """Bytes of each of `count` caches where the config does not say: for max_batch whole contexts, at most its share of
    a quarter of the free memory and of what memory_limit leaves, and at least one page of one sequence.

    sizes: as `_sizes` gives them. room: what the weights and all caches may hold, of which the caches take at most a
    quarter.
    """
    page_bytes, state_bytes = sizes
    pages = -(-min(model.config.context_length, LONG_CONTEXT) // config.page_size)
    free, limit = model.backend.memory()[1], _memory_left(model, config)
    bounds = [None if free is None else free // CACHE_SHARE, limit]
    if room is not None:
        bounds += [room // CACHE_SHARE, room - model.weights.nbytes]
    wanted = config.max_batch * (pages * page_bytes + state_bytes)
    return max(page_bytes + state_bytes, min([wanted, *(each // count for each in bounds if each is not None)]))


def share_memory(model: LoadedModel, config: EngineConfig, room: int | None, count: int) -> EngineConfig:
    """The config of each of `count` engines of one memory. room: what their weights and caches may hold."""
    if (count == 1 and room is None) or config.cache_tokens is not None or config.cache_bytes is not None:
        return config
    return replace(config, cache_bytes=_default_bytes(model, config, _sizes(model, config), room, count))


def _sizes(model: LoadedModel, config: EngineConfig) -> tuple[int, int]:
    """Bytes of a page, and of what a sequence has beside its pages."""
    cache = model.new_cache(1, config.page_size, dtype=config.cache_dtype, page_size=config.page_size)
    return cache.nbytes - cache.state_bytes, cache.state_bytes


def _memory_left(model: LoadedModel, config: EngineConfig) -> int | None:
    """What `memory_limit` leaves for caches; None: there is no limit."""
    if config.memory_limit is None:
        return None
    held, free = model.backend.memory()
    if held is None and free is not None:  # several memories: `free` respects the limit already
        return free
    return max(0, config.memory_limit - (held or 0))


def new_pool(cache: PagedKVCache, config: EngineConfig) -> PagePool:
    """The pages of an empty cache."""
    return PagePool(cache.pages, cache.page_size, config.prefix_sharing, complete=not cache.has_states)
