"""`bitnet-ref crossval watch`: runs an engine and compares the trace that it writes, again after each rebuild."""

from __future__ import annotations

import shlex
import shutil
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..errors import BitNetRefError, FormatError
from .crossval_command import VERDICT_STYLES, load_reference, look_for_causes, trace_options
from .shell import BAD_FILE, DIFFERS, UNAVAILABLE, common_options, print_json, show, style_text, wants_json
from .signals import INTERRUPTED, run_to_end

if TYPE_CHECKING:
    from ..api import Model
    from ..crossval import Crossing

_POLL_S = 0.2
Stamps = dict[Path, tuple[int, int] | None]  # path -> (time of the last change in ns, size); None: there is no file


@click.command(
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
    short_help="Run your engine and compare its trace, again after each rebuild.",
)
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED, metavar="CMD...")
@click.option("--model", default="storyteller", show_default=True, help="The model that CMD runs.")
@click.option("--trace", type=click.Path(path_type=Path), help="What CMD writes.  [default: a .safetensors it changes]")
@click.option("--file", "files", multiple=True, type=click.Path(path_type=Path), help="Run again when it changes too.")
@trace_options
@common_options
def watch(command: tuple[str, ...], model: str, trace: Path | None, files: tuple[Path, ...], **options: Any) -> None:
    """Run CMD, which writes a trace of a run of --model, and compare the trace; again whenever CMD's files change.

    Its files are the program, those of its arguments that are files, and each --file. A round shows the verdict, and
    which op was the first wrong one before and is now. Ctrl-C ends the watch with the exit code of the last round.

    \b
        bitnet-ref crossval watch -- ./my_engine run.safetensors
    """
    loaded, before, code = load_reference(model), None, INTERRUPTED
    try:
        while True:
            written = _candidates(command, trace)
            sources = _stamps([path for path in _sources(command, files) if path not in written])
            result = _run(command, trace, written, loaded, **options)
            code = result.code
            _show(result, before, sources)
            if result.interrupted:
                break
            before = result
            _wait_for_change(sources)
    except KeyboardInterrupt:
        click.echo(err=True)
    raise click.exceptions.Exit(code)


@dataclass
class _Round:
    """One run of the command and its comparison. first: the first wrong op."""

    command: str
    seconds: float
    code: int
    verdict: str
    first: str
    diagnosis: list[str]
    gaps: list[str]
    interrupted: bool = False


def _run(
    command: Sequence[str],
    trace: Path | None,
    written: Stamps,
    model: Model,
    no_causes: bool,
    budget: float,
    strict: bool,
) -> _Round:
    from ..crossval import cross_trace

    words, started = shlex.join(command), time.monotonic()
    try:
        code = run_to_end(command)
        elapsed = time.monotonic() - started
        if code:
            verdict = f"FAILED: {words} exited with {code}"
            return _Round(words, elapsed, BAD_FILE, verdict, "the command failed", [], [])
        path = _find_trace(words, trace, written)
        crossing = cross_trace(model, path, causes=False, strict=strict)
        if not wants_json():
            _say(crossing.verdict, VERDICT_STYLES[crossing.agrees])
        if not no_causes:
            look_for_causes(crossing, model, path, budget)
    except (OSError, BitNetRefError) as error:
        return _Round(words, time.monotonic() - started, BAD_FILE, f"FAILED: {error}", "there is no trace", [], [])
    code = {True: 0, False: DIFFERS, None: UNAVAILABLE}[crossing.agrees]
    stopped = crossing.causes.stopped == "interrupted"
    return _Round(
        words, elapsed, code, crossing.verdict, _first_wrong(crossing), crossing.diagnosis(), crossing.gaps, stopped
    )


def _first_wrong(crossing: Crossing) -> str:
    bad = next((each.first_divergence for each in crossing.comparisons if each.first_divergence is not None), None)
    if bad is not None:
        return f"{bad.name} ({bad.kind}), relative L2 {bad.relative_l2:.2g}"
    return "nothing, it agrees" if crossing.agrees else crossing.verdict.partition(":")[0]


def _show(result: _Round, before: _Round | None, sources: Stamps) -> None:
    """What is not shown yet: of a round that was compared, the verdict is."""
    if wants_json():
        print_json({**vars(result), "before": None if before is None else before.first})
        return
    if result.verdict.startswith("FAILED"):
        _say(result.verdict, "red")
    for line in [*result.gaps, *result.diagnosis]:
        _say(line)
    if before is not None and before.first != result.first:
        _say(f"first wrong op before: {before.first}\n                  now: {result.first}")
    elif before is not None:
        _say(f"as before: {result.first}")
    names = ", ".join(path.name for path in sources)
    now = time.strftime("%H:%M:%S")
    _say(f"{now}, the engine ran {result.seconds:.1f} s; waiting for a change of {names} (Ctrl-C ends)\n", "dim")


def _say(text: str, style: str = "") -> None:
    show(lambda out: out.print(style_text(text, style)))
    sys.stdout.flush()


# -- files -------------------------------------------------------------------------------------------------------------


def _sources(command: Sequence[str], files: Sequence[Path]) -> list[Path]:
    """The program, its arguments that are files, and the given files."""
    program = shutil.which(command[0])
    arguments = [Path(word) for word in command[1:] if len(word) < 4096]
    return [
        *([Path(program)] if program else [Path(command[0])]),
        *(path for path in arguments if path.is_file()),
        *files,
    ]


def _candidates(command: Sequence[str], trace: Path | None) -> Stamps:
    """The files that may be the trace, before the command runs."""
    words = [Path(word) for word in command if word.endswith(".safetensors")]
    return _stamps([trace] if trace is not None else [*words, *Path().glob("*.safetensors")])


def _find_trace(words: str, trace: Path | None, before: Stamps) -> Path:
    """The file that the command has written. Raises FormatError."""
    paths = set(before) if trace is not None else {*before, *Path().glob("*.safetensors")}
    changed = {path: stamp for path, stamp in _stamps(paths).items() if stamp is not None and stamp != before.get(path)}
    if not changed:
        what = "a file *.safetensors here; name the trace with --trace" if trace is None else "it"
        raise FormatError(f"{words} has not written {what}", path=trace)
    return max(changed, key=lambda path: changed[path] or (0, 0))


def _stamps(paths: Iterable[Path]) -> Stamps:
    out: Stamps = {}
    for path in paths:
        try:
            status = path.stat()
            out[path] = (status.st_mtime_ns, status.st_size)
        except OSError:
            out[path] = None
    return out


def _wait_for_change(before: Stamps) -> None:
    """Return when a file has changed, and all of them exist and stay as they are for a moment."""
    last = before
    while True:
        time.sleep(_POLL_S)
        now = _stamps(before)
        if now != before and now == last and all(stamp is not None for stamp in now.values()):
            return
        last = now
