"""Admission: how many requests are worked on at a time, how many bytes of bodies they hold, how long and where.

Every route whose body is read with `Admission.read` is admitted so; a route that reads no body does no work for long.
Work on a large body has a thread of its own: small requests do not wait behind it, nor does /health. What a small body
asks for is read in the event loop: on a busy machine a thread waits longer for its turn than this takes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from contextvars import ContextVar, copy_context
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ...errors import RequestTimeout
from .schemas import RequestError

SMALL_BODY = 4 << 10  # bytes
LARGE_BODY = 64 << 10
BODIES = 16  # so many of the largest size are held at a time
DRAINED = 16  # times the largest body: so much is read of one that is refused, that its client reads the answer
T = TypeVar("T")


@dataclass(frozen=True)
class ServerLimits:
    """What the server accepts. max_streams: requests at a time. body_timeout_s: to send a whole body."""

    max_body_bytes: int = 4 << 20
    max_streams: int = 256
    body_timeout_s: float = 30.0
    request_timeout_s: float | None = None


@dataclass
class _Intake:
    """Of one request: whether its body has been read to its end, the bytes of it so far, whether it was admitted, and
    until when, by the event loop's time."""

    is_read: bool
    nbytes: int = 0
    is_admitted: bool = False
    deadline_s: float | None = None


_current: ContextVar[_Intake] = ContextVar("request")


class Admission:
    """The requests that are worked on."""

    def __init__(self, limits: ServerLimits) -> None:
        self.limits, self.running, self.nbytes = limits, 0, 0
        self._large = ThreadPoolExecutor(1, thread_name_prefix="large-body")
        self._model = ThreadPoolExecutor(1, thread_name_prefix="embeddings")

    async def read(self, request: Request) -> bytes:
        """The body of a request, which is admitted then until its response has ended. Raises RequestError."""
        data, limit = bytearray(), self.limits.max_body_bytes
        too_large = RequestError(f"the body has more than {limit} bytes, which is the maximum", status=413)
        announced = request.headers.get("content-length", "")
        if "expect" in request.headers and announced.isdecimal() and int(announced[:20]) > limit:
            raise too_large  # the client has not sent it yet
        try:
            async with asyncio.timeout(self.limits.body_timeout_s):
                async for part in request.stream():
                    data += part
                    if len(data) > limit:
                        raise too_large
        except TimeoutError:
            _current.get().is_read = True  # so that nothing waits for the rest of the body
            raise RequestError(f"the body did not arrive within {self.limits.body_timeout_s:g} s", status=408) from None
        self._enter(_current.get(), len(data))
        return bytes(data)

    def _enter(self, intake: _Intake, nbytes: int) -> None:
        if self.running >= self.limits.max_streams:
            raise RequestError(f"{self.running} requests are running, which is the maximum", status=429)
        if self.running and self.nbytes + nbytes > BODIES * self.limits.max_body_bytes:
            message = f"the requests that are running hold {self.nbytes} bytes; this one of {nbytes} has to wait"
            raise RequestError(message, status=429)
        intake.is_admitted, intake.nbytes = True, nbytes
        if (timeout_s := self.limits.request_timeout_s) is not None:
            intake.deadline_s = asyncio.get_running_loop().time() + timeout_s
        self.running += 1
        self.nbytes += nbytes

    def leave(self, intake: _Intake) -> None:
        self.running -= intake.is_admitted
        self.nbytes -= intake.nbytes if intake.is_admitted else 0

    @property
    def is_small(self) -> bool:
        """Whether the body of this task's request is read in well below a millisecond."""
        return _current.get().nbytes <= SMALL_BODY

    async def work(self, function: Callable[..., T], *args: object) -> T:
        """function(*args) in a thread. Raises RequestTimeout when the request's time is over; the thread goes on."""
        return await self._in(self._large if _current.get().nbytes > LARGE_BODY else None, function, *args)

    async def compute(self, function: Callable[..., T], *args: object) -> T:
        """The same for passes of a model: one at a time, also of requests that were given up, beside the engines."""
        return await self._in(self._model, function, *args)

    async def _in(self, executor: ThreadPoolExecutor | None, function: Callable[..., T], *args: object) -> T:
        call = partial(copy_context().run, function, *args)
        try:
            async with asyncio.timeout_at(_current.get().deadline_s):
                return await asyncio.get_running_loop().run_in_executor(executor, call)
        except TimeoutError:
            raise RequestTimeout(f"the request is not finished after {self.limits.request_timeout_s:g} s") from None


class LeaveAtTheEnd:
    """Middleware: a request that was admitted leaves when its response has been sent, or failed.

    Before a response begins, the rest of its request's body is read: a client that still sends would meet a closed
    connection, and not read why it was refused. A client that expects 100-continue has not begun to send.
    """

    def __init__(self, app: ASGIApp, admission: Admission) -> None:
        self.app, self._admission = app, admission

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        intake = _Intake(is_read=any(name.lower() == b"expect" for name, _ in scope["headers"]))
        _current.set(intake)

        async def receive_part() -> Message:
            message = await receive()
            intake.nbytes += len(message.get("body", b""))
            intake.is_read = not message.get("more_body", False)
            return message

        async def send_after_body(message: Message) -> None:
            limits = self._admission.limits
            if message["type"] == "http.response.start" and not intake.is_read:
                with suppress(TimeoutError):
                    async with asyncio.timeout(limits.body_timeout_s):
                        while not intake.is_read and intake.nbytes <= DRAINED * limits.max_body_bytes:
                            await receive_part()
            await send(message)

        try:
            await self.app(scope, receive_part, send_after_body)
        finally:
            self._admission.leave(intake)
