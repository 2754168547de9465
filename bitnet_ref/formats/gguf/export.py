"""Writes a model as a GGUF file, byte for byte as bitnet.cpp's and llama.cpp's own tools do.

    f16, bf16, f32, q8_0   matrices as dequantised numbers, in that type
    i2_s                   ternary matrices in bitnet.cpp's type (x86 layout)
    tq1_0, tq2_0           ternary matrices in llama.cpp's types, in blocks of 256 inputs with a float16 scale
    iq2_bn                 ternary matrices in ik_llama.cpp's type, with a float32 scale for each row
    tl1, tl2               ternary matrices in bitnet.cpp's lookup-table types
    q2_0, pq2_0, ptq1_0    matrices that are ternary by groups, in blocks of 64 or 128 inputs with a float16 scale
    stq1_0                 the same in blocks of 256, of four weights 16 apart one is zero
    q1_0                   the same in blocks of 128, without zeros: binary

Of a model whose inputs stay in float, the embedding and the head are in these blocks too where they can be; what cannot
is dense. tq1_0, tq2_0 and iq2_bn hold such a model if a matrix has several scales: readers tell it from a BitNet so.

The embedding and an untied head are float16 unless another type is asked for, norms and biases float32. `write_gguf`
writes any metadata and tensors.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np
from numpy.typing import NDArray

from ...errors import ConfigError, FormatError, ShapeError
from ...families import family_of
from ...families.groups import split_tensor
from ...families.hadamard import gguf_keys
from ...reference.layers import Array, Floats
from ...reference.quantization import pack_ternary
from ...reference.weights import TernaryLinear, linear_name
from ...system.atomic import atomic_path, check_space
from ..checkpoint import (
    MODULES_FILE,
    Checkpoint,
    Progress,
    arrays_of_layer,
    files_of_texts,
    has_bias,
    is_ternary,
    linear_names,
    linear_shape,
    read_part,
    ticker,
)
from ..names import gguf_name
from ..places import linear_place, stored_matrix
from ..planned_tensors import cut_by_size
from .blocks import (
    BY_KIND,
    BY_NAME,
    TERNARY_BLOCKS,
    block_scales,
    blocks_from_groups,
    blocks_from_ternary,
    codes_fit,
    iq2_bn_rows,
    quantize,
)
from .config import (
    LINEAR_NORM_EPS,
    ROPE_FACTORS,
    ROPE_FREQS,
    architecture,
    gguf_metadata,
    llama3_divisors,
    special_token_metadata,
)
from .evidence import permute_rows, permuted_heads
from .file import ARRAY, DEFAULT_ALIGNMENT, MAGIC, MAX_NAME, MAX_RANK, NAME_OF, SCALARS, STRING, VERSIONS, Typed
from .i2_s import StaleTail, fits_layout, pack_i2_s
from .tl import pack_tl, tl_nbytes
from .tl_tiles import KNOWN_TILES, TLKind, read_kernel_config

DENSE_KINDS = ("f16", "bf16", "f32", "q8_0")
BLOCK_KINDS = tuple(name.lower() for name in TERNARY_BLOCKS)
TL_KINDS: tuple[TLKind, ...] = ("tl1", "tl2")
BASIS_KINDS = ("pq2_0", "ptq1_0")  # of matrices that may be in a Hadamard basis
GROUP_KINDS = ("q2_0", *BASIS_KINDS, "stq1_0", "q1_0")
ROW_KIND = "iq2_bn"
EITHER_KINDS = (*BLOCK_KINDS, ROW_KIND)  # of BitLinears, and of matrices whose inputs stay in float
KINDS = (*DENSE_KINDS, "i2_s", *EITHER_KINDS, *TL_KINDS, *GROUP_KINDS)
_WORDS = {  # of what a matrix must be whose input stays in float
    **{
        kind: f"ternary by groups of {BY_KIND[kind].block_values} inputs"
        for kind in ("q2_0", *BASIS_KINDS, *BLOCK_KINDS)
    },
    ROW_KIND: "ternary with one scale for each row, of whole blocks of 64 inputs",
    "stq1_0": "ternary by groups of 256 inputs with one zero in each four weights that are 16 apart",
    "q1_0": "-d or +d, without zeros, by groups of 128 inputs",
}
# llama_ftype: of llama.cpp, for I2_S, TL1 and TL2 of bitnet.cpp, for IQ2_BN of ik_llama.cpp
_FILE_TYPES = {"bf16": 32, "q8_0": 7, "i2_s": 40, "tl1": 38, "tl2": 39, "tq1_0": 36, "tq2_0": 37, "q2_0": 41}
_FILE_TYPES |= {"q1_0": 40, "stq1_0": 42, ROW_KIND: 137}
_QUANTIZATION_VERSION = 2  # of ggml's blocks
# The order of bitnet.cpp's converter, which is that of the tensors' names in Hugging Face checkpoints; others follow
_NORM_ORDER = (
    *("attn_norm", "ffn_sub_norm", "ffn_norm", "attn_sub_norm", "attn_post_norm", "ffn_post_norm", "q_norm", "k_norm"),
)
_LINEAR_ORDER = (
    *("down_proj", "gate_proj", "up_proj", "k_proj", "o_proj", "q_proj", "v_proj", "z_proj", "a_proj", "b_proj"),
)
_CODE_OF = {name: code for code, name in NAME_OF.items()}


def _in_order(names: Iterable[str], order: Sequence[str]) -> list[str]:
    """The names as they come in `order`, then those that are not in it."""
    return sorted(names, key=lambda name: order.index(name) if name in order else len(order))


class TensorToWrite(NamedTuple):
    """A tensor to be written. `produce` is called once, just before it is written, and returns its bytes."""

    name: str
    shape: tuple[int, ...]  # rows first
    type: str  # "F16", "I2_S", ...
    produce: Callable[[], NDArray[np.uint8]]
    nbytes: int | None = None  # for the types whose size does not follow from the shape (TL1, TL2)

    @property
    def size(self) -> int:
        """Bytes."""
        return BY_NAME[self.type].nbytes(self.shape) if self.nbytes is None else self.nbytes


def write_gguf_model(
    checkpoint: Checkpoint,
    path: str | os.PathLike[str],
    kind: str = "i2_s",
    *,
    tokenizer: Mapping[str, Typed] | None = None,
    dense_type: str = "F16",
    tl_tiles: str | os.PathLike[str] | None = None,
    split_size: int | None = None,
    progress: Progress | None = None,
) -> None:
    """Write an open checkpoint with one matrix in memory at a time.

    kind: one of `KINDS`; the types for ternary matrices take ternary models only.
    tokenizer: the metadata from "tokenizer.ggml.model" on. Without it the file has no vocabulary and only names the
        tokens that begin and end a text.
    dense_type: of the embedding and an untied head: F16, BF16, F32 or Q8_0.
    tl_tiles: the kernel_config.ini of the bitnet.cpp that will run a tl1 or tl2 file; not needed for shapes that
        bitnet.cpp has tile sizes for.
    split_size: write files of so many bytes each into the folder `path`: see `write_split_gguf`.

    Raises FormatError for a kind that cannot hold this model and for a shape that does not fit the kind, ConfigError
    for what GGUF cannot say, NumericsError for values beyond the type.
    """
    config = checkpoint.config
    if kind not in KINDS:
        raise FormatError(f"expected one of {', '.join(KINDS)}, got {kind!r}", path=path)
    makes_vectors = MODULES_FILE in files_of_texts(checkpoint.texts_path)
    own_tokens = special_token_metadata(config) if tokenizer is None else tokenizer
    metadata = gguf_metadata(config, makes_vectors) | dict(own_tokens)
    tensors = _ModelTensors(checkpoint, kind, dense_type, tl_tiles)
    metadata |= tensors.basis_metadata()
    if kind in _FILE_TYPES:
        metadata["general.quantization_version"] = Typed("uint32", _QUANTIZATION_VERSION)
        metadata["general.file_type"] = Typed("uint32", _FILE_TYPES[kind])
    planned = list(tensors.all())
    if kind in BLOCK_KINDS:
        planned.sort(key=_llama_cpp_order)
    try:
        if split_size is None:
            write_gguf(path, metadata, planned, progress)
        else:
            write_split_gguf(Path(path), metadata, planned, split_size, progress)
    except ShapeError as error:  # an embedding whose rows are no whole number of Q8_0 blocks
        raise FormatError(f"{error}; use gguf-f16") from None


def _llama_cpp_order(tensor: TensorToWrite) -> tuple[int, str]:
    """The order of llama.cpp's quantiser: tensors outside the blocks first, then block by block, by name."""
    name = tensor.name
    return (int(name.split(".")[1]) if name.startswith("blk.") else -1), name


class _ModelTensors:
    """The tensors of a model in the order of the file."""

    def __init__(
        self, checkpoint: Checkpoint, kind: str, dense_type: str, tl_tiles: str | os.PathLike[str] | None
    ) -> None:
        self.checkpoint, self.config, self.kind, self.dense_type = checkpoint, checkpoint.config, kind, dense_type
        self.architecture = architecture(self.config)
        self.tail = StaleTail()
        self.scales: dict[str, np.float32] = {}  # of the TL matrices that are written
        self.tl_tiles = tl_tiles
        # whether matrices are in blocks (or rows) with scales of their own, and their inputs in float
        self.by_groups = kind in GROUP_KINDS or (kind in EITHER_KINDS and self.config.quantization is None)
        self._check()

    def _check(self) -> None:
        quantized = self.config.quantization
        if self.checkpoint.input_norm_eps not in (None, LINEAR_NORM_EPS):
            message = f"in GGUF files the norm inside a linear has the eps {LINEAR_NORM_EPS}; convert to native instead"
            raise ConfigError(message, field="rms_norm_eps")
        if self.kind not in BASIS_KINDS:
            self.checkpoint.require_plain_basis(f"gguf-{self.kind}")
        if self.by_groups:
            self._check_groups()
            return
        if quantized is not None and not quantized.int8_activations:
            message = f"gguf-{self.kind} means that activations are int8, and here they stay floats; use gguf-q2_0"
            raise ConfigError(message, field="int8_activations")
        if quantized is None and self.kind not in DENSE_KINDS:
            self._refuse_floats()
        if not self.config.tie_word_embeddings and is_ternary(self.config, "lm_head"):
            message = "a ternary head is not written to GGUF, whose readers take it as dense; convert to native instead"
            raise FormatError(message, field="lm_head")
        for name in linear_names(self.config):
            n, k = linear_shape(self.config, name)
            if not is_ternary(self.config, name):
                if self.config.sub_norms:
                    message = f"is dense; in the architecture {self.architecture} every linear is ternary"
                    raise FormatError(message, field=name)
                continue
            if self.kind in EITHER_KINDS and k % (size := BY_KIND[self.kind].block_values):
                message = f"{self.kind} has blocks of {size} inputs, and {name} has {k}; use {self._fitting_kind()}"
                raise FormatError(message, field=name)
            if self.kind == "i2_s" and not fits_layout((n, k), "x86"):
                message = f"i2_s has blocks of 128 weights, and {name} has {n} x {k}; use gguf-f16"
                raise FormatError(message, field=name)

    def _refuse_floats(self) -> NoReturn:
        if any(self._split(name) for name in linear_names(self.config)):
            message = f"gguf-{self.kind} means that activations are int8, and here they stay floats"
            raise FormatError(f"{message}; use gguf-q2_0 or gguf-f16")
        targets = ", ".join(f"gguf-{kind}" for kind in DENSE_KINDS)
        raise FormatError(f"this model is dense, and gguf-{self.kind} holds ternary matrices; use {targets}")

    def _check_groups(self) -> None:
        """Errors for a model without matrices that are ternary by groups, as this kind holds them."""
        if self.config.quantization is not None and self.config.quantization.int8_activations:
            message = f"gguf-{self.kind} means that activations stay floats, and here they are int8"
            raise FormatError(f"{message}; use native, or {self._fitting_kind()}", field="quantization")
        split = (self._groups(name) for name in linear_names(self.config))
        scales = [np.unique(each[1][each[1] != 0])[:2] for each in split if each is not None]
        if not scales:
            if self.kind in EITHER_KINDS and not any(self._split(name) for name in linear_names(self.config)):
                self._refuse_floats()
            message = f"no linear of this model is {_WORDS[self.kind]}, which {self.kind} has"
            raise FormatError(f"{message}; use gguf-f16", path=self.checkpoint.path)
        if self.kind in EITHER_KINDS and all(len(each) < 2 for each in scales):
            message = f"gguf-{self.kind} with one scale in each matrix means that activations are int8"
            raise FormatError(f"{message}, and here they stay floats; use gguf-q2_0", path=self.checkpoint.path)

    def basis_metadata(self) -> dict[str, Typed]:
        """The keys that say in which basis matrices are; none where all are in the plain one."""
        bases = {}
        for name, basis in self.checkpoint.bases.items():
            place = linear_place(self.config, name, "gguf")
            bases[f"{place.module}.weight"] = basis, place.columns
        return {key: Typed(kind, value) for key, kind, value in gguf_keys(bases)}

    def _weights(self, name: str) -> dict[str, Any]:
        """A linear or "embedding" in the basis of the file, and those that share its tensor, by name."""
        names = linear_place(self.config, name, "gguf").sharers or (name,)
        return {each: read_part(self.checkpoint, each) for each in names}

    def _stack(self, name: str, array: Callable[[str], Array]) -> Array:
        """The tensor of a linear or "embedding", in the order of the file, of `array` of each linear that shares it."""

        def read(each: str) -> Array:
            return self._permuted(each, array(each))

        basis = self.checkpoint.bases.get(name)
        if basis is not None and basis.has_columns(name, linear_place(self.config, name, "gguf").columns):
            return read(name)
        return stored_matrix(self.config, name, "gguf", read)

    def _stored(self, name: str, weights: Mapping[str, Any]) -> Array:
        """The same of their matrices as floats."""

        def floats(each: str) -> Floats:
            ternary: TernaryLinear | None = weights[each].bit_linear
            array: Array = weights[each].array if ternary is None else ternary.ternary() * ternary.w_dequant_scale
            return array

        return self._stack(name, floats)

    def _split(self, name: str) -> tuple[NDArray[np.uint8], Floats, int] | None:
        """(packed, scales, group) of a matrix that is ternary by groups; else None."""
        weights = self._weights(name)
        moves_columns = linear_place(self.config, name, "gguf").columns is not None
        stack = None if moves_columns else partial(self._stack, name)
        return split_tensor(weights, stack, partial(self._stored, name, weights))

    def _groups(self, name: str) -> tuple[NDArray[np.uint8], Floats] | None:
        """(packed, the scale of each block or row) of a matrix that the kind can hold; else None."""
        if not self.by_groups or (split := self._split(name)) is None:
            return None
        packed, scales, group = split
        k, kind = linear_shape(self.config, name)[1], BY_KIND[self.kind]
        if self.kind == ROW_KIND:
            return (packed, scales) if scales.shape[1] == 1 and k % kind.block_values == 0 else None
        d = block_scales(scales, group, k, kind.name)
        return None if d is None or not codes_fit(packed, d, kind.name) else (packed, d)

    def _produce(self, name: str, kind: str) -> NDArray[np.uint8]:
        """The bytes of a matrix that is dense or, of the file's kind, ternary by groups."""
        if not self.by_groups or kind != self.kind:
            return quantize(self._stored(name, self._weights(name)), kind.upper())
        groups = self._groups(name)
        assert groups is not None  # it was asked when the file was planned
        return iq2_bn_rows(*groups) if kind == ROW_KIND else blocks_from_groups(*groups, kind.upper())

    def _fitting_kind(self) -> str:
        """The smallest type that holds ternary matrices of these shapes, as `convert` calls it."""
        shapes = [
            linear_shape(self.config, name) for name in linear_names(self.config) if is_ternary(self.config, name)
        ]
        return "gguf-i2_s" if all(fits_layout(shape, "x86") for shape in shapes) else "gguf-f16"

    def all(self) -> Iterator[TensorToWrite]:
        config = self.config
        shape = (config.vocab_size, config.hidden_size)
        yield self._dense("embedding", shape)
        for index in range(config.num_hidden_layers):
            norms = config.norm_shapes(index)
            for short in _in_order(norms, _NORM_ORDER):
                name = f"blocks.{index}.{short}"
                theirs = f"{gguf_name(name, config)}.weight"
                yield self._vector(theirs, norms[short], partial(self.checkpoint.norm, name))
            for name, size in arrays_of_layer(config, index).items():
                yield self._array(name, size)
        yield self._vector("output_norm.weight", config.hidden_size, lambda: self.checkpoint.norm("final_norm"))
        if config.rope.rope_type == "llama3":
            divisors = llama3_divisors(config.rope, config.head_dim)
            yield self._vector(ROPE_FREQS, divisors.size, lambda: divisors)
        for field, name in ROPE_FACTORS.items() if config.rope.rope_type == "longrope" else ():
            factors = getattr(config.rope, field)
            yield self._vector(name, len(factors), partial(np.array, factors, np.float32))
        if not config.tie_word_embeddings:
            yield self._dense("lm_head", shape)
        for index in range(config.num_hidden_layers):
            for short in _in_order(config.linear_shapes(index), _LINEAR_ORDER):
                yield from self._linear(linear_name(index, short))

    def _vector(self, name: str, size: int, values: Callable[[], Floats]) -> TensorToWrite:
        return TensorToWrite(name, (size,), "F32", lambda: quantize(values(), "F32"))

    def _dense(self, name: str, shape: tuple[int, int]) -> TensorToWrite:
        kind = self.kind if self._groups(name) is not None else self.dense_type.lower()
        return TensorToWrite(f"{gguf_name(name)}.weight", shape, kind.upper(), partial(self._produce, name, kind))

    def _array(self, name: str, shape: tuple[int, ...]) -> TensorToWrite:
        """An array of a block that is neither a linear nor a norm."""
        _, layer, part = name.split(".", 2)
        form = family_of(self.config).arrays[part]

        def produce() -> NDArray[np.uint8]:
            return quantize(form.to_gguf(self.config, int(layer), self.checkpoint.array(name)), "F32")

        return TensorToWrite(f"blk.{layer}.{form.gguf}", shape, "F32", produce)

    def _permuted(self, name: str, w: Array) -> Array:
        heads = permuted_heads(self.config, self.architecture, name)
        return np.ascontiguousarray(permute_rows(w, heads)) if heads else w

    def _linear(self, name: str) -> Iterator[TensorToWrite]:
        shape, place = linear_shape(self.config, name), linear_place(self.config, name, "gguf")
        if name != (place.sharers or (name,))[0]:
            return  # stored with the first
        theirs = place.module
        if self.by_groups or not is_ternary(self.config, name):
            kind = self.kind if self.kind in DENSE_KINDS or self._groups(name) is not None else self.dense_type.lower()
            produce = partial(self._produce, name, kind)
            stack = () if place.stacked == 1 else (place.stacked,)
            rows = place.height // place.stacked
            yield TensorToWrite(f"{theirs}.weight", (*stack, rows, shape[1]), BY_KIND[kind].name, produce)
        else:
            size = tl_nbytes(self.kind, *shape) if self.kind in TL_KINDS else None
            matrix = partial(self._matrix, name)
            yield TensorToWrite(f"{theirs}.weight", shape, BY_KIND[self.kind].name, matrix, size)
            if self.kind in TL_KINDS:
                yield self._vector(f"{theirs}.weight_scale", 1, lambda: np.array([self.scales[name]], dtype=np.float32))
            if self.checkpoint.input_norm_eps is not None:
                yield self._vector(f"{theirs}_norm_in.weight", shape[1], partial(self._own_norm, name))
        if has_bias(self.config, name):
            yield self._vector(f"{theirs}.bias", shape[0], lambda: self._bias(name))

    def _own_norm(self, name: str) -> Floats:
        norm = self.checkpoint.linear(name).norm
        if norm is None:
            raise FormatError("has no norm of its own, as the other linears have", field=name)
        return norm.weight

    def _bias(self, name: str) -> Floats:
        bias = self.checkpoint.linear(name).bias
        assert bias is not None
        return self._permuted(name, bias)

    def _matrix(self, name: str) -> NDArray[np.uint8]:
        """The bytes of a linear that the config calls ternary."""
        kind, weight = self.kind, self.checkpoint.linear(name).bit_linear
        if weight is None:
            raise FormatError("is dense, as the config does not have it", field=name)
        w_t, scale = self._permuted(name, weight.ternary()), weight.w_dequant_scale
        if kind == "i2_s":
            return self.tail.apply(pack_i2_s(w_t, float(scale)))
        if kind in BLOCK_KINDS:
            return blocks_from_ternary(w_t, float(scale), kind.upper())
        if kind == ROW_KIND:
            return iq2_bn_rows(pack_ternary(w_t), np.full((len(w_t), 1), scale, dtype=np.float32))
        if kind in TL_KINDS:
            self.scales[name] = np.float32(scale)
            return self._tl(name, kind, w_t)
        return quantize(w_t * np.float32(scale), kind.upper())

    def _tl(self, name: str, kind: TLKind, w_t: NDArray[np.int8]) -> NDArray[np.uint8]:
        shape = (w_t.shape[0], w_t.shape[1])
        tiles = KNOWN_TILES[kind].get(shape, (None,))[0]
        if self.tl_tiles is not None:
            tiles = read_kernel_config(self.tl_tiles).get(shape)
        if tiles is None:
            message = (
                f"bitnet.cpp has no {kind} tile sizes for a matrix of {list(shape)}, and the file could not store "
                f"them; give tl_tiles, the kernel_config.ini with this shape, or use {self._fitting_kind()}"
            )
            raise FormatError(message, field=name)
        return pack_tl(kind, w_t, tiles)


# -- the container -----------------------------------------------------------------------------------------------------


def write_gguf(
    path: str | os.PathLike[str],
    metadata: Mapping[str, Typed],
    tensors: Iterable[TensorToWrite],
    progress: Progress | None = None,
) -> None:
    """Write a GGUF of version 3 with one tensor in memory at a time. Equal input gives equal bytes. An interrupt leaves
    the old file or none (see `atomic`).

    progress: called with (tensors written, tensors in total).
    Tensors are aligned to the metadata's general.alignment, or 32 bytes when it has none.
    """
    tensors = list(tensors)
    alignment = metadata.get("general.alignment", Typed("uint32", DEFAULT_ALIGNMENT)).value
    if alignment < 1 or alignment & (alignment - 1):
        raise FormatError(f"the alignment {alignment} is no power of two", path=path, field="general.alignment")
    header = bytearray(MAGIC + struct.pack("<IQQ", VERSIONS[-1], len(tensors), len(metadata)))
    header += _packed_metadata(metadata)
    offset = 0
    for tensor in tensors:
        header += _packed_string(tensor.name) + struct.pack("<I", len(tensor.shape))
        header += b"".join(struct.pack("<Q", n) for n in reversed(tensor.shape))
        header += struct.pack("<IQ", BY_NAME[tensor.type].id, offset)
        offset += tensor.size + -tensor.size % alignment
    header += bytes(-len(header) % alignment)
    tick = ticker(progress, len(tensors))
    with atomic_path(path) as temporary, open(temporary, "wb") as file:
        check_space(temporary, len(header) + offset)
        file.write(header)
        for tensor in tensors:
            data, size = tensor.produce(), tensor.size
            if data.size != size or data.dtype != np.uint8:
                message = f"expected {size} bytes to write, got {data.dtype} {data.shape}"
                raise FormatError(message, path=path, field=tensor.name)
            file.write(np.ascontiguousarray(data).data)
            file.write(bytes(-size % alignment))
            tick()


def write_split_gguf(
    folder: Path, metadata: Mapping[str, Typed], tensors: Sequence[TensorToWrite], limit: int, progress: Progress | None
) -> None:
    """Write model-00001-of-0000N.gguf and so on into an existing folder, as llama.cpp's gguf-split does.

    Each has at most `limit` bytes, unless one tensor has more. The first has the metadata, perhaps these alone.
    """
    largest_entry = MAX_NAME + 8 * MAX_RANK + DEFAULT_ALIGNMENT + 32  # of a tensor in the header, and its padding
    sizes = {tensor.name: tensor.size + largest_entry for tensor in tensors}
    beginning = len(_packed_metadata(metadata)) + 256
    parts = cut_by_size({"": beginning, **sizes}, limit)
    by_name, done = {tensor.name: tensor for tensor in tensors}, count(1)
    for number, part in enumerate(parts):
        split = {
            "split.no": Typed("uint16", number),
            "split.count": Typed("uint16", len(parts)),
            "split.tensors.count": Typed("int32", len(tensors)),
        }
        path = folder / f"model-{number + 1:05}-of-{len(parts):05}.gguf"
        own = [by_name[name] for name in part if name]
        tick = None if progress is None else lambda *_: progress(next(done), len(tensors))
        write_gguf(path, {**(metadata if number == 0 else {}), **split}, own, tick)


def _packed_metadata(metadata: Mapping[str, Typed]) -> bytes:
    return b"".join(_packed_string(key) + _packed_value(key, typed) for key, typed in metadata.items())


def _packed_string(text: str) -> bytes:
    data = text.encode("utf-8")
    return struct.pack("<Q", len(data)) + data


def _packed_value(key: str, typed: Typed) -> bytes:
    try:
        if not typed.type.startswith("["):
            code = _CODE_OF[typed.type]
            data = _packed_string(typed.value) if code == STRING else struct.pack(SCALARS[code][1], typed.value)
            return struct.pack("<I", code) + data
        code = _CODE_OF[typed.type[1:-1]]
        if code == STRING:
            data = b"".join(map(_packed_string, typed.value))
        else:
            data = np.asarray(typed.value, dtype=np.dtype(typed.type[1:-1]).newbyteorder("<")).tobytes()
        return struct.pack("<IIQ", ARRAY, code, len(typed.value)) + data
    except (struct.error, KeyError, TypeError, ValueError, AttributeError, OverflowError) as problem:
        raise FormatError(f"cannot be written as {typed.type}: {problem!r}", field=key) from problem
