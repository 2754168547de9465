"""`GgufCheckpoint`: a model in a GGUF file.

What no field of the file says is decided from its contents and recorded in `evidence` (see `gguf.evidence`).
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ...errors import ConfigError, FormatError, errors_at
from ...families import family_of
from ...families.block_rule import INPUTS, by_rule
from ...families.blocks import BLOCK_TYPES, BlockWeight, are_finite
from ...families.family import LinearPlace
from ...families.groups import from_blocks
from ...families.hadamard import read_gguf_bases
from ...families.linear_norms import put_norm
from ...families.moe import stack_rows
from ...reference import quantization
from ...reference.layers import Array, Floats
from ...reference.weights import DenseWeight, LinearWeight, TernaryWeight
from ..binary_file import find_not_finite
from ..checkpoint import (
    Checkpoint,
    LoadOptions,
    all_linears,
    array_shape,
    check_room,
    has_bias,
    is_ternary,
    linear_shape,
    norm_size,
    scale_convention,
)
from ..names import gguf_name
from ..packing import split_ternary
from ..places import linear_place
from .blocks import (
    BY_PACKAGE,
    DEQUANTIZABLE,
    GROUP_TYPES,
    TERNARY_BLOCKS,
    TERNARY_ROWS,
    dequantize,
    groups_from_blocks,
    groups_from_rows,
    pack_with_one_scale,
    quantize,
    read_values,
)
from .config import ROPE_FACTORS, ROPE_FREQS, read_gguf_config, tensor_shape
from .evidence import block_linears, check_dialect, find_i2_s_layout, find_ternary, permuted_heads, unpermute_rows
from .file import PLAIN_DTYPES, GgufTensor, open_gguf
from .i2_s import fits_layout, i2_s_scale, pack_from_i2_s

_FLOATS = ("F32", "F16", "BF16")
_PLANES = (*GROUP_TYPES, *TERNARY_BLOCKS, *TERNARY_ROWS)
_NO_BIT_LINEAR = (
    "a BitLinear's matrix has a single one. Convert it again from the ternary or the master weights; under llama and "
    'the like, activations="float" reads it as ternary by blocks'
)


class GgufCheckpoint(Checkpoint):
    """A .gguf file of one of `config.architectures`.

    metadata: the file's, with the tokenizer in it ("tokenizer.ggml.tokens", ...).
    """

    def __init__(self, path: Path, options: LoadOptions | None = None) -> None:
        self.path = path
        self.options = options or LoadOptions()
        self.evidence: list[str] = []
        self.file = open_gguf(path)
        self.metadata, self.typed = self.file.metadata, self.file.typed
        self._tiles: dict[tuple[int, int], tuple[int, int, int]] = {}
        with self.closed_on_error():
            check_dialect(self.file, self.evidence)
            quantization = find_ternary(self.file, self.evidence, self.options.activations)
            self.config = read_gguf_config(self.file, quantization, self.evidence)
            check_room(self.config, sum(tensor.nbytes for tensor in self.file.tensors.values()), path)
            self._describe_inputs()
            self._read_bases()
            self.taken = {ROPE_FREQS, *ROPE_FACTORS.values()} & set(self.file.tensors)  # read with the configuration
            first = next(block_linears(self.file), None)
            self.kind = f"gguf-{first.type.kind if first is not None else 'f16'}"
            self._i2_s_layout = find_i2_s_layout(
                self.file, self.config, self.options.i2_s_layout, self.norm, self.evidence
            )

    def _describe_inputs(self) -> None:
        """A sentence about matrices in blocks whose inputs are floats here and 8 bits in llama.cpp."""
        kinds = sorted({tensor.type.name for tensor in block_linears(self.file)} & {*BLOCK_TYPES})
        if kinds and self.options.activations != "blocks":
            rule = f'activations="blocks" rounds them as llama.cpp does for {" and ".join(kinds)}'
            self.evidence.append(f"activations: floats; {rule}")

    def close(self) -> None:
        self.file.close()

    def read_ahead(self) -> None:
        self.file.read_all_ahead()

    def fail(self, tensor: str, message: str) -> FormatError:
        return self.file.tensor_error(tensor, message)

    def _tensor(self, name: str, shape: tuple[int, ...]) -> GgufTensor:
        stored = tensor_shape(self.file, name, len(shape))
        if stored != shape:
            raise self.fail(name, f"expected shape {list(shape)}, got {list(stored)}")
        self.taken.add(name)
        return self.file.tensors[name]

    def _stack(self, name: str, place: LinearPlace, width: int) -> GgufTensor:
        """The tensor of a linear as a matrix; a file may have several, one above another, in three dimensions."""
        if place.stacked == 1:
            return self._tensor(name, (place.height, width))
        shape = (place.stacked, place.height // place.stacked, width)
        return replace(self._tensor(name, shape), shape=(place.height, width))

    def _floats(self, tensor: GgufTensor) -> Floats:
        """A tensor of any dense type: F32, F16 and BF16 as they are, blocks as float32. All finite."""
        kind = tensor.type.name
        if kind in _FLOATS:
            array = self.file.read(tensor.name).reshape(tensor.shape)
        elif kind in (*DEQUANTIZABLE, *BY_PACKAGE):
            dtype = np.float16 if kind in GROUP_TYPES else np.float32  # exact: -d, 0, +d (or 2d) with d a float16
            with self.file.naming(tensor.name):
                array = read_values(partial(self.file.read_raw, tensor.name), kind, tensor.shape, dtype)
        else:
            raise self.fail(tensor.name, f"expected a dense type ({', '.join(DEQUANTIZABLE)}), got {kind}")
        if message := find_not_finite(array):
            raise self.fail(tensor.name, message)
        return array

    def _vector(self, name: str, size: int) -> NDArray[np.float32]:
        tensor = self._tensor(name, (size,))
        if tensor.type.name not in PLAIN_DTYPES:
            raise self.fail(name, f"expected F32, F16 or BF16, got {tensor.type.name}")
        return self._floats(tensor).astype(np.float32)

    def embedding(self) -> LinearWeight:
        table = self._tensor("token_embd.weight", linear_shape(self.config, "embedding"))
        return self._matrix(table, self._place("embedding"), "embedding", None)

    def _matrix(
        self, tensor: GgufTensor, place: LinearPlace, name: str, bias: NDArray[np.float32] | None
    ) -> LinearWeight:
        """A matrix whose input stays in float, packed where the blocks are ternary."""
        kind, (height, width) = tensor.type.name, tensor.shape
        if self.options.activations == "blocks":
            return by_rule(self._ruled_matrix(tensor, place, name, bias))
        if kind in _PLANES:
            split = groups_from_rows if kind in TERNARY_ROWS else groups_from_blocks
            with self.file.naming(tensor.name):
                blocks = split(partial(self.file.read_raw, tensor.name), kind, (height, width))
            if blocks is not None and (own := place.take_groups(*blocks)) is not None:
                packed, scales = (self._in_our_order(each, name) for each in own)
                return from_blocks(packed, scales, width, bias)
        if kind in BLOCK_TYPES and place.columns is None:  # kept as it is, if all is finite
            stored = self.file.read_raw(tensor.name).reshape(height, -1)
            if are_finite(stored, kind):
                return BlockWeight(self._in_our_order(place.take(stored), name), bias, block_type=kind)
        return DenseWeight(self._in_our_order(place.take(self._floats(tensor)), name), bias)

    def _ruled_matrix(
        self, tensor: GgufTensor, place: LinearPlace, name: str, bias: NDArray[np.float32] | None
    ) -> DenseWeight:
        """A matrix that is multiplied by ggml's rule, in the blocks or floats of the file."""
        kind = tensor.type.name
        if kind in _FLOATS:
            return DenseWeight(self._in_our_order(place.take(self._floats(tensor)), name), bias)
        if kind not in INPUTS or place.columns is not None:
            why = f"{kind} is not among them" if kind not in INPUTS else "the columns of this one are in another order"
            message = f'{tensor.name}: "blocks" is for matrices in {", ".join((*_FLOATS, *INPUTS))}; {why}'
            raise ConfigError(message, path=self.path, field="activations")
        stored = self.file.read_raw(tensor.name).reshape(tensor.shape[0], -1)
        if not are_finite(stored, kind):
            raise self.fail(tensor.name, "holds a scale that is NaN or Inf")
        return BlockWeight(self._in_our_order(place.take(stored), name), bias, block_type=kind)

    def _read_bases(self) -> None:
        tensors = self.file.tensors.values()
        widths = {tensor.name: tensor.shape[-1] for tensor in tensors if tensor.shape}
        planes = {tensor.name: tensor.type.name for tensor in tensors if tensor.type.name in GROUP_TYPES}
        with errors_at(self.path):
            by_tensor, self._has_grouped_heads = read_gguf_bases(
                self.path, self.metadata, widths, planes, self.evidence
            )
        bases = {}
        for name in ("embedding", *all_linears(self.config)):
            place = self._place(name)
            if basis := by_tensor.get(f"{place.module}.weight"):
                bases[name] = basis.in_columns(place.columns)
        self.set_bases(bases, self.options)

    def _place(self, name: str) -> LinearPlace:
        place = linear_place(self.config, name, "gguf")
        has_own_order = name in self.bases or name in self.folded  # of inputs: a part of the basis
        return place._replace(columns=None) if has_own_order or self._has_grouped_heads else place

    def norm(self, name: str) -> NDArray[np.float32]:
        return self._vector(f"{gguf_name(name, self.config)}.weight", norm_size(self.config, name))

    def array(self, name: str) -> NDArray[np.float32]:
        _, layer, part = name.split(".", 2)
        form, shape = family_of(self.config).arrays[part], array_shape(self.config, name)
        tensor = f"blk.{layer}.{form.gguf}"
        stored = self._floats(self._tensor(tensor, shape)).astype(np.float32)
        try:
            return form.from_gguf(self.config, int(layer), stored)
        except ValueError as problem:
            raise self.fail(tensor, str(problem)) from None

    def linear(self, name: str) -> LinearWeight:
        shape, place = linear_shape(self.config, name), self._place(name)
        theirs = place.module
        if place.parts and f"{theirs}.weight" not in self.file.tensors:
            return self._stack_parts(place, name, shape[1])
        tensor = self._stack(f"{theirs}.weight", place, shape[1])
        bias = self._vector(f"{theirs}.bias", shape[0]) if has_bias(self.config, name) else None
        bias = None if bias is None else self._in_our_order(bias, name)
        if not is_ternary(self.config, name):
            return self._matrix(tensor, place, name, bias)
        eps = self.input_norm_eps
        norm = None if eps is None else self._vector(f"{theirs}_norm_in.weight", shape[1])
        packed, scale = self._packed(tensor, shape)
        packed = self._in_our_order(packed, name)
        apart = f"{theirs}.scale"  # older converters of llama.cpp write -1, 0, +1 and keep the scale here
        if apart in self.file.tensors:
            scale = np.float32(scale * self.checked_scale(apart, self._vector(apart, 1)[0]))
        return put_norm(TernaryWeight(packed, shape[1], scale, bias), norm, eps)

    def _stack_parts(self, place: LinearPlace, name: str, width: int) -> LinearWeight:
        """A linear of all experts, of a file with a tensor for each."""
        height = place.height // len(place.parts)
        tensors = [self._tensor(f"{part}.weight", (height, width)) for part in place.parts]
        try:
            return stack_rows([self._matrix(each, LinearPlace("", height), name, None) for each in tensors])
        except ValueError as problem:
            raise self.fail(tensors[0].name, f"and the same of the layer's other experts: {problem}") from None

    def _stored(self, place: LinearPlace) -> GgufTensor | None:
        """The tensor of a linear, or the first of several."""
        modules = place.module, *place.parts
        return next((t for module in modules if (t := self.file.tensors.get(f"{module}.weight"))), None)

    def master(self, name: str) -> Floats | None:
        if not self._online or not is_ternary(self.config, name):
            return None
        w = self._floats(self._tensor(f"{gguf_name(name)}.weight", linear_shape(self.config, name)))
        is_master = split_ternary(w.astype(np.float32)) is None
        return self._in_our_order(w, name) if is_master else None

    def dense_dtype(self, name: str) -> np.dtype:
        tensor = self._stored(self._place(name))
        if tensor is not None and tensor.type.name in (*DEQUANTIZABLE, *BY_PACKAGE):
            floats = np.dtype(np.float16 if tensor.type.name in GROUP_TYPES else np.float32)
            return PLAIN_DTYPES.get(tensor.type.name, floats)
        return super().dense_dtype(name)  # which says what is wrong

    def rounded(self, name: str, values: Floats) -> Floats:
        place = self._place(name)
        tensor = self._stored(place)
        if tensor is None or tensor.type.name != "Q8_0" or values.shape != linear_shape(self.config, name):
            return values
        stored = values if place.columns is None else values[:, np.argsort(place.columns)]
        rounded = dequantize(quantize(stored, "Q8_0"), "Q8_0", values.shape)
        return rounded if place.columns is None else rounded[:, place.columns]

    def _in_our_order(self, w: Array, name: str) -> Array:
        heads = permuted_heads(self.config, self.metadata["general.architecture"], name)
        return np.ascontiguousarray(unpermute_rows(w, heads) if heads else w)

    def _packed(self, tensor: GgufTensor, shape: tuple[int, int]) -> tuple[NDArray[np.uint8], np.float32]:
        """(packed, scale) of a BitLinear's matrix of any type."""
        kind = tensor.type.name
        if kind == "I2_S":
            return self._i2_s(tensor, shape)
        if kind in (*TERNARY_BLOCKS, *TERNARY_ROWS):
            with self.file.naming(tensor.name):
                matrix = pack_with_one_scale(partial(self.file.read_raw, tensor.name), kind, shape)
            if matrix is None:
                raise self.fail(tensor.name, f"is {kind} with several scales: {_NO_BIT_LINEAR}")
            return matrix
        w_t, scale = self._ternary(tensor, shape)
        return quantization.pack_ternary(w_t), scale

    def _ternary(self, tensor: GgufTensor, shape: tuple[int, int]) -> tuple[NDArray[np.int8], np.float32]:
        """(w_t, scale) of a matrix of one of the other types."""
        kind = tensor.type.name
        if kind in ("TL1", "TL2/MXFP4"):
            return self._tl(tensor, shape)
        w = self._floats(tensor).astype(np.float32, copy=False)
        split = split_ternary(w)
        if split is not None:
            return split
        if w.any() and not self._online:
            raise self.fail(tensor.name, "is ternary (-s, 0, +s) where it begins and holds other values further on")
        if kind not in _FLOATS:
            message = f"is a BitNet's matrix in {kind}, whose values are no longer ternary; use a file in I2_S, TQ1_0, "
            raise self.fail(tensor.name, message + "TQ2_0, F16, BF16 or F32")
        return quantization.quantize_weights(w)

    @property
    def _online(self) -> bool:
        return scale_convention(self.config.quantization) == "absmean"

    def _i2_s(self, tensor: GgufTensor, shape: tuple[int, int]) -> tuple[NDArray[np.uint8], np.float32]:
        """(packed, scale)"""
        raw = self.file.read_raw(tensor.name)
        if not fits_layout(shape, self._i2_s_layout):
            raise self.fail(tensor.name, f"shape {list(shape)} cannot be I2_S in the {self._i2_s_layout} layout")
        with self.file.naming(tensor.name):
            return pack_from_i2_s(raw, shape, self._i2_s_layout), i2_s_scale(raw)

    def _tl(self, tensor: GgufTensor, shape: tuple[int, int]) -> tuple[NDArray[np.int8], np.float32]:
        """TL1 and TL2: the scale is in a separate tensor, the tile sizes are not in the file (see `tl`)."""
        from .tl import decode_tl, tl_nbytes
        from .tl_tiles import TLKind

        kind: TLKind = "tl1" if tensor.type.name == "TL1" else "tl2"
        scale = self.checked_scale(f"{tensor.name}_scale", self._vector(f"{tensor.name}_scale", 1)[0])
        size = tl_nbytes(kind, *shape)
        if tensor.nbytes < size:
            expected = f"expected {size} bytes for {kind.upper()} of {list(shape)}"
            raise self.fail(tensor.name, f"{expected}, got {tensor.nbytes}")
        raw, tiles = self.file.read_raw(tensor.name, 0, size), self._tiles.get(shape)
        with self.file.naming(tensor.name):
            matrix = decode_tl(kind, raw, *shape, tiles=tiles, config=self.options.tl_tiles, field=tensor.name)
        if tiles is None:
            self._tiles[shape] = matrix.tiles
            self.evidence.append(f"{kind.upper()} tiles of {list(shape)}: {matrix.evidence}")
        return matrix.w_t, scale

    def tokenizer_files(self) -> dict[str, bytes]:
        from ...tokenizers.gguf_vocab import tokenizer_files_from_gguf

        return tokenizer_files_from_gguf(self.metadata, self.path) if "tokenizer.ggml.tokens" in self.metadata else {}

    def finish(self) -> None:
        unused = [name for name in self.file.tensors if name not in self.taken]
        drafting = self.metadata.get(f"{self.metadata['general.architecture']}.nextn_predict_layers")
        if np.any(drafting):  # blocks that draft
            drafts = tuple(f"blk.{self.config.num_hidden_layers + index}." for index in range(len(unused)))
            unused = [name for name in unused if not name.startswith(drafts)]
        self.refuse_unused(unused, f"a {self.metadata['general.architecture']} model as the metadata describe it")
