"""Recorder: every named intermediate of a run, as documented there, without changing what is computed."""

import fnmatch
from dataclasses import replace

import numpy as np
import pytest
from helpers import BITNET, GOLDEN, golden, model, tiny_tensors, write_checkpoint

import bitnet_ref
from bitnet_ref.backends.record import match_names
from bitnet_ref.errors import NumericsError
from bitnet_ref.reference.weights import DenseWeight

TOKENS = [1, 17, 5, 23, 9]


def documented_shapes(cfg, n):
    """{name: (shape, dtype)} as the docstring of backends/record.py lists them, in the order of the computation."""
    d_model, heads, kv, head = cfg.hidden_size, cfg.num_attention_heads, cfg.num_key_value_heads, cfg.head_dim
    f32, ternary = np.float32, cfg.quantization is not None
    shapes = {"hook_embed": ((n, d_model), f32)}

    def norm(name, size):
        shapes[f"{name}.hook_scale"] = ((n, 1), f32)
        shapes[f"{name}.hook_normalized"] = ((n, size), f32)

    def linear(name):
        n_out, n_in = cfg.linear_shapes()[name.rpartition(".")[2]]
        if ternary:
            shapes[f"{name}.hook_x_int8"] = ((n, n_in), np.int8)
            shapes[f"{name}.hook_x_scale"] = ((n, 1), f32)
            shapes[f"{name}.hook_acc_int32"] = ((n, n_out), np.int32)
        shapes[f"{name}.hook_out"] = ((n, n_out), f32)

    for i in range(cfg.num_hidden_layers):
        block = f"blocks.{i}"
        shapes[f"{block}.hook_resid_pre"] = ((n, d_model), f32)
        norm(f"{block}.ln1", d_model)
        for name in ("q_proj", "k_proj", "v_proj"):
            linear(f"{block}.attn.{name}")
        for name, n_heads in (
            ("hook_q", heads),
            ("hook_k", kv),
            ("hook_rot_q", heads),
            ("hook_rot_k", kv),
            ("hook_v", kv),
        ):
            shapes[f"{block}.attn.{name}"] = ((n, n_heads, head), f32)
        for name in ("hook_attn_scores", "hook_pattern"):
            shapes[f"{block}.attn.{name}"] = ((heads, n, n), f32)
        shapes[f"{block}.attn.hook_z"] = ((n, heads, head), f32)
        if cfg.sub_norms:
            norm(f"{block}.attn.sub_norm", cfg.query_size)
        linear(f"{block}.attn.o_proj")
        shapes[f"{block}.hook_attn_out"] = ((n, d_model), f32)
        shapes[f"{block}.hook_resid_mid"] = ((n, d_model), f32)
        norm(f"{block}.ln2", d_model)
        linear(f"{block}.mlp.gate_proj")
        linear(f"{block}.mlp.up_proj")
        for name in ("hook_pre", "hook_pre_linear", "hook_post"):
            shapes[f"{block}.mlp.{name}"] = ((n, cfg.intermediate_size), f32)
        if cfg.sub_norms:
            norm(f"{block}.mlp.sub_norm", cfg.intermediate_size)
        linear(f"{block}.mlp.down_proj")
        shapes[f"{block}.hook_mlp_out"] = ((n, d_model), f32)
        shapes[f"{block}.hook_resid_post"] = ((n, d_model), f32)
    norm("ln_final", d_model)
    shapes["lm_head.hook_out"] = ((n, cfg.vocab_size), f32)
    return shapes


@pytest.mark.parametrize("case", ["storyteller", "bitnet-packed-offline", "llama-dense", "mistral-window3"])
def test_names_shapes_dtypes_and_order(case, backend_name):
    m = model(case if case == "storyteller" else GOLDEN / case, backend_name)
    logits, seen = m.run_with_cache(TOKENS)
    expected = documented_shapes(m.config, len(TOKENS))
    assert list(seen) == list(expected)
    assert {name: (a.shape, a.dtype.type) for name, a in seen.items()} == expected
    np.testing.assert_array_equal(logits, m.logits(TOKENS))
    np.testing.assert_array_equal(seen["lm_head.hook_out"], logits)


@pytest.mark.parametrize("case", ["bitnet-packed-offline", "llama-packed-rmsnorm", "llama-dense", "onebitllm-silu"])
def test_the_tensors_are_those_of_the_computation(case):
    """Each is what the formula says of the ones before it."""
    m = model(GOLDEN / case)
    _, seen = m.run_with_cache(golden(case)["tokens"])
    cfg = m.config
    for i in range(cfg.num_hidden_layers):
        x = {name.removeprefix(f"blocks.{i}."): a for name, a in seen.items() if name.startswith(f"blocks.{i}.")}
        np.testing.assert_array_equal(x["hook_resid_mid"], x["hook_resid_pre"] + x["hook_attn_out"])
        np.testing.assert_array_equal(x["hook_resid_post"], x["hook_resid_mid"] + x["hook_mlp_out"])
        np.testing.assert_array_equal(x["hook_attn_out"], x["attn.o_proj.hook_out"])
        np.testing.assert_array_equal(x["hook_mlp_out"], x["mlp.down_proj.hook_out"])
        norm = x["hook_resid_pre"] / x["ln1.hook_scale"] * m.weights.layers[i].attn_norm.weight
        np.testing.assert_allclose(x["ln1.hook_normalized"], norm, rtol=1e-6)
        np.testing.assert_array_equal(x["attn.hook_q"].reshape(len(norm), -1), x["attn.q_proj.hook_out"])
        np.testing.assert_array_equal(x["attn.hook_v"].reshape(len(norm), -1), x["attn.v_proj.hook_out"])
        np.testing.assert_array_equal(x["mlp.hook_pre"], x["mlp.gate_proj.hook_out"])
        np.testing.assert_array_equal(x["mlp.hook_pre_linear"], x["mlp.up_proj.hook_out"])
        scores, pattern = x["attn.hook_attn_scores"], x["attn.hook_pattern"]
        future = np.triu(np.ones(scores.shape[1:], dtype=bool), 1)
        assert np.isneginf(scores[:, future]).all()
        assert not pattern[:, future].any()
        np.testing.assert_allclose(pattern.sum(-1), 1, rtol=1e-6)
        group = cfg.num_attention_heads // cfg.num_key_value_heads
        keys, values = (np.repeat(x[f"attn.{name}"], group, axis=1) for name in ("hook_rot_k", "hook_v"))
        expected = np.einsum("qhd,khd->hqk", x["attn.hook_rot_q"], keys) * cfg.head_dim**-0.5
        np.testing.assert_allclose(scores[:, ~future], expected[:, ~future], atol=1e-5)
        np.testing.assert_allclose(x["attn.hook_z"], np.einsum("hqk,khd->qhd", pattern, values), atol=1e-5)
        for name in [name.removesuffix(".hook_acc_int32") for name in x if name.endswith("hook_acc_int32")]:
            _block, linear = name.split(".")
            w = getattr(m.weights.layers[i], linear)
            acc = x[f"{name}.hook_x_int8"].astype(np.int64) @ w.bit_linear.ternary().astype(np.int64).T
            np.testing.assert_array_equal(x[f"{name}.hook_acc_int32"], acc)
            y = acc.astype(np.float32) * (w.bit_linear.w_dequant_scale / x[f"{name}.hook_x_scale"])
            np.testing.assert_array_equal(x[f"{name}.hook_out"], y if w.bias is None else y + w.bias)
    np.testing.assert_array_equal(seen["hook_embed"], seen["blocks.0.hook_resid_pre"])
    np.testing.assert_array_equal(seen["blocks.0.hook_resid_post"], seen["blocks.1.hook_resid_pre"])


def test_norms_inside_linears_are_recorded_under_them():
    _, seen = model(GOLDEN / "llama-packed-rmsnorm").run_with_cache(TOKENS)
    assert seen["blocks.1.mlp.down_proj.rms_norm.hook_normalized"].shape == (5, 96)
    assert seen["blocks.0.attn.k_proj.rms_norm.hook_scale"].shape == (5, 1)


def test_a_sliding_window_masks_the_pattern():
    _, seen = model(GOLDEN / "mistral-window3").run_with_cache([1] * 6)
    pattern = seen["blocks.0.attn.hook_pattern"]
    distance = np.arange(6)[:, None] - np.arange(6)
    assert ((pattern > 0) == ((distance >= 0) & (distance < 3))).all()


def test_names_filter():
    m = model(GOLDEN / "llama-dense")
    all_names = list(m.run_with_cache(TOKENS)[1])

    def names(names_filter):
        return list(m.run_with_cache(TOKENS, names_filter)[1])

    assert names(None) == all_names
    assert names([]) == []
    assert names("blocks.*.attn.hook_pattern") == ["blocks.0.attn.hook_pattern", "blocks.1.attn.hook_pattern"]
    assert names(["hook_embed", "*.hook_resid_post"]) == [
        "hook_embed",
        "blocks.0.hook_resid_post",
        "blocks.1.hook_resid_post",
    ]
    assert names(lambda name: name.endswith("ln2.hook_scale")) == ["blocks.0.ln2.hook_scale", "blocks.1.ln2.hook_scale"]
    assert names(name for name in ("hook_embed",)) == ["hook_embed"]
    assert not match_names("blocks.0.*")("blocks.10.hook_resid_pre")


def test_recorded_arrays_are_copies(backend_name):
    """No two share memory, and none is a part of the model or of its cache: changing one changes nothing else."""
    m = model(GOLDEN / "llama-dense", backend_name)
    before, seen = m.run_with_cache(TOKENS)
    arrays = list(seen.values())
    for i, array in enumerate(arrays):
        assert not any(np.may_share_memory(array, other) for other in [*arrays[:i], before])
        array.fill(0)
    np.testing.assert_array_equal(m.logits(TOKENS), before)


# -- the first tensor that is not finite -------------------------------------------------------------------------------

HUGE = 3e38
CORRUPTED = {
    # tensors of the checkpoint, their new value -> the first name that shows it
    "embedding, which is the head": ("embed_tokens.weight", HUGE, "lm_head.hook_out"),
    "first norm": ("layers.0.input_layernorm.weight", HUGE, "blocks.0.ln1.hook_normalized"),
    "scale of q": ("layers.0.self_attn.q_proj.weight_scale", HUGE, "blocks.0.attn.q_proj.hook_out"),
    "scale of v": ("layers.1.self_attn.v_proj.weight_scale", HUGE, "blocks.1.attn.v_proj.hook_out"),
    "scales of q and k": ("layers.1.self_attn.[qk]_proj.weight_scale", 1e25, "blocks.1.attn.hook_attn_scores"),
    "scale of gate, squared": ("layers.0.mlp.gate_proj.weight_scale", 1e30, "blocks.0.mlp.hook_post"),
    "sub-norm": ("layers.1.mlp.ffn_sub_norm.weight", HUGE, "blocks.1.mlp.sub_norm.hook_normalized"),
    "scale of down": ("layers.1.mlp.down_proj.weight_scale", HUGE, "blocks.1.mlp.down_proj.hook_out"),
    "last norm": ("norm.weight", HUGE, "ln_final.hook_normalized"),
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("case", CORRUPTED)
def test_numerics_errors_name_the_first_bad_tensor(case, tmp_path, backend_name):
    pattern, value, first = CORRUPTED[case]
    tensors = tiny_tensors(BITNET, np.float32)
    for name in fnmatch.filter(tensors, f"model.{pattern}"):
        tensors[name] = np.full_like(tensors[name], value)
    m = bitnet_ref.load(write_checkpoint(tmp_path, BITNET, tensors), backend=backend_name)
    for run in (m.logits, m.run_with_cache):
        with pytest.raises(NumericsError) as caught:
            run(TOKENS)
        assert caught.value.tensor == first
        assert first in str(caught.value)


def test_dense_overflow_is_named(tmp_path, backend_name):
    m = model(GOLDEN / "llama-dense", backend_name)
    layer = m.weights.layers[1]
    broken = np.array(model(GOLDEN / "llama-dense").weights.layers[1].up_proj.array, dtype=np.float32)
    broken[7] = HUGE
    up_proj = m.backend.prepare(DenseWeight(broken, name=layer.up_proj.name))
    layers = (m.weights.layers[0], replace(layer, up_proj=up_proj))
    bad = bitnet_ref.Model(m.config, replace(m.weights, layers=layers), m.backend)
    with pytest.raises(NumericsError) as caught:
        bad.logits(TOKENS)
    assert caught.value.tensor == "blocks.1.mlp.up_proj.hook_out"
