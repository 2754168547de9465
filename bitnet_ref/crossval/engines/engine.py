"""Other people's engines, each run in an interpreter that has it, which may be another than this one.

A recorder (see `recorders`) runs the engine and writes a trace; the comparison happens here. So an engine's packages
need not be installed beside this one, and an engine that crashes takes nothing with it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_RECORDERS = Path(__file__).parent / "recorders"
_TIMEOUT_S = 600
_TAIL = 300  # characters of an engine's complaint that are shown


@dataclass(frozen=True)
class Engine:
    """An engine: its name, the packages that its recorder imports, and how they are installed."""

    name: str
    modules: tuple[str, ...]
    pip: str

    def missing(self, python: str | None = None) -> str | None:
        """Why it cannot run in that interpreter (None: this one), or None when it can."""
        looks = (
            "import importlib.util as u, json, sys\n"
            "print(json.dumps([m for m in sys.argv[1:] if u.find_spec(m) is None]))"
        )
        try:
            done = _run([python or sys.executable, "-c", looks, *self.modules], 60)
        except (OSError, subprocess.TimeoutExpired) as problem:
            return f"{python or sys.executable} does not run as a Python interpreter: {problem}"
        if done.returncode != 0:
            return f"{python or sys.executable} does not run as a Python interpreter: {done.stderr.strip()[-_TAIL:]}"
        lacks = json.loads(done.stdout.splitlines()[-1])
        if not lacks:
            return None
        where = "" if python is None else f" in {python}"
        return (
            f"{', '.join(lacks)} is not installed{where}: pip install {self.pip}, or name an interpreter that has it "
            "with --python"
        )

    def record(self, jobs: Sequence[Mapping[str, Any]], python: str | None = None) -> list[str | None]:
        """Run the recorder on the jobs, each with its "out", where its trace is afterwards. -> why each failed, or None

        An engine that ends before its last job has its own last words for the ones that are left.
        """
        script = _RECORDERS / f"record_{self.name}.py"
        try:
            done = _run([python or sys.executable, str(script)], _TIMEOUT_S, json.dumps([dict(job) for job in jobs]))
            printed, words = done.stdout, " ".join(done.stderr.split())[-_TAIL:] or "without a word"
            end = f"{self.name} ended with status {done.returncode}: {words}"
        except subprocess.TimeoutExpired:
            printed, end = "", f"{self.name} had not finished after {_TIMEOUT_S} s"
        said = [json.loads(line)["failed"] for line in printed.splitlines() if line.startswith('{"failed":')]
        return [said[i] if i < len(said) else end for i in range(len(jobs))]


def _run(command: list[str], timeout: float, text: str = "") -> subprocess.CompletedProcess[str]:
    # This interpreter's search path is no other's: only its own packages belong to it.
    other = command[0] != sys.executable
    env = {key: value for key, value in os.environ.items() if not (other and key in ("PYTHONPATH", "PYTHONHOME"))}
    return subprocess.run(
        command, input=text, capture_output=True, text=True, errors="replace", timeout=timeout, env=env, check=False
    )


TRANSFORMERS = Engine("transformers", ("transformers", "torch", "accelerate"), "'transformers>=5' torch accelerate")
LLAMA_CPP = Engine("llama_cpp", ("llama_cpp", "numpy"), "llama-cpp-python")
ONNXRUNTIME = Engine("onnxruntime", ("onnxruntime", "numpy"), "onnxruntime")
