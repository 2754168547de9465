"""`bitnet-ref train` and `train-tokenizer`: a model, and its tokenizer, from texts."""

from __future__ import annotations

import importlib
import shlex
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..backends import NAMES
from ..errors import BackendUnavailable
from .shell import LoadingBar, OutputFolder, common_options, console, report, say, shell_line, wants_json
from .signals import Ended

if TYPE_CHECKING:
    from ..training.run import StepMetrics

STEPS_BETWEEN_LINES = 20  # on a terminal a bar shows every step


@click.command(short_help="Train a model as a TOML file says, with checkpoints.")
@click.argument("config", type=click.Path(path_type=Path))
@click.option("--out", type=OutputFolder(), required=True, help="The run's folder.")
@click.option("--resume", is_flag=True, help="Go on from the folder's checkpoint.")
@click.option("--init", metavar="FOLDER", help="Start from the float masters of this folder.")
@click.option("--ternary", is_flag=True, help="Make a ternary model of the one that --init names, whatever its form.")
@click.option("--lora", metavar="MODEL", help="Train an adapter of this model, which stays as it is.")
@click.option("--distil", "teacher", metavar="MODEL", help="Also learn the probabilities of this model.")
@click.option("--steps", type=click.IntRange(min=1), help="Optimiser steps, instead of the file's.")
@click.option("--threads", type=click.IntRange(min=1), help="CPU threads.  [default: one a core]")
@click.option("--backend", type=click.Choice(("auto", *NAMES)), default="auto", show_default=True)
@click.option("--tensorboard", is_flag=True, help="Also write events for TensorBoard (needs tensorboardX).")
@common_options
def train(
    config: Path,
    out: Path,
    resume: bool,
    init: str | None,
    ternary: bool,
    lora: str | None,
    teacher: str | None,
    steps: int | None,
    threads: int | None,
    backend: str,
    tensorboard: bool,
) -> None:
    """Train a model as the TOML file CONFIG says (see docs/training.md), into the folder --out.

    The folder gets metrics.csv, checkpoint.safetensors and, ready for `bitnet-ref generate`, the folder model. A run
    that was interrupted, or killed, goes on with --resume as if nothing had happened. With --lora the folder is called
    adapter, as peft writes it; it names its model, and loads with it.
    """
    from ..training.run import TrainingRun, read_run

    settings, model = read_run(config)
    teacher, init = teacher or settings.teacher, init or settings.init
    ternary, lora = ternary or settings.ternary, lora or settings.lora
    settings = replace(settings, init=init, ternary=ternary, lora=lora, teacher=teacher, steps=steps or settings.steps)
    with LoadingBar("encoding the texts") as bar:
        run = TrainingRun(settings, out, model, resume=resume, threads=threads, backend=backend, progress=bar)
    parameters = sum(master.size for master in run.trainer.masters.values())
    if run.step < settings.steps:
        say(f"{parameters:,} parameters, {len(run.train):,} tokens of text, steps {run.step + 1} to {settings.steps}")
    writer = open_writer(out) if tensorboard else None
    try:
        with TrainingBar(run.step, settings.steps) as progress:
            last = run.run(progress.show, writer)
    except (KeyboardInterrupt, Ended):
        stopped = f"stopped after step {run.step} of {settings.steps}"
        if run.saved_step:
            command = f"{shell_line()}{'' if resume else ' --resume'}"
            say(f"{stopped}; this goes on from the checkpoint of step {run.saved_step}:\n{command}")
        else:
            say(f"{stopped}; nothing is saved yet (save_every = {settings.save_every}), so the next run begins anew")
        raise
    facts = {"folder": str(out), run.output.name: str(run.output), "parameters": parameters, **asdict(last)}
    validation = "" if last.validation_loss is None else f", validation loss {last.validation_loss:.3f}"
    use = f'bitnet-ref generate "Once upon a time" --model {shlex.quote(str(run.output))}'
    report(facts, f"step {last.step}: loss {last.loss:.3f}{validation}\n{use}")


class TrainingBar:
    """Progress on stderr: a bar with loss, speed and time left on a terminal, else a line now and then."""

    def __init__(self, done: int, total: int) -> None:
        self._bar: Any = None
        if sys.stderr.isatty() and not wants_json():
            progress = importlib.import_module("rich.progress")
            columns = (*progress.Progress.get_default_columns(), progress.TextColumn("{task.fields[facts]}"))
            self._bar = progress.Progress(*columns, console=console(sys.stderr))
            self._bar.add_task("training", total=total, completed=done, facts="")
        self._total = total

    def show(self, row: StepMetrics) -> None:
        facts = f"loss {row.loss:.3f}, {row.tokens_per_s:,.0f} tok/s"
        if row.validation_loss is not None:
            say(f"step {row.step}: validation loss {row.validation_loss:.4f}")
        if self._bar is not None:
            self._bar.update(0, completed=row.step, facts=facts)
        elif row.step % STEPS_BETWEEN_LINES == 0 or row.step == self._total:
            say(f"step {row.step} of {self._total}: {facts}")

    def __enter__(self) -> TrainingBar:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()


def open_writer(folder: Path) -> Any:
    """A SummaryWriter for events in the folder. Raises BackendUnavailable without tensorboardX."""
    try:
        return importlib.import_module("tensorboardX").SummaryWriter(str(folder / "events"))
    except ImportError as problem:
        raise BackendUnavailable("--tensorboard needs tensorboardX: pip install 'bitnet-ref[tensorboard]'") from problem


@click.command("train-tokenizer", short_help="Train a SentencePiece tokenizer on texts.")
@click.argument("texts", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--out", type=OutputFolder(), required=True, help="The folder to write.")
@click.option("--vocab", type=click.IntRange(min=300, max=1 << 18), default=4096, show_default=True, help="Tokens.")
@common_options
def train_tokenizer(texts: tuple[Path, ...], out: Path, vocab: int) -> None:
    """Train a byte-pair tokenizer with byte fallback on TEXTS (.txt, .txt.xz) and write tokenizer.model to --out."""
    from ..training.data import train_sentencepiece

    with LoadingBar("reading the texts") as bar:
        size = train_sentencepiece(texts, out, vocab, progress=bar)
    facts = {"folder": str(out), "vocab_size": size}
    report(facts, f"{out / 'tokenizer.model'}: {size} tokens")
