"""Beam search beside other requests: each beam's next token is a request of its own, whose prompt the cache holds."""

from __future__ import annotations

import time
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..errors import GenerationError
from ..generation.generate import Prompt
from ..generation.params import SamplingParams
from ..generation.results import Generation, GenerationStats
from ..generation.search import BeamSearch
from ..generation.sequence import Request
from .tickets import RequestHandle

if TYPE_CHECKING:
    from .engine import Engine


@dataclass
class KeepLogits:
    """A strategy that keeps the logits it sees; the token that it chooses does not matter."""

    logits: NDArray = field(default_factory=lambda: np.empty(0))

    def __call__(self, ids: NDArray, logits: NDArray, generator: np.random.Generator) -> int:
        self.logits = logits.copy()
        return 0


class BeamHandle:
    """The `n` best continuations of one prompt, equal to those of `beam_search`, when somebody waits for them."""

    def __init__(
        self, engine: Engine, prompt: Prompt, priority: int, timeout_s: float | None, params: SamplingParams
    ) -> None:
        self.done, self._best = False, list[Generation]()
        self._search = BeamSearch(Request(engine.model, prompt, params))
        self._steps = self._run(engine, priority, timeout_s or engine.config.request_timeout_s)

    def result(self) -> Any:
        for handle in self._steps:
            handle.result()
        return self._best if self._search.params.n > 1 else self._best[0]

    async def aresult(self) -> Any:
        for handle in self._steps:
            await handle.aresult()
        return self._best if self._search.params.n > 1 else self._best[0]

    def close(self) -> None:
        self._steps.close()

    def _run(self, engine: Engine, priority: int, timeout_s: float | None) -> Generator[RequestHandle, None, None]:
        """Yields each request, for the caller to wait for."""
        search, kind = self._search, engine.model.backend.summary
        stats, started = GenerationStats(engine.model.backend.name), time.perf_counter()
        handles: list[RequestHandle] = []
        try:
            while not search.done:
                handles, strategies = [], [KeepLogits() for _ in search.running]
                left_s = None if timeout_s is None else max(1e-3, timeout_s - (time.perf_counter() - started))
                for beam, strategy in zip(search.running, strategies, strict=True):
                    params = SamplingParams(max_tokens=1, strategy=strategy)
                    handles.append(engine._submit(search.ids(beam), priority, left_s, params))
                yield from handles
                if engine.model.backend.summary != kind:
                    raise GenerationError("num_beams: the device failed in mid-search; another one rounds differently")
                stats.head_rows += sum(len(strategy.logits) for strategy in strategies)
                search.advance(np.stack([strategy.logits for strategy in strategies]))
        finally:
            self.done = True
            for handle in handles:
                handle.close()
        stats.prompt_tokens, best = len(search.request.prompt), search.ended[: search.params.n]
        stats.dropped_tokens = len(search.request.given) - stats.prompt_tokens
        self._best = [search.result(beam, stats) for beam in best]
        stats.generated_tokens = sum(len(out.token_ids) for out in self._best)
        stats.decode_s, stats.decode_tokens = time.perf_counter() - started, stats.generated_tokens
