"""The one wrapper around a backend: it passes every op to a function that may record, time, judge or replace it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..reference.cache import KVCache, TokenBatch
from ..reference.config import DeltaConfig, ModelConfig, RopeConfig
from ..reference.weights import (
    DeltaWeights,
    DenseWeight,
    EmbeddingWeight,
    GroupTernaryLinear,
    LinearWeight,
    TernaryLinear,
)
from .backend import Backend, HeadNeed, HeadRows
from .paged_cache import CacheSpec
from .split import SplitBackend

# around(op, call, args) -> the op's result; `call(*args)` computes it.
Around = Callable[[str, Callable[..., Any], tuple[Any, ...]], Any]


def observe(be: Backend, around: Around) -> Backend:
    """The backend with every op passed to `around`. Of a split backend, the ops of each part."""
    if isinstance(be, SplitBackend):
        return be.with_backends([Observed(part.backend, around) for part in be.parts])
    return Observed(be, around)


class Observed(Backend):
    """Passes each op of `inner` to `around`. It takes the path "ops": blocks and `linears` are composed of these ops.

    For "linears" the call composes `quantize_activations`, `ternary_matmul`, `dequantize`, `dense_matmul`,
    `group_matmul`, `rms_norm` and `add`, which pass by one by one inside it.
    """

    def __init__(self, inner: Backend, around: Around) -> None:
        self.inner, self.around = inner, around
        self.name, self.dtype, self.threads, self.head = inner.name, inner.dtype, inner.threads, inner.head
        self.fuses = False

    # -- ops -----------------------------------------------------------------------------------------------------------

    def embed(self, w: EmbeddingWeight, tokens: NDArray[np.int64]) -> NDArray:
        return self.around("embed", self.inner.embed, (w, tokens))

    def embed_on_host(self, w: EmbeddingWeight, tokens: NDArray[np.int64]) -> NDArray:
        return self.around("embed", self.inner.embed_on_host, (w, tokens))

    def rms_norm(self, x: NDArray, weight: NDArray, eps: float) -> NDArray:
        return self.around("rms_norm", self.inner.rms_norm, (x, weight, eps))

    def rope_tables(self, positions: NDArray[np.int64], rope: RopeConfig, head_dim: int) -> tuple[NDArray, NDArray]:
        return self.around("rope_tables", self.inner.rope_tables, (positions, rope, head_dim))

    def rope(
        self, q: NDArray, k: NDArray, cos: NDArray, sin: NDArray, partial: bool = False
    ) -> tuple[NDArray, NDArray]:
        return self.around("rope", self.inner.rope, (q, k, cos, sin, *[True] * partial))

    def quantize_activations(self, x: NDArray) -> tuple[NDArray[np.int8], NDArray]:
        return self.around("quantize_activations", self.inner.quantize_activations, (x,))

    def ternary_matmul(self, x_q: NDArray[np.int8], w: TernaryLinear) -> NDArray[np.int32]:
        return self.around("ternary_matmul", self.inner.ternary_matmul, (x_q, w))

    def dequantize(self, acc: NDArray[np.int32], w: TernaryLinear, x_quant_scale: NDArray) -> NDArray:
        return self.around("dequantize", self.inner.dequantize, (acc, w, x_quant_scale))

    def dense_matmul(self, x: NDArray, w: DenseWeight) -> NDArray:
        return self.around("dense_matmul", self.inner.dense_matmul, (x, w))

    def group_matmul(self, x: NDArray, w: GroupTernaryLinear) -> NDArray:
        return self.around("group_matmul", self.inner.group_matmul, (x, w))

    def linears(self, x: NDArray, ws: Sequence[LinearWeight]) -> tuple[NDArray, ...]:
        return self.around("linears", super().linears, (x, ws))

    def append(self, cache: KVCache, layer: int, batch: TokenBatch, k: NDArray, v: NDArray) -> None:
        self.around("append", self.inner.append, (cache, layer, batch, k, v))

    def attention(self, q: NDArray, cache: KVCache, batch: TokenBatch, layer: int, window: int | None) -> NDArray:
        return self.around("attention", self.inner.attention, (q, cache, batch, layer, window))

    def delta_conv(self, qkv: NDArray, conv: NDArray, cache: KVCache, layer: int, batch: TokenBatch) -> NDArray:
        return self.around("delta_conv", self.inner.delta_conv, (qkv, conv, cache, layer, batch))

    def delta_gates(self, a: NDArray, b: NDArray, w: DeltaWeights) -> tuple[NDArray, NDArray]:
        return self.around("delta_gates", self.inner.delta_gates, (a, b, w))

    def delta_rule(
        self,
        mixed: NDArray,
        log_alpha: NDArray,
        beta: NDArray,
        cfg: DeltaConfig,
        cache: KVCache,
        layer: int,
        batch: TokenBatch,
    ) -> NDArray:
        return self.around("delta_rule", self.inner.delta_rule, (mixed, log_alpha, beta, cfg, cache, layer, batch))

    def output_gate(self, z: NDArray, gate: NDArray, activation: str) -> NDArray:
        return self.around("output_gate", self.inner.output_gate, (z, gate, activation))

    def gated(self, gate: NDArray, up: NDArray, activation: str) -> NDArray:
        return self.around("gated", self.inner.gated, (gate, up, activation))

    def add(self, x: NDArray, y: NDArray) -> NDArray:
        return self.around("add", self.inner.add, (x, y))

    def scale(self, x: NDArray, factor: float) -> NDArray:
        return self.around("scale", self.inner.scale, (x, factor))

    def take_rows(self, x: NDArray, rows: NDArray[np.int64]) -> NDArray:
        return self.around("take_rows", self.inner.take_rows, (x, rows))

    def head_rows(self, x: NDArray, w: LinearWeight, needs: Sequence[HeadNeed]) -> list[HeadRows]:
        return self.around("head_rows", self.inner.head_rows, (x, w, needs))

    # -- everything else is the inner backend's ------------------------------------------------------------------------

    def running(self) -> AbstractContextManager[None]:
        return self.inner.running()

    def place(self, batch: TokenBatch) -> TokenBatch:
        return self.inner.place(batch)

    def from_host(self, array: NDArray) -> NDArray:
        return self.inner.from_host(array)

    def to_host(self, array: NDArray) -> NDArray:
        return self.inner.to_host(array)

    def synchronize(self) -> None:
        self.inner.synchronize()

    def new_cache(self, config: ModelConfig, spec: CacheSpec) -> KVCache:
        return self.inner.new_cache(config, spec)
