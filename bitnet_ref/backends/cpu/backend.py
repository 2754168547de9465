"""The compiled CPU backend: the NumPy one with its operations in C, over weights packed for the processor at hand.

Which instruction set runs is chosen once, by what the processor has; `BITNET_REF_SIMD` (scalar, avx2, avxvnni, avx512,
amx, neon, dotprod) forces one. `BITNET_REF_WEIGHTS` (2-bit, 1.6-bit, table) says how the weights lie, and so by which
method they are multiplied (see `kernel_manager.py`). Every set and method gives the same int32 accumulators, and
float32 results equal to NumPy's on the way to the next int8 (see `kernels/float_steps.h`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.util import find_spec
from typing import Any
from zlib import crc32

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from ...errors import BackendUnavailable, NumericsError, OutOfMemory, ShapeError
from ...reference import quantization
from ...reference.cache import KVCache, TokenBatch
from ...reference.config import ModelConfig, RopeConfig
from ...reference.layers import apply_rope
from ...reference.weights import DenseWeight, InputNorm, LinearWeight, ModelWeights, TernaryLinear, TernaryWeight
from ..backend import Backend, check_attention, check_dequantize, check_rope, require
from ..cache_dtypes import CACHE_DTYPES
from ..candidates import HeadCandidates, HeadNeed
from ..screened_head import MOST_CANDIDATES, SMALLEST_SCREENED_BYTES, ScreenedHead, surviving_rows
from .buffers import Buffers, Pool
from .deferred import PLAIN, Rotation, Turned
from .fused_pass import KernelBatch, run_fused
from .huge_pages import HugePages
from .recorded_step import MOST_RECORDED, Steps

# A thread that waits for work spins for a tenth of a millisecond, and then sleeps. libgomp lets it spin for some
# milliseconds by default, which on a machine with anything else to do takes the processor from the thread that is
# waited for: 30 times slower, measured. It reads this when it is loaded; a setting of the user's own stands.
# What it gives depends on what waking a thread costs. By GOMP_SPINCOUNT, 2 threads:
#   a Cascade Lake Xeon. Quiet, 12 layers of 2B-4T: 0: 22.1 tok/s, 3000: 22.6. Cores that others use too (load 4 to 6),
#   what a region of 150 us costs beyond its work: 0: 155 us, 1000: 166, 2000: 175, 4000: 197, 10,000: 1.1 ms,
#   100,000: 3.3 ms
#   a virtual Sapphire Rapids, where waking a sleeping processor costs 60 to 100 us. 12 layers: 0: 41 tok/s, 300: 42,
#   1000: 44, 2000: 48, 4000: 48, 20,000: 49. All 30: 0: 23, 2000: 30, without end: 31; a prompt of 64 tokens there 398
#   with 0 and 480 with 2000, storyteller's 12,000 and 17,000. Beside two programs that never sleep, 12 layers: 0: 18,
#   300: 26, 1000: 19, 2000: 24, 4000: 22, 20,000: 13.
SPIN_COUNT = 2000
_mine = "OMP_WAIT_POLICY" not in os.environ and "GOMP_SPINCOUNT" not in os.environ
if _mine:
    os.environ["GOMP_SPINCOUNT"] = str(SPIN_COUNT)
try:
    from ...kernels.cpu import _cpu  # type: ignore[attr-defined]
except ImportError as error:
    _cpu = None
    _import_error = "was not built" if find_spec("bitnet_ref.kernels.cpu._cpu") is None else f"does not load: {error}"
finally:
    if _mine:
        del os.environ["GOMP_SPINCOUNT"]


def why_unavailable() -> str | None:
    """None when the compiled extension is here, else the reason and the remedy."""
    if _cpu is not None:
        return None
    return (
        f"the compiled extension {_import_error}; install a C compiler (Debian/Ubuntu: apt install gcc; "
        "macOS: xcode-select --install) and install bitnet-ref again"
    )


@cache
def simd_variants() -> dict[str, str | None]:
    """The kernel sets in the extension, the best last, with None or what this processor lacks for them.

    A set that the processor has, but that gives other sums than the scalar one here, counts as lacking: some were
    written where no such processor was at hand.
    """
    sets = dict(_cpu.kernel_sets()) if _cpu is not None else {}
    return {name: lacks or (None if _sums_right(list(sets).index(name)) else _WRONG) for name, lacks in sets.items()}


_WRONG = "its sums are not those of the scalar kernels on this processor: please report it, with bitnet-ref doctor"


def _sums_right(number: int) -> bool:
    """Whether a kernel set multiplies like the scalar one: odd sizes, few and many tokens, the largest values."""
    dice = np.random.default_rng(0)
    for n_tokens, n_out, n_in in ((1, 70, 80), (37, 130, 1104)):
        codes = dice.integers(0, 3, (n_out, n_in), dtype=np.uint8)
        codes[0] = 2
        packed = quantization.pack_ternary(codes.view(np.int8) - np.int8(1))
        panels = np.empty((-(-n_out // _cpu.panel_rows), n_in // 16 * _cpu.block_bytes), dtype=np.uint8)
        _cpu.pack_panels(packed, panels, 1, 0)
        x_q = dice.integers(-128, 128, (n_tokens, n_in), dtype=np.int8)
        x_q[0] = 127
        x_sum = x_q.sum(axis=1, dtype=np.int32)
        right, found = (np.empty((n_tokens, n_out), dtype=np.int32) for _ in range(2))
        _cpu.ternary_matmul(x_q, x_sum, panels, right, 1, 0, 0)
        _cpu.ternary_matmul(x_q, x_sum, panels, found, 1, number, 0)
        if not np.array_equal(right, found):
            return False
    return True


def choose_simd(name: str | None = None) -> str:
    """The kernel set to run: the argument, else BITNET_REF_SIMD, else the best that this processor has."""
    variants = simd_variants()
    name = (
        name or os.environ.get("BITNET_REF_SIMD") or [variant for variant, lacks in variants.items() if not lacks][-1]
    )
    if name not in variants:
        raise BackendUnavailable(f"no kernel set is called {name!r} in this build; there are: {', '.join(variants)}")
    if variants[name] is not None:
        raise BackendUnavailable(f"the kernel set {name!r} cannot run here: {variants[name]}")
    return name


DEFAULT_LAYOUT = "2-bit"
TABLE_TOKENS = 16  # taken at once by table look-up, whose tables are 16 times as large as the activations


def layouts() -> dict[str, tuple[int, list[str]]]:
    """How weights may lie: each layout's columns in a block, and the kernel sets that can multiply by it."""
    return {name: (block_k, sets) for name, block_k, sets in _cpu.ternary_methods()} if _cpu is not None else {}


def choose_layout(name: str | None, simd: str) -> str:
    """The layout of the weights: the argument, else BITNET_REF_WEIGHTS, else 2-bit. "1.6" and "2" mean those bits."""
    name = name or os.environ.get("BITNET_REF_WEIGHTS") or DEFAULT_LAYOUT
    name = {"2": "2-bit", "1.6": "1.6-bit"}.get(name, name)
    if name not in layouts():
        raise BackendUnavailable(f"no layout of weights is called {name!r}; there are: {', '.join(layouts())}")
    if simd not in (sets := layouts()[name][1]):
        raise BackendUnavailable(
            f"the kernel set {simd!r} has no kernel for {name} weights; these sets have: {', '.join(sets)}"
        )
    return name


@dataclass(frozen=True, eq=False)
class PanelWeight(TernaryLinear):
    """A ternary matrix in panels of 64 rows. In 2-bit (`kernels/panel.h`) and table (`table_avx2.h`) layouts it is as
    large as its packed form; at 1.6 bits (`dense_avx512.h`) it is 4/5 of that."""

    panels: NDArray[np.uint8]  # (ceil(N/64), 256 ceil(K/block_k)); block_k: 16, or 20 at 1.6 bits
    out_features: int
    in_features: int
    w_dequant_scale: np.float32
    bias: NDArray[np.float32] | None = None
    input_norm: InputNorm | None = None
    layout: str = DEFAULT_LAYOUT
    kernel_view: Any = field(init=False, repr=False)  # the same, as the kernels take it

    def __post_init__(self) -> None:
        sizes = self.out_features, self.in_features
        view = _cpu.Panels(self.panels, *sizes, self.w_dequant_scale, self.bias, _number(self.layout))
        object.__setattr__(self, "kernel_view", view)

    @property
    def shape(self) -> tuple[int, int]:
        return self.out_features, self.in_features

    @property
    def nbytes(self) -> int:
        return self.panels.nbytes + sum(a.nbytes for a in (self.bias,) if a is not None)

    def ternary(self) -> NDArray[np.int8]:
        columns = -(-self.in_features // quantization.CODES_PER_BYTE)
        packed = np.empty((self.out_features, columns), dtype=np.uint8)
        _cpu.unpack_panels(self.panels, packed, _number(self.layout))
        return quantization.unpack_ternary(packed, self.in_features)


class KernelKVCache(KVCache):
    """The KV cache that a kernel appends to, and the steps that were recorded over it."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.steps = Steps(_cpu.Tape)

    def append(self, layer: int, batch: TokenBatch, k: NDArray, v: NDArray) -> None:
        self.check_extent(batch)
        right = k.shape == v.shape == (len(batch), *self.keys.shape[-2:])
        where = self.page_table, batch.slots, batch.positions
        how = batch.how if isinstance(batch, KernelBatch) else (1, 0, None)
        turning: Any = k.rotation if isinstance(k, Turned) else Rotation(None, k, None, None)
        kv, angles = (_floats(turning.k), _floats(v)), {"cos": turning.cos, "sin": turning.sin}
        if not right or _cpu.append(_kernel_layers(self)[layer], *where, *kv, *how, **angles) >= 0:
            k = k if turning.cos is None else apply_rope(turning.k, turning.cos, turning.sin)
            super().append(layer, batch, k, v)  # raises: says what is wrong


class CythonBackend(Backend):
    """NumPy's results at the speed of the memory and of the vector units. float32 only."""

    name = "cython"
    dtypes = ("float32",)
    cache_dtypes = CACHE_DTYPES
    cache_class = KernelKVCache
    weight_kinds = (PanelWeight, ScreenedHead)

    def __init__(
        self,
        dtype: str = "float32",
        threads: int | None = None,
        simd: str | None = None,
        *,
        head: str = "auto",
        layout: str | None = None,
    ) -> None:
        super().__init__(dtype, threads, head=head)
        self.simd = choose_simd(simd)
        self.layout = choose_layout(layout, self.simd)
        self._set = list(simd_variants()).index(self.simd)
        self._memory = HugePages()
        self.results: Buffers | Pool = Buffers()
        self.tape: Any = None  # where kernels leave their calls: see `recorded_step.py`
        # cos and sin of every position, for steps that are played
        self.rope_rows: dict[tuple[RopeConfig, int], tuple[NDArray, NDArray]] = {}

    def prepare(self, w: LinearWeight) -> LinearWeight:
        if not isinstance(w, TernaryWeight):
            return w
        n_out, n_in = w.shape
        block_k = layouts()[self.layout][0]
        panels = self._memory.empty((-(-n_out // _cpu.panel_rows), -(-n_in // block_k) * _cpu.block_bytes))
        _cpu.pack_panels(w.packed, panels, self.threads, _number(self.layout))
        return PanelWeight(panels, n_out, n_in, w.w_dequant_scale, w.bias, w.input_norm, self.layout)

    def prepare_model(self, w: ModelWeights) -> ModelWeights:
        """Gives the head a screen (`ScreenedHead`), half as large as its bfloat16 rows, unless it is exact or small.

        A head that is ternary, has a bias or is float16 has none: its product is not one of the kernels' own.
        """
        head = w.lm_head
        fits = type(head) is DenseWeight and head.bias is None and _kernels_take(head.array) and head.array.size > 0
        if self.head == "exact" or not fits:
            return w
        assert isinstance(head, DenseWeight)
        if self.head == "auto" and head.array.nbytes < SMALLEST_SCREENED_BYTES:
            return w
        screened = self._screened(head)
        return replace(w, lm_head=screened, embedding=screened if w.tied else w.embedding)

    def _screened(self, w: DenseWeight) -> ScreenedHead:
        """The same rows with their screen."""
        n_out, n_in = w.shape
        rows_q = self._memory.empty((n_out, -(-n_in // 64) * 64)).view(np.int8)
        facts = np.empty((n_out, 3), dtype=np.float32)
        _cpu.screen_pack(_bits(w.array), rows_q, facts, self.threads, self._set)
        return ScreenedHead(w.array, rows_q=rows_q, facts=facts)

    def prepared_layout(self) -> str:
        return f"cython {self.layout} {self.head} {_fingerprint(self.layout):08x}"

    def check_prepared(self, w: ModelWeights) -> None:
        head = w.lm_head
        if isinstance(head, ScreenedHead):
            n, k = head.shape
            expected = [(n, 3), (n, -(-k // 64) * 64)]
            got = [() if array is None else array.shape for array in (head.facts, head.rows_q)]
            if got != expected:
                raise ShapeError("check_prepared", expected=f"facts and rows_q of shapes {expected}", got=str(got))

    def running(self) -> AbstractContextManager[None]:
        return nullcontext()  # the kernels take their count with each call, and no BLAS runs beside them

    def run(
        self, compute: Callable[..., NDArray], w: ModelWeights, cfg: ModelConfig, batch: TokenBatch, cache: KVCache
    ) -> NDArray:
        if not isinstance(cache, KernelKVCache):
            return compute(self, w, cfg, batch, cache)
        if 0 < len(batch) <= MOST_RECORDED and batch.all_wanted:
            return cache.steps.run(self, compute, w, cfg, batch, cache)
        return run_fused(self, compute, w, cfg, batch, cache)

    # -- primitives ----------------------------------------------------------------------------------------------------

    def rms_norm(self, x: NDArray, weight: NDArray, eps: float) -> NDArray:
        require("rms_norm", x.ndim == 2 and weight.shape == x.shape[1:], "x (N, D), weight (D,)", x=x, weight=weight)
        y = self.results.empty(x.shape)
        if (row := _cpu.rms_norm(_floats(x), weight, eps, y, self.threads, self._set, self.tape)) >= 0:
            raise NumericsError(f"rms_norm: token {row} holds NaN or Inf")
        return y

    def rope(self, q: NDArray, k: NDArray, cos: NDArray, sin: NDArray) -> tuple[NDArray, NDArray]:
        check_rope(q, k, cos, sin)
        turned = self.results.empty(q.shape), self.results.empty(k.shape)
        for x, y in zip((q, k), turned, strict=True):
            _cpu.rope(_floats(x), cos, sin, y, self.threads, self._set, self.tape)
        return turned

    def quantize_activations(self, x: NDArray) -> tuple[NDArray[np.int8], NDArray]:
        require("quantize_activations", x.ndim == 2 and x.shape[1] > 0, "x (N, K), K > 0", x=x)
        x_q, x_quant_scale = np.empty(x.shape, dtype=np.int8), np.empty((len(x), 1), dtype=np.float32)
        if (row := _cpu.quantize(_floats(x), x_q, x_quant_scale, self._set)) >= 0:
            raise _not_finite(row)
        return x_q, x_quant_scale

    def ternary_matmul(self, x_q: NDArray[np.int8], w: TernaryLinear) -> NDArray[np.int32]:
        if x_q.dtype != np.int8 or x_q.ndim != 2 or x_q.shape[1] != w.in_features:
            got = f"x_q {x_q.dtype} {x_q.shape}"
            raise ShapeError("ternary_matmul", expected=f"x_q int8 (M, {w.in_features})", got=got)
        panels = self._panels(w)
        block_k = layouts()[panels.layout][0]
        padded = np.zeros((len(x_q), -(-w.in_features // block_k) * block_k), dtype=np.int8)
        padded[:, : w.in_features] = x_q
        acc = np.empty((len(x_q), panels.out_features), dtype=np.int32)
        x_sum = x_q.sum(axis=1, dtype=np.int32)
        for part in _parts(len(x_q), panels.layout):
            args = padded[part], x_sum[part], panels.panels, acc[part]
            _cpu.ternary_matmul(*args, self.threads, self._set, _number(panels.layout))
        return acc

    def dequantize(self, acc: NDArray[np.int32], w: TernaryLinear, x_quant_scale: NDArray) -> NDArray:
        check_dequantize(acc, x_quant_scale)
        y = np.empty(acc.shape, dtype=np.float32)
        _cpu.dequantize(acc, w.w_dequant_scale, _floats(x_quant_scale), y, self._set)
        return y

    def dense_matmul(self, x: NDArray, w: DenseWeight) -> NDArray:
        array = w.array
        if not _kernels_take(array):
            return super().dense_matmul(x, w)  # float16: NumPy widens it a block at a time
        require("dense_matmul", x.ndim == 2 and x.shape[1] == w.shape[1], "x (N, K) and w (out, K)", x=x, w=array)
        y = self.results.empty((len(x), len(array)))
        _cpu.dense_matmul(_floats(x), _bits(array), y, self.threads, self._set, self.tape)
        return y

    def gated(self, gate: NDArray, up: NDArray, activation: str) -> NDArray:
        if activation not in ("relu2", "silu"):
            return super().gated(gate, up, activation)
        require("gated", gate.ndim == 2 and gate.shape == up.shape, "gate and up (N, F)", gate=gate, up=up)
        y = self.results.empty(gate.shape)
        _cpu.gated(_floats(gate), _floats(up), activation == "silu", y, self.threads, self._set, self.tape)
        return y

    def add(self, x: NDArray, y: NDArray) -> NDArray:
        if y.shape not in (x.shape, x.shape[1:]) or (x.size < _cpu.floats_a_thread and self.tape is None):
            return super().add(x, y)
        z = self.results.empty(x.shape)
        is_bias = y.ndim == 1
        _cpu.add(_floats(x), _floats(y[None] if is_bias else y), z, self.threads, is_bias, self.tape)
        return z

    # -- fused ---------------------------------------------------------------------------------------------------------

    def linears(self, x: NDArray, ws: Sequence[LinearWeight]) -> tuple[NDArray, ...]:
        if self._in_one_call(ws):
            return self._bit_linears(x, ws)
        outputs = []
        for w in ws:
            if isinstance(w, DenseWeight):
                y = self.dense_matmul(x, w)
                outputs.append(y if w.bias is None else self.add(y, w.bias))
            else:
                panels = self._panels(w)
                if (norm := panels.input_norm) is None:
                    outputs += self._bit_linears(x, [panels])
                else:  # here and now, also in a pass that puts norms off
                    outputs += self._bit_linears(CythonBackend.rms_norm(self, x, norm.weight, norm.eps), [panels])
        return tuple(outputs)

    def attention(self, q: NDArray, cache: KVCache, batch: TokenBatch, layer: int, window: int | None) -> NDArray:
        return self._attention(q, cache, batch, layer, window)

    def _attention(
        self, q: NDArray, cache: KVCache, batch: TokenBatch, layer: int, window: int | None, **turning: NDArray
    ) -> NDArray:
        """turning: cos and sin, by which q is yet to be turned"""
        check_attention(q, cache, batch)
        z = self.results.empty(q.shape)
        where = cache.page_table, batch.slots, batch.positions, window or 0
        how = z, self.threads, self._set, self.tape
        if (i := _cpu.attention(_floats(q), _kernel_layers(cache)[layer], *where, *how, **turning)) >= 0:
            cache.visible(layer, int(batch.slots[i]), int(batch.positions[i]), window)  # raises: says what it lacks
        return z

    def head_candidates(self, x: NDArray, w: LinearWeight, needs: Sequence[HeadNeed]) -> list[HeadCandidates]:
        if not isinstance(w, ScreenedHead):
            return super().head_candidates(x, w, needs)
        require("head_candidates", x.ndim == 2 and x.shape == (len(needs), w.shape[1]), "x (needs, D)", x=x, w=w.array)
        most = MOST_CANDIDATES * len(w.array)
        screened = [(i, need.k, need.also) for i, need in enumerate(needs) if need.k is not None and need.k <= most]
        lower, upper = self._head_bounds(x, w, [i for i, _, _ in screened])
        found = {}
        for (i, k, also), low, high in zip(screened, lower, upper, strict=True):
            ids = surviving_rows(low, high, k, also)
            if len(ids) <= most:
                logits = np.empty(len(ids), dtype=np.float32)
                _cpu.dense_rows(_floats(x[i]), _bits(w.array), ids, logits, self.threads, self._set)
                found[i] = HeadCandidates(ids, logits, len(w.array), (low, high))
        if others := [i for i in range(len(x)) if i not in found]:
            whole = super().head_candidates(x[others], w, [HeadNeed()] * len(others))
            found.update(zip(others, whole, strict=True))
        return [found[i] for i in range(len(x))]

    # -- helpers -------------------------------------------------------------------------------------------------------

    def _head_bounds(
        self, x: NDArray, w: ScreenedHead, tokens: Sequence[int] | None = None
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """x (N, D), n of its rows (None: all) -> lower and upper (n, V): each logit of `lm_head` lies between them"""
        tokens = range(len(x)) if tokens is None else tokens
        lower, upper = (self.results.empty((len(tokens), len(w.array))) for _ in range(2))
        row = _cpu.screen_rows(_floats(x[list(tokens)]), w.rows_q, w.facts, lower, upper, self.threads, self._set)
        if row >= 0:
            raise NumericsError(f"head_candidates: token {tokens[row]} holds NaN or Inf")
        return lower, upper

    def _in_one_call(self, ws: Sequence[LinearWeight]) -> bool:
        """Whether `_bit_linears` takes all of them: panels, whose x is the same."""
        return all(type(w) is PanelWeight and w.input_norm is None for w in ws)

    def _bit_linears(self, x: NDArray, ws: Sequence[Any], gate: int = PLAIN, **made_of: Any) -> tuple[NDArray, ...]:
        """BitLinears of the same x, which is quantised once, in one call. made_of: what x is made into before; gate:
        what the two results are made into after."""
        for w in ws:  # 24 calls a token in a small model: nothing is formatted here unless it is wrong
            if x.ndim != 2 or x.shape[1] != w.in_features:
                require("linear", False, f"x (N, {w.in_features})", x=x)
            if w.layout != self.layout:
                self._panels(w)
        ys = tuple([self.results.empty((len(x), w.out_features)) for w in (ws if gate == PLAIN else ws[:1])])
        x, views = _floats(x), [w.kernel_view for w in ws]
        if self.layout != "table":
            self._run_linears(x, views, ys, 0, gate=gate, **made_of)
            return ys
        for part in _parts(len(x), self.layout):
            self._run_linears(x[part], views, [y[part] for y in ys], part.start)
        return ys

    def _run_linears(self, x: NDArray, views: list[Any], ys: Sequence[NDArray], first: int, **made_of: Any) -> None:
        """One call of the kernel; `first`: which token of all x[0] is."""
        try:
            row = _cpu.bit_linears(x, views, ys, self.threads, self._set, self.tape, **made_of)
        except MemoryError as error:
            raise OutOfMemory(f"linears: {error}; compute fewer tokens at a time") from error
        if row >= 0:
            raise _not_finite(first + row)

    def _panels(self, w: LinearWeight) -> PanelWeight:
        """The weight as panels: what `prepare` made of it, or made here for one that was not prepared."""
        panels = w if isinstance(w, PanelWeight) else self.prepare(w)
        assert isinstance(panels, PanelWeight)
        if panels.layout != self.layout:
            raise BackendUnavailable(
                f"weights prepared as {panels.layout} panels on a backend of {self.layout} ones; load the model with it"
            )
        return panels


def _number(layout: str) -> int:
    return list(layouts()).index(layout)


def _parts(tokens: int, layout: str) -> list[slice]:
    """The tokens that go into one call."""
    step = TABLE_TOKENS if layout == "table" else max(1, tokens)
    return [slice(start, min(tokens, start + step)) for start in range(0, tokens, step)] or [slice(0, 0)]


def _not_finite(row: int) -> NumericsError:
    return NumericsError(f"quantize_activations: the activation of token {row} holds NaN or Inf")


@cache
def _fingerprint(layout: str) -> int:
    """What panels and screens look like, as a number: other in a version that lays them out otherwise."""
    be = CythonBackend(simd="scalar", layout=layout)
    values = np.arange(80 * 80, dtype=np.float32).reshape(80, 80) % 7 - 3
    panels = be.prepare(TernaryWeight.from_ternary(np.sign(values).astype(np.int8), 1.0))
    screened = be._screened(DenseWeight(values.astype(ml_dtypes.bfloat16)))
    assert isinstance(panels, PanelWeight)
    assert screened.rows_q is not None
    assert screened.facts is not None
    number = 0
    for array in (panels.panels, screened.rows_q, screened.facts):
        number = crc32(array.tobytes(), number)
    return number


def _kernels_take(w: NDArray) -> bool:
    """Whether the dense kernels compute from this matrix as it is."""
    return w.dtype in (np.float32, ml_dtypes.bfloat16) and w.flags.c_contiguous


def _bits(w: NDArray) -> NDArray:
    """float32 as it is, bfloat16 as the uint16 that Cython can take"""
    return w if w.dtype == np.float32 else w.view(np.uint16)


def _kernel_layers(cache: KVCache) -> list[Any]:
    """The cache's layers as the kernels take them, looked at once for each cache."""
    if (made := cache.kernel_layers) is not None and made[0] is cache.keys and made[1] is cache.values:
        return made[2]
    # float16 as the uint16 that Cython can take
    keys, values = (a.view(np.uint16) if a.dtype == np.float16 else a for a in (cache.keys, cache.values))
    scales = cache.key_scales, cache.value_scales
    layers = [
        _cpu.KVLayer(keys[i], values[i], *(None if each is None else each[i] for each in scales))
        for i in range(len(keys))
    ]
    cache.kernel_layers = cache.keys, cache.values, layers
    return layers


def _floats(x: NDArray) -> NDArray[np.float32]:
    return np.ascontiguousarray(x, dtype=np.float32)
