"""Receipts of a crossval run, and their verification: what can be computed again is, and must come out the same."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .. import __version__
from ..api import Model, load
from ..errors import BitNetRefError, FormatError
from .engines.outside import ENGINES, cross_engine
from .identity import config_hash, file_hash, weight_hash
from .opponents import Crossing, cross_backends, cross_trace
from .receipt import figures, read_receipt, seal


def make_receipt(
    kind: str,
    model_name: str,
    model: Model,
    tokens: Sequence[int],
    crossings: Sequence[Crossing],
    trace: str | os.PathLike[str] | None = None,
) -> dict[str, Any]:
    """A sealed receipt. kind: "backends", an engine's name, or "trace", with the trace's path."""
    results = [result(crossing) for crossing in crossings]
    subject: dict[str, Any] = {
        "model": model_name,
        "config_sha256": config_hash(model.config),
        "weights_sha256": weight_hash(model.weights),
        "token_ids": [int(token) for token in tokens],
    }
    if trace is not None:
        subject |= {"trace": os.fspath(trace), "trace_sha256": file_hash(trace)}
    ran = [crossing.agrees for crossing in crossings if crossing.agrees is not None]
    return seal(
        {
            "kind": kind,
            "bitnet_ref": __version__,
            "subject": subject,
            "results": results,
            "agrees": bool(ran) and all(ran),
        }
    )


def result(crossing: Crossing) -> dict[str, Any]:
    """What was found about one opponent, in the figures that a receipt keeps."""
    return {
        "opponent": crossing.opponent,
        "agrees": crossing.agrees,
        "verdict": crossing.verdict,
        "unavailable": crossing.unavailable,
        "failed": crossing.failed,
        "comparisons": [figures(found) for found in crossing.comparisons],
        "rule": crossing.rule,
        "contract": None if crossing.contract is None else figures(crossing.contract),
        "greedy": None if crossing.greedy is None else crossing.greedy.to_dict(),
    }


@dataclass
class Verification:
    """What verifying a receipt found."""

    path: str
    confirmed: list[str] = field(default_factory=list)
    refuted: list[str] = field(default_factory=list)
    unchecked: list[str] = field(default_factory=list)  # what could not be computed again here, and why

    @property
    def holds(self) -> bool:
        """Whether something was computed again and nothing came out otherwise."""
        return bool(self.confirmed) and not self.refuted

    @property
    def verdict(self) -> str:
        parts = [f"{len(self.confirmed)} statements confirmed"]
        parts += [f"{len(self.refuted)} REFUTED: {self.refuted[0]}"] if self.refuted else []
        parts += [f"{len(self.unchecked)} could not be checked here"] if self.unchecked else []
        return ("HOLDS: " if self.holds else "DOES NOT HOLD: ") + "; ".join(parts)

    def to_dict(self) -> dict[str, Any]:
        lists = {"confirmed": self.confirmed, "refuted": self.refuted, "unchecked": self.unchecked}
        return {"path": self.path, "holds": self.holds, "verdict": self.verdict, **lists}


def verify_receipt(
    path: str | os.PathLike[str], model: str | None = None, trace: str | None = None, python: str | None = None
) -> Verification:
    """Check the seal, load the model again, run what can be run, and hold the figures against the receipt's.

    model, trace: where these are now, if not where the receipt says.   python: the interpreter that has the engine.
    Raises FormatError for a file that is no receipt or was changed since it was sealed.
    """
    receipt = read_receipt(path)
    out = Verification(os.fspath(path))
    try:
        return _verify(receipt, out, model, trace, python)
    except (KeyError, TypeError, AttributeError) as problem:  # sealed, but not by us
        raise FormatError(f"the receipt lacks what one has: {problem}", path=path) from problem


def _verify(
    receipt: dict[str, Any], out: Verification, model_path: str | None, trace: str | None, python: str | None
) -> Verification:
    out.confirmed.append("the seal: no figure was changed since")
    subject, kind = receipt["subject"], receipt["kind"]
    name = model_path or subject["model"]
    try:
        model = load(name, backend="numpy")
    except BitNetRefError as error:
        out.unchecked.append(f"the model: {error}")
        out.confirmed.clear()  # a seal alone confirms nothing about the comparison
        return out
    same = True
    for what, now in (("config_sha256", config_hash(model.config)), ("weights_sha256", weight_hash(model.weights))):
        same = _statement(out, what, subject[what], now) and same
    if not same:
        return out
    if kind == "trace":
        file = Path(trace or subject["trace"])
        if not file.is_file():
            out.unchecked.append(f"the trace: there is no file {file}")
            return out
        if not _statement(out, "trace_sha256", subject["trace_sha256"], file_hash(file)):
            return out
        again = [cross_trace(model, file, causes=False)]
    elif kind == "backends":
        again = cross_backends(model, subject["token_ids"], [result["opponent"] for result in receipt["results"]])
    elif kind in ENGINES:
        only = [result["opponent"] for result in receipt["results"]]
        again = cross_engine(kind, name, subject["token_ids"], python=python, only=only)
    else:
        out.unchecked.append(f"comparisons of the kind {kind!r} cannot be run again by this version")
        return out
    by_name = {crossing.opponent: crossing for crossing in again}
    for before in receipt["results"]:
        _check_result(out, before, by_name[before["opponent"]])
    return out


def _check_result(out: Verification, result: dict[str, Any], now: Crossing) -> None:
    opponent = result["opponent"]
    if result["unavailable"] is not None or now.unavailable is not None:
        where = "here" if now.unavailable is not None else "there"
        out.unchecked.append(f"{opponent}: not available {where}: {now.unavailable or result['unavailable']}")
        return
    _statement(out, f"{opponent}: agrees", result["agrees"], now.agrees)
    for before, found in zip(result["comparisons"], now.comparisons, strict=False):
        after = figures(found)
        for key in ("tensors", "accumulators", "first_divergence", "problem"):
            _statement(out, f"{opponent}, {before['mode']}: {key}", before[key], after[key])


def _statement(out: Verification, what: str, before: Any, now: Any) -> bool:
    if before == now:
        out.confirmed.append(f"{what}: {now}")
        return True
    out.refuted.append(f"{what}: {before} in the receipt, {now} now")
    return False
