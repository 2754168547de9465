"""The CUDA backend: the NumPy one with its operations as RawKernels, over weights that lie on the card.

Arrays stay on the device from the embedding to the logits. An operation answers where it was asked: given device arrays
it gives device arrays, given NumPy arrays it gives NumPy arrays (so the contract's tests, and whoever looks at a single
operation, need not know of the device). Steps between two matrix products are put off and fused, see `deferred.py`;
a decoding step is recorded once and replayed, see `cuda/steps.py`.

`BITNET_REF_CUDA=emulated` runs the same kernels on the processor, compiled by the host's C++ compiler: slowly, to read,
test and debug them where there is no card (`kernels/cuda/emulated.h`).
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import wraps
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import ShapeError
from ...reference.cache import KVCache, TokenBatch
from ...reference.config import ModelConfig, RopeConfig
from ...reference.weights import DenseWeight, LinearWeight, ModelWeights, TernaryLinear, TernaryWeight
from ..backend import Backend, check_attention, check_dequantize, check_rope, choose_cache_dtype, require
from ..cache_dtypes import CACHE_DTYPES
from ..candidates import HeadCandidates, HeadNeed
from ..cpu.deferred import GATES, PLAIN, SUM, Deferred, Normed, OfPair, Pair, Rotation, Rows, Turned
from . import Device, open_device
from .attention import Attention, RopeTables
from .cache import DeviceBatch, DeviceKVCache, decodes
from .dense import MOST_IN_ORDER, DenseKernels, DeviceDense
from .device import INSTALL
from .footprint import working_bytes
from .rows import linear_of_row, quantized, take, takes_row, value
from .select import select
from .stacks import Stack, stack_linears, stack_of
from .steps import Ahead, RecordedStep
from .ternary import TernaryKernels, TiledWeight
from .workspace import Workspace, parse_bytes

# Tokens of a recorded decoding step. A record keeps what the pass has between its operations: of 128 tokens of 2B-4T
# some 0.5 GB, beside caches of 128 sequences that are many times as large.
MOST_REPLAYED = MOST_IN_ORDER
MOST_PROMPT_TOKENS = 2048  # of a pass: blocks of 128 by 128 for every multiprocessor twice, in each matrix of 2B-4T


def in_kind(op: Callable) -> Callable:
    """An operation on device arrays, as one that answers where it was asked."""

    @wraps(op)
    def answer(self: CupyBackend, *args: Any, **kwargs: Any) -> Any:
        holds = self.ws.holds
        subject = next(a for a in args if isinstance(a, (Deferred, np.ndarray)) or holds(a))
        if isinstance(subject, Deferred) or holds(subject):
            return op(self, *args, **kwargs)
        with self.running(), self.ws.one_pass():
            out = op(self, *(self.ws.upload(a) for a in args), **kwargs)
            return tuple(self.to_host(y) for y in out) if isinstance(out, tuple) else self.to_host(out)

    return answer


class CupyBackend(Backend):
    """The operations on one card. float32 is the contract.

    float16 and bfloat16 keep the attention cache, the head and dense matrices in 16 bits. Norms, softmax, accumulators
    and activations stay as they are, but for one thing: where more than 128 tokens pass through a dense matrix at once,
    cuBLAS multiplies, and takes activations of 16 bits. So in 16 bits a token is computed alike in any company of up to
    128, every step of decoding among them; of a longer prompt, its last bits depend on the pieces that it comes in.
    Ternary matrices know no difference: their sums are exact. What 16 bits cost is in `crossval/precision.py`.
    """

    name = "cupy"
    dtypes = ("float32", "float16", "bfloat16")
    cache_dtypes = CACHE_DTYPES

    def __init__(
        self,
        dtype: str = "float32",
        threads: int | None = None,
        *,
        head: str = "auto",
        memory_limit: int | str | None = None,
        index: int = 0,
        device: Device | None = None,
        graphs: bool = True,
    ) -> None:
        """memory_limit: of the card's memory, bytes or "8GiB".  index: the card's number.  device: one that is open.
        graphs: replay decoding."""
        super().__init__(dtype, threads, head=head)
        self.precision = dtype  # of the cache, the head and dense matrices
        self.dtype = np.dtype(np.float32)  # of activations
        self.graphs = graphs
        self.index = index
        opened = open_device(index=index, memory_limit=parse_bytes(memory_limit)) if device is None else device
        self.ws = Workspace(opened)
        self.rope_positions = RopeTables(self.ws)
        self._attention, self._ternary = Attention(self.ws), TernaryKernels(self.ws.device)
        self._denses = DenseKernels(self.ws, dtype)
        if dtype != "float32" and not self.ws.device.can_matmul_16:
            warnings.warn(f"cuBLAS is not installed, and {dtype} prompts take a slower kernel: {INSTALL}", stacklevel=2)
        self._vectors: dict[int, tuple[NDArray, Any]] = {}  # norms and biases on the device, by the host array's id
        self._replayed: tuple[NDArray, RecordedStep] | None = None  # what `run` gave last, if a record did
        self._hidden: tuple[NDArray, NDArray] | None = None  # the same, with its copy on the host
        self._ahead: Ahead | None = None  # the step that the device has begun without being asked
        self._lock = threading.RLock()

    # -- weights -------------------------------------------------------------------------------------------------------

    def prepare(self, w: LinearWeight) -> LinearWeight:
        if isinstance(w, TernaryWeight):
            return self._ternary.prepare(w)
        if type(w) is not DenseWeight:
            return w
        return self._denses.prepare(w)

    def prepare_model(self, w: ModelWeights) -> ModelWeights:
        """Everything on the card: the embedding; the norms and biases, which it finds by the arrays they are; and the
        linears of one input in one place (`cuda/stacks.py`)."""
        embedding = self._dense(w.embedding)
        w = replace(w, embedding=embedding, lm_head=embedding if w.tied else self.prepare(w.lm_head))
        vectors: list[NDArray | None] = [w.final_norm]
        for layer in w.layers:
            vectors += [layer.attn_norm, layer.attn_sub_norm, layer.ffn_norm, layer.ffn_sub_norm]
        for _, linear in w.linears():
            vectors.append(linear.bias)
            if isinstance(linear, TernaryLinear) and linear.input_norm is not None:
                vectors.append(linear.input_norm.weight)
        for vector in vectors:
            if vector is not None:
                self._vectors[id(vector)] = vector, self.ws.upload(_float32(vector))
        stack_linears(w.layers, (self._ternary, self._denses), self.ws.device)
        self.synchronize()  # launches that overlap read weights before the work before them is done
        return w

    # -- around a pass -------------------------------------------------------------------------------------------------

    @property
    def summary(self) -> str:
        return f"{self.name} on card {self.index}"

    def running(self) -> AbstractContextManager[Any]:
        return self._lock  # one stream, one set of buffers: passes of several threads take turns

    def memory(self) -> tuple[int | None, int | None]:
        info = self.ws.device.memory()
        return info.held, info.free if info.limit is None else min(info.free, info.limit - info.used)

    def prompt_tokens(self, config: ModelConfig) -> int:
        """As many as keep all multiprocessors at work, where what their pass needs is little beside what is free."""
        free = self.memory()[1] or 0
        fits = working_bytes(config, MOST_PROMPT_TOKENS, MOST_PROMPT_TOKENS) <= free // 4
        return MOST_PROMPT_TOKENS if fits else super().prompt_tokens(config)

    def new_cache(
        self,
        config: ModelConfig,
        slots: int,
        capacity: int,
        dtype: str | None = None,
        page_size: int | None = None,
        pages: int | None = None,
    ) -> KVCache:
        kind = self.precision if dtype is None else choose_cache_dtype(self, dtype)
        return DeviceKVCache(self.ws, config, slots, capacity, kind, page_size=page_size, pages=pages)

    def place(self, batch: TokenBatch) -> TokenBatch:
        if not isinstance(batch, DeviceBatch):
            self.rope_positions.reach = max(self.rope_positions.reach, batch.extent[1])
        return DeviceBatch.placed(self.ws, batch)

    def from_host(self, array: NDArray) -> NDArray:
        return self.ws.upload(array)

    def to_host(self, array: NDArray) -> NDArray:
        if not isinstance(array, Deferred) and not self.ws.holds(array):
            return array
        if self._hidden is not None and array is self._hidden[0]:  # it came with the head's candidates
            return self._hidden[1]
        return self.ws.download(value(self.ws, array))[0]

    def run(
        self, compute: Callable[..., NDArray], w: ModelWeights, cfg: ModelConfig, batch: TokenBatch, cache: KVCache
    ) -> NDArray:
        n, ahead = len(batch), self._ahead
        self._replayed = self._hidden = self._ahead = None
        if not isinstance(cache, DeviceKVCache):
            with self.ws.one_pass():
                return compute(self, w, cfg, batch, cache)
        if not (self.graphs and 0 < n <= MOST_REPLAYED and batch.all_wanted):
            cache.changes += 1
            if ahead is not None:
                self.ws.device.fill(self.ws.trouble, 0)  # what it met is nobody's
            with self.ws.one_pass(), cache.putting_off(batch):
                return compute(self, w, cfg, batch, cache)
        cache.check(batch, cfg.sliding_window, reading=True)
        size = 1 << (n - 1).bit_length()  # 1, 2, 4, ...: few records serve every number of sequences
        decoding = decodes(batch)
        key = size, id(w), decoding
        if key not in cache.steps:
            cache.steps[key] = RecordedStep(self, compute, w, cfg, size, decoding)
        x = cache.steps[key](batch, cache, ahead)
        self._replayed = x, cache.steps[key]
        return x

    def synchronize(self) -> None:
        self.ws.device.synchronize()

    def close(self) -> None:
        with self._lock:
            self._vectors.clear()
            self._replayed = self._hidden = self._ahead = None
            self.rope_positions.close()
            self.ws.shelf.clear()
            self.ws.device.close()

    # -- primitives ----------------------------------------------------------------------------------------------------

    def embed(self, w: DenseWeight, tokens: NDArray[np.int64]) -> NDArray:
        if not self.ws.holds(tokens):
            ok = tokens.ndim == 1 and tokens.dtype.kind in "iu"
            ok = ok and (tokens.size == 0 or 0 <= tokens.min() <= tokens.max() < len(w.array))
            require("embed", ok, f"tokens (N,) of ids 0 to {len(w.array) - 1}", tokens=tokens, table=w.array)
            with self.running():
                return self.to_host(self.embed(w, self.ws.upload(tokens.astype(np.int64))))
        table = self._dense(w)
        return take(self.ws, table.rows, table.kind, table.shape[1], tokens)

    @in_kind
    def rms_norm(self, x: NDArray, weight: NDArray, eps: float) -> NDArray:
        require("rms_norm", x.ndim == 2 and weight.shape == x.shape[1:], "x (N, D), weight (D,)", x=x, weight=weight)
        rows = x if isinstance(x, Rows) else Rows(PLAIN, value(self.ws, x))
        return Normed(rows, self._vector(weight), eps)  # type: ignore[return-value]

    def rope_tables(self, positions: NDArray[np.int64], rope: RopeConfig, head_dim: int) -> tuple[NDArray, NDArray]:
        if not self.ws.holds(positions):
            return super().rope_tables(positions, rope, head_dim)
        return self.rope_positions.of(positions, rope, head_dim)

    @in_kind
    def rope(self, q: NDArray, k: NDArray, cos: NDArray, sin: NDArray) -> tuple[NDArray, NDArray]:
        check_rope(q, k, cos, sin)
        rotation = Rotation(value(self.ws, q), value(self.ws, k), cos, sin)
        return Turned(rotation, True), Turned(rotation, False)  # type: ignore[return-value]

    @in_kind
    def quantize_activations(self, x: NDArray) -> tuple[NDArray[np.int8], NDArray]:
        require("quantize_activations", x.ndim == 2 and x.shape[1] > 0, "x (N, K), K > 0", x=x)
        return quantized(self.ws, x, pad=False)

    @in_kind
    def ternary_matmul(self, x_q: NDArray[np.int8], w: TernaryLinear) -> NDArray[np.int32]:
        if x_q.dtype != np.int8 or x_q.ndim != 2 or x_q.shape[1] != w.in_features:
            got = f"x_q {x_q.dtype} {x_q.shape}"
            raise ShapeError("ternary_matmul", expected=f"x_q int8 (M, {w.in_features})", got=got)
        return self._ternary.matmul(x_q, self._tiled(w), self.ws.empty((len(x_q), w.shape[0]), np.int32))

    @in_kind
    def dequantize(self, acc: NDArray[np.int32], w: TernaryLinear, x_quant_scale: NDArray) -> NDArray:
        check_dequantize(acc, x_quant_scale)
        y = self.ws.empty(acc.shape, np.float32)
        arguments = acc, np.float32(w.w_dequant_scale), x_quant_scale, np.uint64(len(acc)), acc.shape[1], y
        self.ws.each("rows.cu", "dequantize", acc.size, *arguments)
        return y

    @in_kind
    def dense_matmul(self, x: NDArray, w: DenseWeight) -> NDArray:
        require("dense_matmul", x.ndim == 2 and x.shape[1] == w.shape[1], "x (N, K) and w (out, K)", x=x, w=w.array)
        (y,) = self._denses.matmul(value(self.ws, x), self._dense(w).on_device)
        return y

    @in_kind
    def attention_scores(self, q: NDArray, keys: NDArray) -> NDArray:
        return self._attention.scores(value(self.ws, q), keys)

    @in_kind
    def softmax(self, scores: NDArray) -> NDArray:
        return self._attention.softmax(scores)

    @in_kind
    def attention_values(self, pattern: NDArray, values: NDArray) -> NDArray:
        return self._attention.values(pattern, values)

    @in_kind
    def gated(self, gate: NDArray, up: NDArray, activation: str) -> NDArray:
        require("gated", gate.ndim == 2 and gate.shape == up.shape, "gate and up (N, F)", gate=gate, up=up)
        if activation not in GATES:
            raise ShapeError("gated", expected=f"an activation among {', '.join(GATES)}", got=repr(activation))
        if isinstance(gate, OfPair) and isinstance(up, OfPair) and gate.pair is up.pair and gate.pair.ys is None:
            stack = stack_of(gate.pair.ws)
            if stack is not None and (gate.index, up.index) == (0, 1):
                return Rows(PLAIN, linear_of_row(self.ws, gate.pair.x, stack.whole, GATES[activation]))
        return Rows(GATES[activation], value(self.ws, gate), value(self.ws, up))  # type: ignore[return-value]

    @in_kind
    def add(self, x: NDArray, y: NDArray) -> NDArray:
        require("add", y.shape in (x.shape, x.shape[1:]), "x (N, D) and y (N, D) or (D,)", x=x, y=y)
        x = value(self.ws, x)
        if y.ndim == 2:
            return Rows(SUM, x, value(self.ws, y))  # type: ignore[return-value]
        out = self.ws.empty(x.shape, np.float32)
        self.ws.each("rows.cu", "add_vector", x.size, x, self._vector(y), np.uint64(len(x)), x.shape[1], out)
        return out

    @in_kind
    def take_rows(self, x: NDArray, rows: NDArray[np.int64]) -> NDArray:
        return take(self.ws, value(self.ws, x), "float32", x.shape[1], self.ws.upload(rows))

    # -- fused ---------------------------------------------------------------------------------------------------------

    @in_kind
    def linears(self, x: NDArray, ws: Sequence[LinearWeight]) -> tuple[NDArray, ...]:
        if (stack := stack_of(ws)) is not None:
            return self._stacked(x, ws, stack)
        outputs, shared = [], None
        for w in ws:
            if isinstance(w, DenseWeight):
                y = self.dense_matmul(x, w)
                outputs.append(y if w.bias is None else self.add(y, w.bias))
                continue
            assert isinstance(w, TernaryLinear)
            require("linear", x.ndim == 2 and x.shape[1] == w.in_features, f"x (N, {w.in_features})", x=x)
            tiled, normed = self._tiled(w), x
            if (norm := w.input_norm) is not None:
                normed = self.rms_norm(value(self.ws, x), norm.weight, norm.eps)
            if takes_row(x, tiled) and (norm is not None or len(ws) == 1):
                outputs.append(linear_of_row(self.ws, normed, tiled))
                continue
            if norm is not None:
                x_q, scale = quantized(self.ws, normed)
            else:
                x_q, scale = shared = shared or quantized(self.ws, x)
            y = self.ws.empty((len(x), w.shape[0]), np.float32)
            outputs.append(self._ternary.linear(x_q, scale, tiled, y))
        return tuple(outputs)

    def _stacked(self, x: NDArray, ws: Sequence[LinearWeight], stack: Stack) -> tuple[NDArray, ...]:
        """`linears` of a whole stack: one product."""
        require("linear", x.ndim == 2 and x.shape[1] == ws[0].shape[1], f"x (N, {ws[0].shape[1]})", x=x)
        if takes_row(x, stack.whole, gated=True):  # its products may be asked for as one
            pair = Pair(x, ws)
            return OfPair(pair, 0), OfPair(pair, 1)  # type: ignore[return-value]
        if takes_row(x, stack.whole):
            return stack.split(linear_of_row(self.ws, x, stack.whole), 1)
        if isinstance(stack.whole, TiledWeight):
            x_q, scale = quantized(self.ws, x)
            y = self.ws.empty((len(x), sum(stack.parts)), np.float32)
            return stack.split(self._ternary.linear(x_q, scale, stack.whole, y), len(x))
        ys = self._denses.matmul(value(self.ws, x), stack.whole)
        return tuple(y if w.bias is None else self.add(y, w.bias) for y, w in zip(ys, ws, strict=True))

    @in_kind
    def attention(self, q: NDArray, cache: KVCache, batch: TokenBatch, layer: int, window: int | None) -> NDArray:
        check_attention(q, cache, batch)
        pool = cache if isinstance(cache, DeviceKVCache) else DeviceKVCache.of(self.ws, cache)
        placed, longest = DeviceBatch.placed(self.ws, batch), pool.reach
        if not self.ws.recording:
            longest = batch.extent[1] + 1
            if layer == 0:
                pool.check(batch, window, reading=True)
        return self._attention(q, pool, placed, layer, window, longest)

    def head_candidates(self, x: NDArray, w: LinearWeight, needs: Sequence[HeadNeed]) -> list[HeadCandidates]:
        require("head_candidates", len(needs) == len(x), f"x ({len(needs)}, D), as there are needs", x=x)
        if len(needs) == 0:
            return []
        with self.running():
            step, self._replayed = self._replayed, None
            if step is not None and step[0] is x and (recorded := step[1].candidates(w, needs)) is not None:
                found, hidden, self._ahead = recorded
                self._hidden = x, hidden
                return found
            if self._hidden is not None and x is self._hidden[0]:  # the device may have gone on
                x = self._hidden[1]
            return select(self.ws, self.lm_head(self.ws.upload(x), w), needs)

    # -- helpers -------------------------------------------------------------------------------------------------------

    def _vector(self, vector: Any) -> Any:
        """A norm's weight or a bias on the device."""
        if self.ws.holds(vector):
            return vector
        known = self._vectors.get(id(vector))
        return known[1] if known is not None else self.ws.upload(_float32(vector))

    def _tiled(self, w: TernaryLinear) -> TiledWeight:
        """The weight in tiles: what `prepare` made of it, or made here for one that was not prepared."""
        if isinstance(w, TiledWeight):
            return w
        if not isinstance(w, TernaryWeight):  # another backend's
            plain = TernaryWeight.from_ternary(w.ternary(), float(w.w_dequant_scale))
            w = replace(plain, bias=w.bias, input_norm=w.input_norm)
        return self._ternary.prepare(w)

    def _dense(self, w: DenseWeight) -> DeviceDense:
        prepared = w if isinstance(w, DeviceDense) else self.prepare(DenseWeight(w.array, w.bias))
        assert isinstance(prepared, DeviceDense)
        return prepared


def _float32(vector: NDArray) -> NDArray[np.float32]:
    return np.ascontiguousarray(vector, dtype=np.float32)
