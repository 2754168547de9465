"""A file of a shape with random weights, for engines that read nothing else.

It is written piece by piece, so that hardly more than its largest matrix is in memory.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ..errors import ConfigError
from ..formats.checkpoint import Checkpoint, linear_shape, norm_sizes
from ..formats.gguf.export import write_gguf_model
from ..reference.config import ModelConfig
from ..reference.weights import DenseWeight, LinearWeight
from .synthetic import random_ternary_weight

LARGEST_DRAWN = 1 << 22  # values of a table that are drawn; a larger one repeats them


class RandomCheckpoint(Checkpoint):
    """A ternary model of that shape; every call draws anew from where the last one left."""

    def __init__(self, config: ModelConfig, seed: int = 0) -> None:
        self.path, self.config, self.kind, self.evidence = Path("random"), config, "random", []
        self._rng = np.random.default_rng(seed)

    def close(self) -> None:
        pass

    def finish(self) -> None:
        pass

    def embedding(self) -> DenseWeight:
        return DenseWeight(self._table())

    def norm(self, name: str) -> NDArray[np.float32]:
        sizes = {"final_norm": self.config.hidden_size, **norm_sizes(self.config)}
        return np.ones(sizes[name], dtype=np.float32)

    def linear(self, name: str) -> LinearWeight:
        if name == "lm_head":
            return DenseWeight(self._table())
        return random_ternary_weight(self._rng, *linear_shape(self.config, name))

    def _table(self) -> NDArray[np.float16]:
        """A float16 matrix (V, D), its values +-1/64 to +-1/32: any sign and mantissa under one exponent."""
        shape = self.config.vocab_size, self.config.hidden_size
        count = min(LARGEST_DRAWN, shape[0] * shape[1])
        bits = np.frombuffer(self._rng.bytes(2 * count), dtype=np.uint16) & 0x83FF | 0x2400
        return np.resize(bits, shape).view(np.float16)


def write_random_gguf(config: ModelConfig, path: str | os.PathLike[str], kind: str = "tq2_0") -> None:
    """A GGUF that llama.cpp runs, its ternary matrices of that kind, embedding and head float16, without a tokenizer.

    Its architecture for sub-norms has silu: a shape with relu2 gets that, which changes no matrix. Raises FormatError
    or ConfigError for a shape that the kind or GGUF cannot hold, and for a dense one.
    """
    if config.quantization is None:
        raise ConfigError(f"the shape is dense, and a file of {kind} is of a ternary one", field="quantization")
    if config.sub_norms:
        config = replace(config, activation="silu")
    with RandomCheckpoint(config) as checkpoint:
        write_gguf_model(checkpoint, path, kind)
