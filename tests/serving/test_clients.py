"""Real clients of every API, each in a virtual environment of its own, against a server of this process.

client_scripts.py and clients.mjs say what each of them does. BITNET_REF_CLIENTS is a folder for the environments, which
then stay for the next run.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import client_scripts
import pytest
from helpers import chat_folder
from server_runs import RunningServer

HERE = Path(__file__).parent
CLIENTS_GUIDE = HERE.parents[1] / "docs" / "clients.md"
PACKAGES = {
    "openai": ("openai", "pydantic"),
    "anthropic": ("anthropic",),
    "ollama": ("ollama",),
    "agents": ("openai-agents",),
    "langchain": ("langchain-openai",),
    "llama_index": ("llama-index-llms-openai-like",),
    "pydantic_ai": ("pydantic-ai-slim[openai]",),
    "dspy": ("dspy",),
    "instructor": ("instructor",),
    "outlines": ("outlines", "openai"),
    "guidance": ("guidance", "openai"),
    "litellm": ("litellm",),
    "llm": ("llm",),
    "lm_eval": ("lm-eval[api]",),
    "guidellm": ("guidellm", "torch==2.13.0"),
    "open_webui": ("open-webui", "torch==2.13.0"),
}
NODE_PACKAGES = {
    "vercel": ("ai", "@ai-sdk/openai", "zod"),
    "vercel_compatible": ("ai", "@ai-sdk/openai-compatible", "zod"),
    "openai": ("openai",),
}
TEMPLATE = (
    "{{ bos_token }}{% for t in tools or [] %}{{ t.function.name }} {% endfor %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
PROMPTFOO = """\
prompts: ["Say {{word}}"]
providers:
  - id: openai:chat:talker
    config: {apiBaseUrl: URL/v1, apiKey: any, max_tokens: 8, temperature: 0}
  - id: openai:responses:talker
    config: {apiBaseUrl: URL/v1, apiKey: any, max_output_tokens: 60, temperature: 0}
tests:
  - vars: {word: hello}
    assert: [{type: javascript, value: output.length > 0}]
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = chat_folder(tmp_path_factory.mktemp("clients"))
    config = json.loads((folder / "config.json").read_text())
    config["max_position_embeddings"] = 32768  # agents and adapters have long system texts
    (folder / "config.json").write_text(json.dumps(config))
    settings = {"sampling": {"stop": ["."]}, "cache_tokens": 32768}  # replies that end, as clients expect of them
    with RunningServer({"talker": folder}, chat_template=TEMPLATE, settings=settings) as running:
        yield running


@pytest.fixture(scope="module")
def environments(tmp_path_factory):
    kept = os.environ.get("BITNET_REF_CLIENTS")
    return Path(kept) if kept else tmp_path_factory.mktemp("environments")


def run(command, *, timeout_s, **options):
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False, **options)


def install(command, folder, **options):
    """Skip with the reason where the packages cannot be installed."""
    try:
        result = run(command, timeout_s=900, **options)
    except (OSError, subprocess.TimeoutExpired) as problem:
        result = None
        reason = str(problem)
    if result is None or result.returncode:
        shutil.rmtree(folder, ignore_errors=True)
        pytest.skip(f"cannot be installed: {(reason if result is None else result.stderr.strip())[-300:]}")


def install_for_node(folder, packages):
    if shutil.which("npm") is None or shutil.which("node") is None:
        pytest.skip("node and npm are not installed")
    if all((folder / "node_modules" / package).exists() for package in packages):
        return
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "package.json").write_text('{"private": true, "type": "module"}')
    install(["npm", "install", "--no-audit", "--no-fund", *packages], folder, cwd=folder)


def check_client(command, cwd=None, timeout_s=300, **variables):
    """Run it with these environment variables.   -> what it printed"""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | variables
    result = run(command, timeout_s=timeout_s, env=environment, cwd=cwd, stdin=subprocess.DEVNULL)
    assert result.returncode == 0, result.stdout + result.stderr
    return result


@pytest.mark.slow
@pytest.mark.parametrize("name", PACKAGES)
def test_a_python_client(server, environments, name):
    pytest.importorskip("llguidance")
    folder = environments / name
    python = folder / "bin" / "python"
    if not python.exists():
        install([sys.executable, "-m", "venv", str(folder)], folder)
        install([str(python), "-m", "pip", "install", "--quiet", "--no-input", *PACKAGES[name]], folder)
    check_client([str(python), str(HERE / "client_scripts.py"), name, server.url], timeout_s=600)


@pytest.mark.slow
@pytest.mark.parametrize("name", NODE_PACKAGES)
def test_a_client_for_node(server, environments, name):
    pytest.importorskip("llguidance")
    folder = environments / "node"
    install_for_node(folder, NODE_PACKAGES[name])
    script = folder / "clients.mjs"
    shutil.copy(HERE / script.name, script)  # node looks for packages beside it
    check_client(["node", str(script), name, server.url], cwd=folder)


@pytest.mark.slow
def test_promptfoo(server, environments):
    folder = environments / "promptfoo"
    install_for_node(folder, ("promptfoo",))
    (folder / "promptfooconfig.yaml").write_text(PROMPTFOO.replace("URL", server.url))
    options = ("--no-cache", "--no-table", "--no-progress-bar", "-o", "out.json")
    check_client(["npx", "promptfoo", "eval", "-c", "promptfooconfig.yaml", *options], cwd=folder)
    stats = json.loads((folder / "out.json").read_text())["results"]["stats"]
    assert (stats["successes"], stats["failures"], stats["errors"]) == (2, 0, 0)


def settings_of_guide(language, server):
    """What docs/clients.md shows for this server and its model."""
    (block,) = re.findall(rf"^```{language}\n(.*?)^```", CLIENTS_GUIDE.read_text(), re.DOTALL | re.MULTILINE)
    return block.replace("NAME", "talker").replace("http://127.0.0.1:8000", server.url)


@pytest.mark.slow
def test_continue(server, environments, tmp_path):
    """Its command line: its system text and tools, and a reply by chats."""
    folder = environments / "continue"
    install_for_node(folder, ("@continuedev/cli",))
    (tmp_path / "config.yaml").write_text(settings_of_guide("yaml", server))
    command = [str(folder / "node_modules" / ".bin" / "cn"), "--config", str(tmp_path / "config.yaml"), "-p", "Hello"]
    home = {"HOME": str(tmp_path), "CONTINUE_GLOBAL_DIR": str(tmp_path)}
    assert check_client(command, cwd=tmp_path, **home).stdout.strip()


@pytest.mark.slow
def test_codex(server, environments, tmp_path):
    """Its system text and tools, some 7,000 tokens, and a reply by responses."""
    folder = environments / "codex"
    install_for_node(folder, ("@openai/codex",))
    (tmp_path / "config.toml").write_text(settings_of_guide("toml", server))
    command = [str(folder / "node_modules" / ".bin" / "codex"), "exec", "--skip-git-repo-check", "-s", "read-only"]
    done = check_client([*command, "Hello"], cwd=tmp_path, CODEX_HOME=str(tmp_path))
    assert done.stdout.strip(), done.stderr


@pytest.mark.slow
def test_claude_code(server, environments, tmp_path):
    """Its system text and tools, and a reply by messages."""
    folder = environments / "claude_code"
    package = folder / "node_modules" / "@anthropic-ai" / "claude-code"
    install_for_node(folder, ("@anthropic-ai/claude-code",))
    install(["node", "install.cjs"], folder, cwd=package)  # npm runs no scripts of packages unless it is told
    program = shlex.quote(str(folder / "node_modules" / ".bin" / "claude"))
    script = settings_of_guide("sh", server).replace("\nclaude\n", f'\n{program} -p "Hello"\n')
    quiet = {"CLAUDE_CONFIG_DIR": str(tmp_path), "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1"}
    assert check_client(["bash", "-c", script], cwd=tmp_path, **quiet).stdout.strip()


def test_every_client_has_its_packages():
    assert {f"use_{name}" for name in PACKAGES} == {name for name in vars(client_scripts) if name.startswith("use_")}
