"""Real clients of every API, each in a virtual environment of its own, against a server of this process.

`clients/NAME_client.py` says what each of them does. BITNET_REF_CLIENTS is a folder for the environments, which then
stay for the next run.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import chat_folder
from server_runs import RunningServer

SCRIPTS = Path(__file__).parent / "clients"
PACKAGES = {
    "openai": ("openai", "pydantic"),
    "anthropic": ("anthropic",),
    "ollama": ("ollama",),
    "agents": ("openai-agents",),
    "langchain": ("langchain-openai",),
    "instructor": ("instructor",),
    "pydantic_ai": ("pydantic-ai-slim[openai]",),
    "llm": ("llm",),
    "litellm": ("litellm",),
}
NODE_PACKAGES = ("ai", "@ai-sdk/openai", "zod")
TEMPLATE = (
    "{{ bos_token }}{% for t in tools or [] %}{{ t.function.name }} {% endfor %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    sources = {"talker": chat_folder(tmp_path_factory.mktemp("clients"))}
    settings = {"sampling": {"stop": ["."]}}  # replies that end, as clients expect of them
    with RunningServer(sources, chat_template=TEMPLATE, settings=settings) as running:
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
        result = run(command, timeout_s=600, **options)
    except (OSError, subprocess.TimeoutExpired) as problem:
        result = None
        reason = str(problem)
    if result is None or result.returncode:
        shutil.rmtree(folder, ignore_errors=True)
        pytest.skip(f"cannot be installed: {(reason if result is None else result.stderr.strip())[-300:]}")


def check_client(command, server, **options):
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    result = run(command, timeout_s=300, env={**environment, "SERVER": server.url}, **options)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("name", PACKAGES)
def test_a_python_client(server, environments, name):
    pytest.importorskip("llguidance")
    folder = environments / name
    python = folder / "bin" / "python"
    if not python.exists():
        install([sys.executable, "-m", "venv", str(folder)], folder)
        install([str(python), "-m", "pip", "install", "--quiet", "--no-input", *PACKAGES[name]], folder)
    check_client([str(python), str(SCRIPTS / f"{name}_client.py")], server)


def test_vercels_client(server, environments):
    pytest.importorskip("llguidance")
    if shutil.which("npm") is None or shutil.which("node") is None:
        pytest.skip("node and npm are not installed")
    folder = environments / "node"
    if not (folder / "node_modules" / "ai").exists():
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "package.json").write_text('{"private": true, "type": "module"}')
        install(["npm", "install", "--no-audit", "--no-fund", *NODE_PACKAGES], folder, cwd=folder)
    script = folder / "vercel_client.mjs"
    shutil.copy(SCRIPTS / script.name, script)  # node looks for packages beside it
    check_client(["node", str(script)], server, cwd=folder)
