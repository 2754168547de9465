"""Weights as the CPU kernels take them: ternary matrices in panels, and a head with a coarse int8 copy of itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from numpy.typing import DTypeLike, NDArray

from ...errors import NumericsError
from ...families.block_rule import INPUTS, RuledLinear, RuledWeight, round_inputs
from ...families.blocks import INVERSES, BlockIntegers, BlockWeight, block_type
from ...families.groups import GroupLayout, GroupTernaryWeight
from ...reference import quantization
from ...reference.layers import Array, Floats
from ...reference.weights import DenseWeight, ModelWeights, TernaryLinear, TernaryWeight
from ..backend import Ids
from .extension import DEFAULT_LAYOUT, _cpu, layout_number
from .memory import HugePages

# A smaller head is read from the processor's cache, or nearly: the screen costs what it saves.
MIN_SCREENED_BYTES = 16 << 20
# Smaller matrices stay in the processor's cache, where reading all of them in order costs no more.
MIN_STRIPS_BYTES = 1 << 20
PACKED_VALUES = 1 << 20  # of a matrix in blocks, at a time
ROWS_PER_STEP = 1 << 13  # of a head whose screen is made in steps
MAX_STRIP = 1 << 17  # rows, and columns: the kernels' sums fit int32
# Beyond this share of the rows all of them are computed: single rows come from memory more slowly than rows in order.
MAX_CANDIDATES = 1 / 8


class StripUse(NamedTuple):
    """Rows, or columns, of a matrix with strips, summed over tokens: those that met no zero, those that were read (of
    calls with several tokens: multiplied), and all."""

    tokens: int
    needed: int
    read: int
    total: int

    @property
    def skipped(self) -> float:
        """The share that was not read, or not multiplied."""
        return 1 - self.read / self.total if self.total else 0.0

    def since(self, earlier: StripUse) -> StripUse:
        return StripUse(*(now - before for now, before in zip(self, earlier, strict=True)))


def strip_uses(w: ModelWeights, several: bool = False) -> dict[str, StripUse]:
    """`PanelWeight.use` of every linear that has one, by name."""
    uses = ((name, weight.use(several)) for name, weight in _panels_of(w))
    return {name: use for name, use in uses if use is not None}


def strip_bytes(w: ModelWeights) -> int:
    """Bytes of all strips."""
    return sum(weight.strips.nbytes for _, weight in _panels_of(w) if weight.strips is not None)


def _panels_of(w: ModelWeights) -> Iterator[tuple[str, PanelWeight]]:
    for name, linear in w.linears():
        if isinstance(panels := linear.bit_linear, PanelWeight):
            yield name, panels


def mean_skipped(uses: Mapping[str, StripUse], linear: str) -> float:
    """The share of `linear` ("up_proj") that was not read, or not multiplied, in the layers that were used."""
    skipped = [use.skipped for name, use in uses.items() if name.endswith(linear) and use.tokens]
    return sum(skipped) / max(1, len(skipped))


@dataclass(frozen=True, eq=False, repr=False)
class PanelWeight(TernaryLinear):
    """A ternary matrix in panels of 64 rows. In 2-bit (`kernels/cpu/panel.h`) and table (`table_avx2.h`) layouts it is
    as large as its packed form; at 1.6 bits (`dense_avx512.h`) it is 4/5 of that."""

    panels: NDArray[np.uint8]  # (ceil(N/64), 256 ceil(K/block_k)); block_k: 16, or 20 at 1.6 bits
    out_features: int
    in_features: int
    w_dequant_scale: np.float32
    bias: NDArray[np.float32] | None = None
    layout: str = DEFAULT_LAYOUT
    strips: NDArray[np.uint8] | None = None  # of its rows or columns, each in one piece: `kernels/cpu/strips.h`
    by_columns: bool = False
    name: str = ""
    kernel_view: Any = field(init=False, repr=False)  # the same as an object of the extension

    def __post_init__(self) -> None:
        sizes = self.out_features, self.in_features
        layout = layout_number(self.layout)
        view = _cpu.Panels(self.panels, *sizes, self.w_dequant_scale, self.bias, layout, self.strips, self.by_columns)
        object.__setattr__(self, "kernel_view", view)

    @property
    def shape(self) -> tuple[int, int]:
        return self.out_features, self.in_features

    @property
    def kernel(self) -> Any:
        """The extension's call that multiplies by several of these."""
        return _cpu.bit_linears

    def refuse(self, row: int, inputs: Callable[[], Floats]) -> None:
        """Raise the error of a call that found NaN or Inf in this row of its inputs."""
        raise NumericsError(f"quantize_activations: the activation of token {row} holds NaN or Inf")

    def use(self, several: bool = False) -> StripUse | None:
        """What calls with one token (several: with several tokens) have needed of it; None without strips."""
        return None if self.strips is None else StripUse(*self.kernel_view.counts.read(several))

    @property
    def bytes_of_token(self) -> int:
        """Bytes read for one token, as the calls so far needed them."""
        skipped = 0.0 if (use := self.use()) is None else use.skipped
        return round(self.panels.nbytes * (1 - skipped)) + (0 if self.bias is None else self.bias.nbytes)

    @property
    def multiply_adds_of_token(self) -> int:
        """Multiply-adds for one of several tokens, as the calls so far needed them."""
        skipped = 0.0 if (use := self.use(several=True)) is None else use.skipped
        return round(self.out_features * self.in_features * (1 - skipped))

    def plain(self, threads: int = 1) -> TernaryWeight:
        columns = -(-self.in_features // quantization.CODES_PER_BYTE)
        packed = np.empty((self.out_features, columns), dtype=np.uint8)
        _cpu.unpack_panels(self.panels, packed, threads, layout_number(self.layout))
        return TernaryWeight(packed, self.in_features, self.w_dequant_scale, self.bias, self.name)


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class GroupPanelWeight(GroupLayout):
    """A matrix that is ternary by groups, in panels of equally many rows, R (`kernels/cpu/group.h`)."""

    panels: NDArray[np.uint8]  # (ceil(N/R), bytes)
    scales: Floats  # (ceil(N/R) * chunks, R), float32 or 16 bits; groups of more than 128 have several chunks
    out_features: int
    layout: int  # 0: planes, 1: tables
    kernel_view: Any = field(init=False, repr=False)  # the same as an object of the extension

    def __post_init__(self) -> None:
        sizes = self.out_features, self.in_features, self.group, self.layout
        view = _cpu.GroupPanels(self.panels, view_bits(self.scales), *sizes, self.bias, *self.turn)
        object.__setattr__(self, "kernel_view", view)

    @classmethod
    def pack(cls, w: GroupTernaryWeight, layout: int, memory: HugePages, threads: int) -> GroupPanelWeight:
        """The weight in panels of that layout, in `memory`."""
        n, k = w.shape
        count, size, chunks, per_group, rows = _cpu.group_sizes(n, k, w.group, layout)
        panels = memory.empty((count, size))
        _cpu.group_pack_panels(np.ascontiguousarray(w.packed), k, w.group, layout, panels, threads)
        dtype = w.dtype if w.dtype in KERNEL_DTYPES else np.dtype(np.float32)
        scales = memory.empty((count * chunks, rows * dtype.itemsize)).view(dtype)
        by_panel = scales.reshape(count, chunks, rows)
        by_panel[-1] = 0
        for panel in range(count):
            some = np.repeat(w.scales[panel * rows : (panel + 1) * rows], per_group, axis=1)
            by_panel[panel, :, : len(some)] = some.T
        return cls.of(w, panels=panels, scales=scales, out_features=n, layout=layout)

    @property
    def shape(self) -> tuple[int, int]:
        return self.out_features, self.in_features

    @property
    def dtype(self) -> np.dtype:
        return self.scales.dtype

    def packed_rows(self, index: Any) -> tuple[NDArray[np.uint8], Floats]:
        ids = np.arange(self.out_features)[index]
        packed = np.empty((len(ids), -(-self.in_features // quantization.CODES_PER_BYTE)), dtype=np.uint8)
        self.kernel_view.rows(ids, packed)
        _, _, chunks, per_group, rows = _cpu.group_sizes(*self.shape, self.group, self.layout)
        by_panel = self.scales.reshape(-1, chunks, rows)[:, ::per_group]
        return packed, np.ascontiguousarray(by_panel[ids // rows, :, ids % rows])


# Types of a matrix -> the number of their form in kernels/cpu/ruled_steps.h
_FORMS = (
    ("Q8_0",),
    ("Q4_0",),
    ("Q4_1",),
    ("Q5_0",),
    ("Q2_0", "Q1_0"),
    ("Q4_K",),
    ("Q5_K",),
    ("Q6_K",),
    ("TQ1_0", "TQ2_0"),
)
RULED_FORMS = {kind: number for number, kinds in enumerate(_FORMS) for kind in kinds}


@dataclass(frozen=True, eq=False, repr=False)
class RuledPanelWeight(RuledLinear):
    """A matrix in blocks for ggml's rule, in panels of 16 rows (`kernels/cpu/ruled_steps.h`), which hold all of it."""

    panels: NDArray[np.uint8]  # (ceil(N/16), bytes)
    block_type: str
    out_features: int
    in_features: int
    bias: NDArray[np.float32] | None = None
    name: str = ""
    kernel_view: Any = field(init=False, repr=False)  # the same as an object of the extension

    def __post_init__(self) -> None:
        view = _cpu.RuledPanels(self.panels, RULED_FORMS[self.block_type], *self.shape)
        object.__setattr__(self, "kernel_view", view)

    @classmethod
    def pack(cls, matrix: BlockWeight, memory: HugePages) -> RuledPanelWeight:
        """The weight in panels, in `memory`."""
        rows, form = _cpu.ruled_rows, _cpu.ruled_forms()[RULED_FORMS[matrix.block_type]]
        (n, k), (_, _, block, *_, size) = matrix.shape, form
        panels = memory.empty((-(-n // rows), k // block * size))
        step = max(1, PACKED_VALUES // (rows * k))  # panels at a time
        for start in range(0, len(panels), step):
            stored = matrix.stored[start * rows : (start + step) * rows]
            if missing := -len(stored) % rows:
                stored = np.concatenate([stored, np.zeros((missing, stored.shape[1]), dtype=np.uint8)])
            panels[start : start + step] = _ruled_panels(matrix, stored, form)
        return cls(panels, matrix.block_type, n, k, matrix.bias, matrix.name)

    @property
    def inputs(self) -> str:
        return INPUTS[self.block_type]

    @property
    def kernel(self) -> Any:
        """The extension's call that multiplies by several of these."""
        return _cpu.ruled_linears

    def refuse(self, row: int, inputs: Callable[[], Floats]) -> None:
        """Raise the error of a call that found such a row of its inputs, if this weight cannot take it."""
        round_inputs(inputs(), self.inputs)

    @property
    def shape(self) -> tuple[int, int]:
        return self.out_features, self.in_features

    def rows(self, index: Any, dtype: DTypeLike) -> Floats:
        ids = np.arange(self.out_features)[index]
        return self._integers(ids).floats.reshape(len(ids), self.in_features).astype(dtype, copy=False)

    def plain(self) -> RuledWeight:
        (n, k), block = self.shape, block_type(self.block_type)
        stored = np.empty((n, k // block.values * block.nbytes), dtype=np.uint8)
        step = max(1, PACKED_VALUES // k)
        for start in range(0, n, step):
            ids = np.arange(start, min(n, start + step))
            parts = INVERSES[self.block_type](self._integers(ids))
            stored[start : start + step] = np.concatenate(parts, axis=1).reshape(len(ids), -1)
        return RuledWeight(BlockWeight(stored, self.bias, name=self.name, block_type=self.block_type))

    def _integers(self, ids: NDArray[np.int64]) -> BlockIntegers:
        """The blocks of some rows.   ids (n,) -> n K / values blocks"""
        values = block_type(self.block_type).values
        bits, offset, block, scaled, term, size = _cpu.ruled_forms()[RULED_FORMS[self.block_type]]
        rows, units = _cpu.ruled_rows, self.in_features // block
        by_unit, panel, row = self.panels.reshape(-1, units, size), ids // rows, ids % rows
        at = block * bits * rows // 8
        codes = by_unit[:, :, :at].reshape(-1, units, block // 32, 1, bits, rows, 4)[panel, :, :, :, :, row]
        codes = codes >> _shifts(bits)[:, None, None] & np.uint8((1 << bits) - 1)
        q = (codes - np.uint8(offset)).view(np.int8).reshape(-1, values)  # the difference wraps

        def following(count: int, dtype: DTypeLike) -> Any:
            """The next `count` numbers of each unit.   -> (blocks, numbers)"""
            nonlocal at
            start, at = at, at + count * rows * np.dtype(dtype).itemsize
            by_row = by_unit[:, :, start:at].view(dtype).reshape(-1, units, count, rows)[panel, :, :, row]
            return by_row[:, :: max(1, values // block)].reshape(-1, count)  # a unit is a part of a larger block

        d = following(1, np.float16).astype(np.float32)
        e = following(1, np.float16).astype(np.float32) if term else None
        s = following(block // scaled, np.int8 if self.block_type == "Q6_K" else np.uint8) if scaled else None
        m = following(block // 32, np.uint8) if term == 2 else np.ones(d.shape, dtype=np.int8)
        return BlockIntegers(d, q, s, e, m)


def _shifts(bits: int) -> NDArray[np.uint8]:
    """Where codes begin that share a byte."""
    return np.arange(0, 8, bits, dtype=np.uint8)


def _ruled_panels(matrix: BlockWeight, stored: NDArray[np.uint8], form: tuple[int, ...]) -> NDArray[np.uint8]:
    """Some rows as panels (see ruled_steps.h).   stored (P * 16, bytes of a row) -> (P, bytes of a panel)"""
    bits, offset, block, _, term, _ = form
    integers = matrix.block.integers(stored.reshape(-1, matrix.block.nbytes))
    rows, units = _cpu.ruled_rows, matrix.shape[1] // block
    panels = len(stored) // rows
    codes = (integers.q.astype(np.int16) + offset).astype(np.uint8)
    codes = codes.reshape(panels, rows, units, block // 32, 8 // bits, bits, 4).transpose(0, 2, 3, 4, 5, 1, 6)
    codes = np.bitwise_or.reduce(codes << _shifts(bits)[:, None, None, None], axis=3)
    parts = [codes.reshape(panels, units, -1)]
    d, e = (None if each is None else each.astype(np.float16) for each in (integers.d, integers.e))
    for values in (d, e, integers.s, integers.m if term == 2 else None):
        if values is not None:
            by_row = values.reshape(panels, rows, -1)
            by_row = np.repeat(by_row, max(1, units // by_row.shape[2]), axis=2)  # a unit is a part of a larger block
            by_unit = by_row.reshape(panels, rows, units, -1).transpose(0, 2, 3, 1)
            parts.append(np.ascontiguousarray(by_unit).view(np.uint8).reshape(panels, units, -1))
    return np.concatenate(parts, axis=2).reshape(panels, -1)


@dataclass(frozen=True, eq=False, repr=False)
class ScreenedHead(DenseWeight):
    """A head with a second, coarser copy of itself in int8, whose bounds prove which rows need a closer look.

    `kernels/cpu/head_screen.h` says what the copy holds and why its bounds are certain. With them:

        the k-th largest lower bound is a floor under the k-th largest logit;
        a row whose upper bound is below that floor is neither among the k largest nor equal to the k-th;
        the other rows, some tens of 128,256, are computed from the weights exactly as `lm_head` computes all of them.
    """

    rows_q: NDArray[np.int8] = field(kw_only=True)  # (V, D, padded to a multiple of 64)
    facts: NDArray[np.float32] = field(kw_only=True)  # (V, 3): scale and norms, see head_screen.h

    @property
    def screen_nbytes(self) -> int:
        """Bytes read to screen one token."""
        return self.rows_q.nbytes + self.facts.nbytes


def surviving_rows(lower: NDArray[np.float32], upper: NDArray[np.float32], k: int, also: Ids = ()) -> NDArray[np.int64]:
    """The ids that may be among the k largest logits, or equal to the k-th, and those of `also`, ascending.

    lower, upper (V,): bounds of each logit.

    >>> lower, upper = np.array([1, 2, 5, 0], np.float32), np.array([3, 4, 6, 5], np.float32)
    >>> surviving_rows(lower, upper, 1).tolist(), surviving_rows(lower, upper, 2, also=[0]).tolist()
    ([2, 3], [0, 1, 2, 3])
    """
    floor = lower.max() if k == 1 else np.partition(lower, -k)[-k]
    survives = upper >= floor
    survives[list(also)] = True
    return np.flatnonzero(survives)


KERNEL_DTYPES = (np.float32, ml_dtypes.bfloat16, np.float16)


def kernels_take(w: DenseWeight) -> bool:
    """Whether the dense kernels compute from this matrix as it is: contiguous blocks, float32, bfloat16 or float16."""
    known = w.block.number is not None if isinstance(w, BlockWeight) else w.dtype in KERNEL_DTYPES
    return known and w.stored.flags.c_contiguous


def embedding_table(w: ModelWeights) -> DenseWeight | None:
    """The matrix whose rows are the embeddings, if kernels can read them."""
    table = w.embedding.linear if isinstance(w.embedding, RuledWeight) else w.embedding
    return table if type(table) is DenseWeight and kernels_take(table) else None


def has_dense_kernel(w: DenseWeight) -> bool:
    """Whether the kernels multiply by it: they sum in float32, so not among ternary linears, where sums are float64."""
    return not w.wide and kernels_take(w)


def view_bits(w: Array) -> Array:
    """float32 and bytes as they are; bfloat16 as the uint16, and float16 as the int16, that Cython takes."""
    return w if w.dtype in (np.float32, np.uint8) else w.view(np.int16 if w.dtype == np.float16 else np.uint16)
