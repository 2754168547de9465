"""`Backend`: every operation that the model asks for, in plain NumPy. It is the reference, and the base class.

A faster backend subclasses it and overrides what it speeds up. *Primitives* do one thing. *Fused* operations are
compositions of primitives, here spelled out; a backend may replace one by a single kernel, and must then agree with
the composition under the numerical contract.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import numpy as np
from numpy.typing import NDArray

from ..errors import BackendUnavailable, ShapeError
from ..reference import layers, quantization
from ..reference.cache import KVCache, TokenBatch
from ..reference.config import ModelConfig, RopeConfig
from ..reference.weights import DenseWeight, LinearWeight, ModelWeights, TernaryLinear, TernaryWeight
from ..system.memory import available_bytes, memory_bytes
from ..system.threads import blas_threads, resolve_threads
from .cache_dtypes import CACHE_DTYPES
from .candidates import HeadCandidates, HeadNeed

HEADS = ("auto", "exact", "screened")


def require(op: str, ok: bool, expected: str, **arrays: NDArray) -> None:
    """Unless `ok`, raise the ShapeError that tells what each array is."""
    if not ok:
        got = " and ".join(f"{name} {array.dtype} {array.shape}" for name, array in arrays.items())
        raise ShapeError(op, expected=expected, got=got)


def check_rope(q: NDArray, k: NDArray, cos: NDArray, sin: NDArray) -> None:
    ok = q.ndim == k.ndim == 3 and q.shape[::2] == k.shape[::2] == (len(cos), 2 * cos.shape[-1])
    expected = "q (N, H, d), k (N, G, d), cos and sin (N, d/2)"
    require("rope", ok and cos.shape == sin.shape, expected, q=q, k=k, cos=cos, sin=sin)


def check_dequantize(acc: NDArray, x_quant_scale: NDArray) -> None:
    ok = acc.ndim == 2 and x_quant_scale.shape == (len(acc), 1)
    require("dequantize", ok, "acc (N, out) and x_quant_scale (N, 1)", acc=acc, x_quant_scale=x_quant_scale)


def check_attention(q: NDArray, cache: KVCache, batch: TokenBatch) -> None:
    heads, (kv_heads, head_dim) = q.shape[1] if q.ndim == 3 else 0, cache.keys.shape[-2:]
    ok = q.shape == (len(batch), heads, head_dim) and heads % kv_heads == 0
    require("attention", ok, f"q ({len(batch)}, multiple of {kv_heads}, {head_dim})", q=q)


def choose_cache_dtype(be: Backend, dtype: str | None) -> str:
    """The dtype of a cache that is asked for so; None asks for the backend's own. Raises ShapeError."""
    chosen = be.dtype.name if dtype is None else dtype
    if chosen not in be.cache_dtypes:
        expected = f"cache dtype {', '.join(be.cache_dtypes[:-1])} or {be.cache_dtypes[-1]}"
        raise ShapeError(f"backend {be.name}", expected=expected, got=repr(chosen))
    return chosen


PROMPT_TOKENS = 512  # of a pass


class Backend:
    """The NumPy backend. `dtype` float32 is the contract; float64 runs the same text as the yardstick of its error."""

    name = "numpy"
    dtypes: tuple[str, ...] = ("float32", "float64")
    cache_dtypes: tuple[str, ...] = ("float64", *CACHE_DTYPES)
    cache_class: type[KVCache] = KVCache
    weight_kinds: tuple[type, ...] = ()  # the dataclasses that `prepare` and `prepare_model` make

    def __init__(self, dtype: str = "float32", threads: int | None = None, *, head: str = "auto") -> None:
        if dtype not in self.dtypes:
            raise ShapeError(f"backend {self.name}", expected=f"dtype {' or '.join(self.dtypes)}", got=repr(dtype))
        self.dtype = np.dtype(dtype)
        self.threads = resolve_threads(threads)
        if head not in HEADS:
            raise BackendUnavailable(f"head: expected one of {', '.join(HEADS)}, got {head!r}")
        if head == "screened" and type(self).prepare_model is Backend.prepare_model:
            raise BackendUnavailable(f"backend {self.name!r} computes the whole head; head='screened' is for 'cython'")
        self.head = head

    def prepare(self, w: LinearWeight) -> LinearWeight:
        """A linear's weight in the layout this backend computes from; called once for each, as the file is read."""
        return w

    def prepare_for(self, layer: int | None) -> Callable[[LinearWeight], LinearWeight]:
        """`prepare` of whoever computes that layer, or None: the head. It is this backend, unless it is a split one."""
        return self.prepare

    def prepare_model(self, w: ModelWeights) -> ModelWeights:
        """All of a model, each linear prepared, when it has been read: what a backend adds to it as a whole."""
        return w

    def prepared_layout(self) -> str | None:
        """The name of what `prepare` and `prepare_model` make, where it is worth keeping on disk (`prepared.py`)."""
        return None

    def check_prepared(self, w: ModelWeights) -> None:
        """Raises ShapeError unless `weight_kinds` in weights from disk have the shapes that the kernels trust."""

    def running(self) -> AbstractContextManager[None]:
        """What a forward pass runs in: here NumPy's BLAS keeps to `threads`."""
        return blas_threads(self.threads)

    def memory(self) -> tuple[int | None, int | None]:
        """Bytes held, and bytes that are free, where this backend keeps its arrays: here by the process, in the host's
        memory. None where the system does not say."""
        return memory_bytes(), available_bytes()

    def prompt_tokens(self, config: ModelConfig) -> int:
        """Tokens of a prompt that a pass takes where nobody says otherwise: it bounds the memory of a long one."""
        return PROMPT_TOKENS

    def place(self, batch: TokenBatch) -> TokenBatch:
        """The batch where this backend computes from it: on a card its arrays are device arrays. Here: as it is"""
        return batch

    def at_layer(self, index: int, x: NDArray) -> NDArray:
        """x (N, D), the input of that layer, where the layer is computed, as is what follows. Here: as it is"""
        return x

    def from_host(self, array: NDArray) -> NDArray:
        """A NumPy array where this backend computes from it: on a card a copy. Here: as it is"""
        return array

    def to_host(self, array: NDArray) -> NDArray:
        """What an operation gave, as a NumPy array. On a card this waits for it, and raises what has gone wrong there:
        NumericsError for NaN or Inf where the operations above raise it, DeviceError."""
        return array

    def run(
        self, compute: Callable[..., NDArray], w: ModelWeights, cfg: ModelConfig, batch: TokenBatch, cache: KVCache
    ) -> NDArray:
        """compute(self, w, cfg, batch, cache), a forward pass. A backend may replay what an earlier one recorded"""
        return compute(self, w, cfg, batch, cache)

    def synchronize(self) -> None:
        """Wait until what was asked for has been computed, for those who measure. Here it has been"""

    def close(self) -> None:
        """Give back what the backend holds outside this process's memory; it cannot compute after that"""

    @property
    def summary(self) -> str:
        """What computes, in some words."""
        return self.name

    def new_cache(
        self,
        config: ModelConfig,
        slots: int,
        capacity: int,
        dtype: str | None = None,
        page_size: int | None = None,
        pages: int | None = None,
    ) -> KVCache:
        """An empty KV cache where this backend reads it, in its own dtype unless another is given; see `KVCache`."""
        chosen = choose_cache_dtype(self, dtype)
        return self.cache_class(config, slots, capacity, chosen, page_size=page_size, pages=pages)

    # -- primitives ----------------------------------------------------------------------------------------------------

    def embed(self, w: DenseWeight, tokens: NDArray[np.int64]) -> NDArray:
        """tokens (N,) -> (N, D)"""
        rows, ids = len(w.array), tokens.size
        ok = tokens.ndim == 1 and tokens.dtype.kind in "iu" and (ids == 0 or 0 <= tokens.min() <= tokens.max() < rows)
        require("embed", ok, f"tokens (N,) of ids 0 to {rows - 1}", tokens=tokens, table=w.array)
        return w.array[tokens].astype(self.dtype)

    def rms_norm(self, x: NDArray, weight: NDArray, eps: float) -> NDArray:
        """x (N, D), weight (D,) -> (N, D)"""
        require("rms_norm", weight.shape == x.shape[1:], "x (N, D) and weight (D,)", x=x, weight=weight)
        return layers.rms_norm(x, weight, eps)

    def rope_tables(self, positions: NDArray[np.int64], rope: RopeConfig, head_dim: int) -> tuple[NDArray, NDArray]:
        """positions (N,) -> cos, sin (N, d/2)"""
        require("rope_tables", positions.ndim == 1, "positions (N,)", positions=positions)
        return layers.rope_tables(positions, rope, head_dim, self.dtype.type)

    def rope(self, q: NDArray, k: NDArray, cos: NDArray, sin: NDArray) -> tuple[NDArray, NDArray]:
        """q (N, H, d), k (N, G, d), cos and sin (N, d/2) -> q and k, turned"""
        check_rope(q, k, cos, sin)
        return layers.apply_rope(q, cos, sin), layers.apply_rope(k, cos, sin)

    def quantize_activations(self, x: NDArray) -> tuple[NDArray[np.int8], NDArray]:
        """x (N, K) -> x_q (N, K) int8, x_quant_scale (N, 1)"""
        require("quantize_activations", x.ndim == 2 and x.shape[1] > 0, "x (N, K), K > 0", x=x)
        return quantization.quantize_activations(x)

    def ternary_matmul(self, x_q: NDArray[np.int8], w: TernaryLinear) -> NDArray[np.int32]:
        """x_q (N, K) int8 -> acc (N, out) int32, exact"""
        assert isinstance(w, TernaryWeight)
        return quantization.ternary_matmul(x_q, w.packed, w.in_features)

    def dequantize(self, acc: NDArray[np.int32], w: TernaryLinear, x_quant_scale: NDArray) -> NDArray:
        """acc (N, out) int32 -> y (N, out)"""
        check_dequantize(acc, x_quant_scale)
        return quantization.dequantize(acc, w.w_dequant_scale, x_quant_scale)

    def dense_matmul(self, x: NDArray, w: DenseWeight) -> NDArray:
        """x (N, K) -> (N, out)"""
        require("dense_matmul", x.ndim == 2 and x.shape[1] == w.shape[1], "x (N, K) and w (out, K)", x=x, w=w.array)
        return layers.dense_matmul(x, w.array)

    def attention_scores(self, q: NDArray, keys: NDArray) -> NDArray:
        """One token's q (H, d) against the keys it sees (S, G, d) -> (H, S)"""
        return layers.attention_scores(q, keys)

    def softmax(self, scores: NDArray) -> NDArray:
        """(H, S) -> (H, S), rows that sum to 1"""
        return layers.softmax(scores)

    def attention_values(self, pattern: NDArray, values: NDArray) -> NDArray:
        """pattern (H, S), values (S, G, d) -> (H, d)"""
        return layers.attention_values(pattern, values)

    def gated(self, gate: NDArray, up: NDArray, activation: str) -> NDArray:
        """(N, F), (N, F) -> (N, F)"""
        require("gated", gate.ndim == 2 and gate.shape == up.shape, "gate and up (N, F)", gate=gate, up=up)
        return layers.gated(gate, up, activation)

    def add(self, x: NDArray, y: NDArray) -> NDArray:
        """x (N, D), y (N, D) or a bias (D,) -> (N, D)"""
        require("add", y.shape in (x.shape, x.shape[1:]), "x (N, D) and y (N, D) or (D,)", x=x, y=y)
        return x + y

    def take_rows(self, x: NDArray, rows: NDArray[np.int64]) -> NDArray:
        """x (N, D), rows (n,) -> (n, D)"""
        return x[rows]

    # -- fused: compositions of the above ------------------------------------------------------------------------------

    def linear(self, x: NDArray, w: LinearWeight) -> NDArray:
        """x (N, K) -> x W^T (N, out); a ternary weight makes it a BitLinear"""
        return self.linears(x, (w,))[0]

    def linears(self, x: NDArray, ws: Sequence[LinearWeight]) -> tuple[NDArray, ...]:
        """Several linears of the same x, which is quantised once for all that quantise it alike"""
        outputs, shared = [], None
        for w in ws:
            if isinstance(w, DenseWeight):
                y = self.dense_matmul(x, w)
            else:
                assert isinstance(w, TernaryLinear)
                if w.input_norm is not None:  # a norm of its own: nothing to share
                    x_q, x_quant_scale = self.quantize_activations(
                        self.rms_norm(x, w.input_norm.weight, w.input_norm.eps)
                    )
                else:
                    x_q, x_quant_scale = shared = shared or self.quantize_activations(x)
                y = self.dequantize(self.ternary_matmul(x_q, w), w, x_quant_scale)
            outputs.append(y if w.bias is None else self.add(y, w.bias))
        return tuple(outputs)

    def attention(self, q: NDArray, cache: KVCache, batch: TokenBatch, layer: int, window: int | None) -> NDArray:
        """Every token of the batch over what it sees of its own sequence.   q (N, H, d) -> z (N, H, d)"""
        check_attention(q, cache, batch)
        z = np.empty_like(q)
        for i, (slot, position) in enumerate(zip(batch.slots, batch.positions, strict=True)):
            keys, values = cache.visible(layer, slot, position, window)  # (S, G, d) each
            pattern = self.softmax(self.attention_scores(q[i], keys))  # (H, S)
            z[i] = self.attention_values(pattern, values)
        return z

    def lm_head(self, x: NDArray, w: LinearWeight) -> NDArray:
        """x (N, D) -> logits (N, V)"""
        return self.linear(x, w)

    def head_candidates(self, x: NDArray, w: LinearWeight, needs: Sequence[HeadNeed]) -> list[HeadCandidates]:
        """x (N, D), and what each token needs -> its logits, or those of them that it needs.

        Here they are all logits; a backend that can tell faster which ones matter returns those, and the same bits.
        """
        require("head_candidates", len(needs) == len(x), f"x ({len(needs)}, D), as there are needs", x=x)
        logits = self.lm_head(x, w)
        ids = np.arange(logits.shape[1])
        return [HeadCandidates(ids, row, len(ids)) for row in logits]
