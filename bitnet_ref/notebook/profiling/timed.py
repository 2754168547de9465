"""Passes of a model with their parts timed, by one of the execution paths of its backend: see `Profile`."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...backends import Backend
from ...backends.observe import Around, Observed
from ...backends.run import Logits, run
from ...backends.split import SplitBackend
from ...reference.cache import KVCache, TokenBatch
from ...reference.config import ModelConfig
from ...reference.weights import ATTENTION_LINEARS, LinearWeight, ModelWeights
from .tree import BLOCKS, OpTime, Span, Step

PATHS = ("ops", "blocks", "replayed")
READ_WEIGHTS = ("linears", "head_rows", "dense_matmul", "ternary_matmul")  # their second argument; a norm is small
NAMED = ("rms_norm", "linears", "dense_matmul", "ternary_matmul")  # their name includes that of the weight


class TimedBackend(Observed):
    """An observed backend that also passes each block to `around`, composed of its operations or, by the path
    "blocks", as a whole. By the path "replayed" it passes the whole pass up to the head."""

    def __init__(self, inner: Backend, around: Around, path: str) -> None:
        super().__init__(inner, around)
        self.path = path

    def hidden(self, *args: Any) -> NDArray:
        if self.path == "replayed":
            return self.around("hidden", self.inner.hidden, args)
        return super().hidden(*args)

    def attention_block(self, *args: Any) -> NDArray:
        block = self.inner.attention_block if self.path == "blocks" else super().attention_block
        return self.around("attention_block", block, args)

    def feed_forward(self, *args: Any) -> NDArray:
        block = self.inner.feed_forward if self.path == "blocks" else super().feed_forward
        return self.around("feed_forward", block, args)


class StepTimer:
    """Computes passes as `run` does, and gives each step and its times to `sinks`. See `LoadedModel.run_pass`."""

    def __init__(self, weights: ModelWeights, path: str) -> None:
        self.path = path
        self.sinks: tuple[Callable[[Step, OpTime], None], ...] = ()
        self.names = {id(weights.final_norm): "final_norm"}
        for index, layer in enumerate(weights.layers):
            self.names[id(layer)] = f"blocks.{index}"
            self.names |= {id(norm): name for name, norm in layer.norms()}
        for name, weight in weights.linears():
            self.names[id(weight)] = name.rpartition(".")[2]

    def __call__(
        self,
        be: Backend,
        w: ModelWeights,
        cfg: ModelConfig,
        batch: TokenBatch,
        cache: KVCache,
        top: Any = None,
        path: str | None = None,
    ) -> Logits:
        """`run`. A pass whose caller names its path is computed by that path, and not timed."""
        if path is not None:
            return run(be, w, cfg, batch, cache, top, path)
        clock = OpClock(be, self.names, batch, cache, cfg)
        if isinstance(be, SplitBackend) and self.path != "replayed":
            timed: Backend = be.with_backends([TimedBackend(part.backend, clock, self.path) for part in be.parts])
        else:
            timed = TimedBackend(be, clock, self.path)
        start_s = time.perf_counter()
        try:
            return run(timed, w, cfg, batch, cache, top)
        finally:
            end_s = time.perf_counter()
            clock.forward.total_s = end_s - start_s
            step = Step(clock.kind, len(batch), threading.get_ident(), start_s, end_s, clock.spans)
            for sink in self.sinks:
                sink(step, clock.forward)


class OpClock:
    """The `around` of one pass: times each call and adds it to the tree."""

    def __init__(self, be: Backend, names: dict[int, str], batch: TokenBatch, cache: KVCache, cfg: ModelConfig) -> None:
        self.synchronize, self.names = be.synchronize, names
        self.kind, attended = describe_batch(batch.on_host, cfg.widest_window)
        self.cache_bytes = attended * cache.bytes_per_token // cache.layers  # of one layer
        self.forward = self.node = OpTime("forward", calls=1)
        self.block = ""
        self.spans: list[Span] = []

    def __call__(self, op: str, call: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        outer, spans = self.node, self.spans
        if op in BLOCKS:
            self.block = self.names[id(args[1])]
            block = outer.child(self.block)
            self.node = block.child(op)
        else:
            weights = weights_of(args) if op in NAMED else ()
            self.node = outer.child(" ".join([op, *(self.names.get(id(weight), "?") for weight in weights)]))
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
            weights = (w.nbytes for name, w in args[1].linears() if (name in ATTENTION_LINEARS) == attends)
            return sum(weights) + self.cache_bytes * attends
        if op == "attention":
            return self.cache_bytes
        if op == "head_rows" and result is not None and hasattr(args[1], "screen_nbytes"):
            return args[1].screen_nbytes + sum(len(rows.ids) for rows in result) * args[1].array[:1].nbytes
        return sum(weight.nbytes for weight in weights_of(args)) if op in READ_WEIGHTS else 0


def weights_of(args: tuple[Any, ...]) -> Sequence[LinearWeight]:
    """The weights that an op is given as its second argument: one or several."""
    return args[1] if isinstance(args[1], tuple | list) else (args[1],)


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
