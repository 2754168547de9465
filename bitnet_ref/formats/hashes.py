"""Hashes of a config, of weights in memory, of a file: they tie a trace or a receipt to what was computed."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from weakref import WeakKeyDictionary

import numpy as np

from ..errors import FormatError
from ..families import config_to_dict
from ..reference.config import ModelConfig
from ..reference.layers import Array
from ..reference.weights import LinearWeight, ModelWeights
from ..system.json_file import json_hash, open_regular

BLOCK_BYTES = 1 << 20
_weight_hashes: WeakKeyDictionary[ModelWeights, str] = WeakKeyDictionary()  # of models in memory


def config_hash(config: ModelConfig) -> str:
    """The hash of every field of the config, as JSON with sorted keys."""
    return json_hash(config_to_dict(config))


def weight_hash(w: ModelWeights) -> str:
    """The hash of a model's weights. It does not depend on the backend's layout or on the file they came from.

    Ternary matrices enter as the packed codes of `quantization` and their scale, dense ones as they are stored.
    """
    if w not in _weight_hashes:
        digest = hashlib.sha256()
        _add(digest, "embedding", w.embedding)
        for name, weight in w.linears():
            if not (name == "lm_head" and w.tied):
                _add(digest, name, weight)
        for index, layer in enumerate(w.layers):
            for name, norm in layer.norms():
                _add_array(digest, f"blocks.{index}.{name}", norm.weight)
            for name, array in vars(layer).items():
                if isinstance(array, np.ndarray):
                    _add_array(digest, f"blocks.{index}.{name}", array)
        _add_array(digest, "final_norm", w.final_norm.weight)
        _weight_hashes[w] = digest.hexdigest()
    return _weight_hashes[w]


def file_hash(path: str | os.PathLike[str], progress: Callable[[int], None] = lambda nbytes: None) -> str:
    """The hash of a file's bytes. progress: is called with the bytes of each part that was read."""
    digest = hashlib.sha256()
    with open_regular(path, FormatError) as file:
        while block := file.read(BLOCK_BYTES):
            digest.update(block)
            progress(len(block))
    return digest.hexdigest()


def _add(digest: hashlib._Hash, name: str, w: LinearWeight) -> None:
    for part, array in w.contents(name):
        _add_array(digest, part, array)
    _add_array(digest, f"{name}.bias", w.bias)


def _add_array(digest: hashlib._Hash, name: str, array: Array | None) -> None:
    if array is None:
        return
    digest.update(f"{name} {array.dtype.name} {list(array.shape)}\n".encode())
    digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
