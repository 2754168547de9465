"""LoRA: a linear with a term of low rank beside it, y = linear(x) + c B (A x), which reads x as it is, not quantised.

The term stays apart, so a ternary matrix stays ternary: merged into it, W + c B A would be dense.

Source: Hu et al. 2021, "LoRA" (arXiv:2106.09685), as in peft.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Self

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from ..reference.layers import Array, Floats, Ints
from ..reference.ops import Ops
from ..reference.weights import (
    FEED_FORWARD,
    DenseWeight,
    LinearWeight,
    ModelWeights,
    Norm,
    Shared,
    TernaryLinear,
    linear_name,
)
from .family import Edit, Hypothesis, WeightKind

TERM = "hook_lora"


class LinearAround(LinearWeight):
    """What a linear with something around it has of the linear itself."""

    linear: LinearWeight

    @property
    def name(self) -> str:  # type: ignore[override]
        return self.linear.name

    @property
    def shape(self) -> tuple[int, int]:
        return self.linear.shape

    @property
    def nbytes(self) -> int:
        return self.linear.nbytes

    @property
    def bias(self) -> NDArray[np.float32] | None:  # type: ignore[override]
        return self.linear.bias

    @property
    def bit_linear(self) -> TernaryLinear | None:  # type: ignore[override]
        return self.linear.bit_linear


class OnLinear(LinearAround):
    """A linear with terms."""

    kind = "adapted"
    bias: ClassVar[None] = None  # type: ignore[misc]  # the linear's is added before the term
    terms: tuple[AdaptedLinear | None, ...]  # the adapted linears that it chooses from; None: no term
    choice: NDArray[np.int32] | None = None  # (N,) for each row of x the index of its term, or -1; None: 0 for all

    @property
    def norm(self) -> Norm | None:  # type: ignore[override]
        return self.linear.norm


@dataclass(frozen=True, eq=False, repr=False)
class AdaptedLinear(OnLinear):
    """y = linear(x), its bias included, + b (a x), where b is factor B."""

    linear: LinearWeight
    a: LinearWeight  # (r, K), dense
    b: LinearWeight  # (out, r), dense
    factor: float  # lora_alpha / r, or lora_alpha / sqrt(r)

    @property
    def terms(self) -> tuple[AdaptedLinear]:  # type: ignore[override]
        return (self,)

    @property
    def nbytes(self) -> int:
        return self.linear.nbytes + self.a.nbytes + self.b.nbytes

    def each(self, change: Callable[[LinearWeight], LinearWeight]) -> Self:
        linear, a, b = self.linear.each(change), self.a.each(change), self.b.each(change)
        same = (linear, a, b) == (self.linear, self.a, self.b)
        return self if same else replace(self, linear=linear, a=a, b=b)

    def called(self, name: str) -> Self:
        return replace(self, linear=self.linear.called(name))

    def plain(self) -> Self:
        return self.each(lambda weight: weight.plain())

    def contents(self, name: str) -> Iterator[tuple[str, Array]]:
        yield from self.linear.contents(name)
        yield from self.a.contents(f"{name}.lora_a {self.factor!r}")
        yield from self.b.contents(f"{name}.lora_b")

    def product(self, be: Ops, x: Floats, shared: Shared) -> Floats:
        y = be.one_linear(x, self.linear, shared)
        return be.add(y, be.compose(f"{self.name}.{TERM}", lora_term, x, self))


def lora_term(be: Ops, x: Floats, w: AdaptedLinear) -> Floats:
    """b (a x), each of the two products rounded once.   x (N, K) -> (N, out)"""
    return be.dense_matmul(be.dense_matmul(x, w.a), w.b)


@dataclass(frozen=True, eq=False, repr=False)
class SelectedLinear(OnLinear):
    """A linear in a batch whose tokens have different adapters: y = linear(x) + the term of each token's adapter."""

    linear: LinearWeight
    terms: tuple[AdaptedLinear | None, ...]  # of each adapter of the batch; None: it has none for this linear
    choice: NDArray[np.int32]  # (N,) the index of each row's adapter, or -1: its result is the linear's

    def contents(self, name: str) -> Iterator[tuple[str, Array]]:
        yield from self.linear.contents(name)
        for number, adapted in enumerate(self.terms):
            if adapted is not None:
                yield from adapted.a.contents(f"{name}.lora_a.{number} {adapted.factor!r}")
                yield from adapted.b.contents(f"{name}.lora_b.{number}")
        yield f"{name}.choice", self.choice

    def product(self, be: Ops, x: Floats, shared: Shared) -> Floats:
        y = be.one_linear(x, self.linear, shared)
        return be.compose(f"{self.name}.hook_out", add_selected, y, x, self)


def add_selected(be: Ops, y: Floats, x: Floats, w: SelectedLinear) -> Floats:
    """y + the term of each token's adapter; a token's row is what it is alone.   y (N, out), x (N, K) -> (N, out)"""
    y = y.copy()
    for number, adapted in enumerate(w.terms):
        rows = np.flatnonzero(w.choice == number)
        if adapted is not None and len(rows):
            y[rows] = be.add(y[rows], lora_term(be, x[rows], adapted))
    return y


class LoraTerm:
    """The term of one linear, as an adapter's file gives it.   a (r, K), b (out, r)"""

    def __init__(self, a: NDArray[np.float32], b: NDArray[np.float32], factor: float) -> None:
        self.a, self.b, self.factor = a, b, factor

    def put_on(self, w: LinearWeight) -> AdaptedLinear:
        """The linear with the term, whose sums are wide beside a BitLinear: an int8 rounding comes after them."""
        wide = w.bit_linear is not None
        scaled = (self.b.astype(np.float64) * self.factor).astype(np.float32)
        by_columns = _narrowest(np.ascontiguousarray(scaled.T))  # as kernels read it
        a, b = DenseWeight(_narrowest(self.a), wide=wide), DenseWeight(by_columns.T, wide=wide)
        return AdaptedLinear(linear=w, a=a, b=b, factor=self.factor)


def _narrowest(array: NDArray[np.float32]) -> Array:
    """The same numbers as bfloat16 where that holds them: half the bytes to read for each token."""
    narrow: Array = array.astype(ml_dtypes.bfloat16)
    return narrow if np.array_equal(narrow.astype(np.float32), array) else array


class Adapter:
    """A LoRA adapter that requests may ask for: its terms by the names of the linears.

    digest: of its numbers. Two adapters with one digest compute the same, whatever their names are.
    """

    def __init__(self, terms: Mapping[str, LoraTerm]) -> None:
        self.terms = dict(terms)
        digest = hashlib.sha256()
        for name, term in sorted(self.terms.items()):
            for part, array in (("a", term.a), ("b", term.b)):
                digest.update(f"{name} {part} {array.shape} {term.factor!r}\n".encode())
                digest.update(np.ascontiguousarray(array, dtype=np.float32).tobytes())
        self.digest = digest.hexdigest()

    def __repr__(self) -> str:
        return f"<Adapter {self.digest[:12]} on {len(self.terms)} linears>"

    def put_on(
        self, w: ModelWeights, prepare: Callable[[int | None], Callable[[LinearWeight], LinearWeight]] | None = None
    ) -> ModelWeights:
        """The model with the adapter on. prepare: as `Backend.prepare_for`, for the factors."""

        def put(name: str, weight: LinearWeight, layer: int | None) -> LinearWeight:
            if (term := self.terms.get(name)) is None:
                return weight
            adapted = term.put_on(weight)
            if prepare is None:
                return adapted
            change = prepare(layer)
            return replace(adapted, a=change(adapted.a), b=change(adapted.b))

        return _map_named(w, put)


def select_adapters(
    w: ModelWeights, adapted: Sequence[ModelWeights], choice: NDArray[np.int32], wanted: Ints | None
) -> ModelWeights:
    """The weights of one batch: `choice` (N,) says which of the adapted models is each token's, -1 is w itself.

    wanted: of the batch, the tokens that the last feed-forward computes (see `model.decoder_layers`); None: all.
    """
    of_models = [dict(each.linears()) for each in adapted]
    choice_at_end = choice if wanted is None else choice[wanted]

    def select(name: str, weight: LinearWeight, layer: int | None) -> LinearWeight:
        linears = [each[name] for each in of_models]
        terms = tuple(each if isinstance(each, AdaptedLinear) else None for each in linears)
        is_at_end = layer == len(w.layers) - 1 and name.rpartition(".")[2] in FEED_FORWARD
        return SelectedLinear(weight, terms, choice_at_end if is_at_end else choice) if any(terms) else weight

    return _map_named(w, select)


def _map_named(w: ModelWeights, change: Callable[[str, LinearWeight, int | None], LinearWeight]) -> ModelWeights:
    """The model with each linear changed by its name and layer; not the embedding, nor a head that is tied to it."""
    layers = []
    for index, layer in enumerate(w.layers):
        own: dict[str, Any] = {}
        for short, weight in layer.linears():
            changed = change(linear_name(index, short), weight, index)
            if changed is not weight:
                own[short] = changed
        layers.append(replace(layer, **own) if own else layer)
    head = w.lm_head if w.tied else change("lm_head", w.lm_head, None)
    return replace(w, layers=tuple(layers), lm_head=head)


def without_adapters(w: ModelWeights) -> ModelWeights:
    """The model that the adapter was put on."""
    return _map_named(w, lambda _, weight, __: weight.linear if isinstance(weight, AdaptedLinear) else weight)


# -- mistakes ----------------------------------------------------------------------------------------------------------


def _adapted(step: Any) -> AdaptedLinear:
    """The linear whose term a step computes."""
    linears: dict[str, Any] = dict(step.setting.weights.linears())
    weight: AdaptedLinear = linears[step.name.rpartition(".")[0]]
    return weight


def _factor(of: Callable[[AdaptedLinear], float]) -> Edit:
    """The term with another factor."""

    def edit(step: Any, compute: Edit, *inputs: Any) -> Array:
        w, right = _adapted(step), compute(*inputs)
        return (right.astype(np.float64) * (of(w) / w.factor)).astype(right.dtype)

    return edit


def _rank(w: AdaptedLinear) -> int:
    return int(w.a.shape[0])


def _of_normed_input(step: Any, compute: Edit, x: Floats, *rest: Any) -> Floats:
    """The term of the input after the norm that is inside the linear."""
    norm = _adapted(step).norm
    return compute(x if norm is None else Ops().rms_norm(x, norm), *rest)


def _of_int8_input(step: Any, compute: Edit, x: Floats, *rest: Any) -> Floats:
    """The term of the input after it was rounded to int8."""
    x_q, scale = Ops().quantize_activations(x)
    return compute((x_q / scale).astype(x.dtype), *rest)


_mistake = partial(Hypothesis, f"*.{TERM}")
MISTAKES = (
    _mistake(
        "lora_missing",
        "the adapter is not applied",
        "Add c B (A x) to the linear's result, after its bias.",
        _factor(lambda w: 0.0),
    ),
    _mistake(
        "lora_alpha_not_divided",
        "the adapter's term is multiplied by lora_alpha, not by lora_alpha / r",
        "c = lora_alpha / r, or lora_alpha / sqrt(r) with use_rslora.",
        _factor(lambda w: w.factor * _rank(w)),
        lambda step: _rank(_adapted(step)) > 1,
    ),
    _mistake(
        "lora_without_factor",
        "the adapter's term has no factor",
        "c = lora_alpha / r, or lora_alpha / sqrt(r) with use_rslora.",
        _factor(lambda w: 1.0),
        lambda step: _adapted(step).factor != 1,
    ),
    _mistake(
        "lora_root_of_rank",
        "lora_alpha is divided by sqrt(r) for r, or by r for sqrt(r)",
        "use_rslora says that it is the root.",
        _factor(lambda w: w.factor * _rank(w) ** 0.5),
        lambda step: _rank(_adapted(step)) > 1,
    ),
    _mistake(
        "lora_of_int8_input",
        "the adapter's term reads the input that was rounded to int8",
        "A reads the linear's input as it is, in float.",
        _of_int8_input,
        lambda step: _adapted(step).bit_linear is not None,
    ),
    _mistake(
        "lora_of_normed_input",
        "the adapter's term reads the input after the norm inside the linear",
        "A reads the linear's input as it is.",
        _of_normed_input,
        lambda step: _adapted(step).norm is not None,
    ),
)

KIND = WeightKind("adapted", "adapted", (AdaptedLinear,), mistakes=MISTAKES)
