"""Prepared weights on disk: a backend's own layout of a model, kept beside the model, so that the next start is short.

The file, a .safetensors, holds the arrays that `prepare` made, and in its metadata the dataclasses around them and what
they were made from. It is a cache: a file that is damaged, or was made from other files, with other options or for
another layout, is made again. If it cannot be written, nothing is kept.

Two hashes of everything in the file guard its numbers: one over the sums of each 4 KiB, compared at every load, and one
over all bytes, compared with `verify`. They find damage; they are no signature. The model's files are identified by
their first bytes, sizes, inodes and times, the ctime among them, which no archive brings along: prepared weights that
come with a stranger's folder are not used. Who can write to the folder can change both, as he can change the model.

The file is read into memory: what was compared is what is computed with, whatever happens to the file later. With
"mapped" it is mapped, and all processes share the memory. Then a program that shortens the file kills them (SIGBUS),
and one that changes its bytes changes their weights; bitnet_ref only ever replaces it, which is harmless.

Measured with a model of 2B-4T's size, files in the system's cache, 2 threads: reading the model takes 1.9 s, this file
0.4 s, mapping it 0.07 s, each with the hash compared. Decoding from the map is 6 to 9% slower than from memory of its
own, which has huge pages.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..backends.backend import Backend
from ..errors import FormatError, printable
from ..families import KINDS, config_from_dict, config_to_dict, family_of
from ..reference.config import ModelConfig
from ..reference.layers import Array
from ..reference.weights import DenseWeight, ModelWeights, Norm
from ..system.atomic import atomic_path
from ..system.json_file import open_regular, parse_json_object
from ..system.sharing import file_identity, model_files
from .checkpoint import LoadOptions, linear_names, linear_shape, norms_of_layer
from .open import open_checkpoint
from .safetensors import SafetensorsFile, content_hash, dtype_name, write_arrays

log = logging.getLogger(__name__)

FOLDER = ".bitnet_ref"  # a folder beside the model, so that it is not taken for a file of the model
VERSION = 7
_ALIGNMENT = 64  # of the data: a cache line
_PAGE = 4096
_HEAD_BYTES = 1 << 16  # of each of the model's files, by which it is identified


class PreparedFile:
    """The prepared weights of a model for a backend on disk, and what they must have been made from."""

    def __init__(self, model: Path, backend: Backend, options: LoadOptions) -> None:
        """model: the path that `load` was given. Later changes of its files make the cache stale."""
        layout = backend.prepared_layout()
        self.model, self.backend, self.options = model, backend, options
        self.is_mapped = options.prepared == "mapped"
        self.enabled = layout is not None  # else the backend computes with the files' own layout
        name = f"{(layout or '').replace(' ', '-')}.safetensors"
        folder, name = (model, name) if model.is_dir() else (model.parent, f"{model.name}.{name}")
        self.path = folder / FOLDER / name
        facts = {"version": VERSION, "layout": layout, "options": options.reading}
        self._made_from = json.dumps(facts | {"files": _identify(model, options)})

    def read(self) -> tuple[ModelConfig, ModelWeights] | None:
        """The weights, read-only; None if there are no usable ones, with the reason in the log.

        With `verify`, raises FormatError for a native file whose content is not what its hash says.
        """
        if not self.enabled or not os.path.exists(self.path):
            return None
        try:
            with SafetensorsFile(self._plain_path()) as file:
                if file.metadata.get("made_from") != self._made_from:
                    log.info("%s was made from other files or options: the model is read anew", self.path)
                    return None
                memory = file.mapped() if self.is_mapped else _read(file)
                self._compare_hashes(file, memory)
                config = config_from_dict(self._json(file, "config"))
                family = family_of(config)
                layers = [family.layer_class(config, i) for i in range(config.num_hidden_layers)]
                weights_of = [each for kind in KINDS.values() for each in kind.classes]
                own = [*layers, *family.nested.values(), *self.backend.weight_kinds]
                kinds = {kind.__name__: kind for kind in (ModelWeights, Norm, *weights_of, *own)}
                weights = _rebuild(self._json(file, "weights"), lambda name: file.view(memory, name), kinds, {})
            _check(weights, config)
            self.backend.check_prepared(weights)
        except Exception as problem:  # whatever a tampered file leads to, the model itself is there
            reason = printable(str(getattr(problem, "message", problem)), keep="") or type(problem).__name__
            log.warning("%s is damaged (%s): the model is read anew", self.path, reason)
            return None
        if self.options.verify:
            open_checkpoint(self.model, self.options).close()
        return config, weights

    def _plain_path(self) -> Path:
        """`path`. FormatError if the file or its folder is a link: in a stranger's folder it could lead anywhere."""
        if self.path.is_symlink() or self.path.parent.is_symlink():
            raise FormatError("is a link", path=self.path)
        return self.path

    def _compare_hashes(self, file: SafetensorsFile, memory: NDArray[np.uint8]) -> None:
        stored = dict(file.metadata)
        hashes = [("content_hash", sum_pages), ("full_hash", sha256)]
        for key, digest in hashes if self.options.verify else hashes[:1]:
            expected = stored.pop(key)
            tensors = {
                name: (info.dtype, info.shape, digest(memory.data[info.offset : info.offset + info.nbytes]))
                for name, info in file.tensors.items()
            }
            if content_hash(stored, tensors) != expected:
                raise FormatError("its content is not what its hash says", path=self.path, field=key)

    def _json(self, file: SafetensorsFile, field: str) -> Any:
        return parse_json_object(file.metadata[field].encode("utf-8", "surrogatepass"), FormatError, self.path)

    def write(self, config: ModelConfig, weights: ModelWeights) -> None:
        """Keep the weights. If that fails, a warning in the log says why."""
        if not self.enabled:
            return
        arrays: dict[str, Array] = {}
        metadata = {
            "made_from": self._made_from,
            "config": json.dumps(config_to_dict(config)),
            "weights": json.dumps(_describe(weights, "weights", arrays, {})),
        }
        layout = {name: (dtype_name(array.dtype), array.shape) for name, array in arrays.items()}
        for key, digest in (("full_hash", sha256), ("content_hash", sum_pages)):
            flat = {name: np.ascontiguousarray(array).reshape(-1).view(np.uint8) for name, array in arrays.items()}
            metadata[key] = content_hash(metadata, {name: (*layout[name], digest(flat[name].data)) for name in layout})
        try:
            self.path.parent.mkdir(exist_ok=True)
            if not self._plain_path().is_file():
                self.path.unlink(missing_ok=True)  # a pipe
            with atomic_path(self.path) as temporary:
                write_arrays(temporary, arrays, metadata, alignment=_ALIGNMENT)
        except (OSError, FormatError) as problem:
            log.warning("the prepared weights are not kept: %s", problem)


def _identify(model: Path, options: LoadOptions) -> list[list[Any]]:
    """Of each file that the model may be read from: `file_identity`, and a hash of its beginning if it can be read."""
    facts: list[list[Any]] = []
    for path in model_files(model) + ([] if options.tl_tiles is None else [Path(options.tl_tiles)]):
        with suppress(FormatError), open_regular(path, FormatError) as file:
            facts.append([*file_identity(path), sha256(file.read(_HEAD_BYTES))])
    return facts


def _read(file: SafetensorsFile) -> NDArray[np.uint8]:
    """The file's bytes, read-only, in huge pages where the system has them."""
    from ..backends.cpu.memory import HugePages

    memory = HugePages().empty((file.size,))
    file.read_into(memory.data, 0, "weights")
    memory.flags.writeable = False
    return memory


def sha256(data: bytes | memoryview) -> str:
    return hashlib.sha256(data).hexdigest()


def sum_pages(data: bytes | memoryview) -> str:
    """A hash of the sum of each 4 KiB, as numbers of 8 bytes, and of the rest: at the speed of memory. One changed bit
    always changes a sum; two that change it back, or words that change places in a page, go unnoticed."""
    whole = len(data) // _PAGE * _PAGE
    sums = np.frombuffer(data[:whole], np.uint64).reshape(-1, _PAGE // 8).sum(axis=1)
    return sha256(sums.tobytes() + bytes(data[whole:]))


def _describe(value: Any, name: str, arrays: dict[str, Array], seen: dict[int, str]) -> Any:
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


def _rebuild(tree: Any, array: Callable[[str], Array], kinds: Mapping[str, type], built: dict[str, Any]) -> Any:
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

    def expect_floats(field: str, size: int, got: Any) -> None:
        expect(field, (np.dtype(np.float32), (size,)), None if got is None else (got.dtype, got.shape))

    def expect_norm(field: str, size: int, norm: Any) -> None:
        expect_floats(field, size, None if norm is None else norm.weight)
        expect(f"{field}.eps", True, isinstance(norm.eps, int | float))

    expect("weights", ModelWeights, type(w))
    expect("layers", config.num_hidden_layers, len(w.layers))
    expect("embedding", (config.vocab_size, config.hidden_size), w.embedding.shape)
    expect("linears", {*linear_names(config), "lm_head"}, {name for name, _ in w.linears()})
    for name, weight in w.linears():
        shape = linear_shape(config, name)
        expect(name, shape, weight.shape)
        if weight.bias is not None:
            expect_floats(f"{name}.bias", shape[0], weight.bias)
        if weight.norm is not None:
            expect_norm(f"{name}.input_norm", shape[1], weight.norm)
    expect_norm("final_norm", config.hidden_size, w.final_norm)
    for index, layer in enumerate(w.layers):
        expect(f"blocks.{index}", family_of(config).layer_class(config, index), type(layer))
        for name, size in norms_of_layer(config, index).items():
            expect_norm(name, size, getattr(layer, name.rpartition(".")[2]))
        for name, array_shape in family_of(config).array_shapes(config, index).items():
            array = getattr(layer, name.rpartition(".")[2], None)
            if array is not None:
                expect(f"blocks.{index}.{name}", array_shape, array.shape)
    for weight in (w.embedding, *(weight for _, weight in w.linears())):
        if isinstance(weight, DenseWeight):
            expect("dense matrix", True, dtype_name(weight.dtype) in ("BF16", "F16", "F32"))
