"""`Engine`: many requests at a time on one model, by continuous batching.

Requests join and leave the running batch at any step, and prefill and decode share a step (Orca, OSDI 2022). The cache
is paged and shared (PagedAttention, arXiv 2309.06180). By the model's batch invariance every request gets the tokens,
texts and log probabilities that it gets alone.

`scheduler.py` decides which requests take part in a step, `pages.py` which page holds which tokens, `step.py` computes
a step, `worker.py` is the thread that repeats this, `tickets.py` has the user's side of a request.
"""

from __future__ import annotations

import copy
import itertools
import os
import weakref
from collections import deque
from collections.abc import Generator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any, Unpack

from ..backends.loaded import LoadedModel
from ..backends.paged_cache import PagedKVCache
from ..errors import ContextOverflow, GenerationError, QueueFull, count_of
from ..families.lora import Adapter
from ..formats.hf.adapter import read_adapter
from ..generation.chat import default_reply_tokens
from ..generation.generate import Generations, Prompt, Prompts, check_streamable, is_single, split_prompts
from ..generation.params import SamplingOptions, SamplingParams, expand_params
from ..generation.sequence import Request
from ..system.options import LARGEST, LONGEST_S, Number
from .engine_config import EngineConfig, EngineOptions, take_config
from .live import LiveView
from .metrics import EngineMetrics
from .records import RequestProgress, StepRecord
from .tickets import RequestHandle, RequestStory, Ticket, check_process
from .worker import Worker

PRIORITY, TIMEOUT = Number(-LARGEST, whole=True), Number(0, LONGEST_S, above=True, optional=True)


class Engine(AbstractContextManager["Engine", None], AbstractAsyncContextManager["Engine", None]):
    """Serves any number of callers from one model.

        with model.engine(max_batch=32) as engine:
            for chunk in engine.stream("Once upon a time", max_tokens=64): ...  # from any number of threads
            outs = engine.generate(prompts, temperature=0.7)

        async with model.engine() as engine:
            async for chunk in engine.stream("Once upon a time"): ...
            outs = await engine.agenerate(prompts)

    config: an `EngineConfig`, or its settings as keyword arguments. The engine's thread starts with the first request.
    Raises ConfigError, OutOfMemory.
    """

    _original: Engine | None = None  # of one `with_adapter`: its end would close the engine

    def __init__(
        self, model: LoadedModel, config: EngineConfig | None = None, **settings: Unpack[EngineOptions]
    ) -> None:
        self.config = take_config(config, settings).for_model(model)
        self._worker = Worker(model, self.config)
        self.metrics: EngineMetrics = self._worker.metrics  # .snapshot(), or .register() for Prometheus
        self.timeline: deque[StepRecord] = self._worker.timeline  # the last steps; the engine appends: copy it to read
        self._numbers = itertools.count()
        self._finalizer = weakref.finalize(self, self._worker.close, False)

    @property
    def model(self) -> LoadedModel:
        """The model that computes: after the failure of a device, another one than at the start."""
        return self._worker.model

    @property
    def adapted_model(self) -> LoadedModel:
        """The model with the adapter on that `EngineConfig.sampling` names, if it names one."""
        return self.model.with_adapter(self.config.sampling.get("adapter"))

    @property
    def engines(self) -> Sequence[Engine]:
        """The engines behind this one: itself, unless there are replicas."""
        return [self]

    def add_adapter(self, name: str, folder: str | os.PathLike[str]) -> None:
        """Let requests name a LoRA adapter, as peft writes it: `adapter="name"`. Requests with different adapters share
        the running batch. Raises ConfigError, FormatError."""
        adapter = Adapter(read_adapter(Path(folder), self.model.config))
        for model in {id(engine.model): engine.model for engine in self.engines}.values():
            model.put_adapter(name, adapter)

    def with_adapter(self, name: str) -> Engine:
        """The same engine, whose requests have one of its adapters on, unless they name another."""
        other = copy.copy(self)
        other.config = replace(self.config, sampling={**self.config.sampling, "adapter": name})
        other._original = self
        return other

    def pick(self) -> Engine:
        """The engine for the next request."""
        return self

    @property
    def cache(self) -> PagedKVCache:
        """The pages of all sequences."""
        return self._worker.cache

    def __repr__(self) -> str:
        now = self.metrics.snapshot()
        state = "closed" if self.closed else f"{count_of(now['num_requests_running'], 'request')} running"
        return f"<bitnet_ref.Engine of {self.model!r}: {state}, {now['num_requests_waiting']} waiting>"

    @expand_params
    def submit(
        self, prompt: Prompt, *, priority: int = 0, timeout_s: float | None = None, **params: Unpack[SamplingOptions]
    ) -> RequestHandle:
        """Queue one prompt (text or token ids). Bad arguments raise here.

        priority: higher goes first; see `EngineConfig.priority_wait_s`. timeout_s: the request fails if it is not
        finished by then. Parameters that are not given are those of `EngineConfig.sampling`, else the defaults shown.
        Raises GenerationError, TokenizerError, QueueFull, EngineClosed.
        """
        return self._submit(prompt, priority, timeout_s, self.config.params(params))

    def _submit(
        self,
        prompt: Prompt,
        priority: int,
        timeout_s: float | None,
        params: SamplingParams,
        wanted: str | None = None,
        choice: int | None = None,
    ) -> RequestHandle:
        """wanted, choice: as of `Ticket`."""
        check_process(self._worker.process)
        if not is_single(prompt):
            raise GenerationError("expected one prompt: a text or a list of token ids; generate takes many")
        priority, timeout_s = PRIORITY.read(priority, "priority"), TIMEOUT.read(timeout_s, "timeout_s")
        request = Request(self.model, prompt, params)
        if request.capacity > self.cache.capacity:
            size = count_of(len(request.prompt), "token")
            raise ContextOverflow(
                f"the prompt has {size} and max_tokens is {request.max_tokens}, but the "
                f"engine's cache holds {self.cache.capacity} of a request; lower max_tokens, or raise cache_tokens"
            )
        timeout_s = self.config.request_timeout_s if timeout_s is None else timeout_s
        ticket = Ticket(
            *(next(self._numbers), request, priority, timeout_s, self.model.backend.name, self.config.max_unread),
            choice,
        )
        ticket.stats.describe(self.cache)
        ticket.wanted = wanted
        handle = RequestHandle(ticket, self._worker, self)  # first, because an interrupt then drops it, which cancels
        self._worker.submit(ticket)
        return handle

    @expand_params
    def stream(
        self, prompt: Prompt, *, priority: int = 0, timeout_s: float | None = None, **params: Unpack[SamplingOptions]
    ) -> RequestHandle:
        """`submit` for one continuation, to read chunk by chunk with `for` or `async for`.

        It pauses while more than `EngineConfig.max_unread` chunks wait for the reader.
        """
        sampling = self.config.params(params)
        check_streamable(sampling)
        return self._submit(prompt, priority, timeout_s, sampling, "chunks")

    @expand_params
    def streams(
        self, prompt: Prompt, *, priority: int = 0, timeout_s: float | None = None, **params: Unpack[SamplingOptions]
    ) -> list[RequestHandle]:
        """`submit` for the n continuations of a prompt, each to read on its own: chunk by chunk, or as a result. They
        equal the list that `submit` gives. One engine has them all: they share the prompt's pages."""
        sampling, handles, engine = self.config.params(params), list[RequestHandle](), self.pick()
        if sampling.num_beams > 1:
            raise GenerationError(f"num_beams: a stream is one continuation, got {sampling.num_beams}; use submit")
        with ExitStack() as stack:
            for choice in range(sampling.n):
                handles.append(engine._submit(prompt, priority, timeout_s, sampling, choice=choice))
                stack.callback(handles[-1].close)
                prompt = handles[0].prompt_token_ids  # a text is encoded once
            stack.pop_all()
        return handles

    @expand_params
    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        priority: int = 0,
        timeout_s: float | None = None,
        **params: Unpack[SamplingOptions],
    ) -> RequestHandle:
        """`stream` for the reply to a conversation, in the form of the model's chat template. It uses the pages of
        earlier turns again. tools, chat_template: see `apply_chat_template`. max_tokens: by default 512, or what fits.
        """
        tokenizer = self.model.tokenizer
        ids = tokenizer.apply_chat_template(messages, tokenize=True, tools=tools, chat_template=chat_template)
        sampling = self.config.params(params)
        if sampling.max_tokens is None:
            wanted = default_reply_tokens(self.model, len(ids), sampling, self.cache.capacity)
            sampling = replace(sampling, max_tokens=wanted)
        check_streamable(sampling)
        return self._submit(ids, priority, timeout_s, sampling, "chunks")

    @expand_params
    def generate(
        self, prompt: Prompts, *, priority: int = 0, timeout_s: float | None = None, **params: Unpack[SamplingOptions]
    ) -> Generations:
        """The same results as `Model.generate`, for one prompt or a list, beside other requests. An error or an
        interrupt ends all requests of the call. priority, timeout_s: as in `submit`, for each request."""
        prompts, single = split_prompts(prompt)
        with closing(self._submit_all(prompts, priority, timeout_s, params)) as handles:
            results = [handle.result() for handle in handles]
        return results[0] if single else results

    @expand_params
    async def agenerate(
        self, prompt: Prompts, *, priority: int = 0, timeout_s: float | None = None, **params: Unpack[SamplingOptions]
    ) -> Generations:
        """`generate`, for asyncio. Cancelling it cancels its requests."""
        prompts, single = split_prompts(prompt)
        with closing(self._submit_all(prompts, priority, timeout_s, params)) as handles:
            results = [await handle.aresult() for handle in handles]
        return results[0] if single else results

    def _submit_all(
        self, prompts: Sequence[Prompt], priority: int, timeout_s: float | None, params: SamplingOptions
    ) -> Generator[RequestHandle, None, None]:
        """Submit the prompts, at most max_batch at a time. Yields each request in order for the caller to wait for."""
        handles: list[RequestHandle] = []
        sampling, timeout_s = self.config.params(params), TIMEOUT.read(timeout_s, "timeout_s")
        try:
            for current in range(len(prompts)):
                unfinished = sum(not handle.done for handle in handles[current:])
                while len(handles) < len(prompts) and unfinished < self.config.max_batch:
                    try:
                        handles.append(self._submit(prompts[len(handles)], priority, timeout_s, sampling))
                    except QueueFull:
                        if not unfinished:  # none of these requests will make room
                            raise
                        break
                    unfinished += 1
                yield handles[current]
        finally:
            for handle in handles:
                handle.close()

    @property
    def unfinished(self) -> int:
        """How many requests wait, run or are paused."""
        return self._worker.unfinished

    @property
    def requests(self) -> list[RequestProgress]:
        """The unfinished requests, and how far each of them is."""
        check_process(self._worker.process)
        return self._worker.requests()

    @property
    def stories(self) -> list[RequestStory]:
        """What happened when to the last requests that ended, then to the unfinished ones; without their texts."""
        check_process(self._worker.process)
        return self._worker.stories()

    @property
    def page_holders(self) -> list[int | None]:
        """How many sequences hold each page of the cache. 0: kept for texts that begin as it does. None: empty."""
        return self._worker.pool.holders()

    @property
    def closed(self) -> bool:
        """Whether the engine was closed; it then takes no requests."""
        return self._worker.closed

    def live(self, interval_s: float = 0.5) -> LiveView:
        """A view of all this that updates itself, in JupyterLab or by rich; see `LiveView`. It keeps neither
        the engine nor the model alive."""
        engine, last = weakref.ref(self), dict[str, Any]()

        def look() -> tuple[dict[str, Any], list[RequestProgress], bool]:
            if (alive := engine()) is None:
                return last, [], True  # the last metrics
            last.update(alive.metrics.snapshot())
            return last, alive.requests, alive.closed

        return LiveView(look, interval_s)

    def close(self, drain: bool = False) -> None:
        """Refuse new requests, and return when the engine's thread has ended. Running requests end with EngineClosed,
        or with `drain` normally. The model stays usable."""
        self._worker.close(drain)

    async def aclose(self, drain: bool = False) -> None:
        """`close`, without blocking the event loop."""
        import asyncio

        await asyncio.to_thread(self.close, drain)

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        self.close(drain=error is None)

    async def __aexit__(self, error: type[BaseException] | None, *_: object) -> None:
        await self.aclose(drain=error is None)
