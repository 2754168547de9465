"""The ternary families of 2026 against transformers, against themselves on every path, and against plain formulas."""

import json
import shutil
from contextlib import suppress
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
from helpers import BITNET, DATA, TINY, divide_experts, model, random_blocks, rng, tiny_tensors, write_checkpoint
from safetensors.numpy import load_file, save_file

import bitnet_ref
from bitnet_ref import families
from bitnet_ref.backends import choose_backend
from bitnet_ref.crossval.compare import compare
from bitnet_ref.crossval.explain.diagnose import diagnose
from bitnet_ref.crossval.explain.hypotheses import forward_hypotheses
from bitnet_ref.crossval.explain.variants import Setting
from bitnet_ref.crossval.paths import check_paths
from bitnet_ref.crossval.teacher import teacher_forced
from bitnet_ref.errors import BackendUnavailable, ConfigError, ConfigWarning, FormatError, NumericsError, ShapeError
from bitnet_ref.families import config_from_dict, config_to_dict, differences_from_llama, family_of
from bitnet_ref.families.block_rule import by_rule
from bitnet_ref.families.family import widest_window
from bitnet_ref.families.groups import GroupTernaryWeight, group_matmul, split_groups
from bitnet_ref.families.moe import Experts, MoeLayer, choose_experts, chosen_ids
from bitnet_ref.families.qwen3_5 import DeltaInputs, delta_recurrence
from bitnet_ref.formats.checkpoint import part_count, parts
from bitnet_ref.formats.convert import convert
from bitnet_ref.formats.gguf.file import GgufFile
from bitnet_ref.formats.hf.config import parse_hf_config
from bitnet_ref.formats.hf.writer import hf_config_json
from bitnet_ref.formats.names import hf_modules
from bitnet_ref.formats.native.model import VERSION
from bitnet_ref.formats.open import open_checkpoint
from bitnet_ref.generation.embed import token_rows, tokens_after
from bitnet_ref.inspection import inspect_model
from bitnet_ref.reference.cache import TokenBatch
from bitnet_ref.reference.config import ModelConfig
from bitnet_ref.reference.layers import gated
from bitnet_ref.reference.ops import Ops
from bitnet_ref.reference.weights import DenseWeight, Norm

FAMILIES = DATA / "families"
BACKENDS = sorted(bitnet_ref.available_backends(), reverse=True)  # numpy, cython, cupy
CASES = sorted(folder.name for folder in FAMILIES.iterdir())
MIXTURES = ("maple", "mixtral-groups128", "qwen3_moe-groups128")
HYBRID = "qwen3_5-groups128-hybrid"
TOLERANCE = {"logits": 3e-4, "embedding": 2e-5}


def case_of(name, backend="numpy", dtype="float32"):
    if backend == "cupy" and ("gemma" in name or "qwen3_5" in name or name in (*MIXTURES, "granite")):
        pytest.skip("cupy refuses it: see test_cupy_refuses_by_name")
    return model(FAMILIES / name, backend, dtype=dtype), load_file(FAMILIES / name / "golden.safetensors")


@pytest.mark.sample(2)
@pytest.mark.parametrize("case", CASES)
def test_transformers(case, backend_name):
    m, expected = case_of(case, backend_name)
    tokens = expected["tokens"]
    logits, seen = m.run_with_cache(tokens, ["*.hook_resid_pre", "ln_final.hook_normalized"])
    np.testing.assert_array_equal(logits, m.logits(tokens))
    for i, hidden in enumerate(seen.values()):
        np.testing.assert_allclose(hidden, expected[f"hidden.{i}"], rtol=0, atol=TOLERANCE["logits"], err_msg=str(i))
    if "logits" in expected:
        np.testing.assert_allclose(logits, expected["logits"], rtol=0, atol=TOLERANCE["logits"])
    if "embedding" in expected:
        np.testing.assert_allclose(m.embed(tokens), expected["embedding"], rtol=0, atol=TOLERANCE["embedding"])


@pytest.mark.sample(3)
@pytest.mark.parametrize("case", CASES)
def test_float64(case):
    m, expected = case_of(case, dtype="float64")
    if "logits64" in expected:
        np.testing.assert_allclose(m.logits(expected["tokens"]), expected["logits64"], rtol=0, atol=3e-4)
    else:
        np.testing.assert_allclose(m.embed(expected["tokens"]), expected["embedding64"], rtol=0, atol=2e-5)


@pytest.mark.parametrize("case", CASES)
def test_parts_are_counted(case):
    """For the progress of loading and of conversions."""
    with open_checkpoint(FAMILIES / case) as checkpoint:
        assert part_count(checkpoint.config) == len(list(parts(checkpoint)))


def test_room_for_a_layer_unlike_the_first(tmp_path):
    message = r"blocks\.1\.mlp\.gate_proj: by the configuration it has \d+ x 128 weights, and all tensors have"
    with pytest.raises(FormatError, match=message):
        changed_case(tmp_path / "x", "qwen3_moe-groups128", intermediate_size=1 << 40)


@pytest.mark.sample(32)
@pytest.mark.parametrize("backend_name", BACKENDS, indirect=True)
@pytest.mark.parametrize("case", CASES)
def test_every_path(case, backend_name):
    reference, _ = case_of(case)
    case_of(case, backend_name)
    count = 5 if "groups" in case else 20  # NumPy's product of groups widens the whole matrix for each token
    tokens = rng(7).integers(0, reference.config.vocab_size, count).tolist()
    checks = list(check_paths(partial(choose_backend, backend_name, threads=2), reference, tokens))
    assert len(checks) > 12
    assert [(each.path, each.detail) for each in checks if not each.passed] == []


@pytest.mark.sample(3)
@pytest.mark.parametrize("case", CASES)
def test_each_op_on_the_references_inputs(case):
    (reference, golden), (candidate, _) = case_of(case), case_of(case, "cython")
    comparison = teacher_forced(reference, candidate, golden["tokens"])
    assert len(comparison.ops) > 15 * reference.config.num_hidden_layers
    assert {op.status for op in comparison.ops} == {"ok"}
    if "qk_norms" in differences_from_llama(reference.config):
        names = {op.name for op in comparison.ops}
        assert any(name.endswith("attn.q_norm.hook_normalized") for name in names)


@pytest.mark.sample(6)
@pytest.mark.parametrize("case", CASES)
def test_a_native_file_is_the_same_model(case, tmp_path):
    m, expected = case_of(case)
    path = tmp_path / "x.bitnet.safetensors"
    assert convert(FAMILIES / case, path, "native").exact
    again = bitnet_ref.load(path, backend="numpy")
    assert again.config == m.config
    assert again.weights.nbytes == m.weights.nbytes
    if "groups" in case:  # packed in the file too
        assert path.stat().st_size < (FAMILIES / case / "model.safetensors").stat().st_size / 3
        assert f"version {VERSION}" in inspect_model(path).format
    np.testing.assert_array_equal(again.logits(expected["tokens"]), m.logits(expected["tokens"]))
    with pytest.raises(ConfigError, match="convert to native"):
        convert(FAMILIES / case, tmp_path / "onnx", "onnx")


WRITTEN = ("hf-bf16", "hf-packed", "hf-unpacked", "gguf-f32", "gguf-i2_s", "gguf-q2_0", "gguf-pq2_0", "gguf-ptq1_0")


def written() -> list:
    """Every family in every format; the suite has a third of them, the rest is slow."""
    pairs = [(i + j, case, target) for i, case in enumerate(CASES) for j, target in enumerate(WRITTEN)]
    return [pytest.param(case, target, marks=pytest.mark.slow if n % 3 else ()) for n, case, target in pairs]


@pytest.mark.sample(9)
@pytest.mark.filterwarnings("ignore:.*taken as not rotated")
@pytest.mark.parametrize(("case", "target"), written())
def test_written_files_are_the_same_model(case, target, tmp_path):
    """Through the file, and from it through another format, back to a native one: equal logits."""
    m, expected = case_of(case)
    tokens, path = expected["tokens"], tmp_path / ("x.gguf" if "gguf" in target else "x")
    groups, dense = target[5:] in ("q2_0", "pq2_0", "ptq1_0"), m.config.quantization is None
    refused = (groups or target == "hf-unpacked") != dense and target not in ("hf-bf16", "hf-packed", "gguf-f32")
    by_rows = (case, target) == ("maple", "gguf-q2_0")  # rows of 64, as long as a block
    refused |= groups and "groups" not in case and not by_rows  # SmolLM3's matrices are not ternary
    refused |= "gguf" in target and case == "qwen3_moe-groups128"  # it has a layer without experts
    biased = target == "hf-packed" and m.config.attention_bias  # this case's are not exact when divided by the scale
    if refused or biased:
        with pytest.raises((ConfigError, FormatError), match=r"use gguf-|use native|convert to|biases"):
            convert(FAMILIES / case, path, target)
        assert not path.exists()
        return
    proof = convert(FAMILIES / case, path, target)
    assert proof.planes.total == len(m.config.layer_types or "xx") * 7 or groups or dense
    again = bitnet_ref.load(path, backend="numpy")
    assert differences_from_llama(again.config) == differences_from_llama(m.config)
    np.testing.assert_allclose(again.logits(tokens), m.logits(tokens), rtol=0, atol=0 if proof.exact else 1e-5)
    back = tmp_path / "back.bitnet.safetensors"
    convert(path, back, "native")
    np.testing.assert_array_equal(bitnet_ref.load(back, backend="numpy").logits(tokens), again.logits(tokens))
    if groups and not by_rows:  # of Maple the embedding and the head are most of the file
        assert path.stat().st_size < (FAMILIES / case / "model.safetensors").stat().st_size / 3


def test_cupy_refuses_by_name():
    be = choose_backend("numpy")
    from bitnet_ref.backends.cuda.backend import CupyBackend

    with pytest.raises(BackendUnavailable, match=r"scaled embeddings.*gelu_tanh of gemma3_text.*cython"):
        CupyBackend.check_config(be, model(FAMILIES / "embedding-gemma3").config)
    with pytest.raises(BackendUnavailable, match=r"Gated DeltaNet and output gates and partial RoPE of qwen3_5_text"):
        CupyBackend.check_config(be, model(FAMILIES / HYBRID).config)
    with pytest.raises(BackendUnavailable, match=r"mixtures of experts of maple"):
        CupyBackend.check_config(be, model(FAMILIES / "maple").config)


# -- ternary by groups -------------------------------------------------------------------------------------------------


def grouped(n, k, group, dtype, seed=0):
    generator = rng(seed, n, k)
    scales = (generator.random((n, -(-k // group))) + 0.5).astype(dtype)
    w_t = generator.integers(-1, 2, (n, k))
    w_t[:, ::group] = 1  # so that no two groups could be one
    return (w_t * np.repeat(scales.astype(np.float64), group, axis=1)[:, :k]).astype(dtype)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize(
    ("k", "group"), [(256, 128), (256, 64), (512, 256), (192, 192), (192, 64), (180, 60), (300, 128)]
)
def test_groups_are_recognised(k, group, dtype):
    w = grouped(7, k, group, dtype)
    packed, scales, size = split_groups(w)
    assert (size, scales.dtype) == (group, w.dtype)
    weight = GroupTernaryWeight(packed, k, scales, size)
    np.testing.assert_array_equal(weight.dense().array, w)
    x = rng(3).standard_normal((4, k)).astype(np.float32)
    y = group_matmul(x, packed, k, scales, size)
    exact = x.astype(np.float64) @ w.astype(np.float64).T
    np.testing.assert_allclose(y, exact, rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(y[2:3], group_matmul(x[2:3], packed, k, scales, size))


def test_a_few_scales_for_the_rows_of_a_matrix():
    """TriLM: one scale for each shard of the rows, which is one for each row."""
    w = np.sign(rng(1).standard_normal((8, 96))) * np.repeat([0.5, 0.25], 4)[:, None]
    _, scales, size = split_groups(w.astype(np.float16))
    assert (size, scales[:, 0].tolist()) == (96, [0.5] * 4 + [0.25] * 4)


@pytest.mark.parametrize("change", [lambda w: w * (1 + 1e-3 * np.arange(w.size).reshape(w.shape)), lambda w: w * 0])
def test_other_matrices_stay_dense(change):
    assert split_groups(change(grouped(7, 256, 128, np.float32)).astype(np.float32)) is None
    late = grouped(9, 256, 128, np.float16)
    late[8, 3:5] = (0.75, 0.8125)
    assert split_groups(late) is None


@pytest.mark.parametrize("tied", [True, False])
def test_ternary_embeddings_and_heads(tied, tmp_path):
    config = {**TINY, "hidden_size": 64, "intermediate_size": 64, "tie_word_embeddings": tied}
    tensors = tiny_tensors(config)
    dense = bitnet_ref.load(write_checkpoint(tmp_path / "dense", config, tensors), backend="numpy")
    matrices = [name for name, array in tensors.items() if array.ndim == 2]
    tensors |= {name: grouped(*tensors[name].shape, 32, ml_dtypes.bfloat16, i) for i, name in enumerate(matrices)}
    m = bitnet_ref.load(write_checkpoint(tmp_path / "ternary", config, tensors), backend="numpy")
    weights = [m.weights.embedding, *(weight for _, weight in m.weights.linears())]
    assert {type(weight) for weight in weights} == {GroupTernaryWeight}
    assert m.weights.tied == tied
    assert m.weights.nbytes < dense.weights.nbytes / 3
    expected = m.logits([1, 5, 3, 2])
    for name in [name for name in ("cython", "cupy") if bitnet_ref.available_backends()[name] is None]:
        for _ in range(2):  # read, and for cython the prepared copy
            other = bitnet_ref.load(tmp_path / "ternary", backend=name, prepared=name == "cython")
            assert not {type(weight) for _, weight in other.weights.linears()} & {GroupTernaryWeight, DenseWeight}
            np.testing.assert_allclose(other.logits([1, 5, 3, 2]), expected, rtol=0, atol=1e-4)
            np.testing.assert_array_equal(other.on(choose_backend("numpy")).logits([1, 5, 3, 2]), expected)
    inspection = inspect_model(tmp_path / "ternary")
    assert "a scale for each 32 inputs, in 14 of 14 linears" in inspection.quantization


# -- what a family has, against a plain formula ------------------------------------------------------------------------


def logits_of(folder, config, tensors, dtype="float64"):
    return bitnet_ref.load(write_checkpoint(folder, config, tensors), backend="numpy", dtype=dtype).logits([1, 5, 3, 2])


def test_the_three_factors_of_minicpm(tmp_path):
    """They can be folded into the weights of a LLaMA."""
    config = {**TINY, "model_type": "minicpm", "tie_word_embeddings": False, "scale_emb": 12, "scale_depth": 1.4}
    config["dim_model_base"] = 4
    tensors = tiny_tensors(config, np.float64)
    folded = {name: array.copy() for name, array in tensors.items()}
    folded["model.embed_tokens.weight"] *= 12
    folded["lm_head.weight"] *= 4 / 16
    for name in tensors:
        folded[name] *= 1.4 / 2**0.5 if name.endswith(("o_proj.weight", "down_proj.weight")) else 1
    as_f32 = [{name: array.astype(np.float32) for name, array in each.items()} for each in (tensors, folded)]
    mine = logits_of(tmp_path / "a", config, as_f32[0])
    np.testing.assert_allclose(mine, logits_of(tmp_path / "b", TINY, as_f32[1]), rtol=0, atol=1e-5)
    assert not np.allclose(mine, logits_of(tmp_path / "c", TINY, as_f32[0]), atol=0.1)


def test_weight_only(tmp_path):
    """use_sub_norms false: the dense model of the same values, no sub-norm, no int8."""
    config = {**BITNET, "use_sub_norms": False, "tie_word_embeddings": True}
    tensors = {name: a for name, a in tiny_tensors(config).items() if "sub_norm" not in name}
    m = bitnet_ref.load(write_checkpoint(tmp_path / "a", config, tensors), backend="numpy", dtype="float64")
    assert {type(weight) for _, weight in m.weights.layers[0].linears()} == {GroupTernaryWeight}
    dense = {name: a for name, a in tensors.items() if "proj" not in name}
    for name, weight in m.weights.linears():
        if name != "lm_head":
            block, part = name.split(".")[1], {"attn": "self_attn"}.get(name.split(".")[2], "mlp")
            dense[f"model.layers.{block}.{part}.{name.split('.')[3]}.weight"] = weight.dense().array
    plain = {**TINY, "hidden_act": "relu2", "tie_word_embeddings": True, "rope_theta": 500000.0}
    expected = logits_of(tmp_path / "b", plain, dense)
    np.testing.assert_allclose(m.logits([1, 5, 3, 2]), expected, rtol=0, atol=1e-9)
    again = tmp_path / "x.bitnet.safetensors"
    convert(tmp_path / "a", again, "native")
    np.testing.assert_array_equal(
        bitnet_ref.load(again, backend="numpy", dtype="float64").logits([1, 5]), m.logits([1, 5])
    )


def changed_case(folder, case, **keys):
    shutil.copytree(FAMILIES / case, folder)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | keys))
    return bitnet_ref.load(folder, backend="numpy", dtype="float64")


def test_soft_cap_and_query_scale_of_gemma(tmp_path, backend_name):
    plain, golden = case_of("embedding-gemma3", dtype="float64")
    tokens, cap = golden["tokens"].tolist(), 5.0
    capped = changed_case(tmp_path / "cap", "embedding-gemma3", final_logit_softcapping=cap)
    expected = cap * np.tanh(plain.logits(tokens) / cap)
    np.testing.assert_allclose(capped.logits(tokens), expected, rtol=0, atol=1e-12)
    assert capped.generate(tokens, max_tokens=4).token_ids == plain.generate(tokens, max_tokens=4).token_ids
    if backend_name != "cupy":
        fast = bitnet_ref.load(tmp_path / "cap", backend=backend_name)
        np.testing.assert_allclose(fast.logits(tokens), expected, rtol=0, atol=3e-4)
        assert (
            fast.generate(tokens, max_tokens=4, logprobs=2).token_ids == plain.generate(tokens, max_tokens=4).token_ids
        )
    scaled = changed_case(tmp_path / "scale", "embedding-gemma3", query_pre_attn_scalar=16)
    assert scaled.config.query_scale == 2  # sqrt(64 / 16)
    q, k, scores = (
        scaled.run_with_cache(tokens)[1][f"blocks.0.attn.hook_{name}"] for name in ("rot_q", "rot_k", "attn_scores")
    )
    np.testing.assert_allclose(scores[1, 2, 1], q[2, 1] @ k[1, 0] / 16**0.5, rtol=1e-10)


def test_pooling(tmp_path):
    m, golden = case_of("embedding-qwen3")
    tokens = golden["tokens"].tolist()
    rows = [tokens, tokens[:3], tokens[1:2]]
    batch = m.embed(rows)
    assert (batch.shape, batch.dtype) == ((3, 192), np.float32)
    for row, vector in zip(rows, batch, strict=True):
        np.testing.assert_array_equal(m.embed(row), vector)
    np.testing.assert_allclose(np.linalg.norm(batch, axis=1), 1, rtol=1e-6)
    shutil.copytree(FAMILIES / "embedding-qwen3", tmp_path / "mean")
    (tmp_path / "mean" / "1_Pooling").mkdir()
    pooling = tmp_path / "mean" / "1_Pooling" / "config.json"
    pooling.write_text(json.dumps({"word_embedding_dimension": 192, "pooling_mode_mean_tokens": True}))
    mean = bitnet_ref.load(tmp_path / "mean", backend="numpy")
    hidden = m.run_with_cache(tokens, "ln_final.hook_normalized")[1]["ln_final.hook_normalized"].mean(axis=0)
    np.testing.assert_allclose(mean.embed(tokens), hidden / np.linalg.norm(hidden), rtol=0, atol=1e-6)
    np.testing.assert_array_equal(mean.embed(rows)[1], mean.embed(rows[1]))
    pooling.write_text(json.dumps({"pooling_mode_cls_token": True}))
    with pytest.raises(ConfigError, match="pooling_mode_lasttoken"):
        bitnet_ref.load(tmp_path / "mean", backend="numpy")


def test_what_ends_an_embedded_text(tmp_path):
    """Qwen3's models read their own end of text; the mean, as sentence-transformers takes it, has no such token, and
    beside that library's modules.json the tokenizer alone says how a text ends."""
    words = SimpleNamespace(encode=lambda text: [5, 6], suffix=(), token_to_id={"<|endoftext|>": 3}.get)
    (tmp_path / "modules.json").write_text("[]")
    cases = [("last", None, [5, 6, 3]), ("mean", None, [5, 6]), ("last", tmp_path, [5, 6])]
    for pooling, path, expected in cases:
        config = families.FAMILIES["qwen3"].example(pooling=pooling)
        m = SimpleNamespace(texts_path=path, config=config, tokenizer=words, check_tokens=lambda ids, any_length: ids)
        assert token_rows(m, ["a cat"], any_length=True) == [expected]
        assert tokens_after(m) == len(expected) - 2


def test_embedding_a_text(monkeypatch):
    m = model("storyteller")
    ids = m.tokenizer.encode("Query: a cat")
    np.testing.assert_array_equal(m.embed("a cat", prompt="Query: "), m.embed(ids))
    text, others = list(range(2, 42)), [[5, 6, 7], [8] * 12]
    expected = m.embed([text, *others])
    monkeypatch.setattr(m.backend, "prompt_tokens", lambda config: 16)  # in pieces, and in several passes
    np.testing.assert_array_equal(m.embed([text, *others]), expected)
    np.testing.assert_array_equal(m.embed(text), expected[0])


# -- Gated DeltaNet ----------------------------------------------------------------------------------------------------


def delta_case(tokens, seed=0):
    generator = rng(seed, 35)
    q, k = (generator.standard_normal((tokens, 6, 8)) for _ in range(2))
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    v = generator.standard_normal((tokens, 6, 5))
    log_alpha, beta = -generator.exponential(0.3, (tokens, 6)), generator.random((tokens, 6))
    return DeltaInputs(q, k, v, log_alpha, beta), generator.standard_normal((6, 8, 5))


def test_the_recurrence_forgets_and_corrects():
    """Written with loops over the formula of `qwen3_5.py`."""
    inputs, memory = delta_case(3)
    expected, s = delta_recurrence(inputs, memory.copy()), memory.copy()
    for t in range(3):
        for head in range(6):
            s[head] *= np.exp(inputs.log_alpha[t, head])
            wrong = inputs.v[t, head] - inputs.k[t, head] @ s[head]
            s[head] += np.outer(inputs.k[t, head], inputs.beta[t, head] * wrong)
            np.testing.assert_allclose(expected[t, head], inputs.q[t, head] @ s[head], rtol=1e-12)


def test_a_state_is_continued_or_begun_again():
    m, golden = case_of(HYBRID)
    tokens, cache = golden["tokens"].tolist(), m.new_cache(2, 32)

    def logits(slot, start, ids):
        return m.run(TokenBatch.of([(slot, start, ids)]), cache).all()

    whole = m.logits(tokens)
    np.testing.assert_array_equal(logits(0, 0, tokens[:8]), whole[:8])
    assert (cache.resumable(0, 8), cache.resumable(0, 5), cache.resumable(1, 0)) == (8, 0, 0)
    with pytest.raises(ShapeError, match=r"token 8, or begun again.*token 5 of slot 0"):
        logits(0, 5, tokens[5:6])
    cache.copy([0], [1], 8)
    np.testing.assert_array_equal(logits(1, 8, tokens[8:]), whole[8:])
    np.testing.assert_array_equal(logits(0, 8, tokens[8:10]), whole[8:10])
    np.testing.assert_array_equal(
        logits(0, 8, tokens[8:12]), whole[8:12]
    )  # the last pass again, or another in its place
    larger = m.new_cache(2, 40)
    larger.take_over(cache, 12)
    cache = larger
    np.testing.assert_array_equal(logits(0, 12, tokens[12:]), whole[12:])
    np.testing.assert_array_equal(logits(0, 0, tokens), whole)


@pytest.mark.thorough
def test_several_rows_of_a_hybrid(backend_name):
    m, golden = case_of(HYBRID, backend_name)
    prompt, greedy = golden["tokens"].tolist()[:6], {"max_tokens": 5, "temperature": 0.0, "ignore_eos": True}
    prompts = [prompt, prompt[:3], [*prompt, 9, 9], prompt[::-1]]
    expected = [m.generate(each, **greedy).token_ids for each in prompts]
    assert [out.token_ids for out in m.generate(prompts, **greedy)] == expected
    sampled = {"max_tokens": 6, "temperature": 0.9, "seed": 3, "n": 3, "ignore_eos": True}
    with m.engine(max_batch=3, max_batch_tokens=8, page_size=4, cache_tokens=36) as engine:  # too few: some begin again
        assert [out.token_ids for out in engine.generate(prompts, **greedy)] == expected
        rows, alone = engine.generate(prompt, **sampled), m.generate(prompt, **sampled)
        assert [out.token_ids for out in rows] == [out.token_ids for out in alone]
        low = [engine.submit(each, priority=0, **greedy) for each in prompts]
        high = [engine.submit(each, priority=5, **greedy) for each in prompts]
        assert [handle.result().token_ids for handle in (*low, *high)] == expected * 2
    best = m.generate(prompt, max_tokens=5, num_beams=3, ignore_eos=True)
    whole = m.logits([*prompt, *best.token_ids])[len(prompt) - 1 : -1].astype(np.float64)
    logprobs = whole - np.log(np.exp(whole).sum(axis=1, keepdims=True))
    chosen = logprobs[np.arange(len(best.token_ids)), best.token_ids]
    np.testing.assert_allclose(best.logprobs, chosen, atol=1e-4)


def test_the_first_bad_tensor_of_a_hybrid(backend_name):
    m, golden = case_of(HYBRID, backend_name)
    layers = list(m.weights.layers)
    norm = layers[2].ffn_norm
    layers[2] = replace(layers[2], ffn_norm=replace(norm, weight=norm.weight * np.float32(1e38)))
    broken = bitnet_ref.Model(m.config, replace(m.weights, layers=tuple(layers)), m.backend)
    with pytest.raises(NumericsError) as caught:
        broken.logits(golden["tokens"])
    assert caught.value.tensor.startswith("blocks.2.")


def test_the_config_of_a_hybrid():
    config = model(FAMILIES / HYBRID).config
    assert config_from_dict(json.loads(json.dumps(config_to_dict(config)))) == config
    assert (config.rotary_dim, config.window_of(3), family_of(config).of_layers(config, [3]).delta) == (32, None, None)
    default = parse(model_type="qwen3_5_text", num_hidden_layers=8, head_dim=32)
    assert [i for i, kind in enumerate(default.layer_types) if kind == "full_attention"] == [3, 7]
    for key, value in (("attn_output_gate", False), ("attention_bias", True), ("partial_rotary_factor", 2)):
        with pytest.raises(ConfigError) as caught:
            parse(model_type="qwen3_5_text", **{key: value})
        assert caught.value.field == key
    with pytest.raises(ConfigError, match="multiple of"):
        parse(model_type="qwen3_5_text", linear_num_key_heads=3)
    gelu = {"model_type": "qwen3_5_text", "head_dim": 32, "hidden_act": "gelu_pytorch_tanh"}
    with pytest.raises(ConfigError, match=r"hidden_act.*silu, which the convolution of DeltaNet layers has"):
        parse(**gelu)
    assert parse(**gelu, layer_types=["full_attention"] * 2).activation == "gelu_tanh"


# -- config.json -------------------------------------------------------------------------------------------------------


def parse(**keys) -> ModelConfig:
    return parse_hf_config({**TINY, **keys}, FAMILIES)


def test_families_that_are_not_done_are_named():
    for model_type, words in (("olmoe", "mixture of experts"), ("gemma3n", "vision"), ("mamba", "other architect")):
        with pytest.raises(ConfigError, match=words) as caught:
            parse(model_type=model_type)
        assert caught.value.field == "model_type"


def test_layers_of_qwen():
    config = parse(model_type="qwen2")
    assert (config.attention_bias, config.o_proj_bias, config.sliding_window) == (True, False, None)
    config = parse(model_type="qwen3", use_sliding_window=True, sliding_window=4, max_window_layers=1)
    assert (config.head_dim, config.layer_types) == (128, ("full_attention", "sliding_attention"))
    assert (config.window_of(0), config.window_of(1), widest_window(config)) == (None, 4, None)
    everywhere = parse(model_type="qwen3", use_sliding_window=True, sliding_window=4, max_window_layers=0)
    assert (everywhere.layer_types, widest_window(everywhere)) == ((), 4)
    for types in (["sliding_attention"] * 2, ["sliding_attention", "full_attention"]):  # transformers refuses them, too
        with pytest.raises(ConfigError, match="sliding_window: is absent or not in use, and layer_types has sliding"):
            parse(model_type="qwen3", layer_types=types, sliding_window=4)
    with pytest.raises(ConfigError, match="layer_types"):
        parse(model_type="qwen3", layer_types=["sliding_attention", "full_attention"])
    with pytest.raises(ConfigError, match="layer_types"):
        parse(model_type="qwen3", layer_types=["chunked_attention"] * 2, use_sliding_window=True)
    with pytest.raises(ConfigError, match="max_window_layers: expected a number of layers"):
        parse(model_type="qwen3", use_sliding_window=True, sliding_window=4, max_window_layers={"a": 1})


def test_the_turned_part_of_a_head_stands_beside_ropes_parameters_or_in_them():
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "head_dim": 16}
    beside = parse(model_type="maple", **sizes, partial_rotary_factor=0.5, rope_theta=500.0)
    inside = {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5}
    assert beside.rotary_dim == 8
    assert parse(model_type="maple", **sizes, rope_parameters=inside, partial_rotary_factor=1.0) == beside


def test_factors_of_granite():
    """As Granite 3's 2B has them; and as transformers' class has them by default, whose scores are q k."""
    sizes = {"hidden_size": 2048, "num_attention_heads": 32, "num_key_value_heads": 8, "bos_token_id": 0}
    factors = {"attention_multiplier": 0.015625, "embedding_multiplier": 12.0, "residual_multiplier": 0.22}
    config = parse(model_type="granite", **sizes, **factors, logits_scaling=8.0)
    assert (config.query_scale, config.embedding_scale, config.residual_scale) == (0.125, 12.0, 0.22)
    assert (config.head_scale, config.head_dim, config.bos_token_id) == (0.125, 64, 0)
    plain = parse(model_type="granite")
    assert (plain.query_scale, plain.residual_scale, plain.head_scale) == (np.sqrt(plain.head_dim), 1, 1)
    written = hf_config_json(config, None, "F32")
    assert {key: written[key] for key in factors} == factors
    for key in (*factors, "logits_scaling"):
        with pytest.raises(ConfigError) as caught:
            parse(model_type="granite", **{key: 0})
        assert caught.value.field == key
        with pytest.raises(ConfigError, match="multiplied by a factor"):
            parse(model_type="llama", **{key: 2})
    for head_dim in (-1, 0, [64], "64"):
        with pytest.raises(ConfigError) as caught:
            parse(model_type="granite", **sizes, head_dim=head_dim)
        assert caught.value.field == "head_dim"


def test_granite_without_rope_is_refused(tmp_path):
    """llama.cpp turns RoPE off where a Granite's rope.scaling.finetuned is false, as some hybrids have it."""
    path = tmp_path / "x.gguf"
    convert(FAMILIES / "granite", path, "gguf-f32")
    data, key = path.read_bytes(), b"granite.attention.scale"
    flag = b"granite.rope.scaling.finetuned"
    entry = len(flag).to_bytes(8, "little") + flag + (7).to_bytes(4, "little") + bytes([0])
    at = data.index(len(key).to_bytes(8, "little") + key)
    count = int.from_bytes(data[16:24], "little") + 1
    tail = data[at:]
    path.write_bytes(data[:16] + count.to_bytes(8, "little") + data[24:at] + entry + tail)
    with pytest.raises(ConfigError, match="layers without RoPE") as caught:
        bitnet_ref.read_config(path)
    assert caught.value.field == "granite.rope.scaling.finetuned"


def test_layers_of_gemma():
    old = parse(
        model_type="gemma3_text", num_hidden_layers=7, sliding_window=8, rope_theta=7e5, rope_local_base_freq=5e3
    )
    assert old.layer_types.index("full_attention") == 5
    patterns = {"sliding_window_pattern": 2, "_sliding_window_pattern": 3}  # transformers reads the first
    assert parse(model_type="gemma3_text", num_hidden_layers=7, **patterns).layer_types.index("full_attention") == 1
    assert (old.rope.theta, old.local_rope.theta, old.query_scale) == (7e5, 5e3, 1.0)
    stretched = parse(model_type="gemma3_text", rope_scaling={"rope_type": "linear", "factor": 8.0})
    assert (stretched.rope.factor, stretched.local_rope.rope_type) == (8.0, "default")
    with pytest.warns(ConfigWarning, match="rope_parameters: ignored, as transformers reads that of full_attention"):
        flat = parse(model_type="gemma3_text", rope_parameters={"rope_theta": 5e5})
    assert (flat.rope.theta, flat.local_rope.theta) == (1e6, 1e4)
    for key, value in (("attn_logit_softcapping", 50.0), ("use_bidirectional_attention", True)):
        with pytest.raises(ConfigError) as caught:
            parse(model_type="gemma3_text", **{key: value})
        assert caught.value.field == key
    assert config_from_dict(json.loads(json.dumps(config_to_dict(old)))) == old


@pytest.mark.parametrize("family", families.FAMILIES)
def test_a_config_of_any_values_is_read_or_refused(family):
    raw = config_to_dict(families.FAMILIES[family].example())
    places = [(raw, key) for key in raw] + [(raw["rope"], key) for key in raw["rope"]]
    for place, key in places:
        good = place[key]
        for value in (None, [], {}, "x", -1, 1.5, True, [1], [None], {"a": 1}, float("nan"), 10**30):
            place[key] = value
            with suppress(ConfigError):
                config_from_dict(raw)
        place[key] = good


def test_files_of_before_have_no_new_fields():
    assert set(config_to_dict(parse())) & {"qk_norms", "layer_types", "pooling", "head_scale"} == set()
    with pytest.raises(ConfigError, match="layer_types"):
        config_from_dict(config_to_dict(parse()) | {"layer_types": ["full_attention"]})


def test_gelu_of_gemma():
    x = np.linspace(-30, 30, 301)
    expected = 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
    np.testing.assert_allclose(gated(x, np.ones_like(x), "gelu_tanh"), expected, rtol=1e-12)


def test_minicpm_in_other_formats(tmp_path):
    config = {**TINY, "model_type": "minicpm", "scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 4}
    config["tie_word_embeddings"] = False
    folder = write_checkpoint(tmp_path / "m", config, tiny_tensors(config))
    expected = bitnet_ref.load(folder, backend="numpy").logits([1, 5, 3, 2])
    for target in ("gguf-f32", "hf-bf16", "native"):
        path = tmp_path / {"gguf-f32": "x.gguf", "hf-bf16": "hf", "native": "x.bitnet.safetensors"}[target]
        assert convert(folder, path, target).holds
        again = bitnet_ref.load(path, backend="numpy")
        assert set(differences_from_llama(again.config)) == {"embedding_scale", "residual_scale", "head_scale"}
        np.testing.assert_allclose(again.logits([1, 5, 3, 2]), expected, rtol=0, atol=1e-5)


# -- SmolLM3: every fourth layer has no positions ----------------------------------------------------------------------


def test_smollm3_in_a_gguf_is_as_llama_cpps_converter_writes_it(tmp_path):
    """q and k are permuted, also in the layer without RoPE; no key says which layer that is."""
    convert(FAMILIES / "smollm3", tmp_path / "x.gguf", "gguf-f32")
    stored = load_file(FAMILIES / "smollm3" / "model.safetensors")
    with GgufFile(tmp_path / "x.gguf") as file:
        assert file.metadata["general.architecture"] == "smollm3"
        assert not [key for key in file.metadata if "no_rope" in key or "nope" in key]
        for layer in (0, 3):
            for theirs, ours, heads in (("attn_q", "q_proj", 2), ("attn_k", "k_proj", 1)):
                w = stored[f"model.layers.{layer}.self_attn.{ours}.weight"].astype(np.float32)
                permuted = w.reshape(heads, 2, -1, w.shape[1]).swapaxes(1, 2).reshape(w.shape)
                np.testing.assert_array_equal(file.read(f"blk.{layer}.{theirs}.weight"), permuted)
    assert bitnet_ref.load(tmp_path / "x.gguf", backend="numpy").config == model(FAMILIES / "smollm3").config


def test_other_layers_without_positions_are_not_written_to_a_gguf(tmp_path):
    m = changed_case(tmp_path / "m", "smollm3", no_rope_layers=[1, 0, 1, 0])
    assert m.config.no_rope_layers == (1, 0, 1, 0)
    with pytest.raises(ConfigError, match="convert to native") as caught:
        convert(tmp_path / "m", tmp_path / "x.gguf", "gguf-f32")
    assert caught.value.field == "no_rope_layers"


def test_rope_in_layers_without_positions_is_named():
    """The mistake of an engine that computes SmolLM3 as LLaMA."""
    m, tokens = model(FAMILIES / "smollm3"), list(range(3, 11))
    setting = Setting.of(m, tokens)
    mistakes = {each.name: each for each in forward_hypotheses(setting, {})}
    candidate = mistakes["rope_in_layers_without_positions"].change(setting).run()
    comparison = compare(m.run_with_cache(tokens)[1], candidate, m.config, tokens)
    assert comparison.first_divergence.name == "blocks.3.attn.hook_attn_scores"
    diagnoses = diagnose(m, tokens, candidate, comparison, depth=1)
    assert diagnoses[0].confirmed
    assert "rope_in_layers_without_positions" in {each.name for each in diagnoses if each.confirmed}


# -- mixtures of experts -----------------------------------------------------------------------------------------------


def test_maple_sees_one_key_more_than_llama_cpp(tmp_path, backend_name):
    if backend_name == "cupy":
        pytest.skip("has no mixtures of experts")
    golden = load_file(FAMILIES / "maple" / "golden.safetensors")
    narrow = changed_case(tmp_path / "narrow", "maple", sliding_window=4)
    np.testing.assert_allclose(narrow.logits(golden["tokens"]), golden["logits_window_w"], rtol=0, atol=3e-4)
    assert [narrow.config.window_of(layer) for layer in (0, 1)] == [5, None]


@pytest.mark.thorough
@pytest.mark.parametrize("case", [*MIXTURES, "olmo2", "granite"])
def test_mistakes_of_a_family_are_named(case):
    m, tokens = model(FAMILIES / case), rng(1).integers(0, 80, 24)
    setting = Setting.of(m, tokens)
    right = setting.run()
    for mistake in family_of(m.config).mistakes:
        wrong = mistake.change(setting).run()
        found = diagnose(m, tokens, wrong, compare(right, wrong, m.config))
        assert mistake.name in [each.name for each in found if each.confirmed]


def test_only_the_chosen_experts_are_multiplied():
    m = model(FAMILIES / "qwen3_moe-groups128")
    layer, counted = m.weights.layers[0], []

    class Counting(Ops):
        def linears(self, x, ws):
            counted.append((len(x), [w.name for w in ws]))
            return super().linears(x, ws)

    x = rng(2).standard_normal((5, 128)).astype(np.float32)
    layer.feed_forward_text(Counting(), x, layer, m.config)
    experts = [(n, name) for n, (name,) in counted if "router" not in name]
    for linear in ("gate_proj", "up_proj", "down_proj"):
        assert sum(n for n, name in experts if linear in name) == 5 * m.config.num_experts_per_tok
    counted.clear()
    layer.feed_forward_text(Counting(), x[:1], layer, m.config)
    assert sorted(len(names) for _, names in counted) == [
        1,
        1,
        1,
        2,
        2,
    ]  # router, each chosen down, gates and ups together


def test_shares_of_experts():
    config = replace(model(FAMILIES / "maple").config, num_experts=6, num_experts_per_tok=2)
    scores = np.array([[0, 5, 5, 5, 0, 0], [200, 0, 0, -200, 0, 0]], dtype=np.float32)
    shares = choose_experts(scores, config)
    np.testing.assert_array_equal(chosen_ids(shares, 2), [[1, 2], [0, 1]])  # of equal scores the lower number
    np.testing.assert_array_equal(shares[0, 1:3], [0.5, 0.5])
    assert 0 < shares[1, 1] < 1e-37  # exp(-200), but not 0: it stays chosen


@pytest.mark.sample(3)
@pytest.mark.parametrize("kind", ["f32", "bf16", "q2_0"])
def test_a_mixture_in_a_gguf_has_its_experts_in_one_tensor(tmp_path, kind):
    config = replace(
        families.FAMILIES["qwen3_moe"].example(), hidden_size=128, moe_intermediate_size=64, dense_layers=()
    )
    folder = tmp_path / "m"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(hf_config_json(config, None, "F32")))
    table, head = rng(0).integers(-8, 9, (2, 64, 128)) / 8  # which bfloat16 holds
    tensors = {"model.embed_tokens.weight": table, "model.norm.weight": np.ones(128), "lm_head.weight": head}
    for layer in range(2):
        block = f"model.layers.{layer}"
        for name, size in config.norm_shapes(layer).items():
            tensors[f"{hf_modules(f'blocks.{layer}.{name}', config)[0]}.weight"] = np.ones(size)
        for name, shape in config.linear_shapes(layer).items():
            signs = rng(len(tensors)).integers(-1, 2, shape) * 0.0625
            parts = np.split(signs, 4) if name in ("gate_proj", "up_proj", "down_proj") else [signs]
            for i, part in enumerate(parts):
                part_of = f"mlp.experts.{i}.{name}" if len(parts) > 1 else f"self_attn.{name}"
                tensors[f"{block}.{'mlp.gate' if name == 'router' else part_of}.weight"] = part
    save_file({name: w.astype(np.float32) for name, w in tensors.items()}, folder / "model.safetensors")
    path = tmp_path / "x.gguf"
    assert convert(folder, path, f"gguf-{kind}").exact
    with GgufFile(path) as file:
        assert file.metadata["qwen3moe.expert_used_count"] == 2
        assert file.tensors["blk.1.ffn_down_exps.weight"].shape == (4, 128, 64)
    tokens = rng(3).integers(0, 64, 12)
    again, first = model(path), model(folder)
    assert again.config == replace(first.config, bos_token_id=again.config.bos_token_id)
    np.testing.assert_array_equal(again.logits(tokens), first.logits(tokens))


def test_a_mixtral_gguf_is_a_llama_with_experts(tmp_path):
    """llama.cpp has no architecture of its own for it; without experts the same keys are a LLaMA's."""
    convert(FAMILIES / "mixtral-groups128", tmp_path / "x.gguf", "gguf-f32")
    with GgufFile(tmp_path / "x.gguf") as file:
        assert file.metadata["general.architecture"] == "llama"
        assert (file.metadata["llama.expert_count"], file.metadata["llama.expert_used_count"]) == (3, 2)
        assert "llama.expert_feed_forward_length" not in file.metadata
        assert file.tensors["blk.0.ffn_gate_exps.weight"].shape == (3, 128, 128)
        stored = load_file(FAMILIES / "mixtral-groups128" / "model.safetensors")
        w = stored["model.layers.0.self_attn.q_proj.weight"].astype(np.float32)
        permuted = w.reshape(2, 2, -1, w.shape[1]).swapaxes(1, 2).reshape(w.shape)
        np.testing.assert_array_equal(file.read("blk.0.attn_q.weight"), permuted)
    again = model(tmp_path / "x.gguf").config
    assert again == replace(model(FAMILIES / "mixtral-groups128").config, bos_token_id=again.bos_token_id)


@pytest.mark.parametrize("case", ["mixtral-groups128", "qwen3_moe-groups128"])
def test_a_mixture_in_one_call_gives_the_bits_of_its_ops(case):
    m = bitnet_ref.load(FAMILIES / case, backend="cython", threads=2)
    be, config = m.backend, m.config
    for w in m.weights.layers:
        for tokens in (1, 2, 9):
            x = rng(tokens).standard_normal((tokens, config.hidden_size)).astype(np.float32)
            for limit in (None, 0.25):
                cfg = replace(config, gate_clamp=limit)
                own = be.op_by_op().feed_forward(x, w, cfg)
                np.testing.assert_array_equal(be.feed_forward(x, w, cfg), own)
        if isinstance(w, MoeLayer):
            assert be._stack_experts(w.gate_proj) is not None
            equal = replace(w, router=DenseWeight(np.zeros(w.router.shape, dtype=np.float32)))  # the first k are chosen
            np.testing.assert_array_equal(be.feed_forward(x, equal, cfg), be.op_by_op().feed_forward(x, equal, cfg))
            with pytest.raises(NumericsError):
                be.feed_forward(np.full_like(x, np.nan), w, cfg)


@pytest.mark.parametrize("kinds", [("Q4_1", "Q4_0", "Q8_0"), ("Q4_K", "Q6_K", "TQ2_0"), ("Q8_0", "Q4_K", "Q2_0")])
def test_experts_by_ggmls_rule_give_the_bits_of_the_text(kinds):
    """In one call if gate and up take one form of the input, else op by op."""
    m = bitnet_ref.load(FAMILIES / "mixtral-groups128", backend="cython", threads=2)
    cfg, be, text = replace(m.config, hidden_size=256, moe_intermediate_size=512), m.backend, choose_backend("numpy")
    generator = rng(5)
    shapes = ((512, 256), (512, 256), (256, 512))
    weights = [
        Experts(tuple(by_rule(random_blocks(kind, generator, *shape)) for _ in range(cfg.num_experts)), 2, name="x")
        for kind, shape in zip(kinds, shapes, strict=True)
    ]
    router = DenseWeight(generator.standard_normal((cfg.num_experts, 256)).astype(np.float32))
    norm = Norm(np.ones(256, dtype=np.float32), 1e-5)
    names = ("gate_proj", "up_proj", "down_proj")
    plain = replace(m.weights.layers[0], ffn_norm=norm, router=router, **dict(zip(names, weights, strict=True)))
    own = replace(plain, **{name: w.each(be.prepare) for name, w in zip(names, weights, strict=True)})
    stacks = [be._stack_experts(getattr(own, name)) for name in names]
    assert (stacks[0].input_form == stacks[1].input_form) == (kinds[0] != "Q8_0")
    for tokens in (1, 2, 9):
        x = generator.standard_normal((tokens, 256)).astype(np.float32)
        expected = be.op_by_op().feed_forward(x, own, cfg)
        np.testing.assert_array_equal(be.feed_forward(x, own, cfg), expected)
        of_text = text.feed_forward(x, plain, cfg)  # its shares differ: the router's are float sums
        np.testing.assert_allclose(of_text, expected, rtol=0, atol=1e-6 * np.abs(expected).max())
    x[1] = np.nan
    with pytest.raises(NumericsError, match="token 1"):
        be.feed_forward(x, own, cfg)


@pytest.mark.sample(3)
@pytest.mark.parametrize(("kind", "rule"), [("f32", "auto"), ("q8_0", "auto"), ("q2_0", "auto"), ("q8_0", "blocks")])
def test_a_mixtral_gguf_of_2023_has_a_tensor_for_each_expert(kind, rule, tmp_path):
    new, old = tmp_path / "new.gguf", tmp_path / "old.gguf"
    convert(FAMILIES / "mixtral-groups128", new, f"gguf-{kind}", verify=False)
    divide_experts(new, old)
    expected, got = (bitnet_ref.load(path, backend="numpy", activations=rule).logits([1, 2, 3]) for path in (new, old))
    np.testing.assert_array_equal(got, expected)
    assert inspect_model(old).errors == []
    if rule == "auto":
        convert(old, tmp_path / "again.bitnet.safetensors", "native")


def test_experts_of_2023_that_differ_or_lack(tmp_path):
    new, old = tmp_path / "new.gguf", tmp_path / "old.gguf"
    convert(FAMILIES / "mixtral-groups128", new, "gguf-f32")
    divide_experts(new, old)
    whole = old.read_bytes()
    old.write_bytes(whole.replace(b"blk.0.ffn_up.2.weight", b"blk.0.ffn_up.9.weight"))
    with pytest.raises(FormatError, match=r"blk\.0\.ffn_up\.2\.weight"):
        model(old)


def test_mixtures_that_are_not_done_are_named(tmp_path):
    for keys, field in (
        ({"quantization_config": {"quant_method": "bitnet"}}, "quantization_config"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok"),
        ({"num_experts": 2**31}, "num_experts"),
        ({"mlp_only_layers": ["1"]}, "mlp_only_layers"),
        ({"norm_topk_prob": "yes"}, "norm_topk_prob"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step"),
    ):
        with pytest.raises(ConfigError) as caught:
            changed_case(tmp_path / field, "qwen3_moe-groups128", **keys)
        assert caught.value.field == field
    with pytest.raises(ConfigError, match="num_shared_experts"):
        changed_case(tmp_path / "shared", "maple", num_shared_experts=1)
