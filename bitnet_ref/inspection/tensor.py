"""One tensor of a model by its name: `show_tensor(path, name)` -> `TensorView`."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import BitNetRefError, ConfigError
from ..formats.checkpoint import Checkpoint, ReadOptions, norms_of_layer
from ..formats.gguf.blocks import DEQUANTIZABLE, dequantize
from ..formats.gguf.file import PLAIN_DTYPES, GgufFile
from ..formats.names import gguf_name, hf_module, hf_modules
from ..formats.onnx.file import OnnxFile
from ..formats.open import choose_format, find_model, open_checkpoint
from ..formats.safetensors import SafetensorsFile
from ..reference.quantization import unpack_ternary
from ..reference.weights import DenseWeight, TernaryWeight, linear_name
from .tensor_view import TensorView

_LAYER = re.compile(r"(?:blocks|blk|model\.layers)\.([0-9]{1,18})\.")
ReadTensor = Callable[[], tuple[str, NDArray[Any]]]  # -> (dtype, values)


def show_tensor(path: str | os.PathLike[str], name: str, options: ReadOptions | None = None) -> TensorView:
    """One tensor of a model in any format that `load` reads.

    name: ours ("blocks.0.attn.q_proj", "embedding", "final_norm"), or the file's own ("blk.0.attn_q.weight"). A part of
    the model is shown as the reader returns it: a ternary matrix as -1, 0 and +1 with its scale. Any other tensor of
    the file is shown as stored. Raises ConfigError for an unknown name, and what the reader raises.
    """
    model_path = find_model(path)
    try:
        checkpoint = open_checkpoint(model_path, options)
    except BitNetRefError as error:
        return _show_stored(model_path, name, str(path), {}, error)
    with checkpoint:
        names = _part_names(checkpoint, name)
        if name not in names:
            return _show_stored(model_path, name, str(path), names, None)
        part = _read_part(checkpoint, names[name])
    if isinstance(part, TernaryWeight):
        w_t: NDArray[Any] = unpack_ternary(part.packed, part.in_features)
        scale = float(part.w_dequant_scale)
        return TensorView(str(path), names[name], f"ternary ({checkpoint.kind})", w_t, scale)
    return TensorView(str(path), names[name], f"{part.dtype.name} ({checkpoint.kind})", _widen(part))


def _part_names(checkpoint: Checkpoint, name: str) -> dict[str, str]:
    """Every name, in any format, of the parts outside the layers and of one layer -> our name.

    The layer is the one in `name`, or else the first: a configuration may claim billions of layers.
    """
    match = _LAYER.match(name)
    index = int(match[1]) if match and int(match[1]) < checkpoint.config.num_hidden_layers else 0
    config, out = checkpoint.config, {"embedding": "embedding"}
    out |= {f"{name}.weight": "embedding" for name in (hf_module("embedding"), gguf_name("embedding"))}
    for norm in (*norms_of_layer(config, index), "final_norm"):
        stored = [f"{module}.weight" for module in (gguf_name(norm), *hf_modules(norm))]
        out |= dict.fromkeys((norm, *stored), norm)
    linears = [linear_name(index, short) for short in config.linear_shapes()]
    for linear in (*linears, *([] if config.tie_word_embeddings else ["lm_head"])):
        spellings = (linear, hf_module(linear), gguf_name(linear))
        stored = [f"{one}{suffix}" for one in spellings for suffix in ("", ".weight", ".packed", ".trits")]
        out |= dict.fromkeys((*stored, f"{hf_module(linear)}.weight_packed"), linear)
    return out


def _read_part(checkpoint: Checkpoint, name: str) -> Any:
    """TernaryWeight, or an array."""
    if name.endswith("norm"):
        return checkpoint.norm(name)
    weight = checkpoint.embedding() if name == "embedding" else checkpoint.linear(name)
    return weight.array if isinstance(weight, DenseWeight) else weight


def _show_stored(
    path: Path, name: str, shown_path: str, known: dict[str, str], error: BitNetRefError | None
) -> TensorView:
    """A tensor that is not a part of the model, or of a file that is not a model because of `error`."""
    try:
        readers = _stored_tensors(path)
    except BitNetRefError as problem:
        raise error or problem from None
    if name not in readers:
        if error is not None and not readers:
            raise error
        near = difflib.get_close_matches(name, sorted({*known, *readers}), n=3, cutoff=0.5)
        near = near or list(known or readers)[:3]
        reason = "" if error is None else f". Only the file's own names can be used, as it cannot be loaded: {error}"
        raise ConfigError(f"there is no tensor {name!r}; near it are {', '.join(near)}{reason}")
    dtype, values = readers[name]()
    return TensorView(shown_path, name, f"{dtype}, as stored", _widen(values))


def _stored_tensors(path: Path) -> dict[str, ReadTensor]:
    """Every tensor in a file or folder, whatever it is for: name -> how to read it."""
    format_name, path = choose_format(path)
    if format_name == "gguf":
        with GgufFile(path) as gguf:
            return {name: partial(_read_gguf, path, name) for name in gguf.tensors}
    if format_name == "onnx":
        onnx = OnnxFile(path)
        return {name: partial(_read_onnx, onnx, name) for name in onnx.tensors}
    readers: dict[str, ReadTensor] = {}
    for file in [path] if path.is_file() else sorted(path.glob("*.safetensors")):
        with SafetensorsFile(file) as safetensors:
            readers |= {name: partial(_read_safetensors, file, name) for name in safetensors.tensors}
    return readers


def _read_safetensors(path: Path, name: str) -> tuple[str, NDArray[Any]]:
    with SafetensorsFile(path) as file:
        return file.tensors[name].dtype, file.read(name)


def _read_gguf(path: Path, name: str) -> tuple[str, NDArray[Any]]:
    with GgufFile(path) as file:
        dtype, shape = file.tensors[name].type.name, file.tensors[name].shape
        if dtype in PLAIN_DTYPES:
            return dtype, file.read(name)
        raw = file.read_raw(name)
    return (dtype, dequantize(raw, dtype, shape)) if dtype in DEQUANTIZABLE else (f"{dtype}, its bytes", raw)


def _read_onnx(file: Any, name: str) -> tuple[str, NDArray[Any]]:
    values = file.read(name)
    return values.dtype.name, values


def _widen(values: NDArray[Any]) -> NDArray[Any]:
    """Integers and float64 unchanged; bfloat16, float16 and float32 as float32."""
    if values.dtype.kind in "iub" or values.dtype == np.float64:
        return values
    with np.errstate(invalid="ignore"):  # a signalling NaN of 16 bits would be a warning
        return values.astype(np.float32)
