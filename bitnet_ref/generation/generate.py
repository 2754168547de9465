"""`generate` and `stream`: prompts in, one chunk for each new token out.

All rows of a batch go through the model together, laid end to end on the token axis. By the model's batch invariance
each row gets the logits, and so the tokens, that it gets alone.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Unpack

import numpy as np

from ..backends.loaded import LoadedModel
from ..backends.paged_cache import EngineKVCache
from ..backends.run import TokenLogits
from ..errors import GenerationError
from ..reference.cache import TokenIds
from .drafts import StepTimes
from .greedy import choose_steps
from .params import SamplingOptions, SamplingParams, expand_params
from .results import Generation, GenerationStats, StreamChunk
from .search import BeamSearch, Watcher
from .sequence import Continuation, Request
from .stepper import PlannedPiece, Stepper, StepPlan

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
        groups = search_beams(model, requests, stats)
    else:
        rows = rows_of(requests, sampling.n, stats)
        for _ in generate_chunks(model, rows, stats):
            pass
        groups = [[row.result() for row in group] for group in rows]
    if sampling.n > 1:
        return groups[0] if single else groups
    return groups[0][0] if single else [group[0] for group in groups]


def rows_of(requests: Sequence[Request], count: int, stats: GenerationStats) -> list[list[Continuation]]:
    """So many rows of each request, each with a slot of its own."""
    return [
        [Continuation(request, number * count + choice, choice, stats) for choice in range(count)]
        for number, request in enumerate(requests)
    ]


def search_beams(
    model: LoadedModel, requests: Sequence[Request], stats: GenerationStats, watch: Watcher | None = None
) -> list[list[Generation]]:
    """The `n` best continuations of each prompt. All beams of all prompts go through the model together."""
    rows = rows_of(requests, requests[0].params.num_beams, stats)
    searches = [BeamSearch(group, watch) for group in rows]
    for _ in generate_chunks(model, rows, stats):
        pass
    return [search.results for search in searches]


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
    return TokenStream(generate_chunks(model, [[row]], row.stats), row.stats)


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
    model: LoadedModel, groups: list[list[Continuation]], stats: GenerationStats, cache: EngineKVCache | None = None
) -> Generator[StreamChunk, None, None]:
    """The chunks of all rows, step by step: first the prompts, then one step for each new token of all unfinished rows.

    groups: the continuations of each prompt, which is computed once. cache: one that holds the first `cached` tokens of
    each group's first row.
    """
    rows = [row for group in groups for row in group]
    if cache is None:
        cache = model.new_cache(len(rows), capacity=max(row.request.capacity for row in rows))
    stepper = OwnRows(model, cache, groups, stats)
    while rows := [row for row in stepper.rows if not row.finished]:
        yield from stepper.step(rows)


class OwnRows(Stepper[Continuation]):
    """The rows of one call, stepped in the caller's thread. All rows take part in each step."""

    def __init__(
        self, model: LoadedModel, cache: EngineKVCache, groups: list[list[Continuation]], stats: GenerationStats
    ) -> None:
        super().__init__(model, cache)
        self.stats, self.times = stats, StepTimes()
        leaders = [group[0] for group in groups]
        self.waiting = {group[0].slot: group[1:] for group in groups if group[0].search is None}  # for its prompt
        self.rows = [row for group in groups for row in (group[:1] if group[0].search is None else group)]
        self.pass_tokens = model.backend.prompt_tokens(model.config)
        self.step_s = 0.0  # of the last step
        self.chunks: list[StreamChunk] = []  # of the present step
        stats.describe(cache)
        stats.prompt_tokens = sum(row.context_tokens for row in leaders)
        stats.dropped_tokens = sum(len(row.request.given) - row.context_tokens for row in leaders)
        stats.cached_tokens = sum(row.cached for row in leaders)

    def step(self, rows: list[Continuation]) -> Iterator[StreamChunk]:
        """One step of these rows, or some greedy steps in a row. Yields the new tokens of each when it is computed."""
        started, steps, total_s = time.perf_counter(), 0, 0.0
        rows = [row for row in rows if not row.new_tokens] or rows
        is_first, plan = not rows[0].new_tokens, self.plan(rows)
        for _ in self.run(plan):
            chunks, self.chunks = self.chunks, []
            seconds = time.perf_counter() - started
            steps, total_s = steps + 1, total_s + seconds
            if is_first:
                self.stats.prefill_s += seconds
            else:
                self.stats.decode_s += seconds
                self.stats.decode_tokens += len(chunks)
            yield from chunks
            started = time.perf_counter()
        self.step_s = total_s / steps
        if rows[0].drafts is not None:  # all have the same parameters
            self.learn_drafts(plan, self.times, self.step_s)

    def plan(self, rows: list[Continuation]) -> StepPlan[Continuation]:
        """Each row's newest token, with draft tokens or for several greedy steps; or as many of their contexts' tokens
        as a pass takes, where some have more to compute."""
        pieces: list[PlannedPiece[Continuation]] = []
        if any(row.behind > 1 for row in rows):
            room = max(self.pass_tokens, len(rows))
            for row in rows:
                if count := min(row.behind, room):
                    pieces.append(PlannedPiece.of(row, count))
                    room -= count
            return StepPlan(pieces)
        room = self.pass_tokens - len(rows)
        is_drafted = False
        for row in rows:
            piece = PlannedPiece(row, row.slot, row.computed, 1, ends=True)
            if row.may_guess and len(draft := row.guess(room, self.times)):
                piece = piece._replace(draft=draft)
                room -= len(draft)
                is_drafted = True
            pieces.append(piece)
        return StepPlan(pieces, 1 if is_drafted else choose_steps(rows, self.step_s))

    def accept(self, row: Continuation, logits: TokenLogits) -> None:
        if row.search is not None:
            if parents := row.search.accept(row, logits):
                rows = row.search.rows
                self._copy([rows[index] for index in parents], rows[: len(parents)])
            return
        for each in (row, *self._start(row)):
            self.chunks.append(each.accept(logits))

    def _copy(self, sources: Sequence[Continuation], targets: Sequence[Continuation]) -> None:
        """Give each target row the keys and values of its source, all of the same length."""
        length = sources[0].computed
        self.cache.copy([row.slot for row in sources], [row.slot for row in targets], length)
        for row in targets:
            row.computed = length

    def _start(self, leader: Continuation) -> list[Continuation]:
        """The rows that have waited for this one's prompt, which is computed, with a copy of it in the cache."""
        rows = self.waiting.pop(leader.slot, [])
        if rows:
            self._copy([leader] * len(rows), rows)
        self.rows += rows
        return rows
