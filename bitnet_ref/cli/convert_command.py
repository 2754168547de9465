"""`bitnet-ref convert`: from one file format to another, with proof."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..formats.checkpoint import LoadOptions
from ..system.options import LONGEST_S, Number
from .generation_options import INPUT_FILE, declared_option, layout_options, read_by, read_bytes
from .shell import (
    DIFFERS,
    LoadingBar,
    OutputPath,
    common_options,
    make_table,
    print_json,
    say_error,
    show,
    size_in_words,
    waiting,
    wants_json,
)

if TYPE_CHECKING:
    from rich.console import Console

    from ..formats.convert import Proof

# The names in conversion.TARGETS, which --help should not import; a test compares them.
TARGET_NAMES = (
    *("hf-packed", "hf-bf16", "hf-online", "hf-unpacked", "mlx-2bit", "mlx-1bit", "native", "native-base3", "onnx"),
    *("gguf-i2_s", "gguf-tq1_0", "gguf-tq2_0", "gguf-iq2_bn", "gguf-tl1", "gguf-tl2"),
    *("gguf-f16", "gguf-bf16", "gguf-f32", "gguf-q8_0"),
    *("gguf-q2_0", "gguf-pq2_0", "gguf-ptq1_0", "gguf-stq1_0", "gguf-q1_0"),
)


@click.command(short_help="Write a model in another format, and prove that it is the same.")
@click.argument("source")
@click.argument("destination", type=OutputPath(), required=False)
@click.option("--to", "target", type=click.Choice(TARGET_NAMES), help="The format to write.")
@click.option("--matrix", is_flag=True, help="Write nothing; show which formats hold SOURCE exactly, and why not.")
@click.option(
    "--split-size", callback=read_bytes, metavar="BYTES", help="Write further files beyond so many bytes each."
)
@click.option("--no-verify", is_flag=True, help="Do not read the result again and compare it.")
@click.option("--no-engine", is_flag=True, help="Do not run the result in the engine that it is meant for.")
@click.option("--python", help="The interpreter that has the engine.  [default: this one]")
@click.option(
    "--engine-timeout-s",
    type=float,
    callback=read_by(Number(1, LONGEST_S)),
    default=600.0,
    show_default=True,
    metavar="SECONDS",
    help="Give up on the engine after so long.",
)
@click.option("--force", "overwrite", is_flag=True, help="Replace a file that is there. (A folder is never replaced.)")
@layout_options
@declared_option(LoadOptions, "adapter", help="A LoRA adapter to merge into dense matrices, or none.")
@click.option("--to-tl-tiles", type=INPUT_FILE, help="The kernel_config.ini to write TL1 or TL2 for.")
@common_options
def convert(
    source: str,
    destination: Path | None,
    target: str | None,
    matrix: bool,
    split_size: int | None,
    no_verify: bool,
    no_engine: bool,
    python: str | None,
    engine_timeout_s: float,
    overwrite: bool,
    to_tl_tiles: Path | None,
    **layout: Any,
) -> None:
    """Write the model SOURCE (a path, or the name of a shipped model) to DESTINATION in another format.

    The new file is read again and compared with the source: every ternary plane bit for bit, every scale, every other
    tensor, the tokenizer, and the logits of a few tokens. DESTINATION does not exist before that.

    Then the engine that the format is meant for runs it, where it is installed: transformers, llama.cpp
    (llama-cpp-python), mlx-lm or onnxruntime. If that fails or gives other logits, a warning says so: the file stays,
    as it holds the model, and the exit code is 1.

    hf-bf16 keeps masters. Of a model without masters it holds -1, 0, +1 beside a weight_scale: no masters, though all
    is bfloat16. hf-online makes masters, bfloat16 values that quantise to the same planes and whose mean|W| is the
    scale to 1e-7, for engines that quantise when they load.

    --split-size 2G writes files of at most 2,000,000,000 bytes into the folder DESTINATION: shards with their index, or
    parts as llama.cpp's gguf-split names them, of which any loads the whole.

    --matrix SOURCE shows for each format whether it holds this model exactly, and who runs it. Each is written into a
    temporary folder, read again, compared and deleted.
    """
    from ..formats.checkpoint import Progress

    if matrix:
        if destination is not None or target is not None or split_size is not None:
            raise click.UsageError("--matrix takes SOURCE alone")
        draw_fits(source, LoadOptions(**layout), to_tl_tiles)
        return
    if destination is None or target is None:
        raise click.UsageError("give DESTINATION and --to FORMAT, or --matrix")
    from ..formats.convert import convert as convert_model
    from ..formats.convert import remark_on

    with ExitStack() as bars:

        def phase(name: str) -> Progress:
            bars.close()
            return bars.enter_context(LoadingBar(name))

        options: dict[str, Any] = {"options": LoadOptions(**layout), "verify": not no_verify, "overwrite": overwrite}
        options |= {"tl_tiles": to_tl_tiles, "split_size": split_size}
        proof = convert_model(source, destination, target, phase=phase, **options)
    files = sorted(destination.rglob("*")) if destination.is_dir() else [destination]
    nbytes = sum(file.stat().st_size for file in files)
    remark = remark_on(destination, target)
    in_engine = None
    if proof is not None and not no_engine:
        from ..crossval import run_written

        with waiting("running it in the engine that it is meant for"):
            in_engine = run_written(destination, target, python=python, timeout_s=engine_timeout_s)
    if wants_json():
        facts: dict[str, Any] = {"path": str(destination), "to": target, "bytes": nbytes, "remark": remark}
        facts["proof"] = None if proof is None else proof.to_dict()
        print_json(facts | {"engine": None if in_engine is None else in_engine._asdict()})
    else:
        click.echo(f"{destination}: {target}, {size_in_words(nbytes)}")
        if proof is None:
            click.echo("not verified, as asked")
        else:
            show(lambda out: draw(proof, out))
        if in_engine is not None and not in_engine.is_wrong:
            longer = "; --engine-timeout-s gives it longer" * (in_engine.status == "not finished")
            sentence = in_engine.sentence + longer
            show(lambda out: out.print(sentence))
        if remark is not None:
            click.echo(remark)
    if in_engine is not None and in_engine.is_wrong:
        say_error(in_engine.sentence, "Warning")
        raise click.exceptions.Exit(DIFFERS)


def draw_fits(source: str, options: LoadOptions, tl_tiles: Path | None) -> None:
    from ..formats.convert import fits

    with LoadingBar("converting") as bar:
        rows = list(fits(source, options=options, tl_tiles=tl_tiles, progress=bar))
    words = [("no" if row.proof is None else "exact" if row.proof.exact else "rounded") for row in rows]
    if wants_json():
        names = ("target", "bytes", "reason", "engine")
        facts = [dict(zip(names, (r.target, r.nbytes, r.reason, r.engine), strict=True)) for r in rows]
        print_json([each | {"holds": holds} for each, holds in zip(facts, words, strict=True)])
        return
    sizes = ["" if row.nbytes is None else size_in_words(row.nbytes) for row in rows]
    cells = [
        (r.target, h, n, r.reason.partition("; ")[0], r.engine) for r, h, n in zip(rows, words, sizes, strict=True)
    ]
    show(lambda out: out.print(make_table(("|format", "|holds it", ">|size", "why", "|runs in"), cells)))


def draw(proof: Proof, out: Console) -> None:
    rows = []
    for name, tally in (("ternary planes", proof.planes), ("scales", proof.scales), ("other tensors", proof.tensors)):
        rounded = f", the others rounded by at most {tally.largest:.1e}" if tally.equal < tally.total else ""
        rows.append((name, f"{tally.equal} of {tally.total} equal{rounded}"))
    rows.append(("tokenizer", proof.tokenizer))
    logits = "equal bit for bit" if proof.logits_equal else f"differ by at most {proof.logits_difference:.1e}"
    rows.append((f"logits of {proof.tokens} tokens", logits))
    out.print(make_table(("", ""), rows))
    out.print(f"proven: {proof.verdict}")
