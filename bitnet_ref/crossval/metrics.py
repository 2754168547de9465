"""How far one array lies from another, in a pass over blocks of rows: memory does not grow with the tensors.

Cosine similarity is blind to a wrong scale and relative L2 to where an error sits, so both are given, with the scale
that fits best and the place of the largest error.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

MASKED = -1e9  # a score at or below this is a mask, however an engine writes it
_BLOCK_VALUES = 1 << 20


@dataclass
class Distance:
    """What `measure` finds. Row figures are one a token; `excess` is error / allowed error, above 1 is too far."""

    n_values: int = 0
    n_differ: int = 0
    max_abs: float = 0.0
    worst: tuple[int, ...] | None = None  # index of the largest error
    relative_l2: float = 0.0
    cosine: float = 1.0
    scale_ratio: float = 1.0  # least squares: candidate ~ scale_ratio * reference
    finite: bool = True
    row_excess: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))  # (N,)
    row_l2: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))  # (N,) relative
    row_differ: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, dtype=np.int64))  # (N,)
    row_equal: NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, dtype=bool))  # (N,)

    @property
    def equal(self) -> bool:
        return self.n_differ == 0


def rows_of(source: Mapping[str, NDArray], name: str, rows: slice) -> NDArray:
    """Some rows of a tensor: read from the file, where the source is a trace."""
    read_rows = getattr(source, "read_rows", None)
    return read_rows(name, rows.start, rows.stop) if read_rows is not None else np.asarray(source[name])[rows]


def shape_of(source: Mapping[str, NDArray], name: str) -> tuple[int, ...]:
    """A tensor's shape, without reading it."""
    shape = getattr(source, "shape", None)
    return shape(name) if shape is not None else np.asarray(source[name]).shape


def blocks_of(shape: tuple[int, ...]) -> Iterator[slice]:
    """Slices of the first axis of about a million values each."""
    rows = max(1, _BLOCK_VALUES // max(1, math.prod(shape[1:])))
    for start in range(0, shape[0], rows):
        yield slice(start, min(start + rows, shape[0]))


def measure(
    reference: Mapping[str, NDArray],
    candidate: Mapping[str, NDArray],
    name: str,
    candidate_name: str,
    shape: tuple[int, ...],
    relative: float,
    by_head: bool,
    floor: float,
) -> Distance:
    """Compare one tensor.

    shape: the reference's; the candidate's has as many values for each step of the first axis.
    relative: the error allowed as a share of the largest |reference| of the same row, which counts as at least `floor`.
    by_head: the first axis is heads and the second tokens (scores, patterns); otherwise the first is tokens.
    """
    tokens = shape[1] if by_head else shape[0]
    out = Distance(row_excess=np.zeros(tokens), row_l2=np.zeros(tokens), row_differ=np.zeros(tokens, dtype=np.int64))
    row_errors, row_squares = np.zeros(tokens), np.zeros(tokens)
    dot = rr = cc = dd = 0.0
    for rows in blocks_of(shape):
        r = rows_of(reference, name, rows)
        c = rows_of(candidate, candidate_name, rows).reshape(r.shape)
        if np.array_equal(r, c):  # the usual case between our backends, and quick; NaN is not equal to itself
            out.n_values += r.size
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
        out.finite = out.finite and good
        with np.errstate(all="ignore"):
            error = np.abs(c - r)
        if not good:
            error[np.isnan(error)] = np.inf
        differ = c != r
        out.n_values += r.size
        out.n_differ += int(np.count_nonzero(differ))
        if error.size and (out.worst is None or error.max() > out.max_abs):
            at = np.unravel_index(int(error.argmax()), error.shape)
            out.worst = (rows.start + int(at[0]), *(int(i) for i in at[1:]))
            out.max_abs = float(error[at])
        if good:
            dot, rr, cc = dot + float(np.vdot(r, c)), rr + float(np.vdot(r, r)), cc + float(np.vdot(c, c))
            dd += float(np.vdot(error, error))
        # one row of figures a token; scores and patterns have one a head and token, of which the worst is kept
        axes = (2,) if by_head else tuple(range(1, r.ndim))
        finite_r = r if good else np.where(np.isfinite(r), r, 0.0)
        with np.errstate(all="ignore"):
            magnitude = np.maximum(np.abs(finite_r).max(axis=axes, initial=0.0), floor)
            allowed = relative * magnitude
            largest = error.max(axis=axes, initial=0.0)
            excess = np.where(largest == 0, 0.0, largest / allowed)
            errors, squares = np.square(error).sum(axis=axes), np.square(finite_r).sum(axis=axes)
        if by_head:
            out.row_excess = np.maximum(out.row_excess, excess.max(axis=0, initial=0.0))
            row_errors, row_squares = row_errors + errors.sum(axis=0), row_squares + squares.sum(axis=0)
            out.row_differ += differ.sum(axis=(0, 2))
        else:
            out.row_excess[rows], row_errors[rows], row_squares[rows] = excess, errors, squares
            out.row_differ[rows] = differ.sum(axis=axes)
    out.row_equal = out.row_differ == 0
    out.row_l2 = _ratio(np.sqrt(row_errors), np.sqrt(row_squares))
    if out.finite:
        out.relative_l2 = float(_ratio(np.sqrt(np.array([dd])), np.sqrt(np.array([rr])))[0])
        out.cosine = dot / math.sqrt(rr * cc) if rr > 0 and cc > 0 else float(rr == cc)
        out.scale_ratio = dot / rr if rr > 0 else float(cc == 0)
    else:
        out.relative_l2, out.cosine, out.scale_ratio = math.inf, math.nan, math.nan
    return out


def _square(x: NDArray, by_head: bool) -> float:
    """The sum of squares; masked scores do not count."""
    values = x.reshape(-1).astype(np.float32)
    if by_head:
        values[values <= MASKED] = 0
    return float(np.vdot(values, values))


def _unmasked(scores: NDArray, by_head: bool) -> NDArray:
    return np.where(scores <= MASKED, -np.inf, scores) if by_head else scores


def _ratio(error: NDArray, size: NDArray) -> NDArray:
    """error / size; nothing over nothing is 0, something over nothing infinite."""
    with np.errstate(all="ignore"):
        return np.where(error == 0, 0.0, error / size)


@dataclass(frozen=True)
class LogitsDistance:
    """What the difference of the logits means for the text."""

    kl_mean: float  # nats: KL(reference || candidate) of the softmax, mean over the tokens
    kl_max: float
    top1_agreement: float  # share of tokens whose most likely next token is the same
    smallest_margin: float  # of the reference: best minus second best logit, at its smallest
    widest_lost_margin: float | None  # the widest margin that the candidate decides otherwise; None: none
    perplexity_reference: float | None  # on the tokens themselves; None for a single token
    perplexity_candidate: float | None

    @property
    def perplexity_difference(self) -> float | None:
        if self.perplexity_reference is None or self.perplexity_candidate is None:
            return None
        return self.perplexity_candidate - self.perplexity_reference


def measure_logits(
    reference: Mapping[str, NDArray],
    candidate: Mapping[str, NDArray],
    name: str,
    candidate_name: str,
    shape: tuple[int, ...],
    tokens: NDArray[np.int64] | None,
    first_row: int = 0,
) -> LogitsDistance:
    """Logits (N, V) as distributions, a block of rows at a time. `first_row`: where the candidate's rows begin."""
    kl: list[float] = []
    same: list[bool] = []
    margins: list[float] = []
    nll: list[tuple[float, float]] = []
    for rows in blocks_of((shape[0] - first_row, *shape[1:])):
        absolute = slice(rows.start + first_row, rows.stop + first_row)
        r = rows_of(reference, name, absolute).astype(np.float64)
        c = rows_of(candidate, candidate_name, rows).reshape(r.shape).astype(np.float64)
        log_p, log_q = _log_softmax(r), _log_softmax(c)
        with np.errstate(all="ignore"):
            kl += np.where(np.exp(log_p) > 0, np.exp(log_p) * (log_p - log_q), 0.0).sum(axis=-1).tolist()
        same += (r.argmax(-1) == c.argmax(-1)).tolist()
        best = np.partition(r, -2, axis=-1)[:, -2:] if r.shape[-1] > 1 else np.zeros((len(r), 2))
        margins += (best[:, 1] - best[:, 0]).tolist()
        if tokens is not None:
            for i in range(len(r)):
                if (following := absolute.start + i + 1) < len(tokens):
                    nll.append((-log_p[i, tokens[following]], -log_q[i, tokens[following]]))
    lost = [margin for margin, agrees in zip(margins, same, strict=True) if not agrees]
    perplexity = np.exp(np.minimum(np.mean(nll, axis=0), 700.0)) if nll else (None, None)
    return LogitsDistance(
        kl_mean=float(np.mean(kl)),
        kl_max=float(np.max(kl)),
        top1_agreement=float(np.mean(same)),
        smallest_margin=float(min(margins)),
        widest_lost_margin=float(max(lost)) if lost else None,
        perplexity_reference=None if perplexity[0] is None else float(perplexity[0]),
        perplexity_candidate=None if perplexity[1] is None else float(perplexity[1]),
    )


def _log_softmax(x: NDArray) -> NDArray:
    shifted = x - x.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
