"""What is asked of an NVIDIA card, and the results: the data of `gpu.py`, which measures it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

import numpy as np

from ..reference.config import ModelConfig
from .cuda_kernels import MIN_SHARE, SHAPES_2B_4T_FUSED, TARGET_SHARES
from .record import Record
from .synthetic import SHAPES
from .timing import Timing
from .validate import Check

# In this order; the peers are last because another engine may hang
PARTS = ("kernels", "decode", "batches", "prefill", "7b", "dense", "precision", "cpu", "peers")
MAIN, LARGE, DENSE = "2b-4t", "7b", "tinyllama-1.1b"  # of SHAPES
TITLES = {MAIN: "2B-4T", LARGE: "7B", DENSE: "TinyLlama-1.1B"}
BATCHES = {8: 6.0, 32: 18.0, 128: 40.0}  # sequences: tokens/s of all together, over those of one
NARROW = ("bfloat16", "float16")


@dataclass(frozen=True)
class GpuPlan:
    """What is measured. The targets apply to the default plan; tests take small shapes and few tokens."""

    shapes: dict[str, ModelConfig] = field(default_factory=lambda: dict(SHAPES))
    layers: int | None = None  # at most, of every model
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
        """Whether the models and kernels are those that the targets apply to."""
        return self.layers is None and self.shapes == SHAPES and self.kernel_shapes == SHAPES_2B_4T_FUSED

    def config(self, name: str) -> ModelConfig:
        """The shape of that name, with at most `layers` layers."""
        config = self.shapes[name]
        return replace(config, num_hidden_layers=min(self.layers or config.num_hidden_layers, config.num_hidden_layers))

    def title(self, name: str) -> str:
        """ "2B-4T", or "2B-4T of 3 layers" if it has more"""
        layers = self.config(name).num_hidden_layers
        return TITLES[name] + (f" of {layers} layers" if layers < self.shapes[name].num_hidden_layers else "")

    def prompts(self, vocab: int, count: int) -> list[list[int]]:
        """Random token ids, `count` prompts of `prompt_tokens`; the first is the same for every count."""
        return np.random.default_rng(1).integers(0, vocab, (count, self.prompt_tokens)).tolist()

    def to_dict(self) -> dict[str, Any]:
        plan = {key: value for key, value in vars(self).items() if key != "shapes"}
        return {**plan, "layers_of": {name: self.config(name).num_hidden_layers for name in TITLES}}


@dataclass(frozen=True)
class Case:
    """One decoding to measure: `batch` sequences of a model of that shape."""

    name: str
    batch: int = 1
    dtype: str = "float32"
    backend: str = "cupy"

    @property
    def subject(self) -> str:
        """Names the model and what computes it."""
        return f"{self.name} {self.dtype} {self.backend}"


@dataclass(frozen=True)
class Goal:
    """One thing that is measured, and its target."""

    part: str
    what: str
    unit: str  # "tok/s" of decoding, all sequences together; "ms"; "GB"; "x", a ratio of those; "%", a share
    target: float | None = None
    at_most: bool = False  # the target is an upper limit
    note: str = ""  # further targets, in words
    case: Case | None = None  # the decoding that is measured
    over: Case | None = None  # the one that it is divided by
    shape: tuple[int, int] = (0, 0)  # (N, K), of a kernel
    quantized: bool = False  # the peer's weights

    @property
    def words(self) -> str:
        """ ">= 1,500 tok/s (stretch 2,400)" """
        if self.target is None:
            return self.note
        bound = f"{'<=' if self.at_most else '>='} {self.target:,.4g} {self.unit}"
        return f"{bound} ({self.note})" if self.note else bound


def goals(plan: GpuPlan) -> list[Goal]:
    """Everything that is asked, in the order of PARTS."""
    main, large, dense = (plan.title(name) for name in (MAIN, LARGE, DENSE))
    one, batch = Case(MAIN), plan.large_batch
    share = {shape: 100 * TARGET_SHARES.get(shape, MIN_SHARE) for shape in plan.kernel_shapes}
    return [
        *(Goal("kernels", f"GEMV {n}x{k} over a copy", "%", share[n, k], shape=(n, k)) for n, k in share),
        Goal("decode", f"{main}, batch 1", "tok/s", 1500, note="stretch 2,400", case=one),
        *(
            Goal("batches", f"{main}, batch {n} over 1", "x", BATCHES.get(n), case=Case(MAIN, n), over=one)
            for n in plan.batches
        ),
        Goal("prefill", f"{main}, prompt of {plan.prefill_tokens:,}", "ms", 40, at_most=True),
        Goal("7b", f"{large}, packed weights", "GB", 2.6, at_most=True),
        Goal("7b", f"{large}, batch 1", "tok/s", 600, case=Case(LARGE)),
        Goal("7b", f"{large}, batch {batch}", "tok/s", 8000, case=Case(LARGE, batch)),
        *(Goal("dense", f"{dense}, {dtype}", "tok/s", 100, case=Case(DENSE, dtype=dtype)) for dtype in NARROW),
        *(
            Goal("precision", f"{main}, {t} over float32", "x", 1.3, note="to 1.5", case=Case(MAIN, dtype=t), over=one)
            for t in NARROW
        ),
        Goal("cpu", f"{main}, GPU over CPU", "x", 50, case=one, over=Case(MAIN, backend="cython")),
        Goal("peers", f"{main} over transformers' BitNet", "x", 10, quantized=True),
        Goal("peers", f"{main} over transformers' bf16", "x", 2.5),
    ]


@dataclass(frozen=True)
class GoalResult:
    """The value measured for a goal. None: it was not measured; `why` says why not."""

    goal: Goal
    value: float | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    why: str = ""
    differs: bool = False  # a comparison was not equal

    @property
    def meets(self) -> bool | None:
        """Whether the value meets the target; None without a value or a target."""
        if self.value is None or self.goal.target is None:
            return None
        return self.value <= self.goal.target if self.goal.at_most else self.value >= self.goal.target


@dataclass
class GpuBench(Record):
    """All results so far, and the copy that the bounds are computed from."""

    device: str
    emulated: bool
    software: dict[str, str]  # versions of CuPy, CUDA and the driver
    plan: GpuPlan
    parts: tuple[str, ...]
    copy_bytes: int  # read and written
    copy_samples_s: list[float]
    rows: list[GoalResult] = field(default_factory=list)
    checks: dict[str, Check] = field(default_factory=dict)  # by shape, dtype and backend
    seconds: float = 0.0
    finished: bool = False

    @property
    def judged(self) -> bool:
        """Whether the targets apply to what was measured."""
        return self.plan.whole and not self.emulated

    def met(self, row: GoalResult) -> bool | None:
        return row.meets if self.judged else None

    @property
    def equal(self) -> bool:
        """Whether all comparisons were equal."""
        return not any(row.differs for row in self.rows) and all(check.equal for check in self.checks.values())

    @property
    def copy_gb_per_s(self) -> float:
        """Read and written, over the median time."""
        return self.copy_bytes / median(self.copy_samples_s) / 1e9

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain JSON values. In a row "found" is the value, and "more" the note."""
        rows = []
        for row in self.rows:
            goal = {name: getattr(row.goal, name) for name in ("part", "what", "unit", "target", "at_most")}
            verdict = {"found": row.value, "met": self.met(row), "why": row.why, "differs": row.differs}
            rows.append({**goal, "more": row.goal.note, **verdict, **row.facts})
        timing = Timing.of(self.copy_samples_s).to_dict()
        return {**super().to_dict(), "copy": timing, "plan": self.plan.to_dict(), "rows": rows}


class Differs(Exception):
    """Two results that must be equal are not, so there is no speed."""


@dataclass(frozen=True)
class DecodingRun:
    """Repetitions of one decoding."""

    batch: int
    tokens: list[list[int]]  # generated from each prompt
    tokens_per_s: list[float]  # of all prompts together, in each repetition
    step_bytes: int = 0  # read by one step of all sequences; 0: there is no bound

    @property
    def best(self) -> float:
        return max(self.tokens_per_s)

    @property
    def step_s(self) -> float:
        """Mean time of a step, of the median repetition."""
        return self.batch / median(self.tokens_per_s)

    def facts(self, copy_gb_per_s: float) -> dict[str, Any]:
        """For a row, with the bound computed from that copy."""
        facts = {
            "batch": self.batch,
            "tokens_per_s": self.best,
            "tokens_per_s_median": median(self.tokens_per_s),
            "step_ms_median": 1e3 * self.step_s,
            "repetitions": len(self.tokens_per_s),
        }
        if self.step_bytes:
            bound = self.batch * copy_gb_per_s * 1e9 / self.step_bytes
            facts |= {"step_bytes": self.step_bytes, "bound_tokens_per_s": bound, "of_bound": self.best / bound}
        return facts
