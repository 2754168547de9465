"""bitnet_ref.backends.observe: the one wrapper sees every op, and what it returns is what the pass computes with."""

import inspect

import numpy as np
import pytest
from helpers import GOLDEN, GOLDEN_CASES, model

from bitnet_ref.backends import Backend
from bitnet_ref.backends.observe import Observed, observe
from bitnet_ref.backends.run import run
from bitnet_ref.reference.cache import TokenBatch
from bitnet_ref.reference.ops import Ops

CASE = GOLDEN / "bitnet-packed-offline"
PROMPT = TokenBatch.of([(0, 0, [5, 6, 7, 8])])


def logits(m, around):
    return run(observe(m.backend, around), m.weights, m.config, PROMPT, m.new_cache(1, 4)).all()


@pytest.mark.sample(4)
@pytest.mark.parametrize("case", GOLDEN_CASES)
def test_watching_changes_nothing(case, backend_name):
    m = model(GOLDEN / case, backend_name)
    np.testing.assert_array_equal(logits(m, lambda step, call, args: call(*args)), m.logits([5, 6, 7, 8]))


def test_every_op_passes_by():
    m, ops = model(CASE), []

    def around(step, call, args):
        ops.append(step.op)
        return call(*args)

    logits(m, around)
    linear = ["quantize_activations", "ternary_matmul", "dequantize"]
    attention = ["rms_norm", "linears", linear[0], *linear[1:] * 3, "rope", "append", "attention", "rms_norm"]
    feed_forward = ["rms_norm", "linears", linear[0], *linear[1:] * 2, "gated", "rms_norm"]
    block = ["attention_block", *attention, "linears", *linear, "add"]
    block += ["feed_forward", *feed_forward, "linears", *linear, "add"]
    head = ["rms_norm", "linears", "dense_matmul"]
    assert ops == ["embed", "rope_tables", *block * m.config.num_hidden_layers, *head]


def test_a_result_that_is_replaced_is_computed_with():
    m = model(CASE)

    def without_rope(step, call, args):
        return args[:2] if step.op == "rope" else call(*args)

    def louder(step, call, args):
        return 2 * call(*args) if step.op == "dense_matmul" else call(*args)

    assert np.abs(logits(m, without_rope) - m.logits([5, 6, 7, 8])).max() > 1e-3
    np.testing.assert_array_equal(logits(m, louder), 2 * m.logits([5, 6, 7, 8]))


def test_every_op_of_the_reference_is_wrapped():
    """A new op must pass by too. `linear` is `linears` of one weight."""
    ops = {name for name, value in vars(Ops).items() if not name.startswith("_") and inspect.isfunction(value)}
    assert ops - set(vars(Observed)) == {"linear"}
    life_cycle = {
        name for name, value in vars(Backend).items() if not name.startswith("_") and inspect.isfunction(value)
    }
    assert {"running", "place", "from_host", "to_host", "synchronize", "new_cache"} <= life_cycle & {*vars(Observed)}
