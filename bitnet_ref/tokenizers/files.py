"""Reading a tokenizer's files: limited sizes, strict JSON, and typed access that names the wrong field."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ..errors import TokenizerError, describe, errors_at
from ..system.json_file import is_present, parse_json_object, read_bounded

MAX_VOCABULARY_BYTES = 64 << 20  # tokenizer.json, tokenizer.model: the largest published ones are near 35 MB
MAX_CONFIG_BYTES = 4 << 20  # tokenizer_config.json lists every added token: 1.2 MB in the largest published ones
MAX_TOKEN_ID = 1 << 24  # published vocabularies end near 2^18; a larger id is damage, and would size arrays
MAX_NESTED_CHARACTERS = 1 << 14  # of the tokens that begin at one place of a text; published models stay under 1,000
_NAMES = {str: "a string", bool: "true or false", int: "an integer", dict: "an object", list: "a list"}

AnyPath = str | os.PathLike[str] | None


class TokenizerFiles:
    """A checkpoint's small files by name: in a folder, or as bytes taken from another file (a GGUF's metadata)."""

    def __init__(self, root: str | os.PathLike[str], contents: Mapping[str, bytes] | None = None) -> None:
        """root: the folder; or, with `contents`, the name of their origin in messages."""
        self.root = Path(os.fspath(root))
        self._contents = contents

    def path(self, name: str) -> Path:
        return self.root / name

    def __contains__(self, name: str) -> bool:
        return is_present(self.path(name)) if self._contents is None else name in self._contents

    def read(self, name: str, limit: int) -> bytes:
        """The bytes of a file of at most `limit` bytes. Raises TokenizerError for anything else."""
        if self._contents is None:
            return read_bounded(self.path(name), TokenizerError, limit, self.root)
        data = self._contents[name]
        with errors_at(self.path(name)):
            if not isinstance(data, bytes):
                raise TokenizerError(f"expected bytes, got {type(data).__name__}")
            if len(data) > limit:
                raise TokenizerError(f"has more than {limit} bytes, and at most that many are accepted")
        return data

    def json_object(self, name: str) -> dict[str, Any]:
        """The JSON object in a file, or an empty one when there is no such file."""
        if name not in self:
            return {}
        return parse_json_object(self.read(name, MAX_CONFIG_BYTES), TokenizerError, self.path(name))


def check_type(value: Any, kind: type, field: str, what: str | None = None) -> Any:
    """`value`, which must be of type `kind` (a bool is not an int). Raises TokenizerError naming `field`."""
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise TokenizerError(f"expected {what or _NAMES[kind]}, got {describe(value)}", field=field)
    if isinstance(value, str):
        check_unicode(value, field)
    return value


def get_optional(table: Mapping[str, Any], key: str, kind: type) -> Any:
    """`table[key]`, checked by `check_type`; None when it is absent or null."""
    value = table.get(key)
    return None if value is None else check_type(value, kind, key)


def check_token_id(value: Any, field: str) -> int:
    """A token id read from a file: an integer in 0..MAX_TOKEN_ID - 1. Raises TokenizerError naming `field`."""
    check_type(value, int, field, "a token id")
    if not 0 <= value < MAX_TOKEN_ID:
        raise TokenizerError(f"token id {describe(value)} is not in 0..{MAX_TOKEN_ID - 1}", field=field)
    token: int = value
    return token


def check_unicode(text: str, field: str | None = None) -> None:
    """Refuse a lone surrogate (JSON's \\ud800 makes one): it has no UTF-8 form, so no token can stand for it."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise TokenizerError(
            f"character {error.start} is the lone surrogate U+{ord(text[error.start]):04X}, which has no UTF-8 form; "
            "decode the text with errors='replace', or join the surrogate pair",
            field=field,
        ) from error


def read_prefixes(tokens: Iterable[str], field: str) -> dict[str, str]:
    """Each token, in sorted order -> the longest other one that it begins with, or "".

    Raises TokenizerError if very many begin alike: all of them are tried at each place of a text.
    """
    prefixes: dict[str, str] = {}
    chain: list[str] = []
    size = 0
    for token in sorted(tokens):
        while chain and not token.startswith(chain[-1]):
            size -= len(chain.pop())
        prefixes[token] = chain[-1] if chain else ""
        chain.append(token)
        size += len(token)
        if size > MAX_NESTED_CHARACTERS:
            message = f"{len(chain)} tokens begin as {token[:40]!r} does, and a text of that takes too long"
            raise TokenizerError(message, field=field)
    return prefixes
