"""The generation loop: prompts in, one chunk for each new token out.

All rows of a batch go through the model together, laid end to end on the token axis. By the model's batch invariance
each row gets the logits, and so the tokens, that it gets alone.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray

from ..backends import HeadCandidates
from ..errors import GenerationError, TokenizerError
from ..kv_cache import TokenBatch, TokenIds
from .logprobs import Logprobs, lazy_field
from .params import DEFAULT_MAX_TOKENS, SamplingParams
from .sampling import candidates_needed, choose, choose_among
from .streaming import TextStream

if TYPE_CHECKING:
    from ..api import Model

PREFILL_CHUNK = 512  # prompt tokens computed at a time: bounds the memory of a long prompt


@lazy_field("logprob")
@dataclass(frozen=True)
class StreamChunk:
    """One new token. `text` is what became certain with it: often a word, sometimes nothing.

    `logprob` is the natural logarithm of the token's probability in the model's own distribution. With a screened head
    it is computed when it is first read, for all tokens so far.
    """

    text: str
    token_id: int
    logprob: float
    finish_reason: str | None = None  # "stop" or "length" on the last chunk
    stop_reason: str | int | None = None  # the stop string or the end token, where there was one


@dataclass
class GenerationStats:
    """Times of one call, all rows together."""

    backend: str
    prompt_tokens: int = 0
    generated_tokens: int = 0
    prefill_s: float = 0.0
    decode_s: float = 0.0  # from the first new token to the last
    decode_tokens: int = 0  # new tokens that took a step of their own: all but each row's first
    screened_tokens: int = 0  # new tokens that were chosen among a few logits, by certain bounds on all others
    head_rows: int = 0  # logits computed to choose all tokens; the whole vocabulary for each that is not screened

    @property
    def prompt_tokens_per_s(self) -> float:
        return self.prompt_tokens / self.prefill_s if self.prefill_s else 0.0

    @property
    def generated_tokens_per_s(self) -> float:
        return self.decode_tokens / self.decode_s if self.decode_s else 0.0


@lazy_field("logprobs")
@dataclass(frozen=True)
class Generation:
    """What became of one prompt. `text` and `token_ids` are the continuation, without the prompt.

    `token_ids` holds the end token if there was one; `text` holds no end token and no stop string. `logprobs` are the
    natural logarithms of the chosen tokens' probabilities in the model's own distribution (see `StreamChunk`).
    """

    text: str
    token_ids: list[int]
    finish_reason: str
    logprobs: list[float]
    prompt_token_ids: list[int]
    stats: GenerationStats = field(repr=False)
    stop_reason: str | int | None = None


class _Row:
    """One prompt on its way."""

    def __init__(
        self, model: Model, slot: int, prompt: NDArray[np.int64], max_tokens: int, text: TextStream, seed: int | None
    ) -> None:
        self.slot, self.prompt, self.max_tokens, self.text = slot, prompt, max_tokens, text
        self.head = model.head_logits
        self.logprobs = Logprobs(self.head)
        self.rng = np.random.default_rng(seed)
        self.chunks: list[StreamChunk] = []

    @property
    def finished(self) -> bool:
        return bool(self.chunks) and self.chunks[-1].finish_reason is not None

    @property
    def next_input(self) -> tuple[int, int, TokenIds]:
        """(slot, position, [token]) of the newest token, which the model has not seen yet."""
        return self.slot, len(self.prompt) + len(self.chunks) - 1, [self.chunks[-1].token_id]

    def accept(
        self,
        hidden: NDArray,
        found: HeadCandidates,
        params: SamplingParams,
        end_tokens: frozenset[int],
        stats: GenerationStats,
    ) -> StreamChunk:
        """Choose a token from the logits found for it and decide whether it is the last.   hidden (D,): the head's x"""
        uniform = self.rng.random() if params.temperature > 0 else 0.0
        logits = found.logits if found.complete else None
        token = choose_among(found, params, uniform) if logits is None else choose(logits, params, uniform)
        stats.head_rows += len(found.ids)
        if token is None:  # the bounds leave it open
            logits = self.head(hidden[None])[0]
            stats.head_rows += len(logits)
            token = choose(logits, params, uniform)
        stats.generated_tokens += 1
        stats.screened_tokens += logits is None
        text = self.text.push(token)
        finish: str | None = None
        why: str | int | None = None
        if token in end_tokens:
            finish, why = "stop", token
        elif self.text.stopped_by is not None:
            finish, why = "stop", self.text.stopped_by
        elif len(self.chunks) + 1 == self.max_tokens:
            finish = "length"
        if finish is not None:
            text += self.text.flush()
            if self.text.stopped_by is not None and why is None:  # the flush completed a stop string
                finish, why = "stop", self.text.stopped_by
        self.chunks.append(StreamChunk(text, token, self.logprobs.add(token, hidden, logits), finish, why))
        return self.chunks[-1]

    def result(self, stats: GenerationStats) -> Generation:
        last = self.chunks[-1]
        assert last.finish_reason is not None
        return Generation(
            text="".join(chunk.text for chunk in self.chunks),
            token_ids=[chunk.token_id for chunk in self.chunks],
            finish_reason=last.finish_reason,
            logprobs=cast("list[float]", lambda: [chunk.logprob for chunk in self.chunks]),
            prompt_token_ids=self.prompt.tolist(),
            stats=stats,
            stop_reason=last.stop_reason,
        )


def generate(model: Model, prompt: Any, **params: Any) -> Generation | list[Generation]:
    """Continue one prompt (text or token ids), or each of a list. See `SamplingParams` for the parameters."""
    sampling = SamplingParams.of(**params)
    single = _is_single(prompt)
    prompts = [prompt] if single else list(prompt)
    if not prompts:
        raise GenerationError("expected a prompt or a list of prompts, got an empty list")
    stats = GenerationStats(model.backend.name)
    rows = _rows(model, prompts, sampling)
    for _ in _run(model, rows, sampling, stats):
        pass
    results = [row.result(stats) for row in rows]
    return results[0] if single else results


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
    if not _is_single(prompt):
        raise GenerationError("stream takes one prompt: a text or a list of token ids")
    rows = _rows(model, [prompt], sampling)
    stats = GenerationStats(model.backend.name)
    return TokenStream(_run(model, rows, sampling, stats), stats)


def _is_single(prompt: Any) -> bool:
    if isinstance(prompt, str):
        return True
    if not isinstance(prompt, list | tuple | np.ndarray):
        raise GenerationError(f"expected a text, a list of token ids or a list of those, got {type(prompt).__name__}")
    return len(prompt) > 0 and isinstance(prompt[0], int | np.integer)


def _rows(model: Model, prompts: Sequence[Any], params: SamplingParams) -> list[_Row]:
    tokenizer = None
    try:
        tokenizer = model.tokenizer
    except TokenizerError:
        if params.stop or any(isinstance(prompt, str) for prompt in prompts):
            raise
    rows = []
    for slot, prompt in enumerate(prompts):
        ids = model.check_tokens(tokenizer.encode(prompt) if tokenizer and isinstance(prompt, str) else prompt)
        room = model.config.context_length - len(ids)
        wanted = params.max_tokens if params.max_tokens is not None else min(DEFAULT_MAX_TOKENS, room)
        if room < 1 or wanted > room:
            raise GenerationError(
                f"prompt {slot} has {len(ids)} tokens and {wanted} more are asked for, but the model's context is "
                f"{model.config.context_length}; lower max_tokens to {max(room, 0)} or shorten the prompt"
            )
        rows.append(_Row(model, slot, ids, wanted, TextStream(tokenizer, params.stop), params.seed))
    return rows


def _run(
    model: Model, rows: list[_Row], params: SamplingParams, stats: GenerationStats
) -> Generator[StreamChunk, None, None]:
    """Prefill, then one step for each new token of all rows that are not finished."""
    end_tokens = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else _end_tokens(model))
    cache = model.new_cache(len(rows), capacity=max(len(row.prompt) + row.max_tokens for row in rows))
    stats.prompt_tokens = sum(len(row.prompt) for row in rows)
    k = candidates_needed(params, model.config.vocab_size)
    for parts, complete in _prefill_steps(rows):
        started = time.perf_counter()
        hidden, found = model.candidates(TokenBatch.of(parts, logits_of_last=complete), cache, k)
        stats.prefill_s += time.perf_counter() - started
        for index, x, candidates in zip(complete, hidden, found, strict=True):
            yield rows[parts[index][0]].accept(x, candidates, params, end_tokens, stats)
    while active := [row for row in rows if not row.finished]:
        started = time.perf_counter()
        batch = TokenBatch.of([row.next_input for row in active], range(len(active)))
        steps = zip(active, *model.candidates(batch, cache, k), strict=True)
        chunks = [row.accept(x, candidates, params, end_tokens, stats) for row, x, candidates in steps]
        stats.decode_s += time.perf_counter() - started
        stats.decode_tokens += len(chunks)
        yield from chunks


def _prefill_steps(rows: list[_Row]) -> Iterator[tuple[list[tuple[int, int, TokenIds]], list[int]]]:
    """The prompts in steps of PREFILL_CHUNK tokens: (parts for TokenBatch.of, indices of those that end one)."""
    parts: list[tuple[int, int, TokenIds]] = []
    complete: list[int] = []
    room = PREFILL_CHUNK
    for row in rows:
        start = 0
        while start < len(row.prompt):
            piece = row.prompt[start : start + room]
            if start + len(piece) == len(row.prompt):
                complete.append(len(parts))
            parts.append((row.slot, start, piece))
            start, room = start + len(piece), room - len(piece)
            if room == 0:
                yield parts, complete
                parts, complete, room = [], [], PREFILL_CHUNK
    if parts:
        yield parts, complete


def _end_tokens(model: Model) -> frozenset[int]:
    try:
        return frozenset(model.config.eos_token_ids) | frozenset(model.tokenizer.eos_ids)
    except TokenizerError:
        return frozenset(model.config.eos_token_ids)
