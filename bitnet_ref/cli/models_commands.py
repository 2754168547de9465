"""`bitnet-ref pull`, `list` and `rm`: the models of this machine."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..errors import BitNetRefError, RegistryError
from .shell import common_options, make_table, report, say, size_in_words, wants_json

if TYPE_CHECKING:
    from rich.console import Console


@click.command(short_help="Fetch a model from the Hugging Face hub, or give a local one a name.")
@click.argument("source", metavar="ORG/REPO[@REVISION]|PATH", required=False)
@click.option("--name", help="What to call it here.  [default: ORG/REPO; for a path it must be given]")
@click.option("--file", help="Which of several .gguf or .bitnet.safetensors files.")
@click.option("--move-old-store", is_flag=True, help="Move what earlier versions stored to the Hugging Face cache.")
@common_options
def pull(source: str | None, name: str | None, file: str | None, move_old_store: bool) -> None:
    """Fetch a model into the Hugging Face cache, for `--model ORG/REPO` and `bitnet_ref.load("ORG/REPO")`, offline too.

    Only the weights (.safetensors, .gguf), the config, the tokenizer, what sentence-transformers reads of an embedding
    model, and the card are fetched; no code or pickles. A source that begins with "." or "/", or is an existing file,
    is a model of this machine. It gets the --name, and stays where it is.
    """
    from ..formats.open import shipped_models
    from ..formats.registry.describe import describe_model
    from ..formats.registry.pull import link_model

    if move_old_store:
        move_models()
        return
    if source is None:
        raise click.UsageError("Missing argument 'ORG/REPO[@REVISION]|PATH'.")
    if name in shipped_models():
        raise click.UsageError(f"--name {name} is the name of a shipped model, which takes precedence; choose another")
    if source.startswith((".", "/", "~")) or Path(source).is_file():
        if name is None:
            raise click.UsageError("a model from a path needs a --name")
        facts: dict[str, Any] = {"name": name}
        path = link_model(Path(source).expanduser(), name, file=file)
    else:
        facts, path = fetch(source, name, file)
    facts |= describe_model(path)
    report(facts, f"{facts['name']}: {facts['kind']}, {size_in_words(facts['bytes'])}, {path}")


def fetch(source: str, name: str | None, file: str | None) -> tuple[dict[str, Any], Path]:
    """Pull from the hub.   -> name, revision and commit, and the path to load"""
    from ..formats.registry.pull import pull as pull_from_hub

    note_old_store()
    if wants_json() or not sys.stderr.isatty():
        with suppress(ImportError):  # without the library `pull` raises its own error
            from huggingface_hub import utils

            utils.disable_progress_bars()
    model, path = pull_from_hub(source, name=name, file=file)
    return {"name": name or source, "revision": model.revisions[0], "commit": model.commit}, path


def move_models() -> None:
    from ..formats.registry.old_store import move_old_store

    moved = [{"name": name, "path": str(path)} for name, path in move_old_store()]
    lines = [f"{each['name']}: {each['path']}" for each in moved]
    report({"moved": moved}, "\n".join(lines or ["there is no store of an earlier version"]))


def note_old_store() -> None:
    from ..formats.registry.old_store import MOVE, old_entries

    if names := sorted({entry["name"] for entry in old_entries()}):
        say(f"in the store of an earlier version: {', '.join(names)}; to move them to the Hugging Face cache: {MOVE}")


@click.command("list", short_help="The models here: shipped, pulled, named.")
@common_options
def list_models() -> None:
    """The models that can be loaded by name: those shipped, those that were given a name, and those of the Hugging Face
    cache, whichever program fetched them."""
    from ..formats.open import find_model, shipped_models
    from ..formats.registry.describe import describe_model

    note_old_store()
    named = list(describe_named())
    cached = list(describe_cached())
    facts = {"shipped": shipped_models(), "models": named, "cached": cached}
    rows = [(name, "shipped", *row_of(describe_model(find_model(name)))) for name in shipped_models()]
    rows += [(each["name"], "named", *row_of(each)) for each in named]
    rows += [(each["name"], version_of(each), *row_of(each)) for each in cached]
    report(facts, lambda out: draw(rows, out))


def describe_named() -> Iterator[dict[str, Any]]:
    """The names that were given, with what is said of each model, or with an error."""
    from ..formats.registry.describe import describe_model
    from ..formats.registry.links import find_linked, links

    for name, path in links().items():
        try:
            find_linked(name)  # raises if the path is gone
            yield {"name": name, **describe_model(path)}
        except BitNetRefError as error:
            yield {"name": name, "path": str(path), "error": str(error)}


def describe_cached() -> Iterator[dict[str, Any]]:
    """The loadable models of the Hugging Face cache."""
    from ..formats.registry.describe import describe_model
    from ..formats.registry.hub_cache import cached_models

    for each in cached_models():
        with suppress(BitNetRefError):  # other libraries' models are there too
            facts = describe_model(each.path())
            yield {"name": each.name, "revision": next(iter(each.revisions), None), "commit": each.commit, **facts}


def version_of(facts: dict[str, Any]) -> str:
    return "@".join(part for part in (facts["revision"], facts["commit"][:8]) if part)


def row_of(facts: dict[str, Any]) -> tuple[str, ...]:
    if "error" in facts:
        return (facts["error"],)
    family = f"{facts['model_type']}, {facts['layers']} layers of {facts['hidden_size']}"
    quantisation = facts["kind"] + ", ternary" * facts["ternary"]
    return quantisation, family, size_in_words(facts["bytes"]), facts["licence"] or "?", facts["last_used"]


def draw(rows: list[tuple[str, ...]], out: Console) -> None:
    columns = ("name", "version", "quantisation", "family", ">|size", "licence", "|last use")
    out.print(make_table(columns, rows, title="Models"))


@click.command("rm", short_help="Delete a model from the Hugging Face cache, or forget a name.")
@click.argument("name", metavar="NAME[@REVISION]")
@click.option("--yes", is_flag=True, help="Delete without asking.")
@common_options
def rm(name: str, yes: bool) -> None:
    """Forget a name that was given to a local model, whose files stay; or delete a model from the Hugging Face cache:
    all of it, or one revision. That is asked first, because other programs use the same cache."""
    from ..formats.open import shipped_models
    from ..formats.registry.hub_cache import cached_models, matching_models, repository_folder
    from ..formats.registry.links import linked_path, links, remove_link
    from ..formats.registry.pull import delete_models, plan_deletion

    path, models = linked_path(name), matching_models(name)
    if path is not None and not (models and path.is_relative_to(repository_folder(name))):
        remove_link(name)
        removed = {"removed": [{"name": name, "path": str(path)}], "bytes": 0}
        report(removed, f"removed the name {name}; its files stay: {path}")
        return
    if not models:
        if name in shipped_models():
            raise RegistryError(f"{name} is a part of the package, and stays")
        near = get_close_matches(name, {*links(), *(each.name for each in cached_models())}, 3)
        hint = f"did you mean {' or '.join(near)}?" if near else "bitnet-ref list shows what there is"
        raise RegistryError(f"there is no {name!r} here; {hint}")
    plan = plan_deletion(models)
    versions = [
        {"name": each.name, "revision": next(iter(each.revisions), None), "commit": each.commit} for each in models
    ]
    shown = f"{name} ({', '.join(map(version_of, versions))}): {size_in_words(plan.expected_freed_size)}"
    if not yes and wants_json():
        raise click.UsageError("--json does not ask before it deletes: add --yes")
    if not yes:
        click.confirm(f"{shown} in {models[0].folder.parents[1]}, for all programs. Delete?", abort=True, err=True)
    delete_models(models, plan)
    report({"removed": versions, "bytes": plan.expected_freed_size}, f"deleted {shown}")
