"""How many bytes of a GPU a model's layers take, from its shape, before any weight is read."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ...reference.config import ModelConfig
from ..backend import PROMPT_TOKENS
from .attention import CHUNK, MIN_TABLE, PARTS_BYTES, SCORES_BYTES, chunks_seen
from .cache import ROUND_CAPACITY_TO, STORED_AS
from .ternary import TILE_COLUMNS, TILE_ROWS, TILE_WORDS

ALIGNED_TO = 512  # bytes: what CuPy's pool rounds every array up to
LOGIT_ROWS = 64  # tokens of a pass whose logits are wanted: an engine's batch

Itemsize = Callable[[str], int | None]  # bytes per element of a dense matrix on the GPU; None: it is ternary


def weight_bytes(shape: tuple[int, int], itemsize: int | None, bias: bool) -> int:
    """Of a linear (out, in): dense, or ternary in tiles with a scale per row."""
    out, width = shape
    vectors = aligned(4 * out) * (bias + (itemsize is None))
    if itemsize is not None:
        return aligned(out * width * itemsize) + vectors
    return aligned(-(-out // TILE_ROWS) * -(-width // TILE_COLUMNS) * TILE_WORDS * 4) + vectors


def layer_bytes(config: ModelConfig, itemsize: Itemsize) -> int:
    """Of the weights of a layer. itemsize: by the names of `ModelConfig.linear_shapes`."""
    total = 4 * aligned(4 * max(config.hidden_size, config.intermediate_size, config.query_size))  # norms
    for name, shape in config.linear_shapes().items():
        bias = config.attention_bias if name in ("q_proj", "k_proj", "v_proj", "o_proj") else config.mlp_bias
        total += weight_bytes(shape, itemsize(name), bias)
    return total


def cache_bytes(config: ModelConfig, kind: str, tokens: int) -> int:
    """Of the keys and values of so many tokens in one layer."""
    tokens = -(-tokens // ROUND_CAPACITY_TO) * ROUND_CAPACITY_TO
    head_bytes = config.head_dim * np.dtype(STORED_AS[kind]).itemsize + (4 if kind == "int8" else 0)
    return 2 * aligned(tokens * config.num_key_value_heads * head_bytes)


def working_bytes(config: ModelConfig, tokens: int, at_once: int = PROMPT_TOKENS) -> int:
    """What a pass needs besides: activations, attention's scores, logits, RoPE's tables.

    tokens: of the longest text.  at_once: max tokens of a pass.
    """
    n, heads, head_dim = min(tokens, at_once), config.num_attention_heads, config.head_dim
    rows = 5 * config.hidden_size + 3 * config.query_size + 2 * config.kv_size + 3 * config.intermediate_size
    chunks = chunks_seen(tokens, None)
    scores = min(SCORES_BYTES, n * heads * chunks * CHUNK * 4)
    z_in_parts = heads * chunks * head_dim * 8  # of a token: float64
    parts = max(min(n, LOGIT_ROWS) * z_in_parts, min(n * z_in_parts, PARTS_BYTES))
    tables = 2 * max(MIN_TABLE, 1 << tokens.bit_length()) * head_dim // 2 * 4
    logits = min(n, LOGIT_ROWS) * config.vocab_size * 4
    return n * rows * 4 + scores + parts + tables + logits


def aligned(nbytes: int) -> int:
    """Rounded up to the pool's granularity."""
    return -(-nbytes // ALIGNED_TO) * ALIGNED_TO
