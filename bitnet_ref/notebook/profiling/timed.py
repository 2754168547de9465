"""A backend whose operations are timed: a copy of another one, of a subclass of its class that is made here.

Being of a subclass, it times the parts of a fused operation too, where the backend composes it: what `linears` asks of
`self.quantize_activations` comes by here. An operation that is one compiled kernel has no parts to show.
"""

from __future__ import annotations

import copy
import inspect
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any, NamedTuple, Protocol

from ...backends import Backend, ScreenedHead
from ...reference.cache import TokenBatch

# What is no operation on numbers. `running` is timed too, but as the step that holds the others.
NOT_TIMED = frozenset({"prepare", "prepare_for", "prepare_model", "place", "at_layer", "from_host", "run", "new_cache"})
NOT_TIMED |= {"prepared_layout", "synchronize", "running", "close", "prompt_tokens"}
OPS = frozenset(
    name for name, _ in inspect.getmembers(Backend, inspect.isfunction) if not name.startswith("_")
) - frozenset(NOT_TIMED)

# What an operation is about: its weights, or what attention reads. It says where in the model the call stands.
_SUBJECT: dict[str, Callable[[tuple[Any, ...]], Any]] = {
    **dict.fromkeys(("linear", "linears", "lm_head", "head_candidates", "dense_matmul"), itemgetter(1)),
    **dict.fromkeys(("ternary_matmul", "rms_norm"), itemgetter(1)),
    "embed": itemgetter(0),
    "attention": itemgetter(1, 2, 4),  # cache, batch, window
}
_WAYS = frozenset({"linear", "linears"})  # inside another operation they are only the way to its parts


class Call(NamedTuple):
    """One call of one operation. While a step runs they are plain tuples, which cost a third of the time to make."""

    op: str
    subject: Any
    depth: int  # how many others it is inside of
    start_s: float  # time.perf_counter()
    end_s: float
    nbytes: int = 0  # that it read, where its subject alone does not say


@dataclass(frozen=True)
class Step:
    """What ran inside one `Backend.running()`, on one thread: a forward pass, or the head alone."""

    thread: int  # threading.get_ident()
    start_s: float
    end_s: float
    raw: list[tuple[Any, ...]]  # the fields of a Call each, in the order of their beginning
    kind: str  # see `read_attention`
    tokens: int

    @property
    def calls(self) -> list[Call]:
        return [Call(*each) for each in self.raw]


class Sink(Protocol):
    """Who wants to know of the steps."""

    def take(self, step: Step) -> None: ...


class _Here:
    """What is going on in a thread."""

    __slots__ = ("calls", "depth", "running")

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.depth = 0
        self.running = 0


class _Threads(threading.local):
    """`here`: of the thread that asks."""

    def __init__(self) -> None:
        self.here = _Here()


@dataclass
class Watch:
    """The state of a timed backend: `sinks` get every step when it is over."""

    inner: Backend
    sinks: tuple[Sink, ...] = ()
    threads: _Threads = field(default_factory=_Threads)

    def finish(self, start_s: float) -> None:
        """The step of this thread that began at `start_s` is over."""
        end_s, here = time.perf_counter(), self.threads.here
        calls, here.calls = here.calls, []
        if not self.sinks:
            return
        kind, tokens = read_attention(calls)
        step = Step(threading.get_ident(), start_s, end_s, calls, kind, tokens)
        for sink in self.sinks:
            sink.take(step)


def read_attention(calls: list[tuple[Any, ...]]) -> tuple[str, int]:
    """Notes what each call of attention read, and lets go of the cache.   -> the kind of the step, its tokens

    Kinds: "prefill" (several tokens of each sequence), "decode" (one; so a prompt of one token is one too), "mixed",
    "other" (no attention: the head alone, say).
    """
    batch, window, kind, nbytes = None, None, "other", 0
    for at, call in enumerate(calls):
        if call[0] != "attention":
            continue
        op, subject, depth, start_s, end_s, _ = call
        cache, this_batch, this_window = subject
        if this_batch is not batch or this_window != window:  # the same for all layers
            batch, window = this_batch, this_window
            kind, seen = seen_by(batch, window)
            nbytes = round(seen * cache.bytes_per_token / cache.layers)
        calls[at] = (op, None, depth, start_s, end_s, nbytes)
    return kind, 0 if batch is None else len(batch)


def seen_by(batch: TokenBatch, window: int | None) -> tuple[str, int]:
    """-> the kind of a batch, and how many past and present tokens it attends to, each counted once."""
    batch = getattr(batch, "host", batch)  # where a backend has placed it elsewhere
    ends: dict[int, list[int]] = {}  # of each slot: first and last position, tokens
    for slot, position in zip(batch.slots.tolist(), batch.positions.tolist(), strict=True):
        end = ends.setdefault(slot, [position, position, 0])
        end[0], end[1], end[2] = min(end[0], position), max(end[1], position), end[2] + 1
    counts = {count for _, _, count in ends.values()}
    kind = "decode" if counts == {1} else "mixed" if 1 in counts else "prefill"
    begins = {slot: 0 if window is None else max(0, first - window + 1) for slot, (first, _, _) in ends.items()}
    return kind, sum(last + 1 - begins[slot] for slot, (_, last, _) in ends.items())


class TimedBackend:
    """What every timed backend is besides being of its backend's class. See `timed`."""

    watch: Watch


def timed(inner: Backend) -> Any:
    """A backend that computes as `inner` does, and times it. It shares its state; `inner` itself is left as it is.

    -> an instance of both `TimedBackend` and type(inner)
    """
    backend = copy.copy(inner)
    backend.__class__ = _timed_class(type(inner))
    backend.watch = Watch(inner)  # type: ignore[attr-defined]
    return backend


_classes: dict[type, Any] = {}  # a timed class of each backend's


def _timed_class(base: type[Backend]) -> Any:
    if base not in _classes:
        _classes[base] = _make_class(base)
    return _classes[base]


def _make_class(base: type[Backend]) -> Any:
    waits = base.synchronize is not Backend.synchronize  # a device: what was asked for goes on when the call is over
    ops = OPS if waits else OPS - {"to_host"}
    methods: dict[str, Any] = {op: _timing(op, getattr(base, op), waits) for op in ops}
    # `run` as the reference has it: a step that is replayed as a whole has no operations to time.
    own = {"running": _running(base.running), "run": Backend.run}
    return type(f"Timed{base.__name__}", (TimedBackend, base), {**methods, **own})


def _timing(op: str, function: Callable[..., Any], waits: bool) -> Callable[..., Any]:
    clock, subject_of, is_way, is_head = time.perf_counter, _SUBJECT.get(op), op in _WAYS, op == "head_candidates"

    def method(self: Any, *args: Any, **more: Any) -> Any:
        here = self.watch.threads.here
        depth = here.depth
        if is_way and depth:
            return function(self, *args, **more)
        subject = None if subject_of is None else subject_of(args)
        calls, at, nbytes = here.calls, len(here.calls), 0
        calls.append(None)
        here.depth = depth + 1
        start_s = clock()
        try:
            result = function(self, *args, **more)
            if waits:
                self.synchronize()
            if is_head and isinstance(subject, ScreenedHead):
                nbytes = subject.screen_nbytes + sum(len(found.ids) for found in result) * subject.array[:1].nbytes
            return result
        finally:
            end_s = clock()
            here.depth = depth
            calls[at] = (op, subject, depth, start_s, end_s, nbytes)
            if not depth and not here.running:  # asked for by itself, outside a forward pass
                self.watch.finish(start_s)

    method.__name__, method.__doc__ = op, function.__doc__
    return method


def _running(function: Callable[..., Any]) -> Callable[..., Any]:
    @contextmanager
    def running(self: Any) -> Iterator[None]:
        here = self.watch.threads.here
        start_s = time.perf_counter()
        here.running += 1
        try:
            with function(self):
                yield
        finally:
            here.running -= 1
            if not here.running:
                self.watch.finish(start_s)

    running.__doc__ = function.__doc__
    return running
