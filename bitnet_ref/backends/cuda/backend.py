"""The CUDA backend: ops and blocks as RawKernels, over weights that lie on the device.

Ops take device arrays and return device arrays (`from_host`, `to_host`). The blocks fuse what lies between two matrix
products (`blocks.py`), and a decoding step is recorded once and replayed (`steps.py`).

`BITNET_REF_CUDA=emulated` runs the same kernels on the processor, compiled by the host's C++ compiler: slowly, to read,
test and debug them without a GPU (`kernels/cuda/emulated.h`).
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from ...errors import BackendUnavailable, ShapeError
from ...families import KINDS, family_of
from ...families.family import widest_window
from ...families.groups import GroupTernaryLinear, group_linear
from ...families.linear_norms import NormedLinear, model_norms
from ...reference.cache import KVCache, TokenBatch
from ...reference.config import ModelConfig, RopeConfig
from ...reference.layers import Array, Floats
from ...reference.model import BlockPlace, RopeTables, attention_result, final_hidden, split_heads
from ...reference.ops import check_attention, check_dequantize, check_norm, check_rope, require
from ...reference.weights import DenseWeight, LayerWeights, LinearWeight, ModelWeights, Norm, Shared, TernaryLinear
from ...system.options import BYTES
from ..backend import Backend, GreedyRun, GreedySteps, HeadNeed, HeadRows
from ..paged_cache import CACHE_DTYPES, CacheSpec, EngineKVCache
from . import open_device
from . import rows as row_kernels
from .attention import Attention, PositionTables
from .blocks import FusedLinears
from .cache import DeviceBatch, DeviceKVCache, decodes, on_device
from .dense import MAX_IN_ORDER, DenseKernels, DeviceDense
from .device import INSTALL, Device
from .footprint import working_bytes
from .groups import DeviceGroups, group_matmul, put_groups, take_group_rows, takes_groups
from .select import select
from .stacks import Stack, stack_linears, stack_of
from .steps import RecordedStep
from .ternary import TernaryKernels, TiledWeight
from .workspace import Workspace

# Tokens of a recorded step. A record keeps the intermediate arrays of the pass: for 128 tokens of 2B-4T some 0.5 GB.
# The caches of 128 sequences are many times as large.
MAX_REPLAYED = MAX_IN_ORDER
MAX_PROMPT_TOKENS = 2048  # of a pass: blocks of 128 by 128 for every multiprocessor twice, in each matrix of 2B-4T


class CupyBackend(Backend):
    """The ops on one GPU. float32 is the contract.

    float16 and bfloat16 keep the attention cache, the head and dense matrices in 16 bits. Norms, softmax, accumulators
    and activations stay in float32, with one exception: cuBLAS multiplies more than 128 tokens with a dense matrix, and
    takes activations of 16 bits. So in 16 bits a token is computed alike in any company of up to 128, as in every
    decoding step; the last bits of a longer prompt depend on the pieces that it comes in. Ternary matrices are exact in
    any case. `crossval/precision.py` measures what 16 bits cost.
    """

    name = "cupy"
    dtypes = ("float32", "float16", "bfloat16")
    cache_dtypes = CACHE_DTYPES
    paths = ("ops", "blocks", "replayed")
    takes_ruled = False

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
        """memory_limit: of the GPU's memory, bytes or "8GiB".  index: the GPU's number.  device: one that is open.
        graphs: replay decoding."""
        super().__init__(dtype, threads, head=head)
        self.precision = dtype  # of the cache, the head and dense matrices
        self.dtype = np.dtype(np.float32)  # of activations
        self.graphs = graphs
        self.index = index
        limit = BYTES.read(memory_limit, "memory_limit", BackendUnavailable)
        self.ws = Workspace(open_device(index=index, memory_limit=limit) if device is None else device)
        self.rope_positions = PositionTables(self.ws)
        self._attention, self._ternary = Attention(self.ws), TernaryKernels(self.ws)
        self._denses, self._fused = DenseKernels(self.ws, dtype), FusedLinears(self.ws, self._ternary)
        if dtype != "float32" and not self.ws.device.can_matmul_16:
            warnings.warn(f"cuBLAS is not installed, and {dtype} prompts take a slower kernel: {INSTALL}", stacklevel=2)
        self._replayed: tuple[Floats, RecordedStep] | None = None  # what `hidden` returned last, if a record did
        self._lock = threading.RLock()

    @property
    def summary(self) -> str:
        return f"{self.name} on card {self.index}"

    # -- weights -------------------------------------------------------------------------------------------------------

    def check_config(self, config: ModelConfig) -> None:
        lacks = list(family_of(config).lacks(config))
        if config.embedding_scale != 1 or config.head_scale != 1:
            lacks.append("scaled embeddings or head inputs")
        if config.activation not in row_kernels.GATES:
            lacks.append(f"the activation {config.activation}")
        if lacks:
            message = f"the backend cupy has no kernels for {' and '.join(lacks)} of {config.model_type}"
            message = f"{message}; load it with backend='cython' or 'numpy'"
            raise BackendUnavailable(message, mentions=["backend='cython'"])

    def check_mixed_adapters(self) -> None:
        message = "the backend cupy has no kernels for requests with different adapters in one batch"
        message = f"{message}; use backend='cython', or load(..., adapter=FOLDER), which puts one on all requests"
        raise BackendUnavailable(message, mentions=["backend='cython'"])

    def prepare(self, w: LinearWeight) -> LinearWeight:
        prepare = self._LAYOUTS.get(w.kind)
        if prepare is None:
            message = f"the backend cupy has no kernels for matrices {KINDS[w.kind].words.rstrip(',')}"
            raise BackendUnavailable(f"{message}: {w!r}; load it with backend='cython' or 'numpy'")
        return prepare(self, w)

    def _put_groups(self, w: GroupTernaryLinear) -> DeviceGroups | DeviceDense:
        """On the device; as a dense matrix where the kernels cannot compute from it."""
        if isinstance(w, DeviceGroups):
            return w
        return put_groups(self.ws, w.plain()) if takes_groups(w) else self._dense(w.dense())

    def _put_normed(self, w: NormedLinear) -> NormedLinear:
        return replace(w, linear=self.prepare(w.linear))

    def prepare_model(self, w: ModelWeights, cfg: ModelConfig) -> ModelWeights:
        """Puts the embedding, the norms and the biases on the device, and stacks the linears of one input."""
        embedding = self.prepare(w.embedding)
        w = replace(w, embedding=embedding, lm_head=embedding if w.tied else self.prepare(w.lm_head))
        biases = [linear.bias for _, linear in w.linears() if linear.bias is not None]
        for vector in [*(norm.weight for norm in model_norms(w)), *biases]:
            self.ws.keep_vector(vector)
        stack_linears(w.layers, (self._ternary, self._denses), self.ws.device)
        return w

    # -- a pass --------------------------------------------------------------------------------------------------------

    def hidden(
        self, w: ModelWeights, cfg: ModelConfig, batch: TokenBatch, cache: KVCache, path: str | None = None
    ) -> Floats:
        self._replayed = None
        if path == "ops":
            return final_hidden(self.op_by_op(), w, cfg, self.place(batch), cache)
        if path != "blocks" and self._may_replay(batch):
            return self._replay(w, cfg, batch, cache)
        return final_hidden(self, w, cfg, self.place(batch), cache)

    def _may_replay(self, batch: TokenBatch) -> bool:
        return self.fuses and self.graphs and 0 < len(batch) <= MAX_REPLAYED and batch.wanted is None

    def greedy_steps(
        self, w: ModelWeights, cfg: ModelConfig, batch: TokenBatch, cache: KVCache, run: GreedyRun
    ) -> GreedySteps | None:
        if not (self._may_replay(batch) and isinstance(cache, DeviceKVCache)) or cfg.logit_softcap is not None:
            return None
        if run.draws is not None:
            return None
        step: RecordedStep | None = cache.steps.get(_step_key(w, batch))
        room = cache.check_steps(batch, run.steps, run.left, widest_window(cfg))
        if step is None or room == 0:
            return None
        self._replayed = None
        return step.greedy(batch, self.lm_head, w.lm_head, replace(run, steps=room))

    def _replay(self, w: ModelWeights, cfg: ModelConfig, batch: TokenBatch, cache: KVCache) -> Floats:
        assert isinstance(cache, DeviceKVCache)
        cache.check_writes(batch)
        cache.check_reads(batch, widest_window(cfg))
        self.rope_positions.reach = max(self.rope_positions.reach, cache.reach - 1)
        key = _step_key(w, batch)
        if key not in cache.steps:
            cache.steps[key] = RecordedStep(self.ws, key[0], key[-1])
        step: RecordedStep = cache.steps[key]
        x = step(batch, lambda placed: final_hidden(self, w, cfg, placed, cache))
        self._replayed = x, step
        return x

    def head_rows(self, x: Floats, w: LinearWeight, needs: Sequence[HeadNeed]) -> list[HeadRows]:
        require("head_rows", len(needs) == len(x), f"x ({len(needs)}, D), as there are needs", x=x)
        if len(needs) == 0:
            return []
        if self._replayed is not None and self._replayed[0] is x:
            recorded = self._replayed[1].head_rows(self.lm_head, w, needs)
            if recorded is not None:
                return recorded
        return select(self.ws, self.lm_head(x, w), needs)

    @contextmanager
    def running(self) -> Iterator[None]:
        """One stream, one set of buffers: passes of several threads take turns."""
        with self._lock, self.ws.one_pass():
            yield

    def place(self, batch: TokenBatch) -> TokenBatch:
        placed = DeviceBatch.place(self.ws, batch)
        self.rope_positions.place(placed)
        return placed

    def from_host(self, array: Array) -> Array:
        return self.ws.upload(array)

    def to_host(self, array: Array) -> Array:
        return self.ws.download(array) if self.ws.holds(array) else array

    def synchronize(self) -> None:
        self.ws.device.synchronize()

    # -- memory --------------------------------------------------------------------------------------------------------

    def memory(self) -> tuple[int | None, int | None]:
        info = self.ws.device.memory()
        return info.held, info.free if info.limit is None else min(info.free, info.limit - info.used)

    def utilization(self) -> float | None:
        return self.ws.device.utilization()

    def prompt_tokens(self, config: ModelConfig) -> int:
        """As many as keep all multiprocessors busy, where their pass needs little of the free memory."""
        free = self.memory()[1] or 0
        fits = working_bytes(config, MAX_PROMPT_TOKENS, MAX_PROMPT_TOKENS) <= free // 4
        return MAX_PROMPT_TOKENS if fits else super().prompt_tokens(config)

    def new_cache(self, config: ModelConfig, spec: CacheSpec) -> EngineKVCache:
        kind = self.precision if spec.dtype is None else self.choose_cache_dtype(spec.dtype)
        return DeviceKVCache(self.ws, config, spec, kind)

    def close(self) -> None:
        with self._lock:
            self._replayed = None
            self.rope_positions.close()
            self.ws.close()
            self.ws.device.close()

    # -- blocks --------------------------------------------------------------------------------------------------------

    def attention_block(self, x: Floats, w: LayerWeights, cfg: ModelConfig, at: BlockPlace) -> Floats:
        """Products of ternary weights are fused with the norm before and the residual stream after them; RoPE and the
        append are one launch, or for decoded tokens part of attention."""
        if not self.fuses or w.attention_text is not None:
            return super().attention_block(x, w, cfg, at)
        ws = w.q_proj, w.k_proj, w.v_proj
        if (stack := self._ternary_stack(ws)) is not None:
            q, k, v = self._fused.norm_linears(x, self._norm(w.attn_norm), stack)
        else:
            q, k, v = self.linears(self.rms_norm(x, w.attn_norm), ws)
        q, k, v = split_heads(cfg, q, k, v)  # (N, H, d), (N, G, d), (N, G, d)
        z = self._attend_new(q, k, v, at, cfg.window_of(at.layer))  # (N, H, d)
        if isinstance(w.o_proj, TiledWeight):
            sub_norm = None if w.attn_sub_norm is None else self._norm(w.attn_sub_norm)
            return self._fused.norm_linear_add(z.reshape(-1, cfg.query_size), sub_norm, w.o_proj, x)  # (N, D)
        return self.add(x, attention_result(self, z, w))  # (N, D)

    def _attend_new(self, q: Floats, k: Floats, v: Floats, at: BlockPlace, window: int | None) -> Floats:
        """`rope`, `append` and `attention`.   q (N, H, d), k and v (N, G, d) -> z (N, H, d)"""
        cache, batch = on_device(at.cache, at.batch)
        if batch.decodes and cache.kind != "int8":
            cache.begin_append(batch, k, v)
            longest = self._longest(cache, batch, at.layer, window)
            return self._attention(q, cache, batch, at.layer, window, longest, (k, v, *at.rope))
        if cache.kind == "int8":
            q, k = self.rope(q, k, *at.rope)
            self.append(cache, at.layer, batch, k, v)
        else:
            q = cache.rope_append(at.layer, batch, q, k, v, at.rope)
        return self.attention(q, cache, batch, at.layer, window)

    def feed_forward(self, x: Floats, w: LayerWeights, cfg: ModelConfig) -> Floats:
        """Fused where all three linears are ternary, without a norm of their own."""
        stack = self._ternary_stack((w.gate_proj, w.up_proj))
        if (
            w.feed_forward_text is not None
            or stack is None
            or not isinstance(w.down_proj, TiledWeight)
            or cfg.activation not in row_kernels.GATES
        ):
            return super().feed_forward(x, w, cfg)
        sub_norm = None if w.ffn_sub_norm is None else self._norm(w.ffn_sub_norm)
        return self._fused.feed_forward(x, self._norm(w.ffn_norm), stack, cfg.activation, sub_norm, w.down_proj)

    def _ternary_stack(self, ws: Sequence[LinearWeight]) -> Stack | None:
        """The stack of these weights, if they are ternary and blocks may be fused."""
        stack = stack_of(ws) if self.fuses else None
        return stack if stack is not None and isinstance(stack.whole, TiledWeight) else None

    def _norm(self, norm: Norm) -> row_kernels.Norm:
        return self.ws.vector(norm.weight), norm.eps

    # -- ops -----------------------------------------------------------------------------------------------------------

    def embed(self, w: LinearWeight, tokens: NDArray[np.int64]) -> Floats:
        require("embed", tokens.ndim == 1 and tokens.dtype == np.int64, "tokens (N,) int64", tokens=tokens)
        table = self.prepare(w)
        if isinstance(table, DeviceGroups):
            return take_group_rows(self.ws, table, tokens)
        dense = self._dense(table)
        return row_kernels.take_rows(self.ws, dense.device_rows, dense.on_device.kind, tokens)

    def rms_norm(self, x: Floats, norm: Norm) -> Floats:
        check_norm(x, norm)
        return row_kernels.rms_norm(self.ws, x, self._norm(norm))

    def rope_tables(self, positions: NDArray[np.int64], rope: RopeConfig, head_dim: int) -> RopeTables:
        require("rope_tables", positions.ndim == 1, "positions (N,)", positions=positions)
        return self.rope_positions.of(positions, rope, head_dim)

    def rope(self, q: Floats, k: Floats, cos: Floats, sin: Floats) -> tuple[Floats, Floats]:
        check_rope(q, k, cos, sin)
        require("rope", 2 * cos.shape[-1] == q.shape[-1], "tables of whole heads, which the kernel turns", q=q, cos=cos)
        (n, heads, head_dim), kv_heads = q.shape, k.shape[1]
        rotated = self.ws.empty(q.shape, np.float32), self.ws.empty(k.shape, np.float32)
        grid = (-(-(heads + kv_heads) * (head_dim // 2) // 128), n)
        self.ws.launch("rope.cu", "rope", grid, 128, q, k, cos, sin, heads, kv_heads, head_dim, *rotated)
        return rotated

    def quantize_activations(self, x: Floats) -> tuple[NDArray[np.int8], Floats]:
        require("quantize_activations", x.ndim == 2 and x.shape[1] > 0, "x (N, K), K > 0", x=x)
        return row_kernels.quantize(self.ws, x, pad=False)

    def ternary_matmul(self, x_q: NDArray[np.int8], w: TernaryLinear) -> NDArray[np.int32]:
        ok = x_q.dtype == np.int8 and x_q.ndim == 2 and x_q.shape[1] == w.in_features
        require("ternary_matmul", ok, f"x_q int8 (M, {w.in_features})", x_q=x_q)
        return self._ternary.matmul(x_q, self._tiled(w))

    def dequantize(self, acc: NDArray[np.int32], w: TernaryLinear, x_quant_scale: Floats) -> Floats:
        check_dequantize(acc, x_quant_scale)
        y = self.ws.empty(acc.shape, np.float32)
        arguments = acc, np.float32(w.w_dequant_scale), x_quant_scale, np.uint64(len(acc)), acc.shape[1], y
        self.ws.each("rows.cu", "dequantize", acc.size, *arguments)
        return y

    def dense_matmul(self, x: Floats, w: LinearWeight) -> Floats:
        require("dense_matmul", x.ndim == 2 and x.shape[1] == w.shape[1], f"x (N, {w.shape[1]})", x=x)
        (y,) = self._denses.matmul(x, self._dense(w).on_device)
        return y

    def compute(self, name: str, function: Callable[..., Floats], *args: Any) -> Floats:
        if function is not group_linear:
            raise BackendUnavailable(f"the backend cupy has no kernel for {function.__name__}; use cython or numpy")
        x, w = args
        require("group_matmul", x.ndim == 2 and x.shape[1] == w.in_features, f"x (N, {w.in_features})", x=x)
        prepared = self._put_groups(w)
        if isinstance(prepared, DeviceGroups):
            return group_matmul(self.ws, x, prepared)
        return self.dense_matmul(x, prepared)

    def scale(self, x: Floats, factor: float, name: str) -> Floats:
        raise BackendUnavailable(f"the backend cupy has no kernel for scale ({name}); use cython or numpy")

    def linears(self, x: Floats, ws: Sequence[LinearWeight]) -> tuple[Floats, ...]:
        """A dense stack is one launch. Ternary products dequantise and add the bias in their epilogue."""
        stack = stack_of(ws)
        if stack is not None and not isinstance(stack.whole, TiledWeight):
            require("linear", x.ndim == 2 and x.shape[1] == ws[0].shape[1], f"x (N, {ws[0].shape[1]})", x=x)
            ys = self._denses.matmul(x, stack.whole)
            return tuple(y if w.bias is None else self.add(y, w.bias) for y, w in zip(ys, ws, strict=True))
        shared: Shared = {}
        return tuple(self._LINEARS.get(w.kind, CupyBackend.one_linear)(self, x, w, shared) for w in ws)

    def _bit_linear(self, x: Floats, w: TernaryLinear, shared: Shared, norm: row_kernels.Norm | None = None) -> Floats:
        """A BitLinear; x is normed first if there is a norm.   x (N, K) -> (N, out)"""
        require("linear", x.ndim == 2 and x.shape[1] == w.in_features, f"x (N, {w.in_features})", x=x)
        tiled = self._tiled(w)
        if self.fuses and row_kernels.takes_row(x, tiled):
            return row_kernels.linear_of_row(self.ws, x, tiled, norm)
        if "padded int8" not in shared:
            shared["padded int8"] = row_kernels.quantize(self.ws, x, norm)
        x_q, x_quant_scale = shared["padded int8"]
        return self._ternary.linear(x_q, x_quant_scale, tiled)

    def _normed_linear(self, x: Floats, w: NormedLinear, shared: Shared) -> Floats:
        own: Shared = {}
        if w.bit_linear is not None:
            return self._bit_linear(x, w.bit_linear, own, self._norm(w.own_norm))
        return self.one_linear(self.rms_norm(x, w.own_norm), w.linear, own)

    def attention(self, q: Floats, cache: KVCache, batch: TokenBatch, layer: int, window: int | None) -> Floats:
        check_attention(q, cache, batch)
        cache, batch = on_device(cache, batch)
        return self._attention(q, cache, batch, layer, window, self._longest(cache, batch, layer, window))

    def gated(self, gate: Floats, up: Floats, activation: str) -> Floats:
        require("gated", gate.ndim == 2 and gate.shape == up.shape, "gate and up (N, F)", gate=gate, up=up)
        if activation not in row_kernels.GATES:
            raise ShapeError(
                "gated", expected=f"an activation among {', '.join(row_kernels.GATES)}", got=repr(activation)
            )
        return row_kernels.gated(self.ws, gate, up, activation)

    def add(self, x: Floats, y: Floats) -> Floats:
        require("add", y.shape in (x.shape, x.shape[1:]), "x (N, D) and y (N, D) or (D,)", x=x, y=y)
        return row_kernels.add(self.ws, x, y if y.ndim == 2 else self.ws.vector(y))

    def take_rows(self, x: Floats, rows: NDArray[np.int64]) -> Floats:
        return row_kernels.take_rows(self.ws, x, "float32", rows)

    # -- helpers -------------------------------------------------------------------------------------------------------

    def _longest(self, cache: DeviceKVCache, batch: DeviceBatch, layer: int, window: int | None) -> int:
        """The max number of keys that a token of the batch may see; of a recorded step, as the cache can hold.

        Raises ShapeError where a page that the batch reads is missing.
        """
        if self.ws.recording:
            return cache.reach
        if layer == 0:  # the table does not change within a pass
            cache.check_reads(batch, window)
        return batch.extent[1] + 1

    def _tiled(self, w: TernaryLinear) -> TiledWeight:
        """The weight in tiles: what `prepare` made of it, or made now."""
        return w if isinstance(w, TiledWeight) else self._ternary.prepare(w.plain())

    def _dense(self, w: LinearWeight) -> DeviceDense:
        """A dense matrix on the device: what `prepare` made of it, or made now."""
        if isinstance(w, DeviceDense):
            return w
        if not isinstance(w, DenseWeight):
            raise BackendUnavailable(f"the backend cupy has no kernels for {w.kind} weights here: {w!r}")
        return self._denses.prepare(w)

    # By the kind of weight: its layout on the device, and its product with its bias.
    _LAYOUTS: ClassVar[dict[str, Callable[..., LinearWeight]]] = {
        "ternary": _tiled,
        "groups": _put_groups,
        "dense": _dense,
        "normed": _put_normed,
    }
    _LINEARS: ClassVar[dict[str, Callable[..., Floats]]] = {"ternary": _bit_linear, "normed": _normed_linear}


def _step_key(w: ModelWeights, batch: TokenBatch) -> tuple[int, ModelWeights, bool]:
    """Names the recorded step that computes a batch: of 1, 2, 4, ... tokens, so that few serve every number."""
    return 1 << (len(batch) - 1).bit_length(), w, decodes(batch)
