"""Everything that is asked of an NVIDIA card, measured in one run: its kernels, whole models, and their rivals.

Validate, then benchmark: each model is compared with the NumPy reference before it is timed (`check_model`: the linears
of its first block, and the logits of that block and the head alone. That is a model shortened to one layer, with the
same kernels on matrices of the same shapes, and takes the reference seconds, not minutes). Then every repetition must
give the same tokens, and the first prompt of a batch those that it gives alone. What differs has no speed.

Weights are random. Speeds are those of `generate`'s own loop, of the best repetition, after one that is not counted: it
compiles kernels and records the step. The bound of decoding is the speed of a copy within the card's memory, taken in
turn with the repetitions and counted both ways, over the bytes of a step (`bytes_of_step`).
"""

from __future__ import annotations

import gc
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from statistics import mean, median
from typing import Any

import numpy as np

from ..api import Model
from ..backends import choose_backend
from ..backends.cuda import open_device
from ..errors import BitNetRefError, ConfigError, DeviceError
from ..generation.generate import generate_chunks
from ..generation.params import SamplingParams
from ..generation.results import GenerationStats
from ..generation.sequence import Continuation, Request
from ..system.threads import resolve_threads
from .cuda_kernels import LEAST_SHARE, TARGET_SHARES, PlainCopy, measure_cuda_kernels
from .gpu_rows import BATCHES, DENSE, LARGE, MAIN, PARTS, Ask, Decoding, Differs, GpuBench, Plan, Row
from .models import bytes_of_step
from .peers import measure_peer
from .synthetic import synthetic_model
from .validate import Check, check_model

PEER_TIMEOUT_S = 180.0

Progress = Callable[[int, int], object]
Found = tuple[float, dict[str, Any]]
Task = tuple[Ask, Callable[[], Found]]  # what is asked, and what finds it


def measure_gpu(
    plan: Plan | None = None,
    parts: Sequence[str] = PARTS,
    *,
    index: int = 0,
    python: str = sys.executable,
    keep: Callable[[GpuBench], object] | None = None,
    progress: Progress | None = None,
) -> GpuBench:
    """Measure these parts on the card of that number, or on the emulated device (BITNET_REF_CUDA=emulated).

    python: the interpreter that has transformers. keep: called with what there is after every measurement. One that
    fails is a row that says why, and the others go on. Raises BackendUnavailable without a card, ConfigError for a plan
    that measures nothing.
    """
    plan = Plan() if plan is None else plan
    if unknown := [part for part in parts if part not in PARTS]:
        raise ConfigError(f"expected some of {', '.join(PARTS)}, got {unknown[0]!r}", field="parts")
    least = {"layers": 1, "prompt_tokens": 1, "prefill_tokens": 1, "repeats": 1, "new_tokens": 2}
    for name, low in least.items():
        if (got := getattr(plan, name)) is not None and got < low:
            raise ConfigError(f"expected at least {low}, got {got}", field=f"plan.{name}")
    return _Run(plan, tuple(part for part in PARTS if part in parts), index, python).measure(keep, progress)


class _Run:
    """The parts, one method each. One model at a time is held: the last that was asked for."""

    def __init__(self, plan: Plan, parts: tuple[str, ...], index: int, python: str) -> None:
        self.plan, self.index, self.python = plan, index, python
        self.device = open_device(index)
        self.copy = PlainCopy(self.device, plan.copy_bytes)
        self.copy.seconds()  # the first may wait for the card to wake
        facts = self.device.name, self.device.emulated, plan, parts, self.copy.nbytes, [self.copy.seconds()]
        self.found = GpuBench(*facts)
        self._held: tuple[str, Model] | None = None
        self._alone: dict[str, Decoding] = {}  # one sequence, by the name of the model

    def measure(self, keep: Callable[[GpuBench], object] | None, progress: Progress | None) -> GpuBench:
        started, found = time.perf_counter(), self.found
        tasks = [task for part in found.parts for task in getattr(self, f"part_{part}")()]
        try:
            for done, task in enumerate(tasks):
                if progress is not None:
                    progress(done, len(tasks))
                found.rows.append(self.row(*task))
                found.seconds, found.finished = time.perf_counter() - started, done + 1 == len(tasks)
                if keep is not None:
                    keep(found)
        finally:
            self.drop()
            del self.copy
            with suppress(DeviceError):
                self.device.close()
        return found

    @staticmethod
    def row(ask: Ask, find: Callable[[], Found]) -> Row:
        """What was found, or why nothing was."""
        try:
            return Row(ask, *find())
        except Differs as error:
            return Row(ask, facts=error.facts, why=f"DIFFERS: {error}", differs=True)
        except Exception as error:  # a mistake of ours too ends one row, not the others
            if not isinstance(error, (BitNetRefError, MemoryError)):
                traceback.print_exc()
            return Row(ask, why=" ".join(f"{type(error).__name__}: {error}".split()))

    # -- parts ---------------------------------------------------------------------------------------------------------

    def part_kernels(self) -> list[Task]:
        def task(n: int, k: int) -> Task:
            def find() -> Found:
                sizes: dict[str, Any] = {"cold_bytes": self.plan.cold_bytes, "copy_bytes": self.plan.copy_bytes}
                bench = measure_cuda_kernels(self.device, [(n, k)], [1], repeats=self.plan.kernel_repeats, **sizes)
                self.device.trim()  # models have a pool of their own
                every, overlap = bench.results, self.device.can_overlap
                wrong = sum(r.unequal_accumulators for r in every), sum(r.unequal_floats for r in every)
                self.found.checks[f"kernels {n}x{k}"] = Check(len(every) * n, wrong[0], len(every) * n, wrong[1])
                (mine,) = (r for r in every if r.chosen and r.overlapped == overlap)  # as models have it
                share = bench.share(mine)
                if share is None:
                    raise Differs(f"{mine.kernel} is not what the NumPy reference computes")
                facts = {"kernel": mine.kernel, "gb_per_s": mine.gb_per_s, "copy_gb_per_s": bench.copy_gb_per_s}
                return 100 * share, facts

            target = 100 * TARGET_SHARES.get((n, k), LEAST_SHARE)
            return Ask("kernels", f"GEMV {n}x{k} over a copy", "%", target), find

        return [task(n, k) for n, k in self.plan.kernel_shapes]

    def part_decode(self) -> list[Task]:
        ask = Ask("decode", f"{self.plan.title(MAIN)}, batch 1", "tok/s", 1500, more="stretch 2,400")
        return [(ask, lambda: self.speed(MAIN))]

    def part_batches(self) -> list[Task]:
        def task(batch: int) -> Task:
            what = f"{self.plan.title(MAIN)}, batch {batch} over 1"

            def find() -> Found:
                one, many = self.alone(MAIN), self.decoding(MAIN, batch)
                return many.best / one.best, many.facts(self.found.copy_gb_per_s)

            return Ask("batches", what, "x", BATCHES.get(batch)), find

        return [task(batch) for batch in self.plan.batches]

    def part_prefill(self) -> list[Task]:
        tokens = self.plan.prefill_tokens

        def find() -> Found:
            model = self.subject(MAIN)
            prompt = np.random.default_rng(2).integers(0, model.config.vocab_size, tokens).tolist()
            runs = [_generate(model, [prompt], 1) for _ in range(1 + self.plan.repeats)]
            _same_tokens([found for _, found, _ in runs])
            taken_ms = [1e3 * stats.prefill_s for stats, _, _ in runs[1:]]
            best = min(taken_ms)
            return best, {"ms_median": median(taken_ms), "tokens_per_s": 1e3 * tokens / best, "samples_ms": taken_ms}

        ask = Ask(
            "prefill", f"{self.plan.title(MAIN)}, prompt of {tokens:,}", "ms", 50, at_most=True, more="100 specified"
        )
        return [(ask, find)]

    def part_7b(self) -> list[Task]:
        batch, title = self.plan.large_batch, self.plan.title(LARGE)

        def weights() -> Found:
            model = self.subject(LARGE)
            return model.weights.nbytes / 1e9, {"held_gb": (model.backend.memory()[0] or 0) / 1e9}

        return [
            (Ask("7b", f"{title}, packed weights", "GB", 2.6, at_most=True), weights),
            (Ask("7b", f"{title}, batch 1", "tok/s", 600), lambda: self.speed(LARGE)),
            (Ask("7b", f"{title}, batch {batch}", "tok/s", 8000), lambda: self.speed(LARGE, batch)),
        ]

    def part_dense(self) -> list[Task]:
        def task(dtype: str) -> Task:
            ask = Ask("dense", f"{self.plan.title(DENSE)}, {dtype}", "tok/s", 100)
            return ask, lambda: self.speed(DENSE, dtype=dtype)

        return [task(dtype) for dtype in ("bfloat16", "float16")]

    def part_precision(self) -> list[Task]:
        def task(dtype: str) -> Task:
            def find() -> Found:
                wide, narrow = self.alone(MAIN), self.alone(MAIN, dtype)
                facts = narrow.facts(self.found.copy_gb_per_s)
                return narrow.best / wide.best, {**facts, "fewer_bytes": wide.step_bytes / narrow.step_bytes}

            what = f"{self.plan.title(MAIN)}, {dtype} over float32"
            return Ask("precision", what, "x", 1.3, more="to 1.5"), find

        return [task(dtype) for dtype in ("bfloat16", "float16")]

    def part_peers(self) -> list[Task]:
        def task(quantized: bool, target: float) -> Task:
            what = f"{self.plan.title(MAIN)} over transformers' {'BitNet' if quantized else 'bf16'}"

            def find() -> Found:
                self.drop()  # the peer may want the whole card
                where = "cpu" if self.device.emulated else "cuda"
                sizes = self.plan.prompt_tokens, self.plan.new_tokens
                process: dict[str, Any] = {"threads": resolve_threads(None), "timeout_s": PEER_TIMEOUT_S}
                process |= {"python": self.python, "device": where, "quantized": quantized}
                peer = measure_peer("transformers", self.plan.config(MAIN), *sizes, **process)
                facts = {"peer": peer.to_dict(), "peer_device": where}
                with _beside(facts):
                    step_s = median(self.alone(MAIN).steps_s)  # of steps: the peer's first ones compile
                return peer.decode.median_s / step_s, {"step_ms_median": 1e3 * step_s, **facts}

            return Ask("peers", what, "x", target), find

        return [task(True, 10), task(False, 2.5)]

    def part_cpu(self) -> list[Task]:
        def find() -> Found:
            cpu = self.alone(MAIN, backend="cython")
            facts = {f"cpu_{key}": value for key, value in cpu.facts(0).items()}
            facts["cpu_threads"] = resolve_threads(None)
            with _beside(facts):
                return self.alone(MAIN).best / cpu.best, facts

        return [(Ask("cpu", f"{self.plan.title(MAIN)}, GPU over CPU", "x", 50), find)]

    # -- what they need ------------------------------------------------------------------------------------------------

    def subject(self, name: str, dtype: str = "float32", backend: str = "cupy") -> Model:
        """The model of that shape, compared with the reference. Raises Differs; what making one raises."""
        key = f"{name} {dtype} {backend}"
        if self._held is None or self._held[0] != key:
            self.drop()
            be = choose_backend(backend, dtype=dtype, device=self.index)
            try:
                model = synthetic_model(self.plan.config(name), be)
                self.found.checks[key] = check_model(model, self.plan.prompts(model.config.vocab_size, 1)[0])
            except BaseException:
                be.close()
                raise
            self._held = key, model
        if not self.found.checks[key].equal:
            raise Differs(f"{key} is not what the NumPy reference computes")
        return self._held[1]

    def drop(self) -> None:
        """Close the model that is held, and give back its memory."""
        held, self._held = self._held, None
        if held is not None:
            with suppress(DeviceError):  # of a card that was lost: the rows say so, and others do not need it
                held[1].close()
        del held
        gc.collect()  # recorded steps and their backend refer to each other, and so may what failed

    def speed(self, name: str, batch: int = 1, dtype: str = "float32") -> Found:
        found = self.alone(name, dtype) if batch == 1 else self.decoding(name, batch, dtype)
        return found.best, found.facts(self.found.copy_gb_per_s)

    def alone(self, name: str, dtype: str = "float32", backend: str = "cupy") -> Decoding:
        """The decoding of one sequence, measured once."""
        key = f"{name} {dtype} {backend}"
        if key not in self._alone:
            self._alone[key] = self.decoding(name, 1, dtype, backend)
        return self._alone[key]

    def decoding(self, name: str, batch: int, dtype: str = "float32", backend: str = "cupy") -> Decoding:
        """That many sequences, each of its own prompt, which all decode at once."""
        model, plan = self.subject(name, dtype, backend), self.plan
        prompts = plan.prompts(model.config.vocab_size, batch)
        speeds: list[float] = []
        steps_s: list[float] = []
        outcomes: list[list[list[int]]] = []
        for repetition in range(1 + plan.repeats):
            if backend == "cupy":
                self.found.copy_samples_s.append(self.copy.seconds())
            stats, tokens, taken_s = _generate(model, prompts, plan.new_tokens)
            outcomes.append(tokens)
            if repetition > 0:
                speeds.append(stats.generated_tokens_per_s)
                steps_s += taken_s
        step_bytes = _step_bytes(model, batch, plan, stats) if backend == "cupy" else 0
        found = Decoding(batch, outcomes[0], speeds, steps_s, step_bytes)
        with _beside(found.facts(self.found.copy_gb_per_s)):
            _same_tokens(outcomes)
            one = self._alone.get(f"{name} {dtype} {backend}")
            if one is not None and one.tokens[0] != outcomes[0][0]:
                raise Differs(f"of {batch} sequences the first has other tokens than alone")
        return found


def _generate(
    model: Model, prompts: list[list[int]], new_tokens: int
) -> tuple[GenerationStats, list[list[int]], list[float]]:
    """What `model.generate` does with prompts of token ids, greedily: its figures, the tokens, each step's seconds."""
    params = SamplingParams.of(max_tokens=new_tokens, ignore_eos=True)
    rows = [Continuation(Request(model, prompt, params), slot) for slot, prompt in enumerate(prompts)]
    stats = GenerationStats(model.backend.name)
    steps_s: list[float] = []
    so_far_s = 0.0
    for _ in generate_chunks(model, [[row] for row in rows], stats):
        if stats.decode_s > so_far_s:
            steps_s.append(stats.decode_s - so_far_s)
            so_far_s = stats.decode_s
    return stats, [[chunk.token_id for chunk in row.chunks] for row in rows], steps_s


@contextmanager
def _beside(facts: dict[str, Any]) -> Iterator[None]:
    """What is found to differ in this keeps these facts."""
    try:
        yield
    except Differs as error:
        error.facts = facts | error.facts
        raise


def _same_tokens(outcomes: list[list[list[int]]]) -> None:
    if any(tokens != outcomes[0] for tokens in outcomes):
        raise Differs("repetitions give different tokens")


def _step_bytes(model: Model, batch: int, plan: Plan, stats: GenerationStats) -> int:
    """Bytes that a step of so many sequences reads at its mean position: the weights once, and each one's cache."""
    config = model.config
    value_bytes = stats.cache_bytes_per_token // (2 * config.num_hidden_layers * config.kv_size)
    position = mean((plan.prompt_tokens, plan.prompt_tokens + plan.new_tokens - 2))  # of the token that a step is given
    one = bytes_of_step(config, model.weights, position, value_bytes)
    return one.total + (batch - 1) * one.cache
