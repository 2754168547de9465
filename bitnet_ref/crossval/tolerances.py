"""All tolerances: how far a tensor may be from the reference's, by the kind of op that computes it, and why.

An error is measured in roundings of float32 (`EPSILON`), relative to the largest value of the op's result for the same
token: the rounding of a sum follows its largest terms, not its smallest result. Two columns:

    alone   the op was fed the reference's own inputs (teacher-forced): only its own rounding counts
    chain   the op was fed the engine's own tensors (free-running): errors of earlier layers arrive too, so the
            allowance grows by one `chain` per layer

Where the arithmetic is exact the allowance is 0, which means equal. In a free run two inputs that differ in the last
bit may round to different int8 values. No tolerance covers that: `flips.py` finds and shows each such element.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .types import Wide

EPSILON = float(np.finfo(np.float32).eps)

# -- a backend's op against float64: at most twice the float32 reference's error, plus a floor -------------------------

# The reference may be exact by luck, or on a small case; then the bound is a few roundings of the largest value.
FLOOR_IN_EPSILONS = 4
# The same for the logits of a whole model: each of some hundred ops adds about one rounding, and few cancel.
MODEL_FLOOR_IN_EPSILONS = 16
# Logits, absolute: an error below this is the rounding of two float32 sums of a few hundred terms in different orders,
# even if it exceeds twice the reference's own error.
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


CHAIN = 128  # what one layer may add. Measured: float64 against float32 on storyteller stays below 4 over 6 layers

TABLE: dict[str, Tolerance] = {
    "embedding": Tolerance(0, 0, "a look-up, with bf16 or f16 widened to float32: exact"),
    "residual": Tolerance(
        4, CHAIN, "one float32 addition; of an engine that adds wider floats, of terms rounded as they were recorded"
    ),
    "norm scale": Tolerance(
        16, CHAIN, "a sum of squares over the row: float32 sums in another order are some eps apart"
    ),
    "norm": Tolerance(20, CHAIN, "the norm's scale, a division (or a product with 1/scale) and a product"),
    "activation int8": Tolerance(
        0, 0, "round(x * scale) of equal x is an equal integer; unequal x may flip, see flips.py"
    ),
    "activation scale": Tolerance(0, CHAIN, "127 / max|x|: one float32 division; max is exact"),
    "accumulator": Tolerance(0, 0, "a sum of small integers is exact in any order"),
    "linear": Tolerance(0, CHAIN, "acc * (w_scale / x_scale): one expression of the contract, bit for bit"),
    "dense linear": Tolerance(
        64, CHAIN, "a float32 sum of K products in another order: below sqrt(K) eps of the largest"
    ),
    "rope": Tolerance(4, CHAIN, "two products and a sum per value, angles computed in float64 and rounded once"),
    "attention scores": Tolerance(
        16, 2 * CHAIN, "a sum of d products; absolute where below 1, as scores are exponents"
    ),
    "attention pattern": Tolerance(16, 4 * CHAIN, "absolute: an error e of a score moves its share of 1 by a factor e"),
    "attention values": Tolerance(16, 2 * CHAIN, "an average over the keys, in another order"),
    "gate": Tolerance(8, 2 * CHAIN, "an exponential and three products (silu), or two products (relu2)"),
    "routing": Tolerance(16, 4 * CHAIN, "a softmax: an error e of a score moves its share by a factor e"),
    "scaling": Tolerance(1, CHAIN, "one float32 product"),
    "experts' sum": Tolerance(16, CHAIN, "a sum of the chosen experts' results times their shares, in another order"),
    "Hadamard transform": Tolerance(16, CHAIN, "log2(block) sums of two, and a sign"),
    "delta gate": Tolerance(16, 2 * CHAIN, "an exponential and a logarithm, in float64 or float32"),
    # Measured: the recurrence in float32 against this one in float64, over 64 tokens
    "delta rule": Tolerance(64, 4 * CHAIN, "a convolution, or sums of a recurrence over all tokens before"),
    "logits": Tolerance(64, 2 * CHAIN, "a float32 sum of D products in another order"),
}

# Another engine may compute a BitLinear's result in another order, acc / x_scale * w_scale, or take the scale as
# max/127: correct float32, but not the contract's expression. For such engines these replace the rows of TABLE:
OTHER_ENGINES = {
    "activation scale": Tolerance(2, CHAIN, "127 / max|x|, or the inverse of max|x| / 127: two roundings"),
    "linear": Tolerance(4, CHAIN, "acc, w_scale and x_scale multiplied and divided in another order: a rounding each"),
    "rope": Tolerance(64, CHAIN, "two products and a sum of cos and sin in float32; see OTHER_ANGLES"),
}

# The row of a BitLinear's result where the trace has no integer sums: the engine may have none, as transformers, which
# multiplies dequantised floats. Measured: up to 7 roundings on storyteller.
FLOAT_SUMS = Tolerance(64, CHAIN, "no integer sums are recorded; a float32 sum of K dequantised products")

# Angles in float32 are off by some roundings of the position: RoPE at that token, and what is computed from it.
# Measured at positions up to 2,047: 2 (theta^x by one power), 2 (a product of powers, llama.cpp).
OTHER_ANGLES = 4  # roundings per position

# -- engines that compute in a narrow float ----------------------------------------------------------------------------


@dataclass(frozen=True)
class EngineTolerance:
    """For an engine that rounds every op to a narrow float: relative L2 of a tensor against the reference's."""

    relative_l2: float
    reason: str


# In both so many int8 activations flip that the flips, not the rounding of floats, set the distance. Measured on
# storyteller with every op rounded, five texts: 0.035 (bfloat16) and 0.032 (float16) at the worst tensor, 0.011 and
# 0.008 at the logits; on the first storyteller 0.009.
NARROW_FLOATS: dict[str, EngineTolerance] = {
    "bfloat16": EngineTolerance(
        0.15, "8 bits of mantissa: a share of the int8 activations flips, accumulators above 256 lose their last bits"
    ),
    "float16": EngineTolerance(0.1, "11 bits of mantissa: a share of the int8 activations flips, as in bfloat16"),
    # Not a float: what llama.cpp does before it multiplies by a matrix of quantised blocks. Measured by the reference
    # with dequantised weights, with and without such activations, on storyteller and three models of two layers: at the
    # worst tensor 0.023 by blocks of 32 (Q8_0) and 0.035 by blocks of 256 (Q8_K), at the logits 0.017 and 0.026.
    "8-bit activations": EngineTolerance(
        0.08, "each input of a matrix is rounded to 8 bits, with a scale for each 32 or 256 features"
    ),
    # The inputs of matrices in 16 bits, and what of a dequantised weight those bits cannot hold. Measured likewise, on
    # three models: 0.0008 and 0.0097 at the worst tensor, 0.0006 and 0.0048 at the logits.
    "float16 activations": EngineTolerance(0.002, "the inputs of a matrix in float16 are rounded to float16"),
    "bfloat16 activations": EngineTolerance(0.025, "the inputs of a matrix in bfloat16 are rounded to bfloat16"),
    # One product on the run's own inputs: 0.008 for inputs without outliers, 0.02 for those of down_proj.
    "8-bit activations, alone": EngineTolerance(
        0.04, "one input is rounded to 8 bits, with a scale for each 32 or 256 features"
    ),
}

# A tensor that is recorded in a narrower float than the engine computes in: half a step of that float, relative.
RECORDED_ROUNDING = {"float16": 2.0**-11, "bfloat16": 2.0**-8}

# -- causes of a difference --------------------------------------------------------------------------------------------

# A cause explains the logits if their relative L2 error with it is at most this share of the error without it. A change
# in the last bit that happens to flip one int8 as the engine did leaves more.
EXPLAINED_SHARE = 0.1
# The same for a cause that rounds to a narrow format and leaves no recorded tensor wrong: a value near a border of two
# numbers is rounded the other way in the last bit's noise, and such values are few, but as wrong as all the others.
ROUNDED_SHARE = 0.5
# The same for a cause that gives every tensor of a trace that has all int8 activations, each from the engine's own
# inputs: how far the logits of two whole runs are apart then shows what flips do.
FLIPPED_SHARE = 0.9
# By the engine's dtype: an error of the logits that is its rounding and need not fall. float32: CHAIN roundings, of
# which one layer may add as many. Narrow floats: twice what was measured at the logits of the first storyteller.
LOGITS_ROUNDING = {"float32": CHAIN * EPSILON, "bfloat16": 0.018, "float16": 0.018}
# Twice what was measured at the logits.
LOGITS_ROUNDING |= {"8-bit activations": 0.052, "float16 activations": 0.0012, "bfloat16 activations": 0.01}

# -- outputs alone: tokens and log probabilities -----------------------------------------------------------------------

# Three times what was measured: of 600 drawn flips of one int8 of storyteller half moved a logit by 0.09 or more,
# one by 0.27, and the token that was then the likeliest was at most 0.05 behind the best.
NEAR_TIE = 0.15
# A near tie is also at most this share of the standard deviation of the row's logits (2.0 and more for storyteller):
# where that is small, a flip moves logits by less.
NEAR_TIE_SHARE = 0.05
# Two logits of an engine in a narrow float: each off by LOGITS_ROUNDING of the row's size, and so many times that.
NARROW_TIE = 6
# Log probabilities that a server gives: no one may be further off than a near tie, and their root mean square this
# share of it. A flip moves those after its own token, most of them by far less than the largest.
LOGPROB_SHARE = 0.2


def near_tie(engine_dtype: str, logits: NDArray[np.floating]) -> Wide:
    """How far behind the best logit a token may be that an engine of this dtype chose.   (n, V) -> (n,)"""
    finite = np.where(np.isfinite(logits), logits, 0).astype(np.float64)
    tie: Wide = np.minimum(NEAR_TIE, NEAR_TIE_SHARE * finite.std(axis=1))
    if engine_dtype == "float32":
        return tie
    return np.asarray(tie + narrow_tie(engine_dtype, finite))


def narrow_tie(engine_dtype: str, logits: Wide) -> Wide:
    """How far apart two logits, or scores, may be that an engine in a narrow float takes for each other.

    (n, V) -> (n,)
    """
    size = np.sqrt((logits * logits).mean(axis=1))
    return np.asarray(NARROW_TIE * LOGITS_ROUNDING[engine_dtype] * size)


# -- gradients and changes of masters in training ----------------------------------------------------------------------

GRADIENTS: dict[str, EngineTolerance] = {
    "dense": EngineTolerance(
        1e-4, "float32 sums in another order, measured 1e-6 against torch; Adam divides by sqrt(v)"
    ),
    "ternary": EngineTolerance(
        1e-2, "int8 activations that flip move some gradients by up to 4e-3, measured against torch"
    ),
}
BFLOAT16_GRADIENTS = EngineTolerance(
    2**-6, "products round by up to 2^-9 each; measured 5e-3 in a model of two layers, on every backend"
)

# -- what a rounding flip may do ---------------------------------------------------------------------------------------

# A flip changes one of the K inputs of an accumulator by 1 of up to 127: about 1/(40 sqrt(K)) of the result, which then
# flips others further on. An error above this limit (relative L2 of a token's row) is not explained by a flip.
# Measured: 360 drawn flips up to 0.05 on storyteller (hidden size 256), more on models of a few dozen.
FLIP_CEILING = 0.35
# A value flips by noise if its distance to a half, in int8 steps, is below the noise of its input plus this: half an
# ulp of x * scale at 127, the rounding of the product itself.
FLIP_FLOOR = 127 * EPSILON
# A trace without int8 tensors does not show its flips, so the reference rounds activations near a half the other way,
# on trial. How near, in roundings of the largest activation for each layer before. Measured on the first storyteller in
# float32: 36 runs with sums in three orders, and transformers over 256 tokens, have flips up to 4 roundings from a
# half, all in layer 5. The noise grows in sub-norms, where attention averages many tokens.
NEAR_HALF = 4
# What an engine whose angles are float32 adds, in roundings per position. Measured in 150 runs of 15 models over up to
# 512 tokens (`crossval/correct_engines.py`): 0.04 at most, at position 393; without such angles 0.4 a layer at most.
NEAR_HALF_BY_ANGLE = 0.125
# In those runs one of 200,000 int8 values flips. Five times as many are a mistake, as 1e-5 added to max|x|, which flips
# one of 27,000; a few may always be chance.
VALUES_PER_FLIP = 40_000
FEW_FLIPS = 3


def near_half(depth: int, tokens: int) -> Wide:
    """How near to a half an activation is that float32 noise may flip, in int8 steps, by its position.   -> (tokens,)

    depth: layers before it.
    """
    by_angle = np.arange(tokens).astype(np.float64) * float(NEAR_HALF_BY_ANGLE)
    return by_angle * (127 * EPSILON) + (FLIP_FLOOR + 127 * EPSILON * NEAR_HALF * (1 + depth))


# A tensor is another one, under a wrong name, if its relative L2 to that one is below this: far above what a flip
# leaves in a run whose logits agree, far below what an op changes.
SAME_TENSOR = 1e-2

# An engine did not use a tensor that it recorded only if the tensor, and what follows from it, are beyond their
# tolerance by this factor: what is just beyond may come from an earlier op that is just within.
UNUSED_EXCESS = 10.0

# Another engine may compute x / (max / 127), or in float64: what is a tie in float32 here is none there, and falls on
# either side. So many, all on the same side: that engine rounds halves up, or away from zero (by chance 1 in 8e6).
TIES_IN_A_ROW = 24


def angle_drift(kind: str, depth: int | None, tokens: int) -> Wide:
    """What another engine's tensor may be off by beyond its tolerance, its angles being float32.   -> (tokens,)"""
    affected = kind == "rope" or (depth is not None and tolerance_of(kind, own_engine=False).chain > 0)
    return np.arange(tokens).astype(np.float64) * float(OTHER_ANGLES * EPSILON * affected)


def tolerance_of(kind: str, own_engine: bool = True) -> Tolerance:
    """The table's entry for an op kind (see `names.op_kind`)."""
    return TABLE[kind] if own_engine else OTHER_ENGINES.get(kind, TABLE[kind])
