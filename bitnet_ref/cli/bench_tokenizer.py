"""`bitnet-ref bench tokenizer`: draws what `bitnet_ref.benchmark` measures of the shipped tokenizer."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from .bench_shared import new_table, report
from .shell import common_options

if TYPE_CHECKING:
    from rich.console import Console

    from ..benchmark import TokenizerBench


@click.command(short_help="Encoding, decoding and streaming of the shipped tokenizer.")
@click.option("--texts", type=click.IntRange(min=1), default=256, show_default=True, help="How many texts.")
@click.option("--words", type=click.IntRange(min=1), default=60, show_default=True, help="Words in each.")
@click.option("--repeats", type=click.IntRange(min=1), default=5, show_default=True, help="Runs of each.")
@common_options
def tokenizer(texts: int, words: int, repeats: int) -> None:
    """Time the shipped tokenizer: tokens a second, one text at a time and batched."""
    from ..benchmark import measure_tokenizer

    found = measure_tokenizer(texts, words, repeats)
    report(found, lambda out: draw_tokenizer(found, out))


def draw_tokenizer(found: TokenizerBench, out: Console) -> None:
    out.print(f"{found.texts} texts, {found.tokens} tokens; loaded in {found.load_s * 1e3:.0f} ms")
    for name, equal in found.checks.items():
        if not equal:
            out.print(f"DIFFERS: {name.replace('_', ' ')}", style="bold red")
    table = new_table("", "tokens/s best", "median")
    for name, timing in found.timings.items():
        table.add_row(name, f"{found.tokens_per_s(name):,.0f}", f"{found.tokens / timing.median_s:,.0f}")
    if found.timings:
        out.print(table)
