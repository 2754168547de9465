"""bitnet.cpp, or any program with llama-cli's command line, against the reference: greedy text, token by token.

The program is run as its own documentation says, at temperature 0, on a GGUF, and its output is compared.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ...api import Model, load
from ...errors import BitNetRefError
from ...formats.convert import convert
from ...formats.open import find_model
from ..opponents import PROMPT
from ..outputs.causes import explain_tokens, judge_tokens
from ..outputs.given import GivenRun
from ..report import Crossing
from ..token_ids import compare_text
from ..types import StrPath

NAME = "bitnet.cpp"
_TIMEOUT_S = 600
_TAIL = 300
_BUDGET_S = 60.0
SHORT_PROMPTS = ("She said", "The")  # BOS is a large part of them


def cross_bitnet_cpp(
    source: StrPath,
    binary: str,
    *,
    prompt: str = PROMPT,
    count: int = 32,
    prints: str = "text",
    options: Sequence[str] = ("--no-display-prompt",),
    kind: str = "i2_s",
) -> Crossing:
    """Run `binary -m GGUF -p PROMPT -n COUNT --temp 0` with `options`, and compare its standard output.

    source: a model; one that is not a GGUF is converted to one of `kind`, in a temporary folder.
    prints: "text", or "ids" for a program whose last line of output holds the token ids that it chose.
    """
    program = shutil.which(binary)
    if program is None:
        reason = f"{binary!r} cannot be run: build bitnet.cpp (github.com/microsoft/BitNet) and give the path"
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
            return Crossing(NAME, unavailable=f"this model cannot be converted for it: {error}")
        command = [program, "-m", str(path), "-n", str(count), "--temp", "0", *options]
        crossing = _compare(model, command, prompt, tokens, count, prints)
        for other in SHORT_PROMPTS if crossing.greedy is not None and crossing.greedy.hidden else ():
            # The first prompt gives the same tokens with BOS twice, or without it: a short one may tell them apart.
            short = _compare(model, command, other, model.tokenizer.encode(other), count, prints)
            if not short.agrees:
                return short
            if short.greedy is not None and not short.greedy.hidden:
                assert crossing.greedy is not None
                crossing.greedy = replace(crossing.greedy, hidden=())
                break
        return crossing


def _compare(model: Model, command: Sequence[str], prompt: str, tokens: list[int], count: int, prints: str) -> Crossing:
    """One run of the program, against the reference."""
    name = Path(command[0]).name
    try:
        done = subprocess.run(
            [*command, "-p", prompt], capture_output=True, text=True, errors="replace", timeout=_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as problem:
        return Crossing(NAME, failed=f"{name}: {problem}")
    if done.returncode != 0:
        errors = " ".join(done.stderr.split())[-_TAIL:]
        return Crossing(NAME, failed=f"{name} ended with status {done.returncode}: {errors}")
    if prints == "ids":
        lines = done.stdout.strip().splitlines() or [""]
        ids = [int(each) for each in re.findall(r"\d+", lines[-1])]
        run = GivenRun(tuple(tokens), tuple(ids), prompt)
        crossing = Crossing(NAME, greedy=judge_tokens(model, run))
        if not crossing.agrees:
            crossing.causes = explain_tokens(model, [run], budget_s=_BUDGET_S)
        return crossing
    text = _continuation(done.stdout, prompt)
    if not text.strip():
        return Crossing(NAME, failed=f"{name} printed no text")
    return Crossing(NAME, greedy=compare_text(model, tokens, text, count))


def _continuation(printed: str, prompt: str) -> str:
    """The output without the prompt, for a program that repeats it."""
    text = printed.lstrip().removeprefix("<s>").lstrip()
    return text[len(prompt) :] if text.startswith(prompt) else printed
