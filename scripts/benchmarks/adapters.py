"""What LoRA adapters cost in decoding: one of them, and requests with several in one batch.

    python scripts/benchmarks/adapters.py --synthetic 2b-4t --layers 6

Steps of one request, and of a batch, in turn: without an adapter, with one for all requests, and with several. The
factors are drawn. First the results of the batch are compared with those of its requests alone. The shares are of
processor time, the median over the rounds of each round's ratio.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import click
import numpy as np
from commands import Script, start

import bitnet_ref
from bitnet_ref.backends import choose_backend
from bitnet_ref.backends.loaded import LoadedModel
from bitnet_ref.backends.paged_cache import PagedKVCache
from bitnet_ref.benchmark.synthetic import SHAPES, synthetic_model
from bitnet_ref.benchmark.timing import Record, Stopwatch
from bitnet_ref.cli.bench_shared import draw_table, report_bench
from bitnet_ref.cli.shell import common_options
from bitnet_ref.errors import ShapeError
from bitnet_ref.families.lora import Adapter, LoraTerm
from bitnet_ref.reference.cache import TokenBatch
from bitnet_ref.training.lora import TARGETS

if TYPE_CHECKING:
    from rich.console import Console

CONTEXT = 64  # tokens before the step
ROUND_S = 0.2  # of each kind of step, in a round


@dataclass(frozen=True)
class AdapterBench(Record):
    """Processor seconds of a step, and shares of the speed without an adapter (`one`), or with one (`several`)."""

    rank: int
    linears: tuple[str, ...]
    requests: int
    adapters: int
    step_s: dict[str, float]
    one_of_none: float  # speed of one request with an adapter over that without
    batch_of_none: float  # of the batch with one adapter over that without
    several_of_one: float  # of the batch with several over that with one


def draw_adapter(model: LoadedModel, rank: int, targets: tuple[str, ...], seed: int) -> Adapter:
    """Factors of bfloat16 values, as most published ones are, on these linears of every layer."""
    dice, terms = np.random.default_rng(seed), {}
    for name, w in model.weights.linears():
        if name.rpartition(".")[2] in targets:
            out, columns = w.shape
            factors = dice.standard_normal((rank, columns + out), dtype=np.float32) * np.float32(0.02)
            factors = (factors.view(np.uint32) & 0xFFFF0000).view(np.float32)
            a, b = factors[:, :columns], factors[:, columns:].T
            terms[name] = LoraTerm(np.ascontiguousarray(a), np.ascontiguousarray(b), 2.0)
    return Adapter(terms)


class Steps:
    """A decoding step of some requests, again and again at the same place."""

    def __init__(self, model: LoadedModel, requests: int) -> None:
        cache = model.new_cache(requests, CONTEXT + 1, page_size=CONTEXT + 1)
        assert isinstance(cache, PagedKVCache)
        cache.fill_with_zeros()
        self.model, self.cache, self.needs = model, cache, [(1, ())] * requests
        tokens = np.arange(requests) % model.config.vocab_size
        self.batch = TokenBatch(tokens, np.full(requests, CONTEXT), np.arange(requests))

    def __call__(self, adapters: dict[int, Adapter | None]) -> list[int]:
        logits = self.model.run(self.batch, self.cache, self.needs, adapters=adapters).tokens
        return [int(row.ids[row.values.argmax()]) for row in logits]

    def states(self, adapters: dict[int, Adapter | None]) -> np.ndarray:
        return self.model.run(self.batch, self.cache, adapters=adapters).all()


def check(model: LoadedModel, requests: int, adapters: list[Adapter]) -> None:
    """ShapeError unless a request's logits among others are its own alone, for one of each adapter."""
    together = Steps(model, requests)
    for _ in range(3):  # the third is replayed
        rows = together.states({slot: adapters[slot % len(adapters)] for slot in range(requests)})
    for slot in range(min(requests, len(adapters))):
        batch = TokenBatch(together.batch.tokens[slot : slot + 1], np.array([CONTEXT]), np.array([slot]))
        alone = model.run(batch, together.cache, adapters={slot: adapters[slot]}).all()[0]
        if not np.array_equal(rows[slot], alone):
            raise ShapeError("adapters", expected=f"request {slot} among others as alone", got="other logits")


def measure(
    model: LoadedModel, rank: int, targets: tuple[str, ...], requests: int, count: int, rounds: int
) -> AdapterBench:
    """Every kind of step in turn, `rounds` times."""
    adapters = [draw_adapter(model, rank, targets, seed) for seed in range(count)]
    check(model, requests, adapters)
    single, batch = Steps(model, 1), Steps(model, requests)
    one = dict.fromkeys(range(requests), adapters[0])
    several = {slot: adapters[slot % count] for slot in range(requests)}
    kinds = {
        "1 request": (single, {}),
        "1 request, adapter": (Steps(model, 1), {0: adapters[0]}),
        f"{requests} requests": (batch, {}),
        f"{requests} requests, 1 adapter": (Steps(model, requests), one),
        f"{requests} requests, {count} adapters": (Steps(model, requests), several),
    }
    calls, watch, taken = {}, Stopwatch(), {name: list[float]() for name in kinds}
    for name, (step, chosen) in kinds.items():
        for _ in range(3):
            step(chosen)
        sample = watch.repeat(lambda step=step, chosen=chosen: step(chosen))
        calls[name] = max(1, round(ROUND_S / max(sample.processor_s or sample.wall_s, 1e-4)))
    for _ in range(rounds):
        for name, (step, chosen) in kinds.items():
            sample = watch.repeat(lambda step=step, chosen=chosen: step(chosen), calls[name])
            taken[name].append(sample.processor_s or sample.wall_s)
    names = list(kinds)

    def share(slow: str, fast: str) -> float:
        return median(a / b for a, b in zip(taken[fast], taken[slow], strict=True))

    return AdapterBench(
        *(rank, targets, requests, count, {name: median(times) for name, times in taken.items()}),
        one_of_none=share(names[1], names[0]),
        batch_of_none=share(names[3], names[2]),
        several_of_one=share(names[4], names[3]),
    )


def draw(bench: AdapterBench, out: Console) -> None:
    rows = [(name, f"{1000 * seconds:.2f} ms") for name, seconds in bench.step_s.items()]
    draw_table(out, ("step", "processor time"), rows)
    out.print(
        f"Rank {bench.rank} on {', '.join(bench.linears)}: one request {bench.one_of_none:.3f} of its speed without, "
        f"{bench.requests} requests {bench.batch_of_none:.3f}; with {bench.adapters} adapters "
        f"{bench.several_of_one:.3f} of the speed with one."
    )


@click.command(cls=Script)
@click.option("--model", default="storyteller", show_default=True, help="Shipped model, folder, or file.")
@click.option("--synthetic", type=click.Choice(list(SHAPES)), help="A model of this shape with random weights.")
@click.option("--layers", type=click.IntRange(min=1), help="Of a synthetic model.  [default: all]")
@click.option("--rank", type=click.IntRange(min=1), default=16, show_default=True)
@click.option("--targets", default="q_proj,v_proj", show_default=True, help="Linears, or all.")
@click.option("--requests", type=click.IntRange(min=1), default=32, show_default=True)
@click.option("--adapters", type=click.IntRange(min=1), default=8, show_default=True)
@click.option("--rounds", type=click.IntRange(min=1), default=9, show_default=True)
@click.option("--threads", type=click.IntRange(min=1), default=1, show_default=True)
@common_options
def main(
    model: str,
    synthetic: str | None,
    layers: int | None,
    rank: int,
    targets: str,
    requests: int,
    adapters: int,
    rounds: int,
    threads: int,
) -> None:
    """Measure what LoRA adapters cost in decoding."""
    if synthetic is None:
        subject: LoadedModel = bitnet_ref.load(Path(model) if Path(model).exists() else model, threads=threads)
    else:
        subject = synthetic_model(SHAPES[synthetic], choose_backend("cython", threads=threads), layers=layers)
    names = TARGETS if targets == "all" else tuple(targets.split(","))
    result = measure(subject, rank, names, requests, adapters, rounds)
    report_bench(result, partial(draw, result))


if __name__ == "__main__":
    start(main)
