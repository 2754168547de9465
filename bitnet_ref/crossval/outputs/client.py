"""A client of OpenAI's HTTP API: asks for completions with all that a server offers, and recovers token ids from them.

It is not a general client: it sends what `crossval openai` compares, over the standard library's urllib.
"""

from __future__ import annotations

import contextlib
import json
import re
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ...backends.loaded import LoadedModel
from ...errors import BackendUnavailable, ConfigError, TokenizerError, printable
from ..types import Ids

MAX_ANSWER_BYTES = 1 << 27
TOP = 5  # of the likeliest tokens at each place
# What is asked for, the most first. A server that refuses one gets the next.
FEATURES: tuple[dict[str, Any], ...] = (
    {"echo": True, "logprobs": TOP, "return_token_ids": True},
    {"echo": True, "logprobs": TOP},
    {"logprobs": TOP, "return_token_ids": True},
    {"logprobs": TOP},
    {"return_token_ids": True},
    {},
)


class Refused(Exception):
    """The server does not take this request: an unknown parameter, a prompt of ids."""


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirect would carry the key to another host."""

    def redirect_request(self, *args: Any, **kwargs: Any) -> None:
        return None


@dataclass
class Client:
    """url: of the server, with or without /v1.   served_model: the name it knows the model by; None: its first one.
    fields: that each request has as well."""

    url: str
    served_model: str | None = None
    key: str | None = None
    timeout_s: float = 300.0
    fields: Mapping[str, Any] = field(default_factory=dict)
    features: dict[str, Any] | None = None  # of the first request that the server took
    takes_ids: bool = True
    _texts: TokenTexts | None = None
    _opener: urllib.request.OpenerDirector = field(default_factory=lambda: urllib.request.build_opener(_NoRedirect))

    def __post_init__(self) -> None:
        if not re.match(r"https?://[^/\s]+", self.url):
            raise ConfigError(f"expected a URL such as http://localhost:8000, got {self.url!r}", field="URL")
        self.url = self.url.rstrip("/").removesuffix("/v1")

    def ask(self, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """The JSON that the server answers.   body: None is a GET.

        Raises Refused for a request that it does not take, BackendUnavailable when there is no answer.
        """
        headers = {"content-type": "application/json", "accept": "application/json"}
        if self.key is not None:
            headers["authorization"] = f"Bearer {self.key}"
        data = None if body is None else json.dumps({**body, **self.fields}).encode()
        request = urllib.request.Request(f"{self.url}{path}", data, headers)
        try:
            with self._opener.open(request, timeout=self.timeout_s) as answer:
                raw = answer.read(MAX_ANSWER_BYTES + 1)
        except urllib.error.HTTPError as error:
            with error:
                said = _message(error.read(1 << 16))
            if error.code in (400, 404, 405, 413, 415, 422, 500, 501) and body is not None:
                raise Refused(f"{error.code}: {said}") from error
            hint = "; give its key with --api-key" if error.code in (401, 403) else ""
            raise BackendUnavailable(f"{self.url}{path} answers {error.code}: {said}{hint}") from error
        except (OSError, ValueError) as error:  # URLError, timeouts, a reset; a header that cannot be sent
            reason = getattr(error, "reason", error)
            raise BackendUnavailable(f"{self.url} cannot be reached: {printable(str(reason), keep='')}") from error
        except Exception as error:  # http.client's own, of an answer that is no HTTP
            raise BackendUnavailable(f"{self.url} does not answer in HTTP: {type(error).__name__}") from error
        try:
            value = json.loads(raw[:MAX_ANSWER_BYTES])
        except (ValueError, RecursionError) as error:
            raise BackendUnavailable(f"{self.url}{path} does not answer in JSON: is it an OpenAI server?") from error
        if not isinstance(value, dict):
            raise BackendUnavailable(f"{self.url}{path} does not answer with a JSON object")
        return value

    @property
    def name(self) -> str | None:
        """The name to send as `model`."""
        if self.served_model is None:
            with contextlib.suppress(Refused, KeyError, IndexError, TypeError):
                self.served_model = str(self.ask("/v1/models")["data"][0]["id"])
        return self.served_model

    def complete(self, model: LoadedModel, prompt: str | Ids, max_tokens: int) -> Answer:
        """The greedy continuation, with log probabilities and ids where the server has them."""
        tried = FEATURES if self.features is None else (self.features,)
        problem = ""
        for features in tried:
            body = {"model": self.name, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, **features}
            try:
                answer = self.ask("/v1/completions", body)
            except Refused as refused:
                problem = str(refused)
                continue
            missing = _missing(answer)
            features = {name: value for name, value in features.items() if name not in missing}
            self.features = features
            self._texts = self._texts or TokenTexts(model)
            return read_answer(model, self._texts, answer, prompt, bool(features.get("echo")), self.url)
        if isinstance(prompt, list):
            self.takes_ids = False
        raise Refused(problem)


def _message(raw: bytes) -> str:
    """What the body of an error says."""
    with contextlib.suppress(ValueError, AttributeError, TypeError, RecursionError):
        value = json.loads(raw)
        inner = value.get("error", value.get("message", value.get("detail", "")))
        return printable(str(inner.get("message", inner) if isinstance(inner, dict) else inner)[:200], keep="")
    return printable(raw[:200].decode("utf-8", "replace"), keep="")


@dataclass(frozen=True)
class Answer:
    """What a server said.

    prompt_ids, ids: None where they cannot be recovered.   counted: how many prompt tokens it says it computed.
    logprobs: {index of the place in prompt + new ids: {token id: ln p}}, of a server that gives them.
    is_cut: the ids end before a token that the server left out.
    """

    text: str
    finish: str | None
    prompt_ids: Ids | None = None
    ids: Ids | None = None
    counted: int | None = None
    logprobs: dict[int, dict[int, float]] = field(default_factory=dict)
    is_cut: bool = False


def _missing(answer: Mapping[str, Any]) -> set[str]:
    """What was asked for and is not there: most servers ignore a parameter that they do not know."""
    with contextlib.suppress(KeyError, IndexError, TypeError, AttributeError):  # `read_answer` says what is wrong
        choice = answer["choices"][0]
        fields = {"logprobs": choice.get("logprobs"), "return_token_ids": choice.get("token_ids")}
        return {name for name, value in {**fields, "echo": is_echoed(answer)}.items() if not value}
    return set()


def is_echoed(answer: Mapping[str, Any]) -> bool:
    """Whether a completion has the prompt's log probabilities: llama.cpp's server takes "echo" and ignores it."""
    try:
        entries = _entries(answer["choices"][0].get("logprobs"))
        completed = (answer.get("usage") or {}).get("completion_tokens")
    except (KeyError, IndexError, TypeError, AttributeError, ValueError):
        return False  # `read_answer` says what is wrong
    if type(completed) is int:
        return len(entries) > completed
    return bool(entries) and entries[0].logprob is None  # of the first token, before which there is nothing


def read_answer(
    model: LoadedModel, texts: TokenTexts, answer: Mapping[str, Any], prompt: str | Ids, echo: bool, url: str
) -> Answer:
    """The first choice of a completion. Raises BackendUnavailable for what is none."""
    try:
        choice = answer["choices"][0]
        text = str(choice["text"])
        finish = choice.get("finish_reason")
        usage = answer.get("usage") or {}
        counted, completed = usage.get("prompt_tokens"), usage.get("completion_tokens")
        entries = _entries(choice.get("logprobs"))
        offsets = (choice.get("logprobs") or {}).get("text_offset")
    except (KeyError, IndexError, TypeError, AttributeError, ValueError) as error:
        raise BackendUnavailable(f"{url}/v1/completions answers with no completion of OpenAI's form") from error
    counted = counted if type(counted) is int and counted > 0 else None
    unlisted: Ids = []
    if echo and entries and counted and type(completed) is int:
        unlisted = texts.unlisted_bos(entries, counted + completed)
    entries, is_cut = texts.whole(entries)
    finish = "length" if is_cut else finish
    expected = list(prompt) if isinstance(prompt, list) else model.tokenizer.encode(prompt)
    new, before = (_ids(choice.get(name)) for name in ("token_ids", "prompt_token_ids"))
    echoed = 0
    if echo and entries:
        echoed = min(len(entries), len(entries) - len(new) if new is not None else counted or len(expected))
        echoed -= len(unlisted) if new is None else 0
        is_prompt = isinstance(prompt, str) and text.startswith(prompt)
        text = text[len(prompt) :] if is_prompt else _without_echo(model, text, offsets, echoed, expected)
    if before is None and (listed := texts.resolve([], entries[:echoed], expected[len(unlisted) :])) is not None:
        before = [*unlisted, *listed]
    new = new or texts.resolve(before or expected, entries[echoed:], [])
    unknown: list[int | None] = [None] * len(entries)
    ids = [*(before[len(before) - echoed :] if before else unknown[:echoed]), *(new or unknown[echoed:])]
    first = len(unlisted) if echoed else len(before or expected)
    logprobs: dict[int, dict[int, float]] = {}
    for place, (entry, token) in enumerate(zip(entries, ids, strict=False), first):
        if entry.logprob is not None and token is not None:
            named = {texts.one(name, number): value for name, number, value in entry.top}
            logprobs[place] = {key: value for key, value in named.items() if key is not None} | {token: entry.logprob}
    known = finish if finish in ("stop", "length") else None
    return Answer(text, known, before or None, new or None, counted, logprobs, is_cut)


def _ids(value: Any) -> Ids | None:
    return list(value) if isinstance(value, list) and value and all(type(each) is int for each in value) else None


def _without_echo(model: LoadedModel, text: str, offsets: Any, echoed: int, expected: Ids) -> str:
    """The new text of one that begins with the prompt."""
    if isinstance(offsets, list) and echoed < len(offsets) and type(offsets[echoed]) is int:
        return text[offsets[echoed] :]
    try:
        return text.removeprefix(model.tokenizer.decode(expected))
    except TokenizerError:
        return text


@dataclass(frozen=True)
class _Entry:
    name: str
    id: int | None
    logprob: float | None
    top: Sequence[tuple[str, int | None, float]]


def _entries(logprobs: Any) -> list[_Entry]:
    """Of OpenAI's completions, or of its chats, which llama.cpp has for both."""
    if not logprobs:
        return []
    entries = []
    if isinstance(logprobs.get("content"), list):
        for each in logprobs["content"]:
            top = [(str(t["token"]), t.get("id"), float(t["logprob"])) for t in each.get("top_logprobs") or []]
            entries.append(_Entry(str(each["token"]), each.get("id"), _ln(each["logprob"]), top))
        return entries
    tops = logprobs.get("top_logprobs") or [None] * len(logprobs["tokens"])
    for name, value, given in zip(logprobs["tokens"], logprobs["token_logprobs"], tops, strict=True):
        likeliest = [(str(text), None, float(ln_p)) for text, ln_p in (given or {}).items()]
        entries.append(_Entry(str(name), None, _ln(value), likeliest))
    return entries


def _ln(value: Any) -> float | None:
    return None if value is None else float(value)


class TokenTexts:
    """Token ids by the texts that servers write for them."""

    def __init__(self, model: LoadedModel) -> None:
        self._model = model
        self._ids: dict[str, list[int]] = {}
        self._texts: dict[int, str] = {}
        try:
            tokenizer, data = model.tokenizer, model.vocabulary.tokens
        except TokenizerError:
            return
        for token, raw in enumerate(data):
            piece = tokenizer.id_to_token(token)
            names = {piece, raw.decode("utf-8", "replace")} if raw else {piece}
            self._texts[token] = raw.decode("utf-8", "replace")
            names.add("bytes:" + "".join(f"\\x{byte:02x}" for byte in raw))
            for name in names:
                self._ids.setdefault(name, []).append(token)

    def all(self, name: str, number: int | None) -> list[int]:
        """The ids that a name may stand for."""
        if type(number) is int:
            return [number]
        if match := re.fullmatch(r"token_id:(\d{1,9})", name):  # vLLM's return_tokens_as_token_ids
            return [int(match[1])]
        return self._ids.get(name, [])

    def whole(self, entries: list[_Entry]) -> tuple[list[_Entry], bool]:
        """The entries before the first that stands for several tokens, and whether there is one.

        llama.cpp's server leaves out a token that is a part of a character, and writes its bytes before the next one.
        """
        for i, entry in enumerate(entries):
            own = self._texts.get(entry.id) if type(entry.id) is int else None
            if own and entry.name != own and entry.name.endswith(own) and entry.name.startswith("\ufffd"):
                return entries[:i], True
        return entries, False

    def unlisted_bos(self, entries: Sequence[_Entry], count: int) -> Ids:
        """The BOS tokens that an answer of `count` tokens does not list: llama-cpp-python leaves them out."""
        bos, missing = self._model.config.bos_token_id, count - len(entries)
        listed = not entries[0].name or bos in self.all(entries[0].name, entries[0].id)
        return [bos] * missing if bos is not None and missing in (1, 2) and not listed else []

    def one(self, name: str, number: int | None) -> int | None:
        """The id, if there is only one."""
        ids = self.all(name, number)
        return ids[0] if len(ids) == 1 else None

    def resolve(self, prompt: Ids, entries: Sequence[_Entry], expected: Ids) -> Ids | None:
        """The id of each entry after a prompt; None if a text is unknown.

        Several tokens may have one text. Then the expected id is meant, or the one that the reference finds likeliest.
        """
        choices = [self.all(entry.name, entry.id) for entry in entries]
        if not all(choices) or not choices:
            return None
        shift = len(entries) - len(expected)  # of tokens that were added at the start; below 0: left out there
        near = (expected[max(0, i - max(0, shift)) : i + 1 + max(0, -shift)] for i in range(len(choices)))
        ids = [next((t for t in each if t in own), each[0]) for each, own in zip(choices, near, strict=True)]
        unclear = [i for i, each in enumerate(choices) if len(each) > 1 and ids[i] not in expected]
        for _ in range(3 if unclear and prompt else 0):
            logits = self._model.logits([*prompt, *ids][: self._model.context_length])[len(prompt) - 1 :]
            better = list(ids)
            for i in unclear:
                better[i] = max(choices[i], key=lambda token, row=logits[i]: float(row[token]))  # type: ignore[misc]
            if better == ids:
                break
            ids = better
        return ids


def rms(errors: Sequence[float]) -> float:
    return float(np.sqrt(np.mean(np.square(errors)))) if len(errors) else 0.0
