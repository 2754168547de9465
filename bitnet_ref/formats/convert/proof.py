"""Compares two checkpoints in any formats: whether they hold the same model, part by part, and compute the same."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from itertools import zip_longest
from typing import Any

import numpy as np

from ...backends import Backend, available_backends, choose_backend
from ...backends.paged_cache import CacheSpec
from ...backends.run import run
from ...errors import TokenizerError
from ...families import KINDS
from ...reference.cache import TokenBatch
from ...reference.config import ModelConfig
from ...reference.layers import Floats
from ...reference.weights import DenseWeight, LayerWeights, LinearWeight, ModelWeights, Norm, widen_sums
from ..checkpoint import (
    Checkpoint,
    Progress,
    choose_kind,
    is_ternary,
    linear_names,
    part_count,
    parts,
    read_embedding,
    read_head,
    read_layer,
    ticker,
)
from ..hf.masters import MEAN_ERROR

# A scale or a float tensor may come back rounded by a narrower format: by half a unit in the last place of float16's 11
# bits, or of bfloat16's 8 bits, or of float16's smallest step.
_ROUNDING, _BF16_ROUNDING, _SMALLEST = 2.0**-11, 2.0**-8, 2.0**-25
_SUMMATION = 1e-5  # of the largest logit: float32 sums of a few thousand terms in another order
_LEAST_KL = 1e-9  # that is told: less is summation in another order
_TOKENS = 8
_TEXT = "Once upon a time, 12 wörlds began.\n\n  Then \U0001f600 they   ended!"
_BLOCK_VALUES = 1 << 22
# Fields that name the writer or the way of storage, and those that are compared with the tokenizer
_NOT_COMPARED = ("model_type", "quantization", "bos_token_id", "eos_token_ids")


@dataclass
class Tally:
    """How many tensors of one kind came back equal."""

    equal: int = 0
    total: int = 0
    largest: float = 0.0  # largest relative difference
    first: str | None = None  # the first tensor that differs

    def add(self, name: str, difference: float) -> None:
        self.total += 1
        self.equal += difference == 0
        self.largest = max(self.largest, difference)
        if difference and self.first is None:
            self.first = name


@dataclass
class Proof:
    """The result of a comparison. `holds`: the same model, except for rounding that the format itself imposes."""

    planes: Tally = field(default_factory=Tally)  # ternary matrices, compared bit for bit
    scales: Tally = field(default_factory=Tally)
    tensors: Tally = field(default_factory=Tally)  # norms, biases, dense matrices
    config: dict[str, tuple[Any, Any]] = field(default_factory=dict)  # fields that differ: (source, written)
    tokenizer: str = "none"  # "equal", "none", or what differs
    tokens: int = 0  # whose logits were compared
    logits_equal: bool = False
    logits_difference: float = 0.0  # largest absolute
    kl: float = 0.0  # nats, of the probabilities at a position, the mean of all positions
    same_choice: bool = True  # the same most likely token at every position
    problems: list[str] = field(default_factory=list)

    @property
    def exact(self) -> bool:
        """Whether nothing was rounded."""
        tallies = (self.planes, self.scales, self.tensors)
        return self.holds and not self.config and all(tally.equal == tally.total for tally in tallies)

    @property
    def holds(self) -> bool:
        return not self.problems

    @property
    def verdict(self) -> str:
        """One line."""
        if self.problems:
            return "; ".join(self.problems)
        if self.exact:
            identical = f"identical: {self.planes.total} ternary planes, every scale and every tensor"
            if not self.tokens:
                return identical
            if self.logits_equal:
                return f"{identical}, and all logits"
            return f"{identical}; logits within {self.logits_difference:.1e}: float matrices are stored otherwise"
        logits = f"; logits within {self.logits_difference:.1e}" if self.tokens else ""
        if self.tokens and self.kl >= _LEAST_KL:
            choice = "the same" if self.same_choice else "not always the same"
            logits += f", KL {self.kl:.0e}, {choice} most likely token"
        return f"all {self.planes.total} ternary planes identical; the format rounds {self.rounded}{logits}"

    @property
    def rounded(self) -> str:
        """What came back rounded, in words."""
        tallies = (("scales", self.scales), ("other tensors", self.tensors))
        words = [
            f"{tally.total - tally.equal} of the {kind} (by at most {tally.largest:.1e} of their size)"
            for kind, tally in tallies
            if tally.equal < tally.total
        ]
        return " and ".join([*words, *(f"config.{name}" for name in self.config)])

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON values."""
        return asdict(self) | {"holds": self.holds, "exact": self.exact, "verdict": self.verdict}


def prove(
    source: Checkpoint, written: Checkpoint, phase: Callable[[str], Progress] | None = None, compute: bool = True
) -> Proof:
    """Compare `written` with `source`, with one tensor of each in memory.

    compute: also run a few tokens through both, with one layer in memory, and compare the logits.
    phase: returns the progress callback of the phase "comparing" or "computing".
    """
    proof = Proof()
    _compare_configs(source, written, proof)
    if not proof.problems:  # else shapes may differ
        _compare_parts(source, written, proof, phase("comparing") if phase else None)
        _compare_tokenizers(source, written, proof)
    if compute and not proof.problems:
        _compare_logits(source, written, proof, phase("computing") if phase else None)
    return proof


def _compare_configs(source: Checkpoint, written: Checkpoint, proof: Proof) -> None:
    ours, theirs = _settings(source.config), _settings(written.config)
    for name, value in ours.items():
        if value != theirs[name] and name not in _NOT_COMPARED:
            proof.config[name] = value, theirs[name]
            if not _nearly(value, theirs[name]):
                proof.problems.append(f"config.{name} was {value!r} and is {theirs[name]!r}")


def _settings(config: ModelConfig) -> dict[str, Any]:
    """The fields, without the factor of longrope: its effect is in attention_factor, and a GGUF does not have it."""
    out = asdict(config)
    for value in out.values():
        if isinstance(value, dict) and value.get("rope_type") == "longrope":
            del value["factor"]
    return out


def _nearly(a: Any, b: Any) -> bool:
    """Whether values are equal, or numbers that are equal as float32, as GGUF stores them."""
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_nearly(a[key], b[key]) for key in a)
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(map(_nearly, a, b))
    if isinstance(a, float) and isinstance(b, float):
        return bool(np.float32(a) == np.float32(b))
    return bool(a == b)


def _compare_parts(source: Checkpoint, written: Checkpoint, proof: Proof, progress: Progress | None) -> None:
    tick = ticker(progress, part_count(source.config))
    quantization = written.config.quantization
    of_masters = quantization is not None and quantization.quantization_mode == "online"  # a scale is their mean
    pairs: Any = zip_longest(_computed_parts(source), _computed_parts(written), fillvalue=("nothing", None))
    for (name, a), (other, b) in pairs:
        if name != other or _kind(a) != _kind(b):
            proof.problems.append(f"{name} was {_kind(a)}, and {other} is {_kind(b)}")
            return
        for detail, tally, difference in _differences(a, b, proof):
            rounding = 0.0 if tally is proof.planes else _BF16_ROUNDING if written.kind == "gguf-bf16" else _ROUNDING
            if tally is proof.scales and of_masters:
                rounding = MEAN_ERROR
            if difference > rounding and getattr(a, "kind", None) == getattr(b, "kind", None) == "dense" and not detail:
                rounded = written.rounded(name, a.array)
                if rounded is not a.array and np.array_equal(rounded, b.array):  # as the format's blocks round it
                    difference = rounding = _block_difference(a.array, b.array)
            tally.add(f"{name}{detail}", difference)
            if difference > rounding:
                proof.problems.append(f"{name}{detail} differs")
        tick()


def _computed_parts(checkpoint: Checkpoint) -> Iterator[tuple[str, Any]]:
    """(name, part) of every part as the model computes with it."""
    for name, part in parts(checkpoint):
        yield name, choose_kind(checkpoint, name, part) if isinstance(part, LinearWeight) else part


def _kind(part: Any) -> str:
    if part is None:
        return "absent"
    if isinstance(part, np.ndarray):
        return f"a vector of {part.size}" if part.ndim == 1 else f"an array of shape {part.shape}"
    return f"a {KINDS[part.kind].words} matrix {part.shape}"


def _differences(a: Any, b: Any, proof: Proof) -> Iterator[tuple[str, Tally, float]]:
    """(suffix that names a detail of the part, its tally, relative difference)"""
    if isinstance(a, np.ndarray):
        yield "", proof.tensors, _difference(a, b)
        return
    details = KINDS[a.kind].details
    ours, theirs = details(a, b), details(b, a)
    for name in dict.fromkeys((*ours, *theirs)):
        x, y = ours.get(name), theirs.get(name)
        is_plane = x is not None and x.dtype == np.uint8
        tally = proof.planes if is_plane else proof.scales if "scale" in name else proof.tensors
        yield name and f" ({name[1:]})", tally, _difference(x, y)
    if a.bias is not None or b.bias is not None:
        yield " (bias)", proof.tensors, _difference(a.bias, b.bias)


def _difference(a: Floats | None, b: Floats | None) -> float:
    """Largest relative difference, computed in blocks. Values that float16 rounds to zero equal zero."""
    if a is None or b is None or a.shape != b.shape:
        return float("inf")
    if a.dtype.kind in "ui":  # no format rounds codes, or an order
        return float(not np.array_equal(a, b))
    a, b, largest = a.reshape(-1), b.reshape(-1), 0.0
    for start in range(0, a.size, _BLOCK_VALUES):
        x, y = (array[start : start + _BLOCK_VALUES].astype(np.float32) for array in (a, b))
        if not np.array_equal(x, y):
            gap = np.abs(x - y)
            gap[gap <= np.float32(_SMALLEST)] *= np.float32(_ROUNDING)
            largest = max(largest, float((gap / np.maximum(np.abs(x), np.float32(_SMALLEST))).max()))
    return largest


def _block_difference(a: Floats, b: Floats) -> float:
    """Largest difference, relative to the largest value of the row."""
    a = a.astype(np.float32)
    gaps, sizes = np.abs(a - b).max(axis=1), np.abs(a).max(axis=1)
    return float((gaps / np.maximum(sizes, np.float32(_SMALLEST))).max())


def _compare_tokenizers(source: Checkpoint, written: Checkpoint, proof: Proof) -> None:
    from ...tokenizers import load_tokenizer_files

    pair, loaded = (source, written), []
    for checkpoint in pair:
        files = checkpoint.tokenizer_files()
        has_one = "tokenizer.json" in files or "tokenizer.model" in files
        try:
            loaded.append(load_tokenizer_files(files, path=checkpoint.path) if has_one else None)
        except TokenizerError as error:
            proof.tokenizer = f"cannot be read from {checkpoint.path.name}: {error}"
            if checkpoint is written:
                proof.problems.append(f"the tokenizer {proof.tokenizer}")
            return
    ours, theirs = loaded
    stops = [set(c.config.eos_token_ids) | set(t.eos_ids if t else ()) for c, t in zip(pair, loaded, strict=True)]
    if stops[0] != stops[1]:
        proof.problems.append(f"the end tokens were {sorted(stops[0])} and are {sorted(stops[1])}")
    if ours is None:
        return
    if theirs is None:
        proof.tokenizer = "left behind"
        proof.problems.append("the tokenizer was left behind")
        return
    facts = {
        "size": (ours.vocab_size, theirs.vocab_size),
        "BOS": (ours.bos_id, theirs.bos_id),
        "text to ids": (ours.encode(_TEXT), theirs.encode(_TEXT)),
        "chat template": (ours.chat_template, theirs.chat_template),
        "template for tools": (ours.template_for(with_tools=True), theirs.template_for(with_tools=True)),
    }
    wrong = [name for name, (a, b) in facts.items() if a != b]
    ids = range(ours.vocab_size)
    if not wrong and any(ours.id_to_token(token) != theirs.id_to_token(token) for token in ids):
        wrong.append("vocabulary")
    proof.tokenizer = "equal" if not wrong else f"differs in {', '.join(wrong)}"
    if wrong:
        proof.problems.append(f"the tokenizer {proof.tokenizer}")


class _Layers:
    """A checkpoint's blocks as `ModelWeights` has them. Each is read when the forward pass reaches it."""

    def __init__(self, checkpoint: Checkpoint, be: Backend, tick: Callable[[], None]) -> None:
        self.checkpoint, self.be, self.tick = checkpoint, be, tick
        self.storage: dict[str, str] = {}  # of each dense matrix that was read: its dtype, or type of blocks

    def __iter__(self) -> Iterator[LayerWeights]:
        config, quantized = self.checkpoint.config, self.checkpoint.config.quantization
        ternary = any(is_ternary(config, name) for name in linear_names(config))
        has_bit_linears = ternary and quantized is not None and quantized.int8_activations
        for index in range(config.num_hidden_layers):
            layer = read_layer(self.checkpoint, index, self.be.prepare)
            self.note(f"{index}.", layer.linears())
            yield layer.map_linears(widen_sums) if has_bit_linears else layer
            self.tick()

    def note(self, layer: str, linears: Iterable[tuple[str, LinearWeight]]) -> None:
        self.storage |= {layer + name: w.storage for name, w in linears if isinstance(w, DenseWeight)}


def _compare_logits(source: Checkpoint, written: Checkpoint, proof: Proof, progress: Progress | None) -> None:
    be = choose_backend("cython" if available_backends()["cython"] is None else "numpy")
    tick = ticker(progress, 2 * source.config.num_hidden_layers)
    (a, of_source), (b, of_written) = (_logits(checkpoint, be, tick) for checkpoint in (source, written))
    proof.tokens = len(a)
    proof.logits_equal = np.array_equal(a, b)
    proof.logits_difference = float(np.abs(a - b).max())
    proof.same_choice = bool((a.argmax(axis=1) == b.argmax(axis=1)).all())
    wide = (each.astype(np.float64) for each in (a, b))
    p, q = (each - np.logaddexp.reduce(each, axis=1, keepdims=True) for each in wide)
    proof.kl = float(max(0.0, (np.exp(p) * (p - q)).sum(axis=1).mean()))
    same = not proof.config and all(tally.equal == tally.total for tally in (proof.scales, proof.tensors))
    # A matrix of equal values in another dtype, or in blocks, is summed by another kernel, in another order.
    allowed = _SUMMATION * float(np.abs(a).max()) if of_source != of_written else 0.0
    if same and proof.logits_difference > allowed:
        proof.problems.append(f"the logits differ by {proof.logits_difference:.1e} though all tensors are equal")


def _logits(checkpoint: Checkpoint, be: Backend, tick: Callable[[], None]) -> tuple[Floats, dict[str, str]]:
    """Logits of a few tokens spread over the vocabulary.   -> (T, V), and how dense matrices are stored"""
    config = checkpoint.config
    count = min(_TOKENS, config.context_length)
    tokens = np.linspace(0, config.vocab_size - 1, count).astype(np.int64)
    embedding = read_embedding(checkpoint)
    head = read_head(checkpoint, embedding, be.prepare)
    final_norm = Norm(checkpoint.norm("final_norm"), config.norm_eps, "ln_final")
    weights = ModelWeights(embedding, (), final_norm, head)
    layers = _Layers(checkpoint, be, tick)
    layers.note("", [("lm_head", head)])
    object.__setattr__(weights, "layers", layers)  # given to it, all would be read at once
    cache = be.new_cache(config, CacheSpec(1, count))
    logits = run(be, weights, config, TokenBatch.of([(0, 0, tokens)]), cache, path="ops").all()
    return logits, layers.storage
