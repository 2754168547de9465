"""Weights of one input stacked on the device, so that one launch computes all of them: q, k and v; gate and up.

`stack` of the kernels' host side (`TernaryKernels`, `DenseKernels`) moves the matrices into one array, of which each
then holds its part: they lie on the device once, and each can still be computed by itself. `stacked.cuh` describes the
result of a launch over the whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Protocol

from ...reference.weights import LayerWeights
from .device import Device, DeviceArray

MAX_STACKED = 3  # stacked.cuh
GROUPS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))  # the linears of one input in a layer


@dataclass(frozen=True, eq=False)
class Stack:
    """What a kernel takes for a whole stack, and the rows of each matrix in it.

    The members refer to the stack, and it does not refer to them: no reference cycle holds device memory.
    """

    whole: Any  # a TiledWeight or DenseRows
    parts: tuple[int, ...]


@dataclass(frozen=True)
class Member:
    """A weight's place in a stack."""

    stack: Stack
    number: int


def stack_of(ws: Sequence[Any]) -> Stack | None:
    """The stack that consists of these weights, in this order; None where there is none."""
    members = [getattr(w, "member", None) for w in ws]
    if not members or members[0] is None:
        return None
    stack: Stack = members[0].stack
    order = [member.number if member is not None and member.stack is stack else -1 for member in members]
    return stack if order == list(range(len(stack.parts))) else None


class Stacker(Protocol):
    """`TernaryKernels` and `DenseKernels`."""

    def can_stack(self, weights: Sequence[Any]) -> bool:
        """Whether `stack` takes them."""

    def stack(self, *weights: Any) -> Stack:
        """Move them into one array."""


def stack_linears(layers: Iterable[LayerWeights], kernels: Sequence[Stacker], device: Device) -> None:
    """Stack the groups of each layer that one of the kernels `can_stack`. The weights stay the same objects."""
    for layer in layers:
        for names in GROUPS:
            weights = [getattr(layer, name) for name in names]
            stacker = next((each for each in kernels if each.can_stack(weights)), None)
            if stacker is not None:
                stacker.stack(*weights)
                device.trim()  # or the pool keeps the memory that they have left


def starts_of(parts: Sequence[int]) -> tuple[int, ...]:
    """The first row of each matrix.

    >>> starts_of((2560, 640, 640))
    (0, 2560, 3200)
    """
    return tuple(accumulate(parts, initial=0))[:-1]


def split(y: DeviceArray, tokens: int, parts: Sequence[int]) -> tuple[DeviceArray, ...]:
    """Splits y (tokens, sum of rows), of a launch over a stack, into one array for each matrix."""
    y, ends = y.reshape(-1), accumulate(parts)
    return tuple(y[tokens * (end - n) : tokens * end].reshape(tokens, n) for n, end in zip(parts, ends, strict=True))


def first_rows(parts: Sequence[int], rows: int) -> tuple[int, int]:
    """`second` and `third` of a kernel: where those matrices begin; `rows` where there are none.

    >>> first_rows((2560, 640, 640), 3840), first_rows((6912, 6912), 13824), first_rows((), 2560)
    ((2560, 3200), (6912, 13824), (2560, 2560))
    """
    second, third = (*starts_of(parts)[1:], rows, rows)[:2]
    return second, third
