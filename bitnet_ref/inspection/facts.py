"""What an inspection reports: plain data, and the sentences that describe it."""

from __future__ import annotations

import html
import math
import re
from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

from ..errors import BackendError, BitNetRefError, printable
from ..families import block_steps, config_to_dict, family_of
from ..families.rope import StretchedRope
from ..formats.binary_file import CUT_OFF
from ..formats.checkpoint import scale_convention
from ..reference.config import ModelConfig
from ..reference.layers import ACTIVATIONS

# How each kind of file stores its linears, and where it keeps their scales.
_FLOAT_KINDS = ("gguf-f16", "gguf-bf16", "gguf-f32", "gguf-q8_0")
_STORAGE = {
    "gguf-i2_s": "I2_S, 2 bits per weight",
    "gguf-tq1_0": "TQ1_0, five weights per byte in base 3",
    "gguf-tq2_0": "TQ2_0, 2 bits per weight",
    "gguf-tl1": "TL1, four weights per byte in tiles",
    "gguf-tl2": "TL2, three weights in five bits, in tiles",
    **dict.fromkeys(_FLOAT_KINDS, "ternary, stored as floats"),
    "onnx": "constants of the graph",
}
_SCALES = {
    "gguf-i2_s": "float32 behind the codes of each matrix: multiply by it",
    **dict.fromkeys(
        ("gguf-tq1_0", "gguf-tq2_0"), "float16 in every block of 256 weights, the same in all: multiply by it"
    ),
    **dict.fromkeys(("gguf-tl1", "gguf-tl2"), "a tensor <name>_scale, float32: multiply by it"),
    **dict.fromkeys(_FLOAT_KINDS, "not stored: the matrices hold -s, 0 and +s, and s is the scale: multiply by it"),
    "native": "w_dequant_scale, float32: multiply by it, wherever the model came from",
    "onnx": "as in the graph, read as: multiply by it",
}
_SCALE_CONVENTIONS = {
    "multiply": "weight_scale = mean|W|: multiply by it",
    "divide": "weight_scale = 1 / mean|W|: divide by it",
    "absmean": "no scale stored: mean|W| of each matrix, computed at load",
}
_USED_BY = {"relu2": ", as in BitNet 2B-4T", "silu": ", as in LLaMA"}
_WHOLE = ("F32", "F16", "BF16")
_GROUP_SIZE = 4  # so many tensors with the same fault are reported together


@dataclass(frozen=True)
class Finding:
    """severity: "error" (`load` refuses it), "warning" (it loads, but is probably wrong), or "note"."""

    severity: str
    part: str  # "config", "weights", "tokenizer"
    message: str
    type: str | None = None  # class of the exception that `load` raises
    path: str | None = None
    offset: int | None = None
    field: str | None = None


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of the checkpoint, as the file's header describes it."""

    name: str
    kind: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    file: str


@dataclass(frozen=True)
class SizeOfKind:
    """The size of all tensors of one kind."""

    kind: str
    tensors: int
    nbytes: int
    share: float  # of all bytes, 0 to 1
    types: dict[str, int]  # "Q4_K", "BF16" -> the number of tensors of it

    @property
    def type_words(self) -> str:
        """One type, or several, each with the number of tensors."""
        return next(iter(self.types)) if len(self.types) == 1 else ", ".join(f"{n} {t}" for t, n in self.types.items())


@dataclass(frozen=True)
class TernaryMatrix:
    """Counts of -1, 0 and +1 in a linear. `invalid` counts code 3, which is an error."""

    name: str  # "blocks.0.attn.q_proj"
    kind: str  # "q_proj"
    layer: int
    shape: tuple[int, int]  # (out_features, in_features)
    minus: int
    zero: int
    plus: int
    w_dequant_scale: float | None  # W ~ w_t * w_dequant_scale; None: unreadable
    invalid: int = 0
    group: int | None = None  # inputs that share a scale, whose mean is w_dequant_scale; None: one scale

    @property
    def shares(self) -> tuple[float, float, float]:
        """Shares of -1, 0 and +1, which sum to 1."""
        return shares_of([self])


@dataclass(frozen=True)
class TokenizerFacts:
    """The model's tokenizer. Tokens are written as in the vocabulary."""

    kind: str
    vocab_size: int
    bos_id: int | None
    bos_token: str | None
    adds_bos: bool
    eos_ids: tuple[int, ...]
    eos_tokens: tuple[str, ...]
    chat_template: bool
    template_style: str | None = None  # the name of a known template
    sampling: dict[str, Any] = field(default_factory=dict)  # as generation_config.json recommends


@dataclass
class Inspection:
    """Everything known about a model. A part that could not be read is None or empty, and `findings` says why."""

    path: str
    kind: str | None = None  # as `convert --to` calls it: "hf-packed", "gguf-i2_s", "native", "onnx", ...
    format: str | None = None  # in words: "GGUF version 3, dialect of bitnet.cpp"
    architecture: str | None = None  # the file's own name: "bitnet-b1.58" (GGUF), "llama"
    evidence: list[str] = field(default_factory=list)  # decided from the contents, as no field says it; and why
    config: ModelConfig | None = None
    family: str | None = None
    parameters: int | None = None  # without scales; a packed byte is four, a tied head counts once
    nbytes: int = 0
    metadata: dict[str, str] = field(default_factory=dict, repr=False)
    tensors: list[StoredTensor] = field(default_factory=list, repr=False)
    sizes: list[SizeOfKind] = field(default_factory=list, repr=False)
    ternary: list[TernaryMatrix] = field(default_factory=list, repr=False)
    tokenizer: TokenizerFacts | None = field(default=None, repr=False)
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
    def is_cut_off(self) -> bool:
        """Whether a file ends before what its header describes."""
        return any(finding.message.startswith(CUT_OFF) for finding in self.findings)

    def report(self, severity: str, part: str, message: str, field: str | None = None) -> None:
        """Add a finding."""
        self.findings.append(Finding(severity, part, message, field=field))

    def report_error(self, part: str, error: BitNetRefError) -> None:
        """Add an error finding. A missing library is not the file's fault: such an error is raised again."""
        if isinstance(error, BackendError):
            raise error
        place = {key: getattr(error, key, None) for key in ("path", "offset", "field")}
        message = getattr(error, "message", str(error))
        finding = Finding("error", part, message, type(error).__name__, **place)
        if finding not in self.findings:
            self.findings.append(finding)

    def finding_groups(self) -> list[list[Finding]]:
        """The findings. Those of at least four tensors whose messages differ only in figures form one group."""
        groups: dict[Any, list[Finding]] = {}
        for number, finding in enumerate(self.findings):
            pattern = re.sub(r"[0-9]+([.,][0-9]+)*(e[-+]?[0-9]+)?", "#", finding.message)
            is_shared = finding.part == "weights" and finding.field is not None
            groups.setdefault((finding.severity, pattern) if is_shared else number, []).append(finding)
        return [
            group
            for alike in groups.values()
            for group in ([alike] if len(alike) >= _GROUP_SIZE else [[finding] for finding in alike])
        ]

    @property
    def is_grouped(self) -> bool:
        """Whether linears are ternary with scales of groups."""
        return any(matrix.group is not None for matrix in self.ternary)

    @property
    def is_binary(self) -> bool:
        """Whether ternary linears hold -1 and +1 alone."""
        return bool(self.ternary) and not any(matrix.zero for matrix in self.ternary)

    @property
    def _of_groups(self) -> str:
        """What linears with a scale for each group are, in words."""
        grouped = [(each.group, each.shape[1]) for each in self.ternary if each.group is not None]
        sizes = sorted({group for group, width in grouped if group < width})
        of = [f"each {size} inputs" for size in sizes] + ["each row"] * any(group >= width for group, width in grouped)
        values = "binary, -1 and +1," if self.is_binary else "ternary"
        return f"{values} with a scale for {' or '.join(of)}"

    @property
    def is_gguf(self) -> bool:
        return (self.format or "").startswith("GGUF")

    @property
    def quantization(self) -> str:
        """In words: what the linears are and how the checkpoint stores them."""
        if self.config is None:
            return "unknown"
        quantization = self.config.quantization
        linears = sum(len(self.config.linear_shapes(i)) for i in range(self.config.num_hidden_layers))
        if self.is_grouped:
            return f"{self._of_groups}, in {len(self.ternary)} of {linears} linears; float inputs"
        kinds = {tensor.kind for tensor in self.tensors}
        if quantization is None and "packed linears" in kinds:
            return f"not ternary: {next((words for words in self.evidence if 'packed by' in words), 'packed in words')}"
        if quantization is None:
            rounded = {tensor.dtype for tensor in self.tensors if self.is_gguf and len(tensor.shape) > 1} - {*_WHOLE}
            return "none: a dense model" + (f", rounded to {' and '.join(sorted(rounded))}" if rounded else "")
        storage = _STORAGE.get(self.kind or "", "packed to 2 bits")
        if self.kind == "native" and any(tensor.name.endswith(".trits") for tensor in self.tensors):
            storage = "five weights per byte, in base 3"
        if scale_convention(self.config.quantization) == "absmean" and self.kind not in ("native", "onnx"):
            storage = "full-precision master weights, made ternary at load"
        elif self.kind in (None, "hf-packed", "hf-bf16") and {"ternary planes"}.isdisjoint(kinds) and kinds:
            storage = "ternary, stored as floats"
        if 0 < len(self.ternary) < linears and not self.errors:
            storage += f"; {linears - len(self.ternary)} of {linears} linears not ternary"
        if quantization.use_rms_norm:
            storage += "; an RMSNorm inside each linear"
        return f"{quantization.linear_class}, {quantization.quantization_mode}: {storage}"

    @property
    def scale_convention(self) -> str:
        """In words: whether weights are multiplied or divided by the checkpoint's scales."""
        convention = None if self.config is None else scale_convention(self.config.quantization)
        if convention is None:
            return "one for each group: its only magnitude" if self.is_grouped else "no scales"
        if self.kind in _SCALES and (self.kind in ("native", "onnx") or convention != "absmean"):
            return _SCALES[self.kind]
        return _SCALE_CONVENTIONS[convention]

    @property
    def activation(self) -> str:
        """In words: the activation of the feed-forward gate."""
        if self.config is None:
            return "unknown"
        name = self.config.activation
        if name not in ACTIVATIONS:
            return f"unknown: {name!r}"
        words = f"{name}: {ACTIVATIONS[name].formula}{_USED_BY.get(name, '')}"
        if self.is_gguf:
            key = f"{self.architecture}.hidden_activation"
            by_architecture = f"no field says it, the architecture {self.architecture} means it"
            words += f"; {key} says it" if key in self.metadata else f"; {by_architecture}"
        return words

    def ternary_shares(self, by: str) -> dict[str | int, tuple[float, float, float]]:
        """Shares of -1, 0 and +1, over all matrices of each "kind" or each "layer"."""
        groups: dict[str | int, list[TernaryMatrix]] = {}
        for matrix in self.ternary:
            groups.setdefault(getattr(matrix, by), []).append(matrix)
        return {key: shares_of(matrices) for key, matrices in groups.items()}

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain JSON values."""
        out = asdict(self)
        out["config"] = None if self.config is None else config_to_dict(self.config)
        for name in ("quantization", "scale_convention", "activation"):
            out[name] = getattr(self, name)
        if self.tokenizer is not None:
            for name, value in self.tokenizer.sampling.items():
                if isinstance(value, float) and not math.isfinite(value):  # 1e999 in a file; JSON has no such number
                    out["tokenizer"]["sampling"][name] = str(value)
        for row, matrix in zip(out["ternary"], self.ternary, strict=True):
            row["shares"] = list(matrix.shares)
        for by in ("kind", "layer"):
            out[f"ternary_by_{by}"] = {str(key): list(shares) for key, shares in self.ternary_shares(by).items()}
        return out

    def _repr_html_(self) -> str:
        """For notebooks: the main facts, the shares by kind, and the findings."""
        rows = [("path", self.path), ("family", self.family or "unknown")]
        if self.format is not None:
            rows.append(("format", self.format))
        rows += [("evidence", words) for words in self.evidence]
        if self.parameters is not None:
            rows.append(("parameters", f"{self.parameters:,}"))
        if self.config is not None:
            rows += [("shape", shape_in_words(self.config)), ("activation", self.activation)]
            rows += [("quantisation", self.quantization), ("scales", self.scale_convention)]
        rows += [
            (str(kind), f"−1: {minus:.1%}, 0: {zero:.1%}, +1: {plus:.1%}")
            for kind, (minus, zero, plus) in self.ternary_shares("kind").items()
        ]
        for group in self.finding_groups():
            count = f"{len(group)} tensors: " if len(group) > 1 else ""
            rows.append((f"{group[0].severity} ({group[0].part})", count + group[0].message))
        cells = (
            f"<tr><th>{html.escape(name)}</th><td>{html.escape(printable(value))}</td></tr>" for name, value in rows
        )
        return f'<table style="text-align:left">{"".join(cells)}</table>'


def family_in_words(config: ModelConfig) -> str:
    """The model family that the configuration belongs to."""
    if config.sub_norms:
        blocks = {"relu2": "the block of 2B-4T: squared ReLU", "silu": "the block of 1bitLLM: SiLU"}
        return f"BitNet b1.58, {blocks.get(config.activation, config.activation)} and sub-norms"
    name = {"llama": "LLaMA", "mistral": "Mistral"}.get(config.model_type, config.model_type)
    if config.quantization is not None and config.model_type in ("llama", "mistral"):
        return f"{name} with ternary linears, as HF1BitLLM and Falcon3-1.58bit: no sub-norms"
    return f"{name} with ternary linears" if config.quantization is not None else f"{name}, dense"


def shape_in_words(config: ModelConfig) -> str:
    """Layers, widths and heads in one line."""
    return (
        f"{config.num_hidden_layers} layers of {config.hidden_size}, {config.num_attention_heads} heads on "
        f"{config.num_key_value_heads} kv heads of {config.head_dim}, {family_of(config).feed_forward_words(config)}"
    )


def context_in_words(config: ModelConfig) -> str:
    """How far tokens see, by layers where they differ: "8192 tokens; in 20 of 24 layers each sees the last 512"."""
    layers, out = config.num_hidden_layers, [f"{config.context_length} tokens"]
    states = [index for index in range(layers) if family_of(config).state_size(config, index)]
    windows = Counter(config.window_of(index) for index in range(layers) if index not in states)
    for window, count in windows.items():
        if window is not None:
            where = "" if count == layers else f"in {count} of {layers} layers "
            out.append(f"{where}each sees the last {window}")
    if states:
        out.append(f"{len(states)} of {layers} layers keep a state of one size")
    return "; ".join(out)


def positions_in_words(config: ModelConfig) -> str:
    """The RoPE of the layers: "RoPE theta 1e+06; theta 10000 in 20 of 24 layers"."""
    layers = config.num_hidden_layers
    attends = [index for index in range(layers) if not family_of(config).state_size(config, index)]
    turned = [i for i in attends if any(step.name == "attn.hook_rot_q" for step in block_steps(config, i))]
    counts = Counter(config.rope_of(index) for index in turned)
    words = []
    for number, rope in enumerate(config.ropes):
        stretch = f"{rope.rope_type}, factor {rope.factor:g}, " if isinstance(rope, StretchedRope) else ""
        where = "" if len(counts) < 2 or number == 0 else f" in {counts[number]} of {layers} layers"
        words.append(f"{'' if number else 'RoPE '}{stretch}theta {rope.theta:g}{where}")
    if config.rotary_size != config.head_dim:
        words.append(f"it turns {config.rotary_size} of a head's {config.head_dim} numbers")
    if len(turned) < len(attends):
        words.append(f"none in {len(attends) - len(turned)} of {layers} layers")
    return "; ".join(words)


def shares_of(matrices: list[TernaryMatrix]) -> tuple[float, float, float]:
    counts = [sum(getattr(m, name) for m in matrices) for name in ("minus", "zero", "plus")]
    total = sum(counts) or 1
    return counts[0] / total, counts[1] / total, counts[2] / total
