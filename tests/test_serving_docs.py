"""docs/serving.md, clients.md and operating.md: their commands and their Python run, their settings can be read."""

import contextlib
import importlib
import io
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import click
import pytest

from bitnet_ref.cli import cli
from bitnet_ref.serving import EngineConfig

pytest.importorskip("uvicorn", reason="uvicorn is not installed")

ROOT = Path(__file__).parents[1]
PAGES = ("serving", "clients", "operating")
TEXTS = {page: (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8") for page in PAGES}
SERVE = "bitnet-ref serve storyteller storychat"  # the server that the other commands ask


def blocks(page, language):
    return re.findall(rf"^```{language}\n(.*?)^```", TEXTS[page], re.DOTALL | re.MULTILINE)


def commands(page):
    """Each command of the page's console blocks, with the lines that continue it."""
    return [each.strip() for block in blocks(page, "console") for each in re.split(r"^\$ ", block, flags=re.M)[1:]]


def serve_options(command):
    """The options of a `serve` command. Raises UsageError."""
    words = shlex.split(command.partition("bitnet-ref serve")[2])
    return cli.commands["serve"].make_context("serve", words)


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    """Of the server that docs/serving.md starts, on a free port."""
    command = [sys.executable, "-m", "bitnet_ref", *shlex.split(SERVE)[1:], "--port", "0", "--json"]
    home = {"BITNET_REF_HOME": str(tmp_path_factory.mktemp("home"))}
    with subprocess.Popen(command, stdout=-1, stderr=-3, text=True, cwd=ROOT, env={**os.environ, **home}) as server:
        try:
            yield json.loads(server.stdout.readline())["url"].removesuffix("/v1")
        finally:
            server.terminate()


def run(command, folder, address):
    """What the command prints in bash."""
    program = f'bitnet-ref() {{ {shlex.quote(sys.executable)} -m bitnet_ref "$@"; }}'
    text = command.replace("http://127.0.0.1:8000", address).replace("curl ", "curl -sS --fail-with-body ")
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path, "BITNET_REF_HOME": str(folder / "home")}
    shell = ["bash", "-c", f"{program}\n{text}"]
    done = subprocess.run(shell, capture_output=True, text=True, cwd=folder, env=environment, timeout=120)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.mark.thorough
@pytest.mark.parametrize("page", PAGES)
def test_commands(page, tmp_path, address):
    """Those that start a server and install packages are looked at by the next tests."""
    body = {"prompt": "Once", "max_tokens": 2}
    line = {"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": body}
    (tmp_path / "requests.jsonl").write_text(json.dumps(line) + "\n")
    for command in commands(page):
        if "bitnet-ref serve" in command or command.startswith("pip "):
            continue
        out = run(command, tmp_path, address)
        if command.startswith("curl -N"):
            assert out.rstrip().endswith("data: [DONE]")
        elif "json_schema" in command:
            content = json.loads(out)["choices"][0]["message"]["content"]
            assert json.loads(content)["colour"] in ("red", "green")
        elif command.startswith("curl ") and "metrics" not in command and " -o " not in command:
            assert json.loads(out)
    if page == "serving":
        assert json.loads((tmp_path / "answers.jsonl").read_text())["response"]["status_code"] == 200


def test_commands_that_start_a_server():
    shown = [command for page in PAGES for command in commands(page) if "bitnet-ref serve" in command]
    assert SERVE in shown
    for command in shown:
        serve_options(command)
        with pytest.raises(click.UsageError):
            serve_options(f"{command} --no-such-option")
    (service,) = re.findall(r"^ExecStart=(.*)$", TEXTS["operating"], re.M)
    serve_options(service)
    words = [json.loads(each) for each in re.findall(r"^(?:ENTRYPOINT|CMD) (.*)$", TEXTS["operating"], re.M)]
    serve_options(shlex.join([*words[0], *words[1]]))


def test_what_is_installed():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    shown = [command for page in PAGES for command in commands(page) if command.startswith("pip ")]
    assert shown
    for command in shown:
        assert set(re.search(r"(?:bitnet-ref|\.)\[(.*)\]", command)[1].split(",")) <= extras.keys()


@pytest.mark.sample(2)
@pytest.mark.parametrize(("page", "number"), [(page, n) for page in PAGES for n in range(len(blocks(page, "python")))])
def test_python(page, number, address):
    code = blocks(page, "python")[number].replace("http://127.0.0.1:8000", address)
    for name in re.findall(r"^(?:import|from) (\w+)", code, re.MULTILINE):
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module(name)
            continue
        pytest.skip(f"{name} is not installed")
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(code, f"docs/{page}.md", "exec"), {"__name__": "__main__"})
    assert out.getvalue()


def test_settings_can_be_read(tmp_path):
    (engine,) = blocks("operating", "toml")
    (tmp_path / "engine.toml").write_text(engine)
    config = EngineConfig.load(tmp_path / "engine.toml")
    assert (config.fallback, config.sampling) == (("numpy",), {"max_tokens": 128})
    (codex,) = blocks("clients", "toml")
    settings = tomllib.loads(codex)
    assert settings["model_providers"][settings["model_provider"]]["wire_api"] == "responses"
    zed, edits = map(json.loads, blocks("clients", "json"))
    assert zed["language_models"]["openai_compatible"]
    assert edits["edit_predictions"]["open_ai_compatible_api"]["api_url"].endswith("/v1/completions")
    yaml = pytest.importorskip("yaml")
    (continued,) = blocks("clients", "yaml")
    assert yaml.safe_load(continued)["models"][0]["provider"] == "openai"


@pytest.mark.thorough
def test_every_option_of_the_server_is_explained():
    (table,) = re.findall(r"^## Options\n(.*?)^## ", TEXTS["operating"], re.DOTALL | re.MULTILINE)
    names = {name for param in cli.commands["serve"].params for name in param.opts if name.startswith("--")}
    assert names - {"--help"} <= set(re.findall(r"`(--[\w-]+)`", table))
