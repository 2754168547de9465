"""Reading a JSON file that somebody else wrote: bounded, strict about duplicates, and clear about what is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TypeVar

from ..errors import ConfigError, FormatError, TokenizerError

AnyFileError = TypeVar("AnyFileError", ConfigError, FormatError, TokenizerError)


def read_json_object(path: Path, error: type[AnyFileError], max_bytes: int) -> dict[str, Any]:
    """The object in the file. Anything else raises `error`: missing, too large, not UTF-8, not JSON, not an object."""
    try:
        if not path.is_file():
            raise error("there is no such file", path=path)
        size = path.stat().st_size
        if size > max_bytes:
            raise error(f"the file has {size} bytes; at most {max_bytes} are accepted", path=path)
        data = path.read_bytes()
    except OSError as problem:
        raise error(f"cannot be read: {problem.strerror or problem}", path=path) from problem
    return parse_json_object(data, error, path)


def parse_json_object(data: bytes, error: type[AnyFileError], path: Path, offset: int = 0) -> dict[str, Any]:
    """Parse bytes found at `offset` of `path`."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        out: dict[str, Any] = {}
        for key, value in pairs:
            if key in out:
                raise error(f"the key {key!r} occurs twice in one object", path=path, field=key)
            out[key] = value
        return out

    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=unique)
    except UnicodeDecodeError as problem:
        raise error(f"not UTF-8 text: {problem.reason}", path=path, offset=offset + problem.start) from problem
    except json.JSONDecodeError as problem:
        at = offset + len(problem.doc[: problem.pos].encode())
        raise error(f"not valid JSON: {problem.msg}", path=path, offset=at) from problem
    except RecursionError as problem:
        raise error("not usable JSON: nested too deeply", path=path) from problem
    except ValueError as problem:  # an integer of thousands of digits
        raise error(f"not usable JSON: {problem}", path=path) from problem
    if not isinstance(value, dict):
        raise error(f"expected a JSON object, got {type(value).__name__}", path=path)
    return value
