"""`bitnet-ref chat`: a conversation with a model that was trained for it."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from ..errors import BitNetRefError
from .generate_command import Reply
from .generation_options import load_model, model_options, sampling_options, select_given
from .shell import INTERRUPTED, SectionedCommand, common_options, print_json, report_error, say, wants_json, write_text

if TYPE_CHECKING:
    from ..generation import ChatSession, GenerationStats, StreamChunk

RESET, EXIT = "/reset", ("/exit", "/quit")


@click.command(cls=SectionedCommand, short_help="Talk with a model that was trained for it.")
@partial(model_options, default="storychat")
@click.option("--system", metavar="TEXT", help="Instructions put before the session.")
@sampling_options
@common_options
def chat(system: str | None, **options: Any) -> None:
    """Talk with a model, by its own chat template. The shipped one answers as people do in old children's books; its
    --system text is a scene: "The old king sat by the fire."

    /reset forgets the conversation, /exit or Ctrl-D leaves, Ctrl-C stops an answer. With --json each line of
    standard input is a message (plain text, or {"content": "..."} for one with line ends), and each answer one line.
    """
    model = load_model(options)
    session = model.chat(system, **select_given(options))
    session.how_to_reset = f"{RESET} starts a new one"
    (answer_lines if wants_json() else talk)(session)


def ask(
    session: ChatSession, content: str, on_chunk: Callable[[StreamChunk], None] | None = None
) -> tuple[Reply, GenerationStats, list[int]]:
    """One exchange: the reply, its statistics, and the token ids of its prompt."""
    ids, stream, reply = session.prompt(content), session.stream(content), Reply()
    reply.follow(stream, on_chunk)
    return reply, stream.stats, ids


def talk(session: ChatSession) -> None:
    """The conversation with a person."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - gives input() its line editing

    say(f"[{session.model.backend.name}] /reset starts anew, /exit leaves, Ctrl-C stops an answer")
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
            say("\nnothing to stop; /exit or Ctrl-D leaves")
            continue
        if message in EXIT:
            return
        if message == RESET:
            session.reset()
            say("a new conversation")
            continue
        if not message:
            continue
        try:
            reply, stats, _ = ask(session, message, lambda chunk: write_text(chunk.text))
        except BitNetRefError as error:
            report_error(error)
            continue
        write_text("\n")
        say_dropped(stats)
        cut = "[the context is full: /reset starts anew]" if session.full else "[cut at --max-tokens]"
        remarks = {"interrupted": "stopped", "length": cut, "filtered": "[filtered]"}
        if (remark := remarks.get(reply.finish_reason or "")) is not None:
            say(remark)


def say_dropped(stats: GenerationStats) -> None:
    """Say what the model did not see of the conversation."""
    for count, what in ((stats.dropped_messages, "message"), (stats.dropped_tokens, "token")):
        if count:
            say(f"[the oldest {what if count == 1 else f'{count} {what}s'} dropped: the context is full]")


def answer_lines(session: ChatSession) -> None:
    """The conversation with a program: each line in is a message, each line out an object.

    The exit code is that of the last failure.
    """
    code = 0
    for message in messages_of(sys.stdin):
        if message in EXIT:
            break
        if message == RESET:
            session.reset()
            print_json({"reset": True})
            continue
        try:
            reply, stats, ids = ask(session, message)
        except BitNetRefError as error:
            code = report_error(error)
            continue
        print_json(reply.facts(ids, stats))
        if reply.finish_reason == "interrupted":
            code = INTERRUPTED
            break
    raise click.exceptions.Exit(code)


def messages_of(lines: Any) -> Iterator[str]:
    for line in lines:
        text = line.strip()
        if not text:
            continue
        try:
            content = json.loads(text)["content"] if text.startswith("{") else text
        except (ValueError, KeyError, TypeError, RecursionError):
            content = text  # a message that merely begins with a brace
        yield content if isinstance(content, str) else text
