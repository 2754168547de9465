"""Seconds from the start of `bitnet-ref generate` to its first token, cold and warm, beside a plain read of the files.

    python scripts/benchmarks/first_token.py MODEL

In turn: the files leave the system's cache and are read; they leave it again and the model starts (cold); it starts
once more (warm). Linux only. The bytes that came from the disk in the cold start show that the cache was empty.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

import click
from commands import Script, start

from bitnet_ref.benchmark.timing import Record
from bitnet_ref.cli.bench_shared import draw_table, report_bench
from bitnet_ref.cli.shell import common_options
from bitnet_ref.errors import BackendUnavailable, GenerationError
from bitnet_ref.formats.open import find_model

if TYPE_CHECKING:
    from rich.console import Console


class Start(NamedTuple):
    """One start of the program."""

    first_token_s: float
    processor_s: float  # until it ended
    disk_bytes: int


@dataclass(frozen=True)
class StartBench(Record):
    """Each of as many rounds."""

    file_bytes: int
    read_s: tuple[float, ...]  # the files alone, from the disk
    cold: tuple[Start, ...]
    warm: tuple[Start, ...]


def measure_starts(model: str, repeats: int) -> StartBench:
    """Start the model cold and warm, in turn with plain reads of its files from the disk."""
    if not hasattr(os, "posix_fadvise"):
        raise BackendUnavailable("files are dropped from the cache by posix_fadvise, which this system does not have")
    path = find_model(model)
    files = [each for each in sorted(path.rglob("*")) if each.is_file()] if path.is_dir() else [path]
    start_once(path)  # the program's own files are in the cache from here on
    rounds = []
    for _ in range(repeats):
        drop(files)
        begin = time.perf_counter()
        for file in files:
            read(file)
        read_s = time.perf_counter() - begin
        drop(files)
        rounds.append((read_s, start_once(path), start_once(path)))
    return StartBench(sum(file.stat().st_size for file in files), *zip(*rounds, strict=True))


def drop(files: list[Path]) -> None:
    os.sync()  # a page that is not yet on the disk stays in the cache
    for file in files:
        with file.open("rb") as opened:
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read(file: Path) -> None:
    block = bytearray(8 << 20)
    with file.open("rb", buffering=0) as opened:
        while opened.readinto(block):
            pass


def start_once(path: Path) -> Start:
    """Run the command until it ends. Raises GenerationError if it fails."""
    command = [sys.executable, "-m", "bitnet_ref", "generate", "Hello", "--model", str(path), "--max-tokens", "1"]
    begin = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0) as child:
        assert child.stdout is not None
        assert child.stderr is not None
        child.stdout.read(1)
        first_token_s = time.perf_counter() - begin
        message = child.stderr.read().decode()
        _, status, usage = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        raise GenerationError(f"the model did not start: {message.strip()}")
    return Start(first_token_s, usage.ru_utime + usage.ru_stime, 512 * usage.ru_inblock)


@click.command(cls=Script)
@click.argument("model", default="storyteller")
@click.option("--repeats", type=click.IntRange(min=1), default=5, show_default=True, help="Rounds.")
@common_options
def main(model: str, repeats: int) -> None:
    """Time from the start of the process to the first token of MODEL, cold and warm."""
    result = measure_starts(model, repeats)
    report_bench(result, lambda out: draw_starts(result, out), model=model)


def draw_starts(result: StartBench, out: Console) -> None:
    out.print(
        f"{result.file_bytes / 1e9:.2f} GB, which the disk gives in {min(result.read_s):.2f} to "
        f"{max(result.read_s):.2f} s, median {median(result.read_s):.2f}"
    )
    rows = []
    for name, starts in (("cold", result.cold), ("warm", result.warm)):
        first, processor, disk = zip(*starts, strict=True)
        times = f"{min(first):.2f} to {max(first):.2f}"
        rows.append((name, f"{median(first):.2f}", times, f"{median(processor):.2f}", f"{median(disk) / 1e9:.2f}"))
    draw_table(out, ("", "s to the first token, median", "all", "processor s", "GB from the disk"), rows)


if __name__ == "__main__":
    start(main)
