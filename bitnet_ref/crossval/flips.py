"""Rounding flips: an int8 activation that two correct engines round to neighbouring integers.

Where x * scale is within float32 noise of a half, engines that sum in another order may round it to different sides.
From there on their numbers differ by far more than noise, although neither is wrong. A difference of an int8 tensor is
a flip only if it is one step, the reference's value before rounding is within the noise of a half, and the inputs are
not equal: equal inputs have no noise.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..reference.config import ModelConfig
from ..reference.layers import Array, Floats
from ..reference.quantization import SCALE_FLOOR
from ..system.lazy import lazy_property
from .names import INT8, SCALE, layer_of, linear_input
from .tolerances import EPSILON, FLIP_FLOOR, TIES_IN_A_ROW, tolerance_of
from .types import Mask, Tensors


@dataclass(frozen=True)
class Flip:
    """One activation that flipped."""

    name: str  # "blocks.3.mlp.down_proj.hook_x_int8"
    token: int
    element: int
    before_rounding: float  # x * scale in the reference
    noise: float  # a value this near to a half may flip here
    reference: int
    candidate: int

    @property
    def place(self) -> tuple[str, int, int]:
        return self.name, self.token, self.element

    @lazy_property
    def distance(self) -> float:
        """From a half."""
        return float(distance_to_half(self.before_rounding))

    @property
    def in_words(self) -> str:
        """ "token 9, layer 4, down_proj, int8 at 117.499992 rounded up"."""
        linear, layer = self.name.split(".")[-2], layer_of(self.name)
        place = linear if layer is None else f"layer {layer}, {linear}"
        direction = "up" if self.candidate > self.before_rounding else "down"
        return f"token {self.token}, {place}, int8 at {self.before_rounding:.6f} rounded {direction}"

    def __str__(self) -> str:
        return (
            f"{self.name}[{self.token}, {self.element}]: {self.before_rounding:.6f} before rounding, "
            f"{self.distance:.1e} from a half, "
            f"is {self.reference} in the reference and {self.candidate} in the candidate"
        )


def distance_to_half(value: Array | float) -> Array:
    """How far values before rounding are from the nearest half."""
    return np.abs(value - np.floor(value) - 0.5)


def before_rounding(x: Array) -> tuple[Array, Array]:
    """x (N, K) -> (x * x_quant_scale (N, K), x_quant_scale (N, 1)), as `quantize_activations` computes them."""
    largest = np.abs(x).max(axis=-1, keepdims=True)
    x_quant_scale = x.dtype.type(127) / np.maximum(largest, x.dtype.type(SCALE_FLOOR))
    return x * x_quant_scale, x_quant_scale


def implied_int8(x: Array) -> NDArray[np.int8]:
    """x (N, K) quantised as the contract says."""
    with np.errstate(all="ignore"):
        whole: Floats = np.nan_to_num(np.rint(before_rounding(x)[0]))
        return whole.clip(-128, 127).astype(np.int8)


@dataclass(frozen=True)
class FlipVerdict:
    """The differing elements of an int8 tensor: the flips, and the first element that is none (None: all are flips)."""

    flips: list[Flip]
    unexplained: tuple[int, int] | None
    why: str


def judge_flips(
    reference: Tensors,
    candidate: Tensors,
    linear: str,
    config: ModelConfig,
    depth: int,
    rows: Mask,
    mine: Array,
    theirs: Array,
    own_engine: bool = True,
) -> FlipVerdict:
    """Judge each element at which `mine` and `theirs` (N, K), a linear's int8 input, differ in the given rows (N,).

    own_engine: the candidate computes x * scale as the contract does. Another engine may compute x / (max / 127), which
    rounds once more, or compute wider floats than it records: so equal inputs near a half, or on it, may round either
    way. Of many on a half, not all on the same side.
    """
    name, source = f"{linear}.{INT8}", linear_input(linear, config)
    places = [(i, j) for i, j in np.argwhere((mine != theirs) & rows[:, None]).tolist()]
    if not places:
        return FlipVerdict([], None, "")
    if source not in reference:
        return FlipVerdict([], places[0], f"the reference's trace has no {source} to judge the rounding by")
    x = np.asarray(reference[source]).reshape(mine.shape)
    value, scale = before_rounding(x)
    noise = np.full(mine.shape, FLIP_FLOOR + 127 * tolerance_of("norm").relative(depth))
    same_scale = np.ones(len(mine), dtype=bool)
    if (scale_name := f"{linear}.{SCALE}") in candidate:
        scales = np.asarray(candidate[scale_name]).reshape(-1)
        same_scale = scales == scale.reshape(-1) if len(scales) == len(scale) else ~same_scale  # else: one per block
    equal_input = np.zeros(mine.shape, dtype=bool)
    theirs_x = np.asarray(candidate[source]) if source in candidate else None
    if theirs_x is not None and theirs_x.size == x.size:  # then the noise is known
        x_candidate = theirs_x.reshape(mine.shape).astype(x.dtype)
        with np.errstate(all="ignore"):
            other, other_scale = before_rounding(x_candidate)
            noise = np.abs(other - value) + FLIP_FLOOR
        equal_input = (x_candidate == x) & (other_scale == scale) & same_scale[:, None]
    flips: list[Flip] = []
    ties = equal_input & rows[:, None] & (value - np.floor(value) == 0.5)
    above = theirs[ties] > value[ties]
    sizes = {(int(i), abs(float(value[i, j]))) for i, j in np.argwhere(ties)}  # heads that share a v have the same ties
    ties_one_way = len(sizes) >= TIES_IN_A_ROW and any((above == side).all() for side in (True, value[ties] > 0))
    for i, j in places:
        step, before = int(theirs[i, j]) - int(mine[i, j]), float(value[i, j])
        distance = float(distance_to_half(before))
        if equal_input[i, j] and (own_engine or (distance == 0 and ties_one_way) or distance > FLIP_FLOOR):
            tie = ", at an exact half: halves are rounded another way" if distance == 0 else ""
            return FlipVerdict(flips, (i, j), f"equal inputs ({before:.6f} before rounding) give other integers{tie}")
        if abs(step) != 1 or distance > noise[i, j] + EPSILON * abs(before):
            why = f"{int(theirs[i, j])} instead of {int(mine[i, j])} for {before:.6f} before rounding"
            return FlipVerdict(flips, (i, j), f"{why}: noise of {noise[i, j]:.0e} does not explain it")
        flips.append(Flip(name, i, j, before, float(noise[i, j]), int(mine[i, j]), int(theirs[i, j])))
    return FlipVerdict(flips, None, "")
