"""The options of `generate` and `chat`: which model, and the parameters of `SamplingParams`, which checks them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import click

from ..backends import HEADS, NAMES
from ..backends.cache_dtypes import CACHE_DTYPES
from .shell import AnyFunction, SectionOption

HEAD_HELP = "Find tokens by int8 bounds on the logits (the same tokens), or compute all logits."
CACHE_HELP = "How keys and values are kept: the narrow ones change the logits (bench cache).  [default: --dtype]"
OVERFLOW = ("error", "truncate", "sliding", "sinks")  # generation.overflow.POLICIES, which --help need not import
OVERFLOW_HELP = "Beyond the context: refuse, cut the prompt, or go on without the oldest tokens.  [default: error]"
GPU_LAYERS_HELP = "Layers that cards compute, or all; the CPU has the rest.  [default: as many as fit]"
LOAD_OPTIONS = (
    *("model", "backend", "threads", "dtype", "cache_dtype", "head", "prepared", "allow_unquantized"),
    *("devices", "gpu_layers", "memory_limit"),
)
EARLY: dict[str, bool | str] = {"true": True, "false": False, "never": "never"}


def section(title: str) -> Callable[..., Any]:
    """`click.option` under a title of --help."""
    return partial(click.option, cls=SectionOption, section=title)


def apply_options(function: AnyFunction, options: list[Callable[[AnyFunction], AnyFunction]]) -> AnyFunction:
    """In the order in which --help shows them."""
    for option in reversed(options):
        function = option(function)
    return function


def model_options(function: AnyFunction) -> AnyFunction:
    """Which model, computed by what: the parameters of `bitnet_ref.load`."""
    option = section("Model")
    options = [
        option("--model", default="storyteller", show_default=True, help="Shipped model, folder, or file."),
        option("--backend", type=click.Choice(("auto", *NAMES)), default="auto", show_default=True),
        option("--threads", type=click.IntRange(min=1), help="CPU threads.  [default: one a core]"),
        option("--dtype", type=click.Choice(("float32", "float64")), default="float32", show_default=True),
        option("--cache-dtype", type=click.Choice(CACHE_DTYPES), help=CACHE_HELP),
        option("--head", type=click.Choice(HEADS), default="auto", show_default=True, help=HEAD_HELP),
        option("--prepared", is_flag=True, help="Keep the weights as computed beside the model; map them next time."),
        option("--devices", metavar="N,N", callback=_numbers, help="Cards that share the layers.  [default: 0]"),
        option("--gpu-layers", metavar="N", callback=_count, help=GPU_LAYERS_HELP),
        option("--memory-limit", metavar="BYTES", help="Of each card's memory, like 8GiB.  [default: what is free]"),
        option("--allow-unquantized", is_flag=True, help="Take a bitnet model that names no quantisation."),
    ]
    return apply_options(function, options)


def sampling_options(function: AnyFunction) -> AnyFunction:
    """One text: how long, how to choose tokens, what may be said. What is not given is left to `SamplingParams`."""
    end, choice, text = section("Length and end"), section("Choice of tokens"), section("What may be said")
    options = [
        end("--max-tokens", type=int, help="New tokens at most.  [default: 64 (chat: 512), or what fits]"),
        end("--min-tokens", type=int, help="No end before so many.  [default: 0]"),
        end("--stop", multiple=True, metavar="TEXT", help="End before this text. May be given again."),
        end(
            "--stop-token-id", "stop_token_ids", multiple=True, type=int, help="End at this token. May be given again."
        ),
        end("--ignore-eos", is_flag=True, help="Go on after the model's end tokens."),
        end("--overflow", type=click.Choice(OVERFLOW), help=OVERFLOW_HELP),
        end("--window", type=int, help="Tokens that the model sees at a time.  [default: its context]"),
        end("--sink-tokens", type=int, help="First tokens that --overflow sinks keeps.  [default: 4]"),
        choice("--temperature", type=float, help="0 takes the likeliest token.  [default: 0]"),
        choice("--top-k", type=int, help="Sample among the k likeliest.  [default: no limit]"),
        choice("--top-p", type=float, help="Sample among the likeliest that reach p.  [default: 1]"),
        choice("--min-p", type=float, help="Leave out what is less likely than p times the likeliest.  [default: 0]"),
        choice("--typical-p", type=float, help="Locally typical sampling, mass p.  [default: 1]"),
        choice("--repetition-penalty", type=float, help="Divides the logits of tokens so far.  [default: 1]"),
        choice("--presence-penalty", type=float, help="Taken off the logits of generated tokens.  [default: 0]"),
        choice("--frequency-penalty", type=float, help="The same for each time generated.  [default: 0]"),
        choice("--logit-bias", multiple=True, metavar="ID=BIAS", callback=_biases, help="May be given again."),
        choice("--seed", type=int, help="Same seed, same text.  [default: random]"),
        text("--bad-word", "bad_words", multiple=True, metavar="TEXT", help="Never say this. May be given again."),
        text(
            "--filter", multiple=True, metavar="TEXT", help="End, and hide it, where this is said. May be given again."
        ),
        text("--guided-json", metavar="SCHEMA", callback=_content, help="Match a JSON schema; @FILE reads it."),
        text("--guided-regex", metavar="REGEX", help="Match a regular expression."),
        text("--guided-choice", multiple=True, metavar="TEXT", help="Say one of these. May be given again."),
        text("--guided-grammar", metavar="LARK", callback=_content, help="Match a Lark grammar; @FILE reads it."),
    ]
    return apply_options(function, options)


def several_options(function: AnyFunction) -> AnyFunction:
    """Several texts, and what to tell of them."""
    several, output = section("Several texts"), section("Output")
    options = [
        several("-n", "--n", type=int, help="Texts for the prompt.  [default: 1]"),
        several("--num-beams", type=int, help="Beam search.  [default: 1]"),
        several("--length-penalty", type=float, help="A beam's score is divided by length to this.  [default: 1]"),
        several("--early-stopping", type=click.Choice(tuple(EARLY)), callback=_early, help="When beams are enough."),
        output("--logprobs", type=int, metavar="K", help="With --json: ln p of the K likeliest at each place."),
        output("--echo", is_flag=True, help="Begin with the prompt."),
    ]
    return apply_options(function, options)


def given_only(options: dict[str, Any]) -> dict[str, Any]:
    """The options that were given, as keyword arguments."""
    return {name: value for name, value in options.items() if value not in (None, ())}


def _numbers(ctx: click.Context, param: click.Parameter, value: str | None) -> list[int] | None:
    try:
        return None if value is None else [int(number) for number in value.split(",")]
    except ValueError:
        raise click.BadParameter(f"expected numbers of cards like 0,1, got {value!r}") from None


def _count(ctx: click.Context, param: click.Parameter, value: str | None) -> int | str | None:
    if value in (None, "all"):
        return value
    if not value.isdecimal():
        raise click.BadParameter(f"expected a number of layers, or all, got {value!r}")
    return int(value)


def _biases(ctx: click.Context, param: click.Parameter, values: tuple[str, ...]) -> dict[str, float] | None:
    biases = {}
    for value in values:
        token, _, bias = value.partition("=")
        try:
            biases[token] = float(bias)
        except ValueError:
            raise click.BadParameter(f"expected ID=BIAS like 262=-5, got {value!r}") from None
    return biases or None


def _content(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
    return content_of(value)


def content_of(value: str | None) -> str | None:
    """A text that is given as it is, or as the file that @FILE names."""
    if value is None or not value.startswith("@"):
        return value
    try:
        return Path(value[1:]).read_text(encoding="utf-8")
    except (OSError, ValueError) as problem:
        raise click.BadParameter(f"{value[1:]}: {problem}") from problem


def _early(ctx: click.Context, param: click.Parameter, value: str | None) -> bool | str | None:
    return None if value is None else EARLY[value]
