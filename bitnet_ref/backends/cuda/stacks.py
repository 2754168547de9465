"""Weights of one input that lie on top of each other on the device, so that one launch computes all of them.

A layer has two such groups: q, k and v; gate and up. `stack` of the kernels' host side (`TernaryKernels`,
`DenseKernels`) moves the matrices into one array, of which each then holds its part: they lie on the card once, and
each can still be computed by itself. What a launch over the whole leaves behind is described in `stacked.cuh`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Protocol

from ...reference.weights import LayerWeights
from .device import Device

MAX_STACKED = 3  # stacked.cuh
GROUPS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))  # of a layer: linears of the same input


@dataclass(frozen=True, eq=False)
class Stack:
    """A stack: what a kernel takes for all of it, and the rows of each matrix in it.

    Its members refer to it, and it does not refer to them: nothing that holds a card's memory waits for a collector.
    """

    whole: Any  # a TiledWeight or DenseRows
    parts: tuple[int, ...]

    @property
    def starts(self) -> tuple[int, ...]:
        """The first row of each matrix."""
        return starts_of(self.parts)

    def split(self, y: Any, tokens: int) -> tuple[Any, ...]:
        """What a launch has left in y, as many numbers as (tokens, rows), as the results of each matrix."""
        return split(y, tokens, self.parts)


@dataclass(frozen=True)
class Member:
    """Where a weight lies in a stack."""

    stack: Stack
    number: int


def stack_of(ws: Sequence[Any]) -> Stack | None:
    """The stack of which these weights are all, in its order; None where there is none."""
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
        """Move them on top of each other."""


def stack_linears(layers: Iterable[LayerWeights], kernels: Sequence[Stacker], device: Device) -> None:
    """The groups of each layer as stacks. Those that `can_stack` refuses stay as they are, and all weights are the same
    objects as before."""
    for layer in layers:
        for names in GROUPS:
            weights = [getattr(layer, name) for name in names]
            for each in kernels:
                if each.can_stack(weights):
                    each.stack(*weights)
                    device.trim()  # or the pool keeps the places that they have left
                    break


def starts_of(parts: Sequence[int]) -> tuple[int, ...]:
    """The first row of each matrix.

    >>> starts_of((2560, 640, 640))
    (0, 2560, 3200)
    """
    return tuple(accumulate(parts, initial=0))[:-1]


def split(y: Any, tokens: int, parts: Sequence[int]) -> tuple[Any, ...]:
    """`Stack.split`"""
    y = y.reshape(-1)
    return tuple(
        y[tokens * start : tokens * (start + rows)].reshape(tokens, rows)
        for start, rows in zip(starts_of(parts), parts, strict=True)
    )


def first_rows(parts: Sequence[int], rows: int) -> tuple[int, int]:
    """`second` and `third` of a kernel: where those matrices begin; `rows` where there are none.

    >>> first_rows((2560, 640, 640), 3840), first_rows((6912, 6912), 13824), first_rows((), 2560)
    ((2560, 3200), (6912, 13824), (2560, 2560))
    """
    second, third = (*starts_of(parts)[1:], rows, rows)[:2]
    return second, third
