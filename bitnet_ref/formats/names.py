"""The one table of tensor names: what Hugging Face checkpoints and GGUF files call each part of a model.

Our own names are "embedding", "final_norm", "lm_head", "blocks.0.attn_norm", "blocks.0.attn.q_proj", and so on. Native
files use them unchanged; ONNX exports use Hugging Face's.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from ..reference.weights import linear_name


class PartNames(NamedTuple):
    """`hf`: transformers' name first, then the names in other checkpoints. Parts of a block are named without it."""

    hf: tuple[str, ...]
    gguf: str


OUTSIDE_BLOCKS = {
    "embedding": PartNames(("model.embed_tokens",), "token_embd"),
    "final_norm": PartNames(("model.norm",), "output_norm"),
    "lm_head": PartNames(("lm_head",), "output"),
}
_IN_BLOCK = {
    "attn_norm": PartNames(("input_layernorm",), "attn_norm"),
    "ffn_norm": PartNames(("post_attention_layernorm",), "ffn_norm"),
    "attn_sub_norm": PartNames(("self_attn.attn_sub_norm", "self_attn.inner_attn_ln"), "attn_sub_norm"),
    "ffn_sub_norm": PartNames(("mlp.ffn_sub_norm", "mlp.ffn_layernorm"), "ffn_sub_norm"),
    "q_proj": PartNames(("self_attn.q_proj",), "attn_q"),
    "k_proj": PartNames(("self_attn.k_proj",), "attn_k"),
    "v_proj": PartNames(("self_attn.v_proj",), "attn_v"),
    "o_proj": PartNames(("self_attn.o_proj",), "attn_output"),
    "gate_proj": PartNames(("mlp.gate_proj",), "ffn_gate"),
    "up_proj": PartNames(("mlp.up_proj",), "ffn_up"),
    "down_proj": PartNames(("mlp.down_proj",), "ffn_down"),
    "q_norm": PartNames(("self_attn.q_norm",), "attn_q_norm"),
    "k_norm": PartNames(("self_attn.k_norm",), "attn_k_norm"),
    "z_proj": PartNames(("self_attn.z_proj",), ""),  # see `linear_place`: part of q_proj, or DeltaNet's own
    "a_proj": PartNames(("linear_attn.in_proj_a",), ""),
    "b_proj": PartNames(("linear_attn.in_proj_b",), ""),
    "attn_post_norm": PartNames((), "post_attention_norm"),
    "ffn_post_norm": PartNames((), "post_ffw_norm"),
}
# Gemma3's norms, where `post_attention_layernorm` means another one
_POST_NORMS = {
    "ffn_norm": "pre_feedforward_layernorm",
    "attn_post_norm": "post_attention_layernorm",
    "ffn_post_norm": "post_feedforward_layernorm",
}
# The last word of a Hugging Face name -> our name of that part of a block
BLOCK_PART_OF_HF = {full.rpartition(".")[2]: part for part, names in _IN_BLOCK.items() for full in names.hf}
GGUF_LINEARS = {part: names.gguf for part, names in _IN_BLOCK.items() if part.endswith("_proj") and names.gguf}
# Of a DeltaNet layer (Qwen3.5): its linears, some of which share a tensor (see `linear_place`), and its small arrays
LINEARS_IN_DELTA = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj"), PartNames(("linear_attn.in_proj_qkv",), "attn_qkv")),
    "z_proj": PartNames(("linear_attn.in_proj_z",), "attn_gate"),
    "a_proj": PartNames(("linear_attn.in_proj_a",), "ssm_alpha"),
    "b_proj": PartNames(("linear_attn.in_proj_b",), "ssm_beta"),
    "o_proj": PartNames(("linear_attn.out_proj",), "ssm_out"),
}
DELTA_ARRAYS = {
    "conv": PartNames(("linear_attn.conv1d.weight",), "ssm_conv1d.weight"),
    "decay": PartNames(("linear_attn.A_log",), "ssm_a"),
    "decay_bias": PartNames(("linear_attn.dt_bias",), "ssm_dt.bias"),
    "norm": PartNames(("linear_attn.norm.weight",), "ssm_norm.weight"),
}
_PART_OF_GGUF = {gguf: part for part, gguf in GGUF_LINEARS.items()}
# What the names of all parts but the head begin with: as transformers saves them, without the head, in a vision model
HF_PREFIXES = ("model.", "", "model.language_model.", "language_model.model.")
_HF_PREFIX = "|".join(map(re.escape, HF_PREFIXES))
_HF_LINEAR = re.compile(
    rf"(?:{_HF_PREFIX})layers\.([0-9]{{1,18}})\.(?:self_attn|mlp)\.({'|'.join(GGUF_LINEARS)})\.weight"
)
_GGUF_LINEAR = re.compile(rf"blk\.([0-9]{{1,7}})\.({'|'.join(_PART_OF_GGUF)})\.weight")


def part_names() -> list[str]:
    """Our name of every part, those of a block under "blocks.0"."""
    return ["embedding", *(f"blocks.0.{part}" for part in _IN_BLOCK), "final_norm", "lm_head"]


def hf_modules(name: str, post_norms: bool = False) -> list[str]:
    """Every Hugging Face name of a part, transformers' first, without ".weight".

    post_norms: in a model that norms the results of its blocks.

    >>> hf_modules("blocks.0.attn_sub_norm")
    ['model.layers.0.self_attn.attn_sub_norm', 'model.layers.0.self_attn.inner_attn_ln']
    """
    if name in OUTSIDE_BLOCKS:
        return list(OUTSIDE_BLOCKS[name].hf)
    _, index, *_, part = name.split(".")
    names = (_POST_NORMS[part],) if post_norms and part in _POST_NORMS else _IN_BLOCK[part].hf
    return [f"model.layers.{index}.{hf}" for hf in names]


def hf_module(name: str) -> str:
    """transformers' name of a part: "blocks.0.attn.q_proj" -> "model.layers.0.self_attn.q_proj"."""
    return hf_modules(name)[0]


def gguf_name(name: str) -> str:
    """The GGUF name of a part, without ".weight": "blocks.0.attn.q_proj" -> "blk.0.attn_q"."""
    if name in OUTSIDE_BLOCKS:
        return OUTSIDE_BLOCKS[name].gguf
    _, index, *_, part = name.split(".")
    return f"blk.{index}.{_IN_BLOCK[part].gguf}"


def linear_of_hf(tensor: str) -> str | None:
    """Our name of a block's linear: "model.layers.0.self_attn.q_proj.weight" -> "blocks.0.attn.q_proj"."""
    match = _HF_LINEAR.fullmatch(tensor)
    return None if match is None else linear_name(int(match[1]), match[2])


def linear_of_gguf(tensor: str) -> str | None:
    """Our name of a block's linear: "blk.0.attn_q.weight" -> "blocks.0.attn.q_proj"."""
    match = _GGUF_LINEAR.fullmatch(tensor)
    return None if match is None else linear_name(int(match[1]), _PART_OF_GGUF[match[2]])
