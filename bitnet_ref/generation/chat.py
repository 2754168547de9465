"""A conversation that keeps its cache: what the last turns had in common with the next one is not computed again."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..errors import GenerationError
from ..kv_cache import KVCache
from .generate import TokenStream, check_streamable, run
from .params import SamplingParams
from .results import Generation, GenerationStats, StreamChunk
from .sequence import Continuation, Request

if TYPE_CHECKING:
    from ..api import Model

DEFAULT_REPLY_TOKENS = 512


class PrefixCache:
    """The keys and values of one token sequence, of which a later one uses as much as it begins with."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._cache: KVCache | None = None
        self._ids: NDArray[np.int64] = np.empty(0, dtype=np.int64)

    def take(self, prompt: NDArray[np.int64], capacity: int) -> tuple[KVCache, int]:
        """A cache for so many tokens, and how many tokens of the prompt it holds. At least the last one is not counted:
        it has to be computed, for its logits. Until `keep` the rest is as good as gone."""
        shorter = min(len(self._ids), len(prompt) - 1)
        same = int(np.argmin(np.append(self._ids[:shorter] == prompt[:shorter], False)))
        if self._cache is None or self._cache.capacity < capacity:
            larger = max(capacity, 0 if self._cache is None else 2 * self._cache.capacity)
            cache = self._model.new_cache(1, min(larger, max(capacity, self._model.config.context_length)))
            if self._cache is not None:
                cache.take_over(self._cache, same)
            self._cache = cache
        self._ids = prompt[:same]
        return self._cache, same

    def keep(self, ids: NDArray[np.int64]) -> None:
        """The cache holds these now."""
        self._ids = ids.copy()

    def clear(self) -> None:
        self._cache, self._ids = None, self._ids[:0]


class ChatSession:
    """A conversation with a model, by its own chat template. One reply at a time.

        session = model.chat(system="Be brief.", temperature=0.7)
        print(session.send("Hello").text)
        for chunk in session.stream("Tell me more"): ...

    params: of `SamplingParams`, for all replies; `send` and `stream` take others for one. `max_tokens` is 512 or what
    fits, unless given. The replies are those that the whole conversation as one prompt gives, token for token.
    `messages` is the history, which may be changed. Raises GenerationError.
    """

    how_to_reset = "reset() starts a new one"  # for messages

    def __init__(self, model: Model, system: str | None = None, **params: Any) -> None:
        self.model, self.params = model, params
        check_streamable(SamplingParams.of(**params))
        if model.tokenizer.chat_template is None:
            raise GenerationError(
                "this model has no chat template: it is a base model, which continues texts and was not trained to "
                'hold a conversation. Use: bitnet-ref generate "..."'
            )
        self.opening = [{"role": "system", "content": system}] if system else []
        self._prefix = PrefixCache(model)
        self._stream: TokenStream | None = None
        self.reset()

    def reset(self) -> None:
        """Forget the conversation, and free its cache. The system text stays."""
        if self._stream is not None:
            self._stream.close()
        self.messages = list(self.opening)
        self._prefix.clear()

    def prompt(self, content: str) -> list[int]:
        """Token ids of the conversation with this message, ready for the reply."""
        return self.model.tokenizer.apply_chat_template(self._with(content), tokenize=True)

    def send(self, content: str, **params: Any) -> Generation:
        """Say this and wait for the reply. An error leaves the history as it was."""
        row, stream = self._reply(content, params)
        for _ in stream:
            pass
        return row.result(stream.stats)

    def stream(self, content: str, **params: Any) -> TokenStream:
        """The reply as it comes. Closing the stream ends it, and what was said stays in the history; an error, or an
        end before the first word, leaves the history as it was. The next `send`, `stream` or `reset` closes it too."""
        return self._reply(content, params)[1]

    @property
    def full(self) -> bool:
        """Whether no further message can be answered."""
        used = len(self.model.tokenizer.apply_chat_template(self.messages, tokenize=True)) if self.messages else 0
        return used >= self.model.config.context_length

    def _with(self, content: str) -> list[dict[str, str]]:
        return [*self.messages, {"role": "user", "content": content}]

    def _reply(self, content: str, params: dict[str, Any]) -> tuple[Continuation, TokenStream]:
        if self._stream is not None:
            self._stream.close()
        sampling = SamplingParams.of(**{**self.params, **params})
        check_streamable(sampling)
        ids, context = self.prompt(content), self.model.config.context_length
        if (room := context - len(ids)) < 1:
            began = len(self.messages) > len(self.opening)
            raise GenerationError(
                f"the conversation has {len(ids)} tokens and the model's context is {context}; "
                + (self.how_to_reset if began else "shorten the message")
            )
        wanted = DEFAULT_REPLY_TOKENS if sampling.max_tokens is None else sampling.max_tokens
        sampling = replace(sampling, max_tokens=min(room, max(wanted, sampling.min_tokens)))
        row = Continuation(Request(self.model, ids, sampling), slot=0)
        stats = GenerationStats(self.model.backend.name)
        self._stream = TokenStream(self._chunks(row, self._with(content), stats), stats)
        return row, self._stream

    def _chunks(
        self, row: Continuation, messages: list[dict[str, str]], stats: GenerationStats
    ) -> Generator[StreamChunk, None, None]:
        cache, same = self._prefix.take(row.request.prompt, row.request.capacity)
        row.cached = row.computed = same
        said = False
        try:
            yield from run(self.model, [[row]], stats, cache)
            said = True
        except (GeneratorExit, KeyboardInterrupt):
            said = any(chunk.text for chunk in row.chunks)
            raise
        finally:
            self._prefix.keep(row.ids[: row.computed])
            if said:
                text = "".join(chunk.text for chunk in row.chunks)
                self.messages = [*messages, {"role": "assistant", "content": text}]
