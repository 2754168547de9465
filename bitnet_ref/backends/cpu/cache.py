"""The KV cache that the CPU kernels append to and read."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...reference.cache import KVCache
from ...reference.config import ModelConfig
from ..paged_cache import CacheSpec, PagedKVCache
from .extension import _cpu
from .kernels import KernelView
from .replay import RecordedSteps


class KernelKVCache(PagedKVCache):
    """A paged cache, its layers as objects of the extension, and the decoding steps that were recorded over it."""

    def __init__(self, config: ModelConfig, spec: CacheSpec, dtype: np.dtype) -> None:
        super().__init__(config, spec, dtype)
        self.kernel_layers = [_kernel_layer(self, layer) for layer in range(self.layers)]
        self.steps = RecordedSteps()


def view_layer(cache: KVCache, layer: int) -> KernelView:
    """One layer of any cache as the kernels take it. A contiguous cache has one page per slot."""
    if isinstance(cache, KernelKVCache):
        return KernelView(cache.kernel_layers[layer], cache.page_table)
    if isinstance(cache, PagedKVCache):
        return KernelView(_kernel_layer(cache, layer), cache.page_table)
    layer_arrays = _cpu.KVLayer(cache.keys[layer], cache.values[layer])
    return KernelView(layer_arrays, np.arange(cache.slots, dtype=np.int32)[:, None])


def _kernel_layer(cache: PagedKVCache, layer: int) -> Any:
    if 0 in cache.keys.shape:
        return None  # a cache without capacity: nothing is appended to it
    keys, values = cache.keys[layer], cache.values[layer]
    if cache.dtype == np.float16:  # as the uint16 that Cython takes
        keys, values = keys.view(np.uint16), values.view(np.uint16)
    if cache.key_scales is None or cache.value_scales is None:
        return _cpu.KVLayer(keys, values)
    return _cpu.KVLayer(keys, values, cache.key_scales[layer], cache.value_scales[layer])
