"""The files of `crossval tokens` and `crossval sample`, as crossval/README.md describes them."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import FormatError, GenerationError, TokenizerError, describe
from ...generation.params import SamplingParams
from ...system.json_file import open_regular, parse_json_object, read_bounded, read_json_object
from ..tolerances import LOGITS_ROUNDING
from ..types import Ids, Tokens, Wide
from .draws import Draws
from .given import GivenRun

MAX_BYTES = 1 << 26
_FINISH = ("stop", "length", None)
_PARAMS = (
    *("temperature", "top_k", "top_p", "min_p", "typical_p"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty"),
)


# -- token ids ---------------------------------------------------------------------------------------------------------


def read_runs(path: Path, model: Any, prompt: str | Tokens | None = None) -> list[GivenRun]:
    """The runs of a file: JSON, JSON lines, or ids as text.

    prompt: of runs that name none.   Raises FormatError, TokenizerError.
    """
    data = read_bounded(path, FormatError, MAX_BYTES)
    start = data.lstrip()[:1]
    is_json = start in (b"{", b"[")
    objects = _json_objects(data, path) if is_json else _text_objects(data, path, prompt is not None)
    if not objects:
        raise FormatError("holds no run; expected token ids", path=path)
    return [_read_run(each, path, model, prompt, number) for number, each in enumerate(objects, 1)]


def _json_objects(data: bytes, path: Path) -> list[dict[str, Any]]:
    """One object, a list of them, or one on each line."""
    if data.lstrip()[:1] == b"[":
        wrapped = parse_json_object(b'{"runs":' + data + b"}", FormatError, path, offset=-8)["runs"]
        if not all(isinstance(each, dict) for each in wrapped):
            raise FormatError('expected objects {"prompt": ..., "tokens": [...]}', path=path)
        return list(wrapped)
    try:
        json.loads(data)
    except (ValueError, RecursionError):
        objects, offset = [], 0
        for line in data.splitlines(keepends=True):
            if line.strip():
                objects.append(parse_json_object(line, FormatError, path, offset))
            offset += len(line)
        return objects
    return [parse_json_object(data, FormatError, path)]


def _text_objects(data: bytes, path: Path, has_prompt: bool) -> list[dict[str, Any]]:
    """A run is two lines, the prompt's ids and the new ones; or one line if the prompt is known."""
    try:
        lines = [line for line in data.decode("utf-8").splitlines() if line.strip()]
    except UnicodeDecodeError as error:
        raise FormatError("is not UTF-8 text", path=path, offset=error.start) from error
    rows = []
    for number, line in enumerate(lines, 1):
        words = re.sub(r"^\s*(prompt|tokens|ids)\s*:", "", line).replace(",", " ").strip(" []").split()
        if not all(word.isascii() and word.isdecimal() and len(word) < 12 for word in words):
            raise FormatError(f"line {number}: expected token ids, got {describe(line.strip())}", path=path)
        rows.append([int(word) for word in words])
    if has_prompt:
        return [{"tokens": row} for row in rows]
    if len(rows) % 2:
        message = f"has {len(rows)} lines of ids; expected two for each run, the prompt's ids and the new ones"
        raise FormatError(f"{message}, or --prompt with one line for each run", path=path)
    return [{"prompt": rows[i], "tokens": rows[i + 1]} for i in range(0, len(rows), 2)]


def _read_run(given: Mapping[str, Any], path: Path, model: Any, prompt: str | Tokens | None, number: int) -> GivenRun:
    def refuse(name: str, expected: str) -> FormatError:
        return FormatError(f"run {number}: expected {expected}, got {describe(given.get(name))}", path=path, field=name)

    tokens = _ids(given.get("tokens"))
    if tokens is None:
        raise refuse("tokens", "a list of token ids")
    messages = given.get("messages")
    if messages is not None and not (isinstance(messages, list) and all(isinstance(m, dict) for m in messages)):
        raise refuse("messages", "a list of objects")
    said = given.get("prompt", given.get("text", prompt))
    text: str | None = None
    ids: Ids
    if messages is not None:
        listed = _ids(given.get("prompt"))
        ids = model.tokenizer.apply_chat_template(messages, tokenize=True) if listed is None else listed
    elif isinstance(said, str):
        text, ids = said, model.tokenizer.encode(said)
    else:
        ids = _ids(said) or []
        text = given["text"] if isinstance(given.get("text"), str) else _text_of(model, ids)
    if not ids:  # of "" too, where the tokenizer puts no BOS before it
        raise refuse("prompt", "a text, or token ids")
    outside = next((token for token in ids if token >= model.config.vocab_size), None)
    if outside is not None:
        limit = f"ids below {model.config.vocab_size}, the model's vocabulary"
        raise FormatError(f"run {number}: expected {limit}, got {outside}", path=path, field="prompt")
    if len(ids) > model.context_length:
        raise FormatError(f"run {number}: {len(ids)} tokens are more than the context holds", path=path, field="prompt")
    finish, asked = given.get("finish_reason"), given.get("max_tokens")
    if finish not in _FINISH:
        raise refuse("finish_reason", '"stop" or "length"')
    dtype = given.get("engine_dtype", "float32")
    if dtype not in [*LOGITS_ROUNDING]:  # it may be a list, which has no hash
        raise refuse("engine_dtype", " or ".join(LOGITS_ROUNDING))
    if asked is not None and not (type(asked) is int and asked > 0):
        raise refuse("max_tokens", "a number of tokens")
    conversation = None if messages is None else tuple(messages)
    return GivenRun(tuple(ids), tuple(tokens), text, conversation, finish, asked, dtype)


def _text_of(model: Any, ids: Ids) -> str | None:
    """The text of which these are the ids; None where there is none."""
    try:
        text = model.tokenizer.decode(ids)
        return text if model.tokenizer.encode(text) == list(ids) else None
    except TokenizerError:
        return None


def _ids(value: Any) -> Ids | None:
    if not isinstance(value, list) or not all(type(each) is int and 0 <= each < 2**40 for each in value):
        return None
    return list(value)


# -- logits and choices ------------------------------------------------------------------------------------------------


def read_draws(path: Path) -> Draws:
    """The logits, parameters and choices of a .npz or .json file. Raises FormatError."""
    raw = _read_npz(path) if path.suffix == ".npz" else read_json_object(path, FormatError, MAX_BYTES)
    if unknown := raw.keys() - {"logits", "params", "prompt", "generated", "probabilities", "chosen", *_PARAMS}:
        raise FormatError("there is no such key; see crossval/README.md", path=path, field=sorted(unknown)[0])
    params = raw.get("params", {})
    if not isinstance(params, Mapping):
        raise FormatError("expected an object of sampling parameters", path=path, field="params")
    given = {**params, **{name: raw[name] for name in _PARAMS if name in raw}}
    if unknown := given.keys() - set(_PARAMS):
        expected = f"expected some of {', '.join(_PARAMS)}"
        raise FormatError(expected, path=path, field=f"params.{sorted(unknown)[0]}")
    try:
        settings = SamplingParams.of(**{"temperature": 1.0, **given})
    except GenerationError as error:
        raise FormatError(f"params: {error}", path=path) from error
    logits = np.atleast_2d(_array(raw, "logits", path))
    if logits.ndim != 2 or not logits.size or not np.isfinite(logits.max(axis=1)).all() or np.isnan(logits).any():
        raise FormatError(f"expected finite numbers (rows, vocabulary), got {logits.shape}", path=path, field="logits")
    rows = len(logits)
    probabilities = None
    if "probabilities" in raw:
        probabilities = np.atleast_2d(_array(raw, "probabilities", path))
        sound = probabilities.shape == logits.shape and np.isfinite(probabilities).all() and (probabilities >= 0).all()
        if not sound or not (probabilities.sum(axis=1) > 0).all():
            expected = f"expected {logits.shape} numbers from 0 to 1, got {probabilities.shape}"
            raise FormatError(expected, path=path, field="probabilities")
    chosen = None
    if "chosen" in raw:
        chosen = _choices(raw["chosen"], rows, logits.shape[1], path)
    if probabilities is None and chosen is None:
        raise FormatError("is missing, and so is probabilities; expected one of them", path=path, field="chosen")
    size = logits.shape[1]
    prompts, generated = (_histories(raw.get(name), name, rows, size, path) for name in ("prompt", "generated"))
    return Draws(logits, settings, prompts, generated, probabilities, chosen)


def _read_npz(path: Path) -> dict[str, Any]:
    with open_regular(path, FormatError) as file:
        size = os.fstat(file.fileno()).st_size
        try:
            archive = np.load(file, allow_pickle=False)
            if not isinstance(archive, np.lib.npyio.NpzFile):
                raise FormatError("is no archive of arrays; write it with numpy.savez", path=path)
            with archive as arrays:
                for info in arrays.zip.infolist() if arrays.zip is not None else ():
                    if info.file_size > max(MAX_BYTES, 8 * size):  # much larger than its file: it is not read
                        message = f"is {info.file_size} bytes in a file of {size}"
                        raise FormatError(message, path=path, field=info.filename)
                out: dict[str, Any] = {name: arrays[name] for name in arrays.files}
        except FormatError:
            raise
        except Exception as error:  # zipfile and NumPy raise many kinds: RuntimeError, TokenError, MemoryError
            raise FormatError(f"is not a .npz file: {error}", path=path) from error
    if "params" in out:
        text = str(out["params"])
        out["params"] = parse_json_object(text.encode(), FormatError, path)
    return {
        name: value if isinstance(value, dict) or name == "logits" else np.asarray(value).tolist()
        for name, value in out.items()
    }


def _array(raw: Mapping[str, Any], name: str, path: Path) -> Wide:
    if name not in raw:
        raise FormatError("is missing", path=path, field=name)
    try:
        return np.asarray(raw[name]).astype(np.float64, casting="same_kind")  # which complex numbers are not
    except (TypeError, ValueError) as error:
        raise FormatError("expected numbers, as many in each row", path=path, field=name) from error


def _choices(value: Any, rows: int, vocab_size: int, path: Path) -> list[Ids]:
    """Of each row the ids that were chosen. A list of ids is one for each row, or all of the only row."""
    if isinstance(value, list) and all(type(each) is int for each in value):
        value = [value] if rows == 1 else [[each] for each in value]
    lists = [_ids(each) for each in value] if isinstance(value, list) else []
    out = [each for each in lists if each]
    if len(lists) != rows or len(out) != rows or max(map(max, out)) >= vocab_size:
        raise FormatError(f"expected ids below {vocab_size} for each of {rows} rows", path=path, field="chosen")
    return out


def _histories(value: Any, name: str, rows: int, vocab_size: int, path: Path) -> list[Ids]:
    """Of each row the ids before it. One list is that of all rows."""
    if value is None:
        return [[] for _ in range(rows)]
    if (ids := _ids(value)) is not None:
        value = [ids] * rows
    lists = [_ids(each) for each in value] if isinstance(value, list) else []
    out = [each for each in lists if each is not None]
    if len(lists) != rows or len(out) != rows or any(token >= vocab_size for each in out for token in each):
        expected = f"expected ids below {vocab_size}, one list or one for each of {rows} rows"
        raise FormatError(expected, path=path, field=name)
    return out
