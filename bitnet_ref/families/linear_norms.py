"""A linear with an RMSNorm of its own before it: `use_rms_norm` of BitNet checkpoints, and BitNet-Embedding.

The norm comes before the quantisation of activations, so linears of one input share neither norm nor int8 values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..reference.layers import Array, Floats
from ..reference.ops import Ops
from ..reference.weights import LinearWeight, ModelWeights, Norm, Shared, TernaryLinear, TernaryWeight
from .family import Edit, Hypothesis, WeightKind, before, layer_weights, leave_out
from .lora import AdaptedLinear, LinearAround


@dataclass(frozen=True, eq=False, repr=False)
class NormedLinear(LinearAround):
    """y = linear(norm(x)). A backend prepares and computes the linear inside as it does any other."""

    kind = "normed"

    own_norm: Norm  # (K,), called "blocks.3.attn.q_proj.rms_norm"
    linear: LinearWeight

    @property
    def norm(self) -> Norm:  # type: ignore[override]
        return self.own_norm

    def called(self, name: str) -> NormedLinear:
        return NormedLinear(replace(self.own_norm, name=f"{name}.rms_norm"), self.linear.called(name))

    def plain(self) -> NormedLinear:
        return NormedLinear(self.own_norm, self.linear.plain())

    def contents(self, name: str) -> Iterator[tuple[str, Array]]:
        yield from self.linear.contents(name)
        yield f"{name}.rms_norm {self.own_norm.eps}", self.own_norm.weight

    def product(self, be: Ops, x: Floats, shared: Shared) -> Floats:
        normed: dict[str, Any] = {}
        return self.linear.product(be, be.rms_norm(x, self.own_norm), normed)


def model_norms(w: ModelWeights) -> Iterator[Norm]:
    """Every norm of a model, those inside its linears among them."""
    for layer in w.layers:
        yield from (norm for _, norm in layer.norms())
    yield w.final_norm
    yield from (weight.norm for _, weight in w.linears() if weight.norm is not None)


def map_bit_linear(linear: LinearWeight, change: Callable[[TernaryLinear], LinearWeight]) -> LinearWeight:
    """The linear with the BitLinear in it changed; itself if there is none."""
    if isinstance(linear, NormedLinear | AdaptedLinear):
        return replace(linear, linear=map_bit_linear(linear.linear, change))
    return linear if linear.bit_linear is None else change(linear.bit_linear)


def put_norm(linear: LinearWeight, weight: NDArray[np.float32] | None, eps: float | None) -> LinearWeight:
    """The linear with a norm before it; itself where there is none."""
    return linear if weight is None or eps is None else NormedLinear(Norm(weight, eps), linear)


# -- mistakes ----------------------------------------------------------------------------------------------------------

_FIRST = {"k_proj": "q_proj", "v_proj": "q_proj", "up_proj": "gate_proj"}  # the first linear of the same input


def _linear_of(step: Any) -> str:
    """The linear before which a norm stands: "k_proj"."""
    return str(step.name.split(".")[-3])


def _norm_of_the_first(step: Any, compute: Edit, x: Floats, length: Floats, weight: Floats) -> Floats:
    first = getattr(layer_weights(step), _FIRST[_linear_of(step)])
    return compute(x, length, first.norm.weight)


def _is_after_another(step: Any) -> bool:
    first = _FIRST.get(_linear_of(step))
    return first is not None and getattr(layer_weights(step), first).norm is not None


MISTAKES = (
    Hypothesis(
        "*_proj.rms_norm.hook_normalized",
        "linear_norm_missing",
        "the norm that each linear has of its own is left out",
        "Normalise each linear's input with its own norm before it is quantised (BitNet-Embedding, Qwen2.5-BitNet).",
        leave_out,
    ),
    Hypothesis(
        "*_proj.rms_norm.hook_normalized",
        "linear_norm_shared",
        "linears of one input share a norm: k and v have q's, up has gate's",
        "Each linear has a norm of its own, and so a quantised input of its own.",
        _norm_of_the_first,
        _is_after_another,
    ),
    Hypothesis(
        "*_proj.rms_norm.hook_scale",
        "linear_norm_eps",
        "the norms inside the linears have the model's eps",
        "Their eps is rms_norm_eps of the quantization_config, 1e-6 unless it says otherwise.",
        before(1, lambda eps: 1e-5),
        lambda step: step.inputs[1] != 1e-5,
    ),
)

TERNARY = WeightKind("ternary", "ternary", (TernaryWeight,))
NORMED = WeightKind("normed", "ternary", (NormedLinear,), mistakes=MISTAKES)
