"""The generation loop: prompts in, one chunk for each new token out.

All rows of a batch go through the model together, laid end to end on the token axis. By the model's batch invariance
each row gets the logits, and so the tokens, that it gets alone.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..backends import HeadCandidates
from ..errors import GenerationError
from ..reference.cache import KVCache, TokenBatch, TokenIds
from .params import SamplingParams
from .results import Generation, GenerationStats, StreamChunk
from .search import beam_search
from .sequence import Continuation, Request, prefill_steps

if TYPE_CHECKING:
    from ..api import Model


def generate(model: Model, prompt: Any, **params: Any) -> Generation | list[Generation] | list[list[Generation]]:
    """Continue one prompt (text or token ids), or each of a list. See `SamplingParams` for the parameters.

    With n > 1 there is a list of n for each prompt.
    """
    sampling = SamplingParams.of(**params)
    single = _is_single(prompt)
    prompts = [prompt] if single else list(prompt)
    if not prompts:
        raise GenerationError("expected a prompt or a list of prompts, got an empty list")
    requests = [Request(model, each, sampling, f"prompt {index}") for index, each in enumerate(prompts)]
    stats = GenerationStats(model.backend.name)
    if sampling.num_beams > 1:
        groups = beam_search(model, requests, stats)
    else:
        n = sampling.n
        rows = [[Continuation(request, i * n + j, j) for j in range(n)] for i, request in enumerate(requests)]
        for _ in run(model, rows, stats):
            pass
        groups = [[row.result(stats) for row in group] for group in rows]
    if sampling.n > 1:
        return groups[0] if single else groups
    return groups[0][0] if single else [group[0] for group in groups]


class TokenStream(Iterator[StreamChunk]):
    """The chunks of one generation as they come. `close()` cancels, as does leaving a `with`; `stats` is live."""

    def __init__(self, chunks: Generator[StreamChunk, None, None], stats: GenerationStats) -> None:
        self._chunks, self.stats = chunks, stats

    def __next__(self) -> StreamChunk:
        return next(self._chunks)

    def close(self) -> None:
        """Stop generating and free the cache."""
        self._chunks.close()

    def __enter__(self) -> TokenStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def stream(model: Model, prompt: str | Sequence[int], **params: Any) -> TokenStream:
    """Continue one prompt, token by token. Bad arguments raise here, not at the first `next`."""
    sampling = SamplingParams.of(**params)
    check_streamable(sampling)
    if not _is_single(prompt):
        raise GenerationError("stream takes one prompt: a text or a list of token ids")
    row = Continuation(Request(model, prompt, sampling), slot=0)
    stats = GenerationStats(model.backend.name)
    return TokenStream(run(model, [[row]], stats), stats)


def check_streamable(params: SamplingParams) -> None:
    """A stream is one continuation whose beginning is certain before its end. Raises GenerationError."""
    for name in ("n", "num_beams"):
        if getattr(params, name) > 1:
            raise GenerationError(f"{name}: a stream is one continuation, got {getattr(params, name)}; use generate")


def _is_single(prompt: Any) -> bool:
    if isinstance(prompt, str):
        return True
    if not isinstance(prompt, list | tuple | np.ndarray):
        raise GenerationError(f"expected a text, a list of token ids or a list of those, got {type(prompt).__name__}")
    return len(prompt) > 0 and isinstance(prompt[0], int | np.integer)


def run(
    model: Model, groups: list[list[Continuation]], stats: GenerationStats, cache: KVCache | None = None
) -> Generator[StreamChunk, None, None]:
    """Prefill, then one step for each new token of all rows that are not finished.

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
    by_slot = {group[0].slot: group for group in groups}
    at_once = model.backend.prompt_tokens(model.config)
    for parts, complete in prefill_steps([row.next_input for row in leaders], at_once):
        started = time.perf_counter()
        ending = [leaders[number] for _, number in complete]
        hidden, found = _step(model, parts, [part for part, _ in complete], ending, cache)
        for slot, start, piece in parts:
            by_slot[slot][0].computed = start + len(piece)
        for leader, x, candidates in zip(ending, hidden, found, strict=True):
            group = by_slot[leader.slot]
            cache.copy([leader.slot] * (len(group) - 1), [row.slot for row in group[1:]], leader.computed)
            stats.prefill_s += time.perf_counter() - started
            for row in group:
                row.computed = leader.computed
                yield row.accept(x, candidates, stats)
            started = time.perf_counter()
        stats.prefill_s += time.perf_counter() - started
    while active := [row for row in rows if not row.finished]:
        started = time.perf_counter()
        chunks = []
        inputs = [row.next_input for row in active]  # one token each, or what was kept when others were dropped
        for parts, complete in prefill_steps(inputs, max(at_once, len(active))):
            ending = [active[number] for _, number in complete]
            hidden, found = _step(model, parts, [part for part, _ in complete], ending, cache)
            for row, x, candidates in zip(ending, hidden, found, strict=True):
                row.computed = row.context_tokens
                chunks.append(row.accept(x, candidates, stats))
        stats.decode_s += time.perf_counter() - started
        stats.decode_tokens += len(chunks)
        yield from chunks


def _step(
    model: Model,
    parts: Sequence[tuple[int, int, TokenIds]],
    ending: Sequence[int],
    rows: Sequence[Continuation],
    cache: KVCache,
) -> tuple[NDArray, list[HeadCandidates]]:
    """The parts through the model; at the last tokens of the parts `ending`, what their `rows` need to go on."""
    needs = [row.needs() for row in rows]
    return model.candidates(TokenBatch.of(parts, logits_of_last=ending), cache, needs)
