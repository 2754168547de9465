"""The comparison before every speed: a backend against the NumPy reference, on the inputs to be timed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..api import Model
from ..backends import Backend
from ..backends.backend import plain_weights
from ..crossval.tolerances import EPSILON, MODEL_FLOOR_IN_EPSILONS, NARROW_FLOATS
from ..errors import NumericsError
from ..families import family_of
from ..families.block_rule import WIDTHS, RuledWeight
from ..reference.cache import TokenBatch
from ..reference.config import ModelConfig
from ..reference.layers import Array, Floats
from ..reference.weights import LinearWeight, TernaryWeight
from .timing import Record

CHECKED_TOKENS = 4  # of a whole model


@dataclass(frozen=True)
class Check(Record):
    """How a backend compares with the reference. If nothing was compared, it is not `equal`."""

    accumulators: int = 0  # int32 values compared
    unequal_accumulators: int = 0
    floats: int = 0  # float32 results compared, bit for bit
    unequal_floats: int = 0
    logits_error: float | None = None  # max distance of a logit from the float64 run; None: no logits were compared
    logits_allowed: float | None = None

    @property
    def unequal(self) -> int:
        return self.unequal_accumulators + self.unequal_floats

    @property
    def equal(self) -> bool:
        """Whether every value compared is the reference's, and the logits are within their tolerance."""
        near = self.logits_error is None or self.logits_allowed is None or self.logits_error <= self.logits_allowed
        return near and not self.unequal and (self.accumulators > 0 or self.logits_error is not None)

    def __add__(self, other: Check) -> Check:
        """Both together; the logits are those of `other` if it has any."""
        counts = ("accumulators", "unequal_accumulators", "floats", "unequal_floats")
        sums = {name: getattr(self, name) + getattr(other, name) for name in counts}
        return replace(self if other.logits_error is None else other, **sums)


@dataclass(frozen=True)
class Expected:
    """The NumPy reference's results for x (M, K) and a ternary weight (N, K)."""

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
        """The same for the first tokens only: a row's result depends on that row alone."""
        return Expected(self.x[:tokens], self.x_q[:tokens], self.acc[:tokens], self.y[:tokens])


def check_linear(be: Backend, w: LinearWeight, expected: Expected) -> Check:
    """The backend's ternary product and its whole linear against the reference. w: a BitLinear in the backend's
    layout."""
    ternary = w.bit_linear
    assert ternary is not None
    with be.running():
        acc = be.to_host(be.ternary_matmul(be.from_host(expected.x_q), ternary))
        y = be.to_host(be.linear(be.from_host(expected.x), w))
    unequal = count_unequal(acc, expected.acc), count_unequal(y, expected.y)
    return Check(expected.acc.size, unequal[0], expected.y.size, unequal[1])


def check_ruled(be: Backend, w: LinearWeight, plain: RuledWeight, rng: np.random.Generator) -> Check:
    """A linear by ggml's rule on random activations: where inputs are in blocks, its plain text to the bit."""
    if plain.inputs not in WIDTHS:
        return Check()
    x = rng.standard_normal((CHECKED_TOKENS, w.shape[1]), dtype=np.float32)
    with be.running():
        y = be.to_host(be.linear(be.from_host(x), w))
    return Check(floats=y.size, unequal_floats=count_unequal(y, Backend("float32", threads=1).linear(x, plain)))


def first_of_each_type(config: ModelConfig) -> list[int]:
    """The first layer of each type, and of each set of matrices; [0] where all layers are alike."""
    if not config.layers_differ:
        return [0]
    first: dict[Any, int] = {}
    for layer in range(config.num_hidden_layers):
        kind = config.layer_types[layer] if config.layer_types else None
        first.setdefault((kind, *config.linear_shapes(layer).items()), layer)
    return list(first.values())


def check_model(model: Model, tokens: Sequence[int]) -> Check:
    """The ternary linears of the first block of each type of layer on random activations, or those by ggml's rule, and
    the logits of a model of these blocks alone.

    All blocks of a type run through the same code. One block of a large model takes the reference seconds, all of them
    minutes; `bitnet-ref doctor` compares a whole model. A 16-bit backend is allowed the error of an engine in that
    dtype (`tolerances.NARROW_FLOATS`), as a share of the largest logit.
    """
    layers = first_of_each_type(model.config)
    first = family_of(model.config).of_layers(model.config, layers)
    weights = replace(model.weights, layers=tuple(model.weights.layers[layer] for layer in layers))
    plain = plain_weights(weights)
    check = Check()
    rng = np.random.default_rng(0)
    for (_, mine), (_, theirs) in zip(weights.linears(), plain.linears(), strict=True):
        ternary, plain_ternary = mine.bit_linear, theirs.bit_linear
        if ternary is not None and plain_ternary is not None:
            x = rng.standard_normal((CHECKED_TOKENS, ternary.in_features), dtype=np.float32)
            check += check_linear(model.backend, ternary, Expected.of(x, plain_ternary.plain()))
        elif isinstance(theirs, RuledWeight):
            check += check_ruled(model.backend, mine, theirs, rng)
    batch = TokenBatch.of([(0, 0, tokens[:CHECKED_TOKENS])])
    subject = Model(first, weights, model.backend)

    def logits(of: Model) -> Floats:
        return of.run(batch, of.new_cache(1, len(batch))).all()

    exact = logits(Model(first, plain, Backend("float64", threads=1)))
    reference_error = float(np.abs(logits(Model(first, plain, Backend("float32", threads=1))) - exact).max())
    narrow = NARROW_FLOATS.get(getattr(model.backend, "precision", "float32"))
    relative_floor = MODEL_FLOOR_IN_EPSILONS * EPSILON + (narrow.relative_l2 if narrow is not None else 0.0)
    allowed = 2 * reference_error + relative_floor * float(np.abs(exact).max())
    subjects = logits(subject)
    error = float(np.abs(subjects - exact).max())
    return check + check_top(subject, batch, subjects) + Check(logits_error=error, logits_allowed=allowed)


def check_top(model: Model, batch: TokenBatch, all_logits: Floats) -> Check:
    """The most likely token of each position as greedy generation finds it, and its logit, against all logits."""
    logits = model.run(batch, model.new_cache(1, len(batch)), [(1, ())] * len(batch))
    top = np.array([(each.ids[i := each.values.argmax()], each.values[i]) for each in logits.tokens])
    expected = np.stack([all_logits.argmax(axis=1), all_logits.max(axis=1)], axis=1)
    return Check(floats=top.size, unequal_floats=count_unequal(top, expected.astype(top.dtype)))


def count_unequal(got: Array, expected: Array) -> int:
    """How many values differ: all of them when the shape or dtype differs."""
    if got.shape != expected.shape or got.dtype != expected.dtype:
        return expected.size
    return int((got != expected).sum())
