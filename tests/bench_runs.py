"""Runs of `bitnet-ref bench`, small models to measure, and backends that are wrong."""

import json
import math
from dataclasses import replace

import numpy as np
from click.testing import CliRunner

import bitnet_ref
from bitnet_ref import benchmark
from bitnet_ref.backends import Backend
from bitnet_ref.cli import cli

SMALL = 1 << 16  # bytes to read, and of the cache: the real code, in no time
NO_CYTHON = bitnet_ref.available_backends()["cython"] is not None
FAST = "numpy" if NO_CYTHON else "cython"
# By hand: D 16, F 24, 2 layers, 4 heads and 2 kv heads of 4, V 40. Four weights a byte, 4-byte norms, 2-byte table.
TINY = replace(
    benchmark.SHAPES["2b-4t"],
    vocab_size=40,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=4,
    max_position_embeddings=64,
)
LAYER_CODES = 16 * 16 // 4 * 2 + 8 * 16 // 4 * 2 + 24 * 16 // 4 * 3  # q o, k v, gate up down


def invoke(*args):
    return CliRunner().invoke(cli, ["bench", *map(str, args)])


def invoke_json(*args, code=0):
    result = invoke(*args, "--json")
    assert result.exit_code == code, result.output
    return json.loads(result.stdout)


def assert_positive(facts, *names):
    for name in names:
        assert math.isfinite(facts[name]), name
        assert facts[name] > 0, name


def tiny_model(be=None, **changes):
    return benchmark.synthetic_model(replace(TINY, **changes), be or Backend(threads=1))


class OffByOne(Backend):
    """A kernel with a wrong sum in one place, as kernels have."""

    def ternary_matmul(self, x_q, w):
        acc = super().ternary_matmul(x_q, w)
        acc[-1, -1] += 1
        return acc


class WrongWhenFused(Backend):
    """Its product is right, its fused linear rounds once more than the contract says."""

    def linears(self, x, ws):
        return tuple(np.nextafter(y, np.float32(np.inf)) for y in super().linears(x, ws))


class WrongHead(Backend):
    """Its ternary linears are right, its logits are not."""

    def lm_head(self, x, w):
        return super().lm_head(x, w) * np.float32(1.001)
