"""Writing a model's parts as .safetensors tensors: the plan of a writer says once which tensors store which part."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .checkpoint import Checkpoint, Progress, parts
from .safetensors import dtype_name


class PlannedTensor(NamedTuple):
    """A tensor that stores a part of a model, or a piece of it. `make` computes it from the part that was read."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    make: Callable[[Any], Any]


Plan = dict[str, list[PlannedTensor]]  # name of a part -> its tensors
Layout = dict[str, tuple[str, tuple[int, ...]]]  # name of a tensor -> (dtype, shape)


def plan_embedding(checkpoint: Checkpoint, tensor: str) -> PlannedTensor:
    """The embedding in its stored dtype."""
    shape = (checkpoint.config.vocab_size, checkpoint.config.hidden_size)
    return PlannedTensor(tensor, dtype_name(checkpoint.dense_dtype("embedding")), shape, lambda w: w.array)


def plan_norm(tensor: str, size: int) -> PlannedTensor:
    """A norm as float32."""
    return PlannedTensor(tensor, "F32", (size,), np.asarray)


def layout_of(plan: Plan) -> Layout:
    return {tensor.name: (tensor.dtype, tensor.shape) for tensors in plan.values() for tensor in tensors}


def write_parts(
    checkpoint: Checkpoint, plan: Plan, write: Callable[[str, NDArray], None], progress: Progress | None
) -> None:
    """Read one part after the other and write its tensors."""
    for done, (name, part) in enumerate(parts(checkpoint), 1):
        for tensor in plan[name]:
            write(tensor.name, tensor.make(part))
        del part
        if progress is not None:
            progress(done, len(plan))
