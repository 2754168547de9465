"""The shell interface: each command, its JSON, its exit codes, and how it behaves when cut off. Nothing is mocked."""

import importlib.metadata
import json
import os
import pty
import shutil
import signal
import subprocess
import sys
from dataclasses import fields, replace

import click
import numpy as np
import pytest
from click.testing import CliRunner
from helpers import BITNET, DATA, GOLDEN, chat_folder, run_python, tiny_tensors, write_checkpoint
from helpers import model as shared_model

import bitnet_ref
from bitnet_ref import doctor, errors
from bitnet_ref.cli import cli
from bitnet_ref.cli.lab_command import copy_notebooks, find_notebooks
from bitnet_ref.cli.shell import Interface, size_in_words
from bitnet_ref.doctor import check_backend
from bitnet_ref.generation import SamplingParams
from bitnet_ref.inspection import inspect_model
from bitnet_ref.threads import resolve_threads
from bitnet_ref.weights import TernaryWeight

PROMPT = "Once upon a time"
needs_cython = pytest.mark.skipif(bitnet_ref.available_backends()["cython"] is not None, reason="no extension here")
BACKEND = "numpy" if bitnet_ref.available_backends()["cython"] else "cython"
FAST = ("--backend", BACKEND, "--threads", "1")  # one thread: the suite may share its cores
SLOW = ("--backend", "numpy", "--threads", "1")  # for what is to be interrupted


def invoke(*args, stdin=None):
    return CliRunner().invoke(cli, list(map(str, args)), input=stdin)


def invoke_json(*args, stdin=None, code=0):
    result = invoke(*args, "--json", stdin=stdin)
    assert result.exit_code == code, result.output
    return json.loads(result.stdout)


def process(*args, module="bitnet_ref.cli", **options):
    """The command in a process of its own, which obeys SIGINT even where the test runner was told to ignore it."""
    return subprocess.Popen(
        [sys.executable, "-m", module, *map(str, args)],
        stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        **options,
    )


@pytest.fixture(scope="module")
def expected():
    """The first greedy case: what another implementation says."""
    return json.loads((DATA / "storyteller" / "expected.json").read_text())["cases"][0]


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory):
    """Storyteller with a chat template: a model that chat accepts, whatever it answers."""
    return chat_folder(tmp_path_factory.mktemp("models"))


# -- the group ---------------------------------------------------------------------------------------------------------


def test_version_and_help():
    assert invoke("--version").stdout.split()[-1] == bitnet_ref.__version__
    for command in ([], *([name] for name in cli.commands)):
        for flag in ("--help", "-h"):
            result = invoke(*command, flag)
            assert result.exit_code == 0
            assert "--debug" in result.stdout
            assert "--json" in result.stdout
    models = ["pull", "list", "rm", "convert", "crossval"]
    assert list(cli.commands) == ["generate", "chat", "inspect", *models, "bench", "doctor", "lab"]


@pytest.mark.parametrize("module", ["bitnet_ref", "bitnet_ref.cli"])
def test_runs_as_a_module(module):
    child = process("--version", module=module, stdout=subprocess.PIPE)
    out, err = child.communicate(timeout=60)
    assert (child.returncode, err) == (0, b"")
    assert out.decode().startswith("bitnet-ref, version")


def test_imports_little():
    code = "import sys, json; import bitnet_ref; first = set(sys.modules); import bitnet_ref.cli\n"
    code += "names = ['click', 'rich', 'jinja2', 'sentencepiece', 'tokenizers', 'readline']\n"
    code += "print(json.dumps([[n in first for n in names], [n in sys.modules for n in names]]))"
    package, shell = run_python(code)
    assert package == [False] * 6
    assert shell == [True] + [False] * 5


FAMILIES = [
    (errors.GenerationError("x"), 2),
    (errors.ShapeError("op", expected="a", got="b"), 2),
    (errors.ConfigError("of an argument"), 2),
    (errors.ConfigError("of a file", path="config.json"), 3),
    (errors.FormatError("x"), 3),
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
    assert ("error:" in result.stderr) == (code not in (0, 130))
    assert ("Traceback" in result.stderr) == (code == 70)


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        (("generate", "x", "--model", "no/such/model"), 3, "no/such/model: no such file or folder"),
        (("generate", "x", "--model", "storytelling"), 3, "there is: storyteller"),
        (("generate", "x", "--temperature", "-1"), 2, "temperature: expected a number >= 0, got -1.0"),
        (("generate", "x", "--max-tokens", "1000"), 2, "the model's context is 256"),
        pytest.param(
            ("generate", "x", "--backend", "cython", "--dtype", "float64"), 2, "dtype float32", marks=needs_cython
        ),
        (("generate", "1 x", "--raw-ids"), 2, "expected token ids"),
        (("generate", "4096", "--raw-ids"), 2, "token id 4096"),
        (("generate", "x", "--model", GOLDEN / "llama-dense"), 3, "--raw-ids"),
        (("inspect", DATA / "make_golden.py"), 3, "other formats are not read"),
    ],
)
def test_errors_are_one_message(args, code, words):
    result = invoke(*args)
    assert (result.exit_code, result.stdout) == (code, "")
    assert words in result.stderr
    assert result.stderr.startswith("error: ")
    assert "Traceback" not in result.stderr
    facts = invoke_json(*args, code=code)["error"]
    assert words in facts["message"]
    assert issubclass(getattr(errors, facts["type"]), errors.BitNetRefError)


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
    assert result.stderr.splitlines()[-1].startswith("error: nothing")


# -- generate ----------------------------------------------------------------------------------------------------------


def test_generate_writes_the_continuation(expected):
    result = invoke("generate", expected["prompt"], "--max-tokens", len(expected["token_ids"]), *FAST)
    assert result.exit_code == 0
    assert result.stdout == expected["text"] + "\n"
    (stats,) = result.stderr.splitlines()
    assert stats.startswith(f"[{BACKEND}] 5 prompt tokens at ")
    assert "48 new tokens at" in stats
    assert "peak memory" in stats


def test_generate_json_equals_the_library():
    facts = invoke_json("generate", PROMPT, "--max-tokens", 12, "--stop", "boy", *FAST)
    out = shared_model("storyteller", BACKEND, threads=1).generate(PROMPT, max_tokens=12, stop=["boy"])
    for name in ("text", "token_ids", "logprobs", "finish_reason", "stop_reason", "prompt_token_ids"):
        assert facts[name] == getattr(out, name)
    assert facts["stop_reason"] == "boy"
    assert facts["stats"]["backend"] == BACKEND
    assert facts["stats"]["generated_tokens"] == len(out.token_ids)
    assert facts["stats"]["peak_memory_bytes"] > 10_000_000


def test_generate_options_reach_the_sampler():
    options = {"max_tokens": 6, "temperature": 1.5, "top_k": 50, "top_p": 0.9, "seed": 3}
    flags = [text for name, value in options.items() for text in (f"--{name.replace('_', '-')}", value)]
    first, second = (invoke_json("generate", PROMPT, *flags, *FAST) for _ in range(2))
    assert first["token_ids"] == second["token_ids"]
    model = shared_model("storyteller", BACKEND, threads=1)
    assert first["token_ids"] == model.generate(PROMPT, **options).token_ids
    for change in ({"temperature": 0.1}, {"top_k": 1}, {"top_p": 0.01}, {"seed": 4}):
        changed = [text for n, v in (options | change).items() for text in (f"--{n.replace('_', '-')}", v)]
        facts = invoke_json("generate", PROMPT, *changed, *FAST)
        assert facts["token_ids"] == model.generate(PROMPT, **options | change).token_ids
        assert facts["token_ids"] != first["token_ids"]


def test_generate_reads_stdin(expected):
    result = invoke("generate", "-", "--max-tokens", 5, *FAST, stdin=expected["prompt"] + "\n")
    assert result.exit_code == 0
    assert expected["text"].startswith(result.stdout.rstrip("\n"))
    assert len(result.stdout) > 5
    bad = invoke("generate", "-", stdin=b"\xff\xfe")
    assert bad.exit_code == 2
    assert "not UTF-8 text" in bad.stderr


@pytest.mark.parametrize("text", ["1 3797 537 262 577", "[1, 3797, 537, 262, 577]"])
def test_generate_raw_ids(expected, text):
    result = invoke("generate", text, "--raw-ids", "--max-tokens", 6, *FAST)
    assert [int(word) for word in result.stdout.split()] == expected["token_ids"][:6]


def test_generate_raw_ids_needs_no_tokenizer():
    folder = GOLDEN / "llama-dense"
    facts = invoke_json("generate", "5 6 7", "--raw-ids", "--model", folder, "--max-tokens", 4, *FAST)
    out = shared_model(folder, BACKEND, threads=1).generate([5, 6, 7], max_tokens=4)
    assert (facts["token_ids"], facts["text"], facts["prompt_token_ids"]) == (out.token_ids, "", [5, 6, 7])


def test_generate_allow_unquantized(tmp_path):
    config = {key: value for key, value in BITNET.items() if key != "quantization_config"}
    tensors = {name: array for name, array in tiny_tensors(BITNET).items() if not name.endswith("weight_scale")}
    for name, array in tensors.items():
        if array.dtype == np.uint8:
            tensors[name] = np.ones((4 * array.shape[0], array.shape[1]), dtype=np.float32)
    folder = write_checkpoint(tmp_path / "m", config, tensors)
    args = ("generate", "1 2", "--raw-ids", "--max-tokens", 1, "--model", folder, *FAST)
    assert invoke_json(*args, code=3)["error"]["field"] == "quantization_config"
    assert invoke_json(*args, "--allow-unquantized")["finish_reason"] == "length"


def test_ctrl_c_keeps_what_was_written(expected):
    child = process("generate", PROMPT, "--max-tokens", 250, *SLOW, stdout=subprocess.PIPE)
    first = child.stdout.read(3)
    child.send_signal(signal.SIGINT)
    rest, err = child.communicate(timeout=60)
    assert child.returncode == 130
    text = (first + rest).decode().removesuffix("\n")
    assert len(text) >= 3
    assert text[: len(expected["text"])] == expected["text"][: len(text)]
    assert err.decode().splitlines()[-1].startswith("[numpy] 5 prompt tokens")
    assert " 250 new tokens" not in err.decode()


def test_a_reader_that_leaves_ends_it_quietly():
    child = process("generate", PROMPT, "--max-tokens", 250, *SLOW, stdout=subprocess.PIPE)
    assert child.stdout.read(3)
    child.stdout.close()
    assert child.wait(timeout=60) == 0
    assert child.stderr.read() == b""
    child.stderr.close()


def test_a_reader_that_left_before_the_report():
    reading, writing = os.pipe()
    os.close(reading)
    child = process("inspect", "storyteller", stdout=writing)
    os.close(writing)
    _, err = child.communicate(timeout=60)
    assert (child.returncode, err) == (0, b"")


def test_a_stdout_that_is_not_utf8():
    env = {**os.environ, "PYTHONIOENCODING": "ascii", "COLUMNS": "100"}
    child = process("generate", "Æ", "--max-tokens", 1, *FAST, "--json", stdout=subprocess.PIPE, env=env)
    out, err = child.communicate(timeout=60)
    assert (child.returncode, err) == (0, b"")
    assert json.loads(out.decode("ascii"))["prompt_token_ids"] == shared_model(
        "storyteller", threads=1
    ).tokenizer.encode("Æ")
    child = process("inspect", "storyteller", stdout=subprocess.PIPE, env=env)
    out, err = child.communicate(timeout=60)
    assert (child.returncode, err) == (0, b"")
    assert "--------........++++++++" in out.decode("ascii")  # the bars, in other inks


def test_on_a_terminal_the_prompt_comes_first_and_the_words_stay_apart():
    main, side = pty.openpty()
    env = {name: value for name, value in os.environ.items() if name != "NO_COLOR"}
    child = process("generate", "Alice was", "--max-tokens", 4, *FAST, stdout=side, env=env)
    os.close(side)
    shown = b""
    while True:
        try:
            data = os.read(main, 4096)
        except OSError:  # Linux: the other end was closed
            break
        if not data:
            break
        shown += data
    assert child.wait(timeout=60) == 0
    os.close(main)
    child.stderr.close()
    text = shared_model("storyteller", BACKEND, threads=1).generate("Alice was", max_tokens=4).text
    assert not text.startswith(" ")
    assert shown.decode() == f"\x1b[2mAlice was\x1b[0m {text}\r\n"


def test_generate_takes_every_sampling_parameter():
    """But for functions, which a command line cannot give."""
    given = {param.name for param in cli.commands["generate"].params}
    assert {field.name for field in fields(SamplingParams)} - given == {"strategy", "processors"}
    assert {field.name for field in fields(SamplingParams)} - {param.name for param in cli.commands["chat"].params} == (
        {"strategy", "processors", "n", "num_beams", "length_penalty", "early_stopping", "logprobs", "echo"}
    )
    text = invoke("generate", "--help").stdout
    titles = (
        "Model:",
        "Length and end:",
        "Choice of tokens:",
        "What may be said:",
        "Several texts:",
        "Output:",
        "Options:",
    )
    assert sorted(titles, key=text.index) == list(titles)


def test_generate_profile():
    """The table goes to stderr; what is on stdout stays what it is."""
    plain = invoke("generate", PROMPT, "--max-tokens", "6", *FAST)
    result = invoke("generate", PROMPT, "--max-tokens", "6", "--profile", *FAST)
    assert result.exit_code == 0
    assert result.stdout == plain.stdout
    for words in ("decode: 5 steps", "linears gate_proj up_proj", "outside the model"):
        assert words in result.stderr
        assert words not in plain.stderr


def test_generate_several_texts():
    model = shared_model("storyteller", BACKEND, threads=1)
    outs = model.generate(PROMPT, max_tokens=6, num_beams=3, n=2, early_stopping="never", logit_bias={262: -3})
    args = ("generate", PROMPT, "--max-tokens", 6, "--num-beams", 3, "-n", 2, "--early-stopping", "never")
    args = (*args, "--logit-bias", "262=-3", *FAST)
    facts = invoke_json(*args)
    assert [choice["token_ids"] for choice in facts["choices"]] == [out.token_ids for out in outs]
    assert [choice["score"] for choice in facts["choices"]] == [out.score for out in outs]
    assert facts["stats"]["generated_tokens"] == 12
    assert invoke(*args).stdout == f"{outs[0].text}\n---\n{outs[1].text}\n"
    assert invoke(*args, "--raw-ids", stdin="").exit_code == 2  # the prompt is no ids


def test_generate_rules_reach_the_model(tmp_path):
    model = shared_model("storyteller", BACKEND, threads=1)
    free = model.generate(PROMPT, max_tokens=12)
    word = free.text[8:12]
    facts = invoke_json("generate", PROMPT, "--max-tokens", 12, "--filter", word, "--logprobs", 2, "--echo", *FAST)
    out = model.generate(PROMPT, max_tokens=12, filter=word, logprobs=2, echo=True)
    assert (facts["text"], facts["finish_reason"], facts["stop_reason"]) == (out.text, "filtered", word)
    assert facts["top_logprobs"] == [{str(t): p for t, p in top.items()} for top in out.top_logprobs]
    facts = invoke_json("generate", PROMPT, "--max-tokens", 12, "--bad-word", word, "--min-tokens", 3, *FAST)
    assert facts["token_ids"] == model.generate(PROMPT, max_tokens=12, bad_words=[word], min_tokens=3).token_ids
    assert invoke("generate", PROMPT, "--logit-bias", "x=y").exit_code == 2
    assert invoke("generate", PROMPT, "--guided-json", f"@{tmp_path}/none").exit_code == 2


# -- chat --------------------------------------------------------------------------------------------------------------


def chat_lines(*messages, model, args=(), code=0):
    stdin = "".join(f"{message}\n" for message in messages)
    result = invoke("chat", "--model", model, "--max-tokens", 6, "--json", *args, *FAST, stdin=stdin)
    assert result.exit_code == code, result.output
    return [json.loads(line) for line in result.stdout.splitlines()]


def test_chat_needs_a_template():
    result = invoke("chat", *FAST, stdin="Hello\n")
    assert result.exit_code == 2
    assert "base model" in result.stderr
    assert "bitnet-ref generate" in result.stderr


def test_chat_keeps_and_forgets_the_history(chat_model):
    model = shared_model(chat_model, BACKEND, threads=1)
    one, two, reset, again = chat_lines("Hello", '{"content": "Who are\\nyou?"}', "/reset", "Hello", model=chat_model)
    history = [{"role": "user", "content": "Hello"}]
    assert one["prompt_token_ids"] == model.tokenizer.apply_chat_template(history, tokenize=True)
    assert one["token_ids"] == model.generate(one["prompt_token_ids"], max_tokens=6).token_ids
    history += [{"role": "assistant", "content": one["text"]}, {"role": "user", "content": "Who are\nyou?"}]
    assert two["prompt_token_ids"] == model.tokenizer.apply_chat_template(history, tokenize=True)
    assert reset == {"reset": True}
    assert again["token_ids"] == one["token_ids"]


def test_chat_system_text_and_exit(chat_model):
    model = shared_model(chat_model, BACKEND, threads=1)
    (only,) = chat_lines("Hello", "/exit", "Not said", model=chat_model, args=("--system", "Be brief"))
    history = [{"role": "system", "content": "Be brief"}, {"role": "user", "content": "Hello"}]
    assert only["prompt_token_ids"] == model.tokenizer.apply_chat_template(history, tokenize=True)


def test_chat_context_overflow(chat_model):
    long = "word " * 120
    first, failed, reset, fine = chat_lines(long, long, "/reset", "Hello", model=chat_model, code=2)
    assert first["finish_reason"] in ("length", "stop")
    assert failed["error"]["type"] == "GenerationError"
    assert "context is 256; /reset starts a new one" in failed["error"]["message"]
    assert reset == {"reset": True}
    assert fine["token_ids"]


def test_chat_for_people(chat_model):
    text = "Hello\n\n/reset\n" + "word " * 300 + "\n/exit\n"
    result = invoke("chat", "--model", chat_model, "--max-tokens", 6, *FAST, stdin=text)
    assert result.exit_code == 0
    model = shared_model(chat_model, BACKEND, threads=1)
    ids = model.tokenizer.apply_chat_template([{"role": "user", "content": "Hello"}], tokenize=True)
    assert result.stdout == model.generate(ids, max_tokens=6).text + "\n"
    assert "a new conversation" in result.stderr
    assert "shorten the message" in result.stderr
    assert result.stdout.count("\x1b") == 0


def test_ctrl_c_stops_only_the_answer(chat_model):
    child = process(
        "chat", "--model", chat_model, "--max-tokens", 200, *SLOW, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    child.stdin.write(b"Hello\n")
    child.stdin.flush()
    assert child.stdout.read(3)
    child.send_signal(signal.SIGINT)
    _, err = child.communicate(b"/reset\n/exit\n", timeout=60)
    assert child.returncode == 0
    assert b"stopped" in err
    assert b"a new conversation" in err
    assert b"Traceback" not in err


# -- inspect -----------------------------------------------------------------------------------------------------------


def test_inspect_shows_the_facts():
    result = invoke("inspect", "storyteller")
    assert result.exit_code == 0
    for words in (
        "2B-4T",
        "5,776,640",
        "multiply by it",
        "relu2",
        "RoPE theta 10000",
        "256 tokens",
        "down_proj",
        "63.6%",
    ):
        assert words in result.stdout
    assert result.stdout.endswith("Nothing odd about it.\n")
    assert not any(line.endswith(" ") for line in result.stdout.splitlines())


@pytest.mark.parametrize("columns", [80, 120])
def test_inspect_fits_the_width(columns):
    result = CliRunner().invoke(cli, ["inspect", str(GOLDEN / "bitnet-packed-offline")], env={"COLUMNS": str(columns)})
    lines = result.stdout.splitlines()
    assert all(len(line) <= columns for line in lines[1:])  # the first is the path, which is never cut
    assert not any("…" in line for line in lines)
    assert sum(line.startswith(("q_proj", "down_proj")) for line in lines) == 2


def test_inspect_json_equals_the_library():
    found = inspect_model("storyteller")
    assert invoke_json("inspect", "storyteller") == json.loads(json.dumps(found.to_dict()))


def test_inspect_of_a_broken_model(tmp_path):
    tensors = tiny_tensors(BITNET)
    tensors["model.layers.1.mlp.up_proj.weight"][0, 3] = 0xFF
    folder = write_checkpoint(tmp_path / "m", BITNET, tensors)
    result = invoke("inspect", folder)
    assert result.exit_code == 3
    assert "model.layers.1.mlp.up_proj.weight: holds the invalid ternary code 3" in " ".join(result.stdout.split())
    assert "gate_proj" in result.stdout
    facts = invoke_json("inspect", folder, code=3)
    assert facts["findings"][0]["severity"] == "error"


def test_inspect_lists_a_plain_file(tmp_path):
    file = tmp_path / "plain.safetensors"
    shutil.copy(GOLDEN / "llama-dense" / "golden.safetensors", file)
    result = invoke("inspect", file)
    assert result.exit_code == 0
    for words in ("without a config.json", "logits64", "F64", "tokens", "I32"):
        assert words in result.stdout
    assert invoke_json("inspect", file)["header_only"] is True


def test_inspect_of_a_gguf():
    path = DATA / "gguf" / "i2_s.gguf"
    result = invoke("inspect", path)
    assert result.exit_code == 0
    text = " ".join(result.stdout.split())
    for words in (
        "GGUF version 3, architecture bitnet-b1.58",
        "dialect: bitnet.cpp",
        "I2_S layout: x86 assumed",
        "the architecture bitnet-b1.58 means it",
        "--i2s-layout",
    ):
        assert words in text
    facts = invoke_json("inspect", path, "--i2s-layout", "x86")
    assert (facts["kind"], facts["architecture"], len(facts["ternary"])) == ("gguf-i2_s", "bitnet-b1.58", 14)
    assert facts["evidence"][1] == "I2_S layout: x86, as it was asked for"


def test_inspect_one_tensor():
    result = invoke("inspect", "storyteller", "--tensor", "blocks.2.mlp.down_proj")
    assert result.exit_code == 0
    assert result.stdout.startswith("blocks.2.mlp.down_proj: 256 x 768, ternary (hf-packed)\n-1: 32.5%, 0: 35.1%")
    facts = invoke_json("inspect", "storyteller", "--tensor", "model.layers.2.mlp.down_proj.weight")
    assert facts["name"] == "blocks.2.mlp.down_proj"
    assert sum(facts["shares"]) == pytest.approx(1)
    assert [(rows["from"], rows["to"]) for rows in facts["rows"]][-1] == (224, 256)


def test_inspect_no_such_tensor():
    result = invoke("inspect", "storyteller", "--tensor", "blocks.2.mlp.down_prj")
    assert result.exit_code == 2
    assert "near it are" in result.stderr
    assert "blocks.2.mlp.down_proj" in result.stderr


# -- doctor ------------------------------------------------------------------------------------------------------------


def test_doctor_json():
    found = invoke_json("doctor")
    available = bitnet_ref.available_backends()
    assert {b["name"]: b["reason"] for b in found["backends"]} == available
    assert [c["backend"] for c in found["checks"]] == [name for name, reason in available.items() if reason is None]
    assert found["healthy"] is True
    for check in found["checks"]:
        assert check["matrices"] == 42
        assert check["accumulators"] > 10_000
        assert (check["unequal"], check["passed"], check["error"]) == (0, True, None)
    assert found["versions"]["numpy"] == np.__version__
    assert found["versions"]["click"] == importlib.metadata.version("click")
    assert found["models"] == ["storyteller"]
    assert found["memory_total"] >= found["memory_available"] > 0
    assert found["threads"] == resolve_threads()
    assert [method["name"] for method in found["methods"] if method["chosen"]] == (
        ["2-bit"] if available["cython"] is None else []
    )


def test_doctor_shows_an_impossible_thread_count_and_computes_all_the_same():
    result = CliRunner().invoke(cli, ["doctor"], env={"BITNET_REF_NUM_THREADS": "none"})
    assert result.exit_code == 0
    for words in ("BITNET_REF_NUM_THREADS", "storyteller", "accumulators exact", "Backends", np.__version__):
        assert words in result.stdout
    assert "FAILED" not in result.stdout


def test_doctor_notices_wrong_logits():
    model = bitnet_ref.load(backend="numpy", threads=1)
    tokens = [1, 3797, 537]
    truth = model.logits(tokens)
    assert check_backend("numpy", model, tokens, truth, 1e-4, threads=1).passed
    wrong = truth.copy()
    wrong[1, 7] += 1e-3
    check = check_backend("numpy", model, tokens, wrong, 1e-4, threads=1)
    assert not check.passed
    assert check.logits_error == pytest.approx(1e-3, rel=0.1)


def test_doctor_notices_wrong_accumulators():
    model = bitnet_ref.load(backend="numpy", threads=1)
    w_t = model.weights.layers[2].up_proj.ternary()
    w_t[5] = 1 - np.abs(w_t[5])  # one row of one matrix
    scale = model.weights.layers[2].up_proj.w_dequant_scale
    layers = list(model.weights.layers)
    layers[2] = replace(layers[2], up_proj=TernaryWeight.from_ternary(w_t, scale))
    exact = bitnet_ref.Model(model.config, replace(model.weights, layers=tuple(layers)), model.backend, model.path)
    tokens = [1, 3797, 537]
    check = check_backend("numpy", exact, tokens, model.logits(tokens), 1e-4, threads=1)
    assert not check.passed
    assert 1 <= check.unequal <= 3  # one accumulator of each token


def test_doctor_fails_when_a_backend_differs(monkeypatch):
    monkeypatch.setattr(doctor, "LOGITS_FLOOR", -1.0)  # no computation is that good
    result = invoke("doctor")
    assert result.exit_code == 1
    assert "FAILED" in result.stdout


# -- lab ---------------------------------------------------------------------------------------------------------------


def test_lab_copies_the_notebooks(tmp_path):
    target = tmp_path / "mine"
    facts = invoke_json("lab", "--no-launch", "--dir", target)
    source = find_notebooks()
    notebooks = sorted(file.name for file in source.glob("*.ipynb"))
    assert notebooks
    assert set(notebooks) <= set(facts["copied"])
    for name in notebooks:
        assert (target / name).read_bytes() == (source / name).read_bytes()
    (target / notebooks[0]).write_text("my own work")
    facts = invoke_json("lab", "--no-launch", "--dir", target)
    assert (facts["kept"], facts["copied"], facts["launched"]) == ([notebooks[0]], [], False)
    result = invoke("lab", "--no-launch", "--dir", target)
    assert f"kept   {target / notebooks[0]}" in result.stdout
    assert (target / notebooks[0]).read_text() == "my own work"
    assert invoke_json("lab", "--no-launch", "--dir", target, "--force")["copied"] == [notebooks[0]]
    assert (target / notebooks[0]).read_bytes() == (source / notebooks[0]).read_bytes()


def test_lab_copies_only_what_a_reader_needs(tmp_path):
    source = tmp_path / "source"
    (source / ".ipynb_checkpoints").mkdir(parents=True)
    for name in ("01.ipynb", "plots.py", "junk.bin", ".ipynb_checkpoints/01.ipynb"):
        (source / name).write_text(name)
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
    assert "copied" in result.stdout
    assert invoke_json("lab", "--dir", tmp_path / "nb", code=4)["launched"] is False


def test_lab_into_a_file(tmp_path):
    (tmp_path / "file").write_text("")
    assert invoke("lab", "--no-launch", "--dir", tmp_path / "file").exit_code == 2
    assert invoke("lab", "--no-launch", "--dir", tmp_path / "file" / "below").exit_code == 2


@pytest.mark.parametrize(
    ("nbytes", "words"),
    [(0, "0 bytes"), (168, "168 bytes"), (1536, "1.5 KB"), (1023, "1.0 KB"), (5 << 30, "5.0 GB"), (1 << 50, "1024 TB")],
)
def test_sizes_in_words(nbytes, words):
    assert size_in_words(nbytes) == words
