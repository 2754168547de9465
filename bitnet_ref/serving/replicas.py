"""`Replicas`: several engines behind the face of one. On the processor they share a model's weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Unpack

from ..backends.loaded import LoadedModel
from .cache_memory import share_memory
from .engine import Engine
from .engine_config import EngineConfig, EngineOptions, take_config
from .records import RequestProgress
from .tickets import RequestHandle, RequestStory


class Replicas(Engine):
    """Each request goes to the engine with the fewest unfinished ones. One that has stopped gets none.

    `engines` has them all; `model`, `cache`, `page_holders`, `metrics` and `timeline` are those of the first.
    """

    def __init__(self, engines: Sequence[Engine]) -> None:
        self._engines, first = list(engines), engines[0]
        self.config, self._worker = first.config, first._worker
        self.metrics, self.timeline = first.metrics, first.timeline
        for number, engine in enumerate(engines):
            engine.metrics.labels["engine"] = str(number)
            engine._numbers = first._numbers  # a number means one request

    @property
    def engines(self) -> list[Engine]:
        """The engines that share the requests."""
        return self._engines

    def pick(self) -> Engine:
        usable = [engine for engine in self._engines if not engine.closed] or self._engines
        return min(usable, key=lambda engine: engine.unfinished)

    def _submit(self, *args: Any, **options: Any) -> RequestHandle:
        return self.pick()._submit(*args, **options)

    @property
    def unfinished(self) -> int:
        """How many requests of all engines wait, run or are paused."""
        return sum(engine.unfinished for engine in self._engines)

    @property
    def requests(self) -> list[RequestProgress]:
        """The unfinished requests of all engines, and how far each of them is."""
        every = [request for engine in self._engines for request in engine.requests]
        return sorted(every, key=lambda request: request.request_id)

    @property
    def stories(self) -> list[RequestStory]:
        """As of `Engine.stories`, of all engines."""
        every = [story for engine in self._engines for story in engine.stories]
        return sorted(every, key=lambda story: (story.end_s is None, story.end_s or story.arrival_s))

    @property
    def closed(self) -> bool:
        """Whether all engines were closed."""
        return all(engine.closed for engine in self._engines)

    def close(self, drain: bool = False) -> None:
        for engine in self._engines:
            engine.close(drain)


def start_engines(
    model: LoadedModel, config: EngineConfig | None = None, room: int | None = None, **settings: Unpack[EngineOptions]
) -> Engine:
    """An engine on the model, or `replicas` of them, which share the memory.

    room: bytes that the weights and, where the config does not say otherwise, the caches may hold.
    """
    config = take_config(config, settings)
    config = share_memory(model, config, room, config.replicas)
    engines = [Engine(model, config) for _ in range(config.replicas)]
    return Replicas(engines) if len(engines) > 1 else engines[0]
