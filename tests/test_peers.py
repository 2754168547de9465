"""scripts/benchmarks/models.py --versus: the same shape in other programs."""

import json
import sys
from dataclasses import replace
from importlib.util import find_spec

import ml_dtypes
import numpy as np
import pytest
from bench_runs import TINY
from benchmark_scripts import models, peers
from click.testing import CliRunner

import bitnet_ref
from bitnet_ref.benchmark.synthetic import SHAPES
from bitnet_ref.errors import BackendError, BackendUnavailable, ConfigError


def use_script(monkeypatch, folder, text):
    """Let this text run in the peer's process."""
    (folder / "peer.py").write_text(text)
    monkeypatch.setattr(peers, "SCRIPT", folder / "peer.py")


def test_a_peer_is_asked_for_the_same_shape(tmp_path, monkeypatch):
    times = {"version": "1", "prompt_s": [1], "decode_s": [1], "peak_memory_bytes": 7}
    use_script(monkeypatch, tmp_path, f"import sys, json; print(json.dumps({{**{times}, 'weights': sys.argv[2]}}))")
    monkeypatch.setitem(peers.PEERS, "echo", peers.Peer("pip install it"))
    asked = json.loads(peers.measure_peer("echo", TINY).weights)["config"]
    assert (asked["hidden_size"], asked["num_key_value_heads"], asked["hidden_act"]) == (16, 2, "relu2")
    assert asked["tie_word_embeddings"] is True
    assert "sliding_window" not in asked
    windowed = replace(TINY, model_type="mistral", sub_norms=False, quantization=None, sliding_window=4)
    assert json.loads(peers.measure_peer("echo", windowed).weights)["config"]["sliding_window"] == 4
    with pytest.raises(BackendError, match="mlp_bias: no bitnet model of transformers has True"):
        peers.measure_peer("echo", replace(TINY, mlp_bias=True))


@pytest.mark.thorough
@pytest.mark.skipif(find_spec("transformers") is not None, reason="transformers is installed")
def test_a_peer_that_is_not_installed_costs_one_line():
    with pytest.raises(BackendUnavailable, match="pip install torch transformers"):
        peers.measure_peer("transformers", TINY, 3, 2)
    arguments = ["--prompt", "3", "--new", "2", "--versus", "transformers"]
    done = CliRunner().invoke(models.main, arguments)
    assert done.exit_code == 0
    assert "versus transformers" in done.output
    assert "pip install torch transformers" in " ".join(done.output.split())
    told = json.loads(CliRunner().invoke(models.main, [*arguments, "--json"]).output)
    assert "pip install" in told["versus"]["transformers"]


def test_a_file_of_random_weights_is_a_model(tmp_path):
    """What llama.cpp is given, read by our own reader: the shape, each plane drawn apart, and the gate that it has."""
    config = replace(TINY, hidden_size=256, intermediate_size=512, num_attention_heads=4, head_dim=64)
    peers.write_random_gguf(config, path := tmp_path / "model.gguf")
    model = bitnet_ref.load(path, backend="numpy")
    assert model.config.linear_shapes() == config.linear_shapes()
    assert (model.config.num_hidden_layers, model.config.activation) == (config.num_hidden_layers, "silu")
    planes = [w.ternary() for _, w in model.weights.layers[0].linears()]
    assert not np.array_equal(planes[0], planes[3])
    assert 0.25 < np.mean(planes[0] == 0) < 0.42
    assert np.isfinite(model.logits([1, 2, 3])).all()


def test_a_file_for_bitnet_cpp_keeps_relu2_and_a_dense_one_is_bfloat16(tmp_path):
    small = replace(TINY, hidden_size=128, intermediate_size=256, num_attention_heads=2, head_dim=64)
    peers.write_random_gguf(small, path := tmp_path / "ternary.gguf", "i2_s")
    assert bitnet_ref.load(path, backend="numpy").config.activation == "relu2"
    dense = replace(SHAPES["tinyllama-1.1b"], num_hidden_layers=1, vocab_size=64, intermediate_size=512)
    peers.write_random_gguf(dense, path := tmp_path / "dense.gguf", "bf16")
    model = bitnet_ref.load(path, backend="numpy")
    assert (model.config.quantization, model.weights.layers[0].q_proj.array.dtype) == (None, ml_dtypes.bfloat16)
    with pytest.raises(ConfigError, match="ternary by groups"):
        peers.write_random_gguf(SHAPES["bonsai-1.7b"], tmp_path / "groups.gguf", "bf16")


def test_a_dense_gguf_is_given_as_it_is(tmp_path, monkeypatch):
    times = {"version": "1", "prompt_s": [1], "decode_s": [1], "peak_memory_bytes": 7}
    use_script(
        monkeypatch, tmp_path, f"import sys, json; print(json.dumps({{**{times}, 'weights': json.loads(sys.argv[2])}}))"
    )
    monkeypatch.setattr(peers, "write_random_gguf", pytest.fail)
    monkeypatch.setitem(peers.PEERS, "echo", peers.Peer("pip install it", gguf="i2_s", quantize="IQ2_BN"))
    dense = replace(SHAPES["tinyllama-1.1b"], num_hidden_layers=1, vocab_size=64, intermediate_size=512)
    asked = peers.measure_peer("echo", dense, file=tmp_path / "dense.gguf").weights
    assert (asked["file"], asked.get("quantize")) == (str(tmp_path / "dense.gguf"), None)
    monkeypatch.setattr(peers, "write_random_gguf", lambda config, path, kind: None)
    assert peers.measure_peer("echo", TINY).weights["quantize"] == "IQ2_BN"


def test_a_shape_that_a_peer_cannot_hold_costs_one_line(tmp_path, monkeypatch):
    use_script(monkeypatch, tmp_path, "print('{}')")
    monkeypatch.setitem(peers.PEERS, "blocks", peers.Peer("pip install it", gguf="tq2_0"))
    with pytest.raises(BackendError, match="blocks of 256 inputs"):
        peers.measure_peer("blocks", TINY, 3, 2)


@pytest.mark.skipif(find_spec("llama_cpp") is not None, reason="llama-cpp-python is installed")
def test_llama_cpp_that_is_not_installed_writes_no_file(monkeypatch):
    monkeypatch.setattr(peers, "write_random_gguf", pytest.fail)
    with pytest.raises(BackendUnavailable, match="pip install llama-cpp-python"):
        peers.measure_peer("llama-cpp-python", TINY, 3, 2)


@pytest.mark.skipif(find_spec("llama_cpp") is None, reason="needs llama-cpp-python")
def test_llama_cpp_is_measured():
    config = replace(TINY, hidden_size=256, intermediate_size=512, num_attention_heads=4, head_dim=64)
    found = peers.measure_peer("llama-cpp-python", config, 5, 3)
    assert found.prompt_tokens_per_s > 0
    assert found.decode.repetitions == 3


@pytest.mark.skipif(find_spec("ik_llama_cpp") is None, reason="needs ik-llama-cpp-python")
@pytest.mark.parametrize(("kind", "repack"), [("i2_s", False), ("i2_s", True), ("iq2_bn", True)])
def test_ik_llama_cpp_computes_the_same_model(tmp_path, kind, repack):
    """Its logits of IQ2_BN, which we write or it makes of our I2_S. It rounds in blocks, and attends in float16."""
    config = replace(TINY, hidden_size=512, intermediate_size=1024, num_attention_heads=8, head_dim=64)
    peers.write_random_gguf(config, path := tmp_path / "model.gguf", kind)
    asked = {"config": {"vocab_size": config.vocab_size}, "prompt": 5, "new": 3, "threads": 1, "repeats": 1}
    asked |= {"file": str(path), "repack": repack, "logits": True}
    asked |= {"quantize": "IQ2_BN"} if kind == "i2_s" else {}
    answer = peers.ask_peer("ik-llama-cpp-python", sys.executable, asked, 60)
    assert "IQ2_BN" in answer["weights"]
    assert len(answer["decode_s"]) == 3
    right = bitnet_ref.load(path, backend="numpy").logits(answer["tokens"])[-1]
    assert np.linalg.norm(answer["logits"] - right) < 0.1 * np.linalg.norm(right)


@pytest.mark.skipif(find_spec("transformers") is None or find_spec("torch") is None, reason="needs transformers")
@pytest.mark.parametrize(("quantized", "weights"), [(False, "dense bfloat16"), (True, "BitLinear, packed uint8")])
def test_transformers_is_measured(quantized, weights, monkeypatch):
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")  # compiling takes half a minute
    found = peers.measure_peer("transformers", TINY, 5, 3, quantized=quantized)
    assert found.weights == weights
    assert found.prompt_tokens_per_s > 0
    assert found.decode.repetitions == 3
    assert found.peak_memory_bytes > 0
    json.dumps(found.to_dict())


def test_a_peer_is_told_the_device_only_where_it_has_a_choice(tmp_path, monkeypatch):
    times = {"version": "1", "prompt_s": [1], "decode_s": [1], "peak_memory_bytes": 7}
    echo = f"import json, sys; print(json.dumps({{**{times}, 'weights': json.loads(sys.argv[2])}}))"
    use_script(monkeypatch, tmp_path, echo)
    for name, chooses in (("fixed", False), ("free", True)):
        monkeypatch.setitem(peers.PEERS, name, peers.Peer("pip install it", chooses=chooses))
    asked = peers.measure_peer("free", TINY, device="cuda", quantized=True).weights
    assert (asked["device"], asked["quantized"]) == ("cuda", True)
    assert "device" not in peers.measure_peer("fixed", TINY).weights
    with pytest.raises(BackendError, match="for transformers"):
        peers.measure_peer("fixed", TINY, device="cuda")


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("raise SystemExit('too little memory')", "too little memory"),
        (r"raise SystemExit('GGML_ASSERT(k >= 512) failed\n1 main()')", "GGML_ASSERT"),
        ("print('no JSON')", "JSONDecodeError"),
        ("", "IndexError"),
    ],
)
def test_a_peer_that_fails_says_why(script, why, tmp_path, monkeypatch):
    use_script(monkeypatch, tmp_path, script)
    monkeypatch.setitem(peers.PEERS, "broken", peers.Peer("pip install it"))
    with pytest.raises(BackendError, match=why):
        peers.measure_peer("broken", TINY, 3, 2)


def test_what_a_peer_prints_becomes_its_speeds(tmp_path, monkeypatch):
    """The ratio of times that a script gives; a Python that is not there is named."""
    times = {"version": "1", "weights": "w", "prompt_s": [2, 1], "decode_s": [0.5, 0.25, 1], "peak_memory_bytes": 7}
    use_script(monkeypatch, tmp_path, f"print('loading'); print({json.dumps(times)!r})")
    monkeypatch.setitem(peers.PEERS, "fixed", peers.Peer("pip install it"))
    found = peers.measure_peer("fixed", TINY, 10, 3, threads=2, python=sys.executable)
    assert (found.prompt_tokens_per_s, found.decode_tokens_per_s, found.decode.median_s) == (10, 4, 0.5)
    with pytest.raises(BackendError, match="no-such-python"):
        peers.measure_peer("fixed", TINY, python="no-such-python")
