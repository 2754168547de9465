"""The stepped engine: rows of any number of requests, one pass at a time.

A plan says which rows take part in a step, with how many tokens, and with which draft tokens. The step computes all of
them in one pass. Then each row whose context is complete accepts its next token, and one more for each right guess.

`generate`, `stream` and `chat` step it in the caller's thread, with the rows of one call (`generate.py`). An engine's
worker steps it in a thread of its own, with the rows of many requests over pages (`serving/step.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from ..backends.backend import Ids
from ..backends.loaded import LoadedModel
from ..backends.paged_cache import EngineKVCache
from ..backends.run import TokenLogits
from ..errors import NumericsError
from ..reference.cache import KVCache, TokenBatch, TokenIds
from .drafts import StepTimes
from .greedy import run_steps
from .sequence import Continuation, adapters_of

NO_DRAFT = np.empty(0, dtype=np.int64)
RowT = TypeVar("RowT", bound=Continuation)


class PlannedPiece(NamedTuple, Generic[RowT]):
    """`tokens` tokens of a row from `start` on. `ends`: the next token can be chosen after them. `draft`: guesses to
    verify in the same step."""

    row: RowT
    slot: int
    start: int
    tokens: int
    ends: bool
    draft: NDArray[np.int64] = NO_DRAFT

    @classmethod
    def of(cls, row: RowT, tokens: int) -> PlannedPiece[RowT]:
        """The row's next tokens."""
        return cls(row, row.slot, row.computed, tokens, tokens == row.behind)


@dataclass
class StepPlan(Generic[RowT]):
    """One step, or several in a row with the same pieces, each a token further: see `greedy.py`."""

    pieces: list[PlannedPiece[RowT]] = field(default_factory=list)
    steps: int = 1


class Piece(NamedTuple):
    """Some next tokens of a row. need: of `Continuation.needs`, if they end its context, else None."""

    row: Continuation
    slot: int
    start: int
    ids: TokenIds
    need: tuple[int | None, Ids] | None


def run_pieces(model: LoadedModel, cache: KVCache, pieces: Sequence[Piece]) -> list[TokenLogits]:
    """One pass over the pieces, which also scores prompts.   -> the logits at the end of those that have a `need`"""
    ending = [index for index, piece in enumerate(pieces) if piece.need is not None]
    batch = TokenBatch.of([(slot, start, ids) for _, slot, start, ids, _ in pieces], ending)
    adapters = adapters_of(piece.row for piece in pieces)
    counts = [piece.row.to_score(piece.start, len(piece.ids)) for piece in pieces]
    if not any(counts):
        return model.run(batch, cache, [pieces[index].need for index in ending], adapters=adapters).tokens
    wanted: list[int] = []  # tokens of the batch, each with its row to score or its need
    rows: list[Continuation | None] = []
    needs: list[tuple[int | None, Ids] | None] = []
    stop = 0
    for (row, _, start, ids, need), count in zip(pieces, counts, strict=True):
        first = stop + max(0, row.scored - start)
        stop += len(ids)
        wanted += range(first, first + count)
        rows += [row] * count
        needs += [None] * count
        if need is not None:
            wanted.append(stop - 1)
            rows.append(None)
            needs.append(need)
    batch = replace(batch, wanted=np.array(wanted, dtype=np.int64))
    logits = model.run(batch, cache, needs, adapters=adapters).tokens
    ends = []
    for row_to_score, token_logits in zip(rows, logits, strict=True):
        if row_to_score is None:
            ends.append(token_logits)
        else:
            row_to_score.score(token_logits)
    return ends


class VerifiedDraft(NamedTuple):
    """Guesses of a row that a step has verified, and how many of them are right."""

    row: Continuation
    guesses: int
    right: int


Work = Sequence[tuple[PlannedPiece[RowT], list[Piece]]]  # planned pieces, and the parts of a pass that compute each


class Stepper(Generic[RowT]):
    """Computes planned steps over a cache. Subclasses say what happens with each token.

    verified: the drafts of the last step, if each row took part in it with one token and drafts; else None.
    """

    def __init__(self, model: LoadedModel, cache: EngineKVCache, bell: NDArray[np.uint8] | None = None) -> None:
        """bell (1,): 1 ends several steps in a row after the present one."""
        self.model, self.cache = model, cache
        self.bell = np.zeros(1, dtype=np.uint8) if bell is None else bell
        self.verified: list[VerifiedDraft] | None = None

    def accept(self, row: RowT, logits: TokenLogits) -> None:
        """Let the row choose its next token."""
        raise NotImplementedError

    def prepare(self, pieces: Sequence[PlannedPiece[RowT]]) -> None:
        """Make the cache ready for the tokens of these pieces."""

    def note_computed(self, row: RowT, tokens: int) -> None:
        """The first `tokens` tokens of the row's context are in the cache."""
        row.computed = tokens

    def run(self, plan: StepPlan[RowT]) -> Iterator[list[PlannedPiece[RowT]]]:
        """Compute the planned steps. Yields the pieces of each when its rows have accepted their tokens."""
        self.verified, taken = [], 0
        if plan.steps > 1:
            for pieces in self._run_greedy_steps(plan):
                yield pieces
                taken += 1
        if not taken:
            self.verified = None
            self.compute([(piece, self.parts(piece)) for piece in plan.pieces])
            yield plan.pieces

    def _run_greedy_steps(self, plan: StepPlan[RowT]) -> Iterator[list[PlannedPiece[RowT]]]:
        """Several steps in a row; none where they must be computed one by one."""
        try:
            self.prepare(plan.pieces)
            steps = run_steps(self.model, self.cache, [piece.row for piece in plan.pieces], plan.steps, self.bell)
        except Exception:
            return  # a single step raises it again
        for number, logits in enumerate(steps):
            pieces = []
            for piece, token_logits in zip(plan.pieces, logits, strict=True):
                if not piece.row.finished:
                    pieces.append(piece)
                    self.note_computed(piece.row, piece.start + number + 1)
                    self.accept(piece.row, token_logits)
            if pieces:
                yield pieces

    def parts(self, piece: PlannedPiece[RowT]) -> list[Piece]:
        """Its tokens, then each guessed one, with the logits that the choices after them need."""
        row, slot, start, count, ends, draft = piece
        ids = row.newest if ends and count == 1 else row.context[start : start + count]
        parts = [Piece(row, slot, start, ids, row.needs() if ends else None)]
        if len(draft):
            with suppress(Exception):  # a user's rules may fail on a text that will not come
                for i in range(len(draft)):
                    parts.append(Piece(row, slot, start + count + i, draft[i : i + 1], row.needs(draft[: i + 1])))
        return parts

    def compute(self, work: Work[RowT]) -> None:
        """One pass over the pieces; then their rows accept their tokens."""
        try:
            logits = self.run_pass(work)
        except NumericsError:
            if all(len(parts) == 1 for _, parts in work):
                raise
            work = [(piece, parts[:1]) for piece, parts in work]  # perhaps of a guess
            logits = self.run_pass(work)
        self.accept_all(work, logits)

    def run_pass(self, work: Work[RowT]) -> list[TokenLogits]:
        """The logits at the end of each piece that ends a context, and after each guess."""
        self.prepare([piece for piece, _ in work])
        return run_pieces(self.model, self.cache, [part for _, parts in work for part in parts])

    def accept_all(self, work: Work[RowT], logits: Sequence[TokenLogits]) -> None:
        """Let the rows of a pass accept their tokens."""
        all_decode = True
        for piece, _ in work:
            self.note_computed(piece.row, piece.start + piece.tokens)
            all_decode = all_decode and piece.ends and piece.tokens == 1
        ends, verified = iter(logits), list[VerifiedDraft]()
        for piece, parts in work:
            if piece.ends:
                self.accept(piece.row, next(ends))
            if len(parts) > 1:
                draft = piece.draft[: len(parts) - 1].tolist()
                right = self.accept_drafts(piece.row, draft, [next(ends) for _ in draft])
                verified.append(VerifiedDraft(piece.row, len(draft), right))
        if all_decode:
            self.verified = verified

    def accept_drafts(self, row: RowT, draft: Sequence[int], logits: Sequence[TokenLogits]) -> int:
        """Accept the tokens after the one that the row has just chosen, as far as choices equal guesses.

        logits: after each guess.   -> how many guesses are right
        """
        right = 0
        row.stats.drafted_tokens += len(draft)
        for guess, token_logits in zip(draft, logits, strict=True):
            if row.finished or row.chunks[-1].token_id != guess:
                break
            right += 1
            row.computed += 1
            row.stats.accepted_tokens += 1
            self.accept(row, token_logits)
        return right

    def learn_drafts(self, plan: StepPlan[RowT], times: StepTimes, step_s: float) -> None:
        """Let `times` and the drafts learn from the time of the step that was computed last."""
        if self.verified is None or all(piece.row.drafts is None for piece in plan.pieces):
            return
        drafted = sum(draft.guesses for draft in self.verified)
        lost = times.learn(len(plan.pieces), drafted, step_s)
        for row, guesses, right in self.verified:
            row.learn(guesses, right, lost * guesses / drafted)
