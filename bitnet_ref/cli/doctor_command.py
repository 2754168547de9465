"""`bitnet-ref doctor`: draws what `bitnet_ref.crossval.doctor` finds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from .shell import DIFFERS, common_options, make_table, report, size_in_words, style_text

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from ..crossval.doctor import BackendCheck, BackendState, DoctorReport
    from ..crossval.paths import PathCheck


@click.command(short_help="Check this machine and installation, and compute a self-check.")
@common_options
def doctor() -> None:
    """Examine this machine and installation, and compute a self-check on every backend.

    Exits with 1 when a backend disagrees with the reference.
    """
    from ..crossval.doctor import examine

    health = examine()
    report(health.to_dict(), lambda out: draw(health, out), 0 if health.healthy else DIFFERS)


def draw(health: DoctorReport, out: Console) -> None:
    versions = {name: version for name, version in health.versions.items() if name != "bitnet_ref"}
    present = ", ".join(f"{name} {version}" for name, version in versions.items() if version is not None)
    absent = ", ".join(name for name, version in versions.items() if version is None)
    features = style_text(" ".join(name for name, is_there in health.cpu_features.items() if is_there))
    lacks = ", ".join(name for name, is_there in health.cpu_features.items() if not is_there)
    features.append(f" (not: {lacks})" if lacks else "", style="dim")
    threads = (
        f"{health.threads} of {health.cores}, from: {health.threads_from}" if health.threads else health.threads_from
    )
    extension = "built, with OpenMP" if health.extension["openmp"] else "built, without OpenMP: one thread"
    if not health.extension["built"]:
        extension = f"not built: {health.extension['why']}"
    sizes = [size_in_words(health.memory_total)] if health.memory_total else []
    sizes += [f"{size_in_words(health.memory_available)} available"] if health.memory_available else []
    facts: list[tuple[str, str | Text]] = [
        ("bitnet_ref", f"{health.versions['bitnet_ref']}, Python {health.python}"),
        ("packages", present),
        *([("not installed", absent)] if absent else []),
        ("BLAS", f"{health.blas}, in NumPy"),
        ("extension", extension),
        ("system", health.os),
        ("CPU", health.cpu),
        ("", features),
        ("threads", style_text(threads, "" if health.threads else "red")),
        ("memory", ", ".join(sizes) or "unknown"),
        ("models", ", ".join(health.models)),
    ]
    out.print(make_table(("|", ""), facts, style="cyan"))
    for title, rows in (
        ("Backends", [backend_row(backend) for backend in health.backends]),
        ("Methods of the ternary product (cython)", [method_row(method) for method in health.methods]),
        ("Self-check: the shipped model, computed on each backend", [check_row(check) for check in health.checks]),
        *((f"{check.backend}: execution paths and known answers", path_rows(check.paths)) for check in health.checks),
    ):
        if rows:
            out.print(style_text(f"\n{title}", "bold"))
            out.print(make_table(("|", "|", ""), rows))


def method_row(method: dict[str, Any]) -> tuple[str, Text, str]:
    state = ("used", "green") if method["chosen"] else ("available", "")
    if method["reason"] is not None:
        state = ("unavailable", "yellow")
    return method["name"], style_text(*state), f"{method['summary']}; {method['reason'] or method['why']}"


def backend_row(backend: BackendState) -> tuple[str, Text, str]:
    if backend.available:
        return backend.name, style_text("available", "green"), backend.kernel or ""
    return backend.name, style_text("unavailable", "yellow"), backend.reason or ""


def check_row(check: BackendCheck) -> tuple[str, Text, str]:
    if check.error is not None:
        return check.backend, state_in_words(check.passed), check.error
    wrong = "exact" if check.unequal == 0 else f"compared, {check.unequal:,} WRONG"
    failed = sum(not path.passed for path in check.paths)
    paths = f"{len(check.paths)} paths and answers agree" if failed == 0 else f"{failed} of {len(check.paths)} DIFFER"
    return check.backend, state_in_words(check.passed), f"{check.accumulators:,} accumulators {wrong}; {paths}"


def path_rows(paths: list[PathCheck]) -> list[tuple[str, Text, str]]:
    """(path, state, result) of each check of an execution path."""
    return [(path.path, state_in_words(path.passed), f"{path.compared:,} compared: {path.detail}") for path in paths]


def state_in_words(passed: bool) -> Text:
    return style_text("passed", "green") if passed else style_text("FAILED", "bold red")
