"""The results of generation: a chunk for each token, a `Generation` for each prompt, and the statistics of the call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any, TypeVar

from ..backends.paged_cache import EngineKVCache
from ..errors import count_of
from .overflow import Spans

SHOWN_CHARACTERS = 60  # of a text in a repr
SHOWN_HTML_CHARACTERS = 2000

T = TypeVar("T")


def lazy_fields(*names: str) -> Callable[[type[T]], type[T]]:
    """A decorator of dataclasses: these fields may be set to functions of no arguments, which the first read calls.

    Comparing, printing, copying and pickling read them.
    """

    def lazy(name: str) -> property:
        def read(self: object) -> Any:
            value = vars(self)[name]
            if callable(value):
                value = vars(self)[name] = value()
            return value

        def write(self: object, value: Any) -> None:
            self.__dict__[name] = value

        return property(read, write, doc="See the class.")

    def decorate(cls: type[T]) -> type[T]:
        for name in names:
            setattr(cls, name, lazy(name))
        cls.__getstate__ = lambda self: {name: getattr(self, name) for name in vars(self)}  # type: ignore[method-assign]
        return cls

    return decorate


@lazy_fields("logprob", "top_logprobs")
@dataclass(frozen=True, init=False, repr=False)
class StreamChunk:
    """One new token. `text` is the text that became certain with it: often a word, sometimes nothing.

    `logprob` is the natural logarithm of the token's probability in the model's own distribution. `top_logprobs` is
    {token id: ln p} of the k most likely tokens (`logprobs=k`), most likely first, and the chosen one. Where the head
    did not compute all logits, the first read computes them.
    """

    text: str
    token_id: int
    logprob: float
    finish_reason: str | None = None  # "stop", "length" or "filtered" on the last chunk
    stop_reason: str | int | None = None  # the stop string, end token or filtered string that ended the text
    top_logprobs: dict[int, float] | None = None
    dropped_tokens: int = 0  # earlier tokens that the model no longer sees
    kept: Spans | None = None  # set where tokens were dropped just before this one: those that the model still saw

    def __init__(
        self,
        text: str,
        token_id: int,
        logprob: float,
        finish_reason: str | None = None,
        stop_reason: str | int | None = None,
        top_logprobs: dict[int, float] | None = None,
        dropped_tokens: int = 0,
        kept: Spans | None = None,
    ) -> None:
        # A frozen dataclass's own sets the fields one by one, which takes three times as long for every token.
        fields = {"text": text, "token_id": token_id, "logprob": logprob, "finish_reason": finish_reason}
        fields |= {"stop_reason": stop_reason, "top_logprobs": top_logprobs}
        vars(self).update(fields, dropped_tokens=dropped_tokens, kept=kept)

    def __repr__(self) -> str:
        finish = "" if self.finish_reason is None else f", finish_reason={self.finish_reason!r}"
        return f"StreamChunk({_shorten(self.text)!r}, token_id={self.token_id}, logprob={self.logprob:.4g}{finish})"


@dataclass(frozen=True)
class Overflow:
    """From new token `at` on the model saw only `kept` of the earlier tokens, and all later ones.

    kept: (start, stop) of tokens, counted from the beginning of the prompt.
    """

    at: int
    kept: Spans

    @classmethod
    def of(cls, chunks: Sequence[StreamChunk]) -> list[Overflow]:
        """One for each chunk before which tokens were dropped."""
        return [cls(at, chunk.kept) for at, chunk in enumerate(chunks) if chunk.kept is not None]


@dataclass(repr=False)
class GenerationStats:
    """Counts and times of one call, all rows together."""

    backend: str
    prompt_tokens: int = 0
    cached_tokens: int = 0  # prompt tokens whose keys and values were in the cache already
    generated_tokens: int = 0
    prefill_s: float = 0.0
    decode_s: float = 0.0  # from the first new token to the last
    decode_tokens: int = 0  # new tokens that took a step of their own: all but the first of each row
    drafted_tokens: int = 0  # guessed, with `speculate`
    accepted_tokens: int = 0  # of them, those that became text: each saved a step
    screened_tokens: int = 0  # new tokens chosen without computing all logits
    dropped_tokens: int = 0  # by `overflow`
    recomputed_tokens: int = 0  # kept by `overflow`, but computed again
    dropped_messages: int = 0  # of a chat
    cache_dtype: str = "float32"  # of keys and values
    cache_bytes_per_token: int = 0
    head_rows: int = 0  # logits computed to choose all tokens

    def describe(self, cache: EngineKVCache) -> None:
        """Note the cache's dtype and bytes per token."""
        self.cache_dtype, self.cache_bytes_per_token = cache.dtype.name, cache.bytes_per_token

    @property
    def prompt_tokens_per_s(self) -> float:
        """Prompt tokens that were computed, not those that the cache had, per second of prefill."""
        return (self.prompt_tokens - self.cached_tokens) / self.prefill_s if self.prefill_s else 0.0

    @property
    def generated_tokens_per_s(self) -> float:
        """New tokens, all but the first of each row, per second of decoding."""
        return self.decode_tokens / self.decode_s if self.decode_s else 0.0

    def __repr__(self) -> str:
        prompt = count_of(self.prompt_tokens, "prompt token")
        return (
            f"<GenerationStats {self.backend}: {prompt} at {self.prompt_tokens_per_s:.1f} tok/s, "
            f"{self.generated_tokens} new at {self.generated_tokens_per_s:.1f} tok/s>"
        )


@lazy_fields("logprobs", "top_logprobs", "prompt_logprobs")
@dataclass(frozen=True, repr=False)
class Generation:
    """The continuation of one prompt: `text` and `token_ids`, without the prompt (but see `echo`).

    `token_ids` includes an end token; `text` has no end token, no stop string and nothing that was filtered.
    `logprobs` are the natural logarithms of the chosen tokens' probabilities in the model's own distribution, and
    `top_logprobs` those of the most likely tokens at each position, with `logprobs=k`; see `StreamChunk`.
    `prompt_logprobs` are the same for the tokens of the prompt, with `prompt_logprobs=k`; None for the first.
    """

    text: str
    token_ids: list[int]
    finish_reason: str
    logprobs: list[float]
    prompt_token_ids: list[int]
    stats: GenerationStats
    stop_reason: str | int | None = None
    top_logprobs: list[dict[int, float]] | None = None
    prompt_logprobs: list[dict[int, float] | None] | None = None
    score: float | None = None  # of a beam: its log probability with the length penalty
    overflows: list[Overflow] = field(default_factory=list)  # where `overflow` dropped tokens

    @property
    def dropped_tokens(self) -> int:
        """Tokens of the prompt and the text that the model did not see when it chose the last one."""
        if not self.overflows:
            return 0
        kept = self.overflows[-1].kept
        return kept[-1][1] - sum(stop - start for start, stop in kept)

    def _summary(self) -> str:
        return f"{count_of(len(self.token_ids), 'token')}, finish_reason {self.finish_reason!r}"

    def __repr__(self) -> str:
        return f"<Generation {_shorten(self.text)!r}: {self._summary()}>"

    def _repr_html_(self) -> str:
        text = escape(_shorten(self.text, SHOWN_HTML_CHARACTERS))
        style = (
            "white-space: pre-wrap; overflow-wrap: anywhere; unicode-bidi: plaintext"  # each line by its own direction
        )
        return f'<div style="{style}">{text}</div><small>{escape(self._summary())}</small>'


def _shorten(text: str, limit: int = SHOWN_CHARACTERS) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…"
