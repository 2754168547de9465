"""`Engine`: many requests at a time on one model, by continuous batching.

Requests join and leave the running batch at any step, and prefill and decode share a step (Orca, OSDI 2022). The cache
is paged and shared (PagedAttention, arXiv 2309.06180). By the model's batch invariance every request gets the tokens,
texts and log probabilities that it gets alone, whatever else runs.

Who does what: `scheduler.py` decides who takes part in a step, `pages.py` which page holds what, `step.py` computes it,
`worker.py` is the thread that does one after the other, `tickets.py` what a request's user holds of it. Here is the
face.
"""

from __future__ import annotations

import itertools
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError, GenerationError, QueueFull
from ..generation.generate import _is_single, check_streamable
from ..generation.params import SamplingParams
from ..generation.results import Generation
from ..generation.sequence import Request
from ..reference.cache import KVCache
from .engine_config import EngineConfig
from .metrics import EngineMetrics
from .step import StepRecord
from .tickets import RequestHandle, RequestState, Ticket
from .worker import Worker

if TYPE_CHECKING:
    from ..api import Model
    from ..notebook.widgets import LiveView

CACHE_SHARE = 4  # the default cache takes at most one part in so many of the memory that is free


class Engine:
    """Serves any number of callers from one model.

        with model.engine(max_batch=32) as engine:
            for chunk in engine.stream("Once upon a time", max_tokens=64): ...  # any number of threads may
            outs = engine.generate(prompts, temperature=0.7)

        async with model.engine() as engine:
            async for chunk in engine.stream("Once upon a time"): ...
            outs = await engine.agenerate(prompts)

    config: an `EngineConfig`, or its settings as keyword arguments. Its thread starts with the first request. Raises
    ConfigError, OutOfMemory.
    """

    def __init__(self, model: Model, config: EngineConfig | None = None, **settings: Any) -> None:
        if config is not None and settings:
            raise ConfigError(f"given beside a config: {', '.join(settings)}; use dataclasses.replace", field="config")
        self.model = model
        self.config = config if config is not None else EngineConfig.of(**settings)
        self._worker = Worker(model, self.config, new_cache(model, self.config))
        self._numbers = itertools.count()
        self._finalizer = weakref.finalize(self, self._worker.close, False)

    def __repr__(self) -> str:
        now = self.metrics.snapshot()
        state = "closed" if self._worker.closed else f"{now['num_requests_running']} requests running"
        return f"<bitnet_ref.Engine of {self.model!r}: {state}, {now['num_requests_waiting']} waiting>"

    # -- requests ------------------------------------------------------------------------------------------------------

    def submit(
        self, prompt: str | Sequence[int], *, priority: int = 0, timeout_s: float | None = None, **params: Any
    ) -> RequestHandle:
        """Queue one prompt (text or token ids). Bad arguments raise here.

        priority: higher goes first; see `EngineConfig.priority_wait_s`. timeout_s: to be finished by then. params: of
        `SamplingParams`. Raises GenerationError, TokenizerError, QueueFull, EngineClosed.
        """
        return self._submit(prompt, self._sampling(params), priority, timeout_s)

    def stream(
        self, prompt: str | Sequence[int], *, priority: int = 0, timeout_s: float | None = None, **params: Any
    ) -> RequestHandle:
        """`submit` for one continuation, to read chunk by chunk: `for` and `async for` both work."""
        sampling = self._sampling(params)
        check_streamable(sampling)
        return self._submit(prompt, sampling, priority, timeout_s)

    def generate(self, prompt: Any, **params: Any) -> Generation | list[Generation] | list[list[Generation]]:
        """What `Model.generate` gives, for one prompt or a list, beside everything else that runs. An error or an
        interrupt ends all of the call's requests. `priority` and `timeout_s` as in `submit`."""
        requests = _Requests(self, prompt, params)
        try:
            while requests.fill():
                requests.oldest.result()
            return requests.results()
        finally:
            requests.close()

    async def agenerate(self, prompt: Any, **params: Any) -> Generation | list[Generation] | list[list[Generation]]:
        """`generate`, for asyncio. Cancelling it cancels its requests."""
        requests = _Requests(self, prompt, params)
        try:
            while requests.fill():
                await requests.oldest.aresult()
            return requests.results()
        finally:
            requests.close()

    def _sampling(self, params: dict[str, Any]) -> SamplingParams:
        sampling = self.config.params(params)
        if sampling.num_beams > 1:
            raise GenerationError(
                f"num_beams: the engine has no beam search, got {sampling.num_beams}; use model.generate"
            )
        return sampling

    def _submit(
        self, prompt: str | Sequence[int], params: SamplingParams, priority: int, timeout_s: float | None
    ) -> RequestHandle:
        self._worker.check_process()
        if not _is_single(prompt):
            raise GenerationError("expected one prompt: a text or a list of token ids; generate takes many")
        if isinstance(priority, bool) or not isinstance(priority, int):
            raise GenerationError(f"priority: expected a whole number, got {priority!r}")
        if timeout_s is not None and not (isinstance(timeout_s, int | float) and timeout_s > 0):
            raise GenerationError(f"timeout_s: expected a number > 0, got {timeout_s!r}")
        request = Request(self.model, prompt, params)
        pool = self._worker.pool
        if pool.pages_for(request.capacity) > pool.pages:
            raise GenerationError(
                f"the prompt has {len(request.prompt)} tokens and {request.max_tokens} more are asked for, but the "
                f"engine's cache holds {pool.pages * pool.page_size}; lower max_tokens, or raise cache_tokens"
            )
        timeout_s = self.config.request_timeout_s if timeout_s is None else timeout_s
        ticket = Ticket(next(self._numbers), request, priority, timeout_s, self.model.backend.name)
        ticket.stats.describe(self.cache)
        handle = RequestHandle(self, ticket)  # first: an interrupt from here on drops it, which cancels
        self._worker.submit(ticket)
        return handle

    def _cancel(self, ticket: Ticket) -> None:
        self._worker.cancel(ticket)

    # -- what it does --------------------------------------------------------------------------------------------------

    @property
    def metrics(self) -> EngineMetrics:
        """Counters and latencies: `metrics.snapshot()`, `metrics.register()` for Prometheus."""
        return self._worker.metrics

    @property
    def timeline(self) -> deque[StepRecord]:
        """The last `timeline_steps` steps, oldest first: who did what, and when. Copy it to look at it: it goes on."""
        return self._worker.timeline

    @property
    def requests(self) -> list[RequestState]:
        """What is not finished: who waits, who runs, and how far each is."""
        return self._worker.requests()

    @property
    def closed(self) -> bool:
        return self._worker.closed

    def live(self, interval_s: float = 0.5) -> LiveView:
        """A view of all this that keeps itself up to date, in JupyterLab or by rich; see `widgets.LiveView`. It keeps
        neither the engine nor the model alive."""
        from ..notebook.widgets import LiveView

        return LiveView(_looking_at(weakref.ref(self)), interval_s)

    @property
    def cache(self) -> KVCache:
        """The pages of all sequences."""
        return self._worker.cache

    # -- the end -------------------------------------------------------------------------------------------------------

    def close(self, drain: bool = False) -> None:
        """Take no more requests, and return when the engine's thread is gone. What runs ends with EngineClosed, or
        with `drain` as it should. The model stays usable."""
        self._worker.close(drain)

    async def aclose(self, drain: bool = False) -> None:
        """`close`, without holding up the event loop."""
        import asyncio

        await asyncio.to_thread(self._worker.close, drain)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        """Without an error, what was asked for is finished first."""
        self.close(drain=error is None)

    async def __aenter__(self) -> Engine:
        return self

    async def __aexit__(self, error: type[BaseException] | None, *_: object) -> None:
        await self.aclose(drain=error is None)


def _looking_at(engine: weakref.ref[Engine]) -> Callable[[], tuple[dict[str, Any], list[RequestState], bool]]:
    """-> metrics, requests and whether it has ended, of an engine that may be gone: then what was seen last."""
    last: dict[str, Any] = {}

    def look() -> tuple[dict[str, Any], list[RequestState], bool]:
        here = engine()
        if here is None:
            return last, [], True
        last.update(here.metrics.snapshot())
        return last, here.requests, here.closed

    return look


class _Requests:
    """The prompts of one call of `generate`. As many are in the engine as can run: the others do not fill its queue."""

    def __init__(self, engine: Engine, prompt: Any, params: dict[str, Any]) -> None:
        self.single = _is_single(prompt)
        self.prompts = [prompt] if self.single else list(prompt)
        if not self.prompts:
            raise GenerationError("expected a prompt or a list of prompts, got an empty list")
        self._engine, self._params = engine, params
        self._handles: list[RequestHandle] = []
        self._waited_for = 0

    def fill(self) -> bool:
        """Submit what may be. False: all are finished."""
        in_flight = sum(not handle.done for handle in self._handles[self._waited_for :])
        while len(self._handles) < len(self.prompts) and in_flight < self._engine.config.max_batch:
            try:
                self._handles.append(self._engine.submit(self.prompts[len(self._handles)], **self._params))
            except QueueFull:
                if not in_flight:  # nothing of ours to wait for
                    raise
                break
            in_flight += 1
        while self._waited_for < len(self._handles) and self._handles[self._waited_for].done:
            self.oldest.result()  # raises where it failed
            self._waited_for += 1
        return self._waited_for < len(self.prompts)

    @property
    def oldest(self) -> RequestHandle:
        """The first that is not finished."""
        return self._handles[self._waited_for]

    def results(self) -> Any:
        results = [handle.result() for handle in self._handles]
        return results[0] if self.single else results

    def close(self) -> None:
        for handle in self._handles:
            handle.close()


def new_cache(model: Model, config: EngineConfig) -> KVCache:
    """The pool of pages that the config asks for, or that there is room for. Raises ConfigError, OutOfMemory."""
    size, context, dtype = config.page_size, model.config.context_length, config.cache_dtype
    page_bytes = model.new_cache(1, size, dtype=dtype, page_size=size, pages=1).nbytes
    wanted = config.max_batch * -(-context // size)
    held, free = model.backend.memory()
    most = None if config.memory_limit is None else max(0, config.memory_limit - (held or 0))
    if most is not None and held is None and free is not None:  # of several memories: what is free is within the limit
        most = free
    if config.cache_tokens is not None:
        pages = -(-config.cache_tokens // size)
    elif config.cache_bytes is not None:
        pages = config.cache_bytes // page_bytes
    else:
        share = None if free is None else free // CACHE_SHARE // page_bytes
        pages = max(1, min(each for each in (wanted, share, most and most // page_bytes) if each is not None))
    if pages < 1 or (most is not None and pages * page_bytes > most):
        limit = "" if most is None else f", and memory_limit leaves {most:,} for the cache"
        raise ConfigError(
            f"the cache would have {pages} pages of {size} tokens, {page_bytes:,} bytes each{limit}; "
            "give it fewer tokens, or more memory",
            field="cache_bytes" if config.cache_bytes is not None else "memory_limit",
        )
    return model.new_cache(config.max_batch, context, dtype=dtype, page_size=size, pages=pages)
