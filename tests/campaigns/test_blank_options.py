"""Every option and argument of every command, empty and blank: an answer or a clear error, and no fault."""

import os
import socket
import subprocess
import sys

import click
import pytest

from bitnet_ref.cli import cli

MODEL = "storyteller"
VALUES = ("", " ", "\t\n")
RIGHT = (0, 1, 2, 3, 4)  # 1: a comparison differs
BASE = {
    "generate": ["Once", "--max-tokens", "1"],
    "chat": ["--max-tokens", "1"],
    "serve": ["--port", "{port}"],  # which is taken: it ends when it has read all options
    "batch": ["{folder}/in.jsonl", "{folder}/out.jsonl"],
    "embed": ["a text"],
    "inspect": [MODEL],
    "pull": ["{folder}/missing"],
    "rm": ["missing"],
    "convert": [MODEL, "{folder}/out.gguf"],
    "crossval trace": [MODEL, "{folder}/missing.safetensors"],
    "crossval record": [MODEL, "{folder}/trace.safetensors", "--prompt", "Once"],
    "crossval precision": [MODEL, "--prompt", "Once", "--tokens", "1"],
    "crossval verify": ["{folder}/missing.json"],
    "bench cache": [MODEL, "--text", "{folder}/missing.txt"],
    "perplexity": [MODEL, "--text", "{folder}/text.txt", "--length", "16"],
    "train": ["{folder}/missing.toml", "--out", "{folder}/run"],
    "train-tokenizer": ["{folder}/missing.txt", "--out", "{folder}/tokenizer"],
    "lab": ["--no-launch", "--dir", "{folder}/lab"],
}
MUST_FAIL = {("serve", "--api-key"), ("serve", "--allow-host"), ("serve", "--allow-origin"), ("serve", "--host")}


def commands(command, path=()):
    if isinstance(command, click.Group):
        for name, inner in command.commands.items():
            yield from commands(inner, (*path, name))
    else:
        yield " ".join(path), command


CASES = [
    (name, param.opts[-1] if isinstance(param, click.Option) else param.name)
    for name, command in commands(cli)
    for param in command.params
    if name in BASE and not getattr(param, "is_flag", False)
]


def fault_of(name, option, value, folder, port):
    words = [word.format(folder=folder, port=port) for word in BASE[name]]
    given = [option, value] if option.startswith("-") else [value]
    words = [*name.split(), *words, *given] if option.startswith("-") else [*name.split(), *given, *words[1:]]
    environment = {key: text for key, text in os.environ.items() if key != "BITNET_REF_API_KEY"}
    done = subprocess.run(
        [sys.executable, "-m", "bitnet_ref.cli", *words],
        capture_output=True, text=True, errors="replace", timeout=120, check=False,
        stdin=subprocess.DEVNULL, cwd=folder, env=environment,
    )  # fmt: skip
    if done.returncode not in RIGHT or "Traceback" in done.stderr:
        return f"{words}: {done.returncode} {done.stderr[-700:]}"
    if (name, option) in MUST_FAIL and (done.returncode != 2 or "cannot listen" in done.stderr):
        return f"{words}: taken, {done.stderr[-300:]}"
    return None


@pytest.fixture
def port():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        yield taken.getsockname()[1]


@pytest.mark.thorough
@pytest.mark.parametrize("option", ["--api-key", "--allow-host", "--allow-origin", "--host"])
def test_an_empty_option_of_security_is_an_error(tmp_path, port, option):
    pytest.importorskip("uvicorn")
    assert fault_of("serve", option, "", tmp_path, port) is None


@pytest.mark.thorough
@pytest.mark.parametrize("value", VALUES)
def test_a_blank_address_of_workers_is_an_error(tmp_path, value):
    assert fault_of("embed", "--dask", value, tmp_path, 0) is None


@pytest.mark.slow
@pytest.mark.parametrize("name", BASE)
def test_every_option_empty_and_blank(name, tmp_path, port):
    line = (
        '{"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": {"prompt": "Once", "max_tokens": 1}}\n'
    )
    (tmp_path / "in.jsonl").write_text(line)
    (tmp_path / "text.txt").write_text("The fox went home. " * 20)
    options = [option for each, option in CASES if each == name]
    faults = [fault_of(name, option, value, tmp_path, port) for option in options for value in VALUES[:2]]
    print(f"{name}: {len(faults)} runs")
    assert not [fault for fault in faults if fault is not None]
