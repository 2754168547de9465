"""The long run of the commands that choose their own tokens: beyond windows, switches of RoPE and pages."""

import json
from itertools import pairwise

import pytest
from click.testing import CliRunner
from helpers import BITNET, GOLDEN, model, write_checkpoint

import bitnet_ref
from bitnet_ref.backends import Backend
from bitnet_ref.cli import cli
from bitnet_ref.crossval import Crossing, cross_backends, long_tokens, make_receipt, opponents, verify_receipt
from bitnet_ref.crossval.receipt import write_receipt
from bitnet_ref.crossval.runs import FEW_NAMES

CASE = GOLDEN / "mistral-dense-window8"
TOKENS = [1, 17, 5, 23, 9, 31, 2, 38]
needs_cython = pytest.mark.skipif(bitnet_ref.available_backends()["cython"] is not None, reason="no extension here")


class LateBackend(Backend):
    """Right up to position 99; from there on the angles are those of position 99."""

    name = "late"

    def rope_tables(self, positions, rope, head_dim):
        return super().rope_tables(positions.clip(0, 99), rope, head_dim)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """One layer and a context of 600."""
    config = {**BITNET, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    folder = write_checkpoint(tmp_path_factory.mktemp("m"), {**config, "max_position_embeddings": 600})
    return bitnet_ref.load(folder, backend="numpy", threads=1)


def test_the_ids_of_a_long_run(tiny):
    ids = long_tokens(tiny.config)
    assert len(ids) == 520
    assert set(ids) == set(range(tiny.config.vocab_size))
    assert all(a != b for a, b in pairwise(ids))
    assert len(long_tokens(model(CASE).config)) == model(CASE).config.context_length == 256
    assert long_tokens(model(GOLDEN / "rope-dynamic").config) is None  # its context is 16


@pytest.mark.thorough
@needs_cython
def test_a_backend_agrees_over_520_tokens_and_its_receipt_holds(tiny, tmp_path):
    crossings = cross_backends(tiny, TOKENS, ["cython"], long=long_tokens(tiny.config))
    (crossing,) = crossings
    assert crossing.agrees, crossing.verdict
    assert [comparison.tokens for comparison in crossing.long] == [520]
    assert {op.kind for op in crossing.long[0].ops} == {"residual", "activation int8", "activation scale", "logits"}
    assert "; with 520 tokens: AGREES" in crossing.verdict
    assert next(check for check in crossing.paths if check.path == "520 tokens").passed
    write_receipt(tmp_path / "r", make_receipt("backends", str(tiny.path), tiny, TOKENS, crossings))
    verification = verify_receipt(tmp_path / "r")
    assert verification.holds, verification.verdict
    assert not verification.unchecked


@pytest.mark.thorough
def test_a_mistake_at_late_positions_is_found(tiny):
    crossing = Crossing("late")
    with (
        opponents.record_reference(tiny, TOKENS) as right,
        opponents.record_reference(tiny, long_tokens(tiny.config), FEW_NAMES) as right_long,
    ):
        opponents._cross_backend(crossing, lambda **_: LateBackend("float32", 1), tiny, right, right_long)
    assert all(comparison.agrees for comparison in crossing.comparisons)
    assert not crossing.agrees
    assert crossing.verdict.startswith("with 520 tokens: DIFFERS")
    assert crossing.long[0].first_divergence.token >= 100


@pytest.mark.thorough
@needs_cython
def test_the_command_runs_both(tiny):
    arguments = ["crossval", "backends", str(tiny.path), "--only", "cython", "--json"]
    done = CliRunner().invoke(cli, arguments)
    assert done.exit_code == 0, done.output
    (result,) = json.loads(done.stdout)["results"]
    assert [comparison["tokens"] for comparison in result["long"]] == [520]
    done = CliRunner().invoke(cli, [*arguments, "--tokens", "1,5,9"])
    assert json.loads(done.stdout)["results"][0]["long"] == []
