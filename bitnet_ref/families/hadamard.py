"""Hadamard bases: a matrix W = T R whose T is ternary, with R x = H (signs x) block by block, H = H^T (Bonsai 2).

The product is T (R x): an input is turned first. A row of an embedding is turned back. Native files store the basis
beside the matrix; GGUF has the keys `prism.hadamard.*`. Read plainly, such planes load and write nonsense, so a key or
a value that is not understood is an error, and so is a file in which only some of the ternary planes are named; a file
without keys gets a sentence in the evidence.
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

from ..errors import ConfigError
from ..reference.weights import DenseWeight
from .family import MatrixTensors

_BLOCK_VALUES = 1 << 20  # of a matrix turned at a time


def hadamard(x: NDArray, block: int) -> NDArray[np.float64]:
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

    def turn(self, x: NDArray) -> NDArray[np.float64]:
        """R x.   (..., K)"""
        x = x if self.order is None else x[..., self.order]
        return hadamard(x * self.signs.astype(np.float64), self.block)

    def turn_back(self, z: NDArray) -> NDArray[np.float64]:
        """R^T z, which is also R^-1 z.   (..., K)"""
        x = hadamard(z, self.block) * self.signs
        return x if self.order is None else x[..., np.argsort(self.order)]

    def fold(self, w: Any) -> DenseWeight:
        """A linear whose matrix, the floats `w.array`, is T (N, K) -> the same in the plain basis, in float32."""
        planes = w.array
        folded = np.empty(planes.shape, dtype=np.float32)
        rows = max(1, _BLOCK_VALUES // planes.shape[1])
        for start in range(0, len(folded), rows):
            folded[start : start + rows] = self.turn_back(planes[start : start + rows].astype(np.float64))
        return DenseWeight(folded, w.bias, name=w.name)

    def in_columns(self, columns: NDArray[np.intp] | None) -> Rotation:
        """The same basis for inputs that are columns `columns` of the file's; None: in the file's order."""
        return self if columns is None else replace(self, order=np.argsort(columns))

    def has_columns(self, columns: NDArray[np.intp] | None) -> bool:
        """Whether T itself has its columns in the order of a file with these `columns`, which is not ours. ConfigError
        where the order is a third one."""
        if self.order is not None and (columns is None or not np.array_equal(self.order, np.argsort(columns))):
            message = "its Hadamard basis takes the inputs in another order than GGUF files; fold it first"
            raise ConfigError(message)
        return columns is not None

    def arrays(self) -> dict[str, NDArray]:
        """The tensors of a native file: "signs" (K/block, block) float32, and "order" (K,) int64 where there is one."""
        order = {} if self.order is None else {"order": self.order}
        return {"signs": self.signs.reshape(-1, self.block), **order}


def read_basis(tensors: MatrixTensors, width: int) -> Rotation | None:
    """The basis of a matrix in a native file; None: the plain one. FormatError for a bad one."""
    if "signs" not in tensors:
        return None
    shape = tensors.shape("signs")
    block = shape[-1] if len(shape) == 2 else 0
    if block < 1 or block & (block - 1) or shape[0] * block != width:
        message = f"expected blocks of a power of two of {width} inputs, got shape {list(shape)}"
        raise tensors.fail("signs", message)
    signs = tensors.take("signs", shape, "F32").reshape(-1)
    if not (np.abs(signs) == 1).all():
        raise tensors.fail("signs", "holds other values than -1 and 1")
    if "order" not in tensors:
        return Rotation(signs, block)
    order = tensors.take("order", (width,), "I64")
    if not np.array_equal(np.sort(order), np.arange(width)):
        raise tensors.fail("order", f"is no order of {width} inputs")
    return Rotation(signs, block, order)


# -- GGUF's keys -------------------------------------------------------------------------------------------------------

PREFIX = "prism.hadamard."
_FIXED = {"version": 1, "transform": "normalized-sylvester-walsh-hadamard", "axis": "input-last-dimension"}
_GROUPED = "gdn_v_grouped"
_KEYS = (
    *(*_FIXED, "block_size", "sign_mode", "sign_widths", "sign_values", "weight_names", "inverse_weight_names"),
    _GROUPED,
)
_TABLE = "token_embd.weight"
_GROUPED_OUT = ".ssm_out.weight"


class GgufBases:
    """The keys of an open GGUF.

    by_tensor: name of a tensor -> its basis; none for those in the plain one.
    has_grouped_heads: whether the inputs of `ssm_out` are in the order of Hugging Face: the value heads of a key head
        together. All other tensors of a Qwen3.5 have the first value head of each key head, then the second of each.
    evidence: what they say, or that they are missing.
    """

    def __init__(
        self, path: Path, metadata: Mapping[str, Any], widths: Mapping[str, int], planes: Mapping[str, str], way: str
    ) -> None:
        """widths: name of each tensor -> its inputs.  planes: name of each that is ternary with float inputs -> its
        type.  way: what becomes of rotated matrices, in words. Raises ConfigError."""
        stored = {key.removeprefix(PREFIX): value for key, value in metadata.items() if key.startswith(PREFIX)}
        self.path = path
        self.keys = {key: value.tolist() if isinstance(value, np.ndarray) else value for key, value in stored.items()}
        self.evidence: list[str] = []
        self.by_tensor: dict[str, Rotation] = {}
        self.has_grouped_heads = self.keys.get(_GROUPED, False)
        if self.keys:
            self._check()
            self._read(widths, planes)
            block = self.keys["block_size"]
            self.evidence = [f"Hadamard basis, blocks of {block}: {len(self.by_tensor)} matrices are {way}"]
        elif any(kind.startswith("P") for kind in planes.values()):
            words = (
                f"PQ2_0 and PTQ1_0 planes without keys {PREFIX}*: taken as not rotated; if they are, this is nonsense"
            )
            self.evidence = [words]
            warnings.warn(f"{path}: {words}", stacklevel=4)

    def _fail(self, key: str, message: str) -> ConfigError:
        return ConfigError(message, path=self.path, field=PREFIX + key)

    def _check(self) -> None:
        for key in self.keys:
            if key not in _KEYS:
                raise self._fail(key, f"is not known; known are {', '.join(_KEYS)}")
        for key, expected in _FIXED.items():
            if self.keys.get(key) != expected:
                raise self._fail(key, f"expected {expected!r}, got {self.keys.get(key)!r}")
        block = self.keys.get("block_size")
        if not isinstance(block, int) or isinstance(block, bool) or block < 1 or block & (block - 1):
            raise self._fail("block_size", f"expected a power of two, got {block!r}")
        if not isinstance(self.has_grouped_heads, bool):
            raise self._fail(_GROUPED, f"expected true or false, got {self.has_grouped_heads!r}")

    def _read(self, widths: Mapping[str, int], planes: Mapping[str, str]) -> None:
        block, signs = self.keys["block_size"], self._signs()
        rotated, inverse = self._names("weight_names", widths), self._names("inverse_weight_names", widths)
        if any(name != _TABLE for name in inverse):
            raise self._fail("inverse_weight_names", f"expected {_TABLE} alone, got {inverse}")
        if missing := [name for name in planes if name not in rotated and name not in inverse]:
            message = f"names some ternary planes and not {missing[0]}: a rotation of half a model"
            raise self._fail("weight_names", message)
        by_width: dict[int, Rotation] = {}  # linears of one basis share one object: kernels turn their input once
        for name in dict.fromkeys((*rotated, *inverse)):
            width = widths[name]
            if width % block or (signs is not None and width not in signs):
                message = f"{name} has {width} inputs, no multiple of {block}, or without signs"
                raise self._fail("block_size", message)
            vector = np.ones(width, dtype=np.float32) if signs is None else signs[width]
            self.by_tensor[name] = by_width.setdefault(width, Rotation(vector, block))
        if self.has_grouped_heads:
            for name in (name for name in widths if name.endswith(_GROUPED_OUT) and name not in self.by_tensor):
                message = f"is true, and {name}, whose inputs it orders, is not among the rotated matrices"
                raise self._fail(_GROUPED, message)

    def _names(self, key: str, tensors: Mapping[str, int]) -> list[str]:
        value = self.keys.get(key, [])
        if not isinstance(value, list) or not all(isinstance(name, str) and name in tensors for name in value):
            raise self._fail(key, "expected names of tensors of this file")
        return value

    def _signs(self) -> dict[int, Any] | None:
        """Width -> its vector of signs; None: no signs."""
        mode, widths, values = (self.keys.get(key) for key in ("sign_mode", "sign_widths", "sign_values"))
        if mode == "identity":
            return None
        if mode != "explicit":
            raise self._fail("sign_mode", f"expected identity or explicit, got {mode!r}")
        if (
            not isinstance(widths, list)
            or not all(isinstance(width, int) and not isinstance(width, bool) and width > 0 for width in widths)
            or len(set(widths)) != len(widths)
        ):
            raise self._fail("sign_widths", f"expected different numbers of inputs, got {widths!r}"[:200])
        if not isinstance(values, list) or len(values) != sum(widths) or not {*values} <= {-1.0, 1.0}:
            raise self._fail("sign_values", f"expected {sum(widths)} values of -1 or 1")
        ends = np.cumsum(widths)
        vector = np.array(values, dtype=np.float32)
        return {width: vector[end - width : end] for width, end in zip(widths, ends, strict=True)}


def gguf_keys(
    bases: Mapping[str, tuple[Rotation, NDArray[np.intp] | None]],
) -> Iterator[tuple[str, str, Any]]:
    """(key, GGUF type, value) of a file with rotated matrices.   bases: tensor -> (basis, columns: see `LinearPlace`)

    Raises ConfigError for bases that these keys cannot say.
    """
    if not bases:
        return
    rotations = {name: rotation for name, (rotation, _) in bases.items()}
    grouped = {rotation.order is None for rotation, columns in bases.values() if columns is not None}
    blocks = {rotation.block for rotation in rotations.values()}
    signs: dict[int, Any] = {}
    for name, rotation in rotations.items():
        if not np.array_equal(signs.setdefault(rotation.signs.size, rotation.signs), rotation.signs):
            raise ConfigError(f"GGUF has one vector of signs for all matrices of a width, and {name} has another")
    if len(blocks) > 1:
        raise ConfigError(f"GGUF has one size of Hadamard blocks, and the matrices have {sorted(blocks)}")
    if len(grouped) > 1:
        raise ConfigError("GGUF has one order of value heads for all layers, and this model has two; fold it first")
    for key, fixed in _FIXED.items():
        yield PREFIX + key, "uint32" if isinstance(fixed, int) else "string", fixed
    yield f"{PREFIX}block_size", "uint32", blocks.pop()
    yield f"{PREFIX}sign_mode", "string", "explicit"
    yield f"{PREFIX}sign_widths", "[int32]", np.array(list(signs), dtype=np.int32)
    yield f"{PREFIX}sign_values", "[float32]", np.concatenate(list(signs.values()))
    yield f"{PREFIX}weight_names", "[string]", [name for name in rotations if name != _TABLE]
    yield f"{PREFIX}inverse_weight_names", "[string]", [name for name in rotations if name == _TABLE]
    if grouped == {True}:
        yield PREFIX + _GROUPED, "bool", True
