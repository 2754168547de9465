"""`bitnet-ref doctor`: draws what `bitnet_ref.crossval.doctor` finds, each check when it is done."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import click

from .shell import (
    DIFFERS,
    common_options,
    console,
    make_row,
    make_table,
    report,
    show,
    size_in_words,
    style_text,
    wants_json,
)

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.status import Status
    from rich.text import Text

    from ..crossval.doctor import BackendState, Installation
    from ..crossval.paths import PathCheck
    from .shell import WholeTable

READY = ' You are ready: bitnet-ref generate "Once upon a time"'
ROW_WIDTHS = 27, 6, 20  # of path, state and result of a check; a longer path pushes its own row to the right
CHECKED = "execution paths and known answers"


@click.command(short_help="Check this machine and installation, and compute a self-check.")
@click.option("--full", is_flag=True, help="Longer texts, every check on every backend, and a line for each.")
@common_options
def doctor(full: bool) -> None:
    """Examine this machine and installation, and compute a self-check on every backend.

    Every execution path of every backend is compared with the reference; checks that fail are shown. --full shows all,
    and also runs on NumPy what it shares with a compiled backend: text by the engine, sampling, training.

    Exits with 1 when a backend disagrees with the reference.
    """
    from ..crossval.doctor import DoctorReport, describe_installation
    from ..crossval.self_check import self_check

    installation = describe_installation()
    if not wants_json():
        show(lambda out: draw_installation(installation, out))
    with CheckRows(brief=not full) as rows:
        health = DoctorReport(installation, self_check(full=full, on_check=rows))
    code = 0 if health.healthy else DIFFERS
    verdict = health.verdict + (READY if health.healthy else "")
    report(health.to_dict(), lambda out: draw_verdict(verdict, health.healthy, out), code)


def draw_installation(health: Installation, out: Console) -> None:
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


# -- checks, also those of `crossval backends` -------------------------------------------------------------------------


class CheckRows:
    """Shows each check as a row when it is done, below a title for each backend; on a terminal the last line says how
    many there are so far. With --json it shows nothing. An `OnCheck`.

    brief: one row for each backend, when its checks are done, below those that failed."""

    def __init__(self, brief: bool = False) -> None:
        self._last_backend: str | None = None
        self._brief = brief
        self._passed: list[bool] = []  # the checks of the last backend
        self._count = 0
        self._status: Status | None = None
        self._is_silent = wants_json()

    def __call__(self, backend: str, check: PathCheck) -> None:
        if self._is_silent:
            return
        rows: list[RenderableType] = [] if self._brief and check.passed else [check_row(check)]
        if backend != self._last_backend:
            rows = [*self._end_backend(), *rows]
            if not self._brief:
                rows.insert(0, style_text(f"\n{backend}: {CHECKED}", "bold"))
            elif self._last_backend is None:
                rows.insert(0, style_text("\nChecks", "bold"))
            self._last_backend = backend
        self._count += 1
        self._passed.append(check.passed)
        self._print(rows)
        if self._status is not None:
            self._status.update(f"checks done: {self._count}")

    def _end_backend(self) -> list[RenderableType]:
        """With `brief`, the row of the backend whose checks are done."""
        if not self._brief or self._last_backend is None:
            return []
        failed, checks = self._passed.count(False), len(self._passed)
        self._passed.clear()
        count = f"{failed} of {checks}" if failed else f"{checks}"
        cells = self._last_backend, state_of(not failed), f"{count} checks: {CHECKED}"
        return [make_row(cells, ROW_WIDTHS)]

    def _print(self, rows: list[RenderableType]) -> None:
        if not rows:
            return
        if self._status is None:
            show(lambda out: out.print(*rows, sep="\n"))
        else:
            self._status.console.print(*rows, sep="\n")

    def __enter__(self) -> CheckRows:
        if not self._is_silent and sys.stdout.isatty():
            self._status = console(sys.stdout).status("checking")
            self._status.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._print(self._end_backend())
        if self._status is not None:
            self._status.stop()


def check_row(check: PathCheck) -> WholeTable:
    """(path, state, result) of a check of an execution path."""
    compared = f"{check.compared:,} compared: " if check.compared else ""
    return make_row((check.path, state_of(check.passed), f"{compared}{check.detail}"), ROW_WIDTHS)


def state_of(passed: bool) -> Text:
    return style_text("passed", "green") if passed else style_text("FAILED", "bold red")


def draw_verdict(verdict: str, agrees: bool, out: Console) -> None:
    """The last line of a command that compares."""
    out.print(style_text(f"\n{verdict}", "green" if agrees else "bold red"))
