"""`bitnet-ref generate`: continue a prompt, streaming; and the loop that chat also uses."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any, NoReturn, cast

import click

from ..errors import GenerationError, TokenizerError, count_of
from ..system.memory import peak_memory_bytes
from .generation_options import (
    defaults_option,
    is_model,
    load_model,
    model_options,
    sampling_options,
    select_given,
    several_options,
)
from .shell import (
    SectionedCommand,
    common_options,
    console,
    paint,
    print_json,
    say,
    size_in_words,
    wants_json,
    write_text,
)
from .signals import INTERRUPTED

if TYPE_CHECKING:
    from ..api import Model
    from ..generation import Generation, GenerationStats, StreamChunk, TokenStream


WITH_BEAMS = ("repetition_penalty", "bad_words", "logit_bias")  # of what a model recommends
SHOWN = ("temperature", "top_k", "top_p", "min_p", "typical_p", "repetition_penalty", "seed")


@click.command(
    cls=SectionedCommand,
    short_help="Continue a text, and show it as it comes.",
    context_settings={"allow_extra_args": True},  # for a message of our own
)
@click.argument("prompt", metavar="PROMPT", required=False)
@model_options
@defaults_option
@sampling_options
@several_options
@click.option("--profile", is_flag=True, help="Show on standard error where the time went.")
@click.option("--raw-ids", is_flag=True, help='PROMPT is token ids ("1 3797 537"), and so is the output.')
@common_options
def generate(prompt: str | None, raw_ids: bool, profile: bool, **options: Any) -> None:
    """Continue PROMPT and show the text as it comes; "-" reads the prompt from standard input.

    On a terminal the prompt is shown before its continuation; a pipe gets the continuation alone. Speed and memory
    go to standard error. With -n and --num-beams nothing shows before the end; several texts come with a line between.

    Without --temperature the text is sampled as the model's generation_config.json recommends, and is greedy where that
    says nothing. The line of figures names what was taken. Then the seed is 0 unless --seed gives another one, so that
    the command gives the same text again.
    """
    if prompt is None:
        raise click.UsageError("Missing argument 'PROMPT': give a text in quotes, or \"-\" to read standard input.")
    if more_words := click.get_current_context().args:
        refuse_words([prompt, *more_words])
    if prompt == "-":
        prompt = read_stdin()
    ids = parse_ids(prompt) if raw_ids else None
    model = load_model(options)
    ids = encode(model, prompt) if ids is None else ids
    defaults = options.pop("generation_defaults")
    params = choose_sampling(model, select_given(options), defaults)
    with show_profile(model) if profile else nullcontext():
        if params.get("n", 1) > 1 or params.get("num_beams", 1) > 1:
            show_several(model, ids, params, raw_ids)
        else:
            show_text(model, prompt, ids, params, raw_ids)


def refuse_words(words: list[str]) -> NoReturn:
    """Raise UsageError for a text without quotes, or with a model before or behind it as other programs take it."""
    named = next((word for word in (words[0], words[-1]) if is_model(word)), None)
    text = " ".join(word for word in words if word != named)
    if named is not None and text:
        raise click.UsageError(f'name the model by --model: bitnet-ref generate --model {named} "{text}"')
    raise click.UsageError(f'put the prompt in quotes: bitnet-ref generate "{" ".join(words)}"')


def choose_sampling(model: Model, given: dict[str, Any], defaults: str) -> dict[str, Any]:
    """The parameters of a text: what is given, and for the rest with defaults="model" what the model recommends.

    The seed is then 0 where none is given. Beams are not sampled.
    """
    from ..generation.defaults import recommended_sampling

    if defaults == "plain":
        return given
    recommended = recommended_sampling(model)
    if given.get("num_beams", 1) > 1:
        recommended = {name: recommended[name] for name in recommended if name in WITH_BEAMS}
    if recommended.get("temperature") and "temperature" not in given:
        recommended["seed"] = 0
    return recommended | given


def describe_sampling(params: Mapping[str, Any]) -> str:
    """ "temperature 0.8, top-k 40, seed 7", or "greedy" """
    if not params.get("temperature"):
        return "greedy"
    return ", ".join(f"{name.replace('_', '-')} {params[name]}" for name in SHOWN if name in params)


def sampling_facts(params: Mapping[str, Any]) -> dict[str, Any]:
    """For --json: how a sampled text was sampled."""
    return {"sampling": {name: params[name] for name in SHOWN if name in params}} if params.get("temperature") else {}


def show_text(model: Model, prompt: str, ids: list[int], params: dict[str, Any], raw_ids: bool) -> None:
    reply, echoed = Reply(), ""
    shows_prompt = sys.stdout.isatty() and not (wants_json() or raw_ids or params.get("echo"))
    stream = model.stream(ids, **params | {"echo": True} if shows_prompt else params)
    if wants_json():
        reply.follow(stream)
        print_json(reply.facts(ids, stream.stats) | sampling_facts(params))
    elif raw_ids:
        reply.follow(stream, lambda chunk: write_text(f"{chunk.token_id} "))
    else:
        if shows_prompt:  # as it was given; the echo, which keeps the space behind it, is cut off again
            click.echo(paint(prompt, sys.stdout, dim=True), nl=False)
            echoed = model.tokenizer.decode(ids)

        def show_chunk(chunk: StreamChunk) -> None:
            is_first = len(reply.chunks) == 1
            write_text(chunk.text.removeprefix(echoed) if is_first else chunk.text)

        reply.follow(stream, show_chunk)
    if not wants_json():
        write_text("\n")
        say_stats(stream.stats, params)
    if reply.finish_reason == "interrupted":
        raise click.exceptions.Exit(INTERRUPTED)


@contextmanager
def show_profile(model: Model) -> Iterator[None]:
    """Show on stderr where the time of the `with` block went, also when it is interrupted."""
    profile = model.profile()
    try:
        with profile:
            yield
    finally:
        console(sys.stderr).print(profile.table())


def show_several(model: Model, ids: list[int], params: dict[str, Any], raw_ids: bool) -> None:
    result = model.generate(ids, **params)
    outs = cast("list[Generation]", result if isinstance(result, list) else [result])
    stats = outs[0].stats
    if wants_json():
        facts = {"choices": [*map(choice_facts, outs)], "prompt_token_ids": ids, "stats": stats_facts(stats)}
        print_json(facts | sampling_facts(params))
        return
    for number, out in enumerate(outs):
        if number:
            click.echo(paint("---", sys.stdout, dim=True))
        write_text((" ".join(map(str, out.token_ids)) if raw_ids else out.text) + "\n")
    say_stats(stats, params)


def choice_facts(out: Generation) -> dict[str, Any]:
    """One of several texts, for --json: its fields without those that are None, or empty."""
    facts = {each.name: getattr(out, each.name) for each in fields(out)}
    facts |= {"overflows": [asdict(overflow) for overflow in out.overflows] or None}
    given_once = ("prompt_token_ids", "stats")
    return {name: value for name, value in facts.items() if value is not None and name not in given_once}


def encode(model: Model, prompt: str) -> list[int]:
    try:
        tokenizer = model.tokenizer
    except TokenizerError as error:
        error.message += "; with --raw-ids the prompt can be token ids"
        raise
    return tokenizer.encode(prompt)


@dataclass
class Reply:
    """The text of a stream so far. Ctrl-C ends the stream and keeps the text."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    chunks: list[StreamChunk] = field(default_factory=list)

    def follow(
        self,
        stream: TokenStream,
        on_chunk: Callable[[StreamChunk], None] | None = None,
        repeats: Callable[[list[int]], bool] = lambda token_ids: False,
    ) -> None:
        """repeats: whether these token ids repeat themselves without end; the stream then ends."""
        try:
            for chunk in stream:
                self.text += chunk.text
                self.token_ids.append(chunk.token_id)
                self.chunks.append(chunk)
                self.finish_reason, self.stop_reason = chunk.finish_reason, chunk.stop_reason
                if on_chunk is not None:
                    on_chunk(chunk)
                if chunk.finish_reason is None and repeats(self.token_ids):
                    self.finish_reason = "repetition"
                    break
        except KeyboardInterrupt:
            self.finish_reason = "interrupted"
        finally:
            stream.close()

    def facts(self, prompt_token_ids: list[int], stats: GenerationStats) -> dict[str, Any]:
        from ..generation import Overflow

        tops, overflows = [chunk.top_logprobs for chunk in self.chunks], Overflow.of(self.chunks)
        return {
            **{name: value for name, value in vars(self).items() if name != "chunks"},
            "logprobs": [chunk.logprob for chunk in self.chunks],
            "prompt_token_ids": prompt_token_ids,
            "stats": stats_facts(stats),
            **({"top_logprobs": tops} if any(top is not None for top in tops) else {}),
            **({"overflows": [asdict(overflow) for overflow in overflows]} if overflows else {}),
        }


def stats_facts(stats: GenerationStats) -> dict[str, Any]:
    speeds = {name: getattr(stats, name) for name in ("prompt_tokens_per_s", "generated_tokens_per_s")}
    return {**asdict(stats), **speeds, "peak_memory_bytes": peak_memory_bytes()}


def say_stats(stats: GenerationStats, params: Mapping[str, Any] | None = None) -> None:
    """Backend, speeds, memory and how the text was sampled: one line on stderr."""
    prompt = count_of(stats.prompt_tokens, "prompt token")
    parts = [f"{prompt} at {stats.prompt_tokens_per_s:.1f} tok/s"] if stats.prefill_s else []
    new = count_of(stats.generated_tokens, "new token")
    parts.append(f"{new} at {stats.generated_tokens_per_s:.1f} tok/s" if stats.decode_tokens else new)
    if stats.cache_dtype not in ("float32", "float64"):
        parts.append(f"{stats.cache_dtype} cache of {size_in_words(stats.cache_bytes_per_token)} per token")
    if stats.dropped_tokens:
        recomputed = f", {stats.recomputed_tokens} computed again" if stats.recomputed_tokens else ""
        parts.append(f"{count_of(stats.dropped_tokens, 'oldest token')} dropped{recomputed}")
    parts.append(f"peak memory {size_in_words(peak_memory_bytes())}")
    if params and params.get("temperature"):
        parts.append(describe_sampling(params))
    say(f"[{stats.backend}] {', '.join(parts)}")


def read_stdin() -> str:
    """All of standard input, without the last line end."""
    data = sys.stdin.buffer.read()
    try:
        return data.decode("utf-8").removesuffix("\n").removesuffix("\r")
    except UnicodeDecodeError as problem:
        place = f"{problem.reason} at byte {problem.start}"
        raise GenerationError(f"standard input is not UTF-8 text: {place}") from problem


def parse_ids(text: str) -> list[int]:
    """ "1 3797 537" or "[1, 3797, 537]" -> [1, 3797, 537]"""
    words = text.strip().removeprefix("[").removesuffix("]").replace(",", " ").split()
    for word in words or [text]:
        if not (word.isascii() and word.isdecimal() and len(word) < 10):
            raise GenerationError(f"--raw-ids: expected token ids like 1 3797 537, got {word[:40]!r}")
    return [int(word) for word in words]
