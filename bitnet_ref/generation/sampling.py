"""One token out of one row of logits."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .params import SamplingParams


def choose_token(logits: NDArray, params: SamplingParams, rng: np.random.Generator) -> int:
    """The next token.   logits (V,) float -> id.  Ties go to the smaller id. Draws once from rng, unless greedy."""
    if params.temperature == 0:
        return int(np.argmax(logits))
    ids, probabilities = distribution(logits, params)
    # The inverse of the cumulative distribution at one uniform number; its end may miss 1 by rounding.
    place = int(np.searchsorted(np.cumsum(probabilities), rng.random(), side="right"))
    return int(ids[min(place, len(ids) - 1)])


def distribution(logits: NDArray, params: SamplingParams) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """What is sampled from, for temperature > 0.   logits (V,) -> ids (n,), probabilities (n,), which sum to 1

    In the order of transformers and vLLM: temperature, then top_k, then top_p. In float64, most likely first when a
    limit applies, else in the order of ids.
    """
    scaled = logits.astype(np.float64) / params.temperature
    limit_k, limit_p = 0 < params.top_k < scaled.size, params.top_p < 1
    if not (limit_k or limit_p):
        return np.arange(scaled.size), _softmax(scaled)
    if limit_k:
        threshold = np.partition(scaled, -params.top_k)[-params.top_k]
        ids = np.flatnonzero(scaled >= threshold)
    else:
        ids = np.arange(scaled.size)
    ids = ids[np.argsort(-scaled[ids], kind="stable")]  # stable: among equals the smaller id first
    if limit_k:
        ids = ids[: params.top_k]
    probabilities = _softmax(scaled[ids])
    if limit_p:
        before = np.cumsum(probabilities) - probabilities  # the mass of everything more likely
        keep = max(1, int(np.searchsorted(before, params.top_p, side="left")))
        ids, probabilities = ids[:keep], probabilities[:keep] / probabilities[:keep].sum()
    return ids, probabilities


def log_probability(logits: NDArray, token: int) -> float:
    """ln softmax(logits)[token]: of the model's own distribution, before temperature and limits."""
    wide = logits.astype(np.float64)
    largest = wide.max()
    return float(wide[token] - largest - np.log(np.exp(wide - largest).sum()))


def _softmax(scores: NDArray[np.float64]) -> NDArray[np.float64]:
    e = np.exp(scores - scores.max())
    return e / e.sum()
