"""Beam search beside other requests: each beam's next token is a request of its own, whose prompt the cache holds."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import GenerationError
from ..generation.generate import Prompt
from ..generation.params import SamplingParams
from ..generation.results import Generation, GenerationStats
from ..generation.search import BeamSearch
from ..generation.sequence import Request
from .tickets import RequestHandle

Submit = Callable[[Prompt, int, float | None, SamplingParams], RequestHandle]  # priority, timeout_s


@dataclass
class KeepLogits:
    """A strategy that keeps the logits it sees; the token that it chooses does not matter."""

    logits: NDArray = field(default_factory=lambda: np.empty(0))

    def __call__(self, ids: NDArray, logits: NDArray, generator: np.random.Generator) -> int:
        self.logits = logits.copy()
        return 0


class BeamHandle:
    """The `n` best continuations of one prompt, equal to those of `beam_search`. They are computed while a caller waits
    for them."""

    def __init__(self, request: Request, submit: Submit, priority: int, timeout_s: float | None) -> None:
        """submit: of the engine. timeout_s: of the whole search."""
        self.done, self.best, self.search = False, list[Generation](), BeamSearch(request)
        self._steps = self._run(submit, priority, timeout_s)

    def result(self) -> Any:
        for handle in self._steps:
            handle.result()
        return self.best if self.search.params.n > 1 else self.best[0]

    async def aresult(self) -> Any:
        for handle in self._steps:
            await handle.aresult()
        return self.best if self.search.params.n > 1 else self.best[0]

    def close(self) -> None:
        self._steps.close()

    def texts(self) -> list[BeamText]:
        return [BeamText(self, index) for index in range(self.search.params.n)]

    def _run(self, submit: Submit, priority: int, timeout_s: float | None) -> Generator[RequestHandle, None, None]:
        """Yields each request, for the caller to wait for."""
        search, started = self.search, time.perf_counter()
        stats = GenerationStats(search.request.model.backend.name)
        handles: list[RequestHandle] = []
        try:
            while not search.done:
                handles, strategies = [], [KeepLogits() for _ in search.running]
                left_s = None if timeout_s is None else max(1e-3, timeout_s - (time.perf_counter() - started))
                for beam, strategy in zip(search.running, strategies, strict=True):
                    params = SamplingParams(max_tokens=1, strategy=strategy)
                    handles.append(submit(search.ids(beam), priority, left_s, params))
                yield from handles
                if any(handle.stats.backend != stats.backend for handle in handles):
                    raise GenerationError("num_beams: the device failed in mid-search; another one rounds differently")
                stats.head_rows += sum(len(strategy.logits) for strategy in strategies)
                search.advance(np.stack([strategy.logits for strategy in strategies]))
        finally:
            self.done = True
            for handle in handles:
                handle.close()
        stats.prompt_tokens, best = len(search.request.prompt), search.ended[: search.params.n]
        stats.dropped_tokens = len(search.request.given) - stats.prompt_tokens
        self.best = [search.result(beam, stats) for beam in best]
        stats.generated_tokens = sum(len(out.token_ids) for out in self.best)
        stats.decode_s, stats.decode_tokens = time.perf_counter() - started, stats.generated_tokens


class BeamText:
    """One of the `n` texts of a search, with what the server reads of a `RequestHandle`. Only one may be waited for at
    a time: the first wait computes all of them."""

    prompt_logprobs = None

    def __init__(self, beams: BeamHandle, index: int) -> None:
        request = beams.search.request
        self._beams, self._index, self.close = beams, index, beams.close
        self.prompt_token_ids, self.echo = request.given.tolist(), request.echo(request.text_stream())

    @property
    def stats(self) -> GenerationStats:
        """Of the whole search, but with this text's tokens; at its end."""
        best = self._beams.best[self._index]
        return replace(best.stats, generated_tokens=len(best.token_ids))

    def result(self) -> Generation:
        self._beams.result()
        return self._beams.best[self._index]

    async def aresult(self) -> Generation:
        await self._beams.aresult()
        return self._beams.best[self._index]
