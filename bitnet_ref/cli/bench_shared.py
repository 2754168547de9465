"""What the `bench` commands share: their options, the model to measure, and how results are shown."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..backends import HEADS, NAMES
from .generation_options import apply_options, dense_option
from .shell import DIFFERS, AnyFunction, LoadingBar, OutputFile, make_table, report

if TYPE_CHECKING:
    from rich.console import Console

    from ..api import Model
    from ..benchmark.timing import Record
    from ..crossval.precision import CacheBench

MAX_NUMBER = 1 << 20
# The keys of `benchmark.SHAPES`, which --help need not import
SYNTHETIC = (
    *("2b-4t", "700m", "1b", "7b", "tinyllama-1.1b"),
    *("bonsai-1.7b", "bonsai-4b", "bonsai-8b", "embedding-0.6b"),
)


class WholeNumbers(click.ParamType):
    """Whole numbers with a separator: "6912x2560" -> (6912, 2560)."""

    def __init__(self, name: str, separator: str, count: int | None = None) -> None:
        self.name, self.separator, self.count = name, separator, count

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        words = value.lower().split(self.separator)
        good = all(word.isascii() and word.isdecimal() and 1 <= int(word[:9]) <= MAX_NUMBER for word in words)
        if not good or (self.count is not None and len(words) != self.count):
            self.fail(f"expected {self.name}, whole numbers from 1 to {MAX_NUMBER}, got {value!r}", param, ctx)
        return tuple(map(int, words))


def machine_options(function: AnyFunction) -> AnyFunction:
    """--threads and --simd"""
    threads = click.option("--threads", type=click.IntRange(min=1), help="CPU threads.  [default: one a core]")
    simd = click.option("--simd", metavar="SET", help="Kernel set of the cython backend (scalar, avx2, avx512, ...).")
    return threads(simd(function))


def refuse_simd(simd: str | None, backend: str) -> None:
    if simd is not None and backend not in ("auto", "all", "cython"):
        raise click.UsageError(f"--simd chooses a kernel set of the cython backend; --backend is {backend}")


def plot_option(help: str) -> Callable[[AnyFunction], AnyFunction]:
    """--plot, a file for a picture.   -> `plot`, a Path or None"""

    def check(ctx: click.Context, param: click.Parameter, plot: Path | None) -> Path | None:
        if plot is not None and plot.suffix not in (".png", ".svg", ".pdf"):
            raise click.UsageError(f"--plot {plot}: expected a file that ends in .png, .svg or .pdf")
        return plot

    return click.option("--plot", type=OutputFile(), callback=check, help=help)


# -- the model to measure ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Subject:
    """The model to measure and what computes it, from the command line."""

    model: str | None
    synthetic: str | None
    layers: int | None
    gate_zeros: float | None
    backend: str
    head: str
    dense: str
    threads: int | None
    simd: str | None

    def __post_init__(self) -> None:
        if self.model is not None and self.synthetic is not None:
            raise click.UsageError("give a MODEL or --synthetic, not both")
        if self.layers is not None and self.synthetic is None:
            raise click.UsageError("--layers shortens a synthetic model; give --synthetic too")
        if self.gate_zeros is not None and self.synthetic is None:
            raise click.UsageError("--gate-zeros shapes a synthetic model; give --synthetic too")
        refuse_simd(self.simd, self.backend)

    @property
    def name(self) -> str:
        return f"{self.synthetic}, random weights" if self.synthetic else self.model or "storyteller"

    @property
    def shortened(self) -> str:
        """ "10 of its 30", or "" for a whole model"""
        from ..benchmark import SHAPES

        whole = SHAPES[self.synthetic].num_hidden_layers if self.synthetic else self.layers
        return f"{self.layers} of its {whole}" if self.layers not in (None, whole) else ""

    def load(self) -> Model:
        from ..api import Model, load
        from ..backends import choose_backend
        from ..backends.cpu.backend import CythonBackend

        chosen = choose_backend("cython" if self.simd else self.backend, threads=self.threads, head=self.head)
        if self.simd:
            chosen = CythonBackend("float32", self.threads, self.simd, head=self.head)
        if self.synthetic is not None:
            from ..benchmark import SHAPES, synthetic_model

            with LoadingBar(f"making {self.synthetic}") as bar:
                return synthetic_model(SHAPES[self.synthetic], chosen, 0, bar, self.layers, self.gate_zeros, self.dense)
        with LoadingBar(f"loading {self.name}") as bar:
            same: dict[str, Any] = {"threads": self.threads, "head": self.head, "dense": self.dense}
            loaded = load(self.name, backend=chosen.name, progress=bar, **same)
        return Model(loaded.config, loaded.weights, chosen, loaded.path)  # all kernel sets read one layout


def subject_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """MODEL, --synthetic or --shape, with --layers, --backend, --head, --threads and --simd.   -> `subject`, checked"""

    @wraps(function)
    def command(shape: str | None, **options: Any) -> Any:
        if shape is not None:
            if (options["model"], options["synthetic"]) != (None, None):
                raise click.UsageError("give a MODEL, --synthetic or --shape, not several")
            known = {name.replace("-", ""): name for name in SYNTHETIC}.get(shape.lower().replace("-", ""))
            options["model" if known is None else "synthetic"] = known or shape
        subject = Subject(**{field.name: options.pop(field.name) for field in fields(Subject)})
        return function(subject=subject, **options)

    return apply_options(
        command,
        [
            click.argument("model", required=False),
            click.option(
                "--synthetic", type=click.Choice(SYNTHETIC), help="Random weights of this shape, not a MODEL."
            ),
            click.option("--shape", metavar="NAME|PATH", help="A name of --synthetic (also 2b4t), or a MODEL."),
            click.option("--layers", type=click.IntRange(min=1), help="Only so many layers of the synthetic model."),
            click.option(
                "--gate-zeros", type=float, help="The share of zeros among the synthetic model's ReLU^2 gates."
            ),
            click.option("--backend", type=click.Choice(("auto", *NAMES)), default="auto", show_default=True),
            click.option("--head", type=click.Choice(HEADS), default="auto", show_default=True, help="As in generate."),
            dense_option(),
            machine_options,
        ],
    )


# -- results -----------------------------------------------------------------------------------------------------------


def report_bench(result: Record | CacheBench, draw: Callable[[Console], None], **facts: Any) -> None:
    """Write JSON (with the facts) or draw, and exit with 1 if something differs from the reference."""
    report({**facts, **result.to_dict()}, draw, 0 if getattr(result, "equal", True) else DIFFERS)


def draw_table(
    out: Console, columns: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1, header: bool = True
) -> None:
    """The first `left` columns as text, wrapped; the others as numbers, aligned right."""
    titles = columns if header else [""] * len(columns)
    out.print(make_table([title if i < left else f">|{title}" for i, title in enumerate(titles)], rows))


def in_threads(threads: int) -> str:
    return f"{threads} thread{'s' if threads != 1 else ''}"


def in_time(value_s: float) -> str:
    """0.00123 -> "1.23 ms" """
    for unit, scale in (("s", 1.0), ("ms", 1e3)):
        if value_s * scale >= 1:
            return f"{value_s * scale:.2f} {unit}"
    return f"{value_s * 1e6:.1f} us"
