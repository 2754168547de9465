"""An array of the wrong shape or dtype is refused by name, never broadcast, cut or read past its end."""

import numpy as np
import pytest
from helpers import GOLDEN, call, model, prepared, random_ternary, rng

from bitnet_ref.backends.paged_cache import CacheSpec
from bitnet_ref.errors import ShapeError
from bitnet_ref.reference.cache import TokenBatch
from bitnet_ref.reference.config import RopeConfig
from bitnet_ref.reference.weights import DenseWeight, Norm, TernaryWeight

K = 24
TERNARY = TernaryWeight.from_ternary(random_ternary(rng(1), 10, K), 0.5)
DENSE = DenseWeight(rng(2).standard_normal((10, K)).astype(np.float32))


def f32(*shape):
    return np.ones(shape, dtype=np.float32)


def i8(*shape):
    return np.ones(shape, dtype=np.int8)


def weight(be, w):
    return prepared(be, w)[0]


WRONG = {
    "ternary_matmul: one input too few": ("ternary_matmul", lambda be: (i8(2, K - 1), weight(be, TERNARY))),
    "ternary_matmul: one too many": ("ternary_matmul", lambda be: (i8(2, K + 1), weight(be, TERNARY))),
    "ternary_matmul: as many bytes": ("ternary_matmul", lambda be: (i8(2, K - 3), weight(be, TERNARY))),
    "ternary_matmul: a vector": ("ternary_matmul", lambda be: (i8(K), weight(be, TERNARY))),
    "ternary_matmul: floats": ("ternary_matmul", lambda be: (f32(2, K), weight(be, TERNARY))),
    "ternary_matmul: unsigned": ("ternary_matmul", lambda be: (i8(2, K).view(np.uint8), weight(be, TERNARY))),
    "linear: ternary": ("linear", lambda be: (f32(2, K + 1), weight(be, TERNARY))),
    "linear: dense": ("linear", lambda be: (f32(2, K + 1), weight(be, DENSE))),
    "linear: a vector": ("linear", lambda be: (f32(K), weight(be, TERNARY))),
    "linear: a vector on a dense weight": ("linear", lambda be: (f32(K), weight(be, DENSE))),
    "linears": ("linears", lambda be: (f32(2, K - 4), prepared(be, TERNARY, DENSE))),
    "lm_head": ("lm_head", lambda be: (f32(2, K + 1), weight(be, DENSE))),
    "dense_matmul": ("dense_matmul", lambda be: (f32(2, 1), weight(be, DENSE))),
    "quantize_activations: a vector": ("quantize_activations", lambda be: (f32(K),)),
    "quantize_activations: no inputs": ("quantize_activations", lambda be: (f32(2, 0),)),
    "dequantize: scales of other tokens": (
        "dequantize",
        lambda be: (np.ones((3, 10), dtype=np.int32), weight(be, TERNARY), f32(2, 1)),
    ),
    "dequantize: a scale for each output": (
        "dequantize",
        lambda be: (np.ones((3, 10), dtype=np.int32), weight(be, TERNARY), f32(1, 10)),
    ),
    "rms_norm: weight too short": ("rms_norm", lambda be: (f32(2, K), Norm(f32(K - 1), 1e-5))),
    "rms_norm: weight of one": ("rms_norm", lambda be: (f32(2, K), Norm(f32(1), 1e-5))),
    "rms_norm: a vector": ("rms_norm", lambda be: (f32(K), Norm(f32(K), 1e-5))),
    "gated: other widths": ("gated", lambda be: (f32(2, 8), f32(2, 1), "silu")),
    "gated: other rows": ("gated", lambda be: (f32(2, 8), f32(1, 8), "relu2")),
    "rope: tables of other tokens": ("rope", lambda be: (f32(3, 4, 8), f32(3, 2, 8), f32(1, 4), f32(1, 4))),
    "rope: tables of another head": ("rope", lambda be: (f32(3, 4, 8), f32(3, 2, 8), f32(3, 5), f32(3, 5))),
    "rope: k of another head": ("rope", lambda be: (f32(3, 4, 8), f32(3, 2, 6), f32(3, 4), f32(3, 4))),
    "embed: a matrix of ids": ("embed", lambda be: (DENSE, np.zeros((2, 2), dtype=np.int64))),
    "embed: an id past the table": ("embed", lambda be: (DENSE, np.array([0, 10]))),
    "embed: a negative id": ("embed", lambda be: (DENSE, np.array([0, -1]))),
    "rope_tables: a matrix of positions": (
        "rope_tables",
        lambda be: (np.zeros((2, 2), dtype=np.int64), RopeConfig(), 8),
    ),
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("case", WRONG)
def test_wrong_shapes_are_refused(case, be):
    op, arguments = WRONG[case]
    with pytest.raises(ShapeError) as caught:
        call(be, op, *arguments(be))
    assert caught.value.op
    assert caught.value.expected
    assert caught.value.got
    assert str(caught.value) == f"{caught.value.op}: expected {caught.value.expected}, got {caught.value.got}"


def test_attention_of_other_tokens_or_heads(be):
    config = model(GOLDEN / "llama-dense").config
    cache = be.new_cache(config, CacheSpec(slots=1, capacity=4))
    batch = TokenBatch.of([(0, 0, [1, 2, 3])])
    call(be, "append", cache, 0, batch, f32(3, 2, 32), f32(3, 2, 32))
    for q in (f32(2, 4, 32), f32(3, 3, 32), f32(3, 4, 16), f32(4, 32)):
        with pytest.raises(ShapeError, match="attention"):
            call(be, "attention", q, cache, batch, 0, None)


def test_an_activation_that_does_not_exist(be):
    with pytest.raises(ShapeError, match="gelu"):
        call(be, "gated", f32(1, 4), f32(1, 4), "gelu")
