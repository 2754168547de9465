"""`bitnet-ref convert`: from one file format to another, with proof."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..formats.checkpoint import LoadOptions
from .generation_options import INPUT_FILE, declared_option, layout_options
from .shell import LoadingBar, OutputPath, common_options, make_table, print_json, show, size_in_words, wants_json

if TYPE_CHECKING:
    from rich.console import Console

    from ..formats.convert import Proof

# The names in conversion.TARGETS, which --help should not import; a test compares them.
TARGET_NAMES = (
    *("hf-packed", "hf-bf16", "hf-online", "hf-unpacked", "native", "native-base3", "onnx"),
    *("gguf-i2_s", "gguf-tq1_0", "gguf-tq2_0", "gguf-tl1", "gguf-tl2"),
    *("gguf-f16", "gguf-bf16", "gguf-f32", "gguf-q8_0", "gguf-q2_0", "gguf-pq2_0", "gguf-ptq1_0"),
)


@click.command(short_help="Write a model in another format, and prove that it is the same.")
@click.argument("source")
@click.argument("destination", type=OutputPath())
@click.option("--to", "target", required=True, type=click.Choice(TARGET_NAMES), help="The format to write.")
@click.option("--no-verify", is_flag=True, help="Do not read the result again and compare it.")
@click.option("--force", is_flag=True, help="Replace a file that is there. (A folder is never replaced.)")
@layout_options
@declared_option(LoadOptions, "adapter", help="A LoRA adapter to merge into dense matrices, or none.")
@click.option("--to-tl-tiles", type=INPUT_FILE, help="The kernel_config.ini to write TL1 or TL2 for.")
@common_options
def convert(
    source: str, destination: Path, target: str, no_verify: bool, force: bool, to_tl_tiles: Path | None, **layout: Any
) -> None:
    """Write the model SOURCE (a path, or the name of a shipped model) to DESTINATION in another format.

    The new file is read again and compared with the source: every ternary plane bit for bit, every scale, every other
    tensor, the tokenizer, and the logits of a few tokens. DESTINATION does not exist before that.

    hf-bf16 keeps masters. Of a model without masters it holds -1, 0, +1 beside a weight_scale: no masters, though all
    is bfloat16. hf-online makes masters, bfloat16 values that quantise to the same planes and whose mean|W| is the
    scale to 1e-7, for engines that quantise when they load.
    """
    from ..formats.checkpoint import Progress
    from ..formats.convert import convert as convert_model
    from ..formats.convert import remark_on

    with ExitStack() as bars:

        def phase(name: str) -> Progress:
            bars.close()
            return bars.enter_context(LoadingBar(name))

        options: dict[str, Any] = {"options": LoadOptions(**layout), "verify": not no_verify, "overwrite": force}
        proof = convert_model(source, destination, target, tl_tiles=to_tl_tiles, phase=phase, **options)
    files = sorted(destination.rglob("*")) if destination.is_dir() else [destination]
    nbytes = sum(file.stat().st_size for file in files)
    remark = remark_on(destination, target)
    if wants_json():
        facts = None if proof is None else proof.to_dict()
        print_json({"path": str(destination), "to": target, "bytes": nbytes, "remark": remark, "proof": facts})
        return
    click.echo(f"{destination}: {target}, {size_in_words(nbytes)}")
    if proof is None:
        click.echo("not verified, as asked")
    else:
        show(lambda out: draw(proof, out))
    if remark is not None:
        click.echo(remark)


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
