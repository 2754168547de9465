"""Any BitLinear of any package, probed from outside: which of its lines is another one than the reference's.

`cross_linear("package.module:Class")` builds the layer in an interpreter that has it, sets its weights, runs it on
inputs that show one line each (see `probes`), and finds the rules that give its outputs (see `fit`).
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import ConfigError
from ..engines.engine import ExternalEngine
from .judge import judge
from .probes import Answers, all_calls
from .verdict import LinearVerdict, LineVerdict

__all__ = ["LineVerdict", "LinearVerdict", "cross_linear"]

ENGINE = ExternalEngine("linear", ("numpy",), "numpy")


def cross_linear(target: str, *, python: str | None = None, args: str = "") -> LinearVerdict:
    """The verdict on the layer `target`, "package.module:Class" or "file.py:Class".

    python: the interpreter that has the layer's package; None: this one.   args: how the layer is built, if the usual
    signatures do not fit, such as "in_features, out_features, bias=bias, eps=1e-6".
    Raises ConfigError for a target without a colon, and for an interpreter that does not run.
    """
    if not all(target.partition(":")):
        raise ConfigError(f"expected MODULE:CLASS or FILE.py:CLASS, got {target!r}", field="target")
    if (missing := ENGINE.missing(python)) is not None:
        raise ConfigError(missing, field="python")
    calls = all_calls()
    with tempfile.TemporaryDirectory(prefix="bitnet-ref-linear-") as folder:
        given, out = Path(folder) / "given.npz", Path(folder) / "out.npz"
        arrays: dict[str, Any] = {"calls": np.array(json.dumps([call.facts for call in calls]))}
        for i, call in enumerate(calls):
            values = {"x": call.x, "w": call.w, "bias": call.bias, "dy": call.dy}
            arrays |= {f"{i}/{name}": value for name, value in values.items() if value is not None}
        np.savez(given, **arrays)
        (outcome,) = ENGINE.record([{"target": target, "args": args, "given": str(given), "out": str(out)}], python)
        if outcome.failed is not None:
            return LinearVerdict(target, "", (), outcome.failed)
        answers = Answers()
        with np.load(out, allow_pickle=False) as archive:
            versions = str(archive["versions"])
            for key in archive.files:
                number, _, name = key.partition("/")
                if name:
                    answers.by_call.setdefault(calls[int(number)].name, {})[name] = archive[key]
    return judge(target, versions, calls, answers)
