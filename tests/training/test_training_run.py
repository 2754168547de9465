"""Runs from a TOML file: data, checkpoints, resuming to the bit, bad input; and the shell's commands."""

import csv
import hashlib
import json
import lzma
import os
import re
import signal
import subprocess
import sys
import time
import tomllib
from dataclasses import fields, replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from click.testing import CliRunner
from helpers import DATA, model

import bitnet_ref
from bitnet_ref.cli import cli
from bitnet_ref.errors import ConfigError, ConfigWarning, FormatError, NumericsError, StorageError, TokenizerError
from bitnet_ref.formats.checkpoint import read_tokenizer_folder
from bitnet_ref.formats.open import ASSETS
from bitnet_ref.formats.safetensors import SafetensorsFile, SafetensorsWriter
from bitnet_ref.tokenizers import load_tokenizer
from bitnet_ref.training import TrainingRun, read_run
from bitnet_ref.training.data import TokenFile, encode_files, open_tokens, train_sentencepiece
from bitnet_ref.training.optimizer import Schedule
from bitnet_ref.training.run import RunSettings

STORY = "The fox and the hen\n\n" + "Once a fox met a hen. The hen ran, and the fox ran after the hen.\n\n" * 40
MODEL = """
[model]
model_type = "bitnet"
vocab_size = 64
hidden_size = 16
intermediate_size = 32
num_hidden_layers = 2
num_attention_heads = 2
num_key_value_heads = 1
hidden_act = "relu2"
max_position_embeddings = 32
rms_norm_eps = 1e-5
tie_word_embeddings = true
quantization_config = { quant_method = "bitnet", linear_class = "autobitlinear", quantization_mode = "online" }
"""
RUN = """
[data]
train = "tokens.npy"
validation = "tokens.npy"
[training]
steps = 12
batch = 3
context = 8
lr = 5e-3
warmup_steps = 2
save_every = 4
validate_every = 6
validation_sequences = 2
"""


@pytest.fixture
def config(tmp_path):
    np.save(tmp_path / "tokens.npy", np.random.default_rng(3).integers(0, 64, 500).astype(np.uint16))
    (tmp_path / "run.toml").write_text(MODEL + RUN)
    return tmp_path / "run.toml"


def start(config, folder, **options):
    settings, model = read_run(config)
    return TrainingRun(settings, folder, model, threads=2, **options)


def rows_of(folder):
    with open(folder / "metrics.csv", newline="") as file:
        return [{key: row[key] for key in row if key != "tokens_per_s"} for row in csv.DictReader(file)]


def test_a_run_and_its_model(config, tmp_path):
    seen, written = [], []
    run = start(config, tmp_path / "run")

    def look(row):
        seen.append(row)
        written.append(len(rows_of(tmp_path / "run")))  # whoever follows the file sees each step

    last = run.run(look)
    assert run.trainer.mix == 1.0
    assert [row.step for row in seen] == written == list(range(1, 13))
    assert last.step == 12
    assert last.validation_loss is not None
    assert last.validation_loss < seen[0].loss
    assert [row["step"] for row in rows_of(tmp_path / "run") if row["validation_loss"]] == ["6", "12"]
    model = bitnet_ref.load(tmp_path / "run" / "model", backend="numpy")
    assert model.logits([1, 2, 3]).shape == (3, 64)
    with pytest.raises(ConfigError, match="the run is finished"):
        start(config, tmp_path / "run", resume=True).run()
    with pytest.raises(FormatError, match="a run is here already"):
        start(config, tmp_path / "run")


def test_one_run_at_a_time_writes_into_a_folder(config, tmp_path):
    """From its first moment on, before there is a checkpoint, and with `resume` too."""
    refused, folder = [], tmp_path / "run"

    def start_others(row):
        for resume in (False, True):
            with pytest.raises(StorageError, match="run: another run is writing into it; wait for its end"):
                start(config, folder, resume=resume)
            refused.append(row.step)

    run = start(config, folder)
    run.run(start_others)
    assert refused == [step for step in range(1, 13) for _ in range(2)]
    assert [row["step"] for row in rows_of(folder)] == [str(step) for step in range(1, 13)]
    again = start(config, folder, resume=True)  # released, though `run` is still there
    with pytest.raises(StorageError, match="another run"):
        run.run()
    with pytest.raises(ConfigError, match="is finished"):
        again.run()
    config.write_text(config.read_text().replace("batch = 3", "batch = 2"))
    for _ in range(2):  # one that cannot begin holds no lock
        with pytest.raises(FormatError, match="of another run") as _caught:
            start(config, folder, resume=True)


def test_what_a_run_without_a_checkpoint_has_left(config, tmp_path):
    """Its metrics are begun anew; its model is not replaced unless it is asked."""
    folder = tmp_path / "run"

    def stop(row):
        if row.step == 3:
            raise Stop

    with pytest.raises(Stop):
        start(config, folder).run(stop)
    assert len(rows_of(folder)) == 3
    start(config, folder).run()
    assert [row["step"] for row in rows_of(folder)] == [str(step) for step in range(1, 13)]
    metrics = (folder / "metrics.csv").read_bytes()
    (folder / "checkpoint.safetensors").unlink()
    with pytest.raises(FormatError, match=r"model: is here already, without checkpoint\.safetensors to resume from"):
        start(config, folder)
    assert (folder / "metrics.csv").read_bytes() == metrics
    (folder / "model").rename(folder / "adapter")
    with pytest.raises(FormatError, match="adapter: is here already"):
        start(config, folder)
    start(config, folder, resume=True)
    assert rows_of(folder) == []


class Stop(Exception):
    pass


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    ("after", "optimizer", "dtype"),
    [(1, "adamw", "float32"), (5, "adamw", "float32"), (11, "adamw", "float32"), (5, "muon", "bfloat16")],
)
def test_resuming_gives_the_same_bits(after, optimizer, dtype, config, tmp_path):
    config.write_text(config.read_text() + f'optimizer = "{optimizer}"\nbackward_dtype = "{dtype}"\n')
    start(config, tmp_path / "whole").run()

    def stop(row):
        if row.step == after:
            raise Stop

    with pytest.raises(Stop):
        start(config, tmp_path / "broken").run(stop)
    start(config, tmp_path / "broken", resume=True).run()
    assert rows_of(tmp_path / "broken") == rows_of(tmp_path / "whole")
    for name in ("checkpoint.safetensors", "model/model.safetensors"):
        assert (tmp_path / "broken" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_a_run_without_an_end_ends_from_its_checkpoint(config, tmp_path):
    config.write_text(config.read_text() + 'schedule = "warmup-stable-decay"\ndecay_steps = 4\n')

    def stop(row):
        if row.step == 5:
            raise Stop

    with pytest.raises(Stop):
        start(config, tmp_path / "run").run(stop)
    config.write_text(config.read_text().replace("steps = 12", "steps = 8", 1))
    assert start(config, tmp_path / "run", resume=True).run().step == 8
    rates = [float(row["lr"]) for row in rows_of(tmp_path / "run")]
    expected = [0.5, 1, 1, 1] + [1 - (done / 4) ** 0.5 for done in range(4)]
    assert rates == pytest.approx([5e-3 * share for share in expected])


def test_each_sample_is_there_once_after_resuming(config, tmp_path):
    words = config.read_text().replace("vocab_size = 64", "vocab_size = 4096")
    config.write_text(words + f'tokenizer = "{ASSETS / "storyteller"}"\nsample_every = 2\n')
    start(config, tmp_path / "whole").run()
    samples = (tmp_path / "whole" / "samples.txt").read_bytes()
    assert re.findall(rb"^step (\d+): ", samples, re.M) == [b"2", b"4", b"6", b"8", b"10", b"12"]

    def stop(row):
        if row.step == 7:
            raise Stop

    with pytest.raises(Stop):
        start(config, tmp_path / "broken").run(stop)
    start(config, tmp_path / "broken", resume=True).run()  # from step 4
    assert (tmp_path / "broken" / "samples.txt").read_bytes() == samples


@pytest.mark.thorough
def test_an_interrupt_before_the_last_model_is_written(config, tmp_path, monkeypatch):
    start(config, tmp_path / "whole").run()
    run = start(config, tmp_path / "broken")
    save = run.trainer.save

    def interrupted(folder):
        if run.step == 12:
            raise KeyboardInterrupt
        save(folder)

    monkeypatch.setattr(run.trainer, "save", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run.run()
    start(config, tmp_path / "broken", resume=True).run()
    for name in ("checkpoint.safetensors", "model/model.safetensors"):
        assert (tmp_path / "broken" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def killed(config, folder, wait_s):
    """Train in a process of its own; kill it after so long.   -> whether it was killed in time"""
    command = [sys.executable, "-m", "bitnet_ref", "train", str(config), "--out", str(folder), "--threads", "1"]
    command += ["--resume"] if folder.exists() else []
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        process.wait(wait_s)
    except subprocess.TimeoutExpired:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        return True
    return False


@pytest.mark.slow
def test_kill_9_at_any_moment(config, tmp_path):
    """Killed 20 times at random moments, the run ends as an uninterrupted one."""
    config.write_text(MODEL + RUN.replace("steps = 12", "steps = 4000").replace("save_every = 4", "save_every = 5"))
    rng, kills, deadline = np.random.default_rng(7), 0, time.monotonic() + 300
    while killed(config, tmp_path / "broken", rng.uniform(0.5, 4) if kills < 20 else 300):
        kills += 1
        assert time.monotonic() < deadline
    start(config, tmp_path / "whole").run()
    assert rows_of(tmp_path / "broken") == rows_of(tmp_path / "whole")
    assert not list((tmp_path / "broken").glob(".*tmp*"))
    print(f"{kills} kills")


def test_nan_and_leaps_stop_the_run(config, tmp_path):
    for name, place in (
        ("layers.1.mlp.down_proj", "model.layers.1.mlp.down_proj: absmean_scale"),
        ("layers.1.post_attention_layernorm", "the input of model.layers.1.mlp.gate_proj: quantize_activations"),
        ("embed_tokens", "the input of model.layers.0.input_layernorm: rms_norm"),
        ("norm", "the gradient of model.embed_tokens.weight holds"),
    ):
        run = start(config, tmp_path / name)
        run.trainer.masters[f"model.{name}.weight"][:] = np.inf
        with pytest.raises(NumericsError, match=rf"^training step 1: {place}.*Inf\. Begin anew with a lower lr"):
            run.run()
    run = start(config, tmp_path / "late")

    def spoil(row):
        if row.step == 4:  # which is saved
            run.trainer.masters["model.embed_tokens.weight"][:] = np.nan

    with pytest.raises(NumericsError, match=r"^training step 5: the input of .*Inf\. Resume from the checkpoint with"):
        run.run(spoil)
    text = config.read_text().replace("steps = 12", "steps = 60").replace("save_every = 4", "save_every = 20")
    config.write_text(text + "spike = 1.5\n")
    run = start(config, tmp_path / "leap")
    gradients_of = run.trainer.loss_and_gradients
    # A leap is measured by the median of the last 32 losses, once there are so many. 5.9 is none.
    losses = iter([2.0, 6.1, *[4.0] * 30, 5.9, *[4.0] * 7, 6.1, *[4.0] * 19])
    largest = "model.layers.0.mlp.up_proj.weight"  # by one of its values

    def leap(batch):
        gradients = gradients_of(batch)[1]
        gradients[largest][:] = 0
        gradients[largest][1, 2] = -99
        return next(losses), gradients

    run.trainer.loss_and_gradients = leap
    message = (
        rf"leapt to 6\.100 in step 41 \(median of the last 32: 4\.000\); the largest gradient .* {largest}\. Resume"
    )
    with pytest.raises(NumericsError, match=message):
        run.run()
    assert start(config, tmp_path / "leap", resume=True).step == 40


@pytest.mark.sample(3)
@pytest.mark.parametrize(("every", "steps"), [(5, [5, 10, 12]), (4, [4, 8, 12]), (0, [12])])
def test_when_a_run_saves_and_validates(every, steps, config, tmp_path, monkeypatch):
    text = config.read_text().replace("save_every = 4", f"save_every = {every}")
    config.write_text(text.replace("validate_every = 6", f"validate_every = {every}"))
    run, saved, validated = start(config, tmp_path / "run"), [], []
    on_disk = []
    monkeypatch.setattr(run, "save", lambda: saved.append(run.step))
    monkeypatch.setattr("os.fsync", lambda _: on_disk.append(len(rows_of(tmp_path / "run"))))  # of the metrics
    run.run(lambda row: validated.append(row.step) if row.validation_loss is not None else None)
    assert saved == validated == on_disk == steps


def test_the_validation_loss_is_that_of_the_first_sequences(config, tmp_path):
    ids = np.random.default_rng(3).integers(0, 64, 500)
    for sequences, rows in ((2, 2), (62, 62), (64, 62)):  # 62 windows of 8 tokens, each with the next one
        config.write_text(MODEL + RUN.replace("validation_sequences = 2", f"validation_sequences = {sequences}"))
        run = start(config, tmp_path / f"run{sequences}")
        windows = [ids[8 * index : 8 * index + 9].astype(np.int64) for index in range(rows)]
        assert run.validation_loss() == run.trainer.loss(windows)


def test_the_metrics_of_a_step(config, tmp_path, monkeypatch):
    rows = []
    clock = SimpleNamespace(perf_counter=count().__next__)  # a second between two looks
    monkeypatch.setattr("bitnet_ref.training.run.time", clock)
    config.write_text(config.read_text().replace("max_position_embeddings = 32", "max_position_embeddings = 8"))
    run = start(config, tmp_path / "run")
    rates = [run.trainer.schedule.at(step) for step in range(12)]
    run.run(rows.append)
    assert [row.tokens for row in rows] == [24 * step for step in range(1, 13)]
    assert [(row.lr, row.weight_decay) for row in rows] == rates
    assert {row.tokens_per_s for row in rows} == {24.0}
    header = "step,tokens,loss,validation_loss,lr,weight_decay,gradient_norm,tokens_per_s"
    assert (tmp_path / "run" / "metrics.csv").read_text().splitlines()[0] == header


def test_what_a_power_cut_leaves_in_the_metrics(config, tmp_path):
    start(config, tmp_path / "run").run()
    rows = rows_of(tmp_path / "run")
    with open(tmp_path / "run" / "metrics.csv", "ab") as file:
        file.write(b"\0\0\xff\xfe\n" + b"9" * 5000 + b",1,2,3,4,5,6,7\n13,1")
    start(config, tmp_path / "run", resume=True)
    assert rows_of(tmp_path / "run") == rows


def test_the_backend_and_the_folder_that_are_asked_for(config, tmp_path):
    run = start(config, tmp_path / "of" / "several" / "runs", backend="numpy")
    assert run.trainer.backend == "numpy"
    assert (tmp_path / "of" / "several" / "runs").is_dir()


def test_first_masters(config, tmp_path):
    """Drawn by the seed: norms 1, biases 0, matrices of standard deviation 0.02."""
    text = config.read_text().replace('model_type = "bitnet"', 'model_type = "qwen2"').replace('"relu2"', '"silu"')
    config.write_text("\n".join(line for line in text.splitlines() if "quantization" not in line))
    masters = start(config, tmp_path / "first").trainer.masters
    for name, master in masters.items():
        if name.endswith(".bias"):
            assert not master.any()
        elif master.ndim == 1:
            assert (master == 1).all()
        else:
            assert master.std() == pytest.approx(0.02, rel=0.15)
    assert sum(name.endswith(".bias") for name in masters) == 6
    again = start(config, tmp_path / "again").trainer.masters
    config.write_text(config.read_text().replace("[training]", "[training]\nseed = 1"))
    other = start(config, tmp_path / "other").trainer.masters
    assert all((masters[name] == again[name]).all() for name in masters)
    assert not (masters["model.embed_tokens.weight"] == other["model.embed_tokens.weight"]).all()


def test_a_model_that_has_more_than_its_masters(config, tmp_path):
    """Norms and biases that `init` lacks begin as ever; a matrix, or another shape, is refused."""
    llama = MODEL.replace('"bitnet"', '"llama"', 1).replace('"relu2"', '"silu"')
    config.write_text("\n".join(line for line in llama.splitlines() if "quantization" not in line) + RUN)
    first = start(config, tmp_path / "first")
    first.trainer.masters["model.norm.weight"][:] = 3
    first.save()
    data = RUN.replace("[training]", f'init = "{tmp_path / "first" / "model"}"\n[training]')
    config.write_text(MODEL + data)  # BitNet has norms inside its blocks
    masters = start(config, tmp_path / "next").trainer.masters
    assert (masters["model.norm.weight"] == 3).all()
    assert (masters["model.layers.0.self_attn.attn_sub_norm.weight"] == 1).all()
    for old, new, name in (
        ("intermediate_size = 32", "intermediate_size = 48", r"layers\.0\.mlp\.gate_proj\.weight of shape \(48, 16\)"),
        ("num_hidden_layers = 2", "num_hidden_layers = 3", r"layers\.2\.self_attn\.q_proj\.weight"),
    ):
        config.write_text(MODEL.replace(old, new) + data)
        with pytest.raises(ConfigError, match=f"init: .*has no model.{name}"):
            start(config, tmp_path / "other")


def test_settings_reach_the_trainer(config, tmp_path):
    values = {"lr": 2e-3, "second_lr": 1e-3, "min_lr": 1e-4, "warmup_steps": 3, "weight_decay": 0.2, "steps": 9}
    settings, table = read_run(config)
    values_of_others = {"beta1": 0.8, "beta2": 0.9, "eps": 1e-6, "max_norm": 0.5, "init_std": 0.05}
    settings = replace(settings, **values, **values_of_others, schedule="cosine")
    trainer = TrainingRun(settings, tmp_path / "run", table).trainer
    values["total_steps"] = values.pop("steps")
    assert trainer.schedule == Schedule("cosine", **values)
    assert (trainer.optimizer.betas, trainer.optimizer.eps, trainer.max_norm) == ((0.8, 0.9), 1e-6, 0.5)
    assert trainer.masters["model.embed_tokens.weight"].std() == pytest.approx(0.05, rel=0.15)
    unclipped = TrainingRun(replace(settings, max_norm=0.0), tmp_path / "unclipped", table).trainer
    assert unclipped.max_norm is None


def test_the_defaults_are_those_of_the_docs():
    text = (Path(__file__).parents[2] / "docs" / "training.md").read_text(encoding="utf-8")
    rows = text.split("\n| `[training]` |")[1].split("\n\n")[0]
    defaults = tomllib.loads("\n".join(map(" = ".join, re.findall(r"^\| `(\w+)` \| `([^`]*)`", rows, re.MULTILINE))))
    settings = RunSettings(train=("a.txt",))
    values = {name: getattr(settings, name) for name in defaults}
    assert defaults == {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}
    assert {field.name for field in fields(RunSettings)} - set(defaults) == {
        *("train", "validation", "tokenizer", "init", "ternary", "lora", "teacher", "second_lr", "decay_steps")
    }


def test_quantisation_fades_in(config, tmp_path):
    config.write_text(config.read_text() + "mix_steps = 8\n")
    run = start(config, tmp_path / "run")
    shares = []
    run.run(lambda row: shares.append(run.trainer.mix))
    assert shares[:8] == pytest.approx(np.arange(1, 9) / 8)
    assert shares[8:] == [1.0] * 4


def test_a_run_starts_from_masters(config, tmp_path):
    start(config, tmp_path / "first").run()
    model = tmp_path / "first" / "model"
    (tmp_path / "next.toml").write_text(RUN.replace("[training]", f'init = "{model}"\n[training]'))
    run = start(tmp_path / "next.toml", tmp_path / "next")
    first = bitnet_ref.training.Trainer.from_folder(model)
    assert all(np.array_equal(run.trainer.masters[name], first.masters[name]) for name in first.masters)
    assert run.run().step == 12


@pytest.mark.parametrize("source", ["golden/llama-dense", "gguf/tq2_0.gguf", "golden/llama-packed-rmsnorm"])
def test_any_model_becomes_ternary(source, config, tmp_path):
    """A dense folder, a BitNet's GGUF without masters, and packed planes with norms of their own and biases."""
    path = DATA / source
    config.write_text(RUN.replace("[training]", f'init = "{path}"\nternary = true\n[training]'))
    run, before = start(config, tmp_path / "run"), model(path)
    assert run.trainer.config.quantization.quantization_mode == "online"
    assert run.trainer.config.linear_shapes() == before.config.linear_shapes()
    if before.config.quantization is not None:  # it begins as the model that it was
        expected, logits = before.logits([5, 9, 2]), run.trainer.logits(np.array([5, 9, 2]))
        np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-4 * np.abs(expected).max())
    run.trainer.save(tmp_path / "saved")
    linear = bitnet_ref.load(tmp_path / "saved", backend="numpy").weights.layers[0].q_proj
    assert linear.bit_linear is not None


def test_settings_that_cannot_act(config, tmp_path):
    dense = RUN.replace("[training]", f'init = "{DATA / "golden" / "llama-dense"}"\n[training]')
    config.write_text(dense + "mix_steps = 8\n")
    with pytest.raises(ConfigError, match="mix_steps: fades quantisation in, and this model has none: say --ternary"):
        start(config, tmp_path / "run")
    config.write_text(RUN + "ternary = true\n")
    with pytest.raises(ConfigError, match="ternary: expected init"):
        start(config, tmp_path / "run")
    config.write_text(MODEL + dense.replace("[training]", "[training]\nternary = true"))
    with pytest.raises(ConfigError, match=r"ternary: is for init without a table \[model\]"):
        start(config, tmp_path / "run")


def test_the_tokenizer_of_init(config, tmp_path):
    """Of a run with a [model] too; one that is named comes first."""
    table = json.loads((ASSETS / "storyteller" / "config.json").read_text())
    settings = replace(read_run(config)[0], init=str(ASSETS / "storyteller"))
    with pytest.raises(ConfigError, match=r"packed|masters"):
        TrainingRun(settings, tmp_path / "run", table)
    folder = tmp_path / "init"
    TrainingRun(replace(settings, init=str(ASSETS / "storyteller"), ternary=True), tmp_path / "a").trainer.save(folder)
    online = json.loads((folder / "config.json").read_text())
    run = TrainingRun(replace(settings, init=str(folder)), tmp_path / "b", online)
    assert run.tokenizer is not None
    assert run.tokenizer.encode("Once") == load_tokenizer(ASSETS / "storyteller").encode("Once")


def test_a_run_learns_from_a_teacher(config, tmp_path):
    start(config, tmp_path / "first").run()
    text = config.read_text().replace("[training]", f'teacher = "{tmp_path / "first" / "model"}"\n[training]')
    config.write_text(text + "logits_weight = 5.0\n")
    losses = []
    start(config, tmp_path / "second").run(lambda row: losses.append(row.loss))
    assert losses[-1] < losses[0]


@pytest.mark.parametrize(
    ("old", "new", "error"),
    [
        ("steps = 12", "stepps = 12", r"training\.stepps: is no setting of a run; did you mean 'steps'\?"),
        ("steps = 12", "steps = 0", r"steps: expected a whole number from 1"),
        ("steps = 12", "steps = 1099511627776", r"steps: expected a whole number from 1 to 1099511627775"),
        ("steps = 12", "steps = true", r"steps: expected a whole number"),
        ("steps = 12", "steps = 12\nwarmup_stepz = 0", r"did you mean 'warmup_steps'\?"),
        ("warmup_steps = 2", "warmup_steps = -1", r"warmup_steps: expected a whole number from 0"),
        ("lr = 5e-3", "lr = nan", r"lr: expected a number from 0"),
        ("lr = 5e-3", "lr = -1.0", r"lr: expected a number from 0"),
        ("lr = 5e-3", "lr = true", r"lr: expected a number from 0"),
        ("lr = 5e-3", 'optimizer = "sgd"', r"optimizer: expected adamw or muon, got 'sgd'"),
        ("lr = 5e-3", "decay_steps = -1", r"decay_steps: expected a whole number from 0"),
        ("lr = 5e-3", "spike = 1", r"spike: expected a number above 1"),
        ('train = "tokens.npy"', "", r"train: expected at least one text file"),
        ('train = "tokens.npy"', "train = 3", r"train: expected a list of paths, got 3"),
        ("context = 8", "context = 64", r"context: expected at most the model's context of 32"),
        ("[training]", "[trainning]", "expected the tables"),
        ("[training]", "[[training]]", "expected the tables"),
        ("[model]", "[[model]]", "expected the tables"),
        ("[data]", "[[data]]", "expected the tables"),
        ("hidden_size = 16", "hidden_size = 15", "num_attention_heads|head_dim"),
    ],
)
def test_wrong_settings(old, new, error, config, tmp_path):
    config.write_text(config.read_text().replace(old, new))
    with pytest.raises(ConfigError, match=error):
        start(config, tmp_path / "run")


def test_a_teacher_whose_context_is_shorter_is_refused_before_the_first_step(config, tmp_path):
    start(config, tmp_path / "first").run()
    text = config.read_text().replace("position_embeddings = 32", "position_embeddings = 64")
    text = text.replace("context = 8", "context = 33")
    config.write_text(text.replace("[training]", f'teacher = "{tmp_path / "first" / "model"}"\n[training]'))
    with pytest.raises(ConfigError, match="context: expected at most the teacher's context of 32 tokens, got 33"):
        start(config, tmp_path / "second")


def test_paths_are_relative_to_the_file(tmp_path):
    settings = 'train = ["a.txt", "b.txt"]\nvalidation = "c.npy"\ntokenizer = "tok"\nteacher = "teacher"\n'
    for name in ("first", "base", "teacher"):
        (tmp_path / name).mkdir()
    for key, value, expected in (
        ("init", "first", tmp_path / "first"),
        ("lora", "base", tmp_path / "base"),
        ("lora", "base:a.gguf", tmp_path / "base:a.gguf"),
        ("lora", "storyteller", "storyteller"),  # there is no such folder: a model's name
        ("init", "storyteller", "storyteller"),
    ):
        (tmp_path / "run.toml").write_text(f'[data]\n{settings}{key} = "{value}"\n')
        read, _ = read_run(tmp_path / "run.toml")
        assert (read.train, read.validation) == (
            (str(tmp_path / "a.txt"), str(tmp_path / "b.txt")),
            (str(tmp_path / "c.npy"),),
        )
        assert (read.tokenizer, read.teacher) == (str(tmp_path / "tok"), str(tmp_path / "teacher"))
        assert getattr(read, key) == str(expected)
    (tmp_path / "run.toml").write_text('[data]\ntrain = "a.txt"\nteacher = "storyteller"\n')
    assert read_run(tmp_path / "run.toml")[0].teacher == "storyteller"


def test_wrong_files(config, tmp_path):
    with pytest.raises(FormatError, match="no such file"):
        read_run(tmp_path / "none.toml")
    text = config.read_text()
    (tmp_path / "long.toml").write_text(text + "#" * ((1 << 20) - len(text)))
    read_run(tmp_path / "long.toml")
    (tmp_path / "long.toml").write_text(text + "#" * ((1 << 20) - len(text) + 1))
    with pytest.raises(FormatError, match="1048576"):
        read_run(tmp_path / "long.toml")
    for ids, error in (
        (np.zeros(1, np.uint16), "at least two"),
        (np.zeros((2, 2), int), "one row"),
        (np.array([1, 64]), "token 1: id 64 is outside the vocabulary of 64"),
        (np.array([64, 1]), "token 0: id 64 is outside"),
        (np.array([63, 0, -1]), "token 2: id -1 is outside"),
        (np.array([1.0, 2.0]), "one row of at least two integer ids, got float64"),
    ):
        np.save(tmp_path / "tokens.npy", ids)
        with pytest.raises(FormatError, match=error):
            start(config, tmp_path / "run")
    (tmp_path / "tokens.npy").write_bytes(b"not an array")
    with pytest.raises(FormatError, match="token ids"):
        start(config, tmp_path / "run")
    config.write_text(text.replace("[data]", '[data]\ntokenizer = "tok"'))
    with pytest.raises(TokenizerError, match=r"tok: there is no such folder; expected tokenizer\.model"):
        start(config, tmp_path / "run")
    (tmp_path / "tok").mkdir()
    with pytest.raises(TokenizerError, match="tok: the folder has no tokenizer"):
        start(config, tmp_path / "run")


def test_a_checkpoint_of_another_corpus(config, tmp_path):
    """One token of it is another: the run would go on, and be of neither corpus."""
    start(config, tmp_path / "run").run()
    config.write_text(config.read_text().replace("steps = 12", "steps = 14"))
    ids = np.load(tmp_path / "tokens.npy")
    ids[7] ^= 1
    np.save(tmp_path / "tokens.npy", ids)
    with pytest.raises(FormatError, match=r"of another run: corpus [0-9a-f]{64}, here [0-9a-f]{64}"):
        start(config, tmp_path / "run", resume=True)


@pytest.mark.thorough
def test_one_damaged_byte_anywhere_in_a_checkpoint(config, tmp_path):
    """It is refused, or it is in the spaces and names of the header, and the masters are those that were saved."""
    start(config, tmp_path / "run").run()
    path = tmp_path / "run" / "checkpoint.safetensors"
    whole = path.read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    run = start(config, tmp_path / "other")
    run._read_checkpoint(path)
    masters, refused = {name: array.copy() for name, array in run.trainer.masters.items()}, 0
    offsets = [*range(0, header, 7), *range(header, len(whole), 331), len(whole) - 1]
    for offset in offsets:
        path.write_bytes(whole[:offset] + bytes([whole[offset] ^ 1]) + whole[offset + 1 :])
        try:
            run._read_checkpoint(path)
        except FormatError:
            refused += 1
            continue
        assert offset < header
        for name, array in run.trainer.masters.items():
            np.testing.assert_array_equal(array, masters[name])
    print(f"{refused} of {len(offsets)} refused")
    assert refused > 0.99 * len(offsets)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_is_an_error_about_the_file(config, tmp_path):
    run = start(config, tmp_path / "run")
    os.symlink("/dev/full", tmp_path / "run" / "metrics.csv")
    with pytest.raises(StorageError, match=r"metrics\.csv: No space left on device"):
        run.run()


def test_a_checkpoint_of_version_0_1_says_nothing_of_the_corpus(config, tmp_path):
    start(config, tmp_path / "run").run()
    path = tmp_path / "run" / "checkpoint.safetensors"
    with SafetensorsFile(path) as file:
        facts = json.loads(file.metadata["bitnet_ref.training"])
        arrays = {name: file.read(name).copy() for name in file.tensors}
    for key in ("corpus", "validation corpus", "teacher", "optimizer", "loss"):
        del facts["identity"][key]
    layout = {name: ("F32", array.shape) for name, array in arrays.items()}

    def write(facts):
        with SafetensorsWriter(path, layout, {"bitnet_ref.training": json.dumps(facts)}) as writer:
            for name, array in arrays.items():
                writer.write(name, array)

    write(facts | {"identity": 5})
    with pytest.raises(FormatError, match="is no checkpoint"):
        start(config, tmp_path / "run", resume=True)
    write(facts)
    with pytest.warns(ConfigWarning, match="does not say of which texts it is"):
        start(config, tmp_path / "run", resume=True)
    config.write_text(config.read_text() + 'optimizer = "muon"\n')
    with pytest.warns(ConfigWarning), pytest.raises(FormatError, match=r"of another run: optimizer adamw, here muon$"):
        start(config, tmp_path / "run", resume=True)


def test_a_checkpoint_of_another_run(config, tmp_path):
    start(config, tmp_path / "run").run()
    config.write_text(config.read_text().replace("batch = 3", "batch = 2"))
    with pytest.raises(FormatError, match=r"of another run: batch 3, here 2$"):
        start(config, tmp_path / "run", resume=True)
    text = config.read_text()
    config.write_text(text.replace("intermediate_size = 32", "intermediate_size = 48"))
    with pytest.raises(FormatError, match=r"of another run: intermediate_size 32, here 48, batch 3, here 2$"):
        start(config, tmp_path / "run", resume=True)
    for name, value, was in (("optimizer", "muon", "adamw"), ("backward_dtype", "bfloat16", "float32")):
        config.write_text(text.replace("batch = 2", f'batch = 3\n{name} = "{value}"'))
        with pytest.raises(FormatError, match=rf"of another run: {name} {was}, here {value}$"):
            start(config, tmp_path / "run", resume=True)
    for setting, value in (("temperature", "5.0, here 4.0"), ("mix_steps", "0, here 5")):
        config.write_text(text.replace("batch = 2", f"batch = 3\n{setting} = {value.split()[-1]}"))
        with pytest.raises(FormatError, match=rf"of another run: {setting} {value}$"):
            start(config, tmp_path / "run", resume=True)
    config.write_text(text)
    path = tmp_path / "run" / "checkpoint.safetensors"
    with SafetensorsFile(path) as file:
        arrays, metadata = {name: file.read(name).copy() for name in file.tensors}, dict(file.metadata)
    del metadata["content_hash"]  # as checkpoints were before
    config.write_text(text.replace("batch = 2", "batch = 3"))
    name = "m.model.layers.1.mlp.up_proj.weight"
    for changed in ({**arrays, name: arrays[name].T.copy()}, {each: arrays[each] for each in arrays if each != name}):
        layout = {each: ("F32", array.shape) for each, array in changed.items()}
        with SafetensorsWriter(path, layout, metadata) as writer:
            for each, array in changed.items():
                writer.write(each, array)
        with pytest.raises(FormatError, match=f"{name}: the tensor is missing, or of another shape"):
            start(config, tmp_path / "run", resume=True)
    path.write_bytes(b"\0" * 100)
    with pytest.raises(FormatError):
        start(config, tmp_path / "run", resume=True)


def test_a_full_disk_leaves_the_old_checkpoint(config, tmp_path, monkeypatch):
    run = start(config, tmp_path / "run")
    monkeypatch.setattr(
        "bitnet_ref.formats.safetensors.SafetensorsWriter.write",
        lambda *_: (_ for _ in ()).throw(OSError(28, "no space")),
    )
    with pytest.raises(OSError, match="no space"):
        run.run()
    assert not list((tmp_path / "run").glob("*.safetensors"))
    monkeypatch.undo()
    start(config, tmp_path / "run", resume=True).run()
    start(config, tmp_path / "whole").run()
    assert rows_of(tmp_path / "run") == rows_of(tmp_path / "whole")


def test_batches_take_each_window_once_per_epoch(tmp_path):
    np.save(tmp_path / "t.npy", np.arange(100, dtype=np.uint16))
    file = TokenFile(tmp_path / "t.npy", 100)
    assert file.windows(9) == 11
    rows = [row for step in range(11) for row in file.batch(step, 2, 9, seed=1)]
    starts = [int(row[0]) for row in rows]
    assert sorted(starts[:11]) == sorted(starts[11:]) == list(range(0, 99, 9))
    assert starts[:11] != starts[11:]
    assert all(np.array_equal(row, np.arange(row[0], row[0] + 10)) for row in rows)
    assert (file.windows(98), file.windows(99), file.windows(100), file.windows(200)) == (1, 1, 1, 1)
    assert file.windows(49) == 2
    assert file.window(1, 49).tolist() == list(range(49, 99))
    assert file.batch(3, 1, 200, seed=1)[0].tolist() == list(range(100))


def test_a_long_file_of_tokens_is_read_to_its_end(tmp_path):
    """It is checked and hashed in blocks of 4,194,304 ids."""
    ids = np.zeros(3 << 22, np.uint16)
    ids[[0, 1 << 22, 2 << 22, -1]] = 1, 2, 3, 4
    np.save(tmp_path / "t.npy", ids)
    assert TokenFile(tmp_path / "t.npy", 5).content_hash == hashlib.sha256(ids.astype("<u4").tobytes()).hexdigest()
    for index in (1 << 22, (2 << 22) - 1, 2 << 22, len(ids) - 1):
        ids[index] = 9
        np.save(tmp_path / "t.npy", ids)
        with pytest.raises(FormatError, match=f"token {index}: id 9 is outside"):
            TokenFile(tmp_path / "t.npy", 5)
        ids[index] = 0


def test_a_pipe_is_no_file_of_tokens(tmp_path):
    """Opening it would wait for a writer."""
    os.mkfifo(tmp_path / "tokens.npy")
    with pytest.raises(FormatError, match=r"tokens\.npy: "):
        open_tokens([tmp_path / "tokens.npy"], {}, 64, tmp_path)


def test_texts_become_tokens_once(tmp_path):
    tokenizer = load_tokenizer(ASSETS / "storyteller")
    (tmp_path / "a.txt").write_text("The fox.\n\n\nA hen.\n")
    (tmp_path / "b.txt.xz").write_bytes(lzma.compress(b"One day.\n"))
    files = [tmp_path / "a.txt", tmp_path / "b.txt.xz"]
    steps, parts, folder = [], read_tokenizer_folder(ASSETS / "storyteller"), tmp_path / "a" / "run"
    tokens = open_tokens(files, parts, 4096, folder, lambda *at: steps.append(at))
    sizes = [file.stat().st_size for file in files]
    assert steps == [(sizes[0], sum(sizes)), (sum(sizes), sum(sizes))]
    expected = [
        [1, *tokenizer.encode(text, add_special_tokens=False), 2] for text in ("The fox.", "A hen.", "One day.")
    ]
    assert tokens.ids.tolist() == [token for document in expected for token in document]
    (made,) = folder.glob("tokens-*.npy")
    before = made.stat().st_mtime_ns
    open_tokens(files, parts, 4096, folder)
    assert made.stat().st_mtime_ns == before
    for file, data in (("c.txt", b"\xff"), ("d.txt.xz", b"no xz"), ("e.txt", b""), ("f.txt", b"\n\n\n \n")):
        (tmp_path / file).write_bytes(data)
        with pytest.raises(FormatError, match=file[0]):
            open_tokens([tmp_path / file], parts, 4096, tmp_path)
    with pytest.raises(FormatError, match="no such file"):
        open_tokens([tmp_path / "none.txt"], parts, 4096, tmp_path)
    with pytest.raises(ConfigError, match="need a tokenizer"):
        open_tokens(files, {}, 4096, tmp_path)


def test_long_documents_are_encoded_in_blocks_of_paragraphs(tmp_path):
    """A block ends at the first empty line after 65,536 characters."""
    first, second, third = "a" * 65536 + "\n\n", "b" * 65535 + "\n\n" + "c\n\n", "d\n\ne"
    (tmp_path / "a.txt").write_text(first + second + third)
    tokenizer = SimpleNamespace(bos_id=None, eos_ids=(), encode=lambda text, add_special_tokens: [text])
    assert list(encode_files([tmp_path / "a.txt"], tokenizer)) == [[first], [second], [third]]


def test_a_tokenizer_is_trained_on_lines_of_any_length(tmp_path):
    (tmp_path / "line.txt").write_text(STORY.replace("\n", " ") * 3)
    assert train_sentencepiece([tmp_path / "line.txt"], tmp_path, 300) == 300
    assert len(load_tokenizer(tmp_path).encode("hen")) == 2  # BOS, and a piece of its own


@pytest.mark.thorough
def test_encoded_texts_are_named_by_what_they_are_made_of(tmp_path):
    """Another text or tokenizer of the same size and time, or a damaged byte anywhere: they are encoded anew."""
    text, folder = tmp_path / "a.txt", tmp_path / "run"
    parts = read_tokenizer_folder(ASSETS / "storyteller")
    text.write_text("The fox.\n")
    first = open_tokens([text], parts, 4096, folder).ids.tolist()
    (made,) = folder.glob("tokens-*.npy")
    whole = made.read_bytes()
    for offset in range(len(whole)):
        made.write_bytes(whole[:offset] + bytes([whole[offset] ^ 1]) + whole[offset + 1 :])
        assert open_tokens([text], parts, 4096, folder).ids.tolist() == first, offset
    times = text.stat()
    text.write_text("The box.\n")
    os.utime(text, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert open_tokens([text], parts, 4096, folder).ids.tolist() != first
    text.write_text("The fox.\n")
    made = set(folder.glob("tokens-*.npy"))
    other = {**parts, "tokenizer_config.json": parts["tokenizer_config.json"].replace(b"\n", b" ", 1)}
    assert other != parts
    open_tokens([text], other, 4096, folder)
    assert len(set(folder.glob("tokens-*.npy")) - made) == 1


def test_a_tokenizer_of_ones_own(tmp_path):
    (tmp_path / "story.txt").write_text(STORY)
    texts, steps = [tmp_path / "story.txt"] * 2, []
    assert train_sentencepiece(texts, tmp_path / "tokenizer", 320, lambda *at: steps.append(at)) == 320
    assert steps == [(1, 2), (2, 2)]
    tokenizer = load_tokenizer(tmp_path / "tokenizer")
    assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.encode("\n")[-1]) == (1, (2,), 3)
    config = json.loads((tmp_path / "tokenizer" / "tokenizer_config.json").read_text())
    assert (config["add_bos_token"], config["add_eos_token"], config["legacy"]) == (True, False, False)
    assert json.loads((tmp_path / "tokenizer" / "generation_config.json").read_text()) == {
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    assert tokenizer.decode(tokenizer.encode(STORY)) == STORY
    assert tokenizer.decode(tokenizer.encode("The  fox  ")) == "The  fox  "
    assert tokenizer.decode(tokenizer.encode("Zebra \N{SNOWMAN}\n")) == "Zebra \N{SNOWMAN}\n"
    with pytest.raises(TokenizerError, match="cannot make 9000 tokens"):
        train_sentencepiece([tmp_path / "story.txt"], tmp_path / "other", 9000)
    (tmp_path / "empty.txt").write_text(" \n\n")
    with pytest.raises(FormatError, match=r"empty\.txt: there is no text"):
        train_sentencepiece([tmp_path / "empty.txt"], tmp_path / "other", 300)


def test_a_model_with_many_more_tokens_than_its_tokenizer_is_warned_of(tmp_path):
    (tmp_path / "story.txt").write_text(STORY)
    train_sentencepiece([tmp_path / "story.txt"], tmp_path / "tok", 320)
    data = '[data]\ntrain = "story.txt"\ntokenizer = "tok"\n[training]\ncontext = 8\n'
    path = tmp_path / "run.toml"
    path.write_text(MODEL.replace("vocab_size = 64", "vocab_size = 577") + data)
    with pytest.warns(ConfigWarning, match="the tokenizer has 320 tokens, the model's vocabulary 577"):
        start(path, tmp_path / "wide")
    path.write_text(MODEL.replace("vocab_size = 64", "vocab_size = 576") + data)
    start(path, tmp_path / "padded")  # pytest makes errors of warnings
    path.write_text(path.read_text() + f'sample_prompt = "{"The fox " * 40}"\n')
    start(path, tmp_path / "silent")
    path.write_text(path.read_text() + "sample_every = 500\n")
    with pytest.raises(ConfigError, match="sample_prompt: expected fewer tokens than the model's context of 32"):
        start(path, tmp_path / "loud")


def test_a_text_shorter_than_a_window(config, tmp_path):
    np.save(tmp_path / "tokens.npy", np.arange(4, dtype=np.uint16))
    start(config, tmp_path / "run").run()
    batch = read_run(config)[0].batch
    assert [int(row["tokens"]) for row in rows_of(tmp_path / "run")[:2]] == [3 * batch, 6 * batch]


def test_the_shell_says_how_to_go_on(config, tmp_path, monkeypatch):
    command = ["train", str(config), "--out", str(tmp_path / "run")]
    one_step = TrainingRun._one_step

    def interrupted(after, *options):
        def one_step_or_stop(run):
            if run.step == after:
                raise KeyboardInterrupt
            return one_step(run)

        with monkeypatch.context() as patch:
            patch.setattr(TrainingRun, "_one_step", one_step_or_stop)
            run = CliRunner().invoke(cli, [*command, *options])
        assert run.exit_code == 130
        return run.stderr.splitlines()[1:-1]  # between the size of the model and the line after ^C

    nothing = "stopped after step 3 of 12; nothing is saved yet (save_every = 4), so the next run begins anew"
    assert interrupted(3) == interrupted(3, "--resume") == [nothing]
    goes_on = "stopped after step 5 of 12; this goes on from the checkpoint of step 4:"
    for options in ((), ("--resume",)):
        remark, line = interrupted(5, *options)
        assert (remark, line.endswith(f"{' '.join(command)} --resume")) == (goes_on, True)
    run = CliRunner().invoke(cli, [*command, "--resume"])
    assert (run.exit_code, run.stderr.splitlines()[0].rpartition(", ")[2]) == (0, "steps 5 to 12")
    run = CliRunner().invoke(cli, [*command, "--resume"])
    assert (run.exit_code, run.stderr) == (2, "Error: --steps: the run is finished: 12 of 12 steps are done\n")


def test_the_shell_trains_and_generates(tmp_path):
    (tmp_path / "story.txt").write_text(STORY)
    run = CliRunner()
    made = run.invoke(
        cli,
        ["train-tokenizer", str(tmp_path / "story.txt"), "--out", str(tmp_path / "tok"), "--vocab", "320", "--json"],
    )
    assert json.loads(made.stdout)["vocab_size"] == 320
    data = '[data]\ntrain = "story.txt"\ntokenizer = "tok"\n[training]\nsteps = 4\ncontext = 8\nsample_every = 2\n'
    (tmp_path / "run.toml").write_text(MODEL.replace("vocab_size = 64", "vocab_size = 320") + data)
    command = ["train", str(tmp_path / "run.toml"), "--out", str(tmp_path / "run"), "--steps", "2"]
    done = run.invoke(cli, [*command, "--json"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["step"] == 2
    assert re.match(r"9,904 parameters, \d+ tokens of text, steps 1 to 2\n", done.stderr)
    assert (tmp_path / "run" / "samples.txt").read_text().startswith("step 2: Once upon a time")
    assert run.invoke(cli, command).exit_code == 3  # a run is there
    done = run.invoke(cli, [*command, "--steps", "4", "--resume"])
    assert done.exit_code == 0, done.output
    assert "step 4: loss" in done.stdout
    assert re.findall(r"^step (\d): Once upon a time.+\n\n", (tmp_path / "run" / "samples.txt").read_text(), re.M) == [
        *("2", "4")
    ]
    start_there = ["--init", str(tmp_path / "run" / "model")]
    (tmp_path / "next.toml").write_text(data.replace("sample_every = 2\n", ""))
    command = ["train", str(tmp_path / "next.toml"), "--out", str(tmp_path / "next"), "--steps", "1"]
    assert "or init = a folder to start from" in run.invoke(cli, command).stderr
    assert run.invoke(cli, [*command, *start_there]).exit_code == 0
    text = run.invoke(cli, ["generate", "The fox", "--model", str(tmp_path / "run" / "model"), "--max-tokens", "4"])
    assert text.exit_code == 0, text.output
