"""`embed`: texts as vectors, from an embedding model or any other: the final hidden state, pooled, of length 1."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..backends.loaded import LoadedModel
from ..errors import ConfigError, ContextOverflow, GenerationError, describe, errors_at, require_int
from ..families import family_of
from ..formats.checkpoint import LENGTH_FILE, MAX_TOKENIZER_BYTES, MODULES_FILE, PROMPTS_FILE
from ..reference.cache import TokenBatch
from ..reference.layers import Floats
from ..system.json_file import is_present, read_json_object
from ..system.options import Number
from ..system.sharing import folder_of
from .generate import Prompt, Prompts, split_prompts

PRECISIONS = ("int8", "uint8", "binary", "ubinary")  # sentence-transformers' names
LENGTH_KEY = "max_seq_length"
TOKENIZER_FILE, TOKENIZER_KEY = "tokenizer_config.json", "model_max_length"
Bytes = NDArray[np.int8] | NDArray[np.uint8]  # int8 or uint8, or eight signs in each


def embed(
    model: LoadedModel, texts: Prompts, prompt: str | None = None, dimensions: int | None = None
) -> NDArray[np.float32]:
    """The vector (D,) of a text or of token ids, or the vectors (B, D) of a list of them, each equal to its own alone.

    They have length 1, unless the model's modules.json has no Normalize.
    prompt: put before each text, like "Instruct: find the answer\\nQuery: "; None: the model's `default_prompt`. Token
        ids are taken as they are; a text gets the tokenizer's special tokens, and for a Qwen model that pools the last
        token, unless modules.json is beside it, the end of text.
    dimensions: the first so many numbers, scaled like whole vectors: for models trained so that these say the most
        (Matryoshka), like Qwen3's. None: the model's `default_dimensions`.
    Raises TokenizerError, GenerationError, and what `run` raises.
    """
    size = model.config.hidden_size
    dimensions = Number(1, size, whole=True, optional=True).read(dimensions, "dimensions")
    dimensions = default_dimensions(model.texts_path) if dimensions is None else dimensions
    parts, single = split_prompts(texts)
    rows = token_rows(model, parts, prompt)
    pooled = np.empty((len(rows), size), dtype=np.float64)
    for first, stop in _passes([len(row) for row in rows], model.backend.prompt_tokens(model.config)):
        pooled[first:stop] = _pool(model, rows[first:stop])
    pooled = pooled[:, :dimensions]
    if model.config.unit_embeddings:
        pooled /= np.maximum(np.linalg.norm(pooled, axis=1, keepdims=True), 1e-12)
    vectors = pooled.astype(np.float32)
    return vectors[0] if single else vectors


def token_rows(
    model: LoadedModel, parts: Sequence[Prompt], prompt: str | None = None, any_length: bool = False
) -> list[NDArray[np.int64]]:
    """The ids of each text as an embedding model takes it; ids as they are. prompt: as of `embed`. any_length: more
    than `longest_text` too."""
    end: int | None = None
    if any(isinstance(part, str) for part in parts):  # one look at the model's files, however many texts
        prompt = default_prompt(model.texts_path) if prompt is None else prompt
        end = _end_of_text(model)

    def ids_of(part: Prompt) -> object:
        if not isinstance(part, str):
            return part
        ids = model.tokenizer.encode(f"{prompt}{part}")
        return ids if end is None or ids[-1:] == [end] else [*ids, end]

    rows = [model.check_tokens(ids_of(part), any_length=any_length) for part in parts]
    longest = max(map(len, rows), default=0)
    if not any_length and longest > (limit := longest_text(model)):
        says = f"{LENGTH_KEY} of its {LENGTH_FILE}"
        if _read_count(model.texts_path, LENGTH_FILE, LENGTH_KEY) is None:
            says = f"{TOKENIZER_KEY} of its {TOKENIZER_FILE}"
        raise ContextOverflow(f"{longest} tokens are more than {limit}, the {says}; shorten them")
    return rows


def _end_of_text(model: LoadedModel) -> int | None:
    """The token that a family's embedding models read at the end, beside sentence-transformers' files none: that
    library takes the tokenizer's tokens alone."""
    last = family_of(model.config).end_of_embedded if model.config.pooling == "last" else None
    if last is None or is_of_sentence_transformers(model.texts_path):
        return None
    return model.tokenizer.token_to_id(last)


def tokens_after(model: LoadedModel) -> int:
    """How many tokens follow each text in `token_rows`."""
    own, end = model.tokenizer.suffix, _end_of_text(model)
    return len(own) + (end is not None and own[-1:] != (end,))


def instruction_prompt(task: str) -> str:
    """What Qwen3's embedding models expect before a query. Documents have no prompt.

    >>> instruction_prompt("Find the answer")
    'Instruct: Find the answer\\nQuery:'
    """
    return f"Instruct: {task}\nQuery:"


def published_prompts(path: Path | None) -> dict[str, str]:
    """{name: prompt} of a model's config_sentence_transformers.json; {} without one. Raises ConfigError."""
    return _read_prompts(path)[0]


def default_prompt(path: Path | None) -> str:
    """The prompt that the same file names as `default_prompt_name`; "" without one. Raises ConfigError."""
    prompts, name = _read_prompts(path)
    return "" if name is None else prompts[name]


def default_dimensions(path: Path | None) -> int | None:
    """The `truncate_dim` of the same file; None without one: all numbers. Raises ConfigError."""
    return _read_count(path, PROMPTS_FILE, "truncate_dim")


def longest_text(model: LoadedModel) -> int:
    """Tokens of the longest text that `embed` takes: the context, or the model's max_seq_length, which since version 6
    sentence-transformers keeps as the tokenizer's model_max_length. Raises ConfigError."""
    limit = _read_count(model.texts_path, LENGTH_FILE, LENGTH_KEY)
    if limit is None and is_of_sentence_transformers(model.texts_path):
        stated = _read_beside(model.texts_path, TOKENIZER_FILE)[1].get(TOKENIZER_KEY)
        if isinstance(stated, int) and 1 <= stated < model.context_length:  # 10**30 and 1e30 mean none
            limit = stated
    return model.context_length if limit is None else min(limit, model.context_length)


def is_of_sentence_transformers(path: Path | None) -> bool:
    """Whether that library's list of modules is beside a model."""
    return path is not None and is_present(folder_of(path) / MODULES_FILE)


def _read_prompts(path: Path | None) -> tuple[dict[str, str], str | None]:
    file, raw = _read_beside(path, PROMPTS_FILE)
    prompts, default = raw.get("prompts") or {}, raw.get("default_prompt_name")
    if not isinstance(prompts, dict) or not all(isinstance(text, str) for text in prompts.values()):
        raise ConfigError("expected an object of strings", path=file, field="prompts")
    if default is not None and not (isinstance(default, str) and default in prompts):
        raise ConfigError(f"is none of the prompts ({', '.join(prompts)})", path=file, field="default_prompt_name")
    return prompts, default


def _read_count(path: Path | None, name: str, key: str) -> int | None:
    file, raw = _read_beside(path, name)
    if (value := raw.get(key)) is not None:
        with errors_at(file):
            require_int(key, value)
    return value


def _read_beside(path: Path | None, name: str) -> tuple[Path, dict[str, Any]]:
    """The file of that name beside a model, and its object; {} without one."""
    if path is None or not is_present(file := folder_of(path) / name):
        return Path(name), {}
    return file, read_json_object(file, ConfigError, MAX_TOKENIZER_BYTES, folder_of(path))


def quantize_embeddings(vectors: NDArray[np.float32], precision: str, ranges: Floats | None = None) -> Bytes:
    """Vectors (B, D) in fewer bits, as sentence-transformers' `quantize_embeddings` defines them.

    "int8", "uint8": (B, D), 255 steps from the least to the largest value of each dimension. ranges (2, D): these
        values, of a sample; None: of the vectors, of which there must be several. What lies beyond is the last step.
        int8 is uint8 - 128, as in version 5.7 and later.
    "binary", "ubinary": (B, D/8) int8 or uint8, eight signs a byte, the first the highest bit; int8 is uint8 - 128.
    Raises GenerationError.
    """
    if precision not in PRECISIONS or vectors.ndim != 2:
        expected = f"vectors (B, D) and one of {', '.join(PRECISIONS)}"
        raise GenerationError(f"expected {expected}, got {vectors.shape} and {precision!r}", field="quantize")
    if precision.endswith("binary"):
        bits = np.packbits(vectors > 0, axis=1)
        return bits if precision == "ubinary" else (bits.astype(np.int16) - 128).astype(np.int8)
    if ranges is None and len(vectors) < 2:
        message = "the ranges of each dimension need several vectors; give more, or `ranges`"
        raise GenerationError(message, field="quantize")
    try:
        bounds = np.stack([vectors.min(axis=0), vectors.max(axis=0)]) if ranges is None else np.asarray(ranges)
    except ValueError:  # lists of different lengths
        bounds = np.empty(0)
    if bounds.shape != (2, vectors.shape[1]) or bounds.dtype.kind not in "iuf" or not np.isfinite(bounds).all():
        message = f"expected finite numbers (2, {vectors.shape[1]}), got {describe(ranges)}"
        raise GenerationError(message, field="ranges")
    low, high = bounds.astype(np.float32)
    step = np.where(high > low, (high - low) / 255, 1)
    levels: Floats = np.clip(np.floor((vectors - low) / step), 0, 255)
    return levels.astype(np.uint8) if precision == "uint8" else (levels - 128).astype(np.int8)


def _passes(lengths: list[int], limit: int) -> Iterator[tuple[int, int]]:
    """(first row, one past the last) of passes of at most `limit` tokens, or of one longer row."""
    first = total = 0
    for row, length in enumerate(lengths):
        if row > first and total + length > limit:
            yield first, row
            first, total = row, 0
        total += length
    if lengths:
        yield first, len(lengths)


def _pool(model: LoadedModel, rows: list[NDArray[np.int64]]) -> NDArray[np.float64]:
    """The pooled hidden states of some rows.   -> (rows, D)"""
    cache, limit = model.new_cache(len(rows), max(map(len, rows))), model.backend.prompt_tokens(model.config)
    total, means = np.zeros((len(rows), model.config.hidden_size), dtype=np.float64), model.config.pooling == "mean"
    step = limit if len(rows) == 1 else len(rows[0]) + sum(map(len, rows))
    for start in range(0, max(map(len, rows)), step):
        parts = [(slot, start, row[start : start + step]) for slot, row in enumerate(rows)]
        batch = TokenBatch.of(parts, None if means else range(len(parts)))
        hidden = model.run_hidden(batch, cache)
        if not means:
            total = hidden.astype(np.float64)
            continue
        for slot, part in enumerate(np.split(hidden, np.cumsum([len(ids) for _, _, ids in parts])[:-1])):
            total[slot] += part.sum(axis=0, dtype=np.float64) / len(rows[slot])
    return total
