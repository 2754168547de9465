"""What other families and dialects of weights have beyond `reference/`: one file each, with all that is its own.

May import `errors` and `reference`. `family_of(config)` is what the rooms ask; see `family.py`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from functools import cache
from typing import Any, TypeVar

from ..errors import ConfigError, require
from ..reference.config import ModelConfig, QuantizationConfig, RopeConfig
from . import (
    block_rule,
    blocks,
    gemma3,
    granite,
    groups,
    hunyuan,
    linear_norms,
    llama,
    lora,
    minicpm,
    moe,
    olmo2,
    qwen,
    qwen3_5,
    smollm3,
)
from .family import AlsoRecorded, Family, TraceStep, WeightKind
from .llama import llama_axes, llama_steps
from .rope import StretchedRope

FAMILIES: dict[str, Family] = {
    family.model_type: family
    for module in (llama, qwen, gemma3, minicpm, qwen3_5, smollm3, hunyuan, moe, olmo2, granite)
    for family in module.FAMILIES
}

KINDS: dict[str, WeightKind] = {
    kind.name: kind
    for kind in (
        linear_norms.TERNARY,
        blocks.KIND,
        linear_norms.NORMED,
        groups.KIND,
        moe.KIND,
        lora.KIND,
        block_rule.KIND,
    )
}


_tables: list[Any] = []  # the cached functions of `family_table`
Table = TypeVar("Table")


def register(family: Family) -> None:
    """Add a family from outside the package."""
    FAMILIES[family.model_type] = family
    for table in _tables:
        table.cache_clear()


def family_table(build: Callable[[], Table]) -> Callable[[], Table]:
    """A function without arguments whose result is made of all families: once, and again after a `register`."""
    table = cache(build)
    _tables.append(table)
    return table


def family_of(config: ModelConfig) -> Family:
    """The family of a model; LLaMA's for a model_type of no other."""
    return FAMILIES.get(config.model_type, FAMILIES["llama"])


def block_steps(config: ModelConfig, layer: int) -> list[TraceStep]:
    """The steps that a block records, in the order of the computation."""
    return (family_of(config).steps or llama_steps)(config, layer)


def all_steps() -> list[TraceStep]:
    """The steps of a block of each family, LLaMA's last: for what is the same in all of them."""
    steps = []
    for family in [*FAMILIES.values(), FAMILIES["llama"]]:
        config = family.example()
        for layer in range(config.num_hidden_layers):
            steps += (family.steps or llama_steps)(config, layer)
    return steps


def trace_names_of_norms() -> dict[str, str]:
    """Field of a layer's weights -> the norm's name in a trace, of all families."""
    classes = [family.layer_class(family.example(), 0) for family in FAMILIES.values()]
    return {field: name for kind in classes for field, name in kind.trace_names.items()}


def also_recorded(config: ModelConfig) -> AlsoRecorded:
    """`Family.also_recorded` of a model, and of the kinds of weights."""
    of_kinds = {function: also for kind in KINDS.values() for function, also in kind.also_recorded.items()}
    return {**family_of(config).also_recorded, **of_kinds}


def axis_sizes(config: ModelConfig) -> dict[str, int]:
    """The sizes of the axes in the steps' shapes."""
    return llama_axes(config) | dict(family_of(config).axes(config))


def differences_from_llama(config: ModelConfig) -> list[str]:
    """Names of the fields by which a model differs in its arithmetic from LLaMA, Mistral and BitNet."""
    later = [each for each in fields(config) if "absent" in each.metadata]
    names = [each.name for each in later if getattr(config, each.name) != each.metadata["absent"]]
    if config.quantization is not None and not config.quantization.int8_activations:
        names.append("int8_activations")
    return [name for name in names if name not in ("pooling", "unit_embeddings")]


# -- configs as plain values -------------------------------------------------------------------------------------------


def config_to_dict(config: ModelConfig) -> dict[str, Any]:
    """All fields as plain JSON values."""
    plain: dict[str, Any] = _plain(config)
    return plain


def _plain(value: Any) -> Any:
    """A config as JSON values, without the fields that files leave out (see `added`)."""
    if isinstance(value, tuple):
        return list(value)
    if not hasattr(value, "__dataclass_fields__"):
        return value
    # a plain RoPE with all the fields that config files have had for any
    kind = StretchedRope if type(value) is RopeConfig else type(value)
    items = [(each, getattr(value, each.name, each.default)) for each in fields(kind)]
    return {each.name: _plain(got) for each, got in items if got != each.metadata.get("absent", _NEVER)}


_NEVER = object()


def config_from_dict(raw: Any) -> ModelConfig:
    """What `config_to_dict` gave, or its JSON, back. Raises ConfigError: a key too many or too few, or a bad value.

    No default stands in for an absent key: absent keys are how a config comes to describe another model.
    """
    model_type = raw.get("model_type") if isinstance(raw, dict) else None
    require(isinstance(model_type, str) or not isinstance(raw, dict), "model_type", "a string", model_type)
    family = FAMILIES.get(str(model_type), FAMILIES["llama"])
    kind = family.config
    values = _exact_fields(kind, raw, "")
    for each in fields(kind):
        value = values[each.name]
        if each.name not in raw or (value is None and "None" in str(each.type)):
            continue
        if each.name in _INNER:
            values[each.name] = _INNER[each.name](value, each.name)
        elif each.name in family.nested:
            nested = family.nested[each.name]
            values[each.name] = nested(**_exact_fields(nested, value, f"{each.name}."))
        elif "tuple" in str(each.type):
            values[each.name] = _tuple(value, each.name)
    return kind(**values)


def _tuple(value: Any, name: str) -> tuple[Any, ...]:
    require(isinstance(value, list), name, "a list", value)
    return tuple(value)


def _rope(raw: Any, name: str) -> RopeConfig:
    values = _exact_fields(StretchedRope, raw, f"{name}.")
    for key in ("long_factors", "short_factors"):
        values[key] = _tuple(raw.get(key, []), f"{name}.{key}")
    if values["rope_type"] == "default":
        return RopeConfig(values["theta"])
    return StretchedRope(**values)


def _quantization(raw: Any, name: str) -> QuantizationConfig:
    values = _exact_fields(QuantizationConfig, raw, f"{name}.")
    skipped = values["modules_to_not_convert"]
    names = isinstance(skipped, list) and all(isinstance(each, str) and each for each in skipped)
    require(names, f"{name}.modules_to_not_convert", "a list of names", skipped)
    return QuantizationConfig(**values | {"modules_to_not_convert": tuple(skipped)})


_INNER = {"rope": _rope, "local_rope": _rope, "quantization": _quantization}


def _exact_fields(kind: type[Any], raw: Any, prefix: str) -> dict[str, Any]:
    """`raw`, which must be an object with the dataclass's fields as its keys, no more and no fewer."""
    require(isinstance(raw, dict), prefix.rstrip(".") or "config", "an object", raw)
    known = {each.name: each.metadata for each in fields(kind)}
    for name, metadata in known.items():
        if name not in raw and "absent" not in metadata:
            raise ConfigError("is required and absent", field=prefix + name)
    for name in raw:
        if name not in known:
            raise ConfigError(f"is no field of {kind.__name__}", field=f"{prefix}{name}"[:100])
    return {name: metadata["absent"] for name, metadata in known.items() if "absent" in metadata} | dict(raw)
