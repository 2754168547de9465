"""THE table of tolerances: how far a tensor may lie from the reference's, by the op that gives it, and why.

An error is measured in roundings of float32 (`EPSILON`), relative to the largest value that the op gives for the same
token: a sum's rounding follows its largest terms, not its smallest result. Two columns:

    alone   the op was fed the reference's own inputs (teacher-forced): only its own rounding counts
    chain   the op was fed what the engine computed before it (free-running): errors of earlier layers arrive too, so
            the allowance grows by one `chain` a layer

Where the arithmetic is exact the allowance is 0, which means equal. What the int8 rounding does to a free run, where
two inputs that differ in the last bit may round to different integers, is no tolerance: `flips.py` finds each such
element and shows it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

EPSILON = float(np.finfo(np.float32).eps)

# -- a backend's op against float64: at most twice the float32 reference's error, plus a floor -------------------------

# The reference may be exact by luck, or on a small case; then the bound is a few roundings of the largest value.
FLOOR_IN_EPSILONS = 4
# The same for the logits of a whole model: each of some hundred ops adds a rounding or so, of which few cancel.
MODEL_FLOOR_IN_EPSILONS = 16
# Logits, absolute. Two float32 sums in different orders of a few hundred terms: below this an error is rounding,
# however it compares with the reference's own.
LOGITS_FLOOR = 1e-4


# -- one engine's tensor against the reference's -----------------------------------------------------------------------


@dataclass(frozen=True)
class Tolerance:
    """`alone` and `chain` in roundings of float32, relative to the token's largest value; 0 is equality."""

    alone: float
    chain: float
    reason: str

    def relative(self, depth: int | None) -> float:
        """The largest error allowed, as a share of the token's largest value. depth: layers before, None: op alone."""
        return EPSILON * (self.alone if depth is None else self.chain * (1 + depth))


CHAIN = 128  # what a layer may add. Measured: float64 against float32 on storyteller stays below 4, over 6 layers

TABLE: dict[str, Tolerance] = {
    "embedding": Tolerance(0, 0, "a look-up, and bf16 or f16 widened to float32: exact"),
    "residual": Tolerance(1, CHAIN, "one float32 addition"),
    "norm scale": Tolerance(
        16, CHAIN, "a sum of squares over the row: float32 sums in another order are some eps apart"
    ),
    "norm": Tolerance(20, CHAIN, "the norm's scale, a division (or a product with 1/scale) and a product"),
    "activation int8": Tolerance(0, 0, "round(x * scale) of equal x is an equal integer; other x may flip, see flips"),
    "activation scale": Tolerance(0, CHAIN, "127 / max|x|: one float32 division; max is exact"),
    "accumulator": Tolerance(0, 0, "a sum of small integers is exact in any order"),
    "linear": Tolerance(0, CHAIN, "acc * (w_scale / x_scale): one expression of the contract, bit for bit"),
    "dense linear": Tolerance(
        64, CHAIN, "a float32 sum of K products in another order: below sqrt(K) eps of the largest"
    ),
    "rope": Tolerance(4, CHAIN, "two products and a sum a value, angles taken in float64 and rounded once"),
    "attention scores": Tolerance(
        16, 2 * CHAIN, "a sum of d products; absolute where below 1, as scores are exponents"
    ),
    "attention pattern": Tolerance(16, 4 * CHAIN, "absolute: an error e of a score moves its share of 1 by a factor e"),
    "attention values": Tolerance(16, 2 * CHAIN, "an average over the keys, in another order"),
    "gate": Tolerance(8, 2 * CHAIN, "an exponential and three products (silu), or two products (relu2)"),
    "logits": Tolerance(64, 2 * CHAIN, "a float32 sum of D products in another order"),
}

# An engine may write the one expression of a BitLinear's result in another order, acc / x_scale * w_scale, or take the
# scale as max/127: honest float32, but not the contract's. For engines that are not ours, in place of `alone`:
OTHER_ENGINES = {
    "activation scale": Tolerance(2, CHAIN, "127 / max|x|, or the inverse of max|x| / 127: two roundings"),
    "linear": Tolerance(4, CHAIN, "acc, w_scale and x_scale multiplied and divided in another order: a rounding each"),
    # Measured: 10 at position 19, llama.cpp, whose angles are products of powers in float32
    "rope": Tolerance(64, CHAIN, "angles in float32: an angle of p radians is off by its rounding, p times that of 1"),
}

# -- engines that compute in a narrow float ----------------------------------------------------------------------------


@dataclass(frozen=True)
class EngineTolerance:
    """For an engine that rounds every op to a narrow float: relative L2 of a tensor against the reference's."""

    relative_l2: float
    reason: str


# Either rounds enough int8 activations to a neighbour that their flips, not the float itself, make the distance.
# Measured on storyteller with every op rounded: 0.034 (bfloat16), 0.035 (float16) at the worst tensor, 0.009 at the
# logits.
NARROW_FLOATS: dict[str, EngineTolerance] = {
    "bfloat16": EngineTolerance(
        0.15, "8 bits of mantissa: a share of the int8 activations flips, accumulators above 256 lose their last bits"
    ),
    "float16": EngineTolerance(0.1, "11 bits of mantissa: a share of the int8 activations flips, as in bfloat16"),
}

# -- what a rounding flip may do ---------------------------------------------------------------------------------------

# A flip moves one accumulator's input by 1 of up to 127, in one of K places: a share of about 1/(40 sqrt(K)) of the
# result, which then flips others further on. Beyond this share (relative L2 of a token's row) it is no flip's doing.
# Measured: up to 0.05 on storyteller (256 wide), more on models of a few dozen.
FLIP_CEILING = 0.35
# How near a half the value before rounding must lie to have flipped by noise, in steps of int8, in addition to the
# noise that the input's own tolerance allows: half an ulp of x * scale at 127, from the product itself.
FLIP_FLOOR = 127 * EPSILON


def tolerance_of(kind: str, own_engine: bool = True) -> Tolerance:
    """The table's entry for an op kind (see `names.op_kind`)."""
    return TABLE[kind] if own_engine else OTHER_ENGINES.get(kind, TABLE[kind])
