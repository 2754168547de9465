"""bitnet_ref.api: what `load` and `Model` accept, and how they refuse the rest."""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from helpers import BITNET, GOLDEN, TINY, golden, model, tiny_tensors, write_checkpoint

import bitnet_ref
from bitnet_ref.errors import (
    BackendUnavailable,
    BitNetRefError,
    ConfigError,
    FormatError,
    GenerationError,
    TokenizerError,
)
from bitnet_ref.formats.open import shipped_models

# -- load --------------------------------------------------------------------------------------------------------------


def test_public_names():
    names = {"Engine", "EngineConfig", "Model", "__version__", "available_backends", "load", "load_engine"}
    assert set(bitnet_ref.__all__) == names
    assert all(hasattr(bitnet_ref, name) for name in names)
    assert set(bitnet_ref.available_backends()) >= {"numpy", "cython", "cupy"}
    assert bitnet_ref.available_backends()["numpy"] is None


def test_the_shipped_model_is_the_default():
    assert shipped_models() == ["storyteller"]
    m = bitnet_ref.load()
    assert m.path.name == "storyteller"
    assert "storyteller" in repr(m)
    assert m.backend.name in repr(m)


def test_a_file_of_that_name_goes_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_checkpoint(tmp_path / "storyteller", BITNET)
    assert bitnet_ref.load("storyteller", backend="numpy").config.vocab_size == BITNET["vocab_size"]


@pytest.mark.parametrize("as_type", [str, Path, os.fspath])
def test_paths_as_strings_and_path_objects(tmp_path, as_type):
    folder = write_checkpoint(tmp_path, BITNET)
    assert bitnet_ref.load(as_type(folder), backend="numpy").config.hidden_size == 16
    assert bitnet_ref.load(as_type(folder / "model.safetensors"), backend="numpy").path == folder / "model.safetensors"


@pytest.mark.parametrize(
    "path", ["no-such-model", "storyteller/", "./storyteller", "a/storyteller", "x" * 5000, "a\0b", "", "hf:some/model"]
)
def test_paths_that_lead_nowhere(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BitNetRefError) as caught:
        bitnet_ref.load(path)
    assert isinstance(caught.value, FormatError | ConfigError)
    if path == "no-such-model":
        assert "storyteller" in str(caught.value)


@pytest.mark.parametrize("path", [None, 3, b"storyteller", ["storyteller"], 1.5])
def test_models_of_the_wrong_type(path):
    with pytest.raises((FormatError, TypeError)):
        bitnet_ref.load(path)


def test_other_formats(tmp_path):
    for name in ("model.bin", "model.pt", "config.json", "model"):
        (tmp_path / name).write_bytes(b"something")
        with pytest.raises(FormatError) as caught:
            bitnet_ref.load(tmp_path / name)
        assert caught.value.path == str(tmp_path / name)


def test_a_folder_without_a_config(tmp_path):
    with pytest.raises(ConfigError, match="no such file") as caught:
        bitnet_ref.load(tmp_path)
    assert caught.value.path == str(tmp_path / "config.json")


def test_a_file_that_may_not_be_read(tmp_path):
    if os.geteuid() == 0:
        pytest.skip("root may read every file")
    folder = write_checkpoint(tmp_path, BITNET)
    (folder / "model.safetensors").chmod(0)
    with pytest.raises(FormatError, match="Permission denied"):
        bitnet_ref.load(folder)


def test_unknown_backends_and_dtypes():
    with pytest.raises(BackendUnavailable, match="auto, numpy, cython, cupy"):
        bitnet_ref.load(backend="cuda")
    with pytest.raises(BitNetRefError, match="float32"):
        bitnet_ref.load(dtype="int8")
    with pytest.raises(BitNetRefError, match="float64"):
        bitnet_ref.load(dtype="float64", backend="cython")


def test_an_unquantised_bitnet_must_be_asked_for(tmp_path):
    config = {key: value for key, value in BITNET.items() if key != "quantization_config"}
    tensors = tiny_tensors({**TINY, "tie_word_embeddings": True})
    for i in range(2):
        tensors[f"model.layers.{i}.self_attn.attn_sub_norm.weight"] = np.ones(16, np.float32)
        tensors[f"model.layers.{i}.mlp.ffn_sub_norm.weight"] = np.ones(24, np.float32)
    folder = write_checkpoint(tmp_path, config, tensors)
    with pytest.raises(ConfigError, match="allow_unquantized"):
        bitnet_ref.load(folder, backend="numpy")
    m = bitnet_ref.load(folder, backend="numpy", allow_unquantized=True)
    assert m.logits([1, 2]).shape == (2, 40)


# -- tokens ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [[1, 5, 9], (1, 5, 9), np.array([1, 5, 9], np.int32), np.array([1, 5, 9], np.uint8)])
def test_token_ids_of_any_integer_type(tokens):
    m = model(GOLDEN / "llama-dense")
    np.testing.assert_array_equal(m.logits(tokens), m.logits([1, 5, 9]))


BAD_TOKENS = [
    *(
        [],
        [[1, 2]],
        [[1], [2, 3]],
        [1.0, 2.0],
        ["1"],
        "12",
        None,
        5,
        [True, False],
        [None],
        [1, -1],
        [320],
        [1, 10**30],
    ),
    *(np.zeros((2, 2), np.int64), np.array([], np.int64), [2**63], {1, 2}, {1: 2}),
]


@pytest.mark.parametrize("tokens", BAD_TOKENS, ids=lambda value: repr(value)[:16])
def test_token_ids_that_are_none(tokens):
    m = model(GOLDEN / "llama-dense")
    for run in (m.logits, m.run_with_cache):
        with pytest.raises(GenerationError):
            run(tokens)


def test_the_bad_token_is_named():
    with pytest.raises(GenerationError, match=r"token id 320 at index 2 .* vocabulary of 320"):
        model(GOLDEN / "llama-dense").logits([1, 2, 320])


def test_the_context_is_the_limit(tmp_path):
    m = bitnet_ref.load(write_checkpoint(tmp_path, {**BITNET, "max_position_embeddings": 6}), backend="numpy")
    assert m.logits([1] * 6).shape == (6, 40)
    with pytest.raises(GenerationError, match="7 tokens do not fit the model's context of 6"):
        m.logits([1] * 7)


# -- the model ---------------------------------------------------------------------------------------------------------


def test_threads_may_share_a_model():
    m = model("storyteller", "numpy")
    prompts = [[1, 3797, 537, n] for n in range(12)]
    expected = [m.logits(prompt) for prompt in prompts]
    with ThreadPoolExecutor(4) as pool:
        for got, want in zip(pool.map(m.logits, prompts), expected, strict=True):
            np.testing.assert_array_equal(got, want)


def test_dtype_of_the_logits():
    tokens = golden("bitnet-packed-offline")["tokens"]
    assert model(GOLDEN / "bitnet-packed-offline").logits(tokens).dtype == np.float32
    assert model(GOLDEN / "bitnet-packed-offline", dtype="float64").logits(tokens).dtype == np.float64


def test_a_model_without_a_folder_or_a_tokenizer(tmp_path):
    m = model(GOLDEN / "llama-dense")
    with pytest.raises(TokenizerError):
        _ = bitnet_ref.Model(m.config, m.weights, m.backend).tokenizer
    with pytest.raises(TokenizerError):
        _ = m.tokenizer
    assert "in memory" in repr(bitnet_ref.Model(m.config, m.weights, m.backend))
