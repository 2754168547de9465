"""Qwen3.5: a Gated DeltaNet in three of four layers, and attention with a gate, on a part of each head, in the fourth.

A DeltaNet keeps no keys. Each value head has a matrix S (dk, dv), a memory that answers a key k with the value k S:

    q, k, v     silu of a causal convolution over the last tokens, channel by channel; q and k of length 1, q / sqrt(dk)
    alpha       exp(-exp(A_log) softplus(a + dt_bias)), how much of the memory stays
    beta        sigmoid(b), how much of the error is corrected
    S           becomes alpha S + k^T beta (v - k alpha S): it forgets, then learns what it would have got wrong
    y           q S, normed per head, times silu(z)

So its state is of one size, however long the text: S, and the convolution's last inputs. The state can be copied but
not cut: a text is continued where it ended, or begun again (`DeltaStates`).

Source: Yang et al. 2024, "Gated Delta Networks" (arXiv:2412.06464), as in transformers' modeling_qwen3_5.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, ClassVar, NamedTuple

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from ..errors import ConfigError, ShapeError, require, require_int
from ..reference.cache import KVCache, TokenBatch
from ..reference.config import ModelConfig, added
from ..reference.layers import Array, Floats, silu
from ..reference.model import BlockPlace, attention_result, split_heads
from ..reference.ops import Ops
from ..reference.ops import require as require_shapes
from ..reference.weights import LayerWeights, LinearWeight, Norm
from .family import (
    LEFT_OUT_VISION,
    NORM_ONE_LEFT_OUT,
    SIZES,
    Architecture,
    ArrayForm,
    Edit,
    Family,
    GgufForm,
    GgufKeys,
    HfForm,
    HfKeys,
    Hypothesis,
    LinearPlace,
    PartNames,
    Put,
    TraceStep,
    Wrapper,
    before,
    change_steps,
    config_of_layers,
    instead,
    layer_weights,
    leave_out,
    linear_step,
    near,
    norm_step,
    own_rope,
    put_after,
    types_of_layers,
)
from .llama import llama_steps
from .qwen import (
    END_OF_TEXT,
    HEAD_NORM_MISTAKES,
    HEAD_NORM_NAMES,
    HEAD_NORMS,
    PartialRopeConfig,
    Qwen3Layer,
    head_norm_steps,
    norm_heads,
    read_partial_rope,
)
from .rope import rope_json

L2_EPS = 1e-6
DELTA = "linear_attention"  # transformers' name of these layers


# -- config ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DeltaConfig:
    """The shape of the DeltaNet layers."""

    key_heads: int
    value_heads: int  # a multiple of key_heads
    key_dim: int  # of a head of q and k
    value_dim: int  # of a head of v
    conv_size: int  # tokens that the convolution sees

    def __post_init__(self) -> None:
        for each in fields(self):
            require_int(f"delta.{each.name}", getattr(self, each.name))
        groups = self.value_heads % self.key_heads == 0
        require(groups, "linear_num_value_heads", f"a multiple of {self.key_heads} key heads", self.value_heads)

    @property
    def sizes(self) -> tuple[int, int, int]:
        """The widths of q, k and v, all heads together."""
        return self.key_heads * self.key_dim, self.key_heads * self.key_dim, self.value_heads * self.value_dim


@dataclass(frozen=True)
class Qwen35Config(PartialRopeConfig):
    qk_norms: bool = added(True, absent=False)
    output_gate: bool = added(True, absent=False)  # attention's result times sigmoid of a linear, before o_proj
    delta: DeltaConfig | None = added(None)  # None: every layer attends

    kinds_of_layers: ClassVar[tuple[str, ...]] = (*ModelConfig.kinds_of_layers, DELTA)

    def __post_init__(self) -> None:
        super().__post_init__()
        has_delta = DELTA in self.layer_types
        require(has_delta == (self.delta is not None), "delta", "the shape of the linear layers, if any", self.delta)
        # transformers takes hidden_act for the convolution too; here, and in llama.cpp, that has silu
        fits = not has_delta or self.activation == "silu"
        require(fits, "hidden_act", "silu, which the convolution of DeltaNet layers has here", self.activation)

    def attends(self, layer: int) -> bool:
        """Whether the layer has keys and values."""
        return not self.layer_types or self.layer_types[layer] != DELTA

    def delta_of(self, layer: int) -> DeltaConfig | None:
        """The shape of a DeltaNet layer; None of one that attends."""
        return None if self.attends(layer) else self.delta

    def linear_shapes(self, layer: int = 0) -> dict[str, tuple[int, int]]:
        shapes = super().linear_shapes(layer)
        delta = self.delta_of(layer)
        hidden = self.hidden_size
        if delta is None:
            return _with_gates(shapes, {"z_proj": (self.query_size, hidden)})
        q, k, v = delta.sizes
        shapes |= {"q_proj": (q, hidden), "k_proj": (k, hidden), "v_proj": (v, hidden), "o_proj": (hidden, v)}
        heads = (delta.value_heads, hidden)
        return _with_gates(shapes, {"z_proj": (v, hidden), "a_proj": heads, "b_proj": heads})

    def norm_shapes(self, layer: int = 0) -> dict[str, int]:
        heads = {"q_norm": self.head_dim, "k_norm": self.head_dim} if self.attends(layer) else {}
        return super().norm_shapes(layer) | heads

    @property
    def has_states(self) -> bool:  # type: ignore[override]
        return self.delta is not None


def _with_gates(shapes: dict[str, Any], gates: dict[str, Any]) -> dict[str, Any]:
    """The gates' linears, behind those of q, k and v."""
    first = dict.fromkeys(("q_proj", "k_proj", "v_proj"))
    return {name: shapes[name] for name in first} | gates | {n: s for n, s in shapes.items() if n not in first}


# -- the two texts of its blocks ---------------------------------------------------------------------------------------


def sigmoid(x: Floats) -> Floats:
    """1 / (1 + e^-x), written so that e^-|x| never overflows."""
    wide = x.astype(np.float64)
    e = np.exp(-np.abs(wide))
    return (np.where(wide >= 0, 1.0, e) / (1.0 + e)).astype(x.dtype)


def attention_block(be: Ops, x: Floats, w: GatedLayer, cfg: Qwen35Config, at: BlockPlace) -> Floats:
    """Attention whose result is multiplied by a gate; RoPE turns a part of each head.   (N, D) -> (N, D)"""
    h = be.rms_norm(x, w.attn_norm)  # (N, D)
    q, k, v = split_heads(cfg, *be.linears(h, (w.q_proj, w.k_proj, w.v_proj)))  # (N, H, d), (N, G, d), (N, G, d)
    q = norm_heads(be, q, w.q_norm)
    k = norm_heads(be, k, w.k_norm)
    q, k = be.rope(q, k, *at.rope)
    be.append(at.cache, at.layer, at.batch, k, v)
    z = be.attention(q, at.cache, at.batch, at.layer, cfg.window_of(at.layer))  # (N, H, d)
    gate = be.linear(h, w.z_proj)  # (N, H*d)
    z = be.compute(f"{w.name}.attn.hook_gated_z", sigmoid_gate, z.reshape(gate.shape), gate)
    return be.add(x, attention_result(be, z.reshape(-1, cfg.num_attention_heads, cfg.head_dim), w))  # (N, D)


def sigmoid_gate(z: Floats, gate: Floats) -> Floats:
    """z sigmoid(gate).   (N, F), (N, F) -> (N, F)"""
    return z * sigmoid(gate)


def silu_gate(z: Floats, gate: Floats) -> Floats:
    """z silu(gate).   (N, F), (N, F) -> (N, F)"""
    return z * silu(gate)


def delta_block(be: Ops, x: Floats, w: DeltaLayer, cfg: Qwen35Config, at: BlockPlace) -> Floats:
    """Each token asks a memory of the tokens before it, and corrects it.   (N, D) -> (N, D), residual included"""
    h = be.rms_norm(x, w.attn_norm)  # (N, D)
    q, k, v, z, a, b = be.linears(h, (w.q_proj, w.k_proj, w.v_proj, w.z_proj, w.a_proj, w.b_proj))
    attn = f"{w.name}.attn"
    qkv = np.concatenate([q, k, v], axis=1)  # (N, C)
    mixed = be.compute(f"{attn}.hook_conv", delta_conv, qkv, w, at)  # (N, C)
    log_alpha = be.compute(f"{attn}.hook_log_decay", log_decay, a, w)  # (N, Hv)
    beta = be.compute(f"{attn}.hook_beta", write_strength, b, w)  # (N, Hv)
    y = be.compute(f"{attn}.hook_delta_out", delta_rule, mixed, log_alpha, beta, w, at)  # (N, Hv, dv)
    y = be.rms_norm(y.reshape(-1, w.delta.value_dim), w.delta_norm).reshape(z.shape)  # (N, Hv*dv)
    y = be.compute(f"{attn}.hook_gated_z", silu_gate, y, z)
    return be.add(x, be.linear(y, w.o_proj))  # (N, D)


def states_of(cache: KVCache) -> DeltaStates:
    """The states of a cache. ShapeError where it has none."""
    if not isinstance(cache.states, DeltaStates):
        raise ShapeError("delta_rule", expected="a cache of a model with DeltaNet layers", got="one without states")
    return cache.states


@dataclass(frozen=True, eq=False, repr=False)
class GatedLayer(Qwen3Layer):
    """A layer that attends."""

    z_proj: LinearWeight  # (H*d, D), of the gate

    attention_text = staticmethod(attention_block)


@dataclass(frozen=True, eq=False, repr=False)
class DeltaLayer(LayerWeights):
    """A DeltaNet: C channels, of q, k and v together; Hv value heads of dv numbers."""

    z_proj: LinearWeight  # (Hv*dv, D), of the gate
    a_proj: LinearWeight  # (Hv, D), of the decay
    b_proj: LinearWeight  # (Hv, D), of the write strength
    conv: NDArray[np.float32]  # (C, tokens), the current token's last
    decay: NDArray[np.float32]  # (Hv,), exp(A_log)
    decay_bias: NDArray[np.float32]  # (Hv,), dt_bias
    delta_norm: Norm  # (dv,)
    delta: DeltaConfig

    attention_text = staticmethod(delta_block)
    trace_names: ClassVar = {**HEAD_NORM_NAMES, "delta_norm": "attn.delta_norm"}


# -- its ops -----------------------------------------------------------------------------------------------------------


def sequences(batch: TokenBatch) -> Iterator[tuple[int, int, slice]]:
    """(slot, first position, rows of the batch) of each sequence."""
    turns = np.flatnonzero(np.diff(batch.slots, prepend=-1)).tolist()  # where another sequence begins
    for first, stop in zip(turns, [*turns[1:], len(batch)], strict=True):
        yield int(batch.slots[first]), int(batch.positions[first]), slice(first, stop)


def delta_conv(qkv: Floats, w: DeltaLayer, at: BlockPlace) -> Floats:
    """silu of each channel's convolution over the last tokens.   qkv (N, C) -> (N, C)"""
    ok = qkv.shape == (len(at.batch), len(w.conv))
    require_shapes("delta_conv", ok, f"qkv (N, {len(w.conv)})", qkv=qkv)
    mixed, states = np.empty_like(qkv), states_of(at.cache)
    for slot, position, rows in sequences(at.batch):
        before = states.begin(at.layer, slot, position)
        window = np.concatenate([before, qkv[rows]])
        mixed[rows] = causal_conv(window, w.conv)
        before[:] = window[len(window) - len(before) :]
    return mixed


def log_decay(a: Floats, w: DeltaLayer) -> Floats:
    """log alpha = -exp(A_log) softplus(a + dt_bias).   a (N, Hv) -> (N, Hv)"""
    require_shapes("log_decay", a.shape[1:] == w.decay.shape, f"a (N, {len(w.decay)})", a=a)
    return (-w.decay.astype(np.float64) * np.logaddexp(0.0, a.astype(np.float64) + w.decay_bias)).astype(a.dtype)


def write_strength(b: Floats, w: DeltaLayer) -> Floats:
    """beta = sigmoid(b), in float64 and rounded once.   b (N, Hv) -> (N, Hv)"""
    require_shapes("write_strength", b.shape[1:] == w.decay.shape, f"b (N, {len(w.decay)})", b=b)
    return (1.0 / (1.0 + np.exp(-b.astype(np.float64)))).astype(b.dtype)


def delta_rule(mixed: Floats, log_alpha: Floats, beta: Floats, w: DeltaLayer, at: BlockPlace) -> Floats:
    """The memory, asked and updated.   mixed (N, C), log_alpha and beta (N, Hv) -> (N, Hv, dv)"""
    shape = w.delta
    ok = mixed.shape == (len(at.batch), sum(shape.sizes))
    require_shapes("delta_rule", ok, f"mixed (N, {sum(shape.sizes)})", mixed=mixed)
    y = np.empty((len(mixed), shape.value_heads, shape.value_dim), dtype=mixed.dtype)
    states = states_of(at.cache)
    for slot, position, rows in sequences(at.batch):
        inputs = delta_inputs(mixed[rows], log_alpha[rows], beta[rows], shape)
        y[rows] = delta_recurrence(inputs, states.memory_of(at.layer, slot, position))
        states.end(at.layer, slot, position + len(inputs.v))
    return y


def answers(states: Floats, mixed: Floats, log_alpha: Floats, beta: Floats, w: DeltaLayer) -> Floats:
    """What `delta_rule` gives, from the memory after each token.   -> (N, Hv, dv)"""
    return _ask(states, delta_inputs(mixed, log_alpha, beta, w.delta).q)


def _ask(states: Floats, q: Floats) -> Floats:
    """states (T, Hv, dk, dv), q (T, Hv, dk) -> (T, Hv, dv)"""
    return (q[:, :, None] @ states.astype(np.float64))[:, :, 0].astype(np.float32)


def memories(mixed: Floats, log_alpha: Floats, beta: Floats, w: DeltaLayer, at: BlockPlace) -> Floats:
    """The memory after each token, of which `delta_rule` leaves only the last.   -> (N, Hv, dk, dv)"""
    inputs, states = delta_inputs(mixed, log_alpha, beta, w.delta), states_of(at.cache)
    parts = [
        token_by_token(DeltaInputs(*(each[rows] for each in inputs)), states.memory_of(at.layer, slot, position).copy())
        for slot, position, rows in sequences(at.batch.on_host)
    ]
    return np.concatenate([after for after, _ in parts])


def token_by_token(x: DeltaInputs, memory: Floats) -> tuple[Floats, Floats]:
    """The memory after each token of a sequence, and its answers.   -> (T, Hv, dk, dv), (T, Hv, dv)"""
    after, out = [], []
    for t in range(len(x.v)):
        out.append(delta_recurrence(DeltaInputs(*(each[t : t + 1] for each in x)), memory)[0].astype(np.float32))
        after.append(memory.copy())
    return np.stack(after), np.stack(out)


class DeltaInputs(NamedTuple):
    """What the recurrence takes of some tokens, in float64. T tokens, Hv value heads."""

    q: Floats  # (T, Hv, dk)
    k: Floats  # (T, Hv, dk)
    v: Floats  # (T, Hv, dv)
    log_alpha: Floats  # (T, Hv)
    beta: Floats  # (T, Hv)


def causal_conv(qkv: Floats, conv: Floats) -> Floats:
    """silu of the convolution, channel by channel. qkv (tokens - 1 + T, C) begins with the tokens before; conv (C,
    tokens), the current token's last.   -> (T, C)"""
    tokens, x = conv.shape[1], qkv.astype(np.float64)
    taps = [x[i : len(x) - (tokens - 1 - i)] * conv[:, i].astype(np.float64) for i in range(tokens)]
    return silu(sum(taps[1:], taps[0]))


def delta_inputs(mixed: Floats, log_alpha: Floats, beta: Floats, shape: DeltaConfig) -> DeltaInputs:
    """mixed (T, C): q, k and v after the convolution. log_alpha and beta (T, Hv)."""
    q, k, v = np.split(mixed.astype(np.float64), np.cumsum(shape.sizes)[:-1], axis=1)
    group = shape.value_heads // shape.key_heads
    q, k = (np.repeat(_unit(x.reshape(len(mixed), shape.key_heads, shape.key_dim)), group, axis=1) for x in (q, k))
    v = v.reshape(len(mixed), shape.value_heads, shape.value_dim)
    return DeltaInputs(q * shape.key_dim**-0.5, k, v, log_alpha.astype(np.float64), beta.astype(np.float64))


def _unit(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """x / sqrt(sum(x^2) + eps), over the last axis."""
    length: NDArray[np.float64] = np.sqrt(np.square(x).sum(axis=-1, keepdims=True) + L2_EPS)
    return x / length


def delta_recurrence(x: DeltaInputs, memory: Floats) -> Floats:
    """Token by token. memory (Hv, dk, dv) is updated in place, in its own dtype.   -> y (T, Hv, dv) float64"""
    y = np.empty(x.v.shape, dtype=np.float64)
    for t in range(len(y)):
        stays = memory.astype(np.float64) * np.exp(x.log_alpha[t])[:, None, None]
        error = x.v[t] - (x.k[t][:, None, :] @ stays)[:, 0]  # (Hv, dv)
        memory[:] = stays + x.k[t][:, :, None] * (x.beta[t][:, None] * error)[:, None, :]
        y[t] = (x.q[t][:, None, :] @ memory.astype(np.float64))[:, 0]
    return y


# -- states ------------------------------------------------------------------------------------------------------------


class DeltaStates:
    """The states of DeltaNet layers: for each of them and each slot the memory, the convolution's last inputs, and how
    many tokens of the sequence they have seen. A copy from before the last pass lets that pass be computed again."""

    def __init__(self, delta: DeltaConfig, layers: Sequence[int], slots: int, dtype: np.dtype) -> None:
        """layers: the numbers of the DeltaNet layers."""
        self.rows = {layer: row for row, layer in enumerate(layers)}
        dtype = dtype if dtype == np.float64 else np.dtype(np.float32)
        shape = (len(layers), 2, slots)  # now, and before the last pass
        self.memory = np.zeros((*shape, delta.value_heads, delta.key_dim, delta.value_dim), dtype=dtype)
        self.inputs = np.zeros((*shape, delta.conv_size - 1, sum(delta.sizes)), dtype=dtype)
        self.seen = np.full(shape, -1, dtype=np.int64)

    @property
    def arrays(self) -> tuple[Array, ...]:
        return self.memory, self.inputs, self.seen

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays)

    def begin(self, layer: int, slot: int, position: int) -> Floats:
        """The convolution's inputs to continue from at `position`, to be updated in place. Raises ShapeError."""
        row = self.rows[layer]
        if position == 0:
            for array in self.arrays:
                array[row, 0, slot] = 0
        elif self.seen[row, 0, slot] != position:
            if self.seen[row, 1, slot] != position:
                expected = f"a sequence continued at its end, token {self.seen[row, 0, slot]}, or begun again"
                raise ShapeError("DeltaStates", expected=expected, got=f"token {position} of slot {slot}")
            for array in self.arrays:
                array[row, 0, slot] = array[row, 1, slot]
        for array in self.arrays:
            array[row, 1, slot] = array[row, 0, slot]
        self.seen[row, 0, slot] = -1  # until `end`: a pass that is broken off is computed again from the copy
        inputs: Floats = self.inputs[row, 0, slot]
        return inputs

    def memory_of(self, layer: int, slot: int, position: int) -> Floats:
        """The memory (Hv, dk, dv), to be updated in place; at the beginning of a sequence it is empty."""
        memory: Floats = self.memory[self.rows[layer], 0, slot]
        if position == 0:
            memory[:] = 0
        return memory

    def end(self, layer: int, slot: int, position: int) -> None:
        """Note that the state of the slot has seen the tokens before `position`."""
        self.seen[self.rows[layer], 0, slot] = position

    def resumable(self, slot: int, length: int) -> int:
        """`length` if all layers have seen as many tokens of the slot, else 0: a state cannot be cut."""
        return length if (self.seen[:, 0, slot] == length).all() else 0

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        for array in self.arrays:
            array[:, :, list(targets)] = array[:, :, list(sources)]

    def take_over(self, other: DeltaStates) -> None:
        for mine, theirs in zip(self.arrays, other.arrays, strict=True):
            mine[:] = theirs


def _array_shapes(config: Qwen35Config, layer: int) -> dict[str, tuple[int, ...]]:
    delta = config.delta_of(layer)
    if delta is None:
        return {}
    heads = (delta.value_heads,)
    conv = (sum(delta.sizes), delta.conv_size)
    return {"delta.conv": conv, "delta.decay": heads, "delta.decay_bias": heads, "delta.norm": (delta.value_dim,)}


def _of_layers(config: Qwen35Config, layers: Sequence[int]) -> Qwen35Config:
    return config_of_layers(config, layers, delta=None if all(map(config.attends, layers)) else config.delta)


def _new_states(config: Qwen35Config, slots: int, dtype: np.dtype) -> DeltaStates | None:
    layers = [layer for layer in range(config.num_hidden_layers) if not config.attends(layer)]
    return None if config.delta is None else DeltaStates(config.delta, layers, slots, dtype)


def _state_size(config: Qwen35Config, layer: int) -> int:
    delta = config.delta_of(layer)
    if delta is None:
        return 0
    return delta.value_heads * delta.key_dim * delta.value_dim + (delta.conv_size - 1) * sum(delta.sizes)


def _make_layer(config: Qwen35Config, parts: dict[str, Any]) -> dict[str, Any]:
    """A DeltaNet's arrays as the fields of `DeltaLayer`."""
    if "delta.conv" not in parts:
        return parts
    fields_of = {name.removeprefix("delta."): value for name, value in parts.items()}
    norm = Norm(fields_of.pop("norm"), config.norm_eps, f"{parts['name']}.attn.delta_norm")
    return {**fields_of, "delta_norm": norm, "delta": config.delta}


# -- how files store it ------------------------------------------------------------------------------------------------


def value_heads_in_gguf(delta: DeltaConfig) -> NDArray[np.intp]:
    """The place of each value head of a DeltaNet in GGUF files, where the first of each key head come first, then the
    second of each, and so on.

    >>> value_heads_in_gguf(DeltaConfig(2, 4, 8, 8, 4)).tolist()  # of key head 0: value heads 0 and 1
    [0, 2, 1, 3]
    """
    groups = delta.value_heads // delta.key_heads
    return np.arange(delta.value_heads).reshape(groups, delta.key_heads).T.reshape(-1)


def value_rows_in_gguf(delta: DeltaConfig) -> NDArray[np.intp]:
    """The place of each row of v, and of each input of o_proj, in GGUF files."""
    return (value_heads_in_gguf(delta)[:, None] * delta.value_dim + np.arange(delta.value_dim)).reshape(-1)


def _channels_in_gguf(delta: DeltaConfig) -> NDArray[np.intp]:
    """The place of each channel of the convolution: those of q and k in order, then those of v."""
    first = sum(delta.sizes[:2])
    return np.concatenate([np.arange(first), first + value_rows_in_gguf(delta)])


def _shape_of(config: Qwen35Config, layer: int) -> DeltaConfig:
    delta = config.delta_of(layer)
    if delta is None:
        raise ConfigError(f"layer {layer} is no DeltaNet", field="layer_types")
    return delta


def _exp(config: Qwen35Config, layer: int, stored: Array) -> Array:
    with np.errstate(over="ignore"):
        decay: Floats = np.exp(stored)
    if not np.isfinite(decay).all():
        raise ValueError(f"is beyond float32's exponent at index {int(np.argmin(np.isfinite(decay)))}")
    return decay


def _log(config: Qwen35Config, layer: int, decay: Floats) -> Floats:
    """The float32 whose exponential is nearest to the decay: equal, or off by its last bit. Of several with equal
    exponentials, one that a narrower dtype holds."""
    near = np.log(decay.astype(np.float64)).astype(np.float32)
    steps = np.arange(-4, 5)[:, None]
    narrow = [near.astype(dtype).astype(np.float32) for dtype in (ml_dtypes.bfloat16, np.float16)]
    candidates = np.stack([*narrow, *(near.view(np.int32) + steps.astype(np.int32)).view(np.float32)])
    closest = np.abs(np.exp(candidates) - decay).argmin(axis=0)
    nearest: Floats = candidates[closest, np.arange(len(decay))]
    return nearest


def _from_file(order: Callable[[DeltaConfig], NDArray[np.intp]]) -> Callable[..., Floats]:
    return lambda config, layer, stored: stored[order(_shape_of(config, layer))]


def _to_file(order: Callable[[DeltaConfig], NDArray[np.intp]]) -> Callable[..., Floats]:
    return lambda config, layer, ours: ours[np.argsort(order(_shape_of(config, layer)))]


def _minus_decay(config: Qwen35Config, layer: int, stored: Array) -> Array:
    """GGUF files hold -exp(A_log)."""
    if not (stored < 0).all():
        raise ValueError("holds a number of 0 or above; expected -exp(A_log)")
    return -stored[value_heads_in_gguf(_shape_of(config, layer))]


ARRAYS = {
    "delta.conv": ArrayForm(
        "linear_attn.conv1d.weight",
        "ssm_conv1d.weight",
        from_hf=lambda config, layer, stored: stored[:, 0],
        to_hf=lambda config, layer, conv: conv[:, None],
        from_gguf=_from_file(_channels_in_gguf),
        to_gguf=_to_file(_channels_in_gguf),
        hf_shape=lambda shape: (shape[0], 1, shape[1]),
    ),
    "delta.decay": ArrayForm(
        "linear_attn.A_log",
        "ssm_a",
        _exp,
        _log,
        _minus_decay,
        lambda config, layer, decay: -_to_file(value_heads_in_gguf)(config, layer, decay),
    ),
    "delta.decay_bias": ArrayForm(
        "linear_attn.dt_bias",
        "ssm_dt.bias",
        from_gguf=_from_file(value_heads_in_gguf),
        to_gguf=_to_file(value_heads_in_gguf),
    ),
    "delta.norm": ArrayForm("linear_attn.norm.weight", "ssm_norm.weight"),
}


# The linears of a DeltaNet layer; q, k and v share a tensor
_DELTA_LINEARS = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj"), PartNames(("linear_attn.in_proj_qkv",), "attn_qkv")),
    "z_proj": PartNames(("linear_attn.in_proj_z",), "attn_gate"),
    "a_proj": PartNames(("linear_attn.in_proj_a",), "ssm_alpha"),
    "b_proj": PartNames(("linear_attn.in_proj_b",), "ssm_beta"),
    "o_proj": PartNames(("linear_attn.out_proj",), "ssm_out"),
}
NAMES = {
    **HEAD_NORMS,
    "ffn_norm": PartNames(("post_attention_layernorm",), "post_attention_norm"),
    "z_proj": PartNames(("self_attn.z_proj",), ""),  # files have it in q_proj, or a DeltaNet's: see `place`
    "a_proj": PartNames(("linear_attn.in_proj_a",), ""),
    "b_proj": PartNames(("linear_attn.in_proj_b",), ""),
}


def place(config: Qwen35Config, layer: int, linear: str, style: str) -> LinearPlace | None:
    """Where a file stores a linear. Attention's q and the gate share a tensor, head by head; a DeltaNet's q, k and v
    too, one after the other. In GGUF files the value heads of a DeltaNet are in another order."""
    height = config.linear_shapes(layer)[linear][0]
    delta = config.delta_of(layer)
    if delta is None:
        if linear not in ("q_proj", "z_proj"):
            return None
        pair = ("q_proj", "z_proj")
        by_head = np.arange(2 * height).reshape(config.num_attention_heads, 2, -1)
        module = "self_attn.q_proj" if style == "hf" else "attn_q"
        return LinearPlace(module, 2 * height, by_head[:, pair.index(linear)].reshape(-1), None, pair)
    if linear not in _DELTA_LINEARS:
        return None
    names = _DELTA_LINEARS[linear]
    module = names.hf[0] if style == "hf" else names.gguf
    values = value_rows_in_gguf(delta) if style == "gguf" else np.arange(delta.sizes[2])
    parts = ("q_proj", "k_proj", "v_proj")
    if linear in parts:
        start = sum(delta.sizes[: parts.index(linear)])
        rows = start + (values if linear == "v_proj" else np.arange(height))
        return LinearPlace(module, sum(delta.sizes), rows, None, parts)
    if style == "hf" or delta.value_heads == delta.key_heads:
        return LinearPlace(module, height)
    if linear == "o_proj":
        return LinearPlace(module, height, None, values)
    return LinearPlace(module, height, values if linear == "z_proj" else value_heads_in_gguf(delta))


# -- what it records ---------------------------------------------------------------------------------------------------


_GATED = "attention's gated values"


def _steps(config: Qwen35Config, layer: int) -> list[TraceStep]:
    steps = llama_steps(config, layer)
    if config.attends(layer):
        steps = head_norm_steps(steps)
        sources = ("attn.hook_z", "attn.z_proj.hook_out")
        gated = TraceStep("attn.hook_gated_z", sources, "gate", "N Q", _GATED, (sigmoid_gate, "return"))
        steps = put_after(steps, "attn.hook_z", linear_step("attn.z_proj", "ln1.hook_normalized"), gated)
        return _from_gate(steps)
    names = [step.name for step in steps]
    first, last = names.index("attn.hook_q"), names.index("attn.hook_z")
    gates = [linear_step(f"attn.{name}", "ln1.hook_normalized") for name in ("z_proj", "a_proj", "b_proj")]
    qkv = tuple(f"attn.{name}.hook_out" for name in ("q_proj", "k_proj", "v_proj"))
    a, b = ("attn.a_proj.hook_out",), ("attn.b_proj.hook_out",)
    rule = ("attn.hook_conv", "attn.hook_log_decay", "attn.hook_beta")
    gate = ("attn.delta_norm.hook_normalized", "attn.z_proj.hook_out")
    update, answer = (delta_recurrence, "memory[:]"), (delta_recurrence, "y[t]")
    own = [
        TraceStep("attn.hook_conv", qkv, "delta rule", "N C", "DeltaNet's convolution", (causal_conv, "return")),
        TraceStep("attn.hook_log_decay", a, "delta gate", "N Hv", "the log of DeltaNet's decay", (log_decay, "return")),
        TraceStep("attn.hook_beta", b, "delta gate", "N Hv", "DeltaNet's beta", (write_strength, "return")),
        TraceStep("attn.hook_state", rule, "delta rule", "N Hv dk dv", "DeltaNet's memory", update),
        TraceStep("attn.hook_delta_out", rule, "delta rule", "N Hv dv", "the answer of DeltaNet's memory", answer),
        norm_step("attn.delta_norm", "attn.hook_delta_out", "Hv dv", "delta_norm"),
        TraceStep("attn.hook_gated_z", gate, "gate", "N V", _GATED, (silu_gate, "return")),
    ]
    return _from_gate([*steps[:first], *gates, *own, *steps[last + 1 :]])


def _from_gate(steps: list[TraceStep]) -> list[TraceStep]:
    """o_proj, or BitNet's norm before it, reads what the gate gives."""
    reader = "attn.sub_norm" if any(step.name == "attn.sub_norm" for step in steps) else "attn.o_proj"
    return change_steps(steps, inputs=("attn.hook_gated_z",))(reader)


def _axes(config: Qwen35Config) -> dict[str, int]:
    delta = config.delta
    if delta is None:
        return {}
    sizes = {"C": sum(delta.sizes), "V": delta.sizes[2]}
    return sizes | {"Hv": delta.value_heads, "dk": delta.key_dim, "dv": delta.value_dim}


def _lacks(config: Qwen35Config) -> list[str]:
    return [
        *["Gated DeltaNet"] * (config.delta is not None),
        "output gates",
        *["partial RoPE"] * bool(config.rotary_dim),
    ]


# -- configs of files --------------------------------------------------------------------------------------------------


def _read(keys: HfKeys) -> dict[str, Any]:
    """Gated DeltaNet in three of four layers; attention with a gate, RoPE on a part of each head."""
    for key, expected in (("attention_bias", False), ("attn_output_gate", True), ("quantization_config", None)):
        if keys.get(key, expected) != expected:
            raise ConfigError(f"{keys.get(key)!r} is not supported for qwen3_5_text", field=key)
    interval, layers = keys.get("full_attention_interval", 4), keys.count("num_hidden_layers")
    if not isinstance(interval, int) or isinstance(interval, bool) or interval < 1:
        raise ConfigError(f"expected a number of layers, got {interval!r}", field="full_attention_interval")
    types = keys.layer_types(None, [DELTA if (i + 1) % interval else "full_attention" for i in range(layers)])
    delta = DeltaConfig(*(keys.count(key) for key in _HF_SHAPE))
    return {
        **types,
        **read_partial_rope(keys),
        "delta": delta if DELTA in types["layer_types"] else None,
    }


def _write(config: Qwen35Config) -> dict[str, Any]:
    share = near(lambda x: int(config.head_dim * x), config.rotary_size / config.head_dim, config.rotary_size)
    delta = config.delta or DeltaConfig(1, 1, 1, 1, 4)  # where no layer is a DeltaNet
    rope = {"rope_theta": config.rope.theta, **rope_json(config.rope), "partial_rotary_factor": share}
    return {
        "layer_types": types_of_layers(config),
        "partial_rotary_factor": share,
        "rope_parameters": rope,
        "rope_scaling": None,
        **{key: getattr(delta, field.name) for key, field in zip(_HF_SHAPE, fields(delta), strict=True)},
    }


def _read_gguf(keys: GgufKeys, given: dict[str, Any]) -> dict[str, Any]:
    head_dim, layers, delta = given["head_dim"], given["num_hidden_layers"], None
    rotary = keys.count("rope.dimension_count", head_dim)
    if keys.has("attention.recurrent_layers"):
        has_delta = keys.flags("attention.recurrent_layers", layers)
    else:
        interval = keys.count("full_attention_interval", 4)
        has_delta = [(i + 1) % interval != 0 for i in range(layers)]
    if any(has_delta):
        key_heads, value_heads, key_dim, inner, taps = (keys.count(f"ssm.{name}") for name in _GGUF_SHAPE)
        if inner % value_heads:
            raise keys.fail(f"{keys.arch}.ssm.inner_size", f"expected a multiple of {value_heads} heads, got {inner}")
        delta = DeltaConfig(key_heads, value_heads, key_dim, inner // value_heads, taps)
    return {
        "sliding_window": None,
        "layer_types": tuple(DELTA if each else "full_attention" for each in has_delta) if delta else (),
        "rotary_dim": None if rotary == head_dim else rotary,
        "delta": delta,
    }


def _write_gguf(config: Qwen35Config, put: Put) -> None:
    """As llama.cpp's converter. llama.cpp wants the numbers of a DeltaNet, and sections of RoPE, in any case."""
    has_delta = [not config.attends(index) for index in range(config.num_hidden_layers)]
    put("rope.dimension_sections", "[int32]", np.array(_ROPE_SECTIONS))
    put("attention.recurrent_layers", "[bool]", np.array(has_delta))
    delta = config.delta or DeltaConfig(1, 1, config.head_dim, config.head_dim, 4)
    numbers = (delta.key_heads, delta.value_heads, delta.key_dim, delta.sizes[2], delta.conv_size)
    for key, number in zip(_GGUF_SHAPE, numbers, strict=True):
        put(f"ssm.{key}", "uint32", number)


# As in `DeltaConfig`, but inner_size is value_heads * value_dim
_HF_SHAPE = (
    *("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim"),
    "linear_conv_kernel_dim",
)
_GGUF_SHAPE = ("group_count", "time_step_rank", "state_size", "inner_size", "conv_kernel")
_ROPE_SECTIONS = (11, 11, 10, 0)  # text has one position for all of them
HF = HfForm(
    "Qwen3_5ForCausalLM",
    {
        "num_key_value_heads": 4,
        "head_dim": 256,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 32768,
        "partial_rotary_factor": 0.25,
        **dict(zip(_HF_SHAPE, (16, 32, 128, 128, 4), strict=True)),
    },
    _read,
    _write,
    flags=(),
    wrapper=Wrapper(
        "qwen3_5",
        "Qwen3_5ForConditionalGeneration",
        dict(zip(SIZES, (248320, 4096, 12288, 32, 16), strict=True)),
    ),
    left_out=(*LEFT_OUT_VISION, "mtp."),  # the layers that only draft tokens
    norms_add_one=True,
)


# -- mistakes ----------------------------------------------------------------------------------------------------------

_conv_mistake = partial(Hypothesis, "*.attn.hook_conv")
_gate_mistake = partial(Hypothesis, "*.attn.hook_gated_z")


def _turned_whole(step: Any, compute: Edit, x: Floats, *tables: Floats) -> Floats:
    """RoPE of all numbers of a head."""
    return compute(x, *own_rope(step).tables(np.arange(len(x)), x.shape[2], np.float32))


def _other_product(step: Any, compute: Edit, x: Floats, w: DeltaLayer) -> Floats:
    """Decay is computed from b, and beta from a."""
    attn, _, hook = step.name.rpartition(".")
    return compute(step.seen[f"{attn}.{'b' if hook == 'hook_log_decay' else 'a'}_proj.hook_out"], w)


def _other_matrix(step: Any, compute: Edit, *inputs: Any) -> Floats:
    """The products of a_proj with the matrix of b_proj, and the reverse."""
    w = layer_weights(step)
    other = w.b_proj if ".a_proj." in step.name else w.a_proj
    return compute(*((other.bit_linear or other) if isinstance(x, LinearWeight) else x for x in inputs))


def _halves(step: Any, compute: Edit, x: Floats, w: LinearWeight, *rest: Any) -> Floats:
    """q_proj's rows, of each head the query and then the gate, read as all queries and then all gates."""
    layer, is_q = layer_weights(step), ".q_proj." in step.name
    q, gate = (compute(x, part, *rest) for part in (layer.q_proj, layer.z_proj))
    heads = [part.reshape(len(x), step.setting.config.num_attention_heads, -1) for part in (q, gate)]
    rows = np.stack(heads, axis=2).reshape(len(x), -1)  # as the file has them
    return rows[:, : q.shape[1]] if is_q else rows[:, q.shape[1] :]


def _gate_before_norm(step: Any, compute: Edit, x: Floats, *rest: Any) -> Floats:
    """norm(x silu(gate)) for norm(x) silu(gate)."""
    if step.name.endswith("hook_gated_z"):
        return x
    gate = step.seen[f"{step.name.rpartition('.delta_norm.')[0]}.z_proj.hook_out"]
    return compute(x * silu(gate).reshape(x.shape), *rest)


# S: the memory before the token, a: its decay, k and v: columns and rows, b: beta.   (Hv, dk, dv) and what fits
Update = Callable[[Floats, Floats, Floats, Floats, Floats], Floats]


def recall(k: Floats, S: Floats) -> Floats:
    known: Floats = (k * S).sum(axis=1, keepdims=True)
    return known


def right_update(S: Floats, a: Floats, k: Floats, v: Floats, b: Floats) -> Floats:
    return a * S + k * (b * (v - recall(k, a * S)))


def memory_states(x: DeltaInputs, update: Update = right_update) -> Floats:
    """The memory after each token.   -> (T, Hv, dk, dv)"""
    memory, after_token = np.zeros((*x.k.shape[1:], x.v.shape[2])), []
    for _, k, v, log_alpha, beta in zip(*x, strict=True):
        memory = update(memory, np.exp(log_alpha)[:, None, None], k[:, :, None], v[:, None], beta[:, None, None])
        after_token.append(memory)
    return np.stack(after_token).astype(np.float32)


def _by_update(update: Update) -> Edit:
    return instead(
        lambda mixed, log_alpha, beta, w: memory_states(delta_inputs(mixed, log_alpha, beta, w.delta), update)
    )


def by_inputs(
    change: Callable[[DeltaInputs, DeltaInputs, DeltaConfig], DeltaInputs],
    states_of: Callable[[DeltaInputs], Floats] | None = None,
) -> Edit:
    """The memory and its answers from other inputs: change(the right ones, those of other lengths than one, shape).

    states_of: computes the memory after each token in another way.
    """

    def edit(step: Any, compute: Edit, *inputs: Any) -> Floats:
        *states, mixed, log_alpha, beta, w = inputs
        shape, right = w.delta, delta_inputs(mixed, log_alpha, beta, w.delta)
        q, k = (
            x.reshape(len(x), shape.key_heads, -1) for x in np.split(mixed, np.cumsum(shape.sizes)[:-1], axis=1)[:2]
        )
        long = right._replace(q=q.astype(np.float64) * shape.key_dim**-0.5, k=k.astype(np.float64))
        group = shape.value_heads // shape.key_heads
        long = long._replace(**{name: np.repeat(getattr(long, name), group, axis=1) for name in "qk"})
        x = change(right, long, shape)
        if states:
            return _ask(states[0], x.q)
        return memory_states(x) if states_of is None else states_of(x)

    return edit


def _by_rms(x: DeltaInputs, long: DeltaInputs, shape: DeltaConfig) -> DeltaInputs:
    """q and k over sqrt(mean(x^2) + eps)."""
    root = shape.key_dim**0.5
    q, k = (x / np.sqrt(np.square(x).mean(axis=-1, keepdims=True) + L2_EPS) for x in (long.q * root, long.k))
    return long._replace(q=q / root, k=k)


def _tiled(x: Floats, shape: DeltaConfig) -> Floats:
    """Heads repeated as a whole: value head h reads key head h modulo their number."""
    return x[:, np.arange(shape.value_heads) % shape.key_heads * (shape.value_heads // shape.key_heads)]


def _before_token(S: Floats) -> Floats:
    return np.concatenate([np.zeros_like(S[:1]), S[:-1]])


def _ask_decayed(S: Floats, mixed: Floats, log_alpha: Floats, beta: Floats, w: DeltaLayer) -> Floats:
    decayed = _before_token(S) * np.exp(log_alpha)[:, :, None, None]
    return _ask(decayed, delta_inputs(mixed, log_alpha, beta, w.delta).q)


def by_decay(formula: Callable[..., Floats]) -> Edit:
    """formula(a, exp(A_log), dt_bias) for the log of the decay."""
    return instead(lambda a, w: formula(a.astype(np.float64), w.decay.astype(np.float64), w.decay_bias))


def softplus(x: Floats) -> Floats:
    return np.logaddexp(0.0, x)


def by_carry(change: Callable[[Floats, Floats], Floats]) -> Edit:
    """change(the memory after the call before, the memory before that call) at the beginning of each later call."""

    def edit(step: Any, compute: Edit, mixed: Floats, log_alpha: Floats, beta: Floats, w: DeltaLayer) -> Floats:
        x, after = delta_inputs(mixed, log_alpha, beta, w.delta), []
        empty: Floats = np.zeros((*x.k.shape[1:], x.v.shape[2]))
        memory = earlier = empty
        first = set(np.cumsum(step.setting.calls)[:-1].tolist())
        for t, (_, k, v, log_a, b) in enumerate(zip(*x, strict=True)):
            if t in first:
                memory, earlier = change(memory, earlier), memory
            memory = right_update(memory, np.exp(log_a)[:, None, None], k[:, :, None], v[:, None], b[:, None, None])
            after.append(memory)
        return np.stack(after).astype(np.float32)

    return edit


def by_kept(keep: Callable[[Floats, Floats, Floats], Floats]) -> Edit:
    """keep(window, y, earlier): what the next call gets of the convolution's inputs.

    window: those that this call was given, then its own.   y: the convolution's results.   earlier: the last inputs of
    the call before this one.
    """

    def edit(step: Any, compute: Edit, qkv: Floats, w: DeltaLayer) -> Floats:
        n, parts = w.conv.shape[1] - 1, []
        kept = earlier = np.zeros((n, qkv.shape[1]), dtype=np.float64)
        for own in np.split(qkv, np.cumsum(step.setting.calls)[:-1]):
            window = np.concatenate([kept, own])
            parts.append(causal_conv(window, w.conv))
            kept, earlier = keep(window, parts[-1], earlier), window[-n:]
        return np.concatenate(parts).astype(np.float32)

    return edit


def changed_last(change: Callable[[Floats], Floats]) -> Edit:
    """`by_kept` of the last inputs, changed."""
    return by_kept(lambda window, y, earlier: change(window[len(y) :]))


def _kept_in(dtype: Any) -> Callable[[Floats, Floats], Floats]:
    return lambda memory, earlier: memory.astype(dtype).astype(np.float64)


def _has_calls(step: Any) -> bool:
    return len(step.setting.calls) > 1


_carry_mistake = partial(Hypothesis, "*.attn.hook_state", fits=_has_calls)
_conv_carry_mistake = partial(Hypothesis, "*.attn.hook_conv", fits=_has_calls)
_CARRY = "A call begins with the memory, and with the last conv_size - 1 inputs of the convolution, that the call before left."
_state_mistake = partial(Hypothesis, "*.attn.hook_state")
_answer_mistake = partial(Hypothesis, "*.attn.hook_delta_out")
_inputs_mistake = partial(Hypothesis, "*.attn.hook_state *.attn.hook_delta_out")
_decay_mistake = partial(Hypothesis, "*.attn.hook_log_decay")
_RULE = "S becomes a S + k b (v - k a S): the decay first, then the correction by the error of the decayed memory."
_UNIT = "q and k are divided by their lengths, head by head, and q by sqrt(head_k_dim)."
_DECAY = "log alpha = -exp(A_log) softplus(a + dt_bias); GGUF files hold -exp(A_log) itself."
# fmt: off
DELTA_MISTAKES = (
    _state_mistake("decay_after_update", "the memory is decayed after it is corrected, not before", _RULE, _by_update(lambda S, a, k, v, b: a * (S + k * (b * (v - recall(k, S)))))),
    _state_mistake("error_of_undecayed", "the error is that of the memory before its decay", _RULE, _by_update(lambda S, a, k, v, b: a * S + k * (b * (v - recall(k, S))))),
    _state_mistake("delta_rule_missing", "v is written without what the memory knows already: there is no delta rule", _RULE, _by_update(lambda S, a, k, v, b: a * S + k * (b * v))),
    _state_mistake("beta_on_v_only", "beta multiplies v alone, not the error", _RULE, _by_update(lambda S, a, k, v, b: a * S + k * (b * v - recall(k, a * S)))),
    _state_mistake("decay_of_the_error", "the decay multiplies what is written, not the memory", _RULE, _by_update(lambda S, a, k, v, b: S + a * k * (b * (v - recall(k, S))))),
    _state_mistake("error_sign", "what the memory knows is added to v, not subtracted", _RULE, _by_update(lambda S, a, k, v, b: a * S + k * (b * (v + recall(k, a * S))))),
    _state_mistake("memory_not_carried", "each token begins with an empty memory", "Carry the memory from token to token.", _by_update(lambda S, a, k, v, b: k * (b * v))),
    _answer_mistake("read_before_update", "the memory is asked before the token is written", "y = q S of the memory after the token.", before(0, _before_token)),
    _answer_mistake("read_of_the_decayed", "the memory is asked after its decay, before the token is written", "y = q S of the memory after the token.", instead(_ask_decayed)),
    _answer_mistake("memory_transposed", "the memory is transposed when it is asked", "It has key_dim rows and value_dim columns.", before(0, lambda S: S.swapaxes(2, 3)), lambda step: step.setting.config.delta.key_dim == step.setting.config.delta.value_dim),
    _inputs_mistake("l2_missing", "q and k are not brought to unit length", _UNIT, by_inputs(lambda x, long, shape: long)),
    _inputs_mistake("l2_missing_on_q", "q is not brought to unit length", _UNIT, by_inputs(lambda x, long, shape: x._replace(q=long.q))),
    _inputs_mistake("l2_missing_on_k", "k is not brought to unit length", _UNIT, by_inputs(lambda x, long, shape: x._replace(k=long.k))),
    _inputs_mistake("l2_is_rms", "q and k are divided by the root of their mean of squares, not by their length", _UNIT, by_inputs(_by_rms)),
    _inputs_mistake("query_scale_missing_in_delta", "q is not divided by sqrt(head_k_dim)", _UNIT, by_inputs(lambda x, long, shape: x._replace(q=x.q * shape.key_dim**0.5))),
    _inputs_mistake("key_scaled_too", "k is divided by sqrt(head_k_dim) as well", _UNIT, by_inputs(lambda x, long, shape: x._replace(k=x.k * shape.key_dim**-0.5))),
    _inputs_mistake("delta_q_and_k_exchanged", "q and k are exchanged after the convolution", "Its channels are q, k, v.", by_inputs(lambda x, long, shape: x._replace(q=x.k * shape.key_dim**-0.5, k=x.q * shape.key_dim**0.5))),
    _inputs_mistake("heads_tiled", "key heads are repeated as a whole: value head h reads key head h modulo their number", "Each key head serves neighbouring value heads (repeat_interleave); GGUF files reorder the rows of v for the other.", by_inputs(lambda x, long, shape: x._replace(q=_tiled(x.q, shape), k=_tiled(x.k, shape))), lambda step: step.setting.config.delta.value_heads > step.setting.config.delta.key_heads > 1),
    _decay_mistake("softplus_is_relu", "relu stands for softplus in the decay", _DECAY, by_decay(lambda a, A, bias: -A * np.maximum(a + bias, 0))),
    _decay_mistake("softplus_is_exp", "exp stands for softplus in the decay", _DECAY, by_decay(lambda a, A, bias: -A * np.exp(np.minimum(a + bias, 80)))),
    _decay_mistake("dt_bias_after_softplus", "dt_bias is added after softplus", _DECAY, by_decay(lambda a, A, bias: -A * (softplus(a) + bias))),
    _decay_mistake("dt_bias_missing", "dt_bias is not added", _DECAY, by_decay(lambda a, A, bias: -A * softplus(a))),
    _decay_mistake("a_log_without_exp", "A_log is taken without its exp", _DECAY, by_decay(lambda a, A, bias: -np.log(A) * softplus(a + bias))),
    _decay_mistake("a_log_of_gguf", "exp is taken of the -exp(A_log) that a GGUF file holds", _DECAY, by_decay(lambda a, A, bias: -np.exp(-A) * softplus(a + bias))),
    _conv_mistake("conv_silu_before", "silu is taken before the convolution, not after", "silu(conv(x)).", instead(lambda qkv, w: taps(silu(qkv), w.conv))),
    _conv_mistake("conv_missing", "the convolution is left out: each token has only its own weight", "Keep the last conv_size - 1 inputs of each sequence.", instead(lambda qkv, w: silu(qkv * w.conv[:, -1]))),
    _conv_mistake("conv_of_q_and_k_only", "v is not convolved", "The convolution is over q, k and v together.", instead(lambda qkv, w: np.concatenate([silu(taps(qkv, w.conv))[:, : sum(w.delta.sizes[:2])], qkv[:, sum(w.delta.sizes[:2]) :]], axis=1))),
    _carry_mistake("state_lost", "the memory is not carried from call to call: each begins with an empty one", _CARRY, by_carry(lambda S, old: np.zeros_like(S))),
    _carry_mistake("state_of_call_before", "a call begins with the memory from before the call before it", _CARRY, by_carry(lambda S, old: old)),
    _carry_mistake("state_transposed", "the memory is transposed between calls", _CARRY, by_carry(lambda S, old: S.swapaxes(1, 2)), fits=lambda step: _has_calls(step) and step.setting.config.delta.key_dim == step.setting.config.delta.value_dim),
    *(_carry_mistake(f"state_in_{words}", f"the memory is rounded to {words} between calls", _CARRY, by_carry(_kept_in(to)), rounds=True) for words, to in (("bfloat16", ml_dtypes.bfloat16), ("float16", np.float16))),
    _conv_carry_mistake("conv_state_lost", "the convolution's inputs are not carried from call to call: zeros stand for them", _CARRY, changed_last(lambda x: np.zeros_like(x))),
    _conv_carry_mistake("conv_state_after_silu", "the convolution's inputs are kept after silu", _CARRY, changed_last(lambda x: silu(x))),
    _conv_carry_mistake("conv_state_of_call_before", "a call begins with the convolution's inputs from before the call before it", _CARRY, by_kept(lambda window, y, earlier: earlier)),
    _conv_carry_mistake("conv_state_one_late", "the convolution's kept inputs are one place late in later calls", _CARRY, changed_last(lambda x: np.roll(x, 1, axis=0))),
    _conv_carry_mistake("conv_state_one_early", "the convolution's kept inputs are one place early in later calls", _CARRY, changed_last(lambda x: np.roll(x, -1, axis=0))),
    _conv_carry_mistake("conv_state_reversed", "the convolution's kept inputs are in reverse in later calls", _CARRY, changed_last(lambda x: x[::-1])),
    Hypothesis("*.attn.delta_norm.* *.attn.hook_gated_z", "gate_before_norm", "the gate multiplies before the norm, not after it", "norm(y) * silu(z).", _gate_before_norm, lambda step: not step.setting.config.attends(step.layer)),
    Hypothesis("*.attn.q_proj.hook_out *.attn.z_proj.hook_out", "query_and_gate_in_halves", "q_proj's rows are read as all queries and then all gates", "They are in turn, head by head: view(.., heads, 2 * head_dim), then chunk.", _halves, lambda step: step.setting.config.attends(step.layer) and step.setting.config.num_attention_heads > 1 and len(step.inputs) > 1 and isinstance(step.inputs[1], LinearWeight)),
)
# fmt: on


def taps(qkv: Floats, conv: Floats, apart: int = 1) -> NDArray[np.float64]:
    """The convolution of a sequence from its beginning, without silu.   (N, C) -> (N, C)

    apart: the distance of the tokens that it is over.
    """
    n, wide = conv.shape[1], qkv.astype(np.float64)
    padded = np.concatenate([np.zeros(((n - 1) * apart, qkv.shape[1])), wide])
    return sum((padded[i * apart : i * apart + len(qkv)] * conv[:, i] for i in range(n)), np.zeros_like(wide))


MISTAKES = (
    *HEAD_NORM_MISTAKES,
    *DELTA_MISTAKES,
    NORM_ONE_LEFT_OUT,
    Hypothesis(
        "*.attn.hook_rot_[qk]",
        "rope_of_the_whole_head",
        "RoPE turns the whole head where it should turn a part",
        "Read partial_rotary_factor: only the first numbers of a head are turned.",
        _turned_whole,
        lambda step: step.setting.config.rotary_dim is not None,
    ),
    Hypothesis(
        "*.attn.hook_log_decay *.attn.hook_beta",
        "decay_and_beta_exchanged",
        "the products of a and b are exchanged: decay is computed from b, beta from a",
        "alpha = exp(-exp(A_log) softplus(a + dt_bias)), beta = sigmoid(b).",
        _other_product,
    ),
    Hypothesis(
        "*.attn.[ab]_proj.hook_acc_int32 *.attn.[ab]_proj.hook_out",
        "a_proj_and_b_proj_exchanged",
        "the matrices in_proj_a and in_proj_b are exchanged",
        "in_proj_a is of the decay, in_proj_b of beta.",
        _other_matrix,
    ),
    _conv_mistake(
        "conv_one_late",
        "the convolution is off by one: it ends before the current token",
        "Its last weight is for the current token.",
        before(0, lambda qkv: np.concatenate([0 * qkv[:1], qkv[:-1]])),
    ),
    _conv_mistake(
        "conv_reversed",
        "the convolution's weights are in reverse order",
        "torch's conv1d is a correlation: weight [.., -1] is for the current token.",
        before(1, lambda w: replace(w, conv=np.ascontiguousarray(w.conv[:, ::-1]))),
    ),
    _gate_mistake(
        "output_gate_missing",
        "the result is not multiplied by its gate before o_proj",
        "Multiply by sigmoid (attention) or silu (DeltaNet) of the gate's product.",
        leave_out,
    ),
)

FAMILIES = (
    Family(
        "qwen3_5_text",
        Qwen35Config,
        nested={"delta": DeltaConfig},
        layer_class=lambda config, layer: GatedLayer if config.attends(layer) else DeltaLayer,
        steps=_steps,
        axes=_axes,
        lacks=_lacks,
        also_recorded={delta_rule: ("hook_state", memories)},
        from_recorded={delta_rule: answers},
        make_layer=_make_layer,
        of_layers=_of_layers,
        new_states=_new_states,
        state_size=_state_size,
        names=NAMES,
        place=place,
        hf=HF,
        gguf=GgufForm({"qwen35": Architecture("silu")}, _read_gguf, _write_gguf),
        mistakes=MISTAKES,
        constants=lambda config: (
            {} if config.delta is None else {"head_k_dim": config.delta.key_dim, "head_v_dim": config.delta.value_dim}
        ),
        end_of_embedded=END_OF_TEXT,
        array_shapes=_array_shapes,
        arrays=ARRAYS,
        example_fields={"layer_types": (DELTA, "full_attention"), "delta": DeltaConfig(2, 4, 8, 8, 4), "rotary_dim": 4},
    ),
)
