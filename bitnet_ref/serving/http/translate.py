"""What the other APIs have in common: their requests become chats or completions, checked and read as such."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ...generation.overflow import ContextWindow
from ...generation.params import SamplingParams
from ..engine import Engine
from . import schemas
from .choices import Choice
from .schemas import RequestError
from .shapes import Asked, read_chat, read_completion

if TYPE_CHECKING:
    from .writers import Writer

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
MakeWriter = Callable[[Asked, Sequence[Choice]], "Writer"]


def ask_chat(
    chat: Mapping[str, Any], name: str, engine: Engine, chat_template: str | None, writer: MakeWriter
) -> Asked:
    """The request of a body in the form of a chat, which is checked here. `max_tokens` is cut to what fits."""
    body = {key: value for key, value in chat.items() if value is not None}
    schemas.check(body, CHAT)
    asked = read_chat(body, name, engine, chat_template)
    asked.writer = writer
    cut_tokens(asked, engine, len(asked.prompts[0]))
    return asked


def ask_completion(body: Mapping[str, Any], name: str, engine: Engine, writer: MakeWriter) -> Asked:
    """The same for the continuation of one prompt."""
    given = {key: value for key, value in body.items() if value is not None}
    schemas.check(given, COMPLETION)
    asked = read_completion(given, name, engine)
    asked.writer = writer
    if len(asked.prompts) != 1:
        raise RequestError("prompt: expected one", "prompt")
    prompt = asked.prompts[0]
    cut_tokens(asked, engine, len(engine.model.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt))
    return asked


def cut_tokens(asked: Asked, engine: Engine, prompt_tokens: int) -> None:
    """Lower `max_tokens` to what the context has room for, as most other servers do."""
    sampling = SamplingParams.of(**{**engine.config.sampling, **asked.params})
    window = ContextWindow.of(engine.model, sampling)
    room = min(window.size, engine.cache.capacity) - prompt_tokens
    if sampling.max_tokens is not None and not window.moves and 1 <= room < sampling.max_tokens:
        asked.params["max_tokens"] = room


def join_system(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages with their first system texts as one, because templates have a place for one only."""
    count = next((n for n, message in enumerate(messages) if message["role"] != "system"), len(messages))
    if count < 2:
        return messages
    text = "\n\n".join(message["content"] for message in messages[:count])
    return [{"role": "system", "content": text}, *messages[count:]]
