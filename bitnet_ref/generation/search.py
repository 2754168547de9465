"""Beam search: keep the `num_beams` most likely continuations at every step, instead of one.

The rules, and so the results, are those of transformers' `generate(num_beams=...)`. A beam's score is the sum of its
tokens' log probabilities; the final score of a beam that ends is divided by (new tokens) ** length_penalty. Processors
see log probabilities instead of logits, as there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..backends.run import TokenLogits
from .results import Generation, Overflow
from .sampling import Entry, entry_of, likeliest, log_probabilities
from .sequence import Continuation


@dataclass(frozen=True)
class Beam:
    """A continuation and its score. `parent`: the beam of the previous step that it continues."""

    tokens: tuple[int, ...] = ()
    score: float = 0.0
    parent: int = 0
    entries: tuple[Entry, ...] = ()  # ln p of each token and of its most likely alternatives


class BeamCandidate(NamedTuple):
    """A continuation of a running beam that one step compared with others."""

    beam: Beam
    fate: str  # "running", "ended" or "cut"
    final_score: float | None  # if it ended


Watcher = Callable[[list[BeamCandidate]], None]  # called with the candidates of each step, best first


class BeamSearch:
    """The beams of one prompt, each computed by a row. `running` is empty when the search is done."""

    def __init__(self, rows: Sequence[Continuation], watch: Watcher | None = None) -> None:
        """rows: `num_beams` of a request, with choices 0, 1, ..."""
        self.rows, self.watch, self.request = rows, watch, rows[0].request
        self.params, self.rules, self.constraint = self.request.params, rows[0].rules, rows[0].constraint
        self.running = [Beam()]
        self.ended: list[Beam] = []  # best first; `score` is the final one
        self.results: list[Generation] = []  # at the end: the `n` best, best first; fewer where a grammar allows fewer
        self._own: dict[int, NDArray[np.float64]] = {}  # ln p (V,) after each running beam, as far as they are computed
        for row in rows:
            row.search = self

    def accept(self, row: Continuation, logits: TokenLogits) -> list[int] | None:
        """Take the logits after a running beam. When those of all of them are here, extend the beams by one token.

        -> for each beam that is running then, in order, the index of the row that it continues: its own row has its
        text already, and needs that row's keys and values. None: other beams have to be computed first
        """
        row.stats.head_rows += logits.computed
        self._own[row.choice] = log_probabilities(logits.all())
        if len(self._own) < len(self.running):
            return None
        candidates = self._advance(np.stack([self._own[index] for index in range(len(self.running))]))
        self._own.clear()
        if self.watch is not None:
            self.watch(candidates)
        for each, beam in zip(self.rows, self.running, strict=False):
            each.set_ids(self.ids(beam))
        return [beam.parent for beam in self.running]

    def ids(self, beam: Beam) -> NDArray[np.int64]:
        return np.concatenate([self.request.prompt, np.array(beam.tokens, dtype=np.int64)])

    def _advance(self, own: NDArray[np.float64]) -> list[BeamCandidate]:
        """Extend the beams by one token.   own (running beams, V), ln p by the model  ->  candidates, best first"""
        width, length = self.params.num_beams, len(self.running[0].tokens) + 1
        scores = np.stack([self.rules.apply(row.ids, each) for row, each in zip(self.rows, own, strict=False)])
        scores += np.array([beam.score for beam in self.running])[:, None]
        # Enough that `width` of them continue even if the most likely tokens of each beam are its end tokens.
        count = max(2, 1 + len(self.request.end_tokens)) * width
        best = [
            self._extend(int(index), float(scores.flat[index]), own)
            for index in likeliest(scores.ravel(), min(count, scores.size))
            if scores.flat[index] > -np.inf
        ]
        ends = [self._ends(beam, length) for beam in best]
        ended = {
            index: replace(beam, score=self._final_score(beam, length))
            for index, beam in enumerate(best[:width])
            if ends[index]
        }
        running = [index for index in range(len(best)) if not ends[index]][:width]
        # With early stopping, beams that end later do not compete with the first `width`.
        if not (self.params.early_stopping is True and len(self.ended) == width):
            self.ended = sorted([*self.ended, *ended.values()], key=lambda beam: -beam.score)[:width]
        self.running = [best[index] for index in running]
        if self._is_done(length):
            self.running = []
            self._finish()
        fates = ["ended" if i in ended else "running" if i in running else "cut" for i in range(len(best))]
        return [BeamCandidate(beam, fates[i], ended[i].score if i in ended else None) for i, beam in enumerate(best)]

    def _finish(self) -> None:
        """Make the results, and add their tokens to the statistics of the call."""
        self.results = [self._result(beam) for beam in self.ended[: self.params.n]]
        tokens, stats = sum(len(out.token_ids) for out in self.results), self.rows[0].stats
        stats.generated_tokens += tokens
        stats.decode_tokens += tokens - len(self.results)

    def _extend(self, index: int, score: float, own: NDArray[np.float64]) -> Beam:
        """The continuation at a flat index of `own` (running beams, V)."""
        parent, token = divmod(index, own.shape[1])
        beam, entry = self.running[parent], entry_of(own[parent], token, self.params.logprobs or 0)
        return Beam((*beam.tokens, token), score, parent, (*beam.entries, entry))

    def _ends(self, beam: Beam, length: int) -> bool:
        return (
            beam.tokens[-1] in self.request.end_tokens
            or length == self.request.max_tokens
            or (self.constraint is not None and self.constraint.complete(self.ids(beam)))
        )

    def _final_score(self, beam: Beam, length: int) -> float:
        penalty: float = length**self.params.length_penalty
        return beam.score / penalty

    def _is_done(self, length: int) -> bool:
        if not self.running:
            return True
        if len(self.ended) < self.params.num_beams:
            return False
        if self.params.early_stopping is True:
            return True
        # The best score that the running beams may reach: at their present length, or with "never" at any.
        longest = self.params.early_stopping == "never" and self.params.length_penalty > 0
        reachable = self._final_score(self.running[0], self.request.max_tokens if longest else length)
        return reachable <= self.ended[-1].score

    def _result(self, beam: Beam) -> Generation:
        request = self.request
        text = request.text_stream()
        whole = request.echo(text) + "".join([text.push(token) for token in beam.tokens]) + text.flush()
        last = beam.tokens[-1]
        by_token = last in request.end_tokens
        matched = self.constraint is not None and self.constraint.complete(self.ids(beam))
        return Generation(
            text=whole,
            token_ids=list(beam.tokens),
            finish_reason="filtered" if text.filtered else "stop" if by_token or matched else "length",
            logprobs=[chosen for chosen, _ in beam.entries],
            prompt_token_ids=request.given.tolist(),
            stats=self.rows[0].stats,
            stop_reason=text.banned.found if text.filtered else last if by_token else None,
            top_logprobs=None if self.params.logprobs is None else [likely for _, likely in beam.entries],
            score=beam.score,
            overflows=[Overflow(0, request.kept)] if len(request.prompt) < len(request.given) else [],
        )
