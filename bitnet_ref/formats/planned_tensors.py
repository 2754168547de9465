"""Writing a model's parts as .safetensors tensors: the plan of a writer says once which tensors store which part."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .checkpoint import Checkpoint, Progress, all_linears, delta_name, linear_shape, norm_sizes, parts, ticker
from .safetensors import dtype_name


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
    delta: Callable[[int], Iterable[PlannedTensor]],
    norm: Callable[[NDArray[np.float32]], NDArray[np.float32]] = np.asarray,
) -> Plan:
    """The tensors of a model: the embedding in its stored dtype, norms as float32, linears as the format stores them.

    tensor: a part's name -> the name of its tensor. linear: a linear's name -> its tensors. delta: a DeltaNet layer's
    number -> the tensors of its `DeltaWeights`. norm: a norm's weight -> what is stored.
    """
    config, dtype = checkpoint.config, dtype_name(checkpoint.given_dtype("embedding"))
    shape = linear_shape(config, "embedding")
    plan = {"embedding": [PlannedTensor(tensor("embedding"), dtype, shape, lambda w: w.array)]}
    plan |= {name: [PlannedTensor(tensor(name), "F32", (n,), norm)] for name, n in norm_sizes(config).items()}
    layers = range(config.num_hidden_layers if config.delta is not None else 0)
    plan |= {delta_name(index): list(delta(index)) for index in layers if config.is_delta(index)}
    return plan | {name: list(linear(name)) for name in all_linears(config)}


def layout_of(plan: Plan) -> Layout:
    return {tensor.name: (tensor.dtype, tensor.shape) for tensors in plan.values() for tensor in tensors}


def write_parts(
    checkpoint: Checkpoint,
    plan: Plan,
    write: Callable[[str, NDArray], None],
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
