"""Writing a model's parts as .safetensors tensors: the plan of a writer says once which tensors store which part."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..reference.layers import Array, Floats
from .checkpoint import (
    Checkpoint,
    Progress,
    all_linears,
    arrays_of_layer,
    linear_shape,
    norm_sizes,
    parts,
    read_part,
    ticker,
)
from .safetensors import DTYPES, dtype_name

FLOATS = ("BF16", "F16", "F32")
_BLOCK_VALUES = 1 << 22


class PlannedTensor(NamedTuple):
    """A tensor that stores a part of a model, or a piece of it. `make` computes it from the part that was read."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    make: Callable[[Any], Any]


Plan = dict[str, list[PlannedTensor]]  # name of a part -> its tensors
Layout = dict[str, tuple[str, tuple[int, ...]]]  # name of a tensor -> (dtype, shape)


def plan_model(
    checkpoint: Checkpoint,
    tensor: Callable[[str], str],
    linear: Callable[[str], Iterable[PlannedTensor]],
    array: Callable[[str], PlannedTensor],
    norm: Callable[[NDArray[np.float32]], NDArray[np.float32]] = np.asarray,
) -> Plan:
    """The tensors of a model: the embedding in its stored dtype, norms as float32, linears as the format stores them.

    tensor: a part's name -> the name of its tensor. linear: a linear's name -> its tensors. array: the
    name of a block's further array -> its tensor. norm: a norm's weight -> what is stored.
    """
    config, dtype = checkpoint.config, dtype_name(checkpoint.given_dtype("embedding"))
    shape = linear_shape(config, "embedding")
    plan = {"embedding": [PlannedTensor(tensor("embedding"), dtype, shape, lambda w: w.array)]}
    plan |= {name: [PlannedTensor(tensor(name), "F32", (n,), norm)] for name, n in norm_sizes(config).items()}
    for index in range(config.num_hidden_layers):
        plan |= {name: [array(name)] for name in arrays_of_layer(config, index)}
    return plan | {name: list(linear(name)) for name in all_linears(config)}


def exact_dtype(checkpoint: Checkpoint, plan: Plan, candidates: Sequence[str]) -> str:
    """The first of these dtypes that holds every float of the plan exactly; "F32" if none does.

    Reads the parts that have floats planned in another dtype, one at a time, until no candidate is left.
    """
    left = list(candidates)
    for name, tensors in plan.items():
        in_doubt = [tensor for tensor in tensors if tensor.dtype in FLOATS and {*left} - {tensor.dtype}]
        part = read_part(checkpoint, name) if in_doubt else None
        for tensor in in_doubt:
            values = tensor.make(part)
            left = [dtype for dtype in left if dtype == tensor.dtype or _is_exact(values, DTYPES[dtype])]
    return left[0] if left else "F32"


def in_one_dtype(plan: Plan, dtype: str) -> Plan:
    """The plan with every float in that dtype."""

    def convert(tensor: PlannedTensor) -> PlannedTensor:
        if tensor.dtype not in FLOATS:
            return tensor
        return tensor._replace(dtype=dtype, make=lambda part: tensor.make(part).astype(DTYPES[dtype], copy=False))

    return {name: [convert(tensor) for tensor in tensors] for name, tensors in plan.items()}


def _is_exact(values: Floats, dtype: np.dtype) -> bool:
    """Whether the dtype holds these finite values exactly. In blocks: no second copy of the array."""
    flat = values.reshape(-1)
    with np.errstate(over="ignore", under="ignore"):
        for start in range(0, flat.size, _BLOCK_VALUES):
            block = flat[start : start + _BLOCK_VALUES].astype(np.float32)
            if not np.array_equal(block.astype(dtype).astype(np.float32), block):
                return False
    return True


def cut_by_size(sizes: Mapping[str, int], limit: int | None) -> list[list[str]]:
    """The names in their order, cut so that each part has at most `limit` bytes; a larger tensor is a part alone.

    >>> cut_by_size({"a": 2, "b": 2, "c": 5, "d": 1}, 4)
    [['a', 'b'], ['c'], ['d']]
    """
    parts: list[list[str]] = [[]]
    total = 0
    for name, size in sizes.items():
        if parts[-1] and limit is not None and total + size > limit:
            parts.append([])
            total = 0
        parts[-1].append(name)
        total += size
    return parts


def layout_of(plan: Plan) -> Layout:
    return {tensor.name: (tensor.dtype, tensor.shape) for tensors in plan.values() for tensor in tensors}


def write_parts(
    checkpoint: Checkpoint,
    plan: Plan,
    write: Callable[[str, Array], None],
    progress: Progress | None,
    change: Callable[[str, Any], Any] = lambda name, part: part,
) -> None:
    """Read one part after the other and write its tensors.   change: (name, part) -> what `PlannedTensor.make` gets"""
    tick = ticker(progress, len(plan))
    for name, stored in parts(checkpoint):
        part = change(name, stored)
        for tensor in plan[name]:
            write(tensor.name, tensor.make(part))
        del part, stored
        tick()
