"""Passes as lists of kernel calls, recorded first and then played without Python between the calls.

A pass of 30 layers is some 200 kernel calls, and each costs Python microseconds (checks, result arrays, arguments): 5%
of 2B-4T's decoding step and more than half of a small model's. Between kernels that read a gigabyte it costs twenty
times as much, because nothing of it is left in the caches. So a pass is recorded on a tape, which then makes the calls.
The tape of a decoding step is kept: later steps of as many tokens play it. Everything that changes between steps
(embeddings, angles, positions, slots, the page table) is in arrays that are filled first; lengths follow from
positions.

The results of recorded calls are in a pool, whose buffers are reused as soon as their arrays are dropped, so every
layer uses the same few. Nothing is computed while calls are recorded, so a result of NumPy (of a matrix whose rows are
not contiguous, which it multiplies) is of numbers that are not there yet. Such a pass is noticed when it is recorded,
and computed without a tape. So is a pass that meets NaN or Inf, which then raises the error.

Measured, two threads of a Xeon (Sapphire Rapids, AMX), pairs in turn, against passes without a tape: 2B-4T's shape, 30
layers, prompts of 16 tokens 1.21 times as fast, of 64 1.18, of 512 1.06 to 1.10; with AVX-512 of 16 tokens 1.05 to
1.07, of 64 1.03 to 1.04. storyteller, 4 to 200 tokens, 1.13 to 1.17. SmolLM2-135M in Q4_1, 16 and 64 tokens, 1.11 and
1.0. The first step of one token, 0.9: once for a cache.
"""

from __future__ import annotations

import copy
import math
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from ...errors import NumericsError
from ...reference.cache import KVCache, TokenBatch
from ...reference.config import ModelConfig, RopeConfig
from ...reference.layers import Array, Floats, Ints
from ...reference.model import decoder_layers, embeddings, head_input
from ...reference.weights import DenseWeight, ModelWeights
from ..backend import Backend, Draws, GreedyRun, GreedySteps
from ..paged_cache import CacheSpec, PagedKVCache
from .extension import _cpu
from .kernels import CpuKernels, KernelView
from .memory import Pool
from .weights import embedding_table, view_bits

MAX_TOKENS = 64  # of a step whose tape is kept
MAX_STEPS = 8  # kept per cache, each for its own number of tokens
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
    ) -> Floats | None:
        """`final_hidden` of a batch, played.   -> (wanted, D)

        None: it must be computed without a tape: a pass that kernels alone do not compute, and one that met NaN or Inf.
        """
        n, is_kept = len(batch), len(batch) <= MAX_TOKENS and batch.wanted is None
        kind = n if is_kept else 0
        by_numpy = w.__dict__.setdefault("_by_numpy", set())  # the kinds that were recorded in vain
        if kind in by_numpy:
            return None
        cache.check_extent(batch)
        step = self._steps.pop(n, None) if is_kept else None
        if step is None or not step.is_of(be.kernels, w):
            pool = self._pool if is_kept else be.kernels.pool
            step = KernelStep(be.kernels, w, cfg, n, pool, batch.wanted)
            if not step.record(be, cfg, cache):
                by_numpy.add(kind)
                return None
        step.fill(batch, embeddings(be, w, cfg, batch.tokens), rope_rows.up_to(be, batch.extent[1], cfg))
        x = step.play(answers_signals=not is_kept and threading.current_thread() is threading.main_thread())
        if is_kept:
            self._steps[n] = step  # not if it raised: an unfinished tape is dropped
            if len(self._steps) > MAX_STEPS:
                self._steps.pop(next(iter(self._steps)))
        else:
            del step  # and with it the result's hold on its buffer
            be.kernels.pool.drop_free()
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

    def __init__(
        self, kernels: CpuKernels, w: ModelWeights, cfg: ModelConfig, n: int, pool: Pool, wanted: Ints | None = None
    ) -> None:
        self.weights, self.kernels = w, kernels
        tokens, positions, slots = np.zeros((3, n), dtype=np.int64)
        self._batch = TokenBatch(tokens, positions, slots, None if wanted is None else np.arange(n)[wanted])
        self._x = np.empty((n, cfg.hidden_size), dtype=np.float32)
        self._rope = np.empty((len(cfg.ropes), 2, n, cfg.rotary_size // 2), dtype=np.float32)
        self._pool, self._tape = pool, _cpu.Tape()
        self._result: Floats | None = None  # in the pool; None: not recorded, or it cannot be played
        self._head: Any = None  # _cpu.Tape, from the result to `_logits`; False: it cannot be played
        self._logits: Floats | None = None

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

    def record(self, be: KernelBackend, cfg: ModelConfig, cache: KVCache) -> bool:
        """Record the kernel calls of the step, without making them.   -> whether they can be played"""
        w = self.weights
        ropes = [(cos, sin) for cos, sin in self._rope]

        def compute(be: KernelBackend) -> Floats:
            x = decoder_layers(be, self._x, w.layers, cfg, ropes, self._batch, cache, self._batch.wanted)
            return head_input(be, w, cfg, x) if len(x) else x

        self._result = self._record(be, self._tape, compute)
        return self._result is not None

    def _record(self, be: KernelBackend, tape: Any, compute: Callable[[KernelBackend], Floats]) -> Floats | None:
        """Where the tape will leave what `compute` computes by kernels that it records; None where the tape alone does
        not compute it, from arrays that are filled before or that it computes."""
        can_play = True

        def look() -> None:
            """Before each new buffer, because it may take the place of an array from elsewhere that was freed."""
            nonlocal can_play
            memory: list[Array] = [*self._pool.buffers, self._x, self._rope, self._batch.slots, self._batch.positions]
            ranges = [(array.ctypes.data, array.ctypes.data + array.nbytes) for array in memory]
            can_play = can_play and bool(tape.lies_in(ranges))

        be = copy.copy(be)
        be.kernels = replace(self.kernels, results=self._pool, tape=tape)
        self._pool.before_growth = look
        try:
            with np.errstate(all="ignore"):  # NumPy's results are of numbers that are not there yet
                result = compute(be)
        except NumericsError:  # of such numbers; of others it comes again
            return None
        finally:
            self._pool.before_growth = None
        look()
        return result if can_play and any(result.base is buffer for buffer in self._pool.buffers) else None

    def play(self, answers_signals: bool = False) -> Floats | None:
        """Make the recorded calls.   -> (wanted, D), or None where there are none or one met NaN or Inf"""
        return self._result.copy() if self._result is not None and self._tape.play(answers_signals) else None

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
        self.kernel_layers = {layer: _kernel_layer(self, row) for layer, row in self.row_of.items()}
        self.steps = RecordedSteps()

    def _empty(self, shape: tuple[int, ...], dtype: np.dtype) -> Array:
        """(rows, pages, page_size, G, ...), in memory (rows, G, pages, page_size, ...): a head's rows are adjacent."""
        rows, pages, page_size, heads, *rest = shape
        return np.moveaxis(np.empty((rows, heads, pages, page_size, *rest), dtype=dtype), 1, 3)


def view_layer(cache: KVCache, layer: int) -> KernelView:
    """One layer of any cache as the kernels take it. A contiguous cache has one page per slot."""
    if isinstance(cache, KernelKVCache):
        return KernelView(cache.kernel_layers[layer], cache.page_table)
    if isinstance(cache, PagedKVCache):
        return KernelView(_kernel_layer(cache, cache.row_of[layer]), cache.page_table)
    layer_arrays = _cpu.KVLayer(cache.keys[layer], cache.values[layer])
    return KernelView(layer_arrays, np.arange(cache.slots, dtype=np.int32)[:, None])


def _kernel_layer(cache: PagedKVCache, row: int) -> Any:
    if 0 in cache.keys.shape:
        return None  # a cache without capacity: nothing is appended to it
    keys, values = cache.keys[row], cache.values[row]
    if cache.dtype == np.float16:  # as the uint16 that Cython takes
        keys, values = keys.view(np.uint16), values.view(np.uint16)
    if cache.key_scales is None or cache.value_scales is None:
        return _cpu.KVLayer(keys, values)
    return _cpu.KVLayer(keys, values, cache.key_scales[row], cache.value_scales[row])
