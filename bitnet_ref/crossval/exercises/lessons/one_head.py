"""Notebook 3a: one attention head by hand, on four tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ....reference.layers import Array, softmax
from ..answers import as_array, as_integers, as_number, expect_array
from ..declare import Wrong, draws, exercise, run
from ..tables import judged_by_table


@exercise("3a.1")
def averaging_matrix(answer: Any) -> str:
    ones = np.tril(np.ones((4, 4)))
    right = ones / ones.sum(1, keepdims=True)
    mistakes = {
        "every token averages all four, also those after it": np.full((4, 4), 0.25),
        "the rows are not divided by their sums": ones,
        "the columns sum to 1; the rows must": ones / ones.sum(0),
        "each column is divided by a row's sum: let the sums be a column, by keepdims=True": ones / ones.sum(1),
        "every row is divided by 4; row i has i + 1 tokens": ones / 4,
        "a token must not look at those after it: the triangle is the upper one": right[::-1, ::-1],
        "a token leaves itself out": np.tril(np.ones((4, 4)), -1) / np.maximum(np.arange(4), 1)[:, None],
    }
    expect_array(answer, right, mistakes=mistakes)
    return "One matrix product does what the loop did."


@exercise("3a.2")
def all_scores(answer: Any, q: Array, k: Array) -> str:
    right = q @ k.T / np.sqrt(q.shape[-1])
    mistakes = {
        "the scores are not divided by √d": q @ k.T,
        "they are divided by d, not by its root": q @ k.T / q.shape[-1],
        "queries and keys are exchanged: row i must be query i": right.T,
        "keys are compared with keys: the rows are those of q": k @ k.T / np.sqrt(q.shape[-1]),
        "queries are compared with queries": q @ q.T / np.sqrt(q.shape[-1]),
        "they are multiplied by √d": q @ k.T * np.sqrt(q.shape[-1]),
    }
    expect_array(answer, right, mistakes=mistakes)
    return "16 dot products, one of each query with each key."


@exercise("3a.3")
def causal_mask(answer: Any) -> str:
    n = 4
    past = np.tril(np.ones((n, n), dtype=bool))
    mistakes = {
        "True must stand where a key is hidden; yours shows the future and hides the past": past,
        "a token must see itself: the diagonal is False": ~past | np.eye(n, dtype=bool),
        "the mask is transposed: rows are queries, columns keys": (~past).T,
        "only the very next token is hidden; all later ones must be": np.eye(n, k=1, dtype=bool),
        "nothing is hidden": np.zeros((n, n), dtype=bool),
        "the token after the query is still seen: begin at k=1, not at k=2": np.triu(past.T, 2).astype(bool),
    }
    expect_array(answer, ~past, mistakes=mistakes)
    return "Query 0 sees one key, query 3 all four."


@exercise("3a.4")
def softmax_of_rows(answer: Any) -> str:
    scores = draws(34).normal(size=(4, 4)) * 2
    scores[np.triu_indices(4, 1)] = -np.inf
    e, finite = np.exp(scores), np.where(np.isinf(scores), 0, scores)
    less, shifted = np.exp(scores - scores.max(-1)), np.exp(scores - scores.max(-1, keepdims=True))
    mistakes = {
        "each column is divided by a row's sum: keepdims=True makes the sums a column": e / e.sum(-1),
        "each column loses a row's maximum: keepdims=True makes the maxima a column": less
        / less.sum(-1, keepdims=True),
        "each column is divided by a row's sum: the sum needs keepdims=True, too": shifted / shifted.sum(-1),
        "keepdims=True is missing in both, the maximum and the sum": less / less.sum(-1),
        "the columns sum to 1; each row must (axis=-1)": e / e.sum(0, keepdims=True),
        "the sums run over the columns; each row has its own (axis=-1, keepdims=True)": shifted / shifted.sum(0),
        "all sixteen together sum to 1; each row must": e / e.sum(),
        "the exponentials are not divided by their sum": e,
        "the shares are proportional to the scores: exp is missing": finite / finite.sum(-1, keepdims=True),
        "the powers are of 2, not of e": np.exp2(scores) / np.exp2(scores).sum(-1, keepdims=True),
        "the maximum was taken away and no sum divided by": shifted,
        "the sum runs over all sixteen; each row has its own (axis=-1, keepdims=True)": shifted / shifted.sum(),
    }
    expect_array(run(answer, scores), softmax(scores), mistakes=mistakes)
    large = np.array([[1000.0, 999.0], [0.0, -np.inf]])
    got = as_array(run(answer, large))
    if not np.isfinite(got).all():
        raise Wrong(
            "It is right for small scores. For scores of 1000 it is no number: take each row's maximum away first."
        )
    expect_array(got, softmax(large))
    return "Each row sums to 1, also where scores are −∞ or 1000."


@exercise("3a.5")
def whole_head(answer: Any) -> str:
    draw = draws(35)
    for n, d in ((4, 2), (7, 8), (1, 3)):
        q, k, v = draw.normal(size=(3, n, d))
        hidden = ~np.tril(np.ones((n, n), dtype=bool))
        scores = q @ k.T / np.sqrt(d)
        shares = softmax(np.where(hidden, -np.inf, scores))
        mistakes = {
            "there is no mask: tokens see the future": softmax(scores) @ v,
            "the mask is applied after softmax: the rows no longer sum to 1": np.where(hidden, 0, softmax(scores)) @ v,
            "hidden scores are 0, which softmax makes a share; they must be −∞": softmax(np.where(hidden, 0, scores))
            @ v,
            "d is the width of q, here not 2": softmax(np.where(hidden, -np.inf, q @ k.T / np.sqrt(2))) @ v,
            "d is the width of q, not the number of tokens": softmax(np.where(hidden, -np.inf, q @ k.T / np.sqrt(n)))
            @ v,
            "the scores are not divided by √d": softmax(np.where(hidden, -np.inf, q @ k.T)) @ v,
            "the keys are averaged, not the values": shares @ k,
            "the past is hidden instead of the future": softmax(np.where(hidden.T, -np.inf, scores)) @ v,
        }
        mine = run(answer, q, k, v)
        try:
            expect_array(mine, shares @ v, mistakes=mistakes)
        except Wrong as wrong:
            if np.array_equal(mine, run(answer, -2 * q, k, v)) and n > 1:
                raise Wrong("It is the same for every q: make the scores of q and k, not of older variables.") from None
            raise Wrong(f"On {n} tokens of width {d}: {wrong}") from None
    return "On 4, 7 and 1 tokens. That is a head."


judged_by_table("3a.6")


@exercise("3a.order")
def who_notices_the_order(answer: Any, head: Callable[..., Array], q: Array, k: Array, v: Array) -> str:
    """head, q, k, v: the notebook's own. The tokens are cat, sees, dog, sees."""
    order = [1, 0, 2, 3]
    z, swapped = np.asarray(head(q, k, v)), np.asarray(head(q[order], k[order], v[order]))
    right: set[int] = set(np.flatnonzero(~np.isclose(z, swapped).all(1)).tolist())
    unequal: set[int] = set(np.flatnonzero((z != swapped).any(1)).tolist())
    given = as_array(answer)
    if given.shape == (len(z),) and np.isin(given, (0, 1)).all():  # True and False, or 1 and 0
        given = np.flatnonzero(given)
    rows = set(as_integers(given))
    if rows == right:
        return "Row 3 adds the same shares of the same values, in another order. A head knows no order."
    if not rows <= set(range(len(z))):
        raise Wrong(f"The rows are 0 to {len(z) - 1}.")
    if not rows:
        raise Wrong("Row 0 sees itself only, and token 0 is another one now.")
    if rows == unequal:
        raise Wrong("Some of these differ by rounding only, since a sum has another order: compare with np.isclose.")
    if rows == set(range(len(z))) - right:
        raise Wrong("Those are the rows that stay; the ones that change are asked.")
    if extra := rows - right:
        row = min(extra)
        raise Wrong(
            f"Row {row} has the same query as before, and sees the same tokens in another order. What does it add?"
        )
    row = min(right - rows)
    raise Wrong(f"Row {row} changes, too: token {row} is another one now, with another query.")


@exercise("3a.back")
def distance_of_the_look(answer: Any, real_pattern: Array) -> str:
    """real_pattern: the notebook's own, (n, n)."""
    n = len(real_pattern)
    means = np.array([np.diagonal(real_pattern, -back).mean() for back in range(n)])
    right, given = int(means.argmax()), as_number(answer)
    if given == right:
        return f"The mean share at distance {right} is {means[right]:.2f}."
    if given == -right:
        raise Wrong("Backwards is i − j, a positive number.")
    if abs(given - means[right]) < 1e-6:
        raise Wrong("That is the mean share; the distance at which it is largest is asked.")
    if given not in range(n):
        raise Wrong(f"A whole number is wanted, from 0 (the token itself) to {n - 1}.")
    raise Wrong(f"At distance {given:g} the mean share is {means[int(given)]:.2f}; at another it is larger.")
