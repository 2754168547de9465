"""`system_fingerprint`: what an answer was computed from, in one short line.

"br1-" and three hashes: of the weights, the request's adapter and the config; of the tokenizer and the chat template;
of the numbers' format and the server's defaults. The backend, its threads, the batch and the cached pages have no part
in it, because the answer does not depend on them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

from ...backends.loaded import LoadedModel
from ...formats.hashes import config_hash, weight_hash
from ...system.json_file import json_hash
from ..engine import Engine

FORM = "br1"
CONTRACT = 1  # raised when the same request to the same model may give other tokens than before
PARTS = (  # in words, and the hexadecimal digits of each
    ("the weights or the config", 12),
    ("the tokenizer or the chat template", 8),
    ("the dtypes, the rules of sampling or their defaults", 8),
)


def fingerprint_of(engine: Engine, chat_template: str | None) -> str:
    """The fingerprint of all answers of this engine. chat_template: the server's, instead of the model's own.

    It is kept for as long as the model is there. The first call hashes the weights, about a second for each gigabyte.
    """
    model, sampling = engine.model, engine.config.sampling
    adapter = model.find_adapter(sampling.get("adapter"))
    digest = None if adapter is None else adapter.digest
    numbers = {
        "contract": CONTRACT,
        "dtype": model.backend.dtype.name,
        "cache_dtype": engine.cache.dtype.name,
        "sampling": {name: value for name, value in sampling.items() if name != "adapter"},
    }
    key = json_hash([chat_template, digest, numbers], str)
    kept = _kept.setdefault(model, {})
    if key not in kept:
        kept[key] = _fingerprint(model, chat_template, digest, numbers)
    return kept[key]


def has_fingerprint(model: LoadedModel) -> bool:
    """Whether its weights are hashed already. They are not after a device failed: the engine has another model then."""
    return model in _kept


_kept: WeakKeyDictionary[LoadedModel, dict[str, str]] = WeakKeyDictionary()


def _fingerprint(model: LoadedModel, chat_template: str | None, adapter: str | None, numbers: Mapping[str, Any]) -> str:
    tokenizer = model.tokenizer
    templates = (
        [chat_template] if chat_template else [tokenizer.template_for(with_tools) for with_tools in (False, True)]
    )
    weights = [weight_hash(model.weights), *([] if adapter is None else [adapter])]
    parts = ([*weights, config_hash(model.config)], [tokenizer.digest, templates], numbers)
    digests = [json_hash(part, str)[:length] for part, (_, length) in zip(parts, PARTS, strict=True)]
    return "-".join([FORM, *digests])


def differing_parts(one: str, other: str) -> list[str]:
    """In words, what two fingerprints do not have in common."""
    pairs = list(zip(one.split("-"), other.split("-"), strict=False))
    if one.count("-") != len(PARTS) or other.count("-") != len(PARTS) or pairs[0][0] != pairs[0][1]:
        return ["a fingerprint of another form"]
    return [words for (a, b), (words, _) in zip(pairs[1:], PARTS, strict=True) if a != b]
