"""llama.cpp, through llama-cpp-python: on GGUF files that we write, and on a GGUF file as it is.

A GGUF file that is given runs as it is (`_own_file`). llama.cpp rounds the inputs of a matrix of quantised blocks to 8
bits, those of one in float16 or bfloat16 to that type, and no others. The reference does the same where
`families/block_rule` has all types of the file's matrices. Each op must then agree as in float32, and so must the
tokens before the first one with an input that float noise rounds to the other neighbour. The whole run is held to the
tolerance of 8-bit activations, for a flip moves others further on: in SmolLM2's 30 layers, float32 and float64 sums of
one rule are as far apart (KL 9e-3) as the rule and float activations. Elsewhere the reference takes the dequantised
weights with float activations, and the type of the matrices says which tolerance holds.

On files of ours it differs from the contract by design in three places, and is compared with a reference that does the
same:

    TQ1_0, TQ2_0   activations have a scale for each block of 256 features (ggml's Q8_K: -127 / the value of largest
                   magnitude, with its sign), where the model was trained with one for each token
    F32            matrices as floats: activations are not quantised at all
    bitnet         its architecture for sub-norms has silu; it has none with relu2 (bitnet-b1.58)

Embedding and head are float32 in these files: for a matrix in float16 ggml rounds the activations to float16 too.
Source: ggml/src/ggml-quants.c, quantize_row_q8_K_ref; llama.cpp, src/models/bitnet.cpp.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ...api import Model, load
from ...backends import Backend
from ...backends.backend import plain_weights
from ...errors import ConfigError
from ...families.block_rule import INPUTS, WIDTHS, RuledLinear, round_inputs, ruled_weights
from ...formats.checkpoint import Checkpoint, is_ternary, linear_names, linear_shape
from ...formats.gguf.config import architecture, architectures
from ...formats.gguf.export import write_gguf_model
from ...formats.gguf.file import open_gguf
from ...formats.open import open_checkpoint
from ...reference.layers import Array
from ...reference.weights import DenseWeight, LinearWeight
from ..compare import Comparison, View, compare
from ..explain.diagnose import Diagnoses
from ..explain.hypotheses.activations import BlockwiseBackend
from ..explain.replay import judge_trace
from ..names import ACC, INT8, NORMALIZED, SCALE, first_rows, linear_input
from ..opponents import reference_of
from ..report import Crossing, evidence
from ..trace import TraceRun
from ..types import Tensors
from .engine import Attempt, ExternalEngine, Prepared, search_causes

ENGINE = ExternalEngine("llama_cpp", ("llama_cpp", "numpy"), "llama-cpp-python")
BLOCK = 256
_BLOCKS = "activations quantised in blocks of 256"
_FLOATS = "matrices as floats, activations not quantised"
_SILU = "silu for relu2 (on both sides)"


def attempts(path: Path) -> list[Attempt]:
    """TQ1_0 and TQ2_0 where every matrix divides into blocks; F32 for a dense model and for other sizes. A GGUF file as
    it is."""
    if path.suffix == ".gguf":
        rounding = _activations_of(path)
        judge, explain = partial(_judge_own_file, rounding), partial(_explain_own_file, rounding)
        return [Attempt("llama.cpp, the file as it is", partial(_own_file, rounding, path), judge, explain=explain)]
    with open_checkpoint(path) as checkpoint:
        config = checkpoint.config
    ternary = [name for name in linear_names(config) if is_ternary(config, name)]
    divisible = all(linear_shape(config, name)[1] % BLOCK == 0 for name in ternary)
    kinds = ("tq1_0", "tq2_0") if ternary and divisible else ("f32",)
    rules = [_BLOCKS if kinds[0] != "f32" else _FLOATS] * bool(ternary)
    rules += [_SILU] * (config.sub_norms and config.activation != "silu")
    rule = "; ".join(rules) or None
    judges = {kind: partial(_judge, kind if ternary else None, rule) for kind in kinds}
    return [Attempt(f"llama.cpp {kind}", partial(_prepare, path, kind), judges[kind]) for kind in kinds]


_EXACT, _EIGHT_BITS, _RULE = "float32", "8-bit activations", "8-bit activations, by rule"
_ROUNDS = {
    "F32": _EXACT,
    "F64": _EXACT,
    "F16": "float16 activations",
    "BF16": "bfloat16 activations",
}  # what a type of matrix does to its input


# Experts, whose inputs are not recorded one by one, and Qwen3.5's output linear, whose columns `load` reorders
_WITHOUT_RULE = ("_exps.", ".ssm_out.")
_SCALED_LOGITS = "granite.logit_scale"  # the result of its head is scaled; the reference scales the input


def _activations_of(path: Path) -> str:
    """What llama.cpp rounds activations to, by the types of the file's matrices: the coarsest of them."""
    with open_gguf(path) as file:
        matrices = [t for t in file.tensors.values() if len(t.shape) > 1 and not t.name.startswith("token_embd")]
        embedding = file.tensors.get("token_embd.weight")
        if "output.weight" not in file.tensors and embedding is not None:
            matrices.append(embedding)  # it is the head too
        has_rule = _SCALED_LOGITS not in file.metadata
    used = {_ROUNDS.get(tensor.type.name, _EIGHT_BITS) for tensor in matrices}
    has_rule &= all(tensor.type.name in (*_ROUNDS, *INPUTS) for tensor in matrices)
    has_rule &= not any(part in tensor.name for tensor in matrices for part in _WITHOUT_RULE)
    if _EIGHT_BITS in used and has_rule:
        return _RULE
    return next((each for each in (_EIGHT_BITS, _ROUNDS["BF16"], _ROUNDS["F16"]) if each in used), _EXACT)


def _own_file(rounding: str, path: Path, folder: Path) -> Prepared:
    model = load(path, backend="numpy", activations="blocks" if rounding == _RULE else "auto")
    return model, _job(path, model, _is_interleaved(path))


def _job(file: Path, model: Model, is_interleaved: bool) -> dict[str, Any]:
    heads = [model.config.num_attention_heads, model.config.num_key_value_heads]
    long_names = [
        f"*.{NORMALIZED}",
        "*.hook_z",
        "*.hook_post",
    ]  # it has no int8 tensors: the inputs of linears show flips
    return {"model": str(file), "interleaved": is_interleaved, "heads": heads, "long_names": long_names}


def _is_interleaved(path: Path) -> bool:
    """Whether the rows of q and k are in the order of RoPE over neighbours."""
    with open_gguf(path) as file:
        known = architectures().get(str(file.metadata.get("general.architecture")))
    return known is not None and known[1].permuted


def _judge_own_file(rounding: str, crossing: Crossing, model: Model, trace: TraceRun) -> None:
    """By ggml's rule; or against dequantised weights with float activations, with the tolerance of its roundings.

    Products with 16-bit matrices are computed with inputs of their type first. Where that does not give llama.cpp's
    tensors, as of an ARM kernel that sums in float16, the tolerance decides.
    """
    reference = dense_model(reference_of(model))
    run, alone = View(trace), View(trace)
    run.engine_dtype = _EIGHT_BITS if rounding == _RULE else rounding
    alone.engine_dtype = {_EIGHT_BITS: f"{rounding}, alone", _RULE: _EXACT}.get(rounding, rounding)
    is_exact = False
    if rounding in (_ROUNDS["F16"], _ROUNDS["BF16"]):  # ggml's products: inputs of a matrix are rounded to its type
        ruled = Model(reference.config, ruled_weights(reference.weights), reference.backend, reference.path)
        by_op = judge_trace(ruled, trace)
        is_exact = by_op.agrees
    if not is_exact:
        by_op = judge_trace(reference, alone)
    if by_op.ops:
        crossing.comparisons.append(by_op)
    _, right = reference.run_with_cache(trace.token_ids)
    if rounding == _RULE:
        tokens = _count_equally_rounded(right, trace, reference)
        crossing.comparisons += _compare_beginning(right, trace, reference, tokens)
        if tokens == len(trace.token_ids):
            crossing.evidence = evidence(right, run, crossing.comparisons[-1])
            return
    free = compare(right, run, reference.config, trace.token_ids)
    free.up_to = "" if rounding == _EXACT else f"llama.cpp's {rounding}"
    free.up_to += " (op by op within float32's tolerance)" * is_exact
    crossing.comparisons.append(free)
    crossing.evidence = evidence(right, run, free)


def _explain_own_file(rounding: str, crossing: Crossing, model: Model, trace: TraceRun) -> Diagnoses:
    """The causes of the difference that `_judge_own_file` has found last."""
    reference, run = dense_model(reference_of(model)), View(trace)
    run.engine_dtype = _EIGHT_BITS if rounding == _RULE else rounding
    return search_causes(reference, run, crossing.comparisons[-1])


def _prepare(path: Path, kind: str, folder: Path) -> Prepared:
    file = folder / "model.gguf"
    with open_checkpoint(path) as checkpoint:
        _adapt_config(checkpoint)
        config = checkpoint.config
        write_gguf_model(checkpoint, file, kind, dense_type="F32")
    # A ternary file rounds the scales, so the model is read from the file
    model = load(path if config.quantization is None and not config.sub_norms else file, backend="numpy")
    return model, _job(file, model, architectures()[architecture(config)][1].permuted)


def _adapt_config(checkpoint: Checkpoint) -> None:
    config = checkpoint.config
    if config.sub_norms:
        checkpoint.config = replace(config, activation="silu")
    elif config.sliding_window is not None and architecture(config) == "llama":
        raise ConfigError("llama.cpp's architecture llama attends to all tokens", field="sliding_window")


def _judge(kind: str | None, rule: str | None, crossing: Crossing, model: Model, trace: TraceRun) -> None:
    """By the engine's own rule: op by op on the run's own inputs, and free-running up to the first rounding flip."""
    plain = reference_of(model)
    reference, tokens, crossing.rule = dense_model(plain) if kind == "f32" else plain, len(trace.token_ids), rule
    if kind in (None, "f32"):
        crossing.comparisons.append(judge_trace(reference, trace))
        _, right = reference.run_with_cache(trace.token_ids)
    else:
        backend = block_rule(plain)
        crossing.comparisons.append(judge_trace(reference, trace, backend=backend))
        _, right = plain.on(backend).run_with_cache(trace.token_ids)
        tokens = _count_unflipped(right, trace, backend, model)
        right = {name: array for name, array in right.items() if not name.endswith(_INTEGERS)}
    for free in _compare_beginning(right, trace, reference, tokens):
        crossing.comparisons.append(free)
        crossing.evidence = evidence(first_tokens(right, tokens), first_tokens(trace, tokens), free)
    if rule is not None:
        _, contract = plain.run_with_cache(trace.token_ids)
        crossing.contract = compare(contract, trace, model.config, trace.token_ids, own_engine=False)


_INTEGERS = (INT8, SCALE, ACC)


def block_rule(model: Model) -> Backend:
    """The reference with llama.cpp's activation quantisation, unless each matrix is one block wide: a block is a token
    then."""
    widths = {w.bit_linear.in_features for _, w in model.weights.linears() if w.bit_linear is not None}
    threads = model.backend.threads
    return Backend("float32", threads) if widths == {BLOCK} else BlockwiseBackend(BLOCK, threads)


def first_tokens(run: Tensors, count: int) -> dict[str, Array]:
    """A run cut to its first tokens."""
    return {name: first_rows(name, np.asarray(run[name]), count) for name in run}


def _compare_beginning(right: Tensors, trace: TraceRun, reference: Model, tokens: int) -> list[Comparison]:
    """Of the tokens before the first rounding flip, where there are any."""
    if not tokens:
        return []
    mine, theirs = first_tokens(right, tokens), first_tokens(trace, tokens)
    free = compare(mine, theirs, reference.config, trace.token_ids[:tokens], own_engine=False)
    if tokens < len(trace.token_ids):
        free.mode = f"free-running up to token {tokens}, where an activation rounds to its other neighbour"
    return [free]


def _count_equally_rounded(right: Tensors, trace: TraceRun, model: Model) -> int:
    """The number of tokens before the first one with an input that ggml's rule rounds differently in the two runs."""
    first = len(trace.token_ids)
    for name, w in model.weights.linears():
        source = linear_input(name, model.config)
        if isinstance(w, RuledLinear) and w.inputs in WIDTHS and source in trace and source in right:
            count = len(trace.token_ids)
            both = (np.asarray(run[source], dtype=np.float32).reshape(count, -1) for run in (right, trace))
            mine, theirs = (round_inputs(x, w.inputs).x_q for x in both)
            first = min([first, *np.flatnonzero((mine != theirs).any(axis=1)).tolist()])
    return first


def _count_unflipped(right: dict[str, np.ndarray], trace: TraceRun, backend: Backend, model: Model) -> int:
    """The number of tokens before the first one with an activation that rounds differently from the reference's."""
    first = len(trace.token_ids)
    for name in right:
        source = linear_input(name.rpartition(".")[0], model.config) if name.endswith(INT8) else ""
        if source in trace:
            x_q, _ = backend.quantize_activations(np.asarray(trace[source]).reshape(len(trace.token_ids), -1))
            flipped = np.flatnonzero((x_q != right[name]).any(axis=-1))
            first = min([first, *flipped.tolist()])
    return first


def dense_model(model: Model) -> Model:
    """The model with dequantised float matrices, so without activation quantisation."""

    def dense(w: LinearWeight) -> LinearWeight:
        ternary = w.bit_linear
        if ternary is None:
            return w
        return DenseWeight(ternary.ternary() * np.float32(ternary.w_dequant_scale), w.bias, name=w.name)

    weights = plain_weights(model.weights)
    layers = tuple(layer.map_linears(dense) for layer in weights.layers)
    weights = replace(weights, layers=layers)
    return Model(replace(model.config, quantization=None), weights, model.backend, model.path)
