"""One continuation on its way: which logits it needs, which token it takes of them, and whether that was the last.

A `Request` is a prompt with its parameters, and never changes. A `Continuation` is what grows from it. Neither knows of
the others in a batch: what comes of it depends on its own logits only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, cast

import numpy as np
from numpy.typing import NDArray

from ..backends import HeadCandidates, HeadNeed
from ..errors import GenerationError, TokenizerError
from ..reference.cache import TokenIds
from .banned import BannedWords
from .constraints import Constraint
from .logprobs import Logprobs
from .overflow import ContextWindow, Spans, take
from .params import DEFAULT_MAX_TOKENS, Processor, SamplingParams
from .processors import Rules
from .results import Generation, GenerationStats, Overflow, StreamChunk
from .sampling import candidates_needed, choose, choose_among
from .streaming import TextStream

if TYPE_CHECKING:
    from ..api import Model
    from ..tokenizers import Tokenizer

IDS_AT_FIRST = 4096  # tokens of a text that there is room for before its array grows
NEEDS_TEXT = ("stop", "bad_words", "filter", "guides", "echo")


class Request:
    """A prompt and its parameters, checked against the model. Raises GenerationError, TokenizerError."""

    def __init__(self, model: Model, prompt: str | TokenIds, params: SamplingParams, name: str = "the prompt") -> None:
        self.model, self.params = model, params
        self.tokenizer = _tokenizer(
            model, required=isinstance(prompt, str) or any(getattr(params, x) for x in NEEDS_TEXT)
        )
        ids = self.tokenizer.encode(prompt) if self.tokenizer and isinstance(prompt, str) else prompt
        self.window = ContextWindow.of(model, params)
        self.given: NDArray[np.int64] = model.check_tokens(
            cast("Sequence[int]", ids), any_length=self.window.policy != "error"
        )
        self.max_tokens = self._length(name)
        bos = self.tokenizer.bos_id if self.tokenizer is not None else None
        front = int(bos is not None and self.given[0] == bos)
        self.kept = self.window.cut(len(self.given), self.max_tokens, front)  # by "truncate"
        self.prompt = take(self.given, self.kept)
        self.end_tokens = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else end_tokens(model))
        for token in params.logit_bias:
            if token >= model.config.vocab_size:
                raise GenerationError(
                    f"logit_bias: token id {token} is not in the vocabulary of {model.config.vocab_size}"
                )
        everything = params.strategy is not None
        self.candidates_needed = None if everything else candidates_needed(params, model.config.vocab_size)
        self._banned = (
            BannedWords(params.bad_words, model.vocabulary.sorted, len(self.prompt)) if params.bad_words else None
        )
        guide = next(iter(params.guides.items()), None)
        self._constraint = Constraint(*guide, model.vocabulary, len(self.prompt)) if guide else None

    def _length(self, name: str) -> int:
        """New tokens at most."""
        asked, context = self.params.max_tokens, self.window.size
        if self.window.moves:
            return DEFAULT_MAX_TOKENS if asked is None else asked
        room = context - len(self.given)
        if self.window.policy == "truncate":
            return min(DEFAULT_MAX_TOKENS, max(room, context // 2)) if asked is None else asked
        wanted = min(DEFAULT_MAX_TOKENS, room) if asked is None else asked
        if room < 1 or wanted > room:
            raise GenerationError(
                f"{name} has {len(self.given)} tokens and {wanted} more are asked for, but the "
                f"{'model' if self.params.window is None else 'window'}'s context is {context}; lower max_tokens to "
                f'{max(room, 0)}, shorten the prompt, or see overflow="truncate"'
            )
        return wanted

    @property
    def overflows(self) -> list[Overflow]:
        """What "truncate" cut of the prompt."""
        return [Overflow(0, self.kept)] if len(self.prompt) < len(self.given) else []

    @property
    def capacity(self) -> int:
        """Tokens that the cache has to hold."""
        whole = len(self.prompt) + self.max_tokens
        return min(whole, self.window.size) if self.window.moves else whole

    def rules(self) -> tuple[Rules, Constraint | None]:
        """The processors for one continuation; and of them the one, if any, that knows when the text is complete."""
        constraint = None if self._constraint is None else self._constraint.fresh()
        more: list[Processor] = [rule for rule in (self._banned, constraint) if rule is not None]
        ends = [token for token in self.end_tokens if token < self.model.config.vocab_size]
        return Rules.of(self.params, len(self.prompt), ends, more), constraint

    def text(self) -> TextStream:
        """The way of this request's tokens to text."""
        params, words = self.params, self.params.filter
        return TextStream(
            self.tokenizer,
            params.stop,
            banned=params.bad_words if callable(words) else (*words, *params.bad_words),
            refuses=words if callable(words) else None,
            stops_after=params.min_tokens,
        )

    def opening(self, text: TextStream) -> str:
        """What the text begins with: the prompt, with `echo`."""
        return text.prime(self.given.tolist()) if self.params.echo else ""


class Continuation:
    """`slot`: its place in the cache. `choice`: which of the `n` of its request. `cached`: how many tokens of the
    prompt are in the cache to begin with; `computed`: how many tokens of its `context` are there now.

    The context is what the model is to see: all of `ids`, until tokens are dropped because the window is full. Then
    `accept` leaves `computed` at 0, and the context has to be computed from its beginning, as a prompt, before the next
    token can be chosen. Whoever runs the model feeds `next_input`, whole or in pieces, and counts it in `computed`.
    """

    def __init__(self, request: Request, slot: int, choice: int = 0, cached: int = 0) -> None:
        self.request, self.slot, self.cached, self.computed = request, slot, cached, cached
        self.rules, self.constraint = request.rules()
        self.text = request.text()
        self.opening = request.opening(self.text)
        self.logprobs = Logprobs(request.model.head_logits, request.params.logprobs or 0)
        seed = request.params.seed
        self.rng = np.random.default_rng(seed if choice == 0 or seed is None else [seed, choice])
        self.chunks: list[StreamChunk] = []
        self.known = len(request.prompt)  # tokens of `ids`
        self._ids = np.empty(len(request.prompt) + min(request.max_tokens, IDS_AT_FIRST), dtype=np.int64)
        self._ids[: len(request.prompt)] = request.prompt
        self._keep(len(request.prompt))
        self._moved = self._missing > 0 or len(request.prompt) < len(request.given)

    @property
    def ids(self) -> NDArray[np.int64]:
        """The prompt and what came of it so far."""
        ids = self._ids[: self.known]
        ids.flags.writeable = False  # users' functions see it
        return ids

    @property
    def context(self) -> NDArray[np.int64]:
        """The tokens that the model is to see: positions 0, 1, ... of its slot."""
        ids = self._ids[: self.known]
        return take(ids, (*self._kept[:-1], (self._kept[-1][0], len(ids)))) if self._missing else ids

    @property
    def context_tokens(self) -> int:
        """How many those are."""
        return self.known - self._missing

    @property
    def finished(self) -> bool:
        return bool(self.chunks) and self.chunks[-1].finish_reason is not None

    @property
    def next_input(self) -> tuple[int, int, NDArray[np.int64]]:
        """(slot, position, tokens) of what the model has not seen yet: the newest token; or the prompt, or after some
        were dropped the context, from its first token on that is not in the cache."""
        return self.slot, self.computed, self.context[self.computed :]

    def needs(self) -> HeadNeed:
        """What the choice of the next token needs of its logits."""
        k = self.request.candidates_needed
        if k is None or not self.rules.processors:
            return HeadNeed(k)
        moved = self.rules.moved(self.ids)
        return HeadNeed() if moved is None else HeadNeed(k + len(moved), moved)

    def accept(self, hidden: NDArray, found: HeadCandidates, stats: GenerationStats) -> StreamChunk:
        """Choose a token from the logits found for it and decide whether it is the last.   hidden (D,): the head's x"""
        token, logits = self._choose(hidden, found, stats)
        stats.generated_tokens += 1
        stats.screened_tokens += logits is None
        text = self.text.push(token)
        asked = self.request.params.logprobs is not None
        logprob, top = self.logprobs.add(token, hidden, logits if asked else None)
        kept = self._news()
        self._append(token)
        finish, why = self._end(token)
        if finish is not None:
            text += self.text.flush()
            if finish != "filtered" and not isinstance(why, int):  # the flush may have completed a string
                finish, why = self._end(token)
        if not self.chunks:
            text = self.opening + text
        chunk = StreamChunk(
            *(text, token, logprob, finish, why, top if asked else None),
            dropped_tokens=len(self.request.given) - len(self.request.prompt) + self._missing,
            kept=kept,
        )
        self.chunks.append(chunk)
        self.known += 1
        self._make_room(stats)
        return chunk

    def _append(self, token: int) -> None:
        if self.known == len(self._ids):
            self._ids = np.concatenate([self._ids, np.empty_like(self._ids)])
        self._ids[self.known] = token

    def _keep(self, length: int) -> None:
        """Of so many tokens the model goes on with those that the window keeps."""
        self._kept = self.request.window.keep(length)  # the last span goes on to the newest token
        self._missing = length - sum(stop - start for start, stop in self._kept)

    def _news(self) -> Spans | None:
        """What the model sees of the tokens given and new, once when that has changed."""
        if not self._moved:
            return None
        self._moved = False
        if len(self.request.prompt) < len(self.request.given):
            return self.request.kept
        return (*self._kept[:-1], (self._kept[-1][0], self.known))

    def _make_room(self, stats: GenerationStats) -> None:
        """Where the newest token does not fit the window any more, drop the oldest."""
        window, before = self.request.window, self.context_tokens
        if before <= window.size or not window.moves or self.finished:
            return
        self._keep(self.known)
        self._moved, self.computed = True, 0
        stats.dropped_tokens += before - self.context_tokens
        stats.recomputed_tokens += self.context_tokens - 1

    def _choose(self, hidden: NDArray, found: HeadCandidates, stats: GenerationStats) -> tuple[int, NDArray | None]:
        """-> the token, and the model's own logits if all of them were computed"""
        params = self.request.params
        logits = found.logits if found.complete else None
        stats.head_rows += len(found.ids)
        if params.strategy is not None:
            assert logits is not None
            token = params.strategy(self.ids, self.rules.apply(self.ids, logits), self.rng)
            if isinstance(token, bool) or not isinstance(token, int | np.integer) or not 0 <= token < len(logits):
                raise GenerationError(f"strategy: expected a token id below {len(logits)}, got {token!r:.80}")
            return int(token), logits
        uniform = self.rng.random() if params.temperature > 0 else 0.0
        among = self.rules.apply_among(self.ids, found) if self.rules.processors else found
        chosen = choose_among(among, params, uniform) if logits is None else choose(among.logits, params, uniform)
        if chosen is None:  # the bounds leave it open
            logits = self.request.model.head_logits(hidden[None])[0]
            stats.head_rows += len(logits)
            chosen = choose(self.rules.apply(self.ids, logits), params, uniform)
        return chosen, logits

    def _end(self, token: int) -> tuple[str | None, str | int | None]:
        """The finish reason and its cause, with `token` the newest and not yet among the chunks."""
        if self.text.filtered:
            return "filtered", self.text.banned_by
        if token in self.request.end_tokens:
            return "stop", token
        if self.text.stopped_by is not None:
            return "stop", self.text.stopped_by
        count = len(self.chunks) + 1
        if self.constraint is not None and self.constraint.complete(self._ids[: self.known + 1]):
            return "stop", None
        return ("length", None) if count == self.request.max_tokens else (None, None)

    def result(self, stats: GenerationStats) -> Generation:
        """What has become of it; not before it is finished."""
        last = self.chunks[-1]
        assert last.finish_reason is not None
        tops = lambda: [chunk.top_logprobs for chunk in self.chunks]  # noqa: E731
        return Generation(
            text="".join(chunk.text for chunk in self.chunks),
            token_ids=[chunk.token_id for chunk in self.chunks],
            finish_reason=last.finish_reason,
            logprobs=cast("list[float]", lambda: [chunk.logprob for chunk in self.chunks]),
            prompt_token_ids=self.request.given.tolist(),
            stats=stats,
            stop_reason=last.stop_reason,
            top_logprobs=cast("list[dict[int, float]]", tops) if self.request.params.logprobs is not None else None,
            overflows=Overflow.of(self.chunks),
        )


def prefill_steps(
    inputs: Sequence[tuple[int, int, NDArray[np.int64]]], tokens: int
) -> Iterator[tuple[list[tuple[int, int, TokenIds]], list[tuple[int, int]]]]:
    """What the model is to see in steps of some tokens at most, which bounds the memory of a long prompt.

    inputs: (slot, position of the first, token ids). Each step is (parts for TokenBatch.of, (part, input) of those that
    end an input).
    """
    parts: list[tuple[int, int, TokenIds]] = []
    complete: list[tuple[int, int]] = []
    room = tokens
    for number, (slot, start, ids) in enumerate(inputs):
        done = 0
        while done < len(ids):
            piece = ids[done : done + room]
            if done + len(piece) == len(ids):
                complete.append((len(parts), number))
            parts.append((slot, start + done, piece))
            done, room = done + len(piece), room - len(piece)
            if room == 0:
                yield parts, complete
                parts, complete, room = [], [], tokens
    if parts:
        yield parts, complete


def end_tokens(model: Model) -> frozenset[int]:
    """Every token that ends a text, by the model's config or its tokenizer."""
    tokenizer = _tokenizer(model, required=False)
    return frozenset(model.config.eos_token_ids) | frozenset(tokenizer.eos_ids if tokenizer is not None else ())


def _tokenizer(model: Model, *, required: bool) -> Tokenizer | None:
    try:
        return model.tokenizer
    except TokenizerError:
        if required:
            raise
        return None
