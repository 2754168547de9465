"""Notebook 0: from text to tokens, and from tokens to vectors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from ....api import Model
from ....reference.layers import Array
from ..answers import as_array, as_number, expect_array
from ..declare import Wrong, draws, exercise, run, said_of

Symbols = list[str]
Pair = tuple[str, str]


def merge(symbols: Sequence[str], pair: Pair, step: int = 2, limit: int = 1 << 30) -> Symbols:
    """Each occurrence of the pair as one symbol. step, limit: for mistakes, how far it goes on, and how often."""
    out, i = Symbols(), 0
    while i < len(symbols):
        if tuple(symbols[i : i + 2]) == pair and limit > 0:
            out.append("".join(pair))
            i, limit = i + step, limit - 1
        else:
            out.append(symbols[i])
            i += 1
    return out


def merged_from_the_right(symbols: Sequence[str], pair: Pair) -> Symbols:
    turned = merge([each[::-1] for each in symbols[::-1]], (pair[1][::-1], pair[0][::-1]))
    return [each[::-1] for each in turned[::-1]]


def as_symbols(given: Any) -> Symbols:
    """The pieces that a function returned. Raises Wrong."""
    if not isinstance(given, (list, tuple, np.ndarray)):
        raise Wrong(f"A list of pieces is wanted, not {type(given).__name__}.")
    return [str(each) for each in given]


def expect_symbols(mine: Symbols, right: Symbols, mistakes: dict[str, Symbols]) -> None:
    """Raises Wrong unless the pieces are these. mistakes: sentence -> the pieces that this mistake gives."""
    if mine == right:
        return
    for sentence, wrong in mistakes.items():
        if mine == wrong:
            raise Wrong(f"{sentence}: {wrong}; it is {right}.")
    if "".join(mine) != "".join(right):
        raise Wrong(f"The pieces together are {''.join(mine)!r}; the text is {''.join(right)!r}.")
    raise Wrong(f"Your pieces are {mine}; they are {right}.")


@exercise("0.1")
def merge_pairs(answer: Any) -> str:
    for text, pair in (("that cat", ("a", "t")), ("aaab", ("a", "a")), ("abab", ("a", "b")), ("xyz", ("a", "b"))):
        symbols = list(text)
        mistakes = {
            "Nothing was merged": symbols,
            "After a merge go on behind both symbols: one was used twice": merge(symbols, pair, step=1),
            "Only the first pair was merged": merge(symbols, pair, limit=1),
            "Go from the left to the right": merged_from_the_right(symbols, pair),
        }
        expect_symbols(as_symbols(run(answer, symbols, pair, keeps_lists=True)), merge(symbols, pair), mistakes)
    return "Also of aaa it makes aa and a."


@exercise("0.2")
def learn_pairs(answer: Any) -> str:
    mistakes: dict[str, Callable[[Symbols, int], list[Pair]]] = {
        "Count again after each join; these are the pairs of the first count": lambda symbols, joins: [
            pair for pair, _ in Counter(pairwise(symbols)).most_common(joins)
        ],
        "The rarest pairs are joined": lambda symbols, joins: learned(symbols, joins, rarest=True),
        "The last of equally frequent pairs is taken; it is the first of the text": lambda symbols, joins: learned(
            symbols, joins, last=True
        ),
        "These are the joins, but the last comes first": lambda symbols, joins: learned(symbols, joins)[::-1],
    }
    for text, joins in (("the_hat_that_the_cat_has", 6), ("low_lower_lowest_slow", 5)):
        symbols, right = list(text), learned(list(text), joins)
        given = run(answer, symbols, joins, keeps_lists=True)
        try:
            mine = [(str(a), str(b)) for a, b in given]
        except (TypeError, ValueError):
            raise Wrong("A list of pairs is wanted, such as [('a', 't'), ('t', 'h')].") from None
        for sentence, wrong in mistakes.items():
            if mine == wrong(symbols, joins) != right:
                raise Wrong(f"{sentence}: {text!r} gives {right}.")
        if len(mine) != joins:
            raise Wrong(f"{joins} joins are wanted; yours are {len(mine)}.")
        if mine != right:
            number = next(i for i, pair in enumerate(right) if mine[i] != pair)
            counts = Counter(pairwise(apply(symbols, right[:number])))
            tie = " Both are equally frequent: take the one that stands first in the text."
            says = tie * (counts[mine[number]] == counts[right[number]])
            raise Wrong(f"Of {text!r} join {number + 1} is {right[number]}; yours is {mine[number]}.{says}")
    return "A real tokeniser learns thousands of joins in this way, from millions of words."


def learned(symbols: Symbols, joins: int, rarest: bool = False, last: bool = False) -> list[Pair]:
    """The joins of byte-pair encoding. rarest, last: for mistakes, which pair it takes."""
    pairs = list[Pair]()
    for _ in range(joins):
        counts = Counter(pairwise(symbols))
        wanted = (min if rarest else max)(counts.values())
        equal = [pair for pair, count in counts.items() if count == wanted]
        pairs.append(equal[-1 if last else 0])
        symbols = merge(symbols, pairs[-1])
    return pairs


MERGES: list[Pair] = [("a", "t"), ("t", "h"), ("th", "e"), ("c", "at"), ("s", "c"), ("h", "at")]


@exercise("0.3")
def encode_by_merges(answer: Any) -> str:
    words = ("that", "scat", "thehat", "q")
    mistakes: dict[str, Callable[[str], Symbols]] = {
        "These are the characters; apply the merges": list,
        "Only the first merge was applied": lambda word: apply(word, MERGES[:1]),
        "The merges were applied in reverse": lambda word: apply(word, MERGES[::-1]),
        "The pair at the left was merged first; take the merge that was learned first": from_the_left,
    }
    given = {word: as_symbols(run(answer, word, MERGES, keeps_lists=True)) for word in words}
    fitting = {say: wrong for say, wrong in mistakes.items() if all(given[word] == wrong(word) for word in words)}
    for word in words:
        right = apply(word, MERGES)
        expect_symbols(given[word], right, {say: wrong(word) for say, wrong in fitting.items()})
    return "The order of the merges decides, not the order of the letters."


def apply(word: str | Symbols, merges: Sequence[Pair]) -> Symbols:
    symbols = list(word)
    for pair in merges:
        symbols = merge(symbols, pair)
    return symbols


def from_the_left(word: str) -> Symbols:
    symbols = list(word)
    while pairs := [each for each in pairwise(symbols) if each in MERGES]:
        symbols = merge(symbols, pairs[0], limit=1)
    return symbols


def cosines(table: Array, i: int) -> Array:
    return np.asarray(table @ table[i] / np.linalg.norm(table, axis=1))


def others(values: Array, i: int) -> Array:
    """The values with that of row i itself made the smallest."""
    return np.where(np.arange(len(values)) == i, -np.inf, values)


# What a student may compute in place of the nearest row's number: the sentence, and how
NEAREST: dict[str, Callable[[Array, int], Any]] = {
    "Every row is nearest to itself: leave it out.": lambda table, i: i,
    "The dot product alone prefers long rows: divide by the lengths.": lambda table, i: others(
        table @ table[i], i
    ).argmax(),
    "That is the nearest by distance; the direction counts, not the length.": lambda table, i: others(
        -np.linalg.norm(table - table[i], axis=1), i
    ).argmax(),
    "That row is the least like it: take the largest cosine.": lambda table, i: cosines(table, i).argmin(),
    "That is the cosine itself; the row's number is wanted: argmax.": lambda table, i: (
        others(cosines(table, i), i).max() / np.linalg.norm(table[i])
    ),
}


@exercise("0.4")
def nearest_row(answer: Any) -> str:
    for seed in (3, 4, 5):
        draw = draws(seed)
        while True:  # until each mistake gives another row
            table, i = draw.normal(size=(12, 4)) * draw.uniform(0.3, 3, (12, 1)), int(draw.integers(12))
            right = int(others(cosines(table, i), i).argmax())
            wrong = {say: float(mistake(table, i)) for say, mistake in NEAREST.items()}
            if len({right, *wrong.values()}) == 1 + len(wrong):
                break
        mine = as_number(run(answer, table, i))
        if mine != right:
            say = next((say for say, value in wrong.items() if abs(value - mine) < 1e-6), "")
            raise Wrong(say or f"Row {mine:g} is not the nearest of row {i}; it is row {right}.")
    table = -np.abs(draws(6).normal(size=(6, 4)))
    table[0] *= -1  # all other rows point the other way
    mine, right = as_number(run(answer, table, 0)), int(others(cosines(table, 0), 0).argmax())
    if mine != right:
        say = "leave row i out by −∞ in place of its cosine; 0 is larger than they are"
        raise Wrong(f"Where all other cosines are negative, row {right} is the nearest, not row {mine:g}: {say}.")
    return "It compares directions, whatever the lengths."


def counted(words: Sequence[str], common: Sequence[str], before: bool = True, after: bool = True) -> Array:
    """[i, j]: how often word j stands right before or after word i."""
    number, counts = {word: i for i, word in enumerate(common)}, np.zeros((len(common), len(common)))
    for a, b in pairwise(words):
        if a in number and b in number:
            counts[number[a], number[b]] += after
            counts[number[b], number[a]] += before
    return counts


@exercise("0.5")
def neighbours(answer: Any) -> str:
    for text, known in (("the cat and a dog and the cat and the the cow", "the and cat cow"), ("a b a b c", "c b a")):
        words, common = text.split(), known.split()
        right, follows = counted(words, common), counted(words, common, before=False)
        same = np.eye(len(common), dtype=bool)
        mistakes = {
            "only the word after is counted; the word before counts, too": follows,
            "only the word before is counted; the word after counts, too": follows.T,
            "what occurs twice counts once: with arrays of indices += adds once, np.add.at adds each time": (
                (follows > 0) * 1 + (follows.T > 0)
            ),
            "the first and the last word of the text have a neighbour, too": (
                counted(words[:-1], common, after=False) + counted(words[1:], common, before=False)
            ),
            "words two places away are counted, too; only the next ones are beside it": (
                right + counted(words[::2], common) + counted(words[1::2], common)
            ),
            "each row is divided by its sum; the counts themselves are wanted": right / right.sum(-1, keepdims=True),
            "words that are not in common were left out first, and what stood around them became neighbours": counted(
                [word for word in words if word in common], common
            ),
            "it says only whether they stand together; count how often": right > 0,
            "the last word and the first are no neighbours": counted([*words, words[0]], common),
            "a word that stands beside itself counts as well, once for each of the two": np.where(same, 0, right),
            "a word that stands beside itself counts twice: it is before it, and after it": np.where(
                same, right / 2, right
            ),
            "the rows are in another order; row i is that of common[i]": right[::-1, ::-1],
        }
        with said_of(f"In {text!r}, with common = {common}:"):
            expect_array(run(answer, words, common, keeps_lists=True), right, mistakes=mistakes)
    return "Each row is a vector of its word, made of nothing but where the word stands."


@exercise("0.6")
def greedy_loop(answer: Any, model: Model) -> str:
    ids, n = model.tokenizer.encode("The little girl"), 6

    def go_on(count: int, feed: slice = slice(None), row: int = -1, least: bool = False) -> list[int]:
        out = list(ids)
        for _ in range(count):
            logits = model.logits(out[feed])[row]
            out.append(int(logits.argmin() if least else logits.argmax()))
        return out

    given = run(answer, ids, n, keeps_lists=True)
    if isinstance(given, str):
        raise Wrong("The ids are wanted, not a text.")
    mine, right = as_array(given).tolist(), go_on(n)
    mistakes: dict[str, Callable[[], list[int]]] = {
        "These are the new ids alone; put them behind those of the text.": lambda: right[-n:],
        "That is one too many.": lambda: go_on(n + 1),
        "That is one too few.": lambda: right[:-1],
        f"One token was written, not {n}: does the loop return in its first round?": lambda: go_on(1),
        "The same token is put there again and again: after each, ask the model again, with the longer text.": lambda: (
            ids + right[len(ids) :][:1] * n
        ),
        "The first row says what comes after the first token; the last row is wanted.": lambda: go_on(n, row=0),
        "The model saw the last token alone; it needs the whole text.": lambda: go_on(n, slice(-1, None)),
        "That is the least likely token: argmax.": lambda: go_on(n, least=True),
    }
    if mine == right:
        return "Greedy choice: always the likeliest."
    for sentence, wrong in mistakes.items():
        if mine == wrong():
            raise Wrong(sentence)
    raise Wrong(f"After {ids} come {right[-n:]}; yours is {mine}.")
