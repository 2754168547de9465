"""What the routes share: a request's body, its admission, its texts, whole or as a stream.

A request's prompts are submitted in a thread, because tokenizing takes time. Each text is then read by a task of its
own: a stream that its client does not read fills its connection, then its queue, and pauses that text alone. A client
that goes away is noticed at any time, and its texts are cancelled.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any, TypeVar

import numpy as np
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from ...backends.loaded import LoadedModel
from ...errors import GenerationError
from ...generation.embed import embed
from ..engine import Engine
from ..metrics import render_metrics
from . import schemas
from .admission import Admission, ServerLimits
from .chat_prompt import chat_ids
from .choices import Asked, Choice, Writer
from .failures import blame, describe_failure
from .fingerprint import fingerprint_of, has_fingerprint
from .page import describe_engine, render_page
from .request_log import record_of
from .schemas import RequestError
from .shapes import Read, embedding_ids, embedding_response, name_marks
from .shelf import ModelShelf
from .waiting import unless_gone
from .writers import OpenAIWriter

# Agents and editors call these; their next version sends a field more. People write the requests of the others by hand.
UNKNOWN_IGNORED = ("/v1/responses", "/v1/messages", "/api/")
QUIET_S = 15.0  # a stream without news sends a comment, so that a proxy keeps it open
EMBEDDING_TEXTS = 16  # at a time; between them a client that went away is noticed
T = TypeVar("T")


class Server:
    """The routes. chat_template: Jinja source, instead of the models' own."""

    def __init__(
        self,
        shelf: ModelShelf,
        limits: ServerLimits,
        chat_template: str | None,
        version: str,
        unknown_fields: str | None,
    ) -> None:
        """unknown_fields: "refuse", "warn", or None: as `UNKNOWN_IGNORED` says."""
        self.shelf, self.limits, self.chat_template, self.version = shelf, limits, chat_template, version
        self.unknown_fields, self.unknown = unknown_fields, schemas.UnknownFields()
        self.more_paths: list[str] = []  # of `schemas.OFF_BY_DEFAULT`, those that this server has
        self.admission = Admission(limits)
        self.work = self.admission.work  # in a thread

    # -- text ------------------------------------------------------------------------------------------------------

    def route_texts(self, path: str, read: Read) -> Route:
        """The route of requests for texts that `read` reads."""

        async def generate(request: Request) -> Response:
            return await self.answer(request, await self.body(request), read)

        return Route(path, generate, methods=["POST"])

    async def answer(self, request: Request, body: Mapping[str, Any], read: Read) -> Response:
        """The response to a checked body: its texts, whole or as a stream."""
        async with AsyncExitStack() as stack:
            name, engine = await stack.enter_async_context(self.borrow(body))

            def prepare() -> Asked:
                asked = read(body, name, engine, self.chat_template)
                asked.fingerprint = fingerprint_of(engine, self.chat_template)
                return asked

            is_small = self.admission.is_small and body.get("previous_response_id") is None
            is_small = is_small and has_fingerprint(engine.model)
            asked = prepare() if is_small else await unless_gone(request, self.work(prepare))
            submit = partial(asked.submit, engine, self.limits.request_timeout_s)
            is_quick = is_small and asked.is_quick(engine)
            choices = submit() if is_quick else await unless_gone(request, self.work(submit))
            record_of(request).choices = choices
            for choice in choices:
                stack.callback(choice.handle.close)
            writer = (asked.writer or OpenAIWriter)(asked, choices)
            if asked.stream:
                events = StreamEvents(writer)
                stack.push_async_callback(events.aclose)
                first = await unless_gone(request, events.first())  # an error before it gets its own status
                return EventStream(request, first, events, stack.pop_all())
            results = await unless_gone(request, wait_for_all(choices))
            return JSONResponse(await self.work(writer.whole, results))

    # -- everything else -------------------------------------------------------------------------------------------

    async def embeddings(self, request: Request) -> Response:
        body = await self.body(request)
        name, vectors, tokens = await self.read_texts(request, body, lambda model: self.embed(model, body))
        return JSONResponse(embedding_response(body, name, vectors, tokens))

    async def read_texts(
        self, request: Request, body: Mapping[str, Any], work: Callable[[LoadedModel], Awaitable[tuple[T, int]]]
    ) -> tuple[str, T, int]:
        """The name of the model that a body names, the result of `work` with it, and the tokens that were read."""
        async with self.borrow(body) as (name, engine):
            result, tokens = await unless_gone(request, work(engine.adapted_model))
            record_of(request).prompt_tokens = tokens
        return name, result, tokens

    async def embed(self, model: LoadedModel, body: Mapping[str, Any]) -> tuple[np.ndarray, int]:
        """The vectors of texts or of lists of token ids, the `input` of a body, and the tokens of all."""
        rows = await self.work(embedding_ids, model, body)
        vectors = await self.compute_rows(partial(embed, model, dimensions=body.get("dimensions")), rows)
        return np.concatenate(vectors), sum(map(len, rows))

    async def compute_rows(self, compute: Callable[[list[Any]], T], rows: list[Any]) -> list[T]:
        """`compute` for some rows after the others, while no other request's are computed."""
        parts = [rows[first : first + EMBEDDING_TEXTS] for first in range(0, len(rows), EMBEDDING_TEXTS)]
        return [await self.admission.compute(compute, part) for part in parts]

    async def tokenize(self, request: Request) -> Response:
        body = await self.body(request)
        if (body.get("prompt") is None) == (body.get("messages") is None):
            raise RequestError("expected either a prompt or messages", "prompt")
        async with self.borrow(body) as (_, engine):

            def answer() -> Response:
                model = engine.model
                if body.get("messages") is not None:
                    tokens = chat_ids(model, body, self.chat_template, bool(body.get("tools")))
                else:
                    tokens = model.tokenizer.encode(body["prompt"], body.get("add_special_tokens") is not False)
                texts = list(map(model.tokenizer.id_to_token, tokens)) if body.get("return_token_strs") else None
                facts = {"count": len(tokens), "max_model_len": model.context_length}
                return JSONResponse({**facts, "tokens": tokens, "token_strs": texts})

            return await self.work(answer)

    async def detokenize(self, request: Request) -> Response:
        body = await self.body(request)
        async with self.borrow(body) as (_, engine):
            text = await self.work(partial(engine.model.tokenizer.decode, skip_special_tokens=False), body["tokens"])
            return JSONResponse({"prompt": text})

    async def tokenizer_info(self, request: Request) -> Response:
        async with self.borrow(dict(request.query_params)) as (name, engine):
            tokenizer = engine.model.tokenizer
            sizes = {"vocab_size": tokenizer.vocab_size, "model_max_length": engine.model.context_length}
            template = self.chat_template or tokenizer.chat_template
            kind = {"model": name, "tokenizer_class": type(tokenizer).__name__}
            return JSONResponse({**kind, **sizes, **name_marks(tokenizer), "chat_template": template})

    async def models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._model_facts(name) for name in self.shelf.places]})

    async def model(self, request: Request) -> Response:
        return JSONResponse(self._model_facts(self.shelf.name(request.path_params["name"])))

    def _model_facts(self, name: str) -> dict[str, Any]:
        place = self.shelf.places[name]
        engine = (place.base or place).engine
        length = None if engine is None else engine.model.context_length
        facts = {"id": name, "object": "model", "created": 0, "owned_by": "bitnet_ref"}
        if place.base is not None:  # a LoRA adapter; vLLM's name
            facts["parent"] = place.base.name
        return {**facts, "loaded": engine is not None, "max_model_len": length}

    async def health(self, request: Request) -> Response:
        is_ready = self.shelf.is_ready
        return JSONResponse({"status": "ok" if is_ready else "loading"}, 200 if is_ready else 503)

    async def metrics(self, request: Request) -> Response:
        loaded = [place.engine for place in self.shelf.unique_places if place.engine is not None]
        text, kind = render_metrics([engine.metrics for each in loaded for engine in each.engines])
        return Response(text, headers={"content-type": kind})

    async def page(self, request: Request) -> Response:
        content, headers = await asyncio.to_thread(render_page)
        return Response(content, headers=headers)

    async def engine(self, request: Request) -> Response:
        """What the page's live view shows. It does not load the model."""
        model, numbers = self.shelf.name(request.query_params.get("model")), dict[str, int]()
        place = self.shelf.places[model]
        place = place.base or place
        for name in ("replica", "after"):
            text = request.query_params.get(name, "0")
            if re.fullmatch("[0-9]{1,18}", text) is None:
                raise RequestError(f"expected a whole number, got {text[:50]!r}", name)
            numbers[name] = int(text)
        facts = {"model": model, "loaded": place.engine is not None}
        if place.engine is not None:
            facts |= await asyncio.to_thread(describe_engine, place.engine, **numbers)
        return JSONResponse(facts)

    async def openapi(self, request: Request) -> Response:
        return JSONResponse(schemas.describe_api(self.version, self.more_paths))

    @asynccontextmanager
    async def borrow(self, body: Mapping[str, Any]) -> AsyncIterator[tuple[str, Engine]]:
        name = self.shelf.name(body.get("model"))
        async with self.shelf.borrow(self.shelf.places[name]) as engine:
            yield name, engine

    async def body(self, request: Request) -> dict[str, Any]:
        """The request's JSON, checked. Raises RequestError."""
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        is_page = "origin" in request.headers or "sec-fetch-site" in request.headers
        needs_kind = is_page or not request.scope["path"].startswith("/api/")  # Ollama's clients and docs name none
        if kind != "application/json" and needs_kind:  # a web page of another site can send other kinds unasked
            raise RequestError("content-type: expected application/json", status=415)
        data = await self.admission.read(request)

        def parse() -> dict[str, Any]:
            body: dict[str, Any] = schemas.parse_json(data)
            if isinstance(body, dict):
                record_of(request).model = self.shelf.known_name(body.get("model"))
                if self.ignores_unknown(request.scope["path"]):
                    record_of(request).ignored_fields = self.unknown.drop(body, request.scope["path"])
            schemas.check(body, request.scope["path"])  # `request.url` is made of the Host header too
            return body

        return parse() if self.admission.is_small else await self.work(parse)

    def ignores_unknown(self, path: str) -> bool:
        """Whether fields that are not known are left out of a request, not refused."""
        return self.unknown_fields == "warn" or (self.unknown_fields is None and path.startswith(UNKNOWN_IGNORED))


# -- waiting for texts -------------------------------------------------------------------------------------------------


async def wait_for_all(choices: list[Choice]) -> list[Any]:
    """The results. Raises the error of the first that fails."""
    try:
        return [await choice.aresult() for choice in choices]
    except GenerationError as error:
        raise blame(error) from error


class StreamEvents:
    """The texts of a stream, as `writer` writes them. Each text has a task that reads it and waits until its chunk is
    sent."""

    def __init__(self, writer: Writer) -> None:
        self._writer, self.media_type = writer, writer.media_type
        self._queue: asyncio.Queue[Any] = asyncio.Queue(maxsize=1)  # parts, errors, None: a text has ended
        self._tasks = [asyncio.create_task(self._follow(choice)) for choice in writer.choices]
        self._running = len(writer.choices)
        self.has_failed = False

    async def _follow(self, choice: Choice) -> None:
        handle = choice.handle
        try:
            async for chunk in handle:
                if self._writer.asked.top is None:
                    part = self._writer.part(choice, chunk)
                else:  # reading a log probability may compute the whole head
                    part = await asyncio.to_thread(self._writer.part, choice, chunk)
                if part is not None:
                    await self._queue.put(part)
            await self._queue.put(None)
        except Exception as error:
            await self._queue.put(blame(error))

    async def first(self) -> str:
        """The first events, as soon as there is a chunk. Raises the error of a request that fails before that."""
        event = await self._queue.get()
        if isinstance(event, BaseException):
            raise event
        return self._writer.opening() + self._write(event)

    async def rest(self) -> AsyncIterator[str]:
        while self._running:
            try:
                async with asyncio.timeout(QUIET_S):
                    event = await self._queue.get()
            except TimeoutError:
                yield self._writer.quiet
                continue
            yield self._write(event)
        if not self.has_failed:
            yield self._writer.closing()

    def _write(self, event: Any) -> str:
        if event is None:
            self._running -= 1
            return ""
        if isinstance(event, BaseException):
            self._running, self.has_failed = 0, True
            return self._writer.failure(*describe_failure(event))
        return self._writer.text(event)

    async def aclose(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


class EventStream(Response):
    """The pieces of a stream; `stack` is closed after the last one, or when the client goes away."""

    def __init__(self, request: Request, first: str, events: StreamEvents, stack: AsyncExitStack) -> None:
        super().__init__(headers={"content-type": events.media_type, "cache-control": "no-cache"})
        del self.headers["content-length"]
        self._request, self._first, self._events, self._stack = request, first, events, stack

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_all() -> None:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await send({"type": "http.response.body", "body": self._first.encode(), "more_body": True})
            async for text in self._events.rest():
                if text:
                    await send({"type": "http.response.body", "body": text.encode(), "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
            if self._events.has_failed:
                record_of(self._request).error = "failed_in_stream"

        async with self._stack:
            try:
                await unless_gone(self._request, send_all())
            except ClientDisconnect:
                record_of(self._request).error = "client_gone"
