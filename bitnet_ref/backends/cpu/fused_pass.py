"""A pass of the compiled backend: the model's own text, its small steps done together with the products they lead to.

Inside a pass, `add`, `gated`, `rms_norm`, `rope` and the products of gate and up only note what they were asked for
(`deferred.py`). The product that needs a sum or a norm makes a row, norms it and quantises it while it lies in L1; gate
and up are multiplied with each other before they leave; attention turns its queries, and the cache the keys that it
takes in. The numbers are those of the single operations, which anybody who asks for one still gets: a trace, a profile,
a test.

Measured, 2B-4T's shape, two threads of a Cascade Lake Xeon, a prompt of 64 tokens: norms, gates, sums and RoPE one by
one took 1.4 of 12.2 ms a layer, waiting for L3 most of it; together, a layer takes 11.4. A played step of storyteller:
0.149 ms, not 0.183.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar, cast

from numpy.typing import NDArray

from ...errors import NumericsError
from ...reference.cache import KVCache, TokenBatch
from ...reference.config import ModelConfig
from ...reference.weights import DenseWeight, LinearWeight, ModelWeights
from ..backend import Backend, check_rope, require
from .buffers import Buffers, Pool
from .deferred import GATES, PLAIN, SUM, Normed, OfPair, Pair, Rotation, Rows, Turned

if TYPE_CHECKING:
    from .backend import CythonBackend

Compute = Callable[..., NDArray]


@dataclass(frozen=True, eq=False)
class KernelBatch(TokenBatch):
    """The tokens of a pass. `how`: what a kernel that is called for them is told, threads, kernel set and tape."""

    how: tuple[int, int, Any] = (1, 0, None)


class FusedPass(Backend):
    """What a backend does otherwise in a pass: stands before the class of a copy of it."""

    threads: int
    results: Buffers | Pool
    tape: Any
    _set: int
    layout: str
    _in_one_call: Callable[[Sequence[LinearWeight]], bool]
    _bit_linears: Callable[..., tuple[NDArray, ...]]
    _attention: Callable[..., NDArray]

    def value(self, x: Any) -> NDArray:
        """The array itself: what was put off is computed now."""
        if isinstance(x, Rows):
            if x.source == SUM:
                x.settle(super().add(x.a, x.b))
            elif x.source != PLAIN:
                x.settle(super().gated(x.a, x.b, _GATE_NAMES[x.source]))
            return x.a
        if isinstance(x, Normed):
            if x.value is None:
                x.value = super().rms_norm(self.value(x.of), x.weight, x.eps)
            return x.value
        if isinstance(x, Turned):
            r = x.rotation
            if r.q_turned is None:
                r.q_turned, r.k_turned = super().rope(r.q, r.k, r.cos, r.sin)
            return r.q_turned if x.is_query else r.k_turned
        if isinstance(x, OfPair):
            if x.pair.ys is None:
                x.pair.ys = self._products(x.pair.x, x.pair.ws)
            return x.pair.ys[x.index]
        return x

    def place(self, batch: TokenBatch) -> TokenBatch:
        how = self.threads, self._set, self.tape
        return KernelBatch(batch.tokens, batch.positions, batch.slots, batch.wanted, how=how)

    def rms_norm(self, x: NDArray, weight: NDArray, eps: float) -> NDArray:
        require("rms_norm", x.ndim == 2 and weight.shape == x.shape[1:], "x (N, D), weight (D,)", x=x, weight=weight)
        return Normed(x if isinstance(x, Rows) else Rows(PLAIN, x), weight, eps)  # type: ignore[return-value]

    def add(self, x: NDArray, y: NDArray) -> NDArray:
        if x.shape != y.shape:
            return super().add(self.value(x), self.value(y))
        return Rows(SUM, self.value(x), self.value(y))  # type: ignore[return-value]

    def gated(self, gate: NDArray, up: NDArray, activation: str) -> NDArray:
        if activation not in GATES:
            return super().gated(gate, up, activation)
        require("gated", gate.ndim == 2 and gate.shape == up.shape, "gate and up (N, F)", gate=gate, up=up)
        if isinstance(gate, OfPair) and isinstance(up, OfPair):
            pair = gate.pair
            if up.pair is pair and pair.ys is None and (gate.index, up.index) == (0, 1):
                return self._products(pair.x, pair.ws, gate=GATES[activation])[0]
        return Rows(GATES[activation], self.value(gate), self.value(up))  # type: ignore[return-value]

    def rope(self, q: NDArray, k: NDArray, cos: NDArray, sin: NDArray) -> tuple[NDArray, NDArray]:
        check_rope(q, k, cos, sin)
        rotation = Rotation(q, k, cos, sin)
        return Turned(rotation, True), Turned(rotation, False)  # type: ignore[return-value]

    def take_rows(self, x: NDArray, rows: NDArray) -> NDArray:
        return super().take_rows(self.value(x), rows)

    def dense_matmul(self, x: NDArray, w: DenseWeight) -> NDArray:
        return super().dense_matmul(self.value(x), w)

    def linears(self, x: NDArray, ws: Sequence[LinearWeight]) -> tuple[NDArray, ...]:
        if self.layout == "table" or not self._in_one_call(ws):  # tables take few tokens at a time
            return super().linears(self.value(x), ws)
        if len(ws) == 2 and ws[0].shape == ws[1].shape:
            pair = Pair(x, ws)
            return OfPair(pair, 0), OfPair(pair, 1)  # type: ignore[return-value]
        return self._products(x, ws)

    def _products(self, x: Any, ws: Sequence[LinearWeight], gate: int = PLAIN) -> tuple[NDArray, ...]:
        """x, whatever it is made of, times each of the matrices; or of two the gated product."""
        normed = x if isinstance(x, Normed) and x.value is None else None
        rows = x if normed is None else normed.of
        if not isinstance(rows, Rows):
            rows = Rows(PLAIN, self.value(rows))
        made = self.results.empty(rows.shape) if rows.source == SUM else None  # the residual stream: needed again
        norm = {} if normed is None else {"norm_weight": normed.weight, "eps": normed.eps}
        try:
            ys = self._bit_linears(rows.a, ws, gate, source=rows.source, other=rows.b, made=made, **norm)
        except NumericsError:
            self.value(x)  # raises, where the norm is what holds NaN or Inf
            raise
        if made is not None:
            rows.settle(made)
        return ys

    def attention(self, q: NDArray, cache: KVCache, batch: TokenBatch, layer: int, window: int | None) -> NDArray:
        if not isinstance(q, Turned) or q.rotation.q_turned is not None:
            return super().attention(self.value(q), cache, batch, layer, window)
        r = q.rotation
        return self._attention(r.q, cache, batch, layer, window, cos=r.cos, sin=r.sin)


_GATE_NAMES = {number: name for name, number in GATES.items()}


def run_fused(
    be: CythonBackend, compute: Compute, w: ModelWeights, cfg: ModelConfig, batch: TokenBatch, cache: KVCache
) -> NDArray:
    """compute(be, w, cfg, batch, cache), a forward pass over a cache of the kernels."""
    fused = copy_as(FusedPass, be)
    return fused.value(compute(fused, w, cfg, batch, cache))


Kind = TypeVar("Kind", bound=FusedPass)


def copy_as(kind: type[Kind], be: CythonBackend) -> Kind:
    """A copy of the backend that does what `kind` says, and all else as before."""
    made = object.__new__(_class_of(cast("Any", kind), cast("Any", type(be))))
    made.__dict__.update(be.__dict__)
    return cast("Kind", made)


@cache
def _class_of(kind: Any, base: Any) -> Any:
    return type(f"{kind.__name__}{base.__name__}", (kind, base), {})
