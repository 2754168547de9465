"""One token out of one row of logits: of all of them, or of those that can matter."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..backends import HeadCandidates
from .params import SamplingParams

MOST_TOP_K = 1024  # a larger limit takes the whole head
# top_p without top_k has no k: so many of the likeliest are looked at; bounds on the rest tell whether they suffice.
NUCLEUS_CANDIDATES = 1024
# Dividing float32 logits by a temperature in this range keeps different ones different in float64.
_TEMPERATURES = (1e-100, 1e100)
# The rounding of sums of some hundred thousand float64 probabilities is far below this.
_SURELY = 1e-9


def choose_token(logits: NDArray, params: SamplingParams, rng: np.random.Generator) -> int:
    """The next token.   logits (V,) float -> id.  Ties go to the smaller id. Draws once from rng, unless greedy."""
    return choose(logits, params, rng.random() if params.temperature > 0 else 0.0)


def choose(logits: NDArray, params: SamplingParams, uniform: float) -> int:
    """The same for a number drawn from [0, 1)."""
    if params.temperature == 0:
        return int(np.argmax(logits))
    ids, probabilities = distribution(logits, params)
    return int(ids[_place(np.cumsum(probabilities), uniform)])


def distribution(logits: NDArray, params: SamplingParams) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """What is sampled from, for temperature > 0.   logits (V,) -> ids (n,), probabilities (n,), which sum to 1

    In the order of transformers and vLLM: temperature, then top_k, then top_p. In float64, most likely first when a
    limit applies, else in the order of ids.
    """
    scaled = logits.astype(np.float64) / params.temperature
    limit_k, limit_p = 0 < params.top_k < scaled.size, params.top_p < 1
    if not (limit_k or limit_p):
        return np.arange(scaled.size), _softmax(scaled)
    ids = _likeliest(scaled, params.top_k) if limit_k else np.argsort(-scaled, kind="stable")
    return _nucleus(ids, _softmax(scaled[ids]), params.top_p)


def _likeliest(scaled: NDArray[np.float64], k: int) -> NDArray[np.int64]:
    """Indices of the k largest, largest first; among equals the smaller index first."""
    ids = np.flatnonzero(scaled >= np.partition(scaled, -k)[-k])
    return ids[np.argsort(-scaled[ids], kind="stable")][:k]


def _nucleus(
    ids: NDArray[np.int64], probabilities: NDArray[np.float64], top_p: float
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """The first of them that reach top_p, likeliest first, made to sum to 1 again; all of them for top_p = 1."""
    if top_p == 1:
        return ids, probabilities
    before = np.cumsum(probabilities) - probabilities  # the mass of everything more likely
    keep = max(1, int(np.searchsorted(before, top_p, side="left")))
    return ids[:keep], probabilities[:keep] / probabilities[:keep].sum()


# -- from candidates ---------------------------------------------------------------------------------------------------


def candidates_needed(params: SamplingParams, vocab_size: int) -> int | None:
    """The k for `Backend.head_candidates`; None where only all logits will do."""
    if params.temperature == 0:
        return 1
    if not _TEMPERATURES[0] <= params.temperature <= _TEMPERATURES[1]:
        return None
    if 0 < params.top_k < vocab_size:
        return params.top_k if params.top_k <= MOST_TOP_K else None
    return min(NUCLEUS_CANDIDATES, vocab_size) if params.top_p < 1 else None


def choose_among(found: HeadCandidates, params: SamplingParams, uniform: float) -> int | None:
    """What `choose` takes from all logits, from the candidates for `candidates_needed`. None: they leave it open, as
    top_p alone may."""
    if params.temperature == 0:
        return int(found.ids[np.argmax(found.logits)])
    scaled = found.logits.astype(np.float64) / params.temperature
    if params.top_k > 0:
        likeliest = _likeliest(scaled, params.top_k)
        ids, probabilities = _nucleus(likeliest, _softmax(scaled[likeliest]), params.top_p)
        return int(found.ids[ids[_place(np.cumsum(probabilities), uniform)]])
    return _choose_in_nucleus(found, scaled, params, uniform)


def _choose_in_nucleus(
    found: HeadCandidates, scaled: NDArray[np.float64], params: SamplingParams, uniform: float
) -> int | None:
    """top_p alone. The likeliest are known; the mass of the rest lies between two bounds, and so does every share."""
    likeliest = _likeliest(scaled, NUCLEUS_CANDIDATES)
    largest = scaled[likeliest[0]]
    e = np.exp(scaled[likeliest] - largest)
    others = np.exp(np.delete(scaled, likeliest) - largest).sum()
    with np.errstate(over="ignore"):  # a bound beyond float64 is one that decides nothing
        low, high = (
            np.exp(ends.astype(np.float64) / params.temperature - largest).sum() + others for ends in found.rest()
        )
    before = np.cumsum(e) - e
    keeps = [
        int(np.searchsorted(before / (e.sum() + rest), params.top_p + margin, side="left"))
        for rest, margin in ((low, -_SURELY), (high, _SURELY))
    ]
    if keeps[0] != keeps[1] or keeps[0] == len(e):
        return None
    keep = max(1, keeps[0])
    ends = np.cumsum(e[:keep] / e[:keep].sum())
    if np.abs(ends[:-1] - uniform).min(initial=1.0) < _SURELY:
        return None
    return int(found.ids[likeliest[_place(ends, uniform)]])


def log_probability(logits: NDArray, token: int) -> float:
    """ln softmax(logits)[token]: of the model's own distribution, before temperature and limits."""
    wide = logits.astype(np.float64)
    largest = wide.max()
    return float(wide[token] - largest - np.log(np.exp(wide - largest).sum()))


def _place(cumulative: NDArray[np.float64], uniform: float) -> int:
    """The inverse of a cumulative distribution, whose end may miss 1 by rounding."""
    return min(int(np.searchsorted(cumulative, uniform, side="right")), len(cumulative) - 1)


def _softmax(scores: NDArray[np.float64]) -> NDArray[np.float64]:
    e = np.exp(scores - scores.max())
    return e / e.sum()
