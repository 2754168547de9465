"""Chat templates: a conversation rendered in the form that the model was trained on.

The template is a Jinja program from the checkpoint, so it is not trusted: see `sandbox`. It may use what transformers
provides: `messages`, `add_generation_prompt`, the special tokens, `raise_exception`, `strftime_now`, `tojson`, loop
controls and `{% generation %}`, with blocks trimmed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

from ...errors import TokenizerError
from ..files import AnyPath

# BitNet b1.58 2B-4T: BOS, then `Role: content<|eot_id|>` for each message, then `Assistant: `. The trailing space
# belongs to it: without it the model's first token is another one. Used for that family when no file has a template.
BITNET_2B4T_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{{ message['role'] | capitalize }}: {{ message['content'] | trim }}<|eot_id|>"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant: ' }}{% endif %}"
)
_MAX_DEPTH = 32  # of the values in a message beside its text (tool calls, for example)


def copy_messages(messages: Any) -> list[dict[str, Any]]:
    """A copy made of plain types, so that a template cannot reach the methods of others.

    Raises TokenizerError, naming the message, unless this is a non-empty list of dicts with str role and content.
    """
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        example = "[{'role': 'user', 'content': 'Hello'}]"
        raise TokenizerError(f"messages: expected a list like {example}, got {type(messages).__name__}")
    if not messages:
        raise TokenizerError("messages: expected at least one message, got an empty list")
    for n, message in enumerate(messages):
        if not isinstance(message, Mapping):
            got = type(message).__name__
            raise TokenizerError(f"messages[{n}]: expected a dict with 'role' and 'content', got {got}")
        for key in ("role", "content"):
            if key not in message:
                raise TokenizerError(f"messages[{n}]: {key!r} is missing; expected 'role' and 'content', both str")
            if not isinstance(message[key], str):
                raise TokenizerError(f"messages[{n}][{key!r}]: expected str, got {type(message[key]).__name__}")
    return [_copy_plain(message, f"messages[{n}]", 0) for n, message in enumerate(messages)]


def _copy_plain(value: Any, where: str, depth: int) -> Any:
    """A copy made of str, int, float, bool, None, list and dict, and not of their subclasses."""
    if depth > _MAX_DEPTH:
        raise TokenizerError(f"{where}: nested more than {_MAX_DEPTH} deep")
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    for kind in (int, float):
        if isinstance(value, kind):
            return kind(value)
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise TokenizerError(f"{where}: expected str keys, got {key!r:.80}")
        return {str.__str__(key): _copy_plain(item, f"{where}[{key!r:.80}]", depth + 1) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_copy_plain(item, f"{where}[{n}]", depth + 1) for n, item in enumerate(value)]
    raise TokenizerError(f"{where}: expected text, a number, a list or a dict, got {type(value).__name__}")


class ChatTemplate:
    """A compiled template. It can be kept, and used from several threads."""

    def __init__(self, source: str, *, path: AnyPath = None) -> None:
        """Raises TokenizerError, with the line, if it is not a template or uses what chat templates may not use."""
        from . import sandbox

        self.path, self._sandbox = path, sandbox
        with self._errors():
            self._template = sandbox.compile_template(source)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
        **special_tokens: str,
    ) -> str:
        """The text of a conversation. `special_tokens`: bos_token="<s>" and so on; a missing one is empty.
        tools, variables: see `Tokenizer.apply_chat_template`.

        Raises TokenizerError: a bad message, an error in the template or raised by it, or more work or text than
        any conversation of this size needs.
        """
        given = {
            "documents": None,
            **_copy_plain(variables or {}, "variables", 0),
            "messages": copy_messages(messages),
            "tools": None if tools is None else _copy_plain(tools, "tools", 0),
            "add_generation_prompt": bool(add_generation_prompt),
            **special_tokens,
        }
        with self._errors():
            return self._sandbox.render(self._template, given)

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Every error of the template becomes a TokenizerError with the template's line."""
        try:
            yield
        except TokenizerError:
            raise
        except Exception as error:
            line = self._sandbox.line_of(error)
            field = "chat_template" if line is None else f"chat_template line {line}"
            raise TokenizerError(self._sandbox.message_of(error), path=self.path, field=field) from error


@lru_cache(maxsize=16)
def compile_template(source: str, path: AnyPath = None) -> ChatTemplate:
    """`ChatTemplate`, of which the last ones are kept."""
    return ChatTemplate(source, path=path)
