"""One line of the log for each request, answered or refused, and its id: the header `x-request-id`, in and out."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ...errors import EngineClosed
from .choices import Choice

log = logging.getLogger("bitnet_ref.requests")
ID_HEADER = "x-request-id"
GONE = 499  # no status of HTTP: the client went away before its answer
POLLED = ("/health", "/metrics", "/engine")  # their answers are noted at DEBUG only
SHOWN = 200  # characters of a text that a client chose


@dataclass
class RequestRecord:
    """What is noted of a request while it is worked on. prompt_tokens: of requests without `choices`."""

    id: str
    status: int | None = None
    model: str | None = None
    choices: list[Choice] = field(default_factory=list)
    prompt_tokens: int | None = None
    ignored_fields: list[str] = field(default_factory=list)
    error: str | None = None  # the field or the code of what was wrong

    def facts(self) -> dict[str, Any]:
        """Tokens, and seconds since the request reached the engine."""
        if not self.choices:
            return {} if self.prompt_tokens is None else {"prompt_tokens": self.prompt_tokens}
        stories = [choice.handle.story for choice in self.choices]
        prompts = stories[:: self.choices[0].asked.params.get("n", 1)]
        arrival_s = min(story.arrival_s for story in stories)
        starts = [story.start_s - arrival_s for story in stories if story.start_s is not None]
        firsts = [story.first_token_s - arrival_s for story in stories if story.first_token_s is not None]
        return {
            "prompt_tokens": sum(story.prompt_tokens for story in prompts),
            "cached_tokens": sum(story.cached_tokens for story in prompts),
            "completion_tokens": sum({story.request_id: story.generated_tokens for story in stories}.values()),
            "queue_s": round(min(starts), 4) if starts else None,
            "first_token_s": round(min(firsts), 4) if firsts else None,
        }


def record_of(request: Request) -> RequestRecord:
    """The record of a request that came through `RequestLog`."""
    record: RequestRecord = request.scope["bitnet_ref.record"]
    return record


class RequestLog:
    """Middleware, the outermost: gives a request its id and its record, and writes its line when it has ended.

    answer: makes the response to a request that failed.
    """

    def __init__(self, app: ASGIApp, answer: Callable[[Request, Exception], Awaitable[Response]]) -> None:
        self.app, self._answer = app, answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        started_s, given = time.perf_counter(), Headers(scope=scope).get(ID_HEADER, "")
        record = RequestRecord(given if re.fullmatch(r"[!-~]{1,128}", given) else uuid.uuid4().hex)
        scope["bitnet_ref.record"] = record

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                headers = MutableHeaders(scope=message)
                headers[ID_HEADER] = record.id
                if scope["path"].startswith("/v1/messages"):
                    headers["request-id"] = record.id  # Anthropic's name
            await send(message)

        async def answer(error: Exception) -> None:
            await (await self._answer(Request(scope), error))(scope, receive, send_with_id)

        try:
            await self.app(scope, receive, send_with_id)
        except asyncio.CancelledError:  # the server ends; raised again, it would be a traceback in uvicorn's log
            record.error = "server_ended"
            if record.status is None:
                await answer(EngineClosed("the server ended before the request was finished"))
        except Exception as error:
            if record.status is not None:  # the answer has begun
                raise
            await answer(error)
        finally:
            write_line(scope, record, time.perf_counter() - started_s)


def write_line(scope: Scope, record: RequestRecord, total_s: float) -> None:
    status = GONE if record.status is None else record.status
    facts: dict[str, Any] = {
        "id": record.id,
        "method": scope["method"],
        "path": scope["path"][:SHOWN],
        "status": status,
        "client": (scope.get("client") or ("",))[0],
        "model": record.model,
        **record.facts(),
        "total_s": round(total_s, 4),
        "error": record.error,
        "ignored_fields": record.ignored_fields or None,
    }
    facts = {name: value for name, value in facts.items() if value is not None}
    level = logging.DEBUG if status == 200 and scope["path"] in POLLED else logging.INFO
    log.log(level, "%s", " ".join(f"{name}={_plain(value)}" for name, value in facts.items()), extra={"facts": facts})


def _plain(value: Any) -> str:
    """A value as a word: quoted, with escapes, where it is none.

    >>> _plain("a b")
    '"a b"'
    """
    text = ",".join(value) if isinstance(value, list) else str(value)
    return text if re.fullmatch(r"[!#-~]+", text) else json.dumps(text)


class JsonLines(logging.Formatter):
    """Each record as an object in one line; that of a request has its facts in place of a message."""

    def format(self, record: logging.LogRecord) -> str:
        time_s = f"{self.formatTime(record, '%Y-%m-%dT%H:%M:%S')}.{int(record.msecs):03d}"
        entry: dict[str, Any] = {"time": time_s, "level": record.levelname, "logger": record.name}
        facts: Mapping[str, Any] | None = getattr(record, "facts", None)
        entry |= {"message": record.getMessage()} if facts is None else facts
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry)
