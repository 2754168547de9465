"""One tensor of a model by its name, ours or the file's: `show_tensor(path, name)` -> `TensorView`."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import BitNetRefError, ConfigError
from ..formats.checkpoint import Checkpoint, ReadOptions, norms_of_layer
from ..formats.names import gguf_name, hf_module, hf_modules
from ..formats.open import find_model, open_checkpoint
from ..reference.quantization import unpack_ternary
from ..reference.weights import DenseWeight, TernaryWeight, linear_name
from .tensor_view import TensorView

_LAYER = re.compile(r"(?:blocks|blk|model\.layers)\.([0-9]{1,18})\.")


def show_tensor(path: str | os.PathLike[str], name: str, options: ReadOptions | None = None) -> TensorView:
    """One tensor of a model in any format that `load` reads.

    name: ours ("blocks.0.attn.q_proj", "embedding", "final_norm"), or the file's own ("blk.0.attn_q.weight"). A part of
    the model comes as the reader gives it, ternary matrices as -1, 0 and +1 with their scale; any other tensor of the
    file as it lies there. Raises ConfigError when there is none of that name, and what the reader raises.
    """
    found = find_model(path)
    try:
        checkpoint = open_checkpoint(found, options)
    except BitNetRefError as error:
        return _stored_tensor(found, name, str(path), {}, error)
    with checkpoint:
        names = _spellings(checkpoint, name)
        if name not in names:
            return _stored_tensor(found, name, str(path), names, None)
        ours, part = names[name], _part(checkpoint, names[name])
    kind = checkpoint.kind
    if isinstance(part, TernaryWeight):
        values: NDArray[Any] = unpack_ternary(part.packed, part.in_features)
        return TensorView(str(path), ours, f"ternary ({kind})", values, float(part.w_dequant_scale))
    return TensorView(str(path), ours, f"{part.dtype.name} ({kind})", _plain(part))


def _spellings(checkpoint: Checkpoint, name: str) -> dict[str, str]:
    """Every name of every part of one layer and outside the layers, in any format's spelling -> ours. The layer is the
    one that `name` names, or the first: a configuration may say that there are billions."""
    match = _LAYER.match(name)
    index = int(match[1]) if match and int(match[1]) < checkpoint.config.num_hidden_layers else 0
    config, out = checkpoint.config, {"embedding": "embedding"}
    out |= {f"{name}.weight": "embedding" for name in (hf_module("embedding"), gguf_name("embedding"))}
    for norm in (*norms_of_layer(config, index), "final_norm"):
        stored = [f"{module}.weight" for module in (gguf_name(norm), *hf_modules(norm))]
        out |= dict.fromkeys((norm, *stored), norm)
    linears = [linear_name(index, short) for short in config.linear_shapes()]
    for linear in (*linears, *([] if config.tie_word_embeddings else ["lm_head"])):
        theirs = (hf_module(linear), gguf_name(linear))
        stored = [f"{one}{suffix}" for one in (linear, *theirs) for suffix in ("", ".weight", ".packed", ".trits")]
        out |= dict.fromkeys((*stored, f"{theirs[0]}.weight_packed"), linear)
    return out


def _part(checkpoint: Checkpoint, name: str) -> Any:
    """TernaryWeight, or an array."""
    if name == "embedding":
        return checkpoint.embedding().array
    if name.rpartition(".")[2].endswith("norm"):
        return checkpoint.norm(name)
    weight = checkpoint.linear(name)
    return weight.array if isinstance(weight, DenseWeight) else weight


def _stored_tensor(
    path: Path, name: str, shown: str, known: dict[str, str], error: BitNetRefError | None
) -> TensorView:
    """A tensor that is no part of the model, or of a file that is none. `error`: why it is none."""
    try:
        readers = dict(_readers(path))
    except BitNetRefError as problem:
        raise error or problem from None
    if name not in readers:
        if error is not None and not readers:
            raise error
        close = (
            difflib.get_close_matches(name, sorted({*known, *readers}), n=3, cutoff=0.5) or list(known or readers)[:3]
        )
        more = "" if error is None else f". Our own names do not help here, as it is no model that can be read: {error}"
        raise ConfigError(f"there is no tensor {name!r}; near it are {', '.join(close)}{more}")
    dtype, values = readers[name]()
    return TensorView(shown, name, f"{dtype}, as stored", _plain(values))


def _readers(path: Path) -> Iterator[tuple[str, Callable[[], tuple[str, NDArray[Any]]]]]:
    """(name, how to read it) of every tensor that lies in a file or folder, whatever it is for."""
    from ..formats.gguf.blocks import DEQUANTIZABLE, dequantize
    from ..formats.gguf.file import PLAIN_DTYPES, GgufFile
    from ..formats.onnx.file import OnnxFile
    from ..formats.safetensors import SafetensorsFile

    def from_safetensors(file: Path, name: str) -> tuple[str, NDArray[Any]]:
        with SafetensorsFile(file) as opened:
            return opened.tensors[name].dtype, opened.read(name)

    def from_gguf(name: str) -> tuple[str, NDArray[Any]]:
        with GgufFile(path) as opened:
            tensor = opened.tensors[name]
            if tensor.type.name in PLAIN_DTYPES:
                return tensor.type.name, opened.read(name)
            raw = opened.read_raw(name)
            if tensor.type.name in DEQUANTIZABLE:
                return tensor.type.name, dequantize(raw, tensor.type.name, tensor.shape)
            return f"{tensor.type.name}, its bytes", raw

    if path.suffix == ".gguf":
        with GgufFile(path) as gguf:
            names = list(gguf.tensors)
        yield from ((name, lambda name=name: from_gguf(name)) for name in names)
        return
    onnx_path = path / "model.onnx" if path.is_dir() else path
    files = [path] if path.is_file() else sorted(path.glob("*.safetensors"))
    if onnx_path.suffix == ".onnx" and onnx_path.is_file() and not (path.is_dir() and files):
        onnx = OnnxFile(onnx_path)

        def from_onnx(name: str) -> tuple[str, NDArray[Any]]:
            values = onnx.read(name)
            return values.dtype.name, values

        yield from ((name, lambda name=name: from_onnx(name)) for name in onnx.tensors)
        return
    for file in files:
        with SafetensorsFile(file) as opened:
            names = list(opened.tensors)
        yield from ((name, lambda file=file, name=name: from_safetensors(file, name)) for name in names)


def _plain(values: NDArray[Any]) -> NDArray[Any]:
    """Integers as they are; bfloat16, float16 and float32 as float32."""
    if values.dtype.kind in "iub" or values.dtype == np.float64:
        return values
    with np.errstate(invalid="ignore"):  # a signalling NaN of 16 bits would be a warning
        return values.astype(np.float32)
