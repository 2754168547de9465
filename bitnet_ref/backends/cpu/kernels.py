"""The CPU kernels as functions of plain arrays. Some do several ops in one call; each says which.

Given a tape, a call is recorded instead, and `replay.py` plays the tape without Python between the calls. `results`
makes the arrays of results.

Measured, 2B-4T's shape, two threads of a Cascade Lake Xeon, a prompt of 64 tokens: norms, gates, sums and RoPE as
separate calls took 1.4 of 12.2 ms per layer, most of it waiting for L3; inside the products a layer takes 11.4. A
replayed step of storyteller: 0.149 ms instead of 0.183.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...errors import NumericsError
from ...families.blocks import BlockWeight
from ...families.moe import MoeConfig
from ...reference.cache import TokenBatch
from ...reference.layers import Floats, Ints
from ...reference.weights import DenseWeight, Norm
from .extension import _cpu
from .memory import Buffers, Pool
from .weights import GroupPanelWeight, PanelWeight, RuledPanelWeight, view_bits

GATES = {"relu2": 1, "silu": 2}  # activations with a kernel, by their numbers in _cpu_ternary.pxi


FusedWeight = PanelWeight | RuledPanelWeight
Terms = list[tuple[Any, NDArray[np.int32] | None] | None] | None
"""Of adapters, for each weight None or what `add_terms` takes: they read the normed x."""


class KernelView(NamedTuple):
    """One layer of a KV cache, as the kernels take it."""

    layer: Any  # _cpu.KVLayer
    page_table: NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class CpuKernels:
    """The kernels of one kernel set. Each raises NumericsError for a token with NaN or Inf, and MemoryError."""

    kernel_set: int  # its number in the extension
    threads: int
    results: Buffers | Pool
    tape: Any = None  # _cpu.Tape: records every call, which is then not made

    @property
    def pool(self) -> Pool:
        """Of this thread's results."""
        return self.results.pool if isinstance(self.results, Buffers) else self.results

    # -- linears, ternary or by ggml's rule: x (N, K), quantised once per call -----------------------------------------

    def linears(
        self, x: Floats, ws: Sequence[FusedWeight], norm: Norm | None = None, terms: Terms = None
    ) -> tuple[NDArray[np.float32], ...]:
        """rms_norm (if `norm` is given) + linears.   -> (N, out) for each weight"""
        ys = tuple([self.results.empty((len(x), w.out_features)) for w in ws])
        self._linears(x, ws, ys, norm, terms)
        return ys

    def gated_linears(
        self, x: Floats, gate: FusedWeight, up: FusedWeight, activation: str, norm: Norm | None, terms: Terms = None
    ) -> NDArray[np.float32]:
        """rms_norm + linears + gated: the two products never leave the L1 cache.   -> (N, F)"""
        y = self.results.empty((len(x), gate.out_features))
        self._linears(x, (gate, up), (y,), norm, terms, gate=GATES[activation])
        return y

    def linear_add(
        self, x: Floats, w: FusedWeight, residual: Floats, norm: Norm | None, terms: Terms = None
    ) -> NDArray[np.float32]:
        """rms_norm (if `norm` is given) + linear + add.   residual (N, out) -> (N, out)"""
        y = self.results.empty((len(x), w.out_features))
        self._linears(x, (w,), (y,), norm, terms, residual=as_floats(residual))
        return y

    def _linears(
        self,
        x: Floats,
        ws: Sequence[FusedWeight],
        ys: tuple[NDArray[np.float32], ...],
        norm: Norm | None,
        terms: Terms,
        **fused: Any,
    ) -> None:
        views = [w.kernel_view for w in ws]
        if norm is not None:
            fused |= {"norm_weight": norm.weight, "eps": norm.eps}
        if terms is not None:
            fused["terms"] = [each and self._room_for(len(x), *each) for each in terms]
            fused["normed"] = None if norm is None else self.results.empty(x.shape)
        row = ws[0].kernel(as_floats(x), views, ys, self.threads, self.kernel_set, self.tape, **fused)
        if row >= 0:
            for w in ws:
                w.refuse(row, lambda: as_floats(x if norm is None else self.rms_norm(x, norm)))
            raise NumericsError(f"linears: the kernel cannot take the activation of token {row}")

    def _room_for(self, tokens: int, factors: Any, choice: NDArray[np.int32] | None) -> tuple[Any, ...]:
        """A term with the arrays for A x (N, max_r) and B (A x) (N, out)"""
        return factors, choice, *(self.results.empty((tokens, size)) for size in (factors.max_r, factors.N))

    def group_linears(self, x: Floats, ws: Sequence[GroupPanelWeight]) -> tuple[NDArray[np.float32], ...]:
        """Linears by groups and their biases, of weights with the same `input_key`.   -> (N, out) for each"""
        ys = tuple([self.results.empty((len(x), w.out_features)) for w in ws])
        views = [w.kernel_view for w in ws]
        row = _cpu.group_linears(as_floats(x), views, ys, self.threads, self.kernel_set, self.tape)
        if row >= 0:
            raise NumericsError(f"group_matmul: the activation of token {row} holds NaN or Inf")
        return ys

    def narrow(self, x: Floats, dtype: str) -> NDArray[np.float32]:
        """x (N, K) rounded to "float16" or "bfloat16", as `block_rule.narrow_inputs` rounds it"""
        y = self.results.empty(x.shape)
        _cpu.narrow(as_floats(x), dtype == "float16", y, self.threads, self.tape)
        return y

    def mixture(self, h: Floats, scores: Floats, experts: Sequence[Any], cfg: MoeConfig) -> NDArray[np.float32] | None:
        """choose_experts + expert_products + gated + mix.   h (N, D), scores (N, E) -> (N, D)

        experts: _cpu.ExpertPanels of gate, up and down. None: a number on the way is not finite.
        """
        y, limit = self.results.empty(h.shape), math.inf if cfg.gate_clamp is None else cfg.gate_clamp
        rule = cfg.num_experts_per_tok, cfg.norm_topk_prob, limit, cfg.activation == "silu"
        bad = _cpu.mixture(
            as_floats(h), as_floats(scores), *experts, *rule, y, self.threads, self.kernel_set, self.tape
        )
        return y if bad < 0 else None

    # -- attention -----------------------------------------------------------------------------------------------------

    def append(
        self, to: KernelView, batch: TokenBatch, k: Floats, v: Floats, rope: tuple[Floats, Floats] | None = None
    ) -> bool:
        """rope of k (if cos and sin are given) + append.   k, v (N, G, d)

        -> False when nothing was written: a token has no page, or a number does not fit the cache's dtype.
        """
        cos, sin = rope or (None, None)
        arrays = to.layer, to.page_table, batch.slots, batch.positions, as_floats(k), as_floats(v)
        return bool(_cpu.append(*arrays, self.threads, self.kernel_set, self.tape, cos=cos, sin=sin) < 0)

    def attention(
        self,
        q: Floats,
        view: KernelView,
        batch: TokenBatch,
        window: int | None,
        rope: tuple[Floats, Floats] | None = None,
    ) -> tuple[NDArray[np.float32], int]:
        """rope of q (if cos and sin are given) + attention.   q (N, H, d) -> z (N, H, d), -1

        The second result is the first token that sees a position without a page, if there is one; z is then undefined.
        """
        z = self.results.empty(q.shape)
        cos, sin = rope or (None, None)
        arrays = as_floats(q), view.layer, view.page_table, batch.slots, batch.positions, window or 0, z
        return z, int(_cpu.attention(*arrays, self.threads, self.kernel_set, self.tape, cos=cos, sin=sin))

    # -- single ops ----------------------------------------------------------------------------------------------------

    def rms_norm(self, x: Floats, norm: Norm) -> NDArray[np.float32]:
        y = self.results.empty(x.shape)
        arguments = as_floats(x), norm.weight, norm.eps, y
        if (row := _cpu.rms_norm(*arguments, self.threads, self.kernel_set, self.tape)) >= 0:
            raise NumericsError(f"rms_norm: token {row} holds NaN or Inf")
        return y

    def rope(self, x: Floats, cos: Floats, sin: Floats) -> NDArray[np.float32]:
        """x (N, heads, d), cos and sin (N, r/2) -> x, the first r numbers of each head rotated"""
        y = self.results.empty(x.shape)
        _cpu.rope(as_floats(x), cos, sin, y, self.threads, self.kernel_set, self.tape)
        return y

    def gated(self, gate: Floats, up: Floats, activation: str) -> NDArray[np.float32]:
        y, is_silu = self.results.empty(gate.shape), activation == "silu"
        _cpu.gated(as_floats(gate), as_floats(up), is_silu, y, self.threads, self.kernel_set, self.tape)
        return y

    def take_rows(self, x: Floats, rows: Ints) -> NDArray[np.float32]:
        """x (N, D), rows (n,) -> (n, D)"""
        y = self.results.empty((len(rows), x.shape[1]))
        _cpu.take_rows(as_floats(x), rows, y, self.threads, self.tape)
        return y

    def add(self, x: Floats, y: Floats) -> NDArray[np.float32]:
        """x (N, D), y (N, D) or a bias (D,)"""
        z, is_bias = self.results.empty(x.shape), y.ndim == 1
        _cpu.add(as_floats(x), as_floats(y[None] if is_bias else y), z, self.threads, is_bias, self.tape)
        return z

    def add_terms(self, x: Floats, y: NDArray[np.float32], factors: Any, choice: NDArray[np.int32] | None) -> None:
        """Add the term of each token's adapter to y.   x (N, K), y (N, out)

        factors: _cpu.LoraFactors. choice (N,): which of them, or -1; None: the first are everyone's.
        """
        t = self.results.empty((len(x), factors.max_r))
        _cpu.lora(as_floats(x), y, t, factors, self.threads, self.kernel_set, self.tape, choice=choice)

    def dense_linears(self, x: Floats, ws: Sequence[DenseWeight]) -> tuple[NDArray[np.float32], ...]:
        """Dense linears without their biases, in one call.   x (N, K) -> (N, out) for each weight"""
        ys = tuple([self.results.empty((len(x), w.shape[0])) for w in ws])
        blocks = [w.block.number if isinstance(w, BlockWeight) else 0 for w in ws]
        rows = [view_bits(w.stored) for w in ws]
        _cpu.dense_linears(as_floats(x), rows, ys, self.threads, self.kernel_set, self.tape, blocks=blocks)
        return ys


def as_floats(x: Floats) -> NDArray[np.float32]:
    return np.ascontiguousarray(x, dtype=np.float32)
