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
    os.symlink(path, folder / "symbolic")
    os.link(path, folder / "hard")
    return [path, folder / "a" / ".." / path.name, folder / "symbolic", folder / "hard"]


# What is read, and the command line without it: {source} and {target} stand for the same file.
LINES = {
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


@pytest.mark.parametrize("line", LINES)
def test_the_same_file_is_refused_and_stays(line, tmp_path):
    source, other = tmp_path / "x.gguf", tmp_path / "other"
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


def test_every_command_that_writes_a_file_declares_it():
    """What is checked is found by the type of the parameter; these are the commands that have one."""
    assert {"batch", "convert", "perplexity", "crossval trace"} <= set(commands_that_write(cli))
