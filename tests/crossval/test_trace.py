"""Trace files: a run streamed to a file and read again, and files that are no traces."""

import contextlib
import json

import numpy as np
import pytest
from helpers import (
    BITNET,
    GOLDEN,
    model,
    raw_safetensors,
    run_python,
    safetensors_bytes,
    tiny_tensors,
    write_checkpoint,
)
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import save_file

import bitnet_ref
from bitnet_ref.crossval.compare import compare
from bitnet_ref.crossval.names import LOGITS
from bitnet_ref.crossval.trace import (
    Trace,
    TraceWriter,
    record_to_file,
    trace_metadata,
    write_trace,
)
from bitnet_ref.errors import FormatError, GenerationError, NumericsError
from bitnet_ref.formats.hashes import config_hash, weight_hash
from bitnet_ref.formats.safetensors import DTYPES

pytestmark = pytest.mark.quick_emulated

TOKENS = [1, 17, 5, 23, 9]
CASE = GOLDEN / "bitnet-packed-offline"


def test_a_recorded_file_is_the_run(tmp_path, backend_name):
    m = model(CASE, backend_name)
    path = tmp_path / "run.safetensors"
    logits = record_to_file(m, TOKENS, path, prompt="a prompt")
    right, seen = m.run_with_cache(TOKENS)
    np.testing.assert_array_equal(logits, right)
    with Trace(path) as trace:
        assert list(trace) == list(seen)
        assert len(trace) == len(seen)
        for name, array in seen.items():
            assert trace[name].dtype == array.dtype
            assert trace.tensor(name).shape == array.shape
            np.testing.assert_array_equal(trace[name], array)
        name = "blocks.1.mlp.hook_post"
        np.testing.assert_array_equal(trace.tensor(name)[2:4], seen[name][2:4])
        assert trace.tensor(name)[2:2].shape == (0, *seen[name].shape[1:])
        assert trace.token_ids == TOKENS
        assert (trace.prompt, trace.engine, trace.engine_dtype) == ("a prompt", f"bitnet_ref {backend_name}", "float32")
        assert trace.own_engine
        assert trace.carries_inputs
        assert trace.metadata["config_hash"] == config_hash(m.config)
        assert trace.metadata["weight_hash"] == weight_hash(model(CASE).weights)
        assert compare(trace, trace, m.config).agrees
        assert compare(seen, trace, m.config, TOKENS).agrees
    with safe_open(path, framework="np") as theirs:  # the format's own reader
        assert set(theirs.keys()) == set(seen)
        np.testing.assert_array_equal(theirs.get_tensor(name), seen[name])


def test_an_engine_in_float64(tmp_path):
    """Its tensors are stored as they are, and judged as float32."""
    tensors = bitnet_ref.load(CASE, backend="numpy", dtype="float64").run_with_cache(TOKENS)[1]
    metadata = trace_metadata(TOKENS, engine="x", engine_dtype="float64")
    save_file({name: np.ascontiguousarray(array) for name, array in tensors.items()}, tmp_path / "x", metadata)
    right = model(CASE).run_with_cache(TOKENS)[1]
    with Trace(tmp_path / "x") as trace:
        assert trace[LOGITS].dtype == np.float64
        assert compare(right, trace, model(CASE).config, TOKENS).agrees
        wrong = {name: trace[name] for name in trace} | {LOGITS: trace[LOGITS] * 1.001}
        assert not compare(right, wrong, model(CASE).config, TOKENS, own_engine=False).agrees


def test_names_choose(tmp_path):
    path = tmp_path / "run.safetensors"
    record_to_file(model(CASE), TOKENS, path, names=["*.hook_resid_post", "hook_embed"])
    with Trace(path) as trace:
        assert list(trace) == ["hook_embed", "blocks.0.hook_resid_post", "blocks.1.hook_resid_post"]
        assert not trace.carries_inputs


def test_a_long_name_of_an_engine_is_cut(tmp_path):
    path = tmp_path / "run.safetensors"
    write_trace(path, {"x": np.zeros(1, np.float32)}, [1], engine="name" * 1000)
    with Trace(path) as trace:
        assert trace.engine == "name" * 25


def test_space_for_the_header_is_reserved(tmp_path):
    path = tmp_path / "many.safetensors"
    arrays = {f"tensor \N{SNOWMAN} {i}": np.full((1,) * (i % 8) + (i,), i, dtype=np.float32) for i in range(50)}
    metadata = trace_metadata([1], engine="test", prompt="\N{SNOWMAN}" * 100)
    writer = TraceWriter(path, metadata, list(arrays))
    for name, array in arrays.items():
        writer.add(name, array)
    writer.close()
    with Trace(path) as trace:
        assert list(trace) == list(arrays)
        for name, array in arrays.items():
            np.testing.assert_array_equal(trace[name], array)
    writer = TraceWriter(path, metadata, ["tensor"])
    for name, array in arrays.items():
        writer.add(name, array)
    with pytest.raises(FormatError, match="more tensors or axes"):
        writer.close()


def test_float64_is_written_as_float32_and_odd_dtypes_are_refused(tmp_path):
    write_trace(tmp_path / "a", {"x": np.array([0.1])}, [1], engine="e")
    with Trace(tmp_path / "a") as trace:
        assert trace["x"] == np.float32(0.1)
    with pytest.raises(FormatError, match="cannot hold complex"):
        write_trace(tmp_path / "b", {"x": np.array([1j])}, [1], engine="e")
    assert not (tmp_path / "b").exists()


def test_arrays_that_are_not_in_one_piece_and_all_dtypes_are_written_as_they_are(tmp_path):
    square = np.arange(12, dtype=np.float32).reshape(3, 4)
    arrays = {"x": square[:, ::2], "y": square.T, "z": np.float32(2.5), "empty": np.zeros((0, 3), np.int32)}
    arrays |= {name: np.ones(3, dtype) for name, dtype in DTYPES.items()}
    write_trace(tmp_path / "a", arrays, [1, 5], engine="e", prompt="Once")
    with Trace(tmp_path / "a") as trace:
        assert trace.keys() == arrays.keys()
        assert (trace.token_ids, trace.engine, trace.prompt) == ([1, 5], "e", "Once")
        for name, array in arrays.items():
            assert trace[name].shape == array.shape
            assert trace[name].dtype == (np.float32 if array.dtype == np.float64 else array.dtype)
            np.testing.assert_array_equal(trace[name], array)


def test_a_run_that_fails_leaves_no_file(tmp_path):
    tensors = tiny_tensors(BITNET, np.float32)
    tensors["model.norm.weight"][:] = 3e38
    bad = bitnet_ref.load(write_checkpoint(tmp_path / "m", BITNET, tensors), backend="numpy")
    with pytest.raises(NumericsError):
        record_to_file(bad, TOKENS, tmp_path / "run")
    with pytest.raises(GenerationError):
        record_to_file(bad, [], tmp_path / "run")
    assert [entry.name for entry in tmp_path.iterdir()] == ["m"]


def test_the_weight_hash_is_of_the_values(tmp_path):
    """The same whatever the layout; another for another weight, scale or norm."""
    assert weight_hash(model(CASE, "numpy").weights) == weight_hash(bitnet_ref.load(CASE, backend="auto").weights)
    hashes = set()
    for name in (None, "model.norm.weight", "model.layers.1.self_attn.v_proj.weight_scale"):
        tensors = tiny_tensors(BITNET)
        if name is not None:
            tensors[name] = tensors[name] * 2
        hashes.add(weight_hash(bitnet_ref.load(write_checkpoint(tmp_path / str(name), BITNET, tensors)).weights))
    assert len(hashes) == 3


# -- files that are no traces ------------------------------------------------------------------------------------------

GOOD = trace_metadata([1, 2], engine="e")
BAD_METADATA = {
    "none": ({}, "format"),
    "another format": ({**GOOD, "format": "pt"}, "format"),
    "another version": ({**GOOD, "version": "2"}, "version"),
    "no tokens": ({key: value for key, value in GOOD.items() if key != "token_ids"}, "token_ids"),
    "empty tokens": ({**GOOD, "token_ids": "[]"}, "token_ids"),
    "tokens no list": ({**GOOD, "token_ids": "{}"}, "token_ids"),
    "tokens no JSON": ({**GOOD, "token_ids": "1, 2"}, "token_ids"),
    "token negative": ({**GOOD, "token_ids": "[1, -2]"}, "token_ids"),
    "token true": ({**GOOD, "token_ids": "[true]"}, "token_ids"),
    "token huge": ({**GOOD, "token_ids": "[99999999999999999999]"}, "token_ids"),
    "token of many digits": ({**GOOD, "token_ids": "[" + "9" * 5000 + "]"}, "token_ids"),
    "nested tokens": ({**GOOD, "token_ids": "[" * 100_000}, "token_ids"),
    "dtype": ({**GOOD, "engine_dtype": "int4"}, "engine_dtype"),
}


@pytest.mark.parametrize("case", BAD_METADATA)
def test_bad_metadata(case, tmp_path):
    metadata, field = BAD_METADATA[case]
    path = tmp_path / "t"
    path.write_bytes(raw_safetensors({"__metadata__": metadata}))
    with pytest.raises(FormatError) as caught:
        Trace(path)
    assert caught.value.field == f"__metadata__.{field}"
    assert caught.value.path == str(path)


def test_a_checkpoint_is_no_trace(tmp_path):
    (tmp_path / "t").write_bytes(safetensors_bytes({"x": np.zeros(3, dtype=np.float32)}))
    with pytest.raises(FormatError, match="not a trace"):
        Trace(tmp_path / "t")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    path = tmp_path_factory.mktemp("trace") / "whole"
    record_to_file(model(CASE), TOKENS[:2], path, names=["hook_embed", "blocks.0.attn.q_proj.*", "lm_head.hook_out"])
    return path.read_bytes()


@given(data=st.data())
def test_damaged_traces_are_refused_or_read(whole, tmp_path, data):
    """Cut short, or with bytes changed: FormatError, or a trace whose tensors are what their shape says."""
    length = data.draw(st.integers(0, len(whole)))
    damaged = bytearray(whole[:length])
    header = min(length, 400)
    for _ in range(data.draw(st.integers(0, 3)) if header else 0):
        damaged[data.draw(st.integers(0, header - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path / "t"
    path.write_bytes(damaged)
    with contextlib.suppress(FormatError), Trace(path) as trace:
        for name in trace:
            assert trace[name].shape == trace.tensor(name).shape
        compare(trace, trace, model(CASE).config)


@pytest.mark.parametrize("length", [0, 7, 8, 100, 1000, -1])
def test_truncated_traces_name_the_file(whole, tmp_path, length):
    path = tmp_path / "t"
    path.write_bytes(whole[:length])
    with pytest.raises(FormatError) as caught:
        Trace(path)
    assert caught.value.path == str(path)


def test_a_file_that_shrinks_while_open(tmp_path, whole):
    path = tmp_path / "t"
    path.write_bytes(whole)
    with Trace(path) as trace:
        path.write_bytes(whole[:-100])
        with pytest.raises(FormatError, match="the file ends"):
            _ = trace["lm_head.hook_out"]
        with pytest.raises(FormatError, match="the file ends"):
            trace.tensor("lm_head.hook_out")[1:2]


# -- memory ------------------------------------------------------------------------------------------------------------

WIDE = """
import json, sys, threading, time
import numpy as np
from dataclasses import replace
from bitnet_ref.backends import choose_backend
from bitnet_ref.benchmark.synthetic import SHAPES, synthetic_model
from bitnet_ref.system.memory import peak_memory_bytes
from bitnet_ref.crossval.compare import compare
from bitnet_ref.crossval.trace import Trace, record_to_file

config = replace(SHAPES["2b-4t"], vocab_size=512, num_hidden_layers=int(sys.argv[2]))
model = synthetic_model(config, choose_backend("auto"), layers=config.num_hidden_layers)
tokens = list(range(1, 97))
model.logits(tokens)
before = peak_memory_bytes()
for name in "ab":
    record_to_file(model, tokens, sys.argv[1] + name)
recorded = peak_memory_bytes()
with Trace(sys.argv[1] + "a") as a, Trace(sys.argv[1] + "b") as b:
    found = compare(a, b, config)
    size = sum(a[n].nbytes for n in a)
print(json.dumps([size, recorded - before, peak_memory_bytes() - recorded, found.agrees, len(found.ops)]))
"""


@pytest.mark.thorough
def test_recording_and_comparing_stream(tmp_path):
    """Layers of 2B-4T's shape: a trace of 120 MB is written and compared in memory for a few tensors."""
    size, recording, comparing, agrees, tensors = run_python(WIDE, tmp_path / "trace", "2")
    assert agrees
    assert tensors == 2 * 52 + 4
    assert size > 80e6
    assert recording < size / 3
    assert comparing < size / 2
    assert json.dumps([recording, comparing])
