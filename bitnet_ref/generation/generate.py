"""The generation loop: prompts in, one chunk for each new token out.

All rows of a batch go through the model together, laid end to end on the token axis. By the model's batch invariance
each row gets the logits, and so the tokens, that it gets alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple, Unpack

import numpy as np
from numpy.typing import NDArray

from ..backends.loaded import LoadedModel
from ..backends.run import TokenLogits
from ..errors import GenerationError
from ..reference.cache import KVCache, TokenIds
from .drafts import StepTimes
from .greedy import choose_steps, run_steps
from .params import SamplingOptions, SamplingParams, expand_params
from .results import Generation, GenerationStats, StreamChunk
from .search import beam_search
from .sequence import Continuation, Piece, Request, run_pieces, split_into_steps

Prompt = str | TokenIds
Prompts = Prompt | Sequence[str] | Sequence[TokenIds]
Generations = Generation | list[Generation] | list[list[Generation]]


@expand_params
def generate(model: LoadedModel, prompt: Prompts, **params: Unpack[SamplingOptions]) -> Generations:
    """Continue one prompt (text or token ids), or each of a list. With n > 1, returns a list of n for each prompt."""
    sampling = SamplingParams.of(**params)
    prompts, single = split_prompts(prompt)
    requests = [Request(model, each, sampling, f"prompt {index}") for index, each in enumerate(prompts)]
    stats = GenerationStats(model.backend.name)
    if sampling.num_beams > 1:
        groups = beam_search(model, requests, stats)
    else:
        n = sampling.n
        rows = [[Continuation(request, i * n + j, j) for j in range(n)] for i, request in enumerate(requests)]
        for _ in generate_chunks(model, rows, stats):
            pass
        groups = [[row.result(stats) for row in group] for group in rows]
    if sampling.n > 1:
        return groups[0] if single else groups
    return groups[0][0] if single else [group[0] for group in groups]


class TokenStream(Iterator[StreamChunk], AbstractContextManager["TokenStream", None]):
    """The chunks of one generation as they come. `close()` cancels, as does leaving a `with`; `stats` is live."""

    def __init__(self, chunks: Generator[StreamChunk, None, None], stats: GenerationStats) -> None:
        self._chunks, self.stats = chunks, stats

    def __next__(self) -> StreamChunk:
        return next(self._chunks)

    def close(self) -> None:
        """Stop generating and free the cache."""
        self._chunks.close()

    def __exit__(self, *_: object) -> None:
        self.close()


@expand_params
def stream(model: LoadedModel, prompt: Prompt, **params: Unpack[SamplingOptions]) -> TokenStream:
    """Continue one prompt, token by token. Bad arguments raise here, not at the first `next`."""
    sampling = SamplingParams.of(**params)
    check_streamable(sampling)
    if not is_single(prompt):
        raise GenerationError("stream takes one prompt: a text or a list of token ids")
    row = Continuation(Request(model, prompt, sampling), slot=0)
    stats = GenerationStats(model.backend.name)
    return TokenStream(generate_chunks(model, [[row]], stats), stats)


def check_streamable(params: SamplingParams) -> None:
    """Raise GenerationError for parameters that give several texts, none before the end, or what no chunk holds."""
    if params.prompt_logprobs is not None:
        message = "a stream yields new tokens only; use generate, or an engine's submit"
        raise GenerationError(message, field="prompt_logprobs")
    for name in ("n", "num_beams"):
        if getattr(params, name) > 1:
            message = f"a stream is one continuation, got {getattr(params, name)}; use generate"
            raise GenerationError(message, field=name)


def is_single(prompt: Any) -> bool:
    """Whether it is one prompt (a text or token ids), not a list of prompts."""
    if isinstance(prompt, str):
        return True
    if not isinstance(prompt, list | tuple | np.ndarray) or (isinstance(prompt, np.ndarray) and prompt.ndim == 0):
        raise GenerationError(f"expected a text, a list of token ids or a list of those, got {type(prompt).__name__}")
    return len(prompt) > 0 and isinstance(prompt[0], int | np.integer)


def split_prompts(prompt: Any) -> tuple[list[Any], bool]:
    """The prompts of an argument that is one prompt or a list, and whether it is one."""
    single = is_single(prompt)
    if not single and not len(prompt):
        raise GenerationError("expected a prompt or a list of prompts, got an empty list")
    return [prompt] if single else list(prompt), single


def generate_chunks(
    model: LoadedModel, groups: list[list[Continuation]], stats: GenerationStats, cache: KVCache | None = None
) -> Generator[StreamChunk, None, None]:
    """Prefill, then one step for each new token of all unfinished rows.

    groups: the continuations of each prompt, which is computed once. cache: one that holds the first `cached` tokens of
    each group's first row.
    """
    rows = [row for group in groups for row in group]
    if cache is None:
        cache = model.new_cache(len(rows), capacity=max(row.request.capacity for row in rows))
    loop = GenerationLoop(model, cache, stats)
    yield from loop.first_tokens(groups)
    while rows := [row for row in rows if not row.finished]:
        yield from loop.next_tokens(rows)


class GenerationLoop:
    """The passes of one call over its cache."""

    def __init__(self, model: LoadedModel, cache: KVCache, stats: GenerationStats) -> None:
        self.model, self.cache, self.stats, self.times = model, cache, stats, StepTimes()
        self.pass_tokens = model.backend.prompt_tokens(model.config)
        self.last_s = 0.0  # seconds of the last pass

    def first_tokens(self, groups: list[list[Continuation]]) -> Iterator[StreamChunk]:
        """Compute each prompt once, and choose the first token of each row."""
        leaders, others = [group[0] for group in groups], {group[0].slot: group[1:] for group in groups}
        self._describe(leaders)
        started = time.perf_counter()
        for ends in self._compute_contexts(leaders):
            chunks = []
            for leader, logits in ends:
                computed, followers = leader.computed, others[leader.slot]
                if followers:
                    self.cache.copy([leader.slot] * len(followers), [row.slot for row in followers], computed)
                for row in (leader, *followers):
                    row.computed = computed
                    chunks.append(row.accept(logits, self.stats))
            self.last_s = time.perf_counter() - started
            self.stats.prefill_s += self.last_s
            yield from chunks
            started = time.perf_counter()

    def next_tokens(self, rows: Sequence[Continuation]) -> Iterator[StreamChunk]:
        """At least one more token of each row: of one pass with draft tokens, or of some greedy steps in a row."""
        started = time.perf_counter()
        if any(row.behind > 1 for row in rows):
            yield from self._recompute(rows)
            return
        drafts = self._propose_drafts(rows)
        if not drafts and (steps := choose_steps(rows, self.last_s)) > 1:
            before = self.stats.generated_tokens
            yield from self._take_greedy_steps(rows, steps)
            if self.stats.generated_tokens > before:
                return
            started = time.perf_counter()
        yield from self._take_step(rows, drafts, started)

    def _describe(self, leaders: Sequence[Continuation]) -> None:
        stats = self.stats
        stats.describe(self.cache)
        stats.prompt_tokens = sum(row.context_tokens for row in leaders)
        stats.dropped_tokens = sum(len(row.request.given) - row.context_tokens for row in leaders)
        stats.cached_tokens = sum(row.cached for row in leaders)

    def _compute_contexts(self, rows: Sequence[Continuation]) -> Iterator[list[tuple[Continuation, TokenLogits]]]:
        """Passes over all tokens of the rows that are not in the cache.   -> of each, the rows that it completes"""
        by_slot = {row.slot: row for row in rows}
        for parts, complete in split_into_steps([row.next_input for row in rows], max(self.pass_tokens, len(rows))):
            ending = {part: rows[number] for part, number in complete}
            needs = [ending[part].needs() if part in ending else None for part in range(len(parts))]
            pieces = [Piece(by_slot[part[0]], *part, need) for part, need in zip(parts, needs, strict=True)]
            logits = run_pieces(self.model, self.cache, pieces)
            for row, _, start, ids, _ in pieces:
                row.computed = start + len(ids)
            yield list(zip(ending.values(), logits, strict=True))

    def _recompute(self, rows: Sequence[Continuation]) -> Iterator[StreamChunk]:
        """The next token of each row, of which some compute their context again: the window has dropped tokens."""
        started = time.perf_counter()
        for ends in self._compute_contexts(rows):
            yield from self._note(started, [row.accept(logits, self.stats) for row, logits in ends])
            started = time.perf_counter()

    def _propose_drafts(self, rows: Sequence[Continuation]) -> dict[int, NDArray[np.int64]]:
        """slot -> guessed tokens, of the rows that have some; together with all rows they fit one pass."""
        drafts, room = {}, self.pass_tokens - len(rows)
        for row in rows:
            if row.may_guess and len(draft := row.guess(room, self.times)):
                drafts[row.slot] = draft
                room -= len(draft)
        return drafts

    def _take_step(
        self, rows: Sequence[Continuation], drafts: dict[int, NDArray[np.int64]], started: float
    ) -> list[StreamChunk]:
        """One pass over the newest token of each row and the guesses that follow it."""
        pieces, chunks, verified = [], [], list[VerifiedDraft]()
        for row in rows:
            pieces.append(Piece(row, row.slot, row.computed, row.newest, row.needs()))
            if row.slot in drafts:
                pieces += pieces_of_draft(row, row.computed + 1, drafts[row.slot])
        logits = iter(run_pieces(self.model, self.cache, pieces))
        for row in rows:
            row.computed += 1
            chunks.append(row.accept(next(logits), self.stats))
            if (draft := drafts.get(row.slot)) is not None:
                right = accept_drafts(row, draft, [next(logits) for _ in draft], self.stats)
                verified.append(VerifiedDraft(row, len(draft), len(right)))
                chunks += right
        self._note(started, chunks)
        if rows[0].drafts is not None:  # all have the same parameters
            learn_drafts(self.times, len(rows), verified, self.last_s)
        return chunks

    def _take_greedy_steps(self, rows: Sequence[Continuation], steps: int) -> Iterator[StreamChunk]:
        """Up to so many greedy steps; none where they must be taken one by one."""
        started, taken_s, taken = time.perf_counter(), 0.0, 0
        for step in run_steps(self.model, self.cache, rows, steps, np.zeros(1, dtype=np.uint8)):
            chunks = []
            for row, logits in zip(rows, step, strict=True):
                if not row.finished:
                    row.computed += 1
                    chunks.append(row.accept(logits, self.stats))
            self._note(started, chunks)
            taken_s, taken = taken_s + self.last_s, taken + 1
            yield from chunks
            started = time.perf_counter()
        if taken:
            self.last_s = taken_s / taken
            self.times.learn(len(rows), 0, self.last_s)

    def _note(self, started: float, chunks: list[StreamChunk]) -> list[StreamChunk]:
        """Count these new tokens and their time."""
        self.last_s = time.perf_counter() - started
        self.stats.decode_s += self.last_s
        self.stats.decode_tokens += len(chunks)
        return chunks


class VerifiedDraft(NamedTuple):
    """Guesses of a row that a step has verified, and how many of them are right."""

    row: Continuation
    guesses: int
    right: int


def learn_drafts(times: StepTimes, rows: int, verified: Sequence[VerifiedDraft], seconds: float) -> None:
    """What a step of so many rows and seconds shows of drafts."""
    drafted = sum(draft.guesses for draft in verified)
    lost = times.learn(rows, drafted, seconds)
    for row, guesses, right in verified:
        row.learn(guesses, right, lost * guesses / drafted)


def pieces_of_draft(row: Continuation, position: int, draft: NDArray[np.int64]) -> list[Piece]:
    """The guessed tokens, each with what the choice after it needs. position: of the first."""
    return [Piece(row, row.slot, position + i, draft[i : i + 1], row.needs(draft[: i + 1])) for i in range(len(draft))]


def accept_drafts(
    row: Continuation,
    draft: Sequence[int] | NDArray[np.int64],
    logits: Sequence[TokenLogits],
    stats: GenerationStats,
    accept: Callable[[TokenLogits], object] | None = None,
) -> list[StreamChunk]:
    """The tokens after the one that the row has just chosen, as far as choices equal guesses.

    logits: after each guess. accept: lets the row choose its next token; by default `row.accept`.
    """
    accept, before = accept or partial(row.accept, stats=stats), len(row.chunks)
    stats.drafted_tokens += len(draft)
    for guess, token_logits in zip(draft, logits, strict=True):
        if row.finished or row.chunks[-1].token_id != guess:
            break
        row.computed += 1
        stats.accepted_tokens += 1
        accept(token_logits)
    return row.chunks[before:]
