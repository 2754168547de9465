"""Runs from a TOML file: data, checkpoints, resuming to the bit, bad input; and the shell's commands."""

import csv
import json
import lzma
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from click.testing import CliRunner

import bitnet_ref
from bitnet_ref.cli import cli
from bitnet_ref.errors import ConfigError, FormatError, NumericsError, TokenizerError
from bitnet_ref.formats.open import ASSETS
from bitnet_ref.tokenizers import load_tokenizer
from bitnet_ref.training import TrainingRun, read_run
from bitnet_ref.training.data import TokenFile, open_tokens, train_sentencepiece

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
    seen = []
    last = start(config, tmp_path / "run").run(seen.append)
    assert [row.step for row in seen] == list(range(1, 13))
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


class Stop(Exception):
    pass


@pytest.mark.parametrize("after", [1, 5, 11])
def test_resuming_gives_the_same_bits(after, config, tmp_path):
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
    run = start(config, tmp_path / "nan")
    run.trainer.masters["model.layers.1.mlp.down_proj.weight"][0, 0] = np.nan
    with pytest.raises(NumericsError, match="NaN"):
        run.run()
    text = config.read_text().replace("steps = 12", "steps = 60") + "spike = 1.5\n"
    config.write_text(text)
    run = start(config, tmp_path / "leap")

    def spoil(row):
        if row.step == 40:
            run.trainer.masters["model.embed_tokens.weight"] *= 100

    with pytest.raises(NumericsError, match=r"leapt to .* the largest gradient is that of model\."):
        run.run(spoil)
    assert start(config, tmp_path / "leap", resume=True).step == 40


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
        ("steps = 12", "stepps = 12", r"training\.stepps: is no setting of a run; did you mean steps\?"),
        ("steps = 12", "steps = 0", r"steps: expected a whole number from 1"),
        ("lr = 5e-3", "lr = nan", r"lr: expected a finite number"),
        ('train = "tokens.npy"', "", r"data\.train: expected the files"),
        ('train = "tokens.npy"', "train = 3", r"train: expected a path"),
        ("context = 8", "context = 64", r"context: expected at most the model's context of 32"),
        ("[training]", "[trainning]", "expected the tables"),
        ("hidden_size = 16", "hidden_size = 15", "num_attention_heads|head_dim"),
    ],
)
def test_wrong_settings(old, new, error, config, tmp_path):
    config.write_text(config.read_text().replace(old, new))
    with pytest.raises(ConfigError, match=error):
        start(config, tmp_path / "run")


def test_wrong_files(config, tmp_path):
    with pytest.raises(FormatError, match="no such file"):
        read_run(tmp_path / "none.toml")
    for ids, error in (
        (np.zeros(1, np.uint16), "at least two"),
        (np.zeros((2, 2), int), "one row"),
        (np.array([1, 64]), "id 64 is outside the vocabulary of 64"),
    ):
        np.save(tmp_path / "tokens.npy", ids)
        with pytest.raises(FormatError, match=error):
            start(config, tmp_path / "run")
    (tmp_path / "tokens.npy").write_bytes(b"not an array")
    with pytest.raises(FormatError, match="token ids"):
        start(config, tmp_path / "run")


def test_a_checkpoint_of_another_run(config, tmp_path):
    start(config, tmp_path / "run").run()
    config.write_text(config.read_text().replace("batch = 3", "batch = 2"))
    with pytest.raises(FormatError, match=r"of another run: batch 3, here 2$"):
        start(config, tmp_path / "run", resume=True)
    text = config.read_text()
    config.write_text(text.replace("intermediate_size = 32", "intermediate_size = 48"))
    with pytest.raises(FormatError, match=r"of another run: intermediate_size 32, here 48, batch 3, here 2$"):
        start(config, tmp_path / "run", resume=True)
    config.write_text(text)
    (tmp_path / "run" / "checkpoint.safetensors").write_bytes(b"\0" * 100)
    with pytest.raises(FormatError):
        start(config, tmp_path / "run", resume=True)


def test_a_full_disk_leaves_the_old_checkpoint(config, tmp_path, monkeypatch):
    run = start(config, tmp_path / "run")
    monkeypatch.setattr(
        "bitnet_ref.training.run.SafetensorsWriter.write", lambda *_: (_ for _ in ()).throw(OSError(28, "no space"))
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


def test_texts_become_tokens_once(tmp_path):
    tokenizer = load_tokenizer(ASSETS / "storyteller")
    (tmp_path / "a.txt").write_text("The fox.\n\n\nA hen.\n")
    (tmp_path / "b.txt.xz").write_bytes(lzma.compress(b"One day.\n"))
    files = [tmp_path / "a.txt", tmp_path / "b.txt.xz"]
    tokens = open_tokens(files, tokenizer, 4096, tmp_path)
    expected = [
        [1, *tokenizer.encode(text, add_special_tokens=False), 2] for text in ("The fox.", "A hen.", "One day.")
    ]
    assert tokens.ids.tolist() == [token for document in expected for token in document]
    (made,) = tmp_path.glob("tokens-*.npy")
    before = made.stat().st_mtime_ns
    open_tokens(files, tokenizer, 4096, tmp_path)
    assert made.stat().st_mtime_ns == before
    for file, data in (("c.txt", b"\xff"), ("d.txt.xz", b"no xz"), ("e.txt", b""), ("f.txt", b"\n\n\n \n")):
        (tmp_path / file).write_bytes(data)
        with pytest.raises(FormatError, match=file[0]):
            open_tokens([tmp_path / file], tokenizer, 4096, tmp_path)
    with pytest.raises(FormatError, match="no such file"):
        open_tokens([tmp_path / "none.txt"], tokenizer, 4096, tmp_path)
    with pytest.raises(ConfigError, match="need a tokenizer"):
        open_tokens(files, None, 4096, tmp_path)


def test_a_tokenizer_of_ones_own(tmp_path):
    (tmp_path / "story.txt").write_text(STORY)
    assert train_sentencepiece([tmp_path / "story.txt"], tmp_path / "tokenizer", 320) == 320
    tokenizer = load_tokenizer(tmp_path / "tokenizer")
    assert tokenizer.decode(tokenizer.encode(STORY)) == STORY
    assert tokenizer.decode(tokenizer.encode("Zebra \N{SNOWMAN}\n")) == "Zebra \N{SNOWMAN}\n"
    with pytest.raises(TokenizerError, match="cannot make 9000 tokens"):
        train_sentencepiece([tmp_path / "story.txt"], tmp_path / "other", 9000)
    (tmp_path / "empty.txt").write_text(" \n\n")
    with pytest.raises(FormatError, match=r"empty\.txt: there is no text"):
        train_sentencepiece([tmp_path / "empty.txt"], tmp_path / "other", 300)


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
    assert (tmp_path / "run" / "samples.txt").read_text().startswith("step 2: Once upon a time")
    assert run.invoke(cli, command).exit_code == 3  # a run is there
    done = run.invoke(cli, [*command, "--steps", "4", "--resume"])
    assert done.exit_code == 0, done.output
    assert "step 4: loss" in done.stdout
    text = run.invoke(cli, ["generate", "The fox", "--model", str(tmp_path / "run" / "model"), "--max-tokens", "4"])
    assert text.exit_code == 0, text.output
