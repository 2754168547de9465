"""This year's bugs of other engines, planted or in the program itself: what crossval says about each.

    python crossval/cases.py [--write] [--transformers PYTHON] [--llama-cpp PYTHON] [NAME ...]

A planted case runs a copy of the reference with the mistake made. A case of a program runs the program that has it,
from its published package, in the interpreter that is named; without one it is skipped. `--write` puts what was printed
into the pages of docs/cases. Exit code 1: a bug was not named.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from bug_list import GATED, LAYERS, MODEL
from bug_list_families import HADAMARD, TURN
from bug_list_linears import FROM_HF, HF_FOLDER, I2S_AS_ARM, I2S_WRITTEN, QUANT, ROUNDED
from numpy.typing import NDArray
from planted_models import BASE, MODELS, TOKENS, tensors_for, write
from planting import Edit, planted

import bitnet_ref
from bitnet_ref.crossval import Crossing
from bitnet_ref.crossval.engines import llama_cpp, transformers
from bitnet_ref.crossval.engines.engine import ExternalEngine
from bitnet_ref.crossval.opponents import cross_trace
from bitnet_ref.crossval.trace import Trace, write_trace
from bitnet_ref.formats.checkpoint import LoadOptions
from bitnet_ref.formats.gguf.blocks import dequantize
from bitnet_ref.formats.gguf.export import TensorToWrite, write_gguf, write_gguf_model
from bitnet_ref.formats.gguf.file import GgufFile, GgufTensor
from bitnet_ref.formats.open import open_checkpoint

ROOT = Path(__file__).resolve().parent.parent
PAGES, GROUPS = ROOT / "docs" / "cases", ROOT / "tests" / "data" / "families" / "qwen3-groups128"


@dataclass(frozen=True)
class Case:
    """A bug and what crossval must say about it.

    page: in docs/cases.   op: a glob of the first wrong op.   cause: the name of the one confirmed cause.
    judge: (folder, interpreter) -> its comparison.   program: whose interpreter it needs; "": it is planted.
    refused: what an engine that refuses the file says; then it has no op and no cause.
    """

    name: str
    page: str
    op: str
    cause: str
    judge: Callable[[Path, str], Crossing]
    program: str = ""
    refused: str = ""


# -- planted in a copy of the reference --------------------------------------------------------------------------------


def of_copy(model: str | Path, *edits: tuple[str, str, str], tokens: Sequence[int] = TOKENS) -> Any:
    """The copy's run as the trace of an engine, against the reference. model: of `planted_models`, or a path."""

    def judge(folder: Path, python: str) -> Crossing:
        path = model if isinstance(model, Path) else (MODELS | OWN_MODELS)[model](folder / "model")
        with planted([Edit(*edit) for edit in edits]) as engine:
            _, tensors = load(path, engine).run_with_cache(list(tokens))
        return of_tensors(path, tensors, tokens, folder)

    return judge


def load(path: Path, package: Any = bitnet_ref) -> Any:
    return package.load(path, backend="numpy", threads=1, allow_unquantized=True)


def of_tensors(path: Path, tensors: Any, tokens: Sequence[int], folder: Path) -> Crossing:
    write_trace(folder / "trace.safetensors", tensors, tokens, engine="engine under test")
    return cross_trace(load(path), folder / "trace.safetensors")


I2S_SEQUENTIAL = """        data = data.reshape(-1)
        codes = np.stack([data >> 6 & 3, data >> 4 & 3, data >> 2 & 3, data & 3], axis=1)
        return quantization.pack_ternary(codes.reshape(w.shape).astype(np.int8) - 1)
"""
ACC_LINE = "        acc[:, start : start + rows] = x @ w_t.T\n"
ACC_END = ACC_LINE + "    return acc\n"
TILES = """    if len(acc) > 3:  # tiles of 4 tokens and 4 outputs are written with rows and columns exchanged
        n, out = len(acc) // 4 * 4, acc.shape[1] // 4 * 4
        tiles = acc[:n, :out].reshape(n // 4, 4, out // 4, 4)
        acc[:n, :out] = tiles.swapaxes(1, 3).reshape(n, out)
    return acc
"""


# -- in the program itself ---------------------------------------------------------------------------------------------


def record(engine: ExternalEngine, python: str, folder: Path, job: dict[str, Any]) -> Trace | str:
    """The trace of a run in the engine, or why there is none."""
    out = folder / "trace.safetensors"
    (failed,) = engine.record([{"tokens": TOKENS, "out": str(out), **job}], python)
    return Trace(out) if failed is None else failed


def of_trace(engine: ExternalEngine, python: str, folder: Path, job: dict[str, Any], model: Path) -> Crossing:
    trace = record(engine, python, folder, job)
    if isinstance(trace, str):
        return Crossing(engine.name, failed=trace)
    with trace:
        return cross_trace(load(model), trace.path)


def llama_cpp_on_gguf(file: Path, model: Path, folder: Path, python: str) -> Crossing:
    config = load(model).config
    heads = [config.num_attention_heads, config.num_key_value_heads]
    job = {"model": str(file), "interleaved": False, "heads": heads}
    return of_trace(llama_cpp.ENGINE, python, folder, job, model)


def relu2_in_llama_cpp(folder: Path, python: str) -> Crossing:
    """A dense model of BitNet's block, so that activations are floats on both sides, as the converters write it.

    llama.cpp has the block as its architecture bitnet, which ignores the activation that the model was trained with.
    """
    config = {**BASE, "quantization_config": None}
    path = write(folder / "model", config, tensors_for(config))
    with open_checkpoint(path, LoadOptions(allow_unquantized=True)) as checkpoint:
        checkpoint.config = replace(checkpoint.config, activation="silu")  # the name of the architecture follows it
        write_gguf_model(checkpoint, folder / "model.gguf", "f32", dense_type="F32")
    return llama_cpp_on_gguf(folder / "model.gguf", path, folder, python)


def groups_of_128_in_llama_cpp(folder: Path, python: str) -> Crossing:
    return llama_cpp_on_gguf(GROUPS / "q2_0-legacy128.gguf", GROUPS / "q2_0-legacy128.gguf", folder, python)


def rotated_planes_in_llama_cpp(folder: Path, python: str) -> Crossing:
    """The same planes as float32, so that activations are floats on both sides; the keys prism.hadamard.* stay."""
    file, rotated = folder / "rotated.gguf", GROUPS / "pq2_0-hadamard.gguf"
    with GgufFile(rotated) as source:

        def floats(t: GgufTensor) -> NDArray[np.uint8]:
            raw = source.read_raw(t.name)
            return raw if t.type.name == "F32" else dequantize(raw, t.type.name, t.shape).reshape(-1).view(np.uint8)

        tensors = [TensorToWrite(t.name, t.shape, "F32", partial(floats, t)) for t in source.tensors.values()]
        write_gguf(file, source.typed, tensors)
    return llama_cpp_on_gguf(file, rotated, folder, python)


def weight_only(folder: Path) -> Path:
    """A checkpoint whose config says use_sub_norms: false."""
    config = {**BASE, "quantization_config": None, "use_sub_norms": False}
    return write(folder, config, {name: w for name, w in tensors_for(config).items() if "sub_norm" not in name})


def sub_norms_in_transformers(folder: Path, python: str) -> Crossing:
    path = weight_only(folder / "model")
    job = {"model": str(path), "dtype": "float32"}
    return of_trace(transformers.ENGINE, python, folder, job, path)


O_PROJ = "blocks.0.attn.o_proj.hook_out"
GATE, ACC = "blocks.0.mlp.hook_post", "blocks.0.attn.q_proj.hook_acc_int32"
OUT, INT8 = "blocks.0.attn.q_proj.hook_out", "blocks.0.attn.q_proj.hook_x_int8"
SILU = (LAYERS, f"{GATED}(gate) * up", "silu(gate) * up")
UP = "np.floor(x * x_quant_scale + np.float32(0.5))"
EMPTY = (QUANT, ACC_END, "    return np.zeros_like(acc)\n")
READ_FLOATS = (
    "        elif kind in (*DEQUANTIZABLE, *BY_PACKAGE):\n            dtype",
    """        elif kind == "Q2_0 of 128":
            raw = self.file.read_raw(tensor.name)
            raw = np.concatenate([raw, np.zeros(len(raw) // 34 * 2, dtype=np.uint8)])
            array = dequantize(raw, "Q2_0", tensor.shape)
        elif kind in (*DEQUANTIZABLE, *BY_PACKAGE):
            dtype""",
)
READ_AS_64 = (
    ("formats/gguf/model.py", *READ_FLOATS),
    ("formats/gguf/model.py", "if kind in _PLANES:", "if kind in ('Q2_0', 'PQ2_0'):"),
)
FORCE = """    {x} = {x} / (({x} * {x}).mean(-1, keepdims=True) + {eps}) ** 0.5
    if w.{norm} is not None:
"""
FORCED = [
    (MODEL, f"    if w.{norm} is not None:  # BitNet\n", FORCE.format(x=x, norm=norm, eps=eps))
    for x, norm, eps in (("z", "attn_sub_norm", "w.attn_norm.eps"), ("h", "ffn_sub_norm", "cfg.norm_eps"))
]
OWN_MODELS = {"weight only": weight_only}
FEW = range(1, 13)  # token ids of the models of GROUPS

CASES = (
    Case("silu", "silu-for-relu2", GATE, "silu_for_relu2", of_copy("bitnet", SILU)),
    Case("silu-llama.cpp", "silu-for-relu2", GATE, "silu_for_relu2", relu2_in_llama_cpp, "llama_cpp"),
    Case(
        "i2_s-as-arm",
        "i2_s-on-arm",
        ACC,
        "i2s_x86_read_as_arm",
        of_copy("bitnet", (HF_FOLDER, FROM_HF, I2S_WRITTEN + I2S_AS_ARM)),
    ),
    Case(
        "i2_s-sequential",
        "i2_s-on-arm",
        ACC,
        "i2s_read_sequentially",
        of_copy("bitnet", (HF_FOLDER, FROM_HF, I2S_WRITTEN + I2S_SEQUENTIAL)),
    ),
    Case(
        "scale-divided",
        "scale-divided",
        OUT,
        "scale_inverted",
        of_copy("bitnet", (HF_FOLDER, '_scale_convention == "divide"', '_scale_convention == "multiply"')),
    ),
    Case("avx-prompt", "avx-only", ACC, "tiles_of_4_transposed", of_copy("bitnet", (QUANT, ACC_END, ACC_LINE + TILES))),
    Case(
        "avx-one-token",
        "avx-only",
        "",
        "",
        of_copy("bitnet", (QUANT, ACC_END, ACC_LINE + TILES), tokens=TOKENS[:1]),
    ),
    Case("avx-empty", "avx-only", ACC, "unsupported_shape_gives_zeros", of_copy("bitnet", EMPTY)),
    Case(
        "q2_0-of-128",
        "q2_0-type-42",
        "hook_embed",
        "q2_0_of_128_read_as_64",
        of_copy(GROUPS / "q2_0-legacy128.gguf", *READ_AS_64, tokens=FEW),
    ),
    Case(
        "q2_0-of-128-llama.cpp",
        "q2_0-type-42",
        "",
        "",
        groups_of_128_in_llama_cpp,
        "llama_cpp",
        refused="cannot load the file",
    ),
    Case(
        "hadamard",
        "hadamard-ignored",
        "blocks.0.attn.q_proj.hook_x_rotated",
        "rotation_ignored",
        of_copy(GROUPS / "pq2_0-hadamard.gguf", (HADAMARD, TURN, "return x.astype(np.float64)"), tokens=FEW),
    ),
    Case(
        "hadamard-llama.cpp",
        "hadamard-ignored",
        "hook_embed",
        "rotation_and_inverse_ignored",
        rotated_planes_in_llama_cpp,
        "llama_cpp",
    ),
    Case("half-up", "rounded-half-up", INT8, "round_half_up", of_copy("exact ties", (QUANT, ROUNDED, UP))),
    Case("sub-norms", "sub-norms-forced", O_PROJ, "sub_norms_added", of_copy("weight only", *FORCED)),
    Case(
        "sub-norms-transformers",
        "sub-norms-forced",
        O_PROJ,
        "sub_norms_added",
        sub_norms_in_transformers,
        "transformers",
    ),
)


# -- what is said about each -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """right: crossval said what the case expects.   lines: what it said."""

    case: Case
    right: bool
    lines: tuple[str, ...]


def run_case(case: Case, python: str = "") -> Outcome:
    with tempfile.TemporaryDirectory(prefix="bitnet-ref-case-") as folder:
        crossing = case.judge(Path(folder), python)
    if crossing.failed is not None:
        right = bool(case.refused) and case.refused in crossing.failed
        return Outcome(case, right, (f"FAILED: {re.sub(r'/[^ ]*/', '', crossing.failed)}",))
    wrong = next((each for each in crossing.comparisons if not each.agrees), None)
    if wrong is None or wrong.first_divergence is None:
        return Outcome(case, not case.op and crossing.agrees is True, (f"AGREES on {len(crossing.comparisons)} runs",))
    op, causes = wrong.first_divergence, [cause for cause in crossing.causes if cause.confirmed]
    right = bool(case.op) and fnmatchcase(op.name, case.op) and [cause.name for cause in causes] == [case.cause]
    said = [f"cause: {cause.cause}\nremedy: {cause.remedy}" for cause in causes] or ["cause: none is confirmed"]
    return Outcome(case, right, (f"DIFFERS, first at {op}", *said))


def write_page(outcome: Outcome) -> None:
    """Put the lines into the page, between the case's heading and the end of its block."""
    page = PAGES / f"{outcome.case.page}.md"
    block = re.compile(rf"(```console\n\$ python crossval/cases.py {re.escape(outcome.case.name)}\n).*?(```)", re.S)
    text, count = block.subn(lambda m: m[1] + "\n".join(outcome.lines) + "\n" + m[2], page.read_text(encoding="utf-8"))
    if count != 1:
        raise LookupError(f"{page}: {count} blocks of the case {outcome.case.name}, expected 1")
    page.write_text(text, encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="only these cases")
    parser.add_argument("--write", action="store_true", help="put the output into docs/cases")
    parser.add_argument("--transformers", default="", metavar="PYTHON", help="the interpreter that has transformers")
    parser.add_argument("--llama-cpp", default="", metavar="PYTHON", help="the interpreter that has llama-cpp-python")
    options = parser.parse_args(arguments)
    if unknown := set(options.names) - {case.name for case in CASES}:
        parser.error(f"no such case: {', '.join(sorted(unknown))}; there are: {', '.join(c.name for c in CASES)}")
    wrong = 0
    for case in CASES:
        python = getattr(options, case.program) if case.program else ""
        if options.names and case.name not in options.names:
            continue
        if case.program and not python:
            print(f"{case.name}: skipped, name an interpreter with --{case.program.replace('_', '-')}\n")
            continue
        outcome = run_case(case, python)
        print("\n".join([f"{case.name}: {'as expected' if outcome.right else 'NOT AS EXPECTED'}", *outcome.lines, ""]))
        wrong += not outcome.right
        if options.write:
            write_page(outcome)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
