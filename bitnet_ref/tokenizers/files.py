"""Reading a tokenizer's files: capped sizes, strict JSON, and typed access that names the field that is wrong."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import TokenizerError
from ..system import json_file

MAX_VOCABULARY_BYTES = 64 << 20  # tokenizer.json, tokenizer.model: the largest published ones are near 35 MB
MAX_CONFIG_BYTES = 4 << 20  # tokenizer_config.json lists every added token: 1.2 MB in the largest published ones
MAX_TOKEN_ID = 1 << 24  # published vocabularies end near 2^18; beyond this an id is damage, and would size arrays


def read_file(path: Path, limit: int) -> bytes:
    """The bytes of a regular file of at most `limit` bytes. Raises TokenizerError for anything else."""
    return json_file.read_bounded(path, TokenizerError, limit)


def parse_json_object(data: bytes, path: str | os.PathLike[str]) -> dict[str, Any]:
    """JSON text whose top level is an object. Raises TokenizerError for anything else."""
    return json_file.parse_json_object(data, TokenizerError, path)


class TokenizerFiles:
    """A checkpoint's small files by name: a folder's, or bytes that came out of another file (a GGUF's metadata)."""

    def __init__(self, root: str | os.PathLike[str], contents: Mapping[str, bytes] | None = None) -> None:
        """root: the folder; or, with `contents`, what messages call the place where those came from."""
        self.root = Path(os.fspath(root))
        self._contents = contents

    def path(self, name: str) -> Path:
        """Where the file is, for messages."""
        return self.root / name

    def __contains__(self, name: str) -> bool:
        return self.path(name).exists() if self._contents is None else name in self._contents

    def read(self, name: str, limit: int) -> bytes:
        """The bytes of a file of at most `limit` bytes. Raises TokenizerError for anything else."""
        if self._contents is None:
            return read_file(self.path(name), limit)
        data = self._contents[name]
        if not isinstance(data, bytes):
            raise TokenizerError(f"expected bytes, got {type(data).__name__}", path=self.path(name))
        if len(data) > limit:
            raise TokenizerError(
                f"has more than {limit} bytes, and at most that many are accepted", path=self.path(name)
            )
        return data

    def json_object(self, name: str) -> dict[str, Any]:
        """The JSON object in a file, or an empty one when there is no such file."""
        return parse_json_object(self.read(name, MAX_CONFIG_BYTES), self.path(name)) if name in self else {}


_NAMES = {str: "a string", bool: "true or false", int: "an integer", dict: "an object", list: "a list"}


def typed(value: Any, kind: type, *, path: str | os.PathLike[str] | None, field: str, what: str | None = None) -> Any:
    """`value`, which must be of type `kind` (a bool is not an int). Raises TokenizerError naming `field`."""
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise TokenizerError(f"expected {what or _NAMES[kind]}, got {_shown(value)}", path=path, field=field)
    if isinstance(value, str):
        check_unicode(value, path=path, field=field)
    return value


def optional(table: Mapping[str, Any], key: str, kind: type, *, path: str | os.PathLike[str] | None) -> Any:
    """`table[key]`, checked by `typed`; None when it is absent or null."""
    value = table.get(key)
    return None if value is None else typed(value, kind, path=path, field=key)


def token_id(value: Any, *, path: str | os.PathLike[str] | None, field: str) -> int:
    """A token id read from a file: an integer in 0..MAX_TOKEN_ID. Raises TokenizerError naming `field`."""
    typed(value, int, path=path, field=field, what="a token id")
    if not 0 <= value < MAX_TOKEN_ID:
        raise TokenizerError(f"token id {_shown(value)} is not in 0..{MAX_TOKEN_ID - 1}", path=path, field=field)
    return value


def check_unicode(text: str, *, path: str | os.PathLike[str] | None = None, field: str | None = None) -> None:
    """Refuse a lone surrogate (JSON's \\ud800 makes one): it has no UTF-8 form, so no token can stand for it."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise TokenizerError(
            f"character {error.start} is the lone surrogate U+{ord(text[error.start]):04X}, which has no UTF-8 form; "
            "decode the text with errors='replace', or join the surrogate pair",
            path=path,
            field=field,
        ) from error


def _shown(value: Any) -> str:
    """A short form of a value for a message: files hold megabytes, and integers of thousands of digits."""
    if isinstance(value, int) and value.bit_length() > 128:
        return f"an integer of {value.bit_length()} bits"
    text = repr(value) if isinstance(value, (str, int, float, type(None))) else type(value).__name__
    return text if len(text) <= 80 else text[:77] + "..."
