"""`system_fingerprint`: what an answer was computed from, in one short line.

"br1-" and three hashes: of the weights and the config; of the tokenizer and the chat template; of the numbers' format
and the server's defaults. The backend, its threads, the batch and the cached pages have no part in it, because the
answer does not depend on them.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any
from weakref import WeakKeyDictionary, ref

from ...backends.loaded import LoadedModel
from ...formats.hashes import config_hash, weight_hash
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

    It is kept for as long as the engine computes with the same model. The first call hashes the weights, about a second
    for each gigabyte.
    """
    model, key = engine.model, (ref(engine.model), chat_template)
    if engine not in _kept or _kept[engine][0] != key:
        _kept[engine] = key, _fingerprint(engine, model, chat_template)
    return _kept[engine][1]


_kept: WeakKeyDictionary[Engine, tuple[Any, str]] = WeakKeyDictionary()  # with the model and the template


def _fingerprint(engine: Engine, model: LoadedModel, chat_template: str | None) -> str:
    tokenizer = model.tokenizer
    templates = (
        [chat_template] if chat_template else [tokenizer.template_for(with_tools) for with_tools in (False, True)]
    )
    numbers = {
        "contract": CONTRACT,
        "dtype": model.backend.dtype.name,
        "cache_dtype": engine.cache.dtype.name,
        "sampling": engine.config.sampling,
    }
    parts = ([weight_hash(model.weights), config_hash(model.config)], [tokenizer.digest, templates], numbers)
    digests = [_digest(part)[:length] for part, (_, length) in zip(parts, PARTS, strict=True)]
    return "-".join([FORM, *digests])


def differing_parts(one: str, other: str) -> list[str]:
    """In words, what two fingerprints do not have in common."""
    pairs = list(zip(one.split("-"), other.split("-"), strict=False))
    if one.count("-") != len(PARTS) or other.count("-") != len(PARTS) or pairs[0][0] != pairs[0][1]:
        return ["a fingerprint of another form"]
    return [words for (a, b), (words, _) in zip(pairs[1:], PARTS, strict=True) if a != b]


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()
