"""Times added up by place in the model: forward > blocks.3 > feed_forward > linears down_proj."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ...errors import count_of

BLOCKS = ("attention_block", "feed_forward")  # as `reference/model.py` calls them
KINDS = ("prefill", "mixed", "decode")  # of steps


@dataclass
class OpTime:
    """The time of an operation, or of a part of the model with the operations inside it.

    `nbytes`: bytes read of weights, keys and values; counted once per call, however many tokens they are read for.
    """

    name: str  # "linears gate_proj up_proj"
    calls: int = 0
    total_s: float = 0.0
    nbytes: int = 0
    children: dict[str, OpTime] = field(default_factory=dict, repr=False)

    @property
    def self_s(self) -> float:
        """Without the time of the children."""
        return self.total_s - sum(child.total_s for child in self.children.values())

    @property
    def mean_s(self) -> float:
        return self.total_s / self.calls if self.calls else 0.0

    @property
    def gb_per_s(self) -> float | None:
        """10^9 bytes per second; None when no weights, keys or values are read."""
        return self.nbytes / self.total_s / 1e9 if self.nbytes and self.total_s else None

    def child(self, name: str) -> OpTime:
        if name not in self.children:
            self.children[name] = OpTime(name)
        return self.children[name]

    def add(self, other: OpTime) -> None:
        """Add another tree of the same place, child by child."""
        self.calls += other.calls
        self.total_s += other.total_s
        self.nbytes += other.nbytes
        for name, child in other.children.items():
            self.child(name).add(child)

    def to_dict(self) -> dict[str, Any]:
        names = ("name", "calls", "total_s", "self_s", "mean_s", "nbytes", "gb_per_s")
        facts = {name: getattr(self, name) for name in names}
        return {**facts, "children": [child.to_dict() for child in self.children.values()]}


@dataclass
class Phase:
    """All steps of one kind: "prefill" (several tokens per sequence), "decode" (one, so a prompt of one token is
    "decode" too), or "mixed"."""

    kind: str
    tokens: int = 0
    forward: OpTime = field(default_factory=lambda: OpTime("forward"))  # its `calls` are the steps

    @property
    def title(self) -> str:
        """ "decode: 31 steps, 31 tokens, 1.52 ms per token" """
        steps, tokens = self.forward.calls, self.tokens
        words = f"{self.kind}: {count_of(steps, 'step')}, {count_of(tokens, 'token')}"
        return f"{words}, {self.forward.total_s / tokens * 1e3:.3g} ms per token" if tokens else words

    def merged(self) -> OpTime:
        """The same tree with all blocks in one, "blocks"."""
        out = OpTime("forward", self.forward.calls, self.forward.total_s, self.forward.nbytes)
        for name, child in self.forward.children.items():
            out.child("blocks" if name.startswith("blocks.") else name).add(child)
        return out

    def ops(self) -> dict[str, OpTime]:
        """The operations of all places together: what stands in the model's text, with their parts as children.

        A block that was timed as a whole is one operation.
        """
        ops: dict[str, OpTime] = {}

        def visit(node: OpTime) -> None:
            for name, child in node.children.items():
                if name.startswith("blocks.") or (name in BLOCKS and child.children):
                    visit(child)
                else:
                    ops.setdefault(name, OpTime(name)).add(child)

        visit(self.forward)
        return ops

    def to_dict(self) -> dict[str, Any]:
        facts = {"kind": self.kind, "steps": self.forward.calls, "tokens": self.tokens}
        return {**facts, "forward": self.forward.to_dict()}


class Span(NamedTuple):
    """One call: its name ("rope"), the block it stands in, and when it ran (time.perf_counter())."""

    name: str
    block: str  # "blocks.0", or "" outside of all blocks
    start_s: float
    end_s: float
    nbytes: int


@dataclass(frozen=True)
class Step:
    """One pass, with its calls in the order of their beginning."""

    kind: str  # one of KINDS
    tokens: int
    thread: int  # threading.get_ident()
    start_s: float
    end_s: float
    spans: list[Span] = field(repr=False)
