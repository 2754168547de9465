"""bitnet_ref.reference.weights: matrices at rest, their order and their bytes."""

import numpy as np
import pytest
from helpers import GOLDEN, model, random_ternary, rng

from bitnet_ref.errors import ShapeError
from bitnet_ref.reference.weights import DenseWeight, TernaryWeight


def test_a_ternary_weight():
    w_t = random_ternary(rng(1), 6, 11)
    w = TernaryWeight.from_ternary(w_t, 0.25)
    assert (w.shape, w.nbytes, w.w_dequant_scale) == ((6, 11), 18, np.float32(0.25))
    assert isinstance(w.w_dequant_scale, np.float32)
    np.testing.assert_array_equal(w.ternary(), w_t)


@pytest.mark.parametrize(
    "packed", [np.zeros((6, 2), np.uint8), np.zeros((6, 4), np.uint8), np.zeros((6, 3), np.int8), np.zeros(3, np.uint8)]
)
def test_packed_planes_of_another_shape_are_refused(packed):
    with pytest.raises(ShapeError, match=r"TernaryWeight: expected packed uint8 \(N, 3\) for 11 inputs"):
        TernaryWeight(packed, 11, np.float32(1))


def test_order_of_the_linears():
    weights = model(GOLDEN / "llama-dense").weights
    one = [*(f"attn.{name}_proj" for name in "qkvo"), *(f"mlp.{name}_proj" for name in ("gate", "up", "down"))]
    assert [name for name, _ in weights.linears()] == [f"blocks.{i}.{name}" for i in (0, 1) for name in one] + [
        "lm_head"
    ]


@pytest.mark.parametrize(
    ("case", "tied"), [("bitnet-packed-offline", True), ("llama-tied-duplicate", True), ("llama-dense", False)]
)
def test_tied_weights_are_one_object(case, tied, backend_name):
    weights = model(GOLDEN / case, backend_name).weights
    assert weights.tied is tied
    assert (weights.lm_head is weights.embedding) is tied


def test_nbytes_is_that_of_the_checkpoint():
    """Within its header, for a packed model: the planes are repacked, not widened."""
    for case in ("bitnet-packed-offline", "llama-packed-bitlinear", "llama-dense"):
        size = (GOLDEN / case / "model.safetensors").stat().st_size
        assert abs(model(GOLDEN / case).weights.nbytes - size) < 12_000, case


def test_bias_counts():
    assert DenseWeight(np.zeros((3, 4), np.float16), np.zeros(3, np.float32)).nbytes == 24 + 12
