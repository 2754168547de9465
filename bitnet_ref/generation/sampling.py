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
        return int(logits.argmax())
    ids, probabilities = distribution(logits, params)
    return int(ids[_place(np.cumsum(probabilities), uniform)])


def distribution(logits: NDArray, params: SamplingParams) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """What is sampled from, for temperature > 0.   logits (V,) -> ids (n,), probabilities (n,), which sum to 1

    In the order of transformers: temperature, then top_k, top_p, min_p, typical_p. Where logits are equal, top_k keeps
    the smaller ids, so that there are k; transformers keeps all equals. In float64, most likely first when a limit
    applies, else in the order of ids.
    """
    scaled = logits.astype(np.float64) / params.temperature
    limit_k = 0 < params.top_k < scaled.size
    if not (limit_k or params.top_p < 1 or params.min_p > 0 or params.typical_p < 1):
        return np.arange(scaled.size), _softmax(scaled)
    ids = likeliest(scaled, params.top_k) if limit_k else np.argsort(-scaled, kind="stable")
    return _limited(ids, scaled[ids], params)


def _limited(
    ids: NDArray[np.int64], scaled: NDArray[np.float64], params: SamplingParams
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """top_p, min_p and typical_p on tokens that are sorted, likeliest first, and all there are."""
    ids, probabilities = _nucleus(ids, _softmax(scaled), params.top_p)
    if params.min_p > 0:
        keep = _at_least(scaled[: len(ids)], params.min_p)
        ids, probabilities = ids[:keep], probabilities[:keep] / probabilities[:keep].sum()
    return _typical(ids, probabilities, params.typical_p)


def likeliest(scaled: NDArray[np.float64], k: int) -> NDArray[np.int64]:
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


def _at_least(scaled: NDArray[np.float64], min_p: float) -> int:
    """How many of these, likeliest first, are at least min_p times as likely as the first (arXiv 2407.01082)."""
    return int(np.count_nonzero(np.exp(scaled - scaled[0]) >= min_p))


def _typical(
    ids: NDArray[np.int64], probabilities: NDArray[np.float64], typical_p: float
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Those whose surprise, -ln p, is nearest its average, and whose mass reaches typical_p (arXiv 2202.00666)."""
    if typical_p == 1:
        return ids, probabilities
    surprise = -np.log(np.maximum(probabilities, np.finfo(np.float64).tiny))
    distance = np.abs(surprise - (probabilities * surprise).sum())
    nearest = np.argsort(distance, kind="stable")
    last = int(np.count_nonzero(np.cumsum(probabilities[nearest]) < typical_p))
    keep = distance <= distance[nearest[min(last, len(nearest) - 1)]]  # equals stay together, as in transformers
    return ids[keep], probabilities[keep] / probabilities[keep].sum()


# -- from candidates ---------------------------------------------------------------------------------------------------


def candidates_needed(params: SamplingParams, vocab_size: int) -> int | None:
    """The k of a `HeadNeed`; None where only all logits will do."""
    if params.temperature == 0:
        return 1
    if not _TEMPERATURES[0] <= params.temperature <= _TEMPERATURES[1]:
        return None
    if 0 < params.top_k < vocab_size:
        return params.top_k if params.top_k <= MOST_TOP_K else None
    if params.typical_p < 1:  # the average surprise is that of all tokens
        return None
    return min(NUCLEUS_CANDIDATES, vocab_size) if params.top_p < 1 or params.min_p > 0 else None


def choose_among(found: HeadCandidates, params: SamplingParams, uniform: float) -> int | None:
    """What `choose` takes from all logits, from the candidates for `candidates_needed`. None: they leave it open, as
    top_p and min_p without top_k may."""
    if params.temperature == 0:
        return int(found.ids[found.logits.argmax() if len(found.ids) > 1 else 0])
    scaled = found.logits.astype(np.float64) / params.temperature
    if 0 < params.top_k < found.vocab_size:
        first = likeliest(scaled, params.top_k)
        ids, probabilities = _limited(first, scaled[first], params)
        return int(found.ids[ids[_place(np.cumsum(probabilities), uniform)]])
    return _choose_in_nucleus(found, scaled, params, uniform)


def _choose_in_nucleus(
    found: HeadCandidates, scaled: NDArray[np.float64], params: SamplingParams, uniform: float
) -> int | None:
    """top_p and min_p alone. The likeliest are known; the mass of the rest lies between two bounds, and so does every
    share. Which tokens are likely enough for min_p depends on the likeliest one only."""
    first = likeliest(scaled, NUCLEUS_CANDIDATES)
    largest = scaled[first[0]]
    e = np.exp(scaled[first] - largest)
    others = np.exp(np.delete(scaled, first) - largest).sum()
    with np.errstate(over="ignore"):  # a bound beyond float64 is one that decides nothing
        low, high = (
            np.exp(ends.astype(np.float64) / params.temperature - largest).sum() + others for ends in found.rest()
        )
    before = np.cumsum(e) - e
    likely = _at_least(scaled[first], params.min_p)
    keeps = [
        min(likely, int(np.searchsorted(before / (e.sum() + rest), params.top_p + margin, side="left")))
        if params.top_p < 1
        else likely
        for rest, margin in ((low, -_SURELY), (high, _SURELY))
    ]
    if keeps[0] != keeps[1] or keeps[0] == len(e):
        return None
    keep = max(1, keeps[0])
    ends = np.cumsum(e[:keep] / e[:keep].sum())
    if np.abs(ends[:-1] - uniform).min(initial=1.0) < _SURELY:
        return None
    return int(found.ids[first[_place(ends, uniform)]])


def log_probability(logits: NDArray, token: int) -> float:
    """ln softmax(logits)[token]: of the model's own distribution, before temperature and limits."""
    return float(log_probabilities(logits)[token])


def log_probabilities(logits: NDArray) -> NDArray[np.float64]:
    """ln softmax(logits), (V,) -> (V,)"""
    below = logits.astype(np.float64)
    below -= below.max()
    return below - np.log(np.exp(below).sum())


def likeliest_logprobs(logits: NDArray, k: int) -> tuple[list[int], list[float]]:
    """The k most likely tokens and their ln p, most likely first."""
    logprobs = log_probabilities(logits)
    ids = likeliest(logits.astype(np.float64), min(k, len(logits)))
    return ids.tolist(), logprobs[ids].tolist()


def _place(cumulative: NDArray[np.float64], uniform: float) -> int:
    """The inverse of a cumulative distribution, whose end may miss 1 by rounding; what is impossible is never taken."""
    last = int(np.searchsorted(cumulative, cumulative[-1], side="left"))
    return min(int(np.searchsorted(cumulative, uniform, side="right")), last)


def _softmax(scores: NDArray[np.float64]) -> NDArray[np.float64]:
    e = np.exp(scores - scores.max())
    return e / e.sum()
