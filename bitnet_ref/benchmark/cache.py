"""What a narrow KV cache costs: the logits of a text with each cache dtype, compared with the float32 cache's.

Only the cache differs between the runs. Each token sees the true text before it (teacher forcing), so errors do not
accumulate as they do when each run continues with its own choices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..api import Model
from ..backends.cache_dtypes import CACHE_DTYPES
from ..crossval.metrics import measure_logits
from ..crossval.precision import TEXT
from ..errors import GenerationError
from ..reference.cache import TokenBatch
from .timing import Record

CHUNK = 64  # tokens per pass, so that a large vocabulary's logits are never held for the whole text


@dataclass(frozen=True)
class CacheError:
    """The error of one cache dtype. KL divergences: in nats, of next-token distributions, KL(float32 || dtype)."""

    dtype: str
    bytes_per_token: int
    max_logit_error: float  # over all tokens and the whole vocabulary
    kl_mean: float
    kl_max: float
    greedy_agreement: float  # share of tokens with the same most likely next token


@dataclass(frozen=True)
class CacheBench(Record):
    """One `CacheError` per cache dtype; all are measured against float32."""

    backend: str
    tokens: int
    errors: tuple[CacheError, ...]


def measure_cache(
    model: Model, text: str | Sequence[int] | None = None, dtypes: Sequence[str] = CACHE_DTYPES
) -> CacheBench:
    """The error of each cache dtype on a text (or token ids), cut to the model's context.

        for error in measure_cache(bitnet_ref.load()).errors:
            print(error.dtype, error.bytes_per_token, error.kl_mean)

    text: None means a short story. Raises ShapeError for a dtype that the backend does not support, GenerationError
    for a text without tokens, TokenizerError for a text when the model has no tokenizer.
    """
    if text is None:
        text = " ".join(TEXT.split())
    ids = model.tokenizer.encode(text) if isinstance(text, str) else text
    if len(ids) == 0:
        raise GenerationError("measure_cache: the text has no tokens")
    tokens = model.check_tokens(list(ids)[: model.config.context_length])
    caches = {dtype: model.new_cache(1, len(tokens), dtype=dtype) for dtype in dict.fromkeys(("float32", *dtypes))}
    chunks: dict[str, list[tuple[int, float, float, float, float]]] = {dtype: [] for dtype in caches}
    for start in range(0, len(tokens), CHUNK):
        batch = TokenBatch.of([(0, start, tokens[start : start + CHUNK])])
        exact = model.run(batch, caches["float32"]).all()
        for dtype, cache in caches.items():
            logits = exact if dtype == "float32" else model.run(batch, cache).all()
            distance = measure_logits(exact, logits)
            max_error = float(np.abs(exact - logits).max())
            chunks[dtype].append((len(batch), max_error, distance.kl_mean, distance.kl_max, distance.top1_agreement))
    errors = []
    for dtype in dtypes:
        counts, max_errors, kl_means, kl_maxima, agreements = zip(*chunks[dtype], strict=True)
        kl_mean, agreement = (float(np.average(values, weights=counts)) for values in (kl_means, agreements))
        kl = max(0.0, kl_mean), max(0.0, *kl_maxima)  # rounding may leave -1e-18
        errors.append(CacheError(dtype, caches[dtype].bytes_per_token, max(max_errors), *kl, agreement))
    return CacheBench(model.backend.name, len(tokens), tuple(errors))
