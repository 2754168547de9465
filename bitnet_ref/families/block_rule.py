"""ggml's products: inputs rounded to 8 bits by blocks, sums of integers within a block, float32 sums over blocks.

llama.cpp multiplies so by a GGUF file's matrices, and here `load(..., activations="blocks")` does. The type of a matrix
says how its input x is rounded:

    Q8_0, Q4_0, Q5_0, Q2_0, Q1_0   "Q8_0", by 32 inputs:   a = max|x|, dx = float16(a / 127), x_q = round(x * (127 / a))
    Q4_1                           "Q8_1", the same and    s = float16((a / 127) * sum(x_q))
    Q4_K, Q5_K, Q6_K, TQ1_0, TQ2_0 "Q8_K", by 256 inputs:  b = the first x of magnitude a, i = -127 / b, dx = 1 / i,
                                                           x_q = min(127, round(x * i))
    F16, BF16                      x itself is rounded to that type
    F32                            x stays as it is

Rounding is half to even. With the integers of `blocks`, W = d s q + e m, and t and u, sums over blocks from the first
to the last, each step rounded to float32 and no product fused with a sum:

    t += (d * dx) * sum(s q x_q)       in a block of inputs; a sum of integers is exact in any order
    u += (e * dx) * sum(m x_q)       Q4_K, Q5_K; in Q4_1   u += e * s
    y  = t + u                       y = t where there is no e

The order of ggml's float32 sums depends on the processor: several sums side by side, which are added at the end. This
one is the same everywhere. Where ggml's plain C and its x86 code differ, x86 is followed: in Q8_0 and Q8_1 plain C has
x * (1 / (a / 127)) for x * (127 / a) and rounds halves away from zero. In Q2_0 and Q1_0 ggml multiplies by d after the
sum over two or four blocks of inputs, which is another order too. Inputs below 2^-120 count as 0.

Attention, its cache and the steps between are not part of the rule: they stay as they are in every model. llama.cpp's
cache is float16 unless told otherwise (here `cache_dtype="float16"`).

Source: ggml 0.25.3, ggml-quants.c (quantize_row_q8_K_ref), ggml-cpu/arch/x86/quants.c. Against its own functions, built
for AVX-512: rounded inputs equal to the bit in all types, products within 5e-7 of a token's largest.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from numpy.typing import DTypeLike, NDArray

from ..errors import NumericsError
from ..reference import layers
from ..reference.layers import Array, Floats
from ..reference.ops import Ops, require
from ..reference.weights import DenseWeight, LinearWeight, ModelWeights, Shared
from .blocks import BlockWeight
from .family import WeightKind
from .lora import LinearAround

INPUTS = {
    **dict.fromkeys(("Q8_0", "Q4_0", "Q5_0", "Q2_0", "Q1_0"), "Q8_0"),
    "Q4_1": "Q8_1",
    **dict.fromkeys(("Q4_K", "Q5_K", "Q6_K", "TQ1_0", "TQ2_0"), "Q8_K"),
}  # type of a matrix -> that of its inputs
WIDTHS = {"Q8_0": 32, "Q8_1": 32, "Q8_K": 256}  # inputs with one scale
NARROW = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
_SMALLEST = np.float32(2.0**-120)  # a block whose inputs are all below is 0: the scale's inverse would be Inf
_CHUNK_VALUES = 1 << 20  # of a matrix, as integers


class BlockInputs(NamedTuple):
    """Inputs of a product, rounded by blocks of B."""

    x_q: NDArray[np.int8]  # (M, K)
    dx: Floats  # (M, K/B)
    sums: Floats  # Q8_1: s (M, K/32). Q8_K: sum(x_q) of each 32, (M, K/32), integers


def round_inputs(x: Floats, kind: str) -> BlockInputs:
    """x (M, K), K a multiple of the block -> the inputs in "Q8_0", "Q8_1" or "Q8_K".

    Raises NumericsError for NaN, Inf, and a magnitude of 8.3e6 or more, whose scale float16 cannot hold.
    """
    values = x.reshape(len(x), -1, WIDTHS[kind])
    first = np.abs(values).argmax(axis=2, keepdims=True)  # of equal ones the first
    largest = np.take_along_axis(values, first, axis=2)  # (M, K/B, 1), with its sign
    if not np.isfinite(largest).all():  # argmax finds a NaN
        row = int(np.argmax(~np.isfinite(largest).all(axis=(1, 2))))
        raise NumericsError(f"round_inputs: the activation of token {row} holds NaN or Inf")
    is_zero = np.abs(largest) < _SMALLEST
    largest = np.where(is_zero, x.dtype.type(1), largest)
    if kind == "Q8_K":
        scale = x.dtype.type(-127) / largest
        x_q = np.where(is_zero, 0, np.minimum(np.rint(values * scale), 127)).astype(np.int8)
        dx = np.where(is_zero, 0, 1 / scale).astype(x.dtype)
        sums: Floats = x_q.reshape(len(x), -1, 32).sum(axis=2, dtype=np.float64)
        return BlockInputs(x_q.reshape(x.shape), dx[:, :, 0], sums)
    a = np.abs(largest)
    x_q = np.where(is_zero, 0, np.rint(values * (x.dtype.type(127) / a))).astype(np.int8)
    d = np.where(is_zero, 0, a / x.dtype.type(127)).astype(x.dtype)
    with np.errstate(over="ignore"):
        dx = d.astype(np.float16).astype(x.dtype)
        sums = (d[:, :, 0] * x_q.sum(axis=2, dtype=np.int32)).astype(x.dtype).astype(np.float16).astype(x.dtype)
    if not (np.isfinite(dx).all() and np.isfinite(sums).all()):
        raise NumericsError(f"round_inputs: an activation is {a.max()}, too large for {kind}, whose scale is a float16")
    return BlockInputs(x_q.reshape(x.shape), dx[:, :, 0], sums)


def block_matmul(inputs: BlockInputs, w: BlockWeight) -> Floats:
    """y = x W^T by the rule above.   -> (M, N) in the dtype of dx"""
    x_q, dx, sums = inputs
    n, k = w.shape
    y = np.empty((len(x_q), n), dtype=dx.dtype)
    whole, rows = x_q.astype(np.float64), max(1, _CHUNK_VALUES // k)  # integers, whose products BLAS sums exactly
    for start in range(0, n if len(x_q) else 0, rows):
        part = slice(start, start + rows)
        y[:, part] = _rows_of_product(whole, dx, sums, w.stored[part], w)
    return y


def _rows_of_product(x_q: Floats, dx: Floats, sums: Floats, stored: NDArray[np.uint8], w: BlockWeight) -> Floats:
    """stored: some rows of w -> (M, rows)"""
    count, size = dx.shape[1], x_q.shape[1] // dx.shape[1]  # blocks of inputs
    integers = w.block.integers(stored.reshape(-1, w.block.nbytes))
    q = integers.scaled.reshape(len(stored), -1).astype(np.float64)  # (rows, K)
    d = _by_block(integers.d, len(stored), count)
    t = np.zeros((len(x_q), len(stored)), dtype=dx.dtype)
    for b in range(count):
        columns = slice(b * size, (b + 1) * size)
        t += (dx[:, b, None] * d[:, b]) * (x_q[:, columns] @ q[:, columns].T).astype(dx.dtype)
    if integers.e is None or integers.m is None:
        return t
    u, e = np.zeros_like(t), _by_block(integers.e, len(stored), count)
    m = integers.m.reshape(len(stored), count, -1).astype(np.float64)
    for b in range(count):
        if size == 32:
            u += sums[:, b, None] * e[:, b]
        else:
            whole = sums[:, b * 8 : (b + 1) * 8] @ m[:, b].T
            u += (dx[:, b, None] * e[:, b]) * whole.astype(dx.dtype)
    return t + u


def _by_block(scales: NDArray[np.float32], rows: int, count: int) -> NDArray[np.float32]:
    """A scale for each block of inputs, of which a block of weights has one or several.   (n, 1) -> (rows, count)"""
    by_row = scales.reshape(rows, -1)
    return np.repeat(by_row, count // by_row.shape[1], axis=1)


# -- the kind of weight ------------------------------------------------------------------------------------------------


class RuledLinear(LinearWeight):
    """A matrix that is multiplied as ggml multiplies it, in any layout."""

    kind = "ruled"

    @property
    @abstractmethod
    def inputs(self) -> str:
        """What its input is rounded to: "Q8_0", "Q8_1", "Q8_K", "float16" or "bfloat16"."""

    @abstractmethod
    def plain(self) -> RuledWeight:
        """The same weight, as the file has it."""

    def contents(self, name: str) -> Iterator[tuple[str, Array]]:
        return self.plain().linear.contents(f"{name} {self.inputs}")

    def product(self, be: Ops, x: Floats, shared: Shared) -> Floats:
        require("ruled_linear", x.ndim == 2 and x.shape[1] == self.shape[1], f"x (N, {self.shape[1]})", x=x)
        return be.compute(f"{self.name}.hook_out", ruled_linear, x, self)


@dataclass(frozen=True, eq=False, repr=False)
class RuledWeight(LinearAround, RuledLinear):
    """As the file has it."""

    linear: DenseWeight  # a BlockWeight, or one in float16 or bfloat16; with the bias and the name

    @property
    def inputs(self) -> str:
        return INPUTS[self.linear.block_type] if isinstance(self.linear, BlockWeight) else self.linear.dtype.name

    def called(self, name: str) -> RuledWeight:
        return RuledWeight(self.linear.called(name))

    def rows(self, index: Any, dtype: DTypeLike) -> Floats:
        """Some rows as floats, exactly what the file means.   -> (n, K)"""
        return self.linear.rows(index, dtype)

    def plain(self) -> RuledWeight:
        return self


def ruled_linear(x: Floats, w: RuledLinear) -> Floats:
    """The product of a linear by the rule, without its bias.   x (N, K) -> (N, out)"""
    matrix = w.plain().linear
    if isinstance(matrix, BlockWeight):
        return block_matmul(round_inputs(x, w.inputs), matrix)
    return layers.dense_matmul(narrow_inputs(x, w), matrix.stored, matrix.wide, matrix.widen)


def narrow_inputs(x: Floats, w: RuledLinear) -> Floats:
    """The input of a matrix in 16 bits, rounded to that type."""
    with np.errstate(over="ignore"):
        narrow: Floats = x.astype(NARROW[w.inputs]).astype(x.dtype)
    return narrow


def by_rule(w: LinearWeight) -> LinearWeight:
    """A matrix in blocks, or in 16 bits, multiplied by the rule; others are returned as they are."""
    if isinstance(w, BlockWeight):
        return RuledWeight(w) if w.block_type in INPUTS else w
    return RuledWeight(w) if type(w) is DenseWeight and w.dtype.name in NARROW else w


def ruled_weights(w: ModelWeights) -> ModelWeights:
    """The same model with every such matrix multiplied by the rule."""
    return w.map_linears(by_rule)


KIND = WeightKind("ruled", "multiplied by ggml's rule,", (RuledWeight,))
