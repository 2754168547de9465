"""The server: an ASGI application with the routes of OpenAI and others, over the engines of a `ModelShelf`."""

from __future__ import annotations

import asyncio
import hmac
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from ipaddress import ip_address
from typing import Any

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from ...errors import BitNetRefError
from . import llama_server, messages, ollama, ranking, responses
from .admission import LeaveAtTheEnd, ServerLimits
from .failures import describe_failure, shape_failure
from .request_log import ID_HEADER, RequestLog, record_of
from .schemas import RequestError
from .server import Server
from .shapes import read_chat, read_completion
from .shelf import ModelShelf

OPEN_PATHS = ("/", "/health")  # need no key
RETRY_AFTER_S = {429: "1", 503: "5"}


# -- errors ------------------------------------------------------------------------------------------------------------


async def answer_failure(request: Request, error: Exception) -> Response:
    """The answer to a request that failed, or was refused."""
    if isinstance(error, ClientDisconnect):
        return Response(status_code=499)  # the client has gone
    headers: dict[str, str] = {}
    if isinstance(error, HTTPException):
        headers, error = dict(error.headers or {}), RequestError(error.detail, status=error.status_code)
    status, facts = describe_failure(error)
    details = facts["error"]
    record_of(request).error = details["param"] or details["code"] or details["type"]
    if status in RETRY_AFTER_S:
        headers["retry-after"] = RETRY_AFTER_S[status]
    return JSONResponse(shape_failure(request.scope["path"], status, facts), status, headers=headers)


class Gate:
    """Middleware: what `check` raises for a request is the answer."""

    def __init__(self, app: ASGIApp, check: Callable[[Request], None]) -> None:
        self.app, self._check = app, check

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self.app
        if scope["type"] == "http":
            try:
                self._check(Request(scope))
            except RequestError as error:
                app = await answer_failure(Request(scope), error)
        await app(scope, receive, send)


def check_host(allowed: tuple[str, ...], request: Request) -> None:
    """Refuse other host names than these; "*" is any name, "*.example.com" any that ends so. Raises RequestError."""
    host = _plain_host(re.sub(r":\d{0,5}$", "", request.headers.get("host", "")[:300]))
    for name in map(_plain_host, allowed):
        if host == name or (name.startswith("*") and host.endswith(name[1:])):
            return
    raise RequestError(f"this server is not called {host[:100]!r}; its option --allow-host gives it more names")


def _plain_host(name: str) -> str:
    """
    >>> _plain_host("[0:0::1]")
    '::1'
    """
    name = name.removeprefix("[").removesuffix("]").lower()
    try:
        return str(ip_address(name))
    except ValueError:
        return name


def check_key(keys: tuple[str, ...], request: Request) -> None:
    """Refuse requests without one of the keys, unless their path needs none. Raises RequestError."""
    given = request.headers.get("authorization", "")
    if not given and "x-api-key" in request.headers:  # Anthropic's clients
        given = f"Bearer {request.headers['x-api-key']}"
    scheme, _, token = given.partition(" ")
    matches = [hmac.compare_digest(token.strip().encode("latin-1"), key.encode()) for key in keys]  # all, in any case
    if request.scope["path"] not in OPEN_PATHS and (scheme.lower() != "bearer" or not any(matches)):
        text = "a key is needed: Authorization: Bearer KEY" if not given else "this key is not valid"
        raise RequestError(text, status=401, code="invalid_api_key")


class OriginCheck(CORSMiddleware):
    """CORS; what it refuses gets OpenAI's JSON."""

    def preflight_response(self, request_headers: Headers) -> Response:
        response = super().preflight_response(request_headers)
        if response.status_code < 400:
            return response
        text = f"{bytes(response.body).decode()}; the server's option --allow-origin names the pages that may use it"
        del response.headers["content-length"], response.headers["content-type"]
        return JSONResponse(describe_failure(RequestError(text))[1], response.status_code, dict(response.headers))


def create_app(
    shelf: ModelShelf,
    limits: ServerLimits | None = None,
    *,
    api_keys: tuple[str, ...] = (),
    chat_template: str | None = None,
    origins: tuple[str, ...] = (),
    hosts: tuple[str, ...] = (),
    version: str = "0",
    verify: bool = False,
    unknown_fields: str | None = None,
) -> Starlette:
    """The application.

    api_keys: one of them is needed, if there are any. origins: web pages that may use the server (CORS). hosts: names
    under which it may be called, since a web page can give 127.0.0.1 a name of its own; none: all. version: of the
    OpenAPI page. verify: with `/v1/verify`. unknown_fields: "refuse", or "warn", which takes requests without them;
    None: "warn" on the paths of `server.UNKNOWN_IGNORED` alone.
    """
    server = Server(shelf, limits or ServerLimits(), chat_template, version, unknown_fields)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        tasks = [asyncio.create_task(shelf.load_first()), asyncio.create_task(shelf.drop_idle())]
        tasks[0].add_done_callback(lambda task: task.cancelled() or app.state.on_loaded(task.exception()))
        yield
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await shelf.close(drain=False)  # the requests have ended: uvicorn waits for them first

    handlers: dict[Any, Any] = dict.fromkeys((BitNetRefError, HTTPException, ClientDisconnect), answer_failure)
    middleware = [Middleware(RequestLog, answer=answer_failure), Middleware(LeaveAtTheEnd, admission=server.admission)]
    if hosts:
        middleware.append(Middleware(Gate, check=partial(check_host, hosts)))
    if origins:
        allowed: dict[str, Any] = {"allow_origins": list(origins), "allow_methods": ["*"], "allow_headers": ["*"]}
        allowed["expose_headers"] = [ID_HEADER]
        middleware.append(Middleware(OriginCheck, **allowed))
    if api_keys:
        middleware.append(Middleware(Gate, check=partial(check_key, api_keys)))
    posts = {"/v1/embeddings": server.embeddings, "/tokenize": server.tokenize, "/detokenize": server.detokenize}
    gets = {
        "/v1/models": server.models,
        "/v1/models/{name:path}": server.model,
        "/tokenizer_info": server.tokenizer_info,
        "/": server.page,
        "/engine": server.engine,
        "/health": server.health,
        "/metrics": server.metrics,
        "/openapi.json": server.openapi,
    }
    routes = [server.route_texts("/v1/completions", read_completion)]
    routes.append(server.route_texts("/v1/chat/completions", read_chat))
    routes += [Route(path, function, methods=["POST"]) for path, function in posts.items()]
    routes += [Route(path, function, methods=["GET"]) for path, function in gets.items()]
    for api in (responses, messages, ollama, llama_server, ranking):
        routes += api.make_routes(server)
    if verify:
        from . import verify as verification

        routes += verification.make_routes(server)
        server.more_paths.append(verification.PATH)
    app = Starlette(routes=routes, middleware=middleware, exception_handlers=handlers, lifespan=lifespan)
    app.state.on_loaded = lambda error: None
    return app
