"""A model in a GGUF file: `GgufCheckpoint`.

What no field of the file says is decided from its contents, and said in `evidence`: which dialect the type ids are in,
which layout I2_S matrices have, whether a float matrix is ternary already, and whether a llama is a BitNet at all.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ...errors import FormatError, ShapeError
from ...reference import quantization
from ...reference.weights import DenseWeight, LinearWeight, TernaryWeight
from ..checkpoint import Checkpoint, ReadOptions, has_bias, is_ternary, linear_shape, norm_size
from ..finite import first_not_finite
from .blocks import DEQUANTIZABLE, dequantize, ternary_from_blocks
from .config import ROPE_FREQS, read_gguf_config, tensor_shape
from .evidence import check_dialect, find_i2_s_layout, find_ternary, tensor_error
from .file import PLAIN_DTYPES, GgufFile, GgufTensor
from .i2_s import fits_layout, i2_s_scale, unpack_i2_s
from .names import block_linears, gguf_name, unpermute_rows

_FLOATS = ("F32", "F16", "BF16")


class GgufCheckpoint(Checkpoint):
    """A .gguf file of architecture bitnet, bitnet-25, bitnet-b1.58 or llama.

    metadata: the file's, with the tokenizer in it ("tokenizer.ggml.tokens", ...).
    """

    def __init__(self, path: Path, options: ReadOptions | None = None) -> None:
        self.path = path
        self.options = options or ReadOptions()
        self.evidence: list[str] = []
        self.file = GgufFile(path)
        try:
            self.metadata, self.typed = self.file.metadata, self.file.typed
            self.taken: set[str] = set()
            self._tiles: dict[tuple[int, int], tuple[int, int, int]] = {}
            check_dialect(self.file, self.evidence)
            self.config = read_gguf_config(self.file, find_ternary(self.file, self.evidence))
            self._permuted = self.metadata["general.architecture"] == "llama"
            self.taken |= {ROPE_FREQS} & set(self.file.tensors)  # read with the configuration
            self.kind = self._kind()
            self._i2_s_layout = find_i2_s_layout(
                self.file, self.config, self.options.i2_s_layout, self.norm, self.evidence
            )
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self.file.close()

    # -- what kind of file -------------------------------------------------------------------------------------------

    def _kind(self) -> str:
        first = next(block_linears(self.file), None)
        name = first.type.name if first is not None else "F16"
        return "gguf-" + ("tl2" if name == "TL2/MXFP4" else name.lower())

    # -- reading -----------------------------------------------------------------------------------------------------

    def _fail(self, name: str, message: str) -> FormatError:
        return tensor_error(self.file, name, message)

    def _tensor(self, name: str, shape: tuple[int, ...]) -> GgufTensor:
        """A tensor that must be there with that shape."""
        found = tensor_shape(self.file, name, len(shape))
        if found != shape:
            raise self._fail(name, f"expected shape {list(shape)}, got {list(found)}")
        self.taken.add(name)
        return self.file.tensors[name]

    def _floats(self, tensor: GgufTensor) -> NDArray:
        """A tensor of any dense type: F32, F16 and BF16 as they are, blocks as float32. All finite."""
        kind = tensor.type.name
        if kind in _FLOATS:
            array = self.file.read(tensor.name)
        elif kind in DEQUANTIZABLE:
            array = dequantize(self.file.read_raw(tensor.name), kind, tensor.shape)
        else:
            raise self._fail(tensor.name, f"expected a dense type ({', '.join(DEQUANTIZABLE)}), got {kind}")
        if (bad := first_not_finite(array)) is not None:
            raise self._fail(tensor.name, f"holds {bad[1]} at index {bad[0]}; expected finite numbers")
        return array

    def _vector(self, name: str, size: int) -> NDArray[np.float32]:
        tensor = self._tensor(name, (size,))
        if tensor.type.name not in PLAIN_DTYPES:
            raise self._fail(name, f"expected F32, F16 or BF16, got {tensor.type.name}")
        return self._floats(tensor).astype(np.float32)

    def embedding(self) -> DenseWeight:
        shape = (self.config.vocab_size, self.config.hidden_size)
        return DenseWeight(self._floats(self._tensor("token_embd.weight", shape)))

    def norm(self, name: str) -> NDArray[np.float32]:
        return self._vector(f"{gguf_name(name)}.weight", norm_size(self.config, name))

    def linear(self, name: str) -> LinearWeight:
        ours, theirs = linear_shape(self.config, name), gguf_name(name)
        tensor = self._tensor(f"{theirs}.weight", ours)
        heads = self._permuted_heads(name)
        bias = self._bias(name, ours[0])
        if not is_ternary(self.config, name):
            return DenseWeight(self._in_our_order(self._floats(tensor), heads), bias)
        w_t, scale = self._ternary(tensor, ours)
        packed = quantization.pack_ternary(self._in_our_order(w_t, heads))
        return TernaryWeight(packed, ours[1], self._with_scale_tensor(theirs, scale), bias)

    def master(self, name: str) -> NDArray | None:
        if not self._online or not is_ternary(self.config, name):
            return None
        tensor = self._tensor(f"{gguf_name(name)}.weight", linear_shape(self.config, name))
        w = self._floats(tensor)
        if quantization.split_ternary(w.astype(np.float32)) is not None:
            return None
        return self._in_our_order(w, self._permuted_heads(name))

    def dense_dtype(self, name: str) -> np.dtype:
        tensor = self.file.tensors.get(f"{gguf_name(name)}.weight")
        if tensor is not None and tensor.type.name in DEQUANTIZABLE:
            return PLAIN_DTYPES.get(tensor.type.name, np.dtype(np.float32))
        return super().dense_dtype(name)  # which says what is wrong

    def _in_our_order(self, w: NDArray, heads: int) -> NDArray:
        return np.ascontiguousarray(unpermute_rows(w, heads)) if heads else w

    def _permuted_heads(self, name: str) -> int:
        """How many heads' rows are permuted in this linear: those of q and k under the architecture llama, else 0."""
        heads = {"q_proj": self.config.num_attention_heads, "k_proj": self.config.num_key_value_heads}
        return heads.get(name.rpartition(".")[2], 0) if self._permuted else 0

    def _bias(self, name: str, size: int) -> NDArray[np.float32] | None:
        if not has_bias(self.config, name):
            return None
        return self._in_our_order(self._vector(f"{gguf_name(name)}.bias", size), self._permuted_heads(name))

    def _with_scale_tensor(self, theirs: str, scale: np.float32) -> np.float32:
        """Older converters of llama.cpp keep the scale apart, in `<name>.scale`: the matrix then holds -1, 0, +1."""
        name = f"{theirs}.scale"
        if name not in self.file.tensors:
            return scale
        apart = self._vector(name, 1)[0]
        if apart <= 0:
            raise self._fail(name, f"expected a scale above zero, got {apart}")
        return np.float32(scale * apart)

    def _ternary(self, tensor: GgufTensor, shape: tuple[int, int]) -> tuple[NDArray[np.int8], np.float32]:
        """(w_t, scale) of a BitLinear's matrix of whatever type."""
        kind = tensor.type.name
        if kind in ("TQ1_0", "TQ2_0"):
            found = self._ternary_blocks(tensor)
            if found is None:
                raise self._fail(
                    tensor.name,
                    f"is {kind} whose blocks have different scales: it was not ternary when it was quantised, so no "
                    "single ternary matrix is in it. Convert it again from the ternary or the master weights",
                )
            return found
        if kind == "I2_S":
            return self._i2_s(tensor, shape)
        if kind in ("TL1", "TL2/MXFP4"):
            return self._tl(tensor, shape)
        w = self._floats(tensor).astype(np.float32, copy=False)
        split = quantization.split_ternary(w)
        if split is not None:
            return split
        if w.any() and not self._online:
            raise self._fail(tensor.name, "is ternary (-s, 0, +s) where it begins and holds other values further on")
        if kind not in _FLOATS:
            raise self._fail(
                tensor.name,
                f"is a BitNet's matrix in {kind}, whose values are no longer ternary; use a file in I2_S, TQ1_0, "
                "TQ2_0, F16, BF16 or F32",
            )
        return quantization.quantize_weights(w)

    @property
    def _online(self) -> bool:
        return self.config.quantization is not None and self.config.quantization.scale_convention == "absmean"

    def _ternary_blocks(self, tensor: GgufTensor) -> tuple[NDArray[np.int8], np.float32] | None:
        shape = (tensor.shape[0], tensor.shape[1])
        try:
            return ternary_from_blocks(self.file.read_raw(tensor.name), tensor.type.name, shape)
        except FormatError as error:
            raise self._fail(tensor.name, error.message) from None

    def _i2_s(self, tensor: GgufTensor, shape: tuple[int, int]) -> tuple[NDArray[np.int8], np.float32]:
        raw = self.file.read_raw(tensor.name)
        if not fits_layout(shape, self._i2_s_layout):
            raise self._fail(tensor.name, f"shape {list(shape)} cannot be I2_S in the {self._i2_s_layout} layout")
        try:
            return unpack_i2_s(raw, shape, self._i2_s_layout), i2_s_scale(raw)
        except FormatError as error:
            raise self._fail(tensor.name, error.message) from None

    def _tl(self, tensor: GgufTensor, shape: tuple[int, int]) -> tuple[NDArray[np.int8], np.float32]:
        """TL1 and TL2: the scale in a tensor of its own, the tile sizes nowhere (see `tl`)."""
        from .tl import decode_tl, tl_nbytes

        kind: Literal["tl1", "tl2"] = "tl1" if tensor.type.name == "TL1" else "tl2"
        scale = self._vector(f"{tensor.name}_scale", 1)[0]
        if scale <= 0:
            raise self._fail(f"{tensor.name}_scale", f"expected a scale above zero, got {scale}")
        size = tl_nbytes(kind, *shape)
        if tensor.nbytes < size:
            raise self._fail(
                tensor.name, f"expected {size} bytes for {kind.upper()} of {list(shape)}, got {tensor.nbytes}"
            )
        raw = self.file.read_raw(tensor.name, 0, size)
        try:
            found = decode_tl(
                kind,
                raw,
                *shape,
                tiles=self._tiles.get(shape),
                config=self.options.tl_tiles,
                field=tensor.name,
            )
        except (FormatError, ShapeError) as error:
            raise self._fail(tensor.name, getattr(error, "message", str(error))) from None
        if shape not in self._tiles:
            self._tiles[shape] = found.tiles[0], found.tiles[1], found.tiles[2]
            self.evidence.append(f"{kind.upper()} tiles of {list(shape)}: {found.evidence}")
        return found.w_t, scale

    def tokenizer_files(self) -> dict[str, bytes]:
        from ...tokenizers.gguf_vocab import tokenizer_files_from_gguf

        return tokenizer_files_from_gguf(self.metadata, self.path) if "tokenizer.ggml.tokens" in self.metadata else {}

    def finish(self) -> None:
        left = [name for name in self.file.tensors if name not in self.taken]
        if left:
            more = f" (and {len(left) - 1} more)" if len(left) > 1 else ""
            arch = self.metadata["general.architecture"]
            raise self._fail(left[0], f"this tensor is no part of a {arch} model as the metadata say{more}")
