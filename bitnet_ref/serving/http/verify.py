"""Compute a served answer again, and say whether it is equal: behind `bitnet-ref verify` and `/v1/verify`.

The request is read and answered by the server's own code, and the two answers are compared field by field. Not compared
is what says when and by whom a request was answered: ids, times, and how many tokens were in the cache already. Where
the texts differ, the first token that differs is found by reading the computed tokens one after the other, as long as
their text is the answer's.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from ...errors import BitNetRefError, describe
from ...generation.results import Generation
from ..engine import Engine
from . import messages, responses, schemas
from .batch import BatchServer, answer_lines, batch_id, digest_of
from .choices import Choice
from .failures import describe_failure
from .fingerprint import differing_parts, fingerprint_of
from .first_token import FirstToken, find_first, read_replies
from .request_log import record_of
from .shapes import Read, read_chat, read_completion
from .waiting import unless_gone
from .writers import OpenAIWriter

if TYPE_CHECKING:
    from .server import Server

PATH = "/v1/verify"
schemas.declare_body(
    PATH,
    "Compute an answer again and compare; with --verify only.",
    {"request": {"type": "object"}, "answer": {"type": "object"}},
    ("request", "answer"),
)
schemas.OFF_BY_DEFAULT.add(PATH)

KINDS = {  # what an answer says it is -> the path that gave it
    "chat.completion": "/v1/chat/completions",
    "text_completion": "/v1/completions",
    "response": responses.PATH,
    "message": messages.PATH,
}
READERS: dict[str, Read] = {
    "/v1/chat/completions": read_chat,
    "/v1/completions": read_completion,
    responses.PATH: partial(responses.read_response, store=responses.ResponseStore(max_responses=0)),
    messages.PATH: messages.read_message,
}
OF_STREAMS = ("chat.completion.chunk",)
# In nats. One flipped int8 value, which the rounding of another backend may cause, moves a logit by so much: see
# NEAR_TIE in crossval/tolerances.py. Without a flip backends are some 1e-5 apart, and one agrees with itself exactly.
LOGPROB_TOLERANCE = 0.15
SHOWN_DIFFERENCES = 20


class CannotCheck(BitNetRefError):
    """The answer does not hold what computing it again needs; the message says what is missing."""


@dataclass(frozen=True)
class Difference:
    """field: where in the answer, as "choices[0].finish_reason"."""

    field: str
    computed: Any
    answered: Any


@dataclass
class AnswerCheck:
    """verdict: "equal", "differs" or "unchecked". tokens: that were computed.

    largest_logprob_error: of the log probabilities in the answer, in nats; None: it has none.
    """

    verdict: str
    reason: str
    tokens: int = 0
    fingerprint: str | None = None
    first_token: FirstToken | None = None
    differences: list[Difference] = field(default_factory=list)
    largest_logprob_error: float | None = None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def unchecked(cls, reason: str) -> AnswerCheck:
        return cls("unchecked", reason)


def engine_for(server: BatchServer, request: Mapping[str, Any]) -> tuple[str, Engine]:
    """The model that a request names, and its engine: an adapter's, or that of any other name. Raises CannotCheck."""
    base, _, adapter = str(request.get("model")).rpartition(":")
    if adapter in server.adapters:
        return f"{server.model_name}:{adapter}", server.engine.with_adapter(adapter)
    if base == server.model_name:
        raise CannotCheck(f"the request names the adapter {describe(adapter)}; give its folder with --lora")
    return server.model_name, server.engine


def find_path(answer: Mapping[str, Any]) -> str:
    """The path that gave an answer. Raises CannotCheck."""
    kind = answer.get("object", answer.get("type"))
    if isinstance(kind, str) and kind in KINDS:
        return KINDS[kind]
    if kind in OF_STREAMS:
        raise CannotCheck("this is a piece of a stream; only whole answers can be checked")
    if "error" in answer:
        raise CannotCheck(f"the answer is an error: {describe(answer['error'])}")
    expected = ", ".join(KINDS)
    raise CannotCheck(f"the answer is none of {expected}: its object or type is {describe(kind)}")


class Recomputation:
    """One answer, on its way to be computed again: `submit`, wait for the results, `judge`.

    name: the model's, as the answer should say it; None: as the request, or else the answer says. seed: of a request
    that names none, where its server chose one by a rule. Raises CannotCheck.
    """

    def __init__(
        self,
        engine: Engine,
        chat_template: str | None,
        request: Mapping[str, Any],
        answer: Mapping[str, Any],
        *,
        name: str | None = None,
        seed: int | None = None,
    ) -> None:
        self.path = find_path(answer)
        self.engine, self.answer, self.choices = engine, answer, list[Choice]()
        self.fingerprint = fingerprint_of(engine, chat_template)
        body = {key: value for key, value in request.items() if key not in ("stream", "stream_options")}
        name = name or body.get("model") or str(answer.get("model"))
        try:
            schemas.check(body, self.path)
            self.asked = READERS[self.path](body, name, engine, chat_template)
            if seed is not None and "seed" not in engine.config.sampling:
                self.asked.params.setdefault("seed", seed)
            sampling = engine.config.params({"n": 1, **self.asked.params})
        except BitNetRefError as error:
            raise CannotCheck(f"the request is refused: {describe_failure(error)[1]['error']['message']}") from error
        self.asked.fingerprint = self.fingerprint
        if sampling.temperature > 0 and sampling.seed is None and not self.asked.is_only_scored:
            text = f"was sampled at temperature {sampling.temperature:g} without a seed, so it cannot come again"
            raise CannotCheck(f"the answer {text}; ask with a seed, or at temperature 0")

    def submit(self, timeout_s: float | None = None) -> list[Choice]:
        """Queue the texts. Raises CannotCheck for what the request gets wrong, and QueueFull."""
        try:
            self.choices = self.asked.submit(self.engine, timeout_s)
        except BitNetRefError as error:
            status, facts = describe_failure(error)
            if status not in (400, 404, 422):
                raise
            raise CannotCheck(f"the request is refused: {facts['error']['message']}") from error
        return self.choices

    def judge(self, results: Sequence[Generation]) -> AnswerCheck:
        """Compare. results: of the choices."""
        computed = (self.asked.writer or OpenAIWriter)(self.asked, self.choices).whole(results)
        check = compare(computed, self.answer, self.path)
        check.tokens = sum(len(result.token_ids) for result in results)
        check.fingerprint = self.fingerprint
        if check.verdict == "differs":
            check.first_token = self._first_token(results)
            check.reason = "the answer is another one"
            if check.first_token is None:
                check.reason = "no token differs, and what the answer says about them does"
                if all(each.field == "system_fingerprint" for each in check.differences):
                    words = " and ".join(differing_parts(self.fingerprint, str(self.answer["system_fingerprint"])))
                    check.reason = f"no token differs, but by its fingerprint the answer was made with other: {words}"
        return check

    def _first_token(self, results: Sequence[Generation]) -> FirstToken | None:
        replies = read_replies(self.answer)
        if self.asked.n < self.asked.params.get("n", 1):  # the best of several: which ones is not said
            return None
        for number, (choice, result) in enumerate(zip(self.choices, results, strict=True)):
            if number < len(replies) and (found := find_first(choice, result, replies[number], self.engine.model)):
                return FirstToken(number, *found)
        return None


def make_routes(server: Server) -> list[Route]:
    async def verify(request: Request) -> Response:
        body = await server.body(request)
        try:
            check = await check_answer(request, body["request"], body["answer"])
        except CannotCheck as error:
            check = AnswerCheck.unchecked(error.message)
        return JSONResponse(check.to_dict())

    async def check_answer(request: Request, asked: Mapping[str, Any], answer: Mapping[str, Any]) -> AnswerCheck:
        """Beside the other requests of the engine, which change nothing."""
        path, name = find_path(answer), asked.get("model")
        if server.ignores_unknown(path):
            asked = dict(asked)
            server.unknown.drop(asked, path)
        async with AsyncExitStack() as stack:
            wanted = {"model": name if isinstance(name, str) else None}
            name, engine = await stack.enter_async_context(server.borrow(wanted))
            record_of(request).model = name

            def submit() -> tuple[Recomputation, list[Choice]]:
                again = Recomputation(engine, server.chat_template, asked, answer, name=name)
                return again, again.submit(server.limits.request_timeout_s)

            again, choices = await unless_gone(request, server.work(submit))
            for choice in choices:
                stack.callback(choice.handle.close)
            results = [await unless_gone(request, choice.aresult()) for choice in choices]
            return await server.work(again.judge, results)

    return [Route(PATH, verify, methods=["POST"])]


# -- fields ------------------------------------------------------------------------------------------------------------


def compare(computed: Mapping[str, Any], answer: Mapping[str, Any], path: str) -> AnswerCheck:
    """Compare two answers of one path, without looking for tokens. An answer may lack the fingerprint."""
    expected, given = plain_answer(computed, path), plain_answer(answer, path)
    if "system_fingerprint" not in given:
        expected.pop("system_fingerprint", None)
    errors: list[float] = []
    differences = list(_differences(expected, given, "", errors))
    differences.sort(key=lambda each: each.field == "system_fingerprint")
    verdict, reason = ("differs", "a field differs") if differences else ("equal", "every field is equal")
    check = AnswerCheck(verdict, reason, differences=differences[:SHOWN_DIFFERENCES])
    check.largest_logprob_error = max(errors, default=None)
    return check


# Ids, times, and counts of cached tokens
NOT_COMPARED = {
    "id",
    "call_id",
    "created",
    "created_at",
    "completed_at",
    "prompt_tokens_details",
    "input_tokens_details",
}
# A call's arguments, what the request said, and objects whose keys are texts of tokens
AS_GIVEN = ("input", "tools", "metadata", "text", "top_logprobs", "prompt_logprobs")


def plain_answer(answer: Mapping[str, Any], path: str) -> dict[str, Any]:
    """What of an answer depends on the request and the model alone; null is the same as absent."""
    plain: dict[str, Any] = _plain(answer)
    usage = plain.get("usage")
    if path == messages.PATH and isinstance(usage, dict):  # whose input tokens are those that were not in the cache
        cached = [usage.pop(f"cache_{word}_input_tokens", None) for word in ("read", "creation")]
        if isinstance(usage.get("input_tokens"), int):
            usage["input_tokens"] += sum(count for count in cached if isinstance(count, int))
    return plain


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return [_plain(each) for each in value]
    if not isinstance(value, Mapping):
        return value
    return {
        key: each if key in AS_GIVEN else _plain(each)
        for key, each in value.items()
        if each is not None and key not in NOT_COMPARED
    }


def _differences(computed: Any, answered: Any, place: str, errors: list[float]) -> Iterator[Difference]:
    """Where two values differ. errors: takes how far log probabilities are apart."""
    if isinstance(computed, dict) and isinstance(answered, dict):
        for key in {**computed, **answered}:
            name = f"{place}.{key}" if place else str(key)
            yield from _differences(computed.get(key), answered.get(key), name, errors)
    elif isinstance(computed, list) and isinstance(answered, list):
        for index, pair in enumerate(zip_longest(computed, answered)):
            yield from _differences(*pair, f"{place}[{index}]", errors)
    elif "logprob" in place and isinstance(computed, float) and isinstance(answered, int | float):
        errors.append(abs(computed - answered))
        if not errors[-1] <= LOGPROB_TOLERANCE:
            yield Difference(place, computed, answered)
    elif computed != answered or isinstance(computed, bool) != isinstance(answered, bool):
        yield Difference(place, computed, answered)


# -- lines of a batch --------------------------------------------------------------------------------------------------


def check_line(server: BatchServer, line: bytes, answered: bytes) -> AnswerCheck:
    """Check a line of a batch's answers against its line of requests, both without the end of the line."""
    try:
        entry, answer = schemas.parse_json(line), schemas.parse_json(answered)
        response = answer["response"]
        custom_id, url, status = answer["custom_id"], entry.get("url"), response["status_code"]
        asked, body = entry.get("body"), dict(response["body"])
    except (BitNetRefError, TypeError, KeyError, AttributeError, ValueError):
        return AnswerCheck.unchecked("one of the two lines is no line of a batch")
    is_same_line = answer.get("id") == batch_id(line)
    if custom_id != entry.get("custom_id"):
        other = Difference("custom_id", entry.get("custom_id"), custom_id)
        return AnswerCheck("differs", "the answer is that of another line", differences=[other])
    if status != 200:
        return _check_error(server, line, response)
    if url == "/v1/embeddings":
        return AnswerCheck.unchecked("vectors are not checked, only texts")
    seed = int(digest_of(line)[:15], 16) if is_same_line else None
    try:
        if not isinstance(asked, dict):
            raise CannotCheck("the request's line has no body")
        if is_same_line and url in schemas.BODIES:  # it was answered without its unknown fields
            schemas.UnknownFields().drop(asked, url)
        if (path := find_path(body)) != url:
            other = Difference("url", url, path)
            return AnswerCheck("differs", "the answer is that of another path", differences=[other])
        name, engine = engine_for(server, asked)
        again = Recomputation(engine, server.chat_template, asked, body, name=name, seed=seed)
        choices = again.submit()
        try:
            return again.judge([choice.result() for choice in choices])
        finally:
            for choice in choices:
                choice.handle.close()
    except CannotCheck as error:
        note = "" if is_same_line else " (the line is not, byte for byte, the one that was answered)"
        return AnswerCheck.unchecked(error.message + note)


def _check_error(server: BatchServer, line: bytes, response: Mapping[str, Any]) -> AnswerCheck:
    computed = json.loads(answer_lines(server, [line])[0])["response"]
    expected, given = ({**each, "request_id": None} for each in (computed, response))
    differences = list(_differences(expected, given, "response", []))
    if differences:
        return AnswerCheck("differs", "the answer is an error, and computed is another one", differences=differences)
    return AnswerCheck("equal", "the same error")
