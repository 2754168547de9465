"""Dense matrices in blocks: kept as a GGUF stores them, or made int8 by `load(dense="int8")`."""

import logging
from dataclasses import replace

import numpy as np
import pytest
from helpers import BITNET, GOLDEN, golden, random_blocks, rng, write_checkpoint
from test_gguf_model import FAMILIES, changed, export, write_family

import bitnet_ref
from bitnet_ref.backends.backend import plain_weights
from bitnet_ref.backends.cpu.backend import CythonBackend
from bitnet_ref.errors import ConfigError
from bitnet_ref.families.blocks import BLOCK_TYPES, int8_weights
from bitnet_ref.reference.weights import DenseWeight

TOKENS = list(range(3, 30))


def in_float32(weights):
    """The same weights, matrices in blocks widened."""
    layers = [
        replace(w, **{name: DenseWeight(each.array.astype(np.float32), each.bias) for name, each in w.linears()})
        for w in weights.layers
    ]
    return replace(weights, layers=tuple(layers))


@pytest.mark.sample(3)
@pytest.mark.parametrize("kind", BLOCK_TYPES)
def test_blocks_stay_as_they_are_stored(kind, tmp_path):
    """Rows in the converter's order of heads among them; the logits are those of the widened matrices, to the bit where
    no tiles multiply blocks."""
    path = export(write_family(tmp_path / "hf", FAMILIES["llama"]), tmp_path / "x.gguf", "f32")
    parts = {f"blk.{i}.{name}.weight": random_blocks(kind, rng(i), 256, 256) for i in (0, 1) for name in ("attn_q",)}
    tensors = {name: (w.shape, kind, w.stored.reshape(-1)) for name, w in parts.items()}
    path = changed(tmp_path / "y.gguf", path, tensors=tensors)
    for backend in ("numpy", "cython"):
        model = bitnet_ref.load(path, backend=backend)
        w = model.weights.layers[1].q_proj
        assert isinstance(w, DenseWeight)
        assert (w.block_type, w.nbytes) == (kind, 256 * 256 // BLOCK_TYPES[kind].values * BLOCK_TYPES[kind].nbytes)
        wide = type(model)(model.config, in_float32(model.weights), model.backend)
        for tokens in (TOKENS, TOKENS[:1]):
            by_tiles = backend == "cython" and model.backend.simd == "amx" and kind != "Q6_K"
            expected = wide.logits(tokens)
            allowed = 1e-3 if by_tiles else 0  # scores of hundreds, of random blocks, make much of a last bit
            np.testing.assert_allclose(model.logits(tokens), expected, rtol=0, atol=allowed)
    stored = bitnet_ref.load(path, backend="cython", prepared=True)
    again = bitnet_ref.load(path, backend="cython", prepared=True)
    assert again.weights.layers[0].q_proj.block_type == kind
    np.testing.assert_array_equal(again.logits(TOKENS), stored.logits(TOKENS))
    np.testing.assert_array_equal(again.logits(TOKENS), model.logits(TOKENS))


def test_dense_int8(backend_name):
    folder, tokens = GOLDEN / "llama-dense", golden("llama-dense")["tokens"]
    stored = bitnet_ref.load(folder, backend=backend_name)
    if backend_name == "cupy":
        with pytest.raises(ConfigError, match="float32"):
            bitnet_ref.load(folder, backend=backend_name, dense="int8")
        return
    model = bitnet_ref.load(folder, backend=backend_name, dense="int8")
    assert {w.block_type for name, w in model.weights.linears()} == {"Q8_0"}
    assert model.weights.nbytes < 0.6 * stored.weights.nbytes or stored.weights.embedding.dtype == np.float32
    exact, logits = stored.logits(tokens), model.logits(tokens)
    assert 0 < np.abs(logits - exact).max() < 0.05 * np.abs(exact).max()
    late = type(stored)(stored.config, int8_weights(plain_weights(stored.weights)), stored.backend).on(stored.backend)
    np.testing.assert_array_equal(late.logits(tokens), logits)


def test_dense_int8_is_for_dense_models(tmp_path):
    with pytest.raises(ConfigError, match="ternary") as caught:
        bitnet_ref.load(write_checkpoint(tmp_path / "hf", BITNET), dense="int8")
    assert caught.value.field == "dense"
    with pytest.raises(ConfigError, match="int8"):
        bitnet_ref.load("storyteller", dense="int4")


def test_dense_linears_that_numpy_computes_are_logged(caplog):
    model = bitnet_ref.load(GOLDEN / "llama-dense", backend="numpy")
    layers = tuple(replace(w, up_proj=replace(w.up_proj, wide=True)) for w in model.weights.layers)
    with caplog.at_level(logging.WARNING, "bitnet_ref"):
        CythonBackend(threads=1).prepare_model(replace(model.weights, layers=layers), model.config)
    assert caplog.text.count("NumPy computes") == 1
    assert "up_proj" in caplog.text
