"""`bitnet-ref inspect`: draws what `bitnet_ref.inspection` finds."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .shell import BAD_FILE, LoadingBar, common_options, print_json, show, size_in_words, wants_json

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from ..inspection import Inspection, TensorView, TernaryMatrix, TokenizerFacts
    from ..reference.config import ModelConfig

SEVERITY_STYLES = {"error": "bold red", "warning": "bold yellow", "note": "bold cyan"}


@click.command(short_help="Say what a model folder or file is, and what is odd about it.")
@click.argument("path")
@click.option(
    "--tensor", metavar="NAME", help="Show this one tensor: by our name (blocks.0.attn.q_proj) or the file's."
)
@click.option(
    "--i2s-layout", type=click.Choice(["x86", "arm", "interleaved"]), help="How the I2_S tensors of a GGUF lie."
)
@click.option(
    "--tl-tiles",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="The kernel_config.ini of a GGUF's TL1 or TL2 tensors.",
)
@common_options
def inspect(path: str, tensor: str | None, i2s_layout: str | None, tl_tiles: Path | None) -> None:
    """Say what PATH is and what is odd about it: a folder, or a .gguf, .safetensors, .bitnet.safetensors or .onnx file.
    (Also the name of a shipped model.)

    Exits with 3 when something in it cannot be loaded; the rest is shown all the same.
    """
    from ..formats.checkpoint import ReadOptions
    from ..inspection import inspect_model, show_tensor

    options = ReadOptions(i2_s_layout=i2s_layout, tl_tiles=tl_tiles)
    if tensor is not None:
        view = show_tensor(path, tensor, options)
        if wants_json():
            print_json(view.statistics())
        else:
            show(lambda out: draw_view(view, out))
        return
    with LoadingBar("reading layers") as bar:
        found = inspect_model(path, progress=bar, options=options)
    if wants_json():
        print_json(found.to_dict())
    else:
        show(lambda out: draw(found, out))
    if found.errors:
        raise click.exceptions.Exit(BAD_FILE)


def draw_view(view: TensorView, out: Console) -> None:
    from rich.text import Text

    out.print(Text(view.text(out.width, is_unicode(out))), soft_wrap=True)


def draw(found: Inspection, out: Console) -> None:
    """The whole report, top to bottom."""
    from rich.text import Text

    out.print(Text(found.path, style="bold"), soft_wrap=True)
    if found.header_only:
        out.print(f"A .safetensors file without a config.json beside it: {len(found.tensors)} tensors.\n")
        draw_metadata(found, out)
        draw_tensors(found, out)
        draw_sizes(found, out)
        return
    headline = [found.family or "A model that cannot be told from its configuration"]
    if found.parameters:
        headline.append(f"{number_in_words(found.parameters)} parameters")
    if found.nbytes:
        headline.append(size_in_words(found.nbytes))
    out.print("\n".join((headline[0], ", ".join(headline[1:]))).rstrip() + "\n")
    draw_facts(found, out)
    draw_sizes(found, out)
    draw_ternary(found, out)
    if found.config is None and found.tensors:
        draw_tensors(found, out)
    draw_findings(found, out)


def draw_facts(found: Inspection, out: Console) -> None:
    rows: list[tuple[str, str]] = []
    if found.format is not None:
        named = f", architecture {found.architecture}" if found.format.startswith("GGUF") and found.architecture else ""
        rows.append(("format", found.format + named))
    rows += [("evidence" if number == 0 else "", words) for number, words in enumerate(found.evidence)]
    if found.config is not None:
        rows += config_rows(found, found.config)
    if found.tokenizer is not None:
        rows += tokenizer_rows(found.tokenizer, found.config)
    if not rows:
        return
    table = plain_table()
    table.add_column(style="cyan", no_wrap=True)
    table.add_column()
    for name, value in rows:
        table.add_row(name, value)
    out.print(table)
    out.print()


def config_rows(found: Inspection, cfg: ModelConfig) -> list[tuple[str, str]]:
    from ..inspection import shape_in_words

    rope, window = cfg.rope, cfg.sliding_window
    stretch = "" if rope.rope_type == "default" else f" {rope.rope_type}, factor {rope.factor:g},"
    stops = ", ".join(map(str, found.stop_token_ids)) or "none"
    return [
        ("model type", cfg.model_type),
        ("shape", shape_in_words(cfg)),
        ("quantisation", found.quantization),
        ("scales", found.scale_convention),
        ("activation", found.activation),
        ("norms", f"RMSNorm, eps {cfg.norm_eps:g}" + (", and sub-norms before o_proj and down_proj" * cfg.sub_norms)),
        ("position", f"RoPE{stretch} theta {rope.theta:g}"),
        ("context", f"{cfg.context_length} tokens" + (f", each sees the last {window}" if window else "")),
        ("head", "tied to the embedding" if cfg.tie_word_embeddings else "its own matrix"),
        ("tokens", f"BOS {'none' if cfg.bos_token_id is None else cfg.bos_token_id}, generation stops on {stops}"),
        ("vocabulary", f"{cfg.vocab_size} rows in the embedding"),
    ]


def tokenizer_rows(facts: TokenizerFacts, cfg: ModelConfig | None) -> list[tuple[str, str]]:
    same = cfg is not None and cfg.vocab_size == facts.vocab_size
    bos = "no BOS" if facts.bos_id is None else f"BOS {facts.bos_token} ({facts.bos_id})"
    if facts.bos_id is not None:
        bos += " put before a text" if facts.adds_bos else " not put before a text"
    ends = ", ".join(f"{token} ({i})" for token, i in zip(facts.eos_tokens, facts.eos_ids, strict=True))
    return [
        ("tokenizer", f"{facts.kind}, {facts.vocab_size} tokens{' too' if same else ''}"),
        ("", f"{bos}; ends with {ends or 'nothing'}"),
        ("chat template", facts.template_style or "none: a base model, for generate"),
    ]


def draw_sizes(found: Inspection, out: Console) -> None:
    if not found.sizes:
        return
    table = plain_table("Where the bytes are")
    for name in ("", "tensors", "size", "share"):
        table.add_column(name, justify="right" if name else "left", header_style="dim")
    table.add_column("")
    ink = "█" if is_unicode(out) else "#"
    for row in found.sizes:
        size, share = size_in_words(row.nbytes), f"{row.share:.1%}"
        table.add_row(row.kind, str(row.tensors), size, share, ink * round(bar_width(out) * row.share))
    out.print(table)
    out.print()


def draw_ternary(found: Inspection, out: Console) -> None:
    """Two tables: by kind of linear, and by layer."""
    if not found.ternary:
        return
    for by, title in (("kind", "Ternary weights by kind"), ("layer", "Ternary weights by layer")):
        table = plain_table(title)
        for name in (by, "shape", "-1", "0", "+1") if by == "kind" else (by, "-1", "0", "+1"):
            table.add_column(name, justify="left" if name in ("kind", "shape") else "right", header_style="dim")
        table.add_column("")
        table.add_column("scale", header_style="dim", no_wrap=True)
        for key, shares in found.ternary_shares(by).items():
            group = [matrix for matrix in found.ternary if getattr(matrix, by) == key]
            cells: list[Any] = [str(key)]
            if by == "kind":
                shapes = sorted({matrix.shape for matrix in group})
                cells.append(f"{shapes[0][0]} x {shapes[0][1]}" + (" ..." if len(shapes) > 1 else ""))
            cells += [f"{share:.1%}" for share in shares]
            table.add_row(*cells, share_bar(shares, bar_width(out), is_unicode(out)), scale_range(group))
        out.print(table)
        out.print()


def share_bar(shares: tuple[float, float, float], width: int, unicode: bool) -> Text:
    """-1, 0 and +1 as one bar of three inks, which differ without colour too."""
    from rich.text import Text

    first, last = round(width * shares[0]), round(width * shares[2])
    inks = ("▓", "░", "█") if unicode else ("-", ".", "+")
    bar = Text()
    for ink, count, style in zip(
        inks, (first, max(0, width - first - last), last), ("blue", "dim", "red"), strict=True
    ):
        bar.append(ink * count, style=style)
    return bar


def scale_range(group: list[TernaryMatrix]) -> str:
    """The smallest and the largest scale that a weight of the group is multiplied by."""
    scales = [matrix.w_dequant_scale for matrix in group if matrix.w_dequant_scale is not None]
    if not scales:
        return "unknown"
    low, high = f"{min(scales):.3g}", f"{max(scales):.3g}"
    return low if low == high else f"{low} to {high}"


def draw_tensors(found: Inspection, out: Console) -> None:
    table = plain_table("Tensors")
    for name in ("name", "dtype", "shape", "size"):
        table.add_column(name, justify="right" if name == "size" else "left", header_style="dim", overflow="fold")
    for tensor in found.tensors:
        shape = " x ".join(map(str, tensor.shape)) or "scalar"
        table.add_row(tensor.name, tensor.dtype, shape, size_in_words(tensor.nbytes))
    out.print(table)
    out.print()


def draw_metadata(found: Inspection, out: Console) -> None:
    for name, value in found.metadata.items():
        out.print(f"{name}: {value}", overflow="ellipsis", no_wrap=True)
    if found.metadata:
        out.print()


def draw_findings(found: Inspection, out: Console) -> None:
    """Errors, warnings and notes, each with its place."""
    from rich.table import Table
    from rich.text import Text

    if not found.findings:
        out.print(Text("Nothing odd about it.", style="green"))
        return
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for finding in found.findings:
        place = [Path(finding.path).name] if finding.path else [finding.part]
        place += [f"byte {finding.offset}"] if finding.offset is not None else []
        place += [finding.field] if finding.field else []
        message = Text.assemble((", ".join(place), "bold"), ": ", finding.message)
        table.add_row(Text(f"{finding.severity}:", style=SEVERITY_STYLES[finding.severity]), message)
    out.print(table)


def plain_table(title: str | None = None) -> Table:
    from rich.table import Table

    return Table(
        title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, padding=(0, 2, 0, 0),
        show_header=title is not None,
    )  # fmt: skip


def bar_width(out: Console) -> int:
    return 24 if out.width >= 90 else 16


def is_unicode(out: Console) -> bool:
    return not out.options.ascii_only


def number_in_words(count: int) -> str:
    """2412820480 -> "2.41 billion (2,412,820,480)" """
    for unit, size in (("billion", 1e9), ("million", 1e6)):
        if count >= size:
            return f"{count / size:.3g} {unit} ({count:,})"
    return f"{count:,}"
