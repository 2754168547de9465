"""`bitnet-ref inspect`: draws what `bitnet_ref.inspection` finds."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..errors import count_of, printable
from .generation_options import layout_options
from .shell import BAD_FILE, LoadingBar, common_options, make_table, report, size_in_words, style_text

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from ..inspection import Inspection, StoredTensor, TernaryMatrix, TokenizerFacts
    from ..reference.config import ModelConfig

SEVERITY_STYLES = {"error": "bold red", "warning": "bold yellow", "note": "bold cyan"}


@click.command(short_help="Say what a model folder or file is, and what is odd about it.")
@click.argument("path")
@click.option("--tensor", metavar="NAME", help="Show one tensor: by our name (blocks.0.attn.q_proj) or the file's.")
@layout_options
@common_options
def inspect(path: str, tensor: str | None, **layout: Any) -> None:
    """Say what PATH is and what is odd about it: a folder, or a .gguf, .safetensors, .bitnet.safetensors or .onnx file.
    (Also the name of a shipped model.)

    Exits with 3 when something in it cannot be loaded; the rest is shown all the same.
    """
    from ..formats.checkpoint import LoadOptions
    from ..inspection import inspect_model, show_tensor

    options = LoadOptions(**layout)
    if tensor is not None:
        view = show_tensor(path, tensor, options)
        report(
            view.statistics(), lambda out: out.print(style_text(view.text(out.width, is_unicode(out))), soft_wrap=True)
        )
        return
    with LoadingBar("reading layers") as bar:
        inspection = inspect_model(path, progress=bar, options=options)
    report(inspection.to_dict(), lambda out: draw(inspection, out), BAD_FILE if inspection.errors else 0)


def draw(inspection: Inspection, out: Console) -> None:
    out.print(style_text(inspection.path, "bold"), soft_wrap=True)
    if inspection.header_only:
        tensors = count_of(len(inspection.tensors), "tensor")
        out.print(f"A .safetensors file without a config.json beside it: {tensors}.\n")
        for name, value in inspection.metadata.items():
            out.print(printable(f"{name}: {value}", keep=""), overflow="ellipsis", no_wrap=True)
        if inspection.metadata:
            out.print()
        draw_tensors(inspection, out)
        draw_sizes(inspection, out)
        return
    sizes = [f"{number_in_words(inspection.parameters)} parameters"] if inspection.parameters else []
    sizes += [size_in_words(inspection.nbytes)] if inspection.nbytes else []
    out.print(f"{headline(inspection)}\n{', '.join(sizes)}".rstrip() + "\n")
    draw_facts(inspection, out)
    draw_sizes(inspection, out)
    draw_ternary(inspection, out)
    if inspection.config is None and inspection.tensors:
        draw_tensors(inspection, out)
    draw_findings(inspection, out)


def headline(inspection: Inspection) -> str:
    if inspection.family is not None:
        return inspection.family
    if inspection.is_cut_off:
        return "A model of which a part is missing: a file is cut off"
    return "A model that cannot be told from its configuration" if inspection.tensors else "No model that can be read"


def draw_facts(inspection: Inspection, out: Console) -> None:
    rows: list[tuple[str, str]] = []
    if inspection.format is not None:
        named = f", architecture {inspection.architecture}" if inspection.is_gguf and inspection.architecture else ""
        rows.append(("format", inspection.format + named))
    rows += [("evidence" if number == 0 else "", words) for number, words in enumerate(inspection.evidence)]
    if inspection.config is not None:
        rows += config_rows(inspection, inspection.config)
    if inspection.tokenizer is not None:
        rows += tokenizer_rows(inspection.tokenizer, inspection.config)
    if rows:
        out.print(make_table(("|", ""), rows, style="cyan"))
        out.print()


def config_rows(inspection: Inspection, cfg: ModelConfig) -> list[tuple[str, str]]:
    from ..inspection.facts import context_in_words, positions_in_words, shape_in_words

    stops = ", ".join(map(str, inspection.stop_token_ids)) or "none"
    return [
        ("model type", cfg.model_type),
        ("shape", shape_in_words(cfg)),
        ("quantisation", inspection.quantization),
        ("scales", inspection.scale_convention),
        ("activation", inspection.activation),
        ("norms", f"RMSNorm, eps {cfg.norm_eps:g}" + (", and sub-norms before o_proj and down_proj" * cfg.sub_norms)),
        ("position", positions_in_words(cfg)),
        ("context", context_in_words(cfg)),
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
        ("sampling", describe_defaults(facts.sampling)),
    ]


def describe_defaults(sampling: dict[str, Any]) -> str:
    """What the model recommends, in words; of texts and tokens only how many."""
    if not sampling:
        return "recommends nothing"
    named = {name.replace("_", "-"): value for name, value in sampling.items()}
    words = ", ".join(
        f"{name} {value:g}" if isinstance(value, int | float) else f"{len(value)} {name}"
        for name, value in named.items()
    )
    return f"recommends {'greedy decoding: ' * (sampling.get('temperature') == 0)}{words}"


def draw_sizes(inspection: Inspection, out: Console) -> None:
    if not inspection.sizes:
        return
    ink, width = "█" if is_unicode(out) else "#", bar_width(out)
    rows = [
        (
            *(size.kind, str(size.tensors), size.type_words, size_in_words(size.nbytes), f"{size.share:.1%}"),
            ink * round(width * size.share),
        )
        for size in inspection.sizes
    ]
    out.print(make_table(("", ">tensors", "type", ">size", ">share", ""), rows, title="Where the bytes are"))
    out.print()


def draw_ternary(inspection: Inspection, out: Console) -> None:
    """The shares of -1, 0 and +1 by kind of linear, and by layer."""
    if not inspection.ternary:
        return
    for by, columns in (("kind", ("kind", "shape")), ("layer", (">layer",))):
        rows: list[list[Any]] = []
        for key, shares in inspection.ternary_shares(by).items():
            group = [matrix for matrix in inspection.ternary if getattr(matrix, by) == key]
            (rows_count, width), *others = sorted({matrix.shape for matrix in group})
            shape = [f"{rows_count} x {width}{' ...' if others else ''}"] if by == "kind" else []
            bar = share_bar(shares, bar_width(out), is_unicode(out))
            rows.append([str(key), *shape, *(f"{share:.1%}" for share in shares), bar, scale_range(group)])
        columns = (*columns, ">-1", ">0", ">+1", "", "|scale")
        out.print(make_table(columns, rows, title=f"Ternary weights by {by}"))
        out.print()


def share_bar(shares: tuple[float, float, float], width: int, unicode: bool) -> Text:
    """-1, 0 and +1 as one bar of three characters, which differ without colour too."""
    minus, plus = round(width * shares[0]), round(width * shares[2])
    inks = "▓░█" if unicode else "-.+"
    bar = style_text("")
    for ink, count, style in zip(inks, (minus, width - minus - plus, plus), ("blue", "dim", "red"), strict=True):
        bar.append(ink * count, style=style)
    return bar


def scale_range(group: list[TernaryMatrix]) -> str:
    scales = [matrix.w_dequant_scale for matrix in group if matrix.w_dequant_scale is not None]
    if not scales:
        return "unknown"
    low, high = f"{min(scales):.3g}", f"{max(scales):.3g}"
    return low if low == high else f"{low} to {high}"


def draw_tensors(inspection: Inspection, out: Console) -> None:
    """One line for tensors that differ in their layer's number alone."""
    alike: dict[tuple[str, str, str], list[StoredTensor]] = {}
    for tensor in inspection.tensors:
        shape = " x ".join(map(str, tensor.shape)) or "scalar"
        name = re.sub(r"\.[0-9]+\.", ".*.", tensor.name, count=1)
        alike.setdefault((name, tensor.dtype, shape), []).append(tensor)
    rows = [
        (group[0].name if len(group) == 1 else name, str(len(group)), dtype, shape, size_in_words(group[0].nbytes))
        for (name, dtype, shape), group in alike.items()
    ]
    out.print(make_table(("name", ">tensors", "dtype", "shape", ">size of each"), rows, title="Tensors"))
    out.print()


def draw_findings(inspection: Inspection, out: Console) -> None:
    """Errors, warnings and notes: one line for each fault, however many tensors share it."""
    if not inspection.findings:
        out.print(style_text("Nothing odd about it.", "green"))
        return
    rows = []
    for first, *others in inspection.finding_groups():
        severity = style_text(f"{first.severity}:", SEVERITY_STYLES[first.severity])
        place = [Path(first.path).name] if first.path else []
        place += [f"byte {first.offset}"] if first.offset is not None else []
        place += [printable(first.field, keep="")] if first.field else []
        if others:
            is_same = all(other.message == first.message for other in others)
            message = style_text(f"{len(others) + 1} tensors", "bold")
            message.append(f": {first.message}{', first' if is_same else ' in'} {', '.join(place)}", style="not bold")
        else:
            message = style_text(", ".join(place if first.path else [first.part, *place]), "bold")
            message.append(f": {first.message}", style="not bold")
        rows.append((severity, message))
    out.print(make_table(("|", ""), rows))


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
