"""`bitnet-ref chat`: a conversation with a model that was trained for it."""

from __future__ import annotations

import contextlib
import itertools
import json
import secrets
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from ..errors import BitNetRefError, count_of
from .generate_command import Reply, describe_sampling
from .generation_options import defaults_option, is_model, load_model, model_options, sampling_options, select_given
from .shell import SectionedCommand, common_options, print_json, report_error, say, wants_json, write_text
from .signals import INTERRUPTED

if TYPE_CHECKING:
    from ..api import Model
    from ..generation import ChatSession, GenerationStats, StreamChunk

RESET, EXIT, HELP = "/reset", ("/exit", "/quit"), ("/help", "/?")
COMMANDS = "/reset starts anew, /exit leaves, Ctrl-C stops an answer"
# A phrase of up to 16 tokens is stopped after so many times and tokens: "No," 24 times, but no verse sung thrice.
LONGEST_PHRASE, MIN_REPEATS, MIN_REPEATED = 16, 6, 48
DEFAULT_SAMPLING = {"temperature": 0.7, "top_p": 0.95}  # of models that recommend nothing


@click.command(
    cls=SectionedCommand,
    short_help="Talk with a model that was trained for it.",
    context_settings={"allow_extra_args": True},  # for a message of our own
)
@partial(model_options, default="storychat")
@click.option("--system", metavar="TEXT", help="Instructions put before the session.")
@defaults_option
@sampling_options
@common_options
def chat(system: str | None, **options: Any) -> None:
    """Talk with a model, by its own chat template. The shipped one answers as people do in old children's books; its
    --system text is a scene: "The old king sat by the fire." To begin: "Shall we go into the forest?"

    /reset forgets the conversation, /exit or Ctrl-D leaves, Ctrl-C stops an answer. With --json each line of
    standard input is a message (plain text, or {"content": "..."} for one with line ends), and each answer one line.

    Answers are sampled as the model's generation_config.json recommends, else with temperature 0.7 and top-p 0.95
    (always so with --generation-defaults plain);
    --temperature 0 is greedy. The n-th answer takes --seed + n - 1. When the context is full, the oldest turns are
    dropped; the --system text stays. An answer that repeats one phrase over and over is stopped.
    """
    if words := click.get_current_context().args:
        meant = f"name the model by --model: bitnet-ref chat --model {words[0]}"
        raise click.UsageError(meant if is_model(words[0]) else "start bitnet-ref chat, then type your message")
    name, model = options["model"], load_model(options)
    defaults = options.pop("generation_defaults")
    params = choose_params(model, select_given(options), defaults)
    session = model.chat(system, **params)
    session.how_to_reset = f"{RESET} starts a new one"
    seeds = (seed % 2**64 for seed in itertools.count(params["seed"])) if "seed" in params else iter(())
    if wants_json():
        answer_lines(session, seeds)
    else:
        say(f"[{name}, {model.backend.name}, {describe_sampling(session.params)}]")
        talk(session, seeds)


def choose_params(model: Model, given: dict[str, Any], defaults: str = "model") -> dict[str, Any]:
    """The parameters of the session: what is given, else with defaults="model" what the model recommends for sampling,
    else `DEFAULT_SAMPLING`; and a random seed."""
    from ..generation.defaults import recommended_sampling

    recommended = recommended_sampling(model) if defaults == "model" else {}
    if "temperature" not in recommended:
        recommended = DEFAULT_SAMPLING | recommended
    params = {"overflow": "truncate"} | recommended | given
    if params["temperature"]:
        params.setdefault("seed", secrets.randbits(32))
    return params


def ask(
    session: ChatSession,
    content: str,
    seed: int | None,
    on_chunk: Callable[[StreamChunk], None] | None = None,
) -> tuple[Reply, GenerationStats, list[int]]:
    """One exchange: the reply, its statistics, and the token ids of its prompt."""
    ids, stream, reply = session.prompt(content), session.stream(content, seed=seed), Reply()
    reply.follow(stream, on_chunk, repeats_itself)
    return reply, stream.stats, ids


def repeats_itself(token_ids: list[int]) -> bool:
    """Whether the last tokens are one phrase over and over, as small models end when they are greedy.

    >>> repeats_itself([7, 8, 9] + [1, 2] * 24), repeats_itself([1, 2] * 23)
    (True, False)
    """
    for period in range(1, LONGEST_PHRASE + 1):
        span = max(MIN_REPEATED, MIN_REPEATS * period)
        last = token_ids[-span:]
        if len(last) == span and last[period:] == last[:-period]:
            return True
    return False


def talk(session: ChatSession, seeds: Iterator[int]) -> None:
    """The conversation with a person.   seeds: of the answers; none for greedy ones."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - gives input() its line editing

    say(COMMANDS)
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
        if message in HELP:
            say(COMMANDS)
            continue
        if not message:
            continue
        try:
            reply, stats, _ = ask(session, message, next(seeds, None), lambda chunk: write_text(chunk.text))
        except BitNetRefError as error:
            report_error(error)
            continue
        write_text("\n")
        say_dropped(stats)
        remarks = {
            "interrupted": "stopped",
            "length": describe_cut(session, reply),
            "filtered": "[filtered]",
            "repetition": "[stopped: it says the same again and again]",
        }
        if (remark := remarks.get(reply.finish_reason or "")) is not None:
            say(remark)


def describe_cut(session: ChatSession, reply: Reply) -> str:
    """Why an answer has finish_reason "length"."""
    from ..generation.chat import DEFAULT_REPLY_TOKENS

    if session.full:
        return f"[the context is full: {RESET} starts anew]"
    asked = session.params.get("max_tokens") or DEFAULT_REPLY_TOKENS
    return "[cut: the context is full]" if len(reply.token_ids) < asked else "[cut at --max-tokens]"


def say_dropped(stats: GenerationStats) -> None:
    """Say what the model did not see of the conversation."""
    for count, what in ((stats.dropped_messages, "message"), (stats.dropped_tokens, "token")):
        if count:
            say(f"[the oldest {what if count == 1 else count_of(count, what)} dropped: the context is full]")


def answer_lines(session: ChatSession, seeds: Iterator[int]) -> None:
    """The conversation with a program: each line in is a message, each line out an object, with its seed if sampled.

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
        seed = next(seeds, None)
        try:
            reply, stats, ids = ask(session, message, seed)
        except BitNetRefError as error:
            code = report_error(error)
            continue
        print_json(reply.facts(ids, stats) | ({} if seed is None else {"seed": seed}))
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
