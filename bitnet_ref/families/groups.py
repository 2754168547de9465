"""Ternary by groups: `group` neighbouring inputs of a row share a scale, W = w_t * scale. Activations stay floats:

    y = sum over groups of s_g * (sum of w_t * x in the group)

No sum of integers, so not exact: it is taken in float64 and rounded once, and backends are held to a tolerance.
Ternary-Bonsai has groups of 128 inputs, TriLM a few large ones; one group for the whole row is a BitLinear without the
quantisation of activations ("weight-only"). Bonsai 2's matrices are so in a Hadamard basis, a `hadamard.Rotation`.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Self

import numpy as np
from numpy.typing import DTypeLike, NDArray

from ..errors import ShapeError
from ..reference import layers
from ..reference.layers import Array, Floats, Ints
from ..reference.ops import Ops, require
from ..reference.quantization import CODES_PER_BYTE, pack_ternary, unpack_ternary
from ..reference.weights import DenseWeight, LinearWeight, ModelWeights, Shared, TernaryWeight
from .blocks import BlockWeight, half_scales, q2_0_codes
from .family import Edit, Hypothesis, NativeForm, WeightKind
from .hadamard import Rotation, hadamard

_BLOCK_VALUES = 1 << 20  # weights unpacked at a time
MIN_GROUP = 16

# -- the kind of weight ------------------------------------------------------------------------------------------------


class GroupTernaryLinear(LinearWeight):
    """A ternary matrix with a scale for every few inputs of a row, in any layout; its input stays in float."""

    kind = "groups"
    in_features: int  # K
    group: int
    rotation: Rotation | None  # the planes are those of the rotated matrix

    @property
    @abstractmethod
    def dtype(self) -> np.dtype:
        """Of the scales, and of the same matrix as a dense one."""

    @property
    def turn(self) -> tuple[NDArray[np.float32] | None, NDArray[np.int64] | None, int]:
        """(signs, order, block) of the rotation, as kernels take it; (None, None, 0) in the plain basis."""
        rotation = self.rotation
        return (None, None, 0) if rotation is None else (rotation.signs, rotation.order, rotation.block)

    @property
    def input_key(self) -> tuple[int, int]:
        """Equal for linears of one input whose kernels take the same form of it: of the same groups and rotation."""
        return self.group, id(self.rotation)

    @abstractmethod
    def packed_rows(self, index: Any) -> tuple[NDArray[np.uint8], Floats]:
        """Some rows as the reference takes them: packed (n, ceil(K/4)) and scales (n, ceil(K/group))."""

    def product(self, be: Ops, x: Floats, shared: Shared) -> Floats:
        return be.compute(f"{self.name}.hook_out", group_linear, x, self)

    def contents(self, name: str) -> Iterator[tuple[str, Array]]:
        w = self.plain()
        yield name, w.packed
        yield f"{name}.scales {w.group}", w.scales
        for part, array in ({} if w.rotation is None else w.rotation.arrays()).items():
            yield name + part, array

    def plain(self) -> GroupTernaryWeight:
        packed, scales = self.packed_rows(slice(None))
        return GroupTernaryWeight(packed, self.in_features, scales, self.group, self.bias, self.rotation, self.name)

    def rows(self, index: Any, dtype: DTypeLike) -> Floats:
        """Some rows of the matrix as floats, exactly what a dense file holds unless it is rotated.   -> (n, K)"""
        if self.rotation is None:
            return self._stored(index, dtype)
        return self.rotation.turn_back(self._stored(index, np.float64)).astype(dtype)

    def _stored(self, index: Any, dtype: DTypeLike) -> Floats:
        packed, scales = self.packed_rows(index)
        return expand_groups(packed, self.in_features, scales, self.group, dtype)

    def dense(self) -> DenseWeight:
        """The same matrix in float32, not packed; a rotation is folded into it."""
        if self.rotation is None:
            return DenseWeight(self.array.astype(np.float32), self.bias, name=self.name)
        return self.rotation.fold(self)

    @property
    def array(self) -> Floats:
        """The stored matrix as floats, made at each use: -s, 0 and +s, in the dtype of the scales.   -> (N, K)"""
        return self._stored(slice(None), self.dtype)


@dataclass(frozen=True, eq=False, repr=False)
class GroupTernaryWeight(GroupTernaryLinear):
    """Ternary by groups, packed as `quantization` describes: W = w_t * the scale of its group."""

    packed: NDArray[np.uint8]  # (N, ceil(K/4))
    in_features: int  # K
    scales: Floats  # (N, ceil(K/group)) in the dtype of the matrix that was packed
    group: int
    bias: NDArray[np.float32] | None = None  # (N,)
    rotation: Rotation | None = None
    name: str = ""

    def __post_init__(self) -> None:
        rows = len(self.packed)
        packed = rows, -(-self.in_features // CODES_PER_BYTE)
        scales = rows, -(-self.in_features // self.group)
        if (self.packed.shape, self.scales.shape) != (packed, scales):
            raise ShapeError(
                "GroupTernaryWeight",
                expected=f"packed {packed} and scales {scales}",
                got=f"packed {self.packed.shape} and scales {self.scales.shape}",
            )

    @property
    def shape(self) -> tuple[int, int]:
        """(out_features, in_features)"""
        return len(self.packed), self.in_features

    @property
    def dtype(self) -> np.dtype:
        return self.scales.dtype

    def packed_rows(self, index: Any) -> tuple[NDArray[np.uint8], Floats]:
        return self.packed[index], self.scales[index]

    def plain(self) -> GroupTernaryWeight:
        return self


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class GroupLayout(GroupTernaryLinear):
    """The same in a layout of a backend, a subclass with the arrays that its kernels read."""

    in_features: int
    group: int
    bias: NDArray[np.float32] | None = None
    rotation: Rotation | None = None
    name: str = ""

    @classmethod
    def of(cls, w: GroupTernaryLinear, **arrays: Any) -> Self:
        """The weight in this layout.   arrays: the fields of the subclass"""
        return cls(in_features=w.in_features, group=w.group, bias=w.bias, rotation=w.rotation, name=w.name, **arrays)


def group_linear(x: Floats, w: GroupTernaryLinear) -> Floats:
    """The product of a linear that is ternary by groups, without its bias.   x (N, K) -> (N, out)"""
    require("group_matmul", x.ndim == 2 and x.shape[1] == w.in_features, f"x (N, {w.in_features})", x=x)
    w = w.plain()
    turned = x if w.rotation is None else w.rotation.turn(x)
    return group_matmul(turned, w.packed, w.in_features, w.scales, w.group).astype(x.dtype)


def expand_groups(packed: NDArray[np.uint8], in_features: int, scales: Floats, group: int, dtype: DTypeLike) -> Floats:
    """The matrix itself: packed (N, ceil(K/4)), scales (N, ceil(K/group)) -> w (N, K) of `dtype`"""
    w: Floats = unpack_ternary(packed, in_features).astype(dtype)
    if in_features % group:  # the last group is smaller
        w *= np.repeat(scales.astype(dtype), group, axis=1)[:, :in_features]
        return w
    by_group = w.reshape(*scales.shape, group)
    by_group *= scales.astype(dtype)[:, :, None]
    return w


def group_matmul(x: Floats, packed: NDArray[np.uint8], in_features: int, scales: Floats, group: int) -> Floats:
    """y = x W^T, one token at a time, summed in float64.   x (M, K) -> (M, N) in x's dtype"""
    wide, y = x.astype(np.float64), np.empty((len(x), len(packed)), dtype=x.dtype)
    rows = max(1, _BLOCK_VALUES // in_features)
    for start in range(0, len(packed) if len(x) else 0, rows):
        part = slice(start, start + rows)
        w = expand_groups(packed[part], in_features, scales[part], group, np.float64)
        for i in range(len(x)):
            y[i, part] = w @ wide[i]
    return y


def _turned(x: Floats, w: GroupTernaryLinear) -> Floats | None:
    return None if w.rotation is None else w.rotation.turn(x).astype(x.dtype)


def fold_rotations(w: ModelWeights) -> ModelWeights | None:
    """The same model in the plain basis: matrices that are stored in a rotated one become dense, in float32. None where
    none is."""

    def fold(weight: LinearWeight) -> LinearWeight:
        return weight.dense() if isinstance(weight, GroupTernaryLinear) and weight.rotation is not None else weight

    folded = w.map_linears(fold)
    is_same = folded.embedding is w.embedding and dict(folded.linears()) == dict(w.linears())
    return None if is_same else folded


# -- finding the groups of a dense matrix ------------------------------------------------------------------------------


def split_groups(w: Floats) -> tuple[NDArray[np.uint8], Floats, int] | None:
    """w (N, K) that is ternary by groups -> packed, scales (N, ceil(K/group)) in w's dtype, the largest such group.

    None when some group of any size holds other values than -s, 0 and +s. What is packed equals w, value for value.
    """
    k = w.shape[1]
    step = max(1, _BLOCK_VALUES // max(1, k))
    blocks = [slice(start, start + step) for start in range(0, len(w), step)]  # so that no copy of all of w is made
    few = _magnitude(w[:4])  # which decide for most matrices
    sizes = [size for size in _group_sizes(k) if _is_grouped(few, size)]
    group = next((size for size in sizes if all(_is_grouped(_magnitude(w[part]), size) for part in blocks)), None)
    if group is None:
        return None
    starts = np.arange(0, k, group)
    packed = np.empty((len(w), -(-k // CODES_PER_BYTE)), dtype=np.uint8)
    scales = np.empty((len(w), len(starts)), dtype=w.dtype)
    for part in blocks:
        magnitude = _magnitude(w[part])
        scales[part] = np.maximum.reduceat(magnitude, starts, axis=1).astype(magnitude.dtype).view(w.dtype)
        signs = np.where(np.signbit(w[part]), np.int8(-1), np.int8(1))
        packed[part] = pack_ternary(np.where(magnitude == 0, np.int8(0), signs))
    return (packed, scales, group) if scales.astype(np.float32).any() else None


def merge_groups(scales: Floats, group: int, in_features: int) -> tuple[Floats, int]:
    """(scales, group) of the largest groups in which the scales (N, K/group), 0 or above, are one beside 0."""
    magnitude = _magnitude(scales)
    for size in _group_sizes(in_features):
        some = magnitude[:8], magnitude  # a few rows decide for most sizes
        if size > group and size % group == 0 and all(_is_grouped(w, size // group) for w in some):
            return np.maximum.reduceat(scales, np.arange(0, scales.shape[1], size // group), axis=1), size
    return scales, group


def cut_groups(scales: Floats, group: int, in_features: int, size: int) -> Floats | None:
    """The scale of each `size` inputs, (N, K/size), of scales (N, ceil(K/group)); None where such would mix scales."""
    piece = math.gcd(group, size)
    if in_features % size:
        return None
    pieces = np.repeat(scales, group // piece, axis=1)[:, : in_features // piece].reshape(
        len(scales), -1, size // piece
    )
    whole: Floats = pieces.max(axis=2, keepdims=True)  # a group of zeros has the scale 0 and fits everywhere
    return whole[:, :, 0] if ((pieces == whole) | (pieces == 0)).all() else None


def _group_sizes(k: int) -> list[int]:
    """The sizes of groups that are looked for in rows of k inputs, the largest first."""
    divisors = {k // count for count in range(1, k // MIN_GROUP + 1) if k % count == 0}
    return sorted(divisors | {size for size in (32, 64, 128, 256) if size < k}, reverse=True)


def _magnitude(w: Floats) -> Array:
    """The bits of |w| as integers, which are ordered as |w|."""
    return np.ascontiguousarray(w).view(np.dtype(f"u{w.itemsize}")) & ((1 << (8 * w.itemsize - 1)) - 1)


def _is_grouped(magnitude: Array, group: int) -> bool:
    """Whether each group of each row has one magnitude beside 0."""
    width = magnitude.shape[1]
    largest = np.maximum.reduceat(magnitude, np.arange(0, width, group), axis=1).repeat(group, axis=1)[:, :width]
    return bool(((magnitude == largest) | (magnitude == 0)).all())


# -- in files ----------------------------------------------------------------------------------------------------------


def in_groups(w: LinearWeight, rotation: Rotation | None, float_inputs: bool) -> LinearWeight:
    """A matrix that a file gives, as the model computes with it: packed where it is ternary by groups, and so is a
    BitLinear's of a model whose inputs stay in float. Others are returned as they are.

    rotation: the basis that it is stored in. ValueError: another matrix in a basis that is not the plain one.
    """
    if isinstance(w, DenseWeight) and (split := _split_dense(w)) is not None:
        packed, scales, group = split
        return GroupTernaryWeight(packed, w.shape[1], scales, group, w.bias, rotation)
    if isinstance(w, GroupTernaryWeight):
        return replace(w, rotation=rotation)
    if rotation is not None:
        raise ValueError("is in a Hadamard basis and not ternary by groups")
    if isinstance(w, TernaryWeight) and float_inputs:
        scales = np.full((w.shape[0], 1), w.w_dequant_scale, dtype=np.float32)
        return GroupTernaryWeight(w.packed, w.in_features, scales, w.in_features, w.bias)
    return w


def _split_dense(w: DenseWeight) -> tuple[NDArray[np.uint8], Floats, int] | None:
    """`split_groups`; a few rows decide for a matrix in blocks, so that most are not widened as a whole."""
    few = replace(w, stored=w.stored[:8]) if isinstance(w, BlockWeight) else None
    return None if few is not None and split_groups(few.array) is None else split_groups(w.array)


def from_blocks(
    packed: NDArray[np.uint8], scales: Floats, width: int, bias: NDArray[np.float32] | None
) -> GroupTernaryWeight:
    """A matrix (N, width) whose file has a scale for each block of a row, in the largest groups that it is of."""
    scales, group = merge_groups(scales, width // scales.shape[1], width)
    return GroupTernaryWeight(packed, width, scales, group, bias)


def split_tensor(
    weights: Mapping[str, LinearWeight],
    stack: Callable[[Callable[[str], Array]], Array] | None,
    floats: Callable[[], Floats],
) -> tuple[NDArray[np.uint8], Floats, int] | None:
    """`split_groups` of a tensor that stores these weights, by name. What is packed is not made dense for it.

    stack: (name -> an array with the rows of that weight) -> that of the tensor; None where it has other columns.
    floats: the tensor as floats.
    """
    packed = {name: w for name, w in weights.items() if isinstance(w, GroupTernaryWeight)}
    groups = {w.group for w in packed.values()}
    if stack is None or len(packed) < len(weights) or len(groups) > 1:
        return split_groups(floats())
    return stack(lambda name: packed[name].packed), stack(lambda name: packed[name].scales), groups.pop()


def _arrays(w: GroupTernaryWeight) -> dict[str, Array]:
    basis = {} if w.rotation is None else w.rotation.arrays()
    return {".scales": w.scales, ".group": np.array(w.group, dtype=np.int64), **basis}


def _read_native(file: Any, name: str, shape: tuple[int, int], bias: NDArray[np.float32] | None) -> GroupTernaryWeight:
    n, k = shape
    group = int(file.take(f"{name}.group", (), "I64"))
    if not 0 < group <= k:
        raise file.fail(f"{name}.group", f"expected 1 to {k} inputs, got {group}")
    scales = file.take(f"{name}.scales", (n, -(-k // group)))
    if (scales < 0).any():
        raise file.fail(f"{name}.scales", "holds a negative number")
    return GroupTernaryWeight(file.read_plane(name, n, k), k, scales, group, bias)


def _details(w: GroupTernaryWeight, other: GroupTernaryWeight) -> dict[str, Array]:
    size = math.gcd(w.group, other.group)
    scales = np.repeat(w.scales, w.group // size, axis=1)[:, : -(-w.in_features // size)]
    return {"": w.packed, **_arrays(w), ".scales": scales, ".group": np.array(size)}


# -- mistakes in groups ------------------------------------------------------------------------------------------------


PRODUCTS = "*_proj.hook_out lm_head.hook_out"
_group_mistake = partial(Hypothesis, PRODUCTS)
_rotation_mistake = partial(Hypothesis, f"*_proj.hook_x_rotated {PRODUCTS}")
_rotated_table_mistake = partial(Hypothesis, f"hook_embed *_proj.hook_x_rotated {PRODUCTS}")


def _grouped_input(step: Any) -> GroupTernaryWeight | None:
    """The matrix of a step, where it is ternary by groups."""
    return next((x for x in step.inputs if isinstance(x, GroupTernaryWeight)), None)


def _where(fits: Callable[[GroupTernaryWeight], bool]) -> Callable[[Any], bool]:
    """Whether a step's matrix is ternary by groups, and fits."""

    def is_there(step: Any) -> bool:
        w = _grouped_input(step)
        return w is not None and fits(w)

    return is_there


def _is_plain(w: GroupTernaryWeight) -> bool:
    return w.rotation is None


def _has_several_groups(w: GroupTernaryWeight) -> bool:
    return _is_plain(w) and w.scales.shape[1] > 1


def _with_matrix(matrix_of: Callable[[GroupTernaryWeight], NDArray[np.float32]]) -> Edit:
    """The product with another matrix (N, K), or its rows."""

    def edit(step: Any, compute: Edit, *inputs: Any) -> Array:
        if step.name == "hook_embed":
            table, ids = inputs
            rows: Array = matrix_of(table)[ids]
            return rows
        x, w = inputs
        return layers.dense_matmul(x, matrix_of(w), wide=True)

    return edit


def _with_scales(scales_of: Callable[[GroupTernaryWeight], Floats]) -> Edit:
    """The product with a scale (N, K) for each number of the matrix."""

    def matrix_of(w: GroupTernaryWeight) -> NDArray[np.float32]:
        return unpack_ternary(w.packed, w.in_features).astype(np.float32) * scales_of(w).astype(np.float32)

    return _with_matrix(matrix_of)


def _group_size(wrong: int, right: int, of_row: bool, name: str) -> Hypothesis:
    """Scales looked up as for groups of another size. of_row: from the row's first scale on; otherwise from where rows
    of such groups would begin."""
    place = "the row's own scales" if of_row else "rows of such groups"

    def scales_of(w: GroupTernaryWeight) -> Floats:
        row_length = w.scales.shape[1] if of_row else w.in_features // wrong
        index = np.arange(len(w.packed))[:, None] * row_length + np.arange(w.in_features) // wrong
        inside: Ints = np.minimum(index, w.scales.size - 1)
        return w.scales.ravel()[inside]

    def fits(w: GroupTernaryWeight) -> bool:
        return _is_plain(w) and w.group == right and w.in_features % wrong == 0

    return _group_mistake(
        name,
        f"scales are taken for groups of {wrong} where the file has groups of {right}, from {place}",
        f"The scale of input k is number k // {right} of its row; Q2_0 files have groups of 64 or of 128.",
        _with_scales(scales_of),
        _where(fits),
    )


def _scales_by_column(w: GroupTernaryWeight) -> Floats:
    return np.repeat(w.scales.reshape(len(w.packed) // w.group, w.in_features), w.group, axis=0)


def _neighbouring_scales(owner: str, by: int, axis: int) -> Hypothesis:
    """The scales of a neighbouring group (axis 1) or row (axis 0) in the place of each."""
    return _group_mistake(
        f"group_scales_of_the_{owner.replace(' ', '_')}",
        f"each group of weights has the scale of the {owner}",
        "The scale of input k of a row is number k // group of that row.",
        _with_scales(lambda w: expand_scales(np.roll(w.scales, by, axis), w)),
        _where(_has_several_groups),
    )


def expand_scales(scales: Floats, w: GroupTernaryWeight) -> Floats:
    """(N, ceil(K/group)) -> (N, K)"""
    return np.repeat(scales, w.group, axis=1)[:, : w.in_features]


def _without_last(w: GroupTernaryWeight) -> Floats:
    """The last, partial group has the scale of the one before it."""
    return expand_scales(np.concatenate([w.scales[:, :-1], w.scales[:, -2:-1]], axis=1), w)


def _read_as_64(w: GroupTernaryWeight) -> NDArray[np.float32]:
    """What a reader of blocks of 18 bytes, d | 16 bytes of four codes each, makes of the blocks of 34 in the file.

    What the span lacks is zeros.
    """
    scales = np.ascontiguousarray(w.scales, dtype=np.float16).reshape(-1, 1).view(np.uint8)
    data = np.concatenate([scales, w.packed.reshape(-1, 32)], axis=1).reshape(-1)
    data = np.concatenate([data, np.zeros(2 * len(scales), dtype=np.uint8)])
    blocks = data[: len(data) // 18 * 18].reshape(-1, 18)
    matrix = half_scales(blocks[:, :2]) * (q2_0_codes(blocks).astype(np.int8) - np.int8(1)).astype(np.float32)
    return matrix.reshape(w.shape)


# -- mistakes in Hadamard bases ----------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _SignsAfter(Rotation):
    def turn(self, x: Floats) -> NDArray[np.float64]:
        x = x if self.order is None else x[..., self.order]
        return hadamard(x, self.block) * self.signs

    def turn_back(self, z: Floats) -> NDArray[np.float64]:
        x = hadamard(z * self.signs.astype(np.float64), self.block)
        return x if self.order is None else x[..., np.argsort(self.order)]


@dataclass(frozen=True, eq=False)
class _NoRotation(Rotation):
    def turn(self, x: Floats) -> NDArray[np.float64]:
        return x.astype(np.float64)

    def turn_back(self, z: Floats) -> NDArray[np.float64]:
        return z.astype(np.float64)


def _rotated(kind: Callable[..., Rotation]) -> Edit:
    """A step with its matrix in another basis."""

    def edit(step: Any, compute: Edit, *inputs: Any) -> Array:
        w = _grouped_input(step)
        assert w is not None
        assert w.rotation is not None
        other = replace(w, rotation=kind(w.rotation.signs, w.rotation.block, w.rotation.order))
        return compute(*(other if x is w else x for x in inputs))

    return edit


_is_rotated = _where(lambda w: w.rotation is not None)
_has_signs = _where(lambda w: w.rotation is not None and bool((w.rotation.signs != 1).any()))


def _has_rotated_table(step: Any) -> bool:
    table = step.setting.weights.embedding
    return _is_rotated(step) and isinstance(table, GroupTernaryWeight) and table.rotation is not None


# fmt: off
MISTAKES = (
    Hypothesis(f"hook_embed {PRODUCTS}", "q2_0_of_128_read_as_64",
        "Q2_0 blocks of 128 weights (34 bytes) are read as blocks of 64 (18 bytes)",
        "Both have type id 42: the bytes of a tensor divided by its weights tell which it is.",
        _with_matrix(_read_as_64), _where(lambda w: w.group == 128 and w.in_features % 128 == 0)),
    _group_mistake("group_scales_along_rows",
        "group scales are taken along the wrong axis: for neighbouring rows, not for neighbouring inputs",
        "A scale is for `group` neighbouring inputs of one row.",
        _with_scales(_scales_by_column),
        _where(lambda w: _is_plain(w) and len(w.packed) % w.group == 0 and w.in_features % w.group == 0)),
    _group_size(64, 128, True, "groups_of_64_for_128"),
    _group_size(64, 128, False, "groups_of_64_for_128_rows_too"),
    _group_size(128, 64, True, "groups_of_128_for_64"),
    _group_size(128, 64, False, "groups_of_128_for_64_rows_too"),
    _neighbouring_scales("previous group", 1, 1),
    _neighbouring_scales("next row", -1, 0),
    _group_mistake("last_group_scale_missing",
        "the last group of a row, which is not whole, has the scale of the one before",
        "A row has ceil(inputs / group) scales.", _with_scales(_without_last),
        _where(lambda w: _has_several_groups(w) and w.in_features % w.group != 0)),
    _rotation_mistake("rotation_ignored", "matrices in a Hadamard basis are used as plain ones",
        "Multiply by R x, R x = H (signs x), as the keys prism.hadamard.* say.", _rotated(_NoRotation), _is_rotated),
    _rotated_table_mistake("rotation_and_inverse_ignored",
        "matrices and the embedding in a Hadamard basis are used as plain ones",
        "Multiply by R x, and turn rows of the embedding back, as the keys prism.hadamard.* say.",
        _rotated(_NoRotation), _has_rotated_table),
    _rotation_mistake("rotation_signs_after", "the signs are applied after the Hadamard transform",
        "R x = H (signs x): signs first.", _rotated(_SignsAfter), _is_rotated),
    _rotated_table_mistake("rotation_signs_after_everywhere",
        "the signs are applied after the transform, and before it on the way back",
        "R x = H (signs x), and rows of the embedding are signs (H z).", _rotated(_SignsAfter), _has_rotated_table),
    _rotation_mistake("rotation_signs_ignored", "the Hadamard transform is applied without its signs",
        "Read prism.hadamard.sign_values where sign_mode is explicit.",
        _rotated(lambda signs, block, order: Rotation(np.ones_like(signs), block, order)), _has_signs),
    Hypothesis("hook_embed", "rotation_inverse_missing", "rows of the embedding are not turned back",
        "A looked-up row z of a table in prism.hadamard.inverse_weight_names becomes signs (H z).",
        _rotated(_NoRotation), _is_rotated),
)
# fmt: on

KIND = WeightKind(
    "groups",
    "ternary, by groups,",
    classes=(GroupTernaryWeight, Rotation),
    details=_details,
    native=NativeForm(".scales", _arrays, _read_native),
    also_recorded={group_linear: ("hook_x_rotated", _turned)},
    other_forms={"folded rotation": fold_rotations},
    mistakes=MISTAKES,
)
