"""What a narrow KV cache costs: the logits of a text with each cache dtype, against those with the float32 cache.

Nothing else differs between the runs, so every difference is the cache's own. Each token sees the true text before it
(teacher forcing); errors do not pile up as they do when every run goes on with its own choices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ..backends.cache_dtypes import CACHE_DTYPES
from ..crossval.metrics import measure_logits
from ..crossval.precision import TEXT
from ..errors import GenerationError
from ..reference.cache import TokenBatch

if TYPE_CHECKING:
    from ..api import Model

CHUNK = 64  # tokens at a time: the logits of a large vocabulary are never held for a whole text


@dataclass(frozen=True)
class CacheError:
    """One cache dtype. KL divergences are in nats, of the next-token distributions, KL(float32 || dtype)."""

    dtype: str
    bytes_per_token: int
    max_logit_error: float  # over all tokens and the whole vocabulary
    kl_mean: float
    kl_max: float
    greedy_agreement: float  # share of tokens after which the likeliest next one is the same


@dataclass(frozen=True)
class CacheBench:
    """`errors` by cache dtype; that of float32 is what the others are measured against."""

    backend: str
    tokens: int
    errors: tuple[CacheError, ...]

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain JSON values."""
        return asdict(self)


def measure_cache(
    model: Model, text: str | Sequence[int] | None = None, dtypes: Sequence[str] = CACHE_DTYPES
) -> CacheBench:
    """The error of each cache dtype on a text (or token ids), as much of it as the model's context holds.

        for error in measure_cache(bitnet_ref.load()).errors:
            print(error.dtype, error.bytes_per_token, error.kl_mean)

    text: None takes a short story. Raises ShapeError for a dtype that the model's backend cannot keep, GenerationError
    for a text without tokens, TokenizerError for a text where the model has no tokenizer.
    """
    if text is None:
        text = " ".join(TEXT.split())
    ids = model.tokenizer.encode(text) if isinstance(text, str) else text
    if len(ids) == 0:
        raise GenerationError("measure_cache: the text has no tokens")
    tokens = model.check_tokens(list(ids)[: model.config.context_length])
    caches = {dtype: model.new_cache(1, len(tokens), dtype=dtype) for dtype in dict.fromkeys(("float32", *dtypes))}
    found: dict[str, list[tuple[int, float, float, float, float]]] = {dtype: [] for dtype in caches}
    for start in range(0, len(tokens), CHUNK):
        batch = TokenBatch.of([(0, start, tokens[start : start + CHUNK])])
        exact = model.forward(batch, caches["float32"])
        for dtype, cache in caches.items():
            logits = exact if dtype == "float32" else model.forward(batch, cache)
            distance = measure_logits({"a": exact}, {"a": logits}, "a", "a", exact.shape, None)
            largest = float(np.abs(exact - logits).max())
            found[dtype].append((len(batch), largest, distance.kl_mean, distance.kl_max, distance.top1_agreement))
    errors = []
    for dtype in dtypes:
        counts, largest_of, kl_means, kl_maxima, agreements = zip(*found[dtype], strict=True)
        errors.append(
            CacheError(
                dtype,
                caches[dtype].bytes_per_token,
                max_logit_error=max(largest_of),
                kl_mean=max(0.0, float(np.average(kl_means, weights=counts))),  # rounding may leave -1e-18
                kl_max=max(0.0, *kl_maxima),
                greedy_agreement=float(np.average(agreements, weights=counts)),
            )
        )
    return CacheBench(model.backend.name, len(tokens), tuple(errors))
