"""The one table of tensor names: what Hugging Face checkpoints and GGUF files call each part of a model.

Our own names are "embedding", "final_norm", "lm_head", "blocks.0.attn_norm", "blocks.0.attn.q_proj", and so on. Native
files use them unchanged; ONNX exports use Hugging Face's.
"""

from __future__ import annotations

import re
from functools import lru_cache
from pathlib import Path

from ..errors import ConfigError, describe
from ..families import FAMILIES, family_of, family_table
from ..families.family import PartNames
from ..families.llama import NAMES as LLAMA_NAMES
from ..reference.config import ModelConfig
from ..reference.weights import linear_name

OUTSIDE_BLOCKS = {
    "embedding": PartNames(("model.embed_tokens",), "token_embd"),
    "final_norm": PartNames(("model.norm",), "output_norm"),
    "lm_head": PartNames(("lm_head",), "output"),
}
# What the names of all parts but the head begin with: as transformers saves them, without the head, in a vision model,
# in one without the head, in one of older versions
HF_PREFIXES = ("model.", "", "model.language_model.", "language_model.", "language_model.model.")
_PATTERN = re.compile(r"(?:(?:[\w.]|\\[.dw]|\[[\w-]+\])[*+?]?|[\^$|()])*")
_MAX_REPEATS, _MAX_WAYS, _MAX_PATTERN = 2, 400, 500


@lru_cache
def is_simple_pattern(pattern: str) -> bool:
    """Whether it is a regular expression of modules' names that takes no long time: it repeats no group and few
    letters, and its groups have few ways to go through all of them."""
    if len(pattern) > _MAX_PATTERN or _PATTERN.fullmatch(pattern) is None:
        return False
    groups, bars = max(1, pattern.count("(")), pattern.count("|")
    if len(re.findall(r"[*+?]", pattern)) > _MAX_REPEATS or (1 + bars / groups) ** groups > _MAX_WAYS:
        return False
    try:
        re.compile(pattern)
    except re.error:
        return False
    return True


def pattern_error(pattern: str, field: str, path: Path | None = None) -> ConfigError:
    """The error for a pattern of modules' names that is not simple."""
    message = f"expected names of modules, or simple patterns of them, got {describe(pattern)}: others are refused"
    return ConfigError(message, path=path, field=field)


@family_table
def parts_of_a_block() -> dict[str, PartNames]:
    """Our name of a part of a block -> its names in files: LLaMA's parts, then the parts that other families add."""
    parts = dict(LLAMA_NAMES)
    for family in FAMILIES.values():
        for part, names in family.names.items():
            if part not in OUTSIDE_BLOCKS:
                parts.setdefault(part, names)
    return parts


@family_table
def gguf_linears() -> dict[str, str]:
    """Our name of each linear of a block -> GGUF's."""
    return {part: names.gguf for part, names in parts_of_a_block().items() if part.endswith("_proj") and names.gguf}


@family_table
def _hf_linear() -> re.Pattern[str]:
    prefixes, linears = "|".join(map(re.escape, HF_PREFIXES)), "|".join(gguf_linears())
    return re.compile(rf"(?:{prefixes})layers\.([0-9]{{1,18}})\.(?:self_attn|mlp)\.({linears})\.weight")


@family_table
def _gguf_linear() -> re.Pattern[str]:
    return re.compile(rf"blk\.([0-9]{{1,7}})\.({'|'.join(gguf_linears().values())})\.weight")


def part_names() -> list[str]:
    """Our name of every part, those of a block under "blocks.0"."""
    return ["embedding", *(f"blocks.0.{part}" for part in parts_of_a_block()), "final_norm", "lm_head"]


def hf_modules(name: str, config: ModelConfig | None = None) -> list[str]:
    """Every Hugging Face name of a part, transformers' first, without ".weight".

    config: of the model, whose family may have names of its own.

    >>> hf_modules("blocks.0.attn_sub_norm")
    ['model.layers.0.self_attn.attn_sub_norm', 'model.layers.0.self_attn.inner_attn_ln']
    """
    block, names = _names_of(name, config, "model.layers")
    return [block + hf for hf in names.hf]


def _names_of(name: str, config: ModelConfig | None, blocks: str) -> tuple[str, PartNames]:
    """What the names of a part begin with, and how they go on."""
    own = {} if config is None else family_of(config).names
    if name in OUTSIDE_BLOCKS:
        return "", own.get(name, OUTSIDE_BLOCKS[name])
    _, index, *_, part = name.split(".")
    return f"{blocks}.{index}.", own.get(part, parts_of_a_block()[part])


def hf_module(name: str, config: ModelConfig | None = None) -> str:
    """transformers' name of a part: "blocks.0.attn.q_proj" -> "model.layers.0.self_attn.q_proj"."""
    return hf_modules(name, config)[0]


def gguf_name(name: str, config: ModelConfig | None = None) -> str:
    """The GGUF name of a part, without ".weight": "blocks.0.attn.q_proj" -> "blk.0.attn_q"."""
    block, names = _names_of(name, config, "blk")
    return block + names.gguf


def linear_of_hf(tensor: str) -> str | None:
    """Our name of a block's linear: "model.layers.0.self_attn.q_proj.weight" -> "blocks.0.attn.q_proj"."""
    match = _hf_linear().fullmatch(tensor)
    return None if match is None else linear_name(int(match[1]), match[2])


def linear_of_gguf(tensor: str) -> str | None:
    """Our name of a block's linear: "blk.0.attn_q.weight" -> "blocks.0.attn.q_proj"."""
    match = _gguf_linear().fullmatch(tensor)
    if match is None:
        return None
    part = next(part for part, gguf in gguf_linears().items() if gguf == match[2])
    return linear_name(int(match[1]), part)
