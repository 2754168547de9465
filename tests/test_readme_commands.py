"""docs/commands.md has every command. What it and README.md show runs, Python too; so do the commands of docs/."""

import contextlib
import io
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import benchmark_scripts
import click
import pytest
from cli_runs import CHOICE
from click.testing import CliRunner
from helpers import BITNET, GOLDEN, write_checkpoint

from bitnet_ref.cli import cli

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
COMMANDS_PAGE = (ROOT / "docs" / "commands.md").read_text(encoding="utf-8")
TINY_MODEL = GOLDEN / "bitnet-packed-offline"

# What is run for a command that has words to fill in, or that would take long as it stands. {folder}: a scratch folder.
EXAMPLES = {
    "generate PROMPT": 'generate "Once upon a time" --max-tokens 4',
    "chat": "chat --max-tokens 4",
    "batch IN.jsonl OUT.jsonl": "batch {folder}/in.jsonl {folder}/out.jsonl",
    "perplexity MODEL --text FILE": "perplexity storyteller --text {folder}/text.txt --length 16",
    "eval MODEL --tasks TASKS": "eval storyteller --tasks tiny_choice --include {folder}",
    "embed TEXT... --model MODEL": 'embed "a red boat" "tax law" --model storyteller',
    "train CONFIG.toml --out FOLDER": "train scripts/training/tiny.toml --out {folder}/run --steps 1",
    "train-tokenizer FILE --out FOLDER": "train-tokenizer notebooks/alice.txt --out {folder}/tokenizer --vocab 400",
    "inspect PATH": "inspect storyteller",
    "convert SRC DST --to FORMAT": "convert {folder}/model {folder}/model.gguf --to gguf-i2_s",
    "golden OUT": "golden {folder}/golden",
    "pull ORG/REPO": "pull {folder}/model --name org/repo",
    "rm ORG/REPO": "rm org/repo",
    "crossval backends": f"crossval backends {TINY_MODEL} --tokens 1,5 --only numpy",
    "crossval trace": f"crossval trace {TINY_MODEL} {{folder}}/trace.safetensors",
    "crossval transformers": f"crossval transformers {TINY_MODEL}",
    "crossval llama-cpp": f"crossval llama-cpp {TINY_MODEL}",
    "crossval onnxruntime": f"crossval onnxruntime {TINY_MODEL}",
    "bench kernels": "bench kernels --shape 64x64 --tokens 1 --repeats 1",
    "bench model": f"bench model {TINY_MODEL} --prompt 4 --new 2",
    "bench serve": "bench serve --requests 2 --rate 100 --new 2-2",
    "lab": "lab --no-launch --dir {folder}/notebooks",
    "grade NOTEBOOK": "grade notebooks/01_ternary_weights.ipynb",
}
SLOW = {
    "grade NOTEBOOK": "runs a notebook",
    "doctor": "seconds on an idle machine; tests/cli/test_doctor_command.py",
    "perplexity storyteller --text notebooks/alice.txt": "a whole book",
    "train scripts/training/tiny.toml --out tiny": "a minute",
    "bench kernels": "measures the speed of memory",
    "bench model": "measures the speed of memory",
    "bench serve": "measures an engine's capacity",
    "crossval onnxruntime": "writes and runs a model of ONNX",
}
NOT_RUN = {
    "verify REQUEST ANSWER": "tests/serving/test_verify.py runs it",  # only that its options exist is checked
    "serve [MODEL ...]": "test_serve_answers_as_its_help_says starts it",
    "bench model --synthetic 2b-4t": "a model of two billion parameters",
    "bench model --synthetic 2b-4t --head exact": "the same",
    "python scripts/benchmarks/models.py --synthetic 2b-4t --versus transformers": "the same, twice",
}
DIFFERS = {"crossval linear tests/crossval/numpy_layers.py:Truncates"}  # exit code 1: a layer that is wrong
NOT_OURS = {"python -m pip install .", 'python -m pip install -e ".[dev]"', "pytest"}  # .ci/run runs them


def shown_commands(page):
    """The commands as a page has them, without the program's name: a list for each line or row of a table."""
    groups = []
    for block in re.findall(r"^```console\n(.*?)^```", page, re.DOTALL | re.MULTILINE):
        groups += [line.removeprefix("$ ").split(" && ") for line in block.splitlines() if line.startswith("$ ")]
    prose = re.sub(r"^```.*?^```", "", page, flags=re.DOTALL | re.MULTILINE)
    first = ""
    for line in prose.splitlines():
        spans = re.findall(r"`([^`]+)`", line)
        group = []
        for number, span in enumerate(spans):
            if span.startswith(("bitnet-ref ", "python scripts/")):
                first = span
                group.append(span)
            elif span.startswith("... "):  # the options that are added to the command of the row above
                group.append(f"{first} {span.removeprefix('... ')}")
            elif number and line.startswith("| `bitnet-ref") and span.split()[0] in cli.commands:
                group.append(f"bitnet-ref {span}")  # in the list of a row
        groups.append(group)
    return [[each for span in group for each in alternatives(span)] for group in groups if group]


def alternatives(command):
    r"""["crossval backends", "crossval trace"] of r"bitnet-ref crossval backends\|trace\|..."."""
    words = command.split(" ")
    choice = next((word for word in words if r"\|" in word), None)
    if choice is None:
        return [command.removeprefix("bitnet-ref ")]
    names = [name for name in choice.split(r"\|") if name != "..."]
    return [" ".join(name if word is choice else word for word in words[1:]) for name in names]


GROUPS = list(dict.fromkeys(tuple(group) for page in (README, COMMANDS_PAGE) for group in shown_commands(page)))
COMMANDS = {command for group in GROUPS for command in group}


def group_params():
    """The commands that follow each other; those of a table's row also without the slow ones among them."""
    params = []
    for group in GROUPS:
        ours = [command for command in group if command not in NOT_OURS | NOT_RUN.keys()]
        has_slow = any(command in SLOW for command in ours)
        fast = [command for command in ours if command in EXAMPLES.keys() - SLOW.keys()] if has_slow else ours
        if fast:
            params.append(pytest.param(fast, id=fast[0]))
        if has_slow:
            params.append(pytest.param(ours, id=f"{ours[0]}, slow", marks=pytest.mark.slow))
    return params


def arguments_of(command, folder):
    return [word.replace("{folder}", str(folder)) for word in shlex.split(EXAMPLES.get(command, command))]


def parse(command):
    """Parse the command's options without running it. Raises UsageError."""
    node, words = cli, shlex.split(command)
    if words[0] == "python":
        node = getattr(benchmark_scripts, Path(words[1]).stem).main
        words = words[2:]
    while isinstance(node, click.Group):
        node = node.commands[words.pop(0)]
    words = [word for word in words if word.strip("[].") not in ("MODEL", "")]
    words = [__file__ if word in ("REQUEST", "ANSWER") else word for word in words]  # files that exist
    node.make_context(node.name, words, help_option_names=["-h", "--help"])  # as under the group: click keeps them


@pytest.fixture
def clone(tmp_path, monkeypatch):
    """The folder of a clone to work in, whose files are the repository's, and what the examples read."""
    monkeypatch.setenv("BITNET_REF_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("BITNET_REF_CUDA", raising=False)  # the emulated GPU has tests of its own
    for name in ("notebooks", "scripts", "bitnet_ref", "tests"):
        (tmp_path / name).symlink_to(ROOT / name)
    folder = tmp_path / "folder"
    folder.mkdir()
    write_checkpoint(folder / "model", BITNET)
    (folder / "text.txt").write_text("Once upon a time there was a little rabbit. " * 8)
    request = {
        "custom_id": "1",
        "method": "POST",
        "url": "/v1/completions",
        "body": {"prompt": "Once", "max_tokens": 2},
    }
    (folder / "in.jsonl").write_text(json.dumps(request) + "\n")
    (folder / "data.json").write_text(json.dumps({"q": "Once upon a", "choices": [" time", " of"]}) + "\n")
    (folder / "tiny.yaml").write_text(CHOICE.replace("DATA", str(folder / "data.json")))
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.chdir(tmp_path)
    return folder


@pytest.mark.thorough
@pytest.mark.parametrize("commands", group_params())
def test_commands_run(commands, clone):
    unavailable = []
    for command in commands:
        if command == "crossval trace":  # of a trace that an engine wrote
            recorded = ["crossval", "record", str(TINY_MODEL), f"{clone}/trace.safetensors", "--tokens", "1,5"]
            assert CliRunner().invoke(cli, recorded).exit_code == 0
        result = CliRunner().invoke(cli, arguments_of(command, clone), input="Hello\n")
        if result.exit_code == 4 and re.search(r"not installed|pip install", result.output):
            unavailable.append(f"{command}: {result.output.strip().splitlines()[-1]}")
            continue
        assert result.exit_code == int(command in DIFFERS), f"bitnet-ref {command}: {result.output}"
        assert result.output
    if len(unavailable) == len(commands):
        pytest.skip("; ".join(unavailable))


@pytest.mark.parametrize("command", NOT_RUN)
def test_commands_that_are_not_run_have_these_options(command):
    parse(command)
    with pytest.raises(click.UsageError):
        parse(f"{command} --no-such-option")


def test_the_tables_above_are_of_these_pages():
    assert EXAMPLES.keys() | SLOW.keys() | NOT_RUN.keys() | DIFFERS | NOT_OURS <= COMMANDS
    for command, example in EXAMPLES.items():
        fixed = [word for word in command.split() if not re.match(r"[A-Z]", word)]
        assert [word for word in shlex.split(example) if word in fixed] == fixed, f"{example} is not {command}"


def test_every_command_is_in_the_page_of_commands():
    ours = {command.split()[0] for group in shown_commands(COMMANDS_PAGE) for command in group}
    assert ours == cli.commands.keys()


def test_the_first_text_is_the_one_that_readme_shows():
    (words,) = re.findall(r"install . && bitnet-ref (generate .*)", README)
    result = CliRunner().invoke(cli, shlex.split(words))
    assert f"```text\n{result.stdout}" in README


def test_python_runs(clone):
    blocks = re.findall(r"^```python\n(.*?)^```", README, re.DOTALL | re.MULTILINE)
    assert blocks
    for block in blocks:
        out, names = io.StringIO(), {}
        with contextlib.redirect_stdout(out):
            exec(compile(block, "README.md", "exec"), names)
        assert out.getvalue()
    shown_shape = re.search(r"hook_acc_int32\"\]  # (\(\d+, \d+\))", README)
    assert str(names["seen"]["blocks.0.attn.q_proj.hook_acc_int32"].shape) == shown_shape[1]


@pytest.mark.thorough
@pytest.mark.skipif(shutil.which("curl") is None or shutil.which("bash") is None, reason="needs curl and bash")
def test_serve_answers_as_its_help_says(tmp_path):
    """The lines of `bitnet-ref serve --help`, pasted into a shell, on a free port."""
    pytest.importorskip("uvicorn", reason="uvicorn is not installed")
    lines = cli.commands["serve"].help.split("\b\n")[1]
    assert "localhost:8000/" in lines
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    lines = lines.replace("serve &", f"serve --port {port} &").replace(":8000", f":{port}")
    program = f'bitnet-ref() {{ exec {shlex.quote(sys.executable)} -m bitnet_ref.cli "$@"; }}\n'
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    with subprocess.Popen(
        ["bash", "-c", f"{program}{lines}\nkill %1; wait"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path},
        start_new_session=True,
    ) as shell:
        try:
            out, err = shell.communicate(timeout=60)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(shell.pid, signal.SIGKILL)
    answers = [line for line in out.decode().splitlines() if line.startswith("{")]
    assert answers, err.decode()
    answer = json.loads(answers[0])
    assert (answer["model"], bool(answer["choices"][0]["text"])) == ("storyteller", True)


# -- docs --------------------------------------------------------------------------------------------------------------

DOCS = [*sorted(ROOT.glob("docs/*.md")), ROOT / "crossval" / "README.md", ROOT / "notebooks" / "README.md"]
OTHER_PAGES = [*ROOT.glob("docs/cases/*.md"), *ROOT.glob("bitnet_ref/assets/*/README.md"), ROOT / "CONTRIBUTING.md"]
# Words of the docs' commands, and what stands in their place here.
STAND_INS = {
    "MODEL": "storyteller",
    "models/2B-4T": "storyteller",
    "Qwen3-Embedding": "storyteller",
    "wiki.test.raw": "{folder}/text.txt",
    "requests.jsonl": "{folder}/in.jsonl",
    "my_layers.py:BitLinear": "tests/crossval/numpy_layers.py:BitLinear",
    "my_run.safetensors": "{folder}/right.safetensors",
    "right.safetensors": "{folder}/right.safetensors",
    "runs": "{folder}/right.safetensors",
    "my_task": "tiny_choice",
    "arc_easy,hellaswag,piqa": "tiny_choice --include {folder}",
    "my_tasks/": "{folder}",
    "NAME=MODEL": "name=storyteller",
}
TRAINING = (ROOT / "docs/training.md").read_text(encoding="utf-8")
RUN, TERNARY = re.findall(r"^```toml\n(\[model\].*?|\[data\]\ninit.*?)^```", TRAINING, re.DOTALL | re.MULTILINE)
SHORTER = {"generate": "--max-tokens 2", "train": "--steps 1", "perplexity --text wiki.test.raw": "--length 16"}
SHORTER |= {"lab": "--no-launch", "train-tokenizer": "--vocab 400"}
NOT_RUN_IN_DOCS = {
    "doctor": "tests/cli/test_doctor_command.py",
    "grade": "tests/cli/test_grade_command.py",
    "eval": "the README's, above",
    "serve": "serves until it is stopped; test_serve_answers_as_its_help_says",
    "batch requests.jsonl answers.jsonl --model models/2B-4T --workers 4": "tests/serving/test_batch.py",
    "batch requests.jsonl answers.jsonl --model /models/2B-4T --dask": "the same",
    "crossval trace storyteller wrong.safetensors": "tests/crossval/test_readme.py",
    "crossval watch -- ./my_engine my_run.safetensors": "tests/crossval/test_crossval_command.py",
    "crossval backends storyteller --html report.html": "the README's",
    "crossval matrix storyteller FOLDER --python llama-cpp=PATH --out table.md": "tests/crossval/test_matrix.py",
    "crossval onnxruntime storyteller": "tests/crossval/test_engines.py",
    "crossval transformers storyteller --python PATH": "the same",
    "crossval llama-cpp storyteller --python PATH": "the same",
    "crossval llama-cpp model.gguf --python PATH": "tests/crossval/test_own_gguf.py",
    "crossval bitnet-cpp model.gguf build/bin/llama-cli": "tests/crossval/test_bitnet_cpp.py",
    "crossval tokens storyteller runs.json": "tests/crossval/test_given_tokens.py",
    "crossval openai": "tests/crossval/test_openai.py",
    "verify request.json answer.json": "tests/test_serving_docs.py",
    "train lora.toml": "tests/training/test_lora.py",
    'generate "Once upon a time" --model adapted/adapter': "the same",
    "crossval verify receipt.json": "tests/crossval/test_matrix.py",
    "crossval sample draws.npz": "tests/crossval/test_sampling_rules.py",
}


def commands_of(path):
    """The commands of a page's console blocks, without comments."""
    blocks = re.findall(r"^```console\n(.*?)^```", path.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    lines = [line.partition("  # ")[0][2:].strip() for block in blocks for line in block.splitlines()]
    return [
        each.removeprefix("bitnet-ref ") for line in lines for each in line.split(" && ") if "bitnet-ref " in each[:11]
    ]


def unknown_name(command):
    """The subcommand or option in a command line that does not exist, or None."""
    node, words = cli, command.split()
    while isinstance(node, click.Group) and words and not words[0].startswith("-"):
        names = words.pop(0).replace(r"\|", "|").split("|")
        if unknown := [name for name in names if name not in node.commands and name != "..."]:
            return None if unknown == ["..."] else unknown[0]
        node = node.commands[names[0]]
    options = {option for param in node.params for option in (*param.opts, *param.secondary_opts)} | {"--help"}
    named = [re.split(r"[=\].]", word.lstrip("["))[0] for word in words[: [*words, "--"].index("--")]]
    return next((word for word in named if word.startswith("--") and word not in options), None)


def test_every_command_in_the_docs_exists():
    commands = []
    for path in (*DOCS, *OTHER_PAGES, ROOT / "README.md"):
        text = path.read_text(encoding="utf-8")
        commands += re.findall(r"`bitnet-ref ([^`]+)`", text) + commands_of(path)
    assert len(commands) > 120
    assert [command for command in commands if unknown_name(command)] == []
    assert unknown_name("crossval tracy x") == "tracy"
    assert unknown_name("generate --no-such-option") == "--no-such-option"


def is_run(command):
    return not any(command.startswith(each) for each in NOT_RUN_IN_DOCS)


def docs_with_commands():
    paths = [path for path in DOCS if any(map(is_run, commands_of(path)))]
    return [pytest.param(each, marks=pytest.mark.thorough if each.stem == "crossval" else ()) for each in paths]


@pytest.mark.thorough
@pytest.mark.parametrize("path", docs_with_commands(), ids=lambda p: p.stem)
def test_commands_of_the_docs_run(path, clone):
    (clone.parent / "stories.txt").write_text((ROOT / "notebooks/alice.txt").read_text()[:6_000])
    (clone.parent / "lines.txt").write_text("a red boat\ntax law\n")
    (clone.parent / "run.toml").write_text(RUN.replace("vocab_size = 4096", "vocab_size = 400"))
    smaller = TERNARY.replace("SmolLM2-135M", "run/model").replace("context = 256", "context = 128")
    (clone.parent / "ternary.toml").write_text(smaller)
    recorded = ["crossval", "record", "storyteller", f"{clone}/right.safetensors", "--tokens", "1,5"]
    if any("my_run" in command for command in commands_of(path)):
        assert CliRunner().invoke(cli, recorded).exit_code == 0
    for command in filter(is_run, commands_of(path)):
        words = " ".join(STAND_INS.get(word, word) for word in command.split(" "))
        words += "".join(f" {more}" for start, more in SHORTER.items() if set(start.split()) <= set(command.split()))
        result = CliRunner().invoke(cli, shlex.split(words.replace("{folder}", str(clone))))
        if result.exit_code == 4 and re.search(r"not installed|pip install|not available", result.output):
            continue
        assert result.exit_code == int(command in DIFFERS), f"bitnet-ref {words}: {result.output}"


def test_the_exceptions_are_of_the_docs():
    commands = [command for path in DOCS for command in commands_of(path)]
    for start in (*NOT_RUN_IN_DOCS, *DIFFERS):
        assert any(command.startswith(start) for command in commands), start
