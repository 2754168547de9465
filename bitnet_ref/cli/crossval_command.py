"""`bitnet-ref crossval`: the reference against our backends, other engines, or a trace that one of them recorded."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable
from dataclasses import asdict
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..backends.options import ComputeOptions
from .doctor_command import CheckRows, draw_verdict
from .generation_options import (
    apply_options,
    content_of,
    declared_option,
    load_model,
    pop_workers,
    read_numbers,
    spread,
    worker_options,
)
from .shell import (
    DIFFERS,
    UNAVAILABLE,
    AnyFunction,
    Commands,
    LoadingBar,
    OrderedGroup,
    OutputFile,
    check_no_blank,
    common_options,
    make_table,
    report,
    show,
    style_text,
    wants_json,
)

if TYPE_CHECKING:
    from rich.console import Console

    from ..api import Model
    from ..crossval import Crossing, PrecisionBench, Verification
    from ..crossval.compare import Comparison
    from ..crossval.linear import LinearVerdict

_MODEL = click.argument("model", default="storyteller")
_FILE = click.Path(path_type=Path)  # to read
_OUTPUT = OutputFile()
VERDICT_STYLES = {None: "yellow", True: "green", False: "red"}  # by whether it agrees; None: it could not run


class _FileOrFolder(OutputFile):
    """A file to be written, or a folder for several: one that exists, or a name that ends in "/", which is made."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        check_no_blank(self, value, param, ctx)
        path = Path(value)
        if path.is_dir():
            return path
        super().convert(value, param, ctx)
        if str(value).endswith(("/", os.sep)):
            try:
                path.mkdir()
            except OSError as error:
                self.fail(f"{value}: {error.strerror}", param, ctx)
        return path


_ENGINES = {
    "transformers": "Hugging Face transformers, float32 and bfloat16, eager attention.",
    "llama_cpp": "llama.cpp on GGUF files that are written for it: TQ1_0 and TQ2_0, or F32.",
    "onnxruntime": "onnxruntime on the file that `convert --to onnx` writes.",
}


def text_options(prompt_help: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """--prompt and --tokens.   -> `text`: a text, token ids, or None"""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def command(prompt: str | None, tokens: list[int] | None, **options: Any) -> Any:
            if prompt is not None and tokens is not None:
                raise click.UsageError("--prompt and --tokens exclude each other")
            return function(text=prompt if tokens is None else tokens, **options)

        ids = click.option("--tokens", callback=read_numbers, help="Token ids instead of a text: 1,17,5")
        return apply_options(command, [click.option("--prompt", help=prompt_help), ids])

    return decorate


def runs_option(default: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """--runs: which runs of an engine are judged.   -> `runs`, names; None if it is not given."""

    def parse(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[str, ...] | None:
        from ..crossval.runs import RUNS

        if value is None:
            return None
        names = tuple(name.strip() for name in value.split(","))
        if unknown := [name for name in names if name not in RUNS]:
            raise click.BadParameter(f"{unknown[0]!r} is none of {', '.join(RUNS)}", ctx, param)
        return names

    text = f"Which runs, of short, long, decode, pieces and batch; with commas between.  [default: {default}]"
    return click.option("--runs", metavar="NAMES", callback=parse, help=text)


sentence_options = text_options("The text to run.  [default: a sentence]")


def outputs(function: AnyFunction) -> AnyFunction:
    """The keyword arguments of `finish`: what a comparison writes, and how strict it is."""
    options = [
        click.option("--html", "html_path", type=_OUTPUT, help="Write a report with plots to this file."),
        click.option("--receipt", type=_OUTPUT, help="Write a receipt that can be verified to this file."),
        click.option("--require", is_flag=True, help="Fail when an opponent cannot run here."),
    ]
    return apply_options(function, options)


def seconds(ctx: click.Context, param: click.Parameter, value: str) -> float:
    """ "90", "60s" or "2m" in seconds."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(s|m|)", value.strip())
    if match is None:
        raise click.BadParameter(f"expected seconds or minutes, such as 90, 60s or 2m; got {value!r}", ctx, param)
    return float(match[1]) * (60 if match[2] == "m" else 1)


budget_option = click.option(
    "--budget",
    default="60s",
    show_default=True,
    metavar="TIME",
    callback=seconds,
    help="Processor time for the search for the cause of a difference: 90, 60s, 2m.",
)


def trace_options(function: AnyFunction) -> AnyFunction:
    """How a trace is judged."""
    options = [
        budget_option,
        click.option("--no-causes", is_flag=True, help="Do not look for the cause of a difference."),
        click.option("--strict", is_flag=True, help="Fail for tensors that are missing or have unknown names."),
    ]
    return apply_options(function, options)


def look_for_causes(crossing: Crossing, model: Model, file: Path, budget: float) -> None:
    """`explain_trace` for so many seconds, with a line on the terminal that tells what is tested."""
    from ..crossval.opponents import explain_trace

    try:
        with LoadingBar("looking for the cause") as bar:
            explain_trace(crossing, model, file, progress=bar.tell, budget_s=budget)
    except KeyboardInterrupt:  # outside the tests themselves
        crossing.causes.stopped = "interrupted"


COMMANDS = Commands()


@click.group(cls=OrderedGroup, commands=COMMANDS, short_help="Compare the reference with other engines, op by op.")
@common_options
def crossval() -> None:
    """Compare the reference with another engine, op by op, and name the first op that is wrong.

    To check an engine of your own, let it write a trace, a file of named arrays, and run `trace`. The page
    crossval/README.md says which arrays, under which names, with a writer in C and recorders for PyTorch and llama.cpp.

    Exits with 1 when an opponent differs, or is missing and --require was given; with 4 when none could run.
    """


@crossval.command(short_help="A trace that your engine, or any other, recorded.")
@click.argument("model")
@click.argument("files", type=_FILE, nargs=-1, required=True)
@trace_options
@outputs
@common_options
def trace(model: str, files: tuple[Path, ...], no_causes: bool, budget: float, strict: bool, **options: Any) -> None:
    """Compare the trace FILES of some engine with MODEL on the reference: what is the first op that is wrong, and why?

    Several files, or a folder of them, are runs of one engine, of other lengths, in several calls, of several
    sequences. They get one verdict. The verdict comes first. Then the cause of a difference is looked for: the
    reference is run with one mistake after the other. Ctrl-C ends the search and shows what is known by then.

    The format of a trace, and how to write one from your engine, is in crossval/README.md. A trace of a training step
    (tensors named grad.*, master.*) is compared with the step that `bitnet-ref train` takes from MODEL, a folder of
    float masters.
    """
    from ..crossval.gradients import cross_gradients, is_training_trace
    from ..crossval.opponents import cross_traces, trace_files
    from ..crossval.trace import Trace
    from ..formats.open import find_model

    file, *further = trace_files(files)
    if further and options["receipt"] is not None:
        raise click.UsageError("--receipt is of one trace; give it one file")
    if not further and is_training_trace(file):
        if options["html_path"] is not None or options["receipt"] is not None:
            raise click.UsageError("--html and --receipt are of a trace of a run, and this is of a training step")
        verdict = cross_gradients(find_model(model), file)
        report(asdict(verdict), lambda out: out.print(verdict.sentence), 0 if verdict.agrees else DIFFERS)
        return
    with Trace(file) as opened:
        ids = opened.token_ids
    loaded = load_reference(model)
    crossing = cross_traces(loaded, [file, *further], strict=strict)
    if not wants_json():
        show(lambda out: draw([crossing], [], out, causes=False))
    if not no_causes:
        look_for_causes(crossing, loaded, crossing.wrong_file or file, budget)
    finish("trace", model, loaded, ids, [crossing], trace_file=file, draw_all=draw_causes, **options)


@crossval.command(short_help="Write a trace of the reference's own run.")
@_MODEL
@click.argument("file", type=_FileOrFolder())
@sentence_options
@runs_option("short into a file; all into a folder")
@click.option("--names", multiple=True, metavar="GLOB", help='Which tensors: "blocks.0.*"; may be repeated.')
@click.option("--backend", default="numpy", show_default=True, help="Which backend runs.")
@declared_option(ComputeOptions, "dtype", default="float32")
@common_options
def record(
    model: str,
    file: Path,
    text: str | list[int] | None,
    names: tuple[str, ...],
    runs: tuple[str, ...] | None,
    **options: Any,
) -> None:
    """Run MODEL and write its named tensors to the trace FILE.

    If FILE is a folder or ends in "/", or several --runs are asked for, each run is written to a file of its own in it:
    short, long, decode (token by token), pieces (calls of 3, 8, 1 tokens), batch (two sequences at once).
    """
    from ..crossval.runs import DEFAULT_RUNS, FEW_NAMES, check_runs, plan, record_run
    from ..crossval.trace import Trace

    loaded, ids = load_and_encode(model, text, **options)
    is_folder = file.is_dir() or len(runs or ()) > 1
    check_runs(loaded.config, ids, runs or ())
    plans = plan(loaded.config, ids, runs or (DEFAULT_RUNS if is_folder else ("short",)))
    if is_folder:
        file.mkdir(exist_ok=True)
    every = []
    for each in plans:
        path = file / f"{each.name}.safetensors" if is_folder else file
        few = FEW_NAMES if each.name == "long" else None
        record_run(loaded, each, path, names or few, text if isinstance(text, str) and each.name == "short" else None)
        with Trace(path) as written:
            count = len(written)
        facts = {"path": str(path), "tensors": count, "tokens": len(each.tokens), "bytes": path.stat().st_size}
        every.append(facts)
    line = "{path}: {tensors} tensors of {tokens} tokens, {bytes:,} bytes"
    printed = [line.format(**facts) for facts in every]
    report({"runs": every} if is_folder else every[0], lambda out: out.print("\n".join(printed)))


@crossval.command(short_help="Every backend and kernel set of this package.")
@_MODEL
@sentence_options
@click.option("--only", multiple=True, metavar="NAME", help='One opponent, such as "cython avx2"; may be repeated.')
@outputs
@common_options
def backends(model: str, text: str | list[int] | None, only: tuple[str, ...], **options: Any) -> None:
    """Run MODEL on every backend of this package and compare each op with the reference's.

    Each backend is fed the reference's inputs, op by op, and then runs by itself. Each check is shown when it is done.
    Without --prompt and --tokens a long run follows, of 520 tokens or as many as the context holds.
    """
    from ..crossval import cross_backends, long_tokens

    loaded, ids = load_and_encode(model, text)
    long = long_tokens(loaded.config) if text is None else None
    with CheckRows() as rows:
        crossings = cross_backends(loaded, ids, only or None, long=long, on_check=rows)
    finish("backends", model, loaded, ids, crossings, draw_all=draw_backends, **options)


def _register(name: str, summary: str) -> None:
    @crossval.command(name.replace("_", "-"), short_help=summary)
    @click.argument("model", default="storyteller")
    @sentence_options
    @click.option("--python", help="The interpreter that has the engine.  [default: this one]")
    @click.option("--only", multiple=True, metavar="NAME", help='One variant, such as "llama.cpp tq2_0".')
    @runs_option("all; without long for a text or tokens of yours")
    @outputs
    @common_options
    def command(
        model: str,
        text: str | list[int] | None,
        python: str | None,
        only: tuple[str, ...],
        runs: tuple[str, ...] | None,
        **options: Any,
    ) -> None:
        from ..crossval import cross_engine, long_tokens
        from ..crossval.runs import DEFAULT_RUNS, check_runs

        loaded, ids = load_and_encode(model, text)
        loaded.check_tokens(ids)
        check_runs(loaded.config, ids, runs or ())
        chosen = runs or tuple(each for each in DEFAULT_RUNS if text is None or each != "long")
        long = long_tokens(loaded.config) if "long" in chosen else None
        crossings = cross_engine(name, model, ids, python=python, only=only or None, long=long, runs=chosen)
        finish(name, model, loaded, ids, crossings, **options)

    command.help = (
        f"Run MODEL in {summary}\n\nThe engine records each op that it can, which is then compared with the "
        "reference's. It may be in another interpreter: --python. Where it differs by design, the report says "
        "so, and the reference computes the same way.\n\nFive runs are judged: the text in one call; 520 tokens, or as "
        "many as the context holds; the text token by token, and in pieces; two sequences at once. --runs chooses "
        "among them. A run that the engine cannot make is listed with the reason."
    )


for _name, _summary in _ENGINES.items():
    _register(_name, _summary)


@crossval.command("bitnet-cpp", short_help="A built bitnet.cpp, or any program with llama-cli's options.")
@click.argument("model")
@click.argument("binary")
@click.option("--prompt", help="The text to continue.  [default: a sentence]")
@click.option("--max-tokens", default=32, show_default=True, type=click.IntRange(1), help="How many tokens.")
@click.option("--prints", type=click.Choice(["text", "ids"]), default="text", show_default=True, help="What it prints.")
@click.option("--options", default="--no-display-prompt", show_default=True, help="More options for the program.")
@outputs
@common_options
def bitnet_cpp(
    model: str, binary: str, prompt: str | None, max_tokens: int, prints: str, options: str, **outputs: Any
) -> None:
    """Run BINARY -m MODEL -p PROMPT -n N --temp 0 and compare its greedy tokens with the reference's.

    A MODEL that is not a GGUF is first written as one, with I2_S matrices.
    """
    from ..crossval import cross_bitnet_cpp
    from ..crossval.opponents import PROMPT

    given: dict[str, Any] = {"count": max_tokens, "prints": prints, "options": shlex.split(options)}
    text = PROMPT if prompt is None else prompt
    loaded = load_reference(model)
    crossing = cross_bitnet_cpp(model, binary, prompt=text, **given)
    ids = [] if crossing.greedy is None else loaded.tokenizer.encode(text)
    finish("bitnet_cpp", model, loaded, ids, [crossing], **outputs)


@crossval.command(short_help="A BitLinear of any package, line by line.")
@click.argument("layer", metavar="MODULE:CLASS")
@click.option("--python", help="The interpreter that has the package.  [default: this one]")
@click.option("--args", default="", help='How it is built: "in_features, out_features, bias=bias, eps=1e-6".')
@common_options
def linear(layer: str, python: str | None, args: str) -> None:
    """Build the layer MODULE:CLASS or FILE.py:CLASS, of PyTorch or NumPy, and name the line of it that is wrong.

    The layer is probed from outside: one-hot tokens, values on a half, faint and huge tokens, tokens of zeros, a bias,
    gradients, eval() and train(), methods that store its weights, 16 bits. Each line of a BitLinear gets a verdict,
    with one value that is expected and the one that was found. A norm inside, and a floor below 1e-5, are choices.

    Exits with 1 when a line differs, with 4 when the layer cannot be built or run.
    """
    from ..crossval.linear import cross_linear

    verdict = cross_linear(layer, python=python, args=args)
    code = UNAVAILABLE if verdict.agrees is None else 0 if verdict.agrees else DIFFERS
    report(verdict.to_dict(), lambda out: _draw_linear(verdict, out), code)


PRECISION_HELP = "May be repeated; int8: --dense int8.  [default: float32, float16 and bfloat16]"


@crossval.command(short_help="What float16, bfloat16 or int8 weights on a backend cost.")
@_MODEL
@click.option("--backend", default="cupy", show_default=True, help="Which backend is measured.")
@click.option("--dtype", "dtypes", multiple=True, help=PRECISION_HELP)
@text_options("The text, or @FILE.  [default: a short story]")
@common_options
def precision(model: str, backend: str, dtypes: tuple[str, ...], text: str | list[int] | None) -> None:
    """Measure how much the logits of a text in a dtype of a backend differ from the float32 reference's.

    16 bits are not part of the contract: there is no verdict, and the exit code is 0.
    """
    from ..crossval import measure_precision
    from ..crossval.precision import DTYPES

    if isinstance(text, str):
        text = content_of(text)
    loaded = load_reference(model)
    with LoadingBar("measuring"):
        bench = measure_precision(loaded, backend, dtypes or DTYPES, text)
    report({"model": model, **asdict(bench)}, lambda out: _draw_precision(bench, out))


@crossval.command(short_help="Check a receipt by running its comparisons again.")
@click.argument("receipt", type=_FILE)
@click.option("--model", help="Where the model is now, if not where the receipt says.")
@click.option("--trace", help="Where the trace is now, if not where the receipt says.")
@click.option("--python", help="The interpreter that has the receipt's engine.  [default: this one]")
@click.option("--require", is_flag=True, help="Fail when something cannot be checked here.")
@common_options
def verify(receipt: Path, model: str | None, trace: str | None, python: str | None, require: bool) -> None:
    """Check the seal of RECEIPT, run its comparisons again, and compare the figures."""
    from ..crossval import verify_receipt

    verification = verify_receipt(receipt, model, trace, python)
    code = DIFFERS if not verification.holds or (require and verification.unchecked) else 0
    report(verification.to_dict(), lambda out: _draw_verification(verification, out), code)


@crossval.command(short_help="The table of who agrees with whom.")
@click.argument("models", nargs=-1, required=True)
@click.option("--engine", "engines", multiple=True, help='"backends", one backend, or an engine; may be repeated.')
@click.option("--python", "pythons", multiple=True, metavar="ENGINE=PATH", help="The interpreter that has the engine.")
@click.option(
    "--out",
    type=OutputFile(".md", ".html"),
    required=True,
    help="The table: .md or .html. Receipts are in a folder beside it.",
)
@worker_options
@common_options
def matrix(
    models: tuple[str, ...], engines: tuple[str, ...], pythons: tuple[str, ...], out: Path, **options: Any
) -> None:
    """Compare every one of MODELS on every engine. A run that was interrupted goes on where it ended.

    Exits with 1 when something differs, with 4 when nothing could run.
    """
    from ..crossval.matrix import BACKENDS, compute_matrix, write_matrix

    if bad := [each for each in pythons if "=" not in each]:
        raise click.UsageError(f"--python {bad[0]}: expected ENGINE=PATH")
    interpreters = {name.replace("-", "_"): path for name, path in (each.split("=", 1) for each in pythons)}
    chosen = [each.replace("-", "_") for each in engines] or [BACKENDS, *_ENGINES]
    folder = out.with_name(f"{out.stem}.receipts")
    with spread((dict,), *pop_workers(options), None) as workers:
        cells = compute_matrix(models, chosen, folder, interpreters, lambda line: click.echo(line, err=True), workers)
    write_matrix(out, cells)
    ran = [cell.agrees for cell in cells if cell.agrees is not None]
    facts = [{"model": c.model, "engine": c.engine, "agrees": c.agrees, "text": c.text} for c in cells]
    rows = [(cell.model, cell.engine, cell.text) for cell in cells]
    code = UNAVAILABLE if not ran else 0 if all(ran) else DIFFERS
    report({"cells": facts, "out": str(out)}, lambda o: o.print(make_table(("|model", "|engine", ""), rows)), code)


def load_reference(model: str, **options: Any) -> Model:
    return load_model({"model": model, "backend": "numpy", **options})


def load_and_encode(model: str, text: str | list[int] | None, **options: Any) -> tuple[Model, list[int]]:
    """The model, and the token ids of the text. options: of `load`."""
    from ..crossval import default_tokens

    loaded = load_reference(model, **options)
    return loaded, text if isinstance(text, list) else default_tokens(loaded, text)


def finish(
    kind: str,
    name: str,
    model: Model,
    tokens: list[int],
    crossings: list[Crossing],
    *,
    trace_file: Path | None = None,
    draw_all: Callable[[list[Crossing], list[str], Console], None] | None = None,
    html_path: Path | None,
    receipt: Path | None,
    require: bool,
) -> None:
    """Show the comparisons, write the report and the receipt, and exit with the verdict. draw_all: None is `draw`."""
    from ..crossval import make_receipt, write_html
    from ..crossval.receipt import write_receipt

    ran = [crossing.agrees for crossing in crossings if crossing.agrees is not None]
    missing = [crossing.opponent for crossing in crossings if crossing.agrees is None]
    agrees = bool(ran) and all(ran) and not (require and missing)
    if html_path is not None:
        header = {"model": f"{name}: {model.config.num_hidden_layers} layers of {model.config.hidden_size}"}
        header["tokens"] = f"{len(tokens)}: {tokens[:32]}{' ...' if len(tokens) > 32 else ''}"
        write_html(html_path, f"crossval: {name}", crossings, header)
    if receipt is not None:
        write_receipt(receipt, make_receipt(kind, name, model, tokens, crossings, trace_file))
    results = [crossing.to_dict() for crossing in crossings]
    facts = {"model": name, "tokens": tokens, "agrees": agrees, "missing": missing, "results": results}
    code = 0 if agrees else DIFFERS if ran or require else UNAVAILABLE
    report(facts, lambda out: (draw_all or draw)(crossings, missing if require else [], out), code)


def draw(crossings: list[Crossing], required: list[str], out: Console, causes: bool = True) -> None:
    """The verdicts, and the first wrong op of each opponent that differs."""
    rows = [(each.opponent, style_text(each.verdict, VERDICT_STYLES[each.agrees])) for each in crossings]
    out.print(make_table(("|", ""), rows))
    for crossing in crossings:
        is_named = crossing.strict or any(each.unknown for each in crossing.comparisons)
        for gap in crossing.gaps if is_named else crossing.misnamed_in_words:  # the verdict counts what is missing
            if gap not in crossing.verdict:
                out.print(style_text(f"{crossing.opponent}: {gap}", "yellow"))
        every = (*crossing.comparisons, *crossing.long)
        differing = [each for each in every if (bad := each.first_divergence) is not None and bad.n_values]
        if differing:  # where the runs as a whole differ says little beside the op that is wrong on its own inputs
            _draw_neighbourhood(crossing.opponent, differing[0], out)
    if causes:
        draw_causes(crossings, required, out)
    for name in required:
        out.print(style_text(f"{name} is required and not available", "red"))


def draw_backends(crossings: list[Crossing], required: list[str], out: Console) -> None:
    """As `draw`, below the rows that `CheckRows` has shown, and last a line that counts them."""
    from ..crossval.paths import sum_up

    out.print()
    draw(crossings, required, out)
    checks = [(crossing.opponent, check) for crossing in crossings for check in crossing.checks]
    agrees = bool(checks) and not required and all(check.passed for _, check in checks)
    draw_verdict(sum_up(checks), agrees, out)


def draw_causes(crossings: list[Crossing], required: list[str], out: Console) -> None:
    """The causes of the differences, each with one value computed by hand."""
    for crossing in crossings:
        lines = crossing.diagnosis()
        if lines:
            out.print()
        for line in lines:
            out.print(style_text(f"{crossing.opponent}: {line}"))
        for text in crossing.examples():
            out.print(style_text(f"\n{text}"))


def _draw_neighbourhood(opponent: str, comparison: Comparison, out: Console) -> None:
    bad = next(i for i, op in enumerate(comparison.ops) if op is comparison.first_divergence)
    rows = []
    for op in comparison.ops[max(0, bad - 3) : bad + 4]:
        status = style_text(op.status, {"ok": "green", "rounding flip": "yellow"}.get(op.status, "red"))
        figures = (f"{op.n_differ:,}", f"{op.max_abs:.2e}", f"{op.relative_l2:.1e}")
        rows.append((op.name, status, *figures, f"{op.cosine:.5f}", f"{op.scale_ratio:.5f}"))
    out.print(style_text(f"\n{opponent}, {comparison.mode}", "bold"))
    columns = ("tensor", "|status", ">|differ", ">|max abs", ">|rel. L2", ">|cosine", ">|scale")
    tables = [make_table(columns[:shown], [row[:shown] for row in rows]) for shown in (len(columns), 5)]
    # If neither fits, rows are stacked, and then there is room for all columns.
    out.print(next((table for table in tables if table.fits(out, out.width)), tables[0]))


def _draw_linear(verdict: LinearVerdict, out: Console) -> None:
    """The verdict; of a layer that differs the wrong lines, each with one value, and a row for each of the others."""
    styles = {"right": "green", "a choice": "yellow", "-": "dim"}
    out.print(style_text(verdict.sentence, VERDICT_STYLES[verdict.agrees]), soft_wrap=True)
    if verdict.agrees is not False:
        return
    out.print()
    for each in verdict.wrong:
        out.print(style_text(f"{each.status}: {each.line}: {each.text}", "red"))
        out.print(style_text(f"  {each.example}"))
    out.print()
    others = [each for each in verdict.lines if each not in verdict.wrong]
    rows = [(style_text(each.status, styles[each.status]), each.line, each.text) for each in others]
    out.print(make_table(("|", "|", ""), rows))


def _draw_precision(bench: PrecisionBench, out: Console) -> None:
    backend = bench.backend if bench.device is None else f"{bench.backend} ({bench.device})"
    out.print(f"{backend}, {bench.tokens} tokens, logits up to {bench.largest_logit:.1f}; against float32 on numpy")
    logits = "{dtype}|{way}|{max_logit_error:.1e}|{mean_logit_error:.1e}"
    cells = logits + "|{kl_mean:.1e}|{kl_max:.1e}|{greedy_agreement:.2%}|{same} of {continued}"
    rows = [
        cells.format(**vars(error), same=bench.same_tokens[error.dtype], continued=bench.continued).split("|")
        for error in bench.errors
    ]
    errors = (">max |d logit|", ">mean", ">mean KL", ">max KL", ">same greedy choice", ">continued alike")
    out.print(make_table(("|dtype", ">text as", *errors), rows))


def _draw_verification(verification: Verification, out: Console) -> None:
    out.print(style_text(verification.verdict, "green" if verification.holds else "red"))
    for title, lines in (("refuted", verification.refuted), ("not checked", verification.unchecked)):
        for line in lines:
            out.print(f"  {title}: {line}")


COMMANDS["watch"] = "watch_command:watch"
COMMANDS |= {name: f"crossval_outputs:{name}_command" for name in ("tokens", "openai", "sample")}
