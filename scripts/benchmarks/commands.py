"""What the commands of this folder share: the messages, exit codes and --json of `bitnet-ref`, and some options."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from bitnet_ref.cli.shell import ExitCodes, OutputFile, prepare_streams

if TYPE_CHECKING:
    from rich.console import Console

device_option = click.option(
    "--device", type=click.IntRange(min=0), default=0, show_default=True, help="Number of the GPU."
)


class Script(ExitCodes, click.Command):
    """A command that is a program by itself."""


def start(command: click.Command) -> None:
    """The command, as `python FILE` runs it."""
    prepare_streams()
    command.main()


def plot_option(help: str) -> Callable[[Any], Any]:
    """--plot, a file for a picture.   -> `plot`, a Path or None"""

    def check(ctx: click.Context, param: click.Parameter, plot: Path | None) -> Path | None:
        if plot is not None and plot.suffix not in (".png", ".svg", ".pdf"):
            raise click.UsageError(f"--plot {plot}: expected a file that ends in .png, .svg or .pdf")
        return plot

    return click.option("--plot", type=OutputFile(), callback=check, help=help)


def draw_device(device: str, copy_gb_per_s: float, emulated: bool, out: Console) -> None:
    out.print(f"{device}: a copy moves {copy_gb_per_s:,.1f} GB/s (read and written, median)")
    if emulated:
        out.print("Emulated on the host: the times say nothing about a GPU.", style="yellow")
