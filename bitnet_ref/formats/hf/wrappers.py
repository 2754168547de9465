"""Which model a config.json describes: by its model_type, by its class, or the text model inside a vision model.

Text tokens give what the text model alone gives, so the towers and projectors of a vision model are left out.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ...errors import ConfigError, describe
from .config_keys import Doubt, check_unread, refuse_other_packings

# Model type -> transformers' class, which `architectures` names
ARCHITECTURES = {
    "bitnet": "BitNetForCausalLM",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
    "minicpm": "MiniCPMForCausalLM",
}


class Wrapper(NamedTuple):
    """A vision model around a text model: text alone gives what the text model gives."""

    text_type: str
    architecture: str
    sizes: dict[str, int]  # class defaults of what text_config may leave out


WRAPPERS = {
    "gemma3": Wrapper(
        "gemma3_text",
        "Gemma3ForConditionalGeneration",
        {
            "vocab_size": 262208,
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "num_hidden_layers": 26,
            "num_attention_heads": 8,
        },
    ),
    "qwen3_5": Wrapper(
        "qwen3_5_text",
        "Qwen3_5ForConditionalGeneration",
        {
            "vocab_size": 248320,
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "num_hidden_layers": 32,
            "num_attention_heads": 16,
        },
    ),
}
# Keys of a wrapper that count for the text model where text_config lacks them
_OF_WRAPPER = ("tie_word_embeddings", "bos_token_id", "eos_token_id", "quantization_config")
_PARTS_OF_WRAPPER = ("text_config", "vision_config", "mm_tokens_per_image")
# What the names of tensors that take no part in text begin with: vision, and the layers that only draft tokens
_VISION = ("visual.", "vision_tower.", "multi_modal_projector.")
LEFT_OUT = {
    "gemma3_text": (*_VISION, *(f"model.{name}" for name in _VISION)),
    "qwen3_5_text": (*_VISION, *(f"model.{name}" for name in _VISION), "mtp."),
}


def text_part(raw: dict[str, Any], doubts: list[Doubt] | None = None) -> dict[str, Any]:
    """The keys of the text model, its model_type among them: those of the file, or of a vision model's text_config."""
    refuse_other_packings(raw)
    model_type = raw.get("model_type")
    if model_type is None:
        model_type = _model_type_of_class(raw)
    wrapper = WRAPPERS.get(model_type) if isinstance(model_type, str) else None
    if wrapper is None:
        return {**raw, "model_type": model_type}
    text = raw.get("text_config")
    if not isinstance(text, dict):
        message = f"expected an object, the configuration of the text model in a {model_type}; got {describe(text)}"
        raise ConfigError(message, field="text_config")
    if text.get("model_type", wrapper.text_type) != wrapper.text_type:
        message = f"expected {wrapper.text_type!r}, got {describe(text['model_type'])}"
        raise ConfigError(message, field="text_config.model_type")
    refuse_other_packings(text)
    unread = check_unread({**raw, "model_type": model_type}, (*_OF_WRAPPER, *_PARTS_OF_WRAPPER))
    if doubts is not None:
        doubts += unread
    shared = {key: raw[key] for key in _OF_WRAPPER if key in raw and text.get(key) is None}
    vocab_size = text.get("vocab_size", wrapper.sizes["vocab_size"])
    for key in ("bos_token_id", "eos_token_id"):
        if key in shared:
            shared[key] = _drop_ids_beyond(shared[key], vocab_size)
    return {**wrapper.sizes, **text, **shared, "model_type": wrapper.text_type}


def _drop_ids_beyond(ids: Any, vocab_size: Any) -> Any:
    """The token ids that a smaller text model has, as for the ids that are class defaults."""

    def is_beyond(token: Any) -> bool:
        return isinstance(token, int) and isinstance(vocab_size, int) and token >= vocab_size

    if isinstance(ids, list):
        return [token for token in ids if not is_beyond(token)]
    return None if is_beyond(ids) else ids


def _model_type_of_class(raw: dict[str, Any]) -> str | None:
    """The model type that the class in `architectures` or `auto_map` means, for files without model_type."""
    classes = {architecture: model_type for model_type, architecture in ARCHITECTURES.items()}
    classes |= {wrapper.architecture: model_type for model_type, wrapper in WRAPPERS.items()}
    named, mapped = raw.get("architectures"), raw.get("auto_map")
    names = list(named) if isinstance(named, list) else []
    if isinstance(mapped, dict):
        names.append(str(mapped.get("AutoModelForCausalLM")).rpartition(".")[2])
    return next((classes[name] for name in names if isinstance(name, str) and name in classes), None)
