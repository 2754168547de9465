"""Whether flips that a thin trace does not show, and that cannot be searched for, may explain what differs in it.

Logits alone, of many tokens, may hold more flips than can be searched for. So the reference runs with as much noise as
an engine may have. What is no further off than with that noise cannot be told from a correct engine's.
"""

from __future__ import annotations

import numpy as np

from ...errors import count_of
from ...reference.layers import Array
from ..compare import OpResult
from ..metrics import recorded_dtype
from ..names import LOGITS, layer_of
from ..tolerances import FEW_FLIPS, RECORDED_ROUNDING, VALUES_PER_FLIP
from ..types import Wide
from .flipped_runs import FlippedRun, FlippedRuns, rows_of
from .ties import MANY, tied_rows

TOGETHER = 4  # flips of one token that are tried together; one of them may only be near a half after another
_NOISY_RUNS = 8  # of the reference with noise
_BEYOND_NOISE = 1.5  # an error so many times the largest of theirs is no rounding
_USUAL = 0.99  # of one row alone: nor is one that is larger than this share of theirs


def why_undecided(runs: FlippedRuns, run: FlippedRun, first: OpResult, sizes: dict[str, int]) -> str:
    """Why what no flips explain may be right; "" if it shows a mistake.   sizes: of the int8 tensors.

    The first wrong token must see a row of ties, or so many int8 values that more may have flipped than are tried
    together: a mistake in every token is seen in the first. Without ties it must be logits, and the values those of
    the layers after the last that the trace shows, or some flips have brought agreement before. From there on the
    tensor must be no further off than that of the reference with noise that flips as many values as an engine may.
    """
    tokens, right, flips = len(runs.setting.tokens), run.tensors[first.name], len(run.flips)
    places = [runs.order[name] for name in runs.candidate if name in runs.order]
    shown = [place for place in places if place < runs.order[first.name]]  # what is shown there agrees
    since = -1 if flips >= FEW_FLIPS else max(shown, default=-1)
    given = runs.candidate[first.name]
    rounding = RECORDED_ROUNDING.get(recorded_dtype(given), 0.0)
    given = given.reshape(right.shape if given.size == right.size else (1, -1))
    mine, theirs = (rows_of(first.name, x) for x in (right, given))
    token = tokens - 1 if len(theirs) < tokens else first.token or 0
    has_ties = any(_hides_ties(runs, run, each, first.name, since, mine.shape[1]) for each in range(token + 1))
    if not (flips >= FEW_FLIPS or first.name == LOGITS or has_ties) or not np.isfinite(first.max_abs):
        return ""
    values = sum(size for name, size in sizes.items() if runs.order[name] > since)
    if not has_ties and values * (token + 1) <= TOGETHER * VALUES_PER_FLIP * tokens:
        return ""
    errors = _row_errors(theirs, mine[-len(theirs) :])
    noisy = [_row_errors(runs.noisy_rows(run.flips, first.name, seed), mine) for seed in range(_NOISY_RUNS)]
    if len(theirs) == 1:
        limits = np.quantile(noisy, [_USUAL]) * (_BEYOND_NOISE if has_ties else 1)
        which = "the values of the last token" if shown else "those of the last token"
    else:
        limits = _BEYOND_NOISE * np.maximum.accumulate(np.max(noisy, axis=0))
        agreeing = "token 0 agrees" if token == 1 else f"tokens 0 to {token - 1} agree"
        which = f"{agreeing}, those after {'it' if token == 1 else 'them'}" if token else "the values"
        together = max(float(np.linalg.norm(each)) for each in noisy)
        if float(np.linalg.norm(errors)) > _BEYOND_NOISE * together:
            return ""
    if (errors > np.maximum(limits, first.tolerance) + rounding).any():
        return ""
    if first.name == LOGITS and not shown:
        place, do_not_show = "", "logits do"
    else:
        place = f"with {count_of(flips, 'flip')}, in {first.name} " if flips else f"in {first.name} "
        do_not_show = "the trace does"
    return (
        f"{place}{which} are off by up to {errors.max():.2g} of their size, and rounding "
        f"flips of int8 activations, which {do_not_show} not show, move them by up to {limits.max():.2g}"
    )


def _hides_ties(runs: FlippedRuns, run: FlippedRun, token: int, name: str, since: int, width: int) -> bool:
    """Whether a tensor may hide which of many ties flip: few values, or logits after a further layer.

    since: the place of the last tensor that agrees.   width: of the tensor's rows.
    """
    rows = tied_rows(run.near.get(token, ()), MANY)
    tied = [each for each in rows if since < runs.order[each] < runs.order[name]]
    last = runs.setting.config.num_hidden_layers - 1
    return any(width < MANY or (name == LOGITS and (layer_of(each) or 0) < last) for each in tied)


def _row_errors(mine: Array, theirs: Array) -> Wide:
    """Relative L2 of each row.   2 x (n, V) -> (n,)"""
    sizes = np.linalg.norm(theirs.astype(np.float64), axis=1)
    difference = np.linalg.norm(mine.astype(np.float64) - theirs, axis=1)
    return np.asarray(difference / np.maximum(sizes, np.finfo(np.float32).tiny))
