"""Drafts: tokens that are guessed, and verified together in one pass. The text is that of plain decoding, to the bit.

A token's logits do not depend on what else is in the pass (batch invariance). So a pass over the last token and k
guesses gives the logits that k + 1 plain steps would give, as far as the guesses are right. Tokens are chosen from them
one after another, with the same rules and random numbers; the first choice that is not the guess ends it, and what the
cache holds of the later guesses is written over.

Where memory is the limit, a pass over five tokens takes little longer than one. `lookup` guesses what followed the same
words earlier in the prompt or the text ("Prompt Lookup Decoding", apoorvumang, 2023); a small model may guess better
("Fast Inference from Transformers via Speculative Decoding", arXiv:2211.17192; here without its rejection sampling,
which keeps the distribution, but not the tokens).

In a batch every row waits for a longer pass. There a guess costs a share of all rows' tokens (`StepTimes.cost`).
"""

from __future__ import annotations

from collections import Counter

import numpy as np
from numpy.typing import NDArray

from ..backends.loaded import LoadedModel
from ..errors import GenerationError
from ..reference.cache import TokenBatch

LENGTHS = (2, 4, 12)  # tokens of a draft: few, because a pass is recorded, and then fast, for its number of tokens
LEAST_MATCH = 3  # tokens that a text must repeat before the next ones are guessed
MOST_MATCH = 16  # tokens that are compared; longer matches take time and improve little
MOST_COPIES = 32  # of the last tokens: the latest copies are compared
SURE_MATCH = 5  # tokens that a text must repeat for a draft without a balance, if a guess costs nothing
COST = 0.15  # of verifying one more token, in decoding steps, where memory bandwidth is the limit
FIRST_S = 0.00025  # that each guess costs beyond that until it is measured
WORTH = 0.8  # of a token: what a guess may cost, because not all are right
FORGET = 0.008  # the part of a guess's cost that each measured step without drafts takes off: it is tried again
INCOME = 0.005  # added to the balance per token: the share by which a text without repetition gets slower
START = LENGTHS[0] * COST  # the balance at the start
MOST = 4.0  # the largest balance, in tokens
LOOK_S = 0.002  # decoding time between two looks for a guess, for each row: a look takes some microseconds
MOST_UNSEEN = 8  # tokens between two looks, at most
MEASURED = 4  # of so many steps without drafts one is measured


class StepTimes:
    """What a guess costs the rows of a step: measured, not assumed.

    cost: of one guess, in tokens that the rows lose together. stride: tokens of a row between two looks for a guess.
    """

    def __init__(self) -> None:
        self.rows, self.cost, self.stride = 1, COST, 1
        self._step_s = self._guess_s = 0.0  # seconds of a step of `rows` without drafts; that a guess adds
        self._passes = Counter[int]()  # by their tokens: the first two of a number are slow, then they are recorded
        self._unmeasured = 0  # steps without drafts since the last one that was measured

    @property
    def share(self) -> float:
        """The time that a guess adds to a step, as a share of it."""
        return self.cost / self.rows

    def learn(self, rows: int, drafted: int, seconds: float) -> float:
        """The tokens that a step of `rows` and `drafted` guesses has lost, compared with one without guesses."""
        if not drafted and rows == self.rows and 0 < self._unmeasured < MEASURED:
            self._unmeasured += 1
            return 0.0
        self._unmeasured = 1
        self._passes[rows + drafted] += 1
        is_recorded = self._passes[rows + drafted] > 2
        if not self._step_s:
            self._step_s = seconds / (1 + COST * drafted)
            self._guess_s = self._step_s * COST / (1 + COST * (rows - 1)) + FIRST_S
        elif rows != self.rows:
            self._step_s = max(seconds - drafted * self._guess_s, seconds / (1 + drafted))
        elif not drafted:  # one that takes long: other programs had the processor
            self._step_s += (min(seconds, 3 * self._step_s) - self._step_s) * (0.1 if is_recorded else 1)
        added = min(max(0.0, seconds - self._step_s), drafted * self._step_s)
        if not drafted:
            self._guess_s *= 1 - FORGET
        elif is_recorded:
            self._guess_s += 0.3 * (added / drafted - self._guess_s)
        least = COST / (1 + COST * (rows - 1))  # of a step
        self.rows, self.cost = rows, rows * max(least, self._guess_s / self._step_s)
        self.stride = max(1, min(MOST_UNSEEN, int(rows * LOOK_S / self._step_s)))
        return rows * added / self._step_s


class Drafts:
    """Guesses for one continuation. A balance of saved tokens grows with each accepted guess and pays for the time of
    each that is verified; when it is used up, no guesses are verified for a while, except where the text has repeated
    many tokens (`matched`). Each time that these are wrong, twice as many must be repeated.

    It is asked once in a few tokens (`looks_at`), so that small models, whose tokens take little time, lose none.
    """

    def __init__(self) -> None:
        self._balance, self._length, self._cost, self._paid = START, LENGTHS[0], 0.0, 0
        self._is_sure, self._caution = False, 1  # whether the last draft was made without a balance; a factor
        self.looks_at = 0  # the text's length from which on it makes a proposal

    def propose(self, ids: NDArray[np.int64], limit: int, times: StepTimes) -> NDArray[np.int64]:
        """At most `limit` tokens that may follow `ids`; none when guesses have not paid."""
        if len(ids) < self.looks_at:
            return ids[:0]
        self._balance = min(MOST, self._balance + INCOME * (len(ids) - (self._paid or len(ids) - 1)))
        self._paid, self._cost, self.looks_at = len(ids), times.cost, len(ids) + times.stride
        if times.cost > WORTH:
            return ids[:0]
        affordable = self._balance / times.cost
        self._is_sure = self.matched(ids) >= SURE_MATCH * self._caution * (1 + times.cost)
        most = min(limit, max(self._length, LENGTHS[1]) if self._is_sure else min(self._length, affordable))
        return self.guess(ids, max(length for length in LENGTHS if length <= most)) if most >= LENGTHS[0] else ids[:0]

    def matched(self, ids: NDArray[np.int64]) -> int:
        """How many of the last tokens have stood before, if that takes little time to tell."""
        return 0

    def guess(self, ids: NDArray[np.int64], count: int) -> NDArray[np.int64]:
        """So many tokens that may follow, or none. `propose` has called `matched` with these ids."""
        raise NotImplementedError

    def learn(self, drafted: int, accepted: int, lost: float | None = None) -> None:
        """drafted: how many of the proposed tokens were verified. accepted: how many of these were right. lost: tokens
        that verifying them took; by default as many as `propose` was told."""
        self._balance = min(MOST, self._balance + accepted - (self._cost * drafted if lost is None else lost))
        if accepted:
            self._caution, self.looks_at = 1, 0  # the text may be a copy: look again at once
        elif self._is_sure:
            self._caution *= 2
        right = accepted + (accepted == drafted)  # so many, or more
        self._length = next((length for length in LENGTHS if length > right), LENGTHS[-1])


class LookupDrafts(Drafts):
    """Finds an earlier copy of the last tokens of the text, and proposes the tokens that followed the copy.

    The longest copy counts, of LEAST_MATCH to MOST_MATCH tokens, and of equally long ones the latest. While the text
    goes on as it did after the copy, later proposals continue from there without a new search. A copy that reaches the
    end of the text is repeated.
    """

    def __init__(self) -> None:
        super().__init__()
        self._tokens: list[int] = []
        self._ends: dict[tuple[int, ...], list[int]] = {}  # LEAST_MATCH tokens -> the index after each of their places
        self._source = self._matched = 0  # index of the next token to propose, and how many tokens match before it

    def matched(self, ids: NDArray[np.int64]) -> int:
        tokens, known = self._tokens, len(self._tokens)
        tokens += ids[known:].tolist()
        for end in range(max(LEAST_MATCH, known + 1), len(tokens) + 1):
            self._ends.setdefault(tuple(tokens[end - LEAST_MATCH : end]), []).append(end)
        new = len(tokens) - known
        if self._source and tokens[known:] == tokens[self._source : self._source + new]:
            self._source, self._matched = self._source + new, self._matched + new
        else:
            self._source, self._matched = self._search()
        return self._matched

    def guess(self, ids: NDArray[np.int64], count: int) -> NDArray[np.int64]:
        return np.resize(ids[self._source : self._source + count], count) if self._source else ids[:0]

    def _search(self) -> tuple[int, int]:
        """The index after the copy and the copy's length, or (0, 0) without one."""
        tokens, best, most = self._tokens, 0, 0
        ends = self._ends.get(tuple(tokens[-LEAST_MATCH:]), [])  # the last of them is the text's own end
        for end in reversed(ends[-1 - MOST_COPIES : -1]):
            length = LEAST_MATCH
            while length < min(MOST_MATCH, end) and tokens[end - 1 - length] == tokens[-1 - length]:
                length += 1
            if length > most:
                best, most = end, length
        return best, most


class ModelDrafts(Drafts):
    """The greedy tokens of a smaller model with the same vocabulary."""

    def __init__(self, model: LoadedModel, drafter: LoadedModel, capacity: int, adapter: str | None = None) -> None:
        """capacity: tokens of the continuation. adapter: of the request; the drafter takes its own of that name, if it
        has one. Raises GenerationError for another vocabulary."""
        super().__init__()
        ours, theirs = model.config.vocab_size, drafter.config.vocab_size
        if ours != theirs:
            message = f"the draft model has a vocabulary of {theirs}, the model of {ours}"
            raise GenerationError(message, field="speculate")
        self.model, self.capacity = drafter, min(capacity, drafter.config.context_length)
        self._adapters = {0: drafter.adapters.get(adapter)} if adapter is not None else {}
        self._cache = drafter.new_cache(1, self.capacity)
        self._seen = np.empty(0, dtype=np.int64)  # in the cache

    def guess(self, ids: NDArray[np.int64], count: int) -> NDArray[np.int64]:
        count = min(count, self.capacity - len(ids))
        if count < 1:
            return ids[:0]
        shared = min(len(self._seen), len(ids) - 1)
        differs = np.flatnonzero(self._seen[:shared] != ids[:shared])
        start = int(differs[0]) if len(differs) else shared
        if self._cache.states is not None:
            start = 0 if start < len(self._seen) else start  # a state cannot go back
        step, guesses = self.model.backend.prompt_tokens(self.model.config), ids
        while len(guesses) < len(ids) + count:
            piece = guesses[start : start + step]
            whole = start + len(piece) == len(guesses)
            batch = TokenBatch.of([(0, start, piece)], logits_of_last=[0] if whole else [])
            logits = self.model.run(batch, self._cache, [(1, ())] if whole else [], adapters=self._adapters)
            start += len(piece)
            if whole:
                (best,) = logits.tokens
                guesses = np.append(guesses, best.ids[best.values.argmax()])
        self._seen = guesses[:start]
        return guesses[len(ids) :]
