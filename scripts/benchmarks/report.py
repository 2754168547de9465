"""The speeds of docs/speed.md in one run: several commands of this folder, as JSON and as a page with bars.

    python scripts/benchmarks/report.py --out report

Each command runs in a process of its own, so that its peak of memory is its own, and the others go on if it fails. A
bar is a speed as a share of its bound, measured in the same process: for decoding what memory read allows, for a prompt
the rate of the product instruction. So models of all sizes, and other engines, share one axis.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click
from commands import Script, start
from models import versus_options

from bitnet_ref import __version__
from bitnet_ref.benchmark.timing import Record
from bitnet_ref.cli.bench_shared import draw_table, report_bench
from bitnet_ref.cli.shell import LoadingBar, common_options
from bitnet_ref.formats.checkpoint import Progress
from bitnet_ref.system.atomic import atomic_path, explain_os_errors
from bitnet_ref.system.json_file import write_json
from bitnet_ref.system.machine import cpu_model, operating_system
from bitnet_ref.system.threads import resolve_threads

if TYPE_CHECKING:
    from rich.console import Console

FOLDER = Path(__file__).parent

# title -> a script of this folder, and its arguments
SUBJECTS: dict[str, tuple[str, ...]] = {
    "storyteller": ("models.py",),
    "2B-4T": ("models.py", "--synthetic", "2b-4t"),
    "2B-4T, every logit": ("models.py", "--synthetic", "2b-4t", "--head", "exact"),
    "2B-4T, 1 thread": ("models.py", "--synthetic", "2b-4t", "--threads", "1"),
    "2B-4T, 80% of gates zero": ("models.py", "--synthetic", "2b-4t", "--gate-zeros", "0.8"),
    "2B-4T, after 2,048 tokens": ("models.py", "--synthetic", "2b-4t", "--prompt", "2048"),
    "Bonsai 4B": ("models.py", "--synthetic", "bonsai-4b"),
    "TinyLlama 1.1B, bfloat16": ("models.py", "--synthetic", "tinyllama-1.1b"),
    "storyteller, 64 at once": ("serve.py", "--requests", "64"),
}
PEER_TITLES = ("2B-4T", "TinyLlama 1.1B, bfloat16")  # those whose shape other engines are given too
TIMEOUT_S = 1800.0


@dataclass(frozen=True)
class BenchRun:
    """One command and the JSON that it wrote, or the line that says why there is none."""

    title: str
    arguments: tuple[str, ...]
    seconds: float
    facts: Mapping[str, Any] | None = None
    why: str = ""


@dataclass
class BenchReport(Record):
    """What was run, on what machine."""

    version: str
    date: str
    processor: str
    system: str
    threads: int
    runs: list[BenchRun] = field(default_factory=list)

    @property
    def equal(self) -> bool:
        """Whether every model agreed with the NumPy reference."""
        return all(run.facts is None or run.facts["equal"] for run in self.runs)

    @classmethod
    def of(cls, facts: Mapping[str, Any]) -> BenchReport:
        """From the JSON of `to_dict`."""
        runs = [BenchRun(**{**run, "arguments": tuple(run["arguments"])}) for run in facts["runs"]]
        return cls(**{name: facts[name] for name in ("version", "date", "processor", "system", "threads")}, runs=runs)


def measure_report(
    titles: Iterable[str] = tuple(SUBJECTS),
    *,
    layers: int | None = None,
    versus: Sequence[str] = (),
    python: str | None = None,
    progress: Progress | None = None,
) -> Iterator[BenchReport]:
    """Run the commands one by one.   -> the report after each, so that an interrupted run keeps its results

    titles: keys of SUBJECTS. layers: of the synthetic models. versus, python: as in `measure_peer`, for PEER_TITLES.
    """
    chosen = list(titles)
    day = time.strftime("%Y-%m-%d", time.gmtime())
    report = BenchReport(__version__, day, cpu_model(), operating_system(), resolve_threads())
    for number, title in enumerate(chosen):
        arguments = SUBJECTS[title]
        of_machine: tuple[str, ...] = ()
        if layers is not None and "--synthetic" in arguments:
            arguments += ("--layers", str(layers))
        if title in PEER_TITLES:
            arguments += tuple(word for name in versus for word in ("--versus", name))
            of_machine = () if python is None else ("--versus-python", python)
        if progress is not None:
            progress(number, len(chosen))
        report.runs.append(run_bench(title, arguments, of_machine))
        yield report


def run_bench(title: str, arguments: tuple[str, ...], of_machine: tuple[str, ...] = ()) -> BenchRun:
    """The script with its arguments and --json, in a process of its own. of_machine: arguments that are not kept."""
    script, *options = arguments
    command = [sys.executable, str(FOLDER / script), *options, *of_machine, "--json"]
    start = time.perf_counter()
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
        facts = json.loads(done.stdout)
    except (OSError, subprocess.TimeoutExpired, ValueError) as error:
        why = f"{type(error).__name__}: {error}"
        return BenchRun(title, arguments, time.perf_counter() - start, why=why)
    seconds = time.perf_counter() - start
    if "error" in facts:
        return BenchRun(title, arguments, seconds, why=facts["error"]["message"])
    return BenchRun(title, arguments, seconds, facts)


# -- the page ----------------------------------------------------------------------------------------------------------


class Bar(NamedTuple):
    """A speed and the share of the bound that it is; without a share it is text alone."""

    name: str
    speed: float
    share: float | None


def bars_of(report: BenchReport, part: str) -> Iterator[tuple[str, list[Bar]]]:
    """The model's bar, and those of its peers. part: "decode" or "prompt".   -> title, bars"""
    speed = f"{part}_tokens_per_s"
    for run in report.runs:
        if run.facts is None or run.facts.get(speed) is None:
            continue
        facts = run.facts
        in_cache = part == "decode" and facts["fits_in_cache"]
        bound = facts["bound_tokens_per_s" if part == "decode" else "prompt_bound_tokens_per_s"]
        peers = {name: peer for name, peer in facts["versus"].items() if not isinstance(peer, str)}
        speeds = {"bitnet_ref": facts[speed], **{f"{n} {peer['version']}": peer[speed] for n, peer in peers.items()}}
        yield run.title, [Bar(n, v, v / bound if bound and not in_cache else None) for n, v in speeds.items()]


def draw_bars(report: BenchReport, part: str) -> str:
    """One SVG, as narrow as a phone: each bar below its name and speed, and the line of the bound."""
    row, wide, bound_at, top = 31, 360, 300, 24
    height, body = top, []
    for title, bars in bars_of(report, part):
        for number, bar in enumerate(bars):
            y, kind = height + row * number, min(number, 1)
            length = min(wide / bound_at, bar.share or 0) * bound_at
            name = title if number == 0 else bar.name
            share = "" if bar.share is None else f" ({bar.share:.2f})"
            body.append(f'<text x="0" y="{y + 12}" class="n{kind}">{escape(name)}</text>')
            body.append(f'<text x="{wide}" y="{y + 12}" text-anchor="end">{in_words(bar.speed)}{share}</text>')
            if bar.share is not None:
                body.append(f'<rect x="0" y="{y + 17}" width="{length:.1f}" height="9" class="b{kind}"/>')
                body.append(f'<line x1="{bound_at}" y1="{y + 16}" x2="{bound_at}" y2="{y + 27}"/>')
        height += row * len(bars) + 6
    bound = {"decode": "what memory read allows", "prompt": "rate of the product instruction"}[part]
    body.append(f'<text x="{bound_at}" y="12" text-anchor="end">{bound}</text>')
    body.append(f'<line x1="{bound_at}" y1="15" x2="{bound_at}" y2="{top}"/>')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {height}" role="img" '
        f'class="speeds" aria-label="{part}: tokens per second, and their share of the bound">'
        f"<style>{BAR_STYLE}</style>{''.join(body)}</svg>"
    )


BAR_STYLE = (
    ".speeds{width:100%;max-width:460px}.speeds text{font:12px sans-serif;fill:currentColor}.speeds .n1{opacity:.7}"
    ".speeds line{stroke:currentColor;opacity:.6}.speeds .b0{fill:#2f81f7}.speeds .b1{fill:#8c959f}"
)
PAGE_STYLE = (
    ":root{color-scheme:light dark}body{font:15px/1.5 sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}"
    "table{border-collapse:collapse}td,th{padding:.2rem .8rem .2rem 0;text-align:left;vertical-align:top}"
)


def write_page(report: BenchReport) -> str:
    """The report as a page of HTML that needs nothing else."""
    parts = [
        "".join(f"<h2>{title}</h2>{draw_bars(report, part)}" for part, title in TITLES.items()),
        "<h2>Runs</h2><table>",
    ]
    for run in report.runs:
        command = f"<code>python scripts/benchmarks/{escape(' '.join(run.arguments))}</code>"
        parts.append(f"<tr><td>{escape(run.title)}</td><td>{command}<br>{escape(describe_run(run))}</td></tr>")
    parts.append("</table>")
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><style>{PAGE_STYLE}</style>'
    top = f"<title>bitnet_ref: speed</title><h1>Speed</h1><p>{escape(describe_machine(report))}</p>"
    return f'<!doctype html><html lang="en">{head}{top}{"".join(parts)}</html>\n'


TITLES = {"decode": "Decoding, one token at a time", "prompt": "Prompts"}


def in_words(tokens_per_s: float) -> str:
    """15849.4 -> "15,849 tok/s", 28.681 -> "28.7 tok/s" """
    return f"{tokens_per_s:,.{0 if tokens_per_s >= 100 else 1}f} tok/s"


def describe_machine(report: BenchReport) -> str:
    return f"bitnet_ref {report.version}, {report.date}: {report.processor}, {report.threads} threads, {report.system}."


def describe_run(run: BenchRun) -> str:
    """Its speeds in a line, or why there are none."""
    facts = run.facts
    if facts is None:
        return f"not measured: {run.why}"
    if not facts["equal"]:
        return "DIFFERS from the NumPy reference; no speed"
    if run.arguments[0] == "serve.py":
        together = facts["together"]
        return (
            f"{facts['checked']} requests equal to what they give alone; {together['prompts']} together are "
            f"{together['ratio']:.2f} times as fast as one after another"
        )
    words = [
        f"decodes {in_words(facts['decode_tokens_per_s'])}, reads prompts of {facts['prompt_tokens']} tokens at "
        f"{in_words(facts['prompt_tokens_per_s'])}; {facts['step_bytes']['total'] / 1e6:,.0f} MB per token",
        f"memory read {facts['read_gb_per_s']:.1f} GB/s",
        f"peak memory {facts['peak_memory_bytes'] / 1e9:.2f} GB",
    ]
    words += [f"{name}: {peer}" for name, peer in facts["versus"].items() if isinstance(peer, str)]
    return f"equal to the NumPy reference; {', '.join(words)}"


# -- the command -------------------------------------------------------------------------------------------------------


@click.command(cls=Script)
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), required=True, help="The folder to write.")
@click.option("--only", metavar="WORDS", multiple=True, help="Models whose title has these words. May be repeated.")
@click.option("--layers", type=click.IntRange(min=1), help="Only so many layers of the synthetic models.")
@versus_options
@common_options
def main(
    out: Path, only: tuple[str, ...], layers: int | None, versus: tuple[str, ...], versus_python: str | None
) -> None:
    """Measure the shipped model and synthetic ones, each in a process of its own, in some ten minutes.

    OUT/report.html has the speeds as bars beside their bounds, OUT/report.json all figures. Both are written anew after
    each model. --versus measures other engines on the shapes of 2B-4T and TinyLlama.
    """
    titles = [title for title in SUBJECTS if not only or any(words.lower() in title.lower() for words in only)]
    if not titles:
        raise click.UsageError(f"--only {', '.join(only)}: expected words of {'; '.join(SUBJECTS)}")
    with explain_os_errors(out):
        out.mkdir(parents=True, exist_ok=True)
    page, figures = out / "report.html", out / "report.json"
    with LoadingBar("measuring") as bar:
        for result in measure_report(titles, layers=layers, versus=versus, python=versus_python, progress=bar):
            write_json(figures, result.to_dict())
            with atomic_path(page) as path:
                path.write_text(write_page(result), encoding="utf-8")

    def draw(console: Console) -> None:
        draw_table(console, ("", ""), [(run.title, describe_run(run)) for run in result.runs], left=2, header=False)
        console.print(f"{page}, {figures}")

    report_bench(result, draw)


if __name__ == "__main__":
    start(main)
