"""The compiled CPU backend: NumPy's results at the speed of the memory and of the vector units.

It uses the best instruction set of the processor; `BITNET_REF_SIMD` (scalar, avx2, avxvnni, avx512, amx, neon, dotprod)
forces one, and `BITNET_REF_WEIGHTS` (2-bit, 1.6-bit, table) a layout of the ternary weights (`extension.py`). Every set
and layout gives the same int32 accumulators, and NumPy's float32 in the steps between (`kernels/cpu/float_steps.h`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cache as memoize
from functools import partial
from itertools import groupby
from operator import attrgetter
from typing import Any, ClassVar
from zlib import crc32

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from ...errors import BackendUnavailable, NumericsError, ShapeError
from ...families.block_rule import WIDTHS, RuledLinear, RuledWeight, ruled_linear
from ...families.blocks import BlockWeight
from ...families.groups import GroupTernaryLinear, GroupTernaryWeight, group_linear
from ...families.linear_norms import NormedLinear
from ...families.lora import OnLinear, add_selected, lora_term
from ...families.moe import Experts, MoeConfig, MoeLayer, form_of
from ...reference import quantization
from ...reference.cache import KVCache, TokenBatch
from ...reference.config import ModelConfig
from ...reference.layers import Floats, Ints
from ...reference.model import BlockPlace, RopeTables, final_hidden, split_heads
from ...reference.ops import check_attention, check_dequantize, check_norm, check_rope, require
from ...reference.weights import (
    DenseWeight,
    LayerWeights,
    LinearWeight,
    ModelWeights,
    Norm,
    TernaryLinear,
    TernaryWeight,
)
from ...system.threads import check_team
from ..backend import Backend, DrawRule, GreedyRun, GreedySteps, HeadNeed, HeadRows
from ..paged_cache import CACHE_DTYPES, CacheSpec, EngineKVCache
from .extension import (
    TABLE_TOKENS,
    _cpu,
    choose_layout,
    choose_simd,
    choose_strips,
    layout_number,
    layouts,
    layouts_for,
    simd_variants,
)
from .kernels import GATES, CpuKernels, FusedWeight, Terms, as_floats
from .memory import Buffers, HugePages
from .replay import KernelBackend, KernelKVCache, RopeRows, view_layer
from .weights import (
    MAX_CANDIDATES,
    MAX_STRIP,
    MIN_SCREENED_BYTES,
    MIN_STRIPS_BYTES,
    ROWS_PER_STEP,
    GroupPanelWeight,
    PanelWeight,
    RuledPanelWeight,
    ScreenedHead,
    has_dense_kernel,
    kernels_take,
    surviving_rows,
    view_bits,
)

log = logging.getLogger(__name__)


class CythonBackend(KernelBackend):
    """Ops and blocks in C, over weights packed for the processor at hand. float32 only."""

    name = "cython"
    dtypes = ("float32",)
    cache_dtypes = CACHE_DTYPES
    paths = ("ops", "blocks", "replayed")
    weight_kinds = (PanelWeight, GroupPanelWeight, RuledPanelWeight, ScreenedHead)
    screens_head = True

    def __init__(
        self,
        dtype: str = "float32",
        threads: int | None = None,
        simd: str | None = None,
        *,
        head: str = "auto",
        layout: str | None = None,
        strips: str | None = None,
    ) -> None:
        """strips: whether up_proj and down_proj get them, "always", "never", or "auto": large ones do. Default:
        BITNET_REF_STRIPS, else "auto". See `kernels/cpu/strips.h`."""
        super().__init__(dtype, threads, head=head)
        check_team(self.threads, starts_now=False)
        self.strips = choose_strips(strips)
        self.simd = choose_simd(simd)
        self.layout = choose_layout(layout, self.simd)
        self.kernels = CpuKernels(list(simd_variants()).index(self.simd), self.threads, Buffers())
        self._memory = HugePages()
        self._rope_rows = RopeRows()

    # -- weights -------------------------------------------------------------------------------------------------------

    def prepare(self, w: LinearWeight) -> LinearWeight:
        prepare = self._LAYOUTS.get(w.kind)
        return w if prepare is None else prepare(self, w)

    def _ternary_panels(self, w: TernaryLinear) -> PanelWeight:
        """A BitLinear's weight in panels of this backend's layout, prepared already or now."""
        if isinstance(w, PanelWeight):
            if w.layout != self.layout:
                message = f"weights prepared as {w.layout} panels on a backend of {self.layout} ones"
                raise BackendUnavailable(f"{message}; load the model with it")
            return w
        n_out, n_in = w.shape
        block_k = layouts()[self.layout][0]
        panels = self._memory.empty((-(-n_out // _cpu.panel_rows), -(-n_in // block_k) * _cpu.block_bytes))
        _cpu.pack_panels(w.plain().packed, panels, self.threads, layout_number(self.layout))
        return PanelWeight(panels, n_out, n_in, w.w_dequant_scale, w.bias, self.layout, name=w.name)

    def _normed(self, w: NormedLinear) -> NormedLinear:
        return replace(w, linear=self.prepare(w.linear))

    def pack_plane(self, plane: NDArray[np.uint8]) -> NDArray[np.uint8] | None:
        quarter, k = plane.shape
        packed = np.empty((4 * quarter, -(-k // quantization.CODES_PER_BYTE)), dtype=np.uint8)
        return packed if plane.size and _cpu.pack_plane(plane, packed, self.threads) else None

    def prepare_model(self, w: ModelWeights, cfg: ModelConfig) -> ModelWeights:
        """Gives the head a screen, half as large as its 16-bit rows, unless it is exact or small; and up_proj and
        down_proj strips, as large as their panels, where ReLU^2 makes zeros.

        A head that is ternary, in blocks (a screen would be as large), has a bias or capped logits (which may be equal
        where the bounds are not) gets no screen, nor small matrices strips.
        """
        *_, last = self.prepare_in_steps(w, cfg)
        return last

    def prepare_in_steps(self, w: ModelWeights, cfg: ModelConfig) -> Iterator[ModelWeights]:
        """Each step takes some hundredths of a second. The weights change when the head's screen is whole, and when all
        layers have strips: recorded steps of a cache are recorded again for others."""
        if w.tied and w.embedding.kind != "dense":
            head = self.prepare(w.embedding)
            w = replace(w, lm_head=head, embedding=head)
        by_numpy = [n for n, each in w.linears() if isinstance(each, DenseWeight) and not has_dense_kernel(each)]
        if by_numpy:
            why = "their sums are in float64, their rows not contiguous, or their blocks without a kernel"
            log.warning("NumPy computes %d dense linears (%s, ...): %s", len(by_numpy), by_numpy[0], why)
        yield w
        head = w.lm_head
        if isinstance(head, DenseWeight) and self._screens(head) and cfg.logit_softcap is None:
            screened = self._empty_screen(head)
            for at in range(0, len(head.stored), ROWS_PER_STEP):
                self._fill_screen(screened, slice(at, at + ROWS_PER_STEP))
                yield w
            w = replace(w, lm_head=screened, embedding=screened if w.tied else w.embedding)
            yield w
        if cfg.activation == "relu2" and self._takes_strips:
            layers = []
            for layer in w.layers:
                layers.append(self._add_strips(layer))
                yield w
            yield replace(w, layers=tuple(layers))

    def _screens(self, head: DenseWeight) -> bool:
        fits = type(head) is DenseWeight and head.bias is None and kernels_take(head) and head.stored.size > 0
        if self.head == "exact" or not fits:
            return False
        return self.head == "screened" or head.nbytes >= MIN_SCREENED_BYTES

    def _add_screen(self, w: DenseWeight) -> ScreenedHead:
        screened = self._empty_screen(w)
        self._fill_screen(screened, slice(None))
        return screened

    def _empty_screen(self, w: DenseWeight) -> ScreenedHead:
        n_out, n_in = w.shape
        rows_q = self._memory.empty((n_out, -(-n_in // 64) * 64)).view(np.int8)
        facts = np.empty((n_out, 3), dtype=np.float32)
        return ScreenedHead(w.stored, name=w.name, rows_q=rows_q, facts=facts)

    def _fill_screen(self, head: ScreenedHead, rows: slice) -> None:
        places = head.rows_q[rows], head.facts[rows]
        _cpu.screen_pack(view_bits(head.stored[rows]), *places, self.threads, self.kernels.kernel_set)

    def _add_strips(self, w: LayerWeights) -> LayerWeights:
        """Strips of up_proj's rows and of down_proj's columns, for tokens that need few of them."""
        return replace(w, up_proj=self._stripped(w.up_proj, False), down_proj=self._stripped(w.down_proj, True))

    def _stripped(self, w: LinearWeight, by_columns: bool) -> LinearWeight:
        if isinstance(w, OnLinear):
            return w.each(partial(self._stripped, by_columns=by_columns))
        least = MIN_STRIPS_BYTES if self.strips == "auto" else 0
        if type(w) is not PanelWeight or w.panels.nbytes < least or max(w.shape) >= MAX_STRIP:
            return w
        count, length = reversed(w.shape) if by_columns else w.shape
        strips = self._memory.empty((count, -(-length // 256) * 64))
        _cpu.pack_strips(w.plain(self.threads).packed, strips, by_columns, self.threads)
        return replace(w, strips=strips, by_columns=by_columns)

    @property
    def _takes_strips(self) -> bool:
        return self.strips != "never" and self.layout != "table" and bool(_cpu.has_strips(self.kernels.kernel_set))

    def prepared_layout(self) -> str:
        groups = _cpu.group_layout(self.kernels.kernel_set)
        strips = " strips" if self._takes_strips else ""
        return f"cython {self.layout} {groups} {self.head}{strips} {_fingerprint(self.layout, self.simd):08x}"

    def other_layouts(self) -> dict[str, Callable[[], Backend]]:
        names = [name for name in layouts_for(self.simd) if name != self.layout]
        make = partial(CythonBackend, self.dtype.name, self.threads, self.simd, head=self.head)
        others = {name: partial(make, layout=name) for name in names}
        return {**others, "stripped": partial(make, layout=self.layout, strips="always")}

    def check_prepared(self, w: ModelWeights) -> None:
        head = w.lm_head
        if isinstance(head, ScreenedHead):
            n, k = head.shape
            expected = [("float32", (n, 3)), ("int8", (n, -(-k // 64) * 64))]
            got = [(array.dtype.name, array.shape) for array in (head.facts, head.rows_q)]
            if got != expected:
                raise ShapeError("check_prepared", expected=f"facts and rows_q of {expected}", got=str(got))

    def draw(self, logits: Floats, rule: DrawRule, uniform: float) -> int | None:
        if logits.dtype != np.float32 or not logits.flags.c_contiguous:
            return None
        token = _cpu.draw(
            logits, rule.temperature, uniform, rule.top_k, rule.top_p, rule.min_p, self.kernels.kernel_set
        )
        return None if token < 0 else token

    # -- a pass --------------------------------------------------------------------------------------------------------

    def running(self) -> AbstractContextManager[None]:
        check_team(self.threads)
        return nullcontext()  # the kernels get their thread count with each call, and no BLAS runs beside them

    def new_cache(self, config: ModelConfig, spec: CacheSpec) -> EngineKVCache:
        return KernelKVCache(config, spec, np.dtype(self.choose_cache_dtype(spec.dtype)))

    def hidden(
        self, w: ModelWeights, cfg: ModelConfig, batch: TokenBatch, cache: KVCache, path: str | None = None
    ) -> Floats:
        if path == "ops":
            return final_hidden(self.op_by_op(), w, cfg, batch, cache)
        if path != "blocks" and self._may_replay(cfg, batch) and isinstance(cache, KernelKVCache):
            x = cache.steps.hidden(self, self._rope_rows, w, cfg, batch, cache)
            if x is not None:
                return x
        return final_hidden(self, w, cfg, batch, cache)

    def _may_replay(self, cfg: ModelConfig, batch: TokenBatch) -> bool:
        return self.fuses and not cfg.has_states and len(batch) > 0

    def greedy_steps(
        self, w: ModelWeights, cfg: ModelConfig, batch: TokenBatch, cache: KVCache, run: GreedyRun
    ) -> GreedySteps | None:
        if not (self._may_replay(cfg, batch) and batch.wanted is None and isinstance(cache, KernelKVCache)):
            return None
        if isinstance(w.lm_head, ScreenedHead) or cfg.logit_softcap is not None:
            return None
        return cache.steps.greedy(self, self._rope_rows, w, cfg, batch, cache, run)

    def close(self) -> None:
        """Releases the mappings and buffers; each is freed with the last array in it."""
        self._memory, self._rope_rows = HugePages(), RopeRows()
        self.kernels = replace(self.kernels, results=Buffers())

    # -- blocks --------------------------------------------------------------------------------------------------------

    def attention_block(self, x: Floats, w: LayerWeights, cfg: ModelConfig, at: BlockPlace) -> Floats:
        ws = self._fusable(w.attention_text, w.q_proj, w.k_proj, w.v_proj, w.o_proj)
        if ws is None or not isinstance(at.cache, KernelKVCache):
            return super().attention_block(x, w, cfg, at)
        *qkv, o_proj = ws
        ys = self.kernels.linears(x, qkv, w.attn_norm, _terms(w.q_proj, w.k_proj, w.v_proj))
        q, k, v = split_heads(cfg, *ys)  # (N, H, d), (N, G, d), (N, G, d)
        self._append(at.cache, at.layer, at.batch, k, v, at.rope)
        z = self._attend(q, at.cache, at.batch, at.layer, cfg.window_of(at.layer), at.rope)  # (N, H, d)
        z = z.reshape(len(x), o_proj.in_features)  # (N, H*d)
        return self.kernels.linear_add(z, o_proj, x, w.attn_sub_norm, _terms(w.o_proj))  # (N, D)

    def feed_forward(self, x: Floats, w: LayerWeights, cfg: ModelConfig) -> Floats:
        if isinstance(w, MoeLayer) and isinstance(cfg, MoeConfig):
            return self._mixture(x, w, cfg)
        ws = self._fusable(w.feed_forward_text, w.gate_proj, w.up_proj, w.down_proj)
        if ws is None or cfg.activation not in GATES:
            return super().feed_forward(x, w, cfg)
        gate, up, down = ws
        terms = _terms(w.gate_proj, w.up_proj)
        h = self.kernels.gated_linears(x, gate, up, cfg.activation, w.ffn_norm, terms)  # (N, F)
        return self.kernels.linear_add(h, down, x, w.ffn_sub_norm, _terms(w.down_proj))  # (N, D)

    def _mixture(self, x: Floats, w: MoeLayer, cfg: MoeConfig) -> Floats:
        """The feed-forward of a mixture. All after the router in one call, if the experts have kernels for it."""
        stacks: list[Any] = [None]
        if self.fuses:
            stacks = [self._stack_experts(each) for each in (w.gate_proj, w.up_proj, w.down_proj)]
        if None not in stacks and cfg.activation in GATES and stacks[0].input_form == stacks[1].input_form:
            h = self.rms_norm(x, w.ffn_norm)  # (N, D)
            y = self.kernels.mixture(h, self.linear(h, w.router), stacks, cfg)
            if y is not None:
                return self.add(x, y)
        return super().feed_forward(x, w, cfg)

    def _stack_experts(self, w: LinearWeight) -> Any:
        """The experts as one object of the extension, made once for a weight; None if they are of other kinds."""
        layout = _cpu.group_layout(self.kernels.kernel_set)
        stacks = w.__dict__.setdefault("_stacks", {})
        if layout not in stacks:
            experts = w.experts if isinstance(w, Experts) else ()
            plain = [
                each.kernel_view
                for each in experts
                if (isinstance(each, GroupPanelWeight) and each.layout == layout and each.rotation is None)
                or isinstance(each, RuledPanelWeight)
                if each.bias is None
            ]
            alike = len(plain) == len(experts) and len({*map(form_of, experts)}) == 1
            stacks[layout] = _cpu.ExpertPanels(plain) if alike else None
        return stacks[layout]

    def _fusable(self, text: Any, *ws: LinearWeight) -> Sequence[FusedWeight] | None:
        """The weights as panels, of adapted linears those inside, where fused kernels take all; else None, and a block
        is composed of ops. text: of the layer's family; fused kernels compute those of LLaMA and BitNet.

        The last weight takes another input than those before it."""
        if not self.fuses or text is not None:
            return None
        ruled = [w for w in ws if type(w) is RuledPanelWeight and w.bias is None]
        if len(ruled) == len(ws) and len({WIDTHS[w.inputs] for w in ruled[:-1]}) == 1:
            return ruled
        if self.layout == "table":  # tables take few tokens per call
            return None
        inner = [w.linear if isinstance(w, OnLinear) else w for w in ws]
        panels = [w for w in inner if type(w) is PanelWeight and w.layout == self.layout]
        return panels if len(panels) == len(ws) else None

    # -- ops -----------------------------------------------------------------------------------------------------------

    def rms_norm(self, x: Floats, norm: Norm) -> Floats:
        check_norm(x, norm)
        return self.kernels.rms_norm(x, norm)

    def rope(self, q: Floats, k: Floats, cos: Floats, sin: Floats) -> tuple[Floats, Floats]:
        check_rope(q, k, cos, sin)
        return self.kernels.rope(q, cos, sin), self.kernels.rope(k, cos, sin)

    def quantize_activations(self, x: Floats) -> tuple[NDArray[np.int8], Floats]:
        require("quantize_activations", x.ndim == 2 and x.shape[1] > 0, "x (N, K), K > 0", x=x)
        x_q, x_quant_scale = np.empty(x.shape, dtype=np.int8), np.empty((len(x), 1), dtype=np.float32)
        if (row := _cpu.quantize(as_floats(x), x_q, x_quant_scale, self.kernels.kernel_set)) >= 0:
            raise NumericsError(f"quantize_activations: the activation of token {row} holds NaN or Inf")
        return x_q, x_quant_scale

    def ternary_matmul(self, x_q: NDArray[np.int8], w: TernaryLinear) -> NDArray[np.int32]:
        ok = x_q.dtype == np.int8 and x_q.ndim == 2 and x_q.shape[1] == w.in_features
        require("ternary_matmul", ok, f"x_q int8 (M, {w.in_features})", x_q=x_q)
        panels = self._ternary_panels(w)
        block_k = layouts()[panels.layout][0]
        padded = np.zeros((len(x_q), -(-w.in_features // block_k) * block_k), dtype=np.int8)
        padded[:, : w.in_features] = x_q
        acc = np.empty((len(x_q), panels.out_features), dtype=np.int32)
        x_sum = x_q.sum(axis=1, dtype=np.int32)
        for part in _token_parts(len(x_q), panels.layout):
            args = padded[part], x_sum[part], panels.panels, acc[part]
            _cpu.ternary_matmul(*args, self.threads, self.kernels.kernel_set, layout_number(panels.layout))
        return acc

    def dequantize(self, acc: NDArray[np.int32], w: TernaryLinear, x_quant_scale: Floats) -> Floats:
        check_dequantize(acc, x_quant_scale)
        y = np.empty(acc.shape, dtype=np.float32)
        _cpu.dequantize(acc, w.w_dequant_scale, as_floats(x_quant_scale), y, self.kernels.kernel_set)
        return y

    def dense_matmul(self, x: Floats, w: DenseWeight) -> Floats:
        require("dense_matmul", x.ndim == 2 and x.shape[1] == w.shape[1], f"x (N, {w.shape[1]})", x=x)
        return self.kernels.dense_linears(x, (w,))[0] if has_dense_kernel(w) else super().dense_matmul(x, w)

    def compute(self, name: str, function: Callable[..., Floats], *args: Any) -> Floats:
        if function is group_linear:
            x, w = args
            return self._group_linears(x, [replace(self._group_panels(w), bias=None)])[0]
        if function is ruled_linear:
            x, w = args
            return self._ruled_products(x, [w])[0]
        return function(*args)

    def compose(self, name: str, function: Callable[..., Floats], *args: Any) -> Floats:
        """Terms of adapters."""
        if function is lora_term:
            x, w = args
            y = np.zeros((len(x), w.shape[0]), dtype=np.float32)
        elif function is add_selected:
            y, x, w = args
            y = y.copy()
        else:
            return super().compose(name, function, *args)
        self._add_term(x, y, w)
        return y

    def linears(self, x: Floats, ws: Sequence[LinearWeight]) -> tuple[Floats, ...]:
        """Weights of one kind go through one call, which quantises x once."""
        outputs: list[Floats | None] = [None] * len(ws)
        inner = [w.linear if isinstance(w, OnLinear) else w for w in ws]
        for kind in dict.fromkeys(w.kind for w in inner):
            numbers = [i for i, w in enumerate(inner) if w.kind == kind]
            for i, y in zip(numbers, self._PRODUCTS[kind](self, x, [inner[i] for i in numbers]), strict=True):
                outputs[i] = y
        ys = tuple(y for y in outputs if y is not None)
        for y, w in zip(ys, ws, strict=True):
            if isinstance(w, OnLinear):
                self._add_term(x, y, w)
        return ys

    def append(self, cache: KVCache, layer: int, batch: TokenBatch, k: Floats, v: Floats) -> None:
        self._append(cache, layer, batch, k, v, None)

    def attention(self, q: Floats, cache: KVCache, batch: TokenBatch, layer: int, window: int | None) -> Floats:
        return self._attend(q, cache, batch, layer, window, None)

    def gated(self, gate: Floats, up: Floats, activation: str) -> Floats:
        if activation not in GATES:
            return super().gated(gate, up, activation)
        require("gated", gate.ndim == 2 and gate.shape == up.shape, "gate and up (N, F)", gate=gate, up=up)
        return self.kernels.gated(gate, up, activation)

    def take_rows(self, x: Floats, rows: Ints) -> Floats:
        if self.kernels.tape is None:
            return super().take_rows(x, rows)
        return self.kernels.take_rows(x, rows) if len(rows) else x[:0]

    def add(self, x: Floats, y: Floats) -> Floats:
        is_small = x.size < _cpu.floats_per_thread and self.kernels.tape is None  # NumPy's own is faster
        if is_small or y.shape not in (x.shape, x.shape[1:]):
            return super().add(x, y)
        return self.kernels.add(x, y)

    # -- the head ------------------------------------------------------------------------------------------------------

    def head_rows(self, x: Floats, w: LinearWeight, needs: Sequence[HeadNeed]) -> list[HeadRows]:
        if not isinstance(w, ScreenedHead):
            return super().head_rows(x, w, needs)
        require(
            "head_rows", x.ndim == 2 and x.shape == (len(needs), w.shape[1]), f"x ({len(needs)}, {w.shape[1]})", x=x
        )
        max_rows = MAX_CANDIDATES * w.shape[0]
        screened = [(i, need.k, need.also) for i, need in enumerate(needs) if need.k is not None and need.k <= max_rows]
        lower, upper = self._head_bounds(x, w, [i for i, _, _ in screened])
        rows: dict[int, HeadRows] = {}
        for (i, k, also), low, high in zip(screened, lower, upper, strict=True):
            ids = surviving_rows(low, high, k, also)
            if len(ids) <= max_rows:
                values = np.empty(len(ids), dtype=np.float32)
                args = as_floats(x[i]), view_bits(w.stored), ids, values
                _cpu.dense_rows(*args, self.threads, self.kernels.kernel_set)
                rows[i] = HeadRows(ids, values, (low, high))
        if others := [i for i in range(len(x)) if i not in rows]:
            complete = super().head_rows(x[others], w, [HeadNeed()] * len(others))
            rows.update(zip(others, complete, strict=True))
        return [rows[i] for i in range(len(x))]

    def _head_bounds(
        self, x: Floats, w: ScreenedHead, tokens: Sequence[int]
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """x (N, D), n of its rows -> lower and upper (n, V): bounds of each logit of `lm_head`"""
        lower, upper = (self.kernels.results.empty((len(tokens), w.shape[0])) for _ in range(2))
        args = as_floats(x[list(tokens)]), w.rows_q, w.facts, lower, upper
        if (row := _cpu.screen_rows(*args, self.threads, self.kernels.kernel_set)) >= 0:
            raise NumericsError(f"lm_head: token {tokens[row]} holds NaN or Inf")
        return lower, upper

    # -- helpers -------------------------------------------------------------------------------------------------------

    def _bit_linears(self, x: Floats, weights: Sequence[TernaryLinear]) -> Sequence[Floats]:
        """BitLinears of one x in one call, or for the table layout in one call for every few tokens."""
        ws = [self._ternary_panels(w) for w in weights]
        for w in ws:
            require("linear", x.ndim == 2 and x.shape[1] == w.in_features, f"x (N, {w.in_features})", x=x)
        if self.layout != "table" or len(x) <= TABLE_TOKENS:
            return self.kernels.linears(x, ws)
        try:
            parts = [self.kernels.linears(x[part], ws) for part in _token_parts(len(x), self.layout)]
        except NumericsError:
            self.quantize_activations(x)  # raises the error that numbers the token in x, not in its part
            raise
        return [np.concatenate(ys) for ys in zip(*parts, strict=True)]

    def _normed_linears(self, x: Floats, ws: Sequence[NormedLinear]) -> list[Floats]:
        return [self.linear(self.rms_norm(x, w.own_norm), w.linear) for w in ws]

    def _add_term(self, x: Floats, y: Floats, w: OnLinear) -> None:
        """Add an adapted linear's term to the linear's result, in place.   x (N, K), y (N, out)"""
        self.kernels.add_terms(x, y, *_term(w))

    def _ruled_panels(self, w: RuledLinear) -> RuledLinear:
        """A matrix in blocks in panels; one in 16 bits as it is."""
        if not isinstance(w, RuledWeight) or not isinstance(w.linear, BlockWeight):
            return w
        return RuledPanelWeight.pack(w.linear, self._memory)

    def _ruled_linears(self, x: Floats, ws: Sequence[RuledLinear]) -> list[Floats]:
        """Linears by ggml's rule and their biases."""
        for w in ws:
            require("ruled_linear", x.ndim == 2 and x.shape[1] == w.shape[1], f"x (N, {w.shape[1]})", x=x)
        products = self._ruled_products(x, ws)
        return [y if w.bias is None else self.add(y, w.bias) for y, w in zip(products, ws, strict=True)]

    def _ruled_products(self, x: Floats, ws: Sequence[RuledLinear]) -> list[Floats]:
        """Without biases: neighbours with equally wide blocks of inputs in one call."""
        outputs: list[Floats] = []
        for inputs, same in groupby(map(self._ruled_panels, ws), lambda w: WIDTHS.get(w.inputs) or w.inputs):
            if isinstance(inputs, str):  # float16 or bfloat16
                matrices = [replace(w.plain().linear, bias=None) for w in same]
                outputs += self._dense_linears(self.kernels.narrow(x, inputs), matrices)
            else:
                outputs += self.kernels.linears(x, [w for w in same if isinstance(w, RuledPanelWeight)])
        return outputs

    def _group_panels(self, w: GroupTernaryLinear) -> GroupPanelWeight:
        """The weight in panels for this kernel set, prepared already or now."""
        layout = _cpu.group_layout(self.kernels.kernel_set)
        if isinstance(w, GroupPanelWeight) and w.layout == layout:
            return w
        return GroupPanelWeight.pack(w.plain(), layout, self._memory, self.threads)

    def _group_linears(self, x: Floats, ws: Sequence[GroupTernaryLinear]) -> list[Floats]:
        """Linears by groups: neighbours that take one form of the input in one call."""
        outputs: list[Floats] = []
        for _, same in groupby(ws, attrgetter("input_key")):
            panels = [self._group_panels(w) for w in same]
            for w in panels:
                require("group_matmul", x.ndim == 2 and x.shape[1] == w.in_features, f"x (N, {w.in_features})", x=x)
            outputs += self.kernels.group_linears(x, panels)
        return outputs

    def _dense_linears(self, x: Floats, ws: Sequence[DenseWeight]) -> list[Floats]:
        """Dense linears and their biases: those that have a kernel in one call."""
        together = [w for w in ws if has_dense_kernel(w)]
        for w in together:
            require("dense_matmul", x.ndim == 2 and x.shape[1] == w.shape[1], f"x (N, {w.shape[1]})", x=x)
        products = iter(self.kernels.dense_linears(x, together) if together else ())
        outputs = []
        for w in ws:
            y = next(products) if has_dense_kernel(w) else self.dense_matmul(x, w)
            outputs.append(y if w.bias is None else self.add(y, w.bias))
        return outputs

    def _append(
        self, cache: KVCache, layer: int, batch: TokenBatch, k: Floats, v: Floats, rope: RopeTables | None
    ) -> None:
        """append, of k rotated first if `rope` is given"""
        if not isinstance(cache, KernelKVCache):
            super().append(cache, layer, batch, k, v)
            return
        cache.check_append(batch, k, v)
        if len(batch) and not self.kernels.append(view_layer(cache, layer), batch, k, v, rope):
            if rope is not None:
                k = super().rope(k, k, *rope)[1]
            cache.append(layer, batch, k, v)  # raises the error that says what is wrong

    def _attend(
        self, q: Floats, cache: KVCache, batch: TokenBatch, layer: int, window: int | None, rope: RopeTables | None
    ) -> Floats:
        """attention, of q rotated first if `rope` is given"""
        check_attention(q, cache, batch)
        z, missing = self.kernels.attention(q, view_layer(cache, layer), batch, window, rope)
        if missing >= 0:  # raises the error that says which page is missing
            cache.visible(layer, int(batch.slots[missing]), int(batch.positions[missing]), window)
        return z

    # By the kind of weight: its layout, and the products of several of one input with their biases.
    _LAYOUTS: ClassVar[dict[str, Callable[..., LinearWeight]]] = {
        "ternary": _ternary_panels,
        "groups": _group_panels,
        "normed": _normed,
        "ruled": _ruled_panels,
    }
    _PRODUCTS: ClassVar[dict[str, Callable[..., Sequence[Floats]]]] = {
        "ternary": _bit_linears,
        "groups": _group_linears,
        "dense": _dense_linears,
        "normed": _normed_linears,
        "ruled": _ruled_linears,
    }


def _term(w: OnLinear) -> tuple[Any, NDArray[np.int32] | None]:
    """The factors of an adapted linear, as an object of the extension, and each token's choice."""
    factors = w.__dict__.get("_factors")
    if factors is None:  # made once for a weight, which is frozen
        pairs = [None if each is None else (_factor(each.a), _factor(each.b, by_columns=True)) for each in w.terms]
        factors = w.__dict__["_factors"] = _cpu.LoraFactors(pairs)
    return factors, w.choice


def _terms(*ws: LinearWeight) -> Terms:
    if not any(isinstance(w, OnLinear) for w in ws):
        return None
    return [_term(w) if isinstance(w, OnLinear) else None for w in ws]


def _factor(w: LinearWeight, by_columns: bool = False) -> NDArray[Any]:
    """A factor of an adapter, or its transpose, as `_cpu.LoraFactors` takes it."""
    dense = w.plain()
    assert isinstance(dense, DenseWeight)
    floats = dense.stored if type(dense) is DenseWeight and dense.dtype == ml_dtypes.bfloat16 else dense.array
    floats = floats if floats.dtype == ml_dtypes.bfloat16 else floats.astype(np.float32, copy=False)
    return view_bits(np.ascontiguousarray(floats.T if by_columns else floats))


def _token_parts(tokens: int, layout: str) -> list[slice]:
    """The tokens of each call."""
    step = TABLE_TOKENS if layout == "table" else max(1, tokens)
    return [slice(start, min(tokens, start + step)) for start in range(0, tokens, step)] or [slice(0, 0)]


@memoize
def _fingerprint(layout: str, simd: str) -> int:
    """A checksum of how this version lays out panels and screens."""
    be = CythonBackend(threads=1, simd=simd, layout=layout)
    values = np.arange(80 * 80, dtype=np.float32).reshape(80, 80) % 7 - 3
    ternary = TernaryWeight.from_ternary(np.sign(values).astype(np.int8), 1.0)
    panels = be._ternary_panels(ternary)
    by_groups = be._group_panels(GroupTernaryWeight(ternary.packed, 80, np.abs(values[:, 1:3]), 64))
    in_blocks = RuledPanelWeight.pack(BlockWeight(np.full((16, 144), 3, np.uint8), block_type="Q4_K"), be._memory)
    screened = be._add_screen(DenseWeight(values.astype(ml_dtypes.bfloat16)))
    checksum = 0
    arrays = panels.panels, by_groups.panels, by_groups.scales, in_blocks.panels, screened.rows_q, screened.facts
    for array in arrays:
        checksum = crc32(array.tobytes(), checksum)
    return checksum
