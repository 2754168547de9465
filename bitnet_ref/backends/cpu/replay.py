"""Decoding steps as lists of kernel calls, recorded once and replayed without Python between the calls.

A step of 30 layers is some 200 kernel calls, and each costs Python microseconds (checks, result arrays, arguments): 5%
of 2B-4T's step and more than half of a small model's. So the second time that a cache sees a number of tokens, the step
records its calls on a tape; later steps play the tape. Everything that changes between steps (embeddings, angles,
positions, slots, the page table) is in arrays that are filled first; lengths follow from positions.

The results of recorded steps are in a pool, whose buffers are reused as soon as the text drops their arrays, so every
layer uses the same few. A result from elsewhere (of a matrix whose rows are not contiguous, which NumPy multiplies)
would be stale when the tape is played; such a step is detected when it is recorded, and not replayed. A replayed step
that meets NaN or Inf is computed again without the tape, which raises the error.
"""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from ...reference.cache import KVCache, TokenBatch
from ...reference.config import ModelConfig, RopeConfig
from ...reference.model import RopeTables, decoder_layers, embeddings, head_input
from ...reference.weights import ModelWeights
from ..backend import Backend
from ..paged_cache import CacheSpec, PagedKVCache
from .extension import _cpu
from .kernels import CpuKernels, KernelView
from .memory import Pool

MAX_TOKENS = 64  # per recorded step
MAX_STEPS = 8  # recorded per cache, each for its own number of tokens
MIN_ROPE_ROWS = 256  # positions whose cos and sin are looked up instead of computed


class KernelBackend(Backend):
    """A backend whose blocks and ops make kernel calls."""

    kernels: CpuKernels

    def _with_kernels(self, kernels: CpuKernels) -> Self:
        """A copy that computes with these kernels."""
        be = copy.copy(self)
        be.kernels = kernels
        return be


class RopeRows:
    """cos and sin of every position so far, to look up a step's rows. Shared by all steps of a backend."""

    def __init__(self) -> None:
        self._tables: dict[tuple[RopeConfig, int], RopeTables] = {}

    def look_up(self, be: Backend, positions: NDArray[np.int64], rope: RopeConfig, head_dim: int) -> RopeTables:
        """`be.rope_tables` of the positions.   (N,) -> cos, sin (N, d/2)"""
        cos, sin = self._tables.get((rope, head_dim), (np.empty(0), np.empty(0)))
        if (last := int(positions.max())) >= len(cos):
            all_positions = np.arange(max(MIN_ROPE_ROWS, 1 << (last + 1).bit_length()))
            cos, sin = self._tables[rope, head_dim] = be.rope_tables(all_positions, rope, head_dim)
        return cos[positions], sin[positions]


class RecordedSteps:
    """The recorded steps of one cache, by their number of tokens. They run one after another and share their pool."""

    def __init__(self) -> None:
        self._seen: set[int] = set()
        self._steps: dict[int, KernelStep] = {}  # the last used last
        self._pool = Pool(math.inf)

    def hidden(
        self,
        be: KernelBackend,
        rope_rows: RopeRows,
        w: ModelWeights,
        cfg: ModelConfig,
        batch: TokenBatch,
        cache: KVCache,
        at_once: bool,
    ) -> NDArray | None:
        """`final_hidden` of a batch whose tokens are all wanted, replayed or recorded.   -> (N, D)

        None: it must be computed without a tape: the first batch of a size (unless `at_once`), a step that cannot be
        replayed, and one that met NaN or Inf.
        """
        n = len(batch)
        if n not in self._seen and not at_once:
            self._seen.add(n)
            return None
        step = self._steps.pop(n, None)
        if step is None or step.weights is not w or step.kernels != be.kernels:
            step = KernelStep(be.kernels, w, cfg, n, self._pool)
        ropes = (cfg.rope, cfg.rope_of_sliding)
        tables = [rope_rows.look_up(be, batch.positions, rope, cfg.rotary_size) for rope in dict.fromkeys(ropes)]
        step.fill(batch, embeddings(be, w, cfg, batch.tokens), tables)
        cache.check_extent(batch)
        x = step.play() if step.is_recorded else step.record(be, cfg, cache)
        self._steps[n] = step  # not if it raised: an unfinished tape is dropped
        if len(self._steps) > MAX_STEPS:
            self._steps.pop(next(iter(self._steps)))
        return x


class KernelStep:
    """The pass of n tokens over one cache: its inputs, its tape and its result."""

    def __init__(self, kernels: CpuKernels, w: ModelWeights, cfg: ModelConfig, n: int, pool: Pool) -> None:
        self.weights, self.kernels = w, kernels
        tokens, positions, slots = np.zeros((3, n), dtype=np.int64)
        self._batch = TokenBatch(tokens, positions, slots)
        self._x = np.empty((n, cfg.hidden_size), dtype=np.float32)
        self._rope = np.empty((1 if cfg.local_rope is None else 2, 2, n, cfg.rotary_size // 2), dtype=np.float32)
        self._pool, self._tape = pool, _cpu.Tape()
        self._result: NDArray | None = None  # in the pool; None: not recorded, or it cannot be replayed
        self.is_recorded = False

    def fill(self, batch: TokenBatch, x: NDArray, tables: list[RopeTables]) -> None:
        """Set everything that changes from step to step. x (n, D): the embeddings."""
        self._batch.tokens[:] = batch.tokens
        self._batch.positions[:], self._batch.slots[:] = batch.positions, batch.slots
        self._x[:], self._rope[:] = x, tables

    def record(self, be: KernelBackend, cfg: ModelConfig, cache: KVCache) -> NDArray | None:
        """Compute the step and record its kernel calls.   -> (n, D), or None where it cannot be replayed"""
        self.is_recorded, w = True, self.weights
        be = be._with_kernels(replace(self.kernels, results=self._pool, tape=self._tape))
        (cos, sin), (local_cos, local_sin) = self._rope[0], self._rope[-1]
        x = decoder_layers(be, self._x, w.layers, cfg, ((cos, sin), (local_cos, local_sin)), self._batch, cache)
        result = head_input(be, w, cfg, x)
        memory: list[NDArray] = [*self._pool.buffers, self._x, self._rope, self._batch.slots, self._batch.positions]
        ranges = [(array.ctypes.data, array.ctypes.data + array.nbytes) for array in memory]
        is_from_kernels = any(result.base is buffer for buffer in self._pool.buffers)
        if not (is_from_kernels and self._tape.lies_in(ranges)):
            return None
        self._result = result
        return result.copy()

    def play(self) -> NDArray | None:
        """Replay the recorded calls.   -> (n, D), or None where there are none or one met NaN or Inf"""
        return self._result.copy() if self._result is not None and self._tape.play() else None


# -- the cache, which holds the steps that were recorded over it -------------------------------------------------------


class KernelKVCache(PagedKVCache):
    """A paged cache, its layers as objects of the extension, and the decoding steps that were recorded over it."""

    def __init__(self, config: ModelConfig, spec: CacheSpec, dtype: np.dtype) -> None:
        super().__init__(config, spec, dtype)
        self.kernel_layers = [_kernel_layer(self, layer) for layer in range(self.layers)]
        self.steps = RecordedSteps()

    def _empty(self, shape: tuple[int, ...], dtype: np.dtype) -> NDArray:
        """(L, pages, page_size, G, ...), in memory (L, G, pages, page_size, ...): a head's rows are adjacent."""
        layers, pages, page_size, heads, *rest = shape
        return np.moveaxis(np.empty((layers, heads, pages, page_size, *rest), dtype=dtype), 1, 3)


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
