"""Runs what `convert` has written in the engine that it is meant for, through the engine's own plain loader."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from ...api import Model, load
from ...errors import BitNetRefError, printable
from ...formats.convert import engine_of
from ...formats.onnx.file import MODEL_FILE
from ...formats.open import read_config
from ..names import LOGITS
from ..opponents import default_tokens
from ..report import Crossing
from ..runs import FEW_NAMES
from ..tolerances import LOGITS_FLOOR
from ..trace import Trace
from ..types import StrPath
from . import llama_cpp, onnxruntime, transformers
from .engine import TIMEOUT_S, ExternalEngine, Judge, judge_by_contract

MLX_LM = ExternalEngine("mlx_lm", ("mlx_lm", "mlx", "numpy"), "'mlx[cpu]' mlx-lm")
_TOKENS = 8


class EngineRun(NamedTuple):
    """What came of it.

    status: "agrees"; "cannot tell", where a rounding flip may explain the logits; "differs"; "fails"; "not run"; "not
    finished", in its time.
    """

    name: str  # "transformers", "llama.cpp", ...
    status: str
    sentence: str

    @property
    def is_wrong(self) -> bool:
        """Whether the engine does not compute the model from the file."""
        return self.status in ("differs", "fails")


def run_written(path: StrPath, to: str, *, python: str | None = None, timeout_s: float = TIMEOUT_S) -> EngineRun | None:
    """Run a few tokens of what `convert` wrote to `path` as `to`, and compare with the reference on the same file.

    The engine runs in a process of its own; the whole model is in memory there, and then here.
    python: the interpreter that has the engine; None: this one.   timeout_s: how many seconds the engine may take.

    Returns None where this package is the engine, or no engine is known. Raises what reading the configuration raises.
    """
    path = Path(path)
    name = engine_of(read_config(path), to)
    if name in ("", "bitnet_ref"):
        return None
    if name not in _ENGINES:
        return EngineRun(name, "not run", f"not run in {name}, which has no Python package")
    engine, prepare = _ENGINES[name]
    missing = engine.missing(python)
    if missing is not None:
        return EngineRun(name, "not run", f"not run in {name}: {missing}")
    try:
        with TemporaryDirectory(prefix="bitnet-ref-crossval-") as folder:
            model, job, judge = prepare(path)
            out = Path(folder) / "candidate.safetensors"
            tokens = default_tokens(model)[:_TOKENS]
            (outcome,) = engine.record([{**job, "tokens": tokens, "out": str(out)}], python, timeout_s)
            if outcome.timed_out:
                return EngineRun(name, "not finished", f"not finished in {timeout_s:g} s by {name}")
            if outcome.failed is not None:
                return EngineRun(name, "fails", f"{name} fails on it: {printable(outcome.failed, keep='')}")
            if outcome.unavailable is not None:
                return EngineRun(name, "not run", f"not run in {name}: {printable(outcome.unavailable, keep='')}")
            crossing = Crossing(name)
            with Trace(out) as trace:
                judge(crossing, model, trace)
                return _run_in_words(name, crossing, trace)
    except BitNetRefError as error:
        return EngineRun(name, "not run", f"not compared with {name}: {error}")


def _run_in_words(name: str, crossing: Crossing, trace: Trace) -> EngineRun:
    if crossing.agrees is False:
        return EngineRun(name, "differs", f"{trace.engine} computes something else from it: {crossing.verdict}")
    free = crossing.comparisons[-1]
    op = next(op for op in free.ops if op.name == LOGITS)
    dtype = "" if trace.engine_dtype == "float32" else f" in {trace.engine_dtype}"
    sentence = f"run in {trace.engine}{dtype}: logits of {free.tokens} tokens within {op.max_abs:.1e}"
    if crossing.agrees is None:
        return EngineRun(name, "cannot tell", f"{sentence}, which a rounding flip may explain: {free.undecided}")
    if op.max_abs > LOGITS_FLOOR and free.logits is not None:
        sentence += f", relative L2 {op.relative_l2:.1e}, KL {free.logits.kl_max:.0e} at most, the same most likely"
        sentence += f" token at {free.logits.top1_agreement:.0%}"
    return EngineRun(name, "agrees", sentence + f", up to {free.up_to}" * bool(free.up_to))


_Prepared = tuple[Model, Mapping[str, Any], Judge]


def _folder(path: Path) -> _Prepared:
    model, job = transformers.load_for(path, None)
    return model, {**job, "names": FEW_NAMES}, judge_by_contract


def _gguf(path: Path) -> _Prepared:
    file = min(path.glob("*.gguf")) if path.is_dir() else path  # of several parts the first
    (attempt,) = llama_cpp.attempts(file)
    return *attempt.prepare(file.parent), attempt.judge


def _onnx(path: Path) -> _Prepared:
    model = load(path, backend="numpy")
    config = model.config
    cache = [config.num_hidden_layers, config.num_key_value_heads, config.head_dim]
    return model, {"model": str(path / MODEL_FILE), "outputs": {}, "cache": cache}, judge_by_contract


_ENGINES: dict[str, tuple[ExternalEngine, Callable[[Path], _Prepared]]] = {
    "transformers": (transformers.ENGINE, _folder),
    "mlx-lm": (MLX_LM, _folder),
    "llama.cpp": (llama_cpp.ENGINE, _gguf),
    "onnxruntime": (onnxruntime.ENGINE, _onnx),
}
