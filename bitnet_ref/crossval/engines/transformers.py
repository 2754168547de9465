"""Hugging Face transformers with eager attention, in float32 and bfloat16."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from ...api import Model, load
from ...errors import ConfigError
from ...formats.checkpoint import Checkpoint, is_ternary, linear_names
from ...formats.hf.writer import write_hf
from ...formats.open import open_checkpoint
from ...system.json_file import read_json_object
from ..report import Crossing
from ..tolerances import NARROW_FLOATS
from ..trace import TraceRun
from .engine import Attempt, ExternalEngine, Prepared, explain_by_contract, judge_by_contract

ENGINE = ExternalEngine("transformers", ("transformers", "torch", "accelerate"), "'transformers>=5' torch accelerate")
_MAX_CONFIG_BYTES = 1_000_000
_BFLOAT16 = (
    "bfloat16 cannot hold the integers exactly: each tensor is held to a relative L2 of "
    f"{NARROW_FLOATS['bfloat16'].relative_l2}"
)


_TAKES_MASTERS = (
    "transformers would take this folder's master weights as they are, because its config has no quantization_config: "
    "the model's own code quantises them"
)


def attempts(path: Path) -> list[Attempt]:
    """float32 and bfloat16. A checkpoint of master weights, which are quantised as they are loaded, also packed."""
    variants = [("transformers float32", "float32", False), ("transformers bfloat16", "bfloat16", False)]
    unavailable = None
    with open_checkpoint(path) as checkpoint:
        if _has_masters(checkpoint):
            variants.append(("transformers float32, packed", "float32", True))
            if _is_readable(path) and not _config(path).get("quantization_config"):
                unavailable = _TAKES_MASTERS
    out = []
    for name, dtype, packed in variants:
        prepare, reason = partial(_prepare, path, dtype, packed), None if packed else unavailable
        out.append(Attempt(name, prepare, _judge, reason, explain_by_contract))
    return out


def _judge(crossing: Crossing, model: Model, trace: TraceRun) -> None:
    judge_by_contract(crossing, model, trace)
    if trace.engine_dtype == "bfloat16":
        crossing.rule = _BFLOAT16


def _has_masters(checkpoint: Checkpoint) -> bool:
    ternary = [name for name in linear_names(checkpoint.config) if is_ternary(checkpoint.config, name)]
    return bool(ternary) and checkpoint.master(ternary[0]) is not None


def _prepare(path: Path, dtype: str, packed: bool, folder: Path) -> Prepared:
    if packed or not _is_readable(path):
        with open_checkpoint(path) as checkpoint:
            dense = checkpoint.config.quantization is None
            kind = "hf-bf16" if dense or (_has_masters(checkpoint) and not packed) else "hf-packed"
            path = folder / "model"
            path.mkdir()
            write_hf(checkpoint, path, kind)
    return load_for(path, dtype)


def load_for(path: Path, dtype: str | None) -> Prepared:
    """A folder's model, and the job for the recorder.   dtype: None is the folder's own"""
    model = load(path, backend="numpy")
    # dynamic RoPE depends on the length of the call: only one token per call gives each token its own angles
    one_at_a_time = model.config.rope.rope_type in ("dynamic", "longrope")
    return model, {"model": str(path), "dtype": dtype, "one_at_a_time": one_at_a_time}


def _is_readable(path: Path) -> bool:
    """Whether transformers reads it unconverted: a folder, with today's config names rather than 1bitLLM's."""
    return path.is_dir() and "weight_bits" not in _config(path)


def _config(folder: Path) -> dict[str, Any]:
    return read_json_object(folder / "config.json", ConfigError, _MAX_CONFIG_BYTES)
