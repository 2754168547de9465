"""`bitnet-ref bench cache`: draws what `bitnet_ref.benchmark` measures of narrow KV caches."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from ..backends import NAMES
from .bench_shared import new_table
from .generation_options import content_of
from .shell import LoadingBar, common_options, print_json, show, wants_json

if TYPE_CHECKING:
    from rich.console import Console

    from ..benchmark import CacheBench


@click.command(short_help="What a float16 or int8 KV cache changes, and its bytes.")
@click.argument("model", required=False)
@click.option("--text", help="A text, or @FILE.  [default: a short story]")
@click.option("--backend", type=click.Choice(("auto", *NAMES)), default="auto", show_default=True)
@click.option("--threads", type=click.IntRange(min=1), help="CPU threads.  [default: one a core]")
@common_options
def cache(model: str | None, text: str | None, backend: str, threads: int | None) -> None:
    """Measure each cache dtype on a text, against the float32 cache of the same MODEL (default: storyteller)."""
    from ..api import load
    from ..benchmark import measure_cache

    words = content_of(text)
    with LoadingBar("loading") as bar:
        subject = load(model or "storyteller", backend=backend, threads=threads, progress=bar)
    with LoadingBar("measuring"):
        found = measure_cache(subject, words)
    if wants_json():
        print_json({"model": model or "storyteller", **found.to_dict()})
    else:
        show(lambda out: draw_cache(found, out))


def draw_cache(found: CacheBench, out: Console) -> None:
    out.print(f"{found.tokens} tokens, {found.backend}; next-token logits against those with the float32 cache")
    table = new_table("cache", "bytes/token", "max |d logit|", "mean KL", "max KL", "same greedy choice")
    for error in found.errors:
        table.add_row(
            *(error.dtype, f"{error.bytes_per_token:,}", f"{error.max_logit_error:.1e}"),
            *(f"{error.kl_mean:.1e}", f"{error.kl_max:.1e}", f"{error.greedy_agreement:.2%}"),
        )
    out.print(table)
