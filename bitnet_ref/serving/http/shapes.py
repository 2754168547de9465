"""OpenAI's JSON: a request as this package's parameters, and results as OpenAI writes them."""

from __future__ import annotations

import base64
import json
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...backends.loaded import LoadedModel
from ...generation.chat import default_reply_tokens
from ...generation.embed import token_rows
from ...generation.generate import split_prompts
from ...generation.guide_prover import prove_guide
from ...generation.params import GUIDES, SamplingParams
from ...generation.results import Generation, StreamChunk
from ...reference.layers import Floats
from ...tokenizers.base import Tokenizer
from ..engine import Engine
from ..tickets import BeamText, RequestHandle
from .events import CallArguments, CallStart, Event, Reasoning, Reply, Text
from .parts import CHAT_PARTS, read_parts
from .replies import ReplyReader, ThinkingBudget, find_thinking
from .schemas import PASSED, REFUSED, RequestError
from .tool_formats import find_format
from .tools import choose_tools, close_objects

DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's
COMPACT = {"whitespace_flexible": False}  # for llguidance: a small model may else write line ends until max_tokens
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
    defaults: Mapping[str, Any] = field(default_factory=dict)  # the server's, of what `params` does not say
    reply: ReplyReader | None = None  # of a chat: what turns its text into events
    writer: Callable[..., Writer] | None = None  # of another API than OpenAI's chats and completions
    created: int = field(default_factory=lambda: int(time.time()))
    id: str = ""
    fingerprint: str = ""  # of what computes the answer; see `fingerprint_of`

    def __post_init__(self) -> None:
        self.id = f"{'chatcmpl' if self.is_chat else 'cmpl'}-{uuid.uuid4().hex}"

    def submit(self, engine: Engine, timeout_s: float | None = None) -> list[Choice]:
        """Queue all texts: n of each prompt. Raises what `Engine.submit` and `prove_guide` raise."""
        texts = len(self.prompts) * self.params.get("n", 1)
        if texts > engine.config.max_queue:
            raise RequestError(f"prompt: {texts} texts are more than this server's queue holds", "prompt")
        prove_guide(engine.config.params(self.params), engine.model.vocabulary)
        choices: list[Choice] = []
        submit: Callable[..., Sequence[RequestHandle | BeamText]]
        submit = engine.beams if self.params.get("num_beams", 1) > 1 else engine.streams
        try:
            for prompt in self.prompts:
                for handle in submit(prompt, priority=self.priority, timeout_s=timeout_s, **self.params):
                    choices.append(Choice(self, len(choices), handle, engine.model))
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
        total, every = usage(self, choices), list(zip(choices, results, strict=True))
        size = self.params.get("n", 1)
        if self.n < size:
            groups = [every[first : first + size] for first in range(0, len(every), size)]
            every = [pair for group in groups for pair in sorted(group, key=_mean_logprob, reverse=True)[: self.n]]
        whole = [choice.whole(result, index) for index, (choice, result) in enumerate(every)]
        return {**self.frame(whole), "usage": total}


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


# -- requests ----------------------------------------------------------------------------------------------------------


def read_completion(body: Mapping[str, Any], model_name: str, engine: Engine) -> Asked:
    """The request of a body that passed its schema. Raises RequestError."""
    params, common = _read_common(body, engine)
    prompt, echo, top = body["prompt"], bool(body.get("echo")), body.get("logprobs")
    many = isinstance(prompt, list) and not isinstance(prompt[0], int)
    if body.get("suffix"):
        if many or not isinstance(prompt, str) or echo:
            raise RequestError("suffix: expected one prompt, a text, without echo", "suffix")
        prompt = infill_ids(engine.model.tokenizer, prompt, body["suffix"], "suffix")
    params.setdefault("max_tokens", DEFAULT_COMPLETION_TOKENS)
    only_scored = params["max_tokens"] == 0
    if only_scored and not echo:
        raise RequestError("max_tokens: 0 asks for no text, unless echo is true; expected at least 1", "max_tokens")
    params["max_tokens"] = max(1, params["max_tokens"])
    if echo and top is not None:
        params["prompt_logprobs"] = top
    n, best_of = params.get("n", 1), body.get("best_of") or params.get("n", 1)
    if best_of < n or (best_of > n and (common["stream"] or "num_beams" in params)):
        message = f"best_of: expected at least n, {n}, and no more in a stream or with beams; got {best_of}"
        raise RequestError(message, "best_of")
    params |= {"n": best_of, "echo": True}  # the prompt's text is cut off again; so a space after it is not lost
    return Asked(
        *(model_name, prompt if many else [prompt], params, False, n),
        **common,
        echo=echo,
        top=top,
        is_only_scored=only_scored,
    )


INFILL_TOKENS = (  # before the prefix, before the suffix, before the middle, as published tokenizers name them
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen, CodeGemma
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, SantaCoder
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek: the hole is where the middle goes
    ("<|fim_begin|>", "<|fim_hole|>", "<|fim_end|>"),
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),  # Code Llama
)


def infill_ids(tokenizer: Tokenizer, prefix: str, suffix: str, field: str) -> list[int]:
    """The prompt that asks for what is between two texts. Raises RequestError without tokens for that."""
    for names in INFILL_TOKENS:
        marks = [tokenizer.token_to_id(name) for name in names]
        if None not in marks:
            before, after = (tokenizer.encode(text, add_special_tokens=False) for text in (prefix, suffix))
            front = tokenizer.encode("")[:1] if tokenizer.bos_id in tokenizer.encode("")[:1] else []
            return [*front, *marks[:1], *before, *marks[1:2], *after, *marks[2:]]  # type: ignore[list-item]
    message = "this model's tokenizer has no tokens for filling in the middle, so it can only continue a text"
    raise RequestError(f"{field}: {message}; leave it out", field)


def read_chat(body: Mapping[str, Any], model_name: str, engine: Engine, chat_template: str | None) -> Asked:
    """The request of a body that passed its schema, with the conversation as token ids. Raises RequestError."""
    check_supported(body)
    params, common = _read_common(body, engine)
    if body.get("max_completion_tokens") is not None:
        params["max_tokens"] = body["max_completion_tokens"]
    kind = (body.get("response_format") or {}).get("type", "text")
    if kind == "json_object":
        params["guided_json"] = {"type": "object"}
    elif kind == "json_schema":
        if not body["response_format"].get("json_schema"):
            raise RequestError("response_format.json_schema: is missing", "response_format.json_schema")
        schema = body["response_format"]["json_schema"]["schema"]
        params["guided_json"] = {} if schema is None else close_objects(schema)
    if body.get("top_logprobs") is not None and not body.get("logprobs"):
        raise RequestError("top_logprobs: needs logprobs=true", "top_logprobs")
    tokenizer, template = engine.model.tokenizer, chat_template
    if template is None:
        template = tokenizer.template_for(bool(body.get("tools"))) or ""
    one_call, form = body.get("parallel_tool_calls") is False, find_format(template)
    tools, guide = choose_tools(body.get("tools") or [], body.get("tool_choice"), one_call, form)
    if guide is not None:
        params["guided_json"] = guide
    if isinstance(params.get("guided_json"), dict):
        params["guided_json"] = {"x-guidance": COMPACT, **close_objects(params["guided_json"])}
    text = chat_text(engine.model, body, chat_template, tools is not None)
    ids, thinking = tokenizer.encode(text, add_special_tokens=False), find_thinking(template, text)
    if body.get("continue_final_message"):
        params["echo"], thinking = True, None  # the echo is cut off again, but not the space after it
    if thinking is not None:
        end = token_ids_of(tokenizer, thinking.end)
        if thinking.begins_inside and SamplingParams.of(**_guides(params)).guides:
            params["guide_after"] = end
        if body.get("thinking_token_budget") is not None:
            budget = int(body["thinking_token_budget"])  # JSON has 1.0 for 1
            start = [] if thinking.begins_inside else token_ids_of(tokenizer, thinking.start)
            params["processors"] = [ThinkingBudget(len(ids), budget, start, end)]
    marks = (*(form.marks if tools is not None else ()), *((thinking.start, thinking.end) if thinking else ()))
    params["shown_tokens"] = [token for mark in marks if (token := tokenizer.token_to_id(mark)) is not None]
    sampling = SamplingParams.of(**{**engine.config.sampling, **params})
    if sampling.max_tokens is None:
        params["max_tokens"] = default_reply_tokens(engine.model, len(ids), sampling)
    top = (body.get("top_logprobs") or 0) if body.get("logprobs") else None
    reply = ReplyReader(thinking, tools)
    return Asked(model_name, [ids], params, True, params.get("n", 1), **common, top=top, reply=reply)


def check_supported(body: Mapping[str, Any]) -> None:
    """Raise RequestError for a field of OpenAI's whose meaning this server does not have."""
    for name, reason in REFUSED.items():
        if body.get(name):
            raise RequestError(f"{name}: {reason}", name)
    if other := [kind for kind in body.get("modalities") or [] if kind != "text"]:
        raise RequestError(f"modalities: {other[0][:40]} is not supported; the models write text only", "modalities")


def _guides(params: Mapping[str, Any]) -> dict[str, Any]:
    return {name: params[name] for name in GUIDES if name in params}


def token_ids_of(tokenizer: Tokenizer, mark: str) -> list[int]:
    """The ids of a mark in the middle of a text: its own token where it has one."""
    token = tokenizer.token_to_id(mark)
    return tokenizer.encode(mark, add_special_tokens=False) if token is None else [token]


def chat_ids(model: LoadedModel, body: Mapping[str, Any], chat_template: str | None, with_tools: bool) -> list[int]:
    """The conversation of a body in the form of the model's chat template, as token ids."""
    return model.tokenizer.encode(chat_text(model, body, chat_template, with_tools), add_special_tokens=False)


def chat_text(model: LoadedModel, body: Mapping[str, Any], chat_template: str | None, with_tools: bool) -> str:
    """The conversation of a body in the form of the model's chat template."""
    tokenizer, tools = model.tokenizer, body.get("tools") if with_tools else None
    if tools and "tools" not in (chat_template or tokenizer.template_for(True) or ""):
        raise RequestError("tools: the chat template of this model has no place for tools", "tools")
    variables = {**thinking_variables(body), **(body.get("chat_template_kwargs") or {})}
    for name in ("messages", "tools", "documents", "add_generation_prompt"):
        if name in variables:
            raise RequestError(f"chat_template_kwargs: {name} is set by the server", "chat_template_kwargs")
    messages = [_plain_message(message, number) for number, message in enumerate(body["messages"])]
    begins = body.get("add_generation_prompt")
    last, name = messages[-1], "continue_final_message"
    goes_on = bool(body.get(name))
    if goes_on and (begins or last["role"] != "assistant" or not last["content"].strip()):
        raise RequestError(f"{name}: expected a last message of the assistant, and add_generation_prompt=false", name)
    text = tokenizer.apply_chat_template(
        messages, not goes_on and begins is not False, tools=tools, chat_template=chat_template, variables=variables
    )
    if goes_on:
        content = next((form for form in (last["content"], last["content"].strip()) if form in text), None)
        if content is None:
            raise RequestError(f"{name}: the chat template changes the text of the last message", name)
        text = text[: text.rindex(content) + len(content)]
    return text


def thinking_variables(body: Mapping[str, Any]) -> dict[str, Any]:
    """What templates read of `reasoning_effort` and `enable_thinking`: the effort, and whether the model thinks."""
    effort, thinks = body.get("reasoning_effort"), body.get("enable_thinking")
    if thinks is None and effort is not None:
        thinks = effort != "none"
    variables = {} if effort is None else {"reasoning_effort": effort}
    return variables if thinks is None else {**variables, "enable_thinking": thinks, "thinking": thinks}


def _plain_message(message: Mapping[str, Any], number: int) -> dict[str, Any]:
    """As templates expect it: text in one piece, and the arguments of tool calls as values."""
    text = read_parts(message.get("content"), f"messages.{number}.content", CHAT_PARTS)
    plain = {**message, "content": text}
    if calls := message.get("tool_calls"):
        plain["tool_calls"] = [{**call, "function": _with_values(call["function"])} for call in calls]
    return plain


def _with_values(function: Mapping[str, Any]) -> dict[str, Any]:
    try:
        return {**function, "arguments": json.loads(function["arguments"])}
    except (ValueError, RecursionError):
        return dict(function)


def _read_common(body: Mapping[str, Any], engine: Engine) -> tuple[dict[str, Any], dict[str, Any]]:
    params = {name: body[name] for name in PASSED if body.get(name) is not None}
    if params.get("top_k") == -1:  # vLLM's "no limit"
        params["top_k"] = 0
    if "seed" in params:
        params["seed"] %= 2**64
    if body.get("use_beam_search"):  # vLLM's: n is the number of beams
        if body.get("stream"):
            raise RequestError("stream: a search by beams has no text before its end", "stream")
        params |= {"num_beams": params.get("n", 1), "temperature": params.get("temperature", 0.0)}
    if "temperature" not in engine.config.sampling:
        params.setdefault("temperature", 1.0)  # OpenAI's
    top = body.get("top_logprobs") or 0 if isinstance(body.get("logprobs"), bool) else body.get("logprobs")
    if top is not None and body.get("logprobs") is not False:
        params["logprobs"] = top
    options = body.get("stream_options") or {}
    stream = bool(body.get("stream"))
    if body.get("stream_options") is not None and not stream:
        raise RequestError("stream_options: needs stream=true", "stream_options")
    return params, {
        "stream": stream,
        "usage_in_stream": bool(options.get("include_usage")),
        "usage_in_chunks": bool(options.get("include_usage") and options.get("continuous_usage_stats")),
        "priority": body.get("priority") or 0,
        "defaults": engine.config.sampling,
    }


def embedding_ids(model: LoadedModel, texts: Any) -> list[list[int]]:
    """The token ids of each text (or list of token ids) of a request for embeddings."""
    parts, _ = split_prompts(texts)
    return [ids.tolist() for ids in token_rows(model, parts)]


def embedding_response(body: Mapping[str, Any], model_name: str, vectors: Floats, tokens: int) -> dict[str, Any]:
    """vectors (B, D); tokens: of all texts. Raises RequestError for other `dimensions` than the vectors have."""
    if body.get("dimensions") not in (None, vectors.shape[1]):
        raise RequestError(f"dimensions: this model's vectors have {vectors.shape[1]}", "dimensions")
    if body.get("encoding_format") == "base64":
        coded: list[Any] = [base64.b64encode(row.astype("<f4").tobytes()).decode() for row in vectors]
    else:
        coded = vectors.tolist()
    data = [{"object": "embedding", "index": index, "embedding": row} for index, row in enumerate(coded)]
    counts = {"prompt_tokens": tokens, "total_tokens": tokens}
    return {"object": "list", "data": data, "model": model_name, "usage": counts}


# -- results -----------------------------------------------------------------------------------------------------------


class Choice:
    """One text of a response: its chunks or its result, as OpenAI writes them."""

    def __init__(self, asked: Asked, index: int, handle: RequestHandle | BeamText, model: LoadedModel) -> None:
        self.asked, self.index, self.handle, self.tokenizer = asked, index, handle, model.tokenizer
        self._prompt_ids: list[int] = handle.prompt_token_ids
        self._tokens = model.vocabulary.tokens if asked.top is not None else []
        self._decoder, self._offset, self._chunks = self.tokenizer.stream_decoder(), 0, 0
        self._reader: ReplyReader | None = None
        self._has_calls = False

    @property
    def tokens(self) -> int:
        """New tokens: all of them, or in a stream those of the chunks so far."""
        return self._chunks if self.asked.stream else self.handle.stats.generated_tokens

    def opening(self) -> dict[str, Any]:
        """The first chunk of a chat's stream: the role."""
        delta = {"role": "assistant", "content": ""}
        return {"index": self.index, "delta": delta, "logprobs": None, "finish_reason": None}

    def events(self, text: str, finish: str | None) -> list[Event]:
        """What the next piece of the reply's text makes certain."""
        if self._reader is None:
            self._reader = ReplyReader() if self.asked.reply is None else self.asked.reply.copy()
        events = self._reader.push(text, finish)
        self._has_calls = self._has_calls or any(isinstance(event, CallStart) for event in events)
        return events

    def read(self, chunk: StreamChunk) -> list[Event]:
        """The events of a chunk."""
        events = self.events(self._new_text(chunk.text), chunk.finish_reason)
        self._chunks += 1
        return events

    def finish(self, reason: str | None) -> str | None:
        """Why the reply ended, as OpenAI writes it."""
        if self._has_calls and reason == "stop":
            return "tool_calls"
        return FINISH.get(reason or "", reason)

    def part(self, chunk: StreamChunk) -> dict[str, Any] | None:
        """A chunk of a stream. None: it says nothing yet."""
        entries, finish = self._entries([chunk]), chunk.finish_reason
        events = self.read(chunk)
        if not (events or entries or finish or self.asked.top is not None):
            return None
        finish = self.finish(finish)
        ends = {"logprobs": self._logprobs(entries), "finish_reason": finish, "stop_reason": chunk.stop_reason}
        if not self.asked.is_chat:
            return {"index": self.index, "text": Reply.of(events).text, **ends}
        return {"index": self.index, "delta": write_delta(events), **ends}

    def whole(self, result: Generation, index: int) -> dict[str, Any]:
        """The whole text."""
        tops = result.top_logprobs or []
        logprobs = result.logprobs if self.asked.top is not None else []
        steps = [
            StreamChunk("", token, logprob, top_logprobs=top)
            for token, logprob, top in zip(result.token_ids, logprobs, tops, strict=False)
        ]
        entries = self._entries(steps)
        reply = Reply.of(self.read_whole(result))
        finish = self.finish(result.finish_reason)
        ends = {"logprobs": self._logprobs(entries), "finish_reason": finish, "stop_reason": result.stop_reason}
        if not self.asked.is_chat:
            return {"index": index, "text": reply.text, **ends}
        content = reply.text if reply.text or not (reply.calls or reply.reasoning) else None
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if reply.reasoning:
            message["reasoning_content"] = reply.reasoning
        if reply.calls:
            functions = [(call.id, {"name": call.name, "arguments": call.arguments}) for call in reply.calls]
            message["tool_calls"] = [{"id": id_, "type": "function", "function": each} for id_, each in functions]
        return {"index": index, "message": message, **ends}

    def read_whole(self, result: Generation) -> list[Event]:
        """The events of a whole text."""
        return self.events(self._new_text(result.text), result.finish_reason)

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
        new: list[Entry] = [] if self.asked.is_only_scored else [_entry(chunk) for chunk in chunks]
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
        if token < self.tokenizer.vocab_size:
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

    def _by_text(self, top: Mapping[int, float]) -> dict[str, float]:
        """By text; the likelier one of two tokens with the same text."""
        return {self._text(token): logprob for token, logprob in reversed(list(top.items()))}

    def _chat_entry(self, entry: Entry) -> dict[str, Any]:
        token, logprob, top = entry
        assert logprob is not None
        likeliest = [self._token(each, ln_p) for each, ln_p in (top or {}).items()][: self.asked.top]
        return {**self._token(token, logprob), "top_logprobs": likeliest}

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        data = self._bytes(token)
        return {"token": data.decode("utf-8", "replace"), "logprob": logprob, "bytes": list(data)}

    def _text(self, token: int) -> str:
        """The token's text, or as OpenAI writes it if it is no UTF-8: "bytes:\\xe2\\x82"."""
        data = self._bytes(token)
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def _bytes(self, token: int) -> bytes:
        """Of a special token, those of its name."""
        data = self._tokens[token] if token < len(self._tokens) else b""
        return data or (self.tokenizer.id_to_token(token).encode() if token < self.tokenizer.vocab_size else b"")


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


def _entry(chunk: StreamChunk) -> Entry:
    return chunk.token_id, chunk.logprob, chunk.top_logprobs


def write_delta(events: Sequence[Event]) -> dict[str, Any]:
    """The `delta` of a chat's chunk."""
    delta: dict[str, Any] = {}
    calls: dict[int, dict[str, Any]] = {}
    for event in events:
        if isinstance(event, Text):
            delta["content"] = delta.get("content", "") + event.text
        elif isinstance(event, Reasoning):
            delta["reasoning_content"] = delta.get("reasoning_content", "") + event.text
        elif isinstance(event, CallStart):
            function = {"name": event.name, "arguments": ""}
            calls[event.index] = {"index": event.index, "id": event.id, "type": "function", "function": function}
        elif isinstance(event, CallArguments):
            call = calls.setdefault(event.index, {"index": event.index, "function": {"arguments": ""}})
            call["function"]["arguments"] += event.text
    return {**delta, **({"tool_calls": list(calls.values())} if calls else {})}
