"""The reference with one thing changed, run and recorded: how a hypothesis about an engine's mistake is tested.

A `Setting` is everything that a forward pass depends on. A `Hypothesis` makes a changed one.

A run is a sequence of *steps*, each named after the tensor that it computes: a norm's length, then its result; the
activation scale, the int8 values, the accumulators, the output; q, k and v; scores, pattern, values. An *edit* computes
one step another way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache, partial
from types import FunctionType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...backends import Backend
from ...backends.loaded import LoadedModel
from ...backends.observe import observe
from ...backends.record import Call, NamesFilter, Recorder
from ...errors import BitNetRefError
from ...reference import layers, model
from ...reference.cache import KVCache, TokenBatch
from ...reference.config import ModelConfig
from ...reference.model import forward, rope_tables_of
from ...reference.weights import (
    DeltaWeights,
    DenseWeight,
    GroupTernaryLinear,
    LayerWeights,
    LinearWeight,
    ModelWeights,
    TernaryLinear,
    TernaryWeight,
    plain_weights,
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
    texts: replacements of functions of `reference.model` by name, for mistakes in the order of the ops.
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

    def map_ternary(self, change: Callable[[str, TernaryWeight], TernaryWeight]) -> Setting:
        """Every ternary linear of the blocks changed; `change` gets its name ("q_proj") and its weight."""

        def layer(w: LayerWeights) -> LayerWeights:
            linears = ((name, weight) for name, weight in w.linears() if isinstance(weight, TernaryWeight))
            changed: dict[str, Any] = {name: change(name, weight) for name, weight in linears}
            return replace(w, **changed)

        return self.map_layers(layer)

    def around(self, op: str, call: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """For `observe`: computes the op, or its replacement."""
        return self.ops[op](call, *args) if op in self.ops else call(*args)

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
        batch = TokenBatch.of([(slot, 0, self.tokens) for slot in range(copies)])
        cache = KVCache(self.config, slots=copies, capacity=len(self.tokens))
        with np.errstate(all="ignore"), suppress(_Finished):  # a wrong change may overflow: `run` would raise
            forward(self._with_blocks(observe(be, recorder), recorder), self.weights, self.config, batch, cache)
        return recorder.seen

    def _with_blocks(self, be: Backend, recorder: _VariantRecorder) -> Backend:
        """The backend with the blocks of this setting's texts and layers."""
        if self.layers:

            def attention(x: NDArray, w: Any, cfg: Any, rope: Any, batch: Any, cache: Any, layer: int) -> NDArray:
                recorder.setting = own = self.layers.get(layer, self)
                rope = rope_tables_of(be, own.config, batch.positions)[own.config.is_sliding(layer)]
                return own._text("attention_block")(be, x, w, own.config, rope, batch, cache, layer)

            def feed_forward(x: NDArray, w: LayerWeights, cfg: ModelConfig) -> NDArray:
                own = recorder.setting
                y = own._text("feed_forward")(be, x, w, own.config)
                recorder.setting = self
                return y

            vars(be).update(attention_block=attention, feed_forward=feed_forward)
        elif self.texts:
            for block in ("attention_block", "feed_forward"):
                vars(be)[block] = partial(self._text(block), be)
        return be

    def _text(self, block: str) -> Callable[..., NDArray]:
        """A function of `reference.model` that calls the replaced functions."""
        names = {**vars(model), **self.texts}
        for name, function in vars(model).items():
            if isinstance(function, FunctionType) and name not in self.texts:
                names[name] = FunctionType(function.__code__, names, name, function.__defaults__)
        text: Callable[..., NDArray] = names[block]
        return text


@dataclass(frozen=True)
class Hypothesis:
    """A mistake that an engine may have made.

    shows: globs, separated by blanks, of the ops that would differ first.   name: short, stable.
    change: the setting with this mistake made; None where the model has no place for it.
    """

    shows: str
    name: str
    cause: str
    remedy: str
    change: Callable[[Setting], Setting | None]


class _Finished(Exception):
    """The last tensor that was asked for has been computed."""


class _VariantRecorder(Recorder):
    """Records a pass, step by step, with the setting's ops, edits and rule of attention."""

    def __init__(self, setting: Setting, be: Backend, names_filter: NamesFilter, **options: Any) -> None:
        """options: `until`, `tape` and `settle` of `Setting.run`"""
        super().__init__(be, setting.weights, setting.config, names_filter)
        self.setting, self.edits, self.in_linears = setting, setting.edits, False
        self.until, self.tape, self.settle = options["until"], options["tape"], options["settle"]
        self.steps: dict[str, NDArray] = {}

    def __call__(self, op: str, call: Call, args: tuple[Any, ...]) -> Any:
        return super().__call__(op, lambda *inputs: self.setting.around(op, call, inputs), args)

    def keep(self, name: str, array: NDArray) -> None:
        if name == "lm_head.hook_out" and name not in self.steps and self.setting.config.logit_softcap is not None:
            return  # `_on_linears` has a step for it
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
        if not name.endswith(("hook_x_scale", "product", "proj_scaled")):  # a trace has the scale after the int8 values
            self.keep(name, self.by_token(name.rpartition(".")[0], result))
        return result

    def _on_embed(self, call: Call, w: Any, tokens: NDArray) -> NDArray:
        return self.step("hook_embed", call, w, tokens)

    def _on_rms_norm(self, call: Call, x: NDArray, weight: NDArray, eps: float) -> Any:
        if "rms_norm" in self.setting.ops:
            return super()._on_rms_norm(call, x, weight, eps)
        name = self.name_norm(x, weight)
        length = self.step(f"{name}.hook_scale", layers.rms_scale, x, eps)
        return self.step(f"{name}.hook_normalized", lambda x, length, weight: x / length * weight, x, length, weight)

    def _on_linears(self, call: Call, x: NDArray, ws: Any) -> Any:
        self.in_linears = True
        outputs = super()._on_linears(call, x, ws)
        self.in_linears = False
        if self.linear.endswith("v_proj"):
            names = [f"{self.block}.attn.hook_{letter}" for letter in "qk"]
            heads = [y.reshape(len(y), -1, self.cfg.head_dim) for y in outputs[:2]]
            q, k = (self.step(name, np.asarray, y) for name, y in zip(names, heads, strict=True))
            return (q.reshape(outputs[0].shape), k.reshape(outputs[1].shape), *outputs[2:])
        if self.linear == "lm_head" and (cap := self.setting.config.logit_softcap) is not None:
            self.step("lm_head.hook_out", layers.softcap, outputs[0], cap)
        return outputs

    def _on_scale(self, call: Call, x: NDArray, factor: float) -> Any:
        if x.ndim == 3:
            return self.step(f"{self.block}.attn.hook_scaled_q", call, x, factor)
        name = f"{self.block}.{self.linear.rpartition('.')[2]}_scaled" if self.block else "hook_embed_scaled"
        return self.step("ln_final.hook_scaled" if self.current.startswith("ln_final") else name, call, x, factor)

    def _on_output_gate(self, call: Call, z: NDArray, gate: NDArray, activation: str) -> Any:
        return self.step(f"{self.block}.attn.hook_gated_z", call, z, gate, activation)

    def _on_delta_conv(self, call: Call, qkv: NDArray, *rest: Any) -> NDArray:
        return self.step(f"{self.block}.attn.hook_conv", lambda qkv: call(qkv, *rest), qkv)

    def _on_delta_gates(self, call: Call, a: NDArray, b: NDArray, w: DeltaWeights) -> Any:
        log_alpha = self.step(f"{self.block}.attn.hook_log_decay", lambda a: call(a, b, w)[0], a)
        return log_alpha, self.step(f"{self.block}.attn.hook_beta", lambda b: call(a, b, w)[1], b)

    def _on_delta_rule(self, call: Call, mixed: NDArray, log_alpha: NDArray, beta: NDArray, *rest: Any) -> NDArray:
        self.keep_states(mixed, log_alpha, beta, *rest)

        def answer(*inputs: NDArray) -> NDArray:
            _, cache, layer, batch = rest
            for slot in batch.slots:  # an edit may compute it twice; the memory begins empty
                cache.states.memory_of(layer, slot)[:] = 0
            result: NDArray = call(*inputs, *rest)
            return result

        return self.step(f"{self.block}.attn.hook_delta_out", answer, mixed, log_alpha, beta)

    def _on_quantize_activations(self, call: Call, x: NDArray) -> Any:
        if "quantize_activations" in self.setting.ops:
            x_q, self.x_scale = call(x)
            return x_q, self.x_scale
        self.x_scale = scale = self.step(f"{self.linear}.hook_x_scale", lambda x: call(x)[1], x)
        return self.step(f"{self.linear}.hook_x_int8", _to_int8, x, scale), scale

    def _on_ternary_matmul(self, call: Call, x_q: NDArray, w: TernaryLinear) -> Any:
        self.keep(f"{self.linear}.hook_x_int8", x_q)
        self.keep(f"{self.linear}.hook_x_scale", self.x_scale)
        if w.nbytes < 1 << 17 and "ternary_matmul" not in self.setting.ops:
            call = _small_product
        return self.step(f"{self.linear}.hook_acc_int32", call, x_q, w)

    def _on_dequantize(self, call: Call, acc: NDArray, w: TernaryLinear, x_quant_scale: NDArray) -> Any:
        return self._product(call, acc, w, x_quant_scale)

    def _on_dense_matmul(self, call: Call, x: NDArray, w: DenseWeight) -> Any:
        if self.tape and w.nbytes < 1 << 17 and "dense_matmul" not in self.setting.ops:
            call = _small_product  # in another order of summation: in a search only
        return self._product(call, x, w)

    def _on_group_matmul(self, call: Call, x: NDArray, w: GroupTernaryLinear) -> Any:
        return self._product(partial(super()._on_group_matmul, call), x, w)

    def _product(self, call: Call, x: NDArray, w: LinearWeight, *scale: NDArray) -> NDArray:
        """A linear's output; without its bias or cap, which are other steps, it has another name."""
        name = f"{self.linear}.{'hook_out' if w.bias is None else 'product'}"
        if self.linear == "lm_head" and self.setting.config.logit_softcap is not None:
            name = "lm_head.hook_uncapped"
        return self.step(name, call, x, w, *scale)

    def _on_add(self, call: Call, x: NDArray, y: NDArray) -> Any:
        if self.in_linears:
            return self.step(f"{self.linear}.hook_out", call, x, y)
        half = "attn" if self.linear.endswith("o_proj") else "mlp"
        y = self.step(f"{self.block}.hook_{half}_out", np.asarray, y)
        middle = f"{self.block}.hook_resid_mid"
        return self.step(middle if middle not in self.steps else f"{self.block}.hook_resid_post", call, x, y)

    def _on_rope(self, call: Call, q: NDArray, k: NDArray, cos: NDArray, sin: NDArray, *in_part: bool) -> Any:
        attn = f"{self.block}.attn"
        if "rope" in self.setting.ops:
            q, k = call(q, k, cos, sin, *in_part)
            self.keep(f"{attn}.hook_rot_q", q)
            self.keep(f"{attn}.hook_rot_k", k)
            return q, k
        q = self.step(f"{attn}.hook_rot_q", layers.apply_rope, q, cos, sin)
        return q, self.step(f"{attn}.hook_rot_k", layers.apply_rope, k, cos, sin)

    def _on_append(self, call: Call, cache: KVCache, layer: int, batch: TokenBatch, k: NDArray, v: NDArray) -> None:
        self.keys, self.values = k, self.step(f"{self.block}.attn.hook_v", np.asarray, v)
        call(cache, layer, batch, k, v)

    def _on_attention(
        self, call: Call, q: NDArray, cache: KVCache, batch: TokenBatch, layer: int, window: int | None
    ) -> NDArray:
        attn, group, rule = f"{self.block}.attn", q.shape[1] // self.keys.shape[1], self.setting.attention
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
        return self.step(f"{attn}.hook_z", values, pattern, self.values)

    def _on_gated(self, call: Call, gate: NDArray, up: NDArray, activation: str) -> Any:
        mlp = f"{self.block}.mlp"
        gate, up = self.step(f"{mlp}.hook_pre", np.asarray, gate), self.step(f"{mlp}.hook_pre_linear", np.asarray, up)
        return self.step(f"{mlp}.hook_post", call, gate, up, activation)


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
    if isinstance(w, DenseWeight):
        return np.ascontiguousarray(w.array.T.astype(np.float64 if w.wide else np.float32))
    return np.ascontiguousarray(w.ternary().T.astype(np.float32))


def _small_product(x: NDArray, w: TernaryLinear | DenseWeight) -> NDArray:
    """The product of a small matrix that is not unpacked or widened each time: a search multiplies often."""
    w_t = _transposed(w)
    return (x.astype(w_t.dtype) @ w_t).astype(np.int32 if isinstance(w, TernaryLinear) else x.dtype)


@cache
def _visible(sees: Sees, n: int, window: int | None) -> NDArray[np.bool_]:
    """(N, N): whether token i sees token j."""
    bounds = [sees(i, window) for i in range(n)]
    return np.array([[first <= j < stop for j in range(n)] for first, stop in bounds])


def with_matrix(weight: TernaryWeight, w_t: NDArray[np.int8]) -> TernaryWeight:
    """The same weight with another ternary matrix (N, K)."""
    packed = TernaryWeight.from_ternary(np.ascontiguousarray(w_t), float(weight.w_dequant_scale)).packed
    return replace(weight, packed=packed)


def map_norms(setting: Setting, change: Callable[[NDArray], NDArray]) -> Setting:
    """Every norm's weight vector, changed."""

    def layer(w: LayerWeights) -> LayerWeights:
        changed: dict[str, Any] = {name: change(norm) for name, norm in w.norms() if name != "delta_norm"}
        return replace(w, **changed)

    changed = setting.map_layers(layer)
    return replace(changed, weights=replace(changed.weights, final_norm=change(setting.weights.final_norm)))
