"""The calls of steps added up, by their place in the model: forward > blocks.3 > feed_forward > linear down_proj.

A backend is told no place. It is read off the weights: each block's two halves begin with a norm of their own, and
end with the sum that adds them to the residual. So what is between the operations (the cache's writes, Python) counts
as the half's own time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import groupby, pairwise
from typing import Any

from ...reference.weights import LinearWeight, ModelWeights
from .timed import Call, Step

HALVES = ("attention_block", "feed_forward")  # as `model.py` calls them
READ_WEIGHTS = ("linear", "linears", "lm_head", "head_candidates", "dense_matmul", "ternary_matmul")
PHASES = ("prefill", "mixed", "decode", "other")


@dataclass
class OpTime:
    """An operation, or a part of the model, and what it took in all. `nbytes`: the weights, or for attention the keys
    and values, that it read; each counted once a call, however many tokens they are read for."""

    name: str  # "linears gate_proj up_proj"
    calls: int = 0
    total_s: float = 0.0
    nbytes: int = 0
    children: dict[str, OpTime] = field(default_factory=dict)

    @property
    def self_s(self) -> float:
        """Less the time of the operations inside."""
        return self.total_s - sum(child.total_s for child in self.children.values())

    @property
    def mean_s(self) -> float:
        return self.total_s / self.calls if self.calls else 0.0

    @property
    def gb_per_s(self) -> float | None:
        """10^9 bytes a second; None where nothing to speak of is read."""
        return self.nbytes / self.total_s / 1e9 if self.nbytes and self.total_s else None

    def child(self, name: str) -> OpTime:
        found = self.children.get(name)
        if found is None:
            found = self.children[name] = OpTime(name)
        return found

    def add(self, other: OpTime) -> None:
        """All of another one, part by part."""
        self.calls += other.calls
        self.total_s += other.total_s
        self.nbytes += other.nbytes
        for name, child in other.children.items():
            self.child(name).add(child)

    def to_dict(self) -> dict[str, Any]:
        facts = {name: getattr(self, name) for name in ("name", "calls", "total_s", "self_s", "mean_s", "nbytes")}
        return {**facts, "gb_per_s": self.gb_per_s, "children": [c.to_dict() for c in self.children.values()]}


@dataclass
class Phase:
    """All steps of one kind: "prefill", "decode", "mixed" or "other" (see `timed.read_attention`)."""

    kind: str
    tokens: int = 0
    forward: OpTime = field(default_factory=lambda: OpTime("forward"))  # `calls`: the steps

    def merged(self) -> OpTime:
        """The same tree with all blocks in one, "blocks"."""
        out = OpTime("forward", self.forward.calls, self.forward.total_s, self.forward.nbytes)
        for name, child in self.forward.children.items():
            out.child("blocks" if name.startswith("blocks.") else name).add(child)
        return out

    def ops(self) -> dict[str, OpTime]:
        """The operations that the model's text asks for, each with its parts, from all places together."""
        found: dict[str, OpTime] = {}

        def visit(node: OpTime) -> None:
            for name, child in node.children.items():
                if name in HALVES or name.startswith("blocks."):
                    visit(child)
                else:
                    found.setdefault(name, OpTime(name)).add(child)

        visit(self.forward)
        return found

    def to_dict(self) -> dict[str, Any]:
        facts = {"kind": self.kind, "steps": self.forward.calls, "tokens": self.tokens}
        return {**facts, "forward": self.forward.to_dict()}


@dataclass(frozen=True)
class Span:
    """One stretch of time and its place: ("forward", "blocks.0", "attention_block", "rope")."""

    path: tuple[str, ...]
    start_s: float
    end_s: float
    nbytes: int = 0


class Places:
    """Which weight stands where in a model, and so, for the calls of a step, which call does."""

    def __init__(self, w: ModelWeights) -> None:
        self._names: dict[int, str] = {id(w.final_norm): "final_norm", id(w.embedding): "embedding"}
        self._halves: dict[int, tuple[str, ...]] = {id(w.final_norm): ()}  # by the norm that begins it
        for index, layer in enumerate(w.layers):
            for name in ("attn_norm", "attn_sub_norm", "ffn_norm", "ffn_sub_norm"):
                self._names[id(getattr(layer, name))] = name
            self._halves[id(layer.attn_norm)] = (f"blocks.{index}", HALVES[0])
            self._halves[id(layer.ffn_norm)] = (f"blocks.{index}", HALVES[1])
        for name, weight in w.linears():
            self._names[id(weight)] = name.rpartition(".")[2]

    def spans(self, step: Step) -> Iterator[Span]:
        """The step, the operations in it, and the parts of the model that hold them."""
        yield Span(("forward",), step.start_s, step.end_s)
        placed = list(self._placed(step.calls))
        path: list[str] = []  # of the operations around a call
        for call, half in placed:
            path[call.depth :] = [self._name(call)]
            yield Span(("forward", *half, *path), call.start_s, call.end_s, self._nbytes_of(call))
        yield from self._parts(placed)

    def _parts(self, placed: list[tuple[Call, tuple[str, ...]]]) -> Iterator[Span]:
        """The blocks and their halves: each ends where the next one begins."""
        marks = [(call.start_s, half) for call, half in placed if not call.depth]
        marks += [(call.end_s, ()) for call, _ in placed[-1:]]
        for length in (2, 1):
            starts = [(next(group)[0], part) for part, group in groupby(marks, key=lambda mark: mark[1][:length])]
            for (start_s, part), (end_s, _) in pairwise(starts):
                if len(part) == length:
                    yield Span(("forward", *part), start_s, end_s)

    def _placed(self, calls: list[Call]) -> Iterator[tuple[Call, tuple[str, ...]]]:
        """Each call with the half of a block that it stands in; its sums stand in the block, () outside of all."""
        half: tuple[str, ...] = ()
        for call in calls:
            if call.depth == 0:
                if call.op in ("embed", "take_rows"):
                    half = ()
                elif call.op == "rms_norm":
                    half = self._halves.get(id(call.subject), half)
                elif call.op == "add":
                    half = half[:1]
            yield call, half

    def _name(self, call: Call) -> str:
        if call.op in ("embed", "attention", "lm_head", "head_candidates") or call.subject is None:
            return call.op
        subjects = call.subject if isinstance(call.subject, tuple | list) else (call.subject,)
        return " ".join([call.op, *(self._names.get(id(each), "?") for each in subjects)])

    def _nbytes_of(self, call: Call) -> int:
        if call.nbytes or call.op not in READ_WEIGHTS:
            return call.nbytes
        subjects = call.subject if isinstance(call.subject, tuple | list) else (call.subject,)
        return sum(weight.nbytes for weight in subjects if isinstance(weight, LinearWeight))
