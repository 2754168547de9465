"""bitnet.cpp, or any program with llama-cli's command line, against the reference: greedy text, token by token.

The program is run as its own documentation runs it, at temperature 0, on a GGUF; what it prints is compared.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from ...api import load
from ...errors import BitNetRefError
from ...formats.convert import convert
from ...formats.open import find_model
from ..greedy import compare_ids, compare_text
from ..opponents import PROMPT, Crossing

NAME = "bitnet.cpp"
_TIMEOUT_S = 600
_TAIL = 300


def cross_bitnet_cpp(
    source: str | os.PathLike[str],
    binary: str,
    *,
    prompt: str = PROMPT,
    count: int = 32,
    prints: str = "text",
    more: Sequence[str] = ("--no-display-prompt",),
    kind: str = "i2_s",
) -> Crossing:
    """Run `binary -m GGUF -p PROMPT -n COUNT --temp 0`, and `more`, and compare what it prints on its standard output.

    source: a model; one that is no GGUF is written as one of `kind`, in a temporary folder.
    prints: "text", or "ids" for a program whose last line of output holds the token ids that it chose.
    """
    found = shutil.which(binary)
    if found is None:
        reason = f"{binary!r} is no program that runs; build bitnet.cpp (github.com/microsoft/BitNet) and give the path"
        return Crossing(NAME, unavailable=f"{reason} of its llama-cli")
    with tempfile.TemporaryDirectory(prefix="bitnet-ref-crossval-") as folder:
        path = find_model(source)
        try:
            if path.suffix != ".gguf":
                convert(path, Path(folder) / "model.gguf", f"gguf-{kind}", verify=False)
                path = Path(folder) / "model.gguf"
            model = load(path, backend="numpy")
            tokens = model.tokenizer.encode(prompt)
        except BitNetRefError as error:
            return Crossing(NAME, unavailable=f"this model cannot be given to it: {error}")
        command = [found, "-m", str(path), "-p", prompt, "-n", str(count), "--temp", "0", *more]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, errors="replace", timeout=_TIMEOUT_S, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as problem:
            return Crossing(NAME, failed=f"{Path(found).name}: {problem}")
        if done.returncode != 0:
            words = " ".join(done.stderr.split())[-_TAIL:]
            return Crossing(NAME, failed=f"{Path(found).name} ended with status {done.returncode}: {words}")
        if prints == "ids":
            lines = done.stdout.strip().splitlines() or [""]
            return Crossing(NAME, greedy=compare_ids(model, tokens, [int(i) for i in re.findall(r"\d+", lines[-1])]))
        text = _continuation(done.stdout, prompt)
        if not text.strip():
            return Crossing(NAME, failed=f"{Path(found).name} printed no text")
        return Crossing(NAME, greedy=compare_text(model, tokens, text, count))


def _continuation(printed: str, prompt: str) -> str:
    """What follows the prompt, where a program repeats it."""
    shown = printed.lstrip()
    if shown.startswith("<s>"):
        shown = shown[3:].lstrip()
    return shown[len(prompt) :] if shown.startswith(prompt) else printed
