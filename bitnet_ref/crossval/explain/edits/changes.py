"""What can be done with any tensor: its values, tokens, heads and columns moved, left out, or taken for each other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, partial

import numpy as np

from ....reference.layers import Array
from ...types import Ints
from .kinds import Row, wide

# fmt: off
Order = Callable[..., Ints]  # (n) -> the places of n things


@cache
def orders(n: int) -> tuple[tuple[str, Order], ...]:
    """Other orders of n things, in words, and as rules for any number of them, which raise for numbers that do not fit."""
    named: list[tuple[str, Order]] = [
        ("in reverse", lambda n: np.arange(n)[::-1]),
        ("one too far", lambda n: np.arange(n) - 1),
        ("one too early", lambda n: (np.arange(n) + 1) % n),
    ]
    if n % 2 == 0 and n > 2:
        named.append(("with neighbours exchanged", lambda n: np.arange(n) ^ 1))
        named.append(("with its halves exchanged", lambda n: (np.arange(n) + n // 2) % n))
    for a in (2, 4, 8, 16):
        if n % (2 * a) == 0 and n > 2 * a:
            named.append((f"with neighbouring {a}s exchanged", lambda n, a=a: np.arange(n) ^ a))
    for a in [a for a in range(2, n // 2 + 1) if n % a == 0 and (a <= 8 or n // a <= 8 or a in (16, 32, 64, 128))]:
        named.append((f"as a ({a}, {n // a}) array that was transposed", lambda n, a=a: np.arange(n).reshape(a, -1).T.reshape(-1)))
        if a in (2, 4, 8, 16, 32):
            named.append((f"with each {a} in reverse", lambda n, a=a: np.arange(n).reshape(-1, a)[:, ::-1].reshape(-1)))
    return tuple(named)


def _shifted(x: Array, by: int, axis: int) -> Array:
    """Moved by one, with zeros at the end."""
    rolled = np.roll(x, by, axis)
    np.moveaxis(rolled, axis, 0)[0 if by > 0 else -1] = 0
    return rolled


def _shared(x: Array, axis: int, words: str) -> Iterator[Row]:
    """Some neighbours that have one value: the first's, or their mean."""
    n = x.shape[axis]
    for size in [size for size in range(2, n + 1) if n % size == 0] if n <= 64 else ():

        def mean(x: Array, size: int = size) -> Array:
            first = np.moveaxis(wide(x), axis, 0)
            means = first.reshape(-1, size, *first.shape[1:]).mean(1)
            return np.moveaxis(np.repeat(means, size, 0), 0, axis)

        yield 1.4, f"each {size} {words} of {{x}} have the first one's" if size < n else f"all {words} of {{x}} have the first one's", lambda x, size=size: x.take(np.arange(n) // size * size, axis)
        yield 1.4, f"each {size} {words} of {{x}} have their mean" if size < n else f"all {words} of {{x}} have their mean", mean


def changes(x: Array, by_head: bool = False) -> Iterator[Row]:
    """(cost, words, change) of a float or integer array: (N, C), (N, heads, d), or by_head (heads, N, keys)."""
    tokens, heads = (1, 0) if by_head else (0, 1)

    def reorder(cost: float, words: str, axis: int, count: int | None = None) -> Iterator[Row]:
        for order_words, order in orders(x.shape[axis])[:count]:
            yield cost, f"{words} are {order_words}", lambda x, order=order: x.take(order(x.shape[axis]), axis)

    yield 1, "{x} is all zeros", np.zeros_like
    yield 1, "{x} has the other sign", np.negative
    yield 1.5, "{x} is taken without its sign", np.abs
    yield 1.5, "negative values of {x} are set to 0", lambda x: np.maximum(x, 0)
    if x.shape[tokens] > 1 and x.ndim > 1:
        for words, by in (("previous", 1), ("next", -1)):
            yield 1.2, f"each token has {{x}} of the {words} token", partial(np.roll, shift=by, axis=tokens)
            yield 1.3, f"each token has {{x}} of the {words} token, the one at the end has zeros", partial(_shifted, by=by, axis=tokens)
        yield 1.2, "every token has {x} of the first", lambda x: np.repeat(x.take([0], tokens), x.shape[tokens], tokens)
        yield 1.2, "every token has {x} of the last", lambda x: np.repeat(x.take([-1], tokens), x.shape[tokens], tokens)
        yield 1.4, "tokens of {x} are in reverse", lambda x: np.flip(x, tokens)
    if x.ndim == 2 and x.shape[1] > 1:
        yield from reorder(1.4, "columns of {x}", 1)
        yield 2, "{x} is stored column by column and read row by row", lambda x: np.ascontiguousarray(x.T)
    if x.ndim == 2 and not by_head:
        yield from _shared(x, 1, "columns")
    if x.ndim > 2 and x.shape[heads] > 1:
        yield from reorder(1.3, "heads of {x}", heads)
        yield 1.3, "every head has {x} of the first", lambda x: np.repeat(x.take([0], heads), x.shape[heads], heads)
        yield from _shared(x, heads, "heads")
    if x.ndim == 3:
        if not by_head:
            yield from reorder(1.4, "numbers of each head of {x}", 2)
            yield 1.4, "{x} is stored as (head_dim, heads) and read as (heads, head_dim)", lambda x: x.swapaxes(1, 2)
            yield 1.5, "{x} is (heads, head_dim) and read as (head_dim, heads)", lambda x: x.reshape(len(x), x.shape[2], x.shape[1]).swapaxes(1, 2)
            yield 1.6, "{x} is laid out as (heads, tokens, head_dim) and read as (tokens, heads, head_dim)", lambda x: np.ascontiguousarray(x.swapaxes(0, 1))
        elif x.shape[1] == x.shape[2]:
            yield 1.3, "{x} is transposed", lambda x: x.swapaxes(1, 2)
        if by_head:
            yield from reorder(1.4, "the keys of {x}", 2, 3)
