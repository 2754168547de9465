"""The program `bitnet-ref`: its commands by name, and its entry point."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from typing import Any, NoReturn

import click

from .. import __version__
from .shell import Commands, Interface, debug_option, prepare_streams, report_os_error
from .signals import ending_signals
from .start import QuietStart

EPILOG = """Each command has --help, and --json for programs.

Exit codes: 0 fine, 1 a comparison differs, 2 wrong usage, 3 a file is bad, or cannot be written (a full disk, no
permission), 4 backend not available, 130 interrupted."""


COMMANDS = {  # in the order of --help: where each stands, and what --help says of it
    "generate": ("generate_command:generate", "Continue a text, and show it as it comes."),
    "chat": ("chat_command:chat", "Talk with a model that was trained for it."),
    "serve": ("serve_command:serve", "Serve models by OpenAI's HTTP API."),
    "batch": ("batch_command:batch", "Answer a file of OpenAI batch requests."),
    "verify": ("verify_command:verify", "Compute a served answer again, and compare."),
    "embed": ("embed_command:embed", "Turn texts into vectors."),
    "inspect": ("inspect_command:inspect", "Say what a model folder or file is, and what is odd about it."),
    "pull": ("models_commands:pull", "Fetch a model from the Hugging Face hub, or give a local one a name."),
    "list": ("models_commands:list_models", "The models here: shipped, pulled, named."),
    "rm": ("models_commands:rm", "Delete a model from the Hugging Face cache, or forget a name."),
    "convert": ("convert_command:convert", "Write a model in another format, and prove that it is the same."),
    "crossval": ("crossval_command:crossval", "Compare the reference with other engines, op by op."),
    "golden": ("golden_command:golden", "Write small models in every format, with their logits."),
    "bench": ("bench_command:bench", "Measure speed and memory, beside what this machine can do."),
    "perplexity": ("evaluation_commands:perplexity", "The perplexity of a text, by a named protocol."),
    "eval": ("evaluation_commands:evaluate", "Tasks of lm-eval: multiple choice, texts, perplexities."),
    "train": ("train_command:train", "Train a model as a TOML file says, with checkpoints."),
    "train-tokenizer": ("train_command:train_tokenizer", "Train a SentencePiece tokenizer on texts."),
    "doctor": ("doctor_command:doctor", "Check this machine and installation, and compute a self-check."),
    "lab": ("lab_command:lab", "Copy the notebooks and open them in JupyterLab."),
    "grade": ("grade_command:grade", "Run notebooks of the course and count the points of their exercises."),
}


class Overview(Interface):
    """--help imports no command: it has their sentences from the table."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, sentence) for name, (_, sentence) in COMMANDS.items()])


@click.group(
    cls=Overview,
    commands=Commands({name: place for name, (place, _) in COMMANDS.items()}),
    epilog=EPILOG,
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(__version__, prog_name="bitnet-ref")
@debug_option
def cli() -> None:
    """BitNet b1.58 language models: run them, look into them, check an installation.

    \b
    Try:  bitnet-ref generate "Once upon a time"
    """


def show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    """A warning's words on stderr: Python would add a path and a line of this package."""
    click.echo(f"Warning: {message}", err=True)


def main(args: Sequence[str] | None = None) -> NoReturn:
    """Run one command and exit with its code."""
    with QuietStart(), ending_signals():  # quiet until the second has said what Ctrl-C does
        prepare_streams()
        warnings.showwarning = show_warning
        try:
            cli.main(args, prog_name="bitnet-ref")
        except OSError as error:  # of --help and --version, which come before any command
            sys.exit(report_os_error(error))
    raise AssertionError("cli.main does not return")
