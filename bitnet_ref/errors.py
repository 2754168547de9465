"""Every exception that bitnet_ref raises on purpose: one family under `BitNetRefError`. And one warning.

A message says what was wrong, where, what was expected and what to do about it. The same facts are attributes, so
that a program can act on them without reading English.
"""

from __future__ import annotations

import os
import reprlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from unicodedata import category

__all__ = [
    "BackendError",
    "BackendUnavailable",
    "BitNetRefError",
    "ConfigError",
    "ConfigWarning",
    "ContextOverflow",
    "DeviceError",
    "EngineClosed",
    "FormatError",
    "GenerationError",
    "HubError",
    "NumericsError",
    "OutOfMemory",
    "QueueFull",
    "RegistryError",
    "RequestCancelled",
    "RequestTimeout",
    "ShapeError",
    "StorageError",
    "TokenizerError",
]

_SHOWN = 60  # characters
_MAX_MESSAGE, _MAX_FIELD = 1000, 200  # characters of an error about a file, which may quote that
_short = reprlib.Repr()
_short.maxstring = _short.maxother = _short.maxlong = _SHOWN


def describe(value: Any) -> str:
    """A short `repr` of any value, for a message: large values are cut, and no number is too large.

    >>> describe("a" * 1000)
    "'aaaaaaaaaaaaaaaaaaaaaaaaaaa...aaaaaaaaaaaaaaaaaaaaaaaaaaaa'"
    >>> describe(10**400)
    'a whole number of 1329 bits'
    """
    if isinstance(value, int) and value.bit_length() > 2 * _SHOWN:
        return f"a whole number of {value.bit_length()} bits"
    try:
        text = _short.repr(value)
    except Exception:  # a number among others that is too long for `repr`, or a class that has none
        text = f"a {type(value).__name__}"
    return text if len(text) <= 2 * _SHOWN else text[: 2 * _SHOWN - 3] + "..."


def count_of(count: int, noun: str) -> str:
    """A number with its noun.

    >>> count_of(1, "new token"), count_of(2, "token")
    ('1 new token', '2 tokens')
    """
    return f"{count} {noun}{'' if count == 1 else 's'}"


def describe_error(error: BaseException) -> str:
    """The class and message of any error, for another error's message, even if its own `__str__` fails."""
    try:
        text = str(error)
    except BaseException as failure:
        text = f"its message cannot be shown: {type(failure).__name__}"
    return f"{type(error).__name__}: {text[:2000]}"


def printable(text: str, keep: str = "\n\t") -> str:
    """The text with every character that is not shown, but acts on a terminal or a reader, as an escape.

    These are control characters, marks of writing direction and other format characters, and lone surrogates.

    >>> printable("a\x1b[2Jb\u202e")
    'a\\\\x1b[2Jb\\\\u202e'
    """
    if text.isprintable():
        return text
    return "".join(
        c if c.isprintable() or c in keep or category(c) == "Zs" else c.encode("unicode_escape").decode() for c in text
    )


def _without_middle(text: str, size: int) -> str:
    """At most `size` characters: the start says what is wrong, the end what to do."""
    half = (size - 5) // 2
    return text if len(text) <= size else f"{text[:half]} ... {text[-half:]}"


class BitNetRefError(Exception):
    """Base of all errors raised on purpose by this package. Its text is `printable`: much of it may be a file's.

    message: what is wrong. field: the option, key or tensor at fault, or None; the error's text begins with it.
    mentions: the other options that the message names, as it writes them ("max_tokens", "num_beams=1"). The shell
        writes its own names of options in place of these and of `field`.
    """

    def __init__(self, message: str = "", *, field: str | None = None, mentions: Sequence[str] = ()) -> None:
        self.message = message
        self.field = field
        self.mentions = tuple(mentions)
        super().__init__(message)

    def __str__(self) -> str:
        return printable(f"{self.place}: {self.message}" if self.place else self.message)

    @property
    def place(self) -> str:
        """What the text begins with."""
        return self.field or ""


class _FileError(BitNetRefError):
    """An error about a place in a file: `path`, `offset` (bytes from its start) and `field` are None when unknown."""

    def __init__(
        self,
        message: str,
        *,
        path: str | os.PathLike[str] | None = None,
        offset: int | None = None,
        field: str | None = None,
        mentions: Sequence[str] = (),
    ) -> None:
        super().__init__(_without_middle(printable(message, keep=""), _MAX_MESSAGE), field=field, mentions=mentions)
        self.path = None if path is None else os.fspath(path)
        self.offset = offset

    @property
    def place(self) -> str:
        byte = None if self.offset is None else f"byte {self.offset}"
        field = None if self.field is None else _without_middle(self.field, _MAX_FIELD)
        return printable(", ".join(part for part in (self.path, byte, field) if part is not None), keep="")


@contextmanager
def errors_at(path: str | os.PathLike[str] | None) -> Iterator[None]:
    """Errors about a file that are raised inside, and do not say which, get this path."""
    try:
        yield
    except _FileError as error:
        if error.path is None and path is not None:
            error.path = os.fspath(path)
        raise


class FormatError(_FileError):
    """A weights file that is not what its format, or its own config, says it must be."""


class ConfigError(_FileError):
    """A model configuration that is missing something, contradicts itself, or asks for what is not supported."""


class ConfigWarning(UserWarning):
    """Not an error: a config.json has keys that are ignored or contradict each other, and is read all the same."""


class TokenizerError(_FileError):
    """A tokenizer file that cannot be used, or text / ids / messages that the tokenizer cannot process."""


class StorageError(_FileError, OSError):
    """The system refused to write, read or remove a file: a full disk, no permission, no such folder, an I/O error.

    `errno` is the system's number of the error, or None.
    """


class ShapeError(BitNetRefError):
    """An array of the wrong shape or dtype was given to `op`."""

    def __init__(self, op: str, *, expected: str, got: str) -> None:
        self.op, self.expected, self.got = op, expected, got
        super().__init__(f"{op}: expected {expected}, got {got}")

    def __reduce__(self) -> tuple[Any, ...]:  # pickle knows positional arguments only
        return partial(type(self), expected=self.expected, got=self.got), (self.op,)


class BackendError(BitNetRefError):
    """A compute backend failed."""


class BackendUnavailable(BackendError):
    """The backend that was asked for cannot run here; the message says why and how to get it."""


class DeviceError(BackendError):
    """The accelerator was lost or answered with an error."""


class OutOfMemory(BackendError):
    """The host or the device has not enough memory for what was asked."""


class NumericsError(BitNetRefError):
    """A tensor holds NaN or Inf. `tensor` names the first one that does, in the order of the computation."""

    def __init__(self, message: str, *, tensor: str | None = None) -> None:
        self.tensor = tensor
        super().__init__(message)


@contextmanager
def numerics_errors_of(place: str) -> Iterator[None]:
    """A NumericsError of an op that is raised inside, and knows the token alone, also names this place."""
    try:
        yield
    except NumericsError as error:
        raise NumericsError(f"{place}: {error.message}", tensor=error.tensor) from error


class GenerationError(BitNetRefError):
    """A bad generation parameter, a prompt that does not fit the context, a full queue, or a cancelled request."""


class ContextOverflow(GenerationError):
    """The prompt, or the prompt and `max_tokens`, are longer than the model's context or the engine's cache."""


class QueueFull(GenerationError):
    """The engine has as many waiting requests as it may: try again later, or elsewhere (HTTP 429 or 503)."""


class RequestCancelled(GenerationError):
    """The request was cancelled before it was finished."""


class RequestTimeout(GenerationError):
    """The request was not finished in the time it was given."""


class EngineClosed(GenerationError):
    """The engine was closed, or belongs to another process."""


class RegistryError(BitNetRefError):
    """A name, revision or file that neither this machine nor the hub has, or that is no usable name."""


class HubError(RegistryError):
    """The hub cannot be reached: no network, HF_HUB_OFFLINE, huggingface_hub not installed, or a server's failure."""


# -- checks of a config's fields ---------------------------------------------------------------------------------------

LARGEST_INT = 2**40  # beyond any model; arithmetic on sizes, positions and window stays within int64 and float64


def require(condition: bool, field: str, expected: str, got: Any) -> None:
    """Raises ConfigError naming the field of a config, unless the condition holds."""
    if not condition:
        raise ConfigError(f"expected {expected}, got {got!r}", field=field)


def require_int(field: str, value: Any, low: int = 1) -> None:
    """Raises ConfigError unless the value is an int from `low` to LARGEST_INT."""
    whole = isinstance(value, int) and not isinstance(value, bool)
    require(whole and low <= value <= LARGEST_INT, field, f"an int from {low} to {LARGEST_INT}", value)


def require_number(field: str, value: Any, above: float = 0.0) -> None:
    """Raises ConfigError unless the value is a number above `above` that float32 can hold."""
    number = isinstance(value, int | float) and not isinstance(value, bool)  # NaN fails every comparison
    low = max(above, 1e-30)  # neither the number nor products of such numbers overflow float64
    high = 1e30
    require(number and value > above and low <= value <= high, field, f"a number > {above}, at most {high}", value)


def require_bool(field: str, value: Any) -> None:
    """Raises ConfigError unless the value is True or False."""
    require(isinstance(value, bool), field, "true or false", value)
