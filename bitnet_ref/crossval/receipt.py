"""Receipts: a JSON file of what was compared and with what result, sealed by its own hash; and their verification.

The seal is no signature: it shows that a figure was changed, by accident or by an editor, not who wrote the file.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from .. import __version__
from ..api import Model, load
from ..errors import BitNetRefError, FormatError
from ..formats.hashes import config_hash, file_hash, weight_hash
from ..system.json_file import read_json_object, write_json
from ..system.threads import available_cpus
from .compare import Comparison
from .engines.outside import ENGINES, cross_engine
from .opponents import cross_backends, cross_trace
from .report import Crossing
from .token_ids import long_tokens
from .types import StrPath, Tokens

FORMAT, VERSION = "bitnet_ref.receipt", 1
_MAX_BYTES = 64_000_000
_KEYS = ("mode", "tokens", "problem", "logits", "n_flips", "agrees", "verdict", "accumulators", "first_divergence")


def make_receipt(
    kind: str,
    model_name: str,
    model: Model,
    tokens: Tokens,
    crossings: Sequence[Crossing],
    trace: StrPath | None = None,
) -> dict[str, Any]:
    """A sealed receipt. kind: "backends", an engine's name, or "trace", with the trace's path."""
    subject: dict[str, Any] = {
        "model": model_name,
        "config_sha256": config_hash(model.config),
        "weights_sha256": weight_hash(model.weights),
        "token_ids": [int(token) for token in tokens],
    }
    if trace is not None:
        subject |= {"trace": os.fspath(trace), "trace_sha256": file_hash(trace)}
    ran = [crossing.agrees for crossing in crossings if crossing.agrees is not None]
    results = [crossing.to_dict(figures) for crossing in crossings]
    agrees = bool(ran) and all(ran)
    return seal({"kind": kind, "bitnet_ref": __version__, "subject": subject, "results": results, "agrees": agrees})


def figures(comparison: Comparison) -> dict[str, Any]:
    """A comparison in the figures that a receipt keeps."""
    full = comparison.to_dict()
    largest: dict[str, float] = {}
    for op in comparison.ops:
        largest[op.kind] = max(largest.get(op.kind, 0.0), op.relative_l2)
    return {
        **{key: full[key] for key in _KEYS},
        "tensors": len(comparison.ops),
        "unequal_tensors": sum(not op.equal for op in comparison.ops),
        "missing_tensors": len(comparison.missing),
        "largest_relative_l2": {kind: str(e) if not np.isfinite(e) else e for kind, e in largest.items()},
    }


def seal(contents: dict[str, Any]) -> dict[str, Any]:
    """A receipt of these contents: with format, date, machine, and the hash of all of it."""
    machine = {
        "system": f"{platform.system()} {platform.release()}",
        "architecture": platform.machine(),
        "cpus": available_cpus(),
        "python": platform.python_version(),
        "numpy": np.__version__,
    }
    now = datetime.now(UTC).isoformat(timespec="seconds")
    body = {"format": FORMAT, "version": VERSION, "created": now, "machine": machine, **contents}
    return {**body, "sha256": receipt_hash(body)}


def receipt_hash(receipt: dict[str, Any]) -> str:
    """SHA-256 of a receipt without its own hash, as JSON with sorted keys and no spaces."""
    body = {key: value for key, value in receipt.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def write_receipt(path: StrPath, receipt: dict[str, Any]) -> None:
    write_json(path, receipt)


def read_receipt(path: StrPath) -> dict[str, Any]:
    """The receipt, with its seal checked. Raises FormatError."""
    path = Path(path)
    receipt = read_json_object(path, FormatError, _MAX_BYTES)
    if receipt.get("format") != FORMAT or receipt.get("version") != VERSION:
        raise FormatError(f'expected "{FORMAT}" version {VERSION}', path=path, field="format")
    if receipt.get("sha256") != receipt_hash(receipt):
        raise FormatError("the contents were changed after they were sealed", path=path, field="sha256")
    return receipt


@dataclass
class Verification:
    """What verifying a receipt showed."""

    path: str
    confirmed: list[str] = field(default_factory=list)
    refuted: list[str] = field(default_factory=list)
    unchecked: list[str] = field(default_factory=list)  # what could not be computed again here, and why

    @property
    def holds(self) -> bool:
        """Whether something was computed again and no result differs."""
        return bool(self.confirmed) and not self.refuted

    @property
    def verdict(self) -> str:
        """One line: whether the receipt holds, and how many statements were confirmed, refuted or not checked."""
        parts = [f"{len(self.confirmed)} statements confirmed"]
        parts += [f"{len(self.refuted)} REFUTED: {self.refuted[0]}"] if self.refuted else []
        parts += [f"{len(self.unchecked)} could not be checked here"] if self.unchecked else []
        return ("HOLDS: " if self.holds else "DOES NOT HOLD: ") + "; ".join(parts)

    def to_dict(self) -> dict[str, Any]:
        """Everything here, for JSON."""
        return {**asdict(self), "holds": self.holds, "verdict": self.verdict}

    def check(self, statement: str, before: Any, now: Any) -> bool:
        """Record whether a figure of the receipt is the same now."""
        if before == now:
            self.confirmed.append(f"{statement}: {now}")
            return True
        self.refuted.append(f"{statement}: {before} in the receipt, {now} now")
        return False


def verify_receipt(
    path: StrPath, model: str | None = None, trace: str | None = None, python: str | None = None
) -> Verification:
    """Check the seal, load the model again, repeat the comparisons, and compare the figures with the receipt's.

    model, trace: where these are now, if not where the receipt says.   python: the interpreter that has the engine.
    Raises FormatError for a file that is no receipt or was changed since it was sealed.
    """
    receipt = read_receipt(path)
    out = Verification(os.fspath(path))
    try:
        _verify(receipt, out, model, trace, python)
    except (KeyError, TypeError, AttributeError) as problem:  # sealed, but not by this package
        raise FormatError(f"a field of the receipt is missing or of another type: {problem}", path=path) from problem
    return out


def _verify(
    receipt: dict[str, Any], out: Verification, model_path: str | None, trace: str | None, python: str | None
) -> None:
    subject, kind, results = receipt["subject"], receipt["kind"], receipt["results"]
    name, opponents = model_path or subject["model"], [result["opponent"] for result in results]
    try:
        model = load(name, backend="numpy")
    except BitNetRefError as error:  # the seal alone confirms nothing about the comparison
        out.unchecked.append(f"the model: {error}")
        return
    out.confirmed.append("the seal: no figure was changed since")
    same_config = out.check("config_sha256", subject["config_sha256"], config_hash(model.config))
    same_weights = out.check("weights_sha256", subject["weights_sha256"], weight_hash(model.weights))
    if not (same_config and same_weights):
        return
    long = long_tokens(model.config) if any(result.get("long") for result in results) else None
    if kind == "trace":
        file = Path(trace or subject["trace"])
        if not os.path.isfile(file):  # False also for a name that no file can have
            out.unchecked.append(f"the trace: there is no file {file}")
            return
        if not out.check("trace_sha256", subject["trace_sha256"], file_hash(file)):
            return
        crossings = [cross_trace(model, file, causes=False)]
    elif kind == "backends":
        crossings = cross_backends(model, subject["token_ids"], opponents, long=long)
    elif kind in ENGINES:
        runs = sorted({run["run"] for result in results for run in result.get("runs", ())})
        given: dict[str, Any] = {"python": python, "only": opponents, "long": long, "runs": runs}
        crossings = cross_engine(kind, name, subject["token_ids"], **given)
    else:
        out.unchecked.append(f"this version cannot repeat comparisons of the kind {kind!r}")
        return
    by_name = {crossing.opponent: crossing for crossing in crossings}
    for result in results:
        _check_result(out, result, by_name[result["opponent"]])


def _check_result(out: Verification, result: dict[str, Any], now: Crossing) -> None:
    opponent = result["opponent"]
    if result["unavailable"] is not None or now.unavailable is not None:
        place = "here" if now.unavailable is not None else "there"
        out.unchecked.append(f"{opponent}: not available {place}: {now.unavailable or result['unavailable']}")
        return
    out.check(f"{opponent}: agrees", result["agrees"], now.agrees)
    passed = {check.path: check.passed for check in now.paths}
    for check in result["paths"]:
        if check["path"] in passed:
            out.check(f"{opponent}, path {check['path']}", check["passed"], passed[check["path"]])
    recorded = [*result["comparisons"], *result.get("long", ())]
    for before, comparison in zip(recorded, [*now.comparisons, *now.long], strict=False):
        after = figures(comparison)
        for key in ("tensors", "accumulators", "first_divergence", "problem"):
            out.check(f"{opponent}, {before['mode']}: {key}", before[key], after[key])
