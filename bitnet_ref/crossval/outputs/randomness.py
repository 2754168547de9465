"""Were tokens sampled that should be greedy? By comparing how likely they are with what sampling would give."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations
from typing import TYPE_CHECKING

import numpy as np

from ...generation.sampling import log_probabilities
from ..explain.diagnose import Diagnosis
from ..token_ids import common_prefix
from ..tolerances import near_tie
from ..types import Ints, Tokens, Wide

if TYPE_CHECKING:
    from .given import GivenRun, Rows

TEMPERATURES = tuple(round(0.4 + 0.05 * i, 2) for i in range(19))  # 0.4 to 1.3
_FEWEST = 16  # tokens
_FEWEST_WRONG = 4
_DEVIATIONS = 2.5
_REMEDY = "Check that temperature 0 reaches the sampler, and that nothing replaces it by a default."


def looks_sampled(runs: Sequence[tuple[GivenRun, Rows]]) -> Diagnosis | None:
    """A diagnosis if the ids are as likely as sampled ones.

    It is confirmed only if one prompt was continued twice, and differently where no rounding decides: a wrong model may
    give ids as likely.
    """
    cause = _likelihood([np.asarray(rows, dtype=np.float64) for _, rows in runs], [run.tokens for run, _ in runs])
    twice = _continued_twice(runs)
    if twice:
        text = f"tokens are sampled although the temperature should be 0: the same prompt {twice}"
        return Diagnosis("sampling", text if cause is None else f"{text}; {cause}", _REMEDY, confirmed=True)
    if cause is None:
        return None
    text = f"tokens are sampled although the temperature should be 0: {cause}"
    return Diagnosis("sampling", text, f"{_REMEDY} To be sure, run one prompt twice.", confirmed=False, possible=True)


def _continued_twice(runs: Sequence[tuple[GivenRun, Rows]]) -> str:
    """Where two runs of one prompt part though the reference has no near tie there, in words."""
    for (one, rows), (other, _) in combinations(runs, 2):
        if one.prompt != other.prompt:
            continue
        at = common_prefix(one.tokens, other.tokens)
        if at < min(len(one.tokens), len(other.tokens)):
            behind = rows[at].max() - min(rows[at][one.tokens[at]], rows[at][other.tokens[at]])
            if behind > near_tie(one.engine_dtype, rows[at : at + 1])[0]:
                return f"has two continuations, which part at token {at}"
    return ""


def _likelihood(rows: Sequence[Wide], tokens: Sequence[Tokens]) -> str | None:
    """In words how likely the ids are beside sampled ones; None if sampling at no usual temperature gives such ids."""
    logits, ids = np.concatenate(rows), np.concatenate([np.asarray(each, dtype=np.int64) for each in tokens])
    if len(ids) < _FEWEST or int((logits.argmax(axis=1) != ids).sum()) < _FEWEST_WRONG:
        return None
    figures = {t: _figures(logits, ids, t) for t in TEMPERATURES}
    best = max(figures, key=lambda t: figures[t][0])
    total, mean, deviation, hits, calibration = figures[best]
    if best in (TEMPERATURES[0], TEMPERATURES[-1]):
        return None
    if abs(total - mean) > _DEVIATIONS * deviation or abs(hits) > _DEVIATIONS or calibration > 1.5:
        return None
    nearest = min((1.0, 0.8), key=lambda t: abs(figures[t][0] - figures[t][1]) / figures[t][2])
    total, mean, deviation, *_ = figures[nearest]
    return (
        f"their log likelihood at T={nearest:g} is {total:.0f}, and sampling at that temperature gives {mean:.0f} "
        f"+- {deviation:.0f}; the likeliest temperature is {best:g}"
    )


def _figures(logits: Wide, ids: Ints, temperature: float) -> tuple[float, float, float, float, float]:
    """ln likelihood, its mean and deviation under sampling, deviations of the count of largest logits, and how far the
    mass of likelier tokens is from uniform (Kolmogorov's statistic times sqrt(n); 1.5 is one in 45)."""
    ln_p = log_probabilities(logits / temperature)
    p = np.exp(ln_p)
    chosen = ln_p[np.arange(len(ids)), ids]
    finite = np.where(p > 0, ln_p, 0)
    mean = (p * finite).sum(axis=1)
    variance = (p * finite * finite).sum(axis=1) - mean * mean
    largest = p.max(axis=1)
    hits = float((logits.argmax(axis=1) == ids).sum() - largest.sum())
    spread = math.sqrt(max(float((largest * (1 - largest)).sum()), 1e-9))
    own = p[np.arange(len(ids)), ids]
    above = (p * (p > own[:, None])).sum(axis=1)
    place = np.sort(above + own * np.random.default_rng(0).random(len(ids)))  # somewhere in the token's own share
    steps = (np.arange(len(ids)) + 0.5) / len(ids)
    kolmogorov = float(np.abs(place - steps).max() * math.sqrt(len(ids)))
    return float(chosen.sum()), float(mean.sum()), math.sqrt(float(variance.sum())), hits / spread, kolmogorov
