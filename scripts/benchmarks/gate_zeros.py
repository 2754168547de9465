"""A random model with a given share of zeros after ReLU^2, as trained models have many: they are skipped."""

from __future__ import annotations

from dataclasses import replace
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from bitnet_ref.benchmark.synthetic import RandomCheckpoint
from bitnet_ref.errors import ConfigError
from bitnet_ref.reference.config import ModelConfig
from bitnet_ref.reference.quantization import CODES_PER_BYTE
from bitnet_ref.reference.weights import DenseWeight, LinearWeight, TernaryWeight

BIAS_CHANNELS, BIAS_SIZE = 64, 1 / 64
MINUS_ONES = 0b00000000  # four weights of -1
ZEROS = 0b01010101  # four weights of 0


class SparseGates(RandomCheckpoint):
    """A share of relu2's gates is zero, by the weights alone; in a `RandomCheckpoint` a half is.

    BIAS_CHANNELS of the residual stream are constant (no layer writes them), gate_proj takes all of them with -1, and
    ffn_norm gives them the size that moves the gates' mean so far below zero.
    """

    def __init__(self, config: ModelConfig, seed: int = 0, *, gate_zeros: float) -> None:
        if not (config.activation == "relu2" and config.sub_norms and 0 < gate_zeros < 1):
            message = f"expected a share between 0 and 1, and a shape with relu2 and sub-norms, got {gate_zeros}"
            raise ConfigError(message, field="gate_zeros")
        super().__init__(config, seed)
        self.gate_zeros = gate_zeros

    def embedding(self) -> LinearWeight:
        table = super().embedding()
        assert isinstance(table, DenseWeight)
        table.array[:, :BIAS_CHANNELS] = BIAS_SIZE
        return table

    def norm(self, name: str) -> NDArray[np.float32]:
        norm = super().norm(name)
        if name.endswith("ffn_norm"):
            layer, hidden = int(name.split(".")[1]), self.config.hidden_size
            # Each o_proj and down_proj before has added a variance of 1 (see `random_ternary_weight`).
            rms = ((1 - BIAS_CHANNELS / hidden) * (2 * layer + 1)) ** 0.5
            spread = (2 / 3 * (hidden - BIAS_CHANNELS)) ** 0.5  # of a gate, in units of the normed input
            shift = NormalDist().inv_cdf(self.gate_zeros) * spread
            norm[:BIAS_CHANNELS] = shift / BIAS_CHANNELS * rms / BIAS_SIZE
        return norm

    def ternary(self, name: str) -> TernaryWeight:
        weight = super().ternary(name)
        packed = weight.packed.copy()
        if name.endswith("gate_proj"):
            packed[:, : BIAS_CHANNELS // CODES_PER_BYTE] = MINUS_ONES
        elif name.endswith(("o_proj", "down_proj")):
            packed[:BIAS_CHANNELS] = ZEROS
        return replace(weight, packed=packed)
