"""Mixtures of experts: Qwen3-MoE, Mixtral and Maple. The feed-forward is many small ones; each token takes a few.

    p = softmax(router h) over all experts, in float32; the k largest, divided by their sum where the family says so
    y = the sum over these k experts of p_e down_e(act(gate_e h) * up_e h)

Rows of experts that no token chose are not computed. The gate_proj of all experts is one part of a model, (E*F, D), as
GGUF stores it; a layer's weights hold it apart, as `Experts`. Maple (DeepGrove) clamps gate and up at 7, has positions
in its sliding layers only, on half of each head, and a window that its published class draws one key wider than others.

Source: transformers' modeling_qwen3_moe.py and modeling_mixtral.py; Maple's own modeling text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from ..errors import ConfigError, ShapeError, require, require_bool, require_int
from ..reference import layers
from ..reference.config import ModelConfig, added
from ..reference.layers import Array, Floats
from ..reference.model import BlockPlace, attention_result, split_heads
from ..reference.ops import Ops
from ..reference.weights import LayerWeights, LinearWeight, Shared
from .family import (
    FULL,
    SLIDING,
    Architecture,
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
    WeightKind,
    after,
    config_of_layers,
    fields_of_types,
    instead,
    layer_weights,
    linear_step,
    types_of_layers,
)
from .llama import llama_steps
from .qwen import (
    END_OF_TEXT,
    HEAD_NORM_MISTAKES,
    HEAD_NORMS,
    PartialRopeConfig,
    Qwen3Config,
    Qwen3Layer,
    head_norm_steps,
    norm_heads,
    read_partial_rope,
)
from .smollm3 import turned_scores, without_rope

MAX_EXPERTS = 4096  # published models have up to some 500; files have a name for each
CLAMP = 7.0  # of Maple's gates, in its code
OF_EXPERTS = ("gate_proj", "up_proj", "down_proj")


# -- config ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MoeConfig(ModelConfig):
    num_experts: int = added(1)
    num_experts_per_tok: int = added(1)
    moe_intermediate_size: int = added(1)  # F of an expert
    norm_topk_prob: bool = added(True)  # the chosen shares are divided by their sum
    dense_layers: tuple[int, ...] = added(())  # whose feed-forward is one, of intermediate_size
    gate_clamp: float | None = added(None)  # gate at most this, up between minus this and this

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("num_experts", "num_experts_per_tok", "moe_intermediate_size"):
            require_int(name, getattr(self, name))
        require(self.num_experts <= MAX_EXPERTS, "num_experts", f"at most {MAX_EXPERTS} experts", self.num_experts)
        fits = self.num_experts_per_tok <= self.num_experts
        require(fits, "num_experts_per_tok", f"at most {self.num_experts} experts", self.num_experts_per_tok)
        known = all(isinstance(layer, int) and 0 <= layer < self.num_hidden_layers for layer in self.dense_layers)
        require(known, "mlp_only_layers", f"layers below {self.num_hidden_layers}", self.dense_layers)
        plain = self.quantization is None or not self.quantization.int8_activations
        require(plain, "quantization_config", "none: experts that are BitLinears are not supported", self.quantization)

    def is_sparse(self, layer: int) -> bool:
        """Whether the layer's feed-forward is a mixture."""
        return layer not in self.dense_layers

    @property
    def layers_differ(self) -> bool:
        return super().layers_differ or bool(self.dense_layers)

    def linear_shapes(self, layer: int = 0) -> dict[str, tuple[int, int]]:
        shapes = super().linear_shapes(layer)
        if not self.is_sparse(layer):
            return shapes
        count, inner, hidden = self.num_experts, self.moe_intermediate_size, self.hidden_size
        attention = {name: shape for name, shape in shapes.items() if name not in OF_EXPERTS}
        stacked = {"gate_proj": (count * inner, hidden), "up_proj": (count * inner, hidden)}
        return {**attention, "router": (count, hidden), **stacked, "down_proj": (count * hidden, inner)}


@dataclass(frozen=True)
class Qwen3MoeConfig(MoeConfig, Qwen3Config): ...


@dataclass(frozen=True)
class MapleConfig(Qwen3MoeConfig, PartialRopeConfig):
    global_positions: bool = added(True)  # whether layers without a window have RoPE

    def turns(self, layer: int) -> bool:
        """Whether a layer has RoPE."""
        return self.global_positions or self.window_of(layer) is not None

    def window_of(self, layer: int) -> int | None:
        """The published class calls FlashAttention with (sliding_window, 0): so many tokens before a token, and it."""
        window = super().window_of(layer)
        return None if window is None else window + 1


# -- the experts of a layer --------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False, repr=False)
class Experts(LinearWeight):
    """One linear of every expert of a layer. It has no product for all tokens: see `expert_products`."""

    kind = "experts"

    experts: tuple[LinearWeight, ...]
    chosen: int  # by a token
    name: str = ""
    bias: None = None

    @property
    def shape(self) -> tuple[int, int]:
        """(E * out_features, in_features)"""
        n_out, n_in = self.experts[0].shape
        return len(self.experts) * n_out, n_in

    @property
    def nbytes(self) -> int:
        return sum(expert.nbytes for expert in self.experts)

    @property
    def bytes_of_token(self) -> int:
        """The bytes that one token reads."""
        return self.nbytes * self.chosen // len(self.experts)

    def product(self, be: Ops, x: Floats, shared: Shared) -> Floats:
        raise ShapeError("linear", expected="the tokens that chose each expert", got=repr(self))

    def each(self, change: Callable[[LinearWeight], LinearWeight]) -> Self:
        changed = tuple(map(change, self.experts))
        same = all(a is b for a, b in zip(changed, self.experts, strict=True))
        return self if same else replace(self, experts=changed)

    def called(self, name: str) -> Self:
        """Its experts are called "blocks.3.mlp.gate_proj.0", ..."""
        names = (f"{name}.{number}" for number in range(len(self.experts)))
        own = tuple(expert.called(each) for expert, each in zip(self.experts, names, strict=True))
        return replace(self, experts=own, name=name)

    def plain(self) -> Self:
        return self.each(lambda expert: expert.plain())

    def contents(self, name: str) -> Iterator[tuple[str, Array]]:
        for number, expert in enumerate(self.experts):
            yield from expert.contents(f"{name}.{number}")


AnyWeight = TypeVar("AnyWeight", bound=LinearWeight)


def some_rows(w: AnyWeight, rows: slice) -> AnyWeight:
    """The weight of some outputs of a linear, of a kind whose arrays have a row for each output, or that wraps one."""
    count = w.shape[0]
    cut: dict[str, Any] = {}
    for name, each in vars(w).items():
        if isinstance(each, LinearWeight):
            cut[name] = some_rows(each, rows)
        elif isinstance(each, np.ndarray) and len(each) == count:
            cut[name] = each[rows]
    return replace(w, **cut)  # type: ignore[type-var]


def stack_rows(parts: Sequence[LinearWeight]) -> LinearWeight:
    """The inverse: linears of one input and one kind, one above another. ValueError for several kinds."""
    first = parts[0]
    names = [name for name, each in vars(first).items() if isinstance(each, np.ndarray)]
    alike = all(form_of(part) == form_of(first) for part in parts)
    if not alike:
        raise ValueError("its experts are stored in different ways")
    stacked: dict[str, Any] = {name: np.concatenate([getattr(part, name) for part in parts]) for name in names}
    inner = [name for name, each in vars(first).items() if isinstance(each, LinearWeight)]
    stacked |= {name: stack_rows([getattr(part, name) for part in parts]) for name in inner}
    return replace(first, **stacked)  # type: ignore[type-var]


def form_of(w: LinearWeight) -> tuple[Any, ...]:
    """What weights have in common that can be stacked."""
    of_arrays = [(name, each.dtype, each.shape) for name, each in vars(w).items() if isinstance(each, np.ndarray)]
    return type(w), getattr(w, "group", None), getattr(w, "block_type", None), tuple(of_arrays)


def split_experts(config: MoeConfig, layer: int, linear: str, w: LinearWeight) -> LinearWeight:
    """A linear of a layer as its weights hold it."""
    if linear not in OF_EXPERTS or not config.is_sparse(layer):
        return w
    height = w.shape[0] // config.num_experts
    parts = (slice(i * height, (i + 1) * height) for i in range(config.num_experts))
    return Experts(tuple(some_rows(w, rows) for rows in parts), config.num_experts_per_tok)


@dataclass(frozen=True, eq=False)
class MoeLayer(LayerWeights):
    """gate_proj, up_proj and down_proj are `Experts`."""

    router: LinearWeight  # (E, D)

    @staticmethod
    def feed_forward_text(be: Ops, x: Floats, w: MoeLayer, cfg: MoeConfig) -> Floats:
        """(N, D) -> (N, D), residual included"""
        return feed_forward(be, x, w, cfg)


@dataclass(frozen=True, eq=False, repr=False)
class Qwen3MoeLayer(MoeLayer, Qwen3Layer): ...


# -- the texts of its blocks -------------------------------------------------------------------------------------------


def feed_forward(be: Ops, x: Floats, w: MoeLayer, cfg: MoeConfig) -> Floats:
    """N tokens, E experts, k of them for each token, F the width of one.   (N, D) -> (N, D), residual included"""
    mlp = f"{w.name}.mlp"
    h = be.rms_norm(x, w.ffn_norm)  # (N, D)
    scores = be.linear(h, w.router)  # (N, E)
    shares = be.compute(f"{mlp}.hook_expert_weights", choose_experts, scores, cfg)  # (N, E)
    gate = be.compose(f"{mlp}.hook_pre", expert_products, h, shares, w.gate_proj)  # (N, k, F)
    up = be.compose(f"{mlp}.hook_pre_linear", expert_products, h, shares, w.up_proj)  # (N, k, F)
    inner = be.compose(f"{mlp}.hook_post", gated, gate, up, cfg.activation, cfg)  # (N, k, F)
    out = be.compose(f"{mlp}.hook_expert_out", expert_products, inner, shares, w.down_proj)  # (N, k, D)
    return be.add(x, be.compute(f"{mlp}.hook_mixed", mix, out, shares))  # (N, D)


def choose_experts(scores: Floats, cfg: MoeConfig) -> Floats:
    """The share that each expert has in a token's result, 0 of those not chosen.   (N, E) -> (N, E)

    Of equal scores the expert with the lower number is chosen.
    """
    p = layers.softmax(scores)
    ids = np.argsort(-p, axis=1, kind="stable")[:, : cfg.num_experts_per_tok]
    shares, tokens = np.zeros_like(p), np.arange(len(p))[:, None]
    shares[tokens, ids] = np.maximum(p[tokens, ids], np.finfo(p.dtype).tiny)  # so that none is 0
    if cfg.norm_topk_prob:
        shares /= shares.astype(np.float64).sum(axis=1, keepdims=True).astype(p.dtype)
    return shares


def chosen_ids(shares: Floats, k: int) -> NDArray[np.int64]:
    """The k experts of each token, ascending.   (N, E) -> (N, k)"""
    if (np.count_nonzero(shares, axis=1) == k).all():
        return np.nonzero(shares)[1].reshape(-1, k)
    return np.sort(np.argsort(-shares, axis=1, kind="stable")[:, :k], axis=1)


def expert_products(be: Ops, x: Floats, shares: Floats, w: Experts) -> Floats:
    """The linears of the experts that each token chose.   x (N, K) or, each expert's own, (N, k, K) -> (N, k, out)"""
    ids = chosen_ids(shares, w.chosen)
    n, k = ids.shape
    y = np.empty((n, k, w.experts[0].shape[0]), dtype=x.dtype)
    if n == 1 and x.ndim == 2:  # of one input: several at a time
        for start in range(0, k, TOGETHER):
            part = slice(start, start + TOGETHER)
            y[0, part] = np.concatenate(be.linears(x, [w.experts[each] for each in ids[0, part]]))
        return y
    for expert in np.unique(ids):
        tokens, places = np.nonzero(ids == expert)
        rows = x[tokens] if x.ndim == 2 else x[tokens, places]
        y[tokens, places] = be.linear(np.ascontiguousarray(rows), w.experts[expert])
    return y


TOGETHER = 8  # linears in one call


def gated(be: Ops, gate: Floats, up: Floats, activation: str, cfg: MoeConfig) -> Floats:
    """act(gate) * up, clamped first where the model does.   (N, k, F), (N, k, F) -> (N, k, F)"""
    if cfg.gate_clamp is not None:
        limit = gate.dtype.type(cfg.gate_clamp)
        gate, up = np.minimum(gate, limit), np.minimum(np.maximum(up, -limit), limit)
    flat = (-1, gate.shape[-1])
    return be.gated(gate.reshape(flat), up.reshape(flat), activation).reshape(gate.shape)


def mix(out: Floats, shares: Floats) -> Floats:
    """The sum of the experts' results by their shares, in float64 and rounded once.   (N, k, D), (N, E) -> (N, D)"""
    own = shares[np.arange(len(shares))[:, None], chosen_ids(shares, out.shape[1])]  # (N, k)
    mixed: Floats = np.einsum("nk,nkd->nd", own.astype(np.float64), out.astype(np.float64))
    return mixed.astype(out.dtype)


def block_without_positions(be: Ops, x: Floats, w: Qwen3MoeLayer, cfg: ModelConfig, at: BlockPlace) -> Floats:
    """Qwen3's attention, of a Maple layer without RoPE.   (N, D) -> (N, D), residual included"""
    h = be.rms_norm(x, w.attn_norm)  # (N, D)
    q, k, v = split_heads(cfg, *be.linears(h, (w.q_proj, w.k_proj, w.v_proj)))  # (N, H, d), (N, G, d), (N, G, d)
    q = norm_heads(be, q, w.q_norm)
    k = norm_heads(be, k, w.k_norm)
    be.append(at.cache, at.layer, at.batch, k, v)
    z = be.attention(q, at.cache, at.batch, at.layer, cfg.window_of(at.layer))  # (N, H, d)
    return be.add(x, attention_result(be, z, w))  # (N, D)


class GlobalMapleLayer(Qwen3MoeLayer):
    attention_text: ClassVar[Any] = staticmethod(block_without_positions)


# -- the steps that it records -----------------------------------------------------------------------------------------


def _moe_steps(steps: list[TraceStep]) -> list[TraceStep]:
    """The steps of a block whose feed-forward is a mixture: the others, and in the place of `mlp.*` its own."""
    normed, shares = "ln2.hook_normalized", "mlp.hook_expert_weights"
    halves, result = ("mlp.hook_pre", "mlp.hook_pre_linear"), "mlp.hook_expert_out"
    routing, products, sums = (choose_experts, "    p = "), (feed_forward, "    out = "), (mix, "    return")
    own = [
        linear_step("mlp.router", normed),
        TraceStep(shares, ("mlp.router.hook_out",), "routing", "N E", "the experts' shares", routing),
        TraceStep("mlp.hook_pre", (normed, shares), "dense linear", "N k M", "the experts' gate"),
        TraceStep("mlp.hook_pre_linear", (normed, shares), "dense linear", "N k M", "the experts' up"),
        TraceStep("mlp.hook_post", halves, "gate", "N k M"),
        TraceStep(result, ("mlp.hook_post", shares), "dense linear", "N k D", "the experts' results", products),
        TraceStep("mlp.hook_mixed", (result, shares), "experts' sum", "N D", "the sum of the experts", sums),
        TraceStep("hook_mlp_out", ("mlp.hook_mixed",), "residual", "N D"),
    ]
    first = [step.name for step in steps].index("mlp.gate_proj")
    return [*steps[:first], *own, steps[-1]]


def _qwen3_steps(config: Qwen3MoeConfig, layer: int) -> list[TraceStep]:
    steps = head_norm_steps(llama_steps(config, layer))
    return _moe_steps(steps) if config.is_sparse(layer) else steps


def _maple_steps(config: MapleConfig, layer: int) -> list[TraceStep]:
    steps = _qwen3_steps(config, layer)
    return steps if config.turns(layer) else without_rope(steps)


def _axes(config: MoeConfig) -> dict[str, int]:
    return {"E": config.num_experts, "k": config.num_experts_per_tok, "M": config.moe_intermediate_size}


# -- files -------------------------------------------------------------------------------------------------------------


def _place(module: str, names: tuple[str, str, str] = OF_EXPERTS) -> Callable[..., LinearPlace | None]:
    """Files of transformers, and GGUF files of 2023, have a tensor for each expert; MLX and newer GGUF one for all.
    names: of gate, up and down"""
    gguf = dict(zip(OF_EXPERTS, ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"), strict=True))
    hf = dict(zip(OF_EXPERTS, names, strict=True))

    def place(config: MoeConfig, layer: int, linear: str, style: str) -> LinearPlace | None:
        if not config.is_sparse(layer):
            return None
        if linear == "router":
            return LinearPlace(f"{module}.gate" if style == "hf" else "ffn_gate_inp", config.num_experts)
        if linear not in OF_EXPERTS:
            return None
        height = config.linear_shapes(layer)[linear][0]
        if style == "gguf":
            alone = gguf[linear].removesuffix("_exps")
            older = tuple(f"{alone}.{number}" for number in range(config.num_experts))
            return LinearPlace(gguf[linear], height, parts=older, stacked=config.num_experts)
        modules = tuple(f"{module}.experts.{number}.{hf[linear]}" for number in range(config.num_experts))
        return LinearPlace(modules[0], height, parts=modules, stack=f"{module}.switch_mlp.{linear}")

    return place


def _of_layers(config: MoeConfig, chosen: Sequence[int]) -> MoeConfig:
    dense = tuple(new for new, old in enumerate(chosen) if old in config.dense_layers)
    return config_of_layers(config, chosen, dense_layers=dense)


def _flag(keys: HfKeys, key: str, default: bool) -> bool:
    value: bool = keys.get(key, default)
    require_bool(key, value)
    return value


def _count_experts(keys: HfKeys, by_default: str) -> int:
    """transformers 5 reads both names, and writes the first."""
    names = "num_local_experts", "num_experts"
    keys.ignore(*names)
    return keys.count(next((name for name in names if keys.raw.get(name) is not None), by_default))


def _read_mixtral(keys: HfKeys) -> dict[str, Any]:
    """Shares are always divided by their sum; the width of an expert is intermediate_size."""
    experts, chosen = _count_experts(keys, "num_local_experts"), keys.count("num_experts_per_tok")
    counts = {"num_experts": experts, "num_experts_per_tok": chosen}
    width, window = keys.count("intermediate_size"), keys.get("sliding_window")
    return {**counts, "moe_intermediate_size": width, "sliding_window": window}


def _write_mixtral(config: MoeConfig) -> dict[str, Any]:
    counts = {"num_local_experts": config.num_experts, "num_experts_per_tok": config.num_experts_per_tok}
    return {**counts, "sliding_window": config.sliding_window}


_COUNTS = ("num_experts", "num_experts_per_tok", "moe_intermediate_size")


def _read_qwen3_moe(keys: HfKeys) -> dict[str, Any]:
    """Layer i is a mixture unless mlp_only_layers has it, or (i + 1) is no multiple of decoder_sparse_step."""
    layers, step = keys.count("num_hidden_layers"), keys.count("decoder_sparse_step")
    listed = keys.get("mlp_only_layers", [])
    if not isinstance(listed, list) or not all(isinstance(each, int) and not isinstance(each, bool) for each in listed):
        raise ConfigError(f"expected a list of numbers of layers, got {listed!r}"[:200], field="mlp_only_layers")
    keys.ignore("use_qk_norm", "max_window_layers")
    dense = tuple(i for i in range(layers) if i in listed or (i + 1) % step)
    counts = {key: keys.count(key) for key in _COUNTS[1:]} | {"num_experts": _count_experts(keys, "num_experts")}
    window = keys.get("sliding_window") if _flag(keys, "use_sliding_window", False) else None
    keys.ignore("sliding_window")
    norm = _flag(keys, "norm_topk_prob", False)
    return {**counts, "norm_topk_prob": norm, "dense_layers": dense, "sliding_window": window}


def _counts_and_norm(config: MoeConfig) -> dict[str, Any]:
    return {key: getattr(config, key) for key in (*_COUNTS, "norm_topk_prob")}


def _write_qwen3_moe(config: Qwen3MoeConfig) -> dict[str, Any]:
    windows = {"use_sliding_window": config.sliding_window is not None, "sliding_window": config.sliding_window}
    layers = {"decoder_sparse_step": 1, "mlp_only_layers": list(config.dense_layers)}
    return {**_counts_and_norm(config), **layers, **windows}


_MAPLE_UNUSED = ("quantize", "preaffine", "max_window_layers", "moe_router_enable_expert_bias", "router_dtype")


def _read_maple(keys: HfKeys) -> dict[str, Any]:
    """Its class clamps at 7, whatever the file says. intermediate_size is the width of nothing."""
    keys.ignore(*_MAPLE_UNUSED, "use_rmsnorm", "use_qk_norm", "num_shared_experts")
    if keys.raw.get("num_shared_experts"):
        raise ConfigError("experts that every token takes are not supported", field="num_shared_experts")
    window = keys.get("sliding_window")
    types = keys.layer_types(window, [FULL if window is None else SLIDING] * keys.count("num_hidden_layers"))
    return {
        **{key: keys.count(key) for key in _COUNTS},
        **types,
        "norm_topk_prob": _flag(keys, "norm_topk_prob", True),
        "gate_clamp": CLAMP,
        "global_positions": not _flag(keys, "nope_on_global_attention", False),
        **read_partial_rope(keys),
    }


def _write_maple(config: MapleConfig) -> dict[str, Any]:
    return {
        **_counts_and_norm(config),
        "layer_types": types_of_layers(config),
        "sliding_window": config.sliding_window,
        "partial_rotary_factor": config.rotary_size / config.head_dim,
        "nope_on_global_attention": not config.global_positions,
    }


def _gguf_counts(keys: GgufKeys, width: str = "expert_feed_forward_length") -> dict[str, Any]:
    """width: the key of an expert's width"""
    names = {"num_experts": "expert_count", "num_experts_per_tok": "expert_used_count", "moe_intermediate_size": width}
    return {field: keys.count(key) for field, key in names.items()}


def _write_mixtral_gguf(config: MoeConfig, put: Put) -> None:
    put("expert_count", "uint32", config.num_experts)
    put("expert_used_count", "uint32", config.num_experts_per_tok)


def _read_maple_gguf(keys: GgufKeys, fields: dict[str, Any]) -> dict[str, Any]:
    """RoPE is that of the sliding layers; the others have rope.dimension_count 0."""
    layers, head_dim = fields["num_hidden_layers"], fields["head_dim"]
    slides = keys.flags("attention.sliding_window_pattern", layers)
    turned = keys.count("rope.dimension_count_swa", head_dim)
    clamps = keys.get("swiglu_clamp_exp", [CLAMP])
    if any(each != CLAMP for each in np.atleast_1d(clamps).tolist()):
        raise keys.fail(f"{keys.arch}.swiglu_clamp_exp", f"expected {CLAMP} for each layer, where Maple's class clamps")
    norm = keys.get("expert_weights_norm", True)
    if not isinstance(norm, bool):
        raise keys.fail(f"{keys.arch}.expert_weights_norm", f"expected true or false, got {norm!r}"[:200])
    return {
        **_gguf_counts(keys),
        "norm_topk_prob": norm,
        **fields_of_types([SLIDING if each else FULL for each in slides], fields["sliding_window"]),
        "rotary_dim": None if turned == head_dim else turned,
        "global_positions": keys.has("rope.dimension_count"),
        "gate_clamp": CLAMP,
    }


def _write_gguf_counts(config: MoeConfig, put: Put) -> None:
    _write_mixtral_gguf(config, put)
    put("expert_feed_forward_length", "uint32", config.moe_intermediate_size)


def _write_maple_gguf(config: MapleConfig, put: Put) -> None:
    _write_gguf_counts(config, put)
    slides = [kind == SLIDING for kind in types_of_layers(config)]
    put("attention.sliding_window_pattern", "[bool]", np.array(slides))
    put("rope.dimension_count", "uint32", config.rotary_size if config.global_positions else 0)
    put("rope.dimension_count_swa", "uint32", config.rotary_size)
    put("expert_weights_norm", "bool", config.norm_topk_prob)
    put("swiglu_clamp_exp", "[float32]", np.full(config.num_hidden_layers, CLAMP, dtype=np.float32))


# -- mistakes ----------------------------------------------------------------------------------------------------------


def _not_normed(step: Any, compute: Edit, scores: Floats, *rest: Any) -> Floats:
    config = step.setting.config
    return choose_experts(scores, replace(config, norm_topk_prob=not config.norm_topk_prob))


def _one_fewer(step: Any, compute: Edit, scores: Floats, *rest: Any) -> Floats:
    """The last of the chosen has no share."""
    config = step.setting.config
    right = compute(scores, *rest)
    fewer = choose_experts(scores, replace(config, num_experts_per_tok=config.num_experts_per_tok - 1))
    return np.where(right > 0, np.maximum(fewer, np.finfo(right.dtype).tiny), 0).astype(right.dtype)


def _exchanged(step: Any, compute: Edit, x: Floats, shares: Floats, *rest: Any) -> Floats:
    """gate and up exchanged."""
    w = layer_weights(step)
    other = w.up_proj if step.name.endswith("hook_pre") else w.gate_proj
    return expert_products(Ops(), x, shares, other)


def _without_clamp(step: Any, compute: Edit, gate: Floats, up: Floats, *rest: Any) -> Floats:
    config = step.setting.config
    return gated(Ops(), gate, up, config.activation, replace(config, gate_clamp=None))


def _gate_clamped_below(step: Any, compute: Edit, gate: Floats, up: Floats, *rest: Any) -> Floats:
    limit = step.setting.config.gate_clamp
    return compute(np.clip(gate, -limit, limit), up, *rest)


def _is_clamped(step: Any) -> bool:
    return getattr(step.setting.config, "gate_clamp", None) is not None


SHARES = "*.mlp.hook_expert_weights"
MISTAKES = (
    Hypothesis(
        SHARES,
        "expert_shares_not_normed",
        "shares are divided by their sum, as by a softmax of the chosen alone, or they should be and are not",
        "norm_topk_prob says it (Qwen3-MoE's class default is false); Mixtral and Maple always divide.",
        _not_normed,
        lambda step: step.setting.config.num_experts_per_tok < step.setting.config.num_experts,
    ),
    Hypothesis(
        SHARES,
        "one_expert_fewer",
        "one expert fewer is chosen",
        "num_experts_per_tok says how many.",
        _one_fewer,
        lambda step: step.setting.config.num_experts_per_tok > 1,
    ),
    Hypothesis(
        "*.mlp.hook_pre *.mlp.hook_pre_linear",
        "experts_gate_and_up_exchanged",
        "gate and up of the experts are exchanged",
        "Mixtral's w1 is gate, w3 is up, w2 is down.",
        _exchanged,
        lambda step: hasattr(layer_weights(step), "router"),
    ),
    Hypothesis(
        "*.mlp.hook_mixed",
        "experts_not_weighted",
        "the experts' results are added without their shares",
        "Multiply each expert's result by its share.",
        instead(lambda out, shares: out.sum(axis=1)),
    ),
    Hypothesis(
        "*.mlp.hook_expert_out",
        "experts_in_another_order",
        "the results of a token's experts are in another order than their shares",
        "Gather shares and results by the same list of experts.",
        after(lambda out: out[:, ::-1] if out.ndim == 3 else out),
    ),
)
MAPLE_MISTAKES = (
    Hypothesis(
        "*.mlp.hook_post",
        "expert_clamp_missing",
        "gate and up of the experts are not clamped",
        "Maple: silu(min(gate, 7)) * clip(up, -7, 7). The 7 is in its code, not in its config.",
        _without_clamp,
        _is_clamped,
    ),
    Hypothesis(
        "*.mlp.hook_post",
        "expert_gate_clamped_below",
        "the experts' gate is clamped at -7 as well",
        "Maple clamps gate above only, up on both sides.",
        _gate_clamped_below,
        _is_clamped,
    ),
    Hypothesis(
        "*.attn.hook_attn_scores",
        "rope_in_global_layers",
        "q and k are turned in layers that have no positions",
        "Maple: RoPE in sliding layers only (nope_on_global_attention).",
        turned_scores,
        lambda step: not step.setting.config.turns(step.layer),
    ),
)

KIND = WeightKind("experts", "stack of", (Experts,))
ROUTER = {"router": PartNames(("mlp.gate",), "ffn_gate_inp")}
_LACKS = ("mixtures of experts",)
_EXAMPLE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_QWEN = {
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 32768,
    "decoder_sparse_step": 1,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
}
_MIXTRAL = {
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 131072,
    "rope_theta": 1e6,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def _in_words(config: MoeConfig) -> str:
    chosen = config.num_experts_per_tok
    words = f"{config.num_experts} experts of {config.moe_intermediate_size}, {chosen} for each token"
    dense = f"; ffn {config.intermediate_size} in {len(config.dense_layers)} layers" if config.dense_layers else ""
    return words + dense


def _layer(sparse: type[LayerWeights], dense: type[LayerWeights]) -> Callable[[MoeConfig, int], type[LayerWeights]]:
    return lambda config, layer: sparse if config.is_sparse(layer) else dense


_family = partial(
    Family,
    axes=_axes,
    split=split_experts,
    of_layers=_of_layers,
    lacks=lambda config: _LACKS,
    feed_forward_words=_in_words,
)
FAMILIES = (
    _family(
        "qwen3_moe",
        Qwen3MoeConfig,
        layer_class=_layer(Qwen3MoeLayer, Qwen3Layer),
        steps=_qwen3_steps,
        names={**HEAD_NORMS, **ROUTER},
        place=_place("mlp"),
        hf=HfForm("Qwen3MoeForCausalLM", _QWEN, _read_qwen3_moe, _write_qwen3_moe),
        gguf=GgufForm(
            {"qwen3moe": Architecture("silu")},
            lambda keys, fields: {**_gguf_counts(keys), "norm_topk_prob": True},  # as llama.cpp divides in every one
            _write_gguf_counts,
            implied=lambda config: {"norm_topk_prob": True, "dense_layers": ()},
        ),
        mistakes=(*HEAD_NORM_MISTAKES, *MISTAKES),
        end_of_embedded=END_OF_TEXT,
        example_fields={**_EXAMPLE, "dense_layers": (1,)},
    ),
    _family(
        "mixtral",
        MoeConfig,
        layer_class=_layer(MoeLayer, LayerWeights),
        steps=lambda config, layer: _moe_steps(llama_steps(config, layer)),
        names=ROUTER,
        place=_place("block_sparse_moe", ("w1", "w3", "w2")),
        hf=HfForm("MixtralForCausalLM", _MIXTRAL, _read_mixtral, _write_mixtral, flags=()),
        gguf=GgufForm(
            {"llama": Architecture("silu", permuted=True)},
            lambda keys, fields: _gguf_counts(keys, "feed_forward_length"),
            _write_mixtral_gguf,
            implied=lambda config: {"norm_topk_prob": True, "dense_layers": ()},
            key="expert_count",
        ),
        mistakes=MISTAKES,
        example_fields={**_EXAMPLE, "moe_intermediate_size": 48},
    ),
    _family(
        "maple",
        MapleConfig,
        layer_class=lambda config, layer: Qwen3MoeLayer if config.turns(layer) else GlobalMapleLayer,
        steps=_maple_steps,
        names={**HEAD_NORMS, **ROUTER, "embedding": PartNames(("model.word_embeddings",), "token_embd")},
        place=_place("mlp"),
        # lm_head_flash: an approximate head in DeepGrove's MLX folder
        hf=HfForm("MapleForCausalLM", {}, _read_maple, _write_maple, flags=(), left_out=("lm_head_flash.",)),
        gguf=GgufForm(
            {"maple": Architecture("silu", window=True)},
            _read_maple_gguf,
            _write_maple_gguf,
            implied=lambda config: {"layer_types": config.layer_types, "gate_clamp": CLAMP, "dense_layers": ()},
        ),
        mistakes=(*HEAD_NORM_MISTAKES, *MISTAKES, *MAPLE_MISTAKES),
        example_fields={
            **_EXAMPLE,
            "gate_clamp": CLAMP,
            "rotary_dim": 4,
            "global_positions": False,
            "sliding_window": 5,
            "layer_types": ("sliding_attention", "full_attention"),
        },
    ),
)
