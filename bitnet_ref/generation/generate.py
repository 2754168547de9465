"""The generation loop: prompts in, one chunk for each new token out.

All rows of a batch go through the model together, laid end to end on the token axis. By the model's batch invariance
each row gets the logits, and so the tokens, that it gets alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Unpack

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
        raise GenerationError("prompt_logprobs: a stream yields new tokens only; use generate, or an engine's submit")
    for name in ("n", "num_beams"):
        if getattr(params, name) > 1:
            raise GenerationError(f"{name}: a stream is one continuation, got {getattr(params, name)}; use generate")


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
    leaders, rows = [group[0] for group in groups], [row for group in groups for row in group]
    if cache is None:
        cache = model.new_cache(len(rows), capacity=max(row.request.capacity for row in rows))
    stats.describe(cache)
    stats.prompt_tokens = sum(row.context_tokens for row in leaders)
    stats.dropped_tokens = sum(len(row.request.given) - row.context_tokens for row in leaders)
    stats.cached_tokens = sum(row.cached for row in leaders)
    step_tokens = model.backend.prompt_tokens(model.config)
    followers = {group[0].slot: group[1:] for group in groups}  # of a prompt's first row, until they have its cache
    active, times = leaders, StepTimes()
    while active:
        drafting = [row for row in active if row.drafts is not None]
        drafts = propose_drafts(drafting, step_tokens - len(active), times) if drafting and times.cost else {}
        if not (followers or drafts) and (steps := choose_steps(active, times.last_s)) > 1:
            before = stats.generated_tokens
            yield from decode_in_a_row(model, cache, active, steps, stats, times)
            if stats.generated_tokens > before:
                active = [row for row in active if not row.finished]
                continue
        # One token of each row, or its whole context: the prompt, or what the window keeps of the text.
        inputs, by_slot = [row.next_input for row in active], {row.slot: row for row in active}
        for parts, complete in split_into_steps(inputs, max(step_tokens, len(active))):
            started, prefill = time.perf_counter(), bool(followers)
            ending, pieces = {part: active[number] for part, number in complete}, []
            for part, (slot, start, ids) in enumerate(parts):
                need = ending[part].needs() if part in ending else None
                pieces.append(Piece(by_slot[slot], slot, start, ids, need))
                if part in ending and slot in drafts:
                    pieces += pieces_of_draft(by_slot[slot], start + len(ids), drafts[slot])
            logits = iter(run_pieces(model, cache, pieces))
            for slot, start, ids in parts:
                by_slot[slot].computed = start + len(ids)
            chunks, accepted = [], dict[int, int]()
            for row in ending.values():
                group, computed = followers.pop(row.slot, []), row.computed
                if group:
                    cache.copy([row.slot] * len(group), [each.slot for each in group], computed)
                token_logits = next(logits)
                for each in (row, *group):
                    each.computed = computed
                    chunks.append(each.accept(token_logits, stats))
                if (draft := drafts.get(row.slot)) is not None:
                    right = accept_drafts(row, draft, [next(logits) for _ in draft], stats)
                    accepted[row.slot] = len(right)
                    chunks += right
            elapsed = times.last_s = time.perf_counter() - started
            if drafting and not prefill:
                drafted = sum(map(len, drafts.values()))
                lost = times.learn(len(ending), drafted, elapsed)
                for slot, count in accepted.items():
                    guesses = len(drafts[slot])
                    by_slot[slot].learn(guesses, count, lost * guesses / drafted)
            if prefill:
                stats.prefill_s += elapsed
            else:
                stats.decode_s += elapsed
                stats.decode_tokens += len(chunks)
            yield from chunks
        active = [row for row in rows if not row.finished]


def decode_in_a_row(
    model: LoadedModel,
    cache: KVCache,
    rows: Sequence[Continuation],
    steps: int,
    stats: GenerationStats,
    times: StepTimes,
) -> Iterator[StreamChunk]:
    """The chunks of up to so many greedy steps of these rows; none where they must be taken one by one."""
    started, computed_s = time.perf_counter(), 0.0
    for step in run_steps(model, cache, rows, steps, np.zeros(1, dtype=np.uint8)):
        if not computed_s:  # all steps were computed before the first one came
            computed_s = time.perf_counter() - started
            times.last_s = computed_s / steps
            times.learn(len(rows), 0, times.last_s)
        chunks = []
        for row, token_logits in zip(rows, step, strict=True):
            if not row.finished:
                row.computed += 1
                chunks.append(row.accept(token_logits, stats))
        stats.decode_s += time.perf_counter() - started
        stats.decode_tokens += len(chunks)
        yield from chunks
        started = time.perf_counter()


def propose_drafts(rows: Sequence[Continuation], room: int, times: StepTimes) -> dict[int, NDArray[np.int64]]:
    """slot -> guessed tokens, of the rows that have some, at most `room` together."""
    drafts = {}
    for row in rows:
        if len(draft := row.guess(room, times.cost)):
            drafts[row.slot] = draft
            room -= len(draft)
    return drafts


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
