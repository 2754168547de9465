"""Training steps a second: this package's trainers, and torch's with transformers' BitNet where both are installed.

    python scripts/benchmarks/train_steps.py --optimizer adamw

A model of storyteller's shape is drawn from a seed. The trainers take turns, a step each, on the same batches; before
that each one's first loss is compared with NumPy's. torch computes in float32, and under autocast in bfloat16.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import click
import numpy as np
from commands import Script, start

from bitnet_ref.backends import available_backends
from bitnet_ref.benchmark.timing import Record
from bitnet_ref.cli.bench_shared import draw_table, report_bench
from bitnet_ref.cli.shell import common_options
from bitnet_ref.errors import NumericsError
from bitnet_ref.formats.hf.config import read_hf_config
from bitnet_ref.formats.open import ASSETS
from bitnet_ref.reference.config import QuantizationConfig
from bitnet_ref.reference.layers import Array
from bitnet_ref.system.threads import resolve_threads
from bitnet_ref.training import Trainer
from bitnet_ref.training.network import master_shapes

if TYPE_CHECKING:
    from rich.console import Console

LOSS_ERROR = 5e-3  # relative: bfloat16 rounds activations by 2^-9
Step = Callable[[Array], float]  # tokens (B, T + 1) -> the loss before the step


@dataclass(frozen=True)
class TrainerSpeed(Record):
    trainer: str
    first_loss: float
    tokens_per_s: float  # median of the steps
    processor_s: float  # of a step, median


@dataclass(frozen=True)
class StepBench(Record):
    trainers: tuple[TrainerSpeed, ...]


def trainers(optimizer: str, threads: int, folder: Path) -> dict[str, Step]:
    """Each trainer that can run here, from the same masters."""
    config = read_hf_config(ASSETS / "storyteller" / "config.json")
    config = replace(config, quantization=QuantizationConfig("autobitlinear", "online", ("lm_head",)))
    dice = np.random.default_rng(0)
    masters = {
        name: dice.standard_normal(shape, dtype=np.float32) * np.float32(0.02)
        if len(shape) > 1
        else np.ones(shape, "f")
        for name, shape in master_shapes(config).items()
    }
    options: dict[str, Any] = {"optimizer": optimizer, "max_norm": 1.0, "threads": threads}
    steps: dict[str, Step] = {}
    for backend in ("numpy", "cython"):
        if available_backends()[backend] is None:
            for dtype in ("float32", "bfloat16") if backend == "cython" else ("float32",):
                trainer = Trainer(config, masters, backend=backend, backward_dtype=dtype, **options)
                steps[f"{backend}, {dtype}"] = trainer.step
    try:
        import torch
        import transformers
    except ImportError:
        return steps
    Trainer(config, masters, **options).save(folder)
    torch.set_num_threads(threads)
    for dtype in ("float32", "bfloat16"):
        network = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        steps[f"torch, {dtype}"] = torch_step(torch, network, dtype)
    return steps


def torch_step(torch: Any, network: Any, dtype: str) -> Step:
    network.train()
    adamw = torch.optim.AdamW(network.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True)

    def step(tokens: Array) -> float:
        ids = torch.from_numpy(tokens)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == "bfloat16"):
            logits = network(input_ids=ids[:, :-1]).logits.float()
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        adamw.step()
        adamw.zero_grad()
        return float(loss.detach())

    return step


def measure(optimizer: str, batch: int, context: int, rounds: int) -> StepBench:
    """Raises NumericsError for a trainer whose first loss is not that of the others."""
    dice = np.random.default_rng(1)
    batches = dice.integers(3, 4096, (rounds + 1, batch, context + 1))
    with tempfile.TemporaryDirectory() as folder:
        steps = trainers(optimizer, resolve_threads(None), Path(folder))
        first = {name: step(batches[0]) for name, step in steps.items()}
        for name, loss in first.items():
            if not abs(loss / first["numpy, float32"] - 1) <= LOSS_ERROR:
                raise NumericsError(f"the first loss of {name} is {loss}, NumPy's {first['numpy, float32']}")
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in steps}
        for tokens in batches[1:]:
            for name, step in steps.items():
                begin, processor = time.perf_counter(), time.process_time()
                step(tokens)
                times[name].append((time.perf_counter() - begin, time.process_time() - processor))
    speeds = []
    for name, pairs in times.items():
        wall, processor_s = (median(each) for each in zip(*pairs, strict=True))
        speeds.append(TrainerSpeed(name, first[name], batch * context / wall, processor_s))
    return StepBench(tuple(speeds))


@click.command(cls=Script)
@click.option(
    "--optimizer", type=click.Choice(["adamw", "muon"]), default="adamw", show_default=True, help="torch: AdamW."
)
@click.option("--batch", type=click.IntRange(min=1), default=16, show_default=True, help="Sequences of a step.")
@click.option("--context", type=click.IntRange(2, 256), default=256, show_default=True, help="Tokens of a sequence.")
@click.option("--rounds", type=click.IntRange(min=1), default=7, show_default=True, help="Steps of each trainer.")
@common_options
def main(optimizer: str, batch: int, context: int, rounds: int) -> None:
    """Time training steps of storyteller's shape, each trainer in turn."""
    result = measure(optimizer, batch, context, rounds)
    report_bench(result, lambda out: draw_speeds(result.trainers, out), optimizer=optimizer)


def draw_speeds(speeds: tuple[TrainerSpeed, ...], out: Console) -> None:
    rows = [(s.trainer, f"{s.tokens_per_s:,.0f}", f"{s.processor_s:.2f}", f"{s.first_loss:.4f}") for s in speeds]
    draw_table(out, ("trainer", "tokens/s", "processor s a step", "first loss"), rows)


if __name__ == "__main__":
    start(main)
