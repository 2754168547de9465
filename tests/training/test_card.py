"""Training on a card's arrays, without a card: every step with arrays that refuse what CuPy refuses."""

import importlib

import numpy as np
import pytest
from card_array import NAMES, CardArray, CardModule, from_cupy
from helpers import rng
from safetensors.numpy import load_file
from test_trainer import BITNET, folder_of, golden_of, save_random
from test_training_run import config as run_file
from test_training_run import rows_of, start

import bitnet_ref
from bitnet_ref.backends import cuda
from bitnet_ref.crossval.training_step import check_training
from bitnet_ref.errors import BackendUnavailable, NumericsError
from bitnet_ref.training import Trainer, trainer
from bitnet_ref.training.distil import Distillation

QUANTIZATION = {"quant_method": "bitnet", "linear_class": "autobitlinear", "quantization_mode": "online"}
MODELS = {
    "bitnet": (BITNET, {}),
    "silu": (BITNET, {"hidden_act": "silu"}),
    "dense": ("llama-dense", {}),
    "window, biases": ("llama-dense", {"model_type": "mistral", "sliding_window": 7, "attention_bias": True}),
    "a norm per projection": ("llama-dense", {"quantization_config": QUANTIZATION | {"use_rms_norm": True}}),
    "qwen3, gelu": ("llama-dense", {"model_type": "qwen3", "hidden_act": "gelu_pytorch_tanh", "head_dim": 8}),
}


config = run_file  # the fixture


@pytest.fixture
def card(monkeypatch):
    monkeypatch.setattr(trainer, "available_backends", lambda: dict.fromkeys(trainer.BACKENDS))
    monkeypatch.setattr(trainer, "card_arrays", lambda: CardModule)


def assert_equal_steps(on_card, on_host, tokens):
    """The same functions on the same values: the same bits."""
    for batch in tokens:
        (loss, gradients), (expected_loss, expected) = (t.loss_and_gradients(batch) for t in (on_card, on_host))
        assert loss == expected_loss
        assert set(gradients) == set(expected)
        for name, gradient in gradients.items():
            assert isinstance(gradient, CardArray)
            np.testing.assert_array_equal(gradient.get(), expected[name], err_msg=name)
        assert on_card.apply(gradients) == on_host.apply(expected)
    for name, master in on_card.masters.items():
        np.testing.assert_array_equal(master.get(), on_host.masters[name], err_msg=name)
    assert all(isinstance(moment, CardArray) for moment in on_card.optimizer.m.values())
    assert on_card.loss(tokens[0]) == on_host.loss(tokens[0])
    np.testing.assert_array_equal(on_card.logits(tokens[0][0]), on_host.logits(tokens[0][0]))


@pytest.mark.sample(6)
@pytest.mark.parametrize("mix", [1.0, 0.5])
@pytest.mark.parametrize("family", MODELS)
def test_steps(card, family, mix, tmp_path):
    case, changes = MODELS[family]
    folder = folder_of(case, tmp_path / "m", **changes)
    save_random(folder)
    optimizer = "muon" if mix == 1.0 else "adamw"
    options = {"max_norm": 0.5, "optimizer": optimizer, "backward_dtype": "bfloat16" if family == "silu" else "float32"}
    on_card, on_host = (Trainer.from_folder(folder, backend=name, **options) for name in ("cupy", "numpy"))
    on_card.mix = on_host.mix = mix
    assert_equal_steps(on_card, on_host, [rng(i).integers(0, 96, (2, 20)) for i in range(2)])
    on_card.save(tmp_path / "card")
    on_host.save(tmp_path / "host")
    pair = [load_file(tmp_path / name / "model.safetensors") for name in ("card", "host")]
    assert all(np.array_equal(pair[0][name], pair[1][name]) for name in pair[1])


def test_a_teacher(card, tmp_path):
    teacher = bitnet_ref.load(folder_of(BITNET, tmp_path / "teacher"), backend="numpy")
    lesson = Distillation(teacher, 0.7, 3.0, relations_weight=2.0, relation_heads=2, layer=0)
    folder = folder_of("llama-dense", tmp_path / "student")
    pair = (Trainer.from_folder(folder, backend=name, distillation=lesson) for name in ("cupy", "numpy"))
    assert_equal_steps(*pair, golden_of(BITNET)["tokens"][:2, :2, :16])


@pytest.mark.thorough
def test_a_run_goes_on_from_its_checkpoint(card, config, tmp_path):
    class Killed(Exception):
        pass

    def kill(row):
        if row.step == 6:
            raise Killed

    whole = start(config, tmp_path / "whole", backend="cupy")
    whole.run()
    with pytest.raises(Killed):
        start(config, tmp_path / "run", backend="cupy").run(kill)
    resumed = start(config, tmp_path / "run", backend="cupy", resume=True)
    assert resumed.step == 4
    assert all(isinstance(moment, CardArray) for moment in resumed.trainer.optimizer.v.values())
    resumed.run()
    assert rows_of(tmp_path / "run") == rows_of(tmp_path / "whole")


def test_nan_is_an_error(card, tmp_path):
    on_card = Trainer.from_folder(folder_of(BITNET, tmp_path / "m"), backend="cupy")
    tokens = golden_of(BITNET)["tokens"][0]
    on_card.masters["model.norm.weight"][0] = np.nan
    with pytest.raises(NumericsError, match=r"the gradient of .* holds NaN"):
        on_card.step(tokens)
    on_card.masters["model.embed_tokens.weight"][int(tokens[0][3])] = np.nan
    with pytest.raises(NumericsError, match="token 3 holds NaN"):
        on_card.loss(tokens)


def test_on_a_card():
    if cuda.emulation_wanted() or bitnet_ref.available_backends()["cupy"] is not None:
        pytest.skip("there is no card")
    assert check_training("cupy", bitnet_ref.load(backend="numpy").config)[1] is None


def test_without_a_card(tmp_path, monkeypatch):
    monkeypatch.delenv("BITNET_REF_CUDA", raising=False)
    if bitnet_ref.available_backends()["cupy"] is None:
        pytest.skip("there is a card")
    with pytest.raises(BackendUnavailable, match=r"backend 'cupy' cannot run here: .*"):
        Trainer.from_folder(folder_of(BITNET, tmp_path / "m"), backend="cupy")


def test_the_list_is_cupys():
    try:
        cupy = importlib.import_module("cupy")
    except ImportError:
        pytest.skip("CuPy is not installed")
    if cupy.__version__ == NAMES["cupy"]:
        assert from_cupy(cupy) == NAMES


def test_what_cupy_refuses():
    on_card = CardArray(np.ones((2, 3), np.float32))
    for wrong in (
        lambda: np.asarray(on_card),
        lambda: on_card + np.ones(3, np.float32),
        lambda: np.concatenate([on_card, np.ones((2, 3), np.float32)]),
        lambda: on_card[np.array([0])],
        lambda: on_card.sum(initial=0),
        lambda: np.exp(on_card, where=True),
        lambda: np.add.reduceat(on_card, [0], axis=0),  # CuPy has it, by differences of float32 sums
        lambda: np.linalg.norm(on_card),
    ):
        with pytest.raises(TypeError):
            wrong()
    with pytest.raises(TypeError):
        on_card[:] = np.ones((2, 3), np.float32)
