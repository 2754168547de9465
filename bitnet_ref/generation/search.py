"""Beam search: keep the `num_beams` most likely continuations at every step, instead of one.

The rules, and so the results, are those of transformers' `generate(num_beams=...)`. A beam's score is the sum of its
tokens' log probabilities; the final score of a beam that ends is divided by (new tokens) ** length_penalty. Processors
see log probabilities instead of logits, as there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..backends.loaded import LoadedModel
from ..reference.cache import TokenBatch, TokenIds
from .results import Generation, GenerationStats, Overflow
from .sampling import Entry, likeliest, likeliest_logprobs, log_probabilities
from .sequence import Request, split_into_steps


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


Watcher = Callable[[int, list[BeamCandidate]], None]  # (number of the prompt, the candidates of its step, best first)


class BeamSearch:
    """The beams of one prompt."""

    def __init__(self, request: Request) -> None:
        self.request, self.params = request, request.params
        self.rules, self.constraint = request.rules()
        self.running = [Beam()]
        self.ended: list[Beam] = []  # best first; `score` is the final one
        self.done = False

    def ids(self, beam: Beam) -> NDArray[np.int64]:
        return np.concatenate([self.request.prompt, np.array(beam.tokens, dtype=np.int64)])

    def advance(self, logits: NDArray) -> list[BeamCandidate]:
        """Extend the beams by one token.   logits (running beams, V), the model's own  ->  candidates, best first"""
        width, length = self.params.num_beams, len(self.running[0].tokens) + 1
        own = np.stack([log_probabilities(row) for row in logits])
        scores = np.stack([self.rules.apply(self.ids(beam), row) for beam, row in zip(self.running, own, strict=True)])
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
        self.done = self._is_done(length)
        fates = ["ended" if i in ended else "running" if i in running else "cut" for i in range(len(best))]
        return [BeamCandidate(beam, fates[i], ended[i].score if i in ended else None) for i, beam in enumerate(best)]

    def _extend(self, index: int, score: float, own: NDArray) -> Beam:
        """The continuation at a flat index of `own` (running beams, V)."""
        parent, token = divmod(index, own.shape[1])
        beam, chosen, top = self.running[parent], float(own[parent, token]), self.params.logprobs
        likely = likeliest_logprobs(own[parent], top) if top else {}
        return Beam((*beam.tokens, token), score, parent, (*beam.entries, (chosen, likely | {token: chosen})))

    def _ends(self, beam: Beam, length: int) -> bool:
        return (
            beam.tokens[-1] in self.request.end_tokens
            or length == self.request.max_tokens
            or (self.constraint is not None and self.constraint.complete(self.ids(beam)))
        )

    def _final_score(self, beam: Beam, length: int) -> float:
        return beam.score / length**self.params.length_penalty

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

    def result(self, beam: Beam, stats: GenerationStats) -> Generation:
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
            stats=stats,
            stop_reason=text.banned.found if text.filtered else last if by_token else None,
            top_logprobs=None if self.params.logprobs is None else [likely for _, likely in beam.entries],
            score=beam.score,
            overflows=[Overflow(0, request.kept)] if len(request.prompt) < len(request.given) else [],
        )


def beam_search(
    model: LoadedModel, requests: list[Request], stats: GenerationStats, watch: Watcher | None = None
) -> list[list[Generation]]:
    """The `n` best continuations of each prompt. All beams of all prompts go through the model together.

    watch: called with each step of each prompt.
    """
    width = requests[0].params.num_beams
    searches = [BeamSearch(request) for request in requests]
    cache = model.new_cache(width * len(requests), capacity=max(request.capacity for request in requests))
    stats.describe(cache)
    stats.prompt_tokens = sum(len(request.prompt) for request in requests)
    stats.dropped_tokens = sum(len(request.given) for request in requests) - stats.prompt_tokens

    def compute(parts: Sequence[tuple[int, int, TokenIds]], wanted: Sequence[int]) -> NDArray:
        logits = model.run(TokenBatch.of(parts, logits_of_last=wanted), cache).all()
        stats.head_rows += logits.size
        return logits

    def advance(number: int, logits: NDArray) -> None:
        step = searches[number].advance(logits)
        if watch is not None:
            watch(number, step)

    started = time.perf_counter()
    prompts = [(number * width, 0, request.prompt) for number, request in enumerate(requests)]
    for parts, complete in split_into_steps(prompts, model.backend.prompt_tokens(model.config)):
        logits = compute(parts, [part for part, _ in complete])
        for index, (_, number) in enumerate(complete):
            advance(number, logits[index : index + 1])
    stats.prefill_s = time.perf_counter() - started
    started = time.perf_counter()
    while active := [number for number, search in enumerate(searches) if not search.done]:
        parts = []
        for number in active:
            beams, first = searches[number].running, number * width
            position = len(requests[number].prompt) + len(beams[0].tokens) - 1
            slots = range(first, first + len(beams))
            cache.copy([first + beam.parent for beam in beams], slots, position)
            parts += [(slot, position, [beam.tokens[-1]]) for slot, beam in zip(slots, beams, strict=True)]
        logits, done = compute(parts, range(len(parts))), 0
        for number in active:
            beams = searches[number].running
            advance(number, logits[done : done + len(beams)])
            done += len(beams)
    stats.decode_s = time.perf_counter() - started
    # The `n` best, best first; fewer where a grammar allows fewer.
    results = [[search.result(beam, stats) for beam in search.ended[: search.params.n]] for search in searches]
    stats.generated_tokens = sum(len(out.token_ids) for group in results for out in group)
    stats.decode_tokens = stats.generated_tokens - sum(map(len, results))
    return results
