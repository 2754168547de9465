"""Host side of `kernels/cuda/dense.cu`: matrices that are not quantised, on the device in 32 or 16 bits.

The kernels sum in one order for any number of tokens, as the contract asks, and lose nothing of float32 activations.
For 16-bit weights that costs three tensor core products in place of one. So where the user asked for 16 bits, cuBLAS
multiplies more tokens than a recorded step has (`Device.matmul_16`), with activations rounded to the same 16 bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import DTypeLike

from ...errors import ShapeError
from ...families.lora import LinearAround
from ...reference.layers import Array, Floats
from ...reference.ops import Ops
from ...reference.weights import DenseWeight, Shared
from .device import DeviceArray
from .stacks import MAX_STACKED, Member, Stack, first_rows, split, starts_of
from .workspace import Workspace

FILE = "dense.cu"
KINDS = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
BITS_OF = {"float16": np.float16, "bfloat16": np.uint16}
MAX_IN_ORDER = 128  # tokens: cuBLAS multiplies more in 16 bits. A decoding step has no more (`MAX_REPLAYED`)

# dense.cu: kernels of 16-bit weights, and the tokens of a block; rows of a block of `few`, and of `many`
CHUNK = 64
FEW, MANY = {"dense_few_8": 8, "dense_tall_8": 8, "dense_few_32": 32}, {"dense_many_32": 32, "dense_many_64": 64}
FEW_ROWS, MANY_ROWS = {"dense_few_8": 16, "dense_tall_8": 32, "dense_few_32": 16}, {"bfloat16": 128, "float16": 64}
TALL_BLOCKS = 4  # for every multiprocessor: so many blocks of `dense_tall_8` keep it busy
SUMS_BYTES = 2 << 10  # a row of a block of `few`: the sums of chunks that it adds in one round
LANES_ROWS = 16  # of a block for float32: 4 warps of 4


@dataclass(frozen=True)
class DenseLaunch:
    """One launch."""

    kernel: str
    grid: tuple[int, ...]
    block: int
    shared_mem: int = 0


def choose_launch(
    tokens: int, width: int, out: int, kind: str, multiprocessors: int, kernel: str | None = None
) -> DenseLaunch:
    """The kernel for x (tokens, width) and w (out, width) of `kind`, or the named one of FEW and MANY.

    The choice changes no bit. Its limits follow from counted bytes and operations; none was measured on a GPU.
    """
    if kind == "float32":
        each = 1 if tokens == 1 else 8
        return DenseLaunch(f"dense_{each}_float32", (-(-out // LANES_ROWS), -(-tokens // each)), 128)
    if kernel is None:
        kernel = "dense_many_32" if tokens <= 32 else "dense_many_64"
        if tokens <= 8:
            tall = -(-out // FEW_ROWS["dense_tall_8"]) >= TALL_BLOCKS * multiprocessors
            kernel = "dense_tall_8" if tall else "dense_few_8"
        elif -(-out // MANY_ROWS[kind]) * -(-tokens // MANY[kernel]) < multiprocessors:
            kernel = "dense_few_32"  # few rows: smaller blocks, whose warps divide K
    each = (FEW | MANY)[kernel]
    rows = FEW_ROWS[kernel] if kernel in FEW else MANY_ROWS[kind]
    grid = (-(-out // rows) * -(-tokens // each),)
    if kernel in MANY:  # shared memory: two chunks of x, in three parts, and one of w
        return DenseLaunch(f"{kernel}_{kind}", grid, 128, (2 * 3 * each + rows) * CHUNK * 2)
    chunks = -(-width // CHUNK)
    shared = rows * min(chunks * each * 4, SUMS_BYTES)
    return DenseLaunch(f"{kernel}_{kind}", grid, 32 * min(8, max(4, chunks)), shared)


@dataclass(eq=False)
class DenseRows:
    """What a kernel reads: a matrix, or a stack of several of one input. `rows` moves when it is stacked."""

    rows: DeviceArray  # (out, width) on the device; bfloat16 as its bits
    kind: str  # float32, float16 or bfloat16
    parts: tuple[int, ...] = ()  # of a stack: the rows of each matrix
    member: Member | None = None  # its place in a stack


@dataclass(frozen=True, eq=False, repr=False)
class DeviceDense(LinearAround):
    """A dense matrix: in the host's memory as the file has it, and on the device; there, blocks are float32."""

    kind = "dense"

    linear: DenseWeight  # in the host's memory
    on_device: DenseRows

    @property
    def dtype(self) -> np.dtype:
        return self.linear.dtype

    @property
    def array(self) -> Floats:
        return self.linear.array

    def plain(self) -> DenseWeight:
        return self.linear

    def called(self, name: str) -> DeviceDense:
        return replace(self, linear=self.linear.called(name))

    def rows(self, index: Any, dtype: DTypeLike) -> Floats:
        return self.linear.rows(index, dtype)

    def contents(self, name: str) -> Iterator[tuple[str, Array]]:
        return self.linear.contents(name)

    def product(self, be: Ops, x: Floats, shared: Shared) -> Floats:
        return be.dense_matmul(x, self)

    @property
    def device_rows(self) -> DeviceArray:
        """(out, width) on the device"""
        return self.on_device.rows

    @property
    def member(self) -> Member | None:
        return self.on_device.member


class DenseKernels:
    """The dense product on a device. precision: the dtype of matrices there; float32 keeps the dtype of their file."""

    def __init__(self, ws: Workspace, precision: str = "float32") -> None:
        self._ws, self._precision = ws, precision

    def prepare(self, w: DenseWeight) -> DeviceDense:
        """The weight on the device."""
        kind = w.dtype.name if self._precision == "float32" else self._precision
        kind = kind if kind in KINDS else "float32"
        rows = self._ws.upload(w.array.astype(KINDS[kind], copy=False))
        return DeviceDense(w, DenseRows(rows, kind))

    def can_stack(self, weights: Sequence[Any]) -> bool:
        """Whether `stack` takes them: 2 or 3 dense weights of one input and one dtype, in no stack yet."""
        first = weights[0]
        return (
            2 <= len(weights) <= MAX_STACKED
            and all(isinstance(w, DeviceDense) and w.member is None for w in weights)
            and all(w.on_device.kind == first.on_device.kind and w.shape[1] == first.shape[1] for w in weights)
        )

    def stack(self, *weights: DeviceDense) -> Stack:
        """Move them into one array; see `TernaryKernels.stack`. Raises ShapeError."""
        if not self.can_stack(weights):
            got = ", ".join(f"{w.shape}" for w in weights)
            raise ShapeError("stack", expected="two or three weights of one input and one dtype", got=got)
        parts, width = tuple(w.shape[0] for w in weights), weights[0].shape[1]
        rows = self._ws.make((sum(parts), width), weights[0].device_rows.dtype)
        stack = Stack(DenseRows(rows, weights[0].on_device.kind, parts), parts)
        for number, (w, start) in enumerate(zip(weights, starts_of(parts), strict=True)):
            here = rows[start : start + w.shape[0]]
            self._ws.device.copy(here, w.device_rows)
            w.on_device.rows, w.on_device.member = here, Member(stack, number)
        return stack

    def matmul(self, x: DeviceArray, w: DenseRows, kernel: str | None = None) -> tuple[DeviceArray, ...]:
        """x (N, width) float32 on the device -> (N, out) float32 of each matrix."""
        (n, width), out = x.shape, len(w.rows)
        parts = w.parts or (out,)
        if (
            kernel is None
            and n > MAX_IN_ORDER
            and w.kind == self._precision != "float32"
            and self._ws.device.can_matmul_16
        ):
            return self._matmul_16(x, w, parts)
        y = self._ws.empty((n, out), np.float32)
        launch = choose_launch(n, width, out, w.kind, self._ws.device.multiprocessors, kernel)
        arguments = x, n, width, w.rows, out, *first_rows(w.parts, out), y
        self._ws.launch(FILE, launch.kernel, launch.grid, launch.block, *arguments, shared=launch.shared_mem)
        return split(y, n, parts)

    def _matmul_16(self, x: DeviceArray, w: DenseRows, parts: tuple[int, ...]) -> tuple[DeviceArray, ...]:
        ws, (n, width) = self._ws, x.shape
        rounded = ws.scratch((n, width), BITS_OF[w.kind])
        ws.each("rows.cu", f"round_{w.kind}", n * width, x, np.uint64(n), width, rounded, ws.trouble)
        ys = tuple(ws.empty((n, rows), np.float32) for rows in parts)
        for y, start, rows in zip(ys, starts_of(parts), parts, strict=True):
            ws.device.matmul_16(rounded, w.rows[start : start + rows], y, w.kind)
        return ys
