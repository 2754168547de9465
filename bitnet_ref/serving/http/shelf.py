"""`ModelShelf`: several models by name, one engine each. They are loaded when needed, and leave when idle."""

from __future__ import annotations

import asyncio
import gc
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from ...errors import BitNetRefError, EngineClosed, OutOfMemory, describe_error
from ...formats.hashes import weight_hash
from ...system.sharing import model_files
from ..engine import Engine
from .schemas import RequestError

log = logging.getLogger(__name__)


@dataclass(eq=False)
class Place:
    """A model's place on the shelf. name: the first one under which it is served."""

    name: str
    source: Path
    engine: Engine | None = None
    nbytes: int = 0  # of weights and cache, once loaded; before, an estimate
    is_loading: bool = False
    users: int = 0
    last_used_s: float = 0.0
    keep_s: float | None = None  # a client wants it to leave after so long, earlier than `idle_s`
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)  # while it is loaded or dropped
    base: Place | None = None  # of a name "base:adapter": whose engine answers

    @property
    def adapter(self) -> str:
        """The engine's name of its adapter. Two names of one model may have adapters of one name."""
        return self.name.replace(":", "/")

    @property
    def is_idle(self) -> bool:
        return self.engine is not None and self.users == 0 and not self.lock.locked()


class ModelShelf:
    """The engines of a server.

    sources: file or folder of each model; several names of one path share its engine. open_engine: loads one, given
    the bytes of the budget that are left for it. budget_bytes: what all loaded models may hold together, weights and
    caches; where another one needs it, the idle ones longest unused are dropped. idle_s: one that has been idle for so
    long is dropped. None: no limit. default: the name that is meant where a request has none, or one not served.
    """

    def __init__(
        self,
        sources: Mapping[str, Path],
        open_engine: Callable[[Path, int | None], Engine],
        budget_bytes: int | None = None,
        idle_s: float | None = None,
        adapters: Mapping[tuple[str, str], Path] = MappingProxyType({}),
        default: str | None = None,
    ) -> None:
        """adapters: folders of LoRA adapters by (model, name); requests ask for the model "model:name"."""
        by_path: dict[Path, Place] = {}
        self.places = {name: by_path.setdefault(path.resolve(), Place(name, path)) for name, path in sources.items()}
        self.unique_places = list(by_path.values())
        for (name, adapter), folder in adapters.items():
            own = f"{name}:{adapter}"
            self.places[own] = Place(own, folder, base=self.places[name])
        self.default = default if default is not None or len(sources) > 1 else next(iter(sources))
        self._has_default = default is not None
        self._open, self._budget, self._idle_s = open_engine, budget_bytes, idle_s
        self.is_ready = False  # whether the first models are loaded
        self.is_closed = False

    def name(self, wanted: str | None) -> str:
        """The name of the model that a request means; None and "" mean the default. Raises RequestError."""
        if wanted in self.places:
            return wanted
        if wanted and (name := wanted.removesuffix(":latest")) in self.places:  # as Ollama's clients write names
            return name
        if self.default is not None and (not wanted or self._has_default):
            return self.default
        if not wanted:
            raise RequestError(f"is missing; there are: {', '.join(self.places)}", "model")
        message = f"there is no model {wanted[:200]!r}; there are: {', '.join(self.places)}"
        raise RequestError(message, "model", 404, "model_not_found")

    def place(self, wanted: str | None) -> Place:
        """The model of `name`."""
        return self.places[self.name(wanted)]

    def known_name(self, wanted: object) -> str | None:
        """The same for the log: a name that means no model stays, and what is no text is none."""
        try:
            return self.name(wanted if isinstance(wanted, str) else None)
        except RequestError:
            return wanted[:200] if isinstance(wanted, str) else None

    async def load_first(self) -> None:
        """Load the models in their order, as many as the budget allows: with several, at least the first."""
        for number, place in enumerate(self.unique_places):
            async with place.lock:
                if place.engine is None:  # no request was earlier
                    try:
                        await self._load(place, drops=False)
                    except (RequestError, OutOfMemory):
                        if not number:
                            raise
                        break  # requests make room for the others
        self.is_ready = True

    @asynccontextmanager
    async def borrow(self, place: Place) -> AsyncIterator[Engine]:
        """The model's engine, loaded if it is not; it stays while it is borrowed.

        Raises RequestError where there is no room for it now, or its files are gone or wrong, EngineClosed after
        `close`.
        """
        if place.base is not None:
            async with self.borrow(place.base) as engine:
                yield engine.with_adapter(place.adapter)
            return
        place.users += 1  # first, so that it is not dropped between
        try:
            async with place.lock:
                if self.is_closed:
                    raise EngineClosed("the server is ending")
                if place.engine is not None and place.engine.closed:  # by a fault of its own: it needs no memory now
                    place.engine = None
                    await asyncio.to_thread(gc.collect)
                if place.engine is None:
                    await self._load_for_request(place)
            assert place.engine is not None
            yield place.engine
        finally:
            place.users -= 1
            place.last_used_s = time.monotonic()

    async def _load_for_request(self, place: Place) -> None:
        try:
            await self._load(place)
        except (RequestError, OutOfMemory):
            raise
        except (BitNetRefError, OSError) as error:
            log.error("model %s cannot be loaded: %s", place.name, describe_error(error))
            text = "cannot be loaded now; the server's log has the cause"
            raise RequestError(f"{place.name} {text}", "model", 503, "model_unavailable") from error

    async def _load(self, place: Place, drops: bool = True) -> None:
        """drops: whether idle models may be dropped for it. Raises RequestError where they or others hold the budget,
        OutOfMemory where the model alone exceeds it."""
        needed = place.nbytes or _file_bytes(place.source)
        await self._make_room(place, needed, drops)
        started, place.nbytes, place.is_loading = time.monotonic(), needed, True
        room = None if self._budget is None else max(0, self._budget - self._held(but=place))
        try:
            place.engine = await asyncio.to_thread(self._open_adapted, place, room)
        finally:
            place.is_loading = False
        engines = place.engine.engines
        for engine in engines:
            engine.metrics.labels["model_name"] = place.name
        place.nbytes = await asyncio.to_thread(_bytes_of, engines)  # not here: a large model is finished for it
        try:
            await self._make_room(place, place.nbytes, drops)  # it may be more than was thought
        except (RequestError, OutOfMemory):
            await asyncio.to_thread(place.engine.close)
            place.engine = None
            raise
        await asyncio.to_thread(weight_hash, place.engine.model.weights)  # for fingerprints; it is kept
        duration_s = time.monotonic() - started
        log.info("model %s loaded in %.1f s: %.0f MB of memory", place.name, duration_s, place.nbytes / 1e6)

    async def _make_room(self, place: Place, needed: int, drops: bool) -> None:
        """Drop idle models until the budget has so many bytes for this one. Raises what `_load` raises."""
        if self._budget is not None and needed > self._budget:
            raise OutOfMemory(f"model {place.name} needs {needed:,} bytes; the budget is {self._budget:,}")
        while self._budget is not None and self._held(but=place) + needed > self._budget:
            others = [each for each in self.unique_places if each is not place]
            idle = [each for each in others if each.is_idle]
            if not idle or not drops:
                held = ", ".join(each.name for each in others if each.engine or each.is_loading)
                text = f"needs {needed:,} bytes, and the server's budget of {self._budget:,} is held by: {held}"
                raise RequestError(f"{place.name} {text}; try again later", "model", 503, "model_unavailable")
            await self._drop(min(idle, key=lambda each: each.last_used_s))

    def _open_adapted(self, place: Place, room: int | None) -> Engine:
        """The engine of a model, with its adapters."""
        with ExitStack() as stack:
            engine = self._open(place.source, room)
            stack.callback(engine.close)
            for each in self.places.values():
                if each.base is place:
                    engine.add_adapter(each.adapter, each.source)
            stack.pop_all()
        return engine

    def _held(self, but: Place) -> int:
        others = [place for place in self.unique_places if place is not but]
        return sum(place.nbytes for place in others if place.engine is not None or place.is_loading)

    async def _drop(self, place: Place) -> None:
        async with place.lock:
            engine, place.engine = place.engine, None
        if engine is not None:
            await engine.aclose()
            del engine  # the model may have other users, so it is not closed
            await asyncio.to_thread(gc.collect)
            log.info("model %s dropped", place.name)

    async def drop_idle(self) -> None:
        """Drop idle models for ever; a task that the server cancels."""
        while self._idle_s is not None:
            await asyncio.sleep(min(self._idle_s / 4, 60.0))
            for place in self.unique_places:
                limit = self._idle_s if place.keep_s is None else min(self._idle_s, place.keep_s)
                if place.is_idle and time.monotonic() - place.last_used_s > limit:
                    await self._drop(place)

    async def close(self, drain: bool) -> None:
        """Close the engines, and lend none after that. drain: whether their requests may finish."""
        self.is_closed = True
        engines = [place.engine for place in self.unique_places if place.engine is not None]
        await asyncio.gather(*(engine.aclose(drain) for engine in engines))


def _file_bytes(source: Path) -> int:
    """About what a model will hold: the bytes of its files."""
    return sum(file.stat().st_size for file in model_files(source))


def _bytes_of(engines: Sequence[Engine]) -> int:
    models = {id(engine.model): engine.model for engine in engines}.values()
    return sum(model.weights.nbytes for model in models) + sum(engine.cache.nbytes for engine in engines)
