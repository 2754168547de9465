"""Items computed here, or by processes on Dask's distributed scheduler (the extra `dask`): `Here` and `DaskWorkers`.

Both have `map(function, items)`, which yields (index, function(resource, item)) as results come. The resource, a model
or an engine, is opened once in each process. At most a few items for each worker thread are with the scheduler at a
time, so that input of any length needs little memory there. When a worker process dies its items are computed again.
"""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from importlib.util import find_spec
from typing import Any, TypeVar

from ..errors import BackendUnavailable, ConfigError
from .forks import ForkLock

log = logging.getLogger(__name__)
AHEAD = 2  # items with the scheduler for each thread of a worker
MAX_DEATHS = 5  # times that the scheduler gave an item up, each after 3 or 4 dead workers
CONNECT_S = 30.0
LOOK_S = 1.0  # how often the workers are counted
ALONE_S = 60.0  # without any worker of our own: Dask starts none in the place of one that died while it started
Opener = tuple[Any, ...]  # a function of a module, and its arguments: hashable, and the same in each process
T = TypeVar("T")
R = TypeVar("R")

_resources: dict[Opener, Any] = {}
_lock = ForkLock()


def open_once(opener: Opener) -> Any:
    """The resource of this process: the last one that was asked for stays."""
    with _lock:  # a worker may have several threads
        if opener not in _resources:
            _resources.clear()
            _resources[opener] = opener[0](*opener[1:])
        return _resources[opener]


def call(opener: Opener, function: Callable[[Any, T], R], item: T) -> R:
    return function(open_once(opener), item)


class Here(AbstractContextManager["Here", None]):
    """This process, which has the resource."""

    def __init__(self, resource: Any) -> None:
        self.resource = resource

    def map(self, function: Callable[[Any, T], R], items: Iterable[T]) -> Iterator[tuple[int, R]]:
        for index, item in enumerate(items):
            yield index, function(self.resource, item)

    def __exit__(self, *_: object) -> None:
        pass


class DaskWorkers(AbstractContextManager["DaskWorkers", None]):
    """`count` processes of this machine, or the workers of the scheduler at `address`, which must trust this process.

    opener: opens the resource of a worker. Raises BackendUnavailable without the extra, or without a scheduler there.
    """

    def __init__(self, opener: Opener, count: int | None = None, address: str | None = None) -> None:
        if (count is None) == (address is None):
            raise ConfigError("expected a number of workers or a scheduler's address, and not both", field="workers")
        if address is not None and not address.strip():
            raise ConfigError("expected a scheduler's address, got a blank one; leave it out", field="dask")
        for package in ("distributed", "cryptography") if address is None else ("distributed",):
            if find_spec(package) is None:
                raise BackendUnavailable(f"workers need {package}: pip install 'bitnet-ref[dask]'")
        from distributed import Client, LocalCluster
        from distributed.security import Security

        self.opener, self.is_own = opener, address is None
        with ExitStack() as stack:
            if address is None:
                # A scheduler runs what a client sends, and any user of this machine can open a connection to it: TLS
                # with a key of this run alone refuses all others.
                settings = {"security": Security.temporary(), "silence_logs": logging.CRITICAL}
                settings["dashboard_address"] = "127.0.0.1:0"
                with _without_interrupts():
                    cluster = LocalCluster(n_workers=count, threads_per_worker=1, memory_limit=0, **settings)
                    stack.enter_context(cluster)
            try:
                client = Client(address or cluster, timeout=CONNECT_S, set_as_default=False)
            except (OSError, ValueError, TypeError) as problem:  # TypeError: tls:// without certificates
                raise BackendUnavailable(f"there is no Dask scheduler at {address}: {problem}") from problem
            self.client = stack.enter_context(client)
            self._stack = stack.pop_all()

    @property
    def dashboard(self) -> str:
        """The address of Dask's page about the run."""
        return str(self.client.dashboard_link)

    def map(self, function: Callable[[Any, T], R], items: Iterable[T]) -> Iterator[tuple[int, R]]:
        """Raises what `function` raises, and BackendUnavailable for an item that ends the process of its worker."""
        from distributed import KilledWorker, as_completed

        waiting, places, deaths = iter(enumerate(items)), dict[str, tuple[int, T]](), dict[int, int]()
        running = as_completed([], loop=self.client.loop, with_results=True, raise_errors=False)
        room, counted_s, seen_s = 0, -LOOK_S, time.monotonic()

        def submit(index: int, item: T) -> None:
            future = self.client.submit(call, self.opener, function, item, pure=False)
            places[future.key] = index, item
            running.add(future)

        while True:
            if time.monotonic() - counted_s > LOOK_S:
                threads = sum(self.client.nthreads().values())
                room, counted_s = max(1, AHEAD * threads), time.monotonic()
                if threads:
                    seen_s = counted_s
                elif self.is_own and counted_s - seen_s > ALONE_S:
                    raise BackendUnavailable("all workers have ended, and none starts: too little memory for them?")
            while len(places) < room and (entry := next(waiting, None)) is not None:
                submit(*entry)
            if not places:
                return
            if not running.has_ready():
                with running.thread_condition:
                    running.thread_condition.wait(0.1)
                continue
            future, result = next(running)
            index, item = places.pop(future.key)
            if future.status == "cancelled":
                message = "the connection to the Dask scheduler was lost; run it again: it goes on where it was"
                raise BackendUnavailable(message)
            if future.status == "error":
                if not isinstance(problem := future.exception(), KilledWorker):
                    raise problem
                deaths[index] = deaths.get(index, 0) + 1
                if deaths[index] > MAX_DEATHS:
                    message = f"item {index} was lost {deaths[index]} times with its worker: too little memory there?"
                    raise BackendUnavailable(message) from problem
                log.info("item %d was lost with its workers: it is computed again", index)
                submit(index, item)
                continue
            yield index, result

    def __exit__(self, *_: object) -> None:
        self._stack.close()


@contextmanager
def _without_interrupts() -> Iterator[None]:
    """Ctrl-C waits for the end of the block. Threads and processes that start in it never get one: this process ends
    them."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


Workers = Here | DaskWorkers
