"""What a model's files say about it: family, quantisation, licence, size, last use."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from ...errors import ConfigError, FormatError
from ...reference.config import ModelConfig
from ...system.json_file import read_bounded
from ...system.sharing import date_of, folder_of, model_files
from ..gguf.file import open_gguf
from ..open import open_checkpoint
from .names import MODEL_CARD

MAX_CARD_BYTES = 1 << 20
_FRONT_MATTER = re.compile(r"\A---[ \t]*\n(.*?)\n---[ \t]*(?:\n|\Z)", re.DOTALL)
_LICENCE = re.compile(r"^license:[ \t]*['\"]?([\w.+-]{1,64})['\"]?[ \t]*$", re.MULTILINE)


def summarize(config: ModelConfig) -> dict[str, Any]:
    return {
        "model_type": config.model_type,
        "layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "context": config.context_length,
        "ternary": config.quantization is not None,
    }


def describe_model(path: Path) -> dict[str, Any]:
    """`summarize`, with path, kind ("hf-packed", "gguf-i2_s", ...), licence, bytes, last_used. Raises FormatError and
    ConfigError."""
    with open_checkpoint(path) as checkpoint:
        facts = {**summarize(checkpoint.config), "kind": checkpoint.kind}
    return {"path": str(path), **facts, "licence": licence_of(path), **usage_of(path)}


def usage_of(path: Path) -> dict[str, Any]:
    """bytes of the model's files, and last_used: the date (UTC) when one was last read, if the system notes it."""
    stats = [file.stat() for file in model_files(path)]
    last = date_of(max((each.st_atime for each in stats), default=0.0))
    return {"bytes": sum(each.st_size for each in stats), "last_used": last.date().isoformat()}


def licence_of(path: Path) -> str | None:
    """Of a GGUF's metadata, or of the model card's front matter (README.md) beside the model; None if none says."""
    if path.suffix == ".gguf":
        with open_gguf(path) as file:
            licence = file.metadata.get("general.license")
        if isinstance(licence, str):
            return licence[:64]
    try:
        card = read_bounded(folder_of(path) / MODEL_CARD, FormatError, MAX_CARD_BYTES)
    except (FormatError, ConfigError):
        return None
    front = _FRONT_MATTER.match(card.decode(errors="replace").replace("\r\n", "\n"))
    match = _LICENCE.search(front[1]) if front else None
    return match[1] if match else None
