"""Choose a token from one row of logits: from all of them, or from the candidates of a screened head; its ln p."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..backends.backend import DrawRule
from ..backends.run import TokenLogits
from ..reference.layers import Floats
from ..system.forks import ForkLock
from .params import SamplingParams

MAX_TOP_K = 1024  # a larger limit computes the whole head
# top_p and min_p without top_k look at the most likely tokens; bounds on the others tell whether these suffice.
NUCLEUS_CANDIDATES = 1024
# Among so many of the most likely tokens top_p and min_p usually end; sorting all of them takes 10 times as long.
FEW = (64, 512)
BLOCK = 64  # tokens whose probabilities are summed together
_ROUNDING = 1e-9  # far above the rounding of sums of some hundred thousand float64 probabilities

TOKENS_AT_A_TIME = 32  # whose logits are held together: 16 MB for a vocabulary of 128,256

Entry = tuple[float, dict[int, float]]  # ln p of the chosen token; {id: ln p} of the most likely and the chosen ones
Distribution = tuple[NDArray[np.int64], NDArray[np.float64]]  # ids (n,), probabilities (n,), which sum to 1


Draw = Callable[[Floats, DrawRule, float], int | None]  # `Backend.draw`


def choose(logits: Floats, params: SamplingParams, uniform: float, draw: Draw | None = None) -> int:
    """The next token, for a number drawn from [0, 1).   logits (V,) float -> id.  Ties go to the smaller id.

    draw: a backend's, which gives the same tokens in less time.
    """
    if params.temperature == 0:
        return int(logits.argmax())
    top_k = params.top_k if params.top_k < logits.size else 0
    if (token := _draw(draw, logits, params, uniform, top_k)) is not None:
        return token
    if not (top_k or params.top_p < 1 or params.min_p > 0 or params.typical_p < 1):
        token = _draw_by_blocks(logits, params.temperature, uniform)
    if token is None:
        ids, probabilities = distribution(logits, params)
        token = int(ids[_invert(np.cumsum(probabilities), uniform)])
    return token


def _draw(draw: Draw | None, logits: Floats, params: SamplingParams, uniform: float, top_k: int) -> int | None:
    """The index that the backend draws; None where it does not.   top_k: 0 is no limit"""
    if draw is None or params.typical_p < 1:
        return None
    return draw(logits, DrawRule(params.temperature, top_k, params.top_p, params.min_p), uniform)


def _draw_by_blocks(logits: Floats, temperature: float, uniform: float) -> int | None:
    """`choose` without limits, in half the time: probabilities are summed by blocks, and one by one in the block of the
    token only. None where the rounding of these sums could give a neighbour.   logits (V,)"""
    e = logits.astype(np.float64)
    if temperature != 1:
        e /= temperature
    e -= e.max()
    np.exp(e, out=e)
    ends = np.cumsum(np.add.reduceat(e, np.arange(0, len(e), BLOCK)))
    total, target = ends[-1], uniform * ends[-1]
    block = int(ends[:-1].searchsorted(target, side="right"))
    inside = np.cumsum(e[block * BLOCK : (block + 1) * BLOCK])
    if block > 0:
        inside += ends[block - 1]
    place = int(inside.searchsorted(target, side="right"))
    if place == len(inside) or inside[place] - target < _ROUNDING * total:
        return None
    below = inside[place - 1] if place > 0 else ends[block - 1] if block > 0 else -total
    return None if target - below < _ROUNDING * total else block * BLOCK + place


def distribution(logits: Floats, params: SamplingParams) -> Distribution:
    """The distribution to sample from, in float64, for temperature > 0.   logits (V,) -> ids (n,), probabilities (n,)

    In the order of transformers: temperature, then top_k, top_p, min_p, typical_p. Among equal logits top_k keeps the
    smaller ids, so that there are k; transformers keeps all equals. Most likely first when a limit applies, else in the
    order of ids.
    """
    if 0 < params.top_k < logits.size:
        return _likeliest_k(logits, params)
    scaled = logits.astype(np.float64) / params.temperature
    if not (params.top_p < 1 or params.min_p > 0 or params.typical_p < 1):
        return np.arange(scaled.size), softmax(scaled)
    probabilities = softmax(scaled)
    for count in (*(few for few in FEW if few < scaled.size), scaled.size):
        ids = likeliest(scaled, count)
        kept = _limit(ids, scaled[ids], probabilities[ids], params)
        if count == scaled.size or (params.typical_p == 1 and len(kept[0]) < len(ids)):
            break  # more tokens would give the same
    return kept


def _likeliest_k(logits: Floats, params: SamplingParams) -> Distribution:
    """The distribution over the top_k largest logits, of at least as many."""
    ids = likeliest(logits, params.top_k)
    scaled = logits[ids].astype(np.float64) / params.temperature
    return _limit(ids, scaled, softmax(scaled), params)


def _limit(
    ids: NDArray[np.int64], scaled: NDArray[np.float64], probabilities: NDArray[np.float64], params: SamplingParams
) -> Distribution:
    """Apply top_p, min_p and typical_p to tokens sorted by their logits, largest first."""
    ids, probabilities = nucleus(ids, probabilities, params.top_p)
    if params.min_p > 0:
        keep = count_min_p(scaled[: len(ids)], params.min_p)
        ids, probabilities = ids[:keep], probabilities[:keep] / probabilities[:keep].sum()
    return typical(ids, probabilities, params.typical_p)


def likeliest(scaled: NDArray[np.floating], k: int) -> NDArray[np.int64]:
    """Indices of the k largest, largest first; among equals the smaller index first."""
    ids = np.flatnonzero(scaled >= np.partition(scaled, -k)[-k])
    return ids[np.argsort(-scaled[ids], kind="stable")][:k]


def nucleus(ids: NDArray[np.int64], probabilities: NDArray[np.float64], top_p: float) -> Distribution:
    """The first tokens, most likely first, whose probabilities reach top_p, normalised again."""
    if top_p == 1:
        return ids, probabilities
    before = np.cumsum(probabilities) - probabilities  # the mass of everything more likely
    keep = max(1, int(np.searchsorted(before, top_p, side="left")))
    return ids[:keep], probabilities[:keep] / probabilities[:keep].sum()


def count_min_p(scaled: NDArray[np.float64], min_p: float) -> int:
    """How many of these, largest first, are at least min_p times as likely as the first (arXiv 2407.01082)."""
    return int(np.count_nonzero(np.exp(scaled - scaled[0]) >= min_p))


def typical(ids: NDArray[np.int64], probabilities: NDArray[np.float64], typical_p: float) -> Distribution:
    """The tokens whose surprise, -ln p, is nearest its mean, up to the mass typical_p (arXiv 2202.00666)."""
    if typical_p == 1:
        return ids, probabilities
    surprise = -np.log(np.maximum(probabilities, np.finfo(np.float64).tiny))
    distance = np.abs(surprise - (probabilities * surprise).sum())
    nearest = np.argsort(distance, kind="stable")
    last = int(np.count_nonzero(np.cumsum(probabilities[nearest]) < typical_p))
    keep = distance <= distance[nearest[min(last, len(nearest) - 1)]]  # equals stay together, as in transformers
    return ids[keep], probabilities[keep] / probabilities[keep].sum()


def candidates_needed(params: SamplingParams, vocab_size: int) -> int | None:
    """How many of the largest logits the choice needs; None: all logits."""
    if params.temperature == 0:
        return 1
    if 0 < params.top_k < vocab_size:
        return params.top_k if params.top_k <= MAX_TOP_K else None
    if params.typical_p < 1:  # the mean surprise is that of all tokens
        return None
    return min(NUCLEUS_CANDIDATES, vocab_size) if params.top_p < 1 or params.min_p > 0 else None


def choose_among(
    logits: TokenLogits,
    params: SamplingParams,
    uniform: float,
    values: Floats | None = None,
    draw: Draw | None = None,
) -> int | None:
    """`choose` from the logits for `candidates_needed`. None: they do not determine the token, which only top_p and
    min_p without top_k can cause.   values (n,): `logits.values` as changed by rules"""
    ids, values = logits.ids, logits.values if values is None else values
    if logits.complete:
        return choose(values, params, uniform, draw)
    if params.temperature == 0:
        return int(ids[values.argmax()])
    if 0 < params.top_k < logits.vocab_size:
        if (index := _draw(draw, values, params, uniform, params.top_k)) is None:
            indices, probabilities = _likeliest_k(values, params)
            index = int(indices[_invert(np.cumsum(probabilities), uniform)])
        return int(ids[index])
    scaled = values.astype(np.float64) / params.temperature
    index = _choose_in_nucleus(scaled, logits.rest(), params, uniform)
    return None if index is None else int(ids[index])


def _choose_in_nucleus(
    scaled: NDArray[np.float64], rest: tuple[Floats, Floats], params: SamplingParams, uniform: float
) -> int | None:
    """top_p and min_p without top_k.   -> an index of `scaled`

    rest: bounds of the other logits. They bound the probability of each candidate, and so the number of tokens in the
    nucleus; min_p depends on the most likely token only.
    """
    first = likeliest(scaled, NUCLEUS_CANDIDATES)
    largest = scaled[first[0]]
    e = np.exp(scaled[first] - largest)
    others = np.exp(np.delete(scaled, first) - largest).sum()
    with np.errstate(over="ignore"):  # an infinite bound decides nothing
        masses = [others + np.exp(each.astype(np.float64) / params.temperature - largest).sum() for each in rest]
    before, likely = np.cumsum(e) - e, count_min_p(scaled[first], params.min_p)
    counts = {likely}
    if params.top_p < 1:
        limits = zip(masses, (params.top_p - _ROUNDING, params.top_p + _ROUNDING), strict=True)
        counts = {min(likely, int(np.searchsorted(before / (e.sum() + mass), limit))) for mass, limit in limits}
    if len(counts) > 1 or len(e) in counts:
        return None
    count = max(1, *counts)
    ends = np.cumsum(e[:count] / e[:count].sum())
    if np.abs(ends[:-1] - uniform).min(initial=1.0) < _ROUNDING:
        return None
    return int(first[_invert(ends, uniform)])


def _invert(cumulative: NDArray[np.float64], uniform: float) -> int:
    """The index of `uniform` in a cumulative distribution, whose end may miss 1 by rounding; never one of p = 0."""
    last = int(np.searchsorted(cumulative, cumulative[-1]))
    return min(int(np.searchsorted(cumulative, uniform, side="right")), last)


def softmax(scores: NDArray[np.float64]) -> NDArray[np.float64]:
    e: NDArray[np.float64] = np.exp(scores - scores.max())
    e /= e.sum()
    return e


def log_probability(logits: Floats, token: int) -> float:
    """ln softmax(logits)[token]: of the model's own distribution, before temperature and limits."""
    return float(log_probabilities(logits)[token])


def log_probabilities(logits: Floats) -> NDArray[np.float64]:
    """ln softmax(logits) over the last axis, (..., V) -> (..., V)"""
    below = logits.astype(np.float64)
    below -= below.max(axis=-1, keepdims=True)
    below -= np.log(np.exp(below).sum(axis=-1, keepdims=True))
    return below


def entry_of(logprobs: NDArray[np.float64], token: int, top: int) -> Entry:
    """The entry of a chosen token.   logprobs (V,): ln p of all; top: also report this many of the likeliest"""
    ids = [*likeliest(logprobs, min(top, len(logprobs))).tolist(), token] if top else [token]
    return float(logprobs[token]), dict(zip(ids, logprobs[ids].tolist(), strict=True))


class Logprobs:
    """ln p of one row's tokens, computed when they are first read. top: also report this many of the likeliest tokens.

    ln p needs the logits of the whole vocabulary, which a screened head does not compute. So the head's input is kept,
    D floats per token, and the first read computes the head for all tokens so far together. By the model's batch
    invariance these logits equal, to the bit, those that an exact head would have computed in the step itself.
    """

    def __init__(self, top: int = 0) -> None:
        self._top = top
        self._lock = ForkLock()  # one thread may generate while another reads
        self._head: Callable[[Floats], Floats]
        self._waiting: list[tuple[int, Floats, int]] = []  # (index, the head's input (D,), token)
        self._known: dict[int, Entry] = {}
        self._count = 0

    def add(self, token: int, logits: TokenLogits, whole: Floats | None, wants_top: bool = True) -> tuple[Any, Any]:
        """Add a chosen token. -> its ln p and `top_logprobs`, or functions that compute them when `whole` is None.

        whole (V,): all its logits, if they are known and the values will surely be read. wants_top: whether
        `top_logprobs` is used; else it is None.
        """
        if whole is not None or logits.hidden is None:
            return entry_of(log_probabilities(logits.all() if whole is None else whole), token, self._top)
        # Without the lock: only the thread that generates adds, and a list may grow while another reads its front.
        index, self._count, self._head = self._count, self._count + 1, logits.head
        self._waiting.append((index, logits.hidden.copy(), token))
        return lambda: self[index][0], (lambda: self[index][1]) if wants_top else None

    def __getitem__(self, index: int) -> Entry:
        with self._lock:
            while index not in self._known:
                block = self._waiting[:TOKENS_AT_A_TIME]
                logits = self._head(np.stack([hidden for _, hidden, _ in block]))
                for (each, _, token), row in zip(block, logits, strict=True):
                    self._known[each] = entry_of(log_probabilities(row), token, self._top)
                del self._waiting[: len(block)]
            return self._known[index]
