"""Everything that is asked of an NVIDIA card, measured in one run: its kernels, whole models, and other engines.

    python scripts/benchmarks/gpu.py --out gpu.json

Validate, then benchmark: each model is compared with the NumPy reference before it is timed (`check_model`: the linears
of its first block, and the logits of that block and the head alone, which takes the reference seconds, not minutes).
Every repetition must give the same tokens, and the first prompt of a batch those that it gives alone; else there is no
speed.

Weights are random. Speeds are `generate`'s own, of the best repetition, after one that is not counted: it compiles
kernels and records the step. The bound of decoding is the speed of a copy within the card's memory, taken in turn with
the repetitions (bytes read and written both count), over the bytes of a step (`bytes_of_step`).
"""

from __future__ import annotations

import gc
import importlib
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import mean, median
from typing import TYPE_CHECKING, Any, cast

import click
import numpy as np
from commands import Script, device_option, draw_device, start
from cuda_kernels import MIN_SHARE, SHAPES_2B_4T_FUSED, TARGET_SHARES, PlainCopy, measure_cuda_kernels
from peers import measure_peer

from bitnet_ref.api import Model
from bitnet_ref.backends import choose_backend
from bitnet_ref.backends.cuda import open_device
from bitnet_ref.benchmark.models import bytes_of_step
from bitnet_ref.benchmark.synthetic import SHAPES, synthetic_model
from bitnet_ref.benchmark.timing import Record, Sample, Timing
from bitnet_ref.benchmark.validate import Check, check_model
from bitnet_ref.cli.bench_shared import draw_table, report_bench
from bitnet_ref.cli.shell import LoadingBar, OutputFile, common_options
from bitnet_ref.errors import BitNetRefError, ConfigError, DeviceError
from bitnet_ref.families import family_of
from bitnet_ref.formats.checkpoint import Progress
from bitnet_ref.generation.results import Generation, GenerationStats
from bitnet_ref.reference.config import ModelConfig
from bitnet_ref.system.json_file import write_json
from bitnet_ref.system.threads import resolve_threads

if TYPE_CHECKING:
    from rich.console import Console

PEER_TIMEOUT_S = 180.0

# In this order; the peers are last because another engine may hang
PARTS = ("kernels", "decode", "batches", "prefill", "7b", "dense", "precision", "cpu", "peers")
MAIN, LARGE, DENSE = "2b-4t", "7b", "tinyllama-1.1b"  # of SHAPES
TITLES = {MAIN: "2B-4T", LARGE: "7B", DENSE: "TinyLlama-1.1B"}
BATCHES = {8: 6.0, 32: 18.0, 128: 40.0}  # sequences: tokens/s of all together, over those of one
NARROW = ("bfloat16", "float16")

Facts = dict[str, Any]  # what stands beside a value in its row


# -- what is asked, and the results ------------------------------------------------------------------------------------


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
        return family_of(config).of_layers(config, range(config.num_hidden_layers)[: self.layers])

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
        timing = Timing.of([Sample(taken_s) for taken_s in self.copy_samples_s]).to_dict()
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
        facts = {"batch": self.batch, "tokens_per_s": self.best, "tokens_per_s_median": median(self.tokens_per_s)}
        facts |= {"step_ms_median": 1e3 * self.step_s, "repetitions": len(self.tokens_per_s)}
        if self.step_bytes:
            bound = self.batch * copy_gb_per_s * 1e9 / self.step_bytes
            facts |= {"step_bytes": self.step_bytes, "bound_tokens_per_s": bound, "of_bound": self.best / bound}
        return facts


# -- measuring ---------------------------------------------------------------------------------------------------------


def measure_gpu(
    plan: GpuPlan | None = None,
    parts: Sequence[str] = PARTS,
    *,
    index: int = 0,
    python: str = sys.executable,
    on_row: Callable[[GpuBench], object] | None = None,
    progress: Progress | None = None,
) -> GpuBench:
    """Measure these parts on the card of that number, or on the emulated device (BITNET_REF_CUDA=emulated).

    python: the interpreter that has transformers. on_row: called with the results so far after each measurement. A
    measurement that fails becomes a row that says why, and the others go on. Raises BackendUnavailable without a card,
    ConfigError for a plan that measures nothing.
    """
    plan = plan or GpuPlan()
    if unknown := [part for part in parts if part not in PARTS]:
        raise ConfigError(f"expected some of {', '.join(PARTS)}, got {unknown[0]!r}", field="parts")
    minima = {"layers": 1, "prompt_tokens": 1, "prefill_tokens": 1, "repeats": 1, "new_tokens": 2}
    for name, minimum in minima.items():
        if (got := getattr(plan, name)) is not None and got < minimum:
            raise ConfigError(f"expected at least {minimum}, got {got}", field=f"plan.{name}")
    run = GpuRun(plan, tuple(part for part in PARTS if part in parts), index, python)
    started, bench = time.perf_counter(), run.bench
    asked = [goal for goal in goals(plan) if goal.part in bench.parts]
    try:
        for done, goal in enumerate(asked, start=1):
            bench.rows.append(run.row(goal))
            bench.seconds, bench.finished = time.perf_counter() - started, done == len(asked)
            if progress is not None:
                progress(done, len(asked))
            if on_row is not None:
                on_row(bench)
    finally:
        run.close()
    return bench


class GpuRun:
    """Measures goal by goal. One model at a time is held: the last one used."""

    def __init__(self, plan: GpuPlan, parts: tuple[str, ...], index: int, python: str) -> None:
        self.plan, self.index, self.python = plan, index, python
        self.device = open_device(index)
        self.copy = PlainCopy(self.device, plan.copy_bytes)
        self.copy.seconds()  # not counted: the card may have to wake up
        emulated = self.device.emulated
        facts = self.device.name, emulated, {} if emulated else software_versions(), plan, parts
        self.bench = GpuBench(*facts, self.copy.nbytes, [self.copy.seconds()])
        self._held: tuple[str, Model] | None = None
        self._decodings: dict[Case, DecodingRun] = {}

    def close(self) -> None:
        self.drop()
        del self.copy
        with suppress(DeviceError):
            self.device.close()

    def row(self, goal: Goal) -> GoalResult:
        """The value, or why there is none. Facts that were found before a failure are kept."""
        facts: Facts = {}
        try:
            find = self.decode_goal if goal.case is not None else getattr(self, f"find_{goal.part}")
            return GoalResult(goal, find(goal, facts), facts)
        except Differs as error:
            return GoalResult(goal, facts=facts, why=f"DIFFERS: {error}", differs=True)
        except Exception as error:  # a bug of ours too ends one row, not the run
            if not isinstance(error, (BitNetRefError, MemoryError)):
                traceback.print_exc()
            return GoalResult(goal, facts=facts, why=" ".join(f"{type(error).__name__}: {error}".split()))

    # -- goals ---------------------------------------------------------------------------------------------------------

    def decode_goal(self, goal: Goal, facts: Facts) -> float:
        """Tokens per second of the goal's case, or their ratio to those of another case."""
        assert goal.case is not None
        over = None if goal.over is None else self.decode(goal.over, {})
        if over is not None and goal.part == "cpu":
            facts |= {f"cpu_{key}": value for key, value in over.facts(0).items()}
            facts["cpu_threads"] = resolve_threads(None)
        decoding = self.decode(goal.case, facts)
        if over is None:
            return decoding.best
        if goal.part == "precision":
            facts["fewer_bytes"] = over.step_bytes / decoding.step_bytes
        return decoding.best / over.best

    def find_kernels(self, goal: Goal, facts: Facts) -> float:
        plan, (n, k) = self.plan, goal.shape
        sizes: dict[str, Any] = {"cold_bytes": plan.cold_bytes, "copy_bytes": plan.copy_bytes}
        bench = measure_cuda_kernels(self.device, [goal.shape], [1], repeats=plan.kernel_repeats, **sizes)
        self.device.trim()  # models have a pool of their own
        self.bench.checks[f"kernels {n}x{k}"] = bench.check
        (result,) = (result for result in bench.results if result.chosen)
        if result.share_of_copy is None:
            raise Differs(f"{result.kernel} is not what the NumPy reference computes")
        facts |= {"kernel": result.kernel, "gb_per_s": result.gb_per_s, "copy_gb_per_s": bench.copy_gb_per_s}
        return 100 * result.share_of_copy

    def find_prefill(self, goal: Goal, facts: Facts) -> float:
        model, tokens = self.subject(Case(MAIN)), self.plan.prefill_tokens
        prompt = np.random.default_rng(2).integers(0, model.config.vocab_size, tokens).tolist()
        runs = [generate(model, [prompt], 1) for _ in range(1 + self.plan.repeats)]
        check_same_tokens([generated for generated, _ in runs])
        times_ms = [1e3 * stats.prefill_s for _, stats in runs[1:]]
        facts |= {"ms_median": median(times_ms), "tokens_per_s": 1e3 * tokens / min(times_ms), "samples_ms": times_ms}
        return min(times_ms)

    def find_7b(self, goal: Goal, facts: Facts) -> float:
        """Its weights in GB."""
        model = self.subject(Case(LARGE))
        facts["held_gb"] = (model.backend.memory()[0] or 0) / 1e9
        return model.weights.nbytes / 1e9

    def find_peers(self, goal: Goal, facts: Facts) -> float:
        self.drop()  # the peer may need the whole card
        device = "cpu" if self.device.emulated else "cuda"
        sizes = self.plan.prompt_tokens, self.plan.new_tokens
        process: dict[str, Any] = {"threads": resolve_threads(None), "timeout_s": PEER_TIMEOUT_S}
        process |= {"python": self.python, "device": device, "quantized": goal.quantized}
        peer = measure_peer("transformers", self.plan.config(MAIN), *sizes, **process)
        facts |= {"peer": peer.to_dict(), "peer_device": device}
        return peer.decode.median_s / self.decode(Case(MAIN), facts).step_s  # medians: the peer's first steps compile

    # -- models --------------------------------------------------------------------------------------------------------

    def subject(self, case: Case) -> Model:
        """The case's model, compared with the reference. Raises Differs, and what making a model raises."""
        key = case.subject
        if self._held is None or self._held[0] != key:
            self.drop()
            be = choose_backend(case.backend, dtype=case.dtype, device=self.index)
            try:
                model = synthetic_model(self.plan.config(case.name), be)
                self.bench.checks[key] = check_model(model, self.plan.prompts(model.config.vocab_size, 1)[0])
            except BaseException:
                be.close()
                raise
            self._held = key, model
        if not self.bench.checks[key].equal:
            raise Differs(f"{key} is not what the NumPy reference computes")
        return self._held[1]

    def drop(self) -> None:
        if self._held is not None:
            with suppress(DeviceError):  # the card was lost: the rows report it
                self._held[1].close()
        self._held = None
        gc.collect()  # recorded steps and their backend refer to each other

    def decode(self, case: Case, facts: Facts) -> DecodingRun:
        """The case's decoding, measured once. The facts get its figures, even if its tokens are wrong."""
        if (decoding := self._decodings.get(case)) is None:
            model, plan = self.subject(case), self.plan
            prompts = plan.prompts(model.config.vocab_size, case.batch)
            runs = []
            for _ in range(1 + plan.repeats):
                if case.backend == "cupy":
                    self.bench.copy_samples_s.append(self.copy.seconds())
                runs.append(generate(model, prompts, plan.new_tokens))
            (tokens, stats), speeds = runs[0], [stats.generated_tokens_per_s for _, stats in runs[1:]]
            step_bytes = mean_step_bytes(model, case.batch, plan, stats) if case.backend == "cupy" else 0
            decoding = DecodingRun(case.batch, tokens, speeds, step_bytes)
            facts |= decoding.facts(self.bench.copy_gb_per_s)
            check_same_tokens([generated for generated, _ in runs])
            alone = self._decodings.get(replace(case, batch=1))
            if alone is not None and alone.tokens[0] != tokens[0]:
                raise Differs(f"of {case.batch} sequences the first has other tokens than alone")
            self._decodings[case] = decoding
        facts |= decoding.facts(self.bench.copy_gb_per_s)
        return decoding


def generate(model: Model, prompts: list[list[int]], new_tokens: int) -> tuple[list[list[int]], GenerationStats]:
    """Greedy.   -> the new tokens of each prompt, the figures of the call"""
    outs = cast("list[Generation]", model.generate(prompts, max_tokens=new_tokens, ignore_eos=True))
    return [out.token_ids for out in outs], outs[0].stats


def check_same_tokens(repetitions: list[list[list[int]]]) -> None:
    if any(tokens != repetitions[0] for tokens in repetitions):
        raise Differs("repetitions give different tokens")


def mean_step_bytes(model: Model, batch: int, plan: GpuPlan, stats: GenerationStats) -> int:
    """Bytes that a step of so many sequences reads at its mean position: the weights once, and each one's cache."""
    config = model.config
    value_bytes = stats.cache_bytes_per_token // (2 * config.num_hidden_layers * config.kv_size)
    position = mean((plan.prompt_tokens, plan.prompt_tokens + plan.new_tokens - 2))  # of the token that a step is given
    one = bytes_of_step(config, model.weights, position, value_bytes)
    return one.total + (batch - 1) * one.cache


def software_versions() -> dict[str, str]:
    cupy = importlib.import_module("cupy")
    cuda, driver = cupy.cuda.runtime.runtimeGetVersion(), cupy.cuda.runtime.driverGetVersion()
    return {"cupy": cupy.__version__, "cuda": str(cuda), "driver": str(driver)}


# -- the command -------------------------------------------------------------------------------------------------------

# Facts of a row, by the name of the first one, in words
FACTS = {
    "tokens_per_s": "{tokens_per_s:,.0f} tok/s",
    "step_ms_median": "{step_ms_median:.2f} ms per step",
    "of_bound": "{of_bound:.0%} of the bound",
    "fewer_bytes": "a step reads {fewer_bytes:.3f} x fewer bytes",
    "held_gb": "{held_gb:.2f} GB of the card held",
    "peer": "there {peer[decode_tokens_per_s_median]:,.1f} tok/s, {peer[weights]}",
    "cpu_tokens_per_s": "CPU {cpu_tokens_per_s:.1f} tok/s on {cpu_threads} threads",
    "gb_per_s": "{gb_per_s:,.0f} GB/s, {kernel}",
}


@click.command(cls=Script)
@click.option("--only", type=click.Choice(PARTS), multiple=True, help="A part. May be given again.  [default: all]")
@click.option("--layers", type=click.IntRange(min=1), help="Only so many layers of each model; no target is judged.")
@click.option("--new-tokens", type=click.IntRange(min=2), default=128, show_default=True, help="Decoded tokens.")
@click.option("--repeats", type=click.IntRange(min=1), default=3, show_default=True, help="The best one counts.")
@device_option
@click.option("--versus-python", metavar="PATH", help="The Python that has transformers.  [default: this one]")
@click.option("--out", type=OutputFile(), help="Write the JSON here after every "
              "measurement, so that an interrupted run keeps its results.")  # fmt: skip
@common_options
def main(only: tuple[str, ...], device: int, versus_python: str | None, out: Path | None, **sizes: Any) -> None:
    """Measure what is asked of an NVIDIA card: models of random weights, each first compared with the reference.

    Parts that are ratios (batches, precision, peers, cpu) also measure 2B-4T alone. What cannot be measured says why,
    and the rest goes on. BITNET_REF_CUDA=emulated runs everything on the host: with --layers 1 and --new-tokens 2, only
    to see that it runs.
    """

    def on_row(bench: GpuBench) -> None:
        if not sys.stderr.isatty():  # no progress bar is drawn there; an interrupted run has shown its results
            row = bench.rows[-1]
            click.echo(f"{bench.seconds:.0f} s  {row.goal.what}: {describe_row(row)}", err=True)
        if out is not None:
            write_json(out, bench.to_dict())

    plan, python = GpuPlan(**sizes), versus_python or sys.executable
    with LoadingBar("measuring") as bar:
        bench = measure_gpu(plan, only or PARTS, index=device, python=python, on_row=on_row, progress=bar)
    report_bench(bench, lambda console: draw_gpu(bench, console))


def draw_gpu(bench: GpuBench, out: Console) -> None:
    draw_device(bench.device, bench.copy_gb_per_s, bench.emulated, out)
    if bench.plan.layers is not None:
        out.print(f"Models of at most {bench.plan.layers} layers: no target is judged.", style="yellow")
    rows = [(row.goal.what, row.goal.words, describe_row(row), verdict_of(bench, row)) for row in bench.rows]
    draw_table(out, ("what", "target", "measured", "met"), rows, left=4)
    for name, check in bench.checks.items():
        if not check.equal:
            out.print(f"DIFFERS: {name}", style="bold red")
    if bench.equal:
        out.print(f"{bench.seconds:.0f} s. {len(bench.checks)} comparisons with the NumPy reference: equal, or within "
                  "their tolerance. Repetitions gave the same tokens.")  # fmt: skip


def verdict_of(bench: GpuBench, row: GoalResult) -> str:
    return "not measured" if row.value is None else {None: "", True: "yes", False: "no"}[bench.met(row)]


def describe_row(row: GoalResult) -> str:
    """The value with the facts that explain it, or why there is none."""
    if row.value is None:
        return row.why
    digits = sum(row.value < limit for limit in (10, 100))
    known = "tokens_per_s" if row.goal.unit == "tok/s" else ""  # the value itself
    words = [text.format(**row.facts) for name, text in FACTS.items() if name in row.facts and name != known]
    return ", ".join([f"{row.value:,.{digits}f} {row.goal.unit}", *words])


if __name__ == "__main__":
    start(main)
