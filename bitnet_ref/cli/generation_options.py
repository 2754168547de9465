"""Options that several commands have: the model, how to read it, and the parameters of `SamplingParams`."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..backends.options import ComputeOptions, DeviceOptions
from ..errors import ConfigError, FormatError, GenerationError
from ..formats.checkpoint import LoadOptions
from ..generation.params import Biases, SamplingParams
from ..system.json_file import decode_text, read_bounded
from ..system.options import BYTES, FLAG, ListOf, Number, Option, Rule, declared_options
from .shell import AnyFunction, LoadingBar, SectionOption, say

if TYPE_CHECKING:
    from ..api import Model
    from ..serving.engine_config import EngineConfig
    from ..system.workers import Opener, Workers

# Parameters of `SamplingParams` that chat has not
SEVERAL = ("n", "num_beams", "length_penalty", "early_stopping", "logprobs", "echo")
READING = ("prepared", "activations", "rotation", "dense", "allow_unquantized")
LOADING = {  # the options of `load` that commands have, beside those of `layout_options`
    ComputeOptions: ("backend", "threads", "dtype", "cache_dtype", "head"),
    LoadOptions: ("adapter", *READING),
    DeviceOptions: ("devices", "gpu_layers", "memory_limit"),
}
MAX_TEXT_BYTES = 64 << 20  # of @FILE
INPUT_FILE = click.Path(path_type=Path, exists=True, dir_okay=False)


def section(title: str) -> Callable[..., Callable[[AnyFunction], AnyFunction]]:
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


def is_model(word: str) -> bool:
    """Whether a word of the command line is meant as a model: a shipped one's name, or a file or folder of weights."""
    from ..formats.open import shipped_models

    return word in shipped_models() or os.path.isdir(word) or word.endswith((".gguf", ".safetensors", ".onnx"))


def loading_options(function: AnyFunction) -> AnyFunction:
    """The parameters of `bitnet_ref.load` but the model itself."""
    return apply_options(function, [_loading(each, name) for each, names in LOADING.items() for name in names])


def reading_options(function: AnyFunction) -> AnyFunction:
    """How the weights are read and multiplied."""
    return apply_options(function, [_loading(LoadOptions, name) for name in READING])


def _loading(declaration: type, name: str) -> Callable[..., Any]:
    attributes = {"default": declared_options(declaration)[name].default}
    if name == "threads":
        attributes["type"] = click.IntRange(min=1)
    return declared_option(declaration, name, section="Model", **attributes)


def layout_options(function: AnyFunction) -> AnyFunction:
    """What a GGUF may not say about itself: parameters of `LoadOptions`."""
    options = [
        declared_option(LoadOptions, "i2_s_layout"),
        declared_option(LoadOptions, "tl_tiles", type=INPUT_FILE),
        declared_option(LoadOptions, "activations", default="auto"),
        declared_option(LoadOptions, "rotation", default="stored"),
    ]
    return apply_options(function, options)


def sampling_options(function: AnyFunction) -> AnyFunction:
    """The parameters of one text. `SamplingParams` has the defaults of those that are not given."""
    declared = declared_options(SamplingParams)
    return _sampling(function, [name for name, each in declared.items() if each.in_shell and name not in SEVERAL])


def defaults_option(function: AnyFunction) -> AnyFunction:
    """Whether the model's own sampling is taken for what is not given."""
    return section("Model")(
        "--generation-defaults",
        type=click.Choice(["model", "plain"]),
        default="model",
        show_default=True,
        help="Where you say nothing of sampling: as the model's generation_config.json recommends, or not.",
    )(function)


def several_options(function: AnyFunction) -> AnyFunction:
    """How many texts, and what to write about them."""
    return _sampling(function, SEVERAL)


def _sampling(function: AnyFunction, names: Sequence[str]) -> AnyFunction:
    declared = declared_options(SamplingParams)
    return apply_options(function, [declared_option(SamplingParams, name, declared[name].section) for name in names])


def declared_option(declaration: type, name: str, section: str = "Options", **attributes: Any) -> Callable[..., Any]:
    """The decorator that adds an option to a command. attributes: of `click.option`, in place of the declared ones.

    Without `default` among them, an option that is not given is None or empty.
    """
    declared = declared_options(declaration)[name]
    flags = [declared.flag or f"--{name.replace('_', '-')}"]
    if not flags[0].startswith("--"):
        flags.append(f"--{name}")
    settings: dict[str, Any] = {"callback": PARSERS[name]} if name in PARSERS else _click_type(declared)
    settings["multiple"] = isinstance(declared.rule, ListOf | Biases)
    settings["metavar"] = declared.metavar
    settings["help"] = declared.short_help
    if settings["multiple"]:
        settings["help"] += " May be repeated."
    if PARSERS.get(name) is _read_content:
        settings["help"] += " @FILE reads it."
    if declared.default_text:
        settings["help"] += f"  [default: {declared.default_text}]"
    settings |= attributes
    return click.option(*flags, name, cls=SectionOption, section=section, **settings)


dense_option = partial(declared_option, LoadOptions, "dense", default="stored")


def _click_type(declared: Option) -> dict[str, Any]:
    """What `click.option` is told of the values."""
    rule, values = declared.rule, declared.rule.schema().get("enum")
    if declared.is_flag or rule is FLAG:
        return {"is_flag": True}
    if values is not None:
        texts = {str(value).lower() if isinstance(value, bool) else value: value for value in values[:-1]}
        return {"type": click.Choice(list(texts)), "callback": lambda ctx, param, text: texts.get(text, text)}
    number = rule.item if isinstance(rule, ListOf) else rule
    return {"type": (int if number.whole else float) if isinstance(number, Number) else str}


def select_given(options: dict[str, Any]) -> dict[str, Any]:
    """The options that were given, as keyword arguments."""
    return {name: value for name, value in options.items() if value not in (None, ())}


def load_model(options: dict[str, Any]) -> Model:
    """Load the model that `model_options` describe, and remove those from `options`."""
    from ..api import load

    load_options = {name: options.pop(name) for name in ("model", *chain(*LOADING.values())) if name in options}
    with LoadingBar(f"loading {load_options['model']}") as bar:
        return load(load_options.pop("model"), progress=bar, **load_options)


def server_config(path: Path | None, **chosen: Any) -> EngineConfig:
    """The engine's settings of `serve` and `batch`, which take the model's own sampling unless told otherwise.

    chosen: by options of the command; None is not chosen. Raises ConfigError.
    """
    from ..serving.engine_config import EngineConfig

    config = EngineConfig.load(path, **{name: value for name, value in chosen.items() if value is not None})
    if config.sampling.get("num_beams", 1) > 1:
        message = "is a request's own: leave it out, and send use_beam_search and n"
        raise ConfigError(message, field="sampling.num_beams")
    return replace(config, generation_defaults=config.generation_defaults or "model")


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
    chosen = {name: options[name] for name in ("model", *chain(*LOADING.values())) if name in options}
    for name in ("model", "adapter"):  # a worker may run in another folder
        if chosen.get(name) not in (None, "none") and Path(chosen[name]).exists():
            chosen[name] = str(Path(chosen[name]).resolve())
    if count is not None and chosen.get("threads") is None:
        from ..system.threads import resolve_threads

        chosen["threads"] = max(1, resolve_threads() // count)
    plain = {name: tuple(value) if isinstance(value, list) else value for name, value in chosen.items()}
    return load_in_worker, tuple(sorted(plain.items()))


def load_in_worker(options: tuple[tuple[str, Any], ...]) -> Model:
    """One process of a machine prepares the weights, the others wait for it, and all map them. With an adapter on, each
    reads its own."""
    from ..api import load
    from ..formats.hf.adapter import find_adapter
    from ..formats.open import find_model
    from ..system.atomic import lock_file

    chosen = dict(options)
    path = find_model(chosen.pop("model"))
    if find_adapter(path, chosen.get("adapter"))[1] is None:
        chosen["prepared"] = "mapped"
    folder = os.open(path if path.is_dir() else path.parent, os.O_RDONLY)
    try:
        lock_file(folder)
        return load(path, **chosen)
    finally:
        os.close(folder)


def read_numbers(ctx: click.Context, param: click.Parameter, value: str | None) -> list[int] | None:
    """[1, 17, 5] of "1,17,5" or "1 17 5" """
    try:
        return None if value is None else [int(number) for number in value.replace(",", " ").split()]
    except ValueError:
        raise click.BadParameter(f"expected whole numbers like 0,1,5, got {value!r}") from None


def read_by(rule: Rule) -> Callable[[click.Context, click.Parameter, Any], Any]:
    """A callback that reads a value by its rule. (`click.FloatRange` lets NaN through.)"""

    def read(ctx: click.Context, param: click.Parameter, value: Any) -> Any:
        try:
            return rule.read(value, str(param.name))
        except GenerationError as error:
            raise click.BadParameter(error.message) from None

    return read


read_bytes = read_by(BYTES)


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


lora_option = click.option(
    "--lora",
    "adapters",
    multiple=True,
    metavar="NAME=FOLDER",
    help="A LoRA adapter, asked for as model MODEL:NAME; with several models MODEL:NAME=FOLDER.",
)


def read_adapters(texts: tuple[str, ...], models: list[str]) -> dict[tuple[str, str], Path]:
    """The folders of --lora by (model, name). Raises UsageError."""
    adapters: dict[tuple[str, str], Path] = {}
    for text in texts:
        names, _, folder = text.partition("=")
        base, _, name = names.rpartition(":")
        base = base or (models[0] if len(models) == 1 else "")
        if not name or not folder or base not in models:
            expected = "NAME=FOLDER" if len(models) == 1 else f"MODEL:NAME=FOLDER with one of {', '.join(models)}"
            raise click.UsageError(f"--lora: expected {expected}, got {text!r}")
        if (base, name) in adapters or f"{base}:{name}" in models:
            raise click.UsageError(f"--lora: {base}:{name} would be the name of two models")
        adapters[base, name] = Path(folder)
    return adapters


def content_of(value: str | None) -> str | None:
    """A text, or with @FILE the file's content."""
    if value is None or not value.startswith("@"):
        return value
    try:
        return read_text(Path(value[1:])).removeprefix("\ufeff")
    except FormatError as problem:
        raise click.BadParameter(f"{value[1:]}: {problem.message}") from problem


def read_template(value: str | None) -> str | None:
    """The source of --chat-template. Raises TokenizerError for one that is no template."""
    from ..tokenizers.templates.chat_template import ChatTemplate

    source = content_of(value)
    if value is not None and source is not None:
        ChatTemplate(source, path=value[1:] if value.startswith("@") else None)
    return source


def read_text(path: Path) -> str:
    """A UTF-8 file. Raises FormatError."""
    return decode_text(read_bounded(path, FormatError, MAX_TEXT_BYTES), FormatError, path)


# Options whose text means something else, by name
PARSERS: dict[str, Callable[..., Any]] = {
    "devices": read_numbers,
    "gpu_layers": _read_layers,
    "memory_limit": read_bytes,
    "logit_bias": _read_biases,
    "speculate": _read_drafter,
    "guided_json": _read_content,
    "guided_grammar": _read_content,
}
