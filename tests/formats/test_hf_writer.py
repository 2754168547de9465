"""formats.hf_writer: what is written reads back as the same model, to the bit, whatever the source stored."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from helpers import DATA, GOLDEN, GOLDEN_CASES

from bitnet_ref.errors import ConfigError
from bitnet_ref.formats.checkpoint import parts
from bitnet_ref.formats.hf.config import parse_hf_config
from bitnet_ref.formats.hf.writer import hf_config_json, write_hf
from bitnet_ref.formats.open import ASSETS, open_checkpoint
from bitnet_ref.reference.weights import DenseWeight, TernaryWeight


def as_arrays(part):
    """Everything that a part of a model consists of."""
    if isinstance(part, np.ndarray):
        return [part]
    if isinstance(part, DenseWeight):
        return [part.array] + [part.bias] * (part.bias is not None)
    assert isinstance(part, TernaryWeight)
    norm = [] if part.input_norm is None else [part.input_norm.weight, np.array(part.input_norm.eps)]
    return [part.packed, part.w_dequant_scale] + [part.bias] * (part.bias is not None) + norm


def assert_same_model(a, b):
    ours, theirs = dict(parts(a)), dict(parts(b))
    assert list(ours) == list(theirs)
    for name in ours:
        for x, y in zip(as_arrays(ours[name]), as_arrays(theirs[name]), strict=True):
            assert x.dtype == y.dtype, name
            np.testing.assert_array_equal(x, y, err_msg=name)
    same = {"model_type": "", "quantization": None}  # who wrote it, and how it is stored
    assert replace(a.config, **same) == replace(b.config, **same)


@pytest.mark.parametrize("kind", ["hf-packed", "hf-bf16"])
@pytest.mark.parametrize("case", GOLDEN_CASES)
def test_a_written_folder_is_the_same_model(case, kind, tmp_path):
    with open_checkpoint(GOLDEN / case) as source:
        if kind == "hf-packed" and case == "onebitllm-silu":
            with pytest.raises(ConfigError, match="54 outputs"):
                write_hf(source, tmp_path, kind)
            return
        write_hf(source, tmp_path, kind)
    with open_checkpoint(GOLDEN / case) as source, open_checkpoint(tmp_path) as written:
        assert_same_model(source, written)
        if source.config.quantization is not None and kind == "hf-packed":
            assert written.kind == "hf-packed"


def test_masters_stay_masters(tmp_path):
    with open_checkpoint(GOLDEN / "bitnet-bf16-online") as source:
        write_hf(source, tmp_path, "hf-bf16")
    with open_checkpoint(GOLDEN / "bitnet-bf16-online") as source, open_checkpoint(tmp_path) as written:
        name = "blocks.1.mlp.down_proj"
        np.testing.assert_array_equal(source.master(name), written.master(name))


def test_the_bytes_are_reproducible(tmp_path):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        with open_checkpoint(GOLDEN / "llama-packed-bitlinear") as source:
            write_hf(source, tmp_path / folder, "hf-packed")
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_the_tokenizer_travels(tmp_path):
    with open_checkpoint(ASSETS / "storyteller") as source:
        write_hf(source, tmp_path, "hf-packed")
        files = source.tokenizer_files()
    assert "tokenizer.model" in files
    assert all((tmp_path / name).read_bytes() == data for name, data in files.items())


def test_gemma3_has_a_window_even_where_no_layer_uses_it():
    """transformers computes its window from the number before it looks at the layers."""
    raw = json.loads((DATA / "families" / "embedding-gemma3" / "config.json").read_text())
    raw["layer_types"] = ["full_attention"] * raw["num_hidden_layers"]
    config = parse_hf_config(raw, Path("config.json"), allow_unquantized=True)
    assert config.sliding_window is None
    assert hf_config_json(config, config.quantization)["sliding_window"] == config.max_position_embeddings
