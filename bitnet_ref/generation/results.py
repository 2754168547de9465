"""What generation gives: a chunk for each token, the whole for each prompt, and the figures of the call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ..reference.cache import KVCache
from .logprobs import lazy_fields
from .overflow import Spans


@lazy_fields("logprob", "top_logprobs")
@dataclass(frozen=True)
class StreamChunk:
    """One new token. `text` is what became certain with it: often a word, sometimes nothing.

    `logprob` is the natural logarithm of the token's probability in the model's own distribution. `top_logprobs` is
    {token id: ln p} of the likeliest (as many as `logprobs` asks for, most likely first) and the chosen one. Both are
    computed when they are first read, for all tokens so far, unless they were asked for and all logits were at hand.
    """

    text: str
    token_id: int
    logprob: float
    finish_reason: str | None = None  # "stop", "length" or "filtered" on the last chunk
    stop_reason: str | int | None = None  # the stop string, the end token or the banned string, where there was one
    top_logprobs: dict[int, float] | None = None
    dropped_tokens: int = 0  # of the prompt and the text before it, which the model did not see any more
    kept: Spans | None = None  # where some were dropped just before it: what it saw, as (start, stop) of tokens


@dataclass(frozen=True)
class Overflow:
    """From new token `at` on the model saw only `kept` of what had been there before, and what came after it.

    kept: (start, stop) of tokens, counted from the beginning of the prompt and on into the text.
    """

    at: int
    kept: Spans

    @classmethod
    def of(cls, chunks: Sequence[StreamChunk]) -> list[Overflow]:
        return [cls(at, chunk.kept) for at, chunk in enumerate(chunks) if chunk.kept is not None]


@dataclass
class GenerationStats:
    """Times of one call, all rows together."""

    backend: str
    prompt_tokens: int = 0
    cached_tokens: int = 0  # of the prompt, whose keys and values were there already
    generated_tokens: int = 0
    prefill_s: float = 0.0
    decode_s: float = 0.0  # from the first new token to the last
    decode_tokens: int = 0  # new tokens that took a step of their own: all but each row's first
    screened_tokens: int = 0  # new tokens that were chosen among a few logits, by certain bounds on all others
    dropped_tokens: int = 0  # by `overflow`
    recomputed_tokens: int = 0  # that stayed, and had been in the cache already
    dropped_messages: int = 0  # of a chat
    cache_dtype: str = "float32"  # how keys and values were kept
    cache_bytes_per_token: int = 0
    head_rows: int = 0  # logits computed to choose all tokens; the whole vocabulary for each that is not screened

    def describe(self, cache: KVCache) -> None:
        """What the keys and values of this call are kept in."""
        self.cache_dtype, self.cache_bytes_per_token = cache.dtype.name, cache.bytes_per_token

    @property
    def prompt_tokens_per_s(self) -> float:
        return (self.prompt_tokens - self.cached_tokens) / self.prefill_s if self.prefill_s else 0.0

    @property
    def generated_tokens_per_s(self) -> float:
        return self.decode_tokens / self.decode_s if self.decode_s else 0.0


@lazy_fields("logprobs", "top_logprobs")
@dataclass(frozen=True)
class Generation:
    """What became of one prompt. `text` and `token_ids` are the continuation, without the prompt (but see `echo`).

    `token_ids` holds the end token if there was one; `text` holds no end token, no stop string and nothing that was
    filtered. `logprobs` are the natural logarithms of the chosen tokens' probabilities in the model's own distribution
    (see `StreamChunk`), and `top_logprobs` those of the likeliest tokens at each place, where they were asked for.
    """

    text: str
    token_ids: list[int]
    finish_reason: str
    logprobs: list[float]
    prompt_token_ids: list[int]
    stats: GenerationStats = field(repr=False)
    stop_reason: str | int | None = None
    top_logprobs: list[dict[int, float]] | None = None
    score: float | None = None  # of beam search: what the beams were compared by
    overflows: list[Overflow] = field(default_factory=list)  # what was dropped by `overflow`, and where

    @property
    def dropped_tokens(self) -> int:
        """Tokens of the prompt and the text that the model did not see when it chose the last one."""
        if not self.overflows:
            return 0
        kept = self.overflows[-1].kept
        return kept[-1][1] - sum(stop - start for start, stop in kept)
