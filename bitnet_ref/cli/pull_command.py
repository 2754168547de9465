"""`bitnet-ref pull`: a model of the hub, or of this machine, into the local store."""

from __future__ import annotations

import sys
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from .shell import common_options, print_json, size_in_words, wants_json

if TYPE_CHECKING:
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
    if is_local(source):
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


def is_local(source: str) -> bool:
    return source.startswith((".", "/", "~")) or Path(source).is_file()


def fetch(source: str, name: str | None, file: str | None) -> Entry:
    from ..formats.registry.add import pull as pull_from_hub

    quiet = wants_json() or not sys.stderr.isatty()
    if quiet:
        disable_progress_bars()

    def progress(each: str, number: int, count: int) -> None:
        if not quiet:
            click.echo(f"{number}/{count} {each}", err=True)

    files = () if file is None else (file,)
    return pull_from_hub(source, name=name, files=files, progress=progress, notice=partial(click.echo, err=True))


def disable_progress_bars() -> None:
    """Turn off the progress bars of huggingface_hub. Without the library `pull` raises its own error."""
    with suppress(ImportError):
        from huggingface_hub import utils

        utils.disable_progress_bars()
