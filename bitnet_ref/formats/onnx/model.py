"""Reads a decoder's weights from an .onnx file: our own exports bit for bit, and those of the usual exporters.

The configuration comes from the file's metadata (our exports) or from the config.json beside it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import ConfigError, FormatError, errors_at
from ...families import config_from_dict
from ...families.linear_norms import put_norm
from ...reference import quantization
from ...reference.config import ModelConfig
from ...reference.layers import Array
from ...reference.weights import DenseWeight, LinearWeight, TernaryWeight
from ...system.json_file import is_present, parse_json_object
from ..checkpoint import (
    Checkpoint,
    LoadOptions,
    has_bias,
    is_ternary,
    linear_shape,
    norm_sizes,
    read_tokenizer_folder,
    scale_convention,
)
from ..hf.config import MAX_CONFIG_BYTES, read_hf_config
from ..names import hf_module, hf_modules
from ..packing import split_ternary
from .constants import Constants, ModelNames
from .file import CONFIG_KEY, FORMAT_KEY, FORMAT_VERSION, PACKED_SUFFIX, SCALE_SUFFIX, OnnxFile


class OnnxCheckpoint(Checkpoint):
    """An .onnx file, with the files of its external data beside it. Files are open only while they are read."""

    kind = "onnx"

    def __init__(self, path: Path, options: LoadOptions | None = None) -> None:
        self.path, self.evidence = path, []
        self.file = OnnxFile(path)
        self._ours = self.file.metadata.get(FORMAT_KEY)
        self.taken = set()
        self.config = self._read_config(options is not None and options.allow_unquantized)
        if self.config.num_hidden_layers > len(self.file.tensors):
            counts = f"{self.config.num_hidden_layers} layers, the file has {len(self.file.tensors)} tensors"
            raise FormatError(f"the configuration says {counts}", path=path)
        self._sizes = norm_sizes(self.config)
        self.constants = Constants(self.file)
        self.names = ModelNames(self.file, self.constants) if self._ours is None else None

    def fail(self, tensor: str, message: str) -> FormatError:
        return self.file.fail(tensor, message)

    def embedding(self) -> DenseWeight:
        shape = (self.config.vocab_size, self.config.hidden_size)
        if self.names is None:
            return DenseWeight(self._take(f"{hf_module('embedding')}.weight", shape))
        if self.names.embedding is None:
            raise self.file.fail("embed_tokens", "no Gather from a constant table of embeddings was found")
        table = self.constants.value(self.names.embedding)
        return DenseWeight(self._matrix("embedding", table, shape))

    def norm(self, name: str) -> NDArray[np.float32]:
        tensor = f"{hf_module(name)}.weight" if self.names is None else self.names.norms.get(name)
        if tensor is None:
            raise self.file.fail(name, f"no such norm was found ({' or '.join(hf_modules(name))})")
        return self._take(tensor, (self._sizes[name],)).astype(np.float32)

    def linear(self, name: str) -> LinearWeight:
        if self.names is None:
            return self._our_linear(hf_module(name), name)
        node, rows = self._node(self.names, name)
        shape = linear_shape(self.config, name)
        matrix = self.constants.matrix(node)
        matrix = self._matrix(name, matrix if rows is None else self._rows(name, matrix, rows), shape)
        bias = self._bias(self.names, name, node, rows, shape[0])
        if not is_ternary(self.config, name):
            return DenseWeight(matrix, bias)
        packed, scale = self._ternary(name, matrix.astype(np.float32))
        weight = TernaryWeight(packed, shape[1], scale, bias)
        return put_norm(weight, self._own_norm(name, shape[1]), self.input_norm_eps)

    def check_tied_head(self, embedding: LinearWeight) -> None:
        node = None if self.names is None else self.names.linears.get("lm_head")
        if node is not None:
            head = self._matrix("lm_head", self.constants.matrix(node), embedding.shape)
            if not np.array_equal(head.astype(np.float32), embedding.rows(slice(None), np.float32)):
                raise self.file.fail("lm_head", "differs from the embedding, but the configuration says they are tied")

    def finish(self) -> None:
        if self.names is None:
            unused = [name for name in self.file.tensors if name not in self.taken and not name.startswith("constant_")]
        else:
            known = {f"blocks.{i}" for i in range(self.config.num_hidden_layers)} | {"lm_head", "final_norm"}
            named = [*self.names.linears, *self.names.norms]
            unused = [name for name in named if ".".join(name.split(".")[:2]) not in known]
            unused += [name for name in self.names.norms if name not in self._sizes]
        self.refuse_unused(unused, f"a {self.config.model_type} model as the configuration describes it")

    def tokenizer_files(self) -> dict[str, bytes]:
        return read_tokenizer_folder(self.path.parent)

    def _read_config(self, allow_unquantized: bool) -> ModelConfig:
        if self._ours is not None:
            if self._ours != FORMAT_VERSION:
                raise self.file.fail(FORMAT_KEY, f"expected {FORMAT_VERSION}, got {self._ours!r}: a newer bitnet_ref's")
            text = self.file.metadata.get(CONFIG_KEY, "")
            if len(text) > MAX_CONFIG_BYTES:
                raise ConfigError(f"has more than {MAX_CONFIG_BYTES} characters", path=self.path, field=CONFIG_KEY)
            raw = parse_json_object(text.encode("utf-8", "surrogatepass"), ConfigError, self.path)
            with errors_at(self.path):
                return config_from_dict(raw)
        path = self.path.parent / "config.json"
        if not is_present(path):
            message = "has no configuration of bitnet_ref's in its metadata, and there is no config.json beside it"
            raise FormatError(f"{message}; put the Hugging Face model's config.json into the folder", path=self.path)
        self.evidence.append("the configuration is that of config.json beside the file; the graph itself is not read")
        return read_hf_config(path, allow_unquantized)

    def _our_linear(self, module: str, name: str) -> LinearWeight:
        n, k = linear_shape(self.config, name)
        bias = self._take(f"{module}.bias", (n,)).astype(np.float32) if has_bias(self.config, name) else None
        tensor = module + PACKED_SUFFIX
        if tensor not in self.file.tensors:
            return DenseWeight(self._take(f"{module}.weight", (n, k)), bias)
        if not is_ternary(self.config, name):
            raise self.file.fail(tensor, "is ternary, but the configuration says it is not")
        packed = self._take(tensor, (n, -(-k // quantization.CODES_PER_BYTE)), integers=True)
        self.check_codes(tensor, packed)
        if quantization.unpack_ternary(packed[:, -1:], 4)[:, (k - 1) % 4 + 1 :].any():
            raise self.file.fail(tensor, f"expected zero weights beyond the {k} inputs of a row")
        scale = self.checked_scale(name, np.float32(self._take(module + SCALE_SUFFIX, ())[()]))
        return put_norm(TernaryWeight(packed, k, scale, bias), self._own_norm(name, k), self.input_norm_eps)

    def _take(self, name: str, shape: tuple[int, ...], integers: bool = False) -> Array:
        """A tensor, which must have that shape and hold floats of at most 32 bits, or bytes."""
        if name not in self.file.tensors:
            raise self.file.fail(name, f"the tensor is missing; expected shape {list(shape)}")
        if self.file.shape(name) != shape:
            raise self.file.fail(name, f"expected shape {list(shape)}, got {list(self.file.shape(name))}")
        array = self.file.read(name)
        fits = array.dtype == np.uint8 if integers else array.dtype.kind not in "iub" and array.dtype.itemsize <= 4
        if not fits:
            raise self.file.fail(name, f"expected {'bytes' if integers else 'floats'}, got {array.dtype}")
        self.taken.add(name)
        return array

    def _node(self, names: ModelNames, name: str) -> tuple[Any, slice | None]:
        """The MatMul of a linear, and its rows there when q, k and v are one matrix."""
        if name in names.linears:
            return names.linears[name], None
        block, _, short = name.rpartition(".")
        query, kv = self.config.query_size, self.config.kv_size
        rows = {"q_proj": slice(0, query), "k_proj": slice(query, query + kv), "v_proj": slice(query + kv, None)}
        if short in rows and f"{block}.qkv_proj" in names.linears:
            return names.linears[f"{block}.qkv_proj"], rows[short]
        message = f"no MatMul, Gemm or MatMulNBits with constant weights was found for {hf_module(name)}"
        raise self.file.fail(name, message)

    def _rows(self, name: str, array: Array, rows: slice) -> Array:
        total = self.config.query_size + 2 * self.config.kv_size
        if len(array) != total:
            raise self.file.fail(name, f"expected {total} rows of q, k and v together, got {len(array)}")
        return array[rows]

    def _matrix(self, name: str, array: Array, shape: tuple[int, int]) -> Array:
        """The array, contiguous. It must have that shape and hold finite floats of at most 32 bits."""
        if array.shape != shape:
            raise self.file.fail(name, f"expected shape {list(shape)}, got {list(array.shape)}")
        if array.dtype.kind in "iub" or array.dtype.itemsize > 4:
            raise self.file.fail(name, f"expected floats of at most 32 bits, got {array.dtype}")
        if not np.isfinite(array).all():  # a cast may have overflowed
            raise self.file.fail(name, "holds numbers that are not finite")
        return np.ascontiguousarray(array)

    def _bias(
        self, names: ModelNames, name: str, node: Any, rows: slice | None, size: int
    ) -> NDArray[np.float32] | None:
        value = names.bias(node)
        if (value is not None) != has_bias(self.config, name):
            expected, got = ("no", "one") if value is not None else ("a", "none")
            raise self.file.fail(name, f"the configuration says {expected} bias here, the graph has {got}")
        if value is None:
            return None
        bias = self.constants.value(value)
        if bias.ndim == 1 and rows is not None:
            bias = self._rows(name, bias, rows)
        if bias.shape != (size,) or bias.dtype.kind in "iub":
            raise self.file.fail(name, f"expected a bias of {size} floats, got {bias.dtype} {list(bias.shape)}")
        return bias.astype(np.float32)

    def _ternary(self, name: str, w: NDArray[np.float32]) -> tuple[NDArray[np.uint8], np.float32]:
        """-s, 0 and +s are taken as they are; master weights are quantised by absmean if the configuration says so."""
        assert self.config.quantization is not None
        split, convention = split_ternary(w), scale_convention(self.config.quantization)
        if split is None and convention != "absmean":
            raise self.file.fail(name, "expected a matrix of -s, 0 and +s: the configuration says it is ternary")
        if split is not None and split[1] == 1 and convention != "absmean":
            raise self.file.fail(name, "holds -1, 0 and +1, so its scale is elsewhere in the graph, which is not read")
        w_t, scale = split or quantization.quantize_weights(w)
        return quantization.pack_ternary(w_t), self.checked_scale(name, scale)

    def _own_norm(self, name: str, size: int) -> NDArray[np.float32] | None:
        eps = self.input_norm_eps
        if eps is None:
            return None
        ending = f"{hf_module(name)}.rms_norm.weight"
        tensor = next((tensor for tensor in self.file.tensors if tensor.endswith(ending)), ending)
        return self._take(tensor, (size,)).astype(np.float32)
