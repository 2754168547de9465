"""The one interception of a pass: `observe(be, around)` passes every op to a function that may record, time, judge,
replace or edit it.

    around(step, call, args) -> the op's result; `call(*args)` computes it.

`step.op` is the op's name, `step.name` that of the tensor that it computes in a trace.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from ..reference.cache import KVCache, TokenBatch
from ..reference.config import ModelConfig, RopeConfig
from ..reference.layers import Array, Floats
from ..reference.model import BlockPlace
from ..reference.weights import DenseWeight, LayerWeights, LinearWeight, ModelWeights, Norm, Shared, TernaryLinear
from .backend import Backend, HeadNeed, HeadRows
from .paged_cache import CacheSpec, EngineKVCache
from .split import SplitBackend

PATHS = ("ops", "blocks", "replayed")


class ObservedStep(NamedTuple):
    """One call of an op.

    name: of the tensor that it computes: "blocks.3.attn.hook_z". Of rope the queries, of `linears` the first; "" of
    ops that compute none.
    """

    op: str
    name: str


T = TypeVar("T")
Call = Callable[..., Any]
Around = Callable[[ObservedStep, Call, tuple[Any, ...]], Any]


def observe(be: Backend, around: Around, path: str = "ops") -> Backend:
    """The backend with every op passed to `around`. Of a split backend, the ops of each part.

    path: how a pass is computed. "ops": blocks are composed of ops; they are passed as well, and their ops inside them.
    "blocks": each half of a block is one call of the backend's own. "replayed": the whole pass up to the head is.
    """
    if isinstance(be, SplitBackend) and path != "replayed":
        return be.with_backends([Observed(part.backend, around, path) for part in be.parts])
    return Observed(be, around, path)


class Observed(Backend):
    """Passes each op of `inner` to `around`.

    For "linears" the call composes `quantize_activations`, `ternary_matmul`, `dequantize`, `dense_matmul`, `compute`,
    `rms_norm` and `add`, which pass by one by one inside it.
    """

    def __init__(self, inner: Backend, around: Around, path: str = "ops") -> None:
        self.inner, self.around, self.path = inner, around, path
        self.name, self.dtype, self.threads, self.head = inner.name, inner.dtype, inner.threads, inner.head
        self.fuses = False
        self.block = ""  # "blocks.3", within it
        self.result = ""  # the tensor that the residual sum of this half gives
        self.computed = ""  # the linear whose products are computed: "blocks.3.attn.q_proj"

    def _pass(self, op: str, name: str, call: Callable[..., T], *args: Any) -> T:
        result: T = self.around(ObservedStep(op, name), call, args)
        return result

    # -- a pass and its blocks -----------------------------------------------------------------------------------------

    def hidden(
        self, w: ModelWeights, cfg: ModelConfig, batch: TokenBatch, cache: KVCache, path: str | None = None
    ) -> Floats:
        if self.path == "replayed":
            return self._pass("hidden", "ln_final.hook_normalized", self.inner.hidden, w, cfg, batch, cache, path)
        return super().hidden(w, cfg, batch, cache, path)

    def attention_block(self, x: Floats, w: LayerWeights, cfg: ModelConfig, at: BlockPlace) -> Floats:
        self.block, self.result = w.name, f"{w.name}.hook_resid_mid"
        block = self.inner.attention_block if self.path == "blocks" else super().attention_block
        return self._pass("attention_block", self.result, block, x, w, cfg, at)

    def feed_forward(self, x: Floats, w: LayerWeights, cfg: ModelConfig) -> Floats:
        self.block, self.result = w.name, f"{w.name}.hook_resid_post"
        block = self.inner.feed_forward if self.path == "blocks" else super().feed_forward
        return self._pass("feed_forward", self.result, block, x, w, cfg)

    # -- ops -----------------------------------------------------------------------------------------------------------

    def embed(self, w: LinearWeight, tokens: NDArray[np.int64]) -> Floats:
        return self._pass("embed", "hook_embed", self.inner.embed, w, tokens)

    def embed_on_host(self, w: LinearWeight, tokens: NDArray[np.int64]) -> Floats:
        return self._pass("embed", "hook_embed", self.inner.embed_on_host, w, tokens)

    def rms_norm(self, x: Floats, norm: Norm) -> Floats:
        return self._pass("rms_norm", f"{norm.name}.hook_normalized", self.inner.rms_norm, x, norm)

    def rope_tables(self, positions: NDArray[np.int64], rope: RopeConfig, head_dim: int) -> tuple[Floats, Floats]:
        return self._pass("rope_tables", "", self.inner.rope_tables, positions, rope, head_dim)

    def rope(self, q: Floats, k: Floats, cos: Floats, sin: Floats) -> tuple[Floats, Floats]:
        return self._pass("rope", f"{self.block}.attn.hook_rot_q", self.inner.rope, q, k, cos, sin)

    def quantize_activations(self, x: Floats) -> tuple[NDArray[np.int8], Floats]:
        return self._pass("quantize_activations", f"{self.computed}.hook_x_int8", self.inner.quantize_activations, x)

    def ternary_matmul(self, x_q: NDArray[np.int8], w: TernaryLinear) -> NDArray[np.int32]:
        return self._pass("ternary_matmul", f"{self.computed}.hook_acc_int32", self.inner.ternary_matmul, x_q, w)

    def dequantize(self, acc: NDArray[np.int32], w: TernaryLinear, x_quant_scale: Floats) -> Floats:
        return self._pass("dequantize", f"{self.computed}.hook_out", self.inner.dequantize, acc, w, x_quant_scale)

    def dense_matmul(self, x: Floats, w: DenseWeight) -> Floats:
        return self._pass("dense_matmul", f"{self.computed}.hook_out", self.inner.dense_matmul, x, w)

    def linears(self, x: Floats, ws: Sequence[LinearWeight]) -> tuple[Floats, ...]:
        return self._pass("linears", f"{ws[0].name}.hook_out", super().linears, x, ws)

    def one_linear(self, x: Floats, w: LinearWeight, shared: Shared) -> Floats:
        before = self.computed
        self.computed = before or w.name
        y = super().one_linear(x, w, shared)
        self.computed = before
        return y

    def lm_head(self, x: Floats, w: LinearWeight) -> Floats:
        def head(x: Floats, ws: Sequence[LinearWeight]) -> tuple[Floats, ...]:
            self.computed = "lm_head"  # with tied embeddings the weight is called "embedding"
            return super(Observed, self).linears(x, ws)

        return self._pass("linears", "lm_head.hook_out", head, x, (w,))[0]

    def append(self, cache: KVCache, layer: int, batch: TokenBatch, k: Floats, v: Floats) -> None:
        self._pass("append", f"{self.block}.attn.hook_v", self.inner.append, cache, layer, batch, k, v)

    def attention(self, q: Floats, cache: KVCache, batch: TokenBatch, layer: int, window: int | None) -> Floats:
        name = f"{self.block}.attn.hook_z"
        return self._pass("attention", name, self.inner.attention, q, cache, batch, layer, window)

    def gated(self, gate: Floats, up: Floats, activation: str) -> Floats:
        return self._pass("gated", f"{self.block}.mlp.hook_post", self.inner.gated, gate, up, activation)

    def add(self, x: Floats, y: Floats) -> Floats:
        return self._pass("add", f"{self.computed}.hook_out" if self.computed else self.result, self.inner.add, x, y)

    def scale(self, x: Floats, factor: float, name: str) -> Floats:
        return self._pass("scale", name, self.inner.scale, x, factor, name)

    def compute(self, name: str, function: Callable[..., Floats], *args: Any) -> Floats:
        is_product = self.computed and name.endswith(".hook_out")
        step = f"{self.computed}.hook_out" if is_product else name
        return self._pass("compute", step, self.inner.compute, name, function, *args)

    def compose(self, name: str, function: Callable[..., Floats], *args: Any) -> Floats:
        return self._pass("compute", name, self.inner.compose, name, function, *args)

    def take_rows(self, x: Floats, rows: NDArray[np.int64]) -> Floats:
        return self._pass("take_rows", "", self.inner.take_rows, x, rows)

    def head_rows(self, x: Floats, w: LinearWeight, needs: Sequence[HeadNeed]) -> list[HeadRows]:
        return self._pass("head_rows", "lm_head.hook_out", self.inner.head_rows, x, w, needs)

    # -- everything else is the inner backend's ------------------------------------------------------------------------

    def running(self) -> AbstractContextManager[None]:
        return self.inner.running()

    def place(self, batch: TokenBatch) -> TokenBatch:
        return self.inner.place(batch)

    def from_host(self, array: Array) -> Array:
        return self.inner.from_host(array)

    def to_host(self, array: Array) -> Array:
        return self.inner.to_host(array)

    def synchronize(self) -> None:
        self.inner.synchronize()

    def new_cache(self, config: ModelConfig, spec: CacheSpec) -> EngineKVCache:
        return self.inner.new_cache(config, spec)
