"""A model's weights, at rest: ternary matrices packed to 2 bits, dense ones in the dtype or the blocks of
their file.

A backend may turn each matrix into a layout of its own as it is read (`Backend.prepare`); `TernaryWeight` and
`DenseWeight` are what all of them start from.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from ..errors import ShapeError
from . import quantization
from .blocks import BLOCK_TYPES, are_finite, to_q8_0, widen_blocks


@dataclass(frozen=True, eq=False)
class InputNorm:
    """An RMSNorm inside a linear, before its activation quantisation (`use_rms_norm` of some checkpoints)."""

    weight: NDArray[np.float32]  # (K,)
    eps: float


class LinearWeight(ABC):
    """Any linear's weight, in any layout: (out_features, in_features) and perhaps a bias."""

    bias: NDArray[np.float32] | None  # (N,)

    def __repr__(self) -> str:
        bias = "" if self.bias is None else " with bias"
        return f"<{type(self).__name__} {self.shape[0]} x {self.shape[1]}{bias}, {self.nbytes:,} bytes>"

    @property
    @abstractmethod
    def shape(self) -> tuple[int, int]:
        """(out_features, in_features)"""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes that the weight and its bias take in memory"""


class TernaryLinear(LinearWeight):
    """A BitLinear's weight in any layout: W ~ w_t * w_dequant_scale."""

    in_features: int  # K
    w_dequant_scale: np.float32
    input_norm: InputNorm | None

    @abstractmethod
    def plain(self) -> TernaryWeight:
        """The same weight, packed as the reference takes it."""

    def ternary(self) -> NDArray[np.int8]:
        """The matrix itself, (N, K) int8 in {-1, 0, +1}: four times the memory of its packed form."""
        return quantization.unpack_ternary(self.plain().packed, self.in_features)


@dataclass(frozen=True, eq=False, repr=False)
class TernaryWeight(TernaryLinear):
    """A BitLinear's matrix: W ~ w_t * w_dequant_scale, w_t in {-1, 0, +1}, packed as `quantization` describes."""

    packed: NDArray[np.uint8]  # (N, ceil(K/4))
    in_features: int  # K
    w_dequant_scale: np.float32
    bias: NDArray[np.float32] | None = None  # (N,)
    input_norm: InputNorm | None = None

    def __post_init__(self) -> None:
        columns = -(-self.in_features // quantization.CODES_PER_BYTE)
        if self.packed.dtype != np.uint8 or self.packed.ndim != 2 or self.packed.shape[1] != columns:
            raise ShapeError(
                "TernaryWeight",
                expected=f"packed uint8 (N, {columns}) for {self.in_features} inputs",
                got=f"{self.packed.dtype} {self.packed.shape}",
            )

    @classmethod
    def from_ternary(cls, w_t: NDArray[np.int8], w_dequant_scale: float) -> TernaryWeight:
        """w_t (N, K) int8 in {-1, 0, +1}."""
        return cls(quantization.pack_ternary(w_t), w_t.shape[1], np.float32(w_dequant_scale))

    @property
    def shape(self) -> tuple[int, int]:
        """(out_features, in_features)"""
        return len(self.packed), self.in_features

    @property
    def nbytes(self) -> int:
        return self.packed.nbytes + sum(a.nbytes for a in (self.bias,) if a is not None)

    def plain(self) -> TernaryWeight:
        return self


@dataclass(frozen=True, eq=False, repr=False)
class DenseWeight(LinearWeight):
    """A matrix that is not quantised: the embedding, the head, every linear of a dense model."""

    stored: NDArray  # (N, K) bfloat16, float16 or float32; or rows of blocks (N, bytes) uint8
    bias: NDArray[np.float32] | None = None  # (N,)
    wide: bool = False  # summed in float64 and rounded once, because an int8 rounding comes after it
    block_type: str | None = None  # of `blocks.BLOCK_TYPES`

    def __post_init__(self) -> None:
        if self.block_type is None:
            return
        nbytes = BLOCK_TYPES[self.block_type].nbytes
        if self.stored.dtype != np.uint8 or self.stored.ndim != 2 or self.stored.shape[1] % nbytes:
            expected = f"uint8 (N, a multiple of {nbytes}) for {self.block_type}"
            raise ShapeError("DenseWeight", expected=expected, got=f"{self.stored.dtype} {self.stored.shape}")

    @property
    def shape(self) -> tuple[int, int]:
        """(out_features, in_features)"""
        rows, columns = self.stored.shape
        if self.block_type is not None:
            block = BLOCK_TYPES[self.block_type]
            columns = columns // block.nbytes * block.values
        return rows, columns

    @property
    def nbytes(self) -> int:
        return self.stored.nbytes + sum(a.nbytes for a in (self.bias,) if a is not None)

    @property
    def dtype(self) -> np.dtype:
        """Of `array`."""
        return self.stored.dtype if self.block_type is None else np.dtype(np.float32)

    @property
    def array(self) -> NDArray:
        """The matrix as floats, (N, K); made at each use where it is stored in blocks."""
        return self.stored if self.block_type is None else widen_blocks(self.stored, self.block_type)

    def rows(self, ids: NDArray[np.int64], dtype: DTypeLike) -> NDArray:
        """Some rows of the matrix as floats.   ids (n,) -> (n, K)"""
        # Not take(), which refuses int64 where pointers have 32 bits: in Pyodide. A bfloat16 is the upper half of a
        # float32; ml_dtypes takes rows slowly, and its cast crashes for want of memory.
        if self.block_type is not None:
            x = widen_blocks(self.stored[ids], self.block_type)
        elif self.stored.dtype.name == "bfloat16":
            x = (self.stored.view(np.uint16)[ids].astype(np.uint32) << 16).view(np.float32)
        else:
            x = self.stored[ids]
        return x.astype(dtype, copy=False)


def in_int8(w: LinearWeight) -> LinearWeight:
    """A dense matrix in Q8_0 blocks: int8 with a float16 scale for each 32 weights of a row, an error of at most 1/254
    of the largest of them. Other weights are returned as they are, and so are matrices that are in blocks already or
    that Q8_0 cannot hold (rows that are no multiple of 32, values above 8.3e6)."""
    if not isinstance(w, DenseWeight) or w.block_type is not None or w.shape[1] % 32:
        return w
    stored = np.empty((w.shape[0], w.shape[1] // 32 * 34), dtype=np.uint8)
    step = max(1, (1 << 20) // w.shape[1])
    for start in range(0, len(stored), step):
        stored[start : start + step] = to_q8_0(w.stored[start : start + step].astype(np.float32))
    return DenseWeight(stored, w.bias, w.wide, "Q8_0") if are_finite(stored, "Q8_0") else w


@dataclass(frozen=True, eq=False)
class Rotation:
    """The basis in which a matrix is ternary (Bonsai 2): W = T R, with R x = H (signs x), block by block, H = H^T."""

    signs: NDArray[np.float32]  # (K,) of -1 and +1
    block: int  # a power of two that divides K
    order: NDArray[np.int64] | None = None  # (K,): R x = H (signs x[order]), where a file has inputs in another order

    def turn(self, x: NDArray) -> NDArray[np.float64]:
        """R x.   (..., K)"""
        x = x if self.order is None else x[..., self.order]
        return quantization.hadamard(x * self.signs.astype(np.float64), self.block)

    def turn_back(self, z: NDArray) -> NDArray[np.float64]:
        """R^T z, which is also R^-1 z.   (..., K)"""
        x = quantization.hadamard(z, self.block) * self.signs
        return x if self.order is None else x[..., np.argsort(self.order)]

    def fold(self, planes: NDArray) -> NDArray[np.float32]:
        """The matrix itself: T (N, K) -> W (N, K), some rows at a time."""
        w, rows = np.empty(planes.shape, dtype=np.float32), max(1, (1 << 20) // planes.shape[1])
        for start in range(0, len(w), rows):
            w[start : start + rows] = self.turn_back(planes[start : start + rows].astype(np.float64))
        return w


class GroupTernaryLinear(LinearWeight):
    """A ternary matrix with a scale for every few inputs of a row, in any layout; its input stays in float.

    Ternary-Bonsai has groups of 128 inputs, TriLM a few large ones; one group for the whole row is a BitLinear without
    the quantisation of activations.
    """

    in_features: int  # K
    group: int
    rotation: Rotation | None  # the planes are those of the rotated matrix

    @property
    @abstractmethod
    def dtype(self) -> np.dtype:
        """Of the scales, and of the same matrix as a dense one."""

    @abstractmethod
    def packed_rows(self, index: Any) -> tuple[NDArray[np.uint8], NDArray]:
        """Some rows as the reference takes them: packed (n, ceil(K/4)) and scales (n, ceil(K/group))."""

    def plain(self) -> GroupTernaryWeight:
        """The same weight, packed as the reference takes it."""
        packed, scales = self.packed_rows(slice(None))
        return GroupTernaryWeight(packed, self.in_features, scales, self.group, self.bias, self.rotation)

    def rows(self, index: Any, dtype: DTypeLike) -> NDArray:
        """Some rows of the matrix as floats, exactly what a dense file holds unless it is rotated.   -> (n, K)"""
        packed, scales = self.packed_rows(index)
        planes = packed, self.in_features, scales, self.group
        if self.rotation is not None:
            return self.rotation.turn_back(quantization.expand_groups(*planes, np.float64)).astype(dtype)
        return quantization.expand_groups(*planes, dtype)

    def dense(self) -> DenseWeight:
        """The same matrix in float32, not packed; a rotation is folded into it."""
        w = self.array.astype(np.float32) if self.rotation is None else self.rotation.fold(self.array)
        return DenseWeight(w, self.bias)

    @property
    def array(self) -> NDArray:
        """The stored matrix as floats, made at each use: -s, 0 and +s, in the dtype of the scales.   -> (N, K)"""
        packed, scales = self.packed_rows(slice(None))
        return quantization.expand_groups(packed, self.in_features, scales, self.group, self.dtype)


@dataclass(frozen=True, eq=False, repr=False)
class GroupTernaryWeight(GroupTernaryLinear):
    """Ternary by groups, packed as `quantization` describes: W = w_t * the scale of its group."""

    packed: NDArray[np.uint8]  # (N, ceil(K/4))
    in_features: int  # K
    scales: NDArray  # (N, ceil(K/group)) in the dtype of the matrix that was packed
    group: int
    bias: NDArray[np.float32] | None = None  # (N,)
    rotation: Rotation | None = None

    def __post_init__(self) -> None:
        columns, groups = (-(-self.in_features // each) for each in (quantization.CODES_PER_BYTE, self.group))
        expected = (len(self.packed), columns), (len(self.packed), groups)
        if (self.packed.shape, self.scales.shape) != expected:
            raise ShapeError(
                "GroupTernaryWeight",
                expected=f"packed {expected[0]} and scales {expected[1]}",
                got=f"packed {self.packed.shape} and scales {self.scales.shape}",
            )

    @property
    def shape(self) -> tuple[int, int]:
        """(out_features, in_features)"""
        return len(self.packed), self.in_features

    @property
    def nbytes(self) -> int:
        return sum(a.nbytes for a in (self.packed, self.scales, self.bias) if a is not None)

    @property
    def dtype(self) -> np.dtype:
        return self.scales.dtype

    def packed_rows(self, index: Any) -> tuple[NDArray[np.uint8], NDArray]:
        return self.packed[index], self.scales[index]

    def plain(self) -> GroupTernaryWeight:
        return self


@dataclass(frozen=True, eq=False)
class DeltaWeights:
    """The small arrays of a Gated DeltaNet: C channels, of q, k and v together; Hv value heads of dv numbers."""

    conv: NDArray[np.float32]  # (C, tokens), the current token's last
    decay: NDArray[np.float32]  # (Hv,), exp(A_log)
    decay_bias: NDArray[np.float32]  # (Hv,), dt_bias
    norm: NDArray[np.float32]  # (dv,)


EmbeddingWeight = DenseWeight | GroupTernaryLinear


@dataclass(frozen=True, eq=False, repr=False)
class LayerWeights:
    """One transformer block. Norm weights are float32 vectors; a norm is None in families that do not have it."""

    attn_norm: NDArray[np.float32]  # (D,)
    q_proj: LinearWeight  # (H*d, D)
    k_proj: LinearWeight  # (G*d, D)
    v_proj: LinearWeight  # (G*d, D)
    attn_sub_norm: NDArray[np.float32] | None  # (H*d,)
    o_proj: LinearWeight  # (D, H*d)
    ffn_norm: NDArray[np.float32]  # (D,)
    gate_proj: LinearWeight  # (F, D)
    up_proj: LinearWeight  # (F, D)
    ffn_sub_norm: NDArray[np.float32] | None  # (F,)
    down_proj: LinearWeight  # (D, F)
    q_norm: NDArray[np.float32] | None = None  # (d,)
    k_norm: NDArray[np.float32] | None = None  # (d,)
    attn_post_norm: NDArray[np.float32] | None = None  # (D,)
    ffn_post_norm: NDArray[np.float32] | None = None  # (D,)
    z_proj: LinearWeight | None = None  # of the output's gate: as wide as o_proj's input
    a_proj: LinearWeight | None = None  # (Hv, D), decay of a DeltaNet
    b_proj: LinearWeight | None = None  # (Hv, D), write strength of a DeltaNet
    delta: DeltaWeights | None = None  # None: this block is attention

    def __repr__(self) -> str:
        return f"<LayerWeights: {', '.join(f'{name} {weight}' for name, weight in self.linears())}>"

    def linears(self) -> Iterator[tuple[str, LinearWeight]]:
        """(name, weight) of each linear: seven, and up to three more in other families."""
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, LinearWeight):
                yield field.name, value

    def norms(self) -> Iterator[tuple[str, NDArray[np.float32]]]:
        """(name, weight) of the norms that this block has"""
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, np.ndarray):
                yield field.name, value
        if self.delta is not None:
            yield "delta_norm", self.delta.norm


def _is_narrow(weight: LinearWeight) -> bool:
    return isinstance(weight, DenseWeight) and not weight.wide


def _widen_sums(layer: LayerWeights) -> LayerWeights:
    """The layer with its dense linears summed in float64: it stands among ternary ones."""
    dense: dict[str, Any] = {
        name: replace(weight, wide=True) for name, weight in layer.linears() if isinstance(weight, DenseWeight)
    }
    return replace(layer, **dense)


@dataclass(frozen=True, eq=False, repr=False)
class ModelWeights:
    """All of a model. With tied embeddings `lm_head` *is* `embedding`, the same object."""

    embedding: EmbeddingWeight  # (V, D)
    layers: tuple[LayerWeights, ...]
    final_norm: NDArray[np.float32]  # (D,)
    lm_head: LinearWeight  # (V, D)

    def __post_init__(self) -> None:
        linears = [weight for layer in self.layers for _, weight in layer.linears()]
        if any(isinstance(weight, TernaryLinear) for weight in linears) and any(map(_is_narrow, linears)):
            object.__setattr__(self, "layers", tuple(map(_widen_sums, self.layers)))

    def __repr__(self) -> str:
        tied = "tied" if self.tied else repr(self.lm_head)
        return f"<ModelWeights: embedding {self.embedding}, {len(self.layers)} layers, head {tied}>"

    @property
    def tied(self) -> bool:
        return self.lm_head is self.embedding

    def linears(self) -> Iterator[tuple[str, LinearWeight]]:
        """(name, weight) of every linear in the order of the computation: "blocks.0.attn.q_proj", ..., "lm_head"."""
        for index, layer in enumerate(self.layers):
            for name, weight in layer.linears():
                yield linear_name(index, name), weight
        yield "lm_head", self.lm_head

    @property
    def nbytes(self) -> int:
        total = sum(weight.nbytes for _, weight in self.linears()) + self.final_norm.nbytes
        total += 0 if self.tied else self.embedding.nbytes
        for layer in self.layers:
            total += sum(norm.nbytes for _, norm in layer.norms())
        return total


ATTENTION_LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "z_proj", "a_proj", "b_proj")


def linear_name(layer: int, linear: str) -> str:
    """0, "q_proj" -> "blocks.0.attn.q_proj"."""
    return f"blocks.{layer}.{'attn' if linear in ATTENTION_LINEARS else 'mlp'}.{linear}"


def plain_weights(w: ModelWeights) -> ModelWeights:
    """The same weights as the reference takes them, out of whatever layout a backend has given them."""
    layers = []
    for layer in w.layers:
        plain: dict[str, Any] = {name: _plain(weight) for name, weight in layer.linears()}
        layers.append(replace(layer, **plain))
    head = _plain(w.lm_head)
    embedding = head if w.tied else _plain(w.embedding)
    assert isinstance(embedding, EmbeddingWeight)
    return replace(w, layers=tuple(layers), embedding=embedding, lm_head=head)


def _plain(w: LinearWeight) -> LinearWeight:
    return w.plain() if isinstance(w, TernaryLinear | GroupTernaryLinear) else w


def has_rotations(w: ModelWeights) -> bool:
    """Whether a matrix is in a rotated basis."""
    weights = (w.embedding, *(weight for _, weight in w.linears()))
    return any(isinstance(weight, GroupTernaryLinear) and weight.rotation is not None for weight in weights)


def fold_rotations(w: ModelWeights) -> ModelWeights:
    """The same model in the plain basis: matrices that are stored in a rotated one become dense, in float32."""

    def fold(weight: Any) -> Any:
        rotated = isinstance(weight, GroupTernaryLinear) and weight.rotation is not None
        return weight.dense() if rotated else weight

    layers = [replace(layer, **{name: fold(weight) for name, weight in layer.linears()}) for layer in w.layers]
    embedding = fold(w.embedding)
    return ModelWeights(embedding, tuple(layers), w.final_norm, embedding if w.tied else fold(w.lm_head))


def int8_weights(w: ModelWeights) -> ModelWeights:
    """The same model with its dense linears `in_int8`, and its head; the embedding only if it is the head."""
    changed: list[dict[str, Any]] = [{name: in_int8(weight) for name, weight in layer.linears()} for layer in w.layers]
    layers = tuple(replace(layer, **each) for layer, each in zip(w.layers, changed, strict=True))
    head = in_int8(w.lm_head)
    embedding = head if w.tied else w.embedding
    assert isinstance(embedding, EmbeddingWeight)
    return replace(w, layers=layers, embedding=embedding, lm_head=head)
