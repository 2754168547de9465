"""Hadamard bases: a matrix W = T R whose T is ternary, with R x = H (signs x) block by block, H = H^T (Bonsai 2).

The product is T (R x): an input is turned first. A row of an embedding is turned back. Native files store the basis
beside the matrix; GGUF has the keys `prism.hadamard.*`. Read plainly, such planes load and write nonsense, so a key or
a value that is not understood is an error, and so is a file in which only some of the ternary planes are named; a file
without keys gets a warning.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import ConfigError, describe, require, require_bool
from ..reference.layers import Array, Floats
from ..reference.weights import DenseWeight

_BLOCK_VALUES = 1 << 20  # of a matrix turned at a time


def hadamard(x: Floats, block: int) -> NDArray[np.float64]:
    """H x / sqrt(block), block by block along the last axis, H the Sylvester matrix of size `block` (a power of two).

    The fast transform: log2(block) rounds of sums and differences, always in this order. H is its own transpose, and
    with the factor its own inverse.
    """
    y, half = x.astype(np.float64), 1
    while half < block:
        pairs = y.reshape(*x.shape[:-1], -1, 2, half)
        y = np.stack([pairs[..., 0, :] + pairs[..., 1, :], pairs[..., 0, :] - pairs[..., 1, :]], axis=-2)
        half *= 2
    return y.reshape(x.shape) / math.sqrt(block)


@dataclass(frozen=True, eq=False)
class Rotation:
    """The basis in which a matrix is ternary."""

    signs: NDArray[np.float32]  # (K,) of -1 and +1
    block: int  # a power of two that divides K
    order: NDArray[np.int64] | None = None  # (K,): R x = H (signs x[order]), where a file has inputs in another order

    def turn(self, x: Floats) -> NDArray[np.float64]:
        """R x.   (..., K)"""
        x = x if self.order is None else x[..., self.order]
        return hadamard(x * self.signs.astype(np.float64), self.block)

    def turn_back(self, z: Floats) -> NDArray[np.float64]:
        """R^T z, which is also R^-1 z.   (..., K)"""
        x = hadamard(z, self.block) * self.signs
        return x if self.order is None else x[..., np.argsort(self.order)]

    def fold(self, w: Any) -> DenseWeight:
        """A linear whose matrix, the floats `w.array`, is T (N, K) -> the same in the plain basis, in float32."""
        planes = w.array
        folded = np.empty(planes.shape, dtype=np.float32)
        rows = max(1, _BLOCK_VALUES // planes.shape[1])
        for start in range(0, len(folded), rows):
            folded[start : start + rows] = self.turn_back(planes[start : start + rows])
        return DenseWeight(folded, w.bias, name=w.name)

    def in_columns(self, columns: NDArray[np.intp] | None) -> Rotation:
        """The same basis for inputs that are columns `columns` of the file's; None: in the file's order."""
        return self if columns is None else replace(self, order=np.argsort(columns))

    def has_columns(self, name: str, columns: NDArray[np.intp] | None) -> bool:
        """Whether the columns of T are in a GGUF's order already, where that is not ours (`LinearPlace.columns`).

        ConfigError where they are in a third order.
        """
        if self.order is not None and (columns is None or not np.array_equal(self.order, np.argsort(columns))):
            message = "its Hadamard basis takes the inputs in another order than GGUF files; fold it first"
            raise ConfigError(message, field=name)
        return columns is not None

    def arrays(self) -> dict[str, Array]:
        """The tensors of a native file: .signs (K/block, block) float32, and .order (K,) int64 where there is one."""
        order = {} if self.order is None else {".order": self.order}
        return {".signs": self.signs.reshape(-1, self.block), **order}


def read_bases(file: Any, widths: Mapping[str, int]) -> dict[str, Rotation]:
    """The bases in an open `NativeCheckpoint`. FormatError for a bad one.   widths: of a linear or "embedding" -> K"""
    bases = {}
    for name, width in widths.items():
        if f"{name}.signs" not in file.tensors:
            continue
        shape = file.tensors.info(f"{name}.signs").shape
        block = shape[-1] if len(shape) == 2 else 0
        if block < 1 or block & (block - 1) or shape[0] * block != width:
            message = f"expected blocks of a power of two of {width} inputs, got shape {list(shape)}"
            raise file.fail(f"{name}.signs", message)
        signs = file.take(f"{name}.signs", shape, "F32").reshape(-1)
        if not (np.abs(signs) == 1).all():
            raise file.fail(f"{name}.signs", "holds other values than -1 and 1")
        order = file.take(f"{name}.order", (width,), "I64") if f"{name}.order" in file.tensors else None
        if order is not None and not np.array_equal(np.sort(order), np.arange(width)):
            raise file.fail(f"{name}.order", f"is no order of {width} inputs")
        bases[name] = Rotation(signs, block, order)
    return bases


# -- GGUF's keys -------------------------------------------------------------------------------------------------------

PREFIX = "prism.hadamard."
FIXED = {"version": 1, "transform": "normalized-sylvester-walsh-hadamard", "axis": "input-last-dimension"}
GROUPED = "gdn_v_grouped"
_KEYS = (
    *(*FIXED, "block_size", "sign_mode", "sign_widths", "sign_values", "weight_names", "inverse_weight_names"),
    GROUPED,
)
_TABLE = "token_embd.weight"
_GROUPED_OUT = ".ssm_out.weight"


def read_gguf_bases(
    path: Path, metadata: Mapping[str, Any], widths: Mapping[str, int], planes: Mapping[str, str], evidence: list[str]
) -> tuple[dict[str, Rotation], bool]:
    """The bases in a GGUF, by the names of tensors, and whether value heads are grouped.

    They are where the inputs of `ssm_out` are in the order of Hugging Face: the value heads of a key head together. All
    other tensors of a Qwen3.5 have the first value head of each key head, then the second of each, and so on.

    widths: name of each tensor -> its inputs.   planes: name of each that is ternary with float inputs -> its type.
    evidence: gets a sentence. Raises ConfigError, without the path.
    """
    stored = {key.removeprefix(PREFIX): value for key, value in metadata.items() if key.startswith(PREFIX)}
    keys = {key: value.tolist() if isinstance(value, np.ndarray) else value for key, value in stored.items()}
    if not keys:
        if any(kind.startswith("P") for kind in planes.values()):
            words = (
                f"PQ2_0 and PTQ1_0 planes without keys {PREFIX}*: taken as not rotated; if they are, this is nonsense"
            )
            evidence.append(words)
            warnings.warn(f"{path}: {words}", stacklevel=4)
        return {}, False
    for key in keys:
        require(key in _KEYS, PREFIX + key, f"one of {', '.join(_KEYS)}", key)
    for key, expected in FIXED.items():
        require(keys.get(key) == expected, PREFIX + key, repr(expected), keys.get(key))
    block: Any = keys.get("block_size")
    require(type(block) is int and block.bit_count() == 1 and block > 0, f"{PREFIX}block_size", "a power of two", block)
    names: dict[str, None] = {}
    for key in ("weight_names", "inverse_weight_names"):
        value = keys.get(key, [])
        if not isinstance(value, list) or not all(isinstance(name, str) and name in widths for name in value):
            raise ConfigError("expected names of tensors of this file", field=PREFIX + key)
        names |= dict.fromkeys(value)
    inverse = keys.get("inverse_weight_names", [])
    require({*inverse} <= {_TABLE}, f"{PREFIX}inverse_weight_names", f"{_TABLE} alone", inverse)
    if missing := [name for name in planes if name not in names]:
        message = f"names some ternary planes and not {missing[0]}: a rotation of half a model"
        raise ConfigError(message, field=f"{PREFIX}weight_names")
    signs = read_signs(keys)
    rotations: dict[str, Rotation] = {}
    by_width: dict[int, Rotation] = {}  # linears with the same basis share one object: kernels turn their input once
    for name in names:
        width = widths[name]
        if width % block or (signs is not None and width not in signs):
            message = f"{name} has {width} inputs, no multiple of {block}, or without signs"
            raise ConfigError(message, field=f"{PREFIX}block_size")
        vector = np.ones(width, dtype=np.float32) if signs is None else signs[width]
        rotations[name] = by_width.setdefault(width, Rotation(vector, block))
    has_grouped_heads = keys.get(GROUPED, False)
    require_bool(PREFIX + GROUPED, has_grouped_heads)
    if has_grouped_heads:
        for name in widths:
            if name.endswith(_GROUPED_OUT) and name not in rotations:
                message = f"is true, and {name}, whose inputs it orders, is not among the rotated matrices"
                raise ConfigError(message, field=PREFIX + GROUPED)
    evidence.append(f"{len(rotations)} matrices are in a Hadamard basis, in blocks of {block}")
    return rotations, has_grouped_heads


def read_signs(keys: Any) -> dict[int, NDArray[np.float32]] | None:
    """Width -> its vector of signs; None: no signs."""
    mode, widths, values = (keys.get(f"sign_{key}") for key in ("mode", "widths", "values"))
    require(mode in ("identity", "explicit"), f"{PREFIX}sign_mode", "identity or explicit", mode)
    if mode == "identity":
        return None
    are_whole = isinstance(widths, list) and all(type(width) is int and width > 0 for width in widths)
    if not are_whole or len({*widths}) < len(widths):
        raise ConfigError(f"expected different numbers of inputs, got {describe(widths)}", field=f"{PREFIX}sign_widths")
    if not isinstance(values, list) or len(values) != sum(widths) or any(each not in (-1, 1) for each in values):
        raise ConfigError(f"expected {sum(widths)} values of -1 or 1", field=f"{PREFIX}sign_values")
    vectors = np.split(np.array(values, dtype=np.float32), np.cumsum(widths)[:-1])
    return dict(zip(widths, vectors, strict=True))


def gguf_keys(
    bases: Mapping[str, tuple[Rotation, NDArray[np.intp] | None]],
) -> Iterator[tuple[str, str, Any]]:
    """(key, GGUF type, value) of a file with rotated matrices.   bases: tensor -> (basis, columns: see `LinearPlace`)

    Raises ConfigError for bases that these keys cannot say.
    """
    if not bases:
        return
    rotations = [rotation for rotation, _ in bases.values()]
    signs = {rotation.signs.size: rotation.signs for rotation in rotations}
    blocks = {rotation.block for rotation in rotations}
    grouped = {rotation.order is None for rotation, columns in bases.values() if columns is not None}
    if not all(np.array_equal(signs[rotation.signs.size], rotation.signs) for rotation in rotations):
        raise ConfigError("GGUF has one vector of signs for all matrices of a width, and this model has several")
    if len(blocks) > 1:
        raise ConfigError(f"GGUF has one size of Hadamard blocks, and the matrices have {sorted(blocks)}")
    if len(grouped) > 1:
        raise ConfigError("GGUF has one order of value heads for all layers, and this model has two; fold it first")
    for key, fixed in FIXED.items():
        yield PREFIX + key, "uint32" if isinstance(fixed, int) else "string", fixed
    yield f"{PREFIX}block_size", "uint32", blocks.pop()
    yield f"{PREFIX}sign_mode", "string", "explicit"
    yield f"{PREFIX}sign_widths", "[int32]", np.array(list(signs), dtype=np.int32)
    yield f"{PREFIX}sign_values", "[float32]", np.concatenate(list(signs.values()))
    yield f"{PREFIX}weight_names", "[string]", [name for name in bases if name != _TABLE]
    yield f"{PREFIX}inverse_weight_names", "[string]", [name for name in bases if name == _TABLE]
    if grouped == {True}:
        yield PREFIX + GROUPED, "bool", True
