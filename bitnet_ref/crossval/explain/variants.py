"""The reference with steps computed in another way, run and recorded: how a cause of an engine's mistake is tested.

A run is a sequence of *steps*, each named after the tensor that it computes: a norm's length, then its result; the
activation scale, the int8 values, the accumulators, the output; q, k and v; scores, pattern, values. An *edit* computes
one step another way. A `Setting` is everything that a run depends on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...backends import Backend
from ...backends.backend import plain_weights
from ...backends.loaded import LoadedModel
from ...backends.observe import Call, ObservedStep, observe
from ...backends.paged_cache import EngineKVCache
from ...backends.record import LOGITS, NamesFilter, Recorder, sibling
from ...errors import BitNetRefError
from ...families import family_of
from ...families.family import Around, Edit
from ...families.lora import AdaptedLinear
from ...formats.open import open_checkpoint
from ...reference import layers
from ...reference.cache import KVCache, TokenBatch
from ...reference.config import ModelConfig
from ...reference.layers import Array, Floats
from ...reference.model import forward
from ...reference.weights import (
    DenseWeight,
    LayerWeights,
    LinearWeight,
    ModelWeights,
    Norm,
    TernaryLinear,
    TernaryWeight,
)
from ...system.lazy import lazy_property
from ..calls import Calls
from ..names import hook_of, layer_of, op_shape
from ..types import Ints, Tensors
from .attention import all_scores, all_values

# What an edit raises that does not fit a step's shapes.
IMPOSSIBLE = (BitNetRefError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError)


@dataclass
class Step:
    """One step of a run.

    name: the tensor that it computes.   seen: the tensors of the run so far, by name.   inputs, result: as computed.
    """

    name: str
    setting: Setting
    seen: Tensors
    inputs: tuple[Any, ...] = ()
    result: Array = field(default_factory=lambda: np.zeros(0, dtype=np.float32))
    compute: Callable[..., Array] = np.asarray

    @property
    def layer(self) -> int | None:
        """The block that it is in."""
        return layer_of(self.name)

    @property
    def kind(self) -> str:
        """The last part of its name: "hook_scale"."""
        return hook_of(self.name)

    @property
    def owner(self) -> str:
        """The name without the last part: of a norm or a linear."""
        return self.name.rpartition(".")[0]

    @lazy_property
    def place(self) -> str:
        """The name, for globs: of a linear's product its hook_out; of the sum with its bias, or of its cap, "added"."""
        owner, _, hook = self.name.rpartition(".")
        if hook in ("product", "hook_uncapped"):
            return f"{owner}.hook_out"
        is_product = hook != "hook_out" or isinstance(self.inputs[1], LinearWeight)
        return self.name if is_product else f"{owner}.added"


@dataclass(frozen=True)
class Setting:
    """What one run computes.   tokens: (T,).   edits: of steps, by name.   check: called before each step; may raise.

    calls: how many tokens each call of the engine computed, which edits may depend on; () for one call. The reference
    takes one pass whatever they are.   others: the tokens of other sequences that the engine ran beside this one.
    path: of the model, whose masters edits may quantise in another way.
    """

    config: ModelConfig
    weights: ModelWeights
    tokens: Ints
    edits: Mapping[str, Edit] = field(default_factory=dict)
    calls: Calls = ()
    others: tuple[tuple[int, ...], ...] = ()
    check: Callable[[], None] = lambda: None
    path: Path | None = None

    @classmethod
    def of(cls, loaded: LoadedModel, token_ids: Any, run: Any = None) -> Setting:
        """The reference's own setting, whatever backend the model was loaded for.

        run: a trace, for its `calls` and `others`; None: one call.
        """
        calls, others = getattr(run, "calls", ()), getattr(run, "others", ())
        tokens = loaded.check_tokens(token_ids)
        others = tuple(tuple(map(int, other)) for other in others)
        return cls(loaded.config, plain_weights(loaded.weights), tokens, {}, calls, others, path=loaded.path)

    def with_edits(self, edits: Mapping[str, Edit]) -> Setting:
        """The setting with these steps edited as well; of two edits of a step both are made, see `both_edits`."""
        both = {name: both_edits(self.edits[name], edits[name]) for name in edits if name in self.edits}
        return replace(self, edits={**self.edits, **edits, **both})

    def master(self, linear: str) -> NDArray[np.float32] | None:
        """The matrix (N, K) that a BitLinear was quantised from when it was loaded; None if the file has none."""
        return None if self.path is None else _read_master(self.path, linear)

    @lazy_property
    def steps(self) -> dict[str, Step]:
        """The steps of a run, in the order of the computation."""
        steps: dict[str, Step] = {}

        def settle(step: Step) -> Array:
            steps[step.name] = step
            return step.result

        self.run(names_filter=(), settle=settle)
        return steps

    def run(
        self,
        names_filter: NamesFilter = None,
        until: str | None = None,
        tape: Mapping[str, Step] | None = None,
        settle: Callable[[Step], Array] | None = None,
        copies: int = 1,
        backend: Backend | None = None,
    ) -> dict[str, Array]:
        """One forward pass, recorded: {name: array} in the order of the computation.

        until: the pass ends when the tensor of that name has been computed.
        tape: the steps of an earlier run; those without an edit whose inputs are the same are not computed again.
        settle: called with each step that was computed; the run goes on with the tensor that it returns.
        copies: so many sequences of the tokens, laid end to end; `edit_copies` edits each in its own way.
        backend: computes the ops; None: the reference on one thread.
        """
        be = Backend("float32", threads=1) if backend is None else backend
        recorder = _StepRecorder(self, be, names_filter, until, tape or {}, settle)
        batch = TokenBatch.of([(slot, 0, self.tokens) for slot in range(copies)])
        cache = EngineKVCache(self.config, slots=copies, capacity=len(self.tokens))
        with np.errstate(all="ignore"), suppress(Finished):  # a wrong change may overflow: `run` would raise
            forward(observe(be, recorder), self.weights, self.config, batch, cache)
        return recorder.seen


@lru_cache(maxsize=4)
def _read_master(path: Path, linear: str) -> NDArray[np.float32] | None:
    try:
        with open_checkpoint(path) as checkpoint:
            master = checkpoint.master(linear)
    except (BitNetRefError, OSError):  # not a file that has masters, or no longer there
        return None
    return None if master is None else np.asarray(master, dtype=np.float32)


class Finished(Exception):
    """The last tensor that was asked for has been computed."""


def both_edits(first: Edit, second: Edit) -> Edit:
    """Two edits of one step: the second of what the first gives, but one of the formula inside one around it."""
    inner, outer = (second, first) if isinstance(first, Around) and not isinstance(second, Around) else (first, second)

    def edit(step: Step, compute: Edit, *inputs: Any) -> Array:
        return outer(step, partial(inner, step, compute), *inputs)

    return Around(edit) if isinstance(inner, Around) else edit


class _StepRecorder(Recorder):
    """Records a pass step by step, with the setting's edits. The other arguments are those of `Setting.run`."""

    def __init__(
        self,
        setting: Setting,
        be: Backend,
        names_filter: NamesFilter,
        until: str | None,
        tape: Mapping[str, Step],
        settle: Callable[[Step], Array] | None,
    ) -> None:
        super().__init__(be, setting.config, names_filter)
        self.setting, self.until, self.tape, self.settle = setting, until, tape, settle
        self.is_reference = type(be) is Backend  # so its integers may be computed in a quicker way
        self.steps: dict[str, Array] = {}
        self.family = family_of(setting.config)
        self.adapted = {name for name, w in setting.weights.linears() if isinstance(w, AdaptedLinear)}

    def keep(self, name: str, array: Array) -> None:
        if name == LOGITS and name not in self.steps and self.setting.config.logit_softcap is not None:
            return  # `on_linears` has a step for it
        super().keep(name, array)
        if name == self.until:
            raise Finished

    def step(self, name: str, compute: Callable[..., Array], *inputs: Any) -> Array:
        """One step: as in the tape, computed, or as the edit computes it."""
        self.setting.check()
        edit, earlier = self.setting.edits.get(name), self.tape.get(name)
        if edit is None and name != self.until and earlier is not None and _same_inputs(earlier.inputs, inputs):
            result = earlier.result
        else:
            step = Step(name, self.setting, self.steps, inputs, compute=compute)
            step.result = compute(*inputs) if edit is None else edit(step, compute, *inputs)
            result = step.result if self.settle is None else self.settle(step)
        self.steps[name] = result
        if "hook_" in name and not name.endswith("hook_x_scale"):  # a trace has the scale after the int8 values
            self.keep(name, self.by_token(result) if name.endswith(("hook_scale", "hook_normalized")) else result)
        return result

    def on_result(self, step: ObservedStep, call: Call, *args: Any) -> Array:
        if step.op == "scale":
            x, factor, name = args
            return self.step(name, lambda x, factor: call(x, factor, name), x, factor)
        return self.step(step.name, call, *args)

    def on_rms_norm(self, step: ObservedStep, call: Call, x: Array, norm: Norm) -> Any:
        if norm.name == "ln_final":
            self.tokens = x.shape[0]
        length = self.step(f"{norm.name}.hook_scale", layers.rms_scale, x, norm.eps)
        return self.step(step.name, lambda x, length, weight: x / length * weight, x, length, norm.weight)

    def keep_output(self, name: str, y: Array) -> None:
        if name == LOGITS and (cap := self.setting.config.logit_softcap) is not None:
            self.step(name, layers.softcap, y, cap)

    def keep_heads(self, ws: Sequence[LinearWeight], outputs: list[Array]) -> None:
        """q and k, cut into heads, are steps: the block goes on with what they give."""
        if not ws[-1].name.endswith(".v_proj"):
            return
        for i, letter in enumerate("qk"):
            y = outputs[i]
            name = f"{ws[i].name.rpartition('.')[0]}.hook_{letter}"
            heads = self.step(name, np.asarray, y.reshape(len(y), -1, self.cfg.head_dim))
            outputs[i] = heads.reshape(y.shape)

    def on_compute(self, step: ObservedStep, call: Call, name: str, function: Callable[..., Array], *args: Any) -> Any:
        """An op of a family: a step whose inputs are the arrays of the run, and the layer's weights."""
        if step.name.endswith(".hook_out"):
            product = partial(super().on_compute, step, call, name, function)
            return self._product(step.name, product, *args)
        if function in self.also_recorded and not self._has_states(step, function):
            self.keep_beside(step, function, args)
        kinds = (np.ndarray, LayerWeights, str)  # what follows is where states are, or the config
        count = sum(isinstance(arg, kinds) for arg in args)

        def compute(*inputs: Array) -> Array:
            result: Array = call(name, function, *inputs, *args[count:])
            return result

        if self._has_states(step, function):  # two steps: the states, and what they give
            hook, further = self.also_recorded[function]

            def states_of(*inputs: Array) -> Array:
                return np.asarray(further(*inputs, *args[count:]))

            states = self.step(sibling(step.name, hook), states_of, *args[:count])
            return self.step(step.name, self.family.from_recorded[function], states, *args[:count])
        return self.step(step.name, compute, *args[:count])

    def _has_states(self, step: ObservedStep, function: Callable[..., Array]) -> bool:
        """Whether an op is computed from the states that are recorded beside it, which are then held for all tokens."""
        if function not in self.family.from_recorded:
            return False
        hook, _ = self.also_recorded[function]
        return math.prod(op_shape(sibling(step.name, hook), self.cfg, self.tokens)) < _MOST_STATES

    def on_quantize_activations(self, step: ObservedStep, call: Call, x: Array) -> Any:
        scale_name = sibling(step.name, "hook_x_scale")
        self.x_scale = scale = self.step(scale_name, lambda x: call(x)[1], x)
        to_int8 = _to_int8 if self.is_reference else lambda x, scale: call(x)[0]
        return self.step(step.name, to_int8, x, scale), scale

    def on_ternary_matmul(self, step: ObservedStep, call: Call, x_q: Array, w: TernaryLinear) -> Any:
        self.keep(sibling(step.name, "hook_x_int8"), x_q)
        self.keep(sibling(step.name, "hook_x_scale"), self.x_scale)
        return self.step(step.name, quick_ternary_matmul(w, call) if self.is_reference else call, x_q, w)

    def on_dequantize(self, step: ObservedStep, call: Call, acc: Array, w: TernaryLinear, x_quant_scale: Array) -> Any:
        return self._product(step.name, call, acc, w, x_quant_scale)

    def on_dense_matmul(self, step: ObservedStep, call: Call, x: Array, w: DenseWeight) -> Any:
        is_quick = self.tape and w.nbytes < SMALL  # in another order of summation: in a search only
        return self._product(step.name, _small_product if is_quick else call, x, w)

    def _product(self, name: str, call: Call, x: Array, w: LinearWeight, *scale: Array) -> Array:
        """A linear's output; without its bias or cap, which are other steps, it has another name."""
        if w.bias is not None or name.rpartition(".")[0] in self.adapted:
            name = sibling(name, "product")
        elif name == LOGITS and self.setting.config.logit_softcap is not None:
            name = "lm_head.hook_uncapped"
        return self.step(name, call, x, w, *scale)

    def on_add(self, step: ObservedStep, call: Call, x: Array, y: Array) -> Any:
        if step.name.endswith(".hook_out"):  # a linear's bias, or an adapter's term
            is_last = y.ndim == 2 or step.name.rpartition(".")[0] not in self.adapted
            return self.step(step.name if is_last else sibling(step.name, "with_bias"), call, x, y)
        half = "attn" if step.name.endswith("hook_resid_mid") else "mlp"
        y = self.step(sibling(step.name, f"hook_{half}_out"), np.asarray, y)
        return self.step(step.name, call, x, y)

    def on_rope(self, step: ObservedStep, call: Call, q: Array, k: Array, cos: Array, sin: Array) -> Any:
        q = self.step(step.name, layers.apply_rope, q, cos, sin)
        return q, self.step(sibling(step.name, "hook_rot_k"), layers.apply_rope, k, cos, sin)

    def on_append(
        self, step: ObservedStep, call: Call, cache: KVCache, layer: int, batch: TokenBatch, k: Array, v: Array
    ) -> None:
        self.keys, self.values = k, self.step(step.name, np.asarray, v)
        call(cache, layer, batch, k, v)

    def on_attention(self, step: ObservedStep, call: Call, q: Array, *rest: Any) -> Array:
        *_, window = rest
        attn, n = step.name.removesuffix(".hook_z"), len(self.setting.tokens)
        given = self.step(f"{attn}.hook_attn_scores", partial(all_scores, n), q, self.keys, window)
        pattern = self.step(f"{attn}.hook_pattern", layers.softmax, given)
        return self.step(step.name, partial(all_values, n), pattern, self.values)

    def on_gated(self, step: ObservedStep, call: Call, gate: Array, up: Array, activation: str) -> Any:
        gate = self.step(sibling(step.name, "hook_pre"), np.asarray, gate)
        up = self.step(sibling(step.name, "hook_pre_linear"), np.asarray, up)
        return self.step(step.name, call, gate, up, activation)


def edit_copies(edits: Sequence[Edit | None], tokens: int, failed: set[int]) -> Edit:
    """The edit of a step of a run with copies: copy i is edited by edits[i]. `failed` gets those that cannot be."""

    def part(x: Any, i: int) -> Any:
        if not isinstance(x, np.ndarray) or not x.ndim or (x.ndim == 1 and x.dtype.kind == "f"):
            return x  # a norm's weight has no tokens
        rows = len(edits) * tokens
        if x.ndim == 3 and x.shape[1:] == (rows, tokens):  # scores, patterns
            return x[:, i * tokens : (i + 1) * tokens]
        of_copy = len(x) // len(edits)  # a norm over heads has several rows for each token
        return x[i * of_copy : (i + 1) * of_copy] if len(x) >= rows and len(x) % rows == 0 else x

    def edit(step: Step, compute: Edit, *inputs: Any) -> Array:
        right = compute(*inputs)
        result = right.copy()
        for i, own in enumerate(edits):
            if own is None:
                continue
            given = tuple(part(x, i) for x in inputs)
            seen = _Parts(step.seen, partial(part, i=i))
            place = part(result, i)
            try:
                value = own(Step(step.name, step.setting, seen, given, part(right, i), compute), compute, *given)
                value = value.reshape(place.shape)
                if not np.isfinite(np.where(np.isneginf(value), 0, value)).all():
                    raise FloatingPointError
                place[:] = value
            except IMPOSSIBLE:
                failed.add(i)
        return result

    return edit


class _Parts(Tensors):
    """One copy's part of each tensor."""

    def __init__(self, seen: Tensors, part: Callable[[Array], Array]) -> None:
        self.seen, self.part = seen, part

    def __getitem__(self, name: str) -> Array:
        return self.part(self.seen[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self.seen)

    def __len__(self) -> int:
        return len(self.seen)


def _same_inputs(earlier: tuple[Any, ...], inputs: tuple[Any, ...]) -> bool:
    """Whether arrays are the same memory, which a tape holds and so is not used again, or small and equal."""

    def same(a: Any, b: Any) -> bool:
        if not isinstance(a, np.ndarray) or not isinstance(b, np.ndarray):
            return a is b or bool(a == b)
        if a.shape != b.shape:
            return False
        memory = a.__array_interface__["data"][0] == b.__array_interface__["data"][0] and a.strides == b.strides
        return memory or (a.size < 1 << 14 and np.array_equal(a, b))  # RoPE's tables are computed in each run

    return len(earlier) == len(inputs) and all(map(same, earlier, inputs))


def is_same(one: Array, other: Array) -> bool:
    """Whether a tensor is another one up to rounding."""
    size = float(np.abs(other).max(where=np.isfinite(other), initial=0))
    return one.shape == other.shape and np.allclose(one, other, rtol=1e-4, atol=1e-5 * size, equal_nan=True)


SMALL = 1 << 17  # bytes of a matrix
_MOST_STATES = 1 << 24  # numbers: of a layer whose states are steps


def _to_int8(x: Floats, x_quant_scale: Floats) -> NDArray[np.int8]:
    whole: Floats = np.rint(x * x_quant_scale)
    return whole.clip(-128, 127).astype(np.int8)


@lru_cache(maxsize=128)
def _transposed(w: TernaryLinear | DenseWeight) -> NDArray[np.floating]:
    if w.bit_linear is not None:
        return np.ascontiguousarray(w.bit_linear.ternary().T.astype(np.float32))
    return np.ascontiguousarray(w.array.T.astype(np.float64 if w.wide else np.float32))


def _small_product(x: Array, w: TernaryLinear | DenseWeight) -> Array:
    """The product of a small matrix that is not unpacked or widened each time: a search multiplies often."""
    w_t = _transposed(w)
    y: Array = x.astype(w_t.dtype) @ w_t
    return y.astype(x.dtype if w.bit_linear is None else np.int32)


def quick_ternary_matmul(w: TernaryLinear, call: Call) -> Call:
    """The op itself; of a small matrix one that gives the same integers sooner."""
    return _small_product if w.nbytes < SMALL else call


def with_matrix(weight: TernaryWeight, w_t: NDArray[np.int8]) -> TernaryWeight:
    """The same weight with another ternary matrix (N, K)."""
    packed = TernaryWeight.from_ternary(np.ascontiguousarray(w_t), float(weight.w_dequant_scale)).packed
    return replace(weight, packed=packed)
