"""Prepared weights on disk: what a backend made of a model's files, kept beside them, so that the next start maps it.

Reading a model of 2B parameters takes seconds: every code is checked and moved to where the kernels want it, the head
gets its screen. All of that is in the file written here, a .safetensors: the arrays as they were in memory, and in its
metadata the dataclasses that held them and what they were made from. Mapped, it costs nothing until it is used, and
processes that use the same model share its pages.

It is a cache. One that was made from other files, by other options or for another layout is made again, and so is one
that is damaged; what cannot be written is not kept. Nothing else is lost with it.

Measured, 2B-4T's shape from a Hugging Face folder, screened head, files in the system's cache: read, 6.3 s of processor
time; mapped, 0.05 s and 40 MB resident until it computes. Decoding from the map is 0.94 times as fast as from memory of
its own, whose pages are all huge ones; 0.91 on another day, when the file lay in small pieces of the system's cache.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..backends import Backend
from ..backends.cpu.weights import PanelWeight, ScreenedHead
from ..errors import BitNetRefError, FormatError
from ..reference.config import ModelConfig
from ..reference.weights import DenseWeight, InputNorm, LayerWeights, ModelWeights, TernaryWeight
from ..system.atomic import atomic_path
from ..system.json_file import parse_json_object
from .checkpoint import ReadOptions, linear_shape, norm_sizes
from .safetensors import SafetensorsFile, SafetensorsWriter, dtype_name

log = logging.getLogger(__name__)

FOLDER = ".bitnet_ref"  # beside the model: a folder, so that whoever looks for the model's own files finds only those
VERSION = 1
_ALIGNMENT = 64  # of the data: a line of the processor's cache
_KINDS = {
    kind.__name__: kind
    for kind in (ModelWeights, LayerWeights, DenseWeight, TernaryWeight, PanelWeight, ScreenedHead, InputNorm)
}


class PreparedFile:
    """Where a model's prepared weights are kept for a backend, and what they must have been made from to be used."""

    def __init__(self, model: Path, backend: Backend, options: ReadOptions) -> None:
        """model: the path it is loaded from. Its files are looked at now: what changes later makes the cache stale."""
        layout = backend.prepared_layout()
        self.kept = layout is not None  # else the backend computes with the files' own layout
        self.path = (model if model.is_dir() else model.parent) / FOLDER / _file_name(model, layout or "")
        facts = {"version": VERSION, "layout": layout, "options": repr(options), "files": _files(model, options)}
        self._made_from = json.dumps(facts)

    def read(self) -> tuple[ModelConfig, ModelWeights] | None:
        """The weights, mapped, read-only; None where there are none that are of use, which is logged."""
        if not self.kept or not self.path.exists():
            return None
        try:
            with SafetensorsFile(self.path) as file:
                if file.metadata.get("made_from") != self._made_from:
                    log.info("%s was made from other files or options: the model is read anew", self.path)
                    return None
                config = ModelConfig.from_dict(self._json(file, "config"))
                weights = _rebuilt(self._json(file, "weights"), file.mapped().__getitem__)
            _check(weights, config)
        except (BitNetRefError, OSError, KeyError, TypeError, ValueError, AttributeError, RecursionError) as problem:
            log.warning("%s is damaged (%s): the model is read anew", self.path, problem)
            return None
        return config, weights

    def _json(self, file: SafetensorsFile, field: str) -> Any:
        return parse_json_object(file.metadata[field].encode("utf-8", "surrogatepass"), FormatError, self.path)

    def write(self, config: ModelConfig, weights: ModelWeights) -> None:
        """Keep the weights. Where that cannot be, a warning says why."""
        if not self.kept:
            return
        arrays: dict[str, NDArray] = {}
        metadata = {
            "made_from": self._made_from,
            "config": json.dumps(config.to_dict()),
            "weights": json.dumps(_described(weights, "weights", arrays, {})),
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


def _file_name(model: Path, layout: str) -> str:
    of_file = "" if model.is_dir() else f"{model.name}."
    return f"{of_file}{layout.replace(' ', '-')}.safetensors"


def _files(model: Path, options: ReadOptions) -> list[tuple[str, int, int]]:
    """(name, size, time) of all that the model may be read from: of a folder all files, else those that go together."""
    if model.is_dir():
        files = sorted(file for file in model.iterdir() if file.is_file())
    else:
        beside = (model.name, f"{model.name}.data", f"{model.name}_data", "config.json")
        files = [file for file in map(model.with_name, beside) if file.is_file()]
    if options.tl_tiles is not None:
        files.append(options.tl_tiles)
    return [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]


def _described(value: Any, name: str, arrays: dict[str, NDArray], seen: dict[int, str]) -> Any:
    """A tree of dataclasses as JSON; its arrays go to `arrays`, under the names of their places."""
    if isinstance(value, np.ndarray):
        arrays[name] = value
        return {"array": name}
    if isinstance(value, np.floating):
        return {"float32": float(value)}
    if isinstance(value, tuple):
        return [_described(item, f"{name}.{index}", arrays, seen) for index, item in enumerate(value)]
    if not is_dataclass(value):
        return value
    if id(value) in seen:  # the embedding that is the head too
        return {"same": seen[id(value)]}
    seen[id(value)] = name
    inside = {
        field.name: _described(getattr(value, field.name), f"{name}.{field.name}", arrays, seen)
        for field in fields(value)
        if field.init
    }
    return {"kind": type(value).__name__, "name": name, "fields": inside}


def _rebuilt(tree: Any, array: Callable[[str], NDArray], made: dict[str, Any] | None = None) -> Any:
    """What `_described` was given, with arrays from `array`."""
    made = {} if made is None else made
    if isinstance(tree, list):
        return tuple(_rebuilt(item, array, made) for item in tree)
    if not isinstance(tree, dict):
        return tree
    if "array" in tree:
        return array(tree["array"])
    if "float32" in tree:
        return np.float32(tree["float32"])
    if "same" in tree:
        return made[tree["same"]]
    inside = {name: _rebuilt(item, array, made) for name, item in tree["fields"].items()}
    made[tree["name"]] = value = _KINDS[tree["kind"]](**inside)
    return value


def _check(w: Any, config: ModelConfig) -> None:
    """Raises FormatError unless the weights have the shapes that the config says: the kernels trust them."""

    def expect(field: str, expected: Any, got: Any) -> None:
        if expected != got:
            raise FormatError(f"expected {expected}, got {got}", field=field)

    expect("weights", ModelWeights, type(w))
    expect("layers", config.num_hidden_layers, len(w.layers))
    expect("embedding", (config.vocab_size, config.hidden_size), w.embedding.shape)
    for name, weight in w.linears():
        expect(name, linear_shape(config, name), weight.shape)
        if isinstance(weight, ScreenedHead):
            n, k = weight.shape
            expect(f"{name}.facts", (n, 3), _shape(weight.facts))
            expect(f"{name}.rows_q", (n, -(-k // 64) * 64), _shape(weight.rows_q))
    for name, size in norm_sizes(config).items():
        of = w if name == "final_norm" else w.layers[int(name.split(".")[1])]
        expect(name, (size,), _shape(getattr(of, name.rpartition(".")[2])))


def _shape(array: NDArray | None) -> Sequence[int]:
    return () if array is None else array.shape
