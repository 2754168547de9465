"""Runs in several calls and of several sequences: the metadata, the verdict's place, the causes, the command."""

import json
import subprocess
import sys
from pathlib import Path
from shutil import which

import numpy as np
import pytest
from click.testing import CliRunner
from helpers import GOLDEN, model

import bitnet_ref
from bitnet_ref.cli import cli
from bitnet_ref.crossval import cross_trace
from bitnet_ref.crossval.engines.outside import _are_the_same
from bitnet_ref.crossval.names import is_by_head
from bitnet_ref.crossval.opponents import cross_traces, default_tokens
from bitnet_ref.crossval.runs import RUNS, pieces_of, plan, record_run, run_batch, run_in_calls
from bitnet_ref.crossval.trace import Trace, write_trace
from bitnet_ref.errors import FormatError

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "crossval"))
import call_mistakes  # noqa: E402 - a script beside the package

CASE = GOLDEN / "bitnet-packed-offline"
TOKENS = [1, 17, 5, 23, 9, 31, 2, 38, 11, 40, 7, 3]
needs_cython = pytest.mark.skipif(bitnet_ref.available_backends()["cython"] is not None, reason="no extension here")
needs_cc = pytest.mark.skipif(which("cc") is None, reason="no C compiler here")


# -- the metadata ------------------------------------------------------------------------------------------------------


def trace_of(path, calls=None, sequences=None):
    write_trace(
        path, {"hook_embed": np.zeros((6, 4), dtype=np.float32)}, [1] * 6, engine="x", calls=calls, sequences=sequences
    )
    return Trace(path)


def test_calls_and_sequences_are_read(tmp_path):
    with trace_of(tmp_path / "a", [4, 1, 1]) as trace:
        assert (trace.sequences, trace.calls) == ((6,), (4, 1, 1))
        assert trace.runs() == [trace]
    with trace_of(tmp_path / "b", [[2, 1], [1, 0], [1, 1]], [4, 2]) as trace:
        assert trace.sequence_calls == ((2, 1, 1), (1, 1))
        one, other = trace.runs()
        assert (one.calls, one.others, other.others) == ((2, 1, 1), [[1, 1]], [[1] * 4])
        assert one["hook_embed"].shape == (4, 4)
    with trace_of(tmp_path / "c") as trace:
        assert trace.calls == ()


@pytest.mark.parametrize(
    ("calls", "sequences", "field", "words"),
    [
        ([4, 1], None, "calls", "5"),
        ([4, 0, 2], None, "calls", "each 1 to"),
        ([4, True, 1], None, "calls", "numbers of tokens"),
        ([], None, "calls", "JSON list"),
        (None, [4, 1], "sequences", "5 tokens together"),
        ([4, 2], [4, 2], "calls", "each of 2 sequences"),
        ([[4, 1], [0, 2]], [4, 2], "calls", "[4, 3]"),
    ],
)  # fmt: skip
def test_numbers_that_do_not_add_up(tmp_path, calls, sequences, field, words):
    with pytest.raises(FormatError, match=f"__metadata__.{field}") as caught:
        trace_of(tmp_path / "t", calls, sequences)
    assert words in str(caught.value)


@needs_cc
def test_the_c_header_writes_them(tmp_path):
    (tmp_path / "main.c").write_text(
        '#include "trace.h"\n'
        "int main(void) {\n"
        "    int tokens[6] = {1, 1, 1, 1, 1, 1}, calls[3] = {4, 1, 1};\n"
        "    float rows[24] = {0};\n"
        "    struct trace t;\n"
        '    trace_begin_calls(&t, "c.safetensors", "c", tokens, 6, calls, 3, NULL, 0);\n'
        '    trace_add(&t, "hook_embed", "F32", rows, 0, 6, 4);\n'
        "    return trace_end(&t);\n"
        "}\n"
    )
    subprocess.run(["cc", "-I", str(ROOT / "crossval"), "main.c", "-o", "main"], cwd=tmp_path, check=True)
    subprocess.run(["./main"], cwd=tmp_path, check=True)
    with Trace(tmp_path / "c.safetensors") as trace:
        assert trace.calls == (4, 1, 1)


# -- correct engines ---------------------------------------------------------------------------------------------------


def test_the_runs_of_a_plan():
    plans = plan(model(CASE).config, TOKENS)
    assert [each.name for each in plans] == list(RUNS)
    for each in plans:
        assert sum(each.calls or each.sequences) == len(each.tokens) or not (each.calls or each.sequences)
    assert pieces_of(14) == (3, 8, 1, 2)


@pytest.mark.sample(3)
@needs_cython
@pytest.mark.parametrize("name", ["decode", "pieces", "batch"])
def test_a_correct_engine_in_calls_agrees(tmp_path, name):
    m = bitnet_ref.load(CASE, backend="cython", threads=1)
    (one,) = plan(m.config, TOKENS, [name])
    record_run(m, one, tmp_path / "t")
    crossing = cross_trace(m, tmp_path / "t")
    assert crossing.agrees, crossing.verdict
    assert not crossing.causes


def test_prefill_equals_decoding():
    m = model(CASE)
    right = m.run_with_cache(TOKENS)[1]
    for calls in ((1,) * 12, (3, 8, 1)):
        joined = run_in_calls(m, TOKENS, calls)
        assert set(joined) == set(right)
        for name, array in joined.items():
            np.testing.assert_array_equal(array, right[name], err_msg=name)


def test_a_batch_is_its_sequences(tmp_path):
    m = model(CASE)
    record_run(m, plan(m.config, TOKENS, ["batch"])[0], tmp_path / "t")
    with Trace(tmp_path / "t") as trace:
        for run in trace.runs():
            right = m.run_with_cache(run.token_ids)[1]
            for name in right:
                np.testing.assert_array_equal(run[name], right[name], err_msg=name)


def test_other_layouts_of_several_sequences(tmp_path):
    m = model(GOLDEN.parent / "families/qwen3-groups128")
    parts = [TOKENS, TOKENS[::-1]]
    seen, n = run_batch(m, parts), 2 * len(TOKENS)
    apart = {
        name: np.stack([x[:, :12, :12], x[:, 12:, 12:]]) if is_by_head(name) else x.reshape(2, 12, *x.shape[1:])
        for name, x in seen.items()
    }
    by_head = {
        name: x.reshape(-1, x.size // n // of) for name, x in seen.items()
        for norm, of in ((".q_norm.", m.config.num_attention_heads), (".k_norm.", m.config.num_key_value_heads))
        if norm in name
    }  # fmt: skip
    last = seen["lm_head.hook_out"][[11, 23]]
    for tensors in (apart, by_head, {"logits": last[None]}, {"logits": last[:, None]}):
        write_trace(tmp_path / "t", tensors, [*parts[0], *parts[1]], engine="theirs", sequences=[12, 12])
        crossing = cross_trace(m, tmp_path / "t", causes=False)
        assert crossing.agrees, crossing.verdict


@pytest.mark.parametrize("shape", [(), (0,), (0, 0), (7,)])
def test_shapes_of_no_run(tmp_path, shape):
    seen = dict.fromkeys(("hook_embed", "blocks.0.attn.hook_pattern", "lm_head.hook_out"), np.zeros(shape, np.float32))
    for sequences in (None, [4, 8]):
        write_trace(tmp_path / "t", seen, TOKENS, engine="theirs", sequences=sequences)
        assert "shape" in cross_trace(model(CASE), tmp_path / "t", causes=False).verdict


# -- wrong ones --------------------------------------------------------------------------------------------------------


def record_wrong_decoding(m, path, calls=(9, 1, 1, 1)):
    seen = run_in_calls(m, TOKENS, calls, ["*.hook_resid_post", "lm_head.hook_out"])
    for array in seen.values():
        array[calls[0] :] *= np.float32(1.5)
    write_trace(path, seen, TOKENS, engine="theirs", calls=calls)


def test_the_place_of_a_difference(tmp_path):
    m = model(CASE)
    record_wrong_decoding(m, tmp_path / "t")
    crossing = cross_trace(m, tmp_path / "t", causes=False)
    assert "first wrong from the second call on: the call of 9 tokens before it is right" in crossing.verdict


def test_one_of_two_sequences(tmp_path):
    m, parts = model(CASE), [TOKENS, TOKENS[::-1][:8]]
    seen = run_batch(m, parts, ["*.hook_resid_post", "lm_head.hook_out"])
    for array in seen.values():
        array[12:] *= np.float32(1.5)
    write_trace(tmp_path / "t", seen, [*parts[0], *parts[1]], engine="theirs", sequences=[12, 8])
    crossing = cross_trace(m, tmp_path / "t", causes=False)
    assert not crossing.agrees
    assert "only in sequence 2 of 2" in crossing.verdict


def test_several_traces_get_one_verdict(tmp_path):
    m = model(CASE)
    (short,) = plan(m.config, TOKENS, ["short"])
    record_run(m, short, tmp_path / "short.safetensors")
    record_wrong_decoding(m, tmp_path / "decode.safetensors")
    result = CliRunner().invoke(cli, ["crossval", "trace", str(CASE), str(tmp_path), "--no-causes", "--json"])
    assert result.exit_code == 1, result.output
    (found,) = json.loads(result.stdout)["results"]
    assert "decode" in found["verdict"]
    assert {run["run"]: run["agrees"] for run in found["runs"] if run["run"] == "short"}["short"] in (True, False)
    receipt = ["--receipt", str(tmp_path / "r.json")]
    assert CliRunner().invoke(cli, ["crossval", "trace", str(CASE), str(tmp_path), *receipt]).exit_code == 2
    empty = tmp_path / "empty"
    empty.mkdir()
    assert CliRunner().invoke(cli, ["crossval", "trace", str(CASE), str(empty)]).exit_code == 3


def test_wrong_for_long_calls_only(tmp_path):
    """As a kernel that computes nothing for more than 8 tokens."""
    m, paths = model(CASE), [tmp_path / "a", tmp_path / "b"]
    for n, path in zip((8, 9), paths, strict=True):
        seen = m.run_with_cache(TOKENS[:n])[1]
        seen = {name: array * np.float32(1 if n == 8 else 0) for name, array in seen.items() if "resid" in name}
        write_trace(path, seen, TOKENS[:n], engine="theirs")
    assert "right for calls of up to 8 tokens, wrong for 9" in cross_traces(m, paths).verdict


def test_prefill_and_decoding_are_compared_with_each_other(tmp_path):
    m = model(CASE)
    (short,) = plan(m.config, TOKENS, ["short"])
    record_run(m, short, tmp_path / "short")
    record_wrong_decoding(m, tmp_path / "wrong")
    (right,) = plan(m.config, TOKENS, ["decode"])
    record_run(m, right, tmp_path / "right")
    assert _are_the_same(m.config, tmp_path / "short", tmp_path / "right") is True
    assert _are_the_same(m.config, tmp_path / "short", tmp_path / "wrong") is False


@pytest.mark.thorough
def test_record_writes_a_folder_of_runs(tmp_path):
    result = CliRunner().invoke(cli, ["crossval", "record", str(CASE), str(tmp_path), "--runs", "short,decode"])
    assert result.exit_code == 0, result.output
    assert {path.name for path in tmp_path.iterdir()} == {"short.safetensors", "decode.safetensors"}
    assert CliRunner().invoke(cli, ["crossval", "record", str(CASE), str(tmp_path), "--runs", "fast"]).exit_code == 2
    assert CliRunner().invoke(cli, ["crossval", "trace", str(CASE), str(tmp_path)]).exit_code == 0


@pytest.mark.parametrize("command", ["record", "onnxruntime"])
def test_runs_that_cannot_be_made_are_refused(command, tmp_path):
    """Also beside one that can."""
    out = [str(tmp_path / "runs")] * (command == "record")
    result = CliRunner().invoke(cli, ["crossval", command, str(CASE), *out, "--runs", "short,decode", "--tokens", "1"])
    assert result.exit_code == 2, result.output
    assert "--runs: decode cannot be made of 1 token in a context of" in " ".join(result.output.split())
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("run", ["short", "decode", "batch"])
def test_names_that_no_tensor_has_are_refused(run, tmp_path):
    path = tmp_path / "run.safetensors"
    command = ["crossval", "record", str(CASE), str(path), "--runs", run, "--names", "blocks.0.hook_q"]
    result = CliRunner().invoke(cli, command)
    assert result.exit_code == 2, result.output
    assert "matches none of this model's tensors" in result.output
    assert not path.exists()


# -- causes ------------------------------------------------------------------------------------------------------------

SAMPLE = ("positions_restart", "ring_of_20", "row_before", "cache_of_other", "padding_bleeds", "conv_after_silu")


@pytest.mark.sample(3)
@pytest.mark.thorough
@pytest.mark.parametrize("name", SAMPLE)
def test_a_mistake_of_calls_is_named(name):
    (mistake,) = [each for each in call_mistakes.MISTAKES if each.name == name]
    outcome = call_mistakes.hunt(mistake, "full")
    assert outcome.right, outcome


@pytest.mark.slow
@pytest.mark.parametrize("shown", ["full", "thin"])
@pytest.mark.parametrize("mistake", call_mistakes.MISTAKES, ids=lambda each: each.name)
def test_every_mistake_of_calls(mistake, shown):
    outcome = call_mistakes.hunt(mistake, shown)
    assert outcome.right, outcome


def test_a_correct_engine_is_given_no_cause():
    for kind in call_mistakes.SHOWN:
        for calls in ((14, 1, 1, 1, 4, 3), (1,) * 12):
            outcome = call_mistakes.hunt(call_mistakes.Mistake("none", (), calls=calls, model=str(CASE)), kind)
            assert outcome.first is None
            assert not outcome.causes


def test_default_tokens_are_enough_for_all_runs():
    m = model(CASE)
    assert {each.name for each in plan(m.config, default_tokens(m))} == set(RUNS)
