"""What all commands share: errors as messages and exit codes, output, tables, and common options."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shlex
import sys
import time
import traceback
from collections import UserDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import wraps
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TextIO, TypeVar, cast

import click

from ..errors import (
    BackendError,
    BitNetRefError,
    ConfigError,
    FormatError,
    HubError,
    NumericsError,
    StorageError,
    TokenizerError,
    printable,
)
from ..system.atomic import check_target, is_same_file, storage_error
from .signals import INTERRUPTED, was_interrupted

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.progress import Progress
    from rich.table import Table
    from rich.text import Text

DIFFERS, USAGE, BAD_FILE, UNAVAILABLE, BUG = 1, 2, 3, 4, 70
_PLACES = ("path", "offset", "field", "tensor", "op", "expected", "got")
_CONTROLS = {code: "\N{REPLACEMENT CHARACTER}" for code in [*range(32), *range(127, 160)] if code not in (9, 10)}

QUOTES = "\"'"

AnyFunction = TypeVar("AnyFunction", bound=Callable[..., Any])


@dataclass
class State:
    """What the error handler needs to know about the command line."""

    json: bool = False
    debug: bool = False
    command: click.Command | None = None  # the one whose options messages name
    shell_line: str = ""  # the whole command, as a shell reads it


class Commands(UserDict[str, Any]):
    """The commands of a group by name. One that is written as its place, "module:attribute", is imported when it is
    asked for: all of them together take half a second."""

    def __getitem__(self, name: str) -> click.Command:
        if isinstance(place := self.data[name], str):
            module, attribute = place.split(":")
            self.data[name] = getattr(import_module(f".{module}", __package__), attribute)
        command: click.Command = self.data[name]
        return command


class OrderedGroup(click.Group):
    """A group whose --help lists the commands in the order in which they were added."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)


class ExitCodes(click.Command):
    """A command whose exceptions become one message and an exit code."""

    def make_context(self, *args: Any, **kwargs: Any) -> click.Context:
        try:
            return super().make_context(*args, **kwargs)
        except KeyboardInterrupt:
            click.echo(err=True)
            raise click.exceptions.Exit(INTERRUPTED) from None

    def invoke(self, ctx: click.Context) -> Any:
        state = ctx.ensure_object(State)
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()  # a closed pipe raises here, and not when the interpreter exits
            return result
        except click.UsageError as error:
            if hint := hint_at_quotes(error):
                raise click.UsageError(error.message + hint, error.ctx) from None
            raise
        except (click.ClickException, click.exceptions.Exit, click.Abort):
            raise
        except BrokenPipeError:  # `| head -1`
            discard_stdout()
            code = 0
        except KeyboardInterrupt:
            click.echo(err=True)
            code = INTERRUPTED
        except Exception as error:
            code = self._report(error, state.debug)
        raise click.exceptions.Exit(code)

    @staticmethod
    def _report(error: Exception, debug: bool) -> int:
        """Write what went wrong.   -> the exit code"""
        if was_interrupted():  # a library made another exception of it
            click.echo(err=True)
            return INTERRUPTED
        if debug or not isinstance(error, BitNetRefError | OSError | MemoryError):
            traceback.print_exc()
        if isinstance(error, BitNetRefError):
            return report_error(error)
        if isinstance(error, OSError):  # of a standard stream, or of a file that no reader or writer explains
            return report_os_error(error)
        if isinstance(error, MemoryError):
            say_error("not enough memory; try a smaller model or context")
            return UNAVAILABLE
        say_error("this is a bug in bitnet_ref; the lines above say where")
        return BUG


def hint_at_quotes(error: click.UsageError) -> str:
    """What to say of words left over: the last argument and they may be a path with spaces."""
    # click keeps the words in its message alone. A class of our own for every command, to have them, would be longer.
    words = re.fullmatch(r"Got unexpected extra arguments? \((.*)\)", error.message)
    if words is None or error.ctx is None:
        return ""
    arguments = [param for param in error.ctx.command.params if isinstance(param, click.Argument)]
    first = error.ctx.params.get(str(arguments[-1].name)) if arguments else None
    return f'. Put a path with spaces in quotes: "{first} {words[1]}"' if first is not None else ""


def check_files_apart(command: click.Command, values: Mapping[str, Any]) -> None:
    """Raise UsageError where a file to be written is one that the command reads, or of a folder that it reads.

    Links, hard links and other spellings of a path are the same file.
    """
    written = {p.name: values[str(p.name)] for p in command.params if isinstance(p.type, OutputPath)}
    for target in written.values():
        if target is None or not os.path.exists(target):
            continue
        for param in command.params:
            value = None if param.name in written else values.get(str(param.name))
            for source in value if isinstance(value, tuple | list) else (value,):
                if isinstance(source, str | Path) and _is_read(Path(source), target):
                    message = f"{target} is read as {_in_shell(str(param.name), {str(param.name): param})}"
                    raise click.UsageError(f"{message}, and would be replaced; name another file")


_OF_MODELS = (".safetensors", ".gguf", ".onnx", ".json", ".model", ".bin", ".jinja")


def _is_read(source: Path, target: Path) -> bool:
    if is_same_file(source, target.parent):
        return target.is_file() and target.suffix in _OF_MODELS
    return is_same_file(source, target)


class Interface(ExitCodes, OrderedGroup):
    """The group of all commands."""

    def make_context(self, info_name: str | None, args: list[str], *more: Any, **settings: Any) -> click.Context:
        words = f"{info_name} {shlex.join(args)}"
        context = super().make_context(info_name, args, *more, **settings)
        context.ensure_object(State).shell_line = words
        return context


def exit_code(error: BitNetRefError) -> int:
    """2 wrong usage, 3 a file that is bad or cannot be written, 4 backend."""
    if isinstance(error, BackendError | HubError):
        return UNAVAILABLE
    if isinstance(error, ConfigError) and error.path is None:  # of an argument, not of a file
        return USAGE
    if isinstance(error, FormatError | ConfigError | TokenizerError | NumericsError | StorageError):
        return BAD_FILE
    return USAGE


def report_error(error: BitNetRefError) -> int:
    """Write the error as JSON (type, message, its place if it has one), or its message.   -> the exit code"""
    if wants_json():
        facts = {"type": type(error).__name__, "message": error_message(error)}
        facts |= {key: value for key in _PLACES if (value := getattr(error, key, None)) is not None}
        print_json({"error": facts})
    else:
        say_error(error_message(error))
    return exit_code(error)


def report_os_error(error: OSError) -> int:
    """As `report_error`. An error that names no file is one of stdout, whose buffer is then discarded."""
    if error.filename is not None:
        return report_error(storage_error(error))
    discard_stdout()
    say_error(str(storage_error(error, "standard output")))
    return BAD_FILE


def error_message(error: BitNetRefError) -> str:
    """The message, with the command's options in place of the library's parameters: "--top-p: ..." for "top_p: ..."."""
    command = click.get_current_context().ensure_object(State).command
    options = {str(param.name): param for param in command.params} if command is not None else {}
    written, rest = "", error.message
    for mention in error.mentions:
        before, name, rest = rest.partition(mention)
        written += before + _in_shell(name, options)
    place = error.place if getattr(error, "path", None) is not None else _in_shell(error.place, options)
    return f"{place}: {written}{rest}" if place else written + rest


def _in_shell(mention: str, options: Mapping[str, click.Parameter]) -> str:
    """ "num_beams=1" as "--num-beams 1"; a mention that is no option of the command stays."""
    name, _, value = mention.partition("=")
    option = options.get(name)
    if not isinstance(option, click.Option):
        return mention
    return f"{option.opts[0]} {value.strip(QUOTES)}" if value and not option.is_flag else option.opts[0]


def say(text: str) -> None:
    """A remark on stderr. If that is a file on a full disk, the work goes on without it."""
    with contextlib.suppress(OSError):
        click.echo(paint(printable(text), sys.stderr, dim=True), err=True)


def say_error(message: str, label: str = "Error") -> None:
    with contextlib.suppress(OSError):
        click.echo(f"{paint(f'{label}:', sys.stderr, fg='red', bold=True)} {printable(message)}", err=True)


# -- streams -----------------------------------------------------------------------------------------------------------


def prepare_streams() -> None:
    """A terminal or pipe that is not UTF-8 gets a question mark for what it cannot show, instead of a traceback.
    A stdin or stderr that is closed (`2>&-`) is empty; writing to a closed stdout fails as on a full disk."""
    if sys.stdin is None:
        sys.stdin = io.TextIOWrapper(io.BufferedReader(io.FileIO(os.devnull)), encoding="utf-8")
    if sys.stdout is None:
        sys.stdout = open(os.open(os.devnull, os.O_RDONLY), "w", encoding="utf-8")  # noqa: SIM115 - open to the end
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors in ("strict", "surrogateescape"):
            stream.reconfigure(errors="replace")
    if isinstance(sys.stdin, io.TextIOWrapper):  # the tokenizer reports bytes that are not text
        sys.stdin.reconfigure(errors="surrogateescape")


def discard_stdout() -> None:
    """Discard what is still buffered for a stdout that was closed."""
    with contextlib.suppress(OSError, ValueError):  # where stdout is not a real file
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def paint(text: str, stream: TextIO, **style: Any) -> str:
    """The text in colour, on a terminal without NO_COLOR (https://no-color.org)."""
    return click.style(text, **style) if stream.isatty() and not os.environ.get("NO_COLOR") else text


def print_json(value: Any) -> None:
    """One line. Characters that stdout cannot encode, or that are not shown, are JSON escapes: nothing is lost."""
    is_utf8 = (sys.stdout.encoding or "").lower().replace("-", "") in ("utf8", "utf8sig")
    text = json.dumps(value, ensure_ascii=not is_utf8, allow_nan=False)
    if not text.isprintable():
        text = "".join(c if c.isprintable() else json.dumps(c)[1:-1] for c in text.replace("\x7f", "\\u007f"))
    sys.stdout.write(text.encode(errors="replace").decode() + "\n")
    sys.stdout.flush()


def write_text(text: str) -> None:
    """Write generated text. On a terminal control characters are replaced: a model may write any byte."""
    sys.stdout.write(text.translate(_CONTROLS) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def console(stream: TextIO) -> Console:
    """A rich console that shows `printable` text only. Without a terminal the width is 100, or COLUMNS."""
    from rich.console import Console
    from rich.segment import Segment

    class PrintableConsole(Console):
        def render(self, *args: Any, **kwargs: Any) -> Iterable[Segment]:
            for text, style, control in super().render(*args, **kwargs):
                yield Segment(text if control else printable(text), style, control)

    width = None if stream.isatty() or "COLUMNS" in os.environ else 100
    return PrintableConsole(file=stream, width=width, highlight=False, emoji=False, markup=False)


def show(draw: Callable[[Console], None]) -> None:
    """Draw on stdout with rich. In a file or pipe, lines do not end with spaces."""
    out = console(sys.stdout)
    if sys.stdout.isatty():
        draw(out)
        return
    with out.capture() as capture:
        draw(out)
    sys.stdout.write("".join(f"{line.rstrip()}\n" for line in capture.get().splitlines()))
    sys.stdout.flush()  # a reader at the other end of a pipe sees it now, whatever is computed next


def report(facts: Any, shown: str | Callable[[Console], None], code: int = 0) -> None:
    """Write the facts as JSON, or else what is to be shown: a text, or a drawing. Exit with the code if it is not 0."""
    if wants_json():
        print_json(facts)
    elif isinstance(shown, str):
        click.echo(shown)
    else:
        show(shown)
    if code:
        raise click.exceptions.Exit(code)


def make_table(
    columns: Sequence[str], rows: Iterable[Sequence[RenderableType]], title: str | None = None, style: str | None = None
) -> WholeTable:
    """A table without a frame. columns: ">size" is right-aligned, "|name" never wrapped, ">|size" both; all empty: no
    header.

    style: of the first column.   A row may have fewer cells.
    """
    cells = [[printable(cell, keep="") if isinstance(cell, str) else cell for cell in row] for row in rows]
    return WholeTable(columns, [[*row, *[""] * (len(columns) - len(row))] for row in cells], title, style)


def make_row(cells: Sequence[RenderableType], widths: Sequence[int]) -> WholeTable:
    """One row of a table that is shown row by row. Columns have a width that they exceed at need; the last one wraps.
    Where the widths do not fit, the first cell has a line of its own."""
    table = make_table([*["|"] * (len(cells) - 1), ""], [cells])
    return replace(table, min_widths=widths)


@dataclass
class WholeTable:
    """A table that cuts nothing off at any width. Where it is too wide, the first cell of a row has a line of its own,
    with a table of the others below it; where these are too wide as well, a line for each of them."""

    columns: Sequence[str]
    rows: list[list[RenderableType]]
    title: str | None = None
    style: str | None = None
    min_widths: Sequence[int] = ()  # of the columns, where there is room for them; (): none

    def __rich_console__(self, out: Console, options: ConsoleOptions) -> Iterable[RenderableType]:
        from rich.padding import Padding

        if self.fits(out, options.max_width):
            yield self._table(self.rows, self.min_widths or [0] * len(self.columns))
            return
        if self.title:
            yield style_text(self.title, "bold")
        below = WholeTable(self.columns[1:], [row[1:] for row in self.rows], min_widths=self.min_widths[1:])
        in_columns = len(self.columns) > 2 and below.fits(out, options.max_width - 2)
        for number, (first, *others) in enumerate(self.rows):
            yield style_text(first, self.style or "") if isinstance(first, str) else first
            if in_columns:
                yield Padding(below._table([others], below._widths(out), header=number == 0), (0, 0, 0, 2))
                continue
            for column, cell in zip(below.columns, others, strict=True):
                name = column.lstrip(">|")
                line = style_text("").append(f"{name}: " * bool(name), style="dim")
                line.append(cell if isinstance(cell, str) else style_text(str(cell), getattr(cell, "style", "")))
                yield Padding(line, (0, 0, 0, 2))

    def fits(self, out: Console, width: int) -> bool:
        """Whether no cell of a column that never wraps is cut off, and no word of the others."""
        return sum(self._widths(out)) + 2 * (len(self.columns) - 1) <= width

    def _widths(self, out: Console) -> list[int]:
        """The narrowest width of each column."""
        from rich.measure import Measurement

        widths = []
        for number, column in enumerate(self.columns):
            cells = [Measurement.get(out, out.options.update(width=10_000), row[number]) for row in self.rows]
            head = max((len(word) for word in column.lstrip(">|").split()), default=0)
            least = self.min_widths[number] if self.min_widths else 0
            widths.append(max([least, head, *(cell.maximum if "|" in column else cell.minimum for cell in cells)]))
        return widths

    def _table(self, rows: Iterable[Sequence[RenderableType]], widths: Sequence[int], header: bool = True) -> Table:
        from rich.table import Table

        names = [column.lstrip(">|") for column in self.columns]
        table = Table(
            title=self.title, title_justify="left", title_style="bold", box=None, pad_edge=False, padding=(0, 2, 0, 0)
        )
        table.show_header = header and any(names)
        for number, (column, name, width) in enumerate(zip(self.columns, names, widths, strict=True)):
            marks, first = column.removesuffix(name), self.style if number == 0 else None
            side: Literal["left", "right"] = "right" if ">" in marks else "left"
            table.add_column(
                name,
                header_style="dim",
                style=first,
                justify=side,
                no_wrap="|" in marks,
                min_width=width,
                overflow="fold",
            )
        for row in rows:
            table.add_row(*row)
        return table


def style_text(text: str, style: str = "") -> Text:
    from rich.text import Text

    return Text(text, style=style)


class LoadingBar:
    """Progress of `load` or of a search on stderr: on a terminal only, and only after half a second."""

    PATIENCE_S = 0.5

    def __init__(self, what: str) -> None:
        self.what, self.started = what, time.monotonic()
        self.bar: Progress | None = None

    def __call__(self, done: int, total: int, what: str | None = None) -> None:
        if self.bar is None and sys.stderr.isatty() and time.monotonic() - self.started > self.PATIENCE_S:
            from rich.progress import Progress, TextColumn

            columns = [TextColumn("{task.description}", markup=False)] if what else Progress.get_default_columns()
            self.bar = Progress(*columns, console=console(sys.stderr), transient=True)
            self.bar.add_task(self.what, total=total)
            self.bar.start()
        if self.bar is not None:
            self.bar.update(self.bar.task_ids[0], completed=done, total=total, description=what or self.what)

    def tell(self, done: int, total: int, text: str) -> None:
        """Progress of a search, with what is tested now."""
        self(done, total, f"testing {done + 1} of {total}: {printable(text, keep='')}")

    def __enter__(self) -> LoadingBar:
        return self

    def __exit__(self, *_: object) -> None:
        if self.bar is not None:
            self.bar.stop()


@contextlib.contextmanager
def waiting(what: str) -> Iterator[None]:
    """A spinner and the elapsed time on stderr, for work whose length is unknown; nothing if stderr is no terminal."""
    if not sys.stderr.isatty():
        yield
        return
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn()
    with Progress(*columns, console=console(sys.stderr), transient=True) as progress:
        progress.add_task(what, total=None)
        yield


# -- options -----------------------------------------------------------------------------------------------------------


class SectionOption(click.Option):
    """An option that --help shows in a section with a title."""

    def __init__(self, *args: Any, section: str = "Options", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.section = section


class SectionedCommand(click.Command):
    """A command whose --help groups its options."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        sections: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            if isinstance(param, click.Option) and (record := param.get_help_record(ctx)) is not None:
                sections.setdefault(getattr(param, "section", "Options"), []).append(record)
        sections["Options"] = sections.pop("Options")  # last
        for title, records in sections.items():
            with formatter.section(title):
                formatter.write_dl(records)


def check_no_blank(kind: click.Path, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> None:
    """Usage error for a blank name to write, of a variable that was not set: Path takes it for the folder one is in."""
    if not str(value).strip():
        kind.fail("expected a name, got a blank one", param, ctx)


class OutputPath(click.Path):
    """A file or folder to be written, which the command checks itself.   -> Path"""

    def __init__(self) -> None:
        super().__init__(path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        check_no_blank(self, value, param, ctx)
        super().convert(value, param, ctx)
        return Path(value)


class OutputFile(OutputPath):
    """A file to be written. That it can be is checked before the work begins.   -> Path

    endings: those that its name may have, if these decide what is written.
    """

    def __init__(self, *endings: str) -> None:
        super().__init__()
        self.endings = endings

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        check_no_blank(self, value, param, ctx)
        path = Path(value)
        if self.endings and path.suffix not in self.endings:
            self.fail(f"expected a name that ends in {' or '.join(self.endings)}, got {path.name}", param, ctx)
        try:
            check_target(path)
        except StorageError as error:
            if error.errno is not None:  # the system refuses it
                raise
            self.fail(str(error), param, ctx)
        return path


class OutputFolder(click.Path):
    """A folder to be made, with those around it, or to go on in. That no file is in its way is checked.   -> Path"""

    def __init__(self) -> None:
        super().__init__(path_type=Path, file_okay=False)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        check_no_blank(self, value, param, ctx)
        path = Path(value)
        super().convert(path, param, ctx)
        if file := next((parent for parent in path.parents if parent.is_file()), None):
            self.fail(f"Directory '{path}' cannot be made: {file} is a file.", param, ctx)
        return path


def _set_state(ctx: click.Context, param: click.Parameter, value: bool) -> bool:
    state = ctx.ensure_object(State)
    state.command = ctx.command
    if value:
        setattr(state, str(param.name), True)
    return value


debug_option = click.option(
    "--debug", is_flag=True, is_eager=True, expose_value=False, callback=_set_state, help="Show tracebacks of errors."
)


def common_options(function: AnyFunction) -> AnyFunction:
    """--json and --debug; the command calls `wants_json()`. What it writes is not what it reads."""

    @wraps(function)
    def command(*args: Any, **options: Any) -> Any:
        context = click.get_current_context()
        check_files_apart(context.command, context.params)
        return function(*args, **options)

    option = click.option(
        "--json", is_flag=True, is_eager=True, expose_value=False, callback=_set_state, help="Write JSON for programs."
    )
    return cast(AnyFunction, option(debug_option(command)))


def shell_line() -> str:
    """The command that runs, as it was written."""
    return click.get_current_context().ensure_object(State).shell_line


def wants_json() -> bool:
    return click.get_current_context().ensure_object(State).json


def size_in_words(nbytes: float) -> str:
    """1536 -> "1.5 KB": powers of 1024, three digits at most."""
    units = ["bytes", "KB", "MB", "GB", "TB"]
    while nbytes >= 999.5 and len(units) > 1:
        nbytes, units = nbytes / 1024, units[1:]
    return f"{nbytes:.0f} {units[0]}" if units[0] == "bytes" or nbytes >= 99.95 else f"{nbytes:.1f} {units[0]}"
