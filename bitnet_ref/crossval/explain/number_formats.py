"""The number formats that engines round to: half floats, fp8, and integers with a scale for a row, a block or a tensor.

`activation_formats` are those of a tensor of a run, MATRICES those of a weight matrix (out, K). A rule takes an array
and returns the values that are left of it, as floats. It raises ValueError for a shape that the format does not have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from ...reference.layers import Array, Floats
from ..types import Wide

Rule = Callable[[Floats], Floats]
Format = tuple[str, Rule]  # what the numbers are then, after "is"; the rule

FLOATS: dict[str, Any] = {
    "bfloat16": ml_dtypes.bfloat16,
    "float16": np.float16,
    "fp8 (e4m3)": ml_dtypes.float8_e4m3fn,
    "fp8 (e5m2)": ml_dtypes.float8_e5m2,
}
NARROW = {name: FLOATS[name] for name in ("bfloat16", "float16")}


def rounded(x: Array, dtype: Any) -> NDArray[np.float32]:
    """x rounded to a narrow float. Infinite values stay; fp8 stops at its largest value."""
    wide = x.astype(np.float64)
    largest = 3e38 if np.dtype(dtype).itemsize == 2 else float(ml_dtypes.finfo(dtype).max)  # type: ignore[no-untyped-call]
    narrow = np.clip(wide, -largest, largest).astype(dtype).astype(np.float32)
    return np.where(np.isinf(wide), x, narrow).astype(np.float32)


def running_sum(x: Array, dtype: Any) -> NDArray[np.float32]:
    """The sum over the last axis, kept in a narrow float term by term.   -> (..., 1)"""
    total = np.zeros(x.shape[:-1], dtype=dtype)
    for column in range(x.shape[-1]):
        total = (total + x[..., column].astype(dtype)).astype(dtype)
    return total.astype(np.float32)[..., None]


def to_integers(x: Array, top: int, axis: int | tuple[int, ...] | None = -1) -> Wide:
    """x as multiples, up to `top`, of its largest magnitude along `axis` / top. axis None: of the whole tensor."""
    largest = np.abs(x.astype(np.float64)).max(axis, keepdims=True)
    step = np.maximum(largest, 1e-30) / top
    return np.asarray(np.rint(x / step) * step)


def in_blocks(x: Array, size: int, rule: Rule) -> Floats:
    """A rule of blocks (n, size) of neighbours in a row."""
    if x.shape[-1] % size:
        raise ValueError(f"rows of {x.shape[-1]} are no whole blocks of {size}")
    return rule(x.reshape(-1, size)).reshape(x.shape)


def half(x: Array) -> NDArray[np.float32]:
    """A block's scale as GGUF stores it."""
    return x.astype(np.float16).astype(np.float32)


def _inverse(step: Array) -> NDArray[np.float32]:
    return np.divide(np.float32(1), step, out=np.zeros_like(step), where=step != 0)


def q8_0(blocks: Floats) -> Floats:
    """int8 and one float16 scale for a block: the integers are of the scale before it is rounded."""
    step = np.abs(blocks).max(axis=-1, keepdims=True).astype(np.float32) / np.float32(127)
    return np.asarray(np.rint(blocks * _inverse(step)) * half(step))


def of_signed_largest(blocks: Floats, top: int) -> Floats:
    """Q4_0 (top 8) and Q5_0 (top 16): the value of largest magnitude becomes -top."""
    index = np.abs(blocks).argmax(axis=-1)[..., None]
    step = np.take_along_axis(blocks, index, axis=-1).astype(np.float32) / np.float32(-top)
    codes = np.clip(np.floor(blocks * _inverse(step) + np.float32(top + 0.5)), 0, 2 * top - 1)
    return np.asarray((codes - top) * half(step))


def of_range(blocks: Floats, top: int) -> Floats:
    """Q4_1 (top 15) and Q5_1 (top 31): from the least value in steps."""
    low = blocks.min(axis=-1, keepdims=True).astype(np.float32)
    step = (blocks.max(axis=-1, keepdims=True) - low) / np.float32(top)
    codes = np.clip(np.floor((blocks - low) * _inverse(step) + np.float32(0.5)), 0, top)
    return np.asarray(codes * half(step) + half(low))


def q6_k(blocks: Floats) -> Floats:
    """Q6_K: blocks of 256, a scale of 8 bits for each 16, found by least squares of weight x^2 among 19 steps.

    Source: quantize_row_q6_K_ref and make_qx_quants of ggml.
    """
    x = blocks.astype(np.float32).reshape(-1, 16, 16)
    scales = _q6_scales(x)
    index = np.abs(scales).argmax(axis=-1)[:, None]
    largest = np.take_along_axis(scales, index, axis=-1)
    inverse = np.float32(-128) * _inverse(largest)
    step = half(_inverse(inverse)) * np.minimum(np.rint(inverse * scales), 127)
    codes = np.clip(np.rint(x * _inverse(step)[..., None]), -32, 31)
    return np.asarray(codes * step[..., None]).reshape(blocks.shape)


def _q6_scales(x: NDArray[np.float32]) -> NDArray[np.float32]:
    """The scale of each 16 values.   (n, 16, 16) -> (n, 16)"""
    index = np.abs(x).argmax(axis=-1)[..., None]
    largest = np.take_along_axis(x, index, axis=-1)
    weight = x * x
    best, best_scale = np.zeros(x.shape[:-1], np.float32), np.zeros(x.shape[:-1], np.float32)
    for offset in (0, *range(-9, 0), *range(1, 10)):
        codes = np.clip(np.rint(x * -(32 + np.float32(0.1) * offset) * _inverse(largest)), -32, 31)
        product, square = (weight * x * codes).sum(-1), (weight * codes * codes).sum(-1)
        better = (square > 0) & ((offset == 0) | (product * product > best * square))
        scale = product * _inverse(square)
        best_scale = np.where(better, scale, best_scale)
        best = np.where(better, scale * product, best)
    return best_scale


_BLOCKS: dict[str, tuple[int, Rule]] = {
    "Q8_0": (32, q8_0),
    "Q4_0": (32, partial(of_signed_largest, top=8)),
    "Q5_0": (32, partial(of_signed_largest, top=16)),
    "Q4_1": (32, partial(of_range, top=15)),
    "Q5_1": (32, partial(of_range, top=31)),
    "Q6_K": (256, q6_k),
}
ROUNDED: list[Format] = [(f"rounded to {name}", partial(rounded, dtype=dtype)) for name, dtype in FLOATS.items()]
INT8_ROWS: Rule = partial(to_integers, top=127)
INT4_ROWS: Rule = partial(to_integers, top=7)
Q8_0: Rule = partial(in_blocks, size=32, rule=q8_0)
SIZES = (16, 32, 64, 128, 256)  # of blocks


def blocks_of(sizes: Iterable[int], bits: int = 8) -> list[Format]:
    """Integers with a float32 scale for each block of a row."""
    rule: Rule = partial(to_integers, top=2 ** (bits - 1) - 1)
    return [(f"quantised to int{bits} in blocks of {size}", partial(in_blocks, size=size, rule=rule)) for size in sizes]


def activation_formats(shape: tuple[int, ...]) -> list[Format]:
    """The formats of a tensor of a run, (N, C) or (N, heads, d); of one with a number for each token, floats."""
    width = shape[-1]
    if len(shape) < 2 or width == 1:
        return ROUNDED
    formats: list[Format] = [
        *ROUNDED,
        ("quantised to int8, a scale per head and token" if len(shape) == 3 else PER_TOKEN, INT8_ROWS),
        ("quantised to int8, one scale", partial(to_integers, top=127, axis=None)),
        *blocks_of([size for size in SIZES if size < width and width % size == 0]),
    ]
    if len(shape) == 3:
        formats.append((PER_TOKEN, partial(to_integers, top=127, axis=(1, 2))))
    if width % 32 == 0:
        formats.append(("quantised to int8 in blocks of 32, with float16 scales (Q8_0)", Q8_0))
    return formats


PER_TOKEN = "quantised to int8, a scale per token"
MATRICES: list[Format] = [
    *ROUNDED,
    *((f"quantised to int{n}, a scale per row", partial(to_integers, top=2 ** (n - 1) - 1)) for n in (8, 6, 5, 4)),
    ("quantised to int8, one scale", partial(to_integers, top=127, axis=None)),
    ("quantised to int4, one scale", partial(to_integers, top=7, axis=None)),
    *blocks_of((32, 64, 128)),
    *blocks_of((32, 64, 128), bits=4),
    *((f"stored as {name}", partial(in_blocks, size=size, rule=rule)) for name, (size, rule) in _BLOCKS.items()),
]
