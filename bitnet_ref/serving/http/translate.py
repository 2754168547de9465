"""What the other APIs have in common: their requests become chats or completions, checked and read as such."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ...generation.chat import reply_room
from ...generation.overflow import ContextWindow
from ...generation.params import SamplingParams
from ..engine import Engine
from . import schemas
from .choices import Asked, Choice, Writer
from .schemas import RequestError
from .shapes import read_chat, read_completion

MakeWriter = Callable[[Asked, Sequence[Choice]], Writer]


def ask_chat(
    chat: Mapping[str, Any], name: str, engine: Engine, chat_template: str | None, writer: MakeWriter, guide: str
) -> Asked:
    """The request of a body in the form of a chat, which is checked here. `max_tokens` is cut to what fits.

    guide: the field of the schema that the reply must fit.
    """
    body = {key: value for key, value in chat.items() if value is not None}
    schemas.check(body, "/v1/chat/completions")
    asked = read_chat(body, name, engine, chat_template)
    asked.guide_field = "tools" if asked.guide_field == "tools" else guide
    return cut_tokens(asked, engine, writer)


def ask_completion(given: Mapping[str, Any], name: str, engine: Engine, writer: MakeWriter) -> Asked:
    """The same for the continuation of one prompt."""
    body = {key: value for key, value in given.items() if value is not None}
    schemas.check(body, "/v1/completions")
    return cut_tokens(read_completion(body, name, engine, None), engine, writer)


def cut_tokens(asked: Asked, engine: Engine, writer: MakeWriter) -> Asked:
    """Lower `max_tokens` to what the context has room for, as most other servers do. Raises RequestError."""
    if len(asked.prompts) != 1:
        raise RequestError("expected one", "prompt")
    prompt, asked.writer = asked.prompts[0], writer
    sampling = SamplingParams.of(**engine.config.over_defaults(asked.params))
    window = ContextWindow.of(engine.model, sampling)
    tokens = len(engine.model.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt)
    room = reply_room(window, tokens, engine.cache.capacity)
    if sampling.max_tokens is not None and not window.moves and 1 <= room < sampling.max_tokens:
        asked.params["max_tokens"] = room
    return asked


def join_system(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages with their first system texts as one, because templates have a place for one only."""
    count = next((n for n, message in enumerate(messages) if message["role"] != "system"), len(messages))
    if count < 2:
        return messages
    text = "\n\n".join(message["content"] for message in messages[:count])
    return [{"role": "system", "content": text}, *messages[count:]]
