"""Which model a config.json describes: by its model_type, by its class, or the text model inside a vision model.

Text tokens give what the text model alone gives, so the towers and projectors of a vision model are left out.
"""

from __future__ import annotations

from typing import Any

from ...errors import ConfigError, describe, require
from ...families import FAMILIES, family_table
from ...families.family import HfForm, Wrapper
from .config_keys import Doubt, check_unread, refuse_other_packings
from .packings import HADAMARD_TYPE, drop_mlx_copy, hadamard_text_config

# Keys of a wrapper that count for the text model where text_config lacks them
_OF_WRAPPER = ("tie_word_embeddings", "bos_token_id", "eos_token_id", "quantization_config", "quantization")
_PARTS_OF_WRAPPER = ("text_config", "vision_config", "mm_tokens_per_image")


@family_table
def hf_forms() -> dict[str, HfForm]:
    """Model type -> what its family declares of its config.json."""
    return {name: family.hf for name, family in FAMILIES.items() if family.hf is not None}


def hf_form(model_type: str) -> HfForm:
    """That of a model type. ConfigError for one that has none."""
    require(model_type in hf_forms(), "model_type", f"one of {', '.join(hf_forms())}", model_type)
    return hf_forms()[model_type]


def _wrapped(model_type: Any) -> tuple[str, Wrapper] | None:
    """The text model's type and the wrapper of that model type."""
    wrappers = {form.wrapper.model_type: (name, form.wrapper) for name, form in hf_forms().items() if form.wrapper}
    return wrappers.get(model_type) if isinstance(model_type, str) else None


def text_part(raw: dict[str, Any], doubts: list[Doubt] | None = None) -> dict[str, Any]:
    """The keys of the text model, its model_type among them: those of the file, or of a vision model's text_config."""
    if raw.get("model_type") == HADAMARD_TYPE:
        raw = hadamard_text_config(raw)
    raw = drop_mlx_copy(raw)
    refuse_other_packings(raw)
    model_type = raw.get("model_type")
    if model_type is None:
        model_type = _model_type_of_class(raw)
    wrapped = _wrapped(model_type)
    if wrapped is None:
        return {**raw, "model_type": model_type}
    text_type, wrapper = wrapped
    text = raw.get("text_config")
    if not isinstance(text, dict):
        message = f"expected an object, the configuration of the text model in a {model_type}; got {describe(text)}"
        raise ConfigError(message, field="text_config")
    if text.get("model_type", text_type) != text_type:
        message = f"expected {text_type!r}, got {describe(text['model_type'])}"
        raise ConfigError(message, field="text_config.model_type")
    refuse_other_packings(text)
    unread = check_unread({**raw, "model_type": model_type}, (*_OF_WRAPPER, *_PARTS_OF_WRAPPER))
    if doubts is not None:
        doubts += unread
    shared = {key: raw[key] for key in _OF_WRAPPER if key in raw and text.get(key) is None}
    return {**wrapper.sizes, **text, **shared, "model_type": text_type}


def _model_type_of_class(raw: dict[str, Any]) -> str | None:
    """The model type that the class in `architectures` or `auto_map` means, for files without model_type."""
    classes = {form.architecture: name for name, form in hf_forms().items()}
    wrappers = [form.wrapper for form in hf_forms().values() if form.wrapper is not None]
    classes |= {wrapper.architecture: wrapper.model_type for wrapper in wrappers}
    named, mapped = raw.get("architectures"), raw.get("auto_map")
    names = list(named) if isinstance(named, list) else []
    if isinstance(mapped, dict):
        names.append(str(mapped.get("AutoModelForCausalLM")).rpartition(".")[2])
    return next((classes[name] for name in names if isinstance(name, str) and name in classes), None)
