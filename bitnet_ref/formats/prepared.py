"""Prepared weights on disk: a backend's own layout of a model, kept beside the model, so that the next start maps it.

The file, a .safetensors, holds the arrays that `prepare` made, and in its metadata the dataclasses around them and what
they were made from. It is a cache: a file that is damaged, or was made from other files, with other options or for
another layout, is made again. If it cannot be written, nothing is kept.

Measured with 2B-4T, files in the system's cache: reading the model takes 6.3 s of CPU time, mapping this file 0.05 s;
decoding from the map is 6-9% slower than from memory of its own, which has huge pages.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..backends.backend import Backend
from ..errors import BitNetRefError, FormatError
from ..reference.config import ModelConfig
from ..reference.weights import DenseWeight, InputNorm, LayerWeights, ModelWeights, TernaryWeight
from ..system.atomic import atomic_path
from ..system.json_file import parse_json_object
from .checkpoint import ReadOptions, linear_shape, norm_sizes
from .safetensors import SafetensorsFile, SafetensorsWriter, dtype_name

log = logging.getLogger(__name__)

FOLDER = ".bitnet_ref"  # a folder beside the model, so that nobody mistakes the cache for a file of the model
VERSION = 1
_ALIGNMENT = 64  # of the data: a cache line
_KINDS = (ModelWeights, LayerWeights, DenseWeight, TernaryWeight, InputNorm)


class PreparedFile:
    """The prepared weights of a model for a backend on disk, and what they must have been made from."""

    def __init__(self, model: Path, backend: Backend, options: ReadOptions) -> None:
        """model: the path that `load` was given. Later changes of its files make the cache stale."""
        layout = backend.prepared_layout()
        self.backend = backend
        self.enabled = layout is not None  # else the backend computes with the files' own layout
        name = f"{(layout or '').replace(' ', '-')}.safetensors"
        folder, name = (model, name) if model.is_dir() else (model.parent, f"{model.name}.{name}")
        self.path = folder / FOLDER / name
        facts = {"version": VERSION, "layout": layout, "options": repr(options), "files": _files(model, options)}
        self._made_from = json.dumps(facts)

    def read(self) -> tuple[ModelConfig, ModelWeights] | None:
        """The weights, mapped and read-only; None if there are no usable ones, with the reason in the log."""
        if not self.enabled or not os.path.exists(self.path):
            return None
        kinds = {kind.__name__: kind for kind in (*_KINDS, *self.backend.weight_kinds)}
        try:
            with SafetensorsFile(self.path) as file:
                if file.metadata.get("made_from") != self._made_from:
                    log.info("%s was made from other files or options: the model is read anew", self.path)
                    return None
                config = ModelConfig.from_dict(self._json(file, "config"))
                weights = _rebuild(self._json(file, "weights"), file.mapped().__getitem__, kinds, {})
            _check(weights, config)
            self.backend.check_prepared(weights)
        except (BitNetRefError, OSError, KeyError, TypeError, ValueError, AttributeError, RecursionError) as problem:
            log.warning("%s is damaged (%s): the model is read anew", self.path, problem)
            return None
        return config, weights

    def _json(self, file: SafetensorsFile, field: str) -> Any:
        return parse_json_object(file.metadata[field].encode("utf-8", "surrogatepass"), FormatError, self.path)

    def write(self, config: ModelConfig, weights: ModelWeights) -> None:
        """Keep the weights. If that fails, a warning in the log says why."""
        if not self.enabled:
            return
        arrays: dict[str, NDArray] = {}
        metadata = {
            "made_from": self._made_from,
            "config": json.dumps(config.to_dict()),
            "weights": json.dumps(_describe(weights, "weights", arrays, {})),
        }
        layout = {name: (dtype_name(array.dtype), array.shape) for name, array in arrays.items()}
        try:
            self.path.parent.mkdir(exist_ok=True)
            with (
                atomic_path(self.path) as temporary,
                SafetensorsWriter(temporary, layout, metadata, alignment=_ALIGNMENT) as writer,
            ):
                for name, array in arrays.items():
                    writer.write(name, array)
        except OSError as problem:
            log.warning("the prepared weights are not kept: %s", problem)


def _files(model: Path, options: ReadOptions) -> list[tuple[str, int, int]]:
    """(name, size, time) of every file that the model may be read from."""
    if model.is_dir():
        files = sorted(file for file in model.iterdir() if file.is_file())
    else:
        beside = (model.name, f"{model.name}.data", f"{model.name}_data", "config.json")
        files = [file for file in map(model.with_name, beside) if file.is_file()]
    if options.tl_tiles is not None:
        files.append(options.tl_tiles)
    return [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]


def _describe(value: Any, name: str, arrays: dict[str, NDArray], seen: dict[int, str]) -> Any:
    """A tree of dataclasses as JSON. Its arrays go to `arrays`, named by their places."""
    if isinstance(value, np.ndarray):
        arrays[name] = value
        return {"array": name}
    if isinstance(value, np.floating):
        return {"float32": float(value)}
    if isinstance(value, tuple):
        return [_describe(item, f"{name}.{index}", arrays, seen) for index, item in enumerate(value)]
    if not is_dataclass(value):
        return value
    if id(value) in seen:  # the embedding that is also the head
        return {"same": seen[id(value)]}
    seen[id(value)] = name
    inside = {
        field.name: _describe(getattr(value, field.name), f"{name}.{field.name}", arrays, seen)
        for field in fields(value)
        if field.init
    }
    return {"kind": type(value).__name__, "name": name, "fields": inside}


def _rebuild(tree: Any, array: Callable[[str], NDArray], kinds: Mapping[str, type], built: dict[str, Any]) -> Any:
    """The inverse of `_describe`. built: name -> the dataclasses built so far."""
    if isinstance(tree, list):
        return tuple(_rebuild(item, array, kinds, built) for item in tree)
    if not isinstance(tree, dict):
        return tree
    if "array" in tree:
        return array(tree["array"])
    if "float32" in tree:
        return np.float32(tree["float32"])
    if "same" in tree:
        return built[tree["same"]]
    inside = {name: _rebuild(item, array, kinds, built) for name, item in tree["fields"].items()}
    built[tree["name"]] = value = kinds[tree["kind"]](**inside)
    return value


def _check(w: Any, config: ModelConfig) -> None:
    """FormatError unless the weights have the shapes of the config, which the kernels trust."""

    def expect(field: str, expected: Any, got: Any) -> None:
        if expected != got:
            raise FormatError(f"expected {expected}, got {got}", field=field)

    expect("weights", ModelWeights, type(w))
    expect("layers", config.num_hidden_layers, len(w.layers))
    expect("embedding", (config.vocab_size, config.hidden_size), w.embedding.shape)
    for name, weight in w.linears():
        expect(name, linear_shape(config, name), weight.shape)
    for name, size in norm_sizes(config).items():
        owner = w if name == "final_norm" else w.layers[int(name.split(".")[1])]
        norm = getattr(owner, name.rpartition(".")[2])
        expect(name, (size,), () if norm is None else norm.shape)
