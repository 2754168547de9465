"""The shell interface, `bitnet-ref`: one module per command. `main` is the entry point. May import every room.

Exit codes: 0 fine, 1 a comparison differs, 2 wrong usage, 3 a file that is bad or cannot be written, 4 a backend (or
program) is not available, 70 a bug in bitnet_ref itself, 130 interrupted.
"""

from __future__ import annotations

from .start import QuietStart

with QuietStart():
    import sys
    from collections.abc import Sequence
    from typing import NoReturn

    import click

    from .. import __version__
    from .batch_command import batch
    from .bench_command import bench
    from .chat_command import chat
    from .convert_command import convert
    from .crossval_command import crossval
    from .crossval_outputs import COMMANDS as OUTPUT_COMMANDS
    from .doctor_command import doctor
    from .embed_command import embed
    from .evaluation_commands import evaluate, perplexity
    from .generate_command import generate
    from .golden_command import golden
    from .grade_command import grade
    from .inspect_command import inspect
    from .lab_command import lab
    from .models_commands import list_models, pull, rm
    from .serve_command import serve
    from .shell import Interface, debug_option, prepare_streams, report_os_error
    from .signals import ending_signals
    from .train_command import train, train_tokenizer
    from .verify_command import verify
    from .watch_command import watch

EPILOG = """Each command has --help, and --json for programs.

Exit codes: 0 fine, 1 a comparison differs, 2 wrong usage, 3 a file is bad, or cannot be written (a full disk, no
permission), 4 backend not available, 130 interrupted."""


@click.group(cls=Interface, epilog=EPILOG, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="bitnet-ref")
@debug_option
def cli() -> None:
    """BitNet b1.58 language models: run them, look into them, check an installation.

    \b
    Try:  bitnet-ref generate "Once upon a time"
    """


COMMANDS = (
    generate,
    chat,
    serve,
    batch,
    verify,
    embed,
    inspect,
    pull,
    list_models,
    rm,
    convert,
    crossval,
    golden,
    bench,
    perplexity,
    evaluate,
    train,
    train_tokenizer,
    doctor,
    lab,
    grade,
)
for command in COMMANDS:  # in the order of --help
    cli.add_command(command)
for command in (watch, *OUTPUT_COMMANDS):
    crossval.add_command(command)


def main(args: Sequence[str] | None = None) -> NoReturn:
    """Run one command and exit with its code."""
    prepare_streams()
    with ending_signals():
        try:
            cli.main(args, prog_name="bitnet-ref")
        except OSError as error:  # of --help and --version, which come before any command
            sys.exit(report_os_error(error))
    raise AssertionError("cli.main does not return")
