"""Drafts: tokens that are guessed, and verified together in one pass. The text is that of plain decoding, to the bit.

A token's logits do not depend on what else is in the pass (batch invariance). So a pass over the last token and k
guesses gives the logits that k + 1 plain steps would give, as far as the guesses are right. Tokens are chosen from them
one after another, with the same rules and random numbers; the first choice that is not the guess ends it, and what the
cache holds of the later guesses is written over.

Where memory is the limit, a pass over five tokens takes little longer than one. `lookup` guesses what followed the same
words earlier in the prompt or the text ("Prompt Lookup Decoding", apoorvumang, 2023); a small model may guess better
("Fast Inference from Transformers via Speculative Decoding", arXiv:2211.17192; here without its rejection sampling,
which keeps the distribution, but not the tokens).

In a batch every row waits for a longer pass. There a guess costs its share of all rows' tokens (`token_cost`).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..backends.loaded import LoadedModel
from ..errors import GenerationError
from ..reference.cache import TokenBatch

LONGEST = 12  # tokens of a draft
LEAST_MATCH = 2  # tokens that a text must repeat before the next ones are guessed
COST = 0.15  # of verifying one more token, in decoding steps
INCOME = 0.02  # that a plain step may lose to later drafts: the share that a text without repetition gets slower
START, MOST = 1.0, 4.0  # of the balance: what drafts may lose in advance, and at most


def step_time(tokens: int) -> float:
    """How long a pass over so many tokens takes, in passes over one."""
    return 1 + COST * (tokens - 1)


def token_cost(rows: int, tokens: int) -> float:
    """How many tokens all rows of a step over `tokens` lose because it verifies one more. COST for a single row."""
    return COST * rows / step_time(tokens)


class Drafts:
    """Guesses for one continuation, as long as they pay: a balance grows by what they save, and pays what they cost."""

    def __init__(self) -> None:
        self._balance, self._length, self._cost = START, 4, COST

    def propose(self, ids: NDArray[np.int64], limit: int, cost: float = COST) -> NDArray[np.int64]:
        """At most `limit` tokens that may follow `ids`; none when guesses have not paid. cost: of each, in tokens"""
        self._cost = cost
        affordable = int(self._balance / cost)
        if affordable < 1 or limit < 1:
            return ids[:0]
        return self.guess(ids, min(limit, affordable, self._length))

    def guess(self, ids: NDArray[np.int64], count: int) -> NDArray[np.int64]:
        raise NotImplementedError

    def learn(self, drafted: int, accepted: int) -> None:
        """How many of the proposed tokens were verified, and right."""
        self._balance = min(MOST, self._balance + accepted - self._cost * drafted + INCOME)
        if drafted:
            self._length = min(LONGEST, 2 * self._length) if accepted == drafted else max(2, accepted + 1)


class LookupDrafts(Drafts):
    """What followed the longest earlier copy of the text's end, the latest of those that are as long."""

    def guess(self, ids: NDArray[np.int64], count: int) -> NDArray[np.int64]:
        ends, length = np.flatnonzero(ids[:-1] == ids[-1]), 1  # of the copies that match in `length` tokens
        while True:
            longer = ends[ends >= length]
            longer = longer[ids[longer - length] == ids[-1 - length]] if length < len(ids) else longer[:0]
            if not len(longer):
                break
            ends, length = longer, length + 1
        if length < LEAST_MATCH or not len(ends):
            return ids[:0]
        return ids[ends[-1] + 1 :][:count]


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
