"""`bitnet-ref list` and `bitnet-ref rm`: what is in the local store."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from .shell import common_options, make_table, print_json, show, size_in_words, wants_json

if TYPE_CHECKING:
    from rich.console import Console

    from ..formats.registry.store import Entry


@click.command("list", short_help="The models here: shipped and pulled.")
@common_options
def list_models() -> None:
    """The models that can be loaded by name: those shipped, and every version that was pulled."""
    from ..formats.open import shipped_models
    from ..formats.registry.store import Store

    store = Store()
    entries = store.entries()
    if wants_json():
        models = [asdict(e) | {"bytes": e.nbytes, "path": str(store.path(e))} for e in entries]
        print_json({"store": str(store.root), "shipped": shipped_models(), "models": models})
        return
    show(lambda out: draw(entries, shipped_models(), out))


def draw(entries: list[Entry], shipped: list[str], out: Console) -> None:
    rows: list[tuple[str, ...]] = [(name, "", "", "", "", "shipped", "") for name in shipped]
    for entry in entries:
        about = entry.summary
        revision = "@".join(part for part in (entry.revision, (entry.commit or "")[:8]) if part)
        shape = f"{about.get('model_type')}, {about.get('layers')} layers of {about.get('hidden_size')}"
        size, digest = size_in_words(entry.nbytes), entry.digest[:12]
        rows.append((entry.name, revision, entry.kind, shape, size, entry.time[:10], digest))
    columns = ("name", "revision", "kind", "shape", ">size|", "stored|", "content|")
    shown = len(columns) if out.width >= 100 else 6
    out.print(make_table(columns[:shown], [row[:shown] for row in rows], title="Models"))


@click.command("rm", short_help="Forget a pulled model.")
@click.argument("name", metavar="NAME[@REVISION]")
@common_options
def rm(name: str) -> None:
    """Forget a pulled model, or one version of it. Its files are deleted unless another name refers to them."""
    from ..formats.registry.store import remove

    gone = remove(name)
    if wants_json():
        print_json({"removed": [asdict(entry) for entry in gone]})
        return
    for entry in gone:
        click.echo(f"removed {entry.name} {entry.revision or ''} {entry.digest[:12]}".replace("  ", " "))
