"""The reference with one thing changed, run and recorded: how a hypothesis about an engine's mistake is tested.

A `Setting` is everything that a forward pass depends on. A `Hypothesis` (`families/family.py`) makes a changed one.

A run is a sequence of *steps*, each named after the tensor that it computes: a norm's length, then its result; the
activation scale, the int8 values, the accumulators, the output; q, k and v; scores, pattern, values. An *edit* computes
one step another way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache, partial
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
from ...families.linear_norms import map_bit_linear
from ...reference import layers
from ...reference.cache import KVCache, TokenBatch
from ...reference.config import ModelConfig
from ...reference.model import forward, rope_tables_of
from ...reference.weights import (
    DenseWeight,
    LayerWeights,
    LinearWeight,
    ModelWeights,
    Norm,
    TernaryLinear,
    TernaryWeight,
)

Op = Callable[..., NDArray]
Edit = Callable[..., NDArray]  # (step, compute, *inputs) -> the step's tensor; compute(*inputs) is the right one
Sees = Callable[[int, int | None], tuple[int, int]]  # (position, window) -> first position seen, one past the last


# What an edit raises that does not fit a step's shapes.
IMPOSSIBLE = (BitNetRefError, ArithmeticError, LookupError, TypeError, ValueError)


def is_by_head(name: str) -> bool:
    """Whether a tensor's first axis is its heads, and tokens come second."""
    return name.endswith(("hook_attn_scores", "hook_pattern"))


def causal(position: int, window: int | None) -> tuple[int, int]:
    """The token itself and the tokens before it, as far as the window reaches."""
    return (0 if window is None else max(0, position - window + 1)), position + 1


@dataclass(frozen=True)
class AttentionRule:
    """sees: the positions that a token attends to.   kv_heads: the kv head of each query head; None: h // (H/G).
    factor: of the scores."""

    sees: Sees = causal
    kv_heads: tuple[int, ...] | None = None
    factor: float = 1.0


@dataclass
class Step:
    """One step of a run.

    name: the tensor that it computes.   seen: the tensors of the run so far, by name.   inputs, result: as computed.
    """

    name: str
    setting: Setting
    seen: Mapping[str, NDArray]
    inputs: tuple[Any, ...] = ()
    result: NDArray = field(default_factory=lambda: np.zeros(0, dtype=np.float32))
    compute: Callable[..., NDArray] = np.asarray


@dataclass(frozen=True)
class Setting:
    """What one run computes.

    tokens: (T,).   ops: replacements of ops by name, each called with the plain op and then with its arguments.
    edits: of steps, by name.
    texts: other texts of "attention_block" or "feed_forward", called as `reference.model`'s, for mistakes in the
        order of the ops.
    layers: other settings for single layers; the blocks of layer i are computed as layers[i] says.
    """

    config: ModelConfig
    weights: ModelWeights
    tokens: NDArray[np.int64]
    ops: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    attention: AttentionRule = AttentionRule()
    edits: Mapping[str, Edit] = field(default_factory=dict)
    texts: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    layers: Mapping[int, Setting] = field(default_factory=dict)

    @classmethod
    def of(cls, loaded: LoadedModel, token_ids: Any) -> Setting:
        """The reference's own setting, whatever backend the model was loaded for."""
        return cls(loaded.config, plain_weights(loaded.weights), loaded.check_tokens(token_ids))

    def with_ops(self, **ops: Callable[..., Any]) -> Setting:
        return replace(self, ops={**self.ops, **ops})

    def with_edits(self, edits: Mapping[str, Edit]) -> Setting:
        return replace(self, edits={**self.edits, **edits})

    def with_texts(self, **texts: Callable[..., Any]) -> Setting:
        return replace(self, texts={**self.texts, **texts})

    def with_attention(self, **values: Any) -> Setting:
        return replace(self, attention=replace(self.attention, **values))

    def with_config(self, **values: Any) -> Setting:
        return replace(self, config=replace(self.config, **values))

    def with_rope(self, **values: Any) -> Setting:
        return self.with_config(rope=replace(self.config.rope, **values))

    def in_layers(self, changed: Setting, layers: Iterable[int]) -> Setting:
        """This setting with the blocks of some layers as in `changed`."""
        blocks = list(self.weights.layers)
        for i in layers:
            blocks[i] = changed.weights.layers[i]
        weights = replace(self.weights, layers=tuple(blocks))
        return replace(self, weights=weights, layers={**self.layers, **dict.fromkeys(layers, changed)})

    def map_layers(self, change: Callable[[LayerWeights], LayerWeights]) -> Setting:
        return replace(self, weights=replace(self.weights, layers=tuple(change(w) for w in self.weights.layers)))

    def map_norms(self, change: Callable[[Norm], Norm]) -> Setting:
        """Every norm of the model's blocks and the final one, changed; not one among a layer's further arrays."""

        def layer(w: LayerWeights) -> LayerWeights:
            names = self.config.norm_shapes(int(w.name.split(".")[1]))
            changed: dict[str, Any] = {name: change(norm) for name, norm in w.norms() if name in names}
            return replace(w, **changed)

        changed = self.map_layers(layer)
        return replace(changed, weights=replace(changed.weights, final_norm=change(self.weights.final_norm)))

    def map_ternary(self, change: Callable[[str, TernaryWeight], TernaryWeight]) -> Setting:
        """Every ternary linear of the blocks changed; `change` gets its name ("q_proj") and its weight."""

        def linear(weight: LinearWeight) -> LinearWeight:
            name = weight.name.rpartition(".")[2]
            return map_bit_linear(weight, lambda ternary: change(name, ternary.plain()))

        return self.map_layers(lambda w: w.map_linears(linear))

    def around(self, step: ObservedStep, call: Call, args: tuple[Any, ...]) -> Any:
        """For `observe`: computes the op, or its replacement."""
        return self.ops[step.op](call, *args) if step.op in self.ops else call(*args)

    def backend(self) -> Backend:
        """The plain backend with the replaced ops."""
        return observe(Backend("float32", threads=1), self.around)

    def run(
        self,
        names_filter: NamesFilter = None,
        until: str | None = None,
        tape: Mapping[str, Step] | None = None,
        settle: Callable[[Step], NDArray] | None = None,
        copies: int = 1,
    ) -> dict[str, NDArray]:
        """One forward pass, recorded: {name: array} in the order of the computation.

        until: the pass ends when the tensor of that name has been computed.
        tape: the steps of an earlier run; those without an edit whose inputs are the same are not computed again.
        settle: called with each step that was computed; the run goes on with the tensor that it returns.
        copies: so many sequences of the tokens, laid end to end; `edit_copies` edits each in its own way.
        """
        be = Backend("float32", threads=1)
        recorder = _VariantRecorder(self, be, names_filter, until=until, tape=tape or {}, settle=settle)
        recorder.observed = observe(be, recorder)
        batch = TokenBatch.of([(slot, 0, self.tokens) for slot in range(copies)])
        cache = EngineKVCache(self.config, slots=copies, capacity=len(self.tokens))
        with np.errstate(all="ignore"), suppress(_Finished):  # a wrong change may overflow: `run` would raise
            forward(recorder.observed, self.weights, self.config, batch, cache)
        return recorder.seen


class _Finished(Exception):
    """The last tensor that was asked for has been computed."""


class _VariantRecorder(Recorder):
    """Records a pass, step by step, with the setting's ops, edits and rule of attention."""

    observed: Backend  # the backend that passes its ops to this recorder

    def __init__(self, setting: Setting, be: Backend, names_filter: NamesFilter, **options: Any) -> None:
        """options: `until`, `tape` and `settle` of `Setting.run`"""
        super().__init__(be, setting.config, names_filter)
        self.whole, self.setting, self.edits = setting, setting, setting.edits
        self.until, self.tape, self.settle = options["until"], options["tape"], options["settle"]
        self.steps: dict[str, NDArray] = {}
        self.handlers |= {"quantize_activations": self.on_quantize_activations, "append": self.on_append}
        self.handlers |= {"dense_matmul": self.on_dense_matmul, "add": self.on_add}

    def __call__(self, step: ObservedStep, call: Call, args: tuple[Any, ...]) -> Any:
        return super().__call__(step, lambda *inputs: self.setting.around(step, call, inputs), args)

    def keep(self, name: str, array: NDArray) -> None:
        if name == LOGITS and name not in self.steps and self.setting.config.logit_softcap is not None:
            return  # `on_linears` has a step for it
        super().keep(name, array)
        if name == self.until:
            raise _Finished

    def step(self, name: str, compute: Callable[..., NDArray], *inputs: Any) -> NDArray:
        """One step: as in the tape, computed, or as the edit computes it."""
        edit, earlier = self.edits.get(name), self.tape.get(name)
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

    # -- blocks: each as its layer's setting has it --------------------------------------------------------------------

    def on_attention_block(self, step: ObservedStep, call: Call, x: NDArray, w: LayerWeights, *rest: Any) -> Any:
        _, rope, batch, cache, layer = rest
        self.setting = self.whole.layers.get(layer, self.whole)
        cfg = self.setting.config
        if self.setting is not self.whole:
            rope = rope_tables_of(self.observed, cfg, batch.positions)[cfg.rope_of(layer)]
        text = self.setting.texts.get(step.op)
        block = call if text is None else partial(text, self.observed)
        return super().on_attention_block(step, block, x, w, cfg, rope, batch, cache, layer)

    def on_feed_forward(self, step: ObservedStep, call: Call, x: NDArray, w: LayerWeights, *rest: Any) -> Any:
        text = self.setting.texts.get(step.op)
        block = call if text is None else partial(text, self.observed)
        self.keep(f"{w.name}.hook_resid_mid", x)
        self.tokens = x.shape[0]
        y = block(x, w, self.setting.config)
        self.keep(step.name, y)
        self.setting = self.whole
        return y

    # -- ops -----------------------------------------------------------------------------------------------------------

    def on_result(self, step: ObservedStep, call: Call, *args: Any) -> NDArray:
        if step.op == "scale":
            x, factor, name = args
            return self.step(name, lambda x, factor: call(x, factor, name), x, factor)
        return self.step(step.name, call, *args)

    def on_rms_norm(self, step: ObservedStep, call: Call, x: NDArray, norm: Norm) -> Any:
        if "rms_norm" in self.setting.ops:
            return super().on_rms_norm(step, call, x, norm)
        if norm.name == "ln_final":
            self.tokens = x.shape[0]
        length = self.step(f"{norm.name}.hook_scale", layers.rms_scale, x, norm.eps)
        return self.step(step.name, lambda x, length, weight: x / length * weight, x, length, norm.weight)

    def keep_output(self, name: str, y: NDArray) -> None:
        if name == LOGITS and (cap := self.setting.config.logit_softcap) is not None:
            self.step(name, layers.softcap, y, cap)

    def keep_heads(self, ws: Sequence[LinearWeight], outputs: list[NDArray]) -> None:
        """q and k, cut into heads, are steps: the block goes on with what they give."""
        if not ws[-1].name.endswith(".v_proj"):
            return
        for i, letter in enumerate("qk"):
            y = outputs[i]
            name = f"{ws[i].name.rpartition('.')[0]}.hook_{letter}"
            heads = self.step(name, np.asarray, y.reshape(len(y), -1, self.cfg.head_dim))
            outputs[i] = heads.reshape(y.shape)

    def on_compute(
        self, step: ObservedStep, call: Call, name: str, function: Callable[..., NDArray], *args: Any
    ) -> Any:
        """An op of a family: a step whose inputs are the arrays of the run."""
        if step.name.endswith(".hook_out"):
            product = partial(super().on_compute, step, call, name, function)
            return self._product(step.name, product, *args)
        if function in self.also_recorded:
            self.keep_beside(step, function, args)
        arrays = [
            i for i, arg in enumerate(args) if isinstance(arg, np.ndarray)
        ]  # of the run; weights are in their layer

        def compute(*inputs: NDArray) -> NDArray:
            given = list(args)
            for i, x in zip(arrays, inputs, strict=True):
                given[i] = x
            result: NDArray = call(name, function, *given)
            return result

        return self.step(step.name, compute, *(args[i] for i in arrays))

    def on_quantize_activations(self, step: ObservedStep, call: Call, x: NDArray) -> Any:
        if "quantize_activations" in self.setting.ops:
            x_q, self.x_scale = call(x)
            return x_q, self.x_scale
        scale_name = sibling(step.name, "hook_x_scale")
        self.x_scale = scale = self.step(scale_name, lambda x: call(x)[1], x)
        return self.step(step.name, _to_int8, x, scale), scale

    def on_ternary_matmul(self, step: ObservedStep, call: Call, x_q: NDArray, w: TernaryLinear) -> Any:
        self.keep(sibling(step.name, "hook_x_int8"), x_q)
        self.keep(sibling(step.name, "hook_x_scale"), self.x_scale)
        if w.nbytes < 1 << 17 and "ternary_matmul" not in self.setting.ops:
            call = _small_product
        return self.step(step.name, call, x_q, w)

    def on_dequantize(
        self, step: ObservedStep, call: Call, acc: NDArray, w: TernaryLinear, x_quant_scale: NDArray
    ) -> Any:
        return self._product(step.name, call, acc, w, x_quant_scale)

    def on_dense_matmul(self, step: ObservedStep, call: Call, x: NDArray, w: DenseWeight) -> Any:
        if self.tape and w.nbytes < 1 << 17 and "dense_matmul" not in self.setting.ops:
            call = _small_product  # in another order of summation: in a search only
        return self._product(step.name, call, x, w)

    def _product(self, name: str, call: Call, x: NDArray, w: LinearWeight, *scale: NDArray) -> NDArray:
        """A linear's output; without its bias or cap, which are other steps, it has another name."""
        if w.bias is not None:
            name = sibling(name, "product")
        elif name == LOGITS and self.setting.config.logit_softcap is not None:
            name = "lm_head.hook_uncapped"
        return self.step(name, call, x, w, *scale)

    def on_add(self, step: ObservedStep, call: Call, x: NDArray, y: NDArray) -> Any:
        if step.name.endswith(".hook_out"):  # a linear's bias
            return self.step(step.name, call, x, y)
        half = "attn" if step.name.endswith("hook_resid_mid") else "mlp"
        y = self.step(sibling(step.name, f"hook_{half}_out"), np.asarray, y)
        return self.step(step.name, call, x, y)

    def on_rope(self, step: ObservedStep, call: Call, q: NDArray, k: NDArray, cos: NDArray, sin: NDArray) -> Any:
        of_k = sibling(step.name, "hook_rot_k")
        if "rope" in self.setting.ops:
            q, k = call(q, k, cos, sin)
            self.keep(step.name, q)
            self.keep(of_k, k)
            return q, k
        q = self.step(step.name, layers.apply_rope, q, cos, sin)
        return q, self.step(of_k, layers.apply_rope, k, cos, sin)

    def on_append(
        self, step: ObservedStep, call: Call, cache: KVCache, layer: int, batch: TokenBatch, k: NDArray, v: NDArray
    ) -> None:
        self.keys, self.values = k, self.step(step.name, np.asarray, v)
        call(cache, layer, batch, k, v)

    def on_attention(
        self,
        step: ObservedStep,
        call: Call,
        q: NDArray,
        cache: KVCache,
        batch: TokenBatch,
        layer: int,
        window: int | None,
    ) -> NDArray:
        attn, group, rule = step.name.removesuffix(".hook_z"), q.shape[1] // self.keys.shape[1], self.setting.attention
        heads = list(rule.kv_heads or (h // group for h in range(q.shape[1])))
        n = len(self.setting.tokens)

        def scores(q: NDArray, keys: NDArray, window: int | None) -> NDArray:
            q_of, k_of = (x.astype(np.float64).reshape(-1, n, *x.shape[1:]) for x in (q, keys[:, heads]))
            wide = np.einsum("cihd,cjhd->hcij", q_of, k_of, optimize=True) * q.shape[2] ** -0.5
            given = wide.astype(q.dtype) * q.dtype.type(rule.factor)
            given[:, :, ~_visible(rule.sees, n, window)] = -np.inf
            return given.reshape(q.shape[1], len(q), n)

        def values(pattern: NDArray, v: NDArray) -> NDArray:
            p_of = pattern.astype(np.float64).reshape(len(pattern), -1, n, n)
            v_of = v[:, heads].astype(np.float64).reshape(-1, n, len(heads), v.shape[2])
            z = np.einsum("hcij,cjhd->cihd", p_of, v_of, optimize=True)
            return z.reshape(-1, len(heads), v.shape[2]).astype(v.dtype)

        given = self.step(f"{attn}.hook_attn_scores", scores, q, self.keys, window)
        pattern = self.step(f"{attn}.hook_pattern", layers.softmax, given)
        return self.step(step.name, values, pattern, self.values)

    def on_gated(self, step: ObservedStep, call: Call, gate: NDArray, up: NDArray, activation: str) -> Any:
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

    def edit(step: Step, compute: Edit, *inputs: Any) -> NDArray:
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


class _Parts(Mapping[str, NDArray]):
    """One copy's part of each tensor."""

    def __init__(self, seen: Mapping[str, NDArray], part: Callable[[NDArray], NDArray]) -> None:
        self.seen, self.part = seen, part

    def __getitem__(self, name: str) -> NDArray:
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


def _to_int8(x: NDArray, x_quant_scale: NDArray) -> NDArray[np.int8]:
    return np.clip(np.rint(x * x_quant_scale), -128, 127).astype(np.int8)


@lru_cache(maxsize=64)
def _transposed(w: TernaryLinear | DenseWeight) -> NDArray[np.floating]:
    if w.bit_linear is not None:
        return np.ascontiguousarray(w.bit_linear.ternary().T.astype(np.float32))
    return np.ascontiguousarray(w.array.T.astype(np.float64 if w.wide else np.float32))


def _small_product(x: NDArray, w: TernaryLinear | DenseWeight) -> NDArray:
    """The product of a small matrix that is not unpacked or widened each time: a search multiplies often."""
    w_t = _transposed(w)
    return (x.astype(w_t.dtype) @ w_t).astype(x.dtype if w.bit_linear is None else np.int32)


@cache
def _visible(sees: Sees, n: int, window: int | None) -> NDArray[np.bool_]:
    """(N, N): whether token i sees token j."""
    bounds = [sees(i, window) for i in range(n)]
    return np.array([[first <= j < stop for j in range(n)] for first, stop in bounds])


def with_matrix(weight: TernaryWeight, w_t: NDArray[np.int8]) -> TernaryWeight:
    """The same weight with another ternary matrix (N, K)."""
    packed = TernaryWeight.from_ternary(np.ascontiguousarray(w_t), float(weight.w_dequant_scale)).packed
    return replace(weight, packed=packed)
