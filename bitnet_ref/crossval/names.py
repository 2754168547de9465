"""The names of a run's tensors: their order, the kind of op that computes each, its shape and its inputs.

`backends/record.py` records under these names. `op_order(config)` is the order of the computation, `op_kind` the key of
`tolerances.py`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from functools import lru_cache

from ..families import all_steps, axis_sizes, block_steps, family_table, trace_names_of_norms
from ..families.family import LINEAR, NORM, TraceStep
from ..families.lora import TERM
from ..formats.names import gguf_name, hf_modules, part_names
from ..reference.config import ModelConfig
from ..reference.layers import Array
from ..reference.weights import linear_name

LOGITS = "lm_head.hook_out"
INT8, SCALE, ACC, OUT = "hook_x_int8", "hook_x_scale", "hook_acc_int32", "hook_out"
LORA = TERM  # of a linear with an adapter
NORM_SCALE, NORMALIZED, ROTATED = "hook_scale", "hook_normalized", "hook_x_rotated"
SYNONYMS = {"logits": LOGITS, "lm_head.hook_logits": LOGITS, "hook_logits": LOGITS}

_BLOCK = re.compile(r"blocks\.([0-9]{1,9})\.")
_LAYER = re.compile(r"(?:(?:model\.)?layers|blocks|blk)\.([0-9]{1,9})\.")  # in the names of others too

# Of norms and linears.   last part of the name: kind of op
_MODULE_HOOKS = {
    NORM_SCALE: "norm scale", NORMALIZED: "norm", ROTATED: "Hadamard transform",
    INT8: "activation int8", SCALE: "activation scale", ACC: "accumulator", OUT: "linear", LORA: "dense linear",
}  # fmt: skip
# Outside of the blocks: kind of op, what it is computed from.
_MODEL_HOOKS = {
    "hook_embed": ("embedding", ()),
    "hook_embed_scaled": ("scaling", ("hook_embed",)),
    "ln_final.hook_scaled": ("scaling", (f"ln_final.{NORMALIZED}",)),
    "lm_head.hook_uncapped": ("logits", ()),  # its input depends on the model
    LOGITS: ("logits", ()),
}


def is_by_head(name: str) -> bool:
    """Whether a tensor's first axis is its heads, and tokens come second."""
    return name.endswith(("hook_attn_scores", "hook_pattern"))


def first_rows(name: str, x: Array, count: int) -> Array:
    """A tensor of the first tokens of a run, none of which depends on a later one."""
    return x[:, :count, :count] if is_by_head(name) else x[:count]


def op_order(config: ModelConfig) -> list[str]:
    """Every name that a run of such a model can have, in the order of the computation.

    A dense linear has `hook_out` only. The checkpoint decides which linears are ternary, and which are so in a rotated
    basis, so each linear of a quantised model is listed with its int8, its scale and its accumulator, and each of
    another model with its rotated input.
    """
    order = ["hook_embed"] + ["hook_embed_scaled"] * (config.embedding_scale != 1)
    for layer in range(config.num_hidden_layers):
        for step in block_steps(config, layer):
            order += _tensors_of(f"blocks.{layer}.{step.name}", step.kind, config)
    order += [*_tensors_of("ln_final", NORM, config), *["ln_final.hook_scaled"] * (config.head_scale != 1)]
    capped = [] if config.logit_softcap is None else ["lm_head.hook_uncapped"]
    return [*order, *_tensors_of("lm_head", LINEAR, config)[:-1], *capped, LOGITS]


def _tensors_of(name: str, kind: str, config: ModelConfig) -> list[str]:
    """The tensors of a step: its own, or those of a norm or linear."""
    if kind == NORM:
        return [f"{name}.{NORM_SCALE}", f"{name}.{NORMALIZED}"]
    if kind != LINEAR:
        return [name]
    if not _is_quantized(config):
        return [f"{name}.{ROTATED}", f"{name}.{LORA}", f"{name}.{OUT}"]
    own_norm = _tensors_of(f"{name}.rms_norm", NORM, config) if _has_own_norms(config) else []
    return [*own_norm, *(f"{name}.{hook}" for hook in (INT8, SCALE, ACC, LORA, OUT))]


def _is_quantized(config: ModelConfig) -> bool:
    return config.quantization is not None or config.sub_norms  # a model with sub-norms is a BitNet


def _has_own_norms(config: ModelConfig) -> bool:
    return config.quantization is not None and config.quantization.use_rms_norm


@lru_cache(maxsize=4096)
def find_step(name: str, config: ModelConfig) -> TraceStep:
    """The step of a block that a tensor belongs to: its own, or its norm's or linear's. KeyError."""
    layer = int(name.split(".")[1])
    steps = {f"blocks.{layer}.{step.name}": step for step in block_steps(config, layer)}
    return steps[name] if name in steps else steps[name.rpartition(".")[0].removesuffix(".rms_norm")]


@family_table
def _kinds() -> dict[str, str]:
    """Last part of a name -> kind of op, of every family's own steps that are the same in all of them."""
    return {hook_of(step.name): step.kind for step in all_steps()} | _MODULE_HOOKS


def op_kind(
    name: str, is_ternary: Callable[[str], bool] = lambda linear: True, config: ModelConfig | None = None
) -> str:
    """The kind of op that computes the tensor. is_ternary: whether a linear ("blocks.0.attn.q_proj") is ternary."""
    if name in _MODEL_HOOKS:
        return _MODEL_HOOKS[name][0]
    hook = hook_of(name)
    kind = _kinds()[hook] if hook in _MODULE_HOOKS or config is None else find_step(name, config).kind
    return "dense linear" if kind == "linear" and not is_ternary(linear_of(name)) else kind


def layer_of(name: str) -> int | None:
    """The block that a name belongs to; None for the embedding, the last norm and the head."""
    match = _BLOCK.match(name)
    return None if match is None else int(match[1])


def hook_of(name: str) -> str:
    """The last part of a name: the same in every linear."""
    return name.rpartition(".")[2]


def role(name: str) -> str:
    """The name without its block: the same in every layer."""
    return name.split(".", 2)[2] if name.startswith("blocks.") else name


def trace_name(part: str) -> str:
    """The name of what a part of the model computes: "blocks.0.attn_norm" -> "blocks.0.ln1.hook_normalized"."""
    if part in (outside := {"embedding": "hook_embed", "final_norm": f"ln_final.{NORMALIZED}", "lm_head": LOGITS}):
        return outside[part]
    _, layer, *_, last = part.split(".")
    if last in trace_names_of_norms():
        return f"blocks.{layer}.{trace_names_of_norms()[last]}.{NORMALIZED}"
    return f"{linear_name(int(layer), last)}.{OUT}"


def weight_names() -> list[tuple[list[str], str, str]]:
    """(Hugging Face's modules, GGUF's name, the trace name of its result) of each part of layer 0 and outside it.

    Without the parts that GGUF stores in another form, and without a module that is another part in LLaMA.
    """
    names: list[tuple[list[str], str, str]] = []
    known: set[str] = set()
    for part in part_names():
        if gguf_name(part).endswith("."):
            continue
        names.append(([each for each in hf_modules(part) if each not in known], gguf_name(part), trace_name(part)))
        known.update(hf_modules(part))
    return names


@family_table
def _names_of_others() -> dict[str, str]:
    """{name of a weight below its layer: trace name below the block}"""
    names: dict[str, str] = {}
    for hf, gguf, ours in weight_names():
        for theirs in (*hf, gguf):
            names.setdefault(_LAYER.sub("", theirs), ours.removeprefix("blocks.0."))
    return names


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
    begun = [each for each in choices if each.startswith(rest)]
    near = [meant] if meant in choices else begun if len(begun) == 1 else get_close_matches(rest, choices, n=1)
    return f"{block}{near[0]}" if near else None


def linear_of(name: str) -> str:
    """The linear whose tensor this is: "blocks.0.attn.hook_q" and "blocks.0.attn.q_proj.hook_out" -> ...q_proj."""
    parent, _, hook = name.rpartition(".")
    source = _results_of_linears().get(hook)
    return parent if source is None else f"blocks.{layer_of(name)}.{source}"


@family_table
def _results_of_linears() -> dict[str, str]:
    """Last part of the name -> the linear, of results that have another name, or are cut into heads."""
    results = [step for step in all_steps() if step.kind == "linear"]
    return {hook_of(step.name): step.inputs[0].removesuffix(f".{OUT}") for step in results}


def linear_input(linear: str, config: ModelConfig) -> str:
    """The name of the tensor that a linear reads, and quantises if it is ternary.

    hook_z is (N, H, d) where the linear reads (N, H*d).
    """
    if _has_own_norms(config) and linear != "lm_head":
        return f"{linear}.rms_norm.{NORMALIZED}"
    return module_input(linear, config)


def module_input(linear: str, config: ModelConfig) -> str:
    """`linear_input`, before a norm that the linear may have of its own."""
    if linear == "lm_head":
        return f"ln_final.{NORMALIZED}" if config.head_scale == 1 else "ln_final.hook_scaled"
    return f"blocks.{layer_of(linear)}.{find_step(linear, config).inputs[0]}"


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
    if hook == ACC:
        return (f"{parent}.{INT8}",)
    if hook == LORA:
        return (module_input(parent, config),)
    if hook == OUT and _is_quantized(config):
        return (f"{parent}.{ACC}", f"{parent}.{SCALE}")
    if hook in (ROTATED, INT8, SCALE, OUT, "hook_uncapped"):
        return (linear_input(parent, config),)
    if parent == "ln_final":
        return (f"blocks.{config.num_hidden_layers - 1}.hook_resid_post",)
    if parent.endswith(".rms_norm"):
        return (module_input(parent.removesuffix(".rms_norm"), config),)
    return tuple(f"blocks.{layer}.{source}" for source in find_step(name, config).inputs)


def op_shape(name: str, config: ModelConfig, tokens: int) -> tuple[int, ...]:
    """The shape of the tensor in a run over so many tokens."""
    parent, _, hook = name.rpartition(".")
    sizes = {**axis_sizes(config), "N": tokens}
    if name in ("hook_embed", "hook_embed_scaled", "ln_final.hook_scaled"):
        return (tokens, config.hidden_size)
    if hook in (INT8, ACC, OUT, ROTATED, LORA, "hook_uncapped"):
        n_out, n_in = _linear_shape(parent, config)
        return (tokens, n_in if hook in (INT8, ROTATED) else n_out)
    if hook == SCALE or (hook == NORM_SCALE and (parent == "ln_final" or parent.endswith(".rms_norm"))):
        return (tokens, 1)
    if hook == NORMALIZED and parent.endswith(".rms_norm"):
        return (tokens, _linear_shape(parent.removesuffix(".rms_norm"), config)[1])
    axes = "D" if parent == "ln_final" else find_step(name, config).shape
    shape = tuple(sizes[axis] for axis in axes.split())
    if hook == NORM_SCALE:
        return (tokens, math.prod(shape[:-1]))  # one for each head, of a norm over heads
    return (tokens, math.prod(shape)) if hook == NORMALIZED else shape


def _linear_shape(linear: str, config: ModelConfig) -> tuple[int, int]:
    """(out_features, in_features)"""
    if linear == "lm_head":
        return config.vocab_size, config.hidden_size
    return config.linear_shapes(layer_of(linear) or 0)[linear.rpartition(".")[2]]
