"""The names of a run's tensors: their order, the kind of op that computes each, its shape and its inputs.

`backends/record.py` records under these names. `op_order(config)` is the order of the computation, `op_kind` the key of
`tolerances.py`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from functools import cache

from ..backends.record import NORM_NAMES
from ..formats.names import gguf_name, hf_modules, part_names
from ..reference.config import ModelConfig
from ..reference.weights import ATTENTION_LINEARS, linear_name

LOGITS = "lm_head.hook_out"
INT8, SCALE, ACC, OUT = "hook_x_int8", "hook_x_scale", "hook_acc_int32", "hook_out"
NORM_SCALE, NORMALIZED, ROTATED = "hook_scale", "hook_normalized", "hook_x_rotated"
SYNONYMS = {"logits": LOGITS, "lm_head.hook_logits": LOGITS, "hook_logits": LOGITS}

_BLOCK = re.compile(r"blocks\.([0-9]{1,9})\.")
_LAYER = re.compile(r"(?:(?:model\.)?layers|blocks|blk)\.([0-9]{1,9})\.")  # in the names of others too

# Of norms and linears, whose inputs depend on the model.   last part of the name: kind of op
_MODULE_HOOKS = {
    NORM_SCALE: "norm scale", NORMALIZED: "norm", ROTATED: "rotation",
    INT8: "activation int8", SCALE: "activation scale", ACC: "accumulator", OUT: "linear",
}  # fmt: skip
# Outside of the blocks: kind of op, what it is computed from.
_MODEL_HOOKS = {
    "hook_embed": ("embedding", ()),
    "hook_embed_scaled": ("scaling", ("hook_embed",)),
    "ln_final.hook_scaled": ("scaling", (f"ln_final.{NORMALIZED}",)),
    "lm_head.hook_uncapped": ("logits", ()),  # its input depends on the model
    LOGITS: ("logits", ()),
}
# Of a block.   last part of the name: kind of op, shape, the names below the block of what it is computed from.
# In the order of the computation. A "linear" here is the result of a linear under another name, or cut into heads.
_BLOCK_HOOKS = {
    "hook_resid_pre": ("residual", "N D", ()),  # what comes before the block
    "hook_q": ("linear", "N H d", ("attn.q_proj.hook_out",)),
    "hook_k": ("linear", "N G d", ("attn.k_proj.hook_out",)),
    "hook_rot_q": ("rope", "N H d", ("attn.hook_q",)),
    "hook_rot_k": ("rope", "N G d", ("attn.hook_k",)),
    "hook_v": ("linear", "N G d", ("attn.v_proj.hook_out",)),
    "hook_scaled_q": ("scaling", "N H d", ("attn.hook_rot_q",)),
    "hook_attn_scores": ("attention scores", "H N N", ("attn.hook_rot_q", "attn.hook_rot_k")),
    "hook_pattern": ("attention pattern", "H N N", ("attn.hook_attn_scores",)),
    "hook_z": ("attention values", "N H d", ("attn.hook_pattern", "attn.hook_v")),
    "hook_conv": ("delta rule", "N C", ("attn.q_proj.hook_out", "attn.k_proj.hook_out", "attn.v_proj.hook_out")),
    "hook_log_decay": ("delta gate", "N Hv", ("attn.a_proj.hook_out",)),
    "hook_beta": ("delta gate", "N Hv", ("attn.b_proj.hook_out",)),
    "hook_state": ("delta rule", "N Hv dk dv", ("attn.hook_conv", "attn.hook_log_decay", "attn.hook_beta")),
    "hook_delta_out": ("delta rule", "N Hv dv", ("attn.hook_conv", "attn.hook_log_decay", "attn.hook_beta")),
    "hook_gated_z": ("gate", "N Q", ("attn.hook_z", "attn.z_proj.hook_out")),
    "hook_attn_out": ("linear", "N D", ("attn.o_proj.hook_out",)),
    "hook_resid_mid": ("residual", "N D", ("hook_resid_pre", "hook_attn_out")),
    "hook_pre": ("linear", "N F", ("mlp.gate_proj.hook_out",)),
    "hook_pre_linear": ("linear", "N F", ("mlp.up_proj.hook_out",)),
    "hook_post": ("gate", "N F", ("mlp.hook_pre", "mlp.hook_pre_linear")),
    "hook_mlp_out": ("linear", "N D", ("mlp.down_proj.hook_out",)),
    "hook_resid_post": ("residual", "N D", ("hook_resid_mid", "hook_mlp_out")),
}


_DELTA_LINEARS = ("q_proj", "k_proj", "v_proj", "z_proj", "a_proj", "b_proj")  # that read ln1
_DELTA_HOOKS = ("hook_conv", "hook_log_decay", "hook_beta", "hook_state", "hook_delta_out")


def op_order(config: ModelConfig) -> list[str]:
    """Every name that a run of such a model can have, in the order of the computation.

    A dense linear has `hook_out` only. The checkpoint decides which linears are ternary, and which are so in a rotated
    basis, so each linear of a quantised model is listed with its int8, its scale and its accumulator, and each of
    another model with its rotated input.
    """

    def norm(name: str) -> list[str]:
        return [f"{name}.{NORM_SCALE}", f"{name}.{NORMALIZED}"]

    def linear(name: str) -> list[str]:
        if not _is_quantized(config):
            return [f"{name}.{ROTATED}", f"{name}.{OUT}"]
        inner = norm(f"{name}.rms_norm") if config.quantization and config.quantization.use_rms_norm else []
        return [*inner, *(f"{name}.{hook}" for hook in (INT8, SCALE, ACC, OUT))]

    def attention(attn: str) -> list[str]:
        names = [f"{attn}.hook_q", f"{attn}.hook_k"]
        names += [*norm(f"{attn}.q_norm"), *norm(f"{attn}.k_norm")] if config.qk_norms else []
        scaled = ["hook_scaled_q"] if config.query_scale != 1 else []
        hooks = ["hook_rot_q", "hook_rot_k", *scaled, "hook_v", "hook_attn_scores", "hook_pattern", "hook_z"]
        names += [f"{attn}.{hook}" for hook in hooks]
        return names + ([*linear(f"{attn}.z_proj"), f"{attn}.hook_gated_z"] if config.output_gate else [])

    order = ["hook_embed"] + ["hook_embed_scaled"] * (config.embedding_scale != 1)
    for layer in range(config.num_hidden_layers):
        block, attn, mlp = f"blocks.{layer}", f"blocks.{layer}.attn", f"blocks.{layer}.mlp"
        order += [f"{block}.hook_resid_pre", *norm(f"{block}.ln1")]
        if config.is_delta(layer):
            order += [hook for name in _DELTA_LINEARS for hook in linear(f"{attn}.{name}")]
            order += [*(f"{attn}.{hook}" for hook in _DELTA_HOOKS), *norm(f"{attn}.delta_norm"), f"{attn}.hook_gated_z"]
        else:
            order += [hook for name in ATTENTION_LINEARS[:3] for hook in linear(f"{attn}.{name}")] + attention(attn)
        order += norm(f"{attn}.sub_norm") if config.sub_norms else []
        order += [*linear(f"{attn}.o_proj"), *(norm(f"{block}.ln1_post") if config.post_norms else [])]
        order += [f"{block}.hook_attn_out", f"{block}.hook_resid_mid"]
        order += [*norm(f"{block}.ln2"), *linear(f"{mlp}.gate_proj"), *linear(f"{mlp}.up_proj")]
        order += [f"{mlp}.{hook}" for hook in ("hook_pre", "hook_pre_linear", "hook_post")]
        order += norm(f"{mlp}.sub_norm") if config.sub_norms else []
        order += [*linear(f"{mlp}.down_proj"), *(norm(f"{block}.ln2_post") if config.post_norms else [])]
        order += [f"{block}.hook_mlp_out", f"{block}.hook_resid_post"]
    order += [*norm("ln_final"), *["ln_final.hook_scaled"] * (config.head_scale != 1)]
    capped = [] if config.logit_softcap is None else ["lm_head.hook_uncapped"]
    return [*order, *linear("lm_head")[:-1], *capped, LOGITS]


def _is_quantized(config: ModelConfig) -> bool:
    return config.quantization is not None or config.sub_norms  # a model with sub-norms is a BitNet


def op_kind(
    name: str, is_ternary: Callable[[str], bool] = lambda linear: True, config: ModelConfig | None = None
) -> str:
    """The kind of op that computes the tensor. is_ternary: whether a linear ("blocks.0.attn.q_proj") is ternary."""
    if name in _MODEL_HOOKS:
        return _MODEL_HOOKS[name][0]
    hook = name.rpartition(".")[2]
    if hook in ("hook_attn_out", "hook_mlp_out") and config is not None and config.post_norms:
        return "norm"
    if hook in ("hook_attn_out", "hook_mlp_out") and config is not None and config.residual_scale != 1:
        return "scaling"
    kind = _MODULE_HOOKS[hook] if hook in _MODULE_HOOKS else _BLOCK_HOOKS[hook][0]
    return "dense linear" if kind == "linear" and not is_ternary(linear_of(name)) else kind


def layer_of(name: str) -> int | None:
    """The block that a name belongs to; None for the embedding, the last norm and the head."""
    match = _BLOCK.match(name)
    return None if match is None else int(match[1])


def trace_name(part: str) -> str:
    """The name of what a part of the model computes: "blocks.0.attn_norm" -> "blocks.0.ln1.hook_normalized"."""
    if part in (outside := {"embedding": "hook_embed", "final_norm": f"ln_final.{NORMALIZED}", "lm_head": LOGITS}):
        return outside[part]
    _, layer, *_, last = part.split(".")
    if last in NORM_NAMES:
        return f"blocks.{layer}.{NORM_NAMES[last]}.{NORMALIZED}"
    return f"{linear_name(int(layer), last)}.{OUT}"


def weight_names() -> list[tuple[list[str], str, str]]:
    """(Hugging Face's modules, GGUF's name, the trace name of its result) of each part of layer 0 and outside it.

    Without the parts that GGUF stores in another form.
    """
    parts = (part for part in part_names() if not gguf_name(part).endswith("."))
    return [(hf_modules(part), gguf_name(part), trace_name(part)) for part in parts]


@cache
def _names_of_others() -> dict[str, str]:
    """{name of a weight below its layer: trace name below the block}"""
    tables = ((theirs, ours) for hf, gguf, ours in weight_names() for theirs in (*hf, gguf))
    return {_LAYER.sub("", theirs): ours.removeprefix("blocks.0.") for theirs, ours in tables}


def nearest_name(name: str, names: Iterable[str]) -> str | None:
    """Which of the names an unknown one means: by the table of weights, or the most similar one of the same layer.

    >>> nearest_name("model.layers.3.input_layernorm", ["hook_embed", "blocks.3.ln1.hook_normalized"])
    'blocks.3.ln1.hook_normalized'
    """
    if len(name) > 200:
        return None
    match = _LAYER.match(name)
    block, rest = ("", name) if match is None else (f"blocks.{int(match[1])}.", name[match.end() :])
    same_layer = (each for each in names if (each.startswith(block) if block else _LAYER.match(each) is None))
    choices = [each.removeprefix(block) for each in same_layer]
    meant = _names_of_others().get(rest.removesuffix(".weight"))
    near = [meant] if meant in choices else get_close_matches(rest, choices, n=1)
    return f"{block}{near[0]}" if near else None


def linear_of(name: str) -> str:
    """The linear whose tensor this is: "blocks.0.attn.hook_q" and "blocks.0.attn.q_proj.hook_out" -> ...q_proj."""
    parent, _, hook = name.rpartition(".")
    if hook not in _BLOCK_HOOKS:
        return parent
    return f"blocks.{layer_of(name)}.{_BLOCK_HOOKS[hook][2][0].removesuffix(f'.{OUT}')}"


def linear_input(linear: str, config: ModelConfig) -> str:
    """The name of the tensor that a linear reads, and quantises if it is ternary.

    hook_z is (N, H, d) where the linear reads (N, H*d).
    """
    if config.quantization is not None and config.quantization.use_rms_norm and linear != "lm_head":
        return f"{linear}.rms_norm.{NORMALIZED}"
    return module_input(linear, config)


def module_input(linear: str, config: ModelConfig) -> str:
    """`linear_input`, before a norm that the linear may have of its own."""
    if linear == "lm_head":
        return f"ln_final.{NORMALIZED}" if config.head_scale == 1 else "ln_final.hook_scaled"
    part, _, name = linear.rpartition(".")
    block = part.rpartition(".")[0]
    if name in _DELTA_LINEARS:
        return f"{block}.ln1.{NORMALIZED}"
    if name in ("gate_proj", "up_proj"):
        return f"{block}.ln2.{NORMALIZED}"
    if config.sub_norms:
        return f"{part}.sub_norm.{NORMALIZED}"
    if name == "o_proj":
        return f"{part}.hook_gated_z" if config.output_gate or config.is_delta(_number(block)) else f"{part}.hook_z"
    return f"{part}.hook_post"


def op_inputs(name: str, config: ModelConfig) -> tuple[str, ...]:
    """The names of the tensors that this one is computed from (weights apart); () for the embedding."""
    parent, _, hook = name.rpartition(".")
    layer = layer_of(name)
    if name in _MODEL_HOOKS and name != LOGITS and parent != "lm_head":
        return _MODEL_HOOKS[name][1]
    if name == LOGITS and config.logit_softcap is not None:
        return ("lm_head.hook_uncapped",)
    if hook == "hook_resid_pre":
        first = "hook_embed" if config.embedding_scale == 1 else "hook_embed_scaled"
        return (f"blocks.{layer - 1}.hook_resid_post",) if layer else (first,)
    if hook in (NORM_SCALE, NORMALIZED):
        return (_norm_input(parent, config),)
    if hook == ACC:
        return (f"{parent}.{INT8}",)
    if hook == OUT and _is_quantized(config):
        return (f"{parent}.{ACC}", f"{parent}.{SCALE}")
    if hook in (ROTATED, INT8, SCALE, OUT, "hook_uncapped"):
        return (linear_input(parent, config),)
    sources: tuple[str, ...] = _BLOCK_HOOKS[hook][2]
    if hook == "hook_gated_z" and config.is_delta(_number(name)):
        sources = (f"attn.delta_norm.{NORMALIZED}", sources[1])
    if config.qk_norms and hook in ("hook_rot_q", "hook_rot_k"):
        sources = (f"attn.{hook[-1]}_norm.{NORMALIZED}",)
    if config.query_scale != 1 and hook == "hook_attn_scores":
        sources = ("attn.hook_scaled_q", sources[1])
    if config.post_norms and hook in ("hook_attn_out", "hook_mlp_out"):
        sources = (f"{'ln1' if 'attn' in hook else 'ln2'}_post.{NORMALIZED}",)
    return tuple(f"blocks.{layer}.{source}" for source in sources)


def _number(name: str) -> int:
    """The number of the block that the name begins with."""
    return int(name.split(".")[1])


def op_shape(name: str, config: ModelConfig, tokens: int) -> tuple[int, ...]:
    """The shape of the tensor in a run over so many tokens."""
    parent, _, hook = name.rpartition(".")
    linears = {**config.linear_shapes(layer_of(name) or 0), "lm_head": (config.vocab_size, config.hidden_size)}
    module, _, norm = parent.rpartition(".")
    heads = {"q_norm": config.num_attention_heads, "k_norm": config.num_key_value_heads}
    size = config.head_dim
    if norm == "delta_norm" and config.delta is not None:
        heads, size = {norm: config.delta.value_heads}, config.delta.value_dim
    if hook in (NORM_SCALE, SCALE):
        return (tokens, heads.get(norm, 1))
    if hook in (INT8, ACC, OUT, ROTATED, "hook_uncapped"):
        n_out, n_in = linears[parent.rpartition(".")[2]]
        return (tokens, n_in if hook in (INT8, ROTATED) else n_out)
    if hook == NORMALIZED:
        if norm in heads:
            return (tokens, heads[norm] * size)
        if norm == "rms_norm":
            return (tokens, linears[module.rpartition(".")[2]][1])
        inner = config.query_size if module.endswith("attn") else config.intermediate_size
        return (tokens, inner if norm == "sub_norm" else config.hidden_size)
    heads_q, heads_kv, ffn = config.num_attention_heads, config.num_key_value_heads, config.intermediate_size
    sizes = {"N": tokens, "D": config.hidden_size, "F": ffn, "H": heads_q, "G": heads_kv, "d": config.head_dim}
    sizes["Q"] = config.query_size
    if (delta := config.delta) is not None:
        sizes |= {"C": sum(delta.sizes), "Hv": delta.value_heads, "dk": delta.key_dim, "dv": delta.value_dim}
        sizes["Q"] = delta.sizes[2] if config.is_delta(layer_of(name) or 0) else config.query_size
    axes = "N D" if name in _MODEL_HOOKS else _BLOCK_HOOKS[hook][1]
    return tuple(sizes[axis] for axis in axes.split())


def _norm_input(norm: str, config: ModelConfig) -> str:
    parent, _, name = norm.rpartition(".")
    if name == "ln_final":
        return f"blocks.{config.num_hidden_layers - 1}.hook_resid_post"
    if name == "rms_norm":
        return module_input(parent, config)
    if name == "sub_norm":
        return f"{parent}.hook_z" if parent.endswith("attn") else f"{parent}.hook_post"
    inputs = {"ln1": "hook_resid_pre", "ln2": "hook_resid_mid", "q_norm": "hook_q", "k_norm": "hook_k"}
    inputs |= {"ln1_post": f"attn.o_proj.{OUT}", "ln2_post": f"mlp.down_proj.{OUT}", "delta_norm": "hook_delta_out"}
    return f"{parent}.{inputs[name]}"
