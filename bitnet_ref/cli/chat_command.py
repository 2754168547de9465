"""`bitnet-ref chat`: a conversation with a model that was trained for it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import click

from ..errors import BitNetRefError, GenerationError
from .generate_command import Reply, load_model, model_options, sampling_options
from .shell import (
    INTERRUPTED,
    common_options,
    error_facts,
    exit_code,
    paint,
    print_json,
    say_error,
    wants_json,
    write_text,
)

if TYPE_CHECKING:
    from ..api import Model
    from ..generation import GenerationStats, StreamChunk

DEFAULT_REPLY_TOKENS = 512
RESET, EXIT = "/reset", ("/exit", "/quit")


@click.command(short_help="Talk with a model that was trained for it.")
@model_options
@click.option("--system", metavar="TEXT", help="Instructions put before the conversation.")
@click.option("--max-tokens", type=int, help="Tokens of one answer at most.  [default: 512, or what fits]")
@sampling_options
@common_options
def chat(system: str | None, max_tokens: int | None, **options: Any) -> None:
    """Talk with a model, by its own chat template.

    /reset forgets the conversation, /exit or Ctrl-D leaves, Ctrl-C stops an answer. With --json each line of
    standard input is a message (plain text, or {"content": "..."} for one with line ends), and each answer one line.
    """
    model = load_model(options)
    params = {name: value for name, value in options.items() if value not in (None, ())}
    conversation = Conversation(model, system, max_tokens, params)
    if wants_json():
        answer_lines(conversation)
    else:
        talk(conversation)


class Conversation:
    """The history so far, and the model's next answer to it."""

    def __init__(self, model: Model, system: str | None, max_tokens: int | None, params: dict[str, Any]) -> None:
        self.model, self.params, self.max_tokens = model, params, max_tokens
        if model.tokenizer.chat_template is None:
            raise GenerationError(
                "this model has no chat template: it is a base model, which continues texts and was not trained to "
                'hold a conversation. Use: bitnet-ref generate "..."'
            )
        self.opening = [{"role": "system", "content": system}] if system else []
        self.reset()

    def reset(self) -> None:
        self.messages = list(self.opening)

    def ask(
        self, content: str, on_chunk: Callable[[StreamChunk], None] | None = None
    ) -> tuple[Reply, GenerationStats, list[int]]:
        """One exchange. An error, or an interrupt before the first word, leaves the history as it was."""
        messages = [*self.messages, {"role": "user", "content": content}]
        ids = self.model.tokenizer.apply_chat_template(messages, tokenize=True)
        context = self.model.config.context_length
        room = context - len(ids)
        if room < 1:
            raise GenerationError(
                f"the conversation has {len(ids)} tokens and the model's context is {context}; "
                + ("/reset starts a new one" if len(messages) > len(self.opening) + 1 else "shorten the message")
            )
        wanted = min(room, DEFAULT_REPLY_TOKENS if self.max_tokens is None else self.max_tokens)
        stream = self.model.stream(ids, max_tokens=wanted, **self.params)
        reply = Reply()
        reply.follow(stream, on_chunk)
        if reply.text or reply.finish_reason != "interrupted":
            self.messages = [*messages, {"role": "assistant", "content": reply.text}]
        return reply, stream.stats, ids

    @property
    def full(self) -> bool:
        """Whether no further message can be answered."""
        used = len(self.model.tokenizer.apply_chat_template(self.messages, tokenize=True)) if self.messages else 0
        return used >= self.model.config.context_length


def talk(conversation: Conversation) -> None:
    """The loop for people."""
    import contextlib

    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - gives input() its line editing

    hint = f"[{conversation.model.backend.name}] /reset starts anew, /exit leaves, Ctrl-C stops an answer"
    click.echo(paint(hint, sys.stderr, dim=True), err=True)
    prompt = "> " if sys.stdin.isatty() else ""
    while True:
        try:
            message = input(prompt).strip()
        except EOFError:
            if sys.stdin.isatty():
                click.echo(err=True)  # the shell's prompt begins on a line of its own
            return
        except KeyboardInterrupt:
            if not sys.stdin.isatty():
                raise
            click.echo(paint("\nnothing to stop; /exit or Ctrl-D leaves", sys.stderr, dim=True), err=True)
            continue
        if message in EXIT:
            return
        if message == RESET:
            conversation.reset()
            click.echo(paint("a new conversation", sys.stderr, dim=True), err=True)
            continue
        if not message:
            continue
        try:
            reply, _, _ = conversation.ask(message, lambda chunk: write_text(chunk.text))
        except BitNetRefError as error:
            say_error(str(error))
            continue
        write_text("\n")
        if reply.finish_reason == "interrupted":
            click.echo(paint("stopped", sys.stderr, dim=True), err=True)
        elif reply.finish_reason == "length":
            why = "the context is full: /reset starts anew" if conversation.full else "cut at --max-tokens"
            click.echo(paint(f"[{why}]", sys.stderr, dim=True), err=True)


def answer_lines(conversation: Conversation) -> None:
    """The loop for programs: a message a line in, an object a line out. The last failure's code is the exit code."""
    code = 0
    for message in messages_of(sys.stdin):
        if message in EXIT:
            break
        if message == RESET:
            conversation.reset()
            print_json({"reset": True})
            continue
        try:
            reply, stats, ids = conversation.ask(message)
        except BitNetRefError as error:
            print_json({"error": error_facts(error)})
            code = exit_code(error)
            continue
        print_json(reply.facts(ids, stats))
        if reply.finish_reason == "interrupted":
            code = INTERRUPTED
            break
    raise click.exceptions.Exit(code)


def messages_of(lines: Any) -> Iterator[str]:
    """Each line's message; empty lines are none."""
    for line in lines:
        text = line.strip()
        if not text:
            continue
        try:
            content = json.loads(text)["content"] if text.startswith("{") else text
        except (ValueError, KeyError, TypeError, RecursionError):
            content = text  # a message that merely begins with a brace
        yield content if isinstance(content, str) else text
