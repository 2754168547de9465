"""`embed`: texts as vectors, from an embedding model or any other: the final hidden state, pooled, of length 1."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from ..backends.loaded import LoadedModel
from ..backends.run import run_hidden
from ..reference.cache import TokenBatch
from .generate import Prompts, split_prompts

END_OF_TEXT = "<|endoftext|>"  # Qwen3's embedding models were trained to be read at this token


def embed(model: LoadedModel, texts: Prompts, prompt: str = "") -> NDArray[np.float32]:
    """The vector (D,) of a text or of token ids, or the vectors (B, D) of a list of them, each equal to its own alone.

    prompt: put before each text, like "Instruct: find the answer\\nQuery: ". Token ids are taken as they are; to a text
    the tokenizer adds its special tokens, and for a Qwen model the end of text.
    Raises TokenizerError, GenerationError, and what `run` raises.
    """
    parts, single = split_prompts(texts)
    rows = [model.check_tokens(token_ids_of(model, part, prompt)) for part in parts]
    pooled = np.empty((len(rows), model.config.hidden_size), dtype=np.float64)
    for first, stop in _passes([len(row) for row in rows], model.backend.prompt_tokens(model.config)):
        pooled[first:stop] = _pool(model, rows[first:stop])
    vectors = (pooled / np.maximum(np.linalg.norm(pooled, axis=1, keepdims=True), 1e-12)).astype(np.float32)
    return vectors[0] if single else vectors


def token_ids_of(model: LoadedModel, part: object, prompt: str) -> object:
    """The ids of a text as an embedding model takes it; ids as they are."""
    if not isinstance(part, str):
        return part
    ids = model.tokenizer.encode(prompt + part)
    end = model.tokenizer.token_to_id(END_OF_TEXT) if model.config.model_type.startswith("qwen") else None
    return ids if end is None or ids[-1:] == [end] else [*ids, end]


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
        hidden = run_hidden(model.backend, model.weights, model.config, batch, cache)
        if not means:
            total = hidden.astype(np.float64)
            continue
        for slot, part in enumerate(np.split(hidden, np.cumsum([len(ids) for _, _, ids in parts])[:-1])):
            total[slot] += part.sum(axis=0, dtype=np.float64) / len(rows[slot])
    return total
