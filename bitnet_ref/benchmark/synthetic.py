"""Models of known shapes with random weights, made in seconds.

Speed and memory depend on the shape only, so no checkpoint has to be downloaded to measure them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from ..api import Model
from ..backends import Backend
from ..errors import ConfigError
from ..families import family_of
from ..families.groups import GroupTernaryWeight
from ..families.linear_norms import put_norm
from ..families.moe import CLAMP, MapleConfig
from ..families.qwen import Qwen3Config
from ..formats.checkpoint import Checkpoint, Progress, linear_shape, norm_size, read_weights
from ..reference.config import ModelConfig, QuantizationConfig, RopeConfig
from ..reference.quantization import CODES_PER_BYTE
from ..reference.weights import DenseWeight, LinearWeight, TernaryWeight

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
_LLAMA = replace(_BITNET, activation="silu", max_position_embeddings=2048, rope=RopeConfig())


def _shape(vocab: int, d: int, ffn: int, layers: int, heads: tuple[int, int, int], base: ModelConfig) -> ModelConfig:
    """heads: (query heads, kv heads, head_dim)."""
    query, kv, size = heads
    base = replace(base, vocab_size=vocab, hidden_size=d, intermediate_size=ffn, num_hidden_layers=layers)
    return replace(base, num_attention_heads=query, num_key_value_heads=kv, head_dim=size)


_DENSE = replace(_LLAMA, model_type="llama", tie_word_embeddings=False, sub_norms=False, quantization=None)
_QWEN3 = Qwen3Config(
    **vars(_DENSE)
    | {
        "model_type": "qwen3",
        "tie_word_embeddings": True,
        "norm_eps": 1e-6,
        "rope": RopeConfig(theta=1e6),
        "max_position_embeddings": 32768,
    }
)
_NORMED = replace(_QWEN3, quantization=QuantizationConfig(use_rms_norm=True))
_MAPLE = MapleConfig(
    **vars(_DENSE)
    | {
        "model_type": "maple",
        "norm_eps": 1e-6,
        "max_position_embeddings": 131072,
        "sliding_window": 512,
        "layer_types": (*("sliding_attention",) * 3, "full_attention") * 6,
        "num_hidden_layers": 24,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 512,
        "gate_clamp": CLAMP,
        "rotary_dim": 64,
        "head_dim": 128,
        "global_positions": False,
    }
)
SHAPES: dict[str, ModelConfig] = {
    "2b-4t": _BITNET,  # microsoft/bitnet-b1.58-2B-4T
    "700m": _shape(32002, 1536, 4096, 24, (16, 16, 96), _LLAMA),  # 1bitLLM/bitnet_b1_58-large
    "1b": _shape(32002, 2048, 5460, 24, (32, 32, 64), _LLAMA),  # the 1.3B of the b1.58 paper
    "7b": _shape(32000, 4096, 11008, 32, (32, 32, 128), replace(_LLAMA, tie_word_embeddings=False)),  # of the paper
    "tinyllama-1.1b": _shape(32000, 2048, 5632, 22, (32, 4, 64), _DENSE),  # TinyLlama-1.1B
    "bonsai-1.7b": _shape(151936, 2048, 6144, 28, (16, 8, 128), _QWEN3),  # Ternary-Bonsai: Qwen3, groups of 128
    "bonsai-4b": _shape(151936, 2560, 9728, 36, (32, 8, 128), _QWEN3),
    "bonsai-8b": _shape(151936, 4096, 12288, 36, (32, 8, 128), replace(_QWEN3, tie_word_embeddings=False)),
    "embedding-0.6b": _shape(151936, 1024, 3072, 28, (16, 8, 128), _NORMED),  # BitNet-Embedding-0.6B
    "maple": _shape(151936, 2048, 4096, 24, (16, 4, 128), _MAPLE),  # maple-preview: 20B, 1B for a token
}
GROUP = 128  # inputs that share a scale in the shapes of Ternary-Bonsai

# The 81 bytes that hold four codes of 0, 1 and 2 (there is no code 3). A random byte picks one. 256 = 3 * 81 + 13: 13
# are a third more frequent than the others, those in the middle with their negatives, so that weights have mean 0.
VALID_BYTES = np.array([byte for byte in range(256) if not byte & (byte >> 1) & 0x55], dtype=np.uint8)
MAX_DRAWN = 1 << 22  # values of a dense matrix that are drawn at a time: 8 MB
_ANY_TO_VALID = VALID_BYTES[np.r_[np.arange(243) % 81, 34:47]].tobytes()


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


def random_group_weight(rng: np.random.Generator, n_out: int, n_in: int, group: int = GROUP) -> GroupTernaryWeight:
    """A matrix (n_out, n_in) that is ternary by groups, with float16 scales."""
    weight = random_ternary_weight(rng, n_out, n_in)
    scales = weight.w_dequant_scale * (0.5 + rng.random((n_out, -(-n_in // group)), dtype=np.float32))
    return GroupTernaryWeight(weight.packed, n_in, scales.astype(np.float16), group)


def random_dense_weight(rng: np.random.Generator, n_out: int, n_in: int) -> DenseWeight:
    """A bfloat16 matrix (n_out, n_in), its values +-1/64 to +-1/32: any sign and mantissa under one exponent."""
    bits = np.empty((n_out, n_in), dtype=np.uint16)
    rows = max(1, MAX_DRAWN // n_in)
    for start in range(0, len(bits), rows):
        block = bits[start : start + rows]
        block[:] = np.frombuffer(rng.bytes(block.nbytes), dtype=np.uint16).reshape(block.shape) & 0x807F | 0x3C80
    return DenseWeight(bits.view(ml_dtypes.bfloat16))


class RandomCheckpoint(Checkpoint):
    """A model of that shape to be read: each call draws a matrix, so that no second copy of the model is held.

    Its linears are ternary, with a norm in each for `use_rms_norm`. If the config has no quantization they are dense
    bfloat16, for Qwen3 ternary by groups, as is its embedding, and for Maple by rows. Others are bfloat16.
    """

    def __init__(self, config: ModelConfig, seed: int = 0) -> None:
        self.path, self.config, self.kind, self.evidence = Path("random"), config, "random", []
        self._rng = np.random.default_rng(seed)

    def finish(self) -> None:
        pass

    @property
    def by_groups(self) -> bool:
        return self.config.model_type == "qwen3" and self.config.quantization is None

    def embedding(self) -> LinearWeight:
        shape = self.config.vocab_size, self.config.hidden_size
        if self.by_groups:
            return random_group_weight(self._rng, *shape)
        return random_dense_weight(self._rng, *shape)

    def norm(self, name: str) -> NDArray[np.float32]:
        return np.ones(norm_size(self.config, name), dtype=np.float32)

    def ternary(self, name: str) -> TernaryWeight:
        """The ternary matrix of a linear."""
        return random_ternary_weight(self._rng, *linear_shape(self.config, name))

    def linear(self, name: str) -> LinearWeight:
        if name == "lm_head":
            return self.embedding()
        shape = linear_shape(self.config, name)
        if self.config.model_type == "maple" and not name.endswith("router"):
            return random_group_weight(self._rng, *shape, group=shape[1])
        if self.config.quantization is None:
            return (random_group_weight if self.by_groups else random_dense_weight)(self._rng, *shape)
        weight = self.ternary(name)
        return put_norm(weight, np.ones(shape[1], dtype=np.float32), self.input_norm_eps)


def synthetic_model(
    config: ModelConfig,
    backend: Backend,
    seed: int = 0,
    progress: Progress | None = None,
    layers: int | None = None,
    dense: str = "stored",
    draw: Callable[[ModelConfig, int], RandomCheckpoint] = RandomCheckpoint,
) -> Model:
    """A model of that shape with random weights, in the backend's layout. `layers` makes it shorter.

    dense: see `LoadOptions`. draw: (config, seed) -> the checkpoint that draws the weights.
    """
    if layers is not None:
        if not 1 <= layers <= config.num_hidden_layers:
            raise ConfigError(f"expected 1 to {config.num_hidden_layers}, got {layers}", field="layers")
        config = family_of(config).of_layers(config, range(layers))
    checkpoint = draw(config, seed)
    checkpoint.dense = dense
    weights = read_weights(checkpoint, progress, backend.prepare_for)
    return Model(config, backend.prepare_model(weights, config), backend)
