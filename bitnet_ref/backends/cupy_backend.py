"""The CUDA backend: the NumPy one with its operations as RawKernels, over weights that lie on the card.

Arrays stay on the device from the embedding to the logits. An operation answers where it was asked: given device arrays
it gives device arrays, given NumPy arrays it gives NumPy arrays (so the contract's tests, and whoever looks at a single
operation, need not know of the device). Steps between two matrix products are put off and fused, see `cupy_rows.py`.

`BITNET_REF_CUDA=emulated` runs the same kernels on the processor, compiled by the host's C++ compiler: slowly, to read,
test and debug them where there is no card (`kernels/cuda/emulated.h`).
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from .. import layers
from ..config import ModelConfig, RopeConfig
from ..errors import BackendUnavailable, NumericsError, ShapeError
from ..kv_cache import KVCache, TokenBatch
from ..weights import DenseWeight, LinearWeight, ModelWeights, TernaryLinear, TernaryWeight
from .candidates import HeadCandidates
from .cuda import Device, open_device
from .cuda.ternary import TernaryKernels, TiledWeight, padded_columns
from .cupy_cache import DeviceBatch, DeviceKVCache
from .cupy_graph import Arena, RecordedStep
from .cupy_rows import GATES, PLAIN, SUM, Normed, Rotation, Rows, Turned
from .numpy_backend import Backend, check_attention, check_dequantize, check_rope, require

DEFERRED = (Rows, Normed, Turned)
CHUNK = 128  # attention.cu: keys a block
SHARED_FLOATS = 8192  # a row longer than this waits in global memory
SCORES_BYTES = 256 << 20  # of one attention call: a long prompt is taken in parts
MOST_SELECTED = 512  # k beyond this: all logits cross the bus
MOST_REPLAYED = 64  # tokens of a recorded decoding step
SELECT_BLOCKS = 32  # that share the logits of a token
LEAST_TABLE = 256  # positions of a RoPE table
_TROUBLES = {1: "rms_norm: token {}", 2: "quantize_activations: the activation of token {}", 3: "lm_head: token {}"}


@dataclass(frozen=True, eq=False)
class DeviceDense(DenseWeight):
    """A dense matrix: `array` as the file has it, in the host's memory, and `rows`, the same on the device."""

    rows: Any = None
    kind: str = "float32"  # of `rows`: float32, float16 or bfloat16 (as its bits)


def in_kind(op: Callable) -> Callable:
    """An operation on device arrays, as one that answers where it was asked."""

    @wraps(op)
    def answer(self: CupyBackend, *args: Any, **kwargs: Any) -> Any:
        subject = next(a for a in args if isinstance(a, (*DEFERRED, np.ndarray)) or self._on_device(a))
        if isinstance(subject, DEFERRED) or self._on_device(subject):
            return op(self, *args, **kwargs)
        with self.running():
            out = op(self, *(self.upload(a) for a in args), **kwargs)
            return tuple(self.to_host(y) for y in out) if isinstance(out, tuple) else self.to_host(out)

    return answer


class CupyBackend(Backend):
    """The operations on one card. float32 is the contract; float16 and bfloat16 keep the attention cache, the head and
    dense matrices in 16 bits, multiply these by cuBLAS, and keep norms, accumulators and softmax as they are."""

    name = "cupy"
    dtypes = ("float32", "float16", "bfloat16")

    def __init__(
        self,
        dtype: str = "float32",
        threads: int | None = None,
        *,
        head: str = "auto",
        memory_limit: int | str | None = None,
        device: Any = None,
        graphs: bool = True,
    ) -> None:
        super().__init__(dtype, threads, head=head)
        self.precision = dtype  # what is kept in 16 bits, or "float32"
        self.dtype = np.dtype(np.float32)  # of every activation
        self.graphs = graphs
        self.device: Device = open_device(memory_limit=parse_bytes(memory_limit)) if device is None else device
        self._array_type: type = EmulatedArray if self.device.emulated else self.device.xp.ndarray
        self.arena: Arena | None = None  # where arrays come from while a step is recorded
        self.reach = 0  # the largest position that RoPE tables must cover
        self._kernels = TernaryKernels(self.device)
        self._lock = threading.RLock()
        self._trouble, self._done = self.zeros((1,), np.int32), self.zeros((4096,), np.int32)
        self._vectors: dict[int, tuple[NDArray, Any]] = {}  # norms and biases on the device, by the host array's id
        self._tables: dict[tuple[RopeConfig, int], tuple[Any, Any, int]] = {}  # cos, sin, positions covered

    # -- weights -------------------------------------------------------------------------------------------------------

    def prepare(self, w: LinearWeight) -> LinearWeight:
        if isinstance(w, TernaryWeight):
            return self._kernels.prepare(w)
        if type(w) is DenseWeight:
            array = np.ascontiguousarray(w.array)
            if array.dtype.name not in ("float32", "float16", "bfloat16"):
                array = array.astype(np.float32)
            if self.precision != "float32":
                array = array.astype(ml_dtypes.bfloat16 if self.precision == "bfloat16" else np.float16)
            return DeviceDense(w.array, w.bias, self.upload(_bits(array)), array.dtype.name)
        return w

    def prepare_model(self, w: ModelWeights) -> ModelWeights:
        """Everything on the card: the embedding, and the norms and biases, which it finds by the arrays they are."""
        embedding = self.prepare(w.embedding)
        assert isinstance(embedding, DenseWeight)
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
                self._vectors[id(vector)] = vector, self.upload(_float32(vector))
        return w

    # -- around a pass -------------------------------------------------------------------------------------------------

    def running(self) -> AbstractContextManager[Any]:
        return self._lock  # one stream, one set of buffers: passes of several threads take turns

    def new_cache(
        self,
        config: ModelConfig,
        slots: int,
        capacity: int,
        dtype: str | None = None,
        page_size: int | None = None,
        pages: int | None = None,
    ) -> KVCache:
        kind = np.dtype(dtype).name if dtype is not None and dtype != "bfloat16" else dtype or self.precision
        return DeviceKVCache(self, config, slots, capacity, kind, page_size=page_size, pages=pages)

    def place(self, batch: TokenBatch) -> TokenBatch:
        if isinstance(batch, DeviceBatch):
            return batch
        n = len(batch)
        wanted = batch.wanted
        if wanted is not None and len(wanted) == n and np.array_equal(wanted, np.arange(n)):
            wanted = None
        self.reach = max(self.reach, batch.extent[1])
        sheet = self.upload(np.stack([batch.tokens, batch.positions, batch.slots]).astype(np.int64))
        rows = None if wanted is None else self.upload(np.asarray(wanted, dtype=np.int64))
        return DeviceBatch(sheet[0], sheet[1], sheet[2], rows, batch)

    def to_host(self, array: NDArray) -> NDArray:
        if not isinstance(array, DEFERRED) and not self._on_device(array):
            return array
        out = self.device.to_host(self.value(array))
        self._check_trouble()
        return out

    def run(
        self, compute: Callable[..., NDArray], w: ModelWeights, cfg: ModelConfig, batch: TokenBatch, cache: KVCache
    ) -> NDArray:
        n = len(batch)
        all_wanted = batch.wanted is None or np.array_equal(batch.wanted, np.arange(n))
        if not (self.graphs and isinstance(cache, DeviceKVCache) and 0 < n <= MOST_REPLAYED and all_wanted):
            return compute(self, w, cfg, batch, cache)
        cache.check(batch, cfg.sliding_window, reading=True)
        size = 1 << (n - 1).bit_length()
        key = size, id(w)
        if key not in cache.steps:
            cache.steps[key] = RecordedStep(self, compute, w, cfg, size)
        return cache.steps[key](batch, cache)

    def close(self) -> None:
        with self._lock:
            self._vectors.clear()
            self._tables.clear()
            self.device.close()

    # -- primitives ----------------------------------------------------------------------------------------------------

    def embed(self, w: DenseWeight, tokens: NDArray[np.int64]) -> NDArray:
        if not self._on_device(tokens):
            ok = tokens.ndim == 1 and tokens.dtype.kind in "iu"
            ok = ok and (tokens.size == 0 or 0 <= tokens.min() <= tokens.max() < len(w.array))
            require("embed", ok, f"tokens (N,) of ids 0 to {len(w.array) - 1}", tokens=tokens, table=w.array)
            with self.running():
                return self.to_host(self.embed(w, self.upload(tokens.astype(np.int64))))
        table = self._dense(w)
        return self._take(table.rows, table.kind, table.shape[1], tokens)

    @in_kind
    def rms_norm(self, x: NDArray, weight: NDArray, eps: float) -> NDArray:
        require("rms_norm", x.ndim == 2 and weight.shape == x.shape[1:], "x (N, D), weight (D,)", x=x, weight=weight)
        rows = x if isinstance(x, Rows) else Rows(PLAIN, self.value(x))
        return Normed(rows, self._vector(weight), eps)  # type: ignore[return-value]

    def rope_tables(self, positions: NDArray[np.int64], rope: RopeConfig, head_dim: int) -> tuple[NDArray, NDArray]:
        if not self._on_device(positions):
            return super().rope_tables(positions, rope, head_dim)
        cos, sin = self._rope_table(rope, head_dim)
        return tuple(self._take(table, "float32", head_dim // 2, positions) for table in (cos, sin))  # type: ignore

    @in_kind
    def rope(self, q: NDArray, k: NDArray, cos: NDArray, sin: NDArray) -> tuple[NDArray, NDArray]:
        check_rope(q, k, cos, sin)
        rotation = Rotation(self.value(q), self.value(k), cos, sin)
        return Turned(rotation, True), Turned(rotation, False)  # type: ignore[return-value]

    @in_kind
    def quantize_activations(self, x: NDArray) -> tuple[NDArray[np.int8], NDArray]:
        require("quantize_activations", x.ndim == 2 and x.shape[1] > 0, "x (N, K), K > 0", x=x)
        return self._quantized(x, pad=False)

    @in_kind
    def dense_matmul(self, x: NDArray, w: DenseWeight) -> NDArray:
        require("dense_matmul", x.ndim == 2 and x.shape[1] == w.shape[1], "x (N, K) and w (out, K)", x=x, w=w.array)
        x, dense = self.value(x), self._dense(w)
        n, (out, width) = len(x), w.shape
        y = self._empty((n, out), np.float32)
        if self.precision != "float32":
            half = self._empty(x.shape, dense.rows.dtype)
            self._each("dense.cu", f"narrow_{dense.kind}", x.size, x, np.uint64(x.size), half)
            self.device.matmul(half, dense.rows, y, dense.kind)
            return y
        tokens = 1 if n == 1 else 8
        grid = (-(-out // 16), -(-n // tokens))  # 4 warps of 4 rows
        self._launch("dense.cu", f"dense_{tokens}_{dense.kind}", grid, 128, x, n, width, dense.rows, out, y)
        return y

    @in_kind
    def attention_scores(self, q: NDArray, keys: NDArray) -> NDArray:
        (heads, _), (count, kv_heads, head_dim) = q.shape, keys.shape
        stride = -(-count // CHUNK) * CHUNK
        scores = self._empty((heads, stride), np.float32)
        page = self._one_page(count)
        self._launch(
            *("attention.cu", "attention_scores_float32", (stride // CHUNK, kv_heads, 1), 128),
            *(self.value(q), keys, page[0], page[1], 1, 1, 0, heads, head_dim**-0.5, page[0], 1, count),
            *(kv_heads, head_dim, scores, stride),
            shared=heads // kv_heads * head_dim * 8,
        )
        return scores[:, :count].copy()

    @in_kind
    def softmax(self, scores: NDArray) -> NDArray:
        heads, count = scores.shape
        pattern = self._empty((heads, count), np.float32)
        self._launch("attention.cu", "softmax", (heads,), 128, scores, count, pattern)
        return pattern

    @in_kind
    def attention_values(self, pattern: NDArray, values: NDArray) -> NDArray:
        (heads, count), (_, kv_heads, head_dim) = pattern.shape, values.shape
        page, chunks = self._one_page(count), -(-count // CHUNK)
        z = self._empty((heads, head_dim), np.float32)
        parts = self._empty((chunks, heads, head_dim), np.float64)
        self._launch(
            *("attention.cu", "attention_values_float32", (chunks, kv_heads, 1), 128),
            *(pattern, count, 1, values, page[0], page[1], 1, 1, 0, heads, page[0], 1, count, kv_heads, head_dim),
            *(parts, self._counters(kv_heads), z),
            shared=heads // kv_heads * CHUNK * 4,
        )
        return z

    @in_kind
    def gated(self, gate: NDArray, up: NDArray, activation: str) -> NDArray:
        require("gated", gate.ndim == 2 and gate.shape == up.shape, "gate and up (N, F)", gate=gate, up=up)
        if activation not in GATES:
            raise ShapeError("gated", expected=f"an activation among {', '.join(GATES)}", got=repr(activation))
        return Rows(GATES[activation], self.value(gate), self.value(up))  # type: ignore[return-value]

    @in_kind
    def add(self, x: NDArray, y: NDArray) -> NDArray:
        require("add", y.shape in (x.shape, x.shape[1:]), "x (N, D) and y (N, D) or (D,)", x=x, y=y)
        x = self.value(x)
        if y.ndim == 2:
            return Rows(SUM, x, self.value(y))  # type: ignore[return-value]
        out = self._empty(x.shape, np.float32)
        self._each("rows.cu", "add_vector", x.size, x, self._vector(y), np.uint64(len(x)), x.shape[1], out)
        return out

    @in_kind
    def take_rows(self, x: NDArray, rows: NDArray[np.int64]) -> NDArray:
        x = self.value(x)
        return self._take(x, "float32", x.shape[1], rows if self._on_device(rows) else self.upload(rows))

    @in_kind
    def ternary_matmul(self, x_q: NDArray[np.int8], w: TernaryLinear) -> NDArray[np.int32]:
        if x_q.dtype != np.int8 or x_q.ndim != 2 or x_q.shape[1] != w.in_features:
            got = f"x_q {x_q.dtype} {x_q.shape}"
            raise ShapeError("ternary_matmul", expected=f"x_q int8 (M, {w.in_features})", got=got)
        acc = self._empty((len(x_q), w.shape[0]), np.int32)
        return self._kernels.matmul(x_q, self._tiled(w), acc)

    @in_kind
    def dequantize(self, acc: NDArray[np.int32], w: TernaryLinear, x_quant_scale: NDArray) -> NDArray:
        check_dequantize(acc, x_quant_scale)
        y = self._empty(acc.shape, np.float32)
        arguments = acc, np.float32(w.w_dequant_scale), x_quant_scale, np.uint64(len(acc)), acc.shape[1], y
        self._each("rows.cu", "dequantize", acc.size, *arguments)
        return y

    # -- fused ---------------------------------------------------------------------------------------------------------

    @in_kind
    def linears(self, x: NDArray, ws: Sequence[LinearWeight]) -> tuple[NDArray, ...]:
        outputs, shared = [], None
        for w in ws:
            if isinstance(w, DenseWeight):
                y = self.dense_matmul(x, w)
                y = y if w.bias is None else self.add(y, w.bias)
            else:
                assert isinstance(w, TernaryLinear)
                require("linear", x.ndim == 2 and x.shape[1] == w.in_features, f"x (N, {w.in_features})", x=x)
                if w.input_norm is not None:
                    quantized = self._quantized(self.rms_norm(self.value(x), w.input_norm.weight, w.input_norm.eps))
                else:
                    quantized = shared = shared or self._quantized(x)
                y = self._kernels.linear(*quantized, self._tiled(w), self._empty((len(x), w.shape[0]), np.float32))
            outputs.append(y)
        return tuple(outputs)

    @in_kind
    def attention(self, q: NDArray, cache: KVCache, batch: TokenBatch, layer: int, window: int | None) -> NDArray:
        check_attention(q, cache, batch)
        pool, q = self._cache(cache), self.value(q)
        placed = self.place(batch)
        if layer == 0 and not self.recording:
            pool.check(batch, window, reading=True)
            pool.copy_table()
        (n, heads, _), (kv_heads, head_dim) = q.shape, pool.keys.shape[-2:]
        longest = pool.capacity if self.recording else batch.extent[1] + 1
        stride = -(-(longest if window is None else min(longest, window)) // CHUNK) * CHUNK
        z = self._empty(q.shape, np.float32)
        step = max(1, SCORES_BYTES // max(1, heads * stride * 4))
        for start in range(0, n, step):
            part = slice(start, start + step)
            some, here = q[part], (placed.slots[part], placed.positions[part])
            each = 1 if len(some) < 32 else 8
            table = pool.table, pool.table.shape[1], pool.page_size, kv_heads, head_dim
            scores = self._scratch((len(some), heads, stride), np.float32)
            grid = (stride // CHUNK, kv_heads, -(-len(some) // each))
            self._launch(
                *("attention.cu", f"attention_scores_{pool.kind}", grid, 128, some, pool.keys[layer], *here),
                *(len(some), each, window or 0, heads, head_dim**-0.5, *table, scores, stride),
                shared=heads // kv_heads * head_dim * 8,
            )
            parts = self._scratch((len(some), heads, stride // CHUNK, head_dim), np.float64)
            self._launch(
                *("attention.cu", f"attention_values_{pool.kind}", grid, 128, scores, stride, 0, pool.values[layer]),
                *(*here, len(some), each, window or 0, heads, *table, parts),
                *(self._counters(len(some) * kv_heads), z[part]),
                shared=heads // kv_heads * CHUNK * 4,
            )
        return z

    def head_candidates(
        self, x: NDArray, w: LinearWeight, k: int | None, also: Sequence[int] = ()
    ) -> list[HeadCandidates]:
        vocab = w.shape[0]
        if k is None or k > MOST_SELECTED or k >= vocab or not len(x):
            return super().head_candidates(self.to_host(x), w, k, also)
        logits = self.lm_head(self.upload(x), w)
        n, room = len(x), 2 * k + 64
        thresholds, counts = self.zeros((n,), np.uint32), self.zeros((n,), np.int32)
        if k == 1:
            self._launch("select.cu", "largest", (SELECT_BLOCKS, n), 256, logits, vocab, thresholds, self._trouble)
        else:
            self._launch("select.cu", "kth_largest", (n,), 1024, logits, vocab, k, thresholds, self._trouble)
        ids, values = self._empty((n, room), np.int32), self._empty((n, room), np.float32)
        arguments = logits, vocab, thresholds, room, counts, ids, values
        self._launch("select.cu", "collect", (SELECT_BLOCKS, n), 256, *arguments)
        more = np.unique(np.asarray(also, dtype=np.int64))
        picked = self._empty((n, len(more)), np.float32)
        if len(more):
            grid = (-(-len(more) // 256), n)
            self._launch("select.cu", "pick", grid, 256, logits, vocab, self.upload(more), len(more), picked)
        host = [self.device.to_host(each) for each in (counts, ids, values, picked)]
        self._check_trouble()
        return [
            self._candidates(vocab, *(each[i] for each in host), more)
            if host[0][i] <= room
            else HeadCandidates(np.arange(vocab), self.device.to_host(logits[i]), vocab)  # hundreds of equal logits
            for i in range(n)
        ]

    @staticmethod
    def _candidates(
        vocab: int, count: int, ids: NDArray, values: NDArray, picked: NDArray, more: NDArray
    ) -> HeadCandidates:
        all_ids = np.concatenate([ids[:count].astype(np.int64), more])
        unique, first = np.unique(all_ids, return_index=True)
        return HeadCandidates(unique, np.concatenate([values[:count], picked])[first], vocab)

    # -- for the cache and the recorded steps --------------------------------------------------------------------------

    def write_cache(self, cache: DeviceKVCache, layer: int, batch: TokenBatch, k: Any, v: Any) -> None:
        """k and v (N, G, d) of the batch into the cache; with a k that is still to be turned, the q beside it too."""
        n, (kv_heads, head_dim) = len(batch), cache.keys.shape[-2:]
        table = cache.table, cache.table.shape[1], cache.page_size, kv_heads, head_dim
        to = cache.keys[layer], cache.values[layer]
        v = self.value(v)
        if isinstance(k, Turned) and k.rotation.k_turned is None and k.rotation.q_turned is None:
            r, heads = k.rotation, k.rotation.q.shape[1]
            r.q_turned = self._empty(r.q.shape, np.float32)
            grid = (-(-(heads + kv_heads) * (head_dim // 2) // 128), n)
            arguments = r.q, r.k, v, r.cos, r.sin, batch.slots, batch.positions, heads, *table, r.q_turned, *to
            self._launch("rope.cu", f"rope_append_{cache.kind}", grid, 128, *arguments)
            return
        grid = (-(-kv_heads * head_dim // 128), n)
        arguments = self.value(k), v, batch.slots, batch.positions, *table, *to
        self._launch("rope.cu", f"append_{cache.kind}", grid, 128, *arguments)

    def _rope_table(self, rope: RopeConfig, head_dim: int) -> tuple[Any, Any]:
        """cos and sin of every position that was placed so far, computed by NumPy; longer ones as they are needed."""
        cos, sin, covered = self._tables.get((rope, head_dim), (None, None, 0))
        if covered <= self.reach:
            covered = max(LEAST_TABLE, 1 << int(self.reach).bit_length())
            tables = layers.rope_tables(np.arange(covered), rope, head_dim, np.float32)
            cos, sin = (self.upload(table) for table in tables)
            self._tables[rope, head_dim] = cos, sin, covered
        return cos, sin

    # -- helpers -------------------------------------------------------------------------------------------------------

    def _on_device(self, array: Any) -> bool:
        return isinstance(array, self._array_type)

    def upload(self, value: Any) -> Any:
        """A host array on the device; anything else as it is."""
        if not isinstance(value, np.ndarray) or self._on_device(value):
            return value
        return self._mine(self.device.array(np.ascontiguousarray(value)))

    def _mine(self, array: Any) -> Any:
        return array.view(EmulatedArray) if self.device.emulated else array

    def make(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """A new device array, its contents unknown."""
        return self._mine(self.device.empty(shape, dtype))

    def _empty(self, shape: tuple[int, ...], dtype: Any) -> Any:
        return self.make(shape, dtype) if self.arena is None else self.arena.empty(shape, np.dtype(dtype))

    def _scratch(self, shape: tuple[int, ...], dtype: Any) -> Any:
        return self.make(shape, dtype) if self.arena is None else self.arena.scratch(shape, np.dtype(dtype))

    @property
    def recording(self) -> bool:
        """Whether what runs is a step that will be replayed: nothing may depend on this batch's lengths."""
        return self.arena is not None

    def zeros(self, shape: tuple[int, ...], dtype: Any) -> Any:
        array = self._empty(shape, dtype)
        self.device.fill(array, 0)
        return array

    def _launch(self, file: str, name: str, grid: tuple[int, ...], block: int, *args: Any, shared: int = 0) -> None:
        """grid blocks of `block` threads, unless there is nothing to do. A Python float is a double to the kernel."""
        if 0 not in grid:
            plain = [np.float64(value) if type(value) is float else value for value in args]
            self.device.kernel(file, name)(grid, block, plain, shared)

    def _each(self, file: str, name: str, count: int, *args: Any) -> None:
        """A kernel with one thread an element."""
        self._launch(file, name, (-(-count // 256),), 256, *args)

    def _take(self, table: Any, kind: str, width: int, rows: Any) -> Any:
        y = self._empty((len(rows), width), np.float32)
        self._launch("rows.cu", f"take_rows_{kind}", (len(rows),), _threads(width), table, rows, width, y)
        return y

    def value(self, x: Any) -> Any:
        """The device array itself: what was put off is computed now, once."""
        if isinstance(x, Rows):
            if x.source == PLAIN:
                return x.a
            if x.made is None:
                made = self._empty(x.shape, np.float32)
                self._rows(x, made=made)
                x.made = made
            return x.made
        if isinstance(x, Normed):
            if x.value is None:
                x.value = self._empty(x.shape, np.float32)
                self._rows(x, normed=x.value)
            return x.value
        if isinstance(x, Turned):
            r = x.rotation
            if x.is_query and r.q_turned is not None:
                return r.q_turned
            if r.k_turned is None:
                r.q_turned, r.k_turned = self._empty(r.q.shape, np.float32), self._empty(r.k.shape, np.float32)
                (n, heads, head_dim), kv_heads = r.q.shape, r.k.shape[1]
                grid = (-(-(heads + kv_heads) * (head_dim // 2) // 128), n)
                arguments = r.q, r.k, r.cos, r.sin, heads, kv_heads, head_dim, r.q_turned, r.k_turned
                self._launch("rope.cu", "rope", grid, 128, *arguments)
            return r.q_turned if x.is_query else r.k_turned
        return x

    def _quantized(self, x: Any, pad: bool = True) -> tuple[Any, Any]:
        """x_q int8 (N, K, padded to whole tiles) and x_quant_scale (N, 1), in one launch from what x is made of."""
        n, width = x.shape
        x_q = self._empty((n, padded_columns(width) if pad else width), np.int8)
        scale = self._empty((n, 1), np.float32)
        if isinstance(x, Normed) and x.value is not None:
            x = x.value
        self._rows(x if isinstance(x, Rows | Normed) else Rows(PLAIN, self.value(x)), x_q=x_q, scale=scale)
        return x_q, scale

    def _rows(self, x: Any, *, made: Any = None, normed: Any = None, x_q: Any = None, scale: Any = None) -> None:
        """One launch of rows.cu: everything from what `x` is made of to the results that are wanted."""
        of, weight, eps = (x.of, x.weight, x.eps) if isinstance(x, Normed) else (x, None, 0.0)
        n, width = of.shape
        source, a, b = (PLAIN, of.made, None) if of.made is not None else (of.source, of.a, of.b)
        if source == SUM and made is None:  # the residual stream: it is needed again
            made = of.made = self._empty(of.shape, np.float32)
        stash = self._empty((n, width), np.float32) if width > SHARED_FLOATS else None
        self._launch(
            *("rows.cu", "rows", (n,), _threads(width), source, a, b, width, weight, np.float64(eps), made, normed),
            *(x_q, scale, 0 if x_q is None else x_q.shape[1], stash, self._trouble),
            shared=0 if stash is not None else width * 4,
        )

    def _vector(self, vector: Any) -> Any:
        """A norm's weight or a bias on the device."""
        if self._on_device(vector):
            return vector
        known = self._vectors.get(id(vector))
        return known[1] if known is not None else self.upload(_float32(vector))

    def _tiled(self, w: TernaryLinear) -> TiledWeight:
        """The weight in tiles: what `prepare` made of it, or made here for one that was not prepared."""
        if isinstance(w, TiledWeight):
            return w
        return self._kernels.prepare(w if isinstance(w, TernaryWeight) else _plain(w))

    def _dense(self, w: DenseWeight) -> DeviceDense:
        prepared = w if isinstance(w, DeviceDense) else self.prepare(DenseWeight(w.array, w.bias))
        assert isinstance(prepared, DeviceDense)
        return prepared

    def _cache(self, cache: KVCache) -> DeviceKVCache:
        return cache if isinstance(cache, DeviceKVCache) else DeviceKVCache.of(self, cache)

    def _one_page(self, count: int) -> tuple[Any, Any]:
        """Slot 0, and its last position: a cache of one page, as the kernels see it."""
        zero = self.upload(np.zeros(1, dtype=np.int64))
        return zero, self.upload(np.array([count - 1], dtype=np.int64))

    def _counters(self, count: int) -> Any:
        """Zeros that the attention kernel leaves as zeros."""
        if len(self._done) < count:
            self._done = self.zeros((2 * count,), np.int32)
        return self._done

    def _check_trouble(self) -> None:
        """NumericsError when a kernel since the last time has met NaN or Inf where the reference raises it."""
        code = int(self.device.to_host(self._trouble)[0])
        if code:
            self.device.fill(self._trouble, 0)
            raise NumericsError(f"{_TROUBLES[code & 3].format(code >> 2)} holds NaN or Inf")


class EmulatedArray(np.ndarray):
    """An array of the emulated device, so that it cannot be taken for one of the host."""


def parse_bytes(limit: int | str | None) -> int | None:
    """8589934592, "8GiB" or "8 GB" as a number of bytes.

    >>> parse_bytes("1.5 GiB")
    1610612736
    """
    if limit is None or isinstance(limit, int):
        return limit
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?\s*", limit, re.IGNORECASE)
    if found is None:
        raise BackendUnavailable(f"memory_limit: expected bytes, or a text like '8GiB', got {limit!r}")
    return int(float(found[1]) * (1024 if found[3] else 1000) ** " KMGT".index(found[2].upper() or " "))


def _threads(width: int) -> int:
    """Of a block that takes a row: four elements a thread, whole warps."""
    return min(1024, max(32, -(-width // 128) * 32))


def _plain(w: TernaryLinear) -> TernaryWeight:
    """A weight that another backend has prepared."""
    return replace(
        TernaryWeight.from_ternary(w.ternary(), float(w.w_dequant_scale)), bias=w.bias, input_norm=w.input_norm
    )


def _bits(array: NDArray) -> NDArray:
    """bfloat16, which CuPy has not, as uint16"""
    return array.view(np.uint16) if array.dtype == ml_dtypes.bfloat16 else array


def _float32(vector: NDArray) -> NDArray[np.float32]:
    return np.ascontiguousarray(vector, dtype=np.float32)
