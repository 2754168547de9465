"""notebooks/tinybitnet.py computes what the package computes: losses, gradients, masters, integers, logits, bytes."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from helpers import rng

import bitnet_ref
from bitnet_ref.formats.names import hf_module
from bitnet_ref.reference.config import ModelConfig, QuantizationConfig, RopeConfig
from bitnet_ref.reference.quantization import quantize_activations, quantize_weights
from bitnet_ref.reference.weights import linear_name
from bitnet_ref.training import Trainer
from bitnet_ref.training.optimizer import Schedule

FILE = Path(__file__).parents[2] / "notebooks" / "tinybitnet.py"
V = 61


@pytest.fixture(scope="module")
def tiny():
    spec = importlib.util.spec_from_file_location("tinybitnet", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def masters(tiny):
    """tinybitnet's initial masters, with norms that are not 1."""
    w = tiny.new_masters(V, rng(1))
    for name in [name for name in w if w[name].ndim == 1]:
        w[name] += rng(1).normal(scale=0.1, size=w[name].shape).astype(np.float32)
    return w


def hub_name(name):
    """tinybitnet's name of a master -> the package's"""
    layer, _, short = name.rpartition(".")
    if short == "embed":
        return "model.embed_tokens.weight"
    if layer:
        short = linear_name(int(layer), short) if short.endswith("proj") else f"blocks.{layer}.{short}"
    return f"{hf_module(short)}.weight"


def trainer_of(tiny, masters, **settings):
    config = ModelConfig(
        model_type="bitnet",
        vocab_size=V,
        hidden_size=tiny.D,
        intermediate_size=tiny.F,
        num_hidden_layers=tiny.LAYERS,
        num_attention_heads=tiny.H,
        num_key_value_heads=tiny.H,
        head_dim=tiny.D // tiny.H,
        activation="relu2",
        norm_eps=tiny.EPS,
        max_position_embeddings=tiny.T,
        tie_word_embeddings=True,
        sub_norms=True,
        rope=RopeConfig(tiny.THETA),
        quantization=QuantizationConfig("autobitlinear", "online"),
    )
    return Trainer(config, {hub_name(name): master for name, master in masters.items()}, **settings)


def distance(a, b):
    return np.linalg.norm(a - b) / np.linalg.norm(b)


def test_losses_gradients_and_steps(tiny, masters):
    tokens = [rng(step).integers(0, V, (3, tiny.T + 1)) for step in range(3)]
    trainer = trainer_of(tiny, masters, schedule=Schedule(lr=1e-3, weight_decay=tiny.DECAY))
    loss, gradients = tiny.loss_and_gradients(masters, tokens[0])
    expected_loss, expected = trainer.loss_and_gradients(tokens[0])
    assert loss == pytest.approx(expected_loss, abs=1e-6)
    assert {hub_name(name) for name in gradients} == set(expected)
    for name, gradient in gradients.items():
        assert distance(gradient, expected[hub_name(name)]) < 1e-5, name
    m, v = {}, {}
    for step, batch in enumerate(tokens, start=1):
        loss, gradients = tiny.loss_and_gradients(masters, batch)
        tiny.adamw(masters, gradients, m, v, step, 1e-3, tiny.DECAY)
        assert loss == pytest.approx(trainer.step(batch), abs=1e-3)  # Adam's first steps enlarge rounding
    for name, master in masters.items():
        assert distance(master, trainer.masters[hub_name(name)]) < 1e-2, name


def test_the_packed_model_is_the_package_s(tiny, masters, tmp_path, monkeypatch):
    """The same bytes and scales, the same integers in every layer, the same logits."""
    trainer_of(tiny, masters).save(tmp_path / "model")
    model = bitnet_ref.load(tmp_path / "model", backend="numpy")
    packed = {name: (tiny.pack(w_t), s) for name, (w_t, s) in tiny.round_all(masters).items()}
    linears = dict(model.weights.linears())
    for name, (data, s) in packed.items():
        layer, short = name.split(".")
        linear = linears[linear_name(int(layer), short)]
        assert np.array_equal(data, linear.packed), name
        assert s == linear.w_dequant_scale, name
    integers = []
    monkeypatch.setattr(tiny, "absmax", lambda x, absmax=tiny.absmax: integers.append(absmax(x)[0]) or absmax(x))
    tokens = rng(7).integers(0, V, tiny.T)
    w_t = {name: (tiny.unpack(data), s) for name, (data, s) in packed.items()}
    logits, _ = tiny.Network(masters, w_t).logits(tokens[None])
    expected, cache = model.run_with_cache(tokens)
    names = [f"{part}.hook_x_int8" for part in ("attn.q_proj", "attn.o_proj", "mlp.gate_proj", "mlp.down_proj")]
    names = [f"blocks.{layer}.{name}" for layer in range(tiny.LAYERS) for name in names]
    for name, x_q in zip(names, integers, strict=True):
        assert np.array_equal(x_q, cache[name]), name
    assert np.abs(logits - expected).max() < 2e-5


def test_ties_and_zeros_are_rounded_as_the_package_does(tiny):
    for w in ([[0.5, -0.5, 1.5, -1.5, 1.0, -1.0]], [[0.0, 0.0]]):  # the first has scale 1
        w_t, s = tiny.ternary(np.array(w, np.float32))
        expected, expected_s = quantize_weights(np.array(w, np.float32))
        assert np.array_equal(w_t, expected)
        assert s == expected_s
    x = np.array([[127.0, 0.5, 1.5, -0.5, -2.5], [0.0] * 5], np.float32)
    for mine, expected in zip(tiny.absmax(x), quantize_activations(x), strict=True):
        assert np.array_equal(mine, expected)


def test_pack_is_undone_by_unpack(tiny):
    w_t = rng(3).integers(-1, 2, (8, 12)).astype(np.float32)
    assert np.array_equal(tiny.unpack(tiny.pack(w_t)), w_t)


def test_it_learns_and_writes(tiny, monkeypatch):
    monkeypatch.setattr(tiny, "T", 16)
    masters, m, v = tiny.new_masters(8, rng(2)), {}, {}
    tokens = np.tile(np.arange(8), (2, 3))[:, :17]
    for step in range(1, 31):
        loss, gradients = tiny.loss_and_gradients(masters, tokens)
        tiny.adamw(masters, gradients, m, v, step, 2e-3, 0.1)
    assert loss < 0.1
    packed = {name: (tiny.pack(w_t), s) for name, (w_t, s) in tiny.round_all(masters).items()}
    assert list(tiny.write(masters, packed, list(range(8)), 8, rng(1), temperature=0.1)) == list(range(8))


def test_the_command_of_the_readme(tiny, monkeypatch, capsys):
    """`python notebooks/tinybitnet.py`, of a smaller model and few steps."""
    for name, value in {"D": 16, "F": 32, "LAYERS": 1, "T": 16, "STEPS": 10}.items():
        monkeypatch.setattr(tiny, name, value)
    monkeypatch.setattr(sys, "argv", [str(FILE)])
    tiny.main()
    first, *steps, packed, _, text = capsys.readouterr().out.split("\n", 14)
    assert first.startswith("alice.txt: ")
    assert [line.split()[1] for line in steps] == [str(number) for number in range(11)]
    assert "packed into" in packed
    assert text.startswith(tiny.PROMPT)
    assert len(text) == len(tiny.PROMPT) + 500


@pytest.mark.parametrize("letters", [None, 0, 640])
def test_a_text_that_is_too_short_or_missing_ends_in_one_line(letters, tiny, tmp_path, monkeypatch):
    path = tmp_path / "short.txt"
    if letters is not None:
        path.write_text("a" * letters, encoding="utf-8")
    monkeypatch.setattr(sys, "argv", [str(FILE), str(path)])
    with pytest.raises(SystemExit, match="some 700 are needed"):
        tiny.main()


def test_it_needs_numpy_alone_and_is_short():
    source = FILE.read_text(encoding="utf-8")
    assert sum(map(bool, source.splitlines())) <= 200  # four screens
    code = f"import sys, runpy; runpy.run_path({str(FILE)!r}); print('bitnet_ref' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "False"
