"""Chat templates: a conversation rendered as the model was trained to see it.

The template is a Jinja program that came with the checkpoint, so it is not trusted: see `template_sandbox`. What it may
use is what transformers gives it: `messages`, `add_generation_prompt`, the special tokens, `raise_exception`,
`strftime_now`, `tojson`, loop controls and `{% generation %}`, with blocks trimmed.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from ...errors import TokenizerError

# BitNet b1.58 2B-4T: BOS, then `Role: content<|eot_id|>` for each message, then `Assistant: `. The trailing space is
# part of it: without it the model's first token is another one. Used for that family when no file brings a template.
BITNET_2B4T_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{{ message['role'] | capitalize }}: {{ message['content'] | trim }}<|eot_id|>"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant: ' }}{% endif %}"
)

_MAX_DEPTH = 32  # of what a message may hold besides its text (tool calls and the like)


def check_messages(messages: Any) -> None:
    """Raise TokenizerError, naming the message, unless this is a non-empty list of dicts with str role and content."""
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise TokenizerError(
            f"messages: expected a list like [{{'role': 'user', 'content': 'Hello'}}], got {type(messages).__name__}"
        )
    if not messages:
        raise TokenizerError("messages: expected at least one message, got an empty list")
    for n, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise TokenizerError(
                f"messages[{n}]: expected a dict with 'role' and 'content', got {type(message).__name__}"
            )
        for key in ("role", "content"):
            if key not in message:
                raise TokenizerError(f"messages[{n}]: {key!r} is missing; expected 'role' and 'content', both str")
            if not isinstance(message[key], str):
                raise TokenizerError(f"messages[{n}][{key!r}]: expected str, got {type(message[key]).__name__}")
        _plain(message, f"messages[{n}]", 0)


def _plain(value: Any, where: str, depth: int) -> Any:
    """A copy made of plain str, int, float, bool, None, list and dict: a template must not reach a rich object."""
    if depth > _MAX_DEPTH:
        raise TokenizerError(f"{where}: nested more than {_MAX_DEPTH} deep")
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)  # not a subclass of str, which could bring methods
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value)
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise TokenizerError(f"{where}: expected str keys, got {key!r:.80}")
        return {str.__str__(key): _plain(item, f"{where}[{key!r:.80}]", depth + 1) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item, f"{where}[{n}]", depth + 1) for n, item in enumerate(value)]
    raise TokenizerError(f"{where}: expected text, a number, a list or a dict, got {type(value).__name__}")


class ChatTemplate:
    """A compiled template. Safe to keep, and to use from several threads."""

    def __init__(self, source: str, *, path: str | os.PathLike[str] | None = None) -> None:
        """Raises TokenizerError, with the line, if it is no template or uses what chat templates may not."""
        try:
            from . import sandbox as template_sandbox
        except ImportError as error:
            raise TokenizerError("chat templates need jinja2: pip install jinja2", path=path) from error
        self.source, self.path = source, path
        self._sandbox = template_sandbox
        with self._errors():
            self._program = template_sandbox.compile_template(source)

    def render(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **special_tokens: str
    ) -> str:
        """The text of a conversation. `special_tokens`: bos_token="<s>" and so on; one not given is empty.

        Raises TokenizerError: a bad message, an error in the template or raised by it, or more work or text than
        any conversation of this size needs.
        """
        check_messages(messages)
        variables = {
            "messages": [_plain(message, f"messages[{n}]", 0) for n, message in enumerate(messages)],
            "tools": None,
            "documents": None,
            "add_generation_prompt": bool(add_generation_prompt),
            **special_tokens,
        }
        with self._errors():
            return self._program.render(variables)

    def _errors(self) -> _TemplateErrors:
        return _TemplateErrors(self)


class _TemplateErrors:
    """`with` this, any error of the template becomes a TokenizerError that says the line."""

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if error is None or not isinstance(error, Exception) or isinstance(error, TokenizerError):
            return
        line = self._template._sandbox.line_of(error)
        where = "chat_template" if line is None else f"chat_template line {line}"
        raise TokenizerError(
            self._template._sandbox.message_of(error), path=self._template.path, field=where
        ) from error
