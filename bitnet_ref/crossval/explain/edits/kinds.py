"""An edit with its words and its cost, the kinds of edits, and what they take from a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from ....families.family import Around, Edit, Hypothesis, after, before
from ....reference import layers
from ....reference.layers import Array
from ....reference.weights import Norm
from ...names import linear_input
from ...types import Wide
from ..variants import Step

Change = Callable[[Array], Array]
Formula = Callable[..., Any]
Row = tuple[float, str, Formula]  # cost, words, the formula of the step's inputs
# Of a Family: cost, words, the formula of c and the inputs, right (None: the second input), log and starts if any
ConstantRow = tuple[Any, ...]


@dataclass(frozen=True)
class Description:
    """One edit in words. text: a clause in which "{it}" stands for the step's tensor.   cost: lower for simpler edits.

    known: the mistake that it is an edit of.   rounds: it rounds, so a few values may differ from the engine's.
    """

    cost: float
    text: str
    edit: Edit
    known: Hypothesis | None = None
    rounds: bool = False


@dataclass(frozen=True)
class Family:
    """An edit with one unknown constant c. edit(c): the step's edit.   right: the c with which it changes nothing.

    text: "{c}" stands for the constant.   log: c is positive and varied by factors, not by differences.
    starts: values of c to begin the search from, besides `right`.
    """

    cost: float
    text: str
    edit: Callable[[float], Edit]
    right: float
    log: bool = False
    starts: tuple[float, ...] = ()

    @property
    def nudged(self) -> Edit:
        """The edit with a constant slightly different from `right`."""
        return self.edit(self.right * 1.01 if self.log or self.right else 0.01)


def wide(x: Array) -> Wide:
    return x.astype(np.float64)


def from_run(index: int | None, name: str, origin: str) -> Edit:
    """The step with another tensor of the run as one of its inputs, or (None) as its result."""

    def edit(step: Step, compute: Edit, *inputs: Any) -> Array:
        right = compute(*inputs) if index is None else inputs[index]
        other = step.seen[moved(name, origin, step)].reshape(right.shape).astype(right.dtype)
        return other if index is None else compute(*inputs[:index], other, *inputs[index + 1 :])

    return edit


def normed_by(index: int | None, name: str, origin: str) -> Edit:
    """The step with one of its inputs, or (None) its result, brought through a norm of the step's block."""

    def edit(step: Step, compute: Edit, *inputs: Any) -> Array:
        norm = norms_of(step)[moved(name, origin, step)]
        normed = partial(layers.rms_norm, weight=norm.weight, eps=norm.eps)
        return (after(normed) if index is None else before(index, normed))(step, compute, *inputs)

    return Around(edit)


def moved(name: str, origin: str, step: Step) -> str:
    """The name of a tensor or weight that lies as far from `step` as `name` does from the step `origin`, in layers."""
    parts, here = name.split("."), step.name.split(".")
    if parts[0] != "blocks" or here[0] != "blocks" or not origin.startswith("blocks."):
        return name
    layer = int(parts[1]) - int(origin.split(".")[1]) + int(here[1])
    return ".".join(["blocks", str(layer % step.setting.config.num_hidden_layers), *parts[2:]])


def parts_of(step: Step) -> dict[str, Any]:
    """Every linear of the model, and the weight of every norm."""
    w = step.setting.weights
    norms = {f"blocks.{i}.{name}": norm.weight for i, layer in enumerate(w.layers) for name, norm in layer.norms()}
    return {**dict(w.linears()), **norms, "the final norm": w.final_norm.weight}


def with_part(cost: float, text: str, step: Step, fits: Callable[[Any], bool], use: Formula) -> Iterator[Description]:
    """Another linear or norm in place of the step's own, its second or third input: use(compute, the other, *inputs).

    Each in two readings: of that module in every layer, or of the module that is as many layers away from each layer as
    it is from this one.
    """

    def edit(name: str, origin: str) -> Edit:
        return lambda step, compute, *inputs: use(compute, parts_of(step)[moved(name, origin, step)], *inputs)

    for name, part in parts_of(step).items():
        if fits(part) and not any(part is x for x in step.inputs):
            yield Description(cost, text.format(name), edit(name, step.name))
            if name.startswith("blocks.") and name.split(".")[1] != step.name.split(".")[1]:
                yield Description(cost + 0.01, text.format(name), edit(name, ""))


def take_row(shift: int) -> Edit:
    """The embedding's row of id + shift."""
    return lambda step, compute, table, ids: compute(table, (ids + shift) % table.shape[0])


def input_floats(step: Step) -> Array:
    """The floats that the input of a linear's product was quantised from, of a step of that linear.   (N, K)"""
    source = step.seen[linear_input(step.owner, step.setting.config)]
    return source.reshape(len(step.inputs[0]), -1)


def scale_inputs(first: int, stop: int | None, factor: int, others: int = 1) -> Edit:
    """A product whose inputs from `first` to before `stop` are multiplied by `factor`, and the others by `others`.

    stop None: to the last.
    """

    def change(x: Array) -> Array:
        factors = np.full(x.shape[1], others, dtype=np.int16)
        factors[first:stop] = factor
        return np.clip(x * factors, -128, 127).astype(x.dtype) if x.dtype == np.int8 else (x * factors).astype(x.dtype)

    return before(0, change)


def with_other(field: str, change: Formula) -> Edit:
    """The step's weight with another array in the place of this one."""

    def edit(w: Any) -> Any:
        array = getattr(w, field)
        return replace(w, **{field: np.ascontiguousarray(change(array), dtype=array.dtype)})

    return before(1, edit)


def norms_of(step: Step) -> dict[str, Norm]:
    """Every norm of the model, by name."""
    w = step.setting.weights
    norms = [norm for layer in w.layers for _, norm in layer.norms()]
    norms += [each.norm for _, each in w.linears() if each.norm is not None]
    return {norm.name: norm for norm in (*norms, w.final_norm)}
