"""Drafts: tokens that are guessed, and verified together in one pass. The text is that of plain decoding, to the bit.

A token's logits do not depend on what else is in the pass (batch invariance). So a pass over the last token and k
guesses gives the logits that k + 1 plain steps would give, as far as the guesses are right. Tokens are chosen from them
one after another, with the same rules and random numbers; the first choice that is not the guess ends it, and what the
cache holds of the later guesses is written over.

Where memory is the limit, a pass over five tokens takes little longer than one. `lookup` guesses what followed the same
words earlier in the prompt or the text ("Prompt Lookup Decoding", apoorvumang, 2023); a small model may guess better
("Fast Inference from Transformers via Speculative Decoding", arXiv:2211.17192; here without its rejection sampling,
which keeps the distribution, but not the tokens).

In a batch every row waits for a longer pass. There a guess costs its share of all rows' tokens (`Pace.token_cost`).
"""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from ..backends.loaded import LoadedModel
from ..errors import GenerationError
from ..reference.cache import TokenBatch

LENGTHS = (2, 4, 12)  # tokens of a draft: few, because a pass is recorded, and then fast, for its number of tokens
LEAST_MATCH = 2  # tokens that a text must repeat before the next ones are guessed
MOST_MATCH = 16  # tokens that are compared; longer matches take time and improve little
COST = 0.15  # of verifying one more token, in decoding steps, where memory bandwidth is the limit
DECAY = 0.98  # each pass multiplies the weight of earlier ones in `Pace` by this
INCOME = 0.01  # added to the balance per proposal: the share by which a text without repetition gets slower
MOST = 4.0  # the largest balance, in tokens; at the start it pays for the shortest draft
STREAK = 3  # guesses right in a row, found by plain steps, after which a draft needs no balance


class Pace:
    """The time of a pass by its number of tokens, as a line fitted to the last passes.

    cost: time of each further token, in passes over one token; between COST and 1.
    """

    def __init__(self) -> None:
        self.cost = COST
        self._sums = [0.0] * 5  # of 1, n, n^2, t and n t over the last passes, over n + 1 tokens in t seconds

    def learn(self, tokens: int, seconds: float) -> None:
        """Fit a line to the last passes, by least squares."""
        n, (weight, _, _, total, _) = tokens - 1, self._sums
        t = min(seconds, 3 * total / weight) if weight else seconds  # the processor may have been taken away
        self._sums = [DECAY * old + new for old, new in zip(self._sums, (1, n, n * n, t, n * t), strict=True)]
        mean_n, mean_nn, mean_t, mean_nt = (each / self._sums[0] for each in self._sums[1:])
        if (spread := mean_nn - mean_n**2) > 0.01:
            slope = (mean_nt - mean_n * mean_t) / spread
            first = max(mean_t - slope * mean_n, 1e-9)  # of a pass over one token
            self.cost = min(1.0, max(COST, slope / first))

    def time(self, tokens: int) -> float:
        """The time of a pass over `tokens`, in passes over one token."""
        return 1 + self.cost * (tokens - 1)

    def token_cost(self, rows: int, tokens: int) -> float:
        """How many tokens the rows of a step lose together, when the step over `tokens` verifies one more token."""
        return self.cost * rows / self.time(tokens)


class StepTimes:
    """What guesses cost where all steps verify them for the same rows: measured, not assumed.

    cost: of one guess, in tokens that the rows lose together: at first COST for each row.
    """

    def __init__(self) -> None:
        self.cost = 0.0  # until the first step
        self.last_s = 0.0  # seconds of the last step
        self._plain, self._rows = 0.0, 0  # seconds of a step without drafts, for so many rows
        self._passes = Counter[int]()  # by their guesses: the first two of a number are slow, then they are recorded

    def learn(self, rows: int, drafted: int, seconds: float) -> float:
        """The tokens that a step of `rows` and `drafted` guesses has lost, compared with one without guesses."""
        if rows != self._rows:
            self._rows, self.cost, self._plain = rows, COST * rows, seconds / (1 + COST * drafted)
        if not drafted:
            self._plain += 0.1 * (min(seconds, 3 * self._plain) - self._plain)
            return 0.0
        # At most one pass for each guess: what goes beyond that, other programs took.
        lost = min(max(0.0, rows * (seconds / self._plain - 1)), drafted)
        self._passes[drafted] += 1
        if self._passes[drafted] > 2:
            self.cost = max(COST, self.cost + 0.3 * (lost / drafted - self.cost))
        return lost


class Drafts:
    """Guesses for one continuation. A balance of saved tokens grows with each accepted guess and pays for the time of
    each that is verified; when it is used up, no guesses are verified for a while. `is_free` guesses are still made,
    and where plain steps show that some in a row would have been right, the next ones are verified. Each time that
    these are wrong, twice as many must be right."""

    is_free = False  # whether a guess takes no time worth counting

    def __init__(self) -> None:
        self._balance, self._length, self._cost = 0.0, LENGTHS[1], 0.0
        self._unverified: tuple[int, int] | None = None  # a guess that no pass verifies: its place in the text, and it
        self._streak, self._needed = 0, STREAK

    def propose(self, ids: NDArray[np.int64], limit: int, cost: float = COST) -> NDArray[np.int64]:
        """At most `limit` tokens that may follow `ids`; none when guesses have not paid. cost: of each, in tokens"""
        start = 0.0 if self._cost else LENGTHS[0] * cost
        self._cost, self._balance = cost, min(MOST, self._balance + INCOME + start)
        if self._unverified is not None:
            place, token = self._unverified
            self._streak = self._streak + 1 if place < len(ids) and ids[place] == token else 0
            self._unverified = None
        affordable = self._balance / cost if self._streak < self._needed else LENGTHS[-1]
        if affordable >= LENGTHS[0] <= limit:
            most = min(limit, self._length, affordable)
            return self.guess(ids, max(length for length in LENGTHS if length <= most))
        if self.is_free and len(draft := self.guess(ids, 1)):
            self._unverified = len(ids), int(draft[0])
        return ids[:0]

    def guess(self, ids: NDArray[np.int64], count: int) -> NDArray[np.int64]:
        raise NotImplementedError

    def learn(self, drafted: int, accepted: int, lost: float | None = None) -> None:
        """drafted: how many of the proposed tokens were verified. accepted: how many of these were right. lost: tokens
        that verifying them took; by default as many as `propose` was told."""
        self._balance = min(MOST, self._balance + accepted - (self._cost * drafted if lost is None else lost))
        if self._streak >= self._needed:
            self._needed = STREAK if accepted else 2 * self._needed
        self._streak = 0
        right = accepted + (accepted == drafted)  # so many, or more
        self._length = next((length for length in LENGTHS if length > right), LENGTHS[-1])


class LookupDrafts(Drafts):
    """Finds an earlier copy of the last tokens of the text, and proposes the tokens that followed the copy.

    The longest copy counts, of LEAST_MATCH to MOST_MATCH tokens, and of equally long ones the latest. While the text
    goes on as it did after the copy, later proposals continue from there without a new search. A copy that reaches the
    end of the text is repeated.
    """

    is_free = True

    def __init__(self) -> None:
        super().__init__()
        self._seen = self._source = 0  # length of the last text, and the index of the next token to propose; 0: none
        self._pairs: set[tuple[int, int]] = set()  # of neighbouring tokens so far: most texts end in a new one

    def guess(self, ids: NDArray[np.int64], count: int) -> NDArray[np.int64]:
        new = len(ids) - self._seen
        if self._source and (ids[self._seen :] == ids[self._source : self._source + new]).all():
            self._source += new
            self._add_pairs(ids)
        else:
            self._source = self._search(ids) if self._add_pairs(ids) else 0
        self._seen = len(ids)
        return np.resize(ids[self._source : self._source + count], count) if self._source else ids[:0]

    def _add_pairs(self, ids: NDArray[np.int64]) -> bool:
        """Whether the text's last two tokens have stood before. It must have become longer since the last call."""
        tail = ids[max(0, self._seen - 1) :].tolist()
        pairs = list(pairwise(tail))
        self._pairs.update(pairs[:-1])
        if not pairs or pairs[-1] not in self._pairs:
            self._pairs.update(pairs[-1:])
            return False
        return True

    def _search(self, ids: NDArray[np.int64]) -> int:
        """The index after the copy, or 0 without one."""
        ends, length = np.flatnonzero(ids[:-1] == ids[-1]), 1  # of the copies that match in `length` tokens
        while length < MOST_MATCH and len(longer := ends[ends >= length]):
            longer = longer[ids[longer - length] == ids[-1 - length]]
            if not len(longer):
                break
            ends, length = longer, length + 1
        return int(ends[-1]) + 1 if length >= LEAST_MATCH and len(ends) else 0


class ModelDrafts(Drafts):
    """The greedy tokens of a smaller model with the same vocabulary."""

    def __init__(self, model: LoadedModel, drafter: LoadedModel, capacity: int) -> None:
        """capacity: tokens of the continuation. Raises GenerationError for another vocabulary."""
        super().__init__()
        ours, theirs = model.config.vocab_size, drafter.config.vocab_size
        if ours != theirs:
            raise GenerationError(f"speculate: the draft model has a vocabulary of {theirs}, the model of {ours}")
        self.model, self.capacity = drafter, min(capacity, drafter.config.context_length)
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
            start = 0 if start < len(self._seen) else start  # a DeltaNet's state cannot go back
        step, guesses = self.model.backend.prompt_tokens(self.model.config), ids
        while len(guesses) < len(ids) + count:
            piece = guesses[start : start + step]
            whole = start + len(piece) == len(guesses)
            batch = TokenBatch.of([(0, start, piece)], logits_of_last=[0] if whole else [])
            logits = self.model.run(batch, self._cache, [(1, ())] if whole else [])
            start += len(piece)
            if whole:
                (best,) = logits.tokens
                guesses = np.append(guesses, best.ids[best.values.argmax()])
        self._seen = guesses[:start]
        return guesses[len(ids) :]
