"""How far one array is from another, computed over blocks of rows, so that memory does not grow with the tensors.

Cosine similarity does not see a wrong scale, and relative L2 does not see where an error is. So both are given, with
the scale that fits best and the place of the largest error.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from ..generation.sampling import log_probabilities
from ..reference.layers import Array
from .types import Ints, Tensors, Wide

MASKED = -9e3  # a score at or below this is a mask, however an engine writes it: -10,000, float16's -65504
_BLOCK_VALUES = 1 << 20


@dataclass(frozen=True)
class Figures:
    """Of a whole tensor."""

    n_values: int
    n_differ: int
    max_abs: float
    worst: tuple[int, ...] | None  # index of the largest error
    relative_l2: float
    cosine: float
    scale_ratio: float  # candidate ~ scale_ratio * reference, least squares

    @property
    def figures(self) -> tuple[int, int, float, tuple[int, ...] | None, float, float, float]:
        ratios = self.relative_l2, self.cosine, self.scale_ratio
        return self.n_values, self.n_differ, self.max_abs, self.worst, *ratios


@dataclass(frozen=True)
class Distance(Figures):
    """The result of `measure`. row_excess: error / allowed error, above 1 is too much."""

    finite: bool
    row_excess: Wide  # (N,)
    row_l2: Wide  # (N,) relative


class Rows(Protocol):
    """A tensor: an array, or one in a trace file, which reads only the rows that are asked for."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def __getitem__(self, rows: slice, /) -> Array: ...


def tensor_of(run: Tensors, name: str) -> Rows:
    """A tensor of a run. One of a trace is not read yet."""
    tensor = getattr(run, "tensor", None)
    return tensor(name) if tensor is not None else np.asarray(run[name])


def recorded_dtype(tensor: Rows) -> str:
    """The name of a tensor's dtype; "" of a single number's."""
    return tensor[:0].dtype.name if tensor.shape else ""


def blocks_of(shape: tuple[int, ...]) -> Iterator[slice]:
    """Slices of the first axis, of about a million values each."""
    rows = max(1, _BLOCK_VALUES // max(1, math.prod(shape[1:])))
    for start in range(0, shape[0], rows):
        yield slice(start, min(start + rows, shape[0]))


def measure(reference: Rows, candidate: Rows, relative: Array, by_head: bool, floor: float) -> Distance:
    """Compare one tensor. The candidate's has as many values for each step of the first axis.

    relative: (tokens,) the error allowed as a share of the largest |reference| of the row, which counts as at least
        `floor`.
    by_head: the first axis is heads and the second tokens (scores, patterns); otherwise the first is tokens.
    """
    tokens = reference.shape[1 if by_head else 0]
    row_excess, row_errors, row_squares = np.zeros(tokens), np.zeros(tokens), np.zeros(tokens)
    n_values = n_differ = 0
    worst: tuple[int, ...] | None = None
    max_abs, finite = 0.0, True
    dot = rr = cc = dd = 0.0
    for rows in blocks_of(reference.shape):
        r = reference[rows]
        c = candidate[rows].reshape(r.shape)
        n_values += r.size
        if np.array_equal(r, c):  # quick, and the usual case between our backends; NaN is not equal to itself
            square = _square(r, by_head)
            if by_head:
                finite_r = np.where(_unmasked(r, True) > -np.inf, r, 0)
                row_squares = row_squares + np.square(finite_r, dtype=np.float64).sum(axis=(0, 2))
            dot, rr, cc = dot + square, rr + square, cc + square
            continue
        r, c = _unmasked(r.astype(np.float64), by_head), _unmasked(c.astype(np.float64), by_head)
        both = np.isneginf(r) & np.isneginf(c) if by_head else None
        if both is not None and both.any():
            r, c = np.where(both, 0.0, r), np.where(both, 0.0, c)
        good = bool(np.isfinite(c).all() and np.isfinite(r).all())
        finite = finite and good
        with np.errstate(all="ignore"):
            error = np.abs(c - r)
        if not good:
            error[np.isnan(error)] = np.inf
        n_differ += int(np.count_nonzero(c != r))
        if error.size and (worst is None or error.max() > max_abs):
            index = np.unravel_index(int(error.argmax()), error.shape)
            worst = (rows.start + int(index[0]), *(int(i) for i in index[1:]))
            max_abs = float(error[index])
        if good:
            dot, rr, cc = dot + float(np.vdot(r, c)), rr + float(np.vdot(r, r)), cc + float(np.vdot(c, c))
            dd += float(np.vdot(error, error))
        # one figure per token; of scores and patterns, which have one per head and token, the largest
        axes = (2,) if by_head else tuple(range(1, r.ndim))
        finite_r = r if good else np.where(np.isfinite(r), r, 0.0)
        with np.errstate(all="ignore"):
            magnitude = np.maximum(np.abs(finite_r).max(axis=axes, initial=0.0), floor)
            allowed = (relative if by_head else relative[rows]) * magnitude
            largest = error.max(axis=axes, initial=0.0)
            excess = np.where(largest == 0, 0.0, largest / allowed)
            errors, squares = np.square(error).sum(axis=axes), np.square(finite_r).sum(axis=axes)
        if by_head:
            row_excess = np.maximum(row_excess, excess.max(axis=0, initial=0.0))
            row_errors, row_squares = row_errors + errors.sum(axis=0), row_squares + squares.sum(axis=0)
        else:
            row_excess[rows], row_errors[rows], row_squares[rows] = excess, errors, squares
    relative_l2, cosine, scale_ratio = math.inf, math.nan, math.nan
    if finite:
        relative_l2 = float(_ratio(np.sqrt(np.array([dd])), np.sqrt(np.array([rr])))[0])
        cosine = dot / math.sqrt(rr * cc) if rr > 0 and cc > 0 else float(rr == cc)
        scale_ratio = dot / rr if rr > 0 else float(cc == 0)
    row_l2 = _ratio(np.sqrt(row_errors), np.sqrt(row_squares))
    whole = (n_values, n_differ, max_abs, worst if n_differ else None, relative_l2, cosine, scale_ratio)
    return Distance(*whole, finite, row_excess, row_l2)


def _square(x: Array, by_head: bool) -> float:
    """The sum of squares without masked scores."""
    values = x.reshape(-1).astype(np.float32)
    if by_head:
        values[values <= MASKED] = 0
    return float(np.vdot(values, values))


def _unmasked(scores: Array, by_head: bool) -> Array:
    return np.where(scores <= MASKED, -np.inf, scores) if by_head else scores


def _ratio(error: Array, size: Array) -> Array:
    """error / size, where 0 / 0 is 0."""
    with np.errstate(all="ignore"):
        return np.where(error == 0, 0.0, error / size)


@dataclass(frozen=True)
class LogitsDistance:
    """How two sets of logits differ as distributions of the next token."""

    kl_mean: float  # nats: KL(reference || candidate) of the softmax, mean over the tokens
    kl_max: float
    top1_agreement: float  # share of tokens whose most likely next token is the same
    smallest_margin: float  # best minus second best logit of the reference, minimum over the tokens
    widest_lost_margin: float | None  # maximum over the tokens whose most likely next token differs
    perplexity_reference: float | None  # on the tokens themselves; None for a single token
    perplexity_candidate: float | None


def measure_logits(reference: Rows, candidate: Rows, tokens: Ints | None = None, first_row: int = 0) -> LogitsDistance:
    """Compare logits (N, V) as distributions. first_row: the reference's row that the candidate's first belongs to."""
    kl: list[float] = []
    same: list[bool] = []
    margins: list[float] = []
    nll: list[tuple[float, float]] = []
    for rows in blocks_of((reference.shape[0] - first_row, *reference.shape[1:])):
        absolute = slice(rows.start + first_row, rows.stop + first_row)
        r = reference[absolute].astype(np.float64)
        c = candidate[rows].reshape(r.shape).astype(np.float64)
        log_p, log_q = log_probabilities(r), log_probabilities(c)
        with np.errstate(all="ignore"):
            kl += np.where(np.exp(log_p) > 0, np.exp(log_p) * (log_p - log_q), 0.0).sum(axis=-1).tolist()
        same += (r.argmax(-1) == c.argmax(-1)).tolist()
        best = np.partition(r, -2, axis=-1)[:, -2:] if r.shape[-1] > 1 else np.zeros((len(r), 2))
        margins += (best[:, 1] - best[:, 0]).tolist()
        if tokens is not None:
            following = tokens[absolute.start + 1 : absolute.stop + 1]
            chosen = np.arange(len(following)), following
            nll += zip(-log_p[chosen], -log_q[chosen], strict=True)
    lost = [margin for margin, agrees in zip(margins, same, strict=True) if not agrees]
    perplexity = np.exp(np.minimum(np.mean(nll, axis=0), 700.0)).tolist() if nll else (None, None)
    return LogitsDistance(
        kl_mean=float(np.mean(kl)),
        kl_max=float(np.max(kl)),
        top1_agreement=float(np.mean(same)),
        smallest_margin=float(min(margins)),
        widest_lost_margin=float(max(lost)) if lost else None,
        perplexity_reference=perplexity[0],
        perplexity_candidate=perplexity[1],
    )
