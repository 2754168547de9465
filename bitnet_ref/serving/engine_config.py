"""`EngineConfig`: every setting of the engine, checked; from arguments, the environment and a TOML file."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from ..backends import DTYPES, NAMES
from ..backends.loaded import LoadedModel
from ..backends.paged_cache import CACHE_DTYPES
from ..backends.placement import Placement
from ..errors import BackendUnavailable, ConfigError, GenerationError, describe
from ..generation.params import ALIASES, LONGEST_S, Number, SamplingParams, suggest
from ..system.json_file import read_bounded

PREFIX = "BITNET_REF_ENGINE_"
MAX_TOML_BYTES = 1 << 20


@dataclass(frozen=True)
class EngineConfig:
    """The settings of an `Engine`. Raises ConfigError.

    Batching:
    max_batch: sequences that run at a time, and the maximum `n` of a request.
    max_batch_tokens: tokens per step; prompts get those that decoding leaves. It bounds the duration of a step, and so
        how long a long prompt delays the other requests.
    max_wait_s: when a request meets an idle engine, wait this long for others, up to max_batch. 0 starts at once.

    Admission and order:
    max_queue: sequences that may wait, `n` of each request; one more is refused (QueueFull).
    request_timeout_s: a request that is not finished by then fails (RequestTimeout); None: never.
    priority_wait_s: one level of priority goes before requests that came up to this many seconds earlier.
    max_unread: chunks of a stream that its reader may leave unread. Then the sequence pauses, and others get its place
        and, if they need them, its pages; it continues when half of the chunks are read.

    Memory:
    page_size: tokens in a page of the cache.
    cache_tokens: tokens that the cache holds, of all sequences together; or
    cache_bytes: its bytes. By default what max_batch sequences of full length need, at most a quarter of the free
        memory.
    cache_dtype: of keys and values, as in `load`; None is the model's own. Texts equal those of a model loaded with it.
    prefix_sharing: whether common beginnings of prompts are computed once. The texts are the same either way.
    memory_limit: bytes that the process may hold, or the model on a card; the cache takes at most what is left.

    Device (for `bitnet_ref.load_engine`):
    backend, dtype: as in `load`. fallback: backends to try, in order, when that one is not available here, has not
        enough memory, or fails later (DeviceError) and cannot be opened again.
    devices, gpu_layers: as in `load`; room for `cache_tokens` is left on the cards.

    Other:
    sampling: defaults of `SamplingParams` for all requests.
    replicas: engines that share the requests, each with its own cache; the least busy one takes the next. On the
        processor they share the weights, and its threads are divided among them; on cards each has its own devices.
    timeline_steps: recent steps to keep in `Engine.timeline`; 0 is none.
    """

    max_batch: int = 64
    max_batch_tokens: int = 512
    max_wait_s: float = 0.0
    max_queue: int = 1024
    request_timeout_s: float | None = None
    priority_wait_s: float = 10.0
    max_unread: int = 32
    page_size: int = 16
    cache_tokens: int | None = None
    cache_bytes: int | None = None
    cache_dtype: str | None = None
    prefix_sharing: bool = True
    memory_limit: int | None = None
    backend: str = "auto"
    dtype: str = "float32"
    fallback: tuple[str, ...] = ()
    devices: tuple[int, ...] | None = None
    gpu_layers: int | str | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict, hash=False)
    timeline_steps: int = 2000
    replicas: int = 1

    def __post_init__(self) -> None:
        for name, number in _NUMBERS.items():
            try:
                object.__setattr__(self, name, number.read(getattr(self, name), name))
            except GenerationError as error:
                raise ConfigError(str(error).removeprefix(f"{name}: "), field=name) from None
        _check(isinstance(self.prefix_sharing, bool), "prefix_sharing", "true or false", self.prefix_sharing)
        _check(
            self.max_batch_tokens > self.max_batch,
            "max_batch_tokens",
            f"more than max_batch, {self.max_batch}: one token for each running sequence, and some for prompts",
            self.max_batch_tokens,
        )
        both = self.cache_tokens is not None and self.cache_bytes is not None
        _check(not both, "cache_bytes", "None beside cache_tokens: either of them sets the size of the cache", "both")
        backends = ("auto", *NAMES)
        fallback = (self.fallback,) if isinstance(self.fallback, str) else self.fallback
        _check(isinstance(fallback, list | tuple), "fallback", f"a list of {', '.join(backends)}", fallback)
        object.__setattr__(self, "fallback", tuple(fallback))
        for name, values, allowed in (
            ("backend", (self.backend,), backends),
            ("fallback", self.fallback, backends),
            ("dtype", (self.dtype,), DTYPES),
            ("cache_dtype", (self.cache_dtype,), (None, *CACHE_DTYPES)),
        ):
            for value in values:
                _check(value in allowed, name, f"one of {', '.join(filter(None, allowed))}", value)
        try:
            placement = Placement.of(self.devices, self.gpu_layers, None)
        except BackendUnavailable as error:
            name, _, message = str(error).partition(": ")
            raise ConfigError(message, field=name) from error
        object.__setattr__(self, "devices", placement.devices)
        _check(isinstance(self.sampling, Mapping), "sampling", "a table of generation parameters", self.sampling)
        object.__setattr__(self, "sampling", {ALIASES.get(name, name): v for name, v in self.sampling.items()})
        try:
            SamplingParams.of(**self.sampling)
        except GenerationError as error:
            raise ConfigError(str(error), field="sampling") from error

    def params(self, given: Mapping[str, Any]) -> SamplingParams:
        """The parameters of one request: the given ones over the defaults. Raises GenerationError."""
        names = {ALIASES.get(name, name) for name in given}
        params = SamplingParams.of(**{name: v for name, v in self.sampling.items() if name not in names}, **given)
        if isinstance(params.speculate, LoadedModel):
            raise GenerationError(
                'speculate: the engine takes "lookup" and no draft model; use model.generate or model.stream'
            )
        limit = min(self.max_batch, self.max_queue)
        for name, count in (("n", params.n), ("num_beams", params.num_beams)):
            if count > limit:
                raise GenerationError(f"{name}: expected at most {limit}, as max_batch and max_queue say, got {count}")
        return params

    @classmethod
    def of(cls, **settings: Any) -> EngineConfig:
        """From keyword arguments. An unknown name is refused with the nearest right one (ConfigError)."""
        for name in settings:
            _check_known(name, name)
        return cls(**settings)

    @classmethod
    def load(
        cls, path: str | os.PathLike[str] | None = None, env: Mapping[str, str] | None = None, **overrides: Any
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
            raise ConfigError(error.message, path=path, field=name) from error


def _read_toml(path: str | os.PathLike[str]) -> dict[str, Any]:
    try:
        data = tomllib.loads(read_bounded(path, ConfigError, MAX_TOML_BYTES).decode("utf-8"))
    except UnicodeDecodeError as problem:
        raise ConfigError(f"is not UTF-8 text: {problem.reason}", path=path, offset=problem.start) from problem
    except tomllib.TOMLDecodeError as problem:
        raise ConfigError(f"is not valid TOML: {problem}", path=path) from problem
    settings, table = data, data.pop("engine", {})
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
        return tomllib.loads(f"x = {text}")["x"]
    except tomllib.TOMLDecodeError:
        return text


_BYTES = Number(1, 2**63 - 1, whole=True, optional=True)
_NUMBERS = {
    "max_batch": Number(1, 1 << 16, whole=True),
    "max_batch_tokens": Number(2, whole=True),
    "max_wait_s": Number(0, LONGEST_S),
    "max_queue": Number(1, whole=True),
    "request_timeout_s": Number(0, LONGEST_S, above=True, optional=True),
    "priority_wait_s": Number(0, LONGEST_S),
    "max_unread": Number(1, whole=True),
    "page_size": Number(1, whole=True),
    "cache_tokens": Number(1, 2**40, whole=True, optional=True),
    "cache_bytes": _BYTES,
    "memory_limit": _BYTES,
    "timeline_steps": Number(0, whole=True),
    "replicas": Number(1, 1024, whole=True),
}


def _check(good: bool, name: str, expected: str, got: Any) -> None:
    if not good:
        raise ConfigError(f"expected {expected}, got {describe(got)}", field=name)
