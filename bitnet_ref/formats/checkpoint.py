"""`Checkpoint`: an open model file that gives its configuration and one matrix at a time. Every format has one.

Parts of a model are called by our own names, whatever the file calls them: "embedding", "blocks.0.attn_norm",
"blocks.0.ffn_sub_norm", "blocks.0.attn.q_proj", "blocks.0.mlp.down_proj", "final_norm", "lm_head" (see `names`).
"""

from __future__ import annotations

import os
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import count
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import ConfigError, FormatError, TokenizerError
from ..families import family_of
from ..families.blocks import in_int8
from ..families.groups import in_groups
from ..families.hadamard import Rotation
from ..families.lora import LoraTerm
from ..reference.config import ModelConfig, QuantizationConfig
from ..reference.layers import Floats
from ..reference.weights import DenseWeight, LayerWeights, LinearWeight, ModelWeights, Norm, linear_name
from ..system.json_file import is_present, read_bounded
from ..system.options import FLAG, Values, choice, option, read_options
from ..system.sharing import folder_of
from ..tokenizers.settings import TOOL_TEMPLATE
from .binary_file import Closeable
from .gguf.i2_s import LAYOUTS
from .names import hf_module, is_simple_pattern
from .packing import first_invalid_code

Progress = Callable[[int, int], None]  # (parts done, parts in total)
Prepare = Callable[[LinearWeight], LinearWeight]
PATH = Values(lambda value: value is None or isinstance(value, str | os.PathLike), "a path")
PROGRESS = Values(lambda value: value is None or callable(value), "a function (parts done, all parts)")

MAX_TOKENIZER_BYTES = 64 << 20
# The files of a tokenizer in a hub repository, one of them in a folder of its own; config.json is not among them.
TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("generation_config.json", "chat_template.jinja", TOOL_TEMPLATE),
)
MODULES_FILE = "modules.json"
PROMPTS_FILE = "config_sentence_transformers.json"
LENGTH_FILE = "sentence_bert_config.json"
EMBEDDING_FILES = (MODULES_FILE, "1_Pooling/config.json", PROMPTS_FILE, LENGTH_FILE)  # of sentence-transformers


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """How files are read. Raises ConfigError.

    Files:
    allow_unquantized: Load a bitnet checkpoint without quantization_config, as a dense model.
    verify: Also compare all bytes of a native file, and of prepared weights, with their hashes. Each is then read
        twice.
    prepared: Store the weights as computed beside the model; read them next time. They are in the layout of the backend
        (cython), in the folder .bitnet_ref; a start then takes little time. It costs disk space as large as the model.
        "mapped": map them, so that processes share the memory, in a folder that no other user can write to; see
        `formats/prepared.py`.
    i2_s_layout: The layout of a GGUF's I2_S matrices, when they do not show it.
    tl_tiles: The kernel_config.ini with the tile sizes of a GGUF's TL1 or TL2 matrices.
    adapter: The folder of a LoRA adapter, or "none". By default the one beside the weights, if there is one.
    activations: What a GGUF's matrices do with inputs: as the file shows, "int8", "float", or llama.cpp's "blocks".
        "int8", as in BitNets, and "float", as in TriLM and BitCPM, are of ternary matrices that do not show it. "auto":
        float if a matrix has several scales, or the model's name says so; `inspect` says which was taken. "blocks": as
        llama.cpp computes on a CPU, in a GGUF of any model: each matrix in blocks gets its inputs in 8 bits, with a
        scale for each 32 or 256 of them, and one in 16 bits gets them in its own type.
    rotation: Matrices in a Hadamard basis: run them as stored, or fold it into dense ones. "stored" runs those of
        Bonsai 2 on rotated inputs; "folded" makes dense float32 matrices in the plain basis of them.
    dense: Dense weights: as stored, or in int8, which changes the logits (crossval precision). "int8" is for the
        linears and the head of a model without ternary matrices: a scale for each 32 weights of a row, half the bytes
        of bfloat16. Matrices in a GGUF's blocks stay as they are.
    share: Return the model that an earlier call with `share` loaded from the same files for the same backend. While it
        is still in use: it is dropped when its last user drops it.
    progress: Called with (parts done, all parts) while the weights are read.
    """

    allow_unquantized: bool = option(False, FLAG)
    verify: bool = option(False, FLAG, in_shell=False)
    prepared: bool | str = option(False, choice(False, True, "mapped"), is_flag=True)
    i2_s_layout: str | None = option(None, choice(None, *LAYOUTS), flag="--i2s-layout")
    tl_tiles: str | os.PathLike[str] | None = option(None, PATH)
    adapter: str | os.PathLike[str] | None = option(None, PATH, metavar="FOLDER")
    activations: str = option("auto", choice("auto", "int8", "float", "blocks"))
    rotation: str = option("stored", choice("stored", "folded"))
    dense: str = option("stored", choice("stored", "int8"))
    share: bool = option(False, FLAG, in_shell=False)
    progress: Progress | None = option(None, PROGRESS, in_shell=False)

    def __post_init__(self) -> None:
        read_options(self, ConfigError)

    @property
    def reading(self) -> dict[str, str]:
        """The options on which the weights depend, for a key."""
        names = ("allow_unquantized", "i2_s_layout", "tl_tiles", "activations", "rotation", "dense")
        return {name: str(getattr(self, name)) for name in names}


class Checkpoint(Closeable, ABC):
    """An open model file; a context manager. Each tensor is checked when it is read; a FormatError names its place.

    kind: the file's format, as `convert --to` calls it: "hf-packed", "hf-bf16", "gguf-i2_s", "onnx", "native", ...
    evidence: sentences about what no field of the file says and was decided from its contents, with the reason.
    taken: the file's names of the tensors that were read so far.
    bases: of matrices that are given in another basis than the plain one: name of a linear or "embedding" -> its basis.
    folded: of matrices that the file has in another basis, and that `read_part` gives in the plain one.
    """

    path: Path
    config: ModelConfig
    kind: str
    evidence: list[str]
    taken: set[str]
    bases: Mapping[str, Rotation] = MappingProxyType({})
    folded: Mapping[str, Rotation] = MappingProxyType({})
    adapter: Mapping[str, LoraTerm] = MappingProxyType({})  # what `read_weights` puts on linears, by their names
    merged: Mapping[str, LoraTerm] = MappingProxyType({})  # what `read_part` adds to matrices
    # `Backend.pack_plane` of the backend that the weights are read for; None: packed by NumPy
    pack_plane: Callable[[NDArray[np.uint8]], NDArray[np.uint8] | None] | None = None
    dense: str = "stored"  # how `read_weights` gives dense linears
    adapter_folder: Path | None = None  # of an adapter that has sentence-transformers' files

    @property
    def texts_path(self) -> Path:
        """Beside which sentence-transformers' files are."""
        return self.path if self.adapter_folder is None else self.adapter_folder

    def read_ahead(self) -> None:
        """Call before all parts are read in their order: the disk then works while earlier parts are packed."""

    def set_bases(self, stored: Mapping[str, Rotation], options: LoadOptions) -> None:
        """Say in which bases the file has matrices."""
        if options.rotation == "folded":
            self.folded = stored
        else:
            self.bases = stored

    def fail(self, tensor: str, message: str) -> FormatError:
        """The error to raise about a tensor of the file. It names the file, and the tensor's place if it has one."""
        return FormatError(message, path=self.path, field=tensor)

    @property
    def input_norm_eps(self) -> float | None:
        """The eps of the norm inside each ternary linear; None if there is none."""
        quantized = self.config.quantization
        return quantized.rms_norm_eps if quantized is not None and quantized.use_rms_norm else None

    @abstractmethod
    def embedding(self) -> LinearWeight:
        """(V, D), packed where the checkpoint has it so."""

    @abstractmethod
    def norm(self, name: str) -> NDArray[np.float32]:
        """A norm's weight, (D,), (H*d,) or (F,): see `norm_sizes`."""

    def array(self, name: str) -> NDArray[np.float32]:
        """A block's array that is neither a linear nor a norm: see `Family.array_shapes`."""
        message = f"{name.split('.', 2)[2]} is not read from {self.kind} files"
        raise ConfigError(message, path=self.path, field="layer_types")

    @abstractmethod
    def linear(self, name: str) -> LinearWeight:
        """A linear's weight, of shape `linear_shape`. "lm_head" only if it is not tied."""

    @abstractmethod
    def finish(self) -> None:
        """Call after all parts were read. Raises FormatError if the file has tensors that the model does not use."""

    def master(self, name: str) -> Floats | None:
        """The full-precision matrix that `linear` quantises; None if the file has none."""
        return None

    def dense_dtype(self, name: str) -> np.dtype:
        """The stored dtype of a matrix that is not ternary (or of "embedding")."""
        weight: Any = self.embedding() if name == "embedding" else self.linear(name)
        dtype: np.dtype = weight.dtype
        return dtype

    def rounded(self, name: str, values: Floats) -> Floats:
        """`values` as this file's type for that matrix stores them, if the type has blocks of integers."""
        return values

    def given_dtype(self, name: str) -> np.dtype:
        """The dtype of a matrix that is not ternary (or of "embedding") as `fold` gives it."""
        is_changed = name in self.folded or name in self.merged
        return np.dtype(np.float32) if is_changed else self.dense_dtype(name)

    def check_tied_head(self, embedding: LinearWeight) -> None:
        """Raises FormatError where the file stores a head that differs from the embedding it is tied to."""

    def tokenizer_files(self) -> dict[str, bytes]:
        """The tokenizer as in a hub repository: file name ("tokenizer.json", ...) -> bytes. Empty if there is none."""
        return {}

    def require_plain_basis(self, writer: str) -> None:
        """ConfigError where matrices are given in another basis, which files of `writer` cannot say."""
        if self.bases:
            message = f"{writer} files cannot say that matrices are in a Hadamard basis; "
            message += 'fold it first (rotation="folded"), or convert to native, gguf-pq2_0 or gguf-ptq1_0'
            raise ConfigError(message, path=self.path)

    # -- checks that all readers make ----------------------------------------------------------------------------------

    def checked_scale(self, tensor: str, scale: Any) -> np.float32:
        """`scale` as float32. FormatError unless it and its reciprocal are finite and above zero."""
        with np.errstate(over="ignore", divide="ignore"):
            single = np.float32(scale)
            if not (0 < single < np.inf and np.float32(1) / single < np.inf):
                raise self.fail(tensor, f"expected a finite scale above zero, got {scale}")
        return single

    def check_codes(self, tensor: str, packed: NDArray[np.uint8]) -> None:
        """FormatError if a 2-bit code of `packed` is 3."""
        if (at := first_invalid_code(packed)) is not None:
            raise self.fail(tensor, f"holds the invalid ternary code 3 in byte {list(at)} (0x{packed[at]:02x})")

    def refuse_unused(self, tensors: list[str], model: str) -> None:
        """FormatError about the first of `tensors`, which `model` (in words) has no place for."""
        if tensors:
            others = f" (and {len(tensors) - 1} more)" if len(tensors) > 1 else ""
            raise self.fail(tensors[0], f"this tensor is no part of {model}{others}")


def element_bytes(checkpoint: Checkpoint) -> Callable[[str], int | None]:
    """name -> bytes of an element of "embedding" or a linear in the file; None if it is ternary."""
    sizes: dict[str, int] = {}  # by the last word of the name: all layers have the same dtype

    def size(name: str) -> int | None:
        if name != "embedding" and is_ternary(checkpoint.config, name):
            return None
        short = name.rpartition(".")[2]
        if short not in sizes:
            sizes[short] = checkpoint.given_dtype(name).itemsize
        return sizes[short]

    return size


def read_tokenizer_folder(folder: Path) -> dict[str, bytes]:
    """The tokenizer's files in a folder: file name -> bytes. Raises TokenizerError."""
    names = [name for name in TOKENIZER_FILES if is_present(folder / name)]
    return {name: read_bounded(folder / name, TokenizerError, MAX_TOKENIZER_BYTES, folder) for name in names}


def files_of_texts(model: Path) -> list[str]:
    """Those beside a model, a folder or a file, that `embed` reads: the prompts of its texts, their length, and whether
    its tokenizer alone says how they end."""
    return [name for name in (MODULES_FILE, PROMPTS_FILE, LENGTH_FILE) if is_present(folder_of(model) / name)]


def write_tokenizer_files(checkpoint: Checkpoint, folder: Path) -> None:
    """Write the tokenizer's files, and those of sentence-transformers beside the checkpoint, into a folder."""
    source = folder_of(checkpoint.texts_path)
    names = [name for name in EMBEDDING_FILES if is_present(source / name)]
    beside = {name: read_bounded(source / name, FormatError, MAX_TOKENIZER_BYTES, source) for name in names}
    for name, data in (checkpoint.tokenizer_files() | beside).items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(data)


# -- the parts of a model ----------------------------------------------------------------------------------------------


def linear_names(config: ModelConfig) -> list[str]:
    """Every linear of the blocks, in the order of the computation."""
    layers = range(config.num_hidden_layers)
    return [linear_name(index, name) for index in layers for name in config.linear_shapes(index)]


def all_linears(config: ModelConfig) -> list[str]:
    """Every linear of the blocks, and the head if it is not tied."""
    return [*linear_names(config), *([] if config.tie_word_embeddings else ["lm_head"])]


def part_count(config: ModelConfig) -> int:
    """The number of parts that `parts` gives. Computed without a list: a config may claim billions of layers."""
    heads = 2 + (not config.tie_word_embeddings)
    if config.layers_differ:  # its file lists them
        return heads + sum(_parts_of_layer(config, i) for i in range(config.num_hidden_layers))
    return heads + config.num_hidden_layers * _parts_of_layer(config, 0)


def check_room(config: ModelConfig, nbytes: int, path: Path) -> None:
    """FormatError for matrices that tensors of so many bytes cannot hold, as each weight takes a bit at least. To be
    called before anything of a row's or a column's size is made."""
    for layer in range(config.num_hidden_layers) if config.layers_differ else (0,):
        for name, (n, k) in config.linear_shapes(layer).items():
            if n * k > 8 * nbytes:
                message = f"by the configuration it has {n} x {k} weights, and all tensors have {nbytes} bytes"
                raise FormatError(message, path=path, field=linear_name(layer, name))


def _parts_of_layer(config: ModelConfig, layer: int) -> int:
    return len(config.linear_shapes(layer)) + len(config.norm_shapes(layer)) + len(arrays_of_layer(config, layer))


def linear_shape(config: ModelConfig, name: str) -> tuple[int, int]:
    """(out_features, in_features) of a linear; (V, D) of "embedding"."""
    if name in ("embedding", "lm_head"):
        return config.vocab_size, config.hidden_size
    return config.linear_shapes(int(name.split(".")[1]))[name.rpartition(".")[2]]


def is_ternary(config: ModelConfig, name: str) -> bool:
    """Whether a linear is a BitLinear. Patterns of modules_to_not_convert mean what they mean in transformers: a
    pattern is the start of a module's path, as a regular expression, or its end. Others are globs."""
    if config.quantization is None:
        return False
    module = hf_module(name)
    for pattern in config.quantization.modules_to_not_convert:
        if module.endswith(pattern):
            return False
        if is_simple_pattern(pattern):
            if re.match(rf"(?:{pattern})(?:(?<=\.)|(?=\.|$))", module):
                return False
        elif fnmatchcase(module, pattern) or fnmatchcase(module, pattern + ".*"):
            return False
    return True


def scale_convention(quantization: QuantizationConfig | None) -> str | None:
    """What a checkpoint's `weight_scale` means. None: the model has no BitLinears.

    "divide": it is 1/mean|W| (linear_class "bitlinear").   "multiply": it is mean|W| ("autobitlinear", "offline").
    "absmean": there is none; masters are quantised when they are loaded ("autobitlinear", "online").
    """
    if quantization is None:
        return None
    if quantization.linear_class == "bitlinear":
        return "divide"
    return "multiply" if quantization.quantization_mode == "offline" else "absmean"


def has_bias(config: ModelConfig, name: str) -> bool:
    """Whether a linear has a bias."""
    if name == "lm_head" or (name.endswith("o_proj") and not config.o_proj_bias):
        return False
    return config.attention_bias if name.split(".")[2] == "attn" else config.mlp_bias


def norms_of_layer(config: ModelConfig, index: int) -> dict[str, int]:
    """Name -> length of each norm of one block."""
    return {f"blocks.{index}.{name}": size for name, size in config.norm_shapes(index).items()}


def arrays_of_layer(config: ModelConfig, index: int) -> dict[str, tuple[int, ...]]:
    """Name -> shape of each array of one block that is neither a linear nor a norm."""
    shapes = family_of(config).array_shapes(config, index)
    return {f"blocks.{index}.{name}": shape for name, shape in shapes.items()}


def array_shape(config: ModelConfig, name: str) -> tuple[int, ...]:
    """The shape of one of these."""
    return arrays_of_layer(config, int(name.split(".")[1]))[name]


def norm_sizes(config: ModelConfig) -> dict[str, int]:
    """Name -> length of every norm: "blocks.0.attn_norm", ..., "final_norm"."""
    blocks = [norms_of_layer(config, index) for index in range(config.num_hidden_layers)]
    return {name: size for sizes in blocks for name, size in sizes.items()} | {"final_norm": config.hidden_size}


def norm_size(config: ModelConfig, name: str) -> int:
    """Length of one norm."""
    if name == "final_norm":
        return config.hidden_size
    return norms_of_layer(config, int(name.split(".")[1]))[name]


# -- reading all of them -----------------------------------------------------------------------------------------------


def ticker(progress: Progress | None, total: int) -> Callable[[], None]:
    """A function that calls `progress` with 1, 2, ... and `total`; one that does nothing without `progress`."""
    numbers = count(1)
    return (lambda: None) if progress is None else lambda: progress(next(numbers), total)


def read_weights(
    checkpoint: Checkpoint,
    progress: Progress | None = None,
    prepare_for: Callable[[int | None], Prepare | None] = lambda layer: None,
    meanwhile: Callable[[], None] | None = None,
) -> ModelWeights:
    """All weights. Each linear goes through `prepare_for(its layer)` (None: the head) as soon as it is read, so it is
    never held twice. See `Backend.prepare_for`. meanwhile: called while the embedding is read."""
    config = checkpoint.config
    if checkpoint.dense != "stored" and config.quantization is not None:
        message = f"{checkpoint.dense!r} is for models without int8 activations, and this one's linears are ternary"
        raise ConfigError(f"{message}; load it without", path=checkpoint.path, field="dense")
    done = ticker(progress, part_count(config))
    checkpoint.read_ahead()
    with ThreadPoolExecutor(1) as reader:
        reading = reader.submit(read_embedding, checkpoint)
        if meanwhile is not None:
            meanwhile()
        embedding = reading.result()
    del reading  # it holds the embedding as it was read
    if config.tie_word_embeddings and embedding.kind != "dense" and (prepare := prepare_for(None)):
        head = prepare(embedding)
        embedding = head if head.kind == embedding.kind else embedding  # a kind that has rows in its layout too
    done()
    layers = tuple(read_layer(checkpoint, index, prepare_for(index), done) for index in range(config.num_hidden_layers))
    final_norm = Norm(checkpoint.norm("final_norm"), config.norm_eps, "ln_final")
    done()
    head = read_head(checkpoint, embedding, prepare_for(None))
    if not config.tie_word_embeddings:
        done()
    checkpoint.finish()
    return ModelWeights(embedding, layers, final_norm, head)


def read_layer(
    checkpoint: Checkpoint, index: int, prepare: Prepare | None = None, done: Callable[[], None] = lambda: None
) -> LayerWeights:
    """One block. `done` is called after each of its parts."""
    config, block = checkpoint.config, f"blocks.{index}"
    family = family_of(config)
    kind = family.layer_class(config, index)
    parts: dict[str, Any] = {"name": block, "attn_sub_norm": None, "ffn_sub_norm": None}
    for name in norms_of_layer(config, index):
        short = name.rpartition(".")[2]
        parts[short] = Norm(checkpoint.norm(name), config.norm_eps, f"{block}.{kind.trace_names[short]}")
        done()
    for name in arrays_of_layer(config, index):
        parts[name.removeprefix(f"{block}.")] = checkpoint.array(name)
        done()
    for short in config.linear_shapes(index):
        name = linear_name(index, short)
        weight = read_matrix(checkpoint, name)
        weight = family.split(config, index, short, weight)
        if (term := checkpoint.adapter.get(name)) is not None:
            weight = term.put_on(weight)
        weight = weight.called(name)
        parts[short] = weight if prepare is None else weight.each(prepare)
        done()
    return kind(**family.make_layer(config, parts))


def read_embedding(checkpoint: Checkpoint) -> LinearWeight:
    """The embedding, checked against a head that the file stores although it is tied."""
    stored = read_part(checkpoint, "embedding")
    if checkpoint.config.tie_word_embeddings:
        checkpoint.check_tied_head(stored)
    return choose_kind(checkpoint, "embedding", stored).called("embedding")


def read_head(checkpoint: Checkpoint, embedding: LinearWeight, prepare: Prepare | None = None) -> LinearWeight:
    """The head. With tied embeddings it is `embedding`, the same object."""
    if checkpoint.config.tie_word_embeddings:
        return embedding
    head = read_matrix(checkpoint, "lm_head")
    if (term := checkpoint.adapter.get("lm_head")) is not None:
        head = term.put_on(head)
    return head if prepare is None else head.each(prepare)


def fold(checkpoint: Checkpoint, name: str, w: LinearWeight) -> LinearWeight:
    """A linear or "embedding" of the file, in the plain basis where `checkpoint` is to give it so."""
    basis = checkpoint.folded.get(name)
    return w if basis is None or w.bit_linear is not None else basis.fold(w)


def choose_kind(checkpoint: Checkpoint, name: str, w: LinearWeight) -> LinearWeight:
    """A linear or "embedding" (see `fold`) as the model computes with it: of the kind that its values are of."""
    config = checkpoint.config
    float_inputs = config.quantization is not None and not config.quantization.int8_activations
    try:
        w = in_groups(w, checkpoint.bases.get(name), float_inputs)
    except ValueError as problem:
        raise FormatError(str(problem), path=checkpoint.path, field=name) from None
    return in_int8(w) if checkpoint.dense == "int8" and (name != "embedding" or config.tie_word_embeddings) else w


def read_matrix(checkpoint: Checkpoint, name: str) -> LinearWeight:
    """A linear or "embedding" as the model computes with it."""
    return choose_kind(checkpoint, name, read_part(checkpoint, name)).called(name)


def read_part(checkpoint: Checkpoint, name: str) -> Any:
    """A part of a model as it is stored (but see `fold`)."""
    if name == "embedding":
        return fold(checkpoint, name, checkpoint.embedding())
    if name.startswith("blocks.") and name in arrays_of_layer(checkpoint.config, int(name.split(".")[1])):
        return checkpoint.array(name)
    if name.endswith("norm"):
        return checkpoint.norm(name)
    w = fold(checkpoint, name, checkpoint.linear(name))
    return w if name not in checkpoint.merged else merge(checkpoint, name, w)


def merge_adapter(checkpoint: Checkpoint) -> None:
    """Let `read_part` give the matrices with the terms of the checkpoint's adapter in them: W + c B A.

    Raises ConfigError for a matrix that is not dense: the sum would not be of its kind.
    """
    ternary = next((name for name in checkpoint.adapter if is_ternary(checkpoint.config, name)), None)
    if ternary is not None:
        raise _cannot_merge(checkpoint, ternary, "ternary")
    checkpoint.merged, checkpoint.adapter = checkpoint.adapter, {}


def merge(checkpoint: Checkpoint, name: str, w: LinearWeight) -> DenseWeight:
    """W + c B A, summed in float64 and rounded once to float32."""
    if not isinstance(w, DenseWeight):
        raise _cannot_merge(checkpoint, name, w.kind)
    term = checkpoint.merged[name]
    delta = term.b.astype(np.float64) @ term.a.astype(np.float64) * term.factor
    return DenseWeight((w.array.astype(np.float64) + delta).astype(np.float32), w.bias, name=w.name)


def _cannot_merge(checkpoint: Checkpoint, name: str, kind: str) -> ConfigError:
    return ConfigError(
        f"{name} is {kind}, and with a term of low rank it would not be, so the adapter cannot be merged into this "
        "model. Keep it apart (load, generate --adapter, serve --lora), or convert the model alone with adapter='none'",
        path=checkpoint.path,
        field="adapter",
        mentions=["adapter='none'"],
    )


def parts(checkpoint: Checkpoint) -> Iterator[tuple[str, LinearWeight | NDArray[np.float32]]]:
    """(name, weight) of every part of a model as `read_part` gives it, one at a time, in the order of the
    computation."""
    config = checkpoint.config
    embedding = read_part(checkpoint, "embedding")
    yield "embedding", embedding
    if config.tie_word_embeddings:
        checkpoint.check_tied_head(embedding)
    del embedding
    for index in range(config.num_hidden_layers):
        names = [*norms_of_layer(config, index), *arrays_of_layer(config, index)]
        for name in (*names, *(linear_name(index, short) for short in config.linear_shapes(index))):
            yield name, read_part(checkpoint, name)
    for name in ("final_norm", *["lm_head"] * (not config.tie_word_embeddings)):
        yield name, read_part(checkpoint, name)
    checkpoint.finish()
