"""The parts of a message: those with text are joined, the others are refused by name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ...errors import describe
from .schemas import RequestError

CHAT_PARTS = {"text": "text", "refusal": "refusal"}  # kinds of OpenAI's chats, with the field that has their text


def read_parts(content: Any, place: str, kinds: Mapping[str, str]) -> str:
    """The text of a message: a string, or a list of parts. kinds: of parts, with the name of the field that has text.

    Raises RequestError, with the place, for any other part.
    """
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise RequestError("expected a text or a list of parts", place)
    texts = []
    for number, part in enumerate(content):
        if isinstance(part, str):
            texts.append(part)
            continue
        kind = part.get("type") if isinstance(part, Mapping) else None
        name = kinds.get(kind) if isinstance(kind, str) else None
        if name is None:
            raise refuse_part(kind, f"{place}[{number}]", kinds)
        texts.append(read_field(part, name, f"{place}[{number}]"))
    return "".join(texts)


def read_field(part: Mapping[str, Any], name: str, place: str) -> str:
    """The text of a field of a part. Raises RequestError where it has none."""
    text = part.get(name)
    if not isinstance(text, str):
        problem = "is missing" if text is None else f"expected a text, got {describe(text)}"
        raise RequestError(problem, f"{place}.{name}")
    return text


def refuse_part(kind: Any, place: str, kinds: Iterable[str]) -> RequestError:
    """The error for a part of a message whose type is none of `kinds`."""
    if isinstance(kind, str) and any(name in kind for name in ("image", "audio", "video", "file", "document")):
        return RequestError(f"{kind[:40]} is not supported; the models read text only", place)
    given = repr(kind[:60]) if isinstance(kind, str) else describe(kind)
    return RequestError(f"expected one of {', '.join(kinds)}, got {given}", f"{place}.type")
