"""What a model family, or a kind of weight, declares of itself. The rooms ask these declarations and name neither.

A family is one file beside this one, with all that is its own: the fields of its config, how config.json and GGUF's
keys say them, the names of its tensors, its layers and their texts, the steps that it records, the mistakes that
crossval tries in it. `FAMILIES` in `__init__.py` lists them; `register` adds one from outside the package.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import translate
from functools import cache
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from ..errors import ConfigError, require
from ..reference.config import ModelConfig, QuantizationConfig, RopeConfig
from ..reference.layers import ACTIVATIONS, Array, Floats, rms_scale
from ..reference.quantization import CODES_PER_BYTE
from ..reference.weights import LayerWeights, LinearWeight, ModelWeights

# function of an op -> (hook, function of the same arguments)
AlsoRecorded = Mapping[Callable[..., Array], tuple[str, Callable[..., Array | None]]]
Config = TypeVar("Config", bound=ModelConfig)
NORM, LINEAR = "norm module", "linear module"  # kinds of steps that stand for several tensors


# -- the steps of a block ----------------------------------------------------------------------------------------------


class TraceStep(NamedTuple):
    """A tensor that a block records, or a norm or linear with its several tensors, by its name below the block.

    inputs: of what it is computed, below the block.
    kind: of the op, a key of crossval's tolerances; NORM or LINEAR.
    shape: axes, "N H d"; of a norm "D", or "H d" where it is over heads.
    noun: what it is in a sentence.   source: the function that computes it, and the beginning of the line that does.
    """

    name: str
    inputs: tuple[str, ...]
    kind: str
    shape: str = ""
    noun: str = ""
    source: tuple[Callable[..., Any], str] | None = None


def norm_step(name: str, before: str, shape: str = "D", noun: str = "") -> TraceStep:
    """A norm of the tensor `before`: `name` with hook_scale and hook_normalized."""
    return TraceStep(name, (before,), NORM, shape, noun=noun)


def linear_step(name: str, source: str) -> TraceStep:
    """A linear: `name` with hook_out, and what a quantised one has before it."""
    return TraceStep(name, (source,), LINEAR)


def put_after(steps: Sequence[TraceStep], name: str, *more: TraceStep) -> list[TraceStep]:
    """The steps with more behind the one of that name."""
    index = [step.name for step in steps].index(name) + 1
    return [*steps[:index], *more, *steps[index:]]


def change_steps(steps: Iterable[TraceStep], **changes: Any) -> Callable[..., list[TraceStep]]:
    """change_steps(steps, inputs=(...))("attn.hook_rot_q"): the steps with the named ones changed."""

    def apply(*names: str) -> list[TraceStep]:
        return [step._replace(**changes) if step.name in names else step for step in steps]

    return apply


# -- mistakes ----------------------------------------------------------------------------------------------------------


Edit = Callable[..., Array]  # (step, compute, *inputs) -> the step's tensor; compute(*inputs) is the right one


@cache
def _compile_names(steps: str) -> re.Pattern[str]:
    return re.compile("|".join(map(translate, steps.split())))


@dataclass(frozen=True)
class Hypothesis:
    """A mistake that an engine may have made: an edit of steps, with a name and a remedy.

    steps: globs, separated by blanks, of the steps that it edits, by the names of the tensors that they compute. A
        linear's product is its hook_out, with or without a bias or a cap that comes after it.
    name: short, stable.
    fits: (step) -> whether the edit can be made in a step of that name, and changes it.
    rounds: it rounds, so that a few values may be rounded the other way by an engine that is right but for this.
    """

    steps: str
    name: str
    cause: str
    remedy: str
    edit: Edit
    fits: Callable[[Any], bool] = lambda step: True
    rounds: bool = False

    def is_at(self, name: str) -> bool:
        """Whether it is a mistake in steps of that name."""
        return _compile_names(self.steps).match(name) is not None

    def is_in(self, step: Any) -> bool:
        """Whether the mistake can be made in this step."""
        return self.is_at(step.place) and self.fits(step)

    def change(self, setting: Any, layers: Iterable[int] | None = None) -> Any:
        """crossval's `Setting` with the mistake made, in these layers only; None where it has no place for it."""
        chosen = None if layers is None else set(layers)
        names = [name for name, step in setting.steps.items() if self.is_in(step)]
        edits = {name: self.edit for name in names if chosen is None or setting.steps[name].layer in chosen}
        return setting.with_edits(edits) if edits else None


def heads_apart(x: Floats, step: Any) -> Floats:
    """The rows of a norm over heads, (N*H, C), as (N, H, C); any other array as it is."""
    n = len(step.setting.tokens)
    return x.reshape(n, -1, x.shape[1]) if x.ndim == 2 and len(x) > n and len(x) % n == 0 else x


def like(x: Any, right: Array) -> Array:
    """x in the dtype of the right tensor, or in float32 if x has fractions and the right tensor has integers."""
    array: Array = np.asarray(x)
    if right.dtype.kind == "i" and array.dtype.kind == "f" and not (array == np.rint(array)).all():
        return array.astype(np.float32)
    return array.astype(right.dtype)


def instead(formula: Callable[..., Any]) -> Edit:
    """formula(*inputs) in place of the step's own formula."""

    def edit(step: Any, compute: Edit, *inputs: Any) -> Array:
        right = compute(*inputs)
        return like(np.broadcast_to(np.asarray(formula(*inputs)), right.shape), right)

    return edit


@dataclass(frozen=True, eq=False)
class Around:
    """An edit around a step's formula, of an input or of the result. One of the formula can be made beside it."""

    edit: Edit

    def __call__(self, step: Any, compute: Edit, *inputs: Any) -> Array:
        return self.edit(step, compute, *inputs)


def after(change: Callable[[Floats], Floats]) -> Edit:
    """The step's result, changed."""

    def edit(step: Any, compute: Edit, *inputs: Any) -> Array:
        right = compute(*inputs)
        return like(np.asarray(change(heads_apart(right, step))).reshape(right.shape), right)

    return Around(edit)


def before(index: int, change: Callable[[Any], Any]) -> Edit:
    """The step with one of its inputs changed."""

    def edit(step: Any, compute: Edit, *inputs: Any) -> Array:
        x = inputs[index]
        apart = heads_apart(x, step) if isinstance(x, np.ndarray) else x
        changed = change(apart) if apart is x else change(apart).reshape(x.shape)
        return compute(*inputs[:index], changed, *inputs[index + 1 :])

    return Around(edit)


def leave_out(step: Any, compute: Edit, x: Array, *rest: Any) -> Array:
    """An edit: the step's first input as its result."""
    return x


def norm_each_head(step: Any, compute: Edit, x: Array, length: Array, weight: Array) -> Array:
    """An edit of a norm over all heads: each head is divided by its own length.   x (N, H*d)"""
    config = step.setting.config
    heads = x.reshape(-1, config.head_dim)
    normed: Array = (heads / rms_scale(heads, config.norm_eps)).reshape(x.shape) * weight
    return normed


def own_rope(step: Any) -> RopeConfig:
    """The RoPE of a step's block."""
    config = step.setting.config
    rope: RopeConfig = config.ropes[config.rope_of(step.layer)]
    return rope


def own_tables(step: Any, n: int) -> tuple[Floats, Floats]:
    """cos and sin of the first n positions in a step's block."""
    tables: tuple[Floats, Floats] = own_rope(step).tables(np.arange(n), step.setting.config.rotary_size, np.float32)
    return tables


def turned_by(rope_of: Callable[[Any], RopeConfig] = own_rope, first: int = 0) -> Edit:
    """RoPE with the tables of rope_of(step), for positions that begin with `first`."""

    def edit(step: Any, compute: Edit, x: Array, *tables: Array) -> Array:
        positions, size = np.arange(len(x)) + first, step.setting.config.rotary_size
        return compute(x, *rope_of(step).tables(positions, size, np.float32))

    return edit


def layer_weights(step: Any) -> Any:
    """The weights of a step's block."""
    return step.setting.weights.layers[step.layer]


def is_listed_norm(step: Any) -> bool:
    """Whether a norm's step is of the final norm or of one in `norm_shapes`, not of a linear or of further arrays."""
    if step.layer is None:
        return True
    listed = step.setting.config.norm_shapes(step.layer)
    names = {norm.name for field_name, norm in layer_weights(step).norms() if field_name in listed}
    return step.name.rpartition(".")[0] in names


NORM_ONE_LEFT_OUT = Hypothesis(
    "*.hook_normalized",
    "norm_one_left_out",
    "norms multiply by w where the family's files mean 1 + w",
    "Add 1 to the norms of Gemma and Qwen3.5 (not to those inside BitLinears, nor to DeltaNet's).",
    before(2, lambda weight: weight - np.float32(1)),
    is_listed_norm,
)
EMBEDDING_SCALE_MISSING = Hypothesis(
    "hook_embed_scaled",
    "embedding_scale_missing",
    "rows of the embedding are not scaled",
    "Multiply by sqrt(hidden_size) (Gemma) or scale_emb (MiniCPM).",
    leave_out,
)


# -- where files keep the parts ----------------------------------------------------------------------------------------


class PartNames(NamedTuple):
    """What files call a part, without the block. `hf`: transformers' name first, then those in other checkpoints."""

    hf: tuple[str, ...]
    gguf: str


class LinearPlace(NamedTuple):
    """Where a file stores a linear: its row i is row `rows[i]` of the tensor, its column j column `columns[j]`."""

    module: str  # the tensor's name without ".weight", below its block
    height: int  # rows of the tensor
    rows: NDArray[np.intp] | None = None  # None: all, in order
    columns: NDArray[np.intp] | None = None
    sharers: tuple[str, ...] = ()  # the linears in the tensor, in the order of a block's; (): this one alone
    parts: tuple[str, ...] = ()  # modules that have equal numbers of its rows, in order; (): `module` has all
    stacked: int = 1  # the tensor is so many matrices, one above another
    stack: str = ""  # a module that some files have in the place of `parts`: all of them as one tensor, stacked

    def take(self, stored: Array) -> Array:
        """The linear, out of the tensor.   (height, K) -> (N, K)"""
        w = stored if self.rows is None else stored[self.rows]
        return w if self.columns is None else np.ascontiguousarray(w[:, self.columns])

    def take_groups(self, packed: NDArray[np.uint8], scales: Floats) -> tuple[NDArray[np.uint8], Floats] | None:
        """The same of a packed tensor and its scales, each of a block; None where columns are no whole blocks."""
        if self.rows is not None:
            packed, scales = packed[self.rows], scales[self.rows]
        if self.columns is None:
            return packed, scales
        block = len(self.columns) // scales.shape[1]
        starts = self.columns[::block]
        if (starts % block).any() or (self.columns.reshape(-1, block) != starts[:, None] + np.arange(block)).any():
            return None
        return packed[:, self.columns[::CODES_PER_BYTE] // CODES_PER_BYTE], scales[:, starts // block]


class ArrayForm(NamedTuple):
    """How files store an array of a block that is neither a linear nor a norm.

    hf, gguf: the tensor's name in its block.   from_*: (config, layer, stored) -> ours; ValueError for numbers that it
    cannot hold.   to_*: the other way. By default both are the same array.
    """

    hf: str
    gguf: str
    from_hf: Callable[[Any, int, Array], Array] = lambda config, layer, array: array
    to_hf: Callable[[Any, int, Array], Array] = lambda config, layer, array: array
    from_gguf: Callable[[Any, int, Array], Array] = lambda config, layer, array: array
    to_gguf: Callable[[Any, int, Array], Array] = lambda config, layer, array: array
    hf_shape: Callable[[tuple[int, ...]], tuple[int, ...]] = tuple  # of the tensor, from ours


# -- kinds of weights --------------------------------------------------------------------------------------------------


class NativeForm(NamedTuple):
    """How native files store a kind of weight, beside its ternary plane and its bias.

    mark: the end of a tensor's name that no other kind has, ".scales"; its dtype is that of the matrix.
    arrays: (weight) -> the tensors, by the ends of their names.
    read: (an open `NativeCheckpoint`, name, shape, bias) -> the weight
    """

    mark: str
    arrays: Callable[[Any], Mapping[str, Array]]
    read: Callable[[Any, str, tuple[int, int], NDArray[np.float32] | None], LinearWeight]


@dataclass(frozen=True)
class WeightKind:
    """One kind of weight.

    name: its `LinearWeight.kind`.   words: for "a ... matrix".
    classes: what prepared weights on disk are built of.
    details: (weight, another of the kind) -> the arrays that are to be equal in both, without the bias.
    native: how native files store it, where it is no BitLinear and not dense.
    other_forms: name -> (weights) -> the same model in a form that gives the same logits; None where it has none.
    also_recorded, mistakes: as a family's.
    """

    name: str
    words: str
    classes: tuple[type, ...]
    details: Callable[[Any, Any], Mapping[str, Array]] = lambda weight, other: dict(weight.contents(""))
    native: NativeForm | None = None
    also_recorded: AlsoRecorded = field(default_factory=dict)
    other_forms: Mapping[str, Callable[[ModelWeights], ModelWeights | None]] = field(default_factory=dict)
    mistakes: tuple[Hypothesis, ...] = ()


# -- how files say the config ------------------------------------------------------------------------------------------


class HfKeys(Protocol):
    """The keys of a config.json, as a family reads them. What it does not read is a doubt, or an error."""

    raw: dict[str, Any]
    allow_unquantized: bool  # a BitNet without quantization_config is meant to be dense
    quantization: QuantizationConfig | None

    def get(self, key: str, default: Any = None) -> Any:
        """The value; for an absent key that of transformers' class (`HfForm.defaults`), else `default`."""

    def number(self, key: str, default: float | None = None) -> float:
        """A number above 0; ConfigError."""

    def count(self, key: str) -> int:
        """A whole number above 0; ConfigError."""

    def ignore(self, *keys: str) -> None:
        """Keys that this family's class does not read although they look as if they changed what it computes."""

    def doubt(self, key: str, message: str) -> None:
        """Warn that `key` may not be read as the author of the file meant it."""

    def rope(self, raw: Mapping[str, Any] | None = None, theta_key: str = "rope_theta") -> RopeConfig:
        """The RoPE that `raw` (None: the file) describes, by rope_scaling or rope_parameters."""

    def layer_types(self, window: Any, by_default: list[str]) -> dict[str, Any]:
        """The fields `sliding_window` and `layer_types`, where the file has no layer_types those of `by_default`."""


SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")


class Wrapper(NamedTuple):
    """A vision model around a text model: text alone gives what the text model gives."""

    model_type: str
    architecture: str
    sizes: Mapping[str, int]  # class defaults of what text_config may leave out


@dataclass(frozen=True)
class HfForm:
    """How a config.json says a family.

    architecture: transformers' class.   defaults: its defaults for absent keys.
    class_of: (config) -> the model type whose class computes it, where the fields decide; None: the family's own.
    flags: fields of the same names as their keys, false where absent.
    read: (keys) -> fields of the config beyond those that LLaMA has as well.   write: (config) -> the keys for these.
    wrapper: the vision model that its text model may be in.
    left_out: what the names of tensors that take no part in text begin with.
    norms_add_one: whether files hold w - 1 of each norm, but those inside linears.
    """

    architecture: str
    defaults: Mapping[str, Any]
    read: Callable[[HfKeys], dict[str, Any]] = lambda keys: {}
    write: Callable[[Any], dict[str, Any]] = lambda config: {}
    class_of: Callable[[Any], str] | None = None
    flags: tuple[str, ...] = ("attention_bias",)
    activation_key: str = "hidden_act"
    wrapper: Wrapper | None = None
    left_out: tuple[str, ...] = ()
    norms_add_one: bool = False


VISION = ("visual.", "vision_tower.", "multi_modal_projector.")
LEFT_OUT_VISION = (*VISION, *(f"model.{name}" for name in VISION))


class GgufKeys(Protocol):
    """The metadata of a GGUF's architecture, as a family reads them. Errors name the key."""

    arch: str

    def get(self, key: str, default: Any = None) -> Any: ...
    def has(self, key: str) -> bool: ...
    def count(self, key: str, default: int | None = None) -> int: ...
    def number(self, key: str, default: float | None = None) -> float: ...
    def flags(self, key: str, layers: int) -> list[bool]: ...
    def fail(self, key: str, message: str) -> ConfigError: ...


class Architecture(NamedTuple):
    """What a value of general.architecture means."""

    activation: str  # unless `<arch>.hidden_activation` says otherwise
    sub_norms: bool = False
    permuted: bool = False  # rows of q and k are in the order of interleaved RoPE
    window: bool = False  # llama.cpp reads attention.sliding_window


Put = Callable[[str, str, Any], None]  # (key below the architecture, its GGUF type, value)


@dataclass(frozen=True)
class GgufForm:
    """How GGUF's metadata say a family.

    read: (keys, the fields that LLaMA has as well) -> fields beyond, or other values.
    write: (config, put) puts the keys for these. Raises ConfigError for what they cannot say.
    implied: (config) -> values that a reader would take for fields that have no key; other models are not written.
    key: one below the architecture that its files have, and that other families' files of that architecture lack.
    """

    architectures: Mapping[str, Architecture]
    read: Callable[[GgufKeys, dict[str, Any]], dict[str, Any]] = lambda keys, fields: {}
    write: Callable[[Any, Put], None] = lambda config, put: None
    implied: Callable[[Any], dict[str, Any]] = lambda config: {}
    key: str | None = None


def activation_name(spelling: Any, field: str) -> str:
    """The name in `ACTIVATIONS` of what a file calls its activation. Raises ConfigError naming `field`."""
    names = [name for name, each in ACTIVATIONS.items() if spelling == name or spelling in each.spellings]
    require(bool(names), field, f"one of {', '.join(ACTIVATIONS)}", spelling)
    return names[0]


def widest_window(config: ModelConfig) -> int | None:
    """The window of the layer that sees the most; None: one sees all tokens."""
    return None if FULL in types_of_layers(config) else config.sliding_window


FULL, SLIDING = "full_attention", "sliding_attention"  # transformers' words


def types_of_layers(config: ModelConfig) -> list[str]:
    """The type of each layer, in transformers' words."""
    alike = FULL if config.sliding_window is None else SLIDING
    return list(config.layer_types) or [alike] * config.num_hidden_layers


def fields_of_types(types: Sequence[str], window: int | None) -> dict[str, Any]:
    """The inverse: the fields `sliding_window` and `layer_types` of layers of these types."""
    return {
        "sliding_window": None if {*types} == {FULL} else window,
        "layer_types": () if {*types} in ({FULL}, {SLIDING}) else tuple(types),
    }


def near(function: Callable[[float], float], guess: float, wanted: float) -> float | int:
    """A number, whole or short if possible, with function(x) == wanted; `guess` if there is none."""
    neighbours = (math.nextafter(guess, 0), math.nextafter(guess, math.inf))
    candidates = (round(guess), float(f"{guess:.12g}"), guess, *neighbours)
    return next((x for x in candidates if x and function(x) == wanted), guess)


class States(Protocol):
    """What a cache has of some families' sequences beside keys and values; `families/qwen3_5.py` has one."""

    @property
    def nbytes(self) -> int: ...

    def resumable(self, slot: int, length: int) -> int:
        """How many of the first `length` tokens of a slot a later pass can build on."""

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None: ...
    def take_over(self, other: Any) -> None: ...


def config_of_layers(config: Config, layers: Sequence[int], **changes: Any) -> Config:
    """The config of a model that consists of these layers."""
    types = tuple(config.layer_types[layer] for layer in layers) if config.layer_types else ()
    return replace(config, num_hidden_layers=len(layers), layer_types=types, **changes)


# -- the family --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Family:
    """One family.

    config: its class of ModelConfig.
    nested: its fields that hold a dataclass of the family's own.
    layer_class: (config, layer) -> the class of that layer's weights.
    steps: (config, layer) -> the steps of that block, in the order of the computation.
    constants: (config) -> the numbers that its steps multiply by, by their fields, beyond LLaMA's.
    axes: (config) -> sizes of the letters in its steps' shapes, beyond LLaMA's.
    split: (config, layer, linear, what a file gives of it) -> the weight that the layer has of it.
    make_layer: (config, the parts of a layer that a reader gives) -> the fields of its class.
    of_layers: (config, layers) -> the config of a model that consists of these layers.
    new_states: (config, slots, dtype) -> what layers without keys keep of so many sequences; None: nothing.
    state_size: (config, layer) -> how many numbers of that a sequence has in a layer; 0: the layer has keys and values.
    also_recorded: function of an op of its own -> (hook, function of the same arguments): what a recorder keeps beside.
    from_recorded: the same function -> what gives its result from what is kept beside and its arguments.
    lacks: what a backend without kernels of its own for this family cannot compute, in words; () if any backend can.
    names: what files call its parts, by the names of its layers' fields; the others are called as LLaMA's.
    place: (config, layer, linear, "hf" or "gguf") -> where that file stores a linear; None: in a tensor of its own.
    array_shapes: (config, layer) -> the shape of each array of that block that is neither a linear nor a norm.
    arrays: how files store these, by their names.
    hf, gguf: how config.json and GGUF's metadata say it; None: no such files.
    mistakes: what crossval tries in its models, beside what it tries in all.
    feed_forward_words: (config) -> the width of its feed-forward, for a line about its shape.
    end_of_embedded: the token that texts end in whose embedding is asked.
    example_fields: of `example`.
    """

    model_type: str
    config: type[ModelConfig] = ModelConfig
    nested: Mapping[str, type] = field(default_factory=dict)
    layer_class: Callable[[Any, int], type[LayerWeights]] = lambda config, layer: LayerWeights
    steps: Callable[[Any, int], list[TraceStep]] | None = None  # None: LLaMA's
    constants: Callable[[Any], Mapping[str, float]] = lambda config: {}
    axes: Callable[[Any], Mapping[str, int]] = lambda config: {}
    lacks: Callable[[Any], Sequence[str]] = lambda config: ()
    split: Callable[[Any, int, str, LinearWeight], LinearWeight] = lambda config, layer, linear, w: w
    make_layer: Callable[[Any, dict[str, Any]], dict[str, Any]] = lambda config, parts: parts
    of_layers: Callable[[Any, Sequence[int]], ModelConfig] = config_of_layers
    new_states: Callable[[Any, int, np.dtype], States | None] = lambda config, slots, dtype: None
    state_size: Callable[[Any, int], int] = lambda config, layer: 0
    also_recorded: AlsoRecorded = field(default_factory=dict)
    from_recorded: Mapping[Callable[..., Array], Callable[..., Array]] = field(default_factory=dict)
    names: Mapping[str, PartNames] = field(default_factory=dict)
    place: Callable[[Any, int, str, str], LinearPlace | None] = lambda config, layer, linear, style: None
    hf: HfForm | None = None
    gguf: GgufForm | None = None
    array_shapes: Callable[[Any, int], dict[str, tuple[int, ...]]] = lambda config, layer: {}
    arrays: Mapping[str, ArrayForm] = field(default_factory=dict)
    mistakes: tuple[Hypothesis, ...] = ()
    feed_forward_words: Callable[[Any], str] = lambda config: f"ffn {config.intermediate_size}"
    end_of_embedded: str | None = None
    example_fields: Mapping[str, Any] = field(default_factory=dict)

    def example(self, **changes: Any) -> ModelConfig:
        """A small config of the family, with all that it has."""
        sizes: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64}
        fields = {"model_type": self.model_type, "activation": "silu", "norm_eps": 1e-6, **sizes, **heads}
        return self.config(**{**fields, **self.example_fields, **changes})
