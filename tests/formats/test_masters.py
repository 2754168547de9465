"""`convert --to hf-online`: bfloat16 masters that quantise to the planes and the scale of a model that has none."""

import ml_dtypes
import numpy as np
import pytest
from click.testing import CliRunner
from helpers import GOLDEN
from safetensors.numpy import load_file, save_file

import bitnet_ref
from bitnet_ref.cli import cli
from bitnet_ref.errors import ConfigError
from bitnet_ref.formats.convert import convert, prove
from bitnet_ref.formats.hf.masters import MEAN_ERROR, _floor, masters_of
from bitnet_ref.formats.open import open_checkpoint
from bitnet_ref.formats.packing import split_ternary
from bitnet_ref.reference.quantization import quantize_weights

PACKED = GOLDEN / "bitnet-packed-offline"


def drawn(shape, density, seed=0):
    shares = [density / 2, 1 - density, density / 2]
    return np.random.default_rng(seed).choice([-1, 0, 1], shape, p=shares).astype(np.int8)


@pytest.mark.parametrize("scale", [1e-5, 0.0123456, 0.7, 1.0, 31415.9])
@pytest.mark.parametrize("density", [0.05, 0.4, 0.67, 0.95])
@pytest.mark.parametrize("shape", [(8, 16), (64, 96)])
def test_masters_quantise_to_the_same_planes_and_scale(shape, density, scale):
    w_t = drawn(shape, density)
    masters = masters_of("q_proj", w_t, np.float32(scale))
    assert masters.dtype == ml_dtypes.bfloat16
    again, mean = quantize_weights(masters.astype(np.float32))
    np.testing.assert_array_equal(again, w_t)
    assert abs(float(mean) / float(np.float32(scale)) - 1) <= MEAN_ERROR
    assert split_ternary(masters.astype(np.float32)) is None  # else a reader would take the size for the scale
    sizes = np.abs(masters.astype(np.float64))
    step = sizes.max() - float(np.nextafter(masters.max(), ml_dtypes.bfloat16(0)))
    assert sizes[w_t == 0].sum() < step + 1e-6 * scale  # what the others cannot have together


def test_a_size_that_bfloat16_has_is_no_ternary_matrix():
    w_t = np.tile(np.array([[1, 0, -1, 0]], dtype=np.int8), (8, 4))
    masters = masters_of("q_proj", w_t, np.float32(0.5)).astype(np.float32)
    assert np.abs(masters).max() == 1.0  # half of the weights are not zero
    assert split_ternary(masters) is None
    assert quantize_weights(masters)[1] == np.float32(0.5)


def test_what_one_weight_cannot_have_is_shared_by_many_zeros():
    """Each stays below half of the scale, and so rounds to zero."""
    w_t = np.zeros((64, 96), dtype=np.int8)
    w_t[3, 5] = -1
    masters = masters_of("q_proj", w_t, np.float32(0.3)).astype(np.float32)
    np.testing.assert_array_equal(quantize_weights(masters)[0], w_t)
    assert (masters > 0).sum() > 10


@pytest.mark.parametrize("value", [1.0, 1.0078125, 1.0078125 - 2e-16, 1.0078125 + 1e-9, 0.3, 3e38])
def test_the_largest_bfloat16_that_is_no_larger(value):
    floor = _floor(value)
    above = np.nextafter(ml_dtypes.bfloat16(floor), ml_dtypes.bfloat16(np.inf))
    assert float(ml_dtypes.bfloat16(floor)) == floor <= value < float(above)


@pytest.mark.parametrize(
    ("w_t", "scale", "reason"),
    [
        (np.zeros((4, 8), dtype=np.int8), 0.5, "all its weights are zero"),
        (drawn((8, 16), 0.5), 9e-6, "below 1e-05"),
        (drawn((8, 16), 1.0), 0.7, "none of them zero, have the mean"),
    ],
)
def test_what_has_no_masters_is_named(w_t, scale, reason):
    with pytest.raises(ConfigError, match=rf"blocks\.3\.mlp\.down_proj has no bfloat16 masters: .*{reason}"):
        masters_of("blocks.3.mlp.down_proj", w_t, np.float32(scale))


def test_a_model_is_written_with_masters_and_proven(tmp_path):
    proof = convert(PACKED, tmp_path / "online", "hf-online")
    assert proof.exact or proof.scales.largest <= MEAN_ERROR
    assert proof.planes.equal == proof.planes.total == 14
    tensors = load_file(tmp_path / "online" / "model.safetensors")
    assert not [name for name in tensors if name.endswith("weight_scale")]
    assert tensors["model.layers.0.mlp.down_proj.weight"].dtype == ml_dtypes.bfloat16
    tokens = [1, 5, 9, 30]
    models = [bitnet_ref.load(path, backend="numpy") for path in (PACKED, tmp_path / "online")]
    logits = [model.logits(tokens) for model in models]
    np.testing.assert_allclose(logits[1], logits[0], rtol=1e-5, atol=1e-5 * np.abs(logits[0]).max())


@pytest.mark.parametrize("change", ["scale", "plane"])
def test_masters_of_another_scale_or_plane_are_no_proof(change, tmp_path):
    convert(PACKED, tmp_path / "online", "hf-online")
    path = tmp_path / "online" / "model.safetensors"
    tensors, name = load_file(path), "model.layers.0.mlp.down_proj.weight"
    w = tensors[name].copy()
    row = w.reshape(-1)
    largest = int(np.argmax(np.abs(row.astype(np.float32))))
    if change == "scale":
        row[largest] = row[largest] * ml_dtypes.bfloat16(1.25)  # moves the mean, and no plane
    else:
        row[largest] = -row[largest]
    save_file({**tensors, name: w}, path, {"format": "pt"})
    with open_checkpoint(PACKED) as source, open_checkpoint(tmp_path / "online") as written:
        proof = prove(source, written, compute=False)
    assert not proof.holds
    assert f"({change})" in proof.verdict or change == "plane"
    assert (proof.planes.equal < proof.planes.total) == (change == "plane")


def test_masters_that_are_there_stay(tmp_path):
    source = GOLDEN / "bitnet-bf16-online"
    convert(source, tmp_path / "online", "hf-online")
    name = "model.layers.0.mlp.down_proj.weight"
    written = load_file(tmp_path / "online" / "model.safetensors")[name]
    np.testing.assert_array_equal(written, load_file(source / "model.safetensors")[name])


def test_a_dense_model_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="no BitLinears"):
        convert(GOLDEN / "llama-dense", tmp_path / "online", "hf-online")


def test_hf_bf16_says_that_it_holds_no_masters(tmp_path):
    run = CliRunner().invoke(cli, ["convert", str(PACKED), str(tmp_path / "a"), "--to", "hf-bf16"])
    assert "no masters" in run.output
    assert "hf-online" in run.output
    for source, target in ((GOLDEN / "bitnet-bf16-online", "hf-bf16"), (PACKED, "hf-online")):
        run = CliRunner().invoke(cli, ["convert", str(source), str(tmp_path / target), "--to", target])
        assert run.exit_code == 0, run.output
        assert "no masters" not in run.output
