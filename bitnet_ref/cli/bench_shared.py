"""What the `bench` commands share: their options, the model to measure, and how results are shown."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from functools import partial, wraps
from itertools import groupby
from typing import TYPE_CHECKING, Any

import click

from ..backends import HEADS, NAMES
from ..formats.checkpoint import LoadOptions
from .generation_options import apply_options, declared_option, dense_option
from .shell import DIFFERS, AnyFunction, LoadingBar, make_table, report

if TYPE_CHECKING:
    from rich.console import Console

    from ..api import Model
    from ..backends import Backend
    from ..benchmark.serve import Load
    from ..benchmark.timing import Conditions, Record
    from ..serving import EngineConfig

MAX_NUMBER = 1 << 20
# The keys of `benchmark.SHAPES`, which --help need not import
SYNTHETIC = (
    *("2b-4t", "700m", "1b", "7b", "tinyllama-1.1b"),
    *("bonsai-1.7b", "bonsai-4b", "bonsai-8b", "embedding-0.6b", "maple"),
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


shape_option = click.option(
    "--shape", "shapes", type=WholeNumbers("NxK", "x", 2), multiple=True, help="[default: those of 2B-4T]"
)


def token_options(function: AnyFunction) -> AnyFunction:
    """--prompt and --new, of one sequence"""
    prompt = click.option("--prompt", type=click.IntRange(min=1), default=64, show_default=True, help="Prompt tokens.")
    new = click.option("--new", type=click.IntRange(min=1), default=32, show_default=True, help="Decoded tokens.")
    return prompt(new(function))


def token_range(ctx: click.Context, param: click.Parameter, numbers: tuple[int, ...]) -> tuple[int, int]:
    """(16, 64) of "16-64", (32, 32) of "32" """
    if len(numbers) > 2 or numbers[0] > numbers[-1]:
        raise click.BadParameter(f"expected a number of tokens or a range like 16-64, got {numbers}", ctx, param)
    return numbers[0], numbers[-1]


def load_options(function: AnyFunction) -> AnyFunction:
    """The requests that an engine is offered, and its limits: see `split_load`; and --rate, as `rates`"""
    count = partial(click.option, type=click.IntRange(min=1), show_default=True)
    tokens = partial(click.option, type=WholeNumbers("FROM-TO", "-"), callback=token_range, show_default=True)
    rate_help = "Requests per second. May be repeated.  [default: shares of the capacity]"
    return apply_options(
        function,
        [
            count("--requests", default=100, help="At each rate."),
            click.option("--rate", "rates", type=float, multiple=True, help=rate_help),
            tokens("--prompt", default="8-32", help="Prompt tokens, drawn evenly."),
            tokens("--new", default="16-64", help="New tokens, drawn evenly."),
            count("--max-batch", default=64),
            click.option("--max-batch-tokens", type=click.IntRange(min=2), default=512, show_default=True),
            count("--max-queue", default=1024),
            click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True),
        ],
    )


def split_load(options: dict[str, Any]) -> tuple[Load, EngineConfig]:
    """What `load_options` gives, but for `rates`."""
    from ..benchmark.serve import Load
    from ..serving import EngineConfig

    load = Load(**{field.name: options.pop(field.name) for field in fields(Load)})
    return load, EngineConfig(**options)


# -- the model to measure ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Subject:
    """The model to measure and what computes it, from the command line."""

    model: str | None
    synthetic: str | None
    layers: int | None
    backend: str
    head: str
    dense: str
    threads: int | None
    simd: str | None
    activations: str = "auto"

    def __post_init__(self) -> None:
        if self.model is not None and self.synthetic is not None:
            raise click.UsageError("give a MODEL or --synthetic, not both")
        if self.layers is not None and self.synthetic is None:
            raise click.UsageError("--layers shortens a synthetic model; give --synthetic too")
        if self.activations != "auto" and self.synthetic is not None:
            raise click.UsageError("--activations says how a GGUF is read; --synthetic is none")
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

    @property
    def title(self) -> str:
        """The name, and how much of the model is measured."""
        return f"{self.name}, {self.shortened} layers" if self.shortened else self.name

    def open_backend(self) -> Backend:
        from ..backends import choose_backend
        from ..backends.cpu.backend import CythonBackend

        chosen = choose_backend("cython" if self.simd else self.backend, threads=self.threads, head=self.head)
        return CythonBackend("float32", self.threads, self.simd, head=self.head) if self.simd else chosen

    def load(self) -> Model:
        from ..api import Model, load

        chosen = self.open_backend()
        if self.synthetic is not None:
            from ..benchmark import SHAPES, synthetic_model

            with LoadingBar(f"making {self.synthetic}") as bar:
                return synthetic_model(SHAPES[self.synthetic], chosen, 0, bar, self.layers, self.dense)
        with LoadingBar(f"loading {self.name}") as bar:
            same: dict[str, Any] = {"threads": self.threads, "head": self.head, "dense": self.dense}
            same["activations"] = self.activations
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
            click.option("--backend", type=click.Choice(("auto", *NAMES)), default="auto", show_default=True),
            click.option("--head", type=click.Choice(HEADS), default="auto", show_default=True, help="As in generate."),
            dense_option(),
            declared_option(LoadOptions, "activations", default="auto"),
            machine_options,
        ],
    )


# -- results -----------------------------------------------------------------------------------------------------------


def report_bench(result: Record, draw: Callable[[Console], None], **facts: Any) -> None:
    """Write JSON (with the facts) or draw, and exit with 1 if something differs from the reference."""
    report({**facts, **result.to_dict()}, draw, 0 if getattr(result, "equal", True) else DIFFERS)


def draw_table(out: Console, columns: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> None:
    """The first `left` columns as text, wrapped; the others as numbers, aligned right."""
    out.print(make_table([title if i < left else f">|{title}" for i, title in enumerate(columns)], rows))


def draw_by_shape(
    results: Sequence[Any],
    columns: tuple[str, ...],
    describe: Callable[[list[Any]], str],
    cells: Callable[[Any], list[str]],
    out: Console,
) -> None:
    """A table for each shape, with its results in their order. describe: what its title says beside the shape."""
    for (n_out, n_in), group in groupby(results, key=lambda result: (result.out_features, result.in_features)):
        of_shape = list(group)
        out.print(f"\n{n_out} x {n_in}, {describe(of_shape)}", style="bold")
        draw_table(out, columns, [cells(result) for result in of_shape])


def differs(accumulators: int, floats: int) -> list[str]:
    return ["DIFFERS", f"{accumulators} acc", f"{floats} floats"]


def describe_conditions(conditions: Conditions | None, out: Console) -> None:
    """Whether the machine was quiet, and why there is no energy."""
    if conditions is None:
        return
    if not conditions.quiet:
        others = f"others kept {conditions.others:.1f} of its {conditions.processors} processors busy"
        waited = f", and this process waited {conditions.waited:.0%} of the time" if conditions.waited else ""
        remedy = "Compare processor times; wall times are no measure here."
        out.print(f"The machine was not quiet: {others}{waited}. {remedy}", style="yellow")
    if conditions.why_no_energy:
        out.print(f"energy: not measured: {conditions.why_no_energy}", style="dim")


def in_time(value_s: float) -> str:
    """0.00123 -> "1.23 ms" """
    for unit, scale in (("s", 1.0), ("ms", 1e3)):
        if value_s * scale >= 1:
            return f"{value_s * scale:.2f} {unit}"
    return f"{value_s * 1e6:.1f} us"
