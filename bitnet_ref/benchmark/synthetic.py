"""Models of known shapes with random weights: as fast and as large as the real ones, and made in seconds.

Speed and memory depend on the shape only, so no checkpoint has to be downloaded to measure them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from ..api import Model
from ..backends import Backend
from ..errors import ConfigError
from ..reference.config import ModelConfig, QuantizationConfig, RopeConfig
from ..reference.quantization import CODES_PER_BYTE
from ..reference.weights import DenseWeight, LayerWeights, ModelWeights, TernaryWeight

Progress = Callable[[int, int], object]

_BITNET = ModelConfig(
    model_type="bitnet",
    vocab_size=128256,
    hidden_size=2560,
    intermediate_size=6912,
    num_hidden_layers=30,
    num_attention_heads=20,
    num_key_value_heads=5,
    head_dim=128,
    activation="relu2",
    norm_eps=1e-5,
    max_position_embeddings=4096,
    tie_word_embeddings=True,
    sub_norms=True,
    rope=RopeConfig(theta=500000.0),
    quantization=QuantizationConfig(),
)
SHAPES: dict[str, ModelConfig] = {
    "2b-4t": _BITNET,  # microsoft/bitnet-b1.58-2B-4T
    "700m": replace(  # 1bitLLM/bitnet_b1_58-large
        _BITNET,
        vocab_size=32002,
        hidden_size=1536,
        intermediate_size=4096,
        num_hidden_layers=24,
        num_attention_heads=16,
        num_key_value_heads=16,
        head_dim=96,
        activation="silu",
        max_position_embeddings=2048,
        rope=RopeConfig(),
    ),
    "1b": replace(  # the 1.3B of the b1.58 paper
        _BITNET,
        vocab_size=32002,
        hidden_size=2048,
        intermediate_size=5460,
        num_hidden_layers=24,
        num_attention_heads=32,
        num_key_value_heads=32,
        head_dim=64,
        activation="silu",
        max_position_embeddings=2048,
        rope=RopeConfig(),
    ),
    "7b": replace(  # LLaMA 7B, as the b1.58 paper has it
        _BITNET,
        vocab_size=32000,
        hidden_size=4096,
        intermediate_size=11008,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=32,
        head_dim=128,
        activation="silu",
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        rope=RopeConfig(),
    ),
    "tinyllama-1.1b": replace(  # TinyLlama-1.1B, which is dense
        _BITNET,
        model_type="llama",
        vocab_size=32000,
        hidden_size=2048,
        intermediate_size=5632,
        num_hidden_layers=22,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=64,
        activation="silu",
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        sub_norms=False,
        rope=RopeConfig(),
        quantization=None,
    ),
}

# The 81 bytes that hold four codes of 0, 1 and 2 (code 3 never occurs). A random byte picks one: 13 of them come a
# third more often than the others, which no speed depends on.
VALID_BYTES = np.array([byte for byte in range(256) if not byte & (byte >> 1) & 0x55], dtype=np.uint8)
_ANY_TO_VALID = VALID_BYTES[np.arange(256) % len(VALID_BYTES)].tobytes()


def random_ternary_weight(rng: np.random.Generator, n_out: int, n_in: int) -> TernaryWeight:
    """A ternary matrix (n_out, n_in) drawn in its packed form; its products keep the variance of their input."""
    columns = -(-n_in // CODES_PER_BYTE)
    drawn = rng.bytes(n_out * columns).translate(_ANY_TO_VALID)
    packed = np.frombuffer(drawn, dtype=np.uint8).reshape(n_out, columns)
    if rest := n_in % CODES_PER_BYTE:  # a row ends in code 1, a zero weight
        packed = packed.copy()
        used = 4**rest - 1
        packed[:, -1] = packed[:, -1] & used | 0x55 & ~used
    return TernaryWeight(packed, n_in, np.float32((1.5 / n_in) ** 0.5))


def random_dense_weight(rng: np.random.Generator, n_out: int, n_in: int) -> DenseWeight:
    """A bfloat16 matrix (n_out, n_in), its values +-1/64 to +-1/32: any sign and mantissa under one exponent."""
    bits = np.empty((n_out, n_in), dtype=np.uint16)
    rows = max(1, (1 << 22) // n_in)  # 8 MB at a time
    for start in range(0, len(bits), rows):
        block = bits[start : start + rows]
        drawn = np.frombuffer(rng.bytes(block.nbytes), dtype=np.uint16).reshape(block.shape)
        np.bitwise_and(drawn, 0x807F, out=block)
        block |= 0x3C80
    return DenseWeight(bits.view(ml_dtypes.bfloat16))


def synthetic_model(
    config: ModelConfig, backend: Backend, seed: int = 0, progress: Progress | None = None, layers: int | None = None
) -> Model:
    """A model of that shape with random weights, in the layout of whoever computes them. `layers` makes it shorter.

    Its linears are ternary, or dense bfloat16 where the config has no quantization. One matrix at a time is drawn and
    passed on, so the peak is hardly above the model's size.
    """
    if layers is not None:
        if not 1 <= layers <= config.num_hidden_layers:
            raise ConfigError(f"expected 1 to {config.num_hidden_layers}, got {layers}", field="layers")
        config = replace(config, num_hidden_layers=layers)
    rng = np.random.default_rng(seed)
    total = config.num_hidden_layers + 1
    draw = random_ternary_weight if config.quantization else random_dense_weight

    def layer(index: int) -> LayerWeights:
        prepare = backend.prepare_for(index)
        linears = {name: prepare(draw(rng, *shape)) for name, shape in config.linear_shapes().items()}
        if progress is not None:
            progress(index + 1, total)
        return LayerWeights(
            attn_norm=_ones(config.hidden_size),
            attn_sub_norm=_ones(config.query_size) if config.sub_norms else None,
            ffn_norm=_ones(config.hidden_size),
            ffn_sub_norm=_ones(config.intermediate_size) if config.sub_norms else None,
            **linears,
        )

    blocks = tuple(layer(index) for index in range(config.num_hidden_layers))
    table = config.vocab_size, config.hidden_size
    embedding = random_dense_weight(rng, *table)
    head = embedding if config.tie_word_embeddings else backend.prepare_for(None)(random_dense_weight(rng, *table))
    if progress is not None:
        progress(total, total)
    weights = ModelWeights(embedding, blocks, _ones(config.hidden_size), head)
    return Model(config, backend.prepare_model(weights), backend)


def _ones(size: int) -> NDArray[np.float32]:
    return np.ones(size, dtype=np.float32)
