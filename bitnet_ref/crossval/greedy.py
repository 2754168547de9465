"""Greedy text of another program beside the reference's: which token parts first, and how near a call it was."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..api import Model

# What one rounding flip moves a logit of storyteller by, at most as measured; a margin below it says little.
NEAR_TIE = 0.15


@dataclass(frozen=True)
class Greedy:
    """The first `compared` tokens of both; `parted` is the index of the first that is another, None: all the same.

    margin: best minus second best logit of the reference there.   behind: how far the candidate's token is behind the
    best, None where the program told only text.
    """

    compared: int
    parted: int | None = None
    reference: str = ""  # the token where they part
    candidate: str = ""
    margin: float | None = None
    behind: float | None = None
    smallest_margin: float | None = None  # of the steps compared

    @property
    def agrees(self) -> bool:
        return self.parted is None and self.compared > 0

    @property
    def verdict(self) -> str:
        """One line."""
        if not self.compared:
            return "NOT COMPARABLE: the program printed no token"
        if self.parted is None:
            return f"AGREES, greedy: {self.compared} tokens the same, smallest margin {self.smallest_margin:.3g}"
        near = ", which a single rounding flip can decide" if self.margin is not None and self.margin < NEAR_TIE else ""
        behind = "" if self.behind is None else f"; the candidate's is {self.behind:.3g} behind the best"
        return (
            f"DIFFERS, greedy: parts at token {self.parted}, {self.reference} in the reference and {self.candidate} in "
            f"the candidate; the reference's margin there is {self.margin:.3g}{near}{behind}"
        )

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "agrees": self.agrees, "verdict": self.verdict}


def greedy_run(model: Model, tokens: Sequence[int], count: int) -> tuple[list[int], NDArray]:
    """The reference's greedy continuation, its end token included, and the logits (n, V) that chose each."""
    ids: list[int] = []
    result = model.generate(list(tokens), max_tokens=count, temperature=0.0)
    assert not isinstance(result, list)
    ids = list(result.token_ids)
    if not ids:
        return ids, np.empty((0, model.config.vocab_size), dtype=np.float32)
    logits = model.logits([*tokens, *ids[:-1]])[len(tokens) - 1 :]
    return ids, logits


def compare_ids(model: Model, tokens: Sequence[int], theirs: Sequence[int]) -> Greedy:
    """The candidate's token ids, continuing `tokens` (N,), against the reference's."""
    mine, logits = greedy_run(model, tokens, max(1, len(theirs)))
    for i, token in enumerate(theirs):
        if i >= len(mine):
            return _parted(logits, i, "the end", f"token {token}", None)
        if token != mine[i]:
            return _parted(logits, i, f"token {mine[i]}", f"token {token}", token)
    return _same(logits, len(theirs))


def compare_text(model: Model, tokens: Sequence[int], theirs: str, count: int) -> Greedy:
    """The candidate's text against the text of the reference's `count` tokens, token by token.

    Blanks at the end are not compared: programs put a line end there.
    """
    mine, logits = greedy_run(model, tokens, count)
    theirs, eos = theirs.rstrip(), set(model.tokenizer.eos_ids)
    mine = [token for token in mine if token not in eos]
    decode = model.tokenizer.decode
    start = len(decode(list(tokens)))
    for i in range(len(mine)):
        text = decode([*tokens, *mine[: i + 1]])[start:]
        if text.endswith("\ufffd"):  # in the middle of a character
            continue
        if not (theirs.startswith(text) or text.rstrip() == theirs):
            before = [decode([*tokens, *mine[:j]])[start:] for j in (i, max(0, i - 1))]
            at = i
            if text[len(before[0]) :][:1].isspace() and _within_word(theirs, len(before[0])):
                at, text, before = max(0, i - 1), before[0], before[1:]  # theirs is a longer one, which begins the same
            mine_text, their_text = text[len(before[0]) :], theirs[len(before[0]) :][:24]
            return _parted(logits, at, repr(mine_text), repr(their_text), None)
    whole = decode([*tokens, *mine])[start:].rstrip()
    if len(theirs) > len(whole):
        return _parted(logits, len(mine), "the end", repr(theirs[len(whole) :][:24]), None)
    return _same(logits, len(mine))


def _within_word(text: str, at: int) -> bool:
    return 0 < at < len(text) and text[at - 1].isalnum() and text[at].isalnum()


def _margins(logits: NDArray) -> NDArray:
    best = np.partition(logits, -2, axis=-1)[:, -2:]
    return np.asarray(best[:, 1] - best[:, 0])


def _same(logits: NDArray, count: int) -> Greedy:
    return Greedy(count, smallest_margin=float(_margins(logits[:count]).min()) if count else None)


def _parted(logits: NDArray, at: int, mine: str, theirs: str, token: int | None) -> Greedy:
    row = logits[min(at, len(logits) - 1)]
    behind = None if token is None or not 0 <= token < len(row) else float(row.max() - row[token])
    margins = _margins(logits)
    return Greedy(at + 1, at, mine, theirs, float(margins[min(at, len(margins) - 1)]), behind, float(margins.min()))
