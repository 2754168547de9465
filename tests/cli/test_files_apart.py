"""A file that a command reads is never the one that it writes, however the two are spelt."""

import os
import shutil

import pytest
from click.testing import CliRunner
from helpers import GOLDEN

from bitnet_ref.cli import cli
from bitnet_ref.cli.shell import OutputPath


def spellings(path):
    """The file by other names."""
    folder = path.parent
    (folder / "a").mkdir()
    os.symlink(path, symbolic := folder / f"symbolic{path.suffix}")
    os.link(path, hard := folder / f"hard{path.suffix}")
    return [path, folder / "a" / ".." / path.name, symbolic, hard]


# What is read, and the command line without it: {source} and {target} stand for the same file.
LINES = {
    "embed": ["embed", "--file", "{source}", "--out", "{target}"],
    "batch": ["batch", "{source}", "{target}"],
    "batch config": ["batch", "{other}", "{target}", "--config", "{source}"],
    "convert": ["convert", "{source}", "{target}", "--to", "native", "--force"],
    "perplexity": ["perplexity", "storyteller", "--text", "{source}", "--state", "{target}"],
    "html": ["crossval", "trace", "storyteller", "{source}", "--html", "{target}"],
    "receipt": ["crossval", "trace", "storyteller", "{source}", "--receipt", "{target}"],
}


def commands_that_write(group, name=""):
    for each, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands_that_write(command, f"{name} {each}".strip())
        elif any(isinstance(param.type, OutputPath) for param in command.params):
            yield f"{name} {each}".strip()


def parameters(group, name=""):
    for each, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from parameters(command, f"{name} {each}".strip())
        else:
            yield from ((f"{name} {each}".strip(), param) for param in command.params)


@pytest.mark.parametrize("line", LINES)
def test_the_same_file_is_refused_and_stays(line, tmp_path):
    source, other = tmp_path / ("x.npy" if line == "embed" else "x.gguf"), tmp_path / "other"
    source.write_bytes(content := b'{"custom_id": "1"}\n' * 3)
    other.write_bytes(b"{}\n")
    for target in spellings(source):
        words = [word.format(source=source, target=target, other=other) for word in LINES[line]]
        result = CliRunner().invoke(cli, words)
        assert result.exit_code == 2, (words, result.output)
        assert "would be replaced; name another file" in " ".join(result.output.split())
        assert source.read_bytes() == content


def test_a_file_of_a_model_folder_is_refused(tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(GOLDEN / "bitnet-packed-offline", folder)
    target = next(folder.glob("*.safetensors"))
    result = CliRunner().invoke(cli, ["convert", str(folder), str(target), "--to", "native", "--force"])
    assert (result.exit_code, "name another file" in " ".join(result.output.split())) == (2, True), result.output
    assert target.stat().st_size == (GOLDEN / "bitnet-packed-offline" / target.name).stat().st_size


def test_a_run_does_not_replace_what_it_reads(tmp_path):
    (tmp_path / "run" / "model").mkdir(parents=True)
    (tmp_path / "run" / "model" / "model.safetensors").write_bytes(b"weights")
    (tmp_path / "run" / "samples.txt").write_text("texts")
    os.symlink(tmp_path / "run" / "model", tmp_path / "link")
    lines = {
        "init": 'init = "run/model"',
        "--distil": 'teacher = "link/model.safetensors"',
        "tokenizer": 'tokenizer = "run/../link"',
        "train": 'train = ["run/samples.txt"]',
    }
    for field, line in lines.items():
        (tmp_path / "run.toml").write_text(f"[data]\n{line}\n" + 'train = "x.npy"\n' * (field != "train"))
        result = CliRunner().invoke(cli, ["train", str(tmp_path / "run.toml"), "--out", str(tmp_path / "run")])
        assert result.exit_code == 2
        assert f"{field}: " in result.output
        assert "would be replaced by the run" in result.output


@pytest.mark.parametrize("name", ["tokenizer.model", "generation_config.json"])
def test_a_tokenizer_does_not_replace_its_texts(tmp_path, name):
    (tmp_path / name).write_text("a cat and a hat. " * 50)
    words = ["train-tokenizer", str(tmp_path / name), "--out", str(tmp_path), "--vocab", "300"]
    result = CliRunner().invoke(cli, words)
    assert (result.exit_code, "would be replaced" in result.output) == (2, True), result.output
    assert (tmp_path / name).read_text().startswith("a cat")


def test_every_command_that_writes_a_file_declares_it():
    """What is checked is found by the type of the parameter; these are the commands that have one."""
    assert {"batch", "convert", "embed", "perplexity", "crossval trace"} <= set(commands_that_write(cli))
    for name, param in parameters(cli):
        if param.name in ("out", "html", "receipt", "state", "target", "destination") and name != "crossval verify":
            assert isinstance(param.type, OutputPath) or not getattr(param.type, "file_okay", False), (name, param.name)
