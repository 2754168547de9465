"""A decoding step of the compiled backend as one list of kernel calls, recorded from the model's own text.

A step of 30 layers is 420 operations, and from Python each costs some 8 us before its kernel begins: checks, arrays for
results, arguments. That is 5% of 2B-4T's step, and more than half of a small model's. So when a cache sees the same
number of tokens a second time, the step runs as it is, and its kernels leave their calls on a `Tape`; from then on the
tape is played. What changes between steps (embeddings, angles, positions, slots, the page table) lies in arrays that
are filled before; lengths follow from positions.

The results of a recorded step lie in memory of its own, which is used again as soon as the model's text lets go of what
was in it: so every layer runs over the same few arrays. Whatever did not come from there (a product with float16
weights, which is NumPy's) would be old when the tape is played; such a step is found out when it is recorded, and never
played. A step in which something goes wrong is computed again without the tape, which then says what it was.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray

from ...reference.cache import KVCache, TokenBatch
from ...reference.config import ModelConfig, RopeConfig
from ...reference.weights import DenseWeight, ModelWeights
from .buffers import Pool
from .fused_pass import Compute, FusedPass, copy_as, run_fused

if TYPE_CHECKING:
    from .backend import CythonBackend

MOST_RECORDED = 64  # tokens of a step
STEPS_KEPT = 8  # of a cache: as many numbers of tokens
LEAST_ROPE_ROWS = 256  # positions whose cos and sin are looked up, not computed


class Steps:
    """The recorded steps of a cache, by their number of tokens. They run in turn, and share the memory of results."""

    def __init__(self, new_tape: Callable[[], Any]) -> None:
        self._new_tape = new_tape
        self._seen: set[int] = set()
        self._kept: dict[int, RecordedStep] = {}  # the last used last
        self._results = Pool(math.inf)

    def run(
        self, be: CythonBackend, compute: Compute, w: ModelWeights, cfg: ModelConfig, batch: TokenBatch, cache: KVCache
    ) -> NDArray:
        """compute(be, w, cfg, batch, cache) of a batch all of whose tokens are wanted.   -> (N, D)"""
        of, n = (be, compute, w, cfg, cache.keys, cache.values, cache.page_table), len(batch)
        if n not in self._seen:
            self._seen.add(n)
            return run_fused(be, compute, w, cfg, batch, cache)
        step = self._kept.pop(n, None)
        if step is None or any(mine is not theirs for mine, theirs in zip(step.of, of, strict=True)):
            step = RecordedStep(of, self._new_tape(), self._results)
        self._kept[n] = step
        if len(self._kept) > STEPS_KEPT:
            self._kept.pop(next(iter(self._kept)))
        x = step(batch, cache)
        return compute(be, w, cfg, batch, cache) if x is None else x


class RecordedStep:
    """The pass of some number of tokens over one cache. The first call records it."""

    def __init__(self, of: tuple[Any, ...], tape: Any, results: Pool) -> None:
        """of: what it is a step of, the backend, the function, its arguments and the cache's arrays."""
        self.of, self._tape, self._results = of, tape, results
        self._recorder: _Recording | None = None
        self._result: NDArray | None = None
        self.can_be_played: bool | None = None  # None: not known yet

    def __call__(self, batch: TokenBatch, cache: KVCache) -> NDArray | None:
        """-> (n, D), or None where something went wrong, or the step cannot be recorded"""
        if self.can_be_played is None:
            return self._record(batch, cache)
        if self._recorder is None or self._result is None:
            return None
        cache.check_extent(batch)
        self._recorder.fill(batch)
        return self._result.copy() if self._tape.play() else None

    def _record(self, batch: TokenBatch, cache: KVCache) -> NDArray | None:
        be, compute, w, cfg, *_ = self.of
        self._tape.clear()
        recorder = copy_as(_Recording, be)
        recorder.begin(self._tape, self._results, cfg, len(batch))
        recorder.fill(batch)
        result = recorder.value(compute(recorder, w, cfg, batch, cache))
        self.can_be_played = recorder.is_whole(result)
        if not self.can_be_played:
            return None
        self._recorder, self._result = recorder, result
        return result.copy()


class _Recording(FusedPass):
    """What a backend does otherwise while it records."""

    rope_rows: dict[tuple[RopeConfig, int], tuple[NDArray, NDArray]]

    def begin(self, tape: Any, results: Pool, cfg: ModelConfig, n: int) -> None:
        self.tape, self.results = tape, results
        tokens, positions, slots = np.zeros((3, n), dtype=np.int64)
        self._batch = super().place(TokenBatch(tokens, positions, slots))
        self._x = np.empty((n, cfg.hidden_size), dtype=np.float32)
        self._cos, self._sin = (np.empty((n, cfg.head_dim // 2), dtype=np.float32) for _ in range(2))
        self._table: DenseWeight | None = None
        self._rope: tuple[RopeConfig, int] | None = None

    def fill(self, batch: TokenBatch) -> None:
        """All that changes from step to step."""
        mine = self._batch
        mine.tokens[:], mine.positions[:], mine.slots[:] = batch.tokens, batch.positions, batch.slots
        if self._table is not None and self._rope is not None:
            self.embed(self._table, mine.tokens)
            self.rope_tables(mine.positions, *self._rope)

    def is_whole(self, result: NDArray) -> bool:
        """Whether kernels on the tape have computed the result, and everything that they read."""
        kept = cast("Pool", self.results).kept
        inputs = self._x, self._cos, self._sin, self._batch.slots, self._batch.positions
        computed = any(result.base is memory for memory in kept)
        return computed and self.tape.lies_in([*kept, *inputs])

    def place(self, batch: TokenBatch) -> TokenBatch:
        return self._batch

    def embed(self, w: DenseWeight, tokens: NDArray[np.int64]) -> NDArray:
        self._table = w
        self._x[:] = super().embed(w, tokens)
        return self._x

    def rope_tables(self, positions: NDArray[np.int64], rope: RopeConfig, head_dim: int) -> tuple[NDArray, NDArray]:
        self._rope = rope, head_dim
        cos, sin = self.rope_rows.get(self._rope, (self._cos[:0], self._sin[:0]))
        if (last := int(positions.max())) >= len(cos):
            every = np.arange(max(LEAST_ROPE_ROWS, 1 << (last + 1).bit_length()))
            cos, sin = self.rope_rows[self._rope] = super().rope_tables(every, rope, head_dim)
        self._cos[:], self._sin[:] = cos[positions], sin[positions]
        return self._cos, self._sin
