"""Engines for the tests of this folder and of crossval: right up to float noise, on small random models."""

from functools import lru_cache

import numpy as np
from helpers import BITNET, TINY, rng, tiny_tensors, write_checkpoint

import bitnet_ref
from bitnet_ref.backends import Backend
from bitnet_ref.backends.loaded import LoadedModel

TOKENS = [1, 17, 5, 23, 9, 31, 2, 38, 11]


def record(be, weights, config, tokens):
    """(logits, every named tensor) of a pass on a backend object."""
    return LoadedModel(config, weights, be).run_with_cache(tokens)


def random_config(seed):
    """A config of a shape of its own: BitNet or dense, grouped heads, windows, odd widths."""
    generator = rng(seed, 77)
    kv_heads = int(generator.integers(1, 4))
    head_dim = 2 * int(generator.integers(2, 9))
    config = {
        **(BITNET if generator.random() < 0.75 else TINY),
        "vocab_size": 40,
        "num_hidden_layers": int(generator.integers(1, 4)),
        "num_key_value_heads": kv_heads,
        "num_attention_heads": kv_heads * int(generator.integers(1, 4)),
        "hidden_size": 4 * int(generator.integers(4, 25)),
        "head_dim": head_dim,
        "intermediate_size": 4 * int(generator.integers(4, 40)),
        "rope_theta": float(generator.choice([10000.0, 500000.0])),
        "rms_norm_eps": float(generator.choice([1e-5, 1e-6])),
    }
    if config["model_type"] == "llama" and generator.random() < 0.5:
        config |= {"model_type": "mistral", "sliding_window": int(generator.integers(1, 8))}
    elif config["model_type"] == "bitnet":
        config["hidden_act"] = str(generator.choice(["relu2", "silu"]))
    # packed along the outputs: four rows a byte
    config["head_dim"] += -config["head_dim"] % 4
    return config


@lru_cache(maxsize=256)
def _as_float(w):
    return w.ternary().astype(np.float32)


class QuickBackend(Backend):
    """The reference with its matrices unpacked once: the same exact product, for tests that run a model many times."""

    def __init__(self):
        super().__init__("float32", 1)

    def ternary_matmul(self, x_q, w):
        return (x_q.astype(np.float32) @ _as_float(w).T).astype(np.int32)


class NoisyBackend(QuickBackend):
    """Right, but every op ends in other last bits: a float32 engine that sums in another order, only more so.

    An op on equal inputs gives equal results.
    """

    def __init__(self, seed=0, amount=3e-7):
        super().__init__()
        self.seed, self.amount = seed, amount

    def _noisy(self, y):
        noise = rng(self.seed, *y.shape).standard_normal(y.shape)
        return (y * (1 + self.amount * noise)).astype(np.float32)

    def rms_norm(self, x, norm):
        return self._noisy(super().rms_norm(x, norm))

    def rope(self, q, k, cos, sin):
        q, k = super().rope(q, k, cos, sin)
        return self._noisy(q), self._noisy(k)

    def attention(self, q, cache, batch, layer, window):
        return self._noisy(super().attention(q, cache, batch, layer, window))

    def gated(self, gate, up, activation):
        return self._noisy(super().gated(gate, up, activation))

    def dense_matmul(self, x, w):
        return self._noisy(super().dense_matmul(x, w))

    def dequantize(self, acc, w, x_quant_scale):
        return self._noisy(super().dequantize(acc, w, x_quant_scale))


def load_random(folder, seed):
    """A random small model on the NumPy backend, written to a folder in that one."""
    config = random_config(seed)
    path = write_checkpoint(folder / f"model{seed}", config, tiny_tensors(config, seed=seed))
    return bitnet_ref.load(path, backend="numpy", threads=1)
