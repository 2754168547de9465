"""`bitnet-ref pull`, `list` and `rm`: the local store of models."""

from __future__ import annotations

import sys
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from .shell import common_options, make_table, print_json, report, size_in_words, wants_json

if TYPE_CHECKING:
    from rich.console import Console

    from ..formats.registry.store import Entry


@click.command(short_help="Fetch a model from the Hugging Face hub, or from a folder, and keep it by its name.")
@click.argument("source", metavar="ORG/REPO[@REVISION]|PATH")
@click.option("--name", help="What to call it here.  [default: ORG/REPO; for a path it must be given]")
@click.option("--file", help="Which of several .gguf or .bitnet.safetensors files.")
@common_options
def pull(source: str, name: str | None, file: str | None) -> None:
    """Fetch a model and keep it by its name, for `--model NAME` and `bitnet_ref.load("NAME")`, offline too.

    Only the weights (.safetensors, .gguf), the config and the tokenizer are fetched; never code or pickles.
    A source that begins with "." or "/", or is an existing file, is copied from this machine.
    """
    from ..formats.open import shipped_models
    from ..formats.registry.add import add

    if name in shipped_models():
        raise click.UsageError(f"--name {name} is the name of a shipped model, which takes precedence; choose another")
    if source.startswith((".", "/", "~")) or Path(source).is_file():
        if name is None:
            raise click.UsageError("a model from a path needs a --name")
        entry = add(Path(source).expanduser(), name, file=file)
    else:
        entry = fetch(source, name, file)
    if wants_json():
        print_json(asdict(entry) | {"bytes": entry.nbytes})
        return
    revision = "" if entry.revision in (None, "main") else f"@{entry.revision}"
    click.echo(f"{entry.name}{revision}: {entry.kind}, {size_in_words(entry.nbytes)}, {entry.digest[:12]}")


def fetch(source: str, name: str | None, file: str | None) -> Entry:
    from ..formats.registry.add import pull as pull_from_hub

    quiet = wants_json() or not sys.stderr.isatty()
    if quiet:
        with suppress(ImportError):  # without the library `pull` raises its own error
            from huggingface_hub import utils

            utils.disable_progress_bars()

    def progress(each: str, number: int, count: int) -> None:
        if not quiet:
            click.echo(f"{number}/{count} {each}", err=True)

    files = () if file is None else (file,)
    return pull_from_hub(source, name=name, files=files, progress=progress, notice=partial(click.echo, err=True))


@click.command("list", short_help="The models here: shipped and pulled.")
@common_options
def list_models() -> None:
    """The models that can be loaded by name: those shipped, and every version that was pulled."""
    from ..formats.open import shipped_models
    from ..formats.registry.store import Store

    store = Store()
    entries = store.entries()
    models = [asdict(e) | {"bytes": e.nbytes, "path": str(store.path(e))} for e in entries]
    facts = {"store": str(store.root), "shipped": shipped_models(), "models": models}
    report(facts, lambda out: draw(entries, shipped_models(), out))


def draw(entries: list[Entry], shipped: list[str], out: Console) -> None:
    rows: list[tuple[str, ...]] = [(name, "", "", "", "", "shipped", "") for name in shipped]
    for entry in entries:
        about = entry.summary
        revision = "@".join(part for part in (entry.revision, (entry.commit or "")[:8]) if part)
        shape = f"{about.get('model_type')}, {about.get('layers')} layers of {about.get('hidden_size')}"
        size, digest = size_in_words(entry.nbytes), entry.digest[:12]
        rows.append((entry.name, revision, entry.kind, shape, size, entry.time[:10], digest))
    columns = ("name", "revision", "kind", "shape", ">|size", "|stored", "|content")
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
