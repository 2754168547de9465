"""One continuation: which logits it needs, which token it chooses, and whether that was the last one.

A `Request` is a prompt with its parameters and never changes. A `Continuation` is the text that grows from it. Its
tokens depend on its own logits only, not on the rest of the batch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from ..backends.backend import DrawRule, Ids
from ..backends.loaded import LoadedModel
from ..backends.run import TokenLogits
from ..errors import ContextOverflow, GenerationError, TokenizerError, count_of, describe
from ..families.lora import Adapter
from ..reference.cache import TokenIds
from ..reference.layers import Floats
from ..tokenizers.base import Tokenizer
from .constraints import Constraint
from .drafts import Drafts, LookupDrafts, ModelDrafts, StepTimes
from .overflow import ContextWindow, Spans, take
from .params import DEFAULT_MAX_TOKENS, Processor, SamplingParams
from .processors import BannedWords, Rules
from .results import Generation, GenerationStats, Overflow, StreamChunk
from .sampling import Logprobs, candidates_needed, choose, choose_among
from .streaming import TextStream
from .string_search import StringSearch

INITIAL_CAPACITY = 4096  # new tokens that a continuation's array holds before it grows
SEE_TRUNCATE = ", or see overflow='truncate'"  # which HTTP leaves out: it is a parameter of Python
NEEDS_TOKENIZER = ("stop", "bad_words", "filter", "guides", "echo")


class Request:
    """A prompt and its parameters, checked against the model. Raises GenerationError, TokenizerError."""

    def __init__(
        self, model: LoadedModel, prompt: str | TokenIds, params: SamplingParams, name: str = "the prompt"
    ) -> None:
        self.model, self.params = model, params
        self.adapter = model.find_adapter(params.adapter)
        required = isinstance(prompt, str) or any(getattr(params, each) for each in NEEDS_TOKENIZER)
        self.tokenizer = _tokenizer(model, required=required)
        ids = self.tokenizer.encode(prompt) if self.tokenizer and isinstance(prompt, str) else prompt
        self.window = ContextWindow.of(model, params)
        self.given: NDArray[np.int64] = model.check_tokens(cast("Sequence[int]", ids), any_length=True)
        self.max_tokens = self._max_tokens(name)
        bos = self.tokenizer.bos_id if self.tokenizer is not None else None
        front = int(bos is not None and self.given[0] == bos)
        self.kept = self.window.cut(len(self.given), self.max_tokens, front)  # by "truncate"
        self.prompt = take(self.given, self.kept)
        self.end_tokens = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else end_tokens(model))
        vocab_size = model.config.vocab_size
        for token in params.logit_bias:
            if token >= vocab_size:
                raise GenerationError(f"token id {token} is not in the vocabulary of {vocab_size}", field="logit_bias")
        needs_all = params.strategy is not None or params.num_beams > 1
        self.candidates_needed = None if needs_all else candidates_needed(params, vocab_size)
        top_k = params.top_k if params.top_k < vocab_size else 0
        self.draw_rule = DrawRule(params.temperature, top_k, params.top_p, params.min_p)
        words = params.bad_words
        self._banned = BannedWords.of(words, model.vocabulary.sorted, len(self.prompt)) if words else None
        self._stops = StringSearch(params.stop)
        filtered = () if callable(params.filter) else params.filter
        self._filtered = StringSearch([*filtered, *params.bad_words])
        guide = next(iter(params.guides.items()), None)
        after = params.guide_after
        self._constraint = Constraint(*guide, model.vocabulary, len(self.prompt), after) if guide else None

    def _max_tokens(self, name: str) -> int:
        policy, context = self.window.policy, self.window.size
        room = context - len(self.given)
        default = max(DEFAULT_MAX_TOKENS, self.params.min_tokens)
        limit = {"error": room, "truncate": max(room, context // 2)}.get(policy, default)
        asked = self.params.max_tokens
        wanted = min(default, limit) if asked is None else asked
        if policy == "error" and (room < 1 or wanted > room):
            size = count_of(len(self.given), "token")
            whose = "model" if self.params.window is None else "window"
            if room < 1:
                raise ContextOverflow(
                    f"{name} has {size}, and the {whose}'s context of {context} leaves no room for "
                    f"a new one; shorten it{SEE_TRUNCATE}",
                    mentions=["overflow='truncate'"],
                )
            raise ContextOverflow(
                f"{name} has {size} and max_tokens is {wanted}, but the {whose}'s context "
                f"is {context}; lower max_tokens to {room}, shorten the prompt{SEE_TRUNCATE}",
                mentions=["max_tokens", "max_tokens", "overflow='truncate'"],
            )
        return wanted

    @property
    def capacity(self) -> int:
        """Tokens that the cache has to hold."""
        total = len(self.prompt) + self.max_tokens
        return min(total, self.window.size) if self.window.moves else total

    def drafts(self) -> Drafts | None:
        """What guesses tokens for one continuation, with the parameter `speculate`.

        None where the cache cannot go back: a moving window, the states of layers without keys.
        """
        speculate, model = self.params.speculate, self.model
        if speculate is None or self.window.moves or model.config.has_states:
            return None
        if isinstance(speculate, str):
            return LookupDrafts()
        return ModelDrafts(model, speculate, self.capacity, self.params.adapter)

    def rules(self) -> tuple[Rules, Constraint | None]:
        """The processors for one continuation; and the constraint among them, which knows when the text is complete."""
        constraint = None if self._constraint is None else self._constraint.copy()
        banned = None if self._banned is None else self._banned.copy()
        text_rules: list[Processor] = [rule for rule in (banned, constraint) if rule is not None]
        ends = [token for token in self.end_tokens if token < self.model.config.vocab_size]
        return Rules.of(self.params, len(self.prompt), ends, text_rules), constraint

    def text_stream(self) -> TextStream:
        """A new converter of this request's tokens to text."""
        params = self.params
        return TextStream(
            self.tokenizer,
            self._stops,
            banned=self._filtered,
            refuses=params.filter if callable(params.filter) else None,
            stops_after=params.min_tokens,
            shown=params.shown_tokens,
        )

    def echo(self, text: TextStream) -> str:
        """The prompt's text with the parameter `echo`, else nothing."""
        return text.prime(self.given.tolist()) if self.params.echo else ""


class Continuation:
    """`slot`: its place in the cache. `choice`: which of the `n` of its request. `computed`: how many tokens of its
    `context` are in the cache now; `cached`: how many of the prompt were there at the start.

    The context is what the model sees: all of `ids` until tokens are dropped because the window is full. Then `accept`
    sets `computed` to 0, and the context has to be computed again, as a prompt, before the next token can be chosen.
    A `Stepper` passes these tokens through the model, whole or in pieces, and updates `computed`.
    """

    def __init__(self, request: Request, slot: int, choice: int = 0, stats: GenerationStats | None = None) -> None:
        """stats: of the call, which its rows share; None: of its own."""
        self.request, self.slot, self.choice, self.cached, self.computed = request, slot, choice, 0, 0
        self.stats = GenerationStats(request.model.backend.name) if stats is None else stats
        self.rules, self.constraint = request.rules()
        self.text = request.text_stream()
        self.echo = request.echo(self.text)
        self.drafts = request.drafts() if self.constraint is None else None
        self._is_plain = (
            request.params.strategy is None
            and request.params.typical_p == 1
            and request.params.logprobs is None  # they need all logits, at once
            and not self.rules.processors
            and not request.window.moves
        )
        self.logprobs = Logprobs(request.params.logprobs or 0)
        self._prompt_logprobs = Logprobs(request.params.prompt_logprobs or 0)
        self.scores = choice == 0 and request.params.prompt_logprobs is not None  # the prompt's tokens
        self.scored = 0  # tokens of the prompt whose next token has its log probability
        seed = request.params.seed
        self.rng = np.random.default_rng(seed if choice == 0 or seed is None else [seed, choice])
        self._uniforms = deque[float]()  # drawn beforehand, for its next tokens
        self.search: Any = None  # the `BeamSearch` of which it is a beam
        self.chunks: list[StreamChunk] = []
        self.length = len(request.prompt)  # of `ids`
        self._ids = np.empty(self.length + min(request.max_tokens, INITIAL_CAPACITY), dtype=np.int64)
        self._ids[: self.length] = request.prompt
        self._spans = request.window.keep(self.length)  # that the model sees; the last one grows with the text
        self._missing = self.length - _count(self._spans)  # tokens of `ids` that the model no longer sees
        self._dropped_some = self._missing > 0 or self.length < len(request.given)  # since the last chunk

    @property
    def adapter_digest(self) -> str:
        """What keys and values depend on beside the tokens; "" without an adapter."""
        return "" if self.request.adapter is None else self.request.adapter.digest

    @property
    def ids(self) -> NDArray[np.int64]:
        """The prompt and the generated tokens."""
        ids = self._ids[: self.length]
        ids.flags.writeable = False  # users' functions get this array
        return ids

    @property
    def context(self) -> NDArray[np.int64]:
        """The tokens that the model sees, at positions 0, 1, ... of its slot."""
        return take(self.ids, self._visible_spans()) if self._missing else self.ids

    def _visible_spans(self) -> Spans:
        return (*self._spans[:-1], (self._spans[-1][0], self.length))

    @property
    def context_tokens(self) -> int:
        return self.length - self._missing

    @property
    def behind(self) -> int:
        """Tokens of the context that are not in the cache: 1 while decoding."""
        return self.length - self._missing - self.computed

    @property
    def new_tokens(self) -> int:
        """How many tokens follow the prompt."""
        return self.length - len(self.request.prompt)

    def set_ids(self, ids: NDArray[np.int64]) -> None:
        """Make this another beam's text. ids: the prompt and the new tokens."""
        self._ids, self.length = ids, len(ids)

    @property
    def finished(self) -> bool:
        """Whether it takes part in no further step; a beam may do so again until its search is done."""
        if self.search is not None:
            return self.choice >= len(self.search.running)
        return bool(self.chunks) and self.chunks[-1].finish_reason is not None

    @property
    def tokens_left(self) -> int:
        """How many tokens may still come, by `max_tokens`."""
        return self.request.max_tokens - len(self.chunks)

    @property
    def newest(self) -> NDArray[np.int64]:
        """The last token, (1,)."""
        return self._ids[self.length - 1 : self.length]

    @property
    def decodes_plainly(self) -> bool:
        """Whether its next tokens follow from the logits of passes over the one before, `draw_rule` and numbers."""
        return self._is_plain and bool(self.chunks) and self.behind == 1

    def next_uniforms(self, count: int) -> list[float]:
        """The numbers from [0, 1) for its next tokens; zeros for greedy ones."""
        if self.request.params.temperature == 0:
            return [0.0] * count
        while len(self._uniforms) < count:
            self._uniforms.append(self.rng.random())
        return list(islice(self._uniforms, count))

    @property
    def may_guess(self) -> bool:
        """Whether it is time to ask for a draft."""
        return self.drafts is not None and self.length >= self.drafts.looks_at

    def guess(self, limit: int, times: StepTimes) -> NDArray[np.int64]:
        """At most `limit` draft tokens to verify in its next pass; none unless it decodes, with `speculate`."""
        if self.drafts is None or not self.chunks or self.behind != 1:
            return self.ids[:0]
        left = self.request.max_tokens - len(self.chunks) - 1  # after the token that this pass gives anyway
        return self.drafts.propose(self.ids, min(left, limit), times)

    def learn(self, drafted: int, accepted: int, lost: float | None = None) -> None:
        """See `Drafts.learn`."""
        if self.drafts is not None:
            self.drafts.learn(drafted, accepted, lost)

    def needs(self, drafted: NDArray[np.int64] | None = None) -> tuple[int | None, Ids]:
        """The logits that the next choice needs: the k largest (None: all), and those of the ids that rules change.

        drafted: tokens that are taken to follow before that choice.
        """
        k = self.request.candidates_needed
        if not self.rules.processors:
            return k, ()
        ids = self.ids if drafted is None or not len(drafted) else np.concatenate([self.ids, drafted])
        moved = self.rules.moved(ids)
        if k is None or moved is None:
            return None, ()
        ids = np.asarray(moved, dtype=np.int64) if len(moved) == 0 else np.asarray(moved)
        # A user's function may have named them, and other rows share the pass that takes them.
        if ids.dtype.kind not in "iu" or (
            ids.size and not 0 <= ids[0] <= ids[-1] < self.request.model.config.vocab_size
        ):
            raise GenerationError(f"expected token ids of `moves`, got {describe(ids.tolist())}", field="processors")
        return k + len(ids), ids

    def to_score(self, start: int, count: int) -> int:
        """How many of these tokens of the context show the log probability of a prompt token, for the first time."""
        if not self.scores:
            return 0
        return max(0, min(start + count, len(self.request.prompt) - 1) - max(start, self.scored))

    def score(self, logits: TokenLogits) -> None:
        """Note the log probability of the prompt's next token."""
        self.scored += 1
        self._prompt_logprobs.add(int(self._ids[self.scored]), logits, None)

    @property
    def prompt_logprobs(self) -> list[dict[int, float] | None] | None:
        """Of each prompt token, once computed: {token id: ln p} of the most likely ones, and its own. None unless
        it `scores`: of n continuations of one prompt that is computed once, the first."""
        if not self.scores:
            return None
        return [None, *(self._prompt_logprobs[index][1] for index in range(self.scored))]

    def accept(self, logits: TokenLogits) -> StreamChunk:
        """Choose the next token from its logits and decide whether it is the last."""
        token, whole = self._choose(logits)
        self.stats.generated_tokens += 1
        self.stats.screened_tokens += whole is None and logits.computed < logits.vocab_size
        text = self.text.push(token)
        asked = self.request.params.logprobs is not None
        logprob, top = self.logprobs.add(token, logits, whole if asked else None, asked)
        kept = None
        if self._dropped_some:
            kept = self.request.kept if len(self.request.prompt) < len(self.request.given) else self._visible_spans()
            self._dropped_some = False
        if self.length == len(self._ids):
            self._ids = np.concatenate([self._ids, np.empty_like(self._ids)])
        self._ids[self.length] = token
        finish, cause = self._end(token)
        if finish is not None:
            text += self.text.flush()
            if finish != "filtered" and not isinstance(cause, int):  # the flush may have completed a string
                finish, cause = self._end(token)
        chunk = StreamChunk(
            text if self.chunks else self.echo + text,
            *(token, logprob, finish, cause, top if asked else None),
            dropped_tokens=len(self.request.given) - len(self.request.prompt) + self._missing,
            kept=kept,
        )
        self.chunks.append(chunk)
        self.length += 1
        self._drop_oldest()
        return chunk

    def _drop_oldest(self) -> None:
        window, before = self.request.window, self.context_tokens
        if before <= window.size or not window.moves or self.finished:
            return
        self._spans = window.keep(self.length)
        self._missing = self.length - _count(self._spans)
        self._dropped_some, self.computed = True, 0
        self.stats.dropped_tokens += before - self.context_tokens
        self.stats.recomputed_tokens += self.context_tokens - 1

    def _choose(self, logits: TokenLogits) -> tuple[int, Floats | None]:
        """-> the token, and all of the model's own logits if they were computed"""
        params = self.request.params
        self.stats.head_rows += logits.computed
        if logits.is_choice:
            if self._uniforms:
                self._uniforms.popleft()
            return int(logits.ids[0]), None
        whole = logits.values if logits.complete else None
        values = self.rules.apply_among(self.ids, logits) if self.rules.processors else logits.values
        if params.strategy is not None:
            token = params.strategy(self.ids, values, self.rng)
            if isinstance(token, bool) or not isinstance(token, int | np.integer) or not 0 <= token < len(values):
                raise GenerationError(
                    f"expected a token id below {len(values)}, got {describe(token)}", field="strategy"
                )
            return int(token), whole
        uniform = 0.0
        if params.temperature > 0:
            uniform = self._uniforms.popleft() if self._uniforms else self.rng.random()
        chosen = choose_among(logits, params, uniform, values, self.request.model.backend.draw)
        if chosen is None:  # the bounds do not determine it
            whole = logits.all()
            self.stats.head_rows += len(whole)
            chosen = choose(self.rules.apply(self.ids, whole), params, uniform)
        return chosen, whole

    def _end(self, token: int) -> tuple[str | None, str | int | None]:
        """The finish reason and its cause, after `token` was written to `_ids` but before its chunk is added."""
        if self.text.filtered:
            return "filtered", self.text.banned.found
        if token in self.request.end_tokens:
            return "stop", token
        if (stop := self.text.stops.found) is not None:
            return "stop", stop
        if self.constraint is not None and self.constraint.complete(self._ids[: self.length + 1]):
            return "stop", None
        return ("length", None) if len(self.chunks) + 1 == self.request.max_tokens else (None, None)

    def result(self) -> Generation:
        last, tops = self.chunks[-1], lambda: [chunk.top_logprobs for chunk in self.chunks]
        assert last.finish_reason is not None
        return Generation(
            text="".join(chunk.text for chunk in self.chunks),
            token_ids=[chunk.token_id for chunk in self.chunks],
            finish_reason=last.finish_reason,
            logprobs=cast("list[float]", lambda: [chunk.logprob for chunk in self.chunks]),  # computed when read
            prompt_token_ids=self.request.given.tolist(),
            stats=self.stats,
            stop_reason=last.stop_reason,
            top_logprobs=None if self.request.params.logprobs is None else cast("list[dict[int, float]]", tops),
            prompt_logprobs=cast("list[dict[int, float] | None]", lambda: self.prompt_logprobs),
            overflows=Overflow.of(self.chunks),
        )


def adapters_of(rows: Iterable[Continuation]) -> dict[int, Adapter]:
    """The adapters of the rows that have one, by their slots."""
    return {row.slot: row.request.adapter for row in rows if row.request.adapter is not None}


def _count(spans: Spans) -> int:
    return sum(stop - start for start, stop in spans)


def end_tokens(model: LoadedModel) -> frozenset[int]:
    """The end tokens of the model's config and its tokenizer."""
    tokenizer = _tokenizer(model, required=False)
    return frozenset(model.config.eos_token_ids) | frozenset(() if tokenizer is None else tokenizer.eos_ids)


def _tokenizer(model: LoadedModel, *, required: bool) -> Tokenizer | None:
    try:
        return model.tokenizer
    except TokenizerError:
        if required:
            raise
        return None
