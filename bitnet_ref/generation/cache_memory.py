"""How many bytes one sequence holds of a KV cache, by how the cache is kept."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ..config import ModelConfig
from ..kv_cache import KVCache
from ..kv_dtypes import CACHE_DTYPES


def cache_memory(
    config: ModelConfig, tokens: Sequence[int], *, page_size: int = 16, window: int | None = None
) -> dict[str, NDArray[np.int64]]:
    """Bytes after so many tokens, for each policy:

    "reserved": float32 for the whole context from the beginning, as a batch without pages must.
    "float32", "float16", "int8": pages as they are needed, in that dtype.
    "float32, the last W": with `window`, only the pages of the last W tokens.

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
        first = np.maximum(0, counts - window) // page_size  # the page of the first token that is still seen
        policies[f"float32, the last {window}"] = (pages - first) * page["float32"]
    return policies
