"""Training of LoRA adapters: the run, what it saves, and, in slow tests, torch's and peft's numbers."""

import json
import os
import re
import shlex
import subprocess
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from cli_runs import invoke, invoke_json
from helpers import DATA, GOLDEN, difference, model
from safetensors.numpy import load_file

import bitnet_ref
from bitnet_ref.cli.generation_options import read_adapters
from bitnet_ref.crossval.tolerances import GRADIENTS
from bitnet_ref.errors import ConfigError, FormatError
from bitnet_ref.formats.hashes import weight_hash
from bitnet_ref.training import TrainingRun, read_run
from bitnet_ref.training.lora import TARGETS, LoraTrainer

TERNARY, NORMED, DENSE = (GOLDEN / name for name in ("bitnet-packed-offline", "llama-packed-rmsnorm", "llama-dense"))
BIASED, ONLINE = GOLDEN / "llama-bf16-biases", GOLDEN / "bitnet-bf16-online"
ROOT = Path(__file__).parents[2]
RUN = """
[data]
train = "tokens.npy"
[training]
lora = "BASE"
lora_rank = 4
lora_alpha = 6.0
steps = 8
batch = 3
context = 12
lr = 3e-3
warmup_steps = 2
weight_decay = 0.0
save_every = 4
"""


@pytest.fixture
def config(tmp_path):
    np.save(tmp_path / "tokens.npy", np.tile(np.random.default_rng(3).integers(0, 500, 13), 50).astype(np.uint16))
    (tmp_path / "run.toml").write_text(RUN.replace("BASE", str(TERNARY)))
    return tmp_path / "run.toml"


def start(config, folder, **options):
    settings, table = read_run(config)
    return TrainingRun(settings, folder, table, threads=2, **options)


def drawn(folder, **settings):
    """A trainer whose factors are no longer the first ones."""
    trainer = LoraTrainer(model(folder), rank=3, targets=TARGETS, **settings)
    dice = np.random.default_rng(0)
    for name, factor in trainer.masters.items():
        if ".lora_B." in name:
            factor[:] = dice.standard_normal(factor.shape) * 0.02
    return trainer


def test_a_run_and_its_adapter(config, tmp_path):
    before, losses = weight_hash(model(TERNARY).weights), []
    run = start(config, tmp_path / "run")
    assert set(run.trainer.masters) == {
        f"model.layers.{layer}.self_attn.{kind}_proj.lora_{letter}.weight"
        for layer in (0, 1)
        for kind in "qv"
        for letter in "AB"
    }
    run.run(lambda row: losses.append(row.loss))
    assert losses[-1] < losses[0]
    adapted = bitnet_ref.load(tmp_path / "run" / "adapter", backend="numpy")  # with the base that it names
    tokens = np.arange(12)
    assert difference(adapted.logits(tokens), run.trainer.logits(tokens)) < 3e-4
    assert difference(adapted.logits(tokens), model(TERNARY).logits(tokens)) > 1e-3
    m = bitnet_ref.load(TERNARY, backend="numpy")
    m.put_adapter("a", run.trainer.adapter())
    assert np.array_equal(m.with_adapter("a").logits(tokens), adapted.logits(tokens))
    assert weight_hash(m.weights) == before
    settings = json.loads((tmp_path / "run" / "adapter" / "adapter_config.json").read_text())
    assert (settings["r"], settings["lora_alpha"], settings["target_modules"]) == (4, 6, ["q_proj", "v_proj"])


def test_the_base_of_an_adapter_is_an_absolute_path(config, tmp_path, monkeypatch):
    monkeypatch.chdir(DATA)
    for base in ("golden/bitnet-packed-offline", "gguf:tq2_0.gguf"):
        trainer = TrainingRun(replace(read_run(config)[0], lora=base), tmp_path / "run").trainer
        assert trainer.base == str(DATA / base.replace(":", "/"))


@pytest.mark.thorough
def test_resuming_gives_the_same_bits(config, tmp_path):
    start(config, tmp_path / "whole").run()

    def stop(row):
        if row.step == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        start(config, tmp_path / "broken").run(stop)
    start(config, tmp_path / "broken", resume=True).run()
    for name in ("checkpoint.safetensors", "adapter/adapter_model.safetensors"):
        assert (tmp_path / "broken" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    config.write_text(config.read_text().replace("lora_alpha = 6.0", "lora_alpha = 7.0"))
    with pytest.raises(FormatError, match=r"of another run: alpha 6.0, here 7.0"):
        start(config, tmp_path / "whole", resume=True)


def test_the_command(config, tmp_path):
    out = tmp_path / "run"
    facts = invoke_json("train", config, "--lora", TERNARY, "--out", out, "--steps", "2", "--threads", "1")
    assert facts["adapter"] == str(out / "adapter")
    assert facts["parameters"] == sum(
        array.size for array in load_file(out / "adapter/adapter_model.safetensors").values()
    )


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    "base", [TERNARY, NORMED, DENSE, BIASED, ONLINE, DATA / "adapters" / "beside"], ids=lambda p: p.name
)
@pytest.mark.parametrize("backend", ["numpy", "cython"])
def test_forward_pass(base, backend, tmp_path):
    """That of the model with the adapter that was saved; at the beginning that of the model."""
    given = model(base) if base.name != "beside" else bitnet_ref.load(base, backend="numpy", adapter="none")
    tokens = np.arange(1, 14)
    trainer = LoraTrainer(given, rank=3, targets=TARGETS, backend=backend)
    assert difference(trainer.logits(tokens), given.logits(tokens)) < 3e-4
    for factor in trainer.masters.values():
        factor[:] = np.random.default_rng(factor.size).standard_normal(factor.shape) * 0.02
    trainer.save(tmp_path)
    whole = bitnet_ref.load(base, backend="numpy", adapter=tmp_path)
    assert difference(trainer.logits(tokens), whole.logits(tokens)) < 3e-4
    loss, gradients = trainer.loss_and_gradients(tokens[None])
    assert set(gradients) == set(trainer.masters)
    assert trainer.step(tokens[None]) == loss
    assert trainer.loss(tokens[None]) < loss


def test_what_is_refused(config, tmp_path):
    for line, field in (
        ("mix_steps = 3", "mix_steps"),
        ('lora_targets = ["x"]', "lora_targets"),
        ("lora_rank = 0", "lora_rank"),
    ):
        kept = [each for each in config.read_text().splitlines() if not each.startswith(line.split(" =")[0])]
        (tmp_path / "other.toml").write_text("\n".join([*kept, line]))
        with pytest.raises(ConfigError) as caught:
            start(tmp_path / "other.toml", tmp_path / "run")
        assert caught.value.field == field
    (tmp_path / "other.toml").write_text('[model]\nmodel_type = "llama"\n' + config.read_text())
    with pytest.raises(ConfigError, match="no table"):
        start(tmp_path / "other.toml", tmp_path / "run")
    with pytest.raises(ConfigError, match="adapter on already; give its base"):
        LoraTrainer(model(DATA / "adapters" / "beside"))
    with pytest.raises(ConfigError, match="activations: training has no gradient"):
        LoraTrainer(bitnet_ref.load(DATA / "gguf" / "tq2_0.gguf", backend="numpy", activations="blocks"))


@pytest.mark.slow
@pytest.mark.parametrize("base", [DENSE, BIASED, ONLINE], ids=lambda p: p.name)
def test_against_torch_and_peft(base, tmp_path):
    """peft reads what was saved; its logits, its loss, the gradient of each factor and a step of AdamW are ours."""
    python = os.environ.get("BITNET_REF_PEFT_PYTHON")
    if not python:
        pytest.skip("BITNET_REF_PEFT_PYTHON names no interpreter with torch, transformers and peft")
    trainer = drawn(base, lr=1e-3, weight_decay=0.1, base=str(base), backend="numpy")
    trainer.save(tmp_path / "adapter")
    tokens = np.random.default_rng(1).integers(0, trainer.config.vocab_size, (2, 20))
    np.save(tmp_path / "tokens.npy", tokens)
    script = Path(__file__).with_name("peft_step.py")
    arguments = [base, tmp_path / "adapter", tmp_path / "tokens.npy", tmp_path / "out.safetensors", "1e-3"]
    subprocess.run([python, script, *map(str, arguments)], check=True)
    theirs = load_file(tmp_path / "out.safetensors")
    loaded = bitnet_ref.load(base, backend="numpy", adapter=tmp_path / "adapter")
    is_ternary = trainer.config.quantization is not None
    for logits in trainer.logits(tokens[0]), loaded.logits(tokens[0]):
        rows = np.abs(logits - theirs["logits"]).max(axis=1) < 3e-4
        assert rows.mean() >= (0.8 if is_ternary else 1)  # an int8 that rounds the other way moves its token's row
    loss, gradients = trainer.loss_and_gradients(tokens)
    assert abs(loss - float(theirs["loss"][0])) < (1e-2 if is_ternary else 1e-5)
    limit = GRADIENTS["ternary" if is_ternary else "dense"].relative_l2
    for name, gradient in gradients.items():
        other = theirs[f"grad.base_model.model.{name}"]
        assert np.linalg.norm(gradient - other) <= limit * np.linalg.norm(other), name
    trainer.apply(gradients)
    for name, factor in trainer.masters.items():
        other = theirs[f"master.base_model.model.{name}"]
        assert difference(factor, other) < 1e-4 + 2e-3 * is_ternary, name  # of a gradient near 0, Adam takes the sign


def section(file, title):
    """The fenced blocks of a section of a guide: {language: text}."""
    text = (ROOT / "docs" / file).read_text(encoding="utf-8")
    body = text.split(f"\n## {title}\n")[1].split("\n## ")[0]
    return dict(re.findall(r"^```(\w+)\n(.*?)^```", body, re.DOTALL | re.MULTILINE))


@pytest.mark.thorough
def test_the_guides(tmp_path, monkeypatch):
    """Their settings, commands and Python run as they stand."""
    monkeypatch.chdir(tmp_path)
    training, using = section("training.md", "An adapter of a model"), section("using.md", "Adapters")
    (tmp_path / "lora.toml").write_text(training["toml"])
    (tmp_path / "stories.txt").write_text((ROOT / "notebooks" / "alice.txt").read_text(encoding="utf-8")[:20000])
    for line in training["console"].splitlines():
        done = invoke(*shlex.split(line.removeprefix("$ bitnet-ref ")))
        assert done.exit_code == 0, done.output
    names = {"bitnet_ref": bitnet_ref}
    exec(using["python"], names)
    texts = [names["model"].generate("Once upon a time", adapter=name).text for name in ("mine", None)]
    assert names["texts"] == texts
    assert names["whole"].generate("Once upon a time").text == texts[0]
    command, *words = shlex.split(using["console"].removeprefix("$ bitnet-ref "), comments=True)
    assert (command, words[1]) == ("serve", "--lora")
    assert read_adapters((words[2],), [words[0]]) == {("storyteller", "mine"): Path("adapted/adapter")}
