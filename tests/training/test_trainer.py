"""The trainer: against torch and transformers (tests/data/training), and against the packed model that it saves."""

import inspect
import json
import math
import shutil
from dataclasses import replace

import numpy as np
import pytest
from helpers import DATA, rng
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

import bitnet_ref
from bitnet_ref import families
from bitnet_ref.crossval.tolerances import BFLOAT16_GRADIENTS
from bitnet_ref.errors import BackendUnavailable, ConfigError, FormatError, NumericsError, ShapeError
from bitnet_ref.training import Schedule, Trainer, ops
from bitnet_ref.training.distil import Distillation
from bitnet_ref.training.optimizer import clip_gradients, global_norm
from bitnet_ref.training.trainer import TrainerOptions

BACKENDS = [
    pytest.param(name, marks=pytest.mark.skipif(bool(reason), reason=str(reason)))
    for name, reason in bitnet_ref.available_backends().items()
    if name in ("numpy", "cython")
]
CASES = sorted(path.name for path in (DATA / "training").iterdir())
BITNET = "bitnet-relu2"


def folder_of(case, folder, **config):
    """The case's initial masters as a hub folder; `config`: keys of config.json to change."""
    folder.mkdir(exist_ok=True)
    facts = json.loads((DATA / "training" / case / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(facts | config))
    shutil.copy(DATA / "training" / case / "initial.safetensors", folder / "model.safetensors")
    return folder


def golden_of(case):
    return load_file(DATA / "training" / case / "golden.safetensors")


def distance(a, b):
    return np.linalg.norm(a - b) / np.linalg.norm(b)


@pytest.fixture(params=BACKENDS)
def bitnet(request, tmp_path):
    return Trainer.from_folder(folder_of(BITNET, tmp_path / BITNET), backend=request.param)


@pytest.mark.sample(2)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", CASES)
def test_losses_gradients_and_masters_of_torch(case, backend, tmp_path):
    golden, trainer = golden_of(case), Trainer.from_folder(folder_of(case, tmp_path / case), backend=backend)
    quantized = trainer.config.quantization is not None
    loss, gradients = trainer.loss_and_gradients(golden["tokens"][0])
    assert abs(loss - golden["losses"][0]) < 1e-4
    assert set(gradients) == set(trainer.masters)
    for name, gradient in gradients.items():
        expected = golden[f"grad.{name}"]
        assert distance(gradient, expected) < (1e-2 if quantized else 1e-5), name  # one int8 that rounds the other way
        assert (gradient * expected).sum() > 0.9999 * np.linalg.norm(gradient) * np.linalg.norm(expected)
    losses = [trainer.step(tokens) for tokens in golden["tokens"]]
    np.testing.assert_allclose(losses, golden["losses"], atol=5e-3 if quantized else 5e-6)
    for name, master in trainer.masters.items():
        assert distance(master, golden[f"final.{name}"]) < (1e-2 if quantized else 1e-5), name


@pytest.mark.parametrize("backend", ["numpy", "cython", "cupy"])
@pytest.mark.parametrize("case", CASES)
def test_the_packed_model_computes_what_was_trained(case, backend, tmp_path):
    """The training pass and the model that `save` writes: the same integers, floats by the contract."""
    if bitnet_ref.available_backends()[backend] is not None:
        pytest.skip(bitnet_ref.available_backends()[backend])
    golden, trainer = golden_of(case), Trainer.from_folder(folder_of(case, tmp_path / case))
    for tokens in golden["tokens"][:3]:
        trainer.step(tokens)
    trainer.save(tmp_path / "trained")
    model = bitnet_ref.load(tmp_path / "trained", backend=backend)
    tokens = golden["tokens"][3][0]
    assert np.abs(model.logits(tokens) - trainer.logits(tokens)).max() < 2e-5


def test_a_saved_folder_has_one_dtype_which_its_config_names(bitnet, tmp_path):
    bitnet.save(tmp_path / "saved")
    config = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert (config["dtype"], config["torch_dtype"]) == ("float32", "float32")
    assert {array.dtype for array in load_file(tmp_path / "saved" / "model.safetensors").values()} == {np.dtype("f4")}


def test_a_saved_folder_gives_the_same_trainer(bitnet, tmp_path):
    tokens = golden_of(BITNET)["tokens"]
    bitnet.step(tokens[0])
    bitnet.save(tmp_path / "saved")
    again = Trainer.from_folder(tmp_path / "saved")
    assert again.config == bitnet.config
    assert again.loss(tokens[1]) == bitnet.loss(tokens[1])


def test_threads_and_company_change_no_bit(bitnet):
    tokens = golden_of(BITNET)["tokens"][0]
    loss, gradients = bitnet.loss_and_gradients(tokens)
    one = Trainer(bitnet.config, bitnet.masters, threads=1, backend=bitnet.backend)
    three = Trainer(bitnet.config, bitnet.masters, threads=3, backend=bitnet.backend)
    for other in (one, three):
        other_loss, other_gradients = other.loss_and_gradients(tokens)
        assert other_loss == loss
        assert all(np.array_equal(gradients[name], other_gradients[name]) for name in gradients)
    assert bitnet.loss(tokens[::-1]) == loss
    assert bitnet.loss(tokens[:1]) == bitnet.loss([tokens[0]])


@pytest.mark.sample(6)
@pytest.mark.skipif(bool(bitnet_ref.available_backends()["cython"]), reason="the extension is not built")
@pytest.mark.parametrize("family", ["bitnet", "silu", "window", "norms"])
@pytest.mark.parametrize("simd", ["scalar", None])
def test_the_kernels_compute_what_numpy_does(family, simd, tmp_path, monkeypatch):
    """The forward pass to the bit, gradients but for the order of sums; odd sizes, several blocks of queries."""
    changes: dict = {"hidden_size": 36, "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 6}
    changes |= {"intermediate_size": 70, "vocab_size": 90, "max_position_embeddings": 200}
    if family == "silu":
        changes["hidden_act"] = "silu"
    case = BITNET if family in ("bitnet", "silu") else "llama-dense"
    quantization = {"quant_method": "bitnet", "linear_class": "autobitlinear", "quantization_mode": "online"}
    if family == "window":
        changes |= {"model_type": "mistral", "sliding_window": 70}
    if family in ("window", "norms"):
        changes["quantization_config"] = quantization | {"use_rms_norm": family == "norms"}
    folder = folder_of(case, tmp_path / "m", **changes)
    save_random(folder)
    if simd is not None:
        monkeypatch.setenv("BITNET_REF_SIMD", simd)
    numpy, cython = (Trainer.from_folder(folder, backend=name) for name in ("numpy", "cython"))
    tokens = rng(7).integers(0, 90, (2, 151))
    np.testing.assert_array_equal(cython.logits(tokens[0]), numpy.logits(tokens[0]))
    (loss, gradients), (other_loss, others) = numpy.loss_and_gradients(tokens), cython.loss_and_gradients(tokens)
    assert other_loss == loss
    for name, gradient in gradients.items():
        assert distance(others[name], gradient) < 1e-5, name
    numpy.mix = cython.mix = 0.5
    for name, gradient in numpy.loss_and_gradients(tokens)[1].items():
        assert distance(cython.loss_and_gradients(tokens)[1][name], gradient) < 1e-5, name


def test_a_backend_that_cannot_train(bitnet):
    with pytest.raises(BackendUnavailable, match="auto, numpy, cython, cupy"):
        Trainer(bitnet.config, bitnet.masters, backend="torch")
    wide = {name: w.astype(np.float64) for name, w in bitnet.masters.items()}
    assert Trainer(bitnet.config, wide).backend == "numpy"
    if bitnet.backend == "cython":
        with pytest.raises(ConfigError, match="float32"):
            Trainer(bitnet.config, wide, backend="cython")


def test_micro_batches_equal_one_batch(bitnet):
    tokens = golden_of(BITNET)["tokens"][0]
    _, whole = bitnet.loss_and_gradients(tokens)
    parts = [bitnet.loss_and_gradients(tokens[i : i + 2])[1] for i in (0, 2)]
    for name, gradient in whole.items():
        assert distance((parts[0][name] + parts[1][name]) / 2, gradient) < 1e-6


FAMILIES = {
    "llama": {"attention_bias": True, "mlp_bias": True},
    "qwen2": {"attention_bias": True},
    "qwen3": {"model_type": "qwen3"},
    "mistral": {"model_type": "mistral", "sliding_window": 3},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_families(family, tmp_path):
    """Gradients of parts that the golden cases lack, by central differences of a dense model in float64."""
    keys = FAMILIES[family] | {"model_type": family, "hidden_size": 8, "intermediate_size": 12, "vocab_size": 11}
    keys |= {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4}
    folder = folder_of("llama-dense", tmp_path / "m", **keys)
    save_random(folder)
    trainer = Trainer.from_folder(folder)
    wide = Trainer(trainer.config, {name: w.astype(np.float64) for name, w in trainer.masters.items()})
    tokens = rng(9).integers(0, 11, (2, 6))
    _, gradients = wide.loss_and_gradients(tokens)
    for name, master in wide.masters.items():
        index = tuple(size // 2 for size in master.shape)
        before = master[index]
        losses = []
        for step in (1e-5, -1e-5):
            master[index] = before + step
            losses.append(wide.loss(tokens))
        master[index] = before
        expected = (losses[0] - losses[1]) / 2e-5
        assert gradients[name][index] == pytest.approx(expected, rel=1e-5, abs=1e-9), name


def test_a_teacher(tmp_path):
    """Gradients of the whole loss with a teacher, by central differences of a dense student in float64."""
    teacher = bitnet_ref.load(folder_of(BITNET, tmp_path / "teacher"), backend="numpy", dtype="float64")
    student = Trainer.from_folder(folder_of("llama-dense", tmp_path / "student"))
    masters = {name: w.astype(np.float64) for name, w in student.masters.items()}
    lesson = Distillation(teacher, 0.7, 3.0, relations_weight=2.0, relation_heads=2, layer=0)
    wide = Trainer(student.config, masters, distillation=lesson)
    tokens = golden_of(BITNET)["tokens"][0][:2, :8]
    plain, _ = Trainer(student.config, masters).loss_and_gradients(tokens)
    loss, gradients = wide.loss_and_gradients(tokens)
    assert loss > plain
    for name in (
        "model.layers.0.self_attn.q_proj.weight",
        "model.layers.0.self_attn.v_proj.weight",
        "model.norm.weight",
    ):
        master, losses = wide.masters[name], []
        index = tuple(size // 3 for size in master.shape)
        before = master[index]
        for step in (1e-5, -1e-5):
            master[index] = before + step
            losses.append(wide.loss_and_gradients(tokens)[0])
        master[index] = before
        assert gradients[name][index] == pytest.approx((losses[0] - losses[1]) / 2e-5, rel=1e-4, abs=1e-10), name
    with pytest.raises(ConfigError, match="vocabulary"):
        Trainer(student.config, masters, distillation=Distillation(bitnet_ref.load(backend="numpy")))


def save_random(folder):
    """Random masters for the folder's config."""
    from bitnet_ref.formats.hf.config import read_hf_config
    from bitnet_ref.training.network import master_shapes

    shapes = master_shapes(read_hf_config(folder / "config.json"))
    random = {n: (rng(i).standard_normal(s) * 0.5).astype(np.float32) for i, (n, s) in enumerate(shapes.items())}
    save_file(random, folder / "model.safetensors")


def test_norms_inside_each_bitlinear(tmp_path):
    """The seven norms per layer have gradients, and the packed model computes what was trained."""
    quantization = {"quant_method": "bitnet", "linear_class": "autobitlinear", "quantization_mode": "online"}
    folder = folder_of("llama-dense", tmp_path / "m", quantization_config=quantization | {"use_rms_norm": True})
    save_random(folder)
    trainer = Trainer.from_folder(folder)
    tokens = rng(5).integers(0, 96, (2, 16))
    _, gradients = trainer.loss_and_gradients(tokens)
    norms = [name for name in gradients if name.endswith("rms_norm.weight")]
    assert len(norms) == 14
    assert all(np.abs(gradients[name]).max() > 0 for name in norms)
    trainer.step(tokens)
    trainer.save(tmp_path / "trained")
    model = bitnet_ref.load(tmp_path / "trained", backend="numpy")
    assert (
        np.abs(model.logits(tokens[0]) - trainer.logits(tokens[0])).max()
        < 1e-3 * np.abs(trainer.logits(tokens[0])).max()
    )


@pytest.mark.sample(2)
def test_the_types_for_editors_name_every_keyword():
    keywords = [each for each in inspect.signature(Trainer).parameters.values() if each.kind is each.KEYWORD_ONLY]
    assert TrainerOptions.__annotations__.keys() == {each.name for each in keywords}
    assert all(each.annotation == TrainerOptions.__annotations__[each.name].__forward_arg__ for each in keywords)


@pytest.mark.sample(2)
def test_training_learns(bitnet):
    """A text that repeats: the loss falls to a fraction."""
    bitnet.schedule = Schedule(lr=5e-3)
    tokens = np.tile(np.arange(8), (4, 4))
    losses = [bitnet.step(tokens) for _ in range(30)]
    assert losses[-1] < 0.3 * losses[0]


@pytest.mark.sample(4)
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_products_of_bfloat16(bitnet, optimizer):
    """Losses stay as they are, gradients move by the rounding, and a step learns as much."""
    tokens = np.tile(np.arange(8), (4, 4))
    options = {"lr": 1e-2, "backend": bitnet.backend, "optimizer": optimizer}
    exact, rounded = (
        Trainer(bitnet.config, bitnet.masters, backward_dtype=name, **options) for name in ("float32", "bfloat16")
    )
    (loss, gradients), (same_loss, near) = (t.loss_and_gradients(tokens) for t in (exact, rounded))
    assert loss == same_loss
    for name, gradient in gradients.items():
        assert 1e-5 < distance(near[name], gradient) < BFLOAT16_GRADIENTS.relative_l2, name
    losses = [[trainer.step(tokens) for _ in range(15)][-1] for trainer in (exact, rounded)]
    assert losses[1] == pytest.approx(losses[0], rel=0.1)
    assert losses[1] < 0.8 * loss


def test_a_backward_dtype_that_there_is_not(bitnet):
    with pytest.raises(ConfigError, match="backward_dtype: expected one of float32, bfloat16, got 'float16'"):
        Trainer(bitnet.config, bitnet.masters, backward_dtype="float16")


@pytest.mark.skipif(bool(bitnet_ref.available_backends()["cython"]), reason="the extension is not built")
@given(st.integers(1, 70), st.integers(1, 300), st.integers(1, 70), st.booleans(), st.booleans(), st.data())
def test_the_compiled_product_of_bfloat16(m, k, n, a_by_k, b_by_k, data):
    """Of matrices and of transposed ones, on every kernel set: NumPy's but for the order of float32 sums."""
    from bitnet_ref.backends.cpu.extension import _cpu, simd_variants

    dice = rng(data.draw(st.integers(0, 9)))
    a = dice.standard_normal((k, m) if a_by_k else (m, k)).astype(np.float32)
    b = dice.standard_normal((k, n) if b_by_k else (n, k)).astype(np.float32)
    a, b = (a.T if a_by_k else a), (b if b_by_k else b.T)
    expected = ops.product_bfloat16(a.astype(np.float64), b.astype(np.float64))
    sizes = np.abs(a).astype(np.float64) @ np.abs(b)
    for number, lacks in enumerate(simd_variants().values()):
        if lacks is None:
            c = np.full((m, n), np.nan, np.float32)
            _cpu.bfloat16_product(a, b, c, number)
            assert (np.abs(c - expected) <= 2e-6 * sizes).all()


@pytest.mark.parametrize("shape", [(6, 16), (16, 6), (8, 8)])
def test_muon_makes_the_step_orthogonal(shape):
    """The singular vectors of the gradient, with singular values near 1."""
    gradient = rng(2).standard_normal(shape).astype(np.float32)
    result = ops.orthogonalize(gradient)
    assert (result.dtype, result.shape) == (np.float32, shape)
    left, _, right = np.linalg.svd(gradient.astype(np.float64), full_matrices=False)
    in_its_basis = left.T @ result @ right.T
    np.testing.assert_allclose(in_its_basis, np.diag(np.diag(in_its_basis)), rtol=0, atol=1e-5)
    assert 0.65 < np.diag(in_its_basis).min() < np.diag(in_its_basis).max() < 1.25


def test_a_step_of_muon(bitnet):
    """Matrices of the layers move by 0.2 lr sqrt(max(rows, columns)) of the orthogonal step; the rest as AdamW's do."""
    tokens = np.tile(np.arange(8), (2, 2))
    muon = Trainer(bitnet.config, bitnet.masters, lr=1e-2, optimizer="muon", backend="numpy")
    adamw = Trainer(bitnet.config, bitnet.masters, lr=1e-2, backend="numpy")
    before = {name: master.copy() for name, master in muon.masters.items()}
    _, gradients = muon.loss_and_gradients(tokens)
    muon.apply(gradients)
    adamw.step(tokens)
    assert set(muon.optimizer.m) == set(muon.masters)
    for name, master in muon.masters.items():
        if name not in muon.optimizer.v:
            u = ops.orthogonalize(np.float32(1.95) * gradients[name])
            expected = before[name] * (1 - 1e-3) - 2e-3 * np.sqrt(max(master.shape)) * u
            np.testing.assert_allclose(master, expected, rtol=0, atol=1e-6, err_msg=name)
        else:
            np.testing.assert_array_equal(master, adamw.masters[name], err_msg=name)
    linears = {name for name, master in muon.masters.items() if master.ndim == 2 and ".layers." in name}
    assert set(muon.masters) - set(muon.optimizer.v) == linears
    assert len(linears) == 7 * bitnet.config.num_hidden_layers


def test_a_momentum_that_dies_out_is_zero():
    """A row without gradient falls by 0.95 a step: to 0, not to subnormal numbers that slow every product down."""
    gradient = rng(3).standard_normal((4, 8)).astype(np.float32)
    gradient[2] = 0
    w, m = np.ones((4, 8), np.float32), np.ones((4, 8), np.float32)
    for _ in range(900):
        ops.muon(w, gradient, m, momentum=0.95, keep=1.0, lr=1e-4)
    assert not m[2].any()
    np.testing.assert_allclose(m[[0, 1, 3]], 20 * gradient[[0, 1, 3]], rtol=1e-4)


def test_clipping():
    gradients = {"a": np.full(4, 3.0, np.float32), "b": np.full((2, 2), 4.0, np.float32)}
    assert clip_gradients(gradients, 1.0) == pytest.approx(10.0)
    assert global_norm(gradients) == pytest.approx(1.0)
    assert clip_gradients(gradients, 2.0) == pytest.approx(1.0)
    assert global_norm(gradients) == pytest.approx(1.0)


def test_schedules():
    two = Schedule("two-stage", lr=1.5e-3, second_lr=1e-3, total_steps=100, warmup_steps=10)
    assert two.at(0) == (pytest.approx(1.5e-4), 0.1)
    assert two.at(49) == (pytest.approx(1.5e-3 * 0.51), 0.1)
    assert two.at(50) == (pytest.approx(1e-3 * 0.5), 0.0)
    cosine = Schedule("cosine", lr=1.0, min_lr=0.1, total_steps=10)
    assert [cosine.at(step)[0] for step in (0, 5, 10, 20)] == pytest.approx([1.0, 0.55, 0.1, 0.1])
    stable = Schedule("warmup-stable-decay", lr=1.0, total_steps=100, warmup_steps=10, decay_steps=40)
    rates = [stable.at(step)[0] for step in (4, 10, 60, 70, 100, 110)]
    assert rates == pytest.approx([0.5, 1.0, 1.0, 0.5, 0.0, 0.0])
    fifth = Schedule("warmup-stable-decay", lr=1.0, total_steps=100)
    assert [fifth.at(step)[0] for step in (80, 85)] == pytest.approx([1.0, 0.5])
    for wrong in ({"kind": "linear"}, {"lr": -1.0}, {"lr": float("nan")}, {"kind": "cosine"}):
        with pytest.raises(ConfigError):
            Schedule(**wrong)


def test_wrong_input(bitnet, tmp_path):
    for tokens in (
        np.zeros((0, 4), int),
        np.zeros((2, 1), int),
        np.zeros((1, 4)),
        [[0, 96]],
        [[-1, 0]],
        np.zeros(4, int),
    ):
        with pytest.raises(ShapeError, match="training tokens"):
            bitnet.loss_and_gradients(tokens)
    with pytest.raises(ConfigError, match=r"norm\.weight is missing"):
        Trainer(bitnet.config, {n: w for n, w in bitnet.masters.items() if n != "model.norm.weight"})
    with pytest.raises(ConfigError, match="has shape"):
        Trainer(bitnet.config, bitnet.masters | {"model.norm.weight": np.ones(3, np.float32)})
    quantization = {"quant_method": "bitnet", "linear_class": "autobitlinear", "quantization_mode": "offline"}
    with pytest.raises(ConfigError, match="packed"):
        Trainer.from_folder(folder_of(BITNET, tmp_path / "packed", quantization_config=quantization))
    with pytest.raises(FormatError):
        Trainer.from_folder(folder_of(BITNET, tmp_path / "other", num_hidden_layers=1))


def test_settings_that_divide_by_zero_are_refused(bitnet):
    for betas in ((1.0, 0.95), (0.9, 1.0), (0.9, 1.5), (0.9,)):
        with pytest.raises(ConfigError, match="betas: expected two numbers from 0 to below 1"):
            Trainer(bitnet.config, bitnet.masters, betas=betas)
    for name, value in (("eps", 0), ("eps", -1e-8), ("max_norm", 0), ("max_norm", -1.0), ("max_norm", math.nan)):
        with pytest.raises(ConfigError, match=f"{name}: expected a number > 0"):
            Trainer(bitnet.config, bitnet.masters, **{name: value})
    teacher = bitnet_ref.load(backend="numpy")
    with pytest.raises(ConfigError, match="relation_heads: expected a divisor"):
        Distillation(teacher, relation_heads=0).check(teacher.config)


def test_a_part_without_a_gradient_is_refused(bitnet):
    configs = {
        "logit_softcap": replace(bitnet.config, logit_softcap=30.0),
        "post_norms": families.FAMILIES["gemma3_text"].example(),
        "embedding_scale": replace(bitnet.config, embedding_scale=4.0),
        "num_experts": families.FAMILIES["mixtral"].example(),
    }
    for field, config in configs.items():
        with pytest.raises(ConfigError, match=f"{field}: training has no gradient"):
            Trainer(config, bitnet.masters)
    with pytest.raises(ConfigError, match="qk_norms: training has no gradient of them as hunyuan_v1_dense"):
        Trainer.from_model(DATA / "families" / "hunyuan")


def test_nan_names_the_master(bitnet):
    bitnet.masters["model.layers.1.mlp.gate_proj.weight"][0, 0] = np.nan
    with pytest.raises(NumericsError, match="NaN"):
        bitnet.step(golden_of(BITNET)["tokens"][0])


def test_what_training_does_not_begin_from(tmp_path):
    folder = folder_of(BITNET, tmp_path / "m")
    with pytest.raises(FormatError, match="is a file; without --ternary, training begins from a Hugging Face folder"):
        Trainer.from_folder(folder / "model.safetensors")
    (folder / "adapter_config.json").write_text("{}")
    with pytest.raises(FormatError, match="LoRA adapter, which load applies and this does not"):
        Trainer.from_folder(folder)
