"""Where a served answer leaves what was computed again: the first token that differs, and the two probabilities.

An answer holds texts, not tokens. So the computed tokens are read one after the other, as the server reads them, for as
long as their text is the answer's. The answer's own token at that place is taken to be the longest with which its text
may go on.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...backends.loaded import LoadedModel
from ...errors import BitNetRefError
from ...generation.results import Generation
from ...generation.score import score
from ...generation.streaming import TextStream
from .choices import Choice
from .events import Reply

BREAK = "\0\0"  # between two texts; a stray one in a text can only make an answer differ later


@dataclass(frozen=True)
class OneToken:
    """id: None where it is not known. p: its probability there, as the model has it before temperature and rules."""

    id: int | None
    text: str
    p: float | None = None


@dataclass(frozen=True)
class FirstToken:
    """The first token that differs. position: in the reply, from 0. None: the reply has ended there."""

    choice: int
    position: int
    computed: OneToken | None
    answered: OneToken | None


def read_replies(answer: Mapping[str, Any]) -> list[list[Any] | None]:
    """The texts of each reply in an answer: thinking, text, then name and arguments of each call. None: unreadable.

    Arguments that came as an object are one: how the model wrote them is not known.
    """
    if "choices" in answer:
        return [_read_choice(choice) for choice in answer["choices"]] if isinstance(answer["choices"], list) else []
    parts = answer.get("content", answer.get("output"))
    texts, calls = ["", ""], list[Any]()
    for part in parts if isinstance(parts, list) else []:
        if not isinstance(part, Mapping):
            return [None]
        kind = part.get("type")
        if kind in ("function_call", "tool_use", "custom_tool_call"):
            arguments = part.get("arguments", part.get("partial_json", part.get("input")))
            arguments = {"input": arguments} if kind == "custom_tool_call" else arguments
            calls += [str(part.get("name")), arguments if isinstance(arguments, dict) else str(arguments)]
            continue
        inner = part.get("content") if isinstance(part.get("content"), list) else [part]
        text = "".join(
            str(each.get("text", each.get("thinking", ""))) for each in inner or [] if isinstance(each, dict)
        )
        texts[kind not in ("reasoning", "thinking")] += text
    return [[*texts, *calls]]


def _read_choice(choice: Any) -> list[Any] | None:
    if not isinstance(choice, Mapping):
        return None
    message = choice.get("message")
    if not isinstance(message, Mapping):
        return ["", choice["text"]] if isinstance(choice.get("text"), str) else None
    texts: list[Any] = [str(message.get(name) or "") for name in ("reasoning_content", "content")]
    calls = message.get("tool_calls")
    if isinstance(message.get("function_call"), Mapping):
        calls = [{"function": message["function_call"]}]
    for call in calls if isinstance(calls, list) else []:
        if not isinstance(call, Mapping):
            return None
        if isinstance(custom := call.get("custom"), Mapping):
            texts += [str(custom.get("name")), {"input": custom.get("input")}]
        elif isinstance(function := call.get("function"), Mapping):
            texts += [str(function.get("name")), str(function.get("arguments"))]
        else:
            return None
    return texts


def texts_of(reply: Reply) -> list[str]:
    """The same of a computed reply."""
    calls = [text for call in reply.calls for text in (call.name, call.text)]
    return [reply.join("reasoning"), reply.join("text"), *calls]


def flatten(texts: Sequence[str]) -> str:
    """The texts as one. Two replies are equal, or one begins as the other, where these are or do."""
    return BREAK.join(texts).rstrip(BREAK)


def find_first(
    choice: Choice, result: Generation, reply: Sequence[Any] | None, model: LoadedModel
) -> tuple[int, OneToken | None, OneToken | None] | None:
    """(position, the computed token, the answer's) where an answer leaves what was computed. None: nowhere."""
    asked = choice.asked
    if reply is None or asked.is_only_scored:
        return None
    if asked.prefix and reply[1].startswith(asked.prefix):
        reply = [reply[0], reply[1][len(asked.prefix) :], *reply[2:]]
    if asked.echo:
        echo = choice.handle.echo
        if not reply[1].startswith(echo):
            return None
        reply = ["", reply[1][len(echo) :]]
    decoder, text = TextStream(choice.tokenizer, (), shown=asked.params.get("shown_tokens", ())), result.text
    if "echo" in asked.params:
        decoder.prime(choice.handle.prompt_token_ids)
        text = text[len(choice.handle.echo) :]
    whole = texts_of(Reply(asked.reply.copy().push(text, result.finish_reason)))
    answered = [_write_like(whole[n : n + 1], each) if isinstance(each, dict) else each for n, each in enumerate(reply)]
    if whole == answered:
        return None
    ids, reader, reply_so_far = result.token_ids, asked.reply.copy(), Reply()
    agreed, agreed_text, expected = 0, "", flatten(answered)
    for number, token in enumerate(ids):
        for event in reader.push(decoder.push(token), None):
            reply_so_far.add(event)
        got = flatten([part[: len(most)] for part, most in zip(texts_of(reply_so_far), whole, strict=False)])
        if not expected.startswith(got):
            if len(whole) > 2:  # the text of a call is held back, so its own tokens are not told apart
                text = _rest(expected, agreed_text).decode(errors="replace")
                return number, _computed(result, number, model), OneToken(None, text[:40])
            break
        if got != agreed_text:
            agreed, agreed_text = number + 1, got
    rest = _rest(expected, agreed_text)
    tokens = model.vocabulary.tokens
    while agreed < len(ids) and ids[agreed] < len(tokens):  # tokens whose text was held back, as parts of a character
        data = tokens[ids[agreed]]
        if not data or not rest.startswith(data):
            break
        rest, agreed = rest[len(data) :], agreed + 1
    before = [*choice.handle.prompt_token_ids, *ids[:agreed]]
    return agreed, _computed(result, agreed, model), _answered(before, rest, agreed == 0, model)


def _rest(expected: str, agreed: str) -> bytes:
    """What the answer has after the text that both have: of the first of its texts that goes on."""
    rest = expected[len(agreed) :].lstrip(BREAK).partition(BREAK)[0]
    return rest.encode(errors="replace")


def _computed(result: Generation, position: int, model: LoadedModel) -> OneToken | None:
    if position >= len(result.token_ids):
        return None
    return _one_token(result.token_ids[position], result.logprobs[position], model)


def _answered(before: list[int], rest: bytes, is_first: bool, model: LoadedModel) -> OneToken | None:
    """The answer's token: the longest with which its text may go on; where it has ended, the likeliest end token."""
    tokens = model.vocabulary.tokens
    if rest:
        starts = (rest, b" " + rest) if is_first else (rest,)  # a space at the beginning has no text
        fitting = [n for n, each in enumerate(tokens) if each and any(start.startswith(each) for start in starts)]
        ids = sorted(fitting, key=lambda token: len(tokens[token]))[-1:]
    else:
        ids = [token for token in model.tokenizer.eos_ids if token < model.config.vocab_size]
    if not ids:
        return OneToken(None, rest.decode("utf-8", "replace")[:40]) if rest else None
    try:
        scores = score(model, before, [[token] for token in ids])
    except BitNetRefError:  # the text is longer than the context, by `overflow`
        return _one_token(ids[-1], None, model)
    best = max(range(len(ids)), key=lambda index: scores[index].total)
    return _one_token(ids[best], scores[best].total, model)


def _one_token(token: int, logprob: float | None, model: LoadedModel) -> OneToken:
    text = model.vocabulary.name(token).decode("utf-8", "replace")
    return OneToken(token, text, None if logprob is None else math.exp(logprob))


def _write_like(texts: Sequence[str], value: Mapping[str, Any]) -> str:
    """An object as JSON, in the form of the first of `texts`, if there is one and it is the same object."""
    text = next(iter(texts), "")
    try:
        if json.loads(text) == value:
            return text
    except (ValueError, RecursionError):
        pass
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
