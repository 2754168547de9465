"""bitnet-ref generate: what is written where, interrupts, readers that leave."""

import json
import os
import pty
import signal
import subprocess
import sys
from dataclasses import fields

import numpy as np
import pytest
from cli_runs import BACKEND, PLAIN, PROMPT, SLOW, invoke, invoke_json, process
from helpers import BITNET, GOLDEN, stop_words, tiny_tensors, write_checkpoint
from helpers import model as shared_model

from bitnet_ref.cli import cli
from bitnet_ref.generation import SamplingParams


def test_generate_writes_the_continuation(expected):
    result = invoke("generate", expected["prompt"], "--max-tokens", len(expected["token_ids"]), *PLAIN)
    assert result.exit_code == 0
    assert result.stdout == expected["text"] + "\n"
    (stats,) = result.stderr.splitlines()
    assert stats.startswith(f"[{BACKEND}] 5 prompt tokens at ")
    assert "48 new tokens at" in stats
    assert "peak memory" in stats


def test_generate_json_equals_the_library():
    model = shared_model("storyteller", BACKEND, threads=1)
    word = stop_words(model.generate(PROMPT, max_tokens=12).text)[-1].strip()
    facts = invoke_json("generate", PROMPT, "--max-tokens", 12, "--stop", word, *PLAIN)
    out = model.generate(PROMPT, max_tokens=12, stop=[word])
    for name in ("text", "token_ids", "logprobs", "finish_reason", "stop_reason", "prompt_token_ids"):
        assert facts[name] == getattr(out, name)
    assert facts["stop_reason"] == word
    assert "sampling" not in facts  # it is greedy
    assert facts["stats"]["backend"] == BACKEND
    assert facts["stats"]["generated_tokens"] == len(out.token_ids)
    assert facts["stats"]["peak_memory_bytes"] > 10_000_000


def test_generate_options_reach_the_sampler():
    options = {"max_tokens": 6, "temperature": 1.5, "top_k": 50, "top_p": 0.9, "seed": 3}
    flags = [text for name, value in options.items() for text in (f"--{name.replace('_', '-')}", value)]
    first, second = (invoke_json("generate", PROMPT, *flags, *PLAIN) for _ in range(2))
    assert first["token_ids"] == second["token_ids"]
    assert first["sampling"] == {name: options[name] for name in options if name != "max_tokens"}
    told = invoke("generate", PROMPT, *flags, *PLAIN).stderr
    assert told.endswith(", temperature 1.5, top-k 50, top-p 0.9, seed 3\n")
    model = shared_model("storyteller", BACKEND, threads=1)
    assert first["token_ids"] == model.generate(PROMPT, **options).token_ids
    for change in ({"temperature": 0.1}, {"top_k": 1}, {"top_p": 0.01}, {"seed": 4}):
        changed = [text for n, v in (options | change).items() for text in (f"--{n.replace('_', '-')}", v)]
        facts = invoke_json("generate", PROMPT, *changed, *PLAIN)
        assert facts["token_ids"] == model.generate(PROMPT, **options | change).token_ids
        assert facts["token_ids"] != first["token_ids"]


def test_a_prompt_without_quotes():
    result = invoke("generate", "Once", "upon", "a", "--max-tokens", 5, "time")
    assert (result.exit_code, result.stdout) == (2, "")
    assert 'Error: put the prompt in quotes: bitnet-ref generate "Once upon a time"' in result.stderr


@pytest.mark.parametrize("words", [("storyteller", PROMPT), (PROMPT, "storyteller")])
def test_a_model_beside_the_prompt(words):
    result = invoke("generate", *words)
    assert (result.exit_code, result.stdout) == (2, "")
    assert f'Error: name the model by --model: bitnet-ref generate --model storyteller "{PROMPT}"' in result.stderr


def test_no_prompt():
    result = invoke("generate")
    assert result.exit_code == 2
    assert 'give a text in quotes, or "-" to read standard input' in result.stderr


def test_generate_reads_stdin(expected):
    result = invoke("generate", "-", "--max-tokens", 5, *PLAIN, stdin=expected["prompt"] + "\n")
    assert result.exit_code == 0
    assert expected["text"].startswith(result.stdout.rstrip("\n"))
    assert len(result.stdout) > 5
    bad = invoke("generate", "-", stdin=b"\xff\xfe")
    assert bad.exit_code == 2
    assert "not UTF-8 text" in bad.stderr


@pytest.mark.parametrize("text", ["1 3797 537 262 577", "[1, 3797, 537, 262, 577]"])
def test_generate_raw_ids(expected, text):
    result = invoke("generate", text, "--raw-ids", "--max-tokens", 6, *PLAIN)
    assert [int(word) for word in result.stdout.split()] == expected["token_ids"][:6]


def test_generate_raw_ids_without_ids():
    for text in ("[]", " "):
        result = invoke("generate", text, "--raw-ids", *PLAIN)
        assert result.exit_code == 2
        assert f"--raw-ids: expected token ids like 1 3797 537, got {text!r}" in result.output


def test_generate_raw_ids_needs_no_tokenizer():
    folder = GOLDEN / "llama-dense"
    facts = invoke_json("generate", "5 6 7", "--raw-ids", "--model", folder, "--max-tokens", 4, *PLAIN)
    out = shared_model(folder, BACKEND, threads=1).generate([5, 6, 7], max_tokens=4)
    assert (facts["token_ids"], facts["text"], facts["prompt_token_ids"]) == (out.token_ids, "", [5, 6, 7])


def test_generate_allow_unquantized(tmp_path):
    config = {key: value for key, value in BITNET.items() if key != "quantization_config"}
    tensors = {name: array for name, array in tiny_tensors(BITNET).items() if not name.endswith("weight_scale")}
    for name, array in tensors.items():
        if array.dtype == np.uint8:
            tensors[name] = np.ones((4 * array.shape[0], array.shape[1]), dtype=np.float32)
    folder = write_checkpoint(tmp_path / "m", config, tensors)
    args = ("generate", "1 2", "--raw-ids", "--max-tokens", 1, "--model", folder, *PLAIN)
    assert invoke_json(*args, code=3)["error"]["field"] == "quantization_config"
    assert invoke_json(*args, "--allow-unquantized")["finish_reason"] == "length"


def test_ctrl_c_keeps_what_was_written(expected):
    child = process("generate", PROMPT, "--max-tokens", 250, "--temperature", 0, *SLOW, stdout=subprocess.PIPE)
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
    child = process("generate", PROMPT, "--max-tokens", 250, "--temperature", 0, *SLOW, stdout=subprocess.PIPE)
    assert child.stdout.read(3)
    child.stdout.close()
    assert child.wait(timeout=60) == 0
    assert child.stderr.read() == b""
    child.stderr.close()


@pytest.mark.thorough
def test_a_reader_that_left_before_the_report():
    reading, writing = os.pipe()
    os.close(reading)
    child = process("inspect", "storyteller", stdout=writing)
    os.close(writing)
    _, err = child.communicate(timeout=60)
    assert (child.returncode, err) == (0, b"")


@pytest.mark.sample(3)
@pytest.mark.parametrize("closed", ["<&-", "2>&-", "<&- 2>&-"])
def test_a_closed_stream_is_empty(closed):
    done = run_in_shell(f"generate - --max-tokens 1 {closed}")
    assert done.returncode == 0
    assert "Traceback" not in done.stderr


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        ("generate Alice --max-tokens 1 >&-", 3),
        ("generate Alice --max-tokens 1 --json <&- >&-", 3),
        ("inspect storyteller >&-", 3),
        ("--version >&-", 3),
        ("generate --help >&-", 3),
        ("generate --no-such-option >&-", 2),
    ],
)
def test_a_closed_stdout_cannot_be_written(arguments, code):
    done = run_in_shell(arguments)
    assert done.returncode == code
    assert ("Error: standard output: Bad file descriptor\n" in done.stderr) == (code == 3)
    assert "Traceback" not in done.stderr


def run_in_shell(arguments):
    command = f"{sys.executable} -m bitnet_ref {arguments}"
    return subprocess.run(["sh", "-c", command], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120)


@pytest.mark.thorough
def test_a_stdout_that_is_not_utf8():
    env = {**os.environ, "PYTHONIOENCODING": "ascii", "COLUMNS": "100"}
    child = process("generate", "Æ", "--max-tokens", 1, *PLAIN, "--json", stdout=subprocess.PIPE, env=env)
    out, err = child.communicate(timeout=60)
    assert (child.returncode, err) == (0, b"")
    assert json.loads(out.decode("ascii"))["prompt_token_ids"] == shared_model(
        "storyteller", threads=1
    ).tokenizer.encode("Æ")
    child = process("inspect", "storyteller", stdout=subprocess.PIPE, env=env)
    out, err = child.communicate(timeout=60)
    assert (child.returncode, err) == (0, b"")
    assert "--------........++++++++" in out.decode("ascii")  # the bars, in other inks


@pytest.mark.thorough
def test_on_a_terminal_the_prompt_comes_first_and_the_words_stay_apart():
    main, side = pty.openpty()
    env = {name: value for name, value in os.environ.items() if name != "NO_COLOR"}
    child = process("generate", "Alice was", "--max-tokens", 4, *PLAIN, stdout=side, env=env)
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
    """But for functions, which a command line cannot give, and what a stream does not have."""
    given = {param.name for param in cli.commands["generate"].params}
    assert {field.name for field in fields(SamplingParams)} - given == {
        *("strategy", "processors", "prompt_logprobs"),
        *("guide_after", "shown_tokens"),  # what the server sets for a model that thinks
    }
    assert {field.name for field in fields(SamplingParams)} - {param.name for param in cli.commands["chat"].params} == (
        {
            "strategy",
            "processors",
            "prompt_logprobs",
            "guide_after",
            "shown_tokens",
            "n",
            "num_beams",
            "length_penalty",
            "early_stopping",
            "logprobs",
            "echo",
        }
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
    plain = invoke("generate", PROMPT, "--max-tokens", "6", *PLAIN)
    result = invoke("generate", PROMPT, "--max-tokens", "6", "--profile", *PLAIN)
    assert result.exit_code == 0
    assert result.stdout == plain.stdout
    for words in ("decode: 5 steps", "linears gate_proj up_proj", "outside the model"):
        assert words in result.stderr
        assert words not in plain.stderr


def test_a_narrow_profile_cuts_no_number(monkeypatch):
    monkeypatch.setenv("COLUMNS", "70")
    result = invoke("generate", PROMPT, "--max-tokens", "6", "--profile", *PLAIN)
    assert "…" not in result.stderr
    assert max(map(len, result.stderr.splitlines()[1:])) <= 70


def test_generate_several_texts():
    model = shared_model("storyteller", BACKEND, threads=1)
    outs = model.generate(PROMPT, max_tokens=6, num_beams=3, n=2, early_stopping="never", logit_bias={262: -3})
    args = ("generate", PROMPT, "--max-tokens", 6, "--num-beams", 3, "-n", 2, "--early-stopping", "never")
    args = (*args, "--logit-bias", "262=-3", *PLAIN)
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
    facts = invoke_json("generate", PROMPT, "--max-tokens", 12, "--filter", word, "--logprobs", 2, "--echo", *PLAIN)
    out = model.generate(PROMPT, max_tokens=12, filter=word, logprobs=2, echo=True)
    assert (facts["text"], facts["finish_reason"], facts["stop_reason"]) == (out.text, "filtered", word)
    assert facts["top_logprobs"] == [{str(t): p for t, p in top.items()} for top in out.top_logprobs]
    facts = invoke_json("generate", PROMPT, "--max-tokens", 12, "--bad-word", word, "--min-tokens", 3, *PLAIN)
    assert facts["token_ids"] == model.generate(PROMPT, max_tokens=12, bad_words=[word], min_tokens=3).token_ids
    assert invoke("generate", PROMPT, "--logit-bias", "x=y").exit_code == 2
    assert invoke("generate", PROMPT, "--guided-json", f"@{tmp_path}/none").exit_code == 2
