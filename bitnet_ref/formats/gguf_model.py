"""A model in a GGUF file: `GgufCheckpoint`.

What no field of the file says is decided from its contents, and said in `evidence`: which dialect the type ids are in,
which layout I2_S matrices have, whether a float matrix is ternary already, and whether a llama is a BitNet at all.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from .. import quantization
from ..errors import ConfigError, FormatError, ShapeError
from ..weights import DenseWeight, LinearWeight, TernaryWeight
from .checkpoint import Checkpoint, ReadOptions, linear_name, linear_shape, norm_sizes
from .gguf import PLAIN_DTYPES, GgufFile, GgufTensor
from .gguf_blocks import DEQUANTIZABLE, dequantize, ternary_from_blocks
from .gguf_config import BITNET_ARCHITECTURES, ROPE_FREQS, read_gguf_config, tensor_shape
from .i2_s import LAYOUTS, LayoutEvidence, fits_layout, i2_s_scale, same_for_all, unpack_i2_s

_FLOATS = ("F32", "F16", "BF16")
_TERNARY = ("I2_S", "TQ1_0", "TQ2_0", "TL1", "TL2/MXFP4")
_CHECK_BLOCK = 1 << 22  # values looked at in one go
_LAYERS_FOR_LAYOUT = 8  # how many layers are looked at, at most, to find the layout of I2_S

# Our name of a part -> a GGUF's
GGUF_LINEARS = {
    "q_proj": "attn_q",
    "k_proj": "attn_k",
    "v_proj": "attn_v",
    "o_proj": "attn_output",
    "gate_proj": "ffn_gate",
    "up_proj": "ffn_up",
    "down_proj": "ffn_down",
}
# The vector before each linear, and so one that its columns go with
_NORM_BEFORE = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj"), "attn_norm"),
    **dict.fromkeys(("gate_proj", "up_proj"), "ffn_norm"),
    "o_proj": "attn_sub_norm",
    "down_proj": "ffn_sub_norm",
}


def gguf_name(name: str) -> str:
    """Our name -> the GGUF's, without ".weight": "blocks.0.attn.q_proj" -> "blk.0.attn_q"."""
    outside = {"embedding": "token_embd", "final_norm": "output_norm", "lm_head": "output"}
    if name in outside:
        return outside[name]
    _, index, *_, part = name.split(".")
    return f"blk.{index}.{GGUF_LINEARS.get(part, part)}"


def permute_rows(w: NDArray, heads: int) -> NDArray:
    """Rows of q or k from the `half` order (ours) to `interleaved`, which llama.cpp's llama architecture has.

    In each head of d rows, row j and row j + d/2, which RoPE turns together, become neighbours 2j and 2j + 1.
    """
    return w.reshape(heads, 2, -1, *w.shape[1:]).swapaxes(1, 2).reshape(w.shape)


def unpermute_rows(w: NDArray, heads: int) -> NDArray:
    """The inverse of `permute_rows`."""
    return w.reshape(heads, -1, 2, *w.shape[1:]).swapaxes(1, 2).reshape(w.shape)


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
            self._taken: set[str] = set()
            self._tiles: dict[tuple[int, int], tuple[int, int, int]] = {}
            self._said: set[str] = set()
            self._check_dialect()
            self.config = read_gguf_config(self.file, ternary=self._looks_ternary())
            self._permuted = self.metadata["general.architecture"] == "llama"
            self._taken |= {ROPE_FREQS} & set(self.file.tensors)  # read with the configuration
            self.kind = self._kind()
            self._i2_s_layout = self._find_i2_s_layout()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self.file.close()

    # -- what kind of file -------------------------------------------------------------------------------------------

    def _linears(self) -> Iterator[GgufTensor]:
        """Matrices of the blocks, without asking the configuration how many there are."""
        names = {f"{theirs}.weight" for theirs in GGUF_LINEARS.values()}
        for name, tensor in self.file.tensors.items():
            if name.startswith("blk.") and name.rpartition(".")[0].rpartition(".")[2] + ".weight" in names:
                yield tensor

    def _check_dialect(self) -> None:
        """Say which dialect the clashing type ids 36 to 39 are in; refuse llama.cpp's MXFP4."""
        used = {tensor.type.name: tensor for tensor in self.file.tensors.values() if 36 <= tensor.type.id <= 39}
        if not used:
            return
        for name in ("I2_S", "TL1", "I8_S"):
            if name in used:
                reason = f"tensor type {used[name].type.id} is {name} there, and unused in llama.cpp"
                self.evidence.append(f"GGUF dialect: bitnet.cpp ({reason})")
                break
        else:
            tensor = used["TL2/MXFP4"]
            if f"{tensor.name}_scale" not in self.file.tensors:
                raise self._fail(
                    tensor.name,
                    "has the type 39, which is MXFP4 for llama.cpp and TL2 for bitnet.cpp; without a tensor "
                    f"{tensor.name}_scale it is MXFP4, which is not supported",
                )
            self.evidence.append(
                f"GGUF dialect: bitnet.cpp (tensor type 39 with a tensor {tensor.name}_scale is TL2, not MXFP4)"
            )

    def _looks_ternary(self) -> bool:
        """Whether a llama's linears are ternary: by their type, or because a float one holds -s, 0 and +s alone."""
        arch = self.metadata.get("general.architecture")
        if arch in BITNET_ARCHITECTURES:
            return True
        first = next(self._linears(), None)
        if first is None:
            return False
        if first.type.name in ("TQ1_0", "TQ2_0"):
            ternary = len(first.shape) == 2 and self._ternary_blocks(first) is not None
            if not ternary:
                self.evidence.append(f"dense: {first.name} is {first.type.name} whose blocks have different scales")
            return ternary
        if first.type.name in _TERNARY:
            return True
        if first.type.name in _FLOATS and len(first.shape) == 2:
            ternary = quantization.split_ternary(self._floats(first).astype(np.float32)) is not None
            if ternary:
                self.evidence.append(f"BitNet: {first.name} ({first.type.name}) holds only -s, 0 and +s")
            return ternary
        return False

    def _kind(self) -> str:
        first = next(self._linears(), None)
        name = first.type.name if first is not None else "F16"
        return "gguf-" + ("tl2" if name == "TL2/MXFP4" else name.lower())

    def _find_i2_s_layout(self) -> str:
        if not any(tensor.type.name == "I2_S" for tensor in self._linears()):
            return "x86"
        forced = self.options.i2_s_layout
        if forced is not None:
            if forced not in LAYOUTS:
                raise ConfigError(f"expected one of {', '.join(LAYOUTS)}, got {forced!r}", field="i2_s_layout")
            self.evidence.append(f"I2_S layout: {forced}, as it was asked for")
            return forced
        evidence = LayoutEvidence()
        for index in _spread(self.config.num_hidden_layers, _LAYERS_FOR_LAYOUT):
            self._compare_layouts(evidence, index)
            if evidence.judge().decided:
                break
        verdict = evidence.judge()
        self.evidence.append(verdict.words)
        return verdict.layout

    def _compare_layouts(self, evidence: LayoutEvidence, index: int) -> None:
        columns, rows = {}, {}
        for short in GGUF_LINEARS:
            name = linear_name(index, short)
            tensor = self.file.tensors.get(f"{gguf_name(name)}.weight")
            if tensor is None or tensor.type.name != "I2_S":
                continue
            shape = self._matrix_shape(tensor, name)
            try:
                both = evidence.densities(self.file.read_raw(tensor.name), shape)
            except FormatError as error:
                raise self._fail(tensor.name, error.message) from None
            columns[short] = {layout: pair[0] for layout, pair in both.items()}
            rows[short] = {layout: pair[1] for layout, pair in both.items()}
            norm = f"blocks.{index}.{_NORM_BEFORE[short]}"
            if f"{gguf_name(norm)}.weight" in self.file.tensors and norm in norm_sizes(self.config):
                evidence.add(columns[short], same_for_all(self.norm(norm)))
        for before in {"gate_proj", "up_proj"} & set(rows):  # neuron j is row j there and column j of down_proj
            if "down_proj" in columns:
                evidence.add(columns["down_proj"], rows[before])

    # -- reading -----------------------------------------------------------------------------------------------------

    def _fail(self, name: str, message: str) -> FormatError:
        tensor = self.file.tensors.get(name)
        return FormatError(message, path=self.path, offset=tensor.offset if tensor else None, field=name)

    def _tensor(self, name: str, shape: tuple[int, ...]) -> GgufTensor:
        """A tensor that must be there with that shape."""
        found = tensor_shape(self.file, name, len(shape))
        if found != shape:
            raise self._fail(name, f"expected shape {list(shape)}, got {list(found)}")
        self._taken.add(name)
        return self.file.tensors[name]

    def _matrix_shape(self, tensor: GgufTensor, name: str) -> tuple[int, int]:
        expected = linear_shape(self.config, name)
        self._tensor(tensor.name, expected)
        return expected

    def _floats(self, tensor: GgufTensor) -> NDArray:
        """A tensor of any dense type: F32, F16 and BF16 as they are, blocks as float32. All finite."""
        kind = tensor.type.name
        if kind in _FLOATS:
            array = self.file.read(tensor.name)
        elif kind in DEQUANTIZABLE:
            array = dequantize(self.file.read_raw(tensor.name), kind, tensor.shape)
        else:
            raise self._fail(tensor.name, f"expected a dense type ({', '.join(DEQUANTIZABLE)}), got {kind}")
        flat = array.reshape(-1)
        for start in range(0, flat.size, _CHECK_BLOCK):
            finite = np.isfinite(flat[start : start + _CHECK_BLOCK])
            if not finite.all():
                at = start + int(np.argmin(finite))
                index = [int(i) for i in np.unravel_index(at, array.shape)]
                raise self._fail(tensor.name, f"holds {float(flat[at])} at index {index}; expected finite numbers")
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
        return self._vector(f"{gguf_name(name)}.weight", norm_sizes(self.config)[name])

    def linear(self, name: str) -> LinearWeight:
        ours, theirs = linear_shape(self.config, name), gguf_name(name)
        tensor = self._tensor(f"{theirs}.weight", ours)
        heads = self._permuted_heads(name)
        bias = self._bias(name, ours[0])
        if bias is not None and heads:
            bias = unpermute_rows(bias, heads)
        ternary = None
        if name != "lm_head" or tensor.type.name in _TERNARY:
            ternary = self._ternary(tensor, ours)
        if ternary is None:
            array = self._floats(tensor)
            return DenseWeight(np.ascontiguousarray(unpermute_rows(array, heads)) if heads else array, bias)
        w_t, scale = ternary
        w_t = unpermute_rows(w_t, heads) if heads else w_t
        return TernaryWeight(quantization.pack_ternary(w_t), ours[1], self._with_scale_tensor(theirs, scale), bias)

    def _permuted_heads(self, name: str) -> int:
        """How many heads' rows are permuted in this linear: those of q and k under the architecture llama, else 0."""
        heads = {"q_proj": self.config.num_attention_heads, "k_proj": self.config.num_key_value_heads}
        return heads.get(name.rpartition(".")[2], 0) if self._permuted else 0

    def _bias(self, name: str, size: int) -> NDArray[np.float32] | None:
        part = name.split(".")[-2:][0]
        has = {"attn": self.config.attention_bias, "mlp": self.config.mlp_bias}.get(part, False)
        return self._vector(f"{gguf_name(name)}.bias", size) if has else None

    def _with_scale_tensor(self, theirs: str, scale: np.float32) -> np.float32:
        """Older converters of llama.cpp keep the scale apart, in `<name>.scale`: the matrix then holds -1, 0, +1."""
        name = f"{theirs}.scale"
        if name not in self.file.tensors:
            return scale
        apart = self._vector(name, 1)[0]
        if apart <= 0:
            raise self._fail(name, f"expected a scale above zero, got {apart}")
        return np.float32(scale * apart)

    def _ternary(self, tensor: GgufTensor, shape: tuple[int, int]) -> tuple[NDArray[np.int8], np.float32] | None:
        """(w_t, scale) of a matrix of whatever type; None for one of a model that is dense."""
        kind = tensor.type.name
        if self.config.quantization is None and kind not in ("I2_S", "TL1", "TL2/MXFP4"):
            return None
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
        return self._quantized(tensor)

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

    def _quantized(self, tensor: GgufTensor) -> tuple[NDArray[np.int8], np.float32]:
        """A dense matrix of a BitNet: ternary already (-s, 0, +s), or master weights, quantised by absmean."""
        kind = tensor.type.name
        w = self._floats(tensor).astype(np.float32, copy=False)
        split = quantization.split_ternary(w)
        if split is not None:
            self._say_once(f"{kind} matrices hold only -s, 0 and +s: s is taken as their scale")
            return split
        if kind not in _FLOATS:
            raise self._fail(
                tensor.name,
                f"is a BitNet's matrix in {kind}, whose values are no longer ternary; use a file in I2_S, TQ1_0, "
                "TQ2_0, F16, BF16 or F32",
            )
        self._say_once(f"{kind} matrices have many values: master weights, quantised by absmean")
        return quantization.quantize_weights(w)

    def _say_once(self, words: str) -> None:
        if words not in self._said:
            self._said.add(words)
            self.evidence.append(words)

    def tokenizer_files(self) -> dict[str, bytes]:
        from ..tokenizers.gguf_vocab import tokenizer_files_from_gguf

        return tokenizer_files_from_gguf(self.metadata) if "tokenizer.ggml.tokens" in self.metadata else {}

    def finish(self) -> None:
        left = [name for name in self.file.tensors if name not in self._taken]
        if left:
            more = f" (and {len(left) - 1} more)" if len(left) > 1 else ""
            arch = self.metadata["general.architecture"]
            raise self._fail(left[0], f"this tensor is no part of a {arch} model as the metadata say{more}")


def _spread(count: int, most: int) -> list[int]:
    """At most that many indices below `count`, evenly spread, the first first."""
    return sorted({round(i * (count - 1) / max(1, most - 1)) for i in range(min(count, most))})
