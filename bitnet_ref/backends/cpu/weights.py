"""Weights as the CPU kernels take them: ternary matrices in panels, and a head with a coarse int8 copy of itself."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from ...reference import quantization
from ...reference.weights import (
    DenseWeight,
    GroupTernaryLinear,
    GroupTernaryWeight,
    InputNorm,
    Rotation,
    TernaryLinear,
    TernaryWeight,
)
from ..backend import Ids
from .extension import DEFAULT_LAYOUT, _cpu, layout_number
from .memory import HugePages

# A smaller head is read from the processor's cache, or nearly: the screen costs what it saves.
MIN_SCREENED_BYTES = 16 << 20
# Beyond this share of the rows all of them are computed: single rows come from memory more slowly than rows in order.
MAX_CANDIDATES = 1 / 8


@dataclass(frozen=True, eq=False, repr=False)
class PanelWeight(TernaryLinear):
    """A ternary matrix in panels of 64 rows. In 2-bit (`kernels/cpu/panel.h`) and table (`table_avx2.h`) layouts it is
    as large as its packed form; at 1.6 bits (`dense_avx512.h`) it is 4/5 of that."""

    panels: NDArray[np.uint8]  # (ceil(N/64), 256 ceil(K/block_k)); block_k: 16, or 20 at 1.6 bits
    out_features: int
    in_features: int
    w_dequant_scale: np.float32
    bias: NDArray[np.float32] | None = None
    input_norm: InputNorm | None = None
    layout: str = DEFAULT_LAYOUT
    kernel_view: Any = field(init=False, repr=False)  # the same as an object of the extension

    def __post_init__(self) -> None:
        sizes = self.out_features, self.in_features
        view = _cpu.Panels(self.panels, *sizes, self.w_dequant_scale, self.bias, layout_number(self.layout))
        object.__setattr__(self, "kernel_view", view)

    @property
    def shape(self) -> tuple[int, int]:
        return self.out_features, self.in_features

    @property
    def nbytes(self) -> int:
        return self.panels.nbytes + (0 if self.bias is None else self.bias.nbytes)

    def plain(self) -> TernaryWeight:
        columns = -(-self.in_features // quantization.CODES_PER_BYTE)
        packed = np.empty((self.out_features, columns), dtype=np.uint8)
        _cpu.unpack_panels(self.panels, packed, layout_number(self.layout))
        return TernaryWeight(packed, self.in_features, self.w_dequant_scale, self.bias, self.input_norm)


@dataclass(frozen=True, eq=False, repr=False)
class GroupPanelWeight(GroupTernaryLinear):
    """A matrix that is ternary by groups, in panels of 256 rows (`kernels/cpu/group.h`)."""

    panels: NDArray[np.uint8]  # (ceil(N/256), bytes)
    scales: NDArray  # (ceil(N/256) * chunks, 256), float32 or 16 bits; groups of more than 128 have several chunks
    out_features: int
    in_features: int
    group: int
    layout: int  # 0: planes, 1: tables
    bias: NDArray[np.float32] | None = None
    rotation: Rotation | None = None
    kernel_view: Any = field(init=False, repr=False)  # the same as an object of the extension

    def __post_init__(self) -> None:
        sizes = self.out_features, self.in_features, self.group, self.layout
        turn: tuple[NDArray | None, NDArray | None, int] = (None, None, 0)
        if self.rotation is not None:
            turn = self.rotation.signs, self.rotation.order, self.rotation.block
        view = _cpu.GroupPanels(self.panels, view_bits(self.scales), *sizes, self.bias, *turn)
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
        return cls(panels, scales, n, k, w.group, layout, w.bias, w.rotation)

    @property
    def shape(self) -> tuple[int, int]:
        return self.out_features, self.in_features

    @property
    def nbytes(self) -> int:
        return self.panels.nbytes + self.scales.nbytes + (0 if self.bias is None else self.bias.nbytes)

    @property
    def dtype(self) -> np.dtype:
        return self.scales.dtype

    def packed_rows(self, index: Any) -> tuple[NDArray[np.uint8], NDArray]:
        ids = np.arange(self.out_features)[index]
        packed = np.empty((len(ids), -(-self.in_features // quantization.CODES_PER_BYTE)), dtype=np.uint8)
        self.kernel_view.rows(ids, packed)
        _, _, chunks, per_group, rows = _cpu.group_sizes(*self.shape, self.group, self.layout)
        by_panel = self.scales.reshape(-1, chunks, rows)[:, ::per_group]
        return packed, np.ascontiguousarray(by_panel[ids // rows, :, ids % rows])


@dataclass(frozen=True, eq=False, repr=False)
class ScreenedHead(DenseWeight):
    """A head with a second, coarser copy of itself in int8, whose bounds prove which rows need a closer look.

    `kernels/cpu/head_screen.h` says what the copy holds and why its bounds are certain. With them:

        the k-th largest lower bound is a floor under the k-th largest logit;
        a row whose upper bound is below that floor is neither among the k largest nor equal to the k-th;
        the other rows, some tens of 128,256, are computed from the weights exactly as `lm_head` computes all of them.
    """

    rows_q: NDArray[np.int8] | None = None  # (V, D, padded to a multiple of 64)
    facts: NDArray[np.float32] | None = None  # (V, 3): scale and norms, see head_screen.h

    @property
    def screen_nbytes(self) -> int:
        """Bytes read to screen one token."""
        assert self.rows_q is not None
        assert self.facts is not None
        return self.rows_q.nbytes + self.facts.nbytes

    @property
    def nbytes(self) -> int:
        return super().nbytes + self.screen_nbytes


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


def kernels_take(w: NDArray) -> bool:
    """Whether the dense kernels compute from this matrix as it is: contiguous float32, bfloat16 or float16."""
    return w.dtype in KERNEL_DTYPES and w.flags.c_contiguous


def view_bits(w: NDArray) -> NDArray:
    """float32 as it is; bfloat16 as the uint16, and float16 as the int16, that Cython takes."""
    return w if w.dtype == np.float32 else w.view(np.int16 if w.dtype == np.float16 else np.uint16)
