"""What is asked of an NVIDIA card, and what was found: the data of `gpu.py`, which measures it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from statistics import median
from typing import Any

import numpy as np

from ..reference.config import ModelConfig
from .cuda_kernels import SHAPES_2B_4T_FUSED
from .synthetic import SHAPES
from .timing import Timing
from .validate import Check

PARTS = (
    "kernels",
    "decode",
    "batches",
    "prefill",
    "7b",
    "dense",
    "precision",
    "cpu",
    "peers",
)  # in this order: rivals may hang
MAIN, LARGE, DENSE = "2b-4t", "7b", "tinyllama-1.1b"  # of SHAPES
TITLES = {MAIN: "2B-4T", LARGE: "7B", DENSE: "TinyLlama-1.1B"}
BATCHES = {8: 6.0, 32: 18.0, 128: 40.0}  # sequences: total tokens/s asked for, over those of one


@dataclass(frozen=True)
class Plan:
    """What is measured. The targets are about the default; tests take small shapes and few tokens."""

    shapes: dict[str, ModelConfig] = field(default_factory=lambda: dict(SHAPES))
    layers: int | None = None  # of every model, at most
    kernel_shapes: tuple[tuple[int, int], ...] = SHAPES_2B_4T_FUSED  # (N, K)
    batches: tuple[int, ...] = tuple(BATCHES)  # sequences
    large_batch: int = 32  # of the 7B
    prompt_tokens: int = 32  # before decoding
    new_tokens: int = 128
    prefill_tokens: int = 2048
    repeats: int = 3
    kernel_repeats: int = 15
    cold_bytes: int | None = None  # see `measure_cuda_kernels`
    copy_bytes: int | None = None

    @property
    def whole(self) -> bool:
        """Whether it is the models that the targets are about."""
        return self.layers is None and self.shapes == SHAPES and self.kernel_shapes == SHAPES_2B_4T_FUSED

    def config(self, name: str) -> ModelConfig:
        """The shape of that name, shortened."""
        config = self.shapes[name]
        layers = config.num_hidden_layers if self.layers is None else min(self.layers, config.num_hidden_layers)
        return replace(config, num_hidden_layers=layers)

    def title(self, name: str) -> str:
        """ "2B-4T", or "2B-4T of 3 layers" where that is not all of them"""
        layers = self.config(name).num_hidden_layers
        return TITLES[name] + (f" of {layers} layers" if layers < self.shapes[name].num_hidden_layers else "")

    def prompts(self, vocab: int, count: int) -> list[list[int]]:
        """Random token ids, `count` prompts of `prompt_tokens`; the first is the same whatever the count."""
        return np.random.default_rng(1).integers(0, vocab, (count, self.prompt_tokens)).tolist()


@dataclass(frozen=True)
class Ask:
    """One thing that is asked for."""

    part: str
    what: str
    unit: str  # "tok/s" of decoding, all sequences together; "ms"; "GB"; "x", a ratio of those; "%", a share
    target: float | None = None
    at_most: bool = False  # the target is a ceiling
    more: str = ""  # that is asked for, in words

    @property
    def words(self) -> str:
        """ ">= 1,500 tok/s (stretch 2,400)" """
        if self.target is None:
            return self.more
        bound = f"{'<=' if self.at_most else '>='} {self.target:,.4g} {self.unit}"
        return f"{bound} ({self.more})" if self.more else bound


@dataclass(frozen=True)
class Row:
    """What was found. None: not measured, and `why`."""

    ask: Ask
    found: float | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    why: str = ""
    differs: bool = False  # it was compared, and was not equal

    @property
    def meets(self) -> bool | None:
        """Whether it is what was asked; None where nothing was, or nothing was found."""
        if self.found is None or self.ask.target is None:
            return None
        return self.found <= self.ask.target if self.ask.at_most else self.found >= self.ask.target


@dataclass
class GpuBench:
    """All rows so far, and the copy that the bounds come from."""

    device: str
    emulated: bool
    plan: Plan
    parts: tuple[str, ...]
    copy_bytes: int  # read and written
    copy_samples_s: list[float]
    rows: list[Row] = field(default_factory=list)
    checks: dict[str, Check] = field(default_factory=dict)  # by shape, dtype and backend
    seconds: float = 0.0
    finished: bool = False

    @property
    def judged(self) -> bool:
        """Whether the targets are about what was measured."""
        return self.plan.whole and not self.emulated

    def met(self, row: Row) -> bool | None:
        return row.meets if self.judged else None

    @property
    def equal(self) -> bool:
        """Whether nothing that was compared differs."""
        return not any(row.differs for row in self.rows) and all(check.equal for check in self.checks.values())

    @property
    def copy_gb_per_s(self) -> float:
        """Read and written, over the median time."""
        return self.copy_bytes / median(self.copy_samples_s) / 1e9

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain JSON values."""
        plan = {key: value for key, value in vars(self.plan).items() if key != "shapes"}
        rows = [
            {**asdict(r.ask), "found": r.found, "met": self.met(r), "why": r.why, "differs": r.differs, **r.facts}
            for r in self.rows
        ]
        return {
            **{name: getattr(self, name) for name in ("device", "emulated", "parts", "seconds", "finished")},
            **{name: getattr(self, name) for name in ("judged", "equal", "copy_gb_per_s")},
            "copy": asdict(Timing.of(self.copy_samples_s)),
            "plan": {**plan, "layers_of": {n: self.plan.config(n).num_hidden_layers for n in (MAIN, LARGE, DENSE)}},
            "checks": {name: {**asdict(check), "equal": check.equal} for name, check in self.checks.items()},
            "rows": rows,
        }


class Differs(Exception):
    """Two things that must be equal are not: there is no speed. facts: what was measured all the same."""

    def __init__(self, what: str, **facts: Any) -> None:
        super().__init__(what)
        self.facts = facts


@dataclass(frozen=True)
class Decoding:
    """Repetitions of one decoding."""

    batch: int
    tokens: list[list[int]]  # that came of each prompt
    tokens_per_s: list[float]  # of all prompts together, in each repetition
    steps_s: list[float]  # of all repetitions
    step_bytes: int = 0  # of one step, all sequences; 0: there is no bound

    @property
    def best(self) -> float:
        return max(self.tokens_per_s)

    def facts(self, copy_gb_per_s: float) -> dict[str, Any]:
        """For a row, with the bound by that copy."""
        facts = {
            "batch": self.batch,
            "tokens_per_s": self.best,
            "tokens_per_s_median": median(self.tokens_per_s),
            "step_ms_median": 1e3 * median(self.steps_s),
            "repetitions": len(self.tokens_per_s),
        }
        if self.step_bytes:
            bound = self.batch * copy_gb_per_s * 1e9 / self.step_bytes
            facts |= {"step_bytes": self.step_bytes, "bound_tokens_per_s": bound, "of_bound": self.best / bound}
        return facts
