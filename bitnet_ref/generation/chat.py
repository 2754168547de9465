"""A conversation that keeps its KV cache: only the tokens that are new in a turn are computed."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import replace
from typing import Unpack

import numpy as np
from numpy.typing import NDArray

from ..backends.loaded import LoadedModel
from ..backends.paged_cache import EngineKVCache
from ..errors import ContextOverflow, GenerationError
from .generate import TokenStream, check_streamable, generate_chunks
from .overflow import ContextWindow
from .params import SamplingOptions, SamplingParams, expand_params
from .results import Generation, StreamChunk
from .sequence import Continuation, Request

DEFAULT_REPLY_TOKENS = 512


def reply_room(window: ContextWindow, prompt_tokens: int, capacity: int) -> int:
    """How many new tokens fit after a prompt. "truncate" cuts it for a quarter of the context, at least.

    capacity: tokens of one text that the cache holds.
    """
    size = min(window.size, capacity)
    return max(size - prompt_tokens, size // 4 if window.policy == "truncate" else 0)


def default_reply_tokens(model: LoadedModel, prompt_tokens: int, params: SamplingParams, capacity: int) -> int:
    """The `max_tokens` of a reply that names none: 512, or as many as fit. capacity: as of `reply_room`."""
    window, wanted = ContextWindow.of(model, params), max(DEFAULT_REPLY_TOKENS, params.min_tokens)
    return wanted if window.moves else max(1, min(reply_room(window, prompt_tokens, capacity), wanted))


class PrefixCache:
    """The keys and values of one token sequence; a later sequence reuses those of the prefix that it shares."""

    def __init__(self, model: LoadedModel) -> None:
        self._model = model
        self._cache: EngineKVCache | None = None
        self._digest = ""  # of the adapter that computed it
        self._ids: NDArray[np.int64] = np.empty(0, dtype=np.int64)

    def take(self, prompt: NDArray[np.int64], capacity: int, digest: str = "") -> tuple[EngineKVCache, int]:
        """A cache for `capacity` tokens, and how many tokens of the prompt it holds: never the last one, whose logits
        must be computed. The cache is forgotten beyond those until `keep`. digest: of the prompt's adapter."""
        shorter = min(len(self._ids), len(prompt) - 1) if digest == self._digest else 0
        self._digest = digest
        same = int(np.argmin(np.append(self._ids[:shorter] == prompt[:shorter], False)))
        same = same if self._cache is None else self._cache.resumable(0, same)
        if self._cache is None or self._cache.capacity < capacity:
            larger = max(capacity, 0 if self._cache is None else 2 * self._cache.capacity)
            cache = self._model.new_cache(1, min(larger, max(capacity, self._model.config.context_length)))
            if self._cache is not None:
                cache.take_over(self._cache, same)
            self._cache = cache
        self._ids = prompt[:same]
        return self._cache, same

    def keep(self, ids: NDArray[np.int64]) -> None:
        """Note that the cache now holds these tokens."""
        self._ids = ids.copy()


class ChatSession:
    """A conversation with a model, by its own chat template. One reply at a time.

        session = model.chat(system="Be brief.", temperature=0.7)
        print(session.send("Hello").text)
        for chunk in session.stream("Tell me more"): ...

    params: of `SamplingParams`, for all replies; `send` and `stream` take others for one reply. `max_tokens` is 512 or
    what fits, by default. Each reply equals what the whole conversation gives as one prompt, token for token.
    `messages` is the history, which may be edited. Raises GenerationError.

    When the conversation is full, `overflow="error"` refuses. "truncate" drops whole messages, the oldest turns, until
    max_tokens (by default 512 or a quarter of the context) fit; the system text stays. `dropped` counts the dropped
    messages, `stats.dropped_messages` those of one reply. "sliding" and "sinks" drop tokens, as for any prompt.
    """

    how_to_reset = "reset() starts a new one"  # for messages

    @expand_params
    def __init__(self, model: LoadedModel, system: str | None = None, **params: Unpack[SamplingOptions]) -> None:
        self.model, self.params = model, params
        check_streamable(SamplingParams.of(**params))
        if model.tokenizer.chat_template is None:
            model.tokenizer.check_default_template()
            raise GenerationError(
                "this model has no chat template: it is a base model, which continues texts and was not trained to "
                'hold a conversation. Use: bitnet-ref generate "..."'
            )
        self.opening = [{"role": "system", "content": system}] if system else []
        self._stream: TokenStream | None = None
        self.reset()

    def reset(self) -> None:
        """Forget the conversation except the system text, and free its cache."""
        if self._stream is not None:
            self._stream.close()
        self.messages = list(self.opening)
        self.dropped = 0
        self._prefix = PrefixCache(self.model)

    def prompt(self, content: str) -> list[int]:
        """Token ids of the conversation with this message, ready for the reply."""
        return self._ids(self._fit(content, SamplingParams.of(**self.params)))

    def _ids(self, messages: list[dict[str, str]]) -> list[int]:
        return self.model.tokenizer.apply_chat_template(messages, tokenize=True)

    @expand_params
    def send(self, content: str, **params: Unpack[SamplingOptions]) -> Generation:
        """Send a message and wait for the reply. params override those of the session. An error leaves the history
        unchanged."""
        row, stream = self._reply(content, params)
        with stream:  # Ctrl-C between two tokens ends the reply, too
            for _ in stream:
                pass
        return row.result()

    @expand_params
    def stream(self, content: str, **params: Unpack[SamplingOptions]) -> TokenStream:
        """The reply as it comes. Closing the stream ends the reply; its text so far stays in the history. An error, or
        an end before the first text, leaves the history unchanged. The next `send`, `stream` or `reset` closes it."""
        return self._reply(content, params)[1]

    @property
    def full(self) -> bool:
        """Whether the context has no room for another message."""
        params = SamplingParams.of(**self.params)
        used = len(self._ids(self.messages)) if self.messages else 0
        return params.overflow == "error" and used >= ContextWindow.of(self.model, params).size

    def _fit(self, content: str, params: SamplingParams) -> list[dict[str, str]]:
        """The conversation with this message; under "truncate" without the oldest turns that do not fit."""
        messages = [*self.messages, {"role": "user", "content": content}]
        if params.overflow != "truncate":
            return messages
        size = ContextWindow.of(self.model, params).size
        reply = min(DEFAULT_REPLY_TOKENS, size // 4) if params.max_tokens is None else params.max_tokens
        while len(self._ids(messages)) + reply > size:
            oldest = len(self.opening) if messages[: len(self.opening)] == self.opening else 0
            turns = [i for i in range(oldest + 1, len(messages)) if messages[i]["role"] == "user"]
            if not turns:
                break  # only this message is left
            messages = messages[:oldest] + messages[turns[0] :]
        return messages

    def _reply(self, content: str, params: SamplingOptions) -> tuple[Continuation, TokenStream]:
        if self._stream is not None:
            self._stream.close()
        sampling = SamplingParams.of(**(self.params | params))
        check_streamable(sampling)
        messages = self._fit(content, sampling)
        ids, window = self._ids(messages), ContextWindow.of(self.model, sampling)
        wanted = DEFAULT_REPLY_TOKENS if sampling.max_tokens is None else sampling.max_tokens
        wanted = max(wanted, sampling.min_tokens)
        if not window.moves:
            if (room := window.size - len(ids)) < 1:
                has_turns = len(messages) > len(self.opening) + 1
                raise ContextOverflow(
                    f"the conversation has {len(ids)} tokens and the model's context is {window.size}; "
                    + (self.how_to_reset if has_turns else "shorten the message")
                )
            wanted = min(room, wanted)
        row = Continuation(Request(self.model, ids, replace(sampling, max_tokens=wanted)), slot=0)
        row.stats.dropped_messages = len(self.messages) + 1 - len(messages)
        self._stream = TokenStream(self._chunks(row, messages), row.stats)
        return row, self._stream

    def _chunks(self, row: Continuation, messages: list[dict[str, str]]) -> Generator[StreamChunk, None, None]:
        cache, same = self._prefix.take(row.context, row.request.capacity, row.adapter_digest)
        row.cached = row.computed = same
        replied = False
        try:
            yield from generate_chunks(self.model, [[row]], row.stats, cache)
            replied = True
        except (GeneratorExit, KeyboardInterrupt):
            replied = any(chunk.text for chunk in row.chunks)
            raise
        finally:
            self._prefix.keep(row.context[: row.computed])
            if replied:
                self.dropped += row.stats.dropped_messages
                text = "".join(chunk.text for chunk in row.chunks).removeprefix(row.echo)
                self.messages = [*messages, {"role": "assistant", "content": text}]
