"""`DrainingServer`: uvicorn's server, which ends the requests that are unfinished when the drain time is over."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable

import uvicorn

GRACE_S = 5  # for the last answers to reach their clients


class DrainingServer(uvicorn.Server):
    """After a signal, requests have `drain_s` to finish. Then `end_requests` makes unfinished texts fail, so that their
    clients get an error. `GRACE_S` later uvicorn cancels the tasks of what is left: other routes, and clients that do
    not read.
    """

    def __init__(self, config: uvicorn.Config, drain_s: int, end_requests: Callable[[], Awaitable[None]]) -> None:
        super().__init__(config)
        config.timeout_graceful_shutdown = drain_s + GRACE_S
        self._drain_s, self._end_requests = drain_s, end_requests

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """What uvicorn does after a signal; returns when all requests have ended."""
        ending = asyncio.create_task(self._end_late())
        await super().shutdown(sockets)
        ending.cancel()

    async def _end_late(self) -> None:
        await asyncio.sleep(self._drain_s)
        await self._end_requests()
