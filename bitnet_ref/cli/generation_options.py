"""Options that several commands have: the model, how to read it, and the parameters of `SamplingParams`."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..backends import HEADS, NAMES
from ..backends.paged_cache import CACHE_DTYPES
from ..errors import FormatError
from ..system.json_file import read_bounded
from .shell import AnyFunction, LoadingBar, SectionOption, say

if TYPE_CHECKING:
    from ..api import Model
    from ..system.workers import Opener, Workers

DTYPES = ("float32", "float64", "float16", "bfloat16")
DTYPE_HELP = "Computing in: float64 needs numpy, 16 bits need cupy.  [default: float32]"
HEAD_HELP = "Find tokens by int8 bounds on the logits (the same tokens), or compute all logits."
CACHE_HELP = "Stored keys and values: narrow dtypes change the logits (bench cache).  [default: --dtype]"
OVERFLOW = ("error", "truncate", "sliding", "sinks")  # generation.overflow.POLICIES, which --help need not import
SPECULATE_HELP = "Verify guesses together: of earlier text, or of a smaller model.  [default: off]"
TEMPERATURE_HELP = "0 takes the most likely token.  [default: 0 (chat: as the model recommends)]"
OVERFLOW_HELP = "Beyond the context: refuse, cut the prompt (chat: drop the oldest turns), or drop the oldest tokens.  "
OVERFLOW_HELP += "[default: error (chat: truncate)]"
GPU_LAYERS_HELP = "Layers on GPUs, or all; the CPU has the rest.  [default: as many as fit]"
LOAD_OPTIONS = (
    *("model", "backend", "threads", "dtype", "cache_dtype", "head", "prepared", "allow_unquantized"),
    *("devices", "gpu_layers", "memory_limit", "rotation", "dense"),
)
MAX_TEXT_BYTES = 64 << 20  # of @FILE
INPUT_FILE = click.Path(path_type=Path, exists=True, dir_okay=False)
EARLY: dict[str, bool | str] = {"true": True, "false": False, "never": "never"}
ROTATION_HELP = "Matrices in a Hadamard basis: run them as stored, or fold it into dense ones."
DENSE_HELP = "Dense weights: as stored, or in int8, which changes the logits (crossval precision)."
rotations = click.Choice(("stored", "folded"))  # formats.checkpoint.ROTATIONS, which --help need not import
rotation_option = partial(
    click.option, "--rotation", type=rotations, default="stored", show_default=True, help=ROTATION_HELP
)
dense_option = partial(
    click.option, "--dense", type=click.Choice(("stored", "int8")), default="stored", show_default=True, help=DENSE_HELP
)
dtype_option = partial(click.option, "--dtype", type=click.Choice(DTYPES), default="float32", help=DTYPE_HELP)


def section(title: str) -> Callable[..., Any]:
    return partial(click.option, cls=SectionOption, section=title)


def apply_options(function: AnyFunction, options: Sequence[Callable[[AnyFunction], AnyFunction]]) -> AnyFunction:
    """Add options in the order in which --help shows them."""
    for option in reversed(options):
        function = option(function)
    return function


def model_options(function: AnyFunction, default: str = "storyteller") -> AnyFunction:
    """The parameters of `bitnet_ref.load`."""
    option = section("Model")("--model", default=default, show_default=True, help="Shipped model, folder, or file.")
    return option(loading_options(function))


def loading_options(function: AnyFunction) -> AnyFunction:
    """The parameters of `bitnet_ref.load` but the model itself."""
    option = section("Model")
    options = [
        option("--backend", type=click.Choice(("auto", *NAMES)), default="auto", show_default=True),
        option("--threads", type=click.IntRange(min=1), help="CPU threads.  [default: one per core]"),
        dtype_option(cls=SectionOption, section="Model"),
        option("--cache-dtype", type=click.Choice(CACHE_DTYPES), help=CACHE_HELP),
        option("--head", type=click.Choice(HEADS), default="auto", show_default=True, help=HEAD_HELP),
        option("--prepared", is_flag=True, help="Store the weights as computed beside the model; read them next time."),
        option("--devices", metavar="N,N", callback=read_numbers, help="GPUs that share the layers.  [default: 0]"),
        option("--gpu-layers", metavar="N", callback=_read_layers, help=GPU_LAYERS_HELP),
        option("--memory-limit", metavar="BYTES", help="Of each GPU's memory, like 8GiB.  [default: what is free]"),
        rotation_option(cls=SectionOption, section="Model"),
        dense_option(cls=SectionOption, section="Model"),
        option("--allow-unquantized", is_flag=True, help="Accept a bitnet model without quantization_config."),
    ]
    return apply_options(function, options)


def layout_options(function: AnyFunction) -> AnyFunction:
    """What a GGUF may not say about itself: parameters of `ReadOptions`."""
    layouts = click.Choice(("x86", "arm", "interleaved"))
    options = [
        click.option("--i2s-layout", "i2_s_layout", type=layouts, help="The layout of a GGUF's I2_S tensors."),
        click.option("--tl-tiles", type=INPUT_FILE, help="The kernel_config.ini of a GGUF's TL1 or TL2 tensors."),
        rotation_option(),
    ]
    return apply_options(function, options)


def sampling_options(function: AnyFunction) -> AnyFunction:
    """The parameters of one text. `SamplingParams` has the defaults of those that are not given."""
    end, choice, text = section("Length and end"), section("Choice of tokens"), section("What may be said")
    many = partial(text, multiple=True, metavar="TEXT")
    options = [
        end("--max-tokens", type=int, help="Maximum of new tokens.  [default: 64 (chat: 512), or what fits]"),
        end("--min-tokens", type=int, help="Do not end before so many tokens.  [default: 0]"),
        end("--stop", multiple=True, metavar="TEXT", help="End before this text. May be repeated."),
        end("--stop-token-id", "stop_token_ids", multiple=True, type=int, help="End at this token. May be repeated."),
        end("--ignore-eos", is_flag=True, help="Continue after the model's end tokens."),
        end("--overflow", type=click.Choice(OVERFLOW), help=OVERFLOW_HELP),
        end("--window", type=int, help="Tokens that the model sees at a time.  [default: its context]"),
        end("--sink-tokens", type=int, help="First tokens that --overflow sinks keeps.  [default: 4]"),
        choice("--temperature", type=float, help=TEMPERATURE_HELP),
        choice("--top-k", type=int, help="Sample among the k most likely tokens.  [default: no limit]"),
        choice("--top-p", type=float, help="Sample among the most likely tokens that reach p.  [default: 1]"),
        choice("--min-p", type=float, help="Exclude tokens below p times the most likely one.  [default: 0]"),
        choice("--typical-p", type=float, help="Locally typical sampling, mass p.  [default: 1]"),
        choice("--repetition-penalty", type=float, help="Divides the logits of earlier tokens.  [default: 1]"),
        choice("--presence-penalty", type=float, help="Subtracted once from generated tokens' logits.  [default: 0]"),
        choice("--frequency-penalty", type=float, help="Subtracted for each time generated.  [default: 0]"),
        choice("--logit-bias", multiple=True, metavar="ID=BIAS", callback=_read_biases, help="May be repeated."),
        choice("--seed", type=int, help="The same seed gives the same text.  [default: random]"),
        choice("--speculate", metavar="lookup|MODEL", callback=_read_drafter, help=SPECULATE_HELP),
        many("--bad-word", "bad_words", help="Never generate this. May be repeated."),
        many("--filter", help="End where this is generated, and hide it. May be repeated."),
        text("--guided-json", metavar="SCHEMA", callback=_read_content, help="Match a JSON schema; @FILE reads it."),
        text("--guided-regex", metavar="REGEX", help="Match a regular expression."),
        many("--guided-choice", help="Generate one of these. May be repeated."),
        text("--guided-grammar", metavar="LARK", callback=_read_content, help="Match a Lark grammar; @FILE reads it."),
    ]
    return apply_options(function, options)


def several_options(function: AnyFunction) -> AnyFunction:
    """How many texts, and what to write about them."""
    several, output = section("Several texts"), section("Output")
    options = [
        several("-n", "--n", type=int, help="Texts for the prompt.  [default: 1]"),
        several("--num-beams", type=int, help="Beam search.  [default: 1]"),
        several("--length-penalty", type=float, help="Divide a beam's score by length to this power.  [default: 1]"),
        several("--early-stopping", type=click.Choice(tuple(EARLY)), callback=_read_early, help="When beams end."),
        output("--logprobs", type=int, metavar="K", help="With --json: ln p of the K most likely at each position."),
        output("--echo", is_flag=True, help="Begin with the prompt."),
    ]
    return apply_options(function, options)


def select_given(options: dict[str, Any]) -> dict[str, Any]:
    """The options that were given, as keyword arguments."""
    return {name: value for name, value in options.items() if value not in (None, ())}


def load_model(options: dict[str, Any]) -> Model:
    """Load the model that `model_options` describe, and remove those from `options`."""
    from ..api import load

    load_options = {name: options.pop(name) for name in LOAD_OPTIONS if name in options}
    with LoadingBar(f"loading {load_options['model']}") as bar:
        return load(load_options.pop("model"), progress=bar, **load_options)


def name_model(text: str) -> tuple[str, Path]:
    """The name and the path of "MODEL" or "NAME=MODEL"."""
    from ..formats.open import find_model

    name, _, source = text.rpartition("=") if not Path(text).exists() else ("", "", text)
    path = find_model(source)
    return name or (source if not Path(source).exists() else path.resolve().name), path


def worker_options(function: AnyFunction) -> AnyFunction:
    """Where the items of a long run are computed: see `spread`."""
    option = section("Workers (the extra dask)")
    options = [
        option("--workers", type=click.IntRange(min=1), metavar="N", help="Compute in N processes of this machine."),
        option("--dask", metavar="ADDRESS", help="Compute on a Dask scheduler's workers; trust it."),
    ]
    return apply_options(function, options)


def pop_workers(options: dict[str, Any]) -> tuple[int | None, str | None]:
    """The values of `worker_options`, removed from `options`."""
    count, address = options.pop("workers"), options.pop("dask")
    if count is not None and address is not None:
        raise click.UsageError("--workers and --dask exclude each other")
    return count, address


def spread(opener: Opener, count: int | None, address: str | None, resource: Any) -> Workers:
    """The workers that were asked for, each with what `opener` opens; or this process, which has the resource."""
    from ..system.workers import DaskWorkers, Here

    if count is None and address is None:
        return Here(resource)
    workers = DaskWorkers(opener, count, address)
    say(f"Dask's page about this run: {workers.dashboard}")
    return workers


def model_opener(options: dict[str, Any], count: int | None) -> Opener:
    """Opens the model that `loading_options` describe in a worker; the weights are mapped once for each machine."""
    chosen = {name: options[name] for name in LOAD_OPTIONS if name in options}
    if Path(chosen["model"]).exists():
        chosen["model"] = str(Path(chosen["model"]).resolve())
    if count is not None and chosen.get("threads") is None:
        from ..system.threads import resolve_threads

        chosen["threads"] = max(1, resolve_threads() // count)
    plain = {name: tuple(value) if isinstance(value, list) else value for name, value in chosen.items()}
    return load_in_worker, tuple(sorted(plain.items()))


def load_in_worker(options: tuple[tuple[str, Any], ...]) -> Model:
    """One process of a machine prepares the weights, the others wait for it, and all map them."""
    from ..api import load
    from ..formats.open import find_model
    from ..system.atomic import lock_file

    chosen = dict(options)
    path = find_model(chosen.pop("model"))
    folder = os.open(path if path.is_dir() else path.parent, os.O_RDONLY)
    try:
        lock_file(folder)
        return load(path, **{**chosen, "prepared": "mapped"})
    finally:
        os.close(folder)


def read_numbers(ctx: click.Context, param: click.Parameter, value: str | None) -> list[int] | None:
    """[1, 17, 5] of "1,17,5" or "1 17 5" """
    try:
        return None if value is None else [int(number) for number in value.replace(",", " ").split()]
    except ValueError:
        raise click.BadParameter(f"expected whole numbers like 0,1,5, got {value!r}") from None


def _read_layers(ctx: click.Context, param: click.Parameter, value: str | None) -> int | str | None:
    if value is None or value == "all":
        return value
    if not value.isdecimal():
        raise click.BadParameter(f"expected a number of layers, or all, got {value!r}")
    return int(value)


def _read_biases(ctx: click.Context, param: click.Parameter, values: tuple[str, ...]) -> dict[str, float] | None:
    biases = {}
    for value in values:
        token, _, bias = value.partition("=")
        try:
            biases[token] = float(bias)
        except ValueError:
            raise click.BadParameter(f"expected ID=BIAS like 262=-5, got {value!r}") from None
    return biases or None


def _read_drafter(ctx: click.Context, param: click.Parameter, value: str | None) -> str | Model | None:
    if value is None or value == "lookup":
        return value
    from ..api import load

    return load(value)


def _read_content(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
    return content_of(value)


def content_of(value: str | None) -> str | None:
    """A text, or with @FILE the file's content."""
    if value is None or not value.startswith("@"):
        return value
    try:
        return read_bounded(value[1:], FormatError, MAX_TEXT_BYTES).decode("utf-8")
    except (FormatError, UnicodeDecodeError) as problem:
        raise click.BadParameter(f"{value[1:]}: {getattr(problem, 'message', problem)}") from problem


def read_text(path: Path) -> str:
    """A UTF-8 file. Raises FormatError."""
    try:
        return read_bounded(path, FormatError, MAX_TEXT_BYTES).decode()
    except UnicodeDecodeError as problem:
        raise FormatError(f"is not UTF-8 text: {problem.reason}", path=path, offset=problem.start) from problem


def _read_early(ctx: click.Context, param: click.Parameter, value: str | None) -> bool | str | None:
    return None if value is None else EARLY[value]
