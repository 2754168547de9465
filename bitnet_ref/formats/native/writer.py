"""`write_native`: writes any checkpoint as a native file, one matrix in memory at a time, with reproducible bytes."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from ...errors import ConfigError, ShapeError
from ...reference.config import ModelConfig
from ...reference.quantization import CODES_PER_BYTE
from ...reference.weights import DenseWeight, LinearWeight, TernaryWeight
from ...system.atomic import atomic_path
from ..checkpoint import (
    Checkpoint,
    Progress,
    all_linears,
    has_bias,
    is_ternary,
    linear_shape,
    norm_sizes,
    part_count,
    parts,
)
from ..safetensors import SafetensorsWriter, dtype_name
from .base3 import TRITS_PER_BYTE, pack_base3
from .model import FORMAT, SUFFIX, TOKENIZER_PREFIX, VERSION, content_hash

STORAGES = ("2bit", "base3")
_NO_HASH = "sha256:" + "0" * 64
Layout = dict[str, tuple[str, tuple[int, ...]]]  # name -> (dtype, shape)


def write_native(
    checkpoint: Checkpoint, path: str | os.PathLike[str], *, storage: str = "2bit", progress: Progress | None = None
) -> str:
    """Write all of a checkpoint (weights, config, tokenizer) to `path`, which must end in .bitnet.safetensors.

    storage: "2bit", or "base3": matrices 20% smaller that take longer to read. The model is the same.
    progress: called with (parts done, parts in total).
    Returns the content hash. The same model gives the same bytes; an interrupt leaves the old file or none.
    """
    if storage not in STORAGES:
        raise ConfigError(f"expected {' or '.join(STORAGES)}, got {storage!r}", field="storage")
    if not os.fspath(path).endswith(SUFFIX):
        raise ConfigError(f"a native file's name ends in {SUFFIX}, got {os.fspath(path)!r}", field="path")
    config = checkpoint.config
    tokenizer = {TOKENIZER_PREFIX + name: data for name, data in sorted(checkpoint.tokenizer_files().items())}
    layout = _layout(checkpoint, storage) | {name: ("U8", (len(data),)) for name, data in tokenizer.items()}
    metadata = {
        "format": FORMAT,
        "format_version": str(VERSION),
        "config": json.dumps(config.to_dict(), sort_keys=True, separators=(",", ":")),
        "content_hash": _NO_HASH,
    }
    total = part_count(config)
    digests = {}
    with atomic_path(path) as temporary, SafetensorsWriter(temporary, layout, metadata) as writer:

        def write(name: str, array: NDArray) -> None:
            writer.write(name, array)
            digest = hashlib.sha256(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
            digests[name] = (*layout[name], digest.hexdigest())

        for name, data in tokenizer.items():
            write(name, np.frombuffer(data, dtype=np.uint8))
        for number, (name, part) in enumerate(parts(checkpoint)):
            for tensor, array in _tensors(config, name, part, storage):
                write(tensor, array)
            del part
            if progress is not None:
                progress(number + 1, total)
        computed = content_hash(metadata, digests)
        writer.set_metadata("content_hash", computed)
    return computed


def _layout(checkpoint: Checkpoint, storage: str) -> Layout:
    """Every tensor of the model, from the configuration alone."""
    config = checkpoint.config
    layout: Layout = {
        "embedding": (dtype_name(checkpoint.dense_dtype("embedding")), (config.vocab_size, config.hidden_size))
    }
    layout |= {name: ("F32", (size,)) for name, size in norm_sizes(config).items()}
    for name in all_linears(config):
        n, k = linear_shape(config, name)
        if has_bias(config, name):
            layout[f"{name}.bias"] = "F32", (n,)
        if not is_ternary(config, name):
            layout[f"{name}.weight"] = dtype_name(checkpoint.dense_dtype(name)), (n, k)
            continue
        suffix, per_byte = (".trits", TRITS_PER_BYTE) if storage == "base3" else (".packed", CODES_PER_BYTE)
        layout[name + suffix] = "U8", (n, -(-k // per_byte))
        layout[f"{name}.w_dequant_scale"] = "F32", ()
        if config.quantization is not None and config.quantization.use_rms_norm:
            layout[f"{name}.input_norm"] = "F32", (k,)
    return layout


def _tensors(
    config: ModelConfig, name: str, part: LinearWeight | NDArray[np.float32], storage: str
) -> Iterator[tuple[str, NDArray]]:
    """(name, array) of each tensor that stores one part of the model. ShapeError if the part contradicts the config."""
    if isinstance(part, np.ndarray):
        yield name, part
        return
    if name == "embedding" and isinstance(part, DenseWeight):
        yield name, part.array
        return
    quantized, norm = config.quantization, getattr(part, "input_norm", None)
    eps = quantized.rms_norm_eps if quantized is not None and quantized.use_rms_norm else None
    agrees = isinstance(part, DenseWeight) or (None if norm is None else norm.eps) == eps
    agrees = agrees and isinstance(part, DenseWeight) != is_ternary(config, name)
    if not agrees or (part.bias is not None) != has_bias(config, name):
        raise ShapeError("write_native", expected=f"{name} as the config has it", got=f"another {type(part).__name__}")
    if part.bias is not None:
        yield f"{name}.bias", part.bias
    if isinstance(part, DenseWeight):
        yield f"{name}.weight", part.array
    elif isinstance(part, TernaryWeight):
        if storage == "base3":
            yield f"{name}.trits", pack_base3(part.packed, part.in_features)
        else:
            yield f"{name}.packed", part.packed
        yield f"{name}.w_dequant_scale", np.array(part.w_dequant_scale, dtype=np.float32)
        if part.input_norm is not None:
            yield f"{name}.input_norm", part.input_norm.weight
