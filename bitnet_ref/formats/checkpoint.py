"""What every format's reader is: a model file, opened, that gives its configuration and one matrix at a time.

Names are the model's own, whatever a file calls its tensors: "embedding", "blocks.0.attn_norm",
"blocks.0.ffn_sub_norm", "blocks.0.attn.q_proj", "blocks.0.mlp.down_proj", "final_norm", "lm_head".
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from ..reference.config import ModelConfig
from ..reference.weights import ATTENTION_LINEARS, DenseWeight, LayerWeights, LinearWeight, ModelWeights

Progress = Callable[[int, int], None]  # (parts done, parts in all)
Prepare = Callable[[LinearWeight], LinearWeight]


@dataclass(frozen=True)
class ReadOptions:
    """What the user knows better than the file. Each is None, or False, unless it was given.

    allow_unquantized: a bitnet config without quantization_config is taken as a dense model.
    i2_s_layout: "x86", "arm" or "interleaved": the layout of a GGUF's I2_S tensors, which no field of the file tells.
    tl_tiles: the kernel_config.ini with the tile sizes of a GGUF's TL1 or TL2 tensors.
    verify: compare the content hash that a native file carries with its content, which means to read it twice.
    """

    allow_unquantized: bool = False
    i2_s_layout: str | None = None
    tl_tiles: Path | None = None
    verify: bool = False


class Checkpoint(ABC):
    """A model file, opened; a context manager. Each tensor is checked as it is read: FormatError names its place.

    kind: what the file is, as `convert --to` calls it: "hf-packed", "hf-bf16", "gguf-i2_s", "onnx", "native", ...
    evidence: what no field of the file says and was decided from its contents, and why; a sentence each.
    """

    path: Path
    config: ModelConfig
    kind: str
    evidence: list[str]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @abstractmethod
    def close(self) -> None:
        """Close the files."""

    @abstractmethod
    def embedding(self) -> DenseWeight:
        """(V, D)"""

    @abstractmethod
    def norm(self, name: str) -> NDArray[np.float32]:
        """A norm's weight, (D,), (H*d,) or (F,): see `norm_sizes`."""

    @abstractmethod
    def linear(self, name: str) -> LinearWeight:
        """A linear's weight, of the shape that `linear_shape` tells. "lm_head" only if it is not tied."""

    def master(self, name: str) -> NDArray | None:
        """The full-precision matrix that a linear was made ternary from when it was read; None: the file has none."""
        return None

    def dense_dtype(self, name: str) -> np.dtype:
        """Of a matrix that is not ternary ("embedding" too), as it is stored."""
        weight = self.embedding() if name == "embedding" else self.linear(name)
        assert isinstance(weight, DenseWeight)
        return weight.array.dtype

    def tied_head(self, embedding: DenseWeight) -> DenseWeight:
        """The head of a model with tied embeddings. A reader whose file has one all the same checks it here."""
        return embedding

    @abstractmethod
    def finish(self) -> None:
        """Everything was read: FormatError if tensors are left that the model has no use for."""

    def tokenizer_files(self) -> dict[str, bytes]:
        """The tokenizer as a hub repository has it: file name ("tokenizer.json", ...) -> bytes; none: empty."""
        return {}


def linear_name(layer: int, linear: str) -> str:
    """0, "q_proj" -> "blocks.0.attn.q_proj"."""
    return f"blocks.{layer}.{'attn' if linear in ATTENTION_LINEARS else 'mlp'}.{linear}"


def linear_names(config: ModelConfig) -> list[str]:
    """Of every linear of the blocks, in the order of `LayerWeights`."""
    return [linear_name(index, name) for index in range(config.num_hidden_layers) for name in config.linear_shapes()]


def all_linears(config: ModelConfig) -> list[str]:
    """Of every linear of the blocks, and of the head when it is not tied."""
    return [*linear_names(config), *([] if config.tie_word_embeddings else ["lm_head"])]


def part_count(config: ModelConfig) -> int:
    """How many things `parts` gives. Counted, not listed: a config may claim billions of layers."""
    of_layer = len(config.linear_shapes()) + len(norms_of_layer(config, 0))
    return 2 + config.num_hidden_layers * of_layer + (not config.tie_word_embeddings)


def linear_shape(config: ModelConfig, name: str) -> tuple[int, int]:
    """(out_features, in_features) of a linear, by its name."""
    if name == "lm_head":
        return config.vocab_size, config.hidden_size
    return config.linear_shapes()[name.rpartition(".")[2]]


def is_ternary(config: ModelConfig, name: str) -> bool:
    """Whether a linear is a BitLinear. A pattern of modules_to_not_convert is what transformers takes it for.

    It names a module and all below it from the start, or ends its name; `*` makes it a glob.
    """
    if config.quantization is None:
        return False
    module = hf_module(name)
    for pattern in config.quantization.modules_to_not_convert:
        if module.endswith(pattern) or module == pattern or module.startswith(pattern.rstrip(".") + "."):
            return False
        if "*" in pattern and (fnmatchcase(module, pattern) or fnmatchcase(module, pattern + ".*")):
            return False
    return True


def hf_module(name: str) -> str:
    """Our name of a linear -> Hugging Face's: "blocks.0.attn.q_proj" -> "model.layers.0.self_attn.q_proj"."""
    if name == "lm_head":
        return name
    _, index, part, linear = name.split(".")
    return f"model.layers.{index}.{'self_attn' if part == 'attn' else 'mlp'}.{linear}"


def has_bias(config: ModelConfig, name: str) -> bool:
    """Whether a linear has a bias."""
    if name == "lm_head":
        return False
    return config.attention_bias if name.split(".")[2] == "attn" else config.mlp_bias


def norms_of_layer(config: ModelConfig, index: int) -> dict[str, int]:
    """Name -> length of one block's norms."""
    sizes = {"attn_norm": config.hidden_size, "ffn_norm": config.hidden_size}
    if config.sub_norms:
        sizes |= {"attn_sub_norm": config.query_size, "ffn_sub_norm": config.intermediate_size}
    return {f"blocks.{index}.{name}": size for name, size in sizes.items()}


def norm_sizes(config: ModelConfig) -> dict[str, int]:
    """Name -> length of every norm's weight: "blocks.0.attn_norm", ..., "final_norm"."""
    blocks = [norms_of_layer(config, index) for index in range(config.num_hidden_layers)]
    return {name: size for sizes in blocks for name, size in sizes.items()} | {"final_norm": config.hidden_size}


def norm_size(config: ModelConfig, name: str) -> int:
    """Length of one norm's weight, by its name."""
    if name == "final_norm":
        return config.hidden_size
    return norms_of_layer(config, int(name.split(".")[1]))[name]


def read_weights(
    checkpoint: Checkpoint,
    progress: Progress | None = None,
    prepare_for: Callable[[int | None], Prepare | None] = lambda layer: None,
) -> ModelWeights:
    """All of a checkpoint. Each linear goes through `prepare_for(its layer)` (None: the head; see
    `Backend.prepare_for`) as soon as it is read: it is never held twice."""
    config = checkpoint.config
    total = part_count(config)
    counter = iter(range(1, total + 1))

    def done() -> None:
        if progress is not None:
            progress(next(counter), total)

    embedding = checkpoint.embedding()
    done()
    layers = tuple(read_layer(checkpoint, index, prepare_for(index), done) for index in range(config.num_hidden_layers))
    final_norm = checkpoint.norm("final_norm")
    done()
    head = read_head(checkpoint, embedding, prepare_for(None))
    if not config.tie_word_embeddings:
        done()
    checkpoint.finish()
    return ModelWeights(embedding, layers, final_norm, head)


def read_layer(
    checkpoint: Checkpoint, index: int, prepare: Prepare | None = None, done: Callable[[], None] = lambda: None
) -> LayerWeights:
    """One block. done: called after each norm and each linear."""
    of_layer: dict[str, Any] = {"attn_sub_norm": None, "ffn_sub_norm": None}
    for name in norms_of_layer(checkpoint.config, index):
        of_layer[name.rpartition(".")[2]] = checkpoint.norm(name)
        done()
    for short in checkpoint.config.linear_shapes():
        weight = checkpoint.linear(linear_name(index, short))
        of_layer[short] = weight if prepare is None else prepare(weight)
        done()
    return LayerWeights(**of_layer)


def read_head(checkpoint: Checkpoint, embedding: DenseWeight, prepare: Prepare | None = None) -> LinearWeight:
    """The head; with tied embeddings the embedding itself, the same object."""
    if checkpoint.config.tie_word_embeddings:
        return checkpoint.tied_head(embedding)
    head = checkpoint.linear("lm_head")
    return head if prepare is None else prepare(head)


def parts(checkpoint: Checkpoint) -> Iterator[tuple[str, LinearWeight | NDArray[np.float32]]]:
    """(name, what it is) of everything in a model, one at a time, in the order in which files hold it."""
    config = checkpoint.config
    embedding = checkpoint.embedding()
    yield "embedding", embedding
    if config.tie_word_embeddings:
        checkpoint.tied_head(embedding)
    del embedding
    for index in range(config.num_hidden_layers):
        for name in norms_of_layer(config, index):
            yield name, checkpoint.norm(name)
        for short in config.linear_shapes():
            yield linear_name(index, short), checkpoint.linear(linear_name(index, short))
    yield "final_norm", checkpoint.norm("final_norm")
    if not config.tie_word_embeddings:
        yield "lm_head", checkpoint.linear("lm_head")
    checkpoint.finish()
