"""The shell interface as a whole: help, errors, exit codes, streams."""

import io
import os
import re
import subprocess
import sys

import click
import numpy as np
import pytest
from cli_runs import FAST, invoke, invoke_json, needs_cython, process
from click.testing import CliRunner
from helpers import BITNET, DATA, GOLDEN, run_python, tiny_tensors, write_checkpoint

import bitnet_ref
from bitnet_ref import errors
from bitnet_ref.cli import COMMANDS, cli
from bitnet_ref.cli.shell import Interface, console, discard_stdout, make_table


def test_version_and_help():
    assert invoke("--version").stdout.split()[-1] == bitnet_ref.__version__
    for command in ([], *([name] for name in cli.commands)):
        for flag in ("--help", "-h"):
            result = invoke(*command, flag)
            assert result.exit_code == 0, result.stderr
            assert "--debug" in result.stdout
            assert "--json" in result.stdout
    models = ["pull", "list", "rm", "convert", "crossval"]
    assert list(cli.commands) == [
        "generate",
        "chat",
        "serve",
        "batch",
        "verify",
        "embed",
        "inspect",
        *models,
        "golden",
        "bench",
        "perplexity",
        "eval",
        "train",
        "train-tokenizer",
        "doctor",
        "lab",
        "grade",
    ]
    for name, (_, sentence) in COMMANDS.items():
        assert cli.commands[name].get_short_help_str(1000) == sentence


def test_each_help_begins_with_the_whole_command_and_ends_with_common_options():
    def commands(group, words):
        for name, command in group.commands.items():
            yield [*words, name], command
            yield from commands(command, [*words, name]) if isinstance(command, click.Group) else ()

    for words, command in commands(cli, []):
        lines = invoke(*words, "--help").stdout.splitlines()
        assert lines[0].startswith(f"Usage: cli {' '.join(words)} [OPTIONS]")
        titles = [line for line in lines if re.fullmatch(r"\S.*:", line)]
        assert titles[-1] == ("Commands:" if isinstance(command, click.Group) else "Options:"), words
        assert len(titles) == len(set(titles))


def test_what_a_closed_pipe_did_not_take_is_dropped(monkeypatch):
    read, write = os.pipe()
    os.close(read)
    with open(write, "w") as stdout:
        monkeypatch.setattr("sys.stdout", stdout)
        stdout.write("words")
        with pytest.raises(BrokenPipeError):
            stdout.flush()
        discard_stdout()  # else it raises again as it is closed
        monkeypatch.undo()


@pytest.mark.parametrize("module", ["bitnet_ref", "bitnet_ref.cli"])
def test_runs_as_a_module(module):
    child = process("--version", module=module, stdout=subprocess.PIPE)
    out, err = child.communicate(timeout=60)
    assert (child.returncode, err) == (0, b"")
    assert out.decode().startswith("bitnet-ref, version")


def test_imports_little():
    code = "import sys, json; import bitnet_ref; first = set(sys.modules); from bitnet_ref.cli import cli\n"
    code += "cli.main(['--help'], standalone_mode=False)\n"
    code += "names = ['click', 'numpy', 'rich', 'jinja2', 'sentencepiece', 'tokenizers', 'readline']\n"
    code += "print(json.dumps([[n in first for n in names], [n in sys.modules for n in names]]))"
    package, shell = run_python(code)
    assert package == [False] * 7
    assert shell == [True] + [False] * 6


FAMILIES = [
    (errors.GenerationError("x"), 2),
    (errors.ShapeError("op", expected="a", got="b"), 2),
    (errors.ConfigError("of an argument"), 2),
    (errors.ConfigError("of a file", path="config.json"), 3),
    (errors.FormatError("x"), 3),
    (errors.StorageError("x"), 3),
    (OSError(28, "No space left on device", "x"), 3),
    (errors.TokenizerError("x"), 3),
    (errors.NumericsError("x", tensor="blocks.0.hook_resid_pre"), 3),
    (errors.BackendError("x"), 4),
    (errors.BackendUnavailable("x"), 4),
    (errors.DeviceError("x"), 4),
    (errors.OutOfMemory("x"), 4),
    (MemoryError(), 4),
    (KeyboardInterrupt(), 130),
    (BrokenPipeError(), 0),
    (ZeroDivisionError("a bug"), 70),
]


@pytest.mark.parametrize(("error", "code"), FAMILIES, ids=lambda value: type(value).__name__)
def test_exit_codes(error, code):
    @click.group(cls=Interface)
    def group():
        pass

    @group.command()
    def fail():
        raise error

    result = CliRunner().invoke(group, ["fail"])
    assert result.exit_code == code
    assert ("Error:" in result.stderr) == (code not in (0, 130))
    assert ("Traceback" in result.stderr) == (code == 70)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        (("generate", "x", "--model", "no/such/model"), 3, "no/such/model: no such file, folder or model"),
        (("generate", "x", "--model", "qwertz"), 3, "shipped are storychat, storyteller"),
        (("inspect", "storyteler"), 3, "did you mean storyteller? All names: bitnet-ref list"),
        (("generate", "x", "--model", DATA), 3, "there is no such file; expected config.json, a .gguf"),
        (("crossval", "trace", "storyteller", DATA / "make_golden.py"), 3, "not a safetensors file: its header would"),
        (("golden", "no/such/folder"), 2, "no/such/folder: there is no folder"),
        (("golden", DATA), 2, "data: is there already"),
        (("golden", DATA / "make_golden.py"), 2, ".py: is there already; remove it, or give another name"),
        (
            ("generate", "x", "--temperature", "-1"),
            2,
            "--temperature: expected 0 or a number from 1e-100 to 1e+100, got -1.0",
        ),
        (("generate", "x", "--top-p", "3"), 2, "--top-p: expected a number above 0, at most 1"),
        (("chat", "--min-tokens", "9", "--max-tokens", "3"), 2, "--min-tokens: 9 is more than --max-tokens, 3"),
        (("generate", "x", "--num-beams", "2", "-n", "3"), 2, "-n: expected at most --num-beams, 2"),
        (("generate", "x", "--num-beams", "2", "--stop", "y"), 2, "takes no --stop, got ('y',)"),
        (("generate", "x", "--num-beams", "2", "--stop", "y"), 2, "or set --num-beams 1"),
        (("generate", "x", "--max-tokens", "1000"), 2, "the model's context is 256; lower --max-tokens to 253, "),
        (("generate", "x", "--max-tokens", "1000"), 2, "or see --overflow truncate"),
        (("generate", "x", "--guided-regex", "a", "--guided-json", "{}"), 2, "--guided-json and --guided-regex: the"),
        pytest.param(
            *(("generate", "x", "--backend", "cython", "--dtype", "float64"), 2),
            "--dtype: backend 'cython' computes in float32",
            marks=needs_cython,
        ),
        (("generate", "x", "--backend", "numpy", "--memory-limit", "9"), 4, "--memory-limit bounds a card's memory"),
        (("generate", "x", "--gpu-layers", "3", "--backend", "numpy"), 4, "--devices and --gpu-layers say what"),
        (("generate", "x", "--devices", "1,1"), 4, "--devices: expected different numbers of cards"),
        (("generate", "1 x", "--raw-ids"), 2, "expected token ids"),
        (("generate", "4096", "--raw-ids"), 2, "token id 4096"),
        (("generate", "x", "--model", GOLDEN / "llama-dense"), 3, "--raw-ids"),
        (("inspect", DATA / "make_golden.py"), 3, "other formats are not read"),
        (("convert", DATA / "adapters/alone/adapter", "none", "--to", "hf-bf16"), 3, "alone with --adapter none"),
    ],
)
def test_errors_are_one_message(args, code, words):
    result = invoke(*args)
    assert (result.exit_code, result.stdout) == (code, "")
    assert words in result.stderr
    assert result.stderr.startswith("Error: ")
    assert "Traceback" not in result.stderr
    facts = invoke_json(*args, code=code)["error"]
    assert words in facts["message"]
    assert issubclass(getattr(errors, facts["type"]), errors.BitNetRefError)


@pytest.mark.parametrize(
    ("flag", "value", "expected"),
    [
        ("--memory-limit", "zz", "expected bytes, or a text like '8GiB', got 'zz'"),
        ("--gpu-layers", "zz", "expected a number of layers, or all, got 'zz'"),
        ("--devices", "zz", "expected whole numbers like 0,1,5, got 'zz'"),
        ("--logit-bias", "262", "expected ID=BIAS like 262=-5, got '262'"),
    ],
)
def test_values_that_are_no_values_are_errors_of_usage(flag, value, expected):
    result = invoke("generate", "x", flag, value)
    assert (result.exit_code, result.stdout) == (2, "")
    assert f"Error: Invalid value for '{flag}': {expected}" in " ".join(result.stderr.split())


@pytest.mark.parametrize(
    "args",
    [
        ("train", "x.toml", "--out"),
        ("lab", "--no-launch", "--dir"),
        ("convert", "storyteller", "--to", "hf-bf16"),
        ("crossval", "record", "storyteller"),
        ("embed", "x", "--out"),
        ("golden",),
    ],
)
def test_a_blank_name_is_not_written(args, monkeypatch, tmp_path):
    """Of a variable that was not set: it was the folder one is in."""
    monkeypatch.chdir(tmp_path)
    for blank in ("", " "):
        result = invoke(*args, blank)
        assert (result.exit_code, "expected a name, got a blank one" in result.stderr) == (2, True)
    assert list(tmp_path.iterdir()) == []


OUTPUTS = [
    ("crossval", "record", "no/such/model", "{}"),
    ("crossval", "backends", "no/such/model", "--receipt", "{}"),
    ("crossval", "backends", "no/such/model", "--html", "{}"),
    ("crossval", "trace", "no/such/model", "no/such/trace", "--html", "{}"),
]


@pytest.mark.parametrize("args", OUTPUTS, ids=" ".join)
def test_targets_are_checked_before_any_work(args, tmp_path):
    (tmp_path / "folder.svg").mkdir()
    targets = {"none/x.svg": "there is no folder", "folder.svg": "is a folder"}
    for name, words in list(targets.items())[: 1 if "record" in args else 2]:  # all runs are recorded into a folder
        result = invoke(*(arg.format(tmp_path / name) for arg in args))
        assert result.exit_code == 2
        assert words in result.stderr
        assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("args", "endings"), [(("embed", "x"), ".npy or .jsonl"), (("crossval", "matrix", "no/such/model"), ".md or .html")]
)
def test_a_file_whose_ending_says_nothing_is_refused(args, endings, tmp_path):
    for name in ("m.txt", "m", "m.HTML"):
        result = invoke(*args, "--out", tmp_path / name)
        assert (result.exit_code, result.stdout) == (2, "")
        assert f"expected a name that ends in {endings}, got {name}" in " ".join(result.stderr.split())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full here")
@pytest.mark.parametrize("args", [["--help"], ["list", "--json"]], ids=" ".join)
def test_a_full_disk_behind_stdout(args):
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "bitnet_ref.cli", *args]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 3
    assert done.stderr.startswith("Error: standard output: No space left on device")
    assert len(done.stderr.splitlines()) == 1


def test_json_errors_carry_the_place(tmp_path):
    tensors = tiny_tensors(BITNET)
    tensors["model.norm.weight"][2] = np.float32("nan")
    folder = write_checkpoint(tmp_path / "m", BITNET, tensors)
    facts = invoke_json("generate", "1 2", "--raw-ids", "--model", folder, *FAST, code=3)["error"]
    assert facts["type"] == "FormatError"
    assert facts["path"] == str(folder / "model.safetensors")
    assert facts["field"] == "model.norm.weight"
    assert facts["offset"] > 8


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("generate", "x", "--tempature", "1"), "--temperature"),
        (("generate",), "PROMPT"),
        (("generate", "x", "--threads", "0"), "--threads"),
        (("generate", "x", "--backend", "gpu"), "cython"),
        (("transmogrify",), "transmogrify"),
    ],
)
def test_wrong_usage(args, words):
    result = invoke(*args)
    assert result.exit_code == 2
    assert words in result.stderr


def test_unavailable_backend():
    reasons = {name: reason for name, reason in bitnet_ref.available_backends().items() if reason is not None}
    for name, reason in reasons.items():
        result = invoke("generate", "x", "--backend", name)
        assert result.exit_code == 4
        assert reason in result.stderr
    result = CliRunner().invoke(cli, ["generate", "x"], env={"BITNET_REF_NUM_THREADS": "many"})
    assert result.exit_code == 4
    assert "BITNET_REF_NUM_THREADS" in result.stderr


@pytest.mark.parametrize("args", [("--debug", "inspect", "nothing"), ("inspect", "nothing", "--debug")])
def test_debug_shows_the_traceback(args):
    result = invoke(*args)
    assert result.exit_code == 3
    assert "Traceback" in result.stderr
    assert result.stderr.splitlines()[-1].startswith("Error: nothing")


def test_a_heading_keeps_its_own_bars():
    """Marks stand before a heading: ">" and "|" within it are part of it."""
    out = console(io.StringIO())
    out.print(make_table((">|max |d logit|", "|a > b", "c|"), [("1", "2", "3")]))
    assert out.file.getvalue().splitlines()[0].split("  ") == ["max |d logit|", "a > b", "c|"]


def test_wrong_usage_says_what_to_write(tmp_path):
    gguf, text = tmp_path / "engine.gguf", tmp_path / "text.txt"
    gguf.write_bytes((DATA / "gguf" / "i2_s.gguf").read_bytes())
    text.write_text("a text")
    for words, code, message in (
        (["inspect", "Once", "upon", "a time"], 2, 'Put a path with spaces in quotes: "Once upon a time"'),
        (["list", "a", "b"], 2, "Got unexpected extra arguments (a b)"),
        (["perplexity", text], 2, f"Is {text} the text? Write: bitnet-ref perplexity --text {text}"),
        (["perplexity", "storychat"], 2, "Missing option '--text'. Write: bitnet-ref perplexity storychat --text FILE"),
        (["crossval", "trace", "storyteller", gguf], 3, f"a GGUF is compared by bitnet-ref crossval llama-cpp {gguf}"),
        (["convert", "storyteller", gguf, "--to", "gguf-tq2_0"], 2, "is there already; --force replaces it"),
    ):
        result = invoke(*words)
        assert result.exit_code == code
        assert result.stderr.rstrip().endswith(message), result.stderr


@pytest.mark.thorough
def test_a_warning_is_one_line_without_a_place_in_python(tmp_path):
    folder = write_checkpoint(tmp_path / "odd", {**BITNET, "sparkle": 3})
    command = ("generate", "1 2", "--raw-ids", "--model", folder, "--max-tokens", 1, *FAST)
    running = process(*command, stdout=subprocess.PIPE)
    lines = running.communicate()[1].decode().splitlines()
    assert running.returncode == 0, lines
    assert lines[0].startswith(f"Warning: {folder / 'config.json'}: sparkle: ignored")
    assert not any(".py" in line or "warnings.warn" in line for line in lines)
