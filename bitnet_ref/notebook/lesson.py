"""What notebooks of the course share: `show = setup()`, source in a box that scrolls, and a server for a cell."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ..errors import BackendUnavailable

PACKAGE = Path(__file__).parent.parent
LANGUAGES = {".py": "python", ".h": "c", ".cu": "cpp", ".cuh": "cpp"}


def setup() -> Callable[..., None]:
    """Gives matplotlib the style of the course, and returns `show_source`. Needs matplotlib."""
    import matplotlib.pyplot as plt

    style: Any = {"figure.dpi": 80, "font.size": 10, "axes.titlesize": 11, "legend.frameon": False}
    style |= {"axes.spines.top": False, "axes.spines.right": False, "figure.constrained_layout.use": True}
    plt.rcParams.update(style)
    return show_source


def show_source(*objects: Any) -> None:
    """Display the package's source of functions and classes, or of `(file, name)`: a function of a kernel file below
    `bitnet_ref`, with the comment above it. A long one scrolls."""
    from IPython.display import Markdown, display

    for each in objects:
        if isinstance(each, tuple):
            path, code = PACKAGE / each[0], read_function(PACKAGE / each[0], each[1])
        else:
            path, code = Path(inspect.getfile(each)), inspect.getsource(each)
        fence = f"`bitnet_ref/{path.relative_to(PACKAGE).as_posix()}`\n```{LANGUAGES[path.suffix]}\n{code}```"
        style = "max-height: 26em; overflow-y: auto; font-family: monospace"  # nbconvert's pages give a <pre> no font
        display(Markdown(f'<div style="{style}">\n\n{fence}\n\n</div>'))


def read_function(path: Path, name: str) -> str:
    """The text of a function of a C or CUDA file, with the comment above it. LookupError if there is none."""
    source = path.read_text(encoding="utf-8").splitlines()
    start = next((i for i, line in enumerate(source) if f" {name}(" in line and line[:1] not in " /*"), None)
    if start is None:
        raise LookupError(f"{path.name} has no function {name}")
    one_line = source[start].endswith("}")
    end = start if one_line else next(i for i in range(start, len(source)) if source[i].startswith("}"))
    while start > 0 and source[start - 1].strip():
        start -= 1
    return "\n".join(source[start : end + 1]) + "\n"


@contextmanager
def run_server(*arguments: str, **settings: int) -> Iterator[str]:
    """Run `bitnet-ref serve *arguments` in a process of its own, on a free port, until the block is left.   -> its URL

    settings: of EngineConfig, for a `--config` file. Raises BackendUnavailable if the server does not start."""
    command = [sys.executable, "-m", "bitnet_ref", "serve", *arguments, "--port", "0", "--drain-s", "1", "--json"]
    log = subprocess.DEVNULL  # no part of a lesson
    environment = {name: value for name, value in os.environ.items() if name != "BITNET_REF_API_KEY"}
    with TemporaryDirectory() as folder:
        config = Path(folder) / "engine.toml"
        config.write_text("".join(f"{name} = {value}\n" for name, value in settings.items()), encoding="utf-8")
        command += ["--config", str(config)]
        with subprocess.Popen(command, env=environment, text=True, stdout=subprocess.PIPE, stderr=log) as server:
            try:
                answer = json.loads((server.stdout and server.stdout.readline()) or "{}")
                if "url" not in answer:
                    reason = answer.get("error", {}).get("message", "run it in a terminal to see why")
                    raise BackendUnavailable(f"bitnet-ref serve did not start: {reason}")
                yield answer["url"]
            finally:
                server.terminate()
