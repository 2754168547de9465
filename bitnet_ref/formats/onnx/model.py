"""Reading a decoder's weights out of an .onnx file: our own exports bit for bit, and those of the usual exporters.

The weights come from the file, the configuration from its metadata (our exports) or from the config.json beside it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import ConfigError, FormatError, TokenizerError
from ...reference import quantization
from ...reference.config import ModelConfig, QuantizationConfig, RopeConfig
from ...reference.weights import DenseWeight, InputNorm, LinearWeight, TernaryWeight
from ...system.json_file import parse_json_object, read_bounded
from ..checkpoint import Checkpoint, ReadOptions, has_bias, hf_module, is_ternary, linear_shape, norm_sizes
from ..hf.config import MAX_CONFIG_BYTES, read_hf_config
from ..hf.folder import MAX_TOKENIZER_BYTES, TOKENIZER_FILES, hf_norm_names
from .constants import Constants
from .file import OnnxFile
from .library import CONFIG_KEY, FORMAT_KEY, FORMAT_VERSION, PACKED_SUFFIX, SCALE_SUFFIX
from .names import ModelNames


class OnnxCheckpoint(Checkpoint):
    """An .onnx file, with the files of its external data beside it."""

    kind = "onnx"

    def __init__(self, path: Path, options: ReadOptions | None = None) -> None:
        self.path, self.evidence = path, []
        self.file = OnnxFile(path)
        self._ours = self.file.metadata.get(FORMAT_KEY)
        self.taken: set[str] = set()
        self.config = self._read_config(options is not None and options.allow_unquantized)
        if self.config.num_hidden_layers > len(self.file.tensors):
            raise FormatError(
                f"the configuration says {self.config.num_hidden_layers} layers, the file has "
                f"{len(self.file.tensors)} tensors",
                path=path,
            )
        self._sizes = norm_sizes(self.config)
        self.constants = Constants(self.file)
        self.names = ModelNames(self.file, self.constants) if self._ours is None else None

    def close(self) -> None:
        pass  # files are open only while they are read

    def embedding(self) -> DenseWeight:
        shape = (self.config.vocab_size, self.config.hidden_size)
        if self.names is None:
            return DenseWeight(self._take("model.embed_tokens.weight", shape))
        if self.names.embedding is None:
            raise self.file.fail("embed_tokens", "no Gather from a constant table of embeddings was found")
        table = self.constants.value(self.names.embedding)
        return DenseWeight(self._matrix("embedding", table, shape))

    def norm(self, name: str) -> NDArray[np.float32]:
        tensor = hf_norm_names(name)[0] if self.names is None else self.names.norms.get(name)
        if tensor is None:
            raise self.file.fail(name, f"no such norm was found ({' or '.join(hf_norm_names(name))})")
        return self._take(tensor, (self._sizes[name],)).astype(np.float32)

    def linear(self, name: str) -> LinearWeight:
        if self.names is None:
            return self._our_linear(hf_module(name), name)
        node, rows = self._node(name)
        shape = linear_shape(self.config, name)
        matrix = self.constants.matrix(node)
        self.taken.add(node.name)
        matrix = self._matrix(name, matrix if rows is None else self._rows(name, matrix, rows), shape)
        bias = self._bias(name, node, rows, shape[0])
        if not is_ternary(self.config, name):
            return DenseWeight(matrix, bias)
        packed, scale = self._ternary(name, matrix.astype(np.float32))
        return TernaryWeight(packed, shape[1], scale, bias, self._input_norm(name, shape[1]))

    def tied_head(self, embedding: DenseWeight) -> DenseWeight:
        node = None if self.names is None else self.names.linears.get("lm_head")
        if node is not None:
            head = self._matrix("lm_head", self.constants.matrix(node), embedding.shape)
            if not np.array_equal(head.astype(np.float32), embedding.array.astype(np.float32)):
                raise self.file.fail("lm_head", "differs from the embedding, but the configuration says they are tied")
        return embedding

    def finish(self) -> None:
        if self.names is None:
            left = [name for name in self.file.tensors if name not in self.taken and not name.startswith("constant_")]
        else:
            known = {f"blocks.{i}" for i in range(self.config.num_hidden_layers)} | {"lm_head", "final_norm"}
            found = [*self.names.linears, *self.names.norms]
            left = [name for name in found if ".".join(name.split(".")[:2]) not in known]
            left += [name for name in self.names.norms if name not in self._sizes]
        if left:
            more = f" (and {len(left) - 1} more)" if len(left) > 1 else ""
            what = f"is no part of a {self.config.model_type} model as the configuration says{more}"
            raise self.file.fail(left[0], what)

    def tokenizer_files(self) -> dict[str, bytes]:
        found = [path for name in TOKENIZER_FILES if (path := self.path.parent / name).is_file()]
        return {path.name: read_bounded(path, TokenizerError, MAX_TOKENIZER_BYTES) for path in found}

    # -- the configuration ---------------------------------------------------------------------------------------------

    def _read_config(self, allow_unquantized: bool) -> ModelConfig:
        if self._ours is not None:
            if self._ours != FORMAT_VERSION:
                raise self.file.fail(FORMAT_KEY, f"expected {FORMAT_VERSION}, got {self._ours!r}: a newer bitnet_ref's")
            text = self.file.metadata.get(CONFIG_KEY, "")
            if len(text) > MAX_CONFIG_BYTES:
                raise ConfigError(f"has more than {MAX_CONFIG_BYTES} characters", path=self.path, field=CONFIG_KEY)
            raw = parse_json_object(text.encode("utf-8", "surrogatepass"), ConfigError, self.path)
            try:
                return config_from_dict(raw)
            except ConfigError as error:
                raise ConfigError(error.message, path=self.path, field=error.field) from None
        path = self.path.parent / "config.json"
        if not path.is_file():
            raise FormatError(
                "has no configuration of bitnet_ref's in its metadata, and there is no config.json beside it; "
                "put the Hugging Face model's config.json into the folder",
                path=self.path,
            )
        self.evidence.append("the configuration is that of config.json beside the file; the graph itself is not read")
        return read_hf_config(path, allow_unquantized)

    # -- our own exports -----------------------------------------------------------------------------------------------

    def _our_linear(self, module: str, name: str) -> LinearWeight:
        n, k = linear_shape(self.config, name)
        bias = None
        if has_bias(self.config, name):
            bias = self._take(f"{module}.bias", (n,)).astype(np.float32)
        if module + PACKED_SUFFIX not in self.file.tensors:
            return DenseWeight(self._take(f"{module}.weight", (n, k)), bias)
        if not is_ternary(self.config, name):
            raise self.file.fail(module + PACKED_SUFFIX, "is ternary, but the configuration says it is not")
        columns = -(-k // quantization.CODES_PER_BYTE)
        packed = self._take(module + PACKED_SUFFIX, (n, columns), integers=True)
        if (at := quantization.first_invalid_code(packed)) is not None:
            raise self.file.fail(module + PACKED_SUFFIX, f"holds the invalid ternary code 3 in byte {list(at)}")
        if quantization.unpack_ternary(packed[:, -1:], 4)[:, (k - 1) % 4 + 1 :].any():
            raise self.file.fail(module + PACKED_SUFFIX, f"expected zero weights beyond the {k} inputs of a row")
        scale = np.float32(self._take(module + SCALE_SUFFIX, ())[()])
        return TernaryWeight(packed, k, self._scale(name, scale), bias, self._input_norm(name, k))

    def _take(self, name: str, shape: tuple[int, ...], integers: bool = False) -> NDArray:
        """A tensor that must be there, of that shape: floats of at most 32 bits, or bytes."""
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

    # -- other exporters -----------------------------------------------------------------------------------------------

    def _node(self, name: str) -> tuple[Any, slice | None]:
        """The MatMul of a linear, and its rows there when q, k and v are one matrix."""
        assert self.names is not None
        if name in self.names.linears:
            return self.names.linears[name], None
        block, _, short = name.rpartition(".")
        query, kv = self.config.query_size, self.config.kv_size
        rows = {"q_proj": slice(0, query), "k_proj": slice(query, query + kv), "v_proj": slice(query + kv, None)}
        if short in rows and f"{block}.qkv_proj" in self.names.linears:
            return self.names.linears[f"{block}.qkv_proj"], rows[short]
        raise self.file.fail(
            name, f"no MatMul, Gemm or MatMulNBits with constant weights was found for {hf_module(name)}"
        )

    def _rows(self, name: str, array: NDArray, rows: slice) -> NDArray:
        total = self.config.query_size + 2 * self.config.kv_size
        if len(array) != total:
            raise self.file.fail(name, f"expected {total} rows of q, k and v together, got {len(array)}")
        return array[rows]

    def _matrix(self, name: str, array: NDArray, shape: tuple[int, int]) -> NDArray:
        """Checked: of that shape, floats of at most 32 bits; as it lies in memory row by row."""
        if array.shape != shape:
            raise self.file.fail(name, f"expected shape {list(shape)}, got {list(array.shape)}")
        if array.dtype.kind in "iub" or array.dtype.itemsize > 4:
            raise self.file.fail(name, f"expected floats of at most 32 bits, got {array.dtype}")
        if not np.isfinite(array).all():  # a cast may have gone beyond its type
            raise self.file.fail(name, "holds numbers that are not finite")
        return np.ascontiguousarray(array)

    def _bias(self, name: str, node: Any, rows: slice | None, size: int) -> NDArray[np.float32] | None:
        assert self.names is not None
        value = self.names.bias(node)
        if (value is not None) != has_bias(self.config, name):
            said, got = ("no", "one") if value is not None else ("a", "none")
            raise self.file.fail(name, f"the configuration says {said} bias here, the graph has {got}")
        if value is None:
            return None
        bias = self.constants.value(value)
        if bias.ndim == 1 and rows is not None:
            bias = self._rows(name, bias, rows)
        if bias.shape != (size,) or bias.dtype.kind in "iub":
            raise self.file.fail(name, f"expected a bias of {size} floats, got {bias.dtype} {list(bias.shape)}")
        return bias.astype(np.float32)

    def _ternary(self, name: str, w: NDArray[np.float32]) -> tuple[NDArray[np.uint8], np.float32]:
        """-s, 0 and +s as they stand, or master weights by absmean if that is what the configuration says."""
        assert self.config.quantization is not None
        split, convention = quantization.split_ternary(w), self.config.quantization.scale_convention
        if split is None and convention != "absmean":
            raise self.file.fail(name, "expected a matrix of -s, 0 and +s: the configuration says it is ternary")
        if split is not None and split[1] == 1 and convention != "absmean":
            raise self.file.fail(name, "holds -1, 0 and +1, so its scale is elsewhere in the graph, which is not read")
        w_t, scale = split or quantization.quantize_weights(w)
        return quantization.pack_ternary(w_t), self._scale(name, scale)

    # -- both ----------------------------------------------------------------------------------------------------------

    def _scale(self, name: str, scale: np.float32) -> np.float32:
        with np.errstate(over="ignore", divide="ignore"):
            if scale <= 0 or not np.isfinite(np.float32(1.0) / scale):
                raise self.file.fail(name, f"expected a scale above zero, got {scale}")
        return scale

    def _input_norm(self, name: str, size: int) -> InputNorm | None:
        quantized = self.config.quantization
        if quantized is None or not quantized.use_rms_norm:
            return None
        ending = f"{hf_module(name)}.rms_norm.weight"
        tensor = next((tensor for tensor in self.file.tensors if tensor.endswith(ending)), ending)
        return InputNorm(self._take(tensor, (size,)).astype(np.float32), quantized.rms_norm_eps)


def config_from_dict(raw: dict[str, Any]) -> ModelConfig:
    """The inverse of `ModelConfig.to_dict`, of JSON that anybody may have written. ConfigError names the field."""
    values = dict(raw)
    rope, quantized = values.get("rope"), values.get("quantization")
    if not isinstance(rope, dict) or not (quantized is None or isinstance(quantized, dict)):
        raise ConfigError("expected rope to be an object, and quantization one or null", field="rope, quantization")
    eos, skipped = values.get("eos_token_ids"), (quantized or {}).get("modules_to_not_convert", [])
    if not isinstance(eos, list) or not isinstance(values.get("model_type"), str):
        raise ConfigError("expected a text as model_type and a list as eos_token_ids", field="model_type")
    if not isinstance(skipped, list) or not all(isinstance(name, str) and name for name in skipped):
        raise ConfigError(f"expected a list of names, got {skipped!r}", field="quantization.modules_to_not_convert")
    try:
        values["eos_token_ids"] = tuple(eos)
        values["rope"] = RopeConfig(**rope)
        if quantized is not None:
            values["quantization"] = QuantizationConfig(**{**quantized, "modules_to_not_convert": tuple(skipped)})
        return ModelConfig(**values)
    except TypeError as problem:  # a field too many, or one missing
        raise ConfigError(f"is not what ModelConfig.to_dict gives: {problem}") from None
