"""Receipts: a JSON file of what was compared, with what, where, and what came out, sealed by its own hash.

The seal is no signature: it tells that a figure was changed by accident or by an editor, not who wrote the file.
`crossval.verify_receipt` computes everything again that can be.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import FormatError
from ..system.atomic import atomic_path
from ..system.json_file import read_json_object
from ..system.threads import available_cpus
from .compare import Comparison

FORMAT, VERSION = "bitnet_ref.receipt", 1
_MAX_BYTES = 64_000_000


def figures(found: Comparison) -> dict[str, Any]:
    """A comparison in the figures that a receipt keeps."""
    full = found.to_dict()
    kept = ("mode", "tokens", "problem", "logits", "n_flips", "agrees", "verdict", "accumulators", "first_divergence")
    worst: dict[str, float] = {}
    for op in found.ops:
        worst[op.kind] = max(worst.get(op.kind, 0.0), op.relative_l2)
    return {
        **{key: full[key] for key in kept},
        "tensors": len(found.ops),
        "unequal_tensors": sum(not op.equal for op in found.ops),
        "missing_tensors": len(found.missing),
        "largest_relative_l2": {kind: str(e) if not np.isfinite(e) else e for kind, e in worst.items()},
    }


def machine() -> dict[str, Any]:
    """Where this runs."""
    return {
        "system": f"{platform.system()} {platform.release()}",
        "architecture": platform.machine(),
        "cpus": available_cpus(),
        "python": platform.python_version(),
        "numpy": np.__version__,
    }


def seal(contents: dict[str, Any]) -> dict[str, Any]:
    """A receipt of these contents: with format, date, machine, and the hash of all of it."""
    now = datetime.now(UTC).isoformat(timespec="seconds")
    body = {"format": FORMAT, "version": VERSION, "created": now, "machine": machine(), **contents}
    return {**body, "sha256": receipt_hash(body)}


def receipt_hash(receipt: dict[str, Any]) -> str:
    """SHA-256 of a receipt without its own hash, as JSON with sorted keys and no spaces."""
    body = {key: value for key, value in receipt.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def write_receipt(path: str | os.PathLike[str], receipt: dict[str, Any]) -> None:
    with atomic_path(path) as temporary:
        temporary.write_text(json.dumps(receipt, indent=1, allow_nan=False) + "\n", encoding="utf-8")


def read_receipt(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The receipt, whole and as it was sealed. Raises FormatError."""
    path = Path(path)
    receipt = read_json_object(path, FormatError, _MAX_BYTES)
    if receipt.get("format") != FORMAT or receipt.get("version") != VERSION:
        raise FormatError(f'expected "{FORMAT}" version {VERSION}', path=path, field="format")
    if receipt.get("sha256") != receipt_hash(receipt):
        raise FormatError(
            "the contents are not those that were sealed: something was changed", path=path, field="sha256"
        )
    return receipt
