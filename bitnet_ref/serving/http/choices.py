"""A request that was read, `Asked`, and its texts, `Choice`: as OpenAI writes them, whole or chunk by chunk.

`Writer` is what writes the answer, for OpenAI or another API.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import starmap
from typing import Any

from ...backends.loaded import LoadedModel
from ...errors import GenerationError
from ...generation.guide_prover import prove_guide
from ...generation.params import GUIDES
from ...generation.processors import FEW_WORDS
from ...generation.results import Generation, StreamChunk
from ...generation.streaming import TextStream
from ..engine import Engine
from ..tickets import RequestHandle
from .events import Block, CallStart, Event, Reasoning, Reply, Text
from .replies import ReplyReader
from .schemas import RequestError
from .tools import custom_input

SSE = "text/event-stream; charset=utf-8"
FINISH = {"filtered": "content_filter"}
Entry = tuple[int, float | None, Mapping[int, float] | None]  # token id, ln p, and those of the likeliest ones


@dataclass
class Asked:
    """What a request for text asks for. `prompts` and `params` are for the engine."""

    model_name: str
    prompts: list[Any]
    params: dict[str, Any]
    is_chat: bool
    n: int = 1
    stream: bool = False
    usage_in_stream: bool = False
    usage_in_chunks: bool = False
    priority: int = 0
    echo: bool = False
    top: int | None = None  # how many of the likeliest tokens to report; None: no log probabilities
    is_only_scored: bool = False  # max_tokens is 0
    prefix: str = ""  # a chat's reply begins with it, by vLLM's `echo`
    include_stop_str_in_output: bool = False
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False  # in log probabilities, in place of their texts
    shows_prompt_logprobs: bool = False
    hides_reasoning: bool = False
    custom: frozenset[str] = frozenset()  # tools whose input is a text
    guide_field: str = ""  # of the request, from which a guide was read under another name
    has_functions: bool = False  # OpenAI's older form of tools, in which a reply has one call at most
    defaults: Mapping[str, Any] = field(default_factory=dict)  # the server's, of what `params` does not say
    reply: ReplyReader = field(default_factory=ReplyReader)  # what turns the text into events
    writer: Callable[..., Writer] | None = None  # of another API than OpenAI's chats and completions
    created: int = field(default_factory=lambda: int(time.time()))
    id: str = ""
    fingerprint: str = ""  # of what computes the answer; see `fingerprint_of`

    def __post_init__(self) -> None:
        self.id = f"{'chatcmpl' if self.is_chat else 'cmpl'}-{uuid.uuid4().hex}"

    def is_quick(self, engine: Engine) -> bool:
        """Whether `submit` takes no time: one text, no guide, which would be compiled, and few words to ban."""
        params = {**engine.config.sampling, **self.params}
        words = params.get("bad_words", ())
        is_one = len(self.prompts) == 1 and params.get("n", 1) == 1
        return is_one and params.keys().isdisjoint(GUIDES) and (isinstance(words, str) or len(words) <= FEW_WORDS)

    def submit(self, engine: Engine, timeout_s: float | None = None) -> list[Choice]:
        """Queue all texts: n of each prompt. Raises what `Engine.submit` and `prove_guide` raise."""
        texts = len(self.prompts) * self.params.get("n", 1)
        if texts > engine.config.max_queue:
            raise RequestError(f"{texts} texts are more than this server's queue holds", "prompt")
        params = {"n": 1, "echo": False, **self.params}  # the form of the answer is the request's alone
        try:
            prove_guide(engine.config.params(params), engine.model.vocabulary)
        except GenerationError as error:
            if error.field in GUIDES and self.guide_field:
                raise RequestError(error.message, self.guide_field) from error
            raise
        choices: list[Choice] = []
        options: dict[str, Any] = {"priority": self.priority, "timeout_s": timeout_s, **params}
        beams = self.params.get("n", 1) if self.params.get("num_beams", 1) > 1 else 0
        try:
            for prompt in self.prompts:
                handles = [engine.submit(prompt, **options)] * beams if beams else engine.streams(prompt, **options)
                for rank, handle in enumerate(handles):
                    choices.append(Choice(self, len(choices), handle, engine.model, rank))
        except BaseException:
            for choice in choices:
                choice.handle.close()
            raise
        return choices

    def frame(self, choices: Sequence[Mapping[str, Any]], is_chunk: bool = False) -> dict[str, Any]:
        """The object around the choices."""
        kind = f"chat.completion{'.chunk' * is_chunk}" if self.is_chat else "text_completion"
        facts = {"id": self.id, "object": kind, "created": self.created, "model": self.model_name}
        return {**facts, "system_fingerprint": self.fingerprint, "choices": list(choices)}

    def response(self, choices: Sequence[Choice], results: Sequence[Generation]) -> dict[str, Any]:
        """All texts in one object; the best `n` of each prompt where more were generated."""
        total, pairs = usage(self, choices), zip(choices, results, strict=True)
        every = [(choice, result) for choice, result in pairs if not choice.is_missing]
        size = self.params.get("n", 1)
        if self.n < size:
            groups = [every[first : first + size] for first in range(0, len(every), size)]
            every = [pair for group in groups for pair in sorted(group, key=_mean_logprob, reverse=True)[: self.n]]
        whole = [choice.whole(result, index) for index, (choice, result) in enumerate(every)]
        return {**self.frame(whole), **(choices[0].prompt_facts() if self.is_chat else {}), "usage": total}


def _mean_logprob(pair: tuple[Choice, Generation]) -> float:
    return sum(pair[1].logprobs) / len(pair[1].logprobs)


def usage(asked: Asked, choices: Sequence[Choice]) -> dict[str, Any]:
    """Tokens of the request; a prompt with several texts counts once."""
    first = [choice.handle.stats for choice in choices[:: asked.params.get("n", 1)]]
    prompt = sum(stats.prompt_tokens for stats in first)
    new = 0 if asked.is_only_scored else sum(choice.tokens for choice in choices)
    details = {"cached_tokens": sum(stats.cached_tokens for stats in first)}
    return {
        "prompt_tokens": prompt,
        "completion_tokens": new,
        "total_tokens": prompt + new,
        "prompt_tokens_details": details,
    }


class Choice:
    """One text of a response: its chunks or its result, as OpenAI writes them."""

    def __init__(self, asked: Asked, index: int, handle: RequestHandle, model: LoadedModel, rank: int) -> None:
        """rank: among the n texts of its prompt."""
        self.asked, self.index, self.handle, self.tokenizer = asked, index, handle, model.tokenizer
        self._rank, self._result_tokens = rank, 0
        self.is_missing = False  # a guide allows fewer texts than beams
        self._prompt_ids: list[int] = handle.prompt_token_ids
        self._vocabulary = model.vocabulary
        self._decoder, self._offset, self._chunks = TextStream(self.tokenizer, ()), 0, 0
        self._reader, self._prefix = asked.reply.copy(), asked.prefix
        self._has_calls = False
        self._held: tuple[int, Block] | None = None  # a custom tool's call in a stream, until its input is whole

    @property
    def tokens(self) -> int:
        """New tokens: all of them, or in a stream those of the chunks so far."""
        return self._chunks if self.asked.stream else self._result_tokens

    def result(self) -> Generation:
        """Wait for the end of the text."""
        return self._pick(self.handle.result())

    async def aresult(self) -> Generation:
        """`result`, for asyncio."""
        return self._pick(await self.handle.aresult())

    def _pick(self, results: Generation | list[Generation]) -> Generation:
        if isinstance(results, list):
            self.is_missing = self._rank >= len(results)
            results = results[-1 if self.is_missing else self._rank]
        self._result_tokens = 0 if self.is_missing else len(results.token_ids)
        return results

    def opening(self) -> dict[str, Any]:
        """The first chunk of a chat's stream: the role."""
        delta = {"role": "assistant", "content": ""}
        return {"index": self.index, "delta": delta, "logprobs": None, "finish_reason": None}

    def events(self, text: str, finish: str | None) -> list[Event]:
        """What the next piece of the reply's text makes certain."""
        events: list[Event] = [Text(self._prefix)] if self._prefix else []
        self._prefix = ""
        events += self._reader.push(text, finish)
        if self.asked.hides_reasoning:
            events = [event for event in events if not isinstance(event, Reasoning)]
        self._has_calls = self._has_calls or any(isinstance(event, CallStart) for event in events)
        return events

    def read(self, chunk: StreamChunk) -> list[Event]:
        """The events of a chunk."""
        events = self.events(self._new_text(chunk.text) + self._stop_text(chunk), chunk.finish_reason)
        self._chunks += 1
        return events

    def finish(self, reason: str | None) -> str | None:
        """Why the reply ended, as OpenAI writes it."""
        if self._has_calls and reason == "stop":
            return "function_call" if self.asked.has_functions else "tool_calls"
        return FINISH.get(reason or "", reason)

    def part(self, chunk: StreamChunk) -> dict[str, Any] | None:
        """A chunk of a stream. None: it says nothing yet."""
        entries, is_first = self._entries([chunk]), not self._chunks
        events = self.read(chunk)
        is_last = chunk.finish_reason is not None
        if not (events or entries or is_last or self.asked.top is not None or self.asked.return_token_ids):
            return None
        ends = self._ends(chunk, entries, [chunk.token_id])
        if not self.asked.is_chat:
            ends |= self.prompt_facts() if is_first else {}
            return {"index": self.index, "text": Reply(events).join("text"), **ends}
        return {"index": self.index, "delta": self._write_delta(events, is_last), **ends}

    def whole(self, result: Generation, index: int) -> dict[str, Any]:
        """The whole text."""
        tops = result.top_logprobs or []
        logprobs = result.logprobs if self.asked.top is not None else []
        steps = [
            StreamChunk("", token, logprob, top_logprobs=top)
            for token, logprob, top in zip(result.token_ids, logprobs, tops, strict=False)
        ]
        entries = self._entries(steps)
        reply = Reply(self.read_whole(result))
        text, reasoning, calls = reply.join("text"), reply.join("reasoning"), list(map(self._write_call, reply.calls))
        ends = self._ends(result, entries, result.token_ids)
        if not self.asked.is_chat:
            return {"index": index, "text": text, **ends, **self.prompt_facts()}
        content = text if text or not (calls or reasoning) else None
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if reasoning:
            message["reasoning_content"] = reasoning
        if calls:
            message |= {"function_call": calls[0]["function"]} if self.asked.has_functions else {"tool_calls": calls}
        return {"index": index, "message": message, **ends}

    def _ends(self, end: StreamChunk | Generation, entries: Sequence[Entry], ids: list[int]) -> dict[str, Any]:
        """What stands after the text of a chunk or of the whole. ids: of its tokens."""
        facts = {"logprobs": self._logprobs(entries), "finish_reason": self.finish(end.finish_reason)}
        tokens = {"token_ids": [] if self.asked.is_only_scored else ids} if self.asked.return_token_ids else {}
        return {**facts, "stop_reason": end.stop_reason, **tokens}

    def read_whole(self, result: Generation) -> list[Event]:
        """The events of a whole text."""
        return self.events(self._new_text(result.text) + self._stop_text(result), result.finish_reason)

    def _stop_text(self, end: StreamChunk | Generation) -> str:
        """The string that ended the text, where the request wants it; a token of `stop_token_ids` is in the text."""
        wanted = (
            self.asked.include_stop_str_in_output and end.finish_reason == "stop" and isinstance(end.stop_reason, str)
        )
        return str(end.stop_reason) if wanted else ""

    def prompt_facts(self) -> dict[str, Any]:
        """What vLLM's fields ask about the prompt."""
        facts: dict[str, Any] = {"prompt_token_ids": self._prompt_ids} if self.asked.return_token_ids else {}
        if self.asked.shows_prompt_logprobs:
            facts["prompt_logprobs"] = [
                None if each is None else dict(starmap(self._prompt_entry, enumerate(each.items())))
                for each in self.handle.prompt_logprobs or []
            ]
        return facts

    def _new_text(self, text: str) -> str:
        """The text without what the engine echoes for the sake of spaces."""
        if "echo" not in self.asked.params or self._chunks:
            return "" if self.asked.is_only_scored else text
        new = "" if self.asked.is_only_scored else text[len(self.handle.echo) :]
        return self.handle.echo + new if self.asked.echo else new

    def _entries(self, chunks: Sequence[StreamChunk]) -> list[Entry]:
        """The tokens with their log probabilities; an echo's are before those of the first chunk."""
        if self.asked.top is None:
            return []
        chunks = () if self.asked.is_only_scored else chunks
        new: list[Entry] = [(each.token_id, each.logprob, each.top_logprobs) for each in chunks]
        if self._chunks or self.asked.is_chat:
            return new
        if not self.asked.echo:
            for token in self._prompt_ids:
                self._push(token)
            self._offset = 0
            return new
        scores = self.handle.prompt_logprobs or [None] * len(self._prompt_ids)
        pairs = zip(self._prompt_ids, scores, strict=True)
        return [*((token, None if top is None else top[token], top) for token, top in pairs), *new]

    def _push(self, token: int) -> int:
        """Take the token into the text.   -> where in the text it begins"""
        before = self._offset
        self._offset += len(self._decoder.push(token))
        return before

    def _logprobs(self, entries: Sequence[Entry]) -> dict[str, Any] | None:
        if self.asked.top is None:
            return None
        if self.asked.is_chat:
            return {"content": [self._chat_entry(entry) for entry in entries], "refusal": None}
        return {
            "tokens": [self._text(token) for token, _, _ in entries],
            "token_logprobs": [logprob for _, logprob, _ in entries],
            "top_logprobs": [None if top is None else self._by_text(top) for _, _, top in entries],
            "text_offset": [self._push(token) for token, _, _ in entries],
        }

    def _write_call(self, call: Block) -> dict[str, Any]:
        if call.name in self.asked.custom:
            custom = {"name": call.name, "input": custom_input(call.text)}
            return {"id": call.call_id, "type": "custom", "custom": custom}
        return {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.text}}

    def _write_delta(self, events: Sequence[Event], is_last: bool) -> dict[str, Any]:
        """The `delta` of a chat's chunk."""
        delta: dict[str, Any] = {}
        calls: dict[int, dict[str, Any]] = {}
        for event in events:
            if isinstance(event, Text):
                delta["content"] = delta.get("content", "") + event.text
            elif isinstance(event, Reasoning):
                delta["reasoning_content"] = delta.get("reasoning_content", "") + event.text
            elif isinstance(event, CallStart):
                self._end_custom(calls)
                call = Block(event.kind, event.index, event.name, event.id)
                if event.name in self.asked.custom:
                    self._held = event.index, call
                else:
                    calls[event.index] = {"index": event.index, **self._write_call(call)}
            elif self._held is not None:
                self._held[1].text += event.text
            else:
                entry = calls.setdefault(event.index, {"index": event.index, "function": {"arguments": ""}})
                entry["function"]["arguments"] += event.text
        if is_last:
            self._end_custom(calls)
        if calls and self.asked.has_functions:
            return {**delta, "function_call": next(iter(calls.values()))["function"]}
        return {**delta, **({"tool_calls": list(calls.values())} if calls else {})}

    def _end_custom(self, calls: dict[int, dict[str, Any]]) -> None:
        if self._held is not None:
            index, call = self._held
            calls[index], self._held = {"index": index, **self._write_call(call)}, None

    def _prompt_entry(self, index: int, entry: tuple[int, float]) -> tuple[str, dict[str, Any]]:
        """A token in vLLM's form. The rank of the prompt's own token is not known where it is behind the likeliest."""
        token, logprob = entry
        rank = index + 1 if index < self.asked.params["prompt_logprobs"] else None
        text = self._vocabulary.name(token).decode("utf-8", "replace")
        return str(token), {"logprob": logprob, "rank": rank, "decoded_token": text}

    def _by_text(self, top: Mapping[int, float]) -> dict[str, float]:
        """By text; the likelier one of two tokens with the same text."""
        return {self._text(token): logprob for token, logprob in reversed(list(top.items()))}

    def _chat_entry(self, entry: Entry) -> dict[str, Any]:
        token, logprob, top = entry
        assert logprob is not None
        likeliest = [self._token(each, ln_p) for each, ln_p in (top or {}).items()][: self.asked.top]
        return {**self._token(token, logprob), "top_logprobs": likeliest}

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        data = self._vocabulary.name(token)
        text = f"token_id:{token}" if self.asked.return_tokens_as_token_ids else data.decode("utf-8", "replace")
        return {"token": text, "logprob": logprob, "bytes": list(data)}

    def _text(self, token: int) -> str:
        """The token's text, or as OpenAI writes it if it is no UTF-8: "bytes:\\xe2\\x82"."""
        if self.asked.return_tokens_as_token_ids:
            return f"token_id:{token}"
        data = self._vocabulary.name(token)
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


class Writer:
    """Writes one response. quiet: what a stream without news sends, so that a proxy keeps it open."""

    media_type = SSE
    quiet = ": waiting\n\n"

    def __init__(self, asked: Asked, choices: Sequence[Choice]) -> None:
        self.asked, self.choices = asked, choices

    def opening(self) -> str:
        """What a stream begins with, once its first chunk is there."""
        return ""

    def part(self, choice: Choice, chunk: StreamChunk) -> Any:
        """What a chunk says; None: nothing yet. It may run in a thread."""
        raise NotImplementedError

    def text(self, part: Any) -> str:
        """The part as the stream writes it."""
        return str(part)

    def closing(self) -> str:
        """What a stream ends with."""
        return ""

    def failure(self, status: int, facts: Mapping[str, Any]) -> str:
        """The end of a stream that failed. facts: as of `describe_failure`."""
        raise NotImplementedError

    def whole(self, results: Sequence[Generation]) -> dict[str, Any]:
        """The response that is no stream."""
        raise NotImplementedError
