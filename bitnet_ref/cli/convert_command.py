"""`bitnet-ref convert`: from one file format to another, with proof."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from .shell import LoadingBar, common_options, print_json, show, size_in_words, wants_json

if TYPE_CHECKING:
    from rich.console import Console

    from ..formats.convert import Proof

# Of conversion.TARGETS, which --help should not import; a test holds the two equal.
TARGET_NAMES = (
    *("hf-packed", "hf-bf16", "native", "native-base3", "onnx"),
    *("gguf-i2_s", "gguf-tq1_0", "gguf-tq2_0", "gguf-tl1", "gguf-tl2"),
    *("gguf-f16", "gguf-bf16", "gguf-f32", "gguf-q8_0"),
)
INI = click.Path(path_type=Path, exists=True, dir_okay=False)


@click.command(short_help="Write a model in another format, and prove that it is the same.")
@click.argument("source")
@click.argument("destination", type=click.Path(path_type=Path))
@click.option("--to", "target", required=True, type=click.Choice(TARGET_NAMES), help="The format to write.")
@click.option("--no-verify", is_flag=True, help="Do not read the result again and compare it.")
@click.option("--force", is_flag=True, help="Replace a file that is there. (A folder is never replaced.)")
@click.option(
    "--i2s-layout", type=click.Choice(["x86", "arm", "interleaved"]), help="How the I2_S tensors of SOURCE lie."
)
@click.option("--tl-tiles", type=INI, help="The kernel_config.ini of SOURCE's TL1 or TL2 tensors.")
@click.option("--to-tl-tiles", type=INI, help="The kernel_config.ini to write TL1 or TL2 for.")
@common_options
def convert(
    source: str,
    destination: Path,
    target: str,
    no_verify: bool,
    force: bool,
    i2s_layout: str | None,
    tl_tiles: Path | None,
    to_tl_tiles: Path | None,
) -> None:
    """Write the model SOURCE (a path, or the name of a shipped model) to DESTINATION in another format.

    What was written is read again and compared with the source: every ternary plane bit for bit, every scale, every
    other tensor, the tokenizer, and the logits of a few tokens. Nothing is at DESTINATION before that.
    """
    from ..formats.checkpoint import Progress, ReadOptions
    from ..formats.convert import convert as convert_model

    bars: list[LoadingBar] = []

    def phase(what: str) -> Progress:
        close()
        bars.append(LoadingBar(what))
        return bars[-1]

    def close() -> None:
        if bars:
            bars.pop().__exit__()

    options = ReadOptions(i2_s_layout=i2s_layout, tl_tiles=tl_tiles)
    try:
        proof = convert_model(
            source,
            destination,
            target,
            options=options,
            tl_tiles=to_tl_tiles,
            verify=not no_verify,
            overwrite=force,
            phase=phase,
        )
    finally:
        close()
    files = sorted(destination.rglob("*")) if destination.is_dir() else [destination]
    nbytes = sum(file.stat().st_size for file in files)
    if wants_json():
        found = None if proof is None else proof.to_dict()
        print_json({"path": str(destination), "to": target, "bytes": nbytes, "proof": found})
        return
    click.echo(f"{destination}: {target}, {size_in_words(nbytes)}")
    if proof is None:
        click.echo("not verified, as asked")
    else:
        show(lambda out: draw(proof, out))


def draw(proof: Proof, out: Console) -> None:
    """The proof as a table and a line."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, show_header=False)
    tallies = {"ternary planes": proof.planes, "scales": proof.scales, "other tensors": proof.tensors}
    for name, tally in tallies.items():
        rounded = f", the others rounded by {tally.largest:.1e} at most" if tally.equal < tally.total else ""
        table.add_row(name, f"{tally.equal} of {tally.total} equal{rounded}")
    table.add_row("tokenizer", proof.tokenizer)
    logits = "equal bit for bit" if proof.logits_equal else f"differ by at most {proof.logits_difference:.1e}"
    table.add_row(f"logits of {proof.tokens} tokens", logits)
    out.print(table)
    out.print(f"proven: {proof.verdict}")
