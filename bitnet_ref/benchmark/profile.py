"""A backend that adds up the time of each operation of another, and so shows what the Python around them costs."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from typing import Any

from numpy.typing import NDArray

from ..backends import Backend, ScreenedHead
from ..config import ModelConfig
from ..kv_cache import KVCache, TokenBatch
from ..weights import LinearWeight, ModelWeights

OPS = (
    *("embed", "rms_norm", "rope_tables", "rope", "quantize_activations", "ternary_matmul", "dequantize"),
    *("dense_matmul", "attention_scores", "softmax", "attention_values", "gated", "linear", "linears"),
    *("add", "take_rows", "attention", "lm_head", "head_candidates"),
)
_OF_ONE_WEIGHT = ("linear", "lm_head", "head_candidates", "dense_matmul")


@dataclass
class OpTime:
    """What one operation took in all. `nbytes` counts the weights it read; 0 where it reads none to speak of."""

    op: str  # "linears gate_proj up_proj"
    calls: int = 0
    total_s: float = 0.0
    nbytes: int = 0

    @property
    def gb_per_s(self) -> float | None:
        return self.nbytes / self.total_s / 1e9 if self.nbytes and self.total_s else None

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "gb_per_s": self.gb_per_s}


class ProfiledBackend(Backend):
    """Passes every operation on and adds up its time, in `ops`. Linears are told apart by their names in a block.

    The time of an operation holds its Python too: argument checks and the allocation of results.
    """

    def __init__(self, inner: Backend, weights: ModelWeights) -> None:
        self.inner = inner
        self.name, self.dtype, self.threads = inner.name, inner.dtype, inner.threads
        self.ops: dict[str, OpTime] = {}
        self._names = {id(weight): name.rpartition(".")[2] for name, weight in weights.linears()}

    def prepare(self, w: LinearWeight) -> LinearWeight:
        return self.inner.prepare(w)

    def prepare_model(self, w: ModelWeights) -> ModelWeights:
        return self.inner.prepare_model(w)

    def running(self) -> AbstractContextManager[None]:
        return self.inner.running()

    def place(self, batch: TokenBatch) -> TokenBatch:
        return self.inner.place(batch)

    def to_host(self, array: NDArray) -> NDArray:
        return self.inner.to_host(array)

    def new_cache(
        self,
        config: ModelConfig,
        slots: int,
        capacity: int,
        dtype: str | None = None,
        page_size: int | None = None,
        pages: int | None = None,
    ) -> KVCache:
        return self.inner.new_cache(config, slots, capacity, dtype, page_size, pages)

    @property
    def total_s(self) -> float:
        """Time in all operations."""
        return sum(op.total_s for op in self.ops.values())

    def slowest_first(self) -> list[OpTime]:
        return sorted(self.ops.values(), key=lambda op: -op.total_s)

    def count(self, op: str, weights: tuple[LinearWeight, ...], taken_s: float) -> None:
        """One call of `op`, over these weights."""
        name = " ".join(
            [op, *(self._names.get(id(w), "?") for w in weights if not op.startswith(("lm_head", "head_")))]
        )
        entry = self.ops.setdefault(name, OpTime(name))
        entry.calls += 1
        entry.total_s += taken_s
        screened = op == "head_candidates"
        entry.nbytes += sum(w.screen_nbytes if screened and isinstance(w, ScreenedHead) else w.nbytes for w in weights)


def _forwarding(op: str) -> Callable[..., Any]:
    def method(self: ProfiledBackend, *args: Any) -> Any:
        start = time.perf_counter()
        result = getattr(self.inner, op)(*args)
        taken = time.perf_counter() - start
        weights = args[1] if op == "linears" else (args[1],) if op in _OF_ONE_WEIGHT else ()
        self.count(op, tuple(weights), taken)
        return result

    method.__name__, method.__doc__ = op, getattr(Backend, op).__doc__
    return method


for _op in OPS:
    setattr(ProfiledBackend, _op, _forwarding(_op))
