"""`write_native`: writes any checkpoint as a native file, one matrix in memory at a time, with reproducible bytes."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import ConfigError, ShapeError
from ...reference.quantization import CODES_PER_BYTE
from ...reference.weights import DenseWeight, LinearWeight
from ...system.atomic import atomic_path
from ..checkpoint import Checkpoint, Progress, has_bias, is_ternary, linear_shape
from ..planned_tensors import PlannedTensor, layout_of, plan_model, write_parts
from ..safetensors import SafetensorsWriter, dtype_name
from .base3 import TRITS_PER_BYTE, pack_base3
from .model import FORMAT, SUFFIX, TOKENIZER_PREFIX, VERSION, content_hash

STORAGES = ("2bit", "base3")
_NO_HASH = "sha256:" + "0" * 64


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
    tokenizer = {TOKENIZER_PREFIX + name: data for name, data in sorted(checkpoint.tokenizer_files().items())}
    plan = plan_model(checkpoint, str, partial(_plan_linear, checkpoint, storage))
    layout = layout_of(plan) | {name: ("U8", (len(data),)) for name, data in tokenizer.items()}
    metadata = {
        "format": FORMAT,
        "format_version": str(VERSION),
        "config": json.dumps(checkpoint.config.to_dict(), sort_keys=True, separators=(",", ":")),
        "content_hash": _NO_HASH,
    }
    digests = {}
    with atomic_path(path) as temporary, SafetensorsWriter(temporary, layout, metadata) as writer:

        def write(name: str, array: NDArray) -> None:
            writer.write(name, array)
            digest = hashlib.sha256(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
            digests[name] = (*layout[name], digest.hexdigest())

        for name, data in tokenizer.items():
            write(name, np.frombuffer(data, dtype=np.uint8))
        write_parts(checkpoint, plan, write, progress)
        computed = content_hash(metadata, digests)
        writer.set_metadata("content_hash", computed)
    return computed


def _plan_linear(checkpoint: Checkpoint, storage: str, name: str) -> Iterator[PlannedTensor]:
    """The tensors that store one linear."""
    config, (n, k) = checkpoint.config, linear_shape(checkpoint.config, name)
    if has_bias(config, name):
        yield PlannedTensor(f"{name}.bias", "F32", (n,), lambda w: _checked(checkpoint, name, w).bias)
    if not is_ternary(config, name):
        dtype = dtype_name(checkpoint.dense_dtype(name))
        yield PlannedTensor(f"{name}.weight", dtype, (n, k), lambda w: _checked(checkpoint, name, w).array)
        return
    if storage == "base3":
        shape = (n, -(-k // TRITS_PER_BYTE))
        yield PlannedTensor(f"{name}.trits", "U8", shape, lambda w: pack_base3(_checked(checkpoint, name, w).packed, k))
    else:
        shape = (n, -(-k // CODES_PER_BYTE))
        yield PlannedTensor(f"{name}.packed", "U8", shape, lambda w: _checked(checkpoint, name, w).packed)
    yield PlannedTensor(f"{name}.w_dequant_scale", "F32", (), lambda w: np.array(w.w_dequant_scale, dtype=np.float32))
    if checkpoint.input_norm_eps is not None:
        yield PlannedTensor(f"{name}.input_norm", "F32", (k,), lambda w: w.input_norm.weight)


def _checked(checkpoint: Checkpoint, name: str, w: LinearWeight) -> Any:
    """`w`. ShapeError if it contradicts the config."""
    config, norm = checkpoint.config, getattr(w, "input_norm", None)
    agrees = isinstance(w, DenseWeight) or (None if norm is None else norm.eps) == checkpoint.input_norm_eps
    agrees = agrees and isinstance(w, DenseWeight) != is_ternary(config, name)
    if not agrees or (w.bias is not None) != has_bias(config, name):
        raise ShapeError("write_native", expected=f"{name} as the config has it", got=f"another {type(w).__name__}")
    return w
