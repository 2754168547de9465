"""`EngineConfig`: every setting of the engine, checked; from arguments, the environment and a TOML file."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypedDict, Unpack

from ..backends import NAMES
from ..backends.loaded import LoadedModel
from ..backends.options import ComputeOptions, DeviceOptions
from ..errors import ConfigError, GenerationError
from ..generation.defaults import recommended_sampling
from ..generation.params import ALIASES, GUIDES, SamplingParams
from ..system.json_file import read_toml
from ..system.options import (
    BYTES,
    FLAG,
    LONGEST_S,
    ListOf,
    Number,
    Values,
    choice,
    option,
    read_options,
    reuse_option,
    suggest,
)

PREFIX = "BITNET_REF_ENGINE_"


class EngineOptions(TypedDict, total=False):
    """What a caller may give for `EngineConfig`, for type checkers and editors; a test compares the two."""

    max_batch: int
    max_batch_tokens: int
    max_wait_s: float
    max_queue: int
    request_timeout_s: float | None
    priority_wait_s: float
    max_unread: int
    page_size: int
    cache_tokens: int | None
    cache_bytes: int | None
    cache_dtype: str | None
    prefix_sharing: bool
    memory_limit: int | None
    backend: str
    dtype: str
    fallback: str | Sequence[str]
    devices: Sequence[int] | None
    gpu_layers: int | str | None
    sampling: Mapping[str, Any]
    generation_defaults: str | None
    timeline_steps: int
    replicas: int


BACKENDS = ("auto", *NAMES)
SAMPLING = Values(lambda value: isinstance(value, Mapping), "a table of generation parameters")


@dataclass(frozen=True)
class EngineConfig:
    """The settings of an `Engine`. Raises ConfigError.

    Batching:
    max_batch: Sequences that run at a time, and the maximum `n` of a request.
    max_batch_tokens: Tokens per step; prompts get those that decoding leaves. It bounds the duration of a step, and so
        how long a long prompt delays the other requests.
    max_wait_s: When a request meets an idle engine, wait this long for others, up to max_batch. 0 starts at once.

    Admission and order:
    max_queue: Sequences that may wait, `n` of each request; one more is refused (QueueFull).
    request_timeout_s: A request that is not finished by then fails (RequestTimeout); None: never.
    priority_wait_s: One level of priority goes before requests that came up to this many seconds earlier.
    max_unread: Chunks of a stream that its reader may leave unread. Then the sequence pauses, and others get its place
        and, if they need them, its pages; it continues when half of the chunks are read.

    Memory:
    page_size: Tokens in a page of the cache.
    cache_tokens: Tokens that the cache holds, of all sequences together. By default what max_batch sequences of full
        length need, at most a quarter of the free memory, of all replicas together.
    cache_bytes: Bytes of the cache of each replica, in place of cache_tokens. What some models (Qwen3.5) have of a
        sequence beside keys and values is part of it; where that is too much, fewer than max_batch run at a time.
    cache_dtype: Of keys and values, as in `load`; None is the model's own. Texts equal those of a model loaded with it.
    prefix_sharing: Whether common beginnings of prompts are computed once. The texts are the same either way.
    memory_limit: Bytes that the process may hold, or the model on a card; the cache takes at most what is left.

    Device (for `bitnet_ref.load_engine`):
    backend: As in `load`.
    dtype: As in `load`.
    fallback: Backends to try, in order, when that one is not available here, has not enough memory, or fails later
        (DeviceError) and cannot be opened again.
    devices: As in `load`.
    gpu_layers: As in `load`; room for `cache_tokens` is left on the cards.

    Other:
    sampling: Defaults of `SamplingParams` for all requests.
    generation_defaults: "model" takes the model's own sampling (generation_config.json) for what neither a request nor
        `sampling` says, "plain" takes none. By default plain in Python, model in the shell's serve and batch.
    timeline_steps: Recent steps to keep in `Engine.timeline`; 0 is none.
    replicas: Engines that share the requests, each with its own cache. The least busy one takes the next. On the
        processor they share the weights, and its threads are divided among them; on cards each has its own devices.
    """

    max_batch: int = option(64, Number(1, 1 << 16, whole=True))
    max_batch_tokens: int = option(512, Number(2, whole=True))
    max_wait_s: float = option(0.0, Number(0, LONGEST_S))
    max_queue: int = option(1024, Number(1, whole=True))
    request_timeout_s: float | None = option(None, Number(0, LONGEST_S, above=True, optional=True))
    priority_wait_s: float = option(10.0, Number(0, LONGEST_S))
    max_unread: int = option(32, Number(1, whole=True))
    page_size: int = option(16, Number(1, whole=True))
    cache_tokens: int | None = reuse_option(DeviceOptions, "cache_tokens")
    cache_bytes: int | None = option(None, BYTES)
    cache_dtype: str | None = reuse_option(ComputeOptions, "cache_dtype")
    prefix_sharing: bool = option(True, FLAG)
    memory_limit: int | None = reuse_option(DeviceOptions, "memory_limit")
    backend: str = reuse_option(ComputeOptions, "backend")
    dtype: str = reuse_option(ComputeOptions, "dtype")
    fallback: tuple[str, ...] = option((), ListOf(choice(*BACKENDS), f"backends: {', '.join(BACKENDS)}", or_one=True))
    devices: tuple[int, ...] | None = reuse_option(DeviceOptions, "devices")
    gpu_layers: int | str | None = reuse_option(DeviceOptions, "gpu_layers")
    sampling: Mapping[str, Any] = option({}, SAMPLING, is_hashable=False)
    generation_defaults: str | None = option(None, choice("model", "plain", None))
    timeline_steps: int = option(2000, Number(0, whole=True))
    replicas: int = option(1, Number(1, 1024, whole=True))

    def __post_init__(self) -> None:
        read_options(self, ConfigError)
        if self.max_batch_tokens <= self.max_batch:
            message = f"expected more than max_batch, {self.max_batch}: one token for each running sequence, and some "
            message += f"for prompts, got {self.max_batch_tokens}"
            raise ConfigError(message, field="max_batch_tokens", mentions=["max_batch"])
        if self.cache_tokens is not None and self.cache_bytes is not None:
            message = "expected None beside cache_tokens: either of them sets the size of the cache, got both"
            raise ConfigError(message, field="cache_bytes", mentions=["cache_tokens"])
        object.__setattr__(self, "sampling", {ALIASES.get(name, name): v for name, v in self.sampling.items()})
        try:
            SamplingParams.of(**self.sampling)
        except GenerationError as error:
            raise ConfigError(str(error), field="sampling") from error

    def for_model(self, model: LoadedModel) -> EngineConfig:
        """The same config with the model's own sampling among the defaults, where `generation_defaults` wants that.

        Raises GenerationError where the model's files recommend what no request may ask for.
        """
        if self.generation_defaults != "model":
            return self
        return replace(self, sampling={**recommended_sampling(model), **self.sampling}, generation_defaults="plain")

    def params(self, given: Mapping[str, Any]) -> SamplingParams:
        """The parameters of one request: the given ones over the defaults. Raises GenerationError."""
        params = SamplingParams.of(**self.over_defaults(given))
        if isinstance(params.speculate, LoadedModel):
            message = 'the engine takes "lookup" and no draft model; use model.generate or model.stream'
            raise GenerationError(message, field="speculate")
        limit = min(self.max_batch, self.max_queue)
        for name, count in (("n", params.n), ("num_beams", params.num_beams)):
            if count > limit:
                message = f"expected at most {limit}, as max_batch and max_queue say, got {count}"
                raise GenerationError(message, field=name)
        return params

    def over_defaults(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """The given parameters, and those of the defaults that go together with them."""
        asked = {ALIASES.get(name, name): value for name, value in given.items()}
        names = set(asked)
        if any(asked.get(guide) not in (None, ()) for guide in GUIDES):
            names.update(GUIDES)
        if asked.get("num_beams", 1) != 1:
            names.add("speculate")  # which changes no text
        if asked.get("prompt_logprobs") is not None:
            names.add("overflow")  # of the whole prompt
        defaults = {name: value for name, value in self.sampling.items() if name not in names}
        limit, least = asked.get("max_tokens"), defaults.get("min_tokens", 0)
        if isinstance(limit, int) and 0 < limit < least:
            defaults["min_tokens"] = limit
        return {**defaults, **given}

    @classmethod
    def of(cls, **settings: Unpack[EngineOptions]) -> EngineConfig:
        """From keyword arguments. An unknown name is refused with the nearest right one (ConfigError)."""
        given: dict[str, Any] = dict(settings)
        for name in given:
            _check_known(name, name)
        return cls(**given)

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str] | None = None,
        env: Mapping[str, str] | None = None,
        **overrides: Unpack[EngineOptions],
    ) -> EngineConfig:
        """From the arguments; settings that they lack from the environment, then from a TOML file.

        path: settings at the top of the file or in a table [engine], generation parameters in a table [sampling].
        env: by default `os.environ`; for example BITNET_REF_ENGINE_MAX_BATCH=8, or for generation parameters
            BITNET_REF_ENGINE_SAMPLING_TEMPERATURE=0.7. Values are written as in TOML; text needs no quotes.
        """
        settings = _read_toml(path) if path is not None else {}
        sources: dict[str, tuple[str | None, str]] = {name: (os.fspath(path or ""), name) for name in settings}
        sampling = dict(settings.pop("sampling", {}))
        for variable, text in sorted((os.environ if env is None else env).items()):
            if not variable.startswith(PREFIX):
                continue
            name = variable[len(PREFIX) :].lower()
            if name == "sampling":
                raise ConfigError(f"use one variable per parameter, like {PREFIX}SAMPLING_TEMPERATURE", field=variable)
            if name.startswith("sampling_"):
                sampling[name.removeprefix("sampling_")] = _parse_value(text)
                name = "sampling"
            else:
                _check_known(name, variable)
                settings[name] = _parse_value(text)
            sources[name] = "environment", variable
        for name in overrides:
            _check_known(name, name)
            sources.pop(name, None)
        sampling |= overrides.pop("sampling", {})
        try:
            return cls(**{**settings, **overrides, "sampling": sampling})
        except ConfigError as error:
            if error.field not in sources:
                raise
            path, name = sources[error.field]
            raise ConfigError(error.message, path=path, field=name, mentions=error.mentions) from error


def take_config(config: EngineConfig | None, settings: EngineOptions) -> EngineConfig:
    """The config, or one of these settings. Raises ConfigError."""
    if config is not None and settings:
        raise ConfigError(f"given beside a config: {', '.join(settings)}; use dataclasses.replace", field="config")
    return config if config is not None else EngineConfig.of(**settings)


def _read_toml(path: str | os.PathLike[str]) -> dict[str, Any]:
    settings = read_toml(path, ConfigError)
    table = settings.pop("engine", {})
    if not isinstance(table, dict):
        raise ConfigError(f"expected a table, got {table!r}", path=path, field="engine")
    for name in (*settings, *table):
        _check_known(name, name, path)
        if name in settings and name in table:
            raise ConfigError("is given twice, at the top and in [engine]", path=path, field=name)
    settings |= table
    if not isinstance(settings.get("sampling", {}), dict):
        raise ConfigError(f"expected a table, got {settings['sampling']!r}", path=path, field="sampling")
    return settings


def _check_known(name: str, written: str, path: str | os.PathLike[str] | None = None) -> None:
    names = [each.name for each in fields(EngineConfig)]
    if name not in names:
        raise ConfigError(f"there is no such setting; {suggest(name, names)}", path=path, field=written)


def _parse_value(text: str) -> Any:
    """A TOML value, else the text itself."""
    try:
        values = tomllib.loads(f"x = {text}")
    except (ValueError, RecursionError):  # also an integer of thousands of digits, and deep lists
        return text
    return values["x"] if len(values) == 1 else text  # of several lines
