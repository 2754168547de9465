"""`bitnet-ref pull`, `list` and `rm`: the models of this machine."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..errors import BitNetRefError
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

    Only the weights (.safetensors, .gguf), the config, the tokenizer and the card are fetched; no code or pickles.
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
    """The models that can be loaded by name: those shipped, every version that was pulled, and those of the Hugging
    Face cache, which are used where they are."""
    from ..formats.open import find_model, shipped_models
    from ..formats.registry.describe import describe_model, licence_of, usage_of
    from ..formats.registry.store import Store

    store = Store()
    entries = store.entries()
    models = []
    for entry in entries:
        path = store.path(entry)
        uses: dict[str, Any] = {"licence": None, "last_used": None}
        if path.exists():
            uses = {"licence": licence_of(path), **usage_of(path)}
        models.append({**asdict(entry), **uses, "bytes": entry.nbytes, "path": str(path)})
    cached = list(describe_cached())
    facts = {"store": str(store.root), "shipped": shipped_models(), "models": models, "cached": cached}
    rows = [(name, "shipped", *row_of(describe_model(find_model(name)))) for name in shipped_models()]
    rows += [(each["name"], version_of(each), *row_of({**each["summary"], **each})) for each in models]
    rows += [(each["name"], version_of(each), *row_of(each)) for each in cached]
    report(facts, lambda out: draw(rows, out))


def describe_cached() -> Iterator[dict[str, Any]]:
    """The loadable models of the Hugging Face cache."""
    from ..formats.registry.describe import describe_model
    from ..formats.registry.hub_cache import cached_models

    for each in cached_models():
        with suppress(BitNetRefError):  # other libraries' models are there too
            facts = describe_model(each.path())
            yield {"name": each.name, "revision": next(iter(each.revisions), None), "commit": each.commit, **facts}


def version_of(facts: dict[str, Any]) -> str:
    return "@".join(part for part in (facts["revision"], (facts["commit"] or facts["digest"])[:8]) if part)


def row_of(facts: dict[str, Any]) -> tuple[str, ...]:
    family = f"{facts.get('model_type')}, {facts.get('layers')} layers of {facts.get('hidden_size')}"
    quantisation = facts["kind"] + ", ternary" * bool(facts.get("ternary"))
    return quantisation, family, size_in_words(facts["bytes"]), facts["licence"] or "?", facts["last_used"] or "?"


def draw(rows: list[tuple[str, ...]], out: Console) -> None:
    columns = ("name", "version", "quantisation", "family", ">|size", "licence", "|last use")
    out.print(make_table(columns, rows, title="Models"))


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
