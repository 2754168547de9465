"""`bitnet-ref doctor`: draws what `bitnet_ref.crossval.doctor` finds."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import click

from .shell import DIFFERS, common_options, print_json, show, size_in_words, wants_json

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.text import Text

    from ..crossval.doctor import BackendCheck, BackendState, Diagnosis


@click.command(short_help="Check this machine and installation, and compute a self-check.")
@common_options
def doctor() -> None:
    """Look at this machine and installation, and compute a self-check on every backend.

    Exits with 1 when a backend disagrees with the reference.
    """
    from ..crossval.doctor import examine

    found = examine()
    if wants_json():
        print_json(found.to_dict())
    else:
        show(lambda out: draw(found, out))
    if not found.healthy:
        raise click.exceptions.Exit(DIFFERS)


def draw(found: Diagnosis, out: Console) -> None:
    """The whole report, top to bottom."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(style="cyan", no_wrap=True)
    table.add_column(overflow="fold")
    versions = {name: version for name, version in found.versions.items() if name != "bitnet_ref"}
    present = ", ".join(f"{name} {version}" for name, version in versions.items() if version is not None)
    absent = ", ".join(name for name, version in versions.items() if version is None)
    table.add_row("bitnet_ref", f"{found.versions['bitnet_ref']}, Python {found.python}")
    table.add_row("packages", present)
    if absent:
        table.add_row("not installed", absent)
    table.add_row("BLAS", f"{found.blas}, in NumPy")
    table.add_row("extension", extension_in_words(found))
    table.add_row("system", found.os)
    table.add_row("CPU", found.cpu)
    features = Text()
    for name, there in found.cpu_features.items():
        features.append(f"{name} " if there else "")
    lacks = ", ".join(name for name, there in found.cpu_features.items() if not there)
    features.append(f"(not: {lacks})" if lacks else "", style="dim")
    table.add_row("", features)
    threads = f"{found.threads} of {found.cores}, from: {found.threads_from}" if found.threads else found.threads_from
    table.add_row("threads", threads if found.threads else Text(threads, style="red"))
    table.add_row("memory", memory_in_words(found))
    table.add_row("models", ", ".join(found.models))
    out.print(table)

    draw_section("Backends", [(backend.name, *backend_in_words(backend)) for backend in found.backends], out)
    if found.methods:
        methods = [(method["name"], *method_in_words(method)) for method in found.methods]
        draw_section("Methods of the ternary product (cython)", methods, out)
    checks = [(check.backend, passed_in_words(check), check_in_words(check)) for check in found.checks]
    draw_section("Self-check: the shipped model, computed on each backend", checks, out)


def draw_section(title: str, rows: Iterable[tuple[RenderableType, ...]], out: Console) -> None:
    """A title, and rows of a name, a state and what there is to say."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for row in rows:
        table.add_row(*row)
    out.print(Text(f"\n{title}", style="bold"))
    out.print(table)


def method_in_words(method: dict[str, Any]) -> tuple[Text, str]:
    from rich.text import Text

    state = "taken" if method["chosen"] else "available" if method["reason"] is None else "not here"
    style = "green" if method["chosen"] else "" if method["reason"] is None else "yellow"
    return Text(state, style=style), f"{method['summary']}; {method['reason'] or method['why']}"


def passed_in_words(check: BackendCheck) -> Text:
    from rich.text import Text

    return Text("passed", style="green") if check.passed else Text("FAILED", style="bold red")


def extension_in_words(found: Diagnosis) -> str:
    if not found.extension["built"]:
        return f"not built: {found.extension['why']}"
    return "built, with OpenMP" if found.extension["openmp"] else "built, without OpenMP: one thread"


def memory_in_words(found: Diagnosis) -> str:
    parts = [f"{size_in_words(found.memory_total)}"] if found.memory_total else []
    parts += [f"{size_in_words(found.memory_available)} available"] if found.memory_available else []
    return ", ".join(parts) or "unknown"


def backend_in_words(backend: BackendState) -> tuple[Text, str]:
    from rich.text import Text

    if backend.available:
        return Text("available", style="green"), backend.kernel or ""
    return Text("not here", style="yellow"), backend.reason or ""


def check_in_words(check: BackendCheck) -> str:
    if check.error is not None:
        return check.error
    wrong = "exact" if check.unequal == 0 else f"compared, {check.unequal:,} WRONG"
    logits = f"logits off by {check.logits_error:.0e} ({check.logits_allowed:.0e} allowed)"
    return f"{check.accumulators:,} accumulators {wrong}; {logits}"
