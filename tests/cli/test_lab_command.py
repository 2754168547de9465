"""bitnet-ref lab: the notebooks, copied and opened."""

import json
import sys
from pathlib import Path

import pytest
from cli_runs import invoke, invoke_json

from bitnet_ref.cli import lab_command
from bitnet_ref.cli.lab_command import copy_notebooks, find_notebooks
from bitnet_ref.cli.shell import size_in_words


def test_lab_copies_the_notebooks(tmp_path):
    target = tmp_path / "mine"
    facts = invoke_json("lab", "--no-launch", "--dir", target)
    source = find_notebooks()
    notebooks = sorted(file.name for file in source.glob("*.ipynb"))
    assert notebooks
    assert set(notebooks) <= set(facts["copied"])
    for name in notebooks:
        copied, stored = (json.loads((folder / name).read_text()) for folder in (target, source))
        assert [cell["source"] for cell in copied["cells"]] == [cell["source"] for cell in stored["cells"]]
        assert any(cell.get("outputs") for cell in stored["cells"])
        assert not any(cell.get("outputs") or cell.get("execution_count") for cell in copied["cells"])
    copy = (target / notebooks[0]).read_bytes()
    (target / notebooks[0]).write_text("my own work")
    facts = invoke_json("lab", "--no-launch", "--dir", target)
    assert (facts["kept"], facts["copied"], facts["launched"]) == ([notebooks[0]], [], False)
    result = invoke("lab", "--no-launch", "--dir", target)
    assert f"kept   {target / notebooks[0]}" in result.stdout
    assert (target / notebooks[0]).read_text() == "my own work"
    assert invoke_json("lab", "--no-launch", "--dir", target, "--force")["copied"] == [notebooks[0]]
    assert (target / notebooks[0]).read_bytes() == copy


def test_lab_copies_only_what_a_reader_needs(tmp_path):
    source = tmp_path / "source"
    (source / ".ipynb_checkpoints").mkdir(parents=True)
    for name in ("01.ipynb", "plots.py", "junk.bin", ".ipynb_checkpoints/01.ipynb"):
        (source / name).write_text('{"cells": []}')
    done = copy_notebooks(source, tmp_path / "target")
    assert done == (["01.ipynb", "plots.py"], [], [])
    assert copy_notebooks(source, tmp_path / "target").unchanged == ["01.ipynb", "plots.py"]


def test_lab_finds_installed_and_checked_out_notebooks(tmp_path):
    package = tmp_path / "bitnet_ref"
    assert find_notebooks(package) is None
    for folder in (tmp_path / "notebooks", package / "notebooks"):  # the second wins
        folder.mkdir(parents=True)
        (folder / "01.ipynb").write_text("{}")
        assert find_notebooks(package) == folder


def test_lab_without_jupyterlab(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "jupyterlab", None)  # what the import system sees when it is not installed
    result = invoke("lab", "--dir", tmp_path / "nb")
    assert result.exit_code == 4
    assert 'pip install "bitnet-ref[notebooks]"' in result.stderr
    assert not (tmp_path / "nb").exists()  # it is said before anything is copied
    assert invoke_json("lab", "--dir", tmp_path / "nb", code=4)["error"]["type"] == "BackendUnavailable"


@pytest.mark.parametrize("user", [0, 1000])
def test_lab_passes_options_on(tmp_path, monkeypatch, user):
    started = []
    monkeypatch.setattr(lab_command, "find_spec", lambda name: name)
    monkeypatch.setattr(lab_command.os, "geteuid", lambda: user)
    monkeypatch.setattr(lab_command.os, "execv", lambda program, args: started.append(args[2:]))
    result = invoke("lab", "--dir", tmp_path, "--", "--port", "9999", "--no-browser")
    root = ["--allow-root"] if user == 0 else []
    assert started == [["jupyterlab", str(tmp_path), *root, "--port", "9999", "--no-browser"]]
    assert ("--allow-root" in result.stderr) == (user == 0)
    invoke("lab", "--dir", tmp_path, "--", "--allow-root")
    assert started[1] == ["jupyterlab", str(tmp_path), "--allow-root"]


def test_lab_writes_one_edition(tmp_path):
    result = invoke("lab", "--teacher", "--nbgrader", "--no-launch", "--dir", tmp_path / "both")
    assert result.exit_code == 2
    assert "--teacher and --nbgrader are two editions: choose one" in " ".join(result.stderr.split())
    assert not (tmp_path / "both").exists()


def test_lab_says_where_the_assignments_are(tmp_path):
    copied = invoke("lab", "--nbgrader", "--dir", tmp_path / "course").stdout.splitlines()
    assert copied
    assert all(Path(line.removeprefix("copied ")).is_file() for line in copied)


@pytest.mark.parametrize(
    "command", [("lab", "--no-launch", "--dir"), ("train", "x.toml", "--out"), ("train-tokenizer", __file__, "--out")]
)
def test_a_folder_where_a_file_is(command, tmp_path):
    (tmp_path / "file").write_text("")
    assert invoke(*command, tmp_path / "file").exit_code == 2
    result = invoke(*command, tmp_path / "file" / "below" / "it")
    assert (result.exit_code, f"cannot be made: {tmp_path / 'file'} is a file" in result.stderr) == (2, True)


@pytest.mark.parametrize(
    ("nbytes", "words"),
    [(0, "0 bytes"), (168, "168 bytes"), (1536, "1.5 KB"), (1023, "1.0 KB"), (5 << 30, "5.0 GB"), (1 << 50, "1024 TB")],
)
def test_sizes_in_words(nbytes, words):
    assert size_in_words(nbytes) == words
