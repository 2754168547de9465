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
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from ...reference.cache import KVCache, TokenBatch
from ...reference.config import ModelConfig, RopeConfig
from ...reference.layers import Array, Floats
from ...reference.model import decoder_layers, embeddings, head_input
from ...reference.weights import DenseWeight, ModelWeights
from ..backend import Backend, Draws, GreedyRun, GreedySteps
from ..paged_cache import CacheSpec, PagedKVCache
from .extension import _cpu
from .kernels import CpuKernels, KernelView
from .memory import Pool
from .weights import embedding_table, view_bits

MAX_TOKENS = 64  # per recorded step
MAX_STEPS = 8  # recorded per cache, each for its own number of tokens
NO_DRAWS = Draws(np.empty((0, 4), dtype=np.float64), np.empty((0, 0), dtype=np.float64))
MIN_ROPE_ROWS = 256  # positions whose cos and sin are looked up instead of computed


class KernelBackend(Backend):
    """A backend whose blocks and ops make kernel calls."""

    kernels: CpuKernels


class RopeRows:
    """cos and sin of every position so far, to look up a step's rows. Shared by all steps of a backend."""

    def __init__(self) -> None:
        self._tables: dict[tuple[RopeConfig, int], Floats] = {}
        self._last: tuple[ModelConfig | None, int, list[Floats]] = None, 0, []  # what `up_to` returned, and its length

    def up_to(self, be: Backend, last: int, cfg: ModelConfig) -> list[Floats]:
        """`be.rope_tables` of positions 0 to at least `last`: of the model's RoPE, and of its sliding layers' if that
        is another one.   -> (2, T, d/2) each, cos and sin"""
        of, length, tables = self._last
        if of is cfg and last < length:
            return tables
        tables = []
        for rope in cfg.ropes:
            table = self._tables.get((rope, cfg.rotary_size))
            if table is None or table.shape[1] <= last:
                positions = np.arange(max(MIN_ROPE_ROWS, 1 << (last + 1).bit_length()))
                table = np.stack(be.rope_tables(positions, rope, cfg.rotary_size))
                self._tables[rope, cfg.rotary_size] = table
            tables.append(table)
        self._last = cfg, min(table.shape[1] for table in tables), tables
        return tables


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
    ) -> Floats | None:
        """`final_hidden` of a batch whose tokens are all wanted, replayed or recorded.   -> (N, D)

        None: it must be computed without a tape: the first batch of a size (unless `at_once`), a step that cannot be
        replayed, and one that met NaN or Inf.
        """
        n = len(batch)
        if n not in self._seen and not at_once:
            self._seen.add(n)
            return None
        step = self._steps.pop(n, None)
        if step is None or not step.is_of(be.kernels, w):
            step = KernelStep(be.kernels, w, cfg, n, self._pool)
        step.fill(batch, embeddings(be, w, cfg, batch.tokens), rope_rows.up_to(be, batch.extent[1], cfg))
        cache.check_extent(batch)
        x = step.play() if step.is_recorded else step.record(be, cfg, cache)
        self._steps[n] = step  # not if it raised: an unfinished tape is dropped
        if len(self._steps) > MAX_STEPS:
            self._steps.pop(next(iter(self._steps)))
        return x

    def greedy(
        self,
        be: KernelBackend,
        rope_rows: RopeRows,
        w: ModelWeights,
        cfg: ModelConfig,
        batch: TokenBatch,
        cache: KVCache,
        run: GreedyRun,
    ) -> GreedySteps | None:
        """`Backend.greedy_steps`, of a step that can be replayed; else None."""
        step, table = self._steps.get(len(batch)), embedding_table(w)
        if step is None or table is None or not step.is_of(be.kernels, w) or not step.record_head(be):
            return None
        self._steps[len(batch)] = self._steps.pop(len(batch))
        last = TokenBatch(batch.tokens, batch.positions + (np.minimum(run.steps, run.left) - 1), batch.slots)
        cache.check_extent(last)
        tables = rope_rows.up_to(be, batch.extent[1] + run.steps, cfg)
        step.fill(batch, embeddings(be, w, cfg, batch.tokens), tables)
        return step.play_greedy(cfg, table, tables, run)


class KernelStep:
    """The pass of n tokens over one cache: its inputs, its tape and its result."""

    def __init__(self, kernels: CpuKernels, w: ModelWeights, cfg: ModelConfig, n: int, pool: Pool) -> None:
        self.weights, self.kernels = w, kernels
        tokens, positions, slots = np.zeros((3, n), dtype=np.int64)
        self._batch = TokenBatch(tokens, positions, slots)
        self._x = np.empty((n, cfg.hidden_size), dtype=np.float32)
        self._rope = np.empty((len(cfg.ropes), 2, n, cfg.rotary_size // 2), dtype=np.float32)
        self._pool, self._tape = pool, _cpu.Tape()
        self._result: Floats | None = None  # in the pool; None: not recorded, or it cannot be replayed
        self._head: Any = None  # _cpu.Tape, from the result to `_logits`; False: it cannot be replayed
        self._logits: Floats | None = None
        self.is_recorded = False

    def is_of(self, kernels: CpuKernels, w: ModelWeights) -> bool:
        """Whether it computes with these."""
        return self.weights is w and self.kernels == kernels

    def fill(self, batch: TokenBatch, x: Floats, tables: list[Floats]) -> None:
        """Set everything that changes from step to step. x (n, D): the embeddings. tables: as of `RopeRows.up_to`."""
        self._batch.tokens[:] = batch.tokens
        self._batch.positions[:], self._batch.slots[:] = batch.positions, batch.slots
        self._x[:] = x
        for rows, table in zip(self._rope, tables, strict=True):
            rows[:] = table[:, batch.positions]

    def record(self, be: KernelBackend, cfg: ModelConfig, cache: KVCache) -> Floats | None:
        """Compute the step and record its kernel calls.   -> (n, D), or None where it cannot be replayed"""
        self.is_recorded, w = True, self.weights
        ropes = [(cos, sin) for cos, sin in self._rope]

        def compute(be: KernelBackend) -> Floats:
            x = decoder_layers(be, self._x, w.layers, cfg, ropes, self._batch, cache)
            return head_input(be, w, cfg, x)

        self._result = self._record(be, self._tape, compute)
        return None if self._result is None else self._result.copy()

    def _record(self, be: KernelBackend, tape: Any, compute: Callable[[KernelBackend], Floats]) -> Floats | None:
        """What `compute` computes by kernels that the tape records; None where the tape alone does not compute it, from
        arrays that later steps fill or compute again."""
        can_replay = True

        def look() -> None:
            """Before each new buffer, because it may take the place of an array from elsewhere that was freed."""
            nonlocal can_replay
            memory: list[Array] = [*self._pool.buffers, self._x, self._rope, self._batch.slots, self._batch.positions]
            ranges = [(array.ctypes.data, array.ctypes.data + array.nbytes) for array in memory]
            can_replay = can_replay and bool(tape.lies_in(ranges))

        be = copy.copy(be)
        be.kernels = replace(self.kernels, results=self._pool, tape=tape)
        self._pool.before_growth = look
        try:
            result = compute(be)
        finally:
            self._pool.before_growth = None
        look()
        return result if can_replay and any(result.base is buffer for buffer in self._pool.buffers) else None

    def play(self) -> Floats | None:
        """Replay the recorded calls.   -> (n, D), or None where there are none or one met NaN or Inf"""
        return self._result.copy() if self._result is not None and self._tape.play() else None

    def record_head(self, be: KernelBackend) -> bool:
        """Whether the step and the head after it can be played together. Records the head the first time."""
        if self._head is None and self._result is not None:
            tape, self._head, x = _cpu.Tape(), False, self._result
            self._logits = self._record(be, tape, lambda be: be.lm_head(x, self.weights.lm_head))
            if self._logits is not None:
                self._head = tape
        return bool(self._head)

    def play_greedy(
        self, cfg: ModelConfig, embedding: DenseWeight, tables: list[Floats], run: GreedyRun
    ) -> GreedySteps:
        """Play the step and the head again and again. tables: of RoPE."""
        n, size = self._x.shape
        tokens, values = np.empty((run.steps, n), dtype=np.int64), np.empty((run.steps, n), dtype=np.float32)
        states = np.empty((run.steps, n, size), dtype=np.float32)
        draws = NO_DRAWS if run.draws is None else run.draws
        count = _cpu.greedy_steps(
            *(self._tape, self._head, view_bits(embedding.stored), cfg.embedding_scale),
            *(self._x, self._batch.positions, self._rope, tables[0], tables[-1], self._result, self._logits),
            *(run.left, run.ends, run.bell, tokens, values, states, draws.rules, draws.uniforms),
            *(self.kernels.threads, self.kernels.kernel_set),
        )
        return GreedySteps(tokens[:count], values[:count], states[:count])


# -- the cache, which holds the steps that were recorded over it -------------------------------------------------------


class KernelKVCache(PagedKVCache):
    """A paged cache, its layers as objects of the extension, and the decoding steps that were recorded over it."""

    def __init__(self, config: ModelConfig, spec: CacheSpec, dtype: np.dtype) -> None:
        super().__init__(config, spec, dtype)
        self.kernel_layers = [_kernel_layer(self, layer) for layer in range(self.layers)]
        self.steps = RecordedSteps()

    def _empty(self, shape: tuple[int, ...], dtype: np.dtype) -> Array:
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
