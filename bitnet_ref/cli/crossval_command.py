"""`bitnet-ref crossval`: the reference against our backends, or against a trace that anyone recorded."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .generation_options import content_of
from .shell import DIFFERS, UNAVAILABLE, LoadingBar, common_options, print_json, show, wants_json

if TYPE_CHECKING:
    from rich.console import Console

    from ..api import Model
    from ..crossval import Crossing, PrecisionBench
    from ..crossval.compare import Comparison

_MODEL = click.argument("model", default="storyteller")


def what_to_run(function: Any) -> Any:
    """--prompt and --tokens, for `load_and_encode`."""
    prompt = click.option("--prompt", help="The text to run.  [default: a sentence]")
    tokens = click.option("--tokens", help="Token ids instead of a text: 1,17,5")
    return prompt(tokens(function))


def outputs(function: Any) -> Any:
    """What every comparison can write, and how strict it is."""
    html = click.option("--html", "html_path", type=click.Path(path_type=Path), help="Write a report with plots there.")
    receipt = click.option("--receipt", type=click.Path(path_type=Path), help="Write a receipt that can be verified.")
    require = click.option("--require", is_flag=True, help="An opponent that cannot run here is a failure.")
    return html(receipt(require(function)))


@click.group(short_help="Compare the reference with other engines, op by op.")
@common_options
def crossval() -> None:
    """Compare the reference with another engine, op by op, and name the first op that is wrong.

    Exits with 1 when an opponent differs, or is missing and --require was given; with 4 when none could run.
    """


@crossval.command(short_help="Every backend and kernel set of this package.")
@_MODEL
@what_to_run
@click.option("--only", multiple=True, metavar="NAME", help='One opponent, such as "cython avx2"; may be repeated.')
@outputs
@common_options
def backends(
    model: str,
    prompt: str | None,
    tokens: str | None,
    only: tuple[str, ...],
    html_path: Path | None,
    receipt: Path | None,
    require: bool,
) -> None:
    """Run MODEL on every backend of this package and hold each op to the reference's.

    Each backend is fed the reference's inputs, op by op, and then runs by itself.
    """
    from ..crossval import cross_backends

    loaded, ids = load_and_encode(model, prompt, tokens)
    crossings = cross_backends(loaded, ids, only or None)
    finish("backends", model, loaded, ids, crossings, None, html_path, receipt, require)


@crossval.command(short_help="A trace file that some engine recorded.")
@click.argument("model")
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--no-causes", is_flag=True, help="Do not look for the cause of a difference, which takes many runs.")
@outputs
@common_options
def trace(model: str, file: Path, no_causes: bool, html_path: Path | None, receipt: Path | None, require: bool) -> None:
    """Hold the trace FILE of some engine against MODEL on the reference.

    The format of a trace is in crossval/README.md.
    """
    from ..crossval import cross_trace
    from ..crossval.trace import Trace

    with Trace(file) as opened:
        ids = opened.token_ids
    loaded = load_model(model)
    finish(
        "trace",
        model,
        loaded,
        ids,
        [cross_trace(loaded, file, causes=not no_causes)],
        file,
        html_path,
        receipt,
        require,
    )


@crossval.command(short_help="Record a run as a trace file.")
@_MODEL
@click.argument("file", type=click.Path(path_type=Path))
@what_to_run
@click.option("--names", multiple=True, metavar="GLOB", help='Which tensors: "blocks.0.*"; may be repeated.')
@click.option("--backend", default="numpy", show_default=True, help="Which backend runs.")
@common_options
def record(
    model: str, file: Path, prompt: str | None, tokens: str | None, names: tuple[str, ...], backend: str
) -> None:
    """Run MODEL and write its named tensors to the trace FILE."""
    from ..crossval.trace import Trace, record_to_file

    loaded, ids = load_and_encode(model, prompt, tokens, backend)
    record_to_file(loaded, ids, file, names or None, prompt)
    with Trace(file) as written:
        count = len(written)
    if wants_json():
        print_json({"path": str(file), "tensors": count, "tokens": len(ids), "bytes": file.stat().st_size})
    else:
        show(lambda out: out.print(f"{file}: {count} tensors of {len(ids)} tokens, {file.stat().st_size:,} bytes"))


@crossval.command(short_help="What float16 or bfloat16 on a backend costs.")
@_MODEL
@click.option("--backend", default="cupy", show_default=True, help="Which backend is measured.")
@click.option("--dtype", "dtypes", multiple=True, help="May be repeated.  [default: float32, float16 and bfloat16]")
@click.option("--prompt", help="The text, or @FILE.  [default: a short story]")
@click.option("--tokens", help="Token ids instead of a text: 1,17,5")
@common_options
def precision(model: str, backend: str, dtypes: tuple[str, ...], prompt: str | None, tokens: str | None) -> None:
    """Measure how far a dtype of a backend takes the logits of a text from the float32 reference's.

    16 bits are no part of the contract: this judges nothing, and exits with 0.
    """
    from ..crossval import measure_precision
    from ..crossval.precision import DTYPES

    if prompt is not None and tokens is not None:
        raise click.UsageError("--prompt and --tokens exclude each other")
    text = content_of(prompt) if tokens is None else token_ids(tokens)
    loaded = load_model(model)
    with LoadingBar("measuring"):
        found = measure_precision(loaded, backend, dtypes or DTYPES, text)
    if wants_json():
        print_json({"model": model, **found.to_dict()})
    else:
        show(lambda out: _draw_precision(found, out))


@crossval.command(short_help="Check a receipt: compute again what can be.")
@click.argument("receipt", type=click.Path(path_type=Path))
@click.option("--model", help="Where the model is now, if not where the receipt says.")
@click.option("--trace", help="Where the trace is now, if not where the receipt says.")
@click.option("--python", help="The interpreter that has the receipt's engine.  [default: this one]")
@click.option("--require", is_flag=True, help="What cannot be checked here is a failure.")
@common_options
def verify(receipt: Path, model: str | None, trace: str | None, python: str | None, require: bool) -> None:
    """Check the seal of RECEIPT, run its comparisons again, and hold the figures against it."""
    from ..crossval import verify_receipt

    found = verify_receipt(receipt, model, trace, python)
    if wants_json():
        print_json(found.to_dict())
    else:
        show(lambda out: _draw_verification(found, out))
    if not found.holds or (require and found.unchecked):
        raise click.exceptions.Exit(DIFFERS)


def load_model(model: str, backend: str = "numpy") -> Model:
    from ..api import load

    with LoadingBar("loading") as bar:
        return load(model, backend=backend, progress=bar)


def load_and_encode(
    model: str, prompt: str | None, tokens: str | None, backend: str = "numpy"
) -> tuple[Model, list[int]]:
    """The model, and the token ids that `what_to_run` asks for."""
    from ..crossval import default_tokens

    if prompt is not None and tokens is not None:
        raise click.UsageError("--prompt and --tokens exclude each other")
    loaded = load_model(model, backend)
    return loaded, token_ids(tokens) if tokens is not None else default_tokens(loaded, prompt)


def token_ids(text: str) -> list[int]:
    try:
        return [int(part) for part in text.replace(",", " ").split()]
    except ValueError as problem:
        raise click.BadParameter(
            f"expected whole numbers such as 1,17,5, got {text!r}", param_hint="--tokens"
        ) from problem


def finish(
    kind: str,
    name: str,
    model: Model,
    tokens: list[int],
    crossings: list[Crossing],
    trace: Path | None,
    html_path: Path | None,
    receipt: Path | None,
    require: bool,
) -> None:
    """Show, write what was asked for, and exit with what was found."""
    from ..crossval import make_receipt, write_html
    from ..crossval.receipt import write_receipt

    ran = [crossing.agrees for crossing in crossings if crossing.agrees is not None]
    missing = [crossing.opponent for crossing in crossings if crossing.agrees is None]
    agrees = bool(ran) and all(ran) and not (require and missing)
    if html_path is not None:
        facts = {"model": f"{name}: {model.config.num_hidden_layers} layers of {model.config.hidden_size}"}
        facts["tokens"] = f"{len(tokens)}: {tokens[:32]}{' ...' if len(tokens) > 32 else ''}"
        write_html(html_path, f"crossval: {name}", crossings, facts)
    if receipt is not None:
        write_receipt(receipt, make_receipt(kind, name, model, tokens, crossings, trace))
    if wants_json():
        results = [crossing.to_dict() for crossing in crossings]
        print_json({"model": name, "tokens": tokens, "agrees": agrees, "missing": missing, "results": results})
    else:
        show(lambda out: draw(crossings, missing if require else [], out))
    if not agrees:
        raise click.exceptions.Exit(DIFFERS if ran or require else UNAVAILABLE)


def draw(crossings: list[Crossing], required: list[str], out: Console) -> None:
    """The verdicts, then the first op that is wrong in each that differs."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for crossing in crossings:
        style = {None: "yellow", True: "green", False: "red"}[crossing.agrees]
        table.add_row(crossing.opponent, Text(crossing.verdict, style=style))
    out.print(table)
    for crossing in crossings:
        for found in crossing.comparisons:
            if found.first_divergence is not None:
                _draw_neighbourhood(crossing.opponent, found, out)
        for line in crossing.diagnosis():
            out.print(Text(f"{crossing.opponent}: {line}"), soft_wrap=True)
    for name in required:
        out.print(Text(f"{name} is required and not available", style="red"))


def _draw_neighbourhood(opponent: str, found: Comparison, out: Console) -> None:
    """The ops around the first that differs."""
    from rich.table import Table
    from rich.text import Text

    bad = next(i for i, op in enumerate(found.ops) if op is found.first_divergence)
    out.print(Text(f"\n{opponent}, {found.mode}", style="bold"))
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for title in ("tensor", "status", "differ", "max abs", "rel. L2", "cosine", "scale"):
        table.add_column(title, no_wrap=True, justify="left" if title in ("tensor", "status") else "right")
    for op in found.ops[max(0, bad - 3) : bad + 4]:
        style = {"ok": "green", "rounding flip": "yellow"}.get(op.status, "red")
        figures = (f"{op.n_differ:,}", f"{op.max_abs:.2e}", f"{op.relative_l2:.1e}", f"{op.cosine:.5f}")
        table.add_row(op.name, Text(op.status, style=style), *figures, f"{op.scale_ratio:.5f}")
    out.print(table)


def _draw_precision(found: PrecisionBench, out: Console) -> None:
    from rich.table import Table

    where = found.backend if found.device is None else f"{found.backend} ({found.device})"
    out.print(f"{where}, {found.tokens} tokens; logits up to {found.largest_logit:.1f}, against the float32 reference")
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("dtype")
    for title in ("text as", "max |d logit|", "mean", "mean KL", "max KL", "same greedy choice", "continued alike"):
        table.add_column(title, no_wrap=True, justify="right")
    for error in found.errors:
        table.add_row(
            *(error.dtype, error.way, f"{error.max_logit_error:.1e}", f"{error.mean_logit_error:.1e}"),
            *(f"{error.kl_mean:.1e}", f"{error.kl_max:.1e}", f"{error.greedy_agreement:.2%}"),
            f"{found.same_tokens[error.dtype]} of {found.continued}",
        )
    out.print(table)


def _draw_verification(found: Any, out: Console) -> None:
    from rich.text import Text

    out.print(Text(found.verdict, style="green" if found.holds else "red"))
    for title, lines in (("refuted", found.refuted), ("not checked", found.unchecked)):
        for line in lines:
            out.print(f"  {title}: {line}")
