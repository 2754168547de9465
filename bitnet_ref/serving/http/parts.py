"""The parts of a message: those with text are joined, the others are refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .schemas import RequestError

CHAT_PARTS = {"text": "text", "refusal": "refusal"}  # kinds of OpenAI's chats, with the field that has their text


def read_parts(content: Any, place: str, kinds: Mapping[str, str]) -> str:
    """The text of a message: a string, or a list of parts. kinds: of parts, with the name of the field that has text.

    Raises RequestError, with the place, for any other part.
    """
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for number, part in enumerate(content):
        if isinstance(part, str):
            texts.append(part)
            continue
        kind = part.get("type") if isinstance(part, Mapping) else None
        text = part.get(kinds[kind]) if isinstance(kind, str) and kind in kinds else None
        if not isinstance(text, str):
            raise refuse_part(kind, f"{place}[{number}]")
        texts.append(text)
    return "".join(texts)


def refuse_part(kind: Any, place: str) -> RequestError:
    """The error for a part of a message that cannot be read."""
    if isinstance(kind, str) and any(name in kind for name in ("image", "audio", "video", "file", "document")):
        return RequestError(f"{place}: {kind[:40]} is not supported; the models read text only", place)
    return RequestError(f"{place}: expected a text, got {str(kind)[:60]!r}", place)
