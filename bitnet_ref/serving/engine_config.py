"""`EngineConfig`: every setting of the engine, checked; from arguments, the environment and a TOML file."""

from __future__ import annotations

import difflib
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from ..backends import NAMES
from ..backends.cache_dtypes import CACHE_DTYPES
from ..backends.placement import Placement
from ..errors import BackendUnavailable, ConfigError, GenerationError
from ..generation.params import ALIASES, SamplingParams, is_int, is_real

PREFIX = "BITNET_REF_ENGINE_"


@dataclass(frozen=True)
class EngineConfig:
    """The settings of an `Engine`. Raises ConfigError.

    Batching:
    max_batch: sequences that run at a time.
    max_batch_tokens: tokens in one step; what decoding leaves of them goes to prompts. It bounds how long a step takes,
        and so how long a long prompt can hold up everybody else.
    max_wait_s: when a request meets an idle engine, wait so long for company, up to max_batch. 0 begins at once.

    Who may come, and who comes first:
    max_queue: requests that may wait; one more is refused (QueueFull).
    request_timeout_s: a request that is not finished by then fails (RequestTimeout); None never.
    priority_wait_s: one level of priority goes before what came up to so many seconds earlier.

    Memory:
    page_size: tokens in a page of the cache.
    cache_tokens: tokens that the cache holds, of all sequences together; or
    cache_bytes: its bytes. By default what max_batch sequences of full length need, but a quarter of the memory that
        is free at most.
    cache_dtype: how the cache keeps keys and values, as in `load`; None is the model's own. With another one than the
        model's, texts are those of a model that was loaded with it.
    prefix_sharing: whether prompts that begin alike are computed once. The texts are the same either way.
    memory_limit: bytes that the process may hold, or the model of a card's memory; the cache takes no more than is
        left of them.

    Device (for `bitnet_ref.load_engine`):
    backend: as in `load`. fallback: backends to try, in order, when that one is not available here.
    devices, gpu_layers: as in `load`: the cards that share the layers, and how many layers cards compute. Room is left
        there for `cache_tokens`.

    What for:
    sampling: defaults of `SamplingParams` for requests that do not say.
    timeline_steps: recent steps to remember, for a look at what the engine does; 0 is none.
    """

    max_batch: int = 64
    max_batch_tokens: int = 512
    max_wait_s: float = 0.0
    max_queue: int = 1024
    request_timeout_s: float | None = None
    priority_wait_s: float = 10.0
    page_size: int = 16
    cache_tokens: int | None = None
    cache_bytes: int | None = None
    cache_dtype: str | None = None
    prefix_sharing: bool = True
    memory_limit: int | None = None
    backend: str = "auto"
    fallback: tuple[str, ...] = ()
    devices: tuple[int, ...] | None = None
    gpu_layers: int | str | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict, hash=False)
    timeline_steps: int = 2000

    def __post_init__(self) -> None:
        for name, low in _WHOLE.items():
            value = getattr(self, name)
            optional = name in ("cache_tokens", "cache_bytes", "memory_limit")
            _check((optional and value is None) or is_int(value, low), name, f"a whole number >= {low}", value)
        for name in ("max_wait_s", "priority_wait_s"):
            value = getattr(self, name)
            _check(is_real(value) and value >= 0, name, "seconds, a number >= 0", value)
        timeout = self.request_timeout_s
        _check(timeout is None or (is_real(timeout) and timeout > 0), "request_timeout_s", "seconds > 0", timeout)
        _check(isinstance(self.prefix_sharing, bool), "prefix_sharing", "true or false", self.prefix_sharing)
        _check(
            self.max_batch_tokens > self.max_batch,
            "max_batch_tokens",
            f"more than max_batch, {self.max_batch}: one token for each running sequence, and room for prompts",
            self.max_batch_tokens,
        )
        both = self.cache_tokens is not None and self.cache_bytes is not None
        _check(not both, "cache_bytes", "none beside cache_tokens: one of them says how large the cache is", "both")
        backends = ("auto", *NAMES)
        _check(self.backend in backends, "backend", f"one of {', '.join(backends)}", self.backend)
        fallback = (self.fallback,) if isinstance(self.fallback, str) else self.fallback
        good = isinstance(fallback, list | tuple) and all(name in backends for name in fallback)
        _check(good, "fallback", f"a list of {', '.join(backends)}", fallback)
        object.__setattr__(self, "fallback", tuple(fallback))
        try:
            placement = Placement.of(self.devices, self.gpu_layers, None)
        except BackendUnavailable as error:
            name, _, message = str(error).partition(": ")
            raise ConfigError(message, field=name) from error
        object.__setattr__(self, "devices", placement.devices)
        dtype = self.cache_dtype
        _check(dtype is None or dtype in CACHE_DTYPES, "cache_dtype", f"one of {', '.join(CACHE_DTYPES)}", dtype)
        _check(isinstance(self.sampling, Mapping), "sampling", "a table of generation parameters", self.sampling)
        object.__setattr__(self, "sampling", {ALIASES.get(name, name): v for name, v in self.sampling.items()})
        try:
            SamplingParams.of(**self.sampling)
        except GenerationError as error:
            raise ConfigError(str(error), field="sampling") from error

    def params(self, given: Mapping[str, Any]) -> SamplingParams:
        """The parameters of one request: what was given, and the defaults. Raises GenerationError."""
        said = {ALIASES.get(name, name) for name in given}
        defaults = {name: value for name, value in self.sampling.items() if name not in said}
        return SamplingParams.of(**defaults, **given)

    @classmethod
    def of(cls, **settings: Any) -> EngineConfig:
        """From keyword arguments. An unknown name is refused with the nearest right one (ConfigError)."""
        for name in settings:
            _known(name, name)
        return cls(**settings)

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str] | None = None,
        env: Mapping[str, str] | None = None,
        **overrides: Any,
    ) -> EngineConfig:
        """From a TOML file, over it the environment, over that the arguments.

        path: settings at the top of the file or in a table [engine], generation parameters in a table [sampling].
        env: by default `os.environ`; BITNET_REF_ENGINE_MAX_BATCH=8 and the like, written as in TOML (text needs no
            quotes), and BITNET_REF_ENGINE_SAMPLING_TEMPERATURE=0.7 for generation parameters.
        """
        settings, sources = _read_toml(path) if path is not None else ({}, {})
        sampling = dict(settings.pop("sampling", {}))
        for variable, text in sorted((os.environ if env is None else env).items()):
            if not variable.startswith(PREFIX):
                continue
            name = variable[len(PREFIX) :].lower()
            if name == "sampling":
                raise ConfigError(f"write one variable a parameter, like {PREFIX}SAMPLING_TEMPERATURE", field=variable)
            if name.startswith("sampling_"):
                sampling[name.removeprefix("sampling_")] = _value(text)
                sources["sampling"] = variable
            else:
                _known(name, variable)
                settings[name], sources[name] = _value(text), variable
        for name in overrides:
            _known(name, name)
            sources.pop(name, None)
        sampling |= overrides.pop("sampling", {})
        try:
            return cls(**{**settings, **overrides, "sampling": sampling})
        except ConfigError as error:
            source = sources.get(error.field or "")
            if source is None:
                raise
            if source.startswith(PREFIX):
                raise ConfigError(error.message, path="environment", field=source) from error
            raise ConfigError(error.message, path=source, field=error.field) from error


def _read_toml(path: str | os.PathLike[str]) -> tuple[dict[str, Any], dict[str, str]]:
    """The file's settings, and where each is from."""
    try:
        data = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as problem:
        raise ConfigError(f"cannot be read: {problem}", path=path) from problem
    except tomllib.TOMLDecodeError as problem:
        raise ConfigError(f"is no TOML: {problem}", path=path) from problem
    settings = {name: value for name, value in data.items() if name != "engine"}
    table = data.get("engine", {})
    if not isinstance(table, dict):
        raise ConfigError(f"expected a table, got {table!r}", path=path, field="engine")
    for name in (*settings, *table):
        _known(name, name, path)
        if name in settings and name in table:
            raise ConfigError("is given twice, at the top and in [engine]", path=path, field=name)
    settings |= table
    if not isinstance(settings.get("sampling", {}), dict):
        raise ConfigError(f"expected a table, got {settings['sampling']!r}", path=path, field="sampling")
    return settings, dict.fromkeys(settings, os.fspath(path))


def _known(name: str, written: str, path: str | os.PathLike[str] | None = None) -> None:
    names = [each.name for each in fields(EngineConfig)]
    if name not in names:
        near = difflib.get_close_matches(name, names, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"there are: {', '.join(names)}"
        raise ConfigError(f"there is no such setting; {hint}", path=path, field=written)


def _value(text: str) -> Any:
    """A value as TOML has it; what is no TOML is text."""
    try:
        return tomllib.loads(f"x = {text}")["x"]
    except tomllib.TOMLDecodeError:
        return text


_WHOLE = {
    "max_batch": 1,
    "max_batch_tokens": 2,
    "max_queue": 1,
    "page_size": 1,
    "cache_tokens": 1,
    "cache_bytes": 1,
    "memory_limit": 1,
    "timeline_steps": 0,
}


def _check(good: bool, name: str, expected: str, got: Any) -> None:
    if not good:
        raise ConfigError(f"expected {expected}, got {got!r}", field=name)
