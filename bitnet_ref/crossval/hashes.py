"""SHA-256 of a model's config, of its weights and of a file. They tie a trace or a receipt to what was computed."""

from __future__ import annotations

import hashlib
import json
import os
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from ..errors import FormatError
from ..reference.config import ModelConfig
from ..reference.quantization import pack_ternary
from ..reference.weights import DenseWeight, LinearWeight, ModelWeights, TernaryLinear, TernaryWeight
from ..system.json_file import open_regular

_cache: WeakKeyDictionary[ModelWeights, str] = WeakKeyDictionary()


def config_hash(config: ModelConfig) -> str:
    """The hash of every field of the config, as JSON with sorted keys."""
    return hashlib.sha256(json.dumps(config.to_dict(), sort_keys=True).encode()).hexdigest()


def weight_hash(w: ModelWeights) -> str:
    """The hash of a model's weights. It does not depend on the backend's layout or on the file they came from.

    Ternary matrices enter as the packed codes of `quantization` and their scale, dense ones as they are stored.
    """
    if w not in _cache:
        digest = hashlib.sha256()
        _add(digest, "embedding", w.embedding)
        for name, weight in w.linears():
            if not (name == "lm_head" and w.tied):
                _add(digest, name, weight)
        for index, layer in enumerate(w.layers):
            for name in ("attn_norm", "attn_sub_norm", "ffn_norm", "ffn_sub_norm"):
                _add_array(digest, f"blocks.{index}.{name}", getattr(layer, name))
        _add_array(digest, "final_norm", w.final_norm)
        _cache[w] = digest.hexdigest()
    return _cache[w]


def file_hash(path: str | os.PathLike[str]) -> str:
    """The hash of a file's bytes."""
    with open_regular(path, FormatError) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _add(digest: hashlib._Hash, name: str, w: LinearWeight) -> None:
    if isinstance(w, DenseWeight):
        _add_array(digest, name, w.array)
    elif isinstance(w, TernaryLinear):
        _add_array(digest, name, w.packed if isinstance(w, TernaryWeight) else pack_ternary(w.ternary()))
        _add_array(digest, f"{name}.scale", np.asarray(w.w_dequant_scale, dtype=np.float32).reshape(1))
        if w.input_norm is not None:
            _add_array(digest, f"{name}.rms_norm {w.input_norm.eps}", w.input_norm.weight)
    _add_array(digest, f"{name}.bias", w.bias)


def _add_array(digest: hashlib._Hash, name: str, array: NDArray | None) -> None:
    if array is None:
        return
    digest.update(f"{name} {array.dtype.name} {list(array.shape)}\n".encode())
    digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
