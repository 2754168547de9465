"""Passes of a model with their parts timed, by one of the execution paths of its backend: see `Profile`."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from ...backends import Backend
from ...backends.observe import ObservedStep, observe
from ...backends.paged_cache import EngineKVCache
from ...families.family import widest_window
from ...reference.cache import KVCache, TokenBatch
from ...reference.config import ModelConfig
from ...reference.weights import FEED_FORWARD, TRACE_NAMES, LinearWeight, Norm
from .tree import BLOCKS, OpTime, Span, Step

READ_WEIGHTS = ("linears", "head_rows", "dense_matmul", "ternary_matmul")  # their second argument; a norm is small
NAMED = ("rms_norm", "linears", "dense_matmul", "ternary_matmul")  # their name includes that of the weight
FIELD_OF_NORM = {trace: field for field, trace in TRACE_NAMES.items()} | {"ln_final": "final_norm"}


class StepTimer:
    """Times passes, and gives each step and its times to `sinks`. See `LoadedModel.watcher`."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.sinks: tuple[Callable[[Step, OpTime], None], ...] = ()

    @contextmanager
    def __call__(self, be: Backend, cfg: ModelConfig, batch: TokenBatch, cache: KVCache) -> Iterator[Backend]:
        """The backend to compute one pass with."""
        clock = OpClock(be, batch, cache, cfg)
        timed = observe(be, clock, self.path)
        start_s = time.perf_counter()
        try:
            yield timed
        finally:
            end_s = time.perf_counter()
            clock.forward.total_s = end_s - start_s
            step = Step(clock.kind, len(batch), threading.get_ident(), start_s, end_s, clock.spans)
            for sink in self.sinks:
                sink(step, clock.forward)


class OpClock:
    """The `around` of one pass: times each call and adds it to the tree."""

    def __init__(self, be: Backend, batch: TokenBatch, cache: KVCache, cfg: ModelConfig) -> None:
        self.synchronize = be.synchronize
        assert isinstance(cache, EngineKVCache)
        self.kind, attended = describe_batch(batch.on_host, widest_window(cfg))
        self.cache_bytes = attended * cache.bytes_per_token // cache.rows_per_token  # of one layer
        self.forward = self.node = OpTime("forward", calls=1)
        self.block = ""
        self.spans: list[Span] = []

    def __call__(self, step: ObservedStep, call: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        outer, spans, op = self.node, self.spans, step.op
        if op in BLOCKS:
            self.block = args[1].name
            block = outer.child(self.block)
            self.node = block.child(op)
        else:
            named = weights_of(args) if op in NAMED else ()
            self.node = outer.child(" ".join([op, *map(short_name, named)]))
        node, at, result = self.node, len(spans), None
        spans.append(Span(node.name, self.block, 0.0, 0.0, 0))
        start_s = time.perf_counter()
        try:
            result = call(*args)
            self.synchronize()  # a device goes on computing after the call
            return result
        finally:
            end_s = time.perf_counter()
            nbytes = self._nbytes(op, args, result)
            spans[at] = Span(node.name, self.block, start_s, end_s, nbytes)
            node.calls += 1
            node.total_s += end_s - start_s
            node.nbytes += nbytes
            self.node = outer
            if op in BLOCKS:
                block.calls += op == BLOCKS[-1]
                block.total_s += end_s - start_s
                self.block = ""

    def _nbytes(self, op: str, args: tuple[Any, ...], result: Any) -> int:
        """Bytes of the weights, and for attention of the keys and values, that the call read."""
        if op == "hidden":
            return sum(self._nbytes(block, (None, layer), None) for layer in args[0].layers for block in BLOCKS)
        if op in BLOCKS:
            attends = op == BLOCKS[0]
            weights = (w.nbytes for name, w in args[1].linears() if (name not in FEED_FORWARD) == attends)
            read: int = sum(weights) + self.cache_bytes * attends
            return read
        if op == "attention":
            return self.cache_bytes
        if op == "head_rows" and result is not None and hasattr(args[1], "screen_nbytes"):
            exact: int = sum(len(rows.ids) for rows in result) * args[1].array[:1].nbytes
            return exact + int(args[1].screen_nbytes)
        return sum(weight.nbytes for weight in weights_of(args)) if op in READ_WEIGHTS else 0


def weights_of(args: tuple[Any, ...]) -> Sequence[Any]:
    """The weights, or the norm, that an op is given as its second argument: one or several."""
    return args[1] if isinstance(args[1], tuple | list) else (args[1],)


def short_name(part: LinearWeight | Norm) -> str:
    """The last word of a weight's name, or what our files call a norm."""
    return FIELD_OF_NORM.get(part.name.split(".", 2)[-1], part.name.rpartition(".")[2])


def describe_batch(batch: TokenBatch, window: int | None) -> tuple[str, int]:
    """-> the kind of a step, and how many past and present tokens it attends to, each counted once."""
    slots, counts = np.unique(batch.slots, return_counts=True)
    kind = "decode" if counts.max() == 1 else "mixed" if counts.min() == 1 else "prefill"
    attended = 0
    for slot in slots:
        positions = batch.positions[batch.slots == slot]
        first_seen = 0 if window is None else max(0, int(positions.min()) - window + 1)
        attended += int(positions.max()) + 1 - first_seen
    return kind, attended
