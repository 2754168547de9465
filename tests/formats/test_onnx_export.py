"""Exported models, computed by onnxruntime, against the NumPy backend and the storyteller's expected texts."""

import builtins
import json

import ml_dtypes
import numpy as np
import onnx
import onnxruntime
import pytest
from helpers import DATA, GOLDEN, GOLDEN_CASES, TINY, golden, model, tiny_tensors, write_checkpoint
from safetensors.numpy import load_file

import bitnet_ref
from bitnet_ref.errors import BackendUnavailable
from bitnet_ref.families import config_to_dict
from bitnet_ref.formats.onnx.export import export_onnx
from bitnet_ref.formats.open import find_model, open_checkpoint

# The same float32 roundings in the same places; dense products and float64 sums in another order. A logit of 50 has a
# step of 4e-6. One int8 that went the other way would show as 0.01 and more.
TOLERANCE = 5e-5
EXPECTED = json.loads((DATA / "storyteller" / "expected.json").read_text())


def session(path, optimised=True):
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    if not optimised:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def export(source, path, **options):
    """The model at `source` (the shipped one: "storyteller") as `path`; the files."""
    with open_checkpoint(find_model(source)) as checkpoint:
        return export_onnx(path, checkpoint, **options)


def exported(source, folder, optimised=True):
    export(source, folder / "model.onnx")
    return session(folder / "model.onnx", optimised)


def step(s, cfg, ids, past=None, mask=None, positions=None):
    """ids (B, S) -> logits (B, S, V), the new past"""
    ids = np.asarray(ids, dtype=np.int64)
    if past is None:
        past = [np.zeros((len(ids), cfg.num_key_value_heads, 0, cfg.head_dim), np.float32)] * 2 * cfg.num_hidden_layers
    length = past[0].shape[2]
    total = length + ids.shape[1]
    names = [f"past_key_values.{i}.{part}" for i in range(cfg.num_hidden_layers) for part in ("key", "value")]
    feeds = dict(zip(names, past, strict=True))
    feeds["input_ids"] = ids
    feeds["attention_mask"] = np.ones((len(ids), total), np.int64) if mask is None else mask
    every = np.broadcast_to(np.arange(length, total), ids.shape)
    feeds["position_ids"] = every if positions is None else positions
    assert {i.name for i in s.get_inputs()} == set(feeds)
    logits, *present = s.run(None, feeds)
    return logits, present


@pytest.mark.sample(6)
@pytest.mark.parametrize("case", GOLDEN_CASES)
def test_golden_logits(case, tmp_path):
    m, tokens = model(GOLDEN / case), golden(case)["tokens"]
    s = exported(GOLDEN / case, tmp_path)
    expected = m.logits(tokens)
    logits, _ = step(s, m.config, [tokens])
    np.testing.assert_allclose(logits[0], expected, rtol=0, atol=TOLERANCE)
    first, past = step(s, m.config, [tokens[:5]])  # a prompt, then token by token
    rows = [first[0]]
    for token in tokens[5:]:
        row, past = step(s, m.config, [[token]], past)
        rows.append(row[0])
    np.testing.assert_allclose(np.concatenate(rows), expected, rtol=0, atol=TOLERANCE)


def test_without_onnxruntimes_optimisations(tmp_path):
    """The graph is right as it stands, not thanks to a rewrite."""
    case = "bitnet-packed-offline"
    m, tokens = model(GOLDEN / case), golden(case)["tokens"]
    logits, _ = step(exported(GOLDEN / case, tmp_path, optimised=False), m.config, [tokens])
    np.testing.assert_allclose(logits[0], m.logits(tokens), rtol=0, atol=TOLERANCE)


@pytest.fixture(scope="module")
def storyteller(tmp_path_factory):
    return exported("storyteller", tmp_path_factory.mktemp("storyteller"))


def test_storyteller_logits(storyteller):
    """53 tokens without a single int8 that rounds the other way: the difference stays that of float32."""
    m, tokens = model("storyteller"), load_file(DATA / "storyteller" / "golden.safetensors")["tokens"]
    logits, _ = step(storyteller, m.config, [tokens])
    np.testing.assert_allclose(logits[0], m.logits(tokens), rtol=0, atol=TOLERANCE)


@pytest.mark.thorough
@pytest.mark.parametrize("case", EXPECTED["cases"], ids=lambda case: case["prompt"][:20])
def test_storyteller_greedy_text(case, storyteller):
    cfg = model("storyteller").config
    logits, past = step(storyteller, cfg, [case["prompt_ids"]])
    ids = [int(logits[0, -1].argmax())]
    while len(ids) < len(case["token_ids"]):
        logits, past = step(storyteller, cfg, [ids[-1:]], past)
        ids.append(int(logits[0, -1].argmax()))
    assert ids == case["token_ids"]


def test_a_padded_row_equals_the_row_alone(storyteller):
    """Padding on the left, as generation pads: masked, and positions count from the first real token."""
    cfg = model("storyteller").config
    short, *_, long = sorted((case["prompt_ids"] for case in EXPECTED["cases"]), key=len)
    pad = len(long) - len(short)
    assert pad > 2
    mask = np.ones((2, len(long)), np.int64)
    mask[1, :pad] = 0
    positions = np.maximum(mask.cumsum(1) - 1, 0)
    both, past = step(storyteller, cfg, [long, [0] * pad + short], mask=mask, positions=positions)
    assert np.isfinite(both).all()
    alone, past_alone = step(storyteller, cfg, [short])
    np.testing.assert_allclose(both[1, pad:], alone[0], rtol=0, atol=TOLERANCE)
    longer = np.concatenate([mask, np.ones((2, 1), np.int64)], axis=1)
    both, _ = step(storyteller, cfg, [[7], [7]], past, longer, mask.sum(1)[:, None])
    alone, _ = step(storyteller, cfg, [[7]], past_alone)
    np.testing.assert_allclose(both[1], alone[0], rtol=0, atol=TOLERANCE)


def test_dynamic_rope_beyond_its_trained_context(tmp_path):
    config = {**TINY, "max_position_embeddings": 8, "rope_scaling": {"type": "dynamic", "factor": 4.0}}
    m = model(write_checkpoint(tmp_path / "hf", config))
    tokens = [i % 40 for i in range(24)]
    logits, _ = step(exported(tmp_path / "hf", tmp_path), m.config, [tokens])
    np.testing.assert_allclose(logits[0], m.logits(tokens), rtol=0, atol=TOLERANCE)


def test_widths_that_are_no_multiple_of_four(tmp_path):
    """The last byte of a packed row is padding there."""
    config = {**TINY, "hidden_size": 18, "intermediate_size": 23, "num_attention_heads": 3, "num_key_value_heads": 1}
    m = model(write_checkpoint(tmp_path / "hf", {**config, "weight_bits": 1, "input_bits": 8}, one_bit_llm(config)))
    logits, _ = step(exported(tmp_path / "hf", tmp_path), m.config, [[1, 2, 3]])
    np.testing.assert_allclose(logits[0], m.logits([1, 2, 3]), rtol=0, atol=TOLERANCE)


def one_bit_llm(config):
    tensors = tiny_tensors(config, np.float16)
    for i in range(2):
        tensors[f"model.layers.{i}.self_attn.inner_attn_ln.weight"] = np.ones(config["hidden_size"], np.float16)
        tensors[f"model.layers.{i}.mlp.ffn_layernorm.weight"] = np.ones(config["intermediate_size"], np.float16)
    return tensors


# -- the files ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("external_bytes", [1024, 0])
def test_the_checker_accepts_it_and_bytes_repeat(external_bytes, tmp_path):
    files = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        path = tmp_path / name / "model.onnx"
        files.append(export(GOLDEN / "bitnet-packed-offline", path, external_bytes=external_bytes))
        onnx.checker.check_model(str(path), full_check=True)
        assert sorted((tmp_path / name).iterdir()) == sorted(files[-1])
    assert [file.name for file in files[0]] == ["model.onnx", "model.onnx.data"]
    assert [file.read_bytes() for file in files[0]] == [file.read_bytes() for file in files[1]]


def test_the_smallest_tensor_beside_the_model(tmp_path):
    """The packed matrices of one size, at the limit and one byte above it."""
    packed = model(GOLDEN / "bitnet-packed-offline").weights.layers[0].q_proj.packed
    for limit, is_beside in ((packed.nbytes, True), (packed.nbytes + 1, False)):
        export(GOLDEN / "bitnet-packed-offline", tmp_path / "m.onnx", external_bytes=limit)
        graph = onnx.load(tmp_path / "m.onnx", load_external_data=False).graph
        tensors = {tensor.name: tensor for tensor in graph.initializer}
        assert bool(tensors["model.layers.0.self_attn.q_proj.weight_packed"].external_data) == is_beside


def test_progress_counts_every_part(tmp_path):
    calls = []
    export(GOLDEN / "bitnet-packed-offline", tmp_path / "m.onnx", progress=lambda *call: calls.append(call))
    total = calls[0][1]
    assert calls == [(done, total) for done in range(calls[0][0], total + 1)]


def test_what_is_in_the_file(tmp_path):
    m = model(GOLDEN / "bitnet-packed-offline")
    export(GOLDEN / "bitnet-packed-offline", tmp_path / "m.onnx")
    proto = onnx.load(tmp_path / "m.onnx", load_external_data=False)
    tensors = {tensor.name: tensor for tensor in proto.graph.initializer}
    assert len(tensors) == len(proto.graph.initializer)
    q_proj = m.weights.layers[0].q_proj
    packed = tensors["model.layers.0.self_attn.q_proj.weight_packed"]
    assert (packed.data_type, list(packed.dims)) == (onnx.TensorProto.UINT8, list(q_proj.packed.shape))
    assert tensors["model.embed_tokens.weight"].data_type == onnx.TensorProto.BFLOAT16
    assert m.weights.tied
    assert "lm_head.weight" not in tensors  # stored once
    place = {entry.key: entry.value for entry in packed.external_data}
    data = (tmp_path / "m.onnx.data").read_bytes()
    begin = int(place["offset"])
    assert (place["location"], begin % 4096) == ("m.onnx.data", 0)
    assert data[begin : begin + int(place["length"])] == q_proj.packed.tobytes()
    metadata = {entry.key: entry.value for entry in proto.metadata_props}
    assert json.loads(metadata["bitnet_ref.config"]) == json.loads(json.dumps(config_to_dict(m.config)))
    assert bitnet_ref.__version__ not in str(metadata)


def test_an_interrupt_leaves_the_old_files(tmp_path, monkeypatch):
    files = export(GOLDEN / "bitnet-packed-offline", tmp_path / "m.onnx")
    before = [file.read_bytes() for file in files]
    monkeypatch.setattr("json.dumps", lambda *_, **__: 1 / 0)  # after the data, before the model
    with pytest.raises(ZeroDivisionError):
        export(GOLDEN / "bitnet-bf16-online", tmp_path / "m.onnx")
    assert [file.read_bytes() for file in files] == before
    assert sorted(tmp_path.iterdir()) == sorted(files)


def test_without_the_package(tmp_path, monkeypatch):
    real = builtins.__import__

    def missing(name, *args, **kwargs):
        if name == "onnx":
            raise ImportError("No module named 'onnx'")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(BackendUnavailable, match=r"pip install 'bitnet-ref\[onnx\]'") as caught:
        export(GOLDEN / "bitnet-packed-offline", tmp_path / "m.onnx")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16, np.float32])
def test_dense_weights_keep_their_dtype(dtype, tmp_path):
    m = model(write_checkpoint(tmp_path / "hf", TINY, tiny_tensors(TINY, dtype)))
    export(tmp_path / "hf", tmp_path / "m.onnx")
    proto = onnx.load(tmp_path / "m.onnx")
    tensor = next(t for t in proto.graph.initializer if t.name == "model.layers.1.mlp.up_proj.weight")
    assert tensor.raw_data == m.weights.layers[1].up_proj.array.tobytes()
    names = {ml_dtypes.bfloat16: "BFLOAT16", np.float16: "FLOAT16", np.float32: "FLOAT"}
    assert onnx.TensorProto.DataType.Name(tensor.data_type) == names[dtype]
