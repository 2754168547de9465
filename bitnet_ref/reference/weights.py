"""A model's weights, at rest: ternary matrices packed to 2 bits, dense ones in the dtype of their file.

A kind of weight is a class with its own product; `families/` has more kinds. A backend may have a layout of its own
for each kind (`Backend.prepare`). Weights, norms and layers know their names: "blocks.3.attn.q_proj".
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import DTypeLike, NDArray

from ..errors import ShapeError
from . import quantization
from .layers import Array, Floats, Ints

Shared = dict[str, Any]  # what the linears of one input share: its quantised form
FEED_FORWARD = ("gate_proj", "up_proj", "down_proj", "router")  # the linears of a block's second half
# The names of a block's norms in a trace
TRACE_NAMES = {"attn_norm": "ln1", "ffn_norm": "ln2", "attn_sub_norm": "attn.sub_norm", "ffn_sub_norm": "mlp.sub_norm"}


@dataclass(frozen=True, eq=False)
class Norm:
    """An RMSNorm: y = x / sqrt(mean(x^2) + eps) * weight."""

    weight: NDArray[np.float32] = field(repr=False)  # (D,)
    eps: float
    name: str = ""  # as in a trace: "blocks.3.ln1"


class LinearWeight(ABC):
    """Any linear's weight, in any layout: (out_features, in_features) and perhaps a bias."""

    kind: ClassVar[str]  # "ternary", "dense", ...: a backend has kernels for kinds
    name: str  # "blocks.3.attn.q_proj", "lm_head"
    bias: NDArray[np.float32] | None  # (N,)
    bit_linear: TernaryLinear | None = None  # the BitLinear in it, whose input is quantised
    norm: Norm | None = None  # of its own, before it

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r} {self.shape}, {self.nbytes:,} bytes>"

    @property
    @abstractmethod
    def shape(self) -> tuple[int, int]:
        """(out_features, in_features)"""

    @property
    def nbytes(self) -> int:
        """Bytes that the weight and its bias take in memory."""
        return sum(array.nbytes for array in vars(self).values() if isinstance(array, np.ndarray))

    @abstractmethod
    def product(self, be: Any, x: Floats, shared: Shared) -> Floats:
        """The linear without its bias, by the ops of `be`, which are `Ops`.   x (N, K) -> (N, out)"""

    def plain(self) -> LinearWeight:
        """The same weight as the reference takes it."""
        return self

    def called(self, name: str) -> Self:
        """The same weight under this name."""
        return replace(self, name=name)  # type: ignore[type-var]

    def each(self, change: Callable[[LinearWeight], LinearWeight]) -> LinearWeight:
        """The weight changed; of one that stands for several, each of them."""
        return change(self)

    @abstractmethod
    def contents(self, name: str) -> Iterator[tuple[str, Array]]:
        """(name, array) of what the weight is, without its bias, in any layout: what its hash is made of."""

    def rows(self, index: Ints | slice, dtype: DTypeLike) -> Floats:
        """Some rows of the matrix as floats.   -> (n, K)"""
        raise ShapeError("embed", expected="a dense table", got=repr(self))


class TernaryLinear(LinearWeight):
    """A BitLinear's weight in any layout: W ~ w_t * w_dequant_scale."""

    kind = "ternary"
    in_features: int  # K
    w_dequant_scale: np.float32

    @abstractmethod
    def plain(self) -> TernaryWeight:
        """The same weight, packed as the reference takes it."""

    def product(self, be: Any, x: Floats, shared: Shared) -> Floats:
        if "int8" not in shared:
            shared["int8"] = be.quantize_activations(x)
        x_q, x_quant_scale = shared["int8"]
        y: Floats = be.dequantize(be.ternary_matmul(x_q, self), self, x_quant_scale)
        return y

    @property
    def bit_linear(self) -> TernaryLinear:  # type: ignore[override]
        return self

    def contents(self, name: str) -> Iterator[tuple[str, Array]]:
        yield name, self.plain().packed
        yield f"{name}.scale", np.asarray(self.w_dequant_scale, dtype=np.float32).reshape(1)

    def ternary(self) -> NDArray[np.int8]:
        """The matrix itself, (N, K) int8 in {-1, 0, +1}: four times the memory of its packed form."""
        return quantization.unpack_ternary(self.plain().packed, self.in_features)


@dataclass(frozen=True, eq=False, repr=False)
class TernaryWeight(TernaryLinear):
    """A BitLinear's matrix: W ~ w_t * w_dequant_scale, w_t in {-1, 0, +1}, packed as `quantization` describes."""

    packed: NDArray[np.uint8]  # (N, ceil(K/4))
    in_features: int  # K
    w_dequant_scale: np.float32
    bias: NDArray[np.float32] | None = None  # (N,)
    name: str = ""

    def __post_init__(self) -> None:
        columns = -(-self.in_features // quantization.CODES_PER_BYTE)
        if self.packed.dtype != np.uint8 or self.packed.ndim != 2 or self.packed.shape[1] != columns:
            expected = f"packed uint8 (N, {columns}) for {self.in_features} inputs"
            raise ShapeError("TernaryWeight", expected=expected, got=f"{self.packed.dtype} {self.packed.shape}")

    @classmethod
    def from_ternary(cls, w_t: NDArray[np.int8], w_dequant_scale: float) -> TernaryWeight:
        """w_t (N, K) int8 in {-1, 0, +1}."""
        return cls(quantization.pack_ternary(w_t), w_t.shape[1], np.float32(w_dequant_scale))

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.packed), self.in_features

    def plain(self) -> TernaryWeight:
        return self


@dataclass(frozen=True, eq=False, repr=False)
class DenseWeight(LinearWeight):
    """A matrix that is not quantised: the embedding, the head, every linear of a dense model."""

    kind = "dense"
    stored: Array  # (N, K) bfloat16, float16 or float32
    bias: NDArray[np.float32] | None = None  # (N,)
    wide: bool = False  # summed in float64 and rounded once, because an int8 rounding comes after it
    name: str = ""

    @property
    def shape(self) -> tuple[int, int]:
        return self.stored.shape[0], self.stored.shape[1]

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of `array`."""
        return self.stored.dtype

    @property
    def storage(self) -> str:
        """How `stored` holds the numbers: a dtype, or a type of blocks."""
        return self.dtype.name

    @property
    def array(self) -> Floats:
        """The matrix as floats, (N, K)."""
        return self.stored

    def widen(self, stored: Array) -> Array:
        """Some of the stored rows as floats.   -> (n, K)"""
        return stored

    def product(self, be: Any, x: Floats, shared: Shared) -> Floats:
        y: Floats = be.dense_matmul(x, self)
        return y

    def contents(self, name: str) -> Iterator[tuple[str, Array]]:
        yield name, self.array

    def rows(self, index: Ints | slice, dtype: DTypeLike) -> Floats:
        """Some rows of the matrix as floats.   index (n,) -> (n, K)"""
        if self.stored.dtype.name != "bfloat16":
            return self.stored[index].astype(dtype, copy=False)
        # A bfloat16 is the upper half of a float32; ml_dtypes takes rows slowly, and its cast crashes without memory.
        # Indexed, because take() refuses int64 in Pyodide.
        bits = self.stored.view(np.uint16)[index].astype(np.uint32) << 16
        return bits.view(np.float32).astype(dtype, copy=False)


@dataclass(frozen=True, eq=False)
class LayerWeights:
    """One block of LLaMA, or of BitNet b1.58, which has two more norms. Other families have subclasses with more."""

    name: str  # "blocks.3"
    attn_norm: Norm  # (D,)
    q_proj: LinearWeight  # (H*d, D)
    k_proj: LinearWeight  # (G*d, D)
    v_proj: LinearWeight  # (G*d, D)
    attn_sub_norm: Norm | None  # (H*d,), BitNet's
    o_proj: LinearWeight  # (D, H*d)
    ffn_norm: Norm  # (D,)
    gate_proj: LinearWeight  # (F, D)
    up_proj: LinearWeight  # (F, D)
    ffn_sub_norm: Norm | None  # (F,), BitNet's
    down_proj: LinearWeight  # (D, F)

    attention_text: ClassVar[Any] = None  # the family's function in the place of `model.attention_block`
    feed_forward_text: ClassVar[Any] = None  # the same of `model.feed_forward`
    trace_names: ClassVar[Mapping[str, str]] = TRACE_NAMES  # of its norms

    def linears(self) -> Iterator[tuple[str, LinearWeight]]:
        """(name, weight) of each linear: "q_proj", ..."""
        return ((name, part) for name, part in vars(self).items() if isinstance(part, LinearWeight))

    def norms(self) -> Iterator[tuple[str, Norm]]:
        """(name, norm) of the norms that this block has: "attn_norm", ..."""
        return ((name, part) for name, part in vars(self).items() if isinstance(part, Norm))

    def map_linears(self, change: Callable[[LinearWeight], LinearWeight]) -> Self:
        """The layer with each linear changed."""
        return replace(self, **{name: weight.each(change) for name, weight in self.linears()})  # type: ignore[arg-type]


@dataclass(frozen=True, eq=False)
class ModelWeights:
    """All of a model. With tied embeddings `lm_head` *is* `embedding`, the same object."""

    embedding: LinearWeight  # (V, D), of a kind that has `rows`
    layers: tuple[LayerWeights, ...] = field(repr=False)
    final_norm: Norm  # (D,)
    lm_head: LinearWeight  # (V, D)

    def __post_init__(self) -> None:
        linears = [weight for layer in self.layers for _, weight in layer.linears()]
        narrow = any(isinstance(weight, DenseWeight) and not weight.wide for weight in linears)
        if narrow and any(weight.bit_linear for weight in linears):  # dense among ternary: see the top of `layers`
            object.__setattr__(self, "layers", tuple(layer.map_linears(widen_sums) for layer in self.layers))

    @property
    def tied(self) -> bool:
        return self.lm_head is self.embedding

    def linears(self) -> Iterator[tuple[str, LinearWeight]]:
        """(name, weight) of every linear in the order of the computation: "blocks.0.attn.q_proj", ..., "lm_head"."""
        for index, layer in enumerate(self.layers):
            for name, weight in layer.linears():
                yield linear_name(index, name), weight
        yield "lm_head", self.lm_head

    def map_linears(self, change: Callable[[LinearWeight], LinearWeight]) -> ModelWeights:
        """The model with each linear and the embedding changed."""
        head = change(self.lm_head)
        embedding = head if self.tied else change(self.embedding)
        return ModelWeights(embedding, tuple(each.map_linears(change) for each in self.layers), self.final_norm, head)

    @property
    def nbytes(self) -> int:
        matrices = [weight.nbytes for _, weight in self.linears()] + [0 if self.tied else self.embedding.nbytes]
        norms = [norm.weight.nbytes for layer in self.layers for _, norm in layer.norms()]
        return sum(matrices) + sum(norms) + self.final_norm.weight.nbytes


def widen_sums(weight: LinearWeight) -> LinearWeight:
    """A dense linear of a model that has BitLinears too; other weights as they are."""
    return replace(weight, wide=True) if isinstance(weight, DenseWeight) else weight


def linear_name(layer: int, linear: str) -> str:
    """0, "q_proj" -> "blocks.0.attn.q_proj"."""
    return f"blocks.{layer}.{'mlp' if linear in FEED_FORWARD else 'attn'}.{linear}"
