"""The comparison that stands before every speed: a backend against the NumPy reference, on the inputs to be timed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ..api import Model
from ..backends import Backend, HeadNeed
from ..crossval.tolerances import EPSILON, MODEL_FLOOR_IN_EPSILONS, NARROW_FLOATS
from ..errors import NumericsError
from ..reference.cache import TokenBatch
from ..reference.weights import LinearWeight, ModelWeights, TernaryLinear, TernaryWeight, plain_weights

CHECKED_TOKENS = 4  # of a whole model


@dataclass(frozen=True)
class Check:
    """How a backend compares with the reference. Nothing is `equal` that was not compared."""

    accumulators: int = 0  # int32 values compared
    unequal_accumulators: int = 0
    floats: int = 0  # float32 results compared, bit for bit
    unequal_floats: int = 0
    logits_error: float | None = None  # largest distance of a logit from the float64 run; None: none were compared
    logits_allowed: float | None = None

    @property
    def equal(self) -> bool:
        """Whether every value compared is the reference's, and the logits are within their tolerance."""
        near = self.logits_error is None or self.logits_allowed is None or self.logits_error <= self.logits_allowed
        compared = self.accumulators > 0 or self.logits_error is not None
        return compared and near and not self.unequal_accumulators and not self.unequal_floats

    def __add__(self, other: Check) -> Check:
        """Both together; the logits are those of `other` where it has them."""
        return Check(
            self.accumulators + other.accumulators,
            self.unequal_accumulators + other.unequal_accumulators,
            self.floats + other.floats,
            self.unequal_floats + other.unequal_floats,
            self.logits_error if other.logits_error is None else other.logits_error,
            self.logits_allowed if other.logits_error is None else other.logits_allowed,
        )


@dataclass(frozen=True)
class Expected:
    """What the NumPy reference makes of x (M, K) and a ternary weight (N, K)."""

    x: NDArray[np.float32]  # (M, K)
    x_q: NDArray[np.int8]  # (M, K)
    acc: NDArray[np.int32]  # (M, N)
    y: NDArray[np.float32]  # (M, N)

    @classmethod
    def of(cls, x: NDArray[np.float32], w: TernaryWeight) -> Expected:
        reference = Backend("float32", threads=1)
        x_q, _ = reference.quantize_activations(x)
        acc = reference.ternary_matmul(x_q, w)
        plain = np.einsum("k,nk->n", x_q[0].astype(np.int32), w.ternary())  # integers: the reference relies on its BLAS
        if not np.array_equal(acc[0], plain):
            raise NumericsError("the NumPy reference differs from the plain integer product: is NumPy's BLAS sound?")
        return cls(x, x_q, acc, reference.linear(x, w))

    def first(self, tokens: int) -> Expected:
        """The same for the first tokens only: a row's result is its own."""
        return Expected(self.x[:tokens], self.x_q[:tokens], self.acc[:tokens], self.y[:tokens])


def check_linear(be: Backend, w: LinearWeight, expected: Expected) -> Check:
    """The backend's ternary product and its whole linear, of a weight in its own layout, against the reference's."""
    assert isinstance(w, TernaryLinear)
    acc = be.ternary_matmul(expected.x_q, w)
    (y,) = be.linears(expected.x, (w,))
    return Check(expected.acc.size, _unequal(acc, expected.acc), expected.y.size, _unequal(y, expected.y))


def check_model(model: Model, tokens: Sequence[int]) -> Check:
    """Each ternary linear of the first block on random activations, and the logits of a model of that block alone.

    The first block stands for the others, which run through the same code: the reference needs seconds for a block of a
    large model, and `bitnet-ref doctor` compares a whole one. A backend in 16 bits is allowed what an engine of that
    dtype is (`tolerances.NARROW_FLOATS`), as a share of the largest logit.
    """
    first = replace(model.config, num_hidden_layers=1)
    weights = replace(model.weights, layers=model.weights.layers[:1])
    plain = plain_weights(weights)
    check = Check()
    rng = np.random.default_rng(0)
    for (_, mine), (_, theirs) in zip(weights.linears(), plain.linears(), strict=True):
        if isinstance(mine, TernaryLinear) and isinstance(theirs, TernaryWeight) and mine.input_norm is None:
            x = rng.standard_normal((CHECKED_TOKENS, mine.in_features), dtype=np.float32)
            check += check_linear(model.backend, mine, Expected.of(x, theirs))
    batch = TokenBatch.of([(0, 0, tokens[:CHECKED_TOKENS])])

    def logits(be: Backend, w: ModelWeights) -> NDArray:
        subject = Model(first, w, be)
        return subject.forward(batch, subject.new_cache(1, len(batch)))

    exact = logits(Backend("float64", threads=1), plain)
    reference_error = float(np.abs(logits(Backend("float32", threads=1), plain) - exact).max())
    floor = MODEL_FLOOR_IN_EPSILONS * EPSILON * float(np.abs(exact).max())
    narrow = NARROW_FLOATS.get(getattr(model.backend, "precision", "float32"))
    floor += narrow.relative_l2 * float(np.abs(exact).max()) if narrow is not None else 0.0
    error = float(np.abs(logits(model.backend, weights) - exact).max())
    return (
        check
        + check_candidates(Model(first, weights, model.backend), batch)
        + Check(logits_error=error, logits_allowed=2 * reference_error + floor)
    )


def check_candidates(subject: Model, batch: TokenBatch) -> Check:
    """The likeliest token of each position, found as greedy generation finds it, and its logit, against all logits."""
    all_logits = subject.forward(batch, subject.new_cache(1, len(batch)))
    _, found = subject.candidates(batch, subject.new_cache(1, len(batch)), [HeadNeed(1)] * len(batch))
    mine = np.array([(candidates.ids[i := candidates.logits.argmax()], candidates.logits[i]) for candidates in found])
    theirs = np.stack([all_logits.argmax(axis=1), all_logits.max(axis=1)], axis=1)
    return Check(floats=mine.size, unequal_floats=_unequal(mine, theirs.astype(mine.dtype)))


def _unequal(got: NDArray, expected: NDArray) -> int:
    """How many values differ; all of them, where shape or dtype do."""
    if got.shape != expected.shape or got.dtype != expected.dtype:
        return expected.size
    return int((got != expected).sum())
