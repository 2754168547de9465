"""The facts that an inspection finds: plain data, and the words for it."""

from __future__ import annotations

import html
from dataclasses import asdict, dataclass, field
from typing import Any

from ..reference.config import ACTIVATIONS, ModelConfig

# What the linears of a kind of file are, and which way its scales go.
_STORED = {
    "gguf-i2_s": "I2_S, 2 bits a weight",
    "gguf-tq1_0": "TQ1_0, five weights a byte in base 3",
    "gguf-tq2_0": "TQ2_0, 2 bits a weight",
    "gguf-tl1": "TL1, four weights a byte in tiles",
    "gguf-tl2": "TL2, three weights in five bits, in tiles",
    **dict.fromkeys(("gguf-f16", "gguf-bf16", "gguf-f32", "gguf-q8_0"), "ternary, stored as floats"),
    "onnx": "constants of the graph",
}
_USED_BY = {"relu2": ", as in BitNet 2B-4T", "silu": ", as in LLaMA"}
_BLOCKS = "float16 in every block of 256 weights, the same in all: multiply by it"
_FLOATS = "none apart: the matrices hold -s, 0 and +s, and s is the scale: multiply by it"
_SCALES = {
    "gguf-i2_s": "float32 behind the codes of each matrix: multiply by it",
    **dict.fromkeys(("gguf-tq1_0", "gguf-tq2_0"), _BLOCKS),
    **dict.fromkeys(("gguf-tl1", "gguf-tl2"), "a tensor <name>_scale, float32: multiply by it"),
    **dict.fromkeys(("gguf-f16", "gguf-bf16", "gguf-f32", "gguf-q8_0"), _FLOATS),
    "native": "w_dequant_scale, float32: multiply by it, wherever the model came from",
    "onnx": "as the graph has it, read as: multiply by it",
}


@dataclass(frozen=True)
class Finding:
    """Something to know. severity: "error" (`load` refuses it), "warning" (it loads, but look), or "note"."""

    severity: str
    part: str  # "config", "weights", "tokenizer"
    message: str
    type: str | None = None  # of the exception that `load` would raise
    path: str | None = None
    offset: int | None = None
    field: str | None = None


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of the checkpoint, as its header has it."""

    name: str
    kind: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    file: str


@dataclass(frozen=True)
class SizeOfKind:
    """What all tensors of one kind take."""

    kind: str
    tensors: int
    nbytes: int
    share: float  # of all bytes, 0 to 1


@dataclass(frozen=True)
class TernaryMatrix:
    """How many -1, 0 and +1 a linear has. `invalid` counts code 3, which is an error."""

    name: str  # "blocks.0.attn.q_proj"
    kind: str  # "q_proj"
    layer: int
    shape: tuple[int, int]  # (out_features, in_features)
    minus: int
    zero: int
    plus: int
    w_dequant_scale: float | None  # W ~ w_t * w_dequant_scale; None where the scale could not be read
    invalid: int = 0

    @property
    def shares(self) -> tuple[float, float, float]:
        """Of -1, 0 and +1; they sum to 1."""
        return shares_of([self])


@dataclass(frozen=True)
class TokenizerFacts:
    """The tokenizer beside the weights. Tokens are written as the vocabulary writes them."""

    kind: str
    vocab_size: int
    bos_id: int | None
    bos_token: str | None
    adds_bos: bool
    eos_ids: tuple[int, ...]
    eos_tokens: tuple[str, ...]
    chat_template: bool
    template_style: str | None = None  # which of the known templates it is, in words


@dataclass
class Inspection:
    """All that was found out. A part that could not be read is None or empty, and `findings` says why."""

    path: str
    kind: str | None = None  # as `convert --to` calls it: "hf-packed", "gguf-i2_s", "native", "onnx", ...
    format: str | None = None  # in words: "GGUF version 3, dialect of bitnet.cpp"
    architecture: str | None = None  # as the file calls it: "bitnet-b1.58" (GGUF), "llama"
    evidence: list[str] = field(default_factory=list)  # what no field says and the contents show, and why
    config: ModelConfig | None = None
    family: str | None = None
    parameters: int | None = None  # stored scales not counted, a packed byte as four, a tied head once
    nbytes: int = 0
    metadata: dict[str, str] = field(default_factory=dict)
    tensors: list[StoredTensor] = field(default_factory=list)
    sizes: list[SizeOfKind] = field(default_factory=list)
    ternary: list[TernaryMatrix] = field(default_factory=list)
    tokenizer: TokenizerFacts | None = None
    stop_token_ids: tuple[int, ...] = ()  # generation ends on any of these
    header_only: bool = False  # a .safetensors file without a configuration: no model, just tensors
    findings: list[Finding] = field(default_factory=list)

    @property
    def errors(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.severity == "error"]

    @property
    def warnings(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.severity == "warning"]

    @property
    def quantization(self) -> str:
        """In words: what the linears are and how the checkpoint stores them."""
        if self.config is None:
            return "unknown"
        found = self.config.quantization
        if found is None:
            return "none: a dense model"
        stored = _STORED.get(self.kind or "", "packed to 2 bits")
        if self.kind == "native" and any(tensor.name.endswith(".trits") for tensor in self.tensors):
            stored = "five weights a byte, in base 3"
        if found.scale_convention == "absmean" and self.kind not in ("native", "onnx"):
            stored = "full-precision master weights, made ternary at load"
        elif (
            self.kind in (None, "hf-packed", "hf-bf16")
            and self.tensors
            and not any(tensor.kind == "ternary planes" for tensor in self.tensors)
        ):
            stored = "ternary, stored as floats"
        linears = len(self.config.linear_shapes()) * self.config.num_hidden_layers
        if 0 < len(self.ternary) < linears and not self.errors:
            stored += f"; {linears - len(self.ternary)} of {linears} linears left as they are"
        if found.use_rms_norm:
            stored += "; an RMSNorm inside each linear"
        return f"{found.linear_class}, {found.quantization_mode}: {stored}"

    @property
    def scale_convention(self) -> str:
        """In words: which way the checkpoint's scales go."""
        if self.config is None or self.config.quantization is None:
            return "no scales"
        if self.kind in _SCALES and (
            self.kind in ("native", "onnx") or self.config.quantization.scale_convention != "absmean"
        ):
            return _SCALES[self.kind]
        return {
            "multiply": "weight_scale = mean|W|: multiply by it",
            "divide": "weight_scale = 1 / mean|W|: divide by it",
            "absmean": "no scale stored: mean|W| of each matrix, taken at load",
        }[self.config.quantization.scale_convention]

    @property
    def activation(self) -> str:
        """In words: the feed-forward gate."""
        if self.config is None:
            return "unknown"
        name = self.config.activation
        words = f"{name}: {ACTIVATIONS[name]}{_USED_BY.get(name, '')}"
        if (self.format or "").startswith("GGUF"):
            key = f"{self.architecture}.hidden_activation"
            by_architecture = f"no field says it, the architecture {self.architecture} means it"
            words += f"; {key} says it" if key in self.metadata else f"; {by_architecture}"
        return words

    def ternary_shares(self, by: str) -> dict[str | int, tuple[float, float, float]]:
        """Shares of -1, 0 and +1 of all matrices of a "kind" or of a "layer"."""
        groups: dict[str | int, list[TernaryMatrix]] = {}
        for matrix in self.ternary:
            groups.setdefault(getattr(matrix, by), []).append(matrix)
        return {key: shares_of(matrices) for key, matrices in groups.items()}

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain JSON values."""
        out = asdict(self)
        out["config"] = None if self.config is None else self.config.to_dict()
        for name in ("quantization", "scale_convention", "activation"):
            out[name] = getattr(self, name)
        for row, matrix in zip(out["ternary"], self.ternary, strict=True):
            row["shares"] = list(matrix.shares)
        for by in ("kind", "layer"):
            out[f"ternary_by_{by}"] = {str(key): list(shares) for key, shares in self.ternary_shares(by).items()}
        return out

    def _repr_html_(self) -> str:
        """For notebooks: the main facts, the shares by kind, and the findings."""
        cfg, rows = self.config, [("path", self.path), ("family", self.family or "unknown")]
        if self.format is not None:
            rows.append(("format", self.format))
        rows += [("evidence", words) for words in self.evidence]
        if self.parameters is not None:
            rows.append(("parameters", f"{self.parameters:,}"))
        if cfg is not None:
            rows += [("shape", shape_in_words(cfg)), ("activation", self.activation)]
            rows += [("quantisation", self.quantization), ("scales", self.scale_convention)]
        rows += [
            (str(kind), f"−1: {minus:.1%}, 0: {zero:.1%}, +1: {plus:.1%}")
            for kind, (minus, zero, plus) in self.ternary_shares("kind").items()
        ]
        rows += [(f"{finding.severity} ({finding.part})", finding.message) for finding in self.findings]
        cells = (f"<tr><th>{html.escape(name)}</th><td>{html.escape(value)}</td></tr>" for name, value in rows)
        return f'<table style="text-align:left">{"".join(cells)}</table>'


def family_in_words(config: ModelConfig) -> str:
    """Which of the known families the shape belongs to."""
    if config.sub_norms:
        blocks = {"relu2": "the block of 2B-4T: squared ReLU", "silu": "the block of 1bitLLM: SiLU"}
        return f"BitNet b1.58, {blocks.get(config.activation, config.activation)} and sub-norms"
    name = {"llama": "LLaMA", "mistral": "Mistral"}.get(config.model_type, config.model_type)
    if config.quantization is not None:
        return f"{name} with ternary linears, as HF1BitLLM and Falcon3-1.58bit: no sub-norms"
    return f"{name}, dense"


def shape_in_words(config: ModelConfig) -> str:
    """Layers, widths and heads on one line."""
    return (
        f"{config.num_hidden_layers} layers of {config.hidden_size}, {config.num_attention_heads} heads on "
        f"{config.num_key_value_heads} kv heads of {config.head_dim}, ffn {config.intermediate_size}"
    )


def shares_of(matrices: list[TernaryMatrix]) -> tuple[float, float, float]:
    counts = [sum(getattr(m, name) for m in matrices) for name in ("minus", "zero", "plus")]
    total = sum(counts) or 1
    return counts[0] / total, counts[1] / total, counts[2] / total
