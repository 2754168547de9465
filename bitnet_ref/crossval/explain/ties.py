"""Rows of ties: int8 values of one token of which many are on a half, where a right engine may round each either way.

Without a sub-norm the first token's z is v: integers times a scale. If the largest of them is 254 m, the odd multiples
of m are on a half once they are scaled. These are up to 127 sizes: more than the search of flips tries together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from ..flips import Flip
from ..tolerances import FLIP_FLOOR, TIES_IN_A_ROW
from ..types import Mask, Wide

# Sizes on a half that make a row of ties: of rows of 7,000 values one in 1,000 has as many by chance, and one in 10
# million has `MANY`, all choices of which cannot be tried.
_LEAST, MANY = 3, 6
_FITS, _DRAWN, _DRAWN_PER_TIE = 3, 256, 8  # choices that are drawn for each fit
_DRAWN_PER_VALUE = 3  # for each value of the row that is fitted; of a longer row a sample is
_RIDGE = 0.05  # of the mean variance, added to each

Row = dict[float, list[Flip]]  # what is near a half in a row, by its size: what is alike is rounded alike
Choice = Mask  # (ties,), which are rounded the other way


def tied_rows(near: Sequence[Flip], least: int = _LEAST) -> dict[str, Row]:
    """The rows of ties among those of a token, by name.   near: its activations near a half."""
    rows: dict[str, Row] = {}
    for flip in near:
        rows.setdefault(flip.name, {}).setdefault(abs(flip.before_rounding), []).append(flip)
    return {name: row for name, row in rows.items() if sum(map(_is_tie, row.values())) >= least}


def _is_tie(alike: Sequence[Flip]) -> bool:
    return alike[0].distance <= FLIP_FLOOR


def one_way(rows: Sequence[Row], flips: Sequence[Flip]) -> bool:
    """Whether all exact halves of rows go up, or away from zero: with so many that is the rule of a wrong engine."""
    made = {flip.place: flip.candidate for flip in flips}
    ties = [alike[0] for row in rows for alike in row.values() if alike[0].distance == 0]
    up = [made.get(tie.place, tie.reference) > tie.before_rounding for tie in ties]
    away = [is_up == (tie.before_rounding > 0) for is_up, tie in zip(up, ties, strict=True)]
    return len(ties) >= TIES_IN_A_ROW and (all(up) or all(away))


def choices(
    ties: Sequence[Sequence[Flip]], rows_of: Callable[[Sequence[Sequence[Flip]]], Iterator[Wide]], right: Wide
) -> Iterator[tuple[float, list[Flip]]]:
    """Better and better choices of ties to round the other way: how far the row is then from the right one, the flips.

    rows_of: the row that the reference gives with each set of flips.   right: (V,)

    One tie moves the row by less than the int8 roundings that follow it. So choices are drawn at random, and the mean
    move of each tie is fitted to the rows that they give. What the fit leaves says how much each value means. Then the
    choice is made whose moves add up to the right row, and the next choices are drawn near it.
    """
    count, rng = len(ties), np.random.default_rng(0)
    best, least, chance = np.zeros(count, dtype=bool), np.inf, np.full(count, 0.5)

    def flips_of(choice: Choice) -> list[Flip]:
        return [flip for alike, is_turned in zip(ties, choice, strict=True) if is_turned for flip in alike]

    def rows_given(tried: Choice) -> Wide:
        return np.array(list(rows_of([flips_of(choice) for choice in tried])))

    for _ in range(_FITS):
        drawn = rng.random((_DRAWN + _DRAWN_PER_TIE * count, count)) < chance
        drawn = drawn[drawn.any(axis=1)]
        rows = rows_given(drawn)
        sample = rng.permutation(len(right))[: len(drawn) // _DRAWN_PER_VALUE]
        moves, start, weights = _fit(drawn, rows[:, sample])
        share, fitted = _nearest(moves @ weights, (right[sample] - start) @ weights)
        near = fitted ^ np.concatenate([np.zeros((1, count), dtype=bool), np.eye(count, dtype=bool)])
        near = near[near.any(axis=1)]
        tried, rows = np.concatenate([near, drawn]), np.concatenate([rows_given(near), rows])
        errors = np.linalg.norm(rows - right, axis=1)
        if errors.min() < least:
            best, least = tried[errors.argmin()], float(errors.min())
        yield least, flips_of(best)
        chance = np.clip(share, 0.15, 0.85)


def _fit(drawn: Choice, rows: Wide) -> tuple[Wide, Wide, Wide]:
    """The mean moves of ties (n, k), where they start (k,), and weights (k, k) that make what is left even."""
    design = np.column_stack([drawn, np.ones(len(drawn))])
    fit = np.linalg.lstsq(design, rows, rcond=None)[0]
    left = rows - design @ fit
    variances = left.T @ left
    ridge = max(_RIDGE * float(np.trace(variances)) / len(variances), np.finfo(np.float64).tiny)
    factor = np.linalg.cholesky(variances + ridge * np.eye(len(variances)))
    weights: Wide = np.linalg.inv(factor).T
    return fit[:-1].astype(np.float64), fit[-1].astype(np.float64), weights


def _nearest(moves: Wide, wrong: Wide) -> tuple[Wide, Choice]:
    """Which moves (n, k) add up to what is wrong (k,): as shares of each, and as a choice."""
    shares = np.linalg.lstsq(moves.T, wrong, rcond=None)[0].astype(np.float64)
    chosen: Choice = shares > 0.5
    products, along = moves @ moves.T, moves @ wrong
    for _ in range(4 * len(moves)):
        # changing one with sign s lowers |wrong - sum|^2 by 2 s move . (wrong - sum) - |move|^2
        sign = np.where(chosen, -1.0, 1.0)
        gains = 2 * sign * (along - products @ chosen) - np.diag(products)
        if gains.max() <= 0:
            break
        chosen[gains.argmax()] ^= True
    return shares, chosen
