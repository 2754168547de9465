"""Everything that is asked of an NVIDIA card, measured in one run: its kernels, whole models, and other engines.

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
from functools import partial
from statistics import mean, median
from typing import Any, cast

import numpy as np

from ..api import Model
from ..backends import choose_backend
from ..backends.cuda import open_device
from ..errors import BitNetRefError, ConfigError, DeviceError
from ..generation.results import Generation, GenerationStats
from ..system.threads import resolve_threads
from .cuda_kernels import MIN_SHARE, TARGET_SHARES, PlainCopy, measure_cuda_kernels
from .gpu_goals import BATCHES, DENSE, LARGE, MAIN, NARROW, PARTS, Decoding, Differs, Goal, GoalResult, GpuBench, Plan
from .models import bytes_of_step
from .peers import measure_peer
from .record import Progress
from .synthetic import synthetic_model
from .validate import check_model

PEER_TIMEOUT_S = 180.0

Facts = dict[str, Any]
Task = tuple[Goal, Callable[[Facts], float]]  # what is measured, and what measures it and fills in the facts


def measure_gpu(
    plan: Plan | None = None,
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
    plan = Plan() if plan is None else plan
    if unknown := [part for part in parts if part not in PARTS]:
        raise ConfigError(f"expected some of {', '.join(PARTS)}, got {unknown[0]!r}", field="parts")
    minima = {"layers": 1, "prompt_tokens": 1, "prefill_tokens": 1, "repeats": 1, "new_tokens": 2}
    for name, minimum in minima.items():
        if (got := getattr(plan, name)) is not None and got < minimum:
            raise ConfigError(f"expected at least {minimum}, got {got}", field=f"plan.{name}")
    return GpuRun(plan, tuple(part for part in PARTS if part in parts), index, python).measure(on_row, progress)


class GpuRun:
    """The parts, one method each. One model at a time is held: the last one used."""

    def __init__(self, plan: Plan, parts: tuple[str, ...], index: int, python: str) -> None:
        self.plan, self.index, self.python = plan, index, python
        self.device = open_device(index)
        self.copy = PlainCopy(self.device, plan.copy_bytes)
        self.copy.seconds()  # not counted: the card may have to wake up
        emulated = self.device.emulated
        facts = self.device.name, emulated, {} if emulated else software_versions(), plan, parts
        self.bench = GpuBench(*facts, self.copy.nbytes, [self.copy.seconds()])
        self._held: tuple[str, Model] | None = None
        self._decodings: dict[str, Decoding] = {}

    def measure(self, on_row: Callable[[GpuBench], object] | None, progress: Progress | None) -> GpuBench:
        started, bench = time.perf_counter(), self.bench
        tasks = [task for part in bench.parts for task in getattr(self, f"part_{part}")()]
        try:
            for done, task in enumerate(tasks, start=1):
                bench.rows.append(self.row(*task))
                bench.seconds, bench.finished = time.perf_counter() - started, done == len(tasks)
                if progress is not None:
                    progress(done, len(tasks))
                if on_row is not None:
                    on_row(bench)
        finally:
            self.drop()
            del self.copy
            with suppress(DeviceError):
                self.device.close()
        return bench

    @staticmethod
    def row(goal: Goal, find: Callable[[Facts], float]) -> GoalResult:
        """The value, or why there is none. Facts that were found before a failure are kept."""
        facts: Facts = {}
        try:
            return GoalResult(goal, find(facts), facts)
        except Differs as error:
            return GoalResult(goal, facts=facts, why=f"DIFFERS: {error}", differs=True)
        except Exception as error:  # a bug of ours too ends one row, not the run
            if not isinstance(error, (BitNetRefError, MemoryError)):
                traceback.print_exc()
            return GoalResult(goal, facts=facts, why=" ".join(f"{type(error).__name__}: {error}".split()))

    # -- parts ---------------------------------------------------------------------------------------------------------

    def part_kernels(self) -> list[Task]:
        plan = self.plan

        def find(n: int, k: int, facts: Facts) -> float:
            sizes: dict[str, Any] = {"cold_bytes": plan.cold_bytes, "copy_bytes": plan.copy_bytes}
            bench = measure_cuda_kernels(self.device, [(n, k)], [1], repeats=plan.kernel_repeats, **sizes)
            self.device.trim()  # models have a pool of their own
            self.bench.checks[f"kernels {n}x{k}"] = bench.check
            (result,) = (result for result in bench.results if result.chosen)
            if result.share_of_copy is None:
                raise Differs(f"{result.kernel} is not what the NumPy reference computes")
            facts |= {"kernel": result.kernel, "gb_per_s": result.gb_per_s, "copy_gb_per_s": bench.copy_gb_per_s}
            return 100 * result.share_of_copy

        targets = {shape: 100 * TARGET_SHARES.get(shape, MIN_SHARE) for shape in plan.kernel_shapes}
        goal = partial(Goal, "kernels", unit="%")
        return [(goal(f"GEMV {n}x{k} over a copy", target=t), partial(find, n, k)) for (n, k), t in targets.items()]

    def part_decode(self) -> list[Task]:
        goal = Goal("decode", f"{self.plan.title(MAIN)}, batch 1", "tok/s", 1500, note="stretch 2,400")
        return [(goal, lambda facts: self.decode(facts, MAIN).best)]

    def part_batches(self) -> list[Task]:
        def find(batch: int, facts: Facts) -> float:
            one = self.decode({}, MAIN).best
            return self.decode(facts, MAIN, batch).best / one

        goals = {n: f"{self.plan.title(MAIN)}, batch {n} over 1" for n in self.plan.batches}
        return [(Goal("batches", what, "x", BATCHES.get(n)), partial(find, n)) for n, what in goals.items()]

    def part_prefill(self) -> list[Task]:
        tokens = self.plan.prefill_tokens

        def find(facts: Facts) -> float:
            model = self.subject(MAIN)
            prompt = np.random.default_rng(2).integers(0, model.config.vocab_size, tokens).tolist()
            runs = [generate(model, [prompt], 1) for _ in range(1 + self.plan.repeats)]
            check_same_tokens([generated for generated, _ in runs])
            times_ms = [1e3 * stats.prefill_s for _, stats in runs[1:]]
            best = min(times_ms)
            facts |= {"ms_median": median(times_ms), "tokens_per_s": 1e3 * tokens / best, "samples_ms": times_ms}
            return best

        what = f"{self.plan.title(MAIN)}, prompt of {tokens:,}"
        return [(Goal("prefill", what, "ms", 40, at_most=True), find)]

    def part_7b(self) -> list[Task]:
        batch, title = self.plan.large_batch, self.plan.title(LARGE)

        def weights(facts: Facts) -> float:
            model = self.subject(LARGE)
            facts["held_gb"] = (model.backend.memory()[0] or 0) / 1e9
            return model.weights.nbytes / 1e9

        return [
            (Goal("7b", f"{title}, packed weights", "GB", 2.6, at_most=True), weights),
            (Goal("7b", f"{title}, batch 1", "tok/s", 600), lambda facts: self.decode(facts, LARGE).best),
            (Goal("7b", f"{title}, batch {batch}", "tok/s", 8000), lambda facts: self.decode(facts, LARGE, batch).best),
        ]

    def part_dense(self) -> list[Task]:
        def find(dtype: str, facts: Facts) -> float:
            return self.decode(facts, DENSE, dtype=dtype).best

        title = self.plan.title(DENSE)
        return [(Goal("dense", f"{title}, {dtype}", "tok/s", 100), partial(find, dtype)) for dtype in NARROW]

    def part_precision(self) -> list[Task]:
        def find(dtype: str, facts: Facts) -> float:
            wide, narrow = self.decode({}, MAIN), self.decode(facts, MAIN, dtype=dtype)
            facts["fewer_bytes"] = wide.step_bytes / narrow.step_bytes
            return narrow.best / wide.best

        goal = partial(Goal, "precision", unit="x", target=1.3, note="to 1.5")
        title = self.plan.title(MAIN)
        return [(goal(f"{title}, {dtype} over float32"), partial(find, dtype)) for dtype in NARROW]

    def part_peers(self) -> list[Task]:
        def find(quantized: bool, facts: Facts) -> float:
            self.drop()  # the peer may need the whole card
            device = "cpu" if self.device.emulated else "cuda"
            sizes = self.plan.prompt_tokens, self.plan.new_tokens
            process: dict[str, Any] = {"threads": resolve_threads(None), "timeout_s": PEER_TIMEOUT_S}
            process |= {"python": self.python, "device": device, "quantized": quantized}
            peer = measure_peer("transformers", self.plan.config(MAIN), *sizes, **process)
            facts |= {"peer": peer.to_dict(), "peer_device": device}
            step_s = self.decode({}, MAIN).step_s
            facts["step_ms_median"] = 1e3 * step_s
            return peer.decode.median_s / step_s  # the median, since the peer's first steps compile

        what = f"{self.plan.title(MAIN)} over transformers'"
        return [
            (Goal("peers", f"{what} BitNet", "x", 10), partial(find, True)),
            (Goal("peers", f"{what} bf16", "x", 2.5), partial(find, False)),
        ]

    def part_cpu(self) -> list[Task]:
        def find(facts: Facts) -> float:
            cpu = self.decode({}, MAIN, backend="cython")
            facts |= {f"cpu_{key}": value for key, value in cpu.facts(0).items()}
            facts["cpu_threads"] = resolve_threads(None)
            return self.decode({}, MAIN).best / cpu.best

        return [(Goal("cpu", f"{self.plan.title(MAIN)}, GPU over CPU", "x", 50), find)]

    # -- models --------------------------------------------------------------------------------------------------------

    def subject(self, name: str, dtype: str = "float32", backend: str = "cupy") -> Model:
        """The model of that shape, compared with the reference. Raises Differs, and what making a model raises."""
        key = f"{name} {dtype} {backend}"
        if self._held is None or self._held[0] != key:
            self.drop()
            be = choose_backend(backend, dtype=dtype, device=self.index)
            try:
                model = synthetic_model(self.plan.config(name), be)
                self.bench.checks[key] = check_model(model, self.plan.prompts(model.config.vocab_size, 1)[0])
            except BaseException:
                be.close()
                raise
            self._held = key, model
        if not self.bench.checks[key].equal:
            raise Differs(f"{key} is not what the NumPy reference computes")
        return self._held[1]

    def drop(self) -> None:
        """Close the model that is held, and free its memory."""
        held, self._held = self._held, None
        if held is not None:
            with suppress(DeviceError):  # the card was lost: the rows report it
                held[1].close()
        del held
        gc.collect()  # recorded steps and their backend refer to each other

    def decode(
        self, facts: Facts, name: str, batch: int = 1, dtype: str = "float32", backend: str = "cupy"
    ) -> Decoding:
        """`batch` sequences with a prompt each, decoded together. Measured once; the facts get its figures."""
        key = f"{name} {dtype} {backend}"
        if (decoding := self._decodings.get(f"{key} {batch}")) is None:
            decoding = self._decode(facts, name, batch, dtype, backend)
            one = self._decodings.get(f"{key} 1")
            if one is not None and one.tokens[0] != decoding.tokens[0]:
                raise Differs(f"of {batch} sequences the first has other tokens than alone")
            self._decodings[f"{key} {batch}"] = decoding
        facts |= decoding.facts(self.bench.copy_gb_per_s)
        return decoding

    def _decode(self, facts: Facts, name: str, batch: int, dtype: str, backend: str) -> Decoding:
        model, plan = self.subject(name, dtype, backend), self.plan
        prompts = plan.prompts(model.config.vocab_size, batch)
        runs = []
        for _ in range(1 + plan.repeats):
            if backend == "cupy":
                self.bench.copy_samples_s.append(self.copy.seconds())
            runs.append(generate(model, prompts, plan.new_tokens))
        (tokens, stats), speeds = runs[0], [stats.generated_tokens_per_s for _, stats in runs[1:]]
        step_bytes = mean_step_bytes(model, batch, plan, stats) if backend == "cupy" else 0
        decoding = Decoding(batch, tokens, speeds, step_bytes)
        facts |= decoding.facts(self.bench.copy_gb_per_s)
        check_same_tokens([generated for generated, _ in runs])
        return decoding


def generate(model: Model, prompts: list[list[int]], new_tokens: int) -> tuple[list[list[int]], GenerationStats]:
    """Greedy.   -> the new tokens of each prompt, the figures of the call"""
    outs = cast("list[Generation]", model.generate(prompts, max_tokens=new_tokens, ignore_eos=True))
    return [out.token_ids for out in outs], outs[0].stats


def check_same_tokens(repetitions: list[list[list[int]]]) -> None:
    if any(tokens != repetitions[0] for tokens in repetitions):
        raise Differs("repetitions give different tokens")


def mean_step_bytes(model: Model, batch: int, plan: Plan, stats: GenerationStats) -> int:
    """Bytes that a step of so many sequences reads at its mean position: the weights once, and each one's cache."""
    config = model.config
    value_bytes = stats.cache_bytes_per_token // (2 * config.num_hidden_layers * config.kv_size)
    position = mean((plan.prompt_tokens, plan.prompt_tokens + plan.new_tokens - 2))  # of the token that a step is given
    one = bytes_of_step(config, model.weights, position, value_bytes)
    return one.total + (batch - 1) * one.cache


def software_versions() -> dict[str, str]:
    """Of CuPy, the CUDA runtime and the driver."""
    cupy = importlib.import_module("cupy")
    runtime = cupy.cuda.runtime
    versions = {"cupy": cupy.__version__, "cuda": runtime.runtimeGetVersion(), "driver": runtime.driverGetVersion()}
    return {name: str(version) for name, version in versions.items()}
