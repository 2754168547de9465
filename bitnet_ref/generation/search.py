"""Beam search: keep the `num_beams` likeliest continuations at every step, instead of one.

The rules are those of transformers' `generate(num_beams=...)`, and so are the results. A beam's score is the sum of its
tokens' log probabilities; one that ends is set aside with its score divided by (new tokens) ** length_penalty. What the
processors see are log probabilities, as there, not logits.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ..backends import HeadNeed
from ..reference.cache import KVCache, TokenBatch
from .logprobs import Entry
from .results import Generation, GenerationStats
from .sampling import likeliest, likeliest_logprobs, log_probabilities
from .sequence import Request, prefill_steps

if TYPE_CHECKING:
    from ..api import Model


@dataclass(frozen=True)
class Beam:
    """A continuation and what it is worth. `parent`: the beam of the step before that it continues."""

    tokens: tuple[int, ...] = ()
    score: float = 0.0
    parent: int = 0
    entries: tuple[Entry, ...] = ()  # ln p of each token, and of the likeliest in its place


@dataclass(frozen=True)
class BeamStep:
    """What one step weighed, best first: continuations of the running beams, and what became of each."""

    candidates: tuple[Beam, ...]
    fates: tuple[str, ...]  # "running", "ended" or "cut"
    worth: tuple[float | None, ...]  # the final score of those that ended


Watcher = Callable[[int, BeamStep], None]  # (number of the prompt, its step)


class BeamSearch:
    """One prompt's beams. `advance` takes the logits after each running beam and makes the next ones, and returns what
    it weighed."""

    def __init__(self, request: Request) -> None:
        self.request, self.params = request, request.params
        self.rules, self.constraint = request.rules()
        self.running = [Beam()]
        self.ended: list[Beam] = []  # best first; `score` is the final one
        self.done = False

    def ids(self, beam: Beam) -> NDArray[np.int64]:
        """The prompt and the beam's tokens."""
        return np.concatenate([self.request.prompt, np.array(beam.tokens, dtype=np.int64)])

    def advance(self, logits: NDArray) -> BeamStep:
        """One more token for the beams.   logits (running beams, V), the model's own"""
        width, length = self.params.num_beams, len(self.running[0].tokens) + 1
        own = np.stack([log_probabilities(row) for row in logits])
        scores = np.stack([self.rules.apply(self.ids(beam), row) for beam, row in zip(self.running, own, strict=True)])
        scores += np.array([beam.score for beam in self.running])[:, None]
        # So many that `width` of them go on even if each beam's likeliest continuations are its end tokens.
        keep = max(2, 1 + len(self.request.end_tokens)) * width
        best = [
            self._child(int(at) // own.shape[1], int(at) % own.shape[1], float(scores.flat[at]), own)
            for at in likeliest(scores.ravel(), min(keep, scores.size))
            if scores.flat[at] > -np.inf
        ]
        ends = [self._ends(beam, length) for beam in best]
        ended = [beam for beam, ends_here in zip(best[:width], ends, strict=False) if ends_here]
        self._set_aside(ended, length)
        self.running = [beam for beam, ends_here in zip(best, ends, strict=True) if not ends_here][:width]
        self.done = self._is_done(length)
        fates = dict.fromkeys(map(id, ended), "ended") | dict.fromkeys(map(id, self.running), "running")
        worth = {id(beam): self._worth(beam, length) for beam in ended}
        return BeamStep(
            tuple(best), tuple(fates.get(id(b), "cut") for b in best), tuple(worth.get(id(b)) for b in best)
        )

    def _child(self, parent: int, token: int, score: float, own: NDArray) -> Beam:
        beam = self.running[parent]
        chosen, top = float(own[parent, token]), self.params.logprobs or 0
        likely = dict(zip(*likeliest_logprobs(own[parent], top), strict=True)) if top else {}
        return Beam((*beam.tokens, token), score, parent, (*beam.entries, (chosen, likely | {token: chosen})))

    def _ends(self, beam: Beam, length: int) -> bool:
        return (
            beam.tokens[-1] in self.request.end_tokens
            or length == self.request.max_tokens
            or (self.constraint is not None and self.constraint.complete(self.ids(beam)))
        )

    def _set_aside(self, beams: list[Beam], length: int) -> None:
        """The ended beams compete with those that ended before, unless it is settled that there are enough."""
        if self.params.early_stopping is True and len(self.ended) == self.params.num_beams:
            return
        worth = [Beam(b.tokens, self._worth(b, length), b.parent, b.entries) for b in beams]
        self.ended = sorted([*self.ended, *worth], key=lambda beam: -beam.score)[: self.params.num_beams]

    def _worth(self, beam: Beam, length: int) -> float:
        """The final score of a beam that ends with so many tokens."""
        return beam.score / length**self.params.length_penalty

    def _is_done(self, length: int) -> bool:
        if not self.running:
            return True
        if len(self.ended) < self.params.num_beams:
            return False
        if self.params.early_stopping is True:
            return True
        # The most that the best running beam may come to: False looks at its length now, "never" at the longest.
        longest = self.params.early_stopping == "never" and self.params.length_penalty > 0
        reach = self.running[0].score / (self.request.max_tokens if longest else length) ** self.params.length_penalty
        return reach <= self.ended[-1].score

    def results(self, stats: GenerationStats) -> list[Generation]:
        """The `n` best, best first. Fewer where a grammar allows fewer."""
        return [self._result(beam, stats) for beam in self.ended[: self.params.n]]

    def _result(self, beam: Beam, stats: GenerationStats) -> Generation:
        text = self.request.text()
        whole = self.request.opening(text) + "".join([text.push(token) for token in beam.tokens]) + text.flush()
        last = beam.tokens[-1]
        by_token = last in self.request.end_tokens
        matched = self.constraint is not None and self.constraint.complete(self.ids(beam))
        return Generation(
            text=whole,
            token_ids=list(beam.tokens),
            finish_reason="filtered" if text.filtered else "stop" if by_token or matched else "length",
            logprobs=[chosen for chosen, _ in beam.entries],
            prompt_token_ids=self.request.given.tolist(),
            stats=stats,
            stop_reason=text.banned_by if text.filtered else last if by_token else None,
            top_logprobs=None if self.params.logprobs is None else [likely for _, likely in beam.entries],
            score=beam.score,
            overflows=self.request.overflows,
        )


def beam_search(
    model: Model, requests: list[Request], stats: GenerationStats, watch: Watcher | None = None
) -> list[list[Generation]]:
    """The `n` best continuations of each prompt. All beams of all prompts go through the model together.

    watch: called with each step of each prompt.
    """
    watch = watch or (lambda number, step: None)
    width = requests[0].params.num_beams
    searches = [BeamSearch(request) for request in requests]
    cache = model.new_cache(width * len(requests), capacity=max(request.capacity for request in requests))
    stats.describe(cache)
    started = time.perf_counter()
    stats.prompt_tokens = sum(len(request.prompt) for request in requests)
    stats.dropped_tokens = sum(len(request.given) - len(request.prompt) for request in requests)
    prompts = [(number * width, 0, request.prompt) for number, request in enumerate(requests)]
    for parts, complete in prefill_steps(prompts, model.backend.prompt_tokens(model.config)):
        logits = _logits(model, TokenBatch.of(parts, [part for part, _ in complete]), cache, stats)
        for (_, number), row in zip(complete, logits, strict=True):
            watch(number, searches[number].advance(row[None]))
    stats.prefill_s = time.perf_counter() - started
    started = time.perf_counter()
    while active := [number for number, search in enumerate(searches) if not search.done]:
        parts = []
        for number in active:
            beams, length = (
                searches[number].running,
                len(requests[number].prompt) + len(searches[number].running[0].tokens),
            )
            slots = [number * width + place for place in range(len(beams))]
            cache.copy([number * width + beam.parent for beam in beams], slots, length - 1)
            parts += [(slot, length - 1, [beam.tokens[-1]]) for slot, beam in zip(slots, beams, strict=True)]
        rows = iter(_logits(model, TokenBatch.of(parts, range(len(parts))), cache, stats))
        for number in active:
            watch(number, searches[number].advance(np.stack([next(rows) for _ in searches[number].running])))
    stats.decode_s = time.perf_counter() - started
    results = [search.results(stats) for search in searches]
    stats.generated_tokens = sum(len(out.token_ids) for group in results for out in group)
    stats.decode_tokens = stats.generated_tokens - sum(map(len, results))
    return results


def _logits(model: Model, batch: TokenBatch, cache: KVCache, stats: GenerationStats) -> list[NDArray]:
    wanted = len(batch) if batch.wanted is None else len(batch.wanted)
    _, found = model.candidates(batch, cache, [HeadNeed()] * wanted)
    stats.head_rows += sum(len(candidates.ids) for candidates in found)
    return [candidates.logits for candidates in found]
